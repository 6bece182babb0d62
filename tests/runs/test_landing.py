"""Landing: what is done is merged, checked as a whole, and only then on the person's branch."""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys

import pytest

import subagent_fleet as sf
from run_kit import Shop, shell
from tools import ROOT, in_parts

ONLY_LANDING = 'case $SUBAGENT_FLEET_CHECK in */landed) ;; *) exit 0;; esac; '


def add_done(shop, name, *commands, **task):
    """Add tasks that a shell does."""
    return {name: {"prompt": f"Do {name}\nin detail", "coder": shell(*commands), "tries": 1,
                   "check": "true", **task}}


def run_tasks(shop, *tasks, **more):
    """Have tasks done, one after another; they land in this order, whichever check ends first."""
    whole = {}
    for number, task in enumerate(tasks):
        for name, words in task.items():
            whole[name] = {"priority": -number, **words}
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
    assert list(shop.place.rglob(".landed"))
    assert shop.type("task", "tidy").code == 0 and not list(shop.place.rglob(".landed"))


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


def test_work_that_was_sent_back_is_told_from_what_landed_after_it(shop):
    """c lands in the pass that sends b back and f back: neither removes it, nor touches it."""
    shop.commit(**{"lib.txt": "old\n"})
    settle = "if grep -q '<<<<<<<' a.txt; then printf 'a and b\\n' > a.txt; else echo b > a.txt; fi"
    check = "! test -e c.txt || ! grep -q new lib.txt || test -e f.txt"
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt"), add_done(shop, "b", settle, touch=["a.txt"]),
              add_done(shop, "c", "echo c > c.txt"),
              add_done(shop, "f", "if [ -e c.txt ]; then touch f.txt; else echo new > lib.txt; fi", check=check),
              add_done(shop, "g", "echo g > g.txt"))
    done = shop.type("task", "land")
    assert done.code == 1 and "3 landed on main" in done.out and "2 sent back" in done.out, done
    assert [shop.type("task", "diff", name, "--stat").out.count("|") for name in "bf"] == [1, 1]
    assert "2 landed on main" in shop.run("--land").out
    assert shop.git("show", "main:a.txt") == "a and b"
    shown = {name: shop.type("task", "diff", name, "--stat").out for name in "bf"}
    assert " a.txt | " in shown["b"] and "1 file changed" in shown["b"], shown
    assert " f.txt " in shown["f"] and "2 files changed" in shown["f"], shown


def test_work_that_is_done_again_after_it_has_landed_lands_again(shop):
    run_tasks(shop, add_done(shop, "a", "echo x >> a.txt2"), add_done(shop, "b", "echo b > b.txt"))
    assert "2 landed on main" in shop.type("task", "land").out
    shop.type("task", "retry", "a")
    done = shop.run("--land")
    assert "1 landed on main" in done.out and shop.git("show", "main:a.txt2") == "x\nx", done
    assert shop.row("a")["reason"] == "landed on main"
    assert "1 file changed, 2 insertions(+)" in shop.type("task", "diff", "a", "--stat").out
    assert shop.type("task", "land", "a").out == "Nothing has landed.\na has landed on main before.\n"


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


def test_what_conflicts_with_the_culprit_alone_lands_without_it(shop):
    """b fails with a, and c conflicts with b: c has no reason to go back."""
    check = "! { test -e a.txt2 && test -e b.txt; }"
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt2", check=check),
              add_done(shop, "b", "echo b > b.txt; echo b > a.txt", check=check),
              add_done(shop, "c", "echo c > a.txt", rounds=0), add_done(shop, "d", "echo d > d.txt", after=["c"]))
    done = shop.type("task", "land")
    words = " ".join(done.out.split())
    assert "3 landed on main" in words and "1 sent back: b fails together with a" in words, done
    assert "stays out" not in words and shop.git("show", "main:a.txt") == "c"


