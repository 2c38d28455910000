"""Text to token ids and back: one token a character for the dates, a joint byte-pair encoding for real text.

Of both tokenizers `encode` adds no BOS and no EOS, and `decode` skips PAD, BOS and EOS.
"""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]  # at the ids above
KNOWN_WORDS = 200_000  # whose ids are kept, some 50 MB
# Space that is not one blank between two words: such a text is not cut into words.
OTHER_SPACE = re.compile(r"\s\s|[^\S ]|^\s|\s$")
LONGEST_WORD = 1000  # characters; the time to learn a byte-pair encoding grows with the square of the longest word


class CharacterTokenizer:
    """One token for each of `characters`; anything else is UNKNOWN."""

    def __init__(self, characters: str) -> None:
        self.tokens = [*SPECIAL_TOKENS, *characters]  # a name for each id
        self.size = len(self.tokens)
        self._texts = ["", "", "", "?", *characters]
        self._ids = {character: i for i, character in enumerate(characters, start=len(SPECIAL_TOKENS))}

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """The characters that occur in `texts`."""
        return cls("".join(sorted(set().union(*texts))))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(character, UNKNOWN) for character in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)

    def to_json(self) -> str:
        return json.dumps({"characters": "".join(self._ids)})


class BpeTokenizer:
    """Byte-pair encoding over bytes, one vocabulary for both languages. Any text comes back from its ids unchanged, but
    for outer spaces. Source: Sennrich et al. 2016, arXiv:1508.07909, as implemented by Hugging Face's `tokenizers`."""

    def __init__(self, serialized: str) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # "</s>" in a user's text is text
        self.size = self._tokenizer.get_vocab_size()
        self.tokens = [self._tokenizer.id_to_token(i) for i in range(self.size)]  # a name for each id
        self._known: dict[str, list[int]] = {}  # the ids of words that were seen

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
        long_word = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}")
        shorter, left_out = zip(*(long_word.subn("", text) for text in texts), strict=True)
        note = f", without {sum(left_out)} words of more than {LONGEST_WORD} characters" if any(left_out) else ""
        print(f"learning BPE from {len(shorter)} lines{note}", flush=True)
        tokenizer.train_from_iterator(shorter, trainer)
        return cls(tokenizer.to_str())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """No merge crosses a space, so the ids of a text are those of its words, and a word that was seen before is
        looked up, 4x faster than the library. A text with other spaces, or several at once, counts as a word."""
        if len(self._known) > KNOWN_WORDS:
            self._known.clear()
        words = [[text] if OTHER_SPACE.search(text) else text.split(" ") for text in texts]
        new = list({word: None for word in chain.from_iterable(words) if word not in self._known})
        self._known.update((w, e.ids) for w, e in zip(new, self._tokenizer.encode_batch_fast(new), strict=True))
        return [list(chain.from_iterable(map(self._known.__getitem__, row))) for row in words]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True).removeprefix(" ")

    def to_json(self) -> str:
        return self._tokenizer.to_str()


Tokenizer = CharacterTokenizer | BpeTokenizer


def load_tokenizer(serialized: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote. ValueError where it is something else."""
    content = json.loads(serialized)
    if isinstance(content, dict) and isinstance(content.get("characters"), str):
        return CharacterTokenizer(content["characters"])
    try:
        return BpeTokenizer(serialized)
    except Exception as error:  # the library has no narrower class
        raise ValueError(f"not a tokenizer: {error}") from error
