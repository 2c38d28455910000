"""Sentence pairs that need no download: dates as people write them, and the same dates in ISO form.

"the 3rd of March 1998" -> "1998-03-03"       "Tuesday, 14 Oct 2031" -> "2031-10-14"       "25/11/2004" -> "2004-11-25"

Every form has exactly one reading. Numbers between slashes are written day first or month first, so that form is used
only where the day cannot be a month, or equals it. A two-digit year means 1950 to 2049 and is used only there.
"""

import datetime
import random
from collections.abc import Callable

from command_line import CommandError

from translation.text import Pair

FIRST_DAY, LAST_DAY = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ORDINAL_WORDS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third twenty-fourth "
    "twenty-fifth twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"
).split()

# Fields: d, m day and month number; dd, mm the same in two digits; th "3rd"; word "third"; mon "Mar"; month "March";
# wd "Tue"; weekday "Tuesday"; y "1998"; yy "98".
PLAIN_FORMS = (
    "{d} {month} {y}", "{dd} {mon} {y}", "{d}-{mon}-{y}", "{d}. {month} {y}", "{th} {month} {y}", "{th} of {mon} {y}",
    "the {th} of {month} {y}", "the {th} of {month}, {y}", "the {word} of {month} {y}", "the {th} day of {month} {y}",
    "{month} {d}, {y}", "{month} {th}, {y}", "{mon}. {d}, {y}", "{mon} {dd} {y}", "{month} the {word}, {y}",
    "{weekday}, {d} {mon} {y}", "{weekday} the {th} of {month} {y}", "{weekday}, {month} {d}, {y}",
    "{wd} {d} {mon} {y}", "{wd}, {mon} {th} {y}", "{y} {month} {d}", "{y}, {mon} {th}", "{y}/{mm}/{dd}", "{y}{mm}{dd}",
    "{dd}.{mm}.{y}", "{d}.{m}.{y}",
)  # fmt: skip
SLASH_FORMS = ("{d}/{m}/{y}", "{m}/{d}/{y}", "{dd}/{mm}/{y}", "{mm}/{dd}/{y}")
SHORT_YEAR_FORMS = ("{d} {mon} '{yy}", "{month} {th}, '{yy}", "{d}.{m}.{yy}", "{dd}-{mon}-{yy}")
CASES: tuple[Callable[[str], str], ...] = (str, str, str.lower, str.upper)


def ordinal(number: int) -> str:
    """1 -> "1st", 2 -> "2nd", 11 -> "11th"."""
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def forms_of(date: datetime.date) -> list[str]:
    """The templates in which `date` can be written without a second reading."""
    forms = list(PLAIN_FORMS)
    if date.day > 12 or date.day == date.month:
        forms += SLASH_FORMS
    if 1950 <= date.year < 2050:
        forms += SHORT_YEAR_FORMS
    return forms


def write(date: datetime.date, form: str) -> str:
    """`date` in the template `form`."""
    month, weekday = MONTHS[date.month - 1], WEEKDAYS[date.weekday()]
    return form.format(
        d=date.day, dd=f"{date.day:02d}", th=ordinal(date.day), word=ORDINAL_WORDS[date.day - 1],
        m=date.month, mm=f"{date.month:02d}", month=month, mon=month[:3],
        y=date.year, yy=f"{date.year % 100:02d}", weekday=weekday, wd=weekday[:3],
    )  # fmt: skip


def date_corpus(train: int, held_out: int, writings: int, seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Pairs of `train` dates, in `writings` forms each; of `held_out` others for validation; of as many for the score.

    The dates are drawn without replacement, so no held-out date is in the training text, in any form. Equal arguments
    give an equal corpus. CommandError where there are not enough dates.
    """
    rng = random.Random(f"dates {seed}")
    span = (LAST_DAY - FIRST_DAY).days + 1
    if train + 2 * held_out > span:
        raise CommandError(f"--dates {train} and twice --held-out {held_out} are more than the {span} dates there are")
    days = rng.sample(range(span), train + 2 * held_out)
    dates = [FIRST_DAY + datetime.timedelta(days=day) for day in days]

    def pairs(chosen: list[datetime.date], forms_each: int) -> list[Pair]:
        return [
            (rng.choice(CASES)(write(date, form)), date.isoformat())
            for date in chosen
            for form in rng.sample(forms_of(date), forms_each)
        ]

    val, test = dates[train : train + held_out], dates[train + held_out :]
    return pairs(dates[:train], writings), pairs(val, 1), pairs(test, 1)
