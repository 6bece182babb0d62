"""The list of what needs a person, and the headline of the page."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.text.phrases import count_of, some_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from fleet.page.sight import Sight
    from fleet.start.errors import Finding


def _plan_task_needs(tasks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    verbs = {"asking": "asks", "review": "waits for your review"}
    for task in sorted(tasks, key=lambda task: list(verbs).index(task["state"])
                       if task["state"] in verbs else len(verbs)):
        if task["level"] in ("ask", "warn"):
            what = f"{task['name']} {verbs.get(task['state'], 'is ' + task['state'])}"
            yield (task["level"], ": ".join(filter(None, (what, task["now"]))),
                   task["answers"] or task["fix"])
    failed = [task for task in tasks if task["level"] == "bad"]
    if failed:
        names = some_of([task["name"] for task in failed], 4)
        fixes = "\n".join(task["fix"] for task in failed[:4])
        yield "bad", f"{count_of(failed, 'task')} failed: {names}", fixes


def plan_needs(sight: Sight) -> Iterator[tuple[str, str, str]]:
    """Yield (level, what, command) for everything that needs a person, most urgent first."""
    routes = sight.routes
    yield from _plan_task_needs(sight.tasks)
    for name, state in sight.states.items():
        alone = [model.name for model in sight.fleet.models.values() if model.node == name
                 and routes[model.name].state == "node offline"
                 and not routes[model.name].fallback]
        if alone:
            yield ("bad", f"{name} does not answer ({state.reason}), and no other machine "
                   f"runs {some_of(alone, 4)}", state.fix)
    if sight.gateway.level == "error":
        yield "bad", sight.gateway.what, sight.gateway.fix
    for finding in sight.findings:
        if (finding.level == "error"
                and finding.slug not in ("node-offline", sight.gateway.slug)):
            yield "bad", say_where(finding), finding.fix


def say_where(finding: Finding) -> str:
    return f"{finding.where}: {finding.what}" if finding.where else finding.what


def page_line(level: str, what: str, fix: str) -> dict[str, str]:
    """Return a line of the page; commands are put in backticks."""
    command = "((?:subagent-fleet|npm|uv|pipx?|ollama|git|ssh|chmod|echo) [^`]+)$"
    if re.match(command, fix):
        fix = f"`{fix}`"
    what = re.sub(f"(?<=; ){command}", r"`\1`", what)
    return {"level": level, "what": what, "fix": fix}


def plan_headline(sight: Sight, needs: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return (level, sentence); it is never better than the worst line below it."""
    levels = [need["level"] for need in needs]
    if levels:
        states = [task["state"] for task in sight.tasks]
        counts = [count_of(states.count(state), noun) for state, noun in
                  (("asking", "question"), ("review", "review"),
                   ("parked", "parked task")) if state in states]
        failed = sum(task["level"] == "bad" for task in sight.tasks)
        if failed:
            counts.append(count_of(failed, "failed task"))
        others = levels.count("bad") - bool(failed)  # all failed tasks share one line
        if others:
            counts.append(count_of(others, "problem"))
        down = [name for name, state in sight.states.items() if not state.online]
        also = f" Not answering: {some_of(down, 4)}." if down else ""
        level = "bad" if "bad" in levels else levels[0]
        return level, f"Needs you: {', '.join(counts)}.{also}"

    sentence = str(sight.step)
    warnings = [finding for finding in sight.findings if finding.level == "warning"]
    if sight.step.what:
        return "warn", sentence
    if warnings:
        return "warn", f"Ready, with {count_of(warnings, 'warning')}."
    return "ok", sentence
