"""Machines that nobody named: what a scan asks, whom it finds, what it says of the rest."""
import contextlib
import json
import random
import socket
import sys
import threading

import pytest

import subagent_fleet as sf
from fake_ollama import FakeNode
from tools import not_held_up, run_main

TARPITS, FULL = range(20, 70), range(120, 170)  # the last part of an address


class Neighbourhood:
    """Machines on loopback addresses: nodes, some that are silent, watchers outside.

    Its addresses are 254 of the sixteen million of loopback, which no other test run has.
    """

    def __init__(self):
        self.closing = contextlib.ExitStack()
        self.street = self._claim()
        self.nodes = {}
        self.outside = []  # who was asked that must not be

    def _claim(self):
        """Take the first three numbers of a /24, by a UDP port in it that nobody else asks for."""
        for _ in range(100):
            street = f"127.{random.randrange(1, 250)}.{random.randrange(0, 250)}"
            claim = self.closing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):
                claim.bind((f"{street}.1", sf.OLLAMA_PORT))
                return street
        raise AssertionError("no part of loopback is free")

    def at(self, last, street=0):
        """Return an address of this street, or of one further on."""
        first, second, third = self.street.split(".")
        return f"{first}.{second}.{int(third) + street}.{last}"

    def node(self, last, models, port=sf.OLLAMA_PORT):
        self.nodes[last] = FakeNode(models, host=self.at(last), port=port)
        self.closing.callback(self.nodes[last].close)
        return self.nodes[last]

    def listen(self, address, port, backlog=16):
        listener = self.closing.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(backlog)
        return listener

    def tarpit(self, last):
        """It takes a connection and never says a word."""
        self.listen(self.at(last), sf.OLLAMA_PORT)

    def fill(self, last):
        """Its queues are full: Linux drops who knocks, as a firewall does."""
        for port in sf.SCAN_PORTS:
            self.listen(self.at(last), port, backlog=0)
            for _ in range(2):
                caller = self.closing.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex((self.at(last), port))

    def watch(self, address, port):
        listener = self.listen(address, port)

        def run():
            with contextlib.suppress(OSError):
                while True:
                    self.outside.append(listener.accept()[1])
        threading.Thread(target=run, daemon=True).start()

    def answer(self, last, port, reply):
        """Something that listens there and is no node."""
        listener = self.listen(self.at(last), port)

        def run():
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    with caller, contextlib.suppress(OSError):
                        caller.recv(4096)
                        caller.sendall(reply)
        threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def neighbourhood():
    """An empty one."""
    place = Neighbourhood()
    with place.closing:
        yield place


def list_neighbors(tmp_path, neighbourhood, lasts):
    """Make the programs that say whom this machine has spoken with; give the environment."""
    rows = [f"{neighbourhood.at(last)} dev eth0 lladdr aa:bb:cc:dd:ee:{last:02x} REACHABLE" for last in lasts]
    rows.append(f"{neighbourhood.at(250)} dev eth0  FAILED")
    path = tmp_path / "bin/ip"
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    path.chmod(0o755)
    return {"OLLAMA_HOST": "127.0.0.1:9", "PATH": f"{path.parent}:/usr/bin:/bin"}


def scan(tmp_path, environ, *words):
    """Run a command; give its status, output and errors."""
    done = run_main(words, cwd=tmp_path, env=environ, timeout=60)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    return done.returncode, out, err


pytestmark = pytest.mark.skipif(sys.platform != "linux",
                                reason="127.0.0.0/8 is one address elsewhere")


@pytest.mark.slow
def test_scan_of_a_crowded_network_finds_its_nodes_in_time(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {}, "gemma3:4b": {"capabilities": ["completion"]}})
    neighbourhood.node(12, {"qwen3-coder:30b": {"parameters": "30.5B"}})
    sf.World().allow_files(4096)
    for last in TARPITS:
        neighbourhood.tarpit(last)
    for last in FULL:
        neighbourhood.fill(last)
    for address, port in ((neighbourhood.at(13), 11434), (neighbourhood.at(11), 11435),
                          (neighbourhood.at(250), 11434)):
        neighbourhood.watch(address, port)
    environ = list_neighbors(tmp_path, neighbourhood, [11, 12, *TARPITS, *FULL])
    with not_held_up(2 * (3.5 + 1.5)):  # of these a start
        status, out, err = scan(tmp_path, environ, "discover", "--scan", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)["scan"]
    assert [(one["name"], one["endpoint"], len(one["models"]))
            for one in report["found"]] == [
        ("lan-11", f"http://{neighbourhood.at(11)}:11434", 2),
        ("lan-12", f"http://{neighbourhood.at(12)}:11434", 1)]
    assert report["others"] == [] and neighbourhood.outside == []


def test_a_scan_says_what_answers_and_what_is_skipped(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {"parameters": "8.2B"}})
    neighbourhood.node(13, {"qwen3:8b": {}})
    neighbourhood.answer(10, 11434, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    neighbourhood.answer(9, 8080, b"220 mail ready\r\n")
    neighbourhood.watch(neighbourhood.at(14), 11434)  # which nobody has spoken with
    environ = list_neighbors(tmp_path, neighbourhood, range(9, 14))
    scan(tmp_path, environ, "init", "--offline", "--node", f"mini={neighbourhood.at(11)}")
    status, out, err = scan(tmp_path, environ, "discover", "--scan")
    assert (status, err) == (0, "")
    assert out.startswith("Asked 5 addresses that this machine has lately spoken with")
    assert f"Skipped as not Ollama {neighbourhood.at(10)}:11434; as something else " \
        f"{neighbourhood.at(9)}:8080.\n" in out
    assert "is mini" in out
    assert f"`subagent-fleet add lan-13=http://{neighbourhood.at(13)}:11434`" in out
    assert neighbourhood.outside == []


def test_a_server_on_another_port_is_found_by_what_it_answers(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {}}, port=8080)
    neighbourhood.node(12, {"qwen3:8b": {}}, port=9090)
    environ = list_neighbors(tmp_path, neighbourhood, (11, 12))
    _, out, _ = scan(tmp_path, environ, "discover", "--scan", "--json")
    assert [(one["endpoint"], one["provider"]) for one in json.loads(out)["scan"]["found"]] \
        == [(f"http://{neighbourhood.at(11)}:8080", "ollama")]


