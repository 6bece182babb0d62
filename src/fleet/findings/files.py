"""Findings on generated files, the key, and a worker."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import address_kind
from fleet.findings.checks import check
from fleet.findings.nodes import public_address
from fleet.plan.candidates import rank_models
from fleet.plan.memory import SMALL_PLACEHOLDER
from fleet.start.errors import Finding
from fleet.text.phrases import count_of, quote_shell, some_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet
    from fleet.findings.checks import Facts


# -- Files --


@check("Files", "disk")
def check_files(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Report whether the generated files match the config."""
    yield from facts.file_problems
    groups: dict[str, list[str]] = {}
    for change in facts.changes:
        groups.setdefault(change.action, []).append(change.path)

    if "unchanged" in groups:
        count = count_of(groups["unchanged"], "generated file")
        yield Finding("files-unchanged", "ok", f"{count} up to date")
    for action, words in (("created", "not generated yet"), ("updated", "out of date"),
                          ("removed", "their agents are gone")):
        if action in groups:
            fix = "subagent-fleet doctor --fix"
            # `generate` writes nothing if a file was edited.
            if action == "created" and "edited" not in groups:
                fix = "subagent-fleet generate"
            yield Finding(f"files-{action}", "warning",
                          f"{some_of(groups[action], 5)}: {words}", fix=fix)
    for path in groups.get("edited", ()):
        yield Finding("files-edited", "info", f"{path}: changed by hand; kept",
                      fix="subagent-fleet generate --diff")


@check("Files", "disk")
def check_secret(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Report if other people can read the key."""
    path = quote_shell(facts.env_path)
    if "env-readable" in facts.leaks:
        yield Finding("env-readable", "error", f"other users can read the key in {path}",
                      fix="subagent-fleet doctor --fix")
    if "env-foreign" in facts.leaks:
        yield Finding("env-foreign", "error",
                      f"{path} belongs to another user, and so does the key in it",
                      fix=f"rm {path}; subagent-fleet generate")
    if "env-tracked" in facts.leaks:
        yield Finding("env-tracked", "error", f"the key in {path} is in git",
                      fix=f"git rm -f --cached {path}; rm {path}; subagent-fleet generate")


# -- worker --


def check_worker(program: str, state: NodeState,
                 reached: Iterable[NodeState]) -> list[Finding]:
    """Return the problems that keep this machine from being a node, with fixes."""
    if not program and not state.online:
        return [Finding("ollama-absent", "error", "Ollama is not installed",
                        fix="install it from ollama.com/download")]
    if not state.online:
        return [Finding("ollama-stopped", "error", f"Ollama is installed ({program}) but "
                        f"does not answer: {state.reason} ({state.endpoint})",
                        fix="start its app or its service, or: ollama serve")]

    findings = []
    if not rank_models(state):
        findings.append(Finding("no-model", "warning", "no model here can serve an agent",
                                fix=f"ollama pull {SMALL_PLACEHOLDER}"))
    places = [place.name for place in reached if place.online and address_kind(place.name)]
    if not places:
        findings.append(Finding("closed-node", "warning",
                                "Ollama accepts requests from this machine only",
                                fix="open it as shown below"))
    public = [place for place in places if address_kind(place) == "public"]
    if public:
        findings.append(public_address("this machine", public[-1], "error"))
    return findings
