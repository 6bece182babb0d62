"""Whom we believe: who is shown the key, which key is used, what is asked before it goes out."""
import json
import os
import subprocess
import sys
import threading

import pytest

import subagent_fleet as sf
from listener import Listener
from subagent_fleet import replace
from tools import PROGRAM, clean_environment, free_port, on_terminal

KEY = "sk-0123456789abcdef0123456789abcdef"
FLEET = """\
project: {name: shop, gateway: {provider: PROVIDER, host: HOST, port: PORT}}
nodes: {mini: {endpoint: "http://192.168.1.50:11434"}}
models: {m: {node: mini, ollama_model: tiny, litellm_alias: x, context: 32768}}
agents: {planner: {model: m, description: Plans.}}
"""


def fleet_at(port, *, provider="builtin", host="127.0.0.1"):
    """A fleet whose gateway is at that port."""
    text = FLEET.replace("PORT", str(port)).replace("PROVIDER", provider)
    fleet, findings = sf.check_fleet(sf.Document(text.replace("HOST", f'"{host}"'), "fleet.yaml"))
    assert fleet, findings
    return fleet


@pytest.fixture
def world():
    """A World whose commands and files are not the tester's."""
    made = sf.World()
    made.environ = clean_environment(HOME="/nowhere")
    return made


def ask_who_serves(world, fleet):
    return sf.who_serves(world, fleet, KEY, world.clock() + 5)


# -- the gateway proves that it knows the key --

