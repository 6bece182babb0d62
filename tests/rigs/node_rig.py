"""Nodes asked in this process, without a command around it."""
import types

import subagent_fleet as sf


def probe(endpoint, provider="ollama", *, seconds=2, show=()):
    """What one node says of itself; `show` names the models it is asked about."""
    models = {name: types.SimpleNamespace(ollama_model=name) for name in show}
    node = sf.Node("n", getattr(endpoint, "endpoint", endpoint), provider=provider)
    return sf.probe_nodes(sf.World(), {"n": node}, seconds, models)["n"]


def recognise(endpoint, provider="ollama"):
    """The kind of server that answers at an endpoint, and what an unknown one says of itself."""
    world, node = sf.World(), sf.Node("n", endpoint, provider=provider)
    found = sf.recognise_node(world, node, world.clock() + 2)
    return found, sf.probe_nodes(world, {"n": node}, 2, are_known=False)["n"]


def warm(endpoint, provider, model, *, context=16384, timeout=5, **how):
    """Load a model, or what else WarmUp says; return how that ended."""
    model = sf.Model("m", "n", model, "x", context=context, timeout=timeout)
    warmth = sf.Warmth(sf.Node("n", endpoint, provider=provider), model)
    for _ in sf.warm_nodes(sf.World(), {"n": [warmth]}, sf.WarmUp(**how)):
        pass
    return warmth
