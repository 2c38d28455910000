"""Beam search."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.generate.loop import Decodable, OnToken, Search, check_limits, check_model, inference, run
from fastattn.nn import DecoderCache
from fastattn.ops._checks import check_number

CHUNK = 64  # candidates in a chunk; see topk_of_sums


class Hypothesis(NamedTuple):
    """tokens: ids without BOS and EOS. score: see ``beam_search``."""

    tokens: list[int]
    score: float


def beam_search(
    model: Decodable,
    src_seq: Tensor,
    *,
    beam_size: int,
    max_len: int,
    bos_idx: int,
    eos_idx: int,
    length_penalty: float = 0.7,
    n_best: int = 1,
    on_token: OnToken | None = None,
) -> list[list[Hypothesis]]:
    """The n_best best sentences that a search with beam_size beams finds, for each source the best first.

    Sentences that ended come before beams that did not, whatever their scores. So the first results are the same for
    every n_best.

    The score of a sentence is its log-probability / length^length_penalty, where length counts BOS and EOS, as in the
    public implementation of "Attention Is All You Need". At each step the 2 * beam_size likeliest continuations of a
    source's beams are taken. Those among the first beam_size that are EOS end a sentence; the beam_size likeliest
    others are the new beams. The search of a source ends when no beam can become one of its n_best any more, so an
    early end changes no result. Or it ends after max_len tokens; there beams count as sentences only if fewer than
    n_best have ended. Of equal candidates the one of the better beam, then of the lower token, comes first.

    beam_size: may exceed the vocabulary. With 1 the search still goes on after EOS, so it can differ from ``greedy``.
    n_best: at most beam_size. A source gets fewer if fewer exist.
    length_penalty: (max_len + 1)^length_penalty must be from 1e-30 to 1e30.
    Other arguments and errors: see ``greedy``; on_token gets the newest token of every beam, the best first.
    Source: Sutskever et al. 2014, arXiv:1409.3215, section 3.2; a length penalty: Wu et al. 2016, arXiv:1609.08144.
    """
    model = check_model(model, max_len, bos_idx, eos_idx, on_token)
    check_limits(beam_size=beam_size, n_best=n_best)
    if n_best > beam_size:
        raise ValueError(f"n_best must be at most beam_size = {beam_size}, got {n_best}")
    check_number("length_penalty", length_penalty)
    if not abs(length_penalty) * math.log(max_len + 1) <= 30 * math.log(10):  # scores must fit into float32
        raise ValueError(f"length_penalty={length_penalty} is out of range for max_len={max_len}: scores overflow")
    with inference(model):
        cache = model.start_decoding(src_seq, int(beam_size), int(max_len))
        return run(model, _Beams(cache, bos_idx, eos_idx, float(length_penalty), int(n_best)), on_token)


class Beams(Search):
    """Search over W beams a sentence. state["log_p"] (B, W): the log-probability of each beam's tokens so far."""

    def __init__(self, cache: DecoderCache, bos_idx: int, eos_idx: int) -> None:
        super().__init__(cache, bos_idx, eos_idx)
        log_p = self.state["tokens"].new_full((cache.batch, cache.rows), -torch.inf, dtype=torch.float32)
        log_p[:, 0] = 0  # at first all beams are equal, and only one counts
        self.state["log_p"] = log_p

    def candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k likeliest continuations (B, k): log-probability, beam, token. logits: (B, W, n_vocab)."""
        log_p = logits.float().log_softmax(-1)
        self.note_nan(log_p[..., :1])  # a NaN among the logits makes all NaN
        best, choice = topk_of_sums(self.state["log_p"], log_p, k)
        return best, choice // log_p.shape[2], choice % log_p.shape[2]

    def history(self, state: dict[str, Tensor], beam: int) -> list[int]:
        """The tokens that a beam has read, without BOS. state: as in `result`."""
        fed = state["fed"][1 : self.cache.length]
        if "ancestors" not in state:
            return fed[:, beam].tolist()
        ancestors = state["ancestors"][beam, 1 : self.cache.length].long()
        return fed.gather(1, ancestors[:, None])[:, 0].tolist()


class _Beams(Beams):
    """The search of ``beam_search``."""

    has_kernel = True

    def __init__(self, cache: DecoderCache, bos_idx: int, eos_idx: int, length_penalty: float, n_best: int) -> None:
        super().__init__(cache, bos_idx, eos_idx)
        self.length_penalty = length_penalty
        batch, device = cache.batch, cache.position.device
        divisors = torch.arange(cache.capacity + 3, dtype=torch.float32, device=device) ** length_penalty
        self.state |= {
            "divisor": divisors.repeat(batch, 1),  # of the scores of sentences, by length
            # Of sentences that ended, the best first.
            "score": torch.full((batch, n_best), -torch.inf, device=device),
            "length": torch.zeros(batch, n_best, dtype=torch.int64, device=device),
            "sentence": torch.zeros(batch, n_best, cache.capacity, dtype=torch.int64, device=device),
        }

    def choose(self, logits: Tensor) -> None:
        state, W = self.state, self.cache.rows
        log_p, beam, token = self.candidates(logits, 2 * W)
        ends = token == self.eos_idx
        if self.cache.on_device or ends[:, :W].any():
            self._end(log_p[:, :W].masked_fill(~ends[:, :W], -torch.inf), beam[:, :W])
            active = ends.int().argsort(dim=1, stable=True)[:, :W]  # the best that do not end, best first
            log_p, beam, token = (t.gather(1, active) for t in (log_p, beam, token))
            log_p = log_p.masked_fill(ends.gather(1, active), -torch.inf)  # where fewer than W do not end
        else:
            log_p, beam, token = (t[:, :W] for t in (log_p, beam, token))
        state["tokens"].copy_(token)
        state["log_p"].copy_(log_p)
        if W > 1:
            self.cache.reorder(beam)
        # The best score that a beam can reach: it ends with the next token, or with the last that the cache can hold,
        # and its further tokens have probability 1.
        shortest = state["divisor"].index_select(1, self.cache.position + 2)[:, 0]
        divisor = torch.maximum(shortest, state["divisor"][:, self.cache.capacity + 1])
        state["done"] |= (state["score"][:, -1] >= log_p[:, 0] / divisor) | (log_p[:, 0] == -torch.inf)

    def _end(self, log_p: Tensor, beam: Tensor) -> None:
        """Add sentences that end as continuations of these beams. log_p (B, W): -inf where none ends."""
        state, cache = self.state, self.cache
        n_best = state["score"].shape[1]
        # Tokens without BOS and EOS. The score counts these two as well.
        length = cache.position - 1
        score = log_p / state["divisor"].index_select(1, length + 2)
        if cache.ancestors is None:
            ancestors = beam[:, :, None].expand(-1, -1, cache.capacity)
        else:
            ancestors = cache.ancestors.long().gather(1, beam[..., None].expand(-1, -1, cache.capacity))
        history = state["fed"].gather(2, ancestors.mT).mT  # (B, W, capacity)
        score, order = torch.cat([state["score"], score], 1).sort(dim=1, descending=True, stable=True)
        order = order[:, :n_best]
        state["score"].copy_(score[:, :n_best])
        lengths = torch.cat([state["length"], length.expand_as(beam)], 1).gather(1, order)
        state["length"].copy_(lengths)
        sentences = torch.cat([state["sentence"], history], 1)
        state["sentence"].copy_(sentences.gather(1, order[..., None].expand(-1, -1, cache.capacity)))

    def result(self, state: dict[str, Tensor]) -> list[Hypothesis]:
        ended = zip(*(state[name].tolist() for name in ("score", "length", "sentence")), strict=True)
        found = [Hypothesis(tokens[1 : 1 + length], score) for score, length, tokens in ended if score > -math.inf]
        missing = len(state["score"]) - len(found) if self.cache.length == self.cache.capacity else 0
        divisor = (self.cache.length + 1) ** self.length_penalty
        newest = zip(state["log_p"].tolist(), state["tokens"].tolist(), strict=True)
        for beam, (log_p, token) in enumerate(newest):
            if beam < missing and log_p > -math.inf:
                found.append(Hypothesis([*self.history(state, beam), token], log_p / divisor))
        return found


def topk_of_sums(a: Tensor, b: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of a[:, w] + b[:, w, i], and their indices w * n_vocab + i: (B, k), in falling order. Of equal sums
    the lower index comes first, which torch.topk does not promise. a (B, W), b (B, W, n_vocab). -inf at index 0 where
    there are fewer than k.

    torch.topk would copy all W * n_vocab sums with their indices. Here the largest of each chunk is found first: the k
    chunks with the largest ones hold the k largest elements.
    """
    n_vocab = b.shape[2]
    padded = -(-n_vocab // CHUNK) * CHUNK
    whole = n_vocab // CHUNK * CHUNK
    peaks = [b[..., :whole].unflatten(2, (-1, CHUNK)).amax(-1)] if whole else []
    if padded > whole:
        peaks.append(b[..., whole:].amax(-1, keepdim=True))
    peaks = (torch.cat(peaks, 2) + a[..., None]).flatten(1)  # (B, W * chunks)
    chunks = peaks.sort(dim=1, descending=True, stable=True)[1][:, :k].sort(dim=1)[0]
    row, column = chunks // (padded // CHUNK), chunks % (padded // CHUNK) * CHUNK
    column = column[..., None] + torch.arange(CHUNK, device=b.device)
    index = row[..., None] * n_vocab + column.clamp_max(n_vocab - 1)
    sums = b.flatten(1).gather(1, index.flatten(1)).view(index.shape) + a.gather(1, row)[..., None]
    sums = sums.masked_fill(column >= n_vocab, -torch.inf).flatten(1)
    best, order = sums.sort(dim=1, descending=True, stable=True)
    best, index = best[:, :k], index.flatten(1).gather(1, order[:, :k])
    if missing := k - best.shape[1]:
        best, index = F.pad(best, (0, missing), value=-torch.inf), F.pad(index, (0, missing))
    return best, index