def test_without_rounds_left_it_stays_out_and_the_others_land(shop):
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt"),
              add_done(shop, "b", "echo b > a.txt", rounds=0))
    done = shop.type("task", "land")
    assert done.code == 1 and "1 landed on main" in done.out, done
    assert "b stays out, no rounds left: b conflicts with a in a.txt." in " ".join(done.out.split())
    assert "subagent-fleet task log b landing" in " ".join(done.out.split())
    row = shop.rows()["b"]
    assert (row["state"], row["reason"]) == ("done", "did not land: b conflicts with a in a.txt")
    assert row["fix"] == "subagent-fleet task log b landing"


def test_conflict_markers_never_land(shop):
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt"),
              add_done(shop, "b", "[ -e c.txt ] || echo b > a.txt; echo x >> c.txt", rounds=1))
    shop.type("task", "land")
    done = shop.run("--land")
    assert "still has conflict markers in a.txt" in " ".join(done.out.split()), done
    assert shop.git("show", "main:a.txt") == "a" and done.code == 1


def test_it_lands_whatever_a_branch_has_set_for_merges(shop):
    shop.git("config", "merge.ff", "false")
    shop.git("config", "branch.main.mergeOptions", "--no-ff --squash")
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt"))
    done = shop.type("task", "land")
    assert done.code == 0 and "1 landed on main" in done.out, done
    assert shop.files("main") == {"a.txt", "b.txt"} and not shop.git("status", "--porcelain", "-uno")


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
    assert shop.row("b")["reason"] == "landed on run/landed"
    shop.write("a.txt", "one\n")
    done = shop.type("task", "land")
    assert done.code == 0 and "1 landed on main" in done.out and "checked as a whole" in done.out
    assert (shop.repo / "b.txt").exists() and not shop.git("branch", "--list", "run/landed")
    assert shop.row("b")["reason"] == "landed on main"


def test_a_change_of_a_persons_in_the_same_file_is_theirs_to_settle_first(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > a.txt"))
    shop.write("a.txt", "mine\n")
    done = shop.type("task", "land")
    assert "Type: commit or stash a.txt, then subagent-fleet task land" in " ".join(done.out.split()), done
    shop.git("stash")
    assert "1 landed on main" in shop.type("task", "land").out


def test_a_conflict_names_only_what_its_work_has_not_seen(shop):
    run_tasks(shop, add_done(shop, "p", "echo p > a.txt"))
    assert shop.type("task", "land").code == 0
    run_tasks(shop, add_done(shop, "q", "echo q > a.txt"), add_done(shop, "r", "echo r > a.txt"))
    done = " ".join(shop.type("task", "land").out.split())
    assert "r conflicts with q in a.txt" in done or "q conflicts with r in a.txt" in done, done


def test_run_landed_can_be_taken_by_hand(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt"))
    shop.write("a.txt", "mine\n")
    assert shop.type("task", "land").code == 1
    shop.git("merge", "-q", "--ff-only", "run/landed")
    assert (shop.repo / "a.txt").read_text() == "mine\n"
    assert shop.type("task", "land").code == 0  # nothing moves, so nothing is in the way
    assert shop.row("b")["reason"] == "landed on main"
    assert not shop.git("branch", "--list", "run/landed")


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


@pytest.mark.parametrize("git, why, step", [
    (["branch", "-D", "rel"], "rel no longer exists", "--into BRANCH"),
    (["branch", "-f", "rel", "main~1"], "rel has moved meanwhile", "--into rel")])
def test_another_branch_that_goes_or_moves_meanwhile_is_named_with_what_to_type(shop, git, why, step):
    shop.commit(**{"mine.txt": "mine\n"})
    shop.git("branch", "rel")
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt",
                             check=ONLY_LANDING + "touch $HOME/now; sleep 1"))
    landing = shop.begin("task", "land", "--into", "rel")
    shop.wait(lambda: (shop.home / "now").exists())
    shop.git(*git)
    done = shop.end(landing)
    assert done.code == 1 and why in done.out, done
    assert f"Type: subagent-fleet task land {step}" in " ".join(done.out.split())


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
    grow = '[ $FLEET_TASK_ID = t-a ] && seq 5 > t.txt || seq 2 > t.txt'
    run_tasks(shop, add_done(shop, "t", grow, times=2))
    done = shop.type("task", "land")
    assert "2 tasks held" in done.out and "task accept" in done.out, done
    assert shop.git("rev-parse", "main") == shop.start

    seen = shop.type("tasks", "t")
    assert re.search(r"NAME +MODEL +STATE +TOOK +TOKENS +DIFF", seen.out), seen
    assert "Best of t: t-b (done, +2 -0)" in " ".join(seen.err.split())
    report = json.loads(shop.type("tasks", "t", "--json").out)
    assert (report["best"], [row["name"] for row in report["tasks"]]) == ("t-b", ["t-b", "t-a"])
    assert "subagent-fleet task accept t-b" in " ".join(shop.type("tasks").err.split())

    assert shop.type("task", "accept", "t-b").code == 0  # off a terminal nothing is dropped
    assert set(shop.rows()) == {"t-a", "t-b"}
    done = shop.type("task", "accept", "t-b", "--yes")
    assert done.code == 0 and "forgotten" in done.out, done
    assert set(shop.rows()) == {"t-b"} and shop.tip("t-a")
    assert "1 landed on main" in shop.type("task", "land").out
    assert shop.git("show", "main:t.txt") == "1\n2"


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


