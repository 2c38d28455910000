"""What only torch.nn's attention and layers have: their masks, options, samples and fast path."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from families import (
    DEVICE,
    HEADS,
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
from torch import nn

from fastattn import AttentionMask, accelerate, use_backend

full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested", "ignore:Support for mismatched"
)


def pair(kind, **options):
    """Two modules, the second accelerated. A copy of torch.nn's decoder layer forgets an activation that is a module,
    so both are copies."""
    theirs, ours = (copy.deepcopy(layer(kind, **options)) for _ in range(2))
    accelerate(ours)
    return theirs, ours


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, rtol=atol, atol=atol)


def compare(theirs, ours, inputs, real=..., grad=True, own=None):
    """The same outputs and gradients. real: where outputs count.     own: what ours is given, if it differs."""
    check(solve(ours, own or inputs, real, grad), solve(theirs, inputs, real, grad), dict(rtol=1e-5, atol=1e-5))


def compare_all(theirs, ours, inputs, real=...):
    """In training and in eval mode, with and without gradients.

    torch.nn's fast path, in eval mode without gradients, blocks what is not 0 in a float mask of an encoder layer.
    """
    has_float = any(n.endswith("mask") and t.is_floating_point() for n, t in inputs.items())
    for training, grad in itertools.product((True, False), (True, False)):
        theirs.train(training), ours.train(training)
        with fast_path(not has_float):
            compare(theirs, ours, inputs, ... if grad or training else real, grad)


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


class GELU(nn.Module):
    """Another library's, with the name of one of torch.nn's."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


LAYERS = {
    "plain": {},
    "another library's": dict(activation=GELU()),
    "pre-norm": dict(norm_first=True),
    "batch second": dict(batch_first=False),
    "pre-norm, batch second, gelu": dict(norm_first=True, batch_first=False, activation="gelu"),
    "gelu": dict(activation=F.gelu),
    "gelu module": dict(activation=nn.GELU()),
    "gelu by tanh": dict(activation=nn.GELU("tanh")),
    "relu module": dict(activation=nn.ReLU()),
    "silu": dict(activation=F.silu),
    "another": dict(activation=torch.tanh),
    "no bias": dict(bias=False),
    "pre-norm, no bias": dict(bias=False, norm_first=True),
    "three heads": dict(nhead=3, d_model=18),
    "eps": dict(layer_norm_eps=0.1),
}
OPTIONS = {kind: ATTENTION if kind == "attention" else LAYERS for kind in KINDS}
DTYPES = {"no": None, "bool": torch.bool, "float": torch.float32}
# The mask and the blocked keys of every attention. Or the causal mask of a sequence's own attention, whose blocked
# keys have the same dtype; without the hint stacks find out that it is causal.
CALLS = [f"{dense} {keys}" for dense, keys in itertools.product(DTYPES, DTYPES)]
CALLS += [f"{call} 3-D" for call in CALLS if not call.startswith("no")]
CALLS += [f"causal {how}" for how in ("bool", "float", "bool hint", "bool padding", "float hint padding")]
CALLS += ["causal float padding", "causal float biased"]  # biased: not 0 where it is visible
# The kind, the options and the call of the everyday tier. The full tier has all of each kind.
EVERYDAY = [("attention", options, call) for options in ATTENTION for call in ("no no", "bool bool")]
EVERYDAY += [("attention", "plain", call) for call in CALLS] + [("decoder", "plain", call) for call in CALLS]
EVERYDAY += [("decoder layer", options, "bool bool") for options in LAYERS]
EVERYDAY += [
    (k, "pre-norm", c) for k in KINDS[1:] for c in ("float float 3-D", "causal float", "causal float hint padding")
]
CASES = [
    pytest.param(*case, marks=() if case in EVERYDAY else full)
    for kind in KINDS
    for case in itertools.product([kind], OPTIONS[kind], CALLS)
    if not (case[2].endswith("3-D") and {"nhead", "num_heads"} & {*OPTIONS[kind][case[1]]})  # masks are of four heads
    and not (case[2].startswith("causal") and "kdim" in OPTIONS[kind][case[1]])
]


def masks_for(kind, call):
    first, *words = call.split()
    if first != "causal":
        return masks_of(kind, (DTYPES[first], DTYPES[words[0]]), "3-D" in words)
    side = "src_" if kind.startswith("encoder") else "tgt_" if kind != "attention" else ""
    name = {"attention": "attn_mask", "encoder": "mask"}.get(kind, f"{side}mask")
    masks = {name: causal(L, DTYPES[words[0]])}
    if "biased" in words:
        masks[name] = masks[name] - torch.arange(L, device=DEVICE) / 3
    if "hint" in words:
        masks["is_causal" if side != "tgt_" else "tgt_is_causal"] = True
    return masks | ({f"{side}key_padding_mask": padding(L, DTYPES[words[0]])} if "padding" in words else {})


