"""One whole training step of the encoder-decoder, and its memory: by fastattn, and by what PyTorch has instead.

    pytest benchmarks/bench_transformer.py --benchmark-only            the quick cases
    python benchmarks/report.py --out DIR --only transformer memory

Forward, loss, backward and fused Adam; bfloat16 cases are float32 parameters under torch.autocast. fastattn's backends
take the loss from FusedTransformer.loss, as its users do; the reference path and the rivals from their logits by
torch's cross_entropy. Logits, loss and gradients are compared on the first sentences of the batch, without dropout;
speed is measured with it. tokens/s counts real target tokens; a case says which share of its batch is padding.

"default, own loss" is fastattn where a user has only changed the import and takes the loss from the logits as before.
"default, padding kept" is fastattn with padding in all its work: what it takes longer is the part of the gain that
comes from dropping padding. "default, compiled" is its `loss` under torch.compile, "default, GraphedStep" its step in
CUDA graphs. On a GPU "default, ... by reference" leaves one op out, which shows what that op contributes; those keep
the padding too. Of memory, what a step needs beyond weights and Adam's state counts: activations, gradients and
temporary tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import harness
import models
import torch
from cases import MemoryCase, StepCase
from harness import Inputs, Provider, Refused, Run
from result_files import KEPT, OWN_LOSS
from tables import cases_of
from torch import nn

from fastattn import GraphedStep, use_backend

# What FusedTransformer.loss calls.
MODEL_OPS = ("attention", "add_layer_norm", "feed_forward", "linear_cross_entropy", "embed_layer_norm")
COMPARED = 32  # sentences: float64 logits of a whole batch may not fit into memory
RIVALS = {
    "plain PyTorch": models.plain,
    "plain PyTorch with SDPA": models.plain_sdpa,
    "torch.nn.Transformer": models.TorchTransformer,
}


def make_inputs(case: StepCase, device: torch.device) -> Inputs:
    return models.make_inputs(case, device, longest=case.length)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True, **options)


def is_mixed(model: nn.Module, case: StepCase) -> bool:
    return case.dtype == torch.bfloat16 and next(model.parameters()).dtype == torch.float32


def step_of(
    model: nn.Module,
    case: StepCase,
    inputs: Inputs,
    loss_of: models.Loss,
    backend: str | None,
    left_out: str | None,
    **notes: Any,
) -> Run:
    """The Run of one model. A context chooses the backend: it reaches every op of the model."""
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    optimizer = adam(model)
    mixed = is_mixed(model, case)

    @contextmanager
    def as_asked() -> Iterator[None]:
        autocast = torch.autocast(src_seq.device.type, case.dtype) if mixed else nullcontext()
        with use_backend(backend), models.by_reference(left_out), autocast:
            yield

    def step() -> None:
        with as_asked():
            loss = loss_of(model, src_seq, trg_seq[:, :-1], trg_seq[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that gradients count in the memory of every step

    def results() -> dict[str, torch.Tensor]:
        src, trg, gold = src_seq[:COMPARED], trg_seq[:COMPARED, :-1], trg_seq[:COMPARED, 1:]
        with as_asked():
            logits = model(src, trg)[gold.flatten() != models.PAD]  # nobody promises anything of the others
            loss = loss_of(model, src, trg, gold)
        loss.backward()
        named = getattr(model, "gradients", lambda: {name: p.grad for name, p in model.named_parameters()})()
        gradients = torch.cat([named[name].flatten() for name in sorted(named)])
        optimizer.zero_grad()
        # The loss in the logits' dtype: one number's own error, in float32, is a matter of luck. Gradients in bfloat16:
        # of some ten million relus one may be so near to 0 that rounding opens or closes it, and a float32 gradient
        # shows that as a thousand times its own rounding.
        if gradients.dtype == torch.float32:
            gradients = gradients.bfloat16()
        return {"logits": logits, "loss": loss.to(logits.dtype), "gradients": gradients}

    return Run(results, {"step": step}, notes)


def provider(
    name: str,
    build: models.Build = models.fused,
    backend: str | None = None,
    left_out: str | None = None,
    compiled: str | None = None,
    loss_of: models.Loss | None = None,
    later: int = 0,
    **notes: Any,
) -> Provider:
    """compiled: by torch.compile in this mode. loss_of: FusedTransformer's own for fastattn's backends unless given.
    later: how many cases after its own it is measured, since compiling takes minutes.
    """
    ours = build not in RIVALS.values()
    loss_of = loss_of or (models.fused_loss if ours and backend != "reference" else models.plain_loss)

    def make(case: StepCase, inputs: Inputs, dropout_p: float) -> Run:
        weights = inputs.leaves
        model = build(case, dropout_p, case.length)
        model = model.to(inputs.fixed["src_seq"].device, next(iter(weights.values())).dtype)
        model.load_state_dict(weights)
        if compiled:
            torch._dynamo.reset()
            model.compile(dynamic=False, mode=compiled)
            if ours:
                model.loss = torch.compile(model.loss, dynamic=False, mode=compiled)
        return step_of(model, case, inputs, loss_of, backend, left_out, **notes)

    return Provider(name, make, ours, later=later)


def graphed(case: StepCase, inputs: Inputs, dropout_p: float) -> Run:
    """GraphedStep, whose only bucket is the batch. It keeps no gradients: those are compared of an eager step, and of
    its own the loss."""
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    model = models.padded(case, dropout_p, case.length).to(src_seq.device, next(iter(inputs.leaves.values())).dtype)
    model.load_state_dict(inputs.leaves)
    optimizer = adam(model, capturable=src_seq.is_cuda)
    options = {"buckets": (case.length,), "batch_size": case.batch, "label_smoothing": models.SMOOTHING}
    options["autocast"] = torch.bfloat16 if is_mixed(model, case) else None
    try:
        step = GraphedStep(model, optimizer, **options)
    except ValueError as error:  # on a CPU
        raise Refused(str(error)) from error

    def results() -> dict[str, torch.Tensor]:
        found = step_of(model, case, inputs, models.fused_loss, None, None).results()
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(4):  # two eager steps, one captured, one replayed
            loss = step(src_seq[:COMPARED], trg_seq[:COMPARED, :-1], trg_seq[:COMPARED, 1:])
        return found | {"loss": loss.to(found["loss"].dtype)}

    return Run(results, {"step": lambda: step(src_seq, trg_seq[:, :-1], trg_seq[:, 1:])})


def providers(device: torch.device) -> list[Provider]:
    on_gpu = device.type == "cuda"
    later = 18 if on_gpu else 100
    found = [provider("reference", models.padded, backend="reference"), provider("default", default=True)]
    found.append(provider(OWN_LOSS, loss_of=models.plain_loss))
    found.append(provider(KEPT, models.padded, without="pack_padding"))
    found.append(Provider("default, GraphedStep", graphed))
    found.append(provider("default, compiled", compiled="default", later=later))
    if on_gpu:  # where it is never dropped unasked
        found.append(provider("default, pack_padding", models.packed))
    found += [provider(name, build) for name, build in RIVALS.items()]
    for op_name in MODEL_OPS if on_gpu else ():
        name = f"default, {op_name} by reference"
        found.append(provider(name, models.padded, left_out=op_name, without=op_name))
    found += [provider(backend, models.padded, backend) for backend in (("aten", "triton") if on_gpu else ())]
    for name, build in RIVALS.items():
        found.append(provider(f"torch.compile of {name}", build, compiled="default", later=later))
    if on_gpu:  # CUDA graphs
        build = models.plain_sdpa
        found.append(
            provider(
                "torch.compile of plain PyTorch with SDPA, CUDA graphs", build, compiled="reduce-overhead", later=later
            )
        )
    return found


def memory_providers(device: torch.device) -> list[Provider]:
    found = [provider("reference", backend="reference"), provider("default", default=True)]
    found += [provider(backend, backend=backend) for backend in (("aten", "triton") if device.type == "cuda" else ())]
    return found + [provider(name, build) for name, build in RIVALS.items()]


BENCHMARK = harness.Benchmark(
    name="transformer",
    cases=cases_of(StepCase),
    directions=("step",),
    rates=("token", "flop"),
    inputs=make_inputs,
    providers=providers,
    hide_host=False,
)
MEMORY = harness.Benchmark(
    name="memory",
    cases=cases_of(MemoryCase),
    directions=(),
    rates=(),
    inputs=make_inputs,
    providers=memory_providers,
)


def test_transformer(benchmark: Any, timed: Any) -> None:
    benchmark(timed)
