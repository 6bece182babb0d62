"""A command's row, its flags, and how their values are read."""
from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from fleet.start.constants import EXIT_USAGE, PROBE_TIMEOUT_SECONDS
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.text.phrases import nearest, quote_shell

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from fleet.world.world import World


# A command is a function of what was typed and a World; its row, `@command`, above it, says how
# it is typed. COMMANDS, in `program/commands`, holds the rows in the order of use and of help.


class Flag(Record):
    """A flag or, without dashes, a positional word; `more` is in argparse's own words."""

    name: str
    note: str
    metavar: str = ""  # without one it is on or off
    more: dict[str, Any] = {}
    short: str = ""
    # What completion offers: words, or one of NAME_KINDS, whose names the fleet file gives;
    # TASK_NAMES and EXAMPLE_NAMES stand for theirs.
    offers: tuple[str, ...] = ()


class Command(Record):
    """A command: what runs, what it says of itself, what it takes, how it is typed."""

    name: str  # one word, or two (`task add`) where several share the first
    group: str
    run: Callable[[Namespace, World], int]
    summary: str
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]
    passes: str  # words after `--`, for another program
    # Pairs of flags of which only one counts, such as `watch json`.
    excludes: tuple[str, ...] = ()
    passes_note: str = "passed on unchanged"


COMMANDS: list[Command] = []  # filled in one place, in the order of help
NAME_KINDS = ("models", "agents")
TASK_NAMES = ("tasks",)  # the names of the tasks
EXAMPLE_NAMES = ("examples",)
START, SET_UP, LOOK, SERVE, MORE = "Start", "Set up", "Look", "Serve", "More"
WORK = "Work"


def command(name: str, summary: str, *flags: Flag, group: str, examples: tuple[str, ...],
            passes: str = "", **rules: Any) -> Callable[..., Command]:
    """Make a function a command; its row is above it."""
    def name_row(run: Callable[[Namespace, World], int]) -> Command:
        return Command(name, group, run, summary, flags, examples, passes, **rules)
    return name_row


class Called(Record):
    """The command that words begin with, and the words that follow its name."""

    command: Command
    words: list[str]


# What the first documents called a command, or other programs do.
OTHER_NAMES = {"start": "up", "dashboard": "ui", "benchmark": "bench"}
# Words of other programs for what is typed otherwise here; also behind `task`.
OTHER_WORDS = {
    "abort": "subagent-fleet task stop NAME",
    "agents": "subagent-fleet status",
    "bd": "subagent-fleet task add 'NAME:what to do'",
    "cancel": "subagent-fleet task stop NAME",
    "clean": "subagent-fleet task tidy",
    "commands": "subagent-fleet help",
    "compare": "subagent-fleet run --times 2 'NAME:what to do'",
    "config": "edit tasks.yaml (`subagent-fleet help runs`) or fleet.yaml (`subagent-fleet "
              "help config`)",
    "create": "subagent-fleet run 'NAME:what to do'",
    "daemon": "subagent-fleet run --detach",
    "delete": "subagent-fleet task forget NAME",
    "dep": "--after TASK, where it is added: subagent-fleet task add 'NAME:what to do' "
           "--after TASK",
    "fanout": "subagent-fleet run --times 3 'NAME:what to do'",
    "gc": "subagent-fleet task tidy",
    "jobs": "subagent-fleet tasks",
    "kill": "subagent-fleet task stop NAME",
    "knowledge": "subagent-fleet task log NAME",
    "list": "subagent-fleet tasks",
    "ls": "subagent-fleet tasks",
    "log": "subagent-fleet task log",
    "merge": "subagent-fleet task land NAME",
    "models": "subagent-fleet discover",
    "multi": "subagent-fleet run 'a:what to do' 'b:what else'",
    "new": "subagent-fleet run 'NAME:what to do'",
    "nodes": "subagent-fleet status",
    "pause": "subagent-fleet task stop NAME",
    "plan": "subagent-fleet tasks NAME",
    "prompt": "subagent-fleet task say NAME TEXT",
    "prune": "subagent-fleet task tidy",
    "ps": "subagent-fleet tasks",
    "ready": "subagent-fleet tasks",
    "remove": "delete the entry of a machine or model from fleet.yaml; for a task: "
              "subagent-fleet task forget NAME",
    "restart": "subagent-fleet task retry NAME",
    "resume": "subagent-fleet task retry NAME",
    "rm": "subagent-fleet task forget NAME",
    "send": "subagent-fleet task say NAME TEXT",
    "show": "subagent-fleet tasks NAME",
    "spawn": "subagent-fleet run 'NAME:what to do'",
    "status": "subagent-fleet tasks",  # behind `task`
    "steer": "subagent-fleet task say NAME TEXT",
    "tell": "subagent-fleet task say NAME TEXT",
    "top": "subagent-fleet tasks --watch",
    "uninstall": "subagent-fleet install --remove",
    "wake": "subagent-fleet warmup",  # it wakes machines that have a `mac:`
    "update": "download subagent_fleet.py again, then: python3 subagent_fleet.py install",
    "usage": "subagent-fleet trace last",
    "version": "subagent-fleet --version",
    "wait": "subagent-fleet run",
    "watch": "subagent-fleet tasks --watch",
    "why": "subagent-fleet task log NAME",
    "worktrees": "subagent-fleet help runs"}


