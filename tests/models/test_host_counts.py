"""What the host does in a training step and in a decoding step, counted. Counts are equal on every machine.

Operators are PyTorch's, those that operators call included. Python calls are those of functions, in fastattn's files
and in all. Launches are those of fastattn's kernels. A step of 6 + 6 layers calls 63 ops: the bound of fastattn's calls
is less than 63 above what was found, so one more question in each op fails. With graphs=True a step calls the graphs
and what is around them; replays are left out, as launches are (tools/host_time.py, which measures the time).

As a program, with the names of backends, it prints what it finds. It runs in a separate process: there Triton compiles
for a GPU (tools/precompile.py), and the memory that tests fill in torch.empty is not counted.
"""

import gc
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import emulator_build
import pytest
import torch

from fastattn import FusedTransformer, accelerate, generate, use_backend


class Counts(NamedTuple):
    operators: int
    own_calls: int  # in fastattn's files
    calls: int  # the only count that depends on PyTorch's version, by some 3 %
    launches: int = 0


# What may be needed. Of a training step, and of one more token for one sentence, greedily, by 3 + 3 layers.
BOUNDS = {
    "aten, float32": Counts(6760, 3020, 7000),
    "aten, bfloat16": Counts(8110, 3420, 7800),
    "triton, float32": Counts(2565, 1700, 7000, 140),
    "triton, bfloat16": Counts(3375, 1740, 7155, 140),
    "cuda, float32": Counts(3375, 2120, 6190, 155),
    "cuda, bfloat16": Counts(4310, 2190, 6390, 191),
    "graphs, float32": Counts(400, 89, 3400),
    "graphs, bfloat16": Counts(400, 90, 3400),
    "graphs, Marian": Counts(655, 178, 4400),
    "a token, float32": Counts(389, 77, 112),
    "a layer of BART": Counts(165, 53, 160),
}

SIZES = dict(d_word_vec=64, d_model=64, d_inner=128, n_head=4, d_k=16, d_v=16, n_position=50)
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # no calls from Python 3.12 on


def calls_of(function):
    """(Python calls in fastattn's files, all Python calls)."""
    folders = tuple(f"{Path(find_spec(name).origin).parent}{os.sep}" for name in ("fastattn", "fastattn.kernels"))
    own = every = 0

    def note(frame, event, _):
        nonlocal own, every
        if event == "call" and frame.f_code.co_name not in INLINED:
            every += 1
            own += frame.f_code.co_filename.startswith(folders)

    gc.disable()  # it may call finalizers
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return own, every - 1  # without `function` itself


