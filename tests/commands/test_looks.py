"""How each command looks on a terminal: kept as goldens, and never wider than the terminal."""
import json
import os
import re
import shutil
import time
import unicodedata

import pytest

import subagent_fleet as sf
from fake_ollama import FakeNode
from json_examples import compare_example

WIDTHS = (60, 100, 160)
NOW = 1795003200.0  # 2026-11-18T12:00:00Z
LAPTOP, MINI, GPU = (f"http://192.168.1.{number}:11434" for number in (20, 50, 51))
FLEET = f"""\
project:
  name: local-dev
nodes:
  laptop: {{endpoint: "{LAPTOP}", memory_gb: 16}}
  mini: {{endpoint: "{MINI}", memory_gb: 64}}
  gpu: {{endpoint: "{GPU}", memory_gb: 24}}
models:
  small-coder: {{node: laptop, ollama_model: "qwen3:8b", litellm_alias: claude-haiku-local, context: 32768}}
  heavy-coder: {{node: mini, ollama_model: "qwen3-coder:30b", litellm_alias: claude-sonnet-local,
    context: 65536, timeout: 600, max_parallel: 2, fallback: [reviewer-model]}}
  reviewer-model: {{node: gpu, ollama_model: "devstral:24b", litellm_alias: claude-opus-local,
    context: 65536, fallback: [heavy-coder]}}
agents:
  planner: {{model: small-coder, description: Plans., tools: [Read, Grep, Glob]}}
  implementer: {{model: heavy-coder, description: Writes code.}}
  reviewer: {{model: reviewer-model, description: Reviews., tools: [Read, Grep, Bash]}}
"""
# What a person writes on a long evening: a warning or an error of every kind that is often met.
WARNED = FLEET.replace("memory_gb: 16", "memory_gb: 4").replace("Glob]", "MultiEdit]") \
    .replace("context: 32768", "context: 4096").replace(", fallback: [heavy-coder]", "")
WRONG = FLEET.replace("endpoint: \"http://192.168.1.51:11434\"", "endpont: 192.168.1.51") \
    .replace("node: mini", "node: mimi").replace("max_parallel: 2", "max_parallel: two") \
    .replace("model: small-coder", "model: qwen3:8b").replace("context: 65536,\n", "context: 64k,\n")
KEY = "sk-" + "0123456789abcdef" * 4


class StagedWorld(sf.World):
    """A terminal of a width, machines at addresses of their own, and a clock that stands still."""

    def __init__(self, columns, machines, *, colour, is_terminal=True):
        super().__init__()
        self.width, self.machines, self.has_terminal = columns, machines, is_terminal
        self.shown = []
        self.environ = {"HOME": os.path.abspath("../home"), "PATH": "/nowhere", "TERM": "xterm"}
        if not colour:
            self.environ["NO_COLOR"] = "1"
        self.clock, self.now, self.sleep = (lambda: 0.0), (lambda: NOW), (lambda seconds: None)
        self.write = self.shown.append
        self.err = self.out

    columns = property(lambda self: self.width)

    def is_terminal(self, stream="stdout"):
        return self.has_terminal and stream != "stdin"

    def encoding_of(self, stream):
        return "utf-8"

    def confirm(self, question, text=""):
        self.shown.append(f"{question} [y/N] y\n")
        return True

    def open_exchange(self, url, **more):
        for endpoint, machine in self.machines.items():
            if not url.startswith(endpoint):
                continue
            if isinstance(machine, sf.NodeFailure):
                raise machine
            return super().open_exchange(machine.endpoint + url[len(endpoint):], **more)
        raise sf.NodeFailure("refused", "nothing listens there")

    def resolve(self, host, port, until):
        return super().resolve(host, port, until) if host == "127.0.0.1" else []

    def own_names(self):
        return "studio", ("192.168.1.20",)

    def is_own_address(self, address):
        return address == "127.0.0.1"

    def which(self, name):
        return None

    def find_free_port(self, host, above):
        return above + 1

    def on_stop(self, callback):
        callback("SIGINT")  # at once: what is said before and after is looked at

    def listen(self, host, port):
        return type("Listener", (), {"host": host, "port": port, "close": lambda self: None})()