def count_runs(name):
    """Return the words of a check that count how often it runs on what is to land."""
    return f"case $SUBAGENT_FLEET_CHECK in */landed) echo {name} >> $HOME/ran;; esac; "


def test_a_check_that_asks_for_its_task_runs_for_each_and_others_once(shop):
    own = count_runs("own-$FLEET_TASK_ID") + "test -s $FLEET_TASK_ID.txt"
    shared = count_runs("shared") + "test -e a.txt"
    run_tasks(shop, *(add_done(shop, name, f"echo {name} > {name}.txt", check=check)
                      for name, check in (("b", own), ("c", own), ("d", shared), ("e", shared))))
    done = shop.type("task", "land")
    assert done.code == 0 and "4 landed on main" in done.out, done
    assert (shop.home / "ran").read_text().split() == ["own-b", "own-c", "shared"]


def test_a_check_that_several_share_has_the_longest_deadline(shop):
    check = "case $SUBAGENT_FLEET_CHECK in */landed) sleep 3;; esac"
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt", check=check, deadline="2s"),
              add_done(shop, "b", "echo b > b.txt", check=check))
    done = shop.type("task", "land")
    assert done.code == 0 and "2 landed on main" in done.out, done


def test_a_check_whose_script_asks_for_its_task_runs_for_each(shop):
    shop.commit(**{"check.sh": 'test -s "$FLEET_TASK_ID.txt"\n'})
    run_tasks(shop, *(add_done(shop, name, f"echo {name} > {name}.txt",
                               check=count_runs("script") + "sh check.sh") for name in "bc"))
    done = shop.type("task", "land")
    assert done.code == 0 and "2 landed on main" in done.out, done
    assert (shop.home / "ran").read_text().split() == ["script", "script"]


def test_a_branch_that_fails_by_itself_is_said_to_and_no_task_goes_back(shop):
    check = count_runs("x") + "echo hm; test ! -e broken"
    run_tasks(shop, *(add_done(shop, name, f"echo {name} > {name}.txt", check=check, rounds=0)
                      for name in "bcd"))
    shop.commit(broken="by a person\n")
    done = shop.type("task", "land")
    words = " ".join(done.err.split())  # "branch-broken"
    assert done.code == 1 and "the check fails on main itself, so nothing landed: case " in words, done
    assert "fix main, then `subagent-fleet task land`" in words and "sent back" not in words + done.out
    log = re.search(r"`less (\S+)`", words)[1]
    assert pathlib.Path(log).read_text() == "hm\n"
    assert shop.git("rev-parse", "main") == shop.start and not shop.git("branch", "--list", "run/landed")
    assert {row["reason"] for row in shop.rows().values()} == {""}
    (shop.home / "ran").unlink()
    (shop.repo / "broken").unlink()
    shop.git("commit", "-qam", "fixed")
    assert "3 landed on main" in shop.type("task", "land").out
    assert (shop.home / "ran").read_text() == "x\n"  # nobody asks the branch when all is well


