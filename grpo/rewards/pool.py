"""Rewards from the driver's side: calls go out to worker processes, values come back, weighted sums are taken.

What happens to a verifier that loops, crashes or allocates without end is the supervisor's business (supervisor.py).
This module says what a failure means: that completion has no reward, and says why; a function that fails for every
completion of a step ends the run.

Left out: threads. The supervisor process watches the deadlines, so between `submit` and `collect` the driver is free.
"""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import time
from typing import Any

from grpo.config import RewardConfig
from grpo.rewards.supervisor import MAX_FAILED_STARTS
from grpo.rewards.worker import SHOWN_CHARACTERS
from grpo.text import shorten
from grpo.types import Rollout

# For one process to import the user's reward files.
LOAD_SECONDS = 60.0
# Beyond all deadlines that the supervisor keeps itself: longer means that the supervisor is stuck.
SLACK_SECONDS = 60.0


class RewardError(RuntimeError):
    """No completion of a step got a value from a reward function."""


class RewardPool:
    """`config.num_workers` processes that call the reward functions, each call with a deadline.

    Start it on the main thread: the processes end with the thread that started them, however it ends. What a function
    prints is lost, its stdout and stderr are /dev/null.
    """

    def __init__(self, config: RewardConfig, max_completion_tokens: int) -> None:
        """Start the processes; returns when every one has loaded the functions.

        Raises:
            ValueError, RuntimeError: a reward function cannot be loaded; the message names file and exception.
        """
        self.config = config
        self._rollouts: list[Rollout] | None = None
        self._group_size = 1
        self._calls: list[tuple[str, int, float]] = []
        start = time.monotonic()
        self._socket, theirs = socket.socketpair()
        self._reader = self._socket.makefile("rb")
        with theirs:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-m", "grpo.rewards.supervisor", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # killed with the driver's group, it could not end what the workers started
                cwd=pathlib.Path(__file__).parents[2],  # only to be found: it goes to `cwd` and takes over `path`
            )
        setup = {
            "config": config,
            "num_workers": config.num_workers,
            "max_completion_tokens": max_completion_tokens,
            "load_seconds": LOAD_SECONDS,
            "cwd": os.getcwd(),
            "path": sys.path,
        }
        self._send(setup)
        self._group_level = frozenset(self._receive(LOAD_SECONDS + SLACK_SECONDS))
        self._start_seconds = time.monotonic() - start

    def submit(self, rollouts: list[Rollout], group_size: int) -> None:
        """Begin to score `rollouts`, which lie group after group; returns at once.

        Each function is called with one completion, or with those of a group if it is group-level, and with the data
        set's columns, `num_tokens` and `truncated` as lists of the same length.

        Raises:
            ValueError: the rollouts do not split into groups.
            RuntimeError: the last ones were not collected, or the processes are gone.
        """
        if self._rollouts is not None:
            raise RuntimeError(f"{len(self._rollouts)} rollouts were submitted and not collected; call collect first")
        if len(rollouts) % group_size:
            raise ValueError(f"{len(rollouts)} rollouts do not split into groups of {group_size}")
        payloads, calls = [], []
        grouped = [name for name in self.config.functions if name in self._group_level]
        single = [name for name in self.config.functions if name not in self._group_level]
        for size, names in ((group_size, grouped), (1, single)):  # long calls first, short ones fill the gaps
            for start in range(0, len(rollouts) if names else 0, size):
                seconds = self.config.timeout_seconds * size
                calls += [(name, len(payloads), seconds) for name in names]
                payloads.append(pickle.dumps(_arguments(rollouts[start : start + size])))
        if calls:
            self._send((payloads, calls))
        self._rollouts, self._group_size, self._calls = rollouts, group_size, calls

    def collect(self) -> list[Rollout]:
        """Wait for the rewards; new rollouts with `rewards`, `reward` and `failures`, in the order submitted.

        A function that said None is left out of that completion's weighted sum; all None gives None. A function that
        failed for a completion leaves it without a reward: the other functions' sum would not compare.

        Raises:
            RuntimeError: nothing was submitted, or the processes are gone.
        """
        if self._rollouts is None:
            raise RuntimeError("nothing was submitted; call submit first")
        rollouts, group_size, calls = self._rollouts, self._group_size, self._calls
        self._rollouts, self._calls = None, []
        if not calls:
            return rollouts
        outcomes = self._receive(self._longest_seconds(calls))

        rewards: list[dict[str, float | None]] = [{} for _ in rollouts]
        failures: list[dict[str, str]] = [{} for _ in rollouts]
        next_rollout = dict.fromkeys(self.config.functions, 0)
        for (name, _, _), outcome in zip(calls, outcomes, strict=True):
            size = group_size if name in self._group_level else 1
            first = next_rollout[name]
            next_rollout[name] = first + size
            failed = isinstance(outcome, str)
            for i, value in zip(range(first, first + size), [None] * size if failed else outcome, strict=True):
                rewards[i][name] = value
                if failed:
                    failures[i][name] = outcome
        return [self._with_rewards(rollout, rewards[i], failures[i]) for i, rollout in enumerate(rollouts)]

    def score(self, rollouts: list[Rollout], group_size: int) -> list[Rollout]:
        """`submit` and `collect`."""
        self.submit(rollouts, group_size)
        return self.collect()

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

    def _with_rewards(self, rollout: Rollout, rewards: dict[str, float | None], failures: dict[str, str]) -> Rollout:
        rewards = {name: rewards[name] for name in self.config.functions}
        weighted = [self.config.functions[name] * value for name, value in rewards.items() if value is not None]
        reward = sum(weighted) if weighted and not failures else None
        return dataclasses.replace(rollout, rewards=rewards, reward=reward, failures=failures)

    def _longest_seconds(self, calls: list[tuple[str, int, float]]) -> float:
        """What the supervisor may take if every call runs into its deadline and costs a new process."""
        each = [seconds + 2 * self._start_seconds for _, _, seconds in calls]
        return sum(each) / self.config.num_workers + max(each) + MAX_FAILED_STARTS * LOAD_SECONDS + SLACK_SECONDS

    def _send(self, message: Any) -> None:
        if self._socket.fileno() < 0:
            raise RuntimeError("the reward pool is closed")
        self._socket.settimeout(SLACK_SECONDS)
        try:
            self._socket.sendall(pickle.dumps(message))
        except TimeoutError as error:
            raise self._gone(f"does not read (waited {SLACK_SECONDS:g} s)") from error
        except OSError:
            self._receive(SLACK_SECONDS)  # it ended, and may have said why
            raise self._gone("hung up") from None

    def _receive(self, seconds: float) -> Any:
        if self._socket.fileno() < 0:
            raise RuntimeError("the reward pool is closed")
        self._socket.settimeout(seconds)
        try:
            _, *rest = message = pickle.load(self._reader)
        except TimeoutError as error:
            raise self._gone(f"did not answer for {seconds:g} s") from error
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._gone("hung up") from error
        if message[0] != "failed":
            return rest[0]
        self.close()
        kind, text = rest
        raise ValueError(text) if kind == "ValueError" else RuntimeError(text)

    def _gone(self, what: str) -> RuntimeError:
        if what == "hung up":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.supervisor.wait(1)
        else:
            self.supervisor.kill()
        self.close()
        return RuntimeError(
            f"the process that supervises the reward functions {what}; it ended with code {self.supervisor.returncode}"
        )


