"""How the CUDA kernels are launched, threads and dynamic shared memory of a block: asked of the launchers themselves.

csrc/host's build of the extension can note launches instead of running them (csrc/host/launch.h). A case calls an op of
the package with the backend "cuda", as on a GPU of some compute capability; tensors are small, as a launch depends on
widths, types and flags. The first launch of a kernel counts. This file is also the program that runs all cases, since
a process believes in one capability.

A new kernel that no case launches needs one: a function in CASES, or a line in one of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = (80, 90)


class Launch(NamedTuple):
    threads: int  # of a block
    shared: int  # bytes, dynamic, of a block


def attention() -> None:
    """Every type and head dimension; with and without masks, bias and dropout; long and short sequences; weights."""
    import torch

    import fastattn
    from fastattn.cuda import _attention_sm90 as sm90

    def call(dtype: torch.dtype, D: int, L: int, learned: bool = False, **options: object) -> None:
        shape = (1, 2, L, D)
        q, k, v = (torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        if learned:
            options["attn_mask"] = torch.zeros(1, 2, L, L, dtype=dtype, requires_grad=True)
        for weights in (True, "argmax"):
            options["return_weights"] = weights
            out, *_ = fastattn.scaled_dot_product_attention(q, k, v, **options, backend="cuda")
        out.sum().backward()

    element_mask = torch.ones(1, 1, 256, 256, dtype=torch.bool)
    accumulate = mock.patch.object(sm90, "ACCUMULATE_DQ", True)
    for dtype, D in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 96, 128, 256)):
        for tf32 in (False, True)[: 1 + (dtype == torch.float32)]:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for options in ({"is_causal": True}, {"attn_mask": element_mask, "dropout_p": 0.1}, {"learned": True}):
                call(dtype, D, 256, **options)
            with accumulate:
                call(dtype, D, 256, is_causal=True)
                call(dtype, D, 256, dropout_p=0.1)
            call(dtype, D, 128)


def add_layer_norm() -> None:
    """Every type of x and weight, widths at which a row is cut another way, and the same less one: no vectors."""
    import torch

    import fastattn

    for dtype, width in itertools.product((torch.bfloat16, torch.float16, torch.float32), (256, 512, 1024, 16384)):
        for weight_dtype, hidden in itertools.product(dict.fromkeys((dtype, torch.float32)), (width, width - 1)):
            x, residual = (torch.zeros(8, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
            weight, bias = (torch.ones(hidden, dtype=weight_dtype, requires_grad=True) for _ in range(2))
            out = fastattn.dropout_add_layer_norm(x, residual, weight, bias, dropout_p=0.1, backend="cuda")
            out.sum().backward()


def embed_layer_norm() -> None:
    """Widths at which a row is cut another way, forward or backward, and the same less one; types come at run time."""
    import torch

    import fastattn

    for width in (256, 512, 1024, 4096, 8192, 16384):
        for hidden in (width, width - 1):
            embedding, weight, bias = (torch.zeros(s, requires_grad=True) for s in ((4, hidden), (hidden,), (hidden,)))
            tokens, table = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4, hidden)
            out = fastattn.embed_layer_norm(tokens, embedding, table, weight, bias, backend="cuda")
            out.sum().backward()


def feed_forward() -> None:
    """Every type: as large as products with an epilogue are for, and small; the last without vectors."""
    import torch

    import fastattn

    sizes = ((4224, 1024), (16, 64), (16, 63))  # tokens, d_ff
    for dtype, (tokens, d_ff) in itertools.product((torch.bfloat16, torch.float16, torch.float32), sizes):
        x, weight1, bias1, weight2 = (
            torch.zeros(shape, dtype=dtype, requires_grad=True)
            for shape in ((tokens, 8), (d_ff, 8), (d_ff,), (8, d_ff))
        )
        fastattn.feed_forward(x, weight1, bias1, weight2, None, backend="cuda").sum().backward()


def linear_cross_entropy() -> None:
    """Every type, 32000 classes; gradients made at once, whose launch has the shared memory that holds a row."""
    import torch

    from fastattn.cuda.linear_cross_entropy import linear_cross_entropy_fwd

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight = torch.zeros(4, 8, dtype=dtype), torch.zeros(32000, 8, dtype=dtype)
        target = torch.zeros(4, dtype=torch.int64)
        linear_cross_entropy_fwd(x, weight, None, target, 0.1, -100, 1.0, "mean", (True, True, True))


CASES: tuple[Callable[[], None], ...] = (
    attention,
    add_layer_norm,
    embed_layer_norm,
    feed_forward,
    linear_cross_entropy,
)


@functools.cache
def launches() -> dict[str, Launch]:
    """How each kernel, by its mangled name, is launched by the cases."""
    sys.path.append(str(ROOT / "tests" / "cuda"))
    import host_build

    library = host_build.build("_C", host_build.extension_sources(), host_build.KEPT)
    names = dict(functions(library))
    found: dict[str, Launch] = {}
    for capability in CAPABILITIES:
        for place, _, threads, shared in _noted(library, capability):
            found.setdefault(names[place], Launch(threads, shared))
    return found


def _noted(library: Path, capability: int) -> Iterator[tuple[int, int, int, int]]:
    """(place in the library, blocks, threads, shared) of every launch of the cases."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches"
        environment = os.environ | {
            "FASTATTN_HOST_LAUNCHES": str(file),
            "FASTATTN_HOST_CAPABILITY": str(capability),
            "FASTATTN_CUDA_HOST": str(library),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"the cases of {__file__} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        for line in file.read_text().splitlines():
            yield tuple(map(int, line.split()))


def functions(library: Path) -> Iterator[tuple[int, str]]:
    """(place, mangled name) of every function, also of those that only the library itself can call."""
    for line in subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout.splitlines():
        place, kind, name = line.rsplit(maxsplit=2) if not line.startswith(" ") else ("", "", "")
        if kind in ("t", "T", "W", "w"):
            yield int(place, 16), name


if __name__ == "__main__":
    for case in CASES:
        case()
