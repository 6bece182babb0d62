"""Snapshots: the files of a place, kept in a ref."""
from __future__ import annotations

import contextlib
import hashlib
import re
from typing import TYPE_CHECKING

from fleet.runs.folder import RUN_DIRECTORY, STATE_LIMIT_BYTES
from fleet.runs.git import SNAPSHOT_REFS, Git, git_of
from fleet.runs.place import WHOLE, bring_home, read_head
from fleet.start.constants import ENVIRONMENT_FILE
from fleet.start.errors import FleetError
from fleet.start.gate import late_decorator
from fleet.start.record import Record, replace
from fleet.tasks.scope import glob_pattern, is_in_scope
from fleet.tasks.verdict import WorkDone
from fleet.text.json import parse_object
from fleet.text.terminal import clean_line
from fleet.world.places import Place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState, Workplace
    from fleet.world.world import World


def find_copies(folder: Folder, task: TaskSpec) -> list[str]:
    """Return the ignored files of the main checkout that are copied into a worktree."""
    git = git_of(folder)
    include = git.world.path(git.tree, ".worktreeinclude")
    words = ["ls-files", "-z", "-oi"]
    wanted: Collection[str] = ()
    if not task.copy:
        if git.world.kind_of(include) != "file":
            return []
        wanted = {*git.names(*words, f"--exclude-from={include}")}
    return [
        path for path in git.names(*words, "--exclude-standard") if not holds_key(path) and (
            path in wanted or any(glob_pattern(glob).fullmatch(path) for glob in task.copy))]


def copy_files(folder: Folder, paths: Iterable[str], tree: str) -> None:
    """Copy files of the main checkout into a place, except where it has them already."""
    world = folder.world
    for path in paths:
        target = Place(tree, path)
        if world.kind_of(target, follow=False) == "absent":
            world.copy_file(world.path(folder.repository.main, path), target)


def holds_key(path: str) -> bool:
    """Tell whether a file holds the gateway's key, which no agent may have."""
    return path.split("/")[-1] == ENVIRONMENT_FILE


NET_FILES, NET_BYTES = 2000, 64 * 1024 * 1024  # ignored files that a snapshot keeps, too
# Directories that a tool can make again: their names, and the files of that tool, if it needs any.
CACHES = {"__pycache__": "", ".mypy_cache": "", ".pytest_cache": "", ".ruff_cache": "",
          ".tox": "", ".gradle": "", ".turbo": "", ".parcel-cache": "", ".subagent-fleet": "",
          "node_modules": "package.json", "target": "Cargo.toml pom.xml build.sbt",
          ".venv": ".venv/pyvenv.cfg", "venv": "venv/pyvenv.cfg",
          ".next": "next.config.js next.config.mjs next.config.ts",
          ".nuxt": "nuxt.config.js nuxt.config.ts"}