def operators_of(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        function()
    return sum(bool(re.fullmatch(r"\w+::\w+", event.name())) for event in profiled.profiler.kineto_results.events())


def counts_of(function, launches=lambda: 0):
    """launches: how many there were until now."""
    for _ in range(2):  # the first compiles and fills caches
        function()
    before = launches()
    function()
    count = launches() - before
    return Counts(operators_of(function), *calls_of(function), count)


def training_step(backend, dtype):
    src, trg = torch.randint(1, 100, (2, 8)), torch.randint(1, 100, (2, 9))
    src[0, 5:], trg[0, 7:] = 0, 0
    model = FusedTransformer(100, 100, 0, 0, n_layers=6, backend=backend, pack_padding=False, **SIZES)
    return step_of(model, lambda: model.loss(src, trg[:, :-1], trg[:, 1:], 0.1), dtype)


def step_of(model, compute_loss, dtype):
    def step():
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = compute_loss()
        loss.backward()
        model.zero_grad()

    return step


def count_replays(dtypes, launch_count):
    """By name: steps that replay graphs."""
    import host_time

    with host_time.without_replays(), use_backend("triton"):
        runs = {f"graphs, {name}": ("transformer", dtype) for name, dtype in dtypes.items()}
        runs |= {"graphs, Marian": ("marian", torch.bfloat16)} if find_spec("transformers") else {}
        found = {}
        for name, (family, dtype) in runs.items():
            step = step_of(*host_time.models_of(family)["fastattn, graphs"], dtype)
            step()  # eager, as the first one of counts_of; the next one captures
            found[name] = counts_of(step, launch_count)
    return found


def decoding_token():
    """Between 16 and 32 tokens. So narrow, that no processor prepacks weights."""
    model, src = FusedTransformer(100, 100, 0, 0, n_layers=3, **SIZES).eval(), torch.randint(3, 100, (1, 8))

    def decode(tokens):
        return lambda: generate.greedy(model, src, max_len=tokens, bos_idx=2, eos_idx=-1)

    few, many = (counts_of(decode(tokens)) for tokens in (16, 32))
    return Counts(*((b - a) / 16 for a, b in zip(few, many, strict=True)))


def accelerated_layer():
    """The forward of an encoder layer of BART in training, with padding."""
    import transformers

    sizes = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "encoder_layerdrop": 0.0}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=100, d_model=64, decoder_layers=1, **sizes))
    accelerate(model.train())
    (layer,), given = model.encoder.layers, []
    handle = layer.register_forward_pre_hook(lambda _, args, options: given.append((args, options)), with_kwargs=True)
    model.encoder(torch.randint(3, 100, (4, 40)), torch.arange(40) < torch.tensor([[40], [35], [30], [20]]))
    handle.remove()
    ((args, options),) = given
    return counts_of(lambda: layer(*args, **options))


def count_steps(backend):
    """By name: the training steps by this backend; with aten, which a CPU uses, also a token and a layer."""
    launches, dtypes = [], {"float32": torch.float32, "bfloat16": torch.bfloat16}

    def launch_count():
        launches.extend(taken())
        return len(launches)

    taken = list  # the launches since the last question, of cuda
    with ExitStack() as stack:
        if backend in ("triton", "cuda"):  # there is no CUDA kernel of embeddings
            import precompile

            stack.enter_context(precompile.compiling(90, launches.append))
        if backend == "cuda":
            taken = stack.enter_context(emulator_build.recording())
        found = {
            f"{backend}, {name}": counts_of(training_step(backend, dtype), launch_count)
            for name, dtype in dtypes.items()
        }
        if backend == "triton":
            found |= count_replays(dtypes, launch_count)
    if backend == "aten":
        found["a token, float32"] = decoding_token()
        if find_spec("transformers"):
            found["a layer of BART"] = accelerated_layer()
    return found


def test_the_host_has_a_budget():
    backends = ["aten"]
    if find_spec("triton"):
        backends += ["triton"] if emulator_build.unsupported_reason() else ["triton", "cuda"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "KINETO_LOG_LEVEL": "99"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, *backends]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {name: Counts(*counts) for name, counts in json.loads(done.stdout.splitlines()[-1]).items()}
    wrong = [
        f"{name}: {count} {what}, bound {bound}: " + ("too many" if count > bound else "lower the bound")
        for name, counts in found.items()
        for what, count, bound in zip(Counts._fields, counts, BOUNDS[name], strict=True)
        if not 0.8 * bound <= count <= bound
    ]
    assert not wrong, "\n".join([*wrong, *(f"{name}: {counts}" for name, counts in found.items())])


@pytest.mark.full
def test_the_program_that_measures():
    pytest.importorskip("triton")
    program = Path(__file__).resolve().parents[2] / "tools" / "host_time.py"
    command = [sys.executable, program, "transformer", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    rows = re.findall(r"^  (\D+?) +[\d.]+ +[\d.]+x  \(forward .*zero_grad", done.stdout, re.MULTILINE)
    assert rows == ["plain PyTorch", "fastattn", "fastattn, graphs", "fastattn, graphs, own loss"], done.stderr
    assert "replays" not in done.stdout.splitlines()[-1], "all steps that are measured replay"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps({name: count for backend in sys.argv[1:] for name, count in count_steps(backend).items()}))
