"""The user's text as pairs of sentences, read as a stream from files of several formats."""

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

from command_line import CommandError, columns_of, lines_of, pairs_of

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
        self.readers: dict[str, Callable[[str], Pair]] = {  # of a line with both languages, by the end of the name
            f".{source}-{target}.tsv": columns_of,
            f".{target}-{source}.tsv": lambda line: columns_of(line)[::-1],
            ".jsonl": self._of_record,
        }
        if not self.folder.is_dir():
            raise CommandError(f"{folder}: no such folder")
        if source == target:
            raise CommandError(f"{folder}: source and target are both {source!r}; name two languages")
        self.parts = {part: sum(self._find(part).values(), []) for part in ("train", "val")}
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
            name = path.name.removesuffix(".gz")
            read = next((read for ending, read in self.readers.items() if name.endswith(ending)), None)
            for pair in pairs_of(path, read, bad) if read else _aligned(path, next(paths), bad):
                if BAD in pair:
                    self.num_bad += 1
                else:
                    yield (pair[0].lower(), pair[1].lower()) if self.lowercase else pair

    def _find(self, start: str) -> dict[str, list[Path]]:
        """Name -> the file of both languages, or that of the source and that of the target."""
        languages = [f".{self.source}", f".{self.target}"]
        found: dict[str, dict[Path, str]] = {}
        for path in sorted(self.folder.glob(f"{start}*")):
            whole = path.name.removesuffix(".gz")
            for ending in (*self.readers, *languages):
                if whole.endswith(ending) and path.is_file():
                    found.setdefault(whole.removesuffix(ending), {})[path] = ending
        for name, files in found.items():
            endings = list(files.values())
            if sorted(endings) != sorted(languages) and (len(files) != 1 or endings[0] in languages):
                names = " and ".join(path.name for path in files)
                needed = f"{name}{languages[0]} and {name}{languages[1]}, or one file of both languages"
                raise CommandError(f"{self.folder}: found {names}; needs {needed}")
        return {name: sorted(files, key=lambda path: files[path] != languages[0]) for name, files in found.items()}

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


def _aligned(source_path: Path, target_path: Path, bad: str | None) -> Iterator[Pair]:
    paths = source_path, target_path
    for number, pair in enumerate(zip_longest(*(lines_of(path, bad) for path in paths)), start=1):
        if None in pair:
            short, long = paths if pair[0] is None else paths[::-1]
            raise CommandError(f"{long}, line {number}: has no partner; {short} has {number - 1} lines")
        yield pair
