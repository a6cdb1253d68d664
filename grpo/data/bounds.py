"""Bounds on what a chat template may take, in this process: seconds and memory."""

import contextlib
import pathlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

# Memory that a template may take beyond what its process has.
TEMPLATE_BYTES = 2**30


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the block take TEMPLATE_BYTES more and no more, then MemoryError; for all threads of this process."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if before == resource.RLIM_INFINITY else min(before, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise ValueError in the block after so many seconds; only in the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(*_: Any) -> None:
        raise ValueError(f"{what} was not done after {seconds:g} s; look for endless loops in it, or use another model")

    handler, start = signal.signal(signal.SIGALRM, expired), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # an alarm that was set before rings when it should, or now
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-6), interval)
