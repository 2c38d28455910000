"""The settings of csrc/host, shared out among the blocks of every launch that tests make."""

from __future__ import annotations

import os
import zlib

import pytest
from host_build import ORDERS, SM90_COMPLETIONS


def take_turns(node: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each launch in this test, one block after the other runs in another order and with another completion.

    A race may show in one setting alone, and every test in every setting would take twelve times as long. So each
    kernel, under each mask, meets eager and lazy and all orders in one run. Which block has which setting follows from
    the test's id: it differs from test to test, and a failure repeats; its report says the settings. Tests that set
    the environment themselves, and whoever runs them with it set, have their way.
    """
    if "FASTATTN_HOST_ORDER" in os.environ or "FASTATTN_HOST_ASYNC" in os.environ:
        return
    turns = []
    for name, values in (("FASTATTN_HOST_ORDER", ORDERS), ("FASTATTN_HOST_ASYNC", SM90_COMPLETIONS)):
        first = zlib.crc32(node.nodeid.encode()) % len(values)
        turns.append((name, ",".join(values[first:] + values[:first])))
        monkeypatch.setenv(*turns[-1])
    node.add_report_section("setup", "settings of csrc/host", " ".join(map("=".join, turns)))
