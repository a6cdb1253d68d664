"""A thread on every rank: it tells the others where this rank is, hears stop signals, and ends what hangs.

Each second it puts the rank's place (role, phase, collectives begun) into the store that all ranks share; the loop
itself does nothing for it. Rank 0's thread looks at all places (hangs.py) and past the deadline of a phase ends the run
with the name of the rank that hangs, which prints its stack, if it still can. Rank 1's thread does the same a little
later, for a rank 0 that was stopped. What the thread says goes to the screen also while the main thread has sys.stdout
and sys.stderr elsewhere, as a compiler of kernels does for seconds.

Signals wake the thread at once, also while the main thread waits in a collective. SIGTERM means two things: stop, or
that torchrun ends all ranks because one has failed. In the second case a process of the same torchrun is missing, or a
rank has told that it fails.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from grpo.roles.process_groups import Roles, collectives_entered
from grpo.watch import failures, stopping
from grpo.watch.hangs import Hang, HangDetector, Place

TICK_SECONDS = 1.0
# Rank 1 looks for a rank 0 that should have ended the run so long ago
SECOND_PATIENCE_SECONDS = 10.0
# For the ranks that hang to print their stacks
STACK_SECONDS = 3.0
# After Ctrl-C, a later signal ends the run at once; torchrun passes the first one on within milliseconds
SECOND_SIGNAL_SECONDS = 1.0


@contextlib.contextmanager
def watched(roles: Roles, deadline_minutes: float) -> Iterator[None]:
    """Watch this rank, and hear stop signals, while the `with` block runs. Every rank enters it."""
    watchdog = Watchdog(roles, deadline_minutes)
    watchdog.start()
    try:
        yield
    except BaseException:
        failures.set_ending()
        watchdog.tell_end(failed=True)
        raise  # the thread goes on: torchrun's SIGTERM then ends this process wherever it is
    watchdog.close()
    if watchdog.asked == signal.SIGINT.name and not stopping.launched_by_torchrun():
        raise SystemExit(128 + signal.SIGINT)


class Watchdog:
    """The thread and what it knows."""

    def __init__(self, roles: Roles, deadline_minutes: float):
        self.roles, self.launcher, self.host = roles, os.getppid(), socket.gethostname()
        self.num_ranks = roles.control.size()
        # read now, because vLLM's CPU backend overwrites it
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        # a connection of its own: another thread's wait would block it
        self.store = PrefixStore("watch", roles.store.clone())
        patience = SECOND_PATIENCE_SECONDS if roles.rank else 0.0
        self.detector = HangDetector(deadline_minutes, patience) if roles.rank <= 1 else None
        self.known: list[int] = []  # ranks that have told their place
        self.beat, self.asked, self.asked_at, self.is_judged = 0, "", 0.0, False
        self.closing = threading.Event()
        self.stdout, self.stderr = sys.stdout, sys.stderr
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Listen to signals and begin to tell. On the main thread."""
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_writer.setblocking(False)
        for number in stopping.STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)  # only a signal with a handler is written to the socket
        signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
        self.thread.start()

    def close(self) -> None:
        """End the thread; signals from here on are without effect. On the main thread."""
        self.closing.set()
        self.wake_writer.send(b"\0")
        self.thread.join()

    def tell_end(self, failed: bool) -> None:
        """Let the other ranks know that this one ends by itself, having said why, and whether the run fails with it."""
        with contextlib.suppress(DistNetworkError, DistStoreError):
            self.store.set(f"ended/{self.roles.rank}", "")
            if failed:
                self.store.set("failed", "")

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.closing.is_set():
                self._tell_place()
                self._obey_verdict()
                if self.detector is not None:
                    self._look_at_all()
                for number in self._signals():
                    self._hear(signal.Signals(number))
        except (DistNetworkError, DistStoreError):  # the process that holds the store is gone, and its ranks with it
            if not self.closing.is_set():
                failures.leave_for_launcher(f"rank {self.roles.rank} lost the store of its launcher")
                failures.exit_now(1)
        except Exception as error:  # a defect; the others would take this rank for stopped, or a hang would last
            here = failures.place()
            where = f"rank {self.roles.rank} ({here['role']}) failed in phase {here['phase']}, in its watchdog"
            line = f"error: {where}: {error}"
            failures.leave_for_launcher(line)
            print(f"{traceback.format_exc()}{line}", file=self.stderr, flush=True)
            self.tell_end(failed=True)
            failures.exit_now(1)

    def _signals(self) -> list[int]:
        """Those that come within a tick."""
        ready, _, _ = select.select([self.wake_reader], [], [], TICK_SECONDS)
        return [number for number in self.wake_reader.recv(64) if number] if ready else []

    def _tell_place(self) -> None:
        self.beat += 1
        here = failures.place()
        place = Place(
            role=here["role"],
            phase=here["phase"],
            changes=here["changes"],
            entered=collectives_entered(self.roles),
            beat=self.beat,
            host=self.host,
            launcher=self.launcher,
            pid=os.getpid(),
            asked=self.asked,
        )
        self.store.set(f"place/{self.roles.rank}", json.dumps(dataclasses.asdict(place)))

    def _places(self) -> dict[int, Place]:
        """Where the ranks are that have told it."""
        if len(self.known) < self.num_ranks:
            self.known = [rank for rank in range(self.num_ranks) if self.store.check([f"place/{rank}"])]
        values = self.store.multi_get([f"place/{rank}" for rank in self.known])
        return {rank: Place(**json.loads(value)) for rank, value in zip(self.known, values, strict=True)}

    def _is_neighbour(self, place: Place) -> bool:
        return (place.host, place.launcher) == (self.host, self.launcher)

    def _look_at_all(self) -> None:
        places = self._places()
        if self.roles.is_driver and not self.asked:
            for asked in filter(None, (place.asked for place in places.values())):
                self._ask(asked)
                break
        if hang := self.detector.look(places, time.monotonic()):
            self._end_the_run(hang, places)

    def _end_the_run(self, hang: Hang, places: dict[int, Place]) -> None:
        """Say which ranks hang, let them print their stacks, and end: torchrun then ends all others."""
        failures.leave_for_launcher(hang.line)
        print(hang.line, file=self.stderr, flush=True)
        self.store.set("verdict", json.dumps(dataclasses.asdict(hang)))
        for rank in {self.roles.rank, *hang.ranks}:
            self.store.set(f"ended/{rank}", "")
        self._obey_verdict()
        time.sleep(STACK_SECONDS)
        for rank in {*hang.ranks} - {self.roles.rank}:
            # a stopped process would hear torchrun's SIGTERM only when it is continued
            if self._is_neighbour(places[rank]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(places[rank].pid, signal.SIGKILL)
        failures.exit_now(1)

    def _obey_verdict(self) -> None:
        """Print this rank's stack if it is one that hangs. It does not end first: the verdict's line is the cause."""
        if self.is_judged or not self.store.check(["verdict"]):
            return
        self.is_judged, verdict = True, json.loads(self.store.get("verdict"))
        failures.set_ending()
        failures.leave_for_launcher(verdict["line"])
        if self.roles.rank in verdict["ranks"]:
            here = failures.place()
            stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident]))
            title = f"rank {self.roles.rank} ({here['role']}) is here, in phase {here['phase']}:"
            print(f"{title}\n{stack}", file=self.stderr, end="", flush=True)

    # ---- signals ------------------------------------------------------------------------------------------------

    def _hear(self, number: signal.Signals) -> None:
        """A stop, or torchrun's way of ending what is left."""
        if self._others_failed() or failures.place()["ending"]:  # in this order: the first to see it tells
            self.tell_end(failed=True)  # or who looks next would take it for killed
            failures.exit_now(1)
        if not failures.place()["in_steps"]:
            self._end_by(number, f"{number.name} before the first step: nothing to save")
        if not self.asked:
            self._ask(number.name)
        elif self.asked == signal.SIGINT.name and time.monotonic() - self.asked_at > SECOND_SIGNAL_SECONDS:
            self._end_by(number, f"{number.name} again: ended at once, without saving")

    def _end_by(self, number: signal.Signals, line: str) -> None:
        if self.roles.is_driver:
            print(line, file=self.stdout, flush=True)
        else:
            self.tell_end(failed=False)
            time.sleep(TICK_SECONDS)  # torchrun ends all at the first exit; let the driver print
        failures.exit_now(128 + number)

    def _ask(self, name: str) -> None:
        self.asked, self.asked_at = name, time.monotonic()
        if self.roles.is_driver:
            stopping.ask_to_stop(name)
            print(f"{name}: the run stops when this step is done and saved", file=self.stdout, flush=True)

    def _others_failed(self) -> bool:
        """Whether torchrun ends this rank because another one has failed; the first to see that says which."""
        alive = living_children(self.launcher) if stopping.launched_by_torchrun() else None
        if alive is None or len(alive) >= self.local_world_size:
            return self.store.check(["failed"])  # of another node
        gone = {rank: place for rank, place in self._places().items() if not self.store.check([f"ended/{rank}"])}
        self.store.set("failed", "")
        if self.store.add("told", 1) == 1:
            for rank, place in sorted(gone.items()):
                if self._is_neighbour(place) and place.pid not in alive:
                    line = f"error: rank {rank} ({place.role}) was ended from outside in phase {place.phase}"
                    hint = "torchrun's report has the signal; 9 is often the kernel's, out of memory (dmesg)"
                    print(f"{line}; {hint}", file=self.stderr, flush=True)
        return True


def living_children(pid: int) -> set[int] | None:
    """Process ids of a process's children that run; None where the kernel does not tell."""
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    alive = set()
    for child in children:
        with contextlib.suppress(OSError):  # it is gone
            state = pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            alive |= {int(child)} if state not in ("Z", "X") else set()
    return alive
