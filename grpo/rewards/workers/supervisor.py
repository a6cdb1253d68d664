"""The supervisor of the reward processes: it forks the workers, which call the reward functions, and watches them.

    python -m grpo.rewards.workers.supervisor FD    (pool.RewardPool starts it; FD is its end of a socketpair)

A verifier that loops for ever, crashes, allocates without end or kills itself must cost one completion its reward and
nothing else, so each call runs in a process that can be killed, with a deadline that someone else watches. That someone
is the supervisor: it answers one message per batch, and keeps deadlines while the driver does other things.

Why a program of its own: multiprocessing's spawn would import the training script, with torch and vLLM, again in each
worker, and a fork of the driver would copy a process with CUDA, NCCL and gloo threads. This one imports little, starts
in a tenth of a second and has a single thread, so that it may fork.

The supervisor runs no user code and never blocks on a worker: sockets are non-blocking, death is seen by SIGCHLD and
not only by a closed socket (a verifier's child may keep that open), and a worker answers in JSON, never in pickles.
What it answers is checked here again: a completion may have taken the worker over.
"""

import collections
import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator

from grpo.rewards.workers.confinement import split
from grpo.rewards.workers.values import is_outcome, read_reply
from grpo.rewards.workers.worker import limit, work
from grpo.workers import lockdown

# Calls handed to a worker at once, so that a cheap call does not wait for a message each time.
CHUNK_CALLS = 8
# Processes in a row that died with no call to blame (loading or idle) before the supervisor, with none left, gives up.
MAX_FAILED_STARTS = 5
# For a worker that closed its socket to die, which usually tells more; then it is killed.
CLOSED_SECONDS = 1.0
# For killed processes to be gone when the supervisor ends, and before a process is replaced that died with no call to
# blame, doubled each time.
END_SECONDS, RETRY_SECONDS = 5.0, 0.1
# An outcome is a line of JSON; a longer one comes from something that writes into the socket.
LINE_BYTES = 2**24


def main() -> None:
    """The supervisor: set up, load, then a batch at a time until the driver closes its end of the socket."""
    # Ctrl-C is the driver's business, and so are the signals that ask a run to stop. SIGTERM is also what the kernel
    # sends when the driver's main thread, which started this process, is gone; SIGKILL would not let it end what the
    # workers started.
    driver = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.getppid() == driver or sys.exit(0))
    lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGTERM)
    lockdown.prctl(lockdown.PR_SET_CHILD_SUBREAPER, 1)  # what dead workers leave behind becomes a child of this process
    Supervisor(socket.socket(fileno=int(sys.argv[1]))).run()


class NoWorkers(Exception):
    """No worker can be had; holds the exception that the driver is to raise."""


class Worker:
    """A worker as the supervisor sees it. The first of `calls` is the one it runs now.

    At its deadline it is killed, `overdue` is why. `closed`: nothing more is read from it or sent to it. `confined`:
    which of the functions it has.
    """

    def __init__(self, pid: int, connection: socket.socket, confined: bool, load_seconds: float):
        self.pid, self.connection, self.confined = pid, connection, confined
        self.deadline, self.overdue = time.monotonic() + load_seconds, f"loading took longer than {load_seconds:g} s"
        self.loading, self.closed = True, False
        self.calls: list[int] = []
        self.inbox, self.outbox = b"", bytearray()


