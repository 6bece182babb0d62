"""The other programs, each real and pinned, end to end through `launch` and `serve`.

Their nodes are scripted (`ScriptedNode`, Ollama's wire with known words): a model that calls each
program's own tools with the right arguments is not to be had in zeros. On the real engine each is
answered in words, and too small a window is refused by the engine itself.
"""
import json
import pathlib
import re
import subprocess
import time
from dataclasses import dataclass

import pytest

import install
import rig
from gateway_rig import HEAD, Node

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "subagent_fleet.py"
BINARIES = [install.CACHE / name / "node_modules/.bin" for name in install.NPM_PROGRAMS]
FLEET = """\
project:
  name: lab
  gateway: {{port: {port}}}
nodes:
  studio: {{endpoint: "{studio}"}}
  mini: {{endpoint: "{mini}"}}
models:
  heavy: {{node: studio, ollama_model: coder:30b, litellm_alias: claude-sonnet-local,
          context: 65536, fallback: [light]}}
  light: {{node: mini, ollama_model: coder:8b, litellm_alias: claude-haiku-local, context: 65536}}
agents:
  planner:
    model: light
    description: "Use for \\"planning\\": files, risks."
    tools: [Read]
    prompt: "PLANNER. Look at ${{HOME}}, {{env:LITELLM_MASTER_KEY}} and {{file:fleet.yaml}} yourself."
"""
TOO_LONG = {"error": "the request (70000 tokens) exceeds the available context size (65536 tokens)"}


@dataclass(frozen=True)
class Program:
    """How a program is asked, and with which of its tools a model does what it is asked."""

    words: tuple
    read: tuple  # the tool that reads a file, and its arguments
    edit: tuple
    dispatch: tuple = ()


ASKED = "Please write two for one in note.txt"
NOTE = "NOTE"  # stands for the path of the file
PROGRAMS = {
    "opencode": Program(
        ("run", ASKED), ("read", {"filePath": NOTE}),
        ("edit", {"filePath": NOTE, "oldString": "one", "newString": "two"}),
        ("task", {"description": "plan it", "prompt": "Plan.", "subagent_type": "planner"})),
    "codex": Program(
        ("exec", "-s", "danger-full-access", ASKED), ("exec_command", {"cmd": "cat note.txt"}),
        ("exec_command", {"cmd": "sed -i s/one/two/ note.txt"}),
        ("spawn_agent", {"agent_type": "planner", "message": "Plan."})),
    "aider": Program(("--yes-always", "--message", ASKED, "note.txt"), (), ()),
    "qwen": Program(
        ("-y", ASKED), ("read_file", {"file_path": NOTE}),
        ("edit", {"file_path": NOTE, "old_string": "one", "new_string": "two"}),
        ("agent", {"description": "plan it", "prompt": "Plan.", "subagent_type": "planner"}))}
BLOCK = "note.txt\n```\n<<<<<<< SEARCH\none\n=======\ntwo\n>>>>>>> REPLACE\n```\n"


