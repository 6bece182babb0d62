"""Git, and nothing but the git that is meant."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.folder import Wanted
from fleet.start.errors import FleetError
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.world.child import Hold, Ran
    from fleet.world.world import World


IDENTITY = {"GIT_AUTHOR_NAME": "subagent-fleet",
            "GIT_AUTHOR_EMAIL": "subagent-fleet@localhost",
            "GIT_COMMITTER_NAME": "subagent-fleet",
            "GIT_COMMITTER_EMAIL": "subagent-fleet@localhost"}
SNAPSHOT_REFS = "refs/subagent-fleet"
GIT_SECONDS = 600.0


class Git:
    """git in one place, named in each call: what lies in a directory leads it nowhere else.

    Its settings are always those of the person's repository. What is in a task's place is
    looked at with an index of its own, and with the objects there beside the person's.
    """

    def __init__(self, world: World, git: str, tree: str, hold: Hold | None = None, *,
                 index: str = "", objects: str = "", beside: str = "",
                 settings: Sequence[str] = ()) -> None:
        self.world = world
        self.git = git
        self.tree = tree
        self.index = index  # "": the repository's own
        self.hold = hold  # which each git holds: who comes next waits until it has ended
        places = {"GIT_DIR": git, "GIT_WORK_TREE": tree, **IDENTITY}
        if index:
            places["GIT_INDEX_FILE"] = index
        if objects:  # of another repository, where new ones are written, too
            places["GIT_OBJECT_DIRECTORY"] = objects
        if beside:  # in quotes, as a colon would part it
            quoted = beside.replace("\\", "\\\\").replace('"', '\\"')
            places["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = f'"{quoted}"'
        self._environ = world.git_environment(places)
        self._words = ["git", *world.git_words(tree), *settings]

    def run(self, *words: str, given: bytes = b"") -> Ran:
        """Run git; return all that it says."""
        return self._run([*self._words, *words], given)

    def pipe(self, script: str, given: bytes) -> Ran:
        """Run a shell's pipe of several gits, each of them written `"$0" "$@" WORDS`."""
        program = self.world.which("git") or "git"
        return self._run(["sh", "-c", script, program, *self._words[1:]], given)

    def _run(self, argv: Sequence[str], given: bytes) -> Ran:
        ran = self.world.run_program(argv, environ=self._environ, seconds=GIT_SECONDS,
                                     given=given, hold=self.hold)
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
        return self.out("rev-parse", "--quiet", "--verify", "--end-of-options",
                        f"{revision}^{{commit}}", known=1)

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
