"""Section *HTTP* alone: visitors of a port, each answered with what was read of it."""
import contextlib
import json
import socket
import threading

import pytest

import subagent_fleet as sf

LIMIT = 1000  # bytes of a body


class Bell:
    """What a visitor can wait for beside its client."""

    def __init__(self):
        self._near, self._far = socket.socketpair()
        self.fileno = self._near.fileno

    def set(self):
        self._far.send(b"!")


class Front:
    """Visitors in threads of this process: each request is answered with what was read of it."""

    def __init__(self):
        self.world = sf.World()
        self.listener = self.world.listen("127.0.0.1", 0)
        self.port = self.listener.port
        self.heard, self.bugs, self.left = [], [], threading.Event()
        self.go_on, self.answer_after = threading.Event(), Bell()
        self.is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.is_open = False
        self.listener.ring()

    def _accept(self):
        while self.is_open:
            visitor = self.listener.accept(1.0)
            if visitor:
                threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()
        self.listener.close()

    def _serve(self, visitor):
        try:
            try:
                while visitor.stays:
                    request = visitor.read_request(5.0)
                    if not request:
                        break
                    self._respond(visitor, *request)
            except sf.BadRequest as error:
                visitor.stays = False
                visitor.reply(error.status, json.dumps(error.what).encode())
        except sf.ClientGone:
            self.left.set()
        except BaseException as error:
            self.bugs.append(error)
        finally:
            visitor.part()

    def _respond(self, visitor, method, target, headers):
        body = bytes(visitor.read_body(LIMIT, 5.0))
        self.heard.append((method, target, body))
        if target.startswith("/stream"):
            visitor.stream(b"one\n", head="Content-Type: text/plain\r\n")
            if target == "/stream-wait":
                assert visitor.wait(self.answer_after, 10)
            visitor.stream(b"two\n")
            visitor.stream(b"", last=True)
            return
        if target == "/wait":
            assert visitor.wait(self.answer_after, 10)
        visitor.reply(200, json.dumps([method, target, body.decode("latin-1")]).encode())

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def tell(self, sent, *, half_close=True):
        """Send bytes; return all that comes back until the connection ends."""
        with self.connect() as connection:
            connection.sendall(sent)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return read_to_end(connection)


def read_to_end(connection):
    received = b""
    with contextlib.suppress(ConnectionResetError):
        for piece in iter(lambda: connection.recv(65536), b""):
            received += piece
    return received


@pytest.fixture
def front():
    served = Front()
    yield served
    served.close()
    assert served.bugs == []
