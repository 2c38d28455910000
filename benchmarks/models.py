"""The models that are measured whole: fastattn's, and the plain PyTorch that a user would replace, with equal weights.

The plain model is the public architecture in tests/models/plain_transformer.py.
"""

from __future__ import annotations

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

from fastattn import _dispatch
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
    folder = Path(__file__).resolve().parents[1] / "tests" / "models"
    if not folder.exists():
        raise Refused("tests/models is not here")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    from plain_transformer import PlainTransformer

    return PlainTransformer(**_arguments(case, dropout_p, longest))


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
    choose = _dispatch.choose

    def switched(op: str, device: torch.device, arguments: tuple[Any, ...], backend: str | None) -> tuple[str, Any]:
        return choose(op, device, arguments, "reference" if op == op_name else backend)

    with patch.object(_dispatch, "choose", switched):
        yield
