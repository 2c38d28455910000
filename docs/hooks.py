"""Makes the pages of the site that are not committed: one for each record in benchmarks/results/."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from report_markdown import committed, report, title
from result_files import ROOT

RECORDS = {path.stem: record for path, record in committed(ROOT / "benchmarks" / "results")}
HEAD = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"  # hundreds of headings


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name, record in RECORDS.items():
        files.append(File.generated(config, f"results/{name}.md", content=HEAD + "\n".join(report(record))))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The names of records in docs/results.md lead to their pages."""
    if page.file.src_uri != "results.md":
        return markdown
    markdown = re.sub(r"`(report_\w+)`", r"[\1](results/\1.md)", markdown)
    pages = [f"- [{title(record)}](results/{name}.md)" for name, record in RECORDS.items()]
    return "\n".join([markdown, "## All records", "", *pages])