def in_order(world, jobs, *, until=0.0, threads=1):
    """Stands for run_together: what ends first is no matter of threads."""
    for key, job in jobs.items():
        try:
            outcome = job()
        except sf.NodeFailure as failure:
            outcome = failure
        yield key, outcome


@pytest.fixture(scope="module")
def machines():
    """Three machines: one holds its model, one is cold, one is never there."""
    tools = ["completion", "tools"]
    laptop = FakeNode({"qwen3:8b": {"size": 5_200_000_000, "parameters": "8.2B", "context": 40960,
                                    "capabilities": [*tools, "thinking"]}})
    mini = FakeNode({"qwen3-coder:30b": {"size": 18_600_000_000, "parameters": "30.5B",
                                         "context": 262144, "capabilities": tools},
                     "nomic-embed-text": {"size": 274_000_000, "parameters": "137M",
                                          "capabilities": ["embedding"]}})
    gpu = FakeNode({"devstral:24b": {"size": 14_300_000_000, "parameters": "23.6B", "context": 131072,
                                     "capabilities": tools}})
    gpu.loaded["devstral:24b"], gpu.gpu_percent = 65536, 85
    yield {LAPTOP.replace(".20", ".21"): gpu, LAPTOP: laptop, MINI: mini, GPU: sf.NodeFailure("timeout", "no answer within 5 s"),
           "http://127.0.0.1:11434": laptop, "http://192.168.1.60:11434": mini}
    for node in (laptop, mini, gpu):
        node.close()


# -- what is on the disk before a command runs --

def write(text=FLEET, path="fleet.yaml"):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


def empty():
    """Nothing is there."""


def warned():
    write(WARNED)


def wrong():
    write(WRONG)


def broken():
    write(FLEET.replace("  name: local-dev", "  name: local-dev\n\tgateway:"))


def edited():
    """An agent was edited, and one is gone."""
    write()
    sf.main(["generate"], Silent())
    with open(".claude/agents/planner.md", "a", encoding="utf-8") as stream:
        stream.write("And be brief: a plan has seven lines at most, and names its files first.\n")
    os.remove(".claude/agents/reviewer.md")


def generated():
    write()
    sf.main(["generate"], Silent())


def served():
    """Five requests: three in order, one that went elsewhere, one that nobody answered."""
    generated()
    done = {"time": NOW - 60, "id": "req_1", "session": "5b3c", "agent": "", "alias": "claude-sonnet-local",
            "model": "heavy-coder", "node": "mini", "context": 65536, "tries": [], "waited": 0.0,
            "first_byte": 1.25, "total": 9.5, "input_tokens": 18200, "output_tokens": 412,
            "outcome": "ok", "said": ""}
    planner = {"agent": "a1", "alias": "claude-haiku-local", "model": "small-coder", "node": "laptop"}
    reviewer = {"agent": "a2", "alias": "claude-opus-local"}
    moved = {"tries": [{"node": "gpu", "why": "timeout"}],
             "said": "gpu: it took the request but did not answer"}
    lost = {"tries": [{"node": "mini", "why": "api_error"}], "outcome": "api_error", "total": 0.3,
            "said": "mini: model requires more system memory (19.3 GiB) than is available (12.1 GiB)"}
    rows = [done, {**done, **planner, "waited": 2.5}, {**done, **reviewer, **moved, "total": 24.5},
            {**done, **lost}, {**done, "outcome": "prompt_too_long", "model": None, "node": None,
                               "said": "mini: prompt is too long: 70211 tokens > 65536 maximum"}]
    lines = [json.dumps({**row, "time": NOW - 60 + 7 * index}) for index, row in enumerate(rows)]
    write("\n".join(lines) + "\n", ".subagent-fleet/requests.jsonl")


def served_now():
    """Every machine is there, every model loaded; two work at the gateway, one waits."""
    write(FLEET.replace(GPU, LAPTOP.replace(".20", ".21")))


def far():
    write(FLEET.replace(GPU, "https://ollama.example.com"))


class Silent(StagedWorld):
    """Prepares a place; what it says is not looked at."""

    def __init__(self):
        super().__init__(80, {}, colour=False)
        self.environ["LITELLM_MASTER_KEY"] = KEY


# -- the commands --

