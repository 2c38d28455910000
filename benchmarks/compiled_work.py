"""What each kernel must do, by formula, and the least time that takes: one table for Triton, one for CUDA.

A formula is evaluated for one problem, stated here: the time is a floor for comparing kernels with their bound, not a
prediction. FLOPs are those of matrix products; bytes count every input and output once; `special` are exponentials and
reciprocals, of which a multiprocessor does 16 a clock. Dropout's integers are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Ceiling(NamedTuple):
    """Datasheet figures, which nothing reaches. flops: by dtype, of dense products."""

    device: str
    multiprocessors: int
    clock: float
    flops: dict[str, float]
    bandwidth: float


_HALF = ("bfloat16", "float16")
CEILINGS = {
    "sm_80": Ceiling(
        "A100 80 GB", 108, 1.41e9, dict.fromkeys(_HALF, 312e12) | {"tf32": 156e12, "float32": 19.5e12}, 2.04e12
    ),
    "sm_90a": Ceiling("H200", 132, 1.83e9, dict.fromkeys(_HALF, 989e12) | {"tf32": 494e12, "float32": 67e12}, 4.8e12),
}
_SPECIAL_A_CLOCK = 16


class Work(NamedTuple):
    dtype: str  # of the products
    flop: float
    byte: float
    special: float = 0.0

    def bound(self, arch: str) -> tuple[str, float]:
        """What takes longest, "products", "memory" or "special", and how many microseconds it takes at least."""
        ceiling = CEILINGS[arch]
        seconds = {
            "products": self.flop / ceiling.flops[self.dtype],
            "memory": self.byte / ceiling.bandwidth,
            "special": self.special / (_SPECIAL_A_CLOCK * ceiling.multiprocessors * ceiling.clock),
        }
        limit = max(seconds, key=seconds.__getitem__)
        return limit, seconds[limit] * 1e6


class Launch(NamedTuple):
    """Of a CUDA kernel. threads: of a block, where __launch_bounds__ says more; shared: dynamic, bytes, where known."""

    work: Work
    threads: int | None = None
    shared: int = 0


def _size(dtype: str) -> int:
    return 2 if dtype in _HALF else 4


def _attention(
    products: int, matrices: int, rows: int, bias: int = 1, square: int = 0, batch: int = 4, length: int = 4096
) -> Callable[[str], Work]:
    """The work of a kernel that takes `products` products of all visible pairs and reads or writes so many (B, H, L, D)
    matrices, (B, H, L) float32 vectors, the bias and (B, H, L, L) matrices. Causal, H 16, B * L 16384.
    """
    B, H, L = batch, 16, length

    def work(case: str) -> Work:
        dtype, head_dim = case.split()[0], int(re.search(r"\bD(\d+)", case)[1])
        pairs = L * (L + 1) / 2
        byte = B * H * L * (matrices * head_dim * _size(dtype) + rows * 4) + B * H * L * L * square * _size(dtype)
        byte += (B * pairs if "lists" in case else 0) + (bias * H * pairs * 4 if "bias" in case else 0)
        return Work(dtype, 2 * products * B * H * pairs * head_dim, byte, B * H * pairs if products else 0)

    return work


def _attention_rows(case: str) -> Work:
    """Exact float32 walks the keys again; 16-bit types look at their lse and stop."""
    return _attention(2, 4, 3)(case) if case.startswith("float32") else _attention(0, 0, 2, bias=0)(case)


def _norm(reads: int, writes: int, vectors: int) -> Callable[[str], Work]:
    """Reads and writes of (65536, hidden) matrices, and float32 vectors of a value a row; one write less, backward,
    where dx is dresidual: without dropout."""

    def work(case: str) -> Work:
        dtype, hidden = case.split()[0], int(re.search(r"hidden (\d+)", case)[1])
        matrices = reads + writes - (reads == 3 and "dropout" not in case)
        return Work(dtype, 0, 65536 * (matrices * hidden * _size(dtype) + 4 * vectors))

    return work


def _partials(case: str) -> Work:
    """Two sums over 264 programs for each column."""
    dtype, hidden = case.split()[0], int(re.search(r"hidden (\d+)", case)[1])
    return Work(dtype, 0, 2 * hidden * (264 * 4 + _size(dtype)))


def _feed_forward(backward: bool) -> Callable[[str], Work]:
    """The fused product, x weight1^T or dout weight2: n tokens, few: 64, else 8192; d 512, d_ff f 2048."""

    def work(case: str) -> Work:
        dtype, activation = re.match(r"(\w+) (\w+)", case).groups()
        n, d, f = 64 if "few" in case else 8192, 512, 2048
        halves = 2 if activation in ("geglu", "swiglu") else 1
        products = 1 if backward else halves
        stored = 1 if activation == "relu" else halves + 1  # h alone; else z and h, or dz and h
        read_back = halves if backward else 0  # z, of relu h
        byte = _size(dtype) * (n * d + products * d * f + (stored + read_back) * n * f)
        special = {"relu": 0, "gelu": 1, "geglu": 1, "silu": 2, "swiglu": 2}[activation] * n * f
        return Work(dtype, 2 * n * d * f * products, byte, special)

    return work


def _cross_entropy(case: str) -> Work:
    """8192 rows of logits, read, and overwritten by their gradient; an exponential each time a logit is looked at."""
    dtype, classes, gradient = re.match(r"(\w+) classes (\d+) gradient (\w+)", case).groups()
    times = 1 if gradient == "none" else 2
    logits = 8192 * int(classes)
    return Work(dtype, 0, times * logits * _size(dtype) + 8192 * (8 + 4), times * logits)


# Triton: kernel -> work of a case of compiled_triton.py.
TRITON: dict[str, Callable[[str], Work]] = {
    "attention_forward_kernel": _attention(products=2, matrices=4, rows=1),
    "attention_dq_kernel": _attention(products=3, matrices=6, rows=2),
    "attention_dkv_kernel": _attention(products=4, matrices=6, rows=2),
    "attention_dbias_kernel": _attention(products=2, matrices=4, rows=2, bias=2),
    "attention_weights_kernel": _attention(products=1, matrices=2, rows=1, square=1),
    "attention_rows_kernel": _attention_rows,
    "seen_keys_kernel": _attention(products=0, matrices=0, rows=0),
    "add_layer_norm_fwd_kernel": _norm(reads=2, writes=2, vectors=2),
    "add_layer_norm_bwd_kernel": _norm(reads=3, writes=2, vectors=2),
    "add_partials_kernel": _partials,
    "feed_forward_fwd_kernel": _feed_forward(backward=False),
    "feed_forward_bwd_kernel": _feed_forward(backward=True),
    "cross_entropy_rows_kernel": _cross_entropy,
}

_CUDA_DTYPES = {"float": "float32", "Tf32": "tf32", "__nv_bfloat16": "bfloat16", "__half": "float16"}


def _cuda_norm_forward(case: str) -> Launch:
    """A warp a row, four rows a block; its row is 256 columns a chunk."""
    x, _, chunks, _ = case.split(", ")
    return Launch(_norm(2, 2, 2)(f"{_CUDA_DTYPES[x]} hidden {256 * int(chunks)}"), 128, 128)


def _cuda_norm_backward(case: str) -> Launch:
    """Up to hidden 512 eight rows a block of 256 threads, whose sums of two vectors lie in shared memory; four chunks
    are for rows of 16384, a block of 512 threads each."""
    x, _, chunks, _ = case.split(", ")
    hidden = {"1": 256, "2": 512, "4": 16384}[chunks]
    work = _norm(3, 2, 2)(f"{_CUDA_DTYPES[x]} hidden {hidden}, dropout")
    return Launch(work, 512, 256) if chunks == "4" else Launch(work, 256, 256 + 8 * hidden)


def _cuda_attention(work: Callable[[str], Work]) -> Callable[[str], Launch]:
    """Template arguments: the type, and the head dimension, alone or as that of the tiles."""

    def launch(case: str) -> Launch:
        dtype, head_dim = re.match(r"(\w+), (?:\S+<)?(\d+)", case).groups()
        return Launch(work(f"{_CUDA_DTYPES[dtype]} D{head_dim}"))

    return launch


# CUDA: kernel -> launch, from its template arguments. A kernel that is not here is still recorded and compared, with
# the threads of its __launch_bounds__ and without dynamic shared memory and a bound.
CUDA: dict[str, Callable[[str], Launch]] = {
    "add_layer_norm::forward_kernel": _cuda_norm_forward,
    "add_layer_norm::backward_kernel": _cuda_norm_backward,
    "add_layer_norm::add_partial_kernel": lambda w: Launch(_partials(f"{_CUDA_DTYPES[w]} hidden 1024"), 512, 4096),
    "attention::forward_kernel": _cuda_attention(_attention(products=2, matrices=4, rows=1)),
    "attention::forward_sm90_kernel": _cuda_attention(_attention(products=2, matrices=4, rows=1)),
    "attention::backward_dq_kernel": _cuda_attention(_attention(products=3, matrices=6, rows=2)),
    "attention::backward_dkdv_kernel": _cuda_attention(_attention(products=4, matrices=6, rows=2)),
    "attention::backward_sm90_kernel": _cuda_attention(_attention(products=5, matrices=8, rows=2)),  # dq in float32
    "attention::short_backward_kernel": _cuda_attention(
        _attention(products=5, matrices=8, rows=1, batch=128, length=128)
    ),
    "attention::weights_kernel": _cuda_attention(_attention(products=1, matrices=2, rows=1, square=1)),
}


def cuda_launch(name: str, case: str) -> Launch | None:
    return CUDA[name](case) if name in CUDA else None


def work_of(language: str, name: str, case: str) -> Work | None:
    """By formula, or None where there is none."""
    if language == "triton":
        return TRITON[name](case) if name in TRITON else None
    launch = cuda_launch(name, case)
    return launch.work if launch else None
