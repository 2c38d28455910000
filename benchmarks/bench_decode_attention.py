"""decode_attention: every backend, and torch's scaled_dot_product_attention on a cache as users keep it.

python benchmarks/report.py --only decode_attention
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import DecodeAttentionCase
from harness import Inputs, Provider
from torch import Tensor

from fastattn import decode_attention


def make_inputs(case: DecodeAttentionCase, device: torch.device) -> Inputs:
    randn = harness.seeded_randn(device, case.dtype)
    rows = 1 if case.keys == "shared" else case.queries
    leaves = {"query": randn(case.batch, case.queries, case.n_head, case.head_dim)}
    leaves |= {name: randn(case.batch, case.length, rows, case.n_head, case.head_dim) for name in ("key", "value")}
    fixed = {"lengths": case.lengths.int().to(device)} if case.keys == "shared" else {}
    fixed |= {"ancestors": case.ancestors.to(device)} if case.keys == "of beams" else {}
    return Inputs(leaves, fixed)


def torch_sdpa(case: DecodeAttentionCase, inputs: Inputs, dropout_p: float) -> Any:
    """A batch entry for each beam: keys and values (batch * queries, n_head, length, head_dim), made before the timing.

    At every step index_select moves the beams that go on. Shared keys were repeated once, for all steps.
    """
    query, lengths = inputs.leaves["query"], inputs.fixed.get("lengths")
    ancestors = inputs.fixed.get("ancestors")
    rows = case.batch * case.queries
    mask = moved = None
    if lengths is not None:
        mask = (torch.arange(case.length, device=query.device) < lengths[:, None])[:, None, None]
        mask = mask.repeat_interleave(case.queries, dim=0)
    if ancestors is not None:
        moved = torch.arange(rows, device=query.device).view(case.batch, case.queries).roll(1, dims=1).flatten()

    def cached(t: Tensor) -> Tensor:
        """What the cache holds before beams move."""
        if ancestors is not None:
            place = ancestors.long().transpose(1, 2)[..., None, None].expand(*t.shape)
            t = t.gather(2, place).roll(-1, dims=2)
        t = t.expand(-1, -1, case.queries, -1, -1)  # (batch, length, queries, n_head, head_dim)
        return t.permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()

    cache = cached(inputs.leaves["key"]), cached(inputs.leaves["value"])

    def attend(query: Tensor, **leaves: Tensor) -> Tensor:
        k, v = cache if moved is None else (t.index_select(0, moved) for t in cache)
        out = F.scaled_dot_product_attention(query.reshape(rows, case.n_head, 1, case.head_dim), k, v, mask)
        return out.view_as(query)

    return attend


def arguments(case: DecodeAttentionCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return inputs.fixed


def providers(device: torch.device) -> list[Provider]:
    return [*harness.ours(decode_attention, arguments), harness.rival("sdpa", torch_sdpa)]


BENCHMARK = harness.Benchmark(
    name="decode_attention",
    case_type=DecodeAttentionCase,
    rates=("byte",),
    inputs=make_inputs,
    providers=providers,
    directions=("forward",),
)
