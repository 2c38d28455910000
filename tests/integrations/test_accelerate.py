"""accelerate(model) for tiny models of transformers, next to the same model with its eager attention."""

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import autograd_nodes, has_second_derivative
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

transformers = pytest.importorskip("transformers")

from huggingface_models import (  # noqa: E402
    DEVICE,
    LENGTHS,
    MODELS,
    NOT_GENERATING,
    PAIR,
    REFUSED,
    STACK,
    build,
    build_refused,
    check_padded_batch,
    eager,
    inputs_for,
    skip_unless_traced,
)

from fastattn import accelerate, restore, use_backend  # noqa: E402
from fastattn.backends import cpu_matmul  # noqa: E402
from fastattn.integrations import layers  # noqa: E402
from fastattn.integrations.layers import Accelerated  # noqa: E402
from fastattn.nn.leaves import Linear  # noqa: E402

EVERYDAY = ("marian", "t5", "bert")
STRAIGHT = ("bart", "marian", "mbart", "m2m100", "pegasus", "whisper", "bert", "roberta", "vit")
GENERATING = [n for n in MODELS if n not in NOT_GENERATING]
GATED = {"feed_forward_proj": "gated-gelu"}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")


def tiers(names, everyday=EVERYDAY):
    return [pytest.param(n, marks=() if n in everyday else pytest.mark.full) for n in names]


