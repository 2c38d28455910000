"""Beam search and greedy decoding written plainly: one sentence at a time, every prefix decoded again.

`log_probabilities(src_seq (1, Ls), prefix list of ids)` gives a list of numbers for the next token.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import AttentionMask, FusedTransformer, get_pad_mask, get_subsequent_mask

LogProbabilities = Callable[[list[int]], list[float]]


def _kept(logits: Callable[[Tensor], Tensor]) -> LogProbabilities:
    """logits: of what follows a prefix (1, length). Several searches may use it: what was computed is kept."""

    @functools.cache
    @torch.no_grad()
    def of_prefix(prefix: tuple[int, ...]) -> list[float]:
        return logits(torch.tensor([prefix])).double().log_softmax(-1).tolist()

    return lambda prefix: of_prefix(tuple(prefix))


def of_model(model: FusedTransformer, src_seq: Tensor) -> LogProbabilities:
    """Of a FusedTransformer in eval mode and one sentence, (1, Ls), by its whole decoder under a causal mask."""
    src_mask, causal = model.src_mask(src_seq), AttentionMask(is_causal=True)
    with torch.no_grad():
        encoded, *_ = model.encoder(src_seq, src_mask)
    return _kept(lambda prefix: model.project(model.decoder(prefix, causal, encoded, src_mask)[0][0, -1]))


def of_transformers(model: Any, src_seq: Tensor) -> LogProbabilities:
    """Of a model of transformers with an encoder and a decoder."""
    inputs = {"input_ids": src_seq, "attention_mask": (src_seq != model.config.pad_token_id).long()}
    return _kept(lambda prefix: model(**inputs, decoder_input_ids=prefix).logits[0, -1])


def greedy(log_probabilities: LogProbabilities, max_len: int, bos_idx: int, eos_idx: int) -> list[int]:
    prefix = [bos_idx]
    while len(prefix) <= max_len:
        scores = log_probabilities(prefix)
        token = max(range(len(scores)), key=lambda i: (scores[i], -i))
        if token == eos_idx:
            break
        prefix.append(token)
    return prefix[1:]


def beam_search(
    log_probabilities: LogProbabilities,
    beam_size: int,
    max_len: int,
    bos_idx: int,
    eos_idx: int,
    length_penalty: float,
    n_best: int,
) -> list[tuple[list[int], float]]:
    """The best n_best (tokens, score), searched to max_len without stopping early."""
    beams = [([bos_idx], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(max_len):
        candidates = []
        for rank, (prefix, log_p) in enumerate(beams):
            for token, more in enumerate(log_probabilities(prefix)):
                if log_p + more > -float("inf"):
                    candidates.append((-(log_p + more), rank, token))
        best = heapq.nsmallest(2 * beam_size, candidates)
        going_on = []
        for place, (cost, rank, token) in enumerate(best):
            prefix = beams[rank][0]
            if token != eos_idx:
                going_on.append(([*prefix, token], -cost))
            elif place < beam_size:
                ended.append((prefix[1:], -cost / (len(prefix) + 1) ** length_penalty))
        beams = going_on[:beam_size]
    ended.sort(key=lambda found: -found[1])  # stable
    found = ended[:n_best]
    for prefix, log_p in beams[: n_best - len(found)]:
        found.append((prefix[1:], log_p / len(prefix) ** length_penalty))
    return found


class PlainTranslator(torch.nn.Module):
    """The public implementation's Translator, written from what it does: one sentence, every prefix decoded again."""

    def __init__(self, model, beam_size, max_seq_len, src_pad_idx, trg_pad_idx, trg_bos_idx, trg_eos_idx) -> None:
        super().__init__()
        self.model, self.beam_size, self.max_seq_len = model.eval(), beam_size, max_seq_len
        self.src_pad_idx, self.trg_bos_idx, self.trg_eos_idx = src_pad_idx, trg_bos_idx, trg_eos_idx
        self.register_buffer("blank_seqs", torch.full((beam_size, max_seq_len), trg_pad_idx))

    def probabilities(self, trg_seq: Tensor, enc_output: Tensor, src_mask: Tensor) -> Tensor:
        """Of the next token; src_mask is that of one sentence, and enc_output may have beam_size equal rows."""
        dec_output, *_ = self.model.decoder(trg_seq, get_subsequent_mask(trg_seq), enc_output, src_mask)
        return self.model.trg_word_prj(dec_output).softmax(-1)[:, -1]

    @torch.no_grad()
    def translate_sentence(self, src_seq: Tensor) -> list[int]:
        beams, longest = self.beam_size, self.max_seq_len
        src_mask = get_pad_mask(src_seq, self.src_pad_idx)
        enc_output, *_ = self.model.encoder(src_seq, src_mask)
        first = torch.full_like(src_seq[:, :1], self.trg_bos_idx)
        best, tokens = self.probabilities(first, enc_output, src_mask).topk(beams)
        scores, found = best.log().view(beams), self.blank_seqs.clone()
        found[:, 0], found[:, 1] = self.trg_bos_idx, tokens[0]
        enc_output = enc_output.repeat(beams, 1, 1)
        answer, lengths = 0, [longest] * beams
        for step in range(2, longest):
            best, tokens = self.probabilities(found[:, :step], enc_output, src_mask).topk(beams)
            scores, place = (best.log() + scores[:, None]).view(-1).topk(beams)
            row = place // beams
            found[:, :step] = found[row, :step]
            found[:, step] = tokens.view(-1)[place]
            lengths = [
                ids.index(self.trg_eos_idx) + 1 if self.trg_eos_idx in ids else longest for ids in found.tolist()
            ]
            if (found == self.trg_eos_idx).any(1).all():
                answer = (scores / torch.tensor(lengths) ** 0.7).argmax().item()
                break
        return found[answer, : lengths[answer]].tolist()
