"""Models and comparisons that the model tests share."""

import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer

from fastattn import FusedTransformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD_SRC, PAD_TRG, VOCAB = 1, 2, 40
SMALL = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=12, n_position=30)
NO_DROPOUT = dict(dropout=0.0, attn_dropout=0.0)


def fused(**changes):
    return FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def plain(**changes):
    return PlainTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def train_step(model, batch):
    """Logits, and each parameter's gradient of the cross entropy over real target tokens."""
    src, trg = batch
    logits = model(src, trg)
    F.cross_entropy(logits.float(), trg.roll(-1, 1).reshape(-1), ignore_index=PAD_TRG, reduction="sum").backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] - want).norm() / want.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


TINY = dict(d_word_vec=16, d_model=16, d_inner=24, n_layers=1, n_head=2, d_k=8, d_v=12)


def drawing_by_itself(layer, *args, **kwargs):
    """layer(..) with the dropout that it has under activation checkpointing: its seeds are drawn where it is called."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return layer(*args, **kwargs)
