"""gpu_check.sh without a GPU, and with a pretended one; and compare_emulator.py, with the emulator as the device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import compare_emulator
import emulator_build
import hello_gpu
import pytest
import torch
from helpers import skip_without_triton

import fastattn.backends.cuda
from fastattn.check.cases import problems

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / "tools" / "gpu_check.sh", *arguments]
    given = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=given)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """stage -> what the summary says of it, without the seconds."""
    summary = done.stdout.split("Summary: ")[1]
    return dict(re.findall(r"^([a-z]+) +(.*?) \(\d+ s; \w+\.log\)$", summary, re.MULTILINE))


@pytest.mark.full
def test_says_what_it_skips_and_fails_with_a_stage(tmp_path: Path) -> None:
    """Without a GPU, and with a `doctor` that must fail: the other stages still run, and the summary is last."""
    stages = ("precompile", "doctor", "tests", "sanitizer")
    done = gpu_check(tmp_path / "out", *stages, CUDA_VISIBLE_DEVICES="", FASTATTN_BACKEND="abacus")
    assert done.returncode == 1, done.stdout + done.stderr
    skipped = dict.fromkeys(("precompile", "tests", "sanitizer"), "skipped: needs a GPU")
    assert outcomes(done) == {"doctor": "FAILED"} | skipped
    assert "abacus" in (tmp_path / "out" / "doctor.log").read_text()
    done = gpu_check(tmp_path, "bulid")
    assert done.returncode == 2 and "bulid" in done.stderr and "gpu_check.sh DIR [STAGE ...]" in done.stderr


def pretended_gpu(tmp_path: Path, *, fails: str = "nothing", real: tuple[str, Path] | None = None) -> dict[str, str]:
    """An environment in which `python` claims a GPU and notes its arguments in tmp_path/asked, and nothing else.

    fails: a pattern of the arguments with which it fails. real: a test file of the project and the one that pytest runs
    in its place.
    """
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    pytest_of = f'[[ "$*" != *{real[0]}* ]] || exec {sys.executable} -m pytest -q {real[1]}' if real else ""
    (tools / "python").write_text(f"""#!/bin/bash
        [ "$1" != -c ] || {{ echo "Abacus 9000"; exit; }}
        echo "$*" >> {asked}
        {pytest_of}
        echo "1 passed"
        [[ ! "$*" =~ {fails} ]]
    """)
    (tools / "compute-sanitizer").write_text(f'#!/bin/bash\necho "sanitizer $*" >> {asked}\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {"PYTHON": str(tools / "python"), "PATH": f"{tools}:{os.environ['PATH']}"}


def packed(archive: Path) -> dict[str, str]:
    """What gpu_check.sh has packed: file -> text."""
    with tarfile.open(archive) as tar:
        return {m.name: tar.extractfile(m).read().decode() for m in tar.getmembers() if m.isfile()}


@pytest.mark.full
def test_all_stages_on_a_pretended_gpu(tmp_path: Path) -> None:
    """One stage, one backend of the doctor and one test file fail."""
    broken = "tests/masks/test_attention_mask.py"
    gpu = pretended_gpu(tmp_path, fails=f"{broken}|^tools/compare_emulator.py$|doctor.*cuda")
    done = gpu_check(tmp_path / "out", **gpu, FULL="1", TEXT="/some/text")
    outcome = outcomes(done)
    assert done.returncode == 1
    assert {stage for stage, said in outcome.items() if said == "FAILED"} == {"doctor", "tests", "compare"}
    assert {said for stage, said in outcome.items() if stage not in ("doctor", "tests", "compare")} == {"passed"}
    assert re.findall(r"^exit .*", done.stdout, re.MULTILINE) == ["exit 1  cuda: ", f"exit 1  {broken} 1/1: 1 passed"]
    files = packed(tmp_path / "out.tar.gz")
    assert files["out/summary.txt"].strip() in done.stdout and "1 passed" in files["out/doctor_cuda.json"]

    lines = (tmp_path / "asked").read_text().splitlines()
    runs = [line.split("--part ")[1] for line in lines if line.startswith("-m pytest -q --only-gpu ")]
    here = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    whole = {f"1/1 {path}" for path in here if path.parent != Path("tests/ops")} - {"1/1 tests/tools/test_gpu_check.py"}
    assert sorted(runs) == sorted(whole | {f"{part}/96 tests/ops" for part in range(1, 97)})
    graphs = files["out/graphs.list"].split()[::2]
    first = {run.split()[1] for run in runs[: len(graphs) + 1]}
    assert first == {"tests/cuda/test_hopper.py", *graphs} and "tests/graphs/test_graphed_call.py" in graphs
    assert files["out/tests.list"].startswith("tests/generate/")
    (tried, *tools) = (line for line in lines if line.startswith("sanitizer "))
    chosen = "sanitizer --error-exitcode 86 --kernel-name regex=fastattn|^[a-z_]+_kernel$"
    assert tried.startswith(chosen) and "torch.ones" in tried
    kernels = f"{gpu['PYTHON']} tools/compare_emulator.py --only device --backend cuda triton"
    for line, tool in zip(tools, ("memcheck", "synccheck", "racecheck"), strict=True):
        assert line == f"{chosen} --tool {tool} {kernels}" + " --without-sm90" * (tool == "racecheck")
    assert lines[0] == "tools/hello_gpu.py" and "setup.py build_ext --inplace" in lines
    assert {f"-m fastattn doctor --backend {b} --json" for b in ("reference", "aten", "triton", "cuda")} < {*lines}
    trained = [re.sub(r" --out \S+", "", line) for line in lines if line.startswith("examples/train_translation.py ")]
    task = "examples/train_translation.py --amp --steps 400 --data /some/text"
    assert trained == [task, f"{task} --graph", f"{task} --shadow 20", task]
    (report,) = (line for line in lines if line.startswith(f"benchmarks/report.py --out {tmp_path}/out/report"))
    assert 2.9 < float(report.split("--minutes ")[1]) <= 3


@pytest.mark.full
def test_what_is_cut_off_keeps_its_failures(tmp_path: Path) -> None:
    """A test process that is ended has printed its failures before, and the summary repeats them."""
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_fails(): assert 1 == 2\ndef test_sleeps(): time.sleep(600)\n")
    cut = "tests/nn/test_linear.py"
    done = gpu_check(tmp_path / "out", "tests", **pretended_gpu(tmp_path, real=(cut, slow)), LIMIT="43")
    assert done.returncode == 1 and outcomes(done) == {"tests": "FAILED"}
    named = re.findall(r"^(?:exit|not|   ) .*", done.stdout.split("Summary: ")[1], re.MULTILINE)
    assert named[0].startswith(f"exit 124  {cut} 1/1: ") and "::test_fails - assert 1 == 2" in named[1], done.stdout
    assert len(named) == 2
    assert "assert 1 == 2" in packed(tmp_path / "out.tar.gz")["out/tests/tests_nn_test_linear.py.1_of_1.log"]


def test_without_time_nothing_is_called_passed(tmp_path: Path) -> None:
    """Runs that did not begin are named, and so is a stage."""
    gpu = pretended_gpu(tmp_path)
    done = gpu_check(tmp_path / "out", "tests", **gpu, LIMIT="27", ARCHIVE=str(tmp_path / "all.tgz"))
    runs = (tmp_path / "out" / "tests.list").read_text().splitlines()
    assert done.returncode == 1 and len(runs) > 50
    assert re.findall(r"^not started  (.*)", done.stdout, re.MULTILINE) == runs
    assert packed(tmp_path / "all.tgz")["out/summary.txt"].count("not started") == len(runs)
    done = gpu_check(tmp_path / "out", "report", **gpu, LIMIT="15")
    assert done.returncode == 1 and outcomes(done) == {"report": "FAILED: not started, because no time was left"}


def test_nothing_runs_after_a_bad_hello(tmp_path: Path) -> None:
    gpu = pretended_gpu(tmp_path, fails="hello_gpu")
    done = gpu_check(tmp_path / "out", "hello", "build", **gpu)
    assert done.returncode == 1 and outcomes(done) == {"hello": "FAILED"}
    assert "build      not run, because hello failed" in done.stdout
    assert (tmp_path / "asked").read_text() == "tools/hello_gpu.py\n"
    assert outcomes(gpu_check(tmp_path / "out", "build", **gpu)) == {"build": "passed"}, "a call without it"


def test_hello(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel at each kind of address and stream; a wrong result is found. What is missing only counts on a GPU."""
    skip_without_triton()
    monkeypatch.setattr(hello_gpu, "PACKAGES", ("torch", "abacus"))
    monkeypatch.setattr(hello_gpu, "HAS_GPU", False)
    moved = hello_gpu.moved(next(problems(torch.device("cpu"))))
    assert {t.data_ptr() % 16 for t in moved.tensors.values()} == {4}
    assert hello_gpu.main() == 0
    said = capsys.readouterr().out
    assert "missing: abacus" in said and said.count(": right (") == 4
    monkeypatch.setattr(hello_gpu, "check", lambda *_: [{"ok": False, "result": "out"}])
    assert hello_gpu.main() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is not used where a GPU is")
