"""Section *Traces*: what Claude Code and the gateway wrote in, who served whom out."""
import json
import os
import random
import re
import time

import pytest

import subagent_fleet as sf
from json_examples import compare_example
from tools import ROOT
from trace_cases import AGENT, FLEET, NOW, RECORDED, Recorded, Story

QUESTIONS = ["Model", "Machine", "House", "Context"]


@pytest.fixture(params=RECORDED)
def recorded(request, tmp_path):
    """Each recorded session, as the builtin gateway would have served it."""
    session = Recorded(tmp_path, request.param)
    session.file(session.receipts())
    return session


@pytest.fixture
def newest(tmp_path):
    """One of the newest Claude Code, without receipts yet."""
    return Recorded(tmp_path, "sync-326")


def answers(verdicts):
    return {name: verdict["answer"] for name, verdict in verdicts.items()}


def only(verdicts, question, answer):
    """The verdict that is not yes, which must be that one."""
    assert answers(verdicts) == {**dict.fromkeys(QUESTIONS, "yes"), question: answer}
    return verdicts[question]


def file_with(session, change):
    """File the receipts; `change` may change those of the subagent."""
    receipts = session.receipts()
    for index, receipt in enumerate(each for each in receipts if each["agent_id"]):
        change(index, receipt)
    session.file(receipts)


# -- the audit, against what the real Claude Code wrote --

def test_a_session_as_planned_is_answered_with_yes(recorded):
    status, verdicts = recorded.audit()
    assert (status, answers(verdicts)) == (0, dict.fromkeys(QUESTIONS, "yes"))


def test_another_model_than_its_file_names_is_found(recorded):
    recorded.write(recorded.agent_file, AGENT.replace("explorer-local", "other-local"))
    status, verdicts = recorded.audit()
    verdict = only(verdicts, "Model", "no")
    first = recorded.requests[0]
    line = recorded.number(recorded.sub, first)
    assert status == 1 and "`other-local`" in verdict["what"] and "`explorer-local`" in verdict["what"]
    assert verdict["evidence"][0].endswith("explorer.md:5")
    assert verdict["evidence"][1].startswith("~/.claude/projects/")
    assert verdict["evidence"][1].endswith(f"agent-{recorded.agent}.jsonl:{line}")
    assert verdict["evidence"][2] == first


def test_a_call_that_names_a_model_beats_the_file_and_is_named(newest):
    def name_model(line):
        for block in line.get("message", {}).get("content", ()):
            if isinstance(block, dict) and block.get("name") == "Agent":
                block["input"]["model"] = "sonnet"
        return line
    newest.edit(newest.main, name_model)
    file_with(newest, lambda index, receipt: receipt.update(alias="main-local", route="big",
                                                            node="mini"))
    status, verdicts = newest.audit()
    verdict = only(verdicts, "Model", "no")
    assert status == 1 and "its call named the model `sonnet`" in verdict["what"]
    assert re.search(rf"{newest.id}\.jsonl:\d+$", verdict["evidence"][0])


@pytest.mark.parametrize("model, alias", [
    ("sonnet", "main-local"), ("Haiku", "explorer-local"), ("inherit", "main-local"),
    ("", "main-local"), ("explorer-local[1m]", "explorer-local"), ("best", "main-local")])
def test_words_of_claude_code_are_resolved_to_aliases(newest, model, alias):
    newest.write(newest.agent_file, AGENT.replace("model: explorer-local", f"model: {model}"))
    names = {"main-local": "big", "explorer-local": "small"}
    nodes = {"main-local": "mini", "explorer-local": "laptop"}
    file_with(newest, lambda index, receipt: receipt.update(
        alias=alias, model=names[alias], node=nodes[alias]))
    fleet = FLEET.replace("agents:", "", 1).replace(
        "project: {name: shop}",
        "project: {name: shop, claude: {main: big, opus: big, sonnet: big, haiku: small}}\nagents:")
    explorer = fleet[fleet.index("  explorer:"):]
    newest.write(newest.project / "fleet.yaml",
                 fleet.replace(explorer, "").replace("agents:\n", f"agents:\n{explorer}"))
    assert answers(newest.audit()[1])["Model"] == "yes"


