"""The World's disk: no write leaves its root, nothing blocks, reads are bounded."""
import errno
import fcntl
import os
import pathlib
import re
import resource
import stat
import subprocess
import sys
import threading

import pytest

import subagent_fleet as sf
import workspace_cases

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and descriptors as POSIX has them")


@pytest.fixture
def world():
    return sf.World()


def marks(directory):
    """Everything below a directory that changes when something there is touched."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        state = path.lstat()
        found[str(path)] = (state.st_ino, state.st_mode, state.st_mtime_ns, state.st_size)
    return found


def make_outside(tmp_path):
    """A place that holds what ours does, in somebody else's words."""
    outside = tmp_path / "outside"
    for name in ("agents/planner.md", "manifest.json", "requests.jsonl", "litellm.log", "backup/x"):
        path = outside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
        path.chmod(0o644)
    return outside


@pytest.mark.parametrize("words", [("generate",), ("clean",), ("skills", "install")])
def test_a_link_below_the_root_is_refused_in_words_wherever_it_leads(tmp_path, run_cli, words):
    """One that leads elsewhere in the project, too: where it leads can change between two looks."""
    (tmp_path / "fleet.yaml").write_text(workspace_cases.FLEET)
    assert run_cli("generate").returncode == 0
    (tmp_path / "fleet.yaml").write_text(workspace_cases.OTHER)
    (tmp_path / ".claude").rename(tmp_path / "real")
    for target in ("real", tmp_path / "real", tmp_path / "absent"):
        (tmp_path / ".claude").symlink_to(target)
        before = marks(tmp_path / "real")
        done = run_cli(*words)
        assert done.returncode == 3, done.stdout
        assert re.match(r"error: \./\.claude/\S+ lies behind a symbolic link; nothing is written "
                        r"there\n  fix: \S", done.stderr), done.stderr
        assert marks(tmp_path / "real") == before
        (tmp_path / ".claude").unlink()


@pytest.mark.parametrize("target", ["../outside", "/", "..", "a/../..", "{root}/../outside", "d", "e"])
def test_links_that_lead_out_or_nowhere_are_refused(tmp_path, world, target):
    root, outside = tmp_path / "root", make_outside(tmp_path)
    (root / "a").mkdir(parents=True)
    (root / "d").symlink_to(target.format(root=root))
    (root / "e").symlink_to("d")
    before = marks(outside)
    place = sf.Place(str(root), "d/agents/planner.md")
    for call in (lambda: world.replace_files([(place, b"ours", 0o600)]),
                 lambda: world.append_line(place, b"ours"), lambda: world.remove(place),
                 lambda: world.make_directory(place), lambda: world.make_directory(place),
                 lambda: world.start(sf.Launch(["true"], "/", {}, place, place))):
        with pytest.raises(sf.FleetError) as caught:
            call()
        assert caught.value.slug in ("in-the-way", "unwritable"), target
    world.remove_empty(sf.Place(str(root), "d/agents"))
    assert marks(outside) == before


@pytest.mark.parametrize("words", ["generate", "clean", "serve", "up"])
def test_a_state_directory_or_a_file_in_it_that_leads_out_is_refused(tmp_path, monkeypatch, capsys,
                                                                     words):
    outside = make_outside(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere", "HOME": str(tmp_path),
                                        "LITELLM_MASTER_KEY": "sk-0123456789abcdef"})
    pathlib.Path("fleet.yaml").write_text(workspace_cases.FLEET.replace("litellm}", "builtin}"))
    before = marks(outside)
    os.symlink(outside, ".subagent-fleet")
    assert sf.main([words]) == 3
    os.unlink(".subagent-fleet")
    if words == "serve":
        os.mkdir(".subagent-fleet")
        os.symlink(outside / "requests.jsonl", ".subagent-fleet/requests.jsonl")
        assert sf.main([words]) == 3
    assert capsys.readouterr().err.count("error: ") == 1 + (words == "serve")
    assert marks(outside) == before


class WindowsOs:
    """The os module of a system without descriptors of directories."""

    def __getattr__(self, name):
        return "nt" if name == "name" else getattr(os, name)

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        assert dir_fd is None and not os.path.isdir(path)
        return os.open(path, flags, mode)


