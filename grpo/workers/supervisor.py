"""The supervisor: it forks worker processes, hands them calls, and ends the late ones with all that they left behind.

    python -m grpo.workers.supervisor FD    (processes.Workers starts it; FD is its end of a socketpair)

A call that loops, crashes, allocates without end or kills itself costs its own result and nothing else: it has a
deadline and runs in a process that can be killed; what has not begun goes to another process. What a worker says is
checked, because a completion may have taken it over. The supervisor never waits for a worker or for its owner to read.

From the owner: pickled, its folder and module path, seconds to load, and jobs; then lines, `Call.as_line` or `{drop}`.
To the owner: lines of JSON, `{ready}` once, and for each call `{call, value}` or `{call, failed, cause}`; or
`{unusable}`, why, after which the supervisor ends.
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
from typing import Any

from grpo.workers import kernel, processes
from grpo.workers.processes import Call
from grpo.workers.worker import LOAD, Crew, Failure, Peer, Worker, describe, plain_values, shown, work

# Share of its seconds that a late call must have computed in, to be busy.
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
# The longest line from a worker; a longer one comes from something that writes into the socket.
LINE_BYTES = 2**18
# Characters of a failure that a worker reports; its own are shorter.
FAILURE_CHARACTERS = 2000


class Finished(Exception):
    """Ends `Supervisor.run`."""


class Supervisor:
    """Hands calls to workers, and replaces those that end."""

    def __init__(self, owner: socket.socket):
        with owner.makefile("rb") as reader:
            folder, path, self.load_seconds, self.jobs = pickle.load(reader)
        os.chdir(folder)
        sys.path[:] = path
        # temporary files end with this process, whichever worker was killed
        self.folder = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="grpo-workers-")
        os.chmod(self.folder, 0o711)  # programs of root run as another user, in folders below it
        tempfile.tempdir = None
        self.owner, self.crews = Peer(owner), list[Crew]()
        self.workers: dict[int, Worker] = {}
        self.is_ready, self.was_busy, self.start_after = False, False, 0.0
        self.selector = selectors.PollSelector()  # unlike epoll, it shares nothing with a forked worker
        self.selector.register(owner, selectors.EVENT_READ, self.owner)

    def run(self) -> None:
        """Serve until the owner is gone; then nothing that was started is left."""
        try:
            try:
                self.crews += map(Crew, self.jobs)
            except BaseException as error:  # a user's file may raise anything
                self._give_up(describe(error))
            while True:
                for crew in self.crews:
                    self._hand_out(crew)
                if not self.is_ready and not any(worker.is_loading for worker in self.workers.values()):
                    self.is_ready = True
                    self._tell(ready=True)
                self._wait()
        except (Finished, EOFError, ConnectionError):
            pass  # the last two: the owner closed its end or died
        finally:
            self._end_all()

    def _hand_out(self, crew: Crew) -> None:
        """Start workers, and give free ones what waits, in smaller chunks towards the end: none sits on a pile."""
        workers = [worker for worker in self.workers.values() if worker.crew is crew]
        num_wanted = crew.job.num_workers
        if crew.job.loads_once:
            num_wanted = min(num_wanted, len(crew.queue) + sum(not (w.is_free or w.is_loading) for w in workers))
        while len(workers) < num_wanted and time.monotonic() >= self.start_after:
            try:
                workers.append(self._start(crew))
            except OSError as error:
                self._failed_start(crew, f"cannot start a process: {error}")
        for worker in workers:
            if crew.queue and worker.is_free:
                number = max(1, min(CHUNK_CALLS, len(crew.queue) // (4 * crew.job.num_workers)))
                worker.conversation = crew.queue[0].conversation
                number = number if worker.conversation is None else 1
                self._give(worker, [crew.queue.popleft() for _ in range(number)])

    def _give(self, worker: Worker, calls: list[Call]) -> None:
        worker.calls += calls
        worker.cpu_seconds = processes.cpu_seconds(worker.pid)
        worker.begin_call()
        self._send(worker, b"".join(b"[%d, %s]\n" % (call.number, call.arguments) for call in calls))

    def _on_owner(self, line: bytearray) -> None:
        """Take in a call, or that a conversation is given up."""
        fields, _, arguments = line.partition(b"\t")
        fields = json.loads(fields)
        if "drop" in fields:
            for worker in [w for w in self.workers.values() if w.conversation == fields["drop"]]:
                worker.calls.clear()
                self._end(worker, None)
            return
        call = Call(**fields, arguments=bytes(arguments))
        if call.conversation is None or call.begins:
            self.crews[call.job].queue.append(call)
            return
        workers = [w for w in self.workers.values() if w.conversation == call.conversation and not w.closed]
        if workers:
            self._give(workers[0], [call])
        else:
            self._tell(call=call.number, failed="its process ended between two calls", cause="died")

    def _on_line(self, worker: Worker, line: bytearray) -> bool:
        """Take in what became of the call that the worker runs; False if the line does not say that."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not (isinstance(message, dict) and worker.calls and message.get("call") == worker.calls[0].number):
            return False
        call = worker.calls[0]
        match message:
            case {"value": value}:
                if call.num_values is not None:
                    try:
                        value = plain_values(value, call.num_values)
                    except Failure:
                        return False
                outcome = {"value": value}
            case {"failed": str() as reason, "cause": "memory" | "raised" as cause}:
                outcome = {"failed": shown(reason, FAILURE_CHARACTERS), "cause": cause}
            case _:
                return False
        if call.number == LOAD and "failed" in outcome:
            self._end(worker, outcome["failed"])
            return True
        worker.calls.popleft()
        worker.begin_call()
        if call.number != LOAD:
            self._tell(call=call.number, **outcome)
        if call.ends:
            worker.conversation = None
        # what filled the memory may still be there, and a conversation's object is not to be trusted after a failure
        if outcome.get("cause") == "memory" or ("cause" in outcome and call.conversation is not None):
            self._end(worker, None)
        return True

    def _tell(self, **message: Any) -> None:
        self.owner.outbox += json.dumps(message).encode() + b"\n"

    # -----------------------------------------------------------------------------------------------------------------
    # Workers begin and end

    def _start(self, crew: Crew) -> Worker:
        here, there = socket.socketpair()
        supervisor, pid = os.getpid(), os.fork()
        with there:
            if pid == 0:
                try:  # whatever happens, this process never returns into the supervisor's code
                    for other in (here, *(peer.connection for peer in (self.owner, *self.workers.values()))):
                        other.close()
                    processes.limit(crew.job.memory_gib, supervisor)
                    work(crew.load, there)
                finally:
                    os._exit(1)
        with contextlib.suppress(OSError):  # both do it, so that it is done before either goes on
            os.setpgid(pid, pid)
        worker = self.workers[pid] = Worker(pid, crew, here)
        self.selector.register(here, selectors.EVENT_READ, worker)
        self._give(worker, [Call(LOAD, b"[]", self.load_seconds)])
        return worker

    def _failed_start(self, crew: Crew, reason: str) -> None:
        """Go on with the workers that have loaded and try again later; without one, give up."""
        if not (self.is_ready and any(w.crew is crew and not w.is_loading for w in self.workers.values())):
            self._give_up(reason)
        print(f"warning: a worker process cannot be replaced: {reason}", file=sys.stderr, flush=True)
        self.start_after = time.monotonic() + RETRY_SECONDS

    def _give_up(self, reason: str) -> None:
        self._tell(unusable=reason)
        self.owner.connection.setblocking(True)
        self.owner.connection.sendall(self.owner.outbox)
        raise Finished

    def _end(self, worker: Worker, reason: str | None) -> None:
        """Kill a worker, or what a dead one left. The reason is blamed on what it runs; None is no failure.

        What it has not begun goes to other workers.
        """
        late = bool(worker.calls) and time.monotonic() >= worker.began + worker.calls[0].seconds
        computed = processes.cpu_seconds(worker.pid) - worker.cpu_seconds  # it is not reaped yet
        processes.kill(worker.pid)
        del self.workers[worker.pid]
        if not worker.closed:
            worker.closed = True
            self.selector.unregister(worker.connection)
        worker.connection.close()
        if worker.is_loading:
            self._failed_start(worker.crew, reason)
            return
        if worker.calls and reason is not None:
            call = worker.calls.popleft()
            cause = "died" if not late else "busy" if computed >= BUSY_FRAC * call.seconds else "late"
            self._tell(call=call.number, failed=reason, cause=cause)
        worker.crew.queue.extendleft(reversed(worker.calls))

    def _end_strays(self) -> None:
        """Kill the children that are no workers: what left its worker's process group and lost its parent."""
        for pid in processes.children() - self.workers.keys():
            processes.kill(pid)

    def _end_all(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.workers.clear()
        give_up_at = time.monotonic() + END_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < give_up_at:
                self._end_strays()
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.002)
        processes.remove(self.folder)

    # -----------------------------------------------------------------------------------------------------------------
    # What happens meanwhile

    def _wait(self) -> None:
        """Wait for whatever comes first, for LOOK_SECONDS at most, and see to it."""
        if self.owner.outbox:
            self._send(self.owner, b"")
        next_deadline = min([worker.deadline for worker in self.workers.values()], default=math.inf)
        for key, events in self.selector.select(max(0.0, min(next_deadline - time.monotonic(), LOOK_SECONDS))):
            peer = key.data
            if peer is self.owner:
                while (lines := peer.receive()) is not None:
                    for line in lines:
                        self._on_owner(line)
                continue
            if not peer.closed and events & selectors.EVENT_WRITE:
                self._send(peer, b"")
            if not peer.closed and events & selectors.EVENT_READ:
                self._read(peer)
        self._reap()
        now = time.monotonic()
        for worker in [worker for worker in self.workers.values() if worker.deadline <= now]:
            self._end(worker, worker.overdue)
        is_busy = any(crew.queue for crew in self.crews) or not all(worker.is_free for worker in self.workers.values())
        if self.was_busy and not is_busy:
            self._end_strays()
        self.was_busy = is_busy

    def _read(self, worker: Worker) -> None:
        """Take in what the worker has sent; it may be gone from `workers` afterwards."""
        while not worker.closed:
            try:
                lines = worker.receive()
            except EOFError:
                self._closed(worker)
                return
            if lines is None:
                return
            short = max(map(len, [*lines, worker.inbox])) <= LINE_BYTES
            handled = short and all(worker.closed or self._on_line(worker, line) for line in lines)  # one may end it
            if not (worker.closed or handled):
                self._end(worker, "the process wrote into its connection to its parent")

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send as much as the peer's socket takes now, the rest as soon as it takes more."""
        peer.outbox += data
        try:
            del peer.outbox[: peer.connection.send(peer.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            if peer is self.owner:
                raise
            self._closed(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self.selector.modify(peer.connection, events, peer)

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
                    self._end(self.workers[dead.si_pid], f"the process {how} {dead.si_status}")
                os.waitpid(dead.si_pid, 0)
                reaped = True
        if reaped:
            self._end_strays()


def main() -> None:
    """Be the supervisor that `Workers` started, until its owner is gone."""
    # Ctrl-C is the owner's business, and so are the signals that ask a run to stop. SIGTERM is also what the kernel
    # sends when the owner is gone; SIGKILL would not let this process end what the workers started.
    owner = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.getppid() == owner or sys.exit(0))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
