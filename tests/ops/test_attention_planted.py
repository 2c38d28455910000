"""The checks can fail: each known bug, planted in a correct flash attention, is caught by the check of every backend."""

from __future__ import annotations

import pytest
import torch
from attention_checks import Problem, check, make
from attention_planted import BUGS, flash

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")

# The kinds of problem that test_attention*.py gives to every backend, one of each.
PROBLEMS: dict[str, Problem] = {
    "causal": make(mask="causal"),
    "attn_mask": make(mask="attn_mask"),
    "several tiles": make(B=2, H=1, Lq=141, Lk=270, D=16, mask="key_padding_holes"),
    "grouped": make(B=1, H=4, Hk=2, Lq=13, Lk=18, D=16, mask="attn_mask"),
    "bias": make(mask="causal", bias=(1, 1, 21, 37)),
    "dropout": make(mask="everything", dropout_p=0.3),
    "bfloat16": make(mask="causal", bias=(1, 2, 21, 37), dtype=torch.bfloat16, dropout_p=0.3),
    "float16": make(mask="causal", bias=(1, 2, 21, 37), dtype=torch.float16),
    "long": make(B=1, H=1, Lq=16, Lk=1024, D=16, dtype=torch.bfloat16),
}

# bug -> a problem that must find it, and the result it must be found in.
FOUND_BY = {
    "mask one key to the left": ("causal", "out"),
    "mask one query down": ("causal", "out"),
    "mask ignored": ("causal", "out"),
    "partial tile taken as full": ("several tiles", "out"),
    "last partial tile skipped": ("several tiles", "out"),
    "tile skipped": ("several tiles", "out"),
    "heads share the first head's mask": ("attn_mask", "out"),
    "samples share the first sample's mask": ("attn_mask", "out"),
    "accumulator not rescaled": ("causal", "out"),
    "sum not rescaled": ("causal", "out"),
    "scale missing": ("causal", "out"),
    "bias after the scale": ("bias", "out"),
    "lse in base 2": ("causal", "lse"),
    "lse without the max": ("causal", "lse"),
    "empty row divides by zero": ("attn_mask", "out"),
    "wrong key head": ("grouped", "out"),
    "16-bit accumulator": ("long", "out"),
    "dropout row off by one": ("dropout", "out"),
    "dropout column from the tile": ("dropout", "out"),
    "dropout heads share a mask": ("dropout", "out"),
    "dropout without rescale": ("dropout", "out"),
    "dropout before the sum": ("dropout", "out"),
    "backward redraws dropout": ("dropout", "dq"),
    "dlse dropped": ("causal", "dq"),
    "delta missing": ("causal", "dq"),
    "dq not scaled": ("causal", "dq"),
    "dk not scaled": ("causal", "dk"),
    "dv without dropout": ("dropout", "dv"),
    "dk of one head of the group": ("grouped", "dk"),
    "bias gradient of one sample": ("bias", "dbias"),
    "bias gradient scaled": ("bias", "dbias"),
    "last key tile without gradient": ("several tiles", "dk"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_correct_flash_attention_passes(name: str) -> None:
    check(PROBLEMS[name], flash(), NAMES)


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_is_caught(bug: str) -> None:
    problem, result = FOUND_BY[bug]
    with pytest.raises(AssertionError, match=f"^{result}: error"):
        check(PROBLEMS[problem], flash(bug), NAMES)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "16" in name])
@pytest.mark.parametrize("bug", ["mask one key to the left", "accumulator not rescaled", "dlse dropped"])
def test_16_bit_tolerance_is_not_idle(bug: str, name: str) -> None:
    with pytest.raises(AssertionError):
        check(PROBLEMS[name], flash(bug), NAMES)
