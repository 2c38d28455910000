"""scaled_dot_product_attention: every backend, torch's own with each of its kernels pinned, FlexAttention, others.

    python benchmarks/report.py --only attention

Masks are made before the timing, as a training step makes them once for all its layers. "default, new mask" prepares
its mask in every forward.
"""

from __future__ import annotations

from typing import Any

import attention_rivals
import harness
import torch
from cases import AttentionCase
from harness import Inputs, Provider, Refused, Run

from fastattn import AttentionMask, scaled_dot_product_attention


def make_inputs(case: AttentionCase, device: torch.device) -> Inputs:
    randn = harness.seeded_randn(device, case.dtype)
    n_head_kv = case.n_head_kv or case.n_head
    leaves = {
        "query": randn(case.batch, case.n_head, case.seqlen_q, case.head_dim),
        "key": randn(case.batch, n_head_kv, case.seqlen_k, case.head_dim),
        "value": randn(case.batch, n_head_kv, case.seqlen_k, case.head_dim),
    }
    fixed: dict[str, Any] = {}
    if case.mask == "bias":
        leaves["attn_mask"] = randn(1, case.n_head, case.seqlen_q, case.seqlen_k)
    if case.mask == "blocks":
        fixed["attn_mask"] = case.dense().to(device)
    if case.mask == "padding":
        fixed["key_padding"] = torch.arange(case.seqlen_k, device=device) < case.lengths.to(device)[:, None]
    if case.mask == "alibi":
        fixed["slopes"] = case.slopes.to(device)
        distance = torch.arange(case.seqlen_k) - torch.arange(case.seqlen_q)[:, None]  # j - i
        fixed["bias"] = (case.slopes[:, None, None] * distance)[None].to(device)  # float32: 16 bits are too few
    return Inputs(leaves, fixed, randn(case.batch, case.n_head, case.seqlen_q, case.head_dim))


def part(case: AttentionCase, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The first key-value head and its queries; of the first sequence only, unless a bias gradient sums over all."""
    batch = case.batch if case.mask == "bias" else 1
    if name == "slopes":
        return tensor[:1]
    if name == "key_padding":
        return tensor[:batch]
    group = case.n_head // (case.n_head_kv or case.n_head)
    return tensor[:batch, : group if name in ("query", "out", "bias") else 1]


def arguments(case: AttentionCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    """Of scaled_dot_product_attention, except query, key, value and a learned bias."""
    given: dict[str, Any] = {"dropout_p": dropout_p, "enable_gqa": case.n_head_kv is not None}
    given["is_causal"] = case.mask in ("causal", "alibi")
    tensors = mask_tensors(inputs)
    return given | ({"attn_mask": AttentionMask(**tensors)} if tensors else {})


def mask_tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The arguments of AttentionMask."""
    tensors = {name: tensor for name, tensor in inputs.fixed.items() if name != "slopes"}
    if "bias" in tensors and inputs.leaves["query"].dtype == torch.float64:  # for the check
        tensors["bias"] = tensors["bias"].double()
    return tensors


def new_mask(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
    """The default path with a new mask at every call, as a single layer uses it."""
    if not inputs.fixed:
        raise Refused("no mask to prepare")
    given = arguments(case, inputs, dropout_p)

    def attend(**leaves: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(**leaves | given | {"attn_mask": AttentionMask(**mask_tensors(inputs))})

    return harness.function_run(attend, inputs)


def compiled_formula(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Any:
    """torch.compile of the reference path. Its mask is made before the timing, as for the others."""
    options = arguments(case, inputs, dropout_p)
    return lambda **leaves: scaled_dot_product_attention(**leaves, **options, backend="reference")


def providers(device: torch.device) -> list[Provider]:
    found = [*harness.ours(scaled_dot_product_attention, arguments), Provider("default, new mask", new_mask)]
    if device.type == "cuda":
        found[0] = found[0]._replace(later=harness.SELDOM)  # the reference: slow, and no rival
    found += attention_rivals.torch_kernels(device)
    found.append(harness.rival("torch.compile of reference", compiled_formula, compiled=True))
    if device.type == "cuda":  # on a CPU FlexAttention has no backward, and FlashAttention no kernel
        found.append(attention_rivals.torch_varlen())
        found += [attention_rivals.flash_attention(version) for version in (2, 3, 4)]
        found += [attention_rivals.flex(count_mask) for count_mask in (False, True)]
    return found


BENCHMARK = harness.Benchmark(
    name="attention",
    case_type=AttentionCase,
    rates=("flop",),
    inputs=make_inputs,
    providers=providers,
    part=part,
)
