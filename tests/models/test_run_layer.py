"""Fused sublayers compute what their modules compute op by op, and only unmodified ones are fused."""

import inspect
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from model_checks import DEVICE, NO_DROPOUT, TINY, draw_own_seeds, fused, gold_of, keep_products
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fastattn
from fastattn import AttentionMask, use_backend
from fastattn.backends import load_backend
from fastattn.nn import layers, run_layer, sublayers

VARIANTS = {
    "public": {},
    "beyond": dict(norm_first=True, activation="swiglu", n_head_kv=1),
    "small": dict(d_k=8, d_v=8),
    "small, gated": dict(norm_first=True, activation="geglu", d_k=8, d_v=8),
    "small, packed": dict(pack_padding=True, d_k=8, d_v=8),
    "packed": dict(pack_padding=True, attn_dropout=0.0),
    "no dropout": NO_DROPOUT,
    "pre-norm, no dropout": dict(norm_first=True, **NO_DROPOUT),
}
DROPOUT = dict(dropout=0.2, attn_dropout=0.3)
full = pytest.mark.full


@pytest.fixture
def taken(monkeypatch):
    """Of each layer that ran, in order, whether each of its sublayers was fused."""
    taken, prepare = [], run_layer.prepare

    def prepare_and_note(*arguments):
        calls = prepare(*arguments)
        taken.append([call is not None for call in calls])
        return calls

    monkeypatch.setattr(run_layer, "prepare", prepare_and_note)
    return taken


@pytest.fixture
def nodes(monkeypatch):
    """The backends of the sublayers that became one node."""
    nodes, forward = [], sublayers._Sublayer.forward

    def forward_and_note(ctx, given, *tensors):
        nodes.append(given.call.norm.name)
        return forward(ctx, given, *tensors)

    monkeypatch.setattr(sublayers._Sublayer, "forward", staticmethod(forward_and_note))
    return nodes


def op_by_op(monkeypatch):
    monkeypatch.setattr(layers, "open_plan", lambda *_: None)


ENCODER, DECODER = [True] * 2, [True] * 3  # all sublayers are fused


def step(model, batch, autocast=False):
    """The loss and the gradients of one step."""
    src, trg = batch
    torch.manual_seed(5)
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model.loss(src, trg, gold_of(trg), 0.1)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_as_exact(grads, others, exact):
    error, other_error = (
        sum((found[name] - grad).square().sum() for name, grad in exact.items()) for found in (grads, others)
    )
    assert error <= 2 * other_error


def with_biases(model, names):
    """Biases in these projections, as layers of other libraries have them."""
    for attn in (m for m in model.modules() if isinstance(m, layers.MultiHeadAttention)):
        for name in names:
            linear = getattr(attn, name)
            linear.bias = nn.Parameter(torch.randn(linear.out_features, device=DEVICE))
    return model


WITH_BIASES = ("public", "beyond", "small", "small, gated")
BIASED = ("", "w_qs w_ks w_vs fc", "w_vs")
EVERY_DAY = [  # backend, variant, autocast, maps with a bias
    *(("aten", variant, False, "") for variant in VARIANTS),
    ("aten", "public", True, ""),
    ("aten", "small, gated", True, ""),
    ("aten", "small, packed", True, ""),
    ("aten", "small", False, "w_vs"),
    ("aten", "small", True, "w_vs"),
    ("cuda", "public", True, ""),
    ("cuda", "beyond", False, ""),
]
CASES = [
    pytest.param(*case, marks=() if case in EVERY_DAY else full)
    for case in product(("aten", "triton", "cuda"), VARIANTS, (False, True), BIASED)
    if not case[3] or case[1] in WITH_BIASES
]


