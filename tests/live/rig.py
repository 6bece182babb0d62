"""The parts of the live rig: real Ollama servers, wire recorders, LiteLLM, Claude Code.

Everything listens on loopback, has a fresh HOME, a made-up key, and is killed with its whole
process group when the session ends, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import http.client
import http.server
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import install
import subagent_fleet
from tools import free_port

_RUNNING = []
CONFINED = "sandbox-exec" if sys.platform == "darwin" else "bwrap"  # as receipts name it


def wait_until(condition, *, seconds=30.0, what="condition"):
    """Poll until the condition gives something true; say what was waited for when it never does."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


def get_json(url, *, body=None, headers=None, timeout=60):
    """Speak plain HTTP to loopback, past any proxy; (status, parsed body or text), status 0: none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = None if body is None else json.dumps(body).encode("utf-8")
    request = urllib.request.Request(url, text, {"Content-Type": "application/json",
                                                 **(headers or {})})
    try:
        with opener.open(request, timeout=timeout) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        return 0, f"no answer: {error!r}"
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode("utf-8", "replace")


def _die_with_parent():
    """Ask Linux to end this child when its parent dies, even by a kill nobody can catch."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Process:
    """One program in a process group of its own, with its output and its talk in two files."""

    def __init__(self, argv, *, log, env, cwd=None):
        self.log = pathlib.Path(log)
        self.talk = self.log.with_suffix(".err")
        with self.log.open("ab") as said, self.talk.open("ab") as talked:
            self.child = subprocess.Popen(
                [str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=said,
                stderr=talked, env=env, cwd=cwd, start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        _RUNNING.append(self)

    def text(self):
        return "".join(path.read_text(encoding="utf-8", errors="replace")
                       for path in (self.log, self.talk))

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def stop(self, number=signal.SIGTERM, seconds=10):
        """End the whole group; give the exit status of its leader."""
        if self.child.poll() is None:
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(seconds)
        self.send(signal.SIGKILL)
        status = self.child.wait()
        if self in _RUNNING:
            _RUNNING.remove(self)
        return status

    def kill(self):
        """End it as a power cut would."""
        return self.stop(signal.SIGKILL)


@atexit.register
def stop_everything():
    for process in list(_RUNNING):
        process.kill()


# -- the trap: nothing may leave loopback -------------------------------------------------------


class Trap:
    """A proxy that lets nothing through and remembers who wanted out."""

    def __init__(self):
        self.wanted = []
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                caller, _ = self.door.accept()
            except OSError:
                return
            with caller:
                caller.settimeout(2)
                try:
                    self.wanted.append(caller.recv(4096).split(b"\r\n")[0].decode("latin-1"))
                    caller.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                except OSError:
                    self.wanted.append("(silent)")

    def environment(self):
        here = f"http://127.0.0.1:{self.port}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        return {**dict.fromkeys(names, here),
                "no_proxy": "127.0.0.1,localhost,::1", "NO_PROXY": "127.0.0.1,localhost,::1"}


# -- the recorder ------------------------------------------------------------------------------


@dataclass
class Exchange:
    """One request as it went over the wire, and what came back."""

    at: float
    method: str = ""
    path: str = ""
    headers: dict = field(default_factory=dict)
    raw: bytes = b""
    answer: bytearray = field(default_factory=bytearray)
    first_byte: float = 0.0
    last_byte: float = 0.0
    done_at: float = 0.0  # when a node's last line was passed on; the end of the body follows it
    closed_by: str = ""

    @property
    def body(self):
        return json.loads(self.raw) if self.raw else None

    @property
    def status(self):
        return int(self.answer.split(b" ", 2)[1]) if self.answer.startswith(b"HTTP/") else 0

    @property
    def content(self):
        """The answer's body with the transfer's chunks joined."""
        head, _, rest = bytes(self.answer).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size.split(b";")[0] or b"0", 16)
            if not length:
                break
            parts.append(rest[:length])
            rest = rest[length + 2:]
        return b"".join(parts)


