"""What is found of the facts, and what to type then."""
import copy
import re

import pytest

import subagent_fleet as sf
from doctor_facts import (
    GOOD_FACTS,
    GOOD_MODEL,
    GOOD_STATE,
    LITELLM,
    LOCAL,
    OFFLINE,
    REACHED,
    changes,
    facts_with,
    loaded,
    make_fleet,
    model_fleet,
    model_with,
    on,
    reached,
    state_with,
)
from subagent_fleet import replace
from tools import ROOT, SCRIPT


def found(fleet, facts):
    """{slug: level} of what doctor has to say, ok lines and what the file alone says left out."""
    return {f.slug: f.level for topic, f in sf.plan_doctor(fleet, facts)
            if f.level != "ok" and (topic != "Config" or f in facts.problems)}


def the(slug, fleet, facts):
    """The one finding of that slug."""
    (finding,) = [f for _, f in sf.plan_doctor(fleet, facts) if f.slug == slug]
    return finding


def test_everything_in_order_is_quiet_and_ready():
    findings = [f for _, f in sf.plan_doctor(make_fleet(), GOOD_FACTS)]
    assert {f.level for f in findings} == {"ok"}
    assert [f.slug for f in findings] == ["python", "claude", "litellm", "config", "node-online",
                                          "route", "gateway-up", "files-unchanged"]
    assert sf.plan_verdict(findings) == "Ready: everything is in order."


# -- the file alone --

TREE = {"project": {"name": "x"},
        "nodes": {"a": {"endpoint": "http://a:11434"}, "b": {"endpoint": "http://b:11434"}},
        "models": {"heavy": {"node": "a", "ollama_model": "qwen3-coder:30b", "litellm_alias": "big",
                             "context": 65536, "fallback": ["light"]},
                   "light": {"node": "b", "ollama_model": "qwen3:8b", "litellm_alias": "small",
                             "context": 32768}},
        "agents": {"planner": {"model": "light", "description": "d"},
                   "implementer": {"model": "heavy", "description": "d"}}}


def changed_tree(changes, tree=TREE):
    """TREE with {dotted path: value} put in; None takes out."""
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *above, last = path.split(".")
        place = tree
        for step in above:
            place = place.setdefault(step, {})
        if value is None:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return tree


def warnings(tree):
    """{slug: Finding} of a fleet file that is valid."""
    fleet, findings = sf.check_fleet(sf.Document(sf.dump_yaml(tree), "fleet.yaml"))
    assert fleet, findings
    findings = list(sf.lint_fleet(fleet))
    assert len({finding.slug for finding in findings}) == len(findings)
    return {finding.slug: finding for finding in findings}


def typed(finding, tree):
    """The tree after its fix was typed as it says: where the key stands, or in what it names."""
    match = re.match(r"write `(\w+): (.*?)`(?: in ([\w.-]+[\w]))?", finding.fix)
    place = match[3] or finding.what.partition(":")[0]
    path = place if place.endswith("." + match[1]) else f"{place}.{match[1]}"
    return changed_tree({path: sf.parse_yaml(match[2])}, tree)