def random_model(name, **changes):
    """A model whose biases and norms differ from those of a new one, without dropout. "gated" is a gated T5."""
    model = build("t5", **GATED | changes) if name == "gated" else build(name, **changes)
    for module in model.modules():
        for n in DROPOUTS:
            if isinstance(getattr(module, n, None), float):
                setattr(module, n, 0.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, p in [*model.named_parameters(), *model.named_buffers()]:
            if n == "final_logits_bias" or (p.dim() == 1 and p.requires_grad):
                p.add_(0.3 * torch.randn(p.shape, generator=generator).to(DEVICE))
    return model


def with_dropout(model, p=0.3):
    """Every dropout of the model drops."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        for n in DROPOUTS[:3]:
            if isinstance(getattr(module, n, None), float):
                setattr(module, n, p)
    return model.train()


def pair(name, **changes):
    """(the model under eager attention, its accelerated copy)."""
    theirs = random_model(name, **changes)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    return theirs, ours


def solve(model, **options):
    """Logits where they count, and the gradients of a loss over them."""
    inputs, real = inputs_for(model)
    inputs |= {} if model.config.model_type == "vit" else {"use_cache": False}
    model.zero_grad()
    logits = model(**inputs, **options).logits[real]
    F.cross_entropy(logits, torch.arange(len(logits), device=DEVICE) % 99).backward()
    return logits.detach(), gradients(model)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_gradients(found, expected, tol=1e-3):
    assert found.keys() == expected.keys()
    for n, grad in expected.items():
        assert (found[n] - grad).abs().max() <= tol * grad.abs().max() + 1e-6, n


def check(found, expected, atol=1e-4):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=atol)
    check_gradients(found[1], expected[1])


def float32_bound(model):
    """check()'s bound, or twice the model's own error against float64: a gated T5's is more than 1e-4."""
    error = (solve(model)[0] - solve(copy.deepcopy(model).double())[0]).abs().max().item()
    return max(1e-4, 2 * error)


@pytest.fixture
def straight(monkeypatch):
    """Whether each layer that asked for the straight path took it."""
    if DEVICE == "cuda":  # whose default in float32 mixes backends, so that layers go op by op
        monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    took, run_parts = [], layers.run_parts

    def note(*args):
        out = run_parts(*args)
        took.append(out is not None)
        return out

    monkeypatch.setattr(layers, "run_parts", note)
    return took


def labels_for(model):
    """What report.loss is given: inputs with labels, -100 where there is padding."""
    inputs, real = inputs_for(model)
    inputs = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    ids = torch.randint(3, 99, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    return inputs | {"labels": ids.masked_fill(~real, -100)}


# Numbers.


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", tiers([*MODELS, "gated"]))
def test_logits_and_gradients(name, train, straight):
    """As under eager attention, by the straight path where the class has one."""
    theirs, ours = pair(name)
    check(solve(ours.train(train)), solve(theirs.train(train)))
    layers_of_model = sum(isinstance(m, Accelerated) and hasattr(m, "parts") for m in ours.modules())
    assert straight == [True] * layers_of_model and bool(straight) is (name in STRAIGHT)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_new", "tanh", "quick_gelu"])
@pytest.mark.parametrize("name", ["marian", "mbart", "bert", "vit"])
def test_activations(name, activation):
    """Also models without a class of their own here."""
    option = "hidden_act" if name in ("bert", "vit") else "activation_function"
    theirs, ours = pair(name, **{option: activation})
    check(solve(ours), solve(theirs))


@pytest.mark.parametrize("name", tiers(["marian", "mbart", "t5", "bert", "llama", "vit"], ("marian",)))
def test_training(name):
    """The losses of twenty steps are those of eager attention."""
    losses = []
    for model in pair(name):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
        inputs, real = inputs_for(model)
        losses.append([])
        for _ in range(20):
            logits = model(**inputs).logits[real]
            loss = F.cross_entropy(logits, torch.arange(len(logits), device=DEVICE) % 99)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(*map(torch.stack, losses), rtol=1e-4, atol=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("hooked", ["feed-forward", "attention"])
@pytest.mark.parametrize("name", tiers(STRAIGHT, ("bert",)))
def test_both_paths_draw_the_same_dropout(name, hooked, straight):
    """A layer that goes sublayer by sublayer, because of a hook, gives the same numbers on a CPU. On a GPU a dropout
    that is called has PyTorch's."""
    _, model = pair(name)
    with_dropout(model)
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        with use_backend("aten"):
            found.append(solve(model))
        ends = {
            "feed-forward": ("fc1", "intermediate.dense"),
            "attention": ("self_attn", "attention.self", "attention"),
        }
        for n, m in model.named_modules():
            if n.endswith(ends[hooked]):
                m.register_forward_hook(lambda *_: None)
    if DEVICE == "cpu":
        check(found[1], found[0])
    assert straight and all(straight[: len(straight)]) and len(straight) == len([*straight_layers(model)])
    torch.manual_seed(8)
    assert not torch.equal(solve(model)[0], found[0][0])


def straight_layers(model):
    return (m for m in model.modules() if isinstance(m, Accelerated) and hasattr(m, "parts"))


@pytest.mark.parametrize("name", tiers(MODELS))
def test_a_padded_batch_equals_its_sentences_alone(name):
    check_padded_batch(pair(name)[1])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", tiers([*GENERATING, "gated"], ("marian",)))
def test_generation(name, beams, cache):
    """Decoder-only models are padded on the left."""
    theirs, ours = pair(name)
    inputs, _ = inputs_for(theirs, left=not theirs.config.is_encoder_decoder)
    inputs = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    options = dict(max_new_tokens=9, min_new_tokens=9, num_beams=beams, do_sample=False)
    options |= dict(cache_implementation=cache, disable_compile=True)
    expected = theirs.generate(**inputs, **options)
    assert torch.equal(ours.generate(**inputs, **options), expected) and expected.shape[1] > 4


@pytest.mark.full
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_a_mask_from_the_user(name, kind):
    """A 4-D mask is obeyed, of bools or of numbers to add."""
    (theirs, ours), L = pair(name), max(LENGTHS)
    ids = inputs_for(theirs)[0]["input_ids"]
    mask = (torch.rand(3, 1, L, L, generator=torch.Generator().manual_seed(1)) < 0.7).tril() | torch.eye(L).bool()
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min).to(DEVICE)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=additive).logits
        found = ours(ids, attention_mask=mask.to(DEVICE) if kind == torch.bool else additive).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_no_mask(name):
    theirs, ours = pair(name)
    inputs = {n: t for n, t in inputs_for(theirs)[0].items() if not n.endswith("mask")}
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in MODELS if n != "gpt2"])  # which gives none under the interface
def test_attentions_and_hidden_states(name):
    """Both are eager's, and calls after them still give the same."""
    theirs, ours = pair(name)
    inputs, real = inputs_for(theirs)
    with torch.no_grad():
        expected = theirs(**inputs, output_attentions=True, output_hidden_states=True)
        found = ours(**inputs, output_attentions=True, output_hidden_states=True)
    kinds = [n for n in expected if n.endswith(("attentions", "hidden_states")) and expected[n] is not None]
    assert len(kinds) >= 2
    for kind in kinds:
        expected_all, found_all = ((t,) if isinstance(t, torch.Tensor) else t for t in (expected[kind], found[kind]))
        assert len(found_all) == len(expected_all)
        for a, b in zip(found_all, expected_all, strict=True):
            if real.dim() == 2 and a.shape[-2] == real.shape[1]:
                rows = real[:, None, :, None].expand_as(a) if a.dim() == 4 else real[:, :, None].expand_as(a)
                a, b = a[rows], b[rows]
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    check(solve(ours), solve(theirs))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_half_precision(name, dtype):
    """Close to the model in float32, with T5's wo in float32 as from_pretrained keeps it."""
    theirs, ours = pair(name)
    inputs, real = inputs_for(theirs)
    with torch.no_grad():
        expected = theirs(**inputs).logits[real]
        ours.to(dtype)
        for n, module in ours.named_modules():
            if n.endswith(".wo"):
                module.float()
        inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
        found = ours(**inputs).logits[real]
        error = eager_error(ours, inputs, real, expected)
    assert found.isfinite().all() and found.dtype is (torch.float32 if found.dtype is torch.float32 else dtype)
    assert (found.float() - expected).norm() <= 3 * error + 1e-3 * expected.norm()


def eager_error(model, inputs, real, expected):
    model = copy.deepcopy(model)
    restore(model)
    return (model(**inputs).logits[real].float() - expected).norm()


