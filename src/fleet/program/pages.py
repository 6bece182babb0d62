"""The first screen, the pages of help, the help of a command."""
from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from fleet.cli.rows import COMMANDS, show_flag
from fleet.config.keys import keys_of
from fleet.config.sections import Agent, Gateway, Model, Node, Project, Tiers
from fleet.config.task_file import TaskFile, TaskSpec
from fleet.start.gate import VERSION, asset
from fleet.start.record import REQUIRED, Record
from fleet.text.tables import format_pairs, format_table, format_words, wrap_text
from fleet.text.terminal import Cell, paint

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet.cli.rows import Command, Flag
    from fleet.start.record import Field
    from fleet.text.terminal import Look


HOME_PAGE = "https://github.com/adityak74/subagent-fleet"


def format_overview(look: Look) -> str:
    """Return the first screen: every command in its group, then flags and topics."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in COMMANDS:
        groups.setdefault(row.group, []).append((row.name, row.summary))
    groups["Flags"] = [("-h, --help", "show this, or the help of a command"),
                       ("-V, --version", "show the version")]
    groups["Topics: subagent-fleet help TOPIC"] = [
        (name, topic.summary) for name, topic in TOPICS.items()]

    text = wrap_text(f"subagent-fleet {VERSION}: run Claude Code-style subagents across your "
                     "local model fleet.\n\nUsage: subagent-fleet COMMAND [ARGUMENTS] [FLAGS]\n"
                     "Start with: subagent-fleet up\n", look)
    width = max(len(name) for rows in groups.values() for name, _ in rows)
    for title, rows in groups.items():
        text += f"\n{paint(title, 'bold', look)}\n"
        text += format_pairs([(name.ljust(width), words) for name, words in rows], look)
    return text + "\n" + format_words(
        ["Not installed? Type `python3 subagent_fleet.py` instead of `subagent-fleet`."],
        look) + format_words([f"Read more: {HOME_PAGE}"], look)


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
ENVIRONMENT_PAGE = asset("help/environment.md")
EXIT_CODES_PAGE = asset("help/exit-codes.md")
HELP_COLUMNS = 100


class Topic(Record):
    """A page of `help` that belongs to no single command."""

    summary: str
    page: Callable[[], str]
    commands: tuple[str, ...] = ()  # their own help points to this page


TOPICS = {
    "config": Topic("every key of fleet.yaml, and every warning",
                    lambda: CONFIG_PAGE.replace("@KEYS@", render_keys_table()),
                    ("init", "validate", "generate", "schema")),
    "machines": Topic("more machines, and who does what on which one",
                      lambda: MACHINES_PAGE, ("add", "worker", "recommend", "warmup")),
    "models": Topic("what bench measures, and how to use it", lambda: MODELS_PAGE, ("bench",)),
    "backends": Topic("servers other than Ollama; your own Claude login",
                      lambda: BACKENDS_PAGE),
    "gateway": Topic("the queue, failover, the record of requests, LiteLLM",
                     lambda: GATEWAY_PAGE, ("up", "serve", "logs", "status")),
    "harnesses": Topic("opencode, codex, aider and qwen-code",
                       lambda: HARNESSES_PAGE, ("launch",)),
    "traces": Topic("which machine served which agent; the dashboard",
                    lambda: TRACES_PAGE, ("trace", "ui")),
    "runs": Topic("tasks in parallel: every key, state and promise",
                  lambda: render_tasks_page(), ("run", "tasks", "task")),
    "security": Topic("what this program trusts, and what leaves your network",
                      lambda: SECURITY_PAGE, ("trust", "env")),
    "json": Topic("what --json prints, by example", lambda: JSON_PAGE),
    "environment": Topic("variables that this program reads", lambda: ENVIRONMENT_PAGE),
    "exit-codes": Topic("what a command's exit code means", lambda: EXIT_CODES_PAGE)}


def render_keys_table() -> str:
    """Return tables of all keys of a fleet file, made of the records that check it."""
    lines = []
    places = {Project: "project", Gateway: "project.gateway", Tiers: "project.claude",
              Node: "nodes.NAME", Model: "models.NAME", Agent: "agents.NAME"}
    for section, place in places.items():
        lines += [f"## {place}", "", "| Key | Default | Meaning |", "|---|---|---|"]
        for name, each in keys_of(section).items():
            if each.rule:
                lines.append(f"| `{name}` | {show_default(each)} | {each.words} |")
        lines.append("")
    return "\n".join(lines)


def render_tasks_page() -> str:
    """Return the page on tasks; its tables are made of the records that check a task file."""
    lines = ["| Key of a task | Default | Meaning |", "|---|---|---|"]
    for name, each in keys_of(TaskSpec).items():
        default = "".join(each.default) if each.default == ("Bash",) else each.default or ""
        if name in ("deadline", "stall"):
            default = f"{each.default // 60}m"
        shown = f"`{default}`" if default not in ("", ()) else ""
        lines.append(f"| `{name}` | {shown} | {each.words} |")
    lines += ["", "| Key of the file | Meaning |", "|---|---|"]
    lines += [f"| `{name}` | {each.words} |" for name, each in keys_of(TaskFile).items()]
    lines += [
        "", "`defaults:` takes every key of a task but `prompt`, `prompt_file`, `after`.", ""]
    return TASKS_PAGE + "\n".join(lines)


def show_default(each: Field) -> str:
    """Return a key's default as a file would say it."""
    if each.default is REQUIRED:
        return "required"
    if each.default in (None, {}):
        return ""
    if isinstance(each.default, (bool, tuple)):
        return f"`{json.dumps(each.default)}`"
    return f"`{each.default}`"