def test_without_descriptors_of_directories_paths_are_looked_at(tmp_path, world, monkeypatch):
    root, outside = tmp_path / "root", make_outside(tmp_path)
    root.mkdir()
    (root / "d").symlink_to(outside)
    before = marks(outside)
    monkeypatch.setattr(sf, "os", WindowsOs())
    place = sf.Place(str(root), "a/b/x")
    world.replace_files([(place, b"ours\n", 0o600)])
    world.append_line(place, b"more\n")
    world.make_directory(sf.Place(str(root), "a/c"))
    assert (root / "a/b/x").read_bytes() == b"ours\nmore\n" and (root / "a/c").is_dir()
    world.remove(place)
    for path in ("a/b", "a/c", "a"):
        world.remove_empty(sf.Place(str(root), path))
    assert [path.name for path in root.iterdir()] == ["d"]
    there = sf.Place(str(root), "d/agents/planner.md")
    for call in (lambda: world.replace_files([(there, b"ours", 0o600)]),
                 lambda: world.append_line(there, b"ours"), lambda: world.remove(there)):
        with pytest.raises(sf.FleetError, match="lies behind a symbolic link"):
            call()
    assert marks(outside) == before


# -- lines that are added --

def test_lines_go_only_to_a_file_and_nothing_is_awaited(tmp_path, world):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory").mkdir()
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("pipe", "link", "directory"):
        with pytest.raises(sf.FleetError) as caught:
            world.append_line(str(tmp_path / name), b"x\n")
        assert caught.value.slug == "unwritable"
    os.close(reader)
    with pytest.raises(sf.FleetError):  # without a reader it would wait for one
        world.append_line(str(tmp_path / "pipe"), b"x\n")
    with pytest.raises(sf.FleetError):
        world.append_line("/dev/full", b"x\n")
    assert not (tmp_path / "file").exists()


