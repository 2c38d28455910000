"""From files to token ids: formats, tokenizers, what is left out, prepared folders, the dates."""

from __future__ import annotations

import datetime
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepare_text
import pytest
import train_translation
from command_line import CommandError
from hypothesis import strategies as st
from translation.data import Examples
from translation.dates import date_corpus, forms_of, ordinal, write
from translation.prepare import encode, load_prepared
from translation.settings import TextSettings
from translation.text import Pair, Text
from translation.tokens import BOS, EOS, PAD, UNKNOWN, BpeTokenizer, CharacterTokenizer, load_tokenizer

TEXTS = ["Ein Hund läuft über das Gras.", "A dog runs across the grass.", "Zwei  Räume", "two\tspaces, 3½ €", "犬 🐕"]


def read_all(folder: Path, *languages: str, lowercase: bool = False) -> dict[str, list[Pair]]:
    text = Text(folder, *languages, lowercase)
    return {part: list(text.pairs(part)) for part in ("train", "val", *text.tests)}


def test_formats(tmp_path: Path) -> None:
    """Several files of a part, by name, plain and packed; columns of a TSV in the order of its name; two test sets."""
    files = {
        "train.de": "\ufeffEin Hund.\n Zwei\u2028Hunde. \n\nDrei Hunde.\n".encode(),
        "train.en.gz": gzip.compress(b"A dog.\r\nTwo dogs.\r\n\r\nThree dogs."),
        "train2.en-de.tsv": "\ufeffone\teins\r\n\ntwo \t zwei\x85\n".encode(),
        "train3.jsonl.gz": gzip.compress(b'{"de": "vier ", "en": "four", "id": 4}\n'),
        "train4.jsonl": b'{"translation": {"de": "f\\u00fcnf", "en": "five"}}',
        "val.de-en.tsv": b"Hund\tdog\n", "test_2016.de": b"A\n", "test_2016.en": b"B\n", "test_2017.jsonl": b"\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pairs = {
        "train": [("Ein Hund.", "A dog."), ("Zwei\u2028Hunde.", "Two dogs."), ("", ""), ("Drei Hunde.", "Three dogs."),
            ("eins", "one"), ("zwei", "two"), ("vier", "four"), ("fünf", "five")],
        "val": [("Hund", "dog")], "test_2016": [("A", "B")], "test_2017": [],
    }  # fmt: skip
    assert read_all(tmp_path, "de", "en") == pairs
    assert read_all(tmp_path, "en", "de") == {name: [pair[::-1] for pair in part] for name, part in pairs.items()}
    lower = {name: [(a.lower(), b.lower()) for a, b in part] for name, part in pairs.items()}
    assert read_all(tmp_path, "de", "en", lowercase=True) == lower


SENTENCE = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20).filter(
    lambda text: text == text.strip("\ufeff").strip()
)
DAMAGE = st.tuples(st.sampled_from(("change", "insert", "cut", "end")), st.floats(0, 1), st.integers(0, 255))
FILES = st.fixed_dictionaries(
    {
        "pairs": st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=4),
        "format": st.sampled_from(("aa", "aa-bb.tsv", "jsonl")),
        "packed": st.booleans(),
        "damage": st.lists(DAMAGE, max_size=4),
    }
)


@pytest.mark.full
def test_damaged_files(fuzz: Callable[..., None], tmp_path: Path) -> None:
    """Files with bytes changed: right data, or a refusal in one line."""

    def damaged(data: bytes, damage: list[tuple[str, float, int]]) -> bytes:
        for way, share, byte in damage:
            place = round(share * len(data))
            ways = {"change": (bytes([byte]), 1), "insert": (bytes([byte]), 0), "cut": (b"", byte)}
            middle, rest = ways.get(way, (b"", len(data)))
            data = data[:place] + middle + data[place + rest :]
        return data

    def check(drawn: dict[str, Any]) -> None:
        pairs, form = drawn["pairs"], drawn["format"]
        for old in tmp_path.iterdir():
            old.unlink()
        for part, damage in (("train", drawn["damage"]), ("val", [])):
            for ending in ("aa", "bb") if form == "aa" else (form,):
                line = {"aa": "{0}", "bb": "{1}", "aa-bb.tsv": "{0}\t{1}"}.get(ending, "{2}")
                data = "".join(line.format(a, b, json.dumps({"aa": a, "bb": b})) + "\n" for a, b in pairs).encode()
                data = gzip.compress(data) if drawn["packed"] else data
                path = tmp_path / f"{part}.{ending}{'.gz' * drawn['packed']}"
                path.write_bytes(damaged(data, damage if ending != "bb" else []))
        text = Text(tmp_path, "aa", "bb")
        assert [*text.pairs("val")] == pairs
        try:
            found = [*text.pairs("train")]
        except CommandError as refused:
            assert drawn["damage"] and "\n" not in str(refused) and f"{tmp_path}/train" in str(refused)
        else:
            assert found == pairs if not drawn["damage"] else not any("\n" in s or "\0" in s for s in sum(found, ()))

    fuzz(check, FILES)


