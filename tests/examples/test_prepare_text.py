"""`python examples/prepare_text.py`: what it writes and leaves out, interruptions, and folders that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import prepare_text
import pytest
import torch
import train_translation
from command_line import sha256_of
from translation import prepare
from translation.data import INDEX
from translation.tokens import BpeTokenizer
from translation_options import on_text


def prepared(folder: Path, out: Path, *options: str) -> dict[str, object]:
    """The hashes of what the command wrote."""
    languages = ["--source", "digits", "--target", "words", "--vocabulary", "300", "--max-length", "32"]
    assert prepare_text.main(["--data", str(folder), "--out", str(out), *languages, *options]) == 0
    return json.loads((out / "prepared.json").read_text())["sha256"]


@pytest.fixture
def folder(text: Path, tmp_path: Path) -> Path:
    """The numbers, prepared."""
    prepared(text, tmp_path / "prepared")
    return tmp_path / "prepared"


def test_training_on_it_is_training_on_the_text(
    text: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options need not be given again; others are refused."""
    states = []
    for data, options in ((text, []), (folder, ["--workers", "1"])):
        out = tmp_path / f"on {data.name}"
        arguments = [*on_text(text, out), "--steps", "5", *options]
        if data == folder:
            arguments = [
                a for a in arguments if a not in ("--source", "digits", "--target", "words", str(text), "--data")
            ]
            arguments += ["--data", str(folder)]
        assert train_translation.main(arguments) == 0
        states.append(torch.load(out / "last.pt", weights_only=True))
    assert states[0]["progress"]["losses"] == states[1]["progress"]["losses"]
    assert states[0]["data"] == states[1]["data"] and states[1]["settings"]["target"] == "words"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train_translation.main(["--data", str(folder), "--vocabulary", "500"])
    assert f"{folder} was prepared with --vocabulary 300; give that or nothing, got 500" in capsys.readouterr().err


