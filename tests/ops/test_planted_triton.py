"""The checks can fail, in the Triton kernels of norms, feed-forward and cross-entropy: bugs planted in their sources.

A bug is a text of a module of kernels/ and what stands in its place. The changed module is imported beside the right
one, and its functions take the place of the right one's wherever they are known.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import add_layer_norm_checks as norm
import embed_layer_norm_checks as embed
import feed_forward_checks as ffn
import linear_cross_entropy_checks as loss
import pytest
import torch

pytestmark = pytest.mark.full


class Bug(NamedTuple):
    name: str
    module: str
    right: str
    wrong: str
    problem: tuple[ModuleType, Any]  # and the checks that it is of
    result: str  # in which the bug must show


# Two programs, one of two turns.
TURNS = norm, norm.make(20, 130, 0.3, has_x_bias=True)
BY_STD = norm, norm.make(20, 130, eps_on_std=True)
RELU, GELU, SWIGLU = ((ffn, ffn.make(activation, 0.3)) for activation in ("relu", "gelu", "swiglu"))
LOSS = loss, loss.make(label_smoothing=0.1, logit_scale=0.7)
WORDS = embed, embed.make(dropout_p=0.3, scale=3.0)

FORWARD, BACKWARD, NORM = "add_layer_norm.forward", "add_layer_norm.backward", "common.norm"
EMBED, EMBED_BACKWARD = "embed_layer_norm.forward", "embed_layer_norm.backward"
HIDDEN, HIDDEN_BACKWARD = "feed_forward.forward", "feed_forward.backward"
ROWS = "linear_cross_entropy.rows"
BUGS = [
    Bug("x_bias's gradient of the last turn", BACKWARD, "dx_sum += grad", "dx_sum = grad", TURNS, "dx_bias"),
    Bug("columns outside the row counted", NORM,
        "tl.where(in_row[None, :], value - center[:, None], 0.0)", "value - center[:, None]", TURNS, "out"),
    Bug("no Bessel's correction", NORM, "squares / (hidden - 1)", "squares / hidden", BY_STD, "out"),
    Bug("the ratio of another row", BACKWARD, "TICKETS + row,", "TICKETS + row + 1,", BY_STD, "dx"),
    Bug("another row's mask", BACKWARD, "threshold, row, 0", "threshold, row + 1, 0", TURNS, "dx"),
    Bug("a program's sums left out", NORM, "(row < count)[:, None]", "(row + 1 < count)[:, None]", TURNS, "dweight"),
    Bug("the gate's bias for both", HIDDEN, "bias1 + d_inner + col", "bias1 + col", SWIGLU, "out"),
    Bug("the first half's mask for both", HIDDEN,
        "n * BLOCK_N + half * (BLOCK_N // 2), BLOCK_N // 2)", "n * BLOCK_N, BLOCK_N // 2)", GELU, "out"),
    Bug("relu's slope at 0", HIDDEN_BACKWARD, "tl.where(gate > 0,", "tl.where(gate >= 0,", RELU, "dx"),
    Bug("columns behind the classes counted", ROWS,
        "z_sum += tl.where(inside, z, 0.0)", "z_sum += z", LOSS, "loss"),
    Bug("the gradient of a sum", ROWS, "rate /= tl.load(count).to(tl.float32)", "rate /= 1", LOSS, "dx"),
    Bug("ignored rows keep their logits", ROWS, "for start in range(0, n_class", "for start in range(0, 0", LOSS, "dx"),
    Bug("positions never start anew", EMBED, "row % length", "row % n_position", WORDS, "out"),
    Bug("no dropout in the backward", EMBED_BACKWARD, "grad *= factor", "grad *= 1", WORDS, "dembedding"),
]  # fmt: skip


def plant(bug: Bug, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module(f"fastattn.kernels.{bug.module}")
    text = Path(original.__file__).read_text()
    assert text.count(bug.right) == 1, f"{bug.module} has {bug.right!r} {text.count(bug.right)} times"
    file = folder / "planted.py"  # Triton reads a kernel's source from where it lies
    file.write_text(text.replace(bug.right, bug.wrong))
    spec = importlib.util.spec_from_file_location(f"{original.__name__}_planted", file)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    new = {id(vars(original).get(name)): value for name, value in vars(planted).items() if callable(value)}
    for module in [m for name, m in sys.modules.items() if name.startswith("fastattn.kernels")]:
        for name, value in list(vars(module).items()):
            if new.get(id(value), value) is not value:
                monkeypatch.setattr(module, name, new[id(value)])


@pytest.fixture
def interpreted(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("only the interpreter looks up a kernel's functions when it is called")


@pytest.mark.parametrize("problem", [TURNS, RELU, GELU, SWIGLU, LOSS, WORDS])
def test_without_a_bug(problem: tuple[ModuleType, Any], interpreted: None, device: torch.device) -> None:
    checks, p = problem
    checks.check(p, checks.backend_call("triton", device))


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_is_caught(
    bug: Bug, interpreted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    checks, p = bug.problem
    call = checks.backend_call("triton", device)
    plant(bug, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=f"^{bug.result}: error"):
        checks.check(p, call)
