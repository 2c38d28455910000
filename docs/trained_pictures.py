"""The pictures that need a trained model: `python docs/pictures.py --alignment --captioner`.

The models of examples/ learn from what the examples generate, in a minute or two on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from panel import BLUE, EMPTY, INK, MARGIN, MUTED, WIDTH, Picture, shade, squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_captioning
import train_translation
from captioning import scenes
from translate import attention_weights
from translation.checkpoint import load_model
from translation.decoding import encode_source, translate
from translation.tokens import EOS

LEVELS = 12  # shades of an attention weight
QUICK = "--dates 6000 --held-out 100 --epochs 4 --average 1 --batch-tokens 256 --warmup 600"
MARKERS = {"square": "s", "circle": "o", "triangle": "^", "star": "*", "cross": "X"}
FRAMES = 8  # in the strip


def alignment(records: object) -> Picture:
    """What the decoder attended to while it translated a date."""
    with tempfile.TemporaryDirectory() as out:
        if train_translation.main(["--out", out, "--device", "cpu", *QUICK.split()]):
            raise SystemExit("error: the translator was not trained")
        model, tokenizer, settings = load_model(Path(out) / "model.pt")
    pairs = train_translation.date_text(settings).tests["held-out"]
    text = next(source for source, _ in pairs if "day" in source and " of " in source)
    source = encode_source(tokenizer, text, settings.max_length)
    best = translate(model, tokenizer, [text], settings)[0][0]
    weights = attention_weights(model, torch.tensor([source]), best.ids).numpy()
    columns, rows = ([tokenizer.decode([i]) if i != EOS else "end" for i in ids] for ids in (source, [*best.ids, EOS]))
    cell = min(26, (WIDTH - 72 - MARGIN) / len(columns))
    titles = (
        "What the decoder attended to while it wrote a date",
        "Rows: written. Columns: read. Darker: more attention.",
    )
    picture = Picture(166 + cell * len(rows), *titles)
    axes = picture.grid(72, 112, cell * len(columns), cell * len(rows), len(rows), len(columns))
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, color=INK, fontsize=12)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, color=INK, fontsize=12)
    axes.get_xticklabels()[-1].set_fontsize(9)  # "end" is wider than a cell
    levels = np.rint(weights / weights.max() * (LEVELS - 1))
    for level in range(LEVELS):
        squares(axes, np.argwhere(levels == level), shade(level / (LEVELS - 1)))
    picture.source("Model and dates of examples/train_translation.py; mean over layers and heads.")
    return picture


def captioner(records: object) -> Picture:
    """Frames of a made-up video, drawn from its features, and the captions of it by both decoders."""
    with tempfile.TemporaryDirectory() as out:
        options = ["--out", out, "--device", "cpu"]
        if train_captioning.main(options):
            raise SystemExit("error: the captioner was not trained")
        settings = train_captioning.parse_arguments(options)
        model = train_captioning.build_model(settings, scenes.Vocabulary())
        model.load_state_dict(torch.load(Path(out) / "captioner.pt", weights_only=True)["model"])
    model.eval()
    videos = scenes.make_scenes(1, settings.seed + 2)  # neither trained on nor scored
    forwards, backwards = (found[0] for found in train_captioning.describe(model, videos, settings))
    right = videos.captions[0]
    _, colour, shape, *_ = right.split()

    frames = videos.image[0][videos.image[0].any(1)]
    # The features are [colour, shape, place] @ mixing, as scenes.make_scenes drew it.
    known = len(scenes.COLOURS) + len(scenes.SHAPES)
    mixing = torch.randn(known + 2, scenes.IMAGE_WIDTH, generator=torch.Generator().manual_seed(0))
    places = torch.linalg.lstsq(mixing.T, frames.T).solution[known:].T.numpy()
    middle, reach = (places.max(0) + places.min(0)) / 2, np.ptp(places, 0).max() / 2 + 0.4
    subtitle = f"{FRAMES} of its {len(frames)} frames, drawn from the features that the model reads."
    picture = Picture(300, "Captions of a made-up video, by a decoder in each direction", subtitle)
    step = (WIDTH - 2 * MARGIN) / FRAMES
    for number, frame in enumerate(np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)):
        axes = picture.grid(MARGIN + number * step, 78, step - 6, step - 6, 1, 1)
        axes.set(facecolor=EMPTY, xticks=[], yticks=[])
        x, y = (places[frame] - middle) / (2 * reach) + 0.5
        axes.plot(x, 1 - y, MARKERS[shape], color=colour, markersize=13, markeredgewidth=0)
        picture.text(MARGIN + number * step + step / 2 - 3, 78 + step + 12, f"{frame + 1}", color=MUTED, ha="center")
    lines = (("left to right", forwards), ("right to left", backwards), ("true caption", right))
    for number, (name, caption) in enumerate(lines):
        picture.text(MARGIN, 194 + 26 * number, name, color=MUTED)
        picture.text(MARGIN + 110, 194 + 26 * number, caption, color=BLUE if number < 2 else INK)
    picture.source("Model and videos of examples/train_captioning.py.")
    return picture
