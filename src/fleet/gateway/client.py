"""The client of a request: its login for a cloud, and the answer it has been sent."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.gateway.reception import QUIET_SECONDS
from fleet.speech.cloud import HANDED_BACK, HandedBack
from fleet.speech.messages import Messages
from fleet.speech.talk import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet.config.sections import Node
    from fleet.speech.answer import Delta, End
    from fleet.speech.dialect import Dialect, Writer
    from fleet.speech.talk import Refusal, Talk
    from fleet.world.exchange import Exchange
    from fleet.world.visitor import Visitor
    from fleet.world.world import World


# When this much of an answer is waiting it is sent, even if the node has more to say.
OUT_BYTES = 16 * 1024


_NO_LOGIN = (
    b'{"type":"error","error":{"type":"authentication_error","message":"this model is '
    b"answered with your own login, and none came: type /login, and start by "
    b'`subagent-fleet launch claude`"}}')


def login_headers(node: Node, headers: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the client's headers that a node of Anthropic's gets; others get none."""
    if node.provider != "anthropic":
        return {}
    shown = {name: value for name, value in headers.items()
             if name.startswith("anthropic-") or name == "x-app"}
    if "user-agent" in headers:
        shown["User-Agent"] = headers["user-agent"]  # instead of this program's own
    if not node.auth:
        return shown
    logins = {name: headers[name] for name in ("authorization", "x-api-key")
              if headers.get(name)
              and headers[name].rpartition(" ")[2].strip() != key}  # the gateway's stays here
    if not logins:
        raise HandedBack(Reply(401, {}, _NO_LOGIN), "no login came")
    return {**shown, **logins}


class Client:
    """Writes the answer to one request in its client's dialect, and keeps the client waiting.

    What is written is sent when the node has nothing more to say for now. Until then it can
    be taken back, and another model may begin the answer again.
    """

    def __init__(self, world: World, visitor: Visitor, dialect: Dialect, talk: Talk,
                 answer_id: str) -> None:
        self._world, self._visitor = world, visitor
        self._dialect, self._talk, self._id = dialect, talk, answer_id
        self._id_header = f"request-id: req_{answer_id}\r\n"
        self._out = bytearray()  # what was written and not yet sent
        self._has_headers = False
        self.has_content = False  # the client has some of an answer, which cannot be taken back
        self._number = 0  # of the latest event that was sent
        self.begin()
        self.is_stream = self._writer.is_stream
        self._ping_at = world.clock() + QUIET_SECONDS if self.is_stream else float("inf")

    def begin(self) -> None:
        """Begin the answer; drop what an earlier model said and was not sent."""
        self._out.clear()
        self._writer: Writer = self._dialect.writes(self._talk, self._id)
        if self._has_headers:
            self._writer.begin()  # the client has it already
            self._writer.number = self._number

    def write(self, deltas: list[Delta]) -> End | None:
        """Write deltas; return the End if it is among them."""
        out, writer = self._out, self._writer
        for delta in deltas:
            if delta.end:
                out += writer.end(delta.end)
                return delta.end
            out += writer.write(delta)
        if len(out) > OUT_BYTES:
            self._send()
        return None

    def end(self) -> None:
        """Send the rest of the answer, or all of it if it is not a stream."""
        if self.is_stream:
            self._send(last=True)
        else:
            self._visitor.reply(200, bytes(self._out), head=self._id_header)

    def refuse(self, refusal: Refusal) -> None:
        """Send a refusal in the client's own words."""
        if self._has_headers:  # the HTTP status has been sent already
            self._send(self._writer.fail(refusal), last=True)
            return

        head, body = retry_header(refusal), self._dialect.refuse(refusal)
        if isinstance(refusal, HandedBack) and isinstance(self._dialect, Messages):
            body = bytes(refusal.reply.body)
            head = "".join(f"{name}: {value}\r\n"
                           for name, value in refusal.reply.headers.items()
                           if HANDED_BACK.fullmatch(name) and re.fullmatch("[ -~]*", value))
        self._visitor.reply(refusal.http, body, head=self._id_header + head)

    def wait(self, exchange: Exchange | None, until: float) -> bool:
        """Tell whether a node says more in time; pings keep the client from giving up.

        If the client leaves, ClientGone ends the wait.
        """
        if self._out:
            self._send()
        while True:
            now = self._world.clock()
            if now >= self._ping_at:
                self._send(self._writer.ping())
            elif self._visitor.wait(exchange, min(until, self._ping_at) - now):
                return True
            elif self._world.clock() >= until:
                return False

    def _send(self, more: bytes = b"", *, last: bool = False) -> None:
        """Send what was written; the first time after the headers and the stream's opening."""
        chunk, head = bytes(self._out) + more, ""
        self.has_content = self.has_content or bool(self._out)
        self._out.clear()
        if not self._has_headers:
            self._has_headers = True
            head = ("Content-Type: text/event-stream; charset=utf-8\r\n"
                    f"Cache-Control: no-cache\r\n{self._id_header}")
            chunk = self._writer.begin() + chunk
        self._number = self._writer.number
        self._visitor.stream(chunk, head=head, last=last)
        self._ping_at = self._world.clock() + QUIET_SECONDS


def retry_header(refusal: Refusal) -> str:
    """Return the header line that says when to try again, if that helps."""
    if not refusal.retry_seconds:
        return ""
    return f"Retry-After: {refusal.retry_seconds}\r\n"
