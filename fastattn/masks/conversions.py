"""Lengths, prefixes and documents as the tensors that AttentionMask takes. Nothing waits for a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn._tracing import can_read_values
from fastattn.masks._checks import check_sizes


def lengths_to_padding(lengths: Tensor, seqlen: int) -> Tensor:
    """key_padding or query_padding, bool (B, seqlen): a position is real if it is less than the length.

    lengths: integers (B,), at most seqlen. TypeError or ValueError for others; values are checked on a CPU only.
    """
    return _before("lengths", lengths, seqlen)


def prefix_lm_mask(prefix_lengths: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """attn_mask of a prefix language model, bool (B, 1, Lq, Lk): causal, and the prefix is visible to every query.

    prefix_lengths: integers (B,), at most seqlen_k. TypeError or ValueError as of `lengths_to_padding`.
    """
    check_sizes(least=0, seqlen_q=seqlen_q)
    prefix = _before("prefix_lengths", prefix_lengths, seqlen_k)
    causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=prefix_lengths.device).tril()
    return causal | prefix[:, None, None]


def documents_to_cu_seqlens(document_ids: Tensor) -> Tensor:
    """cu_seqlens_q, int64 (n + 1,): a document begins where the id changes. An id that comes back begins another one.

    document_ids: integers (L,) or (1, L), one for each token. TypeError or ValueError for others.
    Where the number of documents cannot be read without waiting, there are L sequences, of which the last are empty.
    """
    _check_integers("document_ids", document_ids)
    if document_ids.dim() not in (1, 2) or (document_ids.dim() == 2 and document_ids.shape[0] != 1):
        advice = "Documents are packed in one row: concatenate the rows of a batch first"
        raise ValueError(f"document_ids has shape {tuple(document_ids.shape)}, expected (L,) or (1, L). {advice}")
    ids = document_ids.flatten()
    L, position = ids.shape[0], torch.arange(ids.shape[0], device=ids.device)[1:]
    changes = ids[1:] != ids[:-1]
    begins = position[changes] if can_read_values(ids) else position.where(changes, L).sort().values
    return F.pad(F.pad(begins, (1, 0)), (0, 1), value=L)


def _before(name: str, t: Tensor, seqlen: int) -> Tensor:
    _check_integers(name, t)
    check_sizes(least=0, seqlen=seqlen)
    if t.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (B,), one length for each sequence")
    if can_read_values(t) and ((t < 0) | (t > seqlen)).any():
        raise ValueError(f"{name} is {t.tolist()}, expected 0 to the sequence length {seqlen}")
    return torch.arange(seqlen, device=t.device) < t[:, None]


def _check_integers(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if t.dtype == torch.bool or t.is_floating_point() or t.is_complex():
        raise TypeError(f"{name} has dtype {t.dtype}, expected integers")
