"""What the compilers make of the kernels is as the committed record says; and the comparison sees what is worse."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(Path(__file__).parent / "cuda")]

import compiled_cuda  # noqa: E402
import compiled_kernels  # noqa: E402
import compiled_launches  # noqa: E402
import compiled_work  # noqa: E402
import host_build  # noqa: E402
from compiled_sass import blocks_per_multiprocessor, instruction_mix  # noqa: E402

NOT_MEANT = "\nIf this is meant: python benchmarks/compiled_kernels.py --write, and commit the record."


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(compiled_kernels.RECORD.read_text())


@pytest.mark.parametrize("language", compiled_kernels.LANGUAGES)
def test_kernels_are_as_recorded(language: str, record: dict[str, Any]) -> None:
    if language == "cuda" and (reason := compiled_cuda.why_not()):
        pytest.skip(reason)
    failures, notes = compiled_kernels.compare(record, compiled_kernels.current([language]))
    print(*notes, sep="\n")
    assert not failures, "\n".join(failures) + NOT_MEANT


def written() -> set[tuple[str, str]]:
    """(language, name) of every kernel of the sources; names of CUDA kernels with their backend."""
    triton = r"^@triton\.jit\b[^\n]*\ndef (\w+_kernel)\("
    cuda = r"__global__ void\s+(?:__launch_bounds__\([^;{]*?\)\s+)?(\w+_kernel)\("
    found = {
        ("triton", name)
        for path in (ROOT / "kernels").rglob("*.py")
        for name in re.findall(triton, path.read_text(), re.MULTILINE)
    }
    for path in (ROOT / "csrc").rglob("*.cu"):
        text = path.read_text()
        names = re.findall(cuda, text)
        assert len(names) == text.count("__global__"), f"{path.name}: a kernel's name ends with _kernel"
        found |= {("cuda", f"{path.parent.name}::{name}") for name in names}
    return found


def test_every_kernel_is_recorded(record: dict[str, Any]) -> None:
    """A kernel that no case of compiled_triton.py launches is not watched."""
    recorded = {tuple(name.split()[i] for i in (0, 2)) for name in record["kernels"]}
    missing = sorted(written() - recorded)
    assert not missing, f"not in the record: {missing} (a Triton kernel needs a case in compiled_triton.py)" + NOT_MEANT


def test_every_kernel_has_a_formula() -> None:
    """And every formula a kernel."""
    tables = {"triton": compiled_work.TRITON, "cuda": compiled_work.CUDA}
    known, kernels = {(language, name) for language, table in tables.items() for name in table}, written()
    assert kernels <= known, (
        f"no formula of FLOPs and bytes for {sorted(kernels - known)}: add a line to TRITON or CUDA in "
        "benchmarks/compiled_work.py, which makes them from the kernel's case or template arguments"
    )
    assert known <= kernels, f"benchmarks/compiled_work.py has formulas of kernels that are gone: {known - kernels}"


@pytest.mark.skipif(host_build.why_not() is not None, reason=str(host_build.why_not()))
def test_every_cuda_kernels_launch_and_bound_are_known() -> None:
    """In every form that is compiled. Without its launch a kernel's occupancy would be a guess."""
    launches = compiled_launches.launches()
    launched = {compiled_cuda.demangled(symbol) for symbol in launches}
    library = host_build.build("_C", host_build.extension_sources(), host_build.KEPT)
    symbols = [name for _, name in compiled_launches.functions(library) if re.match(r"_ZN8fastattn.*_kernel[IE]", name)]
    kernels = {kernel for kernel in map(compiled_cuda.demangled, symbols) if kernel[0].endswith("_kernel")}
    assert {("cuda", name) for name, _ in kernels} == {kernel for kernel in written() if kernel[0] == "cuda"}
    assert kernels <= launched, (
        f"nobody says how these are launched, so their shared memory is missing: {sorted(kernels - launched)}: "
        "add a call that launches them to a case of benchmarks/compiled_launches.py"
    )
    bounds = {kernel: compiled_work.work_of("cuda", *kernel).bound("sm_90a") for kernel in launched}
    assert all(microseconds > 0 for _, microseconds in bounds.values())
    # Attention's forward at sm_80: a tile of 64 queries, one of 64 keys and one of values, 128 + 16 bytes a row.
    known = {compiled_cuda.demangled(symbol): launch for symbol, launch in launches.items()}
    assert known["attention::forward_kernel", "__nv_bfloat16, 64"] == (128, 3 * 64 * 144)


def named(record: dict[str, Any], part: str) -> dict[str, Any]:
    """The entry whose name has this part."""
    (name,) = [name for name in record["kernels"] if part in name]
    return record["kernels"][name]


FORWARD = "sm_90a attention_forward_kernel [bfloat16 D64 causal]"


