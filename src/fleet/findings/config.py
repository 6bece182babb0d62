"""Findings on this machine, and on the fleet file alone."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fleet.config.address import (
    address_kind,
    host_of,
    is_gateway_address,
    is_loopback,
    split_endpoint,
)
from fleet.config.names import billions, full_model_name, lacks_tools, model_slot, prints_calls
from fleet.config.node import NODE_KINDS, NodeState
from fleet.config.sections import Model
from fleet.findings.checks import (
    CLAUDE_INSTALL,
    EDIT_TOOLS,
    FIND_WORK,
    LITELLM_INSTALL,
    check,
    fix_for_toolless,
    warn,
)
from fleet.plan.measured import is_older
from fleet.plan.roles import (
    GONE_TOOLS,
    LEAST_CONTEXT_TOKENS,
    MAIN_CONTEXT_TOKENS,
    ROLE_TOOLS,
    SMALL_CONTEXT_TOKENS,
    plan_tools,
)
from fleet.plan.routes import models_by_alias, plan_tiers
from fleet.start.constants import ENVIRONMENT_FILE, OLLAMA_PORT
from fleet.start.errors import Finding
from fleet.start.record import replace
from fleet.text.phrases import nearest
from fleet.text.yaml_dump import quote_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fleet.config.sections import Fleet
    from fleet.findings.checks import Facts


# -- This machine --


@check("This machine", "nothing")
def check_python(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Name the Python that runs this."""
    yield Finding("python", "ok", f"Python {sys.version.split()[0]}")


