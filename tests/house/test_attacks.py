"""Runs attacked from outside: what a task, its agent or a cloned directory may never do.

Each test types commands in a real repository and looks at git, at files and at exit codes only.
"""
import os
import shutil
import sys

import pytest

import subagent_fleet as sf
from run_kit import FLEET, shell

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"),
                                                    reason="the kit reads /proc")]
EDIT = "echo two > a.txt"


# -- the person's own checkout --

def test_a_worktree_whose_git_file_went_in_setup_costs_the_person_nothing(shop):
    shop.write("a.txt", "my own work\n")
    shop.write("new.txt", "staged\n")
    shop.git("add", "new.txt")
    assert shop.work(coder=["true"], check="true", setup=["rm -rf .git; false"]) == "parked"
    for _ in range(2):
        assert shop.type("task", "retry", "t").code == 0
        assert shop.run().code == 1
        assert shop.state() == "parked"
    assert (shop.repo / "a.txt").read_text() == "my own work\n"
    assert (shop.repo / "new.txt").read_text() == "staged\n"
    assert shop.git("diff", "--cached", "--name-only") == "new.txt"


REPLACED = {
    "removed": "rm -rf .git",
    "a pipe": "rm -rf .git; mkfifo .git",
    "a link to the person's": 'rm -rf .git; ln -s "$MAIN/.git" .git',
    "a file that leads to the person's": 'rm -rf .git; echo "gitdir: $MAIN/.git" > .git',
    "a repository of its own": "rm -rf .git; git init -q .; git config filter.f.clean 'touch $WITNESS; cat'; "
                               "echo '*.txt filter=f' > .gitattributes",
    "another one's mark": "echo fedcba9876543210 > .git/subagent-fleet.task",
}


@pytest.mark.parametrize("how", REPLACED)
def test_an_agent_that_replaces_its_git_file_is_parked_and_git_is_not_asked_there(shop, how):
    shop.write("private.txt", "the person's secret\n")
    head = shop.git("rev-parse", "main")
    state = shop.work(coder=shell(f"MAIN={shop.repo}", EDIT, REPLACED[how]), check="grep -q two a.txt")
    assert state == "parked", shop.said
    assert shop.row("t")["cause"] == "worktree-changed"
    assert shop.kept("the person's secret") == []
    assert shop.witness == "" and not shop.has_work("t")
    assert shop.git("rev-parse", "main") == head
    assert shop.git("status", "--porcelain") == "?? private.txt\n?? tasks.json"
    for words in (("task", "diff", "t"), ("task", "tidy", "t", "--dry-run"), ("task", "tidy", "t")):
        shop.type(*words)
    assert shop.worktree("t").joinpath("a.txt").read_text() == "two\n", "tidy took what it cannot read"
    assert shop.witness == ""


# -- what git cannot tell --

def test_an_edit_of_equal_size_in_the_second_of_the_checkout_is_judged_and_kept(shop):
    count = int(os.environ.get("SUBAGENT_FLEET_CODERS", "16"))
    coder = shell(EDIT, "sleep 1.2")  # one of the size of the other; then a second has passed
    names = [f"t{number}" for number in range(count)]
    shop.tasks({name: {"prompt": "x", "coder": coder, "check": "grep -q two a.txt", "tries": 1}
                for name in names}, max=min(count, 20))
    done = shop.run()
    assert {row["state"] for row in shop.rows().values()} == {"done"}, done
    assert done.code == 0
    assert shop.type("task", "tidy").code == 0
    for name in names:
        assert shop.git("show", f"run/{name}:a.txt") == "two", name


FAILS = ["diff", "ls-files", "status", "write-tree", "config", "for-each-ref", "rev-parse",
         "update-ref", "commit-tree", "rev-list", "merge-base", "check-ignore", "read-tree", "add"]


