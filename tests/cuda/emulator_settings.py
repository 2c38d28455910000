"""The settings of csrc/emulator, shared out among the blocks of every launch that tests make."""

from __future__ import annotations

import os
import zlib

import pytest
from emulator_build import ORDERS, SM90_COMPLETIONS

VALUES = {"FASTATTN_EMULATOR_ORDER": ORDERS, "FASTATTN_EMULATOR_ASYNC": SM90_COMPLETIONS}


def take_turns(node: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each launch in this test, one block after the other runs in another order and with another completion.

    A race may show in one setting alone, and every test in every setting would take twelve times as long. So each
    kernel, under each mask, meets eager and lazy and all orders in one run. Which block has which setting follows from
    the test's id: it differs from test to test, and a failure repeats; its report says the settings. Tests that set
    the environment themselves, and whoever runs them with it set, have their way.
    """
    if any(name in os.environ for name in VALUES):
        return
    for name, values in VALUES.items():
        first = zlib.crc32(node.nodeid.encode()) % len(values)
        monkeypatch.setenv(name, ",".join(values[first:] + values[:first]))
    said = " ".join(f"{name}={os.environ[name]}" for name in VALUES)
    node.add_report_section("setup", "settings of csrc/emulator", said)


def two_turns_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on in this test, the first block has the settings that the third one had: of two launches of two blocks,
    as Hopper's forward makes them here, the second meets the other orders and the third completion."""
    for name in filter(os.environ.get, VALUES):
        values = os.environ[name].split(",")
        monkeypatch.setenv(name, ",".join(values[2:] + values[:2]))
