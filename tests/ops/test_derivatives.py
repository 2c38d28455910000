"""Second derivatives of every op in every backend, and the transforms of torch.func and forward mode over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import AttentionMask, explain, use_backend
from fastattn.backends import BACKENDS

Call = Callable[..., Any]


def attention(
    mask: dict[str, Any] | None = None, Hk: int = 2, B: int = 2, **options: Any
) -> tuple[Call, tuple[Tensor, ...]]:
    shapes = ((B, 2, 8, 16), (B, Hk, 8, 16), (B, Hk, 8, 16))
    biased = (mask or {}).get("bias") is not None
    mask = {name: t for name, t in (mask or {}).items() if name != "bias"}
    if biased:
        shapes += ((1, 2, 1, 8),)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Any:
        there = {name: t.to(q.device) if isinstance(t, Tensor) else t for name, t in mask.items()}
        given = AttentionMask(bias=bias, **there) if mask or biased else None
        return fastattn.scaled_dot_product_attention(q, k, v, given, enable_gqa=Hk != 2, **options)

    return call, shapes


PADDING = torch.arange(8) < torch.tensor([[8], [5]])
TOKENS = torch.tensor([[3, 0, 2, 5], [1, 1, 4, 2]])
TARGET = torch.tensor([3, 0, -100, 6, 1, 2])


def feed_forward(activation: str, **options: Any) -> tuple[Call, tuple[tuple[int, ...], ...]]:
    rows = 32 if activation == "swiglu" else 16
    shapes = ((2, 3, 16), (rows, 16), (rows,), (16, 16), (16,))
    return lambda *tensors: fastattn.feed_forward(*tensors, activation, **options), shapes


def loss(**options: Any) -> tuple[Call, tuple[tuple[int, ...], ...]]:
    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fastattn.linear_cross_entropy(x, weight, TARGET.to(x.device), bias, **options)

    return call, ((6, 16), (9, 16), (9,))


def embed(position: Tensor | None = None, **options: Any) -> tuple[Call, tuple[tuple[int, ...], ...]]:
    def call(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        table = torch.linspace(-1, 1, 5 * 16, dtype=embedding.dtype, device=embedding.device).view(5, 16)
        tokens, places = (None if t is None else t.to(embedding.device) for t in (TOKENS, position))
        return fastattn.embed_layer_norm(tokens, embedding, table, weight, bias, position=places, **options)

    return call, ((6, 16), (16,), (16,))


def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor, **options: Any) -> Any:
    return fastattn.dropout_add_layer_norm(x, residual, weight, bias, x_bias=x_bias, **options)


ROWS, WIDTH = (2, 3, 16), (16,)
# The op's call, and the shapes of the tensors that get a gradient.
OPS: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]] = {
    "attention": attention(),
    "attention causal": attention(is_causal=True),
    "attention padded": attention({"key_padding": PADDING}),
    "attention grouped": attention({"key_padding": PADDING}, Hk=1),
    "attention packed": attention({"cu_seqlens_q": torch.tensor([0, 3, 8]), "is_causal": True}, B=1),
    "attention bias, lse": attention({"key_padding": PADDING, "bias": True}, return_lse=True),
    "attention grouped, dropout": attention({"is_causal": True}, Hk=1, dropout_p=0.3),
    "norm": (norm, (ROWS, ROWS, WIDTH, WIDTH, WIDTH)),
    "norm with sum and dropout": (
        lambda *tensors: norm(*tensors, return_sum=True, dropout_p=0.4), (ROWS, ROWS, WIDTH, WIDTH, WIDTH)
    ),
    "norm by std": (lambda *tensors: norm(*tensors, eps_on_std=True), (ROWS, ROWS, WIDTH, WIDTH, WIDTH)),
    "rms norm": (
        lambda x, weight: fastattn.dropout_add_rms_norm(x, None, weight, dropout_p=0.2), (ROWS, WIDTH)
    ),
    "feed-forward": feed_forward("gelu"),
    "feed-forward made again": feed_forward("relu", recompute=True),
    "feed-forward gated": feed_forward("swiglu", dropout_p=0.3, recompute=True),
    "loss": loss(label_smoothing=0.1),
    "loss of each": loss(reduction="none", logit_scale=0.5),
    "embeddings": embed(scale=4.0, padding_idx=0),
    "embeddings placed": embed(position=torch.tensor([[4, 0, 1, 2], [1, 1, 3, 0]]), dropout_p=0.3),
}  # fmt: skip
EVERYDAY = ("attention grouped", "attention packed", "attention bias, lse", "attention grouped, dropout", "norm",
            "norm with sum and dropout", "feed-forward gated", "loss", "embeddings placed")  # fmt: skip
EVERY_OP = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.full) for n in OPS]
)


def inputs_of(shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def scalar(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Something whose derivatives have no zeros by chance."""
    results = (results,) if isinstance(results, Tensor) else results
    return sum((r * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype, device=r.device).view(r.shape)).sin().sum()
               for r in results)  # fmt: skip


