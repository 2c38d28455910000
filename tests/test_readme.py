"""What the README and the documents say can be done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing and (links or document.name != "README.md")


def test_python_blocks_run() -> None:
    """From top to bottom, as a reader would: a block may use what those above it made."""
    names: dict[str, object] = {}
    assert len(BLOCKS) >= 6
    for block in BLOCKS:
        if "from transformers" in block:
            pytest.importorskip("transformers")
        exec(compile(block, "README.md", "exec"), names)
