"""How many columns a text takes on a terminal."""
from __future__ import annotations

import unicodedata

# Most text is ASCII and does not need the Unicode tables, which are slow to load.


def width_of(text: str) -> int:
    """Return how many columns a text takes on a terminal; the larger number if ambiguous."""
    if text.isascii():
        return len(text)
    return sum(_width_of_char(char) for char in text)


def _width_of_char(char: str) -> int:
    # Western text, and the soft hyphen, which some terminals show.
    if char < "\u0300":
        return 1
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    if char == "\ufe0f":  # it may make the character before it wide
        return 1
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1
