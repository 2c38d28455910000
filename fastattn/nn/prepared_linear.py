"""Linear maps whose weights are prepared once: for loops that apply the same few many times, as decoding does.

Under torch.autocast the weights are cast once. PyTorch keeps the casts of trainable weights only, until its context
ends, and the feed-forward op would cast at every step.

On a CPU the weights are packed once. PyTorch's float32 products on x86 are MKL's, and each call packs the weights
again. oneDNN's products read weights that were packed before. Measured on two cores of an AMD EPYC, torch 2.13,
512 -> 2048 in float32, best of four: 1, 5, 32 and 160 rows take 80, 186, 433 and 1676 us by F.linear, and 51, 55, 169
and 689 us packed. Packing such a weight takes as long as ten products of 5 rows, so it is for loops, and not for a
single call. A call of oneDNN takes 15 us at the least; F.linear of 5 rows of 96 -> 96 takes 6 us, of one row of
256 -> 256 too: what is small stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.backends import Backend, requested
from fastattn.backends.cpu_matmul import has_onednn
from fastattn.nn.fusible import can_fuse
from fastattn.ops import _checks

LEAST_WEIGHTS, LEAST_PRODUCTS = 2**16, 2**18  # of a weight, and of a call, for packing to be worth it
MANY_PRODUCTS = 2**21  # from this many in a call on, the weight may be small


class PreparedLinears:
    """A copy of the weights of each linear map that is called through it, made at the map's first call.

    The maps, their devices and torch.autocast must not change while it is in use. Memory: their weights once more,
    where they are packed or cast.
    """

    def __init__(self) -> None:
        self._packed: dict[nn.Module, tuple[Tensor, Tensor | None] | None] = {}  # None: the map is not packed
        self._cast: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    def __call__(self, linear: nn.Module, x: Tensor, backend: Backend | None) -> Tensor:
        """linear(x), x (..., in_features)."""
        if self.packs(linear, x, backend):
            weight, bias = self._packed[linear]
            return torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")
        if _checks.autocast_dtype(x.device) is None or not can_fuse(linear):
            return linear(x)
        return F.linear(x, *self.weights(linear, x.device))

    def weights(self, linear: nn.Linear, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of an unmodified map, under torch.autocast in its dtype."""
        if (dtype := _checks.autocast_dtype(device)) is None:
            return linear.weight, linear.bias
        if linear not in self._cast:
            self._cast[linear] = _checks.cast(linear.weight, dtype), _checks.cast(linear.bias, dtype)
        return self._cast[linear]

    def refresh(self) -> None:
        """Cast the weights again, which may have changed, to where the casts are: a CUDA graph reads them there."""
        for linear, (weight, bias) in self._cast.items():
            weight.copy_(linear.weight)
            if bias is not None:
                bias.copy_(linear.bias)

    def packs(self, linear: nn.Module, x: Tensor, backend: Backend | None) -> bool:
        """Whether the product is oneDNN's. Not where PyTorch lacks it, under the backend "reference", where gradients
        are recorded, and where the module has hooks or is of another class than nn.Linear."""
        if linear not in self._packed:
            self._packed[linear] = _pack(linear, x) if _can_pack(linear, x, backend) else None
        return self._packed[linear] is not None


def _pack(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype of the product: of torch.autocast, or of x."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(linear.weight.to(dtype)), bias


def _can_pack(linear: nn.Module, x: Tensor, backend: Backend | None) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and has_onednn()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and can_fuse(linear)
        and _is_worth_it(linear.weight.numel(), x.numel() * linear.out_features)
        and linear.weight.dtype in (torch.float32, torch.bfloat16)
        and requested(backend)[0] != "reference"
    )


def _is_worth_it(weights: int, products: int) -> bool:
    return products >= (LEAST_PRODUCTS if weights >= LEAST_WEIGHTS else MANY_PRODUCTS)
