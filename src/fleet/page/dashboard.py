"""The page's server."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.address import show_host
from fleet.gateway.keys import proves_key
from fleet.gateway.reception import Reception
from fleet.gateway.server import EVENTS_PATH
from fleet.speech.talk import Refusal
from fleet.start.gate import VERSION, asset

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.world.visitor import Listener, Visitor
    from fleet.world.world import World


# The fleet on one page, for a browser on this machine. It is read-only: the state of the fleet
# (a picture, sent again when it changes) and the gateway's events go to the page as JSON, and
# nothing comes back. A code in the address is exchanged for a cookie; without it there is nothing
# to see.

CODE_BYTES = 5
CODE_WANTED = ("this page needs the code that `subagent-fleet ui` printed; each code works once")
# The page loads nothing else, cannot be framed, and does not leak its address.
PAGE_HEAD = ("Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
             "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
             "Cross-Origin-Opener-Policy: same-origin\r\nContent-Security-Policy: "
             "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
             "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
             "frame-ancestors 'none'\r\n")
# Static texts; only NONCE is new in each answer.
DASHBOARD_HTML = asset("page/page.html")
DASHBOARD_STYLE = asset("page/page.css")
EVENTS_SCRIPT = asset("page/events.js")
PARTS_SCRIPT = asset("page/parts.js")
LANES_SCRIPT = asset("page/lanes.js")
DASHBOARD_PAGE = DASHBOARD_HTML.replace("@style\n", DASHBOARD_STYLE).replace(
    "@script\n", EVENTS_SCRIPT + PARTS_SCRIPT + LANES_SCRIPT)
# The answer to the code: it sets the cookie and loads the page from its own address. Browsers
# would not send the cookie along a link from another site, and so the code is in no history.
DOOR_PAGE = asset("page/door.html")
CODE_PAGE = asset("page/code.html")


class Dashboard(Reception):
    """Serves the page, and what it shows, to browsers that have its cookie.

    A code, which works once, is exchanged for the cookie. It is short enough to type, and
    cannot be guessed while it is valid. Other users can read a browser's arguments, so the
    cookie itself is never in an address.
    """

    def __init__(self, world: World, host: str, port: int) -> None:
        super().__init__(world, ("127.0.0.1", "localhost", "[::1]"))
        self.place = f"http://{show_host(host)}:{port}/"
        self._token = world.token(32)
        self._codes: list[str] = []
        self._picture: dict[str, Any] = {}

    @property
    def is_watched(self) -> bool:
        return "following" in self._visitors.copy().values()

    def run(self, listener: Listener) -> None:
        """Serve until `stop`."""
        self.serve(listener)
        self._end_visits()

    def invite(self) -> str:
        """Return a link that works once."""
        self._codes.append(self.world.token(CODE_BYTES))
        return f"{self.place}?code={self._codes[-1]}"

    def is_unused(self, address: str) -> bool:
        """Tell whether a link has not been used yet."""
        return address.rpartition("=")[2] in self._codes

    def show(self, picture: Mapping[str, Any]) -> None:
        """Send the picture of the fleet to all open pages, if it has changed."""
        row = {"kind": "picture", "id": "picture", **picture}
        if row != self._picture:
            self._picture = row
            self.log.put(row)

    def start_over(self) -> None:
        """Forget requests under way; open pages reconnect and get the current state."""
        self.log.start_over()
        if self._picture:
            self.log.put(self._picture)

    def _hello(self) -> dict[str, Any]:
        return {"version": VERSION}

    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        self._check_host(visitor, headers)
        visitor.refuse_body()
        self._visitors[visitor] = "asking"
        path, _, query = target.partition("?")
        if method not in ("GET", "HEAD"):
            raise Refusal(405, "this page is read-only")

        cookie = f"subagent_fleet_{visitor.reached[1]}"
        values = re.findall(rf"(?:^|;)\s*{cookie}=([^;]*)", headers.get("cookie", ""))
        is_known = proves_key("".join(values[-1:]), self._token)  # of two cookies, the last counts
        if path == "/" and query:
            if not is_known:
                self._use_code(query)
            head = (f"Set-Cookie: {cookie}={self._token}; HttpOnly; "
                    "SameSite=Strict; Path=/\r\n")
            self._send_page(visitor, DOOR_PAGE, head)
            return

        if not is_known:
            raise Refusal(401, CODE_WANTED)
        if path == EVENTS_PATH and method == "GET":
            self._follow(visitor)
        elif path == "/":
            self._send_page(visitor, DASHBOARD_PAGE)
        else:
            raise Refusal(404, "there is nothing at this path")

    def _use_code(self, query: str) -> None:
        """Refuse a wrong code, in constant time."""
        typed = query.partition("code=")[2].lower()
        for code in self._codes:
            if proves_key(typed, code):
                self._codes.remove(code)
                return
        raise Refusal(401, CODE_WANTED)

    def _send_page(self, visitor: Visitor, page: str, head: str = "",
                   status: int = 200) -> None:
        """Send a page that may run only its own script and style."""
        nonce = self.world.token(16)
        content = page.replace("NONCE", nonce).encode("utf-8")
        head += PAGE_HEAD.format(nonce=nonce)
        visitor.reply(status, content, head=head, kind="text/html; charset=utf-8")

    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        if refusal.what == CODE_WANTED:
            self._send_page(visitor, CODE_PAGE, status=refusal.http)
            return
        head = PAGE_HEAD.format(nonce="none")
        visitor.reply(refusal.http, f"{refusal.what}\n".encode(), head=head,
                      kind="text/plain; charset=utf-8")
