"""The supervisor: it forks worker processes, hands them calls, and kills the late ones with all that they started.

processes.Workers starts it. Its argument is the file descriptor of its end of a socketpair.

A call that loops, crashes, allocates without end or kills itself costs its own result and nothing else: it has a
deadline and runs in a process that can be killed, and the calls behind it go to another process. What a worker says is
checked, because a completion may have taken it over. The supervisor never waits for a worker or for its owner to read.

From the owner come a pickled `Setup`, then lines: `Call.as_line` or `{drop, conversation}`. To the owner go lines of
JSON: `{ready}` once, and what `Workers.poll` returns for each call; or `{unusable}` with the reason, and the supervisor
ends.
"""

import contextlib
import json
import math
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from typing import Any

from grpo.workers import kernel, lockdown, processes
from grpo.workers.processes import Call, Setup
from grpo.workers.worker import LOAD, Peer, describe_error, work

# A late call is `busy` if it computed, or waited for a core, for this share of its seconds
BUSY_FRAC = 0.2
# A worker gets up to this many calls without memory at once, so that cheap ones do not wait for a message each
CHUNK_CALLS = 32
# Seconds until a worker is replaced once more, where others have loaded
RETRY_SECONDS = 2.0
# Seconds between two looks for dead children. A closed socket is seen sooner, unless a worker's child holds it.
LOOK_SECONDS = 0.05
# Seconds for a worker that closed its socket to die, since its end usually says more. Then it is killed.
CLOSED_SECONDS = 1.0
# Looks for killed processes, at least 2 ms apart, before the supervisor ends anyway: no seconds, since a machine that
# stood still or is busy gave the killed no time to end
END_LOOKS = 10_000
# A worker that writes more than this before a line ends is not the one that writes. The longest text of a `reset` has
# 500,000 characters, each of which JSON may write as two escapes of six bytes.
LINE_BYTES = 2**23
CLOSED = "the process closed its connection to its parent"
INTRUDED = "the process wrote into its connection to its parent"


class Finished(Exception):
    """Ends `Supervisor.run`: the owner is gone, or nothing can be done for it."""