class Supervisor:
    """Hands calls to workers, kills those that take too long, and replaces all that end.

    From the driver, pickled: `(config, max_completion_tokens, seconds to load, folder, sys.path)`; then batches, lists
    of calls `(function name, payload, completions, seconds)`, a payload being pickled `(completions, columns)`, which
    is only passed on. To the driver: the names of group-level functions and what confinement lacks; then for each batch
    a list that has for each call a list of values or a failure text; or an exception, after which it ends.

    Functions that run confined and others have workers of their own, `config.num_workers` each.
    """

    def __init__(self, driver: socket.socket):
        self.driver, self.reader = driver, driver.makefile("rb")
        self.workers: dict[int, Worker] = {}
        self.ended: set[int] = set()  # killed or dead, not yet waited for
        self.ready, self.num_failed_starts, self.start_after = False, 0, 0.0
        self.group_level: set[str] = set()
        self.lacking = ""
        self.calls: list[tuple[str, bytes, int, float]] = []
        self.outcomes: dict[int, list[float | None] | str] = {}

    def run(self) -> None:
        """Until the driver is gone, or no worker can be had; then nothing that was started is left."""
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a handler writes into the wakeup socket
        signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
        self.selector = selectors.PollSelector()  # unlike epoll, it shares nothing with a forked worker
        self.selector.register(self.driver, selectors.EVENT_READ)
        self.selector.register(self.wake_reader, selectors.EVENT_READ)
        try:
            config, self.max_completion_tokens, self.load_seconds, folder, path = pickle.load(self.reader)
            self.configs, self.num_workers = split(config), config.num_workers
            self.queues: dict[bool, collections.deque[int]] = {part: collections.deque() for part in self.configs}
            os.chdir(folder)
            sys.path[:] = path
            if not self.configs:  # without reward functions, a teacher alone judges
                self._reply(([], ""))
            while True:
                self._run_once()
        except NoWorkers as error:
            with contextlib.suppress(OSError):
                self._reply(error.args[0])
        except (EOFError, ConnectionError):
            pass  # the driver closed its end or died
        finally:
            self._end_all()

    def _end_all(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        give_up_at = time.monotonic() + END_SECONDS
        while time.monotonic() < give_up_at:
            for pid in children():
                kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.005)

    def _run_once(self) -> None:
        for confined in self.configs:
            while self._is_short_of(confined) and time.monotonic() >= self.start_after:
                self._start_worker(confined)
        for worker in list(self.workers.values()):
            if self.queues[worker.confined] and not (worker.loading or worker.closed or worker.calls):
                self._hand_out(worker)
        wake_at = [worker.deadline for worker in self.workers.values()]
        if any(map(self._is_short_of, self.configs)):
            wake_at.append(self.start_after)
        seconds = max(0.0, min(wake_at, default=math.inf) - time.monotonic())
        for key, events in self.selector.select(seconds if seconds < math.inf else None):
            worker = key.data
            if worker is not None and not worker.closed:
                if events & selectors.EVENT_WRITE:
                    self._flush(worker)
                if events & selectors.EVENT_READ:
                    self._read(worker)
            elif key.fileobj is self.wake_reader:
                self.wake_reader.recv(4096)
                self._reap()
            elif key.fileobj is self.driver:
                self.calls, self.outcomes = pickle.load(self.reader), {}
                for confined, config in self.configs.items():
                    self.queues[confined].extend(i for i, call in enumerate(self.calls) if call[0] in config.functions)
        now = time.monotonic()
        for worker in [worker for worker in self.workers.values() if worker.deadline <= now]:
            self._end(worker, worker.overdue)

    def _is_short_of(self, confined: bool) -> bool:
        return sum(worker.confined == confined for worker in self.workers.values()) < self.num_workers

    def _reply(self, message: list | tuple | Exception) -> None:
        # Blocks while the driver does not read; then all calls are done, and nothing else is urgent.
        self.driver.sendall(pickle.dumps(message))

    def _finish(self, call: int, outcome: list[float | None] | str) -> None:
        self.num_failed_starts = 0
        self.outcomes[call] = outcome
        if len(self.outcomes) == len(self.calls):
            self._reply([self.outcomes[i] for i in range(len(self.calls))])
            self.calls = []

    def _start_worker(self, confined: bool) -> None:
        config = self.configs[confined]
        here, there = socket.socketpair()
        supervisor = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            here.close()
            there.close()
            self._failed_start(f"cannot start a process: {error}", confined)
            return
        if pid == 0:
            # Whatever happens, this process never returns into the supervisor's code.
            try:
                signal.set_wakeup_fd(-1)
                for other in (here, self.driver, self.reader, self.wake_reader, self.wake_writer):
                    other.close()
                for worker in self.workers.values():
                    worker.connection.close()
                limit(config.memory_gib, supervisor)
                work(config, confined, self.max_completion_tokens, there)
            finally:
                os._exit(1)
        with contextlib.suppress(OSError):  # both do it, so that it is done before either goes on
            os.setpgid(pid, pid)
        there.close()
        here.setblocking(False)
        worker = self.workers[pid] = Worker(pid, here, confined, self.load_seconds)
        self.selector.register(here, selectors.EVENT_READ, worker)

    def _failed_start(self, reason: str, confined: bool, kind: type[Exception] = RuntimeError) -> None:
        """A process could not start or load, or died with no call to blame: bad at first, later tried again."""
        if not self.ready:
            raise NoWorkers(kind(f"the reward functions cannot be loaded: {reason}"))
        print(f"warning: a reward process ended without a call to blame: {reason}", file=sys.stderr, flush=True)
        self.num_failed_starts += 1
        self.start_after = time.monotonic() + RETRY_SECONDS * 2 ** min(self.num_failed_starts, 8)
        alive = [w for w in self.workers.values() if w.confined == confined and not w.loading]
        if self.num_failed_starts >= MAX_FAILED_STARTS and not alive:
            attempts = f"{self.num_failed_starts} attempts to replace one"
            raise NoWorkers(RuntimeError(f"no reward process is left after {attempts}: {reason}"))

    def _hand_out(self, worker: Worker) -> None:
        # smaller chunks towards the end, so that no worker sits on a pile while the others have nothing left
        queue = self.queues[worker.confined]
        number = max(1, min(CHUNK_CALLS, len(queue) // (4 * self.num_workers)))
        worker.calls = [queue.popleft() for _ in range(number)]
        worker.outbox += pickle.dumps([(call, *self.calls[call][:2]) for call in worker.calls])
        self._begin_call(worker)
        self._flush(worker)

    def _begin_call(self, worker: Worker) -> None:
        seconds = self.calls[worker.calls[0]][3] if worker.calls else math.inf
        worker.deadline, worker.overdue = time.monotonic() + seconds, f"took longer than {seconds:g} s"

    def _flush(self, worker: Worker) -> None:
        try:
            sent = worker.connection.send(worker.outbox)
            del worker.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._closed(worker)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        self.selector.modify(worker.connection, events, worker)

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
            handled = all(worker.closed or self._handle(worker, line) for line in lines)  # a line may end it
            if not worker.closed and not (handled and len(worker.inbox) <= LINE_BYTES):
                self._end(worker, "the process wrote into its connection to the supervisor")

    def _handle(self, worker: Worker, line: bytes) -> bool:
        """Take in a worker's message; False if it is none that a worker sends, or not now."""
        match read_reply(line):
            case {"loaded": list() as group_level, "lacking": str() as lacking} if worker.loading:
                if any(name not in self.configs[worker.confined].functions for name in group_level):
                    return False
                worker.loading, worker.deadline = False, math.inf
                self.group_level.update(group_level)
                self.lacking = self.lacking or lacking
                if not self.ready and not any(worker.loading for worker in self.workers.values()):
                    self.ready = True
                    self._reply((sorted(self.group_level), self.lacking))
            case {"load_failure": str() as reason, "refused": bool() as refused} if worker.loading:
                self._end(worker, None)
                self._failed_start(reason, worker.confined, ValueError if refused else RuntimeError)
            case {"call": int() as call, "outcome": outcome, "retire": bool() as retire} if call in worker.calls[:1]:
                if not is_outcome(outcome, self.calls[call][2]):
                    return False
                self._finish(worker.calls.pop(0), outcome)
                self._begin_call(worker)
                if retire:
                    self._end(worker, None)
            case _:
                return False
        return True

    def _closed(self, worker: Worker) -> None:
        worker.closed = True
        worker.deadline = min(worker.deadline, time.monotonic() + CLOSED_SECONDS)
        worker.overdue = "the process closed its connection to the supervisor"
        self.selector.unregister(worker.connection)

    def _end(self, worker: Worker, reason: str | None) -> None:
        """Kill a worker, or what a dead one left: `reason` is the failure of its running call, None is no failure."""
        kill(worker.pid)
        del self.workers[worker.pid]
        self.ended.add(worker.pid)
        if not worker.closed:
            worker.closed = True
            self.selector.unregister(worker.connection)
        worker.connection.close()
        if worker.calls and reason is not None:
            self._finish(worker.calls.pop(0), reason)
        elif reason is not None:
            self._failed_start(reason, worker.confined)
        self.queues[worker.confined].extendleft(reversed(worker.calls))

    def _reap(self) -> None:
        """Wait for all dead children: workers, and what dead workers left behind."""
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # look, do not take it yet
            except ChildProcessError:
                return
            if dead is None:
                return
            if dead.si_pid in self.workers:
                self._read(self.workers[dead.si_pid])  # its last words say which call it was in
            if dead.si_pid in self.workers:
                how = "exited with code" if dead.si_code == os.CLD_EXITED else "was killed by signal"
                self._end(self.workers[dead.si_pid], f"the process {how} {dead.si_status}")
            os.waitpid(dead.si_pid, 0)  # only now another process may get its number
            if dead.si_pid in self.ended:
                self.ended.discard(dead.si_pid)
                # What left its worker's process group and lost its parent is this process's child now. Whose it was
                # cannot be told any more, so nothing may rely on what a verifier has detached.
                for pid in set(children()) - self.workers.keys():
                    self.ended.add(pid)  # when it is waited for, its own children are ours
                    kill(pid)


def kill(pid: int) -> None:
    """SIGKILL for a child that was not waited for yet, and for the process group that it founded, if any."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def children() -> Iterator[int]:
    """Process ids of this process's children, dead ones that were not waited for included."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # pid (command) state parent ...; the command may hold blanks and brackets
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    yield int(name)


if __name__ == "__main__":
    main()
