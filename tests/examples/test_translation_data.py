"""Reading files, good and bad; the vocabulary; batches."""

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from captioning.scenes import Vocabulary, make_scenes
from command_line import DataError, read_lines
from translation.data import Example, batches_of, collate, encode, plan_batches, read_corpus
from translation.tokens import BOS, EOS, PAD, UNKNOWN, BpeTokenizer, CharacterTokenizer, load_tokenizer

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


def test_reads_plain_and_zipped(folder: Path) -> None:
    corpus = read_corpus(folder, "de", "en")
    assert corpus.train == [("Ein Hund.", "A dog."), ("Zwei\u2028Hunde.", "Two dogs."), ("Drei Hunde.", "Three dogs.")]
    assert corpus.val == [("Hund", "dog"), ("Hunde", "dogs")]
    assert list(corpus.tests) == ["test_2016", "test_2017"]
    assert read_corpus(folder, "en", "de").val == [("dog", "Hund"), ("dogs", "Hunde")]
    lower = read_corpus(folder, "de", "en", lowercase=True)
    assert lower.train[0] == ("ein hund.", "a dog.") and lower.val[0] == ("hund", "dog")
    assert all(pair == (pair[0].lower(), pair[1].lower()) for pairs in lower.tests.values() for pair in pairs)


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "train.de"
    path.write_bytes(b"\xef\xbb\xbfHund\n\nKatze")
    assert read_lines(path) == ["Hund", "", "Katze"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.de", b"one\ntwo\n", r"train\.en\.gz, line 3: has no partner; .* 3 lines and .*train\.de has 2"),
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
    ],
)
def test_bad_files_name_file_and_line(folder: Path, name: str, content: bytes | None, message: str) -> None:
    path = folder / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_corpus(folder, "de", "en")


def test_bad_folder_and_languages(folder: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        read_corpus(folder / "nowhere", "de", "en")
    with pytest.raises(DataError, match=r"train\.fr: no such file, nor train\.fr\.gz"):
        read_corpus(folder, "fr", "en")
    with pytest.raises(DataError, match="both 'de'"):
        read_corpus(folder, "de", "de")


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


def test_encoding_leaves_out_blank_and_long_pairs() -> None:
    tokenizer = CharacterTokenizer("abc")
    a, b, c = (tokenizer.encode([character])[0][0] for character in "abc")
    examples, dropped = encode([("ab", "c"), ("", "a"), ("a", ""), ("abcabc", "a"), ("a", "abcabc")], tokenizer, 5)
    assert dropped == 4 and len(examples) == 1
    assert examples[0].source.tolist() == [a, b, EOS] and examples[0].target.tolist() == [BOS, c, EOS]


def random_examples(count: int) -> list[Example]:
    rng = np.random.default_rng(3)
    return [Example(rng.integers(4, 9, 1 + n % 17), rng.integers(4, 9, 2 + n * 7 % 23)) for n in range(count)]


@pytest.mark.parametrize(("seed", "length_step"), [(None, 1), (1, 1), (1, 8)])
def test_batches_hold_every_example_once_within_the_budget(seed: int | None, length_step: int) -> None:
    examples = random_examples(500)
    plan = plan_batches(examples, 100, random.Random(seed) if seed else None, length_step)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    for batch in plan:
        longest = max(examples[i].length for i in batch)
        assert -(-longest // length_step) * length_step * len(batch) <= 100
    if length_step == 1:
        padded = sum(max(len(examples[i].target) for i in batch) * len(batch) for batch in plan)
        assert padded < 1.15 * sum(len(example.target) for example in examples), "lengths in a batch are similar"
    assert [len(batch) for batch in plan_batches(examples[:20], 1)] == [1] * 20, "each is above the budget"


def test_order_depends_on_the_generator_alone() -> None:
    examples = random_examples(100)
    first = plan_batches(examples, 60, random.Random("epoch 0"))
    assert plan_batches(examples, 60, random.Random("epoch 0")) == first
    assert plan_batches(examples, 60, random.Random("epoch 1")) != first


def test_collated_batch() -> None:
    examples = [
        Example(np.array([5, EOS]), np.array([BOS, 6, 7, EOS])),
        Example(np.array([8, 9, EOS]), np.array([BOS, EOS])),
    ]
    (batch,) = batches_of(examples, [[0, 1]], CPU)
    assert batch.source.tolist() == [[5, EOS, PAD], [8, 9, EOS]]
    assert batch.target_in.tolist() == [[BOS, 6, 7], [BOS, EOS, PAD]]
    assert batch.target_out.tolist() == [[6, 7, EOS], [EOS, PAD, PAD]]
    assert (batch.target_tokens, batch.tokens) == (4, 9)
    assert not list(batches_of(examples, [[0, 1]], CPU, skip=1))


def test_batches_are_copied_to_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of pinned memory, which does not block; the examples of captioning copy each tensor so."""
    calls: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: calls.append("pinned") or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, **options: calls.append((str(device), options)) or t)
    copy: list[object] = ["pinned", ("cuda", {"non_blocking": True})]
    example = Example(np.array([5, EOS]), np.array([BOS, 6, 7, EOS]))
    batch = collate([example], torch.device("cuda"))
    assert batch.target_in.tolist() == [[BOS, 6, 7]] and batch.target_out.tolist() == [[6, 7, EOS]]
    assert calls == copy
    scenes, rows = make_scenes(3, 1), torch.tensor([0, 2])
    calls.clear()
    scenes.features(rows, "cuda")
    scenes.tokens(rows, Vocabulary(), "cuda")
    assert calls == 3 * copy
