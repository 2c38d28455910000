"""Translation with a trained model or its export to CTranslate2, and the scores of translations."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from command_line import CommandError, library, writing
from torch.nn.utils.rnn import pad_sequence

from fastattn import FusedTransformer, generate
from translation.settings import Settings
from translation.text import Pair
from translation.tokens import BOS, EOS, PAD, UNKNOWN, Tokenizer, load_tokenizer

HYPOTHESES = 128  # translated together: HYPOTHESES // beam sentences
LENGTHS = 8  # source lengths are rounded up to this for the limit of a translation, so more can be decoded together
FACTS = "fastattn.json"  # in the exported folder, next to CTranslate2's files
Hypotheses = list[tuple[list[int], float | None]]  # ids without BOS and EOS, and the score; the best first
LENGTH_PENALTY = 0.7  # of both engines: a score is log-probability / length ^ LENGTH_PENALTY


class Translation(NamedTuple):
    """score: see fastattn.generate.beam_search; None of greedy decoding."""

    text: str
    ids: list[int]
    score: float | None


def longest_translation(source_length: int, max_length: int) -> int:
    """In tokens. A translation more than twice as long as its source repeats itself and would never end."""
    return min(max_length - 1, 2 * LENGTHS * -(-source_length // LENGTHS) + 10)


def encode_source(tokenizer: Tokenizer, text: str, max_length: int) -> list[int]:
    """The ids of a text with EOS, cut to max_length."""
    return [*tokenizer.encode([text])[0][: max_length - 1], EOS]


def translate(
    model: "FusedTransformer | Engine",
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
    model: FusedTransformer, sources: list[list[int]], beam: int, n_best: int, max_len: int
) -> list[Hypotheses]:
    source = pad_sequence([torch.tensor(ids) for ids in sources], batch_first=True, padding_value=PAD)
    source = source.to(next(model.parameters()).device)
    limits = {"bos_idx": BOS, "eos_idx": EOS, "max_len": max_len}
    if beam == 1:
        return [[(ids, None)] for ids in generate.greedy(model, source, **limits)]
    options = {"beam_size": beam, "n_best": n_best, "length_penalty": LENGTH_PENALTY}
    return generate.beam_search(model, source, **options, **limits)


def export(
    folder: Path, model: FusedTransformer, tokenizer: Tokenizer, settings: Settings, quantization: str | None
) -> None:
    """Writes a folder that `Engine` reads. CommandError where it is not new, or the quantization is unknown."""
    library("ctranslate2", "ctranslate2")
    from fastattn.integrations import ctranslate2

    indices = {"bos_idx": BOS, "eos_idx": EOS, "unk_idx": UNKNOWN}
    facts = {"settings": dataclasses.asdict(settings), "tokenizer": tokenizer.to_json()}
    with writing(folder):
        ctranslate2.export(model, folder, tokenizer.tokens, tokenizer.tokens, **indices, quantization=quantization)
        (folder / FACTS).write_text(json.dumps(facts))


class Engine:
    """An exported model in CTranslate2, which `decoding.translate` can use instead of a FusedTransformer."""

    def __init__(self, folder: Path, device: str) -> None:
        """CommandError where the folder is damaged, or `export` did not write it."""
        (kind, _, number), theirs = device.partition(":"), library("ctranslate2", "ctranslate2")
        try:
            facts = json.loads((folder / FACTS).read_bytes())
            self.settings = Settings(**facts["settings"] | {"device": device})
            self.tokenizer = load_tokenizer(facts["tokenizer"])
            threads = {"intra_threads": torch.get_num_threads(), "inter_threads": 1}
            self._translator = theirs.Translator(str(folder), kind, device_index=int(number or 0), **threads)
        except (OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CommandError(f"{folder}: is not an export of translate.py that can be used: {error}") from error
        self._tokens = self.tokenizer.tokens
        self._ids = {token: i for i, token in enumerate(self._tokens)}

    def decode(self, sources: list[list[int]], beam: int, n_best: int, max_len: int) -> list[Hypotheses]:
        """The n_best hypotheses of each source, as fastattn.generate finds them."""
        limits = {"max_decoding_length": max_len, "min_decoding_length": 0, "max_input_length": 0}
        options = {"beam_size": beam, "num_hypotheses": beam, "length_penalty": LENGTH_PENALTY}
        options |= {"return_scores": True, "return_end_token": True}
        options["patience"] = 2 if beam > 1 else 1  # or it ends while a better hypothesis can still come
        tokens = [[self._tokens[i] for i in source] for source in sources]
        found = [self._ranked(each, n_best) for each in self._translator.translate_batch(tokens, **options, **limits)]
        return found if beam > 1 else [[(ids, None)] for ((ids, _),) in found]

    def _ranked(self, result: Any, n_best: int) -> Hypotheses:
        """By the rules of generate.beam_search: ended hypotheses are before the others, and a length counts BOS too."""
        found = []
        for tokens, score in zip(result.hypotheses, result.scores, strict=True):
            ids = [self._ids[token] for token in tokens]
            ended = ids[-1:] == [EOS]
            score *= (len(ids) / (len(ids) + 1)) ** LENGTH_PENALTY
            found.append((not ended, -score, ids[:-1] if ended else ids))
        return [(ids, -cost) for _, cost, ids in sorted(found)[:n_best]]


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
