"""torch.nn's attention and Transformer layers after accelerate(), with torch.nn's own as the oracle."""

import contextlib
import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from helpers import import_torch_tests
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from fastattn import AttentionMask, use_backend
from fastattn.backends import cpu_matmul
from fastattn.integrations import torch_nn
from fastattn.masks import attention_mask
from fastattn.nn import straight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D, HEADS, N, L, S = 16, 4, 2, 5, 7
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested", "ignore:Support for mismatched"
)


def tiers(values, *everyday):
    """Parameters of which only these are in the everyday tier."""
    return [pytest.param(value, marks=() if value in everyday else full, id=str(value)) for value in values]


KINDS = ("attention", "encoder layer", "decoder layer", "encoder", "decoder", "transformer")


def build(kind, scale=2.0, **options):
    """A small module of torch.nn with random biases and norms, and weights large enough that a wrong mask shows."""
    torch.manual_seed(0)
    options = dict(batch_first=True) | options
    final_norm = lambda: nn.LayerNorm(options.get("d_model", D))  # noqa: E731
    if kind == "attention":
        module = nn.MultiheadAttention(**dict(embed_dim=D, num_heads=HEADS) | options)
    else:
        options = dict(d_model=D, nhead=HEADS, dim_feedforward=24, dropout=0.0) | options
        if kind == "transformer":
            module = nn.Transformer(**dict(num_encoder_layers=2, num_decoder_layers=2) | options)
        elif kind.startswith("encoder"):
            module = nn.TransformerEncoderLayer(**options)
            module = module if kind.endswith("layer") else nn.TransformerEncoder(module, 2, final_norm())
        else:
            module = nn.TransformerDecoderLayer(**options)
            module = module if kind.endswith("layer") else nn.TransformerDecoder(module, 2, final_norm())
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.mul_(scale)
            else:
                p.add_(torch.randn_like(p), alpha=0.2)
    return module.to(DEVICE)


def pair(module):
    """Two copies, the second accelerated. A copy of torch.nn's decoder layer forgets an activation that is a module."""
    theirs, ours = copy.deepcopy(module), copy.deepcopy(module)
    fastattn.accelerate(ours)
    return theirs, ours


def inputs(kind, dtype=torch.float32, batch_first=True, d_model=D):
    """Its tensors: of the attention queries, keys and values."""
    lengths = {"attention": (L, S, S), "encoder": (L,), "transformer": (S, L)}.get(kind.split()[0], (L, S))
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(N, n, d_model, generator=generator, dtype=dtype).to(DEVICE) for n in lengths]
    return [t if batch_first else t.transpose(0, 1).contiguous() for t in made]


def mask(rows, columns, is_3d=False, kind=torch.bool):
    """True or -inf, and other values of a float mask, where blocked. Every query sees a key."""
    shape = (N * HEADS, rows, columns) if is_3d else (rows, columns)
    generator = torch.Generator().manual_seed(rows + columns)
    blocked = torch.rand(shape, generator=generator) < 0.4
    blocked[..., 0] = False
    if kind != torch.bool:
        added = torch.randn(shape, generator=generator, dtype=kind)
        blocked = added.masked_fill(blocked, -torch.inf)
    return blocked.to(DEVICE)


def padding(length, kind=torch.bool):
    blocked = torch.arange(length) >= torch.tensor([length, length - 2])[:, None]
    return (blocked if kind == torch.bool else torch.zeros(N, length, dtype=kind).masked_fill(blocked, -9.0)).to(DEVICE)


def causal(length, kind=torch.bool):
    blocked = torch.ones(length, length).triu(1).bool()
    blocked = blocked if kind == torch.bool else torch.zeros(length, length).masked_fill(blocked, -torch.inf)
    return blocked.to(DEVICE)


def solve(module, tensors, grad=True, **options):
    """Outputs, and the gradients of the inputs and parameters."""
    tensors = [t.detach().clone().requires_grad_(grad) for t in tensors]
    module.zero_grad()
    with torch.set_grad_enabled(grad):
        out = module(*tensors, **options)
        out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    if grad:
        generator = torch.Generator().manual_seed(2)
        dout = torch.randn(out[0].shape, generator=generator, dtype=torch.float64)
        torch.autograd.backward(out[0], dout.to(out[0]))
    grads = {f"input {i}": t.grad for i, t in enumerate(tensors)}
    grads |= {name: p.grad for name, p in module.named_parameters()}
    return [t.detach() for t in out], {name: g for name, g in grads.items() if g is not None}


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, rtol=atol, atol=atol)


def compare(theirs, ours, tensors, real=..., grad=True, **options):
    """The same outputs and gradients. real: where outputs count."""
    exact = tensors[0].dtype == torch.float64
    (out, grads), (expected, expected_grads) = (solve(m, tensors, grad, **options) for m in (ours, theirs))
    assert len(out) == len(expected) and grads.keys() == expected_grads.keys()
    for found, right in zip(out, expected, strict=True):
        assert found.shape == right.shape and found.dtype == right.dtype
        close(found[real], right[real], 1e-10 if exact else 1e-5)
    for name, right in expected_grads.items():
        scale = max(1.0, float(right.abs().max()))
        close(grads[name] / scale, right / scale, 1e-10 if exact else 1e-4)


@contextlib.contextmanager
def fast_path(enabled):
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def compare_all(module, tensors, real=..., **options):
    """compare in training and in eval mode, with and without gradients.

    torch.nn's fast path, in eval mode without gradients, blocks what is not 0 in a float mask of an encoder layer.
    """
    theirs, ours = pair(module)
    has_float = any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in options.values())
    for training, grad in itertools.product((True, False), (True, False)):
        theirs.train(training), ours.train(training)
        with fast_path(not has_float):
            compare(theirs, ours, tensors, ... if grad or training else real, grad, **options)


