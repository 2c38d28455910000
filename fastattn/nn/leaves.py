"""nn.Linear and nn.Dropout in less time on a CPU, under their own names.

accelerate() makes a model's own modules of these classes. Elsewhere than on a CPU, and where calls are traced or
transformed, they are PyTorch's.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._tracing import can_read_values
from fastattn.backends import cpu_matmul, load_backend
from fastattn.backends.reference.philox import draw_rng_state
from fastattn.ops import _autocast


class Linear(nn.Linear):
    """By the product that is fastest, see fastattn.backends.cpu_matmul."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's name
        return product(input, self.weight, self.bias)


def linear_is_faster() -> bool:
    """Whether Linear computes otherwise than PyTorch's on this machine."""
    return cpu_matmul.choice() == "oneDNN"


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, by the product that is fastest."""
    if can_read_values(x) and _autocast.autocast_dtype(x.device) is None:
        return cpu_matmul.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Dropout(nn.Dropout):
    """By the numbers of the backend aten, which take a tenth of PyTorch's time. Seeds come from torch's generator."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not self.training or self.p == 0 or self.inplace or not input.dim() or not can_read_values(input):
            return super().forward(input)
        return dropout_add(input, None, self.p)


def dropout_add(x: Tensor, residual: Tensor | None, dropout_p: float) -> Tensor:
    """[residual +] dropout(x) where can_read_values(x)."""
    rng_state = draw_rng_state(x.device, "aten")
    return load_backend("add_layer_norm", "aten").dropout_add(x, residual, dropout_p, rng_state)
