"""Launches of all Triton kernels in two ways: as bound before, and through Triton's own path. Nothing is compiled.

Triton's binder, its specialisation and its caches run as they are. Its compiler is replaced: a compiled kernel is only
a name here, and its launcher records what it is given. So this needs no GPU. It cannot run in an interpreted session,
and is a program, which prints the kernels that were launched as bound before, and fails at a difference:

    PYTHONPATH=.:tools python tests/codegen/launch_cases.py [planted error]

With --stub the launchers are Triton's own, in C, and libcuda is a stub, through which the bytes of every parameter are
recorded. Before triton 3.9 this compiles some 500 launchers, but no kernels. DIR is a folder for the stub:

    gcc -shared -fPIC -o DIR/libcuda.so.1 tests/codegen/stub_libcuda.c
    TRITON_LIBCUDA_PATH=DIR LD_LIBRARY_PATH=DIR PYTHONPATH=.:tools python tests/codegen/launch_cases.py --stub
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import precompile
import torch
import triton
from fastattn.kernels.add_layer_norm import add_layer_norm_bwd, add_layer_norm_fwd
from fastattn.kernels.attention import arguments
from fastattn.kernels.common import launch
from fastattn.kernels.feed_forward import feed_forward_dz
from fastattn.kernels.feed_forward.forward import feed_forward_hidden
from fastattn.kernels.linear_cross_entropy.rows import cross_entropy_rows, empty_logits
from torch import Tensor
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.driver import driver

from fastattn import AttentionMask
from fastattn.backends import attention_rows
from fastattn.backends.calls import AttentionCall, FeedForwardCall, LossCall, NormCall
from fastattn.kernels import attention, decode_attention, mask
from fastattn.masks import Layout

CPU = torch.device("cpu")
DTYPES = torch.float32, torch.bfloat16, torch.float16
RUN, ADD = launch.Launch.run, launch.Launches.add
OTHER = "a kernel that was compiled for other arguments"
records: list[tuple[Any, ...]] = []
by_handle: dict[int, LaunchedByC] = {}
bound: Counter[str] = Counter()
stream = itertools.count(1)
current = 0


class NotCompiled(CompiledKernel):
    """What Triton keeps for a class of arguments. Its launcher records, and calls hooks as the one in C does."""

    _module_pid = None  # triton 3.9 unloads what this process has loaded

    def __init__(self, src: Any, **_: Any) -> None:
        self.src, self.name, self._run = src, src.fn.__name__, self._record
        self.module, self.function, self.packed_metadata = self, object(), object()

    def _record(
        self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, metadata: Any, enter: Any, leave: Any,
        *given: Any,
    ) -> None:  # fmt: skip
        assert function is self.function and packed is self.packed_metadata, f"{self.name}: another kernel's handles"
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        records.append((self, x, y, z, stream, *map(as_launched, given)))


def as_launched(value: Any) -> Any:
    """An argument as the C launcher reads it."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return tuple(map(as_launched, value)) if isinstance(value, tuple) else value


class LaunchedByC(NotCompiled):
    """The same with Triton's launcher in C. The kernel's handle is this object's address."""

    def __init__(self, src: Any, target: Any, options: dict[str, Any]) -> None:
        super().__init__(src)
        scratch = {f"{kind}_scratch_{of}": 0 for kind in ("global", "profile") for of in ("size", "align")}
        self.metadata = SimpleNamespace(**options, **scratch, shared=len(by_handle))  # another for each kernel
        self.packed_metadata = make_backend(target).pack_metadata(self.metadata)
        self._run, self.function = precompile.build_launcher(self), id(self)
        self.sizes = [*parameter_sizes(tuple(src.signature.values())), 8, 8]  # and the addresses of scratch memory
        by_handle[self.function] = self


def parameter_sizes(signature: tuple[Any, ...]) -> Iterator[int]:
    """Bytes of the parameters that a launch passes to a kernel with this signature."""
    for kind in signature:
        if isinstance(kind, tuple):
            yield from parameter_sizes(kind)
        elif kind != "constexpr":
            yield 8 if kind[0] == "*" else {"i1": 1, "u1": 1, "i32": 4, "fp32": 4, "i64": 8}[kind]


@ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_uint), ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.POINTER(ctypes.c_void_p)
)
def record_launch(numbers: Any, stream: int, handle: int, parameters: Any) -> None:
    """Record what libcuda is given, as NotCompiled._record does. numbers: the grid, the block and the shared memory."""
    kernel = by_handle[handle]
    values = (ctypes.string_at(parameters[i], size) for i, size in enumerate(kernel.sizes))
    records.append((kernel, *numbers[:7], stream, *values))


def checked_add(self: launch.Launches, key: tuple[Any, ...], tile: Any = None, **named: Any) -> launch.Launch:
    """The class of this key. Every call asks for it here, with the constants that it would bind."""
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


@contextmanager
def without_gpu(kernel_class: type[NotCompiled]) -> Iterator[None]:
    class Driver(precompile._NoDriver):
        def get_current_stream(self, device: int) -> int:
            return current

    driver.set_active(Driver(90))
    with ExitStack() as stack:
        for place, name, value in (
            (triton.compiler, "compile", kernel_class),
            (launch, "current_stream", lambda device: current),
            (launch.Launch, "run", checked_run),
            (launch.Launches, "get", lambda self, key: None),
            (launch.Launches, "add", checked_add),
        ):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        yield


def moved(t: Tensor) -> Tensor:
    """The same at an address that 16 does not divide."""
    memory = torch.zeros(t.untyped_storage().size() // t.element_size() + 8, dtype=t.dtype)
    return memory[1:].as_strided(t.shape, t.stride())


def alignments(function: Callable[..., Any], *given: Any) -> None:
    """Call with every tensor aligned, with each of them moved, and with all moved; everything twice."""
    tensors = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
    ways = [(), *((i,) for i in tensors), tensors]
    for way in [*ways, *ways]:
        function(*(moved(value) if i in way else value for i, value in enumerate(given)))


def norms() -> None:
    rng = torch.zeros(2, dtype=torch.int64)
    for dtype, other, hidden, rows in itertools.product(DTYPES[:2], DTYPES[:2], (1, 16, 1030), (1, 5)):
        x, weight = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(hidden, dtype=other)
        residuals = None, x, x.float()
        for bias, x_bias, residual, p in itertools.product((None, weight), (None, weight), residuals, (0.0, 0.1)):
            call = NormCall(x, residual, weight, bias, x_bias, rng, 1, p, False)
            add_layer_norm_fwd(call)
            add_layer_norm_fwd(call._replace(eps=0.5, eps_on_std=hidden > 1))
            add_layer_norm_fwd(call, out_dtype=torch.float16)
            add_layer_norm_fwd(call, read=x.half())
            add_layer_norm_fwd(call, read=x.bfloat16())
            state = torch.zeros(3 * rows + 33)
            for dz, has_residual, std in ((None, True, False), (x, False, False), (x, True, hidden > 1)):
                arguments = x, dz, call._replace(eps_on_std=std), state, has_residual
                add_layer_norm_bwd(*arguments)
                add_layer_norm_bwd(*arguments, x_dtype=torch.bfloat16)
    given = x, x, weight, weight, weight, rng, 1e-6, 0.1, False
    alignments(lambda read, *given: add_layer_norm_fwd(NormCall(*given), read=read), x.half(), *given)
    alignments(lambda dout, dz, state, *given: add_layer_norm_bwd(dout, dz, NormCall(*given), state, True),
               x, x, state, *given)  # fmt: skip


def products() -> None:
    rng = torch.zeros(2, dtype=torch.int64)
    for dtype, bias_dtype, activation in itertools.product(DTYPES, DTYPES[:2], ("relu", "gelu", "swiglu")):
        for tokens, d, d_inner, p in ((1, 1, 1, 0.0), (5, 24, 40, 0.1), (16, 64, 32, 0.1), (300, 64, 32, 0.1)):
            zeros = partial(torch.zeros, dtype=dtype)
            width = 2 * d_inner if activation == "swiglu" else d_inner
            x, weight1, weight2 = zeros(tokens, d), zeros(width, d), zeros(d, d_inner)
            saved = zeros(tokens, width)
            for bias, first in ((None, weight1), (torch.zeros(width, dtype=bias_dtype), zeros(d, width).t())):
                call = FeedForwardCall(x, weight1, bias, weight2, None, rng, activation, p)
                feed_forward_hidden(call._replace(weight1=first))
                feed_forward_dz(x, call, saved)
    alignments(lambda *given: feed_forward_hidden(FeedForwardCall(*given)),
               x, weight1, bias, weight2, None, rng, "gelu", 0.1)  # fmt: skip
    alignments(lambda dout, saved, *given: feed_forward_dz(dout, FeedForwardCall(*given), saved),
               x, saved[:, :32].contiguous(), x, weight1[:32], bias, weight2, None, rng, "gelu", 0.1)  # fmt: skip

    for dtype, rows, classes in itertools.product(DTYPES, (1, 5), (1, 10, 64, 5000)):
        logits, losses = empty_logits(rows, classes, torch.zeros(1, dtype=dtype)), torch.zeros(rows)
        target, bias = torch.zeros(rows, dtype=torch.int64), torch.zeros(classes)
        for smoothing, ignored, gradient in (
            (0, -100, True),
            (0.1, -100, False),
            (0.1, 1, True),
            (0.1, -(1 << 40), True),
        ):
            for dloss, count in ((None, target[0]), (losses, None), (losses[0], None)):
                for b in (None, bias, bias.to(dtype)):
                    call = LossCall(x, x, b, target, smoothing, ignored, 1, "none", [gradient])
                    cross_entropy_rows(call, logits, losses, dloss, count)
    alignments(lambda bias, target, *given: cross_entropy_rows(call._replace(bias=bias, target=target), *given),
               bias, target, logits, losses, losses, target[0])  # fmt: skip


def attentions() -> None:
    sizes = (
        (1, 1, 1, 1, 1, 1),
        (2, 2, 2, 5, 7, 24),
        (2, 4, 2, 16, 32, 16),
        (2, 4, 2, 13, 32, 16),
        (1, 2, 1, 130, 140, 64),
        (1, 2, 1, 144, 140, 64),
        (2, 1, 1, 80, 80, 8),
    )
    for dtype, (B, H, Hk, Lq, Lk, D), in_rows in itertools.product(DTYPES, sizes, (True, False)):

        def zeros(heads: int, length: int, B=B, D=D, dtype=dtype, in_rows=in_rows) -> Tensor:
            if in_rows:
                return torch.zeros(B, length, heads, D, dtype=dtype).transpose(1, 2)
            return torch.zeros(B, heads, length, D, dtype=dtype)

        q, k, v, dout = zeros(H, Lq), zeros(Hk, Lk), zeros(Hk, Lk), zeros(H, Lq)
        rows, columns = torch.ones(B, Lq, dtype=torch.bool), torch.ones(B, Lk, dtype=torch.bool)
        matrix, one = torch.ones(B, H, Lq, Lk, dtype=torch.bool), torch.ones(1, 1, Lq, Lk, dtype=torch.bool)
        masks = [
            *({}, {"is_causal": True}, {"key_padding": columns}, {"key_padding": columns[:1], "query_padding": rows}),
            *({"attn_mask": matrix}, {"attn_mask": one, "key_padding": columns}, {"bias": torch.zeros(1, H, Lq, Lk)}),
            {"bias": torch.zeros(B, 1, 1, Lk, dtype=dtype), "attn_mask": one},
            *({"relative_bias": torch.zeros(heads, Lq + Lk - 1)} for heads in (1, H)),
        ]
        for given, p in itertools.product(masks, (0.0, 0.1)):
            both_ways(q, k, v, dout, AttentionMask(**given), 0.5, p)
        both_ways(q, k, v, dout, AttentionMask(), -0.5, 1 / 65536)
        both_ways(q, k, v, dout, AttentionMask(**masks[-1]), 0.5, 0.1, softcap=30.0)
        both_ways(q, k, v, dout, AttentionMask(relative_bias=moved(masks[-1]["relative_bias"])), 0.5, 0.0)
    both_ways(*(t.expand(2, 2, -1, -1) for t in (q, k, v, dout)), AttentionMask(), 0.5, 0.0)
    with_bias = AttentionMask(bias=torch.zeros(1, H, Lq, Lk), key_padding=columns)
    for _ in range(2):
        for i in range(4):
            both_ways(*(moved(t) if i == n else t for n, t in enumerate((q, k, v, dout))), with_bias, 0.5, 0.1)
        both_ways(q, k, v, dout, AttentionMask(bias=moved(with_bias.bias)), 0.5, 0.1)
    bias_of_a_batch()
    of_rows()
    memory = torch.zeros(B, Lq, 3, H, D, dtype=dtype).permute(2, 0, 3, 1, 4).unbind(0)
    both_ways(q, k, v, dout, AttentionMask(), 0.5, 0.1, memory)
    both_ways(q, k, v, dout, AttentionMask(), 0.5, 0.1, [moved(t) for t in memory])


def bias_of_a_batch() -> None:
    """Gradients of a bias that the batch shares: in one part, which has the bias's dtype, and in float32 parts of 1, a
    few and 16 samples."""
    for dtype, samples, H, length in itertools.product(DTYPES[:2], (7, 16, 32, 96), (1, 11), (16, 70)):
        q = torch.zeros(1, 1, length, 16, dtype=dtype).expand(samples, H, -1, -1).contiguous()
        for heads, rows in ((H, length), (1, 1)):
            bias = torch.zeros(1, heads, rows, length, dtype=dtype)
            both_ways(q, q, q, q, AttentionMask(bias=bias), 0.5, 0.0)


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, given: AttentionMask, scale: float, p: float, grads: Any = None,
    softcap: float | None = None,
) -> None:  # fmt: skip
    """Forward and backward, with p of 0 without a state of dropout."""
    rng, bias = torch.zeros(2, dtype=torch.int64) if p else None, given.any_bias
    for state in (rng, rng if rng is None else moved(rng)):
        layouts = attention.mask_layouts(q, k, v, bias)
        prepared = given.prepare_all(q.shape[2], k.shape[2], layouts, q.device, mask.prepare_mask)
        call = AttentionCall(q, k, v, bias, state, prepared, scale, p, softcap)
        out, lse = attention.attention_fwd(call)
        call = call._replace(masks=prepared[1:])
        for dlse in (None, lse, moved(lse)):
            got = attention.attention_bwd(dout, dlse, call, out, lse, bias is not None, grads)
            assert grads is None or all(a is b for a, b in zip(got, grads, strict=False))