class Paths:
    """How layers went."""

    straight = sublayers = left = 0


@pytest.fixture
def paths(monkeypatch):
    if DEVICE == "cuda":  # whose default in float32 mixes backends, so that layers go op by op
        monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    counts = Paths()

    def count(holder, function, name):
        original = getattr(holder, function)

        def counting(*args, **options):
            out = original(*args, **options)
            setattr(counts, name, getattr(counts, name) + (out is not None))
            return out

        monkeypatch.setattr(holder, function, counting)

    count(torch_nn, "run_straight", "straight")
    count(torch_nn, "run_sublayers", "sublayers")
    for kind in torch_nn.REPLACEMENTS.values():
        original = kind.original

        class Counting(original):
            def forward(self, *args, _original=original, **options):
                counts.left += 1
                return _original.forward(self, *args, **options)

        monkeypatch.setattr(kind, "original", Counting)
    return counts


# The same numbers.


ATTENTION = {
    "plain": {},
    "batch second": dict(batch_first=False),
    "no bias": dict(bias=False),
    "one head": dict(num_heads=1),
    "kdim and vdim": dict(kdim=6, vdim=10),
    "bias_kv": dict(add_bias_kv=True),
    "zero_attn": dict(add_zero_attn=True),
}


@pytest.mark.parametrize("weights", tiers([False, True, "per head"], False))
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, weights):
    options = ATTENTION[name]
    batch_first = options.get("batch_first", True)
    query, key, value = inputs("attention", batch_first=batch_first)
    tensors = [query, key[..., : options.get("kdim", D)], value[..., : options.get("vdim", D)]]
    module = build("attention", **options)
    call = dict(need_weights=bool(weights), average_attn_weights=weights != "per head")
    compare_all(module, tensors, **call)
    compare_all(module, tensors, **call, attn_mask=mask(L, S), key_padding_mask=padding(S))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("is_3d", [False, True])
@pytest.mark.parametrize("padded", [None, torch.bool, torch.float32])
def test_attention_masks(kind, is_3d, padded):
    options = dict(attn_mask=mask(L, S, is_3d, kind), key_padding_mask=padded and padding(S, padded))
    compare_all(build("attention"), inputs("attention"), need_weights=False, **options)


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_tensor_as_query_key_and_value(batch_first):
    """One product gives all three; of a memory one gives keys and values."""
    theirs, ours = pair(build("attention", batch_first=batch_first))
    x, memory = inputs("decoder", batch_first=batch_first)
    for sources in ((x, x, x), (x, memory, memory), (x, x, x.clone())):
        results = []
        for module in (ours, theirs):
            module.zero_grad()
            out = module(*sources, need_weights=False)[0]
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in module.parameters())])
        close(*results, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_hint(padded):
    module, (x,) = build("attention"), inputs("encoder")
    options = dict(attn_mask=causal(L), is_causal=True, key_padding_mask=padding(L) if padded else None)
    compare_all(module, [x, x, x], need_weights=False, **options)


def check_layers(kind, options=None, dtype=torch.float32, **call):
    options = options or {}
    batch_first = options.get("batch_first", True)
    module = build(kind, **options).to(dtype)
    real = ...
    if "src_key_padding_mask" in call and kind == "encoder" and call["src_key_padding_mask"].dtype == torch.bool:
        real = ~call["src_key_padding_mask"]  # torch.nn's fast path gives 0 elsewhere
        real = real if batch_first else real.T
    compare_all(module, inputs(kind, dtype, batch_first, options.get("d_model", D)), real, **call)


LAYERS = {
    "post-norm": {},
    "pre-norm": dict(norm_first=True),
    "batch second": dict(batch_first=False),
    "pre-norm, batch second, gelu": dict(norm_first=True, batch_first=False, activation="gelu"),
    "gelu": dict(activation=F.gelu),
    "gelu module": dict(activation=nn.GELU()),
    "relu module": dict(activation=nn.ReLU()),
    "silu": dict(activation=F.silu),
    "another": dict(activation=torch.tanh),
    "no bias": dict(bias=False),
    "pre-norm, no bias": dict(bias=False, norm_first=True),
    "three heads": dict(nhead=3, d_model=18),
    "eps": dict(layer_norm_eps=0.1),
}


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "decoder layer"))
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, kind):
    check_layers(kind, LAYERS[name])


def masks_of(kind, kinds, is_3d=False):
    """Keyword arguments: masks and blocked keys of every attention. kinds: their dtypes, None: no mask."""
    dense, padded = kinds
    source = L if kind.startswith("encoder") else S
    made = {}
    if kind.startswith("encoder"):
        name = "src_mask" if kind.endswith("layer") else "mask"
        sides = ((name, "src_key_padding_mask", L, L),)
    else:
        sides = ("tgt_mask", "tgt_key_padding_mask", L, L), ("memory_mask", "memory_key_padding_mask", L, source)
        if kind == "transformer":
            sides = *sides, ("src_mask", "src_key_padding_mask", S, S)
    for name, keys, rows, columns in sides:
        if dense:
            made[name] = mask(rows, columns, is_3d, dense)
        if padded:
            made[keys] = padding(columns, padded)
    return made


DTYPES = (None, torch.bool, torch.float32)
MASKS = [
    (dense, padded, is_3d)
    for dense, padded, is_3d in itertools.product(DTYPES, DTYPES, (False, True))
    if dense or (padded and not is_3d)
]


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "decoder"))
@pytest.mark.parametrize("masks", tiers(MASKS, *MASKS[1::3]))
def test_layer_masks(kind, masks):
    dense, padded, is_3d = masks
    check_layers(kind, **masks_of(kind, (dense, padded), is_3d))


