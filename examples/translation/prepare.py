"""Text as token ids in files that are mapped into memory: encoded and filtered once.

A prepared folder holds train.tokens and train.index (see `data.Examples`), tokenizer.json, the validation and the test
text in text.json, and prepared.json, which is written last: what was prepared, with which options, and the hashes of
the other files. A folder without it was not finished.
"""

import dataclasses
import hashlib
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from command_line import CommandError, folder_lock, progress_bar, replacing, writing

from translation.data import INDEX, Examples, MappedFile
from translation.settings import TextSettings
from translation.text import Pair, Text
from translation.tokens import BpeTokenizer, Tokenizer, load_tokenizer

FORMAT = 2  # of the files
MANIFEST, PARTIAL = "prepared.json", "prepared.partial"
PARTS = ("tokenizer.json", "text.json", "train.tokens", "train.index")
SAMPLE = 250_000  # pairs, at most, from which the byte-pair encoding is learned
CHUNK = 20_000  # pairs that are encoded at once


@dataclass(frozen=True)
class TrainingText:
    """What a run learns, and is judged by. fingerprint: equal for equal training text and tokenizer."""

    tokenizer: Tokenizer
    train: Examples
    val: Examples
    val_pairs: list[Pair]
    tests: dict[str, list[Pair]]
    fingerprint: str


def encode(
    pairs: Sequence[Pair], tokenizer: Tokenizer, options: TextSettings, left_out: Counter[str], max_ratio: float
) -> Examples:
    """The encoded pairs. Counts in left_out how many are not among them, by the reason."""
    kept = []
    for pair, source, target in zip(pairs, *(tokenizer.encode(side) for side in zip(*pairs, strict=True)), strict=True):
        short, long = sorted((len(source), len(target)))
        if not all(pair):
            left_out["with a blank side"] += 1
        elif max(len(source) + 1, len(target) + 2) > options.max_length:
            left_out[f"above --max-length {options.max_length}"] += 1
        elif long > max_ratio * short:
            left_out[f"above --max-ratio {max_ratio:g}"] += 1
        else:
            kept.append((source, target))
    return Examples.of(kept, token_dtype(tokenizer.size))


def encode_part(part: str, pairs: Sequence[Pair], tokenizer: Tokenizer, options: TextSettings) -> Examples:
    """Prints how many pairs are left out. CommandError where none is left."""
    left_out: Counter[str] = Counter()
    examples = encode(pairs, tokenizer, options, left_out, math.inf)
    if left_out or not examples:
        report(part, len(pairs), left_out)
    return examples


def report(part: str, total: int, left_out: Counter[str]) -> None:
    """Prints "train: 9 pairs, left out 3 with a blank side". CommandError where none is left."""
    print(f"{part}: {total} pairs, left out {', '.join(f'{n} {reason}' for reason, n in left_out.items()) or 0}")
    if left_out.total() == total:
        raise CommandError(f"no pair of {part} is left; raise --max-length or --max-ratio")


def token_dtype(vocabulary: int) -> str:
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def is_prepared(folder: Path) -> bool:
    return any((folder / name).exists() for name in (MANIFEST, *PARTS))


def prepare(text: Text, settings: TextSettings, folder: Path) -> None:
    """Writes the prepared text, unless the folder has it already.

    A folder of other text, of other options, or that was not finished, is written again from the beginning. A process
    that maps its files keeps them. CommandError where it holds other files.
    """
    options = {field.name: getattr(settings, field.name) for field in dataclasses.fields(TextSettings)}
    paths = [path for paths in text.parts.values() for path in paths]
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    request = {"format": FORMAT, "options": options, "files": files}
    with folder_lock(folder):
        if others := {path.name for path in folder.iterdir()} - {MANIFEST, PARTIAL, *PARTS, ".lock"}:
            raise CommandError(f"{folder}: holds other files, such as {min(others)}; choose another folder")
        earlier = _read_manifest(folder)
        if earlier.get("request") == request:
            print(f"{folder}: is prepared already")
            return
        if earlier:
            print(f"{folder}: preparing again: the text or an option changed")
        _write(text, settings, folder, request)


