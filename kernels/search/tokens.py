"""The next tokens of a search from the logits of a step. Specification: fastattn/generate/beams.py and sampling.py.

    log_p_wi = ((z_wi - max_w) - log(sum over i of exp(z_wi - max_w))) + log_p_w, in float32, of beam w and token i

Values are compared as keys of 64 bits: their bits, in the order of integers, above the index, from the last one. So the
largest key is that of the largest value, and of equal ones of the lowest index; NaN is the largest.
Peaks. Grid: one program a (row, 2048 columns), so that one sentence fills a GPU. It writes the largest key of each
chunk, and maximum and sum of exponentials of its columns. Bytes: the logits, and 8 for each chunk.
Beams. Grid: one program a sentence, which alone reads and writes its state. Registers: the best key of each chunk, at
most 4096 for 8 warps. 2 W times the largest is taken, and its chunk, from the L2 cache, gives the next one below it.
Then histories, which any row may get from any other: all threads read columns of them before one writes.
Floor of 5 beams and 32000 tokens in bfloat16: 0.32 MB a sentence, 0.07 us at 4.3 TB/s. Not timed; estimated: 2 W
dependent turns of about a microsecond, in place of 74 operators. Compiled offline for these with triton 3.6 nothing
spills; registers at sm_80 / sm_90a: peaks 40 / 47, beams 122 / 125. Of 32 beams 48 accesses would spill.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import unsupported_tensors

LOWEST = tl.constexpr(-(1 << 63))  # below all keys


@triton.jit
def key_of(x, index):
    """x: float32.     index: int32, from 0."""
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 is equal
    bits = tl.where(x == x, x, float("nan")).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - index)


@triton.jit
def value_and_index(key):
    bits = (key >> 32).to(tl.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_of_sum(x, peak, log_total, log_p, index):
    """Of a NaN, which the sentence notes, a key as any other."""
    value = ((x - peak) - log_total) + log_p
    return key_of(tl.where(value == value, value, float("-inf")), index)


@triton.jit
def at(vector, place, i):
    """vector[i], where `place` numbers its elements. A matrix i [N, 1] gives [N]."""
    return tl.sum(tl.where(place == i, vector, 0), axis=-1)


@triton.jit(do_not_specialize=["chunks"])
def peaks_kernel(
    # logits (B, W, n_vocab); peaks (B, W, chunks) int64; sums (B, W, parts, 2) float32 or None
    logits, peaks, sums, stride_b, stride_w, num_beams, n_vocab, chunks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = part * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    col = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    start = logits + row // num_beams * stride_b + row % num_beams * stride_w
    x = tl.load(start + col, mask=col < n_vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(key_of(x, col), axis=1)
    tl.store(peaks + row * chunks + chunk, top, mask=chunk < chunks)
    if sums is not None:
        peak, _ = value_and_index(tl.max(top, axis=0))
        shift = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf would be NaN
        to = sums + (row * tl.num_programs(1) + part) * 2
        tl.store(to, peak)
        tl.store(to + 1, tl.sum(tl.sum(tl.exp(x - shift), axis=1), axis=0))


@triton.jit(do_not_specialize=["chunks", "capacity", "eos"])
def greedy_kernel(
    # peaks (B, chunks); tokens (B, 1), fed (B, capacity, 1) int64; done, broken (B,) bool; lengths (B,)
    peaks, tokens, fed, done, broken, lengths, chunks, capacity, eos,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    key = tl.max(tl.load(peaks + b * chunks + chunk, mask=chunk < chunks, other=LOWEST), axis=0)
    value, token = value_and_index(key)
    tl.store(fed + b * capacity + tl.load(lengths + b) - 2, tl.load(tokens + b))
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(broken + b, tl.load(broken + b) | (value != value))
    tl.store(done + b, tl.load(done + b) | (token == eos))


@triton.jit(do_not_specialize=["chunks", "parts", "capacity", "eos"])
def beams_kernel(
    # as above, of W beams; log_p (B, W); score, length (B, N), sentence (B, N, capacity); divisor (B, capacity + 3);
    # ancestors (B, W, capacity) int32, or None of one beam. All but logits contiguous.
    logits, peaks, sums, tokens, fed, done, broken, lengths, log_p, score, length, sentence, divisor,
    ancestors, stride_b, stride_w, n_vocab, chunks, parts, capacity, eos,
    W: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    BEAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    w, part, chunk = tl.arange(0, BEAMS), tl.arange(0, PARTS), tl.arange(0, CHUNKS)
    is_beam = w < W

    # log_softmax of each beam. A NaN or inf among its logits, or -inf alone, makes it NaN.
    ptrs = sums + ((b * W + w)[:, None] * parts + part[None, :]) * 2
    is_part = is_beam[:, None] & (part < parts)[None, :]
    peak_of_part = tl.load(ptrs, mask=is_part, other=float("-inf"))
    peak = tl.where(is_beam, tl.max(peak_of_part, axis=1), 0.0)
    total = tl.sum(tl.load(ptrs + 1, mask=is_part, other=0.0) * tl.exp(peak_of_part - peak[:, None]), axis=1)
    log_total = tl.log(tl.where(is_beam, total, 1.0))
    is_broken = tl.sum((is_beam & (total != total)).to(tl.int32), axis=0) > 0
    before = tl.load(log_p + b * W + w, mask=is_beam, other=float("-inf"))

    is_chunk = is_beam[:, None] & (chunk < chunks)[None, :]
    best = tl.load(peaks + (b * W + w)[:, None] * chunks + chunk[None, :], mask=is_chunk, other=LOWEST)
    top_logits, place_in_row = value_and_index(best)
    index = w[:, None] * n_vocab + place_in_row
    best = key_of_sum(top_logits, peak[:, None], log_total[:, None], before[:, None], index)
    best = tl.where(is_chunk, best, LOWEST)

    # Candidates: those that end are new rows after the N sentences, the first W others are the new beams.
    now = tl.load(lengths + b) - 1  # tokens that the beams have read
    table = divisor + b * (capacity + 3)
    row = tl.arange(0, ROWS)
    old_tokens = tl.load(tokens + b * W + w, mask=is_beam)
    all_scores = tl.load(score + b * N + row, mask=row < N, other=float("-inf"))
    all_lengths = tl.load(length + b * N + row, mask=row < N, other=now - 1)
    ended, parent, new_tokens = tl.zeros([ROWS], tl.int32), tl.zeros([BEAMS], tl.int32), tl.zeros([BEAMS], tl.int32)
    new_log_p = tl.full([BEAMS], float("-inf"), tl.float32)
    count = 0
    for turn in range(2 * W):
        top = tl.max(tl.max(best, axis=1), axis=0)
        value, place = value_and_index(top)
        value, place = tl.where(top == LOWEST, float("-inf"), value), tl.where(top == LOWEST, 0, place)
        beam, token = place // n_vocab, place % n_vocab
        ends = token == eos
        is_new = (row == N + turn) & ends & (turn < W)
        all_scores = tl.where(is_new, tl.div_rn(value, tl.load(table + now + 1)), all_scores)
        ended = tl.where(is_new, beam, ended)
        is_new = (w == count) & (ends == 0)
        new_log_p, new_tokens = tl.where(is_new, value, new_log_p), tl.where(is_new, token, new_tokens)
        parent = tl.where(is_new, beam, parent)
        count += tl.where(ends, 0, 1)
        # The next one of the chunk.
        col = token // CHUNK * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + b * stride_b + beam.to(tl.int64) * stride_w + col, mask=col < n_vocab, other=float("-inf"))
        keys = key_of_sum(x.to(tl.float32), at(peak, w, beam), at(log_total, w, beam), at(before, w, beam),
            beam * n_vocab + col)  # fmt: skip
        refill = tl.max(tl.where((keys < top) & (col < n_vocab), keys, LOWEST), axis=0)
        best = tl.where((w == beam)[:, None] & (chunk == token // CHUNK)[None, :], refill, best)

    # The N best of all rows. Of equal ones those that ended before come first.
    better = (all_scores[None, :] > all_scores[:, None]) | (
        (all_scores[None, :] == all_scores[:, None]) & (row[None, :] < row[:, None])
    )
    rank = tl.sum(better.to(tl.int32), axis=1)
    source = at(row[None, :], rank[None, :], row[:, None])
    beam_of_source = at(ended[None, :], row[None, :], source[:, None])
    first, worst = at(new_log_p, w, 0), at(all_scores, rank, N - 1)
    bound = tl.maximum(tl.load(table + now + 2), tl.load(table + capacity + 1))
    is_done = (worst >= tl.div_rn(first, bound)) | (first == float("-inf"))
    tl.debug_barrier()  # every thread has read the state
    tl.store(score + b * N + rank, all_scores, mask=rank < N)
    tl.store(length + b * N + rank, all_lengths, mask=rank < N)
    tl.store(tokens + b * W + w, new_tokens.to(tl.int64), mask=is_beam)
    tl.store(log_p + b * W + w, new_log_p, mask=is_beam)
    tl.store(fed + (b * capacity + now - 1) * W + w, old_tokens, mask=is_beam)
    tl.store(broken + b, tl.load(broken + b) | is_broken)
    tl.store(done + b, tl.load(done + b) | is_done)

    any_ended = tl.sum(((row >= N) & (all_scores > float("-inf"))).to(tl.int32), axis=0) > 0
    for begin in range(0, now, BLOCK):
        tl.debug_barrier()  # fed is written
        col = begin + tl.arange(0, BLOCK)[None, :]
        inside, is_old = (row < N)[:, None] & (col < tl.where(any_ended, now, 0)), (source < N)[:, None]
        old = tl.load(sentence + (b * N + source)[:, None] * capacity + col, mask=inside & is_old)
        of = tl.zeros([ROWS, BLOCK], tl.int32)
        if ancestors is not None:
            places = ancestors + (b * W + beam_of_source)[:, None] * capacity + col
            of = tl.load(places, mask=inside & (is_old == 0), other=0)
            places = ancestors + (b * W + parent)[:, None] * capacity + col
            moved = tl.load(places, mask=is_beam[:, None] & (col < now))
        new = tl.load(fed + (b * capacity + col) * W + of, mask=inside & (is_old == 0))
        tl.debug_barrier()  # every thread has read these columns
        tl.store(sentence + (b * N + row)[:, None] * capacity + col, tl.where(is_old, old, new), mask=inside)
        if ancestors is not None:
            places = ancestors + (b * W + w)[:, None] * capacity + col
            tl.store(places, moved, mask=is_beam[:, None] & (col < now))


_PART = 2048  # columns of a program
_CHUNK, _KEYS = 64, 4096  # columns of a chunk, at least; keys of a sentence, at most
_MAX_BEAMS = 16  # more spill registers


def _chunk(num_beams: int, n_vocab: int) -> int:
    """Columns of a chunk."""
    return max(_CHUNK, triton.next_power_of_2(-(-n_vocab // (_KEYS // triton.next_power_of_2(num_beams)))))


def unsupported_reason(logits: Tensor) -> str | None:
    """Why these kernels cannot run, or None. logits: (B, W, n_vocab)."""
    _, W, n_vocab = logits.shape
    if W > _MAX_BEAMS or _chunk(W, n_vocab) > _PART:
        return f"the search in Triton takes up to {_MAX_BEAMS} beams and {_KEYS} chunks, got logits {(W, n_vocab)}"
    return unsupported_tensors("the search", logits=logits)


def choose(logits: Tensor, state: dict[str, Tensor], cache: Any, eos: int) -> None:
    """What `choose` of _Greedy does, or of _Beams, whose state has log_p. It also writes `fed`.

    logits (B, W, n_vocab), contiguous in the last dimension.     cache: a DecoderCache.
    """
    (B, W, n_vocab), is_greedy, pad = logits.shape, "log_p" not in state, triton.next_power_of_2
    chunk, parts = _PART if is_greedy else _chunk(W, n_vocab), -(-n_vocab // _PART)
    peaks = torch.empty(B, W, chunks := -(-n_vocab // chunk), dtype=torch.int64, device=logits.device)
    sums = None if is_greedy else torch.empty(B, W, parts, 2, device=logits.device)
    options: dict[str, Any] = {"CHUNK": chunk, "enable_fp_fusion": True}
    given = *[state[name] for name in ("tokens", "fed", "done", "broken")], cache.lengths
    with torch.cuda.device_of(logits):
        numbers = *logits.stride()[:2], W, n_vocab, chunks
        peaks_kernel[B * W, parts](logits, peaks, sums, *numbers, BLOCK=_PART, num_warps=4, **options)
        if is_greedy:
            greedy_kernel[(B,)](
                peaks, *given, chunks, cache.capacity, eos, CHUNKS=pad(chunks), num_warps=1, enable_fp_fusion=True
            )
            return
        given += *[state[name] for name in ("log_p", "score", "length", "sentence", "divisor")], cache.ancestors
        numbers = *logits.stride()[:2], n_vocab, chunks, parts, cache.capacity, eos
        options |= {"W": W, "N": (N := state["score"].shape[1]), "BEAMS": pad(W), "ROWS": pad(N + W), "BLOCK": 128}
        options |= {"CHUNKS": pad(chunks), "PARTS": pad(parts), "num_warps": 8}
        beams_kernel[(B,)](logits, peaks, sums, *given, *numbers, **options)
