"""Which paths a task may change, and what its agent may do without asking."""
from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from fleet.speech.claude_stream import EDITING_TOOLS, QUESTION_TOOL, path_in, questions_in
from fleet.start.gate import late_decorator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet.config.task_file import TaskSpec


@late_decorator(lambda: functools.lru_cache(512))
def glob_pattern(glob: str) -> re.Pattern[str]:
    """Return the pattern of a glob as in git's ignore files; with a slash it is anchored."""
    known = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translate(piece: re.Match[str]) -> str:
        text = piece[0]
        if text[0] == "[" and len(text) > 1:
            inside = text[1:-1].replace("\\", "\\\\").replace("[", "\\[")
            return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
        return known.get(text) or re.escape(text)

    glob = glob.removeprefix("./")
    if glob.endswith("/"):
        glob += "**"
    start = "" if "/" in glob else "(?:.*/)?"
    pattern = re.sub(r"(?s)\*\*/|/\*\*$|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", translate, glob)
    try:
        return re.compile(f"{start}{pattern}(?:/.*)?", re.S)
    except re.error:  # a class such as [z-a]: match the text itself
        return re.compile(re.escape(glob))


def is_in_scope(task: TaskSpec, path: str) -> bool:
    """Tell whether a task may change a path of the repository."""
    if any(glob_pattern(glob).fullmatch(path) for glob in task.deny):
        return False
    return not task.touch or any(glob_pattern(glob).fullmatch(path) for glob in task.touch)


def describe_scope(task: TaskSpec) -> str:
    """Return in words what a task may change."""
    words = "it may touch " + (", ".join(task.touch) or "every file of its worktree")
    if task.deny:
        words += f", but not {', '.join(task.deny)}"
    return words


# No task may change these: git's own files, and those that Claude Code obeys.
PROTECTED_NAMES = (".git", ".claude", ".gitmodules", ".gitattributes")


def plan_permissions(task: TaskSpec) -> dict[str, Any]:
    """Return the permission rules with which a task's Claude Code starts."""
    edits = [f"Edit({glob})" for glob in task.touch or ("**",)]
    denied = [f"Edit({glob})" for glob in task.deny]
    denied += [f"Edit(**/{name}{rest})" for name in PROTECTED_NAMES for rest in ("", "/**")]
    rules = {"allow": [*edits, *task.allow], "deny": denied, "disableAutoMode": "disable"}
    return {"permissions": rules}


def decide_request(task: TaskSpec, worktree: str, request: Mapping[str, Any],
                   real_path: Callable[[str], str] = str) -> dict[str, Any] | None:
    """Return the answer to a permission request of Claude Code; None if a person must answer.

    `real_path` resolves links: a link must not lead an edit out of the worktree.
    """
    tool = request.get("tool_name")
    asked = request.get("input")
    if tool == QUESTION_TOOL and questions_in(request):
        return None
    if tool == "ExitPlanMode" or tool in EDITING_TOOLS and _may_edit(
            task, worktree, path_in(asked), real_path):
        return {"behavior": "allow", "updatedInput": asked or {}}
    message = f"outside this task: {describe_scope(task)}"
    if tool == QUESTION_TOOL:
        message = ('no question can be read in it. Ask with {"questions": [{"question": "…", '
                   '"options": [{"label": "…"}]}]}')
    elif tool not in EDITING_TOOLS:
        message = (f"this task may not do that. It is granted "
                   f"{', '.join(task.allow) or 'nothing more'}; nobody can be asked. Find "
                   f"another way, inside {worktree}")
    return {"behavior": "deny", "message": message}


def _may_edit(task: TaskSpec, worktree: str, path: str,
              real_path: Callable[[str], str]) -> bool:
    """Tell whether a path is in the worktree, in scope, and not one of PROTECTED_NAMES."""
    if not path or path.startswith("~") or ".." in path.split("/"):
        return False
    root = real_path(worktree).rstrip("/") + "/"
    whole = real_path(path if path.startswith("/") else f"{worktree.rstrip('/')}/{path}")
    inner = whole[len(root):]
    names = inner.casefold().split("/")
    return whole.startswith(root) and not any(name in PROTECTED_NAMES for name in names) \
        and is_in_scope(task, inner)
