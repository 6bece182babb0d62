"""Proof that the live checks can fail: each passes on the generated file and fails on its damage.

Every damage is a mistake that looks right: the programs start with it, or say nothing.
"""

import re
import shutil
from dataclasses import dataclass

import pytest

import install
import rig
from tools import SCRIPT

FLEET = """
project:
  name: damage
  gateway: {{provider: litellm, port: {port}, master_key_env: DAMAGE_GATEWAY_KEY}}
nodes:
  studio: {{endpoint: {studio}}}
  mini: {{endpoint: {mini}}}
models:
  heavy: {{node: studio, ollama_model: coder-large, litellm_alias: claude-sonnet-local, context: 65536}}
  small: {{node: mini, ollama_model: coder-small, litellm_alias: claude-haiku-local, context: 65536,
          fallback: [heavy]}}
agents:
  planner: {{model: small, description: plans}}
  reviewer: {{model: heavy, description: reviews}}
"""
CONFIG = "litellm_config.yaml"


# -- damages: text -> text, all by hand, as an editor or a careless renderer would ----------------


def key_under_the_wrong_section(text):
    """The place where many examples have it, and where LiteLLM ignores it."""
    return text.replace("general_settings:", "wrong_settings:").replace(
        "litellm_settings:", "litellm_settings:\n  master_key: os.environ/DAMAGE_GATEWAY_KEY")


def no_num_ctx(text):
    return re.sub(r"\n +num_ctx: \d+", "", text)


def no_think(text):
    return re.sub(r"\n +think: false", "", text)


def fallback_in_the_wrong_place(text):
    """Under general_settings it is accepted in silence."""
    found = re.search(r"\n  fallbacks:(?:\n(?:  - |    ).*)+", text)
    return text.replace(found[0], "").replace("general_settings:", "general_settings:" + found[0])


def comment_before_the_frontmatter(text):
    return "<!-- generated -->\n" + text


def without_tier(tier):
    def damage(text):
        return re.sub(rf"\nexport ANTHROPIC_DEFAULT_{tier}_MODEL=.*", "", text)
    damage.__name__ = f"without_{tier.lower()}"
    return damage


# -- checks ---------------------------------------------------------------------------------------


@dataclass
class Place:
    """One project and its gateway, damaged or not."""

    project: object
    nodes: dict
    gateway: object


def check_closed_and_open_to_the_key(place):
    gateway = place.gateway
    assert gateway.process.child.poll() is None, gateway.process.text()[-3000:]
    before = {name: node.recorder.mark() for name, node in place.nodes.items()}
    assert gateway.say("claude-haiku-local", key="")[0] in (400, 401, 500)
    assert not any(node.chats(before[name]) for name, node in place.nodes.items())
    assert gateway.say("claude-haiku-local")[0] == 200


def check_first_request_reloads_nothing(place):
    place.project.run("warmup")
    loads = {name: node.loads() for name, node in place.nodes.items()}
    for alias in ("claude-sonnet-local", "claude-haiku-local"):
        assert place.gateway.say(alias)[0] == 200
    for name, node in place.nodes.items():
        assert node.loads() == loads[name], f"{name} loaded its model again"
        assert 65536 in node.loaded().values()


def check_thinking_client_is_answered(place):
    status, body = place.gateway.say("claude-sonnet-local", thinking={"type": "adaptive"},
                                     output_config={"effort": "high"})
    assert status == 200, str(body)


def check_fallback_answers_for_a_dead_node(place):
    place.nodes["mini"].kill()
    try:
        status, body = place.gateway.say("claude-haiku-local")
        assert status == 200, str(body)
    finally:
        place.nodes["mini"].ensure()


