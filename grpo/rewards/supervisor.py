"""The parent of the reward processes: it hands calls to workers that call the reward functions, a batch at a time.

    python -m grpo.rewards.supervisor FD    (pool.RewardPool starts it; FD is its end of a socketpair)

A verifier that loops for ever, crashes, allocates without end or kills itself must cost one completion its reward and
nothing else, so each call has a deadline and runs in a process that can be killed (workers/processes.py). A worker
answers in JSON, and what it answers is checked here again: a completion may have taken the worker over.

From the driver: pickled `(config, max_completion_tokens, seconds to load, folder, sys.path)`; then batches, a line of
JSON with `[function, completions, seconds]` of each call, and for each call a line with `[completions, columns]`, which
is only passed on. To the driver, lines of JSON: `group_level`, names of functions; for each batch `outcomes`, a list of
values or a failure text for each call; or `failed` (whether `refused`), after which it ends.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

from grpo.config import RewardConfig
from grpo.rewards.builtin import BUILT_INS, code_reward
from grpo.rewards.worker import is_outcome, shown, work
from grpo.workers import processes

# Calls handed to a worker at once, so that a cheap call does not wait for a message each time.
CHUNK_CALLS = 8
# Processes in a row that died with no call to blame (loading or idle) before the supervisor, with none left, gives up.
MAX_FAILED_STARTS = 5
# Characters of a failure that a worker reports; its own are shorter.
FAILURE_CHARACTERS = 2000
# Before a process is replaced that died with no call to blame.
RETRY_SECONDS = 0.2


def split(config: RewardConfig) -> dict[bool, RewardConfig]:
    """The functions that run confined (True) and the others (False), with their options; only what there is of them.

    Built-in functions are confined. Not so a user's own, which may call a judge or read data, and code_reward, which
    starts programs and confines each of them.
    """

    def only(table: Mapping, names: Collection[str]) -> dict:
        return {name: value for name, value in table.items() if name in names}

    parts = {}
    for confined in (True, False):
        names = [n for n in config.functions if (n in BUILT_INS and n != code_reward.__name__) == confined]
        functions, options = only(config.functions, names), only(config.options, names)
        if names:
            parts[confined] = dataclasses.replace(config, functions=functions, options=options)
    return parts


class RewardWorker(processes.Worker):
    """A worker for some of the functions: those that run `confined` or the others.

    The first of `calls` is the one it runs now.
    """

    confined: bool
    loading = True
    calls: list[int]


class Supervisor(processes.Parent):
    """Hands calls to workers and replaces those that end; `config.num_workers` confined ones, and as many others."""

    ready, num_failed_starts, start_after = False, 0, 0.0

    def begin(self) -> None:
        """Read what the driver says first."""
        config, self.max_completion_tokens, self.load_seconds, folder, path = pickle.load(self.reader)
        self.configs, self.num_workers = split(config), config.num_workers
        self.queues: dict[bool, collections.deque[int]] = {part: collections.deque() for part in self.configs}
        self.group_level: set[str] = set()
        self.calls: list[tuple[str, int, float]] = []
        self.payloads: list[bytes] = []
        self.outcomes: dict[int, list[float | None] | str] = {}
        os.chdir(folder)
        sys.path[:] = path
        if False in self.configs:
            self.own_temporary_folder()
        if not self.configs:  # without reward functions, a teacher alone judges
            self._reply(group_level=[])

    def step(self) -> float:
        """Start workers and hand out calls; returns when to start the next, by the clock."""
        wake_at = math.inf
        for confined in self.configs:
            while self._number_of(confined) < self.num_workers:
                if time.monotonic() < self.start_after:
                    wake_at = self.start_after
                    break
                self._start(confined)
        for worker in list(self.workers.values()):
            if self.queues[worker.confined] and not (worker.loading or worker.closed or worker.calls):
                self._hand_out(worker)
        return wake_at

    def on_owner(self) -> None:
        """Take in a batch."""
        head = self.reader.readline()
        if not head.endswith(b"\n"):
            raise EOFError
        self.calls, self.outcomes = json.loads(head), {}
        self.payloads = [self.reader.readline() for _ in self.calls]
        for confined, config in self.configs.items():
            self.queues[confined].extend(i for i, call in enumerate(self.calls) if call[0] in config.functions)

    def on_line(self, worker: RewardWorker, line: bytes) -> bool:
        """Take in a worker's message; False if it is none that a worker sends, or not now."""
        match _read_reply(line):
            case {"loaded": list() as group_level} if worker.loading:
                if any(name not in self.configs[worker.confined].functions for name in group_level):
                    return False
                worker.loading, worker.deadline = False, math.inf
                self.group_level.update(group_level)
                if not self.ready and not any(worker.loading for worker in self.workers.values()):
                    self.ready = True
                    self._reply(group_level=sorted(self.group_level))
            case {"load_failure": str() as reason, "refused": bool() as refused} if worker.loading:
                self.end(worker, None)
                self._failed_start(shown(reason, FAILURE_CHARACTERS), worker.confined, refused)
            case {"call": int() as call, "outcome": outcome, "retire": bool() as retire} if call in worker.calls[:1]:
                if not is_outcome(outcome, self.calls[call][1]):
                    return False
                self._finish(
                    worker.calls.pop(0), shown(outcome, FAILURE_CHARACTERS) if isinstance(outcome, str) else outcome
                )
                self._begin_call(worker)
                if retire:
                    self.end(worker, None)
            case _:
                return False
        return True

    def on_end(self, worker: RewardWorker, reason: str | None) -> None:
        """Blame the running call, if there is one, and give the others to somebody else."""
        if worker.calls and reason is not None:
            self._finish(worker.calls.pop(0), reason)
        elif reason is not None:
            self._failed_start(reason, worker.confined)
        self.queues[worker.confined].extendleft(reversed(worker.calls))

    def _number_of(self, confined: bool) -> int:
        return sum(worker.confined == confined for worker in self.workers.values())

    def _start(self, confined: bool) -> None:
        config = self.configs[confined]
        loads = functools.partial(work, config, confined, self.max_completion_tokens, os.getpid())
        try:
            worker = self.start(RewardWorker, config.memory_gib, loads)
        except OSError as error:
            self._failed_start(f"cannot start a process: {error}", confined)
            return
        worker.confined, worker.calls = confined, []
        worker.must_end_in(self.load_seconds, "loading took")

    def _failed_start(self, reason: str, confined: bool, refused: bool = False) -> None:
        """A process could not start or load, or died with no call to blame: bad at first, later tried again."""
        if not self.ready:
            self._give_up(f"the reward functions cannot be loaded: {reason}", refused)
        print(f"warning: a reward process ended without a call to blame: {reason}", file=sys.stderr, flush=True)
        self.num_failed_starts += 1
        self.start_after = time.monotonic() + RETRY_SECONDS
        alive = [w for w in self.workers.values() if w.confined == confined and not w.loading]
        if self.num_failed_starts >= MAX_FAILED_STARTS and not alive:
            attempts = f"{self.num_failed_starts} attempts to replace one"
            self._give_up(f"no reward process is left after {attempts}: {reason}")

    def _give_up(self, reason: str, refused: bool = False) -> None:
        self._reply(failed=reason, refused=refused)
        raise processes.Finished

    def _hand_out(self, worker: RewardWorker) -> None:
        # smaller chunks towards the end, so that no worker sits on a pile while the others have nothing left
        queue = self.queues[worker.confined]
        number = max(1, min(CHUNK_CALLS, len(queue) // (4 * self.num_workers)))
        worker.calls = [queue.popleft() for _ in range(number)]
        heads = (json.dumps([call, self.calls[call][0]]).encode() + b"\n" for call in worker.calls)
        self._begin_call(worker)
        self.send(worker, b"".join(head + self.payloads[c] for head, c in zip(heads, worker.calls, strict=True)))

    def _begin_call(self, worker: RewardWorker) -> None:
        worker.deadline = math.inf
        if worker.calls:
            worker.must_end_in(self.calls[worker.calls[0]][2], "took")

    def _finish(self, call: int, outcome: list[float | None] | str) -> None:
        self.num_failed_starts = 0
        self.outcomes[call] = outcome
        if len(self.outcomes) == len(self.calls):
            self._reply(outcomes=[self.outcomes[i] for i in range(len(self.calls))])
            self.calls, self.payloads = [], []
            self.end_strays()

    def _reply(self, **message: Any) -> None:
        # Blocks while the driver does not read; then all calls are done, and nothing else is urgent.
        self.owner.sendall(json.dumps(message).encode() + b"\n")


def _read_reply(line: bytes) -> dict[str, Any] | None:
    """A line from a worker: a JSON object without NaN or Infinity; None for anything else."""
    try:
        message = _REPLIES.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_REPLIES = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads would make one for every line


if __name__ == "__main__":
    processes.serve(Supervisor)