def called(name: str, backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The results of an op, and its inputs. Equal seeds draw equal dropout. Skips where the backend cannot serve."""
    call, shapes = OPS[name]
    inputs = inputs_of(shapes, device, dtype)
    torch.manual_seed(5)
    with use_backend(backend):
        try:
            return call(*inputs), inputs
        except RuntimeError as refused:
            pytest.skip(str(refused))


def second_derivatives(results: Any, inputs: list[Tensor]) -> tuple[Any, ...]:
    """First derivatives, those of the sum of their squares, and the same of the first input's derivative alone."""
    first = torch.autograd.grad(scalar(results), inputs, create_graph=True)
    (alone,) = torch.autograd.grad(scalar(results), inputs[:1], create_graph=True)
    sums = sum(g.double().square().sum() for g in first), alone.double().square().sum()
    return first, *(torch.autograd.grad(s, inputs, allow_unused=True, retain_graph=True) for s in sums)


@EVERY_OP
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_second_derivatives(backend: str, name: str, device: torch.device) -> None:
    if device.type == "cuda" and backend == "aten" and name.startswith("attention") and "lse" not in name:
        pytest.skip("PyTorch's fused attention has no second derivative on a GPU")
    results, inputs = called(name, backend, device)
    found = second_derivatives(results, inputs)
    truth = second_derivatives(*called(name, "reference", device, torch.float64))
    for order, actual, expected in zip(("first", "second", "second of one"), found, truth, strict=True):
        for t, a, e in zip(range(len(inputs)), actual, expected, strict=True):
            e = torch.zeros_like(inputs[t]) if e is None else e
            a = torch.zeros_like(e) if a is None else a
            assert (a - e).norm() <= 2e-4 * e.norm() + 1e-6, f"{order} derivative of input {t}"


@EVERY_OP
@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_gradients(backend: str, name: str, device: torch.device) -> None:
    """is_grads_batched=True, which jacobian(vectorize=True) uses, equals one gradient at a time."""
    results, inputs = called(name, backend, device)
    results = (results,) if isinstance(results, Tensor) else results
    several = [torch.randn(3, *r.shape, device=device) for r in results]
    if (backend, name) == ("aten", "feed-forward gated"):  # its backward draws the dropout again
        with pytest.raises(RuntimeError, match="random operations inside of vmap"):
            torch.autograd.grad(results, inputs, several, is_grads_batched=True)
        return
    batched = torch.autograd.grad(results, inputs, several, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        one = torch.autograd.grad(results, inputs, [d[n] for d in several], retain_graph=True)
        for got, want in zip(batched, one, strict=True):
            torch.testing.assert_close(got[n], want, rtol=1e-4, atol=1e-5)


@EVERY_OP
@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing(backend: str, name: str, device: torch.device) -> None:
    """As PyTorch recommends it, without reentry: what is saved may be asked for once."""
    results, inputs = called(name, backend, device)
    expected = torch.autograd.grad(scalar(results), inputs)
    torch.manual_seed(5)
    with use_backend(backend):
        again = checkpoint(OPS[name][0], *inputs, use_reentrant=False)
        gradients = torch.autograd.grad(scalar(again), inputs)
    for got, want in zip(gradients, expected, strict=True):
        assert torch.equal(got, want)


@EVERY_OP
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_callers(backend: str, name: str, device: torch.device) -> None:
    """Changed in place between backwards of one graph, as by clipping; no two of them share memory."""
    results, inputs = called(name, backend, device)
    total = sum(r.sum() for r in ((results,) if isinstance(results, Tensor) else results))
    found = []
    for _ in range(3):
        total.backward(retain_graph=True)
        found.append([t.grad.clone() for t in inputs])
        for t in inputs:
            t.grad.zero_()
    for name_of, grads in zip(("second", "third"), found[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[0], grads, strict=True)), name_of
    assert len({t.grad.untyped_storage().data_ptr() for t in inputs}) == len(inputs)


def test_derivatives_of_a_call_inside_of_others() -> None:
    """Inputs that were made of one another and of views: the second derivative goes through all of it."""
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        q = (x @ weight).view(2, 5, 2, 8).transpose(1, 2)
        k = torch.tanh(q) * 2
        out = fastattn.scaled_dot_product_attention(q, k, k + q, is_causal=True, dropout_p=0.0)
        return fastattn.dropout_add_layer_norm(out, q, weight[0, :8], weight[1, :8])

    assert torch.autograd.gradgradcheck(call, (x, weight))


@pytest.mark.parametrize("name", [n for n in OPS if "dropout" not in n and "gated" not in n and "placed" not in n])
def test_transforms(name: str) -> None:
    """torch.func over an op, against plain autograd in float64: grad, jvp, vmap(grad), the Hessian."""
    call, shapes = OPS[name]
    if name == "rms norm":
        call = lambda x, weight: fastattn.dropout_add_rms_norm(x, None, weight)  # noqa: E731
    inputs = inputs_of(shapes, torch.device("cpu"), torch.float64)
    plain = [t.detach() for t in inputs]

    def objective(*tensors: Tensor) -> Tensor:
        return scalar(call(*tensors))

    expected = torch.autograd.grad(objective(*inputs), inputs)
    for got, want in zip(grad(objective, tuple(range(len(plain))))(*plain), expected, strict=True):
        torch.testing.assert_close(got, want)

    tangents = tuple(torch.randn_like(t) for t in plain)
    if name == "embeddings":
        tangents[0][0] = 0  # padding_idx, which has no gradient
    slope = sum((g * t).sum() for g, t in zip(expected, tangents, strict=True))
    torch.testing.assert_close(jvp(objective, tuple(plain), tangents)[1], slope)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(plain, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(objective(*duals)).tangent, slope)

    several = torch.stack([plain[0], plain[0].flip(0), plain[0] * 0.5])
    of_each = vmap(grad(objective), (0, *(None,) * (len(plain) - 1)))(several, *plain[1:])
    for one, got in zip(several, of_each, strict=True):
        torch.testing.assert_close(got, grad(objective)(one, *plain[1:]))

    torch.testing.assert_close(
        hessian(objective, len(plain) - 1)(*plain), jacrev(grad(objective, len(plain) - 1), len(plain) - 1)(*plain)
    )


def test_transforms_say_which_backend_serves_them() -> None:
    q = torch.randn(1, 2, 4, 8)
    said = []

    def objective(q: Tensor) -> Tensor:
        said.append(explain("attention", q, q, q))
        with pytest.raises(RuntimeError, match="need the backend reference"):
            fastattn.scaled_dot_product_attention(q, q, q, backend="aten")
        return fastattn.scaled_dot_product_attention(q, q, q).sum()

    grad(objective)(q)
    assert said[0].chosen == "reference" and "torch.func" in said[0].refusals["aten"]
    assert explain("attention", q, q, q).chosen == "aten"


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness: str) -> None:
    """Each sample draws its own dropout, or all the same, as vmap was asked."""
    x, one = torch.ones(3, 4, 32), torch.ones(32)

    def call(x: Tensor) -> Tensor:
        return fastattn.dropout_add_rms_norm(x, None, one, dropout_p=0.5)

    dropped = vmap(call, randomness=randomness)(x) == 0
    assert 0.3 < dropped.float().mean() < 0.7
    assert torch.equal(dropped[0], dropped[1]) == (randomness == "same")


def test_a_mask_made_before_is_not_changed_by_a_transform() -> None:
    mask = AttentionMask(key_padding=PADDING)
    q = torch.randn(2, 2, 8, 16)

    def objective(q: Tensor) -> Tensor:
        return fastattn.scaled_dot_product_attention(q, q, q, mask).square().sum()

    gradient = grad(objective)(q)
    leaf = q.clone().requires_grad_()
    objective(leaf).backward()
    torch.testing.assert_close(gradient, leaf.grad)


def test_per_sample_gradients_of_a_model() -> None:
    """vmap(grad) through functional_call equals one backward a sentence."""
    torch.manual_seed(0)
    options = dict(d_word_vec=16, d_model=16, d_inner=32, n_layers=1, n_head=2, d_k=8, d_v=8, n_position=20)
    model = fastattn.FusedTransformer(20, 20, 0, 0, **options).eval()
    src, trg, gold = (torch.randint(1, 20, (3, 6)) for _ in range(3))
    src[1, 4:], gold[2, 3:] = 0, 0
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def objective(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return functional_call(model, parameters, tuple(t[None] for t in sample), {"label_smoothing": 0.1})

    of_each = vmap(grad(objective), (None, 0, 0, 0))(parameters, src, trg, gold)
    for n in range(3):
        model.zero_grad()
        model.loss(src[n : n + 1], trg[n : n + 1], gold[n : n + 1], 0.1).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(of_each[name][n], p.grad, rtol=1e-4, atol=1e-6)


def test_batches_of_gradients_through_a_model() -> None:
    """With packing, and products of several projections at once."""
    torch.manual_seed(0)
    options = dict(d_word_vec=16, d_model=16, d_inner=32, n_layers=1, n_head=2, d_k=8, d_v=8, n_position=20)
    model = fastattn.FusedTransformer(20, 20, 0, 0, **options, pack_padding=True)
    src, trg, gold = (torch.randint(1, 20, (4, 8)) for _ in range(3))
    for t in (src, trg, gold):
        t[1:, 4:] = 0
    weights = list(model.parameters())
    value = model.loss(src, trg, gold)
    batched = torch.autograd.grad(value, weights, torch.tensor([1.0, -2.0]), is_grads_batched=True, retain_graph=True)
    for got, want in zip(batched, torch.autograd.grad(value, weights), strict=True):
        torch.testing.assert_close(got, torch.stack((want, -2 * want)), rtol=1e-4, atol=1e-6)


def test_a_gradient_penalty_through_a_model() -> None:
    """Second derivatives of the default path, with padding, dropout and packing: those of the plain formula."""
    torch.manual_seed(0)
    options = dict(d_word_vec=16, d_model=16, d_inner=32, n_layers=1, n_head=2, d_k=8, d_v=8, n_position=20)
    model = fastattn.FusedTransformer(20, 20, 0, 0, **options)
    src, trg, gold = (torch.randint(1, 20, (4, 8)) for _ in range(3))
    for t in (src, trg, gold):
        t[1:, 4:] = 0
    found = []
    for backend in (None, "reference"):
        torch.manual_seed(1)
        with use_backend(backend):
            value = model(src, trg, gold)
            weights = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(value, weights, create_graph=True)
            penalty = sum(F.mse_loss(g, torch.zeros_like(g)) for g in gradients)
            found.append(torch.autograd.grad(value + penalty, weights))
    # Dropout counts packed positions where it packs, so the comparison is made without it.
    assert all(torch.isfinite(g).all() for g in found[0])
    model.eval()
    found.clear()
    for backend in (None, "reference"):
        with use_backend(backend):
            value = model(src, trg, gold)
            gradients = torch.autograd.grad(value, weights, create_graph=True)
            found.append(torch.autograd.grad(value + sum(g.square().sum() for g in gradients), weights))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm()
