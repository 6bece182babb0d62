"""What a person reads on a terminal: safe, aligned, and never wider than the terminal."""
from dataclasses import replace
import re

import subagent_fleet as sf

KEY = "sk-" + "0123456789abcdef" * 4


def fleet_of(variable="A_MASTER_KEY"):
    """A fleet of one node, one model, one agent."""
    text = f"""
project: {{name: p, gateway: {{master_key_env: {variable}}}}}
nodes: {{n: {{endpoint: "http://h:1"}}}}
models: {{m: {{node: n, ollama_model: "x:3b", litellm_alias: al}}}}
agents: {{ag: {{model: m, description: d}}}}
"""
    fleet, findings = sf.check_fleet(sf.Document(text, "fleet.yaml"))
    assert findings == []
    return fleet


def test_a_diff_shows_no_secret():
    fleet = fleet_of("MY_MASTER_KEY")
    mine = "export OPENAI_API_KEY=abc\nexport MY_MASTER_KEY='def'\nPASSWORD=ghi\nX=sk-jkl\nline\n"
    change = sf.Change(".env.subagent-fleet", mine.encode(),
                       sf.render_environment(fleet, KEY).encode(), False)
    text = sf.format_diff([change], fleet)
    assert not re.search("abc|def'|ghi|jkl|0123456789", text) and "-line\n" in text
    for line in ("my_token=a:b", 'export "DB_PASSWD=a:b"', ': "${MY_MASTER_KEY:=a:b}"',
                 'set -gx HF_TOKEN a:b', "echo ${MY_MASTER_KEY:-a:b}", "A_SECRET= a:b sk-c:b"):
        shown = sf.format_diff([replace(change, found=line.encode())], fleet)
        assert "(hidden)" in shown and ":b" not in shown, line
    window = replace(change, found=change.wanted.replace(b"_TOKENS=", b"_TOKENS=1"))
    assert "-export CLAUDE_CODE_MAX_CONTEXT_TOKENS=1" in sf.format_diff([window], fleet)
    other = replace(change, found=change.wanted.replace(b"sk-0", b"sk-1"))
    assert "only hidden values differ" in sf.format_diff([other], fleet)
    assert sf.format_diff([replace(change, found=change.wanted)], fleet) == ""


def test_a_diff_cannot_steer_the_terminal():
    change = sf.Change(".claude/agents/a.md", b"\x1b[31m\xff\xe2\x80\xae", b"new\n", False)
    assert set(re.findall("[^\n -~\t]", sf.format_diff([change], fleet_of()))) == set()


def test_what_was_served_is_the_difference_of_two_looks():
    one = dict(zip(sf.TOTALS, (5, 100, 20, 1.25, 0)))
    two = dict(zip(sf.TOTALS, (9, 300, 25, 3.0, 1)))
    assert sf.count_served({"n": one}, {"n": two, "m": one}) == [
        ("n", 4, 200, 5, 1.8, 1), ("m", 5, 100, 20, 1.2, 0)]
    # one that took over began at 0
    assert sf.count_served({"n": two}, {"n": one}) == [("n", 5, 100, 20, 1.2, 0)]
    assert sf.count_served({"n": one}, {}) == []
    assert "does not tell" in sf.format_served([], 80)
