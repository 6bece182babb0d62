"""Git, and nothing but the git that is meant; worktrees: made, found, dropped."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.folder import Wanted
from fleet.start.errors import FleetError
from fleet.text.phrases import quote_shell
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.world.child import Hold, Ran
    from fleet.world.world import World


IDENTITY = {"GIT_AUTHOR_NAME": "subagent-fleet",
            "GIT_AUTHOR_EMAIL": "subagent-fleet@localhost",
            "GIT_COMMITTER_NAME": "subagent-fleet",
            "GIT_COMMITTER_EMAIL": "subagent-fleet@localhost"}
SNAPSHOT_REFS = "refs/subagent-fleet"
OTHER_INDEX = "subagent-fleet-index"
GIT_SECONDS = 600.0


class Git:
    """git in one place, named in each call: what lies in a worktree leads it nowhere else."""

    def __init__(self, world: World, git: str, tree: str, hold: Hold | None = None, *,
                 index: str = "", objects: str = "",
                 settings: Sequence[str] = ()) -> None:
        self.world = world
        self.git = git
        self.tree = tree
        self.hold = hold  # which each git holds: who comes next waits until it has ended
        places = {"GIT_DIR": git, "GIT_WORK_TREE": tree, **IDENTITY}
        if index:
            places["GIT_INDEX_FILE"] = index
        if objects:  # of another repository, where new ones are written, too
            places["GIT_OBJECT_DIRECTORY"] = objects
        self._environ = world.git_environment(places)
        self._words = ["git", *world.git_words(tree), *settings]

    def run(self, *words: str, given: bytes = b"") -> Ran:
        """Run git; return all that it says."""
        ran = self.world.run_program([*self._words, *words], environ=self._environ,
                                     seconds=GIT_SECONDS, given=given, hold=self.hold)
        if self.hold and ran.code and self.hold.is_over():
            raise Wanted
        return ran

    def out(self, *words: str, known: int = 0, given: bytes = b"") -> str:
        """Return what git prints. A failure is never taken for `nothing`: it is raised.

        A code that is `known` is none, such as 1 of what looks for something.
        """
        ran = self.run(*words, given=given)
        if ran.code not in (0, known):
            said = clean_line(ran.talk.split("\n")[0]) or f"exit {ran.code}"
            raise FleetError("git-failed", f"git {words[0]} failed: {said}")
        return ran.text

    def names(self, *words: str, **more: Any) -> list[str]:
        """Return the names that git prints with a NUL after each."""
        return [name for name in self.out(*words, **more).split("\0") if name]

    def commit_of(self, revision: str) -> str:
        """Return the commit that a revision names; "" where there is none."""
        seen = self.run("rev-parse", "--quiet", "--verify", "--end-of-options",
                        f"{revision}^{{commit}}")
        return seen.text if seen.code == 0 else ""

    def is_ancestor(self, old: str, new: str) -> bool:
        """Tell whether all of one commit is in another."""
        return not self.out("rev-list", "--max-count=1", old, f"^{new}", "--")

    def make_commit(self, tree: str, parents: Iterable[str], message: str) -> str:
        """Return a new commit of a tree."""
        words = [word for parent in parents for word in ("-p", parent)]
        return self.out("commit-tree", *words, "-m", message, tree)


def git_of(folder: Folder, hold: Hold | None = None) -> Git:
    """Return git in the main checkout."""
    return Git(folder.world, folder.repository.common, folder.repository.main, hold)


def git_in(folder: Folder, tree: str, git: str, hold: Hold | None = None) -> Git:
    """Return git in a worktree of ours, which must still be the one that was made.

    Its `.git` is a file that leads to the git directory that was noted, and that leads back.
    """
    world = folder.world
    link = world.path(tree, ".git")
    if world.kind_of(tree, follow=False) != "directory":
        raise FleetError("worktree-gone", f"its worktree is gone: {tree}",
                         fix="a new one: `subagent-fleet task retry NAME --fresh`")
    there = [_read_line(world, path) for path in (
        link, world.path(git, "gitdir"), world.path(git, "commondir"))]
    if (there != [f"gitdir: {git}", link, "../.."]
            or world.kind_of(link, follow=False) != "file"
            or world.parent(git) != world.path(folder.repository.common, "worktrees")):
        raise FleetError("worktree-changed", f"{link} no longer leads to this repository, so "
                         "nothing is read there",
                         fix=f"look at it: `ls -la {quote_shell(tree)}`")
    return Git(world, git, tree, hold)


def _read_line(world: World, path: str) -> str:
    return world.read_part(path, 0, 4096).decode("utf-8", "surrogateescape").strip()


def list_worktrees(git: Git) -> dict[str, dict[str, str]]:
    """Return {path: what git says of a worktree}: `branch`, and `locked` with the reason."""
    worktrees = {}
    for block in git.out("worktree", "list", "--porcelain").split("\n\n"):
        words = dict(line.partition(" ")[::2] for line in block.split("\n") if line)
        words["branch"] = words.get("branch", "").replace("refs/heads/", "", 1)
        worktrees[words.get("worktree", "")] = words
    return worktrees


def find_worktrees_place(folder: Folder, chosen: str) -> str:
    """Return where a repository's worktrees go: outside of the checkout, or as chosen."""
    world, repository = folder.world, folder.repository
    if chosen:
        return world.real_path(world.path(repository.main, chosen))
    name = f"{world.split(repository.main)[1]}-{folder.run[:8]}"
    return world.real_path(world.user_place("state", "worktrees", name))


