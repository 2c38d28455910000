"""The one rule for error: may a result differ this much from the formula in float64?

The doctor, the tests and the benchmarks share `judge`. Beside it stand the functions that say, for each op, how large
the terms are that are summed up in each element of a result: `attention_terms` and the others. They are numbers of the
problem, computed in float64, and say nothing about an implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class ErrorCheck(NamedTuple):
    """The comparison that came closest to its bound, or went furthest past it."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """error / bound; 1 is the limit, 0 is exact."""
        return self.error / self.bound if self.bound > 0 else (0.0 if self.error == 0 else float("inf"))


def check_error(actual: Tensor, truth: Tensor, low: Tensor, terms: Tensor) -> ErrorCheck:
    """Is `actual` as near to `truth` as a method that rounds to its dtype can be expected to come?

    actual: the result under test. truth: the same result from the reference formula in float64. low: the same from the
    plain formula run in the tested dtype; low and actual have one dtype. terms: T, the size of the terms that are
    summed up in each element, before they cancel. All four have one shape.

    With u = eps / 2 of the dtype, both by the largest element and by the root mean square over all elements,
        error(actual)  <=  2 * error(low)  +  u * |truth|  +  c * u * T,     c = 1 for 16 bits, 8 for float32 and more
    that is: twice the error of the plain formula, one rounding of the result, and what rounding each term once must
    leave (float32 also rounds the products, hence c). Without T the bound would be zero where the plain formula is
    exact by cancellation, for example where a query attends to a single key, and no method that stores 16 bits could
    keep it. Below the normal numbers a rounding is that of the smallest normal one.

    An element where truth, rounded to the dtype, is +-inf must be exactly that infinity. NaN never passes. An element
    that is not finite in `low` where truth is (the plain formula overflowed) adds nothing to the bound.
    Returns the (error, bound) with the larger error / bound; an infinity or NaN out of place gives error inf.
    Raises ValueError when shapes or dtypes differ or truth has a NaN.
    """
    if not actual.shape == truth.shape == low.shape == terms.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (actual, truth, low, terms))
        raise ValueError(f"shapes of actual, truth, low, terms differ: {shapes}")
    if actual.dtype != low.dtype:
        raise ValueError(f"dtypes differ: actual {actual.dtype}, low {low.dtype}")
    if actual.numel() == 0:
        return ErrorCheck(0.0, 0.0)
    truth, terms, low = (t.detach().to(actual.device) for t in (truth.double(), terms.double(), low))
    actual = actual.detach()
    if truth.isnan().any():
        raise ValueError("truth has a NaN; it cannot judge anything")
    finfo = torch.finfo(actual.dtype)
    u = finfo.eps / 2
    c = 1 if finfo.bits == 16 else 8
    rounded = truth.to(actual.dtype)
    infinite = rounded.isinf()

    error = (actual.double() - truth).masked_fill(infinite, 0).abs()
    error_low = (low.double() - truth).masked_fill(infinite | ~low.isfinite(), 0).abs()
    rounding = u * truth.masked_fill(infinite, 0).abs().clamp_min(finfo.smallest_normal)
    of_terms = c * u * terms.masked_fill(infinite, 0).nan_to_num(0)

    def bound(size) -> float:
        return (2 * size(error_low) + size(rounding) + size(of_terms)).item()

    if (infinite & (actual != rounded)).any() or not error.isfinite().all():
        return ErrorCheck(float("inf"), bound(torch.max))
    judgements = (ErrorCheck(size(error).item(), bound(size)) for size in (torch.max, _rms))
    return max(judgements, key=lambda judgement: judgement.ratio)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def root_sum_of_squares(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(sum_k a_ik^2 b_kj^2): the size of the terms of the matrix product a b."""
    return (a.square() @ b.square()).sqrt()


