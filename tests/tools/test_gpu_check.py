"""gpu_check.sh without a GPU, and with a pretended one; and compare_emulator.py, with the emulator as the device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_emulator
import emulator_build
import pytest
import torch

import fastattn.backends.cuda

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / "tools" / "gpu_check.sh", *arguments]
    given = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=given)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """stage -> what the summary says of it, without the seconds."""
    summary = done.stdout.split("Summary: ")[1]
    return dict(re.findall(r"^([a-z]+) +(.*?) \(\d+ s; \w+\.log\)$", summary, re.MULTILINE))


def test_says_what_it_skips_and_fails_with_a_stage(tmp_path: Path) -> None:
    """Without a GPU, and with a doctor that must fail: the other stages still run, and the summary is last."""
    stages = ("doctor", "precompile", "tests", "sanitizer")
    done = gpu_check(tmp_path, *stages, CUDA_VISIBLE_DEVICES="", FASTATTN_BACKEND="abacus")
    assert done.returncode == 1, done.stdout + done.stderr
    skipped = dict.fromkeys(("precompile", "tests", "sanitizer"), "skipped: needs a GPU")
    assert outcomes(done) == {"doctor": "FAILED"} | skipped
    assert "abacus" in (tmp_path / "doctor.log").read_text()
    assert (tmp_path / "summary.txt").read_text().strip() in done.stdout
    done = gpu_check(tmp_path, "bulid")
    assert done.returncode == 2 and "bulid" in done.stderr and "gpu_check.sh DIR [STAGE ...]" in done.stderr


def test_all_stages_on_a_pretended_gpu(tmp_path: Path) -> None:
    """`python` claims a GPU and only notes its arguments; one stage and one test file fail."""
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    broken = "tests/masks/test_attention_mask.py"
    (tools / "python").write_text(f"""#!/bin/bash
        [ "$1" != -c ] || {{ echo "Abacus 9000"; exit; }}
        echo "$*" >> {asked}
        echo "1 passed"
        [[ "$*" != *{broken} && "$*" != tools/compare_emulator.py ]]
    """)
    (tools / "compute-sanitizer").write_text(f'#!/bin/bash\necho "sanitizer $*" >> {asked}\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    done = gpu_check(tmp_path / "out", PYTHON=str(tools / "python"), PATH=f"{tools}:{os.environ['PATH']}", FULL="1")
    outcome = outcomes(done)
    assert done.returncode == 1
    assert {stage for stage, said in outcome.items() if said == "FAILED"} == {"tests", "compare"}
    assert {said for stage, said in outcome.items() if stage not in ("tests", "compare")} == {"passed"}
    assert re.findall(r"^exit .*", done.stdout, re.MULTILINE) == [f"exit 1  {broken} 1/1: 1 passed"]
    lines = asked.read_text().splitlines()
    runs = [line.split("--part ")[1] for line in lines if line.startswith("-m pytest -q ") and " --full " in line]
    here = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    whole = {f"1/1 {path}" for path in here if path.parent != Path("tests/ops")} - {"1/1 tests/tools/test_gpu_check.py"}
    assert sorted(runs) == sorted(whole | {f"{part}/96 tests/ops" for part in range(1, 97)})
    for tool in ("memcheck", "racecheck", "synccheck"):
        (line,) = (line for line in lines if line.startswith(f"sanitizer --tool {tool} "))
        assert "compare_emulator.py --only device --backend cuda triton" in line
        assert line.endswith(" --without-sm90") == (tool == "racecheck")
    assert "setup.py build_ext --inplace" in lines
    assert f"benchmarks/report.py --out {tmp_path}/out/report --minutes 3" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses Triton's interpreter")
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


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator replaces the device")
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
