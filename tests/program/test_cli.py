"""The command line as a black box."""
import errno
import json
import os
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

import subagent_fleet as sf
from tools import EXAMPLE, PROGRAM, ROOT, SCRIPT, clean_environment, edited

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {name: topic.page() for name, topic in sf.TOPICS.items()}


@pytest.fixture
def fleet_file(tmp_path):
    """A valid fleet.yaml in the working directory."""
    path = tmp_path / "fleet.yaml"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


# -- validate --

def test_validate_says_the_literal_line(run_cli, fleet_file):
    done = run_cli("validate")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fleet.yaml is valid.\n", "")


def test_validate_keeps_the_wording_and_adds_position_caret_and_fix(run_cli, fleet_file):
    fleet_file.write_text(edited(("node: mini", "node: mni")), encoding="utf-8")
    done = run_cli("validate")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "Invalid fleet.yaml:\n"
        "  models.heavy-coder.node references unknown node: mni\n"
        "    at fleet.yaml:15:11\n"
        "     15 |     node: mni\n"
        "        |           ^^^\n"
        "    fix: did you mean `mini`?\n")


def test_the_only_model_is_no_fallback_of_itself(run_cli, fleet_file):
    fleet_file.write_text(
        "project: {name: p}\nnodes: {n: {endpoint: 'http://127.0.0.1:9'}}\n"
        "models: {big: {node: n, ollama_model: 'm:1b', litellm_alias: a, fallback: [bog]}}\n"
        "agents: {}\n", encoding="utf-8")
    told = run_cli("validate").stderr
    assert "references unknown model: bog" in told and "fix: remove it\n" in told


def test_validate_reports_syntax_under_the_same_heading(run_cli, fleet_file):
    fleet_file.write_text("project: &a x\n", encoding="utf-8")
    done = run_cli("validate")
    assert done.returncode == 1
    assert done.stderr.startswith("Invalid fleet.yaml:\n  ") and "fleet.yaml:1:10" in done.stderr
    assert "anchor" in done.stderr


@pytest.mark.parametrize("flags, status", [((), 0), (("--strict",), 1)])
def test_warnings_stop_only_when_strict(run_cli, fleet_file, flags, status):
    fleet_file.write_text(edited(("host: 127.0.0.1", "host: 0.0.0.0")), encoding="utf-8")
    done = run_cli("validate", *flags)
    assert done.returncode == status
    assert "warning: fleet.yaml:5:11: project.gateway.host" in done.stderr
    assert done.stdout == ("" if status else "fleet.yaml is valid.\n")
    assert ("leave out --strict" in done.stderr) == bool(status)


def test_generate_counts_the_warnings_that_validate_shows(run_cli, fleet_file):
    fleet_file.write_text(edited(("host: 127.0.0.1", "host: 0.0.0.0")), encoding="utf-8")
    done = run_cli("generate")
    assert "1 warning: `subagent-fleet validate`\n" in done.stderr and "warning:" not in (
        done.stderr.replace("1 warning:", "")) and done.returncode == 0


@pytest.mark.parametrize("change, flags, status, slugs", [
    (("port: 4000", "port: 4000"), (), 0, []),
    (("host: 127.0.0.1", "host: 0.0.0.0"), (), 0, ["exposed-gateway"]),
    (("host: 127.0.0.1", "host: 0.0.0.0"), ("--strict",), 1, ["exposed-gateway"]),
    (("node: mini", "node: mni"), (), 1, ["unknown-node"]),
    (("node: mini", "node: &x mini"), (), 1, None),
])
def test_validate_json_is_one_object(run_cli, fleet_file, change, flags, status, slugs):
    fleet_file.write_text(edited(change), encoding="utf-8")
    done = run_cli("validate", "--json", *flags)
    found = json.loads(done.stdout)
    assert done.returncode == status and done.stderr == ""
    assert found["schema"] == "subagent-fleet/validate/1" and found["file"] == "fleet.yaml"
    assert found["valid"] is (status == 0)
    if slugs is not None:
        assert [f["id"] for f in found["findings"]] == slugs
    for finding in found["findings"]:
        assert set(finding) == {"id", "level", "what", "where", "fix"}


def test_validate_reads_standard_input(run_cli):
    done = run_cli("validate", "--config", "-", input=EXAMPLE.encode())
    assert (done.returncode, done.stdout) == (0, "<stdin> is valid.\n")
    done = run_cli("validate", "--config", "-", input=b"{")
    assert done.returncode == 1 and done.stderr.startswith("Invalid <stdin>:")


def test_json_config_has_positions_too(run_cli, tmp_path):
    (tmp_path / "fleet.json").write_text('{"project": {\n  "nam": "x"}}', encoding="utf-8")
    done = run_cli("validate")
    assert done.returncode == 1 and "fleet.json:2:3" in done.stderr and "^^^^^" in done.stderr


# -- where the config is looked for --

def test_nearest_config_up_to_the_git_root(run_cli, tmp_path):
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    deep = tmp_path / "repo" / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "fleet.yaml").write_text(EXAMPLE, encoding="utf-8")
    done = run_cli("validate", cwd=deep)
    assert done.returncode == 1 and "no fleet.yaml" in done.stderr and "init" in done.stderr
    (tmp_path / "repo" / "fleet.yml").write_text(EXAMPLE, encoding="utf-8")
    done = run_cli("validate", cwd=deep)
    assert done.stdout == f"{os.path.join('..', '..', 'fleet.yml')} is valid.\n"
    (tmp_path / "repo" / "a" / "fleet.json").write_text("{}", encoding="utf-8")
    assert "Invalid ../fleet.json" in run_cli("validate", cwd=deep).stderr


def test_variable_names_the_config_and_the_flag_beats_it(run_cli, tmp_path):
    (tmp_path / "one.yaml").write_text(EXAMPLE, encoding="utf-8")
    env = {"SUBAGENT_FLEET_CONFIG": "one.yaml"}
    assert run_cli("validate", env=env).stdout == "one.yaml is valid.\n"
    done = run_cli("validate", "--config", "two.yaml", env=env)
    assert done.returncode == 1 and "two.yaml" in done.stderr


# -- any bytes as config --

