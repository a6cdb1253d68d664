"""A thread on every rank: it tells the others where this rank is, hears stop signals, and ends what hangs.

Each second it puts the rank's place (role, phase, collectives begun) into the store that all ranks share; the loop
itself does nothing for it. Rank 0's thread is the judge (judge.py): it says whom the others wait for, and past the
deadline of a phase it ends the run with that rank's name. The rank prints its stack, if it still can. Rank 1 is the
deputy, for a rank 0 that was stopped. What the thread says goes to the screen also while the main thread has sys.stdout
and sys.stderr elsewhere, as a compiler of kernels does for seconds.

Signals wake the thread at once, also while the main thread waits in a collective. SIGTERM means two things: stop, or
that torchrun ends all ranks because one has failed. In the second case a process of the same torchrun is missing, or a
rank has told that it fails.
"""

import contextlib
import dataclasses
import faulthandler
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
from collections.abc import Callable, Iterator

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from grpo.config import DeadlinesConfig
from grpo.roles.process_groups import Roles
from grpo.roles.progress import collectives_entered
from grpo.watch import failures, stopping
from grpo.watch.judge import Finding, Judge, Place

TICK_SECONDS = 1.0
# The deputy judges this long after rank 0 should have
DEPUTY_SECONDS = 10.0
# For the ranks that hang to print their stacks
STACK_SECONDS = 5.0
# Ticks from one look of the judge at all places to the next: for each 32 ranks one more, at most 5
LOOK_TICKS = 5
# After Ctrl-C, a later signal ends the run at once; torchrun passes the first one on within milliseconds
SECOND_SIGNAL_SECONDS = 1.0
# Interval in which C code that does not let Python run would have the stack printed by faulthandler, in ticks
STARVED_TICKS = 30
# The process's own; sys.stderr may be an object without a file
STDERR = 2


@contextlib.contextmanager
def watched(roles: Roles, deadlines: DeadlinesConfig) -> Iterator[None]:
    """Watch this rank, and hear stop signals, while the `with` block runs. Every rank enters it."""
    watchdog = Watchdog(roles, deadlines)
    watchdog.start()
    try:
        yield
    except BaseException:
        failures.set_ending()
        watchdog.tell_end()
        raise  # the thread goes on: torchrun's SIGTERM then ends this process wherever it is
    watchdog.close()
    if watchdog.asked == signal.SIGINT.name and not stopping.launched_by_torchrun():
        raise SystemExit(128 + signal.SIGINT)


