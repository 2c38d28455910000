"""What only torch.nn's attention and layers have: their masks, options, samples and fast path."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from catalogue import some
from families import (
    DEVICE,
    KINDS,
    D,
    L,
    S,
    causal,
    check,
    fast_path,
    layer,
    mask,
    masks_of,
    padding,
    solve,
    tensors_of,
    tiers,
)
from hypothesis import strategies as st
from torch import nn

from fastattn import AttentionMask, accelerate

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested", "ignore:Support for mismatched"
)


def pair(kind, **options):
    """Two modules, the second accelerated. A copy of torch.nn's decoder layer forgets an activation that is a module,
    so both are copies."""
    theirs, ours = (copy.deepcopy(layer(kind, **options)) for _ in range(2))
    accelerate(ours)
    return theirs, ours


def compare(theirs, ours, inputs, real=..., grad=True, own=None):
    """The same outputs and gradients. real: where outputs count. own: what ours is given, if it differs."""
    check(solve(ours, own or inputs, real, grad), solve(theirs, inputs, real, grad), dict(rtol=1e-5, atol=1e-5))


def compare_all(theirs, ours, inputs, real=...):
    """In training and in eval mode, with and without gradients.

    torch.nn's fast path, in eval mode without gradients, blocks what is not 0 in a float mask of an encoder layer, and
    computes gelu exactly where it is asked for gelu by tanh.
    """
    is_off = any(n.endswith("mask") and t.is_floating_point() for n, t in inputs.items())
    is_off = is_off or any(isinstance(m, nn.GELU) for m in theirs.modules())
    for training, grad in itertools.product((True, False), (True, False)):
        theirs.train(training), ours.train(training)
        with fast_path(not is_off):
            compare(theirs, ours, inputs, ... if grad or training else real, grad)


# Options and masks.


class GELU(nn.Module):
    """Another library's, with the name of one of torch.nn's."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


OPTIONS = {
    "attention": {
        "plain": {},
        "batch second": dict(batch_first=False),
        "no bias": dict(bias=False),
        "one head": dict(num_heads=1),
        "kdim and vdim": dict(kdim=6, vdim=10),
        "bias_kv": dict(add_bias_kv=True),
        "zero_attn": dict(add_zero_attn=True),
    }
}
LAYERS = {
    "plain": {},
    "another library's": dict(activation=GELU()),
    "pre-norm, batch second, gelu": dict(norm_first=True, batch_first=False, activation="gelu"),
    "gelu by tanh": dict(activation=nn.GELU("tanh")),
    "silu": dict(activation=F.silu),
    "no bias": dict(bias=False),
    "three heads": dict(nhead=3, d_model=18),
    "eps": dict(layer_norm_eps=0.1),
}
DTYPES = {"no": None, "bool": torch.bool, "float": torch.float32}
# The mask and the blocked keys of every attention. Or the causal mask of a sequence's own attention, whose blocked
# keys have the same dtype; without the hint stacks find out that it is causal.
CALLS = [f"{dense} {keys}" for dense, keys in itertools.product(DTYPES, DTYPES)]
CALLS += ["bool no 3-D", "float float 3-D", "causal bool", "causal float hint", "causal float hint padding"]
CALLS += ["causal bool padding", "causal float padding", "causal float biased"]  # biased: not 0 where it is visible
CASES = [(kind, "plain", call) for kind in KINDS for call in CALLS]
CASES += [(kind, options, "bool bool") for kind in KINDS for options in OPTIONS.setdefault(kind, LAYERS)]
EVERYDAY = [(kind, options, call) for kind, options, call in CASES if kind in ("attention", "decoder layer")]
EVERYDAY += [("decoder", "plain", call) for call in CALLS if call.startswith("causal")]
EVERYDAY += [("encoder layer", "plain", "float float"), ("encoder", "plain", "causal float hint padding")]


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


@pytest.mark.parametrize(
    ("kind", "options", "call"), [pytest.param(*c, marks=() if c in EVERYDAY else pytest.mark.full) for c in CASES]
)
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