def of_rows() -> None:
    """Launches that are bound to `known`, with the tensors that Triton's own path needs."""
    for dtype, (B, L, H, Hk, D), p in itertools.product(DTYPES, ((1, 1, 1, 1, 1), (2, 16, 4, 2, 16)), (0.0, 0.1)):
        sizes, rng = (B, L, H, Hk, D, D), torch.zeros(2, dtype=torch.int64) if p else None
        for memory in ((), tuple(torch.zeros(B, L, 2 * Hk * D, dtype=dtype).chunk(2, 2))):
            projected = torch.zeros(B * L, (H if memory else H + 2 * Hk) * D, dtype=dtype)
            dmemory, dout, known = [torch.zeros_like(t) for t in memory], projected.new_zeros(B * L, H * D), {}
            layouts = attention.mask_layouts(*attention_rows.heads(projected, memory, sizes), None)
            given = AttentionMask(key_padding=torch.ones(B, L, dtype=torch.bool))
            first, *rest = (given.prepare(L, L, each, CPU, mask.prepare_mask) for each in layouts)
            for change in (torch.clone, torch.clone, moved):
                rows = change(projected)
                out, lse = attention.attention_rows_fwd(rows, memory, sizes, first, 0.5, p, rng, known)
                call = dout, rows, memory, out, lse, torch.zeros_like(rows), dmemory, sizes, rest
                attention.attention_rows_bwd(*call, 0.5, p, rng, known)


