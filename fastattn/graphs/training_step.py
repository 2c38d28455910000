"""A whole training step in three CUDA graphs: forward with loss, backward, and clipping with the optimizer.

The first two are those of graphed_call.py, without autograd in between. The third reads the gradients, the optimizer's
state and the learning rates at fixed addresses. A step that graphs might not repeat runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fastattn.generate.loop import check_limits
from fastattn.graphs.capture import CapturedWork, CudaGraphs, without_autocast_cache
from fastattn.graphs.fingerprint import KNOWN
from fastattn.graphs.graphed_call import graphs_of
from fastattn.models import FusedTransformer
from fastattn.models.padding import PackedBatch
from fastattn.models.transformer import check_batch, check_gold
from fastattn.ops._checks import check_number

Gradients = dict[nn.Parameter, Tensor]


class GraphedStep:
    """step = GraphedStep(model, optimizer);  loss = step(src_seq, trg_seq, gold)

    Each call is one training step: the loss, the gradients, and the optimizer's update. The first two steps of a shape
    run eagerly, the third is captured, and later ones replay its graphs, with fresh dropout. What a graph cannot repeat
    runs eagerly, as everything does on a CPU or with the environment variable FASTATTN_GRAPHS=0:
    ``fastattn.explain(model)`` counts why. After a change of the model or of the optimizer it is captured again.

    model: in training or evaluation mode, on one device. A FusedTransformer's batches are padded or packed to few
        shapes, as by its graphs=True. Others are not: pad them to multiples of a length.
    optimizer: on a GPU made with capturable=True; Adam and AdamW also take fused=True, the fastest. Learning rates may
        be set before any step, as numbers, by a scheduler or as tensors.
    loss: a function of the model and of a step's arguments that returns the mean loss and holds no model: report.loss
        of accelerate. Unless given: model.loss of a FusedTransformer, of others what they return, or its ``loss``.
    max_grad_norm: clips the gradients' norm to this.
    accumulate: calls for each update of the weights. The gradient is that of the mean over all their tokens, as of one
        batch. In other models these are the ``labels`` other than -100; without labels all calls count the same.

    Attributes: each argument under its name; and `grad_norm`, the gradients' norm before clipping in the last update,
    a tensor () on the model's device, or None without max_grad_norm. Gradients are None between steps.
    For mixed precision open torch.autocast with bfloat16 around a step. float16 and its GradScaler are refused.
    Raises ValueError or TypeError for an optimizer that cannot be captured, RuntimeError if its capture fails.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Callable[..., Tensor] | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_limits(accumulate=accumulate)
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
            if not max_grad_norm > 0:
                raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        self._device = _check_optimizer(optimizer, model)
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.max_grad_norm, self.accumulate = max_grad_norm, accumulate
        self.grad_norm = None if max_grad_norm is None else torch.zeros((), device=self._device)
        self._is_fused = loss is None and isinstance(model, FusedTransformer)
        self._call = _mean_and_tokens if self._is_fused else partial(_mean_and_labels, loss or nn.Module.__call__)
        self._rates: list[Tensor] = []  # copies of the learning rates on the device, which graphs read
        self._sums: Gradients = {}  # of the gradients since the last update, if accumulate > 1, as the next two
        self._tokens, self._calls = torch.zeros((), dtype=torch.int64, device=self._device), 0
        self._updates: dict[Hashable, CapturedWork] = {}  # by the addresses of the gradients
        self._frozen: list[Any] = []  # what these depend on

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step, with the arguments of the loss except reduction. Tensors may be on any device.

        Returns the mean loss of this batch before the update, float32 () on the device, without waiting.
        """
        loss, tokens, gradients, graphs = self._backward(args, kwargs)
        with torch.autocast(self._device.type, enabled=False):
            if self.accumulate > 1:
                self._sums |= {p: torch.zeros_like(p) for p in gradients if p not in self._sums}
                torch._foreach_add_([self._sums[p] for p in gradients], list(gradients.values()))
                self._tokens += tokens
                self._calls = (self._calls + 1) % self.accumulate
                if self._calls:
                    return loss
                gradients = {p: total for p, total in self._sums.items() if p.requires_grad}
            self._copy_rates()
            self._update(gradients) if graphs is None else self._update_by_graph(gradients, graphs)
        return loss

    def _backward(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Gradients, CudaGraphs | None]:
        """The mean loss, the number of tokens, the gradients (with accumulate > 1 of the sum), and None if eager."""
        model, kind, padding = self.model, self._device.type, None
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError("float16 needs a GradScaler, which decides on the host whether to update: use bfloat16")
        if self._is_fused:
            args, kwargs, padding = _checked(model, *args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(self._device, non_blocking=True), (args, kwargs))
        owner = graphs_of(model, (*KNOWN, "transformers."))
        with torch.enable_grad():
            captured, *_ = owner.find(model, self._call, args, kwargs, padding)
            if captured is not None:
                captured.forward()
                loss, tokens = (t.clone() for t in captured.outputs)  # other graphs write to their memory
                captured.doutputs[0].copy_(tokens) if self.accumulate > 1 else captured.doutputs[0].fill_(1)
                captured.backward()
                return loss, tokens, dict(zip(captured.trained, captured.gradients, strict=True)), owner.graphs
            model.zero_grad()
            with owner.eagerly(), without_autocast_cache():
                loss, tokens = self._call(model, *args, **kwargs)
            with torch.autocast(kind, enabled=False):
                loss.backward(tokens.to(loss.dtype) if self.accumulate > 1 else None)
        gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
        model.zero_grad()
        return loss.detach(), tokens, gradients, None

    def _copy_rates(self) -> None:
        groups = self.optimizer.param_groups
        self._rates += [torch.zeros((), device=self._device) for _ in groups[len(self._rates) :]]
        for rate, group in zip(self._rates, groups, strict=True):
            rate.copy_(torch.as_tensor(group["lr"]), non_blocking=True)

    def _update(self, gradients: Gradients) -> None:
        """Clipping and the optimizer, with the rates on the device. The groups keep the user's."""
        groups = self.optimizer.param_groups
        for p, gradient in gradients.items():
            p.grad = gradient
        if self.accumulate > 1:
            torch._foreach_div_(list(gradients.values()), self._tokens.clamp(min=1).float())
            self._tokens.zero_()
        if self.max_grad_norm is not None:
            self.grad_norm.copy_(nn.utils.clip_grad_norm_(list(gradients), self.max_grad_norm))
        users = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            self.optimizer.step()
        finally:
            for group, rate in zip(groups, users, strict=True):
                group["lr"] = rate
        if self.accumulate > 1:
            torch._foreach_zero_(list(gradients.values()))
        self.optimizer.zero_grad()

    def _update_by_graph(self, gradients: Gradients, graphs: CudaGraphs) -> None:
        state, groups = self.optimizer.state, self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
        frozen = [graphs, id(state), len(state), settings]  # a changed model has other graphs
        if frozen != self._frozen:
            self._updates.clear()
            self._frozen, self._state = frozen, state  # kept alive, so that no other one has its id
        key = tuple([(id(p), gradient.data_ptr()) for p, gradient in gradients.items()])
        if key not in self._updates:
            hint = "with FASTATTN_GRAPHS=0 it runs eagerly, for a debugger"
            self._updates[key] = CapturedWork(partial(self._update, gradients), graphs, "the optimizer's step", hint)
        self._updates[key]()


