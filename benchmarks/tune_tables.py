"""The tile tables that tune.py searches: a function a room gives its rows. A room's table is added to BACKENDS.

A row is tried by replacing what the room looks up while it launches. `checked` is a small problem with ragged tiles,
`timed` the one to be fast at. Both have equal flags, head dimensions and widths, and other sizes that Triton
specialises alike (multiples of 16, or not): what is timed is the compiled kernel that was checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

import fastattn
from fastattn._problems import Problem, divided_last

SEED = 20170612


class Row(NamedTuple):
    """One row of a tile table. use(tile): inside, launches take this tile. paste(tile): the row for the table."""

    name: str
    backend: str
    dtype: torch.dtype
    checked: Callable[[], Problem]
    timed: Callable[[], Problem]
    direction: str  # that is timed: "forward", "backward" or "both"
    current: tuple[int, ...]
    candidates: Sequence[tuple[int, ...]]
    use: Callable[[tuple[int, ...]], AbstractContextManager]
    paste: Callable[[tuple[int, ...]], str]


def randn(device: torch.device, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(SEED)
    return {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}


def _numbers(tile: tuple[int, ...]) -> str:
    return ", ".join(map(str, tile))


def attention(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """The table of kernels/attention/config.py, by what training spends its time on; of "weights" the call for them is
    timed, the forward before it included. Its tiles are also those of rows.py."""
    from fastattn.kernels.attention import config

    bits_of = {torch.bfloat16: 16, torch.float32: 32}
    head_dims, dtypes = ((64,), (torch.float32,)) if quick else ((64, 128, 256), tuple(bits_of))
    for dtype, head_dim, kernel in itertools.product(dtypes, head_dims, ("forward", "dq", "dkv", "dbias", "weights")):
        key = kernel, bits_of[dtype], head_dim
        current = config._look_up(kernel, arch, dtype, head_dim, False)
        # Exact float32 runs on the GPU's plain cores, from small tiles. Products of 16 bits want 64 rows or columns.
        sizes, stages = ((16, 32, 64), (1, 2)) if dtype == torch.float32 else ((32, 64, 128), (2, 3, 4))
        grid = itertools.product(sizes, sizes, (4, 8), stages)
        candidates = [config.Config(*tile) for tile in grid if max(tile[:2]) > sizes[0]]
        if quick:
            candidates = [config.Config(32, 32, 4, 1), config.Config(64, 32, 4, 1)]

        def problem(batch: int, heads: int, length: int, head_dim: int = head_dim, kernel: str = kernel) -> Problem:
            shape = (batch, heads, length, head_dim)
            tensors = randn(device, query=shape, key=shape, value=shape)
            if kernel == "dbias":
                tensors |= randn(device, attn_mask=(1, heads, length, length))
            if kernel == "weights":
                return Problem("attention", "causal weights", weights_alone, tensors, {"is_causal": True})
            function = fastattn.scaled_dot_product_attention
            return Problem("attention", "causal", function, tensors, {"is_causal": True}, divided_last)

        def use(tile: tuple[int, ...], kernel: str = kernel) -> AbstractContextManager:
            look_up = config._look_up
            chosen = lambda name, *rest: tile if name == kernel else look_up(name, *rest)  # noqa: E731
            return mock.patch.multiple(config, INTERPRETED=False, _look_up=chosen)

        def paste(tile: tuple[int, ...], key: Any = key) -> str:
            columns = list(config._CONFIGS[key])
            columns[config._COLUMN.get(arch, config._HOPPER) if len(columns) > 1 else 0] = tile
            row = ", ".join(f"Config({_numbers(column)})" for column in columns)
            return f'    ("{key[0]}", {key[1]}, {key[2]}): ({row}{"," * (len(columns) == 1)}),'

        length = 1024 if dtype == torch.float32 or kernel in ("dbias", "weights") else 4096
        yield Row(
            f"attention {kernel}, {dtype}, D {head_dim}".replace("torch.", ""),
            "triton",
            dtype,
            checked=partial(problem, 1, 2, 48) if quick else partial(problem, 2, 2, 336),
            timed=partial(problem, 1, 2, 48) if quick else partial(problem, 4, 8, length),
            direction="forward" if kernel in ("forward", "weights") else "backward",
            current=current,
            candidates=candidates,
            use=use,
            paste=paste,
        )


def weights_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """The attention weights, which kernels give without a gradient: here every backend's gradients are 0."""
    _, weights = fastattn.scaled_dot_product_attention(query, key, value, **options, return_weights=True)
    return weights.detach() + 0 * (query.sum() + key.sum() + value.sum())