class Recorder:
    """Passes bytes between a client and one server untouched, and reads along.

    Plain TCP, so that a hang-up on either side reaches the other at once. With `pretend` the
    port in the Host header becomes the server's own: a gateway refuses strangers' hosts. A
    gateway's proof names the port it was reached at, so that nobody can stand before it unseen:
    with `key` the recorder gives that proof itself.
    """

    key = ""

    def __init__(self, upstream_port, *, pretend=False):
        self.upstream_port = upstream_port
        self.pretend = pretend
        self.exchanges = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.open()

    def open(self):
        """Listen, again on the same port."""
        self.door = socket.create_server(("127.0.0.1", self.port), backlog=128)
        threading.Thread(target=self._accept, args=(self.door,), daemon=True).start()

    def close(self):
        """Refuse connections from now on, as a port does when its server is gone."""
        with contextlib.suppress(OSError):  # of a node that lost power before, it is closed
            self.door.shutdown(socket.SHUT_RDWR)  # wakes the accept, which holds the socket open
        self.door.close()

    def _accept(self, door):
        while True:
            try:
                client, _ = door.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream_port), timeout=5)
        except OSError:
            # the server went away this instant: reset the connection, no byte comes back
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            return
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, server:
            nonce = re.match(rb"GET /prove/([0-9a-f]+) ", client.recv(256, socket.MSG_PEEK))
            if self.key and nonce:
                self._prove(client, nonce[1].decode())
            else:
                _Conversation(self, client, server).run()

    def _prove(self, client, nonce):
        """Answer as the gateway would that listened at this port."""
        proof = subagent_fleet.prove_key(self.key, nonce, "127.0.0.1", self.port)
        body = json.dumps({"proof": proof}).encode()
        client.recv(65536)
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))

    def mark(self):
        """Remember this place; `since` gives what came after."""
        return len(self.exchanges)

    def since(self, mark, path=""):
        return [each for each in self.exchanges[mark:] if each.path.split("?")[0].endswith(path)]


class _Conversation:
    """One TCP connection through a recorder: requests one after another, each with its answer."""

    def __init__(self, recorder, client, server):
        self.recorder, self.client, self.server = recorder, client, server
        self.pending = b""
        self.current = None
        self.missing = 0  # bytes of the current request's body still to come; -1: chunked

    def run(self):
        closed_by = ""
        while not closed_by:
            ready, _, _ = select.select([self.client, self.server], [], [])
            try:
                if self.server in ready:
                    closed_by = self._move(self.server, self.client, self._answered) or closed_by
                if self.client in ready and not closed_by:
                    closed_by = self._move(self.client, self.server, self._asked)
            except OSError:
                closed_by = "client" if self.client in ready else "node"
        if self.current and not self.current.closed_by:
            self.current.closed_by = closed_by

    def _move(self, source, target, note):
        try:
            block = source.recv(65536)
        except OSError:
            block = b""
        if not block:
            return "client" if source is self.client else "node"
        target.sendall(note(block))
        return ""

    def _answered(self, block):
        now = time.monotonic()
        if self.current:
            self.current.first_byte = self.current.first_byte or now
            self.current.last_byte = now
            self.current.answer += block
            if b'"done":true' in self.current.answer[-len(block) - 16:]:
                self.current.done_at = now
        return block

    def _asked(self, block):
        """Read along; give the bytes to pass on: all at once, where no header is swapped."""
        passed = self._read_along(block)
        return passed if self.recorder.pretend else block

    def _read_along(self, block):
        passed = b""
        while block:
            if self.missing:
                block, passed = self._take_body(block, passed)
                continue
            self.pending += block
            head, found, block = self.pending.partition(b"\r\n\r\n")
            if not found:
                return passed
            self.pending = b""
            passed += self._take_head(head) + b"\r\n\r\n"
        return passed

    def _take_body(self, block, passed):
        if self.missing < 0:  # chunked: keep it raw, up to the last chunk
            self.current.raw += block
            if self.current.raw.endswith(b"0\r\n\r\n"):
                self.missing = 0
                joined = Exchange(0.0, answer=bytearray(
                    b"HTTP/1.1 200\r\ntransfer-encoding: chunked\r\n\r\n" + self.current.raw))
                self.current.raw = joined.content
            return b"", passed + block
        taken, rest = block[:self.missing], block[self.missing:]
        self.missing -= len(taken)
        self.current.raw += taken
        return rest, passed + taken

    def _take_head(self, head):
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.current = Exchange(time.monotonic(), method, path, headers)
        chunked = "chunked" in headers.get("transfer-encoding", "")
        self.missing = -1 if chunked else int(headers.get("content-length") or 0)
        self.recorder.exchanges.append(self.current)
        if self.recorder.pretend:
            ours, theirs = str(self.recorder.port), str(self.recorder.upstream_port)
            return head.replace(f":{ours}".encode(), f":{theirs}".encode(), 1)
        return head