@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("marian",)))
def test_autocast(name):
    """As near to float32 as eager attention: hidden states between sublayers stay in float32 here too."""
    theirs, ours = pair(name)
    (expected, expected_grads), found = solve(theirs), []
    with torch.autocast(DEVICE, torch.bfloat16):
        for model in (ours, theirs):
            logits, grads = solve(model)
            distances = [(grads[n] - g).norm() for n, g in expected_grads.items()]
            found.append(((logits - expected).norm(), torch.stack(distances).norm()))
    for ours_off, theirs_off in zip(*found, strict=True):
        assert ours_off <= 1.25 * theirs_off + 1e-4


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "aten", "triton"])
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_backends(name, backend):
    theirs, ours = pair(name)
    expected = solve(theirs)
    with use_backend(backend):
        check(solve(ours), expected, atol=5e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["bart", "marian", "mbart", "m2m100", "pegasus", "bert", "roberta", "gpt2"])
def test_double(name):
    """Of models that compute nothing in float32."""
    found, expected = (solve(model.double()) for model in reversed(pair(name)))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    check_gradients(found[1], expected[1], 1e-8)


@pytest.mark.full
@pytest.mark.parametrize("backend", [b for b in ("aten", "triton") if has_second_derivative(b, DEVICE)])
@pytest.mark.parametrize("name", ["marian", "mbart", "whisper", "bert", "vit"])
def test_second_derivatives(name, backend):
    """A gradient penalty."""
    found = []
    for model in reversed(pair(name)):
        inputs, real = inputs_for(model)
        with use_backend(backend):
            loss = model(**inputs).logits[real].square().mean()
            parameters = [p for n, p in model.named_parameters() if "layers.0" in n or "layer.0" in n]
            parameters = [p for p in parameters if p.dim() > 1]
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            model.zero_grad()
            sum(g.square().sum() for g in grads).backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for n, expected in found[1].items():
        assert (found[0][n] - expected).norm() <= 1e-3 * expected.norm() + 1e-5, n


@pytest.mark.full
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_torch_func(name):
    """Gradients by torch.func."""
    theirs, ours = pair(name)
    expected = solve(theirs)
    inputs, real = inputs_for(ours)
    inputs |= {} if name == "vit" else {"use_cache": False}

    def loss(parameters):
        logits = torch.func.functional_call(ours, parameters, (), inputs).logits[real]
        return F.cross_entropy(logits, torch.arange(len(logits), device=DEVICE) % 99)

    grads = torch.func.grad(loss)({n: p.detach() for n, p in ours.named_parameters()})
    check_gradients({n: grads[n] for n in expected[1]}, expected[1])


# The model stays what it was.


@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("marian",)))
def test_restore(name):
    """The classes, the attention and every bit."""
    model = random_model(name)
    inputs, _ = inputs_for(model)
    kinds, names = [type(m) for m in model.modules()], [*model.state_dict()]
    with torch.no_grad():
        expected = model(**inputs).logits
        accelerate(model)
        assert [type(m).__name__ for m in model.modules()] == [kind.__name__ for kind in kinds]
        assert [*model.state_dict()] == names and [type(m) for m in model.modules()] != kinds
        accelerate(model)  # again
        assert model.config._attn_implementation == "fastattn"
        model(**inputs)
        restore(model)
        assert [type(m) for m in model.modules()] == kinds and model.config._attn_implementation == "eager"
        assert torch.equal(model(**inputs).logits, expected)
        restore(model)  # again


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained(name, tmp_path):
    """What is saved is the library's own model."""
    theirs, ours = pair(name)
    ours.save_pretrained(tmp_path)
    loaded = eager(type(theirs).from_pretrained(tmp_path))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in theirs.modules()]
    inputs, _ = inputs_for(theirs)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, theirs(**inputs).logits)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("bert",)))
def test_copies(name, how, tmp_path):
    """A copy is accelerated and on its own."""
    theirs, ours = pair(name)
    if how == "deepcopy":
        other = copy.deepcopy(ours)
    else:
        torch.save(ours, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in ours.modules()]
    check(solve(other), solve(ours))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    restore(other)
    assert other.config._attn_implementation == "eager" and ours.config._attn_implementation == "fastattn"
    check(solve(ours), solve(theirs))


@pytest.mark.full
def test_a_pickle_is_read_in_another_process(tmp_path):
    _, model = pair("marian")
    inputs, real = inputs_for(model)
    with torch.no_grad():
        torch.save((model, inputs, model(**inputs).logits[real], real), tmp_path / "model.pt")
    code = (
        f"import torch; m, i, expected, real = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "with torch.no_grad(): torch.testing.assert_close(m(**i).logits[real], expected)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("bert",)))
def test_nothing_is_left_after_an_exception(name):
    theirs, ours = pair(name)
    report = accelerate(ours)
    last = [m for m in ours.modules() if isinstance(m, torch.nn.Linear | torch.nn.LayerNorm)][3]

    def fail(*_):
        raise KeyError("stop")

    handle = last.register_forward_pre_hook(fail)
    batch = labels_for(ours) if name != "vit" else {}
    before = [set(m.__dict__) for m in ours.modules()]
    for call in [lambda: solve(ours), *([] if name == "vit" else [lambda: report.loss(ours, **batch)])]:
        with pytest.raises(KeyError, match="stop"):
            call()
    assert [set(m.__dict__) for m in ours.modules()] == before
    handle.remove()
    check(solve(ours), solve(theirs))


# Modified modules are called.


