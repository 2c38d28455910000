"""What every test of an op's backend needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastattn.backends.reference import philox


def backend_of(request: pytest.FixtureRequest) -> str | None:
    return request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None


@pytest.fixture(autouse=True)
def match_dropout_rule(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test computes with the reference drops the same elements as the tested backend."""
    with philox.reference_dropout_rule(backend_of(request) or "reference"):
        yield


@pytest.fixture(autouse=True)
def cuda_on_a_cpu(request: pytest.FixtureRequest) -> None:
    """Without a GPU, the CUDA backend runs through csrc/emulator."""
    if backend_of(request) == "cuda" and not torch.cuda.is_available():
        request.getfixturevalue("guard_zones")
        request.getfixturevalue("emulator")
