"""The lookout, which keeps the dashboard up to date."""
from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from fleet.findings.doctor import plan_doctor
from fleet.gateway.receipts import RECEIPTS_SHOWN, plan_row
from fleet.gateway.reception import GRACE_SECONDS
from fleet.page.dashboard import Dashboard
from fleet.page.log_lines import parse_log
from fleet.page.picture import plan_picture
from fleet.page.sight import plan_sight
from fleet.plan.routes import agents_by_alias
from fleet.runs.see import see_tasks
from fleet.speech.claude_stream import questions_in
from fleet.start.constants import EXIT_USAGE, LITELLM_LOG_FILE, TICK_SECONDS
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.steps.gateway_seen import follow_events, known_key, plan_asking
from fleet.steps.warming import read_warmup
from fleet.tasks.rows import plan_task_rows
from fleet.views.observe import observe
from fleet.views.requests import AgentNames
from fleet.work.backing import plan_backing
from fleet.work.shown import TASK_MARKS, TASK_ROLES
from fleet.work.typed import open_folder
from fleet.workspace.config import find_config, load_config
from fleet.workspace.records import ReceiptsReader
from fleet.world.child import run_together
from fleet.world.places import Tail

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet, Gateway
    from fleet.runs.folder import Folder
    from fleet.start.errors import Finding
    from fleet.tasks.rows import TaskRow
    from fleet.tasks.state import TaskState
    from fleet.workspace.directory import Workspace
    from fleet.world.visitor import Listener
    from fleet.world.world import World


PAGE_PORT = 8080
PICTURE_SECONDS = 2.0  # how often machines are asked while a page is open
FINDINGS_SECONDS = 60.0

LOG_PART_BYTES = 32 * 1024


