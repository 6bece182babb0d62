"""What fits a machine, which context that gives, who stays warm there, and what to pull for it."""
import json
import re
from pathlib import Path

import pytest

import subagent_fleet as sf
from tools import free_port

TOOLS = ["completion", "tools"]
# As the published files have it: (bytes of the file, architecture, its keys, capabilities).
PUBLISHED = {
    "gemma3:27b": (17_396_936_941, "gemma3", {
        "block_count": 62, "attention.head_count_kv": 16, "attention.key_length": 128,
        "attention.value_length": 128, "attention.sliding_window": 1024,
        "context_length": 131072}, ["completion", "vision"]),
    "gemma4:12b": (7_556_508_396, "gemma4", {
        "block_count": 48, "attention.head_count_kv": [8, 8, 8, 8, 8, 1] * 8,
        "attention.sliding_window_pattern": ([True] * 5 + [False]) * 8,
        "attention.key_length": 512, "attention.value_length": 512,
        "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "attention.sliding_window": 1024, "attention.shared_kv_layers": 0,
        "context_length": 262144}, [*TOOLS, "thinking"]),
    "glm-4.7-flash": (19_019_269_895, "deepseek2", {
        "block_count": 47, "attention.head_count_kv": 1, "attention.kv_lora_rank": 512,
        "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": 256, "rope.dimension_count": 64,
        "context_length": 202752}, [*TOOLS, "thinking"]),
    "qwen3-coder:30b": (18_556_701_140, "qwen3moe", {
        "block_count": 48, "attention.head_count_kv": 4, "attention.key_length": 128,
        "attention.value_length": 128, "context_length": 262144}, TOOLS),
    "gpt-oss:20b": (13_793_441_244, "gptoss", {
        "block_count": 24, "attention.head_count_kv": 8, "attention.key_length": 64,
        "attention.value_length": 64, "attention.sliding_window": 128,
        "context_length": 131072}, [*TOOLS, "thinking"]),
}
# Weights and a tenth, what is kept once, and bytes a token: the largest context of whole 4,096 up
# to 65,536 that they leave room for; 0: not even Claude Code's own prompt.
FITS = {
    "gemma3:27b": {16: 0, 24: 49152, 32: 65536, 64: 65536},  # 19.14 + 0.65, 81,920
    "gemma4:12b": {16: 65536, 24: 65536, 32: 65536, 64: 65536},  # 8.31 + 0.50, 16,384
    "glm-4.7-flash": {16: 0, 24: 53248, 32: 65536, 64: 65536},  # 20.92, 54,144
    "qwen3-coder:30b": {16: 0, 24: 32768, 32: 65536, 64: 65536},  # 20.41, 98,304
    "gpt-oss:20b": {16: 32768, 24: 65536, 32: 65536, 64: 65536},  # 15.17 + 0.02, 24,576
}