class ScriptedNode:
    """An Ollama whose model does what a program was asked, a step an answer.

    `dies_after` so many answers of the main session; `refuses`: a prompt with a result in it is
    too long; `tokens`: what it counts of the first main prompt.
    """

    def __init__(self, name, note):
        self.program, self.note = PROGRAMS[name], str(note)
        self.dies_after, self.refuses, self.tokens = 0, False, 0
        self.node = Node(lambda node, connection: self.play(node.here, connection))
        self.endpoint, self.answered, self.texts = self.node.endpoint, [], []

    def play(self, here, connection):
        if here.target != "/api/chat":
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n'
                               b'{"version":"0.32.15"}')
            return
        request = here.request
        self.texts.append(json.dumps(request))
        is_main = self.is_main(request)
        results = [message for message in request["messages"] if message["role"] == "tool"]
        if self.refuses and is_main and results:
            body = json.dumps(TOO_LONG).encode()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b"
                               % (len(body), body))
            self.answered.append("refused")
            return
        steps = self.main_steps(results) if is_main else self.other_steps(request)
        if is_main and "refused" in self.answered:  # it was compacted: the rest is told in words
            steps = ["All done."]
        self.say(connection, request, steps[min(len(results), len(steps) - 1)], is_main)
        if self.dies_after and len(self.answered) >= self.dies_after:
            self.node.close()

    def is_main(self, request):
        names = {tool["function"]["name"] for tool in request.get("tools", ())}
        if not self.program.read:  # aider has no tools
            return "SEARCH/REPLACE" in json.dumps(request["messages"])
        return self.program.edit[0] in names and "PLANNER" not in request["messages"][0]["content"]

    def main_steps(self, results):
        if not self.program.read:
            return [BLOCK]
        steps = [self.program.read, self.program.edit]
        if self.program.dispatch:
            steps.append(self.program.dispatch)
        if self.program.dispatch[:1] == ("spawn_agent",):
            ids = re.findall(r'"agent_id":\s*"([^"]+)', " ".join(
                result["content"] for result in results))
            steps.append(("wait_agent", {"targets": ids, "timeout_ms": 20000}))
        return [*steps, "All done."]

    def other_steps(self, request):
        """A subagent reads and answers; who asks for a title, a summary or a message has no tools."""
        return [self.program.read, "It is planned."] if request.get("tools") else ["A summary."]

    def say(self, connection, request, step, is_main):
        message = {"role": "assistant", "content": step if isinstance(step, str) else ""}
        if not isinstance(step, str):
            arguments = json.loads(json.dumps(step[1]).replace(NOTE, self.note))
            message["tool_calls"] = [{"function": {"name": step[0], "arguments": arguments}}]
        tokens = len(json.dumps(request)) // 4
        if is_main and self.tokens:
            tokens, self.tokens = self.tokens, 0
        last = {"message": {"content": ""}, "done": True, "done_reason": "stop",
                "prompt_eval_count": tokens, "eval_count": 9}
        lines = [{"message": message, "done": False}, last]
        connection.sendall(HEAD + b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.answered.append(step if isinstance(step, str) else step[0])


class Bench:
    """A project with a served fleet of two scripted nodes, and a program to be run in it."""

    def __init__(self, folder, name, trap, fleet=FLEET, **nodes):
        self.name, self.project = name, rig.Project(folder, SCRIPT, trap)
        self.project.write("note.txt", "one\n")
        self.note = self.project.folder / "note.txt"
        self.studio, self.mini = (ScriptedNode(name, self.note) for _ in range(2))
        self.port = rig.free_port()
        self.project.write("fleet.yaml", fleet.format(
            port=self.port, **{"studio": self.studio.endpoint, "mini": self.mini.endpoint, **nodes}))
        self.project.run("generate", quiet=True)
        for words in (["init", "-q"], ["add", "note.txt"], ["commit", "-qm", "one"]):
            subprocess.run(["git", *words], cwd=self.project.folder, check=True,
                           env=self.environment())
        self.process = rig.serve_process(self.project, self.port)
        rig.wait_for_gateway(self.process, self.port)

    def environment(self):
        own = self.project.environment()
        path = [install.NODE22_BIN, *BINARIES, install.AIDER_BIN, own["PATH"]]
        return {**own, "PATH": ":".join(map(str, path)),
                # Else opencode asks the registry for a package of its own at each start.
                "npm_config_offline": "true",
                "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
                "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

    def launch(self, asked=ASKED, timeout=90):
        """Run the program to its end; give (exit status, what it said, seconds)."""
        began = time.monotonic()
        words = [asked if word == ASKED else word for word in PROGRAMS[self.name].words]
        process = rig.Process(
            self.project.argv("launch", self.name, "--", *words),
            log=self.project.home / "said.log", env=self.environment(), cwd=self.project.folder)
        try:
            status = process.child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        process.stop()
        return status, process.text(), time.monotonic() - began

    def receipts(self):
        file = self.project.folder / ".subagent-fleet/requests.jsonl"
        rig.wait_until(file.exists, what="a receipt")  # they are filed aside, a moment later
        time.sleep(0.3)
        lines = self.project.read(".subagent-fleet/requests.jsonl").splitlines()
        return [json.loads(line) for line in lines]

    def stop(self):
        self.process.stop()
        self.studio.node.close()
        self.mini.node.close()


@pytest.fixture
def bench(tmp_path, trap):
    made = []

    def make(name, fleet=FLEET, **nodes):
        made.append(Bench(tmp_path / name, name, trap, fleet, **nodes))
        return made[-1]
    yield make
    for each in made:
        each.stop()


def holds_key(bench, key):
    """The files in which the key is, but the one that keeps it."""
    places = [bench.project.folder, bench.project.home]
    return [str(path) for place in places for path in place.rglob("*") if path.is_file()
            and path.name != ".env.subagent-fleet" and key.encode() in path.read_bytes()]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_it_reads_a_file_edits_it_and_ends_and_asks_nobody_else(bench, trap, name):
    made = bench(name)
    status, said, _ = made.launch()
    assert (status, made.note.read_text()) == (0, "two\n"), said[-3000:]
    assert trap.wanted == []
    receipts = made.receipts()
    assert {receipt["outcome"] for receipt in receipts} == {"ok"}
    main = [receipt for receipt in receipts if receipt["alias"] == "claude-sonnet-local"]
    assert main and {receipt["node"] for receipt in main} == {"studio"}
    assert made.studio.answered[-1] == (BLOCK if name == "aider" else "All done.")

    key = made.project.key()
    assert holds_key(made, key) == []
    assert not any(key in text for text in made.studio.texts + made.mini.texts)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name].dispatch])
