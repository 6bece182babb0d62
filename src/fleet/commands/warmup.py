"""`warmup`: load the models."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import CONFIG, JSON, REPEAT, SECONDS, SERVE, Flag, command
from fleet.cli.say import check_names, print_report
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM
from fleet.steps.warming import Teller, known_model_names, report_warmth, warm_fleet
from fleet.workspace.config import load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("warmup", "load models before you need them", CONFIG,
         Flag("--model", "only this model", "MODEL", REPEAT,
              offers=("models",)),
         Flag("--agent", "only the model of this agent", "AGENT", REPEAT,
              offers=("agents",)),
         Flag("--pull", "download missing models"),
         Flag("--unload", "take models out of memory"),
         Flag("--timeout", "seconds for each model; default: its own `timeout`", "S",
              {**SECONDS, "default": 0.0}), JSON,
         group=SERVE, examples=("warmup", "warmup --agent implementer", "warmup --pull"),
         excludes=("unload pull",))
def cmd_warmup(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    check_names("agent", options.agent, fleet.agents, fleet.name)
    check_names("model", options.model, known_model_names(fleet), fleet.name)

    say = (lambda text: None) if options.json else world.out
    warmths = warm_fleet(fleet, options, world, teller=Teller(say, look_of(world)))
    if options.json:
        print_report(world, "warmup", {"results": [
            report_warmth(name, warmth, world.clock()) for name, warmth in warmths.items()]})
    return EXIT_OK if all(warmth.ok for warmth in warmths.values()) else EXIT_PROBLEM
