"""Findings on the gateway's port and Claude Code's settings."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.address import gateway_url
from fleet.findings.checks import (
    FAR_GATEWAY,
    OLD_GATEWAY,
    OUR_GATEWAY,
    SILENT_GATEWAY,
    check,
    locate_key,
)
from fleet.plan.environment import plan_environment
from fleet.start.constants import OTHER_PORT, name_taken
from fleet.start.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fleet.config.sections import Fleet
    from fleet.findings.checks import Facts


# -- Gateway --


@check("Gateway", "nodes")
def check_gateway_port(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Report which program has the gateway's port."""
    yield check_gateway(fleet, facts.holder)


def check_gateway(fleet: Fleet, holder: str) -> Finding:
    """Return the Finding on the program at the gateway's port: OUR_GATEWAY, a name, or ""."""
    url = gateway_url(fleet.gateway)
    is_litellm = fleet.gateway.provider == "litellm"
    taken = "; LiteLLM would take another port" if is_litellm else ""
    start = "up" if is_litellm else "serve"
    rows = {
        "": ("port-free", "info", f"no gateway runs at {url}",
             "`subagent-fleet serve` in another terminal, or `subagent-fleet up`"),
        OUR_GATEWAY: ("gateway-up", "ok", f"{holder} answers at {url}", ""),
        OLD_GATEWAY: ("gateway-old", "error", f"the gateway at {url} is still running "
                      f"the old {fleet.document.source}", "in its terminal, quit Claude "
                      "Code or stop `serve` (Ctrl-C); then start it again. To continue a "
                      "session: `subagent-fleet up -- --resume`"),
        FAR_GATEWAY: ("gateway-elsewhere", "error", f"{url} is not on this machine, so it "
                      "gets the key only if you trust it", "subagent-fleet trust"),
        "another program": ("port-taken", "error",
                            f"{name_taken(fleet.gateway.port)}{taken}", OTHER_PORT),
        SILENT_GATEWAY: ("gateway-silent", "error",
                         f"nothing answers in time at {url}",
                         "try again; if that does not help, stop it, then "
                         f"`subagent-fleet {start}`; "
                         "or write another `port:` under project.gateway")}
    if is_litellm:
        rows[""] = ("litellm-down", "info", f"no gateway runs at {url}",
                    "`subagent-fleet up` starts LiteLLM; `subagent-fleet generate` says how "
                    "to start it in another terminal")
    slug, level, what, fix = rows.get(holder, (
        "gateway-other", "error", f"port {fleet.gateway.port} is used by another fleet "
        f"({holder} at {url}), or by an outdated gateway of this one", OTHER_PORT))
    key = "host" if holder == FAR_GATEWAY else "port"
    where = "" if level == "ok" else locate_key(fleet, "project", "gateway", key)
    return Finding(slug, level, what, where, fix=fix)


# -- Claude Code --


@check("Claude Code", "disk")
def check_settings(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Report settings files that override the fleet's environment, without their values."""
    for path, environment in facts.settings.items():
        names = overridden_names(fleet, environment) if fleet else []
        if names:
            listed = ", ".join(names)
            level = "error" if any(map(leads_away, names)) else "warning"
            yield Finding("settings-override", level,
                          f"{path} sets {listed} under `env`, which beats the fleet's "
                          "environment", fix=f"remove them from {path}")


def overridden_names(fleet: Fleet, environment: Mapping[str, object]) -> list[str]:
    """Return the fleet's variables to which a settings file's `env` gives other values."""
    return [variable.name for variable in plan_environment(fleet)
            if variable.name in environment
            and (variable.holds_key or variable.is_unset
                 or str(environment[variable.name]) != variable.value)]


def leads_away(name: str) -> bool:
    """Tell whether a variable can lead prompts or the key elsewhere."""
    return bool(re.match("ANTHROPIC_(BASE_URL|AUTH|API_)|CLAUDE_CODE_USE", name))
