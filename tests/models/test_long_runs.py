"""What shows only after many steps, in several threads, or in other processes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, VOCAB, fused, gold_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fastattn import AttentionMask, FusedTransformer, accelerate, generate, scaled_dot_product_attention, use_backend

Step = Callable[[int], Any]
SEARCH = {"bos_idx": 2, "eos_idx": 3, "max_len": 8}


def a_batch(number: int) -> tuple[Tensor, Tensor]:
    """Lengths differ from batch to batch, and padding does."""
    generator = torch.Generator().manual_seed(number)
    src, trg = (torch.randint(3, VOCAB, (3, 2 + number * n % 29), generator=generator) for n in (7, 5))
    src[0, src.shape[1] // 2 + 1 :] = PAD_SRC
    return src.to(DEVICE), trg.to(DEVICE)


def training(model: FusedTransformer) -> Step:
    optimizer = torch.optim.Adam(model.parameters())

    def step(number: int) -> None:
        src, trg = a_batch(number)
        model.loss(src, trg, gold_of(trg)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def attention() -> Step:
    def step(number: int) -> None:
        src, trg = a_batch(number)
        q, k = (torch.randn(3, 2, t.shape[1], 8, device=DEVICE, requires_grad=True) for t in (trg, src))
        mask = AttentionMask(key_padding=src != PAD_SRC, is_causal=number % 2 == 0)
        scaled_dot_product_attention(q, k, k, mask, dropout_p=0.1).sum().backward()

    return step


def accelerated() -> Step:
    """Queries keep their shape, memories do not."""
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True, device=DEVICE)
    accelerate(model := nn.TransformerDecoder(layer, 1))
    x = torch.randn(2, 5, 16, device=DEVICE)
    return lambda number: model(x, torch.randn(2, 3 + number, 16, device=DEVICE))


def decoding(model: FusedTransformer) -> Step:
    return lambda number: generate.beam_search(model, a_batch(number)[0], beam_size=2, **SEARCH)


KINDS: dict[str, Callable[[], Step]] = {
    "training": lambda: training(fused()),
    "attention": attention,
    "accelerated": accelerated,
    "decoding": lambda: decoding(fused().eval()),
}


@pytest.mark.parametrize(
    "kind", ["attention", "accelerated", *(pytest.param(k, marks=pytest.mark.full) for k in ("training", "decoding"))]
)
def test_no_cache_grows_with_the_shapes_of_calls(kind: str) -> None:
    """Every call has other lengths. 100 new shapes fill every cache that has a bound."""
    step, counts = KINDS[kind](), []
    for number in range(160):
        step(number)
        if number in (99, 159):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] <= 30


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="/proc/self/statm, the memory in use, is Linux's")
def test_ten_thousand_steps_need_no_more_memory() -> None:
    step, resident = training(fused(n_layers=1)), []
    for number in range(10_000):
        step(number)
        if number % 1000 == 999:
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert max(resident[2:]) <= 1.01 * resident[1], resident


def results(model: FusedTransformer, number: int) -> list[Any]:
    """Tokens, and the loss with its gradients."""
    src, trg = a_batch(number)
    with torch.no_grad():
        found = [[h.tokens for h in hs] for hs in generate.beam_search(model, src, beam_size=2, n_best=2, **SEARCH)]
        tokens = [generate.greedy(model, src, **SEARCH), found]
    loss = model.loss(src, trg, gold_of(trg))
    return [*tokens, [t.detach() for t in (loss, *torch.autograd.grad(loss, list(model.parameters())))]]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert found[:2] == expected[:2] and all(map(torch.equal, found[2], expected[2]))


def test_threads_share_a_model() -> None:
    """Each with its own backend, all at once: bit for bit what they find one after the other."""
    model = fused(**NO_DROPOUT, n_layers=1).eval()
    names = (None, "reference", "aten", None)
    together = Barrier(len(names))

    def run(number: int, wait: bool = True) -> list[list[Any]]:
        found = []
        for turn in range(2):
            with use_backend(names[number]):
                if wait:
                    together.wait(timeout=60)
                found.append(results(model, 10 * number + turn))
        return found

    expected = [run(number, wait=False) for number in range(len(names))]
    with ThreadPoolExecutor(len(names)) as pool:
        for found, alone in zip(pool.map(run, range(len(names))), expected, strict=True):
            for one, other in zip(found, alone, strict=True):
                assert_equal(one, other)


class Results(Dataset):
    """Computed in a worker."""

    def __init__(self, model: FusedTransformer) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> list[Any]:
        return results(self.model, number)


@pytest.mark.skipif(DEVICE == "cuda" or sys.platform == "win32", reason="a CUDA context cannot be forked")
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_of_a_data_loader(how: str) -> None:
    """A process that is forked after the model was used, and one that reads the model from a pickle.

    In a new process: another test may have started autograd's threads, and then a fork has no backward.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check_workers, how).result()


def check_workers(how: str) -> None:
    torch.set_num_threads(1)  # as in the workers
    model = fused(**NO_DROPOUT, n_layers=1).eval()
    expected = [results(model, number) for number in range(4)]
    loader = DataLoader(Results(model), batch_size=None, num_workers=2, multiprocessing_context=how)
    for found, alone in zip(loader, expected, strict=True):
        assert_equal(found, alone)
