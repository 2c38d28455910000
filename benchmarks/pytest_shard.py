"""`pytest -p pytest_shard --shard 2/4`: every fourth test, beginning with the second; the parts run in processes of
their own, which pytest-xdist would do too, but a crashed GPU context then takes all later tests with it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="I/N", help="run only the tests I, I + N, I + 2 N, ...")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--shard").split("/"))
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % step != first - 1])
    items[:] = items[first - 1 :: step]
