"""Launches of all Triton kernels in two ways: as bound before, and through Triton's own path. Nothing is compiled.

Triton's binder, its specialisation and its caches run as they are. Its compiler is replaced: a compiled kernel is only
a name here, and its launcher records what it is given. So this needs no GPU. It cannot run in an interpreted session,
and is a program, which fails at a difference. Errors that it finds: tests/planted/kernel_faults.py.

    PYTHONPATH=.:tools:tests python tests/codegen/launch_cases.py
"""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import catalogue
import precompile
import torch
import triton
from fastattn.kernels.add_layer_norm import add_layer_norm_bwd, add_layer_norm_fwd
from fastattn.kernels.common import launch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

import fastattn
from fastattn.backends import OPS
from fastattn.backends.calls import NormCall
from fastattn.check import cases
from fastattn.check.cases import Problem

CPU = torch.device("cpu")
DTYPES = torch.float32, torch.bfloat16, torch.float16
RUN, ADD = launch.Launch.run, launch.Launches.add
OTHER = "a kernel that was compiled for other arguments"
records: list[tuple[Any, ...]] = []
bound: Counter[str] = Counter()
stream = itertools.count(1)
current = 0


class NotCompiled(CompiledKernel):
    """What Triton keeps for a class of arguments. Its launcher records."""

    _module_pid = None  # triton 3.9 unloads what this process has loaded

    def __init__(self, src: Any, **_: Any) -> None:
        self.src, self.name, self._run = src, src.fn.__name__, self._record
        self.module, self.function, self.packed_metadata = self, object(), object()

    def _record(self, *call: Any) -> None:
        x, y, z, stream, function, packed, metadata, enter, leave, *given = call
        assert function is self.function and packed is self.packed_metadata, f"{self.name}: another kernel's handles"
        records.append((self, x, y, z, stream, *map(as_launched, given)))


def as_launched(value: Any) -> Any:
    """An argument as the C launcher reads it."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return tuple(map(as_launched, value)) if isinstance(value, tuple) else value


def checked_add(self: launch.Launches, key: tuple[Any, ...], tile: Any = None, **named: Any) -> launch.Launch:
    """The class of this key. Every call looks it up here, with the constants that it would bind."""
    known = dict.get(self, key)
    if known is None:
        return ADD(self, key, tile, **named)
    assert (known.tile, known.named) == (tile, named), f"{self.kernel.__name__}: {OTHER}"
    return known


def checked_run(self: launch.Launch, *call: Any) -> None:
    """Launch, then launch again through Triton's own path: the same kernel with the same arguments."""
    global current
    current = next(stream)
    records.clear()
    bound[self.kernel.__name__] += self.launcher is not None
    RUN(self, *call)
    with mock.patch.object(launch, "_has_hooks", lambda: True):
        RUN(self, *call)
    first, second = records
    assert first[0] is second[0], f"{self.kernel.__name__}: {OTHER}"
    assert first[1:] == second[1:], f"{self.kernel.__name__}: {first[1:]}, Triton launches {second[1:]}"


