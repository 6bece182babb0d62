"""The same conversations through Ollama's own /v1/messages and through `serve`: the same answers.

Ollama's endpoint cannot carry num_ctx or think, so this node's default context is the fleet's.
Compared are the blocks, the stop reason and the counts, whole and as a stream.
"""

import json

import pytest

import rig
from tools import SCRIPT

FLEET = """
project: {{name: oracle, gateway: {{provider: builtin, port: {port}}}}}
nodes:
  only: {{endpoint: {node}}}
models:
  plain: {{node: only, ollama_model: plain, litellm_alias: plain, context: 32768, max_output: 32000}}
  thinker: {{node: only, ollama_model: thinker, litellm_alias: thinker, context: 32768,
            max_output: 32000, thinking: true}}
agents:
  planner: {{model: plain, description: plans}}
"""
TEXT = {"type": "string"}


def tool(name, **properties):
    return {"name": name, "description": f"the tool {name}", "input_schema": {
        "type": "object", "properties": properties, "required": list(properties)}}


BASH = tool("Bash", command=TEXT)
READ = tool("Read", file_path=TEXT)
AGENT = tool("Agent", description=TEXT, prompt=TEXT, subagent_type=TEXT)
NESTED = tool("Plan", steps={"type": "array", "items": {"type": "object", "properties": {
    "n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}}})
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def user(*content):
    return {"role": "user", "content": content[0] if len(content) == 1
            and isinstance(content[0], str) else [text(part) if isinstance(part, str) else part
                                                  for part in content]}


def assistant(*content):
    return {**user(*content), "role": "assistant"}


def text(words):
    return {"type": "text", "text": words}


def use(name, number=1, **arguments):
    return {"type": "tool_use", "id": f"toolu_{number:02}", "name": name, "input": arguments}


def result(content, number=1, **more):
    return {"type": "tool_result", "tool_use_id": f"toolu_{number:02}", "content": content, **more}


def conversations():
    """Give name -> request; the names are the tests' names."""
    ran = [user("@play bash done"), assistant(use("Bash", command="echo hi"))]
    return {
        # one turn
        "word": dict(messages=[user("@play pong")]),
        "default-play": dict(messages=[user("hello")]),
        "count": dict(messages=[user("@play count")]),
        "block": dict(messages=[user(text("@play count"))]),
        "cache-control": dict(messages=[user({**text("@play count"),
                                              "cache_control": {"type": "ephemeral"}})]),
        "unicode": dict(messages=[user("größe 🙂 \u2028 日本 @play pong")]),
        "long": dict(messages=[user("word " * 4000 + "\n@play pong")]),
        "newlines": dict(messages=[user("\n\n@play pong\n\n")]),
        "metadata": dict(messages=[user("@play pong")], metadata={"user_id": "u"}),
        # system
        "system": dict(system="You are terse.", messages=[user("@play pong")]),
        "system-block": dict(system=[text("You are terse.")], messages=[user("@play count")]),
        "system-empty": dict(system="", messages=[user("@play pong")]),
        "system-long": dict(system="rule " * 2000, messages=[user("@play pong")]),
        # several turns
        "second-turn": dict(messages=[user("@play count pong"), assistant("one two"), user("on")]),
        "third-turn": dict(messages=[user("@play pong pong count"), assistant("PONG"), user("on"),
                                     assistant("PONG"), user("on")]),
        "new-play": dict(messages=[user("@play pong"), assistant("PONG"), user("@play count")]),
        "assistant-block": dict(messages=[user("@play pong count"), assistant(text("PONG")),
                                          user("more")]),
        # where it stops
        "stop-sequence": dict(messages=[user("@play count")], stop_sequences=["three"]),
        "stop-first": dict(messages=[user("@play count")], stop_sequences=["one"]),
        "stop-never": dict(messages=[user("@play count")], stop_sequences=["nine"]),
        "stop-two": dict(messages=[user("@play count")], stop_sequences=["four", "two"]),
        "cut-at-1": dict(messages=[user("@play count")], max_tokens=1),
        "cut-at-3": dict(messages=[user("@play count")], max_tokens=3),
        "cut-at-40": dict(messages=[user("@play talk")], max_tokens=40),
        "cut-at-end": dict(messages=[user("@play count")], max_tokens=5),
        # sampling
        "temperature": dict(messages=[user("@play count")], temperature=0),
        "top": dict(messages=[user("@play count")], top_p=0.5, top_k=3),
        # tools
        "call": dict(messages=[user("@play bash done")], tools=[BASH]),
        "call-after-text": dict(messages=[user("@play look done")], tools=[BASH]),
        "call-read": dict(messages=[user("@play read")], tools=[READ, BASH]),
        "call-agent": dict(messages=[user("@play agent:planner")], tools=[AGENT, BASH]),
        "calls-two": dict(messages=[user("@play both")], tools=[AGENT]),
        "tools-unused": dict(messages=[user("@play count")], tools=[BASH, READ, NESTED]),
        "tool-nested": dict(messages=[user("@play bash")], tools=[NESTED, BASH]),
        "tool-without-arguments": dict(messages=[user("@play pong")], tools=[tool("Now")]),
        "tool-cut": dict(messages=[user("@play look")], tools=[BASH], max_tokens=1),
        # results
        "result": dict(messages=[*ran, user(result("hi"))], tools=[BASH]),
        "result-blocks": dict(messages=[*ran, user(result([text("hi"), text("there")]))],
                              tools=[BASH]),
        "result-empty": dict(messages=[*ran, user(result(""))], tools=[BASH]),
        "result-long": dict(messages=[*ran, user(result("line\n" * 3000))], tools=[BASH]),
        "result-twice": dict(
            messages=[user("@play look count"), assistant(
                text("both"), use("Bash", 1, command="a"), use("Bash", 2, command="b")),
                user(result("A", 1), result("B", 2))], tools=[BASH]),
        "result-then-call": dict(messages=[user("@play bash look done"), assistant(
            use("Bash", command="echo hi")), user(result("hi"))], tools=[BASH]),
        # thinking
        "thinks": dict(model="thinker", messages=[user("@play think")], **THINKING),
        "thinks-and-calls": dict(model="thinker", messages=[user("@play bash")], tools=[BASH],
                                 **THINKING),
        "thought-before": dict(model="thinker", **THINKING, messages=[
            user("@play think count"), assistant(
                {"type": "thinking", "thinking": "let me see", "signature": ""}, "PONG"),
            user("on")]),
    }


CONVERSATIONS = conversations()
# Where serve is meant to differ: what is not compared, and why.
DEPARTURES = {
    # Ollama calls it end_turn; serve ends the answer itself, so its input count is an estimate
    **dict.fromkeys(("stop-sequence", "stop-first", "stop-two"), ("stop", "in")),
    # Ollama glues the blocks of a result together, serve keeps them apart: other tokens
    "result-blocks": ("in",),
}
HIT = {"stop-sequence": "three", "stop-first": "one", "stop-two": "two"}


@pytest.fixture(scope="module")
def both(ground, trap):
    """A node of its own, asked directly and through the gateway: {name: (url, headers)}."""
    node = rig.OllamaNode("oracle", ground / "oracle", {"plain:latest": "pong",
                                                        "thinker:latest": "thinker"},
                          trap, OLLAMA_CONTEXT_LENGTH="32768", OLLAMA_KEEP_ALIVE="-1")
    project = rig.Project(ground / "oracle-project", SCRIPT, trap)
    port = rig.free_port()
    project.write("fleet.yaml", FLEET.format(port=port, node=node.url))
    project.run("generate")
    project.run("warmup")
    process = rig.serve_process(project, port)
    rig.wait_for_gateway(process, port)
    gateway = rig.Gateway(f"http://127.0.0.1:{port}", process, project.key())
    loads = node.loads()
    yield {"ollama": rig.Gateway(node.direct, node.process, "ollama"), "serve": gateway}
    assert node.loads() == loads, "one of the two made the other's model load again"
    process.stop()
    node.stop()


def shape(message):
    """Give what both must agree on; ids and signatures are each one's own."""
    blocks = [{key: value for key, value in block.items() if key not in ("id", "signature")
               and value is not None} for block in message["content"] or ()]
    for block in blocks:
        if block["type"] == "thinking":
            block["thinking"] = block["thinking"].strip()
    usage = message["usage"]
    return {"blocks": blocks, "stop": message["stop_reason"], "in": usage["input_tokens"],
            "out": usage["output_tokens"]}


def events_of(stream):
    """What each `data:` line of a stream holds."""
    for part in stream.split("\n\n"):
        for line in part.split("\n"):
            if line.startswith("data: "):
                yield json.loads(line[len("data: "):])
                break


def collect(stream):
    """Put a stream's events together as a client does; assert that they come in order."""
    message, block, seen = None, None, []
    for event in events_of(stream):
        kind = event["type"]
        seen.append(kind)
        if kind == "message_start":
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            assert block is None and event["index"] == len(message["content"])
            block = dict(event["content_block"])
            pieces = []
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                pieces.append(delta["partial_json"])
            elif delta["type"] != "signature_delta":
                name = delta["type"].split("_")[0]
                block[name] = block.get(name, "") + delta[name]
        elif kind == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(pieces) or "{}")
            message["content"].append(block)
            block = None
        elif kind == "message_delta":
            message.update(event["delta"])
            message["usage"] = {**message["usage"], **event["usage"]}
    assert seen[0] == "message_start" and seen[-1] == "message_stop" and block is None
    return message


def test_there_are_forty_conversations_or_more():
    assert len(CONVERSATIONS) >= 40


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_serve_answers_as_ollama_itself(both, name, way):
    body = {"model": "plain", "max_tokens": 200, "stream": way == "stream", **CONVERSATIONS[name]}
    found = {}
    for which, gateway in both.items():
        status, answer = gateway.post(body)
        assert status == 200, f"{which}: {answer}"
        message = collect(answer) if way == "stream" else answer
        found[which] = shape(message)
    assert message["stop_sequence"] == HIT.get(name)
    if name in HIT:
        assert message["stop_reason"] == "stop_sequence"
    for key in DEPARTURES.get(name, ()):
        assert found["serve"].pop(key) != found["ollama"].pop(key) or key == "in"
    assert found["serve"] == found["ollama"]
