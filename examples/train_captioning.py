"""Trains a video captioner with a decoder in each direction, with fastattn: `python examples/train_captioning.py`.

It makes its own videos (captioning/scenes.py), so a caption is right or wrong: the score is the share of new videos
whose whole caption is right. Writes the model and a record to --out. `--help` lists all options.
"""

import dataclasses
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from captioning.scenes import IMAGE_WIDTH, MOTION_WIDTH, PAD, Scenes, Vocabulary, make_scenes
from command_line import (
    add_options,
    command,
    new_parser,
    option,
    positive,
    run_command,
    seed_number,
    usable_device,
    writing,
)
from torch import Tensor
from tqdm import tqdm

from fastattn.models import ABDTransformer, src_trg_mask

LONGEST_CAPTION = 16  # words
SHOWN = 6  # captions on the screen


@dataclass(frozen=True)
class Settings:
    """All options, and the sizes of the model."""

    epochs: int = option("passes over the videos", positive, 16)
    scenes: int = option("videos to train on", positive, 3000)
    held_out: int = option("new videos to score", positive, 300)
    beam: int = option("hypotheses kept while captioning", positive, 3)
    seed: int = option("of weights, videos, order and dropout", seed_number, 1)
    device: str = option("cpu, cuda or cuda:N", usable_device, "cuda" if torch.cuda.is_available() else "cpu")
    out: str = option("folder where everything is written", str, "runs/captions")
    d_model: int = 64
    d_ff: int = 128
    heads: int = 4
    heads_big: int = 8
    layers: int = 2
    dropout: float = 0.1
    batch: int = 64
    learning_rate: float = 2e-3


def build_model(settings: Settings, vocabulary: Vocabulary) -> ABDTransformer:
    """A model of image and motion features. It reads the positions of frames, so it sees the order of motions."""
    torch.manual_seed(settings.seed)
    sizes = (settings.d_model, settings.d_ff, settings.heads, settings.layers, settings.dropout, "two", settings.device)
    options = {"n_heads_big": settings.heads_big, "positions": "sequence"}
    return ABDTransformer(vocabulary, (IMAGE_WIDTH, MOTION_WIDTH), *sizes, **options).to(settings.device)


def loss_of(model: ABDTransformer, scenes: Scenes, rows: Tensor, settings: Settings) -> Tensor:
    """The mean cross-entropy per word of both decoders, without padding."""
    vocabulary, pad = model.vocab, model.vocab.word2idx[PAD]
    src = scenes.features(rows, settings.device)
    r2l, l2r = (scenes.tokens(rows, vocabulary, settings.device, backwards) for backwards in (True, False))
    mask = src_trg_mask(src, r2l[:, :-1], l2r[:, :-1], pad)
    predictions = model(src, r2l[:, :-1], l2r[:, :-1], mask)
    losses = [
        F.nll_loss(log_p.flatten(0, 1), gold[:, 1:].flatten(), ignore_index=pad)
        for log_p, gold in zip(predictions, (r2l, l2r), strict=True)
    ]
    return sum(losses) / 2


def train(model: ABDTransformer, scenes: Scenes, held_out: Scenes, settings: Settings) -> list[dict[str, float]]:
    """Trains with Adam and a learning rate that rises and falls; returns an entry for each epoch."""
    steps = settings.epochs * -(-len(scenes) // settings.batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps)
    order, epochs = list(range(len(scenes))), []
    shuffle = random.Random(settings.seed)
    for epoch in range(1, settings.epochs + 1):
        shuffle.shuffle(order)
        model.train()
        started, losses = time.perf_counter(), []
        batches, title = torch.tensor(order).split(settings.batch), f"epoch {epoch}/{settings.epochs}"
        for rows in tqdm(batches, desc=title, unit="step", leave=False):
            loss = loss_of(model, scenes, rows, settings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        entry = {"epoch": epoch, "train_loss": torch.stack(losses).mean().item()}
        entry["seconds"] = time.perf_counter() - started
        model.eval()
        with torch.no_grad():
            entry["val_loss"] = loss_of(model, held_out, torch.arange(len(held_out)), settings).item()
        captions, _ = describe(model, held_out, settings)
        entry["right"] = share_right(captions, held_out)
        print(f"epoch {epoch:2d}  loss {entry['train_loss']:.4f}  validation {entry['val_loss']:.4f}  ", end="")
        print(f"right {entry['right']:.1f} %  {entry['seconds']:.1f} s", flush=True)
        epochs.append(entry)
    return epochs


def describe(model: ABDTransformer, scenes: Scenes, settings: Settings) -> tuple[list[str], list[str]]:
    """The best caption of each video, by the left-to-right decoder and by the right-to-left one, as text."""
    src = scenes.features(torch.arange(len(scenes)), settings.device)
    r2l, l2r = model.beam_search_decode(src, settings.beam, LONGEST_CAPTION)
    backwards = [" ".join(reversed(best.value)) for best, *_ in r2l]
    return [" ".join(best.value) for best, *_ in l2r], backwards


def share_right(captions: Sequence[str], scenes: Scenes) -> float:
    """In percent, of captions that are right in every word."""
    return 100 * sum(a == b for a, b in zip(captions, scenes.captions, strict=True)) / len(scenes)


def parse_arguments(arguments: Sequence[str] | None) -> Settings:
    parser = new_parser(__doc__)
    add_options(parser, Settings)
    return Settings(**vars(parser.parse_args(arguments)))


def run(settings: Settings) -> None:
    """Trains, scores and writes everything to `settings.out`."""
    out = Path(settings.out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary()
    scenes, held_out = make_scenes(settings.scenes, settings.seed), make_scenes(settings.held_out, settings.seed + 1)
    model = build_model(settings, vocabulary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(scenes)} videos, {vocabulary.n_vocabs} words, {parameters / 1e6:.2f} million parameters")
    epochs = train(model, scenes, held_out, settings)

    started = time.perf_counter()
    captions, backwards = describe(model, held_out, settings)
    seconds = time.perf_counter() - started
    scores = {"left to right": share_right(captions, held_out), "right to left": share_right(backwards, held_out)}
    for direction, score in scores.items():
        print(f"{direction}: {score:.1f} % of {len(held_out)} new videos have a right caption")
    print(f"captioned at {len(held_out) / seconds:,.0f} videos/s")
    for caption, right in zip(captions[:SHOWN], held_out.captions[:SHOWN], strict=True):
        print(f"  {caption}" + ("" if caption == right else f"\n    not {right}"))

    content = {"model": model.state_dict(), "settings": dataclasses.asdict(settings), "words": vocabulary.words}
    record = {"settings": dataclasses.asdict(settings), "epochs": epochs, "right": scores}
    with writing(out), (out / "captioner.pt").open("wb") as file:
        torch.save(content, file)
        (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote captioner.pt and record.json to {out}")


main = command(parse_arguments, run)

if __name__ == "__main__":
    run_command(main)
