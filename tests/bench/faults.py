"""What real roles do when one of them fails: every role in every phase, with a tiny model, on a CPU.

    nice -n 5 python tests/bench/faults.py [--roles driver ...] [--phases train ...] [--kinds hang ...] [--jobs 2]
    nice -n 5 python tests/bench/faults.py --sample 20                                   (about ten minutes)

A cell is one run of train_grpo.py in which a fault strikes one rank in its second step (`start`: while models load):
an exception, SIGKILL, a sleep of an hour, SIGSTOP. It prints a markdown table: seconds from the fault to the end of
torchrun, and in bold what was not as it should be. As it should be: exit code 1; one line `error:` that names the rank,
its role and its phase; torchrun's report repeats it (of a killed rank it has the signal); two seconds later no process
of the run lives, and no file of /dev/shm that one of them had mapped is there. (A port is open as long as its process.)

Each cell leaves `runs/faults/CELL.log` and a line in `runs/faults/cells.jsonl`; cells that are there are not run again.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from speed import launch, table

from configs.examples import toys
from grpo.watch.watchdog import deadline_seconds
from tests.tiny_models import SMALL
from tests.torchrun import ROOT, SETTINGS

STEP = 2
# Of a busy machine, after the deadline: rank 0 looks each second, torchrun each 0.1 s; the stacks take 3 s
SOON = 15.0
SECOND = 25.0
LOADING = 30.0  # while one rank is silent at the start, the others still load
LEFT_SECONDS = 2.0
LOOK_SECONDS = 0.5  # from one look at a run's processes to the next
RUN_LIMIT = 300.0  # seconds of a cell
DEADLINE_MINUTES = 0.25
FOLDER = ROOT / "runs" / "faults"


@dataclass(frozen=True)
class Role:
    """Where a fault strikes, in a layout of as few ranks as it takes."""

    rank: int
    name: str
    nproc: int
    flags: tuple[str, ...]


def layout(trainers: int, references: int, generators: int) -> tuple[str, ...]:
    counts = {"trainers": trainers, "references": references, "generators": generators}
    return tuple(word for role, number in counts.items() for word in (f"--roles.num-{role}", str(number)))


# Without reference ranks the trainers hold the reference
ROLES = {
    "trainer": Role(1, "trainer", 3, layout(2, 0, 1)),
    "driver": Role(0, "trainer", 3, layout(2, 0, 1)),
    "reference": Role(1, "reference", 3, layout(1, 1, 1)),
    "generator TP 1": Role(1, "generator", 2, layout(1, 0, 1)),
    "generator TP 2": Role(2, "generator", 3, (*layout(1, 0, 2), "--generator.tensor-parallel", "2")),
    "colocated": Role(1, "colocated", 2, (*layout(2, 0, 0), "--roles.colocated")),
}
PHASES = ("start", "generate", "reference", "reward", "train", "sync", "evaluate", "save")
SAVING = ("trainer", "driver", "colocated")
KINDS = {
    "raise": "failed in phase {phase}: forced",
    "SIGKILL": "was ended from outside in phase {phase};",
    "hang": "hangs in phase {phase}: nothing has happened for",
    "SIGSTOP": "does not answer, last seen in phase {phase}: nothing has happened for",
}


@dataclass
class Outcome:
    """Of one cell."""

    role: str
    phase: str
    kind: str
    seconds: float = 0.0
    """From the fault to the end of torchrun."""
    wrong: list[str] = field(default_factory=list)
    line: str = ""
    """The first that begins with `error:`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=ROLES)
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--jobs", type=int, default=2, help="cells at the same time")
    parser.add_argument("--sample", type=int, help="run only so many cells, spread over roles, phases and kinds")
    options = parser.parse_args()
    cells = [
        (role, phase, kind)
        for role in options.roles
        for phase in options.phases
        for kind in options.kinds
        if phase != "save" or role in SAVING
    ]
    there = read_outcomes()
    cells_to_run = [cell for cell in cells if cell not in there]
    random.Random(0).shuffle(cells_to_run)  # so that a sample has something of every role, phase and kind
    run_all(cells_to_run[: options.sample], options.jobs)
    outcomes = read_outcomes()
    print_table([outcomes[cell] for cell in cells if cell in outcomes])


