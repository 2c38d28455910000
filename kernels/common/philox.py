"""The dropout rule in Triton. Specification: fastattn/backends/reference/philox.py

All kernel backends and the reference drop exactly the same elements.

Element (row, col) belongs to the Philox 4x32 call (7 rounds) with
    key = (seed & 0xffffffff, seed >> 32),  counter = (col // 8, row & 0xffffffff, row >> 32, offset & 0xffffffff).
Its four 32-bit words are eight 16-bit lanes, low half first; the element's number u is lane col % 8, and it is kept
when u >= threshold. One call is enough for eight neighbouring columns.
"""

import functools

import triton
import triton.language as tl

from fastattn.backends import constants

dropout_constants = functools.lru_cache(constants.dropout_constants)


@triton.jit
def dropout_keep(rng_state, threshold, rows, first_col, BLOCK_N: tl.constexpr):
    """Which elements of a tile survive dropout.

    rng_state: pointer to int64 (seed, offset).         threshold: from dropout_constants.
    rows: [BLOCK_M] row numbers, any integer type (int64 where they may pass 2**31; rows out of range cost nothing).
    first_col: first column of the tile, a multiple of 8.    BLOCK_N: columns, a power of two >= 8.
    Returns [BLOCK_M, BLOCK_N] bool: row rows[m], column first_col + n.
    """
    seed, c0, c1, c2, c3 = _key_and_counter(rng_state, rows, first_col, BLOCK_N)
    words = tl.philox(seed, c0, c1, c2, c3, n_rounds=7)
    # join adds a last dimension of two, so the most significant bit of the lane number is joined first: 4, 2, 1.
    pairs = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))  # [BLOCK_M, octets, 2, 2]
    keep = tl.join((pairs & 0xFFFF) >= threshold, (pairs >> 16) >= threshold)
    return tl.reshape(keep, (rows.shape[0], BLOCK_N))


@triton.jit
def dropout_keep_in_product(rng_state, threshold, rows, first_col, BLOCK_N: tl.constexpr):
    """dropout_keep() for a tile in the layout of a product, in fewer instructions.

    There four threads share an octet, so the thread of a Philox call gives its result to others: here one word with the
    octet's eight bits. gather() moves no word, but Triton does not compute again what is before it.
    Without it all four threads would make the whole call.
    In the machine code of triton 3.6, sm_90a, bfloat16: 12 instructions an element where dropout_keep() takes 17. The
    whole kernels, D 64 and key padding: forward 2657 for 2977, dq 2659 for 2963, dk and dv 3142 for 3311, not timed;
    with a bias and a bool matrix at D 128 12 accesses spill where 51 did. Feed-forward: relu 3031 for 3281, the
    backward of gelu 4757 for 5143, but the forward of gelu 7270 for 7147. Not for norms: their layout has whole octets.
    """
    seed, c0, c1, c2, c3 = _key_and_counter(rng_state, rows, first_col, BLOCK_N)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(7):  # as tl.philox, but one multiplication gives both halves of a product
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False), tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    words = c0, c1, c2, c3
    # Both 16-bit lanes of a word at once. The top bit of a lane of `least` is set if its lower 15 bits reach those
    # of the threshold.
    low = tl.cast(threshold & 0xFFFF, tl.uint32)  # a threshold of 1 is a constant, which has no `to`
    limit = low << 16 | low
    kept = words[0] & 0
    for i in tl.static_range(4):
        least = (words[i] | 0x80008000) - (limit & 0x7FFF7FFF)
        larger = words[i] & (limit ^ 0xFFFFFFFF)
        kept |= ((larger | ((words[i] ^ limit ^ 0xFFFFFFFF) & least)) & 0x80008000) >> i
    kept = tl.where(threshold > 0xFFFF, 0, kept)
    place = tl.broadcast_to(tl.arange(0, BLOCK_N // 8)[None, :], kept.shape)
    kept = tl.gather(kept.to(tl.int32, bitcast=True), place, 1)
    lane = tl.arange(0, 8)[None, None, :]
    bit = (kept[:, :, None] << (lane >> 1)) & tl.where(lane % 2 == 0, 0x8000, -0x80000000)
    return tl.reshape(bit, (rows.shape[0], BLOCK_N)) != 0


@triton.jit
def _key_and_counter(rng_state, rows, first_col, BLOCK_N: tl.constexpr):
    """The seed and the counter of each Philox call, four words [BLOCK_M, BLOCK_N // 8] uint32."""
    seed = tl.load(rng_state)
    offset = tl.load(rng_state + 1)
    rows = rows.to(tl.int64)[:, None]
    octet = (first_col // 8 + tl.arange(0, BLOCK_N // 8))[None, :].to(tl.uint32)
    row_low = (rows & 0xFFFFFFFF).to(tl.uint32)
    row_high = ((rows >> 32) & 0xFFFFFFFF).to(tl.uint32)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    # The counter must have the tile's full shape: [BLOCK_M, BLOCK_N // 8].
    octet, row_low = tl.broadcast(octet, row_low)
    row_high, _ = tl.broadcast(row_high, row_low)
    return seed, octet, row_low, row_high, row_low * 0 + offset_low
