"""A new fleet file as text, and what is added to an old one."""
from __future__ import annotations

import json
import re
import string
from typing import TYPE_CHECKING

from fleet.config.check import check_fleet
from fleet.config.keys import keys_of, section_of
from fleet.config.rules import show_entry
from fleet.config.sections import FleetFile, Gateway
from fleet.plan.memory import NOTE_START
from fleet.plan.starter import PLACEHOLDERS_MARK
from fleet.start.errors import FleetError
from fleet.text.phrases import join_words
from fleet.text.tables import wrap_text
from fleet.text.terminal import Look
from fleet.text.yaml import Document
from fleet.text.yaml_dump import dump_yaml, quote_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


_STARTER = """\
# Which role runs on which model on which machine. After a change:
# `subagent-fleet validate`, then `subagent-fleet generate`.

project:
  name: $name
  gateway:
    provider: builtin       # builtin: this program serves the fleet; litellm: LiteLLM does
    host: 127.0.0.1         # only this machine; 0.0.0.0 offers your models to the whole network
    port: $port
    master_key_env: LITELLM_MASTER_KEY  # variable that holds the key; `generate` makes the key
$claude

# Machines that run Ollama. `subagent-fleet worker`, run on another machine, prints its lines.
nodes:
$nodes  # mini: {endpoint: http://192.168.1.50:11434}

# What runs where. Two models with one alias share the load. `# key:` shows a default.
${mark}models:
$models
# Claude Code's subagents.
agents:
$agents"""
_STARTER_NOTE_COLUMN = 44
_STARTER_LOOK = Look(columns=90)


def render_starter(tree: Mapping[str, Any], has_models: bool,
                   name: str = "local-dev", notes: Mapping[str, str] = {}, *,
                   port: int = Gateway.port) -> str:
    """Return a fleet.yaml that teaches by its comments.

    The comments say why each model was chosen (`notes`), or that no models were found.
    """
    blocks = {kind: _starter_block(kind, tree[kind], notes)
              for kind in ("nodes", "models", "agents")}
    blocks["name"] = quote_yaml(name)
    blocks["port"] = str(port)
    why = "which model answers for each of Claude Code's tiers"
    blocks["claude"] = f"  # claude: {{haiku: heavy-coder}}  # {why}"
    if "claude" in tree:
        lines = [f"    {tier}: {quote_yaml(model)}" for tier, model in tree["claude"].items()]
        blocks["claude"] = "\n".join([f"  claude:  # {why}", *lines])
    blocks["mark"] = "" if has_models else PLACEHOLDERS_MARK
    return string.Template(_STARTER).substitute(blocks)


def _starter_block(kind: str, sections: dict[str, dict[str, object]],
                   notes: Mapping[str, str]) -> str:
    """Return the sections of one kind; the first one shows and explains every key."""
    lines: list[str] = []
    for name, values in sections.items():
        is_first = not lines
        if kind == "models" and name in notes:
            lines += [f"  # {line}" for line in _wrap_note(notes[name])]
        lines.append(f"  {quote_yaml(name)}:")
        for key, declared in keys_of(section_of(keys_of(FleetFile)[kind])).items():
            if key in values:
                line = f"    {show_entry(key, values[key])}"
            elif is_first and declared.default is None:
                line = f"    # {key}:"
            elif is_first:
                line = f"    # {show_entry(key, declared.default)}"
            else:
                continue

            # An agent's description fills its line, so that a note would not fit.
            fits = kind != "agents" or len(line) < _STARTER_NOTE_COLUMN
            if is_first and fits:
                line = f"{line:{_STARTER_NOTE_COLUMN}} # {declared.words}"
            lines.append(line)
    return "\n".join(lines) + "\n"


# -- a fleet file with other values --


