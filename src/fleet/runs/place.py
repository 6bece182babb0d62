"""A task's places: a separate repository for its agent, and another one for its check."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.runs.folder import PLACE_MARK, STATE_LIMIT_BYTES, read_mark
from fleet.runs.git import Git
from fleet.start.errors import FleetError
from fleet.start.gate import LatePattern
from fleet.text.phrases import quote_shell
from fleet.text.terminal import clean_line
from fleet.world.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState, Workplace
    from fleet.world.child import Hold
    from fleet.world.world import World


# A place borrows the person's objects (`objects/info/alternates`) and has its own refs, settings,
# hooks and locks. So nothing that an agent does with git reaches the person's repository. Our own
# git always runs with the person's GIT_DIR, so it never reads the settings of a place. Work is
# brought home as objects, which git checks on the way. Example:
#
#   place/.git/HEAD                     ref: refs/heads/run/fix
#   place/.git/packed-refs              every branch and tag as it was, and run/fix at the base
#   place/.git/subagent-fleet.task      the task's id, which no other place has
#
# We write the files of `.git` ourselves: no template, no hook, no setting of `git init`.

# The person's settings that an agent's git needs in order to see files in the same way.
SETTINGS = LatePattern(
    r"(?s)user\.(name|email)|(filter|lfs)\..*|remote\..*\.(url|fetch|tagopt|promisor"
    r"|partialclonefilter)|url\..*\.insteadof|submodule\..*\.(url|active)"
    r"|extensions\.(objectformat|partialclone)|core\.(autocrlf|eol|safecrlf|filemode"
    r"|ignorecase|precomposeunicode|symlinks|attributesfile|excludesfile)")
NO_PUSH = "an-agent-does-not-push://"  # git knows no such transport
WHOLE = ("-c", "core.sparseCheckout=false", "-c", "core.splitIndex=false")
# Both ends use the person's settings and objects. The last command does not see the objects of
# the place, so it refuses what is incomplete or malformed.
BRING_HOME = ('"$0" "$@" rev-list --objects --stdin --not --all'
              ' | "$0" "$@" pack-objects -q --stdout'
              ' | GIT_ALTERNATE_OBJECT_DIRECTORIES= "$0" "$@" index-pack --stdin --strict')


def find_places(folder: Folder, chosen: str) -> str:
    """Return the directory of a repository's places: outside the checkout, or as chosen."""
    world, repository = folder.world, folder.repository
    if chosen:
        return world.real_path(world.path(repository.main, chosen))
    name = f"{world.split(repository.main)[1]}-{folder.run[:8]}"
    return world.real_path(world.user_place("state", "worktrees", name))


# -- making --


def plan_repository(main: Git) -> dict[str, bytes]:
    """Return the files of a place's `.git`, except its HEAD."""
    world = main.world
    files = {"objects/info/alternates": f"{main.git}/objects\n",
             "config": _plan_config(main)}
    packed = []
    for line in main.out("for-each-ref", "--format=%(objectname) %(refname) %(symref)",
                         "refs/heads", "refs/tags", "refs/remotes").split("\n"):
        commit, _, named = line.partition(" ")
        ref, _, leads = named.partition(" ")
        if leads:
            files[ref] = f"ref: {leads}\n"
        elif ref:
            packed.append(f"{commit} {ref}\n")
    files["packed-refs"] = "".join(packed)
    content = {name: text.encode("utf-8", "surrogateescape") for name, text in files.items()}
    for name in ("shallow", "info/exclude", "info/attributes"):
        path = world.path(main.git, name)
        if world.kind_of(path) == "file":
            content[name] = world.read_part(path, 0, STATE_LIMIT_BYTES)
    return content


def _plan_config(main: Git) -> str:
    """Return the settings of a place: some of the person's, as they are now."""
    world = main.world
    entries = [("core.bare", "false"), ("core.logallrefupdates", "true"),
               ("lfs.storage", world.path(main.git, "lfs"))]
    remotes: dict[str, None] = {}
    listed = main.names("config", "--list", "-z", "--show-scope")
    for scope, entry in zip(listed[::2], listed[1::2]):
        key, has_value, value = entry.partition("\n")
        if scope not in ("local", "worktree") or not SETTINGS.fullmatch(key):
            continue
        if re.fullmatch(r"(?s)remote\..*\.url", key):
            remotes[key.removesuffix("url")] = None
            if not re.match(r"[\w+.-]+:|[^/]+:", value):  # a path, seen from the checkout
                value = world.path(main.tree, value)
        elif key == "lfs.storage":
            value = world.path(main.git, value)
        entries.append((key, value if has_value else "true"))
    entries += [(f"{remote}pushurl", NO_PUSH) for remote in remotes]
    extends = any(key.startswith("extensions.") for key, _ in entries)
    entries.insert(0, ("core.repositoryformatversion", "1" if extends else "0"))
    return "".join(_render_setting(*entry) for entry in entries)