def drop_caches(world: World, tree: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that are not in a cache of a tool."""
    known: dict[str, bool] = {}

    def is_cache(path: str) -> bool:
        above, name = world.split(path)
        files = CACHES[name].split()
        return not files or any(
            world.kind_of(world.path(tree, above, file)) == "file" for file in files)

    kept = []
    for path in paths:
        steps = path.split("/")[:-1]
        places = ["/".join(steps[:end]) for end in range(1, len(steps) + 1)
                  if steps[end - 1] in CACHES]
        for place in places:
            if place not in known:
                known[place] = is_cache(place)
        if not any(known[place] for place in places):
            kept.append(path)
    return kept


class Stored(Record):
    """The trees of a place at one moment."""

    head: str
    old_tree: str  # of head
    # For the branch: no file that is ignored, here or in the main checkout, and no copy.
    tree: str
    net: str  # with the ignored files that are new or changed since setup
    ignored: Mapping[str, str]  # a stamp of the content of each ignored file outside of caches
    fresh: tuple[str, ...]  # of these, the new and changed ones
    listed: tuple[str, ...]  # every ignored file
    nested: tuple[str, ...]  # ignored repositories, which are in none of these trees


def store_tree(git: Git, main: Git, place: Workplace, known: Mapping[str, str] | None, *,
               runs_filters: bool = True) -> Stored:
    """Write all files of a place into git with an index of our own.

    The agent's index is neither used nor changed. Ours starts with the names of HEAD and no
    file times, so that every file is read. `known` are the ignored files that setup has left.
    """
    world = git.world
    nested, odd = world.find_odd(git.tree)
    if odd:
        raise FleetError("odd-file", f"{clean_line(odd[0])} is not a file, directory or "
                         "link, so it cannot be kept", fix="remove it")
    inner = world.path(git.tree, ".git")
    if world.kind_of(world.path(inner, "info/sparse-checkout")) != "absent":
        # A missing file may be deleted or only not checked out: nothing here tells which.
        raise FleetError("sparse-checkout", f"the checkout {clean_line(git.tree)} was made "
                         "sparse, so it cannot be kept whole",
                         fix="`git sparse-checkout disable; rm .git/info/sparse-checkout` in "
                             "it")
    head = read_head(world, inner)
    bring_home(main, git.tree, [head])
    old_tree = main.out("rev-parse", "--verify", f"{head}^{{tree}}")

    settings = list(WHOLE) if runs_filters else [*WHOLE, *no_filters(main)]
    with lend_index(git, settings=settings) as own:
        own.out("read-tree", head)
        hidden, submodules = _refuse_nested(own, nested, place)
        # In a submodule, git would run with settings of the agent.
        leaves = [f":(exclude,literal){path}" for path in submodules]
        own.out("add", "-A", *(["--", ".", *leaves] if leaves else []))
        tree = own.out("write-tree")
        # A new file that the main checkout ignores stays out of the branch. So do copies and the
        # gateway's key, wherever the agent got it.
        new = main.names("diff-tree", "-r", "--name-only", "--no-renames", "--diff-filter=A",
                         "-z", old_tree, tree) if tree != old_tree else []
        asked = [path for path in new if _is_within(main, path)]
        ignored = main.names("check-ignore", "-z", "--stdin", "--no-index", known=1,
                             given=join_names(asked)) if asked else []
        drop = {*ignored, *place.copies, *filter(holds_key, new)}
        if drop:
            own.out("update-index", "-z", "--force-remove", "--stdin",
                    given=join_names(drop))
            tree = own.out("write-tree")

        listed = own.names("ls-files", "-z", "-oi", "--exclude-standard")
        now = world.stamps_of(git.tree, [*ignored, *drop_caches(world, git.tree, listed)])
        fresh = [path for path in now if known is not None and known.get(path) != now[path]]
        return Stored(head, old_tree, tree, _store_fresh(own, tree, place.copies, fresh), now,
                      tuple(fresh), tuple(listed), hidden)


@late_decorator(lambda: contextlib.contextmanager)
def lend_index(git: Git, tree: str = "", **more: Any) -> Iterator[Git]:
    """Give git an index of our own: the one in an agent's place could be a link to any file."""
    index = git.world.path(git.git, RUN_DIRECTORY, f"index-{git.world.token(4)}")
    try:
        yield Git(git.world, git.git, tree or git.tree, git.hold, index=index,
                  **{"settings": WHOLE, **more})
    finally:
        git.world.remove(index)


def _is_within(git: Git, path: str) -> bool:
    """Tell whether no link is on the way to a path; git says nothing about files behind one."""
    place = git.world.parent(git.world.path(git.tree, path))
    return git.world.real_path(place) == place


def _store_fresh(own: Git, tree: str, copies: Collection[str], fresh: Iterable[str]) -> str:
    """Return a tree that also has the fresh ignored files, without copies and the key."""
    kept = own.world.first_files(own.tree, [
        path for path in fresh if path not in copies and not holds_key(path)],
        NET_FILES, NET_BYTES)
    if not kept:
        return tree
    own.out("--literal-pathspecs", "add", "-f", "--pathspec-from-file=-",
            "--pathspec-file-nul", given=join_names(kept))
    return own.out("write-tree")


def join_names(names: Iterable[str]) -> bytes:
    """Return names as git reads them, each ended by a NUL."""
    return b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in names)


