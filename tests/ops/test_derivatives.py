"""Second derivatives, where an op has them, and the transforms of torch.func and forward mode."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from small_calls import EVERY_OP, OPS, PADDING, call_of, inputs_of, random_tensors, run, scalar
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import AttentionMask, explain, use_backend
from fastattn.backends import BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def called(
    name: str, backend: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The results of an op, and its inputs."""
    inputs = inputs_of(name, device, dtype)
    return run(name, backend, inputs), inputs


def second_derivatives(results: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Any, ...]:
    """First derivatives, those of the sum of their squares, and the same of the first input's derivative alone."""
    first = torch.autograd.grad(scalar(results), inputs, create_graph=True)
    (alone,) = torch.autograd.grad(scalar(results), inputs[:1], create_graph=True)
    sums = sum(g.double().square().sum() for g in first), alone.double().square().sum()
    return first, *(torch.autograd.grad(s, inputs, allow_unused=True, retain_graph=True) for s in sums)


def is_recorded(backend: str, name: str) -> bool:
    """Whether the op is operators of PyTorch alone whose backward autograd records."""
    if backend != "aten":
        return backend == "reference"
    return not name.startswith(("attention", "loss")) or "lse" in name


# A backward of fused operators names the remedy. PyTorch's fused attention names itself.
REFUSED = r'within fastattn\.use_backend\("reference"\)|flash_attention_for_cpu_backward is not implemented'


@pytest.mark.few(12)
@EVERY_OP
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_second_derivatives(backend: str, name: str, device: torch.device) -> None:
    """Those of the reference, or an error."""
    results, inputs = called(name, backend, device)
    if not is_recorded(backend, name):
        with pytest.raises(RuntimeError, match=REFUSED):
            second_derivatives(results, inputs)
        return
    found = second_derivatives(results, inputs)
    truth = second_derivatives(*called(name, "reference", device, torch.float64))
    for order, actual, expected in zip(("first", "second", "second of one"), found, truth, strict=True):
        for t, a, e in zip(range(len(inputs)), actual, expected, strict=True):
            e = torch.zeros_like(inputs[t]) if e is None else e
            a = torch.zeros_like(e) if a is None else a
            assert (a - e).norm() <= 2e-4 * e.norm() + 1e-6, f"{order} derivative of input {t}"


