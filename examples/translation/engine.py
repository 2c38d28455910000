"""Export of a trained model to CTranslate2, with its tokenizer, and translation with the export."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import CommandError, sha256_of, writing

from fastattn import FusedTransformer
from translation.settings import Settings
from translation.tokens import BOS, EOS, UNKNOWN, Tokenizer, load_tokenizer

FACTS, VOCABULARY = "fastattn.json", "shared_vocabulary.json"  # the first is ours, the second CTranslate2's
LENGTH_PENALTY = 0.7  # of both engines: a score is log-probability / length ^ LENGTH_PENALTY


class ExportError(CommandError):
    """A folder cannot be written or used."""


def _library() -> Any:
    try:
        import ctranslate2
    except ImportError as error:
        raise ExportError('CTranslate2 is missing: pip install ".[ctranslate2]"') from error
    return ctranslate2


def export(
    folder: Path, model: FusedTransformer, tokenizer: Tokenizer, settings: Settings, quantization: str | None
) -> None:
    """Writes a folder that `Engine` reads. ExportError where it is not new, or the quantization is unknown."""
    _library()
    from fastattn.integrations import ctranslate2

    indices = {"bos_idx": BOS, "eos_idx": EOS, "unk_idx": UNKNOWN}
    try:
        with writing(folder):
            ctranslate2.export(model, folder, tokenizer.tokens, tokenizer.tokens, **indices, quantization=quantization)
    except ValueError as error:
        raise ExportError(f"{folder}: {error}") from error
    facts = {"settings": dataclasses.asdict(settings), "tokenizer": tokenizer.to_json(), "sha256": _hashes(folder)}
    with writing(folder / FACTS):
        (folder / FACTS).write_text(json.dumps(facts))


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir() if path.name != FACTS}


class Engine:
    """An exported model in CTranslate2, which `decoding.translate` can use instead of a FusedTransformer."""

    def __init__(self, folder: Path, device: str) -> None:
        """ExportError where the folder is damaged, or `export` did not write it."""
        library, (kind, _, number) = _library(), device.partition(":")
        try:
            facts = json.loads((folder / FACTS).read_bytes())
            if facts["sha256"] != _hashes(folder):
                raise ExportError(f"{folder}: a file is damaged or missing; export the model again")
            self.settings = Settings.checked(facts["settings"] | {"device": device})
            self.tokenizer = load_tokenizer(facts["tokenizer"])
            self._tokens = self.tokenizer.tokens
            if json.loads((folder / VOCABULARY).read_bytes()) != self._tokens:
                raise ValueError("another vocabulary")
            threads = {"intra_threads": torch.get_num_threads(), "inter_threads": 1}
            self._translator = library.Translator(str(folder), kind, device_index=int(number or 0), **threads)
        except (OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ExportError(f"{folder}: is not an export of translate.py that can be used: {error}") from error
        self._ids = {token: i for i, token in enumerate(self._tokens)}

    def decode(
        self, sources: Sequence[np.ndarray], beam: int, n_best: int, max_len: int
    ) -> list[list[tuple[list[int], float | None]]]:
        """The n_best hypotheses of each source, with their scores, as fastattn.generate finds them."""
        results = self._translator.translate_batch(
            [[self._tokens[i] for i in source] for source in sources],
            beam_size=beam,
            num_hypotheses=beam,
            max_decoding_length=max_len,
            min_decoding_length=0,
            length_penalty=LENGTH_PENALTY,
            patience=2 if beam > 1 else 1,  # or it ends while a better hypothesis can still come
            return_scores=True,
            return_end_token=True,
            max_input_length=0,
        )
        return [
            self._ranked(result, n_best) if beam > 1 else [(self._ranked(result, 1)[0][0], None)] for result in results
        ]

    def _ranked(self, result: Any, n_best: int) -> list[tuple[list[int], float | None]]:
        """By the rules of generate.beam_search: ended hypotheses are before the others, and a length counts BOS too."""
        found = []
        for tokens, score in zip(result.hypotheses, result.scores, strict=True):
            ids = [self._ids[token] for token in tokens]
            ended = ids[-1:] == [EOS]
            score *= (len(ids) / (len(ids) + 1)) ** LENGTH_PENALTY
            found.append((not ended, -score, ids[:-1] if ended else ids))
        return [(ids, -cost) for _, cost, ids in sorted(found)[:n_best]]
