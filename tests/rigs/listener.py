"""Who holds a port and keeps every byte that comes, as a thief would."""
import json
import re
import socket
import threading


class Listener:
    """Answers each request with what `say(path)` returns, a value or bytes; None: 404.

    `heard` is all that came, of all connections, in the order of their ends.
    """

    def __init__(self, say=lambda path: None, host="127.0.0.1", port=0):
        self.say, self.heard, self.paths = say, b"", []
        self._socket = socket.create_server((host, port))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self):
        """Give the port back."""
        self._socket.close()

    def _run(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection:
            connection.settimeout(5)
            request = b""
            try:
                while b"\r\n\r\n" not in request:
                    piece = connection.recv(65536)
                    if not piece:
                        break
                    request += piece
                    self.heard += piece
                path = request.split(b" ")[1].decode() if b" " in request else ""
                self.paths.append(path)
                length = re.search(rb"(?i)content-length: *(\d+)", request)
                body = request.partition(b"\r\n\r\n")[2]
                while length and len(body) < int(length[1]):
                    piece = connection.recv(65536)
                    if not piece:
                        break
                    body += piece
                    self.heard += piece
                connection.sendall(self._reply(path))
            except OSError:
                pass

    def _reply(self, path):
        page = self.say(path)
        content = page if isinstance(page, bytes) else json.dumps(page).encode()
        status = b"404 Not Found" if page is None else b"200 OK"
        return (b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
                b"Connection: close\r\n\r\n%s" % (status, len(content), content))
