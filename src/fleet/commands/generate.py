"""`generate`: write the files."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import refuse_home
from fleet.cli.rows import (
    CONFIG,
    FORCE,
    JSON,
    OUT,
    REPEAT,
    SET_UP,
    TARGET_WORD,
    Flag,
    command,
    split_lists,
    type_again,
)
from fleet.cli.say import (
    check_names,
    open_workspace,
    paths_that,
    print_report,
    refuse_edited,
    tell_findings,
    tell_warnings,
)
from fleet.config.rules import TARGET_NAMES
from fleet.files.harnesses import FORMER_PROGRAMS, HARNESSES, OTHER_PROGRAM
from fleet.findings.config import lint_key
from fleet.plan.routes import plan_routes
from fleet.start.constants import (
    ENVIRONMENT_FILE,
    EXIT_OK,
    EXIT_PROBLEM,
    LITELLM_FILE,
)
from fleet.steps.words import format_routes
from fleet.text.phrases import quote_shell
from fleet.text.tables import wrap_text
from fleet.workspace.changes import format_changes, format_diff, list_changes
from fleet.workspace.config import load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.files.target import Change
    from fleet.text.terminal import Look
    from fleet.world.world import World


@command("generate", "write the files for Claude Code, LiteLLM and your shell",
         CONFIG, OUT,
         Flag("--target", f"only these: {', '.join(TARGET_NAMES)}", "LIST", REPEAT,
              offers=TARGET_NAMES),
         Flag("--litellm-only", "only LiteLLM's config",
              more={**TARGET_WORD, "const": "litellm"}),
         Flag("--claude-only", "only the agents", more={**TARGET_WORD, "const": "claude"}),
         Flag("--check", "write nothing; exit 1 when something would change"),
         Flag("--diff", "write nothing; show what would change"), FORCE, JSON, group=SET_UP,
         examples=("generate", "generate --check --diff", "generate --target claude,env"))
def cmd_generate(options: Namespace, world: World) -> int:
    writes = not (options.check or options.diff)
    is_careful = writes and not options.force
    if is_careful:
        refuse_home(options, world)
    config = load_config(world, options.config)
    fleet = config.fleet
    targets = parse_targets(options) or fleet.targets
    others = list(lint_key(fleet, world.environ))
    tell_warnings(config.warnings, world)
    tell_findings(others, world)

    workspace = open_workspace(options, world)
    changes = workspace.compare(fleet, targets, renews=True)
    edited = paths_that(changes, "edited") if is_careful else []
    is_written = writes and not edited
    if is_written:
        workspace.write(changes)
    routes = [{"agent": agent, "route": model.name, "node": model.node,
               "model": model.ollama_model, "alias": model.alias}
              for agent, model in plan_routes(fleet).items()]
    report = {"out": workspace.out, "written": is_written,
              "findings": (*config.warnings, *others),
              "files": [{"path": path, "action": action}
                        for path, action in list_changes(changes, is_written=is_written)],
              "diff": format_diff(changes, fleet) if options.diff else None, "routes": routes}
    if not edited:
        return show_generation(report, fleet, changes, options, world)

    if not options.json:
        theirs = [change for change in changes if change.path in edited]
        world.err(format_diff(theirs, fleet, look_of(world, "stderr")))
    error = refuse_edited(edited, type_again(options, force=True), "nothing was written")
    error.report = report
    raise error


def show_generation(report: Mapping[str, Any], fleet: Fleet, changes: Sequence[Change],
                    options: Namespace, world: World) -> int:
    """Print what was or would be written; return the exit status."""
    listed = [(file["path"], file["action"]) for file in report["files"]]
    look = look_of(world)
    if options.json:
        print_report(world, "generate", report)
    elif options.diff:
        world.write(format_diff(changes, fleet, look))
    elif report["written"]:
        targets = parse_targets(options) or fleet.targets
        world.out(format_changes("Generated:", listed, look)
                  + format_after_generate(fleet, targets, report["out"], look))
    else:
        world.out(format_changes("Would generate:", listed, look))
    differs = any(action != "unchanged" for _, action in listed)
    return EXIT_PROBLEM if options.check and differs else EXIT_OK


def format_after_generate(fleet: Fleet, targets: Sequence[str], out: str, look: Look) -> str:
    """Return which machine does what, and what to type next."""
    everything = "  subagent-fleet up\n"
    if targets != fleet.targets:
        lines = "".join(f"  subagent-fleet launch {name}\n" for name in targets
                        if name in HARNESSES)
        return f"\nNext:\n{lines or everything}"

    here = out if out.startswith(("/", ".")) else f"./{out}"
    environment = quote_shell(f"{here}/{ENVIRONMENT_FILE}")
    serve = "  subagent-fleet serve\n"
    gateway = fleet.gateway
    if gateway.provider == "litellm":
        config = quote_shell(f"{here}/{LITELLM_FILE}")
        serve = (f"  . {environment}\n  litellm --config {config} --host {gateway.host} "
                 f"--port {gateway.port}\n")
    text = ("\nNext: load the models, serve them and start Claude Code in one step:\n"
            f"{everything}\nOr start the gateway in its own terminal:\n{serve}"
            "and Claude Code in another:\n  subagent-fleet launch claude\n"
            f"(or: . {environment}; claude)\n")
    return f"\n{format_routes(fleet, look)}{wrap_text(text, look)}"


def parse_targets(options: Namespace) -> tuple[str, ...]:
    """Return the chosen targets, if there are any."""
    words = split_lists(options.target)
    other = OTHER_PROGRAM if FORMER_PROGRAMS.intersection(words) else ""
    check_names("target", words, TARGET_NAMES, "generate", other)
    return tuple(name for name in TARGET_NAMES if name in words)
