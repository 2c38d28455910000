"""What accelerate(model) promises, for each family of models: next to the same model untouched.

The everyday tier sees every test and a family of each kind of layer. What one library alone has is in
test_torch_nn.py, test_huggingface.py and test_loss.py.
"""

import contextlib
import copy
import io
import itertools
import pickle
import re
import subprocess
import sys
from collections import Counter

import families as families_module
import pytest
import torch
from families import (
    DEVICE,
    EVERYDAY,
    FAMILIES,
    HUGGINGFACE,
    check_gradients,
    fast_path,
    gradients,
    layers_of,
    loss_of,
    outputs_of,
    pair,
    set_dropout,
    tiers,
    ways,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

from fastattn import accelerate, restore, use_backend
from fastattn.backends import cpu_matmul
from fastattn.integrations import huggingface, huggingface_layers
from fastattn.nn import leaves

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
full = pytest.mark.full
WHOLE = [name for name, family in FAMILIES.items() if family.is_whole]
LAYERED = [name for name in FAMILIES if name != "attention"]
ONE_BACKEND = "triton" if DEVICE == "cuda" else "aten"  # the default of a GPU in float32 mixes backends


def families(*everyday, of=FAMILIES, lacks=None):
    """These families in the everyday tier, all with --full but those whose own code lacks what is tested."""
    names = [name for name in of if lacks not in FAMILIES[name].lacks]
    return pytest.mark.parametrize("name", tiers(names, *everyday))


# Numbers.


@pytest.mark.bug_class("T23")
@families(*EVERYDAY)
@pytest.mark.parametrize("masks", tiers(["masks", "no masks"], "masks"))
def test_outputs_and_gradients(name, masks):
    """In training, in eval mode, and there without gradients. On a GPU torch.nn's fast path computes gelu, which
    the encoder layer has, by tanh."""
    models = pair(name)
    if masks == "no masks":
        inputs = {n: t for n, t in models.inputs.items() if not n.endswith("mask")}
        models = models._replace(inputs=inputs)
    for training, grad in ((True, True), (False, True), (False, False)):
        with fast_path(DEVICE == "cpu" or name != "encoder layer"):
            models.train(training).compare(grad)


# A text does not call T5Gemma 2's layers for images.
@families("bart", "t5", "bert", "encoder layer", "transformer", of=[name for name in LAYERED if name != "t5gemma 2"])
def test_layers_are_whole(name):
    """Where the documentation lists them so. The backend reference has no whole layers."""
    models = pair(name).train()
    for backend, is_whole in ((ONE_BACKEND, name in WHOLE), ("reference", False)):
        with use_backend(backend):
            found = ways(models.ours, lambda: models.solve(models.ours))
        assert found == ["whole" if is_whole else "by modules"] * len(layers_of(models.ours))


def test_layers_share_a_mask_with_a_bias_by_distance(monkeypatch):
    """What a CPU adds to the scores is made once for the layers of a stack, where nothing is learned."""
    monkeypatch.setattr(huggingface_layers, "MAX_DENSE_BIAS", 0)
    models, made = pair("t5").train(False), []
    with_bias = huggingface._with_bias
    monkeypatch.setattr(huggingface, "_with_bias", lambda *given: made.append(with_bias(*given)) or made[-1])
    expected = models.solve(models.theirs, False)
    models.check(models.solve(models.ours, False), expected)
    masks = [id(mask) for mask in made if mask is not None and mask.relative_bias is not None]
    assert len(masks) == 4 and len(set(masks)) == 2


@pytest.mark.skipif(DEVICE == "cuda", reason="this machine has a GPU, and the rule is for CPUs")
@families("marian", "t5", "bert", "llama", of=HUGGINGFACE, lacks="sdpa")
def test_small_training_on_a_cpu_is_the_librarys_own(name):
    """To the last bit, with transformers' attention "sdpa", unless a backend is requested."""
    models = pair(name).train()
    models.theirs.set_attn_implementation("sdpa")
    results = []
    for model in (models.ours, models.theirs):
        model.zero_grad()
        output = outputs_of(model, models.inputs)[0]
        loss_of(output).backward()
        results.append([output, *gradients(model).values()])
    rounds_otherwise = name in ("t5", "gated t5", "mt5", "umt5", "llama", "gpt2")  # a fused RMSNorm or gelu
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * models.tolerance["atol"] if rounds_otherwise else 0)
    assert "whole" not in ways(models.ours, lambda: outputs_of(models.ours, models.inputs))


