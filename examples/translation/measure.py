"""What a user asks of the fused path: is it faster than the reference path, and does it compute the same?"""

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from command_line import CommandError
from torch import Tensor

from fastattn import FusedTransformer, explain, use_backend
from translation.data import Batch, Example, collate
from translation.settings import Settings
from translation.training import build_model, build_optimizer, build_step, learning_rate, plan_epoch

WARM_UP = 2  # batches before the clock starts, on either path
CAPTURED_AFTER = 3  # steps on batches of one length with --graph, before graphs are replayed


class BackendError(CommandError):
    """The backend asked for cannot serve."""


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


def choose_backends(settings: Settings) -> dict[str, str]:
    """The backend that serves each op of the model of `settings`. BackendError, with every reason, where none can."""
    device, d, d_ff = settings.device, settings.d_model, settings.d_inner

    def empty(*shape: int) -> Tensor:
        dtype = torch.bfloat16 if settings.amp else torch.float32
        return torch.empty(shape, device=device, dtype=dtype, requires_grad=True)

    x, norm, q = empty(16, d), empty(d), empty(2, settings.heads, 8, d // settings.heads)
    tokens, embedding = torch.zeros(16, dtype=torch.int64, device=device), empty(8, d)
    calls = {
        "embed_layer_norm": (tokens, embedding, x.detach(), norm, norm),
        "attention": (q, q, q),
        "add_layer_norm": (x, x, norm, norm),
        "feed_forward": (x, empty(d_ff, d), empty(d_ff), empty(d, d_ff), norm),
        "linear_cross_entropy": (x, embedding, tokens),
    }
    chosen = {}
    for op, arguments in calls.items():
        with use_backend(settings.backend):
            explanation = explain(op, *arguments)
        if explanation.chosen is None:
            raise BackendError(str(explanation))
        chosen[op] = explanation.chosen
    return chosen


def first_batches(examples: Sequence[Example], settings: Settings, count: int) -> list[Batch]:
    """The batches that training begins with."""
    plan = plan_epoch(examples, settings, 0)
    device = torch.device(settings.device)
    return [collate([examples[i] for i in plan[number % len(plan)]], device) for number in range(count)]


def measure_speed(model: FusedTransformer, examples: Sequence[Example], settings: Settings) -> Speed:
    """Times whole training steps of a copy of `model` on either path.

    Both paths take the same batches in turns, so that other work on the machine slows both alike. With --graph the
    fused path's graphs are captured before the clock starts.
    """
    model = copy.deepcopy(model).train()
    optimizer = build_optimizer(model, settings.graph)
    rates: dict[str | None, list[float]] = {settings.backend: [], "reference": []}
    steps = {b: build_step(model, optimizer, settings, settings.graph and b != "reference") for b in rates}
    for number, batch in enumerate(first_batches(examples, settings, WARM_UP + settings.measure_steps)):
        for backend, path_rates in rates.items():
            with use_backend(backend):
                for _ in range(CAPTURED_AFTER if settings.graph else 0):
                    steps[backend](batch, 0.0)
                _wait(settings)
                started = time.perf_counter()
                steps[backend](batch, 0.0)
                _wait(settings)
            if number >= WARM_UP:
                path_rates.append(batch.tokens / (time.perf_counter() - started))
    fused, reference = statistics.median(rates[settings.backend]), statistics.median(rates["reference"])
    return Speed(fused=fused, reference=reference, steps=settings.measure_steps)


def compare_losses(examples: Sequence[Example], settings: Settings, vocabulary: int) -> Agreement:
    """Trains the first `settings.compare_steps` steps twice from the same weights, dropout off: on either path."""
    losses: dict[str | None, list[float]] = {settings.backend: [], "reference": []}
    for backend, path_losses in losses.items():
        model = build_model(settings, vocabulary, dropout=0.0).train()
        graph = settings.graph and backend != "reference"
        step = build_step(model, build_optimizer(model, graph), settings, graph)
        with use_backend(backend):
            for number, batch in enumerate(first_batches(examples, settings, settings.compare_steps), start=1):
                rate = learning_rate(number, settings.d_model, settings.warmup, settings.lr_scale)
                path_losses.append(step(batch, rate).item())
    fused, reference = losses[settings.backend], losses["reference"]
    largest = max(abs(a - b) / abs(b) for a, b in zip(fused, reference, strict=True))
    return Agreement(settings.compare_steps, largest, fused, reference)


def _wait(settings: Settings) -> None:
    if torch.device(settings.device).type == "cuda":
        torch.cuda.synchronize(settings.device)