def test_a_declared_fallback_is_fine_and_told(recorded):
    def fall_back(index, receipt):
        if index:
            receipt.update(route="other", node="mini", failures=[{"node": "laptop", "why": "refused"}])
    file_with(recorded, fall_back)
    status, verdicts = recorded.audit()
    assert (status, set(answers(verdicts).values())) == (0, {"yes"})
    assert "configured fallback, `devstral:24b` on `mini` (laptop: refused)" in verdicts["Machine"]["what"]
    assert verdicts["Machine"]["evidence"] == [recorded.requests[1]]
    _, out, _ = recorded.run("last")
    assert re.search(r"devstral:24b +mini .*fallback: laptop: refused at", out)


def test_who_was_passed_over_is_told_with_what_the_request_needs(recorded):
    file_with(recorded, lambda index, receipt: receipt.update(
        route="other", node="mini", passed_over=[{"route": "first", "why": "images"}]))
    assert re.search(r"fallback: first was\s+passed over:\s+images", recorded.run("last")[1])
    assert "first was passed over: images" in recorded.audit()[1]["Machine"]["what"]


def test_what_failed_everywhere_is_not_as_planned(recorded):
    file_with(recorded, lambda index, receipt: receipt.update(
        node=None, route=None, outcome="overloaded_error"))
    assert re.search(r"failed:\s+nobody\s+answered:\s+overloaded_error", recorded.run("last")[1])
    session, = json.loads(recorded.run("last", "--json")[1])["sessions"]
    served = [row["planned"] for agent in session["agents"] for row in agent["served"]]
    assert "failed" in served


@pytest.mark.parametrize("outcome, more, answer", [
    ("overloaded_error", {"node": None, "route": None}, "unknown"), ("api_error", {}, "unknown"),
    ("left", {}, "unknown"), ("left", {"first_byte_seconds": 1.0}, "yes")])
def test_where_nobody_answered_nothing_is_known(newest, outcome, more, answer):
    file_with(newest, lambda index, receipt: receipt.update(
        {"outcome": outcome, "first_byte_seconds": None, **more}))
    status, verdicts = newest.audit()
    assert status == 0 and answers(verdicts) == dict.fromkeys(QUESTIONS, answer)
    if answer == "unknown":
        assert all(verdict["what"] == f"nobody answered: {outcome}" and verdict["evidence"]
                   for verdict in verdicts.values())


def test_one_answer_is_enough_to_be_judged(newest):
    file_with(newest, lambda index, receipt: receipt.update(
        {"outcome": "api_error", "first_byte_seconds": None} if index else {}))
    assert answers(newest.audit()[1]) == dict.fromkeys(QUESTIONS, "yes")


def test_another_machine_of_the_same_alias_says_after_whom(recorded):
    file_with(recorded, lambda index, receipt: receipt.update(failures=[{"node": "mini", "why": "refused"}]))
    assert re.search(r"yes: after\s+mini:\s+refused", recorded.run("last")[1])


def test_an_undeclared_machine_is_found(recorded):
    file_with(recorded, lambda index, receipt: receipt.update(route="third", node="spare"))
    status, verdicts = recorded.audit()
    verdict = only(verdicts, "Machine", "no")
    assert status == 1 and "`gemma4:12b` on `spare`" in verdict["what"]
    assert verdict["evidence"][-1] == recorded.requests[0]
    assert "no: not declared" in recorded.run("last")[1]


def test_a_fleet_file_edited_since_proves_nothing(newest):
    file_with(newest, lambda index, receipt: receipt.update(route="gone", node="away"))
    os.utime(newest.project / "fleet.yaml", (NOW, NOW))
    status, verdicts = newest.audit()
    assert status == 0 and "edited since" in only(verdicts, "Machine", "unknown")["what"]


def test_another_model_than_the_file_names_now_is_not_declared(newest):
    file_with(newest, lambda index, receipt: receipt.update(model="llama3.2:3b"))
    status, verdicts = newest.audit()
    assert status == 1 and "`llama3.2:3b` on `laptop`" in only(verdicts, "Machine", "no")["what"]
    os.utime(newest.project / "fleet.yaml", (NOW, NOW))
    status, verdicts = newest.audit()
    assert status == 0 and "edited since" in only(verdicts, "Machine", "unknown")["what"]


@pytest.mark.parametrize("runs, shown", [("qwen3:8b", "qwen3:8b"), ("", "small")])
def test_what_answered_is_told_and_never_what_the_file_says_now(newest, runs, shown):
    file_with(newest, lambda index, receipt: receipt.update(model=runs))
    newest.write(newest.project / "fleet.yaml", FLEET.replace("qwen3:8b", "gemma4:12b"))
    report, = json.loads(newest.run("last", "--json")[1])["sessions"]
    served = report["agents"][1]["served"]
    assert [(row["model"], row["route"]) for row in served] == [(runs, "small")]
    text = newest.run("last")[1]
    assert re.search(rf"explorer +{shown} +laptop", text) and "gemma4" not in text


