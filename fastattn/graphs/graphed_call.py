"""A module's forward and backward as two CUDA graphs, which are one ordinary node of autograd to everything else.

The training loop stays as it is: loss.backward(), any optimizer, clipping, accumulation, GradScaler, DDP. The first
EAGER calls of a shape run eagerly, the next one is captured, and later ones replay its graphs. A call that a graph
might not repeat runs eagerly, and `stats` counts why.

- Captured is a copy of the module whose parameters are other leaves in the same memory. So no AccumulateGrad node of
  the user's, of DDP's or of an older loss is in a capture.
- Inputs are copied to fixed addresses, results and gradients from there to new memory: accumulation adds to what is
  the user's own.
- The graphs of a module share one memory pool, so one call at a time may be between forward and backward. A forward
  meanwhile is eager. A second backward raises, and so does a parameter that was changed in place between the two.
- A description of the module (fingerprint.py) and of the call is compared each time: a changed model is captured again.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from fastattn._tracing import is_recorded_or_batched, is_traced, is_transformed
from fastattn.graphs.capture import CudaGraphs, without_autocast_cache
from fastattn.graphs.fingerprint import KNOWN, PLAIN, fingerprint, modes
from fastattn.ops import _watch

EAGER = 2  # calls of a shape before it is captured: most shapes of a shuffled epoch come once or twice
NEW_SHAPE = "a new shape"
CHANGED = "the model has changed"
MAX_SHAPES = 64  # captured for a module; 32 have 99 % of the steps of Multi30k
_ALIGNED = 16  # gradients in one allocation begin at a multiple of this many elements, as vectorised kernels need

_TENSOR = object()  # where a call returns one

Shape = Sequence[int]


class Padding(NamedTuple):
    """How a call's tensors become those of its graph. shapes: the graph's, of each tensor argument.

    fills: what an argument is padded with.     results: the shapes, or their first dimensions, that the call has to
    return, of the first tensor results. Others are returned whole.
    """

    shapes: Sequence[Shape]
    fills: Sequence[float]
    results: Sequence[Shape] = ()


def round_up(n: int, numbers: int = 8, least: int = 1) -> int:
    """To one of `numbers` numbers for each doubling, and to a multiple of `least`: few shapes are captured."""
    step = max((1 << max(n - 1, 0).bit_length()) // (2 * numbers), least)
    return max(-(-n // step), 1) * step


def round_up_length(n: int) -> int:
    return -(-n // 8) * 8


def can_replay(device: torch.device) -> bool:
    """Whether a call whose module is on this device may get graphs. Others need no rounding."""
    return torch.is_grad_enabled() and CudaGraphs.can_capture(device)


class Stats(NamedTuple):
    """replays, captures: how many there were.     pool_bytes: memory of the graphs.
    eager: for each reason the number of calls that ran eagerly."""

    replays: int
    captures: int
    pool_bytes: int
    eager: Counter[str]


_kept: WeakKeyDictionary[nn.Module, ModuleGraphs] = WeakKeyDictionary()


def stats(model: nn.Module) -> Stats:
    """What the graphs of a model and of the modules inside it have done."""
    found = [_kept[module] for module in model.modules() if module in _kept]
    replays, captures, pool_bytes = (sum([getattr(g, name) for g in found]) for name in Stats._fields[:3])
    return Stats(replays, captures, pool_bytes, sum([g.eager for g in found], Counter()))


def graphs_of(module: nn.Module, known: tuple[str, ...] = KNOWN) -> ModuleGraphs:
    """known: see fingerprint."""
    if module not in _kept:
        _kept[module] = ModuleGraphs(known)
    return _kept[module]


class ModuleGraphs:
    """The graphs of one module's calls. It does not keep the module alive."""

    def __init__(self, known: tuple[str, ...] = KNOWN) -> None:
        self.known = known
        self.replays = self.captures = 0
        self.eager: Counter[str] = Counter()
        self.refused: str | None = None  # why all calls are eager
        self.reason: str | None = None  # why the last eager call was
        self._fingerprint: Any = None
        self.reset()

    def reset(self) -> None:
        """Drop all graphs, and capture again."""
        self._calls: dict[Hashable, CapturedCall] = {}
        self._seen: Counter[Hashable] = Counter()
        self._seen_before: Counter[Hashable] = Counter()  # before the last change of the module
        self._last: Hashable = None  # what was seen last
        self._pending: Callable[[], _Token | None] = lambda: None
        self._twin: _Twin | None = None
        self._buffers: dict[Hashable, Tensor] = {}
        self.graphs: CudaGraphs | None = None
        self._place: Hashable = None

    @property
    def pool_bytes(self) -> int:
        return self.graphs.pool_bytes if self.graphs else 0

    def __call__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *padding_and_refusal: Any,
    ) -> Any:
        """call(module, *args, **kwargs), by graphs if they repeat it. The arguments are those of `find`."""
        captured, results, tensors = self.find(module, call, args, kwargs, *padding_and_refusal)
        if captured is not None:
            return captured.result(_Replay.apply(self, captured, results, len(tensors), *tensors, *captured.trained))
        with self.eagerly():
            out = call(module, *args, **kwargs)
        if self.reason in (NEW_SHAPE, CHANGED):
            self._watch(out)
        return out

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Around the call that `find` has no graphs of."""
        try:
            yield
        except Exception:
            self._seen[self._last] = 0  # a wrong call that is repeated is never captured
            raise

    def find(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        padding: Callable[[Sequence[Tensor]], Padding | None] | None = None,
        refusal: str | None = None,
    ) -> tuple[CapturedCall | None, Sequence[Shape], Sequence[Tensor]]:
        """The captured call to replay, Padding.results of it, and the tensors among the arguments. None if it has to
        be eager. The call is counted as one of the two.

        call: a function of the module or of a copy of it.
        padding: of the tensors among the arguments; None, also as its result, if they keep their shapes.
        refusal: why the module cannot have graphs.
        """
        if self.refused is not None:
            return self._eager(self.refused, module)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        reason = _reason(leaves, tensors)
        if reason is None and self._pending() is not None:
            reason = "another forward waits for its backward"
        if reason is not None:
            return self._eager(reason, module if reason in _WARNED else None)
        found = refusal or fingerprint(module, self.known)
        if isinstance(found, str):
            return self._eager(found, module)
        device = tensors[0].device
        settings, place = modes(device), threading.get_ident()
        if found != self._fingerprint:
            seen = self._seen
            self.reset()
            self._fingerprint, self._seen_before = found, seen
        padded = (padding and padding(tensors)) or Padding([t.shape for t in tensors], [0] * len(tensors))
        pairs = zip(tensors, padded.shapes, strict=True)
        of_tensors = [(tuple(shape), t.dtype, t.requires_grad) for t, shape in pairs]
        key = call, tuple(of_tensors), tuple(v for v in leaves if not isinstance(v, Tensor)), spec, settings
        captured = self._calls.get(key)
        if captured is None:
            if len(self._calls) >= MAX_SHAPES:
                return self._eager(f"{MAX_SHAPES} shapes are captured")
            if len(self._seen) > 16 * MAX_SHAPES:
                self._seen.clear()
            self._seen[key], self._last = self._seen[key] + 1, key
            if self._seen[key] <= EAGER:
                return self._eager(CHANGED if key in self._seen_before else NEW_SHAPE)
            if self.graphs is None:
                self.graphs, self._place = CudaGraphs(device), (place, settings[-1])
            if sum([g.pool_bytes for g in list(_kept.values())]) >= self.graphs.limit():
                return self._eager("graphs use half of the device's memory")
        if self._place != (place, settings[-1]):  # the pool's memory belongs to one stream
            return self._eager("another thread or stream has the graphs")
        if captured is None:
            _thread.captures = True
            try:
                captured = CapturedCall(self, module, call, leaves, spec, tensors, padded)
            except Exception as error:
                self.reset()
                self.refused = f"the capture failed: {str(error).splitlines()[0]}"
                return self._eager(self.refused, module)
            finally:
                _thread.captures = False
            self._calls[key] = captured
            self.captures += captured.trains
        if not captured.trains:
            return self._eager("nothing of it requires a gradient")
        captured.load(tensors)
        self.replays += 1
        return captured, padded.results, tensors

    def _eager(self, reason: str, module: nn.Module | None = None) -> tuple[None, Sequence[Shape], Sequence[Tensor]]:
        """module: of which the reason is; then the first time is with a warning."""
        if module is not None and reason not in self.eager:
            message = f"{type(module).__name__} runs without CUDA graphs: {reason}. See fastattn.explain(model)"
            warnings.warn(message, RuntimeWarning, stacklevel=5)
        self.reason = reason
        self.eager[reason] += 1
        return None, (), ()

    def _watch(self, out: Any) -> None:
        """See in the eager calls of a shape whether the backward is one that a graph can be."""
        first = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.grad_fn is not None), None)
        if first is None:
            return
        graphs, passes = weakref.ref(self), []

        def note(dout: Tensor) -> None:
            passes.append(1)
            if (found := graphs()) is None or found.refused:
                return
            if is_recorded_or_batched(dout):
                found.refused = "its gradients are differentiated again (create_graph=True) or computed in batches"
            elif len(passes) > 1:
                found.refused = "it has more than one backward for a forward (retain_graph=True)"

        first.register_hook(note)

    # --- for captures -------------------------------------------------------------------------------------------------

    def twin(self, module: nn.Module) -> _Twin:
        if self._twin is None:
            self._twin = _Twin(module)
        return self._twin

    def buffer(self, place: Hashable, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor (shape) at an address that all captured calls share: only one of them is in use."""
        size = torch.Size(shape).numel()
        base = self._buffers.get((place, dtype))
        if base is None or base.numel() < size:
            base = self._buffers[place, dtype] = torch.zeros(size, dtype=dtype, device=self.graphs.device)
        return base[:size].view(shape)


