"""Embedding + positions + dropout + LayerNorm in every backend against float64, forward and backward."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from embed_layer_norm_checks import BACKENDS, EPS, Results, backend_call, check, make, plain, solve
from helpers import backends_of
from torch import Tensor

from fastattn import dropout_add_layer_norm, embed_layer_norm
from fastattn.ops import _checks

KERNELS = backends_of("embed_layer_norm", kernels_only=True)
op = importlib.import_module("fastattn.ops.embed_layer_norm")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

EVERYDAY: list[dict[str, Any]] = [
    {"dropout_p": 0.3, "scale": 6.0, "packed": True},
    {"batch": 40, "length": 3, "hidden": 7},
    {"batch": 1, "length": 2, "hidden": 1030, "dropout_p": 0.3},
    {"batch": 5, "hidden": 72, "dropout_p": 0.3, "scale": 6.0, "dtype": BF16},
    {"batch": 5, "hidden": 72, "dropout_p": 0.3, "scale": 6.0, "dtype": FP16, "table_dtype": FP32},
]
FULL: list[dict[str, Any]] = [
    {"batch": batch, "length": length, "hidden": hidden, "dropout_p": p, "scale": scale, "packed": packed}
    for batch, length, hidden in ((3, 7, 48), (2, 5, 513), (40, 3, 7), (1, 2, 1030))
    for p, scale, packed in ((0.0, 1.0, True), (0.3, 6.0, False))
]
FULL += [{"batch": 5, "hidden": 72, "dropout_p": 0.3, "dtype": d, "weight_dtype": FP32} for d in (BF16, FP16)]


@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: str, case: dict[str, Any], device: torch.device) -> None:
    p = make(**case, device=device)
    got = check(p, backend_call(backend, device))
    assert (got.dembedding.dtype, got.dweight.dtype) == (p.embedding.dtype, p.weight.dtype)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, dropout_p: float, device: torch.device) -> None:
    p = make(2, 3, 5, dropout_p, scale=3.0, packed=True, dtype=torch.float64, device=device)
    call = backend_call(backend, device)
    for name, actual, truth in zip(Results._fields, solve(p, call), plain(p, torch.float64), strict=True):
        torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, msg=name)

    def with_one_draw(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(p.seed)
        options = {"eps": EPS, "dropout_p": dropout_p, "scale": 3.0, "position": p.position}
        return call(p.tokens, embedding, p.table, weight, bias, **options)

    assert torch.autograd.gradcheck(with_one_draw, [t.requires_grad_() for t in (p.embedding, p.weight, p.bias)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_takes_the_place_of_separate_operators(backend: str, device: torch.device) -> None:
    """The dropout bits of dropout_add_layer_norm under the same seed; results but for the rounding of a sum."""
    p, call = make(4, 6, 40, 0.4, scale=6.0, device=device), backend_call(backend, device)

    def apart(tokens, embedding, table, weight, bias, *, eps, dropout_p, scale, position, padding_idx):
        words = F.embedding(tokens, embedding, padding_idx) * scale + table[: tokens.shape[1]]
        return dropout_add_layer_norm(words, None, weight, bias, eps=eps, dropout_p=dropout_p, backend=backend)

    for name, a, b in zip(Results._fields, solve(p, call), solve(p, apart), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gets_no_gradient(backend: str, device: torch.device) -> None:
    p, call = make(padding_idx=4, device=device), backend_call(backend, device)
    assert (p.tokens == 4).any()
    padded, all_of_it = solve(p, call), solve(p.but(padding_idx=None), call)
    assert not padded.dembedding[4].any()
    assert all_of_it.dembedding[4].any()
    torch.testing.assert_close(padded.dembedding[:4], all_of_it.dembedding[:4])
    assert torch.equal(solve(p.but(padding_idx=4 - len(p.embedding)), call).dembedding, padded.dembedding)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_strides_and_integers(backend: str, device: torch.device) -> None:
    """Any leading dimensions, transposed tokens and 32-bit integers give the bits of plain ones."""
    p, call = make(4, 6, 40, packed=True, device=device), backend_call(backend, device)
    rest = (p.embedding, p.table, p.weight, p.bias)
    want = call(p.tokens, *rest, position=p.position)
    assert torch.equal(call(p.tokens.t().contiguous().t(), *rest, position=p.position.int()), want)
    assert torch.equal(
        call(p.tokens.int().view(2, 2, 6), *rest, position=p.position.view(2, 2, 6)).view(4, 6, 40), want
    )
    alone = [call(row, *rest) for row in p.tokens]  # (L,): each from position 0 on
    assert torch.equal(torch.stack(alone), call(p.tokens, *rest))
    wide = p.but(embedding=p.embedding.repeat(1, 2)[:, :40], table=p.table.t().contiguous().t())
    assert torch.equal(solve(wide, call).dembedding, solve(p, call).dembedding)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_dropped(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    p = make(dropout_p=1.0, dtype=dtype, device=device)
    got = solve(p, backend_call(backend, device))
    assert torch.equal(got.out, p.bias.expand_as(got.out))
    assert not got.dembedding.any() and not got.dweight.any()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, shape: tuple[int, int], dropout_p: float, device: torch.device) -> None:
    p = make(device=device)
    p = p.but(tokens=p.tokens.new_zeros(shape), dout=p.dout.new_zeros(*shape, 48), dropout_p=dropout_p)
    got = solve(p, backend_call(backend, device))
    assert got.out.shape == (*shape, 48)
    assert not any(grad.any() for grad in got[1:])
    leaves = [t.detach().requires_grad_() for t in (p.embedding, p.weight, p.bias)]
    out = embed_layer_norm(p.tokens, leaves[0], p.table, *leaves[1:], dropout_p=dropout_p, backend=backend)
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
    p, call = make(3, 7, 40, dropout_p, packed=True, padding_idx=None, device=device), backend_call(backend, device)
    tokens, position, bad = p.tokens.clone(), p.position.clone(), torch.zeros(3, 7, dtype=torch.bool, device=device)
    tokens[0, 2], tokens[1, 5], position[2, 0], position[2, 1] = -1, 2**62, 12, -(2**62)
    bad[0, 2] = bad[1, 5] = bad[2, 0] = bad[2, 1] = True
    got, want = solve(p.but(tokens=tokens, position=position), call), solve(p, call)
    assert got.out[bad].isnan().all()
    assert torch.equal(got.out[~bad], want.out[~bad])
    assert got.dembedding[0].isnan().all()  # a token out of range learns as the first one does, which shows it


def test_tokens_out_of_range_raise_on_a_cpu() -> None:
    p = make()
    for shift, message in ((20, "tokens has the value"), (-20, "tokens has the value -")):
        with pytest.raises(ValueError, match=message):
            embed_layer_norm(p.tokens + shift, p.embedding, p.table, p.weight, p.bias)
    position = torch.full_like(p.tokens, len(p.table))
    with pytest.raises(ValueError, match=f"position has the value {len(p.table)}"):
        embed_layer_norm(p.tokens, p.embedding, p.table, p.weight, p.bias, position=position)


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


@pytest.mark.full
def test_triton_weight_gradients_of_many_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = backend_call("triton", device)
    monkeypatch.setattr(importlib.import_module("fastattn.kernels.common.norm"), "multiprocessors", lambda x: 9)
    check(make(20, 8, 264, device=device), call)
    check(make(8, 4, 1030, device=device), call)
