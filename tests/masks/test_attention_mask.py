"""AttentionMask against loops over single (query, key) pairs; what is prepared from it against its dense form."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from mask_cases import KINDS, brute_force, mask_kinds, offsets, prefix
from torch._dynamo.backends.common import aot_autograd

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, scaled_dot_product_attention
from fastattn.masks import Layout, PreparedMask, conversions, from_operator_args, to_operator_args
from fastattn.masks import attention_mask as mask_module
from fastattn.masks.conversions import documents_to_cu_seqlens, lengths_to_padding, prefix_lm_mask

CPU = torch.device("cpu")
SHAPES = [(2, 3, 7, 10), (2, 2, 10, 7), (3, 1, 5, 5), (1, 2, 1, 6), (2, 1, 6, 1), (2, 2, 40, 150)]
LAYOUTS = [Layout(by_key, *tile) for by_key in (False, True) for tile in ((0, 0), (4, 4), (8, 2), (16, 128))]


def dense(kwargs: dict, B: int, H: int, Lq: int, Lk: int) -> torch.Tensor:
    return AttentionMask(**kwargs).dense(B, H, Lq, Lk, CPU)


@pytest.mark.bug_class("T14")
@pytest.mark.parametrize("kind", KINDS)
def test_dense_equals_loops(kind: str) -> None:
    for shape in SHAPES[:5]:
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


@pytest.mark.parametrize("left", KINDS)
def test_and_means_both(left: str) -> None:
    shape = SHAPES[0]
    kinds = mask_kinds(*shape)
    masks = ("causal", "window_bottom_right", "key_padding_shared", "query_padding", "attn_mask_keys")
    for right in ("none", *masks):
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


@pytest.mark.parametrize("ids", [[4, 4, 4, 1, 1, 4], [[7, 0]], [2], []])
def test_documents(ids: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether their number can be read or not. An id that comes back is another document."""
    ids = torch.tensor(ids, dtype=torch.int32)
    row, L = ids.flatten().tolist(), ids.numel()
    run = [0, *(sum(a != b for a, b in itertools.pairwise(row[: i + 1])) for i in range(1, L))][:L]
    expected = torch.tensor([[run[i] == run[j] and j <= i for j in range(L)] for i in range(L)]).view(1, 1, L, L)
    given = documents_to_cu_seqlens(ids)
    assert len(given) == max(max(run, default=0) + 2, 2)
    monkeypatch.setattr(conversions, "can_read_values", lambda t: False)
    unread = documents_to_cu_seqlens(ids)
    assert len(unread) == L + 1 + (L == 0)
    for cu_seqlens in (given, unread):
        assert torch.equal(AttentionMask(cu_seqlens_q=cu_seqlens, is_causal=True).dense(1, 1, L, L, CPU), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_to_another_device(kind: str) -> None:
    bias = torch.zeros(2, 1, 7, 10, requires_grad=True)
    given = AttentionMask(**mask_kinds(2, 3, 7, 10)[kind], bias=bias)
    given.dense(2, 3, 7, 10, CPU)
    moved = given.to("meta")
    assert given.to(CPU) is given and given.bias is bias and moved.bias.requires_grad
    moved.check(2, 3, 7, 10, torch.device("meta"))
    assert moved.dense(2, 3, 7, 10, "meta").is_meta and moved._bands == given._bands
    assert (moved.cu_seqlens_q is moved.cu_seqlens_k) == (given.cu_seqlens_q is given.cu_seqlens_k)


def test_lengths_and_prefixes() -> None:
    padding = lengths_to_padding(torch.tensor([2, 0, 3], dtype=torch.int32), 3)
    assert padding.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    keep = prefix_lm_mask(torch.tensor([2, 0]), 2, 3)
    assert keep.int().tolist() == [[[[1, 1, 0], [1, 1, 0]]], [[[1, 0, 0], [1, 1, 0]]]]
    assert prefix_lm_mask(torch.tensor([], dtype=torch.int64), 2, 3).shape == (0, 1, 2, 3)

    def call(lengths: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = AttentionMask(prefix_lm_mask(lengths // 2, 5, 5), key_padding=lengths_to_padding(lengths, 5))
        x = scaled_dot_product_attention(x, x, x, mask)
        documents = AttentionMask(cu_seqlens_q=documents_to_cu_seqlens(ids))
        return scaled_dot_product_attention(x[:1], x[:1], x[:1], documents)

    given = torch.tensor([5, 3]), torch.tensor([0, 0, 1, 1, 2]), torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(*given), call(*given))


def test_and_adds_biases() -> None:
    a, b = torch.randn(1, 2, 3, 4), torch.randn(5, 1, 1, 4)
    assert torch.equal((AttentionMask(bias=a) & AttentionMask(bias=b)).bias, a + b)
    assert torch.equal((AttentionMask(bias=a) & AttentionMask(is_causal=True)).bias, a)


def test_and_with_packed_segments() -> None:
    """Both must allow it, also where packing moves the place that causal and window are counted from."""
    shape, packed = (1, 1, 6, 9), {"cu_seqlens_q": offsets(3, 3), "cu_seqlens_k": offsets(3, 6)}
    for band in ({"is_causal": True}, {"window": (2, 1)}, {"is_causal": True, "align": "bottom_right"}):
        try:
            both = AttentionMask(**packed) & AttentionMask(**band)
        except ValueError as refused:
            assert "cu_seqlens" in str(refused)  # refusing is honest; another meaning is not
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


def unpacked(words: torch.Tensor, columns: int) -> torch.Tensor:
    """Bits as a kernel reads them: bool (..., columns)."""
    column = torch.arange(columns)
    word = words[..., column // 128, column % 8 // 2]
    return (word >> (column % 128 // 8 * 2 + column % 2)) & 1 == 1


def as_kernels_read(prepared: PreparedMask, rows: int, columns: int) -> torch.Tensor:
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    keep = ((column - row >= prepared.band_lo) & (column - row <= prepared.band_hi))[None, None]
    if prepared.intervals is not None:
        keep = ((column >= prepared.intervals[..., :1]) & (column < prepared.intervals[..., 1:]))[:, None]
    if prepared.bits is not None:
        return keep & unpacked(prepared.bits, columns)
    return keep if prepared.columns is None else keep & unpacked(prepared.columns, columns)[:, None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kernel_reads_equals_dense(kind: str) -> None:
    for shape in SHAPES:
        B, H, Lq, Lk = shape
        given = AttentionMask(**mask_kinds(*shape)[kind])
        for layout in LAYOUTS:
            prepared = given.prepare(Lq, Lk, layout, CPU)
            truth = given.dense(*shape, CPU)
            truth = truth.mT if layout.by_key else truth
            rows, columns = truth.shape[2:]
            for t in prepared[2:7]:
                assert t is None or (t.dtype == torch.int32 and t.is_contiguous() and t.shape[0] in (1, B))
            assert torch.equal(as_kernels_read(prepared, rows, columns).expand(truth.shape), truth), layout
            if prepared.columns is not None:
                assert not (truth & ~unpacked(prepared.columns, columns)[:, None, None]).any()
            if layout.block_rows > 0 and not given.band_only:
                check_lists(prepared, truth, layout.block_rows, layout.block_columns)


def check_lists(prepared: PreparedMask, truth: torch.Tensor, block_rows: int, block_columns: int) -> None:
    """Every full tile is listed as full, every other one that holds something as partial, each in ascending order."""
    B, H, rows, columns = truth.shape
    row_tiles, column_tiles = -(-rows // block_rows), -(-columns // block_columns)
    padded = torch.zeros(B, H, row_tiles * block_rows, column_tiles * block_columns, dtype=torch.bool)
    padded[:, :, :rows, :columns] = truth
    padded = padded.view(B, H, row_tiles, block_rows, column_tiles, block_columns)
    some, every = padded.any(5).any(3), padded.all(5).all(3)
    counts = prepared.counts.expand(B, H, row_tiles, 2)
    tiles = prepared.tiles.expand(B, H, row_tiles, column_tiles)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, row_tiles))).tolist():
        b, h, i = at
        num_partial, num_listed = counts[b, h, i].tolist()
        listed = tiles[b, h, i].tolist()
        partial, full = listed[:num_partial], listed[num_partial:num_listed]
        assert partial == sorted(partial) and full == every[b, h, i].nonzero().flatten().tolist()
        missed = set(some[b, h, i].nonzero().flatten().tolist()) - set(partial + full)
        assert not missed, "a tile that holds something is skipped"


def test_an_empty_tile_is_not_listed() -> None:
    """Work is proportional to what is visible: padding, bands, packed sequences and blocks of a bool matrix."""
    blocks = torch.zeros(64, 64, dtype=torch.bool)
    blocks[:16, 16:32] = True
    for given, listed in (
        (AttentionMask(key_padding=prefix([16], 64)), 4),
        (AttentionMask(is_causal=True, key_padding=prefix([64], 64)), 10),
        (AttentionMask(cu_seqlens_q=offsets(16, 16, 32)), 6),
        (AttentionMask(blocks), 1),
        (AttentionMask(query_padding=prefix([16], 64)), 4),
    ):
        for by_key in (False, True):
            assert given.prepare(64, 64, Layout(by_key, 16, 16), CPU).counts[..., 1].sum() == listed


def test_prepared_once_and_anew_after_an_edit() -> None:
    given = AttentionMask(torch.rand(2, 1, 7, 9) < 0.5, key_padding=prefix([9, 4], 9))
    layout = Layout(False, 4, 4)
    first = given.prepare(7, 9, layout, CPU)
    assert given.prepare(7, 9, layout, CPU).bits is first.bits
    assert given.with_bias(torch.randn(1, 1, 7, 9)).prepare(7, 9, layout, CPU).bits is first.bits
    kept = len(given._cache)
    for _ in range(50):
        given.attn_mask.logical_not_()
        given.prepare(7, 9, layout, CPU)
    assert len(given._cache) == kept, "what was prepared before an edit is replaced, not kept"
    given.attn_mask[:] = True
    assert unpacked(given.prepare(7, 9, layout, CPU).bits, 9)[0].all()


@pytest.mark.bug_class("T25")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("none", "nothing", "attn_mask_expanded")])
def test_an_edit_in_place_is_seen(kind: str) -> None:
    """Whatever dtype and layout the tensors have. The edited offsets leave positions in no sequence."""
    kwargs = mask_kinds(2, 3, 7, 10)[kind]
    given, layout = AttentionMask(**kwargs), Layout(False, 4, 4)
    given.prepare(7, 10, layout, CPU), given.dense(2, 3, 7, 10, CPU)
    for t in (t for t in kwargs.values() if isinstance(t, torch.Tensor)):
        if t.dtype == torch.bool:
            t.logical_not_()
        else:
            t[0], t[-1] = 1, t[-1] - 1
    truth = brute_force(kwargs, 2, 3, 7, 10)
    assert torch.equal(given.dense(2, 3, 7, 10, CPU), truth)
    assert torch.equal(as_kernels_read(given.prepare(7, 10, layout, CPU), 7, 10).expand(truth.shape), truth)


def test_what_is_kept_is_bounded_and_of_its_device() -> None:
    causal = AttentionMask(is_causal=True)
    for length in range(1, 100):
        causal.dense(1, 1, length, length, CPU)
    assert len(causal._cache) == mask_module.MAX_CACHED
    assert causal.dense(1, 1, 99, 99, "meta").is_meta and not causal.dense(1, 1, 99, 99, CPU).is_meta


def test_prepared_under_inference_mode_serves_training() -> None:
    given = AttentionMask(key_padding=prefix([9, 4], 9))
    with torch.inference_mode():
        prepared = given.prepare(7, 9, Layout(), CPU)
    assert given.prepare(7, 9, Layout(), CPU).columns is prepared.columns and not prepared.columns.is_inference()


@pytest.mark.bug_class("T7", "T16")
def test_prepared_anew_on_another_stream_and_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream makes another must not read unasked; what a capture makes holds nothing before its replay."""
    given, state = AttentionMask(key_padding=prefix([9, 4], 9)), {"stream": 1, "capturing": False}
    monkeypatch.setattr(mask_module, "_current_stream", lambda device: state["stream"])
    monkeypatch.setattr(mask_module, "_recording", lambda device: (False, state["capturing"]))

    def prepared(mask: AttentionMask) -> torch.Tensor:
        return mask.prepare(7, 9, Layout(), CPU).columns

    first = prepared(given)
    state["stream"] = 2
    second = prepared(given)
    assert second is not first and prepared(given) is second
    state["capturing"] = True
    captured = prepared(given)
    assert captured is not second and prepared(given) is not captured
    inside = AttentionMask(key_padding=prefix([9, 4], 9))
    assert prepared(inside) is prepared(inside)
    state["capturing"] = False
    assert prepared(given) is second


def test_prepared_once_in_a_traced_graph() -> None:
    """Three layers in one graph: a mask that is made in there, and one that comes from outside."""
    made = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        made.append(sum("stack" in str(node.target) for node in graph.graph.nodes) // 2)  # of intervals, of counts
        return graph

    def layers(given: AttentionMask, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x * given.prepare(7, 9, Layout(False, 4, 4), CPU).counts.sum()
        return x

    def of_tokens(tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return layers(AttentionMask(key_padding=tokens != 0), x)

    tokens = torch.tensor([[5, 6, 7, 8, 9, 1, 2, 0, 0]])
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    for training in (True, False):
        x = torch.ones(3, requires_grad=training)
        inside = torch.compile(of_tokens, backend=backend, fullgraph=True)(tokens, x)
        assert torch.equal(inside, of_tokens(tokens, x)) and sum(made) == 1
        made.clear()
    x = torch.ones(3, requires_grad=True)
    outside = torch.compile(layers, backend=backend, fullgraph=True)(AttentionMask(key_padding=tokens != 0), x)
    assert torch.equal(outside, inside) and sum(made) == 1


def test_operator_arguments_give_the_masks_back() -> None:
    for kwargs in mask_kinds(2, 3, 7, 10).values():
        given = AttentionMask(**kwargs)
        layouts = [*LAYOUTS, Layout(False, 4, 4, (4, 4, 8, 2))]
        prepared = [given.prepare(7, 10, layout, CPU) for layout in layouts]
        given_back = from_operator_args(*to_operator_args(prepared))
        for found, expected, layout in zip(given_back, prepared, layouts, strict=True):
            assert found[:2] == expected[:2] and found.layout == expected.layout == layout
            assert all(a is b for a, b in zip(found[2:7], expected[2:7], strict=True))


def test_band_only() -> None:
    assert AttentionMask(is_causal=True).band_only and AttentionMask(bias=torch.zeros(1)).band_only
    assert AttentionMask().band(3, 4) == (-3, 4) and not AttentionMask().has_band
    for kind, kwargs in mask_kinds(2, 2, 4, 4).items():
        restricted = [isinstance(value, torch.Tensor) for value in kwargs.values()]
        assert AttentionMask(**kwargs).band_only == (not any(restricted)), kind


def test_zero_lengths() -> None:
    for Lq, Lk in ((0, 4), (4, 0), (0, 0)):
        given = AttentionMask(is_causal=True, key_padding=torch.ones(2, Lk, dtype=torch.bool), align="bottom_right")
        assert given.dense(2, 1, Lq, Lk, CPU).shape == (2, 1, Lq, Lk)
        for layout in LAYOUTS:
            prepared = given.prepare(Lq, Lk, layout, CPU)
            assert prepared.counts is None or prepared.counts.sum() == 0


BOOLS, FLOATS = torch.ones(2, 4, dtype=torch.bool), torch.zeros(4, 4)


def test_replace_and_with_bias_take_what_the_constructor_takes() -> None:
    given = AttentionMask(key_padding=BOOLS, bias=FLOATS)
    assert given.replace(bias=FLOATS).bias.shape == given.with_bias(FLOATS).bias.shape == (1, 1, 4, 4)
    assert given.replace(key_padding=None).key_padding is None and given.replace(bias=None).key_padding is BOOLS
    with pytest.raises(TypeError, match="bias"):
        given.with_bias(BOOLS)


def test_a_float_mask_of_zeros_and_ones_is_warned_of() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.warns(UserWarning, match="attn_mask.bool()") as caught:
        scaled_dot_product_attention(q, q, q, torch.ones(4, 4).tril())
    assert caught[0].filename == __file__, "the warning names the caller's line"
    for bias in (FLOATS, BOOLS.float(), FLOATS + torch.arange(4.0), BOOLS.float().tril().requires_grad_()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AttentionMask.of(bias)


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"attn_mask": torch.ones(2, 1, 5, 7, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": torch.ones(3, 1, 5, 8, dtype=torch.bool)}, "attn_mask"),
        ({"bias": torch.ones(1, 3, 5, 8)}, "bias"),
        ({"attn_mask": prefix([1, 2], 8)}, r"\(1, 1, 2, 8\).*AttentionMask\(key_padding="),
        ({"attn_mask": torch.ones(3, 1, 8, dtype=torch.bool)}, r"\(1, 3, 1, 8\).*Dimensions count from the last"),
        ({"key_padding": prefix([1, 2], 5)}, "key_padding"),
        ({"key_padding": prefix([1, 2, 3], 8)}, "key_padding"),
        ({"query_padding": prefix([1, 2], 8)}, "query_padding"),
        ({"key_padding": prefix([1, 2], 8).to("meta")}, "key_padding"),
        ({"cu_seqlens_q": offsets(2, 4)}, "cu_seqlens_q ends at 6, expected the length 5"),
        ({"cu_seqlens_q": offsets(2, 2)}, "cu_seqlens_q ends at 4, expected the length 5"),
        ({"cu_seqlens_q": offsets(5), "cu_seqlens_k": offsets(9)}, "cu_seqlens_k ends at 9"),
    ],
)
def test_masks_that_do_not_fit(kwargs: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AttentionMask(**kwargs).check(2, 2, 5, 8, CPU)


def test_bad_combinations() -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        AttentionMask(cu_seqlens_q=offsets(2, 3)) & AttentionMask(cu_seqlens_q=offsets(1, 4))
    for combine in (lambda a, b: a & b, lambda a, b: b & a):
        with pytest.raises(TypeError, match=r"a Tensor\. Convert it first: AttentionMask\(attn_mask="):
            combine(AttentionMask(is_causal=True), torch.ones(2, 2, dtype=torch.bool))
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
