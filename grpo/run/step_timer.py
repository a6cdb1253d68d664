"""Where the wall time of a step goes: seconds of each phase, and on request a profiler's trace of one step.

Open traces in Perfetto (ui.perfetto.dev) or chrome://tracing. Left out: what an engine does in processes of its own.
"""

import contextlib
import pathlib
import time
from collections.abc import Iterable, Iterator

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function

from grpo.roles.process_groups import Roles
from grpo.watch.failures import BEGAN, set_place

PROFILE = "profile"  # the folder of traces in the run's


def profile_step(steps: Iterable[int], chosen: int, run_dir: str, roles: Roles) -> Iterator[int]:
    """The `steps`, each the number of steps before it; while that of the `chosen`-th step runs, a trace is taken.

    Each rank writes its own to `RUN_DIR/profile`, with the phases as ranges. With `chosen` 0 there is none.
    """
    for step in steps:
        if step + 1 != chosen:
            yield step
            continue
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as trace:
            yield step
        path = pathlib.Path(run_dir) / PROFILE / f"step-{chosen:08d}-rank-{roles.rank:03d}-{roles.name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))


class StepTimer:
    """Seconds of each phase of one step. A phase inside another pauses it, so no second counts twice.

    Phase `startup`, loading models, is not the step's; `other` is what no phase has.
    """

    def __init__(self, is_driver: bool = False) -> None:
        """is_driver: `startup` prints what it does."""
        self.is_driver, self.current = is_driver, "other"
        self.seconds: dict[str, float] = {}
        self.step_start = self.last_change = time.perf_counter()
        self._range = contextlib.ExitStack()  # the phase's in a profiler's trace

    def enter(self, name: str) -> None:
        """Begin phase `name`, which lasts until the next one begins. What fails meanwhile failed in it."""
        now = time.perf_counter()
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self.last_change
        self.current, self.last_change = name, now
        set_place(phase=name)
        self._range.close()
        if name != "other":
            self._range.enter_context(record_function(name))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the `with` block to phase `name` (startup, generate, reference, train, ...)."""
        before = self.current
        self.enter(name)
        yield
        self.enter(before)  # not if the block raised: what failed, failed in this phase

    @contextlib.contextmanager
    def startup(self, what: str) -> Iterator[None]:
        """Phase `startup`; the driver prints `what` the user waits for, and the seconds since the process began."""
        if self.is_driver:
            line = f"starting {time.perf_counter() - BEGAN:4.0f} s  {what}"
            Console(highlight=False, markup=False).print(line, style="dim", soft_wrap=True)
        with self.phase("startup"):
            yield

    def close_step(self) -> dict[str, float]:
        """Seconds since the last call: `time/PHASE` of each phase that ran, `time/other`, `time/step`.

        `time/step` is the sum of all others except `time/startup`. The next step starts here.
        """
        self.enter("other")
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/step"] = self.last_change - self.step_start - times.get("time/startup", 0.0)
        self.seconds, self.step_start = {}, self.last_change
        return times
