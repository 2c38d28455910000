"""The operators that torch.compile calls, with tensors of any layout in memory: what their fakes promise, and Inductor.

The backends reference and aten have no operators: there PyTorch traces each step of the formula.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import emulator_build
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from helpers import backends_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastattn
from fastattn import AttentionMask
from fastattn.backends import unsupported_reason

B, H, L, D, BEAMS, CLASSES = 2, 2, 5, 16, 3, 11
KERNELS = backends_of("attention", kernels_only=True)

Layout = Callable[[Tensor], Tensor]
Run = Callable[..., Sequence[Tensor]]


def reversed_dims(t: Tensor) -> Tensor:
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def swapped_dims(t: Tensor) -> Tensor:
    """The two dimensions before the last: heads inside positions, as a projection viewed as heads has them."""
    return t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.dim() > 2 else t


def sliced(t: Tensor) -> Tensor:
    larger = t.new_zeros([n + 1 for n in t.shape])
    return larger[(slice(1, None),) * t.dim()].copy_(t)


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


LAYOUTS = (reversed_dims, swapped_dims, sliced, expanded)


def tensors(device: torch.device) -> dict[str, Tensor]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape).to(device)

    def integers(end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(1, end, shape, dtype=dtype).to(device)

    return {
        **{name: randn(B, H, L, D) for name in ("q", "k", "v")},
        **{name: randn(B, 1, L, D) for name in ("shared_k", "shared_v")},
        **{name: randn(B, L, D) for name in ("x", "residual")},
        **{name: randn(D) for name in ("weight", "bias", "x_bias")},
        **{name: randn(2 * D, D) for name in ("weight1", "weight_gated")},
        **{name: randn(B, L, BEAMS, H, D) for name in ("cached_k", "cached_v")},
        "beams": randn(B, BEAMS, H, D),
        "attn_bias": randn(1, H, L, L),
        "weight2": randn(D, 2 * D),
        "weight2_gated": randn(D, D),
        "bias1": randn(2 * D),
        "embedding": randn(CLASSES, D),
        "table": randn(L, D),
        "classes": randn(CLASSES, D),
        "bias_of_classes": randn(CLASSES),
        "key_padding": torch.arange(L, device=device) < integers(L, B, 1),
        "tokens": integers(CLASSES, B, L),
        "position": integers(L, B, L),
        "lengths": integers(L, B, dtype=torch.int32),
        "ancestors": integers(BEAMS, B, BEAMS, L, dtype=torch.int32),
    }


def attention(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    mask = AttentionMask(key_padding=t["key_padding"], bias=t["attn_bias"])
    given = (t["q"], t["k"], t["v"], mask, dropout_p)
    return fastattn.scaled_dot_product_attention(*given, return_lse=True, return_weights=True, **how)


def attention_with_shared_heads(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    """And with a bias for each query, which is the same for all keys."""
    given = (t["q"], t["shared_k"], t["shared_v"], t["attn_bias"][..., :1], 0.0, True)
    return [fastattn.scaled_dot_product_attention(*given, enable_gqa=True, **how)]


def decode_attention(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    given = (t["beams"], t["cached_k"], t["cached_v"], t["lengths"], t["ancestors"])
    with torch.no_grad():
        return [fastattn.decode_attention(*given, **how)]


def norm(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    options = {"dropout_p": dropout_p, "x_bias": t["x_bias"], "return_sum": True}
    return fastattn.dropout_add_layer_norm(t["x"], t["residual"], t["weight"], t["bias"], **options, **how)


def other_norms(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    by_std = fastattn.dropout_add_layer_norm(t["x"], None, t["weight"], t["bias"], eps_on_std=True, **how)
    return by_std, fastattn.dropout_add_rms_norm(t["x"], t["residual"], t["weight"], **how)


def embeddings(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    given = (t["tokens"], t["embedding"], t["table"], t["weight"], t["bias"])
    return [fastattn.embed_layer_norm(*given, dropout_p=dropout_p, position=t["position"], **how)]


def feed_forward(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    given = (t["x"], t["weight1"], t["bias1"], t["weight2"], t["bias"])
    return [fastattn.feed_forward(*given, dropout_p=dropout_p, **how)]


def gated_feed_forward(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    given = (t["x"], t["weight_gated"], None, t["weight2_gated"], None, "swiglu")
    return [fastattn.feed_forward(*given, recompute=True, **how)]


def loss(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    given = (t["x"], t["classes"], t["tokens"], t["bias_of_classes"])
    return [fastattn.linear_cross_entropy(*given, reduction=r, **how) for r in ("mean", "none")]


RUNS = (attention, attention_with_shared_heads, decode_attention, norm, other_norms)
RUNS += (embeddings, feed_forward, gated_feed_forward, loss)


def every_op(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    """Code that a compiler makes reads every result and every gradient."""
    t = {name: each.sin() if each.is_floating_point() else each for name, each in t.items()}
    return [out.sin() for run in RUNS for out in run(t, dropout_p, **how)]


def layer(t: dict[str, Tensor], dropout_p: float, **how: Any) -> Sequence[Tensor]:
    """Every op that has a gradient, each with the result of the one before. The bias is made from its parameter."""
    (x,) = embeddings(t, dropout_p, **how)
    heads = x.unflatten(-1, (H, D // H)).transpose(1, 2)
    out = fastattn.scaled_dot_product_attention(heads, heads, heads, t["attn_bias"].sin(), dropout_p, **how)
    parameters = {"weight": t["weight"], "bias": t["bias"], "dropout_p": dropout_p}
    x = fastattn.dropout_add_layer_norm(out.transpose(1, 2).flatten(2), x, **parameters, **how)
    (x,) = feed_forward({**t, "x": x}, dropout_p, **how)
    return loss({**t, "x": x}, dropout_p, **how)


def results(
    run: Run, given: dict[str, Tensor], layout: Layout, dropout_p: float, backend: str | None = None
) -> list[Tensor]:
    """What run returns, and the gradients, for all results and for the first alone. All tensors have this layout."""
    t = {name: layout(each.detach()) for name, each in given.items()}
    leaves = [each.requires_grad_() for name, each in t.items() if each.is_floating_point() and name != "table"]
    outputs = run(t, dropout_p, backend=backend)
    found = [out.detach() for out in outputs]
    outputs = [out for out in outputs if out.requires_grad]
    douts = [layout(out.detach().sin()) if out.dim() > 0 else torch.ones_like(out) for out in outputs]
    for some in (slice(None), slice(1)) if outputs else ():
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        found += torch.autograd.grad(outputs[some], leaves, douts[some], **options)
    return found


class FakesCompared(TorchDispatchMode):
    """Calls each of fastattn's operators with fake tensors too. AssertionError where shape, dtype or strides differ."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = func(*args, **(kwargs or {}))
        if func.namespace == "fastattn":
            self.called.add(func._opname)
            with FakeTensorMode() as mode:
                fake = func(*tree_map_only(Tensor, mode.from_tensor, args))
            for n, (f, r) in enumerate(zip(tree_leaves(fake), tree_leaves(real), strict=True)):
                assert (f.shape, f.dtype, strides(f)) == (r.shape, r.dtype, strides(r)), f"{func}, output {n}"
        return real


