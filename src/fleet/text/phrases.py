"""Nearest words, counts, spans of time, lists in words."""
from __future__ import annotations

import datetime
import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence, Sized


def find_nearest(word: str, choices: Iterable[str]) -> str:
    """Return the choice with the most similar spelling, or an empty string."""
    matches = difflib.get_close_matches(word[:64], list(choices)[:100], 1, 0.6)  # 3 ms
    return matches[0] if matches else ""


def nearest(word: object, choices: Iterable[object],
            others: Mapping[str, str] | None = None) -> str:
    """Return ``did you mean `x`?`` for the closest choice, or an empty string.

    `others` are words that mean one of the choices.
    """
    spelled: dict[str, object] = {}
    for choice, meant in (others or {}).items():
        spelled[choice.lower()] = meant
    spelled.update({str(choice).lower(): choice for choice in choices})
    text = str(word).lower()
    match = text if text in spelled else find_nearest(text, spelled)
    return f"did you mean `{spelled[match]}`?" if match else ""


def some_of(names: Collection[object], limit: int = 12) -> str:
    """Return `a, b and 3 more`."""
    shown = ", ".join(map(str, list(names)[:limit]))
    if len(names) > limit:
        shown += f" and {len(names) - limit:,} more"
    return shown


def count_of(things: Sized | int, noun: str) -> str:
    """Return `1 warning`, `2 warnings`, `1,000 processes`, of things or of their number."""
    number = things if isinstance(things, int) else len(things)
    if number != 1:
        if noun.endswith(("s", "x", "ch", "sh")):
            noun += "e"
        noun += "s"
    return f"{number:,} {noun}"


def show_value(value: object) -> str:
    """Return a value for a message: short, in backticks."""
    words = {type(None): "nothing", dict: "a mapping", list: "a list"}
    if type(value) in words:
        return words[type(value)]
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    return f"`{text[:60]}…`" if len(text) > 60 else f"`{text}`"


# -- amounts --


def show_span(seconds: float | None) -> str:
    """Return a duration as text: `1.4 s`, `45 s`, `3m20s`, `2h05m`, `3d`; `-`: not known."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        tenths = f"{seconds:.1f}"
        return (tenths if seconds < 1 else tenths.removesuffix(".0")) + " s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 2 * 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d"


def show_moment(then: float, now: float) -> str:
    """Return the local time of day; of another day, with its date."""
    try:
        moment = datetime.datetime.fromtimestamp(then)
    except (ValueError, OverflowError, OSError):
        return "?"
    is_today = moment.date() == datetime.datetime.fromtimestamp(now).date()
    return moment.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")


def show_amount(count: int) -> str:
    """Return a number of tokens in four characters: 999, 9.1k, 412k, 1.2M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size * 0.9995:
            amount = count / size
            return f"{amount:.1f}{unit}" if amount < 9.95 else f"{amount:.0f}{unit}"
    return str(count)


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def clean_name(text: str) -> str:
    """Return a typed name, short and on one line."""
    return re.sub("[^ -~]", "?", text)[:64]


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Return `a, b and c`."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def quote_shell(text: str) -> str:
    """Return text as one word of every shell; of fish only without quotes and backslashes."""
    is_bare = re.fullmatch("(?a)[\\w./:-][\\w./:=-]*", text)  # zsh reads `=x` as a path
    return text if is_bare else "'" + text.replace("'", "'\\''") + "'"
