"""The models that are measured whole, with equal weights: fastattn's, and what a user of PyTorch would have instead.

Those are the public architecture as in tests/models/plain_transformer.py, the same with torch's attention inside, and
torch.nn's Transformer layers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import torch
import torch.nn.functional as F
from cases import ModelCase
from harness import Inputs, Refused
from torch import Tensor, nn

from fastattn import backends
from fastattn.models import FusedTransformer

PAD = 0
SMOOTHING = 0.1  # of labels, as in the paper
Build = Callable[[ModelCase, float, int], nn.Module]
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # of a model, (B, Ls) src_seq, (B, Lt) trg_seq and gold


def make_inputs(case: ModelCase, device: torch.device, longest: int) -> Inputs:
    """leaves: the weights all models start from; fixed: src_seq (batch, length), trg_seq (batch, length + 1)."""
    torch.manual_seed(harness.SEED)
    model = fused(case, 0.0, longest).to(device)
    generator = torch.Generator().manual_seed(harness.SEED)

    def draw(length: int, lengths: torch.Tensor) -> torch.Tensor:
        words = torch.randint(1, case.n_vocab, (case.batch, length), generator=generator)
        return words.where(torch.arange(length) < lengths[:, None], PAD).to(device)

    src_lengths, trg_lengths = case.lengths
    fixed = {"src_seq": draw(case.length, src_lengths), "trg_seq": draw(case.length + 1, trg_lengths + 1)}
    return Inputs(dict(model.state_dict()), fixed)


def _arguments(case: ModelCase, dropout_p: float, longest: int) -> dict[str, Any]:
    width = case.d_model // case.n_head
    return {
        "n_src_vocab": case.n_vocab, "n_trg_vocab": case.n_vocab, "src_pad_idx": PAD, "trg_pad_idx": PAD,
        "d_word_vec": case.d_model, "d_model": case.d_model, "d_inner": case.d_inner, "n_layers": case.n_layers,
        "n_head": case.n_head, "d_k": width, "d_v": width, "n_position": longest,
        "dropout": dropout_p, "attn_dropout": dropout_p,
    }  # fmt: skip


def fused(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    return FusedTransformer(**_arguments(case, dropout_p, longest))


def padded(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    """The same, with padding in all its work, also where it would drop it by itself."""
    return FusedTransformer(**_arguments(case, dropout_p, longest), pack_padding=False)


def packed(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    """The same, working on real tokens only."""
    return FusedTransformer(**_arguments(case, dropout_p, longest), pack_padding=True)


def plain(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    """The public model as it is."""
    return _plain_module().PlainTransformer(**_arguments(case, dropout_p, longest))


def plain_sdpa(case: ModelCase, dropout_p: float, longest: int) -> nn.Module:
    """The public model with torch's scaled_dot_product_attention inside."""
    Attention = _plain_module().Attention

    class SdpaAttention(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, None]:
            heads = self.heads(self.w_qs(q)), self.heads(self.w_ks(k)), self.heads(self.w_vs(v))
            dropout = self.attn_dropout.p if self.training else 0.0
            out = F.scaled_dot_product_attention(*heads, attn_mask=mask.unsqueeze(1), dropout_p=dropout)
            out = self.dropout(self.fc(out.transpose(1, 2).flatten(2)))
            return self.layer_norm(out + q), None

    model = plain(case, dropout_p, longest)
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = SdpaAttention
    return model


def _plain_module() -> Any:
    folder = Path(__file__).resolve().parents[1] / "tests" / "models"
    if not folder.exists():
        raise Refused("tests/models is not here")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module("plain_transformer")


class TorchTransformer(nn.Module):
    """torch.nn's encoder and decoder layers between the public model's embedding and projection. Its layers have biases
    that the public model has not; they start at 0."""

    def __init__(self, case: ModelCase, dropout_p: float, longest: int) -> None:
        super().__init__()
        d, n = case.d_model, case.n_layers
        options = {"dropout": dropout_p, "layer_norm_eps": 1e-6, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(d, case.n_head, case.d_inner, **options)
        decoder = nn.TransformerDecoderLayer(d, case.n_head, case.d_inner, **options)
        self.embedding, self.dropout = nn.Embedding(case.n_vocab, d, PAD), nn.Dropout(dropout_p)
        self.register_buffer("position", torch.empty(1, longest, d))
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

    def load_state_dict(self, weights: dict[str, Tensor]) -> None:
        """Of the public model."""
        with torch.no_grad():
            for name, bias in self.named_parameters():
                if name.endswith(("in_proj_bias", "out_proj.bias")):
                    bias.zero_()
            for name, parameter, rows in self._public_parameters():
                parameter[rows] = weights[name]
            self.position.copy_(weights["encoder.position_enc.pos_table"])

    def gradients(self) -> dict[str, Tensor]:
        """By the public model's names."""
        return {name: parameter.grad[rows] for name, parameter, rows in self._public_parameters()}

    def _public_parameters(self) -> Iterator[tuple[str, Tensor, slice]]:
        """(name in the public model, parameter here, its rows)."""

        def both(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor, slice]]:
            yield f"{name}.weight", module.weight, slice(None)
            yield f"{name}.bias", module.bias, slice(None)

        yield "encoder.src_word_emb.weight", self.embedding.weight, slice(None)
        yield from both("encoder.layer_norm", self.source_norm)
        yield from both("decoder.layer_norm", self.target_norm)
        for stack in ("encoder", "decoder"):
            for number, layer in enumerate(getattr(self, stack).layers):
                name = f"{stack}.layer_stack.{number}"
                attentions = {"slf_attn": (layer.self_attn, layer.norm1)}
                if stack == "decoder":
                    attentions["enc_attn"] = layer.multihead_attn, layer.norm2
                for kind, (attention, norm) in attentions.items():
                    d = norm.weight.shape[0]
                    for place, projection in enumerate(("w_qs", "w_ks", "w_vs")):
                        rows = slice(place * d, (place + 1) * d)
                        yield f"{name}.{kind}.{projection}.weight", attention.in_proj_weight, rows
                    yield f"{name}.{kind}.fc.weight", attention.out_proj.weight, slice(None)
                    yield from both(f"{name}.{kind}.layer_norm", norm)
                yield from both(f"{name}.pos_ffn.w_1", layer.linear1)
                yield from both(f"{name}.pos_ffn.w_2", layer.linear2)
                yield from both(f"{name}.pos_ffn.layer_norm", layer.norm3 if stack == "decoder" else layer.norm2)


def plain_loss(model: nn.Module, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
    """As a user of plain PyTorch takes it."""
    logits = model(src_seq, trg_seq)
    return F.cross_entropy(logits, gold.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)


def fused_loss(model: nn.Module, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
    """As a user of FusedTransformer takes it."""
    return model.loss(src_seq, trg_seq, gold, label_smoothing=SMOOTHING)


@contextmanager
def by_reference(op_name: str | None) -> Iterator[None]:
    """Every call of this one op is served by the reference path; all others as they would be."""
    if op_name is None:
        yield
        return
    choose = backends.choose

    def switched(op: str, device: torch.device, arguments: tuple[Any, ...], backend: str | None) -> Any:
        return choose(op, device, arguments, "reference" if op == op_name else backend)

    with patch.object(backends, "choose", switched):
        yield