def feed_forward(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """tile_for() of kernels/feed_forward/matmul.py: relu is wide in both directions, swiglu in none, so an entry is
    timed forward and backward together."""
    from fastattn.kernels.feed_forward import backward, forward, matmul

    d, d_ff = (32, 32) if quick else (512, 2048)
    for wide, few in itertools.product((True, False), (False, True)):
        if quick and (few or not wide):
            continue
        dtype = torch.float32 if quick else torch.bfloat16
        activation = "relu" if wide else "swiglu"
        rows = d_ff if wide else 2 * d_ff
        grid = itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 3, 4, 5))
        candidates = [matmul.Tile(*tile) for tile in ([(16, 32, 16, 4, 1), (32, 32, 16, 4, 1)] if quick else grid)]

        def problem(tokens: int, activation: str = activation, rows: int = rows) -> Problem:
            tensors = randn(device, x=(tokens, d), weight1=(rows, d), bias1=(rows,), weight2=(d, d_ff), bias2=(d,))
            tensors["weight1"] *= d**-0.5
            tensors["weight2"] *= d_ff**-0.5
            return Problem("feed_forward", activation, fastattn.feed_forward, tensors, {"activation": activation})

        def use(tile: tuple[int, ...]) -> AbstractContextManager:
            return _replaced(
                (forward, "tile_for", lambda *_, **__: tile), (backward, "tile_for", lambda *_, **__: tile)
            )

        def paste(tile: tuple[int, ...], dtype: torch.dtype = dtype, few: bool = few, wide: bool = wide) -> str:
            tokens = "few" if few else "many"
            return f"tile_for({dtype}, {tokens} tokens, wide={wide}) at sm_{arch}: Tile({_numbers(tile)})"

        yield Row(
            f"feed-forward, {activation}, {'few' if few else 'many'} tokens",
            "triton",
            dtype,
            checked=partial(problem, 20 if quick else 160 if few else 400),
            timed=partial(problem, 20 if quick else 160 if few else 8192),
            direction="both",
            current=matmul.tile_for(dtype, 160 if few else 8192, wide),
            candidates=candidates,
            use=use,
            paste=paste,
        )


def add_layer_norm(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """forward_tile() and backward_tile() of kernels/add_layer_norm: rows a program and warps, at each width."""
    from fastattn.kernels.add_layer_norm import backward, forward

    for hidden, direction in itertools.product((64,) if quick else (512, 1024, 4096), ("forward", "backward")):
        module = forward if direction == "forward" else backward
        name = f"{direction}_tile"
        current = getattr(module, name)(hidden)
        grid = [
            (rows, hidden, warps, *stages)
            for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16))
            for stages in ([()] if direction == "forward" else [(1,), (2,), (3,)])
            if 8 <= rows * hidden / (32 * warps) <= 64  # values of a lane
        ]

        def problem(rows: int, hidden: int = hidden) -> Problem:
            tensors = randn(device, x=(rows, hidden), residual=(rows, hidden), weight=(hidden,), bias=(hidden,))
            return Problem("add_layer_norm", "dropout", fastattn.dropout_add_layer_norm, tensors, {"dropout_p": 0.1})

        def use(tile: tuple[int, ...], module: Any = module, name: str = name) -> AbstractContextManager:
            return _replaced((module, name, lambda *arguments: tile))

        def paste(tile: tuple[int, ...], name: str = name, hidden: int = hidden) -> str:
            return f"{name}({hidden}): ({_numbers(tile)})"

        yield Row(
            f"layer norm {direction}, hidden {hidden}",
            "triton",
            torch.bfloat16,
            checked=partial(problem, 10 if quick else 300),
            timed=partial(problem, 10 if quick else 32768 if hidden <= 1024 else 8192),
            direction=direction,
            current=current,
            candidates=grid[:2] if quick else grid,
            use=use,
            paste=paste,
        )


@contextmanager
def _replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


# tune_cuda.py has those of the CUDA rooms.
BACKENDS: dict[str, Callable[[torch.device, int, bool], Iterator[Row]]] = {
    "attention": attention,
    "feed_forward": feed_forward,
    "add_layer_norm": add_layer_norm,
}


def call(row: Row) -> Callable[[], Any]:
    """The call that is timed. Made inside row.use(tile)."""
    problem = row.timed()
    leaves = {name: t.to(row.dtype).requires_grad_() for name, t in problem.tensors.items()}
    forward = partial(problem.function, **leaves, **problem.options, backend=row.backend)
    if row.direction == "forward":
        return forward
    out = forward()
    dout = torch.randn_like(out)
    if row.direction == "both":
        return lambda: torch.autograd.grad(forward(), list(leaves.values()), dout)
    return lambda: torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True)