def test_a_run_that_lands_says_that_the_branch_fails_by_itself(shop):
    commit = 'cd "$SHOP" && touch broken && git add broken && git commit -qm broken'
    shop.tasks(add_done(shop, "b", "echo b > b.txt", f"({commit})", check="test ! -e broken"))
    done = shop.run("--land", SHOP=shop.repo)
    assert done.code == 1 and "the check fails on main itself, so nothing landed" in " ".join(
        done.out.split()), done
    assert "sent back" not in done.out and shop.rows()["b"]["state"] == "done"


def test_a_machine_on_which_no_check_passes_any_more_is_no_fault_of_a_task(shop):
    check = "test -s b.txt && test ! -e $HOME/down"
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt", check=check))
    (shop.home / "down").touch()
    done = shop.type("task", "land")
    assert done.code == 1 and "the check fails on main itself, so nothing landed" in " ".join(
        done.err.split()), done
    (shop.home / "down").unlink()
    assert "1 landed on main" in shop.type("task", "land").out


def test_a_task_that_fixes_the_branch_lands_and_who_fails_with_it_goes_back(shop):
    check = "! test -e broken || test -e fixed && ! { test -e fixed && test -e b.txt; }"
    run_tasks(shop, add_done(shop, "fix", "echo x > fixed", check=check),
              add_done(shop, "b", "echo b > b.txt", check=check))
    shop.commit(broken="by a person\n")
    done = shop.type("task", "land")
    assert "1 landed on main" in done.out and "1 sent back: b fails together with fix" in " ".join(
        done.out.split()), done


def test_a_setup_that_fails_everywhere_is_no_fault_of_a_task(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt", setup=["test ! -e $HOME/down"]))
    (shop.home / "down").touch()
    done = shop.type("task", "land")
    assert "the setup fails on main itself, so nothing landed: test ! -e" in " ".join(done.err.split()), done
    assert shop.rows()["b"]["reason"] == ""


def test_a_check_of_new_work_fails_on_the_branch_rightly(shop):
    """Its task is to blame all the same: together with another it fails."""
    shop.commit(**{"lib.txt": "old\n"})
    run_tasks(shop, add_done(shop, "a", "echo new > lib.txt"),
              add_done(shop, "b", "echo b > b.txt", check="test -s b.txt && grep -q old lib.txt"))
    shop.commit(**{"other.txt": "by a person\n"})
    done = shop.type("task", "land")
    assert "1 landed on main" in done.out and "1 sent back: b fails together with a" in " ".join(
        done.out.split()), done


def test_setup_is_of_the_commit_that_is_checked(shop):
    """c brings what its setup makes; that must not blame a, which has the old one."""
    shop.commit(**{"version.txt": "1\n", "_gitignore": "made\n"})
    check = "cmp -s version.txt made && ! { test -e a.txt2 && test -e c.txt; }"
    work = {"setup": ["cp version.txt made"], "check": check, "rounds": 0}
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt2", **work),
              add_done(shop, "b", "echo b > b.txt", **work),
              add_done(shop, "c", "echo 2 > version.txt; echo c > c.txt",
                       **{**work, "check": f"cp version.txt made && {check}"}))
    done = shop.type("task", "land")
    assert "2 landed on main" in done.out and "c stays out" in done.out, done
    assert shop.files("main") >= {"a.txt2", "b.txt"}