@pytest.mark.parametrize(("kind", "options", "call"), CASES)
def test_calls(kind, options, call):
    options, real = OPTIONS[kind][options], ...
    batch_first = options.get("batch_first", True)
    inputs = tensors_of(kind, batch_first=batch_first, d_model=options.get("d_model", D)) | masks_for(kind, call)
    models = pair(kind, **options)
    if kind == "attention":
        if call.startswith("causal"):  # one product gives all three
            inputs |= dict.fromkeys(("query", "key", "value"), inputs["query"])
        elif "kdim" in options:
            inputs["key"] = inputs["key"][..., : options["kdim"]]
            inputs["value"] = inputs["value"][..., : options["vdim"]]
        elif "float" in call:  # of a memory one product gives keys and values
            inputs["value"] = inputs["key"]
        for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            compare_all(*models, inputs | weights)
        return
    keys = inputs.get("src_key_padding_mask")
    if kind == "encoder" and keys is not None and keys.dtype == torch.bool:
        real = ~keys if batch_first else ~keys.T  # torch.nn's fast path gives 0 elsewhere
    compare_all(*models, inputs, real)


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "decoder layer", "encoder"))
def test_unbatched(kind):
    masks = masks_of(kind, (torch.bool, torch.bool))
    masks = {name: t[1] if "padding" in name else t for name, t in masks.items()}
    tensors = {name: t[0] for name, t in tensors_of(kind).items()}
    for options in [{"need_weights": False}, {"need_weights": True}] if kind == "attention" else [{}]:
        compare_all(*pair(kind), tensors | masks | options)


def test_a_query_that_may_attend_to_nothing():
    """0 before the projection out. torch.nn gives 0 too, but NaN with weights and on its fast path."""
    for kind, hidden in ((torch.bool, True), (torch.float32, -torch.inf)):
        theirs, ours = pair("attention")
        blocked = mask(L, S, kind=kind)
        blocked[1] = hidden
        call = tensors_of("attention") | dict(attn_mask=blocked, need_weights=False)
        compare(theirs, ours, call)
        assert torch.equal(ours(**call)[0][0, 1], ours.out_proj.bias)
    theirs, ours = pair("encoder layer")
    call = tensors_of("encoder") | dict(src_mask=blocked[:, :L].isinf())
    compare(theirs, ours, call)
    with torch.no_grad():
        fast, found = (m.eval()(**call) for m in (theirs, ours))
    assert fast[:, 1].isnan().all() and not found.isnan().any()


# Wrong calls.


HINTS = ({"is_causal": True}, {"tgt_is_causal": True}, {"memory_is_causal": True})
SHAPES = (lambda t: t[..., :-1], lambda t: t[:1], lambda t: t[None])


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "encoder"))
def test_errors_are_those_of_torch(kind):
    """What torch.nn refuses is refused by the same kind of error: other sizes and dtypes, and hints without a mask."""
    theirs, ours = pair(kind)
    tensors, masks = tensors_of(kind), masks_of(kind, (torch.bool, torch.bool))
    wrong = [{n: change(t)} for n, t in (tensors | masks).items() for change in SHAPES]
    wrong += [{n: t.double()} for n, t in tensors.items()]
    wrong += [{n: change(t)} for n, t in masks.items() for change in (torch.Tensor.int, torch.Tensor.tolist)]
    names = {*type(theirs).forward.__code__.co_varnames}
    wrong += [dict.fromkeys(masks) | hint for hint in HINTS if {*hint} <= names]
    refused, always = 0, {"need_weights": False} if kind == "attention" else {}
    for change in wrong:
        call = tensors | masks | always | change
        try:
            theirs(**call)
        except Exception as error:
            refused += 1
            with pytest.raises(type(error)):
                ours(**call)
    assert refused > 2 * len(tensors | masks)


# What is special to their forward.


def test_a_hook_asks_for_weights():
    """The usual way to look at the attention of a layer."""
    found = []
    for module in (models := pair("encoder layer")):
        module.self_attn.register_forward_pre_hook(
            lambda _m, args, given: (args, given | dict(need_weights=True)), with_kwargs=True
        )
        module.self_attn.register_forward_hook(lambda _m, _i, out: found.append(out[1].detach()))
    compare(*models, tensors_of("encoder") | masks_of("encoder layer", (torch.bool, torch.bool)))
    close(*found)


