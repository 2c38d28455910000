"""Where calls of ops pass `fastattn.shadow`, while it compares a step with the reference path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastattn.backends import Implementation
from fastattn.backends.reference import attention as reference
from fastattn.masks import AttentionMask

current: Any = None  # the Shadow, during the steps that it compares; set by fastattn/check/shadow.py


def run(
    op_name: str,
    compute: Callable[..., Any],
    chosen: Implementation,
    formula: Callable[..., Any],
    op_args: tuple[Any, ...],
    owners: Sequence[Tensor | None] = (),
) -> Any:
    """compute(chosen, *op_args): the op's results, by the chosen backend.

    formula: the same by the reference, of op_args.     owners: parameters of its layer, for the name of the layer.
    """
    if current is None:
        return compute(chosen, *op_args)
    return current.run(op_name, compute, chosen, formula, op_args, owners)


def attention_formula(chosen: Implementation) -> Callable[..., tuple[Tensor, ...]]:
    """The reference's attention, out, lse and the weights, with the dropout that the backend draws."""
    return getattr(chosen.module, "formula", _attention)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, *options: Any) -> tuple[Tensor, ...]:
    return reference.attention(q, k, v, mask, *options[:4], return_weights=any(options[5:]))
