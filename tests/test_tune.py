"""tune.py takes the fastest tile that is right, says why it rejects others, and leaves the table alone otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).parent / "cuda")]

import compiled_launches  # noqa: E402
import host_build  # noqa: E402
import tune  # noqa: E402
import tune_cuda  # noqa: E402
import tune_tables  # noqa: E402

import fastattn.cuda  # noqa: E402
from fastattn import dropout_add_layer_norm  # noqa: E402
from fastattn._problems import Problem  # noqa: E402

CPU = torch.device("cpu")
SLOW, TABLE, FAST, WRONG, BROKEN, BROKEN_LATER = ((i,) for i in range(6))
SECONDS = {SLOW: 0.02, TABLE: 0.01, FAST: 0.002, WRONG: 0.0, BROKEN: 0.0, BROKEN_LATER: 0.0}


def planted_row(current: tuple[int], candidates: list[tuple[int]]) -> tune_tables.Row:
    """A layer norm whose tile decides how long it takes, and whether it is right."""
    used: list[tuple[int, ...]] = []

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, backend: str) -> torch.Tensor:
        out = dropout_add_layer_norm(x, None, weight, bias, backend="reference")
        if backend == "reference":
            return out
        tile = used[-1]
        time.sleep(SECONDS[tile])
        if tile == BROKEN or (tile == BROKEN_LATER and len(x) > 10):
            raise RuntimeError("out of resource: shared memory")
        return torch.where(torch.arange(out.shape[-1]) == 3, out * 1.01, out) if tile == WRONG else out

    @contextlib.contextmanager
    def use(tile: tuple[int, ...]) -> Iterator[None]:
        used.append(tile)
        yield
        used.pop()

    def problem(rows: int) -> Problem:
        tensors = {"x": torch.randn(rows, 8), "weight": torch.ones(8), "bias": torch.zeros(8)}
        return Problem("add_layer_norm", "planted", function, tensors, {})

    return tune_tables.Row(
        "planted", "triton", torch.float32, lambda: problem(10), lambda: problem(20), "forward",
        current, candidates, use, lambda tile: f"tile = {tile}",
    )  # fmt: skip


def found_by_search(row: tune_tables.Row, seconds: float = 100) -> dict[str, Any]:
    return tune.search(row, CPU, time.monotonic() + seconds)


def test_the_fastest_right_tile_is_taken_and_the_others_are_explained() -> None:
    found = found_by_search(planted_row(TABLE, [SLOW, TABLE, WRONG, BROKEN, BROKEN_LATER, FAST]))
    status = {tuple(result["tile"]): result["status"] for result in found["tried"]}
    assert status == {
        FAST: "ok", TABLE: "ok", SLOW: "ok", WRONG: "wrong", BROKEN: "failed", BROKEN_LATER: "failed",
    }  # fmt: skip
    assert found["chosen"] == list(FAST) and found["changed"] and found["paste"] == "tile = (2,)"
    text = tune.render(found)
    assert "3 of 6 candidates are right" in text and "NEW" in text and text.endswith("tile = (2,)")
    assert "wrong: (3,): out of bounds: out" in text
    assert text.count("out of resource: shared memory") == 2
    assert text.index("(2,)") < text.index("(1,)  in the table") < text.index("(0,)")


def test_the_table_stays_where_nothing_is_faster() -> None:
    found = found_by_search(planted_row(FAST, [SLOW, WRONG, FAST]))
    assert found["chosen"] == list(FAST) and not found["changed"]
    assert "stays" in tune.render(found)


def test_a_wrong_tile_in_the_table_is_replaced() -> None:
    found = found_by_search(planted_row(WRONG, [SLOW]))
    assert found["chosen"] == list(SLOW) and found["changed"]


def test_where_nothing_is_right_nothing_is_to_be_pasted() -> None:
    assert "nothing to paste" in tune.render(found_by_search(planted_row(WRONG, [BROKEN])))


def test_what_time_does_not_allow_is_counted() -> None:
    found = found_by_search(planted_row(TABLE, [SLOW, FAST]), seconds=0)
    assert found["left_out"] == 2 and not found["changed"]
    assert "2 not tried for want of time" in tune.render(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal, for machines without a GPU")
def test_a_rehearsal_runs_from_end_to_end(tmp_path: Path) -> None:
    """As a user would start it; every candidate of the layer norm is right in the interpreter."""
    command = [sys.executable, BENCHMARKS / "tune.py", "--quick", "--device", "cpu", "--only", "add_layer_norm"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--out", tmp_path / "found.json"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layer norm backward, hidden 64: 3 of 3 candidates are right" in done.stdout
    record = json.loads((tmp_path / "found.json").read_text())
    assert [row["row"] for row in record["rows"]] == ["layer norm forward, hidden 64", "layer norm backward, hidden 64"]
    assert all(0 < result["q1_ms"] <= result["q3_ms"] for row in record["rows"] for result in row["tried"])


def test_candidates_are_compiled_beforehand(tmp_path: Path) -> None:
    """For a GPU that is not here: the first candidate of the layer norm."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, BENCHMARKS / "tune.py", "--only", "add_layer_norm", "--capability", "90"]
    command += ["--slice", "0", "1000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {"add_layer_norm_fwd_kernel"}


def test_without_gpu_and_interpreter_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit):
        tune.main(["--device", "cpu"])
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks in Triton's interpreter")
@pytest.mark.parametrize("kernel", ["attention forward", "attention weights", "feed-forward"])
def test_a_tile_reaches_the_launch(kernel: str, device: torch.device) -> None:
    """Its kernel is launched with the candidate, and the result is right."""
    from fastattn.kernels.attention import forward as attention_forward
    from fastattn.kernels.attention import weights as attention_weights
    from fastattn.kernels.feed_forward import forward as feed_forward_forward

    backend, module, name = {
        "attention forward": ("attention", attention_forward, "attention_forward_kernel"),
        "attention weights": ("attention", attention_weights, "attention_weights_kernel"),
        "feed-forward": ("feed_forward", feed_forward_forward, "feed_forward_fwd_kernel"),
    }[kernel]
    row = next(row for row in tune_tables.BACKENDS[backend](device, 90, True) if row.name.startswith(kernel))
    launched: list[dict[str, Any]] = []
    kernel = getattr(module, name)

    class Spy:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **named: (launched.append(named), kernel[grid](*args, **named))

    tile = row.candidates[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, Spy())
        assert tune.try_tile(row, tile, device)["status"] == "ok"
    wanted = {key.upper() if key.startswith("block") else key: value for key, value in tile._asdict().items()}
    assert launched and all(named | wanted == named for named in launched)


