"""One whole training step of the encoder-decoder, and its memory: by fastattn, and by PyTorch's alternatives.

    python benchmarks/report.py --only transformer

Forward, loss, backward and fused Adam; bfloat16 cases are float32 parameters under torch.autocast. fastattn's backends
use FusedTransformer.loss, as its users do; the reference path and the rivals use torch's cross_entropy of their logits.
Logits, loss and gradients are compared on the first sentences of the batch, without dropout. Speed is measured with
dropout. tokens/s counts real target tokens. The name of a case has how much of its batch is padding.

"default, own loss": a user has only changed the import and computes the loss from the logits as before.
"default, padding kept": padding is computed too, which shows how much of the gain comes from dropping it.
"default, compiled": `loss` under torch.compile. "default, graphs": graphs=True, forward and backward as CUDA graphs.
"default, GraphedStep": the whole step is one. Memory is what a step needs beyond weights and Adam's state: activations,
gradients and temporary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import models
import torch
from cases import ModelCase
from harness import Benchmark, Inputs, Provider, Refused, Run
from result_files import CUDA_GRAPHS, GRAPHED_STEP, GRAPHS, LOSS_FROM_LOGITS, PLAIN, SDPA, WITH_PADDING
from torch import Tensor, nn

from fastattn import FusedTransformer, GraphedStep, graphs, use_backend

COMPARED = 32  # sentences: float64 logits of a whole batch may not fit into memory
UNTIL_REPLAY = 4  # calls: two eager ones, the one that is captured, and a replay
REDUCE_OVERHEAD = "reduce-overhead"  # torch.compile's mode with CUDA graphs
RIVALS = {PLAIN: models.plain, SDPA: models.plain_sdpa, "torch.nn.Transformer": models.TorchTransformer}


def make_inputs(case: ModelCase, device: torch.device) -> Inputs:
    return models.make_inputs(case, device, longest=case.length)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True, **options)


def mixed(model: nn.Module, case: ModelCase) -> torch.autocast:
    """Autocast where a bfloat16 case has float32 parameters."""
    like = next(model.parameters())
    return torch.autocast(like.device.type, case.dtype, case.dtype == torch.bfloat16 and like.dtype == torch.float32)


def needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Refused("CUDA graphs need a GPU")


def replayed(model: nn.Module) -> dict[str, int]:
    """Entries of a row of graphs=True."""
    stats = graphs.stats(model)
    if not stats.replays:
        raise Refused(f"no graph was replayed: {', '.join(stats.eager) or 'the model has none'}")
    return {"replays": stats.replays, "captures": stats.captures, "eager": sum(stats.eager.values())}


def compiled_frames() -> dict[str, int]:
    """An entry of a row of torch.compile."""
    if not (frames := torch._dynamo.utils.counters["frames"]["ok"]):
        raise Refused("nothing was compiled")
    return {"frames": frames}


def step_run(
    model: nn.Module, case: ModelCase, inputs: Inputs, compute_loss: models.Loss, backend: str | None, **notes: Any
) -> Run:
    """The Run of one model. `use_backend` chooses the backend of every op of the model. notes: graphs, it has
    fastattn's."""
    has_graphs = notes.get("graphs", False)
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    optimizer = adam(model)

    def step() -> None:
        with use_backend(backend), mixed(model, case):
            loss = compute_loss(model, src_seq, trg_seq[:, :-1], trg_seq[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that gradients count in the memory of every step

    def results() -> dict[str, torch.Tensor]:
        src, trg, gold = src_seq[:COMPARED], trg_seq[:COMPARED, :-1], trg_seq[:COMPARED, 1:]
        for _ in range(UNTIL_REPLAY if has_graphs else 1):
            optimizer.zero_grad()
            with use_backend(backend), mixed(model, case):
                logits = model(src, trg)[gold.flatten() != models.PAD].detach()  # those of padding are undefined
                loss = compute_loss(model, src, trg, gold)
            loss.backward()
        if has_graphs:
            replayed(model)
        named = sorted((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
        gradients = torch.cat([grad.flatten() for _, grad in named])
        optimizer.zero_grad()
        # The loss in the logits' dtype: the error of a single float32 number is chance. Gradients in bfloat16: one of
        # ten million relus may be so near 0 that rounding moves it across, and a float32 gradient shows that as a
        # thousand times its own rounding.
        if gradients.dtype == torch.float32:
            gradients = gradients.bfloat16()
        return {"logits": logits, "loss": loss.to(logits.dtype), "gradients": gradients}

    return Run(results, {"step": step}, notes, partial(replayed, model) if has_graphs else dict)


def provider(
    name: str,
    build: models.Build = models.fused,
    backend: str | None = None,
    compiled: str | None = None,
    compute_loss: models.Loss | None = None,
    later: int = 0,
    ours: bool | None = None,
    run: Callable[..., Run] = step_run,
    **notes: Any,
) -> Provider:
    """compiled: by torch.compile in this mode. compute_loss: by default FusedTransformer's own for fastattn's backends.
    later: it is measured this many cases later, because compiling takes minutes. For the same reason the results of a
    compiled rival are not compared: it would be compiled once more, without dropout.
    """
    ours = build not in RIVALS.values() if ours is None else ours
    compute_loss = compute_loss or (models.fused_loss if ours and backend != "reference" else models.plain_loss)
    has_inputs_weights = build is not models.TorchTransformer

    def make(case: ModelCase, inputs: Inputs, dropout_p: float) -> Run:
        like = next(iter(inputs.leaves.values()))
        if notes.get("graphs") or compiled == REDUCE_OVERHEAD:
            needs_gpu(like.device)
        model = build(case, dropout_p, case.length).to(like.device, like.dtype)
        if has_inputs_weights:
            model.load_state_dict(inputs.leaves)
        if notes.get("graphs") and isinstance(model, FusedTransformer):
            model.graphs = True
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model.compile(dynamic=False, mode=compiled)
            if isinstance(model, FusedTransformer):
                model.loss = torch.compile(model.loss, dynamic=False, mode=compiled)
        made = run(model, case, inputs, compute_loss, backend, **notes)
        return made._replace(after=compiled_frames) if compiled else made

    return Provider(name, make, ours, later, compared=has_inputs_weights and (ours or not compiled))


def graphed_step_run(model: nn.Module, case: ModelCase, inputs: Inputs, *given: Any) -> Run:
    """GraphedStep. It keeps no gradients, so the gradients of an eager step are compared, and the loss of the graph."""
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    needs_gpu(src_seq.device)
    optimizer = adam(model, capturable=True)
    graphed_step = GraphedStep(model, optimizer)

    def step(src: Tensor = src_seq, trg: Tensor = trg_seq) -> Tensor:
        with mixed(model, case):
            return graphed_step(src, trg[:, :-1], trg[:, 1:], models.SMOOTHING)

    def results() -> dict[str, torch.Tensor]:
        found = step_run(model, case, inputs, *given).results()
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(UNTIL_REPLAY):
            loss = step(src_seq[:COMPARED], trg_seq[:COMPARED])
        replayed(model)
        return found | {"loss": loss.to(found["loss"].dtype)}

    return Run(results, {"step": step}, after=partial(replayed, model))


def providers(device: torch.device) -> list[Provider]:
    on_gpu = device.type == "cuda"
    later, seldom = (14, harness.SELDOM) if on_gpu else (100, 0)
    found = [
        provider("reference", models.padded, backend="reference"),
        provider("default", default=True),
        provider(LOSS_FROM_LOGITS, compute_loss=models.plain_loss),
        provider(WITH_PADDING, models.padded, later=seldom),
        provider(GRAPHS, graphs=True),
        provider(f"{GRAPHS}, own loss", compute_loss=models.plain_loss, graphs=True),
        provider(GRAPHED_STEP, models.padded, run=graphed_step_run),
        provider("default, compiled", compiled="default", later=later + 6 * on_gpu),
        *(provider(name, build) for name, build in RIVALS.items()),
        provider(f"torch.compile of {SDPA}", models.plain_sdpa, compiled="default", later=later),
        provider(f"torch.compile of {SDPA}{CUDA_GRAPHS}", models.plain_sdpa, compiled=REDUCE_OVERHEAD, later=later),
    ]
    if on_gpu:
        # On a GPU padding is dropped only on request.
        found.append(provider("default, pack_padding", models.packed, later=seldom))
        found += [provider(backend, models.padded, backend, later=seldom) for backend in ("aten", "triton")]
    return found


FORMULA = (
    "FLOPs of real tokens: 6 x tokens x weights of the products + 12 x d_model x layers x visible pairs (encoder, half "
    "decoder, cross); bytes: Adam's alone, 28 a parameter"
)
BENCHMARKS = (
    Benchmark("transformer", FORMULA, ("token", "flop"), make_inputs, providers, directions=("step",), hide_host=False),
)
