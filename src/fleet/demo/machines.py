"""The simulated machines of the demo, and its world."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.demo.node import SimulatedNode
from fleet.demo.pace import Pace
from fleet.start.record import Record
from fleet.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet.world.visitor import Listener


class DemoMachine(Record):
    """A machine that the demo simulates."""

    model: str
    told: Mapping[str, Any]
    pace: Pace


# Their names say what they are, so that every line that names one does.
DEMO_MACHINES = {
    "sim-laptop": DemoMachine("qwen3:8b", {
        "size": 5_200_000_000, "parameters": "8.2B", "family": "qwen3", "context": 40960},
        Pace(0.2, 1500.0, 45.0)),
    "sim-mini": DemoMachine("qwen3-coder:30b", {
        "size": 18_600_000_000, "parameters": "30.5B", "family": "qwen3moe",
        "context": 262144},
        Pace(0.3, 2000.0, 60.0)),
    "sim-gpu": DemoMachine("devstral:24b", {
        "size": 14_300_000_000, "parameters": "23.6B", "family": "llama", "context": 131072},
        Pace(0.3, 4000.0, 70.0))}
DEMO_WORDS = ("The session cookie is set before the redirect, so the next page asks for the "
              "login again and it never ends; it must be set behind it. ").split(" ")


class DemoNode(SimulatedNode):
    """A simulated node whose model says some words and calls each of its tools."""

    def __init__(self, world: World, machine: DemoMachine, tokens: int) -> None:
        self.tokens = tokens  # of an answer
        super().__init__(world, {machine.model: machine.told}, pace=machine.pace)

    def reply(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        words = [DEMO_WORDS[index % len(DEMO_WORDS)] for index in range(self.tokens)]
        pieces: list[dict[str, Any]] = [{"content": f"{word} "} for word in words]
        for tool in payload.get("tools", ()):
            call = {"function": {"name": tool["function"]["name"], "arguments": {}}}
            pieces.append({"content": "", "tool_calls": [call]})
        return pieces


class DemoWorld(World):
    """The terminal and the browser as they are; a home, a port, an environment of its own.

    No program is found but for tasks, no question asked; what a command says goes where
    what it prints goes.
    """

    def __init__(self, outer: World, home: str, ollama: str) -> None:
        super().__init__()
        self._outer = outer
        kept = ("TERM", "NO_COLOR", "FORCE_COLOR", "OS", "WT_SESSION", "ConEmuANSI")
        self.environ = {name: outer.environ[name] for name in kept if name in outer.environ}
        self.environ.update(HOME=home, PATH="", OLLAMA_HOST=ollama)
        self.said = ""
        self.is_quiet = False
        self.stop: Callable[[str], object] = lambda name: None  # of the command that serves
        self.door = self.listen("127.0.0.1", 0)

    def out(self, text: str) -> None:
        self.said += text
        if not self.is_quiet:
            super().out(text)

    def err(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # in a thread nobody would hear of it
            self.out(text)

    def find_programs(self, place: str) -> None:
        """Find programs where a person's shell does, those in a directory of ours first."""
        self.environ["PATH"] = f"{place}:{self._outer.environ.get('PATH', '')}"

    def own_names(self) -> tuple[str, tuple[str, ...]]:
        return "simulated", ()

    def confirm(self, question: str, text: str = "") -> bool:
        self.out(f"{text}{question} [y/N] y\n")
        return True

    def open_page(self, url: str) -> bool:
        return self._outer.open_page(url)  # by a program, which is not found from here

    def on_stop(self, callback: Callable[[str], object]) -> None:
        self.stop = callback

    def listen(self, host: str, port: int) -> Listener:
        """Return the Listener of a port; the gateway's own was taken at the beginning."""
        if port and port == self.door.port:
            return self.door
        return super().listen(host, port)