def format_command_help(row: Command, look: Look) -> str:
    """Return the help of one command: how it is typed, its words, its flags, examples."""
    text = wrap_text(f"{row.summary[0].upper()}{row.summary[1:]}.\n\n"
                     f"Usage: {show_usage(row)}\n", look)
    arguments = [(show_flag(flag), describe_flag(flag)) for flag in row.flags
                 if not flag.name.startswith("-")]
    if row.passes:
        arguments.append((f"-- {row.passes}", row.passes_note))
    flags = [(show_flag(flag), describe_flag(flag)) for flag in row.flags
             if flag.name.startswith("-")]
    width = max((len(name) for name, _ in arguments + flags), default=0)
    for title, rows in (("Arguments", arguments), ("Flags", flags)):
        if rows:
            text += f"\n{title}:\n"
            text += format_pairs([(name.ljust(width), note) for name, note in rows], look)

    text += "\nExamples:\n"
    for example in row.examples:
        name = "subagent-fleet " if example.startswith(row.name) else ""
        text += f"  {name}{example}\n"
    topics = [name for name, topic in TOPICS.items()
              if row.name in topic.commands or row.name.split()[0] in topic.commands]
    return text + "".join(f"\nSee also: subagent-fleet help {name}\n" for name in topics)


def show_usage(row: Command) -> str:
    """Return one line: the command's name and the words that it takes."""
    words = ["subagent-fleet", row.name]
    for flag in row.flags:
        if not flag.name.startswith("-"):
            count = flag.more.get("nargs", "")
            word = show_flag(flag).strip("[]") + ("..." if count in ("*", "+") else "")
            words.append(f"[{word}]" if count in ("*", "?") else word)
    if any(flag.name.startswith("-") for flag in row.flags):
        words.append("[FLAGS]")
    if row.passes:
        words.append(f"[-- {row.passes}]")
    return " ".join(words)


def describe_flag(flag: Flag) -> str:
    """Return what a flag is for, its default, and whether it may be repeated."""
    note = flag.note
    default = flag.more.get("const") if flag.name == "--watch" else flag.more.get("default")
    if isinstance(default, (int, float)) and default:
        note += f"; default: {default:g}"
    if flag.more.get("action") == "append":
        note += " (several)"
    return note
