"""The house rules that a machine can check: who imports whom, and that every op is whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FASTATTN = ROOT / "fastattn"

# What each part of the package may import from it, itself included. The doctor and the tests stand outside.
ALLOWED = {
    "graphs": {"models", "_dispatch"},
    "models": {"models", "nn", "ops", "masks", "generate", "_dispatch"},
    "nn": {"nn", "ops", "masks", "_dispatch"},  # as models do, it asks whether the plain formula was asked for
    "ops": {"ops", "_dispatch", "masks", "reference"},
    "reference": {"reference", "masks"},
    "aten": {"aten", "reference", "masks"},  # the specification's dropout bits and activations
    "kernels": {"kernels", "masks", "_attention_delta", "_cross_entropy_products"},
    "cuda": {"cuda", "masks", "_C", "_attention_delta", "_cross_entropy_products"},
    "masks": {"_mask_arguments", "_mask_tiles"},
    "_mask_arguments": set(),
    "_mask_tiles": set(),
    "_dispatch": set(),
    "_attention_delta": set(),
    "_cross_entropy_products": set(),
}


def _sources() -> list[tuple[str, Path]]:
    """(part of the package, file) for every source file; kernels/ is fastattn.kernels."""
    files = [(path.relative_to(FASTATTN), path) for path in FASTATTN.rglob("*.py")]
    files += [(Path("kernels") / path.relative_to(ROOT / "kernels"), path) for path in (ROOT / "kernels").rglob("*.py")]
    return [(name.parts[0].removesuffix(".py"), path) for name, path in files]


def _imports(path: Path, package: str) -> Iterator[str]:
    """The modules of fastattn that a file imports, as dotted names without "fastattn."."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], node.module or ""])]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names if node.module == "fastattn"]
        else:
            continue
        yield from (name.removeprefix("fastattn.") for name in names if name.startswith("fastattn."))


def _package(part: str, path: Path) -> str:
    base = ROOT if part == "kernels" and FASTATTN not in path.parents else FASTATTN
    inner = path.parent.relative_to(base).parts
    return ".".join(["fastattn", *inner])


@pytest.mark.parametrize(("part", "path"), [pytest.param(*s, id=str(s[1].relative_to(ROOT))) for s in _sources()])
def test_imports_run_one_way(part: str, path: Path) -> None:
    if part not in ALLOWED:
        return
    for name in _imports(path, _package(part, path)):
        target = name.split(".")[0]
        assert target in ALLOWED[part], f"{path.relative_to(ROOT)} imports fastattn.{name}"
        if part == "kernels" and target == "kernels":  # a backend and the common one, never another backend
            backend = path.relative_to(ROOT / "kernels").parts[0]
            assert name.split(".")[1] in (backend, "common"), f"{path.relative_to(ROOT)} imports fastattn.{name}"


def test_the_import_check_sees_relative_imports(tmp_path: Path) -> None:
    file = tmp_path / "backend.py"
    file.write_text("from ..ops import attention\nfrom fastattn import masks\nimport fastattn.nn\nimport torch\n")
    assert list(_imports(file, "fastattn.reference")) == ["ops", "masks", "nn"]


def _stems() -> list[str]:
    return sorted(path.stem for path in (FASTATTN / "ops").glob("[!_]*.py"))


@pytest.mark.parametrize("op_name", _stems())
def test_every_op_is_whole(op_name: str) -> None:
    for needed in (
        FASTATTN / "reference" / f"{op_name}.py",
        FASTATTN / "aten" / f"{op_name}.py",
        ROOT / "kernels" / op_name / "__init__.py",
        ROOT / "tests" / "ops" / f"test_{op_name}.py",
        ROOT / "benchmarks" / f"bench_{op_name}.py",
    ):
        assert needed.is_file(), f"{needed.relative_to(ROOT)} is missing"


def test_backends_are_packages() -> None:
    loose = [path.name for path in (ROOT / "kernels").glob("*.py")]
    assert not loose, f"{loose} would be importable in a checkout and absent from the wheel"


def test_files_are_short() -> None:
    kinds = ("*.py", "*.cu", "*.cuh", "*.cpp", "*.h")
    folders = ("fastattn", "kernels", "csrc", "tests", "benchmarks", "examples")
    files = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > 400}
    assert not long, f"over 400 lines: {long}"


def test_the_public_names_are_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    names = re.findall(r'^    "(\w+)",$', (FASTATTN / "__init__.py").read_text(), flags=re.M)
    assert names
    missing = [name for name in names if name not in readme]
    assert not missing, f"README.md does not mention {missing}"
