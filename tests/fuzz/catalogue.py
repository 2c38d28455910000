"""The catalogue of random calls: for each op a hypothesis strategy of everything that the op allows.

An example is a Call: numbers and names only, so that a failing one can be read and typed in. `problem` makes of it what
fastattn/check/cases.py solves; FORMULAS has each op in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import checks
import layouts
import torch
from attention_checks import by_distance
from hypothesis import strategies as st
from torch import Tensor

from fastattn import AttentionMask
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference import philox
from fastattn.check import cases
from fastattn.check.cases import Problem

Strategy = st.SearchStrategy[Any]
HALF = ("bfloat16", "float16")
LAYOUTS = ("contiguous", "swapped_dims", "reversed_dims", "sliced", "every_second")
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # of tiles
KERNELS = ("triton", "cuda")


class Call(NamedTuple):
    """op: a function of cases.py, and its arguments, dtypes by name; a mask is as `masks` draws it.

    layouts: of each tensor in turn, of the gradients of the results after them; from the first again.
    more: what cases.py does not draw: see `problem`.
    """

    op: str
    arguments: dict[str, Any]
    layouts: tuple[str, ...]
    more: dict[str, Any]


def sizes(most: int) -> Strategy:
    """From 0 to most: often small, often at the edge of a tile, seldom 0."""
    edges = [edge for edge in EDGES if edge <= most]
    return st.one_of(st.integers(1, min(most, 20)), st.sampled_from(edges or [1]), st.integers(0, most))


def some(**optional: Strategy) -> Strategy:
    """A dict with some of these."""
    return st.fixed_dictionaries({}, optional=optional)


def joined(*parts: Strategy) -> Strategy:
    """One dict of several."""
    return st.tuples(*parts).map(lambda dicts: {name: value for drawn in dicts for name, value in drawn.items()})


COUNT = st.sampled_from((1, 2, 1, 2, 3, 1, 2, 0))
SHARE = st.sampled_from((0.5, 0.9, 0.1, 0.0))
DROPOUT = st.sampled_from((0.0, 0.1, 0.5, 0.93))
ROW_DROPOUT = st.sampled_from((0.0, 0.1, 0.5))  # of a normalised row, of which several numbers have to be left
SCALE = st.sampled_from((0.5, 1.0, -0.3, 0.0, 2.0))


def masks(B: int, H: int, Lq: int, Lk: int) -> Strategy:
    """Arguments of AttentionMask, with a share of True in place of a random bool tensor, and numbers for integers."""

    def padding() -> Strategy:
        return st.tuples(st.sampled_from((1, B)), SHARE)

    def cuts(L: int, n: int) -> Strategy:
        return st.lists(st.integers(0, L), min_size=n, max_size=n).map(lambda cut: [0, *sorted(cut), L])

    reach = st.none() | st.integers(0, max(Lk, 1))
    packed = st.integers(0, 3).flatmap(
        lambda n: st.fixed_dictionaries({"cu_seqlens_q": cuts(Lq, n), "cu_seqlens_k": cuts(Lk, n)})
    )
    if Lq == Lk:
        packed |= st.fixed_dictionaries({"cu_seqlens_q": cuts(Lq, 2)})
    broadcast = st.tuples(*(st.sampled_from((n, n, 1)) for n in (B, H, Lq, Lk)))
    shape = st.tuples(broadcast, st.integers(0, 2)).map(lambda drawn: drawn[0][drawn[1] :])
    restrictions = some(
        is_causal=st.just(True),
        align=st.just("bottom_right"),
        window=st.tuples(reach, reach),
        key_padding=padding(),
        query_padding=padding(),
        attn_mask=st.tuples(shape, SHARE),
    )
    return joined(restrictions, st.one_of(st.just({}), st.just({}), packed))


def mask_tensors(drawn: dict[str, Any], Lq: int, Lk: int, seed: int) -> dict[str, Any]:
    """The arguments of AttentionMask that `masks` drew."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, value in drawn.items():
        if name in ("key_padding", "query_padding"):
            value = ((value[0], Lk if name == "key_padding" else Lq), value[1])
        if name in ("key_padding", "query_padding", "attn_mask"):
            value = torch.rand(value[0], generator=generator) < value[1]
        elif isinstance(value, list):
            value = torch.tensor(value, dtype=torch.int32 if seed % 2 else torch.int64)
        made[name] = value
    return made


