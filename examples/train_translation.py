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
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from command_line import CommandError, exit_status, folder_lock, run_command, writing
from torch import Tensor
from translation.checkpoint import (
    ResumeError,
    candidates,
    load_run,
    restore,
    save_epoch,
    save_model,
    save_run,
)
from translation.dates import date_corpus
from translation.decoding import Score, bleu, exact_match, translate
from translation.parallel import Processes, processes_of_torchrun
from translation.prepare import TrainingText, encode_part, is_prepared, load_prepared, prepare
from translation.settings import Settings, parse_arguments
from translation.text import Pair, Text
from translation.tokens import CharacterTokenizer, Tokenizer
from translation.training import Progress, build_model, build_optimizer, train, validation_loss

import fastattn
from fastattn import FusedTransformer

EXAMPLES_SHOWN = 8


class StopRequest:
    """Within its context a call returns whether Ctrl-C or a termination signal came. A second one ends the program."""

    signal_number = 0

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.signal_number != 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        signal.signal(number, signal.SIG_DFL)
        if os.environ.get("RANK", "0") == "0":  # print() may not be called while it runs
            os.write(2, b"\nstopping after this step; Ctrl-C again ends at once\n")


def date_text(settings: Settings) -> TrainingText:
    """Dates as people write them, and in ISO form, a token for each character."""
    corpus = date_corpus(settings.dates, settings.held_out, writings=2, seed=settings.seed)
    tokenizer = CharacterTokenizer.train(text for pair in corpus.train for text in pair)
    train, val = (encode_part(part, getattr(corpus, part), tokenizer, settings) for part in ("train", "val"))
    return TrainingText(tokenizer, train, val, corpus.val, corpus.tests, train.fingerprint())


def user_text(settings: Settings, processes: Processes) -> TrainingText:
    """The text in --data. What is not prepared is prepared in --out, by one process of each machine."""
    folder = Path(settings.data)
    if not is_prepared(folder):
        text = Text(folder, settings.source, settings.target, settings.lowercase)
        folder = Path(settings.out) / "prepared"
        processes.in_first(lambda: prepare(text, settings, folder), each_machine=True)
    return load_prepared(folder)


def score(
    model: FusedTransformer, tokenizer: Tokenizer, sets: dict[str, list[Pair]], settings: Settings, processes: Processes
) -> list[Score]:
    """Translates every set: BLEU for text, exact match for dates. Every process translates its share."""
    scores = []
    for name, pairs in sets.items():
        started = time.perf_counter()
        sources = processes.share([source for source, _ in pairs])
        found = processes.together(translate(model, tokenizer, sources, settings))
        rate = sum(len(best.ids) + 1 for best, *_ in found) / (time.perf_counter() - started)
        translations = [best.text for best, *_ in found]
        if settings.data:
            metric, (value, signature) = "BLEU", bleu(pairs, translations, settings.lowercase)
        else:
            metric, value, signature = "exact match", exact_match(pairs, translations), None
        scores.append(Score(name, metric, value, signature, pairs, translations, rate))
    return scores


def described(values: dict[str, float]) -> str:
    """What was reached on the validation set, as in "validation 0.0312  exact match 98.40"."""
    metrics = (f"  {name.replace('_', ' ')} {values[name]:.2f}" for name in ("exact_match", "bleu") if name in values)
    return f"validation {values['val_loss']:.4f}" + "".join(metrics)


