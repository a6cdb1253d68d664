"""Load reward functions, built-in or the user's, check them before a run, and call them in reward processes.

Options are checked against the signature of a function. A built-in function also checks them itself, in a call without
completions. The user's functions can use the user's files and network. Built-in functions run confined
(workers/lockdown.py), because a policy finds every hole, and a library that evaluates formulas may have one.
"""

import asyncio
import dataclasses
import functools
import inspect
import os
import resource
import signal
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from grpo import features
from grpo.config import EXTRA_COLUMNS, RewardConfig
from grpo.config.user_files import check_options, load_function, near_miss, optional_arguments
from grpo.rewards import builtin
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.latex import load_math_verify
from grpo.workers import lockdown
from grpo.workers.processes import Workers
from grpo.workers.worker import PACKAGE, Failure, Rewards, describe_error, plain_values

BUILT_INS: dict[str, RewardFunction] = builtin.BUILT_INS | features.offers("REWARDS")
# The columns of a call, by name, with a value for each completion
Columns = dict[str, list]
# Processes that started early and that no pool has yet, by what they were started with
_EARLY: dict[str, dict[bool, Workers]] = {}
# Arguments that TRL gives to reward functions and a run here does not -> what to do instead
FROM_TRL = {
    "trainer_state": "take `step`, which counts steps from 1",
    "log_extra": "drop it; completions.jsonl has each function's value",
    "log_metric": "drop it; a reward function of weight 0 is logged and not trained on",
}


def called_with(function: RewardFunction) -> Literal["completion", "group", "step"]:
    """Say what one call has: one completion, for `@group_level` those of a prompt, for `async def` all of the step."""
    function = getattr(function, "func", function)  # of a partial
    if inspect.iscoroutinefunction(function):
        return "step"
    if getattr(function, "group_level", False):
        return "group"
    return "completion"


def call_arguments(
    function: RewardFunction,
    completions: list,
    columns: Columns,
) -> tuple[tuple, dict]:
    """Return the arguments of a call. Completions go by their name if the function has it: `f(prompts, completions)`.

    Otherwise they are its first argument, unless that has the name of a column: `f(environments, **_)`. The completion
    of a prompt that is a list of messages is a list of one message; that of an episode, all messages behind the prompt,
    as TRL has them. Built-in functions always get texts.
    """
    names = argument_names(function)
    prompts = columns.get("prompts")
    if prompts and not is_built_in(function):
        texts = completions
        completions = []
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            completion = text
            if isinstance(prompt, list):
                completion = [{"role": "assistant", "content": text}]
                if "environments" in columns:
                    completion = columns["messages"][index][len(prompt) :]
            completions.append(completion)
    if "completions" in names or (names and names[0] in columns):
        return (), {"completions": completions, **columns}
    return (completions,), dict(columns)


@functools.cache  # looking at a signature takes longer than most calls
def argument_names(function: RewardFunction) -> tuple[str, ...]:
    """Return the names of all arguments of a function, including those of `*` and `**`."""
    return tuple(inspect.signature(function).parameters)


def is_built_in(function: RewardFunction) -> bool:
    """Check whether a function, or the function of a partial, is built in."""
    return getattr(function, "func", function) in BUILT_INS.values()


def answer_format_of(functions: Mapping[str, RewardFunction]) -> str | None:
    """Return the format of the first function that reads answers. None if no function does."""
    for function in functions.values():
        options = getattr(function, "keywords", {})
        if "answer_format" in options:
            return options["answer_format"]
    return None


def measures_length(function: RewardFunction | None) -> bool:
    """Check whether a function says of itself, by an attribute of this name, that it looks at the length alone."""
    return getattr(getattr(function, "func", function), "measures_length", False)