def check_all_failed(rollouts: list[Rollout]) -> None:
    """Stop a step in which one function failed for every completion: then the function is wrong, not the completions.

    Raises:
        RewardError: it names the function and shows the first completion.
    """
    for name in rollouts[0].failures if rollouts else ():
        if all(name in rollout.failures for rollout in rollouts):
            number = f"all {len(rollouts)} completions" if len(rollouts) > 1 else "the only completion"
            first = f"reward function {name} failed for {number}: {rollouts[0].failures[name]}"
            raise RewardError(f"{first}\n{_shown(rollouts[0])}")


def _arguments(rollouts: list[Rollout]) -> tuple[list[str], dict[str, list]]:
    columns = {name: [r.prompt.columns[name] for r in rollouts] for name in rollouts[0].prompt.columns}
    columns["num_tokens"] = [r.completion.num_tokens for r in rollouts]
    columns["truncated"] = [r.completion.truncated for r in rollouts]
    return [r.text for r in rollouts], columns


def _shown(rollout: Rollout) -> str:
    lines = [f"  completion: {_shorten(rollout.text)!r}"]
    lines += [f"  {name}: {_shorten(value)!r}" for name, value in rollout.prompt.columns.items()]
    return "\n".join(lines)


def _shorten(value: Any) -> Any:
    """The value itself if its text is short enough."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= SHOWN_CHARACTERS else shorten(text, SHOWN_CHARACTERS)