def masks() -> None:
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    for rows, columns, tile in itertools.product((7, 16), (7, 16, 1100), ((0, 0), (16, 16), (64, 128))):
        row, column = torch.ones(2, rows, dtype=torch.bool), torch.ones(2, columns, dtype=torch.bool)
        for matrix in (torch.ones(2, 1, rows, columns, dtype=torch.bool), torch.ones(rows, 2 * columns).bool()[:, ::2]):
            for extra in ({}, {"key_padding": column}, {"query_padding": row[:1], "key_padding": moved(column)}):
                for each in ({"attn_mask": matrix}, {"attn_mask": moved(matrix)}, {}):
                    for type_ in (torch.int32, torch.int64):
                        packed = {"cu_seqlens_q": offsets.to(type_), "cu_seqlens_k": offsets.to(type_)}
                        for given in (extra | each, extra | each | packed):
                            for by_key in (False, True):
                                layout = Layout(by_key, *tile)
                                AttentionMask(**given).prepare(rows, columns, layout, CPU, mask.prepare_mask)


def decoding() -> None:
    sizes = (1, 1, 1, 1, 1, 1, 1), (2, 5, 4, 2, 64, 5, 24), (2, 3, 2, 2, 80, 1, 16), (1, 1, 2, 2, 1024, 1, 80)
    for dtype, (B, W, H, Hk, M, R, D) in itertools.product(DTYPES, sizes):
        zeros = partial(torch.zeros, dtype=dtype)
        q, k, v = zeros(B, W, H, D), zeros(B, M, R, Hk, D), zeros(B, M, R, Hk, 2 * D)
        lengths, ancestors = torch.zeros(B, dtype=torch.int32), torch.zeros(B, W, 2 * M, dtype=torch.int32)
        for given in ((None, None), (lengths, None), (lengths, ancestors[:, :, :M]), (None, ancestors[:, :, ::2])) * 2:
            decode_attention.decode_attention_fwd(q, k, v, *given, 1)
            for bias in (torch.zeros(1, M), torch.zeros(H, M, dtype=dtype)):
                decode_attention.decode_attention_fwd(q, v[..., :D], v, *given, 0.5, bias, None if H > 1 else 30.0)
        alignments(decode_attention.decode_attention_fwd, q, k, v, lengths, ancestors[:, :, :M], 0.5, bias, 30.0)


