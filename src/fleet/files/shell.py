"""The environment, as text for each shell."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.files.target import Target, file_headline
from fleet.plan.environment import plan_environment
from fleet.start.constants import ENVIRONMENT_FILE
from fleet.start.record import Record
from fleet.text.phrases import quote_shell

if TYPE_CHECKING:
    from fleet.config.sections import Fleet


class Shell(Record):
    """How a shell writes what the environment file says; a name and a quoted word go in."""

    set: str
    unset: str
    add: str  # the word to a list that may hold others
    key: str  # the word where the variable is not set; `kept_key` reads it back


SHELLS = {
    "sh": Shell(
        set="export {name}={word}",
        unset="unset {name}",
        add='export {name}="${{{name}:+${name},}}"{word}',
        key='export {name}="${{{name}:-{word}}}"'),
    "fish": Shell(
        set="set -gx {name} {word}",
        unset="set -e {name}",
        add="set -gx {name} (string join , ${name} {word})",
        key='test -n "${name}"; or set -g {name} \'{word}\'\nset -gx {name} "${name}"'),
}


def render_environment(fleet: Fleet, key: str | None, shell: str = "sh") -> str:
    """Return the environment as a script; a key of None is not shown."""
    words = SHELLS[shell]
    key_variable = fleet.gateway.master_key_env
    lines = [f"{file_headline(fleet)}# Holds the gateway's key: keep it out of git.\n"]
    last_reason = ""

    for variable in plan_environment(fleet):
        name = variable.name
        if variable.why != last_reason:
            lines.append(f"# {variable.why}")
            last_reason = variable.why

        if name == key_variable and key is None:
            lines.append(f"# {name} is not shown on a terminal; --show-key shows it")
        elif name == key_variable:
            lines.append(words.key.format(name=name, word=key))
        elif variable.is_unset:
            lines.append(words.unset.format(name=name))
        else:
            word = quote_shell(variable.value)
            if variable.holds_key:
                word = f'"{variable.value}${key_variable}"'
            form = words.add if variable.is_added else words.set
            lines.append(form.format(name=name, word=word))
    return "\n".join(lines) + "\n"


ENVIRONMENT_TARGET = Target(
    "env", r"\.env\.subagent-fleet", 0o600,
    lambda fleet, key: {ENVIRONMENT_FILE: render_environment(fleet, key)})
