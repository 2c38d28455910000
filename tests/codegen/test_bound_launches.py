"""A launch of a Triton kernel that is bound before passes what Triton's own path passes. See launch_cases.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# Known errors in launch_cases.py, and the messages that must follow.
OTHER = "a kernel that was compiled for other arguments"
PLANTED = {
    **dict.fromkeys(("alignment", "integers", "strides", "mask"), OTHER),
    **dict.fromkeys(("type of the residual", "x_bias", "hidden"), f"add_layer_norm_fwd_kernel: {OTHER}"),
    **dict.fromkeys(("type of out", "type of read"), f"add_layer_norm_fwd_kernel: {OTHER}"),
    **dict.fromkeys(("type of dx", "type of the weight"), f"add_layer_norm_bwd_kernel: {OTHER}"),
    "few tokens": f"feed_forward_fwd_kernel: {OTHER}",
    "activation": f"feed_forward_bwd_kernel: {OTHER}",
    "64 bits": f"cross_entropy_rows_kernel: {OTHER}",
    "queries": f"attention_dkv_kernel: {OTHER}",
    "stream": "Triton launches",
    "no hooks": "launch_enter_hook: []",
    "wrong handle": "another kernel's handles",
    "order": "Triton launches",
}
PLANTED_IN_C = "stream", "order", "warps"  # with launchers in C

COMPILE_A_KERNEL = """
import sys

import fastattn, precompile, torch

x, weight = torch.zeros(4, 8), torch.ones(8)
job = lambda: fastattn.dropout_add_layer_norm(x, None, weight, weight, backend="triton")
if sys.argv[1] == "precompile":
    precompile.compile_slice([job], 0, 1, 90)
else:
    with precompile.compiling(90, precompile.build_launcher):
        job()
"""


def run_program(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def run_cases(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_program(Path(__file__).with_name("launch_cases.py"), *arguments, **variables)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Triton finds the stub of libcuda, and keeps the launchers that it builds in a folder."""
    if shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("Triton's launchers need gcc and Python.h")
    folder = tmp_path_factory.mktemp("stub")
    source, library = Path(__file__).with_name("stub_libcuda.c"), folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    (folder / "libcuda.so").symlink_to(library)  # the name that triton 3.5 links
    libraries = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    return {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": libraries, "TRITON_CACHE_DIR": str(folder / "cache")}


@pytest.mark.bug_class("T6")
@pytest.mark.full
def test_bound_launches_are_tritons() -> None:
    done = run_cases()
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.full
@pytest.mark.parametrize("error", PLANTED)
def test_planted_error_is_found(error: str) -> None:
    *_, last_line = run_cases(error).stderr.splitlines()
    assert last_line.startswith("AssertionError") and PLANTED[error] in last_line


@pytest.mark.full
def test_launchers_in_c_are_given_the_same(stub: dict[str, str]) -> None:
    done = run_cases("--stub", **stub)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.full
@pytest.mark.parametrize("error", PLANTED_IN_C)
def test_planted_error_is_found_with_launchers_in_c(error: str, stub: dict[str, str]) -> None:
    *_, last_line = run_cases("--stub", error, **stub).stderr.splitlines()
    assert last_line.startswith("AssertionError") and "Triton launches" in last_line


@pytest.mark.full
def test_precompiled_launchers_are_used(stub: dict[str, str], tmp_path: Path) -> None:
    """A process without a C compiler finds what launches a kernel in Triton's cache, after precompile.py only."""
    variables = stub | {"TRITON_CACHE_DIR": str(tmp_path)}

    def compiles_without_gcc() -> bool:
        done = run_program("-c", COMPILE_A_KERNEL, "launch", **variables, CC="false")
        assert done.returncode == 0 or "'false'" in done.stderr.splitlines()[-1], done.stderr
        return done.returncode == 0

    assert not compiles_without_gcc()
    done = run_program("-c", COMPILE_A_KERNEL, "precompile", **variables)
    assert done.returncode == 0, done.stderr
    assert compiles_without_gcc()