@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("marian", "bert")))
def test_hooks_are_called(name):
    """On layers, and on every module inside of them that eager attention calls."""
    theirs, ours = pair(name)
    expected, calls = solve(theirs), {}
    for which, model in (("theirs", theirs), ("ours", ours)):
        calls[which] = []
        for n, m in model.named_modules():
            m.register_forward_hook(lambda *_, n=n, to=calls[which]: to.append(n))
    check(solve(ours), expected)
    solve(theirs)
    assert sorted(calls["ours"]) == sorted(calls["theirs"])


@pytest.mark.full
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_global_hooks_are_called(name):
    theirs, ours = pair(name)
    found = []
    for model in (theirs, ours):
        calls, names = [], {m: n for n, m in model.named_modules()}
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda m, *_, to=calls, names=names: to.append(names.get(m, ""))
        )
        try:
            found.append((solve(model), sorted(calls)))
        finally:
            handle.remove()
    check(found[1][0], found[0][0])
    assert found[0][1] == found[1][1]


class Doubled(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return 2 * self.module(*args)


def double_output(parent, name):
    child = parent._modules[name]
    setattr(parent, name, torch.nn.Sequential(child, Doubled(torch.nn.Identity())))


def subclass(parent, name):
    child = parent._modules[name]
    child.__class__ = type("Mine", (type(child),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)})


def patch_forward(parent, name):
    child = parent._modules[name]
    child.forward = lambda x, forward=child.forward: 2 * forward(x)


def parametrise(parent, name):
    if getattr(parent._modules[name], "weight", None) is not None:
        torch.nn.utils.parametrize.register_parametrization(
            parent._modules[name], "weight", Doubled(torch.nn.Identity())
        )


def prune_weight(parent, name):
    if getattr(parent._modules[name], "weight", None) is not None:
        prune.random_unstructured(parent._modules[name], "weight", amount=0.3)


def change_bias(parent, name):
    """Where there is one, there is none."""
    child = parent._modules[name]
    if isinstance(child, torch.nn.Linear):
        child.bias = torch.nn.Parameter(torch.randn_like(child.weight[:, 0])) if child.bias is None else None


@pytest.mark.full
@pytest.mark.parametrize("change", [double_output, subclass, patch_forward, parametrise, prune_weight, change_bias])
@pytest.mark.parametrize("name", ["marian", "mbart", "whisper", "bert", "vit", "t5", "gated", "llama", "gpt2"])
def test_a_child_that_is_changed(name, change):
    """Each child without children of a model's layers, one after the other, after accelerate."""
    inputs, real = inputs_for(build("t5" if name == "gated" else name))
    theirs, ours = pair(name)
    kinds = (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout)
    paths = [
        n for n, m in theirs.named_modules() if not [*m.children()] and ("0" in n.split(".") or isinstance(m, kinds))
    ]
    if change is double_output:  # T5 reads wo.weight
        paths = [n for n in paths if not n.endswith(".wo")]
    assert len(paths) > 6
    with torch.set_grad_enabled(change is change_bias):  # where gradients are recorded, maps are joined
        for path in paths:
            for model in (changed := [copy.deepcopy(theirs), copy.deepcopy(ours)]):
                torch.manual_seed(4)
                parent, _, child = path.rpartition(".")
                change(model.get_submodule(parent), child)
            expected, found = (model(**inputs).logits[real] for model in changed)
            assert (found - expected).norm() <= 1e-4 * expected.norm(), path


class Wrapped(torch.nn.Module):
    """Calls a module, and has none of its attributes."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args, **options):
        self.calls += 1
        return self.module(*args, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_a_block_that_is_replaced(name):
    """Each module with children of a model's layers, one after the other."""
    theirs, ours = pair(name)
    expected = solve(theirs)
    paths = [n for n, m in theirs.named_modules() if [*m.children()] and any(part.isdigit() for part in n.split("."))]
    paths = [n for n in paths if not n.rpartition(".")[2].isdigit() and not n.endswith("layer")]
    assert paths
    for path in paths:
        model = copy.deepcopy(ours)
        parent, _, child = path.rpartition(".")
        wrapped = Wrapped(model.get_submodule(path))
        setattr(model.get_submodule(parent), child, wrapped)
        logits, grads = solve(model)
        check((logits, {n.replace(f"{path}.module.", f"{path}."): t for n, t in grads.items()}), expected)
        assert wrapped.calls == 1, path


TARGETS = {
    "bert": ["query", "value", "intermediate.dense"],
    "roberta": ["query", "value", "intermediate.dense"],
    "t5": ["q", "v", "wi"],
    "gated": ["q", "v", "wi_0", "wo"],
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj", "v_proj", "gate_proj"],
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("marian",)))
def test_lora(name, when, straight):
    """Adapters, made before or after accelerate, are trained alone."""
    peft = pytest.importorskip("peft")
    targets = TARGETS.get(name, ["q_proj", "v_proj", "fc1"])
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False, layers_to_transform=[0])
    if name == "whisper" or name in ("t5", "gated"):
        config.layers_to_transform = None
    theirs = peft.get_peft_model(copy.deepcopy(random_model(name)), config)
    ours = random_model(name)
    if when == "after":
        ours = peft.get_peft_model(ours, config)
    accelerate(ours)
    if when == "before":
        ours = peft.get_peft_model(ours, config)
    ours.load_state_dict(theirs.state_dict())
    found, expected = solve(ours.train()), solve(theirs.train())
    check(found, expected)
    assert expected[1] and all("lora" in n for n in expected[1])
    if when == "before":
        ours.merge_and_unload()
        return
    restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


