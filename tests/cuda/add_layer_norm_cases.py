"""The CUDA backend of layer norm against the formulas in float64, with every buffer inside guard zones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import assert_close_as_torch
from torch import Tensor

from fastattn.backends.cuda import add_layer_norm as backend
from fastattn.backends.reference import add_layer_norm as reference
from fastattn.check.tolerance import measure_rounding_scale

EPS = 1e-2  # large enough to matter
GUARD = 64  # elements before and after each buffer


class Case(NamedTuple):
    rows: int
    hidden: int
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0
    residual: bool = True
    dz: bool = True
    rms: bool = False
    eps_on_std: bool = False
    x_bias: torch.dtype | None = None
    shift: int = 0  # elements by which every buffer starts after a 16-byte boundary

    def __str__(self) -> str:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        words = [f"{self.rows}x{self.hidden}", short[self.dtype], f"w-{short[self.weight_dtype]}"]
        words += [f"p{self.dropout_p}"] if self.dropout_p else []
        words += [name for name in ("residual", "dz", "rms", "eps_on_std") if getattr(self, name)]
        words += [f"x-{short[self.x_bias]}"] if self.x_bias else []
        return "-".join([*words, *([f"shift{self.shift}"] if self.shift else [])])


class Guarded:
    """Stands in for torch in the backend: NaN-filled buffers between guard zones, `shift` elements off a boundary."""

    float32 = torch.float32

    def __init__(self, device: torch.device, shift: int) -> None:
        self.device, self.shift = device, shift
        self.zones: list[tuple[Tensor, int, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        whole = torch.full((count + 2 * GUARD + self.shift,), torch.nan, dtype=dtype, device=device)
        start = GUARD + self.shift
        whole[:start] = whole[start + count :] = 7.0
        self.zones.append((whole, start, count))
        return whole[start : start + count].view(shape)

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(*x.shape, dtype=x.dtype, device=x.device)

    def copy(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.empty(*x.shape, dtype=dtype, device=self.device).copy_(x)

    def check(self) -> None:
        for whole, start, count in self.zones:
            outside = torch.cat([whole[:start], whole[start + count :]])
            assert (outside == 7.0).all(), "a kernel wrote outside its buffer"


def inputs(case: Case, memory: Guarded) -> SimpleNamespace:
    """x, residual, weight, bias, x_bias, rng_state, and dout, dz; in memory's buffers."""
    matrix, vector = (case.rows, case.hidden), (case.hidden,)
    rng_state = torch.tensor([0x1234_5678_9ABC_DEF0, 0x1_0000_002A], dtype=torch.int64, device=memory.device)
    return SimpleNamespace(
        x=memory.copy(torch.randn(matrix) + 0.5, case.dtype),
        residual=memory.copy(torch.randn(matrix), case.dtype) if case.residual else None,
        weight=memory.copy(torch.randn(vector), case.weight_dtype),
        bias=None if case.rms else memory.copy(torch.randn(vector), case.weight_dtype),
        x_bias=memory.copy(torch.randn(vector) * 0.6, case.x_bias) if case.x_bias else None,
        dout=memory.copy(torch.randn(matrix), case.dtype),
        dz=memory.copy(torch.randn(matrix), case.dtype) if case.dz else None,
        rng_state=rng_state if case.dropout_p > 0 else None,
    )


def formula(
    case: Case,
    given: SimpleNamespace,
    dtype: torch.dtype | None,
    change: Callable[[Tensor], Tensor] = lambda t: t,
) -> dict[str, Tensor]:
    """Every result by the reference formula in `dtype`; None: in that of each tensor. change: of each input."""

    def prepared(t: Tensor | None) -> Tensor | None:
        return None if t is None else change(t.to(dtype or t.dtype)).detach()

    names = ("x", "residual", "weight", "bias", "x_bias")
    leaves = {name: prepared(vars(given)[name]) for name in names}
    *tensors, x_bias = (None if t is None else t.requires_grad_() for t in leaves.values())
    dout, dz = prepared(given.dout), prepared(given.dz)
    out, z = reference.add_layer_norm(*tensors, EPS, case.dropout_p, given.rng_state, x_bias, case.eps_on_std)
    present = {f"d{name}": t for name, t in leaves.items() if t is not None}
    douts = [dout.to(out), torch.zeros_like(z) if dz is None else dz.to(z)]
    grads = torch.autograd.grad([out, z], list(present.values()), douts)
    return {"out": out.detach(), "z": z.detach()} | dict(zip(present, grads, strict=True))


def run(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, ...]:
    """Forward and backward in the backend, each judged; every result, for comparisons of bits."""
    memory = Guarded(device, case.shift)
    given = inputs(case, memory)
    dropout, last = (case.dropout_p, given.rng_state), (given.x_bias, case.eps_on_std)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "torch", memory)
        tensors = (given.x, given.residual, given.weight, given.bias)
        out, z, statistics = backend.add_layer_norm_fwd(*tensors, EPS, *dropout, *last)
        made = statistics.clone()
        dx, dresidual, *sums = backend.add_layer_norm_bwd(
            given.dout, given.dz, z, given.weight, given.bias, statistics, *dropout, case.residual, *last
        )
    memory.check()
    if case.rows > 0:  # another backward of the same forward finds the tickets as this one did
        assert torch.equal(statistics, made)
        assert not statistics[2 * case.rows :][: backend.TICKETS].any()
    mean, rstd = statistics[: 2 * case.rows].view(2, case.rows)
    assert (z is given.x) == (not case.residual and case.dropout_p == 0 and given.x_bias is None)
    assert (dresidual is None) == (not case.residual)
    assert (sums[2] is None) == (given.x_bias is None)

    truth, low = formula(case, given, torch.float64), formula(case, given, None)
    # The statistics are those of z before it was rounded: in 16-bit types, those of the stored z are further off.
    center = truth["z"].mean(-1, keepdim=True) * (not case.rms)
    variance = (truth["z"] - center).square().mean(-1)
    torch.testing.assert_close(mean, center[:, 0].float())
    if case.eps_on_std:
        variance *= case.hidden / (case.hidden - 1)
    expected = 1 / (variance.sqrt() + EPS) if case.eps_on_std else (variance + EPS).rsqrt()
    torch.testing.assert_close(rstd, expected.float())
    names = ("out", "z", "dx", "dresidual", "dweight", "dbias", "dx_bias")
    results = {n: t for n, t in zip(names, (out, z, dx, dresidual, *sums), strict=True) if t is not None}
    scale = measure_rounding_scale(partial(formula, case, given, torch.float64), truth)
    for name, result in results.items():
        assert_close_as_torch(result, truth[name], low[name].to(result.dtype), scale[name], name, case.dtype)
    return mean, rstd, *results.values()
