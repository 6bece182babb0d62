"""The first screen, the pages of help, usage lines."""
from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from fleet.cli.rows import COMMANDS, START, show_flag
from fleet.config.keys import FILE_KEYS
from fleet.config.rules import RULES
from fleet.start.gate import VERSION, asset
from fleet.start.record import REQUIRED, Record
from fleet.text.tables import format_pairs, format_table, format_words, wrap_text
from fleet.text.terminal import Cell

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet.cli.rows import Command
    from fleet.config.sections import FileKey
    from fleet.text.terminal import Look


FIRST_COMMANDS = ("up", "add", "status", "trace", "ui", "doctor", "run", "tasks",
                  "launch", "help")


def format_overview(look: Look) -> str:
    """Return the first screen: ten commands, and where the others are told."""
    summaries = {row.name: row.summary for row in COMMANDS}
    others: dict[str, dict[str, None]] = {START: {}}
    for row in COMMANDS:
        if row.name not in FIRST_COMMANDS:
            others.setdefault(row.group, {})[row.name.split()[0]] = None
    text = wrap_text(f"subagent-fleet {VERSION}: run Claude Code-style "
                     "subagents across your local model fleet.\n\nStart:\n"
                     "  subagent-fleet up\n\nCommands:\n", look)
    text += format_pairs([(name, summaries[name]) for name in FIRST_COMMANDS], look)
    text += "\nMore commands and topics:\n"
    more = [(group, ", ".join(names)) for group, names in others.items()]
    text += format_pairs([*more, ("help", ", ".join(TOPICS))], look) + "\n"
    text += format_words(["`subagent-fleet help NAME` explains a command or a topic."], look)
    text += format_words(["Not installed? Type `python3 subagent_fleet.py` instead of "
                          "`subagent-fleet`."], look)
    return text + format_words(["Exit codes: 0 done, 1 a problem was found, 2 usage, 3 "
                                "refused, 130 interrupted."], look)


def format_page(page: str, look: Look) -> str:
    """Return a page as text: paragraphs wrapped, tables aligned, commands whole."""
    text = ""
    for part in re.split(r"(?ms)^(```\w*\n.*?^```\n|(?:\|[^\n]*\n)+)", page):
        if text and re.match(r"\n(- |\d\. )", part):
            text += "\n"
        if part.startswith("```"):
            text += "".join(f"  {line}\n" for line in part.splitlines()[1:-1])
        elif part.startswith("|"):
            rows = [[re.sub("^`([^`]*)`$", r"\1", cell.strip()).replace("\\|", "|")
                     for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                    for line in part.splitlines()]
            text += format_table(rows[0], rows[2:], look=look)
        else:
            for paragraph in re.split(r"\n(?=- |\d\. |#|\n)", part):
                words = re.sub(r"\*\*([^*]+)\*\*", r"\1", " ".join(paragraph.split()))
                cell = Cell(words)
                if words.startswith("#"):
                    cell = Cell(words.lstrip("# "), "bold")
                    text = text.rstrip("\n") + "\n"
                if paragraph.startswith(("\n", "#")):
                    text += "\n"
                is_listed = re.match(r"- |\d\. ", words)
                text += format_words([cell], look, indent="   " if is_listed else "")
    return text.strip("\n") + "\n"


CONFIG_PAGE = asset("help/config.md")
MACHINES_PAGE = asset("help/machines.md")
MODELS_PAGE = asset("help/models.md")
BACKENDS_PAGE = asset("help/backends.md")
GATEWAY_PAGE = asset("help/gateway.md")
HARNESSES_PAGE = asset("help/harnesses.md")
TRACES_PAGE = asset("help/traces.md")
TASKS_PAGE = asset("help/runs.md")
SECURITY_PAGE = asset("help/security.md")
JSON_PAGE = asset("help/json.md")
HELP_COLUMNS = 100


class Topic(Record):
    """A page that `help` shows: what there is to know beyond a command's flags."""

    summary: str
    page: Callable[[], str]


TOPICS = {
    "config": Topic("every key of fleet.yaml, and every warning",
                    lambda: CONFIG_PAGE.replace("@KEYS@", render_keys_table())),
    "machines": Topic("more machines: worker, add, scan; who does what where",
                      lambda: MACHINES_PAGE),
    "models": Topic("what bench measures, and how it is kept", lambda: MODELS_PAGE),
    "backends": Topic("other servers than Ollama; your own Claude login",
                      lambda: BACKENDS_PAGE),
    "gateway": Topic("the queue, failover, receipts, and LiteLLM instead",
                     lambda: GATEWAY_PAGE),
    "harnesses": Topic("opencode, codex, aider and qwen-code",
                       lambda: HARNESSES_PAGE),
    "traces": Topic("which machine served which agent; the dashboard and its events",
                    lambda: TRACES_PAGE),
    "runs": Topic("coding agents in parallel: every key, state and promise",
                  lambda: render_tasks_page()),
    "security": Topic("what this program trusts, and what leaves the house",
                      lambda: SECURITY_PAGE),
    "json": Topic("what --json prints, key by key", lambda: JSON_PAGE)}


def render_keys_table() -> str:
    """Return tables of every key that a fleet file may have, as the records declare them."""
    lines = []
    places = {"project": "project", "gateway": "project.gateway", "claude": "project.claude",
              "node": "nodes.NAME", "model": "models.NAME", "agent": "agents.NAME"}
    for kind, place in places.items():
        lines += [f"## {place}", "", "| Key | Default | Meaning |", "|---|---|---|"]
        for name, each in FILE_KEYS[kind].items():
            if each.rule in RULES:
                lines.append(f"| `{name}` | {show_default(each)} | {each.words} |")
        lines.append("")
    return "\n".join(lines)


def render_tasks_page() -> str:
    """Return the page on tasks, its tables from the records that check a task file."""
    lines = ["| Key of a task | Default | Meaning |", "|---|---|---|"]
    for name, each in FILE_KEYS["task"].items():
        default = "".join(each.default) if each.default == ("Bash",) else each.default or ""
        if name in ("deadline", "stall"):
            default = f"{each.default // 60}m"
        shown = f"`{default}`" if default not in ("", ()) else ""
        lines.append(f"| `{name}` | {shown} | {each.words} |")
    lines += ["", "| Key of the file | Meaning |", "|---|---|"]
    lines += [f"| `{name}` | {each.words} |" for name, each in FILE_KEYS["task file"].items()]
    lines += [
        "", "`defaults:` takes every key of a task but `prompt`, `prompt_file`, `after`.", ""]
    return TASKS_PAGE + "\n".join(lines)


def show_default(each: FileKey) -> str:
    """Return what the absence of a key means, as a file would say it."""
    if each.default is REQUIRED:
        return "required"
    if each.default in (None, {}):
        return ""
    if isinstance(each.default, (bool, tuple)):
        return f"`{json.dumps(each.default)}`"
    return f"`{each.default}`"


def show_usage(row: Command, look: Look) -> str:
    """Return the help of one command: examples first, then what each word does."""
    text = wrap_text(f"subagent-fleet {row.name}: {row.summary}.\n\nExamples:\n", look)
    for example in row.examples:
        name = "subagent-fleet " if example.startswith(row.name) else ""
        text += f"  {name}{example}\n"
    rows = [(show_flag(flag), flag.note) for flag in row.flags]
    if row.passes:
        rows.append((f"-- {row.passes}", row.passes_note))
    return f"{text}\nOptions:\n{format_pairs(rows, look)}" if rows else text
