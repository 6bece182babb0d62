"""Facts, checks and the verdict; fixes as text."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.names import find_models
from fleet.config.node import NODE_KINDS, obtain_model
from fleet.plan.memory import plan_pull, tell_pull
from fleet.plan.rating import can_chat, rate_model
from fleet.plan.routes import ALL_LOADED, ROUTE_STATES, NextStep
from fleet.plan.starter import PLACEHOLDERS_MARK
from fleet.start.errors import Finding
from fleet.start.record import Record
from fleet.text.phrases import count_of, find_nearest, join_words
from fleet.text.yaml_dump import quote_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet, Model
    from fleet.files.target import Change
    from fleet.plan.measured import Measurement
    from fleet.plan.routes import RouteState
    _Rule = Callable[[Any, "Facts"], Iterator["Finding"]]  # of a Fleet, or None


# A check takes a Fleet and Facts and yields Findings: each says what is so and how to fix it.
# It is a function with `@check` above it, which says what it needs: `validate` runs checks
# that need only the file; `doctor` runs all, after it has looked at nodes and disk.


def fix_for_missing(fleet: Fleet | None, model: Model, state: NodeState) -> str:
    """Return the fix for a missing model: one that the node has, else a download."""
    pull = f"{obtain_model(state.provider, model.ollama_model)} on {state.name}"
    if NODE_KINDS[state.provider].can_pull:
        pull += ", or `subagent-fleet warmup --pull`"
    text = fleet.document.text if fleet else ""
    if PLACEHOLDERS_MARK in text and any(map(can_chat, state.models)):
        return f"`subagent-fleet recommend --write` uses the models that {state.name} has"
    names = {able.name.lower(): able.name for able in state.models if rate_model(able).score}
    near = names.get(find_nearest(model.ollama_model.lower(), names))
    if near and near != model.ollama_model:  # fixing a typo is faster than a download
        return (f"write `{model.name_key}: {quote_yaml(near)}` in models.{model.name}, which "
                f"{state.name} has, or {pull}")
    return pull


def fix_for_toolless(model: Model, state: NodeState, gigabytes: float | None) -> str:
    """Return the fix for a model that calls no tools: one that does and fits its machine."""
    pull = plan_pull(gigabytes)
    if not pull:
        return f"use another machine: {tell_pull(gigabytes)}"
    line = f"write `{model.name_key}: {quote_yaml(pull)}` in models.{model.name}"
    if find_models(state.models, pull):
        return line
    return f"{obtain_model(state.provider, pull)} on {state.name}, and {line}"


def plan_next_step(fleet: Fleet, states: Mapping[str, NodeState],
                   routes: Mapping[str, RouteState], gateway: Finding) -> NextStep:
    """Return a sentence: ready, or the next thing to type."""
    def urgency(name: str) -> tuple[bool, int]:
        # A missing model comes before a cold one, even if it has a fallback, because
        # `warmup` cannot load it.
        route = routes[name]
        can_wait = route.fallback is not None and route.state != "model missing"
        return can_wait, ROUTE_STATES.index(route.state)

    waiting = [name for name, route in routes.items() if route.state != "ready"]
    is_served = gateway.level == "ok"
    if not waiting:
        silent = [state.name for state in states.values()
                  if state.online and not state.tells_loaded]
        ready = ALL_LOADED.ready
        if silent:
            ready = f"every model is there ({join_words(silent, 'or')} can't say what is loaded)"
        return NextStep(True, "" if is_served else f"{gateway.what}: {gateway.fix}.", ready)

    name = min(waiting, key=urgency)
    model = fleet.models[name]
    node = states[model.node]
    step = "Next: `subagent-fleet warmup`"
    if gateway.level == "error":  # nothing can be served, loaded or not
        step = f"Next: {gateway.fix}."
    elif routes[name].state == "node offline":
        step = f"Next: {node.name} ({node.endpoint}) is offline, {node.reason}: {node.fix}."
    elif routes[name].state == "model missing":
        step = f"Next: {fix_for_missing(fleet, model, node)}"
    if not is_served:
        step = f"{gateway.what[0].upper()}{gateway.what[1:]}. {step}"
    return NextStep(False, step)


LITELLM_INSTALL = ("uv tool install --python 3.12 'litellm[proxy]==1.106.2' "
                   "(or pipx install …)")
CLAUDE_INSTALL = "npm install -g @anthropic-ai/claude-code@latest"
OUR_GATEWAY = "this fleet's gateway"
OLD_GATEWAY = "a gateway with an older config"
FAR_GATEWAY = "a gateway elsewhere"
SILENT_GATEWAY = "a program that does not answer"
FIND_WORK = "`subagent-fleet recommend` shows what it could do; or remove it"
FIND_ROOM = "`subagent-fleet recommend` shows what fits; or correct `memory_gb`"
EDIT_TOOLS = {"Edit", "Write", "NotebookEdit"}


# -- what was seen, and the checks of it --


class Facts(Record):
    """What doctor observed. Checks look only at this and at the fleet."""

    # The config's own findings.
    problems: Sequence[Finding] = ()
    # By node: what it answered, and the addresses of its host.
    states: dict[str, NodeState] = {}
    addresses: dict[str, tuple[str, ...]] = {}
    measured: Sequence[Measurement] = ()  # by `bench`
    memory: dict[str, float] = {}  # GB for models, where that is known
    # The program at the gateway's port; see check_gateway.
    holder: str = ""
    # The version of Claude Code, None if not found; whether LiteLLM is installed.
    claude: str | None = None
    has_litellm: bool = False
    # {path of a settings file: the variables that it sets}
    settings: dict[str, dict[str, object]] = {}
    # What `generate` would change, or why that is unknown.
    changes: Sequence[Change] = ()
    file_problems: Sequence[Finding] = ()
    # The environment file, and the ids of what is wrong with it.
    env_path: str = ""
    leaks: Sequence[str] = ()


class Check(Record):
    """A row of CHECKS: the heading of its findings, and the function that finds them."""

    topic: str
    needs: str  # nothing, the file, the nodes or the disk; file and nodes need a Fleet
    find: Callable[[Any, Facts], Iterator[Finding]]


def check(topic: str, needs: str) -> Callable[[_Rule], Check]:
    """Make a function a row of CHECKS."""
    def name_row(find: _Rule) -> Check:
        return Check(topic, needs, find)

    return name_row


def plan_verdict(findings: Sequence[Finding], step: NextStep = ALL_LOADED,
                 ready: str = "") -> str:
    """Return the verdict in one sentence, and what to type first.

    `step` is what `status` says, `ready` counts the models.
    """
    levels = [finding.level for finding in findings]
    counts = [count_of(levels.count(level), level) for level in ("error", "warning")
              if level in levels]
    if "error" in levels:
        words = [f"Not ready: {', '.join(counts)}."]
        first = [one for one in findings if one.level == "error" and one.fix][:1]
        words += [f"First: {': '.join(filter(None, (one.where, one.fix)))}" for one in first]
        return " ".join(words)
    state = ", with ".join(["Ready" if step.is_ready else ready, *counts])
    if not step.is_ready:
        return f"{state}. {step.what}"
    if step.what:
        return f"{state}, but {step.what}"
    return f"{state}." if counts else "Ready: everything is in order."


def locate_key(fleet: Fleet, *path: str) -> str:
    """Return the place of a key in the fleet file."""
    return fleet.document.locate(path)[0]


def warn(fleet: Fleet, slug: str, path: tuple[str | int, ...], *, what: str,
         fix: str) -> Finding:
    """Return a warning about a value of the fleet file; of a section, about its name."""
    dotted = ".".join(step for step in path if isinstance(step, str))
    is_section = len(path) == 2 or path[-2] == "frontmatter"
    where, excerpt = fleet.document.locate(path, key=is_section)
    return Finding(slug, "warning", f"{dotted}: {what}", where, excerpt, fix)
