"""All tasks of a repository: threads, the lock, orders."""
from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import (
    AGENT_MEGABYTES,
    ATTACHED_PROMPT,
    SETTLE_SECONDS,
    describe_error,
    slug_of,
)
from fleet.runs.folder import Asleep, find_commit
from fleet.runs.git import git_of
from fleet.runs.keeper import TaskKeeper
from fleet.runs.place import git_in
from fleet.runs.snapshot import settle_branch
from fleet.runs.task import TaskWork
from fleet.speech.claude_stream import CHANGED_PROMPT
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.ladder import plan_rungs
from fleet.tasks.landing import climbs_to_land
from fleet.tasks.next import Limits, blockers_of, explain_wait, plan_starts
from fleet.tasks.spec import find_name, is_another, plan_slots
from fleet.tasks.state import (
    TERMINAL_STATES,
    UNREADABLE,
    TaskState,
    can_accept,
    freeze,
    plan_fresh,
    revise_task,
    thaw_task,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.runs.agent import Backing
    from fleet.runs.folder import Folder
    from fleet.world.world import World


# Takes tasks; runs an agent in a worktree for each. Whoever holds the lock of a repository's
# run folder is its supervisor, the one writer of its tasks. How it thinks:
#
# - Each task is a file, `tasks/NAME/state.json`, replaced whole *before* each step is taken.
#   So whenever this process ends, even by kill -9, the next one enters the same function,
#   `TaskWork.run`, at the step that the file names. Agents hang on files and a named pipe,
#   never on us.
# - Each task at work has a thread of its own, which may wait: for git, for setup,
#   for an agent.
# - What other commands want of a task is a file in `inbox/`; the main thread writes it into
#   the task's state, where the task's thread finds it.
# - An agent works in one worktree; its check runs in another, which is put to the
#   snapshot that was taken of the first. So what is checked is what is kept, whatever
#   else lies around.

# What a person says of a task, as a change of its state; who is at work on it finds it there.
WISHES: dict[str, Callable[[TaskState, Mapping[str, Any]], dict[str, Any]]] = {
    "say": lambda state, order: {"says": (*state.says, str(order.get("text", ""))),
                                 "wanted": "go" if state.is_over else state.wanted},
    "stop": lambda state, order: {
        "wanted": state.wanted if state.is_over and state.cause != "still-alive" else "stop"},
    "attach": lambda state, order: {"wanted": "" if state.state == "attached" else "attach"},
    "forget": lambda state, order: {"forgotten": state.is_over}}

def find_limits(world: World, backing: Backing, tasks: Mapping[str, TaskState],
                page: Mapping[str, Any]) -> Limits:
    """Return how much may happen at the same time; the gateway's page says who rests."""
    slots = plan_slots(backing.fleet)
    most = backing.most
    if not most:
        memory = world.free_megabytes() // AGENT_MEGABYTES
        most = max(1, min(sum(slots.values()) or 8, memory or 64))
    rests: dict[str, list[float]] = {}
    for model in page.get("models", ()):
        rests.setdefault(str(model.get("alias")), []).append(model.get("rests_seconds") or 0)
    return Limits(slots, most, {
        alias: f"no machine answers, next try in {min(seconds):.0f} s"
        for alias, seconds in rests.items() if all(seconds)},
        {name: plan_rungs(state, backing.fleet) for name, state in tasks.items()})


def base_of(task: TaskSpec, folder: Folder, where: str = "") -> str:
    """Return the commit that a task starts from; `where` says so in its file."""
    base = "HEAD" if task.base in (None, "after") else task.base
    return find_commit(folder.world, folder.repository, base or "HEAD", where)


def find_merged(folder: Folder, tasks: Mapping[str, TaskState]) -> list[str]:
    """Return tasks in review whose branches a person merged into the branch they are on."""
    git = git_of(folder)
    reviews = [state for state in list(tasks.values())
               if state.state == "review" and state.kept not in ("", state.base)]
    # Who has only gone to a commit, or to a task's branch, looks at it.
    home = git.run("symbolic-ref", "--quiet", "HEAD").text if reviews else ""
    return [state.name for state in reviews
            if home not in ("", f"refs/heads/{state.branch}") and git.commit_of(home)
            and git.commit_of(state.kept) and git.is_ancestor(state.kept, home)]


class Supervisor(TaskKeeper):
    """Works on the tasks of one repository as long as it holds the lock."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self._recover()

    def leave(self) -> None:
        """Give up the lock; agents go on, and so does a git that takes long."""
        with self.changed:
            self._leaves = True
            self.changed.notify_all()
        until = self._world.clock() + SETTLE_SECONDS
        for thread in list(self._threads.values()):
            thread.join(max(0.0, until - self._world.clock()))
        self._lock.release()

    # -- one look at everything --

    def step(self) -> bool:
        """Do what can be done now, and start threads for what takes time; tell if it did."""
        if self.failures:
            raise self.failures[0]
        did = self._take_orders()
        self._reload()
        self._keep_serving()
        self._end_attachments()
        if self._takes_new and self._is_due("merged", 5.0):
            for name in find_merged(self.folder, self.tasks):
                self.write(name, "done", reason="merged")
                self.tell(name, "done", "its branch is merged")
        return self._start_ready() or did

    def _keep_serving(self) -> None:
        """Start a gateway where the one that agents use has gone, such as that of an `up`."""
        needs = any(state.is_active and isinstance(state.task.coder, str)
                    for state in list(self.tasks.values()))
        if not (self.backing.fleet and needs and self._is_due("served", 0.5)):
            return
        page = self.backing.look()
        if page:
            self._page = page
            self._is_served = True
            return
        try:
            self.backing.serve()
            self._is_served = True
        except FleetError as error:
            if self._is_served:
                self.tell("", "not served", describe_error(error))
            self._is_served = False

    def _end_attachments(self) -> None:
        """Take tasks back from persons whose terminals have gone without a word."""
        for name, state in list(self.tasks.items()):
            if state.state == "attached" and not self._world.is_held(
                    self.folder.of_task(name, "attached")):
                with self.changed:
                    self._order_detach(self.tasks[name], {})

    @property
    def is_busy(self) -> bool:
        """Whether anything is being done."""
        with self.changed:  # a thread that ends may just let its task wait again
            return bool(self._threads)

    @property
    def waits_for_time(self) -> bool:
        """Whether a task waits for its time, for a machine that rests, or for its person."""
        return self._takes_new and any(
            state.state == "attached" or state.state == "waiting" and self._may_begin(state.name)
            and not blockers_of(state, self.tasks) for state in list(self.tasks.values()))

    def _may_begin(self, name: str) -> bool:
        """Tell whether a task is one that is meant, and nothing is at work on it."""
        return (self._only is None or name in self._only) and name not in self._threads

    def _begin(self, name: str) -> None:
        """Start the thread of a task."""
        work = TaskWork(self, name)
        thread = threading.Thread(target=work.run, name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def _grant(self, name: str) -> None:
        """Do what a person wants of a task; what could not be ended needs a thread again."""
        state = self.tasks[name]
        is_free = name not in self._threads and not self._leaves
        if state.wanted == "stop" and state.is_over and is_free:
            self._begin(name)
        else:
            super()._grant(name)

    def _recover(self) -> None:
        """Take up every task that was at work, where its state says it is."""
        for name, state in list(self.tasks.items()):
            if state.is_active:  # whoever was meant: nobody else looks after it
                self._begin(name)
            elif not self._world.is_held(self.folder.of_task(name, "attached")):
                self._order_detach(state, {})
            self._grant(name)

    def _start_ready(self) -> bool:
        """Begin with the tasks that can start, and say once what the others wait for."""
        states = {name: state for name, state in self.tasks.items()
                  if state.state != "waiting" or self._may_begin(name)}
        waiting = [state for state in states.values() if state.state == "waiting"]
        if not self._takes_new or not waiting:
            return False
        limits = find_limits(self._world, self.backing, self.tasks, self._look_at_gateway())
        now = self._world.now()
        starts = plan_starts(states, limits, now)
        for name, rung in starts.items():
            self._told.discard(name)
            with self.changed:  # a thread that ends may just give it to a person
                if self.tasks[name].state == "waiting":
                    self.remember(name, state="preparing", rung=rung)
                    self._begin(name)
        for state in waiting[:20]:
            name = state.name
            if name not in {*starts, *self._told} and state.until <= now:
                self._told.add(name)
                self.tell(name, "waits", explain_wait(state, self.tasks, limits.after(starts), now))
        return bool(starts)

    # -- what other commands ask for --

    def _take_orders(self) -> bool:
        """Write into the states what was asked for since; tell whether there was anything."""
        did = False
        for identity, order in self.folder.read_orders():
            did = True
            name, do = str(order.get("task")), order.get("do")
            most = order.get("most")
            if do == "limit" and isinstance(most, int) and most > 0:
                self.backing = replace(self.backing, most=most)
            elif self._only is not None and (do != "add" or order.get("handed")):
                self._only.add(name)
            try:
                if do == "add":
                    self.accept(order.get("spec"), str(order.get("base", "")),
                                str(order.get("origin", "typed")))
                elif name in self.tasks:
                    self._obey(name, identity, order)
            except Asleep:
                raise
            except Exception as error:  # it holds up no other order
                if slug_of(error) in ("disk-full", "unwritable"):
                    raise  # it is carried out once it can be written down
                self.tell(name, "not read", describe_error(error))
            self._world.remove(self.folder.place("inbox", identity))
        return did

    def _obey(self, name: str, identity: str, order: Mapping[str, Any]) -> None:
        """Obey an order once."""
        with self.changed:
            if identity in self.tasks[name].orders or self.tasks[name].state == UNREADABLE:
                return
            # Both in one change: the order is in the state, or it comes again.
            state = self.remember(name, orders=(*self.tasks[name].orders[-9:], identity))
            do = str(order.get("do"))
            handler = getattr(self, f"_order_{do}", None)
            if handler:
                handler(state, order)
            if self.tasks[name] is state:
                self.write(name, **(WISHES[do](state, order) if do in WISHES else {}))
            self._grant(name)

    def accept(self, spec: object, base: str, origin: str = "typed") -> None:
        """Accept a task, or a newer form of one."""
        task = thaw_task(spec)
        if task is None or not re.fullmatch("[0-9a-f]{40,64}", base):
            return
        with self.changed:
            old = self.tasks.get(task.name)
            other = find_name(task.name, self.tasks)
            if old is None and other:
                self.tell(task.name, "not read", f"there is already a task `{other}`")
                return
            if old and old.state == UNREADABLE:
                self.tell(task.name, "not read", old.reason)
                return
            if old and is_another(old, task, origin):
                self.tell(task.name, "not read", "another task of this name was typed before")
                return
            if old is None:
                now = self._world.now()
                order = max((state.order for state in self.tasks.values()), default=-1) + 1
                self._keep(TaskState(task.name, task, order, origin, at=now, base=base))
                return
            new = revise_task(old, task, origin)
            if new == old:
                return
            if new.state == "waiting" and not new.start:
                new = replace(new, base=base)
            self._keep(new)
        if new.newer:
            self.tell(task.name, "note", "tasks.yaml changed. Only deadline, stall and check "
                      f"apply now; `subagent-fleet task retry {task.name}` takes the rest")

    def _reload(self) -> None:
        """Take over what has changed in the task file; one that is invalid is told once."""
        try:
            plan = self.backing.reload()
        except FleetError as error:
            self.tell("", "not read", error.what)
            return
        if plan is None:
            return
        self.backing = replace(self.backing, most=plan.file.max or self.backing.most,
                               cloud_limit=plan.file.cloud_limit)
        for name, task in plan.tasks.items():
            if self._only is not None and name not in self.tasks:
                continue  # nobody asked for it
            try:
                self.accept(freeze(task), base_of(task, self.folder), "file")
            except FleetError as error:
                self.tell(name, "not read", error.what)
        for name, state in list(self.tasks.items()):
            if (state.origin == "file" and name not in plan.tasks and state.state == "waiting"
                    and not state.tried):
                self.write(name, "stopped", reason="removed from the task file",
                           forgotten=True)
                self.tell(name, "removed", "it is no longer in the task file")

    def _order_answer(self, state: TaskState, order: Mapping[str, Any]) -> None:
        answers = order.get("answers")
        if state.state == "asking" and isinstance(answers, dict):
            self.write(state.name, answer={str(question): str(answer)
                                          for question, answer in answers.items()})

    def _order_detach(self, state: TaskState, order: Mapping[str, Any]) -> None:
        """Give a task back to its supervisor; looking alone changes nothing."""
        if state.state != "attached":
            return
        if state.before not in TERMINAL_STATES:
            self.write(state.name, "waiting", prompt=ATTACHED_PROMPT, spoken=True, before="")
        elif order.get("changed") is not False:
            self.write(state.name, "waiting", recheck=True, open=False, before="")
        else:
            self.write(state.name, state.before, reason=state.reason, cause=state.cause,
                       before="")

    def _order_retry(self, state: TaskState, order: Mapping[str, Any]) -> None:
        if not state.is_over:
            return
        task = thaw_task(order.get("spec")) or state.newer or state.task
        prompt = ""
        if order.get("fresh"):
            state = plan_fresh(state)
        elif task.prompt != state.task.prompt and state.spoken:
            prompt = CHANGED_PROMPT.format(prompt=task.prompt)
        elif state.state != "done" and state.reason and state.cause not in ("", "lost"):
            prompt = f"The last try ended: {state.reason}. Try again."
        says = (*state.says, *filter(None, [str(order.get("say") or "")]))
        self.tasks[state.name] = replace(state, task=task, newer=None)
        self.write(state.name, "waiting", open=False, failures=0, lost=0, api_errors=0,
                   returned=0,
                   wanted="", prompt=prompt, says=says, forgotten=False)

    def _order_landed(self, state: TaskState, order: Mapping[str, Any]) -> None:
        """Note that the work of a task has landed."""
        if state.state == "done" and order.get("kept") == state.kept:
            into = str(order.get("into"))
            self.write(state.name, landed=into, reason=f"landed on {into}", cause="")

    def _order_evict(self, state: TaskState, order: Mapping[str, Any]) -> None:
        """Note why the work of a task stays out of what has landed."""
        if state.state == "done" and order.get("kept") == state.kept:
            self.write(state.name, reason=f"did not land: {order.get('why')}", cause="landing")

    def _order_return(self, state: TaskState, order: Mapping[str, Any]) -> None:
        """Let an agent go on with work that did not land, on top of what did.

        Its new worktree begins with both, merged as far as git could; what it changes is
        told from what has landed by its new base.
        """
        begin, tip, files = order.get("begin"), order.get("tip"), order.get("files")
        if state.state != "done" or order.get("kept") != state.kept:
            return
        fresh = plan_fresh(state)
        rungs: dict[str, Any] = {"rung": state.rung, "climbed": state.climbed,
                                 "returned": state.returned + 1}
        if climbs_to_land(state, self.backing.fleet):
            rungs = {"climbed": (*state.climbed, state.rung), "returned": 1}
        self.tasks[state.name] = replace(
            fresh, base=str(tip), start=str(tip), kept=str(begin), told=state.told, **rungs,
            conflicts=tuple(map(str, files)) if isinstance(files, list) else ())
        self.write(state.name, "waiting", reason=str(order.get("why")),
                   prompt=str(order.get("text")))
        self.tell(state.name, "sent back", str(order.get("why")))

    def _order_accept(self, state: TaskState, order: Mapping[str, Any]) -> None:
        if not can_accept(state):
            return
        git = None
        with contextlib.suppress(FleetError):
            git = git_in(self.folder, state)
        try:
            is_there = settle_branch(git, git_of(self.folder), state, state.kept)
        except FleetError as error:
            self.write(state.name, reason=describe_error(error), cause=error.slug)
            return
        if is_there:
            self.write(state.name, "done", reason="accepted")
            self.tell(state.name, "done", "accepted")
        else:
            self.write(state.name, reason=f"the branch {state.branch} has moved meanwhile",
                       cause="branch-moved")

    def _order_gone(self, state: TaskState, order: Mapping[str, Any]) -> None:
        if order.get("git") == state.git:
            self.write(state.name, prepared=False, git="", check_git="")
        else:  # one of before a fresh start
            self.write(state.name, old=tuple(
                place for place in state.old if place.split("\n")[2] != order.get("git")))