class Supervisor:
    """Hands calls to workers, and replaces those that end."""

    def __init__(self, owner: socket.socket, folder: str):
        with owner.makefile("rb") as reader:
            self.setup: Setup = pickle.load(reader)
        lockdown.package_paths()  # for good, before the owner's own folders are in sys.path
        sys.path[:] = self.setup.path
        self.load = self.setup.load
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None
        self.owner = Peer(owner)
        self.workers: dict[int, Peer] = {}
        self.queue = deque[Call]()
        self.helpers: set[int] = set()  # processes that the user's file started while it was loaded here
        self.is_ready = False
        self.was_busy = False
        self.start_after = 0.0
        self.selector = selectors.PollSelector()  # unlike epoll, it shares nothing with a forked worker
        self.selector.register(owner, selectors.EVENT_READ, self.owner)

    def run(self) -> None:
        """Serve until the owner is gone, or no worker can be had."""
        try:
            if self.setup.loads_once:
                self._load()
            while True:
                self._start_workers()
                self._hand_out()
                if not self.is_ready and not any(worker.is_loading for worker in self.workers.values()):
                    self.is_ready = True
                    self._report(ready=True)
                self._wait()
        except Finished:
            pass

    def _load(self) -> None:
        """Load here, so that it costs a worker nothing. Forks share its connections, and lose its threads."""
        try:
            loaded = self.load()
        except BaseException as error:  # a user's file may raise anything
            self._give_up(describe_error(error))
        self.load = lambda: loaded
        self.helpers = processes.children()

    def _start_workers(self) -> None:
        """Start the missing workers: all at the beginning or, if they load once, as many as calls need."""
        number = self.setup.num_workers
        if self.setup.loads_once:
            workers = self.workers.values()
            num_serving = sum(not (worker.is_free or worker.is_loading) for worker in workers)
            number = min(number, num_serving + len(self.queue))
        while len(self.workers) < number and time.monotonic() >= self.start_after:
            try:
                self._start()
            except OSError as error:
                self._failed_start(f"cannot start a process: {error}")

    def _hand_out(self) -> None:
        """Give waiting calls to free workers, in smaller chunks towards the end, so that all end at about one time."""
        for worker in self.workers.values():
            if self.queue and worker.is_free:
                worker.conversation = self.queue[0].conversation
                number = 1
                if worker.conversation is None:
                    share = len(self.queue) // (4 * self.setup.num_workers)
                    number = max(1, min(CHUNK_CALLS, share))
                calls = [self.queue.popleft() for _ in range(number)]
                self._give(worker, calls)

    def _give(self, worker: Peer, calls: list[Call]) -> None:
        """Send calls to a worker."""
        worker.calls += calls
        worker.busy_seconds = processes.busy_seconds(worker.pid)
        worker.begin_call()
        lines = [b"[%d, %s]\n" % (call.number, call.arguments) for call in calls]
        self._send(worker, b"".join(lines))

    def _on_owner(self, line: bytearray) -> None:
        """Take a call, or the end of a conversation that was given up."""
        head, _, arguments = line.partition(b"\t")
        fields = json.loads(head)
        conversation = fields["conversation"]
        holders = []
        if conversation is not None:
            holders = [worker for worker in self.workers.values() if worker.conversation == conversation]
        if "drop" in fields:
            for worker in holders:
                worker.calls.clear()
                self._end(worker, None)
            return
        call = Call(**fields | {"arguments": bytes(arguments)})
        if holders and not holders[0].closed:
            self._give(holders[0], [call])
        else:
            self.queue.append(call)

    def _on_worker(self, worker: Peer, line: bytearray) -> None:
        """Take the outcome of the call that a worker is at."""
        outcome = worker.read_outcome(line)
        if outcome is None:
            self._end(worker, INTRUDED)
            return
        has_failed = "failed" in outcome
        if worker.is_loading:
            if has_failed:
                self._end(worker, outcome["failed"])
                return
        else:
            self._report(call=worker.calls[0].number, **outcome)
        call = worker.calls.popleft()
        worker.begin_call()
        if call.ends:
            worker.conversation = None
        # after a failure a conversation's object cannot be trusted
        is_over = has_failed and call.conversation is not None
        if is_over or worker.is_spoilt and worker.conversation is None:
            self._end(worker, None)

    def _report(self, **message: Any) -> None:
        """Put a message into the owner's outbox."""
        # a user's code may return half a character, which JSON's escapes carry and no tokenizer, file or terminal takes
        line = json.dumps(message, ensure_ascii=False)
        self.owner.outbox += line.encode(errors="replace") + b"\n"

    # -----------------------------------------------------------------------------------------------------------------
    # Workers begin and end

    def _start(self) -> None:
        """Fork a worker, whose first call is to load."""
        ours, theirs = socket.socketpair()
        supervisor = os.getpid()
        pid = os.fork()
        with theirs:
            if pid == 0:
                try:  # whatever happens, this process never returns into the supervisor's code
                    ours.close()
                    for peer in (self.owner, *self.workers.values()):
                        peer.connection.close()
                    processes.limit(self.setup.memory_gib, supervisor)
                    processes.draw_anew()
                    work(self.load, theirs)
                finally:
                    os._exit(1)
        with contextlib.suppress(OSError):  # both processes do it, so that it is done before either goes on
            os.setpgid(pid, pid)
        worker = Peer(ours, pid)
        self.workers[pid] = worker
        self.selector.register(ours, selectors.EVENT_READ, worker)
        load = Call(LOAD, b"[]", self.setup.load_seconds)
        self._give(worker, [load])

    def _failed_start(self, reason: str) -> None:
        """Try again later if other workers have loaded. Else give up."""
        if not self.is_ready or all(worker.is_loading for worker in self.workers.values()):
            self._give_up(reason)
        print(f"warning: a worker process cannot be replaced: {reason}", file=sys.stderr, flush=True)
        self.start_after = time.monotonic() + RETRY_SECONDS

    def _give_up(self, reason: str) -> None:
        """Report to the owner that no worker can be had, and finish."""
        self._report(unusable=reason)
        with contextlib.suppress(OSError):
            self.owner.connection.setblocking(True)
            self.owner.connection.sendall(self.owner.outbox)
        raise Finished

    def _end(self, worker: Peer, reason: str | None) -> None:
        """Kill a worker, or what a dead one left, and put the calls that it has not begun back into the queue.

        The call that it is at failed for `reason`. None: it is at no call.
        """
        is_late = not worker.closed and time.monotonic() >= worker.deadline
        busy = processes.busy_seconds(worker.pid) - worker.busy_seconds  # it is not reaped yet
        processes.kill(worker.pid)
        del self.workers[worker.pid]
        if not worker.closed:
            worker.closed = True
            self.selector.unregister(worker.connection)
        worker.connection.close()
        if worker.is_loading:
            self._failed_start(reason)
            return
        if worker.calls and reason is not None:
            call = worker.calls.popleft()
            cause = "died"
            if is_late:
                cause = "busy" if busy >= BUSY_FRAC * call.seconds else "late"
            self._report(call=call.number, failed=reason, cause=cause)
        self.queue.extendleft(reversed(worker.calls))

    # -----------------------------------------------------------------------------------------------------------------
    # What happens meanwhile

    def _wait(self) -> None:
        """Wait for what comes first, at most LOOK_SECONDS, and deal with it."""
        self._send(self.owner)
        deadlines = [worker.deadline for worker in self.workers.values()]
        next_deadline = min(deadlines, default=math.inf)
        seconds = min(next_deadline - time.monotonic(), LOOK_SECONDS)
        for key, events in self.selector.select(max(0.0, seconds)):
            if events & selectors.EVENT_WRITE and not key.data.closed:
                self._send(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        self._reap()
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if worker.deadline <= now:
                self._end(worker, CLOSED if worker.closed else f"took longer than {worker.calls[0].seconds:g} s")
        is_busy = bool(self.queue) or not all(worker.is_free for worker in self.workers.values())
        if self.was_busy and not is_busy:
            processes.kill_children(self.workers.keys() | self.helpers)
        self.was_busy = is_busy

    def _read(self, peer: Peer) -> None:
        """Take what has come. A worker may be gone from `workers` afterwards."""
        while not peer.closed:
            try:
                data = peer.connection.recv(2**18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_close(peer)
                return
            peer.inbox += data
            lines = []
            if b"\n" in data:
                *lines, peer.inbox = peer.inbox.split(b"\n")
            for line in lines:
                if peer is self.owner:
                    self._on_owner(line)
                elif not peer.closed:  # the line before may have ended it
                    self._on_worker(peer, line)
            if len(peer.inbox) > LINE_BYTES and peer is not self.owner and not peer.closed:
                self._end(peer, INTRUDED)

    def _send(self, peer: Peer, data: bytes = b"") -> None:
        """Send as much as the peer's socket takes now, and the rest as soon as it takes more."""
        peer.outbox += data
        try:
            del peer.outbox[: peer.connection.send(peer.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._on_close(peer)
            return
        events = selectors.EVENT_READ
        if peer.outbox:
            events |= selectors.EVENT_WRITE
        self.selector.modify(peer.connection, events, peer)

    def _on_close(self, peer: Peer) -> None:
        """Give a worker that closed its connection a moment to die. Finish if it was the owner."""
        if peer is self.owner:
            raise Finished
        peer.closed = True
        peer.deadline = min(peer.deadline, time.monotonic() + CLOSED_SECONDS)
        self.selector.unregister(peer.connection)

    def _reap(self) -> None:
        """Wait for all dead children, workers and others, and kill what they left."""
        has_reaped = False
        with contextlib.suppress(ChildProcessError):
            while True:
                # look first: until a child is waited for, no other process gets its number
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if dead is None:
                    break
                if dead.si_pid in self.workers:
                    self._read(self.workers[dead.si_pid])  # its last words say which call it was in
                if dead.si_pid in self.workers:
                    how = "was killed by signal"
                    if dead.si_code == os.CLD_EXITED:
                        how = "exited with code"
                    self._end(self.workers[dead.si_pid], f"the process {how} {dead.si_status}")
                os.waitpid(dead.si_pid, 0)
                self.helpers.discard(dead.si_pid)
                has_reaped = True
        if has_reaped:
            processes.kill_children(self.workers.keys() | self.helpers)


def end_all(folder: str) -> None:
    """Kill children until none is left, in at most END_LOOKS rounds, and remove all temporary files."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):  # none is left
        for _ in range(END_LOOKS):
            processes.kill_children()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Serve the `Workers` that started this program until it is gone."""
    owner = os.getppid()
    supervisor = os.getpid()
    # temporary files end with this process, whichever worker was killed
    folder = tempfile.mkdtemp(prefix="grpo-workers-")

    def end_if_orphaned(*_) -> None:
        """End at once. An exception could come just as `main` ends, and keep it from ending the workers."""
        if os.getppid() != owner and os.getpid() == supervisor:  # a worker that was just forked has this handler too
            end_all(folder)
            os._exit(0)

    # Ctrl-C is the owner's business, and so are the other signals that ask a run to stop
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # The kernel sends SIGTERM when the owner is gone. SIGKILL would not let this process end what the workers started.
    signal.signal(signal.SIGTERM, end_if_orphaned)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the owner blocks some
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        Supervisor(connection, folder).run()
    finally:
        end_all(folder)
