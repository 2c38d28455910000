"""The CUDA backend of embedding + positions + dropout + LayerNorm against float64, every buffer inside guard zones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from add_layer_norm_cases import EPS, Guarded
from helpers import assert_close_as_torch
from torch import Tensor

from fastattn.backends.cuda import embed_layer_norm as backend
from fastattn.backends.reference.add_layer_norm import add_layer_norm
from fastattn.check.tolerance import measure_rounding_scale

VOCABULARY, PLACES, LENGTH, SCALE = 13, 6, 4, 3.0
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


class Case(NamedTuple):
    rows: int
    hidden: int
    dtypes: tuple[torch.dtype, ...] = (FLOAT32,) * 4  # of embedding, table, weight and bias, result
    dropout_p: float = 0.0
    indices: torch.dtype | None = None  # of positions given; None: in order
    shift: int = 0  # elements by which every buffer starts after a 16-byte boundary

    def __str__(self) -> str:
        types = "-".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        text = f"{self.rows}x{self.hidden}-{types}-p{self.dropout_p}-shift{self.shift}"
        return text if self.indices is None else f"{text}-{str(self.indices).removeprefix('torch.')}"


class Memory(Guarded):
    """Also of integers, whose buffers have no guard zones: they are small and hold what no index is."""

    int64 = torch.int64

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not dtype.is_floating_point:
            return torch.full(shape, -7, dtype=dtype, device=device)
        return super().empty(*shape, dtype=dtype, device=device)


def inputs(case: Case, memory: Memory) -> dict[str, Any]:
    """The forward's arguments by name, eps and dtype left out; in memory's buffers."""
    of_embedding, of_table, of_weight, _ = case.dtypes
    given = case.indices is not None
    integers = case.indices or torch.int64
    rng_state = torch.tensor([0x1234_5678_9ABC_DEF0, 0x1_0000_002A], dtype=torch.int64, device=memory.device)
    return {
        "embedding": memory.copy(torch.randn(VOCABULARY, case.hidden), of_embedding),
        "weight": memory.copy(torch.randn(case.hidden) + 1, of_weight),
        "bias": memory.copy(torch.randn(case.hidden), of_weight),
        "tokens": torch.randint(VOCABULARY, (case.rows,)).to(memory.device, integers),
        "position_table": memory.copy(torch.randn(PLACES, case.hidden), of_table),
        "position": torch.randint(PLACES, (case.rows,)).to(memory.device, integers) if given else None,
        "length": LENGTH,
        "scale": SCALE,
        "dropout_p": case.dropout_p,
        "rng_state": rng_state if case.dropout_p > 0 else None,
    }


def formula(
    given: dict[str, Any], dout: Tensor, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda t: t
) -> dict[str, Tensor]:
    """Every result, calculated in `dtype`. change: of each input."""
    tokens, position = given["tokens"].long(), given["position"]
    places = torch.arange(len(tokens), device=tokens.device) % LENGTH if position is None else position.long()
    tensors = (given["embedding"][tokens], given["weight"], given["bias"])
    words, weight, bias = (change(t.to(dtype)).requires_grad_() for t in tensors)
    z = words * SCALE + change(given["position_table"][places].to(dtype))
    out, dropped = add_layer_norm(z, None, weight, bias, EPS, given["dropout_p"], given["rng_state"])
    drows, dweight, dbias = torch.autograd.grad(out, (words, weight, bias), change(dout.to(dtype)))
    center = dropped.mean(-1)
    rstd = ((dropped - center[:, None]).square().mean(-1) + EPS).rsqrt()
    found = {"out": out, "drows": drows, "dweight": dweight, "dbias": dbias, "mean": center, "rstd": rstd}
    return {name: t.detach() for name, t in found.items()}


def call(given: dict[str, Any], dout: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Forward and backward in the backend: results and statistics."""
    out, statistics = backend.embed_layer_norm_fwd(**given, eps=EPS, dtype=dout.dtype)
    made = statistics.clone()
    drows, index, dweight, dbias = backend.embed_layer_norm_bwd(dout, **given, statistics=statistics)
    if len(dout):  # without rows nothing makes statistics
        same = torch.equal(statistics.nan_to_num(), made.nan_to_num())
        assert same, "another backward would not find the tickets as this one did"
    return {"out": out, "drows": drows, "index": index, "dweight": dweight, "dbias": dbias}, statistics


def run(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, ...]:
    """Forward and backward in the backend, each result judged; all of them, for comparisons of bits."""
    memory = Memory(device, case.shift)
    given = inputs(case, memory)
    dout = memory.copy(torch.randn(case.rows, case.hidden), case.dtypes[-1])
    with monkeypatch.context() as patch:
        patch.setattr(backend, "torch", memory)
        results, statistics = call(given, dout)
    memory.check()
    assert torch.equal(results["index"], given["tokens"].long())
    assert case.rows == 0 or not statistics[2 * case.rows :].any()
    truth, low = formula(given, dout, torch.float64), formula(given, dout, torch.float32)
    mean, rstd = statistics[: 2 * case.rows].view(2, case.rows)
    torch.testing.assert_close(mean, truth["mean"].float())
    torch.testing.assert_close(rstd, truth["rstd"].float())
    scale = measure_rounding_scale(partial(formula, given, dout, torch.float64), truth)
    dtypes = {"out": case.dtypes[3], "drows": case.dtypes[0], "dweight": case.dtypes[2], "dbias": case.dtypes[2]}
    for name, dtype in dtypes.items():
        assert_close_as_torch(results[name], truth[name], low[name].to(dtype), scale[name], name)
    return *results.values(), mean, rstd
