"""Sinusoidal positions, added to word embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.ops._checks import check_arguments


class PositionalEncoding(nn.Module):
    """x + pos_table[:, :L], with pos_table[0, p, 2i] = sin(p / 10000^(2i / d_hid)) and cos in the odd columns.

    pos_table: buffer (1, n_position, d_hid), in the state_dict.     Source: Vaswani et al. 2017, section 3.5.
    """

    pos_table: Tensor

    def __init__(
        self,
        d_hid: int,
        n_position: int = 200,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(d_hid=d_hid, n_position=n_position)
        self.register_buffer("pos_table", torch.empty(1, n_position, d_hid, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill pos_table, as after to_empty()."""
        _, n_position, d_hid = self.pos_table.shape
        column = torch.arange(d_hid, device="cpu")
        wavelength = 10000.0 ** ((column - column % 2).double() / d_hid)  # over 2 pi
        angle = torch.arange(n_position, device="cpu").double()[:, None] / wavelength
        self.pos_table.copy_(torch.where(column % 2 == 0, angle.sin(), angle.cos()))

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """x: (B, L, d_hid), L <= n_position, else ValueError. Returns its shape.

        position: integer (B, L), each vector's position in its sequence, below n_position; 0, 1, .. unless given.
        """
        if position is not None:
            return x + self.pos_table[0][position]
        self.check(x.size(1))
        return x + self.pos_table[:, : x.size(1)]

    def check(self, length: int) -> None:
        """ValueError if there are fewer positions than tokens in a sequence of this length."""
        n_position = self.pos_table.size(1)
        if length > n_position:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {n_position} positions of pos_table; "
                f"make the model with n_position >= {length}"
            )

    def extra_repr(self) -> str:
        return f"{self.pos_table.size(2)}, n_position={self.pos_table.size(1)}"
