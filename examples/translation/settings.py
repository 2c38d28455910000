"""The options of the training command, in one frozen object that is written into every checkpoint and record."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from command_line import at_least, positive, seed_number, usable_device

from translation.options import TextSettings, add_options, flag, option, rate_scale, share
from translation.prepare import is_prepared, prepared_options

GRAPH_STEP = 8  # with --graph, the model pads a batch to multiples of this many tokens: each shape needs its own graphs


@dataclass(frozen=True)
class Settings(TextSettings):
    """Every option. The defaults are a small model that learns dates within minutes on a CPU, and with --data the base
    model of "Attention Is All You Need"."""

    data: str | None = option(
        "folder of train*, val* and test* files (.LANG, .LANG-LANG.tsv, .jsonl, .parquet; .gz, .zst), or what "
        "prepare_text.py made of it",
        may_change=True,
    )
    out: str = option("folder where everything is written", str, "runs/dates", "runs/text", may_change=True)
    dates: int = option("dates to train on", positive, 12000)
    held_out: int = option("dates to validate on, and as many to score", positive, 1000)

    layers: int = option("encoder layers, and as many decoder layers", positive, 2, 6)
    d_model: int = option("width of the model", positive, 96, 512)
    d_inner: int = option("width inside the feed-forward", positive, 192, 2048)
    heads: int = option("attention heads; must divide --d-model", positive, 4, 8)
    dropout: float = option("dropout everywhere", share, 0.0, 0.1)

    epochs: int = option("passes over the training text", positive, 6, 20, may_change=True)
    steps: int | None = option("stop after this many steps, even within an epoch", positive, may_change=True)
    batch_tokens: int = option("padded source, or target, tokens in a batch", positive, 1024, 8192)
    warmup: int = option("steps until the learning rate peaks", positive, 400, 4000)
    lr_scale: float = option("multiplies the learning rate of the paper; there is no --lr", rate_scale, 0.5, 1.0)
    label_smoothing: float = option("probability spread over all words", share, 0.0, 0.1)
    average: int = option("average the weights of this many last epochs", positive, 3, 5, may_change=True)
    keep_best: str = option(
        "what decides between weights: validation loss or BLEU", default="loss", choices=("loss", "bleu")
    )
    patience: int | None = option("stop after this many epochs without a better one", positive, may_change=True)
    beam: int = option("hypotheses kept while translating; 1 is greedy", positive, 1, may_change=True)
    seed: int = option("of weights, order and dropout", seed_number, 1)
    save_every: int = option("steps between saves", positive, 500, may_change=True)
    tensorboard: bool = option("write logs for TensorBoard, to tensorboard in --out", bool, False, may_change=True)

    device: str = option(
        "cpu, cuda or cuda:N; under torchrun cuda means one GPU for each process",
        usable_device,
        "cuda" if torch.cuda.is_available() else "cpu",
        may_change=True,
    )
    amp: bool = option("mixed precision: bfloat16 under torch.autocast", bool, False)
    graph: bool = option(
        f"forward and backward as CUDA graphs, with batches planned for lengths in multiples of {GRAPH_STEP} tokens",
        bool,
        False,
    )
    shadow: int | None = option(
        "compare the ops of every N-th step with the reference path, and warn where they differ",
        positive,
        may_change=True,
    )
    parallel: str = option(
        "under torchrun: ddp, the whole model in every process, or fsdp2, a part of it in each",
        default="ddp",
        choices=("ddp", "fsdp2"),
        may_change=True,
    )
    workers: int = option(
        "processes that build batches ahead", at_least(0), 2 if torch.cuda.is_available() else 0, may_change=True
    )
    accumulate: int = option(
        "parts of a batch whose gradients are added up, to need less memory", positive, 1, may_change=True
    )

    @property
    def length_step(self) -> int:
        """The lengths that batches are planned for are multiples of it."""
        return GRAPH_STEP if self.graph else 1

    def cost(self, values: dict[str, float]) -> float:
        """The best weights have the least: the validation loss, or by --keep-best the negative BLEU."""
        return -values["bleu"] if self.keep_best == "bleu" else values["val_loss"]

    def conflicts_with(self, earlier: dict[str, object]) -> list[str]:
        """The options that differ from an earlier run's and must not: ["--d-model was 128, is 256"]."""
        return [
            f"{flag(field.name)} was {earlier.get(field.name)}, is {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if not field.metadata["may_change"] and earlier.get(field.name) != getattr(self, field.name)
        ]


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    """The settings, and whether to resume. CommandError where --data is a prepared folder that cannot be used."""
    parser = argparse.ArgumentParser(
        description="Trains fastattn.FusedTransformer to translate. Without --data it generates its own task: dates as "
        "people write them, to ISO dates. With --data it reads train, val and test* files of two languages, line N of "
        "one translating line N of the other, or a folder that prepare_text.py wrote.",
        allow_abbrev=False,
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out; give the same options again")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--data")
    data = first.parse_known_args(arguments)[0].data
    add_options(parser, Settings, data is not None)
    text = dataclasses.asdict(prepared_options(Path(data))) if data and is_prepared(Path(data)) else {}
    parser.set_defaults(**text)
    options = vars(parser.parse_args(arguments))
    resume = options.pop("resume")
    settings = Settings(**options)
    for name, value in text.items():
        if options[name] != value:
            parser.error(f"{data} was prepared with {flag(name)} {value}; give that or nothing, got {options[name]}")
    if settings.data == "":
        parser.error("--data is empty: name a folder, or leave --data out to train on dates")
    if settings.keep_best == "bleu" and not settings.data:
        parser.error("--keep-best bleu needs --data: dates have no BLEU")
    if settings.d_model % settings.heads:
        parser.error(f"--heads {settings.heads} does not divide --d-model {settings.d_model}")
    return settings, resume
