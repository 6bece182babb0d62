"""`validate`: check the fleet file and the task file."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import has_config
from fleet.cli.rows import CONFIG, JSON, LOOK, Flag, command
from fleet.cli.say import print_report, tell_findings
from fleet.start.constants import CONFIG_NAMES, EXIT_OK, EXIT_PROBLEM
from fleet.start.errors import FleetError
from fleet.text.phrases import count_of
from fleet.text.terminal import clean_line
from fleet.views.observe import find_task_file_near, refuse_config
from fleet.work.typed import load_tasks
from fleet.workspace.config import load_config

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("validate", "check the config", CONFIG, Flag("--strict", "warnings are errors"),
         JSON, group=LOOK, examples=("validate", "validate --config - < fleet.yaml"))
def cmd_validate(options: Namespace, world: World) -> int:
    has_fleet = options.config or has_config(world)
    tasks = "" if has_fleet else find_task_file_near(world, CONFIG_NAMES[0])
    config = None
    try:
        if not tasks:  # a task file may stand alone
            config = load_config(world, options.config)
            tasks = find_task_file_near(world, config.fleet.document.source)
        if tasks:
            load_tasks(world, tasks, config.fleet if config else None)
    except FleetError as error:
        if not options.json:
            raise
        return refuse_config(error, options, world)
    source = config.fleet.document.source if config else tasks
    warnings = config.warnings if config else ()
    valid = not (options.strict and warnings)

    if options.json:
        report = {"file": source, "valid": valid, "findings": warnings}
        print_report(world, "validate", report)
        return EXIT_OK if valid else EXIT_PROBLEM

    tell_findings(warnings, world)
    if not valid:
        raise FleetError("strict", f"{count_of(warnings, 'warning')} and --strict",
                         fix="fix them, or leave out --strict")
    for name in filter(None, dict.fromkeys((source, tasks))):
        world.out(f"{clean_line(name)} is valid.\n")
    return EXIT_OK
