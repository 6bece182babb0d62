"""Waking machines and loading models, with progress."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.live import LiveLine
from fleet.cli.say import open_workspace
from fleet.config.names import full_model_name
from fleet.nodes.wake import wake_nodes
from fleet.nodes.warmup import Warmth, WarmUp, warm_nodes
from fleet.start.constants import STATE_DIRECTORY
from fleet.start.errors import FleetError
from fleet.start.record import Record, fields
from fleet.text.json import read_page, render_json
from fleet.text.phrases import show_span, some_of
from fleet.text.tables import format_entry, format_fix, format_words
from fleet.text.terminal import PLAIN, Cell, mark, paint
from fleet.text.width import width_of
from fleet.workspace.trust import find_untrusted

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    from fleet.config.node import LoadedModel
    from fleet.config.sections import Fleet
    from fleet.nodes.wake import Waking
    from fleet.text.terminal import Look
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def format_waking(waking: Waking, look: Look = PLAIN) -> str:
    """Return the outcome of waking a machine."""
    role, words = {
        "stopped": ("bad", "is awake, but nothing listens there: start Ollama"),
        "woken": ("ok", f"answered after {waking.seconds:.0f} s"),
        "silent": ("bad", f"did not answer within {waking.seconds:.0f} s. Check its `mac:`, and "
                          "that its network card may wake it")}[waking.state]
    return format_words([mark(waking.node, role, look), Cell(words)], look, indent="  ")


def wake_sleepers(fleet: Fleet, names: Collection[str], teller: Teller, world: World) -> None:
    """Wake those nodes that have a `mac` and do not answer; say so."""
    nodes = [node for name, node in fleet.nodes.items() if node.mac and name in names]
    if not nodes or find_untrusted(world, fleet):
        return
    began = world.clock()
    ended = []
    with LiveLine(world) as line:
        for waking in wake_nodes(world, nodes):
            if waking:
                ended.append(waking.node)
                if waking.state != "awake":
                    line.clear()
                    teller.say(format_waking(waking, teller.look))
            left = [node.name for node in nodes if node.name not in ended]
            if left and world.clock() > began + 1:
                line.show(f"Waiting for {some_of(left, 4)}: {show_span(world.clock() - began)}")


def format_share(loaded: LoadedModel) -> str:
    """Return which part of a loaded model is on the GPU."""
    if loaded.gpu_percent is None:
        return ""
    if loaded.gpu_percent == 0:
        return "on CPU"
    return f"{loaded.gpu_percent} % on GPU"


def format_warmth(warmth: Warmth, row: Sequence[str], widths: Sequence[int],
                  look: Look = PLAIN) -> str:
    """Return a row with the outcome and its fix.

    If the model waits for others, the row says for which.
    """
    fix = ""
    if warmth.stage == "busy":
        outcome = mark("busy:", "warn", look)
        said = f"{warmth.wait}; waiting"
    elif warmth.ok:
        loaded = warmth.loaded
        details = [f"context {loaded.context or '?'}", format_share(loaded)] if loaded else []
        details += [f"{warmth.seconds:.1f} s", warmth.detail]
        outcome = mark("ok", "ok", look)
        said = f"({', '.join(filter(None, details))})"
    else:
        outcome = mark(f"{warmth.state}:", "warn" if warmth.state == "busy" else "bad", look)
        said = warmth.detail
        fix = format_fix(warmth.fix, look, margin="    ")
    # If it is too narrow, leave out the model.
    if look.columns and sum(widths) + 36 > look.columns:
        row, widths = row[:2], widths[:2]
    return format_entry(row, widths, [outcome, said], look, margin="  ") + fix


def tell_progress(works: Iterable[Warmth], now: float) -> str:
    """Return a line with the progress of each model."""
    parts = []
    for work in works:
        stage = work.stage
        if stage in ("waiting", "done"):
            continue
        if stage == "pulling" and work.size:
            stage += f" {100 * work.pulled // work.size} % of {work.size / 1e9:.1f} GB,"
        elif stage == "busy":
            stage = f"waits for {some_of(work.rivals, 1)}"
        parts.append(f"{work.model.name} {stage} {show_span(round(now - work.began))}")
    return " | ".join(parts)


class Teller(Record):
    """Where messages go, and how text looks there."""

    say: Callable[[str], None]
    look: Look


def warm_fleet(fleet: Fleet, options: Namespace, world: World, *, teller: Teller,
               busy_seconds: float = WarmUp.busy_seconds) -> dict[str, Warmth]:
    """Load models as their routes need them; print each outcome as it comes."""
    say, look = teller.say, teller.look
    warmths = plan_warmths(fleet, options)
    groups: dict[str, list[Warmth]] = {}
    for warmth in dict.fromkeys(warmths.values()):
        groups.setdefault(warmth.node.name, []).append(warmth)

    heading = "Unloading models:"
    if not options.unload:
        wake_sleepers(fleet, groups, teller, world)
        heading = "Warming models:"
    say(paint(heading, "bold", look) + "\n")

    how = WarmUp(options.timeout or None, busy_seconds, pull=options.pull,
                 unload=options.unload, fleet=fleet)
    workspace = open_workspace(options, world)
    rows = {name: (name, warmth.node.name, warmth.model.ollama_model)
            for name, warmth in warmths.items()}
    widths = [max(map(width_of, column)) for column in zip(*rows.values())]
    said: dict[str, str] = {}  # by route: each state is printed once
    kept_at = 0.0
    try:
        with LiveLine(world) as line:
            for _ in warm_nodes(world, groups, how):
                if world.clock() >= kept_at + 1.0:
                    keep_warmths(workspace, warmths)
                    kept_at = world.clock()
                for name, warmth in warmths.items():
                    state = f"{warmth.stage} {warmth.state}"
                    if warmth.stage in ("busy", "done") and said.get(name) != state:
                        said[name] = state
                        line.clear()
                        say(format_warmth(warmth, rows[name], widths, look))
                line.show(tell_progress(dict.fromkeys(warmths.values()), world.clock()))
    finally:
        keep_warmths(workspace, warmths)
    return warmths


WARMUP_FILE = f"{STATE_DIRECTORY}/warmup.json"
WARMUP_SECONDS = 10.0  # an older file is from a warm-up that ended or was cut off
SHOWN_WARMTHS_LIMIT = 200
WARMUP_SCHEMA = "warmup-progress/2"


class WarmRow(Record):
    """The progress of a model's warm-up."""

    route: str
    node: str
    model: str
    stage: str
    state: str
    detail: str
    pulled_bytes: int
    size_bytes: int
    seconds: float


