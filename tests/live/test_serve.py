"""The embedded gateway before two real nodes: Claude Code and the SDK, queues, deaths, hang-ups."""

import json
import os
import pathlib
import socket
import subprocess
import threading
import time

import pytest

import install
import rig
from tools import SCRIPT

FLEET = """
project:
  name: served
  gateway: {{provider: builtin, port: {port}}}
  claude: {{main: heavy, opus: heavy, sonnet: heavy, haiku: small, fable: heavy}}
nodes:
  studio: {{endpoint: {studio}}}
  mini: {{endpoint: {mini}}}
models:
  heavy: {{node: studio, ollama_model: coder-large, litellm_alias: claude-sonnet-local, context: 65536}}
  small: {{node: mini, ollama_model: coder-small, litellm_alias: claude-haiku-local, context: 65536,
          max_output: 400000, fallback: [heavy]}}
  tight: {{node: mini, ollama_model: tight, litellm_alias: claude-tight-local, context: 8192}}
  talk-here: {{node: studio, ollama_model: talker, litellm_alias: claude-talk-local, context: 65536,
              max_output: 400000}}
  talk-there: {{node: mini, ollama_model: talker, litellm_alias: claude-talk-local, context: 65536,
               max_output: 400000}}
  lone: {{node: mini, ollama_model: talker, litellm_alias: claude-lone-local, context: 65536,
         max_output: 400000, fallback: [relief]}}
  relief: {{node: studio, ollama_model: shared, litellm_alias: claude-relief-local, context: 65536}}
agents:
  planner: {{model: small, description: plans}}
  reviewer: {{model: small, description: reviews}}
  implementer: {{model: heavy, description: implements}}
"""


class Served:
    """The fleet, its nodes, and `serve` behind a recorder on the port that fleet.yaml names."""

    def __init__(self, project, nodes, recorder):
        self.project, self.nodes, self.recorder = project, nodes, recorder
        self.process = rig.serve_process(project, recorder.upstream_port)
        rig.wait_for_gateway(self.process, recorder.upstream_port)
        self.gateway = rig.Gateway(recorder.url, self.process, project.key())

    def marks(self):
        return {name: node.recorder.mark() for name, node in self.nodes.items()}

    def chats(self, marks):
        return {name: node.chats(marks[name]) for name, node in self.nodes.items()}

    def fleet(self):
        """Ask the gateway how its nodes and its line are."""
        return rig.get_json(self.gateway.url + "/fleet",
                            headers={"x-api-key": self.gateway.key})[1]

    def receipts(self):
        path = self.project.folder / ".subagent-fleet/requests.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def launch(self, which, tmp_path, *words, env=None):
        """Run `launch claude` with one Claude Code in a fresh HOME."""
        self.project.use_claude(which)
        self.project.home = tmp_path / f"home-{which}-{time.monotonic_ns()}"
        self.project.home.mkdir()
        argv = self.project.argv("launch", "claude", "--", *words, *rig.CLAUDE_FLAGS)
        return rig.run_session(argv, cwd=self.project.folder,
                               env=self.project.environment(**(env or {})))