def run_all(cells: list[tuple[str, str, str]], jobs: int) -> None:
    """Run cells and note each when it ends."""
    model, rows = make_inputs()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_cell, *cell, model, rows) for cell in cells]
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            outcome = future.result()
            with open(FOLDER / "cells.jsonl", "a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            verdict = "; ".join(outcome.wrong) or "ok"
            name = f"{outcome.role}, {outcome.phase}, {outcome.kind}"
            print(f"{number}/{len(cells)} {name}: {outcome.seconds:.1f} s, {verdict}", flush=True)


def make_inputs() -> tuple[pathlib.Path, pathlib.Path]:
    """Make the folder of a random model and a file of a few rows. Returns both."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = FOLDER / "model"
    rows = FOLDER / "rows.jsonl"
    if not rows.exists():
        changes = SMALL | {"max_position_embeddings": 128}
        toys.make_model(model, toys.addition_tokenizer(), seed=0, changes=changes)
        rows.write_text("".join(json.dumps(row) + "\n" for row in toys.addition("train")[:20]))
    return model, rows


def read_outcomes() -> dict[tuple[str, str, str], Outcome]:
    """Read the last outcome of each cell."""
    path = FOLDER / "cells.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {(outcome.role, outcome.phase, outcome.kind): outcome for outcome in outcomes}


# ---- one cell -------------------------------------------------------------------------------------------------------


def run_cell(role: str, phase: str, kind: str, model: pathlib.Path, rows: pathlib.Path) -> Outcome:
    """Run a cell and look at what it printed and left."""
    at = ROLES[role]
    outcome = Outcome(role, phase, kind)
    name = f"{role}-{phase}-{kind}".replace(" ", "-")
    log = FOLDER / f"{name}.log"
    note = FOLDER / f"{name}.fault"
    note.unlink(missing_ok=True)
    fault = {"rank": at.rank, "phase": phase, "step": STEP, "kind": kind, "note": str(note)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={at.nproc}"]
    command += ["train_grpo.py", "tests/bench/faults_recipe.py", "--model.path", model, "--data.path", rows, *at.flags]
    command += ["--evaluation.path", rows, "--deadline-minutes", DEADLINE_MINUTES]
    command += ["--run-dir", FOLDER / name, "--overwrite"]
    process = launch(command, log, **SETTINGS, FAULT=json.dumps(fault))
    family, shared, ended = follow(process)
    time.sleep(LEFT_SECONDS)
    left = [member for member in family if is_alive(member)]
    for member in left:
        member.kill()
    output = log.read_text(errors="replace")
    if not note.exists():
        outcome.wrong.append(f"the fault did not strike (exit code {process.returncode})")
        return outcome
    outcome.seconds = ended - json.loads(note.read_text())["time"]
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    outcome.line = errors[0] if errors else ""
    outcome.wrong += complaints(outcome, at, process.returncode, output, errors)
    if left:
        outcome.wrong.append(f"left: {len(left)} processes")
    if files := sorted(path for path in shared if os.path.exists(path)):
        outcome.wrong.append(f"left: {', '.join(files)}")
    if not outcome.wrong:
        shutil.rmtree(FOLDER / name)
    return outcome


def follow(process: subprocess.Popen) -> tuple[set[psutil.Process], set[str], float]:
    """Wait for torchrun. Returns all processes that it ever had below it, what they mapped of /dev/shm, and its end."""
    family: set[psutil.Process] = set()
    shared: set[str] = set()
    deadline = time.monotonic() + RUN_LIMIT
    while process.poll() is None:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            break
        family.update(children)
        for child in children:
            with contextlib.suppress(OSError):  # it ended meanwhile
                maps = pathlib.Path(f"/proc/{child.pid}/maps").read_text(errors="replace")
                shared.update(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))
        if time.monotonic() > deadline:
            process.kill()
        try:
            process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    return family, shared, time.time()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def complaints(outcome: Outcome, at: Role, code: int, output: str, errors: list[str]) -> list[str]:
    """List what was not as it should be in what the run printed, and when."""
    problems = []
    if code != 1:
        problems.append(f"exit code {code}")
    phase = "startup" if outcome.phase == "start" else outcome.phase
    expected = f"error: rank {at.rank} ({at.name}) {KINDS[outcome.kind].format(phase=phase)}"
    if not errors or not errors[0].startswith(expected):
        problems.append(f"says '{errors[0][:120]}'" if errors else "no line")
    if len(errors) > 1:
        problems.append(f"{len(errors)} lines")
    root_cause = output.partition("Root Cause")[2]
    if ("SIGKILL" if outcome.kind == "SIGKILL" else expected) not in root_cause:
        problems.append("not torchrun's root cause")
    shows_stack = f"rank {at.rank} ({at.name}) is here, in phase {phase}:" in output
    if shows_stack != (outcome.kind == "hang"):
        problems.append("a stack" if shows_stack else "no stack")
    if outcome.seconds > limit_of(outcome):
        problems.append(f"above {limit_of(outcome):.0f} s")
    return problems


def limit_of(outcome: Outcome) -> float:
    """Return the seconds in which all must be over."""
    if outcome.kind in ("raise", "SIGKILL"):
        return SOON
    deadline = deadline_seconds(outcome.phase, DEADLINE_MINUTES) + LOADING * (outcome.phase == "start")
    return deadline + (SECOND if (outcome.role, outcome.kind) == ("driver", "SIGSTOP") else SOON)


# ---- the table ------------------------------------------------------------------------------------------------------


def print_table(outcomes: list[Outcome]) -> None:
    """Print a row for each role and phase and a column for each kind: seconds; what was wrong in bold."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in outcomes:
        row = rows.setdefault((outcome.role, outcome.phase), {"role": outcome.role, "phase": outcome.phase})
        complaint = f" **{'; '.join(outcome.wrong)}**" if outcome.wrong else ""
        row[outcome.kind] = f"{outcome.seconds:.1f}{complaint}"
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{table([*rows.values()])}\n\n{len(outcomes)} cells, {failed} not as they should be")


if __name__ == "__main__":
    main()
