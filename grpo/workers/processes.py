"""Worker processes from their owner's side, and how a process is limited, killed and cleaned up after.

    owner        the driver or a replica's head; starts the supervisor, before CUDA is touched, and sends it calls
    supervisor   one small program with a single thread (supervisor.py), which forks the workers and watches them
    workers      run what may loop, crash or allocate without end: a user's rewards and environments

The supervisor is a program of its own because the owner, with CUDA, NCCL and gloo threads, must not fork, and a spawned
worker would import torch and vLLM again. A call is without memory, as those of rewards are, and goes to any worker; or
it belongs to a conversation, which keeps its worker from its first call to its last.

Nothing that a worker starts outlives the run. A worker is killed with its process group; what left the group and lost
its parent becomes a child of the supervisor, the subreaper, and is killed as well.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from grpo.workers import kernel

# For one process to load a user's files.
LOAD_SECONDS = 60.0
# For the supervisor to end when its owner closes the connection.
CLOSE_SECONDS = 60.0

ROOT = pathlib.Path(__file__).parents[2]

# What Python and its libraries need, and who they are run for. Proxies are left out: their addresses hold passwords.
_PASSED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON[A-Z]+|VIRTUAL_ENV|CONDA_PREFIX"
    "|(OMP|MKL|OPENBLAS)_[A-Z_]+|CUDA_VISIBLE_DEVICES|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


# ---------------------------------------------------------------------------------------------------------------------
# The owner's side


@dataclass(frozen=True)
class Job:
    """What some of the workers do. It is pickled: `load` is a function of a module, or a partial of one."""

    load: Callable[[], Callable[..., Any]]
    """Returns what is called with the arguments of each call; its results are values of JSON."""
    num_workers: int
    memory_gib: float
    """Address space of one worker."""
    loads_once: bool = False
    """Load in the supervisor and fork workers from it when calls need them, which costs milliseconds whatever is
    imported; otherwise all workers are there from the start and each loads for itself."""


@dataclass(frozen=True)
class Call:
    """One call of a worker; `number` comes back with its outcome."""

    number: int
    arguments: bytes
    """A list, as JSON on one line."""
    seconds: float
    """Most that it takes, from when a worker begins with it."""
    job: int = 0
    num_values: int | None = None
    """Its result is a list of so many rewards, see `plain_values`; None: any value of JSON."""
    conversation: int | None = None
    begins: bool = False
    ends: bool = False
    """Whether it is the first or the last one of its conversation."""

    def as_line(self) -> bytes:
        """What the supervisor reads: the other fields, then the arguments, which it hands on as they are."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arguments = fields.pop("arguments")
        return json.dumps(fields).encode() + b"\t" + arguments + b"\n"


class Workers:
    """Worker processes behind one socket: calls go out and outcomes come in, in any order.

    Start it on the main thread: the processes end with the thread that started them. What they print is lost.
    """

    def __init__(self, what: str, jobs: list[Job], variables: Collection[str] = ()):
        """Start the supervisor; returns when the jobs are loaded.

        what: what they load, for messages. variables: names of environment variables that they get on top of what
        libraries need. Raises ValueError if one of those is not set, or something cannot be loaded.
        """
        self.what, self.is_ready, self._inbox = what, False, b""
        passed = environment(variables)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-m", "grpo.workers.supervisor", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=passed,  # from the start: what a process was started with stays readable in /proc
                process_group=0,  # killed with the owner's group, it could not end what the workers started
                cwd=ROOT,
            )
        self._send(pickle.dumps((os.getcwd(), sys.path, LOAD_SECONDS, jobs)))
        if not self.poll(2 * LOAD_SECONDS):
            self.close()
            raise ValueError(f"loading the {what} took longer than {2 * LOAD_SECONDS:g} s")
        self.is_ready = True

    def submit(self, calls: list[Call]) -> None:
        """Send calls, which wait for free workers; the supervisor reads at any time, so this never waits for one."""
        self._send(b"".join(call.as_line() for call in calls))

    def drop(self, conversation: int) -> None:
        """End a conversation that is given up, with its worker."""
        self._send(json.dumps({"drop": conversation}).encode() + b"\n")

    def poll(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Outcomes that are there, or the first ones within `seconds`.

        Each is `{call, value}` or `{call, failed, cause}`: why, in words, and one of supervisor.CAUSES. Raises
        RuntimeError if no worker can be had any more, or the supervisor is gone.
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
        return messages

    def close(self) -> None:
        """End all processes and wait until they are gone; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # noticed even if a forked process holds a copy of this end
        self._socket.close()
        try:
            self.supervisor.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it ended; `poll` says why
            self._socket.settimeout(None)
            self._socket.sendall(data)


def environment(names: Collection[str]) -> dict[str, str]:
    """The environment variables that workers get: what Python and its libraries need, no secrets, and `names`."""
    for name in names:
        if name not in os.environ:
            raise ValueError(f"reward.environment names {name}, which is not set; export it or leave it out")

    def is_passed(name: str) -> bool:
        return name in names or (_PASSED.fullmatch(name) is not None and _SECRET.search(name) is None)

    return {name: value for name, value in os.environ.items() if is_passed(name)}


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def limit(memory_gib: float, parent: int) -> None:
    """Make the calling process one that can be killed with all it started, and that cannot eat the machine."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kernel.die_with(parent)
    for output in (1, 2):
        os.dup2(0, output)  # stdin is /dev/null
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, int(memory_gib * 2**30))


def lower_limit(name: int, soft: int, hard: int | None = None) -> None:
    """Set a limit of the calling process, or leave it where it is lower already."""
    _, most = resource.getrlimit(name)
    hard = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(name, (soft, hard))


def kill(pid: int) -> None:
    """SIGKILL for a child that was not waited for yet, and for the process group that it founded, if any."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def children() -> set[int]:
    """Process ids of this process's children, dead ones that were not waited for included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except FileNotFoundError:  # a kernel without this file
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == os.getpid()}


def _parent_of(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        # pid (command) state parent ...; the command may hold blanks and brackets
        return int(file.read().rpartition(b")")[2].split()[1])


def remove(folder: str) -> None:
    """Remove a folder, whatever was left there."""
    # Not shutil.rmtree, which a deep tree makes run out of its stack. Folders may have been made without rights.
    command = 'rm -rf "$0" 2>/dev/null || { chmod -R u+rwX "$0"; rm -rf "$0"; }'
    subprocess.run(["/bin/sh", "-c", command, folder], stdin=subprocess.DEVNULL, check=False)


def cpu_seconds(pid: int) -> float:
    """Seconds that a process and its children that have ended have computed."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # pid (command) state ...; the command may hold blanks
            return sum(map(int, file.read().rpartition(b")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0