def compared(record: dict[str, Any], change: dict[str, Any], other_compiler: bool) -> tuple[str, str]:
    """Failures and notes of a record whose kernel FORWARD is changed; instructions are given under their own names."""
    now = copy.deepcopy(record)
    entry = named(now, FORWARD)
    for name, value in change.items():
        if name in entry:
            entry[name] = value
        else:
            entry["instructions"][name] = value
    if other_compiler:
        now["versions"]["triton"]["triton"] = "99"
    failures, notes = compiled_kernels.compare(record, now)
    return "\n".join(failures), "\n".join(notes)


LOST = [
    ({"shared": 230 * 1024}, "it does not fit"),
    ({"HGMMA": 0}, "tensor cores are lost"),
    ({"tensor_core_dots": 2}, "2 of 4 products lost their tensor cores"),
    ({"HGMMA": 8, "HMMA": 32}, "a product fell from wgmma to mma.sync"),
    ({"LDGSTS.128": 0, "LDG.128": 0, "LDG.32": 112}, "loads of 16 bytes a thread"),
]
WORSE = [
    ({"registers": 130}, "2 -> 1 blocks a multiprocessor"),
    ({"shared": 120 * 1024}, "2 -> 1 blocks a multiprocessor"),
    ({"LDL": 40, "STL": 20}, "0 -> 60 loads and stores of spilled registers"),
    ({"WARPGROUP.ARRIVE": 16, "WARPGROUP.DEPBAR": 16}, "wgmma is serialized"),
]


@pytest.mark.parametrize(("change", "told"), LOST + WORSE, ids=str)
def test_worse_code_fails_with_the_compilers_of_the_record(
    change: dict[str, Any], told: str, record: dict[str, Any]
) -> None:
    failures, notes = compared(record, change, other_compiler=False)
    assert FORWARD in failures and told in failures and "WORSE" in failures and not notes
    assert all(name in failures for name in change)  # and what changed is listed


@pytest.mark.parametrize(("change", "told"), LOST, ids=str)
def test_what_is_lost_fails_with_any_compiler(change: dict[str, Any], told: str, record: dict[str, Any]) -> None:
    failures, notes = compared(record, change, other_compiler=True)
    assert FORWARD in failures and told in failures and not notes


@pytest.mark.parametrize(("change", "told"), WORSE, ids=str)
def test_another_compilers_registers_are_told(change: dict[str, Any], told: str, record: dict[str, Any]) -> None:
    failures, notes = compared(record, change, other_compiler=True)
    assert not failures and FORWARD in notes and told in notes


def test_other_compilers_may_differ_a_little(record: dict[str, Any]) -> None:
    change = {"registers": 124, "LDL": 2, "STL": 2, "LDS": 99, "all": 1700}
    assert compared(record, change, other_compiler=True) == ("", "")
    exact, _ = compared(record, change, other_compiler=False)
    assert "registers 127 -> 124" in exact and "LDL 0 -> 2" in exact and "WORSE" not in exact


def test_a_kernel_that_comes_or_goes_is_told(record: dict[str, Any]) -> None:
    now = copy.deepcopy(record)
    name = next(iter(now["kernels"]))
    now["kernels"][f"{name} 2"] = now["kernels"].pop(name)
    failures, _ = compiled_kernels.compare(record, now)
    assert failures == [
        f"{name} 2: is not in the record",
        f"{name}: is in the record, but is not compiled any more",
    ]


def test_the_record_can_be_read_by_line(record: dict[str, Any]) -> None:
    text = compiled_kernels.RECORD.read_text()
    assert text == compiled_kernels.to_text(record)
    assert sum(line.startswith('  "') for line in text.splitlines()) == len(record["kernels"])
    assert "at least" in compiled_kernels.render(record)