def test_a_file_that_others_could_read_is_made_private(tmp_path, world):
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o666)
    world.append_line(str(path), b"x\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b"x\n"


def test_a_full_disk_leaves_whole_lines_and_more_follow_when_there_is_space(tmp_path, world):
    path = tmp_path / "file"
    world.append_line(str(path), b"first\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(sf.FleetError) as caught:
            world.append_line(str(path), b"second line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.slug == "unwritable" and os.strerror(errno.EFBIG) in caught.value.what
    assert path.read_bytes() == b"first\n"
    world.append_line(str(path), b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_a_line_that_another_wrote_behind_a_torn_one_stays(tmp_path, world, monkeypatch):
    path = tmp_path / "file"

    class Torn:
        def __getattr__(self, name):
            return getattr(os, name) if name != "write" else self.tear

        def tear(self, descriptor, line):
            os.write(descriptor, line[:3])
            path.open("ab").write(b"\nanother\n")
            raise OSError(errno.ENOSPC, "full")
    monkeypatch.setattr(sf, "os", Torn())
    with pytest.raises(sf.FleetError):
        world.append_line(str(path), b"mine\n")
    assert path.read_bytes() == b"min\nanother\n"


def test_a_childs_log_is_private_and_no_link(tmp_path, world):
    log = tmp_path / "logs" / "log"
    program = f"import sys, threading; sys.path.insert(0, {str(pathlib.Path(sf.__file__).parent)!r}); import subagent_fleet as sf\n" \
              "world = sf.World()\n" \
              f"child = world.start(sf.Launch([sys.executable, '-c', 'print(7)'], '/', {{}}, {str(log)!r}, {str(log)!r}))\n" \
              "while child.exit_code() is None: world.sleep(0.01)\n" \
              "child.stop()\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)
    assert log.read_bytes() == b"7\n" and stat.S_IMODE(log.stat().st_mode) == 0o600


# -- reading what may be anybody's --

def test_a_pipe_put_in_the_place_of_a_file_blocks_no_reader(tmp_path, world, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(world, "kind_of", lambda *_, **__: "file")  # as it was a moment ago
    with pytest.raises(sf.FleetError) as caught:
        world.read_bytes(str(tmp_path / "pipe"))
    assert caught.value.slug == "unreadable"


# -- locks --

def test_who_wants_a_lock_is_not_kept_off_by_who_only_looks(world, tmp_path, monkeypatch):
    path = str(tmp_path / "lock")
    world.hold(path).release()
    looks, tried, real = threading.Event(), threading.Event(), fcntl.flock
    looker = threading.Thread(target=world.is_held, args=(path,))

    def flock(descriptor, how):
        try:
            real(descriptor, how)
        finally:
            if threading.current_thread() is not looker:
                tried.set()
        if threading.current_thread() is looker:
            looks.set()
            tried.wait(20)
    monkeypatch.setattr(fcntl, "flock", flock)
    looker.start()
    assert looks.wait(20)
    hold = world.hold(path)
    looker.join()
    assert hold and world.is_held(path) and world.hold(path) is None
    hold.release()
    assert not world.is_held(path) and not world.is_held(str(tmp_path / "absent"))


def test_two_who_look_do_not_see_each_other(world, tmp_path, monkeypatch):
    path = str(tmp_path / "lock")
    world.hold(path).release()
    seen, real = [], fcntl.flock

    def flock(descriptor, how):
        real(descriptor, how)
        if not seen:
            seen.append(None)
            seen[0] = world.is_held(path)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert not world.is_held(path) and seen == [False]


def test_a_log_that_two_writers_find_full_turns_over_once(world, tmp_path, monkeypatch, limits):
    limits(receipts=100)
    log, real, begun = tmp_path / "log", fcntl.flock, []
    log.write_bytes(b"old\n" * 50)

    def flock(descriptor, how):
        if not begun:  # another writer is faster
            begun.append(True)
            world.append_line(str(log), b"fast\n")
        real(descriptor, how)
    monkeypatch.setattr(fcntl, "flock", flock)
    world.append_line(str(log), b"slow\n")
    assert begun and log.read_bytes() == b"fast\nslow\n"
    assert (tmp_path / "log.1").read_bytes() == b"old\n" * 50


def test_a_file_that_goes_between_the_look_and_the_read_is_as_one_that_was_not_there(tmp_path):
    class Late(sf.World):
        def kind_of(self, path, *, follow=True):
            return "file"  # as it was a moment ago

    gone = str(tmp_path / "order.json")
    assert Late().size_of(gone) == 0
    assert Late().read_part(gone, 0, 10) == b""


# -- several that write one file at once --

WRITER = """\
import sys
import subagent_fleet as sf
world = sf.World()
for _ in range(150):
    world.replace_files([(sys.argv[1], sys.argv[2].encode() * 4096, 0o600)])
    content = world.read_bytes(sys.argv[1])
    assert len(content) == 4096 and len(set(content)) == 1, "torn"
"""


def test_several_that_write_one_file_at_once_leave_one_whole_file(tmp_path):
    place = tmp_path / "told.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(place), letter], stderr=subprocess.PIPE,
                                env={**os.environ, "PYTHONPATH": os.path.dirname(sf.__file__)})
               for letter in "abc"]
    for writer in writers:
        said = writer.communicate(timeout=60)[1].decode()
        assert writer.returncode == 0, said
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]


def test_threads_that_write_one_file_at_once_leave_one_whole_file(tmp_path, world):
    failed = []

    def write(letter):
        try:
            for _ in range(150):
                world.replace_files([(str(tmp_path / "x"), letter * 4096, 0o600)])
                assert len(set((tmp_path / "x").read_bytes())) == 1
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("age, left", [(3600, []), (-3600, []), (0, [".x.new"])])
def test_what_a_killed_writer_left_goes_once_it_is_old(tmp_path, world, age, left):
    (tmp_path / ".x.new").write_text("half of i")
    moment = (tmp_path / ".x.new").stat().st_mtime - age
    os.utime(tmp_path / ".x.new", (moment, moment))
    world.replace_files([(str(tmp_path / "x"), b"whole", 0o600)])
    assert (tmp_path / "x").read_bytes() == b"whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "x"]