@pytest.fixture
def serve(world):
    """Start a gateway of ours for a fleet, on a port that is free; gives the fleet with it."""
    running = []

    def start(fleet, key=KEY):
        listener = world.listen(fleet.gateway.host, 0)
        fleet = replace(fleet, gateway=replace(fleet.gateway, port=listener.port))
        server = sf.Server(fleet, key, world)
        thread = threading.Thread(target=server.run, args=(listener,), daemon=True)
        thread.start()
        running.append((server, thread))
        return fleet
    yield start
    for server, thread in running:
        server.stop("test")
        thread.join(5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::ffff:7f00:1"])
def test_a_gateway_that_knows_the_key_is_recognised(world, serve, host):
    fleet = serve(fleet_at(1, host=host))
    assert ask_who_serves(world, fleet) == sf.OUR_GATEWAY
    assert sf.ask_gateway(world, fleet, KEY)["mini"]["requests"] == 0


def test_a_page_of_another_version_is_read_as_far_as_it_is_known(world, serve, monkeypatch):
    fleet = serve(fleet_at(1))
    page = {"fleet": fleet.name, "config": sf.fleet_digest(fleet), "waiting": "few",
            "nodes": [{"name": "mini", "requests": 3, "failures": None}, 7, {"requests": 1}],
            "models": [{"route": "x"}, {"route": "m", "running": 1, "slots": 2, "more": 5}]}
    monkeypatch.setattr(sf, "get_page_with_key", lambda *words: page)
    served = sf.ask_gateway(world, fleet, KEY)
    assert list(served) == ["mini"] and served["mini"]["requests"] == 3
    view = sf.see_gateway(world, fleet, KEY, world.clock() + 3)
    assert view.holder == sf.OUR_GATEWAY and view.page.waiting == 0
    assert [(model.route, model.slots) for model in view.page.models] == [("m", 2)]


def test_a_gateway_with_another_key_is_not_shown_this_one(world, serve, monkeypatch):
    fleet = serve(fleet_at(1), key="sk-another-0123456789abcdef")
    shown = []
    monkeypatch.setattr(sf, "get_page_with_key", lambda *words: shown.append(words) or {})
    assert ask_who_serves(world, fleet) == "subagent-fleet" and shown == []


@pytest.mark.parametrize("proof", [None, {}, [], {"proof": None}, {"proof": "0" * 64},
                                   {"proof": "é"}, b"\xff", b'{"proof": ' * 3000])
@pytest.mark.parametrize("name, providers", [
    ("subagent-fleet", ("builtin", "litellm")), ("I'm alive!", ("builtin",))])
def test_who_only_says_a_name_hears_no_key(world, proof, name, providers):
    thief = Listener(lambda path: proof if "prove" in path else {"name": name})
    for provider in providers:
        fleet = fleet_at(thief.port, provider=provider)
        assert ask_who_serves(world, fleet) not in (sf.OUR_GATEWAY, sf.OLD_GATEWAY, "")
        assert sf.ask_gateway(world, fleet, KEY) == {}
    thief.close()
    assert len(thief.paths) >= 2 and KEY.encode() not in thief.heard


def test_a_proof_that_was_relayed_from_another_port_is_none(world, serve):
    fleet = serve(fleet_at(1))

    def relay(path):
        url = sf.gateway_url(fleet.gateway) + path
        return bytes(sf.get_page(sf.World(), url, sf.World().clock() + 5).body)

    assert sf._knows_key(world, fleet, KEY, world.clock() + 5)
    thief = Listener(relay)
    there = replace(fleet, gateway=replace(fleet.gateway, port=thief.port))
    assert ask_who_serves(world, there) == "subagent-fleet"
    thief.close()
    assert [path[:7] for path in thief.paths] == ["/", "/prove/"]
    assert KEY.encode() not in thief.heard


def test_a_nonce_is_asked_for_once_only(world):
    thief = Listener(lambda path: {"name": "subagent-fleet"})
    for _ in range(3):
        ask_who_serves(world, fleet_at(thief.port))
    thief.close()
    nonces = [path for path in thief.paths if path.startswith("/prove/")]
    assert len(set(nonces)) == len(nonces) == 3 and {len(path) for path in nonces} == {71}


@pytest.mark.parametrize("path, status", [
    ("/prove/" + "0" * 64, 200), ("/prove/", 404), ("/prove/" + "0" * 63, 404),
    ("/prove/" + "0" * 65, 404), ("/prove/" + "G" * 64, 404), ("/prove", 401),
    ("/fleet", 401), ("/v1/models", 401)])
def test_only_the_proof_is_open(world, serve, path, status):
    fleet = serve(fleet_at(1))
    reply = sf.get_page(world, sf.gateway_url(fleet.gateway) + path, world.clock() + 5)
    assert reply.status == status and KEY.encode() not in bytes(reply.body)


def test_an_address_has_one_plain_form():
    plain = {"::ffff:7f00:1": "127.0.0.1", "[::FFFF:127.0.0.1]": "127.0.0.1", "::1": "::1",
             "0:0:0:0:0:0:0:1": "::1", "fe80::1%en0": "fe80::1", "Studio.local": "studio.local",
             "fd7a:115c:a1e0::0:1": "fd7a:115c:a1e0::1", ":::": ":::"}
    assert {host: sf.plain_address(host) for host in plain} == plain
    assert sf.is_loopback("::ffff:7f00:1") and sf.is_loopback("LOCALHOST.")
    assert not sf.is_loopback("::ffff:808:808") and not sf.is_loopback("127.0.0.1.example")


def test_here_is_what_can_be_bound(world):
    name, addresses = world.own_names()
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "0.0.0.0", "::ffff:7f00:1", name,
                 *addresses):
        assert sf.is_here(world, host), host
    for host in ("192.0.2.7", "8.8.8.8", "::ffff:808:808", "2001:db8::1", "evil.example",
                 "localhost.evil.example"):
        assert not sf.is_here(world, host), host


def test_a_gateway_elsewhere_is_not_even_asked(world, monkeypatch):
    monkeypatch.setattr(world, "open_exchange", lambda *words, **more: pytest.fail("it was"))
    fleet = fleet_at(4000, host="192.0.2.7")
    assert ask_who_serves(world, fleet) == sf.FAR_GATEWAY
    finding = sf.check_gateway(fleet, sf.FAR_GATEWAY)
    assert (finding.slug, finding.level) == ("gateway-elsewhere", "error")
    assert finding.fix == "subagent-fleet trust"


# -- LiteLLM, which can prove nothing --

