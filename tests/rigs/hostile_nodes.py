"""Nodes that misbehave, each on a port of its own, and what must be said of each.

`start_hostile_nodes()` gives {name: (endpoint, wanted)}: `wanted` is a set of reason classes, or
the list of model names that must arrive unharmed.
"""
import json
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import zlib

from tools import free_port

NAMES = ["\x1b[2J\x1b]0;owned\x07:latest", "two\nlines:1b", "[/x]:1b", "\u202egnp:1b", "\ud800:1b",
         "\u00e9\U0001f600:1b", "a" * 300 + ":1b"]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def whole(body, head=OK):
    """Return a complete answer."""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


VERSION = whole(b'{"version": "0.32.15"}')
EMPTY = whole(b'{"models": []}')


def drip(pieces, seconds=0.2):
    """A behaviour: one piece, a pause, the next, for ever."""
    def behave(connection, path):
        while True:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(seconds)
    return behave


def stream(head, piece, count=None):
    """A behaviour: a head, then the same piece as often as told, or for ever."""
    def behave(connection, path):
        connection.sendall(head)
        left = count
        while left is None or left > 0:
            connection.sendall(piece)
            left = left and left - 1
    return behave


def say(answer):
    """A behaviour: one answer, then close."""
    return lambda connection, path: connection.sendall(answer)


def silence(connection, path):
    """A behaviour: nothing, until the other side gives up."""
    connection.recv(1)


def reset(connection, path):
    """A behaviour: half an answer, then RST."""
    connection.sendall(OK + b"Content-Length: 500\r\n\r\n{\"version\": ")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def only(path, behave):
    """A node that is honest but for one path."""
    def choose(connection, asked):
        if asked == path:
            behave(connection, asked)
        else:
            connection.sendall(VERSION if asked == "/api/version" else EMPTY)
    return choose


def gzip_bomb():
    """64 MB of blanks in 64 KB of gzip."""
    pressed = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = pressed.compress(b" " * (64 << 20)) + pressed.flush()
    return say(whole(body, OK + b"Content-Encoding: gzip\r\n"))


def tags(names):
    """What /api/tags says of models with these names."""
    return whole(json.dumps({"models": [{"name": name} for name in names]}).encode())


