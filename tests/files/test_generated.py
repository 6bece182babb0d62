"""Generated files, read back by readers that are not ours, and compared as values."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import subagent_fleet as sf

yaml = pytest.importorskip("yaml")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SHAPES = sorted(path.parent.name for path in GOLDEN.glob("*/fleet.yaml"))
KEY = "sk-" + "0123456789abcdef" * 4
SHELLS = [name for name in ("sh", "dash", "bash", "zsh") if shutil.which(name)]

ODD = ['"', "'", "\\", ": ", " #", "# x", "---", " --- ", "--- ", "\n---\n", "...", "\n", "\r\n",
       "\t", "$(id)", "`id`", "$HOME", "${HOME}", "!!", "!x", "&a", "*a", "{{x}}", "{% x %}", "%s",
       "%(a)s", "%", "\x00", "\x1b[31m", "\x07", "\x85", "\u2028", "\u2029", "\u200f", "\u202e",
       "\u200b", "\ufeff", "\ud800", "🙂", "é", "e\u0301", "null", "~", "true", "No", "y", "on",
       "1", "1_000", "012", "0x1f", "1e3", "1.5", "1:30", "2020-01-01", ".inf", "<<", "=", "- a",
       "? a", ": a", "a:", "[a", "]", "{a", "}", ",", "|", ">", "@a", "a  b", "os.environ/HOME",
       "\\n", "\\x41", "a" * 10000, "-" * 40]
HOSTILE = [text for odd in ODD for text in (odd, "a" + odd, odd + "b", f"a {odd} b", odd * 2)]
assert len(HOSTILE) > 300


def build(**fields):
    """A fleet with one value per field, from JSON; None when the rules refuse it."""
    model = {"node": "n", "ollama_model": fields.get("ollama_model", "x:3b"),
             "litellm_alias": fields.get("alias", "al"), "cloud": True}
    agent = {"model": "m", "description": fields.get("description", "d")}
    agent.update({key: fields[key] for key in ("prompt", "tools", "frontmatter") if key in fields})
    tree = {"project": {"name": "p", "gateway": {"host": fields.get("host", "127.0.0.1"),
                                                 "master_key_env": fields.get("variable", "A_MASTER_KEY")}},
            "nodes": {"n": {"endpoint": fields.get("endpoint", "http://h:1")}},
            "models": {"m": model}, "agents": {fields.get("agent", "ag"): agent}}
    try:
        fleet, _ = sf.check_fleet(sf.Document(json.dumps(tree), "fleet.json"))
    except sf.FleetError:
        return None  # half a character cannot be read at all
    return fleet


def read_agent(text):
    """Read an agent as Claude Code does: anything up to any `---`, then YAML, then the prompt."""
    found = re.match(r"---\s*\n(.*?)---[ \t]*\n(.*)", text, re.DOTALL)
    return yaml.safe_load(found[1]), found[2]


def agent_of(fleet):
    return read_agent(sf.render_agent(fleet.agents["ag"], fleet.models["m"].alias))


def survivors(field, render, wrap=lambda text: text):
    """Check every hostile value that the rules let into a field; return how many there are."""
    taken = 0
    for text in HOSTILE:
        fleet = build(**{field: wrap(text)})
        if fleet is not None:
            taken += 1
            render(fleet, text)
    return taken


def test_descriptions_are_read_back_to_the_letter():
    def check(fleet, text):
        head, body = agent_of(fleet)
        assert list(head) == ["name", "description", "model"]
        assert head["description"] == fleet.agents["ag"].description
        assert body.strip() == sf.OTHER_PROMPT.strip()
        words = re.sub(r"\s*[\n\u2028\u2029]\s*", " ", text.strip())
        assert head["description"] == words

    assert survivors("description", check) > 200


def test_prompts_are_read_back_to_the_letter():
    def check(fleet, text):
        head, body = agent_of(fleet)
        assert head == {"name": "ag", "description": "d", "model": "al"}
        assert body == "\n" + (text.rstrip() or sf.OTHER_PROMPT.rstrip()) + "\n"

    assert survivors("prompt", check) > 200


def test_tools_are_read_back_to_the_letter():
    def check(fleet, text):
        assert agent_of(fleet)[0]["tools"] == f"Bash({text}), Read"

    assert survivors("tools", check, lambda text: [f"Bash({text})", "Read"]) > 200


def test_frontmatter_is_read_back_to_the_letter():
    def check(fleet, text):
        head, _ = agent_of(fleet)
        assert list(head) == ["name", "description", "model", "color", "skills"]
        assert head["color"] == text and head["skills"] == [{text[:100]: [text]}, text]

    def wrap(text):
        return {"color": text, "skills": [{text[:100]: [text]}, text]}

    assert survivors("frontmatter", check, wrap) > 200


def test_ollama_names_are_read_back_to_the_letter():
    def check(fleet, text):
        value = yaml.load(sf.render_litellm(fleet), LOADER)
        assert list(value) == ["model_list", "litellm_settings", "general_settings",
                               "router_settings"]
        assert value["model_list"][0]["litellm_params"]["model"] == "ollama_chat/" + text

    assert survivors("ollama_model", check) > 200


@pytest.mark.parametrize("field", ["alias", "endpoint", "host", "variable", "agent"])
def test_fields_with_a_narrow_rule_let_nothing_through_that_changes_meaning(field):
    """What a rule refuses cannot hurt; what it lets through must come back."""
    def check(fleet, text):
        files = sf.render_files(fleet, KEY)
        config = yaml.load(files["litellm_config.yaml"], LOADER)
        assert config["model_list"][0]["model_name"] == fleet.models["m"].alias
        assert config["model_list"][0]["litellm_params"]["api_base"] == fleet.nodes["n"].endpoint
        assert config["general_settings"]["master_key"] == \
            f"os.environ/{fleet.gateway.master_key_env}"
        (name, agent), = fleet.agents.items()
        head, _ = read_agent(files[f".claude/agents/{name}.md"].decode("utf-8"))
        assert head == {"name": name, "description": "d", "model": fleet.models["m"].alias}
        assert not re.search("[^\n -~]", files[".env.subagent-fleet"].decode("utf-8"))

    wraps = {"endpoint": lambda text: f"http://h:1/{text}", "variable": lambda text: f"A_{text}_GATEWAY_KEY"}
    assert survivors(field, check, wraps.get(field, lambda text: text)) > 3


@pytest.mark.parametrize("name", SHELLS)
def test_shell_quoting_keeps_every_value(name, tmp_path):
    values = [text for text in HOSTILE if "\0" not in text and "\ud800" not in text]
    script = "".join(f"export V{i}={sf.quote_shell(text)}\n" for i, text in enumerate(values))
    show = "import json, os, sys; json.dump({k: v for k, v in os.environ.items() if k[0] == 'V'}, " \
           "sys.stdout)"
    (tmp_path / "values").write_bytes(script.encode("utf-8"))
    done = subprocess.run([name, "-c", '. ./values && exec "$0" -c "$1"', sys.executable, show],
                          cwd=tmp_path, stdout=subprocess.PIPE, check=True,
                          env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"})
    found = json.loads(done.stdout)
    assert len(values) > 300
    assert [found[f"V{i}"] for i in range(len(values))] == values


def variables_of(command, cwd, **more):
    """What a shell exports after a script, and what it says."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(cwd), "LC_ALL": "C.UTF-8",
               "ANTHROPIC_API_KEY": "old", "CLAUDE_CODE_SUBAGENT_MODEL": "old", **more}
    done = subprocess.run(command + ["env -0"], cwd=cwd, env=environ, capture_output=True,
                          check=True)
    assert done.stderr == b""
    lines = [line for line in done.stdout.decode("utf-8").split("\0") if "=" in line]
    return {name: value for name, value in (line.split("=", 1) for line in lines)
            if name not in ("_", "PWD", "OLDPWD", "SHLVL", "PATH", "HOME", "LC_ALL", "SHELL",
                            "LOGNAME", "USER")}


