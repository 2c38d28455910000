"""Matrix products in float32 on a CPU, by oneDNN where it is faster than the library that PyTorch uses.

PyTorch's float32 products on x86 are MKL's, which on AMD's processors compute 256 bits at a time. From Zen 5 on
oneDNN is about 2x faster. Measured on two cores of such an AMD EPYC, torch 2.13, GFLOP/s of F.linear and of oneDNN:
336 x 512 -> 512: 194 and 452; 336 x 512 -> 2048: 214 and 489; 307 x 256 -> 768: 224 and 483; 3000 x 512 -> 2048: 196
and 478. oneDNN reads transposed views equally fast, so the two products of the backward gain as much. On Zen 4, whose
AVX-512 computes 256 bits at a time too, 320 x 512 -> 512 runs at 202 and 216, and the three products of 1280 x 128 ->
128 take 658 us by F.linear and 759. In 16 bits PyTorch uses oneDNN itself.

Weights that many calls read, as in decoding, can be prepacked: MKL's product packs its weights at every call, oneDNN's
reads weights that were packed before. Measured as above, torch 2.13, 512 -> 2048 in float32, best of four: 1, 5, 32 and
160 rows take 80, 186, 433 and 1676 us by F.linear, and 51, 55, 169 and 689 us prepacked. Packing such a weight takes as
long as ten products of 5 rows, so it is slower for a single call. A call of oneDNN takes at least 15 us, F.linear of
5 rows of 96 -> 96 or of one row of 256 -> 256 takes 6 us: small products are left to F.linear.

One row reads each weight once, from main memory where a step of decoding uses more weights than the caches hold. Of the
25 GB/s that one core of an AMD then reads MKL's product with a vector uses 8, on one core alone. Its product of a batch
of such, of blocks of the weight's rows, uses all, on every core. Measured on one core of a Zen 4, in turn over 100 MB
of weights, 256 -> 256, 256 -> 1024, 1024 -> 256, 512 -> 2048 and 256 -> 8192 take 36, 137, 80, 423 and 1077 us by
F.linear, in blocks 17, 58, 45, 173 and 417, prepacked 33, 90, 90, 314 and 774, of a transposed copy 34, 70, 132, 235
and 430. Over 10 MB, which the cache holds, blocks take 1.0x to 1.6x as long as F.linear, on two cores 0.5x to 1.1x. In
float32 on an Intel Xeon packing cost as much as it gained.

oneDNN compiles a product for each number of rows, in about 0.6 ms, and keeps 1024 of them, 0.7 MB each; PyTorch keeps
as many again. So where oneDNN is the choice both are limited (MAX_COMPILED). On one busy core of an Intel Xeon, a
training of width 128, 150 batches of new sizes: with limits of 16, 64, 128, 256 and 1024 memory grows by 29, 87, 124,
235 and 665 MB, in 7.4, 10.0, 9.0, 10.5 and 9.6 s.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn._tracing import can_read_values, constant_in_traces, is_transformed
from fastattn.backends.constants import PACKAGE

MIN_WORK = 1 << 22  # multiplications; below them the call itself counts, and PyTorch's costs less
# To be packed a weight needs MIN_WEIGHTS elements and its calls MIN_PRODUCTS multiplications, or calls need
# MANY_PRODUCTS.
MIN_WEIGHTS, MIN_PRODUCTS, MANY_PRODUCTS = 1 << 16, 1 << 18, 1 << 21
ZEN_5 = 26  # the processor's family
MAX_COMPILED = 64  # products that oneDNN keeps compiled, and as many in each thread that PyTorch keeps
_PLAIN = (Tensor, torch.nn.Parameter)  # not other subclasses: distributed or quantised tensors


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias with gradients, of the dtypes they have. x (.., k), weight (n, k), bias (n,)."""
    if not uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def linear_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` under torch.compile, whose compiler would call MKL. Where oneDNN may be faster it is an operator, whose
    calls choose by their sizes."""
    if (
        x.is_cpu
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and not (torch.compiler.is_exporting() or torch.is_autocast_enabled("cpu") or is_transformed())
        and choice() == "oneDNN"
    ):
        return _product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias without gradients: a (m, k), b (n, k), either of them transposed in memory."""
    if not uses_onednn(a, b):
        return F.linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a b without gradients: a (m, k), b (k, n), either of them transposed in memory."""
    if a.numel() * b.shape[1] < MIN_WORK or not uses_onednn(a, b.t()):
        return torch.mm(a, b)
    return product(a, b.t())


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` and `product` of these use oneDNN."""
    return (
        x.dtype is torch.float32
        and x.is_cpu
        and choice() == "oneDNN"
        and weight.dtype is torch.float32
        and can_read_values(x)
        and x.numel() * weight.shape[0] >= MIN_WORK
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
    )


@constant_in_traces
def choice() -> str:
    """ "oneDNN" or "PyTorch": the rule that was measured, see above."""
    if not (_mkl_is_slow() and int(cpu_info("cpu family") or 0) >= ZEN_5 and has_onednn()):
        return "PyTorch"
    _bound_compiled()
    return "oneDNN"


@functools.cache
def _bound_compiled() -> None:
    """oneDNN reads its limit before the first product of the process, PyTorch before the first one of each thread. A
    limit that the user has set stays."""
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # the limit's older name
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(MAX_COMPILED))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(MAX_COMPILED))


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether PyTorch's products are MKL's on an AMD processor with AVX-512."""
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and "AMD" in cpu_name() and torch.backends.mkl.is_available()