class Watchdog:
    """The thread and what it knows."""

    def __init__(self, roles: Roles, deadlines: DeadlinesConfig):
        self.roles, self.launcher = roles, os.getppid()
        self.num_ranks = roles.control.size()
        # read now, because vLLM's CPU backend overwrites it
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        store = roles.store.clone()  # a connection of its own: another thread's wait would block it
        self.store: PrefixStore | None = PrefixStore("watch", store)
        patience = DEPUTY_SECONDS if roles.rank else 0.0
        self.judge = Judge(deadlines, roles.timeout_minutes, patience) if roles.rank <= 1 else None
        self.starved_seconds = 60 * max(dataclasses.astuple(deadlines))
        self.places: dict[int, Place] = {}
        self.beat, self.asked, self.asked_at = 0, "", 0.0
        self.is_told, self.verdict = False, ""
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
        faulthandler.cancel_dump_traceback_later()

    def tell_end(self) -> None:
        """Let the other ranks know that this one ends by itself, having said why."""

        def tell(store: PrefixStore) -> None:
            store.set(f"ended/{self.roles.rank}", "")
            store.add("failures", 1)

        self._with_store(tell)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a defect; the others would take this rank for stopped, or a hang would last
            here = failures.place()
            where = f"rank {self.roles.rank} ({here['role']}) failed in phase {here['phase']}, in its watchdog"
            line = f"error: {where}: {error}"
            failures.leave_for_launcher(line)
            print(f"{traceback.format_exc()}{line}", file=self.stderr, flush=True)
            with contextlib.suppress(Exception):  # the store may be what failed
                self.tell_end()
            failures.exit_now(1)

    def _watch(self) -> None:
        while not self.closing.is_set():
            if self.beat % STARVED_TICKS == 0:  # runs out only where Python cannot run
                faulthandler.dump_traceback_later(self.starved_seconds + STARVED_TICKS * TICK_SECONDS, file=STDERR)
            self._with_store(self._tick)
            for number in self._signals():
                self._hear(signal.Signals(number))

    def _tick(self, store: PrefixStore) -> None:
        self._tell_place(store)
        self._obey_verdict(store)
        if self.judge is not None and self.beat % min(1 + self.num_ranks // 32, LOOK_TICKS) == 0:
            self._look_at_all(store)
        if self.asked and store.add("failures", 0):  # what was to be finished cannot be
            self.tell_end()
            failures.exit_now(1)

    def _signals(self) -> list[int]:
        """Those that come within a tick."""
        ready, _, _ = select.select([self.wake_reader], [], [], TICK_SECONDS)
        return [number for number in self.wake_reader.recv(64) if number] if ready else []

    def _with_store(self, action: Callable[[PrefixStore], bool | None]) -> bool | None:
        """What `action` gives with the store; None from when the process that holds the store is gone."""
        if self.store is None:
            return None
        try:
            return action(self.store)
        except (DistNetworkError, DistStoreError):
            self.store = None
            return None

    def _tell_place(self, store: PrefixStore) -> None:
        self.beat += 1
        here = failures.place()
        place = Place(
            role=here["role"],
            phase=here["phase"],
            changes=here["changes"],
            entered=collectives_entered(self.roles),
            beat=self.beat,
            host=socket.gethostname(),
            launcher=self.launcher,
            pid=os.getpid(),
            asked=self.asked,
        )
        store.set(f"place/{self.roles.rank}", json.dumps(dataclasses.asdict(place)))

    def _read_places(self, store: PrefixStore) -> None:
        ranks = range(self.num_ranks)
        if len(self.places) < self.num_ranks:
            ranks = [rank for rank in ranks if store.check([f"place/{rank}"])]
        values = store.multi_get([f"place/{rank}" for rank in ranks])
        self.places = {rank: Place(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}

    def _look_at_all(self, store: PrefixStore) -> None:
        self._read_places(store)
        if self.roles.is_driver and not self.asked:
            for asked in filter(None, (place.asked for place in self.places.values())):
                self._ask(asked)
                break
        finding = self.judge.look(self.places, time.monotonic())
        if finding and finding.is_late:
            self._end_the_run(store, finding)
        elif finding and self.roles.is_driver:
            print(finding.line, file=self.stdout, flush=True)

    def _end_the_run(self, store: PrefixStore, finding: Finding) -> None:
        """Say which ranks hang, let them print their stacks, and end: torchrun then ends all others."""
        ranks, line = finding.ranks, finding.line
        failures.leave_for_launcher(line)
        print(line, file=self.stderr, flush=True)
        store.set("verdict", json.dumps({"ranks": ranks, "line": line}))
        for rank in {self.roles.rank, *ranks}:
            store.set(f"ended/{rank}", "")
        if self.roles.rank in ranks:
            self._print_stack()
        deadline = time.monotonic() + (STACK_SECONDS if finding.answers else 0)
        waiting = set(ranks) - {self.roles.rank}
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if not store.check([f"stack/{rank}"])}
            time.sleep(TICK_SECONDS / 10)
        for rank in waiting:  # a stopped process would hear torchrun's SIGTERM only when it is continued
            place = self.places[rank]
            if (place.host, place.launcher) == (socket.gethostname(), self.launcher):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        failures.exit_now(1)

    def _obey_verdict(self, store: PrefixStore) -> None:
        """Print this rank's stack if it is the one that hangs. It does not end first: the judge's line is the cause."""
        if self.verdict or not store.check(["verdict"]):
            return
        verdict = json.loads(store.get("verdict"))
        self.verdict = verdict["line"]
        failures.set_ending()
        failures.leave_for_launcher(self.verdict)
        if self.roles.rank in verdict["ranks"]:
            self._print_stack()
            store.set(f"stack/{self.roles.rank}", "")

    def _print_stack(self) -> None:
        here = failures.place()
        frame = sys._current_frames()[threading.main_thread().ident]
        stack = "".join(traceback.format_stack(frame))
        title = f"rank {self.roles.rank} ({here['role']}) is here, in phase {here['phase']}:"
        print(f"{title}\n{stack}", file=self.stderr, end="", flush=True)

    # ---- signals ------------------------------------------------------------------------------------------------

    def _hear(self, number: signal.Signals) -> None:
        """A stop, or torchrun's way of ending what is left."""
        if self._others_failed() or failures.place()["ending"]:
            self.tell_end()  # or who looks next would take it for killed
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
            self._with_store(lambda store: store.set(f"ended/{self.roles.rank}", ""))
            time.sleep(TICK_SECONDS)  # torchrun ends all at the first exit; let the driver print
        failures.exit_now(128 + number)

    def _ask(self, name: str) -> None:
        self.asked, self.asked_at = name, time.monotonic()
        if self.roles.is_driver:
            stopping.ask_to_stop(name)
            print(f"{name}: the run stops when this step is done and saved", file=self.stdout, flush=True)

    def _others_failed(self) -> bool:
        """Whether torchrun ends this rank because another one has failed; the first to see that says which."""
        failed = bool(self._with_store(lambda store: store.add("failures", 0) > 0))
        alive = living_children(self.launcher) if stopping.launched_by_torchrun() else None
        if alive is None or len(alive) >= self.local_world_size:
            return failed
        if self._with_store(self._is_first_to_tell) or (self.store is None and self.roles.rank == 1):
            self._tell_who_is_gone(alive)
        return True

    def _is_first_to_tell(self, store: PrefixStore) -> bool:
        self._read_places(store)
        self.places = {rank: p for rank, p in self.places.items() if not store.check([f"ended/{rank}"])}
        store.add("failures", 1)  # for the ranks of other nodes
        return store.add("told", 1) == 1

    def _tell_who_is_gone(self, alive: set[int]) -> None:
        for rank, place in sorted(self.places.items()):
            is_neighbour = (place.host, place.launcher) == (socket.gethostname(), self.launcher)
            if is_neighbour and place.pid not in alive:
                line = f"error: rank {rank} ({place.role}) was ended from outside in phase {place.phase}"
                hint = "torchrun's report has the signal; 9 is often the kernel's, out of memory (dmesg)"
                print(f"{line}; {hint}", file=self.stderr, flush=True)


def living_children(pid: int) -> set[int] | None:
    """Process ids of a process's children that run; None where the kernel does not tell."""
    try:
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return None
    return {child for child in map(int, text.split()) if _is_running(child)}


def _is_running(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
