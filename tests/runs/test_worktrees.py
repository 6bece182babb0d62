"""Worktrees of tasks: `task tidy` removes one only where nothing of it is lost."""
import os
import random
import shutil
import subprocess

import pytest

import subagent_fleet as sf
from task_rig import Place
from tools import ROOT, in_parts

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX")
HISTORIES = int(os.environ.get("SUBAGENT_FLEET_HISTORIES", "25"))


def commit(place, rng):
    place.git("commit", "-qm", f"c{rng.random()}", "--allow-empty", check=False)


def write(place, path, rng):
    target = place.tree / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{path} {rng.random()}\n")


def nested(place, rng, path, commits):
    inner = place.tree / path
    inner.mkdir(parents=True, exist_ok=True)
    place.git("init", "-q", cwd=inner)
    write(place, f"{path}/inside.txt", rng)
    if commits:
        place.git("add", ".", cwd=inner)
        place.git("commit", "-qm", "inner", cwd=inner, check=False)


def conflict(place, rng, *how):
    write(place, "a.txt", rng)
    place.git("commit", "-qam", "mine", check=False)
    place.git("checkout", "-q", "-b", f"side{rng.randrange(10**6)}", "HEAD~1", check=False)
    write(place, "a.txt", rng)
    place.git("commit", "-qam", "theirs", check=False)
    place.git(*how, "run/t", check=False)


def submodule(place, rng, is_dirty):
    place.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(place.repo),
              "sub", check=False)
    if is_dirty:
        write(place, f"sub/{rng.choice(['new.txt', 'a.txt'])}", rng)
    elif rng.random() < 0.5:
        place.git("commit", "-qm", "sub", check=False)


def sub_commit(place, rng):
    submodule(place, rng, False)
    if (place.tree / "sub").is_dir():
        write(place, "sub/a.txt", rng)
        place.git("commit", "-qam", "in sub", cwd=place.tree / "sub", check=False)


