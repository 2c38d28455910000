"""Epochs of batches whose lengths change, as in training on real text: how many tokens a second.

    python benchmarks/report.py --only epoch

Lengths resemble Multi30k's (cases.EpochCase), words are random. Every epoch has other batches, planned as the training
example plans them, with graphs in steps of 8; a step begins with a batch in pinned memory of the CPU. Models and
steps are those of bench_transformer.py, compared on the first batch. "first_s" and the memory are of the first epoch,
which compiles and captures, the samples of the later ones. They do not alternate: "loop_us" is the measure of the host.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_transformer
import harness
import models
import numpy as np
import timing
import torch
from cases import EpochCase
from harness import Benchmark, Checked, Inputs, Provider, Run
from result_files import CUDA_GRAPHS, GRAPHED_STEP, GRAPHS, SDPA
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
EPOCH, EPOCHS = "epoch", 3


@functools.lru_cache(maxsize=2 * EPOCHS)
def batches(case: EpochCase, epoch: int, length_step: int) -> list[tuple[Tensor, Tensor]]:
    """src_seq (B, Ls) and trg_seq (B, Lt + 1) of each batch."""
    data, rng = harness.imported("translation.data"), np.random.default_rng([1, epoch])
    sides = [[rng.integers(4, case.n_vocab, n) for n in lengths] for lengths in (case.lengths - 1).numpy()]
    examples = data.Examples.of([*zip(*sides, strict=True)])  # adds EOS, and BOS to the target
    planned = [data.collate(examples, rows) for rows in data.plan_batches(examples, case.tokens, rng, length_step)]
    found = [(b.source, torch.cat([b.target_in, b.target_out[:, -1:]], 1)) for b in planned]
    return [(s.pin_memory(), t.pin_memory()) for s, t in found] if torch.cuda.is_available() else found


def make_inputs(case: EpochCase, device: torch.device) -> Inputs:
    src_seq, trg_seq = (t.to(device) for t in batches(case, 0, 1)[0])
    inputs = models.make_inputs(replace(case, batch=1), device, longest=case.length)
    return inputs._replace(fixed={"src_seq": src_seq, "trg_seq": trg_seq})


def over_epochs(given: Provider, device: torch.device) -> Provider:
    """A provider of bench_transformer, whose model reads tokens on this device."""

    def make(case: EpochCase, inputs: Inputs, dropout_p: float) -> Run:
        inputs = inputs._replace(fixed={name: t.to(device) for name, t in inputs.fixed.items()})
        run = given.make(case, inputs, dropout_p)
        planned = [batches(case, number, 8 if given.name in (GRAPHS, GRAPHED_STEP) else 1) for number in range(EPOCHS)]

        def epoch(number: int = 0) -> None:
            for batch in planned[number]:
                run.timed["step"](*(t.to(device, non_blocking=True) for t in batch))

        return run._replace(timed={EPOCH: epoch})

    return given._replace(make=make)


def measure(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    device, pool, error = checked.device, timing.pool_mib(checked.device), checked.check(provider)
    run = provider.make(checked.case, checked.inputs, checked.case.dropout_p)
    row, times, epoch = {"status": "ok", "error_over_bound": error, "loop_us": timing.loop_us()}, [], run.timed[EPOCH]
    first, *later = [lambda n=n: times.append(timing.seconds(lambda: epoch(n), device)) for n in range(EPOCHS)]
    row["peak_mib"] = timing.peak_mib(first, device) if device.type == "cuda" else first()  # a profiler would slow it
    for call in later:
        call()
    timed = timing.summarised([1e3 * seconds for seconds in times[1:]])
    row |= {"first_s": times[0], "timings": {EPOCH: timed._asdict()}, "pool_mib": timing.pool_mib(device) - pool}
    return row | run.notes | run.after()


def providers(device: torch.device) -> list[Provider]:
    compiled = f"torch.compile of {SDPA}"
    names = ("reference", "default", GRAPHS, GRAPHED_STEP, SDPA, compiled, compiled + CUDA_GRAPHS)
    found = [over_epochs(given, device) for given in bench_transformer.providers(device) if given.name in names]
    packed = bench_transformer.provider(f"{GRAPHS}, packed", models.packed, graphs=True)
    return [*found, over_epochs(packed, torch.device("cpu"))]


BENCHMARKS = (
    Benchmark(
        EPOCH,
        bench_transformer.FORMULA,
        ("token",),
        make_inputs,
        providers,
        directions=(EPOCH,),
        hide_host=False,
        measure=measure,
    ),
)
