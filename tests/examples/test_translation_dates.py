"""The dates: their forms, written out by hand, and the split that keeps held-out dates out of training."""

import datetime
import re

import pytest
from command_line import DataError
from translation.dates import PLAIN_FORMS, SHORT_YEAR_FORMS, SLASH_FORMS, date_corpus, forms_of, ordinal, write


@pytest.mark.parametrize(
    ("date", "form", "text"),
    [
        ((1998, 3, 3), "the {th} of {month} {y}", "the 3rd of March 1998"),
        ((2031, 10, 14), "{weekday}, {d} {mon} {y}", "Tuesday, 14 Oct 2031"),
        ((2004, 11, 25), "{d}/{m}/{y}", "25/11/2004"),
        ((2004, 11, 25), "{m}/{d}/{y}", "11/25/2004"),
        ((1907, 1, 2), "{dd}.{mm}.{y}", "02.01.1907"),
        ((2000, 2, 29), "the {word} of {month} {y}", "the twenty-ninth of February 2000"),
        ((1950, 6, 1), "{d} {mon} '{yy}", "1 Jun '50"),
    ],
)
def test_writing(date: tuple[int, int, int], form: str, text: str) -> None:
    assert form in forms_of(datetime.date(*date))
    assert write(datetime.date(*date), form) == text


def test_ordinals() -> None:
    written = [ordinal(day) for day in range(1, 32)]
    assert [w for w in written if not w.endswith("th")] == ["1st", "2nd", "3rd", "21st", "22nd", "23rd", "31st"]


def test_only_forms_with_one_reading() -> None:
    for date, slashes, short_year in (
        ((1999, 7, 11), False, True),  # 7/11 could be November
        ((1999, 7, 13), True, True),
        ((1999, 7, 7), True, True),
        ((1949, 12, 31), True, False),
        ((2050, 1, 1), True, False),
    ):
        expected = PLAIN_FORMS + SLASH_FORMS * slashes + SHORT_YEAR_FORMS * short_year
        assert set(forms_of(datetime.date(*date))) == set(expected), date


def test_every_text_has_one_date() -> None:
    """Over dates that collide most easily, no text is written for two of them."""
    read: dict[str, datetime.date] = {}
    for year in (1907, 1999, 2007, 2099):
        for day in range(365):
            date = datetime.date(year, 1, 1) + datetime.timedelta(days=day)
            for form in forms_of(date):
                text = write(date, form)
                assert read.setdefault(text, date) == date


def test_corpus() -> None:
    """It repeats with its seed, and no held-out date is in the training text."""
    corpus = date_corpus(train=300, held_out=100, writings=2, seed=7)
    assert date_corpus(300, 100, 2, seed=7) == corpus and date_corpus(300, 100, 2, seed=8).train != corpus.train
    train, val, test = ({iso for _, iso in pairs} for pairs in (corpus.train, corpus.val, corpus.tests["held-out"]))
    assert (len(train), len(val), len(test), len(corpus.train)) == (300, 100, 100, 600)
    assert not train & val and not train & test and not val & test
    with pytest.raises(DataError, match="--dates 73000 and twice --held-out 25 are more than the 73049 dates"):
        date_corpus(73000, 25, 2, seed=7)
    assert all(re.fullmatch(r"(19|20)\d\d-\d\d-\d\d", iso) for iso in train | val | test)
