"""Logits that are multiplied only where their values are read, so that a model's own loss is computed without them.

A language model's forward calls its head, reshapes the logits, shifts them against the labels or not, and passes both
to torch.nn.functional.cross_entropy. Within `lazy_logits(head)` the head returns LazyLogits, which remember its input.
Their cross_entropy is linear_cross_entropy, with the targets and the options that the model's own code passes.

Views, casts and copies of LazyLogits are LazyLogits. Whatever else touches one of them, a hook or an operator, makes
them multiply: from then on all of them read, and edit, the same memory, as views of a tensor do, and cross_entropy is
PyTorch's. Autograd sees a product from the beginning, so it makes no difference where it is multiplied.
"""

from __future__ import annotations

import copyreg
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fastattn._tracing import can_read_values, is_transformed
from fastattn.nn import fusible
from fastattn.nn.leaves import product
from fastattn.ops import _autocast
from fastattn.ops.linear_cross_entropy import linear_cross_entropy


class _Request(threading.local):
    """How the loss of this thread's call is computed.

    head: returns LazyLogits. label_smoothing, num_items: instead of the model's own label smoothing and mean, unless
    None. losses: how many were computed so. products: of the head, while anything refers to them.
    makes_view: whether operators on LazyLogits are those of a view. modes: what looks for the cross_entropy of another
    tensor than LazyLogits, unless None. computes: whether a cross_entropy that has its options is being computed.
    """

    head: nn.Linear | None = None
    label_smoothing: float | None = None
    num_items: Tensor | int | None = None
    losses = 0
    products: WeakSet[_Product] | tuple[()] = ()
    makes_view = computes = False
    modes: ExitStack | None = None

    def watch(self) -> None:
        """Every operator from now on takes some microseconds."""
        if self.modes is not None:
            self.modes.enter_context(_EveryCrossEntropy())
            self.modes = None

    def cross_entropy(self, kwargs: dict[str, Any]) -> Tensor:
        """By the options of the request, if it is over the classes of the head, or if there is no head."""
        logits, divisor = kwargs["input"], None
        if self.head is None or logits.shape[min(1, logits.dim() - 1)] == len(self.head.weight):
            if self.label_smoothing is not None:
                kwargs["label_smoothing"] = self.label_smoothing
            if (divisor := self.num_items) is not None:
                if (reduction := kwargs.get("reduction", "mean")) != "mean":
                    raise TypeError(f"num_items_in_batch is what a mean divides by, the model has {reduction=}")
                kwargs["reduction"] = "sum"
            self.losses += 1
        self.computes = True
        try:
            loss = F.cross_entropy(**kwargs)
        finally:
            self.computes = False
        return loss if divisor is None else loss / divisor


_request = _Request()
_calls: Counter[nn.Linear] = Counter()  # of report.loss that run, by their heads
_lock = threading.RLock()


@contextmanager
def lazy_logits(
    head: nn.Linear | None, label_smoothing: float | None, num_items: Tensor | int | None
) -> Iterator[_Request]:
    """Within it the head returns LazyLogits to this thread, and a model's loss is computed by these options.

    head: unmodified. If it is None, logits are computed, and the other options hold for every cross_entropy.
    """
    before = dict(_request.__dict__)
    _request.__dict__.update(head=head, label_smoothing=label_smoothing, num_items=num_items, losses=0)
    _request.products = WeakSet()
    has_options = label_smoothing is not None or num_items is not None
    try:
        with _lock:
            if head is not None:
                _calls[head] += 1
                head.__class__ = Head
        with ExitStack() as modes:
            _request.modes = modes if has_options else None
            if head is None:
                _request.watch()
            yield _request
            for kept in list(_request.products):  # by the model, which may read them after its weights have changed
                if kept.is_unchanged():
                    kept.multiply()
    finally:
        with _lock:
            if head is not None:
                _calls[head] -= 1
                if not _calls[head]:
                    del _calls[head]
                    head.__class__ = nn.Linear
        _request.__dict__.clear()
        _request.__dict__.update(before)


