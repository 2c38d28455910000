"""Made-up videos and their captions: a coloured shape that does one thing and then another.

"a red square moves slowly left then stands still"

A caption is determined by its video. Each frame has image features, which mix colour, shape and place, and motion
features, which mix the two velocities; both with noise. The number of frames and the end of the first motion vary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from command_line import copy_to
from torch import Tensor

COLOURS = ("red", "green", "blue", "orange", "purple", "gray")
SHAPES = ("square", "circle", "triangle", "star", "cross")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, 1.0), "down": (0.0, -1.0)}
SPEEDS = {"slowly": 0.4, "quickly": 1.0}
STILL = "stands still"
MOTIONS = {f"moves {speed} {way}": (v * x, v * y) for speed, v in SPEEDS.items() for way, (x, y) in DIRECTIONS.items()}
MOTIONS[STILL] = (0.0, 0.0)

PAD, ENDS = "<PAD>", "<S>"  # the names that ABDTransformer needs
IMAGE_WIDTH, MOTION_WIDTH = 24, 12
SHORTEST, LONGEST = 10, 20  # frames
NOISE = 0.2


class Vocabulary:
    """The words of all captions, with the attributes that ABDTransformer reads."""

    def __init__(self, words: list[str] | None = None) -> None:
        if words is None:
            texts = ("a then", *COLOURS, *SHAPES, *MOTIONS)
            words = [PAD, ENDS, *sorted({word for text in texts for word in text.split()})]
        self.words, self.n_vocabs = words, len(words)
        self.word2idx = {word: i for i, word in enumerate(words)}
        self.idx2word = dict(enumerate(words))


@dataclass(frozen=True)
class Scenes:
    """n videos. image (n, LONGEST, IMAGE_WIDTH), motion (n, LONGEST, MOTION_WIDTH): 0 after a video's last frame."""

    image: Tensor
    motion: Tensor
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)

    def features(self, rows: Tensor, device: str) -> tuple[Tensor, Tensor]:
        """Image and motion features of some videos."""
        return copy_to(device, self.image[rows]), copy_to(device, self.motion[rows])

    def tokens(self, rows: Tensor, vocabulary: Vocabulary, device: str, backwards: bool = False) -> Tensor:
        """Their captions as int64 (len(rows), length): '<S>', the words, '<S>', padding."""
        ids = []
        for row in rows.tolist():
            words = self.captions[row].split()
            words = [ENDS, *(reversed(words) if backwards else words), ENDS]
            ids.append(torch.tensor([vocabulary.word2idx[word] for word in words]))
        pad = vocabulary.word2idx[PAD]
        return copy_to(device, torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad))


def make_scenes(number: int, seed: int) -> Scenes:
    """Scenes that depend only on the seed. Features are mixed in the same way for all seeds."""
    mixing = torch.Generator().manual_seed(0)
    mix_image = torch.randn(len(COLOURS) + len(SHAPES) + 2, IMAGE_WIDTH, generator=mixing)
    mix_motion = torch.randn(3, MOTION_WIDTH, generator=mixing)
    generator = torch.Generator().manual_seed(seed)

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    image, motion = torch.zeros(number, LONGEST, IMAGE_WIDTH), torch.zeros(number, LONGEST, MOTION_WIDTH)
    names, captions = list(MOTIONS), []
    for row in range(number):
        colour, shape, first = draw(len(COLOURS)), draw(len(SHAPES)), draw(len(names))
        second = (first + 1 + draw(len(names) - 1)) % len(names)  # differs from the first
        frames = SHORTEST + draw(LONGEST - SHORTEST + 1)
        change = 4 + draw(frames - 7)  # both motions have at least four frames
        velocity = torch.tensor([MOTIONS[names[first if frame < change else second]] for frame in range(frames)])
        places = torch.randn(2, generator=generator) + velocity.cumsum(0) / 5
        looks = torch.zeros(len(COLOURS) + len(SHAPES))
        looks[[colour, len(COLOURS) + shape]] = 1
        image[row, :frames] = torch.cat([looks.expand(frames, -1), places], 1) @ mix_image
        # The constant keeps the speed: the model normalises the features of a frame, whatever their size.
        motion[row, :frames] = torch.nn.functional.pad(velocity, (0, 1), value=1.0) @ mix_motion
        for features in (image, motion):
            features[row, :frames] += NOISE * torch.randn(frames, features.shape[2], generator=generator)
        captions.append(f"a {COLOURS[colour]} {SHAPES[shape]} {names[first]} then {names[second]}")
    return Scenes(image, motion, captions)
