"""Builds fastattn, and the CUDA extension fastattn._C where nvcc is found. Everything static is in pyproject.toml.

The build does not need torch: _C calls the Python methods of tensors, by Python's limited API, so one build works with
every torch and every Python from 3.10 on. nvcc compiles and links everything, several files at a time under ninja.
Without nvcc, or if a compile fails, the package is installed without _C, with a warning here and the same explanation
from fastattn.explain().

Environment
  FASTATTN_SKIP_CUDA=1    do not build _C
  FASTATTN_FORCE_CUDA=1   a missing nvcc or a failed compile is an error
  FASTATTN_CUDA_ARCHS     semicolon-separated; default "80;90;100;120+PTX": a binary for Ampere and Ada, one for Hopper,
                          two for Blackwell if nvcc knows it, and PTX of the lowest for later GPUs. A file named
                          *_sm90.cu is always built for sm_90a only.
  CUDA_HOME, CUDA_PATH    the toolkit to use; else nvcc on PATH, in /usr/local/cuda, in PyPI's nvidia-cuda-nvcc
  CXX                     nvcc's host compiler
  MAX_JOBS                how many compilers run at once; default one for each core, as more of them take longer

Objects stay in build/cuda.PLATFORM, and a later build compiles only what has changed: pip builds in new folders each
time. If ccache is installed, it is used. Paths are relative, so that checkouts share its cache. pip shows ninja's
progress only with -v.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SKIP_CUDA = os.environ.get("FASTATTN_SKIP_CUDA") == "1"
FORCE_CUDA = os.environ.get("FASTATTN_FORCE_CUDA") == "1"


def packages() -> dict[str, str]:
    """Every package and its folder; the Triton package kernels/<op> becomes fastattn.kernels.<op>."""
    if loose := sorted(path.name for path in (ROOT / "kernels").glob("*.py")):
        raise SystemExit(f"kernels/ holds packages only: {', '.join(loose)} would be missing from the wheel")
    found = {name: name.replace(".", "/") for name in find_packages(str(ROOT), include=["fastattn", "fastattn.*"])}
    ops = find_packages(str(ROOT / "kernels"))
    return found | {f"fastattn.kernels.{op}": f"kernels/{op.replace('.', '/')}" for op in ops}


def find_nvcc() -> str | None:
    """nvcc, or None. If the environment names a toolkit, no other is used."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which("nvcc", path=f"{home}/bin")
    spec = importlib.util.find_spec("nvidia")  # the namespace package that PyPI's CUDA wheels share
    roots = spec.submodule_search_locations if spec else []
    wheels = [str(path) for root in roots for path in Path(root).glob("cu*/bin")]
    return shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *wheels]))


def gencode(archs: str) -> str:
    """nvcc's flags for a value of FASTATTN_CUDA_ARCHS, such as 80;90+PTX or 90a.

    Numbers without a letter share the lowest's PTX, so that nvcc's front end, half of its time, runs once.
    """
    entries = [entry.strip().partition("+") for entry in archs.split(";")]
    plain = [number for number, _, _ in entries if number.isdigit()]
    flags = []
    for number, _, ptx in entries:
        source = min(plain, key=int) if number in plain else number
        flags.append(f"-gencode=arch=compute_{source},code=sm_{number}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{source},code=compute_{source}")
    return " ".join(flags)


def default_archs(nvcc: str) -> str:
    known = subprocess.run([nvcc, "--list-gpu-code"], stdout=subprocess.PIPE, text=True).stdout.split()
    return ";".join(["80", "90", *(number for number in ("100", "120") if f"sm_{number}" in known)]) + "+PTX"


