"""Reward functions, built-in ones and a user's own: from `config.reward` to functions, and calls in reward processes.

Options are checked at the start of a run: against the function's signature, and a built-in one is called with no
completion at all. A user's own function runs with the user's files and network. Built-in functions run confined
(workers/lockdown.py): a completion is text from a policy that will find every hole, and a library that evaluates
formulas may run one.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import io
import os
import pathlib
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from grpo.config import EXTRA_COLUMNS, RewardConfig
from grpo.config.user_files import check_options, load_function, near_miss, optional_arguments
from grpo.rewards.builtin import BUILT_INS, RewardFunction
from grpo.text import shorten
from grpo.workers import lockdown
from grpo.workers.processes import Workers
from grpo.workers.worker import Failure, describe_error, plain_values

_PACKAGE = str(pathlib.Path(__file__).parents[1])
# Of what a function prints, where that is shown.
PRINTED_CHARACTERS = 2000
# Arguments that TRL gives to reward functions and a run here does not, and what to take instead.
FROM_TRL = {
    "trainer_state": "take `step`, which counts steps from 1",
    "log_extra": "drop it; samples.txt and completions.jsonl have each function's value",
    "log_metric": "drop it; a reward function of weight 0 is logged and not trained on",
}


def called_with(function: RewardFunction) -> Literal["completion", "group", "step"]:
    """What one call has: a completion, with `@group_level` those of a prompt, as `async def` those of the step."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return "step"
    return "group" if getattr(function, "group_level", False) else "completion"


def call_arguments(function: RewardFunction, completions: list, columns: Mapping[str, list]) -> tuple[tuple, dict]:
    """Arguments of a call: completions by that name where the function has it, as in `f(prompts, completions, ...)`.

    Else they are its first argument, whatever that is called, unless it is called as a column: `f(environments, **_)`.
    Where the prompts are lists of messages, completions are too, each of one message; built-ins get texts.
    """
    names = argument_names(function)
    prompts = columns.get("prompts")
    if prompts and isinstance(prompts[0], list) and not is_built_in(function):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    if "completions" in names or (names and names[0] in columns):
        return (), {"completions": completions, **columns}
    return (completions,), dict(columns)


@functools.cache  # looking at a signature takes longer than most calls
def argument_names(function: RewardFunction) -> tuple[str, ...]:
    """The names of all its arguments, `*` and `**` included."""
    return tuple(inspect.signature(function).parameters)


def is_built_in(function: RewardFunction) -> bool:
    """Whether it comes with this package, also through functools.partial."""
    return getattr(function, "func", function) in BUILT_INS.values()


def answer_format_of(functions: Mapping[str, RewardFunction]) -> str | None:
    """Where the first function that reads answers looks for them (`reward.answer_format` or its own); None if none."""
    bound = (getattr(function, "keywords", {}) for function in functions.values())
    return next((keywords["answer_format"] for keywords in bound if "answer_format" in keywords), None)


def load_functions(
    config: RewardConfig, columns: Collection[str] | None = None, max_completion_tokens: int | None = None
) -> dict[str, RewardFunction]:
    """Name (as in `config.functions`) -> function with its options bound.

    columns: the data set's columns that each function will be called with, on top of EXTRA_COLUMNS; given, they are
    checked against its signature. max_completion_tokens: of the generator; None is unknown, and a function that needs
    it is refused. Raises ValueError if a name, a column or an option does not fit, or the user's file raises.
    """
    if columns is not None:
        for name in set(columns).intersection(EXTRA_COLUMNS):
            raise ValueError(
                f"data.columns has {name}, but reward functions get a column of that name anyway; give the data set's "
                f"another name, such as --data.columns my_{name} {name}"
            )
        columns = [*columns, *EXTRA_COLUMNS]
    for name in config.options.keys() - config.functions.keys():
        raise ValueError(
            f"reward.options has options of {name!r}, which is not in reward.functions ({', '.join(config.functions)})"
            f"{near_miss(name, config.functions)}; add it there or drop its options (--reward.options with nothing "
            "behind it drops all of a recipe's)"
        )
    facts = {"answer_format": config.answer_format, "call_timeout_seconds": config.timeout_seconds}
    facts |= {"worker_memory_gib": config.memory_gib, "max_completion_tokens": max_completion_tokens}
    facts = {name: value for name, value in facts.items() if value is not None}
    functions = {}
    for name in config.functions:
        if name not in BUILT_INS and ":" not in name:
            raise ValueError(
                f"unknown reward function {name!r}{near_miss(name, BUILT_INS)}; built-ins are {', '.join(BUILT_INS)}, "
                "your own is written path/file.py:function"
            )
        function = BUILT_INS[name] if name in BUILT_INS else load_function(name, "reward")
        functions[name] = _bind_options(name, function, config.options.get(name, {}), facts, columns)
    return functions


