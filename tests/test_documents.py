"""What the README and the documentation promise, and the site that is made of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, PAGES = ROOT / "README.md", sorted((ROOT / "docs").rglob("*.md"))
COMPARISON = ROOT / "docs" / "comparison.md"
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


def blocks(page: Path) -> list[str]:
    """The page's blocks that are marked as python; one that cannot run here is marked as py."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # without code
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not re.search("://|^../../actions/", link)]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing and (links or page != README)


@pytest.mark.parametrize(("page", "lines"), [(README, 140), (ROOT / "docs" / "results.md", 60), (COMPARISON, 90)])
def test_a_page_is_short(page: Path, lines: int) -> None:
    assert len(page.read_text().splitlines()) <= lines


def test_each_claim_of_the_comparison_has_a_test_or_a_source() -> None:
    text, catalogue = COMPARISON.read_text(), (ROOT / "tests" / "catalogue.py").read_text()
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == set(re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE))
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    for feature, ours, *others, test in ([cell.strip() for cell in row] for row in table[2:]):
        assert all(cell in ("no", "-", "not stated") or "][" in cell for cell in others), feature
        if not ours.startswith("[no](non_goals.md)"):
            file, name, row = re.fullmatch(r"`([\w/]+\.py)::(\w+)(?:\[(.+)\])?`", test).groups()
            assert f"def {name}(" in (ROOT / "tests" / file).read_text() and f'"{row or ""}' in catalogue, feature


@pytest.mark.parametrize(
    "page", [README, *(pytest.param(page, marks=pytest.mark.full) for page in PAGES if blocks(page))], ids=name
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, as a reader would: a block may use what those above it made."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page):
        for package in re.findall(r"^(?:from|import) (transformers|peft|safetensors)\b", block, re.MULTILINE):
            pytest.importorskip(package)
        exec(compile(block, name(page), "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """From top to bottom, with their own assertions. They are stored without outputs."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if "transformers" in path.read_text():
        pytest.importorskip("transformers")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert any("\nassert " in cell.source for cell in notebook.cells)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)}
    nbclient.NotebookClient(notebook, timeout=300).execute(cwd=str(tmp_path), env=environment)


@pytest.mark.full
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Every page but the records' is in the navigation, every link and name is found: warnings are errors."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: .[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert len(built) > len(PAGES)  # and 404.html
    loaded = [tag for text in built for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)]
    elsewhere = re.compile(r"""\b(?:src|href)=["']?(?:https?:)?//""")
    assert loaded and not [tag for tag in loaded if elsewhere.search(tag) and 'rel="canonical"' not in tag]