def test_a_request_that_left_the_house_is_found_by_its_id(recorded):
    foreign = "req_011CQx7Zb3FakeUpstreamId"
    first = recorded.requests[0]
    recorded.write(recorded.sub, recorded.sub.read_text(encoding="utf-8").replace(first, foreign))
    recorded.file([each for each in recorded.receipts() if each["id"] != foreign])
    status, verdicts = recorded.audit()
    assert status == 1
    assert answers(verdicts) == {"Model": "yes", "Machine": "no", "House": "no",
                                 "Context": "unknown"}
    assert verdicts["House"]["evidence"][-1] == foreign


@pytest.mark.parametrize("fleet, more", [
    (FLEET, {"cloud": True}),
    (FLEET.replace("http://localhost:11434", "https://ollama.example.com"), {"model": ""}),
    (FLEET.replace("qwen3:8b\"", "qwen3:8b-cloud\", cloud: true"), {"model": ""})])
def test_a_request_that_left_the_house_is_found_by_its_place(newest, fleet, more):
    newest.write(newest.project / "fleet.yaml", fleet)
    file_with(newest, lambda index, receipt: receipt.update(more))
    status, verdicts = newest.audit()
    verdict = only(verdicts, "House", "no")
    assert status == 1 and re.match("`(small|qwen3:8b)` on `laptop`", verdict["what"])
    assert "2 of them left the house" in newest.run("last")[1]


def test_a_request_that_a_cloud_refused_before_home_answered_has_left_it(newest):
    cloud = "  away: {node: far, ollama_model: big, litellm_alias: big, context: 32768, cloud: true}\nagents:"
    newest.write(newest.project / "fleet.yaml", FLEET.replace("agents:", cloud, 1).replace(
        "nodes:", "nodes:\n  far: {endpoint: https://api.anthropic.com, provider: anthropic, "
        "api_key_env: FAR_API_KEY}", 1))
    file_with(newest, lambda index, receipt: receipt.update(
        cloud=True, failures=[{"node": "far", "why": "overloaded"}]))
    status, verdicts = newest.audit()
    assert status == 1 and "`far`, asked before `laptop`," in only(verdicts, "House", "no")["what"]


@pytest.mark.parametrize("change, word", [
    (lambda index, receipt: receipt.update(sent_tokens=receipt["input_tokens"] * 3), "of a prompt of about"),
    (lambda index, receipt: receipt.update(outcome="prompt_too_long") if index else None,
     "longer than the 32,768 tokens of `qwen3:8b`")])
def test_a_cut_context_is_found(recorded, change, word):
    file_with(recorded, change)
    status, verdicts = recorded.audit()
    verdict = only(verdicts, "Context", "no")
    assert status == 1 and word in verdict["what"] and verdict["evidence"][-1].startswith("req_")


def test_a_prompt_that_shrinks_was_compacted_not_cut(newest):
    file_with(newest, lambda index, receipt: receipt.update(
        input_tokens=[20000, 3000][index], sent_tokens=[21000, 3300][index]))
    assert answers(newest.audit()[1])["Context"] == "yes"


def test_receipts_of_an_older_version_do_not_say_what_was_sent(newest):
    file_with(newest, lambda index, receipt: receipt.pop("sent_tokens"))
    status, verdicts = newest.audit()
    assert status == 0 and "do not say what was sent" in only(verdicts, "Context", "unknown")["what"]


def without_calls(session, words):
    """Leave of the subagent's transcript its last answer, with other words."""
    def change(line):
        if line["type"] != "assistant":
            return None if "tool_result" in json.dumps(line) else line
        if line["message"]["stop_reason"] == "tool_use":
            return None
        line["message"]["content"] = [{"type": "text", "text": words}]
        return line
    session.edit(session.sub, change)
    session.file(session.receipts())


def notes(session):
    report, = json.loads(session.run("last", "--audit", "--json")[1])["sessions"]
    return [agent["notes"] for agent in report["agents"] if agent["agent_id"]][0]


