"""Names of catalogue.py, for the tests that are to be moved to it."""

from __future__ import annotations

from typing import Any

import catalogue
import torch
from catalogue import ACTIVATIONS, FORMULAS, GATED, Backend, skip_without, solve
from torch import Tensor

from fastattn.check import cases
from fastattn.check.cases import Problem

__all__ = ["ACTIVATIONS", "FORMULAS", "GATED", "check", "gradcheck", "skip_without", "solve"]


def check(p: Problem, backend: Backend, formula_of: Problem | None = None) -> dict[str, Tensor]:
    got = solve(p, backend)
    catalogue.judge(formula_of or p, got)
    return got


def gradcheck(p: Problem, backend: str) -> None:
    """In float64: the results are the formula's, and the gradients those of finite differences."""
    torch.testing.assert_close(solve(p, backend), cases.solve(p, FORMULAS[p.op]), rtol=1e-12, atol=1e-13)

    def call(*tensors: Tensor) -> Any:
        torch.manual_seed(cases.SEED)  # one draw of dropout
        return p.function(**p.arguments(dict(zip(p.tensors, tensors, strict=True))), backend=backend)

    assert torch.autograd.gradcheck(call, [t.detach().requires_grad_() for t in p.tensors.values()])
