"""Whole runs with turns are trained as sampled, lose no group to a lost episode, and repeat by counts of steps."""

import pathlib

import pytest

from grpo.tools.recorded import read_step
from tests import write_lines
from tests.e2e.runs import (
    COLOCATED,
    NO_KL,
    ONE_RANK,
    TINY,
    assert_same_run,
    read_completions,
    read_metrics,
    split,
    steps_of,
)
from tests.torchrun import run_torchrun, torchrun

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "tests" / "e2e" / "tiny_environments.py"
DIGITS = f"--environment.name {FILE}:Digits --generator.max-completion-tokens 48"
ROOM = "--environment.max-turn-tokens 12 --environment.reset-seconds 600 --environment.call-seconds 600"


def run(model: pathlib.Path, run_dir: pathlib.Path, nproc: int, *flags: object, succeeds: bool = True) -> str:
    """One run of the tiny recipe; returns what it printed."""
    words = TINY, "--model.path", model, "--run-dir", run_dir, DIGITS, *flags
    result = run_torchrun("train_grpo.py", *words, nproc=nproc)
    assert (result.returncode == 0) == succeeds, result.stdout
    return result.stdout


TWO_ENGINES = f"{split(1, 0, 2)} --overlap-steps 1 --evaluation.interval 2 --evaluation.num-prompts 4 {NO_KL}"
TP_2 = f"{COLOCATED} --roles.num-trainers 2 --trainer.tensor-parallel 2 --generator.tensor-parallel 2 {NO_KL}"


@pytest.mark.parametrize("nproc, layout", [(3, TWO_ENGINES), pytest.param(2, TP_2, marks=pytest.mark.slow)])
def test_turns_are_trained_as_they_were_sampled(model, tmp_path, nproc, layout):
    run(model, tmp_path / "run", nproc, ROOM, layout)
    steps = [record for record in read_metrics(tmp_path / "run") if "time/step" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["environment/turns"] > 1 and record["environment/lost_count"] == 0
        assert record["reward/Digits"] >= 0 and record["grad_norm"] > 0
    assert steps[0]["mismatch/max"] < 1e-5  # each sampled token has the log-prob that it was sampled with
    for record in read_completions(tmp_path / "run"):
        turns = record["episode"]["turns"]
        assert record["num_tokens"] == sum(turn["tokens"] for turn in turns) <= 48


def test_rows_choose_among_classes_and_answers_by_counts_repeat_a_run(model, tmp_path):
    rows = [{"question": f"{n}+1", "answer": str(n + 1), "kind": ("digits", "echo")[n % 2]} for n in range(16)]
    write_lines(tmp_path / "rows.jsonl", rows)
    classes = f"--environment.name digits {FILE}:Digits echo {FILE}:Echo --data.columns environment kind"
    data = f"--data.path {tmp_path}/rows.jsonl --environment.answer-steps 4"
    for name in ("a", "b"):
        run(model, tmp_path / name, 1, ROOM, ONE_RANK, classes, data)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    found = read_completions(tmp_path / "a")
    assert {record["columns"]["environment"] for record in found} == {"digits", "echo"}
    for record in found:
        is_echo = record["columns"]["environment"] == "echo"
        assert (record["rewards"]["environment"] == -1.0) == is_echo
        assert not is_echo or len(record["episode"]["turns"]) == 1


def test_an_agent_of_the_openai_client_is_trained_as_it_was_sampled(model, tmp_path):
    """Some turns end by themselves, and the agent asks again; others are cut off, which ends it without a reward."""
    pytest.importorskip("openai")  # comes with vLLM
    example = ROOT / "configs" / "examples" / "openai_agent.py"
    agent = f"--environment.name {example}:Agent --data.row {example}:row --reward.functions"
    stops = ("--generator.stop-token-ids", *range(2, 32, 3))
    run(model, tmp_path / "run", 1, ROOM, ONE_RANK, agent, *stops)
    records = read_completions(tmp_path / "run")
    for record in records:
        turns = record["episode"]["turns"]
        assert record["num_tokens"] == sum(turn["tokens"] for turn in turns)
        texts = [turn["text"] for turn in turns]
        is_whole = len(turns) == 2 and record["episode"]["ended_by"] == "done"
        assert record["rewards"]["Agent"] == float(is_whole and texts[0] != texts[1])
    assert {record["rewards"]["Agent"] for record in records} == {0.0, 1.0}
    steps = steps_of(tmp_path / "run")
    assert [record["environment/lost_count"] for record in steps] == [0, 0]
    assert all(record["mismatch/max"] < 1e-5 for record in steps)


def test_credit_for_turns_is_recorded_and_replayed(model, tmp_path):
    """On two engines, a step behind, with LoRA; the replay has one rank and no environment."""
    live, again = tmp_path / "live", tmp_path / "again"
    layout = f"{split(1, 0, 2)} --overlap-steps 1 {NO_KL} --trainer.lora-rank 2"
    run(model, live, 3, ROOM, layout, "--algorithm.advantages return_to_go --record")
    for step in (1, 2):
        batch = read_step(str(live), step).batch
        assert batch.turn_N.max() >= 2 and (batch.turn_N > 0).equal(batch.loss_mask_N)
        assert 0 < batch.earned_N.max() <= 1 and not batch.earned_N[batch.turn_N < 2].any()
    turns = [turn for record in read_completions(live) for turn in record["episode"]["turns"]]
    assert {"earned" in turn for turn in turns} == {True, False}  # a last turn needs none
    torchrun("grpo.replay", live, "--run-dir", again, nproc=1)
    assert_same_run(live, again)


def test_lost_episodes_are_left_out_and_too_many_end_the_run(model, tmp_path):
    """By an error of the environment, and by a prompt that `reset` makes longer than a micro-batch."""
    (tmp_path / "lost.py").write_text(
        "class Lost:\n    def __init__(self, loses): self.loses = loses\n"
        "    def reset(self, rollout):\n"
        "        self.rollout = rollout % self.loses\n"
        "        return '3+4' * (200 if self.rollout == 1 else 1)\n"
        "    def reply(self, text): return None\n"
        "    def get_reward(self):\n"
        "        if self.rollout == 0: raise ConnectionError('the judge is down')\n"
        "        return 1.0\n"
    )
    flags = f"{ROOM} {ONE_RANK} --environment.name {tmp_path}/lost.py:Lost --group-size 8 --environment.options loses"
    run(model, tmp_path / "some", 1, f"{flags} 8")
    for name in ("environment/lost_count", "reward/none_count"):
        assert [record[name] for record in steps_of(tmp_path / "some")] == [2 * 4] * 2  # two of each group
    output = run(model, tmp_path / "all", 1, f"{flags} 2", succeeds=False)
    for part in ("episodes were lost", "the judge is down", "seed", "row"):
        assert part in output