@pytest.mark.few(12)
@EVERY_OP
@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_gradients(backend: str, name: str, device: torch.device) -> None:
    """is_grads_batched=True, which jacobian(vectorize=True) uses, equals one gradient at a time, or is an error."""
    results, inputs = called(name, backend, device)
    several = [torch.randn(3, *r.shape, device=device) for r in results]
    by_pytorch = backend == "aten" and name.startswith("attention") and "dropout" not in name and "packed" not in name
    if not (is_recorded(backend, name) or by_pytorch):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(results, inputs, several, is_grads_batched=True)
        return
    batched = torch.autograd.grad(results, inputs, several, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        one = torch.autograd.grad(results, inputs, [d[n] for d in several], retain_graph=True)
        for got, want in zip(batched, one, strict=True):
            torch.testing.assert_close(got[n], want, rtol=1e-4, atol=1e-5)


@pytest.mark.few(8)
@pytest.mark.bug_class("T15")
@EVERY_OP
@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing(
    backend: str, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recomputed forward draws the same dropout. Without reentry saved tensors can be read only once."""
    results, inputs = called(name, backend, device)
    expected = torch.autograd.grad(scalar(results), inputs)
    monkeypatch.setenv("FASTATTN_BACKEND", backend)  # a GPU's backward is in a thread that use_backend does not reach
    for use_reentrant in (False, True):
        torch.manual_seed(5)
        scalar(checkpoint(call_of(name), *inputs, use_reentrant=use_reentrant)).backward()
        for t, want in zip(inputs, expected, strict=True):
            assert torch.equal(t.grad, want)
            t.grad = None


@pytest.mark.few(8)
@pytest.mark.bug_class("T2", "T8", "T19")
@EVERY_OP
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_callers(backend: str, name: str, device: torch.device) -> None:
    """They may be changed in place between backwards of one graph, as by clipping. No two of them share memory, and no
    kernel writes into an input or a result."""
    results, inputs = called(name, backend, device)
    before = [t.detach().clone() for t in (*inputs, *results)]
    total = sum(r.sum() for r in results)
    found = []
    for _ in range(3):
        total.backward(retain_graph=True)
        found.append([t.grad.clone() for t in inputs])
        for t in inputs:
            t.grad.zero_()
    for name_of, grads in zip(("second", "third"), found[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[0], grads, strict=True)), name_of
    assert len({t.grad.untyped_storage().data_ptr() for t in inputs}) == len(inputs)
    assert all(torch.equal(t, b) for t, b in zip((*inputs, *results), before, strict=True))


# What leaves the first query of some sentences nothing.
NO_KEY: dict[str, Callable[[Tensor], AttentionMask]] = {
    "padding before the tokens": lambda t: AttentionMask(key_padding=(t > 0).expand(2, -1), is_causal=True),
    "a bool matrix": lambda t: AttentionMask((t > 0)[:, None].expand(-1, len(t)), is_causal=True),
    "a bias of -inf": lambda t: AttentionMask(
        bias=torch.zeros_like(t)[:, None].masked_fill(t[:, None] == 0, -torch.inf)
    ),
}


@pytest.mark.bug_class("T9")
@pytest.mark.parametrize("length", [2, 20, pytest.param(150, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", NO_KEY)
def test_second_derivatives_where_a_query_sees_no_key(kind: str, length: int) -> None:
    """The reference has them, by create_graph=True and by a batch of gradients: no NaN."""
    mask = NO_KEY[kind](torch.arange(length, dtype=torch.float64))
    inputs = random_tensors(((2, 1, length, 8),) * 3, torch.device("cpu"), torch.float64)
    out = fastattn.scaled_dot_product_attention(*inputs, mask, backend="reference")
    derivatives = second_derivatives((out,), inputs)
    batched = torch.autograd.grad(out, inputs, torch.ones(2, *out.shape), is_grads_batched=True)
    assert all(t.isfinite().all() for t in (*chain(*derivatives), *batched))


def test_derivatives_of_a_call_inside_of_others() -> None:
    """Inputs that were made of one another and of views: the second derivative goes through all of it."""
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        q = (x @ weight).view(2, 5, 2, 8).transpose(1, 2)
        k = torch.tanh(q) * 2
        out = fastattn.scaled_dot_product_attention(q, k, k + q, is_causal=True, dropout_p=0.0)
        return fastattn.dropout_add_layer_norm(out, q, weight[0, :8], weight[1, :8])

    with use_backend("reference"):
        assert torch.autograd.gradgradcheck(call, (x, weight))


@pytest.mark.parametrize("name", [n for n in OPS if "dropout" not in n and "gated" not in n and "placed" not in n])
def test_transforms(name: str) -> None:
    """torch.func over an op, against plain autograd in float64: grad, jvp, vmap(grad), the Hessian."""
    inputs = inputs_of(name, torch.device("cpu"), torch.float64)
    plain = [t.detach() for t in inputs]
    without_dropout = call_of(name, **({"dropout_p": 0.0} if name == "rms norm" else {}))

    def objective(*tensors: Tensor) -> Tensor:
        return scalar(without_dropout(*tensors))

    expected = torch.autograd.grad(objective(*inputs), inputs)
    for got, want in zip(grad(objective, tuple(range(len(plain))))(*plain), expected, strict=True):
        torch.testing.assert_close(got, want)

    tangents = tuple(torch.randn_like(t) for t in plain)
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


def test_transforms_use_the_reference() -> None:
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
    """Each sample draws its own dropout, or all the same, by vmap's randomness."""
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


def small_model(**options: Any) -> fastattn.FusedTransformer:
    torch.manual_seed(0)
    sizes = dict(d_word_vec=16, d_model=16, d_inner=32, n_layers=1, n_head=2, d_k=8, d_v=8, n_position=20)
    return fastattn.FusedTransformer(20, 20, 0, 0, **sizes, **options)


def padded_batch() -> list[Tensor]:
    """src, trg and gold, of which only the first sentence fills its row."""
    batch = [torch.randint(1, 20, (4, 8)) for _ in range(3)]
    for t in batch:
        t[1:, 4:] = 0
    return batch


def test_per_sample_gradients_of_a_model() -> None:
    """vmap(grad) through functional_call equals one backward a sentence."""
    model = small_model().eval()
    src, trg, gold = (torch.randint(1, 20, (3, 6)) for _ in range(3))
    src[1, 4:], gold[2, 3:] = 0, 0
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def objective(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return functional_call(model, parameters, tuple(t[None] for t in sample), {"label_smoothing": 0.1})

    each = vmap(grad(objective), (None, 0, 0, 0))(parameters, src, trg, gold)
    for n in range(3):
        model.zero_grad()
        model.loss(src[n : n + 1], trg[n : n + 1], gold[n : n + 1], 0.1).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(each[name][n], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pack_padding", [False, True])
def test_batches_of_gradients_through_a_model(pack_padding: bool) -> None:
    """With dropout, and products of several projections at once."""
    model = small_model(pack_padding=pack_padding)
    with use_backend("reference"):
        weights, value = list(model.parameters()), model.loss(*padded_batch())
    batched = torch.autograd.grad(value, weights, torch.tensor([1.0, -2.0]), is_grads_batched=True, retain_graph=True)
    for got, want in zip(batched, torch.autograd.grad(value, weights), strict=True):
        torch.testing.assert_close(got, torch.stack((want, -2 * want)), rtol=1e-4, atol=1e-6)


def test_a_gradient_penalty_through_a_model() -> None:
    """By the reference: its gradient is the slope of the penalty. The default path raises."""
    model, batch = small_model().double().eval(), padded_batch()
    weights = list(model.parameters())
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(model.loss(*batch), weights, create_graph=True)

    def penalty() -> Tensor:
        with use_backend("reference"):
            value = model.loss(*batch)
            return value + sum(g.square().sum() for g in torch.autograd.grad(value, weights, create_graph=True))

    gradients, step = torch.autograd.grad(penalty(), weights), 1e-6
    directions = [torch.randn_like(w) for w in weights]
    values = []
    for factor in (step, -2 * step):
        with torch.no_grad():
            for w, direction in zip(weights, directions, strict=True):
                w.add_(direction, alpha=factor)
        values.append(penalty().detach())
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    torch.testing.assert_close((values[0] - values[1]) / (2 * step), slope, rtol=1e-5, atol=0)
