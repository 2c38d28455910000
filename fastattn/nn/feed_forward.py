"""The position-wise feed-forward sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.nn._checks import check_arguments, check_choice
from fastattn.nn.fusible import can_fuse
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.recompute import is_recomputing
from fastattn.nn.residual import Stream, add_branch, norm_adds_bias
from fastattn.ops.feed_forward import ACTIVATIONS, GATED, Activation, feed_forward


class PositionwiseFeedForward(nn.Module):
    """layer_norm(x + dropout(w_2(activation(w_1(x))))), the same two linear maps at every position.

    d_in, d_hid: model width and hidden width. dropout: after w_2; inside there is none, as in the paper.
    activation: relu, gelu, gelu_tanh, silu, or gated: reglu, geglu, geglu_tanh, swiglu. The gated ones have w_1 of
        2 * d_hid rows, the gate first, and use act(gate) * up (Shazeer 2020, arXiv:2002.05202).
    norm_first: layer_norm comes before w_1; see PendingResidual.
    ValueError for an argument that makes no such module.
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
        backend: Backend | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        check_arguments(d_in=d_in, d_hid=d_hid, dropout=dropout, backend=backend)
        check_choice("activation", activation, (*ACTIVATIONS, *GATED))
        self.activation, self.norm_first, self.backend = activation, norm_first, backend
        self.w_1 = nn.Linear(d_in, 2 * d_hid if activation in GATED else d_hid, **factory)
        self.w_2 = nn.Linear(d_hid, d_in, **factory)
        self.layer_norm = nn.LayerNorm(d_in, eps=1e-6, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Stream) -> Stream:
        """x: (B, L, d_in), or with norm_first also a PendingResidual of such, else TypeError. Returns x's type."""
        return add_branch(self, x, self.branch)

    def step(self, x: Stream, cache: DecoderCache) -> Stream:
        """forward for one new token a row, x (B, W, d_in), by the weights that the cache keeps for the next step."""

        def branch(normed: Tensor) -> tuple[Tensor, None]:
            maps, linear = (self.w_1, self.w_2), cache.linear
            if linear.packs(self.w_1, normed, self.backend) or not all(map(can_fuse, maps)):
                return self._by_maps(normed, lambda map_, x: linear(map_, x, self.backend)), None
            weights = (t for map_ in maps for t in linear.weights(map_, normed.device))
            return feed_forward(normed, *weights, self.activation, backend=self.backend), None

        return add_branch(self, x, branch)

    def branch(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(w_2(activation(w_1(x))), None), or where the norm adds the bias of w_2: (the same without it, the bias).

        x: (B, L, d_in); the branch has its shape, and the autocast dtype under torch.autocast.
        """
        if not (can_fuse(self.w_1) and can_fuse(self.w_2)):
            return self._by_maps(x, lambda linear, x: linear(x)), None
        bias, bias_for_norm = self.w_2.bias, None
        if norm_adds_bias(x, self.backend):
            bias, bias_for_norm = None, bias
        weights = (self.w_1.weight, self.w_1.bias, self.w_2.weight, bias)
        out = feed_forward(x, *weights, self.activation, recompute=is_recomputing(), backend=self.backend)
        return out, bias_for_norm

    def _by_maps(self, x: Tensor, apply: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """w_2(activation(w_1(x))), each map applied by itself. apply: of a map and its input."""
        hidden = apply(self.w_1, x)
        if self.activation in GATED:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = ACTIVATIONS[GATED[self.activation]](gate) * up
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return apply(self.w_2, hidden)

    def extra_repr(self) -> str:
        return f"activation={self.activation}, norm_first={self.norm_first}"
