"""Where the wall time of a step goes: seconds of each phase, and on request a profiler's trace of one step.

Open traces in Perfetto (ui.perfetto.dev) or chrome://tracing. Left out: what an engine does in processes of its own.
"""

import contextlib
import pathlib
import time
from collections.abc import Iterable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from grpo.roles.process_groups import Roles
from grpo.types import Scalars
from grpo.watch.failures import BEGAN, set_place

PROFILE = "profile"  # the folder of traces, within the run folder


def profile_step(
    steps: Iterable[int],
    chosen: int,
    run_dir: str,
    roles: Roles,
) -> Iterator[int]:
    """Yield the `steps`, each the number of steps before it, and trace step number `chosen`; 0 traces none.

    Each rank writes its own trace to `RUN_DIR/profile`, with the phases as ranges.
    """
    for step in steps:
        if step + 1 != chosen:
            yield step
            continue
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as trace:
            yield step
        name = f"step-{chosen:08d}-rank-{roles.rank:03d}-{roles.name}.json.gz"
        path = pathlib.Path(run_dir) / PROFILE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))


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
        self._range = contextlib.ExitStack()  # of the current phase, in a profiler's trace

    def enter(self, name: str) -> None:
        """Begin phase `name`, which lasts until the next one begins. Errors in it are reported with its name."""
        now = time.perf_counter()
        seconds_before = self.seconds.get(self.current, 0.0)
        self.seconds[self.current] = seconds_before + now - self.last_change
        self.current = name
        self.last_change = now
        set_place(phase=name)
        self._range.close()
        if name != "other":
            self._range.enter_context(record_function(name))

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
