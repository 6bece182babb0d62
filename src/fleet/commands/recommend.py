"""`recommend`: propose which model should do what."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import agree
from fleet.cli.rows import CONFIG, JSON, SET_UP, TIMEOUT, YES, Flag, command, type_again
from fleet.cli.say import print_report
from fleet.config.keys import keys_of
from fleet.config.names import model_slot
from fleet.config.sections import Model
from fleet.files.starter import rewrite_fleet, show_block
from fleet.files.target import Change
from fleet.nodes.probe import probe_nodes
from fleet.plan.recommend import plan_recommendation
from fleet.plan.roles import MAIN_JOB
from fleet.plan.routes import show_machines
from fleet.plan.starter import PLACEHOLDERS_MARK
from fleet.start.constants import EXIT_OK, EXIT_REFUSED, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.steps.fleet_file import replace_config
from fleet.steps.words import format_flaw
from fleet.text.phrases import join_words
from fleet.text.tables import format_table, format_words, wrap_text
from fleet.text.terminal import PLAIN, Cell, clean_line, clean_text
from fleet.text.yaml_dump import dump_yaml
from fleet.views.measurements import format_measurements
from fleet.workspace.changes import format_diff
from fleet.workspace.config import find_config, load_config, look_of
from fleet.workspace.directory import Workspace
from fleet.workspace.records import read_measurements

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.plan.recommend import Recommendation
    from fleet.text.terminal import Look
    from fleet.world.world import World


def format_recommendation(advised: Recommendation, look: Look = PLAIN) -> str:
    """Return who does what now and who would, on which numbers, and what is not known."""
    rows = []
    plan = advised.starter.assignment
    own = advised.fleet.models.values()
    proposed = [load.model for load in plan.placements]
    for advice in advised.advices:
        now, planned = Cell("not used"), Cell("taken out of the file")
        if advice.now:
            now = Cell(f"{advice.now.ollama_model} on {show_machines(advice.now, own)}")
        if advice.planned:
            machines = show_machines(advice.planned, proposed)
            planned = Cell(f"{advice.planned.ollama_model} on {machines}")
        if not advice.is_move:
            planned = Cell("the same", "dim")
            if advice.settings:
                planned = Cell(f"the same, with {advice.settings}")
        rows.append((advice.job or "-", now, planned, advice.why))
    text = format_table(("Role", "Now", "Planned", "Why"), rows, look=look)
    idle = [f"{node} idles: {why}." for node, why in plan.idle.items()]
    for sentence in (*plan.counted, *idle):
        text += format_words([clean_line(sentence)], look, indent="  ")
    if advised.measured:
        text += "\nWhat was measured:\n" + format_measurements(advised.measured, look)
    if advised.unknown:
        text += "\nNot known yet:\n"
        for sentence in advised.unknown:
            text += format_words([sentence], look, margin="  ", indent="  ")
    return text


@command("recommend", "suggest who does what, from measurements", CONFIG,
         Flag("--write", "show the changes to the file, ask, and write them"),
         YES, TIMEOUT, JSON,
         group=SET_UP, examples=("recommend", "recommend --write"))
def cmd_recommend(options: Namespace, world: World) -> int:
    path = find_config(world, options.config)
    fleet = load_config(world, options.config).fleet
    states = probe_nodes(world, fleet.nodes, options.timeout)
    directory, _ = world.split(path)
    measured = read_measurements(Workspace(world, "" if path == "-" else directory))
    advised = plan_recommendation(fleet, states, measured)
    if not advised.starter.has_models:
        reasons = [f"{state.name}: {state.why or advised.starter.flaw or 'it has no model'}"
                   for state in states.values()]
        raise FleetError("no-model", "no node answers with a model that can do the work: "
                         + "; ".join(reasons), fix="subagent-fleet discover")

    look = look_of(world)
    text = format_recommendation(advised, look)
    memory = {name: node.memory_gb or 0.0 for name, node in fleet.nodes.items()}
    text += format_flaw(advised.starter.flaw, states.values(), "subagent-fleet recommend",
                        look, memory)
    if not options.json:
        world.out(f"{text}\n")
    written = []
    if options.write and advised.changes:
        written = write_recommendation(world, path, advised, options)
    if options.json:
        print_report(world, "recommend", report_recommendation(advised, written))
        return EXIT_OK

    following = "Nothing would change.\n"
    if written:
        following = "".join(clean_line(line) + "\n" for line in written)
        following = wrap_text(following, look)
        following += "Next: `subagent-fleet up`, or `subagent-fleet generate`\n"
    elif advised.changes:
        following = tell_recommendation(path, advised, options, look)
    world.out(following)
    return EXIT_OK


def plan_block(advised: Recommendation) -> dict[str, Any]:
    """Return the models of a plan, and the model of each agent."""
    fleet = advised.fleet
    models = advised.starter.tree["models"]
    jobs = advised.starter.assignment.jobs
    agents = {}
    for name, agent in fleet.agents.items():
        model = jobs.get(name, agent.model)
        if fleet.models[agent.model].cloud:
            model = agent.model
        elif model not in models:
            model = jobs[MAIN_JOB]
        agents[name] = {"model": model}
    return {"models": models, "agents": agents}


def plan_tree(advised: Recommendation) -> dict[str, Any]:
    """Return a fleet file's values with the plan in them; what is not planned stays."""
    fleet = advised.fleet
    tree = fleet.document.value
    block = plan_block(advised)
    jobs = advised.starter.assignment.jobs
    planned = {load.model.name: load.model for load in advised.starter.assignment.placements}

    models = {}
    for name, entry in tree["models"].items():
        now = fleet.models[name]
        if name in planned and model_slot(planned[name]) == model_slot(now):
            clouds = [heir for heir in now.fallback if fleet.models[heir].cloud]
            model = replace(planned[name], fallback=(*planned[name].fallback, *clouds))
            models[name] = _plan_entry(entry, now, model)
        elif name in planned:  # a new model gets the name of the one that it replaces
            models[name] = block["models"][name]
        elif now.cloud:
            heirs = [heir if heir in planned or fleet.models[heir].cloud else jobs[MAIN_JOB]
                     for heir in now.fallback]
            models[name] = _plan_entry(
                entry, now, replace(now, fallback=tuple(dict.fromkeys(heirs))))
    models = {**models, **{name: entry for name, entry in block["models"].items()
                           if name not in models}}
    agents = {name: {**entry, **block["agents"][name]}
              for name, entry in tree["agents"].items()}

    project = dict(tree["project"])
    tiers = dict(project.get("claude") or {})
    for tier, name in fleet.claude.items():
        if fleet.models[name].cloud:
            continue
        if tier == "main":
            tiers[tier] = jobs[MAIN_JOB]
        elif name not in models:
            del tiers[tier]  # the aliases show it then
    if tiers or project.get("claude"):
        project["claude"] = tiers
    return {**tree, "project": project, "models": models, "agents": agents}


