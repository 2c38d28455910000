"""The models that are measured whole, with equal weights: fastattn's, and what a user of PyTorch would use instead.

The rivals are the public architecture as in tests/models/plain_transformer.py, the same with torch's attention inside,
and torch.nn's Transformer layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import ModelCase
from harness import Inputs
from torch import Tensor, nn

from fastattn.models import FusedTransformer

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS / "models"), str(TESTS / "generate")]  # generate: bench_decoding imports plain_search
import plain_transformer  # noqa: E402

PAD = 0
SMOOTHING = 0.1  # of labels, as in the paper
Build = Callable[[ModelCase, float, int], nn.Module]
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # of a model, (B, Ls) src_seq, (B, Lt) trg_seq and gold


def make_inputs(case: ModelCase, device: torch.device, longest: int) -> Inputs:
    """leaves: the initial weights of all models; fixed: src_seq (batch, length), trg_seq (batch, length + 1)."""
    torch.manual_seed(harness.SEED)
    model = fused(case, 0.0, longest).to(device)
    generator = harness.seeded("cpu")

    def draw(length: int, lengths: torch.Tensor) -> torch.Tensor:
        words = torch.randint(1, case.n_vocab, (case.batch, length), generator=generator)
        return words.where(torch.arange(length) < lengths[:, None], PAD).to(device)

    src_lengths, trg_lengths = case.lengths
    fixed = {"src_seq": draw(case.length, src_lengths), "trg_seq": draw(case.length + 1, trg_lengths + 1)}
    return Inputs(dict(model.state_dict()), fixed)


def _arguments(case: ModelCase, dropout_p: float, longest: int) -> dict[str, Any]:
    d_model, head_dim = case.d_model, case.d_model // case.n_head
    sizes = {"d_word_vec": d_model, "d_model": d_model, "d_inner": case.d_inner, "d_k": head_dim, "d_v": head_dim}
    counts = {"n_src_vocab": case.n_vocab, "n_trg_vocab": case.n_vocab, "n_layers": case.n_layers}
    counts |= {"n_head": case.n_head, "n_position": longest}
    return sizes | counts | {"src_pad_idx": PAD, "trg_pad_idx": PAD, "dropout": dropout_p, "attn_dropout": dropout_p}


def fused(case: ModelCase, dropout_p: float, longest: int, pack_padding: bool | None = None) -> nn.Module:
    """pack_padding: True always drops the padding, False always computes it, None is what users get."""
    return FusedTransformer(**_arguments(case, dropout_p, longest), pack_padding=pack_padding)


padded, packed = partial(fused, pack_padding=False), partial(fused, pack_padding=True)


def plain(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    """The public model as it is."""
    return plain_transformer.PlainTransformer(**_arguments(case, dropout_p, longest))


def plain_sdpa(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    """The public model with torch's scaled_dot_product_attention inside."""

    class SdpaAttention(plain_transformer.Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, None]:
            heads = self.heads(self.w_qs(q)), self.heads(self.w_ks(k)), self.heads(self.w_vs(v))
            dropout = self.attn_dropout.p if self.training else 0.0
            out = F.scaled_dot_product_attention(*heads, attn_mask=mask.unsqueeze(1), dropout_p=dropout)
            out = self.dropout(self.fc(out.transpose(1, 2).flatten(2)))
            return self.layer_norm(out + q), None

    model = plain(case, dropout_p, longest)
    for module in model.modules():
        if type(module) is plain_transformer.Attention:
            module.__class__ = SdpaAttention
    return model


class TorchTransformer(nn.Module):
    """torch.nn's encoder and decoder layers between the public model's embedding and projection. Its layers have
    biases, the public model's have none, so its weights are its own."""

    def __init__(self, case: ModelCase, dropout_p: float, longest: int) -> None:
        super().__init__()
        d, n = case.d_model, case.n_layers
        options = {"dropout": dropout_p, "layer_norm_eps": 1e-6, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(d, case.n_head, case.d_inner, **options)
        decoder = nn.TransformerDecoderLayer(d, case.n_head, case.d_inner, **options)
        self.embedding, self.dropout = nn.Embedding(case.n_vocab, d, PAD), nn.Dropout(dropout_p)
        self.register_buffer("position", torch.randn(1, longest, d) * d**-0.5)
        self.encoder = nn.TransformerEncoder(encoder, n, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, n)
        self.source_norm, self.target_norm = (nn.LayerNorm(d, eps=1e-6) for _ in range(2))

    def forward(self, src_seq: Tensor, trg_seq: Tensor) -> Tensor:
        causal = torch.ones(trg_seq.shape[1], trg_seq.shape[1], dtype=torch.bool, device=trg_seq.device).triu(1)
        padding = src_seq == PAD
        memory = self.encoder(self._enter(src_seq, self.source_norm), src_key_padding_mask=padding)
        out = self.decoder(
            self._enter(trg_seq, self.target_norm), memory, causal, None, trg_seq == PAD, padding, tgt_is_causal=True
        )
        return (F.linear(out, self.embedding.weight) * out.shape[-1] ** -0.5).flatten(0, 1)

    def _enter(self, tokens: Tensor, norm: nn.Module) -> Tensor:
        return norm(self.dropout(self.embedding(tokens) + self.position[:, : tokens.shape[1]]))


def plain_loss(model: nn.Module, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
    """The loss as a user of plain PyTorch computes it."""
    logits = model(src_seq, trg_seq)
    return F.cross_entropy(logits, gold.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)


def fused_loss(model: nn.Module, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
    """The loss as a user of FusedTransformer computes it."""
    return model.loss(src_seq, trg_seq, gold, label_smoothing=SMOOTHING)
