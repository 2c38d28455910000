"""precompile.py compiles what the doctor launches on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.mark.full
def test_decoding_is_split_as_on_a_gpu() -> None:
    """A CPU tensor has no multiprocessors, from whose number the decoding's splits follow."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["decode_attention_kernel", "merge_splits_kernel"]


def compiled_for_decoding() -> set[str]:
    """Kernels that Triton's compiler is given for the doctor's problems of decode_attention. It does not compile."""
    import precompile
    import triton

    names: set[str] = set()
    triton.compiler.compile = lambda src, **_: names.add(src.fn.__name__)
    with precompile.compiling(90):
        for problem in precompile.problems(torch.device("cpu"), large=True):
            if problem.op == "decode_attention":
                precompile.solve(problem, "triton", torch.bfloat16, torch.bfloat16)
    return names


if __name__ == "__main__":
    print(*sorted(compiled_for_decoding()))