def hooks() -> None:
    """Hooks of a profiler, and those before a kernel runs, are called at each launch; then launches are bound again."""
    x, weight, seen = torch.zeros(4, 8), torch.zeros(8), []
    call = partial(add_layer_norm_fwd, NormCall(x, None, weight, weight, None, None, 1e-6, 0.0, False))
    runtime, name = triton.knobs.runtime, "add_layer_norm_fwd_kernel"
    kernel = next(each.kernel for each in launch.Launches.all if each.kernel.__name__ == name)

    def used() -> list[Any]:
        seen.clear()
        with mock.patch.object(launch.Launch, "run", RUN):
            call()
        return [*seen]

    call()
    assert used() == []
    for knob in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(runtime, knob)
        note = lambda metadata, knob=knob: seen.append((knob, metadata and metadata.get()["name"]))  # noqa: E731
        chain.add(note)
        found = used()
        chain.remove(note)
        assert [each[0] for each in found] == [knob], f"{knob}: {found}"
        assert knob == "launch_exit_hook" or found[0][1] == name
        assert used() == []
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(len(args) + len(kwargs)))
    assert len(used()) == 1
    kernel.pre_run_hooks.clear()
    assert used() == []


def devices() -> None:
    """A launch makes its device the current one, and binds a kernel for each device."""
    entered = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        with mock.patch.object(launch, "current_device", lambda: index):
            yield

    one, started = launch.Launch(launch.Launches.all[0], None, {}), []
    one.launcher, one.function, one.metadata, one.constants = lambda *call: started.append(call), 1, 2, (3,)
    patches = (
        mock.patch.object(launch, "current_device", lambda: 0, create=True),
        mock.patch("torch.cuda.device", device),
    )
    run = mock.patch.object(launch.Launch, "run", RUN)
    streams = mock.patch.object(launch, "current_stream", lambda index: 100 + index)
    with patches[0], patches[1], run, streams:
        for index in (0, 1):
            one.run(index, 5, (7,), ())
    assert entered == [1] and [call[3] for call in started] == [100, 101]
    assert started[0] == (5, 1, 1, 100, 1, 2, None, None, None, 7, 3)


