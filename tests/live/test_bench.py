"""`bench` on two real Ollama servers: one model that can, one that prints its calls, one cut short."""

import json
import os
import threading

import pytest

import rig
from tools import SCRIPT

FLEET = """
project: {{name: benched}}
nodes:
  left: {{endpoint: {left}}}
  right: {{endpoint: {right}}}
models:
  able: {{node: left, ollama_model: able, litellm_alias: a, context: 32768}}
  short: {{node: left, ollama_model: short, litellm_alias: b, context: 32768}}
  printer: {{node: right, ollama_model: printer, litellm_alias: c, context: 16384}}
agents:
  planner: {{model: able, description: plans}}
"""


@pytest.fixture(scope="module")
def pair(ground, trap):
    """Two servers of our own: one of them will be killed."""
    nodes = {
        "left": rig.OllamaNode("left", ground / "left", {
            "able:latest": "able", "short:latest": "short"}, trap),
        "right": rig.OllamaNode("right", ground / "right", {"printer:latest": "printer"}, trap),
    }
    yield nodes
    for node in nodes.values():
        node.ensure()  # a test has killed one
        node.stop()


@pytest.fixture
def project(pair, ground, trap, request):
    for node in pair.values():
        node.ensure()
    made = rig.Project(ground / request.node.name, SCRIPT, trap)
    urls = {name: node.url for name, node in pair.items()}
    made.write("fleet.yaml", FLEET.format(**urls))
    return made


def results(report):
    return {known["model"]: known for known in report["measurements"]}


def last_lines(node, mark):
    """What a node said at the end of each answer since then, with what it had been asked."""
    said = []
    for chat in node.recorder.since(mark, "/api/chat"):
        lines = chat.content.strip().split(b"\n")
        if chat.status == 200 and chat.body["messages"]:
            said.append((chat.body, json.loads(lines[-1])))
    return said


def test_bench_tells_who_can_from_who_cannot(project, pair):
    known = results(project.json("bench", "--quick"))

    assert known["able"]["tools"] == {"passed": 3, "asked": 3, "instead": ""}
    assert known["able"]["context"] == {"passed": 2, "asked": 2, "instead": ""}
    assert known["printer"]["tools"]["instead"] == "printed the call as text"
    assert known["printer"]["tools"]["passed"] == 0
    assert known["printer"]["context"]["passed"] == 2
    assert known["short"]["context"]["instead"] == "holds 8,192 tokens, not 32,768"
    assert known["short"]["tools"]["passed"] == 3
    assert not any(each["failure"] for each in known.values())


def check_speeds(known, answers):
    """The speeds are the node's own counters, to the digits that are kept."""
    first, prompt, again, much = [last for _, last in answers[:4]]
    assert "numbers from 1 to 200" in answers[3][0]["messages"][-1]["content"]
    texts = ["".join(message["content"] for message in asked["messages"])
             for asked, _ in answers[1:3]]
    same = os.path.commonprefix(texts)  # which the engine has cached
    assert same.endswith("What is the code word? ") and same != texts[0]
    assert known["load_seconds"] == round(first["load_duration"] / 1e9, 2) > 0
    assert known["prompt_rate"] == rate(prompt, "prompt_eval")
    assert known["answer_rate"] == rate(much, "eval")
    warm = (again["load_duration"] + again["prompt_eval_duration"]) / 1e9
    assert known["first_token_seconds"] == round(warm, 3)


def rate(last, counter):
    return round(last[f"{counter}_count"] / (last[f"{counter}_duration"] / 1e9), 1)


def test_bench_fills_the_whole_context(project, pair):
    mark = pair["left"].recorder.mark()
    known = results(project.json("bench", "--model", "able"))
    assert known["able"]["context"]["passed"] == 3
    assert known["able"]["long_prompt_rate"] > 0
    check_speeds(known["able"], last_lines(pair["left"], mark))
    counts = [last["prompt_eval_count"] for _, last in last_lines(pair["left"], mark)]
    assert max(counts) > 0.95 * 32768

    # What an earlier run measured of the others stays; `status` and `recommend` read it.
    kept = json.loads(project.read(".subagent-fleet/bench.json"))
    assert [each["model"] for each in kept["measurements"]] == ["able"]


def test_bench_keeps_the_other_machines_results_when_one_dies(project, pair):
    left = pair["left"]
    mark = left.recorder.mark()

    def kill():
        rig.wait_until(lambda: any("tools" in (chat.body or {}) for chat
                                   in left.recorder.since(mark, "/api/chat")),
                       seconds=60, what="the first tool trial")
        left.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    known = results(project.json("bench", "--quick", status=1))
    killer.join()

    assert known["able"]["failure"] and known["short"]["failure"]
    assert known["able"]["prompt_rate"] > 0  # what it had answered
    assert known["printer"]["failure"] == "" and known["printer"]["tools"]["asked"] == 3
    kept = json.loads(project.read(".subagent-fleet/bench.json"))["measurements"]
    assert [each["model"] for each in kept] == ["able", "printer"]
