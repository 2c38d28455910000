"""Text as token ids in files that are mapped into memory: encoded and filtered once, and checked before every use.

A prepared folder holds train.tokens and train.index (see `data.Examples`), tokenizer.json, the validation and the test
text in text.json, and prepared.json, which is written last: what was prepared, with which options, and the hashes of
the other files. A folder without it was not finished.
"""

import dataclasses
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from command_line import CommandError, DataError, blocks_of, folder_lock, progress_bar, sha256_of, writing
from torch.utils.data import DataLoader, Dataset

from translation.data import INDEX, Examples, ignore_signals
from translation.options import TextSettings, flag
from translation.text import Pair, Text
from translation.tokens import BpeTokenizer, Tokenizer, load_tokenizer

FORMAT = 1  # of the files
MANIFEST, PARTIAL = "prepared.json", "prepared.partial"
PARTS = ("tokenizer.json", "text.json", "train.tokens", "train.index")
SAMPLE = 250_000  # pairs, at most, from which the byte-pair encoding is learned
CHUNK = 20_000  # pairs that are encoded at once


class PreparedError(CommandError):
    """A prepared folder cannot be used."""


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
    pairs: Sequence[Pair], tokenizer: Tokenizer, options: TextSettings, max_ratio: float = math.inf
) -> tuple[Examples, list[Pair], Counter[str]]:
    """The encoded pairs; these pairs as text; and how many were left out, by the reason."""
    filled = [pair for pair in pairs if all(pair)]
    source, target = (tokenizer.encode_rows([pair[side] for pair in filled]) for side in (0, 1))
    short, long = np.sort([source.lengths, target.lengths], axis=0)
    fits = np.maximum(source.lengths + 1, target.lengths + 2) <= options.max_length
    kept = fits & (long <= max_ratio * short)
    reasons = {"with a blank side": len(pairs) - len(filled)}
    reasons |= {f"above --max-length {options.max_length}": len(fits) - fits.sum()}
    reasons |= {f"above --max-ratio {max_ratio:g}": fits.sum() - kept.sum()}
    left_out = Counter({reason: int(count) for reason, count in reasons.items() if count})
    examples = Examples.of(source.take(kept), target.take(kept), token_dtype(tokenizer.size))
    return examples, [filled[i] for i in np.flatnonzero(kept)], left_out


def encode_part(part: str, pairs: Sequence[Pair], tokenizer: Tokenizer, options: TextSettings) -> Examples:
    """Prints how many pairs are left out. DataError where none is left."""
    examples, _, left_out = encode(pairs, tokenizer, options)
    if left_out:
        print(f"{part}: {len(pairs)} pairs, left out {listing(left_out)}")
    if not examples:
        raise DataError(f"no pair of {part} is left; raise --max-length")
    return examples


