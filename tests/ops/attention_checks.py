"""One comparison for every attention test: what a backend computes, forward and backward, against float64.

    plain(problem)   the formula in plain PyTorch, in the problem's own dtype.
    expected(problem)   of each result the truth, which is the formula in float64; and what decides which error is
                     allowed: the formula in the tested dtype, and the size of the terms that are summed up.
    check(problem, attend)   runs a backend on the problem and judges every result; AssertionError names the bad one.

`attend(q, k, v, mask, dropout_p, scale) -> (out, lse, weights)`, with softcap= if the problem has one, is a backend as
`backend_call` gives it, or a broken one: the planted-bug tests hand those to the same check().
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from catalogue import by_distance
from helpers import assert_close_as_torch, autograd_nodes, backends_of
from mask_cases import mask_kinds
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends import unsupported_reason
from fastattn.backends.aten import attention as aten
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference import philox
from fastattn.check.tolerance import measure_rounding_scale

BACKENDS = backends_of("attention")
KERNEL_BACKENDS = backends_of("attention", kernels_only=True)
# With a bias or a softcap: the CUDA kernels take none.
BIAS_BACKENDS, BIAS_KERNELS = ([b for b in names if b != "cuda"] for names in (BACKENDS, KERNEL_BACKENDS))
LOW_PRECISION = (torch.bfloat16, torch.float16)

Attend = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    weights: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None  # of bias or relative_bias


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention call and the gradients that arrive at its results."""

    q: Tensor  # (B, H, Lq, Dk)
    k: Tensor  # (B, Hk, Lk, Dk)
    v: Tensor  # (B, Hk, Lk, Dv)
    dout: Tensor  # (B, H, Lq, Dv)
    dlse: Tensor | None = None  # (B, H, Lq)
    mask: dict[str, Any] = field(default_factory=dict)  # arguments of AttentionMask
    bias: Tensor | None = None
    relative_bias: Tensor | None = None  # (H or 1, R)
    dropout_p: float = 0.0
    scale: float = 0.0
    softcap: float | None = None
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Lq, Lk)"""
        return (*self.q.shape[:3], self.k.shape[2])

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """With each floating-point tensor changed."""
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor) and t.is_floating_point()}
        return self.but(**{name: change(t) for name, t in tensors.items()})


def make(
    B: int = 2,
    H: int = 2,
    Lq: int = 21,
    Lk: int = 37,
    D: int = 32,
    *,
    Hk: int | None = None,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mask: str | dict[str, Any] = "none",
    bias: tuple[int, ...] | None = None,
    bias_dtype: torch.dtype | None = None,
    relative_bias: tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    common: float = 0.0,
    dlse: bool = True,
    seed: int = 0,
    may_be_empty: bool = False,
) -> Problem:
    """A random problem. mask: a name from mask_cases, or AttentionMask arguments. bias, relative_bias: their shapes.
    common: of keys and of values, as in fastattn/check/cases.py."""
    g = torch.Generator().manual_seed(1000 + seed)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(device, dtype)

    Hk, Dv = Hk or H, Dv or D
    problem = Problem(
        q=randn(B, H, Lq, D),
        k=randn(B, Hk, Lk, D) + common * randn(1, Hk, 1, D),
        v=randn(B, Hk, Lk, Dv) + common * randn(1, Hk, 1, Dv),
        dout=randn(B, H, Lq, Dv),
        dlse=randn(B, H, Lq, dtype=torch.promote_types(dtype, torch.float32)) if dlse else None,
        mask=mask_kinds(B, H, Lq, Lk, device)[mask] if isinstance(mask, str) else mask,
        bias=None if bias is None else randn(*bias, dtype=bias_dtype or dtype),
        relative_bias=None if relative_bias is None else randn(*relative_bias, dtype=bias_dtype or dtype),
        dropout_p=dropout_p,
        scale=D**-0.5,
        softcap=softcap,
        seed=seed,
    )
    assert may_be_empty or mask == "nothing" or visible(problem).any(), (
        "a problem without a visible element finds no bug"
    )
    return problem


def visible(p: Problem) -> Tensor:
    """Bool (B, H, Lq, Lk), where -inf in the bias masks too. AttentionMask.dense is tested against loops."""
    keep = AttentionMask(**p.mask).dense(*p.shape, p.q.device)
    return keep if p.bias is None else keep & (p.bias != -torch.inf)


def dropout_multiplier(p: Problem) -> Tensor:
    """(B, H, Lq, Lk): 0 where dropped, 1 / (1 - dropout_p) elsewhere, by the written rule and the call's own draw."""
    if p.dropout_p == 0:
        return torch.ones(p.shape, dtype=torch.float64, device=p.q.device)
    torch.manual_seed(p.seed)
    rng_state = philox.draw_rng_state(p.q.device)
    B, H, Lq, Lk = p.shape
    keep = philox.keep_mask(rng_state, B * H * Lq, Lk, p.dropout_p).view(p.shape)
    return keep.double() * dropout_scale(p.dropout_p)


