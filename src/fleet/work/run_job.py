"""One repository that `run` works on."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.live import wait_until
from fleet.cli.rows import name_of
from fleet.cli.say import check_names, tell
from fleet.runs.agent import LOCK_SECONDS
from fleet.runs.confine import Confinement
from fleet.runs.folder import TASK_FILES
from fleet.runs.git import git_of
from fleet.runs.supervisor import Supervisor
from fleet.start.constants import (
    CONFIG_NAMES,
    ENVIRONMENT_FILE,
    EXIT_REFUSED,
    EXIT_USAGE,
    LITELLM_FILE,
    STATE_DIRECTORY,
)
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.hints import RunOptions
from fleet.tasks.spec import expand_names, is_another
from fleet.tasks.state import UNREADABLE
from fleet.text.json import parse_object
from fleet.text.phrases import count_of, quote_shell, some_of
from fleet.text.tables import format_finding
from fleet.text.terminal import clean_line
from fleet.work.backing import end_serving, is_served, need_key, plan_backing, workspace_of
from fleet.work.land import find_target
from fleet.work.run_words import tell_events, watch_tasks
from fleet.work.typed import (
    ADD_A_TASK,
    TASK_WORDS,
    know_tasks,
    open_tasks,
    order_of,
    plan_typed_tasks,
    refuse_unquoted,
    split_name,
)
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    import threading
    from argparse import Namespace
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.runs.agent import Backing
    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.work.typed import KnownTasks
    from fleet.world.child import Hold
    from fleet.world.places import Tail
    from fleet.world.world import World


def tell_trouble(folder: Folder, error: FleetError) -> None:
    """Say what is wrong in one repository; the others continue."""
    text = format_finding((*error.findings, error.finding)[0],
                          look=look_of(folder.world, "stderr"))
    folder.world.err(f"{clean_line(folder.repository.main)}: {text}")


def refuse_idle(options: Namespace, known: KnownTasks) -> None:
    """Refuse flags for new tasks if no new task is typed."""
    idle = [flag.name for flag in TASK_WORDS if getattr(options, name_of(flag))]
    if not idle:
        return
    fix = ADD_A_TASK
    if known.path and idle[0] != "--name":
        key = "setup: []" if idle[0] == "--no-setup" else f"{idle[0].lstrip('-')}:"
        fix = f"write `{key}` below `defaults:`, or below a task, in {known.path}"
    elif idle == ["--check"] and options.words:
        fix = f"subagent-fleet task retry {options.words[0]} --check {quote_shell(options.check)}"
    raise FleetError("usage", f"run: {some_of(idle)}: for new tasks only", status=EXIT_USAGE,
                     fix=fix)


def split_words(options: Namespace, known: KnownTasks) -> tuple[list[str], list[str]]:
    """Return (prompts of new tasks, names of existing tasks) from the typed words."""
    prompts = [word for word in options.words if word not in known.names
               and (" " in word.strip() or split_name(word)[0])]
    only = [word for word in options.words if word not in prompts]
    if prompts and only:
        raise FleetError("usage", "run: either names of tasks or new tasks, not both",
                         status=EXIT_USAGE, fix="run one after the other")
    refuse_unquoted(only, known.names, options, "words")
    check_names("task", only, known.names, "run",
                "for a new one: subagent-fleet run '{}:what to do'")
    if not prompts:
        refuse_idle(options, known)
    return prompts, only


def back_run(folder: Folder, known: KnownTasks, tasks: Mapping[str, TaskSpec],
             options: Namespace) -> Backing:
    """Return the services for a run, after a person has agreed to what they involve."""
    world, fleet, file = folder.world, known.fleet, known.plan.file
    backing = replace(
        plan_backing(fleet, options, folder), most=options.most or file.max or 0,
        cloud_limit=file.cloud_limit, notify=file.notify, worktrees=file.worktrees or "",
        tell=tell_events(folder, {*known.states, *tasks}, options),
        reload=watch_tasks(world, known.path, fleet, file.max, options))
    backing = replace(backing, confinement=confine_tasks(folder, tasks))
    if fleet and any(isinstance(task.coder, str) for task in tasks.values()):
        ask_trust(fleet, options, world)
        backing = replace(backing, key=need_key(workspace_of(fleet, options, world), fleet))
        # The first task starts it: nothing would end it if this was interrupted before.
        is_served(world, fleet, backing.key)
        return backing
    refuse_keyless_aider(tasks, folder)
    if any(task.talks for task in tasks.values()) and folder.is_news("no fleet"):
        tell(world, "No fleet.yaml here: agents use their own login and model.\n")
    return backing


def confine_tasks(folder: Folder, tasks: Mapping[str, TaskSpec]) -> Confinement:
    """Find out whether commands are confined here; if not, say so once, or refuse."""
    confinement = Confinement(folder)
    if all(task.sandbox == "off" for task in tasks.values()) or confinement.find():
        return confinement
    names = [name for name, task in tasks.items() if task.sandbox == "required"]
    if names:
        raise confinement.demand(some_of(names, 3))
    if folder.is_news(f"not confined: {confinement.reason}"):
        tell(folder.world, "Commands are not confined on this machine: "
             f"{clean_line(confinement.reason)}.\n")
    return confinement


AIDER_FILES = (".aider.conf.yml", ".env")  # in which aider looks for a model or a key


def refuse_keyless_aider(tasks: Mapping[str, TaskSpec], folder: Folder) -> None:
    """Refuse aider if it would wait five minutes for a login in a browser (0.86.2)."""
    world = folder.world
    names = [name for name, task in tasks.items() if task.coder == "aider" and not task.model]
    if not names or any(word.endswith("_API_KEY") for word in world.environ):
        return
    if any(world.kind_of(world.path(place, name)) == "file"
           for place in (world.home, folder.repository.main) for name in AIDER_FILES):
        return
    raise FleetError("coder-login", f"{some_of(names, 3)}: aider has no model and no key, and "
                     "would wait for a login in a browser", status=EXIT_REFUSED,
                     fix="export OPENAI_API_KEY=… (or another provider's); or subagent-fleet "
                         "init, for models of your own")


def tell_dirty(folder: Folder) -> None:
    """Say that uncommitted changes are in no worktree."""
    listed = git_of(folder).names("status", "--porcelain=v1", "-z", "--no-renames")
    own = (*TASK_FILES, *CONFIG_NAMES, ENVIRONMENT_FILE, LITELLM_FILE, f"{STATE_DIRECTORY}/",
           ".claude/", ".gitignore")
    changed = [entry[3:] for entry in listed if entry[3:] not in own]
    if changed:
        tell(folder.world, "Agents start from the last commit, without "
             f"{count_of(changed, 'changed file')}: {clean_line(some_of(changed, 3))}.\n")


def refuse_bypass(tasks: Mapping[str, TaskSpec], world: World) -> None:
    """Refuse `permission: bypass` for root, as Claude Code does (2.1.327)."""
    names = [name for name, task in tasks.items()
             if task.permission == "bypass" and task.talks]
    if names and world.is_root and world.environ.get("IS_SANDBOX") != "1":
        raise FleetError("bypass-as-root", f"{some_of(names, 3)}: `permission: bypass` as "
                         "root would let an agent do everything", status=EXIT_REFUSED,
                         fix="run it as another user, or write `permission: default`")


def find_words(only: Collection[str], known: KnownTasks, new: Sequence[TaskSpec]
               ) -> tuple[str, ...]:
    """Return the tasks that were meant; none where a plain `run` means no other."""
    states = known.states
    names = dict.fromkeys([*states, *(task.name for task in new), *known.plan.tasks])
    others = [name for name in names if name not in only and (
        name not in states or not states[name].is_over or states[name].state == "done")]
    return tuple(name for name in names if name in only) if only and others else ()


def note_options(options: Namespace, world: World, words: tuple[str, ...]) -> RunOptions:
    """Return what a `run` was asked, with paths that are right in every directory."""
    paths = {key: world.real_path(path) for key in ("task_file", "config", "out")
             for path in [getattr(options, key)] if path and path != "-"}
    return RunOptions(words, options.land, options.keep_going, options.everywhere, options.most,
                 **paths)


class RunJob:
    """A repository in which `run` works."""

    def __init__(self, folder: Folder, options: Namespace) -> None:
        """Read the tasks, and refuse what is not possible before anything starts."""
        self.folder = folder
        self.lock: Hold | None = None
        self.supervisor: Any = None  # from `begin` on
        open_tasks(folder)
        known = know_tasks(folder, options)
        prompts, only = split_words(options, known)
        typed = plan_typed_tasks(prompts, options, known) if prompts else []
        self.typed = {task.name for task in typed}
        new = typed or list(known.plan.tasks.values())
        for task in new:
            old = known.states.get(task.name)
            if old and old.state != UNREADABLE and is_another(
                    old, task, "typed" if typed else "file"):
                raise FleetError(
                    "task-taken", f"`{task.name}` of the task file is not the `{task.name}` "
                    f"that was typed before ({old.state})", status=EXIT_REFUSED,
                    fix="give it another name in the file, or "
                        f"`subagent-fleet task forget {task.name}`")
        self.orders = [order_of(task, folder, "typed" if typed else "file",
                                known.plan.origins.get(task.name, {}).get("base", ""))
                       for task in new]
        tasks = {name: state.task for name, state in known.states.items()
                 if not state.is_over}
        tasks.update({task.name: task for task in new})
        if not tasks and not known.names and not options.keep_going:
            raise FleetError("no-tasks", "there are no tasks: no tasks.yaml here or above, "
                             "and none was added", fix=ADD_A_TASK)
        refuse_bypass(tasks, folder.world)
        if options.land:
            find_target(folder, "")
        self.only = {*expand_names(only, tasks), *self.typed}  # the tasks to run; none: all
        # The tasks that were over before this run, and when they ended.
        self.over = {name: state.at for name, state in known.states.items() if state.is_over}
        self.asked = note_options(options, folder.world, find_words(self.only, known, new))
        self.backing = back_run(folder, known, tasks, options)
        if self.orders and not folder.holder():
            tell_dirty(folder)

    def take_lock(self) -> bool:
        """Become the supervisor; return False if there is one already.

        A supervisor that is killed while it starts a program leaves the lock to that process
        for a moment, until it has become the program. On a busy machine that takes longer.
        """
        world = self.folder.world
        self.folder.make()

        def is_settled() -> bool:
            self.lock = self.lock or world.hold(self.folder.place("lock"))
            return bool(self.lock) or world.has_process(self.folder.holder())

        wait_until(world, is_settled, seconds=LOCK_SECONDS, pause=0.02)
        return bool(self.lock)

    def hand_in(self, **more: object) -> set[str]:
        """Write the tasks into the inbox for any supervisor; return the names of the orders."""
        return {self.folder.ask({**order, **more}) for order in self.orders}

    def relay(self, events: Tail) -> None:
        """Print the events of the typed tasks from the log of another `run`."""
        for event in filter(None, map(parse_object, events.lines())):
            if event.get("task") in self.typed:
                self.backing.tell(str(event["task"]), str(event["event"]), str(event["text"]))

    def find_meant(self) -> tuple[dict[str, TaskState], bool]:
        """Return the tasks to run, or those that changed; all and True if none has changed."""
        tasks = {name: state for name, state in self.folder.read_states()[0].items()
                 if not state.wish.forgotten and (not self.only or name in self.only)}
        changed = {name: state for name, state in tasks.items()
                   if self.over.get(name) != state.at}
        is_idle = not changed and not self.only
        return tasks if self.only or is_idle else changed, is_idle

    def begin(self, changed: threading.Condition) -> None:
        """Continue the tasks that exist, and accept the new ones."""
        assert self.lock
        self.supervisor = Supervisor(self.folder, self.lock, self.backing, self.only or None,
                                     changed=changed)
        for order in self.orders:
            self.supervisor.accept(order["spec"], order["base"], order["origin"])
        self.folder.note_asked(self.asked)

    def leave(self) -> None:
        """Stop supervising, and end the gateway that was started for agents if none is left."""
        if self.supervisor:
            asked = self.folder.read_asked()  # another `run --max` may have changed it
            if asked.words:
                words = dict.fromkeys([*asked.words, *self.supervisor.meant])
                self.folder.note_asked(replace(asked, words=tuple(words)))
            self.supervisor.leave()
        end_serving(self.folder)
