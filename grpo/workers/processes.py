"""Worker processes: how they are born, limited, killed when late, and reaped with all that they left behind.

    owner     the driver; starts the parent, before CUDA is touched (`start_parent`), and talks to it over a socket
    parent    one small program with a single thread (`Parent`), which forks the workers and watches them
    workers   run what may loop, crash or allocate without end, and answer in lines

The parent is a program of its own because the owner, with CUDA, NCCL and gloo threads, must not fork, and a spawned
worker would import torch and vLLM again. It runs no user code and never blocks on a worker.

Nothing that a worker starts outlives the run. A worker is killed with its process group; what left the group and lost
its parent becomes a child of this parent, the subreaper, and is killed as well.
"""

import contextlib
import math
import os
import pathlib
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection

from grpo.workers import kernel

# How often dead children are looked for, in seconds. A closed socket tells sooner, unless a worker's child holds it.
LOOK_SECONDS = 0.05
# For a worker that closed its socket to die, which usually tells more; then it is killed.
CLOSED_SECONDS = 1.0
# For killed processes to be gone when the parent ends.
END_SECONDS = 5.0
# For a parent to end when its owner closes the connection.
CLOSE_SECONDS = 60.0
# The longest line from a worker; a longer one comes from something that writes into the socket.
LINE_BYTES = 2**18

ROOT = pathlib.Path(__file__).parents[2]

# What Python and its libraries need, and who they are run for. Proxies are left out: their addresses hold passwords.
_PASSED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON[A-Z]+|VIRTUAL_ENV|CONDA_PREFIX"
    "|(OMP|MKL|OPENBLAS)_[A-Z_]+|CUDA_VISIBLE_DEVICES|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


# ---------------------------------------------------------------------------------------------------------------------
# The owner's side


def start_parent(module: str, names: Collection[str]) -> tuple[subprocess.Popen, socket.socket]:
    """Start `python -m module FD`, a parent of workers that calls `serve`, and return it with the socket to it.

    Call it on the main thread: the parent ends with the thread that started it. names: environment variables that it
    gets on top of what libraries need. Raises ValueError if one of them (reward.environment) is not set.
    """
    variables = environment(names)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=variables,  # from the start: what a process was started with stays readable in /proc
            process_group=0,  # killed with the owner's group, it could not end what the workers started
            cwd=ROOT,
        )
    return process, ours