@pytest.mark.parametrize("fails", FAILS)
def test_a_git_that_fails_is_never_taken_for_nothing_changed(shop, fails):
    real = shutil.which("git")
    # It fails once the agent has been there; commands alike (diff-index) fail with it.
    shop.program("git", f"""if [ -e "$HOME/broken" ]; then case " $* " in *" {fails}"*)
    echo "fatal: it is broken" >&2; exit 128;; esac; fi; exec {real} "$@" """)
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "SECRET=hunter2\n")
    shop.tasks({name: {"prompt": "x", "tries": 1, "coder": shell(EDIT, "touch $HOME/broken"),
                       "copy": [".env"], **more}
                for name, more in {"t": {"check": "grep -q two a.txt"},
                                   "none": {"check": "true", "changes": "none"}}.items()})
    done = shop.run()
    (shop.home / "broken").unlink(missing_ok=True)
    rows = shop.rows()
    states = {name: row["state"] for name, row in rows.items()}
    causes = {row["cause"] for row in rows.values() if row["state"] == "parked"}
    assert causes <= {"git-failed", "no-snapshot", "worktree-failed", "bad-base"}, rows
    assert states["t"] in ("done", "parked", "waiting"), done
    assert states["none"] in ("failed", "parked", "waiting"), done
    if states["t"] == "done":
        assert shop.git("show", "run/t:a.txt") == "two"
    assert shop.kept("hunter2") == []


def test_objects_that_are_pruned_meanwhile_change_no_verdict(shop):
    prune = "git reflog expire --expire=all --all; git gc -q --prune=now"
    shop.tasks({"t": {"prompt": "x", "setup": ["echo made > setup.txt"], "check": "grep -q two a.txt",
                      "coder": shell(EDIT, prune), "tries": 1},
                "none": {"prompt": "x", "setup": ["echo made > setup.txt"], "check": "true",
                         "coder": shell(EDIT, prune), "tries": 1, "changes": "none"}}, max=1)
    done = shop.run()
    states = {name: row["state"] for name, row in shop.rows().items()}
    assert states == {"t": "done", "none": "failed"}, done


# -- secrets --

def test_copies_and_the_gateways_key_reach_no_ref(shop):
    shop.write(".gitignore", ".env*\n")  # not committed, as after `generate`
    shop.write(".env", "SECRET=hunter2\n")
    shop.write(".env.subagent-fleet", "LITELLM_MASTER_KEY=sk-topmost\n")
    assert shop.work(coder=shell(EDIT), copy=[".env*"], check="grep -q hunter2 .env") == "done", shop.said
    assert shop.files("run/t") == {"a.txt"}
    assert shop.type("task", "tidy").code == 0
    assert shop.kept("hunter2") == [] and shop.kept("sk-topmost") == []


def test_the_gateways_key_is_never_copied(shop):
    shop.commit(_gitignore=".env*\n", _worktreeinclude=".env*\n")
    shop.write(".env", "SECRET=hunter2\n")
    shop.write(".env.subagent-fleet", "LITELLM_MASTER_KEY=sk-topmost\n")
    look = shell(EDIT, "ls -a > seen.txt")
    shop.tasks({"t": {"prompt": "x", "coder": look, "check": "true"},
                "u": {"prompt": "x", "coder": look, "check": "true", "copy": [".env*"]}})
    assert shop.run().code == 0
    for name in ("t", "u"):
        seen = shop.git("show", f"run/{name}:seen.txt").split()
        assert ".env" in seen and ".env.subagent-fleet" not in seen


def test_the_gateways_key_reaches_no_ref_when_its_agent_fetches_it(shop):
    shop.write(".env.subagent-fleet", "LITELLM_MASTER_KEY=sk-topmost\n")  # nothing ignores it
    fetch = f"mkdir deep; cp {shop.repo}/.env.subagent-fleet .; cp {shop.repo}/.env.subagent-fleet deep"
    assert shop.work(coder=shell(EDIT, fetch), check="true") == "done", shop.said
    assert shop.files("run/t") == {"a.txt"}
    shop.type("task", "tidy")
    assert shop.kept("sk-topmost") == []


