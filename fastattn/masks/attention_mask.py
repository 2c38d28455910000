"""AttentionMask: everything that decides which query may see which key, in one object that is built once per batch.

The meaning of a mask's values is decided here and nowhere else: True = attend. (In the padding masks of
torch.nn.Transformer True means ignore: invert them.)
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from fastattn._tracing import can_read_values, is_traced, is_transformed, known_equal
from fastattn.masks._checks import check_flags, check_token_ids
from fastattn.masks.kernel_format import Layout, PreparedMask, Restriction, band_of, build_intervals, prepare
from fastattn.masks.relative import zero_distance

Band = tuple[int | None, int | None]  # (low, high): low <= j - i <= high; None = unbounded
FREE: Band = (None, None)
_ALIGNMENTS = ("top_left", "bottom_right")
MAX_CACHED = 16  # entries in a mask's cache: enough for the layouts of its last few lengths
_ALL = slice(None)


class AttentionMask:
    """Which query may attend to which key. All restrictions that are given must hold (logical and).

    attn_mask: bool, True = attend, broadcastable to (B, H, Lq, Lk).
    bias: float, added to the scaled scores, broadcastable to (B, H, Lq, Lk); may require grad; -inf masks the entry.
    relative_bias: float (H or 1, Lq + Lk - 1), finite, a bias by distance: relative_bias[h, n - m + Lq - 1] is added to
        the scaled score of query m and key n. May require grad. No tensor of all scores is made of it, unless there is
        also a bias. In packed sequences the distance counts inside each, and the length is 2 * the longest - 1.
    key_padding: bool (B, Lk) or (1, Lk), True = a real key.
    query_padding: bool (B, Lq) or (1, Lq), True = a real query.
    is_causal: query i attends to key j when j <= i, counted by ``align``.
    window: (left, right): i - left <= j <= i + right, counted likewise; None for a side without limit.
    align: "top_left" counts from the first query and key, as torch does; "bottom_right" from the last:

            top_left, 2 x 4:  1 . . .        bottom_right, 2 x 4:  1 1 1 .
                              1 1 . .                              1 1 1 1

    cu_seqlens_q, cu_seqlens_k: int32 or int64 (n + 1,), cumulative lengths of n sequences packed along Lq and Lk, from
        0 to Lq and Lk: ``F.pad(lengths.cumsum(0), (1, 0))``. A query attends to keys of its own sequence only, and
        causal and window count inside it. cu_seqlens_k defaults to cu_seqlens_q. The values are checked on a CPU only,
        because on a GPU a check would wait. There a position that is in no sequence attends to nothing and is masked.
    ``fastattn.masks`` has functions that make these tensors: `lengths_to_padding`, `documents_to_cu_seqlens`,
    `prefix_lm_mask`, and for relative_bias `alibi` and `t5_relative_bias`.

    A query that may attend to nothing gives output 0, lse -inf and zero gradients. ``&`` combines two masks. The mask
    keeps the tensors that it is given. If one is changed in place, the next call uses the new values.
    Raises TypeError or ValueError that names the argument.
    """

    attn_mask: Tensor | None  # with bias: four dimensions
    bias: Tensor | None
    relative_bias: Tensor | None
    key_padding: Tensor | None
    query_padding: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None

    def __init__(
        self,
        attn_mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        relative_bias: Tensor | None = None,
        key_padding: Tensor | None = None,
        query_padding: Tensor | None = None,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        align: Literal["top_left", "bottom_right"] = "top_left",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> None:
        check_flags(is_causal=is_causal)
        if align not in _ALIGNMENTS:
            raise ValueError(f"align must be one of {_ALIGNMENTS}, got {align!r}")
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        elif cu_seqlens_q is None:
            raise ValueError("cu_seqlens_k was given without cu_seqlens_q")
        self._set(
            attn_mask=attn_mask,
            bias=bias,
            relative_bias=relative_bias,
            key_padding=key_padding,
            query_padding=query_padding,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        )
        band = (None, 0) if is_causal else FREE
        self._bands = {"top_left": FREE, "bottom_right": FREE}
        self._bands[align] = band if window is None else _intersect(_window_band(window), band)
        self._cache: list[tuple[Any, ...]] = []  # (key, versions of the tensors and stream, value)
        self._bias_cache: list[tuple[Any, ...]] = []  # the same of what depends on the bias
        first = next((t for t in (*self._structure(), self.bias, self.relative_bias) if t is not None), None)
        self._made_while = _recording(None if first is None else first.device)

    def _set(self, **tensors: Tensor | None) -> None:
        """Check these tensors and make them the mask's."""
        for name, t in tensors.items():
            if name not in _TENSORS:
                raise TypeError(f"an AttentionMask has no tensor {name!r}. It has {', '.join(_TENSORS)}")
            if not (t is None or isinstance(t, Tensor)):
                raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
            setattr(self, name, None if t is None else _TENSORS[name][0](name, t))
        offsets_q, offsets_k = self.cu_seqlens_q, self.cu_seqlens_k
        if (offsets_q is None) != (offsets_k is None):
            raise ValueError("cu_seqlens_q and cu_seqlens_k are given together or not at all")
        if offsets_q is not None and offsets_q.shape[0] != offsets_k.shape[0]:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must pack the same number of sequences, "
                f"got {offsets_q.shape[0] - 1} and {offsets_k.shape[0] - 1}"
            )
        if self.relative_bias is not None and offsets_q is not offsets_k:
            raise ValueError("relative_bias needs queries and keys that are packed equally: give cu_seqlens_q alone")

    @classmethod
    def of(cls, attn_mask: AttentionMask | Tensor | None, *, has_heads: bool = True) -> AttentionMask | None:
        """The AttentionMask of a tensor. An AttentionMask or None is returned as it is.

        has_heads: if True, a tensor as for scaled_dot_product_attention, broadcastable to (B, H, Lq, Lk). bool is a
            mask, floating point is a bias. Else a tensor as for the models, (B, 1, Lk), (B, Lq, Lk) or (1, Lq, Lk),
            bool or integer; nonzero means attend.
        """
        if attn_mask is None or isinstance(attn_mask, AttentionMask):
            return attn_mask
        if not isinstance(attn_mask, Tensor):
            name = "attn_mask" if has_heads else "a mask"
            raise TypeError(f"{name} must be an AttentionMask, a Tensor or None, got {type(attn_mask).__name__}")
        if not has_heads:
            if attn_mask.dim() != 3:
                shapes = "(B, 1, Lk), (B, Lq, Lk) or (1, Lq, Lk)"
                raise ValueError(f"a dense mask must be {shapes}, got shape {tuple(attn_mask.shape)}")
            if attn_mask.is_floating_point():
                advice = "An additive mask goes into AttentionMask(bias=...)"
                raise ValueError(
                    f"a dense mask must be bool or integer, nonzero = attend, got {attn_mask.dtype}. {advice}"
                )
            keep = attn_mask != 0
            return cls(key_padding=keep[:, 0]) if keep.shape[1] == 1 else cls(keep[:, None])
        if attn_mask.dtype == torch.bool:
            return cls(attn_mask)
        if not attn_mask.is_floating_point():
            expected = "bool, True = attend, or floating point, added to the scores"
            raise TypeError(f"attn_mask has dtype {attn_mask.dtype}, expected {expected}")
        _warn_of_zeros_and_ones(attn_mask)
        return cls(bias=attn_mask)

    def __and__(self, other: AttentionMask) -> AttentionMask:
        """Both masks must allow it. Biases are added."""
        if not isinstance(other, AttentionMask):
            advice = "AttentionMask(attn_mask=...), AttentionMask(key_padding=...) or AttentionMask(bias=...)"
            raise TypeError(f"cannot combine an AttentionMask and a {type(other).__name__}. Convert it first: {advice}")
        _check_packing(self, other)
        _check_packing(other, self)
        tensors: dict[str, Any] = {
            name: _combine(name, getattr(self, name), getattr(other, name), join)
            for name, (_, join) in _TENSORS.items()
        }
        both = AttentionMask(**tensors)
        both._bands = {name: _intersect(self._bands[name], other._bands[name]) for name in _ALIGNMENTS}
        return both

    def __rand__(self, other: Any) -> AttentionMask:
        return self & other

    def with_bias(self, bias: Tensor | None) -> AttentionMask:
        """The same mask with another bias. The two share their cache, because nothing in it depends on the bias."""
        return self.replace(bias=bias)

    def with_one_bias(self, Lq: int, Lk: int, dtype: torch.dtype) -> AttentionMask:
        """The same mask with relative_bias as a part of bias, added in this dtype, if it has both: kernels read one."""
        if self.bias is None or self.relative_bias is None:
            return self
        both = self.bias.to(dtype) + self.dense_relative_bias(Lq, Lk).to(dtype)
        return self.replace(bias=both, relative_bias=None)

    def dense_relative_bias(self, Lq: int, Lk: int) -> Tensor:
        """relative_bias as a bias, (1, H or 1, Lq, Lk), differentiable. Between packed sequences any number."""
        bias = self.relative_bias
        distance = torch.arange(Lk, device=bias.device) - torch.arange(Lq, device=bias.device)[:, None]
        place = distance + zero_distance(bias.shape[1], Lq, Lk)
        if self.cu_seqlens_q is not None:
            place = place.clamp(0, bias.shape[1] - 1)
        return bias[None, :, place]

    def without_band(self) -> AttentionMask:
        """The same mask without causal and window."""
        other = self._copy([])
        other._bands = dict.fromkeys(_ALIGNMENTS, FREE)
        return other

    def replace(self, **tensors: Tensor | None) -> AttentionMask:
        """The same mask with other tensors, given by name. Raises what the constructor raises."""
        only_biases = all([name in ("bias", "relative_bias") for name in tensors])
        other = self._copy(self._cache if only_biases else [])
        other._set(**tensors)
        return other

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> AttentionMask:
        """The mask with its tensors, the bias included, on the device, as Tensor.to. Itself if they are there."""
        moved: dict[int, Tensor] = {}  # cu_seqlens of queries and keys may be one tensor, and stay one
        for t in self._tensors().values():
            moved[id(t)] = t.to(device, non_blocking=non_blocking)
        if all(moved[id(t)] is t for t in self._tensors().values()):
            return self
        other = self._copy([])
        for name, t in self._tensors().items():
            setattr(other, name, moved[id(t)])
        return other

    def _copy(self, cache: list[tuple[Any, ...]]) -> AttentionMask:
        """This mask with another cache. The constructor is not called: it would check the same tensors again."""
        other = object.__new__(AttentionMask)
        for name in ("_bands", "_made_while", *_TENSORS):  # torch.compile traces no other way in 2.11
            setattr(other, name, getattr(self, name))
        other._cache, other._bias_cache = cache, []
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles, whose tensors count their edits from the start again: nothing cached is of them."""
        return self.__dict__ | {"_cache": [], "_bias_cache": []}

    def __repr__(self) -> str:
        parts = [f"{name}={tuple(t.shape)}" for name, t in self._tensors().items()]
        parts += [f"{name} band={band}" for name, band in self._bands.items() if band != FREE]
        return f"AttentionMask({', '.join(parts)})"

    def _structure(self) -> tuple[Tensor | None, ...]:
        """Every tensor but the biases."""
        return self.attn_mask, self.key_padding, self.query_padding, self.cu_seqlens_q, self.cu_seqlens_k

    def _tensors(self) -> dict[str, Tensor]:
        return {name: t for name in _TENSORS if (t := getattr(self, name)) is not None}

    @property
    def any_bias(self) -> Tensor | None:
        """bias, with four dimensions, or relative_bias, with two. Not of a mask with both: see `with_one_bias`."""
        return self.bias if self.relative_bias is None else self.relative_bias

    @property
    def band_only(self) -> bool:
        """True if only a band (and a bias) restricts; which tiles are visible then follows from arithmetic."""
        return self.attn_mask is self.key_padding is self.query_padding is self.cu_seqlens_q is None

    @property
    def has_band(self) -> bool:
        """Whether causal or a window restricts."""
        from_first, from_last = self._bands.values()
        return from_first != FREE or from_last != FREE

    def is_causal(self, Lq: int, Lk: int) -> bool:
        """Whether the band is what PyTorch calls is_causal: query i attends to key j only if j <= i. Not if packed."""
        if not self.has_band:
            return False
        low, high = self.band(Lq, Lk)
        return known_equal(low, -Lq) and known_equal(high, 0)

    @property
    def counts_from_the_end(self) -> bool:
        """Whether a band counts from the last query and key, of the whole or of each packed sequence."""
        return self._bands["bottom_right"] != FREE

    def band(self, Lq: int, Lk: int) -> tuple[int, int]:
        """(low, high), both in [-Lq, Lk]: query i attends to key j only if low <= j - i <= high. Not if packed."""
        return band_of(self._restriction(), Lq, Lk)

    def check(self, B: int, H: int, Lq: int, Lk: int, device: torch.device) -> None:
        """Raise ValueError if this mask does not fit queries (B, H, Lq, ..) and keys (B, .., Lk, ..) on device."""
        full = (B, H, Lq, Lk)
        for name, t in self._tensors().items():
            if t.device != device:
                raise ValueError(f"{name} is on {t.device}, expected {device} as query")
            if name in ("attn_mask", "bias") and not all(map(_fits, t.shape, full)):
                read = f"{name}, read as {tuple(t.shape)}, does not broadcast to (B, H, Lq, Lk) = {full}"
                raise ValueError(f"{read}. {_advice(t, full)}")
        if (t := self.relative_bias) is not None:
            if not _fits(t.shape[0], H):
                raise ValueError(f"relative_bias has shape {tuple(t.shape)}, expected {H} rows, one a head, or 1")
            if self.cu_seqlens_q is None:
                length, meaning = max(Lq + Lk - 1, 0), "Lq + Lk - 1"
            else:
                length, meaning = t.shape[1] | 1, "2 * the longest packed sequence - 1"
                if can_read_values(self.cu_seqlens_q) and len(self.cu_seqlens_q) > 1:
                    length = max(2 * int(self.cu_seqlens_q.diff().max()) - 1, 0)
            if t.shape[1] != length:
                raise ValueError(f"relative_bias has shape {tuple(t.shape)}, expected {length} columns, {meaning}")
        for name, t, length in (("key_padding", self.key_padding, Lk), ("query_padding", self.query_padding, Lq)):
            if t is not None and (not _fits(t.shape[0], B) or t.shape[1] != length):
                raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {(B, length)} or {(1, length)}")
        if self.cu_seqlens_q is not None and can_read_values(self.cu_seqlens_q):
            for name, t, length in (("cu_seqlens_q", self.cu_seqlens_q, Lq), ("cu_seqlens_k", self.cu_seqlens_k, Lk)):
                if t[-1] != length:
                    raise ValueError(f"{name} ends at {int(t[-1])}, expected the length {length}: {_CUMULATIVE}")

    def dense(self, B: int, H: int, Lq: int, Lk: int, device: torch.device | str) -> Tensor:
        """The mask without its bias as a bool tensor, an expanded (B, H, Lq, Lk) view. Tests compare with it."""
        return self._dense(Lq, Lk, device).expand(B, H, Lq, Lk)

    def _dense(self, Lq: int, Lk: int, device: torch.device | str) -> Tensor:
        return self.cached(("dense", Lq, Lk), device, lambda: self.part(Lq, Lk, device=device))

    def part(
        self,
        Lq: int,
        Lk: int,
        batch: slice = _ALL,
        rows: slice = _ALL,
        keys: slice = _ALL,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The mask without its bias, of some sentences, queries and keys. As `dense`, but dimensions along which
        nothing differs are 1. device: of the mask's tensors, if it has any."""
        conditions: list[Tensor] = []
        if self.has_band and self.cu_seqlens_q is None and not is_traced():  # a trace knows no lengths
            (low, high), row, column = self.band(Lq, Lk), range(Lq)[rows], range(Lk)[keys]
            shift, keep = row.start - column.start, torch.ones(len(row), len(column), dtype=torch.bool, device=device)
            conditions.append(keep.tril_(high + shift).triu_(low + shift)[None, None])
        elif self.has_band or self.cu_seqlens_q is not None:
            positional = Restriction(*self._restriction()[:3])
            begin, end = build_intervals(positional, Lq, Lk, device)[:, None, rows].split(1, -1)
            key = torch.arange(Lk, device=device)[keys]
            conditions.append((begin <= key) & (key < end))
        places = (batch, _ALL, rows, keys)
        for t, dims in ((self.key_padding, (1, 1)), (self.query_padding, (1, 3)), (self.attn_mask, ())):
            if t is not None:
                for dim in dims:
                    t = t.unsqueeze(dim)
                conditions.append(cut(t, *places))
        if not conditions:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return reduce(torch.logical_and, conditions)

    def visible(self, Lq: int, Lk: int, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """For PyTorch's own operators: (masked, queries, keys), bool, each None if it is known to change nothing.

        masked (b, h, Lq, Lk): True = masked. No key is masked for a query without a visible key: its softmax would be
            NaN. queries (b, h, Lq, 1): those with a visible key. keys (b, h, Lk, 1): those visible to some query. None
            where attn_mask or a bias alone hides them: these are finite.
        Every dimension but the last of masked may be 1 instead, and is then broadcast.
        """

        def build() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            keep = self._dense(Lq, Lk, device)
            if self.bias is not None:
                keep = keep & (self.bias != -torch.inf)
            queries = keep.any(-1, keepdim=True)
            excludes_keys = self.key_padding is not None or self.cu_seqlens_q is not None or self.has_band
            keys = keep.any(-2).unsqueeze(-1) if excludes_keys else None
            if can_read_values(keep):  # on a CPU reading the values needs no synchronisation, and saves work
                queries, keys = (None if t is None or t.all() else t for t in (queries, keys))
            masked = ~keep if queries is None else ~keep & queries
            if keys is None and can_read_values(keep) and not masked.any():
                return None, queries, None
            # PyTorch's operators need all keys.
            return masked if masked.shape[3] == Lk else masked.expand(-1, -1, -1, Lk), queries, keys

        # A bias may hold -inf, and the next call may have another one.
        return build() if self.bias is not None else self.cached(("visible", Lq, Lk), device, build)

    def additive(self, masked: Tensor, Lq: int, Lk: int, dtype: torch.dtype) -> Tensor:
        """visible()'s masked as a tensor to add to the scores: -inf where masked is True, else 0."""

        def build() -> Tensor:
            return torch.zeros_like(masked, dtype=dtype).masked_fill_(masked, -torch.inf)

        return build() if self.bias is not None else self.cached(("additive", Lq, Lk, dtype), masked.device, build)

    # Before the method `prepare`: after it, the default of build would be that method.
    def prepare_all(
        self,
        Lq: int,
        Lk: int,
        layouts: Sequence[Layout],
        device: torch.device,
        build: Callable[..., PreparedMask] = prepare,
    ) -> list[PreparedMask]:
        """`prepare` in several layouts, with what they have in common decided once."""
        restriction, prepared = self._restriction(), []
        band_only = self.band_only
        stamp = None if band_only else self.stamp(device)
        for layout in layouts:
            by_key, block_rows, block_columns, _, has_classes = layout
            rows, columns, restricted = (Lk, Lq, restriction.transposed()) if by_key else (Lq, Lk, restriction)
            if band_only:
                prepared.append(PreparedMask(*band_of(restricted, rows, columns), layout=layout))
                continue
            # Kernels with one tile share the tensors, also if their launches differ in something else.
            args = rows, columns, block_rows, block_columns, has_classes, device
            made = partial(build, restricted, *args)
            found: PreparedMask = self._cached(("prepared", by_key, *args), stamp, made, self._cache)
            prepared.append(found._replace(layout=layout))
        return prepared

    def prepare(
        self, Lq: int, Lk: int, layout: Layout, device: torch.device, build: Callable[..., PreparedMask] = prepare
    ) -> PreparedMask:
        """What a kernel reads of this mask, without its bias. It is made once, on the device, without waiting for it.

        build: what makes it. Arguments and result as `fastattn.masks.kernel_format.prepare`.
        """
        return self.prepare_all(Lq, Lk, (layout,), device, build)[0]

    def _restriction(self) -> Restriction:
        bands = (self._bands["top_left"], self._bands["bottom_right"])
        offsets = (self.cu_seqlens_q, self.cu_seqlens_k)
        return Restriction(bands, *offsets, self.query_padding, self.key_padding, self.attn_mask)

    def cached(
        self, key: tuple[Any, ...], device: torch.device | str, build: Callable[[], Any], with_bias: bool = False
    ) -> Any:
        """The result of build(), which depends on this mask, and on key and device. with_bias: also on its bias.

        The cache keeps the newest MAX_CACHED results. A result is built again after one of the mask's tensors was
        edited in place, and on another stream. `with_bias()` gives a mask that shares what does not depend on the bias.
        Entries built during a CUDA graph's capture or a trace are cached only on masks built in the same one. Nothing
        is cached inside a transform of torch.func.
        """
        device = torch.device(device)
        has_bias = self.bias is not None or self.relative_bias is not None
        cache = self._bias_cache if with_bias and has_bias else self._cache
        return self._cached((*key, device), self.stamp(device, with_bias), build, cache)

    def stamp(self, device: torch.device, with_bias: bool = False) -> tuple[int, ...] | None:
        """What the results of `cached` depend on next to the key: the versions of the tensors, which change with every
        in-place edit, and the stream. Returns None where nothing is cached.

        Tensors of torch.inference_mode have no version, and a trace cannot read it. There a mask must not be edited
        between its first use and its last.
        """
        if _recording(device) != self._made_while or is_transformed():
            return None
        tensors, traced = self._structure(), self._made_while[0]
        if with_bias:
            tensors = (*tensors, self.bias, self.relative_bias)
        versions = [0 if traced or t.is_inference() else t._version for t in tensors if t is not None]
        return *versions, 0 if traced else _current_stream(device)

    def _cached(
        self,
        key: tuple[Any, ...],
        stamp: tuple[int, ...] | None,
        build: Callable[[], Any],
        cache: list[tuple[Any, ...]],
    ) -> Any:
        if stamp is None:
            return build()
        same = _known_same if self._made_while[0] else operator.eq  # here nothing is traced, unless it was made so
        # A list and no dict: in a dict's key torch.compile would make a constant of a symbolic length.
        for cached_key, cached_stamp, value in cache:
            if same(cached_key, key) and cached_stamp == stamp:
                return value
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training must be able to use what validation prepares
                value = build()
        else:
            value = build()
        others = [entry for entry in cache if not same(entry[0], key)]
        cache[:] = [*others[-MAX_CACHED + 1 :], (key, stamp, value)]
        return value


def get_pad_mask(seq: Tensor, pad_idx: int) -> Tensor:
    """(B, L) token ids -> bool (B, 1, L), True where the token is not padding: a mask as the models take it.

    The op takes AttentionMask(key_padding=seq != pad_idx). TypeError or ValueError for what is not that.
    """
    check_token_ids("seq", seq)
    if not isinstance(pad_idx, Integral) or isinstance(pad_idx, bool):
        raise TypeError(f"pad_idx must be an integer, got {type(pad_idx).__name__}")
    return (seq != pad_idx).unsqueeze(-2)


def get_subsequent_mask(seq: Tensor) -> Tensor:
    """(B, L) token ids -> bool (1, L, L), True on and below the diagonal: a position attends to itself and before.

    TypeError or ValueError for what is not (B, L).
    """
    check_token_ids("seq", seq)
    L = seq.shape[1]
    return torch.ones((1, L, L), dtype=torch.bool, device=seq.device).tril()


def cut(t: Tensor, *places: slice) -> Tensor:
    """t at these places of its first dimensions. A dimension of size 1 is broadcast, so it stays."""
    return t[tuple(_ALL if n == 1 else place for n, place in zip(t.shape, places, strict=False))]


def _intersect(a: Band, b: Band) -> Band:
    lows = [n for n in (a[0], b[0]) if n is not None]
    highs = [n for n in (a[1], b[1]) if n is not None]
    return (max(lows) if lows else None), (min(highs) if highs else None)


def _combine(name: str, a: Tensor | None, b: Tensor | None, both: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    if any(m != n and 1 not in (m, n) for m, n in zip(a.shape, b.shape, strict=True)):
        raise ValueError(f"cannot combine {name} of shape {tuple(a.shape)} with one of shape {tuple(b.shape)}")
    return both(a, b)


def _one_packing(a: Tensor, b: Tensor) -> Tensor:
    if a is b or torch.equal(a.long(), b.long()):
        return a
    raise ValueError("cannot combine two masks with different cu_seqlens: pack the sequences once")


def _check_packing(packed: AttentionMask, banded: AttentionMask) -> None:
    """In packed sequences a band counts inside each sequence. A band that was meant for the whole length has the same
    meaning only if queries and keys have the same cu_seqlens."""
    same_packing = packed.cu_seqlens_q is packed.cu_seqlens_k
    if not same_packing and banded.cu_seqlens_q is None and banded.has_band:
        raise ValueError(
            "cannot combine causal or window with cu_seqlens_q and cu_seqlens_k that differ: "
            "give them to one AttentionMask, where they count inside each sequence"
        )


def _fits(size: int, full: int) -> bool:
    """Whether a dimension broadcasts to the full one. In a trace `size in (1, full)` is false of symbolic lengths."""
    return size == 1 or size == full


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _known_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """known_equal of tuples."""
    return len(a) == len(b) and all([known_equal(x, y) for x, y in zip(a, b, strict=True)])


def _recording(device: torch.device | None) -> tuple[bool, bool]:
    """Whether a function is being traced, and whether a CUDA graph is being captured."""
    traced, on_gpu = is_traced(), device is not None and device.type == "cuda"
    return traced, on_gpu and not traced and torch.cuda.is_current_stream_capturing()


def _four_dims(name: str, t: Tensor) -> Tensor:
    if name == "bias" and not t.is_floating_point():
        raise TypeError(f"bias has dtype {t.dtype}, expected floating point; a bool mask is attn_mask=")
    if name == "attn_mask" and t.dtype != torch.bool:
        raise TypeError(f"attn_mask has dtype {t.dtype}, expected bool; a float mask is bias=")
    if t.dim() > 4:
        raise ValueError(f"{name} has {t.dim()} dimensions {tuple(t.shape)}, expected at most 4: (B, H, Lq, Lk)")
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def _by_distance(name: str, t: Tensor) -> Tensor:
    if not t.is_floating_point():
        raise TypeError(f"{name} has dtype {t.dtype}, expected floating point")
    if t.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (H, Lq + Lk - 1) or (1, Lq + Lk - 1)")
    return t if t.stride(1) == 1 else t.contiguous()


def _padding(name: str, t: Tensor) -> Tensor:
    if t.dtype != torch.bool:
        advice = f"{name}.bool(), or ~{name}.bool() if what is not 0 is padding"
        raise TypeError(f"{name} has dtype {t.dtype}, expected bool, True = a real token: {advice}")
    if t.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (B, L) or (1, L)")
    return t


_CUMULATIVE = "cumulative lengths, F.pad(lengths.cumsum(0), (1, 0))"


def _offsets(name: str, t: Tensor) -> Tensor:
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {t.dtype}, expected int32 or int64")
    if t.dim() != 1 or t.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (n + 1,): {_CUMULATIVE}")
    # Reading the values on a GPU would wait for it.
    if can_read_values(t) and (t[0] != 0 or (t[1:] < t[:-1]).any()):
        raise ValueError(f"{name} is {t.tolist()}, expected to start at 0 and never to decrease: {_CUMULATIVE}")
    return t


# Of each tensor of a mask the check, and how `&` combines two.
_TENSORS: dict[str, tuple[Callable[[str, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "attn_mask": (_four_dims, torch.logical_and),
    "bias": (_four_dims, torch.add),
    "relative_bias": (_by_distance, torch.add),
    "key_padding": (_padding, torch.logical_and),
    "query_padding": (_padding, torch.logical_and),
    "cu_seqlens_q": (_offsets, _one_packing),
    "cu_seqlens_k": (_offsets, _one_packing),
}


def _advice(t: Tensor, full: tuple[int, int, int, int]) -> str:
    """The likely meaning of a matrix that does not fit (B, H, Lq, Lk)."""
    B, _, _, Lk = full
    if tuple(t.shape) == (1, 1, B, Lk):
        return "The padding of keys, (B, Lk), is AttentionMask(key_padding=...)"
    if t.shape[:2] == (1, B):
        return "One matrix for each sequence, (B, Lq or 1, Lk), needs a dimension for the heads: mask[:, None]"
    return "Dimensions count from the last, and missing ones are 1"


def _warn_of_zeros_and_ones(mask: Tensor) -> None:
    """A float mask that holds only 0 and 1 was probably not meant to be added to the scores."""
    if mask.requires_grad or not can_read_values(mask) or mask.numel() == 0:
        return
    low, high = mask.aminmax()
    if low == 0 and high == 1 and ((mask == 0) | (mask == 1)).all():
        message = "attn_mask holds only 0.0 and 1.0, and a float mask is added to the scores, as in torch"
        warnings.warn(f"{message}; if 1 means attend, pass attn_mask.bool()", stacklevel=5)


def _window_band(window: tuple[int | None, int | None]) -> Band:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (not isinstance(side, int) or side < 0):
            raise ValueError(f"window must hold non-negative integers or None, got {tuple(window)}")
    left, right = window
    return (None if left is None else -left), right
