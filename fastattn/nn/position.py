"""Positions, added to word embeddings: sines of a formula, or learned ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fastattn._tracing import can_read_values, is_traced
from fastattn.ops._checks import check_arguments, check_flags


class PositionalEncoding(nn.Module):
    """x + pos_table[:, :L], with pos_table[0, p, 2i] = sin(p / 10000^(2i / d_hid)) and cos in the odd columns.

    pos_table: buffer (1, n_position, d_hid), in the state_dict. Sequences that are longer get more rows of the formula.
        They are made in eager mode, if pos_table holds its rows, and are in no state_dict.
    learned: pos_table is a parameter, which starts as nn.Embedding's. Then n_position is the longest sequence. Keys and
        shapes of the state_dict are the same, so learned positions may start from sines.
    Source: Vaswani et al. 2017, section 3.5.
    """

    pos_table: Tensor
    _sines: _Sines | None = None  # made when a sequence is longer than pos_table

    def __init__(
        self,
        d_hid: int,
        n_position: int = 200,
        *,
        learned: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(d_hid=d_hid, n_position=n_position)
        check_flags(learned=learned)
        table = torch.empty(1, n_position, d_hid, device=device, dtype=dtype)
        if learned:
            self.pos_table = nn.Parameter(table)
        else:
            self.register_buffer("pos_table", table)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill pos_table, as after to_empty()."""
        _, n_position, d_hid = self.pos_table.shape
        self.pos_table.normal_() if self.is_learned else self.pos_table.copy_(_formula(n_position, d_hid))

    @property
    def is_learned(self) -> bool:
        return "pos_table" in self._parameters

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """x: (B, L, d_hid). Returns its shape. ValueError if there are fewer positions than L.

        position: integer (B, L), each vector's position in its sequence, below longest(); 0, 1, .. unless given.
        """
        if position is not None:
            return x + self.rows(self.longest())[0][position]
        self.grow(x.size(1))
        return x + self.rows(x.size(1))

    def rows(self, length: int) -> Tensor:
        """(1, length, d_hid), for a length of at most longest()."""
        table = self.pos_table
        return table[:, :length] if length <= table.size(1) else torch.cat([table, self.more(length)[None]], 1)

    def more(self, length: int) -> Tensor | None:
        """Of rows(length) those that pos_table has not, (length - n_position, d_hid), or None if it has all."""
        n_position = self.pos_table.size(1)
        return self._sines.rows[0, n_position:length] if length > n_position else None

    def longest(self) -> int:
        """How many positions there are now, with those that `grow` has made."""
        grown = self._sines is not None and self._has_values() and self._sines.extend(self.pos_table)
        return (self._sines.rows if grown else self.pos_table).size(1)

    def grow(self, length: int, name: str = "") -> None:
        """Make the positions of sequences of this length where there are fewer, or raise ValueError.

        name: of the length, in the message.
        """
        n_position = self.pos_table.size(1)
        if length <= n_position or length <= self.longest():
            return
        if not self._has_values():
            why = "which grows in eager mode only"
        elif self.is_learned:
            why = "which is learned"
        else:
            sines = _Sines(self.pos_table, 1 << (int(length) - 1).bit_length())
            if sines.extend(self.pos_table):
                self._sines = sines
                return
            why = "which does not hold the sines of the formula"
        name = name or f"a sequence of {length} tokens"
        positions = f"the {n_position} positions of pos_table, {why}"
        raise ValueError(f"{name} is longer than {positions}; make the model with n_position >= {length}")

    def _has_values(self) -> bool:
        """Whether the table may be read: not in a trace, and not a batch of tables of torch.func."""
        table = self.pos_table
        return not (is_traced() or table.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(table))

    def extra_repr(self) -> str:
        _, n_position, d_hid = self.pos_table.shape
        return f"{d_hid}, n_position={n_position}" + ", learned=True" * self.is_learned


class _Sines:
    """Rows (1, length, d_hid) of the formula, in dtype, device and rounding of a table that is shorter.

    An object, and not a tensor of the module: it is a new one if and only if a captured graph reads other memory.
    """

    def __init__(self, table: Tensor, length: int) -> None:
        self._table: Tensor | None = None  # as it was compared last, and its version
        self._version: tuple[int, int] | None = None
        with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():  # of torch.func
            exact = _formula(length, table.size(2))
            # A table in float32 may have been in 16 bits, and one in float64 in float32.
            roundings = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            self.rows = min([exact.to(dtype).to(table) for dtype in roundings], key=lambda rows: _error(rows, table))

    def extend(self, table: Tensor) -> bool:
        """Whether the first rows are those of the table as it is now, up to the last bit of its dtype.

        On a CPU all are compared at every call. On a GPU, which that would wait for, once a version of the table.
        """
        if table.dtype != self.rows.dtype or table.device != self.rows.device or table.size(1) > self.rows.size(1):
            return False
        version = None if table.is_inference() else (table._version, table.data_ptr())
        if can_read_values(table) or table is not self._table or version is None or version != self._version:
            if not _error(self.rows, table) <= torch.finfo(table.dtype).eps:
                return False
            self._table, self._version = table, version
        return True


def _error(rows: Tensor, table: Tensor) -> float:
    return (rows[:, : table.size(1)] - table.detach()).abs().max().item()


def _formula(length: int, d_hid: int) -> Tensor:
    """(1, length, d_hid), float64, on the CPU."""
    column = torch.arange(d_hid, device="cpu")
    wavelength = 10000.0 ** ((column - column % 2).double() / d_hid)  # over 2 pi
    angle = torch.arange(length, device="cpu").double()[:, None] / wavelength
    return torch.where(column % 2 == 0, angle.sin(), angle.cos())[None]
