"""gpu_check.sh without a GPU: what it skips and why, what it does where it believes in one, what it does not repeat.

And the comparison of a kernel on the CPU runner with the same kernel on a device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).parent / "cuda")]

import host_build  # noqa: E402
import host_device  # noqa: E402
import pytest_shard  # noqa: E402

import fastattn.cuda  # noqa: E402
from fastattn._problems import Problem  # noqa: E402


def gpu_check(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", BENCHMARKS / "gpu_check.sh", *arguments]
    given = {"PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | given)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """stage -> what the summary says of it, without the seconds."""
    summary = done.stdout.split("Summary: ")[1]
    return dict(re.findall(r"^([a-z]+) +(.*?) \(\d+ s; \w+\.log\)$", summary, re.MULTILINE))


def test_says_what_it_skips_and_fails_with_a_stage(tmp_path: Path) -> None:
    """With no GPU in sight, and a doctor that must fail: the other stages still have their say, the summary is last."""
    stages = ("doctor", "precompile", "tests", "sanitizer")
    done = gpu_check(tmp_path, *stages, CUDA_VISIBLE_DEVICES="", FASTATTN_BACKEND="abacus")
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(done) == {
        "doctor": "FAILED",
        "precompile": "skipped: needs a GPU",
        "tests": "skipped: needs a GPU",
        "sanitizer": "skipped: needs a GPU",
    }
    assert "abacus" in (tmp_path / "doctor.log").read_text()
    assert (tmp_path / "summary.txt").read_text().strip() in done.stdout


def test_refuses_an_unknown_stage(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "bulid")
    assert done.returncode == 2
    assert "bulid" in done.stderr and "gpu_check.sh DIR [--again] [STAGE ...]" in done.stderr


@pytest.fixture
def pretended(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder for results, and an environment with an interpreter that says it has a GPU and only notes what it is
    asked to do; files named in the file "broken" fail."""
    tools = tmp_path / "tools"
    tools.mkdir()
    python = tools / "python"
    python.write_text(f"""#!/bin/bash
        [ "$1" != -c ] || {{ echo "Abacus 9000"; exit; }}
        echo "$*" >> {tmp_path}/asked
        echo "1 passed"
        ! grep -qF -- "${{@: -1}}" {tmp_path}/broken
    """)
    sanitizer = tools / "compute-sanitizer"
    sanitizer.write_text(f'#!/bin/bash\necho "sanitizer $*" >> {tmp_path}/asked\n')
    for tool in (python, sanitizer):
        tool.chmod(0o755)
    (tmp_path / "broken").write_text("")
    return tmp_path, {"PYTHON": str(python), "PATH": f"{tools}:{os.environ['PATH']}"}


def asked(folder: Path) -> list[str]:
    """What was asked since the last look."""
    lines = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    (folder / "asked").write_text("")
    return lines


def test_every_test_file_runs_once_and_only_failures_run_again(pretended: tuple[Path, dict[str, str]]) -> None:
    folder, environment = pretended
    broken = "tests/test_masks.py"
    (folder / "broken").write_text(broken)
    first = gpu_check(folder / "out", "tests", **environment)
    files = [line.split()[-1] for line in asked(folder)]
    here = {str(path.relative_to(BENCHMARKS.parent)) for path in (BENCHMARKS.parent / "tests").rglob("test_*.py")}
    gates = {path for path in here if "/test_compile" in path or path.startswith("tests/compile/")}
    assert set(files) == here - gates - {"tests/test_gpu_check.py"}
    shards = files.count("tests/ops/test_attention.py")
    assert shards in (1, 4) and files.count("tests/ops/test_feed_forward.py") == shards and files.count(broken) == 1
    assert first.returncode == 1 and outcomes(first) == {"tests": "FAILED"}
    assert re.findall(r"^exit .*", first.stdout, re.MULTILINE) == [f"exit 1  {broken} 1/1: 1 passed"]

    (folder / "broken").write_text("")
    second = gpu_check(folder / "out", "tests", **environment)
    assert [line.split()[-1] for line in asked(folder)] == [broken]
    assert second.returncode == 0 and outcomes(second) == {"tests": "passed"}

    third = gpu_check(folder / "out", "tests", **environment)
    assert asked(folder) == [] and outcomes(third) == {"tests": "passed before"}
    gpu_check(folder / "out", "--again", "tests", **environment)
    assert len(asked(folder)) == len(files)


