"""Models and comparisons that the model tests share."""

import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer
from torch.utils.checkpoint import CheckpointPolicy

from fastattn import FusedTransformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD_SRC, PAD_TRG, VOCAB = 1, 2, 40
SMALL = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=12, n_position=30)
NO_DROPOUT = dict(dropout=0.0, attn_dropout=0.0)


def fused(**changes):
    return FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def plain(**changes):
    return PlainTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def pair(**options):
    """A FusedTransformer and a PlainTransformer with the same weights, without dropout."""
    ours, theirs = fused(**NO_DROPOUT, **options), plain(**NO_DROPOUT, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def gold_of(trg):
    """The next token of each target token, and padding at the end."""
    return F.pad(trg[:, 1:], (0, 1), value=PAD_TRG)


class Doubled(torch.nn.Module):
    """A wrapper that doubles what a module returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return 2 * self.inner(*inputs)


def train_step(model, batch):
    """Logits, and each parameter's gradient of the cross entropy over real target tokens."""
    src, trg = batch
    logits = model(src, trg)
    F.cross_entropy(logits.float(), trg.roll(-1, 1).reshape(-1), ignore_index=PAD_TRG, reduction="sum").backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


TINY = dict(d_word_vec=16, d_model=16, d_inner=24, n_layers=1, n_head=2, d_k=8, d_v=12)


def keep_products(ctx, op, *args, **kwargs):
    """A policy of selective activation checkpointing."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def draw_own_seeds(layer, *args, **kwargs):
    """layer(..) with the dropout that it has under activation checkpointing: each call draws its own seeds."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return layer(*args, **kwargs)
