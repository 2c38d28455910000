"""One registration of an op whose backends are kernels: its forward and backward are given once and run in two ways.

Eager calls go from a torch.autograd.Function straight to the launch. Calls that torch.compile or torch.export traces
become a torch.library operator for each direction, because an operator costs three times as much on the host.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import needs_formula


class Operator:
    """An op, as a subclass with the static methods below; `call` runs it. Arguments are tensors, None, numbers, strings
    or lists; their type annotations are the operator's schema.

        forward(*arguments) -> outputs                   launches; the first `results` outputs are the op's results
        save(ctx, arguments, outputs)                    keeps what the backward needs, as in torch.autograd.Function
        backward(ctx, gradients, *dresults) -> tuple     calls gradients(...) with what was kept; a dresult may be None
        gradients(*...) -> tuple                         launches; gradients of the first `inputs` arguments, or None
        formula_gradients(ctx, *dresults) -> tuple       as backward, by PyTorch's operators: see needs_formula
        forward_fake(*arguments), gradients_fake(*...)   shapes, dtypes and strides of the outputs, for tracing

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
    formula_gradients: Callable[..., tuple[Tensor | None, ...]]
    gradients_fake: Callable[..., tuple[Tensor | None, ...]]

    _eager: type[torch.autograd.Function]
    _traced: Callable[..., tuple[Tensor, ...]]

    def __init_subclass__(cls, *, name: str) -> None:
        cls._eager = _eager_function(cls)
        traced_gradients = _library_operator(f"{name}_backward", cls.gradients, cls.gradients_fake, cls.inputs)
        cls._traced = _library_operator(name, cls.forward, cls.forward_fake, cls.outputs)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            cls.save(ctx, inputs, output)
            ctx.set_materialize_grads(False)
            ctx.of_lists = [_none_for_each(t) for t in inputs]

        def backward(ctx: Any, *doutputs: Tensor | None) -> tuple[Any, ...]:
            grads = _gradients(cls, ctx, traced_gradients, doutputs[: cls.results])
            return *grads, *ctx.of_lists[cls.inputs :]

        cls._traced.register_autograd(backward, setup_context=setup_context)

    @classmethod
    def call(cls, *arguments: Any, remember: Any = None) -> tuple[Tensor, ...]:
        """The op's results, differentiable in the first `inputs` arguments, eagerly even twice.

        remember: what formula_gradients finds as ctx.remembered.
        """
        if torch.compiler.is_compiling():
            return cls._traced(*arguments)[: cls.results]
        return cls._eager.apply(*arguments, remember)


def _eager_function(op: type[Operator]) -> type[torch.autograd.Function]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            *arguments, ctx.remembered = given
            outputs = op.forward(*arguments)
            op.save(ctx, arguments, outputs)
            ctx.set_materialize_grads(False)
            # An argument must not be returned as it is.
            return tuple(t.view_as(t) if _is_among(t, arguments) else t for t in outputs[: op.results])

        @staticmethod
        def backward(ctx: Any, *dresults: Tensor | None) -> tuple[Any, ...]:
            if needs_formula(*dresults):
                grads = op.formula_gradients(ctx, *dresults)
            else:
                grads = _gradients(op, ctx, op.gradients, dresults)
            return *grads, *(None,) * (len(ctx.needs_input_grad) - op.inputs)

    return Eager


def _library_operator(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], outputs: int
) -> torch.library.CustomOpDef:
    """The function as an operator with that many outputs; None among them is an empty tensor there."""

    def returning_new_tensors(run: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        """An operator returns no tensor twice, and none that it was given."""

        def wrapped(*arguments: Any) -> tuple[Tensor, ...]:
            like = next(t for t in arguments if isinstance(t, Tensor))
            made: list[Tensor] = []
            for t in run(*arguments):
                t = like.new_empty(0) if t is None else t
                made.append(t.clone() if _is_among(t, (*arguments, *made)) else t)
            return tuple(made)

        return wrapped

    @functools.wraps(function)
    def prototype() -> None: ...

    prototype.__signature__ = inspect.signature(function).replace(return_annotation=tuple[(Tensor,) * outputs])
    schema = torch.library.infer_schema(prototype, mutates_args=())
    run = returning_new_tensors(function)
    operator = torch.library.custom_op(f"fastattn::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(returning_new_tensors(fake))
    return operator


def _none_for_each(argument: Any) -> list[None] | None:
    """The gradient that a torch.library operator wants of an argument that has none: a list of tensors wants a list."""
    if isinstance(argument, list) and all(isinstance(t, Tensor) for t in argument):
        return [None] * len(argument)
    return None


def _is_among(t: Tensor, others: tuple[Any, ...]) -> bool:
    return any(t is other for other in others)


def _gradients(
    op: type[Operator], ctx: Any, gradients: Callable[..., Any], dresults: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Of the first `inputs` arguments, those that are needed."""
    if all(t is None for t in dresults):
        return (None,) * op.inputs
    grads = op.backward(ctx, gradients, *dresults)
    return tuple(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False))
