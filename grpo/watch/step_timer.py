"""Where the wall time of a step goes: seconds of each phase."""

import contextlib
import time
from collections.abc import Iterator

from grpo.types import Scalars
from grpo.watch.failures import BEGAN, set_place


class StepTimer:
    """Seconds of each phase of one step. A phase inside another pauses it, so no second counts twice.

    Phase `startup`, loading models, does not belong to the step. `other` is the time outside of all phases.
    """

    def __init__(self, is_driver: bool = False) -> None:
        """Start the clock. is_driver: `startup` prints what it does."""
        self.is_driver = is_driver
        self.current = "other"
        self.seconds: dict[str, float] = {}
        self.step_start = self.last_change = time.perf_counter()

    def enter(self, name: str) -> None:
        """Begin phase `name`, which lasts until the next one begins. Errors in it are reported with its name."""
        now = time.perf_counter()
        seconds_before = self.seconds.get(self.current, 0.0)
        self.seconds[self.current] = seconds_before + now - self.last_change
        self.current = name
        self.last_change = now
        set_place(phase=name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the `with` block to phase `name` (startup, generate, reference, train, ...)."""
        outer = self.current
        self.enter(name)
        yield
        self.enter(outer)  # not if the block raised, because the error belongs to this phase

    @contextlib.contextmanager
    def startup(self, what: str) -> Iterator[None]:
        """Add the block to phase `startup`. The driver prints `what` it does and the age of the process in seconds."""
        if self.is_driver:
            print(f"starting {time.perf_counter() - BEGAN:4.0f} s  {what}")
        with self.phase("startup"):
            yield

    def close_step(self) -> Scalars:
        """Return the seconds since the last call: `time/PHASE` of each phase that ran, `time/other`, `time/step`.

        `time/step` is the sum of the others without `time/startup`. The next step starts here.
        """
        self.enter("other")
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        startup = times.get("time/startup", 0.0)
        times["time/step"] = self.last_change - self.step_start - startup
        self.seconds = {}
        self.step_start = self.last_change
        return times
