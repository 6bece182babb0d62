"""Asking a machine who it is and what it has; its failures in words."""
from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from fleet.config.address import split_endpoint
from fleet.config.names import full_model_name
from fleet.config.node import NodeState, server_title
from fleet.speech.cloud import BACKENDS, backend_of
from fleet.start.constants import PROBE_GRACE_SECONDS, PROBE_TIMEOUT_SECONDS, SHOW_LIMIT
from fleet.start.errors import NodeFailure
from fleet.start.record import replace
from fleet.world.child import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    from fleet.config.sections import Model, Node
    from fleet.speech.backend import Backend
    from fleet.speech.talk import Ask
    from fleet.world.world import World


# What is asked of machines: all at once, each with a deadline that holds whatever they do.


def probe_nodes(world: World, nodes: Mapping[str, Node], seconds: float,
                models: Mapping[str, Model] | None = None, *,
                are_known: bool = True) -> dict[str, NodeState]:
    """Return {name: NodeState}: every node asked at once, no answer awaited past `seconds`.

    The capabilities of the fleet's `models` are asked for; without any, those of all there
    are. Where nobody has said what the nodes run, that is found out.
    """
    deadline = world.clock() + seconds
    wanted = {full_model_name(model.ollama_model) for model in (models or {}).values()}
    world.allow_files(4 * len(nodes) + 256)
    ask = probe if are_known else probe_unknown
    jobs = {name: functools.partial(ask, world, node, deadline, wanted)
            for name, node in nodes.items()}
    states = dict(run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS))
    late = f"no answer within {seconds:g} s"
    return {name: states.get(name)
            or NodeState(name, node.endpoint, "timeout", late, provider=node.provider)
            for name, node in nodes.items()}


def ask_loaded(world: World, node: Node, deadline: float = 0.0) -> Any:
    """Return the models that a node holds, None where it has no page that says so."""
    backend = backend_of(node)
    until = deadline or world.clock() + PROBE_TIMEOUT_SECONDS
    try:
        return ask_node(world, node, backend.list_loaded(), deadline=until)
    except NodeFailure as failure:
        if failure.reason == f"not {backend.name}":
            return None
        raise


def probe(world: World, node: Node, deadline: float,
          wanted: Collection[str] = ()) -> NodeState:
    """Ask a node who it is, what it has, then what its `wanted` models (none: all) can do."""
    def ask(question: Ask) -> Any:
        return ask_node(world, node, question, deadline=deadline)

    def ask_all(jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        answers = run_together(world, jobs, threads=8, until=deadline + PROBE_GRACE_SECONDS)
        return {key: answer for key, answer in answers
                if key is not None and not isinstance(answer, NodeFailure)}

    backend = backend_of(node)
    began = world.clock()
    try:
        version = ask(backend.identify())
        latency = round(world.clock() - began, 4)
        models = ask(backend.list_models())
    except NodeFailure as failure:
        failure = explain_failure(failure, backend)
        return NodeState(node.name, node.endpoint, failure.reason, failure.detail,
                         provider=node.provider)

    names = [model.name for model in models
             if not wanted or full_model_name(model.name) in wanted]
    details = ask_all({"": lambda: ask_loaded(world, node, deadline),
                       **{name: functools.partial(ask, backend.describe(name))
                          for name in names[:SHOW_LIMIT]}})
    loaded = details.pop("", ())
    more = {name: functools.partial(ask, facts.pop("more")) for name, facts in details.items()
            if "more" in facts}
    for name, facts in ask_all(more).items():
        details[name].update(facts)
    described = tuple(replace(model, **details.get(model.name, {})) for model in models)
    return NodeState(node.name, node.endpoint, version=version, latency_seconds=latency,
                     models=described, loaded=loaded or (), provider=node.provider,
                     tells_loaded=loaded is not None)


ODD_REASONS = ("not ", "http ", "bad answer")  # of who answers, but not as it was asked


def probe_unknown(world: World, node: Node, deadline: float,
                  wanted: Collection[str] = ()) -> NodeState:
    """Ask as Ollama is asked; who answers, but otherwise, is asked as the other kinds are."""
    state = probe(world, node, deadline, wanted)
    if state.reason.startswith(ODD_REASONS):
        kind = recognise_node(world, node, deadline)
        if kind.provider != node.provider:
            return probe(world, kind, deadline, wanted)
    return state


def sign(world: World, node: Node, ask: Ask) -> Ask:
    """Return an Ask with the key that its node wants; only keys allowed there are sent."""
    variable = node.api_key_env
    if not variable:
        return ask

    key = world.node_keys.get((node.endpoint, variable))
    if key is None and world.environ.get(variable):
        raise NodeFailure("not trusted",
                          f"its key, {variable}, is not trusted to go there yet")
    if not key:
        raise NodeFailure("no key", f"it needs a key, but {variable} is not set")
    if not re.fullmatch("[!-~]{1,4096}", key):
        raise NodeFailure("no key", f"{variable} does not hold a key")
    return replace(ask, headers={**ask.headers, **backend_of(node).key_headers(key)})


def ask_node(world: World, node: Node, ask: Ask, *, deadline: float) -> Any:
    """Return what an Ask makes of a node's answer."""
    return world.ask(node.endpoint, sign(world, node, ask), deadline=deadline)


def recognise_node(world: World, node: Node, until: float) -> Node:
    """Return a node with the provider that answers at its endpoint; unchanged if none does.

    Who only says that it wants a key is known by what else it says,
    else it is left as it was.
    """
    if split_endpoint(node.endpoint).host.endswith("anthropic.com"):
        return replace(node, provider="anthropic")

    def identify(kind: Node) -> object:
        return ask_node(world, kind, backend_of(kind).identify(), deadline=until)

    kinds = {name: replace(node, provider=name) for name in BACKENDS if name != "anthropic"}
    jobs = {name: functools.partial(identify, kind) for name, kind in kinds.items()}
    answers = dict(run_together(world, jobs, until=until + PROBE_GRACE_SECONDS))
    for name, kind in kinds.items():  # of two that answer the first is it
        if name in answers and not isinstance(answers[name], NodeFailure):
            return kind
    # The one by its `Server:`, the other by being the rest.
    for name in ("llamacpp", "openai"):
        if name in answers and answers[name].reason in ("http 401", "http 403"):
            return kinds[name]
    return node


def explain_failure(failure: NodeFailure, backend: Backend) -> NodeFailure:
    """Return a failure of the connection in the words of who should have answered."""
    if failure.reason == "not http":
        return NodeFailure(f"not {backend.name}", failure.detail)
    if failure.reason == "refused":
        what = f"{failure.detail}; is {server_title(backend.name)} running?"
        return NodeFailure("refused", what)
    return failure


def answers(world: World, node: Node, seconds: float) -> NodeFailure | None:
    """Return why a node does not answer; None where it does, were it with an error."""
    try:
        ask_node(world, node, backend_of(node).identify(), deadline=world.clock() + seconds)
    except NodeFailure as failure:
        if failure.reason in ("timeout", "unreachable", "dns", "refused"):
            return failure
    return None
