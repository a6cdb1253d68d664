"""The supervisor: it forks worker processes, hands them calls, and ends the late ones with all that they left behind.

    python -m grpo.workers.supervisor FD    (processes.Workers starts it; FD is its end of a socketpair)

A call that loops, crashes, allocates without end or kills itself costs its own result and nothing else: it has a
deadline and runs in a process that can be killed; what has not begun goes to another process. What a worker says is
checked, because a completion may have taken it over. The supervisor never waits for a worker or for its owner to read.

From the owner: what `Workers` pickles; then lines, `Call.as_line` or `{drop, conversation}`. To the owner: lines of
JSON, `{ready}` once, and for each call what `Workers.poll` returns; or `{unusable}`, why, and the supervisor ends.
"""

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from typing import Any

from grpo.workers import kernel, lockdown, processes
from grpo.workers.processes import Call
from grpo.workers.worker import LOAD, Peer, describe, work

# Share of its seconds that a late call must have computed in, or waited for a core, to be busy.
BUSY_FRAC = 0.2
# Most calls without memory handed to a worker at once, so that a cheap one does not wait for a message each time.
CHUNK_CALLS = 32
# Between two attempts to replace a worker while others are left that have loaded.
RETRY_SECONDS = 2.0
# How often dead children are looked for, in seconds. A closed socket tells sooner, unless a worker's child holds it.
LOOK_SECONDS = 0.05
# For a worker that closed its socket to die, which usually tells more; then it is killed.
CLOSED_SECONDS = 1.0
# For killed processes to be gone when the supervisor ends.
END_SECONDS = 5.0
# Most that a worker writes before a line ends; more comes from something that writes into the socket.
LINE_BYTES = 2**18
CLOSED = "the process closed its connection to its parent"
INTRUDED = "the process wrote into its connection to its parent"


class Finished(Exception):
    """Ends `Supervisor.run`: the owner is gone, or nothing can be done for it."""