@pytest.mark.full
@pytest.mark.parametrize("part", ["every second", "encoder", "norms", "biases"])
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_frozen_parameters(name, part):
    models = pair(name)
    for model in models:
        for i, (n, p) in enumerate(model.named_parameters()):
            frozen = {"every second": i % 2 == 0, "encoder": "encoder." in n or "layers.0" in n}
            frozen |= {"norms": "norm" in n.lower(), "biases": n.endswith("bias")}
            p.requires_grad_(not frozen[part])
    if not any(p.requires_grad for p in models[0].parameters()):
        return
    expected, found = (solve(model.train()) for model in models)
    check(found, expected, atol=float32_bound(models[0]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", tiers([*MODELS, "gated"], ("marian",)))
def test_gradient_checkpointing(name, reentrant):
    """With dropout it draws again what it drew."""
    theirs, ours = pair(name)
    expected = solve(theirs.train())
    options = {"use_reentrant": reentrant}
    ours.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if reentrant:
        ours.enable_input_require_grads()
    check(solve(ours), expected, atol=float32_bound(theirs))
    with_dropout(ours)
    found = []
    for checkpointed in (True, False):
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if not checkpointed:
            ours.gradient_checkpointing_disable()
        torch.manual_seed(3)
        found.append(solve(ours))
    check(*found)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in MODELS if n != "gpt2"])  # stock GPT-2 does not compile in one graph
def test_compiled_in_one_graph(name):
    theirs, ours = pair(name)
    inputs, real = inputs_for(theirs)
    with torch.no_grad():
        skip_unless_traced(theirs, inputs)
        expected = theirs(**inputs).logits[real]
        found = torch.compile(ours, fullgraph=True, backend="eager")(**inputs).logits[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_one_compiled_graph_for_all_lengths(name):
    """Source and target may be equally long. Without an eager call before, in a thread whose state is new."""
    theirs, ours = pair(name)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, dynamic=True, backend=counter)

    def call(model, batch, source, target):
        drawn = (torch.randint(3, 99, (batch, n), generator=torch.Generator().manual_seed(n)) for n in (source, target))
        ids, decoder_ids = (t.to(DEVICE) for t in drawn)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=decoder_ids).logits

    sizes = (3, 7, 5), (2, 9, 4), (4, 6, 6)
    with ThreadPoolExecutor(1) as pool:
        found = list(pool.map(lambda of: call(compiled, *of), sizes))
    torch.testing.assert_close(found, [call(theirs, *of) for of in sizes], rtol=0, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["marian", "mbart", "t5", "gated", "bert", "vit", "llama"])
def test_compiled_training(name):
    theirs, ours = pair(name)
    torch._dynamo.reset()
    expected = solve(theirs.train())
    inputs, real = inputs_for(ours)
    logits = torch.compile(ours.train(), backend="aot_eager")(**inputs).logits[real]
    F.cross_entropy(logits, torch.arange(len(logits), device=DEVICE) % 99).backward()
    check((logits.detach(), gradients(ours)), expected)


@pytest.mark.full
@pytest.mark.parametrize("choice", ["oneDNN", "PyTorch"])
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_linear_maps(name, choice, monkeypatch):
    """By oneDNN where it is the fastest; nn.Linear is left elsewhere, and named."""
    if torch.cuda.is_available():
        pytest.skip("linear maps change on a CPU alone")
    monkeypatch.setattr(cpu_matmul, "choice", lambda: choice)
    monkeypatch.setattr(cpu_matmul, "MIN_WORK", 1)
    theirs = random_model(name)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    maps = [m for m in ours.modules() if isinstance(m, torch.nn.Linear)]
    assert maps and all((type(m) is Linear) is (choice == "oneDNN") for m in maps)
    assert any(entry.kind == "Linear" for entry in (report.taken if choice == "oneDNN" else report.left))
    check(solve(ours), solve(theirs))
    restore(ours)
    assert not any(type(m) is Linear for m in ours.modules())


# What is taken and what is left.


def test_the_report_names_modules():
    model = random_model("marian")
    report = accelerate(model)
    lines = str(report).splitlines()
    assert lines[0].split() == ["modules", "class", "the", "first", "why"]
    assert any(line.split()[:3] == ["taken", "2", "MarianEncoderLayer"] for line in lines)
    assert any("MarianMTModel: attention" in line for line in lines)
    assert {entry.path for entry in report.taken} >= {"model.encoder.layers.0", "model.decoder.layers.1"}


