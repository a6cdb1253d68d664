"""Environment processes: the head's side, which waits for none of them, and what happens in one of them.

They live on the host of the head of each replica, so that nothing passes over the bridges between ranks while episodes
are played. The user's file is imported once, in their supervisor, and processes are forked from it. An episode keeps
its process until it has finished; where there are only functions as tools, any process answers any turn.

Whatever the policy may have caused is an answer that it reads; what it cannot have caused is raised, and the episode
has no reward. Left out: deadlines, which are the supervisor's.
"""

import functools
import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from grpo.config import EnvironmentConfig
from grpo.environments import calls
from grpo.environments.tools import Lost, Toolbox, awaited, load_toolboxes, run_call
from grpo.text import shorten
from grpo.workers.processes import Call, Workers
from grpo.workers.worker import Failure, plain_values

# Of all answers to a turn, and of what `get_info` says: what a tool floods is cut here, before it fills a socket.
MOST_CHARACTERS = 32_000


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
        loader = functools.partial(load, config, style)
        self.workers = Workers("environments", loader, num_processes, config.memory_gib, variables, loads_once=True)

    def ask(self, episode: int, do: str, arguments: list[Any], seconds: float, again: bool = False) -> None:
        """Have an episode do `reset`, `turn` or `finish`, see `Episode`; `poll` gives the reply.

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

        `{episode, ...}`, what `Episode` replied, or `{episode, failed, kind}`. `kind` is `hung` where the process was
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


def load(config: EnvironmentConfig, style: str) -> Callable[..., dict[str, Any]]:
    """Load the user's files; returns what does `reset`, `turn` or `finish` for the episode that a process is at.

    style: how the model writes calls, see calls.py.
    """
    episode = Episode(load_toolboxes(config), style)

    def answer(do: str, *arguments: Any) -> dict[str, Any]:
        if do != "reset" and config.all_classes and episode.object is None:
            raise Lost("its process ended between two turns")
        return getattr(episode, do)(*arguments)

    return answer


class Episode:
    """One rollout's object, None where there are only functions as tools."""

    def __init__(self, toolboxes: Mapping[str, Toolbox], style: str):
        """toolboxes: by the names of environments."""
        self.toolboxes, self.style = toolboxes, style
        self.toolbox, self.object = toolboxes.get(""), None

    def reset(self, row: dict[str, Any], seed: int, rollout: int, environment: str = "") -> dict[str, Any]:
        """Begin; `text` stands behind the row's own prompt, None for nothing. environment: the name of its class."""
        self.toolbox = self.toolboxes[environment]
        self.object = self.toolbox.factory()
        text = awaited(self.object.reset(**self.toolbox.reset_arguments(row, seed, rollout)))
        if text is not None and not isinstance(text, str):
            raise Lost(f"reset returned {type(text).__name__}, not text or None")
        return {"text": text}

    def turn(self, text: str, earns: bool = False, opened_thought: str = "") -> dict[str, Any]:
        """Answer a turn of the model: by its calls, by `reply` where it has none, or with nothing, which ends it.

        opened_thought: what the chat template wrote of the turn's thoughts; a call inside them is none.
        `role`: who answers, if not the tools. `unread`: the style of its calls, if that is not the one that is read.
        `earned`, if it earns and is not the last one: the reward so far. Raises Lost where that is None, because the
        rewards of this turn and the next are then not known.
        """
        counts = {"calls": 0, "bad_calls": 0, "tool_errors": 0, "unread_calls": 0}
        answers, role, unread = [], "", ""
        whole = opened_thought + text
        for call in calls.parse(whole, self.style) if self.toolbox.tools else []:
            counts["calls"] += 1
            answer, kind = run_call(self.toolbox, self.object, call) if isinstance(call, calls.Call) else (call, "bad")
            counts["bad_calls"] += kind == "bad"
            counts["tool_errors"] += kind == "error"
            answers.append(answer)
        if not answers and self.toolbox.tools:
            unread = calls.other_style(whole, self.style, self.toolbox.tools)
            counts["unread_calls"] += bool(unread)
        if not answers and self.toolbox.has_reply:
            answer = awaited(self.object.reply(text))
            answers, role = [] if answer is None else [str(answer)], "user"
        answers = [shorten(answer, MOST_CHARACTERS // len(answers)) for answer in answers]
        done = getattr(self.object, "done", False)
        ended = not answers or (bool(done) and not callable(done))  # a method `done` is a tool
        reply = {"answers": answers, "role": role, "ended": ended, "counts": counts}
        if unread:
            reply["unread"] = unread
        if earns and self.toolbox.has_reward and not ended:
            reply["earned"] = self._reward()
            if reply["earned"] is None:
                raise Lost("get_reward gave None after a turn; algorithm.advantages=return_to_go needs a number")
        return reply

    def finish(self) -> dict[str, Any]:
        """End: the episode's reward (None without `get_reward`) and what reward functions learn of the object."""
        own = hasattr(self.object, "get_info")
        info = awaited(self.object.get_info()) if own else _plain_attributes(self.object)
        if not isinstance(info, dict) or len(json.dumps(info)) > MOST_CHARACTERS:
            raise Lost(f"get_info returned no dict of at most {MOST_CHARACTERS} characters as JSON")
        reward = self._reward()
        if hasattr(self.object, "close"):
            awaited(self.object.close())
        self.object = None
        return {"reward": reward, "info": info}

    def _reward(self) -> float | None:
        """Raises Lost where `get_reward` gives no finite number."""
        if not self.toolbox.has_reward:
            return None
        try:
            return plain_values([awaited(self.object.get_reward())], 1)[0]
        except Failure as error:
            raise Lost(f"get_reward {error}") from error


def _plain_attributes(environment: Any) -> dict[str, Any]:
    """The object's public attributes that JSON has, numpy's numbers among them, as far as there is room."""
    plain, room = {}, MOST_CHARACTERS
    for name, value in getattr(environment, "__dict__", {}).items():
        try:
            text = json.dumps({name: value}, default=lambda number: number.item())
        except (TypeError, ValueError, AttributeError, RecursionError):
            continue
        if not name.startswith("_") and len(text) < room:
            plain |= json.loads(text)
            room -= len(text)
    return plain
