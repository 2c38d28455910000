"""Text to token ids and back: one token a character for the dates, a joint byte-pair encoding for real text.

Of both tokenizers `encode` adds no BOS and no EOS, and `decode` skips PAD, BOS and EOS.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]  # at the ids above
KNOWN_WORDS = 200_000  # whose ids are kept, some 50 MB
# Space that is not one blank between two words: such a text is not cut into words.
OTHER_SPACE = re.compile(r"\s\s|[^\S ]|^\s|\s$")
LONGEST_WORD = 1000  # characters; the time to learn a byte-pair encoding grows with the square of the longest word


@dataclass(frozen=True)
class Rows:
    """Rows of different lengths, one after the other. values: (sum of lengths,) int32."""

    values: np.ndarray
    lengths: np.ndarray  # (rows,) int64

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Rows":
        lengths = np.array([len(row) for row in rows], np.int64)
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, lengths.sum()), lengths)

    def append(self, other: "Rows") -> "Rows":
        return Rows(np.append(self.values, other.values), np.append(self.lengths, other.lengths))

    @property
    def starts(self) -> np.ndarray:
        return self.lengths.cumsum() - self.lengths

    def take(self, chosen: np.ndarray) -> "Rows":
        """The rows of these numbers, or those where a mask is True."""
        lengths = self.lengths[chosen]
        return Rows(self.values[places(self.starts[chosen], lengths)], lengths)


def places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, .. start + length - 1 of each row, one row after the other."""
    return np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())


class _Numbers(dict[str, int]):
    """Gives each word the next number when it is first looked up."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


class CharacterTokenizer:
    """One token for each of `characters`; anything else is UNKNOWN."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.size = len(SPECIAL_TOKENS) + len(characters)
        self._texts = ["", "", "", "?", *characters]
        self.tokens = [*SPECIAL_TOKENS, *characters]  # a name for each id
        self._ids = {character: i for i, character in enumerate(characters, start=len(SPECIAL_TOKENS))}

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """The characters that occur in `texts`."""
        return cls("".join(sorted(set().union(*texts))))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(character, UNKNOWN) for character in text] for text in texts]

    def encode_rows(self, texts: Sequence[str]) -> Rows:
        return Rows.of(self.encode(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)

    def to_json(self) -> str:
        return json.dumps({"characters": self.characters})


class BpeTokenizer:
    """Byte-pair encoding over bytes, one vocabulary for both languages. Any text comes back from its ids unchanged, but
    for outer spaces. Source: Sennrich et al. 2016, arXiv:1508.07909, as implemented by Hugging Face's `tokenizers`."""

    def __init__(self, serialized: str) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # "</s>" in a user's text is text
        self.size = self._tokenizer.get_vocab_size()
        self.tokens = [self._tokenizer.id_to_token(i) for i in range(self.size)]  # a name for each id
        self._words, self._ids = _Numbers(), Rows.of([])  # of words that were seen

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "BpeTokenizer":
        """Learns merges from `texts` until there are `vocabulary` tokens, 256 bytes and 4 special tokens included.

        Words above LONGEST_WORD characters are left out of the learning. Prints that, for it takes a while."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = HuggingFaceTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        shorter, left_out = [], 0
        for text in texts:
            text, words = re.subn(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}", "", text)
            shorter.append(text)
            left_out += words
        note = f", without {left_out} words of more than {LONGEST_WORD} characters" if left_out else ""
        print(f"learning BPE from {len(shorter)} lines{note}", flush=True)
        tokenizer.train_from_iterator(shorter, trainer)
        return cls(tokenizer.to_str())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def encode_rows(self, texts: Sequence[str]) -> Rows:
        """The same, for much text: 4x faster, since a word that was seen before is looked up. No merge crosses a space,
        so the ids of a text are those of its words; a text with other spaces, or several at once, counts as a word."""
        if len(self._words) > KNOWN_WORDS:
            self._words, self._ids = _Numbers(), Rows.of([])
        parts = [[text] if OTHER_SPACE.search(text) else text.split(" ") for text in texts]
        words, known = list(chain.from_iterable(parts)), len(self._words)
        numbers = np.fromiter(map(self._words.__getitem__, words), np.int64, len(words))
        new = self._tokenizer.encode_batch_fast(list(islice(self._words, known, None)))
        self._ids = self._ids.append(Rows.of([encoding.ids for encoding in new]))
        row_of_word = np.repeat(np.arange(len(texts)), [len(row) for row in parts])
        found = self._ids.take(numbers)
        return Rows(found.values, np.bincount(row_of_word, found.lengths, len(texts)).astype(np.int64))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True).removeprefix(" ")

    def to_json(self) -> str:
        return self._tokenizer.to_str()


Tokenizer = CharacterTokenizer | BpeTokenizer


def load_tokenizer(serialized: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote. ValueError or TypeError where it is something else."""
    content = json.loads(serialized)
    if isinstance(content, dict) and isinstance(content.get("characters"), str):
        return CharacterTokenizer(content["characters"])
    try:
        return BpeTokenizer(serialized)
    except Exception as error:  # the library has no narrower class
        raise ValueError(f"not a tokenizer: {error}") from error