def token_dtype(vocabulary: int) -> str:
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def listing(counts: Counter[str]) -> str:
    """ "3 with a blank side, 1 above --max-length 200"; "0"."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "0"


def is_prepared(folder: Path) -> bool:
    return any((folder / name).exists() for name in (MANIFEST, *PARTS))


def prepare(text: Text, settings: TextSettings, folder: Path) -> None:
    """Writes the prepared text, unless the folder has it already.

    A folder of other text, of other options, or that was not finished, is written again from the beginning. A process
    that maps its files keeps them. PreparedError where it holds other files.
    """
    names = [field.name for field in dataclasses.fields(TextSettings)]
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in text.files}
    request = {"format": FORMAT, "options": {name: getattr(settings, name) for name in names}, "files": files}
    with folder_lock(folder, wait=True):
        if others := {path.name for path in folder.iterdir()} - {MANIFEST, PARTIAL, *PARTS, ".lock"}:
            raise PreparedError(f"{folder}: holds other files, such as {min(others)}; choose another folder")
        if (folder / MANIFEST).exists():
            changes = _changes(_read_json(folder / MANIFEST), request)
            if not changes:
                print(f"{folder}: is prepared already")
                return
            print(f"{folder}: preparing again: {changes}")
        _write(text, settings, folder, request)


def _changes(earlier: Any, request: dict[str, Any]) -> str:
    """What differs from an earlier request; "" where nothing does."""
    try:
        if {name: earlier[name] for name in request} == request:
            return ""
        options, files = earlier["options"], earlier["files"]
        found = [
            f"{flag(name)} was {options[name]}" for name, now in request["options"].items() if options[name] != now
        ]
        names = sorted(files.keys() | request["files"].keys())
        changed = [f"{name} changed" for name in names if files.get(name) != request["files"].get(name)]
        return ", ".join(found + changed)
    except (TypeError, LookupError, AttributeError):
        return f"{MANIFEST} is of another version or damaged"


def _write(text: Text, settings: TextSettings, folder: Path, request: dict[str, Any]) -> None:
    sample, total = _sample(progress_bar(text.pairs("train"), desc="reading", unit="pair"))
    held_out = {"val": list(text.pairs("val")), "tests": {name: list(text.pairs(name)) for name in text.tests}}
    tokenizer = BpeTokenizer.train((side for pair in sample for side in pair), settings.vocabulary)
    del sample
    for name in (MANIFEST, *PARTS):  # a process that maps a file keeps it
        with writing(folder / name):
            (folder / name).unlink(missing_ok=True)
    for name, content in (("tokenizer.json", tokenizer.to_json()), ("text.json", json.dumps(held_out))):
        with writing(folder / name):
            (folder / name).write_text(content, encoding="utf-8")
    counts = _write_pairs(text, total, tokenizer, settings, folder)
    total += text.num_bad
    counts += Counter({"that cannot be read": text.num_bad})
    print(f"train: {total} pairs, left out {listing(counts)}")
    if counts.total() == total:
        raise DataError(f"{text.folder}: no pair of train is left; raise --max-length or --max-ratio")
    hashes = {name: sha256_of(folder / name) for name in PARTS}
    manifest = json.dumps({**request, "left_out": counts, "sha256": hashes}, indent=1) + "\n"
    with writing(folder / MANIFEST):
        try:
            (folder / PARTIAL).write_text(manifest, encoding="utf-8")
            os.replace(folder / PARTIAL, folder / MANIFEST)
        finally:
            (folder / PARTIAL).unlink(missing_ok=True)


def _sample(pairs: Iterable[Pair]) -> tuple[list[Pair], int]:
    """SAMPLE random pairs, or all if there are fewer; and how many there are. Source: Vitter 1985, algorithm R."""
    random_place, kept, number = random.Random(0), [], 0
    for number, pair in enumerate(pairs, start=1):
        if number <= SAMPLE:
            kept.append(pair)
        elif (place := int(random_place.random() * number)) < SAMPLE:
            kept[place] = pair
    return kept, number


class _Encoder(Dataset[Any]):
    """What a worker does with a chunk of pairs."""

    def __init__(self, tokenizer: Tokenizer, settings: TextSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings

    def __getitem__(self, pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray, np.ndarray, Counter[str], int]:
        """tokens, index, a hash of each pair, how many are left out, how many there were."""
        examples, kept, left_out = encode(pairs, self.tokenizer, self.settings, self.settings.max_ratio)
        digests = (blake2b("\0".join(pair).encode(), digest_size=8).digest() for pair in kept)
        return examples.tokens, examples.index, np.frombuffer(b"".join(digests), np.int64), left_out, len(pairs)


def _start_worker(worker: int) -> None:
    ignore_signals(worker)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a worker


def _unchanged(result: Any) -> Any:
    return result


def _write_pairs(text: Text, total: int, tokenizer: Tokenizer, settings: TextSettings, folder: Path) -> Counter[str]:
    """Writes train.tokens and train.index; returns how many pairs were left out, by the reason."""
    pairs, counts = text.pairs("train"), Counter()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    encoder = DataLoader(
        _Encoder(tokenizer, settings),
        batch_size=None,
        sampler=iter(lambda: list(islice(pairs, CHUNK)), []),
        num_workers=min(cores, total // CHUNK),
        worker_init_fn=_start_worker,
        collate_fn=_unchanged,
    )
    chunks, hashes, position = [], [], 0
    bar = progress_bar(total=total, desc="encoding", unit="pair")
    with writing(folder / "train.tokens"), (folder / "train.tokens").open("wb") as file, bar:
        for tokens, index, new_hashes, left_out, read in encoder:
            file.write(tokens.data)
            index["start"] += position
            position += len(tokens)
            chunks.append(index)
            hashes.append(new_hashes)
            counts += left_out
            bar.update(read)
    index = np.concatenate(chunks)
    if not settings.keep_duplicates:  # of equal pairs the first one stays; hashes of 64 bits differ for other pairs
        first = np.sort(np.unique(np.concatenate(hashes), return_index=True)[1])
        counts["duplicates"] = len(index) - len(first)
        index = index[first]
    with writing(folder / "train.index"):
        index.tofile(folder / "train.index")
    return counts


def _read_json(path: Path) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def prepared_options(folder: Path) -> TextSettings:
    """The options of a prepared folder. PreparedError where it was not finished, or this version did not write it."""
    if not (folder / MANIFEST).exists():
        raise PreparedError(f"{folder}: its preparation was not finished; run it again")
    try:
        manifest = _read_json(folder / MANIFEST)
        names = {field.name for field in dataclasses.fields(TextSettings)}
        if manifest["format"] == FORMAT and manifest["options"].keys() == names:
            return TextSettings.checked(manifest["options"])
    except (TypeError, LookupError, ValueError, AttributeError):
        pass
    raise PreparedError(f"{folder / MANIFEST}: is damaged, or not of this version; prepare the text again")


def load_prepared(folder: Path) -> TrainingText:
    """Maps what `prepare` wrote. PreparedError where a file is damaged, cut off, or refers to what is not there."""
    options = prepared_options(folder)
    hashes = _read_json(folder / MANIFEST).get("sha256")
    for name in PARTS:
        path = folder / name
        if not isinstance(hashes, dict) or not path.is_file() or sha256_of(path) != hashes.get(name):
            raise PreparedError(f"{folder / name}: is damaged or cut off; prepare the text again")
    try:
        tokenizer = load_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
        held_out = json.loads((folder / "text.json").read_bytes())
        val_pairs = _checked_pairs(held_out["val"])
        tests = {name: _checked_pairs(pairs) for name, pairs in held_out["tests"].items()}
        if any(Path(name).name != name for name in tests):  # a file is named after each
            raise ValueError("a path")
        train = Examples.map(folder, token_dtype(tokenizer.size))
        _check(train, tokenizer.size, options.max_length)
    except (TypeError, LookupError, ValueError, AttributeError, RecursionError) as error:
        raise PreparedError(
            f"{folder}: holds something else than this version writes; prepare the text again"
        ) from error
    fingerprint = " ".join(hashes[name] for name in PARTS if name != "text.json")
    return TrainingText(
        tokenizer, train, encode_part("val", val_pairs, tokenizer, options), val_pairs, tests, fingerprint
    )


def _checked_pairs(pairs: Any) -> list[Pair]:
    if not all(isinstance(side, str) for pair in pairs for side in pair) or any(len(pair) != 2 for pair in pairs):
        raise TypeError("no pairs")
    return [(source, target) for source, target in pairs]


def _check(train: Examples, vocabulary: int, max_length: int) -> None:
    """ValueError where a pair is outside of the tokens, or a token outside of the vocabulary."""
    end = len(train.tokens)
    for block in blocks_of(train.folder / "train.index"):
        index = np.frombuffer(block, INDEX)
        lengths = np.stack([index["source"], index["target"]])
        inside = index["start"].min() >= 0 and (lengths.min(1) >= [1, 2]).all() and lengths.max() <= max_length
        if not inside or index["start"].max() > end or (index["start"] + lengths.sum(0)).max() > end:
            raise ValueError("a pair")
    for block in blocks_of(train.folder / "train.tokens"):
        if np.frombuffer(block, train.tokens.dtype).max() >= vocabulary:
            raise ValueError("a token")
