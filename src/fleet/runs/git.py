"""Git in a named repository, whatever the directory says."""
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
    """git with a named repository and tree: nothing in a directory can lead it elsewhere.

    Its settings are always those of the person's repository. A task's place is read with a
    separate index, and with the objects there in addition to the person's.
    """

    def __init__(self, world: World, git: str, tree: str, hold: Hold | None = None, *,
                 index: str = "", objects: str = "", beside: str = "",
                 settings: Sequence[str] = ()) -> None:
        self.world = world
        self.git = git
        self.tree = tree
        self.index = index  # "": the repository's own
        self.hold = hold  # which each git holds, so that the next supervisor waits for it
        places = {"GIT_DIR": git, "GIT_WORK_TREE": tree, **IDENTITY}
        if index:
            places["GIT_INDEX_FILE"] = index
        if objects:  # of another repository; new ones are written there, too
            places["GIT_OBJECT_DIRECTORY"] = objects
        if beside:  # in quotes, because a colon would split it
            quoted = beside.replace("\\", "\\\\").replace('"', '\\"')
            places["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = f'"{quoted}"'
        self._environ = world.git_environment(places)
        self._words = ["git", *world.git_words(tree), *settings]

    def run(self, *words: str, given: bytes = b"") -> Ran:
        """Run git; return its exit code and its output."""
        return self._run([*self._words, *words], given)

    def pipe(self, script: str, given: bytes) -> Ran:
        """Run a shell pipe of several gits, each written as `"$0" "$@" WORDS`."""
        program = self.world.which("git") or "git"
        return self._run(["sh", "-c", script, program, *self._words[1:]], given)

    def _run(self, argv: Sequence[str], given: bytes) -> Ran:
        """Run a program as git; raise Wanted if a person has stopped it."""
        ran = self.world.run_program(argv, environ=self._environ, seconds=GIT_SECONDS,
                                     given=given, hold=self.hold)
        if self.hold and ran.code and self.hold.is_over():
            raise Wanted
        return ran

    def out(self, *words: str, known: int = 0, given: bytes = b"") -> str:
        """Return what git prints; raise an error if it fails.

        The exit code `known` is no failure, such as 1 from a command that finds nothing.
        """
        ran = self.run(*words, given=given)
        if ran.code not in (0, known):
            said = clean_line(ran.talk.split("\n")[0]) or f"exit {ran.code}"
            raise FleetError("git-failed", f"git {words[0]} failed: {said}")
        return ran.text

    def names(self, *words: str, **more: Any) -> list[str]:
        """Return the names that git prints, each ended by a NUL."""
        return [name for name in self.out(*words, **more).split("\0") if name]

    def commit_of(self, revision: str) -> str:
        """Return the commit that a revision names; "" if there is none."""
        return self.out("rev-parse", "--quiet", "--verify", "--end-of-options",
                        f"{revision}^{{commit}}", known=1)

    def is_ancestor(self, old: str, new: str) -> bool:
        """Tell whether one commit is in the history of another."""
        return not self.out("rev-list", "--max-count=1", old, f"^{new}", "--")

    def make_commit(self, tree: str, parents: Iterable[str], message: str) -> str:
        """Return a new commit of a tree."""
        words = [word for parent in parents for word in ("-p", parent)]
        return self.out("commit-tree", *words, "-m", message, tree)


def git_of(folder: Folder, hold: Hold | None = None) -> Git:
    """Return git in the main checkout."""
    return Git(folder.world, folder.repository.common, folder.repository.main, hold)
