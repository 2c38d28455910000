"""Attention by others: torch's kernels each pinned, FlexAttention, and FlashAttention 2, 3 and 4, also inside torch.

All take what `bench_attention.make_inputs` makes. What a rival has no argument for, it refuses; FlashAttention and
torch's varlen_attn are given padding as packed keys, whose indices are made before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import timing
import torch
import torch.nn.functional as F
from cases import AttentionCase
from harness import Inputs, Provider, Refused, Run, imported, run_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The autograd node that each of torch's kernels leaves on its result: what shows which one ran.
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
    """torch's function with one kernel pinned, or with torch's own choice. A structured mask is given to it dense."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        options = {"is_causal": case.mask == "causal", "dropout_p": dropout_p}
        options |= {"enable_gqa": case.heads_k is not None}
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
        return run_of(attend, inputs, ran=ran)

    return Provider("sdpa" if name is None else f"sdpa {name}", make, ours=False)


@contextmanager
def active(implementation: str) -> Iterator[None]:
    """torch's flash kernels are those of "FA3" or "FA4". Torch registers them at each entry, which costs the host."""
    attention = torch.nn.attention
    try:
        attention.activate_flash_attention_impl(implementation)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:  # AttributeError: torch before 2.10
        raise Refused(f"cannot be activated: {error}") from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def torch_flash(implementation: str) -> Provider:
    """torch's function with the flash kernel pinned, while this implementation is active: in forward and backward, as
    one's results are not the other's, and not in what else is measured in this process."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        switched = active(implementation)  # a decorator too
        run = switched(torch_sdpa("flash", SDPBackend.FLASH_ATTENTION).make)(case, inputs, dropout_p)
        return Run(switched(run.results), {name: switched(call) for name, call in run.timed.items()}, run.notes)

    return Provider(f"sdpa flash, {implementation}", make, ours=False)


def flex(count_mask: bool) -> Provider:
    """FlexAttention, compiled. count_mask: its BlockMask is made within the forward, as for a batch of new masks; how
    long that takes by itself is noted."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        module = imported("torch.nn.attention.flex_attention")
        if dropout_p:
            raise Refused("FlexAttention has no dropout")
        mask_mod, sizes = _flex_mask(case, inputs)
        if count_mask and mask_mod is None:
            raise Refused("no mask to build")
        device = inputs.leaves["query"].device
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # as for every compiled rival: see harness.rival
        attention = torch.compile(module.flex_attention, dynamic=False)
        build = torch.compile(module.create_block_mask, dynamic=False)

        def block_mask() -> Any:
            return None if mask_mod is None else build(mask_mod, *sizes, case.length_q, case.length_k, device=device)

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
            return attention(query, key, value, score_mod, mask, enable_gqa=case.heads_k is not None)

        return run_of(attend, inputs, **notes)

    return Provider("flex + mask building" if count_mask else "flex", make, ours=False, later=12)


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
        if options["causal"] and case.length_q != case.length_k:
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
            return run_of(_of_packed_keys(varlen, case, inputs), inputs)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = module.flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions also return the lse

        return run_of(attend, inputs)

    return Provider(f"FlashAttention-{version}", make, ours=False)


def torch_varlen() -> Provider:
    """torch's function for packed sequences."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        varlen = imported("torch.nn.attention.varlen").varlen_attn
        if case.mask != "padding":
            raise Refused("only for packed sequences")
        if dropout_p:
            raise Refused("no argument for dropout")

        def in_torchs_words(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            return varlen(q, k, v, *(given[name] for name in names))

        return run_of(_of_packed_keys(in_torchs_words, case, inputs), inputs)

    return Provider("torch varlen_attn", make, ours=False)


def _of_packed_keys(varlen: Callable[..., Any], case: AttentionCase, inputs: Inputs) -> Callable[..., Tensor]:
    """Attention by a function of packed q, k, v (tokens, H, D) with FlashAttention's names for the rest."""
    index, offsets = _packed_keys(case, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        key, value = (t.flatten(0, 1)[index] for t in (key, value))
        out = varlen(query.flatten(0, 1), key, value, **offsets)
        out = out[0] if isinstance(out, tuple) else out  # some versions also return the lse
        return out.view(query.shape).transpose(1, 2)

    return attend


def _packed_keys(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, dict[str, Any]]:
    """Where the real keys stand among the batch * length_k, and the offsets of queries and keys, for a varlen call."""
    device = inputs.leaves["query"].device
    lengths = case.lengths.to(device)
    zero = lengths.new_zeros(1)
    offsets = {
        "cu_seqlens_q": torch.arange(case.batch + 1, device=device) * case.length_q,
        "cu_seqlens_k": torch.cat([zero, lengths.cumsum(0)]),
    }
    numbers = {"max_seqlen_q": case.length_q, "max_seqlen_k": int(case.lengths.max())}
    index = inputs.fixed["key_padding"].flatten().nonzero()[:, 0]
    return index, {name: t.int() for name, t in offsets.items()} | numbers