@pytest.mark.parametrize("shape", SHAPES)
def test_environment_file_is_the_same_in_every_shell(shape, tmp_path):
    fleet = sf.load_fleet(GOLDEN / shape / "fleet.yaml")
    wanted = sf.merge_environment({}, fleet, KEY)
    (tmp_path / "env").write_bytes(sf.render_environment(fleet, KEY).encode("utf-8"))
    assert len(SHELLS) >= 2
    for name in SHELLS:
        assert subprocess.run([name, "-n", "env"], cwd=tmp_path).returncode == 0
        source = [name, "-euc", '. ./env; eval "$0"']
        assert variables_of(source, tmp_path) == wanted
        given = {fleet.gateway.master_key_env: "my \"$own`' key"}
        assert variables_of(source, tmp_path, **given) == \
            sf.merge_environment({}, fleet, *given.values())
        assert variables_of(source, tmp_path, **{fleet.gateway.master_key_env: ""}) == wanted
        given = {"NO_PROXY": "a.example,b.example", "CLAUDE_CODE_USE_BEDROCK": "1"}
        assert variables_of(source, tmp_path, **given) == sf.merge_environment(given, fleet, KEY)


@pytest.mark.parametrize("name", [name for name in SHELLS if name in ("bash", "zsh")])
def test_environment_can_be_evaluated_at_a_prompt(name, tmp_path):
    """An interactive zsh takes `#` for a word in what is typed; eval must not."""
    fleet = sf.load_fleet(GOLDEN / "laptop" / "fleet.yaml")
    (tmp_path / "env").write_bytes(sf.render_environment(fleet, KEY).encode("utf-8"))
    quiet = {"bash": ["--norc", "-i"], "zsh": ["-f", "-i"]}[name]
    done = subprocess.run([name, *quiet], cwd=tmp_path, capture_output=True,
                          input=b'eval "$(cat env)"\nprintf "<%s>" "$ANTHROPIC_AUTH_TOKEN"\nexit\n',
                          env={"PATH": os.environ["PATH"], "HOME": "/"})
    assert f"<{KEY}>".encode() in done.stdout and b"not found" not in done.stderr