def find_call(words: Sequence[str]) -> Called:
    """Return what is called; an unknown command is refused with the nearest."""
    known = {row.name: row for row in COMMANDS}
    words = [OTHER_NAMES.get(words[0], words[0]), *words[1:]]
    if words[0] == "task" and all(word.startswith("-") for word in words[1:]):
        return Called(known["tasks"], words[1:])
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in known:
            return Called(known[name], words[count:])

    name = words[0]
    seconds = second_words(name)
    if seconds:
        typed = words[1] if len(words) > 1 else ""
        hint = nearest(typed, seconds)
        if len(words) > 2 and words[2] in seconds:  # the task first
            hint = f"subagent-fleet {name} {words[2]} {quote_shell(typed)}"
        elif name == "task":
            own = {row.name: f"subagent-fleet {row.name}" for row in COMMANDS}
            hint = OTHER_WORDS.get(typed) or own.get(typed) or hint
        raise FleetError("unknown-command", f"{name}: which one? {', '.join(seconds)}",
                         status=EXIT_USAGE, fix=hint or f"subagent-fleet help {name}")
    behind = "; flags come after the command" if name.startswith("-") else ""
    hint = OTHER_WORDS.get(name) or nearest(name, (*known, *OTHER_NAMES))
    if name in second_words("task"):
        hint = " ".join(["subagent-fleet", "task", *map(quote_shell, words)])
    raise FleetError("unknown-command", f"unknown command `{name}`{behind}",
                     status=EXIT_USAGE, fix=hint or "subagent-fleet --help")


def find_command(name: str) -> Command:
    """Return the command of that name; an unknown one is refused with the nearest."""
    return find_call(name.split() or [name]).command


def second_words(first: str) -> list[str]:
    """Return the second words of the commands that share a first one."""
    names = [row.name.split() for row in COMMANDS]
    return [name[1] for name in names if len(name) == 2 and name[0] == first]


def parse_seconds(text: str) -> float:
    """Return a number of seconds that can be waited, a day at most."""
    number = float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text) else 0.0
    if 0 < number <= 86400:
        return number
    raise argparse.ArgumentTypeError("expected seconds, above 0, at most "
                                     f"86400, not `{text}`")


def parse_number(text: str, least: int, most: int) -> int:
    """Return a whole number between two bounds."""
    if re.fullmatch("-?[0-9]{1,9}", text) and least <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number, {least} to {most}, not `{text}`")