HOSTILE = {
    "binary": bytes(range(256)) * 40,
    "utf-16": EXAMPLE.encode("utf-16"),
    "utf-16 without mark": EXAMPLE.encode("utf-16-le"),
    "latin-1": EXAMPLE.replace("planning", "Plänung").encode("latin-1"),
    "nul": EXAMPLE.encode() + b"\0",
    "lone cr": EXAMPLE.replace("\n", "\r").encode() + b"x",
    "deep": b"[" * 10000,
    "deep block": b"".join(b" " * i + b"a:\n" for i in range(2000)),
    "deep compact": b"- " * 10000,
    "one line": b"a: " + b"x" * 900_000,
    "one flow line": b"{" + b"a, " * 300_000,
    "quotes": b"'" * 900_001,
    "escape": b"project: \"\x1b[31m",
    "tabs": b"\t" * 100_000,
    "hashes": b"#" * 900_000,
    "empty": b"",
    "many keys": b"{" + b", ".join(b"k%d: 1" % i for i in range(80_000)) + b"}",
    "many nodes": b"nodes: {" + b", ".join(b"k%d: 1" % i for i in range(80_000)) + b"}",
    "elf": b"\x7fELF" + b"\0" * 1000,
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_any_bytes_get_one_message(run_cli, tmp_path, name):
    (tmp_path / "fleet.yaml").write_bytes(HOSTILE[name])
    done = run_cli("validate")
    assert done.returncode == 1 and done.stdout == ""
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stderr)
    assert len(done.stderr) < (60_000 if "many" in name else 4000)
    assert ("and more; fix these first" in done.stderr) == ("many" in name)


@pytest.mark.parametrize("text", [EXAMPLE.replace("\n", "\r\n"), "\ufeff" + EXAMPLE,
                                  EXAMPLE.replace("local-dev", "Küche 🏠")])
def test_other_ways_to_save_the_same_text_are_fine(run_process, tmp_path, text):
    (tmp_path / "fleet.yaml").write_bytes(text.encode("utf-8"))
    assert run_process("validate", env={"LC_ALL": "C"}).stdout == "fleet.yaml is valid.\n"


def limit_memory():
    """At most 60 MB of data, as the kernel measures it; compiling the file is not in it."""
    resource.setrlimit(resource.RLIMIT_DATA, (60 << 20, 60 << 20))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")
@pytest.mark.parametrize("name", ["deep", "one line", "one flow line", "huge", "quotes"])
def test_any_bytes_take_little_memory(tmp_path, name):
    path = tmp_path / "fleet.yaml"
    if name == "huge":
        with open(path, "wb") as stream:
            stream.truncate(100 << 20)
    else:
        path.write_bytes(HOSTILE[name])
    # Compiled before: what Python takes for that is not what the text costs.
    done = subprocess.run([sys.executable, "-I", "-S", "-W", "error", PROGRAM, "validate"],
                          cwd=str(tmp_path), stderr=subprocess.PIPE, preexec_fn=limit_memory,
                          timeout=20)
    assert done.returncode == 1 and b"MemoryError" not in done.stderr


@pytest.mark.parametrize("make, slug", [
    (lambda path: path.write_bytes(b"\xff\xfea"), "not-utf8"),
    (lambda path: path.write_bytes(b"a: \xff"), "not-utf8"),
    (lambda path: path.mkdir(), "not-file"),
    (lambda path: path.write_bytes(b" " * (sf.TEXT_LIMIT_BYTES + 1)), "too-large"),
    (lambda path: path.write_bytes(b"a: *x"), "invalid-config"),
    (lambda path: None, "unreadable"),
])
def test_each_refusal_has_its_slug(tmp_path, make, slug):
    make(tmp_path / "fleet.yaml")
    with pytest.raises(sf.FleetError) as caught:
        sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert caught.value.slug == slug and caught.value.status == 1


@pytest.mark.parametrize("words, slug, status", [
    (["validat"], "unknown-command", 2), (["schema", "--x"], "usage", 2),
    (["completion"], "usage", 2), (["validate", "--strict"], "strict", 1),
    (["init", "--offline"], "exists", 3), (["init", "--offline", "--output", "fleet.yaml/x"],
                                           "unwritable", 1),
])
def test_each_usage_error_has_its_slug(tmp_path, monkeypatch, words, slug, status):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(
        edited(("host: 127.0.0.1", "host: 0.0.0.0")), encoding="utf-8")
    with pytest.raises(sf.FleetError) as caught:
        call = sf.read_call(words)
        call.command.run(call.options, sf.World())
    assert (caught.value.slug, caught.value.status) == (slug, status)


def test_what_the_world_lacks_has_its_slug(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    with pytest.raises(sf.FleetError) as caught:
        sf.load_config(sf.World(), None)
    assert caught.value.slug == "no-config" and "subagent-fleet init" in caught.value.fix
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(sf.FleetError) as caught:
        sf.load_config(sf.World(), None)
    assert caught.value.slug == "no-directory"


def test_a_fleet_file_that_is_not_there_is_said_with_the_one_that_is(run_cli, tmp_path):
    done = run_cli("status", "--config", "fleet.yml")
    assert done.returncode == 1 and done.stderr.endswith("fix: check it: `ls -la .`\n")
    (tmp_path / "fleet.yaml").write_text(EXAMPLE, encoding="utf-8")
    done = run_cli("status", "--config", "fleet.yml")
    assert done.stderr == ("error: cannot read fleet.yml: No such file or directory\n"
                           "  fix: leave out `--config`: fleet.yaml is here\n")


@pytest.mark.parametrize("typed, meant", [("rnus", "runs"), ("trases", "traces"), ("lanch", "launch")])
def test_help_knows_the_nearest_topic_or_command(run_cli, typed, meant):
    done = run_cli("help", typed)
    assert done.stderr == (f"error: help: no command or topic `{typed}`\n"
                           f"  fix: did you mean `{meant}`?\n") and done.returncode == 2
    done = run_cli("help", "xyzzy")
    assert done.stderr == "error: help: no command or topic `xyzzy`\n  fix: subagent-fleet --help\n"


@pytest.mark.parametrize("code, fix", [(errno.ENOSPC, "`df -h .`"), (errno.EROFS, "read-only"),
                                       (errno.EACCES, "ls -la")])
def test_a_disk_that_takes_nothing_is_told_with_what_helps(monkeypatch, run_cli, code, fix):
    real = os.open

    def refuse(path, flags, *words, **more):
        if flags & os.O_CREAT and not str(path).startswith("/dev/"):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *words, **more)
    monkeypatch.setattr(os, "open", refuse)
    done = run_cli("init", "--offline")
    assert done.returncode == 1 and fix in done.stderr.partition("fix:")[2]


