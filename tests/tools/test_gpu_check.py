"""gpu_check.sh on a pretended GPU, as it is started on a machine with one."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / "tools" / "gpu_check.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """stage -> what the summary says of it, without the seconds."""
    summary = done.stdout.split("Summary: ")[1]
    return dict(re.findall(r"^([a-z]+) +(.*?) \(\d+ s; \w+\.log\)$", summary, re.MULTILINE))


def pretended_gpu(tmp_path: Path, *, fails: str = "nothing") -> dict[str, str]:
    """An environment in which `python` claims a GPU and notes its arguments in tmp_path/asked, and nothing else.

    fails: a pattern of the arguments with which it fails.
    """
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    (tools / "python").write_text(f"""#!/bin/bash
        [ "$1" != -c ] || {{ echo "Abacus 9000"; exit; }}
        echo "$*" >> {asked}
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
    """Every test file runs once. One stage, one backend of the doctor and one test file fail, and are named."""
    broken = "tests/masks/test_attention_mask.py"
    gpu = pretended_gpu(tmp_path, fails=f"{broken}|^tools/compare_emulator.py$|doctor.*cuda")
    done = gpu_check(tmp_path / "out", **gpu, TEXT="/some/text", BEFORE=str(tmp_path))
    outcome = outcomes(done)
    assert done.returncode == 1 and len(outcome) == 13
    assert {stage for stage, said in outcome.items() if said != "passed"} == {"doctor", "tests", "compare"}
    assert re.findall(r"^exit .*", done.stdout, re.MULTILINE) == ["exit 1  cuda: ", f"exit 1  {broken} 1/1: 1 passed"]
    files = packed(tmp_path / "out.tar.gz")
    assert files["out/summary.txt"].strip() in done.stdout and "1 passed" in files["out/doctor_cuda.json"]
    lines = (tmp_path / "asked").read_text().splitlines()
    runs = [line.split("--part ")[1] for line in lines if line.startswith("-m pytest -q --only-gpu ")]
    here = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    whole = {f"1/1 {path}" for path in here if path.parent != Path("tests/ops")} - {"1/1 tests/tools/test_gpu_check.py"}
    assert sorted(runs) == sorted(whole | {f"{part}/16 tests/ops" for part in range(1, 17)})
    for tool in ("memcheck", "synccheck", "racecheck"):
        (line,) = (line for line in lines if line.startswith("sanitizer ") and f"--tool {tool}" in line)
        assert ("--without-sm90" in line) == (tool == "racecheck")
    assert {f"-m fastattn doctor --backend {b} --json" for b in ("reference", "aten", "triton", "cuda")} < {*lines}
    trained = [re.sub(r" --out \S+", "", line) for line in lines if line.startswith("examples/train_translation.py ")]
    task = "examples/train_translation.py --amp --steps 400 --data /some/text"
    assert trained == [task, f"{task} --graph", f"{task} --shadow 20", task]
    (report,) = (line for line in lines if line.startswith(f"benchmarks/report.py --out {tmp_path}/out/report"))
    assert 2.9 < float(report.split("--minutes ")[1]) <= 3
    compared = [line.rsplit("/", 1)[1] for line in lines if "--match" in line]
    assert compared == ["before_1", "after_1", "before_2", "after_2"]


def test_what_has_not_run_is_not_called_passed(tmp_path: Path) -> None:
    """After a bad hello, and without time: test files that did not begin are named, and so is a stage."""
    gpu = pretended_gpu(tmp_path, fails="hello_gpu")
    done = gpu_check(tmp_path / "out", "hello", "build", **gpu)
    assert done.returncode == 1 and outcomes(done) == {"hello": "FAILED"}
    assert (tmp_path / "asked").read_text() == "tools/hello_gpu.py\n"
    assert outcomes(gpu_check(tmp_path / "out", "build", **gpu)) == {"build": "passed"}, "a call without it"
    done = gpu_check(tmp_path / "out", "tests", **gpu, LIMIT="27", ARCHIVE=str(tmp_path / "all.tgz"))
    runs = (tmp_path / "out" / "tests.list").read_text().splitlines()
    assert done.returncode == 1 and re.findall(r"^not started  (.*)", done.stdout, re.MULTILINE) == runs
    assert packed(tmp_path / "all.tgz")["out/summary.txt"].count("not started") == len(runs) > 10
    done = gpu_check(tmp_path / "out", "report", **gpu, LIMIT="15")
    assert done.returncode == 1 and outcomes(done) == {"report": "FAILED: not started, because no time was left"}
