"""Rewards from the driver's side: calls go out to worker processes, values come back, weighted sums are taken.

What happens to a verifier that loops, crashes or allocates without end is the supervisor's business (supervisor.py).
This module says what a failure means: that completion has no reward, and says why; a function that fails for every
completion of a step ends the run. It keeps no deadlines: between `submit` and `collect` the driver is free.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import sys
from typing import Any

from grpo.config import RewardConfig
from grpo.data.columns import as_messages
from grpo.rewards.loading import argument_names, called_with, load_functions
from grpo.rewards.supervisor import part
from grpo.rewards.worker import SHOWN_CHARACTERS, Call
from grpo.text import shorten
from grpo.types import Rollout
from grpo.workers import lockdown, processes

# For one process to import the user's reward files.
LOAD_SECONDS = 60.0


class RewardError(ValueError):
    """No completion of a step got a value from a reward function."""


# What reward functions get of episodes, besides.
EPISODE_COLUMNS = ("turns", "messages", "environment", "environments")


class RewardPool:
    """`config.num_workers` processes that call the reward functions; as many again if only some of those run confined.

    Start it on the main thread: the processes end with the thread that started them. What a function prints is lost.
    """

    def __init__(self, config: RewardConfig, max_completion_tokens: int, opening: str = "") -> None:
        """Start the processes; returns when every one has loaded the functions.

        opening: what a prompt has of each completion, which the functions then get in front of it: an opened <think>.

        Raises ValueError if one cannot be loaded, here or there, and if a variable of `config.environment` is not set.
        """
        self.config, self.functions = config, load_functions(config, None, max_completion_tokens)
        self.opening = opening
        self._submitted: tuple[list[Rollout], list[Call]] | None = None  # from `submit` to `collect`
        self.supervisor, self._socket = processes.start_parent("grpo.rewards.supervisor", config.environment)
        self._reader = self._socket.makefile("rb")
        self._send((config, max_completion_tokens, LOAD_SECONDS, os.getcwd(), sys.path))
        self._receive(ValueError)
        if part(config, confined=True).functions and (missing := lockdown.missing_measures()):
            print(f"warning: this kernel has no {missing}: processes of built-in rewards are not confined", flush=True)

    def submit(self, rollouts: list[Rollout], group_size: int, step: int = 0) -> None:
        """Begin to score `rollouts`, which lie group after group; returns at once.

        Each function is called with one completion, those of a group or all of them (see `called_with`), and with the
        data set's columns, `num_tokens`, `truncated`, `prompts` (as the data has them) and `step` as lists of one
        length; with `completion_ids` where it names them; of episodes also with `turns`, `messages`, `environment` and
        `environments`.

        Raises ValueError if a column holds what JSON does not have, RuntimeError if the last ones were not collected.
        """
        if self._submitted is not None:
            raise RuntimeError(f"{len(self._submitted[0])} rollouts were submitted and not collected")
        calls = []
        sizes = {"step": len(rollouts), "group": group_size, "completion": 1}
        for what, size in sizes.items():  # long calls first, short ones fill the gaps
            names = [name for name, f in self.functions.items() if called_with(f) == what]
            for start in range(0, len(rollouts) if names else 0, size):
                together = rollouts[start : start + size]
                columns = {name: [r.prompt.columns[name] for r in together] for name in together[0].prompt.columns}
                columns["num_tokens"] = [r.completion.num_tokens for r in together]
                columns["truncated"] = [r.completion.truncated for r in together]
                columns["prompts"] = [r.prompt.content for r in together]
                columns["step"] = [step] * len(together)
                if any("completion_ids" in argument_names(self.functions[name]) for name in names):
                    columns["completion_ids"] = [r.completion.ids_T.tolist() for r in together]
                if together[0].completion.episode is not None:
                    columns |= episode_columns(together)
                arguments = _as_json([[self.opening + r.answer for r in together], columns])
                num_limits = 1 if what == "step" else size
                calls += [Call(name, start, size, arguments, num_limits) for name in names]
        if calls:
            self._send(calls)
        self._submitted = rollouts, calls

    def collect(self) -> list[Rollout]:
        """Wait for the rewards; new rollouts with `rewards`, `reward` and `failures`, in the order submitted.

        A function that said None is left out of that completion's weighted sum; all None gives None. A function that
        failed for a completion leaves it without a reward: the other functions' sum would not compare.

        Raises RuntimeError if the processes are gone.
        """
        (rollouts, calls), self._submitted = self._submitted, None
        outcomes = self._receive(RuntimeError)["outcomes"] if calls else []
        rewards: list[dict[str, float | None]] = [dict.fromkeys(self.functions) for _ in rollouts]
        failures: list[dict[str, str]] = [{} for _ in rollouts]
        for call, outcome in zip(calls, outcomes, strict=True):
            for i in range(call.number):
                if isinstance(outcome, str):
                    failures[call.start + i][call.function] = outcome
                else:
                    rewards[call.start + i][call.function] = outcome[i]
        scored = []
        for rollout, values, failed in zip(rollouts, rewards, failures, strict=True):
            weighted = [self.config.functions[name] * value for name, value in values.items() if value is not None]
            reward = sum(weighted) if weighted and not failed else None
            scored.append(dataclasses.replace(rollout, rewards=values, reward=reward, failures=failed))
        return scored

    def close(self) -> None:
        """End all processes and wait until they are gone; a second call does nothing."""
        self._reader.close()
        processes.end_parent(self.supervisor, self._socket)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it ended; `_receive` says why
            self._socket.sendall(pickle.dumps(message))

    def _receive(self, kind: type[Exception]) -> dict[str, Any]:
        """The supervisor's next message. Raises `kind` if it gave up, RuntimeError if it is gone without a word."""
        try:
            message = json.loads(self._reader.readline())
        except (OSError, ValueError) as error:  # an empty line: the end
            self.close()
            code = self.supervisor.returncode
            raise RuntimeError(
                f"the process that supervises the reward functions hung up; it ended with code {code}"
            ) from error
        if "failed" in message:
            self.close()
            raise kind(message["failed"])
        return message


