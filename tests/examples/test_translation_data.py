"""Reading files, good and bad; the vocabulary; batches."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from captioning.scenes import Vocabulary, make_scenes
from command_line import DataError, read_lines
from translation import data
from translation.data import Batch, Batches, Examples, Share, collate, plan_batches
from translation.options import TextSettings
from translation.prepare import encode
from translation.text import Pair, Text
from translation.tokens import BOS, EOS, PAD, UNKNOWN, BpeTokenizer, CharacterTokenizer, Rows, load_tokenizer
from translation_options import random_examples

CPU = torch.device("cpu")
TEXTS = ["Ein Hund läuft über das Gras.", "A dog runs across the grass.", "Zwei  Räume", "two\tspaces, 3½ €", "犬 🐕"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pairs to train on, one half of them zipped, two to validate on, and two test sets."""
    (tmp_path / "train.de").write_bytes("Ein Hund.\n Zwei\u2028Hunde. \nDrei Hunde.\n".encode())
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"A dog.\r\nTwo dogs.\r\nThree dogs."))
    for name in ("val", "test_2016", "test_2017"):
        (tmp_path / f"{name}.de").write_text("Hund\nHunde\n")
        (tmp_path / f"{name}.en").write_text("dog\ndogs\n")
    return tmp_path


def read_all(folder: Path, *languages: str, lowercase: bool = False) -> dict[str, list[Pair]]:
    text = Text(folder, *languages, lowercase)
    return {part: list(text.pairs(part)) for part in ("train", "val", *text.tests)}


def test_reads_plain_and_zipped(folder: Path) -> None:
    read = read_all(folder, "de", "en")
    assert read["train"] == [("Ein Hund.", "A dog."), ("Zwei\u2028Hunde.", "Two dogs."), ("Drei Hunde.", "Three dogs.")]
    assert read["val"] == [("Hund", "dog"), ("Hunde", "dogs")]
    assert list(read) == ["train", "val", "test_2016", "test_2017"]
    assert read_all(folder, "en", "de")["val"] == [("dog", "Hund"), ("dogs", "Hunde")]
    lower = read_all(folder, "de", "en", lowercase=True)
    assert lower["train"][0] == ("ein hund.", "a dog.") and lower["val"][0] == ("hund", "dog")
    assert all(pair == (pair[0].lower(), pair[1].lower()) for pairs in lower.values() for pair in pairs)


def test_formats(folder: Path) -> None:
    """Several files of a part, by name; columns of a TSV in the order of its name."""
    (folder / "train2.en-de.tsv").write_bytes("\ufeffone\teins\r\n\ntwo \t zwei\x85\n".encode())
    (folder / "train3.jsonl.gz").write_bytes(gzip.compress(b'{"de": "vier ", "en": "four", "id": 4}\n'))
    (folder / "train4.jsonl").write_text('{"translation": {"de": "f\\u00fcnf", "en": "five"}}')
    assert read_all(folder, "de", "en")["train"][3:] == [
        ("eins", "one"), ("zwei", "two"), ("vier", "four"), ("fünf", "five")
    ]  # fmt: skip
    assert read_all(folder, "en", "de")["train"][4] == ("two", "zwei")