def patches(*changes: tuple[Any, str, Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for place, name, value in changes:
        stack.enter_context(mock.patch.object(place, name, value, create=True))
    return stack


def without_gpu() -> AbstractContextManager[Any]:
    class Driver(precompile._NoDriver):
        def get_current_stream(self, device: int) -> int:
            return current

    driver.set_active(Driver(90))
    kernels = {importlib.import_module(f"fastattn.kernels.{op.backend_module}") for op in OPS.values()}
    return patches(
        (triton.compiler, "compile", NotCompiled),
        (launch, "current_stream", lambda device: current),
        (launch.Launch, "run", checked_run),
        (launch.Launches, "get", lambda self, key: None),
        (launch.Launches, "add", checked_add),
        *((module, "unsupported_reason", lambda *_: None) for module in kernels),
    )


# --- the cases --------------------------------------------------------------------------------------------------------


def moved(t: Tensor) -> Tensor:
    """The same at an address that 16 does not divide."""
    size = t.untyped_storage().nbytes() // t.element_size()
    memory = torch.empty(size + 8, dtype=t.dtype)
    memory[1 : 1 + size] = t.detach().as_strided((size,), (1,), 0)
    return memory.as_strided(t.shape, t.stride(), 1 + t.storage_offset())


def alignments(p: Problem) -> Iterator[Problem]:
    """With every tensor aligned, with each of them moved, and with all moved, those of the mask too."""
    yield p
    yield from (p.but(**{name: moved(t)}) for name, t in p.tensors.items())
    yield p._replace(douts=tuple(map(moved, p.douts)))
    yield p.map(moved)


def small_calls() -> Iterator[Problem]:
    """Each variant of the catalogue in each dtype and alignment."""
    for p, dtype in itertools.product(catalogue.VARIANTS.values(), DTYPES):
        p = p._replace(tensors={name: t.to(dtype) for name, t in p.tensors.items()})
        p = catalogue.for_backend(p, "triton")
        p = catalogue.with_douts(p) if p.differentiable else p
        yield from alignments(p)
        if "weight" in p.tensors and p.op != "linear_cross_entropy":
            yield p.but(**{name: t.float() for name, t in p.tensors.items() if name in ("weight", "bias", "x_bias")})


def sizes() -> Iterator[Problem]:
    """On both sides of every switch, and of 1."""
    for op, rows in catalogue.SIZES.items():
        for name in (name for name, row in rows.items() if "triton" in row.backends):
            yield catalogue.for_backend(catalogue.sized(op, name, CPU), "triton")
    sizes_of_1 = {"B": 1, "H": 1, "Lq": 1, "Lk": 1, "D": 1}
    yield from (cases.attention(**sizes_of_1, mask=mask) for mask in (None, {"is_causal": True}))
    yield cases.add_layer_norm(rows=(1,), hidden=1)
    yield cases.feed_forward(tokens=(1,), d=1, d_ff=1, d_out=1)
    yield from (cases.feed_forward(name, tokens=(n,)) for n in (21, 300) for name in ("relu", "gelu", "swiglu"))
    yield from (cases.linear_cross_entropy(ignore_index=index, classes=64) for index in (1, -(1 << 40)))


def solve(problems: Callable[[], Iterable[Problem]]) -> None:
    """Forward and backward, twice."""
    for p in problems():
        for _ in range(2):
            cases.solve(p, "triton")


def steps() -> None:
    """Of a model: its layers call kernels without the public ops, under autocast in two dtypes at once."""
    tokens = torch.ones(2, 16, dtype=torch.int64)
    for dtype, p in itertools.product((None, *DTYPES[1:]), (0.0, 0.1)):
        widths = {"d_word_vec": 32, "d_model": 32, "d_inner": 64, "n_layers": 1, "n_head": 2, "d_k": 16, "d_v": 16}
        model = fastattn.FusedTransformer(20, 20, 0, 0, **widths, dropout=p, attn_dropout=p, backend="triton")
        for _ in range(3):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                model(tokens, tokens).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            cache = model.eval().start_decoding(tokens, 2, 4)
            cache.on_device = True
            for _ in range(3):
                model.next_logits(tokens[:, :2], cache)
                cache.reorder(torch.zeros(2, 2, dtype=torch.int64))


def report() -> None:
    """Every case of the benchmarks launches kernels as it is compiled before."""
    for case in precompile.report_jobs("quick"):
        records.clear()
        case()
        assert records, f"{case.args[1]}: nothing was launched"


def norms() -> None:
    """As layers call them under autocast: x, its gradient and what products read in another dtype than all else."""
    weight, state = torch.zeros(32), torch.zeros(3 * 5 + 33)
    for dtype, residual_dtype in itertools.product(DTYPES, (None, *DTYPES)):
        x = torch.zeros(5, 32, dtype=dtype)
        residual = None if residual_dtype is None else x.to(residual_dtype)
        for x_bias in (None, weight):
            call = NormCall(x, residual, weight, weight, x_bias, None, 1e-6, 0.0, False)
            for options in ({}, {"out_dtype": DTYPES[2]}, {"read": x.half()}, {"read": x.bfloat16()}):
                add_layer_norm_fwd(call, **options)
            for x_dtype in (None, *DTYPES[1:]):
                add_layer_norm_bwd(x, None, call, state, True, x_dtype)


def keys() -> None:
    """A kernel's key in Triton's cache is what it is after all others were hashed."""
    for kernel in (each.kernel for each in launch.Launches.all):
        key, kernel.hash = kernel.cache_key, None
        assert kernel.cache_key == key, f"{kernel.__name__}: its key depends on what ran before"


def devices() -> None:
    """A launch makes its device the current one."""
    entered, started = [], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        with mock.patch.object(launch, "current_device", lambda: index):
            yield

    one = launch.Launch(launch.Launches.all[0], None, {})
    one.launcher, one.function, one.metadata, one.constants = lambda *call: started.append(call), 1, 2, (3,)
    with patches(
        (launch, "current_device", lambda: 0),
        (torch.cuda, "device", device),
        (launch.Launch, "run", RUN),
        (launch, "current_stream", lambda index: 100 + index),
    ):
        for index in (0, 1):
            one.run(index, 5, (7,), ())
    assert entered == [1] and [call[3] for call in started] == [100, 101]
    assert started[0] == (5, 1, 1, 100, 1, 2, None, None, None, 7, 3)


def main() -> None:
    with without_gpu():
        for case in (partial(solve, small_calls), steps, report, norms, partial(solve, sizes), keys, devices):
            case()
        for each in launch.Launches.all:
            assert bound[each.kernel.__name__], f"{each.kernel.__name__} was never launched as bound before"


if __name__ == "__main__":
    main()