def parse_count(text: str) -> int:
    """Return a number of lines or questions."""
    return parse_number(text, 1, 9999)


def parse_port(text: str) -> int:
    """Return a port, 0 for any."""
    return parse_number(text, 0, 65535)


def parse_age(text: str) -> float:
    """Return the seconds of a time that is written with its unit."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match and int(match[1]):
        return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    raise argparse.ArgumentTypeError("expected a time such as 90s, 30m, "
                                     f"2h or 1d, not `{text}`")


def parse_choice(choices: Sequence[str], text: str) -> str:
    """Return one of these words."""
    if text in choices:
        return text
    accepted = ", ".join(filter(None, choices))
    raise argparse.ArgumentTypeError(f"`{text}`; accepted: {accepted}")


SECONDS = {"type": parse_seconds}
REPEAT = {"action": "append", "default": []}
TARGET_WORD = {"action": "append_const", "dest": "target"}
CONFIG = Flag("--config", "the fleet file, `-` for stdin; default: the nearest fleet.yaml",
              "FILE")
CONFIG_FILE = replace(CONFIG, note="the fleet file; default: the nearest fleet.yaml")
OUT = Flag("--out", "directory for generated files; default: beside fleet.yaml", "DIR")
JSON = Flag("--json", "print one JSON object")
FORCE = Flag("--force", "overwrite existing files")
TRUST = Flag("--trust", "answer yes to the trust question")
YES = Flag("--yes", "don't ask; answer yes")
TIMEOUT = Flag("--timeout", "seconds to wait", "S",
               {**SECONDS, "default": PROBE_TIMEOUT_SECONDS})


def name_of(flag: Flag) -> str:
    """Return the attribute of the options that a flag sets."""
    return flag.more.get("dest") or flag.name.lstrip("-").replace("-", "_")


def split_lists(texts: Iterable[str]) -> list[str]:
    """Return the words of options that take several, apart by commas."""
    return [word for text in texts for word in text.split(",") if word]


def first_words() -> list[str]:
    """Return the words that may come first, each once."""
    return list(dict.fromkeys(row.name.split()[0] for row in COMMANDS))


def type_words(*words: str) -> str:
    """Return a command of this program as it is typed."""
    return " ".join(("subagent-fleet", *map(quote_shell, words)))


def type_again(options: Namespace, **changes: Any) -> str:
    """Return the command that was typed, with changes.

    Every hint that means the same command again comes from here, so none forgets a flag. Another
    command is named plainly.
    """
    return type_command(options.row, {**vars(options), **changes})


def type_command(row: Command, values: Mapping[str, Any]) -> str:
    """Return a command as it is typed, with the values that are not its defaults."""
    words: list[str] = []
    flags: list[str] = []
    for flag in row.flags:
        value = values.get(name_of(flag))
        is_other = flag.more.get("action") == "append_const"  # another flag's, in a short form
        if not value or value == flag.more.get("default") or is_other:
            continue
        texts = [f"{one:g}" if isinstance(one, float) else str(one)
                 for one in (value if isinstance(value, list) else [value])]
        if not flag.name.startswith("-"):
            words += texts
        elif not flag.metavar or value == flag.more.get("const"):
            flags.append(flag.name)
        else:
            flags += [word for text in texts for word in (
                [f"{flag.name}={text}"] if text.startswith("-") else [flag.name, text])]
    passed = values.get("passed") or []
    return type_words(*row.name.split(), *words, *flags, *(["--", *passed] if passed else []))


def show_flag(flag: Flag) -> str:
    """Return a flag as it is typed: `-v, --verbose`, `--shell sh|fish|json`, `[COMMAND]`."""
    value = "|".join(filter(None, flag.more.get("choices", ()))) or flag.metavar
    if not flag.name.startswith("-"):
        return value
    name = f"{flag.short}, {flag.name}" if flag.short else flag.name
    return f"{name} {value}".rstrip()
