"""HTTP with an end to every wait. Terminal: program/test_cli; clients: test_http."""
import errno
import os
import shutil
import socket
import subprocess
import threading

import pytest

import hostile_nodes
import subagent_fleet as sf
import workspace_cases
from tools import PROC, clean_environment, free_port, not_held_up


@pytest.fixture
def world():
    """A World that gives up connecting after a second."""
    found = sf.World()
    found.connect_seconds = 1.0
    return found


def reading(reply):
    """Return the JSON of a reply as Ollama's own Asks read it."""
    return sf.Ollama()._ask("/x", lambda value: value).extract(reply)


def ask(world, url, *, seconds=1.0, payload=None):
    """Ask and return the value."""
    path = "/" + url.split("/", 3)[3]
    question = sf.Ask(path, lambda reply: reading(reply), payload)
    return world.ask(url[:-len(path)], question, deadline=world.clock() + seconds)


def failure(world, url, **more):
    """Ask and return (reason, detail) of the failure."""
    with pytest.raises(sf.NodeFailure) as caught:
        ask(world, url, **more)
    return caught.value.reason, caught.value.detail


def serve(answer, **more):
    """Serve one answer; return its port."""
    return hostile_nodes.listen(hostile_nodes.say(answer), **more)


def recorder(host="127.0.0.1"):
    """Serve `{}` and keep the request; returns (port, requests)."""
    server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host
                                  else socket.AF_INET)
    requests = []

    def accept():
        while True:
            connection, _ = server.accept()
            with connection:
                requests.append(connection.recv(65536))
                connection.sendall(hostile_nodes.whole(b"{}"))

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1], requests


def has_ipv6():
    """Tell whether this machine has ::1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


# -- requests --

def test_request_keeps_the_path_and_names_the_host(world):
    port, requests = recorder()
    ask(world, f"http://127.0.0.1:{port}/models/über/api/chat", payload={"a": "é"})
    head, _, body = requests[0].partition(b"\r\n\r\n")
    lines = head.decode("ascii").split("\r\n")
    assert lines[0] == "POST /models/%C3%BCber/api/chat HTTP/1.1"
    fields = dict(line.split(": ", 1) for line in lines[1:])
    assert fields["Host"] == f"127.0.0.1:{port}" and fields["Connection"] == "close"
    assert fields["Content-Type"] == "application/json"
    assert int(fields["Content-Length"]) == len(body) and body == b'{"a": "\\u00e9"}'
    assert "accept-encoding" not in head.decode().lower()


@needs_ipv6
def test_request_to_an_ipv6_address_has_it_in_brackets(world):
    port, requests = recorder("::1")
    ask(world, f"http://[::1]:{port}/x")
    assert f"\r\nHost: [::1]:{port}\r\n".encode() in requests[0]


def test_proxies_of_the_environment_are_not_used(world, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    port, requests = recorder()
    assert ask(world, f"http://127.0.0.1:{port}/") == {} and len(requests) == 1


def names(monkeypatch, *addresses):
    """Let every name have these (family, address) pairs."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [
        (family, socket.SOCK_STREAM, 6, "", (address, port) if family == socket.AF_INET
         else (address, port, 0, 0)) for family, address in addresses])


def calls(monkeypatch, port):
    """The (address, timeout) of each connection to a port from now on."""
    called = []

    def connect(self, address):
        if address[1] == port:  # threads of other tests may still call somebody
            called.append((address[0], self.gettimeout()))
        return socket.SocketType.connect(self, address)
    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"connect": connect}))
    return called