# Every row of what is known of git and worktrees, and what a person or an agent may do there.
STEPS = [
    lambda p, r: write(p, "a.txt", r), lambda p, r: write(p, "new.txt", r),
    lambda p, r: write(p, "deep/er/new.txt", r), lambda p, r: write(p, "x.log", r),
    lambda p, r: write(p, "build/out.bin", r), lambda p, r: write(p, "before.log", r),
    lambda p, r: write(p, 'odd "name"\n\'x', r), lambda p, r: write(p, "-dash", r),
    lambda p, r: write(p, ":(glob)x.log", r), lambda p, r: p.git("add", "-A", check=False),
    commit, commit, lambda p, r: (p.git("add", "-A", check=False), commit(p, r)),
    lambda p, r: (write(p, "a.txt", r), p.git("add", "a.txt", check=False), write(p, "a.txt", r)),
    lambda p, r: (write(p, "s.txt", r), p.git("add", "s.txt", check=False),
                  (p.tree / "s.txt").unlink()),
    lambda p, r: (write(p, "n.txt", r), p.git("add", "-N", "n.txt", check=False)),
    lambda p, r: p.git("rm", "-q", "--cached", "b.txt", check=False),
    lambda p, r: (p.tree / "b.txt").exists() and (p.tree / "b.txt").unlink(),
    lambda p, r: p.git("mv", "b.txt", "c.txt", check=False),
    lambda p, r: p.git("checkout", "-q", "--detach", check=False),
    lambda p, r: (p.git("checkout", "-q", "--detach", check=False), write(p, "d.txt", r),
                  p.git("add", "d.txt", check=False), commit(p, r)),
    lambda p, r: (write(p, "e.txt", r), p.git("add", "e.txt", check=False), commit(p, r),
                  p.git("reset", "-q", "--hard", "HEAD~1", check=False)),
    lambda p, r: p.git("commit", "-q", "--amend", "--allow-empty", "-m", f"{r.random()}",
                       check=False),
    lambda p, r: p.git("checkout", "-q", "-b", f"other{r.randrange(10**6)}", check=False),
    lambda p, r: p.git("checkout", "-q", "--orphan", f"lone{r.randrange(10**6)}", check=False),
    lambda p, r: p.git("checkout", "-q", "run/t", check=False),
    lambda p, r: p.git("stash", "-q", check=False), lambda p, r: p.git("tag", f"v{r.random()}",
                                                                       check=False),
    lambda p, r: conflict(p, r, "merge", "-q"), lambda p, r: conflict(p, r, "rebase", "-q"),
    lambda p, r: conflict(p, r, "cherry-pick"),
    lambda p, r: p.git("bisect", "start", check=False),
    lambda p, r: nested(p, r, "inner", False), lambda p, r: nested(p, r, "inner2", True),
    lambda p, r: nested(p, r, "build/inner", True),
    lambda p, r: submodule(p, r, False), lambda p, r: submodule(p, r, True), sub_commit,
    lambda p, r: (p.git("update-index", "--assume-unchanged", "a.txt", check=False),
                  write(p, "a.txt", r)),
    lambda p, r: (p.git("update-index", "--skip-worktree", "b.txt", check=False),
                  write(p, "b.txt", r)),
    lambda p, r: p.git("update-ref", "refs/worktree/mine", "HEAD", check=False),
    lambda p, r: (p.tree / f"link{r.random()}").symlink_to("a.txt"),
    lambda p, r: os.mkfifo(p.tree / f"pipe{r.random()}"),
    lambda p, r: (p.tree / f"empty{r.random()}").mkdir(),
    lambda p, r: (p.tree / f"bin{r.random()}").write_bytes(bytes(r.randrange(256)
                                                                 for _ in range(3000))),
    lambda p, r: (p.tree / ".gitignore").write_text(f"*.txt\n# {r.random()}\n"),
    lambda p, r: p.git("merge", "-q", "--no-ff", "-m", "in", "run/t", cwd=p.repo, check=False),
    lambda p, r: (p.tree / ".git/index.lock").write_text(""),
    lambda p, r: p.git("gc", "-q", "--prune=now", check=False),
    lambda p, r: p.git("update-ref", "-d", "refs/heads/run/t", check=False),
    lambda p, r: p.git("update-ref", "-d", "refs/heads/run/t", cwd=p.repo, check=False),
    lambda p, r: p.git("config", "core.autocrlf", "input", check=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", in_parts(HISTORIES, 100), ids=str)
def test_whatever_has_happened_in_it_tidy_loses_nothing(tmp_path, seeds):
    """Random histories; SUBAGENT_FLEET_HISTORIES=1000 is the whole promise."""
    removed = 0
    for seed in seeds:
        rng = random.Random(seed)
        place = Place(tmp_path / str(seed))
        for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8])):
            rng.choice(STEPS)(place, rng)
        before = place.objects()
        branches = set(place.git("branch", "--format=%(refname)", cwd=place.repo).split())
        plan = place.tidy()
        if place.tree.exists():
            assert not plan.removes and plan.why, seed
            assert place.objects() >= before, seed
        else:
            removed += 1
            assert plan.removes, seed
            assert before - place.reachable() == set(), (seed, plan)
            gone = branches - set(place.git("branch", "--format=%(refname)", cwd=place.repo).split())
            assert gone <= {"refs/heads/run/t"}
        shutil.rmtree(tmp_path / str(seed))
    assert len(seeds) // 8 < removed < len(seeds)


@pytest.mark.parametrize("step, why", [
    (lambda p: p.git("bisect", "start"), "under way"),
    (lambda p: nested(p, random, "inner", False), "inner is another repository"),
    (lambda p: nested(p, random, "build/inner", True), "nested repository build/inner"),
    (lambda p: submodule(p, random.Random(1), True), "sub is another repository"),
    (lambda p: os.mkfifo(p.tree / "pipe"), "not a file, directory or link"),
    (lambda p: shutil.rmtree(p.tree / ".git"), "no longer the repository that was made there"),
    (lambda p: (p.tree / ".git/subagent-fleet.task").write_text("fedcba9876543210\n"),
     "no longer the repository that was made there"),
    (lambda p: (p.tree / "before.log").write_text("changed since\n" * 9_000_000), "before.log"),
])
def test_what_keeps_a_worktree_is_said(tmp_path, step, why):
    place = Place(tmp_path)
    step(place)
    assert why in place.tidy().why and place.tidy(is_dry=True).removes is False


