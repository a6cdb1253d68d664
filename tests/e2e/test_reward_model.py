"""A reward model in whole runs: its scores are those of transformers, in steps and evaluations."""

import pathlib

import pytest

from configs.examples.toys import trained_tokenizer
from tests import read_lines
from tests.e2e.runs import TINY, read_completions, read_metrics, run_tiny, split
from tests.reward_scores import scores_by_transformers
from tests.tiny_models import make_reward_model
from tests.torchrun import run_torchrun

# Beside a reference, a step ahead
LAYOUT = f"{split(1, 1, 1)} --overlap-steps 1 --algorithm.advantages configs/examples/methods/gdpo.py:gdpo"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> str:
    """One with so long a preamble that some completions do not fit."""
    return with_preamble(tmp_path_factory.mktemp("reward_model"), 85)


def with_preamble(folder: pathlib.Path, num_tokens: int) -> str:
    """Another family than the policy's, with other tokens, whose chat template begins with so many."""
    tokenizer = trained_tokenizer(["1 + 1 = 2"], 300)
    tokenizer.chat_template = f"{{{{ 'x' * {num_tokens} }}}}" + tokenizer.chat_template
    return make_reward_model(folder, "qwen2-untied", tokenizer)


def test_scores_of_a_run(model, reward_model, tmp_path):
    run = tmp_path / "run"
    evaluation = "--evaluation.interval 2 --evaluation.num-prompts 4 --evaluation.num-samples 2"
    judge = f"--reward.model {reward_model} --reward.model-weight 0.5"
    output = run_tiny(model, run, LAYOUT, judge, evaluation, nproc=3)

    trained = read_completions(run)
    held_out = read_lines(run / "evaluation.jsonl")
    assert len(trained) == 2 * 16 and len(held_out) == 2 * 4 * 3
    assert 0 < check_scores([*trained, *held_out], reward_model) < 20  # of 56
    for step, metrics in enumerate([m for m in read_metrics(run) if "loss" in m], start=1):
        scores = [line["rewards"]["reward_model"] for line in trained if line["step"] == step]
        there = [score for score in scores if score is not None]
        assert metrics["reward/reward_model"] == pytest.approx(sum(there) / len(there), abs=1e-5)
        assert metrics["reward/failed_count"] == len(scores) - len(there)
        assert "kl" in metrics
        assert metrics["grad_norm"] > 1e-3
    assert "reward function reward_model failed for" in output and "not 1 to 127 tokens" in output


def test_a_model_that_can_read_nothing_ends_the_run_on_every_rank(model, tmp_path):
    """The others are told, although they wait for what the driver asks."""
    judge = f"--reward.model {with_preamble(tmp_path / 'judge', 120)}"
    own = f"--model.path {model} --run-dir {tmp_path}/run"
    result = run_torchrun("train_grpo.py", TINY, own, split(1, 1, 1), judge, nproc=3)
    assert result.returncode
    assert "reward function reward_model failed for all 16 completions: not 1 to 127 tokens" in result.stdout


def check_scores(lines: list[dict], folder: str) -> int:
    """Each is what transformers says of question and answer, except of those that are too long, which are counted."""
    conversations = [
        [{"role": "user", "content": line["columns"]["question"]}, {"role": "assistant", "content": line["completion"]}]
        for line in lines
    ]
    wanted = scores_by_transformers(folder, conversations)
    assert max(wanted) - min(wanted) > 1
    failed = [line for line in lines if line["rewards"]["reward_model"] is None]
    for line, score in zip(lines, wanted, strict=True):
        if line in failed:
            assert line["reward"] is None and list(line["failures"]) == ["reward_model"]
            continue
        others = [value for name, value in line["rewards"].items() if name != "reward_model"]
        assert line["rewards"]["reward_model"] == pytest.approx(score, abs=1e-5)
        assert line["reward"] == pytest.approx(0.5 * score + sum(others), abs=1e-5)
    return len(failed)
