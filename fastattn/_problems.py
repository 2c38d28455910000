"""Small random problems for every op, and their solution by any backend: what the doctor compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import fastattn

SEED = 20170612  # of the problems and of their dropout, so that a report can be repeated


class Problem(NamedTuple):
    """One small random problem: `function(**tensors, **options, backend=...)` solves it. Each tensor has a gradient.

    other_order: the same formula in plain PyTorch, in another order that is just as honest, where the order matters.
    by_sentence: the function is called for each x and target of the batch: of one number, the plain formula's error
        is luck, and the largest of many is not.
    """

    op: str
    case: str
    function: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    other_order: Callable[..., Any] | None = None
    by_sentence: bool = False


def problems(device: torch.device, large: bool | None = None) -> Iterator[Problem]:
    """The problems of every op, in float64, with lengths that leave ragged tiles. Equal on all devices, but for their
    size: large ones on a GPU, unless told otherwise."""
    generator = torch.Generator().manual_seed(SEED)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    def draw(*shape: int) -> torch.Tensor:
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
        return Problem("attention", case, fastattn.scaled_dot_product_attention, tensors, options, divided_last)

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

    # Few rows on a CPU: over many, torch's own float32 gradients of weight and bias, summed one row after the other,
    # are further from float64 than twice the formula's, and aten would be called out of bounds for it.
    rows, width = (300, 512) if large else (10, 96)

    def add_layer_norm(case: str, residual: bool = True, x_bias: bool = False, **options: Any) -> Problem:
        tensors = {"x": randn(2, rows, width), "weight": 1 + 0.1 * randn(width), "bias": 0.1 * randn(width)}
        if x_bias:
            tensors["x_bias"] = 0.1 * randn(width)
        if residual:
            tensors["residual"] = randn(2, rows, width)
        else:
            options["residual"] = None
        return Problem("add_layer_norm", case, fastattn.dropout_add_layer_norm, tensors, options)

    yield add_layer_norm("residual, with sum", return_sum=True)
    yield add_layer_norm("no residual", residual=False)
    yield add_layer_norm("residual, dropout, x_bias", x_bias=True, dropout_p=0.2)

    def add_rms_norm(case: str, **options: Any) -> Problem:
        tensors = {"x": randn(2, rows, width), "residual": randn(2, rows, width), "weight": 1 + 0.1 * randn(width)}
        return Problem("add_rms_norm", case, fastattn.dropout_add_rms_norm, tensors, options)

    yield add_rms_norm("with sum", return_sum=True)
    yield add_rms_norm("dropout", dropout_p=0.2)

    def embed_layer_norm(case: str, **options: Any) -> Problem:
        words = torch.randint(0, 29, (2, rows), generator=generator).to(device)
        tensors = {"embedding": randn(29, width), "weight": 1 + 0.1 * randn(width), "bias": 0.1 * randn(width)}
        options |= {"tokens": words, "position_table": randn(rows, width).float(), "scale": 3.0, "padding_idx": 0}
        return Problem("embed_layer_norm", case, fastattn.embed_layer_norm, tensors, options)

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
        return Problem("feed_forward", case, fastattn.feed_forward, tensors, {"activation": activation, **options})

    yield feed_forward("relu")
    yield feed_forward("gelu")
    yield feed_forward("swiglu")
    yield feed_forward("relu", dropout_p=0.2)

    sentences, length, d_model, classes = (32, 20, 128, 5003) if large else (16, 5, 32, 83)
    target = torch.randint(0, classes, (sentences, length), generator=generator)
    target[:, length - 2 :] = 0  # padding

    def linear_cross_entropy(case: str, by_sentence: bool = False, **options: Any) -> Problem:
        tensors = {
            "x": randn(sentences, length, d_model),
            "weight": 2 * randn(classes, d_model) * d_model**-0.5,
            "bias": 0.1 * randn(classes),
        }
        options |= {"target": target.to(device), "ignore_index": 0, "logit_scale": 0.5}
        function = fastattn.linear_cross_entropy
        return Problem("linear_cross_entropy", case, function, tensors, options, by_sentence=by_sentence)

    yield linear_cross_entropy("mean, smoothed", by_sentence=True, label_smoothing=0.1)
    yield linear_cross_entropy("none, others", reduction="none", label_smoothing=0.1, smooth_over="others")


def divided_last(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | fastattn.AttentionMask | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention in the order of tiled algorithms: by the sum of a row's exponentials is divided after the product.

    Its backward therefore subtracts rowsum(dout * out) from dout value^T, which cancels less exactly than the softmax's
    own, most of all in a query that sees few keys. The reference's zero weights say what is masked and dropped.
    """
    weights = partial(fastattn.scaled_dot_product_attention, query, key, value, attn_mask, return_weights=True)
    with torch.no_grad():
        kept = weights(dropout_p=dropout_p, **options)[-1] != 0
        seen = weights(**options)[-1] != 0
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    acc = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.mT).to(acc) * query.shape[-1] ** -0.5
    if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
        scores = scores + attn_mask
    peak = scores.detach().amax(-1, keepdim=True)
    exps = torch.exp(scores - peak).where(seen, 0)
    total = exps.sum(-1, keepdim=True)
    divisor = total.where(seen.any(-1, keepdim=True), 1) * (1 - dropout_p)
    out = (exps.where(kept, 0).to(value.dtype) @ value / divisor).to(value.dtype)
    return (out, (peak + total.log()).squeeze(-1)) if return_lse else out


def solve(
    problem: Problem, function: Callable[..., Any], given: torch.dtype, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of `problem` by `function`, of its tensors rounded to `given`, computed in `dtype`."""
    leaves = {name: t.to(given).to(dtype).requires_grad_() for name, t in problem.tensors.items()}
    torch.manual_seed(SEED)  # one dropout mask for every backend and dtype
    if problem.by_sentence:
        targets, options = problem.options["target"], problem.options
        calls = (leaves | options | {"x": x, "target": t} for x, t in zip(leaves["x"], targets, strict=True))
        outputs = torch.stack([function(**call) for call in calls])
    else:
        outputs = function(**leaves, **problem.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(SEED)
    douts = [torch.randn(out.shape, generator=generator).to(given).to(out) for out in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), douts)
    results = {"out" if i == 0 else f"out[{i}]": out for i, out in enumerate(outputs)}
    return results | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