# -- Ollama ------------------------------------------------------------------------------------


class OllamaNode:
    """A real server with its real engine, scripted models, and a recorder in front."""

    def __init__(self, name, folder, models, trap, **more):
        self.more = more
        self.name, self.folder = name, pathlib.Path(folder)
        self.models = dict(models)  # name at Ollama -> scripted model file
        self.port = free_port()
        self.log = self.folder / "ollama.log"
        self.trap = trap
        self.process = None
        self.folder.mkdir(parents=True)
        self.recorder = Recorder(self.port)
        self.start()
        for model, script in self.models.items():
            self.create(model, script)

    @property
    def url(self):
        """Where clients go: the recorder."""
        return self.recorder.url

    @property
    def direct(self):
        """The server itself, for the test's own questions: they are not recorded."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self):
        return {"PATH": os.defpath, "HOME": str(self.folder), "OLLAMA_HOST": f"127.0.0.1:{self.port}",
                "OLLAMA_MODELS": str(self.folder / "models"),
                "OLLAMA_NO_CLOUD": "1",  # else it asks ollama.com for recommendations
                "OLLAMA_MAX_LOADED_MODELS": "8", **self.more,
                **self.trap.environment()}

    def start(self):
        self.process = Process([install.OLLAMA_BIN, "serve"], log=self.log,
                               env=self.environment(), cwd=self.folder)
        wait_until(lambda: get_json(self.direct + "/api/version")[0] == 200,
                   what=f"Ollama of node {self.name}; see {self.log}")

    def stop(self):
        self.recorder.close()
        return self.process.stop()

    def kill(self):
        """Lose power: the port refuses, running answers break off."""
        self.recorder.close()
        return self.process.kill()

    def ensure(self):
        """Start it again after a test has killed it."""
        if self.process.child.poll() is not None:
            self.start()
            self.recorder.open()

    def create(self, model, script):
        recipe = self.folder / "Modelfile"
        recipe.write_text(f"FROM {install.MODELS / script}.gguf\n", encoding="utf-8")
        subprocess.run([str(install.OLLAMA_BIN), "create", model, "-f", str(recipe)], check=True,
                       env=self.environment(), stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=60)

    def loads(self):
        """Count the engine starts so far (two lines each): a reload moves this number."""
        return self.process.text().count("llama-server started") // 2

    def loaded(self):
        """Ask what is in memory: {model: context}."""
        models = get_json(self.direct + "/api/ps")[1]["models"]
        return {model["name"]: model["context_length"] for model in models}

    def unload(self):
        """Empty the memory, so that the next test starts cold."""
        for model in self.loaded():
            get_json(self.direct + "/api/generate", body={"model": model, "keep_alive": 0})
        wait_until(lambda: not self.loaded(), what=f"{self.name} to unload")

    def chats(self, mark=0):
        """The chat requests that reached this node; a load has no messages."""
        return [each for each in self.recorder.since(mark, "/api/chat")
                if each.body and each.body.get("messages")]


# -- the project of a user ----------------------------------------------------------------------


class Project:
    """A folder in which a user types commands; everything typed and said is kept."""

    def __init__(self, folder, script, trap, *, claude="latest"):
        self.folder, self.script, self.trap = pathlib.Path(folder), script, trap
        self.home = self.folder.with_name(self.folder.name + "-home")
        self.bin = self.folder.with_name(self.folder.name + "-bin")
        self.spoken = []
        self.swaps = {}
        for place in (self.folder, self.home, self.bin):
            place.mkdir(parents=True)
        (self.bin / "subagent-fleet").symlink_to(script)  # messages name it as it is typed
        self.use_claude(claude)

    def use_claude(self, which):
        """Put one Claude Code on the PATH, under the name a user has it."""
        link = self.bin / "claude"
        if link.is_symlink():
            link.unlink()
        link.symlink_to(install.CLAUDES[which])

    def environment(self, **more):
        path = f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        # A proxy for everything and a cloud: what the product sets must beat both.
        return bare_environment(self.home, self.trap, PATH=path, PYTHONDONTWRITEBYTECODE="1",
                                **{"CLAUDE_CODE_USE_BEDROCK": "1", "NO_PROXY": "", "no_proxy": "",
                                   **more})

    def argv(self, *words):
        return [sys.executable, "-I", "-S", str(self.bin / "subagent-fleet"), *map(str, words)]

    def run(self, *words, status=0, quiet=False, **more):
        """Type one command; fail with all it said when its exit status is another one."""
        done = subprocess.run(self.argv(*words), cwd=self.folder, stdin=subprocess.DEVNULL,
                              env=self.environment(**more), capture_output=True, timeout=120)
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        if not quiet:
            self.note(f"$ subagent-fleet {' '.join(map(str, words))}", said.rstrip("\n"))
        assert done.returncode == status, f"exit {done.returncode}, wanted {status}:\n{said}"
        return done.stdout.decode("utf-8")

    def json(self, *words, status=0):
        return json.loads(self.run(*words, "--json", status=status, quiet=True))

    def key(self):
        """Read the gateway's key as a program would: it is in the environment `env` prints."""
        script = self.run("env", quiet=True) + 'printf %s "$ANTHROPIC_AUTH_TOKEN"'
        return subprocess.run(["sh", "-c", script], env={}, check=True, text=True,
                              stdout=subprocess.PIPE).stdout

    def note(self, *lines):
        self.spoken += [*lines, ""]

    def transcript(self):
        """Give all that was typed and said, without what is of this machine or this minute."""
        text = "\n".join(self.spoken).rstrip("\n") + "\n"
        for found, shown in self.swaps.items():
            text = text.replace(str(found), shown)
        text = text.replace(str(self.folder), "~/project").replace(str(self.bin), "~/bin")
        # Models are shown as they end, on machines that are warmed at once.
        text = re.sub(r"(?m)(?<=^Warming models:\n)(?:  .*\n)+",
                      lambda match: "".join(sorted(match[0].splitlines(keepends=True))), text)
        return re.sub(r"\b\d+(\.\d+)? (s|ms)\b", r"N \2", text)

    def read(self, path):
        return (self.folder / path).read_text(encoding="utf-8")

    def write(self, path, text):
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")

    def edit(self, path, old, new):
        """Change a file as a user would in an editor; the text must be there."""
        text = self.read(path)
        assert old in text, f"{path} has no {old!r}:\n{text}"
        self.write(path, text.replace(old, new))


