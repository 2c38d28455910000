"""A launch of a Triton kernel that is bound before passes what Triton's own path passes. See launch_cases.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


def run_cases(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, Path(__file__).with_name("launch_cases.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return done


def test_bound_launches_are_tritons() -> None:
    run_cases()


def test_planted_errors_are_found() -> None:
    found = [json.loads(line) for line in run_cases("--planted").stdout.splitlines()]
    missed = [f"{name}: {message}, not {wanted}" for name, wanted, message in found if wanted not in message]
    assert found and not missed, "\n".join(missed)
