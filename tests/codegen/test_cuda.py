"""The CUDA sources compiled by nvcc with the options of setup.py, for its four architectures, or for sm_90a where only
Hopper can run them: no spills, no message of ptxas, and tensor core instructions in every product. On Hopper also:
wgmma that is not serialized and whose addresses are ready, and in attention's forward the order of waits. `pytest -rP`
prints the registers and static shared memory of each kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median_low

import pytest
from machine_code import Kernel, cuobjdump, kernels_of, report

pytestmark = pytest.mark.gates
CSRC = Path(__file__).resolve().parents[2] / "csrc"

if shutil.which("nvcc") is None or shutil.which("c++filt") is None or cuobjdump() is None:
    pytest.skip("needs nvcc, c++filt and the cuobjdump that comes with Triton", allow_module_level=True)

SOURCES = sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cu"))
# Kernels that multiply no matrices; all others use tensor cores, for float32 by products in tf32.
NO_PRODUCTS = r"layer_norm|pointwise|add_partial|backward_(rows|round|turns)_sm90"
# Kernels that may write over what they read. They must not read it by the read-only path, ld.global.nc.
IN_PLACE = r"pointwise_kernel<\w+, true>"
MARKS = {  # instruction -> its letter in `order`; a wait is followed by the number of products it leaves under way
    r"HGMMA": "G",
    r"WARPGROUP\.DEPBAR\S* gsb0, 0x(\d)": "W",
    r"MUFU\.EX2": "x",
    r"BAR\.SYNC": "B",
    r"BAR\.ARV": "b",
}


def compiled(source: str, folder: Path) -> tuple[list[Kernel], list[str]]:
    """The kernels of a source on each architecture it is for, with their demangled names; and ptxas' messages.

    It prints C7506 to C7519 where it ignores setmaxnreg, serializes wgmma, or adds a wait for it.
    """
    hopper = source.endswith("_sm90.cu")
    found, messages = [], []
    for arch in ("sm_90a",) if hopper else ("sm_80", "sm_90", "sm_100", "sm_120"):
        cubin, virtual = folder / f"{arch}.cubin", "compute_90a" if hopper else "compute_80"
        command = ["nvcc", "-std=c++17", "-O2", f"-I{CSRC}", f"-gencode=arch={virtual},code={arch}", "-cubin"]
        done = subprocess.run([*command, CSRC / source, "-o", cubin], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        messages += [line for line in demangled(done.stderr).splitlines() if re.match(r"ptxas .*\(C\d+\)", line)]
        kernels = kernels_of(cubin, arch)
        pairs = zip(kernels, demangled("\n".join(kernel.name for kernel in kernels)).splitlines(), strict=True)
        found += [kernel._replace(name=short(name)) for kernel, name in pairs]
    return found, messages


def demangled(text: str) -> str:
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def short(demangled: str) -> str:
    """attention::forward_kernel<__half, 64> of a demangled name: no result, arguments, or namespaces that all share."""
    name = re.sub(r"\(anonymous namespace\)::|\bfastattn::|^void ", "", demangled)
    return re.match(r"[\w:]+(?:<.*>(?=\())?", name)[0]


def nvcc_version() -> str:
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", said)[1]


def order(kernel: Kernel) -> str:
    """Tensor core products, waits for them, exponentials and barriers, in the order of the code."""
    found = []
    for instruction in kernel.code:
        for pattern, letter in MARKS.items():
            if match := re.match(pattern, instruction):
                found.append(letter + (match[1] if match.groups() else ""))
    return "".join(found)


@pytest.mark.parametrize("source", SOURCES)
def test_kernels(source: str, tmp_path: Path) -> None:
    kernels, problems = compiled(source, tmp_path)
    for kernel in kernels:
        print(kernel)
        problems += [f"{problem}: {kernel}" for problem in problems_of(kernel)]
    report(problems, "nvcc", nvcc_version())


def problems_of(kernel: Kernel) -> list[str]:
    found = []
    if kernel.spills:
        found.append(f"{kernel.spills} accesses of spilled registers")
    if re.search(IN_PLACE, kernel.name) and not any(re.match(r"LDG\.E\.128(?!.*CONSTANT)", i) for i in kernel.code):
        found.append("reads what it overwrites by the read-only path")
    # Hopper's own kernels have one block a multiprocessor.
    if kernel.arch != "sm_90a" and any(re.match(r"BAR\.\S+ R\d", instruction) for instruction in kernel.code):
        found.append("the number of a barrier in a register, which counts as 16 barriers: common/reduce.cuh")
    if re.search(NO_PRODUCTS, kernel.name):
        return found
    if kernel.arch != "sm_90a":
        return found if kernel.count("HMMA") else [*found, "no tensor core instruction"]
    if kernel.count("HGMMA") == 0 or kernel.count("HMMA"):
        found.append("a product without wgmma")
    if any("64x96x" in instruction for instruction in kernel.code):
        found.append("an operand of one and a half patterns of the swizzle: csrc/attention/sm90.cuh")
    if kernel.serialized:
        found.append("each wgmma waits for the one before it")
    # setmaxnreg shares out what the launch gives, 65536 registers over 512 or 384 threads; with fewer, warps hang.
    if kernel.count("USETMAXREG") and kernel.registers not in (128, 168):
        found.append("not 128 or 168 registers")
    # Two addresses in shared memory, each of two words. More are computed anew for each product: sm90/wgmma.cuh.
    if (between := median_low(kernel.gaps() or [0])) > 4:
        found.append(f"{between} instructions between two HGMMAs of a product, not 4")
    if kernel.name.startswith("attention::forward_sm90_kernel"):
        found += problems_of_forward_order(kernel)
    if kernel.name.startswith("attention::backward_dkdv_sm90_kernel") and "BlockTiles<64>" not in kernel.name:
        found += problems_of_backward_order(kernel)
    return found


def problems_of_forward_order(kernel: Kernel) -> list[str]:
    """A step starts Q K^T and the last tile's P V in its turn and has all exponentials between the waits for the two.

    ptxas may move the wait for a product to before the work that should run at the same time, and does not report it.
    """
    head_dim = int(re.search(r"Tiles<(\d+)", kernel.name)[1])
    products = head_dim // 16 + 128 // 16
    exponentials = 128 // 2 + 2  # of a thread's scores, and the factors of its two rows
    step = f"B{'G' * products}bW1{'x' * exponentials}W0"
    marks = order(kernel)
    return [] if marks.count(step) == marks.count("W1") > 0 else [f"no {step} in {marks}"]


def problems_of_backward_order(kernel: Kernel) -> list[str]:
    """A full tile hands over dq between the starts of K Q^T and V dO^T, and has all
    exponentials before the wait for the second. At head dimension 64 without dropout it has a quarter there: on an H200
    all were slower.
    """
    products, exponentials = ("GGGG", 64) if "Tiles<64>" in kernel.name else ("GGGGGGGG", 32)
    if exponentials == 64 and kernel.name.endswith("false>"):
        exponentials = 16
    step = f"{products}Bb{products}W1{'x' * exponentials}"
    marks = order(kernel)
    return [] if marks.count(step) == 1 else [f"no {step} in {marks}"]


def test_the_extension_of_setup_py(tmp_path: Path) -> None:
    """It imports without a driver and says so; all but Hopper's own sources have machine code for other chips, and PTX
    for later ones."""
    environment = os.environ | {"FASTATTN_FORCE_CUDA": "1", "FASTATTN_SKIP_CUDA": "0"}
    environment.pop("FASTATTN_CUDA_ARCHS", None)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "temp"]
    done = subprocess.run(command, cwd=CSRC.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (library,) = (tmp_path / "fastattn").glob("_C*.so")
    program = "import _C; assert _C.device_type == 'cuda'; print(_C.device_problem(0) or 'none')"
    done = subprocess.run([sys.executable, "-c", program], cwd=library.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    for option, kind, archs in (("-lptx", "ptx", (80,)), ("-lelf", "cubin", (80, 100, 120))):
        listed = subprocess.run([cuobjdump(), option, library], capture_output=True, text=True, check=True).stdout
        for arch in archs:
            assert listed.count(f".sm_{arch}.{kind}") == sum(not source.endswith("_sm90.cu") for source in SOURCES)
