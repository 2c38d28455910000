"""The results of a run: a JSON record and plots."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import writing
from torch import Tensor

import fastattn
from translation.decoding import Score
from translation.measure import Agreement, Speed
from translation.settings import Settings
from translation.training import Progress, learning_rate

POINTS = 400  # of the loss curve, at most
VERSIONS = ("torch", "triton", "numpy", "tokenizers", "sacrebleu")


def device_name(device: str) -> str:
    """The GPU's name, or the processor's and the threads in use."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    processor = found[1] if found else platform.processor() or platform.machine()
    return f"{processor}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "fastattn": fastattn.__version__}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def loss_curve(progress: Progress) -> tuple[list[int], list[float]]:
    """Steps, and the mean training loss since the point before: at most POINTS of them."""
    stride = -(-max(progress.step, 1) // POINTS)
    ends = list(range(stride, progress.step + 1, stride))
    return ends, [sum(progress.losses[end - stride : end]) / stride for end in ends]


def write_record(
    path: Path,
    settings: Settings,
    progress: Progress,
    scores: Sequence[Score],
    speed: Speed | None,
    agreement: Agreement | None,
    facts: dict[str, Any],
) -> None:
    """Everything about the run that a number in a report may come from, as JSON. facts: further entries."""
    steps, losses = loss_curve(progress)
    record = {
        "settings": dataclasses.asdict(settings),
        "device": device_name(settings.device),
        "versions": versions(),
        **facts,
        "steps": progress.step,
        "epochs": progress.epochs,
        "loss_curve": {"step": steps, "loss": losses},
        "scores": [
            {
                "test": s.test,
                "metric": s.metric,
                "value": s.value,
                "signature": s.signature,
                "sentences": len(s.pairs),
                "decoded_tokens_per_second": s.tokens_per_second,
            }
            for s in scores
        ],
        "training_tokens_per_second": dataclasses.asdict(speed) if speed else None,
        "agreement_with_reference": dataclasses.asdict(agreement) if agreement else None,
    }
    with writing(path):
        path.write_text(json.dumps(record, indent=1) + "\n")


def plot(path: Path, settings: Settings, progress: Progress, speed: Speed | None, agreement: Agreement | None) -> None:
    """Loss, learning rate and exact match (where there is one) over the steps, both paths' first losses, and their
    speed, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(17, 3.8), layout="constrained")
    loss_axes, rate_axes, paths_axes, speed_axes = axes

    steps, losses = loss_curve(progress)
    epoch_ends = [entry["step"] for entry in progress.epochs]
    # Else the gap between the two curves looks like an error.
    differs = [name for name in ("label smoothing", "dropout") if getattr(settings, name.replace(" ", "_"))]
    training = "training" + (f" (with {' and '.join(differs)})" if differs else "")
    loss_axes.plot(steps, losses, label=training, color="tab:blue")
    validation = [entry["val_loss"] for entry in progress.epochs]
    without = " (without)" if differs else ""
    loss_axes.plot(epoch_ends, validation, "o-", label=f"validation{without}", color="tab:orange")
    loss_axes.set(title="Loss per target token", xlabel="step", yscale="log")
    loss_axes.legend()

    every = range(1, progress.step + 1)
    rates = [learning_rate(step, settings.d_model, settings.warmup, settings.lr_scale) for step in every]
    rate_axes.plot(every, rates, color="tab:green")
    rate_axes.set(title="Learning rate", xlabel="step")
    if progress.epochs and "exact_match" in progress.epochs[0]:
        rate_axes.set(title="Learning rate (green), exact match in % (red)")
        match_axes = rate_axes.twinx()
        match_axes.plot(epoch_ends, [entry["exact_match"] for entry in progress.epochs], "o-", color="tab:red")
        match_axes.set_ylim(0, 102)

    if agreement:
        compared = range(1, agreement.steps + 1)
        paths_axes.plot(compared, agreement.reference, label="reference", color="tab:gray", linewidth=4, alpha=0.6)
        paths_axes.plot(compared, agreement.fused, label="fused", color="tab:blue", linewidth=1)
        paths_axes.legend()
    paths_axes.set(title="Loss of both paths, dropout off", xlabel="step")

    if speed:
        bars = speed_axes.bar(["fused", "reference"], [speed.fused, speed.reference], color=["tab:blue", "tab:gray"])
        speed_axes.bar_label(bars, fmt="{:,.0f}")
        speed_axes.margins(y=0.12)
    speed_axes.set(title=f"Training tokens per second\n{device_name(settings.device)}")

    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_alignment(path: Path, weights: Tensor, source: Sequence[str], target: Sequence[str]) -> None:
    """The attention weights (target tokens, source tokens) of a translation as a picture, tokens as labels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = (1.5 + 0.28 * len(tokens) for tokens in (source, target))
    figure, axes = pyplot.subplots(figsize=(max(width, 4) + 1, max(height, 3)), layout="constrained")
    image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=90 if max(map(len, source)) > 1 else 0)
    axes.set_yticks(range(len(target)), target)
    axes.set(title="Cross-attention, mean over layers and heads", xlabel="source", ylabel="translation")
    figure.colorbar(image, ax=axes, label="weight")
    with writing(path):
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
