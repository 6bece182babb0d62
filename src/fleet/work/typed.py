"""Tasks from typed words and from files."""
from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from fleet.cli.rows import (
    REPEAT,
    TASK_NAMES,
    Flag,
    name_of,
    parse_number,
    type_again,
)
from fleet.cli.say import check_names
from fleet.config.keys import keys_of
from fleet.config.rules import CLAUDE, CODERS, RULES, obeys
from fleet.config.task_file import TaskFile, TaskSpec
from fleet.runs.agent import shorten
from fleet.runs.folder import TASK_FILES, Folder, find_repository, read_repositories
from fleet.runs.see import see_states
from fleet.runs.supervisor import base_of
from fleet.start.constants import EXIT_REFUSED, EXIT_USAGE, TEXT_LIMIT_BYTES
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.tasks.spec import TaskPlan, check_tasks, find_name
from fleet.tasks.starter import (
    PROJECT_DIRECTORIES,
    PROJECT_FILES,
    PYTHON_TEST,
    guess_project,
)
from fleet.tasks.state import TERMINAL_STATES, freeze
from fleet.text.phrases import nearest, quote_shell
from fleet.text.terminal import clean_line
from fleet.text.yaml import Document
from fleet.text.yaml_dump import dump_yaml
from fleet.work.backing import load_fleet_for_tasks, load_fleet_if_valid
from fleet.workspace.config import read_checked, search_config

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.tasks.starter import ProjectGuess
    from fleet.tasks.state import TaskState
    from fleet.world.world import World


def look_at_project(world: World, directory: str) -> ProjectGuess:
    """Return the guess how to set up and check the project in a directory, by its files."""
    names = world.names_in(directory)
    files = {name: "" for name in names if name in PROJECT_DIRECTORIES}
    for name in PROJECT_FILES:
        path = world.path(directory, name)
        if name in names and world.kind_of(path) == "file":
            files[name] = world.read_part(path, 0, TEXT_LIMIT_BYTES).decode("utf-8", "replace")
    files.update({name: "" for name in names if PYTHON_TEST.fullmatch(name)})
    return guess_project(files)


# The process that holds the lock carries out orders. A command writes them as files, or takes the
# lock itself until they are carried out. Any folder of tasks can be shown. For everything else
# there is one way in, `open_tasks`: tasks that came with a copy or an archive name commands,
# places and revisions, so they are never run.

TASK_KEYS = keys_of(TaskSpec)


def key_flag(name: str, metavar: str = "WORD", note: str = "", *,
             offers: tuple[str, ...] = ()) -> Flag:
    """Return the flag for a key of a task; what it takes and is for is said by the key."""
    key = TASK_KEYS[name]
    schema = key.rule.schema if key.rule else {}
    schema = schema.get("anyOf", [schema])[0]  # a flag takes the plain form
    more: dict[str, Any] = {}
    if "items" in schema:
        more = REPEAT
    elif "minimum" in schema:
        more = {"type": lambda text: parse_number(text, schema["minimum"], schema["maximum"])}
    elif metavar == "WORD":
        more = {"choices": tuple(schema["enum"])}
    return Flag(f"--{name.replace('_', '-')}", note or key.words, metavar, more, offers=offers)


TASK_WORDS = (
    Flag("--name", "the new task's name; default: its first words", "NAME"),
    key_flag("agent", "NAME"),
    key_flag("model", "NAME"),
    key_flag("coder", "NAME", offers=(CLAUDE, *CODERS)),
    key_flag("after", "TASK", offers=TASK_NAMES),
    key_flag("base", "COMMIT"),
    key_flag("check", "COMMAND"),
    key_flag("touch", "GLOB"),
    key_flag("changes"),
    key_flag("times", "N", "run it N times, to choose from"),
    key_flag("priority", "N"),
    key_flag("setup", "COMMAND"),
    key_flag("sandbox"),
    key_flag("sandbox_write", "PATH"),
    Flag("--no-setup", "skip the default setup commands"))

TASK_FILE = Flag("--file", "the task file, `-` for stdin; default: the nearest tasks.yaml",
                 "FILE", {"dest": "task_file", "default": None})
NAMED_TASK = Flag("task", "a task's name", "NAME", {}, offers=TASK_NAMES)
MAYBE_TASK = replace(NAMED_TASK, more={"nargs": "?", "default": ""})
TASK_PATTERNS = Flag("patterns", "names, or patterns with `*` and `?`", "PATTERN",
                     {"nargs": "+", "default": []}, offers=TASK_NAMES)
ADD_A_TASK = "subagent-fleet run 'NAME:what to do'"


