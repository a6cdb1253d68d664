"""A GRPO run that is stopped or killed again and again has the metrics of an undisturbed one. Tiny model, on a CPU.

    nice -n 5 python tests/bench/stops.py terms [--times 20] [--seed 0]
    nice -n 5 python tests/bench/stops.py kills [--times 3] [--seed 0]
    nice -n 5 python tests/bench/stops.py saves [--times (all)] [--seed 0]
    python tests/bench/stops.py timeout [--times 1] [--after-step 2] -- RECIPE [--field value ...]

terms: SIGTERM at a random moment, to torchrun or to a random rank, then the same command with --resume, and so on.
After each stop the newest checkpoint has all steps that metrics.jsonl had when the signal came; nothing else saves.
kills: SIGKILL after a random step, to rank 0 and rank 1 in turns; torchrun starts all ranks again (--max_restarts).
saves: SFT on two ranks, which saves after every step and keeps one checkpoint. SIGKILL within a save, before each thing
that one of the ranks does to files, in an order by chance: shards, metadata, driver.pt, every fsync, the rename, the
removal of the checkpoint before. Every second kill comes some milliseconds later, in the midst of writing. After each
kill the newest checkpoint must be whole and at most one step older than the one that was being written, and the next
start must leave nothing unfinished there.
timeout: `timeout -s INT -k 60` around train_grpo.py with the recipe and flags given, in one process, so with a real
model on a GPU too. Its time is over as soon as there are `--after-step` steps, and again after the next start with
--resume, `--times` in all. It prints what was said from the signal on, and whether the newest checkpoint has all steps.
Triton must have compiled before the signal, so no warm cache: TRITON_CACHE_DIR is an empty folder.

At the end of the first three the metrics of all steps, without times, are compared with those of an undisturbed run.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from faults import FOLDER, layout, make_inputs, start_run

from grpo.folder.checkpoint import newest_checkpoint
from grpo.folder.run_folder import step_of
from tests.e2e.runs import read_metrics, without_clocks
from tests.torchrun import ROOT, SETTINGS

NUM_STEPS = 300
# Of the signal: steps since the start, and a part of a step; one in four comes earlier, seconds after torchrun's start
STEPS_AT_MOST = 12
STEP_SECONDS = 0.3
FIRST_SECONDS = 2.0
LAST_SECONDS = 20.0
SAVE_INTERVAL = 4  # steps, between checkpoints of the run that is killed
# Of the run that is killed while it saves: the save of a start that is struck, and its length
SAVE = 3  # that of saves_recipe.py
SAVED_STEPS = 100
LAST_DELAY = 0.004  # seconds from the beginning of an operation to a kill in its midst
RUN_LIMIT = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("terms", "kills", "saves", "timeout"))
    parser.add_argument("--times", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after-step", type=int, default=2)
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:own])
    if options.what == "timeout":
        timeouts(options.times or 1, options.after_step, words[own + 1 :])
        return
    chance = random.Random(options.seed)
    if options.what == "saves":
        saves(options.times or 1000, chance)
        return
    undisturbed = FOLDER / "undisturbed"
    if not finished(undisturbed):
        wait(start("undisturbed", 0))
    if options.what == "terms":
        terms(options.times or 20, chance)
    else:
        kills(options.times or 3, chance)
    compare(options.what, undisturbed)


def compare(name: str, undisturbed: pathlib.Path) -> None:
    """Print whether a run has the metrics of the undisturbed one."""
    before = numbers(undisturbed)
    after = numbers(FOLDER / name)
    print(f"metrics of {len(before)} steps {'equal' if after == before else 'DIFFER FROM'} those of an undisturbed run")


def terms(times: int, chance: random.Random) -> None:
    """Stop and continue `times` times, then let it finish."""
    shutil.rmtree(FOLDER / "terms", ignore_errors=True)
    for number in range(1, times + 1):
        before = len(steps_of("terms"))
        process = start("terms", 1000)
        begun = time.monotonic()
        if number % 4:
            until = before + chance.randrange(1, STEPS_AT_MOST)
            while process.poll() is None and len(steps_of("terms")) < until:
                time.sleep(0.02)
            time.sleep(chance.uniform(0, STEP_SECONDS))
        else:  # while models load
            time.sleep(chance.uniform(FIRST_SECONDS, LAST_SECONDS))
        target, name = chance.choice([*ranks_of(process), (psutil.Process(process.pid), "torchrun")])
        had = len(steps_of("terms"))
        after = time.monotonic() - begun
        target.send_signal(signal.SIGTERM)
        code, seconds = wait(process)
        saved = newest_step("terms")
        now = len(steps_of("terms"))
        verdict = "ok" if saved >= had and saved == now else "LOST STEPS"
        print(
            f"{number}: SIGTERM to {name} {after:.1f} s after the start, at step {had}: ended with {code} after "
            f"{seconds:.1f} s, saved after step {saved}: {verdict}",
            flush=True,
        )
        if finished(FOLDER / "terms"):
            break
    wait(start("terms", 1000))


def kills(times: int, chance: random.Random) -> None:
    """Kill ranks of one torchrun."""
    shutil.rmtree(FOLDER / "kills", ignore_errors=True)
    process = start("kills", SAVE_INTERVAL, "--max_restarts", str(times))
    moments = sorted(chance.sample(range(2, NUM_STEPS - 2), times))
    for number, moment in enumerate(moments):
        while process.poll() is None and len(steps_of("kills")) < moment:
            time.sleep(0.05)
        time.sleep(chance.random())
        target, name = ranks_of(process)[number % 2]
        print(f"SIGKILL to {name} after step {len(steps_of('kills'))}", flush=True)
        target.send_signal(signal.SIGKILL)
    code, _ = wait(process)
    print(f"ended with {code}")


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
    compare("saves", undisturbed)


def timeouts(times: int, after_step: int, run: list[str]) -> None:
    """Let `timeout` end a run `times` times, each `after_step` steps after its start."""
    run_dir = FOLDER / "timeout"
    caches = FOLDER / "timeout-caches"
    for old in (run_dir, caches):
        shutil.rmtree(old, ignore_errors=True)
    log = FOLDER / "timeout.log"
    FOLDER.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches), "PYTHONPATH": str(ROOT)}
    for number in range(1, times + 1):
        command = ["timeout", "-s", "INT", "-k", "60", str(int(RUN_LIMIT)), sys.executable, "train_grpo.py", *run]
        command += ["--run-dir", str(run_dir), "--num-steps", "100000", "--resume"]
        before = len(steps_of("timeout"))
        begun = time.monotonic()
        with open(log, "w") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None and len(steps_of("timeout")) < before + after_step:
            time.sleep(0.02)
        length = len(log.read_text(errors="replace"))
        after = time.monotonic() - begun
        process.send_signal(signal.SIGALRM)  # what `timeout` sends itself when its time is over
        code, seconds = wait(process)
        print(f"{number}: signal {after:.1f} s after the start; timeout ended with {code} after {seconds:.1f} s. Then:")
        print(log.read_text(errors="replace")[length:].rstrip())
        saved = newest_step("timeout")
        logged = len(steps_of("timeout"))
        verdict = "ok" if saved == logged >= before + after_step else "LOST STEPS"
        print(f"{number}: the log has {logged} steps, the newest checkpoint {saved}: {verdict}", flush=True)


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
    command += ["--num-steps", str(SAVED_STEPS), "--run-dir", str(FOLDER / name)]
    command.append("--overwrite" if overwrite else "--resume")
    environment = os.environ | SETTINGS | {"KILL": json.dumps(kill)}
    with open(FOLDER / f"{name}.log", "a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        code = process.wait(RUN_LIMIT)
    return code, [note.read_text().splitlines() for note in notes]


def start(name: str, save_interval: int, *launcher: str) -> subprocess.Popen:
    """Start one trainer and one generator, two processes."""
    model, rows = make_inputs()
    flags = [*layout(1, 0, 1), "--num-steps", str(NUM_STEPS), "--resume", "--evaluation.interval", "0"]
    flags += ["--checkpoint.interval", str(save_interval), "--run-dir", str(FOLDER / name)]
    return start_run(2, flags, model, rows, FOLDER / f"{name}.log", "a", launcher=launcher)


def wait(process: subprocess.Popen) -> tuple[int, float]:
    """Wait for a program. Returns its exit code, and the seconds until it ended."""
    begun = time.monotonic()
    return process.wait(RUN_LIMIT), time.monotonic() - begun


def ranks_of(process: subprocess.Popen) -> list[tuple[psutil.Process, str]]:
    """Wait for the processes of torchrun's two ranks. Returns them with their names."""
    while len(ranks := psutil.Process(process.pid).children()) < 2:
        time.sleep(0.05)
    return [(rank, f"rank {number}") for number, rank in enumerate(sorted(ranks, key=lambda rank: rank.pid))]


def steps_of(name: str) -> list[dict]:
    path = FOLDER / name / "metrics.jsonl"
    return read_metrics(path.parent) if path.exists() else []


def newest_step(name: str) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    folders = (FOLDER / name / "checkpoints").glob("step-" + "[0-9]" * 8)
    return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)


def numbers(run_dir: pathlib.Path) -> list[dict]:
    return [without_clocks(metrics) for metrics in read_metrics(run_dir)]


def finished(run_dir: pathlib.Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) == NUM_STEPS


if __name__ == "__main__":
    main()