THIRD = {"node": "b", "ollama_model": "qwen3:14b", "litellm_alias": "third", "context": 32768}
CLOUD = {**THIRD, "ollama_model": "gpt-oss:10b-cloud", "cloud": True}
# (slug, what makes it warn, what is like it and does not)
LINTS = [
    ("model-too-large", {"nodes.a.memory_gb": 8, "models.heavy.ollama_model": "devstral:24b",
                         "nodes.b.memory_gb": 64}, {"nodes.a.memory_gb": 16,
                                                    "models.heavy.ollama_model": "devstral:24b"}),
    ("model-too-large", {"nodes.a.memory_gb": 8, "nodes.b.memory_gb": 26, "models.third": CLOUD,
                         "models.heavy.fallback": ["light", "third"]}, {}),
    ("model-too-large", {"nodes.a.memory_gb": 1, "nodes.b.memory_gb": 32},
     {"nodes.a.memory_gb": 1, "models.heavy.ollama_model": "mine"}),
    ("memory-short", {"models.third": {**THIRD, "fallback": ["light"]}, "nodes.b.memory_gb": 12,
                      "models.heavy.fallback": ["third"], "nodes.a.memory_gb": 64},
     {"models.third": {**THIRD, "fallback": ["light"]}, "nodes.b.memory_gb": 16,
      "models.heavy.fallback": ["third"]}),
    ("endpoint-gateway", {"nodes.a.endpoint": "http://localhost:4000"},
     {"nodes.a.endpoint": "http://localhost:4001"}),
    ("endpoint-gateway", {"nodes.a.endpoint": "http://127.0.0.1:11434",
                          "project.gateway": {"port": 11434}},
     {"nodes.a.endpoint": "http://a:11434", "project.gateway": {"port": 11434}}),
    ("endpoint-gateway", {"nodes.a.endpoint": "http://[::1]:4000",
                          "project.gateway": {"host": "::1"}},
     {"nodes.a.endpoint": "http://192.168.1.9:4000"}),
    ("same-machine", {"nodes.b.endpoint": "http://a:11434", "nodes.a.endpoint": "http://a:11434"},
     {"nodes.b.endpoint": "http://a:11435", "nodes.a.endpoint": "http://a:11434"}),
    ("same-machine", {"nodes.b.endpoint": "http://127.0.0.1:1", "nodes.a.endpoint": "http://localhost:1"},
     {"nodes.b.endpoint": "http://127.0.0.1:2", "nodes.a.endpoint": "http://localhost:1"}),
    ("unused-node", {"nodes.c": {"endpoint": "http://c:11434"}},
     {"nodes.c": {"endpoint": "http://c:11434"}, "models.light.node": "c",
      "nodes.b": None}),
    ("unused-model", {"models.third": THIRD}, {"models.third": {**THIRD, "litellm_alias": "small",
                                                                "ollama_model": "qwen3:8b"}}),
    ("unused-model", {"models.third": {**THIRD, "fallback": ["heavy"]}},
     {"models.third": {**THIRD, "fallback": ["heavy"]}, "agents.planner.model": "third"}),
    ("unused-model", {"models.third": {**THIRD, "context": 8192}},
     {"models.third": THIRD, "models.light.fallback": ["third"]}),
    ("no-fallback", {"models.heavy.fallback": None}, {"models.heavy.fallback": None,
                                                      "models.light.context": 16384}),
    ("no-fallback", {"models.heavy.fallback": ["third"], "models.third": {**THIRD, "node": "a"}},
     {"models.heavy.fallback": None, "models.light.node": "a", "nodes.b": None}),
    ("output-above-context", {"models.light.max_output": 40000}, {"models.light.max_output": 32768}),
]


@pytest.mark.parametrize("slug,wrong,right", LINTS)
def test_what_does_not_fit_is_said_and_fixed_as_typed(slug, wrong, right):
    tree = changed_tree(wrong)
    found = warnings(tree)
    assert list(found) == [slug]
    finding = found[slug]
    assert finding.level == "warning" and finding.where and finding.excerpt
    assert finding.what.count(": ") and finding.fix.startswith(("write `", "`subagent-fleet recommend` "))
    if finding.fix.startswith("write"):
        assert slug not in warnings(typed(finding, tree))
    assert slug not in warnings(changed_tree(right))


def test_a_fleet_in_order_warns_of_nothing():
    assert warnings(TREE) == {}
    assert len([row for row in sf.CHECKS if row.needs == "file"]) > 6


def test_a_name_is_written_as_the_file_needs_it():
    tree = changed_tree({"models.heavy.fallback": None})
    tree["models"]["8"] = tree["models"].pop("light")
    tree["agents"]["planner"]["model"] = "8"
    assert warnings(tree)["no-fallback"].fix == 'write `fallback: ["8"]`'


def test_the_page_of_the_file_lists_every_warning():
    source = SCRIPT.read_text(encoding="utf-8")
    slugs = set(re.findall(r'\bwarn\(fleet, "([a-z0-9-]+)"', source)) | {"weak-key"}
    page = sf.TOPICS["config"].page()
    table = page[page.index("## Warnings"):page.index("## Generated files")]
    rows = [row.split(":")[0] for row in table.splitlines() if row.startswith("- `")]
    assert set(re.findall("`([a-z0-9-]+)`", "".join(rows))) == slugs and len(slugs) > 15


