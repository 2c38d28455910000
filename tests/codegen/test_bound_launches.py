"""A launch of a Triton kernel that is bound before passes what Triton's own path passes. See launch_cases.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# Errors that launch_cases.py plants, and what must be said of them.
OTHER = "a kernel that was compiled for other arguments"
PLANTED = {
    **dict.fromkeys(("alignment", "integers", "strides", "mask"), OTHER),
    **dict.fromkeys(("x_bias", "hidden"), f"add_layer_norm_fwd_kernel: {OTHER}"),
    "type of the weight": f"add_layer_norm_bwd_kernel: {OTHER}",
    "type of tokens": f"embed_layer_norm_fwd_kernel: {OTHER}",
    "few tokens": f"feed_forward_fwd_kernel: {OTHER}",
    "activation": f"feed_forward_bwd_kernel: {OTHER}",
    "64 bits": f"cross_entropy_rows_kernel: {OTHER}",
    "queries": f"attention_dkv_kernel: {OTHER}",
    "stream": "Triton launches",
    "no hooks": "launch_enter_hook: []",
    "wrong handle": "another kernel's handles",
}


def run_cases(*error: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, Path(__file__).with_name("launch_cases.py"), *error]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.full
def test_bound_launches_are_tritons() -> None:
    done = run_cases()
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.full
@pytest.mark.parametrize("error", PLANTED)
def test_planted_error_is_found(error: str) -> None:
    *_, last_line = run_cases(error).stderr.splitlines()
    assert last_line.startswith("AssertionError") and PLANTED[error] in last_line
