"""The options of the command, in one frozen object that is written into every checkpoint and record."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from command_line import at_least, positive, real_number, seed_number, usable_device

GRAPH_STEP = 8  # with --graph, batches are padded to multiples of this many tokens: each length needs its own graph


def option(
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    with_data: Any = None,
    *,
    choices: Sequence[str] | None = None,
    may_change: bool = False,
) -> Any:
    """A field of Settings and an option of the command.

    with_data: the default with --data, if that differs. may_change: a resumed run may use another value, because the
    earlier steps do not depend on it.
    """
    with_data = default if with_data is None else with_data
    metadata = dict(help=help, type=type, default=default, with_data=with_data, choices=choices, may_change=may_change)
    return dataclasses.field(metadata=metadata)


def share(text: str) -> float:
    value = real_number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {value}")
    return value


def rate_scale(text: str) -> float:
    value = real_number(text)
    if not 0 < value <= 100:  # above, no model learns
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100, got {value}")
    return value


@dataclass(frozen=True)
class Settings:
    """Every option. The defaults are a small model that learns dates within minutes on a CPU, and with --data the base
    model of "Attention Is All You Need"."""

    data: str | None = option("folder of train.LANG, val.LANG, test*.LANG; each may end in .gz", may_change=True)
    source: str = option("language to translate from", default="de")
    target: str = option("language to translate to", default="en")
    out: str = option("folder where everything is written", str, "runs/dates", "runs/text", may_change=True)
    vocabulary: int = option("size of the joint BPE", positive, 10000)
    max_length: int = option("longest sentence, in tokens, its end included", at_least(2), 64, 200)
    lowercase: bool = option("read text in lower case, and score it so", bool, False)
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
    lr_scale: float = option("multiplies the learning rate", rate_scale, 0.5, 1.0)
    label_smoothing: float = option("probability spread over all words", share, 0.0, 0.1)
    average: int = option("average the weights of this many last epochs", positive, 3, 5, may_change=True)
    beam: int = option("hypotheses kept while translating; 1 is greedy", positive, 1, may_change=True)
    seed: int = option("of weights, order and dropout", seed_number, 1)
    save_every: int = option("steps between saves", positive, 500, may_change=True)

    device: str = option(
        "cpu, cuda or cuda:N; under torchrun cuda means one GPU for each process",
        usable_device,
        "cuda" if torch.cuda.is_available() else "cpu",
        may_change=True,
    )
    amp: bool = option("mixed precision: bfloat16 under torch.autocast", bool, False)
    graph: bool = option(
        f"training steps as CUDA graphs, on batches padded to multiples of {GRAPH_STEP} tokens; a CPU only pads",
        bool,
        False,
    )
    parallel: str = option(
        "under torchrun: ddp, the whole model in every process, or fsdp2, a part of it in each",
        default="ddp",
        choices=("ddp", "fsdp2"),
        may_change=True,
    )
    accumulate: int = option(
        "parts of a batch whose gradients are added up, to need less memory", positive, 1, may_change=True
    )

    @property
    def length_step(self) -> int:
        """What a batch's padded length is a multiple of."""
        return GRAPH_STEP if self.graph else 1

    def conflicts_with(self, earlier: dict[str, object]) -> list[str]:
        """The options that differ from an earlier run's and must not: ["--d-model was 128, is 256"]."""
        return [
            f"{flag(field.name)} was {earlier.get(field.name)}, is {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if not field.metadata["may_change"] and earlier.get(field.name) != getattr(self, field.name)
        ]


def flag(name: str) -> str:
    """ "d_model" -> "--d-model"."""
    return "--" + name.replace("_", "-")


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    """The settings, and whether to resume."""
    parser = argparse.ArgumentParser(
        description="Trains fastattn.FusedTransformer to translate. Without --data it generates its own task: dates as "
        "people write them, to ISO dates. With --data it reads train, val and test* files of two languages, line N of "
        "one translating line N of the other, plain or .gz."
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out; give the same options again")
    for field in dataclasses.fields(Settings):
        meta = field.metadata
        if meta["type"] is bool:
            parser.add_argument(flag(field.name), action="store_true", help=meta["help"])
            continue
        default = "" if meta["default"] is None else f" (default {meta['default']})"
        if meta["with_data"] != meta["default"]:
            default = f" (default {meta['default']} for dates, {meta['with_data']} with --data)"
        parser.add_argument(flag(field.name), type=meta["type"], choices=meta["choices"], help=meta["help"] + default)
    with_data = parser.parse_known_args(arguments)[0].data is not None
    which = "with_data" if with_data else "default"
    parser.set_defaults(**{field.name: field.metadata[which] for field in dataclasses.fields(Settings)})
    options = vars(parser.parse_args(arguments))
    resume = options.pop("resume")
    settings = Settings(**options)
    if settings.graph and (settings.accumulate > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        parser.error("--graph needs a whole batch in one process: leave out --accumulate and torchrun")
    if settings.data == "":
        parser.error("--data is empty: name a folder, or leave --data out to train on dates")
    if settings.d_model % settings.heads:
        parser.error(f"--heads {settings.heads} does not divide --d-model {settings.d_model}")
    return settings, resume
