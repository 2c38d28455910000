"""return_weights: the weights of all heads or of some, their mean, the key of the largest, in every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import BACKENDS, KERNEL_BACKENDS, backend_call, exact, make, plain, visible
from helpers import assert_close_as_torch
from mask_cases import KINDS, prefix
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weights_checks import HEADS, ask, check, check_alignment, scores

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.ops._weights import ranges
from fastattn.reference import philox

EVERY_WISH = (True, HEADS, "mean", "argmax")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_kinds(backend: str, kind: str, device: torch.device) -> None:
    backend_call(backend, device)
    dtype = torch.float32 if len(kind) % 2 else torch.bfloat16
    check(make(B=1, H=4, Hk=2, Lq=13, Lk=21, D=16, mask=kind, dtype=dtype, device=device), ask(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_over_several_tiles(backend: str, device: torch.device) -> None:
    """With dropout, a bias, an odd head dimension, and queries that lie as projections do."""
    backend_call(backend, device)
    options = dict(mask="decoder", bias=(1, 4, 70, 141), dropout_p=0.3, device=device)
    p = make(B=1, H=4, Lq=70, Lk=141, D=33, dtype=torch.float16, **options)
    check(p.but(q=p.q.transpose(1, 2).contiguous().transpose(1, 2)), ask(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_heads(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    options = dict(B=1, H=4, Lq=40, Lk=70, Dv=8, device=device)
    check(make(D=250, mask="causal", **options), ask(backend))
    check(make(D=250, dtype=torch.float16, mask="everything", bias=(1, 1, 1, 70), **options), ask(backend))
    check(make(D=100, dtype=torch.bfloat16, mask="everything", **options), ask(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unseen_keys_and_blind_queries_may_hold_anything(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    clean = make(B=2, H=4, Lq=20, Lk=70, D=16, mask="decoder", dropout_p=0.2, device=device)
    keep = visible(clean)
    seen, sees = keep.any(-2)[..., None], keep.any(-1)[..., None]
    assert not seen.all() and not sees.all()
    dirty = clean.but(q=clean.q.where(sees, torch.nan), k=clean.k.where(seen, torch.nan))
    for wish in EVERY_WISH:
        assert torch.equal(ask(backend)(dirty, wish), ask(backend)(clean, wish)), wish


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_of_rows_that_a_bias_moves_far(backend: str, device: torch.device) -> None:
    """lse is coarse there: the mean is that of the softmax all the same."""
    backend_call(backend, device)
    bias = torch.zeros(1, 1, 21, 37, device=device)
    bias[:, :, 3] = torch.finfo(torch.float32).min
    p = make(H=4, device=device).but(bias=bias)
    assert_close_as_torch(ask(backend)(p, "mean"), exact(p).weights.mean(1), plain(p).weights.mean(1))


@pytest.mark.parametrize("kind", ["none", "causal_bottom_right", "key_padding_holes", "attn_mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_weights_the_first(backend: str, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    """Scores of small integers are exact, and have many equals; in tiles that are visited in any order."""
    backend_call(backend, device)
    p = make(B=2, H=2, Lq=66, Lk=200, D=16, dtype=dtype, mask=kind, device=device)
    p = p.but(q=p.q.float().sign().to(dtype), k=p.k.float().sign().to(dtype), dropout_p=0.5)
    S = scores(p, torch.float64)
    assert ((S == S.amax(-1, keepdim=True)).sum(-1) > 1)[visible(p).any(-1)].float().mean() > 0.3, "few equals"
    first = S.argmax(-1).masked_fill(~visible(p).any(-1), -1)
    assert torch.equal(ask(backend)(p, "argmax"), first)


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_alignment_is_before_dropout(backend: str, dropout_p: float, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(mask="causal", dropout_p=dropout_p, device=device)
    keys = ask(backend)(p, "argmax")
    check_alignment(p, keys)
    assert torch.equal(keys, ask(backend)(p.but(dropout_p=0.0), "argmax"))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_of_any_sign(backend: str, scale: float, device: torch.device) -> None:
    backend_call(backend, device)
    check(make(H=4, dtype=torch.bfloat16, mask="causal", device=device).but(scale=scale), ask(backend))


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: str, shape: tuple[int, int, int, int], device: torch.device) -> None:
    backend_call(backend, device)
    B, H, Lq, Lk = shape
    q, k = torch.randn(B, H, Lq, 8, device=device), torch.randn(B, H, Lk, 8, device=device)
    for mask in (None, AttentionMask(key_padding=torch.ones(B, Lk, dtype=torch.bool, device=device))):
        for wish, wanted in (([1], (B, 1, Lq, Lk)), ("mean", (B, Lq, Lk)), ("argmax", (B, H, Lq))):
            weights = scaled_dot_product_attention(q, k, k, mask, return_weights=wish, backend=backend)[1]
            assert weights.shape == wanted
            assert wish != "argmax" or Lk > 0 or (weights == -1).all()


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made under it."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return result


@pytest.mark.parametrize("mask", ["causal", "key_padding"])
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_mean_and_alignment_need_no_weights(backend: str, mask: str, device: torch.device) -> None:
    """No tensor as large as all weights is made for them."""
    backend_call(backend, device)
    p = make(B=1, H=4, Lq=64, Lk=64, D=16, mask=mask, dropout_p=0.1, device=device)
    weights = 4 * 64 * 64 * 4
    for wish, some in (("mean", weights // 4), ("argmax", 4 * 64 * 8), (True, weights)):
        with Largest() as made:
            ask(backend)(p, wish)
        assert some <= made.bytes and (made.bytes < weights) == (wish is not True), wish


@pytest.mark.parametrize("wish", EVERY_WISH, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient(backend: str, wish: Any, device: torch.device) -> None:
    """Of the weights in reference and aten, the mean too; the kernels give none, nor does an alignment anywhere."""
    backend_call(backend, device)
    dtype = torch.float32 if backend in KERNEL_BACKENDS else torch.float64
    p = make(B=1, H=4, Lq=3, Lk=4, D=5, dtype=dtype, mask="causal", device=device)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k)]

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ask(backend)(p.but(q=q, k=k), wish)

    given = weights(*leaves)
    assert given.requires_grad == (backend not in KERNEL_BACKENDS and wish != "argmax")
    if given.requires_grad:
        torch.autograd.gradcheck(weights, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_one_graph(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(B=1, H=4, Hk=2, Lq=9, Lk=12, D=16, mask="key_padding", dropout_p=0.2, device=device)
    wishes = EVERY_WISH[1:]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, key_padding):
        options = {"dropout_p": p.dropout_p, "scale": p.scale, "enable_gqa": True, "backend": backend}
        mask = AttentionMask(key_padding=key_padding)
        return [scaled_dot_product_attention(q, k, v, mask, return_weights=w, **options)[1] for w in wishes]

    torch.manual_seed(p.seed)
    compiled = call(p.q, p.k, p.v, p.mask["key_padding"])
    for wish, a in zip(wishes, compiled, strict=True):
        b = ask(backend)(p, wish)
        assert a.shape == b.shape and a.dtype == b.dtype, wish
        assert wish == "mean" or torch.equal(a, b), wish  # the mean draws another dropout than alone


@pytest.mark.parametrize("wish", [([2, 0], "heads"), ([], "mean"), ([], "argmax")], ids=str)
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_operator(backend: str, wish: tuple[list[int], str], device: torch.device) -> None:
    backend_call(backend, device)
    p = make(B=1, H=4, Hk=2, Lq=8, Lk=9, D=16, mask="everything", dtype=torch.bfloat16, device=device)
    masks, bounds = AttentionMask(**p.mask).flatten()
    lse = torch.zeros(p.shape[:3], device=device)
    rng_state = philox.draw_rng_state(device)
    given = (p.q, p.k, lse, None, *masks, bounds, p.scale, 0.1, rng_state, *wish, backend)
    torch.library.opcheck(torch.ops.fastattn.attention_weights.default, given)


@pytest.mark.parametrize("heads", [[0, 2, 4, 1], [3, 2, 1, 0], [1, 1], [5], [0, 1, 3, 5, 7, 2], [2, 2, 3]], ids=str)
def test_ranges(heads: list[int]) -> None:
    assert [h for run in ranges(heads) for h in run] == heads
    assert len(ranges(heads)) <= (len(heads) + 1) // 2 or len(set(heads)) < len(heads)


@pytest.mark.parametrize(
    "wrong, error, said",
    [
        ("max", ValueError, "'max'"),
        ([4], ValueError, r"\[4\]"),
        ((0, -1), ValueError, r"\(0, -1\)"),
        ([], ValueError, r"\[\]"),
        (1, TypeError, "int"),
        (torch.tensor([1]), TypeError, "Tensor"),
        ([1.0], TypeError, "1.0 of type float"),
        ([True], TypeError, "True of type bool"),
    ],
    ids=str,
)
def test_what_is_no_wish(wrong: Any, error: type[Exception], said: str) -> None:
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(error, match=rf"return_weights .*{said}.*expected a bool, a sequence of heads from 0 to 3"):
        scaled_dot_product_attention(q, q, q, return_weights=wrong)


def test_mean_of_no_heads() -> None:
    q = torch.randn(1, 0, 5, 8)
    with pytest.raises(ValueError, match="query has no heads"):
        scaled_dot_product_attention(q, q, q, return_weights="mean")


def test_an_alignment_that_means_something() -> None:
    """A user's reading of a translation: a target word points at its source word; padding points nowhere."""
    words = torch.eye(6)[None, None] * 8
    source, target = words, words[:, :, [2, 0, 1, 3, 4, 5]]
    mask = AttentionMask(key_padding=prefix([3], 6), query_padding=prefix([3], 6))
    keys = scaled_dot_product_attention(target, source, source, mask, return_weights="argmax")[1]
    assert keys.tolist() == [[[2, 0, 1, -1, -1, -1]]]
