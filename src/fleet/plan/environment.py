"""Claude Code's variables, tools and settings on a fleet."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.address import gateway_url, host_of, is_private
from fleet.plan.roles import LEAN_CONTEXT_TOKENS
from fleet.plan.routes import models_by_alias, plan_tiers
from fleet.start.constants import OLLAMA_ENDPOINT, TIERS
from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet, Model


ADDRESSES = ("ANTHROPIC_BASE_URL",)
FLEET_KEY_HEADER = "x-fleet-key"  # how the gateway's key comes where a login comes, too
CLOUDS = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD")


class Variable(Record):
    """One variable of the environment, its value and the reason.

    The gateway's key is in no plan, so that every plan can be shown: `holds_key` says where
    it goes: behind the value.
    """

    name: str
    value: str
    why: str
    holds_key: bool = False
    is_unset: bool = False
    is_added: bool = False  # to what the variable holds already
    applies: bool = True


def plan_environment(fleet: Fleet) -> list[Variable]:
    """Return the variables for Claude Code and LiteLLM, in the order of the file."""
    gateway = fleet.gateway
    tiers = plan_tiers(fleet)
    session = fleet.models[tiers["main"]]
    slowest = max(model.timeout for model in fleet.models.values()) * 1000
    asked = [node.endpoint for node in fleet.nodes.values()]
    asked += [gateway_url(gateway), OLLAMA_ENDPOINT]  # which LiteLLM asks, too (1.106.2)
    hosts = ",".join(dict.fromkeys(map(host_of, asked)))
    slots = sum(model.max_parallel for model in fleet.models.values())
    is_single = len({model.node for model in fleet.models.values()}) == 1
    own_login = any(node.auth for node in fleet.nodes.values())  # a person's
    rows = [
        Variable(gateway.master_key_env, "", holds_key=True,
                 why="the gateway's key; a key that is already set is kept"),
        Variable("ANTHROPIC_BASE_URL", gateway_url(gateway), "Claude Code asks the gateway"),
        Variable("ANTHROPIC_CUSTOM_HEADERS", f"{FLEET_KEY_HEADER}: ", holds_key=True,
                 why="Claude Code shows the gateway this key beside your own login",
                 applies=own_login),
        Variable("ANTHROPIC_AUTH_TOKEN", "", "Claude Code shows the gateway this key",
                 holds_key=True, applies=not own_login),
        Variable("ANTHROPIC_API_KEY", "", "Claude Code would show this key, too",
                 is_unset=True, applies=not own_login),
        # Otherwise the system prompt differs in each conversation from its 47th character on,
        # and a node reads 10,000 tokens again (2.1.326). A login's own server may want it.
        Variable("CLAUDE_CODE_ATTRIBUTION_HEADER", "0", "keeps prompt caching working",
                 applies=not own_login),
        Variable("NO_PROXY", hosts, "no proxy sees the key and the prompts", is_added=True),
        Variable("no_proxy", hosts, "no proxy sees the key and the prompts", is_added=True),
        # All tiers, always: a main model that calls an agent with `model: "sonnet"` beats the
        # agent's own model, and an unset tier means one of Anthropic's (2.1.326).
        Variable("ANTHROPIC_MODEL", fleet.models[tiers["main"]].alias, "the main session"),
        *(Variable(f"ANTHROPIC_DEFAULT_{tier.upper()}_MODEL", fleet.models[tiers[tier]].alias,
                   f"what `{tier}` means") for tier in TIERS[1:]),
        # Claude Code compacts at the window less the answer less 13,000 tokens (2.1.326).
        Variable("CLAUDE_CODE_MAX_CONTEXT_TOKENS", str(session.context),
                 "the main model's context; Claude Code would assume 1,000,000"),
        Variable("CLAUDE_CODE_MAX_OUTPUT_TOKENS",
                 str(min(session.max_output, session.context // 2)),
                 "the longest answer; Claude Code keeps this much of the "
                 "context free for it"),
        Variable("CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT", "1",
                 "a shorter system prompt, because the context is small",
                 applies=session.context <= LEAN_CONTEXT_TOKENS),
        Variable("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1",
                 "one machine: an agent and its caller would compete for it",
                 applies=is_single),
        Variable("CLAUDE_CODE_MAX_CONCURRENT_SUBAGENTS", str(2 * slots),
                 "twice the fleet's slots: Claude Code refuses more, "
                 "the gateway lets them wait", applies=not is_single),
        # A request waits for its turn, then for a first token, then for the next candidate's.
        # Left alone, 2.1.326 gives up after 300 to 360 s of silence and asks again, up to 11
        # times; each time the node reads the prompt from its beginning.
        Variable("API_FORCE_IDLE_TIMEOUT", "0", "a local model may need minutes to begin"),
        Variable("CLAUDE_STREAM_IDLE_TIMEOUT_MS", str(slowest * 3),
                 "three times the slowest model's timeout"),
        Variable("API_TIMEOUT_MS", str(slowest * 5),
                 "five times the slowest model's timeout, for a whole answer"),
        *USUAL_VARIABLES]
    return [row for row in rows if row.applies]


# What every fleet wants alike. With a person at it, Claude Code 2.1.327 fetches a list of
# plugins whatever else is said. 2.1.197 lets CLAUDE_CODE_SUBAGENT_MODEL beat an agent's
# model, 2.1.326 only together with _FORCE.
USUAL_VARIABLES = (
    Variable("CLAUDE_CODE_TOTAL_TOKENS_REMINDER", "off", "keeps prompt caching working"),
    Variable("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1",
             "nothing but the gateway is asked"),
    Variable("CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL", "1",
             "nothing but the gateway is asked"),
    Variable("CLAUDE_CODE_SUBAGENT_MODEL", "", "it would replace every agent's model",
             is_unset=True),
    *(Variable(f"CLAUDE_CODE_USE_{cloud}", "", "Claude Code would ask a cloud instead",
               is_unset=True) for cloud in CLOUDS),
    Variable("LITELLM_LOCAL_MODEL_COST_MAP", "True", "LiteLLM starts without the internet"),
    *(Variable(name, "True", "LiteLLM shows no pages without a key")
      for name in ("NO_DOCS", "NO_REDOC", "NO_OPENAPI")))


def is_cloud(fleet: Fleet, model: Model) -> bool:
    """Tell whether requests to a model leave the network."""
    node = fleet.nodes[model.node]
    return model.cloud or not is_private(host_of(node.endpoint))


def merge_environment(environ: Mapping[str, str], fleet: Fleet, key: str) -> dict[str, str]:
    """Return an environment with the fleet's variables set, and those unset that disturb."""
    merged = dict(environ)
    for variable in plan_environment(fleet):
        name = variable.name
        if variable.is_unset:
            merged.pop(name, None)
        elif variable.holds_key:
            # A person's own headers, a line each; ours may be there of an older environment.
            theirs = environ.get(name, "").splitlines() if variable.value else []
            own = variable.value.strip().lower()
            lines = [line for line in theirs if not line.lower().startswith(own)]
            merged[name] = "\n".join([*lines, variable.value + key])
            if variable.value and merged.get("ANTHROPIC_AUTH_TOKEN") == key:
                # Of a shell that knows the fleet as it was.
                del merged["ANTHROPIC_AUTH_TOKEN"]
        elif variable.is_added:
            words = [*environ.get(name, "").split(","), *variable.value.split(",")]
            merged[name] = ",".join(dict.fromkeys(filter(None, words)))
        else:
            merged[name] = variable.value
    return merged


