"""The commands `run`, `tasks` and `task …`: typed, with a stub for Claude Code and a real gateway."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from json_examples import compare_example
from run_kit import NAMESPACE, needs_namespace
from tools import PROGRAM, ROOT


@pytest.fixture
def rig(task_rig):
    return task_rig

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the rig reads /proc")
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Typist:
    """A person who types commands in a Rig."""

    def __init__(self, rig, *, fleet=True):
        self.rig = rig
        rig.keeps_outside = False
        if fleet:
            rig.write_fleet()
            self.run("generate")

    def start(self, *words, env=(), cwd=None):
        return self.rig.launch(*words, cwd=cwd, **dict(env))

    def run(self, *words, status=0, **more):
        child = self.start(*words, **more)
        out, err = child.communicate(timeout=60)
        self.err = err.decode()
        assert "Traceback" not in self.err, self.err
        assert child.returncode == status, (words, child.returncode, out.decode(), self.err)
        return out.decode()

    def write(self, text):
        (self.rig.repo / "tasks.yaml").write_text(text)

    def json(self, *words, **more):
        return json.loads(self.run(*words, "--json", **more))


@pytest.fixture
def typist(rig):
    """A Typist with a fleet; the gateway that was started for its tasks is ended."""
    typist = Typist(rig)
    yield typist
    pid = rig.repo / ".git/subagent-fleet/run/serve.pid"
    if pid.exists() and rig.world.is_held(str(pid.with_name("serve.alive"))):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_task_of_none_is_none_and_nothing_can_land(typist):
    typist.run("task", "stop", "*")  # as README says it, in any project
    typist.run("task", "tidy")
    typist.run("task", "land", status=1)
    assert "error: there are no tasks to land\n" in typist.err


def test_trace_says_of_a_task_that_nothing_of_it_can_be_traced(typist):
    typist.rig.add("a", "x", check="true", coder=("sh", "-c", "echo y > z"))
    typist.rig.work()
    typist.run("trace", "a", status=1)
    assert "task `a` has no recorded session (it is done)" in typist.err
    assert re.search(r"fix: \S+ tasks a\n", typist.err)


# -- logs --

ODD_LINES = [
    '{"type": "assistant", "message": "x"}', '{"content": ["x"], "type": "assistant"}',
    '{"type": "assistant", "message": {"content": ["x", {"type": "tool_use", "input": ["y"]}]}}',
    '{"type": "user", "message": {"content": [null, {"type": "tool_result", "content": [1]}]}}',
    '{"type": "control_request", "request": "x"}', '{"type": ["x"]}', '{"type": {}, "subtype": 1}',
    '{"type": "control_request", "request": {"input": {"questions": [{"question": 1, "options": 5}]}}}',
    '{"at": 1e300}', '{"at": "x", "event": {}}', '{"at": NaN, "event": "started"}', "[]", "\x00", "{"]


def test_no_line_of_a_log_ends_task_log_with_a_bug(typist):
    rig = typist.rig
    rig.add("a", "@write x y", check="true")
    rig.work()
    run = rig.repo / ".git/subagent-fleet/run"
    for path, words in ((run / "events.jsonl", ()), (run / "tasks/a/1/out.jsonl", ("a",))):
        text = path.read_text()
        path.write_text("\n".join([*ODD_LINES, text]))
        said = typist.run("task", "log", *words)
        assert ("started" in said or "success" in said) and "result     None" not in said, said
        for line in ODD_LINES[::4]:  # the last one has no end
            path.write_text(f"{text}{line}")
            typist.run("task", "log", *words)


# -- the whole story, as README tells it --

STORY = """\
defaults: {agent: implementer, deadline: 45m}
tasks:
  parser: {prompt: "@write src/dates.py new", touch: [src/**, tests/**],
           check: "test -s src/mended || { echo '@write src/mended ok'; exit 1; }"}
  docs: {prompt: "@write docs/dates.md told", after: [parser], touch: [docs/**],
         check: test -s docs/dates.md}
  storage: {prompt: "@ask Which database?|sqlite|postgres\\n@write src/db.py x", check: test -s src/db.py}
"""


@pytest.mark.slow
def test_three_tasks_one_asks_one_mends_one_waits_then_merge_and_tidy(typist):
    typist.write(STORY)
    assert typist.run("validate") == "fleet.yaml is valid.\ntasks.yaml is valid.\n"
    assert re.search("docs +waiting .*for parser", typist.run("tasks"))
    running = typist.start("run")
    wait_for(lambda: typist.rig.states().get("storage") == "asking"
             and typist.rig.states().get("docs") == "done")
    assert re.search(r"\nTasks: storage \(asking\)\. `\S+ tasks`\n", typist.run("status"))
    compare_example("tasks --json", typist.run("tasks", "--json"))
    assert typist.json("status")["tasks"] == [{"name": "storage", "state": "asking"}]
    assert "Which database?" in typist.run("task", "answer")
    call = sf.read_call(["task", "answer", "storage", "3"])
    os.chdir(typist.rig.repo)
    with pytest.raises(sf.FleetError) as caught:
        call.command.run(call.options, typist.rig.world)
    assert caught.value.slug == "bad-answer"
    typist.run("task", "answer", "storage", "3", status=2)
    assert re.search("storage +answered +sqlite", typist.run("task", "answer", "storage", "1"))
    out, err = running.communicate(timeout=30)
    said = out.decode()
    assert running.returncode == 0 and re.search(
        r"3 done\.\nLook at what is done: \S+ task diff (\w+)\nMerge all 3, checked as a whole: \S+ task land\n$",
        said), said
    for line in ("docs +waits +for parser", "parser +started +implementer, planned for mini",
                 "storage +asks +Which database\\?  1 sqlite  2 postgres",
                 "parser +retrying +check failed \\(exit 1\\) after .*: sent back to the agent \\(round 1 of 3\\)",
                 "parser +done +.*2 files \\+2 -0, check passed"):
        assert re.search(line, said), (line, said)
    assert b"Serving local-dev" in err

    assert "+told" in typist.run("task", "diff", "docs")
    assert " docs/dates.md " in typist.run("task", "diff", "docs", "--stat")
    log = typist.run("task", "log", "parser")
    assert re.search("Write +.*src/dates.py", log) and "result" in log
    typist.rig.git("merge", "-q", "run/docs", "run/storage", "-m", "all")
    assert "would remove" in typist.run("task", "tidy", "--dry-run")
    tidied = typist.run("task", "tidy")
    assert tidied.count("removed") == 3 and "merged branch run/docs deleted" in tidied
    assert not list(typist.rig.tree("docs").parent.iterdir())
    assert typist.rig.git("branch", "--format=%(refname:short)") == "main"
    assert typist.run("task", "tidy") == "Nothing to tidy.\n"


@pytest.mark.slow
def test_a_branch_that_is_merged_after_its_tidying_goes_with_the_next(typist):
    typist.run("run", "t:@write new.txt x", "--check", "true")
    assert "removed" in typist.run("task", "tidy") and "Merge: git merge run/t" in typist.err
    assert typist.run("task", "tidy") == "Nothing to tidy.\n"
    typist.rig.git("merge", "-q", "--ff-only", "run/t")
    typist.rig.git("checkout", "-q", "run/t")
    assert typist.run("task", "tidy") == "Nothing to tidy.\n"
    typist.rig.git("checkout", "-q", "main")
    assert re.search("t +would remove +merged branch run/t\n", typist.run("task", "tidy", "--dry-run"))
    assert re.search("t +removed +merged branch run/t\n", typist.run("task", "tidy"))
    assert typist.err == "" and typist.rig.git("branch", "--format=%(refname:short)") == "main"


@pytest.mark.slow
def test_the_log_of_a_question_says_it_and_an_empty_one_names_the_other(typist):
    typist.write("tasks:\n  q: {prompt: \"@ask Which database?|sqlite\"}\n"
                 "  c: {prompt: x, coder: [sh, -c, 'echo lost >&2; exit 3'], tries: 1}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states() == {"q": "asking", "c": "failed"})
    log = typist.run("task", "log", "q")
    assert "asks       Which database?\n" in log and "'question'" not in log
    typist.run("task", "stop", "q")
    running.communicate(timeout=20)
    typist.run("task", "log", "c")
    assert "task log c stderr" in typist.err and typist.run("task", "log", "c", "stderr") == "lost\n"


@pytest.mark.slow
def test_who_only_answers_is_quoted_and_told_of_the_key(typist):
    typist.write("tasks:\n  hi: {prompt: '@say hello', tries: 1, rounds: 0}\n")
    said = " ".join(typist.run("run", status=1).split())
    assert re.search(r"hi failed nothing was changed \(if it should only answer, write "
                     r"`changes: none`\)\. It said: \w", said), said
    assert "nothing was changed (if it should only answ…" in typist.run("tasks")
    assert "`changes: none`" in typist.run("tasks", "hi")


@pytest.mark.slow
def test_a_task_is_shown_in_words(typist):
    typist.run("run", "t:@write new.txt x", "--touch", "new.txt", "--touch", "b.txt")
    shown = typist.run("tasks", "t")
    for line in (r"deadline +1h00m +\(default", "stall +5m00s", r"allow +Bash +\(default",
                 "touch +new.txt, b.txt"):
        assert re.search(line, shown), (line, shown)
    assert "check" not in shown.partition("Tries:")[2]
    keys = {one["key"]: one["value"] for one in typist.json("tasks", "t")["keys"]}
    assert (keys["deadline"], keys["allow"]) == ("3600", '["Bash"]')


@pytest.mark.slow
def test_logs_name_the_task_whose_main_agent_asked(typist):
    typist.run("run", "docs:@write docs/dates.md told")
    task, = typist.json("tasks")["tasks"]
    asked = {"time": time.time(), "id": "r", "session": task["session"], "agent": "", "alias": "l",
             "model": "m", "node": "a", "context": 9, "tries": [], "waited": 0.5, "first_byte": 1,
             "total": 2, "input_tokens": 9, "output_tokens": 7, "outcome": "ok"}
    place = typist.rig.repo / ".subagent-fleet"
    place.mkdir(exist_ok=True)
    with (place / "requests.jsonl").open("a") as file:
        file.write("".join(json.dumps({**asked, **each}) + "\n"
                           for each in ({}, {"session": "another", "id": "s"})))
    assert [line.split()[1] for line in typist.run("logs", "-n", "2").splitlines()] == [
        "Agent", "docs", "main"]
    assert [(each["agent"], each["task"]) for each in typist.json("logs", "-n", "2")["requests"]] \
        == [("main", "docs"), ("main", "")]


@pytest.mark.slow
def test_the_task_file_of_readme_is_valid(typist):
    text = re.search(r"```yaml\n(# tasks\.yaml\n.*?)```", README, re.S)[1]
    typist.write(text)
    assert typist.run("validate").endswith("tasks.yaml is valid.\n")
    keys = re.findall(r"^\| `(\w+)` \| .*\| (.+) \|$", sf.TOPICS["runs"].page(), re.M)
    for name, declared in sf.keys_of(sf.TaskSpec).items():
        assert (name, declared.words) in keys, name


@pytest.mark.parametrize("words, said", [
    (("--times", "27"), "expected a number, 1 to 26, not `27`"), (("--priority", "1001"), "-1000 to 1000"),
    (("--changes", "maybe"), "required, none"), (("--sandbox", "on"), "auto, required, off")])
def test_a_flag_of_a_task_takes_what_its_key_takes(run_cli, words, said):
    done = run_cli("run", "a:x", *words)
    assert done.returncode == 2 and said in done.stderr


def test_a_command_whose_flags_check_their_words_takes_none():
    """argparse reads a default that is a text as if it had been typed."""
    for command in sf.COMMANDS:
        for flag in command.flags:
            default = flag.more.get("default")
            if isinstance(default, str) and "type" in flag.more:
                flag.more["type"](default)


def test_the_help_of_a_flag_of_a_task_is_that_of_its_key():
    keys = sf.keys_of(sf.TaskSpec)
    notes = {flag.name[2:].replace("-", "_"): flag.note for flag in sf.TASK_WORDS}
    assert {name for name, note in notes.items() if note != (keys[name].words if name in keys else "")} == {
        "name", "no_setup", "times"}


# -- adding, stopping, trying again --

@pytest.mark.slow
def test_tasks_are_added_run_by_prompt_and_named_after_their_words(typist):
    assert re.search("fix-the-login-bug +added", typist.run("task", "add", "Fix the login bug"))
    assert "Start: " in typist.err
    typist.run("task", "add", "a:one", "b: two", "--times", "2", "--after", "fix-the-login-bug",
               "--check", "true", "--touch", "src/**", "--touch", "x")
    tasks = typist.json("tasks")["tasks"]
    assert [task["name"] for task in tasks] == ["fix-the-login-bug", "a-a", "a-b", "b-a", "b-b"]
    said = typist.run("run", "@write x.txt y", "--name", "quick", "--check",
                      "test -s x.txt")
    assert said.endswith("Merge: git merge run/quick\n") and typist.rig.states()["quick"] == "done"
    typist.rig.git("merge", "-q", "run/quick")
    assert typist.run("run", "quick").endswith("1 done.\n")
    assert typist.rig.states()["fix-the-login-bug"] == "waiting"


@pytest.mark.slow
def test_a_typed_task_has_no_check_where_the_defaults_have_none(typist):
    typist.write("defaults: {check: none}\ntasks:\n  a: {prompt: x}\n")
    typist.run("run", "b:@write b.txt y")
    typist.write("defaults: {check: 'false'}\ntasks:\n  a: {prompt: x}\n")
    typist.run("run", "c:@write c.txt y", "--check", "none")
    assert typist.rig.states() == {"b": "review", "c": "review"}


@pytest.mark.slow
def test_what_is_typed_is_checked_as_a_file_is(typist):
    typist.run("task", "add", "x", "--name", "a")
    cases = [(("task", "add", "y", "--name", "a"), "task-taken", 2),
             (("task", "add", "y", "--name", "a b"), "bad-task", 2),
             (("task", "add", "y", "--agent", "nobody"), "bad-task", 2),
             (("task", "add", "y", "z", "--name", "c"), "usage", 2),
             (("task", "add", "y", "--after", "nobody"), "unknown-task", 2),
             (("task", "add", "y", "--base", "nowhere"), "bad-base", 1),
             (("tasks", "nobody"), "unknown-task", 2), (("run", "nobody"), "unknown-task", 2),
             (("task", "answer", "a", "1"), "no-question", 1), (("task", "accept", "nobody"), "unknown-task", 2),
             (("task", "diff", "a"), "no-diff", 1), (("task", "attach", "a"), "no-session", 1),
             (("task", "stop", "nobody"), "unknown-task", 2)]
    for words, slug, status in cases:
        call = sf.read_call([*words])
        with pytest.raises(sf.FleetError) as caught:
            os.chdir(typist.rig.repo)
            call.command.run(call.options, typist.rig.world)
        assert (caught.value.slug, caught.value.status) == (slug, status), words
        typist.run(*words, status=status)


@pytest.mark.slow
def test_stop_needs_no_supervisor_and_says_what_happened(typist):
    typist.write("tasks:\n  a: {prompt: \"@write x y\\n@run sleep 100\"}\n  b: {prompt: x, after: [a]}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states().get("a") == "running")
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=10)
    assert running.returncode == 130 and b"Agents keep working, but nothing checks them" in out
    assert typist.rig.processes() != []
    assert "nothing checks them" in (typist.run("tasks"), typist.err)[1]
    said = typist.run("task", "stop", "*")
    assert re.search(r"a +stopped +\d processes ended in \d\.\d s, work saved in "
                     "refs/subagent-fleet/a/1", said), said
    assert re.search("b +stopped +stopped while no agent was running", said)
    assert typist.rig.processes() == []
    assert re.search("a +waits +for its next try", typist.run("task", "retry", "a"))
    assert typist.rig.states()["a"] == "waiting"


@pytest.mark.slow
def test_the_gateway_that_was_started_for_tasks_ends_with_the_last_of_them(typist):
    typist.write("tasks:\n  a: {prompt: '@run sleep 100'}\n  b: {prompt: '@run sleep 100'}\n")
    running = typist.start("run")
    wait_for(lambda: set(typist.rig.states().values()) == {"running"})
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=10)
    assert re.search(r"\nContinue: subagent-fleet run\n", out.decode())
    alive = typist.rig.folder.place("serve.alive")
    typist.run("task", "stop", "a")
    assert "gateway" not in typist.err and typist.rig.world.is_held(alive)
    typist.run("task", "stop", "a", "b")
    assert "Stopped the gateway that was started for them." in typist.err
    wait_for(lambda: not typist.rig.world.is_held(alive))


@pytest.mark.slow
def test_say_without_a_supervisor_starts_nothing(typist, monkeypatch, capsys):
    typist.write("tasks:\n  a: {prompt: '@run sleep 100'}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states().get("a") == "running")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=10)
    world, begun = typist.rig.world, []
    for place, name in ((world, "spawn"), (world, "start"), (world, "sleep"), (sf, "Supervisor")):
        monkeypatch.setattr(place, name, lambda *words, name=name, **more: begun.append(name))
    monkeypatch.chdir(typist.rig.repo)
    call = sf.read_call(["task", "say", "a", "use sqlite"])
    assert call.command.run(call.options, world) == 0 and begun == []
    monkeypatch.undo()
    assert [order["text"] for _, order in typist.rig.folder.read_orders()
            if order["do"] == "say"] == ["use sqlite"]
    said = capsys.readouterr()
    assert re.search("a +saved", said.out) and "at the next `subagent-fleet run`" in said.err
    typist.run("task", "stop", "a")


@pytest.mark.slow
def test_what_failed_is_said_with_what_to_type(typist):
    typist.write("tasks:\n  a: {prompt: '@write x y', check: 'false', tries: 1, rounds: 0}\n"
                 "  b: {prompt: x, after: [a]}\n  c: {prompt: '@say x', changes: none, check: 'true'}\n")
    advice = (r"See why: subagent-fleet task log a check\n"
              r"Try again: subagent-fleet task retry a\n")
    assert re.search(f"{advice}$", typist.run("run", status=1))
    shown = typist.run("tasks")
    assert (shown + typist.err).count("task log a check") == 1 and "task retry a\n" in typist.err
    assert typist.json("tasks", "a")["try"] == "1/1"
    assert typist.run("task", "diff", "c") == "" and "c has changed nothing" in typist.err
    typist.run("task", "retry", "a", "nobody", status=2)
    assert typist.rig.states()["a"] == "failed"
    typist.run("run", "a: x", status=2)
    assert re.search("task retry a`, or name it `a-2`", typist.err)
    typist.run("run", "c: x", status=2)
    assert "task retry" not in typist.err
    said = typist.run("task", "retry", "a", "c")
    assert "a         waits" in said and "c         waits" in said
    rows = {row["name"]: row["now"] for row in typist.json("tasks")["tasks"]}
    assert rows == {"a": "for `run`", "b": "for a", "c": "for `run`"}
    typist.run("task", "add", "d: x")
    assert re.search("b +stopped", typist.run("task", "stop", "a", "b"))


@pytest.mark.slow
def test_a_run_counts_what_it_worked_on_and_else_everything(typist):
    typist.write("tasks:\n  old: {prompt: '@write x y', check: 'false', tries: 1, rounds: 0}\n")
    assert typist.run("run", status=1).split("\n")[-4] == "1 failed."
    typist.run("task", "add", "new:@write z 1", "--check", "true")
    said = typist.run("run")
    assert "\n1 done.\n" in said and "old" not in said
    assert typist.run("run", status=1).startswith("Nothing to do: 1 failed, 1 done.\nSee why: ")


@pytest.mark.slow
def test_flags_that_count_for_new_tasks_alone_are_refused_beside_others(typist):
    def refused(*words):
        typist.run("run", *words, status=2)
        return typist.err
    assert "run 'NAME:what to do'" in refused("--name", "x")
    assert "unknown task `word`" in refused("word", "--coder", "codex")
    assert "--coder codex" in refused("a:x", "--agent", "codex")
    assert "empty list" in refused("a:x", "--coder", "[]")
    typist.write("tasks:\n  a: {prompt: '@write x y', setup: [touch prepared], check: 'true'}\n"
                 "  b: {prompt: x, after: [a]}\n")
    for flag, key in (("--coder=codex", "coder:"), ("--no-setup", "setup: []"), ("--priority=3", "priority:"),
                      ("--check=true", "check:")):
        assert f"write `{key}` below `defaults:`" in refused("a", flag)
        assert f"write `{key}` below `defaults:`" in refused(flag)
    assert typist.rig.tasks() == {}


@pytest.mark.slow
def test_tasks_of_a_file_that_were_never_started_are_shown(typist):
    typist.write("tasks:\n  a: {prompt: x, times: 2}\n  b: {prompt: x, after: [a-a]}\n")
    rows = {row["name"]: (row["state"], row["now"]) for row in typist.json("tasks")["tasks"]}
    assert rows == {"a-a": ("waiting", "for `run`"), "a-b": ("waiting", "for `run`"),
                    "b": ("waiting", "for a-a")}
    assert re.search("b +waiting", typist.run("tasks").replace("·", "")) and "Start: " in typist.err
    assert "tasks.yaml:2" in typist.run("tasks", "a-a")
    typist.write("tasks: [\n")
    assert typist.run("tasks").startswith("No tasks.")
    assert typist.rig.tasks() == {}


@pytest.mark.slow
def test_the_cap_of_a_run_can_be_changed_while_it_works_and_starts_nothing_else(typist):
    typist.write("max: 1\ntasks:\n  zz: {prompt: x}\n")
    running = typist.start("run", *(f"{name}:@run sleep 100" for name in "abc"))

    def at_work():
        states = typist.rig.states()
        return sum(state == "running" for state in states.values()) if len(states) == 3 else 0
    wait_for(lambda: at_work() == 1)
    assert typist.run("run", "--max", "2") == "At most 2 agents at once from now on.\n"
    wait_for(lambda: at_work() == 2)
    typist.write("max: 1\ntasks:\n  zz: {prompt: y}\n  more: {prompt: x}\n")  # the same cap
    typist.run("task", "say", "a", "hello")  # taken up after the file was read again
    assert typist.run("run", "--max", "2") and at_work() == 2
    typist.write("max: 3\ntasks:\n  zz: {prompt: y}\n")
    wait_for(lambda: at_work() == 3)
    assert set(typist.rig.states()) == {"a", "b", "c"}  # nobody asked for those of the file
    typist.run("run", "a", "--max", "3", status=3)
    typist.run("task", "stop", "*")
    running.communicate(timeout=20)


@pytest.mark.slow
def test_a_forgotten_task_that_is_typed_again_has_none_of_the_old_tries(typist):
    coder = ("--coder", "[sh, -c, 'echo $MARK; exit 3']", "--check", "true")
    typist.run("run", "b:x", *coder, env={"MARK": "before"}, status=1)
    assert typist.json("tasks")["tasks"][0]["try"] == "2/2"
    typist.run("task", "forget", "b")
    typist.run("task", "add", "b:y", *coder)
    row, = typist.json("tasks")["tasks"]
    assert (row["try"], row["total_seconds"]) == ("0/2", 0.0)
    typist.run("task", "log", "b", "--try", "1", status=2)
    assert "b was tried 0 times" in typist.err  # slug "no-try"
    typist.run("run", "b", env={"MARK": "after"}, status=1)
    shown = typist.run("tasks", "b")
    assert typist.json("tasks")["tasks"][0]["try"] == "2/2"
    assert "try 1 " in shown and "try 2 " in shown and "try 3 " not in shown
    assert typist.run("task", "log", "b", "--try", "1") == "after\n"
    assert re.search(r"took +[\d.]+ s; ended", shown)
    refs = typist.rig.git("for-each-ref", "--format=%(refname)", "refs/subagent-fleet/b")
    assert all(f"refs/subagent-fleet/b/{number}" in refs for number in range(1, 5)), refs  # kept


@pytest.mark.slow
def test_all_takes_no_new_tasks_and_stdin_is_read_once(typist):
    typist.write("tasks:\n  a: {prompt: '@write x y', check: 'false', tries: 1, rounds: 0}\n"
                 "  b: {prompt: '@write x y', check: 'false', tries: 1, rounds: 0}\n")
    typist.run("run", status=1)
    for words in (["new:do it"], ["do it"]):
        typist.run("run", "--all", *words, status=2)
        assert "--all takes no new tasks" in typist.err
    typist.run("run", "--all", "--file", "tasks.yaml", status=2)
    text = (typist.rig.repo / "tasks.yaml").read_bytes().replace(b"false", b"true")
    child = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "subagent_fleet.py"), "task",
                            "retry", "--file", "-", "a", "b"], input=text, cwd=typist.rig.repo,
                           env=typist.rig.environ, capture_output=True)
    assert child.returncode == 0 and child.stdout.count(b"for its next try") == 2, child
    assert {state.task.check for state in typist.rig.tasks().values()} == {"true"}
    typist.run("task", "stop", "*")
    assert typist.run("task", "diff", "a", "--stat").startswith(" x | 1 +\n")
    for words, offered in ((("tasks", ""), "a"), (("task", "stop", "a"), "a"), (("run", "--after", ""), "b"),
                           (("trace", ""), "last"), (("init", "--example", ""), "laptop")):
        assert offered in typist.run("completion", "--", *words).split()
    assert typist.run("completion", "--", "launch", "claude", "--", "") == ""
    assert "--check" in typist.run("completion", "--", "run", "", cwd=typist.rig.place).split()


@pytest.mark.slow
def test_a_run_says_how_many_start_and_how_other_machines_work(typist):
    path = typist.rig.repo / "fleet.yaml"
    path.write_text(path.read_text().replace("max_parallel: 4", "max_parallel: 1").replace(
        "agents: {", 'agents: {scout: {model: small, description: Looks.}, ').replace(
        "nodes: {", 'nodes: {gpu: {endpoint: "http://127.0.0.2:9"}, ').replace(
        "models: {", "models: {small: {node: gpu, ollama_model: \"qwen3:8b\", "
        "litellm_alias: small-local, context: 65536}, "))
    typist.run("generate")
    typist.run("run", "u:@write x y", "v:@write x y", "w:@write x y", "--check", "true")
    assert ("2 tasks start now; 1 waits for a slot of big-local or small-local (2 of 2 in use)."
            ) in " ".join(typist.err.split())  # a check decides: every machine works
    typist.run("task", "forget", "u", "v", "w")
    typist.run("run", "a:@write x y", "b:@write x y", "c:@write x y")
    told = " ".join(typist.err.split())
    assert ("1 task starts now; 2 wait for a slot of big-local (1 of 1 in use). "
            "To use other machines: `--agent scout` (gpu).") in told
    typist.run("task", "accept", "a", "b", "c")
    typist.run("run", "d:@write x y", "--check", "true")
    assert "starts now" not in typist.err
    typist.run("run", "e:@write x y", "f:@write x y", "--agent", "implementer", "--check", "true")
    assert "1 task starts now; 1 waits for" in typist.err and "--agent" not in typist.err
    typist.run("tasks")
    assert "task forget" not in typist.err  # nothing is tidied yet
    typist.run("task", "tidy")
    typist.run("tasks")
    assert "Shorten this list: " in typist.err and "task forget a b c d e f\n" in typist.err
    typist.run("task", "forget", *"abcdef")
    assert typist.run("tasks").startswith("No tasks.") and typist.err == ""


@pytest.mark.slow
def test_aider_without_a_key_does_not_wait_for_a_browser(rig):
    typist = Typist(rig, fleet=False)
    rig.program("aider", 'echo "$OPENAI_API_KEY" > key')
    typist.run("run", "a:x", "--coder", "aider", status=3)  # slug "coder-login"
    assert "wait for a login in a browser" in typist.err and typist.rig.tasks() == {}
    typist.run("run", "a:x", "--coder", "aider", env={"OPENAI_API_KEY": "sk-1"})
    typist.run("run", "b:x", "--coder", "aider", "--model", "ollama_chat/qwen3")
    (rig.home / ".aider.conf.yml").write_text("model: x\n")
    typist.run("run", "c:x", "--coder", "aider")
    assert set(rig.states().values()) == {"review"}


# -- an outcome is what happened --

@pytest.mark.slow
def test_a_stop_that_comes_as_a_try_ends_stops_the_next_one_too(typist):
    go = typist.rig.place / "go"
    typist.write(f"tasks:\n  a: {{prompt: x, coder: [sh, -c, 'while test ! -e {go}; do sleep 0.1; done']}}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states().get("a") == "running")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=20)
    go.write_text("")
    wait_for(lambda: not typist.rig.processes())  # its try has ended, and nobody has seen that
    assert re.match("a +stopped", typist.run("task", "stop", "a"))

@pytest.mark.slow
def test_what_a_stopped_run_does_not_take_is_told_so(typist, monkeypatch, capsys):
    typist.write("tasks:\n  q: {prompt: '@ask Which?|red|blue'}\n"
                 "  o: {prompt: '@say x', coder: [sh, -c, 'exit 3'], tries: 1}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states() == {"q": "asking", "o": "failed"})
    before = typist.rig.tasks()
    running.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(sf, "STOP_WAIT_SECONDS", 0.5)
    monkeypatch.chdir(typist.rig.repo)
    try:
        for words in (["task", "answer", "q", "1"], ["task", "retry", "o"], ["task", "forget", "o"],
                      ["task", "say", "q", "hello"], ["task", "stop", "q"], ["task", "add", "n:new"]):
            assert sf.main(words, typist.rig.world) == 1, words
            said = capsys.readouterr().out
            assert re.match(rf"[qon] +not taken +`run` \(pid {running.pid}\) did not respond", said), said
        assert sf.main(["run", "--detach", "m:another"], typist.rig.world) == 1
        assert f"`run` (pid {running.pid}) did not respond" in capsys.readouterr().err  # slug "not-taken"
        assert typist.rig.tasks() == before
    finally:
        running.send_signal(signal.SIGCONT)
    wait_for(lambda: not list(typist.rig.folder.read_orders()))  # it continues, and takes all
    typist.run("task", "stop", "*")
    running.communicate(timeout=20)


@pytest.mark.slow
def test_an_order_that_means_nothing_to_a_task_is_a_problem(typist):
    typist.write("tasks:\n  q: {prompt: '@ask Which?|red|blue'}\n  s: {prompt: '@run sleep 100'}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states() == {"q": "asking", "s": "running"})
    for command in ("retry", "forget", "accept"):
        assert re.match("s +running +not over yet", typist.run("task", command, "s", status=1))
    assert "s has no open question (it is running)" in (
        typist.run("task", "answer", "s", status=1), typist.err)[1]
    assert "unknown task" in (typist.run("task", "answer", "nobody", status=2), typist.err)[1]
    assert "Which?" in typist.run("task", "answer", "q")
    # A second `run` that is interrupted says who goes on.
    second = typist.start("run", "t:@run sleep 100")
    wait_for(lambda: typist.rig.states().get("t") == "running")
    second.send_signal(signal.SIGINT)
    out, _ = second.communicate(timeout=20)
    assert second.returncode == 130 and b"nothing checks them" not in out
    assert f"(pid {running.pid}) is working on these tasks and continues." in " ".join(out.decode().split())
    assert re.search("s +stopped", typist.run("task", "stop", "*"))
    running.communicate(timeout=20)
    typist.run("task", "answer", "q", "1", status=1)
    assert "tasks q" in typist.err and "task say" not in typist.err  # which would begin it again
    assert typist.run("run", "--detach", status=1).startswith("Nothing to do: 3 stopped.\n")
    assert not (typist.rig.repo / ".git/subagent-fleet/run/run.log").exists()


@pytest.mark.slow
@needs_namespace
def test_where_no_process_has_a_session_a_second_run_hands_over_at_once(typist):
    """In a container, the session is that of a program outside, which has no number inside."""
    program = f"'{sys.executable}' -I -S '{PROGRAM}'"
    script = (f"{program} run 'a:@run sleep 100' >../first 2>&1 & "
              f"until {program} tasks --json | grep -q '\"supervisor\": [1-9]'; do sleep 0.1; done; "
              f"date +%s; {program} run 'b:@write x y' --check true --detach; date +%s; "
              f"{program} task stop '*'; wait")
    done = subprocess.run([*NAMESPACE, "sh", "-c", script], cwd=typist.rig.repo, timeout=60,
                          env=typist.rig.environ, capture_output=True, encoding="utf-8")
    began, ended = re.findall(r"(?m)^(\d{9,})$", done.stdout)
    assert "is already active here" in done.stdout + done.stderr, done
    assert int(ended) - int(began) < sf.LOCK_SECONDS / 2, done


@pytest.mark.slow
def test_a_run_without_standard_files_keeps_its_lock_and_ends_its_gateway(typist):
    """As `<&- >&- 2>&-` of a script that starts it: the next file that is opened gets their numbers."""
    def start(words):
        subprocess.run(["sh", "-c", f"'{sys.executable}' -I -S '{PROGRAM}' {words} <&- >&- 2>&-"],
                       cwd=typist.rig.repo, env=typist.rig.environ, timeout=60)

    start("run 'a:@run sleep 100' --detach")
    typist.run("run", "b:@write x y", "--check", "true")
    assert "is already active here" in typist.err
    typist.run("task", "stop", "a")
    while typist.json("tasks")["supervisor"]:
        time.sleep(0.1)

    start("run 'c:@write x y' --check true")
    assert [task["state"] for task in typist.json("tasks")["tasks"]] == ["stopped", "done", "done"]
    assert not typist.rig.world.is_held(typist.rig.folder.place("serve.alive"))


def test_a_run_that_has_no_branch_to_land_on_starts_no_gateway(typist):
    typist.rig.git("checkout", "-q", "--detach")
    typist.run("run", "a:@write x y", "--check", "true", "--land", status=3)
    assert "on no branch" in typist.err
    assert not typist.rig.world.is_held(typist.rig.folder.place("serve.alive"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_ends_while_its_gateway_starts_leaves_none_that_nobody_ends(typist, number):
    child = typist.start("run", "a:@write x y", "--check", "true")
    pid = typist.rig.repo / ".git/subagent-fleet/run/serve.pid"
    until = time.monotonic() + 30
    while not pid.exists() and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(number)
    child.communicate(timeout=60)
    typist.run("run")
    assert [task["state"] for task in typist.json("tasks")["tasks"]] == ["done"]
    assert not typist.rig.world.is_held(typist.rig.folder.place("serve.alive"))


@pytest.mark.slow
def test_a_terminal_that_closes_stops_a_run_as_sigterm_does_unless_nohup_started_it(typist):
    child = typist.start("run", "a:@run sleep 100", "--keep-going")
    child.stdout.readline()
    child.send_signal(signal.SIGHUP)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 1 and b"1 running." in out

    ignores = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    child = subprocess.Popen([sys.executable, "-c", ignores, sys.executable, PROGRAM, "run", "--keep-going"],
                             cwd=typist.rig.repo, env=typist.rig.environ, stdout=subprocess.PIPE)
    child.stdout.readline()
    child.send_signal(signal.SIGHUP)
    typist.run("task", "stop", "a")
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 1 and b"stopped" in out


def test_a_name_that_differs_in_case_alone_is_taken_and_another_one_is_named(typist):
    typist.run("task", "add", "Fix-login: x")
    typist.run("task", "add", "fix-login: y", status=2)
    assert "already a task `Fix-login`" in typist.err and "name it `fix-login-2`" in typist.err
    assert re.search("fix-login-2 +added", typist.run("task", "add", "fix login"))


def test_the_same_line_again_is_told_what_continues_its_task(typist):
    line = ("run", "a:x", "--coder", "[sh, -c, 'echo y > z']", "--check", "true")
    typist.run("task", "add", *line[1:])
    typist.run(*line, status=2)
    assert "already a task `a`" in typist.err
    assert "`subagent-fleet run a` continues it; for another task, name it `a-2`" in " ".join(typist.err.split())
    assert re.search("a +done", typist.run("run", "a"))
    typist.run(*line, status=2)
    assert "fix: name it `a-2`\n" in typist.err


def test_why_a_check_failed_is_said_for_each_kind_of_coder(typist):
    typist.run("run", "a:x", "--coder", "[sh, -c, 'echo y > z']", "--check",
               "echo one; echo No module named pytest; exit 3", status=1)
    out = typist.run("task", "log")
    assert re.search(r"a +failed +check failed \(exit 3\). The check said: No module named pytest", out), out
    receipt = typist.rig.receipt("a")
    assert receipt["reason"] == "check failed (exit 3)"  # a receipt holds nobody's words


def test_words_with_a_blank_before_a_colon_name_a_task_too(typist):
    assert re.search("fix-login +added +fix login: the form fails",
                     typist.run("task", "add", "fix login: the form fails"))
    typist.run("task", "add", "fix login: and the other one")
    assert [task["name"] for task in typist.json("tasks")["tasks"]] == ["fix-login", "fix-login-2"]


@pytest.mark.slow
def test_detached_it_works_in_the_background_and_there_is_one(typist):
    typist.write("tasks:\n  a: {prompt: \"@sleep 9\\n@write x y\", check: test -s x}\n")
    assert "in the background" in typist.run("run", "--detach")
    wait_for(lambda: typist.rig.states().get("a") == "running")
    typist.run("run", status=3)
    assert "`run` is already active here" in typist.err  # slug "supervised"
    assert typist.json("tasks")["supervisor"] > 1
    assert re.search("a +told", typist.run("task", "say", "a", "@write more z"))
    wait_for(lambda: typist.rig.states()["a"] == "done" and not typist.rig.folder.holder())
    log = (typist.rig.repo / ".git/subagent-fleet/run/run.log").read_text()
    assert "a         done" in log and typist.rig.git("show", "run/a:more") == "z"


@pytest.mark.slow
def test_a_task_file_that_changes_is_read_again_and_a_broken_one_is_told_once(typist):
    typist.write("max: 1\ntasks:\n  a: {prompt: \"@sleep 3\\n@write x y\", check: 'false', rounds: 0, tries: 1}\n")
    running = typist.start("run")
    wait_for(lambda: typist.rig.states().get("a") == "running")
    typist.write("tasks: [\n")
    time.sleep(1.5)
    typist.write("tasks:\n  a: {prompt: \"@sleep 3\\n@write x y\", check: test -s x, rounds: 0, tries: 1}\n"
                 "  b: {prompt: '@write new z', check: test -s new, after: [a]}\n")
    out, _ = running.communicate(timeout=30)
    assert running.returncode == 0, out.decode()
    assert out.decode().count("not read") == 1 and "keeping the previous version" in out.decode()
    assert typist.rig.states() == {"a": "done", "b": "done"}


@pytest.mark.slow
def test_notify_gets_a_line_of_json(typist):
    typist.write("notify: cat >> ../told\ntasks:\n  a: {prompt: '@write x y', check: 'true'}\n")
    typist.run("run")
    wait_for(lambda: (typist.rig.place / "told").exists()
             and (typist.rig.place / "told").read_text().endswith("\n"))
    event = json.loads((typist.rig.place / "told").read_text())
    assert (event["task"], event["event"], event["branch"]) == ("a", "done", "run/a")


@pytest.mark.slow
def test_many_repositories_have_one_supervisor(typist, tmp_path):
    other = typist.rig.place / "other"
    typist.rig.git("clone", "-q", str(typist.rig.repo), str(other))
    (other / "fleet.yaml").write_text((typist.rig.repo / "fleet.yaml").read_text())
    typist.run("generate", cwd=other)
    key = (typist.rig.repo / ".env.subagent-fleet").read_bytes()
    (other / ".env.subagent-fleet").write_bytes(key)
    typist.run("task", "add", "@write x y", "--name", "a", "--check", "true")
    typist.run("task", "add", "@write x y", "--name", "b", "--check", "true", cwd=other)
    said = typist.run("run", "--all")
    assert said.endswith("2 done.\n")
    assert re.search("repo/a +done", said) and re.search("other/b +done", said)
    shown = typist.run("tasks", "--all")
    assert str(other) in shown and shown.count("done") == 2


@pytest.mark.parametrize("has_git, words", [
    (False, ["run", "a:hello"]), (False, ["task", "add", "a:hello"]), (True, ["run", "a:hello"])])
def test_nobody_is_told_to_commit_a_home(run_cli, tmp_path, words, has_git):
    if has_git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    done = run_cli(*words, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert done.returncode == 1 and "cd " in done.stderr
    assert "git add" not in done.stderr + done.stdout


@pytest.mark.parametrize("words", [
    ["tasks"], ["task", "diff", "x"], ["task", "answer"], ["task", "stop", "*"], ["task", "log", "x"],
    ["task", "tidy"], ["task", "retry", "x"], ["task", "say", "x", "y"]])
def test_who_only_looks_is_not_told_to_make_a_repository(run_cli, tmp_path, words):
    (tmp_path / "plain").mkdir()
    done = run_cli(*words, cwd=tmp_path / "plain", env={"HOME": str(tmp_path / "home")})
    assert done.returncode == 1 and "is not a git repository" in done.stderr
    assert "git init" not in done.stderr and "git add" not in done.stderr
    begins = run_cli("run", "a:hello", cwd=tmp_path / "plain", env={"HOME": str(tmp_path / "home")})
    assert "git init && git add -A" in begins.stderr


# -- what refuses --

def test_a_sentence_without_quotes_is_proposed_with_them(typist):
    for command in ("run", "task add"):
        typist.run(*command.split(), "Fix", "the", "login", status=2)
        assert f"subagent-fleet {command} 'Fix the login'" in " ".join(typist.err.split())
    assert typist.rig.tasks() == {}


def test_tasks_says_that_the_task_file_is_wrong(typist):
    typist.write("tasks:\n  a: {prompt: x, chek: make}\n")
    typist.run("tasks")
    assert "tasks.yaml" in typist.err and "subagent-fleet validate" in typist.err


@pytest.mark.slow
def test_run_says_what_it_lacks(typist, tmp_path):
    plain = typist.rig.place / "plain"
    plain.mkdir()
    cases = [("no-repository", plain, 1), ("no-tasks", typist.rig.repo, 1)]
    for slug, where, status in cases:
        assert json.loads(typist.run("tasks", "--json", cwd=plain, status=1))["error"]["id"] == \
            "no-repository"
        typist.run("run", cwd=where, status=status)
        assert slug == "no-repository" or "no tasks.yaml here or above" in typist.err
    typist.run("run", "--all", status=1)
    assert "no tasks in any repository yet" in typist.err


@pytest.mark.slow
def test_tasks_that_came_with_the_directory_are_not_believed(typist):
    rig = typist.rig
    rig.add("evil", "x", coder=("touch", f"{rig.place}/ran"), check="true")
    (rig.home / "state/subagent-fleet/repositories.json").unlink()  # as with an archive
    for words in (("run",), ("task", "stop", "*"), ("task", "add", "y")):
        typist.run(*words, status=3)
        assert "this repository has tasks that you did not start" in typist.err
    assert "evil" in typist.run("tasks") and not (rig.place / "ran").exists()
    with pytest.raises(sf.FleetError) as caught:
        sf.open_tasks(rig.folder)
    assert caught.value.slug == "foreign-tasks"
    typist.run("run", "--trust", status=3)
    assert "rm -r " in typist.err and not (rig.place / "ran").exists()
    shutil.rmtree(rig.repo / ".git/subagent-fleet/run")
    typist.run("run", "new:@write x y", "--check", "true")
    assert typist.rig.states() == {"new": "done"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_repository_that_cannot_be_written_is_one_sentence(typist):
    git = typist.rig.repo / ".git"
    git.chmod(0o555)
    try:
        typist.run("run", "a:x", status=1)
        assert "Permission denied" in typist.err and typist.err.startswith("error: cannot make")
    finally:
        git.chmod(0o755)


def test_bypass_as_root_is_refused(typist, monkeypatch):
    for is_root, sandbox, refused in ((True, "", True), (False, "", False), (True, "1", False)):
        world = sf.World()
        monkeypatch.setattr(sf.World, "is_root", property(lambda self, is_root=is_root: is_root))
        world.environ["IS_SANDBOX"] = sandbox
        tasks = {"a": sf.TaskSpec("a", permission="bypass")}
        try:
            sf.refuse_bypass(tasks, world)
            assert not refused
        except sf.FleetError as error:
            assert refused and (error.slug, error.status) == ("bypass-as-root", 3)


@pytest.mark.slow
def test_rows_for_the_trace(typist, monkeypatch):
    rig = typist.rig
    monkeypatch.chdir(rig.repo)
    assert sf.find_task_rows(rig.world, None, sf.read_call(["trace"]).options) == []
    rig.add("a", "@write x y", check="true")
    rig.add("b", "@write x y", check="false", tries=1, rounds=0)
    rig.work()
    rows = sf.find_task_rows(rig.world, None, sf.read_call(["trace"]).options)
    assert [(row.name, row.state) for row in rows] == [("a", "done"), ("b", "failed")]
    assert rows[1].fix == "subagent-fleet task log b check" and rows[0].plus == 1


@pytest.mark.slow
def test_doctor_reads_the_task_file(typist):
    typist.write("tasks:\n  a: {prompt: x, chek: make}\n")
    found = typist.json("doctor", "--timeout", "1", status=1)["findings"]
    assert "unknown-key" in [finding["id"] for finding in found]


@pytest.mark.slow
def test_a_gateway_that_does_not_start_and_a_session_that_is_not_given_up(typist, monkeypatch):
    world = typist.rig.world
    monkeypatch.chdir(typist.rig.repo)
    typist.rig.add("a", "@write x y", check="true")
    typist.rig.work()
    typist.rig.leave()
    world.own_program = lambda: [sys.executable, "-c", "raise SystemExit('no')"]
    typist.rig.add("b", "@write x y")
    call = sf.read_call(["run"])
    assert call.command.run(call.options, world) == 1
    parked = typist.rig.tasks()["b"]
    assert (parked.state, parked.cause) == ("parked", "gateway-failed")
    assert "serve.log" in parked.reason
    call = sf.read_call(["task", "attach", "a"])
    typist.rig.folder.write_state(sf.replace(typist.rig.tasks()["a"], state="waiting"))
    with monkeypatch.context() as patch, pytest.raises(sf.FleetError) as caught:
        patch.setattr(sf, "serve_for_tasks", lambda *given: None)
        patch.setattr(sf, "carry_out", lambda *given: sf.Carried(typist.rig.tasks()))
        call.command.run(call.options, world)
    assert caught.value.slug == "not-attached" and "task stop a" in caught.value.fix
    with pytest.raises(sf.FleetError) as caught:
        call.command.run(call.options, world)
    assert caught.value.slug == "gateway-failed"
    assert typist.rig.states()["a"] == "waiting"  # what could not be opened has changed nothing


def test_causes_of_what_is_parked_are_ids(typist):
    rig = typist.rig
    rig.add("setup", "x", setup=("false",))
    rig.git("branch", "taken")
    rig.add("near", "x", branch="taken/x")
    rig.git("commit", "-q", "--allow-empty", "-m", "on")
    rig.git("branch", "run/far", "HEAD~1")
    rig.add("far", "x")
    rig.folder.make()
    rig.git("clone", "-q", str(rig.repo), str(rig.tree("theirs")))
    rig.add("theirs", "x")
    (rig.tree("here")).mkdir()
    (rig.tree("here") / "f").write_text("x")
    rig.add("here", "x")
    rig.work()
    (rig.repo / ".gitattributes").write_text("a.txt filter=gone\n")
    rig.git("add", ".gitattributes")
    rig.git("commit", "-qm", "attributes")
    rig.git("config", "filter.gone.smudge", "no-such-program")
    rig.git("config", "filter.gone.required", "true")
    rig.add("filtered", "x")
    rig.work()
    causes = {name: state.cause for name, state in rig.tasks().items()}
    assert causes == {"setup": "setup-failed", "near": "worktree-failed", "far": "branch-taken",
                      "theirs": "in-the-way", "here": "in-the-way",
                      "filtered": "worktree-failed"}
    assert rig.states()["setup"] == "parked"


# -- tables at the widths that terminals have --

ROWS = [
    dict(name="parser", state="running", try_="1/2", state_seconds=130.0, total_seconds=310.0, memory_mb=201, cpu_percent=12.4, processes=3, idle_seconds=4.0,
         now="Bash python3 -m pytest -q tests/test_parser.py -k dates", context_percent=38, files=2, plus=12,
         minus=3, runs_on="studio", fix=""),
    dict(name="jwt-a", state="asking", try_="1/2", state_seconds=362.0, total_seconds=700.0, memory_mb=180, cpu_percent=0.0, processes=1, idle_seconds=None,
         now="Which database shall the tokens be kept in?", context_percent=22, files=3, plus=80, minus=11,
         runs_on="", fix="subagent-fleet task answer jwt-a"),
    dict(name="jwt-c", state="failed", try_="2/2", state_seconds=9000.0, total_seconds=512.0, memory_mb=0, cpu_percent=0.0, processes=0, idle_seconds=None,
         now="check failed (exit 1)", context_percent=None, files=1, plus=44, minus=2, runs_on="",
         fix="subagent-fleet task log jwt-c check"),
    dict(name="docs", state="waiting", try_="0/2", state_seconds=200000.0, total_seconds=0.0, memory_mb=0, cpu_percent=0.0, processes=0, idle_seconds=None, now="for parser",
         context_percent=None, files=0, plus=0, minus=0, runs_on="", fix="")]


def shown_row(**more):
    return sf.TaskRow(**{**dict.fromkeys(sf.fields(sf.TaskRow), ""), **more})


@pytest.mark.parametrize("columns", [0, 60, 100, 160])
def test_the_table_of_tasks_looks_so(golden, columns):
    text = sf.format_tasks([shown_row(**row) for row in ROWS], sf.Look(columns=columns))
    golden(f"tasks/table-{columns or 'pipe'}.txt", text)
    assert not columns or max(map(sf.width_of, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", [0, 60, 100, 160])
def test_events_and_tidying_look_so(golden, columns):
    look = sf.Look(columns=columns)
    text = "".join(sf.format_task_event(*event, 8, look) for event in [
        ("parser", "started", "implementer, planned for mini (qwen3-coder:30b), branch run/parser, check: "
         "python3 -m pytest -q"), ("docs", "waits", "for parser"),
        ("jwt-a", "asks", "Which database?  1 sqlite  2 postgres  `subagent-fleet task answer "
         "jwt-a 1`")])
    text += sf.format_tidying([
        sf.Tidying("jwt-a", True, worktree="/home/me/.local/state/subagent-fleet/worktrees/shop-3f2a/jwt-a",
                   files=4, saved="refs/subagent-fleet/jwt-a/1.tidy", ignored=1204, ignored_bytes=312000000),
        sf.Tidying("parser", False, "nested repository vendor/x is nowhere else")], look, is_dry=True)
    golden(f"tasks/events-{columns or 'pipe'}.txt", text)
    assert not columns or max(map(sf.width_of, text.splitlines())) <= columns


@pytest.mark.parametrize("said, shown", [
    ({"error_status": None, "error": "unknown"}, "no answer from the server"), ({}, "no answer from the server"),
    ({"error_status": 529, "error": "unknown"}, "529"),
    ({"error_status": 429, "error": "rate_limit"}, "429 rate_limit")])
def test_a_request_that_is_sent_again_says_why_as_far_as_is_known(said, shown):
    line = json.dumps({"type": "system", "subtype": "api_retry", **said}).encode()
    assert sf.format_agent_line(line) == [f"retry      {shown}"]


def test_times_are_short():
    spans = {None: "-", 0.01: "0.0 s", 0.7: "0.7 s", 4: "4 s", 22.14: "22.1 s", 59.99: "1m00s", 130: "2m10s",
             720: "12m00s", 7260: "2h01m", 260000: "3d"}
    assert {seconds: sf.show_span(seconds) for seconds in spans} == spans


# -- what came with a repository --

TRAP = "tasks: {x: {prompt: hi, coder: [sh, -c, cat], changes: none}}\n"


@pytest.mark.slow
@pytest.mark.parametrize("link", [".git/subagent-fleet", ".git/subagent-fleet/run"])
def test_no_link_of_a_repository_leads_tasks_outside(rig, link):
    typist = Typist(rig, fleet=False)
    typist.write(TRAP)
    outside = rig.place / "outside"
    outside.mkdir()
    (rig.repo / link).parent.mkdir(exist_ok=True)
    (rig.repo / link).symlink_to(outside)
    typist.run("run", status=3)
    assert "behind a symbolic link; nothing is written there" in typist.err
    assert list(outside.iterdir()) == []
    typist.run("task", "add", "y:z", status=3)
    assert re.search("\nx +waiting +0", typist.run("tasks")) and list(outside.iterdir()) == []


@pytest.mark.slow
def test_worktrees_elsewhere_are_found_again_and_tidied(rig):
    typist = Typist(rig, fleet=False)
    typist.write("worktrees: ../elsewhere\n" + TRAP)
    typist.run("run")
    place = rig.place / "elsewhere/x"
    assert place.is_dir()
    assert "removed" in typist.run("task", "tidy") and not place.exists()


def test_an_unknown_task_is_named_where_there_is_none(rig):
    typist = Typist(rig, fleet=False)
    for word in ("stop", "retry"):
        typist.run("task", word, "x", status=2)
        assert typist.err.startswith(f"error: task {word}: unknown task `x`\n")


@pytest.mark.slow
def test_all_repositories_are_none_or_have_gone(rig, tmp_path):
    typist = Typist(rig, fleet=False)
    assert typist.run("tasks", "--all") == ""
    assert typist.err.startswith("There are no tasks in any repository yet.")
    assert typist.json("tasks", "--all")["repositories"] == []
    typist.run("tasks", "x", "--all", status=2)
    assert "unknown task `x`" in typist.err
    typist.run("task", "add", "x:do")
    assert "waiting" in typist.run("tasks", "--all")
    (rig.repo / ".git").rename(rig.place / "no-repository")
    assert typist.run("tasks", "--all", cwd=str(tmp_path)) == ""
    (rig.place / "no-repository").rename(rig.repo / ".git")


@pytest.mark.parametrize("slug, below", [
    ("no-repository", "."), ("no-commit", "."), ("no-commit", "src")])
def test_the_repository_that_is_advised_does_not_hold_the_key(tmp_path, monkeypatch, slug, below):
    (tmp_path / ".gitignore").write_text("*.pyc")
    for name in (".env.subagent-fleet", "fleet.yaml"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / below)
    if slug == "no-commit":
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(sf.FleetError) as caught:
        world = sf.World()
        sf.find_commit(world, sf.find_repository(world, world.directory, begins=True), "HEAD")
    assert caught.value.slug == slug
    author = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER")
              for what in ("NAME", "EMAIL")}
    subprocess.run(caught.value.fix, shell=True, check=True, capture_output=True,
                   env={**os.environ, **author})
    files = subprocess.run(["git", "ls-files"], cwd=tmp_path, capture_output=True, check=True)
    assert files.stdout.split() == [b".gitignore", b"fleet.yaml"]