class Lookout:
    """Watches a fleet for its dashboard: machines, work, problems.

    One loop feeds the page: with the gateway's events, else with new receipts. Machines are
    asked beside it, so a dead one does not delay events.
    """

    def __init__(self, workspace: Workspace, fleet: Fleet, options: Namespace,
                 dashboard: Dashboard) -> None:
        self._world, self._workspace = workspace.world, workspace
        self._fleet, self._options, self._dashboard = fleet, options, dashboard
        self._names = AgentNames(workspace.world, agents_by_alias(fleet))
        self._file_changed = self._find_change()
        self._problems: Sequence[Finding] = ()  # errors in the fleet file as it is now
        # Opened here, so that `ui` itself reports an error.
        self._reader = ReceiptsReader(workspace)
        self._folder: Folder | None = None
        with contextlib.suppress(FleetError):  # outside of a repository there are no tasks
            self._folder = open_folder(workspace.world)
        self._is_followed = False
        self._looks: Iterator[tuple[Any, Any]] | None = None  # jobs under way
        self._look_at = self._examine_at = 0.0
        self._seen: dict[str, Any] = {}  # the latest result of each job

    def run(self) -> None:
        """Feed the page until it ends."""
        while not self._dashboard.stops:
            self._wait()
            with contextlib.suppress(FleetError):
                for receipt in self._reader.read()[-RECEIPTS_SHOWN:]:
                    self._dashboard.log.put(plan_row(receipt))
                if "view" in self._seen and self._seen["view"].page:
                    self._follow()
            if self._is_followed:
                self._is_followed = False
                self._dashboard.start_over()

    def _follow(self) -> None:
        """Pass on the gateway's events until it ends."""
        fleet = self._fleet
        key = known_key(self._workspace, fleet)
        for told in follow_events(self._world, fleet, key, self._wait):
            if self._fleet is not fleet:
                return  # the file changed: it may be another gateway
            if told.get("kind") == "hello":
                self._is_followed = True
            elif told.get("kind") in ("request", "rest") and isinstance(told.get("id"), str):
                self._dashboard.log.put(told)

    def _wait(self) -> None:
        """Wait a tick; while a page is open, ask machines regularly and show their answers."""
        now = self._world.clock()
        if not self._looks:
            if now < self._look_at or not self._dashboard.is_watched:
                self._world.sleep(TICK_SECONDS)
                return
            self._read_fleet()
            jobs = plan_asking(self._workspace, self._fleet, PICTURE_SECONDS)
            # The first picture does not wait for findings.
            if self._seen and now >= self._examine_at:
                jobs["findings"] = self._examine
                self._examine_at = now + FINDINGS_SECONDS
            self._looks = run_together(self._world, jobs)
            self._look_at = now + PICTURE_SECONDS
        with contextlib.suppress(FleetError):
            for key, answer in self._looks:
                if not key:
                    return  # a tick has passed
                self._seen[key] = answer
            self._show()
        self._looks = None

    def _find_change(self) -> float:
        """Return when the fleet file was last changed."""
        with contextlib.suppress(FleetError):
            return self._world.changed_at(find_config(self._world, self._options.config))
        return 0.0

    def _read_fleet(self) -> None:
        """Read the fleet file again if it has changed; if it is invalid, the page says so."""
        changed = self._find_change()
        if changed == self._file_changed:
            return
        self._file_changed = changed
        try:
            self._fleet = load_config(self._world, self._options.config).fleet
        except FleetError as error:
            self._problems = error.findings or (error.finding,)
            return
        self._problems = ()
        self._names = AgentNames(self._world, agents_by_alias(self._fleet))
        self._seen = {}  # results of the old file's machines
        self._examine_at = 0.0

    def _show(self) -> None:
        """Show the present state."""
        world = self._world
        tasks = self._find_tasks()
        sight = plan_sight(self._fleet, self._seen["states"], self._seen["view"], world.now())
        picture = plan_picture(replace(sight, tasks=tasks, is_followed=self._is_followed,
                                       findings=(*self._problems,
                                                 *self._seen.get("findings", ()))))
        self._dashboard.show({**picture, **self._name_askers(tasks),
                              "warmup": read_warmup(self._workspace),
                              "log": parse_log(self._read_log())})

    def _name_askers(self, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the names of agents and sessions: requests contain only ids."""
        names = {}
        begun = [task for task in tasks if task["session"]]
        titles = {task["session"]: task["name"] for task in begun}
        agents = {task["session"]: task["agent"] for task in begun}
        for each in self._dashboard.log.since(0)[1]:
            row = each.row
            if row["kind"] == "request":
                session, agent = row["session"], row["agent_id"]
                name = self._names.find(session, agent, row["alias"])
                names[session, agent] = name if agent else agents.get(session) or name
                if session not in titles:
                    titles[session] = self._names.title(session)
        return {"names": [{"session": session, "agent_id": agent, "agent": name}
                          for (session, agent), name in names.items()],
                "sessions": [{"session": session, "title": title}
                             for session, title in titles.items()]}

    def _find_tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of this directory's repository."""
        if not self._folder:
            return []
        sight = see_tasks(self._folder,
                          plan_backing(self._fleet, self._options, self._folder))
        return [report_task(row, sight.tasks[row.name])
                for row in plan_task_rows(sight)]

    def _read_log(self) -> list[bytes]:
        """Return the last lines of LiteLLM's log, if LiteLLM serves."""
        if self._fleet.gateway.provider != "litellm":
            return []
        path = self._workspace.enter(LITELLM_LOG_FILE)
        return list(Tail(self._world, path, last_bytes=LOG_PART_BYTES).lines())

    def _examine(self) -> list[Finding]:
        """Return doctor's findings."""
        facts = observe(self._workspace, self._fleet, problems=(), seconds=PICTURE_SECONDS)
        return [finding for topic, finding in plan_doctor(self._fleet, facts)
                if topic != "Config"]


def report_task(row: TaskRow, state: TaskState) -> dict[str, Any]:
    """Return a task for the page; `answers` are the commands that answer its question."""
    level = TASK_ROLES.get(row.state, "wait")
    fix = f"`{row.fix}`" if row.fix else ""
    answers = ""
    questions = (questions_in(state.wish.question.get("request", {}))
                 if row.state == "asking" else [])
    if len(questions) == 1:
        answers = "\n".join(f"{label}: {fix[:-1]} {number}`"
                            for number, label in enumerate(questions[0][1], 1))
    return {"name": row.name, "state": row.state, "mark": TASK_MARKS[level], "level": level,
            "agent": row.agent, "where": row.runs_on, "session": row.session,
            "now": row.now.removesuffix(f"; {row.fix}" if row.fix else ""),  # it has its own line
            "seconds": row.total_seconds, "diff": f"+{row.plus} -{row.minus}" if row.files else "",
            "over": state.is_over and level not in ("warn", "bad"), "fix": fix,
            "answers": answers}


def open_dashboard(workspace: Workspace, fleet: Fleet, options: Namespace, listener: Listener,
                   stops: contextlib.ExitStack) -> Dashboard:
    """Serve a fleet's page until `stops` is left, and show it in the browser."""
    dashboard = Dashboard(workspace.world, listener.host, listener.port)
    serving = threading.Thread(target=dashboard.run, args=(listener,), daemon=True)
    serving.start()
    lookout = Lookout(workspace, fleet, options, dashboard)
    threading.Thread(target=lookout.run, daemon=True).start()
    stops.callback(serving.join, GRACE_SECONDS + 1)  # callbacks run in reverse order
    stops.callback(dashboard.stop, "end")

    if not options.no_open and workspace.world.is_terminal("stderr"):
        workspace.world.open_page(dashboard.invite())
    return dashboard


def listen_for_page(world: World, gateway: Gateway, typed: int | None = None) -> Listener:
    """Return the Listener of the page: at the typed port, else the usual or next free one."""
    host = "127.0.0.1"  # the page is only for this machine
    port = PAGE_PORT if typed is None else typed
    if port == gateway.port:
        raise FleetError("usage", f"--port: {port} is the gateway's port", status=EXIT_USAGE,
                         fix=f"write --port {PAGE_PORT if port != PAGE_PORT else 0}")
    try:
        return world.listen(host, port)
    except FleetError as error:
        if error.slug != "port-taken":
            raise
        if typed is not None:
            raise FleetError("port-taken", error.what,
                             fix="subagent-fleet ui --port 0") from None
    return world.listen(host, world.find_free_port(host, PAGE_PORT))
