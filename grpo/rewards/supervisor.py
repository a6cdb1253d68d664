"""The parent of the reward processes: it hands calls to workers that call the reward functions, some at a time.

    python -m grpo.rewards.supervisor FD    (pool.RewardPool starts it; FD is its end of a socketpair)

A verifier that loops, crashes, allocates without end or kills itself must cost one completion its reward and nothing
else, so each call has a deadline and runs in a process that can be killed (workers/processes.py). A worker answers in
JSON, and what it answers is checked here again: a completion may have taken the worker over.

From the driver, pickled: what `begin` reads; then batches, lists of `Call`. To the driver, lines of JSON: `ready` once;
for each batch `outcomes`, a list of values or a failure text for each call; or `failed`, after which it ends.
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
from typing import Any

from grpo.config import RewardConfig
from grpo.rewards.builtin import BUILT_INS, code_reward
from grpo.rewards.worker import MEMORY_ERROR, Call, plain_values, shown, work
from grpo.workers import processes

# Most calls handed to a worker at once, so that a cheap call does not wait for a message each time.
CHUNK_CALLS = 32
# Between two attempts to replace a process while others are left that have loaded the functions.
RETRY_SECONDS = 2.0
# Characters of a failure that a worker reports; its own are shorter.
FAILURE_CHARACTERS = 2000


def part(config: RewardConfig, confined: bool) -> RewardConfig:
    """The config with only the functions that run confined, or only the others.

    Built-in functions are confined. Not so a user's own, which may call a judge or read data, and code_reward, which
    starts programs and confines each of them.
    """
    names = [n for n in config.functions if (n in BUILT_INS and n != code_reward.__name__) == confined]
    functions = {name: config.functions[name] for name in names}
    options = {name: options for name, options in config.options.items() if name in names}
    return dataclasses.replace(config, functions=functions, options=options)


class RewardWorker(processes.Worker):
    """A worker for the functions that run `confined` or for the others. The first of `calls` is what it runs now."""

    confined: bool
    loading = True
    calls: list[int]


class Supervisor(processes.Parent):
    """Hands calls to workers and replaces those that end; `config.num_workers` confined ones, and as many others."""

    ready, start_after = False, 0.0

    def begin(self) -> None:
        """Read what the driver says first: config, limits, its folder and where it finds modules."""
        config, self.max_completion_tokens, self.load_seconds, folder, path = pickle.load(self.reader)
        os.chdir(folder)
        sys.path[:] = path
        self.num_workers = config.num_workers
        self.configs = {confined: part(config, confined) for confined in (True, False)}
        self.configs = {confined: config for confined, config in self.configs.items() if config.functions}
        self.queues = {confined: collections.deque() for confined in self.configs}  # of calls, by number
        self.calls: list[Call] = []
        self.outcomes: dict[int, list[float | None] | str] = {}
        if False in self.configs:
            self.own_temporary_folder()
        if not self.configs:  # without reward functions, a teacher alone judges
            self._reply(ready=True)

    def step(self) -> None:
        """Start workers and hand out calls."""
        for confined in self.configs:
            while self._number_of(confined) < self.num_workers and time.monotonic() >= self.start_after:
                self._start(confined)
        for worker in list(self.workers.values()):
            if self.queues[worker.confined] and not (worker.loading or worker.closed or worker.calls):
                self._hand_out(worker)

    def on_owner(self) -> None:
        """Take in a batch."""
        self.calls, self.outcomes = pickle.load(self.reader), {}
        for confined, config in self.configs.items():
            self.queues[confined].extend(i for i, call in enumerate(self.calls) if call.function in config.functions)

    def on_line(self, worker: RewardWorker, line: bytes) -> bool:
        """Take in a worker's message; False if it is none that a worker sends, or not now."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        match message:
            case {"loaded": True} if worker.loading:
                worker.loading, worker.deadline = False, math.inf
                if not self.ready and not any(worker.loading for worker in self.workers.values()):
                    self.ready = True
                    self._reply(ready=True)
            case {"failed": str() as reason} if worker.loading:
                self.end(worker, shown(reason, FAILURE_CHARACTERS))
            case {"call": int() as call, "failure": str() as failure} if call in worker.calls[:1]:
                self._finish(worker, shown(failure, FAILURE_CHARACTERS))
                if failure == MEMORY_ERROR:  # what filled the memory may still be there
                    self.end(worker, None)
            case {"call": int() as call, "values": values} if call in worker.calls[:1]:
                values = plain_values(values, self.calls[call].number)
                if isinstance(values, str):
                    return False
                self._finish(worker, values)
            case _:
                return False
        return True

    def on_end(self, worker: RewardWorker, reason: str | None) -> None:
        """Blame the running call, if there is one, and give the others to somebody else."""
        if worker.calls and reason is not None:
            self._finish(worker, reason)
        elif worker.loading:
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

    def _failed_start(self, reason: str, confined: bool) -> None:
        """Go on with the processes that have loaded the functions and try again later; without one, give up."""
        if not (self.ready and any(w.confined == confined and not w.loading for w in self.workers.values())):
            self._reply(failed=f"the reward functions cannot be loaded: {reason}")
            raise processes.Finished
        print(f"warning: a reward process cannot be replaced: {reason}", file=sys.stderr, flush=True)
        self.start_after = time.monotonic() + RETRY_SECONDS

    def _hand_out(self, worker: RewardWorker) -> None:
        # smaller chunks towards the end, so that no worker sits on a pile while the others have nothing left
        queue = self.queues[worker.confined]
        number = max(1, min(CHUNK_CALLS, len(queue) // (4 * self.num_workers)))
        worker.calls = [queue.popleft() for _ in range(number)]
        self._begin_call(worker)
        self.send(worker, b"".join(self.calls[number].as_line(number) for number in worker.calls))

    def _begin_call(self, worker: RewardWorker) -> None:
        worker.deadline = math.inf
        if worker.calls:
            call = self.calls[worker.calls[0]]
            worker.must_end_in(self.configs[worker.confined].timeout_seconds * call.num_limits, "took")

    def _finish(self, worker: RewardWorker, outcome: list[float | None] | str) -> None:
        self.outcomes[worker.calls.pop(0)] = outcome
        self._begin_call(worker)
        if len(self.outcomes) == len(self.calls):
            self._reply(outcomes=[self.outcomes[i] for i in range(len(self.calls))])
            self.end_strays()

    def _reply(self, **message: Any) -> None:
        # Blocks while the driver does not read; then all calls are done, and nothing else is urgent.
        self.owner.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    processes.serve(Supervisor)
