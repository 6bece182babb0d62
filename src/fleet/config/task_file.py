"""The records of a task file."""
from __future__ import annotations

from fleet.config.rules import CLAUDE, CODERS, key
from fleet.start.record import Record
from fleet.text.phrases import some_of

LOGIN = "login"  # in `models:`, the coder's own login instead of a model


class TaskSpec(Record):
    """A task: what to do, with which agent, from which commit, its check and its scope."""

    name: str = key("task name")
    prompt: str | None = key("text", "what to do", None,
                             others="system system_prompt instructions")
    prompt_file: str | None = key("line",
                                  "a file with the prompt, beside the task file", None)
    agent: str | None = key("agent name", "the agent of fleet.yaml that does it", None)
    model: str | None = key("alias", "model or alias to use instead of an agent", None,
                            others="llm uses runs_on")
    models: tuple[str, ...] = key(
        "rungs", "or several: a failed check moves the task to the next one; `login`: the "
                 "coder's own login; default with a check: every model of your machines", ())
    coder: tuple[str, ...] | str = key(
        "coder", f"who does it: {some_of((CLAUDE, *CODERS))}, or a command as a list that "
        "reads the prompt on stdin", CLAUDE)
    after: tuple[str, ...] = key(
        "task names", "tasks that must be done first", (),
        others="depends_on depends needs requires deps dependencies blocked_by")
    base: str | None = key("revision", "the commit it starts from; default: HEAD, or the "
                           "branch of the only task in `after`", None)
    branch: str | None = key("revision", "its branch; default: run/NAME", None)
    check: str | None = key("check", "shell command that must succeed for the task to be "
                            "done; `none`: no check, even if `defaults` has one", None,
                            others="test verify gate")
    check_in: str = key("check place", "`same`: run the check in the agent's worktree instead of "
                                       "a clean one", "own")
    setup: tuple[str, ...] = key("commands", "shell commands that prepare a worktree", (),
                                 others="install prepare")
    copy: tuple[str, ...] = key("globs",
                                "ignored files that are copied into each worktree", ())
    touch: tuple[str, ...] = key("globs", "what it may change; default: everything", (),
                                 others="scope paths files")
    deny: tuple[str, ...] = key("globs", "what it may not change", ())
    changes: str = key("changes", "`none`: fail if anything changes", "required")
    deadline: int = key("span", "how long one try may work", 3600, others="timeout time_limit")
    stall: int = key("span", "how long it may show no sign of work", 300)
    tries: int = key("tries", "how often it is tried", 2, others="retries attempts")
    rounds: int = key("rounds", "how often a failed check is sent back to the agent", 3)
    priority: int = key("priority", "tasks with a higher number start first", 0)
    times: tuple[str, ...] | int = key(
        "times", "run it this many times, to choose from: NAME-a, NAME-b, …; a list of models: "
                 "once on each", 1, others="count fanout copies")
    allow: tuple[str, ...] = key("tools", "Claude Code permission rules to grant", ("Bash",))
    permission: str = key("permission", "`bypass`: Claude Code asks for nothing", "default")
    sandbox: str = key("sandbox", "what keeps its commands from writing elsewhere: `auto`, "
                       "if this system has it; `required`, or it does not start; `off`",
                       "auto")
    sandbox_write: tuple[str, ...] = key(
        "writables", "what else its commands may write, such as a cache: files, directories",
        ())

    @property
    def group(self) -> str:
        """The name it has in the task file: that of all its twins."""
        return self.name if self.times == 1 else self.name[:-2]

    @property
    def talks(self) -> bool:
        """Whether it can be asked, steered and resumed."""
        return self.coder == CLAUDE

    @property
    def program(self) -> str:
        """The program that does it."""
        return self.coder if isinstance(self.coder, str) else self.coder[0]


class TaskDefaults(TaskSpec):
    """What holds for every task that does not say otherwise; the rest is each task's own."""

    name: str = ""
    prompt: str | None = None
    prompt_file: str | None = None
    after: tuple[str, ...] = ()


class TaskFile(Record):
    """The top level of a task file."""

    tasks: dict[str, TaskSpec] = key(words="what to do, by name")
    defaults: TaskDefaults = key(words="keys for every task that doesn't set them",
                                 default=TaskDefaults())
    max: int | None = key("parallel", "run at most this many agents at once", None,
                          others="max_parallel parallel max_agents max_workers concurrency jobs")
    cloud_limit: int = key("cloud limit", "how many tasks a day may move up to a cloud model", 3)
    worktrees: str | None = key("line", "where the worktrees are; default: "
                                "~/.local/state/subagent-fleet/worktrees", None)
    notify: tuple[str, ...] | str | None = key(
        "notice", "command that gets a line of JSON when a task asks, is done or fails", None)