class Full:
    """A standard output on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")

    def fileno(self):
        return os.open(os.devnull, os.O_WRONLY)


def test_a_full_disk_has_its_slug(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(sf.FleetError) as caught:
        sf.World().out("x")
    assert caught.value.slug == "output"


def test_what_is_not_a_file_is_named(run_cli, tmp_path):
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, word in (("d", "directory"), ("pipe", "pipe"), ("absent", "No such file")):
        done = run_cli("validate", "--config", name)
        assert done.returncode == 1 and word in done.stderr and name in done.stderr
    done = run_cli("validate", "--config", "no dir/x/y.yaml")
    assert done.stderr.endswith("No such file or directory\n  fix: check it: `ls -la .`\n")
    done = run_cli("validate", "--config", "../nope/fleet.yaml")
    assert done.stderr.endswith("No such file or directory\n  fix: check it: `ls -la ..`\n")
    (tmp_path / "no dir").mkdir()
    done = run_cli("validate", "--config", "no dir/x")
    assert done.stderr.endswith("  fix: check it: `ls -la 'no dir'`\n")
    done = run_cli("validate", "--config", "/dev/null/x")
    assert done.returncode == 1 and "cannot read" in done.stderr
    done = run_cli("validate", "--config", "")
    assert done.returncode == 1


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_config_is_named(run_cli, fleet_file):
    fleet_file.chmod(0)
    done = run_cli("validate")
    assert done.returncode == 1 and "Permission denied" in done.stderr


@pytest.mark.parametrize("key, columns", [("abcd", 4), ("\u540d\u524d", 4), ("e\u0301a\u0308", 2)])
def test_the_caret_stands_below_what_it_means_in_columns(run_cli, tmp_path, key, columns):
    (tmp_path / "fleet.yaml").write_text(f"{key}: &x\n", encoding="utf-8")
    lines = run_cli("validate").stderr.splitlines()
    line, caret = (row.partition(" | ") for row in lines if " | " in row)
    assert (line[2], caret[2]) == (f"{key}: &x", f"{' ' * (columns + 2)}^"), lines


def test_control_characters_never_reach_the_terminal(run_cli, tmp_path):
    name = "a\x1b[31m\u202eb.yaml"
    (tmp_path / name).write_text(EXAMPLE.replace("  mini:", '  "m\\e[2J\\u202Ei":'),
                                 encoding="utf-8")
    (tmp_path / "fleet.yaml").write_text(EXAMPLE, encoding="utf-8")
    for words in (("validate", "--config", name), ("validate", "--config", "x\x1b[0m"),
                  ("x\x1b[0m",), ("validate", "--x\x1b[0m"), ("init", "--output", "y", "--node", "\x1b[0m"),
                  ("init", "--offline", "--output", "o\x1b]0;x\x07.yaml"),
                  ("generate", "--out", "o\x1b[2J")):
        done = run_cli(*words)
        assert done.returncode in ((0,) if "o\x1b" in words[-1] else (1, 2))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.stdout + done.stderr)


# -- how it is started --

@pytest.mark.slow
def test_runs_piped_through_python(run_cli, fleet_file, tmp_path):
    done = subprocess.run([sys.executable, "-", "validate", "--config", "fleet.yaml"],
                          input=SCRIPT.read_bytes(), stdout=subprocess.PIPE, cwd=str(tmp_path),
                          env=clean_environment())
    assert (done.returncode, done.stdout) == (0, b"fleet.yaml is valid.\n")


def test_an_old_python_shows_the_sentence():
    """Its parser stops at the first line that it cannot read, and shows that line."""
    lines = SCRIPT.read_text(encoding="utf-8").split("\n")
    sentence = next(index for index, line in enumerate(lines) if "needs Python 3.9" in line)
    assert lines[sentence].lstrip().startswith('sys.exit(f"')
    above = "\n".join(lines[:sentence])
    assert above.isascii()
    code = above.split('"""')[-1]  # behind the docstring
    assert code.split("\n")[1:5] == ["from __future__ import annotations", "", "import sys", ""]
    assert [line.split("#")[0].strip() for line in code.split("\n")[5:]] == [
        "if sys.version_info < (3, 9):", ""]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_runs_as_a_script_from_a_read_only_directory(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    shutil.copy(str(SCRIPT), str(place / "subagent_fleet.py"))
    (place / "subagent_fleet.py").chmod(0o755)
    (place / "fleet.yaml").write_text(EXAMPLE, encoding="utf-8")
    place.chmod(0o555)
    try:
        environment = clean_environment(PATH=os.path.dirname(sys.executable) + ":/usr/bin:/bin",
                                        LC_ALL="C", NO_COLOR="1")
        done = subprocess.run(["./subagent_fleet.py", "validate"], cwd=str(place),
                              capture_output=True, env=environment)
    finally:
        place.chmod(0o755)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"fleet.yaml is valid.\n", b"")
    assert sorted(os.listdir(str(place))) == ["fleet.yaml", "subagent_fleet.py"]


@pytest.mark.slow
def test_runs_as_a_module(fleet_file, tmp_path):
    done = subprocess.run([sys.executable, "-m", "subagent_fleet", "validate"], cwd=str(tmp_path),
                          stdout=subprocess.PIPE, env=clean_environment(PYTHONPATH=ROOT))
    assert done.stdout == b"fleet.yaml is valid.\n"


def test_a_vanished_working_directory_is_named(tmp_path):
    place = tmp_path / "gone"
    for words in ("validate", "generate"):
        place.mkdir(exist_ok=True)
        program = f"cd {place} && rmdir {place} && exec {sys.executable} {PROGRAM} {words}"
        done = subprocess.run(["sh", "-c", program], capture_output=True, env=clean_environment())
        assert done.returncode == 1 and b"Traceback" not in done.stderr
        assert b"the working directory no longer exists" in done.stderr


