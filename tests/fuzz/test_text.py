"""Files of text that the examples read, with bytes changed: right data, or a refusal in one line."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import DataError
from hypothesis import strategies as st
from translation.text import Text

pytestmark = pytest.mark.full

SENTENCE = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20).filter(
    lambda text: text == text.strip("\ufeff").strip()
)
ARROW = importlib.util.find_spec("pyarrow") is not None
FORMATS = ("aa", "aa-bb.tsv", "jsonl", *["parquet"] * ARROW)
PACKED = ("", ".gz", *[".zst"] * ARROW)
DAMAGE = st.lists(
    st.tuples(st.sampled_from(("change", "insert", "cut", "end")), st.floats(0, 1), st.integers(0, 255)), max_size=4
)
FILES = st.fixed_dictionaries(
    {
        "pairs": st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=4),
        "format": st.sampled_from(FORMATS),
        "packed": st.sampled_from(PACKED),
        "damage": DAMAGE,
    }
)


def content(pairs: list[tuple[str, str]], form: str, path: Path) -> bytes:
    if form == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"aa": [a for a, _ in pairs], "bb": [b for _, b in pairs]}), path)
        return path.read_bytes()
    line = {"aa": "{0}", "bb": "{1}", "aa-bb.tsv": "{0}\t{1}"}.get(form, "{2}")
    lines = [line.format(a, b, json.dumps({"aa": a, "bb": b})) for a, b in pairs]
    return "".join(f"{line}\n" for line in lines).encode()


def damaged(data: bytes, damage: list[tuple[str, float, int]]) -> bytes:
    for way, share, byte in damage:
        place = round(share * len(data))
        middle, rest = {"change": (bytes([byte]), 1), "insert": (bytes([byte]), 0), "cut": (b"", byte)}.get(
            way, (b"", len(data))
        )
        data = data[:place] + middle + data[place + rest :]
    return data


def test_damaged_files(fuzz: Callable[..., None], tmp_path: Path) -> None:
    def check(drawn: dict[str, Any]) -> None:
        pairs, form, packed = drawn["pairs"], drawn["format"], drawn["packed"] if drawn["format"] != "parquet" else ""
        for old in tmp_path.iterdir():
            old.unlink()
        for part in ("train", "val"):
            for ending in ("aa", "bb") if form == "aa" else (form,):
                path = tmp_path / f"{part}.{ending}{packed}"
                data = content(pairs, ending, path)
                if packed == ".gz":
                    data = gzip.compress(data)
                elif packed:
                    import pyarrow as pa

                    data = pa.compress(data, "zstd", asbytes=True)
                path.write_bytes(damaged(data, drawn["damage"] if part == "train" and ending != "bb" else []))
        text = Text(tmp_path, "aa", "bb")
        assert [*text.pairs("val")] == pairs
        try:
            found = [*text.pairs("train")]
        except DataError as refused:
            assert drawn["damage"] and "\n" not in str(refused) and f"{tmp_path}/train" in str(refused)
        else:
            assert found == pairs if not drawn["damage"] else not any("\n" in s or "\0" in s for s in sum(found, ()))

    fuzz(check, FILES)
