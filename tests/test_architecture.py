"""The layout of the package that a machine can check: who imports whom, and that every op is complete."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FASTATTN = ROOT / "fastattn"

# What each part of the package may import from it, itself included, beside _transforms and _records, which all may ask.
# The doctor, tune and the tests stand outside.
ALLOWED = {
    "integrations": {"integrations", "models", "nn", "ops", "masks"},
    "graphs": {"models", "generate", "ops", "_dispatch", "_cuda_graphs"},
    "models": {"models", "generate", "nn", "ops", "masks", "reference", "_dispatch"},  # where dropout seeds are drawn
    "generate": {"generate", "nn", "ops", "_dispatch", "_cuda_graphs"},
    "nn": {"nn", "ops", "masks", "_dispatch", "_products"},  # it asks whether the plain formula was asked for
    "ops": {"ops", "_dispatch", "masks", "reference"},
    "reference": {"reference", "masks"},
    "aten": {"aten", "reference", "masks", "_products"},  # the specification's dropout bits and activations
    "kernels": {"kernels", "masks", "_cross_entropy_products"},
    "cuda": {"cuda", "masks", "_C", "_cross_entropy_products"},
    "masks": {"masks"},
    "_cuda_graphs": set(),
    "_dispatch": set(),
    "_products": set(),
    "_records": set(),
    "_cross_entropy_products": set(),
    "error_rule": set(),
    "_transforms": set(),
}


def _sources() -> Iterator[tuple[str, Path]]:
    """(part of the package, file) for every source file; kernels/ is fastattn.kernels."""
    for path in FASTATTN.rglob("*.py"):
        yield path.relative_to(FASTATTN).parts[0].removesuffix(".py"), path
    for path in (ROOT / "kernels").rglob("*.py"):
        yield "kernels", path


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


def test_imports_run_one_way() -> None:
    wrong = []
    for part, path in _sources():
        base = ROOT if part == "kernels" and FASTATTN not in path.parents else FASTATTN
        package = ".".join(["fastattn", *path.parent.relative_to(base).parts])
        for name in _imports(path, package):
            target = name.split(".")[0]
            if part in ALLOWED and target not in ALLOWED[part] | {"_transforms", "_records"}:
                wrong.append(f"{path.relative_to(ROOT)} imports fastattn.{name}")
            if part == target == "kernels" and name.split(".")[1] not in (path.parent.name, "common"):
                wrong.append(f"{path.relative_to(ROOT)} imports another op's kernels, fastattn.{name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op_name", sorted(path.with_suffix("").name for path in (FASTATTN / "ops").glob("[!_]*.py")))
def test_every_op_is_complete(op_name: str) -> None:
    for needed in (
        FASTATTN / "reference" / f"{op_name}.py",
        FASTATTN / "aten" / f"{op_name}.py",
        FASTATTN / "cuda" / f"{op_name}.py",
        ROOT / "kernels" / op_name / "__init__.py",
        ROOT / "csrc" / op_name,
        ROOT / "tests" / "ops" / f"test_{op_name}.py",
        ROOT / "benchmarks" / f"bench_{op_name}.py",
    ):
        assert needed.exists(), f"{needed.relative_to(ROOT)} is missing"


def test_every_launch_allows_fp_fusion() -> None:
    """Triton 3.9 warns where a launch does not say, and 3.10 then compiles slower code."""
    launches = [
        (path, node)
        for path in (ROOT / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in launches
        if not any(k.arg == "enable_fp_fusion" and ast.unparse(k.value) == "True" for k in node.keywords)
    ]
    assert launches and not silent, "\n".join(silent)