@pytest.mark.parametrize("tools, said", [("Read", ["finished without using any tool"]), ("[]", [])])
def test_a_report_without_a_tool_call_is_told_and_judged_by_nobody(newest, tools, said):
    newest.write(newest.agent_file, AGENT.replace("Read, Grep, Glob", tools))
    without_calls(newest, "I have read src/login.py and fixed the redirect; all tests pass.")
    status, verdicts = newest.audit()
    assert (status, answers(verdicts)) == (0, dict.fromkeys(QUESTIONS, "yes"))
    assert notes(newest) == said
    assert ("note: explorer: finished without using any tool" in newest.run("last", "--audit")[1]) \
        == bool(said)


def test_an_agent_edited_since_proves_nothing(recorded):
    recorded.write(recorded.agent_file, AGENT.replace("explorer-local", "other-local"), at=NOW - 60)
    status, verdicts = recorded.audit()
    verdict = only(verdicts, "Model", "unknown")
    assert status == 0 and "edited since" in verdict["what"]
    assert verdict["evidence"][0].endswith("explorer.md:5")
    recorded.write(recorded.agent_file, AGENT, at=NOW - 60)  # it names what was asked
    assert answers(recorded.audit()[1])["Model"] == "yes"


def test_a_session_half_written_has_not_ended(recorded):
    last = recorded.requests[-1]
    lines = recorded.sub.read_text(encoding="utf-8").splitlines(keepends=True)
    recorded.write(recorded.sub, "".join(lines[:-1]))
    recorded.edit(recorded.main, lambda line: None if "toolUseResult" in line else line)
    recorded.file([each for each in recorded.receipts() if each["id"] != last])
    status, verdicts = recorded.audit()
    assert (status, set(answers(verdicts).values())) == (0, {"yes"})
    assert notes(recorded) == ["did not finish: its transcript stops in the middle"]
    assert "cut off" in recorded.run("last")[1]

    os.utime(recorded.sub, (NOW - 60, NOW - 60))  # a tool of its may still run
    assert notes(recorded) == [] and "at work" in recorded.run("last")[1]


def test_torn_lines_are_passed_over_and_named(recorded):
    text = recorded.sub.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    recorded.write(recorded.sub, "".join([lines[0], '{"type":"assistant","mess\n', *lines[1:]])
                   + '{"type":"assis')
    status, out, _ = recorded.run("last", "--audit")
    assert status == 0 and "4 checks passed" in out
    assert f"agent-{recorded.agent}.jsonl:2 cannot be read" in out
    assert f"agent-{recorded.agent}.jsonl:{len(lines) + 2} cannot be read" in out


def test_a_last_line_without_an_end_still_counts(recorded):
    recorded.write(recorded.sub, recorded.sub.read_text(encoding="utf-8").rstrip("\n"))
    assert recorded.audit()[0] == 0 and notes(recorded) == []


def test_receipts_turned_over_in_the_middle_are_read(recorded):
    receipts = recorded.receipts()
    middle = len(receipts) // 2
    recorded.file(receipts[:middle], "requests.jsonl.1")
    recorded.file(receipts[middle - 1:])  # one stands in both: it was read while it turned over
    status, verdicts = recorded.audit()
    assert (status, set(answers(verdicts).values())) == (0, {"yes"})
    assert f"{len(receipts)} requests, nothing left the house." in recorded.run("last")[1]

    (recorded.project / ".subagent-fleet" / "requests.jsonl.1").unlink()
    first = recorded.requests[0]
    recorded.file([each for each in receipts if each["id"] != first])
    status, verdicts = recorded.audit()
    assert status == 0 and "its record is gone" in verdicts["Machine"]["what"]
    assert answers(verdicts) == {"Model": "yes", "Machine": "unknown", "House": "unknown",
                                 "Context": "unknown"}


def test_with_litellm_it_says_what_it_cannot_know(recorded):
    recorded.write(recorded.project / "fleet.yaml", FLEET.replace(
        "{name: shop}", "{name: shop, gateway: {provider: litellm}}"))
    recorded.file([])
    recorded.edit(recorded.sub, lambda line: {key: value for key, value in line.items()
                                              if key != "requestId"})
    recorded.edit(recorded.main, lambda line: {key: value for key, value in line.items()
                                               if key != "requestId"})
    status, verdicts = recorded.audit()
    assert status == 0
    assert answers(verdicts) == {"Model": "yes", "Machine": "unknown", "House": "unknown",
                                 "Context": "unknown"}
    assert "LiteLLM does not say which machine" in verdicts["Machine"]["what"]
    out = recorded.run("last")[1]
    assert re.search(r"explorer-local +\? .*not known: LiteLLM does not say", out)
    # The main session's alias has one machine and no fallback: the file says which.
    assert re.search(r"^main +qwen3-coder:30b +mini +.* yes: by the file", out, re.M)

    recorded.write(recorded.agent_file, AGENT.replace("explorer-local", "other-local"))
    status, verdicts = recorded.audit()
    assert (status, answers(verdicts)["Model"]) == (1, "no")


