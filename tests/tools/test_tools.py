"""The tools that run on a GPU find what is wrong; here the interpreter and planted tiles are judged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import hello_gpu
import pytest
import search_tiles
import torch
from helpers import skip_without_triton

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
    assert hello_gpu.main() == 0 and capsys.readouterr().out.count(": right (") == 3
    monkeypatch.setattr(hello_gpu, "check", lambda *_: [{"ok": False, "result": "out"}])
    assert hello_gpu.main() == 1


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
def test_the_fastest_right_tile_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = search_tiles.search(planted_row([SLOW, TABLE, WRONG, BROKEN, FAST]), CPU, time.monotonic() + 100)
    said = capsys.readouterr().out
    assert chosen == FAST and said.endswith("NEW: (2,)\n")
    assert "(3,): wrong: out" in said and "out of resource: shared memory" in said
    assert search_tiles.search(planted_row([SLOW, WRONG]), CPU, time.monotonic() + 100) == TABLE


@pytest.mark.full
def test_a_row_of_the_table_can_be_searched() -> None:
    """Its small problem, with its first candidate, in the interpreter."""
    skip_without_triton()
    row = next(search_tiles.table(CPU, 90))
    search_tiles.make_step(row, row.candidates[0], row.checked)()
