"""A thread on every rank that shows the others where this rank is, hears stop signals, and ends a run that hangs.

Each second it puts the rank's state (role, phase, collectives begun) into the store that all ranks share. The loop
itself does nothing for it. Rank 0's thread looks at all states. When nothing has happened for longer than the deadline
of a phase, it ends the run with the name of the rank that hangs, and that rank prints its stack if it still can. Rank
1's thread does the same a little later, in case rank 0 was stopped.

The store may fall silent, as when the network drops what is sent, and whoever asks it waits without end. So a second
thread on every rank, which asks nobody, ends the rank when the first has waited for longer than the deadline.

Signals wake the thread at once, also while the main thread waits in a collective (stopping.py). SIGTERM means two
things: a request to stop, or that torchrun ends all ranks because one has failed. In the second case a rank's process
is gone, or the store says that the run is over.
"""

import contextlib
import datetime
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from grpo.roles.process_groups import Roles, collectives_entered
from grpo.watch import failures, stopping
from grpo.watch.failures import here

# Phases that load models, or wait for vLLM or reward functions, may take this many times longer
LONG_PHASES = ("start", "startup", "generate", "reward", "evaluate")
LONGER = 3
TICK_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # a rank that has shown no state for longer is stopped, gone or starved
OWN_GAP_SECONDS = 10.0  # a longer time between two looks: this process was stopped (Ctrl-Z, a machine that slept)
SECOND_PATIENCE_SECONDS = 10.0  # rank 1 ends a run that rank 0 should have ended this long ago
STACK_SECONDS = 3.0  # for the ranks that hang to print their stacks, or for one that fails to print why


# ---------------------------------------------------------------------------------------------------------------------
# Which rank keeps the others waiting
# ---------------------------------------------------------------------------------------------------------------------


class RankState(NamedTuple):
    """Where a rank is."""

    role: str
    phase: str
    changes: int
    """Phases begun so far."""
    entered: dict[str, int]
    """Collectives begun in each of its groups."""
    beat: float
    """Another number each time the rank shows its state."""
    host: str
    pid: int


class Hang(NamedTuple):
    """Nothing has happened for longer than the deadline."""

    ranks: list[int]
    """The ranks that the others wait for."""
    line: str


def deadline_seconds(phase: str, deadline_minutes: float) -> float:
    """Return for how long nothing may happen in a phase."""
    return 60 * deadline_minutes * (LONGER if phase in LONG_PHASES else 1)