def tensorboard_writer(out: Path, step: int) -> Any:
    """A SummaryWriter that continues after `step`: TensorBoard drops what an interrupted run wrote of later steps."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CommandError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    with writing(out / "tensorboard"):
        return SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)


def show(scores: Sequence[Score], out: Path) -> None:
    """Prints every score and some translations; writes all translations to `out`."""
    for result in scores:
        print(f"{result.test}: {result.metric} {result.value:.2f} on {len(result.pairs)} sentences", end="")
        print(f", decoded at {result.tokens_per_second:,.0f} tokens/s", end="")
        print(f"  ({result.signature})" if result.signature else "")
        lines = "".join(translation.replace("\n", " ") + "\n" for translation in result.translations)
        path = out / f"{result.test}.translations"
        with writing(path):
            path.write_text(lines, encoding="utf-8")
    for (source, target), translation in zip(scores[0].pairs[:EXAMPLES_SHOWN], scores[0].translations, strict=False):
        print(f"  {source}\n    -> {translation}" + ("" if translation == target else f"\n    not {target}"))


def write_record(
    path: Path, settings: Settings, progress: Progress, scores: Sequence[Score], facts: dict[str, Any]
) -> None:
    """Writes the settings, losses and scores of the run as JSON. facts: further entries."""
    cuda = torch.device(settings.device).type == "cuda"
    record = {
        "settings": dataclasses.asdict(settings),
        "device": torch.cuda.get_device_name(settings.device) if cuda else f"{torch.get_num_threads()} CPU threads",
        "versions": {"fastattn": fastattn.__version__, "torch": torch.__version__},
        **facts,
        "steps": progress.step,
        "epochs": progress.epochs,
        "scores": [
            {name: value for name, value in vars(score).items() if name not in ("pairs", "translations")}
            | {"sentences": len(score.pairs)}
            for score in scores
        ],
    }
    with writing(path):
        path.write_text(json.dumps(record, indent=1) + "\n")


def run(settings: Settings, resume: bool, processes: Processes, until_the_end: contextlib.ExitStack) -> int:
    """Trains, scores and writes everything to `settings.out`, which is locked `until_the_end`. Returns the exit
    status."""
    out = Path(settings.out)
    state_path = out / "last.pt"
    if state_path.is_file() and not resume:
        raise ResumeError(f"{out}: holds a run already; continue it with --resume, or choose another --out")
    saved = load_run(state_path, settings) if resume else None
    processes.in_first(lambda: until_the_end.enter_context(folder_lock(out)))
    text = user_text(settings, processes) if settings.data else date_text(settings)
    tokenizer, data = text.tokenizer, text.fingerprint

    model = build_model(settings, tokenizer.size)
    plain = copy.deepcopy(model) if settings.parallel == "fsdp2" and processes.size > 1 else model
    call = processes.wrap(model, settings.parallel)
    optimizer = build_optimizer(model)
    processes.seed(settings.seed)
    progress = restore(state_path, saved, model, optimizer, settings, data, processes) if saved else Progress()
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    print(f"{len(text.train)} training pairs, vocabulary {tokenizer.size}, {parameters / 1e6:.2f} million parameters")
    if saved:
        print(f"resumed after step {progress.step}, in epoch {progress.epoch + 1}")

    board = None
    if settings.tensorboard:
        board = processes.in_first(lambda: until_the_end.enter_context(tensorboard_writer(out, progress.step)))

    def log(values: dict[str, float]) -> None:
        for name, value in values.items() if board else ():
            board.add_scalar(name, value, progress.step)

    def save() -> None:
        save_run(state_path, model, optimizer, progress, settings, tokenizer, data, processes)
        if board:
            board.flush()

    def validate(weights: dict[str, Tensor]) -> dict[str, float]:
        """Loads the weights into `plain`; returns their values on the validation set."""
        plain.load_state_dict(weights)
        values = {"val_loss": validation_loss(plain, text.val, settings, processes)}
        if not settings.data or settings.keep_best == "bleu":
            (found,) = score(plain, tokenizer, {"val": text.val_pairs}, settings, processes)
            values["bleu" if settings.data else "exact_match"] = found.value
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
    with StopRequest() as stop, watching as watch:

        def stopped() -> bool:
            return processes.any(stop())

        train(call, optimizer, text.train, settings, progress, end_epoch, save, stopped, processes, log)
        interrupted = stopped()
    if watch:
        print(watch)
    if interrupted:
        if processes.is_first:
            print(f"interrupted after step {progress.step}; --resume continues there", file=sys.stderr)
        return 128 + (stop.signal_number or signal.SIGTERM)

    if progress.out_of_patience(settings) and progress.epoch < settings.epochs:
        print(f"stopped early: no epoch was better than epoch {progress.best(settings)['epoch']}")
    weights = candidates(out, processes.whole_weights(model), progress, settings)
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
    facts = {"parameters": parameters, "vocabulary": tokenizer.size}
    facts |= {"val_loss": values[kept]["val_loss"], "candidates": values, "kept": kept}
    write_record(out / "record.json", settings, progress, scores, facts)
    print(f"wrote model.pt, record.json and the translations to {out}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit status 2, with the reason on stderr, where a file or the run cannot be used."""

    def command() -> int:
        settings, resume = parse_arguments(arguments)
        with processes_of_torchrun(settings.device) as (processes, device), contextlib.ExitStack() as until_the_end:
            return run(dataclasses.replace(settings, device=device), resume, processes, until_the_end)

    return exit_status(command)


if __name__ == "__main__":
    run_command(main)
