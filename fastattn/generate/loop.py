"""What all kinds of decoding share: the loop over steps, and the batch that shrinks. How a step runs: kept_graphs.py.

A model is decoded through two methods. FusedTransformer has them, and any other model may have them:

    start_decoding(source, beams, capacity) -> DecoderCache    encodes B sources, for W beams each of capacity tokens
    next_logits(tokens, cache) -> Tensor                       (B, W) new tokens -> (B, W, n_vocab), added to the cache

A module that wraps such a model and keeps it as `module`, as torch.optim.swa_utils.AveragedModel does, is decoded as
that model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastattn.backends import likely_backend, load_backend, unsupported_reason
from fastattn.generate.kept_graphs import Steps
from fastattn.nn import DecoderCache

OnToken = Callable[[int, list[int], list[list[int]]], None]

# On a GPU the loop reads what was decoded once in this many steps, because each read waits for the GPU.
STEPS_BETWEEN_READS = 8
# On a CPU sentences that are done leave the batch when they are this share of it: the others' caches must be copied.
MIN_SHARE_DONE = 0.25
# On a GPU each size of the batch needs its own CUDA graph. So the batch is halved, down to this many sentences,
# of which some may be done. A step of fewer takes as long (estimated).
MIN_BATCH_ON_A_GPU = 8


class Decodable(Protocol):
    """A model as the loop sees it; see the top of this file."""

    def start_decoding(self, source: Any, beams: int, capacity: int, /) -> DecoderCache: ...

    def next_logits(self, tokens: Tensor, cache: DecoderCache, /) -> Tensor: ...


class Search(ABC):
    """How tokens are chosen, and the state of B sentences with W beams each, all on the device, changed in place.

    A subclass chooses the next tokens in `choose`, marks sentences as done, and returns their results. The first
    dimension of all tensors in `state` is the sentence.
    """

    generator: torch.Generator | None = None  # what `choose` draws from
    has_kernel = False  # whether fastattn.kernels.search computes `choose`

    def __init__(self, cache: DecoderCache, bos_idx: int, eos_idx: int) -> None:
        self.cache, bos_idx, self.eos_idx = cache, int(bos_idx), int(eos_idx)
        batch, beams, device = cache.batch, cache.rows, cache.position.device
        self.state: dict[str, Tensor] = {
            "tokens": torch.full((batch, beams), bos_idx, device=device),  # the newest of each beam
            # What each beam read at each position. A beam's history is found as its keys are: cache.ancestors.
            "fed": torch.full((batch, cache.capacity, beams), bos_idx, device=device),
            "done": torch.zeros(batch, dtype=torch.bool, device=device),
            "broken": torch.zeros(batch, dtype=torch.bool, device=device),  # a NaN was found
        }

    def step(self, model: Decodable) -> None:
        """One step of the model, and the choice of the next tokens."""
        cache, state = self.cache, self.state
        logits = model.next_logits(state["tokens"], cache)
        _check_below("eos_idx", self.eos_idx, logits.shape[-1])  # only here is it known of every model
        if cache.on_device and self.has_kernel and self._fits_kernel(logits):
            if cache.rows > 1:
                cache.make_ancestors()
            logits = logits if logits.stride(2) == 1 else logits.contiguous()
            load_backend("search", "triton").choose(logits, state, cache, self.eos_idx)
        else:
            cache.write(state["fed"], state["tokens"], ago=1)
            self.choose(logits)

    def _fits_kernel(self, logits: Tensor) -> bool:
        """Where it does not, and where another backend is requested, PyTorch's operators choose, as on a CPU."""
        cache, device = self.cache, self.cache.position.device
        is_usual = logits.shape[:2] == (cache.batch, cache.rows) and logits.device == device and logits.numel() > 0
        is_usual = is_usual and likely_backend("search", device) in ("triton", "cuda")
        return is_usual and unsupported_reason("search", "triton", (logits,)) is None

    @abstractmethod
    def choose(self, logits: Tensor) -> None:
        """From logits (B, W, n_vocab) of the position before cache.position: new tokens, and which are done."""

    @abstractmethod
    def result(self, state: dict[str, Tensor]) -> Any:
        """What was found for a sentence. state: its part of `state` and of cache.ancestors, on the host."""

    def results(self, sentences: Tensor) -> list[Any]:
        """The results of these sentences of the current batch, (n,) int64, with one copy to the host a tensor."""
        ancestors = {} if self.cache.ancestors is None else {"ancestors": self.cache.ancestors}
        state = {name: t[sentences].cpu() for name, t in (self.state | ancestors).items()}
        return [self.result({name: t[i] for name, t in state.items()}) for i in range(len(sentences))]

    def note_nan(self, values: Tensor) -> None:
        """values: (B, ..), of which none may be NaN."""
        self.state["broken"] |= values.isnan().flatten(1).any(1)

    def select(self, sentences: Tensor) -> None:
        self.state = {name: t[sentences] for name, t in self.state.items()}
        self.cache.select(sentences)

    def resume(self, other: Search) -> None:
        """Continue `other`, a search of the same kind and sizes, at this one's addresses: for a CUDA graph."""
        for name, t in self.state.items():
            t.copy_(other.state[name])
        self.cache.resume(other.cache)