@check("This machine", "nothing")
def check_claude(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Check that Claude Code is new enough for the context variables."""
    version = facts.claude
    if not version:
        yield Finding("claude-missing", "warning", "Claude Code is not on the PATH",
                      fix=CLAUDE_INSTALL)
    elif is_older(version, "2.1.198"):
        yield Finding("claude-old", "warning",
                      f"Claude Code {version} (npm's choice on Node below 22) assumes 200,000 "
                      "tokens of context for every `claude-…` alias", fix=CLAUDE_INSTALL)
    else:
        yield Finding("claude", "ok", f"Claude Code {version}")


@check("This machine", "nothing")
def check_litellm(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Report whether LiteLLM is installed, if it matters."""
    if facts.has_litellm:
        yield Finding("litellm", "ok", "LiteLLM is on the PATH")
    elif fleet is not None and fleet.gateway.provider == "litellm":
        yield Finding("litellm-missing", "error",
                      "LiteLLM (Python 3.10+) is not on the PATH", fix=LITELLM_INSTALL)


# -- Config --


@check("Config", "nothing")
def check_config(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Yield the problems of the config and of the key."""
    if fleet is not None:
        yield Finding("config", "ok", f"{fleet.document.source} is valid")
    yield from facts.problems


# -- what the file alone shows --


@check("Config", "file")
def lint_gateway_host(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of a gateway that others can reach."""
    host = fleet.gateway.host
    if not is_loopback(host):
        yield warn(fleet, "exposed-gateway", ("project", "gateway", "host"),
                   what=f"`{host}` offers your models to the network; only the key protects "
                        "them",
                   fix="write `host: 127.0.0.1`, or keep it on a private network with a "
                       "strong key")


@check("Config", "file")
def lint_nodes(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of endpoints that are probably wrong, and of machines without work."""
    busy = {model.node for model in fleet.models.values()}
    owners: dict[object, str] = {}
    for name, node in fleet.nodes.items():
        path = ("nodes", name, "endpoint")
        host = host_of(node.endpoint)
        if node.endpoint.startswith("http:") and address_kind(host) == "public":
            yield warn(fleet, "public-endpoint", path,
                       what=f"{host} is a public address and http sends every prompt in "
                            "clear",
                       fix="use a LAN, Tailscale or WireGuard address, or https")
        if is_gateway_address(fleet.gateway, node.endpoint):
            port = NODE_KINDS[node.provider].port or OLLAMA_PORT
            fix = f"write `endpoint: http://192.168.1.50:{port}`, with the address of {name}"
            if name == "local":
                fix = f"write `endpoint: http://localhost:{port}`"
            if fleet.gateway.port == OLLAMA_PORT:
                fix = "write `port: 4000` in project.gateway"
            yield warn(fleet, "endpoint-gateway", path, fix=fix,
                       what=f"{node.endpoint} is this fleet's own gateway, not an Ollama")
        place = split_endpoint(node.endpoint)
        if is_loopback(place.host):  # it has several names
            place = replace(place, host="localhost")
        owner = owners.setdefault((place, node.api_key_env), name)
        if owner != name:
            yield warn(fleet, "same-machine", path,
                       what=f"{node.endpoint} is also `{owner}`: its memory and slots count twice",
                       fix=f"write `endpoint: http://192.168.1.50:{OLLAMA_PORT}`, with the address "
                           f"of {name}; or remove it, and write `node: {owner}` in its models")
        elif name not in busy:
            yield warn(fleet, "unused-node", path[:2], what="no model runs on it",
                       fix=FIND_WORK)


@check("Config", "file")
def lint_twins(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of an alias that means two models, and of one model with two contexts."""
    owners: dict[str, Model] = {}
    firsts: dict[tuple[str, str], Model] = {}
    for name, model in fleet.models.items():
        owner = owners.setdefault(model.alias, model)
        if full_model_name(owner.ollama_model) != full_model_name(model.ollama_model):
            yield warn(fleet, "alias-collision", ("models", name, "alias"),
                       what=f"`{model.alias}` is also the alias of {owner.name}, a different "
                            f"model: {owner.ollama_model}, {model.ollama_model}",
                       fix="give each its own alias")
        twin = firsts.setdefault(model_slot(model), model)
        if twin.context != model.context:
            yield warn(fleet, "context-thrash", ("models", name, "context"),
                       what=f"{model.context}, but {twin.context} in models.{twin.name}, "
                            "the same model: each switch reloads it",
                       fix=f"write `{max(twin.context, model.context)}` for both")


def plan_prompt_tokens(fleet: Fleet) -> dict[str, list[str]]:
    """Return {model: the tiers in which it reads Claude Code's own prompt}."""
    served: dict[str, list[str]] = {name: [] for name in fleet.models}
    for tier, name in plan_tiers(fleet).items():
        # A haiku that was only planned never reads it.
        if tier != "haiku" or tier in fleet.claude:
            served[name].append(tier)
    return served


@check("Config", "file")
def lint_tokens(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of a context that is too small for Claude Code's prompt, or for an answer."""
    served = plan_prompt_tokens(fleet)
    for name, model in fleet.models.items():
        least = SMALL_CONTEXT_TOKENS
        why = "a subagent's first request alone takes 2,000 tokens"
        if served[name]:
            least = MAIN_CONTEXT_TOKENS
            why = (f"it serves {', '.join(served[name])}, and Claude Code's own prompt takes "
                   "10,000 to 18,000 tokens")
        if model.context < least:
            yield warn(fleet, "small-context", ("models", name, "context"),
                       what=f"{model.context}; {why}",
                       fix=f"write `context: {least}` or more")
        # Nobody chose the default; `small-context` is enough for a context below it.
        if model.max_output > model.context and model.max_output != Model.max_output:
            most = max(model.context // 2, LEAST_CONTEXT_TOKENS)
            yield warn(fleet, "output-above-context", ("models", name, "max_output"),
                       what=f"{model.max_output}, but its context of {model.context} holds "
                            "the prompt and the answer together",
                       fix=f"write `max_output: {most}` or less")


@check("Config", "file")
def lint_main_fallback(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn if the main session depends on one machine although another could take over."""
    main = fleet.models[plan_tiers(fleet)["main"]]
    helpers = [fleet.models[name] for name in main.fallback]
    helpers += [model for model in fleet.models.values() if model.alias == main.alias]
    if main.cloud or any(helper.node != main.node for helper in helpers):
        return

    able = [model for model in fleet.models.values()
            if model.node != main.node and model.context >= MAIN_CONTEXT_TOKENS
            and not model.cloud and not lacks_tools(model.ollama_model)]
    if able:
        heir = min(able, key=lambda model: (-billions(model.ollama_model), model.name))
        names = [*main.fallback, heir.name]
        yield warn(fleet, "no-fallback", ("models", main.name),
                   what=f"it serves the main session, which ends when {main.node} sleeps",
                   fix=f"write `fallback: [{', '.join(map(quote_yaml, names))}]`")


@check("Config", "file")
def lint_unused_models(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of models that no agent or tier uses, not even as a fallback or by its alias."""
    twins = models_by_alias(fleet)
    used = set()
    pending = [agent.model for agent in fleet.agents.values()]
    pending += plan_tiers(fleet).values()
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            pending += fleet.models[name].fallback
            pending += [twin.name for twin in twins.pop(fleet.models[name].alias, ())]
    for name in fleet.models:
        if name not in used:
            yield warn(fleet, "unused-model", ("models", name),
                       what="no agent, tier or fallback uses it", fix=FIND_WORK)


@check("Config", "file")
def lint_agents(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of tools that are gone or mistyped, and of editors that only print calls."""
    for name, agent in fleet.agents.items():
        for index, tool in enumerate(agent.tools or ()):
            yield from _lint_tool(fleet, ("agents", name, "tools", index), tool.split("(")[0])
        model = fleet.models[agent.model].ollama_model
        node = fleet.nodes[fleet.models[agent.model].node]
        edits = agent.tools is None or EDIT_TOOLS & set(plan_tools(agent.tools))
        if edits and prints_calls(model):
            yield warn(fleet, "prints-tool-calls", ("agents", name, "model"),
                       what=f"it may edit, but {model} is known to print tool calls as text "
                            "instead of making them",
                       fix=fix_for_toolless(fleet.models[agent.model], NodeState(
                           node.name, "", provider=node.provider), node.memory_gb))


def _lint_tool(fleet: Fleet, path: tuple[str | int, ...], tool: str) -> Iterator[Finding]:
    """Yield a warning for a tool that Claude Code no longer has, or that was mistyped."""
    if tool in GONE_TOOLS:
        heir = GONE_TOOLS[tool]
        yield warn(fleet, "tool-gone", path,
                   what=f"Claude Code no longer has `{tool}`; `generate` fixes that",
                   fix=f"write `{heir}`" if heir else "remove it")
    elif tool not in ROLE_TOOLS and "__" not in tool:  # `mcp__server__tool`
        meant = nearest(tool, ROLE_TOOLS)
        if meant:
            yield warn(fleet, "tool-unknown", path, fix=meant,
                       what=f"Claude Code is not known to have `{tool}`")


def lint_key(fleet: Fleet, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if the key in the environment, which is used first, is weak."""
    variable = fleet.gateway.master_key_env
    key = environ.get(variable)
    is_exposed = not is_loopback(fleet.gateway.host)
    # Not sk-local-dev and the like.
    if key is None or (len(key) >= 16 and len(set(key)) >= 8):
        return

    why = "it has fewer than 16 characters" if len(key) < 16 else "it is easy to guess"
    if is_exposed:
        why += ", and the gateway listens beyond this machine"
    yield Finding("weak-key", "error" if is_exposed else "warning",
                  f"the key in ${variable} is weak: {why}",
                  fix=f"unset {variable}; rm -f {ENVIRONMENT_FILE}; subagent-fleet generate")
