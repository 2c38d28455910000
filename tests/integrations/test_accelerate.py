"""What accelerate(model) promises, for each family of models: next to the same model untouched.

The everyday tier sees every test and a family of each kind of layer. What one library alone has is in
test_torch_nn.py, test_huggingface.py and test_loss.py, and graphs=True in test_graphs.py.
"""

import copy
import itertools
import pickle
import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from families import (
    DEVICE,
    EVERYDAY,
    FAMILIES,
    HUGGINGFACE,
    check_gradients,
    converted,
    eager,
    fast_path,
    kinds_of,
    layers_of,
    pair,
    set_dropout,
    tiers,
    ways,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

from fastattn import accelerate, restore, use_backend

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
WHOLE = [name for name, family in FAMILIES.items() if family.is_whole]
LAYERED = [name for name in FAMILIES if name != "attention"]
ONE_BACKEND = "triton" if DEVICE == "cuda" else "aten"  # the default of a GPU in float32 mixes backends
ROWS = 137  # times a batch of 27 tokens: above them a CPU has something to gain from fastattn's attention
on_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="this machine has a GPU, and the rule is for CPUs")


def families(*everyday, of=FAMILIES, lacks=None):
    """These families in the everyday tier, all with --full but those whose own code lacks what is tested."""
    names = [name for name in of if lacks not in FAMILIES[name].lacks]
    return pytest.mark.parametrize("name", tiers(names, *everyday))


# Numbers: what is done to the models of a pair before they are compared.


def no_masks(models):
    return models._replace(inputs={n: t for n, t in models.inputs.items() if not n.endswith("mask")})


def float64(models):
    models.theirs.double(), models.ours.double()
    inputs = converted(models.inputs, torch.Tensor.double)
    return models._replace(inputs=inputs, tolerance=dict(rtol=0.0, atol=1e-10))


def by(models, backend):
    def call(**inputs):
        with use_backend(backend):
            return models.ours(**inputs)

    return models._replace(call=call)


def freeze(models, is_frozen):
    """is_frozen(i, name): of the i-th parameter."""
    for model in models[:2]:
        for i, (name, p) in enumerate(model.named_parameters()):
            p.requires_grad_(not is_frozen(i, name))
    return models


PARTS = {"attention": dict(layers=False), "layers": dict(attention=False)}


def alone(models, part):
    restore(models.ours)
    return models._replace(report=accelerate(models.ours, **PARTS[part]))


def graphs(models):
    """On a CPU nothing changes. On a GPU the third call that records gradients is captured."""
    return models._replace(report=accelerate(models.ours, graphs=True))


def checkpointed(models, reentrant=False):
    """Of transformers' models by their own method, of others as a whole."""
    model, options = models.ours, {"use_reentrant": reentrant}
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if reentrant:
            model.enable_input_require_grads()
        return models

    def call(**inputs):  # a GPU's random state is kept for tensors that are given by position
        compute = lambda *given: model(**dict(zip(inputs, given, strict=True)))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(compute, *inputs.values(), **options)

    return models._replace(call=call)


