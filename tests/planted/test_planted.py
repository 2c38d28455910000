"""Faults that are planted in the package's Python, its Triton kernels and the examples: the nearest tests must fail.

    pytest --full tests/planted -k "nn and softcap"

tries those whose id contains both words. The tables are in the files next to this one: one for each part of the
package. A fault that no test finds becomes a row of the catalogue or of another table of tests, not a new file.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from planted.fault import Fault, copy_checkout, run_with

pytestmark = pytest.mark.full
PARTS = "op kernel mask nn model generate graph integration check example tool".split()
FAULTS = {f"{part}: {fault.name}": fault for part in PARTS for fault in import_module(f"planted.{part}_faults").FAULTS}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("planted"))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_is_found(fault: Fault, checkout: Path) -> None:
    done = run_with(fault, fault.tests, checkout)
    # 1: a test failed. An error in the collection or no test at all would not show that a test finds the fault.
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tests", sorted({fault.tests for fault in FAULTS.values()}))
def test_without_a_fault(tests: str, checkout: Path) -> None:
    done = run_with(None, tests, checkout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