@full
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_masks_in_all_layers(kind, name):
    for dense, padded, is_3d in MASKS:
        if not (is_3d and name == "three heads"):  # masks are of four heads
            check_layers(kind, LAYERS[name], **masks_of(kind, (dense, padded), is_3d))


@pytest.mark.parametrize("kind", tiers(KINDS[1:], *KINDS[1:3]))
@pytest.mark.parametrize("norm_first", [False, True])
def test_float64(kind, norm_first):
    check_layers(kind, dict(norm_first=norm_first), torch.float64, **masks_of(kind, (torch.bool, torch.bool)))
    check_layers(kind, dict(norm_first=norm_first), torch.float64)


CAUSAL = list(itertools.product((True, None), (torch.bool, torch.float32), (False, True)))


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "encoder"))
@pytest.mark.parametrize("how", CAUSAL, ids=str)
def test_causal(kind, how, paths):
    """With a hint and without. Where a stack finds a causal mask, layers read no tensor."""
    hint, dtype, padded = how
    options, side = {}, "src" if kind.startswith("encoder") else "tgt"
    options["mask" if kind == "encoder" else f"{side}_mask"] = causal(L, dtype)
    if hint:
        options["is_causal" if side == "src" else "tgt_is_causal"] = True
    if padded:
        options[f"{side}_key_padding_mask"] = padding(L, dtype)
    check_layers(kind, **options)
    if kind in ("encoder", "decoder") and not (padded and dtype == torch.float32):
        assert paths.straight and not paths.sublayers and not paths.left


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "decoder layer", "encoder"))
def test_unbatched(kind):
    call = masks_of(kind, (torch.bool, torch.bool))
    call = {name: t[1] if "padding" in name else t for name, t in call.items()}
    compare_all(build(kind), [t[0] for t in inputs(kind)], **call)


def test_unbatched_attention():
    tensors = [t[0] for t in inputs("attention")]
    for weights in (False, True):
        compare_all(build("attention"), tensors, need_weights=weights, key_padding_mask=padding(S)[1])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_query_that_may_attend_to_nothing(kind):
    """0 before the projection out. torch.nn gives 0 too, but NaN with weights and on its fast path."""
    theirs, ours = pair(build("attention"))
    blocked = mask(L, S, kind=kind)
    blocked[1] = True if kind == torch.bool else -torch.inf
    tensors = inputs("attention")
    compare(theirs, ours, tensors, attn_mask=blocked, need_weights=False)
    assert torch.equal(ours(*tensors, attn_mask=blocked, need_weights=False)[0][0, 1], ours.out_proj.bias)
    theirs, ours = pair(build("encoder layer"))
    blocked = mask(L, L)
    blocked[1] = True
    compare(theirs, ours, inputs("encoder"), src_mask=blocked)
    with torch.no_grad():
        fast, found = (m.eval()(*inputs("encoder"), src_mask=blocked) for m in (theirs, ours))
    assert fast[:, 1].isnan().all() and not found.isnan().any()
    rest = [0, 2, 3, 4]
    close(found[:, rest], fast[:, rest])


def test_the_straight_path_is_the_usual_one(paths):
    module = pair(build("transformer"))[1]
    module(*inputs("transformer"), tgt_mask=causal(L), src_key_padding_mask=padding(S)).sum().backward()
    assert (paths.straight, paths.sublayers, paths.left) == (4, 0, 0)
    with use_backend("reference"):  # which has none
        module(*inputs("transformer")).sum().backward()
    assert (paths.straight, paths.sublayers, paths.left) == (4, 4, 0)


def test_use_backend():
    theirs, ours = pair(build("transformer"))
    with use_backend("reference"):
        compare(theirs, ours, inputs("transformer"), tgt_mask=causal(L), src_key_padding_mask=padding(S))


# torch's own samples.


SAMPLED = (
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    *(nn.Transformer, nn.MultiheadAttention),
)


def infos():
    """By class, what torch says of its modules."""
    ours = {*torch_nn.REPLACEMENTS, nn.Transformer}
    return {info.module_cls: info for info in import_torch_tests("common_modules").module_db if info.module_cls in ours}


@pytest.mark.parametrize("kind", SAMPLED, ids=lambda kind: f"nn.{kind.__name__}")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.float64], torch.float32))
def test_torch_samples(kind, training, dtype, request):
    """module_db's, against torch.nn's module, and against their reference functions. Every tenth in everyday tests.

    torch.nn's fast path gives 0 at padding. Samples of nn.Transformer have a memory whose padding is attended to.
    """
    info = infos()[kind]
    made = info.module_inputs_func(info, device=DEVICE, dtype=dtype, requires_grad=True, training=training)
    assert len(made) >= 19
    for sample in made if request.config.getoption("--full") else made[::10]:
        torch.manual_seed(0)
        args, options = sample.constructor_input.args, dict(sample.constructor_input.kwargs)
        if kind is not nn.TransformerEncoder:
            options |= dict(device=DEVICE, dtype=dtype)
        theirs, ours = pair(kind(*args, **options).train(training))
        given, call = sample.forward_input.args, sample.forward_input.kwargs
        compare(theirs, ours, given, **call)
        with fast_path(kind is not nn.Transformer):
            compare(theirs, ours, given, grad=False, **call)
        if sample.reference_fn:
            found, right = ours(*given, **call), sample.reference_fn(ours, *given, **call)
            for a, b in zip(*[out if isinstance(out, tuple) else (out,) for out in (found, right)], strict=True):
                close(a, b)


def test_torch_has_no_other_samples():
    found = infos()
    assert found.keys() == {*SAMPLED} and all(info.module_error_inputs_func is None for info in found.values())