class Stream:
    """One streamed request of our own, read in a thread, event by event with its time."""

    def __init__(self, gateway, alias, text, *, max_tokens=300000):
        host, port = gateway.url[len("http://"):].split(":")
        body = json.dumps({"model": alias, "max_tokens": max_tokens, "stream": True,
                           "messages": [{"role": "user", "content": text}]}).encode()
        head = (f"POST /v1/messages HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"Authorization: Bearer {gateway.key}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(head.encode() + body)
        self.seen, self.ended = bytearray(), threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while True:
            try:
                block = self.socket.recv(65536)
            except OSError:
                block = b""
            if not block:
                break
            self.seen += block
            if self.seen.endswith(b"0\r\n\r\n"):
                break
        self.ended.set()

    @property
    def events(self):
        """Give (event, data) of what has come so far."""
        text = rig.Exchange(0.0, answer=self.seen + b"\r\n0\r\n\r\n").content.decode()
        found = []
        for block in text.split("\n\n")[:-1]:
            name, _, data = block.partition("\ndata: ")
            found.append((name[len("event: "):], json.loads(data)))
        return found

    def wait_for_text(self):
        rig.wait_until(lambda: b"text_delta" in self.seen, what="the first words")

    def hang_up(self):
        """Leave as a killed client does."""
        self.socket.shutdown(socket.SHUT_RDWR)  # a close alone waits for the thread that reads
        self.socket.close()


@pytest.fixture(scope="module")
def served(ground, nodes, trap):
    for node in nodes.values():
        node.ensure()
    project = rig.Project(ground / "served", SCRIPT, trap)
    recorder = rig.Recorder(rig.free_port(), pretend=True)
    project.write("fleet.yaml", FLEET.format(
        port=recorder.port, **{name: node.url for name, node in nodes.items()}))
    project.run("generate")
    recorder.key = project.key()
    served = Served(project, nodes, recorder)
    yield served
    served.process.stop()
    recorder.close()


@pytest.fixture
def warm(served):
    """Both nodes alive and loaded, nobody resting: a test starts from a quiet fleet."""
    for node in served.nodes.values():
        node.ensure()
    served.project.run("warmup")
    for alias in ("claude-sonnet-local", "claude-tight-local"):  # a success ends a node's rest
        rig.wait_until(lambda alias=alias: served.gateway.say(alias, "@play pong")[0] == 200,
                       what=f"an answer for {alias}")
    rig.wait_until(lambda: not any(model["running"] for model in served.fleet()["models"]),
                   what="the nodes to be idle")
    return served


def test_the_door_is_closed_and_no_node_hears_of_it(warm):
    marks = warm.marks()
    for key in ("", "sk-wrong-0123456789abcdef"):
        status, body = warm.gateway.say("claude-haiku-local", key=key)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert not any(warm.chats(marks).values())
    loads = {name: node.loads() for name, node in warm.nodes.items()}
    for alias in ("claude-sonnet-local", "claude-haiku-local"):
        status, body = warm.gateway.say(alias, thinking={"type": "adaptive"})
        assert (status, body["content"]) == (200, [{"type": "text", "text": "PONG"}])
    assert loads == {name: node.loads() for name, node in warm.nodes.items()}, "a reload"


TEXT = {"type": "string"}
SCHEMAS = [  # each of which fails the whole request when Ollama is sent it as it is
    True, False, "string", {**TEXT, "pattern": "a+"}, {**TEXT, "pattern": r"^\d+$"},
    {**TEXT, "minLength": "1"}, {**TEXT, "minLength": 5, "maxLength": 1}, {"oneOf": [True]},
    {"oneOf": []}, {"type": []}, {"type": "date"}, {"type": ["date", "null"]}, {"format": 5},
    {"type": "integer", "minimum": 1e30}, {"items": True}, {"prefixItems": [True]},
    {"properties": [1]}, {"properties": {"$ref": TEXT}},
    {"additionalProperties": {"type": "date"}}, {"$ref": "other.json"}, {"$ref": "#/$defs/lost"},
    {"$ref": "#/definitions/d"}, {"$ref": "#/$defs/bad"}]


def test_no_schema_of_a_tool_fails_the_request(warm):
    tools = [{"name": f"t{number}", "input_schema": {
        "type": ["object"], "required": "x", "$defs": {"d": TEXT, "bad": {"type": "date"}},
        "properties": {"w": schema, "x": {"type": "array", "items": schema}, "y": {"anyOf": [schema]},
                       "z": {"type": "array", "items": {"$ref": "#/$defs/d"}}}}}
        for number, schema in enumerate(SCHEMAS)]
    status, body = warm.gateway.say("claude-haiku-local", tools=tools)
    assert (status, body["content"]) == (200, [{"type": "text", "text": "PONG"}])


def test_an_image_does_not_end_a_conversation_with_a_model_that_takes_none(warm):
    marks, pixel = warm.marks(), ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAA"
                                  "AAAEAAH2FzhVAAAAAElFTkSuQmCC")
    for _ in range(2):
        status, body = warm.gateway.post({"model": "claude-tight-local", "max_tokens": 9, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "@play pong"}, {
                "type": "image", "source": {"type": "base64", "data": pixel}}]}]})
        assert (status, body["content"]) == (200, [{"type": "text", "text": "PONG"}])
    assert ["images" in chat.body["messages"][0] for chat in warm.chats(marks)["mini"]] \
        == [True, False, False]


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_claude_code_dispatches_to_the_nodes_of_its_agents(warm, tmp_path, which):
    marks, before = warm.marks(), warm.recorder.mark()
    found = warm.launch(which, tmp_path, "-p", "@play agent:planner agent:implementer done")
    assert (found.returncode, found.result["result"]) == (0, "DONE")
    assert sorted(found.dispatched.values()) == ["implementer", "planner"]
    routes = {route["agent"]: route for route in warm.project.json("status")["routes"]}
    turns = warm.recorder.since(before, "/v1/messages")
    rig.hear(found, turns, warm.chats(marks), routes)
    agents = {receipt["agent_id"] for receipt in warm.receipts()[-len(turns):]}
    assert agents == {"", *found.dispatched}


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_parallel_subagents_on_one_slot_wait_in_order_and_are_pinged(warm, tmp_path, which):
    """Someone else holds the slot until both subagents of one message were pinged in line."""
    holder = Stream(warm.gateway, "claude-haiku-local", "@play talk")
    holder.wait_for_text()
    marks, before = warm.marks(), warm.recorder.mark()

    def leave_when_both_were_pinged():
        rig.wait_until(lambda: sum(
            "x-claude-code-agent-id" in turn.headers and b"event: ping" in turn.answer
            for turn in warm.recorder.since(before)) == 2, seconds=60, what="two pings")
        holder.hang_up()

    leaver = threading.Thread(target=leave_when_both_were_pinged)
    leaver.start()
    found = warm.launch(which, tmp_path, "-p", "@play both done")
    leaver.join()
    assert found.returncode == 0 and found.result["result"] == "DONE"
    assert sorted(found.dispatched.values()) == ["planner", "reviewer"]
    turns = [turn for turn in warm.recorder.since(before, "/v1/messages")
             if "x-claude-code-agent-id" in turn.headers]
    firsts = list({turn.headers["x-claude-code-agent-id"]: turn
                   for turn in reversed(turns)}.values())[::-1]
    assert len(firsts) == 2
    for turn in firsts:
        text = turn.content.decode()
        assert text.index("event: message_start") < text.index("event: ping") \
            < text.index("event: content_block_start")
        assert 9.5 <= turn.first_byte - turn.at <= 25  # ten seconds, on a busy machine
    chats = sorted(warm.chats(marks)["mini"], key=lambda chat: chat.at)
    assert len(chats) == len(turns)
    for earlier, later in zip(chats, chats[1:]):
        assert 0 < earlier.done_at <= later.at, "two requests at once on one slot"
    assert all(turn.status == 200 for turn in turns)
    served_first, served_next = sorted(firsts, key=lambda turn: turn.last_byte)
    # Two connections that come within some milliseconds may change places on their way.
    assert served_first.at < served_next.at + 0.05, "not in order"


