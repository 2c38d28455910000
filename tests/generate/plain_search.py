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


def _kept(logits: Callable[[Tensor], Tensor], device: torch.device) -> LogProbabilities:
    """logits: of what follows a prefix (1, length). Several searches may use it: what was computed is kept."""

    @functools.cache
    @torch.no_grad()
    def of_prefix(prefix: tuple[int, ...]) -> list[float]:
        return logits(torch.tensor([prefix], device=device)).double().log_softmax(-1).tolist()

    return lambda prefix: of_prefix(tuple(prefix))


def of_model(model: FusedTransformer, src_seq: Tensor) -> LogProbabilities:
    """Of a FusedTransformer in eval mode and one sentence, (1, Ls), by its whole decoder under a causal mask."""
    src_mask, causal = model.src_mask(src_seq), AttentionMask(is_causal=True)
    with torch.no_grad():
        encoded, *_ = model.encoder(src_seq, src_mask)
    return _kept(lambda p: model.project(model.decoder(p, causal, encoded, src_mask)[0][0, -1]), src_seq.device)


def of_transformers(model: Any, src_seq: Tensor) -> LogProbabilities:
    """Of a model of transformers with an encoder and a decoder."""
    inputs = {"input_ids": src_seq, "attention_mask": (src_seq != model.config.pad_token_id).long()}
    return _kept(lambda prefix: model(**inputs, decoder_input_ids=prefix).logits[0, -1], src_seq.device)


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


@torch.no_grad()
def translate(model: Any, src_seq: Tensor, beams: int, longest: int, pad_idx: int, bos_idx: int, eos_idx: int) -> Any:
    """What the public implementation's Translator makes of one sentence (1, Ls), written from what it does."""

    def best_tokens(trg_seq: Tensor, enc_output: Tensor) -> tuple[Tensor, Tensor]:
        """(log probabilities, tokens), of each row (rows, beams)."""
        dec_output, *_ = model.decoder(trg_seq, get_subsequent_mask(trg_seq), enc_output, src_mask)
        best, tokens = model.trg_word_prj(dec_output).softmax(-1)[:, -1].topk(beams)
        return best.log(), tokens

    src_mask = get_pad_mask(src_seq, pad_idx)
    enc_output, *_ = model.encoder(src_seq, src_mask)
    found = torch.full((beams, longest), pad_idx, device=src_seq.device)
    found[:, 0] = bos_idx
    best, tokens = best_tokens(found[:1, :1], enc_output)
    scores, found[:, 1] = best[0], tokens[0]
    enc_output = enc_output.repeat(beams, 1, 1)
    answer, lengths = 0, [longest] * beams
    for step in range(2, longest):
        best, tokens = best_tokens(found[:, :step], enc_output)
        scores, place = (best + scores[:, None]).view(-1).topk(beams)
        found[:, :step] = found[place // beams, :step]
        found[:, step] = tokens.view(-1)[place]
        lengths = [ids.index(eos_idx) + 1 if eos_idx in ids else longest for ids in found.tolist()]
        if (found == eos_idx).any(1).all():
            answer = (scores / torch.tensor(lengths, device=scores.device) ** 0.7).argmax().item()
            break
    return found[answer, : lengths[answer]].tolist()