def lock_of(state: TaskState) -> str:
    """Return the reason with which a task's worktrees are locked: what is not, is not its."""
    return f"subagent-fleet task {state.name} {state.id}".rstrip()


def add_worktree(git: Git, state: TaskState, *, for_check: bool = False) -> str:
    """Make a worktree of a task, for its agent on its branch or for its check on none.

    Returns its git directory. Only what git refuses is looked into: who waits for a place
    waits for this.
    """
    world = git.world
    path = f"{state.worktree}.check" if for_check else state.worktree
    words = ["-c", "core.sparseCheckout=false", "worktree", "add", "--quiet", "--lock",
             "--reason", lock_of(state)]
    if state.git or world.kind_of(path, follow=False) != "absent":
        _make_way(git, path, state, for_check=for_check)
    begin = state.base
    if state.kept and git.commit_of(state.kept):
        begin = state.kept  # never before its own work
    is_new = not for_check and not _take_branch(git, state, begin)
    if for_check:
        words += ["--detach", path, state.start]
    elif is_new:
        words += ["-b", state.branch, path, begin]
    else:
        words += [path, state.branch]

    world.make_directory(world.parent(path), is_private=True)
    made = git.run(*words)
    if made.code:
        if is_new:
            git.run("update-ref", "-d", f"refs/heads/{state.branch}", begin)
        _make_way(git, path, state, for_check=for_check)
        made = git.run(*words)
    if made.code:
        said = clean_line(made.talk.strip().split("\n")[-1]) or f"exit {made.code}"
        raise FleetError("worktree-failed", f"its worktree could not be made: {said}")
    return _read_line(world, world.path(path, ".git")).removeprefix("gitdir: ")


def _make_way(git: Git, path: str, state: TaskState, *, for_check: bool) -> None:
    """Remove what is left of a worktree of this task, where nobody can have worked.

    Anything else in the way is refused: nobody's directory is ever taken over.
    """
    known = list_worktrees(git).get(path)
    if known and known.get("locked") != lock_of(state):
        raise FleetError("worktree-taken", f"{path} is a worktree of the branch "
                         f"{known['branch'] or 'none'}, which this task did not make",
                         fix="move it away: `git worktree move`")
    git.world.remove_empty(path)  # git was killed just after it had made that
    is_there = git.world.kind_of(path, follow=False) != "absent"
    if known and (for_check or not is_there):
        drop_unused(git, state, known)
    elif is_there:
        raise FleetError("in-the-way", f"{path} already exists",
                         fix=f"move it away: `ls -la {quote_shell(path)}`")


def _take_branch(git: Git, state: TaskState, begin: str) -> bool:
    """Tell whether a task's branch exists, and put it where the task begins.

    It is the task's if it is where the task has left it, or has all of its work. Any other
    is a person's, even one that has no commit of its own.
    """
    ref = f"refs/heads/{state.branch}"
    tip = git.commit_of(ref)
    if not tip:
        return False
    if state.start and git.is_ancestor(begin, tip):
        return True
    if state.start and tip == state.tip:
        git.out("update-ref", ref, begin, tip)
        return True
    raise FleetError("branch-taken", f"the branch `{state.branch}` already exists",
                     fix=f"write another `branch:`, or `git branch -m {state.branch} old`")


def drop_unused(git: Git, state: TaskState, known: Mapping[str, str]) -> None:
    """Remove a worktree in which no agent has worked, first the branch made with it.

    A kill between the two leaves a worktree that is known by its lock; a branch has none.
    """
    if known["branch"] == state.branch:
        git.run("update-ref", "-d", f"refs/heads/{state.branch}", known["HEAD"])
    drop_worktree(git, known["worktree"])


def drop_worktree(git: Git, path: str) -> None:
    """Remove a worktree of ours; what is in it is somewhere else, or nobody's."""
    git.world.remove_empty(path)  # as a git that was killed leaves it: no git takes that away
    # Twice: locked or not. Unlocked by a command before, a kill between them left one that
    # was ours no longer.
    words = ["worktree", "remove", "--force", "--force", path]
    if git.run(*words).code:  # a git that was killed here has removed the `.git` it looks for
        git.run("worktree", "repair", path)
        git.out(*words)
