"""The user's text as pairs of sentences, read as a stream from files of several formats."""

import json
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from command_line import DataError, arrow, lines_of

Pair = tuple[str, str]
PACKED = (".gz", ".zst")  # after a name; the file is packed
BAD = "\0"  # a line that cannot be read; text with a zero byte is refused
NO_RECORD = (KeyError, TypeError, AttributeError)  # what `_of_record` raises where a part is missing or no text


class Text:
    """The files of two languages in a folder. A part is train, val, or the name of a test set, such as test_2016.

    A part's name begins its files' names. They end in:
        .LANG               one line a sentence; line N of one language translates line N of the other
        .LANG-LANG.tsv      source, tab, target on each line, in the order of the name
        .jsonl              an object on each line, {LANG: sentence, LANG: sentence}; or that as "translation"
        .parquet            columns with the names of the languages; or a column "translation" that has them
    All but .parquet may be packed, with .gz or .zst after the name. train and val are all of their files, by name;
    each test set is one.
    """

    def __init__(
        self, folder: str | Path, source: str, target: str, lowercase: bool = False, skip_bad: bool = False
    ) -> None:
        """skip_bad: leave out lines of train that are not UTF-8 or no pair, and count them in num_bad. DataError where
        the folder or a file is missing."""
        self.folder, self.source, self.target, self.lowercase = Path(folder), source, target, lowercase
        self.skip_bad, self.num_bad = skip_bad, 0
        if not self.folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        if source == target:
            raise DataError(f"{folder}: source and target are both {source!r}; name two languages")
        self.train, self.val = (list(self._find(part).values()) for part in ("train", "val"))
        self.tests = self._find("test")
        for part, found in (("train", self.train), ("val", self.val)):
            if not found:
                endings = f"{part}*.{source}, nor .{source}-{target}.tsv, .jsonl or .parquet"
                raise DataError(f"{self.folder / part}.{source}: no such file; no {endings}")

    @property
    def files(self) -> list[Path]:
        return [path for found in (*self.train, *self.val, *self.tests.values()) for path in found]

    def pairs(self, part: str) -> Iterator[Pair]:
        """The stripped pairs of a part. DataError, with file and line, where they cannot be read."""
        bad = BAD if self.skip_bad and part == "train" else None
        self.num_bad = 0
        for paths in {"train": self.train, "val": self.val}.get(part) or [self.tests[part]]:
            for pair in _aligned(*paths, bad) if len(paths) == 2 else self._read_both(*paths, bad):
                if BAD in pair:
                    self.num_bad += 1
                else:
                    yield (pair[0].lower(), pair[1].lower()) if self.lowercase else pair

    def _find(self, start: str) -> dict[str, tuple[Path, ...]]:
        """Name -> the file of both languages, or that of the source and that of the target."""
        found: dict[str, dict[str, Path]] = {}
        languages = self.source, self.target
        endings = [*languages, "-".join(languages) + ".tsv", "-".join(languages[::-1]) + ".tsv", "jsonl", "parquet"]
        for path in sorted(self.folder.glob(f"{start}*")):
            whole = path.with_suffix("").name if path.suffix in PACKED else path.name
            for ending in endings:
                if whole.endswith(f".{ending}") and path.is_file():
                    name, side = whole.removesuffix(f".{ending}"), ending if ending in languages else "both"
                    other = found.setdefault(name, {}).setdefault(side, path)
                    if other != path:
                        raise DataError(f"{path}: {other.name} has the same name; keep one of them")
        for name, sides in found.items():
            for language in languages:
                if "both" not in sides and language not in sides:
                    missing = f"{name}.{language}"
                    raise DataError(f"{self.folder / missing}: no such file, nor {missing}.gz or {missing}.zst")
                if "both" in sides and language in sides:
                    raise DataError(f"{sides['both']}: {sides[language].name} has the same name; keep one of them")
        return {
            name: (sides["both"],) if "both" in sides else tuple(sides[language] for language in languages)
            for name, sides in found.items()
        }

    def _read_both(self, path: Path, bad: str | None) -> Iterator[Pair]:
        if path.suffix == ".parquet":
            yield from self._parquet(path)
            return
        tsv = ".tsv" in path.suffixes
        backwards = f".{self.target}-{self.source}.tsv" in path.name
        for number, line in enumerate(lines_of(path, bad=bad), start=1):
            try:
                if line == BAD:
                    yield BAD, BAD
                elif tsv and line:
                    yield columns_of(path, number, line)[:: -1 if backwards else 1]
                elif line:
                    yield self._of_record(json.loads(line))
            except (DataError, *NO_RECORD, ValueError, RecursionError) as error:
                if bad:
                    yield BAD, BAD
                elif tsv:
                    raise
                else:
                    expected = f'{{"{self.source}": "..", "{self.target}": ".."}}'
                    raise DataError(f"{path}, line {number}: expected {expected}, got {line[:60]!r}") from error

    def _of_record(self, record: Any) -> Pair:
        record = record.get("translation", record)
        source, target = record[self.source].strip(), record[self.target].strip()
        (source + target).encode()  # half of a surrogate pair is no text
        if "\0" in source + target:
            raise ValueError("a zero byte")
        return source, target

    def _parquet(self, path: Path) -> Iterator[Pair]:
        arrow(path)
        from pyarrow import ArrowException, parquet

        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                languages = [self.source, self.target]
                columns = ["translation"] if "translation" in file.schema_arrow.names else languages
                for record in chain.from_iterable(rows.to_pylist() for rows in file.iter_batches(columns=columns)):
                    number += 1
                    yield self._of_record(record)
        except (OSError, ArrowException) as error:
            raise DataError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
        except (*NO_RECORD, ValueError) as error:
            raise DataError(f"{path}, row {number}: expected text in {self.source} and {self.target}") from error


def columns_of(path: Path, number: int, line: str) -> Pair:
    """The two columns of a line. DataError where there are not two."""
    columns = tuple(column.strip() for column in line.split("\t"))
    if len(columns) != 2:
        got = f"{len(columns)} column{'s' * (len(columns) > 1)}: {line[:60]!r}"
        raise DataError(f"{path}, line {number}: expected source, tab, target, got {got}")
    return columns


def _aligned(source_path: Path, target_path: Path, bad: str | None) -> Iterator[Pair]:
    paths, filled = (source_path, target_path), [False, False]
    for number, pair in enumerate(zip_longest(*(lines_of(path, bad=bad) for path in paths)), start=1):
        if None in pair:
            short, long = paths if pair[0] is None else paths[::-1]
            if number == 1:
                raise DataError(f"{short}, line 1: the file is empty")
            raise DataError(
                f"{long}, line {number}: has no partner; {short} has {number - 1} lines. "
                "Line N of one must translate line N of the other."
            )
        filled = [known or line != "" for known, line in zip(filled, pair, strict=True)]
        yield pair
    for path, has_text in zip(paths, filled, strict=True):
        if not has_text:
            raise DataError(f"{path}, line 1: the file is empty")