def load_functions(
    config: RewardConfig,
    columns: Collection[str] | None = None,
    max_completion_tokens: int | None = None,
) -> dict[str, RewardFunction]:
    """Load the functions of `config.functions`, by name and with their options bound.

    columns: of the data set. If given, they are checked against the signatures, together with EXTRA_COLUMNS.
    max_completion_tokens: of the generator. If None, a function that needs it is refused. Raises ValueError if a name,
    a column or an option does not fit, or the user's file raises.
    """
    if columns is not None:
        for name in set(columns).intersection((*EXTRA_COLUMNS, "completion_ids")):
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
    facts = {
        "answer_format": config.answer_format,
        "call_timeout_seconds": config.timeout_seconds,
        "worker_memory_gib": config.memory_gib,
    }
    if max_completion_tokens is not None:
        facts["max_completion_tokens"] = max_completion_tokens
    functions = {}
    for name in config.functions:
        if name in BUILT_INS:
            function = BUILT_INS[name]
        elif ":" in name:
            function = load_function(name, "reward")
            if inspect.isclass(function):
                raise ValueError(
                    f"reward {name} is a class; write a function that asks one object of it, as configs/examples/"
                    "similar.py does"
                )
        else:
            raise ValueError(
                f"unknown reward function {name!r}{near_miss(name, BUILT_INS)}; built-ins are {', '.join(BUILT_INS)}, "
                "your own is written path/file.py:function"
            )
        options = config.options.get(name, {})
        functions[name] = _bind_options(name, function, options, facts, columns)
    return functions


def try_built_ins(
    functions: Mapping[str, RewardFunction],
    columns: Mapping[str, Any],
) -> None:
    """Call each built-in function with an empty completion and the columns of one row.

    Raises ValueError if it cannot read a column, such as a list as the answer.
    """
    values = dict.fromkeys(EXTRA_COLUMNS, 0) | dict(columns)
    row = {name: [value] for name, value in values.items()}
    for name, function in functions.items():
        if is_built_in(function):
            arguments, named = call_arguments(function, [""], row)
            try:
                function(*arguments, **named)
            except ValueError as error:
                raise ValueError(f"reward function {name} cannot read the data: {error}") from error


def _bind_options(
    name: str,
    function: RewardFunction,
    options: Mapping[str, Any],
    facts: Mapping[str, Any],
    columns: list[str] | None,
) -> RewardFunction:
    """Bind the options of a function, and those facts of the run that it asks for and that its options leave open."""
    check_options(function, options, f"reward function {name}", f"reward.options of {name}", facts)
    known = optional_arguments(function)
    bound = {fact: value for fact, value in facts.items() if fact in known} | dict(options)
    # the arguments of a call replace bound ones, so that a column `language` would replace the option
    reserved = known if name in BUILT_INS else bound
    for column in columns or ():
        if column in reserved:
            raise ValueError(
                f"column {column} is named like an option of {name}; rename it or leave it out of data.columns"
            )
    for option, parameter in known.items():
        is_given = parameter.default is not parameter.empty or option in bound or option in (columns or ())
        if not is_given and (columns is not None or name in BUILT_INS):  # a user's function may need a column
            hint = "" if name in BUILT_INS else ", or, if it is a column, in data.columns"
            raise ValueError(
                f"reward function {name} needs {option}; give it with --reward.options {name} "
                f"'{{\"{option}\": ...}}'{hint}"
            )
    function = functools.partial(function, **bound)
    if columns is not None:
        _check_columns(name, function, columns)
    if name in BUILT_INS:
        parameters = inspect.signature(function).parameters.values()
        try:  # without completions it only checks its options
            function(**{p.name: [] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD})
        except ValueError as error:
            raise ValueError(f"reward.options of {name}: {error}") from error
    return function


