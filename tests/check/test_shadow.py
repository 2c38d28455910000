"""fastattn.shadow: it changes nothing, finds planted faults, and names where they are."""

import copy
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fastattn
from fastattn import accelerate, shadow, use_backend
from fastattn.backends import load_backend

SIZES = dict(n_layers=1, d_model=32, d_word_vec=32, d_inner=48, n_head=2, d_k=16, d_v=16)
VARIANTS = {
    "post-norm": {},
    "pre-norm, autocast": dict(norm_first=True, activation="swiglu", n_head_kv=1),
    "packed": dict(pack_padding=True),
}


def transformer(**options):
    torch.manual_seed(3)
    return fastattn.FusedTransformer(30, 30, 0, 0, **SIZES, **options)


def repeatable(backend, device):
    """Options of a model whose dropout shadow can repeat. PyTorch's on a GPU it cannot."""
    return {"dropout": 0.0, "attn_dropout": 0.0} if (backend, device.type) == ("aten", "cuda") else {}


def make_batch(device):
    generator = torch.Generator().manual_seed(4)
    src, trg = (torch.randint(1, 30, (3, length), generator=generator) for length in (9, 7))
    src[1, 5:], trg[2, 4:] = 0, 0
    gold = torch.nn.functional.pad(trg[:, 1:], (0, 1))
    return src.to(device), trg.to(device), gold.to(device)


def train(model, every=1, autocast=False, loss=lambda model, batch: model(*batch, 0.1)):
    """One step. The loss, the weights, the next random number, and the Shadow, unless every is None."""
    torch.manual_seed(5)
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), make_batch(next(model.parameters()).device)
    with shadow(model, every) if every else nullcontext() as watch:
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=autocast):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
    return [value.detach(), *(p.detach() for p in model.parameters()), torch.rand(1)], watch


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["aten", pytest.param("triton", marks=pytest.mark.full)])
def test_a_run_stays_as_it_was(backend, variant, device):
    model = transformer(backend=backend, **VARIANTS[variant], **repeatable(backend, device)).to(device)
    options = {"autocast": "autocast" in variant}
    expected, _ = train(copy.deepcopy(model), every=None, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "step", RuntimeWarning)
        actual, watch = train(model, **options)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not watch.deviations and not watch.skipped
    # Three attentions, five norms that follow sublayers, two feed-forwards, two embeddings or their norms, one loss.
    assert watch.comparisons >= 11


def layer(x, weight1, weight2, norm):
    """Three ops, with dropout, of x (12, 16)."""
    x = fastattn.feed_forward(x, weight1, None, weight2, None, dropout_p=0.2)
    x = fastattn.dropout_add_layer_norm(x, x, norm, norm, dropout_p=0.1)
    return attend(x, dropout_p=0.3).view(x.shape)


def attend(x, mask=None, **options):
    return fastattn.scaled_dot_product_attention(*[x.view(1, 1, *x.shape)] * 3, mask, **options)


def changes_an_input(x, weight1, weight2, norm):
    added = x * 2
    out = fastattn.dropout_add_layer_norm(x * 3, added, norm, norm)
    return out, added.mul_(5)


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.bmm.default])


def checkpointed(*tensors, **options):
    """Of more calls than are compared, these are not the same when they are computed again."""
    return checkpoint(
        lambda x, *others: tuple(x := layer(x, *others) for _ in range(6)), *tensors, use_reentrant=False, **options
    )


