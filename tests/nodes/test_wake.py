"""Machines that sleep: the packet, whom it goes to, how long their waking took."""
import re
import socket
import threading

import pytest

import subagent_fleet as sf
from fake_ollama import FakeNode
from tools import free_port

MAC = "a4:83:e7:01:02:03"
FLEET = """\
project: {{name: night}}
nodes:
  mini: {{endpoint: "http://127.0.0.1:{port}"{mac}}}
models:
  coder: {{node: mini, ollama_model: qwen3:8b, litellm_alias: claude-sonnet-local, context: 32768}}
agents:
  implementer: {{model: coder, description: Use it., tools: [Read]}}
"""


class Sleeper:
    """A machine that takes connections and says nothing until it gets its magic packet."""

    def __init__(self, wakes=True):
        self.packets = []
        self.card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.card.bind(("127.0.0.1", 0))
        self.via = f"127.0.0.1:{self.card.getsockname()[1]}"
        self.bed = socket.create_server(("127.0.0.1", 0))
        self.port = self.bed.getsockname()[1]
        self.node = None
        self.wakes = wakes
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        try:
            while True:
                self.packets.append(self.card.recv(4096))
                if self.wakes and not self.node:
                    self.node = FakeNode({"qwen3:8b": {}}, port=self.port, listening=self.bed)
        except OSError:
            pass

    def stop(self):
        self.card.close()
        self.bed.close()
        if self.node:
            self.node.close()


@pytest.fixture
def sleeper():
    """Start sleepers; they end with the test."""
    started = []

    def start(**more):
        started.append(Sleeper(**more))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def quick(limits):
    """Nobody is given two seconds to be found asleep."""
    limits(sleep_test=0.3, wake_pause=0.05)


def write_fleet(place, port, mac=f', mac: "{MAC}"'):
    (place / "fleet.yaml").write_text(FLEET.format(port=port, mac=mac), encoding="utf-8")


def test_the_packet_is_102_bytes():
    packet = sf.plan_magic_packet(MAC)
    assert len(packet) == 102
    assert packet == b"\xff" * 6 + b"\xa4\x83\xe7\x01\x02\x03" * 16


@pytest.fixture
def towards(monkeypatch):
    """Send what is broadcast to a machine of the test."""
    send = sf.World.send_datagram

    def lead(machine):
        host, port = machine.via.split(":")
        monkeypatch.setattr(sf.World, "broadcast_addresses", lambda self: [host])
        monkeypatch.setattr(sf.World, "send_datagram",
                            lambda self, host, _, content: send(self, host, int(port), content))
    return lead


def test_who_did_not_wake_is_named(sleeper, quick, tmp_path, towards, run_cli, limits):
    limits(sleep_test=0.1, wake_again=0.1, wake=0.4)
    machine = sleeper(wakes=False)
    towards(machine)
    write_fleet(tmp_path, machine.port)
    done = run_cli("warmup", "--timeout", "0.2")
    assert done.returncode == 1 and re.match(
        r"mini did not answer within \d s. Check its `mac:`, and that its network card may wake it\n", done.stdout)
    assert set(machine.packets) == {sf.plan_magic_packet(MAC)} and len(machine.packets) >= 2


def test_a_machine_on_which_nothing_listens_is_awake(quick, tmp_path, run_cli, monkeypatch):
    write_fleet(tmp_path, free_port())
    sent = []
    monkeypatch.setattr(sf.World, "send_datagram", lambda *words: sent.append(words))
    done = run_cli("warmup")
    assert done.returncode == 1 and sent == []
    assert done.stdout.startswith("mini is awake, but nothing listens there: start Ollama\n")


@pytest.mark.slow
def test_on_a_terminal_it_says_for_whom_it_waits(sleeper, quick, tmp_path, towards, monkeypatch, capsys, limits):
    limits(wake=1.6)
    machine = sleeper(wakes=False)
    towards(machine)
    write_fleet(tmp_path, machine.port)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf.World, "is_terminal", lambda self, stream="stdout": stream == "stderr")
    monkeypatch.setenv("TERM", "xterm")
    assert sf.main(["warmup", "--timeout", "0.2"]) == 1
    assert re.search(r"\r\x1b\[K  Waiting for mini: 1(\.\d)? s", capsys.readouterr().err)


def test_the_packet_goes_to_every_network_of_this_machine(monkeypatch, sleeper, quick, tmp_path, limits, run_cli):
    limits(wake=0.1)
    write_fleet(tmp_path, sleeper(wakes=False).port)
    sent = []

    def send(self, host, port, content):
        sent.append((host, port, len(content)))
        if host == "10.0.0.255":
            raise sf.NodeFailure("unreachable", "no way")
    monkeypatch.setattr(sf.World, "broadcast_addresses", lambda self: ["192.168.1.255", "10.0.0.255"])
    monkeypatch.setattr(sf.World, "send_datagram", send)
    assert run_cli("warmup", "--timeout", "0.1").returncode == 1
    assert sent == [("192.168.1.255", 9, 102), ("10.0.0.255", 9, 102)]
    monkeypatch.setattr(sf.World, "broadcast_addresses", lambda self: ["10.0.0.255"])
    assert run_cli("warmup", "--timeout", "0.1").returncode == 1  # nobody took it: that is said at once


def test_broadcast_addresses_are_this_machines(monkeypatch):
    monkeypatch.setattr(sf.World, "own_names", lambda self: ("here", ("192.168.1.7", "10.0.3.9", "8.8.8.8")))
    assert sf.World().broadcast_addresses() == ["192.168.1.255", "10.0.3.255", "255.255.255.255"]


def test_warmup_wakes_who_sleeps_before_it_loads(sleeper, quick, tmp_path, monkeypatch, capsys, towards):
    machine = sleeper()
    write_fleet(tmp_path, machine.port)
    monkeypatch.chdir(tmp_path)
    towards(machine)
    assert sf.main(["warmup", "--unload", "--timeout", "0.2"]) == 1 and machine.packets == []
    capsys.readouterr()
    assert sf.main(["warmup"]) == 0
    said = capsys.readouterr().out
    assert re.match(r"mini answered after \d s\nWarming models:\n", said) and " ok " in said
    assert machine.packets == [sf.plan_magic_packet(MAC)]


@pytest.mark.parametrize("written, kept", [
    ('"A4-83-E7-01-02-03"', MAC), (f'"{MAC}"', MAC), ("a4:83:e7:01:02:03", MAC)])
def test_a_mac_is_read_as_people_write_it(tmp_path, written, kept):
    write_fleet(tmp_path, 11434, mac=f", mac: {written}")
    assert sf.load_fleet(str(tmp_path / "fleet.yaml")).nodes["mini"].mac == kept


@pytest.mark.parametrize("written, fix", [
    ('"a483e7010203"', f'write `mac: {MAC}`'), ('"a483.e701.0203"', f"write `mac: {MAC}`"),
    ('"a4:83"', ""), ("7", "")])
def test_what_is_no_mac_is_an_error(run_cli, tmp_path, written, fix):
    write_fleet(tmp_path, 11434, mac=f", mac: {written}")
    done = run_cli("validate")
    assert done.returncode == 1 and "nodes.mini.mac" in done.stderr and fix in done.stderr
