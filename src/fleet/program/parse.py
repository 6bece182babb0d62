"""From words to a command and its options; one command run."""
from __future__ import annotations

import argparse
import functools
import re
from typing import TYPE_CHECKING

from fleet.cli.rows import (
    COMMANDS,
    OTHER_NAMES,
    WORK,
    find_call,
    find_command,
    name_of,
    parse_choice,
    second_words,
    type_words,
)
from fleet.cli.say import print_report
from fleet.program.help import cmd_help
from fleet.start.constants import EXIT_OK, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.record import Record
from fleet.tasks.state import STATES
from fleet.text.phrases import nearest, quote_shell
from fleet.text.tables import format_finding
from fleet.text.terminal import clean_line, paint
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Sequence
    from typing import Any, NoReturn

    from fleet.cli.rows import Command
    from fleet.world.world import World


# Takes the typed words, finds the command, reads its flags, runs it, and prints its refusal
# if there is one.


class CommandLine(Record):
    """A command line that was understood."""

    command: Command
    options: Namespace


def read_call(words: Sequence[str]) -> CommandLine:
    """Return the command and its options, or raise a one-line error."""
    called = find_call(words)
    return CommandLine(called.command, parse_arguments(called.command, called.words))


def parse_arguments(row: Command, words: list[str]) -> Namespace:
    """Return the options of a command, or raise a one-line error."""
    own = words
    passed = []
    if row.passes and "--" in words:
        cut = words.index("--")
        own = words[:cut]
        passed = words[cut + 1:]

    def refuse(unknown: list[str]) -> FleetError:
        return FleetError("usage", f"{row.name}: unknown argument `{unknown[0]}`",
                          status=EXIT_USAGE, fix=suggest_words(row, own, passed, unknown)
                          or f"subagent-fleet {row.name} --help")

    parser = make_parser(row, own)
    try:
        typed, unknown = parser.parse_known_intermixed_args(own)
    except MissingWords:
        unknown = find_unknown(row, own)
        if unknown:  # it may stand for what is missing
            raise refuse(unknown) from None
        raise
    if unknown:
        raise refuse(unknown)
    check_combination(row, parser, typed)
    typed.passed = passed
    typed.row = row
    return typed


def find_unknown(row: Command, words: Sequence[str]) -> list[str]:
    """Return the typed flags that a command does not have."""
    known = {name for flag in row.flags for name in (flag.name, flag.short)}
    return [word for word in words
            if re.match("--?[a-z]", word) and word.partition("=")[0] not in known]


def check_combination(row: Command, parser: argparse.ArgumentParser, typed: Namespace,
                      ) -> None:
    """Refuse flags that would be ignored beside others that were typed."""
    flags = {name_of(flag): flag.name for flag in row.flags}
    for pair in row.excludes:
        one, other = pair.split()
        if all(getattr(typed, key) != parser.get_default(key) for key in (one, other)):
            raise FleetError("usage", f"{row.name}: {flags[one]} and {flags[other]} "
                             "cannot be used together", status=EXIT_USAGE,
                             fix=f"leave out {flags[other]}")


class MissingWords(FleetError):
    """Words that a command needs were not typed."""


def suggest_missing(row: Command, own: Sequence[str], missing: str) -> str:
    """Return what to type where words of a command are missing: an example, or the rest."""
    if own:
        return f"{type_words(*row.name.split(), *own)} {missing.replace(', ', ' ')}"
    if any(flag.name == "patterns" for flag in row.flags):
        return "name tasks as `subagent-fleet tasks` shows them, or '*' for all of them"
    return f"subagent-fleet {row.examples[0]}"


