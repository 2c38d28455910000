"""What the host does in a training and in a decoding step, with a bound. Counts are equal on every machine.

Operators are PyTorch's, those that operators call included. Calls are those of Python functions in fastattn's files.
A step of 6 + 6 layers calls 63 ops: one more question in each op exceeds the bound of calls. With graphs=True replays
are left out. As a program, with the name of a backend, it prints what it finds: in that process Triton compiles for a
GPU (tools/precompile.py).
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import emulator_build
import pytest
import torch
from torch import Tensor, nn

from fastattn import FusedTransformer, generate, use_backend

# Operators, calls and launches that a training step may need, and one more token of greedy decoding by 3 + 3 layers.
BOUNDS = {
    "aten, float32": (6760, 3020, 0),
    "aten, bfloat16": (8110, 3420, 0),
    "a token, float32": (389, 77, 0),
    "triton, float32": (2565, 1700, 140),
    "triton, bfloat16": (3375, 1740, 140),
    "graphs, bfloat16": (400, 90, 0),
    "graphs, Marian": (655, 178, 0),
    "cuda, float32": (3375, 2120, 155),
    "cuda, bfloat16": (4310, 2190, 191),
}
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


def step_of(model: nn.Module, compute_loss: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = compute_loss()
        loss.backward()
        model.zero_grad()

    return step


def training_step(backend: str, dtype: torch.dtype) -> Callable[[], None]:
    src, trg = torch.randint(1, 100, (2, 8)), torch.randint(1, 100, (2, 9))
    src[0, 5:], trg[0, 7:] = 0, 0
    model = FusedTransformer(100, 100, 0, 0, n_layers=6, backend=backend, pack_padding=False, **SIZES)
    return step_of(model, lambda: model.loss(src, trg[:, :-1], trg[:, 1:], 0.1), dtype)


def decoded_token() -> tuple[float, ...]:
    """Between 16 and 32 tokens. So narrow, that no processor prepacks weights."""
    model, src = FusedTransformer(100, 100, 0, 0, n_layers=3, **SIZES).eval(), torch.randint(3, 100, (1, 8))
    few, many = (counts_of(lambda n=n: generate.greedy(model, src, max_len=n, bos_idx=2, eos_idx=-1)) for n in (16, 32))
    return tuple((b - a) / 16 for a, b in zip(few, many, strict=True))


def count_steps(backend: str) -> dict[str, Any]:
    """By name: the training steps by this backend; with aten, which a CPU uses, also a token; with triton graphs."""
    dtypes, launches, taken = {"float32": torch.float32, "bfloat16": torch.bfloat16}, [], list

    def launched() -> int:
        launches.extend(taken())  # since the last question, of cuda
        return len(launches)

    with ExitStack() as stack:
        if backend != "aten":  # there is no CUDA kernel of embeddings
            import precompile

            stack.enter_context(precompile.compiling(90, launches.append))
        if backend == "cuda":
            taken = stack.enter_context(emulator_build.recording())
        found = {f"{backend}, {name}": counts_of(training_step(backend, t), launched) for name, t in dtypes.items()}
        if backend == "aten":
            found["a token, float32"] = decoded_token()
        if backend == "triton":
            import host_time

            stack.enter_context(host_time.without_replays())
            stack.enter_context(use_backend("triton"))
            for name, family in (("bfloat16", "transformer"), ("Marian", "marian")):
                step = step_of(*host_time.models_of(family)["fastattn, graphs"], torch.bfloat16)
                step()  # eager, as the first one of counts_of; the next one captures
                found[f"graphs, {name}"] = counts_of(step, launched)
    return found


@pytest.mark.parametrize("backend", ["aten", *(pytest.param(b, marks=pytest.mark.full) for b in ("triton", "cuda"))])
def test_the_host_has_a_budget(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "aten":
        monkeypatch.undo()  # conftest's, which fills the memory of torch.empty
        found = count_steps(backend)
    else:
        pytest.importorskip("triton"), pytest.importorskip("transformers")
        if backend == "cuda" and (reason := emulator_build.unsupported_reason()):
            pytest.skip(reason)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "KINETO_LOG_LEVEL": "99"}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, __file__, backend]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
    for name, counts in found.items():
        assert all(count <= bound for count, bound in zip(counts, BOUNDS[name], strict=True)), f"{name}: {counts}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(count_steps(sys.argv[1])))