def test_setup_that_fails_on_the_whole_is_as_a_check_that_fails(shop):
    setup = ["echo no room; ! test -e a.txt2 || ! test -e b.txt"]
    run_tasks(shop, add_done(shop, "a", "echo a > a.txt2"),
              add_done(shop, "b", "echo b > b.txt", setup=setup, rounds=0))
    done = shop.type("task", "land")
    words = " ".join(done.out.split())
    assert "1 landed on main" in words and "b stays out, no rounds left: b fails together with a" in words
    assert "no room" in shop.type("task", "log", "b", "landing").out


def test_a_copy_is_as_it_is_now(shop):
    shop.commit(**{"_gitignore": "*.env\n"})
    shop.write("my.env", "1")
    run_tasks(shop, add_done(shop, "a", "echo a > b.txt", check="grep 1 my.env", copy=["*.env"]))
    assert "1 landed on main" in shop.type("task", "land").out
    shop.write("my.env", "2")
    run_tasks(shop, add_done(shop, "b", "echo b > c.txt", check="grep 2 my.env", copy=["*.env"]))
    assert "1 landed on main" in shop.type("task", "land").out


def test_what_a_check_does_to_its_repository_means_nothing(shop):
    spoil = "git config core.worktree /nowhere; git config filter.x.smudge false; " \
            "echo '* filter=x' > .gitattributes; rm -f a.txt; echo junk > b.txt; true"
    finds = "test -e a.txt && ! grep -q junk b.txt"  # what the other check has left is put right
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt", check=spoil),
              add_done(shop, "c", "echo c > c.txt", check=finds))
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
    assert "b conflicts with a in a.txt" in " ".join(done.out.split())
    assert shop.git("show", "main:a.txt") == "both"
    assert "Merge" not in done.out


