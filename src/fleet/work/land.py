"""Landing, for `task land` and `run --land`."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.cli.live import wait_until
from fleet.runs.landing import LANDED_BRANCH, Landing
from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.text.phrases import count_of, join_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.runs.landing import Landed
    from fleet.work.run_job import RunJob
    from fleet.world.child import Hold


def find_target(folder: Folder, chosen: str) -> str:
    """Return the branch that work lands on: the typed one, or the current branch."""
    if chosen:
        return chosen
    head = folder.world.run_git(["symbolic-ref", "--quiet", "HEAD"], folder.repository.top)
    branch = head.text.removeprefix("refs/heads/")
    taken = {state.place.branch for state in folder.read_states()[0].values()}
    if not branch or branch in taken or branch == LANDED_BRANCH:
        where = f"on `{branch}`" if branch else "on no branch"
        raise FleetError("no-target", f"your checkout is {where}, where nothing can land",
                         fix="`git switch` to the branch you mean, or, when they are done: "
                             "subagent-fleet task land --into BRANCH",
                         status=EXIT_REFUSED)
    return branch


def take_turn(folder: Folder, is_over: Callable[[], bool],
              waits: Callable[[], object]) -> Hold:
    """Return the lock of landing, after waiting for any other landing."""
    def take() -> Hold | None:
        if is_over():
            raise KeyboardInterrupt
        return folder.world.hold(folder.place("landing.lock"))

    hold = take()
    if not hold:
        waits()
        hold = wait_until(folder.world, take, pause=0.1)
    assert hold  # it waits without end
    return hold


def land(landing: Landing, folder: Folder, names: Collection[str], *, moves: bool,
         order: Callable[[Sequence[Mapping[str, Any]]], object]) -> Landed:
    """Land finished work, move the branch, and order what that means for each task."""
    states = folder.read_states()[0]
    landed = landing.land(states, names)
    where = LANDED_BRANCH
    if moves:
        landed = landing.move(landed)
        if landed.has_moved:
            where = landed.into
    # A person may have moved their branch to `run/landed` by hand.
    taken = [name for name, state in states.items() if state.place.landed == LANDED_BRANCH != where
             and name not in {*landed.returned, *landed.evicted, *landed.held}]
    orders: list[dict[str, Any]] = [
        {"do": "landed", "task": name, "into": where, "kept": states[name].place.kept}
        for name in dict.fromkeys([*landed.names, *taken]) if states[name].place.landed != where]
    for name, back in {**landed.returned, **landed.evicted}.items():
        state = states[name]
        folder.world.replace_files(
            [(folder.of_try(state, "landing.log"), f"{back.feedback}\n".encode(), 0o600)])
        if name in landed.returned:
            orders.append({
                "do": "return", "task": name, "kept": state.place.kept, "tip": back.base,
                "begin": back.begin, "files": [*back.files], "why": back.why,
                "text": back.feedback})
        else:
            orders.append({"do": "evict", "task": name, "kept": state.place.kept, "why": back.why})
    order(orders)
    return landed


def merge_passes(passes: Sequence[Landed]) -> Landed | None:
    """Return the result of several passes of one run together."""
    if not passes:
        return None
    first, last = passes[0], passes[-1]
    names = tuple(dict.fromkeys(name for one in passes for name in one.names))
    return replace(last, begin=first.begin, names=names,
                   checks=max(one.checks for one in passes))


def describe_landing(landed: Landed) -> list[str]:
    """Return sentences that say what has landed where, what has not, and what to type."""
    lines = []
    span = f"({landed.begin[:7]}..{landed.tip[:7]})"
    checked = "checked as a whole" if landed.checks else "no task has a check"
    if landed.begin == landed.tip:
        lines.append("Nothing has landed.")
    elif landed.has_moved:
        lines.append(f"{len(landed.names)} landed on {landed.into} {span}, {checked}.")
    else:
        why = f" {landed.into} was not moved: {landed.why_not}." if landed.why_not else ""
        step = f" Type: {landed.step}" if landed.step else ""
        lines.append(f"{len(landed.names)} landed on {LANDED_BRANCH} {span}, {checked}."
                     f"{why}{step}")
    if landed.returned:
        whys = "; ".join(back.why for back in landed.returned.values())
        lines.append(f"{len(landed.returned)} sent back: {whys}.")
    for name, back in landed.evicted.items():
        lines.append(f"{name} stays out, no rounds left: {back.why}. "
                     f"See why: subagent-fleet task log {name} landing")
    if landed.held:
        held = join_words([f"{name} ({why})" for name, why in landed.held.items()], "and")
        lines.append(f"{count_of(landed.held, 'task')} held: {held}.")
    return lines


class Lander:
    """Lands the tasks of a run as they get done, in its own thread."""

    def __init__(self, job: RunJob, into: str, stops: Sequence[str]) -> None:
        self._job = job
        self._into = find_target(job.folder, into)
        self._tried: set[tuple[str, str]] = set()  # work that a pass has tried: task and commit
        self._thread: threading.Thread | None = None
        self._is_left = False
        self._stops = stops
        self._has_ended = False  # the last pass, which moves the branch
        self._has_failed = False
        self.passes: list[Landed] = []

    def look(self, *, is_last: bool) -> bool:
        """Begin a pass if there is new work; tell whether a pass is running or just ended."""
        if self._thread and self._thread.is_alive():
            return True
        if self._thread:
            self._thread = None
            return True  # its orders must be carried out first
        tasks = list(self._job.supervisor.tasks.values())
        done = {(state.name, state.place.kept) for state in tasks if state.state == "done"
                and not state.place.landed and not state.wish.forgotten
                and (not self._job.only or state.name in self._job.only)}
        if not done - self._tried and (not is_last or self._has_ended):
            return False
        self._tried |= done
        self._has_ended = is_last
        self._thread = threading.Thread(target=self._land, args=[is_last], daemon=True)
        self._thread.start()
        return True

    def _land(self, moves: bool) -> None:
        supervisor, folder = self._job.supervisor, self._job.folder
        try:
            hold = take_turn(folder, self._is_over, lambda: supervisor.tell(
                "landed", "waits", "another `land` is active"))
            try:
                landing = Landing(folder, hold, self._into, tell=supervisor.tell,
                                  fleet=self._job.backing.fleet,
                                  confinement=supervisor.confinement,
                                  worktrees=self._job.backing.worktrees, is_over=self._is_over)
                self.passes.append(land(landing, folder, self._job.only, moves=moves,
                                        order=self._order))
            finally:
                hold.release()
        except KeyboardInterrupt:
            pass  # what has passed is on `run/landed`
        except FleetError as error:
            supervisor.tell("landed", "failed", f"{error.what}; {error.fix}".rstrip("; "))
            self._has_failed = True
        except Exception as error:  # a bug ends the run, with a message
            supervisor.failures.append(error)
        finally:
            with supervisor.changed:
                supervisor.changed.notify_all()

    def _order(self, orders: Sequence[Mapping[str, Any]]) -> None:
        for order in orders:
            self._job.folder.ask(order)

    def _is_over(self) -> bool:
        return self._is_left or bool(self._stops)

    def leave(self) -> None:
        """Wait for steps that must not be left half done; a running check is ended."""
        self._is_left = True
        if self._thread:
            self._thread.join(10.0)

    def sum_up(self) -> tuple[list[str], bool]:
        """Return sentences that say what has landed, and whether everything has."""
        landed = merge_passes(self.passes)
        if not landed:
            return [], not self._has_failed
        return describe_landing(landed), landed.is_good and not self._has_failed