def test_without_a_fleet_file_it_says_what_it_cannot_know(recorded):
    (recorded.project / "fleet.yaml").unlink()
    (recorded.project / ".git").mkdir()
    status, verdicts = recorded.audit()
    assert status == 0
    assert answers(verdicts) == {"Model": "yes", "Machine": "unknown", "House": "unknown",
                                 "Context": "yes"}


def test_an_api_error_in_the_place_of_an_answer_is_an_end_by_error(recorded):
    last, kept = recorded.requests[-1], recorded.receipts()

    def fail(line):
        if line.get("requestId") == last:
            line["isApiErrorMessage"] = True
            line["message"].update(model="<synthetic>", content=[
                {"type": "text", "text": "API Error: 529 node laptop: timeout"}])
        return line
    recorded.edit(recorded.sub, fail)
    recorded.file([each for each in kept if each["id"] != last])
    status, verdicts = recorded.audit()
    assert status == 0 and "API Error: 529" in notes(recorded)[0]
    assert "failed" in recorded.run("last")[1]


def test_a_built_in_agent_has_no_file_to_be_compared_with(newest):
    label = newest.sub.with_suffix(".meta.json")
    value = json.loads(label.read_text(encoding="utf-8"))
    newest.write(label, json.dumps({**value, "agentType": "Explore", "isBuiltIn": True}))
    newest.file(newest.receipts())
    status, verdicts = newest.audit()
    assert (status, answers(verdicts)["Model"]) == (0, "yes")
    newest.write(label, json.dumps({**value, "agentType": "vanished"}))
    status, verdicts = newest.audit()
    assert (status, answers(verdicts)["Model"]) == (0, "unknown")


# -- the tree --

@pytest.fixture
def story(tmp_path, monkeypatch):
    """A session of five agents, told at a clock that every machine has."""
    monkeypatch.setenv("TZ", "UTC")
    if hasattr(time, "tzset"):
        time.tzset()
    yield Story(tmp_path).play()
    monkeypatch.undo()
    if hasattr(time, "tzset"):
        time.tzset()


@pytest.mark.parametrize("columns", [0, 60, 80, 100, 160])
def test_a_session_is_told_as_a_tree(story, golden, columns):
    status, out, err = story.run("last", "--audit", columns=columns)
    assert (status, err) == (0, "")
    assert all(sf.width_of(re.sub("\x1b\\[[0-9;]+m", "", line)) <= (columns or 200)
               for line in out.splitlines())
    golden(f"traces/{columns or 'pipe'}.txt", re.sub("\x1b\\[[0-9;]+m", "", out))


def test_machines_have_the_colours_of_the_fleet_file(story):
    _, out, _ = story.run("last", columns=160)
    assert re.findall("\x1b\\[38;5;(\\d+)m(\\w+)", out) == [
        ("169", "mini"), ("33", "laptop"), ("169", "mini"), ("38", "gpu"), ("38", "gpu"),
        ("33", "laptop")]
    assert "\x1b" not in story.run("last", columns=160, NO_COLOR="1")[1]


def test_json_says_the_same_and_no_more_of_a_prompt_than_a_line(story):
    status, out, _ = story.run("last", "--json", "--audit")
    compare_example("trace last --audit --json", out)
    report, = json.loads(out)["sessions"]
    assert (status, report["prompt"]) == (0, "Fix the login bug")
    assert [(agent["agent"], agent["parent"], agent["state"]) for agent in report["agents"]] == [
        ("main", None, "done"), ("planner", "", "done"), ("implementer", "", "done"),
        ("reviewer", "", "done"), ("explorer", "r1", "done")]
    rows = report["agents"][2]["served"]
    assert [(row["model"], row["node"], row["requests"], row["planned"]) for row in rows] == [
        ("qwen3-coder:30b", "mini", 7, "yes"), ("devstral:24b", "gpu", 2, "fallback")]
    assert rows[0]["waited_seconds"] == pytest.approx(22.4) and rows[0]["first_token_seconds"] == pytest.approx(0.9)
    assert rows[0]["answer_rate"] == pytest.approx(570 / (10 - 4.1))
    assert "redirect" not in out and "Plan the fix" not in out


