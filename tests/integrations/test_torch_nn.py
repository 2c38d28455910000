"""What only torch.nn's attention and layers have: their masks, options, samples and fast path."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from families import (
    DEVICE,
    KINDS,
    D,
    L,
    N,
    S,
    causal,
    check,
    check_gradients,
    fast_path,
    layer,
    mask,
    masks_of,
    padding,
    solve,
    tensors_of,
    tiers,
    ways,
)
from helpers import import_torch_tests
from torch import nn

from fastattn import AttentionMask, accelerate, use_backend
from fastattn.integrations import torch_nn
from fastattn.masks import attention_mask
from fastattn.nn import plan

full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested", "ignore:Support for mismatched"
)


def accelerated(module):
    """Two copies, the second accelerated. A copy of torch.nn's decoder layer forgets an activation that is a module."""
    theirs, ours = copy.deepcopy(module), copy.deepcopy(module)
    accelerate(ours)
    return theirs, ours


def pair(kind, **options):
    return accelerated(layer(kind, **options))


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, rtol=atol, atol=atol)


def compare(theirs, ours, inputs, real=..., grad=True):
    """The same outputs and gradients. real: where outputs count."""
    tolerance = 1e-10 if next(theirs.parameters()).dtype == torch.float64 else 1e-5
    check(solve(ours, inputs, real, grad), solve(theirs, inputs, real, grad), dict(rtol=tolerance, atol=tolerance))


def compare_all(module, tensors, real=..., **options):
    """In training and in eval mode, with and without gradients.

    torch.nn's fast path, in eval mode without gradients, blocks what is not 0 in a float mask of an encoder layer.
    """
    theirs, ours = accelerated(module)
    has_float = any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in options.values())
    for training, grad in itertools.product((True, False), (True, False)):
        theirs.train(training), ours.train(training)
        with fast_path(not has_float):
            compare(theirs, ours, tensors | options, ... if grad or training else real, grad)


# Options and masks.


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
    tensors = tensors_of("attention", batch_first=options.get("batch_first", True))
    tensors["key"] = tensors["key"][..., : options.get("kdim", D)]
    tensors["value"] = tensors["value"][..., : options.get("vdim", D)]
    call = dict(need_weights=bool(weights), average_attn_weights=weights != "per head")
    compare_all(layer("attention", **options), tensors, **call)
    compare_all(layer("attention", **options), tensors, **call, **masks_of("attention", (torch.bool, torch.bool)))


@pytest.mark.bug_class("T25")
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("is_3d", [False, True])
@pytest.mark.parametrize("padded", [None, torch.bool, torch.float32])
def test_attention_masks(kind, is_3d, padded):
    masks = masks_of("attention", (kind, padded), is_3d)
    compare_all(layer("attention"), tensors_of("attention"), need_weights=False, **masks)


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_tensor_as_query_key_and_value(batch_first):
    """One product gives all three; of a memory one gives keys and values."""
    models = pair("attention", batch_first=batch_first)
    x, memory = tensors_of("decoder", batch_first=batch_first).values()
    for sources in ((x, x, x), (x, memory, memory), (x, x, x.clone())):
        results = []
        for module in models:
            module.zero_grad()
            out = module(*sources, need_weights=False)[0]
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in module.parameters())])
        close(*results, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_hint(padded):
    tensors = dict.fromkeys(("query", "key", "value"), tensors_of("encoder")["src"])
    options = dict(attn_mask=causal(L), is_causal=True, key_padding_mask=padding(L) if padded else None)
    compare_all(layer("attention"), tensors, need_weights=False, **options)


def check_layers(kind, options=None, dtype=torch.float32, **call):
    options, real = options or {}, ...
    batch_first = options.get("batch_first", True)
    if kind == "encoder" and call.get("src_key_padding_mask", torch.ones(1)).dtype == torch.bool:
        real = ~call["src_key_padding_mask"]  # torch.nn's fast path gives 0 elsewhere
        real = real if batch_first else real.T
    tensors = tensors_of(kind, dtype, batch_first, options.get("d_model", D))
    compare_all(layer(kind, **options).to(dtype), tensors, real, **call)


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


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "encoder layer"))
@pytest.mark.parametrize("norm_first", [False, True])
def test_float64(kind, norm_first):
    check_layers(kind, dict(norm_first=norm_first), torch.float64, **masks_of(kind, (torch.bool, torch.bool)))
    check_layers(kind, dict(norm_first=norm_first), torch.float64)