def test_bpe(capsys: pytest.CaptureFixture[str]) -> None:
    """Every text comes back, by the ids of the library; words that were seen are looked up."""
    tokenizer = BpeTokenizer.train(TEXTS[:2] * 10, vocabulary=300)
    unseen = [*TEXTS, "</s> is <pad>ding", "\u2028 ﬁ e\u0301", "one  two", "", "one\u3000two", "a\xa0 b", "it's, (one)"]
    for part in (unseen[:4], unseen, unseen[::-1], []):
        ids = tokenizer.encode(part)
        assert [tokenizer.decode(i) for i in ids] == part
        assert all(EOS < i < tokenizer.size for sentence in ids for i in sentence), "special tokens are not text"
        assert load_tokenizer(tokenizer.to_json()).encode(part) == ids
    ids = tokenizer.encode(TEXTS[:1])[0]
    assert tokenizer.decode([BOS, *ids, EOS, PAD]) == TEXTS[0] and len(ids) < len(TEXTS[0])
    assert BpeTokenizer.train(TEXTS[:2] * 10, vocabulary=300).to_json() == tokenizer.to_json()
    assert capsys.readouterr().out == "learning BPE from 20 lines\n" * 2
    # Very long words would need minutes; the rest of their line is used.
    line, long = TEXTS[1], "x" * 200_000
    other = BpeTokenizer.train([line, f"{line} {long} {line}", "y" * 1000] * 10, vocabulary=400)
    assert capsys.readouterr().out == "learning BPE from 30 lines, without 10 words of more than 1000 characters\n"
    assert other.to_json() == BpeTokenizer.train([line, f"{line}  {line}", "y" * 1000] * 10, 400).to_json()


def test_characters() -> None:
    tokenizer = CharacterTokenizer.train(TEXTS[:2])
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(TEXTS[:2])] == TEXTS[:2]
    assert tokenizer.encode(["¿"]) == [[UNKNOWN]] and tokenizer.decode([BOS, UNKNOWN, EOS, PAD]) == "?"
    assert load_tokenizer(tokenizer.to_json()).encode(TEXTS[:2]) == tokenizer.encode(TEXTS[:2])


def test_encoding_leaves_out_what_cannot_be_trained_on() -> None:
    tokenizer, left_out = CharacterTokenizer("abc"), Counter()
    a, b, c = (tokenizer.encode([character])[0][0] for character in "abc")
    pairs = [("ab", "c"), ("", "a"), ("a", ""), ("abcab", "a"), ("a", "abcab"), ("abcc", "abc"), ("a", "abc")]
    examples = encode(pairs, tokenizer, TextSettings(max_length=5), left_out, 2.0)
    assert left_out == {"with a blank side": 2, "above --max-length 5": 2, "above --max-ratio 2": 1}
    assert examples.tokens.tolist() == [a, b, EOS, BOS, c, EOS, a, b, c, c, EOS, BOS, a, b, c, EOS]
    assert examples.index.tolist() == [(0, 3, 3), (6, 5, 5)]


def prepared(folder: Path, out: Path, *options: str) -> Examples:
    languages = ["--source", "digits", "--target", "words", "--vocabulary", "300", "--max-length", "32"]
    assert prepare_text.main(["--data", str(folder), "--out", str(out), *languages, *options]) == 0
    return load_prepared(out).train


def texts_of(folder: Path) -> list[str]:
    text = load_prepared(folder)
    index, ids = text.train.index, text.train.tokens
    return [text.tokenizer.decode(ids[start : start + n].tolist()) for start, n, _ in index.tolist()]