class _Thread(threading.local):
    captures = False  # whether a call around this one is being captured


_thread = _Thread()


_WARNED = "saved tensors have hooks, as activation checkpointing sets them", "fastattn.shadow compares this step"


def _reason(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> str | None:
    """Why this call cannot be captured or replayed, whatever its module is."""
    if not torch.is_grad_enabled():
        return "no gradient is recorded"
    if _thread.captures:
        return "it is part of another graph"
    if not tensors or not CudaGraphs.can_capture(tensors[0].device):
        return "it is not on a GPU, or within another capture"
    if os.environ.get("FASTATTN_GRAPHS") == "0":
        return "FASTATTN_GRAPHS=0"
    if torch._C._current_graph_task_id() != -1:
        return "a backward computes it again, as activation checkpointing does"
    if is_traced() or torch.jit.is_tracing() or is_transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return "the call is traced or transformed"
    if torch._C._len_torch_function_stack() > 0:
        if any([type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()]):
            return "the call is under a TorchFunctionMode"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return _WARNED[0]
    if torch.is_anomaly_enabled():
        return "autograd looks for anomalies"
    if _watch.current is not None:
        return _WARNED[1]
    device = tensors[0].device
    for v in leaves:
        if not (type(v) in PLAIN or (type(v) in (Tensor, nn.Parameter) and v.device == device)):
            return f"an argument is a {type(v).__name__}, or on another device"
    return None


class _Token:
    """Alive between a forward and its backward."""


class _Twin:
    """A copy of a module, whose parameters are new leaves in the memory of the module's own.

    parameters: the module's.     leaves: the copy's, of those that require grad, by the module's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        leaves = {p: nn.Parameter(p.detach(), p.requires_grad) for p in self.parameters}
        memo: dict[int, Any] = {id(p): leaf for p, leaf in leaves.items()}
        for m in module.modules():  # buffers, and tensors that are only attributes
            memo |= {id(t): t for t in (*m._buffers.values(), *vars(m).values()) if isinstance(t, Tensor)}
        self.module = copy.deepcopy(module, memo)
        self.leaves = {p: leaf for p, leaf in leaves.items() if p.requires_grad}


class CapturedCall:
    """Forward and backward of one shape of a call.

    trains: whether anything gets a gradient. If not, nothing is captured.
    trained: the parameters that get gradients.     gradients: what the backward writes, of each of these.
    outputs: what the forward writes.     doutputs: what the backward reads, None of outputs without a gradient.
    """

    def __init__(
        self,
        owner: ModuleGraphs,
        module: nn.Module,
        call: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        tensors: Sequence[Tensor],
        padded: Padding,
    ) -> None:
        graphs, twin = owner.graphs, owner.twin(module)
        device = tensors[0].device
        if any([p.device != device for p in twin.parameters]):
            raise RuntimeError("its parameters are on more than one device")
        self._fills = padded.fills
        pairs = enumerate(zip(tensors, padded.shapes, strict=True))
        self._static = [owner.buffer(("input", i), shape, t.dtype) for i, (t, shape) in pairs]
        inputs = [s.detach().requires_grad_(t.requires_grad) for s, t in zip(self._static, tensors, strict=True)]
        self.load(tensors)
        given = iter(inputs)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(v, Tensor) else v for v in leaves], spec)
        wanted = [t for t in inputs if t.requires_grad]
        wanted += twin.leaves.values()
        results: list[Tensor] = []
        grads: list[Tensor | None] = []

        def forward() -> None:
            with torch.enable_grad():
                flat, self._spec = pytree.tree_flatten(call(twin.module, *args, **kwargs))
            self._flat = [_TENSOR if isinstance(v, Tensor) else v for v in flat]
            results[:] = [v for v in flat if isinstance(v, Tensor)]

        def differentiate() -> None:
            differentiable = [t for t in results if t.requires_grad]
            douts = [d for d in self.doutputs if d is not None]
            with torch.autocast(device.type, enabled=False):  # where users call backward()
                grads[:] = torch.autograd.grad(differentiable, wanted, douts, allow_unused=True)

        reached: list[set[int]] = []  # by each output, of what is wanted

        def warm_up() -> None:  # it compiles, and finds what has a gradient
            forward()
            self.doutputs = [
                owner.buffer(("doutput", i), t.shape, t.dtype) if t.requires_grad else None
                for i, t in enumerate(results)
            ]
            for t, dout in zip(results, self.doutputs, strict=True):
                found = () if dout is None else torch.autograd.grad(t, wanted, dout, True, allow_unused=True)
                if any([g is not None and g.layout != torch.strided for g in found]):
                    raise RuntimeError("a gradient is sparse")
                reached.append({id(x) for x, g in zip(wanted, found, strict=False) if g is not None})

        with without_autocast_cache(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            drawn = graphs.host_random_state()
            graphs.warm_up(warm_up)
            if graphs.host_random_state() != drawn:  # LayerDrop: a graph would always drop the same layers
                raise RuntimeError("the module draws random numbers on the host")
        for v in self._flat:
            if v is not _TENSOR and type(v) not in PLAIN:
                raise RuntimeError(f"it returns a {type(v).__name__}")
        used = set().union(*reached)
        wanted = [t for t in wanted if id(t) in used]  # also in `differentiate`
        self.dinputs = [
            owner.buffer(("dinput", i), t.shape, t.dtype) if id(t) in used else None for i, t in enumerate(inputs)
        ]
        trained = [(p, leaf) for p, leaf in twin.leaves.items() if id(leaf) in used]
        self.trained, self.trains = [p for p, _ in trained], bool(wanted)
        if not wanted:
            return
        self._layout, sizes = _flat_layout(self.trained)
        self._flat_gradients = {dtype: owner.buffer("gradients", (size,), dtype) for dtype, size in sizes.items()}
        self.gradients = _cut(self._flat_gradients, self._layout)
        if self.gradients:  # loads the kernel that `backward` needs: the warm-up has not called it
            torch._foreach_copy_(self.gradients, self.gradients)
        # What the backward may read. Another parameter may change before it, as by optimizers that step in a backward.
        self._read = [p for p in twin.parameters if not p.requires_grad or id(twin.leaves[p]) in used]
        self.reached = [[id(leaf) in found for _, leaf in trained] for found in reached]
        results.clear()

        def backward() -> None:
            differentiate()
            torch._foreach_copy_([*(d for d in self.dinputs if d is not None), *self.gradients], grads)
            grads.clear()

        with without_autocast_cache():
            self.forward = graphs.captured(forward)
            self.outputs = [t.detach() for t in results]
            self.backward = graphs.captured(backward)
        results.clear()

    def versions(self) -> int:
        return sum([p._version for p in self._read])

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy the inputs to where the graphs read them."""
        with torch.no_grad():
            for static, t, fill in zip(self._static, tensors, self._fills, strict=True):
                whole = static if static.shape == t.shape else static.fill_(fill)[tuple(map(slice, t.shape))]
                whole.copy_(t, non_blocking=True)

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the call returns, with these tensors."""
        given = iter(outputs)
        return pytree.tree_unflatten([next(given) if v is _TENSOR else v for v in self._flat], self._spec)

    def new_gradients(self, douts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """A copy of the gradients, in one allocation. None of parameters that no output with a gradient depends on."""
        made = _cut({dtype: flat.clone() for dtype, flat in self._flat_gradients.items()}, self._layout)
        if all([dout is not None for dout in douts]):
            return made
        reached = [found for found, dout in zip(self.reached, douts, strict=True) if dout is not None]
        return [g if any(is_reached) else None for g, *is_reached in zip(made, *reached, strict=True)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: ModuleGraphs, captured: CapturedCall, results: Sequence[Shape], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        captured.forward()
        ctx.owner, ctx.captured, ctx.token, ctx.versions = owner, captured, _Token(), captured.versions()
        owner._pending = weakref.ref(ctx.token)
        ctx.shapes = [t.shape for t in tensors[:count]]
        shapes = (*results, *[()] * len(captured.outputs))[: len(captured.outputs)]
        ctx.parts = [tuple(map(slice, shape)) for shape in shapes]
        ctx.set_materialize_grads(False)
        outputs = tuple(map(_part, captured.outputs, ctx.parts))
        plain = [t for t, d in zip(outputs, captured.doutputs, strict=True) if d is None]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        captured = ctx.captured
        if is_recorded_or_batched(*douts):
            raise RuntimeError(
                "the gradients of a CUDA graph cannot be differentiated again (create_graph=True) or computed in "
                "batches. Train without graphs (graphs=False)"
            )
        if ctx.token is None:
            raise RuntimeError(
                "a second backward through one forward: a CUDA graph does not keep what it needs. Compute the forward "
                "again, or train without graphs (graphs=False)"
            )
        if ctx.versions != captured.versions():
            raise RuntimeError("a parameter was modified by an inplace operation between a forward and its backward")
        for static, dout, part in zip(captured.doutputs, douts, ctx.parts, strict=True):
            if static is not None:
                whole = static[part]
                if dout is None or whole.shape != static.shape:
                    static.zero_()
                if dout is not None:
                    whole.copy_(dout)
        ctx.token = None
        captured.backward()
        pairs = zip(captured.dinputs, ctx.shapes, strict=True)
        dinputs = [None if d is None else _part(d, tuple(map(slice, shape))) for d, shape in pairs]
        return None, None, None, None, *dinputs, *captured.new_gradients(douts)


def _part(t: Tensor, part: tuple[slice, ...]) -> Tensor:
    return t[part].clone(memory_format=torch.contiguous_format)


def _flat_layout(like: Sequence[Tensor]) -> tuple[list[Any], Counter[torch.dtype]]:
    """Where tensors as these are in one flat tensor of each dtype, and the size of that."""
    places, sizes = [], Counter[torch.dtype]()
    for t in like:
        contiguous = torch.empty(t.shape, device="meta")
        places.append((t.dtype, t.shape, contiguous.stride(), sizes[t.dtype]))
        sizes[t.dtype] += -(-t.numel() // _ALIGNED) * _ALIGNED
    return places, sizes


def _cut(flat: dict[torch.dtype, Tensor], layout: list[Any]) -> list[Tensor]:
    """One call for each tensor: at every step they are some 200."""
    return [flat[dtype].as_strided(shape, stride, offset) for dtype, shape, stride, offset in layout]
