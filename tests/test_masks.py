"""AttentionMask against loops over single (query, key) pairs; what is prepared from it against its dense form."""

from __future__ import annotations

import pytest
import torch
from mask_cases import KINDS, brute_force, mask_kinds, offsets, prefix

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, masks

CPU = torch.device("cpu")
SHAPES = [(2, 3, 7, 10), (2, 2, 10, 7), (3, 1, 5, 5), (1, 2, 1, 6), (2, 1, 6, 1)]
BLOCKS = [(4, 4), (8, 2), (2, 8), (16, 16)]


def dense(kwargs: dict, B: int, H: int, Lq: int, Lk: int) -> torch.Tensor:
    return AttentionMask(**kwargs).dense(B, H, Lq, Lk, CPU)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dense_equals_loops(kind: str, shape: tuple[int, int, int, int]) -> None:
    kwargs = mask_kinds(*shape)[kind]
    AttentionMask(**kwargs).check(*shape, CPU)
    got = dense(kwargs, *shape)
    assert got.dtype == torch.bool and got.shape == shape
    assert torch.equal(got, brute_force(kwargs, *shape))


def test_the_loops_draw_what_the_docstring_draws() -> None:
    """The brute force itself, against pictures written by hand."""
    assert brute_force({"is_causal": True}, 1, 1, 2, 4)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    bottom_right = {"is_causal": True, "align": "bottom_right"}
    assert brute_force(bottom_right, 1, 1, 2, 4)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert brute_force(bottom_right, 1, 1, 3, 1)[0, 0].int().tolist() == [[0], [0], [1]]
    assert brute_force({"window": (1, 0)}, 1, 1, 3, 3)[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    packed = {"cu_seqlens_q": offsets(1, 2), "cu_seqlens_k": offsets(2, 1)}
    assert brute_force(packed, 1, 1, 3, 3)[0, 0].int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("left", KINDS)
def test_and_means_both(left: str, shape: tuple[int, int, int, int]) -> None:
    kinds = mask_kinds(*shape)
    for right in ("none", "causal", "window_bottom_right", "key_padding_shared", "query_padding", "attn_mask_keys"):
        if "cu_seqlens_q" in kinds[left] and ("window" in kinds[right] or "is_causal" in kinds[right]):
            continue  # see test_and_with_packed_segments
        a, b = kinds[left], kinds[right]
        both = AttentionMask(**a) & AttentionMask(**b)
        expected = brute_force(a, *shape) & brute_force(b, *shape)
        assert torch.equal(both.dense(*shape, CPU), expected), right
        assert torch.equal((AttentionMask(**b) & AttentionMask(**a)).dense(*shape, CPU), expected), right


def test_and_takes_packed_segments_with_a_band_where_both_mean_the_same() -> None:
    packed = {"cu_seqlens_q": offsets(3, 0, 4)}
    both = AttentionMask(**packed) & AttentionMask(is_causal=True)
    assert torch.equal(both.dense(1, 1, 7, 7, CPU), brute_force({**packed, "is_causal": True}, 1, 1, 7, 7))


def test_and_of_many_equals_one_constructor() -> None:
    shape = (2, 3, 7, 10)
    parts = mask_kinds(*shape)["decoder"]
    one = AttentionMask(**parts)
    many = AttentionMask(is_causal=True)
    for name in ("key_padding", "query_padding"):
        many = many & AttentionMask(**{name: parts[name]})
    assert torch.equal(one.dense(*shape, CPU), many.dense(*shape, CPU))
    for a, b in zip(one.tiles(7, 10, 4, 4, CPU), many.tiles(7, 10, 4, 4, CPU), strict=True):
        assert torch.equal(a, b)


def test_and_adds_biases() -> None:
    a, b = torch.randn(1, 2, 3, 4), torch.randn(5, 1, 1, 4)
    assert torch.equal((AttentionMask(bias=a) & AttentionMask(bias=b)).bias, a + b)
    assert torch.equal((AttentionMask(bias=a) & AttentionMask(is_causal=True)).bias, a)


def same_meaning(*masks: AttentionMask, shape: tuple[int, int, int, int] = (2, 2, 5, 8)) -> None:
    for mask in masks[1:]:
        assert torch.equal(mask.dense(*shape, CPU), masks[0].dense(*shape, CPU))


def test_equal_meaning_causal() -> None:
    tril = torch.ones(5, 8, dtype=torch.bool).tril()
    same_meaning(
        AttentionMask(is_causal=True),
        AttentionMask(window=(None, 0)),
        AttentionMask(tril),
        AttentionMask(tril[None, None]),
        AttentionMask(is_causal=True, cu_seqlens_q=offsets(5), cu_seqlens_k=offsets(8)),
        AttentionMask(is_causal=True) & AttentionMask(is_causal=True),
        AttentionMask(window=(None, 0)) & AttentionMask(window=(8, 1)),
    )
    same_meaning(
        AttentionMask(is_causal=True, align="bottom_right"),
        AttentionMask(torch.ones(5, 8, dtype=torch.bool).tril(3)),
        AttentionMask(window=(None, 3)),
    )
    subsequent = get_subsequent_mask(torch.zeros(2, 5))
    same_meaning(AttentionMask(is_causal=True), AttentionMask(subsequent), shape=(2, 2, 5, 5))


def test_equal_meaning_padding() -> None:
    tokens = torch.tensor([[4, 5, 6, 7, 8, 9, 1, 1], [4, 5, 1, 1, 1, 1, 1, 1]])
    keys = tokens != 1
    same_meaning(
        AttentionMask(key_padding=keys),
        AttentionMask(keys[:, None, None]),
        AttentionMask(get_pad_mask(tokens, 1)[:, None]),
        AttentionMask(keys[:, None, None].expand(2, 2, 5, 8)),
    )
    queries = prefix([5, 3], 5)
    same_meaning(AttentionMask(query_padding=queries), AttentionMask(queries[:, None, :, None]))


def test_equal_meaning_segments() -> None:
    block = torch.zeros(5, 8, dtype=torch.bool)
    block[:2, :3], block[2:, 3:] = True, True
    same_meaning(
        AttentionMask(cu_seqlens_q=offsets(2, 3), cu_seqlens_k=offsets(3, 5)),
        AttentionMask(cu_seqlens_q=offsets(2, 3).long(), cu_seqlens_k=offsets(3, 5).long()),
        AttentionMask(cu_seqlens_q=offsets(0, 2, 0, 3, 0), cu_seqlens_k=offsets(0, 3, 0, 5, 0)),
        AttentionMask(block),
    )
    same_meaning(
        AttentionMask(cu_seqlens_q=offsets(2, 3)),
        AttentionMask(cu_seqlens_q=offsets(2, 3), cu_seqlens_k=offsets(2, 3)),
        shape=(1, 1, 5, 5),
    )


def test_and_with_packed_segments() -> None:
    """Both must allow it, also where packing moves the place that causal and window are counted from."""
    shape, packed = (1, 1, 6, 9), {"cu_seqlens_q": offsets(3, 3), "cu_seqlens_k": offsets(3, 6)}
    for band in ({"is_causal": True}, {"window": (2, 1)}, {"is_causal": True, "align": "bottom_right"}):
        try:
            both = AttentionMask(**packed) & AttentionMask(**band)
        except ValueError as refused:
            assert "cu_seqlens" in str(refused)  # refusing what cannot be said is honest; another meaning is not
            continue
        expected = brute_force(packed, *shape) & brute_force(band, *shape)
        assert torch.equal(both.dense(*shape, CPU), expected)


def test_a_tensor_as_sdpa_takes_it() -> None:
    keep, bias = torch.rand(5, 8) < 0.5, torch.randn(5, 8)
    assert torch.equal(AttentionMask.of(keep).dense(1, 1, 5, 8, CPU)[0, 0], keep)
    assert torch.equal(AttentionMask.of(bias).bias[0, 0], bias) and AttentionMask.of(bias).attn_mask is None
    assert AttentionMask.of(None) is None
    mask = AttentionMask(keep)
    assert AttentionMask.of(mask) is mask


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kernel_reads_equals_dense(kind: str, shape: tuple[int, int, int, int]) -> None:
    """keep = (k_start <= n < k_end) & key_padding[n] & attn_mask[m, n]; the band alone says the same."""
    B, H, Lq, Lk = shape
    mask = AttentionMask(**mask_kinds(*shape)[kind])
    start, end = mask.intervals(Lq, Lk, CPU)
    for t in (start, end):
        assert t.dtype == torch.int32 and t.is_contiguous() and t.shape[0] in (1, B) and t.shape[1] == Lq
        assert (t >= 0).all() and (t <= Lk).all()
    assert (start <= end).all()
    n = torch.arange(Lk)
    keep = ((start[..., None] <= n) & (n < end[..., None]))[:, None]
    if mask.key_padding is not None:
        keep = keep & mask.key_padding[:, None, None, :]
    if mask.attn_mask is not None:
        keep = keep & mask.attn_mask
    truth = mask.dense(*shape, CPU)
    assert torch.equal(keep.expand(shape), truth)
    if mask.band_only:
        low, high = mask.band(Lq, Lk) or (-Lq, Lk)
        ahead = n[None, :] - torch.arange(Lq)[:, None]
        assert torch.equal(((low <= ahead) & (ahead <= high)).expand(shape), truth)


def listed(count: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
    """Counts (.., n) and ascending lists (.., n, width) as a table of bools (.., n, width)."""
    assert count.dtype == places.dtype == torch.int32 and count.is_contiguous() and places.is_contiguous()
    assert places.shape == (*count.shape, width)
    table = torch.zeros(places.shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
        entries = places[tuple(at)][: count[tuple(at)]].tolist()
        assert entries == sorted(set(entries)), "a list must be ascending and free of repeats"
        table[tuple(at)][entries] = True
    return table


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tile_classes(kind: str, shape: tuple[int, int, int, int], blocks: tuple[int, int]) -> None:
    B, H, Lq, Lk = shape
    BLOCK_M, BLOCK_N = blocks
    nQ, nK = -(-Lq // BLOCK_M), -(-Lk // BLOCK_N)
    mask = AttentionMask(**mask_kinds(*shape)[kind])
    tiles = mask.tiles(Lq, Lk, BLOCK_M, BLOCK_N, CPU)
    samples, heads, query_tiles = tiles.num_partial.shape
    assert samples in (1, B) and heads in (1, H) and query_tiles == nQ
    partial, full = listed(tiles.num_partial, tiles.partial, nK), listed(tiles.num_full, tiles.full, nK)
    assert not (partial & full).any()
    assert torch.equal(listed(tiles.num_partial_t, tiles.partial_t, nQ), partial.mT)
    assert torch.equal(listed(tiles.num_full_t, tiles.full_t, nQ), full.mT)
    # The truth, tile by tile; places beyond the last query or key are masked, so a ragged tile is not full.
    padded = torch.zeros(B, H, nQ * BLOCK_M, nK * BLOCK_N, dtype=torch.bool)
    padded[:, :, :Lq, :Lk] = mask.dense(*shape, CPU)
    padded = padded.view(B, H, nQ, BLOCK_M, nK, BLOCK_N)
    some, every = padded.any(5).any(3), padded.all(5).all(3)
    partial, full = partial.expand(B, H, nQ, nK), full.expand(B, H, nQ, nK)
    assert torch.equal(full, every)
    assert not (some & ~(partial | full)).any(), "a tile that holds work is skipped"
    if not kind.startswith(("everything", "decoder")):  # where several masks meet, an empty tile may be visited
        assert torch.equal(partial, some & ~every)


def test_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def build(*args):
            builds.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, build)

    counted(masks, "build_tiles")
    counted(AttentionMask, "_build_intervals")
    mask = AttentionMask(torch.rand(2, 1, 7, 9) < 0.5, key_padding=prefix([9, 4], 9))
    first = mask.tiles(7, 9, 4, 4, CPU)
    assert mask.tiles(7, 9, 4, 4, CPU) is first
    assert mask.with_bias(torch.randn(1, 1, 7, 9)).tiles(7, 9, 4, 4, CPU) is first
    assert builds.count("build_tiles") == 1
    mask.tiles(7, 9, 8, 8, CPU)
    assert builds.count("build_tiles") == 2 and builds.count("_build_intervals") == 1
    mask.attn_mask[:] = True  # an edit in place must not be answered from the cache
    assert not torch.equal(mask.tiles(7, 9, 4, 4, CPU).num_full, first.num_full)


def test_flatten_round_trip() -> None:
    shape = (2, 3, 7, 10)
    for kwargs in mask_kinds(*shape).values():
        mask = AttentionMask(**kwargs, bias=torch.randn(1, 1, 7, 10))
        again = AttentionMask.unflatten(*mask.flatten(), mask.bias)
        assert torch.equal(again.dense(*shape, CPU), mask.dense(*shape, CPU)) and torch.equal(again.bias, mask.bias)


def test_band_only() -> None:
    assert AttentionMask(is_causal=True).band_only and AttentionMask(bias=torch.zeros(1)).band_only
    assert AttentionMask().band(3, 4) is None
    for kind, kwargs in mask_kinds(2, 2, 4, 4).items():
        restricted = set(kwargs) & {"attn_mask", "key_padding", "query_padding", "cu_seqlens_q"}
        assert AttentionMask(**kwargs).band_only == (not restricted), kind


def test_zero_lengths() -> None:
    for Lq, Lk in ((0, 4), (4, 0), (0, 0)):
        mask = AttentionMask(is_causal=True, key_padding=torch.ones(2, Lk, dtype=torch.bool), align="bottom_right")
        assert mask.dense(2, 1, Lq, Lk, CPU).shape == (2, 1, Lq, Lk)
        start, end = mask.intervals(Lq, Lk, CPU)
        assert start.shape[-1] == Lq and (start == end).all()
        assert mask.tiles(Lq, Lk, 4, 4, CPU).num_full.sum() == 0


BOOLS, FLOATS = torch.ones(2, 4, dtype=torch.bool), torch.zeros(4, 4)


@pytest.mark.parametrize(
    "kwargs, error, name",
    [
        ({"attn_mask": FLOATS}, TypeError, "attn_mask"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask"),
        ({"attn_mask": BOOLS[None, None, None]}, ValueError, "attn_mask"),
        ({"attn_mask": BOOLS.int()}, TypeError, "attn_mask"),
        ({"bias": BOOLS}, TypeError, "bias"),
        ({"bias": 1.0}, TypeError, "bias"),
        ({"bias": FLOATS[None, None, None]}, ValueError, "bias"),
        ({"key_padding": FLOATS}, TypeError, "key_padding"),
        ({"key_padding": [3, 4]}, TypeError, "key_padding"),
        ({"key_padding": BOOLS[0]}, ValueError, "key_padding"),
        ({"query_padding": BOOLS.long()}, TypeError, "query_padding"),
        ({"query_padding": BOOLS[None]}, ValueError, "query_padding"),
        ({"window": 3}, TypeError, "window"),
        ({"window": (1, 2, 3)}, TypeError, "window"),
        ({"window": (-1, 0)}, ValueError, "window"),
        ({"window": (1.5, 0)}, ValueError, "window"),
        ({"align": "left"}, ValueError, "align"),
        ({"cu_seqlens_k": offsets(2, 3)}, ValueError, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 3]}, TypeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": offsets(3)[None]}, ValueError, "cu_seqlens_q"),
        ({"cu_seqlens_q": offsets(1, 2), "cu_seqlens_k": offsets(3)}, ValueError, "cu_seqlens_k"),
        ({"cu_seqlens_q": offsets(1, 2), "cu_seqlens_k": torch.zeros(3)}, TypeError, "cu_seqlens_k"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 3])}, ValueError, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([-1, 5])}, ValueError, "cu_seqlens_q"),
    ],
)
def test_bad_arguments(kwargs: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        AttentionMask(**kwargs)


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"attn_mask": torch.ones(2, 1, 5, 7, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": torch.ones(3, 1, 5, 8, dtype=torch.bool)}, "attn_mask"),
        ({"bias": torch.ones(1, 3, 5, 8)}, "bias"),
        ({"key_padding": prefix([1, 2], 5)}, "key_padding"),
        ({"key_padding": prefix([1, 2, 3], 8)}, "key_padding"),
        ({"query_padding": prefix([1, 2], 8)}, "query_padding"),
        ({"key_padding": prefix([1, 2], 8).to("meta")}, "key_padding"),
        ({"cu_seqlens_q": offsets(2, 4)}, "cu_seqlens_q ends at 6, expected at most the length, 5"),
        ({"cu_seqlens_q": offsets(5), "cu_seqlens_k": offsets(9)}, "cu_seqlens_k ends at 9"),
    ],
)
def test_masks_that_do_not_fit(kwargs: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AttentionMask(**kwargs).check(2, 2, 5, 8, CPU)


def test_bad_combinations() -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        AttentionMask(cu_seqlens_q=offsets(2, 3)) & AttentionMask(cu_seqlens_q=offsets(1, 4))
    with pytest.raises(TypeError):
        AttentionMask(is_causal=True) & torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"key_padding of shape \(2, 6\) with one of shape \(2, 5\)"):
        AttentionMask(key_padding=prefix([1, 2], 6)) & AttentionMask(key_padding=prefix([1, 2], 5))
    with pytest.raises(TypeError, match="attn_mask"):
        AttentionMask.of([[1, 0]])
    with pytest.raises(TypeError, match="attn_mask has dtype torch.int32, expected bool"):
        AttentionMask.of(BOOLS.int())


def test_pad_and_subsequent_masks() -> None:
    tokens = torch.tensor([[5, 3, 0], [7, 0, 0]])
    assert get_pad_mask(tokens, 0).tolist() == [[[True, True, False]], [[True, False, False]]]
    subsequent = get_subsequent_mask(tokens)
    assert subsequent.dtype == torch.bool and subsequent.shape == (1, 3, 3)
    assert subsequent[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    # Together as the public Transformer combines them: (B, 1, L) & (1, L, L) -> (B, L, L).
    assert (get_pad_mask(tokens, 0) & subsequent)[1].int().tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
