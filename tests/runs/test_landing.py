"""Landing: what is done is merged, checked as a whole, and only then on the person's branch."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from run_kit import WORKS, shell, shop  # noqa: F401
from tools import ROOT


ONLY_LANDING = '[ "$FLEET_TASK_ID" = landed ] || exit 0; '


def add_done(shop, name, *commands, **task):
    """Add tasks that a shell does."""
    return {name: {"prompt": f"Do {name}\nin detail", "coder": shell(*commands), "tries": 1,
                   "check": "true", **task}}


def run_tasks(shop, *tasks, **more):
    """Have tasks done, one after another: in the order in which they land."""
    whole = {}
    for task in tasks:
        whole.update(task)
    shop.tasks(whole, max=1, **more)
    done = shop.run()
    assert all(row["state"] == "done" for row in shop.rows().values()), done
    return done


def subjects(shop, revision="main"):
    return shop.git("log", "--format=%s", "--first-parent", revision).splitlines()


def test_three_tasks_land_as_one_branch(shop):
    run_tasks(shop, *(add_done(shop, name, f"echo {name} > {name}.txt") for name in "abc"))
    done = shop.type("task", "land")
    tip = shop.git("rev-parse", "main")
    assert done.code == 0 and done.out.endswith(
        f"3 landed on main ({shop.start[:7]}..{tip[:7]}), checked as a whole.\n"), done
    assert shop.files("main") == {"a.txt", "b.txt", "c.txt"}
    assert subjects(shop) == ["c: Do c", "b: Do b", "a: Do a", "start"]
    assert (shop.repo / "c.txt").read_text() == "c\n"
    assert shop.git("status", "--porcelain", "--untracked-files=no") == ""
    assert not shop.git("branch", "--list", "run/landed")
    assert shop.row("a")["reason"] == "landed on main"
    again = shop.type("task", "land")
    assert again.code == 0 and again.out == "Nothing has landed.\n", again


def test_what_conflicts_goes_back_to_its_agent_with_both_and_lands_then(shop):
    settle = "if grep -q '<<<<<<<' a.txt; then printf 'a and b\\n' > a.txt; else echo b > a.txt; fi"
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt"), add_done(shop, "b", settle),
              add_done(shop, "c", "echo c > c.txt"))
    done = shop.type("task", "land")
    assert done.code == 1 and "2 landed on main" in done.out, done
    assert "1 sent back: b conflicts with a in a.txt." in done.out
    assert "Conflict markers are in: a.txt" in shop.type("task", "log", "b", "landing").out
    again = shop.run("--land")
    assert again.code == 0 and "1 landed on main" in again.out, again
    assert shop.git("show", "main:a.txt") == "a and b"


def test_what_fails_together_is_found_and_goes_back_and_the_others_land(shop):
    """Each passes alone: a names the function that c removes."""
    shop.commit(**{"lib.txt": "old\n"})
    check = "! grep -q uses-old *.txt || grep -q old lib.txt"
    mend = "echo new > lib.txt; if [ -e use.txt ]; then echo uses-new > use.txt; fi"
    run_tasks(shop, add_done(shop, "a", "echo uses-old > use.txt", check=check),
              add_done(shop, "b", "echo b > b.txt", check=check),
              add_done(shop, "c", mend, check=check),
              add_done(shop, "d", "echo d > d.txt", check=check))
    done = shop.type("task", "land")
    assert "3 landed on main" in done.out and done.code == 1, done
    assert re.search(r"1 sent back: c fails together with a, b: .* \(exit 1\)", " ".join(done.out.split())), done
    assert shop.files("main") == {"a.txt", "b.txt", "d.txt", "lib.txt", "use.txt"}
    assert shop.git("show", "main:use.txt") == "uses-old"
    assert "1 landed on main" in shop.run("--land").out
    assert (shop.git("show", "main:use.txt"), shop.git("show", "main:lib.txt")) == ("uses-new", "new")


def test_without_rounds_left_it_stays_out_and_the_others_land(shop):
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt"),
              add_done(shop, "b", "echo b > a.txt", rounds=0))
    done = shop.type("task", "land")
    assert done.code == 1 and "1 landed on main" in done.out, done
    assert "b stays out, no rounds left: b conflicts with a in a.txt." in " ".join(done.out.split())
    assert "subagent-fleet task log b landing" in " ".join(done.out.split())
    assert shop.rows()["b"]["state"] == "done"


def test_conflict_markers_never_land(shop):
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt"),
              add_done(shop, "b", "[ -e c.txt ] || echo b > a.txt; echo x >> c.txt", rounds=1))
    shop.type("task", "land")
    done = shop.run("--land")
    assert "still has conflict markers in a.txt" in " ".join(done.out.split()), done
    assert shop.git("show", "main:a.txt") == "a" and done.code == 1


def test_a_checkout_with_changes_is_left_alone(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt"))
    shop.write("a.txt", "mine\n")
    shop.git("stash", "list")
    done = shop.type("task", "land")
    assert done.code == 1 and "1 landed on run/landed" in done.out, done
    assert "main was not moved: your checkout has uncommitted changes. Type: git merge --ff-only run/landed" \
        in " ".join(done.out.split())
    assert (shop.repo / "a.txt").read_text() == "mine\n" and not (shop.repo / "b.txt").exists()
    assert shop.git("rev-parse", "main") == shop.start
    shop.write("a.txt", "one\n")
    assert shop.type("task", "land").code == 0
    assert (shop.repo / "b.txt").exists() and not shop.git("branch", "--list", "run/landed")


def test_a_person_who_commits_meanwhile_keeps_their_branch(shop):
    check = ONLY_LANDING + "touch $HOME/now; sleep 1"
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt", check=check))
    landing = shop.begin("task", "land")
    shop.wait(lambda: (shop.home / "now").exists())
    shop.commit(**{"mine.txt": "mine\n"})
    done = shop.end(landing)
    assert done.code == 1 and "main has moved meanwhile" in done.out, done
    assert shop.git("rev-parse", "main") == shop.start
    assert shop.type("task", "land").code == 0
    assert shop.files("main") >= {"mine.txt", "b.txt"} and subjects(shop)[0] == "b: Do b"


def test_one_lands_and_the_other_waits(shop):
    check = ONLY_LANDING + "[ -d $HOME/alone ] && exit 9; mkdir $HOME/alone; sleep 0.5; rmdir $HOME/alone"
    run_tasks(shop, *(add_done(shop, name, f"echo {name} > {name}.txt", check=check)
                      for name in "ab"))
    first, second = shop.begin("task", "land"), shop.begin("task", "land")
    ends = [shop.end(first), shop.end(second)]
    assert [done.code for done in ends] == [0, 0], ends
    assert sum("2 landed on main" in done.out for done in ends) == 1
    assert sum("waiting for it" in done.err for done in ends) <= 1


def test_what_comes_after_another_lands_behind_it_and_never_without_it(shop):
    run_tasks(shop, add_done(shop, "late", "echo x > late.txt", after=["base"], priority=5),
              add_done(shop, "base", "echo y > base.txt"))
    assert shop.type("task", "land", "late").code == 0
    assert subjects(shop)[:2] == ["late: Do late", "base: Do base"]


def test_of_twins_one_lands_and_a_person_chooses(shop):
    run_tasks(shop, add_done(shop, "t", "echo $FLEET_TASK_ID > t.txt", times=2))
    done = shop.type("task", "land")
    assert "2 tasks held" in done.out and "task accept" in done.out, done
    assert shop.git("rev-parse", "main") == shop.start


def test_it_lands_on_another_branch_than_the_one_checked_out(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt"))
    shop.git("branch", "release")
    done = shop.type("task", "land", "--into", "release")
    assert done.code == 0 and "1 landed on release" in done.out, done
    assert shop.files("release") == {"a.txt", "b.txt"} and shop.git("rev-parse", "main") == shop.start
    assert not (shop.repo / "b.txt").exists()
    shop.git("checkout", "-q", "--detach")
    refused = shop.type("task", "land")
    assert refused.code == 3 and "--into BRANCH" in refused.err, refused


def test_a_check_finds_a_repository_and_setup_and_copies_there(shop):
    shop.commit(**{"_gitignore": "*.env\nmade/\n"})
    shop.write("my.env", "secret")
    check = "git ls-files --error-unmatch b.txt && git log -1 --format=%H && test -d made && grep secret my.env"
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt", check=check, setup=["mkdir -p made"],
                             copy=["*.env"]))
    done = shop.type("task", "land")
    assert done.code == 0, (done, shop.type("task", "log", "b", "landing").out)
    assert "my.env" not in shop.files("main")


def test_what_a_check_does_to_its_repository_means_nothing(shop):
    spoil = ONLY_LANDING + "git config core.worktree /nowhere; git config filter.x.smudge false; " \
            "echo '* filter=x' > .gitattributes; rm -f a.txt; echo junk > b.txt; true"
    run_tasks(shop, *(add_done(shop, name, f"echo {name} > {name}.txt", check=spoil)
                      for name in "bc"))
    assert shop.type("task", "land").code == 0
    assert shop.files("main") == {"a.txt", "b.txt", "c.txt"} and shop.git("show", "main:b.txt") == "b"


def test_work_without_a_check_is_said_to_have_none(shop):
    shop.work("t", coder=shell("echo x > x.txt"))
    shop.type("task", "accept", "t")
    assert "1 landed on main" in (done := shop.type("task", "land")).out
    assert "no task has a check" in done.out


def test_a_run_lands_as_tasks_get_done(shop):
    shop.tasks({**add_done(shop, "a", "echo a > a.txt"),
                **add_done(shop, "b", "if grep -q '<<<<' a.txt; then echo both > a.txt; "
                                      "else echo b > a.txt; fi", after=["x"]),
                **add_done(shop, "x", "echo x > x.txt", base="main")})
    done = shop.run("--land")
    assert done.code == 0 and "3 landed on main" in done.out, done
    assert "sent back" in done.out and shop.git("show", "main:a.txt") in ("both", "b")
    assert "Merge" not in done.out