def ninja_file(nvcc: str, sources: list[str]) -> str:
    """The build of ../_C.so from CUDA and C++ sources, as the text of a build.ninja in the folder of build_files()."""
    archs = gencode(os.environ.get("FASTATTN_CUDA_ARCHS") or default_archs(nvcc))
    binaries, ptx = (re.findall(rf"code={kind}_(\d+)", archs) for kind in ("sm", "compute"))
    listed = r"\,".join(binaries)  # nvcc would take a comma for the end of a macro
    has = f"-DFASTATTN_ARCHS='{listed}' -DFASTATTN_PTX={min(map(int, ptx), default=999)}"
    ccbin = f"-ccbin {os.environ['CXX']}" if os.environ.get("CXX") else ""
    lines = [
        "builddir = ..",  # of the logs, by which ninja knows what it has compiled
        f"nvcc = {nvcc} {ccbin} -std=c++17 -O2 -Xcompiler -fPIC,-fvisibility=hidden",
        "rule compile",
        f"  command = {shutil.which('ccache') or ''} $nvcc $flags -Icsrc -MD -MF $out.d -c $in -o $out",
        "  description = $in",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $nvcc -shared -cudart static -Xcompiler -static-libstdc++,-static-libgcc"
        f" -Xlinker --exclude-libs,ALL -L{Path(nvcc).parents[1]}/lib $in -o $out",  # PyPI's wheels have no lib64
        "  description = link",
    ]
    objects = []
    for source in sources:
        objects.append(f"../objects/{source.replace('/', '_')}.o")
        flags = f"-I{sysconfig.get_path('include')} {has}"
        if source.endswith(".cu"):
            flags = gencode("90a") if source.endswith("_sm90.cu") else archs
        lines += [f"build {objects[-1]}: compile {source} | nvcc_version", f"  flags = {flags}"]
    return "\n".join([*lines, f"build ../_C.so: link {' '.join(objects)}", ""])


def build_files(nvcc: str) -> dict[str, bytes]:
    """Name -> content of what objects are made of."""
    paths = (path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    return files | {"nvcc_version": subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE).stdout}


def write_changes(folder: Path, files: dict[str, bytes]) -> None:
    """Gives the folder these files and no others. One that is there already keeps its time, by which ninja decides."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for path, content in ((folder / name, content) for name, content in files.items()):
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class BuildExtension(build_ext):
    """Compiles _C with ninja. If that fails, the extension is left out, unless FASTATTN_FORCE_CUDA=1."""

    def run(self) -> None:
        try:
            super().run()
            for folder in (Path(self.build_lib), *([ROOT] if self.inplace else [])):
                for older in folder.glob("fastattn/_C.cpython-*"):  # Python would prefer it
                    older.unlink()
        except Exception as error:
            if FORCE_CUDA:
                raise
            warn(f"the compile failed ({error})")
            self.extensions = self.distribution.ext_modules = []

    def build_extension(self, ext: Extension) -> None:
        nvcc, target = find_nvcc(), Path(self.get_ext_fullpath(ext.name))
        build_dir = ROOT / "build" / f"cuda.{self.plat_name}"
        ninja = {"build.ninja": ninja_file(nvcc, ext.sources).encode()}
        write_changes(build_dir / "sources", build_files(nvcc) | ninja)
        jobs = f"-j{os.environ.get('MAX_JOBS') or os.cpu_count() or 1}"
        environment = os.environ | {"CCACHE_NOHASHDIR": "1"}  # without it ccache's key of *_sm90.cu has ROOT in it
        subprocess.run([sys.executable, "-m", "ninja", jobs], cwd=build_dir / "sources", env=environment, check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process may have loaded it
        shutil.copyfile(build_dir / "_C.so", target)


class BuildWheel(bdist_wheel):
    """Tags the wheel by what was built: py3-none-any without _C, else cp310-abi3."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        self.py_limited_api = "cp310"  # csrc/common/python.h
        super().run()


def warn(reason: str) -> None:
    text = (
        f"fastattn is installed WITHOUT its CUDA extension fastattn._C: {reason}. Triton and PyTorch are used instead."
    )
    print("\n".join(["", "*" * len(text), text, "*" * len(text), ""]), file=sys.stderr)


def extensions() -> list[Extension]:
    if SKIP_CUDA:
        return []
    if find_nvcc() is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        places = f"{home}/bin, of CUDA_HOME or CUDA_PATH" if home else "PATH, /usr/local/cuda, PyPI's nvidia-cuda-nvcc"
        reason = f"no nvcc was found (looked in {places})"
        if FORCE_CUDA:
            raise SystemExit(f"FASTATTN_FORCE_CUDA=1, but {reason}")
        warn(reason)
        return []
    files = sorted(path.relative_to(ROOT) for pattern in ("*.cu", "*.cpp") for path in (ROOT / "csrc").rglob(pattern))
    sources = [path.as_posix() for path in files if path.parts[1] != "emulator"]
    return [Extension("fastattn._C", sources, py_limited_api=True)]


if SKIP_CUDA and FORCE_CUDA:
    raise SystemExit("FASTATTN_SKIP_CUDA=1 and FASTATTN_FORCE_CUDA=1 contradict each other")
PACKAGES = packages()
setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension, "bdist_wheel": BuildWheel},
)
