"""Logits that are multiplied only where their values are read, so that a model's own loss is computed without them.

A language model's forward calls its head, reshapes the logits, shifts them against the labels or not, and passes both
to torch.nn.functional.cross_entropy. Within `lazy_logits(head)` the head returns LazyLogits, which remember its input.
Their cross_entropy is linear_cross_entropy, with the targets and the options that the model's own code passes. Every
other operator gets the logits as they are, so any model's loss is right, and most are computed without logits.
Nothing is set on the model, and other threads do not see it. torch.compile traces a plain product.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastattn._tracing import can_read_values
from fastattn.nn.leaves import product
from fastattn.ops import _autocast
from fastattn.ops.linear_cross_entropy import linear_cross_entropy


class _Request(threading.local):
    """How the loss of this thread's call is computed.

    head: returns LazyLogits. label_smoothing, num_items: instead of the model's own label smoothing and mean, unless
    None. losses: how many were computed so.
    """

    head: Head | None = None
    label_smoothing: float | None = None
    num_items: Tensor | int | None = None
    losses = 0

    def cross_entropy(self, compute: Callable[..., Tensor], reduction: str, label_smoothing: float) -> Tensor:
        """The loss that the model computes by these options."""
        if self.label_smoothing is not None:
            label_smoothing = self.label_smoothing
        self.losses += 1
        if self.num_items is None:
            return compute(reduction=reduction, label_smoothing=label_smoothing)
        if reduction != "mean":
            raise TypeError(f"num_items_in_batch is the number that a mean divides by, the model has {reduction=}")
        return compute(reduction="sum", label_smoothing=label_smoothing) / self.num_items


_request = _Request()


@contextmanager
def lazy_logits(head: Head | None, label_smoothing: float | None, num_items: Tensor | int | None) -> Iterator[_Request]:
    """Within it the head returns LazyLogits to this thread, and a model's loss is computed by these options.

    head: unmodified. If it is None, logits are computed, and the other options hold for every cross_entropy.
    """
    before = dict(_request.__dict__)
    _request.__dict__.update(head=head, label_smoothing=label_smoothing, num_items=num_items, losses=0)
    has_options = label_smoothing is not None or num_items is not None
    try:
        with _EveryCrossEntropy() if head is None and has_options else nullcontext():
            yield _request
    finally:
        _request.__dict__.clear()
        _request.__dict__.update(before)


class _EveryCrossEntropy(TorchFunctionMode):
    """Some microseconds for every operator of the model, so LazyLogits do without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        kwargs |= dict(zip(names, args, strict=False))
        options = kwargs.pop("reduction", "mean"), kwargs.pop("label_smoothing", 0.0)
        return _request.cross_entropy(partial(func, **kwargs), *options)


class Head(nn.Linear):
    """A linear map from hidden states (.., d) to logits (.., n_vocab)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's name
        if torch.compiler.is_compiling() or _request.head is not self:
            return super().forward(input)
        return LazyLogits.of(input, self.weight, self.bias, _autocast.dtype_under_autocast(input))


class LazyLogits(Tensor):
    """x weight^T + bias, not multiplied yet. The tensor itself is one number, expanded: its shape, dtype and device.

    x (.., d); weight (n_vocab, d); bias (n_vocab,) or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dense: Tensor | None

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> LazyLogits:
        number = torch.empty((), dtype=dtype, device=x.device)
        logits = number.expand(*x.shape[:-1], len(weight)).as_subclass(LazyLogits)
        logits.x, logits.weight, logits.bias, logits.dense = x, weight, bias, None
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_THE_TENSOR:
            return super().__torch_function__(func, types, args, kwargs)
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], LazyLogits) and args[0].dense is None:
            result = rule(func, *args, **kwargs)
            if result is not None:
                return result
        args, kwargs = torch.utils._pytree.tree_map_only(LazyLogits, _multiply, (args, kwargs))
        return func(*args, **kwargs)


def _multiply(logits: LazyLogits) -> Tensor:
    """The logits, kept: the model may change them in place."""
    if logits.dense is None:
        logits.dense = product(logits.x, logits.weight, logits.bias).to(logits.dtype)
    return logits.dense


# What an operator makes of LazyLogits without multiplying them; None where it has to. func: the operator.


def _cast(func: Callable[..., Tensor], logits: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """float(), to(..), contiguous() and clone(). Their result is known from one number."""
    number = func(torch.empty((), dtype=logits.dtype, device=logits.device), *args, **kwargs)
    if number.device != logits.device:
        return None
    return LazyLogits.of(logits.x, logits.weight, logits.bias, number.dtype)


def _reshape(func: Callable[..., Tensor], logits: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """view, reshape and flatten that keep the last dimension."""
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1] or math.prod(shape) == 0:
        return None
    x = logits.x.reshape(*shape[:-1], logits.x.shape[-1])
    return LazyLogits.of(x, logits.weight, logits.bias, logits.dtype)


def _select(func: Callable[..., Tensor], logits: LazyLogits, index: Any) -> LazyLogits | None:
    """logits[index] by slices of the dimensions before the last."""
    index = index if isinstance(index, tuple) else (index,)
    *_, last = index
    keeps_last = last is ... or last == slice(None) or (... not in index and len(index) < logits.dim())
    if not keeps_last or any(i is not ... and not isinstance(i, slice) for i in index):
        return None
    return LazyLogits.of(logits.x[index], logits.weight, logits.bias, logits.dtype)


def _add_bias(func: Callable[..., Tensor], logits: LazyLogits, other: Any) -> LazyLogits | None:
    """logits + bias, bias (n_vocab,) with any leading dimensions of 1."""
    n_vocab = len(logits.weight)
    if not isinstance(other, Tensor) or other.dim() == 0 or other.shape[-1] != n_vocab or other.numel() != n_vocab:
        return None
    if other.dim() > logits.dim() or other.dtype != logits.weight.dtype:
        return None
    # Nothing but zeros, as in most checkpoints, would be a pass over the logits. A CPU reads them without waiting.
    if can_read_values(other) and not other.requires_grad and not bool(other.any()):
        return logits
    bias = other.flatten() if logits.bias is None else logits.bias + other.flatten()
    return LazyLogits.of(logits.x, logits.weight, bias, logits.dtype)


def _cross_entropy(
    func: Callable[..., Tensor],
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
        return None
    if logits.dim() > 2 or logits.shape[:-1] != target.shape:  # (.., n_vocab, L), for instance
        return None
    inputs = logits.x, logits.weight, target, logits.bias
    compute = partial(linear_cross_entropy, *inputs, ignore_index=ignore_index)
    return _request.cross_entropy(compute, reduction, label_smoothing)


_RULES: dict[Any, Callable[..., Tensor | None]] = {F.cross_entropy: _cross_entropy, Tensor.__getitem__: _select}
_RULES |= dict.fromkeys((Tensor.float, Tensor.to, Tensor.type_as, Tensor.contiguous, Tensor.clone), _cast)
_RULES |= dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape), _reshape)
_RULES |= dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _add_bias)
_ABOUT_THE_TENSOR = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}
_ABOUT_THE_TENSOR |= {getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")}