def test_a_litellm_serves_where_the_fleet_file_says_so_and_is_shown_no_key(world):
    litellm = Listener(lambda path: {} if path == "/" else "I'm alive!")
    assert ask_who_serves(world, fleet_at(litellm.port, provider="litellm")) == sf.OUR_GATEWAY
    assert ask_who_serves(world, fleet_at(litellm.port)) == "another program"
    litellm.close()
    assert KEY.encode() not in litellm.heard


# -- which key is used --

@pytest.fixture
def workspace(tmp_path, world):
    """A directory in which a fleet was generated, as `generate` and `find_key` see it."""
    made = sf.Workspace(world, str(tmp_path))
    made.write(made.compare(fleet_at(4000)))
    return made


def refusal_of(workspace):
    with pytest.raises(sf.FleetError) as caught:
        workspace.find_key(fleet_at(4000))
    assert caught.value.status == 3
    return caught.value


def commit_all(directory):
    for words in (["init", "-q"], ["add", "-f", "."]):
        subprocess.run(["git", "-C", str(directory), *words], check=True)


def loosen(directory):
    (directory / ".env.subagent-fleet").chmod(0o640)


def give_away(directory):
    os.chown(str(directory / ".env.subagent-fleet"), 65534, 65534)


NEEDS_ROOT = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0,
                                reason="root alone can give a file away")


@pytest.mark.parametrize("expose, why", [
    (commit_all, "git tracks it"), (loosen, "other users can read it"),
    pytest.param(give_away, "it belongs to another user", marks=NEEDS_ROOT)])
def test_a_key_that_others_may_know_is_not_used_and_is_renewed(workspace, tmp_path, expose, why):
    fleet, before = fleet_at(4000), workspace.find_key(fleet_at(4000))
    expose(tmp_path)
    error = refusal_of(workspace)
    path = tmp_path / ".env.subagent-fleet"
    assert (error.slug, error.what) == (
        "known-key", f"the key in {path} is not used: {why}")
    assert error.fix.endswith(f"rm {path}; subagent-fleet generate")
    workspace.world.environ["LITELLM_MASTER_KEY"] = KEY
    assert workspace.find_key(fleet) == KEY
    del workspace.world.environ["LITELLM_MASTER_KEY"]
    workspace.write(workspace.compare(fleet, renews=True))
    assert workspace.kept_key(fleet) not in ("", before)
    subprocess.run(error.fix.rpartition("; ")[0], shell=True, check=True, cwd=str(tmp_path),
                   stdout=subprocess.DEVNULL)
    workspace.write(workspace.compare(fleet))
    assert workspace.find_key(fleet) not in ("", before)


def test_a_key_that_git_only_ignores_or_does_not_know_is_used(workspace, tmp_path):
    before = workspace.find_key(fleet_at(4000))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert workspace.find_key(fleet_at(4000)) == before
    assert sf.find_leaks(workspace.world, str(tmp_path / ".env.subagent-fleet")) == ()


@pytest.mark.parametrize("key", ["two words", "tab\t", "schl\u00fcssel", "\x7f", "a\n", "\x00"])
def test_a_key_that_no_header_holds_is_refused_where_it_is_read(workspace, key):
    workspace.world.environ["LITELLM_MASTER_KEY"] = key
    error = refusal_of(workspace)
    assert (error.slug, error.fix) == ("bad-key", "unset LITELLM_MASTER_KEY")
    assert "$LITELLM_MASTER_KEY holds more than printable ASCII" in error.what


def test_a_key_of_the_file_is_looked_at_as_well(workspace, tmp_path):
    path = tmp_path / ".env.subagent-fleet"
    path.write_text("LITELLM_MASTER_KEY='schl\u00fcssel-0123456789'\n", encoding="utf-8")
    assert refusal_of(workspace).slug == "bad-key"


@pytest.mark.parametrize("words", [["env"], ["serve"], ["launch", "claude"], ["status"], ["doctor"]])
def test_a_bad_key_is_no_bug_of_any_command(fleet, quick, words, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "claude").write_text("#!/bin/sh\n")
    (programs / "claude").chmod(0o755)
    done = quick(*words, *(["--timeout", "0.2"] if words[0] in ("status", "doctor") else []), env={
        "LITELLM_MASTER_KEY": "two words and more", "PATH": f"{programs}:/usr/bin:/bin"})
    assert "bug" not in done.stderr
    if words[0] not in ("status", "doctor"):
        assert done.returncode == 3 and done.stderr.count("error: ") == 1


