"""Random calls of every op in every backend against float64, forward and backward.

    pytest --full --fuzz 2000 tests/ops/test_fuzz.py -k "attention and triton"

runs that many calls of each of these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import catalogue
import pytest
import torch
from catalogue import STRATEGIES, Call, skip_without
from helpers import backends_of
from hypothesis import assume


def check(call: Call, backend: str, device: torch.device) -> None:
    """Judge every result and gradient of a call."""
    p = catalogue.for_backend(catalogue.problem(call, device), backend)
    reduction, target = p.options.get("reduction"), p.options.get("target")
    if reduction == "mean":
        assume((target != p.options["ignore_index"]).any())  # the mean of no losses is NaN
    if call.op == "attention":  # of a single key the score's gradient is 0, and has no bound if its two terms are small
        assume({*catalogue.visible(p).sum(-1).flatten().tolist()} - {0} != {1})
    catalogue.check(p, backend)


@pytest.mark.parametrize(
    ("small", "backend", "op"),
    [
        *((True, b, op) for op in STRATEGIES for b in ("reference", "aten")),
        *(pytest.param(False, b, op, marks=pytest.mark.full) for op in STRATEGIES for b in backends_of(op)),
    ],
)
def test_every_op(small: bool, backend: str, op: str, fuzz: Callable[..., None], device: torch.device) -> None:
    skip_without(backend, op, device)
    fuzz(partial(check, backend=backend, device=device), catalogue.calls(op, backend, small))