def try_built_ins(functions: Mapping[str, RewardFunction], columns: Mapping[str, Any]) -> None:
    """Call each built-in function with an empty completion and the columns of one row.

    Raises ValueError if it cannot read them, such as a list as the answer.
    """
    row = {name: [value] for name, value in (dict.fromkeys(EXTRA_COLUMNS, 0) | dict(columns)).items()}
    for name, function in functions.items():
        if is_built_in(function):
            arguments, named = call_arguments(function, [""], row)
            try:
                function(*arguments, **named)
            except ValueError as error:
                raise ValueError(f"reward function {name} cannot read the data: {error}") from error


def _bind_options(
    name: str, function: RewardFunction, options: Mapping[str, Any], facts: Mapping[str, Any], columns: list[str] | None
) -> RewardFunction:
    """The function with its options, and of the facts of the run those that it asks for and its options leave open."""
    check_options(function, options, f"reward function {name}", f"reward.options of {name}", facts)
    known = optional_arguments(function)
    bound = {fact: value for fact, value in facts.items() if fact in known} | dict(options)
    # A call's arguments replace those that are bound: a column `language` would pass for the option.
    options_of = known if name in BUILT_INS else bound
    if taken := [column for column in columns or () if column in options_of]:
        raise ValueError(
            f"column {', '.join(taken)} is named like an option of {name}; rename it or leave it out of data.columns"
        )
    needed = {option for option, parameter in known.items() if parameter.default is parameter.empty}
    missing = sorted(needed - {*bound, *(columns or ())})
    if missing and (columns is not None or name in BUILT_INS):  # what a user's function needs may also be a column
        raise ValueError(
            f"reward function {name} needs {missing[0]}; give it with --reward.options {name} "
            f"'{{\"{missing[0]}\": ...}}'" + ("" if name in BUILT_INS else ", or, if it is a column, in data.columns")
        )
    function = functools.partial(function, **bound)
    if columns is not None:
        given = [*columns, *({"completion_ids"} & set(argument_names(function)))]
        arguments, named = call_arguments(function, [], dict.fromkeys(given, []))
        try:
            inspect.signature(function).bind(*arguments, **named)
        except TypeError as error:
            raise ValueError(
                f"reward function {name} cannot be called with completions and the columns {', '.join(columns)}: "
                f"{error}; end its arguments with **columns and list the columns it needs in data.columns"
                + "".join(f"; {name} is TRL's: {remedy}" for name, remedy in FROM_TRL.items() if name in str(error))
            ) from error
    if name in BUILT_INS:
        parameters = inspect.signature(function).parameters.values()
        try:  # without completions it checks its options and no more
            function(**{p.name: [] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD})
        except ValueError as error:
            raise ValueError(f"reward.options of {name}: {error}") from error
    return function


# ---- Reward processes


def start_workers(
    load: Callable[..., Callable], config: RewardConfig, confined: bool, max_completion_tokens: int
) -> Workers:
    """Start `config.num_workers` processes, in which `load` (one of those below) loads all functions of `config`.

    Only confined ones lack the variables of `config.environment`. Raises ValueError if a function cannot be loaded.
    """
    loader = functools.partial(load, config, confined, max_completion_tokens)
    variables = () if confined else config.environment
    workers = Workers("reward functions", loader, config.num_workers, config.memory_gib, variables)
    if confined and (missing := lockdown.missing_measures()):
        print(f"warning: this kernel has no {missing}: processes of built-in rewards are not confined", flush=True)
    return workers


# ---- In a reward process


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
    closed = sorted({os.path.realpath(path) for path in sys.path if lockdown.is_private(path)})
    if confined:
        confine()
    try:
        functions = load_functions(config, None, max_completion_tokens)
    except (ImportError, PermissionError) as error:
        if not confined:
            raise
        raise Failure(
            f"{describe_error(error)}; built-in rewards read nothing that lies right in {', '.join(closed)}, which are "
            "on Python's path; install packages into a folder of their own"
        ) from error
    return lambda name, completions, columns: make_call(functions[name], completions, columns)


def load_observed(config: RewardConfig, confined: bool, max_completion_tokens: int) -> Callable[..., dict[str, Any]]:
    """Do as `load`, for calls whose outcome is `values` or `failed`, with the `seconds` and what was `printed`."""
    call = load(config, confined, max_completion_tokens)

    def observe(*arguments: Any) -> dict[str, Any]:
        output, start = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                outcome = {"values": call(*arguments)}
            except BaseException as error:  # a user's function may raise anything
                outcome = {"failed": describe_error(error)}
        seconds = time.perf_counter() - start
        return outcome | {"seconds": seconds, "printed": shorten(output.getvalue(), PRINTED_CHARACTERS)}

    return observe


def confine() -> None:
    """Take from the calling process, for good, what built-in functions do not need; call it with a single thread."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # writes nothing even where a kernel lacks Landlock
    lockdown.lock(readable_places(), (), os.getppid())


def readable_places() -> tuple[str, ...]:
    """What programs may read, packages wherever they lie, and this package."""
    return tuple(sorted({*lockdown.interpreter_places(), *lockdown.package_places(), "/dev/urandom", _PACKAGE}))


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