class Rewrite:
    """Edits that change values in a file. Lines with unchanged values stay as they are.

    Example: with another `b` and a new `c`, `a: 1  # mine` stays, `b: 2  # why` becomes
    `b: 3  # why`, and `c: 4` goes below the last line of `b`.
    """

    def __init__(self, document: Document) -> None:
        self.text = document.text
        self.document = document
        self.places = document.places
        self.edits: list[tuple[int, int, str]] = []  # from, to, new text

    def apply(self) -> str:
        """Return the text with all edits."""
        text = self.text
        for start, end, more in sorted(self.edits, reverse=True):  # what is above stays in place
            text = text[:start] + more + text[end:]
        return text

    def change(self, path: tuple, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Plan the edits of a mapping."""
        for key, value in old.items():
            if key not in new:
                self.remove((*path, key))
            elif value != new[key]:
                self.replace((*path, key), value, new[key])
        added = {key: value for key, value in new.items() if key not in old}
        if added:
            self.add((*path, list(old)[-1]), added)

    def replace(self, path: tuple, old: Any, new: Any) -> None:
        """Plan a new value for a key."""
        if old and new and isinstance(old, dict) and isinstance(new, dict):
            is_block = self.is_block((*path, next(iter(old))))
            if is_block or not set(old) - set(new):  # between braces a comma would be left
                self.change(path, old, new)
                return

        start, _, value_start, value_end = self.places[path]
        has_span = value_start != start and self.text[value_start] not in "|>"
        if has_span:
            self.edits.append((value_start, value_end, self.show_flow(new, start)))
        else:
            line, margin = self.line_of(path)
            self.edits.append((line, self.end_of(path), _show_block({path[-1]: new}, margin)))

    def remove(self, path: tuple) -> None:
        """Plan to remove an entry of block style, with our note above it."""
        line, _ = self.line_of(path)
        self.edits += [(*self.note_of(path), ""), (line, self.end_of(path), "")]

    def add(self, last: tuple, entries: Mapping[str, Any]) -> None:
        """Plan more entries behind the last one of a mapping, in its style."""
        start, _, _, value_end = self.places[last]
        _, margin = self.line_of(last)
        if self.is_block(last):
            end = self.end_of(last)
            gap = "" if self.text[:end].endswith("\n") else "\n"
            self.edits.append((end, end, gap + _show_block(entries, margin)))
            return
        between = ", " if margin.strip() else f",\n{margin}"
        rows = "".join(f"{between}{json.dumps(key)}: {self.show_flow(value, start)}"
                       for key, value in entries.items())
        self.edits.append((value_end, value_end, rows))

    def note(self, path: tuple, note: str, *, is_new: bool) -> None:
        """Plan the note above an entry of block style; a new one only if `is_new`."""
        _, margin = self.line_of(path)
        start, end = self.note_of(path)
        if self.is_block(path) and (is_new or start < end):
            rows = "".join(f"{margin}# {row}\n" for row in _wrap_note(note))
            self.edits.append((start, end, rows))

    # -- where things are --

    def is_block(self, path: tuple) -> bool:
        """Tell whether an entry is in block style: no brace opens what it belongs to."""
        return self.text[self.places[path[:-1]][2]] != "{"

    def line_of(self, path: tuple) -> tuple[int, str]:
        """Return where the line of a key starts, and what is before the key."""
        start = self.places[path][0]
        line = self.document.line_start(start)
        return line, self.text[line:start]

    def note_of(self, path: tuple) -> tuple[int, int]:
        """Return where our note above an entry begins and ends, or would be."""
        line, margin = self.line_of(path)
        comments = re.compile(rf"(?:{margin}#.*\n)*\Z").search(self.text, 0, line)
        start = comments.start() if comments else line
        note = re.compile(rf"(?m)^(?:{margin}# {NOTE_START}.*\n(?:{margin}#   .*\n)*)+")
        match = note.search(self.text, start, line)
        return match.span() if match else (line, line)

    def end_of(self, path: tuple) -> int:
        """Return where the lines of an entry end, with the comments that are set deeper."""
        line, margin = self.line_of(path)
        start = self.places[path][0]
        below = [place[0] for other, place in self.places.items()
                 if place[0] > start and other[:len(path)] != path]
        end = self.document.line_start(min(below)) if below else len(self.text)
        rows = self.text[line:end].splitlines(keepends=True)
        while not rows[-1].strip() or (rows[-1].lstrip().startswith("#")
                                       and not rows[-1].startswith(f"{margin} ")):
            rows.pop()  # comments above the next entry belong to that entry
        return line + sum(map(len, rows))

    def show_flow(self, value: Any, start: int) -> str:
        """Return a value as it is written on the line of its key, or between braces."""
        if not self.text.lstrip().startswith("{"):
            return show_entry("", value)
        line = self.document.line_start(start)
        margin = re.match(r"[ \t]*", self.text[line:start])
        step = re.match(r"\{\s*\n([ \t]+)", self.text)
        text = json.dumps(value, indent=step[1] if step else None, ensure_ascii=False)
        return text.replace("\n", f"\n{margin[0] if margin else ''}")


def _show_block(entries: Mapping[str, Any], margin: str) -> str:
    return "".join(f"{margin}{row}\n" for row in dump_yaml(dict(entries)).splitlines())


def _wrap_note(note: str) -> list[str]:
    """Return the lines of a note; what a machine said in it can end no comment."""
    note = re.sub(r"[^ -~\xa0-\u1fff]", "?", note)
    return wrap_text(note, _STARTER_LOOK, indent="  ").split("\n")


def insert_sections(document: Document, added: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a fleet file's text with more sections."""
    tree = document.value
    return rewrite_fleet(document, {
        **tree, **{kind: {**tree[kind], **sections} for kind, sections in added.items()}})


def show_block(path: str, block: Mapping[str, Any]) -> str:
    """Return lines to put into a fleet file, in the form of that file."""
    if path.lower().endswith(".json"):
        return json.dumps(block, indent=2, ensure_ascii=False) + "\n"
    return dump_yaml(block)


def rewrite_fleet(document: Document, wanted: Mapping[str, Any],
                  notes: Mapping[str, str] = {}) -> str:
    """Return a fleet file's text with new values, and notes above its models.

    The new text is read again: if it does not hold exactly what is wanted, this fails.
    """
    try:
        rewrite = Rewrite(document)
        rewrite.change((), document.value, wanted)
        changed = Document(rewrite.apply(), document.source)
        rewrite = Rewrite(changed)
        for name, note in notes.items():
            rewrite.note(("models", name), note, is_new=name not in document.value["models"])
        changed = Document(rewrite.apply(), document.source)
        fleet, _ = check_fleet(changed)
        if fleet and changed.value == wanted:
            return changed.text
    except FleetError:  # of its syntax
        pass
    block = {kind: {name: values for name, values in sections.items()
                    if values != document.value[kind].get(name)}
             for kind, sections in wanted.items() if kind in ("nodes", "models", "agents")}
    block = {kind: sections for kind, sections in block.items() if sections}
    raise FleetError("cannot-write", f"{document.source} could not be changed safely; write "
                     "these lines by hand", excerpt=show_block(document.source, block),
                     fix=f"write them under its {join_words([f'`{kind}:`' for kind in block])}")