WRONG = {
    "width of query": ("attention", lambda q, k, v: ((q[..., :-1], k, v), {})),
    "width of key": ("attention", lambda q, k, v: ((q, k[..., :-1], v), {})),
    "width of key and value": ("attention", lambda q, k, v: ((q, k[..., :-1], v[..., :-1]), {})),
    "batch of key": ("attention", lambda q, k, v: ((q, k[:1], v[:1]), {})),
    "length of value": ("attention", lambda q, k, v: ((q, k, v[:, :-1]), {})),
    "dtype of query": ("attention", lambda q, k, v: ((q.double(), k, v), {})),
    "dimensions": ("attention", lambda q, k, v: ((q, k[0], v), {})),
    "four dimensions": ("attention", lambda q, k, v: ((q[None], k[None], v[None]), {})),
    "mask's shape": ("attention", lambda q, k, v: ((q, k, v), dict(attn_mask=mask(S, L)))),
    "mask's dtype": ("attention", lambda q, k, v: ((q, k, v), dict(attn_mask=mask(L, S).int()))),
    "mask's dimensions": ("attention", lambda q, k, v: ((q, k, v), dict(attn_mask=mask(L, S)[None, None]))),
    "mask for other heads": ("attention", lambda q, k, v: ((q, k, v), dict(attn_mask=mask(L, S, True)[1:]))),
    "padding's shape": ("attention", lambda q, k, v: ((q, k, v), dict(key_padding_mask=padding(L)))),
    "padding's dtype": ("attention", lambda q, k, v: ((q, k, v), dict(key_padding_mask=padding(S).long()))),
    "hint without a mask": ("attention", lambda q, k, v: ((q, k, v), dict(is_causal=True))),
    "width of source": ("encoder layer", lambda x: ((x[..., :-1],), {})),
    "mask of source": ("encoder layer", lambda x: ((x,), dict(src_mask=mask(S, S)))),
    "padding of source": ("encoder", lambda x: ((x,), dict(src_key_padding_mask=padding(S)))),
    "mask of source, stack": ("encoder", lambda x: ((x,), dict(mask=mask(S, S)))),
    "hint, layer": ("encoder layer", lambda x: ((x,), dict(is_causal=True))),
    "hint, stack": ("encoder", lambda x: ((x,), dict(is_causal=True))),
    "batch of memory": ("decoder layer", lambda x, memory: ((x, memory[:1]), {})),
    "width of memory": ("decoder", lambda x, memory: ((x, memory[..., :-1]), {})),
    "mask of memory": ("decoder", lambda x, memory: ((x, memory), dict(memory_mask=mask(L, L)))),
    "hint, decoder": ("decoder", lambda x, memory: ((x, memory), dict(tgt_is_causal=True))),
    "hint for memory": ("decoder", lambda x, memory: ((x, memory), dict(memory_is_causal=True))),
    "batch of source": ("transformer", lambda x, y: ((x[:1], y), {})),
    "width of target": ("transformer", lambda x, y: ((x, y[..., :-1]), {})),
    "a list as a mask": ("encoder layer", lambda x: ((x,), dict(src_mask=mask(L, L).tolist()))),
    "a list as padding": ("encoder", lambda x: ((x,), dict(src_key_padding_mask=padding(L).tolist()))),
    "no tensor": ("encoder layer", lambda x: ((x.tolist(),), {})),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_torch(name):
    kind, change = WRONG[name]
    given, options = change(*inputs(kind))
    if kind == "attention":
        options["need_weights"] = False
    theirs, ours = pair(build(kind))
    with pytest.raises(Exception) as expected:  # noqa: PT011
        theirs(*given, **options)
    with pytest.raises(expected.type):
        ours(*given, **options)


# Dropout.


SUBLAYERS = ("linear1", "norm1", "linear2", "dropout1", "dropout", "self_attn", "self_attn.out_proj")


@pytest.mark.parametrize("kind", tiers(["encoder layer", "decoder layer"], "decoder layer"))
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("hooked", SUBLAYERS)
def test_dropout_is_the_same_on_both_paths(kind, norm_first, hooked, paths):
    """A hook on any module, though it does nothing, makes the layer go sublayer by sublayer. On a GPU, whose generator
    draws the seeds of a layer at once as other numbers, and whose nn.Dropout is PyTorch's, the numbers are others."""
    ours = pair(build(kind, norm_first=norm_first, dropout=0.3))[1]
    results = []
    for hooks in (False, True):
        if hooks:
            ours.get_submodule(hooked).register_forward_hook(lambda *_: None)
        torch.manual_seed(7)
        results.append(solve(ours, inputs(kind)))
    assert (paths.straight, paths.sublayers) == (1, 1)
    if DEVICE == "cpu":
        close(*results, atol=1e-5)


@pytest.mark.parametrize("kind", tiers(KINDS[:3], "attention"))
def test_dropout(kind):
    """Other draws in every call of training, with the mean that torch.nn's have; none in eval mode."""
    theirs, ours = pair(build(kind, dropout=0.2, **({} if kind == "attention" else dict(norm_first=True))))
    options = dict(need_weights=False) if kind == "attention" else {}
    tensors = inputs(kind)

    def out(module, **call):
        result = module(*tensors, **call)
        return result[0] if kind == "attention" else result

    with torch.no_grad():
        many = torch.stack([out(ours, **options) for _ in range(500)])
        expected = torch.stack([out(theirs, **options) for _ in range(500)])
        assert not torch.equal(many[0], many[1])
        error = (many.std(0) + expected.std(0)) / 500**0.5
        assert ((many.mean(0) - expected.mean(0)).abs() < 5 * error).all()
        close(many.std(0).mean(), expected.std(0).mean(), 0.05)
        compare(theirs.eval(), ours.eval(), tensors, **options)
        assert torch.equal(out(ours, **options), out(ours, **options))


# A module like any other.


def test_training():
    """20 steps end at the same parameters."""
    losses = []
    models = pair(build("transformer"))
    src, tgt = inputs("transformer")
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            out = model(src, tgt, tgt_mask=causal(L), src_key_padding_mask=padding(S))
            loss = F.mse_loss(out, tgt)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    close(*losses, atol=1e-5)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        counts = torch.ones_like(p)
        if name.endswith("in_proj_bias"):
            counts[D : 2 * D] = 0  # keys' biases change nothing: Adam follows the rounding of their gradients
        close(p * counts, q * counts, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts(kind):
    theirs, ours = pair(build(kind))
    assert list(theirs.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert [n for n, _ in theirs.named_modules()] == [n for n, _ in ours.named_modules()]


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind):
    _, ours = pair(build(kind))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    expected = solve(ours, inputs(kind))
    for made in (torch.load(file, weights_only=False), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(made) is type(ours)
        close(solve(made, inputs(kind)), expected, 0)


NAMED = {
    "attention": (D, HEADS),
    "encoder layer": (D, HEADS, 24, 0.0),
    "decoder layer": (D, HEADS, 24, 0.0),
    "transformer": (D, HEADS, 2, 2, 24, 0.0),
}


@pytest.mark.parametrize("kind", NAMED)
def test_classes_by_name(kind, paths):
    original = type(build(kind))
    named = getattr(torch_nn, original.__name__)(*NAMED[kind], batch_first=True).to(DEVICE)
    assert isinstance(named, original)
    theirs = build(kind)
    named.load_state_dict(theirs.state_dict())
    compare(theirs, named, inputs(kind))
    assert kind == "attention" or (paths.straight and not paths.left)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_stacks_by_name(side, paths):
    """Of a layer of torch.nn or of the same module by name."""
    theirs = build(side)
    original = type(theirs.layers[0])
    stack = getattr(torch_nn, type(theirs).__name__)
    for layer in (original, getattr(torch_nn, original.__name__)):
        named = stack(layer(D, HEADS, 24, 0.0, batch_first=True), 2, nn.LayerNorm(D)).to(DEVICE)
        named.load_state_dict(theirs.state_dict())
        compare(theirs, named, inputs(side))
    assert paths.straight == 4, paths.left


HOOKED = [
    *itertools.product(["encoder layer", "decoder layer"], ["", "self_attn", "linear1", "norm2", "dropout1"]),
    ("decoder layer", "multihead_attn"),
]


@pytest.mark.parametrize(("kind", "name"), HOOKED)
def test_hooks(kind, name):
    called = {}
    for module in (models := pair(build(kind))):
        inner, calls = module.get_submodule(name), called.setdefault(module, [])
        inner.register_forward_pre_hook(lambda *_, calls=calls: calls.append("before"))
        inner.register_forward_hook(lambda *_, calls=calls: calls.append("after"))
        inner.register_full_backward_hook(lambda *_, calls=calls: calls.append("backward"))
    compare(*models, inputs(kind))
    assert list(called.values()) == [["before", "after", "backward"]] * 2


def test_a_hook_changes_the_output():
    theirs, ours = pair(build("encoder layer"))
    for module in (theirs, ours):
        module.linear1.register_forward_hook(lambda _m, _i, out: out * 0.5)
        module.self_attn.register_forward_hook(lambda _m, _i, out: (out[0] * 0.5, out[1]))
    compare(theirs, ours, inputs("encoder"))


def test_a_hook_asks_for_weights():
    """The usual way to look at the attention of a layer."""
    found = []

    def ask(_module, args, options):
        return args, options | dict(need_weights=True)

    for module in (models := pair(build("encoder layer"))):
        module.self_attn.register_forward_pre_hook(ask, with_kwargs=True)
        module.self_attn.register_forward_hook(lambda _m, _i, out: found.append(out[1].detach()))
    compare(*models, inputs("encoder"), src_mask=mask(L, L), src_key_padding_mask=padding(L))
    close(*found)


def test_blocks_that_are_replaced_on_a_layer():
    theirs, ours = pair(build("encoder"))
    for module in (theirs, ours):
        layer = module.layers[1]
        layer._ff_block = lambda x, layer=layer: 0.5 * type(layer)._ff_block(layer, x)
    compare(theirs, ours, inputs("encoder"), mask=mask(L, L))


@pytest.mark.parametrize("name", ["self_attn", "norm1"])
def test_children_of_other_kinds(name):
    """Without the attributes of torch.nn's. Its fast path asks for them, so it is off."""

    class Other(nn.Linear):
        def forward(self, x, *_, **_options):
            out = super().forward(x)
            return (out, None) if name == "self_attn" else out

    theirs, ours = pair(build("encoder layer"))
    for module in (theirs, ours):
        torch.manual_seed(5)
        setattr(module, name, Other(D, D).to(DEVICE))
    compare(theirs, ours, inputs("encoder"))
    with torch.no_grad():
        expected = theirs(*inputs("encoder"))
        if name == "norm1":
            close(ours.eval()(*inputs("encoder")), expected)


class Adapter(nn.Module):
    """A linear map, and next to it another: what LoRA makes of one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapter(layer):
    layer.linear1 = Adapter(layer.linear1).to(DEVICE)


def weight_norm(layer):
    nn.utils.parametrizations.weight_norm(layer.self_attn, "in_proj_weight")


def weight_norm_of_linear(layer):
    nn.utils.parametrizations.weight_norm(layer.linear2)


def pruning(layer):
    nn.utils.prune.l1_unstructured(layer.self_attn, "in_proj_weight", amount=0.5)
    nn.utils.prune.l1_unstructured(layer.linear1, "weight", amount=0.5)


def other_norm(layer):
    layer.norm1 = nn.RMSNorm(D).to(DEVICE)


def no_dropout(layer):
    layer.dropout1 = nn.Identity()


def frozen(layer):
    for p in (layer.self_attn.in_proj_weight, layer.linear1.weight, layer.linear2.bias, layer.norm1.weight):
        p.requires_grad_(False)


def all_frozen(layer):
    layer.requires_grad_(False)


def other_attention(layer):
    class Attention(nn.MultiheadAttention):
        def forward(self, *args, **options):
            out, weights = super().forward(*args, **options)
            return 2 * out, weights

    layer.self_attn.__class__ = Attention


CHANGES = [
    adapter,
    weight_norm,
    weight_norm_of_linear,
    pruning,
    other_norm,
    no_dropout,
    frozen,
    all_frozen,
    other_attention,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", tiers(["before", "after"], "after"))
@pytest.mark.parametrize("kind", tiers(["encoder", "decoder"], "decoder"))
def test_changes(change, when, kind):
    """A change of one layer of two, before or after accelerate, has its effect."""
    theirs = build(kind)
    ours = copy.deepcopy(theirs)
    if when == "after":
        fastattn.accelerate(ours)
    for module in (theirs, ours):
        torch.manual_seed(5)
        change(module.layers[1])
    if when == "before":
        fastattn.accelerate(ours)
    for options in ({}, masks_of(kind, (torch.bool, torch.bool))):
        compare(theirs, ours, inputs(kind), **options)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    theirs, ours = pair(build("encoder layer", norm_first=True))

    class Checkpointed(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, pad):
            return torch.utils.checkpoint.checkpoint(self.layer, x, None, pad, use_reentrant=reentrant)

    compare(Checkpointed(theirs), Checkpointed(ours), inputs("encoder"), pad=padding(L))
    for layer in ours.modules():  # with dropout: as without checkpointing
        layer.p = 0.2
    results = []
    for module in (ours, Checkpointed(ours)):
        torch.manual_seed(3)
        call = dict(pad=padding(L)) if module is not ours else dict(src_key_padding_mask=padding(L))
        out, grads = solve(module, inputs("encoder"), **call)
        results.append([out, list(grads.values())])
    close(*results)


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "decoder layer", "encoder"))
@pytest.mark.parametrize("grad", [True, False])
def test_autocast(kind, grad):
    """Of torch.nn's dtype, and nearly as close to float32: hidden states between its sublayers are float32."""
    options = {} if kind == "attention" else dict(activation="gelu")  # small errors do not flip a gradient
    theirs, ours = pair(build(kind, scale=1.0, **options))
    expected = solve(theirs, inputs(kind), grad)
    with torch.autocast(DEVICE, torch.bfloat16):
        found, right = (solve(m, inputs(kind), grad) for m in (ours, theirs))
    assert found[0][0].dtype == right[0][0].dtype
    error, allowed = ((out[0].float() - expected[0][0]).norm() for out, _ in (found, right))
    assert error <= 2 * allowed + 2e-2 * expected[0][0].norm(), (error, allowed)
    assert found[1].keys() == right[1].keys()
    for name, g in expected[1].items():
        error, allowed = ((grads[name].float() - g).norm() for _, grads in (found, right))
        assert error <= 3 * allowed + 3e-2 * g.norm() + 1e-3, name


@full
@pytest.mark.parametrize("masks", ["none", "causal", "padding"])
def test_compile(masks):
    theirs, ours = pair(build("transformer", num_encoder_layers=1, num_decoder_layers=1))
    options = {"none": {}, "causal": dict(tgt_mask=causal(L)), "padding": dict(src_key_padding_mask=padding(S))}[masks]
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    expected = solve(theirs, inputs("transformer"), **options)
    found = solve(compiled, inputs("transformer"), **options)
    close(found[0], expected[0])
    close(list(found[1].values()), list(expected[1].values()), 1e-4)


@pytest.mark.parametrize("batch_first", [False, pytest.param(True, marks=full)])
@pytest.mark.parametrize("kind", tiers(KINDS, "attention"))
def test_one_compiled_graph(kind, batch_first):
    """Calls with other tensors of the same sizes compile nothing."""
    theirs, ours = pair(build(kind, batch_first=batch_first))
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=graphs, fullgraph=True)
    options = {"need_weights": False} if kind == "attention" else {}
    for seed in range(3):
        tensors = [t + seed for t in inputs(kind, batch_first=batch_first)]
        found, right = (solve(module, tensors, grad=False, **options)[0][0] for module in (compiled, theirs))
        close(found, right)
    assert graphs.frame_count == 1


@full
def test_export():
    theirs, ours = pair(build("transformer", num_encoder_layers=1, num_decoder_layers=1).eval())
    options = dict(tgt_mask=causal(L), tgt_is_causal=True, src_key_padding_mask=padding(S))
    options |= dict(memory_key_padding_mask=padding(S))
    program = torch.export.export(ours, tuple(inputs("transformer")), options)
    with torch.no_grad():
        close(program.module()(*inputs("transformer"), **options), theirs(*inputs("transformer"), **options))


@pytest.mark.parametrize("kind", tiers(KINDS[:3], "encoder layer"))
def test_transforms(kind):
    """torch.func.grad and vmap: the formulas of PyTorch's operators."""
    theirs, ours = pair(build(kind))
    options = dict(need_weights=False) if kind == "attention" else {}
    tensors = inputs(kind)

    def loss(parameters, module, *given):
        out = torch.func.functional_call(module, parameters, given, options)
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    results = []
    for module in (ours, theirs):
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        results.append(torch.func.grad(loss)(parameters, module, *tensors))
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, None, *[0] * len(tensors)))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            grads = per_sample(parameters, module, *[t[:, None] for t in tensors])
        results[-1] = [results[-1], {name: g.sum(0) for name, g in grads.items()}]
    close(results[0], results[1], 1e-3)


