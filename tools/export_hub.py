"""Writes fastattn as a kernel for Hugging Face's hub, from the sources of this checkout.

    python tools/export_hub.py [--owner NAME] [--out build/hub]

The folder has the layout of the package `kernels` for code that is Python alone: a variant for CUDA and one for CPUs,
with the same files. docs/kernels_hub.md describes how they are loaded and published.

A variant holds tools/hub, which is its entry, the backends `reference`, `aten` and `triton`, and what these import from
fastattn; not the rest, so that a reader can check it. Imports become relative. A folder's __init__.py is empty where no
file imports a name from it: those of fastattn.nn and others would import the whole package.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENTRY = ROOT / "tools" / "hub"
VERSION = 1  # of the public names in the entry, and of the hub's branch, v1
# Triton's kernels need compute capability 8.0; +PTX means all newer ones.
BACKENDS = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0+PTX"]}}
# The entry, and what backends/choice.py imports by name.
BY_NAME = ("tools/hub/*.py", "fastattn/backends/aten/*.py", "fastattn/backends/reference/*.py", "kernels/*/*.py")
LEFT_OUT = "kernels/search/"  # chooses the next tokens of fastattn.generate


def target(path: Path) -> str:
    """Where a file is in a variant; kernels/ is fastattn.kernels."""
    base = next(folder for folder in (ENTRY, ROOT / "fastattn", ROOT) if path.is_relative_to(folder))
    return path.relative_to(base).as_posix()


def source(module: str) -> Path | None:
    """The file of a dotted name, or None if it is no module."""
    folder, *names = module.split(".")
    base = ROOT.joinpath(*names) if names[:1] == ["kernels"] else ROOT.joinpath(folder, *names)
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.exists()), None)


def relative(path: Path) -> tuple[str, list[Path]]:
    """A file's text with relative imports, and the files that it imports by a name of fastattn."""
    text, used = path.read_text(), []
    lines, dots = text.splitlines(keepends=True), "." * (target(path).count("/") + 1)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module.split(".")[0] != "fastattn":
            continue
        before, after = f"from {node.module} import", f"from {dots}{node.module[len('fastattn.') :]} import"
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(before, after, 1)
        used += [source(f"{node.module}.{alias.name}") or source(node.module) for alias in node.names]
    return "".join(lines), used


def files() -> dict[str, str]:
    """The files of a variant, without its metadata: where it is -> text."""
    waiting, texts = [path for pattern in BY_NAME for path in ROOT.glob(pattern) if LEFT_OUT not in path.as_posix()], {}
    while waiting:
        path = waiting.pop()
        if target(path) not in texts:
            texts[target(path)], used = relative(path)
            waiting += used
    for name in list(texts):
        for folder in Path(name).parents:
            texts.setdefault((folder / "__init__.py").as_posix(), "")
    return texts | {"LICENSE": (ROOT / "LICENSE").read_text()}


def export(out: Path, owner: str = "OWNER") -> None:
    """Write the folder for a repository of this owner. Only variants of an earlier export are removed from it."""
    texts = files()
    hashes = {name: hashlib.sha256(text.encode()) for name, text in sorted(texts.items())}
    digest = {"algorithm": "sha256", "files": {k: base64.b64encode(v.digest()).decode() for k, v in hashes.items()}}
    # Of the contents: operators of two exports that differ have two names, and may be in one process.
    short = hashlib.sha256(json.dumps(digest).encode()).hexdigest()[:7]
    for backend, described in BACKENDS.items():
        folder = out / "build" / f"torch-{backend}"
        if folder.exists():
            shutil.rmtree(folder)
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        metadata = {"id": f"_fastattn_{backend}_{short}", "name": "fastattn", "version": VERSION, "backend": described}
        metadata |= {"license": "Apache-2.0", "python-depends": [], "digest": digest}
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (out / "build" / "CARD.md").write_text((ENTRY / "CARD.md").read_text().replace("OWNER", owner))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub")
    parser.add_argument("--owner", default="OWNER", help="of the repository OWNER/fastattn, for its card")
    export(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
