"""Runs the steps of a search: on a CPU as plain calls, on a GPU as CUDA graphs that are kept for later batches.

A graph repeats exactly what it captured: addresses, shapes and every number from Python. A step reads and changes the
tensors of its search, and reads those of the model. So a captured search is kept with its graph. A later search that
differs only in the values of its tensors copies them there and replays the graph. Any other difference that a step may
depend on (`_key`, `_fingerprint`) means another capture. For models with code or hooks that are not fastattn's or
PyTorch's or transformers' this cannot be known: there a graph is used for one call and dropped.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastattn.graphs.capture import CapturedWork, CaptureError, CudaGraphs, without_autocast_cache
from fastattn.graphs.fingerprint import KNOWN, fingerprint, modes
from fastattn.nn.leaves import drop_kept

if TYPE_CHECKING:
    from fastattn.generate.loop import Decodable, Search

# At most this many searches are kept for a model, and tokens in their caches (batch * beams * capacity).
# A cache of FusedTransformer's default sizes takes 12 KB a token in 16 bits, which makes 0.8 GB.
MAX_SEARCHES, MAX_TOKENS = 8, 2**16
# Encoder outputs are padded to a multiple of this length, so that batches of similar lengths have one shape.
MEMORY_STEP = 32

# Searches that no call uses now, by their keys, the oldest first.
_Searches = dict[Hashable, "tuple[Search, CapturedWork]"]
_kept: WeakKeyDictionary[nn.Module, tuple[Any, _Searches]] = WeakKeyDictionary()
_shared: dict[Hashable, CudaGraphs] = {}  # one for all kept searches of a device and stream


def drop_graphs() -> None:
    """Free what decoding keeps for later calls: on a GPU caches and CUDA graphs, on a CPU packed weights."""
    _kept.clear()
    drop_kept()


class Steps:
    """The steps of one call of `run`. search: the one that they change, which may be a kept one."""

    search: Search

    def __init__(self, model: Decodable, search: Search) -> None:
        self.model = model
        self._kept: _Searches | None = None  # None if nothing is kept
        if search.cache.on_device and _tokens(search) <= MAX_TOKENS:
            self._kept = _kept_searches(model)
        if self._kept is not None:
            search.cache.pad_memories(MEMORY_STEP)
        self.start(search)

    def start(self, search: Search) -> None:
        """Continue with this search, or with a kept one that becomes equal to it."""
        self.search = search
        self._captured: CapturedWork | None = None
        self._work: Callable[[], None] = partial(search.step, self.model)
        if not search.cache.on_device:
            return
        if self._kept is None:
            graphs = CudaGraphs(search.cache.position.device)
        else:
            self._key = _key(self.model, search)
            if found := self._kept.pop(self._key, None):  # while it is in use no other call finds it
                self.search, self._captured = found
                self.search.resume(search)
                return
            graphs = _shared_graphs(search.cache.position.device)
            self._work = without_autocast_cache()(self._work)
        hint = "does the model read values on the host? Decoding runs eagerly"
        generators = () if search.generator is None else (search.generator,)
        self._captured = CapturedWork(self._work, graphs, "a step of decoding", hint, generators)

    def __call__(self) -> None:
        cache = self.search.cache
        length = cache.length
        try:
            (self._captured or self._work)()
        except CaptureError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)
            self._captured, cache.length = None, length
            self._work()
        cache.length = length + 1  # a graph runs nothing on the host

    def select(self, sentences: Tensor) -> None:
        """Continue with these sentences of the batch, (n,) int64."""
        search = self.search
        if self._kept is not None:  # this one is kept as it is
            search = copy.copy(search)
            search.cache = copy.copy(search.cache)
        search.select(sentences)
        self.end()
        self.start(search)

    def end(self) -> None:
        """Keep the search for a later one, if it is captured."""
        if self._kept is None or self._captured is None or self._captured.replay is None:
            return
        self._kept[self._key] = self.search, self._captured
        while len(self._kept) > MAX_SEARCHES or sum(_tokens(s) for s, _ in list(self._kept.values())) > MAX_TOKENS:
            self._kept.pop(next(iter(self._kept)))


def _tokens(search: Search) -> int:
    """In its cache. Numbers in its state, such as logits, count as the tokens whose keys take as much."""
    state = sum([t.numel() for t in search.state.values()])
    return search.cache.batch * search.cache.rows * search.cache.capacity + state // 3000


def _shared_graphs(device: torch.device) -> CudaGraphs:
    # On two streams replays could overlap, and write to the same memory.
    key = device, torch.cuda.current_stream(device) if device.type == "cuda" else None
    if key not in _shared:
        _shared[key] = CudaGraphs(device)
    return _shared[key]


def _kept_searches(model: Any) -> _Searches | None:
    """What is kept for the model as it is now. What was captured before a change of it is dropped."""
    package, owner = type(model).__module__.partition(".")[0], model
    if package == "fastattn":
        owner = getattr(model, "model", model)  # a module that decodes for another one names it `model`
    elif package != "transformers":
        return None
    found = fingerprint(owner, (*KNOWN, "transformers.")) if isinstance(owner, nn.Module) else ""
    if isinstance(found, str):
        return None
    if owner not in _kept or _kept[owner][0] != found:
        _kept[owner] = found, {}
    return _kept[owner][1]


def _key(model: nn.Module, search: Search) -> Hashable:
    """All that a search's graph depends on, except the fingerprint of the model."""
    cache, device = search.cache, search.cache.position.device
    options = tuple((name, v) for name, v in vars(search).items() if name not in ("cache", "state"))
    tensors = tuple((t.shape, t.dtype) for t in (*search.state.values(), *cache.memory_tensors()))
    sizes = (cache.batch, cache.rows, cache.capacity)
    kinds = (type(model), *map(id, model.children()), type(search))
    return kinds, options, sizes, tensors, device, modes(device)