def test_closed_output_is_no_traceback(fleet_file, tmp_path):
    for redirect in ("| true", ">&-", "2>&- >&-"):
        done = subprocess.run(["sh", "-c", f"{sys.executable} {PROGRAM} schema {redirect}"],
                              stderr=subprocess.PIPE, cwd=str(tmp_path), env=clean_environment())
        assert b"Traceback" not in done.stderr, redirect


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_under_the_output_is_an_error(tmp_path):
    for words in ("schema", "--version"):
        done = subprocess.run(f"{sys.executable} {PROGRAM} {words} > /dev/full", shell=True,
                              stderr=subprocess.PIPE, cwd=str(tmp_path), env=clean_environment())
        assert done.returncode == 1 and b"No space left" in done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_under_hints_and_progress_stops_nothing(tmp_path, fleet_file):
    done = subprocess.run(f"{sys.executable} {PROGRAM} logs --json 2> /dev/full && "
                          f"{sys.executable} {PROGRAM} logs 2> /dev/full", shell=True,
                          cwd=str(tmp_path), env=clean_environment())
    assert done.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_interrupt_is_one_line_and_130(tmp_path):
    program = ("import sys, subagent_fleet as sf\n"
               "class World(sf.World):\n"
               "    def read_bytes(self, *given, **more):\n"
               "        self.out('reading\\n')\n"
               "        return super().read_bytes(*given, **more)\n"
               "sys.exit(sf.main(['validate', '--config', '-'], World()))\n")
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=str(tmp_path),
                               env=clean_environment(PYTHONPATH=ROOT))
    assert process.stdout.readline() == b"reading\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130 and stdout == b""
    assert stderr.strip() == b"interrupted"


def test_a_bug_names_the_part_where_it_arose(tmp_path):
    source = SCRIPT.read_text(encoding="utf-8")
    broken = source.replace("def render_schema() ->", "def render_schema(needs: int) ->")
    assert broken != source
    file = tmp_path / "broken.py"
    file.write_text(broken, encoding="utf-8")
    done = subprocess.run([sys.executable, "-I", str(file), "schema"], capture_output=True, text=True)
    assert done.returncode == 1 and "a bug in src/fleet/commands/schema.py; please" in done.stderr


def test_a_bug_names_the_version_and_where_to_report(capsys):
    class Broken(sf.World):
        def write(self, text):
            raise RuntimeError("boom")

    assert sf.main(["schema"], Broken()) == 1
    talk = capsys.readouterr().err
    assert sf.__version__ in talk and "RuntimeError: boom" in talk and sf.HOME_URL in talk


# -- words --

def test_version(run_cli):
    for word in ("--version", "-V"):
        assert run_cli(word).stdout == f"subagent-fleet {sf.__version__}\n"


def test_another_name_of_a_command_is_named_in_json_as_the_command(run_cli):
    found = json.loads(run_cli("benchmark", "--nope", "--json").stdout)
    assert found["schema"] == "subagent-fleet/bench/1"


def test_words_behind_a_flag_count(run_cli):
    call = sf.read_call(["run", "a:x", "--check", "true", "b:y", "--priority", "-5"])
    assert call.options.words == ["a:x", "b:y"] and call.options.priority == -5
    assert sf.read_call(["task", "say", "a", "--", "-v is", "--odd"]).options.words == ["-v is", "--odd"]
    for words in (["run", "a:x", "--nope", "b:y"], ["task", "diff", "a", "--stat", "b"]):
        with pytest.raises(sf.FleetError) as caught:
            sf.read_call(words)
        assert "unknown argument" in caught.value.what


@pytest.mark.parametrize("command, takes_stdin", [("add", False), ("up", False), ("validate", True)])
def test_help_offers_stdin_where_it_is_read(run_cli, command, takes_stdin):
    words = ["add", "mini=10.0.0.5"] if command == "add" else [command]
    done = run_cli(*words, "--config", "-", input=EXAMPLE.encode())
    assert (done.returncode != 2) == takes_stdin
    assert ("for stdin" in run_cli(command, "--help").stdout) == takes_stdin


def test_no_page_prints_its_own_markup_or_a_refusal_that_force_does_not_lift(run_cli):
    assert "--force overrides" not in run_cli("--help").stdout
    assert "passed on unchanged" not in run_cli("completion", "--help").stdout
    for topic in sf.TOPICS:
        page = run_cli("help", topic).stdout
        assert not re.search(r"(?<![\w/*`'.-])\*[\w ]+\*(?![\w/*`'.-])", page), topic


def test_a_list_below_code_stands_apart_from_it(run_cli):
    page = sf.format_page("# A\n\n```sh\nls\n```\n\n- one\n- two\n", sf.PLAIN)
    assert page == "A\n\n  ls\n\n- one\n- two\n", page


def test_no_words_is_usage(run_cli):
    done = run_cli()
    assert done.returncode == 2 and "Usage: subagent-fleet COMMAND" in done.stdout


