"""What a command may write, as bubblewrap and sandbox-exec are told; what it says it could not."""
import os

import pytest

import subagent_fleet as sf

GRANTS = (sf.Grant("/h/.cache", True), sf.Grant("/h/.claude", True), sf.Grant("/h/.claude/settings.json", False),
          sf.Grant("/h/.cache/shop", False), sf.Grant("/h/trees/t", True))
BOX = sf.Box("/h/trees/t", GRANTS, "/h/trees/t.tmp", ("/tmp/agent.sock",))


@pytest.mark.parametrize("path, expected", [
    ("/h/trees/t/a", True), ("/h/trees/t", True), ("/h/trees/t2/a", False), ("/h/.cache/x", True),
    ("/h/.cache/shop/a", False), ("/h/.claude/settings.json", False), ("/h/.claude/x", True), ("/h", False)])
def test_the_last_grant_of_a_path_counts(path, expected):
    assert sf.may_write(GRANTS, path) is expected


def test_bubblewrap_is_told_each_grant_in_its_order():
    words = sf.plan_bwrap("/usr/bin/bwrap", BOX)
    assert words[-1] == "--" and words[-3:-1] == ["--chdir", "/h/trees/t"]
    binds = [tuple(words[at:at + 2]) for at, word in enumerate(words) if "bind" in word]
    assert binds[0] == ("--ro-bind", "/") and ("--bind", "/h/trees/t.tmp") in binds
    assert binds[-6:] == [("--ro-bind-try", "/tmp/agent.sock"), ("--bind-try", "/h/.cache"),
                          ("--bind-try", "/h/.claude"), ("--ro-bind-try", "/h/.claude/settings.json"),
                          ("--ro-bind-try", "/h/.cache/shop"), ("--bind-try", "/h/trees/t")]
    assert {"--die-with-parent", "--unshare-pid"} <= set(words) and "--cap-drop" not in words
    assert "--unshare-net" not in words
    as_root = sf.plan_bwrap("/usr/bin/bwrap", BOX, is_root=True)
    assert as_root[as_root.index("--cap-drop") + 1] == "ALL" and "CAP_SYS_ADMIN" not in as_root


def test_sandbox_execs_profile_holds_no_path():
    words = sf.plan_seatbelt("/usr/bin/sandbox-exec", sf.Box("/h/it's \"here\"", (
        sf.Grant("/h/.cache", True), sf.Grant("/h/.cache/x", False), sf.Grant("/h/it's \"here\"", True)), "/t"))
    assert words[:2] == ["/usr/bin/sandbox-exec", "-p"] and words[-1] == "--"
    assert words[2] == """\
(version 1)
(allow default)
(deny file-write*)
(allow file-write* (subpath "/dev/fd") (regex #"^/dev/(null|zero|ptmx|tty.*|dtracehelper)$"))
(allow file-write* (subpath (param "P0")))
(deny file-write* (subpath (param "P1")))
(allow file-write* (subpath (param "P2")))
(allow file-write* (subpath (param "P3")))
"""
    assert words[3:-1] == ["-D", "P0=/h/.cache", "-D", "P1=/h/.cache/x", "-D", "P2=/h/it's \"here\"", "-D", "P3=/t"]


def test_what_macos_uses_for_temporary_files_is_named_by_its_real_path():
    assert sf.find_mac_temporary({"TMPDIR": "/var/folders/ab/cdef/T/"}) == (
        "/private/tmp", "/private/var/tmp", "/private/var/folders/ab/cdef")
    assert sf.find_mac_temporary({"TMPDIR": "/srv/a/tmp"}) == ("/private/tmp", "/private/var/tmp")


def test_only_what_is_named_below_tmp_is_shown():
    assert sf.find_shown(["/usr/bin:/tmp/x/bin:/tmp/x", "/tmp", "/tmp/", "/tmp/ssh/agent.1", "/tmp/../etc",
                          "see /tmp/y", "/tmpx/z"]) == ("/tmp/ssh/agent.1", "/tmp/x")


REFUSED = {
    "rm": ("rm: cannot remove '/p/node_modules/x.js': Read-only file system", ["/p/node_modules/x.js"]),
    "dash": ("/bin/sh: 1: cannot create /p/a.txt: Read-only file system", ["/p/a.txt"]),
    "bash": ("bash: line 1: /h/.bashrc: Read-only file system", ["/h/.bashrc"]),
    "mv": ("mv: cannot move '/h/trees/t/a' to '/p/a': Read-only file system", ["/p/a"]),
    "relative": ("touch: cannot touch '../x/a': Read-only file system", ["/h/trees/x/a"]),
    "home": ("zsh: read-only file system: '~/.x'", ["/h/.x"]),
    "git": ("fatal: Unable to create '/p/.git/index.lock': Read-only file system", ["/p/.git/index.lock"]),
    "python": ("OSError: [Errno 30] Read-only file system: '/p/with space'", ["/p/with space"]),
    "node": ("Error: EROFS: read-only file system, open '/h/.npm/_logs/x.log'", ["/h/.npm/_logs/x.log"]),
    "go": ("open /h/go/bin/x: read-only file system", ["/h/go/bin/x"]),
    "json": (r'{"content": "rm: cannot remove \"/p/a\": Read-only file system\nrm: cannot remove \"/p/b\": '
             r'Read-only file system\n", "cwd": "/p/c"}', ["/p/a", "/p/b"]),
    "may be written": ("x: cannot create '/h/trees/t/a': Read-only file system", []),
    "no path": ("error: could not lock config file .git/config: Read-only file system", []),
    "talk of it": ("The disk is a read-only file system. See /p/README.", []),
    "the system's": ("sh: cannot create /proc/sys/x: Read-only file system", []),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_command_could_not_write_is_found_in_what_it_says(how):
    text, expected = REFUSED[how]
    assert sf.find_refused("bwrap", f"begin\n{text}\nend\n", BOX, "/h", os.path.normpath) == expected


def test_on_macos_it_is_not_permitted():
    said = "rm: /p/a: Operation not permitted\nError: EPERM: operation not permitted, mkdir '/p/b'\n"
    assert sf.find_refused("sandbox-exec", said, BOX, "/h", os.path.normpath) == ["/p/a", "/p/b"]
    assert sf.find_refused("bwrap", said, BOX, "/h", os.path.normpath) == []


def test_of_many_paths_the_first_are_named():
    said = "".join(f"rm: cannot remove '/p/{number}': Read-only file system\n" for number in range(500))
    assert len(sf.find_refused("bwrap", said, BOX, "/h", os.path.normpath)) == sf.REFUSED_LIMIT


@pytest.mark.parametrize("path, line", [
    ("/h/.npm/_logs/x.log", "[~/.npm]"), ("/h/.bashrc", "[~/.bashrc]"), ("/h/.config/x/y/z", "[~/.config/x]"),
    ("/h/.local/share/x/y", "[~/.local/share/x]"), ("/h/code/x/y", "[~/code/x]"), ("/h/code", "[~/code]"), ("/opt/x/y", "[/opt/x]"),
    ("/x", "[/x]")])
def test_the_line_that_lets_it_write_names_no_whole_home(path, line):
    assert sf.suggest_writable(path, "/h") == f"sandbox_write: {line}"