def _write(text: Text, settings: TextSettings, folder: Path, request: dict[str, Any]) -> None:
    bar, draw = progress_bar(text.pairs("train"), desc="reading", unit="pair"), random.Random(0).random
    sample = [pair for *_, pair in heapq.nlargest(SAMPLE, ((draw(), number, pair) for number, pair in enumerate(bar)))]
    total = bar.n
    held_out = {"val": list(text.pairs("val")), "tests": {name: list(text.pairs(name)) for name in text.tests}}
    if not sample:
        raise CommandError(f"{text.folder}: there is no pair to train on")
    tokenizer = BpeTokenizer.train((side for pair in sample for side in pair), settings.vocabulary)
    del sample
    with writing(folder):
        for name in (MANIFEST, *PARTS):  # a process that maps a file keeps it
            (folder / name).unlink(missing_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        (folder / "text.json").write_text(json.dumps(held_out), encoding="utf-8")

    left_out: Counter[str] = Counter()
    pairs = iter(progress_bar(text.pairs("train"), total=total, desc="encoding", unit="pair"))
    if not settings.keep_duplicates:
        pairs = _without_duplicates(pairs, left_out)
    position = 0
    with writing(folder), (folder / "train.tokens").open("wb") as tokens, (folder / "train.index").open("wb") as index:
        while chunk := list(islice(pairs, CHUNK)):
            examples = encode(chunk, tokenizer, settings, left_out, settings.max_ratio)
            examples.index["start"] += position
            position += len(examples.tokens)
            tokens.write(examples.tokens.data)
            index.write(examples.index.tobytes())
    left_out += Counter({"that cannot be read": text.num_bad})
    report("train", total + text.num_bad, left_out)

    manifest = {"request": request, "left_out": left_out, "sha256": {name: _sha256(folder / name) for name in PARTS}}
    with replacing(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _without_duplicates(pairs: Iterable[Pair], left_out: Counter[str]) -> Iterator[Pair]:
    """Of equal pairs the first one; hashes of 64 bits are compared."""
    seen: set[int] = set()
    for pair in pairs:
        if (key := hash(pair)) in seen:
            left_out["duplicates"] += 1
        else:
            seen.add(key)
            yield pair


def _sha256(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """{} where it is not there, or damaged."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def prepared_options(folder: Path) -> TextSettings:
    """The options of a prepared folder. CommandError where it was not finished, or this version did not write it."""
    request = _read_manifest(folder).get("request", {})
    if request.get("format") != FORMAT:
        raise CommandError(f"{folder}: was not prepared to the end by this version; prepare the text again")
    return TextSettings(**request["options"])


def load_prepared(folder: Path) -> TrainingText:
    """Maps what `prepare` wrote. CommandError where a file is damaged or cut off."""
    options = prepared_options(folder)
    hashes = _read_manifest(folder)["sha256"]
    for name in PARTS:
        path = folder / name
        if not path.is_file() or not path.stat().st_size or _sha256(path) != hashes[name]:
            raise CommandError(f"{path}: is damaged or cut off; prepare the text again")
    tokenizer = load_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
    held_out = json.loads((folder / "text.json").read_bytes())
    val_pairs = [*map(tuple, held_out["val"])]
    tests = {name: [*map(tuple, pairs)] for name, pairs in held_out["tests"].items()}
    files = (("train.tokens", token_dtype(tokenizer.size)), ("train.index", INDEX))
    train = Examples(*(MappedFile(folder / name, dtype, "r") for name, dtype in files))
    val = encode_part("val", val_pairs, tokenizer, options)
    fingerprint = " ".join(hashes[name] for name in PARTS if name != "text.json")
    return TrainingText(tokenizer, train, val, val_pairs, tests, fingerprint)