@pytest.mark.skipif(DEVICE == "cuda", reason="this machine has a GPU, and the rule is for CPUs")
@families("marian", "bert", "t5", "llama", "decoder", of=LAYERED)
def test_layers_on_a_cpu_call_their_modules(name, monkeypatch):
    """In training and in eval mode, unless a backend is requested; in training under torch.autocast they are whole."""
    monkeypatch.setattr(families_module, "by_fastattn", contextlib.nullcontext)
    for limit in ("MAX_TOKENS", "MAX_SCORES"):  # so that the attention is fastattn's
        monkeypatch.setattr(leaves, limit, 0)
    models = pair(name).train()
    models.compare()
    assert "whole" not in ways(models.ours, lambda: models.solve(models.ours))
    with torch.autocast("cpu", torch.bfloat16):
        assert ("whole" in ways(models.ours, lambda: models.solve(models.ours))) is (name in WHOLE)
    assert "whole" not in ways(models.train(False).ours, lambda: models.solve(models.ours, grad=False))


PARTS = {"attention": dict(layers=False), "layers": dict(attention=False), "none": dict(attention=False, layers=False)}


def parts_alone(name, part):
    models = pair(name)
    restore(models.ours)
    return models._replace(report=accelerate(models.ours, **PARTS[part]))


@families("bart", "whisper", "llama", "transformer")
@pytest.mark.parametrize("part", PARTS)
def test_parts_alone(name, part):
    """attention=False keeps the library's attention, and torch.nn's layers. layers=False keeps the layers."""
    models = parts_alone(name, part)
    taken = {entry.kind for entry in models.report.taken}
    if name in HUGGINGFACE:
        assert models.ours.config._attn_implementation == ("fastattn" if part == "attention" else "eager")
    else:
        assert ("MultiheadAttention" in taken) is (part == "attention")
    if name in WHOLE:
        kind = type(layers_of(models.theirs)[0]).__name__
        assert (kind in taken) is (part == "layers" and name in HUGGINGFACE)
    models.train().compare()
    models.train(False).compare(grad=False)
    restore(models.ours)
    assert [type(m) for m in models.ours.modules()] == [type(m) for m in models.theirs.modules()]


@families("marian", "encoder", lacks="training")
def test_training(name):
    """The losses of twenty steps."""
    models, losses = pair(name).train(), []
    for model in (models.theirs, models.ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(20):
            loss = loss_of(outputs_of(model, models.inputs)[0][models.real])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    atol = models.tolerance["atol"]
    torch.testing.assert_close(*map(torch.stack, losses), rtol=atol, atol=atol)
    assert losses[0][-1] < losses[0][0]


@families("marian", "encoder layer", "decoder layer", lacks="float64")
def test_float64(name):
    models = pair(name)
    models.theirs.double(), models.ours.double()
    inputs = {
        n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in models.inputs.items()
    }
    models._replace(inputs=inputs, tolerance=dict(rtol=0.0, atol=1e-10)).train().compare()


@families("t5", "encoder")
@pytest.mark.parametrize("dtype", tiers([torch.float16, torch.bfloat16], torch.bfloat16))
def test_half_precision(name, dtype):
    """About as close to float32 as the untouched model, with T5's wo in float32 as from_pretrained keeps it."""
    models, errors = pair(name), []
    expected = models.solve(models.theirs, grad=False).outputs[0]
    inputs = {
        n: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in models.inputs.items()
    }
    models = models._replace(inputs=inputs)
    for model in (models.ours, models.theirs):
        model.to(dtype)
        for n, module in model.named_modules():
            if n.endswith(".wo"):
                module.float()
        errors.append((models.solve(model, grad=False).outputs[0].float() - expected).norm())
    assert errors[0] <= 3 * errors[1] + 1e-3 * expected.norm()


@families("marian", "attention", "decoder layer", "encoder")
def test_autocast(name):
    """As near to float32 as the untouched model, in its dtype: hidden states between sublayers are float32 here too.

    torch.nn's with gelu and small weights: where rounding moves a hidden unit across 0, relu's gradient jumps.
    """
    smooth = {} if name in (*HUGGINGFACE, "attention") else {"activation": "gelu", "scale": 1.0}
    models = pair(name, **smooth).train()
    for grad in (True, False):
        expected, errors, dtypes = models.solve(models.theirs, grad), [], []
        with torch.autocast(DEVICE, torch.bfloat16):
            for model in (models.ours, models.theirs):
                found = models.solve(model, grad)
                assert found.grads.keys() == expected.grads.keys()
                offs = [(found.grads[n] - g).norm() for n, g in expected.grads.items()]
                errors.append([(found.outputs[0] - expected.outputs[0]).norm(), torch.tensor(offs).norm()])
                dtypes.append(found.outputs[0].dtype)
        assert dtypes[0] == dtypes[1]
        for ours, theirs in zip(*errors, strict=True):
            assert ours <= (1.25 if name in HUGGINGFACE else 1.5) * theirs + 1e-4  # torch.nn's have few outputs


@families("transformer")
@pytest.mark.parametrize("backend", tiers(["reference", "aten", "triton"], "reference"))
def test_backends(name, backend):
    models = pair(name).train()
    expected = models.solve(models.theirs)
    with use_backend(backend):
        models.check(models.solve(models.ours), expected)


# Derivatives.


@families("encoder layer")
def test_second_derivatives(name):
    """A gradient penalty."""
    models, found = pair(name), []
    for model in (models.ours, models.theirs):
        parameters = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and "1." not in n]
        with use_backend("reference"), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            loss = outputs_of(model, models.inputs)[0][models.real].square().mean()
            grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            model.zero_grad()
            sum(g.square().sum() for g in grads if g is not None).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for n, expected in found[1].items():
        if not n.endswith("k_proj.bias"):  # whose derivatives are 0 but for rounding
            assert (found[0][n] - expected).norm() <= 1e-3 * expected.norm() + 1e-5, n


