"""The environment, as text for a shell."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.files.target import Target, file_headline
from fleet.plan.environment import plan_environment
from fleet.start.constants import ENVIRONMENT_FILE
from fleet.text.phrases import quote_shell

if TYPE_CHECKING:
    from fleet.config.sections import Fleet


def render_environment(fleet: Fleet, key: str | None) -> str:
    """Return the environment as a script; a key of None is not shown."""
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
            lines.append(f'export {name}="${{{name}:-{key}}}"')  # `kept_key` reads it back
        elif variable.is_unset:
            lines.append(f"unset {name}")
        else:
            word = quote_shell(variable.value)
            if variable.holds_key:
                word = f'"{variable.value}${key_variable}"'
            added = f'"${{{name}:+${name},}}"' if variable.is_added else ""
            lines.append(f"export {name}={added}{word}")
    return "\n".join(lines) + "\n"


ENVIRONMENT_TARGET = Target(
    "env", r"\.env\.subagent-fleet", 0o600,
    lambda fleet, key: {ENVIRONMENT_FILE: render_environment(fleet, key)})