def _mean_and_tokens(model: FusedTransformer, *batch: Any, **options: Any) -> Any:
    """The mean loss, float32, and the number of tokens that it is of."""
    is_packed = isinstance(batch[0], PackedBatch)
    tokens = ((batch[0].parts()[8] if is_packed else batch[2]) != model.trg_pad_idx).sum()
    loss = (model.packed_loss if is_packed else model.loss)(*batch, reduction="sum", **options)
    return loss / tokens.clamp(min=1), tokens


def _mean_and_labels(loss: Callable[..., Tensor], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out, labels = loss(model, *args, **kwargs), kwargs.get("labels")
    mean = (out if isinstance(out, Tensor) else out.loss).float()
    return mean, mean.new_ones((), dtype=torch.int64) if labels is None else (labels != -100).sum()


def _checked(model: FusedTransformer, src_seq: Any, trg_seq: Any, gold: Any, *options: Any, **named: Any) -> Any:
    """The arguments of the loss, packed or with gold as trg_seq, and their Padding. A replay checks nothing."""
    check_batch(src_seq, trg_seq)
    check_gold(gold, trg_seq)
    batch, padding = model.graph_batch(src_seq, trg_seq, gold.reshape(trg_seq.shape))
    return (*batch, *options), named, padding


def _check_optimizer(optimizer: Any, model: nn.Module) -> torch.device:
    """Raise if the optimizer cannot be captured; returns the parameters' device."""
    if not isinstance(optimizer, Optimizer):  # a GradScaler, for example
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError("optimizer has a hook, which a graph would not call")
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if p.requires_grad and p not in optimized:
            raise ValueError(f"optimizer does not have parameter {name}: pass it, or give it requires_grad_(False)")
    device = next(model.parameters()).device
    if CudaGraphs.can_capture(device) and not all(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} keeps its step count in Python, which a graph would repeat: "
            "construct it with capturable=True"
        )
    return device