class Supervisor:
    """Hands calls to workers, and replaces those that end."""

    def __init__(self, owner: socket.socket):
        with owner.makefile("rb") as reader:
            folder, path, *settings = pickle.load(reader)
        os.chdir(folder)
        lockdown.package_places()  # for good, before the owner's own folders are in sys.path
        sys.path[:] = path
        self.load_seconds, self.load, self.num_workers, self.memory_gib, self.loads_once = settings
        # temporary files end with this process, whichever worker was killed
        self.folder = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="grpo-workers-")
        os.chmod(self.folder, 0o711)  # programs of root run as another user, in folders below it
        tempfile.tempdir = None
        self.owner, self.workers, self.queue = Peer(owner), dict[int, Peer](), deque[Call]()
        self.is_ready, self.was_busy, self.start_after = False, False, 0.0
        self.selector = selectors.PollSelector()  # unlike epoll, it shares nothing with a forked worker
        self.selector.register(owner, selectors.EVENT_READ, self.owner)

    def run(self) -> None:
        """Serve until the owner is gone; then nothing that was started is left."""
        try:
            if self.loads_once:
                self._load()
            while True:
                self._start_workers()
                self._hand_out()
                if not self.is_ready and not any(worker.is_loading for worker in self.workers.values()):
                    self.is_ready = True
                    self._tell(ready=True)
                self._wait()
        except Finished:
            pass
        finally:
            self._end_all()

    def _load(self) -> None:
        """Load here; then loading costs a worker nothing."""
        try:
            loaded = self.load()
        except BaseException as error:  # a user's file may raise anything
            self._give_up(describe(error))
        self.load = lambda: loaded

    def _start_workers(self) -> None:
        num_wanted = self.num_workers
        if self.loads_once:
            num_taken = sum(not (worker.is_free or worker.is_loading) for worker in self.workers.values())
            num_wanted = min(num_wanted, num_taken + len(self.queue))
        while len(self.workers) < num_wanted and time.monotonic() >= self.start_after:
            try:
                self._start()
            except OSError as error:
                self._failed_start(f"cannot start a process: {error}")

    def _hand_out(self) -> None:
        """Give free workers what waits, in smaller chunks towards the end, so that none sits on a pile."""
        for worker in list(self.workers.values()):
            if self.queue and worker.is_free:
                number = max(1, min(CHUNK_CALLS, len(self.queue) // (4 * self.num_workers)))
                worker.conversation = self.queue[0].conversation
                number = number if worker.conversation is None else 1
                self._give(worker, [self.queue.popleft() for _ in range(number)])

    def _give(self, worker: Peer, calls: list[Call]) -> None:
        worker.calls += calls
        worker.busy_seconds = processes.busy_seconds(worker.pid)
        worker.begin_call()
        self._send(worker, b"".join(b"[%d, %s]\n" % (call.number, call.arguments) for call in calls))

    def _on_owner(self, line: bytearray) -> None:
        """Take in a call, or that a conversation is given up."""
        fields, _, arguments = line.partition(b"\t")
        fields = json.loads(fields)
        holder = [w for w in self.workers.values() if w.conversation == fields["conversation"] is not None]
        if "drop" in fields:
            for worker in holder:
                worker.calls.clear()
                self._end(worker, None)
            return
        call = Call(**fields | {"arguments": bytes(arguments)})
        if holder and not holder[0].closed:
            self._give(holder[0], [call])
        else:
            self.queue.append(call)

    def _on_worker(self, worker: Peer, line: bytearray) -> None:
        """Take in what became of the call that a worker runs."""
        outcome = worker.outcome(line)
        if outcome is None or (worker.is_loading and "failed" in outcome):
            self._end(worker, outcome["failed"] if outcome else INTRUDED)
            return
        if not worker.is_loading:
            self._tell(call=worker.calls[0].number, **outcome)
        call = worker.calls.popleft()
        worker.begin_call()
        if call.ends:
            worker.conversation = None
        # what filled the memory may still be there, and a conversation's object is not to be trusted after a failure
        if outcome.get("cause") == "memory" or ("failed" in outcome and call.conversation is not None):
            self._end(worker, None)

    def _tell(self, **message: Any) -> None:
        # a user's code may say half a character, which JSON's escapes carry and no tokenizer, file or terminal takes
        self.owner.outbox += json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"

    # -----------------------------------------------------------------------------------------------------------------
    # Workers begin and end

    def _start(self) -> None:
        here, there = socket.socketpair()
        supervisor, pid = os.getpid(), os.fork()
        with there:
            if pid == 0:
                try:  # whatever happens, this process never returns into the supervisor's code
                    for other in (here, *(peer.connection for peer in (self.owner, *self.workers.values()))):
                        other.close()
                    processes.limit(self.memory_gib, supervisor)
                    work(self.load, there)
                finally:
                    os._exit(1)
        with contextlib.suppress(OSError):  # both do it, so that it is done before either goes on
            os.setpgid(pid, pid)
        worker = self.workers[pid] = Peer(here, pid)
        self.selector.register(here, selectors.EVENT_READ, worker)
        self._give(worker, [Call(LOAD, b"[]", self.load_seconds)])

    def _failed_start(self, reason: str) -> None:
        """Go on with the workers that have loaded and try again later; without one, give up."""
        if not (self.is_ready and any(not worker.is_loading for worker in self.workers.values())):
            self._give_up(reason)
        print(f"warning: a worker process cannot be replaced: {reason}", file=sys.stderr, flush=True)
        self.start_after = time.monotonic() + RETRY_SECONDS

    def _give_up(self, reason: str) -> None:
        self._tell(unusable=reason)
        with contextlib.suppress(OSError):
            self.owner.connection.setblocking(True)
            self.owner.connection.sendall(self.owner.outbox)
        raise Finished

    def _end(self, worker: Peer, reason: str | None) -> None:
        """Kill a worker, or what a dead one left. What it runs failed for that reason; the rest goes to others."""
        late = not worker.closed and time.monotonic() >= worker.deadline
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
            cause = "died" if not late else "busy" if busy >= BUSY_FRAC * call.seconds else "late"
            self._tell(call=call.number, failed=reason, cause=cause)
        self.queue.extendleft(reversed(worker.calls))

    def _end_all(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        give_up_at = time.monotonic() + END_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < give_up_at:
                processes.kill_children()
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.002)
        processes.remove(self.folder)

    # -----------------------------------------------------------------------------------------------------------------
    # What happens meanwhile

    def _wait(self) -> None:
        """Wait for whatever comes first, for LOOK_SECONDS at most, and see to it."""
        self._send(self.owner)
        next_deadline = min([worker.deadline for worker in self.workers.values()], default=math.inf)
        for key, events in self.selector.select(max(0.0, min(next_deadline - time.monotonic(), LOOK_SECONDS))):
            if events & selectors.EVENT_WRITE and not key.data.closed:
                self._send(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        self._reap()
        now = time.monotonic()
        for worker in [worker for worker in self.workers.values() if worker.deadline <= now]:
            self._end(worker, CLOSED if worker.closed else f"took longer than {worker.calls[0].seconds:g} s")
        is_busy = bool(self.queue) or not all(worker.is_free for worker in self.workers.values())
        if self.was_busy and not is_busy:
            processes.kill_children(self.workers.keys())
        self.was_busy = is_busy

    def _read(self, peer: Peer) -> None:
        """Take in what has come; a worker may be gone from `workers` afterwards."""
        while not peer.closed:
            try:
                data = peer.connection.recv(2**18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._closed(peer)
                return
            peer.inbox += data
            *lines, peer.inbox = peer.inbox.split(b"\n") if b"\n" in data else [peer.inbox]
            for line in lines:
                if peer is self.owner:
                    self._on_owner(line)
                elif not peer.closed:  # the line before may have ended it
                    self._on_worker(peer, line)
            if len(peer.inbox) > LINE_BYTES and peer is not self.owner and not peer.closed:
                self._end(peer, INTRUDED)

    def _send(self, peer: Peer, data: bytes = b"") -> None:
        """Send as much as the peer's socket takes now, the rest as soon as it takes more."""
        peer.outbox += data
        try:
            del peer.outbox[: peer.connection.send(peer.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._closed(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self.selector.modify(peer.connection, events, peer)

    def _closed(self, peer: Peer) -> None:
        if peer is self.owner:
            raise Finished
        peer.closed = True
        peer.deadline = min(peer.deadline, time.monotonic() + CLOSED_SECONDS)
        self.selector.unregister(peer.connection)

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
                    self._end(self.workers[dead.si_pid], f"the process {how} {dead.si_status}")
                os.waitpid(dead.si_pid, 0)
                reaped = True
        if reaped:
            processes.kill_children(self.workers.keys())


def main() -> None:
    """Be the supervisor that `Workers` started, until its owner is gone."""
    # Ctrl-C is the owner's business, and so are the signals that ask a run to stop. SIGTERM is also what the kernel
    # sends when the owner is gone; SIGKILL would not let this process end what the workers started.
    owner = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.getppid() == owner or sys.exit(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the owner blocks some
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