def make_parser(row: Command, own: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return an argparse parser with this program's own errors."""
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            missing = message.removeprefix("the following arguments are required: ")
            if missing != message:
                raise MissingWords("usage", f"{row.name}: it needs {missing}", status=EXIT_USAGE,
                                   fix=suggest_missing(row, own, missing))
            for theirs, ours in (("argument ", ""),
                                 ("expected one argument", "expected a value"),
                                 ("ignored explicit argument", "it takes no value, not")):
                message = message.replace(theirs, ours, 1)
            raise FleetError("usage", f"{row.name}: {message}", status=EXIT_USAGE,
                             fix=f"subagent-fleet {row.name} --help")

    class Once(argparse.Action):
        """Takes one value: a second one would replace the first without a word."""

        first: Any = None

        def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any,
                     option_string: str | None = None) -> None:
            if self.first is not None:
                both = [f"{one:g}" if isinstance(one, float) else str(one)
                        for one in (self.first, values)]
                raise FleetError("usage", f"{row.name}: {option_string} takes one value, and "
                                 f"`{'` and `'.join(both)}` were typed", status=EXIT_USAGE,
                                 fix=f"leave out one {option_string}")
            self.first = values
            setattr(namespace, self.dest, values)

    # Without `usage` it renders one at each parse, for error messages that are not used here.
    parser = Parser(prog="subagent-fleet", usage="", add_help=False, allow_abbrev=False,
                    # without a width it imports shutil, and with it three packers
                    formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80))
    # Commands share functions, so the options of all commands are there. Those of the other
    # commands count as not typed.
    parser.set_defaults(**{name_of(flag): None for each in COMMANDS for flag in each.flags})
    for flag in row.flags:
        names = [flag.short, flag.name] if flag.short else [flag.name]
        once = {"action": Once} if flag.name.startswith("-") else {}
        if "choices" in flag.more:  # argparse's own error is only for programmers
            choose = functools.partial(parse_choice, flag.more["choices"])
            parser.add_argument(*names,
                                **{**once, **flag.more, "metavar": flag.metavar, "type": choose,
                                   "choices": None})
        elif flag.metavar:
            parser.add_argument(*names, **{"metavar": flag.metavar, **once, **flag.more})
        else:
            parser.add_argument(*names,
                                **{"action": "store_true", "default": False, **flag.more})
    return parser


# Flags of other programs, and ours for the same.
OTHER_FLAGS = {"-a": "--coder", "--quick": "--no-setup", "--follow": "--watch", "--merge": "--land",
               "--parallel": "--max", "-j": "--max", "-n": "--max"}
FORMER_FLAGS = {  # flags that are gone, or that other programs have, and what to type
    "bench --since": "leave it out: the newest commits come first",
    "discover --check": "subagent-fleet doctor",
    "env --shell": "subagent-fleet launch claude  (in any shell; `env` is for sh, bash and zsh)",
    "serve --no-receipts": "leave it out: a receipt holds no prompt and no answer",
    "skills list --json": "subagent-fleet skills list",
    "task answer --json": "subagent-fleet tasks --json",
    "task diff --json": "subagent-fleet task diff NAME --stat",
    "task tidy --json": "subagent-fleet task tidy --dry-run",
    "logs --since": "subagent-fleet logs -n 100; `trace --since 1h` lists sessions",
    "trace --prompts": "Claude Code keeps them: ~/.claude/projects",
    "trace --requests": "subagent-fleet logs --session ID",
    "trust --json": "subagent-fleet trust --show",
    "ui --log-file": "write `provider: litellm` under project.gateway in fleet.yaml",
    "worker --json": "subagent-fleet worker",
    "init --memory": "write `memory_gb:` under the machine in fleet.yaml",
    "init --scan": "subagent-fleet discover --scan",
    "up --detach": "subagent-fleet serve  (in its own terminal)",
    "up --dry-run": "subagent-fleet generate --diff",
    "up --node": "subagent-fleet add NAME=URL",
    "run --branch": "write `branch:` in tasks.yaml: subagent-fleet help runs",
    "run --dry-run": "subagent-fleet validate",
    "run --watch": "subagent-fleet tasks --watch",
    "task land --all": "leave out --all: it takes every finished task",
    "task land --dry-run": "subagent-fleet tasks",
    "task accept --all": "subagent-fleet task accept '*'",
    "task forget --all": "subagent-fleet task forget '*'",
    "task retry --all": "subagent-fleet task retry '*'",
    "task retry --failed": "subagent-fleet tasks  (its last lines name them, to paste)",
    "task stop --all": "subagent-fleet task stop '*'",
    "task tidy --all": "leave out --all: it takes every finished task",
    "task retry --model": "change `model:` in tasks.yaml, then: subagent-fleet task retry NAME",
    "run --prompt": "subagent-fleet run 'NAME:what to do'",
    "run -p": "subagent-fleet run 'NAME:what to do'",
    "ui --host": "on the machine where you sit: ssh -L 8080:127.0.0.1:8080 HOST"}
TASK_FLAG_WORDS = {
    "--batch": "a pattern, as in: subagent-fleet task stop 'jwt-*'",
    "--grouped": "leave it out: tasks of one `--times` stand together",
    "--stop": "subagent-fleet task stop NAME"}


