"""The head's side of the environment processes: messages go out and replies come in without waiting for either.

The processes live on the host of the head of each replica, so that nothing passes over the bridges between ranks while
episodes are played.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from grpo.config import EnvironmentConfig
from grpo.workers import processes

# For the supervisor to start and to load the user's file.
LOAD_SECONDS = 120.0


class EnvironmentHost:
    """The environment processes of one replica, behind one socket."""

    def __init__(self, config: EnvironmentConfig, style: str, num_processes: int, variables: Collection[str] = ()):
        """Start the supervisor, which loads the user's file. Call it on the main thread.

        style: how the model writes calls. variables: names of environment variables that the processes get. Raises
        ValueError if the file cannot be loaded.
        """
        self.supervisor, self._socket = processes.start_parent("grpo.environments.supervisor", variables)
        self._selector, self._inbox, self._outbox = selectors.PollSelector(), b"", bytearray()
        self._selector.register(self._socket, selectors.EVENT_READ)
        first = {"config": asdict(config), "style": style, "num_processes": num_processes}
        self._send(first | {"folder": os.getcwd(), "path": sys.path})
        replies = self.poll(LOAD_SECONDS)
        if not replies or "failed" in replies[0]:
            self.close()
            raise ValueError(replies[0]["failed"] if replies else f"loading took longer than {LOAD_SECONDS:g} s")

    def ask(self, episode: int, do: str, arguments: list[Any], seconds: float) -> None:
        """Have an episode do `reset`, `turn` or `finish`, see worker.Episode; `poll` gives the reply.

        Within `seconds`, or it has failed; a message waits before that for a free process.
        """
        self._send({"episode": episode, "do": do, "with": arguments, "seconds": seconds})

    def drop(self, episode: int) -> None:
        """End an episode that is given up; there may be a reply on its way."""
        self._send({"episode": episode, "do": "drop"})

    def poll(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Replies that are there, or the first within `seconds`. Raises RuntimeError if the supervisor ended."""
        give_up_at, replies = time.monotonic() + seconds, []
        while True:
            self._selector.modify(self._socket, selectors.EVENT_READ | bool(self._outbox) * selectors.EVENT_WRITE)
            left = max(0.0, give_up_at - time.monotonic())
            for _, events in self._selector.select(left):
                if events & selectors.EVENT_WRITE:
                    self._flush()
                if events & selectors.EVENT_READ:
                    replies += self._receive()
            if replies or left <= 0:
                return replies

    def _receive(self) -> list[dict[str, Any]]:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._socket.recv(1 << 20)
        if not data:
            code = self.supervisor.wait(processes.CLOSE_SECONDS)
            raise RuntimeError(f"the process that supervises the environments hung up; it ended with code {code}")
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        # without waiting, whoever of the two is busy: both would, for each other
        with contextlib.suppress(BlockingIOError):
            del self._outbox[: self._socket.send(self._outbox, socket.MSG_DONTWAIT)]

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self._selector.close()
        processes.end_parent(self.supervisor, self._socket)
