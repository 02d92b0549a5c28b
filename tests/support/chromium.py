"""A page in headless Chromium, driven over its debugging pipe: evaluate, wait, take pictures. Knows no server."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser's program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. `errors`: what it logged as wrong, or could not load."""

    def __init__(self, program: str, folder: Path, size: tuple[int, int] = (1200, 760)) -> None:
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()

        def plumb() -> None:
            """The browser reads commands from descriptor 3 and answers on 4, between zero bytes."""
            found = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in (theirs_in, theirs_out)]
            for number, wanted in zip(found, (3, 4), strict=True):
                os.dup2(number, wanted)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}", "about:blank"],
            preexec_fn=plumb,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._ids, self._session, self._rest = itertools.count(1), "", b""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        id, session = next(self._ids), {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps({"id": id, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression, waited for if it is a promise."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = 60) -> None:
        """Evaluate until it is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"!!({script})"):
            assert time.monotonic() < deadline, f"{script}: {self.errors}"
            time.sleep(0.05)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))
