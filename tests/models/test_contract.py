"""What fastattn's models promise, for each pair of twins: next to the same model in plain PyTorch.

The everyday tier sees every promise with a few twins. What decoding, packing or one module alone has is in
test_decoding.py, test_captioner.py, test_packing.py and tests/nn.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import plain_captioner
import plain_transformer
import pytest
import torch
import torch.nn.functional as F
from model_checks import (
    CAPTIONERS,
    DEVICE,
    NO_DROPOUT,
    PAD_SRC,
    PAD_TRG,
    SMALL,
    TINY,
    TRANSFORMERS,
    VOCAB,
    Doubled,
    Result,
    Twins,
    batch,
    build,
    cast,
    check,
    check_gradients,
    check_steps,
    doubled,
    fused,
    gold_of,
    gradients,
    in_float64,
    place_of,
    plain,
    request_backend,
    rows,
    set_dropout,
    steps,
    tokens,
    trained,
    twins,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fastattn
from fastattn import AttentionMask, FusedTransformer, generate, get_pad_mask, get_subsequent_mask, use_backend
from fastattn.backends.reference.philox import draw_rng_state, reference_dropout_rule
from fastattn.nn import DecoderLayer, EncoderLayer, run_layer

full = pytest.mark.full
ALL = [*TRANSFORMERS, *CAPTIONERS]


# Numbers.


@twins("public", "beyond", "modern", "capped", "packed", "grown", "learned", "captioner one", "captioner four")
def test_outputs_and_gradients(name: str) -> None:
    """In training, in eval mode, and there without gradients."""
    models = build(name)
    for training, grad in ((True, True), (False, True), (False, False)):
        models.train(training).compare(grad)
    with torch.inference_mode():
        found, expected = models.outputs(models.ours), models.outputs(models.theirs)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def loss_of_logits(logits: Tensor, gold: Tensor, label_smoothing: float, smooth_over: str, reduction: str) -> Tensor:
    """torch's, or as the public implementation writes it."""
    if smooth_over == "all":
        options = {"label_smoothing": label_smoothing, "reduction": reduction, "ignore_index": PAD_TRG}
        return F.cross_entropy(logits, gold.flatten(), **options)
    one_hot = torch.zeros_like(logits).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - label_smoothing) + (1 - one_hot) * label_smoothing / (VOCAB - 1)
    losses = -(one_hot * F.log_softmax(logits, dim=1)).sum(1)[gold.flatten() != PAD_TRG]
    return losses.sum() if reduction == "sum" else losses.mean()


@twins("public", "packed", "capped", of=TRANSFORMERS)
def test_loss(name: str) -> None:
    """By `loss` and by a call with gold, which may be flat. Padding that is added does not count."""
    models = build(name)
    (src, trg), ours = models.batch, models.ours
    for options in ((0.0, "all", "mean"), (0.1, "all", "sum"), (0.1, "others", "mean")):
        named = dict(zip(("label_smoothing", "smooth_over", "reduction"), options, strict=True))
        models.theirs.zero_grad()
        expected = loss_of_logits(models.theirs(src, trg), trg, *options)
        (2 * expected).backward()
        for loss in (ours.loss(src, trg, trg.flatten(), **named), ours(src, trg, trg, **named)):
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        longer = [F.pad(t, (0, 3), value=PAD_TRG) for t in (trg, trg)]
        torch.testing.assert_close(ours.loss(src, *longer, **named), expected, rtol=1e-5, atol=0)
        ours.zero_grad()
        (2 * loss).backward()
        check_gradients(gradients(ours), gradients(models.theirs))


@pytest.mark.parametrize("name", ["public", "packed"])
def test_positions_are_the_same_bits_in_a_longer_table(name: str) -> None:
    """Results, loss, gradients and translations, with 4 positions as with 30."""
    found: list[list[Any]] = []
    for length in (4, SMALL["n_position"]):
        models = build(name, n_position=length)
        ours, (src, trg) = models.ours, models.batch
        outputs, grads = models.solve(ours)
        found.append([*outputs, *grads.values(), ours.loss(src, trg, gold_of(trg))])
        limits = {"max_len": 12, "bos_idx": 3, "eos_idx": 4}
        beams = generate.beam_search(ours, src, beam_size=3, **limits)
        found[-1] += [torch.tensor(h.tokens) for (h,) in beams] + [
            *map(torch.tensor, generate.greedy(ours, src, **limits))
        ]
        assert [len(t[0]) for n, t in ours.state_dict().items() if "pos_table" in n] == [length, length]
    assert all(map(torch.equal, *found))