def test_what_git_was_told_not_to_look_at_is_kept_as_well(tmp_path):
    place = Place(tmp_path)
    for flag, path in (("--assume-unchanged", "a.txt"), ("--skip-worktree", "b.txt")):
        place.git("update-index", flag, path)
        (place.tree / path).write_text("unseen by status\n")
    before = place.objects()
    assert place.tidy().removes and before - place.reachable() == set()


@pytest.mark.parametrize("changes, why", [
    ({"state": "running"}, "is running"), ({"git": ""}, "no worktree")])
def test_only_what_is_over_goes(tmp_path, changes, why):
    place = Place(tmp_path)
    place.state = sf.change(place.state, **changes)
    assert why in place.tidy().why and place.tree.exists()


def test_who_works_in_it_or_has_its_lock_keeps_it(tmp_path):
    (tmp_path / "Grüße a").mkdir()
    place = Place(tmp_path / "Grüße a")
    sleeper = subprocess.Popen(["sleep", "60"], cwd=str(place.tree))
    try:
        assert f"process {sleeper.pid} works in it" == place.tidy().why
    finally:
        sleeper.kill()
        sleeper.wait()
    hold = place.world.hold(place.folder.of_task("t", "alive"))
    assert "its agent is still running" in place.tidy().why
    hold.release()
    assert place.tidy().removes and not place.tree.exists()


def test_what_changes_while_it_is_tidied_keeps_it(tmp_path, monkeypatch):
    place = Place(tmp_path)
    find = sf.find_commits

    def late(*given):
        (place.tree / "late.txt").write_text("late\n")
        return find(*given)
    monkeypatch.setattr(sf, "find_commits", late)
    assert "just changed" in place.tidy().why and (place.tree / "late.txt").exists()


def test_snapshots_hold_what_is_ignored_and_new_and_leave_index_and_status(tmp_path):
    place = Place(tmp_path)
    (place.tree / "new.log").write_text("made by the agent\n")
    (place.tree / "u.txt").write_text("untracked\n")
    (place.tree / "a.txt").write_text("staged\n")
    place.git("add", "a.txt")
    index = (place.tree / ".git/index").read_bytes()
    status = place.git("status", "--porcelain")
    found = place.keep()
    assert not {"new.log", "before.log"} & set(place.git(
        "ls-tree", "-r", "--name-only", found.commit, cwd=place.repo).split())  # nothing ignored on a branch
    assert found.ref == "refs/subagent-fleet/t/1"
    listed = place.git("ls-tree", "-r", "--name-only", found.ref, cwd=place.repo).split()
    assert {"new.log", "u.txt", "a.txt"} <= set(listed) and "before.log" not in listed
    assert place.git("status", "--porcelain") == status
    assert (place.tree / ".git/index").read_bytes() == index
    place.git("gc", "-q", "--prune=now", cwd=place.repo)
    assert place.git("show", f"{found.ref}:new.log", cwd=place.repo) == "made by the agent"


@pytest.mark.parametrize("holds, base, is_merged", [
    ("spare", None, False), ("dev", None, False), ("dev", "dev", True), ("main", None, True),
    ("refs/remotes/origin/main", None, False), ("refs/remotes/origin/run/t", None, False)])
