"""What shows only after many steps, or in several threads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from families import tiers
from model_checks import NO_DROPOUT, Batch, batch, fused

from fastattn import FusedTransformer, generate, use_backend

Step = Callable[[int], Any]
SEARCH = {"bos_idx": 2, "eos_idx": 3, "max_len": 8}


def a_batch(number: int) -> Batch:
    """Lengths differ from batch to batch."""
    return batch(number, 3, 2 + number * 7 % 29, 2 + number * 5 % 29)


def training(model: FusedTransformer) -> Step:
    optimizer = torch.optim.Adam(model.parameters())

    def step(number: int) -> None:
        model.loss(*a_batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decoding(model: FusedTransformer) -> Step:
    return lambda number: generate.beam_search(model, a_batch(number)[0], beam_size=2, **SEARCH)


KINDS: dict[str, Callable[[], Step]] = {
    "training": lambda: training(fused(n_layers=1)),
    "decoding": lambda: decoding(fused().eval()),
}


@pytest.mark.parametrize("kind", tiers(KINDS, "training"))
def test_no_cache_grows_with_the_shapes_of_calls(kind: str) -> None:
    """Every call has other lengths. 100 new shapes fill every cache that has a bound."""
    step, counts = KINDS[kind](), []
    for number in range(160):
        step(number)
        if number in (99, 159):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] <= 30


def results(model: FusedTransformer, number: int) -> list[Any]:
    """Tokens, the loss and its gradients."""
    given = a_batch(number)
    found = generate.beam_search(model, given[0], beam_size=2, n_best=2, **SEARCH)
    loss = model.loss(*given)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [[[h.tokens for h in hypotheses] for hypotheses in found], loss.detach(), *grads]


def test_threads_share_a_model() -> None:
    """Each with its own backend, all at once: bit for bit what they find one after the other."""
    model, names = fused(**NO_DROPOUT, n_layers=1).eval(), (None, "reference", "aten")
    together = Barrier(len(names))

    def run(number: int, wait: bool = True) -> list[Any]:
        found = []
        for turn in range(2):
            with use_backend(names[number]):
                if wait:
                    together.wait(timeout=60)
                found += results(model, 10 * number + turn)
        return found

    expected = [run(number, wait=False) for number in range(len(names))]
    with ThreadPoolExecutor(len(names)) as pool:
        torch.testing.assert_close([*pool.map(run, range(len(names)))], expected, rtol=0, atol=0)
