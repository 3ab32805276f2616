"""A headless Chromium that opens pages and evaluates scripts in them, through the DevTools protocol over two pipes."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONG = 120  # seconds; the machine may be busy
PROGRAM = "chromium"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root, where the sandbox refuses to start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--window-size=1100,900",
)


class Page:
    """One tab. Its errors are collected in ``errors``, the URLs that it loads in ``requests``."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._number, self._session = 0, ""
        self._buffer = b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends one command of the protocol and returns its result; events that arrive meanwhile are recorded."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            self._note(reply)
        assert "error" not in reply, f"{method}: {reply['error']}"
        return dict(reply["result"])

    def open(self, where: Path | str) -> None:
        """Opens a file or a URL and waits until the page has loaded."""
        before = self._loaded
        self.call("Page.navigate", url=where if isinstance(where, str) else where.resolve().as_uri())
        while self._loaded == before:
            self._note(self._next())

    def media(self, scheme: str, medium: str = "screen") -> None:
        """Emulates ``light`` or ``dark``, ``screen`` or ``print``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def until(self, script: str) -> Any:
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + LONG
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"{script}: expected it to become true, found {value}"
            time.sleep(0.05)
        return value

    def width(self, pixels: int) -> None:
        """Emulates a window of this width."""
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False)

    def evaluate(self, script: str) -> Any:
        """Evaluates an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], LONG)
            assert ready, f"the browser said nothing for {LONG} s"
            more = os.read(self._read, 1 << 16)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(found["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("warning", "error"):
            self.errors.append(found["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("warning", "error", "assert"):
            self.errors.append(" ".join(str(each.get("value")) for each in found["args"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Starts a browser with one page; it ends with the block.

    Args:
        profile: Folder for the browser's files; it is created.
    """
    program = shutil.which(PROGRAM)
    assert program is not None, f"expected `{PROGRAM}` on PATH, found none\nhint: apt-get install {PROGRAM}"
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # The browser reads commands from descriptor 3 and writes results to 4, whatever numbers the pipes have in this
    # process.
    line = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with open(profile.with_suffix(".log"), "wb") as log, contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            ["bash", "-c", line, "bash", program, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(_end, process)
        os.close(theirs_in)
        os.close(theirs_out)
        stack.callback(os.close, ours_in)
        stack.callback(os.close, ours_out)
        yield Page(ours_in, ours_out)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the browser and its helper processes, which run in a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LONG)
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
