"""What the end-to-end tests read out of a run folder."""

import pathlib
from types import SimpleNamespace

from tests import read_lines
from tests.torchrun import torchrun

CLOCKS = ("time", "tokens_per_second", "memory/")
RANK_0 = SimpleNamespace(is_driver=True)  # the roles of a session that only reads
HERE = pathlib.Path(__file__).parent
TINY = f"{HERE}/tiny.py"
REWARDS = f"{HERE}/tiny_rewards.py"
ROWS = f"{HERE}/tiny_rows.py:addition"
COLOCATED = "--roles.colocated --roles.num-references 0"
ONE_RANK = f"{COLOCATED} --roles.num-trainers 1"
NO_KL = "--algorithm.kl-coef 0"


def split(trainers: int, references: int, generators: int) -> str:
    """Flags of a layout of so many ranks of each role."""
    return f"--roles.num-trainers {trainers} --roles.num-references {references} --roles.num-generators {generators}"


def run_tiny(
    model: pathlib.Path | str,
    run_dir: pathlib.Path,
    *flags: object,
    nproc: int = 1,
    script: pathlib.Path | str = "train_grpo.py",
    recipe: pathlib.Path | str = TINY,
) -> str:
    """Run GRPO with a tiny model to its end. Returns what it printed."""
    return torchrun(str(script), recipe, "--model.path", model, "--run-dir", run_dir, *flags, nproc=nproc)


def read_metrics(run_dir: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return read_lines(run_dir / "metrics.jsonl")


def read_completions(run_dir: pathlib.Path) -> list[dict]:
    """The lines of completions.jsonl."""
    return read_lines(run_dir / "completions.jsonl")


def without_clocks(metrics: dict) -> dict:
    """One step's metrics without what differs between two runs of the same thing."""
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}


def steps_of(run_dir: pathlib.Path) -> list[dict]:
    """The metrics of steps, without those of evaluations and without clocks."""
    return [without_clocks(m) for m in read_metrics(run_dir) if "loss" in m]


def assert_same_run(one: pathlib.Path, other: pathlib.Path, only_steps: bool = False) -> None:
    """Two runs have the same metrics, completions and weights, to the last digit, and no two steps are alike.

    only_steps: one of them has no evaluations.
    """
    before, after = ([without_clocks(m) for m in read_metrics(run_dir)] for run_dir in (one, other))
    assert after == before or only_steps
    assert steps_of(one) == steps_of(other)
    norms = [m["grad_norm"] for m in steps_of(one)]
    assert len(norms) == len(set(norms)) > 1
    if all((run_dir / "completions.jsonl").exists() for run_dir in (one, other)):
        assert read_completions(other) == read_completions(one)
    weights = [(run_dir / "model/model.safetensors").read_bytes() for run_dir in (one, other)]
    assert weights[0] == weights[1]
