"""One worker process: as the supervisor sees it, what happens in it, and what a call may come to."""

import contextlib
import json
import math
import numbers
import os
import pathlib
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from grpo.text import one_line, shorten
from grpo.workers.processes import Call

# The number of a worker's first call, which loads what the others call.
LOAD = -1
# Characters of an error message, repr or completion that are shown.
SHOWN_CHARACTERS = 500
# Characters of a failure that a worker reports; its own are shorter.
FAILURE_CHARACTERS = 2000
# No reward is larger: sums and squares of such numbers are finite in any precision.
LARGEST_VALUE = 1e9

_PACKAGE = str(pathlib.Path(__file__).parents[1])


class Failure(Exception):
    """A call that failed for the reason that its text says, whatever line raised it."""


class Peer:
    """The other end of one of the supervisor's connections: its owner, or a worker, which is killed at its deadline.

    The first of `calls` is what the worker runs now; `conversation` is the one that it is kept for. `closed`: nothing
    more is read from it or sent to it.
    """

    def __init__(self, connection: socket.socket, pid: int = 0):
        connection.setblocking(False)
        self.connection, self.pid, self.closed = connection, pid, False
        self.inbox, self.outbox = bytearray(), bytearray()
        self.calls, self.conversation = deque[Call](), None
        self.deadline, self.busy_seconds = math.inf, 0.0

    @property
    def is_loading(self) -> bool:
        """Whether it has not loaded yet, which is its first call."""
        return bool(self.calls) and self.calls[0].number == LOAD

    @property
    def is_free(self) -> bool:
        """Whether it can take calls of anybody."""
        return not (self.closed or self.calls) and self.conversation is None

    def begin_call(self) -> None:
        """Set the deadline of what it runs now, none if that is nothing."""
        self.deadline = time.monotonic() + self.calls[0].seconds if self.calls else math.inf

    def outcome(self, line: bytes) -> dict[str, Any] | None:
        """What a line from it says of what it runs, `{value}` or `{failed, cause}`; None if it says neither."""
        with contextlib.suppress(ValueError, RecursionError, Failure, IndexError):  # no JSON, no values, no call
            call = self.calls[0]
            match json.loads(line):
                case {"call": call.number, "value": value}:
                    return {"value": value if call.num_values is None else plain_values(value, call.num_values)}
                case {"call": call.number, "failed": str() as reason, "cause": "memory" | "raised" as cause}:
                    return {"failed": shown(reason, FAILURE_CHARACTERS), "cause": cause}
        return None


# ---------------------------------------------------------------------------------------------------------------------
# In the process


def work(load: Callable[[], Callable[..., Any]], connection: socket.socket) -> None:
    """Answer calls until the supervisor is gone, on the main thread, where Python handles signals."""
    pid, answer = os.getpid(), load

    def say(**message: Any) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a forked child that came back from a call: one voice per process
        connection.sendall(json.dumps(message).encode() + b"\n")

    with connection.makefile("rb") as reader:
        for line in reader:
            call, arguments = json.loads(line)
            try:
                value = answer(*arguments)
                if call == LOAD:
                    answer, value = value, None
                say(call=call, value=value)
            except BaseException as error:  # what is called may raise anything, and all of it belongs to this one call
                say(call=call, failed=describe(error), cause="memory" if isinstance(error, MemoryError) else "raised")


# ---------------------------------------------------------------------------------------------------------------------
# What a call comes to


def plain_values(values: Any, number: int) -> list[float | None]:
    """The values of `number` completions as floats; raises Failure that says what is wrong with them.

    values: a list or tuple, or a one-dimensional numpy array or torch tensor. Each of them None, or a number of Python,
    numpy or torch, finite and not beyond LARGEST_VALUE.
    """
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise Failure(f"returned {_described(values)}, not a list with {number} values")
    if len(values) != number:
        raise Failure(f"returned {len(values)} values for {number} completions")
    plain = [None if value is None else _as_float(value) for value in values]
    for value, as_float in zip(values, plain, strict=True):
        if as_float is not None and not abs(as_float) <= LARGEST_VALUE:
            raise Failure(f"returned {_described(value)}, not None or a finite number of at most {LARGEST_VALUE:g}")
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
    """`ValueError: message (file.py:12)`: the innermost line of the file that this package called into."""
    if isinstance(error, MemoryError):
        return "MemoryError"
    try:
        message = shown(str(error))
    except Exception:  # a user's exception may have a __str__ that fails
        message = ""
    if isinstance(error, Failure):
        return message
    walked = list(traceback.walk_tb(error.__traceback__))
    lines = [(frame.f_code.co_filename, line) for frame, line in walked]
    theirs = [line for line in lines if not line[0].startswith((_PACKAGE, "<frozen"))] or lines[1:]
    places = [f" ({file}:{line})" for file, line in theirs if file == theirs[0][0]]
    text = f"{type(error).__name__}{': ' if message else ''}{message}{''.join(places[-1:])}"
    if isinstance(error, KeyError) and walked and walked[-1][0].f_locals.get("self") is os.environ:
        text += "; reward functions get few environment variables, others if reward.environment names them"
    return text
