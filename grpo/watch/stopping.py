"""How a user asks a run to stop, and what the run answers.

SIGTERM, SIGINT, SIGHUP or SIGUSR1 at any rank (torchrun passes the first three on), the file `stop` in the run folder,
or the one that STOP_VARIABLE names. The driver decides it between two steps: what is done is saved, no other step
begins, and one line says so. Left out: how a signal at another rank reaches the driver (watchdog.py).
"""

import os
import pathlib
import signal
import subprocess

from grpo.workers import kernel

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOP_FILE = "stop"
STOP_VARIABLE = "GRPO_STOP_FILE"  # of launch scripts, which do not know the run folder and look after that file

# Waits for the process $1, which may be dead and not yet waited for, and prints $2.
LAST_WORD = 'while grep -qs "^State:.[^ZX]" /proc/$1/status; do sleep 0.05; done; echo "$2"'

_asked: list[str] = []  # names of signals, the first is the reason


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
    """Let the kernel end this process when torchrun is gone, which could not end it any more; SIGINT ends it too.

    Until a run listens to signals, see watchdog.py, Ctrl-C is no exception in whatever is being imported.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if launched_by_torchrun():
        launcher = os.getppid()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if launcher == 1 or os.getppid() != launcher:  # it was gone before that
            os._exit(1)