def _refuse_nested(own: Git, nested: Iterable[str], place: Workplace
                   ) -> tuple[tuple[str, ...], list[str]]:
    """Refuse repositories inside a place: git would keep only the names of their commits.

    A submodule is allowed if it is empty, or exactly as the task began. Return the ignored
    repositories, which only `task tidy` refuses, and the submodules.
    """
    world = own.world
    inside = {path[len(own.tree) + 1:] for path in nested}
    links = _links_of(own.names("ls-files", "-z", "-s"))
    for inner in links.keys() - inside:
        if world.names_in(world.path(own.tree, inner)):
            raise FleetError("nested-repository", f"files in {inner}, a submodule that was "
                             "not checked out, cannot be kept", fix="move them out")
    hidden = [inner for inner in sorted(inside - links.keys())
              if not own.run("check-ignore", "-q", "--no-index", inner).code]
    known = links.keys() & inside
    begun = _links_of(own.names("ls-tree", "-r", "-z", "--end-of-options",
                                place.start or place.base)) if known else {}
    for inner in sorted(inside - {*hidden}):
        why = "is another repository"
        if inner in known:
            why = _why_changed(own, inner, links[inner], begun.get(inner, ""))
        if why:
            raise FleetError("nested-repository", f"{inner} {why}, so it cannot be kept",
                             fix="commit and push it by hand, or remove it")
    return tuple(hidden), sorted(known)


def _links_of(entries: Iterable[str]) -> dict[str, str]:
    """Return {path: commit} of the submodules in a listing of a tree or an index."""
    found = (re.match(r"160000 (?:commit )?([0-9a-f]+)[^\t]*\t(.*)", entry, re.S)
             for entry in entries)
    return {match[2]: match[1] for match in found if match}


def _why_changed(own: Git, inner: str, commit: str, begun: str) -> str:
    """Return how a submodule differs from the beginning of the task; "" if it doesn't."""
    world = own.world
    tree = world.path(own.tree, inner)
    git = world.path(tree, ".git")
    if world.kind_of(git, follow=False) == "file":
        leads = world.read_part(git, 0, 4096).decode("utf-8", "surrogateescape").strip()
        git = world.real_path(world.path(tree, leads.removeprefix("gitdir: ")))
    if not git.startswith(f"{own.tree}/"):
        return "leads to another repository"
    if not commit == begun == read_head(world, git):
        return "was moved to another commit"
    with lend_index(own, tree, beside=world.path(git, "objects")) as sub:
        sub.out("read-tree", commit)
        return "has changes" if sub.out("ls-files", "-m", "-o") else ""


def no_filters(git: Git) -> list[str]:
    """Return git's options that switch off every filter, for commands that only show."""
    listed = git.run("config", "--name-only",
                     "--get-regexp", r"^filter\..*\.(clean|process)$")
    names = {name.rsplit(".", 1)[0] for name in listed.text.split("\n") if name}
    words = []
    for name in sorted(names):
        words += ["-c", f"{name}.clean=", "-c", f"{name}.process=",
                  "-c", f"{name}.required=false"]
    return words


def take_snapshot(git: Git, main: Git, state: TaskState, label: str,
                  known: Mapping[str, str] | None) -> tuple[WorkDone, Stored]:
    """Keep a place: a commit for the branch, and everything in a ref that git never removes."""
    place = state.place
    stored = store_tree(git, main, place, known)
    parents = [stored.head]
    if place.tip and not main.is_ancestor(place.tip, stored.head):
        parents.append(place.tip)  # the agent has left its branch, whose commits must stay
    commit = stored.head
    if len(parents) > 1 and main.is_ancestor(stored.head, place.tip) \
            and main.out("rev-parse", f"{place.tip}^{{tree}}") == stored.tree:
        commit = place.tip  # it has this tree: its supervisor was killed after making it
    elif len(parents) > 1 or stored.tree != stored.old_tree:
        commit = main.make_commit(stored.tree, parents, state.title)
    whole = commit
    if stored.net != stored.tree:
        whole = main.make_commit(stored.net, [commit], f"{state.name}: with ignored files")
    ref = f"{SNAPSHOT_REFS}/{state.name}/{label}"
    main.out("update-ref", ref, whole)
    return WorkDone(ref, commit, stored.head), stored


def blob_of(world: World, path: str, like: str) -> str:
    """Return git's name for a file's content, with the kind of hash that `like` has."""
    content = world.read_bytes(path, limit=world.size_of(path))
    kind = "sha256" if len(like) == 64 else "sha1"
    return hashlib.new(kind, b"blob %d\0" % len(content) + content).hexdigest()


