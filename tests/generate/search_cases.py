"""The model and the sources that the tests of decoding share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import FusedTransformer

PAD, BOS, EOS, VOCAB = 0, 1, 2, 11


def make_model(**variant: Any) -> FusedTransformer:
    """Random weights, large enough for the next token to depend on all before, for beams to differ and to end."""
    torch.manual_seed(7)
    sizes = dict(d_word_vec=32, d_model=32, d_inner=48, n_layers=2, n_head=4, d_k=8, d_v=8, n_position=40)
    shared = dict(trg_emb_prj_weight_sharing=False, emb_src_trg_weight_sharing=False)
    model = FusedTransformer(VOCAB, VOCAB, PAD, PAD, **sizes, **(shared | variant))
    with torch.no_grad():
        model.decoder.trg_word_emb.weight.normal_(std=0.7)
        model.trg_word_prj.weight.normal_(std=1.7 if model.scale_prj else 0.5)
        model.trg_word_prj.weight[EOS] *= 1.5
    return model.eval()


def make_source(batch: int = 5, length: int = 9) -> Tensor:
    """Sentences of different lengths: padded at the end, one sentence also before and between."""
    src_seq = torch.randint(3, VOCAB, (batch, length))
    for i in range(1, batch):
        src_seq[i, length - i :] = PAD
    src_seq[(src_seq == PAD).all(1), 0] = 3
    src_seq[1, :2] = PAD
    src_seq[1, 4] = PAD
    return src_seq