def test_second_derivatives():
    theirs, ours = pair(build("encoder layer").double())
    found = []
    for module in (ours, theirs):
        (x,) = (t.requires_grad_() for t in inputs("encoder", torch.float64))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (g,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), x)[0])
    close(*found, atol=1e-8)


# accelerate and restore.


@pytest.mark.parametrize("kind", KINDS)
def test_restore(kind):
    theirs, ours = pair(build(kind))
    solve(ours, inputs(kind))
    fastattn.restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    close(solve(ours, inputs(kind)), solve(theirs, inputs(kind)), 0)
    fastattn.restore(ours)  # once more: nothing


@pytest.mark.parametrize("parts", [dict(attention=False), dict(layers=False)], ids=str)
def test_parts_of_a_model(parts):
    theirs = build("transformer")
    ours = copy.deepcopy(theirs)
    report = fastattn.accelerate(ours, **parts)
    kinds = {entry.kind for entry in report.taken}
    assert ("MultiheadAttention" in kinds) == parts.get("attention", True)
    assert not {"TransformerEncoderLayer", "TransformerDecoder"} & kinds
    compare(theirs, ours, inputs("transformer"), tgt_mask=causal(L), src_key_padding_mask=padding(S))
    with torch.no_grad():
        compare(theirs.eval(), ours.eval(), inputs("transformer"), grad=False, tgt_mask=causal(L))
    fastattn.restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