CAUSAL = list(itertools.product((True, None), (torch.bool, torch.float32), (False, True)))


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "encoder"))
@pytest.mark.parametrize("how", CAUSAL, ids=str)
def test_causal(kind, how):
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
        ours = pair(kind)[1]
        with use_backend("triton" if DEVICE == "cuda" else "aten"):
            assert ways(ours, lambda: ours(**tensors_of(kind), **options)) == ["whole", "whole"]


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "decoder layer", "encoder"))
def test_unbatched(kind):
    masks = masks_of(kind, (torch.bool, torch.bool))
    masks = {name: t[1] if "padding" in name else t for name, t in masks.items()}
    tensors = {name: t[0] for name, t in tensors_of(kind).items()}
    for options in [{"need_weights": False}, {"need_weights": True}] if kind == "attention" else [{}]:
        compare_all(layer(kind), tensors, **masks, **options)


@pytest.mark.bug_class("T9")
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_query_that_may_attend_to_nothing(kind):
    """0 before the projection out. torch.nn gives 0 too, but NaN with weights and on its fast path."""
    theirs, ours = pair("attention")
    blocked = mask(L, S, kind=kind)
    blocked[1] = True if kind == torch.bool else -torch.inf
    call = tensors_of("attention") | dict(attn_mask=blocked, need_weights=False)
    compare(theirs, ours, call)
    assert torch.equal(ours(**call)[0][0, 1], ours.out_proj.bias)
    theirs, ours = pair("encoder layer")
    blocked = mask(L, L)
    blocked[1] = True
    call = tensors_of("encoder") | dict(src_mask=blocked)
    compare(theirs, ours, call)
    with torch.no_grad():
        fast, found = (m.eval()(**call) for m in (theirs, ours))
    assert fast[:, 1].isnan().all() and not found.isnan().any()
    rest = [0, 2, 3, 4]
    close(found[:, rest], fast[:, rest])


# torch's own samples.


SAMPLED = (
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    *(nn.Transformer, nn.MultiheadAttention),
)


def infos():
    """By class, torch's samples of its modules."""
    ours = {*torch_nn.MIXINS, nn.Transformer}
    return {info.module_cls: info for info in import_torch_tests("common_modules").module_db if info.module_cls in ours}


@pytest.mark.few(4)
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
        theirs, ours = accelerated(kind(*args, **options).train(training))
        given, call = sample.forward_input.args, sample.forward_input.kwargs
        inputs = dict(zip(signature_of(kind), given, strict=False)) | call
        compare(theirs, ours, inputs)
        with fast_path(kind is not nn.Transformer):
            compare(theirs, ours, inputs, grad=False)
        if sample.reference_fn:
            found, right = ours(*given, **call), sample.reference_fn(ours, *given, **call)
            for a, b in zip(*[out if isinstance(out, tuple) else (out,) for out in (found, right)], strict=True):
                close(a, b)


def signature_of(kind):
    return kind.forward.__code__.co_varnames[1 : kind.forward.__code__.co_argcount]


def test_torch_has_no_other_samples():
    found = infos()
    assert found.keys() == {*SAMPLED} and all(info.module_error_inputs_func is None for info in found.values())