@needs_ipv6
@pytest.mark.parametrize("dead", ["refuses", "silent"])
def test_one_dead_family_does_not_matter(world, monkeypatch, dead):
    port, requests = recorder()
    held = [socket.socket(socket.AF_INET6)]  # or somebody else listens there meanwhile
    held[0].bind(("::1", port))
    if dead == "silent":
        held[0].listen(0)
        for _ in range(4):
            held.append(socket.socket(socket.AF_INET6))
            held[-1].setblocking(False)
            held[-1].connect_ex(("::1", port))
    names(monkeypatch, (socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    called = calls(monkeypatch, port)
    for _ in range(2):
        assert ask(world, f"http://studio.local:{port}/", seconds=20) == {}
    addresses, timeouts = zip(*called)
    assert addresses == ("::1", "127.0.0.1", "127.0.0.1"), "what answered last goes first"
    assert timeouts[0] <= world.connect_seconds / 2, "the other family gets its share of the time"
    for one in held:
        one.close()


@pytest.mark.skipif(os.name != "posix", reason="a program is a script")
@pytest.mark.parametrize("variables", [{"LC_ALL": "de_DE.UTF-8"}, {"LC_NUMERIC": "de_DE"}, {"LANG": "fr_FR"}])
def test_programs_that_are_read_speak_as_they_do_everywhere(world, tmp_path, monkeypatch, variables):
    program = tmp_path / "ps"
    program.write_text('#!/bin/sh\necho "$LC_ALL"; echo "$LC_ALL" >&2\n')
    program.chmod(0o755)
    world.environ = {**world.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    assert world.read_program(["ps"], world.clock() + 20) == "C\n"
    ran = world.run_program(["ps"], environ={**variables, "PATH": "/usr/bin:/bin"})
    assert (ran.text, ran.talk) == ("C", "C")


def test_a_query_is_sent(world):
    port, requests = recorder()
    assert ask(world, f"http://127.0.0.1:{port}/a?b=c&d=e f") == {}
    assert requests[0].startswith(b"GET /a?b=c&d=e%20f HTTP/1.1\r\n"), requests


def test_a_job_that_ends_by_whatever_it_raises_is_not_waited_for(world):
    def leave():
        raise sf.ClientGone()
    with not_held_up(20), pytest.raises(sf.ClientGone):
        list(sf.run_together(world, {"a": leave}, until=world.clock() + 15))


# -- a name that only its letters make private --

@pytest.mark.parametrize("host", ["ai", "ai.lan", "mini.local", "AI.Home.ARPA", "gpu.internal."])
@pytest.mark.parametrize("address", ["203.0.113.7", "::ffff:203.0.113.7", "2001:db8::7", "0.0.0.1"])
def test_a_private_name_of_a_public_address_is_never_connected(world, monkeypatch, host, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    names(monkeypatch, (family, address))
    called = calls(monkeypatch, 4321)
    reason, detail = failure(world, f"http://{host}:4321/")
    assert reason == "not private" and address in detail and not called
    assert "trust" in sf.fix_for_reason(reason, "ollama")


def test_of_a_private_name_only_its_private_addresses_are_tried(world, monkeypatch):
    port, requests = recorder()
    names(monkeypatch, (socket.AF_INET6, "2001:db8::7"), (socket.AF_INET, "203.0.113.7"),
          (socket.AF_INET, "127.0.0.1"))
    called = calls(monkeypatch, port)
    assert ask(world, f"http://mini.local:{port}/") == {} and len(requests) == 1
    assert [address for address, _ in called] == ["127.0.0.1"]


def test_a_name_that_moves_to_a_public_address_is_left(world, monkeypatch):
    port, requests = recorder()
    names(monkeypatch, (socket.AF_INET, "127.0.0.1"))
    assert ask(world, f"http://ai.lan:{port}/") == {}
    world.close_idle()
    world._addresses.clear()
    names(monkeypatch, (socket.AF_INET, "203.0.113.7"))
    assert failure(world, f"http://ai.lan:{port}/")[0] == "not private" and len(requests) == 1


def test_a_public_name_may_have_any_address_as_somebody_was_asked(world, monkeypatch):
    port, requests = recorder()
    names(monkeypatch, (socket.AF_INET, "127.0.0.1"))
    assert ask(world, f"http://gpu.example:{port}/") == {} and len(requests) == 1
    names(monkeypatch, (socket.AF_INET, "203.0.113.7"))
    called = []
    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {
        "connect": lambda self, place: called.append(place[0]) or self.close()}))
    failure(world, "http://gpu2.example:4321/")
    assert called == ["203.0.113.7"]


# -- failures --

def test_closed_port_is_refused(world):
    reason, detail = failure(world, f"http://127.0.0.1:{free_port()}/")
    assert (reason, detail) == ("refused", "nothing listens there")


@pytest.mark.parametrize("error, reason", [
    (OSError(errno.EHOSTUNREACH, "No route to host"), "unreachable"),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), "unreachable"),
    (socket.gaierror(-2, "Name or service not known"), "dns"),
    (UnicodeError("label too long"), "dns"),
])
def test_what_the_system_says_has_its_class(world, monkeypatch, error, reason):
    def fail(*_, **__):
        raise error
    if isinstance(error, (socket.gaierror, UnicodeError)):
        monkeypatch.setattr(socket, "getaddrinfo", fail)
    else:
        names(monkeypatch, (socket.AF_INET, "127.0.0.1"))
        monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"connect": fail}))
    assert failure(world, "http://studio.local:11434/")[0] == reason


