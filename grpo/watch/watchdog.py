"""A thread on every rank: it tells the others where this rank is, hears stop signals, and ends what hangs.

Each second it puts the rank's place (role, phase, collectives begun) into the store that all ranks share; the loop
itself does nothing for it. Rank 0's thread looks at all places and past the deadline of a phase ends the run with the
name of the rank that hangs, which prints its stack, if it still can. Rank 1's thread does the same a little later, for
a rank 0 that was stopped.

Signals wake the thread at once, also while the main thread waits in a collective (stopping.py). SIGTERM means two
things: stop, or that torchrun ends all ranks because one has failed. In the second case a rank's process is gone, or
the store says that the run is over.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from grpo.roles.process_groups import Roles, collectives_entered
from grpo.watch import failures, stopping
from grpo.watch.failures import here

# Phases that load models, wait for vLLM or for reward functions, and how much longer they may take
LONG_PHASES = ("start", "startup", "generate", "reward", "evaluate")
LONGER = 3
TICK_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # a rank whose thread told no place for so long is stopped, gone or starved
OWN_GAP_SECONDS = 10.0  # longer between two looks means that this process was stopped (Ctrl-Z, a machine that slept)
SECOND_PATIENCE_SECONDS = 10.0  # rank 1 looks for a rank 0 that should have ended the run so long ago
STACK_SECONDS = 3.0  # for the ranks that hang to print their stacks, or for one that fails to print why


# ---------------------------------------------------------------------------------------------------------------------
# Which rank keeps the others waiting, out of what each one tells about itself
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    role: str
    phase: str
    changes: int
    """Phases begun so far."""
    entered: dict[str, int]
    """Collectives begun in each of its groups."""
    beat: float
    """Another number each time the rank tells its place."""
    host: str
    pid: int


class Hang(NamedTuple):
    """Nothing has happened for longer than the deadline."""

    ranks: list[int]
    """Those that the others wait for."""
    line: str


def deadline_seconds(phase: str, deadline_minutes: float) -> float:
    """Seconds for which nothing may happen in a phase."""
    return 60 * deadline_minutes * (LONGER if phase in LONG_PHASES else 1)


def awaited(places: Mapping[int, Place]) -> list[int]:
    """The ranks that keep others waiting, while nothing moves.

    In a group, whoever has begun fewer collectives than another member is awaited by it. A rank that waits in one group
    itself is excused for its absence in the others. Empty if nobody is behind.
    """
    behind, waiting = set(), set()
    for group in {name for place in places.values() for name in place.entered}:
        begun = {rank: place.entered[group] for rank, place in places.items() if group in place.entered}
        fewest = min(begun.values())
        waits = {rank for rank, number in begun.items() if number > fewest}
        waiting |= waits
        behind |= begun.keys() - waits if waits else set()
    return sorted(behind - waiting)


class HangDetector:
    """Looks at all places again and again, and finds when nothing has happened for too long."""

    def __init__(self, deadline_minutes: float, patience: float = 0.0):
        """patience: seconds after the deadline, for a rank that only stands in for another."""
        self.deadline_minutes, self.patience = deadline_minutes, patience
        self.places: dict[int, Place] = {}
        self.answered: dict[int, float] = {}
        self.moved = self.looked = float("-inf")

    def look(self, places: Mapping[int, Place], now: float) -> Hang | None:
        """Who hangs, if anybody; `now` in seconds of a steady clock."""
        if now - self.looked > OWN_GAP_SECONDS:  # nobody was watched meanwhile; the first look too
            self.moved, self.answered = now, dict.fromkeys(places, now)
        for rank, place in places.items():
            before = self.places.get(rank)
            if before is None or place.beat != before.beat:
                self.answered[rank] = now
            if before is None or (place.changes, place.entered) != (before.changes, before.entered):
                self.moved = now
        self.places, self.looked, silent = dict(places), now, now - self.moved
        mute = [rank for rank in sorted(places) if now - self.answered[rank] > ANSWER_SECONDS]
        ranks = mute or awaited(places) or sorted(places)
        limit = max((deadline_seconds(places[rank].phase, self.deadline_minutes) for rank in ranks), default=0.0)
        if not ranks or silent <= limit + self.patience:
            return None
        does = "does not answer, last seen" if mute else "hangs"
        told = (f"rank {rank} ({places[rank].role}) {does} in phase {places[rank].phase}" for rank in ranks)
        why = f"nothing has happened for {silent:.0f} s, and deadline_minutes allows {limit:.0f} s here"
        return Hang(ranks, f"error: {', '.join(told)}: {why}")


# ---------------------------------------------------------------------------------------------------------------------
# The thread
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(roles: Roles, deadline_minutes: float) -> Iterator[None]:
    """Watch this rank, and hear stop signals, while the `with` block runs. Every rank enters it."""
    watchdog = Watchdog(roles, deadline_minutes)
    watchdog.start()
    try:
        yield
    except BaseException:
        here.ending = True
        with contextlib.suppress(DistNetworkError, DistStoreError):
            watchdog.tell_end()
        raise  # the thread goes on: torchrun's SIGTERM then ends this process wherever it is
    watchdog.close()
    if watchdog.asked == signal.SIGINT.name and not stopping.launched_by_torchrun():
        raise SystemExit(128 + signal.SIGINT)


class Watchdog:
    """The thread and what it knows. What the ranks tell each other in the store:

    `place/RANK`, each second; `asked`, a signal to stop that another rank than the driver got; `ended/RANK`, a count
    that is above 0 when somebody has said why that rank ends; `over`, when a rank ends before the run does; `verdict`,
    the `Hang` that ends it.
    """

    def __init__(self, roles: Roles, deadline_minutes: float):
        self.roles, self.host = roles, socket.gethostname()
        self.store = PrefixStore("watch", roles.store.clone())  # another thread's wait would block its connection
        patience = SECOND_PATIENCE_SECONDS if roles.rank else 0.0
        self.detector = HangDetector(deadline_minutes, patience) if roles.rank <= 1 else None
        self.asked = ""
        # A tick without a signal has gone by since one asked the run to stop; sooner, another one is the same request.
        # No clock: on a busy machine this thread sees both late.
        self.is_quiet = False
        self.closing, self.closed = threading.Event(), threading.Event()
        self.stdout, self.stderr = sys.stdout, sys.stderr  # compilers of kernels turn them away for seconds
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Listen to signals and begin to tell. On the main thread."""
        self.handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in stopping.STOP_SIGNALS}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.held = stopping.hold_signals()
        self.thread.start()
        stopping.is_watched.set()
        for number in self.held:  # of a thread that was there before and does not block it, in a notebook
            signal.signal(number, lambda number, _: signal.pthread_kill(self.thread.ident, number))

    def close(self) -> None:
        """End the thread; in a script, signals from here on are without effect. On the main thread."""
        self.closing.set()
        for number in self.held:
            signal.pthread_kill(self.thread.ident, number)  # it ends at once, not after its tick
            signal.signal(number, self.handlers[number])
        self.closed.set()
        self.thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def tell_end(self, *others: int) -> None:
        """Let all know that the run is over, and that it was said why this rank and these others end."""
        for rank in {self.roles.rank, *others}:
            self.store.add(f"ended/{rank}", 1)
        self.store.set("over", "")

    def _run(self) -> None:
        try:
            while not self.closing.is_set():
                self._tell_place()
                self._obey_verdict()
                if self.roles.is_driver and self.store.check(["asked"]):
                    self._ask(self.store.get("asked").decode())
                if self.detector and (hang := self.detector.look(places := self._places(), time.monotonic())):
                    self._end(hang, places)
                heard = signal.sigtimedwait(self.held, TICK_SECONDS)
                if heard is None:
                    self.is_quiet = bool(self.asked)
                elif not self.closing.is_set():
                    self._hear(signal.Signals(heard.si_signo))
        except (DistNetworkError, DistStoreError):  # the process that holds the store is gone, and its ranks with it
            if not self.closing.is_set():
                line = f"error: rank {self.roles.rank} lost the store of its launcher, in phase {here.phase}"
                failures.leave_for_launcher(line)
                if os.environ.get("LOCAL_RANK") == "0":  # one of each machine
                    print(line, file=self.stderr, flush=True)
                failures.exit_now(1)
        finally:
            self.closed.wait()  # no signal can be sent to a thread that is gone

    def _tell_place(self) -> None:
        progress = here.changes, collectives_entered(self.roles, is_saving=here.phase == "save")
        place = Place(here.role, here.phase, *progress, time.monotonic(), self.host, os.getpid())
        self.store.set(f"place/{self.roles.rank}", json.dumps(asdict(place)))

    def _places(self) -> dict[int, Place]:
        """Where the ranks are that have told it."""
        known = [rank for rank in range(self.roles.control.size()) if self.store.check([f"place/{rank}"])]
        values = self.store.multi_get([f"place/{rank}" for rank in known])
        return {rank: Place(**json.loads(value)) for rank, value in zip(known, values, strict=True)}

    # ---- ranks that hang ----------------------------------------------------------------------------------------

    def _end(self, hang: Hang, places: dict[int, Place]) -> None:
        """Say which ranks hang, let them print their stacks, and end: torchrun then ends all others."""
        print(hang.line, file=self.stderr, flush=True)
        self.tell_end(*hang.ranks)
        self.store.set("verdict", json.dumps(hang))
        self._obey_verdict()
        time.sleep(STACK_SECONDS)
        for rank in {*hang.ranks} - {self.roles.rank}:
            if places[rank].host == self.host:  # if stopped, it would hear torchrun's SIGTERM only when continued
                with contextlib.suppress(ProcessLookupError):
                    os.kill(places[rank].pid, signal.SIGKILL)
        failures.exit_now(1)

    def _obey_verdict(self) -> None:
        """Print this rank's stack if it is one that hangs. It does not end first: the verdict's line is the cause."""
        if here.ending or not self.store.check(["verdict"]):
            return
        verdict = Hang(*json.loads(self.store.get("verdict")))
        here.ending = True
        failures.leave_for_launcher(verdict.line)
        if self.roles.rank in verdict.ranks:
            stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident]))
            title = f"rank {self.roles.rank} ({here.role}) is here, in phase {here.phase}:"
            print(f"{title}\n{stack}", file=self.stderr, end="", flush=True)

    # ---- signals ------------------------------------------------------------------------------------------------

    def _hear(self, number: signal.Signals) -> None:
        """A stop, or torchrun's way of ending what is left."""
        if self._is_over() or here.ending:  # in this order: the first to see it tells
            if not stopping.launched_by_torchrun():
                time.sleep(STACK_SECONDS)  # the main thread is about to say why, and ends
            self.tell_end()
            failures.exit_now(1)
        again = self.asked == signal.SIGINT.name and self.is_quiet
        if here.in_steps and not again:
            self._ask(number.name)
            return
        if self.roles.is_driver:
            how = "again: ended at once, without saving" if again else "before the first step: nothing to save"
            print(line := f"{number.name} {how}", file=self.stderr, flush=True)
            stopping.ask_to_stop(number.name)
            stopping.repeat_behind_launcher(line)
            self.tell_end()
        else:  # torchrun ends all at the first exit; the driver has the last word
            with contextlib.suppress(DistStoreError):
                self.store.wait(["over"], datetime.timedelta(seconds=ANSWER_SECONDS))
        failures.exit_now(128 + number)

    def _ask(self, name: str) -> None:
        if self.asked:
            return
        self.asked = name
        if self.roles.is_driver:
            stopping.ask_to_stop(name)
            print(f"{name}: the run stops when this step is done and saved", file=self.stdout, flush=True)
        else:
            self.store.set("asked", name)

    def _is_over(self) -> bool:
        """Whether torchrun ends this rank because another one has ended; the first to see one that was killed tells."""
        places = self._places()
        here_too = {rank: place.pid for rank, place in places.items() if place.host == self.host}
        gone = [rank for rank, pid in here_too.items() if not os.path.exists(f"/proc/{pid}")]  # waited for by torchrun
        for rank in gone:
            if self.store.add(f"ended/{rank}", 1) == 1:
                line = f"error: rank {rank} ({places[rank].role}) was ended from outside in phase {places[rank].phase}"
                hint = "torchrun's report has the signal; 9 is often the kernel's, out of memory (dmesg)"
                print(f"{line}; {hint}", file=self.stderr, flush=True)
        return bool(gone) or self.store.check(["over"])
