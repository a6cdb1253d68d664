"""What happens in one reward process, which the supervisor forks: limits, loading, then one call after another.

Left out: protection against code that means harm. A worker is a process of the same user with the same files and
network.
"""

import ctypes
import json
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import traceback
from typing import Any

from grpo.config import RewardConfig
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.loading import call_arguments, is_group_level, load_functions
from grpo.text import one_line, shorten

# Characters of an error message, repr or completion that are shown.
SHOWN_CHARACTERS = 500

PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl


def confine(memory_gib: float, supervisor: int) -> None:
    """Make the calling process one that can be killed with all it started, and that cannot eat the machine."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != supervisor:  # it was gone before that
        os._exit(1)
    for output in (1, 2):
        os.dup2(0, output)  # stdin is /dev/null since the pool started the supervisor
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit, (_, most) = int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def work(config: RewardConfig, max_completion_tokens: int, connection: socket.socket) -> None:
    """Load the reward functions, then make calls until the supervisor is gone. On the main thread: math-verify's own
    time limit is a SIGALRM, which Python handles there."""
    pid = os.getpid()

    def reply(**message) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a forked child that came back from the verifier: one voice per worker
        connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        functions = load_functions(config, None, max_completion_tokens)
        reply(loaded=[name for name, (function, _) in functions.items() if is_group_level(function)])
    except BaseException as error:  # a user's file may raise anything, and the driver must hear what
        reply(load_failure=describe(error), refused=isinstance(error, ValueError))
        return
    with connection.makefile("rb") as reader:
        while True:
            for call, name, payload in pickle.load(reader):
                outcome, retire = make_call(functions[name][0], payload)
                reply(call=call, outcome=outcome, retire=retire)


def make_call(function: RewardFunction, payload: bytes) -> tuple[list[float | None] | str, bool]:
    """The values of one call or what went wrong, and whether this process is better replaced afterwards."""
    # A verifier may raise anything, SystemExit and KeyboardInterrupt too, and all of it belongs to this one call.
    try:
        completions, columns = pickle.loads(payload)
        number = len(completions)  # the function may change the list
        try:
            arguments, named = call_arguments(function, completions, columns)
            values = function(*arguments, **named)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would strike a later call
        return check_values(values, number), False
    except BaseException as error:
        return describe(error), isinstance(error, MemoryError)  # what filled the memory may still be there


def check_values(values: Any, number: int) -> list[float | None] | str:
    """The values as floats, or what is wrong with them. Arrays and tensors count as lists, their scalars as numbers."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return f"returned {shown(repr(values))} ({type(values).__name__}), not a list with {number} values"
    if len(values) != number:
        return f"returned {len(values)} values for {number} completions"
    values = [value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value for value in values]
    for value in values:
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            return f"returned {shown(repr(value))} ({type(value).__name__}), not a finite number or None"
    return [None if value is None else float(value) for value in values]


def describe(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`: the innermost line of the file that this module called into."""
    if isinstance(error, MemoryError):
        return "MemoryError"
    try:
        message = shown(str(error))
    except Exception:  # a user's exception may have a __str__ that fails
        message = ""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = (os.path.dirname(os.path.dirname(__file__)), "<frozen")  # this package, and what imports a file
    theirs = [frame for frame in frames if not frame[0].startswith(ours)] or frames[1:]
    inside = [frame for frame in theirs if frame[0] == theirs[0][0]]
    place = f" ({inside[-1][0]}:{inside[-1][1]})" if inside else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"


def shown(text: str) -> str:
    """As a message shows it."""
    return one_line(shorten(text, SHOWN_CHARACTERS))
