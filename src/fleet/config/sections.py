"""The records of a fleet file."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.rules import USUAL_TARGETS, key
from fleet.start.record import Record

if TYPE_CHECKING:
    from fleet.text.yaml import Document


# What a file may say is declared once: each `key(...)` of these records names the rule of its
# value, what it is for, what its absence means, and what people write for it. Checking,
# `schema`, the comments of `init` and the keys of `help config` are all made of that. The
# `name` of a section is the key above it.


class Gateway(Record):
    """Where Claude Code finds the fleet, and which program serves it."""

    provider: str = key("provider", "who serves: this program or LiteLLM", "builtin",
                        others="engine type")
    host: str = key("host", "address the gateway listens on", "127.0.0.1",
                    others="address bind listen")
    port: int = key("port", "port the gateway listens on", 4000)
    master_key_env: str = key(
        "variable", "variable with the key; ends in _MASTER_KEY or _GATEWAY_KEY",
        "LITELLM_MASTER_KEY", others="key master_key api_key api_key_env key_env")


class Tiers(Record):
    """Which model answers for each of Claude Code's tiers; None: planned."""

    main: str | None = key("reference", "model of the main session", None)
    opus: str | None = key("reference", "model behind `opus`", None)
    sonnet: str | None = key("reference", "model behind `sonnet`", None)
    haiku: str | None = key("reference", "model behind `haiku`", None)
    fable: str | None = key("reference", "model behind `fable`", None)
    lean: bool | None = key(
        "boolean", "start Claude Code with few tools; absent: up to 131072 tokens of context",
        None)


class Project(Record):
    """What holds for the whole fleet."""

    name: str = key("line", "shown in tables", others="title label")
    gateway: Gateway = key(words="where Claude Code finds the fleet", default=Gateway())
    claude: Tiers = key(
        words="which model answers for each of Claude Code's tiers", default=Tiers())
    targets: tuple[str, ...] = key(
        "targets", "programs that `generate` writes files for", USUAL_TARGETS)


class Node(Record):
    """A machine that runs models."""

    name: str = key("name")
    endpoint: str = key(
        "endpoint", "address of its model server",
        others="url uri api_base base_url host hostname address ip server ollama_host")
    tags: tuple[str, ...] = key("tags", "your own labels for it", (), others="labels")
    memory_gb: float | None = key(
        "gigabytes", "GB of memory for models; without it, only one model", None,
        others="memory ram vram ram_gb vram_gb")
    mac: str | None = key(
        "mac", "its hardware address: `up` and `warmup` wake it", None,
        others="mac_address hardware_address ether lladdr wake_on_lan wol")
    provider: str = key("node provider", "which server runs there", "ollama",
                        others="engine type")
    api_key_env: str | None = key(
        "key variable", "variable with its key; ends in _API_KEY or _API_TOKEN", None,
        others="api_key key key_env token")
    auth: str | None = key("auth", "`client`: hand on the login that Claude Code sends", None)
    cache_gb: float | None = key(
        "cache", "GB of memory for its prompt cache; default: 8.6", None)


class Model(Record):
    """A model on a node, under the alias that Claude Code asks for."""

    name: str = key("name")
    node: str = key("reference", "the node it runs on",
                    others="machine host server runs_on")
    ollama_model: str = key(
        "model name", "its name on the node, as in `ollama list`",
        name="model ollama_model", others="model_name ollama name")
    alias: str = key("alias", "the name Claude Code asks for", name="alias litellm_alias",
                     others="model_alias")
    context: int = key(
        "tokens", "context window in tokens", 8192,
        others="num_ctx ctx context_length context_window context_size max_context")
    timeout: int = key("seconds", "seconds to wait for its first token", 300)
    max_parallel: int = key("parallel", "requests at the same time", 1,
                            others="parallel num_parallel concurrency")
    keep_alive: int = key("keep alive", "how long it stays loaded", -1)
    thinking: bool = key("boolean", "let the model think, if it can", False,
                         others="think reasoning")
    max_output: int = key("tokens", "longest answer in tokens", 8192,
                          others="max_tokens num_predict output")
    fallback: tuple[str, ...] = key(
        "references", "models that answer when this one cannot", (), others="backup")
    cloud: bool = key("boolean", "it may leave your house: at ollama.com or Anthropic", False)
    name_key: str = "model"  # as the file spells the key of its name


class Agent(Record):
    """A subagent of Claude Code and the model it uses."""

    name: str = key("agent name")
    model: str = key("reference", "which of `models` it uses", others="llm uses runs_on")
    description: str = key("paragraph", "when Claude Code calls it; one paragraph",
                           others="desc when use_for about")
    tools: tuple[str, ...] | None = key(
        "tools", "tools it may use; absent: all, []: none", None, others="allowed_tools")
    prompt: str | None = key("text", "its system prompt; absent: the role's default", None,
                             others="system system_prompt instructions")
    frontmatter: dict[str, object] = key(
        "frontmatter", "further keys for Claude Code, such as maxTurns", {})


class FleetFile(Record):
    """The sections of a fleet file."""

    project: Project = key(words="the fleet's name, its gateway, Claude Code's tiers")
    nodes: dict[str, Node] = key(words="machines that run models",
                                 others="machines hosts servers workers")
    models: dict[str, Model] = key(
        words="which model runs on which node, under which alias")
    agents: dict[str, Agent] = key(
        words="Claude Code subagents and the model each one uses", others="subagents roles")


class Fleet(Record):
    """A checked fleet file."""

    name: str
    gateway: Gateway
    claude: dict[str, str]  # tier -> model name, only those given
    nodes: dict[str, Node]
    models: dict[str, Model]
    agents: dict[str, Agent]
    document: Document
    # Programs that `generate` writes for; the key's file is always written.
    targets: tuple[str, ...] = USUAL_TARGETS
    lean: bool | None = None  # None: by the main session's context
