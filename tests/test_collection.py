"""Every file of tests can be imported where what few tests need is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MISSING = ("expecttest", "mkdocs", "mypy", "ruff")
COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))  # an import of them raises ModuleNotFoundError
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "--full", "-p", "no:cacheprovider"]))
"""


@pytest.mark.full
def test_every_file_is_imported_without_tools() -> None:
    """One that cannot be imported is an error of collection, and none of its tests runs."""
    command = [sys.executable, "-c", COLLECT]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
