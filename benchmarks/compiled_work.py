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


def _size(dtype: str) -> int:
    return 2 if dtype in _HALF else 4


def _attention(
    products: int,
    matrices: int,
    rows: int,
    bias: int = 1,
    square: int = 0,
    batch: int = 4,
    length: int = 4096,
    special: int = 1,
) -> Callable[[str], Work]:
    """The work of a kernel that takes `products` products of all visible pairs, and of each `special` exponentials, and
    reads or writes so many (B, H, L, D) matrices, (B, H, L) float32 vectors, the bias and (B, H, L, L) matrices.
    Causal, H 16, B * L 16384.
    """
    B, H, L = batch, 16, length

    def work(case: str) -> Work:
        dtype, head_dim = case.split()[0], int(re.search(r"\bD(\d+)", case)[1])
        pairs = L * (L + 1) / 2
        byte = B * H * L * (matrices * head_dim * _size(dtype) + rows * 4) + B * H * L * L * square * _size(dtype)
        byte += (B * pairs if "lists" in case else 0) + (bias * H * pairs * 4 if "bias" in case else 0)
        return Work(dtype, 2 * products * B * H * pairs * head_dim, byte, special * B * H * pairs * (products > 0))

    return work


def _attention_rows(case: str) -> Work:
    """Exact float32 walks the keys again; other types look at their lse and stop."""
    return _attention(2, 4, 3)(case) if case.startswith("float32") else _attention(0, 0, 2, bias=0)(case)


def _norm(reads: int, writes: int, vectors: int) -> Callable[[str], Work]:
    """Reads and writes of (65536, hidden) matrices, and float32 vectors of a value a row; one write less, backward,
    where dx is dresidual: without dropout."""

    def work(case: str) -> Work:
        dtype, hidden = case.split()[0], int(re.search(r"hidden (\d+)", case)[1])
        matrices = reads + writes - (reads == 3 and "dropout" not in case)
        return Work(dtype, 0, 65536 * (matrices * hidden * _size(dtype) + 4 * vectors))

    return work


def _mask_lists(byte: Callable[[int], float]) -> Callable[[str], Work]:
    """So many bytes for a sequence of a length: 4 of 4096, or what comes before attention, 2 of 1024."""
    return lambda case: Work("float32", 0, 4 * byte(4096) if case == "padding" else 2 * byte(1024))


def _embedding(rows: int) -> Callable[[str], Work]:
    """For each of 65536 tokens: so many rows in the embedding's type, one in bfloat16, the token, two statistics."""

    def work(case: str) -> Work:
        dtype, hidden = case.split()[0], int(re.search(r"hidden (\d+)", case)[1])
        return Work(dtype, 0, 65536 * (hidden * (rows * _size(dtype) + 2) + 8 + 2 * 4))

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
    "attention_alignment_kernel": _attention(products=1, matrices=2, rows=2, special=0),  # a key is 8 bytes
    "attention_rows_kernel": _attention_rows,
    "seen_keys_kernel": _attention(products=0, matrices=0, rows=0),
    # A byte of padding on either side, two int32; then these again, and 64 x 32 places of tiles in either list.
    "intervals_kernel": _mask_lists(lambda L: L * (1 + 1 + 8)),
    "tile_lists_kernel": _mask_lists(lambda L: L * (1 + 8) + 2 * (L / 64) * (L / 128) * 4),
    "add_layer_norm_fwd_kernel": _norm(reads=2, writes=2, vectors=2),
    "add_layer_norm_bwd_kernel": _norm(reads=3, writes=2, vectors=2),
    "add_partials_kernel": _partials,
    "embed_layer_norm_fwd_kernel": _embedding(rows=1),  # of the embedding; out
    "embed_layer_norm_bwd_kernel": _embedding(rows=2),  # of the embedding, and drow; dout
    "feed_forward_fwd_kernel": _feed_forward(backward=False),
    "feed_forward_bwd_kernel": _feed_forward(backward=True),
    "cross_entropy_rows_kernel": _cross_entropy,
}