def test_name_server_that_never_answers_is_dns_in_time(world, monkeypatch):
    gone = threading.Event()

    def look_up(*_, flags=0, **__):
        if flags:
            raise socket.gaierror("not an address")
        gone.wait(20)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with not_held_up(20):
        assert failure(world, "http://studio.local:1/", seconds=0.3)[0] == "dns"
    gone.set()


def test_connecting_ends_before_the_whole_deadline(world):
    port, held = hostile_nodes.black_hole()
    world.connect_seconds = 0.3
    with not_held_up(20):
        assert failure(world, f"http://127.0.0.1:{port}/", seconds=20)[0] == "timeout"
    assert held


def test_redirect_is_named_not_followed(world):
    port, requests = recorder()
    answer = hostile_nodes.whole(
        b"", b"HTTP/1.1 307 Look\r\nLocation: http://127.0.0.1:%d/\r\n" % port)
    reason, detail = failure(world, f"http://127.0.0.1:{serve(answer)}/")
    assert reason == "http 307" and f"http://127.0.0.1:{port}/" in detail and not requests


def test_self_signed_certificate_is_tls_with_its_reason(world, tmp_path):
    context = hostile_nodes.self_signed(tmp_path)
    if context is None:
        pytest.skip("no openssl here to make a certificate")
    port = serve(hostile_nodes.VERSION, context=context)
    reason, detail = failure(world, f"https://127.0.0.1:{port}/", seconds=3)
    assert reason == "tls" and "self" in detail
    world._tls.load_verify_locations(str(tmp_path / "cert.pem"))
    world._tls.check_hostname = False
    assert ask(world, f"https://127.0.0.1:{port}/", seconds=3) == {"version": "0.32.15"}


def test_plain_port_asked_with_tls_says_what_to_write(world):
    assert failure(world, f"https://127.0.0.1:{serve(hostile_nodes.VERSION)}/") \
        == ("tls", "it does not speak TLS; write http://")


def test_ollamas_words_are_the_detail(world):
    answer = hostile_nodes.whole(b'{"error": "model \'x\' not found"}', b"HTTP/1.1 404 Gone\r\n")
    assert failure(world, f"http://127.0.0.1:{serve(answer)}/") \
        == ("http 404", "model 'x' not found")


# -- the exchange itself --

def exchange(world, answer_or_port, *, seconds=5.0, reads_head=True):
    """Open an exchange with a server of one answer."""
    port = answer_or_port if isinstance(answer_or_port, int) else serve(answer_or_port)
    found = world.open_exchange(f"http://127.0.0.1:{port}/", deadline=world.clock() + seconds)
    if reads_head:
        found.read_head()
    return found


def test_lines_come_as_they_are_sent_and_the_last_may_lack_its_end(world):
    found = exchange(world, b"HTTP/1.0 200\r\n\r\n{1}\n{2}\n\n{3}")
    assert list(found.lines()) == [b"{1}", b"{2}", b"{3}"], "empty ones are left out"