class _EveryCrossEntropy(TorchFunctionMode):
    """Gives cross_entropy the options of the request. LazyLogits do so without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.cross_entropy or isinstance((named := _by_name(args, kwargs or {}))["input"], LazyLogits):
            return func(*args, **(kwargs or {}))
        return _request.cross_entropy(named)


_OPTIONS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of cross_entropy."""
    return kwargs | dict(zip(_OPTIONS, args, strict=False))


# Whether PyTorch's linear with a bias returns a view, as it does up to 2.13. Hooks and edits depend on it.
_LINEAR_IS_A_VIEW = F.linear(torch.zeros(1, 1, 1), torch.zeros(1, 1, requires_grad=True), torch.zeros(1))._is_view()


class Head(nn.Linear):
    """The class of a model's head, a plain nn.Linear, while report.loss runs. Other threads get the logits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's name
        if torch.compiler.is_compiling() or _request.head is not self or not _may_be_lazy(input, self):
            return super().forward(input)
        dtype = _autocast.dtype_under_autocast(input)
        if self.bias is None or not _LINEAR_IS_A_VIEW:
            return LazyLogits.of(input, self.weight, self.bias, dtype, dtype)
        logits = LazyLogits.of(input.flatten(0, -2), self.weight, self.bias, dtype, dtype)
        return logits.view(*input.shape[:-1], -1)

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy is made for longer
        return copyreg.__newobj__, (nn.Linear,), self.__dict__  # type: ignore[attr-defined]


fusible.READ[Head] = fusible.READ[nn.Linear]


def _may_be_lazy(x: Tensor, head: nn.Linear) -> bool:
    inputs = [t for t in (x, head.weight, head.bias) if t is not None]
    dtypes = {_autocast.dtype_under_autocast(t) for t in inputs}
    are_plain = all([type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in inputs])
    return are_plain and len(dtypes) == 1 and x.dim() > 1 and x.numel() > 0 and _sees_no_operators()


def _sees_no_operators() -> bool:
    """Whether nothing reads or repeats single operators: no transform, no mode, and no checkpoint."""
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not has_hooks and not is_transformed() and torch._C._len_torch_dispatch_stack() == 0


class _Product:
    """x weight^T + bias, computed at most once.

    inputs: x (.., d), contiguous; weight (n_vocab, d); bias (n_vocab,) or None.
    dtype: of the product.     cast: of the result.
    """

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor | None], dtype: torch.dtype, cast: torch.dtype) -> None:
        self.inputs, self.dtype, self.cast = inputs, dtype, cast
        self.device, self.autocast = inputs[0].device, _autocast.autocast_dtype(inputs[0].device)
        self.versions = self._versions()
        self.result: Tensor | None = None

    def _versions(self) -> list[int]:
        return [0 if t is None else t._version for t in self.inputs]

    def is_unchanged(self) -> bool:
        return self.versions == self._versions()

    def check(self) -> None:
        if not self.is_unchanged():
            raise RuntimeError(
                "the input, the weight or the bias of the model's head was changed in place before its logits were "
                "read, which report.loss computes as late as that: use model(**batch).loss"
            )

    def multiply(self) -> Tensor:
        with _lock:
            if self.result is None:
                self.check()
                _request.watch()
                x, weight, bias = [None if t is None else t.detach().to(self.dtype) for t in self.inputs]
                with torch.inference_mode(False), torch.no_grad(), _autocast.no_autocast(self.device):
                    self.result = product(x, weight, bias).to(self.cast)  # type: ignore[arg-type]
            return self.result


class _Linear(torch.autograd.Function):
    """LazyLogits, to autograd a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: _Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = source.dtype
        return LazyLogits(source, torch.empty(*x.shape[:-1], len(weight), dtype=source.cast, device="meta"))

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, dlogits = [t.to(ctx.dtype) for t in (*ctx.saved_tensors, *dresults)]
        rows, (dx, dweight, dbias, _) = dlogits.flatten(0, -2), ctx.needs_input_grad
        return (
            dlogits @ weight if dx else None,
            rows.mT @ x.flatten(0, -2) if dweight else None,
            rows.sum(0) if dbias else None,
            None,
        )


