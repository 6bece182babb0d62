"""What a context takes, as we count it and as the real engine says, for each architecture."""

import json
import os
import re
import subprocess

import pytest

import install
import rig
import subagent_fleet as sf

CONTEXT = 16384
KINDS = ("llama", "qwen3", "qwen3moe", "gemma3", "gpt-oss", "gemma4", "qwen35", "deepseek2")
# What the engine says it has set aside: keys and values by layer, and states.
TAKEN = re.compile(r"(?:KV|RS) buffer size = +([\d.]+) MiB")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model of each kind, and what its metadata say."""
    place = tmp_path_factory.mktemp("kinds")
    done = subprocess.run([install.TOOLS_PYTHON, install.HERE / "make_fits.py", place],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place, json.loads((place / "keys.json").read_text(encoding="utf-8"))


def ask_engine(model, log, slots):
    """How many bytes the real llama-server keeps for the context, and the lines that say so."""
    port = rig.free_port()
    environ = {"PATH": os.environ["PATH"], "HOME": str(log.parent)}
    server = rig.Process(
        [install.engine_folder() / "llama-server", "--model", model, "--host", "127.0.0.1",
         "--port", port, "-c", CONTEXT * slots, "-np", slots, "-b", 512, "-ub", 512, "-t", 1,
         "--no-webui", "--offline", "--no-warmup", "--log-verbosity", 4, "--chat-template", "chatml"],
        log=log, env=environ)
    try:
        rig.wait_until(lambda: "graph nodes" in server.text() or server.child.poll() is not None,
                       seconds=60, what=f"the context of {model.name}")
    finally:
        server.kill()
    text = server.text()
    sizes = [float(size) * 2**20 for size in TAKEN.findall(text)]
    assert sizes, text[-3000:]
    return sum(sizes)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_context_takes_what_we_count(models, tmp_path, kind, slots):
    place, keys = models
    counted = sf.NodeModel(kind, 0, **sf.plan_cache(keys[kind]))
    assert counted.token_bytes
    weights = sf.plan_gigabytes(counted, 0, 0)
    ours = (sf.plan_gigabytes(counted, CONTEXT, slots) - weights) * 1e9
    theirs = ask_engine(place / f"{kind}.gguf", tmp_path / "engine.log", slots)
    print(f"{kind}, {slots} slots: counted {ours / 2**20:.2f} MiB, taken {theirs / 2**20:.2f} MiB")
    assert ours == pytest.approx(theirs, rel=0.05)


def count_read_again(port, conversations, tokens):
    """Let so many take turns twice; how many of the second turns were read from the beginning."""
    cold = 0
    for turn in range(2):
        for number in range(conversations):
            prompt = [300 + number] * tokens + [400] * (turn * 20)
            status, answer = rig.get_json(
                f"http://127.0.0.1:{port}/completion",
                body={"prompt": prompt, "n_predict": 1, "cache_prompt": True})
            assert status == 200, answer
            cold += turn and answer["timings"]["prompt_n"] > tokens // 2
    return cold


def test_as_many_stay_warm_as_we_say(models, tmp_path):
    """A cliff: all of as many as we say, and none of one more."""
    place, keys = models
    counted = sf.NodeModel("llama", 0, **sf.plan_cache(keys["llama"]))
    tokens = 1000
    mebibytes = int(3.1 * sf.plan_kept_gigabytes(counted, tokens) * 1e9 / 2**20) + 1
    warm = sf.plan_warm(counted, tokens, 1, mebibytes * 2**20 / 1e9)
    assert warm == 3
    for conversations, cold in ((warm, 0), (warm + 1, warm + 1)):
        port = rig.free_port()
        server = rig.Process(
            [install.engine_folder() / "llama-server", "--model", place / "llama.gguf",
             "--host", "127.0.0.1", "--port", port, "-c", CONTEXT, "-np", 1, "--offline",
             "--no-webui", "--no-warmup", "--cache-ram", mebibytes, "--chat-template", "chatml"],
            log=tmp_path / f"warm{conversations}.log",
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
        try:
            rig.wait_until(lambda: rig.get_json(f"http://127.0.0.1:{port}/health")[0] == 200,  # noqa: B023
                           what="llama-server")
            assert count_read_again(port, conversations, tokens) == cold
        finally:
            server.kill()
