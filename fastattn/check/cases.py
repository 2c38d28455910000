"""Small random problems for every op, and their solution by any backend: what the doctor compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn
from fastattn.backends.reference import philox
from fastattn.backends.reference.feed_forward import ACTIVATIONS, GATED
from fastattn.check import tolerance

SEED = 20170612  # of the problems and of their dropout, so that a report can be repeated


class Problem(NamedTuple):
    """One small random problem: `function(**tensors, **options, backend=...)` solves it.

    Each tensor has a gradient, unless differentiable is False.
    terms: called as terms(tensors, options, douts) with tensors in float64 and the gradients of the outputs, it gives T
        of each result, see tolerance.py.
    """

    op: str
    case: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    terms: Callable[[dict[str, Tensor], dict[str, Any], list[Tensor]], dict[str, Tensor]]
    differentiable: bool = True


def problems(device: torch.device, large: bool | None = None) -> Iterator[Problem]:
    """The problems of every op, in float64, with lengths that leave ragged tiles. Equal on all devices, but for their
    size: large ones on a GPU, unless `large` says otherwise."""
    generator = torch.Generator().manual_seed(SEED)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    def draw(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) < 0.6).to(device)

    large = device.type == "cuda" if large is None else large
    batch, heads, length_q, length_k, dim = (2, 4, 200, 168, 64) if large else (2, 2, 72, 104, 64)

    def attention(case: str, heads_k: int = heads, bias: bool = False, **options: Any) -> Problem:
        tensors = {
            "query": randn(batch, heads, length_q, dim),
            "key": randn(batch, heads_k, length_k, dim),
            "value": randn(batch, heads_k, length_k, dim),
        }
        if bias:
            tensors["attn_mask"] = randn(1, heads, length_q, length_k)
        return Problem("attention", case, fastattn.scaled_dot_product_attention, tensors, options, _attention_terms)

    lengths = torch.tensor([length_k // 3, length_k], device=device)
    key_padding = torch.arange(length_k, device=device) < lengths[:, None]
    attn_mask = draw(batch, 1, length_q, length_k)
    attn_mask[0, 0, 3] = False  # a query that may attend to nothing
    yield attention("no mask, with lse", return_lse=True)
    yield attention("causal", is_causal=True)
    yield attention("key padding", attn_mask=fastattn.AttentionMask(key_padding=key_padding))
    yield attention("bool mask", attn_mask=attn_mask)
    yield attention("bias", bias=True)
    yield attention("grouped-query", heads_k=1, enable_gqa=True)
    yield attention("causal, dropout", is_causal=True, dropout_p=0.2)

    beams, positions = (5, 600) if large else (3, 70)
    lengths = torch.tensor([positions // 3, positions], dtype=torch.int32, device=device)
    ancestors = torch.randint(beams, (batch, beams, positions), generator=generator, dtype=torch.int32).to(device)

    def decode_attention(case: str, rows: int, heads_k: int = heads, **options: Any) -> Problem:
        tensors = {
            "query": randn(batch, beams, heads, dim),
            "key": randn(batch, positions, rows, heads_k, dim),
            "value": randn(batch, positions, rows, heads_k, dim),
        }
        function, terms = fastattn.decode_attention, _decode_attention_terms
        return Problem("decode_attention", case, function, tensors, options, terms, differentiable=False)

    yield decode_attention("beams of one history", beams, lengths=lengths, ancestors=ancestors)
    yield decode_attention("shared keys", 1, lengths=lengths)
    yield decode_attention("own rows, grouped-query", beams, heads_k=1)

    rows, width = (300, 512) if large else (40, 96)

    def add_layer_norm(case: str, residual: bool = True, x_bias: bool = False, **options: Any) -> Problem:
        tensors = {"x": randn(2, rows, width), "weight": 1 + 0.1 * randn(width), "bias": 0.1 * randn(width)}
        if x_bias:
            tensors["x_bias"] = 0.1 * randn(width)
        if residual:
            tensors["residual"] = randn(2, rows, width)
        else:
            options["residual"] = None
        return Problem("add_layer_norm", case, fastattn.dropout_add_layer_norm, tensors, options, _add_layer_norm_terms)

    yield add_layer_norm("residual, with sum", return_sum=True)
    yield add_layer_norm("no residual", residual=False)
    yield add_layer_norm("residual, dropout, x_bias", x_bias=True, dropout_p=0.2)
    yield add_layer_norm("eps on std", eps_on_std=True)

    def add_rms_norm(case: str, **options: Any) -> Problem:
        tensors = {"x": randn(2, rows, width), "residual": randn(2, rows, width), "weight": 1 + 0.1 * randn(width)}
        return Problem("add_rms_norm", case, fastattn.dropout_add_rms_norm, tensors, options, _add_layer_norm_terms)

    yield add_rms_norm("with sum", return_sum=True)
    yield add_rms_norm("dropout", dropout_p=0.2)

    def embed_layer_norm(case: str, **options: Any) -> Problem:
        words = torch.randint(0, 29, (2, rows), generator=generator).to(device)
        tensors = {"embedding": randn(29, width), "weight": 1 + 0.1 * randn(width), "bias": 0.1 * randn(width)}
        options |= {"tokens": words, "position_table": randn(rows, width).float(), "scale": 3.0, "padding_idx": 0}
        return Problem("embed_layer_norm", case, fastattn.embed_layer_norm, tensors, options, _embed_layer_norm_terms)

    yield embed_layer_norm("in order")
    position = torch.arange(rows, device=device).expand(2, -1)
    yield embed_layer_norm("positions, dropout", position=position, dropout_p=0.2)

    tokens, d_model, d_ff = (300, 256, 512) if large else (40, 48, 96)

    def feed_forward(activation: str, **options: Any) -> Problem:
        d_up = 2 * d_ff if activation.endswith("glu") else d_ff
        tensors = {
            "x": randn(2, tokens, d_model),
            "weight1": randn(d_up, d_model) * d_model**-0.5,
            "bias1": 0.1 * randn(d_up),
            "weight2": randn(d_model, d_ff) * d_ff**-0.5,
            "bias2": 0.1 * randn(d_model),
        }
        case = f"{activation}, dropout" if "dropout_p" in options else activation
        options["activation"] = activation
        return Problem("feed_forward", case, fastattn.feed_forward, tensors, options, _feed_forward_terms)

    yield feed_forward("relu")
    yield feed_forward("gelu")
    yield feed_forward("swiglu")
    yield feed_forward("relu", dropout_p=0.2)

    sentences, length, d_model, classes = (32, 20, 128, 5003) if large else (16, 5, 32, 83)
    target = torch.randint(0, classes, (sentences, length), generator=generator)
    target[:, length - 2 :] = 0  # padding

    def linear_cross_entropy(case: str, **options: Any) -> Problem:
        tensors = {
            "x": randn(sentences, length, d_model),
            "weight": 2 * randn(classes, d_model) * d_model**-0.5,
            "bias": 0.1 * randn(classes),
        }
        options |= {"target": target.to(device), "ignore_index": 0, "logit_scale": 0.5, "label_smoothing": 0.1}
        terms = _linear_cross_entropy_terms
        return Problem("linear_cross_entropy", case, fastattn.linear_cross_entropy, tensors, options, terms)

    yield linear_cross_entropy("mean", reduction="mean")
    yield linear_cross_entropy("none, others", reduction="none", smooth_over="others")


def solve(problem: Problem, backend: str, given: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients of `problem` by a backend, of its tensors rounded to `given`, computed in `dtype`."""
    tensors = {name: t.to(given).to(dtype) for name, t in problem.tensors.items()}
    leaves = {name: t.requires_grad_() for name, t in tensors.items()} if problem.differentiable else {}
    torch.manual_seed(SEED)  # one dropout mask for every backend and dtype
    outputs = problem.function(**tensors, **problem.options, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(outputs, list(leaves.values()), _gradients_of_outputs(outputs, given)) if leaves else ()
    results = {"out" if i == 0 else f"out[{i}]": out for i, out in enumerate(outputs)}
    return results | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def sizes_of_terms(problem: Problem, given: torch.dtype, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """T of each result, for tensors rounded to `given`; truth: the results, of which the shapes matter."""
    tensors = {name: t.to(given).double() for name, t in problem.tensors.items()}
    douts = _gradients_of_outputs([t for name, t in truth.items() if name.startswith("out")], given)
    terms = problem.terms(tensors, problem.options | {"dtype": given}, douts)
    return {name: terms[name].view(t.shape) for name, t in truth.items()}


def _gradients_of_outputs(outputs: Iterable[Tensor], given: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(out.shape, generator=generator).to(given).to(out) for out in outputs]


def _dropout_multiplier(options: dict[str, Any], device: torch.device, rows: int, columns: int) -> Tensor:
    """(rows, columns): 0 where the problem's dropout drops, else 1 / (1 - p); or 1 where there is no dropout."""
    dropout_p = options.get("dropout_p", 0.0)
    if dropout_p == 0:
        return torch.ones((), dtype=torch.float64, device=device)
    torch.manual_seed(SEED)
    return philox.keep_factor(philox.draw_rng_state(device), rows, columns, dropout_p, torch.float64)


def _attention_terms(tensors: dict[str, Tensor], options: dict[str, Any], douts: list[Tensor]) -> dict[str, Tensor]:
    q, k, v, bias = (tensors.get(name) for name in ("query", "key", "value", "attn_mask"))
    (B, H, Lq, D), Lk, device = q.shape, k.shape[2], q.device
    visible = torch.ones(1, 1, Lq, Lk, dtype=torch.bool, device=device)
    if options.get("is_causal"):
        visible = visible.tril()
    if "attn_mask" in options:
        visible = visible & fastattn.AttentionMask.of(options["attn_mask"]).dense(B, H, Lq, Lk, device)
    multiplier = _dropout_multiplier(options, device, B * H * Lq, Lk)
    multiplier = multiplier.view(B, H, Lq, Lk) if multiplier.dim() else multiplier
    dlse = douts[1] if options.get("return_lse") else None
    terms = tolerance.attention_terms(q, k, v, douts[0], dlse, visible, bias, multiplier, D**-0.5)
    names = {"out": "out", "out[1]": "lse", "grad of query": "dq", "grad of key": "dk", "grad of value": "dv"}
    return _renamed(terms, names | {"grad of attn_mask": "dbias"})


def _decode_attention_terms(
    tensors: dict[str, Tensor], options: dict[str, Any], douts: list[Tensor]
) -> dict[str, Tensor]:
    lengths, ancestors = options.get("lengths"), options.get("ancestors")
    return {"out": tolerance.decode_attention_terms(**tensors, lengths=lengths, ancestors=ancestors)}


def _add_layer_norm_terms(
    tensors: dict[str, Tensor], options: dict[str, Any], douts: list[Tensor]
) -> dict[str, Tensor]:
    x, residual, dout, *dz = (_matrix(t) for t in (tensors["x"], tensors.get("residual"), *douts))
    parameters = (tensors.get(name) for name in ("weight", "bias", "x_bias"))
    multiplier = _dropout_multiplier(options, x.device, *x.shape)
    eps_on_std = options.get("eps_on_std", False)
    terms = tolerance.add_layer_norm_terms(
        x, residual, *parameters, dout, *(dz or [None]), multiplier, 1e-6, eps_on_std
    )
    names = {"out": "out", "out[1]": "z"} | {f"grad of {name}": f"d{name}" for name in tensors}
    return _renamed(terms, names)


def _embed_layer_norm_terms(
    tensors: dict[str, Tensor], options: dict[str, Any], douts: list[Tensor]
) -> dict[str, Tensor]:
    tokens, table, position = options["tokens"], options["position_table"], options.get("position")
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) if position is None else position
    dout = _matrix(douts[0])
    multiplier = _dropout_multiplier(options, dout.device, *dout.shape)
    terms = tolerance.embed_layer_norm_terms(
        tokens.flatten(), tensors["embedding"], table[rows.flatten()], tensors["weight"], tensors["bias"],
        dout, multiplier, options["scale"], options["padding_idx"], 1e-6,
    )  # fmt: skip
    return _renamed(terms, {"out": "out"} | {f"grad of {name}": f"d{name}" for name in tensors})


def _feed_forward_terms(tensors: dict[str, Tensor], options: dict[str, Any], douts: list[Tensor]) -> dict[str, Tensor]:
    activation = options["activation"]
    x, dout = _matrix(tensors["x"]), _matrix(douts[0])
    parameters = (tensors[name] for name in ("weight1", "bias1", "weight2", "bias2"))
    multiplier = _dropout_multiplier(options, x.device, len(x), tensors["weight2"].shape[1])
    function = ACTIVATIONS[GATED.get(activation, activation)]
    terms = tolerance.feed_forward_terms(x, *parameters, dout, multiplier, function, activation in GATED)
    return _renamed(terms, {"out": "out"} | {f"grad of {name}": f"d{name}" for name in tensors})


def _linear_cross_entropy_terms(
    tensors: dict[str, Tensor], options: dict[str, Any], douts: list[Tensor]
) -> dict[str, Tensor]:
    target, classes, smoothing = options["target"].flatten(), len(tensors["weight"]), options["label_smoothing"]
    one_hot = torch.nn.functional.one_hot(target, classes).double()
    others = (1 - one_hot) / (classes - 1) if options.get("smooth_over") == "others" else 1 / classes
    distribution = ((1 - smoothing) * one_hot + smoothing * others) * (target != options["ignore_index"])[:, None]
    terms = tolerance.linear_cross_entropy_terms(
        _matrix(tensors["x"]), tensors["weight"], tensors["bias"], distribution,
        douts[0].flatten() if douts[0].dim() else douts[0],
        options["logit_scale"], options["reduction"], options["dtype"],
    )  # fmt: skip
    return _renamed(terms, {"out": "loss"} | {f"grad of {name}": f"d{name}" for name in tensors})


def _matrix(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.flatten(0, -2)


def _renamed(terms: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {name: terms[old] for name, old in names.items() if old in terms}