ROWS = {
    # name of the golden: what is there before, the words; a row a state that people meet
    "init": (empty, "init --node mini=192.168.1.50 --node gpu=192.168.1.51"),
    "init-offline": (empty, "init --offline"),
    "init-example": (empty, "init --example three-machines"),
    "init-again": (write, "init --node mini=192.168.1.50"),
    "validate": (write, "validate"),
    "validate-warnings": (warned, "validate"),
    "validate-errors": (wrong, "validate"),
    "validate-syntax": (broken, "validate"),
    "validate-nothing": (empty, "validate"),
    "discover": (write, "discover"),
    "discover-verbose": (write, "discover -v"),
    "generate": (write, "generate"),
    "generate-check": (generated, "generate --check"),
    "generate-diff": (edited, "generate --diff"),
    "generate-edited": (edited, "generate"),
    "warmup": (write, "warmup"),
    "status": (write, "status"),
    "status-served": (served_now, "status"),
    "doctor": (edited, "doctor"),
    "doctor-verbose": (generated, "doctor -v"),
    "doctor-errors": (wrong, "doctor"),
    "logs": (served, "logs"),
    "logs-failed": (served, "logs --failed"),
    "logs-nothing": (write, "logs"),
    "serve": (served, "serve"),
    "add": (write, "add studio=192.168.1.60 --dry-run"),
    "add-known": (write, "add studio=192.168.1.20"),
    "worker": (empty, "worker"),
    "trust": (far, "trust"),
    "trust-nothing": (write, "trust --show"),
    "up": (empty, "up"),
    "launch": (generated, "launch claude"),
    "clean": (edited, "clean --dry-run"),
    "recommend": (write, "recommend"),
    "trace-nothing": (generated, "trace"),
    "generate-target": (write, "generate --target opencode,codex"),
    "usage": (write, "status --wach"),
    "no-command": (write, "stauts"),
}


def look_at(row, columns, machines, *, colour, place, monkeypatch, is_terminal=True):
    """Return what a command of a row shows, in a directory of its own."""
    prepare, words = ROWS[row] if isinstance(row, str) else row
    home = place / "local"
    for directory in (home, place / "home"):
        shutil.rmtree(directory, ignore_errors=True)
    home.mkdir()
    monkeypatch.chdir(home)
    reset(machines)
    with monkeypatch.context() as patch:
        patch.setattr(sf, "run_together", in_order)
        patch.setattr(sf, "OLLAMA_ENDPOINT", LAPTOP)
        patch.setattr(sf, "find_system", lambda world, in_docker: "systemd")
        patch.setattr(sf, "find_ollama", lambda world: "")
        patch.setattr(sf.Server, "run", lambda server, listener: server.stops.append("SIGINT"))
        patch.setattr(sf, "addresses_of", lambda world, node, until: ())
        patch.setattr(sf, "last_session", lambda *words, since: "")
        if prepare is served_now:
            page = sf.FleetPage("local-dev", waiting=1, models=(
                sf.ModelSlots("heavy-coder", 2, 2), sf.ModelSlots("small-coder", 0, 1),
                sf.ModelSlots("reviewer-model", 0, 1, 12.0)))
            patch.setattr(sf, "see_gateway", lambda *_: sf.GatewayView(sf.OUR_GATEWAY, page))
            machines[MINI].loaded = {"qwen3-coder:30b": 65536}
        prepare()
        world = StagedWorld(columns, machines, colour=colour, is_terminal=is_terminal)
        sf.main(words.split(), world)
    text = re.sub(r"[^\n]*\r\x1b\[K", "", "".join(world.shown))  # of progress nothing stays
    return re.sub(r"Python \d\.\d+\.\d+", "Python 3.9.18", text)


def reset(machines):
    """Leave in memory what was there first."""
    machines[LAPTOP].loaded = {"qwen3:8b": 32768}
    machines[MINI].loaded = {}


@pytest.fixture(autouse=True)
def no_time_zone(monkeypatch):
    if hasattr(time, "tzset"):
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()
        yield
        monkeypatch.undo()
        time.tzset()
    else:
        yield