def test_formats_of_arrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"de": ["eins", "zwei"], "en": ["one", "two"]}
    parquet.write_table(arrow.table(columns), folder / "train2.parquet")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    parquet.write_table(arrow.table({"id": [1, 2], "translation": rows}), folder / "train3.parquet")
    with arrow.output_stream(str(folder / "train4.de-en.tsv.zst"), compression="zstd") as file:
        file.write(b"drei\tthree\n" * 9999)
    numbers = [("eins", "one"), ("zwei", "two")]
    assert read_all(folder, "de", "en")["train"][3:] == [*numbers, *numbers, *[("drei", "three")] * 9999]

    packed = (folder / "train4.de-en.tsv.zst").read_bytes()
    (folder / "train4.de-en.tsv.zst").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"train4.de-en.tsv.zst: cannot be read: Truncated"):
        read_all(folder, "de", "en")
    (folder / "train4.de-en.tsv.zst").unlink()
    (folder / "train3.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"train3.parquet: cannot be read"):
        read_all(folder, "de", "en")
    parquet.write_table(arrow.table({"de": ["eins", None], "en": ["one", "two"]}), folder / "train3.parquet")
    with pytest.raises(DataError, match=r"train3.parquet, row 2: expected text in de and en"):
        read_all(folder, "de", "en")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"train2.parquet: needs pyarrow: pip install"):
        read_all(folder, "de", "en")


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "train.de"
    path.write_bytes(b"\xef\xbb\xbfHund\n\nKatze")
    assert read_lines(path) == ["Hund", "", "Katze"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.de", b"one\ntwo\n", r"train\.en\.gz, line 3: has no partner; .*train\.de has 2"),
        ("train.de", b"1\n2\n3\n4\n", r"train\.de, line 4: has no partner"),
        ("val.en", b"", r"val\.en, line 1: the file is empty"),
        ("val.en", b"\n \n", r"val\.en, line 1: the file is empty"),
        ("val.de", b"Hund\nH\xfcndchen\n", r"val\.de, line 2: not UTF-8 \(invalid start byte at byte 1\)"),
        ("val.de", "Hund\nHunde\n".encode("utf-16-le"), r"val\.de, line 1: holds a zero byte"),
        ("val.de", "Hund\nHunde\n".encode("utf-16"), r"val\.de, line 1: not UTF-8"),
        ("train.en.gz", b"A dog.\n", r"train\.en\.gz: cannot be read: Not a gzipped file"),
        ("train.en.gz", gzip.compress(b"A dog.\n", mtime=0)[:-9], r"train\.en\.gz: cannot be read"),
        ("test_2017.en", None, r"test_2017\.en: no such file, nor test_2017\.en\.gz"),
        ("val.de", None, r"val\.de: no such file"),
        ("val.de.gz", gzip.compress(b"x", mtime=0), r"val\.de\.gz: val\.de has the same name"),
        ("val.jsonl", b"{}\n", r"val\.jsonl: val\.de has the same name"),
        (
            "test2.de-en.tsv",
            b"eins\tone\nzwei\n",
            r"test2\.de-en\.tsv, line 2: expected source, tab, target, got 1 column: 'zwei'",
        ),
        (
            "test2.jsonl",
            b'{"de": "eins", "en": "one"}\n\n{"de": 1}',
            r'test2\.jsonl, line 3: expected {"de": "..", "en"',
        ),
        ("test2.jsonl", b'{"de": "\\ud800", "en": "one"}', r"test2\.jsonl, line 1: expected"),
        ("test2.jsonl", b'{"de": "a\\u0000", "en": "one"}', r"test2\.jsonl, line 1: expected"),
        ("test2.jsonl", b"[" * 10**5, r"test2\.jsonl, line 1: expected"),
        ("test2.jsonl", b"[]\n", r"test2\.jsonl, line 1: expected"),
    ],
)
def test_bad_files_name_file_and_line(folder: Path, name: str, content: bytes | None, message: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_all(folder, "de", "en")


def test_bad_folder_and_languages(folder: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        read_all(folder / "nowhere", "de", "en")
    with pytest.raises(DataError, match=r"train\.fr: no such file, nor train\.fr\.gz"):
        read_all(folder, "fr", "en")
    with pytest.raises(DataError, match="both 'de'"):
        read_all(folder, "de", "de")


def test_very_long_words_are_left_out_of_learning(capsys: pytest.CaptureFixture[str]) -> None:
    """They would need minutes; the rest of their line is used."""
    line, long = TEXTS[1], "x" * 200_000
    tokenizer = BpeTokenizer.train([line, f"{line} {long} {line}", "y" * 1000] * 10, vocabulary=400)
    assert capsys.readouterr().out == ("learning BPE from 30 lines, without 10 words of more than 1000 characters\n")
    assert tokenizer.to_json() == BpeTokenizer.train([line, f"{line}  {line}", "y" * 1000] * 10, 400).to_json()
    assert capsys.readouterr().out == "learning BPE from 30 lines\n"
    assert tokenizer.decode(tokenizer.encode([long])[0]) == long


def test_bpe_gives_every_text_back() -> None:
    tokenizer = BpeTokenizer.train(TEXTS[:2] * 10, vocabulary=300)
    unseen = [*TEXTS, "</s> is <pad>ding", "\u2028 ﬁ e\u0301"]
    ids = tokenizer.encode(unseen)
    assert [tokenizer.decode(i) for i in ids] == unseen
    assert all(EOS < i < tokenizer.size for sentence in ids for i in sentence), "special tokens are not text"
    assert tokenizer.decode([BOS, *ids[0], EOS, PAD]) == unseen[0]
    assert len(tokenizer.encode(TEXTS[:1])[0]) < len(TEXTS[0]), "frequent words are one token"
    assert load_tokenizer(tokenizer.to_json()).encode(unseen) == ids
    assert BpeTokenizer.train(TEXTS[:2] * 10, vocabulary=300).to_json() == tokenizer.to_json()


def test_characters_give_every_known_text_back() -> None:
    tokenizer = CharacterTokenizer.train(TEXTS[:2])
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(TEXTS[:2])] == TEXTS[:2]
    assert tokenizer.encode(["¿"]) == [[UNKNOWN]]
    ids = tokenizer.encode(["Hund"])[0]
    assert tokenizer.decode([BOS, *ids, EOS, PAD]) == "Hund"
    assert load_tokenizer(tokenizer.to_json()).encode(TEXTS[:2]) == tokenizer.encode(TEXTS[:2])


def test_encoding_leaves_out_what_cannot_be_trained_on() -> None:
    options = TextSettings("a", "b", 10, 5, 9.0, False, False)
    tokenizer = CharacterTokenizer("abc")
    a, b, c = (tokenizer.encode([character])[0][0] for character in "abc")
    pairs = [("ab", "c"), ("", "a"), ("a", ""), ("abcab", "a"), ("a", "abcab"), ("abcc", "abc"), ("a", "abc")]
    examples, kept, left_out = encode(pairs, tokenizer, options, 2.0)
    assert kept == [("ab", "c"), ("abcc", "abc")]
    assert left_out == {"with a blank side": 2, "above --max-length 5": 2, "above --max-ratio 2": 1}
    assert examples.tokens.tolist() == [a, b, EOS, BOS, c, EOS, a, b, c, c, EOS, BOS, a, b, c, EOS]
    assert examples.index.tolist() == [(0, 3, 3), (6, 5, 5)]
    assert not len(encode([("", "a")], tokenizer, options)[0])


@pytest.mark.parametrize(("seed", "length_step"), [(None, 1), (1, 1), (1, 8)])
def test_batches_hold_every_pair_once_within_the_budget(
    seed: int | None, length_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "POOL", 300)
    examples = random_examples(500)
    plan = plan_batches(examples, 100, np.random.default_rng(seed) if seed else None, length_step)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    lengths = np.maximum(examples.index["source"], examples.index["target"])
    for batch in plan:
        longest = lengths[batch].max()
        assert -(-longest // length_step) * length_step * len(batch) <= 100
    if length_step == 1:
        padded = sum(lengths[batch].max() * len(batch) for batch in plan)
        assert padded < 1.05 * lengths.sum(), "the longer sides in a batch are similar"
    assert [len(batch) for batch in plan_batches(random_examples(20), 1)] == [1] * 20, "each is above the budget"


def test_order_depends_on_the_generator_alone() -> None:
    examples = random_examples(100)
    first, again, other = (
        [batch.tolist() for batch in plan_batches(examples, 60, np.random.default_rng([5, epoch]))]
        for epoch in (0, 0, 1)
    )
    assert first == again != other


def as_lists(batch: Batch | Share) -> list[object]:
    return [[t.tolist() for t in (part.source, part.target_in, part.target_out)] for part in batch.parts] + [
        batch.tokens
    ]


def test_collated_batch() -> None:
    examples = Examples.of(Rows.of([[5], [8, 9]]), Rows.of([[6, 7], []]))
    (batch,) = Batches(examples, [np.array([0, 1])]).load(CPU)
    assert batch.source.tolist() == [[5, EOS, PAD], [8, 9, EOS]]
    assert batch.target_in.tolist() == [[BOS, 6, 7], [BOS, EOS, PAD]]
    assert batch.target_out.tolist() == [[6, 7, EOS], [EOS, PAD, PAD]]
    assert (batch.target_tokens, batch.tokens) == (4, 9)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    """Not the batches, not those that are left after an interruption, not torch's random numbers."""
    examples = random_examples(200)
    batches = Batches(examples, plan_batches(examples, 100), rank=1, size=2, accumulate=2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    expected = [as_lists(batch) for batch in batches.load(CPU)]
    assert [as_lists(batch) for batch in batches.load(CPU, skip=3, workers=workers)] == expected[3:]
    assert not list(batches.load(CPU, skip=len(batches.plan), workers=workers))
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_are_copied_to_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pinned memory, in copies that do not block; the examples of captioning copy each tensor so."""
    calls: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: calls.append("pinned") or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, **options: calls.append((str(device), options)) or t)
    copies: list[object] = 3 * ["pinned", ("cuda", {"non_blocking": True})]
    batch = collate(random_examples(3), np.arange(3))
    for part in (batch, Share([batch], 3, 2)):
        calls.clear()
        part.to(torch.device("cuda"))
        assert calls == copies
        calls.clear()
        part.pin_memory()
        assert calls == ["pinned"] * 3
    scenes, rows = make_scenes(3, 1), torch.tensor([0, 2])
    calls.clear()
    scenes.features(rows, "cuda")
    scenes.tokens(rows, Vocabulary(), "cuda")
    assert calls == copies
