"""Environment processes: the side of the replica's head, which never waits for one, and what happens inside of them.

The processes run on the host of the replica's head, so that nothing passes over the bridges between ranks during an
episode. A supervisor imports the user's file once and forks the processes. An episode keeps its process to its end. If
there are only functions as tools, any process answers any turn.

What the policy may have caused becomes an answer that it reads, or ends the episode with `hung_reward`. What it cannot
have caused is raised as `Lost`, and the episode gets no reward. Left out: deadlines, which the supervisor keeps.
"""

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Collection, Mapping
from typing import Any

from grpo.config import EnvironmentConfig
from grpo.features.environments.calls import ToolCall, other_style, parse
from grpo.features.environments.tools import (
    Lost,
    Toolbox,
    await_result,
    free_clients,
    is_outage,
    load_toolboxes,
    run_call,
)
from grpo.text import shorten
from grpo.workers import kernel
from grpo.workers.processes import Call, Workers
from grpo.workers.worker import Failure, describe_error, plain_values

Values = dict[str, Any]  # as JSON has them, by name
# Limit for all answers to a turn together, and for what `get_info` returns. A flood is cut before it fills a socket.
MAX_CHARACTERS = 32_000
# Limit for what `reset` returns, above what prompts have
MAX_OPENING_CHARACTERS = 500_000


class EnvironmentHost:
    """The environment processes of one replica."""

    def __init__(
        self,
        config: EnvironmentConfig,
        style: str,
        num_processes: int,
        variables: Collection[str] = (),
    ):
        """Load the user's file. Call it on the main thread.

        style: how the model writes calls. variables: names of environment variables for the processes. Raises
        ValueError if the file cannot be loaded.
        """
        self.config = config
        self._pending: dict[int, str] = {}  # episode -> what was asked
        load = functools.partial(load_environment, config, style)
        self.workers = Workers(
            "environments",
            load,
            num_processes,
            config.memory_gib,
            variables,
            loads_once=True,
        )
        self.workers.wait_until_loaded()

    def ask(
        self,
        episode: int,
        do: str,
        arguments: list[Any],
        seconds: float,
    ) -> None:
        """Ask an episode to `reset`, `turn` or `finish` (see `LiveEnvironment`). `poll` returns its reply.

        It fails after `seconds`, which begin when a process is free.
        """
        conversation = episode if self.config.all_classes else None
        call = Call(
            number=episode,
            arguments=json.dumps([do, *arguments]).encode(),
            seconds=seconds,
            conversation=conversation,
            ends=do == "finish",
        )
        self._pending[episode] = do
        self.workers.submit([call])

    def drop(self, episode: int) -> None:
        """End an episode early."""
        self.workers.drop(episode)

    def poll(self, seconds: float = 0.0) -> list[Values]:
        """Return the replies that have arrived. If there are none, wait up to `seconds`; it may return earlier.

        Raises RuntimeError if the supervisor has ended.

        A reply is `{episode, ...}` with what `LiveEnvironment` returned, or `{episode, failed, kind}`. `kind` is `lost`
        for what the policy cannot have caused: any failure of `reset`, an outage, a process that waited at its
        deadline, or that was killed from outside. Anything else is `hung`, because what the policy wrote may have
        caused it. Functions without a class then answer instead.
        """
        return list(map(self._reply, self.workers.poll(seconds)))

    def _reply(self, outcome: Values) -> Values:
        """Return the reply to a call."""
        episode = outcome["call"]
        do = self._pending[episode]
        if "value" in outcome:
            return {"episode": episode, **outcome["value"]}
        cause = outcome["cause"]
        failure = outcome["failed"]
        if cause == "memory":
            failure = f"it took more than environment.memory_gib={self.config.memory_gib:g}"
        was_killed = failure.endswith(f"killed by signal {signal.SIGKILL:d}")  # the machine had no more memory
        has_class = bool(self.config.all_classes)
        is_lost = do == "reset" or cause == "lost" or was_killed or (cause == "late" and has_class)
        if not is_lost and not has_class:
            return {
                "episode": episode,
                "answers": [failure],
                "role": "",
                "ended": False,
                "counts": {"calls": 1, "hung_calls": 1},
            }
        return {
            "episode": episode,
            "failed": f"{do}: {failure}",
            "kind": "lost" if is_lost else "hung",
        }

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self.workers.close()


def load_environment(config: EnvironmentConfig, style: str) -> Callable[..., Values]:
    """Load the user's files in an environment process. Returns a function that does `reset`, `turn` or `finish`.

    style: how the model writes calls, see calls.py.
    """
    environment = LiveEnvironment(load_toolboxes(config), style)

    def answer(do: str, *arguments: Any) -> Values:
        if do != "reset" and config.all_classes and environment.object is None:
            raise Lost("its process ended between two turns")
        try:
            return getattr(environment, do)(*arguments)
        except BaseException as error:
            environment.close()  # this process will be killed
            if is_outage(error):
                raise Lost(describe_error(error)) from error
            raise

    return answer