def test_blocks_that_are_replaced_on_a_layer():
    theirs, ours = pair("encoder")
    for module in (theirs, ours):
        second = module.layers[1]
        second._ff_block = lambda x, second=second: 0.5 * type(second)._ff_block(second, x)
    compare(theirs, ours, tensors_of("encoder") | dict(mask=mask(L, L)))


def test_nested_tensors():
    """Left to torch.nn, which has them in inference."""
    theirs, ours = (module.eval() for module in pair("encoder layer"))
    with torch.no_grad():
        nested = torch.nested.nested_tensor([torch.randn(n, D, device=DEVICE) for n in (3, 5)])
        close(*(m(nested).to_padded_tensor(0.0) for m in (ours, theirs)), atol=0)


def test_torch_computes_layers_without_masks_on_a_cpu():
    """Its forward has a fast path for inference."""
    ours, x = pair("encoder")[1].eval(), torch.randn(2, 200, D, device=DEVICE)

    def found(**masks):
        with torch.no_grad():
            return ways(ours, lambda: ours(x, **masks))

    left = "left" if DEVICE == "cpu" else "whole"
    assert found() == [left] * 2
    assert "left" not in found(mask=mask(200, 200))
    with use_backend("aten"):
        assert found() == ["whole"] * 2


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


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "decoder layer", "encoder"))
@pytest.mark.parametrize("padded", DTYPES.values())
def test_attention_mask(kind, padded):
    """In place of each dense mask, combined with the padding that comes with it."""
    theirs, ours = pair(kind)
    masks = masks_of(kind, (torch.bool, padded))
    own = {name: t if "padding" in name else AttentionMask(~t) for name, t in masks.items()}
    calls = [dict(need_weights=False), dict(average_attn_weights=False), {}] if kind == "attention" else [{}]
    for call in calls:
        tensors = tensors_of(kind) | call
        compare(theirs, ours, tensors | masks, own=tensors | own)


def test_attention_mask_with_a_hint():
    """As in scaled_dot_product_attention both restrict."""
    theirs, ours = pair("encoder layer")
    (x,) = tensors_of("encoder").values()
    only_padding = AttentionMask(key_padding=~padding(L))
    close(ours(x, src_mask=only_padding, is_causal=True), theirs(x, causal(L), padding(L)))


def test_attention_masks_from_call_to_call():
    """One that is changed in place has its new values in the next call, another one its own. After inference it is
    used in training."""
    real = ~padding(L)
    masks = [
        AttentionMask(key_padding=real),
        AttentionMask(is_causal=True, key_padding=real),
        AttentionMask(~mask(L, L)),
    ]
    theirs, ours = pair("encoder")
    inputs = tensors_of("encoder")
    for _ in range(3):
        for own in masks:
            with torch.inference_mode():
                ours(**inputs, mask=own)
            visible = own.dense(N, HEADS, L, L, DEVICE)
            blocked = ~visible.expand(N, HEADS, L, L).flatten(0, 1)
            compare(theirs, ours, inputs | dict(mask=blocked), own=inputs | dict(mask=own))
        real[0, real[0].sum() - 1] = False


def subclassed(module):
    module.__class__ = type("Mine", (type(module).original,), {})
    return {}


def weight_norm(module):
    nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    return {}


# The kind, and a change of the module or of its inputs.
REFUSED = {
    "unbatched": ("encoder layer", lambda _, x: dict(src=x[0])),
    "unbatched stack": ("encoder", lambda _, x: dict(src=x[0])),
    "unbatched attention": ("attention", lambda _, q, k, v: dict(query=q[0], key=k[0], value=v[0])),
    "padding's shape": ("encoder layer", lambda _, x: dict(src_key_padding_mask=padding(S))),
    "padding's dtype": ("encoder", lambda _, x: dict(src_key_padding_mask=padding(L).int())),
    "memory's width": ("decoder layer", lambda _, x, memory: dict(memory=memory[..., 1:])),
    "a layer of another class": ("encoder", lambda ours, x: subclassed(ours.layers[1])),
    "attention of another class": ("encoder", lambda ours, x: subclassed(ours.layers[1].self_attn)),
    "a parametrised attention": ("encoder", lambda ours, x: weight_norm(ours.layers[1].self_attn)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_mask_is_refused(name):
    """Where torch.nn's forward has to be called, which does not know it."""
    kind, change = REFUSED[name]
    ours, inputs = pair(kind)[1], tensors_of(kind)
    inputs |= change(ours, *inputs.values())
    mask_name = {"attention": "attn_mask", "encoder": "mask", "encoder layer": "src_mask"}.get(kind, "tgt_mask")
    with pytest.raises(ValueError, match="AttentionMask"):
        ours(**inputs, **{mask_name: AttentionMask(is_causal=True)})