def test_copies_reach_no_ref_when_setup_fails_nor_when_it_is_tidied(shop):
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "SECRET=hunter2\n")
    assert shop.work(coder=["true"], copy=[".env"], setup=["false"], check="true") == "parked"
    shop.type("task", "retry", "t")
    shop.run()
    assert shop.state() == "parked"
    assert "hunter2" not in shop.type("task", "diff", "t").out
    shop.type("task", "tidy")
    assert shop.kept("hunter2") == []


def test_a_copy_that_is_changed_or_moved_by_its_agent_reaches_no_branch(shop):
    shop.commit(_gitignore=".env\n*.log\n")
    shop.write(".env", "SECRET=hunter2\n")
    coder = shell(EDIT, "echo MORE=swordfish >> .env", "echo agent-log > own.log", f"cp {shop.repo}/.env x.log")
    assert shop.work(coder=coder, copy=[".env"], check="true") == "done"
    assert shop.files("run/t") == {".gitignore", "a.txt"}


def test_a_copy_reaches_no_ref_when_the_rule_that_ignored_it_goes_meanwhile(shop):
    shop.write(".gitignore", ".env\n")  # not committed
    shop.write(".env", "SECRET=hunter2\n")
    coder = shell(EDIT, f"rm {shop.repo}/.gitignore")
    assert shop.work(coder=coder, copy=[".env"], check="grep -q two a.txt") == "done", shop.said
    shop.type("task", "tidy")
    assert shop.kept("hunter2") == []


def test_what_the_main_checkout_ignores_by_an_uncommitted_rule_reaches_no_branch(shop):
    shop.write(".gitignore", ".env\n")
    assert shop.work(coder=shell(EDIT, "echo SECRET=hunter2 > .env"), check="true") == "done"
    assert shop.files("run/t") == {"a.txt"}


def test_ignored_files_too_many_to_list_in_a_small_file_reach_no_branch(shop):
    shop.commit(_gitignore="*.o\n.env\n")
    shop.write(".env", "SECRET=hunter2\n")
    many = "import sys; [open(f'{n:05}' + 'x' * 230 + '.o', 'w').close() for n in range(18500)]"
    state = shop.work(coder=shell(EDIT), copy=[".env"], check="true",
                      setup=[f'{sys.executable} -I -S -c "{many}"'])
    assert state in ("done", "parked"), shop.said
    assert shop.kept("hunter2") == []
    if state == "done":
        assert shop.files("run/t") == {".gitignore", "a.txt"}


def test_a_list_that_cannot_be_read_is_not_an_empty_one(shop):
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "SECRET=hunter2\n")
    spoil = 'for f in "$FLEET_TASK_DIR"/*.json "$FLEET_TASK_DIR"/../1/*.json; do echo "{" > "$f"; done'
    state = shop.work(coder=shell(EDIT, spoil), copy=[".env"], check="true")
    assert state == "done" or shop.row("t")["cause"] == "bad-list", shop.said
    shop.type("task", "tidy")
    assert shop.kept("hunter2") == []
    if state == "done":
        assert shop.files("run/t") == {".gitignore", "a.txt"}


# -- what came with a directory --

def moved(shop, name):
    """Another person who has unpacked an archive of this repository, tasks and all."""
    there = type(shop).__new__(type(shop))
    there.__dict__.update(shop.__dict__)
    there.place = shop.place / name
    there.repo, there.home = there.place / "repo", there.place / "home"
    there.place.mkdir()
    there.home.mkdir()
    shutil.copytree(shop.repo, there.repo, symlinks=True)
    there.environ = {**shop.environ, "HOME": str(there.home),
                     "XDG_STATE_HOME": str(there.home / "state"), "WITNESS": str(there.place / "witness")}
    return there


