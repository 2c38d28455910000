"""The checks can fail: bugs planted in a correct flash attention and in the Triton kernels' sources are caught."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attention_checks import Problem, backend_call, check, make
from attention_planted import BUGS, flash
from test_planted_triton import plant

pytestmark = pytest.mark.full

# The kinds of problem that test_attention*.py gives to every backend, one of each.
PROBLEMS: dict[str, Problem] = {
    "causal": make(mask="causal"),
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
    "last partial tile skipped": ("several tiles", "out"),
    "accumulator not rescaled": ("causal", "out"),
    "16-bit accumulator": ("long", "out"),
    "dropout row off by one": ("dropout", "out"),
    "delta missing": ("causal", "dq"),
    "dk of one head of the group": ("grouped", "dk"),
    "bias gradient of one sample": ("bias", "dbias"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_correct_flash_attention_passes(name: str) -> None:
    check(PROBLEMS[name], flash())


@pytest.mark.parametrize("bug", BUGS)
def test_bug_of_flash_attention_is_caught(bug: str) -> None:
    problem, result = FOUND_BY[bug]
    with pytest.raises(AssertionError, match=f"^{result}: error"):
        check(PROBLEMS[problem], flash(bug))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("bug", ["mask one key to the left", "accumulator not rescaled", "delta missing"])
def test_16_bits_do_not_hide_a_bug(bug: str, name: str) -> None:
    with pytest.raises(AssertionError):
        check(PROBLEMS[name], flash(bug))


class Bug(NamedTuple):
    name: str
    module: str
    right: str
    wrong: str
    problem: Problem
    result: str  # that must show the bug


SHAPE = {"B": 2, "H": 2, "Lq": 20, "Lk": 140, "D": 16}
MATRIX = make(**SHAPE, mask="attn_mask", bias=(1, 2, 20, 140), dropout_p=0.3)
WINDOW = make(B=1, H=1, Lq=140, Lk=300, D=16, mask={"window": (70, 70), "align": "bottom_right"})
PADDED = make(**SHAPE, mask="key_padding_holes")
TILES, FORWARD, BACKWARD = ("attention." + name for name in ("masked_tiles", "forward", "backward"))
KERNEL_BUGS = [
    Bug("interval one key long", TILES, "(col < end[:, None])", "(col <= end[:, None])", WINDOW, "out"),
    Bug("bits of the neighbour", TILES, "2 * octet + tl.arange(0, 2)[None, None, None, :]",
        "2 * octet + 1 - tl.arange(0, 2)[None, None, None, :]", MATRIX, "out"),
    Bug("partial tile as full", TILES, "first_full = tl.cdiv(begin_of_last, BLOCK_COLUMNS)",
        "first_full = begin_of_last // BLOCK_COLUMNS", WINDOW, "out"),
    Bug("the first tile again", TILES, "mask.tiles + first + i", "mask.tiles + first + i * 0", PADDED, "out"),
    Bug("accumulator not rescaled", FORWARD, "acc * rescale[:, None]", "acc", WINDOW, "out"),
    Bug("gradient of lse lost", BACKWARD, "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr", PADDED, "dq"),
    Bug("another row's dropout", BACKWARD, "dropout.threshold, row0 + m, n0", "dropout.threshold, row0 + m + 1, n0",
        MATRIX, "dk"),
    Bug("bias gradient of one sample", "attention.bias_gradient", "bias_b + i // (loop_m * loop_h)",
        "bias_b + 0 * (i // (loop_m * loop_h))", MATRIX, "dbias"),
]  # fmt: skip


@pytest.fixture
def interpreted(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("only the interpreter looks up a kernel's functions when it is called")


@pytest.mark.parametrize("problem", [MATRIX, WINDOW, PADDED], ids=["matrix", "window", "padded"])
def test_kernels_without_a_bug_pass(problem: Problem, interpreted: None, device: torch.device) -> None:
    check(problem, backend_call("triton", device, weights=False))


@pytest.mark.parametrize("bug", KERNEL_BUGS, ids=[bug.name for bug in KERNEL_BUGS])
def test_bug_of_a_kernel_is_caught(
    bug: Bug, interpreted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    attend = backend_call("triton", device, weights=False)
    plant(bug, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=f"^{bug.result}: error"):
        check(bug.problem, attend)
