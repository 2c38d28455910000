"""The checks can fail: each finds the bugs that are planted here in the sources of the Triton kernels.

A bug replaces one text in a module of kernels/. The changed module is imported next to the right one, and its functions
and launches replace the right one's in every module that has them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import attention_checks as attention
import checks
import pytest
import torch

from fastattn.check import cases

pytestmark = pytest.mark.full


class Bug(NamedTuple):
    name: str
    module: str
    right: str
    wrong: str
    problem: Any  # of checks.py, or of attention_checks.py
    result: str  # that must show the bug


# Norms: two programs, one of which does two blocks of rows.
TURNS = cases.add_layer_norm(rows=(20,), hidden=130, x_bias=True, dropout_p=0.3, return_sum=True)
BY_STD = cases.add_layer_norm(rows=(20,), hidden=130, eps_on_std=True, return_sum=True)
RELU, GELU, SWIGLU = (cases.feed_forward(activation, dropout_p=0.3) for activation in ("relu", "gelu", "swiglu"))
LOSS = cases.linear_cross_entropy(label_smoothing=0.1, logit_scale=0.7)
SHAPE = {"B": 2, "H": 2, "Lq": 20, "Lk": 140, "D": 16}
MATRIX = attention.make(**SHAPE, mask="attn_mask", bias=(1, 2, 20, 140), dropout_p=0.3)
SPLIT = attention.make(B=9, H=1, Lq=20, Lk=30, D=16, mask="key_padding_holes", bias=(1, 1, 20, 30), dropout_p=0.3)
BAND = {"window": (70, 70), "align": "bottom_right"}
WINDOW = attention.make(B=1, H=1, Lq=140, Lk=300, D=16, mask=BAND)
PADDED = attention.make(**SHAPE, mask="key_padding_holes")
GROUPED = attention.make(B=1, H=4, Hk=2, Lq=13, Lk=40, D=16, mask="attn_mask", dtype=torch.bfloat16)
SHORT = attention.make(B=2, H=4, Hk=2, Lq=70, Lk=29, D=16, mask="key_padding_holes", dropout_p=0.3)
DISTANCES = {"relative_bias": (1, 144), "mask": {"window": (66, 3)}, "softcap": 2.0}
DISTANCES = attention.make(B=1, H=1, Lq=70, Lk=75, D=16, **DISTANCES)
CAPPED = attention.make(B=1, H=2, Lq=20, Lk=30, D=16, softcap=1.0)
LONG = attention.make(B=1, H=1, Lq=16, Lk=2048, D=16, dtype=torch.bfloat16)
LONG = LONG.but(v=LONG.v + 1)  # a sum that grows with every tile

BACKWARD, NORM = "add_layer_norm.backward", "add_layer_norm.forward"
HIDDEN, HIDDEN_BACKWARD = "feed_forward.forward", "feed_forward.backward"
ROWS = "linear_cross_entropy.rows"
TILES, ATTENTION, ATTENTION_BACKWARD = "attention.masked_tiles", "attention.forward", "attention.backward"
ONE_TILE, DIAGONALS = "attention.short", "attention.relative_bias_gradient"
BUGS = [
    Bug("x_bias's gradient of the last turn", BACKWARD, "dx_sum += grad", "dx_sum = grad", TURNS, "grad of x_bias"),
    Bug("columns outside the row counted", NORM,
        "tl.where(in_row[None, :], value - center[:, None], 0.0)", "value - center[:, None]", TURNS, "out"),
    Bug("no Bessel's correction", NORM, "squares / (hidden - 1)", "squares / hidden", BY_STD, "out"),
    Bug("the ratio of another row", BACKWARD, "TICKETS + row,", "TICKETS + row + 1,", BY_STD, "grad of x"),
    Bug("another row's mask", BACKWARD, "threshold, row, 0", "threshold, row + 1, 0", TURNS, "grad of x"),
    Bug("a program's sums left out", BACKWARD, "(row < count)[:, None]", "(row + 1 < count)[:, None]",
        TURNS, "grad of weight"),
    Bug("the gate's bias for both", HIDDEN, "bias1 + d_inner + col", "bias1 + col", SWIGLU, "out"),
    Bug("the first half's mask for both", HIDDEN,
        "n * BLOCK_N + half * (BLOCK_N // 2), BLOCK_N // 2)", "n * BLOCK_N, BLOCK_N // 2)", GELU, "out"),
    Bug("relu's slope at 0", HIDDEN_BACKWARD, "tl.where(gate <= 0,", "tl.where(gate < 0,", RELU, "grad of x"),
    Bug("columns after the classes counted", ROWS,
        "tl.sum(tl.where(inside, z, 0.0), axis=1)", "tl.sum(z, axis=1)", LOSS, "out"),
    Bug("the gradient of a sum", ROWS, "rate /= tl.load(count).to(tl.float32)", "rate /= 1", LOSS, "grad of x"),
    Bug("ignored rows keep their logits", ROWS, "for start in range(0, n_class", "for start in range(0, 0",
        LOSS, "grad of x"),
    Bug("interval one key long", TILES, "(col < end[:, None])", "(col <= end[:, None])", WINDOW, "out"),
    Bug("bits of the neighbour", TILES, "2 * octet + tl.arange(0, 2)[None, None, None, :]",
        "2 * octet + 1 - tl.arange(0, 2)[None, None, None, :]", MATRIX, "out"),
    Bug("partial tile as full", TILES, "first_full = tl.cdiv(begin_of_last, BLOCK_COLUMNS)",
        "first_full = begin_of_last // BLOCK_COLUMNS", WINDOW, "out"),
    Bug("the first tile again", TILES, "mask.tiles + first + i", "mask.tiles + first + i * 0", PADDED, "out"),
    Bug("accumulator not rescaled", ATTENTION, "acc * rescale[:, None]", "acc", WINDOW, "out"),
    Bug("16-bit accumulator", ATTENTION, "acc * rescale[:, None]",
        "(acc * rescale[:, None]).to(v_tile.dtype).to(tl.float32)", LONG, "out"),
    Bug("gradient of lse lost", ATTENTION_BACKWARD, "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr",
        PADDED, "dq"),
    Bug("another row's dropout", ATTENTION_BACKWARD, "dropout.threshold, row0 + m, n0",
        "dropout.threshold, row0 + m + 1, n0", MATRIX, "dk"),
    Bug("one head of the group", ATTENTION_BACKWARD, "for g in range(group):", "for g in range(1):", GROUPED, "dk"),
    Bug("dropout's factor left out", ONE_TILE, "dropout.scale / row_sum", "1.0 / row_sum", SHORT, "out"),
    Bug("gradient of lse lost in one tile", ONE_TILE, "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr",
        SHORT, "dq"),
    Bug("delta without dropout", ONE_TILE, "dp = tl.where(kept, dp * dropout.scale, 0.0)", "dp *= 1.0", SHORT, "dq"),
    Bug("one head of the group in one tile", ONE_TILE, "in range(group * num_tiles)", "in range(num_tiles)",
        SHORT, "dq"),
    Bug("the first queries again", ONE_TILE, "m0 = i % num_tiles * BLOCK_M", "m0 = i // num_tiles * BLOCK_M",
        SHORT, "dq"),
    Bug("bias gradient of one sample", "attention.bias_gradient", "first_b + i // (loop_m * loop_h)",
        "first_b + 0 * (i // (loop_m * loop_h))", MATRIX, "dbias"),
    Bug("each part's first samples", "attention.bias_gradient", "first_b = bias_b * loop_b", "first_b = bias_b",
        SPLIT, "dbias"),
    Bug("bias of the next distance", TILES, "place = n - m + first", "place = n - m + first + 1", DISTANCES, "out"),
    Bug("a shifted diagonal", DIAGONALS, "start = zero +", "start = 1 + zero +", DISTANCES, "dbias"),
    Bug("a block of diagonals lost", DIAGONALS, "F.pad(below, (0, 0, 0, 1)) +", "0 *", DISTANCES, "dbias"),
    Bug("turned the other way", DIAGONALS, "(row + col) % BLOCK", "(BLOCK + col - row) % BLOCK", DISTANCES, "dbias"),
    Bug("no derivative of tanh in dq", ATTENTION_BACKWARD, "p *= slope", "p *= 1.0", DISTANCES, "dq"),
    Bug("no derivative of tanh in dk", ATTENTION_BACKWARD, "ds *= slope", "ds *= 1.0", DISTANCES, "dk"),
    Bug("no derivative of tanh in one tile", ONE_TILE, "ds *= slope", "ds *= 1.0", CAPPED, "dq"),
    Bug("tanh that cancels", "common.softcap", "< 0.5", "< 0.0", CAPPED.but(softcap=500.0), "out"),
]  # fmt: skip


def plant(bug: Bug, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module(f"fastattn.kernels.{bug.module}")
    text = Path(original.__file__).read_text()
    assert text.count(bug.right) == 1, f"{bug.module} has {bug.right!r} {text.count(bug.right)} times"
    file = folder / "planted.py"  # Triton reads a kernel's source from its file
    file.write_text(text.replace(bug.right, bug.wrong))
    spec = importlib.util.spec_from_file_location(f"{original.__name__}_planted", file)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    replaced = [(name, value) for name, value in vars(planted).items() if callable(value) or isinstance(value, dict)]
    new = {id(vars(original).get(name)): value for name, value in replaced}  # a dict: Launches
    for module in [m for name, m in sys.modules.items() if name.startswith("fastattn.kernels")]:
        for name, value in list(vars(module).items()):
            if new.get(id(value), value) is not value:
                monkeypatch.setattr(module, name, new[id(value)])


@pytest.fixture
def interpreted(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("only the interpreter looks up a kernel's functions when it is called")


def check(problem: Any, device: torch.device) -> None:
    if isinstance(problem, cases.Problem):
        checks.check(problem, "triton")
    else:
        attention.check(problem, attention.backend_call("triton", device))


@pytest.mark.parametrize("problem", list({id(bug.problem): bug.problem for bug in BUGS}.values()))
def test_without_a_bug(problem: Any, interpreted: None, device: torch.device) -> None:
    check(problem, device)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_is_caught(
    bug: Bug, interpreted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    plant(bug, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=f"^{bug.result}: error"):
        check(bug.problem, device)