def rewrite(directory, old, new):
    """Replace a text in every file below a directory."""
    count = 0
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if old.encode() in content:
                path.write_bytes(content.replace(old.encode(), new.encode()))
                count += 1
    return count


ASKED = [("task", "diff", "t"), ("task", "tidy"), ("task", "tidy", "--dry-run"), ("task", "stop", "t"),
         ("task", "retry", "t"), ("task", "say", "t", "x"), ("task", "add", "x"), ("run",)]


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
@pytest.mark.parametrize("state", ["running", "done"])
def test_tasks_that_came_with_a_directory_are_shown_and_never_obeyed(shop, words, state):
    if state == "done":
        assert shop.work(coder=shell(EDIT), check="true") == "done"
    else:
        shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, "sleep 100")}})
        child = shop.begin("run")
        shop.wait(lambda: shop.works("t"))
        child.kill()
        child.wait()
    there = moved(shop, "unpacked")
    rewrite(there.repo / ".git", str(shop.repo), str(there.repo))
    rewrite(there.repo / ".subagent-fleet", str(shop.repo), str(there.repo))
    there.write(".gitattributes", "* filter=f\n")
    there.git("config", "filter.f.clean", f"touch {there.place}/witness; cat")
    there.write(".git/info/attributes", "* filter=f\n")
    before = there.git("for-each-ref")
    done = there.type(*words)
    assert done.code == 3, done
    assert there.witness == "" and there.git("for-each-ref") == before
    assert there.type("tasks").code == 0 and there.witness == ""


def test_a_revision_that_is_an_option_of_git_writes_nothing(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    target = shop.place / "written"
    snapshots = shop.git("for-each-ref", "--format=%(objectname)", "refs/subagent-fleet").split()
    for commit in {shop.start, *snapshots, shop.tip("t")}:
        rewrite(shop.repo / ".git/subagent-fleet/run", commit, f"--output={target}")
    for words in (("task", "diff", "t"), ("task", "diff", "t", "--stat"), ("task", "tidy", "--dry-run"),
                  ("tasks", "t")):
        shop.type(*words)
    assert not target.exists()
    with pytest.raises(sf.FleetError) as caught:
        folder = sf.Folder(sf.World(), sf.find_repository(sf.World(), str(shop.repo)))
        sf.find_task(folder, "t", "task diff")
    assert caught.value.slug == "bad-state"
    assert shop.tip("t"), "its branch has gone"


def test_a_diff_and_a_dry_run_run_no_filter(shop):
    shop.commit(_gitattributes="*.txt filter=f\n")
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true"},
                "u": {"prompt": "x", "coder": shell(EDIT, "touch $HOME/edited", "sleep 100")}})
    child = shop.begin("run")
    shop.wait(lambda: shop.rows().get("t", {}).get("state") == "done" and (shop.home / "edited").exists())
    shop.git("config", "filter.f.clean", f"touch {shop.place}/witness; cat")
    shop.git("config", "filter.f.process", f"touch {shop.place}/witness")
    for words in (("task", "diff", "u"), ("task", "diff", "u", "--stat"), ("task", "diff", "t"),
                  ("task", "tidy", "--dry-run")):
        done = shop.type(*words)
        assert done.code == 0, done
        assert shop.witness == "", words
    assert "+two" in shop.type("task", "diff", "u").out
    child.kill()
    child.communicate()


# -- programs --

def test_no_program_of_the_repository_runs_by_a_relative_path_entry(shop):
    for name in ("git", "sh", "claude"):
        shop.program(name, f'echo {name} >> "$WITNESS"; exec /bin/{name} "$@"', shop.repo)
    shop.git("add", "-A")
    shop.git("commit", "-qm", "programs")
    shop.environ["PATH"] = f".::{shop.environ['PATH']}"
    assert shop.work(coder=shell(EDIT), setup=["true"], check="grep -q two a.txt") == "done", shop.said
    for words in (("task", "diff", "t"), ("task", "tidy")):
        assert shop.type(*words).code == 0
    assert shop.witness == ""