WRONG = {
    "width of key and value": ("attention", lambda q, k, v: dict(key=k[..., :-1], value=v[..., :-1])),
    "dtype of query": ("attention", lambda q, k, v: dict(query=q.double())),
    "four dimensions": ("attention", lambda q, k, v: dict(query=q[None], key=k[None], value=v[None])),
    "mask's dtype": ("attention", lambda q, k, v: dict(attn_mask=mask(L, S).int())),
    "mask for other heads": ("attention", lambda q, k, v: dict(attn_mask=mask(L, S, True)[1:])),
    "padding's dtype": ("attention", lambda q, k, v: dict(key_padding_mask=padding(S).long())),
    "hint without a mask": ("attention", lambda q, k, v: dict(is_causal=True)),
    "hint, layer": ("encoder layer", lambda x: dict(is_causal=True)),
    "hint, stack": ("encoder", lambda x: dict(is_causal=True)),
    "hint, decoder": ("decoder", lambda x, memory: dict(tgt_is_causal=True)),
    "hint for memory": ("decoder", lambda x, memory: dict(memory_is_causal=True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_torch(name):
    """What is not a tensor of another size, for which see test_accelerate.py."""
    kind, change = WRONG[name]
    inputs = tensors_of(kind) | ({"need_weights": False} if kind == "attention" else {})
    inputs |= change(*tensors_of(kind).values())
    theirs, ours = pair(kind)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        theirs(**inputs)
    with pytest.raises(expected.type):
        ours(**inputs)


@pytest.mark.bug_class("T15")
@pytest.mark.parametrize("kind", tiers(KINDS[:3], "attention"))
def test_dropout_of_many_calls(kind):
    """The mean and the spread are those of torch.nn's dropout."""
    models = pair(kind, dropout=0.2, **({} if kind == "attention" else dict(norm_first=True)))
    options = dict(need_weights=False) if kind == "attention" else {}
    rows = {name: t.repeat(500, 1, 1) for name, t in tensors_of(kind).items()}
    with torch.no_grad():
        outs = [module(**rows, **options) for module in models]
        expected, many = ((out[0] if kind == "attention" else out).unflatten(0, (500, N)) for out in outs)
    error = (many.std(0) + expected.std(0)) / 500**0.5
    assert ((many.mean(0) - expected.mean(0)).abs() < 5 * error).all()
    close(many.std(0).mean(), expected.std(0).mean(), 0.05)


# What is special to their forward.


def test_a_hook_asks_for_weights():
    """The usual way to look at the attention of a layer."""
    found = []

    def ask(_module, args, options):
        return args, options | dict(need_weights=True)

    for module in (models := pair("encoder layer")):
        module.self_attn.register_forward_pre_hook(ask, with_kwargs=True)
        module.self_attn.register_forward_hook(lambda _m, _i, out: found.append(out[1].detach()))
    compare(*models, tensors_of("encoder") | masks_of("encoder layer", (torch.bool, torch.bool)))
    close(*found)


def test_blocks_that_are_replaced_on_a_layer():
    theirs, ours = pair("encoder")
    for module in (theirs, ours):
        second = module.layers[1]
        second._ff_block = lambda x, second=second: 0.5 * type(second)._ff_block(second, x)
    compare(theirs, ours, tensors_of("encoder") | dict(mask=mask(L, L)))


def test_activations_of_other_libraries_are_called():
    """A module with the name of one of torch.nn's may compute something else."""

    class GELU(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    compare_all(layer("encoder layer", activation=GELU()), tensors_of("encoder"))
    compare(*pair("encoder layer", activation=nn.GELU("tanh")), tensors_of("encoder"))


def test_nested_tensors():
    """Left to torch.nn, which has them in inference."""
    theirs, ours = accelerated(layer("encoder layer").eval())
    with torch.no_grad():
        nested = torch.nested.nested_tensor([torch.randn(n, D, device=DEVICE) for n in (3, 5)])
        close(*(m(nested).to_padded_tensor(0.0) for m in (ours, theirs)), atol=0)


@pytest.mark.bug_class("T23")
@pytest.mark.parametrize("enabled", [True, False])
def test_without_the_fast_path_of_torch(enabled):
    """It changes nothing here."""
    theirs, ours = accelerated(layer("encoder").eval())
    with fast_path(enabled):
        inputs = tensors_of("encoder") | dict(src_key_padding_mask=padding(L))
        compare(theirs, ours, inputs, ~padding(L), grad=False)


def test_torch_computes_layers_without_masks_on_a_cpu():
    """Its forward has a fast path for inference."""
    theirs, ours = accelerated(layer("encoder").eval())
    x = torch.randn(2, 200, D, device=DEVICE)
    compare(theirs, ours, {"src": x}, grad=False)

    def found(**masks):
        with torch.no_grad():
            return ways(ours, lambda: ours(x, **masks))

    left = "left" if DEVICE == "cpu" else "whole"
    assert found() == [left] * 2
    assert "left" not in found(mask=mask(200, 200))
    with use_backend("aten"):
        assert found() == ["whole"] * 2


@full
def test_export():
    theirs, ours = accelerated(layer("transformer", num_encoder_layers=1, num_decoder_layers=1).eval())
    options = dict(tgt_mask=causal(L), tgt_is_causal=True, src_key_padding_mask=padding(S))
    options |= dict(memory_key_padding_mask=padding(S))
    tensors = tuple(tensors_of("transformer").values())
    program = torch.export.export(ours, tensors, options)
    with torch.no_grad():
        close(program.module()(*tensors, **options), theirs(*tensors, **options))


@pytest.mark.parametrize("kind", tiers(KINDS[:3], "encoder layer"))
def test_gradients_per_sample(kind):
    """torch.func.vmap of grad: the formulas of PyTorch's operators."""
    options = dict(need_weights=False) if kind == "attention" else {}
    tensors, found = [*tensors_of(kind).values()], []

    def loss(parameters, module, *given):
        out = torch.func.functional_call(module, parameters, given, options)
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, None, *[0] * len(tensors)))
    for module in pair(kind):
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            found.append(per_sample(parameters, module, *[t[:, None] for t in tensors]))
    for n in range(N):
        check_gradients(*({name: g[n] for name, g in grads.items()} for grads in reversed(found)))


# AttentionMask.


def own(masks):
    """With an AttentionMask in place of each dense mask."""
    return {name: t if "padding" in name else AttentionMask(~t) for name, t in masks.items()}


@pytest.mark.parametrize("norm_first", [False, True])
def test_each_dropout_has_its_own_rate(norm_first):
    """All of the attention is dropped, and nothing of the feed-forward."""
    theirs = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, norm_first=norm_first, device=DEVICE)
    theirs.dropout1.p = 1.0
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x = torch.randn(5, 3, 16, device=DEVICE)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("padded", [None, torch.bool, torch.float32])
def test_attention_mask_in_attention(padded):
    theirs, ours = pair("attention")
    masks = masks_of("attention", (torch.bool, padded))
    for weights, average in ((False, True), (True, True), (True, False)):
        call = tensors_of("attention") | dict(need_weights=weights, average_attn_weights=average)
        check(solve(ours, call | own(masks)), solve(theirs, call | masks), dict(rtol=1e-4, atol=1e-5))


@pytest.mark.parametrize("kind", tiers(KINDS[1:], "decoder layer", "encoder"))
@pytest.mark.parametrize("padded", DTYPES)
def test_attention_mask_in_layers(kind, padded):
    """It is combined with the padding that comes with it."""
    theirs, ours = pair(kind)
    masks = masks_of(kind, (torch.bool, padded))
    expected = solve(theirs, tensors_of(kind) | masks)
    check(solve(ours, tensors_of(kind) | own(masks)), expected, dict(rtol=1e-5, atol=1e-5))


def test_attention_mask_with_a_hint():
    """As in scaled_dot_product_attention both restrict."""
    theirs, ours = pair("encoder layer")
    (x,) = tensors_of("encoder").values()
    only_padding = AttentionMask(key_padding=~padding(L))
    close(ours(x, src_mask=only_padding, is_causal=True), theirs(x, causal(L), padding(L)))


REFUSED = {
    "unbatched": ("encoder layer", {}, lambda x: dict(src=x[0])),
    "unbatched stack": ("encoder", {}, lambda x: dict(src=x[0])),
    "unbatched attention": ("attention", {}, lambda q, k, v: dict(query=q[0], key=k[0], value=v[0])),
    "padding's shape": ("encoder layer", {}, lambda x: dict(src_key_padding_mask=padding(S))),
    "padding's shape, stack": ("encoder", {}, lambda x: dict(src_key_padding_mask=padding(S))),
    "padding's dtype": ("encoder layer", {}, lambda x: dict(src_key_padding_mask=padding(L).int())),
    "memory's width": ("decoder layer", {}, lambda x, memory: dict(memory=memory[..., 1:])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_mask_is_refused(name):
    """Where torch.nn's forward has to be called."""
    kind, options, change = REFUSED[name]
    inputs = tensors_of(kind) | ({"need_weights": False} if kind == "attention" else {})
    inputs |= change(*tensors_of(kind).values())
    mask_name = {"attention": "attn_mask", "encoder": "mask", "encoder layer": "src_mask"}.get(kind, "tgt_mask")
    module = layer(kind, **options)
    accelerate(module)
    with pytest.raises(ValueError, match="AttentionMask"):
        module(**inputs, **{mask_name: AttentionMask(is_causal=True)})


def test_an_attention_mask_is_refused_by_a_changed_layer():
    class Mine(nn.TransformerEncoderLayer):
        pass

    class Attention(nn.MultiheadAttention):
        pass

    def weight_norm(second):
        nn.utils.parametrizations.weight_norm(second.self_attn, "in_proj_weight")

    changes = (
        lambda second: setattr(second, "__class__", Mine),
        lambda second: setattr(second.self_attn, "__class__", Attention),
    )
    for change in (*changes, weight_norm):
        ours = pair("encoder")[1]
        change(ours.layers[1])
        with pytest.raises(ValueError, match="AttentionMask"):
            ours(**tensors_of("encoder"), mask=AttentionMask(is_causal=True))


def test_an_attention_mask_of_another_size():
    with pytest.raises(ValueError, match="attn_mask"):
        pair("encoder")[1](**tensors_of("encoder"), mask=AttentionMask(~mask(S, S)))


def test_an_attention_mask_that_is_changed_in_place():
    """The next call has the new values."""
    real = ~padding(L)
    own_mask = AttentionMask(key_padding=real)
    theirs, ours = pair("encoder layer")
    (x,) = tensors_of("encoder").values()
    for _ in range(3):
        close(ours(x, own_mask), theirs(x, src_key_padding_mask=~real))
        real[0, real[0].sum() - 1] = False


def test_an_attention_mask_is_used_in_inference_and_then_in_training():
    own_mask = AttentionMask(is_causal=True, key_padding=~padding(L))
    theirs, ours = pair("encoder")
    inputs = tensors_of("encoder")
    with torch.inference_mode():
        ours(**inputs, mask=own_mask)
    expected = solve(theirs, inputs | dict(mask=causal(L), src_key_padding_mask=padding(L)))
    check(solve(ours, inputs | dict(mask=own_mask)), expected, dict(rtol=1e-5, atol=1e-5))


# What layers that share masks decide once: the only tests of this folder that look inside fastattn.nn.


def plan_of(own_mask, x):
    return plan.shared_plan([own_mask], x)


def test_a_plan_does_not_grow():
    """A mask that the user keeps does not keep what was decided for other masks and sizes."""
    ours, own_mask, sizes = pair("decoder layer")[1], AttentionMask(is_causal=True), set()
    for _ in range(5):
        ours(**tensors_of("decoder"), tgt_mask=own_mask, memory_key_padding_mask=padding(S))
        sizes.add(len(plan._last.plan._choices))
    for n in range(1, 5):
        x = torch.randn(N, n, D, device=DEVICE)
        ours(x, x, tgt_mask=own_mask)
        sizes.add(len(plan._last.plan._choices))
    assert len(sizes) == 1


def test_a_plan_belongs_to_a_request_and_a_stream(monkeypatch):
    """Its masks were prepared there. Where they are prepared in each call, as in a capture, no plan is kept."""
    own_mask, x = AttentionMask(key_padding=~padding(L)), tensors_of("encoder")["src"]

    def plans():
        return [plan_of(own_mask, x) for _ in range(2)]

    first, again = plans()
    assert first is again
    monkeypatch.setenv("FASTATTN_BACKEND", "attention=aten")
    other, again = plans()
    assert other is again is not first
    monkeypatch.delenv("FASTATTN_BACKEND")
    first, _ = plans()
    monkeypatch.setattr(attention_mask, "_current_stream", lambda device: 7)
    other, again = plans()
    assert other is again is not first
    monkeypatch.setattr(attention_mask, "_recording", lambda device: (False, True))
    assert len({*map(id, [other, *(captured := plans())])}) == len(captured) + 1