@pytest.mark.parametrize("words, fix", [
    (("validat",), "did you mean `validate`?"), (("frobnicate",), "subagent-fleet --help"),
    (("validate", "--jsn"), "did you mean `--json`?"),
    (("validate", "--config"), "subagent-fleet validate --help"),
    (("validate", "extra"), "subagent-fleet validate --help"),
    (("completion", "tcsh"), "subagent-fleet completion --help"),
    (("help", "validat"), "did you mean `validate`?"),
    (("--jsn",), "subagent-fleet --help"),
    (("validate", "--json=1"), "subagent-fleet validate --help"),
    (("validate", "fleet.yaml"), "subagent-fleet validate --config fleet.yaml"),
    (("validate", "--strict", "a b.json"), "subagent-fleet validate --strict --config 'a b.json'"),
    (("launch", "claude", "f.yml", "--", "-p"), "subagent-fleet launch claude --config f.yml -- -p"),
    (("validate", "--config", "x.yaml", "x.yaml"), "subagent-fleet validate --help"),
    (("worker", "fleet.yaml"), "subagent-fleet worker --help"),
    (("--config", "f", "validate"), "subagent-fleet --help"),
    (("init", "--output", "-"), "subagent-fleet init --output fleet.yaml"),
    (("up", "-p", "hi"), "subagent-fleet up -- -p hi"), (("up", "--hlp"), "did you mean `--help`?"),
    (("up", "--ou", "x"), "did you mean `--out`?"),
    (("up", "--port", "4001"), "write `port:` under project.gateway in fleet.yaml"),
    (("trace", "--list"), "subagent-fleet trace --help"),
    (("logs", "--nope"), "subagent-fleet logs --help"),
    (("strat",), "did you mean `start`?"),
    (("statsu",), "did you mean `status`?"),
    (("fanout", "3", "jwt", "--prompt", "x"), "subagent-fleet run --times 3 'NAME:what to do'"),
    (("multi", "a:x", "b:y"), "subagent-fleet run 'a:what to do' 'b:what else'"),
    (("create", "fix-auth", "-p", "x"), "subagent-fleet run 'NAME:what to do'"),
    (("list", "--grouped"), "subagent-fleet tasks"), (("ready",), "subagent-fleet tasks"),
    (("prompt", "a", "x"), "subagent-fleet task say NAME TEXT"),
    (("kill", "a"), "subagent-fleet task stop NAME"), (("abort",), "subagent-fleet task stop NAME"),
    (("help", "kill"), "subagent-fleet task stop NAME"), (("task", "kill"), "subagent-fleet task stop NAME"),
    (("log", "3"), "subagent-fleet task log 3"), (("logs", "fix-auth"), "subagent-fleet task log fix-auth"),
    (("show", "a"), "subagent-fleet tasks NAME"), (("help", "plan"), "subagent-fleet tasks NAME"),
    (("task", "plan"), "subagent-fleet tasks NAME"), (("task", "a b", "log"), "subagent-fleet task log 'a b'"),
    (("init", "--memory", "local=16"), "write `memory_gb:` under the machine in fleet.yaml"),
    (("init", "--scan"), "subagent-fleet discover --scan"), (("wake", "mini"), "subagent-fleet warmup"),
    (("up", "--node", "mini=10.0.0.5"), "subagent-fleet add NAME=URL"),
    (("status", "--watch", "--check"), "leave out --check"),
    (("merge",), "subagent-fleet task land NAME"), (("land",), "subagent-fleet task land"),
    (("help", "land"), "subagent-fleet help task land"), (("ls",), "subagent-fleet tasks"),
    (("task", "status"), "subagent-fleet tasks"), (("task", "run"), "subagent-fleet run"),
    (("validate", "tasks.yaml"), "leave it out: subagent-fleet validate"),
    (("task", "say"), "subagent-fleet task say parser 'use the stdlib only'"),
    (("bd", "create"), "subagent-fleet task add 'NAME:what to do'"),
    (("update", "--check"), "download subagent_fleet.py again, then: python3 subagent_fleet.py install"),
    (("run", "--stop"), "subagent-fleet task stop NAME"), (("run", "-a", "x"), "did you mean `--coder`?"),
    (("task", "add", "x", "--quick"), "did you mean `--no-setup`?"),
    (("discover", "--check"), "subagent-fleet doctor"), (("help", "commands"), "subagent-fleet help"),
    (("serve", "--port", "4001"), "write `port:` under project.gateway in fleet.yaml"),
    (("trace", "--requests"), "subagent-fleet logs --session ID"),
    (("env", "--shell", "fish"),
     "subagent-fleet launch claude  (in any shell; `env` is for sh, bash and zsh)"),
    (("run", "--dry-run"), "subagent-fleet validate"), (("run", "-n", "5"), "did you mean `--max`?"),
    (("run", "--prompt", "x"), "subagent-fleet run 'NAME:what to do'"),
    (("run", "-p", "x"), "subagent-fleet run 'NAME:what to do'"),
    (("ui", "--host", "0.0.0.0"),
     "on the machine where you sit: ssh -L 8080:127.0.0.1:8080 HOST"),
    (("up", "--quick"), "subagent-fleet up -- --quick"),
    (("task", "stop", "--all"), "subagent-fleet task stop '*'"),
    (("task", "stop", "-a"), "subagent-fleet task stop '*'"),
    (("task", "stop"), "name tasks as `subagent-fleet tasks` shows them, or '*' for all of them"),
    (("task", "say", "jwt"), "subagent-fleet task say jwt TEXT"),
    (("task", "tidy", "--all"), "leave out --all: it takes every finished task"),
    (("task", "retry", "--failed"),
     "subagent-fleet tasks  (its last lines name them, to paste)"),
    (("tasks", "--failed"), "subagent-fleet tasks | grep failed"),
    (("tasks", "--parked"), "subagent-fleet tasks | grep parked"),
    (("run", "--priority", "high"), "subagent-fleet run --help"),
    (("init", "--force", "--node", "mini"),
     "subagent-fleet init --node mini=http://192.168.1.50:11434 --force"),
    (("init", "--node", "my mini=10.0.0.5"), "subagent-fleet init --node my-mini=10.0.0.5"),
    (("init", "--node", "10.0.0.5"), "subagent-fleet init --node mini=10.0.0.5"),
    (("init", "--hybrid", "--node", "a=x", "--node", "a=y"),
     "subagent-fleet init --node a=x --node a-2=y --hybrid"),
    (("init", "--node", "a=x", "--node", "b=x"), "subagent-fleet init --node a=x"),
    (("launch", "claude", "--out", "a", "-p", "say hi"),
     "subagent-fleet launch claude --out a -- -p 'say hi'"),
])
def test_wrong_words_are_usage_errors_with_a_fix(run_cli, words, fix):
    done = run_cli(*words)
    assert ("flags come after the command" in done.stderr) == words[0].startswith("-")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.endswith(f"  fix: {fix}\n")


@pytest.mark.parametrize("command", [c.name for c in sf.COMMANDS if sf.JSON in c.flags])
def test_json_of_an_error_is_one_object(run_cli, command):
    words = ("--timeout", "0") if command == "worker" else ("--config", "nowhere.yaml")
    done = run_cli(*command.split(), "--json", *words, env={"PATH": "/nowhere"})
    found = json.loads(done.stdout)
    assert found["schema"] == f"subagent-fleet/{command}/{sf.SCHEMA_VERSIONS.get(command, 1)}"
    if command == "skills list":  # which reads no fleet
        assert done.returncode == 0 and found["skills"]
        return
    if command == "doctor":  # whose findings such an error is one of
        assert "unreadable" in [finding["id"] for finding in found["findings"]]
        return
    takes_config = "--config" in [flag.name for flag in sf.find_command(command).flags]
    assert found["error"]["id"] == ("unreadable" if takes_config else "usage")
    assert set(found["error"]) == {"id", "level", "what", "where", "fix"} and not found["findings"]
    assert found["error"]["what"] in done.stderr and found["error"]["fix"] in done.stderr


@pytest.mark.parametrize("words, file", [
    (("--config", "nope.yaml"), "nope.yaml"), (("--config", "latin.yaml"), "latin.yaml"),
    (("--config", "d"), "d"), ((), None)])
def test_validate_json_of_what_cannot_be_read_is_not_valid(run_cli, tmp_path, words, file):
    (tmp_path / "latin.yaml").write_bytes(b"\n# \xe9")
    (tmp_path / "d").mkdir()
    (tmp_path / ".git").mkdir()
    done = run_cli("validate", "--json", *words)
    found = json.loads(done.stdout)
    assert (done.returncode, found["valid"], found["file"], found["findings"]) == (1, False, file, [])
    if file == "latin.yaml":
        assert done.stderr.startswith("error: latin.yaml: line 2: byte 0xe9 is not UTF-8 text\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX shells")
