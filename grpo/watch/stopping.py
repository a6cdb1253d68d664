"""How a user asks a run to stop, and what the run answers.

SIGTERM, SIGINT, SIGHUP or SIGUSR1 at any rank (torchrun passes the first three on), the file `stop` in the run folder,
or the one that STOP_VARIABLE names. The driver decides it between two steps: what is done is saved, no other step
begins, and one line says so. Left out: how a signal at another rank reaches the driver (watchdog.py).

No handler hears the signals: they are blocked from a script's start on, and one thread waits for them. Triton's
compiler (LLVM) replaces the handlers of its process. While one of its own runs, the next signal finds none and kills,
and `timeout` sends two within microseconds, to the process and to its group; SIGUSR1 it keeps for itself. Programs that
the run starts inherit what is blocked, so a signal to the group leaves them alive, SIGTERM too: end them by SIGKILL.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading

from grpo.watch import failures
from grpo.workers import kernel

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOP_FILE = "stop"
STOP_VARIABLE = "GRPO_STOP_FILE"  # of launch scripts, which do not know the run folder and look after that file

LOOK_SECONDS = 0.2  # until the thread that hears signals at the start sees that another one hears them

# Waits for the process $1, which may be dead and not yet waited for, and prints $2.
LAST_WORD = 'while grep -qs "^State:.[^ZX]" /proc/$1/status; do sleep 0.05; done; echo "$2"'

_asked: list[str] = []  # names of signals, the first is the reason
is_watched = threading.Event()  # the watchdog hears signals from here on


def ask_to_stop(reason: str) -> None:
    """Let the run end before the next step begins."""
    _asked.append(reason)


def stop_reason(run_dir: str) -> str:
    """Why the run is to stop, such as SIGTERM; empty if nobody asked. On the driver."""
    if not _asked and (there := [path for path in stop_files(run_dir) if path.exists()]):
        ask_to_stop(f"the file {there[0]}")
    return _asked[0] if _asked else ""


def stop_files(run_dir: str) -> list[pathlib.Path]:
    """Each of them stops the run as soon as it exists."""
    named = os.environ.get(STOP_VARIABLE)
    return [pathlib.Path(run_dir) / STOP_FILE, *([pathlib.Path(named)] if named else [])]


def forget_old_stop(run_dir: str) -> None:
    """Remove what stopped a run before this one."""
    (pathlib.Path(run_dir) / STOP_FILE).unlink(missing_ok=True)


def obey_stop(reason: str, step: int, run_dir: str) -> str:
    """Remove the files that asked for it; returns what the run, stopped after `step` steps, prints last."""
    for path in stop_files(run_dir):
        path.unlink(missing_ok=True)
    saved = f"saved after step {step}" if step else "before the first step, nothing is saved"
    return f"stopped by {reason}, {saved}; everything is in {run_dir}, continue with the same command and --resume"


def repeat_behind_launcher(line: str) -> None:
    """Print the last line of a run that a signal stopped once more when torchrun has ended, behind its traceback."""
    if launched_by_torchrun() and _asked and _asked[0] in signal.Signals.__members__:
        subprocess.Popen(["sh", "-c", LAST_WORD, "sh", str(os.getppid()), line], start_new_session=True)


def launched_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Let the kernel end this process when torchrun is gone, which could not end it any more.

    A stop signal ends it too, at once, until a run is watched (watchdog.py).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    held = hold_signals()
    threading.Thread(target=_end_by_signal, args=(held,), name="signals", daemon=True).start()
    if launched_by_torchrun():
        launcher = os.getppid()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if launcher == 1 or os.getppid() != launcher:  # it was gone before that
            os._exit(1)


def hold_signals() -> set[signal.Signals]:
    """Block the stop signals in this thread, and in the threads and programs that it starts; returns which these are.

    A thread takes them with `signal.sigtimedwait`. Ignored signals (nohup) stay ignored.
    """
    held = {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    return held


def _let_fork_end() -> None:
    """Let SIGTERM end this fork: that is how pools of processes end their own."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(after_in_child=_let_fork_end)


def _end_by_signal(held: set[signal.Signals]) -> None:
    heard = None
    while heard is None and not is_watched.is_set():
        heard = signal.sigtimedwait(held, LOOK_SECONDS)
    if heard is None:
        return
    if is_watched.is_set():
        os.kill(os.getpid(), heard.si_signo)  # for the watchdog
        return
    if not launched_by_torchrun():  # which says it
        name = signal.Signals(heard.si_signo).name
        print(f"{name}: ended, nothing to save", file=sys.stderr, flush=True)
    failures.exit_now(128 + heard.si_signo)
