"""What a user asks of the fused path: is it faster than the reference path, and does it compute the same?"""

import copy
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn import Explanation, FusedTransformer, explain, use_backend
from translation.data import Batch, Example, collate, plan_batches
from translation.settings import Settings
from translation.training import build_model, build_optimizer, build_step, learning_rate

WARM_UP = 2  # batches before the clock starts, on either path
CAPTURED_AFTER = 3  # steps on batches of one length, with --graph


@dataclass(frozen=True)
class Speed:
    """Training tokens a second, source and target without padding: the median over the timed steps of either path."""

    fused: float
    reference: float
    steps: int


@dataclass(frozen=True)
class Agreement:
    """Losses of the first `steps` steps from equal weights, dropout off; differences are relative to the reference."""

    steps: int
    largest_relative_difference: float
    fused: list[float]
    reference: list[float]


def explain_backends(settings: Settings) -> dict[str, Explanation]:
    """For each op which backend serves the model of `settings`, and why not the others; asked on small tensors."""
    dtype = torch.bfloat16 if settings.amp else torch.float32

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=settings.device, dtype=dtype, requires_grad=True)

    d, d_ff = settings.d_model, settings.d_inner
    x, q = empty(16, d), empty(2, settings.heads, 8, d // settings.heads)
    tokens, embedding = torch.zeros(16, dtype=torch.int64, device=settings.device), empty(8, d)
    with use_backend(settings.backend):
        return {
            "embed_layer_norm": explain(
                "embed_layer_norm", tokens, embedding, x.detach(), empty(d), empty(d), dropout_p=settings.dropout
            ),
            "attention": explain("attention", q, q, q, dropout_p=settings.attn_dropout),
            "add_layer_norm": explain("add_layer_norm", x, x, empty(d), empty(d), dropout_p=settings.dropout),
            "feed_forward": explain(
                "feed_forward", x, empty(d_ff, d), empty(d_ff), empty(d, d_ff), empty(d), dropout_p=settings.dropout
            ),
            "linear_cross_entropy": explain("linear_cross_entropy", x, embedding, tokens),
        }


def first_batches(examples: Sequence[Example], settings: Settings, count: int) -> list[Batch]:
    """The batches that training begins with."""
    order = random.Random(f"epoch 0 of {settings.seed}")
    plan = plan_batches(examples, settings.batch_tokens, order, settings.length_step)
    device = torch.device(settings.device)
    return [collate([examples[i] for i in plan[number % len(plan)]], device) for number in range(count)]


def paths(settings: Settings) -> tuple[str | None, ...]:
    """The backends that are compared: the one that trained, and the reference."""
    return (settings.backend, "reference")


def of_path(settings: Settings, backend: str | None) -> Settings:
    """The reference path runs eagerly."""
    return dataclasses.replace(settings, graph=settings.graph and backend != "reference")


def measure_speed(model: FusedTransformer, examples: Sequence[Example], settings: Settings) -> Speed:
    """Times whole training steps of a copy of `model`, both paths on the same batches, taking turns so that whatever
    else the machine does disturbs both alike. With --graph the fused path's steps are graphs, captured before."""
    model = copy.deepcopy(model).train()
    optimizer = build_optimizer(model)
    steps = {backend: build_step(model, optimizer, of_path(settings, backend)) for backend in paths(settings)}
    rates: dict[str | None, list[float]] = {backend: [] for backend in steps}
    for number, batch in enumerate(first_batches(examples, settings, WARM_UP + settings.measure_steps)):
        for backend, seen in rates.items():
            with use_backend(backend):
                for _ in range(CAPTURED_AFTER if settings.graph else 0):
                    steps[backend](batch, 0.0)
                _wait(settings)
                started = time.perf_counter()
                steps[backend](batch, 0.0)
                _wait(settings)
            if number >= WARM_UP:
                seen.append(batch.tokens / (time.perf_counter() - started))
    fused, reference = statistics.median(rates[settings.backend]), statistics.median(rates["reference"])
    return Speed(fused=fused, reference=reference, steps=settings.measure_steps)


def compare_losses(examples: Sequence[Example], settings: Settings, vocabulary: int) -> Agreement:
    """Trains the first `settings.compare_steps` steps twice from the same weights, dropout off: on either path."""
    losses: dict[str | None, list[float]] = {backend: [] for backend in paths(settings)}
    for backend, seen in losses.items():
        model = build_model(settings, vocabulary, dropout=0.0).train()
        step = build_step(model, build_optimizer(model), of_path(settings, backend))
        with use_backend(backend):
            for number, batch in enumerate(first_batches(examples, settings, settings.compare_steps), start=1):
                rate = learning_rate(number, settings.d_model, settings.warmup, settings.lr_scale)
                seen.append(step(batch, rate).item())
    fused, reference = losses[settings.backend], losses["reference"]
    largest = max(abs(a - b) / abs(b) for a, b in zip(fused, reference, strict=True))
    return Agreement(settings.compare_steps, largest, fused, reference)


def _wait(settings: Settings) -> None:
    if torch.device(settings.device).type == "cuda":
        torch.cuda.synchronize(settings.device)