def audit(served, status):
    """What `trace last --audit` says of the session: {agent's name: (served, verdicts)}."""
    report, = served.project.json("trace", "last", "--audit", status=status)["sessions"]
    assert report["torn"] == []
    return {agent["agent"]: (agent["served"], {verdict["question"]: verdict
                                              for verdict in agent["audit"]})
            for agent in report["agents"]}


def words_of(verdicts):
    return [verdict["answer"] for verdict in verdicts.values()]


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_trace_says_who_served_whom(warm, tmp_path, which):
    """Sessions of the real Claude Code: as planned, by a fallback, against the file, cut off."""
    found = warm.launch(which, tmp_path, "-p", "@play agent:planner agent:implementer done")
    told = audit(warm, 0)
    assert sorted(told) == ["implementer", "main", "planner"]
    assert {name: [(row["node"], row["planned"]) for row in rows] for name, (rows, _) in told.items()} \
        == {"main": [("studio", "yes")], "planner": [("mini", "yes")],
            "implementer": [("studio", "yes")]}
    assert words_of(told["planner"][1]) == words_of(told["implementer"][1]) == ["yes"] * 4
    session = found.init["session_id"]  # receipts are written a moment later: only its own count
    assert sum(row["requests"] for rows, _ in told.values() for row in rows) \
        == len([receipt for receipt in warm.receipts() if receipt["session"] == session])
    tree = warm.project.run("trace", "last")
    assert "@play" in tree.splitlines()[0] and "nothing left the house" in tree
    assert session in warm.project.run("trace", "--json")

    planner = warm.project.folder / ".claude" / "agents" / "planner.md"
    kept = planner.read_text(encoding="utf-8")
    warm.project.edit(".claude/agents/planner.md", "model: claude-haiku-local",
                      "model: claude-tight-local")
    assert "edited since" in audit(warm, 0)["planner"][1]["Model"]["what"]
    os.utime(planner, (1, 1))
    assert words_of(audit(warm, 1)["planner"][1]) == ["no", "yes", "yes", "yes"]
    planner.write_text(kept, encoding="utf-8")
    os.utime(planner, (1, 1))

    warm.nodes["mini"].kill()
    warm.launch(which, tmp_path, "-p", "@play agent:planner done")
    rows, verdicts = audit(warm, 0)["planner"]
    assert [(row["node"], row["planned"]) for row in rows] == [("studio", "fallback")]
    assert words_of(verdicts) == ["yes"] * 4 and "mini: nothing listens there" in verdicts["Machine"]["what"]


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_trace_of_a_session_that_was_killed_in_the_middle(warm, tmp_path, which):
    warm.project.use_claude(which)
    warm.project.home = tmp_path / "home"
    warm.project.home.mkdir()
    holder = Stream(warm.gateway, "claude-haiku-local", "@play talk")
    holder.wait_for_text()  # the planner waits for its slot
    before = warm.recorder.mark()
    argv = warm.project.argv("launch", "claude", "--", "-p", "@play agent:planner done",
                             *rig.CLAUDE_FLAGS)
    process = rig.Process(argv, log=tmp_path / "killed.jsonl", cwd=warm.project.folder,
                          env=warm.project.environment())
    rig.wait_until(lambda: [turn for turn in warm.recorder.since(before)
                            if "x-claude-code-agent-id" in turn.headers],
                   seconds=60, what="the subagent's first request")
    home = warm.project.home
    rig.wait_until(lambda: any(path.stat().st_size for path in home.rglob("agent-*.jsonl")),
                   seconds=60, what="the subagent's transcript on the disk")
    time.sleep(1)  # the line that says it was dispatched is written beside
    process.kill()
    holder.hang_up()
    told = audit(warm, 0)
    assert told["planner"][1]["Machine"]["answer"] in ("yes", "unknown")