def test_a_pasted_prompt_has_its_own_first_words(story):
    story.edit(story.main, lambda line: {**line, "message": {"role": "user", "content":
        '\n\n<pasted_content id="32f3">\nMend the <login> page\n</pasted_content>'}}
        if line["type"] == "user" else line)
    assert story.run("last")[1].startswith('"Mend the <login> page", ')


def second_session(story, at):
    """Another session, later, which did nothing yet."""
    path = story.sessions / "aaaabbbb-0000-4000-8000-123456789abc.jsonl"
    line = {"type": "user", "timestamp": "2026-11-18T20:00:00.000Z",
            "message": {"role": "user", "content": "\x1b[2J" + "why " * 99 + "\nnot"}}
    story.write(path, json.dumps(line) + "\n", at=at)
    return path.stem


def test_several_sessions_are_listed_with_a_line_of_their_prompts(story):
    other = second_session(story, NOW - 100)
    status, out, err = story.run()
    assert status == 0 and "`subagent-fleet trace last`" in err
    head, first, second = out.splitlines()
    assert head.split() == ["Session", "Last", "active", "Agents", "Requests", "First", "prompt"]
    assert first.startswith("aaaabbbb") and "\\x1b[2J" in first and len(first) < 150
    assert re.search(r"^3f1c2d4e +\S+ +5 +42 +Fix the login bug$", second)
    entries = json.loads(story.run("--json")[1])["sessions"]
    assert [(entry["session"], entry["subagents"]) for entry in entries] == [(other, 0),
                                                                           (story.id, 4)]


def test_json_has_one_shape_however_many_sessions_there_are(story):
    alone, = json.loads(story.run("--json")[1])["sessions"]
    second_session(story, NOW - 100)
    listed = json.loads(story.run("--json")[1])["sessions"][1]
    named, = json.loads(story.run(story.id, "--json")[1])["sessions"]
    assert alone == listed and alone["requests"] == 42 and alone["subagents"] == 4
    assert {key: named[key] for key in listed} == listed and len(named["agents"]) == 5


def test_a_session_is_chosen_by_the_beginning_of_its_id(story):
    second_session(story, NOW - 100)
    assert "Fix the login bug" in story.run("3f1c")[1]
    assert "Fix the login bug" not in story.run("last")[1]
    status, _, err = story.run("9")
    assert status == 1 and "no session's id begins with `9`" in err
    assert "`subagent-fleet trace` lists them" in err and "aaaabbbb" not in err
    status, out, _ = story.run("9", "--json")
    assert (status, json.loads(out)["error"]["id"]) == (1, "no-session")
    (story.sessions / "3f00.jsonl").write_text("{}\n", encoding="utf-8")
    assert "`3f` begins the ids of 2 sessions" in story.run("3f")[2]


def test_since_leaves_out_what_is_older(story):
    other = second_session(story, NOW - 100)
    assert [entry["session"] for entry in
            json.loads(story.run("--since", "1d", "--json")[1])["sessions"]] == [other, story.id]
    assert "login" not in story.run("--since", "30m")[1]  # one is left: it is told, not listed
    assert "No session" in story.run("--since", "10s")[2]
    out = story.run("--audit", "--since", "1d")[1]
    assert "4 subagents audited" in out and "There is no subagent to audit." in out
    for wrong in ("1", "h", "0m", "1w"):
        assert story.run("--since", wrong)[0] == 2


def test_the_audit_alone_is_of_the_last_session(story):
    assert "4 subagents audited: 16 checks passed\n" in story.run("--audit")[1]
    second_session(story, NOW - 100)
    assert "There is no subagent to audit." in story.run("--audit")[1]


def test_sessions_of_other_directories_are_not_told(story):
    elsewhere = story.sessions.parent / "-somewhere-else"
    story.sessions.rename(elsewhere)
    status, out, _ = story.run("last", "--json")  # its receipts lead to its transcript
    assert "-somewhere-else" in out and json.loads(out)["sessions"][0]["prompt"]
    (story.project / ".subagent-fleet" / "requests.jsonl").unlink()
    status, _, err = story.run("last")
    assert status == 1 and "no sessions recorded in this directory" in err
    assert story.run()[0] == 0 and "No session" in story.run()[2]


def test_claude_config_dir_is_where_sessions_are(story, tmp_path):
    (story.home / ".claude").rename(tmp_path / "config")
    assert story.run("last", CLAUDE_CONFIG_DIR=str(tmp_path / "config"))[0] == 0
    assert "Fix" not in story.run("last")[1]  # only receipts