class LazyLogits(Tensor):
    """A view of a product, which may not be computed yet.

    meta: a tensor of its shape and strides, without memory.
    history: whether it requires a gradient as a view or copy; the result of a user's Function may do so too.
    """

    source: _Product
    meta: Tensor
    history: bool | None

    def __new__(cls, source: _Product, meta: Tensor) -> LazyLogits:
        options = dict(strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype)
        logits = Tensor._make_wrapper_subclass(cls, meta.shape, device=source.device, **options)  # type: ignore
        logits.source, logits.meta, logits.history = source, meta, None
        return logits

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, cast: torch.dtype) -> LazyLogits:
        x = x.contiguous()
        source = _Product((x, weight, bias), dtype, cast)
        logits = _Linear.apply(x, weight, bias, source)
        logits.history = logits.requires_grad
        if isinstance(_request.products, WeakSet):
            _request.products.add(source)
        return logits

    def copy(self, inputs: tuple[Tensor, Tensor, Tensor | None], cast: torch.dtype) -> LazyLogits | None:
        """A copy that shares no memory. inputs: of these logits."""
        return LazyLogits.of(*inputs, self.source.dtype, cast) if self.meta.clone().is_contiguous() else None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """x (.., d) of these logits (.., n_vocab), weight and bias.

        None where the loss of their product may be another than the loss of these: after anything has touched the
        product, and where the gradient or the dtype would be another."""
        source, meta, (x, weight, bias) = self.source, self.meta, self.source.inputs
        if source.result is not None or self.requires_grad is not self.history or not _sees_no_operators():
            return None
        needs_gradient = any([t is not None and t.requires_grad for t in source.inputs])
        if torch.is_grad_enabled() and needs_gradient and not self.history:
            return None
        (*shape, last), (*strides, step), start = meta.shape, meta.stride(), meta.storage_offset()
        n_vocab, d = weight.shape
        keeps_rows = last == n_vocab and step == 1 and not any([n % n_vocab for n in (start, *strides)])
        if not shape or not keeps_rows or source.autocast != _autocast.autocast_dtype(source.device):
            return None
        source.check()
        if meta.is_contiguous() and meta.numel() * d == x.numel() * n_vocab:
            return x.view(*shape, d), weight, bias
        rows = [n // n_vocab * d for n in strides]
        return x.as_strided((*shape, d), (*rows, 1), x.storage_offset() + start // n_vocab * d), weight, bias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            kwargs = _by_name(args, kwargs)
            if (_request.label_smoothing, _request.num_items) != (None, None) and not _request.computes:
                return _request.cross_entropy(kwargs)
            args = (kwargs.pop("input"),)
        if (rule := _RULES.get(func)) is not None and isinstance(logits := args[0], LazyLogits):
            inputs = logits.inputs()
            result = None if inputs is None else rule(func, logits, inputs, *args[1:], **kwargs)
            if result is not None:
                return result
        if func not in _ABOUT_THE_TENSOR:
            tree_map_only(LazyLogits, lambda logits: logits.source.multiply(), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READS_MEMORY:
                args, kwargs = tree_map_only(LazyLogits, torch.ops.aten.alias, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        kwargs = kwargs or {}
        if _request.makes_view and args[0].source.result is None:
            return LazyLogits(args[0].source, func(args[0].meta, *args[1:], **kwargs))
        read: dict[int, LazyLogits] = {}

        def view_of(logits: LazyLogits) -> Tensor:
            meta, result = logits.meta, logits.source.multiply()
            view = result.as_strided(meta.shape, meta.stride(), meta.storage_offset())
            read[id(view)] = logits
            return view

        args, kwargs = tree_map_only(LazyLogits, view_of, (args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable and isinstance(args[0], (list, tuple)):  # PyTorch leaves it to the inner operators
            torch.autograd.graph.increment_version([read[id(t)] for t in args[0] if id(t) in read])
        return tree_map_only(Tensor, lambda t: read.get(id(t), t), result)  # what was written in place


# What LazyLogits are after an operator; None where their product has to be computed. func: the operator.
# inputs: of the logits.


def _cast(func: Callable[..., Tensor], logits: LazyLogits, inputs: Any, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """float(), to(..) and type_as(..). Their result is known from one number."""
    before = torch.empty((), dtype=logits.meta.dtype, device=logits.source.device)
    number = func(before, *args, **kwargs)
    if number is before:
        return logits
    is_up = number.dtype is torch.float32 and before.dtype.itemsize == 2
    if number.device != before.device or not is_up or "memory_format" in kwargs:
        return None
    return logits.copy(inputs, number.dtype)


def _view(func: Callable[..., Tensor], logits: LazyLogits, inputs: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """view(..), logits[..] and others that return a view, or copy where there is none."""
    if func is Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else args
        if not all(i is None or i is ... or type(i) in (int, slice) for i in index):
            return None
    if any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values())):
        return None
    meta = func(logits.meta, *args, **kwargs)
    if meta is logits.meta:
        return logits
    if not meta._is_view():
        return logits.copy(inputs, meta.dtype) if meta.shape == logits.shape else None
    _request.makes_view = True
    try:
        with torch._C.DisableTorchFunctionSubclass():
            view = func(logits, *args, **kwargs)
    finally:
        _request.makes_view = False
    if isinstance(view, LazyLogits):
        view.history = torch.is_grad_enabled() and view.requires_grad
    return view


def _add_bias(
    func: Callable[..., Tensor], logits: LazyLogits, inputs: Any, *args: Any, **kwargs: Any
) -> LazyLogits | None:
    """logits + bias, bias (n_vocab,) with any leading dimensions of 1."""
    (x, weight, bias), other = inputs, args[0] if len(args) == 1 and not kwargs else None
    if type(other) not in (Tensor, nn.Parameter) or other.dim() == 0 or other.dim() > logits.dim():
        return None
    n_vocab = len(weight)
    if other.shape[-1] != n_vocab or other.numel() != n_vocab or other.dtype != weight.dtype:
        return None
    # Nothing but zeros, as in most checkpoints, would be a pass over the logits. A CPU reads them without waiting.
    if not can_read_values(other) or other.requires_grad or bool(other.any()):
        bias = other.flatten() if bias is None else bias + other.flatten()
    return logits.copy((x, weight, bias), torch.promote_types(logits.meta.dtype, other.dtype))


def _cross_entropy(
    func: Callable[..., Tensor],
    logits: LazyLogits,
    inputs: Any,
    *,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    **options: Any,
) -> Tensor | None:
    if weight is not None or size_average is not None or reduce is not None or type(target) is not Tensor:
        return None
    if logits.dim() > 2 or target.is_floating_point() or logits.shape[:-1] != target.shape:  # (.., n_vocab, L), say
        return None
    x, w, bias = inputs
    return linear_cross_entropy(x, w, target, bias, **options)


_RULES: dict[Any, Callable[..., Tensor | None]] = {F.cross_entropy: _cross_entropy}
_RULES |= dict.fromkeys((Tensor.float, Tensor.to, Tensor.type_as), _cast)
_RULES |= dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape), _view)
_RULES |= dict.fromkeys((Tensor.__getitem__, Tensor.contiguous, Tensor.clone, torch.clone), _view)
_RULES |= dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _add_bias)
_ABOUT_THE_TENSOR = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.stride}
_ABOUT_THE_TENSOR |= {Tensor.is_contiguous}
_NAMES = ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad")
_ABOUT_THE_TENSOR |= {getattr(Tensor, n).__get__ for n in _NAMES}
_READS_MEMORY = {Tensor.data_ptr, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.untyped_storage, Tensor.storage}
_READS_MEMORY |= {Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__dlpack__, Tensor.__repr__}
_READS_MEMORY |= {getattr(Tensor, "data").__get__}  # noqa: B009  for mypy