@pytest.mark.parametrize("shape", SHAPES)
def test_golden_files(shape, golden):
    assert len(SHAPES) >= 7
    files = sf.render_files(sf.load_fleet(GOLDEN / shape / "fleet.yaml"), KEY)
    names = {path: f"{shape}/files/{path.lstrip('.')}" for path in files}
    for path, content in files.items():
        golden(names[path], content.decode("utf-8"))
    there = {str(path.relative_to(GOLDEN)) for path in (GOLDEN / shape / "files").rglob("*")
             if path.is_file()}
    assert there == set(names.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_golden_fleets_are_what_the_files_say(shape):
    """The files as independent readers see them, held against the fleet."""
    fleet = sf.load_fleet(GOLDEN / shape / "fleet.yaml")
    files = sf.render_files(fleet, KEY)
    entries = yaml.safe_load(files["litellm_config.yaml"])["model_list"]
    assert len({entry["model_info"]["id"] for entry in entries}) == len(entries)
    for model, entry in zip(fleet.models.values(), entries):
        params = entry["litellm_params"]
        assert (entry["model_name"], params["model"]) == (
            model.alias, "ollama_chat/" + model.ollama_model)
        assert params["num_ctx"] == entry["model_info"]["max_input_tokens"] == model.context
        assert params["api_base"] == fleet.nodes[model.node].endpoint
        assert params.get("think") is (None if model.thinking else False)
        assert params["extra_body"] == {"truncate": False}
        assert type(params["keep_alive"]) is int and "api_key" not in params
    for name, agent in fleet.agents.items():
        text = files[f".claude/agents/{name}.md"].decode("utf-8")
        head, body = read_agent(text)
        assert text.startswith("---\n#") and (head["name"], head["description"]) == (
            name, agent.description)
        assert head["model"] == fleet.models[agent.model].alias
        assert {key: head[key] for key in agent.frontmatter} == agent.frontmatter
        assert set(head) == {"name", "description", "model", *agent.frontmatter} | (
            set() if agent.tools is None else {"tools"})
        assert body.strip() and "None" not in body


def settings_of(shape):
    """The router settings and the entries by model id of a golden fleet."""
    value = yaml.safe_load(sf.render_litellm(sf.load_fleet(GOLDEN / shape / "fleet.yaml")))
    return value["router_settings"], {e["model_info"]["id"]: e["litellm_params"]
                                      for e in value["model_list"]}


def test_limit_of_parallel_requests_only_where_there_is_somewhere_else_to_go():
    _, alone = settings_of("laptop")
    _, shared = settings_of("shared-alias")
    _, chained = settings_of("fallbacks")
    assert [params.get("max_parallel_requests") for params in alone.values()] == [None]
    assert [params["max_parallel_requests"] for params in shared.values()] == [2, 3]
    assert [params.get("max_parallel_requests") for params in chained.values()] == [1, 1, None]


def test_check_of_the_window_only_where_an_alias_has_two():
    assert settings_of("shared-alias")[0]["enable_pre_call_checks"] is True
    assert "enable_pre_call_checks" not in settings_of("fallbacks")[0]


def test_fallbacks_are_written_once_as_a_list():
    assert settings_of("fallbacks")[0]["fallbacks"] == [{"big": ["mid", "small"]},
                                                        {"mid": ["small"]}]
    assert "fallbacks" not in settings_of("laptop")[0]


def test_gone_tools_are_replaced_and_no_tools_are_none():
    fleet = sf.load_fleet(GOLDEN / "three-nodes" / "fleet.yaml")
    assert read_agent(sf.render_agent(fleet.agents["implementer"], "al"))[0]["tools"] == \
        "Read, Grep, Glob, Edit, Bash"
    hostile = sf.load_fleet(GOLDEN / "hostile" / "fleet.yaml")
    assert read_agent(sf.render_agent(hostile.agents["1e3"], "al"))[0]["tools"] == []


@pytest.mark.parametrize("name", ["planner", "implementer", "reviewer", "summarizer", "other"])
@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}, {"prompt": " \n"}])
def test_missing_prompt_becomes_the_roles(name, prompt):
    fleet = build(agent=name, **prompt)
    _, body = read_agent(sf.render_agent(fleet.agents[name], "al"))
    usual = sf.ROLES[name].prompt if name in sf.ROLES else sf.OTHER_PROMPT
    assert body == "\n" + usual