def test_accelerate_twice():
    theirs, ours = pair(build("transformer"))
    kinds = [type(m) for m in ours.modules()]
    report = fastattn.accelerate(ours)
    assert [type(m) for m in ours.modules()] == kinds and len(report.taken) >= 12
    compare(theirs, ours, inputs("transformer"))
    fastattn.restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


def test_subclasses_of_users_are_left():
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, src, src_mask, src_key_padding_mask, is_causal):
            return 2 * super().forward(src, src_mask, src_key_padding_mask, is_causal)

    theirs = nn.TransformerEncoder(Mine(D, HEADS, 24, 0.0, batch_first=True), 2).to(DEVICE)
    ours = copy.deepcopy(theirs)
    report = fastattn.accelerate(ours)
    left = {entry.path: entry for entry in report.left}
    assert {"layers.0", "layers.1"} <= left.keys() and all(type(layer) is Mine for layer in ours.layers)
    assert "TransformerEncoderLayer" in left["layers.0"].reason and "Mine" in left["layers.0"].kind
    assert "Mine" in str(report) and "TransformerEncoderLayer" in str(report)
    for options in ({}, dict(mask=mask(L, L), src_key_padding_mask=padding(L))):
        compare(theirs, ours, inputs("encoder"), **options)
    with pytest.raises(ValueError, match="AttentionMask"):
        ours(*inputs("encoder"), mask=AttentionMask(is_causal=True))


