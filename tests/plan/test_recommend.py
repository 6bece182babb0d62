"""`recommend`: the fleet as it is beside the fleet as it would be, and who may write it."""
import json
import re

import pytest

import subagent_fleet as sf
from gateway_rig import Node
from subagent_fleet import replace
from tools import free_port


@pytest.fixture
def house(tmp_path, monkeypatch, fake_node):
    """Three machines, and a `fleet.yaml` that `init` wrote when there were two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    nodes = {"laptop": fake_node({"qwen3:8b": {"parameters": "8.2B"}}),
             "mini": fake_node({"qwen3-coder:30b": {"parameters": "30.5B"},
                                "gpt-oss:20b": {"parameters": "20.9B"}})}
    words = [word for name, node in nodes.items() for word in ("--node", f"{name}={node.endpoint}")]
    assert sf.main(["init", *words]) == 0
    return nodes


def measure(place, *measured):
    """What `bench` would have left."""
    (place / ".subagent-fleet").mkdir(exist_ok=True)
    (place / ".subagent-fleet/bench.json").write_text(
        sf.render_report("bench", {"measurements": list(measured)}), encoding="utf-8")


def measurement(node, endpoint, model, passed):
    return sf.Measurement(node, endpoint, model, "2026-11-18T14:05:02Z", 65536, answer_rate=50.0,
                          tools=sf.Score(passed, 5))


def report(capsys, *words):
    """The status and what `recommend --json` says."""
    capsys.readouterr()
    status = sf.main(["recommend", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_a_fleet_that_is_as_planned_stays(house, tmp_path, capsys):
    before = (tmp_path / "fleet.yaml").read_bytes()
    assert sf.main(["recommend", "--write"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("\nNothing would change.\n")
    assert "main session  qwen3-coder:30b on mini  the same  the strongest: 30.5 B, a coder\n" in said
    assert (tmp_path / "fleet.yaml").read_bytes() == before


def test_what_would_change_and_why_is_shown_with_the_block_to_paste(house, tmp_path, capsys):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    status, found = report(capsys)
    assert status == 0 and found["written"] is False
    changes = {row["role"]: (row["now"]["model"], row["planned"]["model"], row["why"])
               for row in found["roles"] if row["changes"] and row["now"] and row["planned"]}
    assert changes["reviewer"] == ("qwen3-coder:30b", "devstral:24b",
                                   "the strongest on another machine, of another family")
    block = sf.parse_yaml(found["block"])
    fleet = sf.parse_yaml((tmp_path / "fleet.yaml").read_text())
    fleet["models"] = block["models"]
    for name, values in block["agents"].items():
        fleet["agents"][name].update(values)
    pasted, problems = sf.check_fleet(sf.Document(sf.dump_yaml(fleet), "fleet.yaml"))
    assert problems == [] and list(sf.lint_fleet(pasted)) == []
    assert pasted.models[pasted.agents["reviewer"].model].ollama_model == "devstral:24b"

    capsys.readouterr()
    assert sf.main(["recommend"]) == 0
    assert capsys.readouterr().out.endswith("\nTo apply this: `subagent-fleet recommend --write`\n")


def test_what_was_measured_decides_and_is_shown(house, tmp_path, capsys):
    mini, laptop = house["mini"].endpoint, house["laptop"].endpoint
    measure(tmp_path, measurement("mini", mini, "qwen3-coder:30b", 1),
            measurement("mini", mini, "gpt-oss:20b", 5), measurement("laptop", laptop, "qwen3:8b", 2))
    status, found = report(capsys)
    (main,) = [row for row in found["roles"] if row["role"] == "main session"]
    assert (main["now"]["model"], main["planned"]["model"]) == ("qwen3-coder:30b", "gpt-oss:20b")
    assert main["why"] == "qwen3-coder:30b did not call tools when `bench` tried"
    assert {known["model"] for known in found["measured"]} == {
        "qwen3-coder:30b", "gpt-oss:20b", "qwen3:8b"}
    assert not any("bench" in sentence for sentence in found["unknown"])
    assert sf.main(["recommend"]) == 0
    assert "\nWhat was measured:\n" in capsys.readouterr().out


def test_who_was_not_measured_is_not_said_to_be_better(house, tmp_path, capsys):
    failed = replace(measurement("mini", house["mini"].endpoint, "qwen3-coder:30b", 0),
                     tools=sf.Score(0, 6))
    measure(tmp_path, failed)
    rows = report(capsys)[1]["roles"]
    (main,) = [row for row in rows if row["role"] == "main session"]
    assert main["changes"] and main["planned"]["model"] == "gpt-oss:20b"
    assert main["why"] == "qwen3-coder:30b did not call tools when `bench` tried"
    reasons = {row["now"]["model"]: row["why"] for row in rows if row["now"] and not row["planned"]}
    assert reasons == {"qwen3-coder:30b": "did not call tools when `bench` tried"}

    rest = [measurement("mini", house["mini"].endpoint, "gpt-oss:20b", 5),
            measurement("laptop", house["laptop"].endpoint, "qwen3:8b", 2)]
    measure(tmp_path, failed, *rest)
    rows = report(capsys)[1]["roles"]
    (main,) = [row for row in rows if row["role"] == "main session"]
    assert main["planned"]["model"] == "gpt-oss:20b" and "did not call tools" in main["why"]


def test_what_stays_keeps_its_own_reason(house, tmp_path, capsys):
    measure(tmp_path, *(replace(measurement(node, house[node].endpoint, model, 0), tools=sf.Score(0, 6))
                        for node, model in (("mini", "qwen3-coder:30b"), ("mini", "gpt-oss:20b"),
                                            ("laptop", "qwen3:8b"))))
    (main,) = [row for row in report(capsys)[1]["roles"] if row["role"] == "main session"]
    assert (main["changes"], main["why"]) == (False, "the strongest: 30.5 B, a coder")


def test_no_role_moves_from_a_model_without_tools_to_another(house, tmp_path, capsys):
    measure(tmp_path, *(replace(measurement(node, house[node].endpoint, model, 0), answer_rate=rate)
                        for node, model, rate in (("mini", "qwen3-coder:30b", 90.0),
                                                  ("mini", "gpt-oss:20b", 80.0),
                                                  ("laptop", "qwen3:8b", 10.0))))
    assert [row for row in report(capsys)[1]["roles"] if row["changes"]] == []
    assert sf.main(["recommend"]) == 0
    assert ("qwen3-coder:30b did not call tools when `bench` tried: pull a model that calls tools "
            "(ollama.com/search?c=tools), then `subagent-fleet recommend`"
            ) in " ".join(capsys.readouterr().out.split())
    words = [f"--node={name}={node.endpoint}" for name, node in house.items()]
    assert sf.main(["init", "--force", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ollama pull qwen3:8b" not in said  # laptop has it
    assert re.search(r"\(ollama.com/search\?c=tools\), then .subagent-fleet init .*--node", said), said


def test_what_is_not_known_is_said(house, capsys):
    _, found = report(capsys)
    assert found["unknown"] == [
        "The memory of mini. Without `memory_gb:` each machine gets only one model. Add it, then "
        "run `subagent-fleet recommend`.",
        "Never measured: qwen3:8b on laptop, qwen3-coder:30b on mini. "
        "Run `subagent-fleet bench`."]


@pytest.fixture
def terminal(monkeypatch):
    """A person at a terminal: what they are asked, and what they answer."""
    class Person:
        answer = True
        questions: list = []

    def confirm(world, question, text=""):
        world.err(text)
        Person.questions.append(question)
        return Person.answer

    Person.questions = []
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sf.World, "is_terminal", lambda world, name: True)
    monkeypatch.setattr(sf.World, "confirm", confirm)
    return Person


# What a person does to the file that `init` wrote: by hand, and as other programs would.
EDITS = {
    "as written": lambda text: text,
    "memory": lambda text: text.replace("  mini:\n", "  mini:\n    memory_gb: 40\n"),
    "a comment": lambda text: text + "# mine\n",
    "a name": lambda text: text.replace("heavy-coder", "big"),
    "another spelling": lambda text: text.replace("ollama_model:", "model:").replace("litellm_alias:", "alias:"),
    "slots": lambda text: text.replace("max_parallel: 1", "max_parallel: 3"),
    "dumped": lambda text: sf.dump_yaml(sf.parse_yaml(text)),
    "in braces": lambda text: sf.json.dumps(sf.parse_yaml(text), indent=2),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "tiers": lambda text: text.replace("  # claude: {haiku: heavy-coder}  #",
                                       "  claude: {haiku: small-coder, main: heavy-coder}  #"),
}


def test_what_was_never_measured_is_measured_by_what_is_advised(house, tmp_path, capsys):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    sentence, = [each for each in report(capsys)[1]["unknown"] if each.startswith("Never measured")]
    # qwen3:8b is in the file, but would be removed.
    assert sentence == ("Never measured: devstral:24b on laptop, qwen3-coder:30b on mini. Run "
                        "`subagent-fleet bench --model devstral:24b --model qwen3-coder:30b`.")
    words = re.search("subagent-fleet (bench .*)`", sentence)[1].split()
    sf.main([*words, "--quick"])
    measured = {known.model for known in sf.parse_measurements(
        (tmp_path / ".subagent-fleet/bench.json").read_bytes())}
    assert measured == {"devstral:24b", "qwen3-coder:30b"}
    # These called no tool, so others are planned: what was measured is named no more.
    unknown = " ".join(report(capsys)[1]["unknown"])
    assert "devstral:24b" not in unknown and "qwen3-coder:30b" not in unknown


@pytest.mark.parametrize("edit", EDITS)
def test_write_writes_into_the_file_as_it_is(house, tmp_path, capsys, terminal, edit):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    path = tmp_path / "fleet.yaml"
    path.write_bytes(EDITS[edit](path.read_text(encoding="utf-8")).encode())
    before = path.read_bytes()
    old = sf.load_fleet("fleet.yaml")
    status, found = report(capsys, "--write")
    assert status == 0 and found["written"] is True
    assert terminal.questions == ["Write this into fleet.yaml?"]
    fleet = sf.load_fleet("fleet.yaml")
    assert fleet.models[fleet.agents["reviewer"].model].ollama_model == "devstral:24b"
    assert list(sf.lint_fleet(fleet)) == []
    assert {name: node.memory_gb for name, node in fleet.nodes.items()} == {
        name: node.memory_gb for name, node in old.nodes.items()}
    for name, model in fleet.models.items():  # what stays keeps its name and its other keys
        if name in old.models and old.models[name].ollama_model == model.ollama_model:
            assert model.max_parallel == old.models[name].max_parallel
    if edit == "a name":
        assert fleet.agents["implementer"].model == "big"
    (kept,) = (tmp_path / ".subagent-fleet/backup").iterdir()
    assert kept.read_bytes() == before
    if edit == "a comment":
        assert path.read_text().endswith("# mine\n")
    if edit == "Windows":
        assert path.read_bytes().count(b"\r\n") == path.read_bytes().count(b"\n")
    assert not any(row["changes"] for row in report(capsys)[1]["roles"])


def test_write_keeps_lines_that_do_not_change(house, tmp_path, capsys, terminal):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    path = tmp_path / "fleet.yaml"
    text = path.read_text().replace("  heavy-coder:\n", "  # the big one\n  heavy-coder:  # bought in May\n")
    path.write_text(text, encoding="utf-8")
    assert sf.main(["recommend", "--write"]) == 0
    said = capsys.readouterr()
    shown = [line for line in said.err.splitlines() if line.startswith("-") and not line.startswith("---")]
    after = path.read_text().splitlines()
    assert shown and all(line[1:] in text.splitlines() for line in shown)
    assert [line for line in text.splitlines() if line not in after and f"-{line}" not in shown] == []
    assert "  # the big one" in after and "  heavy-coder:  # bought in May" in after
    assert said.out.index("reviewer") < said.out.index("Updated fleet.yaml")


@pytest.mark.parametrize("words, status", [([], 3), (["--json"], 3), (["--yes"], 0), (["--yes", "--json"], 0)])
def test_off_a_terminal_nothing_is_written_without_yes(house, tmp_path, capsys, words, status):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    path = tmp_path / "fleet.yaml"
    before = path.read_bytes()
    assert sf.main(["recommend", "--write", *words]) == status
    said = capsys.readouterr()
    assert (path.read_bytes() == before) is bool(status)
    fix = " ".join(["recommend --write --yes", *words])  # the same, and the answer
    assert (f"fix: `subagent-fleet {fix}`\n" in said.err) is bool(status)
    assert ('"not-written"' in said.out) is (words == ["--json"])


def test_a_person_who_says_no_keeps_the_file(house, tmp_path, capsys, terminal):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    terminal.answer = False
    before = (tmp_path / "fleet.yaml").read_bytes()
    assert sf.main(["recommend", "--write"]) == 3
    said = capsys.readouterr()
    assert "devstral:24b" in said.err and "error: nothing was written\n" in said.err
    assert (tmp_path / "fleet.yaml").read_bytes() == before


def test_standard_input_is_not_written(house, tmp_path, run_process):
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    text = (tmp_path / "fleet.yaml").read_bytes()
    done = run_process("recommend", "--write", "--yes", "--config", "-", input=text)
    assert done.returncode == 2 and "recommend: --write changes a file" in done.stderr
    assert not (tmp_path / "-").exists()


def test_add_and_then_recommend_gives_the_new_machine_work(house, tmp_path, capsys, fake_node):
    node = fake_node({"devstral:24b": {"parameters": "23.6B"}})
    assert sf.main(["add", f"gpu={node.endpoint}"]) == 0
    assert sf.main(["recommend", "--write", "--yes"]) == 0
    assert "\nUpdated fleet.yaml\n" in capsys.readouterr().out
    fleet = sf.load_fleet("fleet.yaml")
    assert {model.node for model in fleet.models.values()} == {"laptop", "mini", "gpu"}
    assert fleet.models[fleet.agents["reviewer"].model].ollama_model == "devstral:24b"


def test_add_warns_of_nothing_that_the_next_command_does(house, tmp_path, capsys, fake_node):
    node = fake_node({"devstral:24b": {"parameters": "23.6B"}})
    assert sf.main(["add", f"gpu={node.endpoint}"]) == 0
    said = capsys.readouterr()
    assert "warning" not in said.err + said.out
    assert said.out.endswith(
        "\nNext: `subagent-fleet recommend --write` plans the fleet with it, then `subagent-fleet up`\n")
    assert sf.main(["validate"]) == 0  # later it is said, and what helps
    assert "no agent, tier or fallback uses it\n" in capsys.readouterr().err


def test_a_model_without_tools_is_nobodys_fallback(house, tmp_path, capsys, fake_node):
    node = fake_node({"gemma3:12b": {"capabilities": ["completion", "vision"]}})
    assert sf.main(["add", f"gem={node.endpoint}"]) == 0
    said = capsys.readouterr().err
    assert "warning: gemma3:12b cannot call tools\n" in said
    assert "fix: `ollama pull qwen3:8b` on gem\n" in said and "fallback" not in said
    path = tmp_path / "fleet.yaml"
    tree = sf.parse_yaml(path.read_text())
    for model in tree["models"].values():
        model.pop("fallback", None)
    del tree["models"]["small-coder"]
    tree["agents"] = {name: {**agent, "model": "heavy-coder"} for name, agent in tree["agents"].items()}
    path.write_text(sf.dump_yaml(tree), encoding="utf-8")
    assert sf.main(["validate"]) == 0
    assert "write `fallback" not in capsys.readouterr().err


def test_a_machine_that_is_left_out_is_told_why(fake_node, run_cli, tmp_path):
    big, small = fake_node({"qwen3-coder:30b": {}}), fake_node({"qwen3:14b": {"size": 9 * 10**9}})
    env = {"OLLAMA_HOST": f"127.0.0.1:{small.port}"}
    run_cli("init", "--node", f"mini={big.endpoint}", env=env)
    path = tmp_path / "fleet.yaml"
    path.write_text(re.sub("(?m)^  local:$", "  local:\n    memory_gb: 4", re.sub(
        "(?m)^    memory_gb: .*\n", "", path.read_text())))
    run_cli("recommend", "--write", "--yes", env=env)
    said = run_cli("validate").stderr
    assert "nodes.local: no model runs on it" in said and "subagent-fleet add" not in said
    assert "fix: `subagent-fleet recommend` shows what it could do; or remove it\n" in said
    done = run_cli("recommend", env=env)
    assert "local idles: its models do not fit its memory.\n" in done.stdout
    assert done.stdout.endswith("\nNothing would change.\n")


def test_what_else_would_change_of_a_model_is_said(house, tmp_path, capsys):
    mini, laptop = house["mini"].endpoint, house["laptop"].endpoint
    none = sf.Score(0, 6)
    measure(tmp_path, *(replace(measurement(node, endpoint, model, 0), tools=none, context=sf.Score(1, 3))
                        for node, endpoint, model in (("mini", mini, "qwen3-coder:30b"),
                                                      ("mini", mini, "gpt-oss:20b"),
                                                      ("laptop", laptop, "qwen3:8b"))))
    rows = {row["role"]: row for row in report(capsys)[1]["roles"]}
    assert rows["main session"]["changes"]
    assert rows["main session"]["settings"] == "a context of 32,768"
    assert not any("can do it" in row["why"] for row in rows.values())
    assert sf.main(["recommend"]) == 0
    assert "the same, with a context of 32,768" in capsys.readouterr().out


def test_nothing_is_planned_into_a_cloud_and_what_is_there_stays(house, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAR_API_KEY", "sk-of-a-person")
    body = b'{"data": [{"type": "model", "id": "claude-opus-5-5"}], "has_more": false}'
    far = Node(lambda node, connection: connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)), plays_all=True)
    path = tmp_path / "fleet.yaml"
    tree = sf.parse_yaml(path.read_text())
    tree["nodes"]["far"] = {"endpoint": far.endpoint, "provider": "anthropic", "api_key_env": "FAR_API_KEY"}
    tree["models"]["opus"] = {"node": "far", "model": "claude-opus-5-5", "alias": "claude-opus-5-5",
                              "context": 200000, "cloud": True}
    tree["agents"]["reviewer"]["model"] = "opus"
    path.write_text(sf.dump_yaml(tree), encoding="utf-8")
    assert sf.main(["trust", "--yes"]) == 0
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    status, found = report(capsys)
    assert status == 0 and "claude-opus-5-5" not in json.dumps(found["roles"])
    assert "reviewer" not in [row["role"] for row in found["roles"]]
    assert sf.parse_yaml(found["block"])["agents"]["reviewer"]["model"] == "opus"

    assert sf.main(["recommend", "--write", "--yes"]) == 0
    fleet = sf.load_fleet("fleet.yaml")
    assert fleet.agents["reviewer"].model == "opus" and fleet.models["opus"].cloud
    far.close()


def test_a_sleeping_machine_is_not_planned_away(house, tmp_path, capsys):
    house["mini"].close()
    before = (tmp_path / "fleet.yaml").read_bytes()
    assert sf.main(["recommend", "--write", "--yes", "--timeout", "1"]) == 3
    said = capsys.readouterr()
    assert "error: mini does not answer (refused), so nothing was written\n" \
        in said.err
    assert (tmp_path / "fleet.yaml").read_bytes() == before
    house["laptop"].close()
    assert sf.main(["recommend", "--timeout", "1"]) == 1
    assert "no node answers with a model that can do the work" in capsys.readouterr().err


def test_a_machine_without_models_is_told_so(house, capsys):
    for node in house.values():
        node.models.clear()
    assert sf.main(["recommend", "--timeout", "1"]) == 1
    assert ("the work: laptop: it has no model; mini: it has no model"
            in " ".join(capsys.readouterr().err.split()))


def test_agents_of_ones_own_stay_and_keep_a_model(house, tmp_path, capsys):
    path = tmp_path / "fleet.yaml"
    text = path.read_text().replace("agents:\n", "agents:\n  scribe:\n    model: small-coder\n"
                                    "    description: Writes.\n    tools: [Write]\n")
    path.write_text(text, encoding="utf-8")
    house["laptop"].models["devstral:24b"] = {"parameters": "23.6B"}
    _, found = report(capsys)
    block = sf.parse_yaml(found["block"])
    assert block["agents"]["scribe"]["model"] in block["models"]
    assert [row["planned"] for row in found["roles"] if row["role"] is None] == [None]  # qwen3:8b


def test_placeholders_that_nobody_touched_are_replaced(quick, tmp_path, fake_node):
    here, other = fake_node({"qwen3:8b": {}}), fake_node({"qwen3:8b": {}})
    env = {"HOME": str(tmp_path), "OLLAMA_HOST": f"127.0.0.1:{here.port}"}
    far = f"other=http://127.0.0.1:{other.port}"
    quick("init", "--offline", "--node", far, env=env)
    file = tmp_path / "fleet.yaml"  # another test may serve at the usual port
    file.write_text(file.read_text(encoding="utf-8").replace("port: 4000", f"port: {free_port()}"), encoding="utf-8")
    fix = "`subagent-fleet recommend --write` uses the models that other has"
    assert f"fix: {fix}" in quick("warmup", env=env).stdout
    assert f"Next: {fix}" in quick("status", env=env).stdout
    assert f"fix: {fix}" in quick("doctor", env=env).stdout

    text = (tmp_path / "fleet.yaml").read_text(encoding="utf-8")
    (tmp_path / "fleet.yaml").write_text(text + "# mine\n", encoding="utf-8")
    assert quick("recommend", "--write", "--yes", env=env).returncode == 0
    assert "Placeholders" not in (tmp_path / "fleet.yaml").read_text(encoding="utf-8")
    assert quick("warmup", env=env).returncode == 0


# -- what a newcomer was told and could not rely on --

def failed(nodes, *models):
    """What `bench` would have left of models that called no tool."""
    return [replace(measurement(name, nodes[name].endpoint, model, 0), tools=sf.Score(0, 6, "called no tool"))
            for name, model in models]


def test_doctor_warns_of_a_model_that_called_no_tool_in_bench(house, tmp_path, capsys):
    measure(tmp_path, *failed(house, ("mini", "qwen3-coder:30b")))
    capsys.readouterr()
    sf.main(["doctor", "-v"])
    said = " ".join(capsys.readouterr().out.split())
    assert "models.heavy-coder: in `bench` qwen3-coder:30b called no tool; " in said
    assert "fix: `subagent-fleet recommend` shows which model does" in said
    assert "everything is in order" not in said and "ok: models.heavy-coder" not in said
    assert "ok: models.small-coder" in said

    capsys.readouterr()
    measure(tmp_path, *(replace(one, digest="old")  # it was pulled again: nothing is known
                        for one in failed(house, ("mini", "qwen3-coder:30b"))))
    sf.main(["doctor"])
    assert "called no tool" not in capsys.readouterr().out


@pytest.fixture
def twins(tmp_path, monkeypatch, fake_node):
    """Two machines that have the same models, and what `init` says of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    have = {"qwen3-coder:30b": {"parameters": "30.5B"}, "qwen3:8b": {"parameters": "8.2B"}}
    nodes = {name: fake_node({**have}) for name in ("laptop", "mini")}
    return nodes, [word for name, node in nodes.items()
                   for word in ("--node", f"{name}={node.endpoint}")]


