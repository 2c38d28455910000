"""Translation with a trained model, and the scores of translations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fastattn import FusedTransformer, generate
from translation.data import pad
from translation.engine import LENGTH_PENALTY, Engine
from translation.settings import Settings
from translation.text import Pair
from translation.tokens import BOS, EOS, Tokenizer

HYPOTHESES = 128  # translated together: HYPOTHESES // beam sentences
LENGTHS = 8  # source lengths are rounded up to this for the limit of a translation, so more can be decoded together


class Translation(NamedTuple):
    """score: see fastattn.generate.beam_search; None of greedy decoding."""

    text: str
    ids: list[int]
    score: float | None


def longest_translation(source_length: int, max_length: int) -> int:
    """In tokens. A translation more than twice as long as its source repeats itself and would never end."""
    return min(max_length - 1, 2 * LENGTHS * -(-source_length // LENGTHS) + 10)


def encode_source(tokenizer: Tokenizer, text: str, max_length: int) -> np.ndarray:
    """The ids of a text with EOS, cut to max_length."""
    return np.array([*tokenizer.encode([text])[0][: max_length - 1], EOS])


def translate(
    model: FusedTransformer | Engine,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: Settings,
    n_best: int = 1,
    progress: Callable[[int], object] = lambda sentences: None,
) -> list[list[Translation]]:
    """The n_best translations of each text, in the order of the texts; calls progress with the number of new ones.

    Uses beam search with settings.beam hypotheses, or greedy decoding if that is 1. Texts of similar length are decoded
    together; the result of a text does not depend on the others. A text of more than --max-length tokens is cut. The
    one translation of a blank text is "".
    """
    max_length = settings.max_length
    encoded = [encode_source(tokenizer, text, max_length) for text in texts]
    by_length = sorted((i for i, text in enumerate(texts) if text.strip()), key=lambda i: len(encoded[i]))
    found = [[Translation("", [], None)] for _ in texts]
    sentences = max(1, HYPOTHESES // settings.beam)
    # A beam's scores depend on the limit, so a batch has one limit.
    for longest, group in groupby(by_length, key=lambda i: longest_translation(len(encoded[i]), max_length)):
        same_limit = list(group)
        for start in range(0, len(same_limit), sentences):
            chosen = same_limit[start : start + sentences]
            decode = model.decode if isinstance(model, Engine) else partial(_decode, model)
            results = decode([encoded[i] for i in chosen], settings.beam, n_best, longest)
            for i, translations in zip(chosen, results, strict=True):
                found[i] = [Translation(tokenizer.decode(ids), ids, score) for ids, score in translations]
            progress(len(chosen))
    return found


def _decode(
    model: FusedTransformer, sources: Sequence[np.ndarray], beam: int, n_best: int, max_len: int
) -> list[list[tuple[list[int], float | None]]]:
    source = pad(sources).to(next(model.parameters()).device)
    limits = {"bos_idx": BOS, "eos_idx": EOS, "max_len": max_len}
    if beam == 1:
        return [[(ids, None)] for ids in generate.greedy(model, source, **limits)]
    options = {"beam_size": beam, "n_best": n_best, "length_penalty": LENGTH_PENALTY}
    return generate.beam_search(model, source, **options, **limits)


@dataclass(frozen=True)
class Score:
    """A test set's translations, their score in percent, and how fast they were decoded.

    signature: sacreBLEU's; None for exact match. tokens_per_second: of the translations, EOS included.
    """

    test: str
    metric: str
    value: float
    signature: str | None
    pairs: list[Pair]
    translations: list[str]
    tokens_per_second: float


def exact_match(pairs: Sequence[Pair], translations: Sequence[str]) -> float:
    """The share, in percent, of translations that equal their target."""
    equal = sum(translation == target for (_, target), translation in zip(pairs, translations, strict=True))
    return 100 * equal / len(pairs)


def bleu(pairs: Sequence[Pair], translations: Sequence[str], lowercase: bool = False) -> tuple[float, str]:
    """Corpus BLEU and sacreBLEU's signature of how it was computed. Source: Post 2018, arXiv:1804.08771."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(translations), [[target for _, target in pairs]])
    return score.score, str(metric.get_signature())