def test_what_cannot_land_is_refused_with_what_to_type(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt"))
    refused = shop.type("task", "land", "--into", "nowhere")
    assert refused.code == 1 and "there is no branch `nowhere`" in refused.err  # "no-branch"
    shop.git("checkout", "-q", "run/b", check=False)
    shop.git("checkout", "-q", "--detach")
    refused = shop.type("run", "--land", "x:do it")
    assert refused.code == 3 and "on no branch" in refused.err and set(shop.rows()) == {"b"}
    assert "task land --into BRANCH" in " ".join(refused.err.split())  # `run` has no --into
    assert "on no branch" in shop.type("task", "land").err  # "no-target"
    shop.git("checkout", "-q", "main")
    shop.git("branch", "run/landed")
    taken = shop.type("task", "land")
    assert "has commits that `land` did not make" in taken.err, taken  # "landed-taken"
    assert shop.git("rev-parse", "run/landed") == shop.start
    assert "accepted" in shop.type("run", "landed:do it").err  # no task is called so


def test_work_with_no_common_history_is_refused(shop):
    run_tasks(shop, add_done(shop, "b", "echo b > b.txt"))
    tree = shop.git("rev-parse", "run/b^{tree}")
    alone = shop.git("commit-tree", "-m", "alone", tree)
    shop.git("update-ref", "refs/heads/run/b", alone)
    states = sf.Folder(world_of(shop), sf.find_repository(world_of(shop), str(shop.repo)))
    state = states.read_states()[0]["b"]
    states.write_state(sf.change(state, kept=alone))
    done = shop.type("task", "land")
    assert "b could not be merged: fatal: refusing to merge unrelated histories" in done.err  # "merge-failed"


def test_a_task_file_to_start_from_runs_and_lands(shop):
    shop.commit(**{"Makefile": "test:\n\ttest -s a.txt\n"})
    done = shop.type("init", "--example", "tasks")
    assert done.code == 0 and "Guessed from Makefile (make): no setup, check `make test`." in done.out
    assert shop.type("init", "--example", "tasks").code == 3  # it is there already
    assert shop.type("validate", "--json").code in (0, 1)
    text = (shop.repo / "tasks.yaml").read_text()
    (shop.repo / "tasks.yaml").write_text(text.replace(
        "defaults:", "defaults:\n  coder: [sh, -c, 'echo $FLEET_TASK_ID > $FLEET_TASK_ID.txt']"))
    assert "2 landed on main" in shop.run("--land").out
    assert shop.files("main") == {"Makefile", "a.txt", "readme.txt", "tests.txt"}


# -- random histories --

HISTORIES = int(os.environ.get("SUBAGENT_FLEET_LANDINGS", "20"))  # 500 are the whole promise
# Each name that a file uses must be one that the library has: a conflict in meaning, no text of
# which conflicts.
CHECK = 'for word in $(cat use-* 2>/dev/null); do grep -qx "$word" lib.txt || exit 1; done'
# Before and after each git and each file that is written, something may happen: a kill -9, or
# the person commits.
DRIVER = """\
import os, signal, subprocess, sys
import subagent_fleet as sf
count, at, what = 0, int(sys.argv[1]), sys.argv[2]
def happen():
    global count
    count += 1
    if count == at and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if count == at:
        subprocess.run(["sh", "-c", "echo mine >> meanwhile.txt; git add meanwhile.txt; "
                        "git commit -q -m meanwhile -- meanwhile.txt"], check=True)
def strike(function):
    def struck(self, *words, **more):
        happen()
        done = function(self, *words, **more)
        happen()
        return done
    return struck
sf.Git.run, sf.World.replace_files = strike(sf.Git.run), strike(sf.World.replace_files)
status = sf.main(["task", "land"])
print("steps", count)
sys.exit(status)
"""


def world_of(shop):
    world = sf.World()
    world.environ = dict(shop.environ)
    return world


class History:
    """Tasks that are done, in a repository whose person has work of their own."""

    def __init__(self, shop, luck):
        self.shop, self.luck = shop, luck
        words = [f"w{number}" for number in range(6)]
        shop.commit(**{"lib.txt": "".join(f"{word}\n\n\n" for word in words),
                       "text.txt": "".join(f"line {number}\n" for number in range(12)),
                       "_gitignore": "cache/\n"})
        world = world_of(shop)
        self.folder = sf.Folder(world, sf.find_repository(world, str(shop.repo)))
        self.folder.make()
        self.names = []
        for number in range(luck.randrange(1, 7)):
            self.add_task(f"t{number}", number)

    def add_task(self, name, number):
        """Make the work of a task, which passes its check alone."""
        shop, luck = self.shop, self.luck
        after = (luck.choice(self.names),) if self.names and luck.random() < 0.3 else ()
        base = self.folder.read_states()[0][after[0]].place.kept if after else shop.start
        tree = shop.place / "made"
        shop.git("worktree", "add", "-q", "--detach", "-f", tree, base)
        for _ in range(9):
            shop.git("reset", "-q", "--hard", base, cwd=tree)
            shop.git("clean", "-qfd", cwd=tree)
            self.change(tree, name)
            if subprocess.run(["sh", "-c", CHECK], cwd=tree).returncode == 0:
                break
        else:
            shop.git("reset", "-q", "--hard", base, cwd=tree)
        (tree / f"{name}.txt").write_text(f"{name}\n")
        shop.git("add", "-A", cwd=tree)
        shop.git("commit", "-qm", name, cwd=tree)
        kept = shop.git("rev-parse", "HEAD", cwd=tree)
        if luck.random() < 0.2:  # the agent has written its history anew: no base in it
            own = shop.git("commit-tree", "-m", "own", f"{kept}^{{tree}}")
            kept = shop.git("commit-tree", "-m", "kept", "-p", own, "-p", base, f"{kept}^{{tree}}")
        shop.git("worktree", "remove", "--force", tree)
        shop.git("update-ref", f"refs/heads/run/{name}", kept)
        task = sf.TaskSpec(name, prompt=f"Do {name}", check=CHECK, after=after,
                           rounds=luck.randrange(2), priority=luck.randrange(2))
        self.folder.write_state(sf.change(
            sf.TaskState(name, task, number), state="done", at=float(luck.randrange(9)), base=base,
            start=base, branch=f"run/{name}", kept=kept, tip=kept, tried=1))
        self.names.append(name)

    def change(self, tree, name):
        luck = self.luck
        for _ in range(luck.randrange(1, 3)):
            kind = luck.randrange(4)
            word = f"w{luck.randrange(6)}"
            if kind == 0:  # a conflict in text, with whoever takes the same line
                lines = (tree / "text.txt").read_text().splitlines()
                lines[luck.randrange(len(lines))] = f"{name} was here"
                (tree / "text.txt").write_text("\n".join(lines) + "\n")
            elif kind == 1:
                (tree / f"use-{name}").write_text(f"{word}\n")
            elif kind == 2:  # a conflict in meaning, with whoever uses it
                lines = (tree / "lib.txt").read_text().splitlines()
                (tree / "lib.txt").write_text("\n".join(
                    line for line in lines if line != word) + "\n")
            elif (tree / "text.txt").exists():
                (tree / "text.txt").rename(tree / f"moved-{name}.txt")
                (tree / "text.txt").write_text("moved\n")

    def person_works(self):
        """Let the person change something, or nothing."""
        shop, luck = self.shop, self.luck
        kind = luck.randrange(6)
        if kind == 0:
            shop.write("text.txt", "mine, not committed\n")
        elif kind == 1:
            shop.write("lib.txt", (shop.repo / "lib.txt").read_text() + "mine\n")
            shop.git("add", "lib.txt")
        elif kind == 2:
            shop.write("text.txt", "stashed\n")
            shop.git("stash", "-q")
        elif kind == 3:
            shop.write(f"t{luck.randrange(6)}.txt", "mine, untracked\n")
        elif kind == 4:
            shop.write(f"mine{luck.randrange(99)}.txt", "mine\n")
            shop.git("add", "-A", ".")
            shop.git("commit", "-qm", "mine")

    def mine(self):
        """What is the person's and not committed."""
        shop = self.shop
        others = shop.git("ls-files", "-o", "--exclude-standard").splitlines()
        return (shop.git("diff"), shop.git("diff", "--cached"), shop.git("stash", "list"),
                {name: (shop.repo / name).read_bytes() for name in others})

    def passes(self, commit):
        """Tell whether a commit passes the check that all of its tasks have."""
        place = self.shop.place / "passes"
        place.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=self.shop.repo, capture_output=True).stdout
        subprocess.run(["tar", "x"], cwd=place, input=archive, check=True)
        code = subprocess.run(["sh", "-c", CHECK], cwd=place).returncode
        subprocess.run(["rm", "-rf", place])
        return code == 0

    def assert_good(self, before, mine):
        """Nothing has landed that does not pass, and nothing of the person's is lost."""
        shop = self.shop
        tip = shop.git("rev-parse", "main")
        if tip != before:
            assert shop.git("merge-base", before, tip) == before
            assert self.passes(tip)
            steps = shop.git("log", "--first-parent", "--format=%s %p", f"{before}..{tip}").splitlines()
            own = [step for step in steps if step.startswith("meanwhile ")]
            assert len(own) <= 1
            assert all(len(step.split()) == 5 for step in steps if step not in own)  # "t1: Do t1 A B"
            if len(steps) > len(own):  # it has landed, so nothing of theirs was in the way
                assert shop.git("status", "--porcelain", "--untracked-files=no") == ""
        assert self.mine() == mine
        landed = shop.git("rev-parse", "--verify", "-q", "run/landed", check=False)
        assert not landed or self.passes(landed)

    def land(self, at=0, what="kill"):
        """Land in a process of its own, which may be killed, or the person commits meanwhile."""
        shop = self.shop
        before, mine = shop.git("rev-parse", "main"), self.mine()
        done = subprocess.run([sys.executable, "-c", DRIVER, str(at), what], cwd=shop.repo,
                              env=shop.environment(PYTHONPATH=ROOT), capture_output=True, timeout=300)
        out = done.stdout.decode()
        assert done.returncode in (0, 1, -signal.SIGKILL), (out, done.stderr.decode())
        assert b"Traceback" not in done.stderr
        shop.wait(lambda: not locked(shop))
        self.assert_good(before, mine)
        return done.returncode, out


