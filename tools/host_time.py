"""Host time of a training step: what Python and PyTorch do around launches and replays. No GPU is used.

    python tools/host_time.py [transformer] [marian] [bart] [t5] [--steps N] [--backend cuda]

6 + 6 layers, tiny tensors on the CPU, one thread, torch.autocast in bfloat16, an ordinary loop with fused Adam. A GPU
that is faster than this waits for the host. Compared are the model without fastattn, the same with it, and with
graphs=True. Their steps alternate, and the least of all counts, in CPU time of the thread: others who use the machine
do not count. The exit status is 1 if a model with graphs needs more than its budget: 0.25 of the model without
fastattn, or 0.35 of one of transformers.

Triton's launch path runs up to the driver and no further (precompile.py), that of the CUDA kernels up to csrc/emulator,
which notes a launch and runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import emulator_build
import precompile
import torch
from torch import Tensor, nn

import fastattn
from fastattn.graphs import graphed_call

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import bench_accelerate  # noqa: E402
import models  # noqa: E402
from cases import AccelerateCase, ModelCase  # noqa: E402

BUDGETS = {"transformer": 0.25, "marian": 0.35, "bart": 0.35, "t5": 0.35}
FAMILIES = {"marian": "Marian", "bart": "BART", "t5": "T5"}

Run = tuple[nn.Module, Callable[[], Tensor]]  # a model, and its loss


@contextlib.contextmanager
def without_launches(backend: str) -> Iterator[None]:
    """Inside, kernels of triton, or of cuda, are not launched. The first build of the emulator needs a minute."""
    with precompile.compiling(90), emulator_build.recording() if backend == "cuda" else contextlib.nullcontext():
        yield


class EmptyGraphs(graphed_call.CudaGraphs):
    """A capture runs the work once. A replay does nothing, so results are garbage."""

    @staticmethod
    def can_capture(device: torch.device) -> bool:
        return True

    def host_random_state(self) -> list[Any]:
        return []

    def limit(self) -> int:
        return 1

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def captured(self, work: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
        work()
        return lambda: None


@contextlib.contextmanager
def without_replays() -> Iterator[None]:
    """Inside, models with graphs=True capture on a CPU, and their replays do nothing."""
    with mock.patch.object(graphed_call, "CudaGraphs", EmptyGraphs):
        yield


def models_of(family: str) -> dict[str, Run]:
    """Without fastattn, and with it: 6 + 6 layers of width 64 on 8 sentences of 8 tokens."""
    torch.manual_seed(0)
    kind = AccelerateCase if family in FAMILIES else ModelCase
    case = kind(8, 8, 6, 64, 128, 4, 100, **{"model": FAMILIES[family]} if family in FAMILIES else {})
    fixed = models.make_inputs(case, torch.device("cpu"), case.length).fixed
    batch = fixed["src_seq"], fixed["trg_seq"][:, :-1], fixed["trg_seq"][:, 1:]

    def run(build: models.Build, loss: models.Loss, graphs: bool = False) -> Run:
        model = build(case, 0.1, case.length)
        model.graphs = graphs
        return model, lambda: loss(model, *batch)

    if family not in FAMILIES:
        ours, own_loss = models.padded, models.plain_loss
        return {
            "plain PyTorch": run(models.plain, own_loss),
            "fastattn": run(ours, models.fused_loss),
            "fastattn, graphs": run(ours, models.fused_loss, graphs=True),
            "fastattn, graphs, own loss": run(ours, own_loss, graphs=True),
        }
    builds = {"untouched": bench_accelerate.build, "fastattn": bench_accelerate.accelerated}
    builds["fastattn, graphs"] = functools.partial(bench_accelerate.accelerated, graphs=True)
    return {name: run(build, bench_accelerate.own_loss) for name, build in builds.items()}


def step_of(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], int]:
    """One step, which returns the ns that it took."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step() -> int:
        start = time.thread_time_ns()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time_ns() - start

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(BUDGETS))
    parser.add_argument("--steps", type=int, default=80, help="that are measured, of each")
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton", help="of fastattn (triton)")
    options = parser.parse_args()
    if unknown := set(options.models) - BUDGETS.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    over = []
    for family in options.models or BUDGETS:
        with without_launches(options.backend), without_replays():
            runs = models_of(family)
            steps = {name: step_of(*run) for name, run in runs.items()}
            times: dict[str, list[int]] = {name: [] for name in runs}
            for _ in range(10 + options.steps):
                for name, step in steps.items():
                    with fastattn.use_backend(options.backend if "fastattn" in name else None):
                        times[name].append(step())
        least = {name: min(samples[10:]) for name, samples in times.items()}
        base = least[next(iter(runs))]
        print(f"{family}, ms (least of {options.steps} steps)")
        for name, ns in least.items():
            print(f"  {name:27s} {ns / 1e6:6.2f} {ns / base:5.2f}x")
            if "graphs" in name and ns > BUDGETS[family] * base:
                over.append(f"{family}: {name} is over its budget of {BUDGETS[family]}x")
            found = fastattn.graphs.stats(runs[name][0])
            if "graphs" in name and found.replays < options.steps:
                over.append(f"{family}: {name} made {found.replays} replays; eager: {dict(found.eager)}")
    print("\n".join(over) or "All models with graphs are within their budgets.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
