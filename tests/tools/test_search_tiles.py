"""search_tiles.py chooses the fastest tile that is right, and says why it rejects others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import search_tiles
import torch

from fastattn import dropout_add_layer_norm

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CPU = torch.device("cpu")
SLOW, TABLE, FAST, WRONG, BROKEN = ((i,) for i in range(5))
SECONDS = {SLOW: 0.02, TABLE: 0.01, FAST: 0.002, WRONG: 0.0, BROKEN: 0.0}


def planted_row(candidates: list[tuple[int]]) -> Any:
    """A layer norm whose tile decides how long it takes, and whether it is right."""
    used: list[tuple[int, ...]] = []

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, backend: str) -> torch.Tensor:
        out = dropout_add_layer_norm(x, None, weight, bias, backend="reference")
        if backend == "reference":
            return out
        tile = used[-1]
        time.sleep(SECONDS[tile])
        if tile == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return torch.where(torch.arange(out.shape[-1]) == 3, out * 1.01, out) if tile == WRONG else out

    @contextlib.contextmanager
    def use(tile: tuple[int, ...]) -> Iterator[None]:
        used.append(tile)
        yield
        used.pop()

    def problem() -> Any:
        tensors = {"x": torch.randn(10, 8), "weight": torch.ones(8), "bias": torch.zeros(8)}
        return search_tiles._doctor_problem("add_layer_norm")._replace(function=function, tensors=tensors, options={})

    paste = lambda tile: f"tile = {tile}"  # noqa: E731
    return search_tiles.Row("planted", torch.float32, problem, problem, "forward", TABLE, candidates, use, paste)


@pytest.mark.full
def test_the_fastest_right_tile_is_chosen_and_the_others_are_explained() -> None:
    row = planted_row([SLOW, TABLE, WRONG, BROKEN, FAST])
    chosen, tried = search_tiles.search(row, CPU, time.monotonic() + 100)
    status = {result["tile"]: result["status"] for result in tried}
    assert status == {FAST: "ok", SLOW: "ok", WRONG: "wrong", BROKEN: "failed"} and chosen == FAST
    text = search_tiles.render(row, chosen, tried)
    assert (
        text.endswith("NEW:\ntile = (2,)") and "wrong: (3,): out" in text and "out of resource: shared memory" in text
    )
    row = planted_row([SLOW, WRONG])
    chosen, tried = search_tiles.search(row, CPU, time.monotonic() + 100)
    assert search_tiles.render(row, chosen, tried).endswith("unchanged:\ntile = (1,)")


def test_a_row_is_pasted_into_its_column() -> None:
    row = next(search_tiles.attention(CPU, 80, False))
    line = row.paste((1, 2, 3, 4))
    assert line == '    ("forward", 16, 64): (Config(128, 64, 8, 3), Config(1, 2, 3, 4), Config(128, 64, 8, 2)),'


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal, for machines without a GPU")
def test_a_rehearsal_runs_from_end_to_end() -> None:
    """As a user starts it. Every candidate is right in the interpreter."""
    command = [sys.executable, TOOLS / "search_tiles.py", "--quick", "--device", "cpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        *(f"attention {kernel}, float32, D 64" for kernel in ("forward", "dq", "dkv", "dbias")),
        "feed-forward, relu, many tokens",
        *(f"layer norm {direction}, hidden 64" for direction in ("forward", "backward")),
    ):
        found = done.stdout.split(f"\n{row}, in the table: ")[1].split("\n\n")[0]
        assert "  ok: " in found and "wrong" not in found and "failed" not in found, found


@pytest.mark.full
def test_candidates_are_compiled_beforehand(tmp_path: Path) -> None:
    """For a GPU that is not here: the first candidate of the layer norm."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, TOOLS / "search_tiles.py", "--only", "add_layer_norm", "--capability", "90"]
    command += ["--slice", "0", "1000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("add_layer_norm_fwd_kernel.cubin"))
