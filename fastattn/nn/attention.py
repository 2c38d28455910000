"""Multi-head attention, its core op as a module, and the conversion of dense masks."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.masks import AttentionMask
from fastattn.nn.fusible import all_can_fuse, can_fuse, is_unmodified
from fastattn.nn.kv_cache import AttendInSteps, DecoderCache
from fastattn.nn.linear import joint_linear, linear
from fastattn.nn.params import AttentionParams, norm_params
from fastattn.nn.residual import HiddenState, HiddenStateT, Norm, current_dropout_p, new_norm
from fastattn.nn.run_layer import run_module
from fastattn.ops._checks import check_arguments, check_flags, check_positive
from fastattn.ops.attention import scaled_dot_product_attention
from fastattn.ops.decode_attention import decode_attention


def as_attention_mask(mask: Tensor | AttentionMask | None) -> AttentionMask | None:
    """The AttentionMask of a dense mask without a head dimension. All layers can share it and its prepared layouts.

    mask: (B, 1, Lk), (B, Lq, Lk) or (1, Lq, Lk), bool or integer, nonzero = attend; ValueError for anything else.
        An AttentionMask or None is returned as it is.
    """
    return AttentionMask.of(mask, has_heads=False)


def attend_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | AttentionMask | None,
    dropout: nn.Module,
    scale: float,
    softcap: float | None = None,
    backend: Backend | None = None,
    return_attn: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(out, weights after dropout or None). A dropout that is modified (see can_fuse) is called with the weights, which
    the formula gives together with their gradient."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": k.size(1) != q.size(1), "softcap": softcap}
    if can_fuse(dropout):
        options |= {"return_weights": return_attn, "backend": backend}
        result = scaled_dot_product_attention(q, k, v, mask, current_dropout_p(dropout), **options)
        return (result, None) if isinstance(result, Tensor) else (result[0], result[1])
    _, attn = scaled_dot_product_attention(q, k, v, mask, return_weights=True, backend="reference", **options)
    attn = dropout(attn)
    out = attn @ v.repeat_interleave(q.size(1) // v.size(1), dim=1).to(attn.dtype)
    return out, attn if return_attn else None


class ScaledDotProductAttention(nn.Module):
    """dropout(softmax(q k^T / temperature)) v.     Source: Vaswani et al. 2017, section 3.2.1.

    temperature: positive, else TypeError or ValueError.     softcap: as of scaled_dot_product_attention.
    """

    fused_children = ("dropout",)
    temperature: float
    softcap: float | None
    backend: Backend | None
    dropout: nn.Module

    def __init__(
        self,
        temperature: float,
        attn_dropout: float = 0.1,
        *,
        softcap: float | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        check_arguments(attn_dropout=attn_dropout, backend=backend)
        if softcap is not None:
            check_positive("softcap", softcap)
        self.temperature, self.softcap, self.backend = temperature, softcap, backend
        self.dropout = nn.Dropout(attn_dropout)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMask | None = None, *, return_attn: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """q: (B, H, Lq, Dk); k: (B, Hk, Lk, Dk); v: (B, Hk, Lk, Dv), H % Hk == 0.

        mask: AttentionMask, or a tensor broadcastable to (B, H, Lq, Lk), bool with True = attend or float to add.
        Returns (out (B, H, Lq, Dv), weights (B, H, Lq, Lk) after dropout or None). The weights cost a further pass
        and Lq * Lk memory, so they are computed on request only. A query that may attend to nothing gives 0.
        """
        scale, options = 1 / self.temperature, (self.softcap, self.backend, return_attn)
        return attend_with_dropout(q, k, v, mask, self.dropout, scale, *options)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:.6g}" + ("" if self.softcap is None else f", softcap={self.softcap:g}")


class MultiHeadAttention(nn.Module):
    """layer_norm(q + dropout(fc(attention(w_qs(q), w_ks(k), w_vs(v))))), by default without biases in the linear maps.

    n_head: query heads, of width d_k for queries and keys and d_v for values.
    dropout: after fc. attn_dropout: on the attention weights; its default does not follow dropout, as in the public
        implementation.
    n_head_kv: heads of w_ks and w_vs, each shared by n_head / n_head_kv query heads (grouped-query attention, Ainslie
        et al. 2023, arXiv:2305.13245); n_head unless given. It must divide n_head.
    norm_first: layer_norm comes before the projections; see PendingResidual.
    norm: the class of layer_norm, "layer" for nn.LayerNorm or "rms" for nn.RMSNorm.
    qk_norm: each head of w_qs(q) and w_ks(k) is normalised by q_norm and k_norm, two nn.RMSNorm(d_k) that all heads
        share (Henry et al. 2020, arXiv:2010.04245, as in Qwen3).
    softcap: of the scores, as of scaled_dot_product_attention.     bias: of the four linear maps.
    kdim, vdim: widths of k and v, d_model unless given.
    TypeError or ValueError for an argument that makes no such module.
    What key padding hides may be NaN and reaches no output, but the backward of the linear maps that read it multiplies
    it by 0: the gradients of their weights are NaN.
    Source: Vaswani et al. 2017, section 3.2.2.
    """

    fused_children = ("w_qs", "w_ks", "w_vs", "dropout", "layer_norm")

    def __init__(
        self,
        n_head: int,
        d_model: int,
        d_k: int,
        d_v: int,
        dropout: float = 0.1,
        *,
        attn_dropout: float = 0.1,
        n_head_kv: int | None = None,
        norm_first: bool = False,
        norm: Norm = "layer",
        qk_norm: bool = False,
        softcap: float | None = None,
        bias: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        backend: Backend | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        n_head_kv = n_head if n_head_kv is None else n_head_kv
        kdim, vdim = (d_model if width is None else width for width in (kdim, vdim))
        check_arguments(n_head=n_head, n_head_kv=n_head_kv, d_model=d_model, d_k=d_k, d_v=d_v, dropout=dropout)
        check_arguments(kdim=kdim, vdim=vdim)
        check_flags(norm_first=norm_first, qk_norm=qk_norm, bias=bias)
        if n_head % n_head_kv:
            raise ValueError(f"n_head must be a multiple of n_head_kv, got n_head={n_head} and n_head_kv={n_head_kv}")
        self.d_model, self.n_head, self.n_head_kv, self.d_k, self.d_v = d_model, n_head, n_head_kv, d_k, d_v
        self.norm_first, self.backend = norm_first, backend
        self.kdim, self.vdim = kdim, vdim
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=bias, **factory)
        self.w_ks = nn.Linear(kdim, n_head_kv * d_k, bias=bias, **factory)
        self.w_vs = nn.Linear(vdim, n_head_kv * d_v, bias=bias, **factory)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=bias, **factory)
        self.attention = ScaledDotProductAttention(d_k**0.5, attn_dropout, softcap=softcap, backend=backend)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = new_norm(norm, d_model, **factory)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(d_k, eps=1e-6, device=device, dtype=dtype) for _ in range(2))

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        layer_norm: nn.Module | None = None,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        backend: Backend | None = None,
    ) -> MultiHeadAttention:
        """A MultiHeadAttention with copies of the weights of torch's module, and its dropout on the attention weights.

        torch's module is the branch alone. This one adds what is around it in a layer:
        layer_norm: copied, the norm of this sublayer, such as norm1 of an nn.TransformerEncoderLayer. A new one unless
            given.
        dropout, norm_first, backend: as of the constructor.
        Inputs are (B, L, width) whatever batch_first is, and True in a mask means attend, where torch ignores.
        Raises TypeError for another class, ValueError for add_bias_kv and add_zero_attn, which this one does not have.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}")
        if module.bias_k is not None or module.add_zero_attn:
            name = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
            raise ValueError(f"module has {name}=True, which MultiHeadAttention does not have")
        d_model = module.embed_dim
        width = getattr(layer_norm, "normalized_shape", (d_model,))
        if tuple(width) != (d_model,):
            raise ValueError(f"layer_norm normalises {tuple(width)}, expected ({d_model},), the embed_dim of module")
        joint, weight, bias = module.in_proj_weight, module.out_proj.weight, module.in_proj_bias
        options: dict[str, Any] = {"attn_dropout": module.dropout, "norm_first": norm_first, "bias": bias is not None}
        options |= {"kdim": module.kdim, "vdim": module.vdim, "backend": backend}
        options |= {"device": weight.device, "dtype": weight.dtype}
        made = cls(module.num_heads, d_model, module.head_dim, module.head_dim, dropout, **options)
        separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        linears = made.w_qs, made.w_ks, made.w_vs
        with torch.no_grad():
            for i, (linear, own) in enumerate(zip(linears, separate if joint is None else joint.chunk(3), strict=True)):
                linear.weight.copy_(own)
                if bias is not None:
                    linear.bias.copy_(bias.chunk(3)[i])
        made.fc.load_state_dict(module.out_proj.state_dict())
        if layer_norm is not None:
            made.layer_norm = deepcopy(layer_norm)
        return made.train(module.training)

    def forward(
        self,
        q: HiddenStateT,
        k: HiddenState,
        v: HiddenState,
        mask: Tensor | AttentionMask | None = None,
        *,
        return_attn: bool = False,
        projected: tuple[Tensor, Tensor] | None = None,
        cache: DecoderCache | None = None,
        reads_memory: bool = False,
    ) -> tuple[HiddenStateT, Tensor | None]:
        """q: (B, Lq, d_model), also the residual; k: (B, Lk, kdim); v: (B, Lk, vdim). mask: see as_attention_mask.

        With norm_first q may be a PendingResidual, else TypeError; k and v are normalised tensors, or for
        self-attention q itself.     projected: (w_ks(k), w_vs(v)), where they were computed before.
        cache: of decoding step by step, in eval mode. q is the newest token of each beam, (B, W, d_model), and attends
        to those before it; its keys and values are added to the cache. With reads_memory it attends to the encoder's
        output, whose keys and values the cache holds. k, v and mask are not read: give None. There are no weights.
        Returns (output, of q's type; weights (B, n_head, Lq, Lk) after dropout, or None unless return_attn).
        """
        fusible, attn = all_can_fuse(self, READ_BY_OPS), None
        project = partial(linear, backend=self.backend, fusible=fusible or None)

        def attend(normed: Tensor) -> Tensor:
            """What the residual connection is around: fc of the heads, (B, Lq, d_model)."""
            nonlocal attn
            if cache is not None:
                return self._step(normed, cache, reads_memory)
            inputs = zip("qkv", (q, k, v), ("d_model", "kdim", "vdim"), strict=True)
            of_q, of_k, of_v = [_checked(self, name, normed if x is q else x, width) for name, x, width in inputs]
            if projected is not None:
                queries, (keys, values) = project(self.w_qs, of_q), projected
            elif of_q is of_k is of_v:
                maps = (self.w_qs, self.w_ks, self.w_vs)
                queries, keys, values = joint_linear(of_q, maps, self.backend, fusible or None)
            else:
                queries, keys, values = project(self.w_qs, of_q), project(self.w_ks, of_k), project(self.w_vs, of_v)
            # The heads are views of the projections, (B, H, L, D) with strides of (B, L, H, D): nothing is copied.
            queries, keys = _heads(queries, self.d_k, self.q_norm), _heads(keys, self.d_k, self.k_norm)
            heads = queries, keys, _heads(values, self.d_v)
            out, attn = self.attention(*heads, as_attention_mask(mask), return_attn=return_attn)
            return project(self.fc, out.transpose(1, 2).flatten(2))

        return run_module(q, self, attend, fusible), attn

    def params(self, norm_first: bool, reads_memory: bool) -> AttentionParams | None:
        """What the executor reads; None where something is modified.

        norm_first: the layer's.     reads_memory: whether keys and values come projected.
        """
        if not is_unmodified(self, MultiHeadAttention, READ_BY_OPS) or self.norm_first is not norm_first:
            return None
        if self.q_norm is not None or not self.d_model == self.kdim == self.vdim:
            return None
        children = self._modules
        core = children["attention"]
        if not is_unmodified(core, ScaledDotProductAttention, ScaledDotProductAttention.fused_children):
            return None
        if core.softcap is not None:
            return None
        q, fc, dropout_p = children["w_qs"]._parameters, children["fc"]._parameters, core._modules["dropout"]
        weights: tuple[Tensor, ...] = (q["weight"],)
        biases: tuple[Tensor | None, ...] = (q["bias"],)
        dropout_p = current_dropout_p(dropout_p)
        if not reads_memory:
            k, v = children["w_ks"]._parameters, children["w_vs"]._parameters
            weights, biases = (*weights, k["weight"], v["weight"]), (*biases, k["bias"], v["bias"])
        # Under tensor parallelism written by hand a process has some of the heads.
        n_head_kv = self.n_head_kv if reads_memory else weights[1].shape[0] // self.d_k
        norm = norm_params(children["layer_norm"], current_dropout_p(children["dropout"]))
        heads = n_head_kv, self.d_k, self.d_v, 1 / core.temperature
        return AttentionParams(weights, biases, fc["weight"], fc["bias"], norm, *heads, dropout_p, core.backend)

    def _step(self, x: Tensor, cache: DecoderCache, reads_memory: bool) -> Tensor:
        """What forward computes of one new token a beam, x (B, W, d_model), by the weights that the cache keeps."""
        q = cache.linear(self.w_qs, x, self.backend).unflatten(2, (-1, self.d_k))
        q, attention = _normed(q, self.q_norm), self._attend_in_steps()
        if reads_memory:
            out = cache.attend_memory(self, q, attention)
        else:
            k, v = cache.linear(self.w_ks, x, self.backend), cache.linear(self.w_vs, x, self.backend)
            k = _normed(k.unflatten(2, (-1, self.d_k)), self.k_norm)
            out = cache.attend(self, q, k, v.unflatten(2, (-1, self.d_v)), attention)
        return cache.linear(self.fc, out.flatten(2), self.backend)

    def _attend_in_steps(self) -> AttendInSteps:
        core = self.attention
        if is_unmodified(core, ScaledDotProductAttention, ScaledDotProductAttention.fused_children):
            scale, softcap = 1 / core.temperature, core.softcap
            return partial(decode_attention, scale=scale, softcap=softcap, backend=self.backend)
        return partial(_decode_by_module, core)

    def memory(self, projected: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(w_ks(k), w_vs(v)) as a cache's Memory holds them: (B, n_head_kv, Lk, d_k) and (.., d_v), contiguous."""
        keys, values = projected
        return _heads(keys, self.d_k, self.k_norm).contiguous(), _heads(values, self.d_v).contiguous()

    def extra_repr(self) -> str:
        return (
            f"n_head={self.n_head}, n_head_kv={self.n_head_kv}, d_k={self.d_k}, d_v={self.d_v}, "
            f"norm_first={self.norm_first}"
        )


def _decode_by_module(
    core: nn.Module, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, ancestors: Tensor | None = None
) -> Tensor:
    """decode_attention by a module that is called as ScaledDotProductAttention is, with a copy of each beam's keys."""
    (B, W), M = q.shape[:2], k.shape[1]
    rows = [t.expand(-1, -1, W, -1, -1) for t in (k, v)]  # R = 1, or W
    if ancestors is not None:
        index = ancestors.transpose(1, 2).long()[..., None, None]
        rows = [t.gather(2, index.expand(-1, -1, -1, *t.shape[3:])) for t in rows]
    k, v = (t.permute(0, 2, 3, 1, 4).flatten(0, 1) for t in rows)  # (B * W, Hk, M, D)
    mask = None
    if lengths is not None:
        counts = torch.arange(M, device=q.device) < lengths[:, None]
        mask = AttentionMask(key_padding=counts.repeat_interleave(W, 0))
    out, _ = core(q.flatten(0, 1)[:, :, None], k, v, mask)
    return out[:, :, 0].unflatten(0, (B, W))


READ_BY_OPS = (*MultiHeadAttention.fused_children, "fc")


def _checked(module: MultiHeadAttention, name: str, x: HiddenState, width_name: str) -> Tensor:
    """x, a tensor (B, L, width), or an error that names the argument."""
    width = getattr(module, width_name)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (B, L, {width_name} = {width})")
    return x


def _heads(x: Tensor, d: int, norm: nn.Module | None = None) -> Tensor:
    """(B, L, heads * d) -> (B, heads, L, d): of all heads, or under tensor parallelism of this process's. A view,
    unless a norm is given, which normalises each head."""
    B, L, width = x.shape
    return _normed(x.view(B, L, width // d, d), norm).transpose(1, 2)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    """norm(x) in the dtype of x (.., d), or x."""
    return x if norm is None else norm(x).to(x.dtype)