# -- programs --

@pytest.mark.parametrize("places", [".", "", "bin", "./bin", ":"])
@pytest.mark.skipif(os.name != "posix", reason="scripts stand in for programs")
def test_a_program_of_the_directory_is_not_found_by_its_name(world, tmp_path, monkeypatch, places):
    for place in (tmp_path, tmp_path / "bin"):
        place.mkdir(exist_ok=True)
        for name in ("git", "litellm"):
            (place / name).write_text("#!/bin/sh\ntouch ran\n")
            (place / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    world.environ["PATH"] = places
    assert world.which("litellm") is None and world.which("./litellm") == "./litellm"
    assert world.run_git(["status"], ".").code == 127
    assert not (tmp_path / "ran").exists()
    world.environ["PATH"] += f":{tmp_path}/bin"
    assert world.which("litellm") == f"{tmp_path}/bin/litellm"


# -- what is asked before it goes out --

def hosts_of(fleet):
    return {stake.fact for stake in sf.plan_stakes(fleet)}


@pytest.mark.parametrize("host", [
    "127.0.0.1", "localhost", "10.1.2.3", "172.31.0.1", "192.168.1.50", "169.254.9.9",
    "100.64.0.1", "100.127.255.254", "[::1]", "[fd7a:115c:a1e0::1]", "[fe80::1%25en0]", "studio",
    "[::ffff:c0a8:105]", "studio.local", "mini.lan", "mini.local.", "a.b.home.arpa", "Mini.Home",
    "mini-2", "x0x8.lan"])
def test_what_is_at_home_is_never_at_stake(host):
    assert sf.is_private(sf.split_endpoint(f"http://{host}:1").host)


@pytest.mark.parametrize("host", [
    "8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.2.7", "0x08080808", "8.8.0x808", "evil.example",
    "studio.local.example", "[2001:db8::1]", "[::ffff:808:808]", "[64:ff9b::808:808]", "[2002::1]",
    "[::808:808]", "ai.", "evil.ts.net", "local.evil", "01.2.3.4", "10.0.0.1.example", "0x.lan.0x7f"])
def test_what_may_be_anywhere_is_at_stake(host):
    try:
        endpoint = sf.split_endpoint(f"http://{host}:1")
    except sf.FleetError:
        return  # a fleet file cannot say it
    assert not sf.is_private(endpoint.host)


def test_the_stakes_are_told_and_kept_by_their_facts():
    fleet = fleet_at(4000, host="8.8.8.8")
    fleet = replace(fleet, nodes={"n": sf.Node("n", "https://gpu.example:443")}, models={})
    assert [stake.fact for stake in sf.plan_stakes(fleet)] == [
        "gateway http://8.8.8.8:4000", "node https://gpu.example:443"]
    assert sf.plan_stakes(fleet, {"8.8.8.8", "gpu.example"}) == []
    assert sf.plan_stakes(fleet_at(4000, host="192.168.1.9"))  # a key in clear, to whom?
    other = replace(fleet, nodes={"m": sf.Node("m", "https://gpu.example:443")})
    assert hosts_of(other) == hosts_of(fleet)


def test_tailscale_names_are_at_home_where_they_lead_there(world, monkeypatch):
    led = {"mini.tail1.ts.net": ["100.64.0.9"], "funnel.tail1.ts.net": ["1.1.1.1"],
           "both.tail1.ts.net": ["100.64.0.9", "1.1.1.1"], "none.tail1.ts.net": [],
           "evil.example": ["100.64.0.9"]}  # who may say something else the next time
    monkeypatch.setattr(world, "resolve", lambda host, port, until: [
        (0, 0, 0, "", (address, port)) for address in led[host]])
    assert [host for host in led if sf.is_at_home(world, host)] == ["mini.tail1.ts.net"]


FAR = FLEET.replace("PROVIDER", "builtin").replace("HOST", "127.0.0.1").replace(
    "http://192.168.1.50:11434", "https://gpu.example:443")
COMMANDS = (["up"], ["launch", "claude"], ["serve"], ["env"])


@pytest.fixture
def far(tmp_path, quick):
    """Run a command where the fleet has a machine beyond; `far.environ` is its environment."""
    (tmp_path / "project").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/claude").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "bin/claude").chmod(0o755)
    (tmp_path / "project/fleet.yaml").write_text(FAR.replace("PORT", str(free_port())))

    def run(*words, **more):
        return quick(*words, cwd=tmp_path / "project",
                     env={"HOME": tmp_path / "home", "PATH": f"{tmp_path}/bin:/usr/bin:/bin", **more})
    run.config = tmp_path / "project/fleet.yaml"
    run.file = tmp_path / "home/.local/state/subagent-fleet/trusted.json"
    run.quick = quick
    return run


@pytest.mark.parametrize("words", COMMANDS)
def test_off_a_terminal_nothing_goes_beyond_unasked(far, words, monkeypatch):
    monkeypatch.setattr(sf.World, "open_exchange", lambda *words, **more: pytest.fail("it did"))
    before = sorted(path.name for path in far.config.parent.iterdir())
    done = far(*words)
    assert (done.returncode, done.stdout) == (3, "")  # slug "untrusted"
    assert done.stderr == (
        "error: fleet.yaml: prompts and the files agents read go to https://gpu.example:443 (node "
        "mini); you have not agreed to that\n  fix: `subagent-fleet trust`, or add --trust\n")
    assert sorted(path.name for path in far.config.parent.iterdir()) == before
    assert not far.file.exists()


def test_what_was_accepted_is_kept_for_this_file_and_these_facts(far, tmp_path):
    assert far("generate").returncode == 0  # which sends nothing
    assert far("env").returncode == 3
    done = far("trust", "--show")
    assert "new  prompts and the files agents read" in done.stdout and far("env").returncode == 3
    done = far("trust", "--yes")
    assert done.returncode == 0 and "accepted  prompts" in done.stdout
    assert far.file.stat().st_mode & 0o777 == 0o600
    kept = json.loads(far.file.read_text())
    assert list(kept["trusted"]) == [str(far.config.resolve())] and "gpu" not in far.file.read_text()
    assert far("env").returncode == 0 and "accepted  prompts" in far("trust", "--show").stdout

    far.config.write_text(far.config.read_text().replace("planner", "reviewer"))
    assert far("env").returncode == 0  # nothing that was at stake
    text = far.config.read_text()
    far.config.write_text(text.replace("gpu.example", "gpu2.example"))
    assert far("env").returncode == 3
    far.config.write_text(text)
    copy = far.config.with_name("copy.yaml")
    copy.write_text(text)
    assert far("env", "--config", "copy.yaml").returncode == 3
    assert far("trust", "--forget").returncode == 0 and far("env").returncode == 3


def test_off_a_terminal_the_answer_is_no(far):
    assert far("generate").returncode == 0
    for given in (None, b"y\n", b"yes\n"):
        done = far("trust", input=given)
        assert done.returncode == 3, done.stdout
        assert "prompts and the files agents read" in done.stdout and "Accepted" not in done.stdout
        assert not far.file.exists() and far("env").returncode == 3
    assert far("trust").stderr.endswith(
        "  fix: `subagent-fleet trust --yes` accepts it; or change fleet.yaml\n")
    assert "accepted  prompts" in far("trust", "--yes").stdout and far("env").returncode == 0


CLOUD = FLEET.replace("PROVIDER", "builtin").replace("HOST", "127.0.0.1").replace(
    "192.168.1.50", "127.0.0.1").replace(
    "ollama_model: tiny", 'ollama_model: "gpt-oss:120b-cloud", cloud: true')


@pytest.mark.parametrize("words", COMMANDS)
def test_a_model_in_a_cloud_is_at_stake_wherever_it_is_asked_for(far, words, monkeypatch):
    monkeypatch.setattr(sf.World, "open_exchange", lambda *words, **more: pytest.fail("it did"))
    far.config.write_text(CLOUD.replace("PORT", str(free_port())))
    done = far(*words)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "go to the cloud that runs gpt-oss:120b-cloud for http://127.0.0.1:11434" in done.stderr


def test_what_is_accepted_of_a_cloud_is_one_model_of_one_machine(far):
    text = CLOUD.replace("PORT", str(free_port()))
    far.config.write_text(text)
    assert far("generate").returncode == 0 and far("env").returncode == 3
    assert far("trust", "--yes").returncode == 0 and far("env").returncode == 0
    for other in (text.replace("gpt-oss:120b", "deepseek:671b"), text.replace("11434", "11435")):
        far.config.write_text(other)
        assert far("env").returncode == 3
    far.config.write_text(text.replace("gpt-oss:120b-cloud", "gpt-oss:20b").replace(", cloud: true", ""))
    assert far("trust", "--forget").returncode == 0 and far("env").returncode == 0
    # A machine that is at stake itself is asked about once.
    far.config.write_text(text.replace("http://127.0.0.1:11434", "https://gpu.example:443"))
    assert len(far("trust", "--show").stdout.splitlines()) == 2


@pytest.mark.parametrize("redirect, status", [
    ("", 0), ("2>/dev/null", 3), ("</dev/null", 3), (">/dev/null", 0)])
def test_a_question_that_nobody_sees_is_answered_no(far, tmp_path, redirect, status):
    line = f"{sys.executable} -I -S {PROGRAM} trust {redirect}; echo ended $?"
    shown = on_terminal(["-c", line], far.config.parent, b"y\n", program="/bin/sh",
                        HOME=tmp_path / "home")[1]
    assert f"ended {status}\n" in shown and far.file.exists() == (status == 0), shown


@pytest.mark.parametrize("flaw", ["mode", "owner", "text", "shape", "schema"])
def test_a_file_that_another_may_have_written_accepts_nothing(far, flaw):
    far("generate")
    far("trust", "--yes")
    assert far("env").returncode == 0
    if flaw == "mode":
        far.file.chmod(0o666)
    elif flaw == "owner":
        if os.name != "posix" or os.getuid():
            pytest.skip("root alone can give a file away")
        os.chown(str(far.file), 65534, 65534)
    else:
        far.file.write_text({"text": "{", "shape": '{"trusted": {"a": 5}}',
                             "schema": far.file.read_text().replace("trusted/2", "trusted/9")}[flaw])
    assert far("env").returncode == 3
    assert far("env", "--trust").returncode == 0 and far("env").returncode == 0


def test_what_is_added_is_asked_for_unless_it_was_typed(far, fake_node):
    far("generate")
    far("trust", "--yes")
    text = far.config.read_text()
    assert far("add", f"near=127.0.0.1:{fake_node({'qwen3:8b': {}}).port}").returncode == 0
    assert far("env").returncode == 0  # nothing more is at stake
    far.config.write_text(text.replace("nodes: {", 'nodes: {other: {endpoint: "https://other.example"}, '))
    assert far("env").returncode == 3
    assert far("add", f"box=127.0.0.1:{fake_node({'qwen3:8b': {}}).port}").returncode == 0
    assert far("env").returncode == 3  # what was not agreed to is not, whatever is added beside it


def test_the_state_is_kept_where_its_standard_says(far, tmp_path):
    far("generate")
    assert far("trust", "--yes", XDG_STATE_HOME=tmp_path / "state").returncode == 0
    assert (tmp_path / "state/subagent-fleet/trusted.json").exists() and not far.file.exists()
    assert far("env", XDG_STATE_HOME="relative").returncode == 3
    assert far("trust", "--yes", XDG_STATE_HOME="relative").returncode == 0 and far.file.exists()


@pytest.fixture
def homeless(far, tmp_path, monkeypatch):
    """Run a command without HOME, as services do; `homeless.known` is what the system says of it."""
    pwd = pytest.importorskip("pwd")
    for name in ("HOME", "USERPROFILE", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    entry = pwd.getpwuid(os.getuid())

    def look_up(number):
        if run.known is None:
            raise KeyError(number)
        return pwd.struct_passwd((*entry[:5], run.known, entry[6]))

    def run(*words, **more):
        return quick_run(*words, cwd=far.config.parent, env={"PATH": "/usr/bin:/bin", **more})
    quick_run, run.known = far.quick, None
    monkeypatch.setattr(pwd, "getpwuid", look_up)
    return run


@pytest.mark.parametrize("known", [None, "", "relative"])
@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"HOME": "."}, {"HOME": "there", "USERPROFILE": "."}])
def test_without_a_home_nothing_is_kept_or_run_in_the_working_directory(far, homeless, known, home):
    homeless.known = known
    assert far("generate").returncode == 0
    before = sorted(far.config.parent.rglob("*"))
    planted = far.config.parent / ".local/state/subagent-fleet/trusted.json"
    done = homeless("trust", "--yes", **home)
    assert done.returncode == 1 and "cannot write" in done.stderr, done.stderr
    assert done.stderr.endswith(
        "  fix: this user has no home directory; set HOME to a directory that is yours\n")
    assert sorted(far.config.parent.rglob("*")) == before
    # What somebody put there counts for nothing.
    assert far("trust", "--yes").returncode == 0
    planted.parent.mkdir(parents=True)
    planted.write_bytes(far.file.read_bytes())
    planted.chmod(0o600)
    assert far("env").returncode == 0 and homeless("env", **home).returncode == 3
    for words in (("install",), ("skills", "install", "--user")):
        assert homeless(*words, **home).returncode == 1, words
    assert homeless("validate", **home).returncode == 0