def ranks_behind(states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that keep others waiting, if nothing moves. Empty if nobody is behind.

    In a group, those that have begun the fewest collectives keep the others waiting. A rank that itself waits in one
    group is excused for its absence in the others.
    """
    behind = set()
    waiting = set()
    groups = set()
    for state in states.values():
        groups |= state.entered.keys()
    for group in groups:
        begun = {rank: state.entered[group] for rank, state in states.items() if group in state.entered}
        fewest = min(begun.values())
        ahead = {rank for rank, number in begun.items() if number > fewest}
        if ahead:
            waiting |= ahead
            behind |= begun.keys() - ahead
    return sorted(behind - waiting)


@dataclass(eq=False)
class HangDetector:
    """Remembers the states of all ranks, and finds that nothing has happened for too long."""

    deadline_minutes: float
    patience: float
    """Seconds after the deadline, for a rank that only stands in for another."""
    states: Mapping[int, RankState] = field(default_factory=dict)
    answered_at: dict[int, float] = field(default_factory=dict)
    moved_at: float = -math.inf
    looked_at: float = -math.inf

    def look(self, states: Mapping[int, RankState], now: float) -> Hang | None:
        """Return who hangs, if anybody. `now`: seconds of a steady clock."""
        if now - self.looked_at > OWN_GAP_SECONDS:  # the first look, or nobody was watched meanwhile
            self.moved_at = now
            self.answered_at = dict.fromkeys(states, now)
        for rank, state in states.items():
            before = self.states.get(rank)
            if before is None or state.beat != before.beat:
                self.answered_at[rank] = now
            if before is None or state.changes != before.changes or state.entered != before.entered:
                self.moved_at = now
        self.states = dict(states)
        self.looked_at = now
        silent_ranks = [rank for rank in sorted(states) if now - self.answered_at[rank] > ANSWER_SECONDS]
        ranks = silent_ranks or ranks_behind(states) or sorted(states)
        if not ranks:
            return None
        seconds = now - self.moved_at
        limits = [deadline_seconds(states[rank].phase, self.deadline_minutes) for rank in ranks]
        limit = max(limits)
        if seconds <= limit + self.patience:
            return None
        does = "does not answer, last seen" if silent_ranks else "hangs"
        descriptions = [f"rank {rank} ({states[rank].role}) {does} in phase {states[rank].phase}" for rank in ranks]
        why = f"nothing has happened for {seconds:.0f} s, and deadline_minutes allows {limit:.0f} s here"
        return Hang(ranks, f"error: {', '.join(descriptions)}: {why}")


# ---------------------------------------------------------------------------------------------------------------------
# The thread
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(roles: Roles, deadline_minutes: float) -> Iterator["Watchdog"]:
    """Watch this rank and hear stop signals while the `with` block runs. Every rank enters it."""
    watchdog = Watchdog(roles, deadline_minutes)
    watchdog.start()
    try:
        yield watchdog
    except BaseException:
        if here.goes_on:
            watchdog.close()
            raise
        here.ending = True
        with contextlib.suppress(DistNetworkError, DistStoreError):
            watchdog.announce_end()
        raise  # the thread goes on: torchrun's SIGTERM then ends this process wherever it is
    watchdog.close()


class Watchdog:
    """The thread and what it knows. The ranks have these keys in the store:

    `state/RANK`, set each second; `asked`, the signal to stop that a rank other than the driver got; `ended/RANK`, a
    count, above 0 when somebody has printed why that rank ends; `over`, set when a rank ends before the run does;
    `verdict`, the `Hang` that ends the run.
    """

    def __init__(self, roles: Roles, deadline_minutes: float):
        self.roles = roles
        self.host = socket.gethostname()
        self.store = PrefixStore("watch", roles.store.clone())  # another thread's wait would block its connection
        patience = SECOND_PATIENCE_SECONDS if roles.rank else 0.0
        self.detector = HangDetector(deadline_minutes, patience) if roles.rank <= 1 else None
        self.asked = ""
        # True when a tick without a signal has gone by since one asked the run to stop. A signal before that belongs to
        # the same request. A clock would not do, because on a busy machine this thread sees both late.
        self.is_quiet = False
        self.closing = threading.Event()
        self.closed = threading.Event()
        # compilers of kernels redirect sys.stdout and sys.stderr for seconds
        self.stdout = sys.stdout
        self.stderr = sys.stderr
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.deadline_seconds = 60 * deadline_minutes
        self.num_looks = 0  # at the store
        self.clock = threading.Thread(target=self._watch_store, name="watchdog's clock", daemon=True)

    def start(self) -> None:
        """Start the thread, which hears signals from here on. On the main thread."""
        self.handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in stopping.STOP_SIGNALS}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.held = stopping.hold_signals()
        here.in_steps = False  # also after another run of this process, in a notebook
        self.thread.start()
        self.clock.start()
        stopping.is_watched.set()
        for number in self.held:  # for those that reach an older thread, which does not block them, in a notebook
            signal.signal(number, lambda number, _: signal.pthread_kill(self.thread.ident, number))

    def close(self) -> None:
        """End the thread. In a script, signals have no effect from here on. On the main thread."""
        self.closing.set()
        for number in self.held:
            signal.pthread_kill(self.thread.ident, number)  # it ends at once, not after its tick
            signal.signal(number, self.handlers[number])
        self.closed.set()
        self.thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def exit_if_interrupted(self) -> None:
        """End the process with Ctrl-C's exit code if that was heard, so that a shell's loop stops too."""
        if self.asked == signal.SIGINT.name and not stopping.launched_by_torchrun():
            raise SystemExit(128 + signal.SIGINT)

    def announce_end(self, *hanging_ranks: int) -> None:
        """Tell all ranks that the run is over, and that somebody printed why this rank and `hanging_ranks` end."""
        for rank in {self.roles.rank, *hanging_ranks}:
            self.store.add(f"ended/{rank}", 1)
        self.store.set("over", "")

    def _run(self) -> None:
        """Look at the store and wait for a signal, each second until the run is closed."""
        try:
            while not self.closing.is_set():
                self.num_looks += 1
                self._show_place()
                self._obey_verdict()
                if self.roles.is_driver and self.store.check(["asked"]):
                    self._ask(self.store.get("asked").decode())
                if self.detector:
                    states = self._states()
                    hang = self.detector.look(states, time.monotonic())
                    if hang:
                        self._end(hang, states)
                received = signal.sigtimedwait(self.held, TICK_SECONDS)
                if received is None:
                    self.is_quiet = bool(self.asked)
                elif not self.closing.is_set():
                    self._hear(signal.Signals(received.si_signo))
        except (DistNetworkError, DistStoreError):  # the process that holds the store is gone, and its ranks with it
            if not self.closing.is_set():
                self._end_alone("lost the store of its launcher")
        finally:
            self.closed.wait()  # no signal can be sent to a thread that is gone

    def _watch_store(self) -> None:
        """End this rank when the thread that looks at the store has waited for it for longer than the deadline.

        Seconds are counted here: a clock would blame the store for those in which this process was stopped.
        """
        num_looks = 0
        seconds = 0.0
        while self.thread.is_alive():
            time.sleep(TICK_SECONDS)
            seconds += TICK_SECONDS
            if self.num_looks != num_looks:
                num_looks = self.num_looks
                seconds = 0.0
            if seconds > self.deadline_seconds:
                self._end_alone(f"had no answer from the store of its launcher for {seconds:.0f} s")

    def _end_alone(self, why: str) -> None:
        """End this rank, which reaches no other. One rank of each machine says why, before torchrun ends the others."""
        line = f"error: rank {self.roles.rank} ({here.role}) {why}, in phase {here.phase}"
        failures.leave_for_launcher(line)
        if os.environ.get("LOCAL_RANK") == "0":
            print(line, file=self.stderr, flush=True)
        else:
            time.sleep(STACK_SECONDS)
        failures.exit_now(1)

    def _show_place(self) -> None:
        """Put this rank's state into the store."""
        entered = collectives_entered(self.roles, is_saving=here.phase == "save")
        state = RankState(
            here.role,
            here.phase,
            here.changes,
            entered,
            time.monotonic(),
            self.host,
            os.getpid(),
        )
        self.store.set(f"state/{self.roles.rank}", json.dumps(state))

    def _states(self) -> dict[int, RankState]:
        """Return the states of the ranks that have shown theirs."""
        everyone = range(self.roles.control.size())
        ranks = [rank for rank in everyone if self.store.check([f"state/{rank}"])]
        values = self.store.multi_get([f"state/{rank}" for rank in ranks])
        states = map(json.loads, values)
        return {rank: RankState(*state) for rank, state in zip(ranks, states, strict=True)}

    # ---- ranks that hang ----------------------------------------------------------------------------------------

    def _end(self, hang: Hang, states: dict[int, RankState]) -> None:
        """Print which ranks hang, let them print their stacks, and end this rank. torchrun then ends all others."""
        print(hang.line, file=self.stderr, flush=True)
        self.announce_end(*hang.ranks)
        self.store.set("verdict", json.dumps(hang))
        self._obey_verdict()
        time.sleep(STACK_SECONDS)
        for rank in {*hang.ranks} - {self.roles.rank}:
            if states[rank].host == self.host:  # a stopped process would hear torchrun's SIGTERM only when continued
                with contextlib.suppress(ProcessLookupError):
                    os.kill(states[rank].pid, signal.SIGKILL)
        failures.exit_now(1)

    def _obey_verdict(self) -> None:
        """Print this rank's stack if it hangs. It goes on, so that the verdict's line stays the root cause."""
        if here.ending or not self.store.check(["verdict"]):
            return
        verdict = Hang(*json.loads(self.store.get("verdict")))
        here.ending = True
        failures.leave_for_launcher(verdict.line)
        if self.roles.rank in verdict.ranks:
            frame = sys._current_frames()[threading.main_thread().ident]
            stack = "".join(traceback.format_stack(frame))
            title = f"rank {self.roles.rank} ({here.role}) is here, in phase {here.phase}:"
            print(f"{title}\n{stack}", file=self.stderr, end="", flush=True)

    # ---- signals ------------------------------------------------------------------------------------------------

    def _hear(self, number: signal.Signals) -> None:
        """Obey a signal: end if torchrun ends what is left of a run, otherwise stop the run."""
        if self._is_over() or here.ending:  # in this order, because the first to see it prints it
            if not stopping.launched_by_torchrun():
                time.sleep(STACK_SECONDS)  # the main thread is about to print why, and ends
            self.announce_end()
            failures.exit_now(1)
        is_second = self.asked == signal.SIGINT.name and self.is_quiet
        if here.in_steps and not is_second:
            self._ask(number.name)
            return
        if self.roles.is_driver:
            line = f"{number.name} before the first step: nothing to save"
            if is_second:
                line = f"{number.name} again: ended at once, without saving"
            print(line, file=self.stderr, flush=True)
            stopping.ask_to_stop(number.name)
            self.announce_end()
        else:  # torchrun ends all at the first exit, which must be the driver's
            with contextlib.suppress(DistStoreError):
                self.store.wait(["over"], datetime.timedelta(seconds=ANSWER_SECONDS))
        failures.exit_now(128 + number)

    def _ask(self, name: str) -> None:
        """Ask the driver to stop the run, because of the signal `name`."""
        if self.asked:
            return
        self.asked = name
        if self.roles.is_driver:
            stopping.ask_to_stop(name)
            line = f"{name}: the run stops when this step is done and saved"
            if stopping.launched_by_torchrun():
                line += "; torchrun kills its ranks after its --shutdown-timeout, by default 30 s"
            print(line, file=self.stdout, flush=True)
        else:
            self.store.set("asked", name)

    def _is_over(self) -> bool:
        """Return whether another rank has ended, so that torchrun ends this one. The first to see it prints it."""
        is_gone = False
        for rank, state in self._states().items():
            # torchrun has waited for a process that is gone
            if state.host != self.host or os.path.exists(f"/proc/{state.pid}"):
                continue
            is_gone = True
            if self.store.add(f"ended/{rank}", 1) == 1:
                line = f"error: rank {rank} ({state.role}) was ended from outside in phase {state.phase}"
                hint = "torchrun's report has the signal; 9 is often the kernel's, out of memory (dmesg)"
                print(f"{line}; {hint}", file=self.stderr, flush=True)
        return is_gone or self.store.check(["over"])