def _as_json(values: list) -> bytes:
    try:
        return json.dumps(values).encode()
    except TypeError as error:
        raise ValueError(
            f"reward functions get columns as JSON has them: {error}; convert it in a function of --data.row, or leave "
            "the column out of data.columns"
        ) from error


def episode_columns(rollouts: list[Rollout]) -> dict[str, list]:
    """What reward functions learn of episodes: the model's turns, all messages, what is told of the environment."""
    columns: dict[str, list] = {name: [] for name in EPISODE_COLUMNS}
    for rollout in rollouts:
        episode, content = rollout.completion.episode, rollout.prompt.content
        messages = list(as_messages(content))
        if episode["opening"] is not None:
            messages[-1] = messages[-1] | {"content": episode["opening"]}
        for turn in episode["turns"]:
            messages.append({"role": "assistant", "content": turn["text"]})
            messages += [{"role": "tool", "content": answer} for answer in turn["answers"]]
        columns["turns"].append([turn["text"] for turn in episode["turns"]])
        columns["messages"].append(messages)
        columns["environment"].append(episode["info"])
        columns["environments"].append(episode["info"])  # with attributes, see worker.py
    return columns


def check_all_failed(rollouts: list[Rollout]) -> None:
    """Stop a step in which one function failed for every completion: then the function is wrong, not the completions.

    Raises RewardError, which names the function and shows the first completion.
    """
    for name in rollouts[0].failures if rollouts else ():
        if all(name in rollout.failures for rollout in rollouts):
            number = f"all {len(rollouts)} completions" if len(rollouts) > 1 else "the only completion"
            lines = [f"reward function {name} failed for {number}: {rollouts[0].failures[name]}"]
            shown = {"completion": rollouts[0].text, **rollouts[0].prompt.columns}
            lines += [f"  {column}: {shorten(str(value), SHOWN_CHARACTERS)!r}" for column, value in shown.items()]
            raise RewardError("\n".join(lines))
