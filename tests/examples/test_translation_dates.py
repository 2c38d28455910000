"""The dates: their forms, written out by hand, and the split that keeps held-out dates out of training."""

import datetime
import re

import pytest
from translation.dates import PLAIN_FORMS, SHORT_YEAR_FORMS, SLASH_FORMS, date_corpus, forms_of, ordinal, write

CORPUS = date_corpus(train=300, held_out=100, writings=2, seed=7)


@pytest.mark.parametrize(
    ("date", "form", "text"),
    [
        (datetime.date(1998, 3, 3), "the {th} of {month} {y}", "the 3rd of March 1998"),
        (datetime.date(2031, 10, 14), "{weekday}, {d} {mon} {y}", "Tuesday, 14 Oct 2031"),
        (datetime.date(2004, 11, 25), "{d}/{m}/{y}", "25/11/2004"),
        (datetime.date(2004, 11, 25), "{m}/{d}/{y}", "11/25/2004"),
        (datetime.date(1907, 1, 2), "{dd}.{mm}.{y}", "02.01.1907"),
        (datetime.date(2000, 2, 29), "the {word} of {month} {y}", "the twenty-ninth of February 2000"),
        (datetime.date(1950, 6, 1), "{d} {mon} '{yy}", "1 Jun '50"),
    ],
)
def test_writing(date: datetime.date, form: str, text: str) -> None:
    assert form in PLAIN_FORMS + SLASH_FORMS + SHORT_YEAR_FORMS
    assert write(date, form) == text


def test_ordinals() -> None:
    written = [ordinal(day) for day in range(1, 32)]
    assert written[:3] == ["1st", "2nd", "3rd"] and written[10:13] == ["11th", "12th", "13th"]
    assert [w for w in written if not w.endswith("th")] == ["1st", "2nd", "3rd", "21st", "22nd", "23rd", "31st"]


@pytest.mark.parametrize(
    ("date", "slashes", "short_year"),
    [
        (datetime.date(1999, 7, 11), False, True),  # 7/11 could be November
        (datetime.date(1999, 7, 13), True, True),
        (datetime.date(1999, 7, 7), True, True),
        (datetime.date(1949, 12, 31), True, False),
        (datetime.date(2050, 1, 1), True, False),
    ],
)
def test_only_forms_with_one_reading(date: datetime.date, slashes: bool, short_year: bool) -> None:
    forms = forms_of(date)
    assert set(PLAIN_FORMS) <= set(forms)
    assert (set(SLASH_FORMS) & set(forms) == set(SLASH_FORMS)) is slashes
    assert (set(SHORT_YEAR_FORMS) & set(forms) == set(SHORT_YEAR_FORMS)) is short_year


def test_every_text_has_one_date() -> None:
    """Over dates that collide most easily, no text is written for two of them."""
    read: dict[str, datetime.date] = {}
    for year in (1907, 1999, 2007, 2099):
        for day in range(365):
            date = datetime.date(year, 1, 1) + datetime.timedelta(days=day)
            for form in forms_of(date):
                text = write(date, form)
                assert read.setdefault(text, date) == date


def test_deterministic() -> None:
    assert date_corpus(300, 100, 2, seed=7) == CORPUS
    assert date_corpus(300, 100, 2, seed=8).train != CORPUS.train


def test_held_out_dates_are_never_trained_on() -> None:
    train, val, test = ({iso for _, iso in pairs} for pairs in (CORPUS.train, CORPUS.val, CORPUS.tests["held-out"]))
    assert (len(train), len(val), len(test)) == (300, 100, 100)
    assert not train & val and not train & test and not val & test
    assert len(CORPUS.train) == 600
    assert all(re.fullmatch(r"(19|20)\d\d-\d\d-\d\d", iso) for iso in train | val | test)
