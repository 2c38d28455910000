"""What is special about embedding + positions + dropout + LayerNorm, in every backend."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import skip_without, solve
from helpers import backends_of
from layouts import zeros

from fastattn import dropout_add_layer_norm
from fastattn.check import cases
from fastattn.ops import _checks

EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("embed_layer_norm"))
KERNELS = backends_of("embed_layer_norm", kernels_only=True)
op = importlib.import_module("fastattn.ops.embed_layer_norm")


@EVERY_BACKEND
def test_it_takes_the_place_of_separate_operators(backend: str, device: torch.device) -> None:
    """The dropout bits of dropout_add_layer_norm under the same seed; results but for the rounding of a sum."""

    def apart(tokens, embedding, position_table, weight, bias, *, dropout_p, scale, padding_idx):
        words = F.embedding(tokens, embedding, padding_idx) * scale + position_table[: tokens.shape[1]]
        return dropout_add_layer_norm(words, None, weight, bias, dropout_p=dropout_p, backend=backend)

    sizes = {"batch": 4, "length": 6, "hidden": 40, "dropout_p": 0.4, "scale": 6.0, "padding_idx": 2}
    p = cases.embed_layer_norm(**sizes, device=device)
    torch.testing.assert_close(solve(p, backend), cases.solve(p, apart), rtol=2e-6, atol=2e-5)


@pytest.mark.bug_class("T9")
@EVERY_BACKEND
def test_padding_gets_no_gradient(backend: str, device: torch.device) -> None:
    p = cases.embed_layer_norm(padding_idx=4, device=device)
    assert (p.options["tokens"] == 4).any()
    counted_back = 4 - len(p.tensors["embedding"])
    padded, all_of_it, same = (
        solve(p.but(padding_idx=index), backend)["grad of embedding"] for index in (4, None, counted_back)
    )
    assert not padded[4].any()
    assert all_of_it[4].any()
    torch.testing.assert_close(padded[:4], all_of_it[:4])
    assert torch.equal(same, padded)


@EVERY_BACKEND
def test_shapes_strides_and_integers(backend: str, device: torch.device) -> None:
    """Any leading dimensions, transposed tokens and 32-bit integers give the bits of plain ones."""
    p = cases.embed_layer_norm(batch=4, length=6, hidden=40, positions=True, device=device)
    tokens, table, position = (p.options[name] for name in ("tokens", "position_table", "position"))
    want = solve(p, backend)

    def out(**changes: Any) -> torch.Tensor:
        return solve(p.but(**changes), backend)["out"]

    assert torch.equal(out(tokens=tokens.t().contiguous().t(), position=position.int()), want["out"])
    shape = 2, 2, 6
    assert torch.equal(out(tokens=tokens.int().view(shape), position=position.view(shape)).view(4, 6, 40), want["out"])
    alone = [out(tokens=row, position=None) for row in tokens]  # (L,): each from position 0 on
    assert torch.equal(torch.stack(alone), out(position=None))
    wide = p.but(embedding=p.tensors["embedding"].repeat(1, 2)[:, :40], position_table=table.t().contiguous().t())
    assert torch.equal(solve(wide, backend)["grad of embedding"], want["grad of embedding"])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@EVERY_BACKEND
def test_second_derivatives_without_tokens(
    backend: str, shape: tuple[int, int], dropout_p: float, device: torch.device
) -> None:
    skip_without(backend, "embed_layer_norm", device)
    p = cases.embed_layer_norm(batch=shape[0], length=shape[1], dropout_p=dropout_p, device=device)
    leaves = [t.requires_grad_() for t in p.tensors.values()]
    out = p.function(**p.arguments(), backend=backend)
    grads = torch.autograd.grad(out, leaves, torch.zeros_like(out, requires_grad=True), create_graph=True)
    twice = torch.autograd.grad(sum(grad.sum() for grad in grads), leaves, allow_unused=True, materialize_grads=True)
    assert not any(grad.any() for grad in twice)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("backend", KERNELS)
def test_indices_out_of_range_make_their_row_nan(
    backend: str, dropout_p: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing outside of the embedding and the table is read or written; all other rows keep their bits."""
    monkeypatch.setattr(_checks, "check_range", lambda *_: None)  # a GPU's values are not looked at
    p = cases.embed_layer_norm(hidden=40, dropout_p=dropout_p, positions=True, device=device)
    tokens, position = p.options["tokens"].clone(), p.options["position"].clone()
    bad = torch.zeros(3, 7, dtype=torch.bool, device=device)
    tokens[0, 2], tokens[1, 5], position[2, 0], position[2, 1] = -1, 2**62, 12, -(2**62)
    bad[0, 2] = bad[1, 5] = bad[2, 0] = bad[2, 1] = True
    got, want = solve(p.but(tokens=tokens, position=position), backend), solve(p, backend)
    assert got["out"][bad].isnan().all()
    assert torch.equal(got["out"][~bad], want["out"][~bad])
    assert got["grad of embedding"][0].isnan().all()  # a token out of range learns as the first one does, and shows it


class OnGpu:
    is_cuda = True


def test_rows_are_added_in_torchs_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whatever mode is in force; which is in force again afterwards."""

    def mode() -> int:
        return torch.get_deterministic_debug_mode()

    inside = []
    monkeypatch.setattr(torch.ops.aten, "embedding_dense_backward", lambda *_: inside.append(mode()))
    try:
        for before, expected in ((0, 1), (2, 2)):
            torch.set_deterministic_debug_mode(before)
            op._sum_by_token(OnGpu(), None, torch.zeros(3, 2), None)
            assert inside.pop() == expected and mode() == before
    finally:
        torch.set_deterministic_debug_mode(0)


def test_one_thread_at_a_time_is_in_torchs_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for the process: who leaves it first would end it for the others."""
    modes, inside = [], []

    def add_rows(*arguments: Any) -> None:
        inside.append(None)
        modes.append((torch.get_deterministic_debug_mode(), len(inside)))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr(torch.ops.aten, "embedding_dense_backward", add_rows)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: op._sum_by_token(OnGpu(), None, torch.zeros(3, 2), None), range(4)))
    assert modes == [(1, 1)] * 4 and torch.get_deterministic_debug_mode() == 0


@pytest.mark.bug_class("T1")
@EVERY_BACKEND
def test_an_embedding_of_2_31_elements(backend: str, device: torch.device) -> None:
    skip_without(backend, "embed_layer_norm", device)
    p = cases.embed_layer_norm(hidden=16384, dtype=torch.bfloat16, device=device)
    far = zeros(torch.bfloat16, device, 2**17 + 1, 16384)
    far[-1] = p.tensors["embedding"][3]
    rows = []
    for embedding, token in ((p.tensors["embedding"], 3), (far, 2**17)):
        one = p.but(embedding=embedding, tokens=torch.tensor([[token]], device=device))
        rows.append(one.function(**one.arguments(), backend=backend))
    assert torch.equal(*rows)
