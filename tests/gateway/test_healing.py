"""The gateway after something went wrong: it serves again, nobody waits for what is slow."""
import contextlib
import json
import random
import re
import socket
import ssl
import threading
import time

import pytest

import hostile_nodes
import subagent_fleet as sf
from gateway_rig import (
    DONE,
    HEAD,
    PROMPT,
    Node,
    Rig,
    answers,
    chunked,
    error_of,
    fleet_of,
    line,
    read_answer,
    request_of,
    says,
    sends,
    wait_until,
)
from tools import not_held_up


@pytest.fixture
def gateway(tmp_path):
    """Start a gateway of models (name, node, alias, {more}) on nodes {name: play}."""
    with contextlib.ExitStack() as ending:
        def start(models, plays, *, host="127.0.0.1"):
            nodes = {name: Node(play) for name, play in plays.items()}
            endpoints = {name: f"http://{host}:{node.port}" for name, node in nodes.items()}
            served = Rig(fleet_of(*models, nodes=endpoints), tmp_path)
            for node in nodes.values():
                ending.callback(node.close)
            ending.callback(served.close)
            served.nodes = nodes
            return served
        yield start


def together(served, count, **more):
    """Ask so often at once; return the statuses."""
    statuses = []
    clients = [threading.Thread(target=lambda: statuses.append(served.ask(**more)[0]))
               for _ in range(count)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(30)
    return statuses


# -- rests --

def test_a_missing_model_asked_after_a_failure_leaves_the_others_served(gateway):
    failing = [answers(500, "boom")]

    def play(node, connection):
        if node.here.request["model"] == "gone":
            answers(404, "model 'gone' not found")(node, connection)
        else:
            (failing.pop() if failing else says("PONG"))(node, connection)
    served = gateway([("m", "n", "x", {}), ("g", "n", "y", {"ollama_model": "gone"})], {"n": play})
    assert [served.ask(alias)[0] for alias in "xyy"] == [500, 404, 404]
    with not_held_up(10):
        assert served.ask()[0] == 200


def test_after_a_failure_all_slots_are_used_at_once(gateway, limits):
    """One whose prompt takes long to be read keeps nobody else from the machine."""
    limits(rest=0.05)
    failing, all_there = [answers(500, "boom")], threading.Barrier(4)

    def play(node, connection):
        if failing:
            failing.pop()(node, connection)
        else:
            all_there.wait(8)
            says("PONG")(node, connection)
    served = gateway([("m", "n", "x", {"max_parallel": 4})], {"n": play})
    assert served.ask()[0] == 500
    time.sleep(0.2)
    assert together(served, 4) == [200] * 4


def test_a_machine_that_comes_back_is_used_without_a_request_that_tries_it(gateway, limits):
    limits(rest=0.2)
    served = gateway([("m", "n", "x", {}), ("o", "k", "x", {"max_parallel": 4})],
                     {"n": sends(b""), "k": says("PONG")})
    served.nodes["n"].page = sends(b"")
    served.ask(), served.ask()
    models = json.loads(served.get("/fleet")[2])["models"]
    rests = {model["route"]: model["rests_seconds"] for model in models}
    assert rests["m"] > 0 and rests["o"] == 0
    served.nodes["n"].page = None
    served.nodes["n"].play = says("PONG")
    asked = len(served.nodes["n"].requests)
    wait_until(lambda: not any(model["rests_seconds"] for model in json.loads(
        served.get("/fleet")[2])["models"]))
    assert len(served.nodes["n"].requests) == asked


def test_when_every_machine_is_gone_the_client_is_told_at_once_by_each(gateway):
    served = gateway([("m", "n", "x", {}), ("o", "k", "x", {})], {"n": sends(b""), "k": sends(b"")})
    for node in served.nodes.values():
        node.page = sends(b"")
    assert served.ask()[0] == 529
    with not_held_up(10):
        answer = served.ask()
    status, kind, words = error_of(answer)
    assert (status, kind) == (529, "overloaded_error") and int(answer[1]["retry-after"]) >= 1
    assert words == "node n: bad answer, node k: bad answer; no other is left"
    last = served.receipts(2)[1]
    assert sorted(last["failures"], key=str) == [{"node": "k", "why": "bad answer"},
                                              {"node": "n", "why": "bad answer"}]


class Unsteady:
    """Plays of a node that fails in every way until it is `healthy`."""

    def __init__(self, seed):
        self.dice, self.healthy = random.Random(seed), False

    def __call__(self, node, connection):
        act = 1.0 if self.healthy else self.dice.random()
        if act < 0.15:
            answers(500, "boom")(node, connection)
        elif act < 0.3:
            answers(404, f"model '{node.here.request['model']}' not found")(node, connection)
        elif act < 0.4:
            connection.sendall(HEAD + line("never "))
        elif act < 0.5:
            connection.sendall(HEAD + line("begun "))
            time.sleep(0.02)
        elif act > 0.8:
            time.sleep(self.dice.random() * 0.05)
            says("PONG")(node, connection)
        else:
            says("PONG")(node, connection)


def shake(served, dice, seconds):
    """Let clients ask, wait and leave, and nodes come and go."""
    until = time.monotonic() + seconds

    def client(seed):
        own = random.Random(seed)
        while time.monotonic() < until:
            with contextlib.suppress(OSError), served.connect() as connection:
                connection.settimeout(15)
                connection.sendall(served.post(request_of(own.choice("abcde"),
                                                          stream=own.random() < 0.5)))
                if own.random() < 0.3:
                    time.sleep(own.random() * 0.02)
                    continue
                read_answer(connection.makefile("rb"))
    clients = [threading.Thread(target=client, args=(dice.random(),)) for _ in range(8)]
    for each in clients:
        each.start()
    while time.monotonic() < until:
        node = dice.choice(list(served.nodes.values()))
        node.close()
        time.sleep(dice.random() * 0.1)
        node.listener = socket.create_server(("127.0.0.1", node.port), backlog=300)
        threading.Thread(target=node._accept, daemon=True).start()
        time.sleep(dice.random() * 0.2)
    for each in clients:
        each.join(20)
        assert not each.is_alive(), "a client got no answer"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_every_alias_is_served_soon_after(gateway, seed):
    dice = random.Random(seed)
    plays = {name: Unsteady(f"{seed}{name}") for name in "nkl"}
    served = gateway([("a1", "n", "a", {}), ("b1", "n", "b", {"ollama_model": "o", "max_parallel": 2}),
                      ("c1", "n", "c", {"ollama_model": "p"}), ("c2", "k", "c", {}),
                      ("d1", "l", "d", {"max_parallel": 4}), ("e1", "k", "e", {"fallback": ["d1"]})],
                     plays)
    shake(served, dice, 2.5)
    for play in plays.values():
        play.healthy = True
    began = time.monotonic()
    missing = set("abcde")
    while missing:
        missing -= {alias for alias in missing if served.ask(alias)[0] == 200}
        assert time.monotonic() - began < 10, f"{missing} are not served"
    def is_idle():  # a slot is given back a moment after its answer; of who has left, when it shows
        places = json.loads(served.get("/fleet")[2])
        return places["waiting"] == 0 and not any(model["running"] for model in places["models"])
    wait_until(is_idle)


# -- what is slow --

def test_a_terminal_that_nobody_reads_holds_up_no_request(gateway):
    served = gateway([("m", "n", "x", {"max_parallel": 8})], {"n": says("PONG")})
    read = threading.Event()
    served.world.err = lambda text: read.wait(60)
    try:
        with not_held_up(30):
            assert together(served, 8) == [200] * 8
            assert served.ask(headers={"x_api_key": "wrong"})[0] == 401
    finally:
        read.set()


def test_a_slow_disk_holds_up_no_request_and_loses_no_receipt(gateway):
    served = gateway([("m", "n", "x", {"max_parallel": 8})], {"n": says("PONG")})
    disk = threading.Event()
    append = served.world.append_line

    def append_late(path, text):
        disk.wait(60)
        append(path, text)
    served.world.append_line = append_late
    try:
        with not_held_up(30):
            assert together(served, 8) == [200] * 8
    finally:
        disk.set()
    assert len(served.receipts(8)) == 8


def test_a_stop_waits_for_receipts_that_a_disk_takes_late(gateway):
    served = gateway([("m", "n", "x", {})], {"n": says("PONG")})
    append = served.world.append_line

    def append_late(path, text):
        time.sleep(0.3)
        append(path, text)
    served.world.append_line = append_late
    assert [served.ask()[0] for _ in range(3)] == [200] * 3
    served.close()
    assert len(served.receipts_path.read_text().splitlines()) == 3


def test_what_a_disk_never_took_is_told_at_the_end(gateway, limits):
    limits(aside=2)
    served = gateway([("m", "n", "x", {})], {"n": says("PONG")})
    disk = threading.Event()
    append = served.world.append_line
    served.world.append_line = lambda path, text: (disk.wait(60), append(path, text))
    assert served.ask()[0] == 200
    time.sleep(0.2)  # it waits for the disk
    assert {served.ask()[0] for _ in range(5)} == {200}
    disk.set()
    served.close()
    assert len(served.receipts_path.read_text().splitlines()) < 6
    assert re.search(r"warning: \d records? of requests dropped", "".join(served.said))


def test_a_machine_with_a_name_costs_no_look_up_for_each_request(gateway, monkeypatch):
    asked, look_up = [], socket.getaddrinfo

    def look_up_late(host, port, *more, flags=0, **options):
        if host != "studio.test":
            return look_up(host, port, *more, flags=flags, **options)
        if flags & socket.AI_NUMERICHOST:
            raise OSError("a name")
        asked.append(host)
        time.sleep(0.3)
        return look_up("127.0.0.1", port, *more, flags=flags, **options)
    monkeypatch.setattr(socket, "getaddrinfo", look_up_late)
    served = gateway([("m", "n", "x", {})], {"n": says("PONG")}, host="studio.test")
    threads = []
    start = threading.Thread.start
    assert served.ask()[0] == 200
    served.receipts()
    wait_until(lambda: served.said)
    monkeypatch.setattr(threading.Thread, "start",
                        lambda self: (threads.append(str(self._target)), start(self))[1])
    with served.connect() as connection:
        stream = connection.makefile("rb")
        for _ in range(10):
            connection.sendall(served.post(request_of()))
            assert read_answer(stream)[0] == 200
    assert len(asked) == 1
    # The client's connection has one, and each connection to the stand-in of a node.
    assert len([thread for thread in threads if "_serve" not in thread]) == 0, threads


# -- one answer --

def one_after_the_other(*plays):
    """The same play for several nodes: who is asked first plays the first."""
    left = list(plays)
    return lambda node, connection: left.pop(0)(node, connection)


def dies(node, connection):
    time.sleep(0.35)


def raw_ask(served, path, **more):
    body = json.dumps({"model": "x", "input": "hi", "max_tokens": 9,
                       "messages": [{"role": "user", "content": PROMPT}], **more}).encode()
    return served.raw(served.head(target=path, Content_Length=len(body)) + body)


def data_of(body):
    """The objects of a stream of events."""
    return [json.loads(text[6:]) for text in body.decode().splitlines()
            if text.startswith("data: {")]


def test_numbers_of_events_go_on_when_another_node_answers(gateway, limits):
    limits(quiet=0.1)

    def says_unheard(node, connection):
        connection.sendall(HEAD + line("never ") + line("sent ") + b"garbage\n")
    play = one_after_the_other(dies, says_unheard, says("PO", "NG"))
    served = gateway([("m", "n", "x", {}), ("o", "k", "x", {}), ("p", "l", "x", {})],
                     dict.fromkeys("nkl", play))
    body = raw_ask(served, "/v1/responses", stream=True)[2]
    numbers = [event["sequence_number"] for event in data_of(body)]
    assert len(numbers) > 9 and numbers == list(range(len(numbers)))


def test_a_receipt_measures_the_node_that_answered(gateway):
    def says_and_dies(node, connection):
        connection.sendall(HEAD + line("begun "))
        time.sleep(0.3)

    def says_late(node, connection):
        time.sleep(0.3)
        says("PONG")(node, connection)
    play = one_after_the_other(says_and_dies, says_late)
    served = gateway([("m", "n", "x", {}), ("o", "k", "x", {})], {"n": play, "k": play})
    assert served.ask()[0] == 200
    receipt, = served.receipts()
    assert receipt["node"] != receipt["failures"][0]["node"]
    assert receipt["waited_seconds"] < 0.29 < receipt["asked_seconds"] < receipt["first_byte_seconds"] - 0.25
    assert receipt["first_byte_seconds"] > 0.59


@pytest.mark.parametrize("path, last", [
    ("/v1/messages", "error"), ("/v1/chat/completions", None), ("/v1/responses", "response.failed")])
def test_a_bug_in_mid_answer_ends_the_stream_as_its_dialect_does(gateway, monkeypatch, path, last):
    reader_of = sf.Ollama.reader

    def reader(self, *words):
        made = reader_of(self, *words)
        feed = made.feed
        made.feed = lambda line: {}["bug"] if b"boom" in line else feed(line)
        return made
    monkeypatch.setattr(sf.Ollama, "reader", reader)

    def play(node, connection):
        connection.sendall(HEAD + line("begun "))
        time.sleep(0.2)
        connection.sendall(line("boom") + DONE)
    served = gateway([("m", "n", "x", {})], {"n": play})
    status, _, body = raw_ask(served, path, stream=True)
    assert status == 200 and b"begun" in body and b"HTTP/1.1" not in body
    told = data_of(body)[-1]
    assert told.get("type") == last and "a bug in subagent-fleet" in json.dumps(told)
    assert served.receipts()[0]["outcome"] == "api_error"
    wait_until(lambda: any("KeyError" in told for told in served.said))


@pytest.mark.parametrize("provider", sf.BACKENDS)
def test_a_response_format_reaches_the_model_or_is_refused(gateway, provider):
    schema = {"type": "object", "properties": {"answer_of_mine": {"type": "integer"}}}
    served = gateway([("m", "n", "x", {"cloud": provider == "anthropic"})], {"n": sends(b"")})
    nodes = served.server.fleet.nodes
    nodes["n"] = sf.replace(nodes["n"], provider=provider)
    answer = raw_ask(served, "/v1/chat/completions", response_format={
        "type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    asked = served.nodes["n"].requests
    assert (answer[0] == 400 and b"format" in answer[2] and not asked) \
        or "answer_of_mine" in json.dumps(asked[0])


def test_a_response_format_goes_to_the_model_that_can(gateway):
    served = gateway([("m", "n", "x", {"fallback": ["o"], "cloud": True}), ("o", "k", "y", {})],
                     {"n": sends(b""), "k": says('{"a":1}')})
    nodes = served.server.fleet.nodes
    nodes["n"] = sf.replace(nodes["n"], provider="anthropic")
    answer = raw_ask(served, "/v1/chat/completions", response_format={"type": "json_object"})
    assert answer[0] == 200 and served.nodes["n"].requests == []
    assert served.receipts()[0]["passed_over"] == [{"route": "m", "why": "format"}]


@pytest.mark.parametrize("status", [205, 299, 300, 302, 304, 307, 308])
def test_what_is_neither_an_answer_nor_a_refusal_is_a_failure_of_the_node(gateway, status):
    served = gateway([("m", "n", "x", {}), ("o", "k", "x", {})],
                     {"n": sends(b"HTTP/1.1 %d x\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: "
                                 b"2\r\n\r\n{}" % status), "k": says("PONG")})
    assert [served.ask()[0] for _ in range(2)] == [200, 200]
    served.nodes["k"].play = served.nodes["n"].play
    assert served.ask()[0] == 529
    assert {attempt["why"] for receipt in served.receipts(3) for attempt in receipt["failures"]} \
        == {"bad answer"}


# -- connections --

def test_a_thread_that_cannot_start_costs_its_connection_and_no_other(gateway, monkeypatch):
    served = gateway([("m", "n", "x", {})], {"n": says("PONG")})
    start, failing = threading.Thread.start, [1, 1]

    def start_or_fail(thread):
        if threading.current_thread() is served.thread and failing:
            failing.pop()
            raise RuntimeError("can't start new thread")
        start(thread)
    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    for _ in range(2):
        with contextlib.suppress(ConnectionError):
            assert served.get("/")[0] == 0
    assert served.ask()[0] == 200


def test_a_connection_that_ends_while_it_is_to_make_room_is_gone(gateway, limits):
    limits(connections=2, request=600)
    served = gateway([("m", "n", "x", {})], {"n": says("PONG")})

    held = []

    class Slow(dict):
        def copy(self):
            seen = dict(self)
            if len(held) == len(seen) == 2:  # whoever is chosen by what was seen ends meanwhile
                while held:
                    held.pop().close()
                wait_until(lambda: not self)
            return seen
    served.server._visitors = Slow()
    first, second = served.connect(), served.connect()
    wait_until(lambda: len(served.server._visitors) == 2)
    held += first, second
    assert served.ask()[0] == 200
    assert held == []
    wait_until(lambda: not served.server._visitors)


def test_uploads_in_chunks_take_the_room_of_what_has_come(gateway):
    served = gateway([("m", "n", "x", {"max_parallel": 12})], {"n": says("PONG")})
    body = json.dumps(request_of()).encode()
    with contextlib.ExitStack() as ending:
        slow = [ending.enter_context(served.connect()) for _ in range(12)]
        for connection in slow:
            connection.sendall(served.head(Transfer_Encoding="chunked") + b"9\r\n" + body[:9] + b"\r\n")
        wait_until(lambda: list(served.server._visitors.values()).count("asking") == 12)
        assert served.ask()[0] == 200
        for connection in slow:
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 9, body[9:]))
        assert [read_answer(connection.makefile("rb"))[0] for connection in slow] == [200] * 12


# -- connections that are kept --

PONG = chunked(line("PONG"), DONE)


def closes(node, connection):
    connection.close()


class Client:
    """A client that asks one after the other: a connection to a node is back by then."""

    def __init__(self, served):
        self.served, self.connection = served, served.connect()
        self.stream = self.connection.makefile("rb")

    def __call__(self, **more):
        self.connection.sendall(self.served.post(request_of(**more)))
        return read_answer(self.stream)

    def close(self):
        self.stream.close()
        self.connection.close()


@pytest.fixture
def kept(gateway):
    """Start a gateway before one node that keeps its connections, and plays these in their turn.

    Gives a client of it, and the node.
    """
    with contextlib.ExitStack() as ending:
        yield lambda *plays, **more: start_kept(gateway, ending, *plays, **more)


def start_kept(gateway, ending, *plays, **more):
    left = list(plays)
    served = gateway([("m", "n", "x", {"max_parallel": 12, **more})], {
        "n": lambda node, connection: left.pop(0)(node, connection) if left
        else connection.sendall(PONG)})
    served.nodes["n"].keeps = True
    client = Client(served)
    ending.callback(client.close)
    return client, served.nodes["n"]


@pytest.mark.parametrize("stream", [True, False])
def test_requests_to_a_node_share_a_connection(kept, stream):
    ask, node = kept()
    assert {ask(stream=stream)[0] for _ in range(20)} == {200}
    assert (len(node.requests), node.connections) == (20, 1)


@pytest.mark.parametrize("last", [b"0\r\n", b"0\r\n\r\n\n", b"0\r\n\r\n" + PONG])
def test_a_connection_that_says_more_or_less_is_not_used_again(kept, last):
    ask, node = kept(*[sends(chunked(line("PONG"), DONE, last=last))] * 3)
    for _ in range(3):
        status, _, body = ask()
        assert status == 200 and body.count(b"PONG") == 1
    assert node.connections == 3


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n",
                                  b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: %d\r\n\r\n"])
def test_a_connection_that_its_node_will_close_is_not_used_again(kept, head):
    said = line("PONG") + DONE
    ask, node = kept(*[sends(head % len(said) + said)] * 2)
    assert {ask()[0] for _ in range(2)} == {200} and node.connections == 2


def test_a_connection_that_ended_while_it_was_kept_is_not_used(kept):
    def answers_and_closes(node, connection):
        connection.sendall(PONG)
        connection.close()
    ask, node = kept(answers_and_closes, answers_and_closes)
    for _ in range(3):
        assert ask()[0] == 200
        time.sleep(0.05)
    assert (len(node.requests), node.connections) == (3, 3)
    assert [receipt["failures"] for receipt in ask.served.receipts(3)] == [[]] * 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_kept_connection_that_ends_before_a_byte_is_asked_again_on_a_fresh_one(kept, stream):
    ask, node = kept(sends(PONG), closes)
    assert [ask(stream=stream)[0] for _ in range(2)] == [200, 200]
    assert (len(node.requests), node.connections) == (3, 2)
    assert [receipt["failures"] for receipt in ask.served.receipts(2)] == [[], []]


def test_a_machine_that_went_while_a_connection_was_kept_is_a_failure_of_its_own(kept):
    def goes(node, connection):
        connection.close()
        node.close()
    ask, node = kept(sends(PONG), goes)
    assert ask()[0] == 200
    status, _, body = ask()
    assert status == 529 and b"refused" in body and b"bug" not in body


def test_a_fresh_connection_that_ends_before_a_byte_is_a_failure(kept):
    ask, node = kept(closes, sends(PONG), closes, closes)
    assert ask()[0] == 529 and len(node.requests) == 1
    assert ask()[0] == 200
    assert ask()[0] == 529 and len(node.requests) == 4


@pytest.mark.parametrize("part", [5, 30, len(PONG) - 30])
def test_a_kept_connection_that_ends_in_mid_answer_is_a_failure(kept, part):
    def says_part(node, connection):
        connection.sendall(PONG[:part])
        connection.close()
    ask, node = kept(sends(PONG), says_part)
    assert [ask()[0] for _ in range(2)] == [200, 529]
    assert len(node.requests) == 2


def test_so_many_connections_to_a_node_are_kept_and_no_more(kept):
    all_there = threading.Barrier(12)

    def answers_together(node, connection):
        all_there.wait(10)
        connection.sendall(PONG)
    ask, node = kept(*[answers_together] * 12)
    assert together(ask.served, 12) == [200] * 12
    assert node.connections == 12
    wait_until(lambda: sum(map(len, ask.served.world._idle.values())) == sf.IDLE_LIMIT == 8)
    assert together(ask.served, 8) == [200] * 8 and node.connections <= 20


def test_a_stop_closes_what_was_kept(kept):
    ask, node = kept()
    ended = threading.Event()

    def sees_the_end(node, connection):
        connection.sendall(PONG)
        assert connection.recv(1) == b""
        ended.set()
    node.play = sees_the_end
    assert ask()[0] == 200
    ask.served.close()
    assert ended.wait(5)


class Sealed(Node):
    """A node behind TLS."""

    context = None

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            super()._serve(self.context.wrap_socket(connection, server_side=True))


def test_connections_behind_tls_are_kept_and_carry_long_answers(tmp_path):
    context = hostile_nodes.self_signed(tmp_path)
    if not context:
        pytest.skip("no openssl to make a certificate with")
    words = line("word " * 40_000)

    def play(node, connection):  # in parts, and longer than what TLS hands over at once
        connection.sendall(chunked(line("PO"), last=b""))
        time.sleep(0.05)
        connection.sendall(chunked(words, DONE).partition(b"\r\n\r\n")[2])
    node = Sealed(play)
    node.context, node.keeps = context, True
    served = Rig(fleet_of(("m", "n", "x", {}), nodes={"n": f"https://127.0.0.1:{node.port}"}), tmp_path)
    served.world._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    served.world._tls.check_hostname, served.world._tls.verify_mode = False, ssl.CERT_NONE
    ask = Client(served)
    for stream in (True, False, True):
        status, _, body = ask(stream=stream, system="s" * 300_000)
        assert status == 200 and body.count(b"word") == 40_000
    assert (len(node.requests), node.connections) == (3, 1)
    ask.close()
    served.close()
    node.close()
