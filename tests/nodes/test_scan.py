"""Machines that nobody named: what a scan asks, whom it finds, what it says of the rest."""
import contextlib
import json
import random
import socket
import subprocess
import sys
import threading

import pytest

import subagent_fleet as sf
from fake_ollama import FakeNode
from tools import PROC, clean_environment, install, not_held_up, run_main

TARPITS, FULL = range(20, 120), range(120, 220)  # the last part of an address


class Neighbourhood:
    """Machines on loopback addresses: nodes, some that are silent, watchers outside.

    Its addresses are 254 of the sixteen million of loopback, which no other test run has.
    """

    def __init__(self):
        self.closing = contextlib.ExitStack()
        self.street = self._claim()
        self.net = f"{self.street}.0/24"
        self.few = f"{self.street}.8/29"
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


# What it took at most, as Linux counts it since the start of the program.
MEASURED = """\
import atexit, os, re, sys
os._exit = sys.exit  # else nothing is told
def tell():
    with open({status!r}) as lines:
        kilobytes = re.search(r"VmHWM:\\s+(\\d+)", lines.read())[1]
    with open({path!r}, "w") as stream:
        stream.write(kilobytes)
atexit.register(tell)
sys.argv[0] = __file__ = {program!r}
with open({program!r}) as stream:
    exec(stream.read(), sys.modules["__main__"].__dict__)
"""


def scan(tmp_path, *words):
    """Run a command; give its status, output and errors."""
    done = run_main(words, cwd=tmp_path, env={"OLLAMA_HOST": "127.0.0.1:9"}, timeout=60)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    return done.returncode, out, err


def measured_scan(tmp_path, *words):
    """Do the same as a process, and give the megabytes it took at most."""
    environ = clean_environment(OLLAMA_HOST="127.0.0.1:9")
    path = tmp_path / "kilobytes"
    code = MEASURED.format(path=str(path), program=str(install(tmp_path)),
                           status=str(PROC / "self/status"))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, *words], cwd=str(tmp_path),
                          env=environ, capture_output=True, timeout=60, check=False)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    return done.returncode, out, err, int(path.read_text()) / 1024


pytestmark = pytest.mark.skipif(sys.platform != "linux",
                                reason="127.0.0.0/8 is one address elsewhere")


@pytest.mark.slow
def test_scan_of_a_crowded_network_finds_its_nodes_in_time(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {}, "gemma3:4b": {"capabilities": ["completion"]}})
    neighbourhood.node(12, {"qwen3-coder:30b": {"parameters": "30.5B"}})
    neighbourhood.node(13, {"devstral:24b": {"parameters": "23.6B"}})
    sf.World().allow_files(4096)
    for last in TARPITS:
        neighbourhood.tarpit(last)
    for last in FULL:
        neighbourhood.fill(last)
    for address, port in ((neighbourhood.at(11, 1), 11434), (neighbourhood.at(1, 2), 11434),
                          (neighbourhood.at(11), 11435), (neighbourhood.at(12), 80),
                          (neighbourhood.at(255, 3), 8000)):
        with contextlib.suppress(OSError):  # somebody has port 80
            neighbourhood.watch(address, port)

    _, _, _, at_rest = measured_scan(tmp_path, "--version")
    with not_held_up(2 * (3.5 + 1.5)):  # of these a start
        status, out, err, megabytes = measured_scan(tmp_path, "discover", "--scan", neighbourhood.net, "--json")
    print(f"{megabytes:.0f} MB, {at_rest:.0f} MB at rest")
    assert (status, err) == (0, "")
    report = json.loads(out)["scan"]
    assert [(one["node"]["name"], one["node"]["endpoint"], len(one["node"]["models"]))
            for one in report["found"]] == [
        ("lan-11", f"http://{neighbourhood.at(11)}:11434", 2),
        ("lan-12", f"http://{neighbourhood.at(12)}:11434", 1),
        ("lan-13", f"http://{neighbourhood.at(13)}:11434", 1)]
    assert report["networks"] == [neighbourhood.net]
    assert report["addresses"] == {
        "open": 103, "refused": 51, "silent": len(FULL), "unreachable": 0}
    assert {one["why"] for one in report["others"]} == {"silent"}
    assert len(report["others"]) == len(TARPITS)
    assert neighbourhood.outside == []
    assert megabytes < 60 and megabytes < at_rest + 25


