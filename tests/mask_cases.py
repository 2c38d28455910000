"""Every kind of mask, as keyword arguments of AttentionMask, for the mask tests and the attention tests alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Kwargs = dict[str, Any]


def prefix(lengths: list[int], total: int) -> Tensor:
    """Bool (len(lengths), total): sample b has lengths[b] real tokens."""
    return torch.arange(total)[None, :] < torch.tensor(lengths)[:, None]


def offsets(*lengths: int) -> Tensor:
    """cu_seqlens of sequences with these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def scattered(Lq: int, Lk: int, keys: int, seed: int = 0) -> Tensor:
    """Bool (1, 1, Lq, Lk): that many keys are visible to each query, anywhere."""
    g = torch.Generator().manual_seed(seed)
    places = torch.rand(Lq, Lk, generator=g).argsort(-1)[:, :keys]
    return torch.zeros(1, 1, Lq, Lk, dtype=torch.bool).scatter_(3, places[None, None], True)


def in_blocks(B: int, H: int, Lq: int, Lk: int) -> Tensor:
    """Bool (B, H, Lq, Lk): most blocks of 64 x 64 are visible or masked as a whole."""
    g = torch.Generator().manual_seed(3)
    blocks = torch.rand(B, H, -(-Lq // 64), -(-Lk // 64), generator=g).repeat_interleave(64, 2).repeat_interleave(64, 3)
    share = torch.where(blocks < 0.4, 1, torch.where(blocks < 0.8, 0, 0.5))[..., :Lq, :Lk]
    return torch.rand(B, H, Lq, Lk, generator=g) < share


def with_gap(Lq: int, Lk: int) -> Tensor:
    """Bool (1, 1, Lq, Lk): the queries from 64 to 127 see only the first 64 and the last keys."""
    keep = torch.ones(1, 1, Lq, Lk, dtype=torch.bool)
    keep[..., 64:128, 64:-30] = False
    return keep


def after_full_tiles() -> Tensor:
    """Bool (1, 8, 128, 512): heads 0, 1, 4 and 5 see all; the others 256 keys, by half of the queries.

    Where two blocks share the heads, each of them computes two of both kinds in turns.
    """
    keep = torch.ones(1, 8, 128, 512, dtype=torch.bool)
    keep[:, 2:4, :64] = keep[:, 6:, 64:] = False
    keep[:, 2:4, :, 256:] = keep[:, 6:, :, 256:] = False
    return keep


def mask_kinds(B: int, H: int, Lq: int, Lk: int, device: torch.device | str = "cpu") -> dict[str, Kwargs]:
    """name -> AttentionMask arguments that fit (B, H, Lq, Lk). Many leave a row, a head or a sample with nothing."""
    g = torch.Generator().manual_seed(7)

    def coin(*shape: int, share: float = 0.6) -> Tensor:
        return torch.rand(*shape, generator=g) < share

    key_lengths = [max(Lk - 3 * b, 0) for b in range(B)]
    query_lengths = [max(Lq - 2 * b - 1, 0) for b in range(B)]
    holes = coin(B, Lk)
    if B > 1:
        holes[-1] = False  # nothing is visible in the last sample
    full = coin(B, H, Lq, Lk)
    full[0, 0, Lq // 2] = False  # one empty row
    if B * H > 1:
        full[-1, -1] = False  # one empty head of one sample
    # Packed sequences: unequal splits of queries and keys, and an empty one on either side.
    packed_q = offsets(Lq // 3, 0, Lq // 4, Lq - Lq // 3 - Lq // 4) if Lq > 1 else offsets(0, 0, Lq, 0)
    packed_k = offsets(Lk // 4, Lk // 3, 0, Lk - Lk // 4 - Lk // 3)
    kinds: dict[str, Kwargs] = {
        "none": {},
        "causal": {"is_causal": True},
        "causal_bottom_right": {"is_causal": True, "align": "bottom_right"},
        "window": {"window": (2, 1)},
        "window_bottom_right": {"window": (3, 0), "align": "bottom_right"},
        "causal_window": {"is_causal": True, "window": (1, 2)},
        "key_padding": {"key_padding": prefix(key_lengths, Lk)},
        "key_padding_holes": {"key_padding": holes.mT.contiguous().mT},
        "key_padding_shared": {"key_padding": coin(1, Lk)},
        "query_padding": {"query_padding": prefix(query_lengths, Lq).mT.contiguous().mT},  # lengths vary fastest
        "attn_mask": {"attn_mask": full},
        "attn_mask_2d": {"attn_mask": coin(Lq, Lk)},
        "attn_mask_per_sample": {"attn_mask": coin(B, 1, Lq, Lk)},
        "attn_mask_keys": {"attn_mask": coin(B, 1, 1, Lk)},
        "attn_mask_queries": {"attn_mask": coin(1, H, Lq, 1)},
        "attn_mask_head": {"attn_mask": coin(B, H, 1, 1)},
        "nothing": {"attn_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)},
        "segments": {"cu_seqlens_q": packed_q, "cu_seqlens_k": packed_k},
        "segments_causal": {"cu_seqlens_q": packed_q.long(), "cu_seqlens_k": packed_k.long(), "is_causal": True},
        "segments_and_padding": {  # the first and the last position are padding
            "cu_seqlens_q": offsets(Lq // 2, Lq - Lq // 2),
            "cu_seqlens_k": offsets(Lk // 3, Lk - Lk // 3),
            "query_padding": prefix([Lq - 1], Lq) & ~prefix([1], Lq),
            "key_padding": prefix([Lk - 1], Lk) & ~prefix([1], Lk),
            "is_causal": True,
            "align": "bottom_right",
        },
        "segments_window_bottom_right": {
            "cu_seqlens_q": packed_q,
            "cu_seqlens_k": packed_k,
            "window": (2, 0),
            "align": "bottom_right",
        },
        "decoder": {
            "is_causal": True,
            "key_padding": prefix(key_lengths, Lk),
            "query_padding": prefix(query_lengths, Lq),
        },
        "everything": {
            "attn_mask": coin(B, H, Lq, Lk, share=0.8),
            "key_padding": coin(B, Lk, share=0.8),
            "query_padding": coin(B, Lq, share=0.8),
            "is_causal": True,
            "window": (Lk // 2, None),
            "align": "bottom_right",
            "cu_seqlens_q": offsets(Lq // 2, Lq - Lq // 2),
            "cu_seqlens_k": offsets(Lk // 2, Lk - Lk // 2),
        },
    }
    return {
        name: {key: value.to(device) if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        for name, kwargs in kinds.items()
    }


KINDS = tuple(mask_kinds(2, 2, 4, 4))


def packed_and_padded(Lq: int, Lk: int, device: torch.device | str = "cpu") -> Kwargs:
    """All but an attn_mask at once, for two samples; in one of them some keys are visible to padded queries alone."""
    tensors = {
        "key_padding": torch.arange(Lk).expand(2, Lk) % 7 != 3,
        "query_padding": prefix([Lq, Lq * 2 // 3], Lq),
        "cu_seqlens_q": offsets(Lq // 2, 0, Lq - Lq // 2),
        "cu_seqlens_k": offsets(Lk // 3, Lk // 5, Lk - Lk // 3 - Lk // 5),
    }
    window = {"window": (Lk // 4, 2), "align": "bottom_right"}
    return {name: t.to(device) for name, t in tensors.items()} | window


def is_visible(kwargs: Kwargs, b: int, h: int, i: int, j: int, Lq: int, Lk: int) -> bool:
    """Is key j visible to query i? Written from the docstring of AttentionMask, one pair at a time."""
    if kwargs.get("cu_seqlens_q") is not None:
        starts_q = kwargs["cu_seqlens_q"].tolist()
        starts_k = kwargs.get("cu_seqlens_k", kwargs["cu_seqlens_q"]).tolist()
        for n in range(len(starts_q) - 1):
            if starts_q[n] <= i < starts_q[n + 1] and starts_k[n] <= j < starts_k[n + 1]:
                Lq, Lk = starts_q[n + 1] - starts_q[n], starts_k[n + 1] - starts_k[n]
                local_i, local_j = i - starts_q[n], j - starts_k[n]
                break
        else:
            return False
    else:
        local_i, local_j = i, j
    ahead = local_j - local_i - (Lk - Lq if kwargs.get("align") == "bottom_right" else 0)
    left, right = kwargs.get("window") or (None, None)
    if kwargs.get("is_causal") and ahead > 0:
        return False
    if left is not None and ahead < -left:
        return False
    if right is not None and ahead > right:
        return False
    for name, place in (("key_padding", j), ("query_padding", i)):
        if (t := kwargs.get(name)) is not None and not t[b if t.shape[0] > 1 else 0, place].item():
            return False
    if (t := kwargs.get("attn_mask")) is not None:
        places = (b, h, i, j)[4 - t.dim() :]
        return bool(t[tuple(p if n > 1 else 0 for p, n in zip(places, t.shape, strict=True))].item())
    return True


def brute_force(kwargs: Kwargs, B: int, H: int, Lq: int, Lk: int) -> Tensor:
    """The mask by loops, bool (B, H, Lq, Lk)."""
    keep = torch.zeros(B, H, Lq, Lk, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for i in range(Lq):
                for j in range(Lk):
                    keep[b, h, i, j] = is_visible(kwargs, b, h, i, j, Lq, Lk)
    return keep