def _check_columns(name: str, function: RewardFunction, columns: list[str]) -> None:
    """Raise ValueError if a function cannot be called with these columns."""
    values = dict.fromkeys(columns, [])
    if "completion_ids" in argument_names(function):
        values["completion_ids"] = []
    arguments, named = call_arguments(function, [], values)
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        hints = [f"; {argument} is TRL's: {hint}" for argument, hint in FROM_TRL.items() if argument in str(error)]
        raise ValueError(
            f"reward function {name} cannot be called with completions and the columns {', '.join(columns)} (`answer` "
            f"is the one that data.answer_column names): {error}; "
            "end its arguments with **columns, and list the columns it needs in data.columns or return them from "
            f"data.row{''.join(hints)}"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Reward processes


def start_early(config: RewardConfig, max_completion_tokens: int) -> None:
    """Start the processes beside the imports of a script. `start_workers` with the same arguments returns them."""
    _EARLY[repr((config, max_completion_tokens))] = start_workers(config, max_completion_tokens)


def start_workers(config: RewardConfig, max_completion_tokens: int) -> dict[bool, Workers]:
    """Start `config.num_workers` processes for confined functions, and as many for others. Returns them by `confined`.

    They load the functions meanwhile. Confined ones do not get the variables of `config.environment`. Raises ValueError
    if one is not set.
    """
    key = repr((config, max_completion_tokens))
    if key in _EARLY:
        return _EARLY.pop(key)
    started = {}
    for confined in (False, True):  # in this order, since only the others can lack a variable
        own = part(config, confined)
        if own.functions:
            loader = functools.partial(load_caller, own, confined, max_completion_tokens)
            variables = () if confined else config.environment
            started[confined] = Workers("reward functions", loader, config.num_workers, config.memory_gib, variables)
    missing = lockdown.missing_measures()
    if missing and True in started:
        print(f"warning: this kernel has no {missing}: processes of built-in rewards are not confined")
    return started


# ---------------------------------------------------------------------------------------------------------------------
# In a reward process


class Snapshot(types.SimpleNamespace):
    """An environment as reward functions see it: with its plain attributes at the end of the episode."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a reward function sees no {name} of an environment, only its public attributes that JSON has, or what "
            "its get_info returns; name it there, or compute the reward in get_reward"
        )


def is_confined(name: str) -> bool:
    """Decide whether a function runs confined. Built-in functions do, unless they confine what they run themselves.

    The user's functions do not, because they may call a judge or read data.
    """
    return name in BUILT_INS and not getattr(BUILT_INS[name], "confines_itself", False)


def part(config: RewardConfig, confined: bool) -> RewardConfig:
    """Return the config with only the functions that run confined, or only the others."""
    functions = {name: weight for name, weight in config.functions.items() if is_confined(name) == confined}
    options = {name: values for name, values in config.options.items() if name in functions}
    return dataclasses.replace(config, functions=functions, options=options)


def load_caller(
    config: RewardConfig,
    confined: bool,
    max_completion_tokens: int,
) -> Callable[..., Rewards]:
    """Load the functions into this process, confined or not. Returns a function that calls one of them by name."""
    private_paths = filter(lockdown.is_private, sys.path)
    private_folders = sorted(set(map(os.path.realpath, private_paths)))
    if confined:
        confine()
    try:
        functions = load_functions(config, None, max_completion_tokens)
        if answer_format_of(functions) == "boxed":  # now, not within the deadline of a first comparison
            load_math_verify()
    except (ImportError, PermissionError) as error:
        if not confined:
            raise
        raise Failure(
            f"{describe_error(error)}; if that package works by itself: built-in rewards cannot read files right in "
            f"{', '.join(private_folders)} on Python's path; install packages into a folder of their own"
        ) from error
    return lambda name, completions, columns: make_call(functions[name], completions, columns)


def confine() -> None:
    """Take from this process, for good, all that built-in functions do not need. It must have a single thread."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # writes nothing even where a kernel lacks Landlock
    lockdown.lock(readable_paths(), (), os.getppid())


def readable_paths() -> tuple[str, ...]:
    """Return what built-in functions may read: all that programs may read, installed packages, and this package."""
    paths = {
        *lockdown.interpreter_paths(),
        *lockdown.package_paths(),
        "/dev/urandom",
        PACKAGE,
    }
    return tuple(sorted(paths))


@functools.cache
def _runner() -> asyncio.Runner:
    """Return what runs async functions in this process. All calls share its loop: a client works only in one."""
    return asyncio.Runner()


def make_call(
    function: RewardFunction,
    completions: list[str],
    columns: Columns,
) -> Rewards:
    """Call a function. Returns its values. Raises whatever it raises, and Failure if it does not return values."""
    num_completions = len(completions)  # the function may change the list
    if "environments" in columns:
        columns["environments"] = [Snapshot(**info) for info in columns["environments"]]
    arguments, named = call_arguments(function, completions, columns)
    try:
        values = function(*arguments, **named)
        if inspect.iscoroutine(values):
            values = _runner().run(values)
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm that the function left would strike a later call
    return plain_values(values, num_completions)
