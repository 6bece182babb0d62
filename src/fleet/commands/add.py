"""`add`: add a machine."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import CONFIG_FILE, REPEAT, SET_UP, Flag, command, type_again
from fleet.cli.say import tell_findings
from fleet.files.starter import insert_sections, show_block
from fleet.start.constants import EXIT_OK, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.steps.fleet_file import insert_node, plan_insertion
from fleet.steps.machines import parse_nodes
from fleet.text.tables import wrap_text
from fleet.text.terminal import clean_line, clean_text
from fleet.workspace.config import find_config, load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("add", "add a machine and its models to fleet.yaml",
         Flag("machine", "the machine: a name, and where its Ollama answers", "NAME=URL"),
         CONFIG_FILE,
         Flag("--model", "only this model of the machine",
              "MODEL", REPEAT),
         Flag("--dry-run", "write nothing; show what would change"),
         group=SET_UP, examples=("add mini=192.168.1.50",
                                 "add mini=mini.local --model qwen3:8b"))
def cmd_add(options: Namespace, world: World) -> int:
    path = find_config(world, options.config)
    if path == "-":
        raise FleetError("usage", "add: it changes a file, so the config must be in one",
                         status=EXIT_USAGE, fix=type_again(options, config="fleet.yaml"))
    def retype(text: str) -> str:
        return type_again(options, machine=text)

    node, = parse_nodes([options.machine], options, lambda _, text: retype(text)).values()
    config = load_config(world, options.config)
    added = plan_insertion(config, node, options.model, world, retype)
    text = insert_sections(config.fleet.document, added)
    verb = "Would add" if options.dry_run else "Added"
    shown = f"{verb} {node.name} to {path}:\n\n{show_block(path, added)}"
    if options.dry_run:
        world.out(clean_text(shown))
        return EXIT_OK

    kept = insert_node(world, config, path, text)
    world.out(clean_text(shown))
    # Nothing uses the new models yet, which is no problem: the next command changes that.
    known = {finding.what for finding in config.warnings}
    tell_findings([finding for finding in load_config(world, options.config).warnings
                   if finding.what not in known
                   and finding.slug not in ("unused-model", "no-fallback")], world)
    following = (f"{clean_line(kept)}\nNext: `subagent-fleet recommend --write` plans the fleet "
                 "with it, then `subagent-fleet up`\n")
    world.out("\n" + wrap_text(following, look_of(world)))
    return EXIT_OK
