"""Biases by distance as AttentionMask takes them, relative_bias (H, Lq + Lk - 1): ALiBi's and T5's.

Entry n - m + Lq - 1 is that of query m and key n. Plain PyTorch, with gradients into the slopes or the table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn.masks._checks import check_flags, check_sizes


def alibi_slopes(n_head: int) -> Tensor:
    """The slopes of ALiBi, float32 (n_head,): 2 ** (-8 / n_head), and its powers.

    If n_head is no power of 2, those of the next smaller one, followed by every other one of the next larger.
    Source: Press et al. 2022, arXiv:2108.12409, and its code.
    """
    check_sizes(n_head=n_head)
    power = 1 << (n_head.bit_length() - 1)

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    return torch.tensor(geometric(power) + geometric(2 * power)[::2][: n_head - power])


def alibi(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """-slope * |n - m|: (H, Lq + Lk - 1), in the dtype of slopes (H,). TypeError or ValueError for others."""
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        raise TypeError("slopes must be a floating point Tensor, (H,)")
    if slopes.dim() != 1:
        raise ValueError(f"slopes has shape {tuple(slopes.shape)}, expected (H,)")
    check_sizes(least=0, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    distance = _distances(seqlen_q, seqlen_k, slopes.device).abs()
    exact = torch.promote_types(slopes.dtype, torch.float32)  # float16 has no distances above 65504
    return (-slopes[:, None].to(exact) * distance).to(slopes.dtype)


def t5_relative_bias(
    table: Tensor, seqlen_q: int, seqlen_k: int, *, bidirectional: bool = True, max_distance: int = 128
) -> Tensor:
    """T5's bias, (H, Lq + Lk - 1): a row of the table for each bucket of distances.

    table (num_buckets, H): T5's relative_attention_bias.weight. bidirectional: True in its encoder, where half of the
        buckets are for keys after the query; False in its decoder, which has one bucket for all of these.
    Half of a direction's buckets are for one distance each, the others grow logarithmically up to max_distance, and the
    last has all that is farther. TypeError or ValueError for another table, or too small a max_distance.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """
    if not isinstance(table, Tensor) or not table.is_floating_point():
        raise TypeError("table must be a floating point Tensor, (num_buckets, H)")
    check_flags(bidirectional=bidirectional)
    check_sizes(max_distance=max_distance)
    check_sizes(least=0, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    if table.dim() != 2:
        raise ValueError(f"table has shape {tuple(table.shape)}, expected (num_buckets, H)")
    buckets = table.shape[0] // (2 if bidirectional else 1)
    exact = buckets // 2
    if exact < 1 or (bidirectional and table.shape[0] % 2):
        least = "an even number of at least 4" if bidirectional else "at least 2"
        raise ValueError(f"table has shape {tuple(table.shape)}, expected (num_buckets, H), {least} buckets")
    if max_distance <= exact:
        raise ValueError(f"max_distance must be more than {exact}, the buckets of one distance, got {max_distance}")
    distance = _distances(seqlen_q, seqlen_k, table.device)
    back = distance.abs() if bidirectional else (-distance).clamp(min=0)
    growth = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket = torch.where(back < exact, back, far)
    if bidirectional:
        bucket = bucket + buckets * (distance > 0)
    return torch.nn.functional.embedding(bucket, table).t()


def zero_distance(length: int, seqlen_q: int, seqlen_k: int) -> int:
    """The place of distance 0 in a relative_bias of this length: of one sequence Lq - 1, of packed ones the middle. The
    length distinguishes them, or both are equal."""
    return seqlen_q - 1 if length == seqlen_q + seqlen_k - 1 else length // 2


def _distances(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """n - m, in the order of relative_bias."""
    return torch.arange(1 - seqlen_q, seqlen_k, device=device)
