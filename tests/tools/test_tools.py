"""The tools that run on a GPU find what is wrong; here the emulator, the interpreter and planted tiles are judged."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare_emulator
import emulator_build
import hello_gpu
import pytest
import search_tiles
import torch
from helpers import skip_without_triton

import fastattn.backends.cuda
from fastattn import dropout_add_layer_norm
from fastattn.check import cases

CPU = torch.device("cpu")
SLOW, TABLE, FAST, WRONG, BROKEN = ((i,) for i in range(5))
SECONDS = {SLOW: 0.02, TABLE: 0.01, FAST: 0.002, WRONG: 0.0, BROKEN: 0.0}


@pytest.mark.full
def test_hello(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel at each kind of address and stream; a wrong result is found."""
    skip_without_triton()
    monkeypatch.setattr(hello_gpu, "HAS_GPU", False)
    assert hello_gpu.main() == 0 and capsys.readouterr().out.count(": right (") == 4
    monkeypatch.setattr(hello_gpu, "check", lambda *_: [{"ok": False, "result": "out"}])
    assert hello_gpu.main() == 1


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator takes the place of a GPU, and here is one")
def test_host_and_device_are_compared() -> None:
    if reason := emulator_build.unsupported_reason():
        pytest.skip(reason)
    library = emulator_build.build("_C", emulator_build.extension_sources(), emulator_build.BUILD_DIR)
    problem = next(p for p in compare_emulator.all_problems(CPU) if p.case == "width 64")
    both = {"host": problem, "device": problem}

    def shifted(*, backend: str, **named: Any) -> torch.Tensor:
        out = problem.function(**named, backend=backend)
        return out if backend == "reference" else out + 1e-4

    fastattn.backends.cuda.load_emulator(library)
    try:
        with compare_emulator.fixed_dropout():
            assert compare_emulator.compare(torch.bfloat16, both) == ("ok, bits equal in 5 of 5 results", True)
            wrong = both | {"device": problem._replace(function=shifted)}
            assert compare_emulator.compare(torch.float32, wrong) == ("device: out is out of bounds", False)
    finally:
        fastattn.backends.cuda.load_emulator(None)


def planted_row(candidates: list[tuple[int]]) -> search_tiles.Row:
    """A layer norm whose tile decides how long it takes, and whether it is right."""
    used: list[tuple[int, ...]] = []

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, backend: str, **none: None) -> torch.Tensor:
        out = dropout_add_layer_norm(x, None, weight, bias, backend="reference")
        if backend == "reference":
            return out
        time.sleep(SECONDS[used[-1]])
        if used[-1] == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return torch.where(torch.arange(out.shape[-1]) == 3, out * 1.01, out) if used[-1] == WRONG else out

    @contextlib.contextmanager
    def use(tile: tuple[int, ...]) -> Iterator[None]:
        used.append(tile)
        yield
        used.pop()

    problem = lambda: cases.add_layer_norm(hidden=8, residual=False)._replace(function=function)  # noqa: E731
    return search_tiles.Row("planted", torch.float32, problem, problem, "forward", TABLE, candidates, use)


@pytest.mark.full
def test_the_fastest_right_tile_is_chosen_and_the_others_are_explained() -> None:
    row = planted_row([SLOW, TABLE, WRONG, BROKEN, FAST])
    chosen, tried = search_tiles.search(row, CPU, time.monotonic() + 100)
    status = {result["tile"]: result["status"] for result in tried}
    assert status == {FAST: "ok", SLOW: "ok", WRONG: "wrong", BROKEN: "failed"} and chosen == FAST
    text = search_tiles.render(row, chosen, tried)
    assert text.endswith("NEW: (2,)") and "wrong: (3,): out" in text and "out of resource: shared memory" in text
    assert search_tiles.search(planted_row([SLOW, WRONG]), CPU, time.monotonic() + 100)[0] == TABLE


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal, for machines without a GPU")
def test_a_rehearsal_of_the_search_runs_from_end_to_end() -> None:
    """As a user starts it. Every candidate is right in the interpreter."""
    program = Path(search_tiles.__file__)
    command = [sys.executable, program, "--quick", "--device", "cpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.split("\n\n")
    assert len(found) == 7 and all("  ok: " in row for row in found), done.stdout
    assert "wrong" not in done.stdout and "failed" not in done.stdout, done.stdout
