"""Trains a Transformer to translate, with fastattn: `python examples/train_translation.py`.

Without options it generates sentence pairs (dates as people write them, to ISO dates), trains on the GPU or the CPU,
and prints how many new dates it translates correctly. With `--data DIR --source de --target en` it trains on your text.
`--help` lists all options; the training loop is in translation/training.py.

`torchrun --nproc-per-node N examples/train_translation.py` does the same on N GPUs, or in N processes on a CPU.
"""

import contextlib
import copy
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from command_line import CommandError, add_options, command, folder_lock, library, new_parser, run_command, writing
from torch import Tensor
from translation.checkpoint import candidates, load_run, restore, save_epoch, save_model, save_run
from translation.dates import date_corpus
from translation.decoding import bleu, exact_match, translate
from translation.parallel import Processes, processes_of_torchrun
from translation.prepare import TrainingText, encode_part, is_prepared, load_prepared, prepare, prepared_options
from translation.settings import Settings
from translation.text import Pair, Text
from translation.tokens import CharacterTokenizer, Tokenizer
from translation.training import Training, build_model, validation_loss

import fastattn
from fastattn import FusedTransformer

EXAMPLES_SHOWN = 8


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    """The settings, and whether to resume. CommandError where --data is a prepared folder that cannot be used."""
    parser = new_parser(__doc__)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out; give the same options again")
    add_options(parser, Settings)
    given = vars(parser.parse_args(arguments))
    resume, data = given.pop("resume"), given.get("data")
    prepared = dataclasses.asdict(prepared_options(Path(data))) if data and is_prepared(Path(data)) else {}
    for name in sorted(prepared.keys() & given.keys()):
        if given[name] != prepared[name]:
            parser.error(f"{data} was prepared with {name}={prepared[name]}; give that option so or not at all")
    defaults = Settings.defaults_with_data() if data is not None else {}
    settings = Settings(**defaults | prepared | given)
    if settings.data == "":
        parser.error("--data is empty: name a folder, or leave --data out to train on dates")
    if settings.keep_best == "bleu" and not settings.data:
        parser.error("--keep-best bleu needs --data: dates have no BLEU")
    if settings.d_model % settings.heads:
        parser.error(f"--heads {settings.heads} does not divide --d-model {settings.d_model}")
    return settings, resume


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The list of Ctrl-C and termination signals that came within the context. A second one ends the program."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        if os.environ.get("RANK", "0") == "0":  # print() may not be called while it runs
            os.write(2, b"\nstopping after this step; Ctrl-C again ends at once\n")

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def date_text(settings: Settings) -> TrainingText:
    """Dates as people write them, and in ISO form, a token for each character."""
    pairs, val_pairs, test = date_corpus(settings.dates, settings.held_out, writings=2, seed=settings.seed)
    tokenizer = CharacterTokenizer.train(text for pair in pairs for text in pair)
    train, val = (encode_part(name, part, tokenizer, settings) for name, part in (("train", pairs), ("val", val_pairs)))
    return TrainingText(tokenizer, train, val, val_pairs, {"held-out": test}, "dates")


def user_text(settings: Settings, processes: Processes) -> TrainingText:
    """The text in --data. What is not prepared is prepared in --out, by the first process."""
    folder = Path(settings.data)
    if not is_prepared(folder):
        text = Text(folder, settings.source, settings.target, settings.lowercase)
        folder = Path(settings.out) / "prepared"
        processes.in_first(lambda: prepare(text, settings, folder))
    return load_prepared(folder)


Scored = tuple[dict[str, Any], list[Pair], list[str]]  # a test set's entry of the record, its pairs and translations


def score(
    model: FusedTransformer, tokenizer: Tokenizer, sets: dict[str, list[Pair]], settings: Settings, processes: Processes
) -> list[Scored]:
    """Translates every set: BLEU for text, exact match for dates. Every process translates its share."""
    scores = []
    for name, pairs in sets.items():
        started = time.perf_counter()
        sources = processes.share([source for source, _ in pairs])
        found = processes.together(translate(model, tokenizer, sources, settings))
        rate = sum(len(best.ids) + 1 for best, *_ in found) / (time.perf_counter() - started)  # with EOS
        translations = [best.text for best, *_ in found]
        if settings.data:
            metric, (value, signature) = "BLEU", bleu(pairs, translations, settings.lowercase)
        else:
            metric, value, signature = "exact match", exact_match(pairs, translations), None
        entry = {"test": name, "metric": metric, "value": value, "signature": signature, "sentences": len(pairs)}
        scores.append((entry | {"tokens_per_second": rate}, pairs, translations))
    return scores


def described(values: dict[str, float]) -> str:
    """What was reached on the validation set, as in "validation 0.0312  exact match 98.40"."""
    metrics = (f"  {name.replace('_', ' ')} {values[name]:.2f}" for name in ("exact_match", "bleu") if name in values)
    return f"validation {values['val_loss']:.4f}" + "".join(metrics)


def show(scores: Sequence[Scored], out: Path) -> None:
    """Prints every score and some translations; writes all translations to `out`."""
    for entry, pairs, translations in scores:
        print(f"{entry['test']}: {entry['metric']} {entry['value']:.2f} on {len(pairs)} sentences", end="")
        print(f", decoded at {entry['tokens_per_second']:,.0f} tokens/s", end="")
        print(f"  ({entry['signature']})" if entry["signature"] else "")
        lines = "".join(translation.replace("\n", " ") + "\n" for translation in translations)
        with writing(out):
            (out / f"{entry['test']}.translations").write_text(lines, encoding="utf-8")
    _, pairs, translations = scores[0]
    for (source, target), translation in zip(pairs[:EXAMPLES_SHOWN], translations, strict=False):
        print(f"  {source}\n    -> {translation}" + ("" if translation == target else f"\n    not {target}"))