def _per_query_head(t: Tensor, H: int) -> Tensor:
    return t.repeat_interleave(H // t.shape[1], dim=1)


def plain(p: Problem, keep: Tensor | None = None, multiplier: Tensor | None = None) -> Results:
    """The formula as a person writes it in PyTorch: products in the tested dtype, softmax in float32. keep and
    multiplier: visible(p) and dropout_multiplier(p), where several calls share them."""
    keep = visible(p) if keep is None else keep
    multiplier = dropout_multiplier(p) if multiplier is None else multiplier

    def attend(q, k, v, mask, dropout_p, scale, softcap=None):
        k, v = (_per_query_head(t, p.q.shape[1]) for t in (k, v))
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask.bias is not None:
            scores = scores + mask.bias.where(keep, 0)
        if mask.relative_bias is not None:
            scores = scores + by_distance(mask.relative_bias, *p.shape[2:], mask.cu_seqlens_q)
        some = keep.any(-1, keepdim=True)
        scores = scores.masked_fill(~keep & some, -torch.inf)  # an empty row is left alone, so that it is not NaN
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_zeros(scores.shape[:-1])
        lse = lse.where(some[..., 0], -torch.inf)
        weights = torch.softmax(scores, -1).where(some, 0)
        weights = (weights * multiplier.to(weights.dtype)).to(q.dtype)
        return weights @ v, lse, weights

    return solve(p, attend)


def only_visible(p: Problem) -> Results:
    """The formula, where not even 0 times what is hidden is added: NaN in a key reaches the queries that see it only.
    Of all elements (B, H, Lq, Lk, D), so for small problems."""

    def attend(q, k, v, mask, dropout_p, scale):
        keep, multiplier = visible(p), dropout_multiplier(p)
        some = keep.any(-1, keepdim=True)
        k, v = (_per_query_head(t, p.q.shape[1])[:, :, None].where(keep[..., None], 0) for t in (k, v))
        scores = (q[:, :, :, None].where(keep[..., None], 0) * k).sum(-1) * scale
        if mask.bias is not None:
            scores = scores + mask.bias.where(keep, 0)
        peak = scores.masked_fill(~keep, -torch.inf).amax(-1, keepdim=True).where(some, 0).detach()
        exps = torch.exp((scores - peak).where(keep, -torch.inf))
        total = exps.sum(-1, keepdim=True).where(some, 1)
        weights = torch.where(keep & (multiplier > 0), exps / total * multiplier, 0)
        lse = (peak + total.log()).where(some, -torch.inf)[..., 0]
        return (weights[..., None] * v).where(weights[..., None] != 0, 0).sum(-2), lse, weights

    return solve(p, attend)


def expected(p: Problem) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """truth, baseline and rounding_scale of tolerance.check_error for each result."""
    given, exact = (visible(p), dropout_multiplier(p)), p.map(Tensor.double)

    def solve_exact(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: t for name, t in plain(exact.map(change), *given)._asdict().items() if t is not None}

    truth, low = solve_exact(lambda t: t), plain(p, *given)
    scale = measure_rounding_scale(solve_exact, truth)
    return {name: (t, getattr(low, name), scale[name]) for name, t in truth.items()}


def solve(p: Problem, attend: Attend, needs: str = "qkvb") -> Results:
    """Forward and backward. needs: which of q, k, v and the bias require a gradient."""
    q, k, v = (t.detach().requires_grad_(n in needs) for t, n in ((p.q, "q"), (p.k, "k"), (p.v, "v")))
    name = "bias" if p.relative_bias is None else "relative_bias"
    bias = getattr(p, name)
    bias = None if bias is None else bias.detach().requires_grad_("b" in needs)
    softcap = {} if p.softcap is None else {"softcap": p.softcap}
    torch.manual_seed(p.seed)
    out, lse, weights = attend(q, k, v, AttentionMask(**p.mask, **{name: bias}), p.dropout_p, p.scale, **softcap)
    # Where v alone requires a gradient, lse has none to give.
    losses = [(t, dt) for t, dt in ((out, p.dout), (lse, p.dlse)) if t.requires_grad and dt is not None]
    if losses:
        torch.autograd.backward(*zip(*losses, strict=True))
    grads = (None if t is None else t.grad for t in (q, k, v, bias))
    return Results(out.detach(), lse.detach(), None if weights is None else weights.detach(), *grads)


def backend_call(backend: str, device: torch.device, *, weights: bool = True) -> Attend:
    """The public function with one backend. Skips, with the reason, where that cannot run here.

    weights: also return them, but by kernels, which do not store them."""
    weights = weights and backend not in KERNEL_BACKENDS
    probe = torch.zeros(1, 1, 1, 16, device=device)
    op_args = probe, probe, probe, None, 0.0, None, False, False
    if (reason := unsupported_reason("attention", backend, op_args)) is not None:
        pytest.skip(f"{backend}: {reason}")

    def attend(q, k, v, mask, dropout_p, scale, softcap=None):
        options = {
            "scale": scale,
            "softcap": softcap,
            "enable_gqa": True,
            "return_lse": True,
            "return_weights": weights,
            "backend": backend,
        }
        results = scaled_dot_product_attention(q, k, v, mask, dropout_p, **options)
        return results if weights else (*results, None)

    return attend


def served(p: Problem, backend: str) -> Problem:
    """Without its bias for a backend that takes none."""
    return p if backend in BIAS_BACKENDS else p.but(bias=None, relative_bias=None)


def out_alone(way: str) -> Attend:
    """aten asked for out alone, computed in one of its ways: as it decides, and as the nodes of autograd show."""

    def attend(q, k, v, mask, dropout_p, scale):
        with mock.patch.object(aten, "algorithm", lambda q, dropout_p: way):
            assert aten.decide(q, k, v, mask, scale, dropout_p).by == way
            out = scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, backend="aten")
        assert {"BlockAttentionBackward", "ScaledDotProductFlashAttentionForCpuBackward0"} & set(autograd_nodes(out))
        return out, torch.zeros(out.shape[:3]), None

    return attend