def test_kept_key_is_read_back_whatever_its_variable_is_called(tmp_path):
    def kept(text):
        (tmp_path / sf.ENVIRONMENT_FILE).write_text(text, encoding="utf-8")
        return sf.Workspace(sf.World(), str(tmp_path)).kept_key(build(variable="A_MASTER_KEY"))

    assert sf.Workspace(sf.World(), str(tmp_path)).kept_key(build()) == ""
    assert kept(sf.render_environment(build(variable="OLD_MASTER_KEY"), KEY)) == KEY
    for line in ("A_MASTER_KEY=sk-1", 'export A="${A:-sk-1}"', "export A_MASTER_KEY=sk-1", 'export A_MASTER_KEY="sk-1" ', "export A_MASTER_KEY='sk-1'"):
        assert kept(f"export B=x\n{line}\nexport C=y\n") == "sk-1"
    for text in ("", "export OTHER=sk-1", "export A_MASTER_KEY=$(id)", "export A_MASTER_KEY='sk-1\"", 'export A="${B:-sk-0123456789abc}"',
                 'export A="${A:-sk-0123456789abc d}"', 'export A="${A:-$(id)0123456789ab}"'):
        assert kept(text) == ""


def test_a_hidden_key_is_nowhere():
    fleet = build()
    text = sf.render_environment(fleet, None)
    assert "sk-" not in text and "--show-key" in text and "None" not in text


def test_a_thousand_models_are_written_once_each():
    models = "".join(f"  m{i}: {{node: n, ollama_model: x, litellm_alias: a{i}, fallback: [m0]}}\n"
                     .replace(", fallback: [m0]" if i == 0 else "\0", "") for i in range(1000))
    agents = "".join(f"  a{i}: {{model: m{i % 1000}, description: d}}\n" for i in range(2000))
    text = (f"project: {{name: p}}\nnodes: {{n: {{endpoint: 'http://h:1'}}}}\nmodels:\n{models}"
            f"agents:\n{agents}")
    fleet, _ = sf.check_fleet(sf.Document(text, "fleet.yaml"))
    files = sf.render_files(fleet, KEY)
    assert len(files) == 2002 and sum(map(len, files.values())) < 2_000_000
    assert files["litellm_config.yaml"].count(b"model_name: ") == 1000


def test_a_target_says_whose_a_path_is_and_who_may_read_it():
    fleet = sf.load_fleet(GOLDEN / "three-nodes" / "fleet.yaml")
    for target in sf.TARGETS:
        files = target.render(fleet, KEY)
        assert files and {sf.target_of(path) for path in files} == {target}
        assert [re.fullmatch(other.pattern, path) for path in files for other in sf.TARGETS
                if other is not target] == [None] * len(files) * (len(sf.TARGETS) - 1)
        has_key = any(KEY in text for text in files.values())
        assert target.mode == (0o600 if has_key else 0o644)
    assert sf.target_of("fleet.yaml") is None


@pytest.mark.parametrize("source, named", [
    ("my fleet.json", "my fleet.json"), ("/some/where/fleet.yml", "fleet.yml"),
    ("a\\b\\fleet.yaml", "fleet.yaml"), ("x\nmodel_list: []\u2028.yaml", "x?model_list: []?.yaml")])
def test_a_generated_file_names_its_source_and_nothing_of_it_is_read(source, named):
    text = (GOLDEN / "laptop" / "fleet.yaml").read_text(encoding="utf-8")
    fleet, _ = sf.check_fleet(sf.Document(text, source))
    for path, content in sf.render_files(fleet, KEY, sf.TARGET_NAMES).items():
        if not path.endswith(".json"):
            assert f"# Generated by subagent-fleet from {named}: change that, then\n" in content.decode()
    config = yaml.safe_load(sf.render_files(fleet, KEY)["litellm_config.yaml"])
    assert len(config["model_list"]) == len(fleet.models)