BOOL = st.booleans()
RANDOM = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS[1:]),
        "options": some(
            norm_first=BOOL,
            batch_first=BOOL,
            bias=BOOL,
            activation=st.sampled_from(("relu", "gelu")),
            dim_feedforward=st.sampled_from((1, 40)),
        ),
        "masks": st.tuples(*[st.sampled_from([*DTYPES.values()])] * 2),
        "is_3d": BOOL,
        "training": BOOL,
        "grad": BOOL,
    }
)


@pytest.mark.full
def test_random_calls(fuzz):
    """Combinations of the options of layers and stacks and of their masks."""

    def compare_random(drawn):
        kind, options = drawn["kind"], drawn["options"]
        inputs = tensors_of(kind, batch_first=options.get("batch_first", True))
        models = [module.train(drawn["training"]) for module in pair(kind, **options)]
        with fast_path(False):
            compare(*models, inputs | masks_of(kind, drawn["masks"], drawn["is_3d"]), grad=drawn["grad"])

    fuzz(compare_random, RANDOM, share=0.5)


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "encoder"))
def test_unbatched(kind):
    masks = masks_of(kind, (torch.bool, torch.bool))
    masks = {name: t[1] if "padding" in name else t for name, t in masks.items()}
    compare_all(*pair(kind), {name: t[0] for name, t in tensors_of(kind).items()} | masks)


def test_a_query_that_may_attend_to_nothing():
    """0 before the projection out. torch.nn gives 0 too, but NaN with weights and on its fast path."""
    for kind, hidden in ((torch.bool, True), (torch.float32, -torch.inf)):
        theirs, ours = pair("attention")
        blocked = mask(L, S, kind=kind)
        blocked[1] = hidden
        call = tensors_of("attention") | dict(attn_mask=blocked, need_weights=False)
        compare(theirs, ours, call)
        assert torch.equal(ours(**call)[0][0, 1], ours.out_proj.bias)
    ours = pair("encoder layer")[1].eval()
    with torch.no_grad():
        assert not ours(*tensors_of("encoder").values(), src_mask=blocked[:, :L].isinf()).isnan().any()


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "encoder"))
def test_errors_are_those_of_torch(kind):
    """What torch.nn refuses is refused: other sizes by the same kind of error; other dtypes may be a TypeError, since
    fused layers on a GPU check them first."""
    theirs, ours = pair(kind)
    call = tensors_of(kind) | masks_of(kind, (torch.bool, torch.bool))
    refused = 0
    for name, t in call.items():
        other_dtype = t.double() if t.is_floating_point() else t.int()
        for wrong in (t[..., :-1], t[:1], t[None], other_dtype):
            try:
                theirs(**call | {name: wrong})
            except Exception as error:
                refused += 1
                with pytest.raises((type(error), TypeError) if wrong is other_dtype else type(error)):
                    ours(**call | {name: wrong})
    assert refused > 2 * len(call)


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
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_replaced_on_a_layer():
    theirs, ours = pair("encoder")
    for module in (theirs, ours):
        second = module.layers[1]
        second._ff_block = lambda x, second=second: 0.5 * type(second)._ff_block(second, x)
    compare(theirs, ours, tensors_of("encoder") | dict(mask=mask(L, L)))


# AttentionMask.


@pytest.mark.parametrize("kind", tiers(KINDS, "attention", "decoder layer", "encoder"))
@pytest.mark.parametrize("padded", DTYPES.values())
def test_attention_mask(kind, padded):
    """In place of each dense mask, combined with the padding that comes with it."""
    theirs, ours = pair(kind)
    masks = masks_of(kind, (torch.bool, padded))
    own = {name: t if "padding" in name else AttentionMask(~t) for name, t in masks.items()}
    calls = [dict(need_weights=False), {}] if kind == "attention" else [{}]
    for call in calls:
        tensors = tensors_of(kind) | call
        compare(theirs, ours, tensors | masks, own=tensors | own)
