"""scaled_dot_product_attention: every backend, torch's own with each of its kernels pinned, FlexAttention, and
FlashAttention 2, 3 and 4.

    python benchmarks/report.py --only attention

Masks are made before the timing, as a training step makes them once for all its layers. "default, new mask" prepares
its mask in every forward. A rival refuses what it has no argument for. FlashAttention gets padding as packed keys,
whose indices are made before the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import harness
import timing
import torch
import torch.nn.functional as F
from cases import SOFTCAP, WINDOW, AttentionCase
from harness import SELDOM, Benchmark, Inputs, Provider, Refused, Run, fresh_compile, function_run, imported, op_call
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn import AttentionMask

# torch's kernels that can be pinned, and the autograd node on the result, which shows which one ran.
CUDA = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "ScaledDotProductCudnnAttentionBackward0"),
    "flash": (SDPBackend.FLASH_ATTENTION, "ScaledDotProductFlashAttentionBackward0"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "ScaledDotProductEfficientAttentionBackward0"),
}
CPU = {"flash (CPU)": (SDPBackend.FLASH_ATTENTION, "ScaledDotProductFlashAttentionForCpuBackward0")}


def new_mask(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
    """The default path with a new mask at every call, as a single layer uses it."""
    if "attn_mask" not in inputs.fixed:
        raise Refused("no mask to prepare")
    return function_run(op_call(case, inputs, dropout_p, new_mask=True), inputs)


def torch_attention(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Callable[..., Tensor]:
    """torch's operator with the cheapest form of the mask that it takes: nothing, `is_causal`, or a float mask that is
    no larger than it must be. Packed sequences it gets one after the other, as views."""
    given = inputs.fixed.get("attn_mask", {})
    is_causal = given.get("is_causal", False) or inputs.fixed.get("is_causal", False)
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "enable_gqa": case.n_head_kv is not None}
    if "cu_seqlens_q" in given:
        lengths = given["cu_seqlens_q"].diff().tolist()

        def packed(**leaves: Tensor) -> Tensor:
            sequences = zip(*(leaf.split(lengths, dim=2) for leaf in leaves.values()), strict=True)
            outs = [F.scaled_dot_product_attention(*qkv, **options).transpose(1, 2) for qkv in sequences]
            return torch.cat(outs, dim=1).transpose(1, 2)  # outs lie in memory as they are joined

        return packed
    if case.mask == "softcap":
        raise Refused("no argument for a softcap")
    if set(given) - {"is_causal"}:
        options |= {"is_causal": False, "attn_mask": _float_mask(given, inputs.leaves["query"], inputs.leaves["key"])}
    if "relative_bias" in inputs.leaves:
        m, n = (torch.arange(length, device=inputs.dout.device) for length in (case.seqlen_q, case.seqlen_k))
        distance = n - m[:, None] + case.seqlen_q - 1

    def attend(
        query: Tensor, key: Tensor, value: Tensor, sinks: Any = None, relative_bias: Any = None, **mask: Any
    ) -> Any:
        if relative_bias is not None:
            mask["attn_mask"] = relative_bias[:, distance][None]
        if sinks is not None:  # one more key, of which the score is the sink and the value 0
            key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
            mask["attn_mask"] = F.pad(sinks[None, :, None, None], (case.seqlen_k, 0)).expand(-1, -1, case.seqlen_q, -1)
        return F.scaled_dot_product_attention(query, key, value, **mask, **options)

    return attend


def _float_mask(given: dict[str, Any], query: Tensor, key: Tensor) -> Tensor:
    """The mask as torch's operator adds it to the scores."""
    if list(given) == ["key_padding"]:
        visible = given["key_padding"][:, None, None]
    else:
        batch = max(len(given[name]) if name in given else 1 for name in ("key_padding", "attn_mask"))
        visible = AttentionMask(**given).dense(batch, 1, query.shape[2], key.shape[2], query.device)
    return torch.where(visible, 0.0, float("-inf")).to(query.dtype)