def test_attention_or_layers_alone():
    """attention=False keeps the library's attention, layers=False its layers."""
    theirs = random_model("bert")
    expected = solve(theirs)
    for options, implementation, changes in (
        ({"attention": False}, "eager", True),
        ({"layers": False}, "fastattn", False),
        ({"attention": False, "layers": False}, "eager", False),
    ):
        model = copy.deepcopy(theirs)
        accelerate(model, **options)
        assert model.config._attn_implementation == implementation
        assert any(isinstance(m, Accelerated) for m in model.modules()) is changes
        check(solve(model), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_left(name):
    """The report gives the reason, and the model is right."""
    model = build_refused(name)
    ids = torch.randint(3, 99, (2, 8), device=DEVICE)
    implementation = model.config._attn_implementation
    with torch.no_grad():
        expected = model(ids).logits
        report = accelerate(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    (entry,) = (entry for entry in report.left if "attention" in entry.kind)
    assert entry.kind == f"{type(model).__name__}: attention" and REFUSED[name][1] in entry.reason
    assert entry.reason in str(report) and model.config._attn_implementation == implementation
    assert not any(isinstance(m, Accelerated) for m in model.modules())
    restore(model)


def test_a_submodel_whose_attention_is_left():
    """The rest of the model gets fastattn's."""
    encoder = build("vit").config
    decoder = transformers.TrOCRConfig(**{n: size for n, size in PAIR.items() if not n.startswith("encoder")})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = transformers.VisionEncoderDecoderModel(config=config).to(DEVICE).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16, device=DEVICE)}
    inputs["decoder_input_ids"] = torch.randint(3, 99, (2, 8), device=DEVICE)
    configs = [m.config for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    before = [c._attn_implementation for c in configs]
    with torch.no_grad():
        expected = model(**inputs).logits
        report = accelerate(model)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-5)
        entries = {entry.path: entry.reason for entry in report.entries if "attention" in entry.kind}
        assert entries.keys() == {"encoder", "decoder"} and entries["encoder"] is None
        assert "by itself" in entries["decoder"]
        assert model.encoder.config._attn_implementation == "fastattn"
        assert model.decoder.config._attn_implementation == before[-1]
        restore(model)
        assert [c._attn_implementation for c in configs] == before
        assert torch.equal(model(**inputs).logits, expected)


def test_a_users_subclass_of_a_layer_is_left():
    from transformers.models.bert.modeling_bert import BertLayer

    class Doubled(BertLayer):
        def forward(self, *args, **options):
            return 2 * super().forward(*args, **options)

    theirs = random_model("bert")
    theirs.bert.encoder.layer[1].__class__ = Doubled
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert type(ours.bert.encoder.layer[1]) is Doubled
    (entry,) = (entry for entry in report.left if entry.path == "bert.encoder.layer.1")
    assert "subclass of BertLayer" in entry.reason and "subclass of BertLayer" in str(report)
    check(solve(ours), solve(theirs))


def test_what_is_no_module():
    for function in (accelerate, restore):
        with pytest.raises(TypeError, match="must be a torch.nn.Module, got int"):
            function(3)


def test_restore_refuses_a_changed_class():
    """As fully_shard changes it; nothing is restored then."""
    _, model = pair("bert")
    layer = model.bert.encoder.layer[1]
    layer.__class__ = type("FSDPBertLayer", (type(layer),), {})
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="bert.encoder.layer.1 is a FSDPBertLayer, a subclass"):
        restore(model)
    assert [type(m) for m in model.modules()] == kinds and model.config._attn_implementation == "fastattn"


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_another_attention_is_set_later(name, implementation, straight):
    """It is called, and restore still undoes everything."""
    theirs, ours = pair(name)
    ours.set_attn_implementation(implementation)
    check(solve(ours), solve(theirs))
    assert not any(straight)
    restore(ours)
    assert ours.config._attn_implementation == "eager"


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in MODELS if n != "vit"])
def test_a_larger_vocabulary(name):
    found = []
    for model in reversed(pair(name)):
        torch.manual_seed(6)
        model.resize_token_embeddings(120)
        found.append(solve(model))
    check(*found)


# The loss without logits.


WITH_LOSS = [n for n in MODELS if n != "vit"]


def both_losses(theirs, ours, batch, **options):
    """What report.loss gives, after its gradients were compared with those of the expected loss."""
    report = accelerate(ours)
    expected = theirs(**batch).loss if not options else smoothed(theirs, batch, **options)
    found = report.loss(ours, **batch, **options)
    for model, loss in ((theirs, expected), (ours, found)):
        model.zero_grad()
        loss.backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    check_gradients(gradients(ours), gradients(theirs))
    return found


def smoothed(model, batch, label_smoothing=0.0, num_items_in_batch=None):
    """As transformers' Trainer computes it."""
    from transformers.trainer_pt_utils import LabelSmoother

    if num_items_in_batch is not None:
        return model(**batch, num_items_in_batch=num_items_in_batch).loss
    output = model(**batch)
    shifts = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    return LabelSmoother(epsilon=label_smoothing)(output, batch["labels"], shift_labels=shifts)


@pytest.mark.parametrize("name", tiers([*WITH_LOSS, "gated"]))
def test_loss(name):
    """The model's own, with its gradients, and without its logits."""
    theirs, ours = pair(name)
    batch = labels_for(theirs)
    found = both_losses(theirs, ours, batch)
    assert "NllLossBackward0" in autograd_nodes(theirs(**batch).loss) - autograd_nodes(found)
    restore(ours)
    assert type(ours.get_output_embeddings()) is torch.nn.Linear