def test_preparing(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left out is counted; of equal pairs the first stays; what did not change is not prepared again."""
    numbers = (text / "train.digits").read_text().split()
    rows = [
        ("1", "one"),
        ("2", "two"),
        ("1", "one"),
        ("", "one"),
        ("1", "one " * 40),
        ("1", "one two three four"),
        ("3", "three"),
    ]
    (text / "train2.jsonl").write_text("".join(json.dumps({"digits": d, "words": w}) + "\n" for d, w in rows))
    (text / "train3.digits-words.tsv").write_bytes(b"2\ttwo\ttoo many\n2\n\xff\ttwo\n")
    (text / "train4.digits").write_bytes(b"2\n\xff\n\xff\n")
    (text / "train4.words").write_bytes(b"\xff\ntwo\n\xff\n")
    (text / "train5.jsonl").write_text('{"digits": "2"}\n[\n')
    out = tmp_path / "out"
    prepared(text, out, "--max-ratio", "3", "--skip-bad")
    printed = capsys.readouterr().out
    assert f"train: {len(numbers) + 15} pairs, left out " in printed
    for count in (
        "1 with a blank side",
        "1 above --max-length 32",
        "1 above --max-ratio 3",
        "1 duplicates",
        "8 that cannot",
    ):
        assert count in printed
    assert texts_of(out) == [*numbers, "1", "2", "3"]
    val = (text / "val.digits").read_text().split()
    assert [source for source, _ in load_prepared(out).val_pairs] == val and [*load_prepared(out).tests] == ["test_a"]
    prepared(text, out, "--max-ratio", "3", "--skip-bad")
    assert f"{out}: is prepared already" in capsys.readouterr().out
    prepared(text, out, "--max-ratio", "3", "--skip-bad", "--keep-duplicates")
    assert f"{out}: preparing again" in capsys.readouterr().out
    assert texts_of(out) == [*numbers, "1", "2", "1", "3"]
    (text / "val.digits").write_text("\n".join(["7", *val[1:]]))
    prepared(text, out, "--max-ratio", "3", "--skip-bad", "--keep-duplicates")
    assert load_prepared(out).val_pairs[0][0] == "7"


def test_a_preparation_that_was_not_finished_or_damaged_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(text, tmp_path / "out")
    with (tmp_path / "out" / "train.tokens").open("r+b") as file:
        file.seek(40)
        file.write(b"x")
    arguments = ["--data", str(tmp_path / "out"), "--out", str(tmp_path / "run"), "--device", "cpu", "--steps", "1"]
    assert train_translation.main(arguments) == 2
    assert "train.tokens: is damaged or cut off; prepare the text again\n" in capsys.readouterr().err
    (tmp_path / "out" / "prepared.json").unlink()
    assert train_translation.main(arguments) == 2
    assert "was not prepared to the end by this version" in capsys.readouterr().err
    assert len(prepared(text, tmp_path / "out")) > 100


def test_how_dates_are_written() -> None:
    """By hand; and no text is written for two dates, of those that collide most easily."""
    for date, form, text in (
        ((1998, 3, 3), "the {th} of {month} {y}", "the 3rd of March 1998"),
        ((2031, 10, 14), "{weekday}, {d} {mon} {y}", "Tuesday, 14 Oct 2031"),
        ((2004, 11, 25), "{m}/{d}/{y}", "11/25/2004"),
        ((2000, 2, 29), "the {word} of {month} {y}", "the twenty-ninth of February 2000"),
        ((1950, 6, 1), "{d} {mon} '{yy}", "1 Jun '50"),
    ):
        assert form in forms_of(datetime.date(*date)) and write(datetime.date(*date), form) == text
    written = [ordinal(day) for day in range(1, 32)]
    assert [w for w in written if not w.endswith("th")] == ["1st", "2nd", "3rd", "21st", "22nd", "23rd", "31st"]
    read: dict[str, datetime.date] = {}
    for year in (1907, 1999, 2007, 2099):
        for day in range(0, 365, 3):
            date = datetime.date(year, 1, 1) + datetime.timedelta(days=day)
            for form in forms_of(date):
                assert read.setdefault(write(date, form), date) == date


def test_dates() -> None:
    """They repeat with their seed, and no held-out date is in the training text."""
    parts = date_corpus(train=300, held_out=100, writings=2, seed=7)
    assert date_corpus(300, 100, 2, seed=7) == parts and date_corpus(300, 100, 2, seed=8)[0] != parts[0]
    train, val, test = ({iso for _, iso in pairs} for pairs in parts)
    assert (len(train), len(val), len(test), len(parts[0])) == (300, 100, 100, 600)
    assert not train & val and not train & test and not val & test
    with pytest.raises(CommandError, match="--dates 73000 and twice --held-out 25 are more than the 73049 dates"):
        date_corpus(73000, 25, 2, seed=7)