def test_a_row_is_pasted_into_its_column() -> None:
    row = next(tune_tables.BACKENDS["attention"](CPU, 80, False))
    line = row.paste((1, 2, 3, 4))
    assert line == '    ("forward", 16, 64): (Config(128, 64, 8, 3), Config(1, 2, 3, 4), Config(128, 64, 8, 2)),'


# What one candidate of a row launches and the other does not: (part of the row's name, candidate, kernel).
CHOICES = {
    "attention": [
        ("kernel of short sequences", (1,), "short_backward_kernel"),
        ("kernel of short sequences", (0,), "backward_dq_sm90_kernel"),
        ("dq added up in memory", (1,), "backward_round_sm90_kernel"),
        ("dq added up in memory", (0,), "backward_dq_sm90_kernel"),
    ],
    "feed_forward": [
        ("feed-forward forward", (1,), "forward_product_sm90_kernel"),
        ("feed-forward forward", (2,), "forward_pointwise_kernel"),
        ("feed-forward backward", (1,), "backward_product_sm90_kernel"),
        ("feed-forward backward", (2,), "backward_pointwise_kernel"),
    ],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="notes launches on a CPU")
@pytest.mark.skipif(host_build.why_not() is not None, reason=str(host_build.why_not()))
@pytest.mark.parametrize("backend", CHOICES)
def test_a_choice_of_the_cuda_backend_reaches_the_launch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper; csrc/host notes the launches instead of running them."""
    library = host_build.build("_C", host_build.extension_sources(), host_build.KEPT)
    names = dict(compiled_launches.functions(library))
    file = tmp_path / "launches"
    monkeypatch.setenv("FASTATTN_HOST_LAUNCHES", str(file))
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", "90")
    fastattn.cuda.load_host_runner(library)
    torch.use_deterministic_algorithms(False)  # as where one tunes; dq that is added up in memory gives way under it
    try:
        rows = list(getattr(tune_cuda, backend)(CPU, 90, True))
        for part, chosen, kernel in CHOICES[backend]:
            row = next(row for row in rows if part in row.name)
            for tile in row.candidates:
                file.write_text("")
                with row.use(tile):
                    tune_tables.call(row)()
                launched = " ".join(names[int(line.split()[0])] for line in file.read_text().splitlines())
                assert (kernel in launched) == (tile == chosen), (row.name, tile, launched)
            assert tuple(row.current) in row.candidates
    finally:
        fastattn.cuda.load_host_runner(None)


def test_where_no_cuda_backend_serves_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tune_cuda.attention(CPU, 90, True)) == list(tune_cuda.feed_forward(CPU, 90, True)) == []
    assert "choices are left out: CUDA kernels serve GPU tensors" in capsys.readouterr().out
