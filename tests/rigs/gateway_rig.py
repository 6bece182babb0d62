"""A gateway in this process, nodes whose every byte is scripted, and clients for both."""
import contextlib
import json
import random
import socket
import threading
import time
from functools import cache

import pytest

import subagent_fleet as sf
from subagent_fleet import replace

KEY = "sk-0123456789abcdef0123456789abcdef"
PROMPT, SPOKEN = "the secret prompt", "the secret answer"


def fleet_of(*models, nodes=("a", "b")):
    """A fleet of (name, node, alias, {more}) on nodes that are addresses or only names."""
    nodes = nodes if isinstance(nodes, dict) else dict.fromkeys(nodes, "http://127.0.0.1:1")
    text = {"project": {"name": "test", "gateway": {"provider": "builtin"}},
            "nodes": {name: {"endpoint": endpoint} for name, endpoint in nodes.items()},
            "models": {name: {"node": node, "ollama_model": "tiny", "litellm_alias": alias,
                              "context": 32768, **more}
                       for name, node, alias, more in models},
            "agents": {"planner": {"model": models[0][0], "description": "d"}}}
    fleet, findings = sf.check_fleet(sf.Document(json.dumps(text), "fleet.json"))
    assert fleet, findings
    return fleet


# -- a scheduler with a clock that stands still --

class Desk:
    """A scheduler and its clock; tickets by conversation."""

    def __init__(self, *models, **more):
        self.now = 100.0
        self.scheduler = sf.Scheduler(fleet_of(*models, **more), lambda: self.now)

    def enter(self, alias="x", conversation=("s", "")):
        links = 1, hash((alias, conversation))
        return self.scheduler.enter(alias, sf.Conversation(*conversation),
                                    prompt=sf.Beginnings(links, (1, 1000), 1000))

    def ask(self, *, but=()):
        """Ask each node that has rested whether it answers, as the gateway does; return which."""
        due = self.scheduler.look()
        for name in due:
            self.scheduler.end_rest(name, "refused" if name in but else "")
        return due

    def serve(self, alias="x", conversation=("s", "")):
        """Let one request come, be answered and go; return where."""
        ticket = self.enter(alias, conversation)
        name = ticket.model.name
        self.scheduler.succeed(ticket)
        self.scheduler.leave(ticket)
        return name


def running(scheduler):
    """How many requests each model's node is asked, by model."""
    return {name: place["running"] for name, place in scheduler.show()[0].items()}


def rests(scheduler):
    """The models that rest, and for how many seconds."""
    return {name: place["rests_seconds"] for name, place in scheduler.show()[0].items()
            if place["rests_seconds"]}


@cache
def fleet_to_shake(slots, third):
    return fleet_of(("m1", "n", "a", {"max_parallel": slots}), ("m3", "k", third, {}),
                    ("m2", "n", "b", {"ollama_model": "o", "max_parallel": 2}), nodes=("n", "k"))