def planted(name: str) -> AbstractContextManager[Any]:
    """An error that the cases must find."""
    addresses, strided, masking = launch.addresses, arguments.strided, arguments.masking
    users = [module for module in list(sys.modules.values()) if module.__name__.startswith("fastattn.kernels")]

    def everywhere(function: str, wrong: Any) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for module in users:
            if hasattr(module, function):
                stack.enter_context(mock.patch.object(module, function, wrong))
        return stack

    def without(kernel: str, place: int) -> AbstractContextManager[Any]:
        """Keys of this kernel without one element."""

        def add(self: Any, key: tuple[Any, ...], *given: Any, **named: Any) -> Any:
            key = (*key[:place], *key[place + 1 :]) if self.kernel.__name__ == kernel else key
            return checked_add(self, key, *given, **named)

        return mock.patch.object(launch.Launches, "add", add)

    def launched_with(c_launcher: Any) -> AbstractContextManager[Any]:
        return mock.patch.object(launch, "c_launcher", c_launcher)

    def swapped(run: Any) -> Any:
        """A launcher with the first two arguments in a wrong order."""
        return lambda *call: run(*call[:9], call[10], call[9], *call[11:])

    return {
        "alignment": lambda: everywhere("addresses", lambda *t: (addresses(*t)[0], True)),
        "integers": lambda: everywhere("specialization", lambda *n: ()),
        "strides": lambda: mock.patch.object(arguments, "strided", lambda *t: (strided(*t)[0], True)),
        "mask": lambda: mock.patch.object(arguments, "masking", lambda m: (*masking(m)[:2], None)),
        "type of the residual": lambda: without("add_layer_norm_fwd_kernel", 2),
        "type of dx": lambda: without("add_layer_norm_bwd_kernel", 2),
        "x_bias": lambda: without("add_layer_norm_fwd_kernel", 3),
        "type of the weight": lambda: without("add_layer_norm_bwd_kernel", 4),
        "hidden": lambda: without("add_layer_norm_fwd_kernel", 10),
        "type of out": lambda: without("add_layer_norm_fwd_kernel", 13),
        "type of read": lambda: without("add_layer_norm_fwd_kernel", 14),
        "few tokens": lambda: without("feed_forward_fwd_kernel", 8),
        "activation": lambda: without("feed_forward_bwd_kernel", 14),
        "64 bits": lambda: without("cross_entropy_rows_kernel", 9),
        "queries": lambda: without("attention_dkv_kernel", 5),
        "stream": lambda: mock.patch.object(launch, "current_stream", lambda device: 0),
        "no hooks": lambda: mock.patch.object(launch, "_has_hooks", lambda: False),
        "wrong handle": lambda: launched_with(lambda c: (c.run, None, c.packed_metadata)),
        "order": lambda: launched_with(lambda c: (swapped(c.run), c.function, c.packed_metadata)),
        "warps": lambda: launched_with(lambda c: (c.run, c.function, (32, *c.packed_metadata[1:]))),
    }[name]()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("error", nargs="?")
    arguments = parser.parse_args()
    if arguments.stub:
        ctypes.CDLL("libcuda.so.1").call_at_launches(record_launch)
    with (
        without_gpu(LaunchedByC if arguments.stub else NotCompiled),
        planted(arguments.error) if arguments.error else ExitStack(),
    ):
        for case in (norms, products, attentions, masks, decoding, hooks, devices):
            case()
    for each in launch.Launches.all:
        assert bound[each.kernel.__name__], f"{each.kernel.__name__} was never launched as bound before"
    print(*sorted(bound))


if __name__ == "__main__":
    main()