@pytest.mark.parametrize("changes,slugs", [
    ({"models.light.context": 4096}, ["small-context"]),  # max_output is the default
    ({"models.light.context": 4096, "models.light.max_output": 8000},
     ["small-context", "output-above-context"]),
    ({"models.third": THIRD, "models.heavy.fallback": ["third"], "models.third.fallback": ["light"],
      "nodes.b.memory_gb": 7}, ["model-too-large"]),  # not memory-short: 14b is not there with 8b
    ({"models.heavy.ollama_model": "gpt-oss:120b-cloud", "models.heavy.cloud": True,
      "nodes.a.memory_gb": 8}, []),
    ({"models.third": CLOUD, "models.heavy.fallback": ["third", "light"], "nodes.b.memory_gb": 7}, [])])
def test_what_is_said_once_is_not_said_twice(changes, slugs):
    assert list(warnings(changed_tree(changes))) == slugs


@pytest.mark.parametrize("host,endpoint,is_ours", [
    ("127.0.0.1", "http://127.0.0.1:4000", True), ("127.0.0.1", "http://localhost:4000", True),
    ("localhost", "http://[::1]:4000/ollama", True), ("0.0.0.0", "http://127.0.0.1:4000", True),
    ("::", "http://localhost:4000", True), ("192.168.1.9", "http://192.168.1.9:4000", True),
    ("192.168.1.9", "http://127.0.0.1:4000", False), ("127.0.0.1", "http://192.168.1.9:4000", False),
    ("0.0.0.0", "http://192.168.1.9:4000", False), ("127.0.0.1", "http://127.0.0.1:11434", False)])
def test_the_gateways_own_address_is_known(host, endpoint, is_ours):
    assert sf.is_gateway_address(sf.Gateway("builtin", host, 4000), endpoint) is is_ours


def test_a_model_that_is_far_too_large_is_weighed():
    tree = changed_tree({"nodes.a.memory_gb": 0.5})
    assert "needs about 20 GB; a has 0.5" in warnings(tree)["model-too-large"].what


def test_a_suggested_fallback_keeps_the_others():
    tree = changed_tree({"models.heavy.fallback": ["third"], "models.third": {**THIRD, "node": "a"},
                         "models.light.fallback": ["heavy"]})
    assert warnings(tree)["no-fallback"].fix == "write `fallback: [third, light]`"
    tree = changed_tree({"models.heavy.fallback": ["third", "light"],
                         "models.third": {**THIRD, "node": "a"}})
    assert "no-fallback" not in warnings(tree)


LINT = sf.Finding("small-context", "warning", "models.small.context is 4096")
TWO = [sf.Model("small", "mini", "qwen3:8b", "a", 32768),
       sf.Model("large", "mini", "qwen3-coder:30b", "b", 32768)]
TWO_HELD = (GOOD_MODEL, replace(GOOD_MODEL, name="qwen3-coder:30b", size=19 * 10**9))
BENCHED = sf.Measurement("mini", "http://mini:11434", "qwen3:8b", tools=sf.Score(1, 6, "called no tool"))


# -- what was seen --