@pytest.mark.parametrize(("backend", "variant", "autocast", "biased"), CASES)
def test_same_as_op_by_op(backend, variant, autocast, biased, batch, taken, nodes, request, monkeypatch):
    """Under autocast with as large an error."""
    if backend != "aten":
        request.getfixturevalue(backend)
    n_layers = 2 if backend == "triton" else 1  # the second layer's launches are bound by the first
    # Rounding moves a relu near 0 across it: a large error, and chance.
    given = TINY | DROPOUT | dict(activation="gelu" if autocast else "relu") | VARIANTS[variant]
    model = fused(**given | dict(n_layers=n_layers), backend=backend)
    model = with_biases(model, biased.split())
    loss, grads = step(model, batch, autocast)
    assert taken == [ENCODER] * n_layers + [DECODER] * n_layers
    assert nodes == ([] if backend == "aten" else [backend] * (5 * n_layers))
    op_by_op(monkeypatch)
    same_loss, same_grads = step(model, batch, autocast)
    torch.testing.assert_close(loss, same_loss, rtol=2e-3 if autocast else 1e-6, atol=0)
    if autocast:
        assert_as_exact(grads, same_grads, step(model, batch)[1])
        return
    noise = 1e-6 * max(grad.norm() for grad in same_grads.values())  # a bias of keys has the gradient 0
    for name, grad in same_grads.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm() + noise, name


@pytest.mark.parametrize(
    ("backend", "variant"), [("aten", "small"), ("triton", "public"), pytest.param("cuda", "public", marks=full)]
)
def test_second_derivatives_are_refused(backend, variant, batch, taken, request):
    """With the remedy: the reference path."""
    if backend != "aten":
        request.getfixturevalue(backend)
    model, (src, _) = fused(**TINY | DROPOUT | VARIANTS[variant]), batch
    batched = dict(grad_outputs=torch.ones(2, device=DEVICE), is_grads_batched=True)
    for options in (batched, dict(create_graph=True)):
        with use_backend(backend):
            enc_output, *_ = model.encoder(src, src.ne(0)[:, None])
        with pytest.raises(RuntimeError, match=r'within fastattn\.use_backend\("reference"\)'):
            torch.autograd.grad(enc_output.square().sum(), list(model.encoder.parameters()), **options)
    assert taken[-1:] == [ENCODER]


@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        *product(["aten"], ["small", "small, gated", "small, packed"]),
        *(pytest.param("triton", variant, marks=full) for variant in ("public", "beyond")),
    ],
)
def test_no_more_is_saved(backend, variant, triton, batch, monkeypatch):
    """For the backward, than op by op; by kernels under autocast, where x is kept in the dtype of products alone."""
    model, (src, trg) = fused(**TINY | DROPOUT | VARIANTS[variant], backend=backend), batch

    def saved_bytes():
        saved = {}

        def note(t):
            if t.dtype != torch.int64:  # seeds
                saved[t.untyped_storage().data_ptr()] = t  # kept, so that no address is used again
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=backend == "triton"):
                model.loss(src, trg, gold_of(trg))
        return sum(t.untyped_storage().nbytes() for t in saved.values())

    straight_bytes = saved_bytes()
    op_by_op(monkeypatch)
    assert 0 < straight_bytes <= saved_bytes()


@pytest.mark.bug_class("T20")
@pytest.mark.parametrize("backend", ["aten", pytest.param("triton", marks=full)])
def test_frozen_parameters_get_no_gradient(backend, triton, batch, taken):
    model = fused(**TINY | VARIANTS["small"] | DROPOUT, backend=backend)
    _, everything = step(model, batch)
    everything = {name: grad.clone() for name, grad in everything.items()}
    for name, p in model.named_parameters():
        p.requires_grad_("slf_attn" in name and "w_" not in name)
    _, grads = step(model, batch)
    assert taken == [ENCODER, DECODER] * 2
    for name, p in model.named_parameters():
        assert (grads[name] is not None) == p.requires_grad, name
        if p.requires_grad:
            torch.testing.assert_close(grads[name], everything[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("backend", "name", "is_copied"),
    [
        ("aten", "pos_ffn.w_2.weight", False),
        ("triton", "pos_ffn.w_2.weight", False),
        ("triton", "slf_attn.w_qs.weight", True),
    ],
)
def test_a_parameter_that_changes_before_the_backward(backend, name, is_copied, triton, batch):
    """Is an error, or changes no gradient where a copy of it is saved."""
    model, (src, trg) = fused(**TINY | VARIANTS["small"] | DROPOUT, backend=backend), batch
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(change):
        torch.manual_seed(5)
        loss = model.loss(src, trg, gold_of(trg))
        with torch.no_grad():
            model.encoder.layer_stack[0].get_parameter(name).add_(change)
        return torch.autograd.grad(loss, parameters)

    if is_copied:
        assert all(map(torch.equal, gradients(0), gradients(1)))
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(1)


@pytest.mark.parametrize(
    ("backend", "use_reentrant"),
    [("aten", False), ("aten", True), *(pytest.param("triton", reentrant, marks=full) for reentrant in (False, True))],
)
def test_checkpointed_layers(use_reentrant, backend, batch, taken, triton):
    """A plan that was made with gradients is not used in a call without them."""
    model = fused(**TINY | VARIANTS["small"] | DROPOUT, backend=backend)

    def wrap_layers(call):
        for layer in (*model.encoder.layer_stack, *model.decoder.layer_stack):
            layer.__dict__.pop("forward", None)
            layer.forward = partial(call, layer.forward)

    def checkpointed(forward, x, *given, **options):
        return checkpoint(lambda x: forward(x, *given, **options), x, use_reentrant=use_reentrant)

    wrap_layers(draw_own_seeds)
    expected_loss, expected = step(model, batch)
    wrap_layers(checkpointed)
    taken.clear()
    loss, grads = step(model, batch)
    assert taken == [ENCODER, DECODER, DECODER, ENCODER]
    assert torch.equal(loss, expected_loss)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7)


