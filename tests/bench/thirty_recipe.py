"""The recipe of tests/bench/thirty.py: another recipe's layout with a coin as reward, and notes of each rank's phases.

THIRTY is JSON: `base` is the recipe whose layout it takes, `gpus` their number, `notes` the folder in which each rank
writes RANK.jsonl.
A note has the step (0 before the first), the phase that has ended, its seconds, and the GiB that the rank's GPU holds
then (`held`; on a CPU the process) and that torch held at most since the note before (`peak`; GPUs only).
"""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from grpo import metrics
from grpo.config import GRPOConfig, change
from grpo.config.recipes import load_recipe
from grpo.run.driver import Driver
from grpo.run.step_timer import StepTimer
from grpo.types import StepPlan

GIB = 2**30
facts = json.loads(os.environ["THIRTY"])

base = load_recipe(facts["base"], GRPOConfig)
config = change(
    base,
    {
        "roles.num_trainers": facts["gpus"],
        "generator.tensor_parallel": min(base.generator.tensor_parallel, facts["gpus"]),
        "data.system_prompt": "",
        "reward.functions": {"tests/bench/rewards.py:coin": 1.0},
        "evaluation.interval": 0,
        "checkpoint.export": False,
        "metrics.samples_interval": 0,
        "sync_check_interval": 1,
    },
)


def note_phases(path: pathlib.Path) -> None:
    """Let each phase, and each part of the start, leave a line in the file when it has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    begun = {"step": 0}
    plan = Driver.plan
    enter = StepTimer.enter
    startup = StepTimer.startup

    def note(phase: str, seconds: float) -> None:
        line = {"step": begun["step"], "phase": phase, "seconds": round(seconds, 3)}
        for name, gib in memory_gib().items():
            line[name] = round(gib, 3)
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def plan_that_counts(self: Driver, number: int, *rest: Any) -> StepPlan:
        begun["step"] = number + 1
        return plan(self, number, *rest)

    def enter_with_note(self: StepTimer, name: str) -> None:
        ended = self.current
        began = self.last_change
        enter(self, name)
        if ended not in ("startup", "other"):
            note(ended, self.last_change - began)

    @contextlib.contextmanager
    def startup_with_note(self: StepTimer, what: str) -> Iterator[None]:
        began = time.perf_counter()
        with startup(self, what):
            yield
        note(what, time.perf_counter() - began)

    Driver.plan = plan_that_counts
    StepTimer.enter = enter_with_note
    StepTimer.startup = startup_with_note


def memory_gib() -> dict[str, float]:
    """Return what this rank holds now, and torch's peak since the last call."""
    if not torch.cuda.is_initialized():
        return {"held": psutil.Process().memory_info().rss / GIB}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated() - metrics._given_back
    metrics.set_given_back(metrics._given_back)  # torch counts from here; memory/peak_gib keeps the highest
    return {"held": (total - free) / GIB, "peak": peak / GIB}


if facts["notes"] and "RANK" in os.environ:
    note_phases(pathlib.Path(facts["notes"]) / f"{os.environ['RANK']}.jsonl")