class LiveEnvironment:
    """The object of one rollout in its process. The object is None if there are only functions as tools."""

    def __init__(self, toolboxes: Mapping[str, Toolbox], style: str):
        """Start without an object. toolboxes: by environment name."""
        self.toolboxes = toolboxes
        self.toolbox = toolboxes.get("")
        self.style = style
        self.object = None

    @property
    def is_done(self) -> bool:
        """True if the object says that the episode has ended. A method `done` is a tool."""
        done = getattr(self.object, "done", False)
        return bool(done) and not callable(done)

    def reset(
        self,
        row: Values,
        seed: int,
        rollout: int,
        environment: str = "",
    ) -> Values:
        """Make the object and call its `reset`. Returns the `text` that goes behind the row's prompt, or None.

        environment: the name of the class.
        """
        # What the object detaches, such as a server of tmux, becomes a child of this process. The supervisor would kill
        # it as soon as another episode's died.
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self.toolbox = self.toolboxes[environment]
        self.object = self.toolbox.kind(**self.toolbox.options)
        arguments = self.toolbox.reset_arguments(row, seed, rollout)
        text = await_result(self.object.reset(**arguments))
        if not isinstance(text, str | None):
            raise Lost(f"reset returned {type(text).__name__}, not text or None")
        if text and len(text) > MAX_OPENING_CHARACTERS:
            raise Lost(f"reset returned {len(text)} characters, more than {MAX_OPENING_CHARACTERS}")
        return {"text": text}

    def turn(
        self,
        text: str,
        earns: bool = False,
        opened_thought: str = "",
        is_cut: bool = False,
    ) -> Values:
        """Answer a turn of the model: each of its calls, or by `reply` if it has none. No answer ends the episode.

        opened_thought: the beginning of the thoughts if the chat template wrote it; calls inside thoughts do not count.
        is_cut: the turn ran out of tokens and is the last one. Its calls are carried out, except one that is cut off.

        Returns `answers`, `counts` and whether the episode has `ended`. `role`: who answers; empty for the tools.
        `calls`: one for each answer as a dict, None if it could not be read. `unread`: the style of the calls, if it is
        not the one that is read. `earned`: the reward so far, if the turn earns and is not the last one. Raises Lost if
        that is None, because the rewards of this turn and the next are then unknown.
        """
        turn = opened_thought + text
        calls = []
        if self.toolbox.tools:
            calls = parse(turn, self.style, self.toolbox.tools)
        if is_cut and calls and isinstance(calls[-1], str):
            calls.pop()
        answers = []
        kinds = []
        for call in calls:
            if isinstance(call, ToolCall):
                answer, kind = run_call(self.toolbox, self.object, call)
            else:
                answer = call
                kind = "bad"
            answers.append(answer)
            kinds.append(kind)
            if self.is_done:  # what the model calls after the end changes nothing
                break

        unread = ""
        if not calls:
            unread = other_style(turn, self.style, self.toolbox.tools)
        role = ""
        if not answers and self.toolbox.has_reply and not is_cut:
            role = "user"
            answer = await_result(self.object.reply(text))
            if answer is not None:
                answers = [str(answer)]
        ended = is_cut or not answers or self.is_done

        counts = {
            "calls": len(kinds),
            "bad_calls": kinds.count("bad"),
            "tool_errors": kinds.count("error"),
            "unread_calls": int(bool(unread)),
        }
        max_characters = MAX_CHARACTERS // max(len(answers), 1)
        reply = {
            "answers": [shorten(answer, max_characters) for answer in answers],
            "role": role,
            "ended": ended,
            "counts": counts,
        }

        if unread:
            reply["unread"] = unread
        if calls:
            carried_out = calls[: len(answers)]
            reply["calls"] = [vars(call) if isinstance(call, ToolCall) else None for call in carried_out]
        if earns and self.toolbox.has_reward and not ended:
            reply["earned"] = self._reward()
            if reply["earned"] is None:
                raise Lost("get_reward gave None after a turn; algorithm.advantages=return_to_go needs a number")
        return reply

    def finish(self) -> Values:
        """End the episode. Returns its `reward`, None without `get_reward`, and the `info` for reward functions."""
        if hasattr(self.object, "get_info"):
            info = await_result(self.object.get_info())
        else:
            info = _plain_attributes(self.object)
        if not isinstance(info, dict) or len(json.dumps(info)) > MAX_CHARACTERS:
            raise Failure(f"get_info returned no dict of at most {MAX_CHARACTERS} characters as JSON")
        reward = self._reward()
        self.close()
        return {"reward": reward, "info": info}

    def close(self) -> None:
        """Let the object end what it holds. What that raises says nothing about the episode."""
        if hasattr(self.object, "close"):
            with contextlib.suppress(BaseException):
                await_result(self.object.close())
        self.object = None
        free_clients()
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:  # detached ones that have died
                pass

    def _reward(self) -> float | None:
        """Ask for the reward. Raises Failure if it is neither None nor a finite number."""
        if not self.toolbox.has_reward:
            return None
        reward = await_result(self.object.get_reward())
        try:
            return plain_values([reward], 1)[0]
        except Failure as error:
            raise Failure(f"get_reward {error}") from None


def _plain_attributes(environment: Any) -> Values:
    """Return the public attributes that JSON can hold, including numpy's numbers, up to MAX_CHARACTERS in all."""
    attributes = {}
    room = MAX_CHARACTERS
    for name, value in getattr(environment, "__dict__", {}).items():
        try:
            text = json.dumps({name: value}, default=lambda number: number.item())
        except (TypeError, ValueError, AttributeError, RecursionError):
            continue
        if not name.startswith("_") and len(text) < room:
            attributes |= json.loads(text)
            room -= len(text)
    return attributes