def test_a_closed_standard_input_is_named(tmp_path):
    done = subprocess.run(["sh", "-c", '"$0" "$1" validate --config - <&-', sys.executable, PROGRAM],
                          cwd=str(tmp_path), stderr=subprocess.PIPE, env=clean_environment())
    assert done.returncode == 1 and done.stderr.endswith(b"\n  fix: name a file instead of `-`\n")


def test_json_of_an_invalid_config_has_every_finding(run_cli, fleet_file):
    fleet_file.write_text(edited(("node: mini", "node: mni")), encoding="utf-8")
    done = run_cli("generate", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr.startswith("Invalid fleet.yaml:\n")
    assert found["error"]["what"] == "fleet.yaml is not valid"
    assert [finding["id"] for finding in found["findings"]] == ["unknown-node"]


@pytest.mark.parametrize("command", [c.name for c in sf.COMMANDS])
def test_help_has_a_usage_line_every_flag_and_examples(run_cli, command):
    done = run_cli(*command.split(), "--help")
    assert done.returncode == 0 and run_cli("help", *command.split()).stdout == done.stdout
    found = sf.find_command(command)
    usage = re.search(r"^Usage: subagent-fleet (.+)$", done.stdout, re.M)[1]
    assert usage.startswith(command) and ("[FLAGS]" in usage) == ("\nFlags:\n" in done.stdout)
    arguments, _, flags = done.stdout.partition("\nExamples:")[0].partition("\nFlags:\n")
    for flag in found.flags:
        is_flag = flag.name.startswith("-")
        word = flag.name if is_flag else sf.show_flag(flag)
        assert word in (flags if is_flag else arguments)
        assert is_flag or word.strip("[]") in usage
    assert found.examples
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("command", sf.COMMANDS, ids=lambda c: c.name)
def test_examples_parse(command):
    for example in command.examples:
        words = shlex.split(re.split(r" [|<>] |\)\"?$", example.split("subagent-fleet ")[-1])[0])
        called = sf.find_call(words)
        assert called.command == command
        sf.parse_arguments(command, called.words)


@pytest.mark.parametrize("command, line", [
    ("status", "  --timeout S    seconds to wait; default: 5"),
    ("status", "  --watch [S]    again every S seconds, until Ctrl-C; default: 2"),
    ("logs", "how many; default: 20"), ("run", "what it may change; default: everything (several)"),
    ("run", "Usage: subagent-fleet run [TASK...] [FLAGS]"),
    ("task log", "Usage: subagent-fleet task log [NAME] [setup|check|stderr|landing|raw] [FLAGS]"),
    ("task stop", "Usage: subagent-fleet task stop PATTERN..."),
    ("launch", "Usage: subagent-fleet launch PROGRAM [FLAGS] [-- ARGS]"),
    ("task log", "See also: subagent-fleet help runs"), ("launch", "See also: subagent-fleet help harnesses")])
def test_help_shows_defaults_what_may_be_repeated_and_where_to_read_on(run_cli, command, line):
    assert line in run_cli(*command.split(), "--help").stdout


def test_help_shows_every_command_flag_and_topic_with_its_words(run_cli):
    shown = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", run_cli("help").stdout, re.M))
    for row in sf.COMMANDS:
        assert shown[row.name] == row.summary
    for name, topic in sf.TOPICS.items():
        assert shown[name] == topic.summary
        for command in topic.commands:  # none has gone
            assert sf.find_command(command if command != "task" else "tasks")
    assert {"-h, --help", "-V, --version"} <= set(shown)


def test_the_exit_codes_are_told_once():
    told = [name for name, page in PAGES.items() if "| 130 |" in page]
    assert told == ["exit-codes"]
    for code in ("0", "1", "2", "3", "130"):
        assert re.search(rf"^\| {code} \|", PAGES["exit-codes"], re.M)


def test_the_page_of_json_has_every_command_that_prints_it():
    rows = re.findall(r"^(?:- `|\$ subagent-fleet )([a-z -]+?)(?: --json$|`: `)", PAGES["json"], re.M)
    wanted = {command.name for command in sf.COMMANDS if sf.JSON in command.flags}
    found = {sf.find_call(words.split()).command.name for words in rows}
    assert wanted - found == set(), "help json: give each an example"


def test_the_page_of_the_file_has_every_key_as_it_is_declared():
    rows = []
    for place, table in re.findall(r"^## ([\w.]+)\n\n((?:\|.*\n)+)", PAGES["config"], re.M):
        first, _, second = place.partition(".")
        rows += [(first, second, *row) for row in
                 re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", table, re.M)]
    kinds = {"project": sf.Project, "gateway": sf.Gateway, "claude": sf.Tiers,
             "nodes": sf.Node, "models": sf.Model, "agents": sf.Agent}
    seen = set()
    for first, second, key, default, note in rows:
        kind = kinds.get(second) or kinds[first]
        declared = sf.keys_of(kind)[key]
        wanted = declared.default
        assert declared.words == note
        if wanted is sf.REQUIRED:
            assert default == "required"
        elif wanted in (None, {}):
            assert default == ""
        else:
            shown = json.dumps(wanted) if isinstance(wanted, (bool, tuple)) else wanted
            assert default.strip("`") == str(shown)
        seen.add((kind, key))
    every = {(kind, key) for kind in kinds.values()
             for key, declared in sf.keys_of(kind).items() if declared.rule}
    assert seen == every and len(seen) > 25


@pytest.mark.parametrize("topic", list(sf.TOPICS))
@pytest.mark.parametrize("columns", [60, 100, 160])
def test_a_page_fits_the_terminal_and_loses_no_word(topic, columns):
    page = PAGES[topic]
    shown = sf.format_page(page, sf.Look(columns=columns))
    code = "".join(re.findall(r"(?s)```.*?```", page))
    wide = [line for line in shown.splitlines()
            if len(line) > columns and line.strip() not in code]
    assert [line for line in wide if " " in line.strip()] == []

    def words(text):
        text = re.sub(r"(?m)^[#|`-].*?$", lambda match: match[0].replace("|", " "), text)
        return set(re.findall(r"[A-Za-z]{4,}", text))
    assert words(page) - words(shown) <= {"text", "yaml", "python"}
    assert not re.search(r"<\w+ |\]\(|^```|^\|", sf.format_page(page, sf.PLAIN), re.M)


@pytest.mark.parametrize("topic", list(sf.TOPICS))
def test_what_a_page_types_exists(topic):
    for block in re.findall(r"(?s)```sh\n(.*?)```", PAGES[topic]):
        for line in re.findall(r"^(?:subagent-fleet|python3 subagent_fleet\.py) ([a-z].*?)(?: +#.*)?$",
                               block, re.M):
            called = sf.find_call(shlex.split(re.split(r" [|<>] ", line)[0]))
            sf.parse_arguments(called.command, called.words)


def test_help_shows_a_topic_and_readme_names_them_all(run_cli):
    shown = run_cli("help", "security").stdout
    assert set(re.findall(r"\w{4,}", PAGES["security"])) - set(re.findall(r"\w{4,}", shown)) == set()
    assert run_cli("help", "confg").returncode == 2
    for name in sf.TOPICS:
        assert f"`{name}`" in README and name in run_cli("--help").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(run_cli, shell, tmp_path):
    done = run_cli("completion", shell)
    assert done.returncode == 0 and "subagent-fleet" in done.stdout
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout, encoding="utf-8")
        assert subprocess.run([shell, "-n", str(tmp_path / "script")]).returncode == 0


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not here")
@pytest.mark.parametrize("typed, expected", [
    (["subagent-fleet", "val"], ["validate"]),
    (["subagent-fleet", "validate", "--js"], ["--json"]),
    (["subagent-fleet", "completion", "z"], ["zsh"]),
    (["subagent-fleet", "schema", "--h"], ["--help"]),
    (["subagent-fleet", "validate", "--config", ""], []),  # file names, then
    (["subagent-fleet", "init", "--output", "--"], []),
    (["subagent-fleet", "generate", "--out", "--j"], []),
    (["subagent-fleet", "generate", "--target", "l"], ["litellm"]),
    (["subagent-fleet", "warmup", "--model", ""], ["heavy-coder", "small-coder"]),
    (["subagent-fleet", "warmup", "--pull", "--agent", "im"], ["implementer"]),
    (["subagent-fleet", "warmup", "--config", "my fleet.yaml", "--agent", ""], ["other"]),
    (["subagent-fleet", "warmup", "--config", "none.yaml", "--model", ""], []),
    (["subagent-fleet", "help", "do"], ["doctor"]),
])
def test_completion_completes_in_bash(run_cli, tmp_path, typed, expected):
    script = run_cli("completion", "bash").stdout
    (tmp_path / "fleet.yaml").write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "my fleet.yaml").write_text(
        re.sub(r"(?s)agents:.*", "agents:\n  other: {model: small-coder, description: x}\n", EXAMPLE))
    (tmp_path / "subagent-fleet").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PROGRAM}" "$@"\n')
    (tmp_path / "subagent-fleet").chmod(0o755)
    words = " ".join(map(shlex.quote, typed))
    asked = " ".join(map(shlex.quote, (typed[0], typed[-1], typed[-2])))  # as bash and zsh ask
    program = (f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; "
               f"_subagent_fleet {asked}; "
               'printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", program], stdout=subprocess.PIPE, cwd=str(tmp_path),
                          env=clean_environment(PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert done.stdout.decode().split() == expected


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not here")
def test_completion_completes_in_zsh_as_help_says(run_cli, tmp_path):
    pty = pytest.importorskip("pty")
    example = sf.find_command("completion").examples[0]
    assert f"  {example}\n" in run_cli("completion", "--help").stdout
    (tmp_path / "subagent-fleet").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PROGRAM}" "$@"\n')
    (tmp_path / "subagent-fleet").chmod(0o755)
    (tmp_path / ".zshrc").write_text(f"ZSH_DISABLE_COMPFIX=true; {example}; PROMPT=READY; ZLE_RPROMPT=")
    (tmp_path / "fleet.yaml").write_text(EXAMPLE, encoding="utf-8")
    child, master = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-d", "-i"], clean_environment(
            PATH=f"{tmp_path}:{os.environ['PATH']}", ZDOTDIR=tmp_path, TERM="dumb"))
    shown, typed = b"", [(b"READY", b"subagent-fleet val\t"), (b"validate ", b"--js\t"),
                         (b"--json ", b"\x15subagent-fleet warmup --agent impl\t"),
                         (b"implementer ", b"\x15exit\n")]
    try:
        while select.select([master], [], [], 20)[0]:
            shown += os.read(master, 65536)
            if typed and typed[0][0] in shown:
                os.write(master, typed.pop(0)[1])
    except OSError:  # Linux says so at the end
        pass
    os.close(master)  # which ends a zsh that waits for more
    os.waitpid(child, 0)
    assert not typed, shown


