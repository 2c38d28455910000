"""The options of the command, in one frozen object that is written into every checkpoint and record."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BACKENDS = ("reference", "aten", "triton", "cuda")

# What the command uses where nothing is said: a small model that learns dates within minutes on a CPU, and the base
# model of "Attention Is All You Need" for real text.
DATE_DEFAULTS = dict(
    out="runs/dates", layers=2, d_model=96, d_inner=192, heads=4, dropout=0.0, max_length=64,
    epochs=6, batch_tokens=1024, warmup=400, lr_scale=0.5, label_smoothing=0.0, average=3,
)  # fmt: skip
TEXT_DEFAULTS = dict(
    out="runs/text", layers=6, d_model=512, d_inner=2048, heads=8, dropout=0.1, max_length=200,
    epochs=20, batch_tokens=8192, warmup=4000, lr_scale=1.0, label_smoothing=0.1, average=5,
)  # fmt: skip

GRAPH_STEP = 8  # with --graph, batches are padded to multiples of this: a graph serves one length

# A run may be continued with these changed: they do not touch the weights that the steps before produced.
CHANGEABLE = {"out", "data", "epochs", "steps", "average", "save_every", "measure_steps", "compare_steps", "beam"}


@dataclass(frozen=True)
class Settings:
    """Every option; see `parse_arguments` for what each means."""

    data: str | None
    source: str
    target: str
    out: str
    vocabulary: int
    max_length: int
    lowercase: bool
    layers: int
    d_model: int
    d_inner: int
    heads: int
    dropout: float
    attn_dropout: float
    epochs: int
    steps: int | None
    batch_tokens: int
    warmup: int
    lr_scale: float
    label_smoothing: float
    average: int
    beam: int
    dates: int
    held_out: int
    seed: int
    backend: str | None
    amp: bool
    graph: bool
    device: str
    save_every: int
    measure_steps: int
    compare_steps: int

    @property
    def length_step(self) -> int:
        """What a batch's padded length is a multiple of."""
        return GRAPH_STEP if self.graph else 1

    def conflicts_with(self, earlier: dict[str, object]) -> list[str]:
        """The options that must be as they were for a run to continue, and are not: ["--d-model was 128, is 256"]."""
        now = dataclasses.asdict(self)
        return [
            f"--{name.replace('_', '-')} was {earlier.get(name)}, is {value}"
            for name, value in now.items()
            if name not in CHANGEABLE and earlier.get(name) != value
        ]


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    """The settings, and whether to resume."""

    default_device = "cuda" if torch.cuda.is_available() else "cpu"

    def either(name: str) -> str:
        dates, text = DATE_DEFAULTS[name], TEXT_DEFAULTS[name]
        return f"(default {dates})" if dates == text else f"(default {dates} for dates, {text} with --data)"

    parser = argparse.ArgumentParser(
        description="Trains fastattn.FusedTransformer to translate. Without --data it makes its own task: dates as "
        "people write them, to ISO dates. With --data it reads train, val and test* files of two languages, line N of "
        "one translating line N of the other, plain or .gz."
    )
    what = parser.add_argument_group("what")
    what.add_argument("--data", metavar="DIR", help="folder of train.LANG, val.LANG, test*.LANG, each may end in .gz")
    what.add_argument("--source", default="de", metavar="LANG", help="language to translate from (default %(default)s)")
    what.add_argument("--target", default="en", metavar="LANG", help="language to translate to (default %(default)s)")
    what.add_argument("--out", metavar="DIR", help=f"where everything is written {either('out')}")
    what.add_argument("--resume", action="store_true", help="continue the run in --out; give the same options again")
    what.add_argument("--vocabulary", type=positive, default=10000, help="size of the joint BPE (default %(default)s)")
    what.add_argument("--max-length", type=positive, help=f"longest sentence, in tokens {either('max_length')}")
    what.add_argument("--lowercase", action="store_true", help="read text in lower case, and score it so")
    what.add_argument("--dates", type=positive, default=12000, help="dates to train on (default %(default)s)")
    what.add_argument(
        "--held-out", type=positive, default=1000, help="dates to validate on, and to score (default %(default)s each)"
    )

    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive, help=f"encoder layers, and as many decoder layers {either('layers')}")
    model.add_argument("--d-model", type=positive, help=f"width {either('d_model')}")
    model.add_argument("--d-inner", type=positive, help=f"width inside the feed-forward {either('d_inner')}")
    model.add_argument("--heads", type=positive, help=f"attention heads; must divide --d-model {either('heads')}")
    model.add_argument("--dropout", type=share, help=f"dropout everywhere {either('dropout')}")
    model.add_argument("--attn-dropout", type=share, help="dropout of the attention weights (default as --dropout)")

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, help=f"passes over the training text {either('epochs')}")
    training.add_argument("--steps", type=positive, help="stop after this many steps, even within an epoch")
    training.add_argument(
        "--batch-tokens", type=positive, help=f"padded tokens a side of a batch {either('batch_tokens')}"
    )
    training.add_argument("--warmup", type=positive, help=f"steps until the learning rate peaks {either('warmup')}")
    training.add_argument("--lr-scale", type=float, help=f"multiplies the learning rate {either('lr_scale')}")
    training.add_argument("--label-smoothing", type=share, help=f"spread over all words {either('label_smoothing')}")
    training.add_argument(
        "--average", type=positive, help=f"average the weights of this many last epochs {either('average')}"
    )
    training.add_argument(
        "--beam", type=positive, default=1, help="hypotheses kept while translating; 1 is greedy (default %(default)s)"
    )
    training.add_argument("--seed", type=int, default=1, help="weights, order and dropout (default %(default)s)")
    training.add_argument("--save-every", type=positive, default=500, help="steps between saves (default %(default)s)")

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device", type=_device, default=default_device, help="cpu, cuda or cuda:N (default here: %(default)s)"
    )
    machine.add_argument("--backend", choices=BACKENDS, help="for every op (default: the first that can serve it)")
    machine.add_argument("--amp", action="store_true", help="mixed precision: bfloat16 under torch.autocast")
    machine.add_argument(
        "--graph", action="store_true",
        help=f"the training step as CUDA graphs, its batches padded to multiples of {GRAPH_STEP} tokens; on a CPU the "
        "padded batches alone",
    )  # fmt: skip
    machine.add_argument(
        "--measure-steps", type=count, default=10, help="steps timed on either path (default %(default)s)"
    )
    machine.add_argument(
        "--compare-steps", type=count, default=50,
        help="first steps, dropout off, over which both paths' losses are compared; 0 for none (default %(default)s)",
    )  # fmt: skip

    with_data = parser.parse_known_args(arguments)[0].data is not None
    parser.set_defaults(**(TEXT_DEFAULTS if with_data else DATE_DEFAULTS))
    options = vars(parser.parse_args(arguments))
    resume = options.pop("resume")
    if options["attn_dropout"] is None:
        options["attn_dropout"] = options["dropout"]
    settings = Settings(**options)
    if settings.d_model % settings.heads:
        parser.error(f"--heads {settings.heads} does not divide --d-model {settings.d_model}")
    return settings, resume


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {error}") from error
    return text


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {value}")
    return value
