"""Measures what the CUDA kernels leave open, on a GPU: which of two kernels, tiles or orders is the faster one.

    python tools/measure_choices.py --out choices.json [--seconds 0.4]

The most telling first: the forward of short sequences, the tile of Hopper's forward, then LayerNorm's backward,
decoding, and a short training call next to other backends. Samples of a call's ways alternate.
--tiny: small problems; without a GPU they run in the emulator, if FASTATTN_CUDA_EMULATOR names a build.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from timing import Call, measure_in_turn

import fastattn
from fastattn.backends import timings
from fastattn.backends.cuda import attention as cuda
from fastattn.check.doctor import positive_number, usable_device
from fastattn.masks import Layout

HEADS, TOKENS = 8, 8192
BACKENDS = ("cuda", "triton", "aten")
Context = Callable[[], AbstractContextManager]


class Choice(NamedTuple):
    """A call and its ways: name -> (a context for the call, the call)."""

    section: str
    what: str
    ways: dict[str, tuple[Context, Call]]


def choices(device: torch.device, tiny: bool) -> Iterator[Choice]:
    def attention(length: int, is_padded: bool, dropout_p: float) -> tuple[str, Call, list[Tensor]]:
        """Its name, a call that takes `backend`, and what it has gradients of."""
        batch = 1 if tiny else max(TOKENS // length, 1)
        heads = 1 if tiny else HEADS
        q, k, v = (
            torch.randn(batch, length, heads, 64, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
        )
        real = torch.arange(length, device=device) < torch.linspace(length // 2, length, batch, device=device)[:, None]
        leaves = [t.requires_grad_() for t in (q, k, v)]
        call = partial(
            fastattn.scaled_dot_product_attention,
            *leaves,
            fastattn.AttentionMask(key_padding=real) if is_padded else None,
            dropout_p,
        )
        said = f"{batch} x {length} tokens{', padding' * is_padded}{', dropout' if dropout_p else ''}"
        return said, call, leaves

    for length in (32, 64, 128):
        for dropout_p in (0.0, 0.1):
            said, call, _ = attention(length, True, dropout_p)
            kernels = {"sm_80": 128, "sm_90": 0}
            ways = {name: (partial(_sm80_up_to, most), _forward(call)) for name, most in kernels.items()}
            yield Choice("forward, short", said, ways)
    for length in (200,) if tiny else (128, 256, 512, 1024, 4096):
        said, call, _ = attention(length, False, 0.0)
        ways = {f"{rows} queries a tile": (partial(_forward_tile, rows), _forward(call)) for rows in (128, 192)}
        yield Choice("forward, tile", said, ways)
    for rows, width in ((64, 32),) if tiny else ((8192, 512), (65536, 512), (65536, 1024)):
        shapes = ((rows, width), (rows, width), (width,), (width,))
        leaves = [torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        call = partial(fastattn.dropout_add_layer_norm, *leaves)
        ways = {name: (nullcontext, _backward(partial(call, backend=name), leaves)) for name in BACKENDS}
        yield Choice("LayerNorm, backward", f"{rows} x {width}", ways)
    for beams in (1, 5, 8):
        batch = 2 if tiny else 32
        shapes = ((batch, beams, HEADS, 64), (batch, 64, 1, HEADS, 64), (batch, 64, 1, HEADS, 64))
        call = partial(
            fastattn.decode_attention, *(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
        )
        ways = {name: (nullcontext, partial(call, backend=name)) for name in BACKENDS}
        yield Choice("decoding, shared keys", f"{batch} x {beams} queries, 64 keys", ways)
    for length in (32, 64, 128):
        for dropout_p in (0.0, 0.1):
            said, call, leaves = attention(length, True, dropout_p)
            ways = {name: (nullcontext, _both(partial(call, backend=name), leaves)) for name in BACKENDS}
            yield Choice("forward and backward, short", said, ways)


def _forward(call: Callable[..., Tensor]) -> Call:
    return torch.no_grad()(partial(call, backend="cuda"))


def _backward(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Call:
    made: list[Tensor] = []

    def step() -> None:
        if not made:
            made.append(call())
            made.append(torch.randn_like(made[0]))
        torch.autograd.grad(made[0], leaves, made[1], retain_graph=True)

    return step


def _both(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Call:
    return lambda: torch.autograd.grad((out := call()), leaves, out.detach())


def _sm80_up_to(length: int) -> AbstractContextManager:
    """The forward of sequences up to this length by the kernels of sm_80."""
    return mock.patch.object(cuda, "_MOST_SM80", length)


def _forward_tile(rows: int) -> AbstractContextManager:
    """The forward in tiles of `rows` queries."""
    mask_layouts = cuda.mask_layouts
    layout = Layout(False, rows, 128, (*cuda.SM90, rows))
    return mock.patch.object(cuda, "mask_layouts", lambda *call: (layout, *mask_layouts(*call)[1:]))


def measure(choice: Choice, device: torch.device, seconds: float) -> dict[str, Any]:
    """Median milliseconds of each way, or why it cannot run."""
    failed, calls = {}, {}
    for name, (context, call) in choice.ways.items():

        def one(context: Context = context, call: Call = call) -> None:
            with context():
                call()

        try:
            one()
            calls[name] = one
        except Exception as error:  # of a backend that is not there: the others are measured
            failed[name] = str(error).splitlines()[0]
    found = measure_in_turn(list(calls.values()), device, seconds) if calls else []
    times = {name: timing.median_ms for name, timing in zip(calls, found, strict=True)}
    return {"section": choice.section, "what": choice.what, "ms": times, "failed": failed}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", type=usable_device, default="cuda")
    parser.add_argument("--seconds", type=positive_number, default=0.2, help="of samples for each way of a call")
    parser.add_argument("--tiny", action="store_true", help="small problems, to try this program")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for choice in choices(args.device, args.tiny):
        rows.append(measure(choice, args.device, args.seconds))
        row = rows[-1]
        best = min(row["ms"].values(), default=0.0)
        said = [f"{name} {ms:.4g} ms ({ms / best:.2f})" for name, ms in row["ms"].items()]
        said += [f"{name}: {reason}" for name, reason in row["failed"].items()]
        print(f"{row['section']}: {row['what']}: {'; '.join(said)}", flush=True)
        record = {"device": timings.device_name(args.device.type), "versions": timings.versions(), "rows": rows}
        args.out.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