def _render_setting(key: str, value: str) -> str:
    """Return a setting in the format of git's config file."""
    def quote(text: str) -> str:
        text = text.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + text.replace("\n", "\\n").replace("\t", "\\t") + '"'

    section, _, name = key.rpartition(".")
    section, dot, inner = section.partition(".")
    return f"[{section}{' ' + quote(inner) if dot else ''}]\n\t{name} = {quote(value)}\n"


def write_repository(world: World, path: str, mark: str, files: Mapping[str, bytes],
                     head: str) -> None:
    """Write a new `.git` into a place. Its mark comes first, so that a kill leaves it ours.

    `head` is a commit, or a branch and its commit, separated by a blank.
    """
    write_mark(world, path, mark)  # it is never missing, not even for a moment
    git = world.path(path, ".git")
    for name in world.names_in(git):
        if name != PLACE_MARK:
            world.remove_tree(Place(git, name))
    branch, _, commit = head.rpartition(" ")
    own = {"HEAD": f"ref: refs/heads/{branch}\n" if branch else f"{commit}\n"}
    if branch:
        own[f"refs/heads/{branch}"] = f"{commit}\n"
    written = {**files, **{name: text.encode() for name, text in own.items()}}
    world.make_directory(Place(path, ".git/refs/heads"))
    world.replace_files([(Place(path, f".git/{name}"), content, 0o644)
                         for name, content in written.items()])


def make_place(main: Git, path: str, mark: str, files: Mapping[str, bytes],
               head: str) -> None:
    """Make a place, and check out the files of its commit."""
    write_repository(main.world, path, mark, files, head)
    made = git_at(main, path).run("read-tree", "--reset", "-u", head.split(" ")[-1])
    if made.code:
        remove_place(main.world, path)
        said = clean_line(made.talk.strip().split("\n")[-1]) or f"exit {made.code}"
        raise FleetError("worktree-failed", f"its worktree could not be made: {said}")


def clear_place(world: World, path: str, identity: str) -> None:
    """Remove an unfinished place of this task; refuse a directory that is not the task's."""
    kind = world.kind_of(path, follow=False)
    if kind == "absent":
        return
    # After a kill just as it was made, the directory is empty but for its mark.
    hollow = {*world.names_in(path), *world.names_in(world.path(path, ".git"))} <= {
        ".git", f".{PLACE_MARK}.new"}
    if kind == "directory" and (hollow or is_place(world, path, identity)):
        remove_place(world, path)
        return
    raise FleetError("in-the-way", f"{path} already exists, and this task did not make it",
                     fix=f"move it away: `ls -la {quote_shell(path)}`")


def remove_place(world: World, path: str) -> None:
    """Remove a place of ours; the mark that tells that it is ours is removed last."""
    git = world.path(path, ".git")
    for above, last in ((path, ".git"), (git, PLACE_MARK)):
        for name in world.names_in(above):
            if name != last:
                world.remove_tree(Place(above, name))
    world.remove_tree(path)


# -- looking --


def mark_of(folder: Folder, place: Workplace, commit: str = "") -> str:
    """Return the mark of a task's place; a check's place also names the commit in it."""
    return f"{place.id}\n{folder.repository.main}\n{commit}\n"


def write_mark(world: World, path: str, mark: str) -> None:
    """Write the mark of a place, even if its `.git` is no directory any more."""
    if world.kind_of(world.path(path, ".git"), follow=False) != "directory":
        world.remove_tree(Place(path, ".git"))
    world.replace_files([(Place(path, f".git/{PLACE_MARK}"),
                          mark.encode("utf-8", "surrogateescape"), 0o600)])


def is_place(world: World, path: str, identity: str) -> bool:
    """Tell whether a directory carries a task's id."""
    git = world.path(path, ".git")
    return all(world.kind_of(one, follow=False) == "directory" for one in (path, git)) \
        and bool(identity) and read_mark(world, git)[0] == identity


