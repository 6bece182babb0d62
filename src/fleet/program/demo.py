"""`demo`: the whole thing with nothing installed; it types commands."""
from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING

from fleet.cli.live import wait_until
from fleet.cli.rows import SECONDS, START, Flag, command
from fleet.demo.machines import DEMO_MACHINES, DemoNode, DemoWorld
from fleet.demo.play import DemoSession, demo_broken, play_session
from fleet.demo.tasks import DEMO_CHECK, DEMO_TASKS, prepare_tasks
from fleet.gateway.reception import GRACE_SECONDS
from fleet.program.parse import run_words
from fleet.start.constants import (
    CONFIG_NAMES,
    ENVIRONMENT_FILE,
    EXIT_OK,
    LITELLM_FILE,
    PROBE_TIMEOUT_SECONDS,
)
from fleet.text.phrases import quote_shell
from fleet.text.tables import format_words, wrap_text
from fleet.text.terminal import Cell, paint
from fleet.views.lookout import listen_for_page, open_dashboard
from fleet.workspace.claude import claude_directory, project_name
from fleet.workspace.config import load_config, look_of
from fleet.workspace.directory import Workspace
from fleet.workspace.records import read_receipts
from fleet.world.places import PrivateDirectory

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Collection, Mapping

    from fleet.config.sections import Fleet
    from fleet.demo.node import SimulatedNode
    from fleet.world.world import World


DEMO_TOKENS = 4  # of an answer; more when somebody watches
DEMO_SECONDS = 3.0  # how long a session of such answers takes
DEMO_PAUSE_SECONDS = 1.5  # to read, on a terminal
WATCHED_SECONDS = 30.0


class Tour:
    """Types the demo's commands one after the other, and checks that each works."""

    def __init__(self, world: DemoWorld, pause: float) -> None:
        self.world, self._pause = world, pause
        self._serving: threading.Thread | None = None
        self._end_serving: Callable[[str], object] = lambda name: None

    def tell(self, text: str) -> None:
        """Announce the next step; on a terminal, leave time to read."""
        self.world.sleep(self._pause)
        self.world.out("\n" + format_words([Cell(text, "bold")], look_of(self.world)))

    def type(self, *words: str) -> None:
        """Type a command."""
        self.world.sleep(self._pause)
        shown = " ".join(map(quote_shell, words))
        self.world.out(paint(f"\n$ subagent-fleet {shown}\n", "bold", look_of(self.world)))
        status = run_words(list(words), self.world)
        self.see(status == EXIT_OK, f"`{words[0]}` ended with {status}, not with 0")

    def see(self, is_so: object, what: str) -> None:
        """Stop the demo if something is not as it was shown."""
        if not is_so:
            raise demo_broken(what)

    def serve(self) -> None:
        """Start `serve`, which keeps running."""
        def run() -> None:
            with contextlib.suppress(BrokenPipeError):
                run_words(["serve", "--verbose"], self.world)

        self.world.out("\n$ subagent-fleet serve --verbose &\n")
        self._serving = threading.Thread(target=run, daemon=True)
        self._serving.start()
        serving = self._serving
        wait_until(self.world, lambda: "Serving" in self.world.said or not serving.is_alive(),
                   seconds=PROBE_TIMEOUT_SECONDS, pause=0.01)
        self.see("Serving" in self.world.said, "`serve` does not serve")
        self._end_serving = self.world.stop

    def stop(self) -> None:
        """Stop the gateway, as Ctrl-C does; it prints its totals."""
        if self._serving:
            self._end_serving("SIGINT")
            self._serving.join(GRACE_SECONDS)
            self._serving = None


@command("demo", "see it all on simulated machines, in 30 seconds",
         Flag("--seconds", f"about how long; else {WATCHED_SECONDS:.0f} on a "
              "terminal, a few off it", "S", {**SECONDS, "default": 0.0}),
         Flag("--ui", "with the dashboard, one session after the other, until Ctrl-C"),
         group=START, examples=("demo", "demo --ui", "demo --seconds 60"))
def cmd_demo(options: Namespace, world: World) -> int:
    until = world.clock() + (options.seconds or float("inf")) if options.ui else 0.0
    seconds = options.seconds or DEMO_SECONDS
    if not options.seconds and (options.ui or world.is_terminal()):
        seconds = WATCHED_SECONDS
    tokens = max(round(DEMO_TOKENS * seconds / 2 / DEMO_SECONDS), DEMO_TOKENS)
    pause = (DEMO_PAUSE_SECONDS * seconds / WATCHED_SECONDS
             if seconds > 2 * DEMO_SECONDS else 0.0)
    with contextlib.ExitStack() as ending:
        place = ending.enter_context(PrivateDirectory())
        project = world.path(place, "shop")
        # The search for a fleet file ends at this directory.
        world.make_directory(world.path(project, ".git"))
        ending.enter_context(world.visit(project))
        nodes = {}
        for name, machine in DEMO_MACHINES.items():
            nodes[name] = DemoNode(world, machine, tokens)
            ending.callback(nodes[name].close)
        demo = DemoWorld(world, world.path(place, "home"), nodes["sim-laptop"].endpoint)
        ending.callback(demo.door.close)
        tour = Tour(demo, pause)
        ending.callback(tour.stop)
        fleet = show_demo_fleet(tour, nodes)
        if options.ui:
            listener = listen_for_page(demo, fleet.gateway)
            dashboard = open_dashboard(Workspace(demo, "."), fleet, options, listener, ending)
            demo.out(f"\nDashboard: {dashboard.invite()}\n")
        show_demo_tasks(tour, world.path(place, "bin"), nodes)
        show_demo_sessions(tour, fleet, nodes["sim-mini"], until)
    text = ("\nThe demo is over and its files are deleted. "
            "`subagent-fleet up` does this with your own machines.\n")
    world.out(wrap_text(text, look_of(world)))
    return EXIT_OK


