"""Greedy translation, and the scores of what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastattn import AttentionMask, FusedTransformer
from translation.data import Pair, pad
from translation.settings import Settings
from translation.tokens import BOS, EOS, Tokenizer

SENTENCES = 128  # sentences translated together


@torch.no_grad()
def greedy(model: FusedTransformer, source: Tensor, max_new_tokens: int) -> list[list[int]]:
    """The most likely next token, again and again, until EOS or `max_new_tokens`.

    source: (B, Ls) int64, PAD on the right. Returns B lists of token ids without BOS and EOS. The source is encoded
    once; sentences that have ended leave the batch. The model must be in eval mode.
    """
    encoded, *_ = model.encoder(source, model.src_mask(source))  # (B, Ls, d_model)
    prefix = source.new_full((len(source), 1), BOS)
    rows = torch.arange(len(source), device=source.device)  # which sentence each row of the batch is
    translations: list[list[int]] = [[] for _ in range(len(source))]
    for _ in range(max_new_tokens):
        decoded, *_ = model.decoder(prefix, AttentionMask(is_causal=True), encoded, model.src_mask(source))
        token = model.project(decoded[:, -1]).argmax(-1)  # (rows,)
        prefix = torch.cat([prefix, token[:, None]], dim=1)
        going_on = token != EOS
        for row, ids in zip(rows[~going_on].tolist(), prefix[~going_on, 1:-1].tolist(), strict=True):
            translations[row] = ids
        prefix, rows, encoded, source = (x[going_on] for x in (prefix, rows, encoded, source))
        if not len(rows):
            break
    for row, ids in zip(rows.tolist(), prefix[:, 1:].tolist(), strict=True):
        translations[row] = ids
    return translations


def translate(model: FusedTransformer, tokenizer: Tokenizer, texts: Sequence[str], settings: Settings) -> list[str]:
    """Greedy translations of `texts`, in their order. A text of more than --max-length tokens is cut there."""
    model.eval()
    max_length = settings.max_length
    encoded = [np.array([*ids[: max_length - 1], EOS]) for ids in tokenizer.encode(texts)]
    by_length = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    translations = [""] * len(texts)
    for start in range(0, len(texts), SENTENCES):
        chosen = by_length[start : start + SENTENCES]
        source = pad([encoded[i] for i in chosen]).to(settings.device)
        # A translation more than twice as long as its source is a repetition that would never end.
        limit = min(max_length - 1, 2 * source.shape[1] + 10)
        for i, ids in zip(chosen, greedy(model, source, limit), strict=True):
            translations[i] = tokenizer.decode(ids)
    return translations


@dataclass(frozen=True)
class Score:
    """A test set's translations and their worth in percent. `signature` is sacreBLEU's; None for exact match."""

    test: str
    metric: str
    value: float
    signature: str | None
    pairs: list[Pair]
    translations: list[str]


def exact_match(pairs: Sequence[Pair], translations: Sequence[str]) -> float:
    """The share, in percent, of translations that equal their target."""
    equal = sum(translation == target for (_, target), translation in zip(pairs, translations, strict=True))
    return 100 * equal / len(pairs)


def bleu(pairs: Sequence[Pair], translations: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU and sacreBLEU's signature of how it was computed. Source: Post 2018, arXiv:1804.08771."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(translations), [[target for _, target in pairs]])
    return score.score, str(metric.get_signature())