def test_receipts_alone_name_agents_by_their_alias(story):
    for path in story.sessions.rglob("*"):
        path.is_file() and path.unlink()
    status, out, _ = story.run("last")
    assert status == 0 and re.search(r"^  planner\? +qwen3:8b +laptop", out, re.M)
    assert re.search(r"Session 3f1c2d4e\S+, .* nothing left the house\.", out)
    assert story.run("last", "--audit")[0] == 0


def test_what_was_read_again_is_said_with_its_reason(newest):
    file_with(newest, lambda index, receipt: receipt.update(
        read_again_tokens=900, read_again_why="pushed out", waited_for="planner"))
    assert ("note: explorer on laptop: 1,800 tokens were read twice "
            "(other prompts had pushed them out of the cache); it waited for planner\n") in newest.run("last")[1]


# -- what anybody may have written there --

@pytest.mark.slow
def test_no_line_of_a_transcript_or_receipt_can_break_it(story):
    rng = random.Random(15)
    paths = [*story.sessions.rglob("*.json*"), story.project / ".subagent-fleet" / "requests.jsonl"]
    kept = {path: path.read_bytes() for path in paths}
    odd = [b"null", b"[]", b"{}", b"-1", b"1e999", b'"\\ud800\\u202e"', b'"\x1b[2J"', b"true",
           b"[" * 2000, b"9" * 400, b'{"a":' * 50]
    for _ in range(150):
        path = rng.choice(paths)
        content = kept[path]
        values = list(re.finditer(rb'(?<=":)("[^"]*"|\d+(?:\.\d+)?|\[\]|\{\})', content))
        for match in rng.sample(values, min(len(values), 3)):
            content = content.replace(match[0], rng.choice(odd), rng.choice([1, -1]))
        path.write_bytes(content)
        for words in (["last", "--audit"], ["last", "--json", "--audit"]):
            status, out, err = story.run(*words)
            assert status in (0, 1) and "\x1b" not in out + err
        path.write_bytes(kept[path])


def test_a_line_without_an_end_fills_no_memory(story, monkeypatch):
    monkeypatch.setattr(sf, "LINE_LIMIT_BYTES", 100_000)
    with open(story.main, "ab") as stream:
        stream.write(b'{"type":"assistant",' + b"x" * 5_000_000)
    status, out, _ = story.run("last")
    assert status == 0 and "cannot be read" in out


def test_what_cannot_matter_is_not_parsed(monkeypatch):
    parsed = []
    monkeypatch.setattr(sf, "parse_object", lambda line: parsed.append(line) or {})
    transcript = sf.Transcript("x")
    transcript.prompt = "known"
    for line in (b'{"type":"attachment","text":"\\"assistant\\""}', b'{"type":"user"}', b"", b"\r",
                 b'{"type":"assistant"}', b'{"toolUseResult":{"agentId":"a"}}\r'):
        transcript.feed(line)
    assert len(parsed) == 2 and transcript.lines == 6


@pytest.mark.parametrize("text, seconds", [
    ("1970-01-01T00:00:01.500Z", 1.5), ("2026-11-18T06:37:54Z", 1794983874.0), ("", 0.0),
    ("2026-11-18T06:37:54", 0.0), ("yesterdayZ", 0.0), ("0001-01-01T00:00:00Z", -62135596800.0)])
def test_times_are_read_as_utc(text, seconds):
    assert sf.parse_time(text) == seconds


@pytest.mark.parametrize("count, text", [
    (0, "0"), (999, "999"), (1000, "1.0k"), (9149, "9.1k"), (9960, "10k"), (412000, "412k"),
    (999_600, "1.0M"), (1_234_567, "1.2M")])
def test_amounts_are_four_characters(count, text):
    assert sf.show_amount(count) == text


def test_readme_shows_what_is_printed(story):
    shown = re.sub("\x1b\\[[0-9;]+m", "", story.run("last", columns=100)[1])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```text\n$ subagent-fleet trace last\n{shown}```" in readme
    page = sf.TOPICS["traces"].page()
    assert f"```text\n$ subagent-fleet trace last\n{shown}```" in page
    assert re.findall(r"^\| (\w+) \| .*\|$", page.partition("| Question | The answer is no if |")[2],
                      re.M)[:4] == list(sf.QUESTIONS)


# -- joins --