def _plan_entry(entry: Mapping[str, Any], now: Model, planned: Model) -> dict[str, Any]:
    """Return a model's entry in a file with its planned alias, context and fallbacks."""
    changed = dict(entry)
    for name, key in keys_of(Model).items():
        value = getattr(planned, key.name)
        is_planned = key.name in ("alias", "context", "fallback")
        if not is_planned or value == getattr(now, key.name):
            continue
        spelled = key.also if key.also in entry else name
        changed[spelled] = list(value) if isinstance(value, tuple) else value
        if not value:
            del changed[spelled]
    return changed


def find_objection(path: str, advised: Recommendation, options: Namespace
                   ) -> FleetError | None:
    """Return why a plan cannot be written into a fleet file, or None."""
    if path == "-":
        return FleetError("usage", "recommend: --write changes a file, so the config must be "
                          "in one", status=EXIT_USAGE,
                          fix=type_again(options, config="fleet.yaml"))
    for state in advised.silent:
        fix = state.fix_from_afar
        if advised.fleet.nodes[state.name].mac:
            fix = "subagent-fleet warmup"
        return FleetError("node-silent", f"{state.name} does not answer ({state.reason}), so "
                          "nothing was written", status=EXIT_REFUSED, fix=fix)
    return None


def tell_recommendation(path: str, advised: Recommendation, options: Namespace,
                        look: Look) -> str:
    """Return how to carry out a recommendation: `--write`, or by hand where that refuses."""
    objection = find_objection(path, advised, options)
    if not objection:
        return wrap_text(f"To apply this: `{type_again(options, write=True)}`\n", look)
    sentence = f"To apply this, put this into {path}:"
    if advised.silent:
        state = advised.silent[0]
        sentence = (f"{state.name} does not answer ({state.reason}). First: {objection.fix}. "
                    + sentence)
    block = plan_block(advised)
    unused = [f"`{model.name}`" for model in advised.fleet.models.values()
              if model.name not in block["models"] and not model.cloud]
    if unused:
        them = "it" if len(unused) == 1 else "them"
        sentence = (f"Remove {join_words(unused)} from `models:`, as nothing will use {them} "
                    f"then.\n{sentence}")
    return wrap_text(clean_text(sentence), look) + "\n\n" + show_block(path, block)


def write_recommendation(world: World, path: str, advised: Recommendation,
                         options: Namespace) -> list[str]:
    """Write the plan into a fleet file as it is, if a person agrees; say so in lines."""
    objection = find_objection(path, advised, options)
    if objection:
        raise objection
    document = advised.fleet.document
    text = rewrite_fleet(document, plan_tree(advised), advised.starter.notes)
    text = text.replace(PLACEHOLDERS_MARK, "")
    change = Change(path, document.text.encode("utf-8"), text.encode("utf-8"), ours=True)
    shown = format_diff([change], advised.fleet, look_of(world, "stderr"))
    if options.yes:
        world.err(shown)
    else:
        agree(world, shown, f"Write this into {clean_line(path)}?", FleetError(
            "not-written", "nothing was written", status=EXIT_REFUSED,
            fix=f"`{type_again(options, yes=True)}`"))
    return replace_config(world, path, text)


def report_recommendation(advised: Recommendation, written: Sequence[str]) -> dict[str, Any]:
    """Return what `recommend --json` says."""
    def report_model(model: Model | None) -> dict[str, Any] | None:
        if model is None:
            return None
        return {"route": model.name, "node": model.node, "model": model.ollama_model,
                "context": model.context, "fallback": model.fallback}

    roles = [{"role": advice.job or None, "changes": advice.is_change, "why": advice.why,
              "settings": advice.settings, "now": report_model(advice.now),
              "planned": report_model(advice.planned)} for advice in advised.advices]
    return {"fleet": advised.fleet.name, "roles": roles, "measured": advised.measured,
            "unknown": advised.unknown, "counted": advised.starter.assignment.counted,
            "block": dump_yaml(plan_block(advised)), "written": bool(written)}
