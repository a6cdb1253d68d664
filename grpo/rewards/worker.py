"""What happens in one reward process: loading, then one call after another; and what a call may come to.

A user's own function runs with the user's files and network. Built-in functions run confined (workers/lockdown.py): a
completion is text from a policy that will find every hole, and a library that evaluates formulas may run one.
"""

import asyncio
import inspect
import json
import math
import numbers
import os
import pathlib
import resource
import signal
import socket
import sys
import traceback
import types
from typing import Any, NamedTuple

from grpo.config import RewardConfig
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.loading import call_arguments, load_functions
from grpo.text import one_line, shorten
from grpo.workers import lockdown

# Characters of an error message, repr or completion that are shown.
SHOWN_CHARACTERS = 500
# No reward is larger: sums and squares of such numbers are finite in any precision.
LARGEST_VALUE = 1e9

# What `describe` calls it; the process is replaced then.
MEMORY_ERROR = "MemoryError"

_PACKAGE = str(pathlib.Path(__file__).parents[1])


class Call(NamedTuple):
    """One call of a reward function, for `number` completions of the batch from the place `start` on."""

    function: str
    start: int
    number: int
    arguments: bytes
    """JSON of the completions and the columns."""
    num_limits: int = 1
    """How often it may take `reward.timeout_seconds`."""

    def as_line(self, call: int) -> bytes:
        """What a worker reads: the call's number, the function's name and the arguments."""
        return b"[%d, %s, %s]\n" % (call, json.dumps(self.function).encode(), self.arguments)


class Snapshot(types.SimpleNamespace):
    """An environment as reward functions see it: plain attributes as they were at the end of its episode."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a reward function sees no {name} of an environment, only its public attributes that JSON has, or what "
            "its get_info returns; name it there, or compute the reward in get_reward"
        )


def work(
    config: RewardConfig, confined: bool, max_completion_tokens: int, parent: int, connection: socket.socket
) -> None:
    """Load the reward functions, confined or not, then make calls until the supervisor is gone.

    On the main thread: math-verify's own time limit is a SIGALRM, which Python handles there.
    """
    pid = os.getpid()

    def reply(**message) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a forked child that came back from the verifier: one voice per worker
        connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        if confined:
            confine(config, parent)
        functions = load_functions(config, None, max_completion_tokens)
    except BaseException as error:  # a user's file may raise anything, and the driver must hear what
        reply(failed=describe(error))
        return
    reply(loaded=True)
    with connection.makefile("rb") as reader:
        for line in reader:
            call, name, (completions, columns) = json.loads(line)
            outcome = make_call(functions[name], completions, columns)
            reply(call=call, **{"failure" if isinstance(outcome, str) else "values": outcome})


def confine(config: RewardConfig, parent: int) -> None:
    """Take from the calling process, for good, what built-in functions do not need; call it with a single thread."""
    for name in config.environment:  # for the user's own functions
        os.environ.pop(name, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # writes nothing even where a kernel lacks Landlock
    lockdown.lock(readable_places(), (), parent)


def readable_places() -> tuple[str, ...]:
    """What programs may read, installed packages that lie elsewhere, and this package."""
    packages = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    return tuple(sorted({*lockdown.interpreter_places(), *packages, "/dev/urandom", _PACKAGE}))


def make_call(function: RewardFunction, completions: list[str], columns: dict[str, list]) -> list[float | None] | str:
    """The values of one call, or what went wrong."""
    number = len(completions)  # the function may change the list
    # A verifier may raise anything, SystemExit and KeyboardInterrupt too, and all of it belongs to this one call.
    try:
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
    except BaseException as error:
        return describe(error)


# ---------------------------------------------------------------------------------------------------------------------
# What a call comes to


def plain_values(values: Any, number: int) -> list[float | None] | str:
    """The values of `number` completions as floats, or what is wrong with them.

    values: a list or tuple, or a one-dimensional numpy array or torch tensor. Each of them None, or a number of Python,
    numpy or torch, finite and not beyond LARGEST_VALUE.
    """
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return f"returned {_described(values)}, not a list with {number} values"
    if len(values) != number:
        return f"returned {len(values)} values for {number} completions"
    plain = []
    for value in values:
        plain.append(None if value is None else _as_float(value))
        if value is not None and not abs(plain[-1]) <= LARGEST_VALUE:
            return f"returned {_described(value)}, not None or a finite number of at most {LARGEST_VALUE:g}"
    return plain


def _as_float(value: Any) -> float:
    """NaN for what is no real number."""
    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if isinstance(value, str | bytes) or is_complex or getattr(value, "ndim", 0):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # a table; a signalling NaN; 10**400
        return math.nan


def _described(value: Any) -> str:
    """`nan (float)`; only the type where the value cannot be shown."""
    try:
        text = shown(repr(value))
    except Exception:  # a user's __repr__ may raise anything, and so does that of an int of 5000 digits
        text = "a value that cannot be shown"
    return f"{text} ({type(value).__name__})"


def shown(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """The text as a message shows it: short, one line, nothing in it that acts on a terminal."""
    return one_line(shorten(text, limit))


def describe(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`: the innermost line of the file that this module called into."""
    if isinstance(error, MemoryError):
        return MEMORY_ERROR
    try:
        message = shown(str(error))
    except Exception:  # a user's exception may have a __str__ that fails
        message = ""
    walked = list(traceback.walk_tb(error.__traceback__))
    lines = [(frame.f_code.co_filename, line) for frame, line in walked]
    theirs = [line for line in lines if not line[0].startswith((_PACKAGE, "<frozen"))] or lines[1:]
    places = [f" ({file}:{line})" for file, line in theirs if file == theirs[0][0]]
    text = f"{type(error).__name__}{': ' if message else ''}{message}{''.join(places[-1:])}"
    if isinstance(error, KeyError) and walked and walked[-1][0].f_locals.get("self") is os.environ:
        text += "; reward functions get few environment variables, others if reward.environment names them"
    return text