SPEECH = dict(hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1)
SPEECH |= dict(encoder_num_attention_heads=4, decoder_num_attention_heads=4, vocab_size=99, pad_token_id=0)
SPEECH |= dict(eos_token_id=1, bos_token_id=2, decoder_start_token_id=2)
GROUPED = STACK | dict(num_key_value_heads=2)
OTHER_RULES = {
    "labels are shifted before the loss": ("Moonshine", "ForConditionalGeneration", SPEECH, {}),
    "smooths its labels": ("BlipText", "LMHeadModel", STACK | dict(encoder_hidden_size=32), {}),
    "adds another loss": ("Bert", "ForPreTraining", STACK, {"next_sentence_label": torch.tensor([0, 1, 1])}),
    "adds a loss of its router": (
        "Mixtral",
        "ForCausalLM",
        GROUPED | dict(num_local_experts=2),
        dict(output_router_logits=True),
    ),
    "caps its logits": ("Gemma2", "ForCausalLM", GROUPED | dict(head_dim=8, attn_logit_softcapping=None), {}),
}


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_loss_by_another_rule(rule):
    """The loss is what the model's own code makes of its head's logits."""
    name, kind, options, arguments = OTHER_RULES[rule]
    home = transformers if name != "BlipText" else transformers.models.blip.modeling_blip_text
    torch.manual_seed(0)
    theirs = getattr(home, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**options)).to(DEVICE).eval()
    with torch.no_grad():
        theirs.get_output_embeddings().weight.mul_(10)  # far from uniform, so that smoothing and caps show
    batch = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    if name == "Moonshine":
        batch |= {
            "input_values": torch.randn(3, 2000, device=DEVICE),
            "labels": inputs_for(build("bert"))[0]["input_ids"],
        }
    else:
        batch |= labels_for(build("bert"))
    ours = copy.deepcopy(theirs)
    both_losses(theirs, ours, batch)
    if rule in ("smooths its labels", "caps its logits"):
        return
    report = accelerate(ours)
    smoothed = report.loss(ours, **batch, label_smoothing=0.1)
    assert abs(smoothed.item() - report.loss(ours, **batch).item()) > 1e-3


def test_loss_in_one_thread_logits_in_another():
    """report.loss changes nothing that another thread's call reads."""
    _, model = pair("marian")
    batch, report, found = labels_for(model), accelerate(model), []
    with torch.no_grad():
        expected = model(**batch).logits

        def call_in_another_thread(*_):
            def call():
                with torch.no_grad():
                    found.append(model(**batch).logits)

            handle.remove()
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        handle = model.lm_head.register_forward_pre_hook(call_in_another_thread)
        loss = report.loss(model, **batch)
        assert torch.equal(found[0], expected)
        torch.testing.assert_close(loss, report.loss(model, **batch))


@pytest.mark.full
@pytest.mark.parametrize("name", ["bert", "marian"])
def test_compiled_loss(name):
    """A compiled model is traced as often as for its own loss, and a compiled step is one graph."""
    counts = []
    for ours in (False, True):
        model = pair(name)[1].train()
        model.config.use_cache = False
        report, batch = accelerate(model), labels_for(model)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter)
        for length in (7, 8, 9):
            part = {n: t[:, :length].contiguous() for n, t in batch.items()}
            loss = report.loss(compiled, **part) if ours else compiled(**part).loss
            torch.testing.assert_close(loss, model(**part).loss)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]
    with pytest.raises(TypeError, match="torch.compile traces it: label_smoothing and num_items_in_batch"):
        report.loss(compiled, **batch, label_smoothing=0.1)
    step = torch.compile(lambda batch: report.loss(model, **batch), fullgraph=True, backend="eager")
    torch.testing.assert_close(step(batch), model(**batch).loss)


@pytest.mark.parametrize("name", tiers([*WITH_LOSS, "gated"]))
def test_label_smoothing(name):
    """The loss of transformers' LabelSmoother."""
    theirs, ours = pair(name)
    both_losses(theirs, ours, labels_for(theirs), label_smoothing=0.1)


@pytest.mark.full
@pytest.mark.parametrize("number", [int, torch.tensor])
@pytest.mark.parametrize("name", ["marian", "bert", "gpt2", "llama"])
def test_num_items_in_batch(name, number):
    """As decoder-only models compute it when Trainer accumulates gradients. Others' own losses do not look at it."""
    theirs, ours = pair(name)
    batch = labels_for(theirs)
    if name in ("gpt2", "llama"):
        both_losses(theirs, ours, batch, num_items_in_batch=number(40))
    else:
        found = accelerate(ours).loss(ours, **batch, num_items_in_batch=number(40))
        torch.testing.assert_close(found, theirs(**batch).loss * (batch["labels"] != -100).sum() / 40)


@pytest.mark.full
@pytest.mark.parametrize("change", ["hook", "lora"])
@pytest.mark.parametrize("name", WITH_LOSS)
def test_loss_with_a_modified_head(name, change):
    """Its logits are computed. The options hold for them too."""
    models, calls = pair(name), []
    if change == "lora":
        peft = pytest.importorskip("peft")
        heads = [n for n, m in models[0].named_modules() if m is models[0].get_output_embeddings()]
        config = peft.LoraConfig(target_modules=heads, init_lora_weights=False)
        models = [peft.get_peft_model(model, config) for model in models]
        models[1].load_state_dict(models[0].state_dict())
    else:
        for model in models:
            model.get_output_embeddings().register_forward_hook(lambda m, a, out: calls.append(m) or 2 * out)
    both_losses(*models, labels_for(models[0]))
    assert change == "lora" or len(calls) == 2
    if change == "hook":
        both_losses(*models, labels_for(models[0]), label_smoothing=0.1)


