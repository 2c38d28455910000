"""The whole model by the CUDA kernels alone: on the CPU through csrc/host, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import PAD_TRG, TINY, assert_same_gradients, fused

from fastattn import _dispatch, use_backend

OPS = {"attention", "add_layer_norm", "embed_layer_norm", "feed_forward", "linear_cross_entropy"}


def solve(model, batch, backend):
    """Loss and the gradient of each parameter; dropout draws the same in every backend."""
    src, trg = batch
    model.zero_grad()
    torch.manual_seed(5)
    with use_backend(backend):
        loss = model.loss(src, trg, F.pad(trg[:, 1:], (0, 1), value=PAD_TRG), 0.1)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("pack_padding", [False, True], ids=["padded", "packed"])
def test_forward_loss_and_backward(pack_padding, cuda_backends, batch, monkeypatch):
    """Every op of the model is served by its CUDA backend, and logits, loss and gradients are those of the reference."""
    served, choose = set(), _dispatch.choose

    def noted(op, *arguments):
        name, backend = choose(op, *arguments)
        served.add((op, name))
        return name, backend

    monkeypatch.setattr(_dispatch, "choose", noted)
    model = fused(**TINY, dropout=0.2, attn_dropout=0.2, pack_padding=pack_padding)
    loss, gradients = solve(model, batch, "cuda")
    assert served == {(op, "cuda") for op in OPS}
    want, want_gradients = solve(model, batch, "reference")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    assert_same_gradients(gradients, want_gradients, 1e-3)
    logits = []
    for backend in ("cuda", "reference"):
        with torch.no_grad(), use_backend(backend):
            logits.append(model.eval()(*batch))
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5)