def test_schema_is_json(run_cli):
    assert json.loads(run_cli("schema").stdout) == json.loads(json.dumps(sf.render_schema()))


# -- commands of two words --

@pytest.fixture
def two_words(monkeypatch):
    """The commands, and two that share their first word; one has another's name behind it."""
    rows = list(sf.COMMANDS)
    monkeypatch.setattr(sf, "COMMANDS", rows)
    for name in ("toy add", "toy log"):
        row = sf.command(name, f"do {name}", sf.Flag("--hard", "harder"), group=sf.MORE,
                         examples=(name,))
        rows.append(row(lambda options, world: 0))


@pytest.mark.parametrize("words, name, rest", [
    (["toy", "add", "x"], "toy add", ["x"]), (["add", "x=y"], "add", ["x=y"]),
    (["toy", "log"], "toy log", []), (["logs", "-n", "3"], "logs", ["-n", "3"])])
def test_a_command_of_two_words_is_found_before_its_words(two_words, words, name, rest):
    called = sf.find_call(words)
    assert (called.command.name, called.words) == (name, rest)


@pytest.mark.parametrize("words, fix", [
    (["toy"], "subagent-fleet help toy"), (["toy", "lgo"], "did you mean `log`?"),
    (["toy", "xyzzy"], "subagent-fleet help toy"), (["toyadd"], None)])
def test_a_first_word_alone_is_refused_with_its_seconds(two_words, words, fix):
    with pytest.raises(sf.FleetError) as caught:
        sf.find_call(words)
    assert caught.value.finding.slug == "unknown-command"
    if fix:
        assert caught.value.finding.fix == fix and "add, log" in caught.value.finding.what