def test_tritons_reductions_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All norms, cross-entropy and the gradient of a bias; with --without-sm90 every GPU counts as sm_80."""
    module = compare_emulator
    chosen = module.triton_problems(torch.device("cpu"))
    assert {p.op for p in chosen} == {*module.SHARED_BY_WARPS, "attention"}
    assert [p.case for p in chosen if p.op == "attention"] == ["bias"]
    (dropped,) = (p for p in chosen if (p.op, p.case) == ("add_rms_norm", "dropout"))
    monkeypatch.setattr(fastattn.backends.cuda, "_gpu_capability", None)

    def main(problem: Any) -> int:
        monkeypatch.setattr(module, "triton_problems", lambda device: [problem])
        return module.main(["--only", "host", "--backend", "triton", "--without-sm90"])

    assert main(dropped) == 0
    assert "3 problems solved by the kernels of triton on host, 0 of them wrong" in capsys.readouterr().out
    assert fastattn.backends.cuda._gpu_capability(0) == 80

    def shifted(*, backend: str, **named: Any) -> torch.Tensor:
        out = dropped.function(**named, backend=backend)
        return out if backend == "reference" else out + 0.1

    assert main(dropped._replace(function=shifted)) == 1
    assert "3 of them wrong" in capsys.readouterr().out


def test_every_problem_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left out by mistake, and each makes a call that the op accepts."""
    monkeypatch.setattr(compare_emulator, "check", lambda *_: [{"ok": True}])
    compared = set()
    for problem in compare_emulator.all_problems(torch.device("cpu")):
        outcome, right = compare_emulator.compare(torch.bfloat16, {"host": problem}, "reference")
        assert (outcome, right) == ("ok", True), problem.case
        compared.add(problem.op)
    assert compared == {problem.op for problem in problems(torch.device("cpu"))}


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator takes the place of a GPU, and here is one")
def test_host_and_device_are_compared() -> None:
    if reason := emulator_build.unsupported_reason():
        pytest.skip(reason)
    library = emulator_build.build("_C", emulator_build.extension_sources(), emulator_build.BUILD_DIR)
    problem = next(p for p in compare_emulator.all_problems(torch.device("cpu")) if p.case == "width 64")
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
            wide = {"x": (2, 20000), "residual": (2, 20000), "weight": (20000,), "bias": (20000,)}
            refused = problem._replace(tensors={name: torch.zeros(shape) for name, shape in wide.items()})
            said, right = compare_emulator.compare(torch.float32, {"host": refused})
            assert right and said.startswith("refused by the host: ") and "20000" in said
    finally:
        fastattn.backends.cuda.load_emulator(None)
    with pytest.raises(SystemExit):
        compare_emulator.main(["--only", "device"])