DEEP = whole(b"[" * 100_000 + b"]" * 100_000)
MILLION = b'{"models":[' + b",".join(b'{"name":"m%d"}' % i for i in range(100_000)) + b"]}"
BEHAVIOURS = {
    "silent": (silence, {"timeout"}),
    "drip-in-headers": (drip([b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"] + [b"x"] * 50), {"timeout"}),
    "drip-in-body": (only("/api/tags", drip([OK + b"Content-Length: 900\r\n\r\n"] + [b" "] * 900)),
                     {"timeout"}),
    "drip-in-chunks": (drip([OK + b"Transfer-Encoding: chunked\r\n\r\n"] + [b"1\r\n \r\n"] * 900),
                       {"timeout"}),
    "endless-headers": (stream(b"HTTP/1.1 200 OK\r\n", b"X-Pad: " + b"a" * 1000 + b"\r\n"),
                        {"bad answer"}),
    "endless-header-line": (stream(b"HTTP/1.1 200 OK\r\nX-Pad: ", b"a" * 1000), {"bad answer"}),
    "endless-body": (stream(OK + b"\r\n{\"version\": \"", b"a" * 65536), {"bad answer"}),
    "endless-chunks": (stream(OK + b"Transfer-Encoding: chunked\r\n\r\n",
                              b"10000\r\n" + b"a" * 65536 + b"\r\n"), {"bad answer"}),
    "endless-100": (stream(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), {"not ollama"}),
    "300-megabytes": (only("/api/tags", stream(
        OK + b"Content-Length: 300000000\r\n\r\n{\"models\":[", b'{"name": "m"},' * 4000)),
        {"bad answer"}),
    "gzip-bomb": (gzip_bomb(), {"bad answer"}),
    "html": (say(whole(b"<html><h1>It works!</h1></html>")), {"not ollama"}),
    "redirect": (say(whole(b"", b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n")),
                 {"http 302"}),
    "login": (say(whole(b'{"error": "unauthorized"}', b"HTTP/1.1 401 No\r\n")), {"http 401"}),
    "broken": (say(whole(b"oops", b"HTTP/1.1 500 Oops\r\n")), {"http 500"}),
    "truncated-json": (only("/api/tags", say(whole(b'{"models": [{"name": "m'))), {"bad answer"}),
    "list-for-object": (only("/api/tags", say(whole(b"[1, 2]"))), {"bad answer"}),
    "list-for-version": (say(whole(b"[1, 2]")), {"not ollama"}),
    "100000-deep": (only("/api/tags", say(DEEP)), {"bad answer"}),
    "9000-deep": (only("/api/tags", say(whole(b'{"models":' + b"[" * 9000 + b"]" * 9000 + b"}"))),
                  {"bad answer"}),
    "100000-models": (only("/api/tags", say(whole(MILLION))), {"bad answer"}),
    "million-models": (only("/api/tags", stream(
        OK + b"Content-Length: 15000000\r\n\r\n{\"models\":[", b'{"name": "m1"},' * 1000, 1000)),
        {"bad answer"}),
    "empty-lists": (only("/api/tags", say(whole(b"[" + b"[]," * 2_000_000 + b"[]]"))),
                    {"bad answer"}),
    "long-integer": (only("/api/tags", say(whole(b'{"models":[],"x":' + b"9" * 900_000 + b"}"))),
                     {"bad answer"}),
    "wide-text": (only("/api/tags", say(whole(
        b'{"models":[],"x":"\xf0\x9f\x98\x80' + b"a" * 7_000_000 + b'"}'))), {"bad answer"}),
    "not-a-number": (only("/api/tags", say(whole(b'{"models":[],"x":NaN}'))), {"bad answer"}),
    "not-utf8": (only("/api/tags", say(whole(b'{"models":[{"name":"\xff\xfe"}]}'))),
                 {"bad answer"}),
    "odd-types": (only("/api/tags", say(whole(json.dumps({"models": [
        {"name": "m:1b", "size": "big", "details": [1], "remote_host": {}}]}).encode()))),
        ["m:1b"]),
    "names": (only("/api/tags", say(tags(NAMES))), NAMES),
    "nameless": (only("/api/tags", say(whole(b'{"models":[{"name":7}]}'))), {"bad answer"}),
    "longer-than-said": (say(whole(b'{"version":"1"}')[:-4] + b"   garbage after"), {"bad answer",
                                                                                    "not ollama"}),
    "shorter-than-said": (say(OK + b"Content-Length: 99\r\n\r\n{\"version\":\"1\"}"),
                          {"bad answer"}),
    "length-no-number": (say(OK + b"Content-Length: many\r\n\r\n{}"), {"bad answer"}),
    "chunk-no-number": (say(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}"), {"bad answer"}),
    "reset": (reset, {"bad answer"}),
    "http-0.9": (say(b"Ollama is running"), {"not ollama"}),
    "closes-at-once": (say(b""), {"bad answer"}),
    "tls-alert": (say(b"\x15\x03\x01\x00\x02\x02\x46"), {"tls"}),
    "tls-of-go": (say(whole(b"Client sent an HTTP request to an HTTPS server.\n",
                            b"HTTP/1.0 400 Bad Request\r\n")), {"tls"}),
    "tls-of-nginx": (say(whole(b"<html>\n<title>400 The plain HTTP request was sent to HTTPS port"
                               b"</title>", b"HTTP/1.1 400 Bad Request\r\n")), {"tls"}),
    "other-protocol": (say(b"SSH-2.0-OpenSSH_9.9\r\n"), {"not ollama"}),
}


def listen(behave, *, context=None, host="127.0.0.1"):
    """Serve one behaviour on a new port; return the port."""
    server = socket.create_server((host, 0), backlog=64, family=socket.AF_INET6 if ":" in host
                                  else socket.AF_INET)

    def serve(connection):
        try:
            with connection:
                if context:
                    connection = context.wrap_socket(connection, server_side=True)
                request = b""
                while b"\r\n\r\n" not in request and request[:1] != b"\x16":  # TLS hello
                    piece = connection.recv(4096)
                    if not piece:
                        return
                    request += piece
                behave(connection, request.split(b" ")[1].decode("latin-1"))
        except (OSError, IndexError):
            pass  # the other side has gone, as it should

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def black_hole():
    """A port that never completes a connection: its backlog is full. Returns (port, sockets)."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    held = [server]
    for _ in range(4):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(server.getsockname())
        held.append(client)
    return server.getsockname()[1], held


def self_signed(directory):
    """Return a TLS context with a certificate nobody trusts, or None without openssl."""
    if not shutil.which("openssl"):
        return None
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem"], cwd=str(directory),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if made.returncode:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(directory / "cert.pem"), str(directory / "key.pem"))
    return context


def start_hostile_nodes(directory):
    """Start all of them; return {name: (endpoint, wanted)} and what must stay alive meanwhile."""
    nodes = {name: (f"http://127.0.0.1:{listen(behave)}", wanted)
             for name, (behave, wanted) in BEHAVIOURS.items()}
    port, held = black_hole()
    nodes["black-hole"] = f"http://127.0.0.1:{port}", {"timeout"}
    nodes["closed"] = f"http://127.0.0.1:{free_port()}", {"refused"}
    nodes["no-such-name"] = "http://fleet-test-no-such-host.local:11434", {"dns", "timeout"}
    nodes["plain-for-tls"] = f"https://127.0.0.1:{listen(say(VERSION))}", {"tls"}
    context = self_signed(directory)
    if context:
        nodes["self-signed"] = f"https://127.0.0.1:{listen(say(VERSION), context=context)}", {"tls"}
        nodes["tls-for-plain"] = f"http://127.0.0.1:{listen(say(VERSION), context=context)}", \
            {"tls", "bad answer"}
    return nodes, held