_CUDA_DTYPES = {"float": "float32", "Tf32": "tf32", "__nv_bfloat16": "bfloat16", "__half": "float16"}


def _of_cuda(work: Callable[[str], Work], more: str = "") -> Callable[[str], Work]:
    """Template arguments: the type, and the head dimension, alone or as that of the tiles; 64 where it is not there.

    more: what the formula is to know besides.
    """

    def of(case: str) -> Work:
        dtype, head_dim = re.match(r"(\w+)(?:, (?:\S+<)?(\d+))?", case).groups()
        return work(f"{_CUDA_DTYPES[dtype]} D{head_dim or 64}{more}")

    return of


def _cuda_norm(work: Callable[[str], Work], hidden_of: dict[str, int]) -> Callable[[str], Work]:
    """Template arguments: the type first; the first number says how many chunks of its row a thread holds.

    hidden_of: a width at which it does.
    """

    def of(case: str) -> Work:
        hidden = hidden_of[re.search(r"\b\d+", case)[0]]
        return work(f"{_CUDA_DTYPES[case.split(', ')[0]]} hidden {hidden}, dropout")

    return of


def _cuda_embedding(rows: int, hidden_of: dict[str, int]) -> Callable[[str], Work]:
    """Template arguments: chunks first. Types come at run time: here a float32 embedding, out in bfloat16."""
    return lambda case: _embedding(rows)(f"float32 hidden {hidden_of[case.split(', ')[0]]}")


def _cuda_dkdv_sm90(case: str) -> Work:
    """The last template argument: 0 makes dk, 1 dv, 2 both, 3 both and dq, which is added up in float32."""
    products, matrices = {"0": (3, 5), "1": (2, 4), "2": (4, 6), "3": (5, 8)}[case[-1]]
    return _of_cuda(_attention(products, matrices, rows=2))(case)


def _cuda_feed_forward(backward: bool) -> Callable[[str], Work]:
    """Template arguments: the type. Activations are taken at run time: relu."""
    return lambda case: _feed_forward(backward)(f"{_CUDA_DTYPES[case]} relu")


def _hidden_layer(matrices: int) -> Callable[[str], Work]:
    """Template arguments: the type first. So many (8192, 2048) matrices: relu again."""

    def of(case: str) -> Work:
        dtype = _CUDA_DTYPES[case.split(", ")[0]]
        return Work(dtype, 0, matrices * 8192 * 2048 * _size(dtype))

    return of


def _hidden_sums(case: str) -> Work:
    """A row of sums for every 64 of 8192 tokens, 2048 wide."""
    return Work("float32", 0, 2048 * (8192 / 64 * 4 + _size(_CUDA_DTYPES[case])))


def _mask(byte_per_pair: float) -> Callable[[str], Work]:
    """Preparation of a mask (4, 1, 4096, 4096): bytes read and written for each of its elements."""
    return lambda case: Work("float32", 0, 4 * 4096**2 * byte_per_pair)


def _spans(_: str) -> Work:
    """Two numbers for each of (4, 4096) rows, and whether it is padding."""
    return Work("float32", 0, 4 * 4096 * (8 + 1))


_BITS = 1 / 8  # of a byte, for each element of a mask
_TILE = 64 * 64
_NORM_FORWARD = {"1": 256, "2": 512, "4": 1024}
_EMBED_BACKWARD = {"1": 512, "2": 8192, "4": 16384}
_NORM_BACKWARD = {"1": 256, "2": 512, "4": 16384}  # it holds two chunks as long as a block is wide enough

