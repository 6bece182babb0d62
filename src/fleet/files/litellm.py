"""LiteLLM's config and Claude Code's agents, as text."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.files.target import Target, file_headline
from fleet.plan.roles import plan_prompt, plan_tools
from fleet.plan.routes import models_by_alias, plan_fallbacks, plan_routes
from fleet.start.constants import LITELLM_FILE
from fleet.text.yaml_dump import dump_yaml, quote_yaml

if TYPE_CHECKING:
    from fleet.config.sections import Agent, Fleet, Model, Node


def render_litellm(fleet: Fleet) -> str:
    """Return the config of the LiteLLM proxy (facts seen with 1.106.2 and 1.109.1)."""
    fallbacks = plan_fallbacks(fleet)
    sharing = models_by_alias(fleet)
    deployments = {}
    for model in fleet.models.values():
        name = f"{model.node}--{model.name}"
        while name in deployments:  # node `a` and model `b--c`, node `a--b` and model `c`
            name += "+"
        has_others = len(sharing[model.alias]) > 1 or model.alias in fallbacks
        deployments[name] = _litellm_deployment(name, model, fleet.nodes[model.node],
                                                has_others=has_others)

    settings = {"drop_params": True}
    kinds = {fleet.nodes[model.node].provider for model in fleet.models.values()}
    if any(LITELLM_PREFIXES[kind] == "openai" for kind in kinds):
        # Else it asks those for /v1/responses, which few of them have.
        settings["use_chat_completions_url_for_anthropic_messages"] = True

    sections = (
        ("Entries with one model_name share its requests.",
         {"model_list": list(deployments.values())}),
        ("What Ollama does not know is left out.",
         {"litellm_settings": settings}),
        ("Anywhere else the key is ignored and the proxy is open.",
         {"general_settings": {"master_key": f"os.environ/{fleet.gateway.master_key_env}"}}),
        ("A node that fails is skipped at once.",
         {"router_settings": _litellm_router(sharing, fallbacks)}))
    text = file_headline(fleet)
    text += "# Only LiteLLM reads this file; `subagent-fleet serve` does not need it.\n"
    return text + "".join(f"\n# {why}\n{dump_yaml(section)}" for why, section in sections)


LITELLM_PREFIXES = {  # of a model's name: which of LiteLLM's providers
    "anthropic": "anthropic", "ollama": "ollama_chat", "llamacpp": "openai",
    "lmstudio": "lm_studio", "vllm": "hosted_vllm", "openai": "openai"}


def _litellm_deployment(name: str, model: Model, node: Node, *,
                        has_others: bool) -> dict[str, object]:
    """Return the entry of one model; `has_others`: its alias can be served elsewhere."""
    prefix = LITELLM_PREFIXES[node.provider]
    params: dict[str, object] = {"model": f"{prefix}/{model.ollama_model}",
                                 "api_base": node.endpoint}
    if node.provider == "ollama":
        params.update(num_ctx=model.context, keep_alive=model.keep_alive)
    params["timeout"] = model.timeout
    if node.provider == "ollama":
        params["extra_body"] = {"truncate": False}  # else Ollama cuts the prompt in silence
        if not model.thinking:
            params["think"] = False  # Claude Code always asks for it; most models answer 400
    elif node.provider != "anthropic":
        params["api_base"] = f"{node.endpoint}/v1"
        params["api_key"] = "none"  # without one it refuses to ask
    if node.api_key_env:
        params["api_key"] = f"os.environ/{node.api_key_env}"
    if has_others:
        params["max_parallel_requests"] = model.max_parallel  # beyond it 429: no queue

    # Without provider and mode, every request logs a traceback.
    return {
        "model_name": model.alias,
        "litellm_params": params,
        "model_info": {
            "id": name,
            "litellm_provider": prefix,
            "mode": "chat",
            "max_input_tokens": model.context,
            "supports_function_calling": True,
        },
    }


def _litellm_router(sharing: dict[str, list[Model]],
                    fallbacks: dict[str, list[str]]) -> dict[str, object]:
    """Return how LiteLLM chooses a deployment, and the fallbacks."""
    router = {
        "routing_strategy": "simple-shuffle",
        "enable_weighted_failover": True,
        "num_retries": 0,
        "allowed_fails": 0,
        "cooldown_time": 30,
    }
    # Only if contexts differ, because it refuses by an estimate of the prompt's length.
    if any(len({model.context for model in models}) > 1 for models in sharing.values()):
        router["enable_pre_call_checks"] = True
    if fallbacks:
        router["fallbacks"] = [{alias: chain} for alias, chain in fallbacks.items()]
    return router


LITELLM_TARGET = Target(
    "litellm", r"litellm_config\.yaml", 0o644,
    lambda fleet, key: {LITELLM_FILE: render_litellm(fleet)})


def render_agent(agent: Agent, alias: str, headline: str = "") -> str:
    """Return a Claude Code agent; without `---` as its first bytes it would be ignored."""
    head = {"name": agent.name, "description": agent.description, "model": alias}
    if agent.tools is not None:
        head["tools"] = ", ".join(plan_tools(agent.tools))
    lines = [f"{key}: {_quote_words(text)}" for key, text in head.items()]
    for key, value in agent.frontmatter.items():
        lines.append(dump_yaml({key: value}).rstrip("\n"))

    return f"---\n{headline}" + "\n".join(lines) + f"\n---\n\n{plan_prompt(agent).rstrip()}\n"


def _quote_words(text: str) -> str:
    """Return a YAML scalar, plain where it is words and commas; none is an empty list."""
    if not text:
        return "[]"  # no tools: without the key, Claude Code gives an agent all of them
    if all(quote_yaml(part) == part for part in text.split(", ")):
        return text
    return quote_yaml(text)


def _render_agents(fleet: Fleet, key: str) -> dict[str, str]:
    """Return {path: text} of every agent of a fleet."""
    return {f".claude/agents/{name}.md": render_agent(fleet.agents[name], model.alias,
                                                             file_headline(fleet))
            for name, model in plan_routes(fleet).items()}


CLAUDE_TARGET = Target(
    "claude", r"\.claude/agents/[a-z0-9][a-z0-9_-]{0,63}\.md", 0o644, _render_agents)
