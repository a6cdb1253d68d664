"""Worker processes from their owner's side, and how a process is limited, killed and cleaned up after.

    owner        the driver or a replica's head; starts the supervisor, before CUDA is touched, and sends it calls
    supervisor   one small program with a single thread (supervisor.py), which forks the workers and watches them
    workers      run what may loop, crash or allocate without end: a user's rewards and environments

The supervisor is a program of its own because the owner, with the threads of CUDA, NCCL and gloo, must not fork, and a
spawned worker would import torch and vLLM again. A call without memory, such as that of a reward, goes to any worker.
Those of a conversation, such as an episode, all go to the same worker.

Nothing that a worker starts outlives the run. A worker is killed with its process group. A process that left the group
and lost its parent becomes a child of the supervisor, which is their subreaper, and is killed as well.
"""

import contextlib
import glob
import json
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.workers import kernel

# Returns the function that is called with the arguments of each call
Load = Callable[[], Callable[..., Any]]
# Seconds for the supervisor to start
START_SECONDS = 300.0
# Seconds for one process to load a user's files, which may be models, on a machine that is busy with other starts
LOAD_SECONDS = 300.0
# Seconds for the supervisor to end when its owner closes the connection
CLOSE_SECONDS = 60.0
# Seconds between two looks for outcomes; the supervisor keeps the deadlines
POLL_SECONDS = 1.0

ROOT = Path(__file__).parents[2]
# Starts the supervisor in the owner's folder, none of whose files it imports
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from grpo.workers.supervisor import main; main()"

# What Python and its libraries need, and who the user is. Proxies are left out: their addresses hold passwords.
_PASSED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON[A-Z]+|VIRTUAL_ENV|CONDA_PREFIX"
    "|(OMP|MKL|OPENBLAS)_[A-Z_]+|CUDA_VISIBLE_DEVICES|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


# ---------------------------------------------------------------------------------------------------------------------
# The owner's side


@dataclass(frozen=True)
class Call:
    """One call of a worker."""

    number: int
    """Comes back with the outcome."""
    arguments: bytes
    """A list, as JSON on one line."""
    seconds: float
    """Its deadline, from when a worker begins with it."""
    num_values: int | None = None
    """Its result is a list of this many rewards, see `plain_values`. None: any value of JSON."""
    conversation: int | None = None
    """All calls with this number go to one worker, from the first to the one that `ends` it. None: any worker."""
    ends: bool = False

    def as_line(self) -> bytes:
        """Return it for the supervisor: the other fields, then the arguments, which it passes on as they are."""
        fields = vars(self) | {"arguments": None}
        return json.dumps(fields).encode() + b"\t" + self.arguments + b"\n"


@dataclass(frozen=True)
class Setup:
    """What the supervisor gets at its start."""

    path: list[str]
    """Becomes `sys.path`."""
    load: Load
    load_seconds: float
    num_workers: int
    memory_gib: float
    loads_once: bool