@pytest.mark.parametrize("words, told, untold", [
    (["help", "toy"], ["toy add", "toy log"], ["validate"]),
    (["toy", "--help"], ["toy add", "toy log"], ["validate"]),
    (["help", "toy", "add"], ["--hard", "subagent-fleet toy add"], ["toy log"]),
    (["toy", "add", "--help"], ["--hard", "subagent-fleet toy add"], ["toy log"]),
    (["help"], ["toy add", "toy log", "validate"], ["--hard"])])
def test_help_of_a_first_word_shows_its_commands(two_words, capsys, words, told, untold):
    assert sf.main(words) == 0
    shown = capsys.readouterr().out
    for word in told:
        assert word in shown
    for word in untold:
        assert not re.search(rf"(?<!subagent-fleet ){re.escape(word)}", shown)


def test_help_of_more_than_a_name_is_refused(two_words, capsys):
    assert sf.main(["help", "toy", "add", "now"]) == 2
    assert "subagent-fleet help toy add" in capsys.readouterr().err


@pytest.mark.parametrize("typed, expected", [
    (["to"], ["toy"]), (["toy", ""], ["add", "log"]), (["toy", "add", "--ha"], ["--hard"]),
    (["add", "--ha"], []), (["toy", "l"], ["log"]), (["nothing", ""], []),
    (["task", "tid"], ["tidy"])])
def test_completion_completes_two_words(two_words, capsys, typed, expected):
    assert sf.main(["completion", "--", *typed]) == (0 if expected or typed[0] == "add" else 2)
    assert capsys.readouterr().out.split() == expected


def test_completion_of_fish_asks_with_an_empty_last_word(run_cli):
    """Fish is not here: what its script types is typed."""
    script = run_cli("completion", "fish").stdout
    assert 'subagent-fleet completion -- (commandline -opc)[2..-1] ""' in script
    assert "--json" in run_cli("completion", "--", "validate", "").stdout.split()
    assert "validate" in run_cli("completion", "--", "").stdout.split()


# -- what the first documents type --

FIRST_WORDS = """\
init
validate
discover
discover --json
generate
warmup
status
status --json
doctor
trace
recommend
benchmark
bench
skills list
skills install
skills install --target claude-code
skills install --target codex
skills install --target opencode
skills install --skill subagent-fleet-setup
plugins install --out market
plugins install --target claude-code
plugins install --target codex
validate --config examples/multi-node-cluster/fleet.yaml
generate --config examples/multi-node-cluster/fleet.yaml
"""


def test_what_the_first_documents_type_works(tmp_path, run_cli, fake_node):
    """In their order, in one project; without a gateway `doctor` and `status` still say what is so."""
    node = fake_node({"qwen3:8b": {}, "qwen3-coder:30b": {}})
    (tmp_path / ".git").mkdir()
    cluster = tmp_path / "examples" / "multi-node-cluster"
    cluster.mkdir(parents=True)
    env = {"OLLAMA_HOST": node.endpoint, "HOME": str(tmp_path / "home")}
    for line in FIRST_WORDS.splitlines():
        done = run_cli(*line.split(), env=env)
        assert done.returncode == 0 and done.stdout + done.stderr, (line, done.stdout, done.stderr)
        if line == "init":
            (cluster / "fleet.yaml").write_bytes((tmp_path / "fleet.yaml").read_bytes())
        if "--json" in line:
            assert json.loads(done.stdout)["nodes"]
    assert list((tmp_path / ".claude" / "skills").iterdir())
    assert run_cli("clean", env=env).returncode == 3  # it asks, and there is nobody
    assert run_cli("clean", "--force", env=env).returncode == 0


@pytest.mark.parametrize("words", ["ui --config fleet.yaml", "ui", "dashboard", "start"])
def test_what_serves_in_the_first_documents_is_understood(words):
    assert sf.read_call(words.split()).command.name == {"start": "up"}.get(words, "ui")


# -- README --

def readme_block(language, heading):
    """The first block of a language below a heading."""
    below = README[README.index(f"\n{heading}\n"):]
    return re.search(rf"```{language}\n(.*?)```", below, re.S)[1]


def test_readme_fleet_is_a_fleet_without_findings(run_cli):
    text = readme_block("yaml", "## fleet.yaml")
    done = run_cli("validate", "--strict", "--config", "-", input=text.encode("utf-8"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "<stdin> is valid.\n", "")


@pytest.mark.slow
def test_readme_code_runs(run_cli, fleet_file, tmp_path):
    code = readme_block("python", "In your own code:")
    program = code + "\nassert fleet.name == 'local-dev' and values == {'a': [1, 2]}, values\n" \
        "assert subagent_fleet.parse_yaml(text) == values\n"
    subprocess.run([sys.executable, "-c", program], cwd=str(tmp_path), check=True,
                   env=clean_environment(PYTHONPATH=ROOT))


def test_readme_says_of_a_command_what_its_help_says(run_cli):
    rows = re.findall(r"^\| `subagent-fleet ([a-z]+)[^`]*` \| (.*) \|$", README, re.M)
    assert len(rows) > 5
    for name, said in rows:
        if "redo fixes" not in said:  # which is told of its flag
            assert run_cli("help", name).stdout.lower().startswith(f"{said}.\n".lower())


def test_readme_is_a_page_and_help_a_screen(run_cli):
    assert len(README.splitlines()) <= 200
    shown = run_main_at(80, "--help")
    assert len(shown.splitlines()) <= 85 and max(map(len, shown.splitlines())) <= 80


def run_main_at(columns, *words):
    """What a terminal of so many columns shows, without colour."""
    class Terminal(sf.World):
        columns = property(lambda world: columns)

        def is_terminal(self, stream="stdout"):
            return True

        def write(self, text):
            shown.append(text)
    shown, world = [], Terminal()
    world.environ["NO_COLOR"] = "1"
    assert sf.main(list(words), world) == 0
    return "".join(shown)


@pytest.mark.parametrize("topic", sf.TOPICS)
def test_a_page_of_help_is_text(topic):
    shown = run_main_at(80, "help", topic)
    assert not re.search(r"\]\(|\*\*\w|</?[a-z]+>|^ *#{2,} |@[A-Z]+@|^\|", shown, re.M)


def test_readme_commands_exist():
    typed = re.findall(r"^(?:subagent-fleet|python3 subagent_fleet\.py) ([a-z].*?)(?: *#.*)?$",
                       README, re.M)
    assert len(typed) > 10
    for line in "; subagent-fleet ".join(typed).split("; subagent-fleet "):
        words = re.split(r" [|<>] ", line)[0].split()
        called = sf.find_call(words)
        sf.parse_arguments(called.command, called.words)
