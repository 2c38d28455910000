"""A whole training step in CUDA graphs: forward, loss, backward, clipping and optimizer as one launch from the host.

The step of a small model takes hundreds of launches, and the host issues them more slowly than a GPU runs them. A CUDA
graph issues them all at once, but repeats exactly what was captured: shapes, addresses and every number from Python. So
batches are padded to a few shapes, and inputs and learning rates are copied to fixed addresses. Captured operators draw
the dropout seeds on the device. A model or optimizer that cannot be captured is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastattn.backends import requested
from fastattn.generate.loop import check_limits
from fastattn.graphs.capture import CapturedWork, CudaGraphs, held_parameters, stream_override
from fastattn.models import FusedTransformer
from fastattn.models.transformer import check_batch, check_gold
from fastattn.ops._checks import check_flags, check_number
from fastattn.ops.linear_cross_entropy import SmoothOver, smooth_over_all

BUCKETS = (16, 32, 64, 128)


class GraphedStep:
    """step = GraphedStep(model, optimizer, batch_tokens=8192);  loss = step(src_seq, trg_seq, gold)

    Each call is one training step of a FusedTransformer: its loss, the gradients, and the optimizer's update. A batch
    is padded to the smallest bucket that it fits. Padding is masked and its gold ignored, so it changes neither loss
    nor update. A bucket's first two steps run eagerly, the third is captured, and all later ones replay the graph.
    Every call is a full step on its own batch, with fresh dropout.

    model: in training or evaluation mode, on one GPU, without hooks and without pack_padding.
    optimizer: made with capturable=True; Adam and AdamW also take fused=True, the fastest. Learning rates may be set
        before any step, as numbers, by a scheduler or as tensors; the other settings must not change.
    buckets: lengths of source and target to pad to; 16, 32, 64 and 128 unless given. Those that are longer than the
        model's n_position become n_position.
    batch_tokens: padded tokens of source, or of target, in a batch: a bucket of length L takes batch_tokens // L
        sentences, and `rows` returns how many. Or batch_size: the number of sentences in every bucket. Empty sentences
        fill up smaller batches.
    label_smoothing, smooth_over: as in ``FusedTransformer.loss``.
    max_grad_norm: clips the gradients' norm to this.
    accumulate: calls for each update of the weights. The gradient is that of the mean over all their tokens, as of one
        batch.
    autocast: torch.bfloat16 runs forward and loss under torch.autocast. Do not open torch.autocast around a step.
    capture: False runs the same padded step eagerly, also on a CPU, for debugging.

    Attributes: each argument under its name, with buckets as a rising tuple; and `grad_norm`, the gradients' norm
    before clipping in the last update, a tensor () on the model's device, or None without max_grad_norm.

    All buckets share one memory pool, about as large as the largest bucket needs. Gradients are None between steps;
    with accumulate > 1 they are buffers that the step owns.
    Raises ValueError or TypeError naming what cannot be captured, at construction or at a step. Before torch 2.13 the
    step that would capture raises RuntimeError while a result of an earlier step is alive that has a gradient.
    """

    def __init__(
        self,
        model: FusedTransformer,
        optimizer: Optimizer,
        *,
        buckets: Sequence[int] | None = None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
        label_smoothing: float = 0.0,
        smooth_over: SmoothOver = "all",
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        capture: bool = True,
    ) -> None:
        _check_model(model)
        check_flags(capture=capture)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = _check_optimizer(optimizer, model, capture)
        self.buckets = _checked_buckets(buckets, model.encoder.position_enc.pos_table.size(1))
        if (batch_tokens is None) == (batch_size is None):
            raise ValueError("give either batch_tokens or batch_size")
        check_limits(**{"batch_size": batch_size} if batch_tokens is None else {"batch_tokens": batch_tokens})
        check_limits(accumulate=accumulate)
        smooth_over_all(label_smoothing, smooth_over, 1)  # raises now what it would raise at the first step
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
            if not max_grad_norm > 0:
                raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        if autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast must be torch.bfloat16 or None, got {autocast}; float16 needs a GradScaler, which decides "
                "on the host whether to update"
            )
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.batch_tokens, self.batch_size = batch_tokens, batch_size
        self.label_smoothing, self.smooth_over = label_smoothing, smooth_over
        self.max_grad_norm, self.autocast, self.capture = max_grad_norm, autocast, capture
        self.grad_norm = None if max_grad_norm is None else torch.zeros((), device=self._device)
        self._gradients = [torch.zeros_like(p) for p in self._parameters] if accumulate > 1 else None
        self._tokens = torch.zeros((), dtype=torch.int64, device=self._device)  # real ones, since the last update
        self._calls = 0  # since the last update
        self.reset()

    def rows(self, length: int) -> int:
        """How many sentences a step takes if the longest, source or target, has this many tokens."""
        bucket = self._bucket_length(length)
        return self.batch_size or max(self.batch_tokens // bucket, 1)

    def reset(self) -> None:
        """Drop all graphs. Call it after a change that a step refuses, and after a change of a dropout rate."""
        self._inputs: dict[int, _Inputs] = {}
        self._captured_work: dict[Any, CapturedWork] = {}
        self._graphs = CudaGraphs(self._device) if self.capture else None
        self._learning_rates = _LearningRates(self.optimizer, self._device)
        self._optimizer_state = self.optimizer.state
        self._captured_settings = self._current_settings()

    def __call__(self, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
        """One step. src_seq: integer (B, Ls); trg_seq: integer (B, Lt); gold: as trg_seq or flat; on any device.

        Returns the mean loss of this batch's tokens before the update, float32 () on the device, without waiting.
        """
        self._check_unchanged()
        inputs = self._copy_batch(src_seq, trg_seq, gold)
        self._learning_rates.copy_to_device()
        # Each combination of these has a graph of its own.
        key = (inputs, self.model.training, requested(None)[0])
        if self.accumulate == 1:

            def step() -> None:
                self._backward(inputs)
                self._update()

            self._run(key, step)
            return inputs.loss.clone()
        self._run(key, lambda: self._backward(inputs))
        self._calls += 1
        loss = inputs.loss.clone()
        if self._calls == self.accumulate:
            self._calls = 0
            self._run("update", self._update)
        return loss

    def _run(self, key: Any, work: Callable[[], Any]) -> None:
        """work(), by the graph of this key unless capture=False."""
        if self._graphs is None:
            work()
            return
        if key not in self._captured_work:
            hint = "GraphedStep(..., capture=False) runs the same step eagerly, for a debugger"
            self._captured_work[key] = CapturedWork(work, self._graphs, "the training step", hint)
        if self._captured_work[key].captures_next and stream_override() is None:
            self._check_nothing_is_held()
        self._captured_work[key]()

    def _check_nothing_is_held(self) -> None:
        """Without PyTorch's setting such a capture would fail without a reason, and the stream would be unusable."""
        if held := held_parameters(self.model.named_parameters()):
            more = f" and {len(held) - 1} more" if len(held) > 1 else ""
            raise RuntimeError(
                "the training step cannot be captured while a result of an earlier step is alive that has a gradient: "
                f"a loss or logits, for example. It holds {held[0]}{more}. Delete it or detach() it and call the step "
                "again, or use torch 2.13 or newer, which allows it"
            )

    # --- the step itself, which graphs capture ------------------------------------------------------------------------

    def _attach_gradients(self) -> None:
        """Set gradients to the buffers of accumulation, or to None, so that the backward makes new tensors."""
        for i, p in enumerate(self._parameters):
            p.grad = None if self._gradients is None else self._gradients[i]

    def _backward(self, inputs: _Inputs) -> None:
        """Loss and gradients of the padded batch."""
        self._attach_gradients()
        is_whole_update = self.accumulate == 1
        precision = nullcontext() if self.autocast is None else torch.autocast(self._device.type, self.autocast)
        with torch.enable_grad(), precision:
            loss = self.model.loss(
                inputs.src_seq,
                inputs.trg_seq,
                inputs.gold,
                self.label_smoothing,
                smooth_over=self.smooth_over,
                reduction="mean" if is_whole_update else "sum",
            )
        loss.backward()
        loss = loss.detach()
        if not is_whole_update:
            tokens = (inputs.gold != self.model.trg_pad_idx).sum()
            self._tokens += tokens
            loss = loss / tokens
        inputs.loss.copy_(loss)

    def _update(self) -> None:
        """Clipping and the optimizer; gradients are None or zero afterwards."""
        if self._gradients is not None:
            self._attach_gradients()
            torch._foreach_div_(self._gradients, self._tokens.clamp(min=1).to(self._gradients[0].dtype))
            self._tokens.zero_()
        if self.max_grad_norm is not None:
            self.grad_norm.copy_(torch.nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm))
        with self._learning_rates.use_device_lr():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self._gradients is None)

    # --- batches ------------------------------------------------------------------------------------------------------

    def _bucket_length(self, length: int) -> int:
        index = bisect_left(self.buckets, length)
        if index == len(self.buckets):
            raise ValueError(f"a sentence of {length} tokens is longer than the last of buckets {self.buckets}")
        return self.buckets[index]

    def _copy_batch(self, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> _Inputs:
        """Copy the batch, padded, into the tensors that its bucket's graph reads."""
        check_batch(src_seq, trg_seq)
        check_gold(gold, trg_seq)
        for name, t in (("src_seq", src_seq), ("trg_seq", trg_seq), ("gold", gold)):
            if t.is_floating_point() or t.dtype == torch.bool:
                raise TypeError(f"{name} has dtype {t.dtype}, expected integers")
        longest = max(src_seq.shape[1], trg_seq.shape[1])
        length, rows = self._bucket_length(longest), self.rows(longest)
        if len(src_seq) > rows:
            raise ValueError(
                f"src_seq has {len(src_seq)} sentences; of {longest} tokens, in the bucket of {length}, {rows} are "
                "taken: plan batches by step.rows(length), or raise batch_tokens or batch_size"
            )
        if length not in self._inputs:
            src, trg, following = (torch.empty(rows, length, dtype=torch.int64, device=self._device) for _ in range(3))
            loss = torch.empty((), dtype=torch.float32, device=self._device)
            self._inputs[length] = _Inputs(src, trg, following, loss)
        inputs = self._inputs[length]
        batch = (src_seq, trg_seq, gold.reshape(trg_seq.shape))
        pads = (self.model.src_pad_idx, self.model.trg_pad_idx, self.model.trg_pad_idx)
        for padded, t, pad in zip((inputs.src_seq, inputs.trg_seq, inputs.gold), batch, pads, strict=True):
            padded.fill_(pad)[: t.shape[0], : t.shape[1]].copy_(t, non_blocking=True)
        return inputs

    # --- what a graph repeats and a step must not change --------------------------------------------------------------

    def _current_settings(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups]
        settings = {f"param_groups[{i}][{k!r}]": v for i, group in enumerate(groups) for k, v in group.items()}
        return settings | {
            "the optimizer's state, as by load_state_dict,": self.optimizer.state is self._optimizer_state,
            "an address of a parameter or buffer": [
                t.data_ptr() for t in (*self.model.parameters(), *self.model.buffers())
            ],
            "which parameters require grad": [p.requires_grad for p in self.model.parameters()],
        }

    def _check_unchanged(self) -> None:
        if torch.is_autocast_enabled(self._device.type):
            raise ValueError("a step under torch.autocast might use casts of old weights: use autocast= instead")
        now = self._current_settings()
        for name, before in self._captured_settings.items():
            if now.get(name) != before:
                raise ValueError(
                    f"{name} changed since graphs were captured, and they would use the old value; call reset() to "
                    "capture again (a parameter that now requires grad: make another GraphedStep)"
                )


@dataclass(eq=False)
class _Inputs:
    """The batch that a bucket's graphs read, int64 (sentences, length) each, and the loss that they write."""

    src_seq: Tensor
    trg_seq: Tensor
    gold: Tensor
    loss: Tensor


class _LearningRates:
    """Copies of the learning rates on the device, which graphs read. The optimizer's groups keep the user's rates."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.groups = optimizer.param_groups
        self.on_device = [torch.zeros((), device=device) for _ in self.groups]
        self.copied: list[Any] = [None] * len(self.groups)

    def copy_to_device(self) -> None:
        for i, group in enumerate(self.groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self.on_device[i].copy_(rate, non_blocking=True)
            elif rate != self.copied[i]:
                self.on_device[i].fill_(rate)
            self.copied[i] = None if isinstance(rate, Tensor) else rate

    @contextmanager
    def use_device_lr(self) -> Iterator[None]:
        """Within it the optimizer's groups hold the rates on the device."""
        user_rates = [group["lr"] for group in self.groups]
        for group, rate in zip(self.groups, self.on_device, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(self.groups, user_rates, strict=True):
                group["lr"] = rate


def _checked_buckets(buckets: Sequence[int] | None, n_position: int) -> tuple[int, ...]:
    """In rising order, without duplicates. n_position: the model's longest sequence."""
    if buckets is None:
        return tuple(sorted({min(length, n_position) for length in BUCKETS}))
    if isinstance(buckets, str) or not isinstance(buckets, Iterable):
        raise TypeError(f"buckets must be a sequence of integers, got {type(buckets).__name__}")
    buckets = tuple(buckets)
    if not buckets:
        raise ValueError("buckets must have at least one length")
    for i, length in enumerate(buckets):
        check_limits(**{f"buckets[{i}]": length})
        if length > n_position:
            raise ValueError(f"buckets[{i}] is {length}, and the model has n_position={n_position}")
    return tuple(sorted(set(buckets)))


def _check_model(model: Any) -> None:
    """Raise if the model cannot be captured."""
    if not isinstance(model, FusedTransformer):
        raise TypeError(
            f"model must be a FusedTransformer itself, got {type(model).__name__}; what wraps one, such as "
            "DistributedDataParallel or torch.compile, runs Python code at every step, which a graph does not repeat"
        )
    if model.pack_padding:
        raise ValueError("model has pack_padding=True, which waits for the device to count tokens; use buckets instead")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        if any(getattr(module, kind) for kind in hooks):
            raise ValueError(f"model has a hook at {name or 'its root'}, which a graph would not call")
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"parameter {name} has a hook, which a graph would not call")


def _check_optimizer(optimizer: Any, model: FusedTransformer, capture: bool) -> torch.device:
    """Raise if the optimizer cannot be captured; returns the parameters' device."""
    if not isinstance(optimizer, Optimizer):
        hint = ": a GradScaler decides on the host whether to update" if "Scaler" in type(optimizer).__name__ else ""
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}{hint}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError("optimizer has a hook, which a graph would not call")
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if p.requires_grad and p not in optimized:
            raise ValueError(f"optimizer does not have parameter {name}: pass it, or give it requires_grad_(False)")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"model must be on one device, got {', '.join(sorted(map(str, devices)))}")
    (device,) = devices
    if not capture:
        return device
    if device.type != "cuda":
        raise ValueError(f"model is on {device}, and CUDA graphs need a GPU; capture=False runs the same step eagerly")
    for group in optimizer.param_groups:
        if not group.get("capturable"):
            raise ValueError(
                f"optimizer {type(optimizer).__name__} keeps its step count in Python, which a graph would repeat: "
                "construct it with capturable=True"
            )
    return device
