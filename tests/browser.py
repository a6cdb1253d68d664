"""A headless Chromium for tests, driven over its DevTools protocol through a socket that it inherits: no port.

`apt-get install chromium` brings it on Debian; tests that need it are skipped, and say so, where it is absent.
"""

import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += (
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
    "--window-size=1400,1200",
)
SECONDS = 600.0


class Page:
    """One open page."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS)
        self._connection = connection
        self._unread = b""  # beginning of the next message
        self._number = 0
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the browser's answer to a call of the protocol. Events in between are dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        self._connection.sendall(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                received = self._connection.recv(1 << 20)
                assert received, "the browser is gone"
                self._unread += received
            text, _, self._unread = self._unread.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression, as JSON has it. Waits for a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def open(self, path: pathlib.Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for(f"location.href === {json.dumps(path.as_uri())} && document.readyState === 'complete'")


@contextlib.contextmanager
def open_browser(profile: pathlib.Path) -> Iterator[Page]:
    """Open a page of a new Chromium that keeps its things in `profile`. Skips the test if there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    ours, theirs = socket.socketpair()
    # it reads calls from 3 and answers on 4
    command = ["bash", "-c", f'exec "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}', "bash", program, *FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}"], pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL
    )
    theirs.close()
    try:
        with ours:
            yield Page(ours)
    finally:
        process.kill()
        process.wait()
