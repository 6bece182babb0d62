"""`skills list`, `skills install`, `plugins install`."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import CONFIG, FORCE, MORE, OUT, REPEAT, Flag, command, split_lists, type_again
from fleet.cli.say import check_names, open_workspace, paths_that, refuse_edited
from fleet.files.skills import (
    PLUGIN_TARGETS,
    SKILL_PLACES,
    installed_skills,
    render_plugins,
    render_skills,
)
from fleet.start.constants import EXIT_OK, EXIT_REFUSED, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.workspace.changes import format_changes, list_changes, read_own_source
from fleet.workspace.config import look_of
from fleet.workspace.directory import Workspace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from fleet.world.world import World


@command("skills list", "show the skills for assistants, and where they are installed", OUT,
         CONFIG, Flag("--user", "in your home, not in this project"),
         group=MORE, examples=("skills list",),
         excludes=("user out",))
def cmd_skills_list(options: Namespace, world: World) -> int:
    workspace = skills_workspace(options, world)
    words = {"created": "absent", "unchanged": "installed"}
    states = {change.path: words.get(change.action, "differs") for change in
              workspace.compare_files(render_skills(SKILL_PLACES, installed_skills()), "skills")}
    text = format_changes(f"Below {workspace.out}:", [*states.items()], look_of(world))
    if "absent" in states.values():
        text += "`subagent-fleet skills install` writes the absent ones.\n"
    world.out(text)
    return EXIT_OK


@command("skills install", "teach your assistants to set up and use the fleet",
         Flag("--target", f"only for these programs: {', '.join(SKILL_PLACES)}", "LIST",
              REPEAT, offers=tuple(SKILL_PLACES)),
         Flag("--skill", "only this skill", "SKILL", REPEAT,
              offers=("subagent-fleet-setup", "subagent-fleet-operations",
                      "subagent-fleet-runs")),
         Flag("--user", "in your home, for every project"), OUT, CONFIG, FORCE,
         group=MORE, examples=("skills install",
                               "skills install --target claude-code --user"),
         excludes=("user out",))
def cmd_skills_install(options: Namespace, world: World) -> int:
    targets = split_lists(options.target)
    check_names("target", targets, SKILL_PLACES, "skills install")
    names = installed_skills()
    shorts = {name.replace("subagent-fleet-", ""): name for name in names}
    skills = [shorts.get(name, name) for name in options.skill]  # `setup` will do
    if "subagent-fleet-bootstrap" in skills:
        raise FleetError("unknown-skill", "skills install: subagent-fleet-bootstrap installs this "
                         "program, which you have; it is part of the plugin alone",
                         status=EXIT_USAGE, fix="subagent-fleet plugins install")
    check_names("skill", skills, names, "skills install")

    wanted = render_skills(targets or SKILL_PLACES, skills or names)
    workspace = skills_workspace(options, world)
    write_bundle(workspace, "skills", wanted, options)
    return EXIT_OK


@command("plugins install", "write a plugin marketplace with the skills, for assistants",
         Flag("--target", f"only for these programs: {', '.join(PLUGIN_TARGETS)}", "LIST",
              REPEAT, offers=PLUGIN_TARGETS), OUT, CONFIG, FORCE,
         group=MORE, examples=("plugins install --out market",))
def cmd_plugins_install(options: Namespace, world: World) -> int:
    targets = split_lists(options.target)
    check_names("target", targets, PLUGIN_TARGETS, "plugins install")
    source = read_own_source(world, "plugins install")
    wanted = render_plugins(targets or PLUGIN_TARGETS, source)
    workspace = open_workspace(options, world)
    write_bundle(workspace, "plugins", wanted, options)
    return EXIT_OK


def skills_workspace(options: Namespace, world: World) -> Workspace:
    """Return the directory for skills: the project's, or the person's home."""
    if not options.user:
        return open_workspace(options, world)
    if world.environ.get("CLAUDE_CONFIG_DIR"):
        raise FleetError("usage", "skills: $CLAUDE_CONFIG_DIR is set, so Claude Code does "
                         "not look into your home", status=EXIT_REFUSED,
                         fix="unset CLAUDE_CONFIG_DIR, or install into the "
                             "project without --user")
    return Workspace(world, world.home)


def write_bundle(workspace: Workspace, target: str, wanted: Mapping[str, bytes],
                 options: Namespace) -> None:
    """Write files that belong to no fleet; a file that a person has edited stays as it is."""
    changes = workspace.compare_files(wanted, target)
    edited = paths_that(changes, "edited")
    if edited and not options.force:
        raise refuse_edited(edited, type_again(options, force=True), "nothing was written")

    workspace.write(changes)
    world = workspace.world
    world.out(format_changes(f"Written below {workspace.out}:",
                             list_changes(changes, is_written=True), look_of(world)))