def adapted(models, before):
    """By adapters of peft, which are trained alone, before or after accelerate."""
    peft = pytest.importorskip("peft")
    maps = [n for n, m in models.theirs.named_modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    config = peft.LoraConfig(target_modules=maps[::3], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(models.theirs), config)
    ours = peft.get_peft_model(models.theirs if before else models.ours, config)
    accelerate(ours)
    ours.load_state_dict(theirs.state_dict())
    return models._replace(theirs=theirs, ours=ours)


class Treatment(NamedTuple):
    """What is done to the models, the families of the everyday tier, all families, and what they must not lack."""

    treat: object
    everyday: tuple = ()
    of: object = FAMILIES
    lacks: str | None = None


TREATMENTS = {
    "nothing": Treatment(lambda m: m, EVERYDAY),
    "no masks": Treatment(no_masks, ("t5",)),
    "float64": Treatment(float64, ("marian", "encoder layer", "decoder layer"), lacks="float64"),
    "reference": Treatment(lambda m: by(m, "reference"), ("transformer",)),
    "triton": Treatment(lambda m: by(m, "triton"), of=("marian", "gated t5", "transformer")),
    "frozen: every second": Treatment(lambda m: freeze(m, lambda i, _: i % 2), ("decoder",)),
    "frozen: biases": Treatment(lambda m: freeze(m, lambda _, name: "bias" in name.lower()), ("decoder",)),
    "frozen: all": Treatment(lambda m: freeze(m, lambda *_: True), ("vit", "decoder")),
    "attention alone": Treatment(lambda m: alone(m, "attention"), ("bart", "transformer")),
    "layers alone": Treatment(lambda m: alone(m, "layers"), ("whisper", "llama", "transformer")),
    "graphs": Treatment(graphs, ("t5", "transformer"), LAYERED),
    "checkpoint": Treatment(checkpointed, ("marian", "encoder"), LAYERED),
    "reentrant checkpoint": Treatment(lambda m: checkpointed(m, reentrant=True), ("marian",), HUGGINGFACE),
    "adapters before": Treatment(lambda m: adapted(m, True), ("marian", "vit", "encoder"), LAYERED),
    "adapters after": Treatment(lambda m: adapted(m, False), ("encoder",), LAYERED),
}
CASES = [
    pytest.param(name, treatment, id=f"{treatment}-{name}", marks=() if name in everyday else pytest.mark.full)
    for treatment, (_, everyday, of, lacks) in TREATMENTS.items()
    for name in of
    if lacks not in FAMILIES[name].lacks
]


@pytest.mark.parametrize(("name", "treatment"), CASES)
def test_outputs_and_gradients(name, treatment):
    """In training, in eval mode, and there without gradients; then restore gives every class and every bit back.

    torch.nn's fast path, in eval mode without gradients, reads no adapters. On a GPU it computes gelu, which the
    encoder layer has, by tanh.
    """
    models = TREATMENTS[treatment].treat(pair(name))
    has_fast_path = (DEVICE == "cpu" or name != "encoder layer") and "adapters" not in treatment
    for training, grad in ((True, True), (False, True), (False, False)):
        with fast_path(has_fast_path):
            models.train(training).compare(grad)
    restore(models.ours)
    assert kinds_of(models.ours) == kinds_of(models.theirs)
    models._replace(call=None, tolerance=dict(rtol=0, atol=0)).compare(grad=False)


@families("t5", "marian", "decoder layer")
@pytest.mark.parametrize(("autocast", "grad"), [(False, True), (True, True), (True, False)])
def test_16_bits(name, autocast, grad):
    """As near to float32 as the untouched model, in its dtype: hidden states between sublayers are float32 under
    autocast. T5's wo stays float32, as from_pretrained keeps it.

    torch.nn's with gelu and small weights: where rounding moves a hidden unit across 0, relu's gradient jumps.
    """
    smooth = {} if name in (*HUGGINGFACE, "attention") else {"activation": "gelu", "scale": 1.0}
    models = pair(name, **smooth).train()
    expected, errors, dtypes = models.solve(models.theirs, grad), [], []
    if not autocast:
        models = models._replace(inputs=converted(models.inputs, torch.Tensor.bfloat16))
    for model in models[:2]:
        for n, module in model.bfloat16().named_modules() if not autocast else ():
            if n.endswith(".wo"):
                module.float()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            found = models.solve(model, grad)
        assert found.grads.keys() == expected.grads.keys()
        offs = [(found.grads[n] - g).norm() for n, g in expected.grads.items()]
        errors.append([(found.outputs[0] - expected.outputs[0]).norm(), torch.tensor(offs).norm()])
        dtypes.append(found.outputs[0].dtype)
    assert dtypes[0] == dtypes[1]
    factor, slack = (1.25 if name in HUGGINGFACE else 1.5, 0) if autocast else (3, 1e-3)  # torch.nn's have few outputs
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= factor * theirs + slack * expected.outputs[0].norm() + 1e-4


# How layers compute.


@families("bart", "t5", "encoder layer", of=LAYERED)
def test_layers_are_whole(name):
    """Where the documentation lists them so. The backend reference has no whole layers."""
    models = pair(name).train()
    for backend, is_whole in ((ONE_BACKEND, name in WHOLE), ("reference", False)):
        called = by(models, backend)
        found = ways(models.ours, lambda: called.solve(models.ours))  # noqa: B023
        assert found == ["whole" if is_whole else "by modules"] * len(layers_of(models.ours))


@on_a_cpu
@families("marian", "decoder", of=LAYERED)
def test_layers_on_a_cpu_call_their_modules(name):
    """In training and in eval mode, unless a backend is requested; in training under torch.autocast they are whole.
    Small training calls of transformers' are their own, with attention "sdpa", to the last bit."""
    models = pair(name)._replace(is_whole=False)
    if name in HUGGINGFACE and "sdpa" not in FAMILIES[name].lacks:
        rounds_otherwise = name in ("t5", "gated t5", "mt5", "umt5", "llama", "gpt2")  # a fused RMSNorm or gelu
        models.theirs.set_attn_implementation("sdpa")
        models._replace(tolerance=dict(rtol=0, atol=1e-4 if rounds_otherwise else 0)).train().compare()
    models = models.repeat(ROWS)
    for training in (True, False):
        models.train(training).compare(grad=training)
        assert "whole" not in ways(models.ours, lambda: models.solve(models.ours, grad=training))  # noqa: B023
    with torch.autocast("cpu", torch.bfloat16):
        assert ("whole" in ways(models.ours, lambda: models.train().solve(models.ours))) is (name in WHOLE)


# Dropout.


@families("t5", "bert", "attention", "decoder layer")
@pytest.mark.parametrize("part", tiers(["all", "attention"], "all"))
def test_dropout(name, part):
    """Other numbers in every call of training, the same after the same seed and in a checkpoint; none in eval mode.

    The same too where hooks make a layer call its modules; a GPU's nn.Dropout is PyTorch's, with other numbers.
    """
    models = pair(name) if part == "all" else alone(pair(name), part)
    for model in models[:2]:
        set_dropout(model, 0.3)
    models.compare()
    models.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([models.solve(models.ours) for _ in range(2)])
    outputs = [[result.outputs[0] for result in results] for results in found]
    assert all(map(torch.equal, *outputs[:2]))
    assert not torch.equal(*outputs[0]) and not torch.equal(outputs[0][0], outputs[2][0])
    if name in WHOLE and part == "all" and DEVICE == "cpu":
        modules = [m for m in layers_of(models.ours)[-1].modules() if type(m) in (nn.Linear, nn.LayerNorm)]
        handles = [module.register_forward_hook(lambda *_: None) for module in modules]
        torch.manual_seed(1)
        models.check(models.solve(models.ours), found[0][0])
        for handle in handles:
            handle.remove()
    if name != "attention":
        torch.manual_seed(1)
        models.check(checkpointed(models).solve(models.ours), found[0][0])


# The model stays what it was.


@families("marian", "attention", "transformer")
def test_names_and_classes(name):
    """They stay as they are, and nn.Linear is nn.Linear. A second call changes nothing."""
    theirs, ours = (models := pair(name))[:2]
    kinds, again = kinds_of(theirs), kinds_of(ours)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [kind.__name__ for kind in again] == [kind.__name__ for kind in kinds] and again != kinds
    assert all(a is b for a, b in zip(again, kinds, strict=True) if issubclass(b, nn.Linear))
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    report = accelerate(ours)
    assert kinds_of(ours) == again and len(report.replaced) >= len(models.report.replaced) > 0
    for _ in range(2):
        restore(ours)
        assert kinds_of(ours) == kinds


@families("bert", "transformer", lacks="pickle")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(name, how):
    """A copy is accelerated and on its own, in the mode of the original."""
    models = pair(name).train()
    layers_of(models.ours)[-1].eval()
    expected = models.solve(models.ours)
    other = copy.deepcopy(models.ours) if how == "deepcopy" else pickle.loads(pickle.dumps(models.ours))
    assert kinds_of(other) == kinds_of(models.ours)
    assert [m.training for m in other.modules()] == [m.training for m in models.ours.modules()]
    models.check(models.solve(other), expected)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    restore(other)
    assert kinds_of(other) == kinds_of(models.theirs)
    models.check(models.solve(models.ours), expected)
    if name in HUGGINGFACE:
        assert other.config._attn_implementation == "eager" and models.ours.config._attn_implementation == "fastattn"


@families("bart", of=HUGGINGFACE)
def test_save_pretrained(name, tmp_path):
    """What is saved is the library's own model."""
    models = pair(name)
    models.ours.save_pretrained(tmp_path)
    loaded = eager(type(models.theirs).from_pretrained(tmp_path))
    models._replace(ours=loaded, tolerance=dict(rtol=0, atol=0)).compare(grad=False)


def doubled(out):
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


def subclass_of(kind):
    forward = {"forward": lambda self, *args, **options: doubled(kind.forward(self, *args, **options))}
    return type("Mine", (kind,), forward)


@families("bert", "encoder")
def test_a_subclass_of_the_user_is_left(name):
    """Its forward may compute something else. The report names it."""
    models = pair(name)
    kind = type(layers_of(models.theirs)[-1])
    restore(models.ours)
    for model in models[:2]:
        layers_of(model)[-1].__class__ = subclass_of(kind)
    report = accelerate(models.ours)
    if any(entry.kind == kind.__name__ for entry in models.report.replaced):
        (entry,) = (entry for entry in report.skipped if entry.kind.endswith("Mine"))
        assert f"subclass of {kind.__name__}" in entry.reason and entry.reason in str(report)
    models.train().compare()


def test_restore_refuses_a_changed_class():
    """As fully_shard changes it; nothing is restored then."""
    model = pair("bert").ours
    layer = layers_of(model)[-1]
    layer.__class__ = type("FSDPLayer", (type(layer),), {})
    kinds = kinds_of(model)
    with pytest.raises(ValueError, match="is a FSDP.*, a subclass"):
        restore(model)
    assert kinds_of(model) == kinds


@pytest.mark.parametrize("part", [None, *PARTS])
@pytest.mark.parametrize("name", ["marian", "transformer"])
def test_the_report(name, part):
    """It names what was taken, by the arguments of accelerate. torch.nn's layers need their attention."""
    models = pair(name) if part is None else alone(pair(name), part)
    attention, layer = {
        "marian": ("MarianMTModel: attention", "MarianEncoderLayer"),
        "transformer": ("MultiheadAttention", "TransformerEncoderLayer"),
    }[name]
    found = [entry.path for entry in models.report.replaced if entry.kind == layer]
    paths = [path for path, module in models.ours.named_modules() if type(module).__name__ == layer]
    assert found == (paths if part is None or (part == "layers" and name == "marian") else [])
    assert (attention in {entry.kind for entry in models.report.replaced}) is (part != "layers")
    assert (["replaced", "2", layer, paths[0]] in map(str.split, str(models.report).splitlines())) is bool(found)


# What is modified is called.


def inner_paths(model):
    """The modules inside one layer of each stack, the second if there is one, and outside of layers those without
    children. torch.nn reads the weight of an attention's out_proj, and calls no forward."""
    names = dict(model.named_modules())
    layers = tuple(f"{n}." if n else "" for n, m in names.items() if m in layers_of(model))

    def is_chosen(n, m):
        has_second = re.sub(r"(\D\.)0(\..*)$", r"\g<1>1\2", n) in {*names} - {n}
        if not n or f"{n}." in layers or isinstance(m, nn.ModuleList) or has_second:
            return False
        return not [*m.children()] or n.startswith(layers)

    plain = nn.modules.linear.NonDynamicallyQuantizableLinear
    return [n for n, m in names.items() if is_chosen(n, m) and type(m) is not plain]


class Doubled(nn.Module):
    """Has none of the attributes of the module that it calls."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **options):
        return doubled(self.module(*args, **options))


def weight_name(module):
    return next((n for n in ("weight", "in_proj_weight") if getattr(module, n, None) is not None), None)


def patch_forward(child):
    child.forward = lambda *args, forward=child.forward, **options: doubled(forward(*args, **options))


# A hook before a call doubles what the module gets by position: the library gives as much so. Its gradients, too.
CHANGES = {
    "replaced": lambda child: Doubled(child),
    "subclass": lambda child: setattr(child, "__class__", subclass_of(type(child))),
    "its own forward": patch_forward,
    "hook": lambda child: child.register_forward_hook(lambda _module, _args, out: doubled(out)),
    "hook before": lambda child: child.register_forward_pre_hook(
        lambda _m, args: tuple(2 * t if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args)
    ),
    "hook of gradients": lambda child: child.register_full_backward_hook(
        lambda _m, grads, _: tuple(g if g is None else g / 2 for g in grads)
    ),
    "parametrised": lambda child: nn.utils.parametrize.register_parametrization(
        child, weight_name(child), Doubled(nn.Identity())
    ),
    "pruned": lambda child: prune.random_unstructured(child, weight_name(child), amount=0.3),
}


def can_change(change, child, path):
    if change in ("parametrised", "pruned"):
        return weight_name(child) is not None
    return change != "replaced" or not path.endswith(".wo")  # whose weight T5 reads


@families("bert", "decoder", of=LAYERED)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_changed(name, change, request):
    """One after the other, in turn before and after accelerate. Every eighth in the everyday tier."""
    models = pair(name)
    paths = [n for n in inner_paths(models.theirs) if can_change(change, models.theirs.get_submodule(n), n)]
    assert paths
    for n, path in enumerate(paths):
        if n % 8 != [*CHANGES].index(change) % min(len(paths), 8) and not request.config.getoption("--full"):
            continue
        ours, theirs = copy.deepcopy(models.ours if n % 2 else models.theirs), copy.deepcopy(models.theirs)
        for model in (theirs, ours):
            torch.manual_seed(4)
            parent, _, child = path.rpartition(".")
            made = CHANGES[change](model.get_submodule(path))
            if change == "replaced":
                setattr(model.get_submodule(parent), child, made)
        accelerate(ours)
        try:
            expected = models.solve(theirs.train())
        except AttributeError:  # the library reads what a replaced module has not
            assert change == "replaced"
            continue
        except RuntimeError:
            assert change.endswith("gradients") and "hooks" in FAMILIES[name].lacks
            continue
        try:
            models.check(models.solve(ours.train()), expected)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from error


@families("bert", "decoder layer")
def test_global_hooks(name):
    """A hook on all modules of the process, as profilers use it, sees every module that the untouched model calls."""
    models, found = pair(name), []
    for model in models[:2]:
        noted, names = Counter(), {m: n for n, m in model.named_modules() if not n.endswith("out_proj")}
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, *_, noted=noted, names=names: noted.update([names[m]] if m in names else [])
        )
        try:
            found.append((models.solve(model), noted))
        finally:
            handle.remove()
    models.check(found[1][0], found[0][0])
    assert found[0][1] == found[1][1]


# torch.compile and exports.


# Layers of torch.nn around an accelerated attention read the values of a mask.
IN_ONE_GRAPH = [f"all {name}" for name in FAMILIES if "one graph" not in FAMILIES[name].lacks]
IN_ONE_GRAPH += [f"attention {n}" for n in (*HUGGINGFACE, "attention") if "one graph" not in FAMILIES[n].lacks]


@pytest.mark.parametrize("case", tiers(IN_ONE_GRAPH, "all encoder layer"))
def test_one_compiled_graph(case):
    """One for training, one for inference. Calls with other tensors of the same sizes compile nothing.

    Skips where PyTorch does not trace the untouched model in one graph: 2.11 has no copy.deepcopy, which
    encoder-decoders call.
    """
    part, name = case.split(maxsplit=1)
    models = pair(name) if part == "all" else alone(pair(name), part)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    models = models._replace(call=torch.compile(models.ours, backend=graphs, fullgraph=True))
    try:
        for shift, grad in itertools.product(range(2), (True, False)):
            inputs = converted(models.inputs, lambda t: t + shift)  # noqa: B023
            inputs = {n: (t + shift) % 99 if "ids" in n else t for n, t in inputs.items()}
            models._replace(inputs=inputs).compare(grad)
    except torch._dynamo.exc.Unsupported:
        try:
            torch.compile(models.theirs, fullgraph=True, backend="eager")(**models.inputs)
        except torch._dynamo.exc.Unsupported as error:
            pytest.skip(f"the untouched model is not traced: {str(error).splitlines()[0]}")
        raise
    assert graphs.frame_count == 2


@on_a_cpu
@families(lacks="compiled")
def test_compiled_training(name):
    """With the dropout of eager mode, which is faster than the compiler's."""
    models = pair(name)._replace(is_whole=False).repeat(ROWS).train()
    torch._dynamo.reset()
    compiled = models._replace(call=torch.compile(models.ours, backend="aot_eager"))
    compiled.compare()
    set_dropout(models.ours, 0.3)
    found = []
    for each in (compiled, models):
        torch.manual_seed(1)
        found.append(each.solve(models.ours))
    for ours, theirs in zip(*[result.outputs for result in found], strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()  # another draw differs by 0.3 and more
    check_gradients(*[result.grads for result in found])


@pytest.mark.parametrize("name", tiers(["bart", "vit"], "vit"))
def test_exported(name):
    """By torch.export with a free batch."""
    models, batch = pair(name), torch.export.Dim("batch", min=2, max=64)
    shapes = {n: {0: batch} if isinstance(t, torch.Tensor) else None for n, t in models.inputs.items()}
    exported = torch.export.export(models.ours, (), models.inputs, dynamic_shapes=shapes).module()
    models._replace(call=exported).repeat(2).compare(grad=False)
