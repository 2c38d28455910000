"""The layout of the package that a machine can check: who imports whom, and how long its folders are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FASTATTN = ROOT / "fastattn"

# What each part of the package may import from it, itself included, next to COMMON, which everything may
# import. fastattn.check and the tests may import anything.
COMMON = {"_tracing", "backends.calls", "backends.constants"}
SHARED = {"backends.attention_rows", "backends.cpu_matmul", "backends.cross_entropy_chunks"}
ALLOWED = {part: set() for part in COMMON} | {
    "integrations": {"integrations", "generate", "graphs", "models", "nn", "ops", "masks"},
    "graphs": {"graphs", "models", "generate", "nn", "ops", "backends"},
    "models": {"models", "graphs", "generate", "nn", "ops", "masks", "backends", "backends.reference"},  # draws seeds
    "generate": {"generate", "nn", "ops", "backends", "graphs"},
    "nn": {"nn", "ops", "masks", "backends", "backends.reference", "backends.attention_rows", "backends.cpu_matmul"},
    "ops": {"ops", "masks", "backends", "backends.reference"},
    "backends": {"backends.choice"},
    "backends.choice": set(),
    "backends.calls": {"masks"},
    "backends.reference": {"backends.reference", "masks"},
    "backends.aten": {"backends.aten", "backends.reference", "masks", *SHARED},
    "backends.cuda": {"backends.cuda", "masks", "_C", *SHARED},
    "kernels": {"kernels", "masks", *SHARED},
    "masks": {"masks"},
    "backends.cross_entropy_chunks": {"backends.cpu_matmul"},
    "backends.attention_rows": set(),
    "backends.cpu_matmul": set(),
}


def _part(module: str) -> str:
    """The part that a module, or a name in it, belongs to."""
    first, *others = module.split(".")
    return two if others and (two := f"{first}.{others[0]}") in ALLOWED else first


def _sources() -> Iterator[tuple[list[str], Path]]:
    """(the names of its folder, file) of every source; kernels/ is fastattn.kernels."""
    for base, pattern in ((FASTATTN, "**/*.py"), (ROOT, "kernels/**/*.py")):
        for path in base.glob(pattern):
            yield [*path.parent.relative_to(base).parts], path


def _imports(path: Path, folder: list[str]) -> Iterator[str]:
    """What a file imports from fastattn, as dotted names without "fastattn."."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["fastattn", *folder[: len(folder) - node.level + 1]] if node.level else []
            names = [".".join([*above, *([node.module] if node.module else []), alias.name]) for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("fastattn.") for name in names if name.startswith("fastattn."))


def test_imports_run_one_way() -> None:
    wrong = []
    for folder, path in _sources():
        part = _part(".".join([*folder, path.stem]))
        for name in _imports(path, folder):
            target = _part(name)
            if part in ALLOWED and target not in ALLOWED[part] | COMMON:
                wrong.append(f"{path.relative_to(ROOT)} imports fastattn.{name}")
            if part == target == "kernels" and name.split(".")[1] not in (path.parent.name, "common"):
                wrong.append(f"{path.relative_to(ROOT)} imports another op's kernels, fastattn.{name}")
    assert not wrong, "\n".join(wrong)


# Lines of code in each folder. A change that needs more raises its number here, so that growth is a decision.
BUDGETS = {
    "fastattn/*.py": 173,
    "fastattn/kernels/*.py": 12,
    "fastattn/backends/**/*.py": 3566,
    "fastattn/check/*.py": 1352,
    "fastattn/generate/*.py": 799,
    "fastattn/graphs/*.py": 1009,
    "fastattn/integrations/*.py": 3014,
    "fastattn/masks/*.py": 1130,
    "fastattn/models/**/*.py": 1554,
    "fastattn/nn/*.py": 3012,
    "fastattn/ops/*.py": 1611,
    "kernels/**/*.py": 4144,
    "csrc/**/*.*": 7339,  # with csrc/README.md
}


def test_folders_are_within_their_budgets() -> None:
    files = {pattern: [path for path in ROOT.glob(pattern) if path.is_file()] for pattern in BUDGETS}
    lines = {pattern: sum(len(p.read_text().splitlines()) for p in paths) for pattern, paths in files.items()}
    assert {path for paths in files.values() for path in paths} >= {path for _, path in _sources()}
    assert not {pattern: n for pattern, n in lines.items() if n > BUDGETS[pattern]}