def test_a_dispatched_agent_arrives_on_its_own_alias_and_machine(bench, name):
    made = bench(name)
    status, said, _ = made.launch()
    assert status == 0, said[-3000:]
    planner = [text for text in made.mini.texts if "PLANNER" in text]
    assert len(planner) == 2 and "It is planned." in made.mini.answered, said[-3000:]
    assert "PLANNER" not in "".join(made.studio.texts)
    assert "passwd" not in planner[0] and "LITELLM_MASTER_KEY" in planner[0] or name == "codex"
    tools = [tool["function"]["name"] for tool in json.loads(planner[0]).get("tools", ())]
    if name != "codex":  # which cannot limit them, and says so
        assert tools == [PROGRAMS[name].read[0]]
    dispatched = [receipt for receipt in made.receipts() if receipt["agent_id"]]
    if name != "qwen":  # which names no session
        assert {receipt["alias"] for receipt in dispatched} == {"claude-haiku-local"}
        assert {receipt["node"] for receipt in dispatched} == {"mini"}
        sessions = {receipt["session"] for receipt in made.receipts()}
        assert len(sessions) == 1 and len({receipt["agent_id"] for receipt in dispatched}) == 1


@pytest.mark.parametrize("name", ["opencode", "codex", "qwen"])
def test_the_fallback_answers_when_a_node_dies(bench, name):
    made = bench(name)
    made.studio.dies_after = 1
    status, said, _ = made.launch()
    assert (status, made.note.read_text()) == (0, "two\n"), said[-3000:]
    assert len(made.studio.answered) == 1 and "All done." in made.mini.answered
    tries = [each for receipt in made.receipts() for each in receipt["failures"]]
    assert {each["node"] for each in tries} == {"studio"}


# What each does about a prompt that is too long: (it goes on, what it says, most requests).
TOO_LONG_OUTCOMES = {
    "opencode": ("compacts", "", 12), "qwen": ("", "", 12),
    "codex": ("stops", "ran out of room in the model's context window", 4)}


@pytest.mark.parametrize("name", sorted(TOO_LONG_OUTCOMES))
def test_a_prompt_that_is_too_long_makes_it_compact_or_stop_and_never_loop(bench, name):
    made = bench(name)
    made.studio.refuses = True
    status, said, seconds = made.launch()
    how, words, most = TOO_LONG_OUTCOMES[name]
    assert status is not None, f"it went on for {seconds:.0f} s: {said[-2000:]}"
    asked = made.studio.answered + made.mini.answered
    assert "refused" in asked and len(asked) <= most, asked
    assert words in said
    if how == "compacts":
        assert "A summary." in asked, asked
    if how == "stops":
        assert asked.count("refused") <= 2, asked


def test_codex_compacts_by_the_usage_that_it_is_told(bench):
    made = bench("codex")
    made.studio.tokens = 60_000  # of 65,536
    status, said, _ = made.launch()
    assert (status, made.note.read_text()) == (0, "two\n"), said[-3000:]
    compactions = [text for text in made.studio.texts if "CONTEXT CHECKPOINT COMPACTION" in text
                   and '"tools"' not in text]
    assert len(compactions) == 1 and "A summary." in made.studio.answered


# -- on the real engine --

REAL_FLEET = """\
project:
  name: real
  gateway: {{port: {port}}}
nodes:
  studio: {{endpoint: "{studio}"}}
models:
  heavy: {{node: studio, ollama_model: coder-large, litellm_alias: claude-sonnet-local,
          context: CONTEXT}}
agents:
  planner: {{model: heavy, description: plans}}
"""


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_the_real_engine_answers_it_with_true_usage(bench, running, trap, name):
    studio = running["studio"]
    mark = studio.recorder.mark()
    made = bench(name, REAL_FLEET.replace("CONTEXT", "131072"), studio=studio.url)
    status, said, _ = made.launch(asked="hello\n@play pong\nthank you")
    assert status == 0 and "PONG" in said, said[-3000:]
    assert trap.wanted == []
    receipts = made.receipts()
    assert {receipt["outcome"] for receipt in receipts} == {"ok"}
    counted = [json.loads(each.content.splitlines()[-1])["prompt_eval_count"]
               for each in studio.chats(mark)]
    assert sorted(receipt["input_tokens"] for receipt in receipts) == sorted(counted)
    assert min(counted) > 100 or name == "aider"


# Where the window holds not even the first prompt: what each says of it, beside what `launch` says.
@pytest.mark.parametrize("name, words", [
    ("codex", "ran out of room in the model's context window"), ("aider", "token limit")])
def test_a_window_too_small_for_the_first_prompt_ends_it_with_a_word(bench, running, name, words):
    studio = running["studio"]
    mark = studio.recorder.mark()
    made = bench(name, REAL_FLEET.replace("CONTEXT", "1024"), studio=studio.url)
    status, said, seconds = made.launch(asked="hello\n@play pong\nthank you")
    assert status is not None, f"it went on for {seconds:.0f} s"
    assert words in said, said[-3000:]
    assert len(studio.chats(mark)) <= 6, "it asked again and again"