# -- leave to edit --

REFUSED = [".git", ".git/config", "x/.git/config", ".GIT/config", "sub/.Git", ".claude/settings.json",
           "deep/.Claude/x", ".gitmodules", ".GitModules", "sub/.gitattributes", "out/x.txt",
           "outfile.txt", "out/../out/y.txt", "dangling"]
ALLOWED = ["ok.txt", "deep/er/ok.txt", "inner/ok.txt", ".github/x.yml", ".gitignore"]


def test_leave_to_edit_is_asked_of_the_resolved_path(shop):
    shop.use_claude()
    (shop.home / "outside").mkdir()
    links = (f"ln -s {shop.home}/outside out; ln -s {shop.home}/outside/f outfile.txt; mkdir -p real deep; "
             f"ln -s real inner; ln -s {shop.home}/outside/none dangling")
    prompt = "\n".join([f"@run {links}", *(f"@edit {path}" for path in REFUSED + ALLOWED)])
    shop.tasks({"t": {"prompt": prompt, "model": "big", "check": "true"}})
    done = shop.run()
    answers = [line.split()[0] for line in shop.git("show", "run/t:denied.txt").splitlines()]
    assert len(answers) == len(REFUSED + ALLOWED), done
    got = dict(zip(REFUSED + ALLOWED, answers))
    assert got == {**dict.fromkeys(REFUSED, "deny"), **dict.fromkeys(ALLOWED, "allow")}


# -- names --

def test_a_twin_whose_name_another_task_has_is_refused(shop):
    coder = shell(EDIT)
    shop.tasks({"jwt": {"prompt": "x", "times": 2, "coder": coder, "check": "true"},
                "jwt-a": {"prompt": "y", "coder": coder, "check": "true"}})
    shop.write("fleet.yaml", FLEET.replace("PORT", "9"))
    for words in (("validate",), ("run",)):
        done = shop.type(*words)
        assert done.code not in (0, 130) and "jwt-a" in done.out + done.err, done
    assert shop.git("branch", "--format=%(refname:short)") == "main"


# -- what is typed, and what is claimed --

@pytest.mark.parametrize("words", [
    ("--check", "false"), ("--name", "zzz", "--check", "false", "--touch", "src/**", "--times", "3"),
    ("t", "--setup", "false"), ("t", "u:y")], ids=" ".join)
def test_what_run_cannot_heed_is_refused_and_never_ignored(shop, words):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    done = shop.run(*words)
    assert done.code != 0 and not shop.has_work("t"), done


def test_a_watch_for_programs_is_refused(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    for words in (("tasks", "--watch", "1", "--json"), ("tasks", "t", "--watch", "1", "--json")):
        child = shop.begin(*words)
        assert shop.end(child, 20).code == 2


def test_tasks_of_commands_need_no_key_and_no_gateway(shop):
    shop.write("fleet.yaml", FLEET.replace("PORT", "9"))
    assert shop.work(coder=shell(EDIT), check="true") == "done", shop.said
    assert shop.said.code == 0 and "Serving" not in shop.said.err
    assert not list(shop.repo.glob(".env*"))


def test_what_an_agent_says_makes_no_flag_and_what_it_did_not_do_makes_one(shop):
    shop.use_claude()
    said = "@quiet I dispatched the reviewer agent."
    shop.tasks({"works": {"prompt": f"@write x.txt y\n{said}", "model": "big", "check": "true"},
                "idles": {"prompt": said, "model": "big", "check": "true", "tries": 1, "rounds": 0}})
    assert shop.run().code == 1
    assert shop.receipt("works")["flags"] == []
    assert shop.receipt("idles")["flags"] == ["made no call that could change a file"]
