"""Whether anything grows in a long run: memory, file descriptors, threads, processes, step time. Tiny model, on a CPU.

    nice -n 10 python tests/bench/soak.py [--steps 2000]

train_grpo.py on 2 ranks, a trainer and a generator, with `overlap_steps=1`, an evaluation and a checkpoint (written in
the background, two are kept) every 20 steps. Once a second the bench looks at its processes from outside. What it saw
is averaged over 20 stretches of equal length, the first tenth of the run left out; a line through these gives the slope
per 1,000 steps. Step time is the median of a stretch, by the run's own clock; with other work on the machine it says
little.
"""

import argparse
import contextlib
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from faults import FOLDER, layout, make_inputs, start_run
from speed import report

from tests.e2e.runs import read_metrics

EVERY = 20  # steps from one evaluation, and one checkpoint, to the next
STRETCHES = 20
WARM_UP = 0.1  # share of the steps in which caches fill
LOOK_SECONDS = 1.0
RUN_LIMIT = 3600.0
RUN_DIR = FOLDER / "soak"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    model, rows = make_inputs()
    flags = [*layout(1, 0, 1), "--num-steps", str(steps), "--overlap-steps", "1", "--overwrite"]
    flags += ["--checkpoint.interval", str(EVERY), "--checkpoint.keep", "2"]
    flags += ["--evaluation.interval", str(EVERY), "--run-dir", str(RUN_DIR), "--trainer.learning-rate", "1e-5"]
    seen = watch(start_run(2, flags, model, rows, FOLDER / "soak.log"), steps)
    for metrics in read_metrics(RUN_DIR):
        if "time/step" in metrics:
            seen.setdefault("seconds of a step", []).append((metrics["step"], metrics["time/step"]))
    assert seen["seconds of a step"][-1][0] == steps, f"the run did not finish; see {FOLDER / 'soak.log'}"
    report("soak", [slope_row(what, points, steps) for what, points in seen.items()], steps=steps)


def watch(process: subprocess.Popen, steps: int) -> dict[str, list[tuple[int, float]]]:
    """Look at the run until it ends. Returns (step, value) pairs of each thing that is measured."""
    seen: dict[str, list[tuple[int, float]]] = {}
    deadline = time.monotonic() + RUN_LIMIT
    began = time.time()
    step = 0
    path = RUN_DIR / "metrics.jsonl"
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.terminate()
            process.wait()
        time.sleep(LOOK_SECONDS)
        if not path.exists() or path.stat().st_mtime < began:
            continue
        with open(path) as file:
            step = sum('"loss"' in line for line in file)
        if step >= steps:  # its processes end one by one
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            for what, value in look(process.pid).items():
                seen.setdefault(what, []).append((step, value))
    return seen


def look(launcher: int) -> dict[str, float]:
    """Measure both ranks, in the order of their start, and all that runs below torchrun."""
    ranks = sorted(psutil.Process(launcher).children(), key=lambda rank: rank.pid)
    family = psutil.Process(launcher).children(recursive=True)
    values = {}
    for number, rank in enumerate(ranks):
        values[f"rank {number}, MiB resident"] = rank.memory_info().rss / 2**20
        values[f"rank {number}, file descriptors"] = rank.num_fds()
        values[f"rank {number}, threads"] = rank.num_threads()
    values["all processes, MiB resident"] = sum(member.memory_info().rss for member in family) / 2**20
    values["all processes, number"] = len(family)
    return values


def slope_row(what: str, points: Sequence[tuple[int, float]], steps: int) -> dict[str, object]:
    """Return a row of the table: the first stretch, the last, and the line through all."""
    first = WARM_UP * steps
    length = (1 - WARM_UP) * steps / STRETCHES
    middles = []
    values = []
    for number in range(STRETCHES):
        low, high = first + number * length, first + (number + 1) * length
        inside = [value for step, value in points if low < step <= high]
        if inside:
            middles.append((low + high) / 2)
            values.append(statistics.median(inside) if "seconds" in what else statistics.mean(inside))
    slope, _ = statistics.linear_regression(middles, values)
    row = {"what": what, "first stretch": values[0], "last": values[-1], "highest": max(values)}
    return row | {"slope per 1,000 steps": 1000 * slope}


if __name__ == "__main__":
    main()