class Workers:
    """Worker processes behind one socket: calls go out and outcomes come in, in any order.

    Start it on the main thread, because the processes end with the thread that started them. What they print is lost.
    """

    def __init__(
        self,
        what: str,
        load: Load,
        num_workers: int,
        memory_gib: float,
        variables: Collection[str] = (),
        loads_once: bool = False,
    ):
        """Start the supervisor, and return at once. `wait_until_loaded` comes before all other methods.

        what: what is loaded, for messages. load: a function of a module, or a partial of one. It returns the function
        that is called with the arguments of each call and returns values of JSON. memory_gib: address space of a
        worker. variables: names of environment variables that workers get on top of what libraries need. loads_once:
        the supervisor loads, and forks a worker in milliseconds when a call needs one. Otherwise each worker loads for
        itself at the start.
        """
        self.what = what
        self.is_ready = False
        self.num_open = 0
        self._inbox = b""
        passed = environment(variables)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(ROOT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=passed,  # from the start, since /proc shows what a process was started with
                process_group=0,  # if it were killed with the owner's group, it could not end what the workers started
            )
        setup = Setup(
            sys.path,
            load,
            LOAD_SECONDS,
            num_workers,
            memory_gib,
            loads_once,
        )
        self._send(pickle.dumps(setup))

    def wait_until_loaded(self) -> None:
        """Return when workers have called `load`. Raises ValueError if that fails."""
        seconds = START_SECONDS + LOAD_SECONDS
        if not self.poll(seconds):
            self.close()
            raise ValueError(f"loading the {self.what} took longer than {seconds:g} s")
        self.is_ready = True

    def submit(self, calls: list[Call]) -> None:
        """Send calls, which then wait for free workers. The supervisor always reads, so this does not wait."""
        self.num_open += len(calls)
        lines = [call.as_line() for call in calls]
        self._send(b"".join(lines))

    def drop(self, conversation: int) -> None:
        """End a conversation that is given up, with its worker."""
        line = json.dumps({"drop": True, "conversation": conversation})
        self._send(f"{line}\n".encode())

    def poll(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Return the outcomes that are there, or the first ones within `seconds`.

        Each is `{call, value}` or `{call, failed, cause}`: the reason in words, and a cause. raised: by what was
        called. lost: the same, by an outage. memory: it reached the limit. late, busy: its time was over while it
        waited, or computed. died: its process ended, or wrote what no worker writes. Raises RuntimeError if the
        supervisor is gone, or if no worker can load any more.
        """
        give_up_at = time.monotonic() + seconds
        while b"\n" not in self._inbox:
            self._socket.settimeout(max(0.0, give_up_at - time.monotonic()))
            try:
                data = self._socket.recv(1 << 20)
            except (BlockingIOError, TimeoutError):
                return []
            except OSError:
                data = b""
            if not data:
                self.close()
                code = self.supervisor.returncode
                raise RuntimeError(f"the process that supervises the {self.what} hung up; it ended with code {code}")
            self._inbox += data
        *lines, self._inbox = self._inbox.split(b"\n")
        messages = list(map(json.loads, lines))
        if "unusable" in messages[-1]:
            self.close()
            kind = RuntimeError if self.is_ready else ValueError
            raise kind(f"the {self.what} cannot be loaded: {messages[-1]['unusable']}")
        if self.is_ready:
            self.num_open -= len(messages)
        return messages

    def collect(self) -> Iterator[dict[str, Any]]:
        """Yield the outcomes of all calls that were submitted, as they come. Raises what `poll` raises."""
        while self.num_open:
            yield from self.poll(POLL_SECONDS)

    def close(self) -> None:
        """End all processes and wait until they are gone. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # noticed even if a forked process holds a copy of this end
        self._socket.close()
        try:
            self.supervisor.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()

    def _send(self, data: bytes) -> None:
        """Send data to the supervisor, and wait until it is sent."""
        with contextlib.suppress(OSError):  # it ended; `poll` says why
            self._socket.settimeout(None)
            self._socket.sendall(data)


def environment(names: Collection[str]) -> dict[str, str]:
    """Return the environment variables that workers get: what Python and libraries need, no secrets, and `names`."""
    for name in names:
        if name not in os.environ:
            raise ValueError(f"reward.environment names {name}, which is not set; export it or leave it out")
    passed = set(names)
    for name in filter(_PASSED.fullmatch, os.environ):
        if not _SECRET.search(name):
            passed.add(name)
    return {name: os.environ[name] for name in passed}


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def limit(memory_gib: float, parent: int) -> None:
    """Bound the memory of the calling process, and let it be killed with all that it starts, and with its parent."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kernel.die_with(parent)
    for output in (1, 2):
        os.dup2(0, output)  # stdin is /dev/null
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, int(memory_gib * 2**30))


def draw_anew() -> None:
    """Let the calling process, a fork, draw its own random numbers. Python's `random` does that by itself."""
    for library in ("numpy.random", "torch"):
        if library in sys.modules:
            sys.modules[library].seed()


def lower_limit(name: int, soft: int, hard: int | None = None) -> None:
    """Set a limit of the calling process, except where it is lower already. The hard limit is `soft` by default."""
    if hard is None:
        hard = soft
    _, highest = resource.getrlimit(name)
    if highest != resource.RLIM_INFINITY:
        soft = min(soft, highest)
        hard = min(hard, highest)
    resource.setrlimit(name, (soft, hard))


def kill(pid: int) -> None:
    """Kill a child that was not waited for yet, and the process group that it founded, if any."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def kill_children(spared: Collection[int] = ()) -> None:
    """Kill this process's children, also those that left a worker's process group and lost their parent."""
    for pid in children() - set(spared):
        kill(pid)


def children(pid: int | None = None) -> set[int]:
    """Return the process ids of a process's children, by default this one's, with dead ones that nobody waited for."""
    pid = pid or os.getpid()
    files = glob.glob(f"/proc/{pid}/task/*/children")
    if not files:  # a kernel without them, or the process is gone
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return {child for child in pids if _stat(child)[1:2] == [b"%d" % pid]}
    found = set()
    for file in files:
        with contextlib.suppress(OSError):  # the thread has ended
            found |= set(map(int, Path(file).read_text().split()))
    return found


def busy_seconds(pid: int) -> float:
    """Return the seconds that a process and all its descendants computed, and their main threads waited for a core.

    0 if it is gone.
    """
    seconds = 0.0
    with contextlib.suppress(OSError):  # some kernels have no such file
        seconds = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    ticks = _stat(pid)[11:15]  # user and system time, its own and that of children that were waited for
    seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds + sum(map(busy_seconds, children(pid)))


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the command, which may hold blanks. Empty if the process is gone."""
    fields = b""
    with contextlib.suppress(OSError):
        _, _, fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    return fields.split()