def test_activations_of_other_libraries_are_called():
    """A module with the name of one of torch.nn's may compute something else."""

    class GELU(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    compare_all(build("encoder layer", activation=GELU()), inputs("encoder"))
    compare(*pair(build("encoder layer", activation=nn.GELU("tanh"))), inputs("encoder"))


# AttentionMask.


def own(blocked):
    return AttentionMask(~blocked)


@pytest.mark.parametrize("padded", [None, torch.bool, torch.float32])
def test_attention_mask_in_attention(padded):
    theirs, ours = pair(build("attention"))
    pad = padded and padding(S, padded)
    for weights, average in ((False, True), (True, True), (True, False)):
        call = dict(need_weights=weights, average_attn_weights=average, key_padding_mask=pad)
        expected = solve(theirs, inputs("attention"), attn_mask=mask(L, S), **call)
        close(solve(ours, inputs("attention"), attn_mask=own(mask(L, S)), **call), expected, 1e-4)


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "decoder layer", "encoder"))
@pytest.mark.parametrize("padded", DTYPES)
def test_attention_mask_in_layers(kind, padded):
    """It is combined with the padding that comes with it."""
    theirs, ours = pair(build(kind))
    call = masks_of(kind, (torch.bool, padded))
    owned = {name: t if "padding" in name else own(t) for name, t in call.items()}
    expected = solve(theirs, inputs(kind), **call)
    found = solve(ours, inputs(kind), **owned)
    close(found[0], expected[0])
    close(found[1], expected[1], 1e-4)


def test_attention_mask_with_a_hint():
    """As in scaled_dot_product_attention both restrict."""
    theirs, ours = pair(build("encoder layer"))
    expected = solve(theirs, inputs("encoder"), src_mask=causal(L), src_key_padding_mask=padding(L))[0]
    only_padding = AttentionMask(key_padding=~padding(L))
    close(solve(ours, inputs("encoder"), src_mask=only_padding, is_causal=True)[0], expected)


