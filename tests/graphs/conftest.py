from collections.abc import Iterator

import pytest

from fastattn import use_backend


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    """Equal dropout in twins, and operators that can be recorded."""
    with use_backend("reference"):
        yield
