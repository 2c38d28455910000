"""The catalogue of calls, for all tests: what each op computes, which calls are tried, and how they are judged.

FORMULAS     each op in plain PyTorch, with the op's own arguments.
check(p, backend)   runs a problem of fastattn/check/cases.py, and judges every result and gradient.
VARIANTS     a small call of each op in each of its variants, for what all ops have in common.
SIZES        for each op named calls on both sides of every switch of the backends: `rows` gives them to a test.
STRATEGIES   for each op the calls that hypothesis draws: `calls`, and `problem` of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import layouts
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch, backends_of
from hypothesis import strategies as st
from mask_cases import KINDS, after_full_tiles, in_blocks, mask_kinds, offsets, prefix, scattered, with_gap
from torch import Tensor

from fastattn import AttentionMask, explain, use_backend
from fastattn.backends import BACKENDS, OPS
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference import philox
from fastattn.check import cases
from fastattn.check.cases import Problem, expected_results

Backend = str | Callable[..., Any]  # a name, or what is called with the arguments of the op
KERNELS = ("triton", "cuda")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# --- each op in plain PyTorch: in float64 the truth, in the tested dtype what is allowed ------------------------------

GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = (*GATED.values(), *GATED)
FUNCTIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}


def dropped(x: Tensor, dropout_p: float) -> Tensor:
    """x with dropout by the written rule, for the draw that an op makes at its place in the generator."""
    if dropout_p == 0:
        return x
    rows = x.numel() // max(x.shape[-1], 1)
    keep = philox.keep_mask(philox.draw_rng_state(x.device), rows, x.shape[-1], dropout_p)
    return x * (keep.double() * dropout_scale(dropout_p)).view(x.shape).to(x.dtype)


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


def by_distance(bias: Tensor, Lq: int, Lk: int, cu_seqlens: Tensor | None) -> Tensor:
    """relative_bias as (H or 1, Lq, Lk): row m of each sequence is what begins m places before that of distance 0."""

    def square(Lq: int, Lk: int, first: int) -> Tensor:
        place = torch.arange(Lk, device=bias.device) - torch.arange(Lq, device=bias.device)[:, None] + first
        return bias[:, place]

    if cu_seqlens is None:
        return square(Lq, Lk, Lq - 1)
    blocks = [square(n, n, bias.shape[1] // 2) for n in cu_seqlens.diff().tolist() if n > 0]
    if len(bias) == 0 or not blocks:
        return bias.sum() + bias.new_zeros(len(bias), Lq, Lk)
    return torch.stack([torch.block_diag(*heads) for heads in zip(*blocks, strict=True)])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Any:
    """As a person writes it in PyTorch: products in the tested dtype, softmax in float32. AttentionMask.dense is tested
    against loops."""
    (B, H, Lq, _), Lk = query.shape, key.shape[2]
    mask = _whole_mask(attn_mask, is_causal)
    key, value = (t.repeat_interleave(H // max(t.shape[1], 1), 1) for t in (key, value))
    keep, scores = _visible(mask, B, H, Lq, Lk, query.device), _scores(query, key, scale, softcap)
    if mask.bias is not None:
        scores = scores + mask.bias.where(keep, 0)
    if mask.relative_bias is not None:
        scores = scores + by_distance(mask.relative_bias, Lq, Lk, mask.cu_seqlens_q)
    weights, lse = _softmax(scores, keep)
    weights = dropped(weights, dropout_p).to(query.dtype)
    results = (weights @ value, *[lse] * return_lse, *[weights] * return_weights)
    return results if len(results) > 1 else results[0]


def _whole_mask(attn_mask: Any, is_causal: bool) -> AttentionMask:
    mask = AttentionMask() if attn_mask is None else AttentionMask.of(attn_mask)
    return mask & AttentionMask(is_causal=True) if is_causal else mask


def _visible(mask: AttentionMask, *place: Any) -> Tensor:
    keep = mask.dense(*place)
    return keep if mask.bias is None else keep & (mask.bias != -torch.inf)


def decode_attention(
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


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    return_sum: bool = False,
    x_bias: Tensor | None = None,
    eps_on_std: bool = False,
) -> Any:
    """In x's dtype throughout. Without a bias it is RMSNorm."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    z = dropped(x if x_bias is None else x + x_bias.to(x.dtype), dropout_p)
    z = z if residual is None else residual + z
    if eps_on_std:
        out = weight * (z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + eps) + bias
    elif bias is None:
        out = F.rms_norm(z, z.shape[-1:], weight, eps)
    else:
        out = F.layer_norm(z, z.shape[-1:], weight, bias, eps)
    return (out, z) if return_sum else out


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
) -> Tensor:
    z = F.linear(x, weight1, bias1)
    if activation in GATED:
        gate, up = z.chunk(2, dim=-1)
        h = FUNCTIONS[GATED[activation]](gate) * up
    else:
        h = FUNCTIONS[activation](z)
    return F.linear(dropped(h, dropout_p), weight2, bias2)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smooth_over: str = "all",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """torch's cross-entropy, or the public implementation's loss, of float32 logits."""
    logits, classes, labels = F.linear(x.flatten(0, -2), weight, bias), len(weight), target.flatten()
    logits = logits.to(torch.promote_types(x.dtype, torch.float32)) * logit_scale
    if smooth_over == "all" or classes == 1:
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        loss = F.cross_entropy(logits, labels, **options)
    else:
        keep = labels != ignore_index
        one_hot = F.one_hot(labels.where(keep, 0), classes).to(logits.dtype)
        wanted = one_hot * (1 - label_smoothing) + (1 - one_hot) * label_smoothing / (classes - 1)
        losses = -(wanted * F.log_softmax(logits, 1)).sum(1) * keep
        loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / keep.sum()}[reduction]
    return loss.view(target.shape) if loss.dim() else loss


FORMULAS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "decode_attention": decode_attention,
    "add_layer_norm": add_layer_norm,
    "add_rms_norm": add_layer_norm,
    "feed_forward": feed_forward,
    "linear_cross_entropy": linear_cross_entropy,
}

# --- how a problem is judged ------------------------------------------------------------------------------------------


def first(p: Problem) -> Tensor:
    """The tensor that decides dtype and device."""
    return next(iter(p.tensors.values()))


def skip_without(backend: Backend, op: str, device: torch.device) -> None:
    """Skips, with the reason, where a backend of that name cannot run: it refuses even a small problem in float32."""
    if isinstance(backend, str):
        probe = next(p for p in VARIANTS.values() if p.op == op).map(lambda t: t.to(device))
        if reason := explain(probe.function, **probe.arguments()).refusals[backend]:
            pytest.skip(f"{backend}: {reason}")


def for_backend(p: Problem, backend: Backend) -> Problem:
    """Without what a backend of kernels does not take: the CUDA attention has no bias and no softcap, and aten computes
    the weights for all."""
    if p.op != "attention" or backend not in KERNELS:
        return p
    left_out = {"return_weights"} | ({"bias", "relative_bias", "softcap"} if backend == "cuda" else set())
    tensors, options = ({n: v for n, v in given.items() if n not in left_out} for given in (p.tensors, p.options))
    if backend == "cuda" and "attn_mask" in tensors:
        tensors = {n: t for n, t in tensors.items() if n != "attn_mask"}
    outputs = 1 + options.get("return_lse", False)
    return p._replace(tensors=tensors, options=options, douts=p.douts[:outputs])