@st.composite
def attention(draw: Any, most: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every mask with every bias. All heads have `most` squared scores at most; few heads, where an example is slow."""
    Lq, Lk = draw(sizes(most)), draw(sizes(most))
    heads = min(max(most * most // max(Lq * Lk, 1), 1), most // 20)
    B = min(draw(COUNT), heads)
    Hk = min(draw(st.sampled_from((1, 2, 3, 1, 2, 0))), max(heads // max(B, 1), 1))
    H = Hk * min(draw(st.sampled_from((1, 1, 2, 3))), max(heads // max(B * Hk, 1), 1))
    arguments: dict[str, Any] = {"B": B, "H": H, "Hk": Hk, "Lq": Lq, "Lk": Lk}
    arguments |= draw(some(Hv=st.sampled_from([n for n in (1, 2, 3, 6) if H % n == 0])) if H else st.just({}))
    arguments |= {"D": max(draw(sizes(min(most, 160))), 1), "Dv": max(draw(sizes(min(most, 160))), 1)}
    arguments |= draw(
        some(
            dropout_p=DROPOUT,
            scale=SCALE,
            softcap=st.sampled_from((0.5, 3.0)),
            return_lse=st.booleans(),
            return_weights=st.booleans(),
        )
    )
    more, mask = {}, {}
    if draw(st.integers(0, 3)):
        mask = arguments["mask"] = draw(masks(B, H, Lq, Lk))
        if draw(st.booleans()) and "cu_seqlens_k" not in mask:
            R = max(Lq + Lk - 1, 0)
            if offsets := mask.get("cu_seqlens_q"):
                R = max(2 * max(b - a for a, b in zip(offsets, offsets[1:], strict=False)) - 1, 0)
            arguments["relative_bias"] = (draw(st.sampled_from((1, H))), R)
    if "cu_seqlens_k" not in mask:  # which must count is_causal inside of sequences
        arguments["is_causal"] = draw(st.booleans())
    if draw(st.booleans()):
        arguments["bias"] = tuple(draw(st.sampled_from((n, n, 1))) for n in (B, H, Lq, Lk))
        more = draw(some(hidden=SHARE))
    if "key_padding" in mask:
        more |= draw(some(poison=st.just(True)))
    return arguments, more


@st.composite
def decode_attention(draw: Any, most: int) -> tuple[dict[str, Any], dict[str, Any]]:
    batch, queries, heads_k = draw(COUNT), draw(COUNT), draw(st.sampled_from((1, 2, 3)))
    positions = draw(sizes(4 * most))
    arguments: dict[str, Any] = {"batch": batch, "queries": queries, "positions": positions, "heads_k": heads_k}
    arguments |= {"heads": heads_k * draw(st.sampled_from((1, 1, 2, 5)))}
    arguments |= {"head_dim": max(draw(sizes(most)), 1), "value_dim": max(draw(sizes(most)), 1)}
    lengths = st.lists(st.integers(0, positions), min_size=batch, max_size=batch)
    optional = {"lengths": lengths, "scale": SCALE, "softcap": st.sampled_from((0.5, 3.0))}
    arguments |= draw(some(bias=st.sampled_from((1, arguments["heads"])), **optional))
    if draw(st.booleans()):
        arguments |= {"ancestors": True, "rows": draw(st.sampled_from((1, 2, 5)))}
    else:
        arguments["rows"] = draw(st.sampled_from((1, queries)))
    return arguments, draw(some(nowhere=SHARE))


def rows(most: int) -> Strategy:
    """Dimensions before the last one."""
    return st.one_of(st.tuples(sizes(most)), st.tuples(COUNT, sizes(most // 3)), st.tuples(COUNT, COUNT, COUNT))


def width(most: int) -> Strategy:
    """Of a normalised row. The gradients of fewer numbers cancel in ways that the rule for errors does not measure."""
    return sizes(most).map(lambda n: max(n, 7))


def enough_left(arguments: dict[str, Any]) -> dict[str, Any]:
    """Likewise of few numbers that dropout leaves."""
    return arguments | {"hidden": max(arguments["hidden"], 40)} if arguments.get("dropout_p") else arguments


def add_layer_norm(most: int) -> Strategy:
    given = some(
        residual=st.booleans(),
        x_bias=st.booleans(),
        dropout_p=ROW_DROPOUT,
        eps=st.sampled_from((1e-6, 1e-3)),
        return_sum=st.booleans(),
        std=st.sampled_from((0.5, 10.0)),
        mean=st.sampled_from((0.5, -3.0)),
    )
    kind = st.sampled_from(({}, {}, {"eps_on_std": True}, {"rms": True}))
    size = st.fixed_dictionaries({"rows": rows(most), "hidden": width(4 * most)})
    return st.tuples(
        st.builds(lambda *parts: enough_left(parts[0] | parts[1] | parts[2]), size, kind, given),
        some(x_bias_dtype=st.just("float32")),
    )


def feed_forward(most: int) -> Strategy:
    size = {"activation": st.sampled_from(checks.ACTIVATIONS), "tokens": rows(most), "d": sizes(most)}
    size |= {"d_ff": sizes(most), "d_out": sizes(most)}
    given = some(dropout_p=DROPOUT, has_bias=st.booleans())
    return st.tuples(joined(st.fixed_dictionaries(size), given), st.just({}))


def linear_cross_entropy(most: int) -> Strategy:
    size = {"tokens": rows(most), "d": sizes(most), "classes": sizes(2 * most).map(lambda n: max(n, 1))}
    size |= {"reduction": st.sampled_from(("none", "mean", "sum"))}
    given = some(
        has_bias=st.booleans(),
        label_smoothing=st.sampled_from((0.0, 0.1, 0.9)),
        smooth_over=st.sampled_from(("all", "others")),
        ignore_index=st.sampled_from((-100, 0)),
        logit_scale=SCALE,
    )
    return st.tuples(joined(st.fixed_dictionaries(size), given), st.just({}))


CATALOGUE: dict[str, Callable[[int], Strategy]] = {
    function.__name__: function
    for function in (attention, decode_attention, add_layer_norm, feed_forward, linear_cross_entropy)
}


def calls(op: str, backend: str, small: bool = False) -> Strategy:
    """Calls of an op. Those of kernels can be run by the interpreter and the emulator: small, and not in float64. The
    reference is judged in float64, since in other dtypes it is what the rule measures others by."""
    kernels = backend in KERNELS
    dtypes = (
        ("float64",) if backend == "reference" else ("float32", *HALF) if kernels else ("float32", "float64", *HALF)
    )

    def in_dtype(drawn: tuple[Any, ...]) -> Call:
        (arguments, more), dtype, weights, seed, layout = drawn
        arguments |= {"dtype": dtype, "seed": seed}
        if (op, backend) == ("attention", "cuda"):  # which takes no bias and no softcap
            arguments = {n: v for n, v in arguments.items() if n not in ("bias", "relative_bias", "softcap")}
            more = {n: v for n, v in more.items() if n != "hidden"}
        if "norm" in op and weights:
            arguments["weight_dtype"] = "float32"
        if dtype == "float64":
            arguments = {n: "float64" if n.endswith("dtype") else v for n, v in arguments.items()}
            more = {n: v for n, v in more.items() if n != "x_bias_dtype"}
        return Call(op, arguments, layout, more)

    layout = st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=5).map(tuple)
    drawn = (
        CATALOGUE[op](66 if kernels or small else 100),
        st.sampled_from(dtypes),
        st.booleans(),
        st.integers(0, 99),
        layout,
    )
    return st.tuples(*drawn).map(in_dtype)


def problem(call: Call, device: torch.device) -> Problem:
    """more: hidden, the share of -inf in a bias; poison, NaN in keys and values that padding hides; nowhere,
    the share of ancestors that are no row; x_bias_dtype."""
    arguments = {n: getattr(torch, v) if n.endswith("dtype") else v for n, v in call.arguments.items()}
    seed = arguments["seed"]
    if "mask" in arguments:
        arguments["mask"] = mask_tensors(arguments["mask"], arguments["Lq"], arguments["Lk"], seed)
    p = getattr(cases, call.op)(device=device, **arguments)
    generator = torch.Generator().manual_seed(seed)
    if "hidden" in call.more:
        name = "bias" if "bias" in p.tensors else "attn_mask"
        hidden = torch.rand(p.tensors[name].shape, generator=generator) < call.more["hidden"]
        p = p.but(**{name: p.tensors[name].masked_fill(hidden.to(device), -torch.inf)})
    if "poison" in call.more:
        padding = AttentionMask(**{n: t for n, t in arguments["mask"].items() if n == "key_padding"})
        real = padding.dense(arguments["B"], 1, 1, arguments["Lk"], "cpu").mT.to(device)
        p = p.but(**{n: p.tensors[n].where(real, torch.nan) for n in ("key", "value")})
    if "nowhere" in call.more and "ancestors" in p.options:
        nowhere = torch.rand(p.options["ancestors"].shape, generator=generator) < call.more["nowhere"]
        p = p.but(
            ancestors=p.options["ancestors"].masked_fill(nowhere.to(device), arguments["rows"] if seed % 2 else -1)
        )
    if "x_bias_dtype" in call.more and "x_bias" in p.tensors:
        p = p.but(x_bias=p.tensors["x_bias"].float())
    outputs = cases.solve(p._replace(differentiable=False), FORMULAS[p.op]).values()
    douts = [torch.randn(t.shape, generator=generator).to(p.tensors[next(iter(p.tensors))]) for t in outputs]

    def laid(n: int, t: Tensor) -> Tensor:
        if t.dim() == 0:  # of a drawn number its value decides how the formula's terms round
            return torch.tensor(1.7, device=device)
        return getattr(layouts, call.layouts[n % len(call.layouts)], torch.clone)(t)

    tensors = {name: laid(n, t) for n, (name, t) in enumerate(p.tensors.items())}
    return p._replace(tensors=tensors, douts=tuple(laid(len(tensors) + n, d) for n, d in enumerate(douts)))


def _softmax(scores: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of what is kept and its logarithm's sum; 0 and -inf where nothing is."""
    some = keep.any(-1, keepdim=True)
    scores = scores.masked_fill(~keep & some, -torch.inf)  # an empty row is left alone, so that it is not NaN
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.sum(-1)
    return torch.softmax(scores, -1).where(some, 0), lse.where(some[..., 0], -torch.inf)


def _scores(q: Tensor, k: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    return_weights: bool = False,
) -> tuple[Tensor, ...]:
    """As a person writes it in PyTorch: products in the tested dtype, softmax in float32. AttentionMask.dense is tested
    against loops."""
    (B, H, Lq, _), Lk = query.shape, key.shape[2]
    mask = AttentionMask() if attn_mask is None else AttentionMask.of(attn_mask)
    mask = mask & AttentionMask(is_causal=True) if is_causal else mask
    key, value = (t.repeat_interleave(H // max(t.shape[1], 1), 1) for t in (key, value))
    keep, scores = mask.dense(B, H, Lq, Lk, query.device), _scores(query, key, scale, softcap)
    if mask.bias is not None:
        keep = keep & (mask.bias != -torch.inf)
        scores = scores + mask.bias.where(keep, 0)
    if mask.relative_bias is not None:
        scores = scores + by_distance(mask.relative_bias, Lq, Lk, mask.cu_seqlens_q)
    weights, lse = _softmax(scores, keep)
    if dropout_p > 0:
        kept = philox.keep_mask(philox.draw_rng_state(query.device), B * H * Lq, Lk, dropout_p).view(weights.shape)
        weights = weights * (kept.double() * dropout_scale(dropout_p)).to(weights.dtype)
    weights = weights.to(query.dtype)
    results = (weights @ value, *[lse] * return_lse)
    return (*results, weights) if return_weights else results


def plain_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None = None,
    ancestors: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Of keys and values that are gathered for each query."""
    (B, W, H, _), (M, R, Hk) = query.shape, key.shape[1:4]
    place = torch.arange(M, device=query.device)
    row = torch.arange(W, device=query.device)[:, None].expand(B, W, M) % R if ancestors is None else ancestors
    keep = (row >= 0) & (row < R)
    if lengths is not None:
        keep = keep & (place < lengths[:, None, None])
    sample = torch.arange(B, device=query.device)[:, None, None]
    k, v = (t[sample, place, row.clamp(0, R - 1)] for t in (key, value))  # (B, W, M, Hk, D)
    k, v = (t.transpose(2, 3).repeat_interleave(H // Hk, 2) for t in (k, v))
    scores = _scores(query[..., None, :], k, scale, softcap)  # (B, W, H, 1, M)
    if bias is not None:
        scores = scores + bias[:, None]
    weights, _ = _softmax(scores, keep[:, :, None, None])
    return (weights.to(v.dtype) @ v)[..., 0, :]


def plain_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, *others: Any, **options: Any) -> Tensor:
    loss = checks.linear_cross_entropy(x.flatten(0, -2), weight, target.flatten(), *others, **options)
    return loss.view(target.shape) if loss.dim() else loss


FORMULAS: dict[str, Callable[..., Any]] = checks.FORMULAS | {
    "attention": plain_attention,
    "decode_attention": plain_decode_attention,
    "linear_cross_entropy": plain_linear_cross_entropy,
}