def test_another_kind_of_server_is_known_by_its_row_of_backends(neighbourhood, tmp_path):
    body = b'{"object": "list", "data": [{"id": "qwen3:8b", "object": "model"}]}'
    neighbourhood.answer(11, 8000, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    neighbourhood.answer(12, 8000, b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}")
    environ = list_neighbors(tmp_path, neighbourhood, (11, 12))
    _, out, _ = scan(tmp_path, environ, "discover", "--scan", "--json")
    report = json.loads(out)["scan"]
    assert [(one["endpoint"], one["provider"]) for one in report["found"]] \
        == [(f"http://{neighbourhood.at(11)}:8000", "openai")]
    assert report["others"] == [{"address": f"{neighbourhood.at(12)}:8000", "why": "asking for a key"}]


@pytest.mark.parametrize("program, row, found", [
    ("ip", "192.168.1.7 dev wlan0 lladdr aa:bb:cc:dd:ee:ff STALE", ["192.168.1.7"]),
    ("ip", "192.168.1.8 dev wlan0 FAILED", []), ("ip", "8.8.8.8 dev x lladdr aa:bb:cc:dd:ee:ff STALE", []),
    ("arp", "? (192.168.1.7) at a4:83:e7:1:2:3 on en0 ifscope [ethernet]", ["192.168.1.7"]),
    ("arp", "mini.local (10.0.0.7) at a4:83:e7:1:2:3 on en0 ifscope [ethernet]", ["10.0.0.7"]),
    ("arp", "? (192.168.1.8) at (incomplete) on en0 ifscope [ethernet]", []), ("none", "", [])])
def test_neighbors_are_read_as_linux_and_macos_list_them(tmp_path, program, row, found):
    path = tmp_path / program
    path.write_text(f"#!/bin/sh\necho '{row}'\n")
    path.chmod(0o755)
    world = sf.World()
    world.environ["PATH"] = str(tmp_path)
    assert sf.find_neighbors(world, world.clock() + 5) == found


def test_tailscale_says_who_else_is_there(neighbourhood, tmp_path):
    peer = {"HostName": "Studio", "DNSName": "studio.tail1.ts.net.", "OS": "macOS", "Online": True,
            "TailscaleIPs": ["100.64.0.9"], "CurAddr": f"{neighbourhood.at(11)}:41641", "Addrs": None}
    # Nobody is asked at 100.64.0.9: no request of a test leaves loopback.
    peers = sf.parse_peers(json.dumps({"BackendState": "Running", "Peer": {"nodekey:1": peer}}))
    assert peers == [sf.Peer("studio", "100.64.0.9", (neighbourhood.at(11),))]
    assert sf.name_place(neighbourhood.at(11), 11434, peers, set()) == "studio"


PEER = {"HostName": "Mini", "DNSName": "mini.tail1.ts.net.", "OS": "linux", "Online": True,
        "TailscaleIPs": ["100.101.1.2", "fd7a:115c:a1e0::1"]}


@pytest.mark.parametrize("change, known", [
    ({}, True), ({"Online": False}, False), ({"OS": "iOS"}, False), ({"OS": "android"}, False),
    ({"Expired": True}, False), ({"ShareeNode": True}, False), ({"Location": {"City": "x"}}, False),
    ({"TailscaleIPs": None}, False), ({"TailscaleIPs": ["8.8.8.8"]}, False),
    ({"TailscaleIPs": ["100.300.1.1"]}, False), ({"TailscaleIPs": ["100.128.1.1"]}, False),
    ({"TailscaleIPs": [7]}, False), ({"DNSName": "", "HostName": "Mini"}, True), ({"Addrs": 7}, True),
    ({"CurAddr": "192.168.1.7:41641"}, True)])
def test_peers_that_could_serve_models_are_asked(change, known):
    text = json.dumps({"BackendState": "Running", "Peer": {"nodekey:1": {**PEER, **change}}})
    peers = sf.parse_peers(text)
    assert [(peer.name, peer.address) for peer in peers] == [("mini", "100.101.1.2")] * known
    if "CurAddr" in change:
        assert peers[0].others == ("192.168.1.7",)


@pytest.mark.parametrize("text, peers", [
    ('{"BackendState": "Running", "Peer": null}', []), ('{"BackendState": "Running"}', []),
    ('{"BackendState": "Stopped", "Peer": null}', None), ("", None), ("[]", None), ("nonsense", None)])
def test_both_shapes_of_tailscales_answer_are_read(text, peers):
    found = sf.parse_peers(text)
    assert found == peers if not isinstance(peers, int) else len(found) == peers


def test_a_machine_that_knows_nobody_says_so_in_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    world = sf.World()
    world.environ["PATH"] = str(tmp_path)
    assert sf.main(["discover", "--scan"], world) == 0
    assert capsys.readouterr().out == (
        "Asked 0 addresses that this machine has lately spoken with, or that Tailscale names.\n"
        "Tailscale is not installed here, so its machines were left out.\n"
        "No machine was found. Name one: `subagent-fleet add mini=ADDRESS`\n")
