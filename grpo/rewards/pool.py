"""Rewards from the driver's side: calls go out to worker processes, values come back, weighted sums are taken.

What happens to a verifier that loops, crashes or allocates without end is the supervisor's business (supervisor.py).
This module says what a failure means: that completion has no reward, and says why; a function that fails for every
completion of a step ends the run.

Left out: threads. The supervisor process watches the deadlines, so between `submit` and `collect` the driver is free.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from typing import Any

from grpo.config import RewardConfig
from grpo.rewards.supervisor import MAX_FAILED_STARTS, split
from grpo.rewards.worker import SHOWN_CHARACTERS
from grpo.text import shorten
from grpo.types import Rollout
from grpo.workers import lockdown, processes

# For one process to import the user's reward files.
LOAD_SECONDS = 60.0
# Beyond all deadlines that the supervisor keeps itself: longer means that the supervisor is stuck.
SLACK_SECONDS = 60.0


class RewardError(RuntimeError):
    """No completion of a step got a value from a reward function."""


class RewardPool:
    """`config.num_workers` processes that call the reward functions, each call with a deadline; as many again if some
    of the functions run confined and some do not (supervisor.split).

    Start it on the main thread: the processes end with the thread that started them, however it ends. What a function
    prints is lost, its stdout and stderr are /dev/null.
    """

    def __init__(self, config: RewardConfig, max_completion_tokens: int) -> None:
        """Start the processes; returns when every one has loaded the functions.

        Raises ValueError or RuntimeError if one cannot be loaded; the message names file and exception. Raises
        ValueError if a variable of `config.environment` is not set.
        """
        self.config = config
        # From `submit` to `collect`: the rollouts, and of each call the function's name and which of them it is for.
        self._submitted: tuple[list[Rollout], list[tuple[str, range]]] | None = None
        start = time.monotonic()
        self.supervisor, self._socket = processes.start_parent("grpo.rewards.supervisor", config.environment)
        self._reader = self._socket.makefile("rb")
        self._send(pickle.dumps((config, max_completion_tokens, LOAD_SECONDS, os.getcwd(), sys.path)))
        self._group_level = self._receive(LOAD_SECONDS + SLACK_SECONDS)["group_level"]
        if True in split(config) and (missing := lockdown.missing_measures()):
            print(f"warning: this kernel has no {missing}: processes of built-in rewards are not confined", flush=True)
        self._start_seconds = time.monotonic() - start

    def submit(self, rollouts: list[Rollout], group_size: int, step: int = 0) -> None:
        """Begin to score `rollouts`, which lie group after group; returns at once.

        Each function is called with one completion, or with those of a group if it is group-level, and with the data
        set's columns, `num_tokens`, `truncated`, `prompts` (as the data has them) and `step` as lists of one length.

        Raises ValueError if the rollouts do not split into groups or a column holds what JSON does not have,
        RuntimeError if the last ones were not collected or the processes are gone.
        """
        if self._submitted is not None:
            raise RuntimeError(
                f"{len(self._submitted[0])} rollouts were submitted and not collected; collect them first"
            )
        if len(rollouts) % group_size:
            raise ValueError(f"{len(rollouts)} rollouts do not split into groups of {group_size}")
        calls, heads, payloads = [], [], []
        for size, group_level in ((group_size, True), (1, False)):  # long calls first, short ones fill the gaps
            names = [name for name in self.config.functions if (name in self._group_level) == group_level]
            for start in range(0, len(rollouts) if names else 0, size):
                together = rollouts[start : start + size]
                columns = {name: [r.prompt.columns[name] for r in together] for name in together[0].prompt.columns}
                columns["num_tokens"] = [r.completion.num_tokens for r in together]
                columns["truncated"] = [r.completion.truncated for r in together]
                columns["prompts"] = [r.prompt.content for r in together]
                columns["step"] = [step] * len(together)
                payload = _as_line([[r.text for r in together], columns])
                calls += [(name, range(start, start + size)) for name in names]
                heads += [[name, size, self.config.timeout_seconds * size] for name in names]
                payloads += [payload] * len(names)
        if calls:
            self._send(_as_line(heads) + b"".join(payloads))
        self._submitted = rollouts, calls

    def collect(self) -> list[Rollout]:
        """Wait for the rewards; new rollouts with `rewards`, `reward` and `failures`, in the order submitted.

        A function that said None is left out of that completion's weighted sum; all None gives None. A function that
        failed for a completion leaves it without a reward: the other functions' sum would not compare.

        Raises RuntimeError if nothing was submitted or the processes are gone.
        """
        if self._submitted is None:
            raise RuntimeError("nothing was submitted; call submit first")
        (rollouts, calls), self._submitted = self._submitted, None
        if not calls:
            return rollouts
        # What the supervisor may take if every call runs into its deadline and costs a new process.
        seconds = [self.config.timeout_seconds * len(places) + 2 * self._start_seconds for _, places in calls]
        longest = sum(seconds) / self.config.num_workers + max(seconds) + MAX_FAILED_STARTS * LOAD_SECONDS
        outcomes = self._receive(longest + SLACK_SECONDS)["outcomes"]

        rewards: list[dict[str, float | None]] = [dict.fromkeys(self.config.functions) for _ in rollouts]
        failures: list[dict[str, str]] = [{} for _ in rollouts]
        for (name, places), outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, str):
                for i in places:
                    failures[i][name] = outcome
            else:
                for i, value in zip(places, outcome, strict=True):
                    rewards[i][name] = value
        scored = []
        for rollout, values, failed in zip(rollouts, rewards, failures, strict=True):
            weighted = [self.config.functions[name] * value for name, value in values.items() if value is not None]
            reward = sum(weighted) if weighted and not failed else None
            scored.append(dataclasses.replace(rollout, rewards=values, reward=reward, failures=failed))
        return scored

    def close(self) -> None:
        """End all processes and wait until they are gone; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # noticed even if a forked process holds a copy of this end
        self._reader.close()
        self._socket.close()
        try:
            self.supervisor.wait(SLACK_SECONDS)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait(SLACK_SECONDS)

    def _send(self, message: bytes) -> None:
        if self._socket.fileno() < 0:
            raise RuntimeError("the reward pool is closed")
        self._socket.settimeout(SLACK_SECONDS)
        try:
            self._socket.sendall(message)
        except TimeoutError as error:
            self.supervisor.kill()
            raise self._gone(f"does not read (waited {SLACK_SECONDS:g} s)") from error
        except OSError:
            self._receive(SLACK_SECONDS)  # raises: it ended, and may have said why

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            self._socket.settimeout(seconds)
            message = json.loads(self._reader.readline())
        except TimeoutError as error:
            self.supervisor.kill()
            raise self._gone(f"did not answer for {seconds:g} s") from error
        except (OSError, ValueError) as error:  # an empty line: the end
            raise self._gone("hung up") from error
        if "failed" in message:
            self.close()
            raise (ValueError if message["refused"] else RuntimeError)(message["failed"])
        return message

    def _gone(self, what: str) -> RuntimeError:
        self.close()
        return RuntimeError(
            f"the process that supervises the reward functions {what}; it ended with code {self.supervisor.returncode}"
        )


def _as_line(values: list) -> bytes:
    try:
        return json.dumps(values).encode() + b"\n"
    except TypeError as error:
        raise ValueError(
            f"reward functions get columns as JSON has them: {error}; convert it in a function of --data.row, or leave "
            "the column out of data.columns"
        ) from error


def check_all_failed(rollouts: list[Rollout]) -> None:
    """Stop a step in which one function failed for every completion: then the function is wrong, not the completions.

    Raises RewardError, which names the function and shows the first completion.
    """
    for name in rollouts[0].failures if rollouts else ():
        if all(name in rollout.failures for rollout in rollouts):
            number = f"all {len(rollouts)} completions" if len(rollouts) > 1 else "the only completion"
            lines = [f"reward function {name} failed for {number}: {rollouts[0].failures[name]}"]
            for column, value in [("completion", rollouts[0].text), *rollouts[0].prompt.columns.items()]:
                text = value if isinstance(value, str) else repr(value)
                short = value if len(text) <= SHOWN_CHARACTERS else shorten(text, SHOWN_CHARACTERS)
                lines.append(f"  {column}: {short!r}")
            raise RewardError("\n".join(lines))