def test_selective_checkpointing_of_one_layer(batch, taken):
    """It keeps results of operators: they must not be changed in place, though the layer before did so."""
    model = fused(**TINY | VARIANTS["small"] | DROPOUT | dict(n_layers=2), backend="aten")
    layer = model.encoder.layer_stack[1]
    forward = layer.forward

    def checkpointed(x, *given, **options):
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(lambda x: forward(x, *given, **options), x, use_reentrant=False, context_fn=contexts)

    layer.forward = partial(draw_own_seeds, forward)
    expected_loss, expected = step(model, batch)
    expected = {name: grad.clone() for name, grad in expected.items()}
    layer.forward = checkpointed
    loss, grads = step(model, batch)
    assert all(map(all, taken))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7)


def hook(module):
    module.register_forward_hook(lambda module, given, out: None)


CHANGES = {
    "hook on a map": lambda layer: hook(layer.slf_attn.w_qs),
    "hook on the attention": lambda layer: hook(layer.slf_attn),
    "hook on its core": lambda layer: hook(layer.slf_attn.attention),
    "hook on the feed-forward": lambda layer: hook(layer.pos_ffn),
    "own forward": lambda layer: setattr(layer.pos_ffn, "forward", layer.pos_ffn.forward),
    "another dropout": lambda layer: setattr(layer.slf_attn.attention, "dropout", nn.AlphaDropout(0.1)),
    "another class": lambda layer: setattr(
        layer.slf_attn, "fc", type("Linear2", (nn.Linear,), {})(24, 16, bias=False, device=DEVICE)
    ),
    "another norm": lambda layer: setattr(layer.pos_ffn, "layer_norm", nn.LayerNorm(16, bias=False, device=DEVICE)),
    "a norm that is not contiguous": lambda layer: setattr(
        layer.pos_ffn.layer_norm, "weight", nn.Parameter(torch.randn(16, 2, device=DEVICE)[:, 0])
    ),
    "a layer in float64": lambda layer: layer.pos_ffn.w_1.double(),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_modified_sublayer_is_called(change, norm_first, batch, taken, monkeypatch):
    """And the others are fused, with the same results."""
    model = fused(**TINY | DROPOUT | dict(norm_first=norm_first), backend="aten")
    layer = model.encoder.layer_stack[0]
    CHANGES[change](layer)
    if change == "a layer in float64":
        with pytest.raises((TypeError, RuntimeError)):  # named by the op, not computed in a wrong dtype
            model(*batch)
        assert taken == [[True, False]]
        return
    loss, grads = step(model, batch)
    assert taken[0].count(False) == 1 and taken[1] == DECODER
    op_by_op(monkeypatch)
    if DEVICE == "cpu" and "dropout" not in change:  # all draws of dropout are made in the same order
        same_loss, same_grads = step(model, batch)
        torch.testing.assert_close(loss, same_loss, rtol=1e-6, atol=0)
        for name, grad in same_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["slf_attn", "enc_attn", "pos_ffn"])
