"""The head's side of the environment processes: messages go out and replies come in without waiting for either.

The processes live on the host of the head of each replica, so that nothing passes over the bridges between ranks while
episodes are played. The user's file is imported once, in their supervisor, and processes are forked from it. An episode
keeps its process until it has finished; where there are only functions as tools, any process answers any turn.
"""

import functools
import json
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from grpo.config import EnvironmentConfig
from grpo.environments import worker
from grpo.workers.processes import Call, Workers


class Asked(NamedTuple):
    """A message that waits for its reply."""

    do: str
    arguments: list[Any]
    seconds: float
    again: bool = False


class EnvironmentHost:
    """The environment processes of one replica."""

    def __init__(self, config: EnvironmentConfig, style: str, num_processes: int, variables: Collection[str] = ()):
        """Have the user's file loaded. Call it on the main thread.

        style: how the model writes calls. variables: names of environment variables that the processes get. Raises
        ValueError if the file cannot be loaded.
        """
        self.config = config
        self._asked: dict[int, Asked] = {}
        load = functools.partial(worker.load, config, style)
        self.workers = Workers("environments", load, num_processes, config.memory_gib, variables, loads_once=True)

    def ask(self, episode: int, do: str, arguments: list[Any], seconds: float, again: bool = False) -> None:
        """Have an episode do `reset`, `turn` or `finish`, see worker.Episode; `poll` gives the reply.

        Within `seconds`, or it has failed; a message waits before that for a free process.
        """
        self._asked[episode] = Asked(do, arguments, seconds, again)
        conversation = episode if self.config.all_classes else None
        line = json.dumps([do, *arguments]).encode()
        self.workers.submit([Call(episode, line, seconds, conversation=conversation, ends=do == "finish")])

    def drop(self, episode: int) -> None:
        """End an episode that is given up."""
        self.workers.drop(episode)

    def poll(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Replies that are there, or the first within `seconds`. Raises RuntimeError if the supervisor ended.

        `{episode, ...}`, what worker.py replied, or `{episode, failed, kind}`. `kind` is `hung` where the process was
        computing when its time was over, which the policy's call has most likely caused; `lost` where it was waiting or
        died, which the policy cannot have caused.
        """
        give_up_at = time.monotonic() + seconds
        while True:
            left = max(0.0, give_up_at - time.monotonic())
            outcomes = self.workers.poll(left)
            if (replies := [reply for outcome in outcomes if (reply := self._reply(**outcome))]) or not outcomes:
                return replies

    def _reply(self, call: int, value: Any = None, failed: str = "", cause: str = "") -> dict[str, Any] | None:
        """What came of a message; None of a failed reset, which is tried once more in another process."""
        asked = self._asked.pop(call)
        if not cause:
            return {"episode": call, **value}
        if asked.do == "reset" and not asked.again:
            self.ask(call, *asked[:3], again=True)
            return None
        is_late = asked.do == "turn" and cause in ("late", "busy")
        if is_late and not self.config.all_classes:
            answer = f"It took longer than {asked.seconds:g} s and was stopped."
            counts = {"calls": 1, "hung_calls": 1}
            return {"episode": call, "answers": [answer], "role": "", "ended": False, "counts": counts}
        if cause == "memory":
            failed = f"it took more than environment.memory_gib={self.config.memory_gib:g}"
        is_hung = cause == "memory" or (is_late and cause == "busy")
        return {"episode": call, "failed": f"{asked.do}: {failed}", "kind": "hung" if is_hung else "lost"}

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self.workers.close()