def git_at(main: Git, path: str) -> Git:
    """Return git in a place, with the index of that place."""
    return Git(main.world, main.git, path, main.hold,
               index=main.world.path(path, ".git/index"), settings=WHOLE)


def git_with(main: Git, path: str) -> Git:
    """Return git in the person's repository, which also sees the objects of a place."""
    return Git(main.world, main.git, main.tree, main.hold,
               beside=main.world.path(path, ".git/objects"))


def git_in(folder: Folder, state: TaskState, hold: Hold | None = None) -> Git:
    """Return git in the place of a task's agent; refuse one that is not as we made it."""
    world, place = folder.world, state.place
    path = place.worktree
    if world.kind_of(path, follow=False) != "directory":
        raise FleetError("worktree-gone", f"its worktree is gone: {path}",
                         fix=f"subagent-fleet task retry {state.name} --fresh")
    if place.git != world.path(path, ".git"):
        quoted = quote_shell(path)
        raise FleetError("linked-worktree", "an earlier version made its worktree (what was "
                         f"kept of it is in refs/subagent-fleet/{state.name})",
                         fix=f"git worktree unlock {quoted}; git worktree remove {quoted}; "
                             f"subagent-fleet task retry {state.name} --fresh")
    if not is_place(world, path, place.id):
        raise FleetError("worktree-changed", f"{place.git} is no longer the repository that "
                         "was made there, so nothing is read there",
                         fix=f"look at it: `ls -la {quote_shell(path)}`")
    return git_at(Git(world, folder.repository.common, path, hold), path)


def read_head(world: World, git: str) -> str:
    """Return the commit of a repository's HEAD, read as text, without its settings."""
    name = "HEAD"
    for _ in range(5):
        line = world.read_part(world.path(git, name), 0, 4096).decode(
            "utf-8", "surrogateescape").strip()
        if not line:
            packed = world.read_part(world.path(git, "packed-refs"), 0, STATE_LIMIT_BYTES)
            found = re.search(rf"(?m)^([0-9a-f]{{40,64}}) {re.escape(name)}$",
                              packed.decode("utf-8", "surrogateescape"))
            line = found[1] if found else ""
        if re.fullmatch("[0-9a-f]{40,64}", line):
            return line
        name = line.removeprefix("ref: ")
        if not name.startswith("refs/") or ".." in name:
            break
    raise FleetError("no-head", f"the HEAD of {clean_line(git)} names no commit",
                     fix="check out a branch or a commit there")


# -- bringing home --


def bring_home(main: Git, path: str, commits: Iterable[str]) -> None:
    """Copy commits of a place into the person's repository, with everything they need."""
    wanted = [commit for commit in commits if not main.commit_of(commit)]
    if not wanted:
        return
    world = main.world
    # An agent may have written other paths there.
    alternates = Place(path, ".git/objects/info/alternates")
    world.replace_files([(alternates, f"{main.git}/objects\n".encode(
        "utf-8", "surrogateescape"), 0o644)])
    given = "".join(f"{commit}\n" for commit in wanted)
    ran = git_with(main, path).pipe(BRING_HOME, given.encode())
    if ran.code or not all(map(main.commit_of, wanted)):
        said = [line for line in ran.talk.split("\n") if line.strip()]
        why = clean_line(said[0]) if said else "they are not complete"
        raise FleetError("odd-objects", f"its commits cannot be taken over: {why}",
                         fix=f"look at them: `git -C {quote_shell(path)} fsck`")


def find_commits(main: Git, path: str) -> list[str]:
    """Return the commits in the refs and logs of a place that the person's refs don't reach."""
    world = main.world
    git = world.path(path, ".git")
    files = [world.path(git, name) for name in ("HEAD", "ORIG_HEAD", "packed-refs")]
    for name in ("refs", "logs"):
        files += world.files_below(world.path(git, name))
    text = b"\n".join(world.read_part(file, 0, STATE_LIMIT_BYTES) for file in files)
    named = sorted(set(re.findall(rb"\b[0-9a-f]{40,64}\b", text)))
    both = git_with(main, path)
    kinds = both.out("cat-file", "--batch-check=%(objectname) %(objecttype)",
                     given=b"".join(name + b"^{commit}\n" for name in named))
    commits = [line.split(" ")[0] for line in kinds.split("\n") if line.endswith(" commit")]
    given = "".join(f"{commit}\n" for commit in commits).encode()
    own = set(both.out("rev-list", "--stdin", "--not", "--all", given=given).split("\n"))
    return [commit for commit in dict.fromkeys(commits) if commit in own]
