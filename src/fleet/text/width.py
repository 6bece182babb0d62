"""How many columns a text takes on a terminal."""
from __future__ import annotations

import unicodedata

# Most text is ASCII and never asks for the tables of Unicode, which take a while to load.


def width_of(text: str) -> int:
    """Return how many columns a terminal gives to a text; in doubt, the most it may."""
    if text.isascii():
        return len(text)
    return sum(_width_of_char(char) for char in text)


def _width_of_char(char: str) -> int:
    # What western text is made of, and the soft hyphen, which may be shown.
    if char < "\u0300":
        return 1
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    if char == "\ufe0f":  # which may make the sign before it wide
        return 1
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1
