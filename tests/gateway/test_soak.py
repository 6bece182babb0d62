"""The gateway among nodes that die and clients that leave: nothing is lost, doubled or kept.

PYTHONPATH=. python3 tests/gateway/test_soak.py 50000     as many requests as you like
"""
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import socket
import sys
import tempfile
import threading
import time

import pytest

import subagent_fleet as sf
from gateway_rig import (
    DONE,
    HEAD,
    Node,
    Rig,
    answers,
    chunked,
    fleet_of,
    line,
    read_answer,
    request_of,
    says,
    wait_until,
)
from tools import PROC, free_port

REQUESTS, CLIENTS = 5_000, 24
NAME = re.compile("<q[0-9]+>")


# -- nodes --

class Odd:
    """Plays of a node that fails in every way; `done` holds the names it answered in full."""

    def __init__(self, seed, *, fails):
        self.chance, self.fails, self.done = random.Random(seed), fails, []

    def __call__(self, node, connection):
        name = node.here.request["messages"][-1]["content"]
        act = self.chance.random()
        if act < self.fails:
            failures = (self.die_at_once, self.die_unheard, self.die_heard, self.talk_nonsense,
                        self.refuse, self.die_anywhere)
            failures[int(act / self.fails * len(failures))](node, connection, name)
            end(connection)
            return
        if act > 0.8:
            time.sleep(self.chance.random() * 0.02)
        self.done.append(name)
        if self.chance.random() < 0.2:
            says("you are ", name)(node, connection)
            end(connection)
            return
        connection.sendall(chunked(line("you are "), line(name), DONE))
        if self.chance.random() < 0.1:  # while it is kept, or just when it is used again
            time.sleep(self.chance.random() * 0.01)
            end(connection)

    def die_at_once(self, node, connection, name):
        pass

    def die_anywhere(self, node, connection, name):
        said = chunked(line("you are not "), line("it"), b'{"done":')
        connection.sendall(said[:self.chance.randrange(len(said) - 20)])

    def die_unheard(self, node, connection, name):
        connection.sendall(HEAD + line("you are not ") + b'{"error":"out of memory"}\n')

    def die_heard(self, node, connection, name):
        connection.sendall(HEAD + line(f"you were {name}"))
        time.sleep(0.01)

    def talk_nonsense(self, node, connection, name):
        connection.sendall(HEAD + b"\xff\x00" + DONE)

    def refuse(self, node, connection, name):
        answers(self.chance.choice((500, 503, 404)), "no")(node, connection)