def test_a_called_sublayer_next_to_kernels(name, batch, cuda, nodes):
    """Under autocast a norm writes 16 bits for the next sublayer, where kernels compute both."""
    model = fused(**TINY | NO_DROPOUT | dict(n_layers=1, activation="gelu"), backend="cuda")
    _, exact = step(model, batch)
    loss, grads = step(model, batch, autocast=True)
    nodes.clear()
    hook(getattr(model.decoder.layer_stack[0], name))
    same_loss, same_grads = step(model, batch, autocast=True)
    assert len(nodes) == 4
    torch.testing.assert_close(loss, same_loss, rtol=2e-3, atol=0)
    assert_as_exact(same_grads, grads, exact)


def test_what_else_goes_op_by_op(batch, taken):
    model, (src, trg) = fused(**TINY).eval(), batch
    with use_backend("reference"):
        model(src, trg)
    assert taken == [[False] * 2, [False] * 3]
    taken.clear()
    mask = AttentionMask(bias=torch.zeros(1, 1, 1, src.shape[1], device=DEVICE))
    with use_backend("aten"):
        model.encoder(src, mask)
    assert taken == [[False, True]]
    taken.clear()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (src, trg)).sum())(parameters)
    assert taken == []


@pytest.mark.parametrize("backend", ["aten", "triton", "cuda"])
def test_a_memory_of_contiguous_columns(backend, request):
    """The projections of a decoder layer may have any strides."""
    if backend != "aten":
        request.getfixturevalue(backend)
    layer, results = fused(**TINY, backend=backend).decoder.layer_stack[0].eval(), []
    x, encoded, *rows = (torch.randn(2, *shape, device=DEVICE) for shape in ((5, 16), (7, 16), (7, 16), (7, 24)))
    for memory in (rows, [t.mT.contiguous().mT for t in rows]):
        memory = [t.requires_grad_() for t in memory]
        out, *_ = layer(x, encoded, enc_projected=memory)
        results.append((out, *torch.autograd.grad(out.square().sum(), memory)))
    for by_columns, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(by_columns, expected)


WRONG = {
    "norm": lambda layer: setattr(layer.pos_ffn, "layer_norm", nn.LayerNorm(24, device=DEVICE)),
    "w_2": lambda layer: setattr(layer.pos_ffn, "w_2", nn.Linear(24, 12, device=DEVICE)),
    "bias of w_1": lambda layer: setattr(layer.pos_ffn.w_1, "bias", nn.Parameter(torch.zeros(8, device=DEVICE))),
    "w_vs": lambda layer: setattr(layer.enc_attn, "w_vs", nn.Linear(16, 36, bias=False, device=DEVICE)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_parameters_reach_no_kernel(wrong, batch, triton, taken):
    """A kernel would read memory that is not theirs."""
    model = fused(**TINY, backend="triton").eval()
    WRONG[wrong](model.decoder.layer_stack[0])
    with pytest.raises((ValueError, RuntimeError)):
        model(*batch)
    assert taken[0] == ENCODER and taken[1].count(False) == 1


def test_wrong_sizes_are_named(batch):
    model, (src, _) = fused(**TINY).eval(), batch
    layer = model.encoder.layer_stack[0]
    with pytest.raises(ValueError, match="d_model = 16"):
        layer(torch.randn(2, 3, 17, device=DEVICE))
    with pytest.raises(ValueError, match="key_padding"):
        layer(torch.randn(2, 3, 16, device=DEVICE), AttentionMask(key_padding=src != 0))


def test_the_readers_walk(batch, monkeypatch):
    """Who reads how `loss` computes an attention opens few files before that of the backend."""
    walk, module = [], load_backend("attention", "aten")
    attend_rows = module.attend_rows

    def note(*arguments):
        if not walk:
            files = [frame.filename for frame in inspect.stack()]
            walk.extend([name for name in files if Path(name).is_relative_to(Path(fastattn.__file__).parent)])
        return attend_rows(*arguments)

    monkeypatch.setattr(module, "attend_rows", note)
    step(fused(**TINY, backend="aten"), batch)
    assert len(walk) <= 8 and len(set(walk)) <= 5
