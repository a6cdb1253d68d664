"""How a rank ends: the rank that failed first prints one clear message, the others print nothing.

When a rank dies, all others fail too, in the collective that they were waiting in. Before they print their own error
they wait, until torchrun ends them. The message is left for torchrun too, whose report then shows it as the root cause.
Left out: ranks that hang or are ended from outside (watchdog.py).
"""

import contextlib
import gc
import io
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from grpo.roles.shared_memory import remove_shared_memory
from grpo.text import printable

# About when the process began, since the command line is read, and this imported, before torch is
BEGAN = time.perf_counter()
# torchrun looks for a dead rank every 0.1 s and then gives the others 30 s to end
FOLLOWER_PATIENCE_SECONDS = 15
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
    "wait timeout after",  # gloo's, and of stores
    "remote process exited",  # NCCL's
)
FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")
READER_LEFT = 141  # exit code, that of a program which SIGPIPE ended
STEP_BEGINS_WITH = ("generate", "train")  # phases of train_grpo.py and train_sft.py

Result = TypeVar("Result")


@dataclass
class Here:
    """Where this rank is, for the messages about it."""

    role: str = "rank"
    phase: str = "start"
    run_dir: str = "the run folder"
    changes: int = 0
    """Phases begun so far."""
    in_steps: bool = False
    """The first step has begun."""
    ending: bool = False
    """It fails, or was told to end."""
    goes_on: bool = True
    """The process outlives its run, as a notebook's does. A script's does not."""


here = Here()


class BadInput(Exception):
    """The user's input cannot work. The message says why and what to do; rank 0 prints it without a traceback."""


def set_place(*, role: str = "", phase: str = "", run_dir: str = "") -> None:
    """Remember this rank's role and current phase, and the run folder."""
    here.role = role or here.role
    here.run_dir = run_dir or here.run_dir
    if phase:
        here.phase = phase
        here.changes += 1
        here.in_steps |= phase in STEP_BEGINS_WITH


@contextlib.contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Turn a ValueError, a missing file or one that exists already into `BadInput`, in a block that checks input."""
    try:
        yield
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise BadInput(str(error)) from error


def leave_for_launcher(line: str) -> None:
    """Let torchrun's report show `line` as this rank's failure. Without torchrun, do nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # torchrun takes the failure with the lowest time, in whole seconds, for the root cause. Ranks that it ends because
    # of this one get a time that is a moment later, and must not get the same second.
    record = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()) - 1)}}}
    with contextlib.suppress(OSError):  # a full disk; the line is on the screen
        pathlib.Path(path).write_text(json.dumps(record))


def run_rank(main: Callable[[], Result]) -> Result:
    """Return what `main` returns. If it fails, print one message and end the process with a non-zero exit code."""
    here.goes_on = False
    rank = os.environ.get("RANK", "0")  # now, because each role rewrites it
    show_lines_at_once()
    code = 1
    line = ""
    trace = ""
    try:
        return main()
    except SystemExit as stop:  # it has said why
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        is_follower = bool(code) and rank != "0"
        if code and rank == "0":
            leave_for_launcher("rank 0 ended with the message above")
    except BadInput as error:
        is_follower = rank != "0"
        if not is_follower:
            line = f"error: {error}"
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and not here.in_steps and has_lost_reader():
            os._exit(READER_LEFT)
        # torchrun ends a follower before it speaks; without torchrun nobody would
        is_follower = "TORCHELASTIC_RUN_ID" in os.environ and any(sign in str(error) for sign in LOST_PEER)
        why = str(error) or type(error).__name__
        line = f"error: rank {rank} ({here.role}) failed in phase {here.phase}: {why}"
        if any(sign in why for sign in FULL_DISK):
            line += (
                f"; make room for {here.run_dir}, and the same command with --resume goes on from the last checkpoint, "
                "if there is one"
            )
        else:
            trace = traceback.format_exc()
    here.ending = True
    if is_follower:
        time.sleep(FOLLOWER_PATIENCE_SECONDS)  # torchrun ends all soon after the first rank, which printed the message
    if line:
        line = printable(line)  # it may quote a completion
        leave_for_launcher(line)
        print(f"{printable(trace)}{line}", file=sys.stderr)
    end_process(code)


def has_lost_reader() -> bool:
    """Say whether nobody reads what this process prints any more, as behind `| head`."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def show_lines_at_once() -> None:
    """Let each line that is printed appear at once, also in a file or behind a pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # that of a notebook does so anyway
        sys.stdout.reconfigure(line_buffering=True)


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a whole script like `run_rank`, and end the process. Python's garbage collector leaves the imports alone."""
    gc.freeze()
    gc.enable()
    run_rank(main)
    end_process(0)


def end_process(code: int) -> NoReturn:
    """End without destructors. They take seconds, and print errors or hang where other ranks of a group are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End at once, from any thread. After a failure, first remove the shared memory that engines would leave."""
    if code:
        remove_shared_memory()
    os._exit(code)