def test_a_branch_is_merged_where_its_person_is_or_where_it_began(tmp_path, holds, base, is_merged):
    place = Place(tmp_path)
    place.git("commit", "-q", "--allow-empty", "-m", "work")
    place.settle()
    place.git("update-ref", holds if "/" in holds else f"refs/heads/{holds}", "run/t", cwd=place.repo)
    place.state = sf.replace(place.state, task=sf.TaskSpec("t", prompt="x", base=base))
    assert place.tidy(is_dry=True).branch == ("run/t" if is_merged else "")
    assert place.tidy().removes and not place.tree.exists()
    assert bool(place.git("branch", "--list", "run/t", cwd=place.repo)) is not is_merged


def test_a_branch_is_merged_where_what_its_person_follows_has_it(tmp_path):
    place = Place(tmp_path)
    place.git("commit", "-q", "--allow-empty", "-m", "work")
    place.settle()
    place.git("branch", "-q", "dev", "main", cwd=place.repo)
    place.git("branch", "-q", "-u", "dev", "main", cwd=place.repo)
    assert place.tidy(is_dry=True).branch == ""
    place.git("update-ref", "refs/heads/dev", "run/t", cwd=place.repo)
    assert place.tidy().branch == "run/t"


def test_commits_that_only_its_place_knows_are_kept(tmp_path):
    place = Place(tmp_path)
    for number, undo in enumerate((("reset", "-q", "--hard", "HEAD~1"), ("checkout", "-q", "-b", "b", "HEAD~1"),
                                   ("stash", "-q"), ("tag", "-a", "v9", "-m", "v9"))):
        (place.tree / "a.txt").write_text(f"{number}\n")
        if undo[0] != "stash":
            place.git("commit", "-qam", f"c{number}")
        place.git(*undo)
    before = place.objects()
    assert place.tidy().removes and not place.tree.exists()
    assert before - place.reachable() == set()
    assert place.git("for-each-ref", "--format=%(refname)", "refs/subagent-fleet", cwd=place.repo) \
        == "refs/subagent-fleet/t/1.tidy"


def test_what_is_kept_already_makes_no_ref_of_its_tidying(tmp_path):
    place = Place(tmp_path)
    (place.tree / "a.txt").write_text("two\n")
    place.keep()
    plan = place.tidy()
    assert (plan.saved, plan.files) == ("refs/subagent-fleet/t/1", 1) and not place.tree.exists()
    assert "tidy" not in place.git("for-each-ref", cwd=place.repo)


def test_a_hook_never_runs_and_a_moved_branch_stays(tmp_path):
    place = Place(tmp_path)
    hooks = place.repo / ".git/hooks"
    for name in ("pre-commit", "reference-transaction", "post-checkout"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    (place.tree / "x.txt").write_text("x\n")
    work = place.keep()
    (hooks / "reference-transaction").unlink()  # git's own words below would run it
    (hooks / "pre-commit").unlink()
    assert not (tmp_path / "ran").exists()
    moved = place.git("commit-tree", "-p", "main", "-m", "moved on", "main^{tree}", cwd=place.repo)
    place.git("update-ref", "refs/heads/run/t", moved, cwd=place.repo)
    assert not sf.settle_branch(place.inside(), place.main, place.state.place, work.commit)
    assert place.git("rev-parse", "run/t", cwd=place.repo) == moved


@pytest.mark.slow
def test_twenty_thousand_files_are_no_matter(tmp_path):
    place = Place(tmp_path)
    for directory in range(20):
        (place.tree / f"d{directory}").mkdir()
        for number in range(1000):
            (place.tree / f"d{directory}/f{number}").write_text(f"{number}\n")
    assert len(place.keep().files) == 20000
    assert place.tidy().removes


def test_no_git_command_here_can_destroy():
    room = sorted((ROOT / "src/fleet/runs").glob("*.py"))
    section = "".join(path.read_text(encoding="utf-8") for path in room)
    assert len(room) > 5
    for word in ('"-D"', '"prune"', "rmtree", '"gc"', '"--hard"', '"reset"', '"stash"'):
        assert word not in section
    # Where a check runs, and where branches are merged: nobody works there.
    assert section.count('"clean"') == 3
