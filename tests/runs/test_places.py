"""A repository for each agent and each check: what an agent does with git stays in its place."""
import os
import random
import shutil
import subprocess
import sys

import pytest

from run_kit import Shop, shell
from tools import in_parts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"),
                                                   reason="the kit reads /proc")]
AGENTS = int(os.environ.get("SUBAGENT_FLEET_AGENTS", "24"))  # a thousand are the whole promise
EDIT = "echo two > a.txt"
COMMIT = "git add -A; git commit -qm c"


def persons(shop):
    """Every file of the person's repository and checkout, but for what runs may add."""
    files = {}
    for path in sorted(shop.repo.rglob("*")):
        inner = path.relative_to(shop.repo).as_posix()
        if path.is_file() and not inner.startswith((
                ".git/objects/", ".git/refs/heads/run/", ".git/refs/subagent-fleet/",
                ".git/logs/refs/heads/run/", ".git/subagent-fleet/")):
            files[inner] = path.read_bytes()
    return files


def cloned(shop, name):
    """A fresh clone of a task's branch."""
    place = shop.place / f"clone-of-{name}"
    shop.git("clone", "-q", "--no-local", "--single-branch", "-b", f"run/{name}", str(shop.repo), str(place))
    return place


# -- whatever an agent writes into its own repository --

STEPS = [
    EDIT, "echo $R > n$R.txt", COMMIT, "git commit -qam c", "echo $R > 'odd \"name\"'", "ln -s /etc l$R; git add l$R",
    "git config core.bare true", "git config core.worktree $HOME", "git config core.hooksPath $PWD/h",
    "git config core.fsmonitor 'touch $WITNESS; false'", "git config include.path $PWD/more",
    "git config filter.f.clean 'touch $WITNESS; cat'; git config filter.f.smudge 'touch $WITNESS; sed s/bad/good/'",
    "echo '* filter=f' > .gitattributes", "mkdir -p .git/info; echo '* filter=f text eol=crlf' > .git/info/attributes",
    "git config core.attributesFile $PWD/attributes; echo '* filter=f' > attributes", "git config core.autocrlf true",
    "mkdir -p .git/hooks; for h in pre-commit reference-transaction post-checkout post-index-change; do "
    "printf '#!/bin/sh\\ntouch $WITNESS' > .git/hooks/$h; chmod +x .git/hooks/$h; done",
    "git branch -f main HEAD", "git update-ref refs/heads/main HEAD", "git branch b$R", "git tag t$R",
    "git branch -D main", "git update-ref -d refs/heads/run/$FLEET_TASK_ID", "git stash -q -u",
    "git replace $(echo bad | git hash-object -w --stdin) $(echo good | git hash-object -w --stdin)",
    "git symbolic-ref HEAD refs/heads/other", "git checkout -q --detach", "git checkout -q -B main",
    "echo $MAIN/.git/objects > .git/objects/info/alternates; echo /nowhere >> .git/objects/info/alternates",
    "touch .git/index.lock", "touch .git/HEAD.lock .git/config.lock", "git pack-refs --all", "git gc -q --prune=now",
    "git worktree add -q ../w$R", "git sparse-checkout set d", "git update-index --assume-unchanged a.txt",
    "git notes add -m n", "git remote set-url origin $MAIN; git push -q origin HEAD:refs/heads/pushed",
    "git push -q origin HEAD:refs/heads/pushed", "git config core.sharedRepository all", "git config gc.auto 1",
    "echo commondir > .git/commondir; git status", "git config extensions.worktreeConfig true; "
    "git config --worktree core.bare true",
    "git -c protocol.file.allow=always submodule add -q $MAIN sub", "git init -q inner; echo x > inner/x",
    "echo bad > code", "echo good > code"]