# relu: where rounding moves a hidden unit across 0 the error is large.
KINKED = ("public", "small", "packed", "capped", "grown", "learned")


@twins("beyond", of=[*TRANSFORMERS, "captioner two"])
@pytest.mark.parametrize("mode", [torch.float64, torch.float16, torch.bfloat16, "autocast"], ids=str)
def test_precision(name: str, mode: Any) -> None:
    """model.half() and the like, and torch.autocast: about as near to float64 as the plain model, in its dtypes."""
    models = build(name, **({"activation": "gelu"} if name in KINKED else {}))
    exact, low = models._replace(batch=cast(models.batch, torch.float64)), models
    truth = exact.solve(copy.deepcopy(models.theirs).double())
    if mode != "autocast":
        low = models._replace(batch=cast(models.batch, mode))
        models.ours.to(mode), models.theirs.to(mode)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=mode == "autocast"):
        found, expected = (low.solve(model) for model in models[:2])
    if mode == torch.float64:
        check(found, expected, 1e-11)
        return
    assert [t.dtype for t in found.outputs] == [t.dtype for t in expected.outputs]
    assert {n: g.dtype for n, g in found.grads.items()} == {n: g.dtype for n, g in expected.grads.items()}
    for ours, theirs in zip(distances(found, truth), distances(expected, truth), strict=True):
        assert ours <= 2 * theirs + 1e-3


def distances(found: Result, truth: Result) -> tuple[Tensor, Tensor]:
    """Of all outputs and of all gradients, relative. In one small gradient a single rounding may be the whole error."""
    outputs = sum(
        (a - b).square().sum() / b.square().sum() for a, b in zip(*(r.outputs for r in (found, truth)), strict=True)
    )
    size = sum(g.square().sum() for g in truth.grads.values())
    return outputs.sqrt(), (sum((found.grads[n] - g).square().sum() for n, g in truth.grads.items()) / size).sqrt()


WHOLE = ("public", "beyond", "small", "packed", "gated")  # whose unmodified layers call no module
EVERYDAY_BACKENDS = [("aten", "public", False), ("aten", "gated", True), ("aten", "captioner two", False)]
EVERYDAY_BACKENDS += [("cuda", "public", True)]
ALL_BACKENDS = itertools.product(("aten", "triton", "cuda"), (*TRANSFORMERS, "captioner two"), (False, True))
ALL_BACKENDS = [row for row in ALL_BACKENDS if row[:2] != ("cuda", "capped")]  # refused: it has no softcap


