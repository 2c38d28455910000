"""What tests share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastattn import dropout_add_layer_norm, explain
from fastattn.backends import BACKENDS, import_failure
from fastattn.check.tolerance import check_error


def backends_of(op_name: str, *, kernels_only: bool = False) -> tuple[str, ...]:
    """The backends that implement this op. Whether one can serve on this machine, its unsupported_reason says."""
    there = (b for b in BACKENDS if not (import_failure(op_name, b) or "").startswith("there is no"))
    return tuple(b for b in there if not kernels_only or b in ("triton", "cuda"))


def assert_close_as_torch(actual: Tensor, truth: Tensor, low: Tensor, terms: Tensor, what: str = "result") -> None:
    """actual is as near to truth (float64) as the rule of fastattn.check.tolerance.check_error asks; low is the plain formula's
    result in the tested dtype, terms the size of the terms that are summed up in each element."""
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    assert actual.dtype == low.dtype, f"{what}: dtype {actual.dtype}, expected {low.dtype}"
    judgement = check_error(actual.detach(), truth.detach(), low.detach(), terms.detach())
    assert judgement.ok, f"{what}: error {judgement.error:.3e} is over the bound {judgement.bound:.3e}"


def skip_without_triton() -> None:
    """Skips the test, with the reason, where Triton cannot run; without a GPU its interpreter is used."""
    x = torch.zeros(1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    if reason := explain(dropout_add_layer_norm, x, x, x[0], x[0]).refusals["triton"]:
        pytest.skip(reason)


def round_tf32(x: Tensor) -> Tensor:
    """float32 to 10 bits of mantissa, ties away from zero, as the kernels round what tensor cores multiply in tf32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