class Shaken:
    """A scheduler that random things happen to; `told` says which."""

    def __init__(self, seed):
        self.dice, self.now = random.Random(seed), 100.0
        fleet = fleet_to_shake(self.dice.choice([1, 2, 4]), self.dice.choice("ac"))
        self.scheduler = sf.Scheduler(fleet, lambda: self.now)
        self.tickets, self.told = [], []
        self.prompts = {}  # that each asked last
        for _ in range(self.dice.randrange(4, 26)):
            self.act()

    def act(self):
        dice, held = self.dice, [ticket for ticket in self.tickets if ticket.model]
        act = dice.random()
        if act < 0.35 or not self.tickets:
            alias, who = dice.choice(list(self.scheduler.candidates)), str(dice.randrange(4))
            prompt = self.say(who)
            self.tickets.append(self.scheduler.enter(alias, sf.Conversation(who), prompt=prompt))
            self.told.append(f"enter {alias} {who} {prompt.links}")
        elif act < 0.42 and held:
            end = sf.End(dice.choice(["tool_use", "tool_use", "end_turn"]),
                         input_tokens=dice.randrange(40_000), output_tokens=300,
                         cache_read=dice.choice([0, 0, 20_000]))
            ticket = dice.choice(held)
            self.told.append(f"learn {ticket.number} {end.reason}")
            self.scheduler.learn(ticket, end, dice.choice([0.1, 60]))
        elif act < 0.5:
            self.now += dice.choice([0.5, 3, 70])
            self.ask(dice.choice(["", "n", "k", "nk"]))
        elif act < 0.65 and held:
            self.scheduler.succeed(dice.choice(held))
        elif act < 0.8 and held:
            ticket, is_missing = dice.choice(held), dice.random() < 0.4
            self.told.append(f"fail {ticket.number} {ticket.model.name} missing={is_missing}")
            self.scheduler.fail(ticket, "refused", is_missing=is_missing)
        else:
            ticket = self.tickets.pop(dice.randrange(len(self.tickets)))
            self.told.append(f"leave {ticket.number}")
            self.scheduler.leave(ticket)

    def say(self, who):
        """A prompt that has grown by a turn, or is the same, or another one."""
        links = self.prompts.get(who, (1, hash(who)))
        if self.dice.random() < 0.2:
            links = 1, self.dice.randrange(9)
        elif self.dice.random() < 0.8:
            links = *links, self.dice.randrange(9)
        self.prompts[who] = links
        return sf.Beginnings(links, tuple(range(1, len(links) + 1)), 9_000 * len(links))

    def ask(self, dead=""):
        due = self.scheduler.look()
        self.told.append(f"ask {due}, dead: {dead}")
        for name in due:
            self.scheduler.end_rest(name, "refused" if name in dead else "")

    def heal(self):
        """Let the nodes be healthy, and serve who waits; return whom nobody can serve."""
        self.now += 1000
        waiting = self.tickets
        for _ in range(len(self.tickets) + 1):
            self.ask()
            self.now += sf.HOLD_SECONDS
            self.ask()
            for ticket in [ticket for ticket in waiting if ticket.model]:
                self.scheduler.succeed(ticket)
                self.scheduler.leave(ticket)
                waiting.remove(ticket)
        dead = [f"request {ticket.number}" for ticket in waiting
                if any(ticket.candidates) and not ticket.silent]
        for ticket in waiting:
            self.scheduler.leave(ticket)
        self.now += sf.HOLD_SECONDS + 10
        dead += [f"a seat at {name}" for name, place in self.scheduler.show()[0].items()
                 if place["warm"]["held"]]

        for alias in self.scheduler.candidates:
            ticket = self.scheduler.enter(alias, sf.Conversation())
            self.ask()
            dead += [] if ticket.model else [alias]
            self.scheduler.leave(ticket)
        return dead


# -- nodes whose every byte is scripted --