def test_all_stages_on_a_pretended_gpu(pretended: tuple[Path, dict[str, str]]) -> None:
    folder, environment = pretended
    (folder / "broken").write_text("benchmarks/host_device.py")  # the stage compare
    done = gpu_check(folder / "out", **environment)
    said = outcomes(done)
    assert said.pop("compare") == "FAILED" and done.returncode == 1
    stages = ["build", "gates", "precompile", "tests", "sanitizer", "doctor", "report"]
    assert said == dict.fromkeys(stages, "passed")
    lines = asked(folder)
    for tool in ("memcheck", "racecheck", "synccheck"):
        assert any(line.startswith("sanitizer") and f"--tool {tool} " in line for line in lines)
    assert "setup.py build_ext --inplace" in lines
    assert f"benchmarks/report.py --out {folder}/out/report --minutes 3" in lines
    (gates,) = [line for line in lines if "tests/compile " in line]
    assert "tests/cuda/test_compile.py" in gates and gates.endswith("tests/test_compiled_kernels.py")


@pytest.mark.parametrize("shards", [1, 3, 11])
def test_shards_are_all_tests_once(shards: int) -> None:
    seen: list[int] = []
    for number in range(1, shards + 1):
        items = list(range(10))
        dropped: list[int] = []
        hook = SimpleNamespace(pytest_deselected=lambda items, dropped=dropped: dropped.extend(items))
        config = SimpleNamespace(getoption=lambda name, number=number: f"{number}/{shards}", hook=hook)
        pytest_shard.pytest_collection_modifyitems(config, items)
        assert sorted(items + dropped) == list(range(10))
        seen += items
    assert sorted(seen) == list(range(10))


@pytest.fixture
def host_runner() -> Any:
    """fastattn._C for the CPU, from the folder that the tests of tests/cuda build in."""
    if reason := host_build.why_not():
        pytest.skip(reason)
    library = host_build.build("_C", host_build.extension_sources(), host_build.KEPT)
    fastattn.cuda.load_host_runner(library)
    with host_device.fixed_dropout():
        yield
    fastattn.cuda.load_host_runner(None)


def norm_problem() -> Problem:
    """The narrowest one with dropout, on the CPU."""
    problems = host_device.all_problems(torch.device("cpu"))
    return next(problem for problem in problems if problem.case == "width 64")


def test_one_source_gives_one_answer(host_runner: None) -> None:
    """The host runner stands in for the device as well."""
    problem = norm_problem()
    both = host_device.compare(torch.bfloat16, ["host", "device"], problem, norm_problem())
    assert both == ("ok, bits equal in 5 of 5 results", True)
    assert host_device.compare(torch.float16, ["host"], problem, None) == ("ok", True)


def test_a_device_that_differs_is_seen(host_runner: None) -> None:

    def shifted(amount: float) -> Problem:
        def function(*, backend: str, **named: Any) -> torch.Tensor:
            out = problem.function(**named, backend=backend)
            return out if backend == "reference" else out + amount

        return problem._replace(function=function)

    problem = norm_problem()
    said, well = host_device.compare(torch.float32, ["host", "device"], problem, shifted(1e-5))
    assert not well and "device against host: out" in said and "host: out" not in said.split("device")[0]
    said, well = host_device.compare(torch.float32, ["host", "device"], shifted(1e-5), problem)
    assert not well and said.startswith("host: out")


def test_what_the_backend_refuses_is_told(host_runner: None) -> None:
    problem = norm_problem()
    wide = {"x": (2, 20000), "residual": (2, 20000), "weight": (20000,), "bias": (20000,)}
    problem = problem._replace(tensors={name: torch.zeros(shape) for name, shape in wide.items()})
    said, well = host_device.compare(torch.float32, ["host"], problem, None)
    assert well and said.startswith("refused by the host: ") and "20000" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_device_alone_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_device.main(["--only", "device"])
    assert "there is no GPU" in capsys.readouterr().err
