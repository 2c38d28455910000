"""Text that is small and can be learned."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of numbers in digits and in words."""
    folder = tmp_path / "text"
    folder.mkdir()
    words = "zero one two three four five six seven eight nine".split()
    held_out = {"val": range(100, 300, 17), "test_a": range(101, 300, 17)}
    train = sorted(set(range(100, 300)).difference(*held_out.values()))
    for name, numbers in {"train": train, **held_out}.items():
        (folder / f"{name}.digits").write_text("".join(f"{number}\n" for number in numbers))
        lines = (" ".join(words[int(digit)] for digit in str(number)) + "\n" for number in numbers)
        (folder / f"{name}.words").write_text("".join(lines))
    return folder