PROGRAMS = {
    "changes an input": changes_an_input,
    "returns weights": lambda x, *_: attend(x, return_weights=True, dropout_p=0.3),
    "checkpoint": checkpointed,
    "selective checkpoint": partial(checkpointed, context_fn=selective),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("backend", ["aten", pytest.param("triton", marks=pytest.mark.full)])
def test_a_program_stays_as_it_was(program, backend, device, monkeypatch):
    """Its results, gradients and random numbers: whatever it does with results, masks and autograd."""
    monkeypatch.setenv("FASTATTN_BACKEND", backend)  # a GPU's backward, which checkpoints, is in another thread
    runs, model = [], nn.Linear(1, 1)
    for context in (nullcontext, lambda: shadow(model, 1)):
        torch.manual_seed(6)
        sizes = (12, 16), (24, 16), (16, 24), (16,)
        tensors = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
        with context() as watch:
            results = torch.utils._pytree.tree_leaves(PROGRAMS[program](*tensors))
            sum(r.square().sum() for r in results if r.requires_grad).backward()
        runs.append([r.detach() for r in results] + [t.grad for t in tensors if t.grad is not None] + [torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not watch.deviations and watch.comparisons + watch.skipped.total()


def wrong_value(t):
    return t * 1.01


def wrong_gradient(t):
    return t + (t * 0.01 - (t * 0.01).detach())


def changed(function, change):
    """function, whose first result is changed."""

    def run(*args, **options):
        result = function(*args, **options)
        return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

    return run


@pytest.mark.parametrize(
    ("backend", "op", "function", "change", "layer", "result"),
    [
        ("aten", "attention", "attend_rows", wrong_value, "enc_attn", "out"),
        ("aten", "attention", "attend_rows", wrong_gradient, "enc_attn", "the gradient of projected"),
        ("aten", "linear_cross_entropy", "linear_cross_entropy_fwd", wrong_value, "src_word_emb", "out"),
        pytest.param(
            *("triton", "add_layer_norm", "add_layer_norm_bwd", wrong_value, "slf_attn.layer_norm"),
            "the gradient of x",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_fault_is_found_and_named(backend, op, function, change, layer, result, device, monkeypatch):
    module = load_backend(op, backend)
    monkeypatch.setattr(module, function, changed(getattr(module, function), change))
    model = transformer(backend=backend, **repeatable(backend, device)).to(device)
    with pytest.warns(RuntimeWarning, match=f"step 0, .*{layer}.*{op} \\({backend}, float32\\).*{result}"):
        _, watch = train(model)
    found = [d for d in watch.deviations if layer in d.layer and d.result == result]
    assert found and all(d.error > d.bound and d.op == op and d.backend == backend for d in found)
    assert str(found[0]) in str(watch)


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.weight
        return fastattn.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.2)


def test_steps_and_calls_that_are_compared():
    """One step in `every`, of each op of a layer the first four calls; then nothing is looked at. A step is one of an
    optimizer that has parameters of the model, or is named."""
    x, model = torch.randn(2, 5, 8), Core()
    own, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, nn.Linear(1, 1)))
    with shadow(model, 2) as watch:
        for compared in (4, 4, 8, 8):
            sum(model(x).sum() for _ in range(6)).backward()
            assert watch.comparisons == compared
            own.step()
            other.step()
    assert watch.steps == 4
    with shadow(model, 2) as watch, torch.no_grad():
        for _ in range(3):
            model(x)
            watch.step()
    assert watch.comparisons == 2 and not watch.deviations


def test_names_in_accelerated_and_own_models(monkeypatch):
    layers = [nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers, Core())
    accelerate(model)

    def loss(model, batch):
        return model(torch.randn(5, 60, 8)).square().mean()

    assert not train(model, loss=loss)[1].deviations
    attention, norm = load_backend("attention", "aten"), load_backend("add_layer_norm", "aten")
    monkeypatch.setattr(attention, "attention", changed(attention.attention, wrong_value))
    monkeypatch.setattr(norm, "add_layer_norm", changed(norm.add_layer_norm, wrong_value))
    with pytest.warns(RuntimeWarning, match="step 0"), use_backend("aten"):
        _, watch = train(model, loss=loss)
    assert {"2", "0.norm1", "1.norm2"} <= {deviation.layer for deviation in watch.deviations}


@pytest.mark.parametrize("distance", [4e-6, 1e-3])
def test_a_relu_near_zero_may_be_on_or_off(distance, monkeypatch):
    """Its gradient is then one of two numbers, and both are right. A fault at some distance is found."""
    op = load_backend("feed_forward", "aten")
    right = op.feed_forward

    def wrong(x, weight1, bias1, *others):
        return right(x, weight1, bias1 + 2 * distance, *others)

    monkeypatch.setattr(op, "feed_forward", wrong)
    x, weight1 = torch.randn(64, 32), torch.randn(96, 32)
    # The hidden units of row 0 are `distance` below 0, in float32 too; `wrong` moves them as far above.
    bias1 = -(x[0].double() @ weight1.double().T).float() - distance
    tensors = [t.requires_grad_() for t in (x, weight1, bias1, torch.randn(16, 96), torch.randn(16))]
    is_fault = distance == 1e-3
    with shadow(nn.Linear(1, 1)) as watch, pytest.warns(RuntimeWarning) if is_fault else nullcontext():
        fastattn.feed_forward(*tensors, "relu").square().sum().backward()
        fastattn.feed_forward(x[:0], *tensors[1:], "relu").sum().backward()
    assert watch.comparisons == 2
    assert ("the gradient of x" in [d.result for d in watch.deviations]) == is_fault
    assert is_fault or not watch.deviations


def test_what_cannot_be_compared_and_wrong_use():
    model, q = nn.Linear(1, 1), torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="another shadow is open"), shadow(model), shadow(model):
        pass
    for _ in range(2):  # nothing is left open
        with pytest.warns(RuntimeWarning, match="compared nothing"), shadow(model) as watch:
            fastattn.scaled_dot_product_attention(q * torch.nan, q, q)
    assert watch.skipped == {"attention: the reference gives NaN": 1} and "the reference gives NaN" in str(watch)
