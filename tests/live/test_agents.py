"""Which agent files the real Claude Code lists, against what `doctor` says of them."""
import json
import re

import pytest

import install
import rig
import subagent_fleet as sf
from agent_cases import AGENTS


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_doctor_knows_which_agents_claude_code_lists(which, trap, tmp_path):
    agents = tmp_path / ".claude" / "agents"
    agents.mkdir(parents=True)
    wanted = set()
    for number, (text, _) in enumerate(AGENTS):
        named = re.sub(r"(name\"? ?: '?)a\b", rf"\g<1>case{number}", text)
        (agents / f"{number}.md").write_bytes(named.encode())
        if not sf.read_agent(named).defect:
            wanted.add(f"case{number}")
    env = rig.bare_environment(tmp_path, trap, ANTHROPIC_BASE_URL="http://127.0.0.1:9",
                               ANTHROPIC_AUTH_TOKEN="nobody-asks", CLAUDE_CODE_MAX_RETRIES="0",
                               CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
    session = rig.run_session([install.CLAUDES[which], "-p", "hi", *rig.CLAUDE_FLAGS],
                              cwd=tmp_path, env=env)
    listed = {name for name in session.init["agents"] if "case" in name}
    assert len(wanted) > 25 and listed == wanted, json.dumps(sorted(listed ^ wanted))
