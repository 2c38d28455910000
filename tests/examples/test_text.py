"""From files to token ids: formats, damage, tokenizers, what is left out, prepared folders, the dates."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import prepare_text
import pytest
import train_translation
from example_runs import in_words
from translation.dates import date_corpus
from translation.prepare import load_prepared
from translation.text import Pair, Text
from translation.tokens import BOS, EOS, PAD, UNKNOWN, BpeTokenizer, CharacterTokenizer, load_tokenizer

TEXTS = ["Ein Hund läuft über das Gras.", "A dog runs across the grass.", "Zwei  Räume", "two\tspaces, 3½ €", "犬 🐕"]
FILES = {
    "train.de": "\ufeffEin Hund.\n Zwei\u2028Hunde. \n\nDrei Hunde.\n".encode(),
    "train.en.gz": gzip.compress(b"A dog.\r\nTwo dogs.\r\n\r\nThree dogs.", mtime=0),
    "train2.en-de.tsv": "\ufeffone\teins\r\n\ntwo \t zwei\x85\n".encode(),
    "train3.jsonl.gz": gzip.compress(b'{"de": "vier ", "en": "four", "id": 4}\n', mtime=0),
    "train4.jsonl": b'{"translation": {"de": "f\\u00fcnf", "en": "five"}}',
    "val.de-en.tsv": b"Hund\tdog\n", "test_2016.de": b"A\n", "test_2016.en": b"B\n", "test_2017.jsonl": b"\n",
}  # fmt: skip
PAIRS = {
    "train": [("Ein Hund.", "A dog."), ("Zwei\u2028Hunde.", "Two dogs."), ("", ""), ("Drei Hunde.", "Three dogs."),
        ("eins", "one"), ("zwei", "two"), ("vier", "four"), ("fünf", "five")],
    "val": [("Hund", "dog")], "test_2016": [("A", "B")], "test_2017": [],
}  # fmt: skip


def test_formats(tmp_path: Path) -> None:
    """Several files of a part, plain and packed; a TSV has its columns in the order of its name; two test sets."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)

    def read(*languages: str, lowercase: bool = False) -> dict[str, list[Pair]]:
        text = Text(tmp_path, *languages, lowercase)
        return {part: list(text.pairs(part)) for part in ("train", "val", *text.tests)}

    assert read("de", "en") == PAIRS
    assert read("en", "de") == {name: [pair[::-1] for pair in part] for name, part in PAIRS.items()}
    lower = {name: [(a.lower(), b.lower()) for a, b in part] for name, part in PAIRS.items()}
    assert read("de", "en", lowercase=True) == lower


def test_characters() -> None:
    tokenizer = load_tokenizer(CharacterTokenizer.train(["cab", "ba"]).to_json())
    assert tokenizer.encode(["¿ab"]) == [[UNKNOWN, 4, 5]] and tokenizer.decode([BOS, UNKNOWN, 4, 6, EOS, PAD]) == "?ac"


def test_bpe() -> None:
    """Every text comes back, whether its words were seen or not, and special tokens are not text."""
    tokenizer = BpeTokenizer.train(TEXTS[:2] * 10, vocabulary=300)
    unseen = [*TEXTS, "</s> is <pad>ding", "\u2028 ﬁ e\u0301", "one  two", "", "one\u3000two", "a\xa0 b", "it's, (one)"]
    for part in (unseen[:4], unseen, unseen[::-1], []):
        ids = tokenizer.encode(part)
        assert [tokenizer.decode(i) for i in ids] == part and all(EOS < i < 300 for sentence in ids for i in sentence)
        assert load_tokenizer(tokenizer.to_json()).encode(part) == ids
    ids = tokenizer.encode(TEXTS[:1])[0]
    assert tokenizer.decode([BOS, *ids, EOS, PAD]) == TEXTS[0] and len(ids) < len(TEXTS[0])


@pytest.mark.parametrize("more", [0, pytest.param(20000, marks=pytest.mark.full)])  # than are encoded at once
def test_preparing(more: int, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left out is counted; of equal pairs the first stays; what did not change is not prepared again; what is
    damaged or was not finished is refused."""
    out, numbers = tmp_path / "out", [*(text / "train.digits").read_text().split(), *map(str, range(1000, 1000 + more))]

    def prepared(*options: str) -> list[str]:
        arguments = ["--source", "digits", "--target", "words", "--vocabulary", "300", "--max-length", "32", *options]
        arguments += ["--data", str(text), "--out", str(out), "--max-ratio", "3", "--skip-bad"]
        assert prepare_text.main(arguments) == 0
        found = load_prepared(out)
        starts = found.train.index.tolist()
        return [found.tokenizer.decode(found.train.tokens[i : i + n].tolist()) for i, n, _ in starts]

    rows = [(n, in_words(n)) for n in numbers[-more:] if more]
    rows += [(n, words) for n in ("1", "", "3") for words in ("one", "one", "a " * 40, "one " * 9)]
    (text / "train2.jsonl").write_text("".join(json.dumps({"digits": d, "words": w}) + "\n" for d, w in rows))
    (text / "train3.digits-words.tsv").write_bytes(b"2\ttwo\ttoo many\n2\n\xff\ttwo\n")
    assert prepared() == [*numbers, "1", "3"]
    printed = capsys.readouterr().out
    for count in ("with a blank side", "that cannot be", "duplicates"):
        assert f"3 {count}" in printed, printed
    assert "2 above --max-length 32" in printed and "2 above --max-ratio 3" in printed
    assert prepared() and f"{out}: is prepared already" in capsys.readouterr().out
    assert prepared("--keep-duplicates") == [*numbers, "1", "1", "3", "3"]
    assert [*load_prepared(out).tests] == ["test_a"] and load_prepared(out).val_pairs[1] == ("117", "one one seven")

    arguments = ["--data", str(out), "--out", str(tmp_path / "run"), "--device", "cpu", "--steps", "1"]
    with (out / "train.tokens").open("r+b") as file:
        file.write(b"x")
    for message in ("train.tokens: is damaged or cut off", "was not prepared to the end by this"):
        assert train_translation.main(arguments) == 2
        assert message in capsys.readouterr().err
        (out / "prepared.json").unlink(missing_ok=True)


def test_dates() -> None:
    """The same ones for a seed; none that is held out is in the training."""
    parts = date_corpus(train=300, held_out=100, writings=2, seed=7)
    assert date_corpus(300, 100, 2, seed=7) == parts and date_corpus(300, 100, 2, seed=8)[0] != parts[0]
    train, val, test = ({iso for _, iso in pairs} for pairs in parts)
    assert len(train | val | test) == len(train) + len(val) + len(test) == 500