@pytest.mark.parametrize(("backend", "name", "autocast"), rows(EVERYDAY_BACKENDS, ALL_BACKENDS))
def test_backends(
    backend: str, name: str, autocast: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op in each backend, with the dropout that an equal seed draws in the reference: layers that are whole, and
    such in which some sublayers are modified. Under autocast with about as large an error."""
    request_backend(request, backend)
    one_by_one = lambda *given: [draw_rng_state(*given[:2]) for _ in range(given[2])]  # noqa: E731
    monkeypatch.setattr(run_layer, "draw_rng_states", one_by_one)  # a GPU's generator draws others for a whole layer
    is_captioner = name.startswith("captioner")
    options = {} if is_captioner else TINY | ({"activation": "gelu"} if autocast and name in KINKED else {})
    models = build(name, **options)
    ours = set_dropout(models.ours, 0.2)
    if backend == "aten":  # it computes packed sequences one by one, and drops other weights than the formula
        set_dropout(ours, 0.0, "weights")

    by_loss = autocast and not is_captioner

    def solve(backend: str, autocast: bool) -> Result:
        torch.manual_seed(5)
        with use_backend(backend), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            if not by_loss:
                return models.solve(ours)
            ours.zero_grad()
            loss = ours.loss(*models.batch, models.batch[1], 0.1)
        loss.backward()
        return Result([loss.detach()[None]], gradients(ours))

    found = [solve(backend, autocast)]
    assert not (name in WHOLE and fastattn.explain(ours).called)
    for ending in () if is_captioner else ("enc_attn.fc", "pos_ffn.w_1"):
        hooked = [m for n, m in ours.named_modules() if n.endswith(ending)]
        handles = [m.register_forward_hook(lambda *_: None) for m in hooked]
        found.append(solve(backend, autocast))
        for handle in handles:
            handle.remove()
    with reference_dropout_rule(backend):
        exact, low = solve("reference", False), solve("reference", autocast)
    for result in found:
        if not autocast:
            check(result, exact)
            continue
        for ours_off, theirs_off in zip(distances(result, exact), distances(low, exact), strict=True):
            assert ours_off <= 1.5 * theirs_off + 2e-3


@pytest.mark.parametrize("name", ["public", "modern", "captioner two"])
def test_the_backend_of_the_constructor_is_given_to_every_op(name: str) -> None:
    """The reference draws other dropout than what a CPU uses: one op without the request would change the numbers."""
    found = []
    for requested, given in ((None, "reference"), ("reference", None)):
        models = build(name, backend=given)
        set_dropout(models.ours, 0.3)
        torch.manual_seed(2)
        with use_backend(requested):
            found.append(models.solve(models.ours))
    assert all(map(torch.equal, *(r.outputs for r in found)))
    assert all(torch.equal(found[0].grads[n], g) for n, g in found[1].grads.items())


# Dropout.


@twins("public", "beyond", "captioner two", of=[*TRANSFORMERS, "captioner two", "captioner four"])
def test_each_dropout_is_in_its_place(name: str) -> None:
    """With probability 1 nothing is left of what it drops, and nothing is random. The rates are those of the plain
    model."""
    models = build(name)
    for place in sorted({place_of(n) for n, m in models.theirs.named_modules() if isinstance(m, nn.Dropout)}):
        print(place)  # pytest shows it after a failure
        models.each(partial(set_dropout, p=0.0)).each(lambda m: set_dropout(m, 1.0, place))  # noqa: B023
        models.compare()
    if name.startswith("captioner"):
        kinds = build(name, dropout=0.3)[:2]
    else:
        kinds = [make(dropout=0.3, attn_dropout=0.2) for make in (fused, plain)]
    rates = [sorted(m.p for m in model.modules() if isinstance(m, nn.Dropout)) for model in kinds]
    assert rates[0] == rates[1]


@twins("packed", "beyond", "captioner two", of=[*TRANSFORMERS, "captioner two"])
def test_dropout_is_repeatable_fresh_and_off_in_eval(name: str) -> None:
    """Under activation checkpointing of the whole model, too."""
    models = build(name)
    set_dropout(models.ours, 0.3)
    found = []
    for seed, call in ((1, None), (1, lambda *batch: checkpoint(models.ours, *batch, use_reentrant=False)), (2, None)):
        torch.manual_seed(seed)
        found.append([models.solve(models.ours, call=call) for _ in range(2)])
    for once, again in zip(*found[:2], strict=True):
        check(once, again, 1e-7)
    (first, _), other = [[r.outputs[-1] for r in results] for results in found[1:]], found[2][0].outputs[-1]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other)
    models.train(False).compare()


# What is modified is called.


class Adapter(Doubled):
    """As fine-tuning libraries replace a linear map: with the weight of what it wraps."""

    @property
    def weight(self) -> Tensor:
        return self.inner.weight


def replaced_by(make: Callable[[Any], nn.Module]) -> Callable[[nn.Module, str], None]:
    return lambda parent, name: setattr(parent, name, make(parent._modules[name]))


def on_child(change: Callable[[Any], Any]) -> Callable[[nn.Module, str], None]:
    return lambda parent, name: change(parent._modules[name])


def subclass(module: nn.Module) -> None:
    kind = type(module)
    forward = {"forward": lambda self, *args, **options: doubled(kind.forward(self, *args, **options))}
    module.__class__ = type("Mine", (kind,), forward)


def patch_forward(module: nn.Module) -> None:
    module.forward = lambda *args, forward=module.forward, **options: doubled(forward(*args, **options))


def change_bias(module: nn.Linear) -> None:
    """Where there is one, there is none."""
    module.bias = nn.Parameter(torch.randn_like(module.weight[:, 0])) if module.bias is None else None


def without_affine(norm: Any) -> nn.Module:
    return nn.LayerNorm(norm.normalized_shape, eps=1e-6, elementwise_affine=False)


MAPS, NORMS, PLACES = (nn.Linear,), (nn.LayerNorm,), (nn.Dropout, nn.Embedding, plain_transformer.Positions)
LEAVES, INNER = (*MAPS, *NORMS, *PLACES), (*MAPS, *NORMS)
SUBLAYERS = (plain_transformer.Attention, plain_transformer.FeedForward)
SUBLAYERS += (plain_captioner.Attention, plain_captioner.FeedForward)
LAYERS = (plain_transformer.Layer, *SUBLAYERS)
# The children that are changed, and how.
CHANGES: dict[str, tuple[tuple[type, ...], Callable[[nn.Module, str], Any]]] = {
    "replaced": (LEAVES, replaced_by(Doubled)),
    "subclass": (LEAVES, on_child(subclass)),
    "own forward": (LEAVES, on_child(patch_forward)),
    "forward hook": (LEAVES, on_child(lambda m: m.register_forward_hook(lambda m, _, out: doubled(out)))),
    "forward pre-hook": (
        (*MAPS, *NORMS, nn.Dropout),
        on_child(lambda m: m.register_forward_pre_hook(lambda m, given: (given[0] / 2,))),
    ),
    "backward hook": (INNER, on_child(lambda m: m.register_full_backward_hook(lambda m, grads, _: (grads[0] / 2,)))),
    "backward pre-hook": (
        INNER,
        on_child(lambda m: m.register_full_backward_pre_hook(lambda m, grads: (grads[0] / 2,))),
    ),
    "sublayer of another class": (LAYERS, on_child(subclass)),
    "sublayer hook": (SUBLAYERS, on_child(lambda m: m.register_forward_hook(lambda m, _, out: doubled(out)))),
    "sublayer backward pre-hook": (
        SUBLAYERS,
        on_child(lambda m: m.register_full_backward_pre_hook(lambda m, grads: (grads[0] / 2, *grads[1:]))),
    ),
    "adapter": (MAPS, replaced_by(Adapter)),
    "bias": (MAPS, on_child(change_bias)),
    "weight norm": (MAPS, on_child(parametrizations.weight_norm)),
    "spectral norm": (MAPS, on_child(parametrizations.spectral_norm)),
    "pruned": (MAPS, on_child(lambda m: prune.l1_unstructured(m, "weight", amount=0.4))),
    "norm without weights": (NORMS, replaced_by(without_affine)),
    "rms norm": (NORMS, replaced_by(lambda norm: nn.RMSNorm(norm.normalized_shape, device=DEVICE))),
    "scale_grad_by_freq": ((nn.Embedding,), on_child(lambda m: setattr(m, "scale_grad_by_freq", True))),
    "max_norm": ((nn.Embedding,), on_child(lambda m: setattr(m, "max_norm", 0.5))),
}


def children(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Parent and name of each child, by a path that twins have in common."""
    paths = [n for n, _ in model.named_modules() if n]
    found = {n: (model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in paths}
    return {n.replace("attn_dropout", "attention.dropout"): child for n, child in found.items()}


def changed_twins(name: str, change: str, part: slice | int, without: tuple[str, ...] = ()) -> tuple[Twins, list[str]]:
    """Twins in float64, and the paths of the children that were changed: these of all that the change is for."""
    kinds, function = CHANGES[change]
    models = build(name)
    paths = [n for n, m in models.theirs.named_modules() if isinstance(m, kinds)]
    if change.startswith("backward"):  # a plain model adds into these, which torch forbids after such a hook
        without += "fc", "w_2", "trg_word_prj"
    if change in ("replaced", "adapter"):
        without += ("trg_embed.embed",)  # whose width a captioner reads
    paths = [n.replace("attn_dropout", "attention.dropout") for n in paths if not n.endswith(without)]
    changed = paths[part] if isinstance(part, slice) else [paths[part % len(paths)]]
    for model in models[:2]:
        torch.manual_seed(4)
        found = children(model)
        for path in changed:
            function(*found[path])
        model.double()
    return models._replace(batch=cast(models.batch, torch.float64)), changed


EVERY_SECOND = [slice(0, None, 2), slice(1, None, 2)]
EVERYDAY_CHANGES = [("public", change) for change in CHANGES] + [("captioner two", "own forward")]
PRE_NORM = ("beyond", "capped")  # whose sublayers get and give summands
CALLED = ("public", "beyond", "small", "modern", "capped", "captioner two", "captioner four")
ALL_CHANGES = [
    (name, change)
    for name, change in itertools.product(CALLED, CHANGES)
    if not (name in PRE_NORM and change.startswith("sublayer"))
    # It iterates at each call, and features that share a map are not computed in the plain twin's order.
    and (name, change) != ("captioner four", "spectral norm")
]


@pytest.mark.parametrize(("name", "change"), rows(EVERYDAY_CHANGES, ALL_CHANGES))
def test_changed_children_are_called(name: str, change: str, request: pytest.FixtureRequest) -> None:
    """Every second one, next to fused ones. With --full also all, and one by one. explain names them."""
    parts = EVERY_SECOND + ([slice(None)] if request.config.getoption("--full") else [])
    parts += [*range(70)] if len(parts) > 2 and change in ("own forward", "backward pre-hook", "bias") else []
    before = {*fastattn.explain(build(name).ours).called}  # of norms that are not fused
    for part in parts:
        models, changed = changed_twins(name, change, part)
        models.compare(atol=1e-9)
        parents = ((path, models.ours.get_submodule(path.rpartition(".")[0])) for path in changed)
        fusible = {n for n, parent in parents if n.rpartition(".")[2] in getattr(parent, "fused_children", ())}
        assert {*fastattn.explain(models.ours).called} == before | (fusible if change != "bias" else set()), changed


EVERYDAY_DECODERS = [("aten", name) for name in ("public", "modern", "grown", "learned", "packed", "captioner two")]
EVERYDAY_DECODERS += [("reference", "beyond"), ("reference", "grown")]


ALL_DECODERS = itertools.product(("aten", "reference", "triton", "cuda"), ALL)


@pytest.mark.parametrize(
    ("backend", "name"), rows(EVERYDAY_DECODERS, [row for row in ALL_DECODERS if row != ("cuda", "capped")])
)
def test_steps_are_forward(backend: str, name: str, request: pytest.FixtureRequest) -> None:
    """Also as on a GPU: by operators that read no number of the host. Under autocast and in 16 bits as near to float64
    as the plain model's forward."""
    request_backend(request, backend)
    _, truth = steps(in_float64(build(name)))
    with use_backend(backend):
        check_steps(build(name), on_device=backend != "aten")
        if backend in ("aten", "reference"):
            check_steps(in_float64(build(name)), 1e-9)
        for dtype in () if name.startswith("captioner") else (torch.float32, torch.bfloat16):
            models = build(name)
            models.ours.to(dtype), models.theirs.to(dtype)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
                found, low = steps(models, on_device=backend != "aten")
            assert (found - truth).norm() <= 2 * (low - truth).norm() + 1e-3 * truth.norm()


STEPPED = [row for row in ALL_CHANGES if row[1] != "max_norm"]  # which edits a shared weight as tokens come
EVERYDAY_STEPS = [("public", change) for change in ("replaced", "bias", "forward hook", "sublayer of another class")]


@pytest.mark.parametrize(("name", "change"), rows(EVERYDAY_STEPS, STEPPED))
def test_steps_call_changed_children(name: str, change: str) -> None:
    """All but the dropout of attention weights, which a step does not have."""
    for part in EVERY_SECOND:
        models, _ = changed_twins(name, change, part, without=("attn_dropout", "attn.dropout"))
        check_steps(models, 1e-9)


def test_global_hooks_see_every_module() -> None:
    """A hook on all modules of the process, as profilers use it."""
    models, seen = build("public"), set()
    with nn.modules.module.register_module_forward_hook(lambda m, *_: seen.add(m)):
        models.solve(models.ours)
    assert seen >= {m for m in models.ours.modules() if isinstance(m, LEAVES)}


# Training loops.


FROZEN = {
    "every second": lambda n, path: n % 2 == 0,
    "encoder": lambda _, path: path.startswith("encoder"),
    "biases": lambda _, path: path.endswith("bias"),
}
EVERYDAY_FROZEN = [("aten", "public", "every second"), ("aten", "public", "encoder"), ("triton", "small", "encoder")]
ALL_FROZEN = [
    *itertools.product(["aten"], ["public", "beyond", "small", "modern", "captioner two"], FROZEN),
    *itertools.product(["triton"], ["small", "gated"], FROZEN),
]


@pytest.mark.parametrize(("backend", "name", "part"), rows(EVERYDAY_FROZEN, ALL_FROZEN))
def test_frozen_parameters(backend: str, name: str, part: str, request: pytest.FixtureRequest) -> None:
    """Of an encoder without gradients no backward runs."""
    request_backend(request, backend)

    def freeze(model: nn.Module) -> None:
        for n, (path, p) in enumerate(model.named_parameters()):
            p.requires_grad_(not FROZEN[part](n, path))

    models, encoded = build(name, **TINY if backend == "triton" else {}).each(freeze), set()
    with use_backend(backend):
        models.compare()
        for module in (m for child, m in models.ours.named_children() if child.startswith("encoder")):
            module.register_forward_hook(lambda *given: encoded.add(given[-1][0].requires_grad))
        models.outputs(models.ours)
    assert encoded == {part != "encoder" or name == "captioner two"}  # whose inputs are not embedded by an encoder


def keep_products(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """A policy of selective activation checkpointing."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def draw_own_seeds(layer: nn.Module, *args: Any, **options: Any) -> Any:
    """layer(..) with the dropout that it has under activation checkpointing: each call draws its own seeds."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return layer(*args, **options)


CHECKPOINTS = {"plain": {}, "selective": {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}}
EVERYDAY_CHECKPOINTS = [("aten", "small", "plain"), ("aten", "small", "selective"), ("aten", "beyond", "selective")]
ALL_CHECKPOINTS = itertools.product(("aten", "triton"), ("public", "small", "modern", "beyond"), CHECKPOINTS)


@pytest.mark.parametrize(("backend", "name", "kind"), rows(EVERYDAY_CHECKPOINTS, ALL_CHECKPOINTS))
def test_checkpointing(
    backend: str, name: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each layer. With dropout the recomputed forward drops the same elements."""
    request_backend(request, backend)
    monkeypatch.setenv("FASTATTN_BACKEND", backend)  # a GPU's backward is in a thread that use_backend does not reach
    models = build(name, **TINY | {"n_layers": 2})
    wrapped, expected = models.ours, copy.deepcopy(models.ours)
    for model, wrap in ((wrapped, CHECKPOINTS[kind]), (expected, {"checkpoint_fn": draw_own_seeds})):
        set_dropout(model, 0.3)
        apply_activation_checkpointing(
            model, partial(checkpoint_wrapper, **wrap), lambda m: isinstance(m, (EncoderLayer, DecoderLayer))
        )
    found = []
    for model in (wrapped, expected):
        torch.manual_seed(8)
        found.append(models.solve(model))
    check(*found, 1e-5)
    for model in (wrapped, expected):
        set_dropout(model, 0.0)
    check(models.solve(wrapped), models.solve(models.theirs))


# The model stays what it is.


@twins("public", "modern", "learned", "captioner two", of=[name for name in ALL if name != "grown"])
def test_state_dict(name: str) -> None:
    """The public names in the public order, loaded strictly both ways; an equal seed gives equal initial weights."""
    ours, theirs, *_ = build(name)
    assert [(n, t.shape) for n, t in ours.state_dict().items()] == [
        (n, t.shape) for n, t in theirs.state_dict().items()
    ]
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    if name == "public":
        made = []
        for kind in (fused, plain):
            torch.manual_seed(5)
            made.append(kind().state_dict())
        for n, t in made[0].items():
            torch.testing.assert_close(t, made[1][n], rtol=0, atol=1e-6)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@twins("public", "captioner one", of=["public", "beyond", "modern", "captioner one"])
@pytest.mark.parametrize("how", COPIES)
def test_copies(name: str, how: str) -> None:
    """After a step. A copy is equal, and on its own; each parameter is stored once, and alone."""
    models = build(name)
    expected = models.solve(models.ours)
    models.ours.zero_grad()
    other = COPIES[how](models.ours)
    found = models.solve(other)
    assert all(map(torch.equal, found.outputs, expected.outputs))
    parameters = list(other.parameters())  # a shared weight counts once
    assert len(parameters) == len(list(models.theirs.parameters()))
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    with torch.no_grad():
        for p in parameters:
            p.zero_()
    check(models.solve(models.ours), expected, 1e-7)


@pytest.mark.parametrize("how", ["assign", "to_empty", "reset", "cast"])
def test_weights_come_later(how: str) -> None:
    """As loaders of checkpoints do it. The shared weight stays one: three steps equal those of the plain model."""
    models = build("public")
    theirs = models.theirs
    model = fused(**NO_DROPOUT) if how == "cast" else on_meta()
    if how == "assign":
        model.load_state_dict(copy.deepcopy(theirs.state_dict()), assign=True)
    elif how == "cast":
        model.load_state_dict(theirs.state_dict())
        model, theirs = model.double(), theirs.double()
    else:
        model.to_empty(device="cpu" if how == "reset" else DEVICE)  # whose random numbers are the same everywhere
        with torch.no_grad():
            for t in (*model.parameters(), *model.buffers()):
                t.fill_(torch.nan)
        model.load_state_dict(theirs.state_dict()) if how == "to_empty" else model.reset_parameters()
        model.to(DEVICE)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if how == "reset":
        for (name, t), u in zip(model.state_dict().items(), fused().state_dict().values(), strict=True):
            assert t.isfinite().all() and (t.std() - u.std()).abs() <= 0.2 * u.std() + 1e-6, name
        theirs.load_state_dict(model.state_dict())
    losses = [trained(each, models.loss, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, theirs)]
    torch.testing.assert_close(*losses)
    assert model.trg_word_prj.weight is model.decoder.trg_word_emb.weight is model.encoder.src_word_emb.weight


def on_meta() -> FusedTransformer:
    """Shapes alone: logits and gradients have no values."""
    model = FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | NO_DROPOUT, device="meta", dtype=torch.float32)
    logits = model(*(t.to("meta") for t in tokens()))
    logits.sum().backward()
    assert logits.is_meta and all(p.grad.shape == p.shape for p in model.parameters() if p.requires_grad)
    model.zero_grad()
    return model


# Padding, masks and weights of attention.


@twins("public", "beyond", of=TRANSFORMERS)
@torch.no_grad()
def test_padding_changes_nothing_for_real_tokens(name: str) -> None:
    """The embedding of padding may be anything."""
    models = build(name, emb_src_trg_weight_sharing=False)
    ours, (src, trg) = models.train(False).ours, models.batch
    logits = ours(src, trg).view(*trg.shape, -1)
    ours.encoder.src_word_emb.weight[PAD_SRC] = torch.nan
    padded = ours(F.pad(src, (0, 5), value=PAD_SRC), F.pad(trg, (0, 3), value=PAD_TRG)).view(3, 12, -1)
    real = trg != PAD_TRG
    torch.testing.assert_close(padded[:, :9][real], logits[real], rtol=0, atol=5e-5)
    torch.testing.assert_close(ours(src[2:, :4], trg[2:, :5]), logits[2, :5], rtol=0, atol=5e-5)


@torch.no_grad()
def test_every_way_of_giving_a_mask_is_the_same() -> None:
    models = build("public")
    ours, (src, trg) = models.ours, models.batch
    pad = get_pad_mask(src, PAD_SRC)
    (memory,) = ours.encoder(src, ours.src_mask(src))
    for mask in (pad, pad.byte(), pad.expand(-1, src.size(1), -1).int()):
        torch.testing.assert_close(ours.encoder(src, mask)[0], memory, rtol=0, atol=1e-6)
    (expected,) = ours.decoder(trg, ours.trg_mask(trg), memory, ours.src_mask(src))
    dense = 3 * (get_pad_mask(trg, PAD_TRG) & get_subsequent_mask(trg)).int()  # nonzero is visible
    known = {"enc_projected": ours.decoder.project_encoder(memory)}
    for src_mask in (pad.int(), pad.expand(-1, trg.size(1), -1), AttentionMask(key_padding=pad[:, 0])):
        torch.testing.assert_close(ours.decoder(trg, dense, memory, src_mask)[0], expected, rtol=0, atol=1e-6)
        out, *_ = ours.decoder(trg, dense, memory, src_mask, **known)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@twins("public", "modern", of=TRANSFORMERS)
@torch.no_grad()
def test_weights_of_attention(name: str) -> None:
    models = build(name)
    (ours, theirs), (src, trg) = models.train(False)[:2], models.batch
    masks = theirs.masks(src, trg)
    memory, weights = theirs.encoder(src, masks[0])
    out, found = ours.encoder(src, masks[0], return_attns=True)
    torch.testing.assert_close((out, [found]), (memory, weights), rtol=0, atol=5e-5)
    out, weights = theirs.decoder(trg, masks[1], memory, masks[0])
    decoded, *found = ours.decoder(trg, masks[1], memory, masks[0], return_attns=True)
    torch.testing.assert_close((decoded, found), (out, weights), rtol=0, atol=5e-5)


# Compiled and exported.


EXPORTS = [
    *itertools.product(("public", "beyond", "modern"), ("saved",)),
    ("public", "onnx"),
    ("public", "AOTInductor"),
]


@full  # everyday a model on the meta device shows that no value is read
@pytest.mark.parametrize(("name", "form"), EXPORTS)
def test_export_with_a_free_batch_and_free_lengths(name: str, form: str, tmp_path: Any) -> None:
    """Logits of one token and of the longest sentence possible, too."""
    model = build(name, **TINY).ours.cpu().eval()
    B, source, target = (torch.export.Dim(n, min=1, max=30) for n in ("batch", "source", "target"))
    shapes = {0: B, 1: source}, {0: B, 1: target}
    given, file = batch(0, 3, 7, 5)[:2], str(tmp_path / "model.pt2")
    if form == "onnx":
        pytest.importorskip("onnx"), pytest.importorskip("onnxscript")
        session = pytest.importorskip("onnxruntime").InferenceSession
        torch.onnx.export(model, given, dynamo=True, dynamic_shapes=shapes).save(file)
        run = session(file, providers=["CPUExecutionProvider"])
        names = [i.name for i in run.get_inputs()]

        def loaded(*given: Tensor) -> Tensor:
            return torch.from_numpy(run.run(None, {n: t.numpy() for n, t in zip(names, given, strict=True)})[0])
    else:
        exported = torch.export.export(model, given, dynamic_shapes=shapes)
        if form == "AOTInductor":
            if shutil.which("g++") is None:
                pytest.skip("AOTInductor needs a C++ compiler")
            torch._inductor.aoti_compile_and_package(exported, package_path=file)
            loaded = torch._inductor.aoti_load_package(file)
        else:
            torch.export.save(exported, file)
            loaded = torch.export.load(file).module()
    for sizes in ((3, 7, 5), (5, 24, 19), (4, 30, 30), (1, 5, 1)):
        given = batch(0, *sizes)[:2]
        with torch.no_grad():
            torch.testing.assert_close(loaded(*given), model(*given))


@full  # the everyday tier has one graph for all sizes of every op, and one compiled graph of an accelerated model
@pytest.mark.parametrize("name", ["public", "modern"])
@pytest.mark.parametrize("what", ["logits", "loss"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_compiled_graph_for_all_sizes(dynamic: bool | None, what: str, name: str) -> None:
    """Batches that change compile once more, then no more; without a graph break. With dynamic=True the first graph is
    for all."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    model = build(name, **TINY).ours.cpu()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=graphs)
    inputs, counts = 2 if what == "logits" else 3, []
    for sizes in ((3, 7, 5), (4, 9, 6), (5, 12, 8), (2, 14, 10), (3, 11, 11)):
        given, found = batch(0, *sizes)[:inputs], []
        for call in (compiled, model):
            model.zero_grad()
            result = call(*given)
            result.square().sum().backward()
            found.append((result.detach(), [p.grad.clone() for p in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        counts.append(graphs.frame_count)  # the backend may count the first graph twice
    assert len({*counts[0 if dynamic else 1 :]}) == 1