def solve(p: Problem, backend: Backend, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients. Skips where the backend cannot run here. options: of cases.solve."""
    skip_without(backend, p.op, first(p).device)
    return cases.solve(p, backend, **options)


def check(p: Problem, backend: Backend) -> dict[str, Tensor]:
    """Judge every result and gradient of a backend. AssertionError names the one that is off."""
    with philox.reference_dropout_rule(backend) if isinstance(backend, str) else nullcontext():
        got = solve(p, backend)
        judge(p, got)
    return got


def judge(p: Problem, got: dict[str, Tensor], names: Iterable[str] | None = None) -> None:
    """By the formula in float64; of attention also the exact zeros that a mask promises. names: those of these alone.

    Queries, keys and values that are not finite have to be hidden: the formula gets 0 there."""
    clean = {n: t.nan_to_num(0, 0, 0) for n, t in p.tensors.items() if n in ("query", "key", "value")}
    given = p.but(**clean)._replace(douts=tuple(t.nan_to_num(0, 0, 0) for t in p.douts))
    expected = expected_results(given, formula=FORMULAS[p.op])
    assert names is not None or got.keys() == expected.keys()
    zeros, dtype = promised_zeros(given) if p.op == "attention" else {}, first(p).dtype
    for name in expected if names is None else names:
        truth, baseline, scale = expected[name]
        if dtype == torch.float64:  # the truth has rounding errors too
            torch.testing.assert_close(got[name], truth, rtol=1e-9, atol=1e-9, msg=lambda s, n=name: f"{n}: error {s}")
        else:
            assert_close_as_torch(got[name], truth, baseline, scale, name, dtype)
        if "attention" in p.op and name in ("out", "grad of value"):
            assert not got[name][truth == 0].any(), f"{name}: what sees nothing, or is seen by nothing, must be 0"
        if name in zeros:
            assert not got[name][zeros[name]].any(), f"{name}: not 0 where the mask promises it"


def visible(p: Problem) -> Tensor:
    """Bool (B, H, Lq, Lk): the keys that each query of a problem of attention attends to."""
    arguments = p.arguments()
    mask = _whole_mask(arguments.get("attn_mask"), arguments.get("is_causal", False))
    (B, H, Lq, _), Lk = p.tensors["query"].shape, p.tensors["key"].shape[2]
    return _visible(mask, B, H, Lq, Lk, first(p).device)


def promised_zeros(p: Problem) -> dict[str, Tensor]:
    """Where gradients and weights of attention are exactly 0: a query without keys, a key that no query sees."""
    keep = visible(p)
    H, Hk = keep.shape[1], p.tensors["key"].shape[1]
    unseen = ~keep.unflatten(1, (Hk, H // max(Hk, 1))).any(2).any(-2)
    zeros = {"grad of query": ~keep.any(-1), "grad of key": unseen}
    zeros |= {f"grad of {name}": p.tensors[name] == -torch.inf for name in ("bias", "attn_mask") if name in p.tensors}
    if p.options.get("return_weights"):
        zeros["out[2]" if p.options.get("return_lse") else "out[1]"] = ~keep
    return zeros


def poisoned(p: Problem) -> Problem:
    """A problem of attention with NaN, inf and -inf in the queries and keys that padding, or packing and bands, exclude
    for all, alone; and in the gradients that arrive at such queries."""
    arguments, query = p.arguments(), p.tensors["query"]
    mask = _whole_mask(arguments.get("attn_mask"), arguments.get("is_causal", False))
    (B, _, Lq, _), Lk = query.shape, p.tensors["key"].shape[2]
    others = mask.replace(attn_mask=None, bias=None, relative_bias=None, key_padding=None, query_padding=None)

    def hidden(padding: str, dim: int) -> Tensor:  # (B, 1, L)
        alone = others, AttentionMask(**{padding: getattr(mask, padding)})
        return torch.stack([~part.dense(B, 1, Lq, Lk, query.device).any(dim) for part in alone]).any(0)

    rows, columns = hidden("query_padding", 3), hidden("key_padding", 2)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], device=query.device)

    def poison(t: Tensor, where: Tensor) -> Tensor:
        where = where[..., None] if t.dim() == 4 else where
        return t.masked_scatter(where.expand_as(t), bad.repeat(t.numel() // 3 + 1)[: t.numel()].to(t.dtype))

    tensors = {name: poison(p.tensors[name], columns) for name in ("key", "value")}
    return p.but(query=poison(query, rows), **tensors)._replace(douts=tuple(poison(t, rows) for t in p.douts))


def frozen(p: Problem, *names: str) -> Problem:
    """Without a gradient of these tensors."""
    options = p.options | {name: p.tensors[name] for name in names}
    return p._replace(tensors={n: t for n, t in p.tensors.items() if n not in names}, options=options)


def with_minus_inf(p: Problem, share: float, seed: int = 0) -> Problem:
    """A problem of attention with -inf in this share of its bias."""
    place = "tensors" if {"bias", "attn_mask"} & p.tensors.keys() else "options"
    name = "bias" if "bias" in getattr(p, place) else "attn_mask"
    bias = getattr(p, place)[name]
    gone = torch.rand(bias.shape, generator=torch.Generator().manual_seed(seed)) < share
    return p.but(**{name: bias.masked_fill(gone.to(bias.device), -torch.inf)})


def with_douts(p: Problem, seed: int = 0) -> Problem:
    """With drawn gradients of its outputs. One number decides how the formula's terms round, so that is given."""
    generator, like = torch.Generator().manual_seed(1000 + seed), first(p)
    outputs = cases.solve(p._replace(differentiable=False), FORMULAS[p.op]).values()
    drawn = (torch.randn(t.shape, generator=generator, dtype=FP64) if t.dim() else torch.tensor(1.7) for t in outputs)
    return p._replace(douts=tuple(t.to(like) for t in drawn))


# --- small calls ------------------------------------------------------------------------------------------------------

ANCESTORS = (torch.arange(48).view(2, 3, 8) % 5 % 3).int()  # the first row of each sample is one
PADDING = torch.arange(8) < torch.tensor([[8], [5]])

_attention = partial(cases.attention, Lq=8, Lk=8, D=16)
_padded = partial(_attention, mask={"key_padding": PADDING})
_norm = partial(cases.add_layer_norm, rows=(2, 3), hidden=16)
_feed_forward = partial(cases.feed_forward, tokens=(2, 3), d=16, d_ff=16, d_out=16)
_loss = partial(cases.linear_cross_entropy, tokens=(6,), d=16, classes=9, ignore_index=-100)
VARIANTS: dict[str, Problem] = {
    "attention": _attention(),
    "attention causal": _attention(is_causal=True),
    "attention padded": _padded(),
    "attention grouped": _padded(Hk=1),
    "attention packed": _attention(B=1, mask={"cu_seqlens_q": torch.tensor([0, 3, 8]), "is_causal": True}),
    "attention bias, lse": _padded(bias=(1, 2, 1, 8), return_lse=True),
    "attention grouped, dropout": _attention(Hk=1, is_causal=True, dropout_p=0.3),
    "norm": _norm(x_bias=True),
    "norm with sum and dropout": _norm(x_bias=True, return_sum=True, dropout_p=0.4),
    "norm by std": _norm(x_bias=True, eps_on_std=True),
    "norm alone": _norm(residual=False, return_sum=True),  # the sum is x
    "rms norm": _norm(rms=True, residual=False, dropout_p=0.2),
    "feed-forward": _feed_forward("gelu"),
    "feed-forward relu": _feed_forward("relu"),
    "feed-forward gated": _feed_forward("swiglu", dropout_p=0.3),
    "loss": _loss(label_smoothing=0.1),
    "loss of each": _loss(reduction="none", logit_scale=0.5),
    "decoding": cases.decode_attention(positions=8, head_dim=16, lengths=[8, 5]).but(ancestors=ANCESTORS),
    "attention weights": _padded(bias=(1, 2, 1, 8), return_weights=True, dropout_p=0.3),
}
# With a result that has no gradient in every backend.
WITHOUT_GRADIENT = ("decoding", "attention weights")
WITH_GRADIENT = tuple(name for name in VARIANTS if name not in WITHOUT_GRADIENT)
WITH_DROPOUT = tuple(name for name, p in VARIANTS.items() if "dropout_p" in p.options)
# Of each op one variant, with dropout where the op has it: what the everyday tier tries.
EVERYDAY = ("attention grouped, dropout", "norm with sum and dropout", "rms norm", "feed-forward gated")
EVERYDAY += ("loss", "decoding")


def takes(name: str, backend: str) -> bool:
    """Whether the backend itself computes a variant."""
    p = VARIANTS[name]
    taken = for_backend(p, backend)
    is_same = (taken.tensors.keys(), taken.options.keys()) == (p.tensors.keys(), p.options.keys())
    return is_same and backend in backends_of(OPS[p.op].backend_module)


def every(
    names: Iterable[str] = WITH_GRADIENT, backends: Iterable[str] = BACKENDS, everyday: Iterable[str] = EVERYDAY
) -> Any:
    """Parameters `name` and `backend` of a test: each variant in each backend that takes the call.

    everyday: names; those with a backend before them, "triton norm", are for this backend."""
    chosen, days = tuple(backends), set(everyday)
    return pytest.mark.parametrize(
        ("name", "backend"),
        [
            pytest.param(n, b, marks=() if {n, f"{b} {n}"} & days else pytest.mark.full)
            for n in names
            for b in chosen
            if takes(n, b)
        ],
    )


def call_of(name: str) -> Callable[..., Any]:
    """A variant's call, as a function of the tensors that get a gradient. A mask is built in it."""

    def run(*inputs: Tensor) -> Any:
        p = VARIANTS[name].map(lambda t: t.to(inputs[0].device))
        with torch.set_grad_enabled(torch.is_grad_enabled() and p.differentiable):
            return p.function(**p.arguments(dict(zip(p.tensors, inputs, strict=True))))

    return run


def random_tensors(
    shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """They require a gradient."""
    generator = torch.Generator().manual_seed(4)
    drawn = (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def inputs_of(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_tensors([t.shape for t in VARIANTS[name].tensors.values()], device, dtype)


def run(name: str, backend: str, inputs: Sequence[Tensor], seed: int | None = 5) -> tuple[Tensor, ...]:
    """The results of a variant. Equal seeds draw equal dropout. Skips where the backend cannot run."""
    p = VARIANTS[name].map(lambda t: t.to(inputs[0].device))
    given = p.arguments(dict(zip(p.tensors, inputs, strict=True)))
    with torch.set_grad_enabled(torch.is_grad_enabled() and p.differentiable):
        reason = explain(p.function, **given).refusals[backend]
    if reason and not given.get("return_weights"):  # which aten computes for the kernels
        pytest.skip(f"{backend}: {reason}")
    if seed is not None:
        torch.manual_seed(seed)
    with use_backend(backend):
        results = call_of(name)(*inputs)
    return (results,) if isinstance(results, Tensor) else results


def scalar(results: Tensor | Sequence[Tensor]) -> Tensor:
    """Something whose derivatives have no zeros by chance."""

    def weighted(t: Tensor) -> Tensor:
        return (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)).sin().sum()

    return sum(weighted(t) for t in ((results,) if isinstance(results, Tensor) else results))


# --- named sizes ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """arguments: of the op's function in cases.py. Of attention, `mask` may be a kind of mask_cases.py, and
    poison=True is for `poisoned`, frozen=names for `frozen`, minus_inf=share for `with_minus_inf`.

    backends: that it is for.     everyday: of these, those that try it in the everyday tier."""

    arguments: dict[str, Any]
    everyday: tuple[str, ...] = ()
    backends: tuple[str, ...] = BACKENDS


CPU = ("reference", "aten")
ATEN, TRITON = ("aten",), ("triton",)
ALL = BACKENDS


def make(op: str, case: str = "", **arguments: Any) -> Problem:
    """A problem of cases.py, from the arguments of a Row."""
    poison, taken, share = (arguments.pop(n, None) for n in ("poison", "frozen", "minus_inf"))
    if op == "attention":
        arguments = {"B": 2, "H": 2, "Lq": 21, "Lk": 37, "D": 16, "return_lse": True} | arguments
        if isinstance(arguments.get("mask"), str):
            kinds = mask_kinds(*(arguments[n] for n in ("B", "H", "Lq", "Lk")))
            arguments["mask"] = kinds[arguments["mask"]]
    p = getattr(cases, op)(**arguments)._replace(case=case)
    p = with_minus_inf(p, share) if share else p
    p = with_douts(frozen(p, *(taken or ()))) if p.differentiable else p
    return poisoned(p) if poison else p


def sized(op: str, name: str, device: torch.device) -> Problem:
    """The problem of a row."""
    return make(op, name, **SIZES[op][name].arguments, device=device)


def rows(op: str) -> list[Any]:
    """(backend, name of a row) for pytest.mark.parametrize."""
    return [
        pytest.param(b, name, marks=() if b in row.everyday else pytest.mark.full)
        for name, row in SIZES[op].items()
        for b in backends_of(OPS[op].backend_module)
        if b in row.backends
    ]


NO_BAND = AttentionMask(is_causal=True) & AttentionMask(window=(0, None), align="bottom_right")
FROM_THE_END = {"is_causal": True, "align": "bottom_right"}
HEADS = {"B": 1, "H": 1, "Lq": 19, "Lk": 35, "mask": "causal"}
LONG = {"H": 1, "Lq": 70, "Lk": 140}  # two tiles of queries, two or three of keys
# Kernels read each of these in another way.
EVERYDAY_KINDS: dict[str, tuple[str, ...]] = {
    "window": ("aten", "cuda"),
    "key_padding_holes": (*CPU, "triton"),
    "attn_mask": (*CPU, "cuda"),
    "segments_and_padding": ("aten",),
    "decoder": ("reference", "cuda"),
    "window, one tile": TRITON,
}


def _mask_kinds() -> dict[str, Row]:
    """Several tiles each way, the last of them ragged; and all keys in one tile, where one kernel makes all gradients.
    With one kind of mask comes a bias, with the next dropout, and so on; every second hides NaN."""
    made = {}
    for turn, kind in enumerate(KINDS):
        dropout_p, dtype, poison = (0.0, 0.3, 0.1)[turn % 3], (FP32, BF16, FP16)[turn % 3], turn % 2 == 0
        sizes = {"Hk": 2 - turn % 2, "mask": kind, "poison": poison, "return_weights": turn % 4 < 2}
        bias = (None, (1, 2, 66, 140), None, (2, 1, 1, 140))[turn % 4]
        several = {"Lq": 66, "Lk": 140, "Dv": 24, "bias": bias, "dropout_p": dropout_p, "common": 1.0}
        bias = (None, (1, 2, 70, 29), None, (2, 1, 1, 29))[turn % 4]
        one = {"Lq": 70, "Lk": 29, "D": 24, "Dv": 16, "bias": bias, "dropout_p": 0.3 - dropout_p}
        made[kind] = Row(sizes | several | {"dtype": dtype})
        made[f"{kind}, one tile"] = Row(sizes | one | {"dtype": (BF16, FP32, FP16)[turn % 3]}, (), TRITON)
    return {name: row._replace(everyday=EVERYDAY_KINDS.get(name, ())) for name, row in made.items()}


PACKED = {"cu_seqlens_q": offsets(40, 30, 1, 79)}
RELATIVE = {"B": 1, "H": 1, "Lq": 70, "Lk": 75, "relative_bias": (1, 144), "mask": {"window": (66, 3)}, "softcap": 20.0}
ONE_KEY = {"B": 1, "dropout_p": 0.3, "dtype": BF16}

ATTENTION: dict[str, Row] = {
    # lengths, at the edges of tiles
    "one by one": Row({**HEADS, "Lq": 1, "Lk": 1}, ALL),
    **{f"{Lq} by {Lk}": Row({**HEADS, "Lq": Lq, "Lk": Lk, "mask": FROM_THE_END, "dtype": dtype}, everyday)
       for Lq, Lk, dtype, everyday in ((1, 129, FP32, ()), (129, 1, FP32, ()), (64, 128, FP32, ()),
                                       (65, 129, BF16, ("cuda",)), (63, 127, FP32, ()))},
    # head dimensions: of queries and keys, and of values. The CUDA kernels have 128 at most.
    **{f"D {D}, Dv {Dv}": Row({**HEADS, "D": D, "Dv": Dv}, TRITON * (D == 33) + ("cuda",) * (Dv == 40))
       for D, Dv in ((1, 3), (8, 8), (33, 72), (64, 16), (80, 80), (127, 127), (128, 40))},
    "D 256": Row({**HEADS, "D": 256}, (), (*CPU, "triton")),
    # heads that share a key head, and values that have other heads than keys
    "groups of 3": Row({**HEADS, "H": 3, "Hk": 1, "mask": "attn_mask"}, CPU),
    "float64": Row({"H": 4, "Hk": 2, "mask": "decoder", "bias": (2, 1, 21, 37), "dtype": FP64}, CPU, CPU),
    "6 heads of queries, 2 of keys, 3 of values": Row({**HEADS, "H": 6, "Hk": 2, "Hv": 3}, CPU),
    # biases: sums over samples, heads and query tiles; of few programs, so that their loop over the batch is split
    **{f"bias {shape}": Row({"H": 4, "bias": shape, "mask": "key_padding_holes"}, everyday)
       for shape, everyday in (((1, 4, 21, 37), CPU), ((2, 4, 21, 37), ()), ((1, 1, 21, 37), ()), ((2, 1, 1, 37), ()),
                               ((2, 1, 21, 1), ()), ((2, 4, 1, 1), ()), ((21, 37), CPU), ((21, 1), ()))},
    "bias float32 with bfloat16": Row({"H": 4, "bias": (1, 4, 21, 37), "dtype": BF16, "bias_dtype": FP32}, ATEN),
    "bias of keys, long": Row({**LONG, "bias": (1, 1, 1, 140), "mask": "key_padding", "dropout_p": 0.25}, TRITON),
    "bias of a split batch": Row({"B": 9, "H": 1, "Lk": 30, "bias": (1, 1, 21, 30), "mask": "key_padding_holes"}),
    # biases by distance, and softcap
    "distances in one tile": Row({"Lk": 30, "relative_bias": (1, 50), "softcap": 1.5, "dropout_p": 0.3, "Hk": 1},
                                 (*CPU, "triton")),
    "distances of neighbours": Row(RELATIVE),
    "distances in packed ones": Row({"B": 1, "H": 1, "Lq": 75, "Lk": 75, "relative_bias": (1, 79),
                                     "mask": {"cu_seqlens_q": offsets(40, 1, 34)}}, CPU),
    **{f"distances of {Lq} by {Lk}{', causal' * bool(mask)}":
       Row({"B": 1, "Lq": Lq, "Lk": Lk, "relative_bias": (2, Lq + Lk - 1), "mask": mask})
       for Lq, Lk in ((64, 64), (65, 129), (129, 65), (128, 63), (1, 130), (130, 1), (1, 1))
       for mask in ({}, FROM_THE_END)},
    "distances in packed ones, causal": Row({"B": 1, "Lq": 150, "Lk": 150, "relative_bias": (2, 157), "softcap": 5.0,
                                             "mask": PACKED | {"is_causal": True}, "dtype": FP16}),
    "distances in packed ones, padding": Row({"B": 1, "H": 4, "Hk": 2, "Lq": 150, "Lk": 150, "dropout_p": 0.3,
                                              "relative_bias": (4, 157),
                                              "mask": PACKED | {"key_padding": prefix([140], 150)}}),
    "distances of a split batch": Row({"B": 9, "Lk": 20, "relative_bias": (1, 40), "mask": "key_padding_holes"}),
    "softcap and a bias": Row({"softcap": 1.0, "bias": (1, 2, 21, 37), "mask": "key_padding_holes"}, ATEN),
    **{f"softcap {cap}": Row({"Lk": Lk, "softcap": cap, "dtype": dtype, "mask": "causal", "dropout_p": 0.3})
       for cap, Lk, dtype in ((0.1, 37, FP16), (2.0, 30, BF16), (30.0, 140, FP32), (1e4, 37, FP32))},
    # dropout: rarely, nearly always, always
    **{f"dropout {p}": Row({"B": 1, "mask": "causal", "dropout_p": p, "return_weights": True}, everyday)
       for p, everyday in ((1e-5, ()), (0.3, CPU), (0.999, ()), (1.0, ("aten",)))},
    # Queries with one or two keys: dP nearly equals delta, and dropout's factor scales up how out was rounded.
    "one key in a window": Row({**ONE_KEY, "Lq": 40, "Lk": 40, "mask": {"window": (0, 0)}}),
    "one key anywhere": Row({**ONE_KEY, "Lk": 150, "mask": {"attn_mask": scattered(21, 150, 1)}}, ("cuda",)),
    "two keys anywhere": Row({**ONE_KEY, "Lk": 150, "mask": {"attn_mask": scattered(21, 150, 2)}, "dtype": FP16}),
    # The sums of the softmax and of the values run in float32.
    "a long row": Row({"B": 1, "H": 1, "Lq": 16, "Lk": 2048, "dtype": BF16, "common": 1.0}, CPU),
    # -inf in a bias, and two bands that exclude each other: a query without keys
    "bias with -inf": Row({"bias": (2, 1, 21, 37), "mask": "causal", "minus_inf": 0.5}, (*CPU, "triton")),
    "a band of nothing": Row({"attn_mask": NO_BAND, "Lq": 20, "Lk": 50, "poison": True}, (*CPU, "cuda")),
    # Scales: with 0 some products leave the memory as it was; the kernels take the maximum before they scale. By 2.5
    # scores are rounded: PyTorch's own backward on an AMD Zen 4 then has 0.5x to 1.4x of the error that is allowed.
    **{f"scale {scale}{', causal' * bool(mask)}": Row({"scale": scale, "Lk": 21, "mask": mask, "return_lse": False}, e)
       for scale, e in ((0.0, ATEN), (-0.3, ()), (2.0, ())) for mask in (None, {"is_causal": True})},
    # What a tile reads that is hidden: two tiles of queries and of keys, some of them not visited.
    "hidden by padding, long": Row({**LONG, "poison": True, "mask": {"key_padding": prefix([70, 0], 140),
                                                                     "query_padding": prefix([60, 70], 70)}}, TRITON),
    "hidden by packing, long": Row({**LONG, "poison": True, "mask": {"cu_seqlens_q": offsets(20, 0, 50),
                                                                     "cu_seqlens_k": offsets(70, 5, 65)}}, ("cuda",)),
    **_mask_kinds(),
}  # fmt: skip

# What aten computes on a CPU by blocks: calls that return out alone, by PyTorch's operator; by products where there is
# dropout, or a gradient in bfloat16. Long enough to be cut, odd, with grouped heads.
ALONE = {"B": 2, "H": 6, "Hk": 2, "Lq": 229, "Lk": 251, "return_lse": False}
WAYS = {"operator": {}, "products": {"dropout_p": 0.3}, "products in bfloat16": {"dtype": BF16, "common": 1.0}}
PADDED = {"key_padding": prefix([251, 90], 251)}
CUTS: dict[str, dict[str, Any]] = {
    "window": {"window": (9, 20)},
    "window, bottom right": {"window": (9, 0), "align": "bottom_right"},
    "causal": {"is_causal": True},
    "padding": PADDED,
    "padding, causal": {**PADDED, "is_causal": True},
    "padding on the left": {"key_padding": PADDED["key_padding"].flip(1), "is_causal": True},
    "padding with holes": {"key_padding": PADDED["key_padding"] & (torch.arange(251) % 7 != 3)},
    "nothing in one sentence": {"key_padding": prefix([251, 0], 251)},
    "both paddings": {**PADDED, "query_padding": prefix([120, 229], 229)},
    "short": {**PADDED, "query_padding": prefix([229, 90], 229)},
    "matrix": {"attn_mask": (torch.arange(229)[:, None] // 32 - torch.arange(251) // 32).abs() < 2},
    # A head that sees fewer keys than its group.
    "a head": {**PADDED, "attn_mask": (torch.arange(6) != 1)[:, None, None] | (torch.arange(251) > 80)},
}
# Several sequences in one, of 41 positions, some of them empty; and with keys of another packing.
OWN, FEW = {"cu_seqlens_q": offsets(9, 0, 11, 9, 12)}, {"cu_seqlens_q": offsets(6, 14, 0, 21)}
FEW = FEW | {"cu_seqlens_k": offsets(12, 0, 8, 13), "is_causal": True}
EDGES_OF_BLOCKS = {"cu_seqlens_q": offsets(60, 1, 0, 68, 100), "cu_seqlens_k": offsets(100, 0, 7, 44, 100)}
EVERYDAY_OF_ATEN = (
    *("operator, padding, causal", "products, short", "operator, packed, 1", "distances, short"),
    *("products in bfloat16, padding with holes", "unpacked, few queries, causal", "bias (1, 6, 229, 251), padding"),
)


def _blocks_of_aten() -> dict[str, Row]:
    made: dict[str, dict[str, Any]] = {}
    for (way, options), (name, mask) in itertools.product(WAYS.items(), CUTS.items()):
        made[f"{way}, {name}"] = ALONE | options | {"mask": mask, "poison": name not in ("matrix", "causal")}
    for way in ("operator", "products in bfloat16"):  # with dropout packed sequences are unpacked
        for turn, band in enumerate(({}, {"is_causal": True}, {"window": (5, 3), "align": "bottom_right"})):
            mask = EDGES_OF_BLOCKS | band
            made[f"{way}, packed, {turn}"] = ALONE | WAYS[way] | {"B": 1, "H": 12, "mask": mask, "poison": True}
    unpacked = {"B": 1, "H": 4, "Hk": 2, "Lq": 41, "Dv": 8}
    made["unpacked, own, from the end"] = unpacked | {"Lk": 41, "mask": OWN | FROM_THE_END, "poison": True}
    made["unpacked, own, bfloat16"] = unpacked | {"Lk": 41, "mask": OWN, "dtype": BF16}
    made["unpacked, few queries, causal"] = unpacked | {"Lk": 33, "mask": FEW, "poison": True}
    # Blocks of all heads of some sentences, of some heads of one, and of some queries of one head.
    for name, (B, H, L) in {"sentences": (5, 4, 203), "heads": (1, 5, 451), "queries": (1, 2, 1103)}.items():
        for kind, dtype in (("none", FP32), ("key_padding", BF16), ("window", FP16)):
            options = {"dropout_p": 0.3, "dtype": dtype, "return_lse": False}
            made[f"blocks of {name}, {kind}"] = {"B": B, "H": H, "Lq": L, "Lk": L, "mask": kind, **options}
    # Sentences that are computed alone, and some of their heads at once.
    made["products, padding, 12 heads"] = ALONE | WAYS["products"] | {"H": 12, "mask": PADDED, "poison": True}
    # A bias without a gradient is added in its own dtype; by distance it may have a gradient.
    for shape in ((1, 6, 229, 251), (2, 1, 1, 251), (1, 1, 229, 1)):
        for name in ("none", "padding", "short"):
            bias = {"bias": shape, "mask": CUTS.get(name, {}), "frozen": ("bias",), "minus_inf": 0.2}
            made[f"bias {shape}, {name}"] = ALONE | bias
            made[f"bias {shape}, {name}, bfloat16"] = ALONE | bias | {"dtype": BF16, "bias_dtype": FP32}
    for name, mask in CUTS.items():
        if name != "a head":  # of six
            distances = {"H": 2, "Hk": 1, "mask": mask, "relative_bias": (2, 479)}
            made[f"distances, {name}"] = ALONE | distances | {"poison": name not in ("matrix", "causal")}
    # Row sums that are larger than the gradients of scores.
    common = {"dtype": BF16, "common": 10.0, "scale": 0.025}
    made["distances in bfloat16"] = made["distances, short"] | common
    made["common values"] = ALONE | {"mask": PADDED} | common
    made["common values, dropout"] = ALONE | {"mask": PADDED, "dropout_p": 0.3} | common
    return {f"aten: {name}": Row(of, ATEN if name in EVERYDAY_OF_ATEN else (), ATEN) for name, of in made.items()}


ATTENTION |= _blocks_of_aten()

DECODED = {"ancestors": True, "queries": 5}
DECODING: dict[str, Row] = {
    "ancestors": Row({"ancestors": True, "lengths": [37, 20]}, ALL),
    "one row, grouped": Row({"rows": 1, "lengths": [5, 37], "queries": 5, "heads": 4, "heads_k": 2}, ALL),
    "nothing in one sample": Row({"lengths": [1, 0], "head_dim": 40, "value_dim": 24}, TRITON),
    "nothing at all": Row({"lengths": [0, 0]}, ALL),
    "wide heads": Row({"rows": 1, "queries": 2, "positions": 70, "head_dim": 256, "value_dim": 16}),
    "one query": Row({"queries": 1, "positions": 300, "heads": 3, "heads_k": 1, "dtype": BF16}, ALL),
    "beams": Row({**DECODED, "positions": 70, "head_dim": 64, "dtype": FP16}),
    # One program of several has nothing to read; and parts that are merged, of 16 bits.
    "one part is empty": Row({"queries": 1, "positions": 700, "heads": 1, "heads_k": 1, "lengths": [40, 0]}, TRITON),
    "parts in bfloat16": Row({"ancestors": True, "rows": 7, "queries": 2, "batch": 1, "positions": 700, "heads": 1,
                              "heads_k": 1, "dtype": BF16}),
    "a negative scale": Row({"scale": -0.7}, CPU),
    "a bias of each head": Row({"rows": 3, "heads": 4, "heads_k": 2, "bias": 4}, ALL),
    "softcap and a bias": Row({"rows": 1, "bias": 1, "softcap": 2.0, "lengths": [37, 5]}, ALL),
    **{f"{name}, {d} by {n}, {str(dtype)[6:]}{', grouped' * grouped}":
       Row({"head_dim": d, "positions": n, "dtype": dtype, **some}
           | ({"heads": 8, "heads_k": 2, "lengths": [n, n // 2]} if grouped else {}))
       for name, some in (("1 query", {"queries": 1, "rows": 1}), ("4 rows", {"queries": 4}), ("5 beams", DECODED),
                          ("40 of one row", {"queries": 40, "rows": 1}))
       for d, n in ((128, 130), (256, 17)) for dtype in (FP32, BF16) for grouped in (False, True)},
}  # fmt: skip

DROPPED = {"dropout_p": 0.3, "x_bias": True}
NORMS: dict[str, Row] = {
    # several blocks, a ragged last one, several turns of a persistent one
    "several blocks": Row({"rows": (37,), "hidden": 48, **DROPPED}, ALL),
    "several blocks, rms": Row({"rows": (37,), "hidden": 48, **DROPPED, "rms": True, "mean": 0.5}, ALL),
    "several blocks by std": Row({"rows": (37,), "hidden": 48, **DROPPED, "eps_on_std": True}, ALL),
    "narrow rows": Row({"rows": (300,), "hidden": 7, "residual": False}, KERNELS),
    "wide rows, rms": Row({"rows": (5,), "hidden": 1030, "dropout_p": 0.3, "rms": True, "residual": False}),
    # E[z^2] - mean^2 would keep two or three digits of float32's seven.
    "mean 1000": Row({"rows": (9,), "hidden": 520, "mean": 1e3}, ALL),
    # A hundredth of eps: where eps is added to it, it is most of the sum.
    "a small std": Row({"rows": (9,), "hidden": 520, "residual": False, "eps_on_std": True, "std": 1e-8}, ALL),
    "bfloat16": Row({"rows": (37,), "hidden": 72, **DROPPED, "dtype": BF16}, KERNELS),
    "float16, weights float32": Row({"rows": (37,), "hidden": 72, "x_bias": True, "dtype": FP16,
                                     "weight_dtype": FP32}, ALL),
    **{f"13 by {hidden}, {turn}": Row({"rows": (13,), "hidden": hidden, **options})
       for hidden in (513, 1030)
       for turn, options in enumerate(({"x_bias": True}, {"dropout_p": 0.3, "residual": False, "x_bias": True},
                                       {"residual": False, "rms": True}))},
    # from 8192 on backwards read their rows twice
    "8201": Row({"rows": (2,), "hidden": 8201, **DROPPED}),
    "16384, rms": Row({"rows": (2,), "hidden": 16384, **DROPPED, "rms": True, "dtype": BF16}),
    **{f"by std, {rows} by {hidden}, {str(dtype)[6:]}":
       Row({"rows": (rows,), "hidden": hidden, **DROPPED, "eps_on_std": True, "dtype": dtype})
       for rows, hidden in ((300, 2), (2, 8201), (2, 16384)) for dtype in (FP32, FP16)},
}  # fmt: skip
NORMS = {name: row._replace(arguments={"return_sum": True} | row.arguments) for name, row in NORMS.items()}

# Several tiles each way, ragged; widths that no tile divides; one token.
FEED_FORWARDS: dict[str, Row] = {
    "relu": Row({"activation": "relu", "dropout_p": 0.3}, ALL),
    "gelu": Row({"activation": "gelu", "dropout_p": 0.3, "dtype": BF16}, ALL),
    "geglu_tanh": Row({"activation": "geglu_tanh", "has_bias": False}, ALL),
    "swiglu": Row({"activation": "swiglu", "dropout_p": 0.3, "dtype": FP16}, KERNELS),
    "relu, wide": Row({"dropout_p": 0.3, "tokens": (270,), "d": 33, "d_ff": 150, "d_out": 20}),
    "silu, one token": Row({"activation": "silu", "tokens": (1,), "d": 33, "d_ff": 257, "d_out": 129}, ALL),
    **{f"{a}, {tokens} by {d}":
       Row({"activation": a, "dropout_p": 0.3, "tokens": (tokens,), "d": d, "d_ff": d_ff, "d_out": d_out,
            "dtype": dtype})
       for a, dtype in (("relu", BF16), ("geglu_tanh", FP32))
       for tokens, d, d_ff, d_out in ((270, 72, 136, 40), (1, 33, 257, 129), (3, 50, 129, 65))},
}  # fmt: skip

SMOOTHED = {"label_smoothing": 0.1, "logit_scale": 0.4}
REDUCTIONS = ("none", "mean", "sum")
# One class and one token; odd counts; a block of 4096 classes and a ragged second one.
LOSSES: dict[str, Row] = {
    "of each": Row({"reduction": "none", **SMOOTHED}, CPU),
    "smooth over others": Row({"reduction": "mean", "smooth_over": "others", **SMOOTHED}, ALL),
    "sum without a bias": Row({"reduction": "sum", "has_bias": False}, ALL),
    "mean in bfloat16": Row({"reduction": "mean", "tokens": (60,), "dtype": BF16, **SMOOTHED}, ALL),
    "one class": Row({"reduction": "mean", "tokens": (1,), "d": 5, "classes": 1, "ignore_index": -100}, ALL),
    # Of few numbers the formula's largest error may be small by accident.
    "two blocks of classes": Row({"reduction": "none", "tokens": (3,), "d": 96, "classes": 5001, **SMOOTHED}, TRITON),
    **{f"no width, {reduction}": Row({"reduction": reduction, "d": 0}) for reduction in REDUCTIONS},
    "8200 classes": Row({"reduction": "none", "tokens": (6,), "classes": 8200, "smooth_over": "others", **SMOOTHED}),
}

# What the CUDA kernels treat in another way, on an A100 ("cuda") and, where everyday says "cuda-90", on Hopper.
CUDA, HOPPER = ("cuda",), ("cuda-90",)
FOR_CUDA = {"x_bias": True, "dropout_p": 0.3, "return_sum": True, "eps": 1e-2}
# x, and weight and bias
DTYPE_PAIRS = [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)]


def _named(*rows: tuple[tuple[str, ...], dict[str, Any]]) -> dict[str, Row]:
    """Rows for CUDA alone, with everyday; what they are called follows from their arguments."""
    return {"cuda: " + ", ".join(f"{n} {v}" for n, v in of.items()): Row(of, everyday, CUDA) for everyday, of in rows}


def _norms_of_cuda() -> dict[str, Row]:
    """Chunks and warps of a row, forward and backward; vectors and single elements; from 8193 on x_bias has no sum."""

    def row(rows: int, hidden: int, everyday: tuple[str, ...] = (), **options: Any) -> tuple[Any, dict[str, Any]]:
        return everyday, {"rows": (rows,), "hidden": hidden} | FOR_CUDA | options

    widths = (1, 7, 8, 256, 264, 520, 1000, 1032, 2048, 4104, 8192, 8200, 16383, 16384)
    pairs = [{"dtype": dtype, "weight_dtype": weight_dtype} for dtype, weight_dtype in DTYPE_PAIRS]
    flags = (True, False)
    return _named(
        *(row(5, hidden, CUDA, x_bias=hidden % 16 > 0) for hidden in (512, 3001)),
        row(9, 1040, CUDA, dropout_p=0.0),
        row(37, 64, CUDA, **pairs[1], residual=False, dropout_p=0.0),
        row(37, 132, dtype=BF16, return_sum=False),
        row(5, 500, CUDA, rms=True, dtype=BF16, residual=False, x_bias=False, return_sum=False),
        row(5, 500, CUDA, eps_on_std=True, dtype=FP16, residual=False, x_bias=False, return_sum=False),
        *(row(5 if hidden < 4096 else 2, hidden, x_bias=x_bias) for hidden in widths for x_bias in flags),
        *(row(9, hidden, **pair) for pair in pairs for hidden in (72, 500, 1040)),
        *(row(37, 132, **pairs[1], residual=residual, return_sum=z) for residual in flags for z in flags),
        *(row(rows, hidden, **pair, **{kind: True}, x_bias=x_bias, residual=residual)
          for rows, hidden, x_bias, residual in ((37, 72, True, True), (5, 500, False, False), (300, 7, False, True),
                                                 (3, 2056, True, True), (2, 16384, False, True))
          for pair in pairs for kind in ("rms", "eps_on_std")),
    )  # fmt: skip


def _attentions_of_cuda() -> dict[str, Row]:
    # Several tiles, the last of them ragged, some full, some empty. In both, Hopper's forward has a warpgroup without
    # queries, of tiles of 192 and of 128. And fewer than two tiles each way.
    made: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for kind in KINDS:
        dropout_p = 0.2 if kind == "decoder" else 0.0
        several = {"H": 1, "Lq": 300, "Lk": 269, "D": 64, "mask": kind, "dropout_p": dropout_p, "dtype": BF16}
        grouped = {"Hk": 1, "Lq": 37, "Lk": 141, "D": 72, "mask": kind, "dropout_p": 0.3, "return_lse": False}
        made.append((HOPPER if kind == "decoder" else (), several))
        made.append((HOPPER if kind == "segments_causal" else (), grouped | {"dtype": FP16}))
    made.append((CUDA, {"Lq": 110, "D": 96, "Lk": 100, "mask": "decoder", "dropout_p": 0.2}))
    for D, Dv in ((1, 3), (8, 8), (33, 72), (64, 24), (72, 72), (128, 40), (40, 120), (128, 128)):
        sizes = {"B": 1, "Lq": 70, "Lk": 140, "D": D, "Dv": Dv, "mask": "causal_bottom_right"}
        made += [((*CUDA, *HOPPER) if D == Dv == 72 else (), sizes | {"dtype": BF16}), ((), sizes | {"dtype": FP32})]
    for Lq, Lk in ((1, 1), (1, 300), (300, 1), (64, 64), (64, 128), (192, 128), (193, 129), (128, 127), (65, 127)):
        # 1e-6 drops nothing, as the rule counts in 65536ths.
        for mask, dropout_p in (("none", 0.0), ("causal_bottom_right", 1e-6), ("key_padding", 0.0), ("none", 0.7)):
            sizes = {"B": 1, "Lq": Lq, "Lk": Lk, "D": 64, "mask": mask, "dropout_p": dropout_p, "dtype": BF16}
            made.append(((), sizes))
    # The strides of dimensions of size 1 may be anything; TMA gets what a contiguous tensor would have.
    for B, H, Lq, Lk in ((1, 1, 1, 1), (2, 2, 1, 9), (2, 2, 9, 1), (1, 2, 9, 9), (2, 1, 9, 9)):
        made.append((HOPPER if Lq == 1 < Lk else (), {"B": B, "H": H, "Lq": Lq, "Lk": Lk, "D": 64, "dtype": BF16}))
    # The kernels take the maximum before they scale.
    for scale, mask in itertools.product((-0.3, 0.0), ("none", "everything")):
        sizes = {"Lq": 70, "Lk": 150, "D": 64, "scale": scale, "mask": mask, "dtype": BF16}
        made.append((HOPPER if (scale, mask) == (-0.3, "everything") else (), sizes))
    return _named(*made)


def _blocks_of_cuda() -> dict[str, Row]:
    """Masks whose 64 x 64 blocks are empty, partial or full, which Hopper's kernels compute one by one."""
    sizes = {"Lq": 390, "Lk": 520, "dtype": BF16, "mask": {"attn_mask": in_blocks(1, 2, 390, 520)}}
    padded = {
        "mask": {"attn_mask": in_blocks(2, 1, 300, 269), "key_padding": prefix([269, 130], 269), "window": (99, 9)}
    }
    made = {
        "blocks": Row({**sizes, "D": 64}, HOPPER, CUDA),
        "blocks, dropout": Row({**sizes, "D": 64, "dropout_p": 0.3}, (), CUDA),
        "blocks of wide heads": Row({**sizes, "D": 96, "Hk": 1, "dropout_p": 0.3}, HOPPER, CUDA),
    }
    skips = {"H": 8, "Lq": 128, "Lk": 512, "D": 128, "dtype": BF16, "mask": {"attn_mask": after_full_tiles()}}
    made["skipped blocks after full tiles"] = Row({"B": 1, **skips}, HOPPER, CUDA)
    for D in (64, 128):
        gap = {"D": D, "Lq": 128, "Lk": 1500, "dtype": BF16, "mask": {"attn_mask": with_gap(128, 1500)}}
        made[f"a gap in blocks, D {D}"] = Row(gap, HOPPER if D == 128 else (), CUDA)
        hidden = {"D": D, "Lq": 300, "Lk": 269, "dtype": FP16, "poison": True}
        made[f"blocks, padding, D {D}"] = Row(padded | hidden, HOPPER if D == 64 else (), CUDA)
    return made


NORMS |= _norms_of_cuda()
ATTENTION |= _attentions_of_cuda() | _blocks_of_cuda()
# Several blocks each way, all of them ragged; in vectors and, of 299 columns, element by element.
FEED_FORWARDS |= _named(
    *((CUDA if (activation, of) in (("swiglu", BF16), ("relu", FP16)) else (),
       {"activation": activation, "tokens": (150,), "d": 72, "d_ff": d_ff, "d_out": 104, "dropout_p": p, "dtype": of})
      for activation in ACTIVATIONS for of, p in ((BF16, 0.3), (FP16, 0.0)) for d_ff in (296, 299)),
)  # fmt: skip

SIZES: dict[str, dict[str, Row]] = {
    "attention": ATTENTION,
    "decode_attention": DECODING,
    "add_layer_norm": NORMS,
    "feed_forward": FEED_FORWARDS,
    "linear_cross_entropy": LOSSES,
}

# --- calls that hypothesis draws --------------------------------------------------------------------------------------

Strategy = st.SearchStrategy[Any]
LAYOUTS = ("contiguous", "swapped_dims", "reversed_dims", "sliced", "every_second")
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # of tiles


class Call(NamedTuple):
    """op, and arguments of `make`; a mask is as `masks` draws it.

    layouts: of each tensor in turn, of the gradients of the results after them; from the first again."""

    op: str
    arguments: dict[str, Any]
    layouts: tuple[str, ...]


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


def one_of(*values: Any) -> Strategy:
    return st.sampled_from(values)


COUNT, SHARE = one_of(1, 2, 1, 2, 3, 1, 2, 0), one_of(0.5, 0.9, 0.1, 0.0)
DROPOUT, SCALE, SOFTCAP = one_of(0.0, 0.1, 0.5, 0.93), one_of(0.5, 1.0, -0.3, 0.0, 2.0), one_of(0.5, 3.0)


def masks(B: int, H: int, Lq: int, Lk: int) -> Strategy:
    """Arguments of AttentionMask: of a bool tensor its shape and the share of True, of offsets a list."""

    def cuts(L: int) -> Strategy:
        return st.lists(st.integers(0, L), min_size=2, max_size=2).map(lambda cut: [0, *sorted(cut), L])

    reach = st.none() | st.integers(0, max(Lk, 1))
    packed = [st.fixed_dictionaries({"cu_seqlens_q": cuts(Lq), "cu_seqlens_k": cuts(Lk)})]
    packed += [st.fixed_dictionaries({"cu_seqlens_q": cuts(Lq)})] if Lq == Lk else []
    broadcast = st.tuples(*(one_of(n, n, 1) for n in (B, H, Lq, Lk)))
    restrictions = some(
        is_causal=st.just(True),
        align=st.just("bottom_right"),
        window=st.tuples(reach, reach),
        key_padding=st.tuples(st.tuples(one_of(1, B), st.just(Lk)), SHARE),
        query_padding=st.tuples(st.tuples(one_of(1, B), st.just(Lq)), SHARE),
        attn_mask=st.tuples(st.tuples(broadcast, st.integers(0, 2)).map(lambda drawn: drawn[0][drawn[1] :]), SHARE),
    )
    return joined(restrictions, st.one_of(st.just({}), st.just({}), *packed))


def mask_tensors(drawn: dict[str, Any], seed: int) -> dict[str, Any]:
    """The arguments of AttentionMask that `masks` drew."""
    generator, made = torch.Generator().manual_seed(seed), dict(drawn)
    for name in sorted({"key_padding", "query_padding", "attn_mask"} & drawn.keys()):  # the same in every process
        made[name] = torch.rand(drawn[name][0], generator=generator) < drawn[name][1]
    for name in {"cu_seqlens_q", "cu_seqlens_k"} & drawn.keys():
        made[name] = torch.tensor(drawn[name], dtype=torch.int32 if seed % 2 else torch.int64)
    return made


@st.composite
def _draw_attention(draw: Any, most: int) -> dict[str, Any]:
    """Every mask with every bias. All heads have `most` squared scores at most; few heads, where an example is slow."""
    Lq, Lk = draw(sizes(most)), draw(sizes(most))
    heads = min(max(most * most // max(Lq * Lk, 1), 1), most // 20)
    B = min(draw(COUNT), heads)
    Hk = min(draw(one_of(1, 2, 3, 1, 2, 0)), max(heads // max(B, 1), 1))
    H = Hk * min(draw(one_of(1, 1, 2, 3)), max(heads // max(B * Hk, 1), 1))
    arguments: dict[str, Any] = {"B": B, "H": H, "Hk": Hk, "Lq": Lq, "Lk": Lk, "return_lse": draw(st.booleans())}
    arguments |= {"D": max(draw(sizes(min(most, 160))), 1), "Dv": max(draw(sizes(min(most, 160))), 1)}
    arguments |= draw(some(dropout_p=DROPOUT, scale=SCALE, softcap=SOFTCAP, return_weights=st.booleans()))
    mask = draw(st.none() | masks(B, H, Lq, Lk))
    if mask is not None:
        arguments |= {"mask": mask, "poison": draw(st.booleans())}
        if draw(st.booleans()) and "cu_seqlens_k" not in mask:
            longest = max((b - a for a, b in itertools.pairwise(mask.get("cu_seqlens_q", ()))), default=None)
            R = Lq + Lk if longest is None else 2 * longest
            arguments["relative_bias"] = (draw(one_of(1, H)), max(R - 1, 0))
    if "cu_seqlens_k" not in (mask or {}):  # which must count is_causal inside of sequences
        arguments["is_causal"] = draw(st.booleans())
    if draw(st.booleans()):
        arguments["bias"] = tuple(draw(one_of(n, n, 1)) for n in (B, H, Lq, Lk))
        arguments |= draw(some(minus_inf=SHARE))
    return arguments


@st.composite
def _draw_decode_attention(draw: Any, most: int) -> dict[str, Any]:
    arguments = {"batch": draw(COUNT), "queries": draw(COUNT), "positions": draw(sizes(4 * most))}
    arguments |= {"heads_k": draw(one_of(1, 2, 3)), "head_dim": max(draw(sizes(most)), 1)}
    arguments |= {"heads": arguments["heads_k"] * draw(one_of(1, 1, 2, 5)), "value_dim": max(draw(sizes(most)), 1)}
    length = st.integers(0, arguments["positions"])
    lengths = st.lists(length, min_size=arguments["batch"], max_size=arguments["batch"])
    arguments |= draw(some(bias=one_of(1, arguments["heads"]), lengths=lengths, scale=SCALE, softcap=SOFTCAP))
    if draw(st.booleans()):
        return arguments | {"ancestors": True, "rows": draw(one_of(1, 2, 5))}
    return arguments | {"rows": draw(one_of(1, arguments["queries"]))}


def _leading(most: int) -> Strategy:
    """Dimensions before the last one."""
    return st.one_of(st.tuples(sizes(most)), st.tuples(COUNT, sizes(most // 3)), st.tuples(COUNT, COUNT, COUNT))


@st.composite
def _draw_add_layer_norm(draw: Any, most: int) -> dict[str, Any]:
    """Of few numbers, all or those that dropout leaves, gradients cancel in ways that the rule for errors does not
    measure."""
    flags = some(**{name: st.booleans() for name in ("residual", "x_bias", "return_sum")})
    numbers = {"dropout_p": (0.1, 0.5), "eps": (1e-6, 1e-3), "std": (0.5, 10.0), "mean": (0.5, -3.0)}
    given = draw(joined(flags, some(**{name: one_of(*values) for name, values in numbers.items()})))
    hidden = max(draw(sizes(4 * most)), 40 if "dropout_p" in given else 7)
    kind = draw(one_of({}, {}, {"eps_on_std": True}, {"rms": True}))
    return {"rows": draw(_leading(most)), "hidden": hidden} | kind | given


def _draw_feed_forward(most: int) -> Strategy:
    size = {"activation": one_of(*ACTIVATIONS), "tokens": _leading(most)}
    size |= {name: sizes(most) for name in ("d", "d_ff", "d_out")}
    return joined(st.fixed_dictionaries(size), some(dropout_p=DROPOUT, has_bias=st.booleans()))


def _draw_linear_cross_entropy(most: int) -> Strategy:
    """Two classes or more: the gradient of one is 0, but in float32 0.9 + 0.1 of a smoothed target need not be 1."""
    size = {"tokens": _leading(most), "d": sizes(most), "classes": sizes(2 * most).map(lambda n: max(n, 2))}
    choices = {"has_bias": (True, False), "label_smoothing": (0.0, 0.1, 0.9), "smooth_over": ("all", "others")}
    choices |= {"ignore_index": (-100, 0), "logit_scale": (0.5, 1.0, -0.3, 0.0, 2.0)}
    given = some(**{name: one_of(*values) for name, values in choices.items()})
    return joined(st.fixed_dictionaries(size | {"reduction": one_of(*REDUCTIONS)}), given)


STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "attention": _draw_attention,
    "decode_attention": _draw_decode_attention,
    "add_layer_norm": _draw_add_layer_norm,
    "feed_forward": _draw_feed_forward,
    "linear_cross_entropy": _draw_linear_cross_entropy,
}


@st.composite
def calls(draw: Any, op: str, backend: str, small: bool = False) -> Call:
    """Calls of an op. Those of kernels can be run by the interpreter and the emulator: small, and not in float64. The
    reference is judged in float64, since in other dtypes it is what the rule measures others by."""
    arguments = draw(STRATEGIES[op](66 if backend in KERNELS or small else 100))
    dtypes = {"reference": (FP64,), "aten": (FP64, FP32, BF16, FP16)}.get(backend, (FP32, BF16, FP16))
    arguments |= {"dtype": draw(one_of(*dtypes)), "seed": draw(st.integers(0, 99))}
    if backend == "aten" and "cu_seqlens_q" in arguments.get("mask", {}) and arguments["B"] == 1:
        arguments.pop("dropout_p", None)  # it drops from the sequences as a batch
    if "norm" in op and arguments["dtype"] != FP64 and draw(st.booleans()):
        arguments["weight_dtype"] = FP32
    return Call(op, arguments, draw(st.lists(one_of(*LAYOUTS), min_size=1, max_size=5).map(tuple)))


def problem(call: Call, device: torch.device) -> Problem:
    arguments = dict(call.arguments)
    if "mask" in arguments:
        arguments["mask"] = mask_tensors(arguments["mask"], arguments["seed"])
    p, names = make(call.op, device=device, **arguments), itertools.cycle(call.layouts)

    def laid(t: Tensor) -> Tensor:
        return getattr(layouts, next(names), torch.clone)(t) if t.dim() else t

    return p._replace(tensors={n: laid(t) for n, t in p.tensors.items()}, douts=tuple(map(laid, p.douts)))