def end_parent(process: subprocess.Popen, connection: socket.socket) -> None:
    """Close the connection, upon which the parent ends with all that it started; a second call does nothing."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # noticed even if a forked process holds a copy of this end
    connection.close()
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment(names: Collection[str]) -> dict[str, str]:
    """The environment variables that workers get: what Python and its libraries need, no secrets, and `names`."""
    for name in names:
        if name not in os.environ:
            raise ValueError(f"reward.environment names {name}, which is not set; export it or leave it out")

    def is_passed(name: str) -> bool:
        return name in names or (_PASSED.fullmatch(name) is not None and _SECRET.search(name) is None)

    return {name: value for name, value in os.environ.items() if is_passed(name)}


# ---------------------------------------------------------------------------------------------------------------------
# The parent


class Finished(Exception):
    """Ends `Parent.run`."""


class Worker:
    """A worker as its parent sees it. At its deadline it is killed, `overdue` is why.

    `closed`: nothing more is read from it or sent to it.
    """

    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self.connection = pid, connection
        self.deadline, self.overdue, self.closed = math.inf, "", False
        self.inbox, self.outbox = b"", bytearray()

    def must_end_in(self, seconds: float, what: str) -> None:
        """Set the deadline, `seconds` from now."""
        self.deadline, self.overdue = time.monotonic() + seconds, f"{what} longer than {seconds:g} s"


class Parent:
    """Starts workers, carries lines to and from them, kills the late ones and reaps the dead.

    A subclass has `begin`, `step` (before each wait, of at most LOOK_SECONDS), `on_owner` (the owner wrote), `on_line`
    (a worker wrote a line; False if it is none that a worker sends) and `on_end` (a worker ended). Whatever ends `run`
    ends all that was started.
    """

    def __init__(self, owner: socket.socket):
        self.owner, self.reader = owner, owner.makefile("rb")
        self.workers: dict[int, Worker] = {}
        self.folder: str | None = None
        self.selector = selectors.PollSelector()  # unlike epoll, it shares nothing with a forked worker
        self.selector.register(owner, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the owner is gone; then nothing that was started is left."""
        try:
            self.begin()
            while True:
                self.step()
                self._wait()
        except (Finished, EOFError, ConnectionError):
            pass  # the last two: the owner closed its end or died
        finally:
            self._end_all()

    def start(self, kind: type[Worker], memory_gib: float, work: Callable[[socket.socket], None]) -> Worker:
        """Fork a worker that calls `work` with its end of the connection. Raises OSError if no process can be had."""
        here, there = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        with there:
            if pid == 0:
                try:  # whatever happens, this process never returns into the parent's code
                    for other in (here, self.owner, self.reader, *(w.connection for w in self.workers.values())):
                        other.close()
                    limit(memory_gib, parent)
                    work(there)
                finally:
                    os._exit(1)
        with contextlib.suppress(OSError):  # both do it, so that it is done before either goes on
            os.setpgid(pid, pid)
        here.setblocking(False)
        worker = self.workers[pid] = kind(pid, here)
        self.selector.register(here, selectors.EVENT_READ, worker)
        return worker

    def send(self, worker: Worker, data: bytes) -> None:
        """Send as much of the data as the socket takes now, the rest as soon as it takes more."""
        worker.outbox += data
        try:
            del worker.outbox[: worker.connection.send(worker.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._closed(worker)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        self.selector.modify(worker.connection, events, worker)

    def end(self, worker: Worker, reason: str | None) -> None:
        """Kill a worker, or what a dead one left, and tell `on_end` the reason; None is no failure."""
        kill(worker.pid)
        del self.workers[worker.pid]
        if not worker.closed:
            worker.closed = True
            self.selector.unregister(worker.connection)
        worker.connection.close()
        self.on_end(worker, reason)

    def end_strays(self) -> None:
        """Kill the children that are no workers: what left its worker's process group and lost its parent."""
        for pid in children() - self.workers.keys():
            kill(pid)

    def own_temporary_folder(self) -> None:
        """Let workers keep temporary files in a folder that ends with this process, whoever of them was killed."""
        self.folder = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="grpo-workers-")
        os.chmod(self.folder, 0o711)  # programs of root run as another user, in folders below it
        tempfile.tempdir = None

    def _wait(self) -> None:
        next_deadline = min([worker.deadline for worker in self.workers.values()], default=math.inf)
        for key, events in self.selector.select(max(0.0, min(next_deadline - time.monotonic(), LOOK_SECONDS))):
            worker = key.data
            if worker is None:
                self.on_owner()
            elif not worker.closed and events & selectors.EVENT_WRITE:
                self.send(worker, b"")
            if worker is not None and not worker.closed and events & selectors.EVENT_READ:
                self._read(worker)
        self._reap()
        now = time.monotonic()
        for worker in [worker for worker in self.workers.values() if worker.deadline <= now]:
            self.end(worker, worker.overdue)

    def _read(self, worker: Worker) -> None:
        """Take in what the worker has sent; it may be gone from `workers` afterwards."""
        while not worker.closed:
            try:
                data = worker.connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._closed(worker)
                return
            *lines, worker.inbox = (worker.inbox + data).split(b"\n")
            short = max(map(len, [*lines, worker.inbox])) <= LINE_BYTES
            handled = short and all(worker.closed or self.on_line(worker, line) for line in lines)  # one may end it
            if not (worker.closed or handled):
                self.end(worker, "the process wrote into its connection to its parent")

    def _closed(self, worker: Worker) -> None:
        worker.closed = True
        worker.deadline = min(worker.deadline, time.monotonic() + CLOSED_SECONDS)
        worker.overdue = "the process closed its connection to its parent"
        self.selector.unregister(worker.connection)

    def _reap(self) -> None:
        """Wait for all dead children, workers and others, and kill what they left."""
        reaped = False
        with contextlib.suppress(ChildProcessError):
            # look, do not take it yet: until then no other process gets its number
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if dead.si_pid in self.workers:
                    self._read(self.workers[dead.si_pid])  # its last words say which call it was in
                if dead.si_pid in self.workers:
                    how = "exited with code" if dead.si_code == os.CLD_EXITED else "was killed by signal"
                    self.end(self.workers[dead.si_pid], f"the process {how} {dead.si_status}")
                os.waitpid(dead.si_pid, 0)
                reaped = True
        if reaped:
            self.end_strays()

    def _end_all(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.workers.clear()
        give_up_at = time.monotonic() + END_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < give_up_at:
                self.end_strays()
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.002)
        if self.folder:
            remove(self.folder)


def serve(kind: type[Parent]) -> None:
    """Be the parent that `start_parent` started, until its owner is gone."""
    # Ctrl-C is the owner's business, and so are the signals that ask a run to stop. SIGTERM is also what the kernel
    # sends when the owner is gone; SIGKILL would not let this process end what the workers started.
    owner = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.getppid() == owner or sys.exit(0))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kind(socket.socket(fileno=int(sys.argv[1]))).run()


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
