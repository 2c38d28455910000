"""A kernel around kernels/common/philox.py, so that a test can read any tile of the dropout rule."""

import torch
import triton
import triton.language as tl
from fastattn.kernels.common.philox import dropout_keep, dropout_keep_in_product


@triton.jit
def _keep_tile_kernel(out_ptr, rng_state_ptr, threshold, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = first_row + tl.arange(0, ROWS).to(tl.int64)
    place = out_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(place, dropout_keep(rng_state_ptr, threshold, rows, first_col, COLS))
    tl.store(place + ROWS * COLS, dropout_keep_in_product(rng_state_ptr, threshold, rows, first_col, COLS))


def keep_tile(rng_state: torch.Tensor, threshold: int, first_row: int, first_col: int, rows: int, cols: int):
    """Bool (2, rows, cols): what dropout_keep() and dropout_keep_in_product() keep at rows first_row.., columns
    first_col.. of a matrix."""
    out = torch.zeros(2, rows, cols, dtype=torch.bool, device=rng_state.device)
    _keep_tile_kernel[(1,)](out, rng_state, threshold, first_row, first_col, ROWS=rows, COLS=cols)
    return out
