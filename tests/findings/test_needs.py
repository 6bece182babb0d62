"""What a request needs chooses among the candidates: images, room for the prompt, tools."""
import json
import random

import pytest

import subagent_fleet as sf
from gateway_rig import DONE, HEAD, Node, Rig, answers, fleet_of, line, wait_until
from matrix_cases import PIXEL, TOOL

PICTURE = [{"role": "user", "content": [{"type": "text", "text": "what?"}, {
    "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}]}]
TOOLS = [{"name": TOOL["name"], "description": "", "input_schema": TOOL["schema"]}]
LONG = [{"role": "user", "content": "a long story " * 4000}]  # 52,000 bytes: 13,000 tokens


def named(name):
    return lambda node, connection: connection.sendall(HEAD + line(f"from {name}") + DONE)


@pytest.fixture
def serve(tmp_path):
    """Serve an alias `x` by `first`, which falls back on `second`, whatever each is given."""
    made = []

    def start(first, second, play=None, abilities=None):
        nodes = [Node(play or named("first")), Node(named("second"))]
        fleet = fleet_of(("first", "a", "x", {"fallback": ["second"], **first}), ("second", "b", "y", second),
                         nodes={"a": nodes[0].endpoint, "b": nodes[1].endpoint})
        served = Rig(fleet, tmp_path)
        for name, able in (abilities or {}).items():
            served.server.learned[name].abilities = able
        served.nodes = nodes
        made.append(served)
        return served
    yield start
    for served in made:
        served.close()
        for node in served.nodes:
            node.close()


def answer(served, **more):
    status, _, body = served.ask(**more)
    return json.loads(body)["content"][0]["text"] if status == 200 else json.loads(body)["error"]["message"]


@pytest.mark.parametrize("first, second, request_, who, passed", [
    (("completion", "tools"), ("vision", "tools"), {"messages": PICTURE}, "second", "images"),
    (("vision",), ("completion",), {"messages": PICTURE}, "first", "second images"),
    (("completion",), ("completion",), {"messages": PICTURE}, "first", ""),  # nobody sees
    (("completion",), ("completion", "tools"), {"tools": TOOLS}, "second", "tools"),
    (("completion",), ("completion", "tools"), {}, "first", ""),
    (None, ("vision",), {"messages": PICTURE}, "first", ""),  # who does not say may be able
    (("completion",), None, {"messages": PICTURE}, "second", "images")])
def test_abilities_choose_before_load_does(serve, first, second, request_, who, passed):
    abilities = {name: words for name, words in (("first", first), ("second", second)) if words}
    served = serve({}, {}, abilities=abilities)
    assert answer(served, **request_) == f"from {who}"
    receipt, = served.receipts()
    model, why = (f"first {passed}" if " " not in passed else passed).split(" ")
    assert receipt["passed_over"] == ([{"route": model, "why": why}] if why else [])
    assert receipt["failures"] == []


def test_a_prompt_that_is_too_long_goes_to_who_holds_it(serve):
    served = serve({"context": 8192}, {"context": 65536})
    assert answer(served, messages=LONG) == "from second"
    assert answer(served) == "from first"
    assert [receipt["passed_over"] for receipt in served.receipts(2)] \
        == [[{"route": "first", "why": "context"}], []]
    assert len(served.nodes[0].requests) == 1


def test_a_prompt_that_turns_out_too_long_goes_on_to_who_holds_it(serve):
    refuses = answers(400, "request (9000 tokens) exceeds the available context size (8192 tokens)")
    served = serve({"context": 8192}, {"context": 65536}, refuses)
    assert answer(served) == "from second"
    receipt, = served.receipts()
    assert receipt["passed_over"] == [{"route": "first", "why": "context"}]
    assert (receipt["failures"], receipt["outcome"]) == ([], "ok")
    assert served.server.scheduler.show()[0]["first"]["rests_seconds"] == 0


def test_a_prompt_that_nobody_holds_is_refused_in_words_to_compact_on(serve):
    refuses = answers(400, "request (9000 tokens) exceeds the available context size (8192 tokens)")
    served = serve({"context": 8192}, {"context": 4096}, refuses)
    assert answer(served) == "prompt is too long: 9000 tokens > 8192 maximum"
    assert served.receipts()[0]["passed_over"] == []


def test_a_node_that_holds_less_than_the_file_says_is_not_asked_again(serve):
    refuses = answers(400, "request (9000 tokens) exceeds the available context size (4096 tokens)")
    served = serve({"context": 32768}, {"context": 65536}, refuses)
    served.nodes[1].play = refuses
    assert answer(served) == "prompt is too long: 9000 tokens > 4096 maximum"
    assert [len(node.requests) for node in served.nodes] == [1, 1]


def test_what_was_learned_of_images_chooses_too(serve):
    served = serve({}, {}, answers(500, "image input is not supported"))
    served.server.learned["first"].takes_images = False
    assert answer(served, messages=PICTURE) == "from second"


def test_abilities_are_asked_of_the_nodes(fake_node, tmp_path):
    seer = fake_node({"tiny": {"capabilities": ["completion", "vision"]}})
    plain = fake_node({"tiny": {"capabilities": ["completion", "tools"]}})
    fleet = fleet_of(("m", "a", "x", {"fallback": ["n"]}), ("n", "b", "y", {}), ("o", "c", "z", {}),
                     nodes={"a": plain.endpoint, "b": seer.endpoint, "c": "http://127.0.0.1:9"})
    served = Rig(fleet, tmp_path)
    served.server.learn_abilities()
    served.close()
    assert {name: known.abilities for name, known in served.server.learned.items()} \
        == {"m": ("completion", "tools"), "n": ("completion", "vision"), "o": None}


def test_a_machine_that_sleeps_at_the_start_is_asked_when_it_answers(fake_node, tmp_path):
    plain = fake_node({"tiny": {"capabilities": ["completion"]}})
    awake = plain.endpoint
    fleet = fleet_of(("m", "a", "x", {}), nodes={"a": "http://127.0.0.1:9"})
    served = Rig(fleet, tmp_path)
    served.server.learn_abilities()
    assert served.server.learned["m"].abilities is None
    served.server.fleet.nodes["a"] = sf.replace(fleet.nodes["a"], endpoint=awake)
    assert served.ask()[0] == 200
    wait_until(lambda: served.server.learned["m"].abilities == ("completion",))
    served.close()


def test_a_server_that_answers_but_cannot_be_probed_is_studied_once_more_only(tmp_path, monkeypatch):
    served = Rig(fleet_of(("m", "a", "x", {}), nodes={"a": "http://127.0.0.1:9"}), tmp_path)
    served.server.learn_abilities()
    studied = []
    monkeypatch.setattr(served.server, "study", lambda name: (
        studied.append(name), served.server.learn_abilities(name)))  # and waits
    for _ in range(3):
        served.server.study_later("a")
    served.close()
    assert studied == ["a"]


def test_a_machine_whose_rest_ends_is_studied_once(fake_node, tmp_path):
    plain = fake_node({"tiny": {"capabilities": ["completion"]}})
    fleet = fleet_of(("m", "a", "x", {}), nodes={"a": "http://127.0.0.1:9"})
    served = Rig(fleet, tmp_path)
    served.server.learn_abilities()
    assert served.ask()[0] == 529
    served.server.fleet.nodes["a"] = sf.replace(fleet.nodes["a"], endpoint=plain.endpoint)
    wait_until(lambda: served.server.learned["m"].abilities == ("completion",))
    served.close()


def test_whoever_is_passed_over_somebody_is_left():
    rng = random.Random(7)
    models = [sf.Model(f"m{i}", "n", "x", "x") for i in range(9)]
    for _ in range(500):
        groups = [rng.sample(models, rng.randint(0, 3)) for _ in range(rng.randint(1, 3))]
        flaws = {model.name: rng.choice(["", "images", "tools"]) for model in models}
        able, passed = sf.pass_over(groups, lambda model, flaws=flaws: flaws[model.name])
        kept = [model for group in able for model in group]
        assert bool(kept) == any(groups)
        if passed:
            assert not [model for model in kept if flaws[model.name]]
            assert sum(map(len, groups)) == len(kept) + len(passed)
        else:
            assert able == groups
