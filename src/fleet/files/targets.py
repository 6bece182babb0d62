"""Every target, all files of a fleet, and their manifest."""
from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from fleet.config.rules import TARGET_NAMES, USUAL_TARGETS
from fleet.files.harnesses import FORMER_TARGET, HARNESS_ROWS, harness_target
from fleet.files.litellm import CLAUDE_TARGET, LITELLM_TARGET
from fleet.files.shell import ENVIRONMENT_TARGET
from fleet.files.skills import TAUGHT
from fleet.start.record import Record
from fleet.text.json import read_page

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from fleet.config.sections import Fleet
    from fleet.files.target import Target


TARGETS = (LITELLM_TARGET, CLAUDE_TARGET, ENVIRONMENT_TARGET,
           *map(harness_target, HARNESS_ROWS))


def target_of(path: str) -> Target | None:
    """Return the target of a generated path; None: never remove it."""
    for target in (*TARGETS, *TAUGHT, FORMER_TARGET):
        if re.fullmatch(target.pattern, path):
            return target
    return None


def render_files(fleet: Fleet, key: str, names: Collection[str] = USUAL_TARGETS
                 ) -> dict[str, bytes]:
    """Return {path: bytes} of all files of these targets."""
    files = {}
    for target in TARGETS:
        if target.name not in names:
            continue
        for path, text in target.render(fleet, key).items():
            files[path] = text.encode("utf-8")
    return files


def plan_compared(fleet: Fleet | None, written: Iterable[str]) -> list[str]:
    """Return the targets to compare by default: the fleet's, and those written before."""
    there = {target.name for target in map(target_of, written) if target}
    if fleet:
        there.update(fleet.targets)
    return [name for name in (*TARGET_NAMES, FORMER_TARGET.name) if name in there]


def render_manifest(hashes: dict[str, str]) -> bytes:
    """Return the manifest: the hash of each file, or two while it is being written."""
    value = {"schema": "subagent-fleet/manifest/1", "files": hashes}
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode("utf-8")


class Manifest(Record):
    """The files that were written, and the hashes of their content."""

    files: dict[str, str]


def parse_manifest(content: bytes | None) -> dict[str, str] | None:
    """Return {path: hashes}; {} if there is no manifest, None if it cannot be read."""
    if content is None:
        return {}
    page = read_page(Manifest, content, "manifest/1")
    if page is None:
        return None
    return {path: hashes.strip() for path, hashes in page.files.items()
            if target_of(path) or path.endswith(".json")}  # a fleet file is no target