def test_one_model_on_two_machines_is_said_to_be_shared(twins, tmp_path, capsys):
    nodes, words = twins
    assert sf.main(["init", *words]) == 0
    rows = {line[:14].strip(): line for line in capsys.readouterr().out.splitlines()}
    for role in ("main session", "implementer", "reviewer", "planner", "summarizer"):
        assert "laptop or mini (shared)" in rows[role], rows[role]
    assert rows["reviewer"].endswith("the same model on another machine")
    assert rows["summarizer"].endswith(
        "the fastest off the main session's machine that fits (qwen3:8b doesn't)")

    assert sf.main(["recommend"]) == 0
    said = capsys.readouterr().out
    assert "reviewer      qwen3-coder:30b on laptop or mini (shared)  the same  " in said
    for command in ("generate", "status"):
        sf.main([command])
        said = " ".join(capsys.readouterr().out.split())
        assert ("reviewer -> laptop or mini (shared) -> qwen3-coder:30b -> claude-sonnet-local"
                in said), command


def test_models_that_share_an_alias_wait_equally_long(twins, tmp_path, capsys):
    nodes, words = twins
    measure(tmp_path, *(replace(measurement(name, node.endpoint, "qwen3-coder:30b", 5),
                                context=sf.Score(0, 3)) for name, node in nodes.items()))
    assert sf.main(["init", *words]) == 0
    models = sf.load_config(sf.World(), None).fleet.models.values()
    assert {(model.alias, model.context, model.timeout) for model in models} == {
        ("claude-sonnet-local", 32768, 600)}