# CUDA: kernel -> work, from its template arguments. A new kernel needs a line here, and what launches it
# (compiled_launches.py): tests/test_compiled_kernels.py asks for both.
CUDA: dict[str, Callable[[str], Work]] = {
    "add_layer_norm::forward_kernel": _cuda_norm(_norm(2, 2, 2), _NORM_FORWARD),
    "add_layer_norm::backward_kernel": _cuda_norm(_norm(3, 2, 2), _NORM_BACKWARD),
    "add_layer_norm::add_partial_kernel": lambda w: _partials(f"{_CUDA_DTYPES[w]} hidden 1024"),
    "attention::forward_kernel": _of_cuda(_attention(products=2, matrices=4, rows=1)),
    "attention::short_forward_kernel": _of_cuda(_attention(products=2, matrices=4, rows=1, batch=128, length=128)),
    "attention::forward_sm90_kernel": _of_cuda(_attention(products=2, matrices=4, rows=1)),
    "attention::backward_rows_kernel": _of_cuda(_attention_rows),
    "attention::backward_dq_kernel": _of_cuda(_attention(products=3, matrices=6, rows=2)),
    "attention::backward_dkdv_kernel": _of_cuda(_attention(products=4, matrices=6, rows=2)),
    "attention::bias_gradient_kernel": _of_cuda(_attention(products=2, matrices=4, rows=2, bias=2), ", bias"),
    "attention::backward_rows_sm90_kernel": _of_cuda(_attention(products=0, matrices=2, rows=3)),  # out and dout
    "attention::backward_dq_sm90_kernel": _of_cuda(_attention(products=3, matrices=5, rows=2)),
    "attention::backward_dkdv_sm90_kernel": _cuda_dkdv_sm90,
    "attention::bias_gradient_sm90_kernel": _of_cuda(_attention(products=2, matrices=4, rows=3, bias=2), ", bias"),
    "attention::backward_round_sm90_kernel": _of_cuda(_attention(products=0, matrices=3, rows=0)),  # the sum is float32
    "attention::short_backward_kernel": _of_cuda(_attention(products=5, matrices=8, rows=1, batch=128, length=128)),
    "attention::short_backward_wide_kernel": _of_cuda(
        _attention(products=5, matrices=8, rows=1, batch=128, length=128)
    ),
    "attention::weights_kernel": _of_cuda(_attention(products=1, matrices=2, rows=1, square=1)),
    "attention::alignment_kernel": _of_cuda(_attention(products=1, matrices=2, rows=2, special=0)),  # a key: 8 bytes
    "attention::make_spans_kernel": _spans,
    "attention::pack_bits_kernel": _mask(1 + _BITS),
    "attention::transpose_bits_kernel": _mask(2 * _BITS),
    "attention::classify_tiles_kernel": _mask(_BITS + 1 / _TILE),
    "attention::list_tiles_kernel": _mask((1 + 4) / _TILE),
    "attention::seen_keys_kernel": _mask(_BITS),
    "embed_layer_norm::forward_kernel": _cuda_embedding(1, _NORM_FORWARD),
    "embed_layer_norm::backward_kernel": _cuda_embedding(2, _EMBED_BACKWARD),
    "embed_layer_norm::add_partial_kernel": lambda _: _partials("float32 hidden 4096"),
    "feed_forward::forward_product_kernel": _cuda_feed_forward(backward=False),
    "feed_forward::forward_product_sm90_kernel": _cuda_feed_forward(backward=False),
    "feed_forward::forward_pointwise_kernel": _hidden_layer(matrices=2),  # z; h
    "feed_forward::backward_product_kernel": _cuda_feed_forward(backward=True),
    "feed_forward::backward_product_sm90_kernel": _cuda_feed_forward(backward=True),
    "feed_forward::backward_pointwise_kernel": _hidden_layer(matrices=3),  # dh, h; dz
    "feed_forward::add_partial_kernel": _hidden_sums,
    "linear_cross_entropy::rows_kernel": lambda t: _cross_entropy(f"{_CUDA_DTYPES[t]} classes 32000 gradient now"),
}


def work_of(language: str, name: str, case: str) -> Work | None:
    """By formula, or None where there is none."""
    formula = {"triton": TRITON, "cuda": CUDA}[language].get(name)
    return formula(case) if formula else None
