"""Host time: what Python and PyTorch do for a training step around its launches. A fast GPU waits for it.

    python benchmarks/report.py --only host_time

No GPU is used, whatever the report's device is. The tensors are tiny and on the CPU, with one thread. Triton's launch
path runs up to the driver and no further (tools/precompile.py), that of the CUDA kernels up to csrc/emulator, which
notes a launch and runs nothing. So what is left is modules, checks, autograd, allocations and launch code; a real
launch adds some microseconds. PyTorch's own operators do run.

Forward with loss, then backward, into gradients that are None. Autocast is entered in every step, so every step casts
its weights. The time is the CPU time of the thread: others who use the machine do not count. Samples of each provider
alternate with those of the public model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import bench_transformer
import harness
import models
import timing
import torch
from cases import HostTimeCase
from harness import Checked, Inputs, Provider, Refused, Run
from report_markdown import PLAIN

from fastattn import use_backend
from fastattn.backends import import_failure
from fastattn.ops import attention as ops_attention

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import precompile  # noqa: E402

CPU = torch.device("cpu")
CAPABILITY = 90  # kernels are those for sm_90
WARM_UP, LEAST, MOST = 5, 25, 200  # steps

Seconds = tuple[float, float]  # of forward with loss, and of backward


@contextmanager
def without_triton_launches() -> Iterator[Callable[[], int]]:
    """Gives a function: how many launches were left out since its last call."""
    if reason := import_failure("attention", "triton"):
        raise Refused(reason)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise Refused("TRITON_INTERPRET is set, so there is no launch path")
    launches: list[Any] = []

    def taken() -> int:
        count = len(launches)
        launches.clear()
        return count

    with precompile.compiling(CAPABILITY, launches.append):
        yield taken


@contextmanager
def without_cuda_launches() -> Iterator[Callable[[], int]]:
    """The same, of the CUDA kernels as they are built for a CPU. The first build needs a minute of two cores.

    Masks are prepared as on a GPU, by a Triton kernel.
    """
    emulator_build = harness.imported("emulator_build")
    if reason := emulator_build.unsupported_reason():
        raise Refused(reason)
    prepare = ops_attention._prepare
    with (
        without_triton_launches() as triton_launches,
        emulator_build.recording(capability=CAPABILITY) as cuda_launches,
        mock.patch.object(ops_attention, "_prepare", lambda _, *given: prepare("triton", *given)),
    ):
        yield lambda: triton_launches() + len(cuda_launches())


WITHOUT_LAUNCHES: dict[str, Callable[[], AbstractContextManager[Callable[[], int]]]] = {
    "triton": without_triton_launches,
    "cuda": without_cuda_launches,
}


def make_inputs(case: HostTimeCase, device: torch.device) -> Inputs:
    return models.make_inputs(case, CPU, longest=case.length)


def step_run(
    build: models.Build, compute_loss: models.Loss, case: HostTimeCase, inputs: Inputs, dropout_p: float, **notes: Any
) -> Run:
    """The Run whose timed call is one step. The call itself returns its Seconds."""
    model = build(case, dropout_p, case.length)
    model.load_state_dict(inputs.leaves)
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    shown, gold = trg_seq[:, :-1], trg_seq[:, 1:]
    mixed = bench_transformer.is_mixed(model, case)

    def step() -> Seconds:
        start = time.thread_time()
        with torch.autocast("cpu", case.dtype) if mixed else nullcontext():
            loss = compute_loss(model, src_seq, shown, gold)
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        model.zero_grad()
        return middle - start, end - middle

    return Run(dict, {"both": step}, notes)


def measure(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    """The row of one provider. "of_plain": its times divided by the public model's in alternating samples. "launches":
    how many of one step were left out; None where none are."""
    case, inputs, threads = checked.case, checked.inputs, torch.get_num_threads()
    plain = step_run(models.plain, models.plain_loss, case, inputs, case.dropout_p).timed["both"]
    run = provider.make(case, inputs, case.dropout_p)
    steps = [run.timed["both"]] if provider.name == PLAIN else [run.timed["both"], plain]
    torch.set_num_threads(1)
    try:
        with (
            WITHOUT_LAUNCHES.get(provider.name, nullcontext)() as launches_taken,
            use_backend(provider.name if provider.ours else None),
        ):
            for step in WARM_UP * steps:
                step()
            launches = None
            if launches_taken:
                launches_taken()
                steps[0]()
                launches = launches_taken()
            samples, end = [], time.perf_counter() + 10 * budget_s
            while len(samples) < LEAST or (len(samples) < MOST and time.perf_counter() < end):
                samples.append([step() for step in steps])
    finally:
        torch.set_num_threads(threads)
    found, *public = (_timings(list(seconds)) for seconds in zip(*samples, strict=True))
    row = {"status": "ok", "error_over_bound": None, "peak_mib": None, "launches": launches} | run.notes
    row["timings"] = {direction: timed._asdict() for direction, timed in found.items()}
    base = public[0] if public else found
    row["of_plain"] = {direction: timed.median_ms / base[direction].median_ms for direction, timed in found.items()}
    return row


def _timings(steps: list[Seconds]) -> dict[str, timing.Timing]:
    forward, backward = ([1e3 * seconds for seconds in part] for part in zip(*steps, strict=True))
    both = [1e3 * sum(seconds) for seconds in steps]
    return {
        direction: timing.summarised(samples)
        for direction, samples in (("forward", forward), ("backward", backward), ("both", both))
    }


def rival(name: str, build: models.Build, later: int = 0) -> Provider:
    """later: it is compiled by torch.compile, and measured this many cases later."""

    def compiled(case: HostTimeCase, dropout_p: float, longest: int) -> torch.nn.Module:
        torch._dynamo.reset()
        model = build(case, dropout_p, longest)
        model.compile(dynamic=False)
        return model

    def make(case: HostTimeCase, inputs: Inputs, dropout_p: float) -> Run:
        return step_run(compiled if later else build, models.plain_loss, case, inputs, dropout_p)

    return Provider(name, make, ours=False, later=later, compared=False)


def ours(backend: str, **notes: Any) -> Provider:
    """FusedTransformer.loss by this backend. Padding is kept, as on a GPU."""

    def make(case: HostTimeCase, inputs: Inputs, dropout_p: float) -> Run:
        return step_run(models.padded, models.fused_loss, case, inputs, dropout_p, **notes)

    return Provider(backend, make, compared=False, ends_process=backend in WITHOUT_LAUNCHES)


def providers(device: torch.device) -> list[Provider]:
    return [
        rival(PLAIN, models.plain),
        rival("torch.nn.Transformer", models.TorchTransformer),
        rival(f"torch.compile of {PLAIN}", models.plain, later=100),
        ours("aten"),
        ours("triton", default=True),
        ours("cuda"),
    ]


BENCHMARK = harness.Benchmark(
    name="host_time",
    case_type=HostTimeCase,
    rates=(),
    inputs=make_inputs,
    providers=providers,
    measure=measure,
)
