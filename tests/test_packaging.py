"""The wheel and the sdist hold what they must, and an installed fastattn works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # building wheels takes minutes on a busy machine

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "fastattn", "kernels", "csrc", "tests")


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(root: Path, *patterns: str) -> set[str]:
    found = (path for pattern in patterns for path in root.glob(pattern))
    return {path.relative_to(root).as_posix() for path in found if path.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing in the real ones."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def dist(checkout: Path) -> Path:
    """The sdist, and the wheel built from it, without CUDA."""
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=checkout, FASTATTN_SKIP_CUDA="1")
    return checkout / "dist"


def test_what_is_packed(checkout: Path, dist: Path) -> None:
    """Without _C the wheel fits every platform; it holds the package and all Triton kernels, and no sources of CUDA.
    The sdist holds what a build with CUDA and the tests need."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kernels = {f"fastattn/{name}" for name in files(checkout, "kernels/**/*.py")}
    assert kernels and names == kernels | files(checkout, "fastattn/**/*.py", "fastattn/py.typed")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert files(checkout, "*.*", "csrc/**/*.*", "kernels/**/*.py", "fastattn/**/*.*", "tests/**/*.*") <= names


def test_installed_away_from_the_checkout(dist: Path, tmp_path: Path) -> None:
    """In a virtual environment that sees this one's packages, from another folder.

    It computes, its backends import, it says why there is no CUDA kernel, and a foreign package `kernels` stays itself.
    """
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (wheel,) = dist.glob("*.whl")
    call(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (site / "seen.pth").write_text("\n".join(seen))
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("name = 'foreign'\n")
    program = """
import fastattn, fastattn.kernels.add_layer_norm, kernels, torch
print(fastattn.__file__, fastattn.kernels.add_layer_norm.__file__, kernels.name)
x = torch.randn(2, 3, 4, 8)
fastattn.scaled_dot_product_attention(x, x, x)
print(fastattn.explain("add_layer_norm", x, None, x[0, 0, 0], x[0, 0, 0]).refusals["cuda"])
"""
    paths, refusal = call(python, "-c", program, cwd=tmp_path, PYTHONPATH="").splitlines()
    *own, foreign = paths.split()
    assert all(path.startswith(str(site / "fastattn")) for path in own) and foreign == "foreign"
    assert "got a CPU tensor" in refusal


def write_nvcc(folder: Path, script: str) -> Path:
    """folder: is then a CUDA_HOME."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(script)
    nvcc.chmod(0o755)
    return nvcc


def test_failed_compile_is_an_install_without_the_extension(checkout: Path, tmp_path: Path) -> None:
    """An nvcc that fails costs the extension, not the install: the wheel fits every platform, and the build says so.
    FASTATTN_FORCE_CUDA makes it an error, as it does a missing nvcc."""
    write_nvcc(tmp_path, "#!/bin/sh\necho no licence today >&2\nexit 1\n")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path)]

    def build(cuda_home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        environment |= os.environ | {"CUDA_HOME": str(cuda_home)}
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=environment)

    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no licence today" in done.stdout + done.stderr
    assert "installed WITHOUT its CUDA extension fastattn._C: the compile failed" in done.stderr
    assert [path.name.endswith("-py3-none-any.whl") for path in tmp_path.glob("*.whl")] == [True]
    for cuda_home in (tmp_path, tmp_path / "nowhere"):
        assert build(cuda_home, FASTATTN_FORCE_CUDA="1").returncode != 0


NVCC = """#!/bin/sh
[ "$1" = --version ] && exec echo 13.0
echo "$@" >> "$0.said"
while [ $# -gt 0 ]; do
    case $1 in -c) source=$2 ;; -MF) made=$2 ;; -o) out=$2 ;; esac
    shift
done
[ -z "$source" ] || echo "$out: $source csrc/common/launch.cuh" > "$made"
touch "$out"
"""


def test_a_later_build_compiles_what_has_changed(checkout: Path, tmp_path: Path) -> None:
    """With other folders each time, as pip calls it: by contents, not by times. An extension of an earlier version,
    for one Python alone, goes: Python would prefer it."""
    nvcc = write_nvcc(tmp_path, NVCC)
    said = nvcc.with_suffix(".said")
    kernel, header = checkout / "csrc/attention/forward.cu", checkout / "csrc/common/launch.cuh"

    def compiled(call_number: str, **environment: str) -> set[str]:
        said.write_text("")
        earlier = tmp_path / call_number / "lib" / "fastattn" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        earlier.parent.mkdir(parents=True)
        earlier.touch()
        settings = {"CUDA_HOME": str(tmp_path), "CCACHE_DISABLE": "1"}
        folders = ("--build-lib", tmp_path / call_number / "lib", "--build-temp", tmp_path / call_number / "temp")
        call(sys.executable, "setup.py", "build_ext", *folders, cwd=checkout, **settings | environment)
        assert [path.name for path in earlier.parent.iterdir()] == ["_C.abi3.so"]
        lines = (line.split() for line in said.read_text().splitlines() if " -c " in line)
        return {words[words.index("-c") + 1] for words in lines}

    sources = files(checkout, "csrc/**/*.cu", "csrc/**/*.cpp") - files(checkout, "csrc/emulator/*")
    assert compiled("first") == sources
    kernel.touch()
    assert compiled("again") == set()
    kernel.write_text(kernel.read_text() + "// changed\n")
    os.utime(kernel, (0, 0))
    assert compiled("one source") == {"csrc/attention/forward.cu"}
    header.write_text(header.read_text() + "// changed\n")
    assert compiled("a header") == sources
    found = compiled("another architecture", FASTATTN_CUDA_ARCHS="86")
    assert found == {name for name in sources if not name.endswith("_sm90.cu")}