def test_a_node_dead_before_the_answer_is_passed_over(warm, tmp_path):
    warm.nodes["mini"].kill()
    marks = warm.marks()
    found = warm.launch("latest", tmp_path, "-p", "@play agent:planner done")
    assert (found.returncode, found.result["result"]) == (0, "DONE")
    assert list(found.dispatched.values()) == ["planner"]
    chats = warm.chats(marks)
    assert not chats["mini"] and len(chats["studio"]) >= 4
    receipt = next(each for each in warm.receipts()[::-1] if each["alias"] == "claude-haiku-local"
                   and each["failures"])
    assert (receipt["node"], receipt["outcome"]) == ("studio", "ok")
    assert receipt["failures"] == [{"node": "mini", "why": "refused"}]


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_a_node_killed_in_mid_answer_is_made_up_for_by_the_other(warm, tmp_path, which):
    """The stream ends in an error event; Claude Code asks once more, without a stream."""
    mini = warm.nodes["mini"]
    before, mark, relieved = warm.recorder.mark(), mini.recorder.mark(), warm.marks()

    def kill_it_while_it_talks():
        rig.wait_until(lambda: any(len(chat.answer) > 2000 for chat in mini.chats(mark)),
                       seconds=60, what="the node to talk")
        mini.kill()

    killer = threading.Thread(target=kill_it_while_it_talks)
    killer.start()
    found = warm.launch(which, tmp_path, "-p", "go", "--model", "claude-lone-local")
    killer.join()
    assert b'"done":true' not in mini.chats(mark)[0].answer, "it had said all before it was killed"
    turns = warm.recorder.since(before, "/v1/messages")
    assert b"event: error" in turns[0].answer and b"text_delta" in turns[0].answer
    assert not turns[1].body.get("stream"), "Claude Code asked again with a stream"
    call = json.loads(turns[1].content)["content"][0]
    assert (call["type"], call["name"]) == ("tool_use", "Bash")
    assert (found.returncode, found.result["result"]) == (0, "DONE")
    assert {chat.body["model"].split(":")[0] for chat in warm.chats(relieved)["studio"]} \
        == {"shared"}


