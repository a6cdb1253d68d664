"""One worker process: how the supervisor sees it, what happens in it, and what the result of a call may be."""

import contextlib
import json
import math
import os
import pathlib
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

from grpo.text import one_line, shorten
from grpo.workers.processes import Call, Load

# Number of a worker's first call, which loads the function that all later ones call.
LOAD = -1
# Characters of an error message, repr or completion that are shown.
SHOWN_CHARACTERS = 500
# Characters of a failure that a worker reports. Those that it writes itself are shorter.
FAILURE_CHARACTERS = 2000
# What a reward function returns: a value of each completion, None for no reward
Rewards = list[float | None]
# No reward is larger: sums and squares of such numbers are finite in any precision.
LARGEST_VALUE = 1e9

PACKAGE = str(pathlib.Path(__file__).parents[1])


class Failure(Exception):
    """A failed call whose text is the whole reason, so that messages show no line of code."""


class Lost(Failure):
    """A failure of the machine or of a server. What the model wrote cannot have caused it."""


class Peer:
    """The other end of one of the supervisor's connections: its owner, or a worker, which is killed at its deadline.

    `calls`: what the worker has to do; it is at the first one. `conversation`: the one that it serves, and no other.
    `closed`: nothing more is read from it or sent to it. `busy_seconds`: what it had computed when its calls came.
    `is_spoilt`: no further call should go to it.
    """

    def __init__(self, connection: socket.socket, pid: int = 0):
        connection.setblocking(False)
        self.connection = connection
        self.pid = pid
        self.closed = False
        self.is_spoilt = False
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.calls = deque[Call]()
        self.conversation: int | None = None
        self.deadline = math.inf
        self.busy_seconds = 0.0

    @property
    def is_loading(self) -> bool:
        """True until it has loaded, which is its first call."""
        return bool(self.calls) and self.calls[0].number == LOAD

    @property
    def is_free(self) -> bool:
        """True if it can take any call."""
        return not (self.closed or self.calls) and self.conversation is None

    def begin_call(self) -> None:
        """Set the deadline of its first call. Without a call it has none."""
        self.deadline = math.inf
        if self.calls:
            self.deadline = time.monotonic() + self.calls[0].seconds

    def read_outcome(self, line: bytes) -> dict[str, Any] | None:
        """Return the outcome of its first call, `{value}` or `{failed, cause}`. None if the line is anything else."""
        # no JSON, no values, no call, no table
        with contextlib.suppress(ValueError, RecursionError, Failure, IndexError, AttributeError):
            call = self.calls[0]
            message = json.loads(line)
            self.is_spoilt = bool(message.get("is_spoilt"))
            match message:
                case {"call": call.number, "value": value}:
                    if call.num_values is not None:
                        value = plain_values(value, call.num_values)
                    return {"value": value}
                case {"call": call.number, "failed": str() as reason, "cause": "memory" | "lost" | "raised" as cause}:
                    return {"failed": shown(reason, FAILURE_CHARACTERS), "cause": cause}
        return None


# ---------------------------------------------------------------------------------------------------------------------
# In the process


def work(load: Load, connection: socket.socket) -> None:
    """Answer calls until the supervisor is gone. Runs on the main thread, where Python handles signals."""
    pid = os.getpid()
    function = load

    def send(**message: Any) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a child that the call forked and that returned from it: only one process may reply
        # what filled the memory may still be there
        is_spoilt = message.get("cause") == "memory" or not can_open(connection)
        line = json.dumps(message | {"is_spoilt": is_spoilt})
        connection.sendall(line.encode() + b"\n")

    for line in _lines(connection):
        call, arguments = json.loads(line)
        try:
            value = function(*arguments)
            if call == LOAD:
                function = value
                value = None
            send(call=call, value=value)
        except BaseException as error:  # a user's code may raise anything, and only this call fails
            cause = "raised"
            if isinstance(error, MemoryError):
                cause = "memory"
            elif isinstance(error, Lost):
                cause = "lost"
            send(call=call, failed=describe_error(error), cause=cause)


def can_open(connection: socket.socket) -> bool:
    """Return whether this process has a descriptor left."""
    try:
        connection.dup().close()
    except OSError:
        return False
    return True


def wait(connection: socket.socket) -> None:
    """Let what earlier calls left running go on until there is something to read. It may return earlier.

    Nothing runs without an event loop. Whoever opens one in this process puts its own function in place of this one.
    """


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Yield the lines that come, until the supervisor is gone."""
    parts: list[bytes] = []
    while True:
        wait(connection)
        data = connection.recv(2**18)
        if not data:
            return
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield b"".join([*parts, end])
            parts = []
        parts.append(rest)


# ---------------------------------------------------------------------------------------------------------------------
# Results


def plain_values(values: Any, number: int) -> Rewards:
    """Return the values of `number` completions as floats. Raises Failure that says what is wrong with them.

    values: a list or tuple, or a one-dimensional numpy array or torch tensor. Each value is None or a number of Python,
    numpy or torch, finite and at most LARGEST_VALUE.
    """
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise Failure(f"returned {_described(values)}, not a list with {number} values")
    if len(values) != number:
        raise Failure(f"returned {len(values)} values for {number} completions")
    plain = []
    for value in values:
        as_float = None if value is None else _as_float(value)
        if as_float is not None and not abs(as_float) <= LARGEST_VALUE:
            raise Failure(f"returned {_described(value)}, not None or a finite number of at most {LARGEST_VALUE:g}")
        plain.append(as_float)
    return plain


def _as_float(value: Any) -> float:
    """Return a real number as a float, and NaN for anything else."""
    if isinstance(value, str | bytes) or getattr(value, "ndim", 0):
        return math.nan
    try:
        return float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # for a dict; for a signalling NaN; for 10**400
        return math.nan


def _described(value: Any) -> str:
    """Return the value and its type, such as `nan (float)`."""
    try:
        text = shown(repr(value))
    except Exception:  # a user's __repr__ may raise anything, and so does that of an int of 5000 digits
        text = "a value that cannot be shown"
    return f"{text} ({type(value).__name__})"


def shown(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Return the text as messages show it: short, in one line, without anything that acts on a terminal."""
    return one_line(shorten(text, limit))


def describe_error(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)`, with the innermost line of the file that this package called."""
    if isinstance(error, MemoryError):
        return "MemoryError"
    try:
        message = shown(str(error))
    except Exception:  # a user's exception may have a __str__ that fails
        message = ""
    if isinstance(error, Failure):
        return message
    text = type(error).__name__
    if message:
        text += f": {message}"
    lines = {frame.f_code.co_filename: number for frame, number in traceback.walk_tb(error.__traceback__)}
    if isinstance(error, SyntaxError) and error.filename:
        lines[error.filename] = error.lineno
    foreign = [file for file in lines if not file.startswith((PACKAGE, "<frozen"))]
    files = foreign or [*lines][1:]
    if files:
        text += f" ({files[0]}:{lines[files[0]]})"
    if isinstance(error, KeyError) and "<frozen os>" in lines:
        text += "; reward functions get few environment variables, others if reward.environment names them"
    return text