# (case, fleet and facts, everything that must be found)
CASES = [
    ("lint", on(problems=(LINT,)), {"small-context": "warning"}),
    ("offline", on(states={"mini": OFFLINE}), {"node-offline": "error"}),
    ("public", on(addresses={"mini": ("192.168.1.50", "8.8.8.8")}),
     {"public-address": "warning"}),
    ("public v6", on(addresses={"mini": ("2606:4700::1111",)}), {"public-address": "warning"}),
    ("tailscale", on(addresses={
        "mini": ("100.101.102.103", "fd7a:115c:a1e0::1")}), {}),
    ("cloud stub", (make_fleet(), model_with(remote="https://ollama.com:443")),
     {"cloud-stub": "error"}),
    ("cloud stub allowed", (model_fleet(cloud=True), model_with(remote="https://ollama.com:443")),
     {}),
    ("cloud allowed, but local", (model_fleet(cloud=True), GOOD_FACTS), {}),
    ("cloud allowed", (model_fleet(ollama_model="qwen3:8b-cloud", cloud=True), GOOD_FACTS), {}),
    ("missing", on(states=state_with(models=())), {"model-missing": "error"}),
    ("other case and tag", (model_fleet(ollama_model="library/QWEN3:8b"), GOOD_FACTS), {}),
    ("no tools", (make_fleet(), model_with(capabilities=("completion",))), {"no-tools": "error"}),
    ("tools unknown", (make_fleet(), model_with(capabilities=None)), {}),
    ("thinking", (model_fleet(thinking=True), GOOD_FACTS), {"no-thinking": "error"}),
    ("thinking offered", (model_fleet(thinking=True),
                          model_with(capabilities=("tools", "thinking"))), {}),
    ("untrained", (model_fleet(context=65536), GOOD_FACTS), {"context-untrained": "warning"}),
    ("trained as asked", (model_fleet(context=40960), GOOD_FACTS), {}),
    ("a missing model with a fallback elsewhere", on(
        make_fleet([sf.Model("small", "mini", "qwen3:32b", "qwen3-8b", 32768, fallback=("big",)),
                    sf.Model("big", "gpu", "qwen3:8b", "big", 32768)], nodes=("mini", "gpu")),
        states={"mini": GOOD_STATE, "gpu": replace(GOOD_STATE, name="gpu")},
        addresses=dict.fromkeys(("mini", "gpu"), GOOD_FACTS.addresses["mini"])), {"model-missing": "error"}),
    ("loaded short", on(states=state_with(loaded=loaded(4096))), {"context-short": "warning"}),
    ("loaded right", on(states=state_with(loaded=loaded(32768))), {}),
    ("loaded, no context told", on(states=state_with(loaded=loaded(0))), {}),
    ("loaded as trained", (model_fleet(context=65536),
                           facts_with(states=state_with(loaded=loaded(40960)))),
     {"context-untrained": "warning"}),
    ("evicts by size", (make_fleet(TWO, memory_gb=28), facts_with(
        states=state_with(models=TWO_HELD))), {"memory-short": "warning"}),
    ("one does not fit alone", (make_fleet(TWO, memory_gb=16), facts_with(
        states=state_with(models=TWO_HELD))), {"model-too-large": "warning"}),
    ("too large by its context", (model_fleet(context=40960), facts_with()), {}),
    ("evicts by sight", (make_fleet(TWO), facts_with(
        states=state_with(models=TWO_HELD, loaded=loaded(32768, 62)))), {"memory-short": "warning"}),
    ("fits", (make_fleet(TWO, memory_gb=64), facts_with(states=state_with(models=TWO_HELD))), {}),
    ("fits on the GPU", (make_fleet(TWO), facts_with(
        states=state_with(models=TWO_HELD, loaded=loaded(32768, 100)))), {}),
    ("one alone that spills", (make_fleet(), facts_with(
        states=state_with(loaded=loaded(32768, 62)))), {}),
    ("one alone on 1 GB", (make_fleet(memory_gb=1), GOOD_FACTS), {"model-too-large": "warning"}),
    ("one alone that fits", (make_fleet(memory_gb=9), GOOD_FACTS), {}),
    ("on the CPU", (make_fleet(TWO), facts_with(
        states=state_with(models=TWO_HELD, loaded=loaded(32768, 0)))), {}),
    ("port taken", on(holder="another program"), {"port-taken": "error"}),
    ("port free", on(holder=""), {"port-free": "info"}),
    ("port free, LiteLLM's", on(LITELLM, holder=""), {"litellm-down": "info"}),
    ("port another fleet's", on(holder="subagent-fleet"), {"gateway-other": "error"}),
    ("port of who is silent", on(holder=sf.SILENT_GATEWAY), {"gateway-silent": "error"}),
    ("port elsewhere", on(holder=sf.FAR_GATEWAY), {"gateway-elsewhere": "error"}),
    ("port of an older fleet", on(holder=sf.OLD_GATEWAY), {"gateway-old": "error"}),
    ("no LiteLLM, unneeded", on(has_litellm=False), {}),
    ("no LiteLLM, needed", on(LITELLM, has_litellm=False), {"litellm-missing": "error"}),
    ("LiteLLM, needed", on(LITELLM), {}),
    ("no Claude Code", on(claude=None), {"claude-missing": "warning"}),
    ("Claude Code 2.1.197", on(claude="2.1.197"),
     {"claude-old": "warning"}),
    ("Claude Code 2.1.198", on(claude="2.1.198"), {}),
    ("settings elsewhere", on(settings={"s": {"ANTHROPIC_BASE_URL": "http://x"}}),
     {"settings-override": "error"}),
    ("settings the same", on(settings={"s": {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:4000", "EDITOR": "vi"}}), {}),
    ("settings with a token", on(settings={"s": {"ANTHROPIC_AUTH_TOKEN": "k"}}),
     {"settings-override": "error"}),
    ("settings with a cloud", on(settings={"s": {"CLAUDE_CODE_USE_BEDROCK": "1"}}),
     {"settings-override": "error"}),
    ("settings with a subagent model", on(settings={"s": {
        "CLAUDE_CODE_SUBAGENT_MODEL": "x"}}), {"settings-override": "warning"}),
    ("called no tool in bench", on(measured=[BENCHED]), {"bench-no-tools": "warning"}),
    ("called tools in bench", on(measured=[replace(BENCHED, tools=sf.Score(4, 6))]), {}),
    ("pulled again since bench", (make_fleet(), replace(
        model_with(digest="new"), measured=[replace(BENCHED, digest="old")])), {}),
    ("files missing", on(changes=changes("created", "a")), {"files-created": "warning"}),
    ("files stale", on(changes=changes("updated", "a")), {"files-updated": "warning"}),
    ("files removed", on(changes=changes("removed", "a")), {"files-removed": "warning"}),
    ("files edited", on(changes=changes("edited", "a")), {"files-edited": "info"}),
    ("env readable", on(leaks=["env-readable"]), {"env-readable": "error"}),
    ("env tracked", on(leaks=["env-tracked"]), {"env-tracked": "error"}),
    ("env foreign", on(leaks=["env-foreign"]), {"env-foreign": "error"}),
]


@pytest.mark.parametrize("case,observed,wanted", CASES, ids=[case[0] for case in CASES])
def test_doctor_finds_exactly_and_says_what_to_type(case, observed, wanted):
    assert found(*observed) == wanted
    findings = [f for _, f in sf.plan_doctor(*observed) if f.level in ("error", "warning")]
    assert all(f.fix for f in findings if f not in observed[1].problems)


@pytest.mark.parametrize("wanted,there,near", [
    ("qwen3-coder:32b", ["qwen3:8b", "qwen3-coder:30b", "qwen3-coder:480b"], "qwen3-coder:30b"),
    ("qwen3", ["qwen3:8b", "qwen3-coder:30b"], "qwen3:8b"),
    ("Qwen3:18B", ["qwen3:4b", "qwen3-coder:30b", "qwen3:8b"], "qwen3:8b"),
    ("quen3-coder:30b", ["qwen3-coder:30b", "llama3:8b"], "qwen3-coder:30b"),
    ("llama3:8b", ["qwen3:8b", "mistral:7b"], None),
    ("gpt-oss:20b", ["gpt-oss:120b-cloud"], None),  # which does not run there
    ("qwen3:4b", [], None)])
def test_a_model_that_is_nearly_there_is_named_before_a_pull(wanted, there, near):
    held = tuple(replace(GOOD_MODEL, name=name, size=int(sf.billions(name) * 1e9))
                 for name in there)
    fleet = model_fleet(ollama_model=wanted)
    states = state_with(models=held)
    missing = the("model-missing", fleet, facts_with(states=states))
    pull = f"`ollama pull {wanted}` on mini, or `subagent-fleet warmup --pull`"
    correction = f"write `model: {near}` in models.small, which mini has"
    fix = f"{correction}, or {pull}" if near else pull
    assert (missing.fix, missing.what.endswith("on mini")) == (fix, True)
    step = sf.plan_next_step(fleet, states, {"small": sf.RouteState("model missing")},
                             sf.check_gateway(fleet, sf.OUR_GATEWAY))
    assert str(step) == f"Next: {fix}"
    if near:
        assert found(model_fleet(ollama_model=near), facts_with(states=states)) == {}


def too_large(memory_gb, held=GOOD_MODEL, models=(), **model):
    """The finding about a model on a node of so much memory, beside others that it has."""
    fleet = model_fleet(**model)
    fleet = replace(fleet, nodes={"mini": sf.Node("mini", "http://mini:11434", (), memory_gb)})
    facts = facts_with(states=state_with(models=(held, *models)))
    return the("model-too-large", fleet, facts)


def test_a_model_that_is_too_large_gets_the_context_that_fits():
    # 5 GB by 1.1, and 8.2 B of parameters at 12,000 bytes a token
    finding = too_large(9, context=40960)
    assert finding.what == ("models.small.context: qwen3:8b with a context of 40,960 needs about 10 GB; "
                            "mini has 9")
    assert finding.fix == "write `context: 34816`"
    assert finding.where == "fleet.yaml:models.small.context"
    fleet = replace(model_fleet(context=34816), nodes={"mini": sf.Node("mini", "http://x", (), 9)})
    assert found(fleet, GOOD_FACTS) == {}


def test_what_fits_instead_of_a_model_that_is_too_large_is_for_recommend_to_say():
    assert too_large(4).fix == sf.FIND_ROOM


def test_models_that_evict_each_other_are_named():
    finding = the("memory-short", make_fleet(TWO, memory_gb=28), facts_with(
        states=state_with(models=TWO_HELD)))
    assert "qwen3:8b, qwen3-coder:30b need about 33 GB and evict each other" in finding.what
    assert finding.fix == "`subagent-fleet recommend` shows what fits; or correct `memory_gb`"


def test_what_the_name_says_gives_way_to_what_the_node_says():
    def large(facts):
        return [f.what for _, f in sf.plan_doctor(make_fleet(memory_gb=5), facts)
                if f.slug == "model-too-large"]

    assert large(facts_with(states={"mini": OFFLINE})) == [
        "models.small.model: by its name, qwen3:8b needs about 5 GB; mini has 5"]
    assert large(facts_with()) == [
        "models.small.context: qwen3:8b with a context of 32,768 needs about 9 GB; mini has 5"]


@pytest.mark.parametrize("model,held", [
    ({"cloud": True}, {}), ({"cloud": True}, {"remote": "https://ollama.com"}),
    ({}, {"remote": "https://ollama.com"})])
def test_models_that_run_elsewhere_take_no_memory(model, held):
    fleet = replace(model_fleet(**model), nodes={"mini": sf.Node("mini", "http://x", (), 1)})
    assert "model-too-large" not in found(fleet, model_with(**held))


def test_two_entries_of_one_model_are_one_in_memory():
    twins = [TWO[0], replace(TWO[0], name="other", context=8192)]
    fleet = make_fleet(twins, memory_gb=9)
    assert found(fleet, GOOD_FACTS) == {}
    (load,) = sf.plan_loads(fleet, GOOD_STATE)
    assert [load] == sf.plan_loads(make_fleet(twins[:1]), GOOD_STATE)


def test_every_reason_has_its_own_fix():
    fixes = {reason: the("node-offline", make_fleet(), facts_with(
        states={"mini": sf.NodeState("mini", "http://mini:11434", reason.replace("not it", "not ollama"))})).fix
        for reason in sf.REASON_FIXES}
    assert {"refused", "timeout", "dns", "unreachable", "tls", "http 401", "not it",
            "bad answer"} <= set(fixes)
    assert len(set(fixes.values())) == len(fixes)
    assert "Local Network" in fixes["unreachable"]


def test_offline_node_with_a_living_substitute_is_a_warning():
    models = [sf.Model("small", "mini", "qwen3:8b", "a", 32768, fallback=("other",)),
              sf.Model("other", "big", "qwen3:8b", "b", 32768)]
    states = {"mini": OFFLINE, "big": replace(GOOD_STATE, name="big")}
    facts = facts_with(states=states)
    assert found(make_fleet(models, nodes=("mini", "big")), facts) == {"node-offline": "warning"}
    shared = [replace(models[0], fallback=(), alias="b"), models[1]]
    assert found(make_fleet(shared, nodes=("mini", "big")), facts) == {"node-offline": "warning"}
    alone = [replace(models[0], fallback=()), models[1]]
    fleet = make_fleet(alone, nodes=("mini", "big"))
    assert found(fleet, facts) == {"node-offline": "error"}
    assert "no other machine can answer for small" in the("node-offline", fleet, facts).what
    dead = facts_with(states=dict(states, big=replace(OFFLINE, name="big")))
    assert found(make_fleet(models, nodes=("mini", "big")), dead) == {"node-offline": "error"}


def test_agent_without_tools_needs_no_tools_but_the_main_session_does():
    models = [sf.Model("small", "mini", "gemma:2b", "a", 32768),
              sf.Model("large", "mini", "qwen3:8b", "b", 32768)]
    held = (GOOD_MODEL, sf.NodeModel("gemma:2b", 1, capabilities=("completion",)))
    fleet = replace(make_fleet(models, tools=()), claude=dict.fromkeys(sf.TIERS, "large"))
    facts = facts_with(states=state_with(models=held))
    assert found(fleet, facts) == {}
    fleet = replace(fleet, agents={"a": sf.Agent("a", "large", "Use it.", ("Read",))})
    assert found(fleet, facts) == {}
    fleet = replace(fleet, claude=dict.fromkeys(sf.TIERS, "small"))
    assert "main, opus" in the("no-tools", fleet, facts).what


def test_findings_about_a_model_point_at_its_line():
    fleet = model_fleet(context=65536)
    assert the("context-untrained", fleet, GOOD_FACTS).where == "fleet.yaml:models.small.context"


def test_findings_say_what_was_seen():
    offline = facts_with(states={"mini": replace(OFFLINE, detail="nobody there")})
    assert "at http://mini:11434 (refused: nobody there)" in the(
        "node-offline", make_fleet(), offline).what
    offline = facts_with(states={"mini": replace(OFFLINE, detail="")})
    assert "mini: no answer at http://mini:11434 (refused)" in the("node-offline", make_fleet(), offline).what


def test_settings_values_are_never_shown():
    facts = facts_with(settings={"s": {"ANTHROPIC_AUTH_TOKEN": "sk-secret"}})
    assert "sk-secret" not in str(sf.plan_doctor(make_fleet(), facts))


def test_public_address_that_the_config_names_is_not_said_twice():
    facts = facts_with(addresses={"mini": ("8.8.8.8",)})
    assert found(make_fleet(), facts) == {"public-address": "warning"}
    fleet = replace(make_fleet(), nodes={"mini": sf.Node("mini", "https://8.8.8.8:11434")})
    assert found(fleet, facts) == {}


def test_port_taken_says_how_to_see_by_whom_and_what_litellm_would_do():
    facts = facts_with(holder="another program")
    assert the("port-taken", make_fleet(), facts).what == \
        "port 4000 is in use by something else (`lsof -i :4000` shows what)"
    assert "LiteLLM would take another port" in the("port-taken", LITELLM, facts).what


def test_of_a_port_in_silence_it_is_said_what_to_type():
    facts = facts_with(holder=sf.SILENT_GATEWAY)
    for fleet, start in ((make_fleet(), "serve"), (LITELLM, "up")):
        finding = the("gateway-silent", fleet, facts)
        assert finding.what == "nothing answers in time at http://127.0.0.1:4000"
        assert f"stop it, then `subagent-fleet {start}`;" in finding.fix


def test_many_files_are_named_briefly():
    facts = facts_with(changes=changes("updated", *(f"{n}.md" for n in range(40))))
    assert the("files-updated", make_fleet(), facts).what.count(".md") == 5
    assert "and 35 more" in the("files-updated", make_fleet(), facts).what


def test_missing_files_beside_an_edited_one_are_not_left_to_generate():
    both = changes("created", "a") + changes("edited", "b")
    assert the("files-created", make_fleet(), facts_with(changes=both)).fix == \
        "subagent-fleet doctor --fix"
    assert the("files-created", make_fleet(), facts_with(changes=both[:1])).fix == \
        "subagent-fleet generate"


def test_without_a_fleet_the_machine_is_still_checked():
    error = sf.Finding("no-config", "error", "no fleet.yaml", fix="subagent-fleet init")
    facts = sf.Facts(problems=(error,))
    assert found(None, facts) == {"no-config": "error", "claude-missing": "warning"}


@pytest.mark.parametrize("lines,tools", [
    ("", None), ("tools: Read, Bash(git *)\n", ("Read", "Bash")), ("tools: []\n", ()),
    ("tools:\n  - Read\n  - mcp__a__b\nmodel: x\n", ("Read", "mcp__a__b")), ("tools: '*'\n", None),
    ("tools: # all\n", None)])
def test_an_agents_model_and_tools_are_read(lines, tools):
    agent = sf.read_agent(f"---\nname: \"a\" # why\ndescription: d\nmodel: 'small' \n{lines}---\n")
    assert (agent.name, agent.model, agent.tools) == ("a", "small", tools)


@pytest.mark.parametrize("version,than,older", [
    ("0.17.0", "0.17.1", True), ("0.17.1", "0.17.1", False), ("0.9.0", "0.17.1", True),
    ("0.17.0-rc3", "0.17.1", True), ("0.33.0-rc2", "0.32.14", False), ("0.0.0", "0.17.1", False),
    ("", "0.17.1", False), ("nonsense", "0.17.1", False), ("1.103.5rc1", "1.104.0", True),
    ("1.104.0.post1", "1.104.0", False), ("2.1.197 (Claude Code)", "2.1.198", True),
    ("v0.17.0", "0.17.1", True), ("9" * 5000 + ".1.1", "0.17.1", False)])
def test_versions_compare(version, than, older):
    assert sf.is_older(version, than) is older


@pytest.mark.parametrize("levels,verdict", [
    ("ok info", "Ready: everything is in order."),
    ("ok warning", "Ready, with 1 warning."),
    ("error warning warning", "Not ready: 1 error, 2 warnings. First: fix error"),
    ("error error", "Not ready: 2 errors. First: fix error")])
def test_verdict(levels, verdict):
    findings = [sf.Finding("x", level, "what", fix=f"fix {level}") for level in levels.split()]
    assert sf.plan_verdict(findings) == verdict


def test_verdict_says_where():
    findings = [sf.Finding("x", "error", "no fix"), sf.Finding("x", "error", "y", "f:1:2", fix="fix")]
    assert sf.plan_verdict(findings) == "Not ready: 2 errors. First: f:1:2: fix"
    assert sf.plan_verdict(findings[:1]) == "Not ready: 1 error."


# -- worker --

def check_worker(program="/bin/ollama", state=LOCAL, reached=REACHED):
    return sf.check_worker(program, state, reached)


WORKER_CASES = [
    ({}, {}),
    ({"program": "", "state": OFFLINE}, {"ollama-absent": "error"}),
    ({"state": OFFLINE}, {"ollama-stopped": "error"}),
    ({"program": ""}, {}),
    ({"reached": reached("192.168.1.50", reason="refused")}, {"closed-node": "warning"}),
    ({"reached": ()}, {"closed-node": "warning"}),
    ({"state": replace(LOCAL, models=())}, {"no-model": "warning"}),
    ({"state": replace(LOCAL, models=(replace(GOOD_MODEL, capabilities=("embedding",)),))},
     {"no-model": "warning"}),
    ({"reached": reached("8.8.8.8")}, {"public-address": "error"}),
    ({"reached": reached("8.8.8.8", reason="timeout")}, {"closed-node": "warning"})]


@pytest.mark.parametrize("changed,wanted", WORKER_CASES)
def test_worker_finds_exactly(changed, wanted):
    assert {f.slug: f.level for f in check_worker(**changed)} == wanted
    assert all(f.fix for f in check_worker(**changed))


def findings_of_the_room():
    """The slug of every Finding that the room makes, but those about the file alone."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/fleet/findings").glob("*.py")
                     if path.name != "programs.py")  # tests/files/test_harnesses.py
    return set(re.findall(r'\bFinding\(\s*"([a-z-]+)"', source)) - {"weak-key"}


def test_every_finding_is_seen_somewhere():
    said = {f.slug for _, observed, _ in CASES for _, f in sf.plan_doctor(*observed)}
    said |= {f.slug for changed, _ in WORKER_CASES for f in check_worker(**changed)}
    made = findings_of_the_room()
    unseen = made - said - {"few-warm", "room"}  # what fits: tests/plan/test_fits.py
    assert len(said) > 40 and len(made) >= 30 and not unseen, f"give each a row in CASES of this file: {unseen}"


def test_topics_are_those_that_a_person_knows():
    assert list(dict.fromkeys(row.topic for row in sf.CHECKS)) == [
        "This machine", "Config", "Machines", "Routes", "Gateway", "Claude Code", "Files"]


def test_a_check_is_a_row_and_some_topics_can_be_asked_for(monkeypatch):
    @sf.check("Weather", "nodes")
    def look_outside(fleet, facts):
        yield sf.Finding("rain", "info", f"it rains on {fleet.name}")

    monkeypatch.setattr(sf, "CHECKS", (*sf.CHECKS, look_outside))
    assert [f.what for _, f in sf.plan_doctor(make_fleet(), GOOD_FACTS, topics=["Weather"])] == [
        "it rains on test"]
    assert sf.plan_doctor(None, GOOD_FACTS, topics=["Weather"]) == []
    assert sf.plan_doctor(make_fleet(), GOOD_FACTS)[-1][0] == "Weather"
    topics = [topic for topic, _ in sf.plan_doctor(make_fleet(), GOOD_FACTS, topics=["Files", "Machines"])]
    assert topics == ["Machines", "Files"]
