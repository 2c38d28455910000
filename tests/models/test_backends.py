"""The whole model in every backend against the reference path: packing, dropout, autocast, and loss or logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from model_checks import DEVICE, PAD_TRG, TINY, assert_same_gradients, fused, gold_of

from fastattn import backends, use_backend
from fastattn.backends.reference.philox import reference_dropout_rule
from fastattn.models.padding import PackedBatch

VARIANTS = {"public": dict(activation="relu"), "beyond": dict(norm_first=True, n_head_kv=1, activation="swiglu")}
EVERYDAY = [("public", False, False, True), ("beyond", True, True, False), ("public", "rounded", True, True)]
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in EVERYDAY else pytest.mark.full)
    for case in itertools.product(VARIANTS, (False, True, "rounded"), (False, True), (False, True))
    if case[1] != "rounded" or case[3]
]


def gradients(model, batch, backend, autocast, by_loss, seed=5, rounded=False):
    """The gradient of each parameter. An equal seed draws equal dropout in every backend."""
    src, trg = batch
    gold = gold_of(trg)
    model.zero_grad()
    torch.manual_seed(seed)
    with use_backend(backend), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        if rounded:
            loss = model.packed_loss(PackedBatch.of(model, src, trg, gold, True)[0], 0.1, "all", "sum")
        elif by_loss:
            loss = model.loss(src, trg, gold, 0.1, reduction="sum")
        else:
            options = dict(ignore_index=PAD_TRG, label_smoothing=0.1, reduction="sum")
            loss = F.cross_entropy(model(src, trg).float(), gold.flatten(), **options)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.few(4)
@pytest.mark.parametrize(("variant", "pack_padding", "autocast", "by_loss"), CASES)
@pytest.mark.parametrize("backend", ["aten", "triton", "cuda"])
def test_gradients_are_those_of_the_reference(
    backend, variant, pack_padding, autocast, by_loss, batch, request, monkeypatch
):
    """By the loss with dropout, by the logits without. The backend is used for every op that has such a kernel."""
    if backend != "aten":
        request.getfixturevalue(backend)
    if backend == "cuda" and by_loss:  # there is no CUDA kernel of the loss
        request.getfixturevalue("triton")
    used, choose = set(), backends.choose

    def choose_and_note(op, *arguments):
        chosen = choose(op, *arguments)
        used.add((op, chosen.name))
        return chosen

    options = dict.fromkeys(("dropout", "attn_dropout"), 0.2 if by_loss else 0.0) | VARIANTS[variant]
    if backend == "aten" and (pack_padding or DEVICE == "cuda"):
        # It computes each packed sequence alone, or drops inside PyTorch's kernel: other weights than in the formula.
        options["attn_dropout"] = 0.0
    if autocast and variant == "public":
        # In 16 bits a relu near 0 may be on in one backend and off in another. With so few weights that is a large
        # difference. gelu has no kink.
        options["activation"] = "gelu"
    model, packing = fused(**TINY, pack_padding=bool(pack_padding), **options), {"rounded": pack_padding == "rounded"}
    with monkeypatch.context() as patch:
        patch.setattr(backends, "choose", choose_and_note)
        actual = gradients(model, batch, backend, autocast, by_loss, **packing)
    ops = {"attention", "add_layer_norm", "feed_forward"}
    losses = {("linear_cross_entropy", "triton" if backend == "cuda" else backend)} if by_loss else set()
    assert used == {(op, backend) for op in ops} | losses
    with reference_dropout_rule(backend):
        exact = gradients(model, batch, "reference", False, by_loss, **packing)
        low = gradients(model, batch, "reference", True, by_loss, **packing)
    if not autocast:
        assert_same_gradients(actual, exact, 1e-3)
        return
    error, allowed = (sum((g[n] - exact[n]).square().sum() for n in exact).sqrt() for g in (actual, low))
    assert error <= 1.5 * allowed, f"error {error:.2e}, of the reference under autocast {allowed:.2e}"


def test_the_comparison_notices_another_dropout(batch):
    model = fused(**TINY, dropout=0.2)
    with reference_dropout_rule("aten"):
        exact = gradients(model, batch, "reference", False, True)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(model, batch, "aten", False, True, seed=6), exact, 1e-3)