def test_a_plan_that_cannot_be_written_says_so_before_it_is_tried(house, tmp_path, capsys):
    house["mini"].close()
    capsys.readouterr()
    assert sf.main(["recommend", "--timeout", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--write" not in said
    assert ("mini does not answer (refused). First: start Ollama on mini; `subagent-fleet worker`, "
            "typed there, shows how to open it. To apply this, put this into fleet.yaml:") in said
    assert "was not found there" not in said and "mini does not answer" in said

    assert sf.main(["recommend", "--write", "--yes", "--timeout", "1"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "fix: start Ollama on mini" in said and "wake" not in said


def test_what_nobody_needs_is_said_in_words(house, tmp_path, capsys):
    measure(tmp_path, *failed(house, ("mini", "qwen3-coder:30b")))
    capsys.readouterr()
    assert sf.main(["recommend"]) == 0
    row, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert "  taken out of the file  " in row


def test_who_holds_the_gateways_port_comes_before_the_models(house, tmp_path, capsys, fake_node):
    other = fake_node({})
    path = tmp_path / "fleet.yaml"
    port = other.endpoint.rpartition(":")[2]
    path.write_text(re.sub(r"port: \d+", f"port: {port}", path.read_text()), encoding="utf-8")
    capsys.readouterr()
    sf.main(["status"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"ort {port} is in use by something else (`lsof -i :{port}` shows what). Next: write another `port:`" in said
    assert "warmup" not in said
