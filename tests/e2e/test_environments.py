"""Whole runs with turns: several engines, tensor parallelism, what is lost, and two runs of the same numbers."""

import json
import pathlib

import pytest

from grpo.data.recorded import read_step
from tests.e2e.runs import TINY, read_completions, read_metrics, without_clocks
from tests.e2e.test_layouts import COLOCATED, split
from tests.torchrun import run_torchrun, torchrun

FILE = pathlib.Path(__file__).parent / "tiny_environments.py"
DIGITS = ("--environment.name", f"{FILE}:Digits", "--generator.max-completion-tokens", 48)
ROOM = ("--environment.max-turn-tokens", 12)


def run(model: pathlib.Path, run_dir: pathlib.Path, nproc: int, *flags: object, succeeds: bool = True) -> str:
    """One run of the tiny recipe; returns what it printed."""
    words = TINY, "--model.path", model, "--run-dir", run_dir, *DIGITS, *flags
    result = run_torchrun("train_grpo.py", *words, nproc=nproc)
    assert (result.returncode == 0) == succeeds, result.stdout
    return result.stdout


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (3, (*split(1, 0, 2), "--overlap-steps", 1, "--evaluation.interval", 2, "--evaluation.num-prompts", 4)),
        (2, (*COLOCATED, "--roles.num-trainers", 2, "--trainer.tensor-parallel", 2, "--generator.tensor-parallel", 2)),
    ],
    ids=["two engines, a step behind", "TP 2"],
)
def test_turns_are_trained_as_they_were_sampled(model, tmp_path, nproc, flags):
    run(model, tmp_path / "run", nproc, *ROOM, "--algorithm.kl-coef", 0, *flags)
    steps = [record for record in read_metrics(tmp_path / "run") if "time/step" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["environment/turns"] > 1 and record["environment/lost_count"] == 0
        assert record["reward/Digits"] >= 0 and record["grad_norm"] > 0
    assert steps[0]["mismatch/max"] < 1e-5  # each sampled token has the log-prob that it was sampled with
    for record in read_completions(tmp_path / "run"):
        turns = record["episode"]["turns"]
        assert record["num_tokens"] == sum(turn["tokens"] for turn in turns) <= 48


def test_rows_choose_among_classes(model, tmp_path):
    rows = [{"question": f"{n}+1", "answer": str(n + 1), "kind": ("digits", "echo")[n % 2]} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    classes = ("--environment.name", "digits", f"{FILE}:Digits", "echo", f"{FILE}:Echo")
    flags = (*ROOM, *COLOCATED, "--roles.num-trainers", 1, *classes, "--data.columns", "environment", "kind")
    run(model, tmp_path / "run", 1, *flags, "--data.path", tmp_path / "rows.jsonl")
    found = read_completions(tmp_path / "run")
    assert {record["columns"]["environment"] for record in found} == {"digits", "echo"}
    for record in found:
        is_echo = record["columns"]["environment"] == "echo"
        assert (record["rewards"]["environment"] == -1.0) == is_echo
        assert not is_echo or len(record["episode"]["turns"]) == 1


def test_credit_for_turns_is_recorded_and_replayed(model, tmp_path):
    """On two engines, a step behind, with LoRA; the replay has one rank and no environment."""
    live, again = tmp_path / "live", tmp_path / "again"
    flags = (*ROOM, *split(1, 0, 2), "--overlap-steps", 1, "--algorithm.kl-coef", 0, "--algorithm.advantages")
    run(model, live, 3, *flags, "return_to_go", "--trainer.lora-rank", 2, "--record")
    for step in (1, 2):
        batch = read_step(str(live), step).batch
        assert batch.turn_N.max() >= 2 and (batch.turn_N > 0).equal(batch.loss_mask_N)
        assert 0 < batch.earned_N.max() <= 1 and not batch.earned_N[batch.turn_N < 2].any()
    turns = [turn for record in read_completions(live) for turn in record["episode"]["turns"]]
    assert {"earned" in turn for turn in turns} == {True, False}  # a last turn needs none
    torchrun("grpo.replay", live, "--run-dir", again, nproc=1)
    steps = [[without_clocks(m) for m in read_metrics(folder) if "loss" in m] for folder in (live, again)]
    assert steps[0] == steps[1] and len({record["grad_norm"] for record in steps[0]}) == 2
    assert steps[0][0]["environment/alone_frac"] < 1
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (live, again)]
    assert weights[0] == weights[1]
    # what turns earned is not known of a run that did not ask
    run(model, tmp_path / "other", 3, *flags, "rloo", "--record", "--num-steps", 1)
    words = "grpo.replay", tmp_path / "other", "--algorithm.advantages", "return_to_go"
    result = run_torchrun(*words, nproc=1)
    assert result.returncode and "does not say what turns earned" in result.stdout


def test_answers_by_counts_repeat_a_run(model, tmp_path):
    for name in ("a", "b"):
        flags = (*ROOM, *COLOCATED, "--roles.num-trainers", 1, "--environment.answer-steps", 4)
        run(model, tmp_path / name, 1, *flags)
    first, second = (list(map(without_clocks, read_metrics(tmp_path / name))) for name in ("a", "b"))
    assert first == second


def test_lost_episodes_are_left_out_and_too_many_end_the_run(model, tmp_path):
    """Also one whose prompt `reset` makes longer than a micro-batch."""
    (tmp_path / "long.py").write_text(
        "class Long:\n    def __init__(self, loses): self.loses = loses\n"
        "    def reset(self, rollout): return '3+4' * (1 if rollout % self.loses else 200)\n"
        "    def reply(self, text): return None\n    def get_reward(self): return 1.0\n"
    )
    for name, flags, reason in (
        ("judge", (), "the judge is down"),
        ("long", ("--environment.name", f"{tmp_path}/long.py:Long"), "raise data.max_prompt_tokens=16"),
    ):
        flags = (*ROOM, *COLOCATED, "--roles.num-trainers", 1, *flags, "--environment.options", "loses")
        run(model, tmp_path / name, 1, *flags, 4)
        for record in read_metrics(tmp_path / name):
            if "time/step" in record:
                assert record["environment/lost_count"] == record["reward/none_count"] == 4  # one of each group
        output = run(model, tmp_path / f"{name}_most", 1, *flags, 1, succeeds=False)
        assert "episodes were lost" in output and reason in output and "seed" in output and "row" in output


def test_an_environment_that_cannot_be_used_is_one_line(model, tmp_path):
    (tmp_path / "bad.py").write_text(
        "class Bare:\n    def reset(self): return 'go'\n    def reply(self, text): return None\n"
        "class Needs:\n    def reset(self, city): return city\n    def reply(self, text): return None\n"
    )
    for name, reason in (("Bare", "no get_reward"), ("Needs", "missing a required argument: 'city'")):
        flags = (*COLOCATED, "--roles.num-trainers", 1, "--environment.name", f"{tmp_path}/bad.py:{name}")
        flags += ("--reward.functions",) if name == "Bare" else ()
        output = run(model, tmp_path / name, 1, *flags, succeeds=False)
        (line,) = [line for line in output.splitlines() if line.startswith("error:")]
        assert reason in line and not (tmp_path / name).exists()
