"""Random calls of every op in every backend against float64, forward and backward.

    pytest --full --fuzz 2000 tests/ops/test_fuzz.py -k "attention and triton"

runs that many calls of each of these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import catalogue
import pytest
import torch
from catalogue import KERNELS, STRATEGIES, VARIANTS, Call, skip_without
from helpers import backends_of, check_case
from hypothesis import assume

from fastattn.backends import implementation, load_backend


def check(call: Call, backend: str, device: torch.device) -> None:
    """Judge every result and gradient of a call."""
    p = catalogue.for_backend(catalogue.problem(call, device), backend)
    reduction, target = p.options.get("reduction"), p.options.get("target")
    if reduction == "mean":
        assume((target != p.options["ignore_index"]).any())  # the mean of no losses is NaN
    catalogue.check(p, backend)


@pytest.mark.parametrize("op", STRATEGIES)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_some_calls(backend: str, op: str, fuzz: Callable[..., None], device: torch.device) -> None:
    fuzz(partial(check, backend=backend, device=device), catalogue.calls(op, backend, small=True))


@pytest.mark.full
@pytest.mark.parametrize(("backend", "op"), [(b, op) for op in STRATEGIES for b in backends_of(op)])
def test_every_op(backend: str, op: str, fuzz: Callable[..., None], device: torch.device) -> None:
    skip_without(backend, op, device)
    fuzz(partial(check, backend=backend, device=device), catalogue.calls(op, backend))


# Of each op with two kernels: the functions of its backward.
BACKWARD = {
    "attention": ("attention_bwd",),
    "add_layer_norm": ("add_layer_norm_bwd",),
    "feed_forward": ("feed_forward_dz",),
}


def swap_backward(op: str, forward: str, backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `forward` gets the other's functions of the backward, and masks in the layouts that these read."""
    first, second = (load_backend(op, name) for name in (forward, backward))
    functions = {name: getattr(second, name) for name in BACKWARD[op]}
    if op == "attention":
        functions["mask_layouts"] = lambda *call: (*first.mask_layouts(*call)[:1], *second.mask_layouts(*call)[1:])
    if op == "add_layer_norm":  # each backend has its own number of tickets after the first two statistics of the rows

        def add_layer_norm_bwd(dout: Any, dz: Any, call: Any, statistics: Any, *others: Any) -> Any:
            two, rest = statistics.split([2 * len(call.x), len(statistics) - 2 * len(call.x)])
            statistics = torch.cat([two, two.new_zeros(second.TICKETS), rest[first.TICKETS :]])
            return second.add_layer_norm_bwd(dout, dz, call, statistics, *others)

        functions["add_layer_norm_bwd"] = add_layer_norm_bwd
    monkeypatch.setattr(implementation(op, forward), "module", SimpleNamespace(**vars(first) | functions))


@pytest.fixture
def both_kernels(device: torch.device, request: pytest.FixtureRequest) -> None:
    if device.type == "cpu":
        request.getfixturevalue("emulator")
    for backend in KERNELS:
        skip_without(backend, "add_layer_norm", device)


TWO_WAYS = pytest.mark.parametrize(("forward", "backward"), [KERNELS, KERNELS[::-1]])


@pytest.mark.full
@pytest.mark.parametrize("op", BACKWARD)
@TWO_WAYS
def test_backward_of_another_backend(
    op: str,
    forward: str,
    backward: str,
    fuzz: Callable[..., None],
    device: torch.device,
    both_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swap_backward(op, forward, backward, monkeypatch)
    fuzz(partial(check, backend=forward, device=device), catalogue.calls(op, "cuda"))  # which takes fewer than Triton


@pytest.mark.parametrize(
    "name",
    [
        "attention grouped, dropout",
        "norm with sum and dropout",
        "norm by std",
        "feed-forward relu",
    ],
)
@TWO_WAYS
def test_one_backward_of_another_backend(
    name: str, forward: str, backward: str, device: torch.device, both_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = VARIANTS[name].map(lambda t: t.to(device))
    swap_backward(p.op, forward, backward, monkeypatch)
    check_case(p, forward)
