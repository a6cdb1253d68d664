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

from grpo.roles.comm import gather_to_driver
from grpo.roles.process_groups import Roles
from grpo.watch.failures import BEGAN, set_place

PROFILE = "profile"  # the folder of traces in the run's
# What took less of the start is not told, unless nothing took more.
SHORTEST_SECONDS = 0.05


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

    Phase `startup` is not the step's: loading models, and compiling inside the first steps.
    """

    def __init__(self, is_driver: bool = False) -> None:
        """is_driver: `startup` prints what it does."""
        self.is_driver = is_driver
        self.seconds: dict[str, float] = {}
        self.open_phases: list[str] = []
        self._entered = contextlib.ExitStack()  # the phase that `enter` began
        self.step_start = self.last_change = time.perf_counter()
        self.startup_parts = {"importing": self.last_change - BEGAN}
        """Seconds of what `startup` was told, and of what came before."""

    def enter(self, name: str) -> None:
        """Begin phase `name`, which lasts until the next `enter` or `close_step`. What fails meanwhile failed in it."""
        self._entered.close()
        self._entered.enter_context(self.phase(name))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the `with` block to phase `name` (startup, generate, reference, train, ...)."""
        with record_function(name), self._phase(name):  # a range in a profiler's trace
            yield

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if name in ("other", "step"):
            raise ValueError(f"time/{name} is computed by close_step; give the phase another name")
        self._book()
        self.open_phases.append(name)
        set_place(phase=name)
        try:
            yield
        finally:
            self._book()
            self.open_phases.pop()
        # not reached if the block raised: what failed, failed in this phase
        set_place(phase=self.open_phases[-1] if self.open_phases else "other")

    @contextlib.contextmanager
    def startup(self, what: str) -> Iterator[None]:
        """Phase `startup`; the driver prints `what` the user waits for, and the seconds since the process began."""
        self._print(what)
        began = time.perf_counter()
        with self.phase("startup"):
            yield
        self.startup_parts[what] = self.startup_parts.get(what, 0.0) + time.perf_counter() - began

    def close_startup(self, roles: Roles) -> None:
        """Print on the driver what the start's seconds went to, for each role. Collective over `roles.control`."""
        for line in startup_lines(self.startup_parts, roles):
            self._print(line)

    def _print(self, what: str) -> None:
        if self.is_driver:
            seconds = time.perf_counter() - BEGAN
            Console(highlight=False, markup=False).print(
                f"starting {seconds:4.0f} s  {what}", style="dim", soft_wrap=True
            )

    @contextlib.contextmanager
    def compilation_in_startup(self) -> Iterator[None]:
        """While the `with` block runs, what torch.compile takes pauses the open phase and counts as `startup`.

        It compiles at the first call of a function and again for new shapes, also in autograd's threads, for which the
        caller waits. Torch reports the first of nested or parallel compilations as the start, the last as the end.
        """
        from torch._dynamo.callback import callback_handler  # takes seconds to load

        open_phase = contextlib.ExitStack()

        def start(_) -> None:
            open_phase.enter_context(self._phase("startup"))  # perhaps in a thread of autograd's

        def end(_) -> None:
            open_phase.close()

        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # torch._dynamo.reset() may have removed them
                callback_handler.remove_start_callback(start)
                callback_handler.remove_end_callback(end)

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


def startup_lines(parts: dict[str, float], roles: Roles) -> list[str]:
    """A line for each role on the driver: the seconds of each part of the start; none elsewhere.

    parts: of this rank, in order; one that begins with "waiting" is for others. Collective over `roles.control`.
    """
    everyone = gather_to_driver((roles.name, parts), roles)
    by_role: dict[str, list[dict[str, float]]] = {}
    for name, of_rank in everyone or []:
        by_role.setdefault(name, []).append(of_rank)
    return [f"{name}: {slowest_of(ranks)}" for name, ranks in by_role.items()]


def slowest_of(ranks: list[dict[str, float]]) -> str:
    """The parts of the rank that worked longest."""

    def work(parts: dict[str, float]) -> float:
        return sum(seconds for part, seconds in parts.items() if not part.startswith("waiting"))

    slowest = max(ranks, key=work)
    told = {part: seconds for part, seconds in slowest.items() if seconds >= SHORTEST_SECONDS} or slowest
    text = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in told.items())
    return text + (f" (the slowest of {len(ranks)} ranks)" if len(ranks) > 1 else "")
