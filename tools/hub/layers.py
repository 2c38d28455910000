"""Layers for ``kernels.kernelize``: each gives its forward to a module of another library and reads its attributes."""

import torch
from torch import Tensor, nn

from fastattn.ops.add_layer_norm import dropout_add_rms_norm


class RMSNorm(nn.Module):
    """The layer that transformers' models call "RMSNorm". It is rounded once, at the end."""

    can_torch_compile: bool = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)  # of their product
        return dropout_add_rms_norm(hidden_states.to(dtype), None, self.weight.to(dtype), eps=self.variance_epsilon)