@pytest.mark.parametrize("language", compiled_kernels.LANGUAGES)
def test_one_language_can_be_written_alone(
    language: str, record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's part stays as it is, and where it is."""
    path = tmp_path / "record.json"
    path.write_text(compiled_kernels.to_text(record))
    monkeypatch.setattr(compiled_kernels, "RECORD", path)
    now = {name: entry for name, entry in record["kernels"].items() if name.startswith(language)}
    gone = next(iter(now))
    del now[gone]
    compiled_kernels.write({"versions": {language: {"compiler": "99"}}, "kernels": now})
    written = json.loads(path.read_text())
    assert list(written["versions"]) == list(compiled_kernels.LANGUAGES)
    assert written["versions"] == record["versions"] | {language: {"compiler": "99"}}
    assert list(written["kernels"]) == [name for name in record["kernels"] if name != gone]


def test_without_nvcc_cuda_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled_kernels.main(["--check", "--only", "cuda"]) == 0
    assert "CUDA kernels are left out: nvcc is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "blocks"),
    [
        ("sm_80", 8, 128, 0, 2),
        ("sm_80", 8, 129, 0, 1),  # 136 of a thread, handed out by eights: 15 warps, of which whole blocks of 8: 1
        ("sm_80", 4, 168, 0, 3),
        ("sm_90a", 4, 32, 0, 16),
        ("sm_90a", 1, 32, 0, 32),
        ("sm_90a", 4, 32, 100 * 1024, 2),
        ("sm_90a", 4, 32, 227 * 1024, 1),
        ("sm_90a", 4, 32, 228 * 1024, 0),
        ("sm_80", 4, 32, 164 * 1024, 0),
        ("sm_90a", 12, 168, 0, 1),
    ],
)
def test_occupancy(arch: str, warps: int, registers: int, shared: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(arch, warps, registers, shared) == blocks


def test_instructions_are_counted_by_name_and_width() -> None:
    sass = """
        /*0000*/                   LDG.E.128.CONSTANT R4, [R2.64] ;     /* 0x000 */
        /*0010*/              @!P0 LDG.E.U16 R4, [R2.64] ;              /* 0x000 */
        /*0020*/              @UP1 LDG.E R4, desc[UR4][R2.64] ;         /* 0x000 */
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], [R2.64] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0048*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   MUFU.EX2 R5, R5 ;
        /*0060*/                   STL.64 [R1], R4 ;
        /*0070*/                   ATOMG.E.ADD PT, R0, [R2.64], R4 ;
        /*0080*/                   EXIT ;
    """
    wanted = {"LDG.128": 1, "LDG.16": 1, "LDG.32": 1, "LDGSTS.128": 1, "HGMMA": 1, "MUFU.EX2": 1, "STL": 1, "atomic": 1}
    wanted |= {"WARPGROUP.DEPBAR": 1, "all": 10}
    assert instruction_mix(sass) == wanted


def test_work_and_bound() -> None:
    """Causal attention, B 4, H 16, L 4096: on sm_90a products take longest at D 128, exponentials at D 32."""
    work = compiled_work.work_of("triton", "attention_forward_kernel", "bfloat16 D128 causal")
    pairs = 4 * 16 * 4096 * 4097 / 2
    assert (work.flop, work.special) == (4 * pairs * 128, pairs)
    assert work.byte == 64 * 4096 * (4 * 128 * 2 + 4)
    assert work.bound("sm_90a") == ("products", pytest.approx(work.flop / 989e12 * 1e6))
    work = compiled_work.work_of("triton", "attention_forward_kernel", "bfloat16 D32 causal")
    assert work.bound("sm_90a") == ("special", pytest.approx(pairs / (16 * 132 * 1.83e9) * 1e6))
    work = compiled_work.work_of("cuda", "add_layer_norm::forward_kernel", "__half, float, 4, true")
    assert work.bound("sm_80") == ("memory", pytest.approx(65536 * (4 * 1024 * 2 + 8) / 2.04e12 * 1e6))
    assert compiled_work.work_of("cuda", "nowhere::kernel", "") is None


@pytest.mark.skipif(compiled_cuda.why_not() is not None, reason=str(compiled_cuda.why_not()))
def test_a_cuda_kernel_is_taken_apart(tmp_path: Path) -> None:
    """Name, template arguments, threads of __launch_bounds__, static shared memory and local memory."""
    source = tmp_path / "x.cu"
    source.write_text("""
        namespace fastattn::planted { namespace {
        template <class T, int kSize>
        __global__ void __launch_bounds__(96) local_kernel(T* out, const int* place) {
          __shared__ float shared[kSize];
          T local[kSize] = {};
          for (int i = 0; i < 100; i++) local[place[i] % kSize] += T(i);
          shared[threadIdx.x] = local[place[0]];
          __syncthreads();
          out[threadIdx.x] = shared[threadIdx.x ^ 1] + local[place[1]];
        }
        }  // namespace
        void run(float* out, const int* place) { local_kernel<float, 128><<<1, 96>>>(out, place); }
        }  // namespace fastattn::planted
    """)
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-c", source, "-o", tmp_path / "x.o"]
    subprocess.run(command, capture_output=True, check=True)
    (unknown,) = compiled_cuda.kernels(tmp_path / "x.o", {})
    assert (unknown.warps, unknown.shared, unknown.launched) == (3, 512, False)
    mangled = next(symbol for _, symbol, _ in compiled_cuda.functions(tmp_path / "x.o"))
    (kernel,) = compiled_cuda.kernels(tmp_path / "x.o", {mangled: compiled_launches.Launch(96, 2048)})
    assert kernel.launched and "launched" not in next(iter(compiled_kernels.entries([kernel]).values()))
    assert (kernel.arch, kernel.name, kernel.case) == ("sm_90a", "planted::local_kernel", "float, 128")
    assert (kernel.warps, kernel.shared) == (3, 512 + 2048)
    assert kernel.stack == 512 and kernel.spills > 0 and kernel.count("BAR") == 1
    assert "bound" not in next(iter(compiled_kernels.entries([kernel]).values()))
