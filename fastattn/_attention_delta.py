"""When attention's backward makes delta from its definition, sum_j P_ij dP_ij - dlse_i, by one more walk over the keys.

As a rule delta is sum_d out_id dout_id - dlse_i, which is equal but for the rounding of a 16-bit out. That rounding
counts where of two or three keys little else is left of dS, and under dropout, which scales up what it leaves. The
rooms of Triton and CUDA share this rule for whole problems; csrc/attention/backward.h tells what a block can know.
"""

from __future__ import annotations

from torch import Tensor

HEAVY_DROPOUT = 0.5  # beyond it the few weights that are left are scaled up too far, and with them the rounding
# Among few queries, of all heads and samples, the plain formula's own errors, by which those of the kernels are judged,
# may all be small by luck. Where each query saw 2 to 4 keys, 1 problem in 14 of up to 100 queries was over the rule, up
# to 33 times, and without dropout 1 in 22, up to 18 times; from 256 on, with heads of 32 or more, none of 560. The walk
# makes 9 products of 7, of a small problem.
FEW_QUERIES = 256


def wants_exact_delta(q: Tensor, dropout_p: float) -> bool:
    """q (B, H, Lq, D)"""
    return dropout_p > HEAVY_DROPOUT or q.shape[:3].numel() <= FEW_QUERIES