def run(model: Decodable, search: Search, on_token: OnToken | None = None) -> list[Any]:
    """Step until every sentence is done or the cache is full. Returns the results in the order of the sentences."""
    sentences = list(range(search.cache.batch))
    results: list[Any] = [None] * len(sentences)
    done = [False] * len(sentences)
    if not sentences:
        return results
    steps = Steps(model, search)
    try:
        while True:
            steps()
            search, cache = steps.search, steps.search.cache
            full = cache.length == cache.capacity
            if cache.on_device and not full and on_token is None and cache.length % STEPS_BETWEEN_READS:
                continue
            # The only read of a step. It waits for a GPU.
            state = search.state
            newest = () if on_token is None else state["tokens"].unbind(1)
            broken, now_done, *tokens = torch.stack([state["broken"], state["done"], *newest]).tolist()
            if any(broken):
                raise ValueError(
                    f"the model gave NaN within {cache.length} tokens: its weights or its input are not finite"
                )
            if on_token is not None:
                beams = list(zip(*tokens, strict=True))
                decoded = [i for i, was_done in enumerate(done) if not was_done]
                on_token(cache.length, [sentences[i] for i in decoded], [list(beams[i]) for i in decoded])
            done = [True] * cache.batch if full else now_done
            num_left = done.count(False)
            batch = _smaller_batch(cache.batch, num_left, cache.on_device)
            if num_left and batch == cache.batch:
                continue
            left, finished = ([i for i, is_done in enumerate(done) if is_done == which] for which in (False, True))
            order = torch.tensor(left + finished, device=cache.position.device)
            for i, result in zip(finished, search.results(order[num_left:]), strict=True):
                results[sentences[i]] = result
            if not left:
                return results
            kept = (left + finished)[:batch]
            sentences, done = [sentences[i] for i in kept], [done[i] for i in kept]
            steps.select(order[:batch])
    finally:
        steps.end()


def _smaller_batch(batch: int, left: int, on_device: bool) -> int:
    """How many sentences to continue with. left: how many of the batch are not done."""
    if not on_device:
        return left if batch - left >= MIN_SHARE_DONE * batch else batch
    while (half := (batch + 1) // 2) >= max(left, MIN_BATCH_ON_A_GPU):
        batch = half
    return batch


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """In eval mode and without gradients; afterwards every module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def check_model(model: Any, max_len: int, bos_idx: int, eos_idx: int, on_token: OnToken | None) -> Any:
    """Check the arguments that all searches have. Returns the model that is decoded."""
    check_limits(max_len=max_len)
    model = unwrapped(model, "start_decoding", "next_logits")
    check_token("bos_idx", bos_idx, model)
    check_token("eos_idx", eos_idx, model, minimum=-1)
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token must be a function or None, got {type(on_token).__name__}")
    return model


def unwrapped(model: Any, *needed: str) -> Any:
    """The model that has what is needed: itself, or what it keeps as `module`. TypeError if neither has it all."""
    inner = model
    while not hasattr(inner, needed[0]) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if missing := [name for name in needed if not hasattr(inner, name)]:
        what = f"{type(model).__name__}, which has no {missing[0]}"
        raise TypeError(f"model must be a FusedTransformer or have its {' and '.join(needed)}, got {what}")
    return inner


def check_limits(minimum: int = 1, **values: int) -> None:
    """Each is an integer of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_token(name: str, token: int, model: Any, minimum: int = 0) -> None:
    """An integer, and a target token of the model if its number of tokens is known before the first logits."""
    check_limits(minimum, **{name: token})
    projection = getattr(model, "trg_word_prj", None)  # a FusedTransformer's
    n_vocab = getattr(projection, "out_features", None) or getattr(model, "n_trg_vocab", None)
    if n_vocab is not None:
        _check_below(name, token, n_vocab)


def _check_below(name: str, token: int, n_vocab: int) -> None:
    if token >= n_vocab:
        raise ValueError(f"{name} must be below {n_vocab}, the size of the model's vocabulary, got {token}")
