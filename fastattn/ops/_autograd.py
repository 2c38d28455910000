"""How an op whose backends are kernels is registered: its forward and backward are written once and run in two ways.

Eager calls go from a torch.autograd.Function straight to the launch. Calls that torch.compile or torch.export traces
become a torch.library operator for each direction. Eager calls do not use these: an operator costs three times as much
on the host.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import is_traced, refuse_second_derivative
from fastattn.backends import implementation
from fastattn.masks import from_operator_args, to_operator_args


class Operator:
    """An op, as a subclass with the static methods below; `apply` runs it.

    Arguments are tensors, None, numbers, strings or lists; their type annotations are the operator's schema. The last
    argument, `backend`, and an argument `masks` are other objects: see _LibraryOperator.

        forward(*op_args) -> outputs                     launches; the first `results` outputs are the op's results
        save(ctx, op_args, outputs)                      keeps what the backward needs, as in torch.autograd.Function
        backward(ctx, gradients, *dresults) -> tuple     calls gradients(...) with what was kept; a dresult may be None
        gradients(*...) -> tuple                         launches; gradients of the first `inputs` arguments, or None
        forward_fake(*op_args), gradients_fake(*...)     shapes, dtypes and strides of the outputs, for tracing

    An output may be one of the arguments; it is then returned as a view, or as a copy by the traced operator.
    """

    results: int  # how many outputs of forward are results; the others are kept for the backward
    outputs: int
    inputs: int  # how many of the first arguments may get a gradient

    forward: Callable[..., tuple[Tensor, ...]]
    forward_fake: Callable[..., tuple[Tensor, ...]]
    save: Callable[..., None]
    backward: Callable[..., tuple[Tensor | None, ...]]
    gradients: Callable[..., tuple[Tensor | None, ...]]
    gradients_fake: Callable[..., tuple[Tensor | None, ...]]

    _eager: type[torch.autograd.Function]
    _traced: _LibraryOperator

    def __init_subclass__(cls, *, name: str) -> None:
        """name: of the operator, and of the op in the registry of backends."""
        cls._eager = _eager_function(cls)
        traced_gradients = _LibraryOperator(f"{name}_backward", name, cls.gradients, cls.gradients_fake, cls.inputs)
        cls._traced = traced = _LibraryOperator(name, name, cls.forward, cls.forward_fake, cls.outputs)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            cls.save(ctx, traced.op_args(inputs), output)
            ctx.set_materialize_grads(False)
            ctx.no_grads = [_no_grad(t) for t in inputs[cls.inputs :]]

        def backward(ctx: Any, *doutputs: Tensor | None) -> tuple[Any, ...]:
            return *_gradients(cls, ctx, traced_gradients, doutputs[: cls.results]), *ctx.no_grads

        traced.operator.register_autograd(backward, setup_context=setup_context)

    @classmethod
    def apply(cls, *op_args: Any) -> tuple[Tensor, ...]:
        """The op's results, differentiable once in the first `inputs` arguments."""
        if is_traced():
            return cls._traced(*op_args)[: cls.results]
        if not torch.is_grad_enabled():  # without the Function: about 33 % less host time
            return cls._results(cls.forward(*op_args), op_args[: cls.inputs])
        # PyTorch examines every argument of a Function: those that have no gradient are one.
        return cls._eager.apply(*op_args[: cls.inputs], op_args[cls.inputs :])

    @classmethod
    def _results(cls, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """An argument must not be returned as it is."""
        return tuple([t.view_as(t) if _is_among(t, inputs) else t for t in outputs[: cls.results]])


def _eager_function(op: type[Operator]) -> type[torch.autograd.Function]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            *inputs, others = given
            op_args = (*inputs, *others)
            outputs = op.forward(*op_args)
            op.save(ctx, op_args, outputs)
            ctx.set_materialize_grads(False)
            return op._results(outputs, inputs)

        @staticmethod
        def backward(ctx: Any, *dresults: Tensor | None) -> tuple[Any, ...]:
            refuse_second_derivative(*dresults)
            return *_gradients(op, ctx, op.gradients, dresults), None

    return Eager


class _LibraryOperator:
    """A function as a torch.library operator with a fixed number of outputs; None among them is an empty tensor there.

    The operator's arguments are the function's, except for two types that torch.library does not support. Instead of
    `backend: Implementation`, the last one, it gets the backend's name. Instead of `masks: list[PreparedMask]` it gets
    `masks: list[Tensor], mask_numbers: list[int]`.
    """

    def __init__(
        self, name: str, op_name: str, function: Callable[..., Any], fake: Callable[..., Any], outputs: int
    ) -> None:
        signature = inspect.signature(function)
        *parameters, backend = signature.parameters.values()
        names = [p.name for p in parameters]
        self.op_name, self.masks = op_name, names.index("masks") if "masks" in names else None
        if self.masks is not None:
            tensors = parameters[self.masks].replace(annotation=list[Tensor])
            numbers = tensors.replace(name="mask_numbers", annotation=list[int])
            parameters[self.masks : self.masks + 1] = tensors, numbers

        @functools.wraps(function)
        def prototype() -> None: ...

        prototype.__dict__["__signature__"] = signature.replace(
            parameters=[*parameters, backend.replace(annotation=str)],
            return_annotation=GenericAlias(tuple, (Tensor,) * outputs),
        )
        schema = torch.library.infer_schema(prototype, mutates_args=())
        run = self._returning_new_tensors(function)
        self.operator = torch.library.custom_op(f"fastattn::{name}", run, mutates_args=(), schema=schema)
        self.operator.register_fake(self._returning_new_tensors(fake))

    def __call__(self, *op_args: Any) -> tuple[Tensor, ...]:
        *given, backend = op_args
        if self.masks is not None:
            before, masks, after = given[: self.masks], given[self.masks], given[self.masks + 1 :]
            given = [*before, *to_operator_args(masks), *after]  # in torch 2.9's traces *given is a tuple
        return self.operator(*given, backend.name)

    def op_args(self, given: Sequence[Any]) -> list[Any]:
        """The function's arguments from the operator's."""
        *op_args, backend = given
        if self.masks is not None:
            op_args[self.masks : self.masks + 2] = [from_operator_args(*op_args[self.masks : self.masks + 2])]
        return [*op_args, implementation(self.op_name, backend)]

    def _returning_new_tensors(self, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        """torch.library forbids that an operator returns an argument, or one tensor twice: these are cloned."""

        def wrapped(*given: Any) -> tuple[Tensor, ...]:
            like = next(t for t in given if isinstance(t, Tensor))
            made: list[Tensor] = []
            for t in function(*self.op_args(given)):
                t = like.new_empty(0) if t is None else t
                made.append(t.clone() if _is_among(t, (*given, *made)) else t)
            return tuple(made)

        return wrapped


def _no_grad(argument: Any) -> list[None] | None:
    """What a backward returns to torch.library for an argument without a gradient: for a list of tensors a list."""
    if isinstance(argument, list) and all(isinstance(t, Tensor) for t in argument):
        return [None] * len(argument)
    return None


def _is_among(t: Tensor, others: Sequence[Any]) -> bool:
    return any([t is other for other in others])


def _gradients(
    op: type[Operator], ctx: Any, gradients: Callable[..., Any], dresults: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Of the first `inputs` arguments, those that are needed."""
    if not any([t is not None for t in dresults]):
        return (None,) * op.inputs
    grads = op.backward(ctx, gradients, *dresults)
    return tuple([grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)])
