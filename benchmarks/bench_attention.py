"""scaled_dot_product_attention: every backend, and torch's own with each of its kernels pinned.

    python benchmarks/bench_attention.py [--device cuda] [--out FILE.json] [--quick]

Masks are made before the clock starts, as a training step makes them once for all its layers.
"""

from __future__ import annotations

import sys
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import ATTENTION, AttentionCase
from harness import Inputs, Provider, Refused, Run
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn import AttentionMask, scaled_dot_product_attention


def make_inputs(case: AttentionCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.SEED)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    heads_k = case.heads_k or case.heads
    leaves = {
        "query": randn(case.batch, case.heads, case.length_q, case.dim),
        "key": randn(case.batch, heads_k, case.length_k, case.dim),
        "value": randn(case.batch, heads_k, case.length_k, case.dim),
    }
    fixed: dict[str, Any] = {}
    if case.mask == "bias":
        leaves["attn_mask"] = randn(1, case.heads, case.length_q, case.length_k)
    if case.mask == "bool":
        fixed["attn_mask"] = case.dense().to(device)
    if case.mask == "padding":
        fixed["key_padding"] = torch.arange(case.length_k, device=device) < case.lengths.to(device)[:, None]
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    return Inputs(leaves, fixed, randn(case.batch, case.heads, case.length_q, case.dim))


def part(case: AttentionCase, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The first key-value head and its queries; of the first sequence only, unless a bias gradient sums over all."""
    batch = case.batch if case.mask == "bias" else 1
    if name == "key_padding":
        return tensor[:batch]
    group = case.heads // (case.heads_k or case.heads)
    return tensor[:batch, : group if name in ("query", "out") else 1]


def arguments(case: AttentionCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    """For scaled_dot_product_attention, beside query, key, value and a bias."""
    given = {"is_causal": case.mask == "causal", "dropout_p": dropout_p, "enable_gqa": case.heads_k is not None}
    return given | ({"attn_mask": AttentionMask(**inputs.fixed)} if inputs.fixed else {})


def torch_sdpa(name: str, kernel: SDPBackend | None) -> Provider:
    """torch's function with one kernel pinned, or with torch's own choice. A structured mask is given to it dense."""

    def make(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
        options = arguments(case, inputs, dropout_p)
        if inputs.fixed:
            options["attn_mask"] = case.dense().to(inputs.leaves["query"].device)

        def attend(**leaves: torch.Tensor) -> torch.Tensor:
            if kernel is None:
                return F.scaled_dot_product_attention(**leaves, **options)
            with sdpa_kernel([kernel]):
                return F.scaled_dot_product_attention(**leaves, **options)

        try:
            attend(**inputs.leaves)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Refused("torch has no such kernel for this case") from error
            raise
        return harness.run_of(attend, inputs)

    return Provider(name, make, ours=False)


def providers(device: torch.device) -> list[Provider]:
    peers = {"sdpa (default)": None}
    if device.type == "cuda":
        peers |= {
            "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
            "sdpa flash": SDPBackend.FLASH_ATTENTION,
            "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
    ours = harness.ours(scaled_dot_product_attention, arguments)
    return ours + [torch_sdpa(name, kernel) for name, kernel in peers.items()]


BENCHMARK = harness.Benchmark(
    name="attention",
    cases=ATTENTION,
    directions=("forward", "backward", "both"),
    rates=("flop",),
    inputs=make_inputs,
    providers=providers,
    part=part,
)


def test_attention(benchmark: Any, timed: Any) -> None:
    benchmark(timed)


if __name__ == "__main__":
    sys.exit(harness.main(BENCHMARK))