def end(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Flapping(Node):
    """A node at whose port nobody listens from time to time."""

    def flap(self, until):
        while not until.is_set():
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            time.sleep(0.05)
            self.listener = socket.create_server(("127.0.0.1", self.port), backlog=300)
            threading.Thread(target=self._accept, daemon=True).start()
            until.wait(0.2)


# -- clients --

class Client:
    """Asks one thing after the other; notes what came, or that it left."""

    def __init__(self, served, seed):
        self.served, self.chance = served, random.Random(seed)
        self.connection = self.stream = None
        self.answered, self.failed, self.left = [], [], []
        self.error = None

    def run(self, names):
        try:
            for name in names:
                self.ask(name, alias=self.chance.choice("xxxy"))
            self.leave()
        except Exception as error:
            self.error = error

    def ask(self, name, *, alias):
        if not self.connection:
            self.connection = self.served.connect()
            self.stream = self.connection.makefile("rb")
        messages = [{"role": "user", "content": name}]
        is_stream = self.chance.random() < 0.5
        self.connection.sendall(self.served.post(
            request_of(alias, messages=messages, stream=is_stream)))
        act = self.chance.random()
        if act < 0.12:
            time.sleep(self.chance.random() * 0.01)
            self.left.append(name)
            self.leave()
            return
        self.read(name, alias, is_stream)

    def read(self, name, alias, is_stream):
        status, headers, body = read_answer(self.stream)
        text = body.decode()
        if status == 200 and "event: error" not in text:
            assert NAME.findall(text) == [name], text
            assert "not" not in text and "were" not in text, text
            assert text.count("event: message_stop") == is_stream
            self.answered.append((alias, name))
        else:
            assert alias == "x" and status in (200, 404, 500, 529), (alias, status, text)
            assert set(NAME.findall(text)) <= {name} and text.count('"error":{') == 1, text
            self.failed.append(name)
        if status != 200 and headers.get("connection") == "close":
            self.leave()

    def leave(self):
        if self.connection:
            self.stream.close()
            self.connection.close()
        self.connection = None


# -- the scheduler, watched --

class Watch:
    """Sees each slot that is given, and who waited for it longer."""

    def __init__(self, scheduler):
        self.scheduler, self.grant = scheduler, scheduler._grant
        self.choose, self.now = scheduler._choose, 0.0
        self.numbers, self.overtaken, self.grants = [], [], 0
        scheduler._grant, scheduler._choose = self.see, self.look

    def look(self, ticket, now, *, is_late):
        self.now = now
        return self.choose(ticket, now, is_late=is_late)

    def see(self, ticket, model, now):
        """Called under the scheduler's lock."""
        self.grants += 1
        for other in self.scheduler._queue.values():
            if other.alias == ticket.alias and other.number < ticket.number \
                    and self.choose(other, self.now, is_late=False):
                self.overtaken.append((other.number, ticket.number))
        if ticket.alias == "y":  # whose nodes never fail
            self.numbers.append(ticket.number)
        place = self.scheduler.places[model.name]
        assert place.running < place.slots
        self.grant(ticket, model, now)


def soak(count, tmp_path):
    """Send so many requests; return what came of them."""
    odd = [Odd(seed, fails=0.25) for seed in range(3)] + [Odd(3, fails=0), Odd(4, fails=0)]
    nodes = [Node(odd[0]), Node(odd[1]), Flapping(odd[2]), Node(odd[3]), Node(odd[4])]
    for node in nodes:
        node.keeps = True
    addresses = {f"n{i}": node.endpoint for i, node in enumerate(nodes)}
    addresses["gone"] = f"http://127.0.0.1:{free_port()}"
    models = [(f"m{i}", f"n{i}", "x" if i < 3 else "y", {"max_parallel": 2}) for i in range(5)]
    served = Rig(fleet_of(*models, ("m9", "gone", "x", {}), nodes=addresses), tmp_path)
    watch = Watch(served.server.scheduler)

    clients = [Client(served, seed) for seed in range(CLIENTS)]
    names = [f"<q{number}>" for number in range(count)]
    threads = [threading.Thread(target=client.run, args=(names[at::CLIENTS],), daemon=True)
               for at, client in enumerate(clients)]
    ended = threading.Event()
    flapping = threading.Thread(target=nodes[2].flap, args=(ended,), daemon=True)
    for thread in (*threads, flapping):
        thread.start()
    for thread in threads:
        thread.join(60 + count / 20)
        assert not thread.is_alive(), "a client got no answer"
    ended.set()
    flapping.join(5)

    check_answers(clients, names, odd)
    check_nothing_is_kept(served, watch)
    served.close()
    kept = served.receipts_path.read_text().splitlines()
    receipts = [sf.read(sf.Receipt, json.loads(text)) for text in kept]
    check_receipts(receipts, clients, served)
    for node in nodes:
        node.close()
    return collections.Counter(receipt.outcome for receipt in receipts), watch.grants


def check_answers(clients, names, odd):
    """Every request came to one end, and no node answered one that another had answered."""
    for client in clients:
        if client.error:
            raise client.error
    answered = [name for client in clients for _, name in client.answered]
    ends = answered + [name for client in clients for name in client.failed + client.left]
    assert sorted(ends) == sorted(names)
    done = collections.Counter(name for each in odd for name in each.done)
    assert all(done[name] == 1 for name in answered)
    assert max(done.values()) == 1
    assert len(answered) > len(names) / 2


def check_nothing_is_kept(served, watch):
    server, scheduler = served.server, served.server.scheduler
    wait_until(lambda: not server._visitors)
    places, waiting = scheduler.show()
    assert (waiting, [place["running"] for place in places.values()]) == (0, [0] * len(places))
    assert set(scheduler._busy.values()) == {0} and not scheduler._queue
    assert not server._held
    assert watch.overtaken == []
    assert watch.numbers == sorted(watch.numbers)
    assert not [told for told in served.said if "bug" in told]


def check_receipts(receipts, clients, served):
    """Each request has one receipt, at most; it has none when nobody saw it come."""
    assert len({receipt.id for receipt in receipts}) == len(receipts)
    stayed = sum(len(client.answered) + len(client.failed) for client in clients)
    left = sum(len(client.left) for client in clients)
    assert stayed <= len(receipts) <= stayed + left
    outcomes = collections.Counter(receipt.outcome for receipt in receipts)
    assert outcomes["ok"] >= sum(len(client.answered) for client in clients)
    assert outcomes["left"] <= left and outcomes["left"] > 0
    totals = served.server.ledger.totals
    assert sum(node["requests"] for node in totals.values()) \
        == sum(receipt.node is not None for receipt in receipts)
    assert sum(node["failures"] for node in totals.values()) \
        == sum(len(receipt.failures) for receipt in receipts) > 0


def held():
    """How many descriptors this process has open, where the system tells."""
    return len(os.listdir(PROC / "self/fd")) if (PROC / "self/fd").is_dir() else 0


@pytest.mark.slow
def test_dying_nodes_and_leaving_clients(tmp_path, limits):
    limits(rest=0.02, longest_rest=0.05)
    files, threads = held(), threading.active_count()
    outcomes, _ = soak(REQUESTS, tmp_path)
    assert outcomes["ok"] > REQUESTS / 2 and outcomes["api_error"] > 0
    files += 1  # by which free_port() holds its port
    wait_until(lambda: held() <= files and threading.active_count() <= threads)


if __name__ == "__main__":
    sf.REST_SECONDS, sf.REST_LIMIT_SECONDS = 0.02, 0.05
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        print(*soak(int(sys.argv[1]), pathlib.Path(place)))
    print(f"{time.monotonic() - began:.1f} s")