def open_folder(world: World, *, begins: bool = False) -> Folder:
    """Return the folder of tasks of the current repository, for showing them."""
    return Folder(world, find_repository(world, world.directory, begins=begins))


def open_tasks(folder: Folder) -> Folder:
    """Return the folder of tasks for any other use; refuse tasks that this user did not add."""
    world = folder.world
    run = folder.run
    if run and read_repositories(world).get(folder.repository.main) == run:
        return folder
    if folder.read_states()[0] or any(folder.read_orders()):
        raise FleetError("foreign-tasks", f"this repository has tasks that you did not start, in "
                                          f"{folder.repository.common}", status=EXIT_REFUSED,
                         fix="`subagent-fleet tasks` shows them; to delete them: "
                             f"`rm -r {quote_shell(folder.path)}`")
    if run:
        folder.make(renews=True)
    return folder


def find_folders(options: Namespace, world: World, known: set[str], *,
                 begins: bool = False) -> list[Folder]:
    """Return the folder of the current repository; with `--all`, each that is not in `known`."""
    if not options.everywhere:
        return [open_folder(world, begins=begins)]
    folders = []
    for path in read_repositories(world):
        if path in known:
            continue
        known.add(path)
        try:
            folders.append(Folder(world, find_repository(world, path)))
        except FleetError:
            world.err(f"{clean_line(path)}: skipped, it is no longer a git repository\n")
    return folders


# -- the task file, and tasks that are typed --

PROMPT_LIMIT_BYTES = 256 * 1024


def find_task_file(folder: Folder, options: Namespace) -> str:
    """Return the typed task file, or the nearest one up to the top of the checkout, or "".

    In a task's own worktree, and with --all, it is the one of the main checkout.
    """
    if options.task_file is not None:
        return str(options.task_file)
    world, repository = folder.world, folder.repository
    directory = world.real_path(world.directory)
    if options.everywhere or repository.top != repository.main and any(
            state.place.worktree == repository.top for state in folder.read_states()[0].values()):
        directory = repository.main
    return search_config(world, directory, shown=directory, names=TASK_FILES)


class KnownTasks(Record):
    """The tasks and the fleet of a repository, before a command changes anything."""

    states: Mapping[str, TaskState]
    plan: TaskPlan
    path: str  # of the task file; "": there is none, and the plan is empty
    fleet: Fleet | None

    @property
    def names(self) -> set[str]:
        """The names that a new task cannot have: of tasks, and of groups (`times:`)."""
        return {name for task in self.tasks.values() for name in (task.name, task.group)}

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """Every task that was not forgotten, even if it was never started."""
        kept = {name: state.task for name, state in self.states.items()
                if not state.wish.forgotten}
        return {**self.plan.tasks, **kept}


def know_tasks(folder: Folder, options: Namespace, *, needs_fleet: bool = True) -> KnownTasks:
    """Read the task file, the fleet and the states of tasks of a repository."""
    fleet = load_fleet_for_tasks(options, folder.world, folder) if needs_fleet else \
        load_fleet_if_valid(options, folder.world, folder, tells=False)
    path = find_task_file(folder, options)
    plan = load_tasks(folder.world, path, fleet) if path else TaskPlan({}, TaskFile({}), {})
    return KnownTasks(see_states(folder)[0], plan, path, fleet)


def load_tasks(world: World, path: str, fleet: Fleet | None) -> TaskPlan:
    """Read a task file; refuse one with errors, and report all of them."""
    source = ("<stdin>" if path == "-"
              else path.removeprefix(world.real_path(world.directory) + "/"))
    plan = read_checked(world, path, source, lambda document: check_tasks(document, fleet))
    for name, task in plan.tasks.items():
        if task.prompt_file:
            place = world.path(world.parent(path) if path != "-" else ".", task.prompt_file)
            prompt = world.read_bytes(place, limit=PROMPT_LIMIT_BYTES).decode(
                "utf-8", "replace")
            plan.tasks[name] = replace(task, prompt=prompt, prompt_file=None)
    return plan


def split_name(prompt: str) -> tuple[str, str]:
    """Return (name, prompt) of NAME:PROMPT; a text without a name has none."""
    match = re.match(r"([^\s:]+):(?!//)\s*(.*)", prompt, re.S)
    if not match:
        return "", prompt
    if not obeys(re.sub("[./]+", "-", match[1]), "task name"):
        raise FleetError("bad-task", f"`{shorten(match[1])}` cannot be the name of a task; "
                         f"accepted: {RULES['task name'].words}", status=EXIT_USAGE,
                         fix="write another name before the colon")
    if not match[2]:
        raise FleetError("bad-task", f"no prompt after `{match[1]}:`", status=EXIT_USAGE,
                         fix=f"'{match[1]}:what to do'")
    return match[1], match[2]


