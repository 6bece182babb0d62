"""The warm queue before a real llama-server and a real Ollama: what agents at once read again.

Four agents of five turns share one slot; each answer but the last calls a tool. What they read at
once is compared with what they read one by one.
"""

import json
import os
import random
import re
import threading

import pytest

import install
import rig
from tools import SCRIPT

TURNS, AGENTS = 5, 4
FLEET = """
project: {{name: warm, gateway: {{port: {port}}}}}
nodes: {{one: {{endpoint: "http://127.0.0.1:{node}", provider: {provider}}}}}
models: {{small: {{node: one, model: {model}, alias: small, context: 65536}}}}
agents: {{planner: {{model: small, description: plans}}}}
"""
WORDS = "alpha bravo charlie delta echo golf hotel india juliet kilo lima mike".split()
TOOLS = [{"name": "Bash", "description": "run a command", "input_schema": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}]


def text_of(seed, words):
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


class Fleet:
    """A fresh llama-server or Ollama with one slot, and a fresh gateway before it."""

    def __init__(self, project, trap, provider, cache):
        self.project, self.port, node = project, rig.free_port(), rig.free_port()
        self.ollama = None
        if provider == "ollama":
            more = {} if cache is None else {"LLAMA_ARG_CACHE_RAM": str(cache)}
            self.node = self.ollama = rig.OllamaNode(
                "one", project.folder / "ollama", {"worker:latest": "worker"}, trap,
                OLLAMA_NUM_PARALLEL="1", **more)
            node = self.ollama.recorder.port
        else:
            self._start_llama_server(node, cache, trap)
        project.write("fleet.yaml", FLEET.format(port=self.port, node=node, provider=provider,
                                                 model="worker"))
        project.run("generate", quiet=True)
        self.gateway = rig.serve_process(project, self.port)
        rig.wait_for_gateway(self.gateway, self.port)
        self.door = rig.Gateway(f"http://127.0.0.1:{self.port}", self.gateway, project.key())

    def _start_llama_server(self, node, cache, trap):
        project = self.project
        environment = {"PATH": os.defpath, "HOME": str(project.folder), **trap.environment()}
        words = [install.engine_folder() / "llama-server", "-m", install.MODELS / "worker.gguf",
                 "--alias", "worker", "-c", "65536", "-np", "1", "--jinja", "--port", node]
        if cache is not None:
            words += ["--cache-ram", cache]
        self.node = rig.Process(words, log=project.folder / "node.log", env=environment)
        rig.wait_until(lambda: rig.get_json(f"http://127.0.0.1:{node}/health")[0] == 200,
                       what="llama-server")

    def close(self):
        self.gateway.stop()
        self.node.stop()

    def talk(self, number, grows, read):
        """Let one agent have all its turns; add what was read each time."""
        play = " ".join(["bash"] * (TURNS - 1) + ["done"])
        messages = [{"role": "user", "content": f"{text_of(number, 2500)}\n@play {play}\n"}]
        for turn in range(TURNS):
            status, answer = self.door.post(
                {"model": "small", "max_tokens": 200, "messages": messages, "tools": TOOLS,
                 "system": f"You are agent {number}."}, timeout=500)
            assert status == 200, answer
            read.append(answer["usage"]["input_tokens"])
            called = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
            assert bool(called) == (turn < TURNS - 1), answer
            messages.append({"role": "assistant", "content": answer["content"]})
            messages.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": each,
                 "content": text_of((number, turn).__hash__(), grows)} for each in called]})

    def read(self, grows, *, at_once):
        """Return how many tokens all agents had read."""
        read, threads = [], []
        for number in range(AGENTS):
            threads.append(threading.Thread(target=self.talk, args=(number, grows, read)))
            threads[-1].start()
            if not at_once:
                threads[-1].join()
        for thread in threads:
            thread.join()
        assert len(read) == AGENTS * TURNS
        return self.engine_tokens() if self.ollama else sum(read)

    def engine_tokens(self):
        """How many tokens Ollama's engine says it read; Ollama itself never tells."""
        said = re.findall(r"prompt eval time = .*?/ *(\d+) tokens", self.ollama.process.text())
        assert len(said) >= AGENTS * TURNS, self.ollama.process.text()[-2000:]
        return sum(map(int, said))


@pytest.fixture
def measure(tmp_path, trap):
    """Return what agents at once read of what they read one by one, and what is said of it."""
    def ratio(grows, cache, provider="llamacpp"):
        sums = []
        for at_once in (True, False):
            place = tmp_path / f"{at_once}-{cache}-{grows}"
            fleet = Fleet(rig.Project(place, SCRIPT, trap), trap, provider, cache)
            try:
                sums.append(fleet.read(grows, at_once=at_once))
            finally:
                fleet.close()
        lines = [json.loads(line) for line in
                 (tmp_path / f"True-{cache}-{grows}" / ".subagent-fleet" / "requests.jsonl")
                 .read_text().splitlines()]
        again = sum(line["read_again_tokens"] for line in lines)
        print(f"cache {cache} MiB, {grows} words a turn: {sums[0]:,.0f} at once, {sums[1]:,.0f} one "
              f"by one: {sums[0] / sums[1]:.2f}; {again:,} told as read again")
        return sums[0] / sums[1], lines
    return ratio


@pytest.mark.parametrize("grows", [60, 400])
@pytest.mark.parametrize("cache, most", [(0, 1.5), (1, 1.5), (2, 1.75), (3, 1.5), (None, 1.05)])
def test_four_agents_on_one_slot_read_little_again(measure, cache, most, grows):
    ratio, lines = measure(grows, cache)
    assert ratio <= most
    again = sum(line["read_again_tokens"] for line in lines)
    assert bool(again) == (ratio > 1.1)


@pytest.mark.parametrize("cache, most", [(0, 1.5), (None, 1.05)])
def test_four_agents_on_ollama_read_little_again(measure, cache, most):
    ratio, _ = measure(60, cache, "ollama")
    assert ratio <= most