def strides(t: Tensor) -> list[int]:
    """Those that tell where an element is."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1 and t.numel() > 0]


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.full if b == "triton" else ()) for b in KERNELS]
)  # the fakes are shared, and the interpreter takes eight times as long
def test_fakes_have_the_layout_of_results(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every operator that is traced, forward and backward. Inductor reads memory as a fake says."""
    given = tensors(device)
    if reason := unsupported_reason("attention", backend, (given["q"], given["k"], given["v"], None, 0.0)):
        pytest.skip(reason)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # the ops take their operators
    fakes = FakesCompared()
    for layout in LAYOUTS:
        for run in RUNS:
            with fakes:
                results(run, given, layout, 0.3, backend)
    defined = {
        name.removeprefix("fastattn::") for name in torch._C._dispatch_get_all_op_names() if "fastattn::" in name
    }
    assert fakes.called == defined


@pytest.mark.parametrize(
    "run, backend",
    [
        (layer, "triton"),
        *(pytest.param(every_op, b, marks=pytest.mark.full) for b in (*KERNELS, "aten")),
    ],
)
def test_inductor(run: Run, backend: str, device: torch.device) -> None:
    """Compiled by PyTorch's default compiler, forward and backward: the numbers of eager."""
    if device.type == "cpu" and shutil.which(emulator_build.CXX) is None:
        pytest.skip(f"Inductor needs a C++ compiler: {emulator_build.CXX} is not on PATH")
    given = tensors(device)
    if reason := unsupported_reason("attention", backend, (given["q"], given["k"], given["v"], None, 0.0)):
        pytest.skip(reason)
    dropout_p = 0.0 if backend == "aten" else 0.3  # compiled, aten drops by the compiler's generator
    found = []
    # Seeds are drawn as in eager; and graphs that are kept on disk know nothing of a fake that has changed.
    options = torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False)
    with options, torch._functorch.config.patch(enable_autograd_cache=False):
        for call in (torch.compile(run, fullgraph=True), run):
            torch.manual_seed(1)
            found.append(results(call, given, reversed_dims, dropout_p, backend))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