def test_lines_that_came_at_once_come_together(world):
    found = exchange(world, b"HTTP/1.0 200\r\n\r\n{1}\n\n{2}\n{3}")
    assert list(found.batches()) == [[b"{1}", b"{2}"], [b"{3}"]]


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 4), (100,)])
def test_chunks_cut_anywhere_give_the_same_lines(world, sizes):
    body, chunks, at = b'{"a":1}\n{"b":2}\n' * 5, [], 0
    while at < len(body):
        for size in sizes:
            piece = body[at:at + size]
            chunks.append(b"%X;x=y\r\n%s\r\n" % (len(piece), piece) if piece else b"")
            at += size
    found = exchange(world, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                     + b"".join(chunks) + b"0\r\n\r\n")
    assert b"\n".join(found.lines()) + b"\n" == body


def test_answers_below_200_are_passed_over(world):
    found = exchange(world, b"HTTP/1.1 103 Hints\r\nA: b\r\n\r\nHTTP/1.1 201 Made\r\n"
                     b"X-Name:  v \r\nContent-Length: 2\r\n\r\nokrest")
    assert (found.status, found.headers["x-name"], found.read_all()) == (201, "v", b"ok")


def test_read_all_refuses_more_than_its_limit(world):
    with pytest.raises(sf.NodeFailure, match="longer than 3 bytes"):
        exchange(world, b"HTTP/1.1 200 OK\r\n\r\nabcd").read_all(3)


def test_cut_from_another_thread_ends_a_wait_at_once(world):
    found = exchange(world, hostile_nodes.listen(hostile_nodes.silence), seconds=30,
                     reads_head=False)
    threading.Timer(0.1, found.cut).start()
    with not_held_up(30), pytest.raises(sf.NodeFailure):
        found.read_head()


def test_what_another_thread_has_closed_is_waited_for_without_an_error(world):
    listener = world.listen("127.0.0.1", 0)
    listener.close()
    with not_held_up(30):
        assert listener.accept(30) is None


def test_deadline_may_be_set_anew_between_lines(world):
    beat = hostile_nodes.drip([b"HTTP/1.1 200 OK\r\n\r\n"] + [b"x\n"] * 50, 0.1)
    found = exchange(world, hostile_nodes.listen(beat), seconds=0.35)
    lines = found.lines()
    for _ in range(6):
        assert next(lines) == b"x"
        found.deadline = world.clock() + 0.35
    found.deadline = world.clock()
    with pytest.raises(sf.NodeFailure) as caught:
        for _ in lines:
            pass
    assert caught.value.reason == "timeout"


# -- JSON --

@pytest.mark.parametrize("text, reason", [
    (b"[" * 50_000 + b"]" * 50_000, "bad answer"),
    (b"[" + b"1," * 200_000 + b"1]", "bad answer"),
    (b'{"a": NaN}', "bad answer"), (b'{"a": Infinity}', "bad answer"),
    (b'{"a": 1', "bad answer"), (b'["\xff"]', "bad answer"), (b"<html>", "not ollama"),
    (b"", "not ollama"),
])
def test_answer_that_is_no_json_or_too_much_of_it(text, reason):
    with pytest.raises(sf.NodeFailure) as caught:
        sf.parse_answer(text, sf.Ollama())
    assert caught.value.reason == reason


@pytest.mark.parametrize("text", [
    b"7" * 900_000, b"-" + b"7" * 101, b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity",
    b"[" * 100_000, b"\xff", b""])
def test_json_that_no_program_takes_back_is_refused(text):
    with pytest.raises(ValueError):
        sf.parse_json(b'{"a": ' + text + b"}")


def test_json_numbers_as_large_as_any_are_kept():
    text = b'{"a": ' + b"7" * 100 + b', "b": [1.5e300, -0.5, 12]}'
    assert sf.parse_json(text) == {"a": int("7" * 100), "b": [1.5e300, -0.5, 12]}
    assert sf.parse_json('"\\ud800"') == "\ud800"


