"""Small random problems for every op, and their solution by any backend: what the doctor compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn
from fastattn.check.tolerance import measure_rounding_scale

SEED = 20170612  # of the problems and of their dropout, so that a report can be repeated


class Problem(NamedTuple):
    """One small random problem: `function(**tensors, **options, backend=...)` solves it.

    Each tensor has a gradient, unless differentiable is False.
    """

    op: str
    case: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    differentiable: bool = True


def problems(device: torch.device, large: bool | None = None) -> Iterator[Problem]:
    """The problems of every op, in float64, with lengths that make ragged tiles. Equal on all devices except for their
    size: large on a GPU, unless `large` is given."""
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
        return Problem("attention", case, fastattn.scaled_dot_product_attention, tensors, options)

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
        return Problem("decode_attention", case, fastattn.decode_attention, tensors, options, differentiable=False)

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
        return Problem("add_layer_norm", case, fastattn.dropout_add_layer_norm, tensors, options)

    yield add_layer_norm("residual, with sum", return_sum=True)
    yield add_layer_norm("no residual", residual=False)
    yield add_layer_norm("residual, dropout, x_bias", x_bias=True, dropout_p=0.2)
    yield add_layer_norm("eps on std", eps_on_std=True)

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
        options["activation"] = activation
        return Problem("feed_forward", case, fastattn.feed_forward, tensors, options)

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
        return Problem("linear_cross_entropy", case, fastattn.linear_cross_entropy, tensors, options)

    yield linear_cross_entropy("mean", reduction="mean")
    yield linear_cross_entropy("none, others", reduction="none", smooth_over="others")


def solve(
    problem: Problem,
    backend: str,
    given: torch.dtype,
    dtype: torch.dtype,
    change: Callable[[Tensor], Tensor] = lambda t: t,
) -> dict[str, Tensor]:
    """Outputs and gradients of `problem` by a backend, of its tensors rounded to `given`, computed in `dtype`.

    change: of the tensors and the gradients of outputs before they are used, see tolerance.measure_rounding_scale."""
    tensors = {name: change(t.to(given).to(dtype)) for name, t in problem.tensors.items()}
    leaves = {name: t.requires_grad_() for name, t in tensors.items()} if problem.differentiable else {}
    torch.manual_seed(SEED)  # one dropout mask for every backend and dtype
    outputs = problem.function(**tensors, **problem.options, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(SEED)
    douts = [torch.randn(out.shape, generator=generator).to(given).to(out) for out in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), [*map(change, douts)]) if leaves else ()
    results = {"out" if i == 0 else f"out[{i}]": out for i, out in enumerate(outputs)}
    return results | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def expected_results(problem: Problem, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """truth, baseline and rounding_scale of check_error for each result, of tensors rounded to `dtype`."""
    truth = solve(problem, "reference", dtype, torch.float64)
    baseline = solve(problem, "reference", dtype, dtype)
    scale = measure_rounding_scale(lambda change: solve(problem, "reference", dtype, torch.float64, change), truth)
    return {name: (truth[name], baseline[name], scale[name]) for name in truth}
