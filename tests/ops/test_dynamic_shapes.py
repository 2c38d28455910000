"""Every op under torch.compile with sizes that change: one graph more, then no more; results and gradients of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from fastattn import AttentionMask

W = 16


def tokens_below(x: Tensor, end: int) -> Tensor:
    """Integers that depend on x, (B, L)."""
    return (x[..., 0].detach().abs() * 7).long() % end


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k = (x @ weight).unflatten(-1, (2, 8)).transpose(1, 2), x.unflatten(-1, (2, 8)).transpose(1, 2)
    mask = AttentionMask(key_padding=tokens_below(x, 5) > 0, window=(4, 2))
    return fastattn.scaled_dot_product_attention(q, k, k, mask, scale=0.3)


def plain_attention(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.dropout_add_layer_norm(x, x.sin(), weight[0], weight[1])


def feed_forward(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.feed_forward(x, weight, weight[0], weight, None, "gelu")


def embeddings(x: Tensor, weight: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 40 * W).view(40, W)
    return fastattn.embed_layer_norm(tokens_below(x, W), weight, table, weight[0], weight[1], scale=2.0)


def loss(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.linear_cross_entropy(x, weight, tokens_below(x, W), label_smoothing=0.1, ignore_index=3)


@pytest.mark.parametrize("op", [attention, plain_attention, norm, feed_forward, embeddings, loss])
def test_one_graph_for_all_sizes(op: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, backend=graphs)
    for sizes in ((2, 5), (3, 7), (4, 12), (6, 33)):
        found = []
        for call in (compiled, op):
            generator = torch.Generator().manual_seed(1)
            x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((*sizes, W), (W, W)))
            out = call(x, weight)
            grads = torch.autograd.grad(out.square().sum(), (x, weight), allow_unused=True)
            found.append([out.detach(), *(g for g in grads if g is not None)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert graphs.frame_count <= 2
