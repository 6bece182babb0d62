"""`help`, which `--help` calls, too."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import (
    COMMANDS,
    MORE,
    OTHER_NAMES,
    OTHER_WORDS,
    Flag,
    command,
    find_call,
    first_words,
    second_words,
)
from fleet.program.pages import (
    HELP_COLUMNS,
    TOPICS,
    format_command_help,
    format_overview,
    format_page,
)
from fleet.start.constants import EXIT_OK, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.text.phrases import nearest
from fleet.text.tables import format_pairs
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("help", "show how a command is used, or read about a topic",
         Flag("command", "which command or topic", "[COMMAND]",
              {"nargs": "*", "default": ()}),
         group=MORE, examples=("help validate", "help config"))
def cmd_help(options: Namespace, world: World) -> int:
    words = " ".join(options.command).split()
    look = look_of(world)
    look = replace(look, columns=look.columns or HELP_COLUMNS)  # prose, in a pipe, too
    if not words:
        text = format_overview(look)
    elif words[0] in TOPICS and len(words) == 1:
        text = format_page(TOPICS[words[0]].page(), look)
    elif second_words(words[0]) and len(words) == 1:
        text = format_pairs([(row.name, row.summary) for row in COMMANDS
                             if row.name.split()[0] == words[0]], look)
    else:
        if words[0] not in (*OTHER_NAMES, *first_words()):
            raise FleetError("unknown-command", f"help: no command or topic `{words[0]}`",
                             status=EXIT_USAGE,
                             fix=OTHER_WORDS.get(words[0])
                             or words[0] in second_words("task")
                             and f"subagent-fleet help task {words[0]}"
                             or nearest(words[0], (*TOPICS, *first_words()))
                             or "subagent-fleet --help")
        called = find_call(words)
        if called.words:
            raise FleetError("usage", f"help: `{called.words[0]}` is more than "
                             "a command's name", status=EXIT_USAGE,
                             fix=f"subagent-fleet help {called.command.name}")
        text = format_command_help(called.command, look)
    world.out(text)
    return EXIT_OK
