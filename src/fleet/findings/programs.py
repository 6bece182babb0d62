"""Findings on what other programs lose on this fleet."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.files.harnesses import HARNESSES
from fleet.findings.checks import check
from fleet.plan.environment import plan_tier_alias, plan_windows
from fleet.plan.roles import plan_tools
from fleet.start.errors import Finding
from fleet.text.phrases import some_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet.config.sections import Fleet
    from fleet.files.harness import Harness
    from fleet.findings.checks import Facts


def plan_losses(fleet: Fleet, harness: Harness) -> Iterator[Finding]:
    """Find what of a fleet a program cannot keep: of the main model, then of the agents."""
    main = plan_tier_alias(fleet, "main")
    windows = plan_windows(fleet)
    odd = [alias for alias in windows if re.match(r"gpt-|codex-|o\d", alias)]
    behind_login = [model.alias for model in fleet.models.values()
                    if fleet.nodes[model.node].auth]
    tools = {name: set(plan_tools(agent.tools)) for name, agent in fleet.agents.items()
             if harness.agent and agent.tools is not None}
    lost = [name for name, wanted in tools.items() if wanted - set(harness.tools or ())]
    taken = [name for name in fleet.agents if name in harness.taken_names]
    for is_lost, slug, level, what, fix in (
            (fleet.gateway.provider == "litellm", "gateway", "info", "was never tried with "
             "LiteLLM as the gateway, only with `provider: builtin`", ""),
            (main in behind_login, "login", "warning", "has no Claude login, and "
             f"`{main}` needs one", "another model as project.claude.main"),
            (windows[main].context < harness.least_context, "context", "warning",
             f"needs more context: `{main}` holds {windows[main].context:,} tokens",
             f"context: {harness.least_context} or more"),
            (odd and harness.name == "codex", "alias", "warning", f"treats {some_of(odd, 5)} "
             "as OpenAI's own models and speaks to them in another way",
             "another litellm_alias"),
            (not harness.agent, "agents", "info", f"has no agents: it runs on `{main}`", ""),
            (tools and harness.tools is None, "tools", "info", "cannot limit an agent's "
             f"tools: {some_of(tools, 5)} can use all of them there", ""),
            (lost and harness.tools, "tools", "info", "does not have every tool of "
             f"{some_of(lost, 5)}; the missing ones are left out", ""),
            (taken, "names", "warning", f"already has agents named {some_of(taken, 5)}; the "
             "fleet's are left out", "other names for these agents")):
        if is_lost:
            yield Finding(f"target-{slug}", level, f"{harness.title} {what}", fix=fix)


@check("Other programs", "nodes")
def check_programs(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Find what keeps a program from the fleet, of those that files were generated for."""
    for name, seen in facts.programs.items():
        harness = HARNESSES[name]
        if not seen.version:
            yield Finding("program-missing", "warning", f"{harness.title} is not on the PATH",
                          fix=harness.install)
            continue

        yield Finding("program", "ok", f"{harness.title} {seen.version}")
        yield from plan_losses(fleet, harness)
        if harness.swallows_key and not seen.has_key:
            yield Finding("program-key", "info", f"{harness.title} has no key: "
                          f"{fleet.gateway.master_key_env} is not set in this terminal",
                          fix=f"subagent-fleet launch {name}")
