"""Looks at processes, for tests: which there are, and whether they live."""

import pathlib
import time
from collections.abc import Callable

from grpo.workers.processes import children

# Seconds for what happens within moments, on a machine that may be busy.
DEADLINE = 600.0


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def find(argument: str) -> list[int]:
    """Processes that have `argument` among theirs."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument in path.read_text().split("\0"):
                found.append(int(path.parent.name))
        except OSError:
            pass  # it ended meanwhile
    return found


def wait_until(true: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < give_up_at, f"waited {DEADLINE} s for {what}"
        time.sleep(0.02)
