"""Measurements as a table, and keeping them."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.say import check_names, render_report
from fleet.config.names import find_models, full_model_name
from fleet.config.node import NodeModel
from fleet.nodes.probe import probe_nodes
from fleet.plan.measured import BENCH_FILE, merge_measurements
from fleet.plan.recommend import plan_unlisted
from fleet.start.constants import PROBE_TIMEOUT_SECONDS
from fleet.text.tables import format_table, format_words
from fleet.text.terminal import PLAIN, Cell, clean_line, mark
from fleet.workspace.records import read_measurements

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet, Model
    from fleet.plan.measured import Measurement, Score
    from fleet.text.terminal import Look
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def format_measurements(measured: Sequence[Measurement], look: Look = PLAIN) -> str:
    """Return a table of measurements, with notes below it."""
    numbers = ("Load s", "Prompt tok/s", "Answer tok/s", "First s")
    headers = ["Model", "Machine", *numbers, "Tools", "Context"]
    rows = []
    for known in measured:
        prompts = [rate for rate in (known.prompt_rate, known.long_prompt_rate)
                   if rate is not None]
        rows.append([known.model, known.node, _show_number(known.load_seconds),
                     "/".join(f"{rate:,.0f}" for rate in prompts) or "-",
                     _show_number(known.answer_rate),
                     _show_number(known.first_token_seconds, digits=2),
                     _score_cell(known.tools, look), _score_cell(known.context, look)])

    text = format_table(headers, rows, look=look, right=numbers, spare=("Load s", "First s"))
    if not any(known.is_worth_keeping for known in measured):
        text = "Nothing was measured:\n"
    notes = "".join(format_words([Cell(f"{known.model} on {known.node}:", "dim"),
                                  clean_line(note)], look, indent="  ")
                    for known in measured for note in _measured_notes(known))
    return f"{text}\n{notes}" if notes else text


def _show_number(number: float | None, *, digits: int = 1) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def _score_cell(score: Score | None, look: Look) -> Cell:
    if score is None:
        return Cell("-")
    role = "bad"
    if score.is_full:
        role = "ok"
    elif score.passed:
        role = "warn"
    return mark(f"{score.passed}/{score.asked}", role, look)


def _measured_notes(known: Measurement) -> Iterator[str]:
    """Yield notes on what a model did wrong, and why measuring stopped."""
    topics = {"tools": known.tools, "context": known.context}
    for topic, score in topics.items():
        if score and not score.is_full:
            yield f"{topic}: {score.instead}"
    if known.failure:
        yield f"measuring stopped: {known.failure}"
    elif known.load_seconds is not None and not known.is_counted:
        yield "its speeds were timed here, because its server does not report them"


def find_chosen(fleet: Fleet, options: Namespace, world: World
                ) -> Iterator[tuple[Model, NodeState, NodeModel]]:
    """Yield the models to ask, with their nodes' facts; cloud models only if named."""
    if options.exam:  # the exam needs a route to each model
        check_names("model", options.model, fleet.models, fleet.name)
    states = probe_nodes(world, fleet.nodes, PROBE_TIMEOUT_SECONDS, fleet.models)
    models = list(fleet.models.values())
    if options.model and not options.exam:
        models += [model for state in states.values() for model in plan_unlisted(fleet, state)]
        places = {full_model_name(model.ollama_model): model.ollama_model for model in models}
        check_names("model", [name for name in options.model
                              if full_model_name(name) not in places],
                    [*fleet.models, *places.values()], fleet.name)
    full_names = set(map(full_model_name, options.model))
    for model in models:
        is_named = (model.name in options.model
                    or full_model_name(model.ollama_model) in full_names)
        if is_named or not (options.model or model.cloud):
            state = states[model.node]
            held = next(iter(find_models(state.models, model.ollama_model)), NodeModel(""))
            yield model, state, held


def tell_measurements(measured: Sequence[Measurement], look: Look) -> str:
    """Return the measurements, and the next command if there are any."""
    if not measured:
        return "Every model runs in a cloud. To measure one, name it with `--model`.\n"
    text = format_measurements(measured, look)
    if any(known.is_worth_keeping for known in measured):
        following = "Next: `subagent-fleet recommend`"
        text += "\n" + format_words([following], look)
    return text


def keep_measurements(workspace: Workspace, measured: Sequence[Measurement]) -> None:
    """Add measurements to those of earlier runs."""
    merged = merge_measurements(read_measurements(workspace), measured)
    report = render_report("bench", {"measurements": merged})
    workspace.keep(BENCH_FILE, report.encode("ascii"))
