"""A real Chromium, driven over its DevTools protocol by a small WebSocket client of our own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import install

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-default-apps", "--no-default-browser-check", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--remote-allow-origins=*", "--remote-debugging-port=0")


def find_program():
    """Where Chromium lies, None where there is none."""
    return next(filter(None, map(shutil.which, install.CHROMIUMS)), None)


class DevToolsError(Exception):
    """What a DevTools method could not do."""


class Socket:
    """The client's half of one WebSocket (RFC 6455) on loopback."""

    def __init__(self, port, path):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        self.connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode())
        self.stream = self.connection.makefile("rb")
        assert b" 101 " in self.stream.readline()
        while self.stream.readline() != b"\r\n":
            pass
        self.connection.settimeout(None)

    def send(self, text):
        content = text.encode()
        size = len(content)
        head = bytes([0x81])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 65536:
            head += bytes([0x80 | 126]) + struct.pack(">H", size)
        else:
            head += bytes([0x80 | 127]) + struct.pack(">Q", size)
        self.connection.sendall(head + bytes(4) + content)  # a mask of zeros changes nothing

    def receive(self):
        """The next whole text message; None at the end."""
        text = b""
        while True:
            head = self.stream.read(2)
            if len(head) < 2:
                return None
            size = head[1] & 127
            if size == 126:
                size = struct.unpack(">H", self.stream.read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self.stream.read(8))[0]
            text += self.stream.read(size)
            if head[0] & 0x80:
                return text.decode()

    def close(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Browser:
    """One headless Chromium with a profile of its own; `open` gives its pages."""

    def __init__(self, folder):
        profile = pathlib.Path(folder)
        profile.mkdir(parents=True, exist_ok=True)
        (profile / "profile" / "DevToolsActivePort").unlink(missing_ok=True)
        self.log = (profile / "browser.log").open("wb")
        self.child = subprocess.Popen(
            [find_program(), *FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            env={**os.environ, "HOME": str(profile)})
        try:
            self.port, path = self._address(profile / "profile" / "DevToolsActivePort")
            self.wire = Socket(self.port, path)
        except BaseException:
            os.killpg(self.child.pid, signal.SIGKILL)
            raise
        self.events, self.answers = [], {}
        self._number, self._news = 0, threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _address(self, path):
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                port, place = path.read_text(encoding="utf-8").splitlines()
                return int(port), place
            time.sleep(0.05)
        raise AssertionError("Chromium does not start; see browser.log")

    def _listen(self):
        with contextlib.suppress(OSError, ValueError):
            for text in iter(self.wire.receive, None):
                message = json.loads(text)
                with self._news:
                    if "id" in message:
                        self.answers[message["id"]] = message
                    else:
                        self.events.append(message)
                    self._news.notify_all()

    def call(self, method, session=None, **parameters):
        """What a DevTools method answers."""
        with self._news:
            self._number += 1
            number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self.wire.send(json.dumps(message))
        with self._news:
            assert self._news.wait_for(lambda: number in self.answers, 60), f"no answer to {method}"
            answer = self.answers.pop(number)
        if "error" in answer:
            raise DevToolsError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url, *, width=1440, height=900, theme="light", context=None):
        """A page that shows an address."""
        return Page(self, url, width=width, height=height, theme=theme, context=context)

    def context(self):
        """A fresh set of cookies."""
        return self.call("Target.createBrowserContext")["browserContextId"]

    def close(self):
        self.wire.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(10)
        self.log.close()


class Page:
    """One tab; what it logged, asked for and threw is kept."""

    def __init__(self, browser, url, *, width, height, theme, context=None):
        self.browser = browser
        extra = {"browserContextId": context} if context else {}
        target = browser.call("Target.createTarget", url="about:blank", **extra)["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target,
                                    flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.look(width=width, height=height, theme=theme)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def look(self, *, width, height=900, theme="light", scale=1, motion="no-preference"):
        """Show it at a width, in a theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": motion}])

    def run(self, script):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script, seconds=20.0):
        """The value of an expression once it is true."""
        until = time.monotonic() + seconds
        thrown = ""
        while time.monotonic() < until:
            try:
                value = self.run(script)
                if value:
                    return value
            except (DevToolsError, AssertionError) as error:  # it is on its way to another page
                thrown = f": {error}"
            time.sleep(0.05)
        raise AssertionError(f"the page does not come to: {script}{thrown}")

    def press(self, key, code=0):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code)

    def shot(self, path, height=None):
        """Keep a picture of the page, whole or its upper part."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                           clip={"x": 0, "y": 0, "width": size["width"],
                                 "height": height or size["height"], "scale": 1})
        pathlib.Path(path).write_bytes(base64.b64decode(answer["data"]))

    def memory_mb(self):
        """What its script and its document hold after the garbage has gone."""
        self.call("HeapProfiler.collectGarbage")
        sizes = self.call("Runtime.getHeapUsage")
        names = ("usedSize", "embedderHeapUsedSize", "backingStorageSize")
        return sum(sizes.get(name, 0) for name in names) / 1e6

    def _events(self, *methods):
        return [event["params"] for event in self.browser.events
                if event.get("sessionId") == self.session and event["method"] in methods]

    def complaints(self):
        """Every error, warning and exception of the page."""
        said = [str(each["entry"]["text"]) + " " + each["entry"].get("url", "")
                for each in self._events("Log.entryAdded")]
        said += [json.dumps(each["args"])[:500] for each in self._events("Runtime.consoleAPICalled")]
        return said + [json.dumps(each["exceptionDetails"])[:800]
                       for each in self._events("Runtime.exceptionThrown")]

    def asked_for(self):
        """The addresses of all that it asked for."""
        return [each["request"]["url"] for each in self._events("Network.requestWillBeSent")]

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)