def test_init_with_a_scan_writes_the_machines_that_have_work(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {"parameters": "8.2B"}})
    neighbourhood.node(12, {"qwen3-coder:30b": {"parameters": "30.5B"}})
    neighbourhood.node(14, {"bge-m3": {"capabilities": ["embedding"]}})
    neighbourhood.answer(10, 11434, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    neighbourhood.answer(9, 8080, b"220 mail ready\r\n")
    status, out, err = scan(tmp_path, "init", "--scan", neighbourhood.few)
    assert (status, err) == (0, "")
    assert f"Looked at {neighbourhood.few}: 5 of 6 addresses answer, 1 refuse, 0 are silent.\n" in out
    assert f"Skipped as not Ollama {neighbourhood.at(10)}:11434; as something else " \
        f"{neighbourhood.at(9)}:8080.\n" in out
    assert "lan-14 idles: none of its models can chat there.\n" in out
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert {name: node.endpoint for name, node in fleet.nodes.items()} == {
        "local": "http://127.0.0.1:9",
        "lan-11": f"http://{neighbourhood.at(11)}:11434",
        "lan-12": f"http://{neighbourhood.at(12)}:11434"}
    assert fleet.models[fleet.agents["implementer"].model].node == "lan-12"
    assert [finding.what for finding in sf.lint_fleet(fleet)] == [
        "nodes.local: no model runs on it"]  # it does not answer today

    # What is in the fleet is found again, and known.
    neighbourhood.node(13, {"qwen3:8b": {}})
    status, out, err = scan(tmp_path, "discover", "--scan", neighbourhood.few)
    rows = [line.split(None, 3) for line in out.splitlines() if line.startswith("lan-")]
    assert [(row[0], row[-1].strip()) for row in rows][:2] == [
        ("lan-11", "1       is lan-11"), ("lan-12", "1       is lan-12")]
    assert f"`subagent-fleet add lan-13=http://{neighbourhood.at(13)}:11434`" in out


def test_a_server_on_another_port_is_found_by_what_it_answers(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {}}, port=8080)
    neighbourhood.node(12, {"qwen3:8b": {}}, port=9090)
    _, out, _ = scan(tmp_path, "discover", "--scan", neighbourhood.few, "--json")
    assert [(one["node"]["endpoint"], one["provider"]) for one in json.loads(out)["scan"]["found"]] \
        == [(f"http://{neighbourhood.at(11)}:8080", "ollama")]


