"""Attention by others: each of torch's kernels pinned, FlexAttention, and FlashAttention 2, 3 and 4.

Their inputs are those of `bench_attention.make_inputs`. A rival refuses what it has no argument for. FlashAttention and
torch's varlen_attn get padding as packed keys, whose indices are made before the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timing
import torch
import torch.nn.functional as F
from cases import AttentionCase
from harness import SELDOM, Inputs, Provider, Refused, Run, fresh_compile, function_run, imported
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The autograd node on the result shows which of torch's kernels ran.
NODES = {
    "flash": "ScaledDotProductFlashAttentionBackward0",
    "flash (CPU)": "ScaledDotProductFlashAttentionForCpuBackward0",
    "efficient": "ScaledDotProductEfficientAttentionBackward0",
    "cudnn": "ScaledDotProductCudnnAttentionBackward0",
}
PINNED = {
    "cuda": {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    },
    "cpu": {"flash (CPU)": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
}


def torch_kernels(device: torch.device) -> list[Provider]:
    """torch's own choice, then each kernel pinned."""
    pinned = [torch_sdpa(name, kernel) for name, kernel in PINNED.get(device.type, {}).items()]
    return [torch_sdpa(None, None), *pinned]


def torch_sdpa(name: str | None, kernel: SDPBackend | None) -> Provider:
    """torch's function with one kernel pinned, or with torch's own choice. Every mask is dense."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        options = {"is_causal": case.mask == "causal", "dropout_p": dropout_p}
        options |= {"enable_gqa": case.n_head_kv is not None}
        if case.mask == "alibi":
            hidden = ~case.dense().to(inputs.leaves["query"].device)
            options["attn_mask"] = inputs.fixed["bias"].masked_fill(hidden, float("-inf"))
        elif inputs.fixed:
            options["attn_mask"] = case.dense().to(inputs.leaves["query"].device)

        def attend(**leaves: Tensor) -> Tensor:
            if kernel is None:
                return F.scaled_dot_product_attention(**leaves, **options)
            with sdpa_kernel([kernel]):
                return F.scaled_dot_product_attention(**leaves, **options)

        try:
            node = attend(**inputs.leaves).grad_fn.name()
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Refused("torch has no such kernel for this case") from error
            raise
        ran = next((known for known, expected in NODES.items() if node == expected), "math")
        if name is not None and ran != name:
            raise Refused(f"pinned, but {ran} ran ({node})")
        return function_run(attend, inputs, ran=ran)

    return Provider("sdpa" if name is None else f"sdpa {name}", make, ours=False)


def flex(count_mask: bool) -> Provider:
    """FlexAttention, compiled. count_mask: its BlockMask is made in the forward, as for a new mask in every batch. The
    time of the mask alone is noted."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        module = imported("torch.nn.attention.flex_attention")
        if dropout_p:
            raise Refused("FlexAttention has no dropout")
        mask_mod, sizes = _flex_mask(case, inputs)
        if mask_mod is None and (count_mask or case.mask == "full"):
            raise Refused("no mask: torch's own kernels are the rivals")
        device = inputs.leaves["query"].device
        attention = fresh_compile(module.flex_attention)
        build = torch.compile(module.create_block_mask, dynamic=False)

        def block_mask() -> Any:
            return None if mask_mod is None else build(mask_mod, *sizes, case.seqlen_q, case.seqlen_k, device=device)

        made = block_mask()
        notes = {"mask_ms": timing.measure(block_mask, device, 0.05).median_ms} if count_mask else {}
        bias, slopes = inputs.leaves.get("attn_mask"), inputs.fixed.get("slopes")

        def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[0, h, i, j]

        def add_slope(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (i - j)

        score_mod = {"bias": add_bias, "alibi": add_slope}.get(case.mask)

        def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            mask = block_mask() if count_mask else made
            return attention(query, key, value, score_mod, mask, enable_gqa=case.n_head_kv is not None)

        return function_run(attend, inputs, **notes)

    name, later = ("flex + mask building", 12) if count_mask else ("flex", SELDOM)
    return Provider(name, make, ours=False, later=later)


def _flex_mask(case: AttentionCase, inputs: Inputs) -> tuple[Callable[..., Tensor] | None, tuple[int | None, None]]:
    """(mask_mod, (B, H)) for create_block_mask; B and H None where the mask is the same for all."""
    if case.mask in ("causal", "alibi"):
        return (lambda b, h, i, j: i >= j), (None, None)
    if case.mask == "padding":
        lengths = case.lengths.to(inputs.leaves["query"].device)
        return (lambda b, h, i, j: j < lengths[b]), (case.batch, None)
    if case.mask == "blocks":
        dense = inputs.fixed["attn_mask"]
        return (lambda b, h, i, j: dense[b, 0, i, j]), (case.batch, None)
    return None, (None, None)


def flash_attention(version: int) -> Provider:
    """FlashAttention 2 (flash_attn), 3 (flash_attn_interface) or 4 (flash_attn.cute): q, k, v (B, L, H, D)."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        module = imported({2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}[version])
        options: dict[str, Any] = {"causal": case.mask in ("causal", "alibi")}
        if options["causal"] and case.seqlen_q != case.seqlen_k:
            raise Refused("its causal mask is aligned to the last query")
        if case.mask in ("bias", "blocks"):
            raise Refused(f"no argument for the mask {case.mask!r}")
        if version == 2:
            options["dropout_p"] = dropout_p
        elif dropout_p or case.mask == "alibi":
            raise Refused("no argument for dropout" if dropout_p else "no argument for ALiBi")
        if case.mask == "alibi":
            options["alibi_slopes"] = inputs.fixed["slopes"]
        if case.mask == "padding":
            varlen = partial(module.flash_attn_varlen_func, **options)
            return function_run(packed_attention(varlen, case, inputs), inputs)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = module.flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions also return the lse

        return function_run(attend, inputs)

    return Provider(f"FlashAttention-{version}", make, ours=False)


def torch_varlen() -> Provider:
    """torch's function for packed sequences."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        varlen = imported("torch.nn.attention.varlen").varlen_attn
        if case.mask != "padding":
            raise Refused("only for packed sequences")
        if dropout_p:
            raise Refused("no argument for dropout")

        def by_position(q: Tensor, k: Tensor, v: Tensor, **lengths: Any) -> Tensor:
            return varlen(q, k, v, *lengths.values())

        return function_run(packed_attention(by_position, case, inputs), inputs)

    return Provider("torch varlen_attn", make, ours=False)


def packed_attention(varlen: Callable[..., Any], case: AttentionCase, inputs: Inputs) -> Callable[..., Tensor]:
    """Attention with padding by a function of packed q, k, v (tokens, H, D) with FlashAttention's argument names."""
    device = inputs.leaves["query"].device
    real = case.lengths.to(device)
    index = inputs.fixed["key_padding"].flatten().nonzero()[:, 0]  # of the real keys among batch * seqlen_k
    lengths = {
        "cu_seqlens_q": (torch.arange(case.batch + 1, device=device) * case.seqlen_q).int(),
        "cu_seqlens_k": torch.cat([real.new_zeros(1), real.cumsum(0)]).int(),
        "max_seqlen_q": case.seqlen_q,
        "max_seqlen_k": int(real.max()),
    }

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        out = varlen(query, key[index], value[index], **lengths)
        out = out[0] if isinstance(out, tuple) else out  # some versions also return the lse
        return out.unflatten(0, (case.batch, case.seqlen_q)).transpose(1, 2)

    return attend