@pytest.mark.full
def test_loss_of_adapters():
    """report.loss takes what peft makes of a model."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    theirs = peft.get_peft_model(random_model("marian"), config)
    both_losses(theirs, copy.deepcopy(theirs), labels_for(theirs))


@pytest.mark.full
@pytest.mark.parametrize("name", ["bart", "marian", "bert", "roberta"])
def test_loss_of_decoders_alone(name):
    """BART's does not shift labels, BERT's does."""
    pairs = {"bart": "BartForCausalLM", "marian": "MarianForCausalLM"}
    kind = pairs.get(name) or {"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM"}[name]
    changes = {"is_decoder": True} | ({} if name in ("bert", "roberta") else {"is_encoder_decoder": False})
    torch.manual_seed(0)
    config = copy.deepcopy(build(name).config)
    config.update(changes | {"dropout": 0.0, "attention_dropout": 0.0})
    theirs = eager(getattr(transformers, kind)(config))
    both_losses(theirs, copy.deepcopy(theirs), labels_for(theirs))

    class Mine(type(theirs)):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    theirs.__class__ = Mine
    both_losses(theirs, copy.deepcopy(theirs), labels_for(theirs))


@pytest.mark.full
def test_loss_of_an_encoder_decoder_of_two_models():
    model = transformers.EncoderDecoderModel(
        encoder=build("bert").bert, decoder=build("gpt2", add_cross_attention=True)
    )
    model.config.decoder_start_token_id, model.config.pad_token_id = 0, 1
    theirs = eager(model)
    both_losses(theirs, copy.deepcopy(theirs), labels_for(build("bart")))


@pytest.mark.full
def test_generation_by_bert():
    """Its layers attend to an encoder's states, and to a cache."""
    decoder = build("bert", is_decoder=True, add_cross_attention=True).config
    torch.manual_seed(0)
    decoder = transformers.BertLMHeadModel(decoder)
    theirs = eager(transformers.EncoderDecoderModel(encoder=build("bert").bert, decoder=decoder))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert sum(entry.kind == "BertLayer" for entry in report.taken) == 4
    batch = {n: t for n, t in labels_for(build("bert")).items() if n != "labels"}
    with torch.no_grad():
        logits = [model(**batch, decoder_input_ids=batch["input_ids"]).logits for model in (theirs, ours)]
        torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    options = dict(max_new_tokens=9, min_new_tokens=9, num_beams=2, decoder_start_token_id=0, pad_token_id=1)
    assert torch.equal(ours.generate(**batch, **options), theirs.generate(**batch, **options))


def test_loss_errors():
    """Without labels, for models without a head, and for those whose loss is another."""
    _, model = pair("bert")
    report, batch = accelerate(model), labels_for(model)
    with pytest.raises(ValueError, match="loss needs labels in the batch"):
        report.loss(model, input_ids=batch["input_ids"])
    with pytest.raises(TypeError, match="BertModel gives no loss for labels"):
        report.loss(model.bert, **batch)
    with pytest.raises(TypeError, match="Linear holds no model of transformers"):
        report.loss(torch.nn.Linear(2, 2), **batch)
    options = STACK | dict(num_key_value_heads=2, head_dim=8, attn_logit_softcapping=None)
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**options)).to(DEVICE)
    for option in ({"label_smoothing": 0.1}, {"num_items_in_batch": 9}):
        with pytest.raises(TypeError, match="Gemma2ForCausalLM does not compute its loss by one cross_entropy of what"):
            report.loss(gemma, **batch, **option)


DATA_PARALLEL = """
import copy, sys, torch
import torch.distributed as dist
from test_accelerate import accelerate, check_gradients, gradients, labels_for, pair
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
for name in ("marian", "llama"):
    theirs, ours = pair(name)
    batch = labels_for(theirs)
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        parallel = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(ours), **options)
        half = {n: t[dist.get_rank() :: 2] for n, t in batch.items()}
        for _ in range(2):
            parallel.zero_grad()
            accelerate(parallel).loss(parallel, **half, num_items_in_batch=10).backward()
        theirs.zero_grad()
        for rank in range(2):
            half = {n: t[rank::2].contiguous() for n, t in batch.items()}
            labels = half["labels"] if theirs.config.is_encoder_decoder else half["labels"][:, 1:]
            (theirs(**half).loss * (labels != -100).sum() / 20).backward()
        check_gradients(gradients(parallel.module), gradients(theirs))
dist.destroy_process_group()
"""


@pytest.mark.full
def test_two_processes(tmp_path):
    """DistributedDataParallel sums the gradients of report.loss."""
    command = [sys.executable, "-c", DATA_PARALLEL, str(tmp_path / "rendezvous")]
    folders = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    options = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = [subprocess.Popen([*command, str(rank)], **options) for rank in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-3000:]