def check_agents_are_loaded(folder, which, claude):
    session = claude([install.CLAUDES[which], "-p", "hi", *rig.CLAUDE_FLAGS],
                     cwd=folder, ANTHROPIC_BASE_URL="http://127.0.0.1:9",
                     ANTHROPIC_AUTH_TOKEN="sk-made-up", CLAUDE_CODE_MAX_RETRIES="0",
                     CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
    missing = {"planner", "reviewer"} - set(session.init["agents"])
    assert not missing, f"not loaded: {missing}"


def check_tier_stays_at_home(folder, which, tier, claude, capture):
    """A session that asks for a tier by name asks the gateway for an alias of the fleet."""
    line = f'. ./.env.subagent-fleet; ANTHROPIC_BASE_URL={capture.url} exec "$0" "$@"'
    before = len(capture.requests)
    claude(["sh", "-c", line, install.CLAUDES[which], "-p", "hi", "--model", tier.lower(),
            *rig.CLAUDE_FLAGS], cwd=folder)
    asked = {body["model"] for _, _, body in capture.requests[before:]}
    assert asked, "no request went out"
    assert asked <= {"claude-sonnet-local", "claude-haiku-local"}, f"asked for {asked}"


# -- the projects: one whole, one for each damage of LiteLLM's file, all started side by side -----


LITELLM_DAMAGES = {  # damage: (check, what the failing check must say)
    key_under_the_wrong_section: (check_closed_and_open_to_the_key, "master.key"),
    no_num_ctx: (check_first_request_reloads_nothing, "loaded its model again"),
    no_think: (check_thinking_client_is_answered, "does not support thinking"),
    fallback_in_the_wrong_place: (check_fallback_answers_for_a_dead_node, "No fallback"),
}


@pytest.fixture(scope="module")
def whole(ground, nodes, trap):
    """The generated project nobody damaged."""
    for node in nodes.values():
        node.ensure()
    project = rig.Project(ground / "whole", SCRIPT, trap)
    project.write("fleet.yaml", FLEET.format(
        port=rig.free_port(), **{name: node.url for name, node in nodes.items()}))
    project.run("generate")
    return project


@pytest.fixture(scope="module")
def places(whole, nodes, ground):
    """The whole project and a copy for each damage, every one with its LiteLLM."""
    started = {}
    for damage in (None, *LITELLM_DAMAGES):
        folder = whole.folder
        if damage:
            folder = ground / f"damage-{damage.__name__}"
            shutil.copytree(whole.folder, folder)
            text = (folder / CONFIG).read_text(encoding="utf-8")
            assert damage(text) != text, "the damage found nothing to damage"
            (folder / CONFIG).write_text(damage(text), encoding="utf-8")
        port = rig.free_port()
        process = rig.litellm_process(folder, port, whole.environment())
        gateway = rig.Gateway(f"http://127.0.0.1:{port}", process, whole.key())
        started[damage] = Place(whole, nodes, gateway)
    for damage, place in started.items():
        try:
            rig.wait_for_gateway(place.gateway.process, int(place.gateway.url.split(":")[-1]))
        except AssertionError:
            if damage is None:
                raise  # a damaged one may well refuse to start: its check says so
    yield started
    for place in started.values():
        place.gateway.stop()


@pytest.mark.parametrize("damage", LITELLM_DAMAGES, ids=lambda damage: damage.__name__)
def test_check_of_litellm_passes_whole_and_fails_damaged(places, running, damage):
    check, why = LITELLM_DAMAGES[damage]
    check(places[None])
    with pytest.raises(AssertionError, match=why):
        check(places[damage])


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_check_of_agents_passes_whole_and_fails_damaged(
        whole, claude, tmp_path, which):
    def check(folder):
        check_agents_are_loaded(folder, which, claude)

    check(whole.folder)
    shutil.copytree(whole.folder, tmp_path / "damaged")
    agent = tmp_path / "damaged/.claude/agents/planner.md"
    agent.write_text(comment_before_the_frontmatter(agent.read_text(encoding="utf-8")),
                     encoding="utf-8")
    with pytest.raises(AssertionError, match="not loaded: {'planner'}"):
        check(tmp_path / "damaged")


@pytest.mark.parametrize("which, tier", [("latest", "OPUS"), ("latest", "SONNET"),
                                         ("latest", "HAIKU"), ("latest", "FABLE"),
                                         ("node20", "HAIKU")])
def test_check_of_tiers_passes_whole_and_fails_damaged(
        whole, claude, capture, tmp_path, which, tier):
    def check(folder):
        check_tier_stays_at_home(folder, which, tier, claude, capture)

    check(whole.folder)
    shutil.copytree(whole.folder, tmp_path / "damaged")
    file = tmp_path / "damaged/.env.subagent-fleet"
    text = file.read_text(encoding="utf-8")
    assert without_tier(tier)(text) != text
    file.write_text(without_tier(tier)(text), encoding="utf-8")
    with pytest.raises(AssertionError, match=f"asked for .*claude-{tier.lower()}-\\d"):
        check(tmp_path / "damaged")