@families("encoder layer")
def test_torch_func(name):
    """Gradients by torch.func."""
    models = pair(name)
    expected = models.solve(models.theirs).grads

    def loss(parameters):
        out = torch.func.functional_call(models.ours, parameters, (), models.inputs)
        return loss_of(outputs_of(lambda: out, {})[0][models.real])

    parameters = {n: p.detach() for n, p in models.ours.named_parameters()}
    found = torch.func.grad(loss)(parameters)
    expected = {n: expected[n] for n in parameters if n in expected}
    check_gradients({n: found[n] for n in expected}, expected)


@families("marian", "encoder", of=LAYERED)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(name, reentrant):
    """With dropout it draws again what it drew."""
    models = pair(name).train()

    def solve_checkpointed():
        model = models.ours
        if name not in HUGGINGFACE:
            return models.solve(model, call=checkpoint_layers(model, reentrant))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        found = models.solve(model)
        model.gradient_checkpointing_disable()
        return found

    models.check(solve_checkpointed(), models.solve(models.theirs))
    set_dropout(models.ours, 0.3)
    found = []
    for solve in (solve_checkpointed, lambda: models.solve(models.ours)):
        torch.manual_seed(3)
        found.append(solve())
    models.check(*found)


def checkpoint_layers(model, reentrant):
    def call(**inputs):
        run = lambda *values: model(**dict(zip(inputs, values, strict=True)))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, *inputs.values(), use_reentrant=reentrant)

    return call


@families("vit", "decoder")
@pytest.mark.parametrize("part", ["every second", "first layers", "norms", "biases", "all"])
def test_frozen_parameters(name, part):
    """Of all, the inputs still have gradients."""
    models = pair(name).train()
    for model in (models.theirs, models.ours):
        for i, (n, p) in enumerate(model.named_parameters()):
            frozen = {"every second": i % 2 == 0, "first layers": "encoder." in n or ".0." in n, "all": True}
            frozen |= {"norms": "norm" in n.lower(), "biases": n.endswith("bias")}
            p.requires_grad_(not frozen[part])
    models.compare(grad=name not in HUGGINGFACE or any(p.requires_grad for p in models.ours.parameters()))


# Dropout.


@pytest.mark.bug_class("T15")
@families("t5", "bert", "attention", "decoder layer")
@pytest.mark.parametrize("part", ["all", "attention"])
def test_dropout(name, part):
    """Other numbers in every call of training, the same after the same seed; none in eval mode."""
    models = pair(name) if part == "all" else parts_alone(name, part)
    for model in (models.ours, models.theirs):
        set_dropout(model, 0.3)
    models.compare()
    models.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([models.solve(models.ours).outputs[0] for _ in range(2)])
    assert all(map(torch.equal, *found[:2]))
    assert not torch.equal(*found[0]) and not torch.equal(found[0][0], found[2][0])


