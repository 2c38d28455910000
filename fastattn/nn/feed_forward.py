"""The position-wise feed-forward sublayer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.nn.fusible import all_can_fuse, can_fuse, is_unmodified
from fastattn.nn.params import FeedForwardParams, norm_params
from fastattn.nn.residual import HiddenStateT, Norm, current_dropout_p, new_norm
from fastattn.nn.run_layer import run_module
from fastattn.ops._checks import check_arguments, check_choice, check_flags
from fastattn.ops.feed_forward import ACTIVATIONS, GATED, Activation, activate, feed_forward


class PositionwiseFeedForward(nn.Module):
    """layer_norm(x + dropout(w_2(activation(w_1(x))))), the same two linear maps at every position.

    d_in, d_hid: model width and hidden width. dropout: after w_2; inside there is none, as in the paper.
    activation: relu, gelu, gelu_tanh, silu, or gated: reglu, geglu, geglu_tanh, swiglu. The gated ones have w_1 of
        2 * d_hid rows, the gate first, and use act(gate) * up (Shazeer 2020, arXiv:2002.05202).
    norm_first: layer_norm comes before w_1; see PendingResidual.
    norm: the class of layer_norm, "layer" for nn.LayerNorm or "rms" for nn.RMSNorm.
    TypeError or ValueError for an argument that makes no such module.
    Source: Vaswani et al. 2017, sections 3.3 and 5.4.
    """

    fused_children = ("w_1", "w_2", "dropout", "layer_norm")

    def __init__(
        self,
        d_in: int,
        d_hid: int,
        dropout: float = 0.1,
        *,
        activation: Activation = "relu",
        norm_first: bool = False,
        norm: Norm = "layer",
        backend: Backend | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(d_in=d_in, d_hid=d_hid, dropout=dropout, backend=backend)
        check_flags(norm_first=norm_first)
        check_choice("activation", activation, (*ACTIVATIONS, *GATED))
        self.activation, self.norm_first, self.backend = activation, norm_first, backend
        self.w_1 = nn.Linear(d_in, 2 * d_hid if activation in GATED else d_hid, device=device, dtype=dtype)
        self.w_2 = nn.Linear(d_hid, d_in, device=device, dtype=dtype)
        self.layer_norm = new_norm(norm, d_in, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: HiddenStateT) -> HiddenStateT:
        """x: (B, L, d_in), or with norm_first also a PendingResidual of such, else TypeError. Returns x's type."""
        fusible = all_can_fuse(self, self.fused_children)

        def compute(normed: Tensor) -> Tensor:
            if not fusible and not (can_fuse(self.w_1) and can_fuse(self.w_2)):
                return self._call_linears(normed)
            weights = (self.w_1.weight, self.w_1.bias, self.w_2.weight, self.w_2.bias)
            return feed_forward(normed, *weights, self.activation, backend=self.backend)

        return run_module(x, self, compute, fusible)

    def params(self, norm_first: bool) -> FeedForwardParams | None:
        """What the executor reads; None where something is modified. norm_first: the layer's."""
        children = self.fused_children
        if not is_unmodified(self, PositionwiseFeedForward, children) or self.norm_first is not norm_first:
            return None
        w_1, w_2 = self._modules["w_1"]._parameters, self._modules["w_2"]._parameters
        weights = (w_1["weight"],), (w_1["bias"],), w_2["weight"], w_2["bias"]
        norm = norm_params(self._modules["layer_norm"], current_dropout_p(self._modules["dropout"]))
        return FeedForwardParams(*weights, norm, self.activation, 0.0, self.backend)

    def _call_linears(self, x: Tensor) -> Tensor:
        """w_2(activation(w_1(x))). ValueError where processes share a gated w_1."""
        hidden, rows = self.w_1(x), getattr(self.w_1, "out_features", None)
        # A weight with all rows, and an output with some: each process would halve its own part.
        if self.activation in GATED and rows not in (None, hidden.shape[-1]) and len(self.w_1.weight) == rows:
            raise ValueError(
                f"w_1 gave {hidden.shape[-1]} of its {rows} outputs: parallelize_module cannot divide a feed-forward "
                f"with the gated activation {self.activation!r}; leave w_1 and w_2 whole"
            )
        return self.w_2(activate(hidden, self.activation))

    def extra_repr(self) -> str:
        return f"activation={self.activation}, norm_first={self.norm_first}"
