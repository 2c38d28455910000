"""Problems of attention to a cache, and the comparison with float64 that every backend is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers import assert_close_as_torch
from torch import Tensor

from fastattn import decode_attention, explain
from fastattn.check.tolerance import measure_rounding_scale


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor | None
    ancestors: Tensor | None

    def to(self, dtype: torch.dtype) -> Inputs:
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype))


def make(
    device: torch.device,
    batch: int = 2,
    queries: int = 3,
    heads: int = 2,
    heads_k: int = 2,
    positions: int = 37,
    head_dim: int = 32,
    value_dim: int | None = None,
    rows: int | None = None,
    lengths: list[int] | None = None,
    ancestors: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """A random problem; rows are as many as queries unless given. Half of the ancestors of a query are all alike, as
    those of a beam are."""
    rows, value_dim = queries if rows is None else rows, head_dim if value_dim is None else value_dim
    table = None
    if ancestors:
        table = torch.randint(max(rows, 1), (batch, queries, positions), dtype=torch.int32)
        table[..., : positions // 2] = table[:, :1, : positions // 2]
    q, k, v = (
        torch.randn(*shape).to(device, dtype)
        for shape in (
            (batch, queries, heads, head_dim),
            (batch, positions, rows, heads_k, head_dim),
            (batch, positions, rows, heads_k, value_dim),
        )
    )
    of_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    return Inputs(q, k, v, of_lengths, None if table is None else table.to(device))


def check(inputs: Inputs, backend: str, scale: float | None = None) -> Tensor:
    """Solve by a backend and compare with float64. Skips where the backend cannot serve on this machine."""
    refusal = explain(decode_attention, *inputs, scale=scale, backend=backend).refusals[backend]
    if refusal is not None:
        pytest.skip(refusal)
    clean = inputs._replace(key=inputs.key.nan_to_num(0), value=inputs.value.nan_to_num(0))

    def exact(change: Callable[[Tensor], Tensor]) -> Tensor:
        tensors = [change(t.double()) for t in clean[:3]]
        return decode_attention(*tensors, *clean[3:], scale=scale, backend="reference")

    truth = exact(lambda t: t)
    baseline = decode_attention(*clean, scale=scale, backend="reference")
    out = decode_attention(*inputs, scale=scale, backend=backend)
    assert out.is_contiguous()
    rounding_scale = measure_rounding_scale(lambda change: {"out": exact(change)}, {"out": truth})["out"]
    assert_close_as_torch(out, truth, baseline, rounding_scale)
    return out