def show_demo_fleet(tour: Tour, nodes: Mapping[str, SimulatedNode]) -> Fleet:
    """Show how a fleet is set up: found, written, checked, generated for, loaded, served."""
    world = tour.world
    tour.tell("Three simulated machines, the real commands, and a script that plays Claude "
              "Code, in a temporary directory. Nothing leaves this machine.")
    tour.type("init", *(f"--node={name}={node.endpoint}" for name, node in nodes.items()))
    text = world.read_bytes(CONFIG_NAMES[0]).decode("utf-8")
    text = re.sub(r"(?m)^( +port: )\d+", rf"\g<1>{world.door.port}", text)
    world.replace_files([(CONFIG_NAMES[0], text.encode("utf-8"), 0o644)])
    world.out(f"(Gateway port: {world.door.port}, because 4000 may be in use.)\n")

    tour.type("validate")
    fleet = load_config(world, None).fleet
    tour.see({model.node for model in fleet.models.values()} == set(nodes), "a machine idles")
    tour.type("generate")
    for agent in fleet.agents:
        tour.see(world.kind_of(f".claude/agents/{agent}.md") == "file",
                 f"no file for {agent}")
    tour.type("warmup")
    tour.see(all(node.loaded for node in nodes.values()), "not every model was loaded")
    tour.serve()
    tour.type("status", "--check")
    return fleet


def show_demo_tasks(tour: Tour, place: str, nodes: Collection[str]) -> None:
    """Show tasks that are done on all machines and land as one branch; look what landed."""
    world = tour.world
    missing = prepare_tasks(world, place)
    if missing:
        world.out(f"\n(Tasks are not shown: {missing}.)\n")
        return
    tour.tell("Three tasks, one check, one branch: each machine does a task in a worktree, and "
              "what is done is merged, checked as a whole, and landed.")
    try:
        tour.type("run", *(f"{name}:{prompt}" for name, prompt in DEMO_TASKS.items()),
                  "--check", DEMO_CHECK, "--land")
    except BaseException:
        world.is_quiet = True
        run_words(["task", "stop", "*"], world)  # else the agents go on, as they should
        raise
    landed = world.run_git(["log", "--first-parent", "--format=%s", "main"], ".").text
    wanted = [f"{name}: {prompt}" for name, prompt in DEMO_TASKS.items()]
    tour.see(sorted(landed.splitlines()) == sorted([*wanted, "start"]),
             "the tasks did not land")
    for name in DEMO_TASKS:
        tour.see(world.kind_of(f"{name}.md") == "file"
                 and world.read_bytes(f"{name}.md").strip(),
                 f"what {name} wrote is not there")
    receipts = read_receipts(Workspace(world, "."))
    tour.see({receipt.node for receipt in receipts} == set(nodes), "a machine had no task")
    world.environ["PATH"] = ""


def show_demo_sessions(tour: Tour, fleet: Fleet, mini: SimulatedNode, until: float) -> None:
    """Show running sessions and which machine served which agent; check that nothing is left."""
    world = tour.world
    key = Workspace(world, ".").read_key(fleet)
    place = world.path(claude_directory(world), "projects", project_name(world, "."))
    session = DemoSession(world, fleet, key, place)
    play_session(session, mini, tour.tell)
    receipts = read_receipts(Workspace(world, "."), session.id)
    worked = [receipt for receipt in receipts if receipt.agent_id.startswith("implementer")]
    tour.see(any((receipt.waited_seconds or 0) > 0.05
                 for receipt in worked if not receipt.failures),
             "no implementer waited")
    tour.see(any(tried.node == "sim-mini" for receipt in receipts for tried in receipt.failures),
             "nobody noticed that sim-mini was asleep")
    tour.see({receipt.node for receipt in worked} == {"sim-mini", "sim-gpu"},
             "the work of sim-mini did not go on elsewhere")
    tour.see(all(receipt.outcome == "ok" for receipt in receipts), "a request failed")
    while world.clock() < until:
        world.sleep(DEMO_PAUSE_SECONDS)
        play_session(DemoSession(world, fleet, key, place), mini, tour.tell)

    tour.stop()
    tour.type("trace", "last")  # the tree of the session stays the last thing to see
    world.is_quiet = True
    tour.type("trace", "--audit")
    tour.type("clean", "--force")
    left = [target for target in (LITELLM_FILE, ENVIRONMENT_FILE, ".claude")
            if world.kind_of(target) != "absent"]
    tour.see(not left, f"`clean` left {', '.join(left)}")