def attention_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    visible: Tensor,
    bias: Tensor | None,
    multiplier: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """T of out, lse, weights, dq, dk, dv and dbias (where there is a bias), float64.

    q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv), dout (B, H, Lq, Dv), dlse (B, H, Lq) or None; visible: bool,
    broadcastable to (B, H, Lq, Lk); bias likewise, or None; multiplier: 0 where dropout drops, else 1 / (1 - p).

    With P the softmax, Z the multiplier, dP = Z (dout v^T), delta = sum_j P dP, rss = root_sum_of_squares:
        T_S    = scale rss(q, k^T) + |bias|                        T_lse = |lse| + sum_j P T_S
        T_out  = rss(P Z, v)                                       R = P (1 + (T_S + T_lse) u32 / u)
        T_weights = R Z                                            T_dv = rss((R Z)^T, dout)
        T_dq   = scale (rss(W, k) + D |P k|)                       T_dk = scale (rss(W^T, q) + rss((P D)^T, q))
        T_dbias = root sum of squares, over what the bias is broadcast over, of W + P D + P Z rss(dout, v^T)
        W = R (|dP| + |delta| + |dlse|)                            D_i = sqrt(sum_d (out_id dout_id)^2)
    R stands for weights that are made again from S and lse, exp(S - lse), as tiled algorithms must: the absolute errors
    of S and lse, which are float32 for all dtypes (u32), become a relative error of the weight.
    D stands for the error of delta, which is common to a row; it is added linearly, the others as independent errors.
    """
    of_float32 = torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps if q.dtype.itemsize < 8 else 1.0
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    heads, group = q.shape[1], q.shape[1] // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    rss = root_sum_of_squares
    scores = scale * (q @ k.mT)
    size = abs(scale) * rss(q, k.mT)
    if bias is not None:
        bias = bias.double()
        scores = scores + bias
        size = size + bias.abs().masked_fill(bias.isinf(), 0)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = (
        scores.logsumexp(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    )
    p = (scores - lse.masked_fill(lse.isinf(), 0)).exp().masked_fill(lse.isinf(), 0)
    kept = p * multiplier
    t_lse = lse.abs().nan_to_num(posinf=0) + (p * size).sum(-1, keepdim=True)
    made_again = p * (1 + of_float32 * (size + t_lse))
    dp = (dout @ v.mT) * multiplier
    delta = (dp * p).sum(-1, keepdim=True)
    of_row = delta.abs() if dlse is None else delta.abs() + dlse.double().abs()[..., None]
    w = made_again * (dp.abs() + of_row)
    d = ((kept @ v) * dout).square().sum(-1, keepdim=True).sqrt()

    def of_group(t: Tensor) -> Tensor:
        """Query heads that share a key head add up."""
        return t.square().unflatten(1, (heads // group, group)).sum(2).sqrt()

    terms = {
        "out": rss(kept, v),
        "lse": t_lse.squeeze(-1),
        "weights": made_again * multiplier,
        "dq": abs(scale) * (rss(w, k) + d * (p @ k).abs()),
        "dk": of_group(abs(scale) * (rss(w.mT, q) + rss((p * d).mT, q))),
        "dv": of_group(rss((made_again * multiplier).mT, dout)),
    }
    if bias is not None:
        of_bias = w + p * d + p * multiplier * rss(dout, v.mT)
        terms["dbias"] = of_bias.square().sum_to_size(bias.shape).sqrt()
    return terms


def decode_attention_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    ancestors: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """T of decode_attention's out (B, W, H, Dv), float64: rss(P, v) over the keys of each query, as in attention_terms.

    Arguments as the op's.
    """
    (B, W, H, D), (M, R, Hk) = query.shape, key.shape[1:4]
    if ancestors is None:
        ancestors = torch.arange(W).expand(B, W).unsqueeze(-1).expand(B, W, M) * (R > 1)
    ancestors = ancestors.to(query.device)
    visible = (ancestors >= 0) & (ancestors < R)
    if lengths is not None:
        visible = visible & (torch.arange(M, device=query.device) < lengths[:, None, None])
    rows = ancestors.long().clamp(0, R - 1)[..., None, None]

    def of_queries(t: Tensor) -> Tensor:
        """(B, M, R, Hk, d) -> (B, W, H, M, d)"""
        t = t.double().transpose(1, 2)
        t = t.gather(1, rows.expand(B, W, M, Hk, t.shape[4])).where(visible[..., None, None], 0)
        return t.transpose(2, 3).repeat_interleave(H // Hk, dim=2)

    scores = (of_queries(key) @ query.double()[..., None])[..., 0] * (D**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    weights = scores.softmax(-1).where(visible.any(-1)[:, :, None, None], 0)
    return root_sum_of_squares(weights[..., None, :], of_queries(value))[..., 0, :]


def add_layer_norm_terms(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    dout: Tensor,
    dz: Tensor | None,
    multiplier: Tensor,
    eps: float,
    eps_on_std: bool = False,
) -> dict[str, Tensor]:
    """T of out, z, dx, dresidual, dweight, and of dbias and dx_bias where there are such, float64.

    x, residual, dout, dz (rows, hidden); weight, bias, x_bias (hidden,); no bias: RMSNorm. multiplier (rows, hidden): 0
    where dropout drops, else 1 / (1 - p). Size is the root sum of squares, mean_size(t) = Size of t / hidden in a row.

        T_z   = Size(Z x, Z x_bias, residual, z)
        T_n   = Size(n, rstd T_z, rstd mean_size(T_z))               of n = (z - mean) rstd
        T_out = Size(weight T_n, bias)                               with g = dout weight, m = mean(g n):
        T_dresidual = Size(rstd g, rstd mean(g), rstd mean_size(g), rstd m T_n, rstd n mean_size(g T_n), dz, dresidual)
        T_dx  = Z T_dresidual          T_dx_bias = Size over rows of T_dx
        T_dweight = Running(dout n, dout T_n)                        T_dbias = Running(dout, dout)
    z and dresidual are among their own terms, as they are rounded before they are used again. PyTorch's own backward
    adds rows one after the other in the dtype of weight, which rounds each running sum: Running(t, size) is the Size of
    the sums of the first k rows of t, for every k, plus that of the terms in these sums. In RMSNorm the terms of both
    subtracted means are missing. Where weight or x_bias is float32 and x is not, z is still rounded to x's dtype:
    T_dweight and T_dx_bias are then in float32's units, see `_in_units_of`. With eps_on_std rstd is 1 / (std + eps),
    and m and mean_size(g T_n) are multiplied by the ratio (std + eps) / std * hidden / (hidden - 1), 0 where std is 0.
    """
    in_units_of = partial(_in_units_of, rounded_to=x.dtype)
    weight_dtype = weight.dtype
    x, weight, dout = x.double(), weight.double(), dout.double()
    z_terms = [multiplier * x]
    if x_bias is not None:
        z_terms.append(multiplier * x_bias.double())
    if residual is not None:
        z_terms.append(residual.double())
    z = sum(z_terms)
    z_size = _size(*z_terms, z)
    is_rms = bias is None
    centred = z if is_rms else z - z.mean(-1, keepdim=True)
    ratio = 1.0
    if eps_on_std:
        std, hidden = z.std(-1, keepdim=True), z.shape[-1]
        rstd = 1 / (std + eps)
        ratio = ((std + eps) / std * hidden / (hidden - 1)).where(std > 0, 0)
    else:
        rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    n = centred * rstd
    n_terms = [n, rstd * z_size]
    if not is_rms:
        n_terms.append(rstd * _mean_size(z_size))
    n_size = _size(*n_terms)
    g = dout * weight
    gn_mean, g_mean = ratio * (g * n).mean(-1, keepdim=True), 0 if is_rms else g.mean(-1, keepdim=True)
    dresidual = rstd * (g - g_mean - n * gn_mean)
    dresidual_terms = [rstd * g, rstd * gn_mean * n_size, rstd * n * ratio * _mean_size(g * n_size)]
    if not is_rms:
        dresidual_terms += [rstd * g_mean, rstd * _mean_size(g)]
    if dz is not None:
        dresidual = dresidual + dz.double()
        dresidual_terms.append(dz.double())
    dresidual_size = _size(*dresidual_terms, dresidual)
    terms = {
        "out": weight.abs() * n_size if is_rms else _size(weight * n_size, bias.double()),
        "z": z_size,
        "dx": multiplier * dresidual_size,
        "dresidual": dresidual_size,
        "dweight": in_units_of(_size_of_running_sums(dout * n, dout * n_size), weight_dtype),
    }
    if not is_rms:
        terms["dbias"] = _size_of_running_sums(dout, dout)
    if x_bias is not None:
        terms["dx_bias"] = in_units_of(_size_of_rows(terms["dx"]), x_bias.dtype)
    return terms


def embed_layer_norm_terms(
    tokens: Tensor,
    embedding: Tensor,
    position_rows: Tensor,
    weight: Tensor,
    bias: Tensor,
    dout: Tensor,
    multiplier: Tensor,
    scale: float,
    padding_idx: int | None,
    eps: float,
) -> dict[str, Tensor]:
    """T of out, dembedding, dweight and dbias, float64: those of layer normalisation, with embedding rows and positions
    in place of x and residual, both dropped; T_dembedding = |scale| Running(0, T_dx), over a token's rows.

    tokens (rows,); position_rows, dout, multiplier (rows, hidden): the table's row of each token, as in
    add_layer_norm_terms. padding_idx gets no gradient.
    """
    words, positions = scale * embedding.double()[tokens], multiplier * position_rows.double()
    terms = add_layer_norm_terms(words, positions, weight, bias, None, dout, None, multiplier, eps)
    dembedding = torch.zeros_like(embedding, dtype=torch.float64)
    for token in tokens.unique():
        of_rows = scale * terms["dx"][tokens == token]
        dembedding[token] = _size_of_running_sums(torch.zeros_like(of_rows), of_rows)
    if padding_idx is not None:
        dembedding[padding_idx] = 0
    return {name: terms[name] for name in ("out", "dweight", "dbias")} | {"dembedding": dembedding}


def feed_forward_terms(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    dout: Tensor,
    multiplier: Tensor,
    activation: Callable[[Tensor], Tensor],
    gated: bool,
) -> dict[str, Tensor]:
    """T of out, dx, dweight1, dbias1, dweight2, dbias2, float64.

    x (tokens, d), dout (tokens, d_out), multiplier (tokens, d_ff) as in add_layer_norm_terms. activation: of the
    pre-activation, or of its first half, the gate, which is then multiplied by the second, up (else up = 1, T_up = 0).

    With z the pre-activation, f the activation, Z the multiplier, Size the root sum of squares, dh = Z (dout weight2):
        T_z    = Size(rss(x, weight1^T), bias1)              T_h   = Z Size(f up, f' up T_gate, f T_up)
        T_out  = Size(rss(T_h, weight2^T), bias2)            T_dh  = Z rss(dout, weight2)
        T_dgate = Size(T_dh f' up, dh f'' up T_gate, dh f' T_up)      T_dup = Size(T_dh f, dh f' T_gate)
        T_dx   = rss(T_dz, weight1)    T_dweight1 = rss(T_dz^T, x)    T_dbias1 = Size over rows of T_dz
        T_dweight2 = rss(dout^T, T_h)                                 T_dbias2 = Size over rows of dout
    """
    x, weight1, weight2, dout = (t.double() for t in (x, weight1, weight2, dout))
    bias1, bias2 = (torch.zeros((), device=x.device) if t is None else t.double() for t in (bias1, bias2))
    rss = root_sum_of_squares
    z, z_size = x @ weight1.mT + bias1, _size(rss(x, weight1.mT), bias1)
    (gate, up), (gate_size, up_size) = (
        (t.chunk(2, dim=-1) for t in (z, z_size)) if gated else ((z, z.new_ones(())), (z_size, z.new_zeros(())))
    )
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        value = activation(gate)
        (slope,) = torch.autograd.grad(value.sum(), gate, create_graph=True)
        curve = torch.zeros_like(gate)
        if slope.requires_grad:
            (curve,) = torch.autograd.grad(slope.sum(), gate, allow_unused=True, materialize_grads=True)
    value, slope = value.detach(), slope.detach()
    h_size = multiplier * _size(value * up, slope * up * gate_size, value * up_size)
    dh, dh_size = multiplier * (dout @ weight2), multiplier * rss(dout, weight2)
    dz_size = _size(dh_size * slope * up, dh * curve * up * gate_size, dh * slope * up_size)
    if gated:
        dz_size = torch.cat([dz_size, _size(dh_size * value, dh * slope * gate_size)], dim=-1)
    return {
        "out": _size(rss(h_size, weight2.mT), bias2),
        "dx": rss(dz_size, weight1),
        "dweight1": rss(dz_size.mT, x),
        "dbias1": _size_of_rows(dz_size),
        "dweight2": rss(dout.mT, h_size),
        "dbias2": _size_of_rows(dout),
    }


def linear_cross_entropy_terms(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    distribution: Tensor,
    dloss: Tensor,
    logit_scale: float,
    reduction: str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """T of loss, dx, dweight and dbias, float64.

    x (tokens, d); distribution: as in cross_entropy_terms; dloss: as the loss; dtype: x's under test. Logits are
    rounded to it while the loss is float32: T of a row's loss is in float32's units, see `_in_units_of`. With T_loss
    and T_dz of cross_entropy_terms:
        T_sum  = Size over rows of T_loss + Size of the running sums of losses, which are float32; a mean: / count
        T_dx   = rss(T_dz, weight)      T_dweight = rss(T_dz^T, x)      T_dbias = Size over rows of T_dz
    """
    keep = distribution.any(-1)
    x, weight = x.double().where(keep[:, None], 0), weight.double()
    bias = torch.zeros((), device=x.device) if bias is None else bias.double()
    rss = root_sum_of_squares
    logits = x @ weight.mT + bias
    logit_size = _size(rss(x, weight.mT), bias.masked_fill(bias.isinf(), 0))
    rate = dloss.double() / (keep.sum().clamp_min(1) if reduction == "mean" else 1)
    loss_size, dz_size = cross_entropy_terms(logits, logit_size, distribution, rate, logit_scale)
    loss_size = _in_units_of(loss_size, torch.promote_types(dtype, torch.float32), rounded_to=dtype)
    if reduction != "none":
        z = logit_scale * logits
        losses = z.logsumexp(-1) * keep - (distribution * z).sum(-1)
        loss_size = _size_of_rows(loss_size) + _size_of_rows(losses.cumsum(0))
    if reduction == "mean":
        loss_size = loss_size / keep.sum()
    return {
        "loss": loss_size,
        "dx": rss(dz_size, weight),
        "dweight": rss(dz_size.mT, x),
        "dbias": _size_of_rows(dz_size),
    }


def cross_entropy_terms(
    logits: Tensor, logit_size: Tensor, distribution: Tensor, rate: Tensor, logit_scale: float
) -> tuple[Tensor, Tensor]:
    """T of each row's loss and of the gradient of the logits, float64.

    logits (rows, classes) float64, not yet scaled; logit_size: T of them; distribution q (rows, classes): what label
    smoothing makes of the target, 0 in ignored rows; rate: the gradient of each row's loss, (rows,) or ().

    With P the softmax, s the scale, Size the root sum of squares:
        T_z    = |s| logit_size                              T_lse = Size over classes of P T_z
        T_loss = Size(lse, T_lse, Size over classes of q T_z)
        T_dz   = |s rate| Size(P, P T_z, P T_lse, P log P, q)
    """
    keep = distribution.any(-1)
    z, z_size = logit_scale * logits, abs(logit_scale) * logit_size
    lse = z.logsumexp(-1, keepdim=True)
    p = (z - lse).exp()
    lse_size = _size_of_rows((p * z_size).mT).unsqueeze(-1)
    of_target = _size_of_rows((distribution * z_size).mT).unsqueeze(-1)
    loss_size = _size(lse, lse_size, of_target).squeeze(-1) * keep
    of_row = (logit_scale * rate * keep).abs().unsqueeze(-1)
    return loss_size, of_row * _size(p, p * z_size, p * lse_size, p.xlogy(p), distribution)


def _in_units_of(size: Tensor, dtype: torch.dtype, *, rounded_to: torch.dtype) -> Tensor:
    """T of terms that are rounded to another dtype than the result's, whose c and u `judge` multiplies it by."""
    of_result, of_terms = (torch.finfo(d).eps * (1 if torch.finfo(d).bits == 16 else 8) for d in (dtype, rounded_to))
    return size * max(1.0, of_terms / of_result)


def _size(*terms: Tensor) -> Tensor:
    """The root sum of squares of terms that broadcast to each other."""
    return sum(t.square() for t in terms).sqrt()


def _mean_size(t: Tensor) -> Tensor:
    """The root sum of squares of what the mean of a row adds up."""
    return t.square().sum(-1, keepdim=True).sqrt() / t.shape[-1]


def _size_of_rows(t: Tensor) -> Tensor:
    return t.square().sum(0).sqrt()


def _size_of_running_sums(t: Tensor, size: Tensor) -> Tensor:
    return t.cumsum(0).square().sum(0).sqrt() + size.square().cumsum(0).sum(0).sqrt()
