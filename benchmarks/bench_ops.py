"""The single ops except attention: every backend, torch's operators one after the other and compiled, and others.

    python benchmarks/report.py --only add_layer_norm feed_forward linear_cross_entropy decode_attention

On a GPU also Liger-Kernel and quack. decode_attention is compared with torch's scaled_dot_product_attention on a cache
as users keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import CrossEntropyCase, DecodeAttentionCase, FeedForwardCase, NormCase
from harness import Benchmark, Function, Inputs, Refused, imported, rival
from torch import Tensor

LIGER = "liger_kernel.transformers.functional"


def norm_of_torch(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    norm = partial(F.layer_norm, normalized_shape=(case.d_model,), eps=1e-6)
    return lambda x, residual, weight, bias: norm(residual + F.dropout(x, dropout_p), weight=weight, bias=bias)


def norm_of_liger(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    """It has none with a residual, so dropout and sum are torch's."""
    norm = imported(LIGER).liger_layer_norm
    return lambda x, residual, weight, bias: norm(residual + F.dropout(x, dropout_p), weight, bias, 1e-6)


def gated(activation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda hidden: activation(*hidden.chunk(2, dim=-1))


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swiglu": gated(lambda gate, up: F.silu(gate) * up)}


def network_of_torch(case: FeedForwardCase, inputs: Inputs, dropout_p: float, activation: Any = None) -> Any:
    activation = activation or ACTIVATIONS[case.activation]

    def network(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        return F.linear(F.dropout(activation(F.linear(x, weight1, bias1)), dropout_p), weight2, bias2)

    return network


def network_of_liger(case: FeedForwardCase, inputs: Inputs, dropout_p: float) -> Any:
    """Its silu(gate) * up between torch's matrix products. Its backward overwrites what it saved: when it is timed, it
    repeats the same work on other numbers."""
    swiglu = gated(imported(LIGER).liger_swiglu)
    if case.activation != "swiglu":
        raise Refused(f"no fused {case.activation}")
    return network_of_torch(case, inputs, dropout_p, swiglu)


def loss_of_torch(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """Logits in the dtype given, their softmax at least in float32."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), **inputs.fixed)

    return loss


def loss_of_liger(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    function = imported(LIGER).liger_fused_linear_cross_entropy
    return lambda x, weight: function(x, weight, **inputs.fixed)


def loss_of_quack(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """torch's matrix product and quack's cross-entropy."""
    cross_entropy = imported("quack").cross_entropy
    if case.smoothing:
        raise Refused("no label smoothing")
    target, ignored = inputs.fixed["target"], inputs.fixed["ignore_index"]
    options = {"ignore_index": ignored, "reduction": "none"}
    # Its own mean has no backward in 0.2.4 and 0.4.1, whose kernel refuses the gradient of a sum: it has stride 0.
    weights = F.normalize((target != ignored).float(), 1, 0)
    return lambda x, weight: cross_entropy(F.linear(x, weight), target, **options).dot(weights)


def decoding_of_torch(case: DecodeAttentionCase, inputs: Inputs, dropout_p: float) -> Any:
    """A batch entry for each beam: keys and values (batch * queries, n_head, length, head_dim), made before the timing.

    At every step index_select moves the beams that go on. Shared keys were repeated once, for all steps.
    """
    query, lengths = inputs.leaves["query"], inputs.fixed.get("lengths")
    ancestors = inputs.fixed.get("ancestors")
    rows = case.batch * case.queries
    mask = moved = None
    if lengths is not None:
        mask = (torch.arange(case.length, device=query.device) < lengths[:, None])[:, None, None]
        mask = mask.repeat_interleave(case.queries, dim=0)
    if ancestors is not None:
        moved = torch.arange(rows, device=query.device).view(case.batch, case.queries).roll(1, dims=1).flatten()

    def cached(t: Tensor) -> Tensor:
        """What the cache holds before beams move."""
        if ancestors is not None:
            place = ancestors.long().transpose(1, 2)[..., None, None].expand(*t.shape)
            t = t.gather(2, place).roll(-1, dims=2)
        t = t.expand(-1, -1, case.queries, -1, -1)  # (batch, length, queries, n_head, head_dim)
        return t.permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()

    cache = cached(inputs.leaves["key"]), cached(inputs.leaves["value"])

    def attend(query: Tensor, **leaves: Tensor) -> Tensor:
        k, v = cache if moved is None else (t.index_select(0, moved) for t in cache)
        out = F.scaled_dot_product_attention(query.reshape(rows, case.n_head, 1, case.head_dim), k, v, mask)
        return out.view_as(query)

    return attend


def op_benchmark(name: str, formula: str, rate: str, torch_operators: Function, **on_gpu: Function) -> Benchmark:
    found = [*harness.ours(), rival("torch", torch_operators), rival("torch.compile", torch_operators, compiled=True)]
    others = [rival(name.replace("_", "-"), function) for name, function in on_gpu.items()]
    providers = lambda device: found + others * (device.type == "cuda")  # noqa: E731
    return Benchmark(name, formula, (rate,), harness.op_inputs, providers)


NORM = "bytes: rows x d_model x (x, residual, sum, out) forward, (dout, sum, dresidual, with dropout dx) backward"
NETWORK = "FLOPs: 2 x tokens x d_model x (rows of weight1 + d_inner) forward, x 2 backward"
LOSS = "FLOPs: 2 x targets that are not padding x d_model x n_vocab forward, x 2 backward"
DECODING = "bytes: each visible key and value once, however many queries attend to it, q and out"
BENCHMARKS = (
    op_benchmark("add_layer_norm", NORM, "byte", norm_of_torch, Liger_Kernel=norm_of_liger),
    op_benchmark("feed_forward", NETWORK, "flop", network_of_torch, Liger_Kernel=network_of_liger),
    op_benchmark("linear_cross_entropy", LOSS, "flop", loss_of_torch, Liger_Kernel=loss_of_liger, quack=loss_of_quack),
    Benchmark(
        "decode_attention",
        DECODING,
        ("byte",),
        harness.op_inputs,
        lambda device: [*harness.ours(), rival("sdpa", decoding_of_torch)],
        directions=("forward",),
    ),
)