class Node:
    """A node that plays a function on each connection, after it has read the request.

    `here` holds the target and the request of the connection that the asking thread plays on. Its
    version page it has whatever happens, unless `page` plays that, too.
    """

    keeps = False  # its connections, where a play leaves them open

    def __init__(self, play, *, plays_all=False):
        self.play, self.requests, self.gone = play, [], threading.Event()
        self.page = play if plays_all else None
        self.connections = 0
        self.here = threading.local()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=300)
        self.port = self.listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        self.connections += 1
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = connection.makefile("rb")
            while self._answer(connection, stream) and self.keeps:
                pass

    def _answer(self, connection, stream):
        """Play for one request; say whether another may come."""
        size = 0
        first = stream.readline()
        if b" " not in first:  # the end, or a byte ahead of it
            return False
        self.here.target = first.split(b" ")[1].decode()
        for line in iter(stream.readline, b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        self.here.request = json.loads(stream.read(size) or b"null")
        if size or self.page is self.play:
            self.requests.append(self.here.request)
            self.play(self, connection)
        else:
            (self.page or sends(PAGE))(self, connection)
        return size and not connection._closed

    def close(self):
        with contextlib.suppress(OSError):  # closing alone does not wake who accepts
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


PAGE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 21\r\n\r\n" \
       b'{"version":"0.32.15"}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"
DONE = b'{"message":{"content":""},"done":true,"done_reason":"stop","prompt_eval_count":12,' \
       b'"eval_count":3}\n'


def line(words):
    return json.dumps({"message": {"role": "assistant", "content": words}, "done": False}
                      ).encode() + b"\n"


def chunked(*pieces, last=b"0\r\n\r\n"):
    """An answer in chunks, after which the connection may stay."""
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + last


def says(*pieces, pause=0.0):
    def play(node, connection):
        connection.sendall(HEAD)
        for piece in pieces:
            connection.sendall(line(piece))
            time.sleep(pause)
        connection.sendall(DONE)
    return play


def sends(sent):
    return lambda node, connection: connection.sendall(sent)


def answers(status, error):
    body = json.dumps({"error": error}).encode()
    return sends(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


def hangs(node, connection):
    """Say nothing; note when the gateway lets go."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    node.gone.set()


def says_and_hangs(node, connection):
    connection.sendall(HEAD + line("begun "))
    hangs(node, connection)


# -- a gateway in this process, and clients for it --

class Rig:
    """A served fleet; `ask` posts a Messages request, `raw` sends bytes."""

    def __init__(self, fleet, tmp_path):
        self.world = sf.World()
        self.said = []
        self.world.err = self.said.append
        self.receipts_path = tmp_path / "requests.jsonl"
        self.server = sf.Server(fleet, KEY, self.world, receipts=str(self.receipts_path))
        self.server.listen(sf.log_requests(self.world, fleet))
        listener = self.world.listen("127.0.0.1", 0)
        self.port = listener.port
        self.thread = threading.Thread(target=self.server.run, args=(listener,), daemon=True)
        self.thread.start()

    def close(self):
        self.server.stop("test")
        self.server.stop("test")
        self.thread.join(15)
        assert not self.thread.is_alive()

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def head(self, method="POST", target="/v1/messages", **headers):
        fields = {"Host": f"127.0.0.1:{self.port}", "x-api-key": KEY,
                  **{name.replace("_", "-"): value for name, value in headers.items()}}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items()
                        if value is not None)
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def post(self, request, **headers):
        """The bytes of a Messages request."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        return self.head(**{"Content_Length": len(body), **headers}) + body

    def raw(self, sent, *, half_close=False):
        """Send bytes on a new connection, return (status, headers, body)."""
        with self.connect() as connection:
            connection.sendall(sent)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return read_answer(connection.makefile("rb"))

    def ask(self, alias="x", *, headers=None, **more):
        return self.raw(self.post(request_of(alias, **more), **(headers or {})))

    def get(self, target, **headers):
        return self.raw(self.head("GET", target, **headers))

    def receipts(self, count=1):
        """The receipts, once so many are there."""
        wait_until(lambda: self.receipts_path.exists()
                   and self.receipts_path.read_bytes().count(b"\n") >= count)
        found = [json.loads(text) for text in self.receipts_path.read_text().splitlines()]
        return sorted(found, key=lambda receipt: receipt["time"])  # filed once the answer has gone


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def request_of(alias="x", **more):
    return {"model": alias, "max_tokens": 100, "messages": [{"role": "user", "content": PROMPT}],
            **more}


def read_answer(stream):
    """(status, headers, body) of one answer; status 0 when the connection only closed."""
    first = stream.readline()
    if not first:
        return 0, {}, b""
    headers = {}
    for text in iter(stream.readline, b"\r\n"):
        assert text, "the answer ends in its headers"
        name, _, value = text.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        size = int(stream.readline(), 16)
        while size:
            body += stream.read(size)
            assert stream.readline() == b"\r\n"
            size = int(stream.readline(), 16)
        assert stream.readline() == b"\r\n"
    else:
        body = stream.read(int(headers["content-length"]))
    return int(first.split()[1]), headers, body


def events_of(body):
    found = []
    for block in body.decode().strip().split("\n\n"):
        name, text = block.split("\n")
        found.append(json.loads(text[len("data: "):]))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(body):
    return "".join(event["delta"].get("text", "") for event in events_of(body)
                   if event["type"] == "content_block_delta")


def error_of(answer):
    status, _, body = answer
    told = json.loads(body)
    assert told["type"] == "error" and set(told["error"]) == {"type", "message"}
    return status, told["error"]["type"], told["error"]["message"]


@pytest.fixture
def rig(tmp_path):
    """Start nodes that play the given functions and a gateway for them; model per node."""
    made = []

    def start(*plays, timeout=20, **more):
        nodes = [Node(play) for play in plays]
        models = [(f"m{i}", f"n{i}", "x", more) for i in range(len(nodes))]
        fleet = fleet_of(*models, nodes={f"n{i}": node.endpoint for i, node in enumerate(nodes)})
        served = Rig(replace(fleet, models={name: replace(model, timeout=timeout) for name, model
                                           in fleet.models.items()}), tmp_path)
        served.nodes = nodes
        made.append(served)
        return served
    yield start
    for served in made:
        served.close()
        for node in served.nodes:
            node.close()
