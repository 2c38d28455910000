"""The user's text as pairs of sentences, read as a stream from files of several formats."""

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

from command_line import CommandError, columns_of, lines_of

Pair = tuple[str, str]
BAD = "\0"  # a line that cannot be read; text with a zero byte is refused


class Text:
    """The files of two languages in a folder. A part is train, val, or the name of a test set, such as test_2016.

    A part's name begins its files' names. They end in:
        .LANG               one line a sentence; line N of one language translates line N of the other
        .LANG-LANG.tsv      source, tab, target on each line, in the order of the name
        .jsonl              an object on each line, {LANG: sentence, LANG: sentence}; or that as "translation"
    and may be packed, with .gz after the name. train and val are all of their files, by name; each test set is one.
    """

    def __init__(
        self, folder: str | Path, source: str, target: str, lowercase: bool = False, skip_bad: bool = False
    ) -> None:
        """skip_bad: leave out lines of train that are not UTF-8 or no pair, and count them in num_bad. CommandError
        where the folder or a file is missing."""
        self.folder, self.source, self.target, self.lowercase = Path(folder), source, target, lowercase
        self.skip_bad, self.num_bad = skip_bad, 0
        if not self.folder.is_dir():
            raise CommandError(f"{folder}: no such folder")
        if source == target:
            raise CommandError(f"{folder}: source and target are both {source!r}; name two languages")
        self.parts = {
            part: [path for paths in self._find(part).values() for path in paths] for part in ("train", "val")
        }
        for part, found in self.parts.items():
            if not found:
                formats = f"{part}*.{source} and .{target}, .{source}-{target}.tsv or .jsonl"
                raise CommandError(f"{self.folder}: no files {formats}, plain or .gz")
        self.tests = self._find("test")
        self.parts |= self.tests

    def pairs(self, part: str) -> Iterator[Pair]:
        """The stripped pairs of a part. CommandError, with file and line, where they cannot be read."""
        bad = BAD if self.skip_bad and part == "train" else None
        self.num_bad, paths = 0, iter(self.parts[part])
        for path in paths:
            read = self._reader(path)
            for pair in _converted(path, read, bad) if read else _aligned(path, next(paths), bad):
                if BAD in pair:
                    self.num_bad += 1
                else:
                    yield (pair[0].lower(), pair[1].lower()) if self.lowercase else pair

    def _find(self, start: str) -> dict[str, list[Path]]:
        """Name -> the file of both languages, or that of the source and that of the target."""
        both = [f".{self.source}-{self.target}.tsv", f".{self.target}-{self.source}.tsv", ".jsonl"]
        languages = [f".{self.source}", f".{self.target}"]
        found: dict[str, dict[Path, str]] = {}
        for path in sorted(self.folder.glob(f"{start}*")):
            whole = path.name.removesuffix(".gz")
            for ending in (*both, *languages):
                if whole.endswith(ending) and path.is_file():
                    found.setdefault(whole.removesuffix(ending), {})[path] = ending
        for name, files in found.items():
            endings = list(files.values())
            if sorted(endings) != sorted(languages) and (len(files) != 1 or endings[0] in languages):
                names = " and ".join(path.name for path in files)
                needed = f"{name}{languages[0]} and {name}{languages[1]}, or one file of both languages"
                raise CommandError(f"{self.folder}: found {names}; needs {needed}")
        return {name: sorted(files, key=lambda path: files[path] != languages[0]) for name, files in found.items()}

    def _reader(self, path: Path) -> Callable[[str], Pair] | None:
        """What reads a line that has both languages; None for a file of one language. It raises a ValueError or a
        TypeError where the line is something else."""
        name = path.name.removesuffix(".gz")
        if name.endswith(f".{self.source}-{self.target}.tsv"):
            return columns_of
        if name.endswith(".tsv"):
            return lambda line: columns_of(line)[::-1]
        return self._of_record if name.endswith(".jsonl") else None

    def _of_record(self, line: str) -> Pair:
        try:
            record = json.loads(line)
            record = record.get("translation", record)
            source, target = record[self.source].strip(), record[self.target].strip()
        except (LookupError, AttributeError, RecursionError) as error:
            raise ValueError("no such record") from error
        (source + target).encode()  # half of a surrogate pair is no text
        if "\0" in source + target:
            raise ValueError("a zero byte")
        return source, target


def _converted(path: Path, read: Callable[[str], Pair], bad: str | None) -> Iterator[Pair]:
    for number, line in enumerate(lines_of(path, bad), start=1):
        try:
            if line:
                yield read(line)
        except (ValueError, TypeError) as error:
            if bad is None:
                raise CommandError(f"{path}, line {number}: not text in two languages: {line[:60]!r}") from error
            yield BAD, BAD


def _aligned(source_path: Path, target_path: Path, bad: str | None) -> Iterator[Pair]:
    paths, number = (source_path, target_path), 0
    for number, pair in enumerate(zip_longest(*(lines_of(path, bad) for path in paths)), start=1):
        if None in pair:
            short, long = paths if pair[0] is None else paths[::-1]
            raise CommandError(f"{long}, line {number}: has no partner; {short} has {number - 1} lines")
        yield pair
    if not number:
        raise CommandError(f"{source_path}: the file is empty, and so is {target_path}")