def test_allow_files_raises_the_limit_as_far_as_it_may(world):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, before[1]), before[1]))
        world.allow_files(300)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(300, hard) and hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_nothing_is_left_open(world):
    listing = PROC / "self/fd"
    if not listing.exists():
        pytest.skip("no /proc here")
    port, closed = serve(hostile_nodes.VERSION), free_port()
    ask(world, f"http://127.0.0.1:{port}/")
    before = len(os.listdir(listing))
    for _ in range(20):
        ask(world, f"http://127.0.0.1:{port}/")
        failure(world, f"http://127.0.0.1:{closed}/")
    assert len(os.listdir(listing)) <= before + 3


def test_a_free_port_is_found_above_a_taken_one():
    world = sf.World()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = world.find_free_port("127.0.0.1", port - 1)
        assert port < free <= port + 99
    assert world.find_free_port("127.0.0.1", 65535) == 0


# -- git, where the directory may be anybody's --

def hostile_repository(place, *, bare):
    """A repository that names programs wherever git lets one; each would leave a mark."""
    def git(*words):
        subprocess.run(["git", *words], cwd=str(place), check=True, env=environ)

    mark = place.parent / "mark"
    script = place.parent / "run-me"
    script.write_text(f"#!/bin/sh\ntouch {mark}\n")
    script.chmod(0o755)
    place.mkdir()
    hooks = place / "hooks" if bare else place / ".git" / "hooks"
    environ = clean_environment(HOME=place.parent, GIT_CONFIG_NOSYSTEM=1)
    git("init", "-q", *["--bare"] * bare, ".")
    if bare:
        environ["GIT_DIR"] = "."
        git("config", "core.bare", "false")
        git("config", "core.worktree", str(place))
    for name, value in (("core.repositoryformatversion", "1"), ("extensions.partialClone", "evil"),
                        ("remote.evil.promisor", "true"), ("remote.evil.url", str(place)),
                        ("remote.evil.uploadpack", f"{script};false")):
        git("config", name, value)
    # A .gitignore that is only in the index, and whose content the promisor has to send.
    git("update-index", "--add", "--cacheinfo", f"100644,{'1' * 40},.gitignore")
    git("update-index", "--skip-worktree", ".gitignore")
    git("config", "core.fsmonitor", str(script))
    git("config", "core.sshCommand", str(script))
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "pre-auto-gc", "query-watchman", "reference-transaction"):
        shutil.copy(script, hooks / name)
    (place / ".env.subagent-fleet").write_text("")
    environ.pop("GIT_DIR", None)
    return mark, environ


@pytest.mark.skipif(not shutil.which("git") or os.name != "posix", reason="needs git and sh")
@pytest.mark.parametrize("bare", [True, False])
def test_doctor_runs_nothing_that_a_repository_names(tmp_path, monkeypatch, capsys, bare):
    place = tmp_path / "clone"
    mark, environ = hostile_repository(place, bare=bare)
    subprocess.run(["git", "ls-files", "--others", "--exclude-standard", "--", ".env.subagent-fleet"],
                   cwd=str(place), env=environ, stderr=subprocess.DEVNULL, timeout=20)
    assert mark.exists(), "it is hostile"
    mark.unlink()
    (place / "fleet.yaml").write_text(workspace_cases.FLEET.replace(
        "http://studio.local:11434", f"http://127.0.0.1:{free_port()}"))
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "environ", environ)
    (place / ".env.subagent-fleet").unlink()
    assert sf.main(["generate"]) == 0
    assert sf.main(["doctor", "--timeout", "1"]) == 1 and not mark.exists()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_still_tells_what_it_knows(tmp_path, world):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "x").touch()
    assert world.run_git(["ls-files", "--others"], str(tmp_path)).output == b"x\n"
    assert world.run_git(["no-such-command"], str(tmp_path)).code == 1