# What its own git would follow out of its place, where nothing confines it: only the last thing that
# it does, once.
LAST = [*["true"] * 9, "rm -rf .git/refs/heads; ln -s $MAIN/.git/refs/heads .git/refs/heads",
        "rm -rf .git/objects/info; ln -s $MAIN/.git/objects/info .git/objects/info",
        "rm -rf .git/logs; ln -s $MAIN/.git/logs .git/logs", "ln -sf $MAIN/.git/index .git/index",
        "rm .git/HEAD; ln -s $MAIN/.git/HEAD .git/HEAD", "rm -rf .git", "rm -rf .git; ln -s $MAIN/.git .git",
        "ln -sf $MAIN/.git/config .git/config", "mkfifo .git/info/exclude2 pipe"]


@pytest.mark.parametrize("seeds", in_parts(AGENTS // 4, 12), ids=str)
def test_the_persons_repository_gets_objects_and_our_refs_whatever_agents_do(shop, seeds):
    shop.commit(code="fine\n", **{"d/x": "x\n"})
    shop.git("remote", "add", "origin", str(shop.repo))
    shop.git("tag", "v1")
    shop.tasks({})
    tasks = {}
    for seed in seeds:
        for number in range(4):
            rng = random.Random(seed * 4 + number)
            steps = [f"R={rng.randrange(10**6)}; {step}" for step in [EDIT, *rng.choices(STEPS, k=rng.randrange(1, 8))]]
            steps.append(rng.choice(LAST))
            tasks[f"a{seed}-{number}"] = {
                "prompt": "x", "tries": 1, "rounds": 0, "check": "! grep -q bad code",
                "coder": shell(f"export MAIN={shop.repo}", *(f"{{ {one}; }} >/dev/null 2>&1" for one in steps), "true")}
    shop.tasks(tasks)
    before = persons(shop)
    refs = shop.git("for-each-ref")
    said = shop.run()
    shop.type("task", "tidy", "--ignored")
    after = persons(shop)
    assert {name for name in before.keys() | after.keys() if after.get(name) != before.get(name)} == set(), said
    theirs = [line for line in shop.git("for-each-ref").splitlines()
              if "refs/heads/run/" not in line and "refs/subagent-fleet/" not in line]
    assert theirs == refs.splitlines()
    assert shop.git("fsck", "--strict", "--no-dangling", check=False) == ""
    done = [name for name, row in shop.rows().items() if row["state"] == "done"]
    assert done, said
    for name in done:
        assert "bad" not in (cloned(shop, name) / "code").read_text(), tasks[name]["coder"]


BAD_BUT = {
    "a filter": "git config filter.f.smudge 'sed s/bad/good/'; echo 'code filter=f' > .gitattributes",
    "a filter in info/attributes": "git config filter.f.smudge 'sed s/bad/good/'; mkdir -p .git/info;"
                                   "echo 'code filter=f' > .git/info/attributes",
    "another's attributes": "git config filter.f.smudge 'sed s/bad/good/'; git config core.attributesFile $PWD/at;"
                            "echo 'code filter=f' > at",
    "a replacement": "git replace $(echo bad | git hash-object -w --stdin) $(echo good | git hash-object -w --stdin)",
    "an index": "echo good > code; git add code; git update-index --skip-worktree code"}


@pytest.mark.parametrize("how", BAD_BUT)
def test_what_the_check_sees_is_what_a_fresh_clone_has(shop, how):
    shop.commit(code="none\n")
    coder = shell(BAD_BUT[how], "echo bad > code")
    assert shop.work("bad", coder=coder, check="grep -q good code") == "failed", shop.said
    assert shop.work("done", coder=coder, check="grep -q bad code") == "done", shop.said
    assert (cloned(shop, "done") / "code").read_text() == "bad\n"
    assert "filter" not in (shop.repo / ".git/config").read_text()


def test_a_directory_that_git_would_not_check_out_is_refused_on_the_way_home(shop):
    coder = shell(EDIT, "b=$(echo x | git hash-object -w --stdin)",
                  "t=$(printf '100644 blob %s\\tconfig\\n' $b | git mktree)",
                  "r=$(printf '040000 tree %s\\t.git\\n' $t | git mktree)",
                  "git update-ref HEAD $(git commit-tree -p HEAD -m odd $r)")
    assert shop.work(coder=coder, check="true") == "parked", shop.said
    assert shop.row("t")["cause"] == "odd-objects" and not shop.has_work("t")
    assert shop.git("fsck", "--strict", "--no-dangling") == ""


# -- what a build or a test finds in a place --

@pytest.mark.parametrize("kind", ["plain", "sha256", "shallow", "linked", "partial"])
def test_tools_find_tags_and_what_they_compare_with(tmp_path, kind):
    shop = Shop(tmp_path)
    form = "--object-format=sha256" if kind == "sha256" else "--object-format=sha1"
    shutil.rmtree(shop.repo)
    upstream = tmp_path / "upstream"
    shop.git("init", "-q", form, "-b", "main", str(upstream), cwd=tmp_path)
    for number in range(3):
        shop.write("a.txt", f"{number}\n", upstream)
        shop.git("add", ".", cwd=upstream)
        shop.git("commit", "-qm", f"c{number}", cwd=upstream)
    shop.git("tag", "-a", "v1.2", "-m", "v1.2", cwd=upstream)
    shop.git("config", "uploadpack.allowFilter", "true", cwd=upstream)
    more = {"shallow": ["--depth", "2"], "partial": ["--filter=blob:none"]}.get(kind, [])
    shop.git("clone", "-q", *more, f"file://{upstream}", str(shop.repo), cwd=tmp_path)
    if kind == "linked":
        shop.git("worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
        shop.repo = tmp_path / "side"
    shop.start = shop.git("rev-parse", "HEAD")
    says = ("{ git describe; git log --format=%s origin/main; git symbolic-ref refs/remotes/origin/HEAD; "
            "git rev-parse --is-shallow-repository; }")
    coder = shell(f"{says} > $HOME/said", EDIT, COMMIT, "git push origin HEAD:stolen; git push $(git remote) main:stolen",
                  "git fetch -q origin && echo fetched >> $HOME/said")
    state = shop.work(coder=coder, check=f"git describe; git status; {says} > $HOME/checked; "
                                         "git diff --stat origin/main | grep -q a.txt")
    assert state == "done", (shop.said, shop.type("task", "log", "t", "check").out)
    subjects = ["c2", "c1", "c0"][:2 if kind == "shallow" else 3]
    tail = ["refs/remotes/origin/HEAD".replace("HEAD", "main"), str(kind == "shallow").lower()]
    assert (shop.home / "said").read_text().split("\n")[:-1] == ["v1.2", *subjects, *tail, "fetched"]
    checked = (shop.home / "checked").read_text().split("\n")[:-1]
    assert checked[0].startswith("v1.2-1-g") and checked[1:] == [*subjects, *tail]
    assert shop.git("for-each-ref", "refs/heads/stolen", cwd=upstream) == ""
    assert shop.git("show", "run/t:a.txt") == "two"
    assert shop.type("task", "tidy").code == 0 and not shop.worktree("t")


@pytest.mark.parametrize("where", ["beside", "in a sandbox of its own"])
def test_submodules_with_relative_addresses_are_there_after_setup(shop, where):
    shop.add_submodule()
    shop.git("config", "-f", ".gitmodules", "submodule.sub.url", "../inner")
    shop.git("remote", "add", "origin", "../repo" if where == "beside" else str(shop.repo))
    shop.git("config", "--unset", "submodule.sub.url")
    shop.git("commit", "-qam", "relative")
    shop.start = shop.git("rev-parse", "HEAD")
    setup = ["git -c protocol.file.allow=always submodule update --init -q"]
    assert shop.work(coder=shell("cat sub/s.txt > a.txt"), setup=setup,
                     check="test -s sub/s.txt && grep -q sub a.txt") == "done", shop.said
    assert shop.git("diff", "--name-only", "main", "run/t") == "a.txt"
    assert shop.type("task", "tidy").code == 0


def test_a_persons_filter_makes_files_in_each_place_as_in_the_checkout(shop):
    """As git-lfs does: what is committed is a name, what it stands for lies below .git."""
    store = "$(git rev-parse --git-common-dir)/lfs"
    clean = shop.program("clean", f'mkdir -p {store}; t=$(mktemp); cat > $t; n=$(cksum < $t | cut -d" " -f1); '
                                  f'mv $t {store}/$n; echo "pointer $n"')
    smudge = shop.program("smudge", f'read word n; cat {store}/$n')
    shop.git("config", "filter.big.clean", str(clean))
    shop.git("config", "filter.big.smudge", str(smudge))
    shop.git("config", "filter.big.required", "true")
    shop.commit(_gitattributes="*.bin filter=big\n", **{"x.bin": "large\n"})
    assert shop.git("show", "HEAD:x.bin").startswith("pointer ")
    coder = shell("grep -q large x.bin && echo larger > y.bin")
    assert shop.work(coder=coder, check="grep -q large x.bin && grep -q larger y.bin") == "done", shop.said
    assert shop.git("show", "run/t:y.bin").startswith("pointer ")
    shop.git("merge", "-q", "run/t")
    assert (shop.repo / "y.bin").read_text() == "larger\n"


def test_what_a_person_has_added_to_a_branch_is_what_its_task_goes_on_with(shop):
    assert shop.work(coder=shell("echo x >> work.txt")) == "review"
    shop.git("checkout", "-q", "run/t")
    shop.write("by_hand.txt", "mended\n")
    shop.git("add", "by_hand.txt")
    shop.git("commit", "-qm", "by hand")
    shop.git("checkout", "-q", "main")
    shop.type("task", "say", "t", "once more")
    assert shop.run().code == 0 and shop.state() == "review"
    assert shop.git("show", "run/t:work.txt") == "x\nx" and shop.files("run/t") == {"a.txt", "by_hand.txt", "work.txt"}
    assert shop.git("log", "--format=%s", "run/t", "--not", "main").split("\n") == ["t: x", "by hand", "t: x"]


@pytest.mark.parametrize("target", ["$MAIN/.git/index", "$HOME/.profile"])
def test_an_index_that_an_agent_made_a_link_leads_git_to_no_file_of_the_persons(shop, target):
    profile = shop.home / ".profile"
    profile.write_text("mine\n")
    coder = shell("echo x >> work.txt", f"ln -sf {target.replace('$MAIN', str(shop.repo))} .git/index")
    index = (shop.repo / ".git/index").read_bytes()
    assert shop.work(coder=coder) == "review"
    assert ((shop.repo / ".git/index").read_bytes(), profile.read_text()) == (index, "mine\n")
    shop.git("update-ref", "refs/heads/run/t", shop.git(
        "commit-tree", "-p", "run/t", "-m", "by hand", "run/t^{tree}"))
    (shop.worktree("t") / ".git/index").unlink()
    (shop.worktree("t") / ".git/index").symlink_to(profile)
    shop.type("task", "say", "t", "once more")
    assert shop.run().code == 0 and shop.state() == "review"
    assert ((shop.repo / ".git/index").read_bytes(), profile.read_text()) == (index, "mine\n")
    assert shop.git("status", "--porcelain", cwd=shop.worktree("t")) == ""


def test_commits_of_a_person_that_a_work_has_not_are_named_with_the_line_to_type(shop):
    assert shop.work(coder=shell("echo x >> work.txt")) == "review"
    shop.write("dirty.txt", "of the person", shop.worktree("t"))
    shop.git("checkout", "-q", "run/t")
    shop.write("by_hand.txt", "mended\n")
    shop.git("add", "by_hand.txt")
    shop.git("commit", "-qm", "by hand")
    tip = shop.git("rev-parse", "HEAD")
    shop.git("checkout", "-q", "main")
    shop.type("task", "say", "t", "once more")
    assert shop.run().code == 1 and shop.row("t")["cause"] == "branch-moved" and shop.tip("t") == tip
    line = shop.row("t")["reason"].split("; ", 1)[1].partition(", then ")[0]
    subprocess.run(["sh", "-ec", line], cwd=shop.repo, check=True, env=shop.environment(GIT_EDITOR="true"))
    assert shop.type("task", "retry", "t").code == 0 and shop.run().code == 0
    assert shop.files("run/t") == {"a.txt", "by_hand.txt", "work.txt", "dirty.txt"}


def test_commands_that_are_typed_in_a_place_are_of_its_repository(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    there = shop.worktree("t")
    assert "+two" in shop.type("task", "diff", "t", cwd=there).out
    (there / ".git/subagent-fleet.task").write_text(f"0123456789abcdef\n{shop.repo}\n")
    assert shop.type("task", "diff", "t", cwd=there).code != 0


def test_a_mark_that_leads_back_to_itself_is_no_repository_of_tasks(shop):
    (shop.repo / ".git/subagent-fleet.task").write_text(f"0123456789abcdef\n{shop.repo}\n")
    assert shop.work(coder=shell(EDIT), check="true") == "done"


def test_a_place_whose_directories_its_agent_has_closed_goes(shop):
    shop.commit(_gitignore="cache/\n")
    coder = shell(EDIT, "mkdir -p cache/pkg; echo x > cache/pkg/x; chmod -R a-w cache")
    assert shop.work(coder=coder, check="true") == "done"
    assert "removed" in shop.type("task", "tidy", "--ignored").out and not shop.worktree("t")


def test_git_runs_with_no_setting_of_an_agents_repository(shop):
    """Its filters, hooks and watchers are programs: none of them runs as ours."""
    witness = "touch $WITNESS; cat"
    steps = ["git config core.fsmonitor \"touch $WITNESS; false\"", f"git config filter.f.clean '{witness}'",
             "git config filter.f.process \"touch $WITNESS\"", "echo '*.txt filter=f' > .gitattributes",
             "git config diff.external \"touch $WITNESS\"", "git config core.pager \"touch $WITNESS\"",
             "git config gpg.program \"touch $WITNESS\"", "git config commit.gpgSign true"]
    assert shop.work(coder=shell(EDIT, *steps), check="true") == "done", shop.said
    for words in (("diff", "t"), ("tidy", "--dry-run"), ("tidy",)):
        assert shop.type("task", *words).code == 0
    assert shop.witness == "" and not shop.worktree("t")


def test_a_submodules_settings_run_nothing(shop):
    shop.add_submodule()
    setup = ["git -c protocol.file.allow=always submodule update --init -q",
             "git -C sub config filter.f.clean 'touch $WITNESS; cat'; git -C sub config core.fsmonitor 'touch $WITNESS; false'",
             "echo '* filter=f' > \"$(git -C sub rev-parse --absolute-git-dir)/info/attributes\""]
    assert shop.work(coder=shell(EDIT, "touch sub/s.txt"), setup=setup, check="grep -q two a.txt") == "done", shop.said
    shop.type("task", "diff", "t")
    assert shop.witness == ""


def test_ten_tasks_leave_nothing_but_their_refs_in_the_git_directory(shop):
    shop.tasks({"t": {"prompt": "x", "times": 10, "coder": shell(EDIT), "check": "true"}})
    shop.git("status")
    before = persons(shop)
    assert shop.run().code == 0
    assert persons(shop) == before
    assert not list((shop.repo / ".git/subagent-fleet/run").glob("index-*"))
    assert subprocess.run(["git", "worktree", "list"], cwd=shop.repo, capture_output=True).stdout.count(b"\n") == 1