def test_without_a_variable_the_home_is_the_one_that_the_system_knows(far, homeless, tmp_path):
    homeless.known = str(tmp_path / "home")
    assert far("generate").returncode == 0
    assert homeless("trust", "--yes").returncode == 0 and far.file.exists()
    assert homeless("env").returncode == far("env").returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="bytecode is kept where exec is")
def test_without_a_home_no_bytecode_of_the_working_directory_is_started(homeless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sf.World().compile_own_source() == ""
    assert not (tmp_path / ".cache").exists()
    homeless.known = str(tmp_path / "home")
    made = sf.World().compile_own_source()
    assert made.startswith(f"{tmp_path}/home/.cache/subagent-fleet/bytecode/")
    (tmp_path / "home/.cache").rename(tmp_path / ".cache")  # as a cloned directory would have it
    homeless.known = None
    assert sf.World().compile_own_source() == ""


def test_what_a_person_types_is_accepted(far, tmp_path, limits):
    far.config.unlink()
    limits(init=0.2)
    assert far("init", "--offline", "--node", "gpu=https://gpu.example:443").returncode == 0
    assert far("generate").returncode == 0 and far("env").returncode == 0
    text = far.config.read_text()
    far.config.write_text(text.replace("gpu.example", "other.example"))
    assert far("env").returncode == 3


TWO_MACS = """\
project: {name: home, gateway: {provider: PROVIDER, port: PORT}}
nodes:
  laptop: {endpoint: "http://localhost:11434"}
  studio: {endpoint: "http://192.168.1.50:11434"}
  mini: {endpoint: "http://Mac-mini.local:11434"}
  far: {endpoint: "http://100.101.102.103:11434"}
models: {m: {node: laptop, ollama_model: tiny, litellm_alias: x, context: 32768}}
agents: {planner: {model: m, description: Plans.}}
"""


@pytest.mark.parametrize("provider", ["builtin", "litellm"])
def test_two_macs_on_a_lan_are_never_asked_anything(far, provider, monkeypatch):
    text = TWO_MACS.replace("PROVIDER", provider).replace("PORT", str(free_port()))
    far.config.write_text(text)
    monkeypatch.setattr(sf.World, "confirm", lambda *words: pytest.fail("it was asked"))
    monkeypatch.setattr(sf, "probe_nodes", lambda world, nodes, *more: {
        name: sf.NodeState(name, node.endpoint, "refused") for name, node in nodes.items()})
    assert far("generate").returncode == 0 and far("env").returncode == 0
    assert "sends nothing outside" in far("trust").stdout and not far.file.exists()
    for words in (["launch", "claude"], ["up"]):
        assert far(*words).returncode == 1  # nobody is there, which is all that is wrong
    fleet = sf.load_fleet(far.config)
    assert sf.plan_stakes(fleet) == sf.find_untrusted(sf.World(), fleet) == []
    assert not far.file.exists()


# -- the key of a node goes nowhere unasked --

NODE_KEY = "sk-or-0123456789abcdef-of-a-person"


@pytest.fixture
def keyed(tmp_path, run_cli):
    """A fleet whose node wants a key, and what was heard there; commands run with that key."""
    node = Listener(lambda path: {"/api/version": {"version": "0.32.15"},
                                  "/api/tags": {"models": [{"name": "tiny:latest"}]},
                                  "/api/ps": {"models": []}}.get(path))
    (tmp_path / "fleet.yaml").write_text(f"""\
project: {{name: shop, gateway: {{port: {free_port()}}}}}
nodes: {{mini: {{endpoint: "http://127.0.0.1:{node.port}", api_key_env: SHOP_API_KEY}}}}
models: {{m: {{node: mini, model: tiny, alias: x, context: 32768}}}}
agents: {{planner: {{model: m, description: Plans.}}}}
""")
    home = tmp_path / "home"
    home.mkdir()

    def run(*words, **env):
        return run_cli(*words, env={"HOME": str(home), "SHOP_API_KEY": NODE_KEY, **env})
    run.node, run.directory = node, tmp_path
    yield run
    node.close()


@pytest.mark.parametrize("words", [
    ["status"], ["discover"], ["doctor"], ["warmup"], ["validate"], ["generate"]])
def test_the_key_of_a_node_is_not_sent_before_it_is_accepted(keyed, words):
    said = keyed(*words)
    assert NODE_KEY.encode() not in keyed.node.heard
    assert NODE_KEY not in said.stdout + said.stderr
    if words == ["discover"]:
        assert "not trusted: its key, SHOP_API_KEY, is not trusted to go there yet" in said.stdout


def test_the_key_of_a_node_is_sent_once_it_is_accepted_and_is_written_nowhere(keyed):
    asked = keyed("env")
    assert asked.returncode == 3 and "the key in SHOP_API_KEY goes to" in asked.stderr
    assert keyed("trust", "--yes").returncode == 0
    said = [keyed(*words) for words in (["discover"], ["status", "--json"], ["generate"],
                                        ["doctor", "--json"], ["trust", "--show"])]
    assert b"Authorization: Bearer " + NODE_KEY.encode() in keyed.node.heard
    assert "tiny:latest" in said[0].stdout
    assert not [one for one in said if NODE_KEY in one.stdout + one.stderr]
    files = [path for path in keyed.directory.rglob("*") if path.is_file()]
    assert len(files) > 4 and not [one for one in files if NODE_KEY.encode() in one.read_bytes()]

    text = (keyed.directory / "fleet.yaml").read_text()
    (keyed.directory / "fleet.yaml").write_text(text.replace("SHOP_API_KEY", "OTHER_API_KEY"))
    before = keyed.node.heard.count(b"Authorization")
    assert "not trusted" in keyed("discover", OTHER_API_KEY=NODE_KEY).stdout
    assert keyed.node.heard.count(b"Authorization") == before


@pytest.mark.parametrize("key, why", [("", "SHOP_API_KEY is not set"),
                                      ("a b", "SHOP_API_KEY does not hold a key"),
                                      ("ä", "SHOP_API_KEY does not hold a key")])
def test_a_node_without_its_key_is_not_asked(keyed, key, why):
    assert keyed("trust", "--yes").returncode == 0
    said = keyed("discover", SHOP_API_KEY=key)
    assert f"no key: it needs a key, but {why}" in said.stdout or f"no key: {why}" in said.stdout
    assert keyed.node.heard == b""