# -- gateways ----------------------------------------------------------------------------------


class Gateway:
    """A gateway process: where clients reach it, and with what key."""

    def __init__(self, url, process, key):
        self.url, self.process, self.key = url, process, key

    def post(self, body, *, key=None, path="/v1/messages", timeout=60):
        headers = {"anthropic-version": "2023-06-01"}
        key = self.key if key is None else key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return get_json(self.url + path, body=body, headers=headers, timeout=timeout)

    def say(self, alias, text="hi", *, key=None, **more):
        """Send one small message; give (status, body)."""
        body = {"model": alias, "max_tokens": 64,
                "messages": [{"role": "user", "content": text}], **more}
        return self.post(body, key=key)

    def stop(self):
        return self.process.stop()


def serve_process(project, port, *words):
    """Start the embedded gateway; -v, so that its log tells what it did."""
    tree = subagent_fleet.parse_yaml((project.folder / "fleet.yaml").read_text(encoding="utf-8"))
    tree["project"].setdefault("gateway", {})["port"] = port
    (project.folder / "served.yaml").write_text(subagent_fleet.dump_yaml(tree), encoding="utf-8")
    return Process(project.argv("serve", "--config", "served.yaml", "-v", *words),
                   log=project.folder / "serve.log", env=project.environment(),
                   cwd=project.folder)


def litellm_process(project, port, environment):
    """Start LiteLLM with the generated file and the generated environment, both as they are."""
    line = (f'. ./.env.subagent-fleet; exec "{install.LITELLM_BIN}" --config litellm_config.yaml '
            f"--host 127.0.0.1 --port {port}")
    return Process(["sh", "-c", line], log=project / "litellm.log", env=environment, cwd=project)


def wait_for_gateway(process, port):
    """Wait until the gateway is alive; its own log is the message when it is not."""
    def alive():
        if process.child.poll() is not None:
            raise AssertionError(f"gateway ended: {process.text()[-2000:]}")
        return get_json(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)[0] == 200
    wait_until(alive, seconds=90, what=f"the gateway; see {process.log}")


# -- Claude Code -------------------------------------------------------------------------------


