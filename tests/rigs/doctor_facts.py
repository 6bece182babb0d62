"""A fleet and a machine on which everything is in order, and what to change about them."""

import subagent_fleet as sf
from subagent_fleet import replace


class Placed:
    """A document that can only say where a key stands."""

    source, value, text = "fleet.yaml", None, ""

    def locate(self, path, *, key=False):
        return "fleet.yaml:" + ".".join(map(str, path)), ""


def make_fleet(models=None, *, nodes=("mini",), gateway=None, tools=("Read",), memory_gb=None):
    """A fleet with one agent on the first model."""
    models = models or [sf.Model("small", "mini", "qwen3:8b", "qwen3-8b", 32768)]
    gateway = gateway or sf.Gateway("builtin", "127.0.0.1", 4000, "LITELLM_MASTER_KEY")
    agents = {"planner": sf.Agent("planner", models[0].name, "Use it.", tools)}
    return sf.Fleet("test", gateway, {}, {
        name: sf.Node(name, f"http://{name}:11434", (), memory_gb) for name in nodes},
        {model.name: model for model in models}, agents, Placed())


GOOD_MODEL = sf.NodeModel("qwen3:8b", 5 * 10**9, "8.2B", "Q4_K_M", ("completion", "tools"), 40960)
GOOD_STATE = sf.NodeState("mini", "http://mini:11434", version="0.32.15", models=(GOOD_MODEL,))


def changes(action, *paths):
    """What `generate` would do to each path."""
    found, wanted, ours = {"unchanged": (b"a", b"a", True), "created": (None, b"a", True),
                           "updated": (b"a", b"b", True), "removed": (b"a", None, True),
                           "edited": (b"a", b"b", False)}[action]
    return tuple(sf.Change(path, found, wanted, ours) for path in paths)


GOOD_FACTS = sf.Facts(
    states={"mini": GOOD_STATE}, addresses={"mini": ("192.168.1.50",)},
    has_litellm=True, claude="2.1.327", holder=sf.OUR_GATEWAY,
    settings={"s.json": {"EDITOR": "vi"}},
    changes=changes("unchanged", "litellm_config.yaml"), env_path=".env.subagent-fleet")


def facts_with(**changed):
    return replace(GOOD_FACTS, **changed)


def state_with(**changed):
    return {"mini": replace(GOOD_STATE, **changed)}


def model_with(**changed):
    """Facts whose node holds the model with something about it changed."""
    return facts_with(states=state_with(models=(replace(GOOD_MODEL, **changed),)))


OFFLINE = sf.NodeState("mini", "http://mini:11434", "refused", "connection refused")
LITELLM = make_fleet(gateway=sf.Gateway("litellm", "127.0.0.1", 4000, "KEY"))


def on(fleet=None, **changed):
    return fleet or make_fleet(), facts_with(**changed)


def model_fleet(**changed):
    return make_fleet([sf.Model(**{"name": "small", "node": "mini", "ollama_model": "qwen3:8b",
                                   "alias": "qwen3-8b", "context": 32768, **changed})])


def loaded(context, gpu=100):
    return (sf.LoadedModel("qwen3:8b", context, gpu, 6 * 10**9, ""),)


# -- a worker --

LOCAL = sf.NodeState("127.0.0.1", "http://127.0.0.1:11434", version="0.32.15", models=(GOOD_MODEL,))


def reached(*addresses, reason=""):
    return tuple(sf.NodeState(address, f"http://{address}:11434", reason) for address in addresses)


REACHED = reached("192.168.1.50", "100.101.102.103")


def paste(block):
    """Check a worker's block inside a fleet, as it would be pasted."""
    tree = {"project": {"name": "test"}, **block, "agents": {}}
    fleet, findings = sf.check_fleet(sf.Document(sf.dump_yaml(tree), "fleet.yaml"))
    assert fleet, findings
    return fleet
