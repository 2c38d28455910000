"""One whole training step of the encoder-decoder: by each backend, and by the plain PyTorch that a user would replace.

    python benchmarks/bench_transformer.py [--device cuda] [--out FILE.json] [--quick]

The plain model is the public architecture in tests/models/plain_transformer.py, with the same weights. Forward, loss,
backward and Adam; bfloat16 cases are float32 parameters under torch.autocast. Logits and gradients are compared
without dropout, speed is measured with it. tokens/s counts real target tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import STEP, StepCase
from harness import Inputs, Provider, Refused, Run
from torch import nn

from fastattn import use_backend
from fastattn.models import FusedTransformer

PAD = 0
Build = Callable[[StepCase, float], nn.Module]


def make_inputs(case: StepCase, device: torch.device) -> Inputs:
    """leaves: the weights all models start from; fixed: src_seq (batch, length), trg_seq (batch, length + 1)."""
    torch.manual_seed(harness.SEED)
    model = fused(case, 0.0).to(device)
    generator = torch.Generator().manual_seed(harness.SEED)

    def draw(length: int, lengths: torch.Tensor) -> torch.Tensor:
        words = torch.randint(1, case.n_vocab, (case.batch, length), generator=generator)
        return words.where(torch.arange(length) < lengths[:, None], PAD).to(device)

    src_lengths, trg_lengths = case.lengths
    fixed = {"src_seq": draw(case.length, src_lengths), "trg_seq": draw(case.length + 1, trg_lengths + 1)}
    return Inputs(dict(model.state_dict()), fixed)


def _arguments(case: StepCase, dropout_p: float) -> dict[str, Any]:
    width = case.d_model // case.n_head
    return {
        "n_src_vocab": case.n_vocab, "n_trg_vocab": case.n_vocab, "src_pad_idx": PAD, "trg_pad_idx": PAD,
        "d_word_vec": case.d_model, "d_model": case.d_model, "d_inner": case.d_inner, "n_layers": case.n_layers,
        "n_head": case.n_head, "d_k": width, "d_v": width, "n_position": case.length,
        "dropout": dropout_p, "attn_dropout": dropout_p,
    }  # fmt: skip


def fused(case: StepCase, dropout_p: float) -> nn.Module:
    return FusedTransformer(**_arguments(case, dropout_p))


def plain(case: StepCase, dropout_p: float) -> nn.Module:
    folder = Path(__file__).resolve().parents[1] / "tests" / "models"
    if not folder.exists():
        raise Refused("tests/models is not here")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    from plain_transformer import PlainTransformer

    return PlainTransformer(**_arguments(case, dropout_p))


def step_of(build: Build, case: StepCase, inputs: Inputs, dropout_p: float, backend: str | None) -> Run:
    """The Run of one model. A context chooses the backend: it reaches every op of the model."""
    weights, src_seq, trg_seq = inputs.leaves, inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    dtype = next(iter(weights.values())).dtype
    model = build(case, dropout_p).to(src_seq.device, dtype)
    model.load_state_dict(weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    gold = trg_seq[:, 1:].flatten()
    mixed = case.dtype == torch.bfloat16 and dtype == torch.float32

    def forward() -> torch.Tensor:
        autocast = torch.autocast(src_seq.device.type, case.dtype) if mixed else nullcontext()
        with use_backend(backend), autocast:
            return model(src_seq, trg_seq[:, :-1])

    def backward(logits: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(logits, gold, ignore_index=PAD, label_smoothing=0.1).backward()

    def step() -> None:
        backward(forward())
        optimizer.step()

    def results() -> dict[str, torch.Tensor]:
        logits = forward()
        backward(logits)
        return {"logits": logits, "gradients": torch.cat([p.grad.flatten() for p in model.parameters()])}

    return Run(results, {"step": step})


def provider(name: str, build: Build = fused, backend: str | None = None, ours: bool = True) -> Provider:
    def make(case: StepCase, inputs: Inputs, dropout_p: float) -> Run:
        return step_of(build, case, inputs, dropout_p, backend)

    return Provider(name, make, ours)


def providers(device: torch.device) -> list[Provider]:
    fast = ["aten", "triton"] if device.type == "cuda" else ["aten"]
    return [
        provider("reference", backend="reference"),
        *(provider(backend, backend=backend) for backend in fast),
        provider("default"),
        provider("plain PyTorch", plain, ours=False),
    ]


BENCHMARK = harness.Benchmark(
    name="transformer",
    cases=STEP,
    directions=("step",),
    rates=("token", "flop"),
    inputs=make_inputs,
    providers=providers,
)


def test_transformer(benchmark: Any, timed: Any) -> None:
    benchmark(timed)


if __name__ == "__main__":
    sys.exit(harness.main(BENCHMARK))