def test_another_kind_of_server_is_known_by_its_row_of_backends(neighbourhood, tmp_path):
    body = b'{"object": "list", "data": [{"id": "qwen3:8b", "object": "model"}]}'
    neighbourhood.answer(11, 8000, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    neighbourhood.answer(12, 8000, b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}")
    _, out, _ = scan(tmp_path, "discover", "--scan", neighbourhood.few, "--json")
    report = json.loads(out)["scan"]
    assert [(one["node"]["endpoint"], one["provider"]) for one in report["found"]] \
        == [(f"http://{neighbourhood.at(11)}:8000", "openai")]
    assert report["others"] == [{"address": f"{neighbourhood.at(12)}:8000", "why": "wanting a key"}]


def test_tailscale_says_who_else_is_there(neighbourhood, tmp_path):
    neighbourhood.node(11, {"qwen3:8b": {}})
    tailscale = tmp_path / "bin" / "tailscale"
    tailscale.parent.mkdir()
    peer = {"HostName": "Studio", "DNSName": "studio.tail1.ts.net.", "OS": "macOS", "Online": True,
            "TailscaleIPs": ["100.64.0.9"], "CurAddr": f"{neighbourhood.at(11)}:41641", "Addrs": None}
    tailscale.write_text("#!/bin/sh\ncat <<'E'\n"
                         + json.dumps({"BackendState": "Running", "Peer": {"nodekey:1": peer}})
                         + "\nE\n")
    tailscale.chmod(0o755)
    # Nobody is asked at 100.64.0.9: no request of a test leaves loopback.
    peers = sf.parse_peers(subprocess.run([str(tailscale)], stdout=subprocess.PIPE,
                                          check=True).stdout.decode())
    assert peers == [sf.Peer("studio", "100.64.0.9", (neighbourhood.at(11),))]
    assert sf.name_place(neighbourhood.at(11), 11434, peers, set()) == "studio"
    assert ("100.64.0.9", 1234) in sf.plan_places([], peers)


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


@pytest.mark.parametrize("typed, network", [
    ("192.168.7.0/24", "192.168.7.0/24"), ("192.168.7.9", "192.168.7.0/24"),
    ("10.1.2.3/30", "10.1.2.0/30"), ("172.16.4.0/22", "172.16.4.0/22"),
    ("100.64.0.0/24", "100.64.0.0/24"), ("127.0.0.0/24", "127.0.0.0/24")])
def test_networks_that_may_be_scanned(typed, network):
    assert sf.parse_network(typed, "init") == network


@pytest.mark.parametrize("typed, status, what", [
    ("8.8.8.0/24", 3, "is not a private network; others are never scanned"),
    ("172.32.0.0/24", 3, "private"), ("0.0.0.0/0", 3, "private"), ("192.0.2.0/24", 3, "private"),
    ("10.0.0.0/21", 2, "is too large; at most a /22 is scanned"), ("fe80::/120", 2, "is not an IPv4 network"),
    ("mini.local", 2, "is not an IPv4 network like 192.168.1.0/24"), ("10.0.0.0/33", 2, "not an IPv4"),
    ("\x1b[2J", 2, "`?[2J` is not an IPv4 network")])
def test_other_networks_are_refused(run_cli, typed, status, what):
    for command in ("init", "discover"):
        done = run_cli(command, "--scan", typed)
        assert done.returncode == status and what in done.stderr and done.stdout == ""
        assert f"  fix: subagent-fleet {command} --scan 192.168.1.0/24\n" in done.stderr


def test_a_refused_network_has_a_slug():
    with pytest.raises(sf.FleetError) as caught:
        sf.parse_network("8.8.8.0/24", "init")
    assert caught.value.slug == "scan-network"


@pytest.mark.parametrize("own, networks", [
    (("192.168.1.5", "192.168.1.6", "10.0.3.7"), ["192.168.1.0/24", "10.0.3.0/24"]),
    (("100.64.0.5", "127.0.0.1", "8.8.8.8", "fd00::1", "192.0.2.9", "169.254.1.1"), [])])
def test_own_networks_are_the_private_ones(own, networks):
    assert sf.plan_networks(own) == networks


def test_a_machine_without_a_network_says_so_in_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf.World, "own_names", lambda self: ("here", ("100.64.0.5",)))
    world = sf.World()
    world.environ["PATH"] = str(tmp_path)
    assert sf.main(["discover", "--scan"], world) == 0
    assert capsys.readouterr().out == (
        "This machine is not in a private network; name one: `--scan 192.168.1.0/24`.\n"
        "Tailscale is not installed here, so its machines were left out.\nNo machine was found.\n")


def test_a_network_without_a_way_is_said_in_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf.World, "knock", lambda self, places, seconds: (
        (place, "unreachable") for place in places))
    world = sf.World()
    world.environ["PATH"] = str(tmp_path)
    assert sf.main(["discover", "--scan", "10.9.9.0/24"], world) == 0
    assert "\n10.9.9.0/24: cannot be reached from here.\n" in capsys.readouterr().out


@pytest.mark.parametrize("words, what", [
    (("init", "--scan", "127.0.0.0/24", "--offline"), "--scan and --offline cannot be used together"),
    (("discover", "--scan", "127.0.0.0/24", "--write"), "--scan and --write cannot be used together")])
def test_what_a_scan_does_not_do_is_refused(run_cli, words, what):
    done = run_cli(*words)
    assert done.returncode == 2 and what in done.stderr