def train(settings: Settings, resume: bool, processes: Processes, until_the_end: contextlib.ExitStack) -> int:
    """Trains, scores and writes everything to --out, which is locked `until_the_end`. Returns the exit status."""
    out = Path(settings.out)
    state_path = out / "last.pt"
    if state_path.is_file() and not resume:
        raise CommandError(f"{out}: holds a run already; continue it with --resume, or choose another --out")
    saved = load_run(state_path, settings) if resume else None
    processes.in_first(lambda: until_the_end.enter_context(folder_lock(out)))
    text = user_text(settings, processes) if settings.data else date_text(settings)
    tokenizer = text.tokenizer

    model = build_model(settings, tokenizer.size)
    plain = copy.deepcopy(model) if settings.parallel == "fsdp2" and processes.size > 1 else model
    run = Training(model, settings, processes)
    processes.seed(settings.seed)
    if saved:
        restore(state_path, saved, run, text.fingerprint)
    progress = run.progress
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    print(f"{len(text.train)} training pairs, vocabulary {tokenizer.size}, {parameters / 1e6:.2f} million parameters")
    if saved:
        print(f"resumed after step {progress.step}, in epoch {progress.epoch + 1}")

    def tensorboard_writer() -> Any:
        writer = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        with writing(out):  # what an interrupted run wrote of later steps is dropped
            return until_the_end.enter_context(writer(str(out / "tensorboard"), purge_step=progress.step + 1))

    board = processes.in_first(tensorboard_writer) if settings.tensorboard else None

    def log(values: dict[str, float]) -> None:
        for name, value in values.items() if board else ():
            board.add_scalar(name, value, progress.step)

    def save() -> None:
        save_run(state_path, run, tokenizer, text.fingerprint)
        if board:
            board.flush()

    def validate(weights: dict[str, Tensor]) -> dict[str, float]:
        """Loads the weights into `plain`; returns their values on the validation set."""
        plain.load_state_dict(weights)
        values = {"val_loss": validation_loss(plain, text.val, settings, processes)}
        if not settings.data or settings.keep_best == "bleu":
            ((entry, *_),) = score(plain, tokenizer, {"val": text.val_pairs}, settings, processes)
            values["bleu" if settings.data else "exact_match"] = entry["value"]
        return values

    def end_epoch(entry: dict[str, float]) -> None:
        weights = processes.whole_weights(model)
        entry.update(validate(weights))
        print(f"epoch {entry['epoch']:3d}  loss {entry['train_loss']:.4f}  {described(entry)}", end="")
        print(f"  {entry['tokens_per_second']:,.0f} tokens/s  {entry['seconds']:.0f} s", flush=True)
        log({name: value for name, value in entry.items() if name not in ("epoch", "step")})
        processes.in_first(lambda: save_epoch(out, weights, progress.epoch, settings.average))
        if progress.best(settings) is entry:
            processes.in_first(lambda: save_model(out / "best.pt", plain, settings, tokenizer))

    watching = fastattn.shadow(model, settings.shadow) if settings.shadow else contextlib.nullcontext()
    with stop_signals() as received, watching as watch:
        run.train(text.train, end_epoch, save, lambda: processes.any(bool(received)), log)
        interrupted = processes.any(bool(received))
    if watch:
        print(watch)
    if interrupted:
        if processes.is_first:
            print(f"interrupted after step {progress.step}; --resume continues there", file=sys.stderr)
        return 128 + (received or [signal.SIGTERM])[0]
    if progress.out_of_patience(settings) and progress.epoch < settings.epochs:
        print(f"stopped early: no epoch was better than epoch {progress.best(settings)['epoch']}")

    weights = candidates(out, processes.whole_weights(model), run)
    # The ends of epochs have been validated already.
    known = {"best": progress.best(settings), "last": None if progress.position else progress.epochs[-1]}
    values = {name: known.get(name) or validate(state) for name, state in weights.items()}
    # Of equals the first: the mean was not chosen on the validation set, so its value there is not by chance.
    kept = min(values, key=lambda name: settings.cost(values[name]))
    plain.load_state_dict(weights[kept])
    scores = score(plain, tokenizer, text.tests or {"val": text.val_pairs}, settings, processes)
    if not processes.is_first:
        return 0
    for name, candidate in {"mean": "mean", "model": kept}.items():
        if candidate in weights:
            plain.load_state_dict(weights[candidate])
            save_model(out / f"{name}.pt", plain, settings, tokenizer)
    reached = ";  ".join(f"{name}: {described(found)}" for name, found in values.items())
    print(f"\n{reached};  model.pt is the {kept}")
    show(scores, out)
    on_gpu = torch.device(settings.device).type == "cuda"
    record = {
        "settings": dataclasses.asdict(settings),
        "device": torch.cuda.get_device_name(settings.device) if on_gpu else f"{torch.get_num_threads()} CPU threads",
        "versions": {"fastattn": fastattn.__version__, "torch": torch.__version__},
        "parameters": parameters,
        "vocabulary": tokenizer.size,
        "val_loss": values[kept]["val_loss"],
        "candidates": values,
        "kept": kept,
        "steps": progress.step,
        "epochs": progress.epochs,
        "scores": [entry for entry, *_ in scores],
    }
    with writing(out / "record.json"):
        (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote model.pt, record.json and the translations to {out}")
    return 0


def run(arguments: tuple[Settings, bool]) -> int:
    settings, resume = arguments
    with processes_of_torchrun(settings.device) as (processes, device), contextlib.ExitStack() as until_the_end:
        return train(dataclasses.replace(settings, device=device), resume, processes, until_the_end)


main = command(parse_arguments, run)

if __name__ == "__main__":
    run_command(main)