def check(p: Problem, attend: Attend, names: tuple[str, ...] = Results._fields) -> Results:
    """Judge every result of `attend` on the problem. Returns the results."""
    actual = solve(p, attend)
    compare(p, actual, names)
    return actual


# What reaches the branches of the kernels, for check_not_finite: arguments of make(), with what the bias has.
NOT_FINITE: dict[str, dict[str, Any]] = {
    "none": {},
    "causal, dropout": {"H": 2, "Hk": 1, "mask": "causal_bottom_right", "dropout_p": 0.3},
    "segments": {"mask": "segments"},
    "bias": {"mask": "attn_mask_2d", "bias": "all"},
    "bias of keys": {"mask": "key_padding_holes", "bias": "keys"},
    "bias of queries": {"bias": "queries"},
}
NOT_FINITE_WITHOUT_BIAS = [case for case in NOT_FINITE if "bias" not in case]  # for CUDA


def make_for_not_finite(case: str, Lq: int, Lk: int, **options: Any) -> Problem:
    arguments = {"B": 1, "H": 1, "D": 16, **NOT_FINITE[case], **options}
    shapes = {"all": (1, 1, Lq, Lk), "keys": (1, 1, 1, Lk), "queries": (1, 1, Lq, 1)}
    return make(Lq=Lq, Lk=Lk, **arguments | {"bias": shapes.get(arguments.get("bias"))})


