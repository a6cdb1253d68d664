"""The recipe of tests/bench/faults.py: the tiny one of the end-to-end tests, in which FAULT strikes one rank.

FAULT is JSON: rank (of torchrun), phase, step (counted from 1; `start` has none), kind (see `strike`), and the file to
which the time of the fault is written. Without FAULT nothing strikes.
"""

import contextlib
import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from grpo.config import change
from grpo.run.driver import Driver
from grpo.run.step_timer import StepTimer
from grpo.types import StepPlan
from tests.e2e import tiny

# Into the phase: the ranks tell each other where they are once a second
SECONDS_INTO_PHASE = 2.0
LOADING = ("starting vLLM", "loading the models")  # as the script names them
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

config = change(
    tiny.config,
    {
        "prompts_per_step": 2,
        "checkpoint.interval": 1,
        "checkpoint.export": False,
        "evaluation.interval": 1,
        "evaluation.num_prompts": 2,
        "metrics.samples_interval": 0,
        "num_steps": 3,
    },
)


def strike(kind: str, note: str) -> None:
    """Fail in a way: raise, SIGKILL, hang (the main thread sleeps), SIGSTOP (the whole process stops)."""
    time.sleep(SECONDS_INTO_PHASE)
    pathlib.Path(note).write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
    if kind == "raise":
        raise RuntimeError("forced")
    if kind == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), SIGNALS[kind])


def with_fault(rank: int, phase: str, step: int, kind: str, note: str) -> None:
    """Let the fault strike in this process, if it is that rank."""
    if os.environ.get("RANK") != str(rank):
        return
    begun = {"step": 0}
    plan = Driver.plan
    enter = StepTimer.enter
    started = StepTimer.startup

    def plan_that_counts(self: Driver, number: int, *rest: Any) -> StepPlan:
        begun["step"] = number + 1
        return plan(self, number, *rest)

    def enter_with_fault(self: StepTimer, name: str) -> None:
        enter(self, name)
        if (name, begun["step"]) == (phase, step):
            strike(kind, note)

    @contextlib.contextmanager
    def startup_with_fault(self: StepTimer, what: str) -> Iterator[None]:
        with started(self, what):
            if phase == "start" and what in LOADING:
                strike(kind, note)
            yield

    Driver.plan = plan_that_counts
    StepTimer.enter = enter_with_fault
    StepTimer.startup = startup_with_fault


if "FAULT" in os.environ:
    with_fault(**json.loads(os.environ["FAULT"]))
