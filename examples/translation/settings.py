"""The options of the commands, as one frozen object that is written into every checkpoint and record."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from command_line import flag, number, option, positive, seed_number, usable_device

GRAPH_STEP = 8  # with --graph, the model pads a batch to multiples of this many tokens: each shape needs its own graphs

share = number(float, "at least 0 and below 1", lambda value: 0 <= value < 1)
rate_scale = number(float, "above 0 and at most 100", lambda value: 0 < value <= 100)  # above, no model learns
ratio = number(float, "at least 1", lambda value: value >= 1)
two_or_more = number(int, "at least 2", lambda value: value >= 2)
not_negative = number(int, "at least 0", lambda value: value >= 0)


@dataclass(frozen=True)
class TextSettings:
    """The options that decide what the text becomes."""

    source: str = option("language to translate from", str, "de")
    target: str = option("language to translate to", str, "en")
    vocabulary: int = option("size of the joint BPE", positive, 10000)
    max_length: int = option("longest sentence, in tokens, its end included", two_or_more, 64, 200)
    max_ratio: float = option("leave out pairs with a side this many times as long as the other, in tokens", ratio, 9.0)
    keep_duplicates: bool = option("keep pairs that occur several times", bool, False)
    lowercase: bool = option("read text in lower case, and score it so", bool, False)

    @classmethod
    def defaults_with_data(cls) -> dict[str, Any]:
        """The defaults that differ with --data."""
        found = {field.name: field.metadata["with_data"] for field in dataclasses.fields(cls)}
        return {name: default for name, default in found.items() if default is not None}


GPU = torch.cuda.is_available()
# A resumed run may use other values of these, because the earlier steps do not depend on them.
MAY_CHANGE = (
    "data out epochs steps average patience beam save_every tensorboard device shadow parallel workers accumulate"
).split()


@dataclass(frozen=True)
class Settings(TextSettings):
    """Every option. The defaults are a small model that learns dates within minutes on a CPU, and with --data the base
    model of "Attention Is All You Need"."""

    data: str | None = option("folder of train*, val* and test* text, or what prepare_text.py made of it", str, None)
    out: str = option("folder where everything is written", str, "runs/dates", "runs/text")
    dates: int = option("dates to train on", positive, 12000)
    held_out: int = option("dates to validate on, and as many to score", positive, 1000)

    layers: int = option("encoder layers, and as many decoder layers", positive, 2, 6)
    d_model: int = option("width of the model", positive, 96, 512)
    d_inner: int = option("width inside the feed-forward", positive, 192, 2048)
    heads: int = option("attention heads; must divide --d-model", positive, 4, 8)
    dropout: float = option("dropout everywhere", share, 0.0, 0.1)

    epochs: int = option("passes over the training text", positive, 6, 20)
    steps: int | None = option("stop after this many steps, even within an epoch", positive, None)
    batch_tokens: int = option("padded source, or target, tokens in a batch", positive, 1024, 8192)
    warmup: int = option("steps until the learning rate peaks", positive, 400, 4000)
    lr_scale: float = option("multiplies the learning rate of the paper; there is no --lr", rate_scale, 0.5, 1.0)
    label_smoothing: float = option("probability spread over all words", share, 0.0, 0.1)
    average: int = option("average the weights of this many last epochs", positive, 3, 5)
    keep_best: str = option("what decides between weights: validation loss or BLEU", ("loss", "bleu"), "loss")
    patience: int | None = option("stop after this many epochs without a better one", positive, None)
    beam: int = option("hypotheses kept while translating; 1 is greedy", positive, 1)
    seed: int = option("of weights, order and dropout", seed_number, 1)
    save_every: int = option("steps between saves", positive, 500)
    tensorboard: bool = option("write logs for TensorBoard, to tensorboard in --out", bool, False)

    device: str = option("cpu, cuda or cuda:N; cuda is one for each process", usable_device, "cuda" if GPU else "cpu")
    amp: bool = option("mixed precision: bfloat16 under torch.autocast", bool, False)
    graph: bool = option(f"CUDA graphs, with batches for lengths in multiples of {GRAPH_STEP} tokens", bool, False)
    shadow: int | None = option("compare the ops of every N-th step with the reference", positive, None)
    parallel: str = option("of the weights in each process: ddp all, fsdp2 a part", ("ddp", "fsdp2"), "ddp")
    workers: int = option("processes that build batches ahead", not_negative, 2 if GPU else 0)
    accumulate: int = option("parts of a batch, computed in turn, to need less memory", positive, 1)

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
            if field.name not in MAY_CHANGE and earlier.get(field.name) != getattr(self, field.name)
        ]