def shown_width(line):
    """The columns of a line on a terminal, escapes not counted."""
    line = re.sub("\x1b\\[[0-9]*m", "", line)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line
               if unicodedata.category(char) not in ("Mn", "Me", "Cf"))


def without_colour(text):
    return re.sub("\x1b\\[[0-9;]*m", "", text)


@pytest.mark.skipif(os.name == "nt", reason="paths")
@pytest.mark.parametrize("name", ROWS)
def test_a_command_looks_as_it_was_seen(name, machines, tmp_path, monkeypatch, golden):
    """In a pipe, then on terminals, plain and in colour: `\\e` begins an escape."""
    parts = []
    for columns in (0, *WIDTHS):
        for colour in (False, True):
            text = look_at(name, columns or 80, machines, colour=colour, place=tmp_path,
                           monkeypatch=monkeypatch, is_terminal=columns > 0)
            if columns or not colour:
                kind = f"{columns} columns, {'in colour' if colour else 'plain'}" if columns else "a pipe"
                parts.append(f"######## {kind}\n{text}")
    golden(f"looks/{name}.txt", "".join(parts).replace("\x1b[", "\\e["))


@pytest.mark.parametrize("columns", [*WIDTHS, 80])
@pytest.mark.parametrize("name", ROWS)
def test_no_line_of_a_command_is_wider_than_the_terminal(name, columns, machines, tmp_path, monkeypatch):
    text = look_at(name, columns, machines, colour=True, place=tmp_path, monkeypatch=monkeypatch)
    plain = look_at(name, columns, machines, colour=False, place=tmp_path, monkeypatch=monkeypatch)
    assert without_colour(text) == plain and "\x1b" not in plain
    diff = r"[-+ @].*" if name in ("add", "add-known", "generate-diff", "generate-edited") else "$."
    wide = [line for line in plain.split("\n") if shown_width(line) > columns and not is_copied(line)
            and not re.fullmatch(diff, line)]
    assert wide == []


def test_a_taken_port_is_told_in_the_width(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(sf, "avoid_taken_port", lambda world, gateway: sf.replace(gateway, port=4001))
    text = look_at("init", 60, machines, colour=False, place=tmp_path, monkeypatch=monkeypatch)
    assert "Port 4000 is in use by something else" in text
    assert [line for line in text.split("\n") if shown_width(line) > 60 and not is_copied(line)] == []


@pytest.mark.parametrize("columns", [*WIDTHS, 40])
@pytest.mark.parametrize("command", ["", *[row.name for row in sf.COMMANDS]])
def test_no_line_of_help_is_wider_than_the_terminal(command, columns, machines):
    world = StagedWorld(columns, machines, colour=True)
    assert sf.main(["help", command] if command else ["help"], world) == 0
    text = "".join(world.shown)
    assert [line for line in text.split("\n") if shown_width(line) > columns and not is_copied(line)] == []
    assert command in text


def is_copied(line):
    """Tell whether a line is typed as it is: a word or a command on a line of its own."""
    bare = line.strip()
    if line.startswith("      ") and not bare.startswith(("|", "^")):  # pasted into fleet.yaml
        return True
    return bool(re.match(r"(fix: )?`?(subagent-fleet|uv|npm|printf|docker|-e|-p|litellm|eval|\.) ?", bare)
                or re.fullmatch(r"\S+", bare) or re.match(r"Environment=", bare))


JSON_ROWS = {"validate": wrong, "generate": write, "discover": write, "status": served_now,
             "recommend": write, "warmup": write, "logs": served, "doctor": edited}


@pytest.mark.skipif(os.name == "nt", reason="paths")
@pytest.mark.parametrize("name", JSON_ROWS)
def test_help_shows_the_json_that_a_command_prints(name, machines, tmp_path, monkeypatch):
    words = f"{name} --json"
    printed = look_at((JSON_ROWS[name], words), 80, machines, colour=False, place=tmp_path,
                      monkeypatch=monkeypatch, is_terminal=False)
    compare_example(words, printed)


def test_rows_show_every_command_that_speaks_to_people():
    shown = {words.split()[0] for _, words in ROWS.values()}
    for_programs = {"env", "schema", "completion", "help"}
    known = {row.name for row in sf.COMMANDS}
    assert {"validate", "status", "logs"} <= shown and for_programs <= known