def find_leak(main: Git, place: Workplace, commit: str, copied: Collection[str]) -> str:
    """Return the path of a copied file in the commits of a branch; "" if there is none.

    A copy is found by its path or by its content, anywhere in the history.
    """
    if not (place.copies or copied):  # an earlier version did not note them
        return ""
    for entry in main.out("rev-list", "--objects", "--end-of-options",
                          f"{place.base}..{commit}").split("\n"):
        blob, _, path = entry.partition(" ")
        if path in place.copies or blob in copied:
            return path
    return ""


def look_at_work(main: Git, state: TaskState, work: WorkDone,
                 copied: Collection[str] = ()) -> WorkDone:
    """Return the work with its changes since the task began, and those outside its scope.

    `copied` are the blobs of the files that were copied into its worktree.
    """
    place = state.place

    def compare(begin: str) -> list[tuple[str, int, int]]:
        files = []
        for entry in main.names("diff-tree", "-r", "--numstat", "-z", "--no-renames",
                                "--end-of-options", begin, work.commit):
            plus, minus, path = entry.split("\t", 2)  # "-" for a binary file
            files.append((path, int(plus.replace("-", "0")), int(minus.replace("-", "0"))))
        return files

    files = compare(place.base)
    # Setup may have changed something before the agent came.
    begun = compare(place.start) if place.start not in ("", place.base) else files
    changed = tuple(path for path, _, _ in begun)
    commits = int(main.out("rev-list", "--count", "--end-of-options",
                           f"{place.base}..{work.commit}"))
    leaked = find_leak(main, place, work.commit, copied)
    if leaked:
        raise FleetError("copy-committed", "the agent has committed "
                         f"{clean_line(leaked)}, the content of a file that was copied and "
                         "is ignored",
                         fix=f"subagent-fleet task retry {state.name} --fresh")
    outside = tuple(path for path in changed if not is_in_scope(state.task, path))
    return replace(work, files=tuple(files), changed=changed, outside=outside,
                   commits=commits)


def settle_branch(git: Git | None, main: Git, place: Workplace, commit: str) -> bool:
    """Move a task's branch to a commit; return False if somebody else has moved it meanwhile.

    No hook runs. The branch in the agent's place moves, too, so that its status is clean.
    """
    ref = f"refs/heads/{place.branch}"
    tip = main.commit_of(ref)
    if tip not in ("", place.tip) and not main.is_ancestor(tip, commit):
        return False
    moved = main.run("update-ref", "-m", "subagent-fleet: done", ref, commit,
                     tip or "0" * len(commit))
    if moved.code:
        if main.commit_of(ref) != tip:
            return False
        raise FleetError("branch-locked", f"the branch {place.branch} could not be moved: "
                         f"{clean_line(moved.talk.split(chr(10))[0])}",
                         fix="if no git is running, remove the lock it names")
    if git:
        follow_branch(git, ref, commit)
    return True


def follow_branch(git: Git, ref: str, commit: str) -> None:
    """Move the branch in a place to the commit that was made of the files there."""
    world = git.world
    head = world.read_part(world.path(git.tree, ".git/HEAD"), 0, 4096)
    if head.decode("utf-8", "surrogateescape").strip() != f"ref: {ref}":
        return
    # Whatever an agent has put in the way, the place stays usable without this.
    with contextlib.suppress(FleetError), lend_index(git) as own:
        own.out("read-tree", commit)
        index = world.read_bytes(own.index, limit=world.size_of(own.index))
        world.replace_files([
            (Place(git.tree, f".git/{ref}"), f"{commit}\n".encode(), 0o644),
            (Place(git.tree, ".git/index"), index, 0o644)])


def read_surroundings(folder: Folder, state: TaskState) -> dict[str, Any]:
    """Return what was there before the agent started: ignored files and copied files."""
    path = folder.of_task(state.name, baseline_of(state.place))
    return parse_object(folder.world.read_part(path, 0, STATE_LIMIT_BYTES * 8)) or {}


def baseline_of(place: Workplace) -> str:
    """Return the name of the file that lists what was there before the agent started."""
    return f"baseline{place.fresh or ''}.json"


def read_baseline(folder: Folder, state: TaskState) -> dict[str, str] | None:
    """Return the ignored files from before the agent started; None if none ever started."""
    known = read_surroundings(folder, state)
    if not known and not state.place.prepared:  # setup has failed
        return None
    listed = known.get("ignored")
    if not isinstance(listed, dict):
        raise FleetError("no-baseline", "the list of what was there before the agent is gone",
                         fix=f"subagent-fleet task retry {state.name} --fresh")
    return listed