@functools.cache
def has_onednn() -> bool:
    """Whether this PyTorch has oneDNN's products, on the kind of processors where they were measured."""
    return (
        torch.backends.mkldnn.is_available()
        and platform.machine() in ("x86_64", "AMD64")
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    )


def packing(rows: int, weight: Tensor, dtype: torch.dtype) -> str | None:
    """How to read a weight (n, k) in many products with x (rows, k) in this dtype: "prepacked", in "blocks" or None.

    None where PyTorch lacks oneDNN, where gradients are recorded, and under torch.compile. In bfloat16 PyTorch uses
    oneDNN on every processor that it supports; in float32 it is faster on AMD's, and where oneDNN is the choice for
    products.
    """
    products = rows * weight.numel()
    least = MANY_PRODUCTS if weight.numel() < MIN_WEIGHTS else MIN_PRODUCTS if rows > 1 else MIN_WEIGHTS
    if (
        products < least
        or weight.device.type != "cpu"
        or weight.dtype not in (torch.float32, torch.bfloat16)
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not has_onednn()
    ):
        return None
    if dtype is torch.bfloat16:  # without AVX-512, or what does the same, oneDNN refuses such a weight
        pays = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        pays = dtype is torch.float32 and (_mkl_is_slow() or choice() == "oneDNN")
    if not pays:
        return None
    if rows == 1 and dtype is torch.float32:
        return "blocks" if _block_length(weight.shape[0]) else None
    return "prepacked"


def _block_length(n: int) -> int:
    """Of equal blocks of a weight's n rows; 0 if there are none but the whole, which is no faster."""
    return next((length for length in range(min(256, n // 2), 15, -1) if n % length == 0), 0)


def block_products(weight: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """As `products`, of one row, by the blocks of a contiguous weight."""
    (n, k), length = weight.shape, _block_length(len(weight))
    blocks, column, block = weight.view(-1, length, k), ((n // length, k, 1), (0, 1, k)), (-1, length, 1)

    def plus(x: Tensor, added: Tensor) -> Tensor:
        return torch.baddbmm(added.view(block), blocks, x.as_strided(*column)).view(1, n)

    return (lambda x: torch.bmm(blocks, x.as_strided(*column)).view(1, n)), plus


def products(weight: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """x weight^T of contiguous x (rows, k), and x weight^T + added."""
    columns = weight.t()
    return (lambda x: torch.mm(x, columns)), (lambda x, added: torch.addmm(added, x, columns))


def prepack(weight: Tensor) -> Tensor:
    """The weight (n, k) as `prepacked_product` reads it, in memory of its own."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def prepacked_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x weight^T + bias + residual, x (.., k), residual (.., n) or None, of the result of `prepack`."""
    if residual is None:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


class _Linear(torch.autograd.Function):
    """x (m, k), weight (n, k), bias (n,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _gradients(ctx, dout, torch.mm)
        return _gradients(ctx, dout.contiguous(), mm)


def _gradients(ctx: Any, dout: Tensor, mm: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    """Of x, weight and bias."""
    (x, weight), (needs_dx, needs_dweight, needs_dbias) = ctx.saved_tensors, ctx.needs_input_grad
    return (
        mm(dout, weight) if needs_dx else None,
        mm(dout.t(), x) if needs_dweight else None,
        dout.sum(0) if needs_dbias else None,
    )


@torch.library.custom_op(f"{PACKAGE}::product", mutates_args=())
def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """product, as an operator."""
    return product(a, b, bias)


@_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dout, lambda a, b: _product(a, b.t(), None))


_product.register_autograd(_backward, setup_context=_save)


@functools.cache
def cpu_name() -> str:
    # On Linux platform.processor() is often empty.
    return cpu_info("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu_info(name: str) -> str:
    """What Linux knows of the first processor, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or a closed /proc
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
