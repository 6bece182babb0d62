"""`doctor`: say what is wrong, and how to fix it."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import CONFIG, JSON, LOOK, OUT, TIMEOUT, Flag, command
from fleet.cli.say import exit_status, open_workspace, print_report
from fleet.findings.checks import plan_next_step, plan_verdict
from fleet.findings.doctor import plan_doctor
from fleet.findings.gateway import check_gateway
from fleet.page.sight import show_record
from fleet.plan.routes import ALL_LOADED, count_ready, plan_route_states
from fleet.start.errors import FleetError
from fleet.text.phrases import count_of
from fleet.text.tables import LEVELS, format_finding, format_words, wrap_text
from fleet.text.terminal import clean_line, mark
from fleet.views.observe import observe
from fleet.workspace.config import load_config, look_of
from fleet.workspace.directory import observe_files

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.findings.checks import Facts
    from fleet.start.errors import Finding
    from fleet.text.terminal import Look
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def format_topic(topic: str, findings: Sequence[Finding], look: Look, *,
                 verbose: bool = False) -> str:
    """Return the block of a topic: a summary, then each finding that is not fine."""
    levels = [finding.level for finding in findings]
    worst = next((level for level in ("error", "warning", "ok") if level in levels), "")
    nouns = {"info": "note", "ok": "ok"}
    counts = [f"{levels.count('ok')} ok" if level == "ok"
              else count_of(levels.count(level), nouns.get(level, level))
              for level in LEVELS if level in levels]
    heading = mark(f"{topic}:", LEVELS.get(worst, "bold"), look)
    text = format_words([heading, ", ".join(counts)], look, indent="  ")
    for finding in findings:
        if verbose or finding.level != "ok":
            text += format_finding(finding, look=look)
    return text


def format_doctor(findings: Sequence[tuple[str, Finding]], verdict: str, look: Look, *,
                  fixed: Sequence[str], verbose: bool) -> str:
    """Return doctor's report: what was fixed, a block for each topic, and the verdict."""
    blocks = []
    if fixed:
        blocks.append("".join(f"fixed: {clean_line(text)}\n" for text in fixed))
    topics: dict[str, list[Finding]] = {}
    for topic, finding in findings:
        topics.setdefault(topic, []).append(finding)
    for topic, listed in topics.items():
        blocks.append(format_topic(topic, listed, look, verbose=verbose))
    blocks.append(wrap_text(f"{clean_line(verdict)}\n", look, indent="  "))
    return "\n".join(blocks)


@command("doctor", "find what doesn't work, and say how to fix it", CONFIG, OUT,
         Flag("--fix", "fix what is safe: permissions, stale and missing files"),
         Flag("--verbose", "also list what is right", short="-v"), TIMEOUT, JSON,
         group=LOOK, examples=("doctor", "doctor --fix", "doctor --json"))
def cmd_doctor(options: Namespace, world: World) -> int:
    fleet = None
    problems: Sequence[Finding] = ()
    try:
        fleet = load_config(world, options.config).fleet
    except FleetError as error:
        problems = error.findings or (error.finding,)

    workspace = open_workspace(options, world)
    facts = observe(workspace, fleet, problems=problems, seconds=options.timeout)
    fixed = []
    if options.fix and fleet:
        fixed = fix_files(workspace, facts)
        facts = observe_files(workspace, fleet, facts)

    findings = plan_doctor(fleet, facts)
    step = ALL_LOADED
    ready = ""
    if fleet:  # what `status` says of it
        routes = plan_route_states(fleet, facts.states)
        step = plan_next_step(fleet, facts.states, routes, check_gateway(fleet, facts.holder))
        ready = count_ready(routes)
    verdict = plan_verdict([finding for _, finding in findings], step, ready)
    if options.json:
        listed = [{"topic": topic, **show_record(finding)}
                  for topic, finding in findings]
        print_report(world, "doctor", {
            "verdict": verdict, "fixed": fixed, "findings": listed})
    else:
        world.out(format_doctor(findings, verdict, look_of(world), fixed=fixed,
                                verbose=options.verbose))
    return exit_status(finding for _, finding in findings)


def fix_files(workspace: Workspace, facts: Facts) -> list[str]:
    """Fix outdated generated files and the mode of the key file, and say so for each."""
    fixed = []
    if "env-readable" in facts.leaks:
        fixed.append(f"{facts.env_path}: only you may read it now")
    stale = [change for change in facts.changes
             if change.action in ("created", "updated", "removed")]
    fixed += [f"{change.path}: {change.action}" for change in stale]
    if fixed:
        workspace.write(stale)
    return fixed
