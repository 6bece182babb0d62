"""What is in a worktree, kept in a ref."""
from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fleet.runs.folder import STATE_LIMIT_BYTES
from fleet.runs.git import OTHER_INDEX, SNAPSHOT_REFS, Git, git_of
from fleet.start.constants import ENVIRONMENT_FILE
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.tasks.scope import glob_pattern, is_in_scope
from fleet.tasks.verdict import WorkDone
from fleet.text.json import parse_object
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any, NoReturn

    from fleet.config.task_file import TaskSpec
    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.world.world import World


def find_copies(folder: Folder, task: TaskSpec) -> list[str]:
    """Return the ignored files of the main checkout that a worktree gets a copy of."""
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


def holds_key(path: str) -> bool:
    """Tell whether a file is that of the gateway's key, which is no agent's business."""
    return path.split("/")[-1] == ENVIRONMENT_FILE


NET_FILES, NET_BYTES = 2000, 64 * 1024 * 1024  # ignored files that a snapshot keeps as well
# What a tool can make again: by name, where a file of that tool lies beside or inside.
CACHES = {"__pycache__": "", ".mypy_cache": "", ".pytest_cache": "", ".ruff_cache": "",
          ".tox": "", ".gradle": "", ".turbo": "", ".parcel-cache": "", ".subagent-fleet": "",
          "node_modules": "package.json", "target": "Cargo.toml pom.xml build.sbt",
          ".venv": ".venv/pyvenv.cfg", "venv": "venv/pyvenv.cfg",
          ".next": "next.config.js next.config.mjs next.config.ts",
          ".nuxt": "nuxt.config.js nuxt.config.ts"}