def test_an_answer_of_several_lines_is_one(newest):
    """Claude Code writes a line for each block, with the same request id and usage."""
    lines = []
    for line in newest.lines(newest.sub):
        if line["type"] == "assistant" and line["message"]["stop_reason"] == "tool_use":
            first = json.loads(json.dumps(line))
            first["message"]["content"] = [{"type": "text", "text": "I look."}]
            first["message"]["stop_reason"] = None
            lines.append(first)
        lines.append(line)
    newest.write(newest.sub, "".join(json.dumps(line) + "\n" for line in lines))
    transcript = sf.Transcript("x", newest.agent)
    for line in newest.sub.read_bytes().split(b"\n"):
        transcript.feed(line)
    first, last = transcript.answers.values()
    assert (first.calls, first.stop, first.input_tokens, last.calls) == (1, "tool_use", 2128, 0)
    newest.file([])
    rows = json.loads(newest.run("last", "--json")[1])["sessions"][0]["agents"][1]["served"]
    assert [row["requests"] for row in rows] == [2]


@pytest.mark.parametrize("mark", [{"isApiErrorMessage": True}, {"model": "<synthetic>"}])
def test_either_mark_of_an_api_error_is_one(mark):
    line = {"type": "assistant", "timestamp": "2026-11-18T06:37:54Z", **mark, "message": {
        "model": mark.get("model", "m"), "content": [{"type": "text", "text": "API Error: 500"}]}}
    transcript = sf.Transcript("x")
    transcript.feed(json.dumps(line).encode())
    assert transcript.last.error == "API Error: 500"


@pytest.mark.parametrize("asked, answer", [("explorer-local", "unknown"), ("claude-opus-5-5", "no")])
def test_with_litellm_only_an_alias_of_the_fleet_stayed_there(newest, asked, answer):
    newest.write(newest.project / "fleet.yaml", FLEET.replace(
        "{name: shop}", "{name: shop, gateway: {provider: litellm}}"))
    for path in (newest.main, newest.sub):
        newest.write(path, path.read_text(encoding="utf-8").replace("req_0", "req_011C").replace(
            "explorer-local", asked))
    status, verdicts = newest.audit()
    assert (status, answers(verdicts)["House"]) == (int(answer == "no"), answer)


def trace_of(agent, at, parent="", call=""):
    return sf.AgentTrace(agent, agent, parent, None, (sf.read(sf.Receipt, {
        "time": at, "id": f"r{at}", "session": "s", "agent_id": agent, "alias": "x", "route": None,
        "node": None, "context": None, "failures": [], "waited_seconds": None, "first_byte_seconds": None,
        "total_seconds": 0.0, "input_tokens": 0, "output_tokens": 0, "outcome": "ok"}),))


def test_agents_stand_behind_who_started_them():
    agents = [trace_of("", 1.0), trace_of("b", 4.0), trace_of("c", 3.0, "a"), trace_of("a", 2.0),
              trace_of("d", 5.0, "a"), trace_of("e", 6.0, "c"), trace_of("f", 7.0, "f")]
    order = [(agent.id, agent.depth) for agent in sf._in_order(agents)]
    assert order == [("", 0), ("a", 1), ("c", 2), ("e", 3), ("d", 2), ("b", 1), ("f", 1)]


@pytest.mark.skipif(os.name != "posix", reason="a file with a hole")
def test_receipts_that_no_gateway_wrote_are_read_from_their_end(run_cli, tmp_path):
    (tmp_path / "fleet.yaml").write_text(
        'nodes: {a: {endpoint: "http://localhost:11434"}}\n'
        'models: {m: {node: a, ollama_model: "m:7b", litellm_alias: local}}\n'
        'agents: {worker: {model: m, description: Works.}}\n', encoding="utf-8")
    (tmp_path / ".subagent-fleet").mkdir()
    receipt = sf.Receipt(
        time=1.5, id="req_1", session="0dd5-late", agent_id="", alias="local", route="m", node="a",
        context=4096, failures=(), waited_seconds=0.0, first_byte_seconds=0.1, total_seconds=0.2, input_tokens=1,
        output_tokens=1, outcome="ok")
    with open(tmp_path / ".subagent-fleet/requests.jsonl", "wb") as stream:
        stream.truncate(3 << 30)
        stream.seek(0, 2)
        stream.write(b"\n" + sf.render_json(receipt) + b"\n")
    done = run_cli("trace", "--json", timeout=10, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert [row["session"] for row in json.loads(done.stdout)["sessions"]] == ["0dd5-late"]