def torch_sdpa(name: str | None, kernel: SDPBackend | None) -> Provider:
    """torch's function with one kernel pinned, or with torch's own choice."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        call = torch_attention(case, inputs, dropout_p)

        def attend(**leaves: Tensor) -> Tensor:
            with nullcontext() if kernel is None else sdpa_kernel([kernel]):
                return call(**leaves)

        try:
            node = attend(**inputs.leaves).grad_fn.name()
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Refused("torch has no such kernel for this case") from error
            raise
        ran = next((known for known, (_, expected) in (CUDA | CPU).items() if node == expected), "math")
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
        mask_mod = _mask_mod(case, inputs)
        if count_mask and mask_mod is None:
            raise Refused("no mask to build")
        device = inputs.leaves["query"].device
        attention = fresh_compile(module.flex_attention)
        build = torch.compile(module.create_block_mask, dynamic=False)
        batch = case.batch if "padding" in case.mask or case.mask == "blocks" else None  # None: equal for all

        def block_mask() -> Any:
            return build(mask_mod, batch, None, case.seqlen_q, case.seqlen_k, device=device) if mask_mod else None

        made = block_mask()
        notes = {"mask_ms": timing.measure(block_mask, device, 0.05).median_ms} if count_mask else {}
        options: dict[str, Any] = {"enable_gqa": case.n_head_kv is not None}

        def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, **bias: Tensor) -> Tensor:
            call = partial(attention, query, key, value, _score_mod(case, **bias), block_mask() if count_mask else made)
            if sinks is None:
                return call(**options)
            out, more = call(**options, return_aux=module.AuxRequest(lse=True))
            return out * torch.sigmoid(more.lse - sinks[:, None])[..., None].to(out.dtype)

        return function_run(attend, inputs, **notes)

    name, later = ("flex + mask building", 12) if count_mask else ("flex", SELDOM)
    return Provider(name, make, ours=False, later=later)


def _score_mod(
    case: AttentionCase, attn_mask: Tensor | None = None, relative_bias: Tensor | None = None
) -> Callable[..., Tensor] | None:
    if attn_mask is not None:
        return lambda score, b, h, i, j: score + attn_mask[0, h, i, j]
    if relative_bias is not None:
        return lambda score, b, h, i, j: score + relative_bias[h, j - i + case.seqlen_q - 1]
    return (lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)) if case.mask == "softcap" else None


def _mask_mod(case: AttentionCase, inputs: Inputs) -> Callable[..., Tensor] | None:
    given, device = inputs.fixed.get("attn_mask", {}), inputs.leaves["query"].device
    lengths, dense = case.lengths.to(device), given.get("attn_mask")
    if "packed" in case.mask:
        sequence = torch.arange(5, device=device).repeat_interleave(given["cu_seqlens_q"].diff())
    return {
        "causal": lambda b, h, i, j: i >= j,
        "padding": lambda b, h, i, j: j < lengths[b],
        "causal + padding": lambda b, h, i, j: (i >= j) & (j < lengths[b]),
        "window": lambda b, h, i, j: (i - j).abs() <= WINDOW,
        "causal window": lambda b, h, i, j: (i >= j) & (i - j <= WINDOW),
        "blocks": lambda b, h, i, j: dense[b, 0, i, j],
        "packed": lambda b, h, i, j: sequence[i] == sequence[j],
        "packed causal": lambda b, h, i, j: (sequence[i] == sequence[j]) & (i >= j),
    }.get(case.mask)


FLASH_ATTENTION = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute"}


def flash_attention(version: int) -> Provider:
    """FlashAttention 2, 3 or 4: q, k, v (B, L, H, D)."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        module = imported(FLASH_ATTENTION[version])
        if case.mask not in ("full", "causal", "padding", "softcap"):
            raise Refused(f"no argument for the mask {case.mask!r}")
        options: dict[str, Any] = {"causal": case.mask == "causal"}
        options |= {"softcap": SOFTCAP} if case.mask == "softcap" else {}
        if options["causal"] and case.seqlen_q != case.seqlen_k:
            raise Refused("its causal mask is aligned to the last query")
        if dropout_p and version > 2:
            raise Refused("no argument for dropout")
        options |= {"dropout_p": dropout_p} if version == 2 else {}
        index, attention = None, module.flash_attn_func
        if case.mask == "padding":
            attention, real = module.flash_attn_varlen_func, case.lengths.to(inputs.dout.device)
            index = inputs.fixed["attn_mask"]["key_padding"].flatten().nonzero()[:, 0]  # of the real keys
            options["cu_seqlens_q"] = (torch.arange(case.batch + 1, device=real.device) * case.seqlen_q).int()
            options["cu_seqlens_k"] = torch.cat([real.new_zeros(1), real.cumsum(0)]).int()
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": int(real.max())}

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            if index is not None:
                q, k, v = q.flatten(0, 1), k.flatten(0, 1)[index], v.flatten(0, 1)[index]
            out = attention(q, k, v, **options)
            out = out[0] if isinstance(out, tuple) else out  # some versions also return the lse
            return (out if index is None else out.unflatten(0, (case.batch, case.seqlen_q))).transpose(1, 2)

        return function_run(attend, inputs)

    return Provider(f"FlashAttention-{version}", make, ours=False)


def providers(device: torch.device) -> list[Provider]:
    pinned = {name: kernel for name, (kernel, _) in (CUDA if device.type == "cuda" else CPU).items()}
    found = [*harness.ours(), Provider("default, new mask", new_mask), torch_sdpa(None, None)]
    found += [torch_sdpa(*named) for named in (pinned | {"math": SDPBackend.MATH}).items()]
    found.append(harness.rival("torch.compile of reference", partial(op_call, backend="reference"), compiled=True))
    if device.type == "cuda":  # on a CPU FlexAttention has no backward, and FlashAttention no kernel
        found += [flash_attention(version) for version in (2, 3, 4)]
        found += [flex(count_mask) for count_mask in (False, True)]
    return found


FORMULA = "FLOPs: 4 x batch x n_head x visible pairs x head_dim forward, x 2.5 backward (five products for two)"
BENCHMARKS = (Benchmark("attention", FORMULA, ("flop",), harness.op_inputs, providers),)
