"""A torch profiler trace of one step on every rank, with the phases of the step as ranges.

Open the files in Perfetto (ui.perfetto.dev) or chrome://tracing. Left out: what an engine does in processes of its own.
"""

import pathlib
from collections.abc import Iterable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from grpo.roles.process_groups import Roles

FOLDER = "profile"


def check_profile(chosen: int, first_step: int) -> None:
    """Refuse a step that this run does not train any more. Raises ValueError."""
    if 0 < chosen <= first_step:
        raise ValueError(
            f"profile={chosen} is a step before step {first_step + 1}, with which this run continues; name that or a "
            "later one"
        )


def profile_step(steps: Iterable[int], chosen: int, run_dir: str, roles: Roles) -> Iterator[int]:
    """The `steps`, each the number of steps before it; while that of the `chosen`-th step runs, a trace is taken.

    Each rank writes its own to `RUN_DIR/profile`. With `chosen` 0 there is none.
    """
    for step in steps:
        if step + 1 != chosen:
            yield step
            continue
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as trace:
            yield step
        path = pathlib.Path(run_dir) / FOLDER / f"step-{chosen:08d}-rank-{roles.rank:03d}-{roles.name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
