"""What the host does in a training and in a decoding step, with a bound. Counts are equal on every machine.

Operators are PyTorch's, those that operators call included. Calls are those of Python functions in fastattn's files.
A step of 6 + 6 layers calls 63 ops: one more question in each op exceeds the bound of calls. With graphs=True replays
are left out. As a program it prints the counts of a GPU's host: in that process Triton compiles for a GPU
(tools/precompile.py).
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import FusedTransformer, generate, use_backend

# Operators, calls and launches that a training step may need, and one more token of greedy decoding by 3 + 3 layers.
BOUNDS = {"aten": (8110, 3420, 0), "a token": (365, 74, 0), "triton": (3375, 1740, 140), "graphs": (400, 90, 0)}
SIZES = dict(d_word_vec=64, d_model=64, d_inner=128, n_head=4, d_k=16, d_v=16, n_position=50)
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # no calls from Python 3.12 on


def calls_of(function: Callable[[], Any]) -> int:
    folders = tuple(f"{Path(find_spec(name).origin).parent}{os.sep}" for name in ("fastattn", "fastattn.kernels"))
    count = 0

    def note(frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_name not in INLINED:
            count += frame.f_code.co_filename.startswith(folders)

    gc.disable()  # it may call finalizers
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def counts_of(function: Callable[[], Any], launches: Callable[[], int] = lambda: 0) -> tuple[int, int, int]:
    """launches: how many there were until now."""
    for _ in range(2):  # the first compiles and fills caches
        function()
    before = launches()
    function()
    launched = launches() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        function()
    names = [event.name() for event in profiled.profiler.kineto_results.events()]
    return sum(bool(re.fullmatch(r"\w+::\w+", name)) for name in names), calls_of(function), launched


def step_of(model: nn.Module, compute_loss: Callable[[], Tensor]) -> Callable[[], None]:
    """In bfloat16."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_loss()
        loss.backward()
        model.zero_grad()

    return step


def training_step(backend: str) -> Callable[[], None]:
    src, trg = torch.randint(1, 100, (2, 8)), torch.randint(1, 100, (2, 9))
    src[0, 5:], trg[0, 7:] = 0, 0
    model = FusedTransformer(100, 100, 0, 0, n_layers=6, backend=backend, pack_padding=False, **SIZES)
    return step_of(model, lambda: model.loss(src, trg[:, :-1], trg[:, 1:], 0.1))


def decoded_token() -> tuple[float, ...]:
    """Between 16 and 32 tokens. So narrow, that no processor prepacks weights."""
    model, src = FusedTransformer(100, 100, 0, 0, n_layers=3, **SIZES).eval(), torch.randint(3, 100, (1, 8))
    few, many = (counts_of(lambda n=n: generate.greedy(model, src, max_len=n, bos_idx=2, eos_idx=-1)) for n in (16, 32))
    return tuple((b - a) / 16 for a, b in zip(few, many, strict=True))


def count_on_a_gpu() -> dict[str, Any]:
    """By name: a training step of Triton's kernels, which are compiled and not launched, and one with graphs."""
    import host_time
    import precompile

    launches: list[Any] = []
    with precompile.compiling(90, launches.append), host_time.without_replays(), use_backend("triton"):
        found = {"triton": counts_of(training_step("triton"), lambda: len(launches))}
        step = step_of(*host_time.models_of("transformer")["fastattn, graphs"])
        step()  # eager, as the first one of counts_of; the next one captures
        return found | {"graphs": counts_of(step, lambda: len(launches))}


def check(found: dict[str, Any]) -> None:
    for name, counts in found.items():
        assert all(count <= bound for count, bound in zip(counts, BOUNDS[name], strict=True)), f"{name}: {counts}"


def test_a_cpu_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # conftest's, which fills the memory of torch.empty
    check({"aten": counts_of(training_step("aten")), "a token": decoded_token()})


@pytest.mark.full
def test_the_host_of_a_gpu_has_a_budget() -> None:
    pytest.importorskip("triton"), pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "KINETO_LOG_LEVEL": "99"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(count_on_a_gpu()))
