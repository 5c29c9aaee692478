"""A headless Chromium, driven over its DevTools protocol through a pair of pipes: no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ANSWER_S = 30.0


class Page:
    """One tab. `complaints`: uncaught exceptions, errors on the console, what the page's policy refused."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._rest, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Accessibility"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; what the browser tells meanwhile is taken note of."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            told = self._next(until)
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return dict(told["result"])
            self._note(told)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        self.evaluate("globalThis.isOld = true")
        self.send("Page.reload")
        self.wait("!globalThis.isOld && document.readyState === 'complete'")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not self.evaluate(f"(async () => Boolean(await ({expression})))()"):
            assert time.monotonic() < until, f"never: {expression}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "End": 35}
        what = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **what, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **what)

    def names(self) -> dict[str, list[str]]:
        """Names that assistive technology reads, by role."""
        found: dict[str, list[str]] = {}
        for node in self.send("Accessibility.getFullAXTree")["nodes"]:
            if not node.get("ignored"):
                found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
        return found

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, file: Path, width: int, height: int, scheme: str = "light") -> None:
        self.resize(width, height, scheme)
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._reads, 2**20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, told: dict[str, Any]) -> None:
        method, params = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser that keeps what it keeps under `profile`; it has ended when this returns."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    argv = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--no-proxy-server", "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream", f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip
    shell = ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}', "bash", *argv]
    process = subprocess.Popen(
        shell, pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    page = Page(from_browser[0], to_browser[1])
    try:
        page.attach()
        yield page
    finally:
        os.close(to_browser[1])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        os.close(from_browser[0])