REFUSED = {
    "unbatched": ("encoder layer", {}, lambda x: ((x[0],), {})),
    "unbatched stack": ("encoder", {}, lambda x: ((x[0],), {})),
    "unbatched attention": ("attention", {}, lambda q, k, v: ((q[0], k[0], v[0]), {})),
    "bias_kv": ("attention", dict(add_bias_kv=True), lambda *given: (given, {})),
    "zero_attn": ("attention", dict(add_zero_attn=True), lambda *given: (given, {})),
    "padding's shape": ("encoder layer", {}, lambda x: ((x,), dict(src_key_padding_mask=padding(S)))),
    "padding's shape, stack": ("encoder", {}, lambda x: ((x,), dict(src_key_padding_mask=padding(S)))),
    "padding's dtype": ("encoder layer", {}, lambda x: ((x,), dict(src_key_padding_mask=padding(L).int()))),
    "memory's width": ("decoder layer", {}, lambda x, memory: ((x, memory[..., 1:]), {})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_mask_is_refused(name):
    """Where torch.nn's forward has to be called."""
    kind, options, change = REFUSED[name]
    given, call = change(*inputs(kind))
    if kind == "attention":
        call["need_weights"] = False
    mask_name = {"attention": "attn_mask", "encoder": "mask", "encoder layer": "src_mask"}.get(kind, "tgt_mask")
    module = build(kind, **options)
    module.__class__ = getattr(torch_nn, type(module).__name__)
    torch_nn.accelerate_children(module)
    with pytest.raises(ValueError, match="AttentionMask"):
        module(*given, **call, **{mask_name: AttentionMask(is_causal=True)})


def test_an_attention_mask_is_refused_by_a_changed_layer():
    for change in (other_attention, weight_norm):
        ours = pair(build("encoder"))[1]
        change(ours.layers[1])
        with pytest.raises(ValueError, match="AttentionMask"):
            ours(*inputs("encoder"), mask=AttentionMask(is_causal=True))


def test_an_attention_mask_of_another_size():
    ours = pair(build("encoder"))[1]
    with pytest.raises(ValueError, match="attn_mask"):
        ours(*inputs("encoder"), mask=own(mask(S, S)))


def test_an_attention_mask_that_is_changed_in_place():
    """The next call has the new values."""
    real = ~padding(L)
    own_mask = AttentionMask(key_padding=real)
    theirs, ours = pair(build("encoder layer"))
    for _ in range(3):
        compare_to = solve(theirs, inputs("encoder"), src_key_padding_mask=~real)
        close(solve(ours, inputs("encoder"), src_mask=own_mask)[0], compare_to[0])
        real[0, real[0].sum() - 1] = False


def test_an_attention_mask_is_used_in_inference_and_then_in_training():
    own_mask = AttentionMask(is_causal=True, key_padding=~padding(L))
    theirs, ours = pair(build("encoder"))
    with torch.inference_mode():
        ours(*inputs("encoder"), mask=own_mask)
    expected = solve(theirs, inputs("encoder"), mask=causal(L), src_key_padding_mask=padding(L))
    found = solve(ours, inputs("encoder"), mask=own_mask)
    close(found[0], expected[0])
    close(found[1], expected[1], 1e-4)


def test_a_plan_does_not_grow():
    """A mask that the user keeps does not keep what was decided for other masks and sizes."""
    ours, own_mask, sizes = pair(build("decoder layer"))[1], AttentionMask(is_causal=True), set()
    for _ in range(5):
        ours(*inputs("decoder"), tgt_mask=own_mask, memory_key_padding_mask=padding(S))
        sizes.add(len(straight._last.plan._choices))
    for n in range(1, 5):
        x = torch.randn(N, n, D, device=DEVICE)
        ours(x, x, tgt_mask=own_mask)
        sizes.add(len(straight._last.plan._choices))
    assert len(sizes) == 1


def test_a_plan_belongs_to_a_stream(monkeypatch):
    """Its masks were prepared there. Where they are prepared in each call, as in a capture, no plan is kept."""
    own_mask, x = AttentionMask(key_padding=~padding(L)), inputs("encoder")[0]

    def plans():
        return [straight.shared_plan([own_mask], x) for _ in range(2)]

    first, again = plans()
    assert first is again
    monkeypatch.setattr(attention_mask, "_current_stream", lambda device: 7)
    other, again = plans()
    assert other is again is not first
    monkeypatch.setattr(attention_mask, "_recording", lambda device: (False, True))
    assert len({*map(id, [other, *(captured := plans())])}) == len(captured) + 1


def test_nested_tensors():
    """Left to torch.nn, which has them in inference."""
    rows = [torch.randn(n, D, device=DEVICE) for n in (3, 5)]
    theirs, ours = pair(build("encoder layer").eval())
    with torch.no_grad():
        nested = torch.nested.nested_tensor(rows)
        close(*(m(nested).to_padded_tensor(0.0) for m in (ours, theirs)), atol=0)


@pytest.mark.parametrize("enabled", [True, False])
def test_without_the_fast_path_of_torch(enabled):
    """It changes nothing here."""
    theirs, ours = pair(build("encoder").eval())
    with fast_path(enabled):
        compare(theirs, ours, inputs("encoder"), ~padding(L), grad=False, src_key_padding_mask=padding(L))


def test_torch_computes_what_it_computes_sooner(paths, monkeypatch):
    """An encoder layer's fast path, without masks, for short inputs on a CPU where products are PyTorch's."""
    monkeypatch.setattr(cpu_matmul, "choice", lambda: "PyTorch")
    theirs, ours = pair(build("encoder").eval())
    compare(theirs, ours, inputs("encoder"), grad=False)
    assert paths.left == (2 if DEVICE == "cpu" else 0)
    ours(*inputs("encoder"))
    with torch.no_grad():
        ours(*inputs("encoder"), mask=mask(L, L))
        with use_backend("aten"):
            ours(*inputs("encoder"))
        ours(torch.randn(1, torch_nn.MAX_LENGTH_IN_TORCH + 1, D, device=DEVICE))
        for changed in (dict(bias=False), dict(nhead=1), dict(activation=F.silu), dict(activation=nn.GELU("tanh"))):
            pair(build("encoder", **changed).eval())[1](*inputs("encoder"))
    assert paths.left == (2 if DEVICE == "cpu" else 0)