def suggest_flag(word: str, flags: Collection[str]) -> str:
    """Return what was probably meant by an unknown flag, or nothing."""
    typed = word.partition("=")[0]
    if OTHER_FLAGS.get(typed) in flags:
        return f"did you mean `{OTHER_FLAGS[typed]}`?"
    if typed in ("--host", "--port"):
        return f"write `{typed[2:]}:` under project.gateway in fleet.yaml"
    if re.fullmatch("-[a-z]", typed):
        for flag in flags:
            if flag.startswith(f"--{typed[1]}"):
                return f"did you mean `{flag}`?"
    # Compare without the dashes: with them, `--port` would look like `--out`.
    bare = {flag.lstrip("-"): flag for flag in flags}
    hint = nearest(typed.lstrip("-"), bare)
    return hint.replace("`", "`--", 1)


def suggest_instead(row: Command, flag: str) -> str:
    """Return what to type instead of a flag that is gone or another program's, or nothing."""
    state = flag.lstrip("-")
    if row.name == "tasks" and state in STATES:
        return f"subagent-fleet tasks | grep {state}"
    hint = FORMER_FLAGS.get(f"{row.name} {'--all' if flag == '-a' else flag}", "")
    return hint or (TASK_FLAG_WORDS.get(flag, "") if row.group == WORK else "")


def suggest_words(row: Command, own: list[str], passed: list[str], unknown: list[str]) -> str:
    """Return what was probably meant by unknown words, or nothing."""
    flags = ["--help", *(flag.name for flag in row.flags if flag.name.startswith("-"))]
    first = unknown[0]
    better = [word for word in own if word not in unknown]

    is_config = (first.endswith((".yaml", ".yml", ".json")) and "--config" in flags
                 and not first.startswith("tasks."))
    if is_config and "--config" not in own:
        better += ["--config", first]
        if passed:
            better += ["--", *passed]
    else:
        hint = suggest_instead(row, first.partition("=")[0]) or suggest_flag(first, flags)
        if first.startswith("tasks.") and not row.passes:
            hint = f"leave it out: subagent-fleet {row.name}"
        elif row.name == "logs" and not first.startswith("-"):
            hint = f"subagent-fleet task log {quote_shell(first)}"
        elif row.name == "add" and len(better) == 1 and not first.startswith("-"):
            hint = f"subagent-fleet add {quote_shell(better[0])}={quote_shell(first)}"
        elif "--model" in flags and not first.startswith("-"):
            hint = f"subagent-fleet {row.name} --model {quote_shell(first)}"
        if hint or not row.passes:
            return hint
        if (row.name == "up"
                and any(flag.name == first for flag in find_command("init").flags)):
            return f"subagent-fleet init {first}"
        better += ["--", *unknown, *passed]
    return type_words(*row.name.split(), *better)


def name_command(words: Sequence[str]) -> Sequence[str]:
    """Return the words in front of `--help` that name a command, if they do."""
    first = [OTHER_NAMES.get(word, word) for word in words[:1]]
    if not first or first[0].startswith("-"):
        return ()
    if words[1:2] and words[1] in second_words(first[0]):
        return words[:2]
    return first


def run_words(words: list[str], world: World) -> int:
    """Run a command line, or say why not; return the exit status."""
    own = words[:words.index("--")] if "--" in words else words
    try:
        if not words or "-h" in own or "--help" in own:
            cmd_help.run(argparse.Namespace(command=name_command(own)), world)
            return EXIT_OK if words else EXIT_USAGE

        call = read_call(words)
        return call.command.run(call.options, world)
    except FleetError as error:
        tell_error(error, world)
        if "--json" in own:
            tell_error_as_json(error, " ".join(name_command(own)), world)
        return error.status


def tell_error(error: FleetError, world: World) -> None:
    """Print why a command was refused; for a config, every problem in it."""
    look = look_of(world, "stderr")
    if not error.findings:
        world.err(format_finding(error.finding, look=look))
        return
    world.err(paint(f"Invalid {clean_line(error.where)}:", "bold", look) + "\n")
    for finding in error.findings:
        world.err(format_finding(finding, indent="  ", look=look))


def tell_error_as_json(error: FleetError, name: str, world: World) -> None:
    """Print an error as JSON, with what the command had found before."""
    print_report(world, name, {
        "error": error.finding, "findings": error.findings, **error.report})
