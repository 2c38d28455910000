"""How an op whose backends are kernels is registered: its forward and backward are written once and run in two ways.

Eager calls go from a torch.autograd.Function straight to the launch. Calls that torch.compile or torch.export traces
become a torch.library operator for each direction. Eager calls do not use these: an operator costs three times as much
on the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fastattn._tracing import is_traced, refuse_second_derivative
from fastattn.backends import Implementation, implementation
from fastattn.backends.constants import PACKAGE
from fastattn.masks import from_operator_args, to_operator_args

Grads = Sequence[Tensor | None]
Needs = Sequence[bool]


class Operator:
    """An op, as a subclass with the static methods below; `apply` runs it.

    A call is one value, a NamedTuple: its differentiable tensors, then other tensors, then numbers, strings and lists.
    The annotations of its fields are the operator's schema. A field `masks` holds PreparedMasks: see _LibraryOperator.

        forward(call, backend) -> outputs              launches; the first `results` outputs are the op's results
        keep(call, outputs) -> (call, saved)           what the backward gets: the call, in which tensors that it does
                                                       not read may be others or None, and what the forward saved for it
        gradients(dresults, call, saved, needs, backend)   launches; a dresult may be None. Returns the gradients of the
                                                       differentiable tensors. needs: which of them need one, and more
        forward_fake, gradients_fake                   shapes, dtypes and strides of the outputs, for tracing

    An output may be one of the arguments; it is then returned as a view, or as a copy by the traced operator.
    """

    results: int  # how many outputs of forward are results; the others are kept for the backward
    outputs: int
    inputs: int  # how many of the call's tensors may get a gradient
    call: type[Any]

    forward: Callable[[Any, Implementation], tuple[Tensor, ...]]
    forward_fake: Callable[[Any, Implementation], tuple[Tensor | None, ...]]
    keep: Callable[[Any, tuple[Tensor, ...]], tuple[Any, Grads]]
    gradients: Callable[[Grads, Any, Grads, Needs, Implementation], Grads]
    gradients_fake: Callable[[Grads, Any, Grads, Needs, Implementation], Grads]

    _tensors: int
    _eager: type[torch.autograd.Function]
    _traced: _LibraryOperator

    def __init_subclass__(cls, *, name: str) -> None:
        """name: of the operator, and of the op in the registry of backends."""
        fields = get_type_hints(cls.call)
        cls._tensors = sum([hint in (Tensor, Tensor | None) for hint in fields.values()])
        cls._eager = _eager_function(cls)

        def as_call(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: function(cls.call(*given[:-1]), given[-1])

        def as_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                *fields, saved, needs, backend = given[cls.results :]
                return function(given[: cls.results], cls.call(*fields), saved, needs, backend)

            return run

        schema = {f"dresult{i}": Tensor | None for i in range(cls.results)}
        schema |= fields | {"saved": list[Tensor], "needs": list[bool]}
        functions = as_gradients(cls.gradients), as_gradients(cls.gradients_fake)
        traced_gradients = _LibraryOperator(f"{name}_backward", name, schema, *functions, cls.inputs)
        functions = as_call(cls.forward), as_call(cls.forward_fake)
        cls._traced = traced = _LibraryOperator(name, name, fields, *functions, cls.outputs)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            *call, backend = traced.op_args(inputs)
            _save(cls, ctx, cls.call(*call), backend, output)
            ctx.no_grads = [_no_grad(t) for t in inputs[cls.inputs :]]

        def backward(ctx: Any, *dresults: Tensor | None) -> tuple[Any, ...]:
            def gradients(dresults: Grads, call: Any, saved: Grads, needs: Needs, backend: Any) -> Grads:
                return traced_gradients(*dresults, *call, list(saved), list(needs[: cls.inputs]), backend)

            grads = _gradients(cls, ctx, gradients, dresults[: cls.results])
            needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
            return *needed, *ctx.no_grads

        traced.operator.register_autograd(backward, setup_context=setup_context)

    @classmethod
    def apply(cls, call: Any, backend: Implementation) -> tuple[Tensor, ...]:
        """The op's results, differentiable once in the first `inputs` tensors of the call."""
        if is_traced():
            return cls._traced(*call, backend)[: cls.results]
        if not torch.is_grad_enabled():  # without the Function: about 33 % less host time
            return cls._results(cls.forward(call, backend), call[: cls.inputs])
        # PyTorch examines every argument of a Function: those that have no gradient are one.
        return cls._eager.apply(*call[: cls.inputs], (call, backend))

    @staticmethod
    def backward(gradients: Callable[..., Grads], dresults: Grads, call: Any, saved: Grads, *others: Any) -> Grads:
        """The backward, outside of the traced operator: gradients are those of this class, or that operator."""
        return gradients(dresults, call, saved, *others)

    @classmethod
    def _results(cls, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """An argument must not be returned as it is."""
        return tuple([t.view_as(t) if _is_among(t, inputs) else t for t in outputs[: cls.results]])


def _eager_function(op: type[Operator]) -> type[torch.autograd.Function]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            call, backend = given[-1]
            outputs = op.forward(call, backend)
            _save(op, ctx, call, backend, outputs)
            return op._results(outputs, given)

        @staticmethod
        def backward(ctx: Any, *dresults: Tensor | None) -> tuple[Any, ...]:
            refuse_second_derivative(*dresults)
            return *_gradients(op, ctx, op.gradients, dresults), None

    return Eager


def _save(op: type[Operator], ctx: Any, call: Any, backend: Implementation, outputs: tuple[Tensor, ...]) -> None:
    kept, saved = op.keep(call, outputs)
    ctx.save_for_backward(*kept[: op._tensors], *saved)
    ctx.options = kept[op._tensors :], backend
    ctx.set_materialize_grads(False)


def _gradients(op: type[Operator], ctx: Any, gradients: Callable[..., Grads], dresults: Grads) -> Grads:
    """Of the first `inputs` tensors of the call."""
    if not any([t is not None for t in dresults]):
        return (None,) * op.inputs
    kept, (options, backend) = ctx.saved_tensors, ctx.options  # activation checkpoints give the tensors once
    call, saved = op.call(*kept[: op._tensors], *options), kept[op._tensors :]
    return op.backward(gradients, dresults, call, saved, ctx.needs_input_grad, backend)


class _LibraryOperator:
    """A function as a torch.library operator with a fixed number of outputs; None among them is an empty tensor there.

    The operator's arguments are the function's, except for two types that torch.library does not support. Instead of
    `backend: Implementation`, the last one, it gets the backend's name. Instead of `masks: list[PreparedMask]` it gets
    `masks: list[Tensor], mask_numbers: list[int]`.
    """

    def __init__(
        self,
        name: str,
        op_name: str,
        arguments: dict[str, Any],
        function: Callable[..., Any],
        fake: Callable[..., Any],
        outputs: int,
    ) -> None:
        """arguments: the types of the function's arguments but `backend`."""
        self.op_name = op_name
        self.masks = list(arguments).index("masks") if "masks" in arguments else None
        types: dict[str, Any] = {}
        for argument, kind in arguments.items():
            types |= {"masks": list[Tensor], "mask_numbers": list[int]} if argument == "masks" else {argument: kind}

        def prototype() -> None: ...

        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        prototype.__dict__["__signature__"] = inspect.Signature(
            [inspect.Parameter(n, named, annotation=kind) for n, kind in (types | {"backend": str}).items()],
            return_annotation=GenericAlias(tuple, (Tensor,) * outputs),
        )
        schema = torch.library.infer_schema(prototype, mutates_args=())
        run = self._returning_new_tensors(function)
        self.operator = torch.library.custom_op(f"{PACKAGE}::{name}", run, mutates_args=(), schema=schema)
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