@dataclass
class Session:
    """What one headless Claude Code session said, parsed."""

    events: list
    returncode: int
    stderr: str

    def of(self, kind, subtype=None):
        return [event for event in self.events if event.get("type") == kind
                and subtype in (None, event.get("subtype"))]

    @property
    def init(self):
        found = self.of("system", "init")
        assert found, f"no init event; rc {self.returncode}; {self.stderr[-1500:]}"
        return found[0]

    @property
    def result(self):
        found = self.of("result")
        assert found, f"no result event; rc {self.returncode}; {self.stderr[-1500:]}"
        return found[-1]

    @property
    def dispatched(self):
        """Give agent id (as on the wire) -> subagent type."""
        started = {event["task_id"]: event["subagent_type"]
                   for event in self.of("system", "task_started") if "subagent_type" in event}
        return started or self._dispatched_by_results()

    def _dispatched_by_results(self):
        """Read the same from the tools' results, where no task_started came (2.1.197)."""
        kinds = {block["id"]: block["input"]["subagent_type"] for event in self.of("assistant")
                 for block in event["message"]["content"] if block["type"] == "tool_use"
                 and block["name"] in ("Agent", "Task")}
        return {event["tool_use_result"]["agentId"]: kinds[block["tool_use_id"]]
                for event in self.of("user") for block in event["message"]["content"]
                if block["type"] == "tool_result" and block["tool_use_id"] in kinds}


def hear(session, turns, chats, routes):
    """Assert that each agent's requests came on its alias and went to its node, and nowhere else.

    turns: what the gateway was asked; chats: node -> what it was asked; routes: agent -> route.
    Gives a line for each speaker.
    """
    assert {turn.status for turn in turns} == {200}
    started, by_agent = session.dispatched, {}
    for turn in turns:
        by_agent.setdefault(turn.headers.get("x-claude-code-agent-id"), []).append(turn)
    assert set(by_agent) == {None, *started}, "a dispatched agent said nothing"
    expected, lines = {name: [] for name in chats}, []
    for agent_id, mine in by_agent.items():
        agent = started.get(agent_id)
        route = routes[agent] if agent else next(
            each for each in routes.values() if each["alias"] == session.init["model"])
        assert {turn.body["model"] for turn in mine} == {route["alias"]}
        assert len(mine) >= 2, f"{agent or 'the main session'} used no tool"
        model = route["model"]
        expected[route["node"]] += [model.split(":")[0]] * len(mine)
        lines.append(f"  {agent or 'main session'}: {route['alias']} -> {route['node']} -> {model}")
    for name, asked in chats.items():
        seen = [chat.body["model"].split(":")[0] for chat in asked]
        assert sorted(seen) == sorted(expected[name]), f"on {name}"
    return sorted(lines)


class Capture:
    """A server that says one word, as Anthropic or as a node, and keeps what it was asked."""

    def __init__(self):
        self.requests = []
        capture = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.split("?")[0]
                capture.requests.append((path, dict(self.headers), body))
                if path.endswith("/api/chat"):
                    kind, answer = "application/json", _one_chat(body["model"])
                else:
                    kind, answer = "text/event-stream", _one_word(body["model"])
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def _one_chat(model):
    """Write what a node answers on /api/chat without a stream."""
    return json.dumps({"model": model, "created_at": "2026-01-01T00:00:00Z", "done": True,
                       "message": {"role": "assistant", "content": "PONG"}, "done_reason": "stop",
                       "prompt_eval_count": 1, "eval_count": 1}).encode()


def _one_word(model):
    """Write the shortest stream that Claude Code takes for an answer."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": model,
               "content": [], "stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
    events = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "text_delta", "text": "PONG"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"},
         "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                   for event in events).encode()


CLAUDE_FLAGS = ("--output-format", "stream-json", "--verbose",
                "--allowedTools", "Bash,Read,Agent,Task")


def bare_environment(home, trap, **more):
    """An environment with nothing of this machine's user in it."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8",
            "TERM": "xterm", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
            **trap.environment(), **more}


def run_session(argv, *, cwd, env, timeout=120):
    """Run a command that ends in a headless Claude Code and parse its events."""
    process = Process(argv, log=pathlib.Path(cwd) / f"claude-{time.monotonic_ns()}.jsonl",
                      env=env, cwd=cwd)
    try:
        status = process.child.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        process.kill()
    events, talk = [], []
    for line in process.log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        else:
            talk.append(line)
    assert status is not None, f"Claude Code took over {timeout} s: {talk[-20:]}"
    talk.append(process.talk.read_text(encoding="utf-8", errors="replace"))
    return Session(events, status, "\n".join(talk))
