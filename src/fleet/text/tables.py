"""Wrapped text, findings and tables, as text."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.start.gate import LatePattern
from fleet.start.record import replace
from fleet.text.terminal import PLAIN, Cell, as_cell, clean_line, crop, paint
from fleet.text.width import width_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from fleet.start.errors import Finding
    from fleet.text.terminal import Look


# -- wrapping --
#
# textwrap counts characters where a terminal counts columns, and breaks commands like
# sentences. Commands to type are in backticks or on an indented line: neither
# is ever broken.

_WORD = LatePattern(r"(?:[^\s`]*`[^`]*`)+[^\s`]*"  # what is in backticks, and what touches it
                 r"|\d[\d.,]* (?:s|ms|min|h|GB|MB|%)(?!\w)\S*"  # a number and its unit
                 r"|\S+")


def break_lines(cells: Iterable[object], first: int, room: int) -> list[list[Cell]]:
    """Return the words of cells, line by line; the first line has its own width."""
    lines: list[list[Cell]] = [[]]
    left = first
    for cell in map(as_cell, cells):
        for word in _split_words(cell.text, max(min(first, room), 1)):
            needed = width_of(word)
            if lines[-1] and needed >= left:
                lines.append([])
                left = room
            left -= needed + bool(lines[-1])
            lines[-1].append(Cell(word, cell.role))
    return lines


def _split_words(text: str, room: int) -> Iterator[str]:
    """Yield unbreakable pieces; a word that is longer than a line is cut."""
    for word in _WORD.findall(text):
        if "`" in word or width_of(word) <= room:
            yield word
        else:  # in one pass: a node may send one of a million letters
            size = room if word.isascii() else max(room // 2, 1)
            yield from re.findall(f".{{1,{size}}}", word)


def paint_words(words: Iterable[Cell], look: Look) -> str:
    """Return words as one line; neighbors with the same role are painted together."""
    runs: list[Cell] = []
    for word in words:
        if runs and runs[-1].role == word.role:
            word = Cell(f"{runs.pop().text} {word.text}", word.role)
        runs.append(word)
    return " ".join(paint(run.text, run.role, look) for run in runs)


def format_words(parts: Iterable[object], look: Look, *, margin: str = "",
                 indent: str = "") -> str:
    """Return texts and Cells with a space between them, on as many lines as they need.

    The margin stands before every line, the indent also before all but the first.
    """
    cells = [cell for cell in map(as_cell, parts) if cell.text]
    if not cells:
        return ""
    room = look.columns - len(margin)
    lines = [cells]
    if look.columns and sum(width_of(cell.text) + 1 for cell in cells) - 1 > room:
        lines = break_lines(cells, room, room - len(indent))
    return (margin + f"\n{margin}{indent}".join(paint_words(line, look) for line in lines)
            + "\n")


def wrap_text(text: str, look: Look, *, indent: str = "") -> str:
    """Return text wrapped to the columns, if there are any; indented lines stay whole."""
    lines = []
    for line in text.split("\n"):
        line = clean_line(line)
        if look.columns and not line.startswith(" "):
            line = format_words([line], look, indent=indent).rstrip("\n")
        lines.append(line)
    return "\n".join(lines)


# -- findings --

# The role of each level, worst first.
LEVELS = {"error": "bad", "warning": "warn", "info": "", "ok": "ok"}


def format_finding(finding: Finding, *, indent: str = "", look: Look = PLAIN) -> str:
    """Return a finding as lines: what, where, the line with a caret, what to type.

    With an indent it is an entry in a list of errors, below the name of their file.
    """
    where = Cell(finding.where, "dim")
    if indent:
        text = format_words([finding.what], look, margin=indent, indent="  ")
        if finding.where:
            text += format_words(["at", where], look, margin=f"{indent}  ")
    else:
        words = [Cell(f"{finding.level}:", LEVELS.get(finding.level, ""))]
        if finding.where:
            words.append(Cell(f"{finding.where}:" if finding.what else finding.where, "dim"))
        text = format_words([*words, finding.what], look, indent="  ")
    lines = [clean_line(line) for line in finding.excerpt.splitlines() if line]
    # Text to paste has no caret, and is never cut.
    if look.columns and lines and re.fullmatch(r" *\| +\^+", lines[-1]):
        lines = [crop(line, look.columns - len(indent)) for line in lines]
    text += "".join(f"{indent}{line}\n" for line in lines)
    return text + format_fix(finding.fix, look, margin=f"{indent}  ")


def format_fix(fix: str, look: Look, *, margin: str = "  ") -> str:
    """Return what to type; a command that is too long for its line gets a line below."""
    fix = clean_line(fix)
    label = Cell("→" if look.marks else "fix:", "bold")
    if not fix:
        return ""
    is_wide = look.columns and width_of(f"{margin}{label.text} {fix}") > look.columns
    if is_wide and "`" not in fix:
        whole = paint(fix, "bold", look)
        return format_words([label], look, margin=margin) + f"{margin}  {whole}\n"
    return format_words([label, Cell(fix, "bold")], look, margin=margin, indent="  ")


# -- tables --

LEAST_CELL = 20  # columns below which no column is made narrower


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *,
                 look: Look = PLAIN, right: Collection[str] = (),
                 spare: Collection[str] = ()) -> str:
    """Return an aligned table of texts, numbers and Cells; without headers, only its rows.

    The columns in `right` are aligned right. If the table is too wide for the terminal, columns
    in `spare` are dropped, in that order, until it fits; then the widest columns wrap.
    """
    table = [[Cell(header, "bold") for header in headers]] if headers else []
    table += [[as_cell(value) for value in row] for row in rows]
    if not table:
        return ""
    numbers = [index for index, name in enumerate(headers) if name in right]
    spares = [headers.index(name) for name in spare if name in headers]
    widths = _fit_columns(table, spares, look.columns)

    lines = []
    for row in table:
        columns = {index: _wrap_cell(row[index], width) for index, width in widths.items()}
        for number in range(max(map(len, columns.values()))):
            parts = []
            for index, column in columns.items():
                text = column[number] if number < len(column) else ""
                blank = " " * (widths[index] - width_of(text))
                text = paint(text, row[index].role, look)
                parts.append(blank + text if index in numbers else text + blank)
            lines.append("  ".join(parts).rstrip())
    return "\n".join(lines) + "\n"


def _wrap_cell(cell: Cell, width: int) -> list[str]:
    """Return the lines of a cell; text that fits keeps its spaces."""
    if width_of(cell.text) <= width:
        return [cell.text]
    return [" ".join(word.text for word in line)
            for line in break_lines([cell], width, width)]


def _fit_columns(table: Sequence[Sequence[Cell]], spares: Iterable[int], room: int
                 ) -> dict[int, int]:
    """Return {column: width} of the columns that fit into so much room; 0 means no limit."""
    widths = {index: max(width_of(cell.text) for cell in column)
              for index, column in enumerate(zip(*table))}
    if not room:
        return widths
    widths = {index: min(width, room) for index, width in widths.items()}
    for index in spares:
        last = max(widths)
        if _measure_row({**widths, last: min(widths[last], LEAST_CELL)}) > room:
            del widths[index]
    # No word is cut while another column can still wrap.
    words = {index: max([width_of(word) for row in table
                         for word in _WORD.findall(row[index].text)], default=0)
             for index in widths}
    for least in (words, dict.fromkeys(widths, 8)):
        while _measure_row(widths) > room:
            widest = max(reversed(list(widths)),
                         key=lambda index: widths[index] - least[index])
            if widths[widest] <= least[widest]:
                break
            widths[widest] -= 1
    return widths


def _measure_row(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def pad_row(cells: Sequence[object], widths: Sequence[int]) -> str:
    """Return cells as one line, each padded to its width."""
    texts = [as_cell(cell).text for cell in cells]
    return "  ".join(text + " " * (width - width_of(text))
                     for text, width in zip(texts, widths))


ENTRY_INDENT = " " * 10


def format_entry(cells: Sequence[object], widths: Sequence[int], parts: Sequence[object],
                 look: Look, *, margin: str = "") -> str:
    """Return a row of a growing table: columns of fixed widths, then words that wrap."""
    head = margin + pad_row(cells, widths)
    if not look.columns:
        return format_words(parts, look, margin=f"{head}  ") or f"{head.rstrip()}\n"
    room = look.columns - width_of(head) - 2
    if room < LEAST_CELL:  # the words stand below
        return (f"{crop(head.rstrip(), look.columns)}\n"
                + format_words(parts, look, margin=ENTRY_INDENT))
    lines = break_lines(parts, room, look.columns - len(ENTRY_INDENT))
    text = f"\n{ENTRY_INDENT}".join(paint_words(line, look) for line in lines)
    return f"{head}  {text}".rstrip() + "\n"


def format_pairs(rows: Iterable[Sequence[object]], look: Look = PLAIN) -> str:
    """Return one line a pair, in two columns; the right one wraps."""
    text = format_table((), rows, look=replace(look, columns=max(look.columns - 2, 0)))
    return "".join(f"  {line}\n" for line in text.splitlines())
