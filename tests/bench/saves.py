"""A run that is killed within its saves, again and again, has the metrics of an undisturbed one. Tiny model, on a CPU.

    nice -n 5 python tests/bench/saves.py [--times (all)] [--seed 0]

SFT on two ranks, which saves after every step and keeps one checkpoint. SIGKILL within a save, before each thing that
one of the ranks does to files, in an order by chance: shards, metadata, driver.pt, every fsync, the rename, the removal
of the checkpoint before. Every second kill comes some milliseconds later, in the midst of writing. After each kill the
newest checkpoint must be whole and at most one step older than the one that was being written, and the next start must
leave nothing unfinished there. At the end the metrics of all steps, without times, are compared.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from faults import FOLDER, make_inputs

from grpo.folder.checkpoint import newest_checkpoint
from grpo.folder.run_folder import step_of
from tests.e2e.runs import read_metrics, without_clocks
from tests.torchrun import ROOT, SETTINGS

SAVE = 3  # the save of a start that is struck: that of saves_recipe.py
NUM_STEPS = 100
LAST_DELAY = 0.004  # seconds from the beginning of an operation to a kill in its midst
RUN_LIMIT = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    saves(options.times, random.Random(options.seed))


def saves(times: int, chance: random.Random) -> None:
    """Kill within a save and continue, `times` times; then let it finish."""
    undisturbed = FOLDER / "saves-undisturbed"
    kills = []
    _, notes = save_run(undisturbed.name, overwrite=True)
    for rank, lines in enumerate(notes):  # what each rank does in a save
        third = [line.partition(", ")[2] for line in lines if line.startswith(f"step {SAVE},")]
        kills += [(rank, number) for number in range(1, len(third) + 1)]
        print("\n  ".join([f"rank {rank}, in each save:", *third]), flush=True)
    shutil.rmtree(FOLDER / "saves", ignore_errors=True)
    wrong = 0
    for number, (rank, operation) in enumerate(chance.sample(kills, min(times, len(kills)))):
        delay = chance.uniform(0, LAST_DELAY) if number % 2 else 0.0
        code, notes = save_run("saves", rank=rank, operation=operation, delay=delay)
        lines = notes[rank]
        struck = int(lines[-1].removeprefix("step ").partition(",")[0])
        with contextlib.redirect_stdout(sys.stderr):
            newest = newest_checkpoint(str(FOLDER / "saves"))[0]
        faults = [] if newest and step_of(newest) >= struck - 1 else [f"the newest whole checkpoint is {newest}"]
        unfinished = [name for name in notes[0][0].split()[1:] if not name.removeprefix("step-").isdigit()]
        faults += [f"{name} was left by the kill before" for name in unfinished]
        faults += [] if code else ["the kill did not strike"]
        wrong += bool(faults)
        how = f"{1000 * delay:.1f} ms after" if delay else "at"
        print(
            f"{number + 1}: SIGKILL to rank {rank} {how} {lines[-1]}: newest whole checkpoint "
            f"{step_of(newest) if newest else 'none'}: {'; '.join(faults) or 'ok'}",
            flush=True,
        )
    save_run("saves")
    print(f"{number + 1} kills, {wrong} not as they should be")
    before = numbers(undisturbed)
    after = numbers(FOLDER / "saves")
    print(f"metrics of {len(before)} steps {'equal' if after == before else 'DIFFER FROM'} those of an undisturbed run")


def save_run(
    name: str,
    rank: int = 0,
    operation: int = 0,
    delay: float = 0.0,
    overwrite: bool = False,
) -> tuple[int, list[list[str]]]:
    """Start the run that saves after every step. Returns its exit code, and what each rank noted."""
    model, rows = make_inputs()
    notes = [FOLDER / f"{name}.note.{rank}" for rank in (0, 1)]
    for note in notes:
        note.unlink(missing_ok=True)
    kill = {"rank": rank, "operation": operation, "delay": delay, "note": str(notes[0].with_suffix(""))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_sft.py"]
    command += ["tests/bench/saves_recipe.py", "--model.path", str(model), "--data.path", str(rows)]
    command += ["--num-steps", str(NUM_STEPS), "--run-dir", str(FOLDER / name)]
    command.append("--overwrite" if overwrite else "--resume")
    environment = os.environ | SETTINGS | {"KILL": json.dumps(kill)}
    with open(FOLDER / f"{name}.log", "a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        code = process.wait(RUN_LIMIT)
    return code, [note.read_text().splitlines() for note in notes]


def numbers(run_dir: pathlib.Path) -> list[dict]:
    return [without_clocks(metrics) for metrics in read_metrics(run_dir)]


if __name__ == "__main__":
    main()