def test_a_client_killed_in_mid_answer_frees_the_node_at_once(warm, tmp_path):
    mini = warm.nodes["mini"]
    mark = mini.recorder.mark()
    warm.project.use_claude("latest")
    argv = warm.project.argv("launch", "claude", "--", "-p", "@play talk", "--model",
                             "claude-lone-local", *rig.CLAUDE_FLAGS)
    process = rig.Process(argv, log=tmp_path / "killed.jsonl", cwd=warm.project.folder,
                          env=warm.project.environment(CLAUDE_CODE_MAX_OUTPUT_TOKENS="300000"))
    chat = rig.wait_until(
        lambda: next((each for each in mini.chats(mark) if len(each.answer) > 2000), None),
        seconds=60, what="the node to talk")
    process.kill()
    rig.wait_until(lambda: chat.closed_by, seconds=15, what="the node's request to end")
    assert chat.closed_by == "client"
    # 300,000 tokens take minutes: whoever is answered now found the engine free
    status, body = rig.get_json(mini.direct + "/api/chat", timeout=20, body={
        "model": "talker", "stream": False, "messages": [{"role": "user", "content": "@play pong"}],
        "options": {"num_ctx": 65536}, "keep_alive": -1})
    assert status == 200, f"the node was still busy with nobody's answer: {body}"
    assert body["message"]["content"] == "PONG"
    rig.wait_until(lambda: warm.receipts()[-1]["outcome"] == "left", seconds=5, what="the receipt")


def test_a_hundred_clients_that_leave_in_mid_answer_leave_the_node_as_it_was(warm):
    """Ollama 0.32.15 loses a model's slot for good when it sees a client go at the wrong moment.

    Of clients that just closed, 7 of 450 hit it (Ollama's issue 17131).
    """
    for _ in range(100):
        stream = Stream(warm.gateway, "claude-lone-local", "@play talk")
        stream.wait_for_text()
        stream.hang_up()
    status, body = warm.gateway.say("claude-lone-local", "@play pong")
    assert (status, body["content"]) == (200, [{"type": "text", "text": "PONG"}])


def test_a_client_that_leaves_the_line_is_never_asked_for(warm):
    holder = Stream(warm.gateway, "claude-lone-local", "@play talk")
    holder.wait_for_text()
    marks = warm.marks()
    waiting = Stream(warm.gateway, "claude-lone-local", "@play pong")
    last = Stream(warm.gateway, "claude-lone-local", "@play count")
    rig.wait_until(lambda: warm.fleet()["waiting"] == 2, what="two in line")
    waiting.hang_up()
    rig.wait_until(lambda: warm.fleet()["waiting"] == 1, seconds=2, what="one in line")
    holder.hang_up()
    assert last.ended.wait(20)
    (chat,) = warm.chats(marks)["mini"]
    assert chat.body["messages"][-1]["content"] == "@play count"


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_a_prompt_too_long_is_named_by_claude_code(warm, tmp_path, which):
    before = warm.recorder.mark()
    words = "hi " * 4000  # what a lean start asks would fit
    found = warm.launch(which, tmp_path, "-p", words, "--model", "claude-tight-local")
    turns = warm.recorder.since(before, "/v1/messages")
    refusals = [json.loads(turn.content) for turn in turns if turn.status == 400]
    assert refusals and all(each["error"]["type"] == "invalid_request_error" for each in refusals)
    words = refusals[0]["error"]["message"]
    assert words.startswith("prompt is too long: ") and words.endswith(" tokens > 8192 maximum")
    assert int(words.split()[4]) > 8192
    assert "prompt is too long" in found.result["result"].lower()


def test_one_model_on_two_nodes_shares_the_load(warm):
    marks = warm.marks()
    streams = [Stream(warm.gateway, "claude-talk-local", "@play talk", max_tokens=400)
               for _ in range(6)]
    for stream in streams:
        assert stream.ended.wait(60)
        assert stream.events[-1][0] == "message_stop"
    chats = warm.chats(marks)
    assert sum(map(len, chats.values())) == len(streams) and all(chats.values())
    for asked in chats.values():
        for earlier, later in zip(asked, asked[1:]):
            assert 0 < earlier.done_at <= later.at
    assert any(one.at < other.last_byte and other.at < one.last_byte
               for one in chats["studio"] for other in chats["mini"]), "not side by side"


