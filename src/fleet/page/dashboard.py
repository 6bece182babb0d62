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


# The fleet on one page, for a browser on this machine. It can only be looked at: what is
# known of the fleet (a picture, sent anew when it changes) and what happens go to it as JSON,
# nothing comes back. A random token in the address becomes a cookie; without it there is
# nothing to see.

CODE_BYTES = 5
CODE_WANTED = ("this page needs the code that `subagent-fleet ui` printed; each code works once")
# Nothing but what the page itself brings, and nobody may frame it or learn where it lies.
PAGE_HEAD = ("Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
             "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
             "Cross-Origin-Opener-Policy: same-origin\r\nContent-Security-Policy: "
             "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
             "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
             "frame-ancestors 'none'\r\n")
# Texts that are handed out whole; NONCE is new in each answer.
DASHBOARD_HTML = asset("page/page.html")
DASHBOARD_STYLE = asset("page/page.css")
EVENTS_SCRIPT = asset("page/events.js")
PARTS_SCRIPT = asset("page/parts.js")
LANES_SCRIPT = asset("page/lanes.js")
DASHBOARD_PAGE = DASHBOARD_HTML.replace("@style\n", DASHBOARD_STYLE).replace(
    "@script\n", EVENTS_SCRIPT + PARTS_SCRIPT + LANES_SCRIPT)
# It is answered to the token: the page is then asked for by a page of its own address,
# without which browsers keep the cookie back from a link in another one; and no history
# has the token.
DOOR_PAGE = asset("page/door.html")
CODE_PAGE = asset("page/code.html")


class Dashboard(Reception):
    """Serves the page, and what it shows, to browsers that have its cookie.

    A code gives it, once: it is short, so that it can be typed, and cannot be guessed in
    the time that it is good. The arguments of a browser can be read by others, and so can
    its history.
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
        """Return an address that opens the page once."""
        self._codes.append(self.world.token(CODE_BYTES))
        return f"{self.place}?code={self._codes[-1]}"

    def awaits(self, address: str) -> bool:
        """Tell whether nobody has come by an address."""
        return address.rpartition("=")[2] in self._codes

    def show(self, picture: Mapping[str, Any]) -> None:
        """Send what is known of the fleet to all who look, where it has changed."""
        row = {"kind": "picture", "id": "picture", **picture}
        if row != self._picture:
            self._picture = row
            self.log.put(row)

    def start_over(self) -> None:
        """Forget what was under way; who looks comes back and is told what is so."""
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
        is_known = proves_key("".join(values[-1:]), self._token)  # of two, the last
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
        """Refuse whoever has no code; how long that takes tells nothing."""
        typed = query.partition("code=")[2].lower()
        for code in self._codes:
            if proves_key(typed, code):
                self._codes.remove(code)
                return
        raise Refusal(401, CODE_WANTED)

    def _send_page(self, visitor: Visitor, page: str, head: str = "",
                   status: int = 200) -> None:
        """Send a page whose own script and style, and no others, may be used."""
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
