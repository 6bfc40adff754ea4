"""A headless Chromium, spoken to by its DevTools protocol over a pair of pipes: JSON messages that end in a zero byte.

https://chromedevtools.github.io/devtools-protocol
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

PATIENCE = 120  # seconds for an answer, on a busy machine
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--no-first-run",
    "--no-default-browser-check", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab; `events` holds every message that was not an answer: requests, exceptions, lines of the console."""

    def __init__(self, width=1280, height=900):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (child_in, self.out), (self.inn, child_out) = os.pipe(), os.pipe()
        child = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (child_in, child_out)]
        null = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        pipes = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(child, (3, 4), strict=True)]
        arguments = [BROWSER, *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        self.pid = os.posix_spawn(BROWSER, arguments, os.environ, file_actions=[null, *pipes], setpgroup=0)
        for fd in (child_in, child_out, *child):
            os.close(fd)
        self.buffer, self.number, self.session, self.events = b"", 0, None, []
        tab = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")
        self.resize(width, height)

    def __call__(self, method, **params):
        """Send a command and return its answer."""
        self.number += 1
        session = {"sessionId": self.session} if self.session else {}
        os.write(
            self.out, json.dumps({"id": self.number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        while (message := self._receive()).get("id") != self.number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _receive(self):
        while b"\0" not in self.buffer:
            if not select.select([self.inn], [], [], PATIENCE)[0]:
                raise TimeoutError(f"Chromium has not answered for {PATIENCE} seconds.")
            some = os.read(self.inn, 1 << 20)
            if not some:
                raise RuntimeError("Chromium has gone.")
            self.buffer += some
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path):
        """Load a file and wait until its scripts have run."""
        self.events.clear()
        self("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def run(self, expression):
        """Evaluate JavaScript and return its value; an exception there is one here."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "exception"))
        return answer["result"].get("value")

    def press(self, key, code=0):
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def click(self, x, y):
        """Press the mouse at a point of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="none" if kind == "mouseMoved" else "left",
                clickCount=1,
            )

    def resize(self, width, height, scheme="light"):
        """Give the window a size and a colour scheme."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path, whole=False):
        """Save what the window, or the whole page, looks like."""
        data = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def complaints(self):
        """Return what went wrong in the page so far: exceptions, errors and warnings of the console or the browser."""
        self.run("0")
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
        return [event for event in self.events if event["method"] in bad]

    def requests(self):
        """Return the addresses that the page asked for, other than data inside it."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def close(self):
        """End the browser."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.out)
        os.close(self.inn)
        self.folder.cleanup()


@pytest.fixture(scope="session")
def browser():
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    tab = Page()
    yield tab
    tab.close()
