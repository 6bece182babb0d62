"""What a terminal can show: clean text, colors, widths."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.start.gate import LatePattern
from fleet.start.record import Record
from fleet.text.width import width_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# The kit: it makes lines, tables and findings for people from texts, Cells and a Look. A
# command's own words are in the command's part. Whatever comes from a node, a file or a log
# passes `clean_line` or `clean_text` here: nothing else protects the terminal. With the Look of
# a pipe, text has no escapes, no marks and no line breaks. On a terminal it is wrapped first
# and painted last.

# -- what a terminal can show --


def clean_text(text: str) -> str:
    """Return text in which everything that a terminal could obey is an escape sequence in text."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    # Controls, bidirectional marks and line separators: text from a node or a file could
    # use them to rewrite the terminal or to look like something else.
    unsafe = (
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e"
        "\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]")
    return re.sub(unsafe, lambda match: ascii(match[0])[1:-1], text)


def clean_line(text: str) -> str:
    """Return clean text on one line."""
    text = clean_text(text)
    return text.replace("\n", "\\n").replace("\t", " ")


# What this program itself draws with: colors, a line drawn again, a screen drawn again.
_DRAWN = LatePattern(r"(\x1b\[[0-9;]*m|\r\x1b\[K|\x1b\[H\x1b\[2J)")


def guard_terminal(text: str) -> str:
    """Return text without control characters, except those that this program draws with.

    Text from outside is cleaned where messages are made; this catches what was missed.
    """
    if "\x1b" not in text:
        return clean_text(text)
    parts = _DRAWN.split(text)
    parts[::2] = map(clean_text, parts[::2])
    return "".join(parts)


class Look(Record):
    """How text may look; the default is for a pipe, a file or a program."""

    colour: bool = False
    marks: bool = False
    columns: int = 0  # to wrap at; 0: nothing is wrapped


PLAIN = Look()
LEAST_COLUMNS = 20  # a terminal narrower than this breaks lines by itself


def plan_look(environ: Mapping[str, str], is_terminal: bool, *,
              encoding: str, columns: int) -> Look:
    """Return the Look of a stream, depending on what it is and on the environment."""
    is_dumb = environ.get("TERM") == "dumb"

    # In the order of Python 3.13: NO_COLOR comes before FORCE_COLOR.
    if environ.get("NO_COLOR"):
        colour = False
    elif environ.get("FORCE_COLOR"):
        colour = True
    else:
        colour = is_terminal and not is_dumb

    # In a pipe, forced color does not turn on wrapping or marks: the reader at its end has
    # another width, and a program does not know our marks.
    if not is_terminal:
        return Look(colour)
    marks = not is_dumb
    try:
        "".join(MARKS.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        marks = False
    return Look(colour, marks, max(columns, LEAST_COLUMNS))


# A role says what a text means. Color and mark only repeat what the words say: not everybody
# sees the color, and not every terminal shows the mark.
MARKS = {"ok": "✓", "warn": "!", "bad": "✗"}
COLOURS = {"ok": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1"}


# The colors of machines: not green, amber or red, which mean states; of different lightness,
# for color-blind people; one for the page, and the nearest of a terminal's 256.
MACHINE_COLOURS = (("#1257b0", 33), ("#c2338a", 169), ("#0f7a96", 38), ("#7b4fd0", 99),
                   ("#5d6b82", 103))
COLOURS.update({f"machine {index}": f"38;5;{number}"
                for index, (_, number) in enumerate(MACHINE_COLOURS)})


def plan_machine_colours(nodes: Iterable[str]) -> dict[str, int]:
    """Return {node: its index in MACHINE_COLOURS}, in the order of the fleet file."""
    return {node: index % len(MACHINE_COLOURS) for index, node in enumerate(nodes)}


def paint(text: str, role: str, look: Look) -> str:
    """Return text in the colour of its role: ok, warn, bad, dim, bold or `machine N`."""
    if not look.colour or not text or role not in COLOURS:
        return text
    return f"\x1b[{COLOURS[role]}m{text}\x1b[0m"


class Cell(Record):
    """Text with a role: measured and wrapped as plain text, and painted last, line by line."""

    text: str
    role: str = ""


def as_cell(value: object) -> Cell:
    """Return a value as a Cell whose text is one clean line."""
    if isinstance(value, Cell):
        return Cell(clean_line(value.text), value.role)
    return Cell(clean_line(str(value)))


def mark(word: str, role: str, look: Look) -> Cell:
    """Return a word with the mark of its role before it, where marks can be shown."""
    if look.marks and role in MARKS:
        word = f"{MARKS[role]} {word}"
    return Cell(word, role)


def crop(text: str, width: int) -> str:
    """Return text cut to a width, with an ellipsis if something is missing."""
    if width_of(text) <= width:
        return text
    used = 0
    for end, char in enumerate(text):
        used += width_of(char)
        if used > width - 1 and end > 0:
            break
    return f"{text[:end]}…"
