"""`schema`: the JSON Schema of a file."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet.cli.rows import MORE, Flag, command
from fleet.config.keys import render_schema
from fleet.start.constants import EXIT_OK
from fleet.tasks.spec import render_tasks_schema

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("schema", "print the JSON Schema of the fleet file, or of the task file",
         Flag("kind", "which kind of file", "KIND",
              {"nargs": "?", "default": "fleet", "choices": ("fleet", "tasks")}),
         group=MORE, examples=("schema > fleet.schema.json",
                               "schema tasks > tasks.schema.json"))
def cmd_schema(options: Namespace, world: World) -> int:
    schema = render_tasks_schema() if options.kind == "tasks" else render_schema()
    world.write(json.dumps(schema, indent=2) + "\n")
    return EXIT_OK
