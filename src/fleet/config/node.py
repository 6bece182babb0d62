"""What is known of a machine: its kind of server, its models, its state."""
from __future__ import annotations

import re

from fleet.start.record import Record


class NodeModel(Record):
    """A model that a node has on disk (`/api/tags`, `/api/show`)."""

    name: str
    size: int = 0
    parameters: str = ""
    quantization: str = ""
    capabilities: tuple[str, ...] | None = None  # None: not known
    trained_context: int | None = None
    remote: str = ""
    token_bytes: int | None = None  # of memory for one token of context; None: not known
    window_bytes: int = 0  # of memory for the layers that see only the last tokens
    digest: str = ""  # of its content; "": the node doesn't say


class LoadedModel(Record):
    """A model that a node holds in memory now (`/api/ps`)."""

    name: str
    context: int
    gpu_percent: int | None  # None: the node does not say
    size: int
    expires: str


class NodeKind(Record):
    """What is known of a kind of server without asking it."""

    title: str  # as people call it
    port: int  # where it usually answers; 0: nowhere of its own
    obtain: str  # how to get a model there; {} is its name
    can_pull: bool = False  # it downloads one if asked


NODE_KINDS = {  # a row of BACKENDS each
    "ollama": NodeKind("Ollama", 11434, "`ollama pull {}`", can_pull=True),
    "llamacpp": NodeKind("llama.cpp", 8080, "start llama-server with `--alias {}`"),
    "lmstudio": NodeKind("LM Studio", 1234, "`lms get {}`"),
    "vllm": NodeKind("vLLM", 8000, "start vLLM with `--served-model-name {}`"),
    "openai": NodeKind("OpenAI-compatible", 0, "offer `{}`"),
    "anthropic": NodeKind("Anthropic", 0, "offer `{}`"),
}


def kind_title(provider: str) -> str:
    """Return the usual name of a node's server."""
    return NODE_KINDS[provider].title


def server_title(provider: str) -> str:
    """Return the name of a node's server, or a general word for several programs."""
    kind = NODE_KINDS[provider]
    return kind.title if kind.port else "its server"


def obtain_model(provider: str, model_name: str) -> str:
    """Return how a model comes to a node, in words that ` on NODE` or ` there` follows."""
    return NODE_KINDS[provider].obtain.replace("{}", model_name)


# The fix for a node failure, by its class; {} is the kind of its server,
# {where} for the machine.
REASON_FIXES = {
    "refused": "start {} {where}; `subagent-fleet worker`, typed there, shows how to open it",
    "timeout": "wake the machine, and check its firewall",
    "dns": "check the name, or write the address of the machine",
    "unreachable": "join its network; on a Mac see also Privacy & Security > Local Network",
    "tls": "write http:// in its endpoint, or give it a certificate this machine trusts",
    "http 401": "write `api_key_env:` with the variable that holds its key",
    "http 503": "wait until it has loaded its model",
    "no key": "export the variable where the command runs",
    "not trusted": "`subagent-fleet trust`",
    "not private": "write its address in place of the name, then `subagent-fleet trust`",
    "not it": "correct its endpoint or its `provider:`, or start {} {where}",
    "bad answer": "check what listens {where}; restart {}"}


def fix_for_reason(reason: str, provider: str, where: str = "there") -> str:
    """Return the fix for a node failure, or an empty string."""
    if reason == f"not {provider}":
        reason = "not it"
    if provider == "anthropic" and reason in ("dns", "unreachable", "timeout"):
        return "check this machine's connection to the internet"
    server = server_title(provider)
    if reason == "refused" and server == "its server":  # which `worker` does not know
        return f"correct its endpoint, or start its server {where}"
    fix = REASON_FIXES.get(reason, "")
    return fix.replace("{}", server).replace("{where}", where)


class NodeState(Record):
    """What one node answered, or why it did not."""

    name: str
    endpoint: str
    reason: str = ""  # "" is online, else a class: refused, timeout, dns, …
    detail: str = ""
    version: str = ""
    latency_seconds: float | None = None
    models: tuple[NodeModel, ...] = ()
    loaded: tuple[LoadedModel, ...] = ()
    provider: str = "ollama"
    tells_loaded: bool = True  # False: it has no page that says what is loaded

    @property
    def online(self) -> bool:
        return not self.reason

    @property
    def why(self) -> str:
        return f"{self.reason}: {self.detail}".rstrip(": ")

    @property
    def fix(self) -> str:
        return self._fix("there")

    @property
    def fix_from_afar(self) -> str:
        return self._fix(f"on {self.name}")

    def _fix(self, where: str) -> str:
        is_here = re.match(r"https?://(localhost|127\.|\[::1\])", self.endpoint)
        has_server = NODE_KINDS[self.provider].port
        if self.reason == "refused" and self.name == "local" and is_here and has_server:
            return f"start {kind_title(self.provider)}"  # nothing to open to others
        fix = fix_for_reason(self.reason, self.provider, where)
        return fix or fix_for_reason("bad answer", self.provider, where)

    @property
    def runs(self) -> str:
        """What answers there, as people call it."""
        return f"{kind_title(self.provider)} {self.version}".rstrip()