def check_not_finite(p: Problem, attend: Attend) -> None:
    """NaN, inf and -inf in one element of each input in turn, which some query sees, come out where the reference has
    them, in float64: of the results all three; in the gradients NaN of NaN, and of an infinity what is not finite, as
    the order of the sums says whether inf - inf comes first.

    Not compared: what is NaN in the reference alone, as 0 times a hidden NaN; and gradients that would be NaN without
    mask and dropout, as kernels set P to 0 for what is masked or dropped, and 0 times NaN in dout or delta is NaN."""
    seen = visible(p).nonzero()
    b, h, i, j = seen[len(seen) // 2].tolist()
    inputs = [name for name in ("q", "k", "v", "bias", "dout") if getattr(p, name) is not None]
    for name, value in itertools.product(inputs, (torch.nan, torch.inf, -torch.inf)):
        t = getattr(p, name).clone()
        place = (b, h * t.shape[1] // p.shape[1], j if name in "kv" else i, j if name == "bias" else 3)
        t[tuple(min(at, n - 1) for at, n in zip(place, t.shape, strict=True))] = value
        planted = p.but(**{name: t})
        actual, planted = solve(planted, attend), planted.map(Tensor.double)
        references = solve(planted, backend_call("reference", p.q.device)), only_visible(planted)
        unmasked = only_visible(planted.but(mask={}, dropout_p=0.0))
        for result, got, want, least, most in zip(Results._fields, actual, *references, unmasked, strict=True):
            if got is None:
                continue
            kinds = [torch.where(r.isfinite(), 0, r.nan_to_num(3, 1, -1)) for r in (got, want, least)]
            if result.startswith("d") and value == value:
                kinds = [kind != 0 for kind in kinds]
            wrong = (kinds[0] != kinds[1]) & (kinds[1] == kinds[2])
            if result.startswith("d"):
                wrong &= want.isfinite() <= most.isfinite()
            where = f"{value} in {name}: {int(wrong.sum())} elements of {result}"
            assert not wrong.any(), f"{where}, of them {got[wrong][:3]} for {want[wrong][:3]}"


def compare(p: Problem, actual: Results, names: tuple[str, ...] = Results._fields) -> None:
    """Judge the named results against float64, and the exact zeros and infinities that a mask promises."""
    allowed, keep = expected(p), visible(p)
    for name in names:
        a = getattr(actual, name)
        if name not in allowed or (name == "weights" and a is None):
            assert a is None, f"{name} was not asked for"
            continue
        assert a is not None, f"{name} is missing"
        assert_close_as_torch(a, *allowed[name], name, p.q.dtype)
    empty = ~keep.any(-1)
    if "out" in names:
        assert not actual.out[empty].any(), "a query that may attend to nothing must give exactly 0"
    if "lse" in names:
        assert (actual.lse[empty] == -torch.inf).all() and actual.lse[~empty].isfinite().all(), "lse is -inf there only"
    if "dq" in names and actual.dq is not None:
        assert not actual.dq[empty].any(), "a query that may attend to nothing must get exactly 0 gradient"
    if "weights" in names and actual.weights is not None:
        assert not actual.weights[~keep].any(), "a masked key must have exactly 0 weight"
        if p.dropout_p > 0:
            dropped = dropout_multiplier(p) == 0
            assert not actual.weights[dropped].any(), "a dropped weight is not 0"
            sure = keep & ~dropped & (allowed["weights"][0] > 1e-3)  # far from underflow
            assert (actual.weights[sure] > 0).all(), "a weight was dropped that the rule keeps"
    unattended = ~keep.unflatten(1, (p.k.shape[1], -1)).any(2).any(-2)  # (B, Hk, Lk)
    for name in ("dk", "dv"):
        grad = getattr(actual, name)
        if name in names and grad is not None:
            assert not grad[unattended].any(), f"{name}: a key that no query attends to must get exactly 0 gradient"
