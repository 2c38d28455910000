"""What tests share."""

from __future__ import annotations

from torch import Tensor

from fastattn.doctor import judge


def assert_close_as_torch(actual: Tensor, truth: Tensor, low: Tensor, what: str = "result") -> None:
    """actual is as near to truth (float64) as the rule of fastattn.doctor.judge asks; low is the plain formula's result
    in the tested dtype."""
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    assert actual.dtype == low.dtype, f"{what}: dtype {actual.dtype}, expected {low.dtype}"
    judgement = judge(actual.detach(), truth.detach(), low.detach())
    assert judgement.ok, f"{what}: error {judgement.error:.3e} is over the bound {judgement.bound:.3e}"
