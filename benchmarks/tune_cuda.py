"""What tune.py can choose in the CUDA rooms: which of the compiled kernels a call takes.

Their tiles are template parameters, so none can be tried without compiling it: the headers of csrc/ say what was. What
is left at run time are the choices of fastattn/cuda/, each a row here with a number for every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from tune_tables import Row, randn

import fastattn
import fastattn.cuda
from fastattn._problems import Problem, divided_last


def _is_served(device: torch.device) -> bool:
    """Whether the CUDA rooms run here; not in the processes that compile Triton's candidates."""
    reason = fastattn.cuda.refuse_device(torch.empty(0, device=device))
    if reason:
        print(f"\nthe CUDA rooms' choices are left out: {reason}")
    return not reason


def attention(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """The backward of short sequences, which has kernels of its own up to 128; and on Hopper the one for long ones,
    which may add dq up in memory instead of computing the scores once more for it."""
    if not _is_served(device):
        return
    from fastattn.cuda import _attention_short as short
    from fastattn.cuda import _attention_sm90 as sm90

    def problem(batch: int, heads: int, length: int, head_dim: int) -> Problem:
        shape = (batch, heads, length, head_dim)
        function, tensors = fastattn.scaled_dot_product_attention, randn(device, query=shape, key=shape, value=shape)
        return Problem("attention", "causal", function, tensors, {"is_causal": True}, divided_last)

    def row(name: str, length: int, head_dim: int, use: Any, current: int, paste: Callable[[int], str]) -> Row:
        small = partial(problem, 1, 2, min(length, 160), head_dim)
        large = partial(problem, 65536 // length, 8, length, head_dim)
        return Row(
            f"CUDA attention backward, {name}, L {length}, D {head_dim}", "cuda", torch.bfloat16,
            checked=small, timed=small if quick else large, direction="backward", current=(current,),
            candidates=[(0,), (1,)], use=lambda tile: use(tile[0]), paste=lambda tile: paste(tile[0]),
        )  # fmt: skip

    for length, head_dim in ((32, 64), (64, 64), (128, 64), (128, 128), (128, 256)):
        yield row(
            "1: the kernel of short sequences, 0: those of all lengths", length, head_dim,
            use=lambda taken: mock.patch.object(short, "serves", lambda *_: bool(taken)), current=1,
            paste=lambda taken, at=(length, head_dim): f"_attention_short.serves(): {bool(taken)} at L, D = {at}",
        )  # fmt: skip
    for head_dim in (64, 128) if arch == 90 else ():
        yield row(
            "1: dq added up in memory, 0: by a kernel of its own", 4096, head_dim,
            use=lambda taken: mock.patch.object(sm90, "ACCUMULATE_DQ", bool(taken)), current=int(sm90.ACCUMULATE_DQ),
            paste=lambda taken, D=head_dim: f"_attention_sm90.ACCUMULATE_DQ = {bool(taken)}, at D {D}",
        )  # fmt: skip


def feed_forward(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """SPEEDS of fastattn/cuda/feed_forward.py: a product with its epilogue in one kernel, or cuBLAS's and a pointwise
    pass. Depth decides, so each depth is a row; the table's floors are to be replaced by speeds that choose alike."""
    if not _is_served(device):
        return
    from fastattn.cuda import feed_forward as room

    speed = room.SPEEDS.get(arch)
    if speed is None:
        return
    tokens, routes = 8192, (room.Route.CUBLAS, speed.route)
    small = (200, 64, 160)
    for depth, direction in ((d, way) for d in (256, 512, 1024, 2048) for way in ("forward", "backward")):
        d_ff = 4 * depth

        def problem(tokens: int, d: int, d_ff: int) -> Problem:
            tensors = randn(device, x=(tokens, d), weight1=(d_ff, d), bias1=(d_ff,), weight2=(d, d_ff), bias2=(d,))
            tensors["weight1"] *= d**-0.5
            tensors["weight2"] *= d_ff**-0.5
            return Problem("feed_forward", "relu", fastattn.feed_forward, tensors, {})

        def use(tile: tuple[int, ...]) -> AbstractContextManager:
            return mock.patch.object(room, "route_of", lambda *_: room.Route(tile[0]))

        def paste(tile: tuple[int, ...], depth: int = depth, direction: str = direction) -> str:
            return f"SPEEDS[{arch}]: {room.Route(tile[0])!r} pays at depth {depth}, {direction}, {tokens} tokens, relu"

        takes = speed.pays(tokens * d_ff, depth, 4 if direction == "forward" else 2)
        yield Row(
            f"CUDA feed-forward {direction}, {', '.join(f'{r:d}: {r.name}' for r in routes)}, {depth} x {d_ff}",
            "cuda", torch.bfloat16,
            checked=partial(problem, *small), timed=partial(problem, *(small if quick else (tokens, depth, d_ff))),
            direction=direction, current=(int(routes[takes]),), candidates=[(int(r),) for r in routes],
            use=use, paste=paste,
        )  # fmt: skip
