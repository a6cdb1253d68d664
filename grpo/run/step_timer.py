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

    Phase `startup`, loading models, is not the step's.
    """

    def __init__(self, is_driver: bool = False) -> None:
        """is_driver: `startup` prints what it does."""
        self.is_driver = is_driver
        self.seconds: dict[str, float] = {}
        self.open_phases: list[str] = []
        self._entered = contextlib.ExitStack()  # the phase that `enter` began
        self.step_start = self.last_change = time.perf_counter()

    def enter(self, name: str) -> None:
        """Begin phase `name`, which lasts until the next `enter` or `close_step`. What fails meanwhile failed in it."""
        self._entered.close()
        self._entered.enter_context(self.phase(name))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the `with` block to phase `name` (startup, generate, reference, train, ...)."""
        if name in ("other", "step"):
            raise ValueError(f"time/{name} is computed by close_step; give the phase another name")
        self._book()
        self.open_phases.append(name)
        set_place(phase=name)
        try:
            with record_function(name):  # a range in a profiler's trace
                yield
        finally:
            self._book()
            self.open_phases.pop()
        # not reached if the block raised: what failed, failed in this phase
        set_place(phase=self.open_phases[-1] if self.open_phases else "other")

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
        self._entered.close()
        if self.open_phases:
            raise ValueError(f"the step closes inside phase {self.open_phases[-1]}; end the phase first")
        self._book()
        now = self.last_change
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/other"] = now - self.step_start - sum(self.seconds.values())
        times["time/step"] = now - self.step_start - times.get("time/startup", 0.0)
        self.seconds, self.step_start = {}, now
        return times

    def _book(self) -> None:
        """Give the time since the last change to the phase that is open, if any."""
        now = time.perf_counter()
        if self.open_phases:
            name = self.open_phases[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last_change
        self.last_change = now
