"""The dropout rule in Triton. Specification: fastattn/backends/reference/philox.py

All kernel backends and the reference drop exactly the same elements.

Element (row, col) belongs to the Philox 4x32 call (7 rounds) with
    key = (seed & 0xffffffff, seed >> 32),  counter = (col // 8, row & 0xffffffff, row >> 32, offset & 0xffffffff).
Its four 32-bit words are eight 16-bit lanes, low half first; the element's number u is lane col % 8, and it is kept
when u >= threshold. One call is enough for eight neighbouring columns: about 7 integer instructions an element.
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
    words = tl.philox(seed, octet, row_low, row_high, row_low * 0 + offset_low, n_rounds=7)
    # join adds a last dimension of two, so the most significant bit of the lane number is joined first: 4, 2, 1.
    pairs = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))  # [BLOCK_M, octets, 2, 2]
    keep = tl.join((pairs & 0xFFFF) >= threshold, (pairs >> 16) >= threshold)
    return tl.reshape(keep, (rows.shape[0], BLOCK_N))