@families("bert", "encoder layer", "decoder layer", of=WHOLE)
def test_layers_and_their_modules_draw_the_same_dropout(name):
    """A hook on any module makes its sublayer call its modules. On a GPU, whose generator draws
    the seeds of a layer at once as other numbers, and whose nn.Dropout is PyTorch's, the numbers are others."""
    models = pair(name).train()
    model = set_dropout(models.ours, 0.3)
    layer = layers_of(model)[-1]

    def solve():
        torch.manual_seed(7)
        with use_backend(ONE_BACKEND):
            return models.solve(model)

    expected = solve()
    for path, hooked in layer.named_modules():
        if hooked is layer or (path == "activation_fn" and hasattr(layer, "ffn")):  # SeamlessM4T never calls it
            continue
        calls, found = [], []
        handle = hooked.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        way = ways(model, lambda: found.append(solve()))[-1]  # noqa: B023
        assert calls or way == "by modules"  # of some Dropouts a library reads p alone
        if DEVICE == "cpu":
            models.check(found[0], expected)
        handle.remove()


# The model stays what it was.


@families("marian", "attention", "transformer")
def test_restore(name):
    """Names and classes stay as they are; restore gives every bit back."""
    models = pair(name)
    theirs, ours = models.theirs, models.ours
    expected, kinds = models.solve(theirs), [type(m) for m in theirs.modules()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [type(m).__name__ for m in ours.modules()] == [kind.__name__ for kind in kinds]
    assert [type(m) for m in ours.modules()] != kinds and [*ours.state_dict()] == [*theirs.state_dict()]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    again = [type(m) for m in ours.modules()]
    report = accelerate(ours)
    assert [type(m) for m in ours.modules()] == again and len(report.taken) >= len(models.report.taken) > 0
    models.compare()
    for _ in range(2):
        restore(ours)
        assert [type(m) for m in ours.modules()] == kinds
        found = models.solve(ours)
        assert all(map(torch.equal, found.outputs, expected.outputs))
        assert all(torch.equal(found.grads[n], g) for n, g in expected.grads.items())


@families("bert", "transformer", lacks="pickle")
@pytest.mark.parametrize("how", tiers(["deepcopy", "pickle", "torch.save"], "deepcopy", "torch.save"))
def test_copies(name, how):
    """A copy is accelerated and on its own, in the mode of the original."""
    models, file = pair(name).train(), io.BytesIO()
    layers_of(models.ours)[-1].eval()
    expected = models.solve(models.ours)
    if how == "torch.save":
        torch.save(models.ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(models.ours) if how == "deepcopy" else pickle.loads(pickle.dumps(models.ours))
    assert [type(m) for m in other.modules()] == [type(m) for m in models.ours.modules()]
    assert [m.training for m in other.modules()] == [m.training for m in models.ours.modules()]
    models.check(models.solve(other), expected)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    restore(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in models.theirs.modules()]
    models.check(models.solve(models.ours), expected)
    if name in HUGGINGFACE:
        assert other.config._attn_implementation == "eager" and models.ours.config._attn_implementation == "fastattn"


@full
@pytest.mark.parametrize("name", ["marian", "transformer"])
def test_a_pickle_is_read_in_another_process(name, tmp_path):
    models = pair(name)
    expected = models.solve(models.ours, grad=False).outputs[0]
    torch.save((models.ours, models.inputs, expected, models.real), tmp_path / "model.pt")
    code = (
        f"import torch; m, i, expected, real = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "with torch.no_grad(): out = m(**i)\n"
        "torch.testing.assert_close(getattr(out, 'logits', out)[real], expected)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@families("bert", "encoder", of=LAYERED)
def test_nothing_is_left_after_an_exception(name):
    models = pair(name)
    failing = [m for m in models.ours.modules() if isinstance(m, nn.Linear | nn.LayerNorm)][-2]

    def fail(*_):
        raise KeyError("stop")

    handle = failing.register_forward_pre_hook(fail)
    before = [set(m.__dict__) for m in models.ours.modules()]
    with pytest.raises(KeyError, match="stop"):
        models.solve(models.ours)
    assert [set(m.__dict__) for m in models.ours.modules()] == before
    handle.remove()
    models.compare()


@families("bert", "encoder")
def test_a_subclass_of_the_user_is_left(name):
    """Its forward may compute something else."""
    models = pair(name)
    kind = type(layers_of(models.theirs)[-1])
    mine = type(
        "Mine", (kind,), {"forward": lambda self, *given, **options: doubled(kind.forward(self, *given, **options))}
    )
    restore(models.ours)
    for model in (models.theirs, models.ours):
        layers_of(model)[-1].__class__ = mine
    report = accelerate(models.ours)
    if any(entry.kind == kind.__name__ for entry in models.report.taken):
        (entry,) = (entry for entry in report.left if entry.kind.endswith("Mine"))
        assert f"subclass of {kind.__name__}" in entry.reason and entry.reason in str(report)
    assert type(layers_of(models.ours)[-1]) is mine
    models.train().compare()


@families("bert", "encoder", of=[*WHOLE, "attention"])
def test_restore_refuses_a_changed_class(name):
    """As fully_shard changes it; nothing is restored then."""
    model = pair(name).ours
    layer = layers_of(model)[-1]
    path = next(n for n, m in model.named_modules() if m is layer)
    layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=f"{path} is a FSDP.*, a subclass"):
        restore(model)
    assert [type(m) for m in model.modules()] == kinds


@families("vit", "t5", "decoder")
@pytest.mark.skipif(DEVICE == "cuda", reason="products of oneDNN are a CPU's")
def test_linear_maps_keep_their_class(name, monkeypatch):
    """Tools as quantize_dynamic look for nn.Linear itself. Where oneDNN's products are the fastest, layers use them in
    training and in inference."""
    monkeypatch.setattr(cpu_matmul, "choice", lambda: "oneDNN")
    monkeypatch.setattr(cpu_matmul, "MIN_WORK", 1)
    models = pair(name).train()
    found = [[type(m) for m in model.modules() if isinstance(m, nn.Linear)] for model in models[:2]]
    assert found[0] == found[1]
    models.compare()
    with torch.profiler.profile() as profile:
        models.train(False).compare(grad=False)
    # GPT-2's layers have no nn.Linear.
    assert name == "gpt2" or "mkldnn::_linear_pointwise" in {event.key for event in profile.key_averages()}


# What is modified is called.


def inner_paths(model):
    """The modules inside one layer of each stack, the second if there is one, and outside of layers those without
    children. torch.nn reads the weight of an attention's out_proj, and calls no forward."""
    names = dict(model.named_modules())
    layers = [n for n, m in names.items() if m in layers_of(model)]

    def is_chosen(n, m):
        first = re.match(r"(\D+\.)0(\..*)$", n)
        if not n or n in layers or isinstance(m, nn.ModuleList) or (first and f"{first[1]}1{first[2]}" in names):
            return False
        return not [*m.children()] or any(n.startswith(f"{layer}." if layer else "") for layer in layers)

    plain = nn.modules.linear.NonDynamicallyQuantizableLinear
    return [n for n, m in names.items() if is_chosen(n, m) and type(m) is not plain]


@families("mbart", "bert", "encoder layer", "decoder layer", lacks="hooks")
def test_hooks(name):
    """On one module, and on every module. They get as many arguments by position and gradients, too."""
    models = pair(name).train()
    paths = inner_paths(models.theirs)
    for hooked in (*([n] for n in paths), ["", *paths]):
        found = []
        for model in (models.ours, models.theirs):
            noted, handles = Counter(), []
            for n in hooked:
                module = model.get_submodule(n)
                for kind in ("forward_pre", "forward", "full_backward"):

                    def note(_module, given, *_out, key=(n, kind), noted=noted):
                        noted[(*key, len(given))] += 1

                    handles.append(getattr(module, f"register_{kind}_hook")(note))
            found.append((models.solve(model), noted))
            for handle in handles:
                handle.remove()
        models.check(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
    assert len(found[1][1]) > len(paths)  # of three for each; some modules are never called


@families("bert", "decoder layer")
def test_global_hooks(name):
    """A hook on all modules of the process, as profilers use it, sees every module that the untouched model calls."""
    models, found = pair(name), []
    for model in (models.ours, models.theirs):
        noted, names = Counter(), {m: n for n, m in model.named_modules() if not n.endswith("out_proj")}
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, *_, noted=noted, names=names: noted.update([names[m]] if m in names else [])
        )
        try:
            found.append((models.solve(model), noted))
        finally:
            handle.remove()
    models.check(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def doubled(out):
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


class Doubled(nn.Module):
    """Has none of the attributes of the module that it calls."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **options):
        return doubled(self.module(*args, **options))


def replace(parent, name):
    setattr(parent, name, Doubled(parent._modules[name]))


def subclass(parent, name):
    child, kind = parent._modules[name], type(parent._modules[name])
    forward = {"forward": lambda self, *args, **options: doubled(kind.forward(self, *args, **options))}
    child.__class__ = type("Mine", (kind,), forward)


def patch_forward(parent, name):
    child = parent._modules[name]
    child.forward = lambda *args, forward=child.forward, **options: doubled(forward(*args, **options))


def hook(parent, name):
    parent._modules[name].register_forward_hook(lambda _module, _args, out: doubled(out))


def hook_the_gradient(parent, name):
    parent._modules[name].register_full_backward_hook(
        lambda _m, grads, _: tuple(g if g is None else g / 2 for g in grads)
    )


def weight_name(module):
    return next((n for n in ("weight", "in_proj_weight") if getattr(module, n, None) is not None), None)


def parametrise(parent, name):
    child = parent._modules[name]
    nn.utils.parametrize.register_parametrization(child, weight_name(child), Doubled(nn.Identity()))


def prune_weight(parent, name):
    prune.random_unstructured(parent._modules[name], weight_name(parent._modules[name]), amount=0.3)


def change_bias(parent, name):
    """Where there is one, there is none."""
    child = parent._modules[name]
    child.bias = nn.Parameter(torch.randn_like(child.weight[:, 0])) if child.bias is None else None


CHANGES = [replace, subclass, patch_forward, hook, hook_the_gradient, parametrise, prune_weight, change_bias]


def can_change(change, model, path):
    module = model.get_submodule(path)
    if change in (parametrise, prune_weight):
        return weight_name(module) is not None
    if change is change_bias:
        return isinstance(module, nn.Linear)
    return change is not replace or not path.endswith(".wo")  # whose weight T5 reads


@families("bert", "decoder", of=LAYERED)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_module_that_is_changed(name, change, request):
    """One after the other, in turn before and after accelerate. Every eighth in the everyday tier."""
    models = pair(name)
    paths = [n for n in inner_paths(models.theirs) if can_change(change, models.theirs, n)]
    assert paths
    for n, path in enumerate(paths):
        if n % len(CHANGES) != CHANGES.index(change) % len(paths) and not request.config.getoption("--full"):
            continue
        ours = copy.deepcopy(models.ours if n % 2 else models.theirs)
        theirs = copy.deepcopy(models.theirs)
        for model in (theirs, ours):
            torch.manual_seed(4)
            parent, _, child = path.rpartition(".")
            change(model.get_submodule(parent), child)
        accelerate(ours)
        try:
            expected = models.solve(theirs.train())
        except AttributeError:  # the library reads what a replaced module has not
            assert change is replace
            continue
        except RuntimeError:
            assert change is hook_the_gradient and "hooks" in FAMILIES[name].lacks
            continue
        try:
            models.check(models.solve(ours.train()), expected)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from error


@families("marian", "encoder", of=LAYERED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(name, when):
    """Adapters that peft makes before or after accelerate are trained alone."""
    peft = pytest.importorskip("peft")
    models = pair(name)
    maps = [n for n, m in models.theirs.named_modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    config = peft.LoraConfig(target_modules=maps[::3], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(models.theirs), config)
    if when == "before":
        ours = peft.get_peft_model(models.theirs, config)
        accelerate(ours)
    else:
        ours = peft.get_peft_model(models.ours, config)
    ours.load_state_dict(theirs.state_dict())
    models = models._replace(theirs=theirs, ours=ours).train()
    models.compare()
    assert all("lora" in n or n in models.inputs for n in models.solve(ours).grads)
    restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    ours.merge_and_unload()


# torch.compile.


@pytest.mark.bug_class("T22")
@families("encoder layer", "marian", lacks="one graph")
def test_one_compiled_graph(name):
    check_one_graph(name, pair(name))


@families(of=[*HUGGINGFACE, "attention"], lacks="one graph")
def test_one_compiled_graph_of_the_attention(name):
    """The attention alone is accelerated. Layers of torch.nn around it read the values of a mask."""
    check_one_graph(name, parts_alone(name, "attention"))


def check_one_graph(name, models):
    """One for training, one for inference. Calls with other tensors of the same sizes compile nothing.

    Skips where PyTorch does not trace the untouched model in one graph: 2.11 has no copy.deepcopy, which
    encoder-decoders call.
    """
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(models.ours, backend=graphs, fullgraph=True)
    try:
        for seed, grad in itertools.product(range(3), (True, False)):
            inputs = {
                n: t + seed if isinstance(t, torch.Tensor) and not n.endswith("mask") else t
                for n, t in models.inputs.items()
            }
            other = models._replace(inputs={n: t % 99 if "ids" in n else t for n, t in inputs.items()})
            other.check(other.solve(models.ours, grad, compiled), other.solve(models.theirs, grad))
    except torch._dynamo.exc.Unsupported:
        if name not in HUGGINGFACE:
            raise
        try:
            torch.compile(models.theirs, fullgraph=True, backend="eager")(**models.inputs)
        except torch._dynamo.exc.Unsupported as error:
            pytest.skip(f"the untouched model is not traced: {str(error).splitlines()[0]}")
        raise
    assert graphs.frame_count == 2


@families("bert", lacks="compiled")
def test_compiled_training(name, monkeypatch, request):
    """On a CPU dropout and the products of layers are what they are in eager mode: faster than the compiler's."""
    monkeypatch.setattr(cpu_matmul, "choice", lambda: "oneDNN")
    monkeypatch.setattr(cpu_matmul, "MIN_WORK", 1)
    monkeypatch.setattr(families_module, "by_fastattn", contextlib.nullcontext)
    for name_of_limit in ("MIN_DROPPED", "MAX_TOKENS"):  # below them eager dropout is PyTorch's
        monkeypatch.setattr(leaves, name_of_limit, 0)
    models = pair(name).train()
    torch._dynamo.reset()
    compiled = torch.compile(models.ours, backend="aot_eager")
    if DEVICE != "cpu" or request.config.getoption("--full"):
        models.check(models.solve(models.ours, call=compiled), models.solve(models.theirs))
    if DEVICE == "cpu":
        set_dropout(models.ours, 0.3)
        found = []
        for call in (compiled, models.ours):
            torch.manual_seed(1)
            with torch.profiler.profile() as profile:
                found.append(models.solve(models.ours, call=call))
            names = {event.key for event in profile.key_averages()}
            assert name not in WHOLE or "mkldnn::_linear_pointwise" in names
        models.check(*found)


class FirstOutput(nn.Module):
    """A model as a function of its tensors alone."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *tensors):
        names = [n for n, t in self.inputs.items() if isinstance(t, torch.Tensor)]
        return outputs_of(self.model, self.inputs | dict(zip(names, tensors, strict=True)))[0]


@families("bert", of=HUGGINGFACE, lacks="sdpa")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
def test_exported(name, grad):
    """By torch.export with a free batch, and by torch.jit.trace, where the untouched model is."""
    models = pair(name)
    tensors = [t for t in models.inputs.values() if isinstance(t, torch.Tensor)]
    others = [torch.cat([t, t]) for t in tensors]

    def exported(model):
        shapes = (tuple({0: torch.export.Dim("batch", min=2, max=64)} for _ in tensors),)
        return torch.export.export(model, tuple(tensors), dynamic_shapes=shapes).module()

    for export in (exported, lambda model: torch.jit.trace(model, tensors)):
        with torch.set_grad_enabled(grad):
            try:
                expected = export(FirstOutput(models.theirs.eval(), models.inputs))(*others)
            except Exception:
                continue
            found = export(FirstOutput(models.ours.eval(), models.inputs))(*others)
        torch.testing.assert_close(found, expected, **models.tolerance)


# Wrong input.


@families("encoder", of=[name for name in FAMILIES if name not in HUGGINGFACE])
def test_wrong_inputs(name):
    """What torch.nn refuses is refused by the same kind of error."""
    models, refused = pair(name), 0
    tensors = {n: t for n, t in models.inputs.items() if isinstance(t, torch.Tensor)}
    changes = (lambda t: t[..., :-1], lambda t: t[:1], lambda t: t[None], torch.Tensor.tolist)
    for (n, t), change in itertools.product(tensors.items(), changes):
        if change is torch.Tensor.tolist and not n.endswith("mask"):
            continue
        inputs = models.inputs | {n: change(t)}
        try:
            outputs_of(models.theirs, inputs)
        except Exception as error:
            refused += 1
            with pytest.raises(type(error)):
                outputs_of(models.ours, inputs)
    assert refused > len(tensors)
