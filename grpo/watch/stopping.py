"""How a user asks a run to stop, and what the run says to it.

A user sends SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any rank (torchrun passes the first three on), or makes the file
`stop` in the run folder or the file that STOP_VARIABLE names. The driver obeys between two steps: it saves what is
done, begins no other step, and prints one line. Left out: how a signal at another rank reaches the driver
(watchdog.py).

No handler hears the signals: they are blocked from a script's start on, and one thread waits for them. The reason is
Triton's compiler (LLVM), which replaces the handlers of its process. While one of its handlers runs, the next signal
finds none and kills the process, and `timeout` sends two within microseconds, to the process and to its group. SIGUSR1
it keeps for itself. Programs that the run starts inherit the blocked signals, so a signal to the group, also SIGTERM,
leaves them alive. End them by SIGKILL.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from grpo.watch import failures
from grpo.workers import kernel

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOP_FILE = "stop"
STOP_VARIABLE = "GRPO_STOP_FILE"  # for launch scripts, which do not know the run folder; they remove that file

LOOK_SECONDS = 0.2  # until the thread that hears signals at the start sees that the watchdog hears them

_reasons: list[str] = []  # to stop; the first one counts
is_watched = threading.Event()  # set when the watchdog hears signals


def ask_to_stop(reason: str) -> None:
    """Let the run end before the next step begins."""
    _reasons.append(reason)


def stop_reason(run_dir: str) -> str:
    """Return why the run must stop, such as SIGTERM. Empty if nobody asked. On the driver."""
    for path in stop_files(run_dir):
        if not _reasons and path.exists():
            ask_to_stop(f"the file {path}")
    return next(iter(_reasons), "")


def stop_files(run_dir: str) -> list[Path]:
    """Return the files that stop the run when one of them exists."""
    files = [Path(run_dir) / STOP_FILE]
    named = os.environ.get(STOP_VARIABLE)
    if named:
        files.append(Path(named))
    return files


def forget_old_stop(run_dir: str) -> None:
    """Remove an earlier run's stop file from the folder, and forget why an earlier run of this process was stopped."""
    _reasons.clear()
    (Path(run_dir) / STOP_FILE).unlink(missing_ok=True)


def obey_stop(reason: str, step: int, run_dir: str) -> str:
    """Remove the stop files, and return the last line of a run that stopped after `step` steps."""
    for path in stop_files(run_dir):
        path.unlink(missing_ok=True)
    saved = f"saved after step {step}" if step else "before the first step, nothing is saved"
    return f"stopped by {reason}, {saved}; everything is in {run_dir}, continue with the same command and --resume"


def launched_by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Let the kernel end this process when torchrun is gone. Until a run is watched, a stop signal ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    held = hold_signals()
    threading.Thread(target=_end_by_signal, args=(held,), name="signals", daemon=True).start()
    if launched_by_torchrun():
        kernel.die_with(os.getppid())


def hold_signals() -> set[signal.Signals]:
    """Block the stop signals in this thread and in the threads and programs that it starts, and return them.

    A thread takes them with `signal.sigtimedwait`. Signals that are ignored (nohup) stay ignored.
    """
    held = {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    return held


def _let_fork_end() -> None:
    """Let SIGTERM end a process that was forked from this one, because pools of processes end theirs by it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(after_in_child=_let_fork_end)


def _end_by_signal(held: set[signal.Signals]) -> None:
    """End this process when a stop signal arrives. Returns when the watchdog hears them."""
    received = None
    while received is None and not is_watched.is_set():
        received = signal.sigtimedwait(held, LOOK_SECONDS)
    if received is None:
        return
    number = signal.Signals(received.si_signo)
    if is_watched.is_set():
        os.kill(os.getpid(), number)  # for the watchdog
        return
    if not launched_by_torchrun():  # which prints it
        print(f"{number.name}: ended, nothing to save", file=sys.stderr, flush=True)
    failures.exit_now(128 + number)