def test_what_is_left_out_is_counted(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (text / "train2.jsonl").open("w") as file:
        for digits, words in (("1", "one"), ("1", "one"), ("", "one"), ("1", "one " * 40), ("1", "one two three four")):
            print(json.dumps({"digits": digits, "words": words}), file=file)
    (text / "train3.digits-words.tsv").write_bytes(b"2\ttwo\ttoo many\n2\n\xff\ttwo\n")
    (text / "train4.digits").write_bytes(b"2\n\xff\n\xff\n")
    (text / "train4.words").write_bytes(b"\xff\ntwo\n\xff\n")
    (text / "train5.jsonl").write_text('{"digits": "2"}\n[\n')
    arguments = ["--data", str(text), "--source", "digits", "--target", "words", "--out", str(tmp_path / "all")]
    assert prepare_text.main(arguments) == 2
    assert "line 1: expected source, tab, target, got 3 columns: '2\\ttwo\\ttoo many'" in capsys.readouterr().err
    prepared(text, tmp_path / "all", "--max-ratio", "3", "--skip-bad")
    total = len((text / "train.digits").read_text().splitlines()) + 5
    counts = "1 with a blank side, 1 above --max-length 32, 1 above --max-ratio 3, 1 duplicates, 8 that cannot be read"
    assert f"train: {total + 8} pairs, left out {counts}\n" in capsys.readouterr().out
    sizes = [len(np.fromfile(tmp_path / "all" / "train.index", INDEX))]
    prepared(text, tmp_path / "all", "--max-ratio", "3", "--keep-duplicates", "--skip-bad")
    assert "preparing again: --keep-duplicates was False" in capsys.readouterr().out
    sizes.append(len(np.fromfile(tmp_path / "all" / "train.index", INDEX)))
    assert sizes == [total - 4, total - 3]


def test_workers_change_nothing(text: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "CHUNK", 30)
    assert prepared(text, tmp_path / "chunks") == json.loads((folder / "prepared.json").read_text())["sha256"]


def test_words_that_were_seen_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids as those of the library, for every kind of space, also after the words were forgotten."""
    texts = ["one two", "two one", "one  two", " one", "one ", "", "one\u3000two", "one\ttwo", "a\xa0 b", "it's, (one)"]
    tokenizer = BpeTokenizer.train(texts * 5, 300)
    for limit in (200_000, 3):
        monkeypatch.setattr("translation.tokens.KNOWN_WORDS", limit)
        for part in (texts[:4], texts, texts[::-1], []):
            rows = tokenizer.encode_rows(part)
            assert [rows.take(np.array([i])).values.tolist() for i in range(len(part))] == tokenizer.encode(part)


def test_an_interruption_leaves_no_folder_that_can_be_used(
    text: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a change, which is noticed; unchanged text is not prepared again."""
    hashes = prepared(text, folder)
    assert f"{folder}: is prepared already" in capsys.readouterr().out
    (text / "train2.digits").write_text("7\n")
    (text / "train2.words").write_text("seven\n")

    def power_cut(path: Path) -> str:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(prepare, "sha256_of", power_cut)
        prepared(text, folder)
    assert "preparing again: train2.digits changed, train2.words changed" in capsys.readouterr().out
    assert train_translation.main(["--data", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {folder}: its preparation was not finished; run it again\n"
    assert prepared(text, folder) == prepared(text, tmp_path / "other") != hashes


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes], hashed: bool) -> None:
    """Changes a file; hashed: and its hash, as who means harm would do it."""
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    if hashed:
        manifest = json.loads((folder / "prepared.json").read_text())
        manifest["sha256"][name] = sha256_of(folder / name)
        (folder / "prepared.json").write_text(json.dumps(manifest))


def of_index(change: Callable[[np.ndarray], None]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        index = np.frombuffer(content, INDEX).copy()
        change(index)
        return index.tobytes()

    return changed


def of_manifest(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        manifest = json.loads(content)
        change(manifest)
        return json.dumps(manifest).encode()

    return changed


OTHER = "{folder}: holds something else than this version writes; prepare the text again"
DAMAGED = "{folder}/{name}: is damaged or cut off; prepare the text again"
FOREIGN = "{folder}/{name}: is damaged, or not of this version; prepare the text again"


@pytest.mark.parametrize(
    ("name", "change", "hashed", "message"),
    [
        *(
            (name, change, False, DAMAGED)
            for name in prepare.PARTS
            for change in (lambda content: content[:-1], lambda content: content[:40] + b"x" + content[41:])
        ),
        ("prepared.json", lambda content: content[:-9], False, FOREIGN),
        ("prepared.json", lambda content: b"[" * 10**5, False, FOREIGN),
        ("prepared.json", lambda content: b"[1]", False, FOREIGN),
        ("prepared.json", of_manifest(lambda m: m.update(format=99)), False, FOREIGN),
        ("prepared.json", of_manifest(lambda m: m["options"].update(max_length=-1)), False, FOREIGN),
        ("prepared.json", of_manifest(lambda m: m["options"].update(lowercase="yes")), False, FOREIGN),
        ("prepared.json", of_manifest(lambda m: m["options"].update(more=1)), False, FOREIGN),
        ("prepared.json", of_manifest(lambda m: m["options"].pop("source")), False, FOREIGN),
        (
            "prepared.json",
            of_manifest(lambda m: m.update(sha256=[])),
            False,
            DAMAGED.replace("{name}", "tokenizer.json"),
        ),
        ("train.tokens", lambda content: content[:-20], True, OTHER),
        ("train.tokens", lambda content: b"\xff" * len(content), True, OTHER),
        ("train.tokens", lambda content: b"", True, OTHER),
        ("train.index", lambda content: b"", True, OTHER),
        ("train.index", lambda content: content[:-3], True, OTHER),
        ("train.index", of_index(lambda index: index["start"].__setitem__(3, -1)), True, OTHER),
        ("train.index", of_index(lambda index: index["start"].__setitem__(3, 2**63 - 9)), True, OTHER),
        ("train.index", of_index(lambda index: index["source"].__setitem__(3, 0)), True, OTHER),
        ("train.index", of_index(lambda index: index["target"].__setitem__(3, 1)), True, OTHER),
        ("train.index", of_index(lambda index: index["target"].__setitem__(3, 2**31 - 1)), True, OTHER),
        ("text.json", lambda content: b'{"val": [["1", "one"]], "tests": {"../test": [["1", "one"]]}}', True, OTHER),
        ("text.json", lambda content: b'{"val": [["1", 2]], "tests": {}}', True, OTHER),
        ("text.json", lambda content: b'{"val": ["12"], "tests": []}', True, OTHER),
        ("text.json", lambda content: b"[" * 10**5, True, OTHER),
        ("tokenizer.json", lambda content: b"cos\nsystem\n(S'true'\ntR.", True, OTHER),
        ("tokenizer.json", lambda content: b'{"characters": "01"}', True, OTHER),
    ],
)
def test_bad_folders_are_one_line_and_status_2(
    name: str,
    change: Callable[[bytes], bytes],
    hashed: bool,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Damaged, foreign and hostile ones; before the first step."""
    rewrite(folder, name, change, hashed)
    capsys.readouterr()
    arguments = ["--data", str(folder), "--device", "cpu", "--steps", "1", "--out", str(folder.parent / "run")]
    assert train_translation.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message.format(folder=folder, name=name)}\n"


def test_files_of_others_are_left_alone(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in text.iterdir()}
    assert prepare_text.main(["--data", str(text), "--source", "digits", "--target", "words", "--out", str(text)]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {text}: holds other files, such as test_a.digits; choose another folder\n"
    assert {path.name: path.read_bytes() for path in text.iterdir() if path.name != ".lock"} == before
    shutil.rmtree(text)
    assert prepare_text.main(["--data", str(text), "--out", str(text)]) == 2
    assert capsys.readouterr().err == f"error: {text}: no such folder\n"
