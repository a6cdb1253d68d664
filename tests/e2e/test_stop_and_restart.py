"""A run that is asked to stop, or whose rank is killed, ends with the metrics of an undisturbed run."""

import pathlib
import re

import pytest

from configs.examples import toys
from tests import write_lines
from tests.e2e.runs import ONE_RANK, TINY, read_metrics, without_clocks
from tests.torchrun import ROOT, finish, run_torchrun, start_python, start_torchrun, torchrun, two_nodes

NUM_STEPS = 6
# After its third step, and once in the life of the folder, rank 1 gets a signal.
RECIPE = """
import os
import pathlib
import signal
import time

from grpo.config import SFTConfig
from grpo.config.recipes import load_recipe
from grpo.roles.trainer import Trainer
from grpo.watch import stopping

config = load_recipe("configs/toy_sft.py", SFTConfig)
marker, calls, optimizer_step = pathlib.Path({marker!r}), [], Trainer.optimizer_step
heard, ask_to_stop = marker.with_name("heard"), stopping.ask_to_stop


def ask_and_tell(reason):
    ask_to_stop(reason)
    heard.touch()


def with_signal(self):
    metrics = optimizer_step(self)
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == {rank!r} and not marker.exists():
        marker.touch()
        if {signal!r} == "SIGKILL":  # else the checkpoint of step 2, which is written meanwhile, may be lost
            while not any(marker.parent.glob("run/checkpoints/step-*2")):
                time.sleep(0.05)
        os.kill(os.getpid(), signal.{signal})
        while not heard.exists():
            time.sleep(0.05)
    return metrics


Trainer.optimizer_step = with_signal
stopping.ask_to_stop = ask_and_tell
"""


@pytest.fixture(scope="module")
def flags(model, tmp_path_factory) -> str:
    rows = write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", toys.addition("train")[:20])
    flags = f"--model.path {model} --data.path {rows} --sequences-per-step 6 --num-steps {NUM_STEPS}"
    return f"{flags} --checkpoint.interval 2 --metrics.no-tensorboard --checkpoint.no-export"


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory) -> list[dict]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    output = torchrun("train_sft.py", "configs/toy_sft.py", flags, f"--run-dir {run_dir}", nproc=2)
    # the last line of a finished run, and nothing behind it
    assert output.splitlines()[-1] == f"done; everything is in {run_dir}"
    return numbers(run_dir)


def numbers(run_dir: pathlib.Path) -> list[dict]:
    return [without_clocks(metrics) for metrics in read_metrics(run_dir)]


def recipe(folder: pathlib.Path, signal: str, rank: int) -> pathlib.Path:
    path = folder / "recipe.py"
    path.write_text(RECIPE.format(marker=str(folder / "marker"), signal=signal, rank=str(rank)))
    return path


def test_sigterm_saves_and_resume_continues(flags, undisturbed, tmp_path):
    """SIGTERM at rank 1 in step 3: saved after a step that no interval asked for, exit code 0."""
    run_dir = tmp_path / "run"
    arguments = (recipe(tmp_path, "SIGTERM", 1), flags, f"--run-dir {run_dir}")
    output = torchrun("train_sft.py", *arguments, nproc=2)
    last = output.splitlines()[-1]
    assert last.startswith(f"stopped by SIGTERM, saved after step 3; everything is in {run_dir}, continue with ")
    assert (run_dir / "checkpoints" / "step-00000003").is_dir()
    assert len(read_metrics(run_dir)) == 3
    assert "starting at step 3" in torchrun("train_sft.py", *arguments, "--resume", nproc=2)
    assert numbers(run_dir) == undisturbed


def test_two_nodes_restart_after_a_kill(flags, undisturbed, tmp_path):
    """Two agents, of which only one counts the failure: the first restart of all ranks succeeds."""
    run_dir = tmp_path / "run"
    arguments = (recipe(tmp_path, "SIGKILL", 1), flags, f"--run-dir {run_dir} --resume")
    launcher = (*two_nodes(tmp_path), "--max_restarts=1")
    nodes = [start_torchrun("train_sft.py", *arguments, nproc=1, launcher=launcher) for _ in range(2)]
    outputs = []
    for node in nodes:
        result = finish(node)
        assert result.returncode == 0, result.stdout[-20_000:]
        outputs.append(result.stdout)
    assert sorted(re.findall(r"starting at step (\d)", "".join(outputs))) == ["0", "2"]
    assert numbers(run_dir) == undisturbed


def test_ctrl_c_without_torchrun(model, tmp_path):
    """GRPO in one process: it saves, says how to go on, and the exit code is that of an interrupted program."""
    path = tmp_path / "recipe.py"
    text = RECIPE.replace("configs/toy_sft.py", TINY).replace("SFTConfig", "GRPOConfig")
    path.write_text(text.format(marker=str(tmp_path / "marker"), signal="SIGINT", rank="0"))
    flags = f"{ONE_RANK} --model.path {model} --run-dir {tmp_path}/run --num-steps 1000"
    process = start_python(ROOT / "train_grpo.py", path, flags)
    result = finish(process)
    assert result.returncode == 130, result.stdout
    assert "SIGINT: the run stops when this step is done and saved" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith("stopped by SIGINT, saved after step 3;")
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    assert not (tmp_path / "run" / "model").exists()


def test_the_stop_file(flags, tmp_path):
    """Written while models load, or left by a run before this one."""
    run_dir = tmp_path / "run"
    text = recipe(tmp_path, "SIGTERM", 0).read_text()
    text = text.replace("os.kill(os.getpid(), signal.SIGTERM)", f"pathlib.Path({str(run_dir / 'stop')!r}).touch()")
    text = text.replace("while not heard.exists()", "while False")
    (tmp_path / "recipe.py").write_text(text)
    result = run_torchrun("train_sft.py", tmp_path / "recipe.py", flags, f"--run-dir {run_dir}", nproc=2)
    assert result.returncode == 0, result.stdout
    assert f"stopped by the file {run_dir}/stop, saved after step 3; " in result.stdout.splitlines()[-1]
    assert not (run_dir / "stop").exists()