class WarmPage(Record):
    """The progress file of a warm-up."""

    time: float
    models: tuple[WarmRow, ...]


def keep_warmths(workspace: Workspace, warmths: Mapping[str, Warmth]) -> None:
    """Write the progress file for the dashboard, if there is a workspace."""
    world = workspace.world
    if world.kind_of(workspace.path(STATE_DIRECTORY)) != "directory":
        return
    rows = [report_warmth(name, warmth, world.clock()) for name, warmth in warmths.items()]
    page = {"schema": f"subagent-fleet/{WARMUP_SCHEMA}", "time": round(world.now(), 1),
            "models": [{key: row[key] for key in fields(WarmRow)} for row in rows]}
    with contextlib.suppress(FleetError):  # a full disk must not stop the loading
        workspace.keep(WARMUP_FILE, render_json(page) + b"\n")


def read_warmup(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the rows of a warm-up that runs or has just ended, if any."""
    page = read_page(WarmPage, workspace.read(WARMUP_FILE), WARMUP_SCHEMA)
    if not page or abs(workspace.world.now() - page.time) >= WARMUP_SECONDS:
        return []
    return [vars(row) for row in page.models[:SHOWN_WARMTHS_LIMIT]]


def known_model_names(fleet: Fleet) -> list[str]:
    """Return what models may be called: as their machines call them, or by their keys."""
    return list(dict.fromkeys([*(model.ollama_model for model in fleet.models.values()),
                               *fleet.models]))


def plan_warmths(fleet: Fleet, options: Namespace) -> dict[str, Warmth]:
    """Return {key in `models:`: Warmth} of the chosen models; of all if none is chosen.

    The same model with the same context on a machine is loaded once: it has one Warmth.
    """
    names = {*(options.model or ()),
             *(fleet.agents[name].model for name in options.agent or ())}
    shared = {}
    warmths = {}
    for name, model in fleet.models.items():
        if names and not names & {name, model.ollama_model}:
            continue
        load = (model.node, full_model_name(model.ollama_model), model.context)
        if load not in shared:
            shared[load] = Warmth(node=fleet.nodes[model.node], model=model)
        warmths[name] = shared[load]
    return warmths


def report_warmth(name: str, warmth: Warmth, now: float) -> dict[str, object]:
    """Return the JSON of a model's warm-up."""
    seconds = warmth.seconds or (now - warmth.began if warmth.began else 0.0)
    return {"route": name, "node": warmth.node.name,
            "model": warmth.model.ollama_model, "ok": warmth.ok,
            "stage": warmth.stage, "state": warmth.state, "seconds": round(seconds, 1),
            "loaded": warmth.loaded, "pulled_bytes": warmth.pulled,
            "size_bytes": warmth.size, "detail": warmth.detail, "fix": warmth.fix}
