"""`init`: write a new fleet file; the examples it can write."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import agree
from fleet.cli.rows import EXAMPLE_NAMES, FORCE, REPEAT, SET_UP, Flag, command, type_again
from fleet.cli.say import check_names
from fleet.config.address import split_endpoint
from fleet.config.node import NodeState
from fleet.config.sections import Node
from fleet.plan.starter import plan_hybrid
from fleet.plan.trust import plan_node_stakes
from fleet.runs.folder import TASK_FILES
from fleet.start.constants import (
    CLAUDE_ENDPOINT,
    CONFIG_NAMES,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_USAGE,
)
from fleet.start.errors import FleetError
from fleet.start.gate import asset
from fleet.start.record import replace
from fleet.steps.fleet_file import write_fleet
from fleet.steps.machines import (
    find_first_fleet,
    parse_nodes,
    refuse_worse,
)
from fleet.steps.words import format_flaw, write_first_fleet
from fleet.tasks.starter import describe_guess, render_tasks
from fleet.text.phrases import some_of
from fleet.text.tables import format_pairs, format_words, wrap_text
from fleet.text.terminal import PLAIN, clean_line
from fleet.work.typed import look_at_project
from fleet.workspace.config import look_of, search_config
from fleet.workspace.directory import Workspace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.plan.starter import Starter
    from fleet.text.terminal import Look
    from fleet.world.world import World


def format_after_init(starter: Starter, states: Sequence[NodeState], again: str,
                      look: Look = PLAIN) -> str:
    """Return what to type next for what was found; `again` is the command that starts over."""
    silent = [state for state in states if not state.online]
    if starter.has_models:
        text = ""
        if silent:
            text = format_words(
                [f"{some_of([state.name for state in silent], 5)}: not reached;",
                 "`subagent-fleet discover` shows how to fix that."], look,
                indent="  ")
        said = wrap_text("Check the file, then start everything, or only write the files:\n",
                         look)
        return f"{text}\n{said}  subagent-fleet up\n  subagent-fleet generate\n"

    if all(state.reason == "not asked" for state in states):
        return ("Fill in your machines' addresses, then run:\n"
                "  subagent-fleet discover\n  subagent-fleet generate\n")
    text = "".join(format_words([f"{clean_line(state.name)} did not answer: {state.fix}."],
                                look, indent="  ") for state in silent)
    return f"{text}When a model is there, run:\n  {again}\n"


@command("init", "write fleet.yaml with the models your machines have",
         Flag("--output", "where to write; default: fleet.yaml (a .json name writes JSON)",
              "FILE"),
         Flag("--node", "also ask this machine", "NAME=URL", REPEAT),
         Flag("--offline", "contact no machine, write placeholders"),
         Flag("--hybrid", "your own Claude login for the main session, subagents at home"),
         Flag("--example", "write this example instead; `list`, or no name, names them",
              "[NAME]", {"nargs": "?", "const": "list", "default": ""},
              offers=EXAMPLE_NAMES), FORCE,
         group=SET_UP, examples=("init", "init --node mini=http://192.168.1.50:11434",
                                 "init --hybrid", "init --example list"),
         excludes=("example node", "example hybrid", "example offline"))
def cmd_init(options: Namespace, world: World) -> int:
    if options.example:
        return write_example(options, world)
    again = type_again(options, force=True)

    def retype(place: int, text: str) -> str:
        texts = [*options.node[:place], text, *options.node[place + 1:]]
        return type_again(options, node=[*filter(None, texts)])

    nodes = parse_nodes(options.node, options, retype)
    typed = [*nodes]
    output = check_output(options, world)
    first = find_first_fleet(world, nodes, output, offline=options.offline)
    states, starter = first.states, first.starter
    if options.force and not options.offline:
        refuse_worse(world, output, starter, [state for state in states
                                              if not state.online and state.name != "local"],
                     lambda text: retype(typed.index(text.partition("=")[0]), text))
    if options.hybrid:
        starter = plan_hybrid(starter)
    look = look_of(world)
    said = write_first_fleet(world, output, replace(first, starter=starter), look,
                             offline=options.offline)
    said += format_flaw(starter.flaw, states, again, look, first.memory)
    if options.hybrid:
        accepted = plan_node_stakes([Node("anthropic", split_endpoint(CLAUDE_ENDPOINT).url,
                                          provider="anthropic", auth="client")])
        said += ("With `--hybrid` you accepted:\n"
                 + "".join(f"  {stake.what}\n" for stake in accepted)
                 + "To take it back: subagent-fleet trust --forget\n")
    said += format_after_init(starter, states, again, look)
    world.out(said)
    return EXIT_OK


def check_output(options: Namespace, world: World) -> str:
    """Return where `init` writes; refuse to replace or hide an existing file without asking."""
    output = options.output or CONFIG_NAMES[0]
    if output == "-":
        raise FleetError("usage", "init: it writes a file, not to standard output",
                         status=EXIT_USAGE, fix=type_again(options, output=CONFIG_NAMES[0]))
    again = type_again(options, force=True)
    directory, name = world.split(output)
    there = Workspace(world, directory).read(name)
    if options.force:
        return output
    if there is not None:
        raise FleetError("exists", f"{output} already exists", status=EXIT_REFUSED,
                         fix=f"edit it, or `{again}` (a copy is kept)")

    place = world.real_path(directory or ".")
    other = search_config(world, place, shown=place)
    if other and name in CONFIG_NAMES:  # another name is only read when it is typed
        what = f"{world.real_path(other)} is already the fleet of this directory"
        agree(world, "", f"{clean_line(what)}. Write {clean_line(output)}, too?", FleetError(
            "second-fleet", what, status=EXIT_REFUSED,
            fix=f"edit that one, or `{again}` for a second one here"))
    return output


def write_example(options: Namespace, world: World) -> int:
    """Write an example as the fleet file and say what to do next; or list all examples."""
    if options.example == "list":
        rows = [(name, summary) for name, (summary, _) in EXAMPLES.items()]
        rows.append((TASKS_EXAMPLE, "tasks for agents in parallel: a tasks.yaml"))
        world.out(format_pairs(rows, look_of(world)))
        return EXIT_OK

    name = EXAMPLE_ALIASES.get(options.example, options.example)
    check_names("example", (name,), (*EXAMPLES, TASKS_EXAMPLE), "init")
    if name == TASKS_EXAMPLE:
        return write_tasks_example(options, world)
    output = check_output(options, world)
    summary, text = EXAMPLES[name]
    lines = [*write_fleet(world, output, text), f"{name}: {summary}.",
             "Fill in your own machines and models, then run `subagent-fleet doctor`."]
    said = wrap_text("".join(clean_line(line) + "\n" for line in lines), look_of(world))
    world.out(said)
    return EXIT_OK


def write_tasks_example(options: Namespace, world: World) -> int:
    """Write a task file whose setup and check are guessed from the files around it."""
    output = options.output or TASK_FILES[0]
    directory = world.split(output)[0] or "."
    if world.kind_of(output) != "absent" and not options.force:
        raise FleetError("exists", f"{output} already exists", status=EXIT_REFUSED,
                         fix=f"edit it, or `{type_again(options, force=True)}`")
    guess = look_at_project(world, directory)
    world.replace_files([(output, render_tasks(guess).encode("utf-8"), 0o644)])
    said = [f"Wrote {output}.", describe_guess(guess),
            "Write your own prompts into it, then: subagent-fleet run --land"]
    world.out(wrap_text("".join(f"{clean_line(line)}\n" for line in said), look_of(world)))
    return EXIT_OK


# -- what `init --example` writes: {name: (what it is, the file)} --


LAPTOP_EXAMPLE = asset("examples/laptop.yaml")
THREE_MACHINES_EXAMPLE = asset("examples/three-machines.yaml")
HYBRID_EXAMPLE = asset("examples/hybrid.yaml")
EXAMPLES = {
    "laptop": ("one machine with Ollama", LAPTOP_EXAMPLE),
    "three-machines": ("three machines, the reviewer of another family", THREE_MACHINES_EXAMPLE),
    "hybrid": ("the main session on your Claude login, subagents at home",
               HYBRID_EXAMPLE),
}
TASKS_EXAMPLE = "tasks"  # which is made of the project it is written for
# Names of examples in earlier versions.
EXAMPLE_ALIASES = {"ollama-laptop-only": "laptop", "claude-agents": "laptop",
                   "multi-node-cluster": "three-machines", "litellm-proxy": "three-machines"}