def drop_caches(world: World, tree: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that lie in no cache of a tool."""
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
    """The trees of a worktree as it was."""

    head: str
    old_tree: str  # of head
    # For the branch: nothing that is ignored, here or in the main checkout; no copy.
    tree: str
    net: str  # with the ignored files that are new or changed since setup
    ignored: Mapping[str, str]  # what tells the content of each ignored file, caches aside
    fresh: tuple[str, ...]  # of these, the new and changed ones
    nested: tuple[str, ...]  # repositories that are ignored: in none of these trees


def store_tree(git: Git, main: Git, copies: Sequence[str], known: Mapping[str, str] | None, *,
               runs_filters: bool = True) -> Stored:
    """Write all files of a worktree into git, with an index of ours; its own is left alone.

    What the agent's index says of a file, or of when it changed, means nothing here: ours
    begins with the names of HEAD and knows no file. `known` are the ignored files that
    setup has left.
    """
    world = git.world
    nested, odd = world.find_odd(git.tree)
    if world.kind_of(world.path(git.git, "info/sparse-checkout")) != "absent" \
            and git.run("config", "core.sparseCheckout").text == "true":
        # What is not there may be deleted, or not: that only the agent knows.
        raise FleetError("sparse-checkout", f"the checkout {clean_line(git.tree)} was "
                         "made sparse, so it cannot be kept whole",
                         fix="`git sparse-checkout disable` in it")
    if odd:
        raise FleetError("odd-file", f"{clean_line(odd[0])} is not a file, directory or "
                         "link, so it cannot be kept", fix="remove it")
    settings = ["-c", "core.sparseCheckout=false"]
    # Nor when git looks again at a file as new as our index, as it writes it.
    if not runs_filters:
        settings += no_filters(git)
    index = world.path(git.git, f"{OTHER_INDEX}-{world.token(4)}")
    own = Git(world, git.git, git.tree, git.hold, index=index, settings=settings)
    head, old_tree = git.out("rev-parse", "HEAD", "HEAD^{tree}").split("\n")
    try:
        own.out("read-tree", head)
        hidden = _refuse_nested(own, nested)
        own.out("add", "-A")
        tree = own.out("write-tree")
        # A new file that the main checkout ignores stays out of the branch, and so do a copy
        # and the gateway's key, wherever an agent has fetched it from.
        new = git.names("diff-tree", "-r", "--name-only", "--no-renames", "--diff-filter=A",
                        "-z", old_tree, tree) if tree != old_tree else []
        asked = [path for path in new if _is_within(main, path)]
        ignored = main.names("check-ignore", "-z", "--stdin", "--no-index", known=1,
                             given=join_names(asked)) if asked else []
        drop = {*ignored, *copies, *filter(holds_key, new)}
        if drop:
            own.out("update-index", "-z", "--force-remove", "--stdin",
                    given=join_names(drop))
            tree = own.out("write-tree")

        listed = git.names("ls-files", "-z", "-oi", "--exclude-standard")
        now = world.stamps_of(git.tree, [*ignored, *drop_caches(world, git.tree, listed)])
        fresh = [path for path in now if known is not None and known.get(path) != now[path]]
        return Stored(head, old_tree, tree, _store_fresh(own, tree, copies, fresh), now,
                      tuple(fresh), hidden)
    finally:
        world.remove(index)


def _is_within(git: Git, path: str) -> bool:
    """Tell whether no link lies on the way to a path: git says nothing of what is behind."""
    place = git.world.parent(git.world.path(git.tree, path))
    return git.world.real_path(place) == place


def _store_fresh(own: Git, tree: str, copies: Collection[str], fresh: Iterable[str]) -> str:
    """Return the net's tree: with ignored files, but for copies and the gateway's key."""
    kept = own.world.first_files(own.tree, [
        path for path in fresh if path not in copies and not holds_key(path)],
        NET_FILES, NET_BYTES)
    if not kept:
        return tree
    own.out("--literal-pathspecs", "add", "-f", "--pathspec-from-file=-",
            "--pathspec-file-nul", given=join_names(kept))
    return own.out("write-tree")


def join_names(names: Iterable[str]) -> bytes:
    return b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in names)


def _refuse_nested(own: Git, nested: Iterable[str]) -> tuple[str, ...]:
    """Refuse repositories inside a worktree: git would keep only the names of their commits.

    A submodule may be there as long as it is exactly what HEAD says, or empty. Returns those
    that are ignored, which only a tidying has to refuse.
    """
    def refuse(what: str, fix: str) -> NoReturn:
        raise FleetError("nested-repository", f"{what} cannot be kept", fix=fix)

    world = own.world
    inside = {path[len(own.tree) + 1:]: path for path in nested}
    links = {}
    for entry in own.names("ls-files", "-z", "-s"):
        mode, _, inner = entry.partition("\t")
        if mode.startswith("160000 "):
            links[inner] = mode.split(" ")[1]
            if inner not in inside and world.names_in(world.path(own.tree, inner)):
                refuse(f"files in {inner}, a submodule that was not checked out,",
                       "move them out")
    ignored = []
    for inner, path in inside.items():
        if inner in links:
            why = why_submodule_is_not_saved(world, path)
            if why or links[inner] != world.run_git(["rev-parse", "HEAD"], path).text:
                refuse(f"the submodule {inner} {why or 'was moved'}, which",
                       "commit and push it by hand")
        elif own.run("check-ignore", "-q", "--no-index", inner).code:
            refuse(f"the nested repository {inner}", "remove its .git, or ignore it")
        else:
            ignored.append(inner)
    return tuple(ignored)


def why_submodule_is_not_saved(world: World, path: str) -> str:
    """Return what is only in a submodule, whatever a person's settings say of status."""
    status = world.run_git(["status", "--porcelain", "--ignored", "--untracked-files=all",
                            "--ignore-submodules=none"], path)
    if status.code or status.text:
        return "has changes"
    ahead = world.run_git(["rev-list", "--max-count=1", "--all", "--reflog", "HEAD", "--not",
                           "--remotes"], path)
    return "has commits that exist nowhere else" if ahead.code or ahead.text else ""


def no_filters(git: Git) -> list[str]:
    """Return git's words that switch off every filter: what only shows runs none of them."""
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
    """Keep a worktree: a commit for the branch, and all in a ref no git command removes."""
    stored = store_tree(git, main, state.copies, known)
    tip = main.commit_of(f"refs/heads/{state.branch}")
    parents = [stored.head]
    if tip and tip != stored.head and not main.is_ancestor(tip, stored.head):
        parents.append(tip)  # the agent has left its branch: nothing that was there is lost
    commit = stored.head
    if len(parents) > 1 or stored.tree != stored.old_tree:
        first = (state.task.prompt or "").strip().split("\n")[0]
        commit = git.make_commit(stored.tree, parents,
                                 f"{state.name}: {' '.join(first.split())[:100]}")
    whole = commit
    if stored.net != stored.tree:
        whole = git.make_commit(stored.net, [commit], f"{state.name}: with ignored files")
    ref = f"{SNAPSHOT_REFS}/{state.name}/{label}"
    main.out("update-ref", ref, whole)
    return WorkDone(ref, commit, stored.head, tip), stored


def blob_of(world: World, path: str, like: str) -> str:
    """Return the name that a file's content has in git, whose names are like another."""
    content = world.read_bytes(path, limit=world.size_of(path))
    kind = "sha256" if len(like) == 64 else "sha1"
    return hashlib.new(kind, b"blob %d\0" % len(content) + content).hexdigest()


def find_leak(main: Git, state: TaskState, commit: str, copied: Collection[str]) -> str:
    """Return where a copy is in what a branch would reach: by its path, or by its content.

    However the history looks: merged in, left behind, under another name.
    """
    if not state.copies:
        return ""
    for entry in main.out("rev-list", "--objects", "--end-of-options",
                          f"{state.base}..{commit}").split("\n"):
        blob, _, path = entry.partition(" ")
        if path in state.copies or blob in copied:
            return path
    return ""


def look_at_work(main: Git, state: TaskState, work: WorkDone,
                 copied: Collection[str] = ()) -> WorkDone:
    """Return what differs from where the task began, and what of it is outside its scope.

    `copied` are the blobs of the files that were copied into its worktree.
    """
    def compare(begin: str) -> list[tuple[str, int, int]]:
        files = []
        for entry in main.names("diff-tree", "-r", "--numstat", "-z", "--no-renames",
                                "--end-of-options", begin, work.commit):
            plus, minus, path = entry.split("\t", 2)  # "-" of what is no text
            files.append((path, int(plus.replace("-", "0")), int(minus.replace("-", "0"))))
        return files

    files = compare(state.base)
    # Setup may have changed something before the agent came.
    begun = compare(state.start) if state.start not in ("", state.base) else files
    changed = tuple(path for path, _, _ in begun)
    commits = int(main.out("rev-list", "--count", "--end-of-options",
                           f"{state.base}..{work.commit}"))
    leaked = find_leak(main, state, work.commit, copied)
    if leaked:
        raise FleetError("copy-committed", "the agent has committed "
                         f"{clean_line(leaked)}, the content of a file that was copied and "
                         "is ignored",
                         fix=f"subagent-fleet task retry {state.name} --fresh")
    outside = tuple(path for path in changed if not is_in_scope(state.task, path))
    return replace(work, files=tuple(files), changed=changed, outside=outside,
                   commits=commits)


def settle_branch(git: Git | None, main: Git, branch: str, commit: str, seen: str) -> bool:
    """Put a branch at a commit; False: it is no longer where it was seen.

    No hook runs. The worktree's own index follows, so that its status is clean.
    """
    ref = f"refs/heads/{branch}"
    moved = main.run("update-ref", "-m", "subagent-fleet: done", ref, commit,
                     seen or "0" * len(commit))
    if moved.code:
        if main.commit_of(ref) != seen:
            return False
        raise FleetError("branch-locked", f"the branch {branch} could not be moved: "
                         f"{clean_line(moved.talk.split(chr(10))[0])}",
                         fix="if no git is running, remove the lock it names")
    if git and commit != seen and git.run("symbolic-ref", "--quiet", "HEAD").text == ref:
        git.run("-c", "core.sparseCheckout=false", "read-tree", commit)
    return True


def look_outside(main: Git) -> list[str]:
    """Return what no task has any business with: other refs, and the main checkout."""
    refs = main.out("for-each-ref", "--format=%(refname) %(objectname)").split("\n")
    world = main.world
    settings = ["config", "config.worktree"]
    for directory in ("info", "hooks"):
        settings += [f"{directory}/{name}"
                     for name in world.names_in(world.path(main.git, directory))]
    stamps = world.stamps_of(main.git, settings)
    return [*(line for line in refs
              if not line.startswith(("refs/heads/run/", f"{SNAPSHOT_REFS}/"))),
            *(f".git/{name} {stamp}" for name, stamp in stamps.items()),
            *main.names("status", "--porcelain=v1", "-z", "--no-renames")]


def note_surroundings(main: Git, before: object, branches: Collection[str]) -> tuple[str, ...]:
    """Return what has changed around a task meanwhile; a person may have done it."""
    changed = set(before) ^ set(look_outside(main)) if isinstance(before, list) else set()
    names = {line.split(" ")[0] if line.startswith(("refs/", ".git/")) else line[3:]
             for line in changed}
    names -= {"", *(f"refs/heads/{branch}" for branch in branches)}
    if not names:
        return ()
    return ("your checkout or its refs changed meanwhile, by you or by a command: "
            f"{some_of(sorted(names), 3)}",)


def read_surroundings(folder: Folder, state: TaskState) -> dict[str, Any]:
    """Return what there was before an agent came: ignored files, refs, the main checkout."""
    path = folder.of_task(state.name, baseline_of(state))
    return parse_object(folder.world.read_part(path, 0, STATE_LIMIT_BYTES * 8)) or {}


def baseline_of(state: TaskState) -> str:
    """Return the file that lists what there was before an agent came."""
    return f"baseline{state.fresh or ''}.json"


def read_baseline(folder: Folder, state: TaskState) -> dict[str, str] | None:
    """Return the ignored files a worktree had before its agent came; None: none ever came."""
    known = read_surroundings(folder, state)
    if not known and not state.prepared:  # setup has failed
        return None
    listed = known.get("ignored")
    if not isinstance(listed, dict):
        raise FleetError("no-baseline", "the list of what was there before the agent is gone",
                         fix=f"subagent-fleet task retry {state.name} --fresh")
    return listed
