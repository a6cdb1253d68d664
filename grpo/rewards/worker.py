"""What reward processes do: load the functions, confined or not, and make one call after another.

A user's own function runs with the user's files and network. Built-in functions run confined (workers/lockdown.py): a
completion is text from a policy that will find every hole, and a library that evaluates formulas may run one.
"""

import asyncio
import dataclasses
import inspect
import os
import pathlib
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from grpo.config import RewardConfig
from grpo.rewards.builtin import BUILT_INS, RewardFunction
from grpo.rewards.loading import call_arguments, load_functions
from grpo.workers import lockdown
from grpo.workers.worker import plain_values

_PACKAGE = str(pathlib.Path(__file__).parents[1])


class Snapshot(types.SimpleNamespace):
    """An environment as reward functions see it: plain attributes as they were at the end of its episode."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a reward function sees no {name} of an environment, only its public attributes that JSON has, or what "
            "its get_info returns; name it there, or compute the reward in get_reward"
        )


def is_confined(name: str) -> bool:
    """Whether a function runs confined, as built-in ones do.

    Not so a user's own, which may call a judge or read data, and code_reward, whose programs are confined each.
    """
    return name in BUILT_INS and name != "code_reward"


def part(config: RewardConfig, confined: bool) -> RewardConfig:
    """The config with only the functions that run confined, or only the others."""
    tables = [
        {name: value for name, value in table.items() if is_confined(name) == confined}
        for table in (config.functions, config.options)
    ]
    return dataclasses.replace(config, functions=tables[0], options=tables[1])


def load(config: RewardConfig, confined: bool, max_completion_tokens: int) -> Callable[..., list[float | None]]:
    """Load the functions into the calling process, confined or not; returns what calls one of them by its name."""
    if confined:
        confine()
    functions = load_functions(config, None, max_completion_tokens)
    return lambda name, completions, columns: make_call(functions[name], completions, columns)


def confine() -> None:
    """Take from the calling process, for good, what built-in functions do not need; call it with a single thread."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # writes nothing even where a kernel lacks Landlock
    lockdown.lock(readable_places(), (), os.getppid())


def readable_places() -> tuple[str, ...]:
    """What programs may read, installed packages that lie elsewhere, and this package."""
    packages = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    return tuple(sorted({*lockdown.interpreter_places(), *packages, "/dev/urandom", _PACKAGE}))


def make_call(function: RewardFunction, completions: list[str], columns: dict[str, list]) -> list[float | None]:
    """The values of one call. Raises whatever the function raises, and Failure for what are no values."""
    number = len(completions)  # the function may change the list
    if "environments" in columns:
        columns["environments"] = [Snapshot(**info) for info in columns["environments"]]
    arguments, named = call_arguments(function, completions, columns)
    try:
        values = function(*arguments, **named)
        values = asyncio.run(values) if inspect.iscoroutine(values) else values
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm left behind would strike a later call
    return plain_values(values, number)