def locked(shop):
    """Tell whether git is still at work for somebody who was killed."""
    held = subprocess.run([sys.executable, "-c", (
        "import fcntl, sys\nfcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        shop.repo / ".git/subagent-fleet/run/landing.lock"], capture_output=True)
    return held.returncode != 0


def check_histories(tmp_path, seeds):
    landed = returned = killed = 0
    for seed in seeds:
        luck = random.Random(seed)
        shop = Shop(tmp_path / str(seed))
        try:
            history = History(shop, luck)
            for _ in range(luck.randrange(1, 4)):
                history.person_works()
                at = luck.randrange(1, 150) if luck.random() < 0.6 else 0
                code, out = history.land(at, luck.choice(["kill", "kill", "commit"]))
                killed += code == -signal.SIGKILL
                returned += "sent back" in out or "stays out" in out
            # The person puts away what is theirs: now what can land does.
            shop.git("reset", "-q", "--hard")
            shop.git("clean", "-qfd")
            code, out = history.land()
            assert "was not moved" not in out, (seed, out)
            landed += shop.git("rev-parse", "main") != shop.start
            again = shop.git("rev-parse", "main")
            assert history.land()[1].count("Nothing has landed") == 1, seed
            assert shop.git("rev-parse", "main") == again
        finally:
            shop.kill_all()
            subprocess.run(["rm", "-rf", shop.place])
    return landed, returned, killed


def check_every_point(history, first, step):
    """Kill a landing at one point after the other; each time the person goes back to the start."""
    shop, at = history.shop, first
    while True:
        code, _ = history.land(at)
        if code != -signal.SIGKILL:
            return at
        shop.git("reset", "-q", "--hard", shop.start)
        shop.git("branch", "-q", "-D", "run/landed", check=False)
        at += step


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_kill_at_any_point_of_a_landing_leaves_the_branch_or_has_moved_it(tmp_path, first):
    """Two tasks land, one stays out since it conflicts, and one since it fails with another."""
    shop = Shop(tmp_path)
    shop.commit(**{"lib.txt": "w0\n"})
    history = History.__new__(History)
    history.shop = shop
    try:
        run_tasks(shop, add_done(shop, "a", "echo a > a.txt", check=CHECK, rounds=0),
                  add_done(shop, "b", "echo b > a.txt", check=CHECK, rounds=0),
                  add_done(shop, "c", "echo w0 > use-c", check=CHECK, rounds=0),
                  add_done(shop, "d", "echo > lib.txt", check=CHECK, rounds=0))
        shop.git("add", "tasks.json")
        shop.git("commit", "-qm", "tasks")
        shop.start = shop.git("rev-parse", "HEAD")
        points = check_every_point(history, first, 4)
        assert points > 150
        assert shop.git("log", "--first-parent", "--format=%s").splitlines()[:2] == ["c: Do c", "a: Do a"]
    finally:
        shop.kill_all()


def test_a_few_random_histories_land_only_what_passes(tmp_path):
    landed, _, _ = check_histories(tmp_path, range(3))
    assert landed


@pytest.mark.slow
@pytest.mark.parametrize("seeds", in_parts(HISTORIES, 10), ids=str)
def test_random_histories_land_only_what_passes(tmp_path, seeds):
    landed, returned, killed = check_histories(tmp_path, range(1000 + seeds.start, 1000 + seeds.stop))
    assert landed >= len(seeds) / 2 and returned + killed