def test_the_official_sdk_gets_what_it_expects(warm):
    script = pathlib.Path(__file__).with_name("sdk_talk.py")
    done = subprocess.run(
        [str(install.SDK_PYTHON), str(script)], capture_output=True, encoding="utf-8", timeout=120,
        env=warm.project.environment(ANTHROPIC_BASE_URL=warm.gateway.url, no_proxy="127.0.0.1",
                                     ANTHROPIC_API_KEY=warm.gateway.key))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["text"] == "PONG" and said["stop"] == "end_turn"
    assert said["streamed"] == "one two three four five"
    assert said["stream_usage"][0] > 0 and said["stream_usage"][1] > 1
    assert said["stopped"] == ["one two ", "stop_sequence", "three"]
    assert said["cut"] == "max_tokens"
    assert said["call"] == ["Bash", {"command": "echo hi"}, "tool_use"]
    assert said["after_tool"] == "DONE"
    assert "claude-haiku-local" in said["models"]
    assert said["tokens"] > 0
    assert said["errors"] == {"key": 401, "model": 404, "empty": 400, "long": 400}


def test_openais_sdk_gets_what_it_expects_of_both_dialects(warm):
    script = pathlib.Path(__file__).with_name("openai_talk.py")
    done = subprocess.run(
        [str(install.SDK_PYTHON), str(script)], capture_output=True, encoding="utf-8", timeout=120,
        env=warm.project.environment(OPENAI_BASE_URL=f"{warm.gateway.url}/v1",
                                     no_proxy="127.0.0.1", OPENAI_API_KEY=warm.gateway.key))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for dialect in ("chat", "responses"):
        found = said[dialect]
        assert (found["text"], found["streamed"]) == ("PONG", "one two three four five")
        assert found["usage"][0] > 0 and found["usage"][1] > 1
        assert found["call"] == found["streamed_call"] == ["Bash", {"command": "echo hi"}]
        assert found["after_tool"] == "DONE"
        assert found["errors"] == {
            "key": [401, "invalid_api_key"], "model": [404, "not_found"], "empty": [400, None],
            "long": [400, "context_length_exceeded"]}
    assert said["chat"]["cut"] == "length"
    assert said["responses"]["cut"] == ["incomplete", "max_output_tokens"]
    assert said["chat"]["stopped"] == ["one two ", "stop"]
    assert "claude-haiku-local" in said["models"] and said["model"] == "claude-haiku-local"


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_up_does_the_whole_job_and_leaves_nothing_running(ground, running, trap, which):
    """One command on a bare fleet file: files, models, gateway, Claude Code, and the end of all."""
    project = rig.Project(ground / f"up-{which}", SCRIPT, trap, claude=which)
    port = rig.free_port()
    project.write("fleet.yaml", FLEET.format(
        port=port, **{name: node.url for name, node in running.items()}))
    marks = {name: node.recorder.mark() for name, node in running.items()}
    found = rig.run_session(
        project.argv("up", "--", "-p", "@play agent:planner agent:implementer done",
                     *rig.CLAUDE_FLAGS), cwd=project.folder, env=project.environment())
    assert (found.returncode, found.result["result"]) == (0, "DONE"), found.stderr
    assert sorted(found.dispatched.values()) == ["implementer", "planner"]
    asked = {name: {chat.body["model"].split(":")[0] for chat in node.chats(marks[name])}
             for name, node in running.items()}
    assert "coder-large" in asked["studio"] and "coder-small" in asked["mini"]
    assert rig.get_json(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)[0] == 0
    receipts = (project.folder / ".subagent-fleet/requests.jsonl").read_text(encoding="utf-8")
    assert {json.loads(line)["outcome"] for line in receipts.splitlines()} == {"ok"}


def test_a_signal_lets_the_running_answer_end(ground, nodes, trap):
    project = rig.Project(ground / "stopped", SCRIPT, trap)
    port = rig.free_port()
    project.write("fleet.yaml", FLEET.format(
        port=port, **{name: node.url for name, node in nodes.items()}))
    project.run("generate")
    process = rig.serve_process(project, port)
    rig.wait_for_gateway(process, port)
    gateway = rig.Gateway(f"http://127.0.0.1:{port}", process, project.key())
    # How fast this machine talks now, its model loaded: the answer should take 2 s of the 10 s that
    # it is given, for who is five times as slow by then.
    for tokens in (5, 2000):
        began = time.monotonic()
        assert Stream(gateway, "claude-talk-local", "@play talk", max_tokens=tokens).ended.wait(60)
    tokens = int(2 * 2000 / (time.monotonic() - began))
    stream = Stream(gateway, "claude-talk-local", "@play talk", max_tokens=tokens)
    stream.wait_for_text()
    process.child.terminate()
    assert not stream.ended.is_set(), "nothing was running"
    assert stream.ended.wait(20)
    assert stream.events[-1][0] == "message_stop", tokens
    assert process.child.wait(10) == 0
