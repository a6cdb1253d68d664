"""What happens in one reward process, which the supervisor forks: limits, loading, then one call after another.

Left out: protection against what a user's own function does. Its worker is a process of the same user with the same
files and network; confinement.py says which workers have less.
"""

import json
import os
import pathlib
import pickle
import resource
import signal
import socket
import traceback

from grpo.config import RewardConfig
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.loading import call_arguments, is_group_level, load_functions
from grpo.rewards.workers.confinement import confine
from grpo.rewards.workers.values import plain_values, shown
from grpo.workers import lockdown


def limit(memory_gib: float, supervisor: int) -> None:
    """Make the calling process one that can be killed with all it started, and that cannot eat the machine."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it was gone before that
        os._exit(1)
    for output in (1, 2):
        os.dup2(0, output)  # stdin is /dev/null since the pool started the supervisor
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size, (_, most) = int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        size = min(size, most)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def work(config: RewardConfig, confined: bool, max_completion_tokens: int, connection: socket.socket) -> None:
    """Load the reward functions, confined or not, then make calls until the supervisor is gone. On the main thread:
    math-verify's own time limit is a SIGALRM, which Python handles there."""
    pid = os.getpid()

    def reply(**message) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a forked child that came back from the verifier: one voice per worker
        connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        lacking = confine(config) if confined else ""
        functions = load_functions(config, None, max_completion_tokens)
        group_level = [name for name, (function, _) in functions.items() if is_group_level(function)]
        reply(loaded=group_level, lacking=lacking)
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
        return plain_values(values, number), False
    except BaseException as error:
        return describe(error), isinstance(error, MemoryError)  # what filled the memory may still be there


def describe(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`: the innermost line of the file that this module called into."""
    if isinstance(error, MemoryError):
        return "MemoryError"
    try:
        message = shown(str(error))
    except Exception:  # a user's exception may have a __str__ that fails
        message = ""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = (str(pathlib.Path(__file__).parents[2]), "<frozen")  # this package, and what imports a file
    theirs = [frame for frame in frames if not frame[0].startswith(ours)] or frames[1:]
    inside = [frame for frame in theirs if frame[0] == theirs[0][0]]
    place = f" ({inside[-1][0]}:{inside[-1][1]})" if inside else ""
    way_out = "; reward functions get few environment variables, others if reward.environment names them"
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}{way_out if _of_environment(error) else ''}"


def _of_environment(error: BaseException) -> bool:
    """Whether it says that `os.environ` lacks a variable."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, KeyError) else []
    return bool(frames) and frames[-1].f_locals.get("self") is os.environ
