"""The roles: their prompts, their tools, the main job."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet.config.sections import Agent


# This room takes a Fleet and, where they were asked, what its nodes answered. It gives decisions:
# which model stands for which tier, what is true of a route, what Claude Code's environment
# holds, what `init` and `worker` propose. `files/` and `findings/` put them in words.

MAIN_CONTEXT_TOKENS = 32768  # Claude Code's own prompt is 10-18k tokens, before any work
SMALL_CONTEXT_TOKENS = 8192
LEAN_CONTEXT_TOKENS = 65536  # up to here Claude Code is asked for its shorter prompt
LEAST_CONTEXT_TOKENS = 256  # a fleet file accepts no less
GONE_TOOLS = {"MultiEdit": "Edit", "LS": "", "TodoWrite": "", "NotebookRead": ""}


class Role(Record):
    """What an agent of a well-known name is, where the fleet file does not say."""

    size: str  # of its model: small or heavy
    description: str
    tools: tuple[str, ...]
    prompt: str


ROLE_TOOLS = ("Read", "Grep", "Glob", "Edit", "Write", "Bash")
ROLES = {
    "planner": Role(
        size="small",
        description="Use for planning, file discovery and task decomposition.",
        tools=("Read", "Grep", "Glob"),
        prompt="""\
You are a fast local planning agent.
Do not edit files.

Return a concise response with:
- plan
- relevant files
- risks
- next recommended agent
"""),
    "implementer": Role(
        size="heavy",
        description="Use for implementation, bug fixes, refactors and patch creation.",
        tools=ROLE_TOOLS,
        prompt="""\
You are a senior implementation agent.
Make minimal, correct changes. Prefer small patches.
Run relevant checks when possible.
Explain what changed and why.
"""),
    "reviewer": Role(
        size="heavy",
        description="Use after implementation to review diffs, tests and regressions.",
        tools=("Read", "Grep", "Glob", "Bash"),
        prompt="""\
You are a strict code reviewer.
Focus on correctness, regressions, missing tests, security issues,
over-engineering, and maintainability.
Review the diff and test output.
Return only actionable issues.
"""),
    "summarizer": Role(
        size="small",
        description="Use to summarize files, logs and long outputs.",
        tools=("Read",),
        prompt="""\
You are a fast summarizing agent.
Do not edit files.
Read what you are pointed at and return its essence:
facts, names, numbers and open questions. Invent nothing.
"""),
}
OTHER_PROMPT = """\
You are a local subagent with one task at a time.
Do exactly what you are asked, with the tools you have.
Return a short report: what you found, what you changed, what is left.
"""


def plan_prompt(agent: Agent) -> str:
    """Return an agent's system prompt: its own, else its role's, never an empty one."""
    if agent.prompt and agent.prompt.strip():
        return agent.prompt
    role = ROLES.get(agent.name)
    return role.prompt if role else OTHER_PROMPT


def plan_tools(tools: Iterable[str]) -> tuple[str, ...]:
    """Return the tools that Claude Code still has, gone ones replaced, none twice."""
    kept = []
    for tool in tools:
        present = GONE_TOOLS.get(tool.split("(")[0], tool)
        if present and present not in kept:
            kept.append(present)
    return tuple(kept)


# What is to be done, and the least context for it: `main` and Claude Code's tiers read its
# own prompt, other agents do not.
JOBS = {"main session": MAIN_CONTEXT_TOKENS, "implementer": MAIN_CONTEXT_TOKENS,
        "reviewer": MAIN_CONTEXT_TOKENS, "planner": SMALL_CONTEXT_TOKENS,
        "summarizer": SMALL_CONTEXT_TOKENS}
MAIN_JOB = "main session"
