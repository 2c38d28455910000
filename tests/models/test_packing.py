"""Packing: when padding is dropped, that only real tokens are computed then, and batches of rounded sizes. Equal
results are in test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_twins import Calls, small
from model_checks import (
    DEVICE,
    NO_DROPOUT,
    PAD_SRC,
    PAD_TRG,
    TINY,
    VOCAB,
    Batch,
    batch,
    check_gradients,
    fused,
    gold_of,
    gradients,
    request_backend,
    rows,
    tokens,
)
from recorded_graph import recorded_calls  # noqa: F401
from torch import Tensor, nn

from fastattn import FusedTransformer, use_backend
from fastattn.models import pad, unpad
from fastattn.models.padding import KEEP_PADDING, PackedBatch, Packing, Unpadded, choose_packing


def test_only_real_tokens_are_computed() -> None:
    """Logits of padding are 0."""
    model, computed, (src, trg) = fused(pack_padding=True, **NO_DROPOUT), set(), tokens()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, out: computed.add(out.shape[:2].numel()))
    logits = model(src, trg)
    assert computed == {int((src != PAD_SRC).sum()), int((trg != PAD_TRG).sum())}
    assert not logits[trg.flatten() == PAD_TRG].any() and logits[trg.flatten() != PAD_TRG].all(1).all()


@pytest.mark.parametrize("tokens_on", ["meta", "cpu"])
def test_a_gpu_is_waited_for_once_or_never(tokens_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device is the GPU here: it has no values, so nonzero(), item() and the like raise. tolist()
    is counted."""
    src, trg = (t.cpu() for t in tokens())
    counts = [int((src != PAD_SRC).sum()), int((trg != PAD_TRG).sum())]
    reads, pinned = [], []
    model = fused(**TINY, pack_padding=True, backend="reference").to("meta")
    src, trg = src.to(tokens_on), trg.to(tokens_on)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or counts)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t.clone()) or pinned[-1])
    model.loss(src, trg, trg).backward()
    assert model(src, trg).shape == (trg.numel(), VOCAB)
    pinned.clear()
    rounded, _ = PackedBatch.of(model, src, trg, trg, True)
    assert rounded.numbers.device.type == "meta" and len(pinned) == (tokens_on == "cpu")  # one copy
    assert reads == ([(2,)] * 3 if tokens_on == "meta" else [])


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 3), (0, 4, 2), (2, 0, 2)])
def test_unpad_and_pad(shape: tuple[int, ...]) -> None:
    """They gather and scatter, in order, and so do their gradients; padding is anywhere. As on a GPU, where the number
    of tokens is read first, too."""
    x, real = torch.randn(shape, device=DEVICE, requires_grad=True), torch.rand(shape[:2], device=DEVICE) < 0.5
    row, unpadded = unpad(x, real)
    assert torch.equal(row[0], x[real]) and torch.equal(unpadded.position[0], real.nonzero()[:, 1])
    assert unpadded.cu_seqlens.tolist() == [int(real[:b].sum()) for b in range(len(real) + 1)]
    back, kept = pad(row, unpadded), real.view(*real.shape, *[1] * (x.dim() - 2)).expand(shape)
    assert torch.equal(back, x.where(kept, 0))
    (dx,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(dx, kept.float())
    known = Unpadded(real, real, unpadded.cu_seqlens, int(real.sum()), real.device)
    assert all(torch.equal(getattr(known, name), getattr(unpadded, name)) for name in ("index", "position"))


def sentences(src_lengths: list[int], trg_lengths: list[int]) -> Batch:
    """src, trg and gold, padded; sentences of these lengths, which may be 0."""
    generator, made = torch.Generator().manual_seed(0), []
    for lengths, pad_idx in ((src_lengths, PAD_SRC), (trg_lengths, PAD_TRG)):
        seq = torch.randint(3, VOCAB, (len(lengths), max(lengths, default=2)), generator=generator)
        made.append(seq.where(torch.arange(seq.shape[1]) < torch.tensor(lengths)[:, None], pad_idx).to(DEVICE))
    return made[0], made[1], gold_of(made[1])


@pytest.mark.parametrize(
    ("padding", "backend", "expected"),
    [((0, 0, 5, 5), None, True), ((0, 0, 5, 5), "aten", True), ((0, 0, 5, 4), None, False)]
    + [((0, 0, 9, 9), name, False) for name in ("reference", "triton")],
)
def test_packing_is_automatic_where_it_pays(padding: tuple[int, ...], backend: Any, expected: bool) -> None:
    """And where nothing sees it: neither a hook nor a target that is learned from padding."""
    lengths = [10 - count for count in padding] * 60  # in small batches padding is kept
    src, trg, gold = sentences(lengths, lengths)
    expected = expected and DEVICE == "cpu"
    model = fused(backend=backend)
    assert choose_packing(model, src, trg, gold) == Packing(expected, expected)
    assert choose_packing(model, src) == Packing(expected, False)
    with use_backend(backend):
        assert choose_packing(fused(), src, trg, gold) == Packing(expected, expected)
    assert choose_packing(fused(backend=backend, pack_padding=False), src, trg, gold) == KEEP_PADDING
    assert choose_packing(model, src[:4], trg[:4], gold[:4]) == choose_packing(model, src[:4]) == KEEP_PADDING
    gold[3, 9] = 5
    assert choose_packing(model, src, trg, gold) == Packing(expected, False)
    model.encoder.layer_stack[0].register_forward_hook(lambda *_: None)
    assert choose_packing(model, src, trg, gold_of(trg)) == KEEP_PADDING


# Rounded sizes.


BATCHES = {
    "odd": ([5, 12, 1, 9], [7, 2, 11, 4]),
    "nothing to learn": ([4, 0], [1, 0]),
    "no sentence": ([], []),
    "empty rows": ([0, 6, 3, 0, 0], [4, 0, 6, 0, 5]),
    "a tile to add": ([29] * 18 + [1] * 4, [20, 29] * 11),
}


def loss_and_gradients(model: FusedTransformer, given: Batch, how: str, *options: Any) -> tuple[Tensor, dict[str, Any]]:
    """By the padded batch, by exact sizes, or by rounded ones. options: label_smoothing, smooth_over, reduction."""
    model.zero_grad()
    if how == "padded":
        loss = model.loss(*given, options[0], smooth_over=options[1], reduction=options[2])
    else:
        loss = model.packed_loss(PackedBatch.of(model, *given, how == "rounded")[0], *options)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(
    ("backend", "name"),
    rows(
        [("reference", "empty rows"), ("reference", "odd"), *(("aten", name) for name in BATCHES)],
        [(backend, name) for backend in ("reference", "triton", "cuda") for name in BATCHES],
    ),
)
def test_rounded_sizes_change_nothing(backend: str, name: str, request: pytest.FixtureRequest) -> None:
    """Loss and gradients of padded, exact and rounded batches. Memory that no kernel writes is NaN (conftest)."""
    request_backend(request, backend)
    given, model = sentences(*BATCHES[name]), fused(**TINY | {"n_head": 1}, **NO_DROPOUT, pack_padding=False)
    for options in ((0.0, "all", "sum"), (0.1, "others", "mean"))[backend in ("triton", "cuda") :]:
        expected, grads = loss_and_gradients(model, given, "padded", *options)
        for how in ("exact", "rounded"):
            with use_backend(backend):
                loss, found = loss_and_gradients(model, given, how, *options)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, equal_nan=True)
            if name not in ("nothing to learn", "no sentence"):
                check_gradients(found, grads, 1e-5)
            else:
                assert loss.isnan() if "mean" in options else not any(g.any() for g in (loss, *found.values()))


@pytest.mark.usefixtures("recorded_calls")
def test_packed_batches_have_graphs() -> None:
    """graphs=True with pack_padding=True: the loss of other batches replays. Logits and no_grad are eager."""
    twins = Calls(model=small(pack_padding=True, backend="reference")).capture()
    twins.check(4, 5, 9, 3)
    twins.check(5, 2, 3, 9)
    src, trg, gold = batch(6)
    twins.model(src, trg)
    with torch.no_grad():
        assert torch.equal(twins.model.loss(src, trg, gold), twins.plain.loss(src, trg, gold))
    assert twins.stats[:2] == (3, 1)
    assert twins.stats.eager == {"a new shape": 2, "no gradient is recorded": 1}
