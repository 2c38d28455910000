"""What tests share."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fastattn import dropout_add_layer_norm, explain
from fastattn.backends import BACKENDS, import_failure
from fastattn.backends.constants import NO_KERNEL
from fastattn.check.cases import Problem, expected_results, solve
from fastattn.check.tolerance import check_error


def has_kernel(op_name: str, backend: str) -> bool:
    """Whether a backend has a module for the op, whatever its calls. op_name: a key of REGISTRY."""
    return not (import_failure(op_name, backend) or "").startswith(NO_KERNEL)


def backends_of(op_name: str, *, kernels_only: bool = False) -> tuple[str, ...]:
    """The backends that implement this op. Its unsupported_reason decides whether it runs on this machine."""
    there = (b for b in BACKENDS if has_kernel(op_name, b))
    return tuple(b for b in there if not kernels_only or b in ("triton", "cuda"))


def autograd_nodes(out: Tensor) -> set[str]:
    """The names of the autograd nodes behind a result."""
    new, found = [out.grad_fn], set()
    while new:
        node = new.pop()
        if node is not None and node not in found:
            found.add(node)
            new += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in found}


def import_torch_tests(name: str) -> ModuleType:
    """torch.testing._internal's module of this name, which has samples of PyTorch's functions or modules. Skips the
    test without expecttest, which these modules import."""
    pytest.importorskip("expecttest")
    return importlib.import_module(f"torch.testing._internal.{name}")


def assert_close_as_torch(
    actual: Tensor,
    truth: Tensor,
    baseline: Tensor,
    rounding_scale: Tensor,
    what: str = "result",
    computed_in: torch.dtype | None = None,
) -> None:
    """The rule of fastattn.check.tolerance.check_error, whose arguments these are."""
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    assert actual.dtype == baseline.dtype, f"{what}: dtype {actual.dtype}, expected {baseline.dtype}"
    found = check_error(actual, truth, baseline, rounding_scale, computed_in)
    assert found.ok, f"{what}: error {found.error:.3e} is over the bound {found.bound:.3e}"


def check_case(p: Problem, backend: str) -> dict[str, Tensor]:
    """Judge every result and gradient of a backend by the reference in float64. Returns them."""
    got = solve(p, backend)
    for name, (truth, baseline, scale) in expected_results(p).items():
        assert_close_as_torch(got[name], truth, baseline, scale, name, next(iter(p.tensors.values())).dtype)
    return got


def run_python(*arguments: str | Path, **environment: str) -> str:
    """What a new process prints, in which Triton compiles, and which imports what tests import."""
    given = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:] or done.stdout[-6000:]
    return done.stdout


def skip_without_triton() -> None:
    """Skips the test, with the reason, where Triton cannot run; without a GPU its interpreter is used."""
    x = torch.zeros(1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    if reason := explain(dropout_add_layer_norm, x, x, x[0], x[0]).refusals["triton"]:
        pytest.skip(reason)


def round_tf32(x: Tensor) -> Tensor:
    """float32 to 10 bits of mantissa, ties away from zero, as the kernels round what tensor cores multiply in tf32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