@pytest.fixture
def machine(fake_node, monkeypatch, tmp_path):
    """A machine with one published model; this one has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", f"http://127.0.0.1:{free_port()}")

    def start(*names):
        node = fake_node({name: {"size": PUBLISHED[name][0], "capabilities": PUBLISHED[name][3]}
                          for name in names})

        def show(payload):
            _, kind, keys, capabilities = PUBLISHED[payload["model"].removesuffix(":latest")]
            info = {f"{kind}.{key}": value for key, value in keys.items()}
            if not payload.get("verbose"):  # Ollama leaves long lists out
                info = {key: None if isinstance(value, list) else value for key, value in info.items()}
            return 200, {"capabilities": capabilities,
                         "model_info": {"general.architecture": kind, **info}}

        node.answers["/api/show"] = show
        return node
    return start


def plan_with(node, gigabytes):
    """Type `init`, write the memory of the machine into the file, have the plan written."""
    assert sf.main(["init", "--node", f"mac={node.endpoint}"]) == 0
    path = Path("fleet.yaml")
    text = re.sub("(?m)^  mac:$", f"  mac:\n    memory_gb: {gigabytes}", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    return sf.main(["recommend", "--write", "--yes"])


@pytest.mark.parametrize("gigabytes", [16, 24, 32, 64])
@pytest.mark.parametrize("name", PUBLISHED)
def test_recommend_takes_the_largest_context_that_fits_and_says_what_it_counted(
        machine, capsys, name, gigabytes):
    node = machine(name)
    plan_with(node, gigabytes)
    said = " ".join("".join(capsys.readouterr()).split())
    fleet = sf.load_fleet("fleet.yaml")
    assert fleet.nodes["mac"].memory_gb == gigabytes
    context = FITS[name][gigabytes]
    if not context:
        why = "cannot call tools" if "tools" not in PUBLISHED[name][3] else "no model fits the memory"
        assert why in said
        return
    heavy = fleet.models["heavy-coder"]
    assert (heavy.ollama_model.removesuffix(":latest"), heavy.context) == (name, context)
    assert f"mac: {heavy.ollama_model} takes " in said and f" GB for {context:,} tokens, of {gigabytes} GB" in said
    assert sf.main(["validate", "--strict"]) == 0


def test_who_stays_warm_is_said_by_status_doctor_and_recommend(machine, capsys):
    node = machine("qwen3-coder:30b")
    assert plan_with(node, 64) == 0
    sentence = "mac keeps 1 agent of 65,536 tokens warm; 5 configured."
    assert sentence in capsys.readouterr().out
    for command in ("status", "recommend", "doctor"):
        sf.main([command])
        assert sentence in " ".join(capsys.readouterr().out.split()), command
    sf.main(["status", "--json"])
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert (load["model"], load["context"], load["warm"], len(load["agents"])) == (
        "qwen3-coder:30b", 65536, 1, 5)
    assert load["gigabytes"] == pytest.approx(18.557 * 1.1 + 98304 * 65536 / 1e9, abs=0.01)

    sf.main(["doctor", "--json"])
    (few,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["id"] == "few-warm"]
    assert "LLAMA_ARG_CACHE_RAM=31744" in few["fix"] and "cache_gb: 33.3" in few["fix"]
    path = Path("fleet.yaml")
    path.write_text(path.read_text(encoding="utf-8").replace(
        "    memory_gb: 64", "    cache_gb: 33.3\n    memory_gb: 64"), encoding="utf-8")
    sf.main(["doctor", "--json"])
    said = capsys.readouterr().out
    assert "keeps 5 agents" in said and '"room"' in said and "few-warm" not in said


def test_what_was_counted_stands_beside_what_was_measured(machine, capsys):
    node = machine("gpt-oss:20b")
    plan_with(node, 32)
    capsys.readouterr()
    sf.main(["warmup"])
    capsys.readouterr()
    sf.main(["doctor", "--json"])
    said = capsys.readouterr().out
    assert "mac: gpt-oss:20b takes 15.2 GB, and 1.6 GB for 65,536 tokens, of 32 GB." in said
    assert f"Measured: {node.models['gpt-oss:20b']['size'] / 1e9:.1f} GB in all." in said


@pytest.mark.parametrize("gigabytes, model", [
    (0, "qwen3:8b"), (3, ""), (6, ""), (8, "qwen3:4b"), (12, "qwen3:8b"), (16, "gpt-oss:20b"),
    (24, "qwen3-coder:30b"), (64, "qwen3-coder:30b"), (96, "gpt-oss:120b")])
def test_what_to_pull_fits_the_memory(gigabytes, model):
    assert sf.plan_pull(gigabytes) == model


def test_init_without_a_model_says_which_to_pull_for_its_memory(fake_node, run_cli, monkeypatch, tmp_path):
    here = fake_node({})
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 34.4)  # a Mac of 32 GB
    env = {"OLLAMA_HOST": f"127.0.0.1:{here.port}"}
    said = " ".join(run_cli("init", env=env).stdout.split())
    assert "For local, which has about 26 GB for models: `ollama pull qwen3-coder:30b`" in said
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 21.4)
    said = " ".join(run_cli("init", "--force", env=env).stdout.split())
    assert "`ollama pull gpt-oss:20b`" in said


@pytest.mark.parametrize("gigabytes", [1, 6, 7, 8])
def test_what_is_said_of_little_memory_is_what_the_plan_then_does(
        fake_node, machine, run_cli, monkeypatch, capsys, gigabytes):
    """A pull is only named where the model is then taken; else what the smallest needs."""
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: (gigabytes + 0.1) / sf.USABLE_SHARE)
    done = run_cli("init", env={"OLLAMA_HOST": f"127.0.0.1:{fake_node({}).port}"})
    without = " ".join(done.stdout.split())
    needs = "qwen3:4b, the smallest suitable model, needs 8 GB"
    assert ("`ollama pull qwen3:4b`" in without) == (gigabytes >= 8) != (needs in without), without

    node = fake_node({"qwen3:4b": {"size": 2_497_293_931, "capabilities": TOOLS, "context_length": 40960}})
    node.answers["/api/show"] = lambda payload: (200, {"capabilities": TOOLS, "model_info": {
        "general.architecture": "qwen3", "qwen3.block_count": 36,
        "qwen3.attention.head_count_kv": 8, "qwen3.attention.key_length": 128,
        "qwen3.attention.value_length": 128, "qwen3.context_length": 40960}})
    Path("fleet.yaml").unlink()
    plan_with(node, gigabytes)
    with_it = " ".join("".join(capsys.readouterr()).split())
    assert ("no model fits the memory of its machine" in with_it) == (gigabytes < 8), with_it


def test_the_memory_of_this_machine_is_written_and_used(machine, run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 64.3)
    node = machine("qwen3-coder:30b", "gpt-oss:20b")
    done = run_cli("init", env={"OLLAMA_HOST": f"127.0.0.1:{node.port}"})
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert fleet.nodes["local"].memory_gb == 48 and len(fleet.models) == 2
    assert "memory_gb" not in done.stdout


def test_a_mac_gets_the_strongest_model_that_fits_its_memory(machine, run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 24.0)
    monkeypatch.setattr("sys.platform", "darwin")
    node = machine("qwen3-coder:30b", "gpt-oss:20b")
    run_cli("init", env={"OLLAMA_HOST": f"127.0.0.1:{node.port}"})
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert fleet.nodes["local"].memory_gb == 18
    assert [model.ollama_model for model in fleet.models.values()] == ["gpt-oss:20b"]


def test_a_machine_whose_graphics_card_has_more_keeps_its_model(machine, run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 24.0)  # gpt-oss:20b fits
    monkeypatch.setattr("sys.platform", "linux")
    node = machine("qwen3-coder:30b", "gpt-oss:20b")
    said = " ".join(run_cli("init", env={"OLLAMA_HOST": f"127.0.0.1:{node.port}"}).stdout.split())
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert fleet.nodes["local"].memory_gb is None
    assert [model.ollama_model for model in fleet.models.values()] == ["qwen3-coder:30b"]
    assert "local: without `memory_gb:` a machine gets only one model. Add it, then run" in said


def test_up_on_a_small_machine_says_what_is_missing(fake_node, run_cli, monkeypatch):
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 4.0)
    node = fake_node({"bge-m3": {"capabilities": ["embedding"]}})
    done = run_cli("up", env={"OLLAMA_HOST": f"127.0.0.1:{node.port}"})
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert ("this machine has about 3 GB for models: qwen3:4b, the smallest suitable model, needs 8 GB "
            "fix: with a larger machine: `subagent-fleet init --node mini=192.168.1.50`") in said


def test_a_stronger_model_that_does_not_fit_is_named(machine, capsys):
    plan_with(machine("qwen3-coder:30b", "gpt-oss:20b"), 20)
    said = " ".join(capsys.readouterr().out.split())
    assert "the strongest that fits (qwen3-coder:30b doesn't): " in said, said