def refuse_unquoted(words: Sequence[str], names: Collection[str], options: Namespace,
                    key: str) -> None:
    """Refuse a sentence without quotes: several words, none of which is like a name."""
    if len(words) > 1 and not any(" " in word or ":" in word or word in names
                                  or nearest(word, names) for word in words):
        raise FleetError("usage", f"{options.row.name}: a task of several words is typed in "
                         "quotes", status=EXIT_USAGE,
                         fix=type_again(options, **{key: [" ".join(words)]}))


def typed_keys(options: Namespace) -> dict[str, Any]:
    """Return the keys for new tasks that were typed as flags."""
    words = [name_of(flag) for flag in TASK_WORDS]
    typed = {word: getattr(options, word) for word in words if word in TASK_KEYS}
    if str(options.coder).startswith("["):
        typed["coder"] = Document(options.coder, "--coder").value
        if not typed["coder"]:
            raise FleetError("bad-task", "--coder: an empty list names no program",
                             status=EXIT_USAGE, fix="--coder '[my-agent, --print]'")
    return {word: value for word, value in typed.items() if value}


def parse_check(text: str) -> str:
    """Return a check as a task file may have it; its rule reads `none` as no check."""
    if obeys(text, "check"):
        return text
    raise argparse.ArgumentTypeError(f"expected {RULES['check'].words}, not `{text}`")


def plan_typed_tasks(prompts: Sequence[str], options: Namespace, known: KnownTasks,
                     ) -> list[TaskSpec]:
    """Return the tasks that were typed, checked like those of a file.

    The defaults of the task file apply to them, too.
    """
    if options.name and len(prompts) > 1:
        raise FleetError("usage", "--name is for one task", status=EXIT_USAGE,
                         fix="write NAME:PROMPT for each")
    check_names("task", options.after, known.names, "--after")
    agents = known.fleet.agents if known.fleet else {}
    if options.agent in (CLAUDE, *CODERS) and options.agent not in agents:
        raise FleetError("bad-task", f"`{options.agent}` is a program, not an agent",
                         status=EXIT_USAGE,
                         fix=type_again(options, agent=None, coder=options.agent))
    common = typed_keys(options)
    if options.no_setup:
        common["setup"] = []
    tree: dict[str, Any] = {}
    for prompt in prompts:
        branch, text = (options.name, prompt) if options.name else split_name(prompt)
        taken = {*known.names, *tree}
        name = re.sub("[./]+", "-", branch) or free_name(text, taken)
        twin = find_name(name, taken)
        if twin:
            raise refuse_name(twin, taken, known)
        tree[name] = {**common, "prompt": text}
        if branch and name != branch:  # such as feat/login
            tree[name]["branch"] = branch
    defaults = freeze(replace(known.plan.file.defaults, times=1))
    text = dump_yaml({"defaults": defaults, "tasks": tree})
    plan, problems = check_tasks(Document(text, "the command line"), known.fleet, known.names)
    if plan is None:
        raise FleetError("bad-task", problems[0].what, status=EXIT_USAGE, fix=problems[0].fix)
    return list(plan.tasks.values())


def refuse_name(name: str, taken: Collection[str], known: KnownTasks) -> FleetError:
    """Return why a new task cannot have a name, and what to type."""
    what = ("there is already a task" if name in known.names
            else "two of these tasks are named")
    fix = f"name it `{free_name(name, taken)}`"
    state = known.states[name].state if name in known.states else ""
    if state in ("parked", "stopped", "failed"):
        fix = f"try it again: `subagent-fleet task retry {name}`, or {fix}"
    elif state and state not in TERMINAL_STATES:  # such as the same line after a Ctrl-C
        fix = f"`subagent-fleet run {name}` continues it; for another task, {fix}"
    return FleetError("task-taken", f"{what} `{name}`", status=EXIT_USAGE, fix=fix)


def free_name(text: str, taken: Collection[str]) -> str:
    """Return a free name: the first words of a prompt, at most up to a colon."""
    words = re.findall("[A-Za-z0-9]+", text.partition(":")[0])[:4]
    stem = "-".join(words)[:40].lower().strip("-") or "task"
    name = stem
    number = 2
    while find_name(name, taken):
        name = f"{stem}-{number}"
        number += 1
    return name


def order_of(task: TaskSpec, folder: Folder, origin: str = "typed", where: str = ""
             ) -> dict[str, Any]:
    """Return the order that adds a task, with the commit that it starts from."""
    return {"do": "add", "task": task.name, "spec": freeze(task), "origin": origin,
            "base": base_of(task, folder, where)}