def harness_environment(environ: Mapping[str, str], fleet: Fleet, key: str) -> dict[str, str]:
    """Return the environment of any other program: the key, and no proxy to the gateway."""
    wanted = merge_environment(environ, fleet, key)
    names = (fleet.gateway.master_key_env, "NO_PROXY", "no_proxy")
    return {**environ, **{name: wanted[name] for name in names}}


def litellm_environment(environ: Mapping[str, str], fleet: Fleet, key: str) -> dict[str, str]:
    """Return LiteLLM's environment, without names of a project's code or settings."""
    kept = {}
    for name, value in environ.items():
        if not re.match("PYTHON|LITELLM_|(CONFIG_FILE_PATH|WORKER_CONFIG)$", name):
            kept[name] = value
    kept["LITELLM_MODE"] = "PRODUCTION"  # else it reads a file .env (1.106.2)
    return merge_environment(kept, fleet, key)


# What a local model does not use of Claude Code's tools: with the short prompt and without
# them the first request is a third as long (2.1.327).
LEAN_LIMIT_TOKENS = 131072  # with more context there is room for all
SPARE_TOOLS = """
    Workflow ScheduleWakeup ListAgents ReportFindings CronCreate CronDelete CronList EnterWorktree
    ExitWorktree Monitor NotebookEdit SendMessage TaskStop WebFetch WebSearch TaskCreate TaskGet
    TaskList TaskOutput TaskUpdate Skill ToolSearch
""".split()
_TOOL_FLAGS = ("--allowedTools", "--allowed-tools", "--tools")


def is_lean(fleet: Fleet) -> bool:
    """Tell whether Claude Code starts with few tools: by the file, else by the window."""
    if fleet.lean is not None:
        return fleet.lean
    return fleet.models[plan_tiers(fleet)["main"]].context <= LEAN_LIMIT_TOKENS


def plan_denied_tools(fleet: Fleet, words: Sequence[str]) -> tuple[str, ...]:
    """Return the tools off in a session; those that an agent or the words name stay on."""
    if not is_lean(fleet):
        return ()

    wanted: list[str] = []
    for agent in fleet.agents.values():
        wanted += agent.tools or ()
        if agent.frontmatter.get("skills"):
            wanted.append("Skill")
    # Too many are kept where a prompt holds their names, too: that only costs a little time.
    if any(word.startswith(_TOOL_FLAGS) for word in words):
        wanted += re.findall("[A-Za-z]+", " ".join(words))
    names = {str(rule).split("(")[0] for rule in wanted}
    return tuple(tool for tool in SPARE_TOOLS if tool not in names)


def plan_settings(fleet: Fleet, environ: Mapping[str, str], permissions: Mapping[str, Any],
                  ) -> dict[str, Any]:
    """Return the settings of a session, which lead it to the fleet.

    Those that Claude Code is started with beat a project's and a person's usual ones (2.1.327
    and 2.1.197). An empty word there counts as unset, and nothing else unsets what a
    project sets.
    """
    wanted = {variable.name: environ.get(variable.name, "")
              for variable in plan_environment(fleet)
              if variable.name != fleet.gateway.master_key_env}
    if is_lean(fleet):
        wanted["CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT"] = "1"
    # Auto mode asks a server of Anthropic before every action, which no gateway
    # has (2.1.326).
    return {"env": wanted, "permissions": {"disableAutoMode": "disable", **permissions}}


class Window(Record):
    """How many tokens fit into an alias, and into an answer of it."""

    context: int
    output: int


def plan_windows(fleet: Fleet) -> dict[str, Window]:
    """Return {alias: Window}: of models that share an alias, the smallest of each."""
    return {alias: Window(min(model.context for model in models),
                          min(min(model.max_output, model.context // 2) for model in models))
            for alias, models in models_by_alias(fleet).items()}


def plan_tier_alias(fleet: Fleet, tier: str) -> str:
    """Return the alias that answers for a tier."""
    return fleet.models[plan_tiers(fleet)[tier]].alias
