"""Evaluation: pass@k against subsets counted one by one, and metrics a person can check."""

import itertools
import math

import pytest

from grpo.report.rollout_metrics import (
    evaluation_metrics,
    pass_at_k,
    rollout_metrics,
)
from grpo.types import Prompt, Rollout
from tests.rollouts import completion


def make_rollout(value, reward=None, row=0, num_tokens=2, truncated=False):
    """One that reward function `f` gave `value`, and all functions together `reward` (`value` if not given)."""
    prompt = Prompt(index=0, ids=[0], row=row)
    facts = {"text": "text", "rewards": {"other": 1.0, "f": value}, "reward": value if reward is None else reward}
    return completion([1] * num_tokens, prompt=prompt, ended_by="tokens" if truncated else "stop", **facts)


# ---- pass@k


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(num_samples):
    for num_passed in range(num_samples + 1):
        samples = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(samples, k))
            assert pass_at_k(num_samples, num_passed, k) == sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_does_not_overflow():
    # C(n - c, k) / C(n, k) with c = 3: product of 1 - k / i over i = n - 2 .. n
    product = math.prod(1 - 1000 / i for i in (4998, 4999, 5000))
    assert pass_at_k(5000, 3, 1000) == pytest.approx(1 - product, abs=1e-12)


# ---- pass rates


def test_passed_is_at_least_the_pass_value():
    greedy = [make_rollout(value) for value in (1.0, 1.5, 0.99, 0.5, 0.4, None)]
    for function, pass_value, num_passed in (("f", 1.0, 2), ("f", 0.5, 4), ("other", 1.0, 6), ("absent", 0.0, 0)):
        metrics = evaluation_metrics(greedy, [], 0, [function], None, pass_value)
        assert metrics["eval/accuracy"] == num_passed / 6


# ---- metrics


def test_greedy_metrics():
    greedy = [
        make_rollout(1.0, reward=1.5, num_tokens=4),
        make_rollout(0.0, reward=0.5, num_tokens=8, truncated=True),
        make_rollout(None, num_tokens=6),
        make_rollout(2.0, num_tokens=2),
    ]
    assert evaluation_metrics(greedy, [], 0, ["f"]) == {
        "eval/accuracy": 0.5,  # one without a value has not passed
        "eval/accuracy_stderr": 0.25,  # sqrt(0.5 * 0.5 / 4)
        "eval/reward_mean": 4 / 3,  # (1.5 + 0.5 + 2) / 3
        "eval/completion_length_mean": 5.0,
        "eval/truncated_frac": 0.25,
        "eval/none_count": 1,
    }


def test_sample_metrics_are_means_over_prompts():
    greedy = [make_rollout(1.0), make_rollout(0.0), make_rollout(0.0)]
    values = [
        *(1.0, 0.0, 0.0, 0.0, 0.0, 0.0),  # 1 of 6
        *(1.0, 1.0, 1.0, None, None, 0.0),  # 3 of 6: without a value is not passed
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),  # 0 of 6
    ]
    samples = [make_rollout(value, num_tokens=1 + i // 6) for i, value in enumerate(values)]
    metrics = evaluation_metrics(greedy, samples, 6, ["f"])
    expected = {
        "eval/pass_at_1": (1 / 6 + 1 / 2 + 0) / 3,
        "eval/pass_at_2": (5 / 15 + 12 / 15 + 0) / 3,  # 15 pairs: 5 with the one; 3 without any of the three
        "eval/pass_at_4": (10 / 15 + 1 + 0) / 3,  # 15 fours: 5 without the one
        "eval/pass_at_6": 2 / 3,
        "eval/sample_reward_mean": 4 / 16,
        "eval/sample_length_mean": 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert list(metrics)[6:] == list(expected)
    assert metrics["eval/accuracy"] == pytest.approx(1 / 3)


def test_without_any_reward_the_mean_is_nan_not_zero():
    metrics = evaluation_metrics([make_rollout(None)], [make_rollout(None)] * 2, 2, ["f"])
    assert math.isnan(metrics["eval/reward_mean"]) and math.isnan(metrics["eval/sample_reward_mean"])
    assert metrics["eval/accuracy"] == metrics["eval/pass_at_2"] == 0.0


def of_source(source: str, reward: float, text: str = "text") -> Rollout:
    prompt = Prompt(index=0, ids=[0], row=0, source=source)
    return completion([1, 1], prompt=prompt, text=text, rewards={"f": reward}, reward=reward)


def test_several_held_out_sets_have_names_a_single_one_has_not():
    greedy = [of_source("math", 1.0), of_source("math", 0.0), of_source("code", 1.0)]
    samples = [of_source("math", 1.0)] * 2 + [of_source("math", 0.0)] * 2 + [of_source("code", 0.0)] * 2
    metrics = evaluation_metrics(greedy, samples, 2, ["f"])
    assert metrics["eval/math/accuracy"] == metrics["eval/math/pass_at_2"] == 0.5
    assert (metrics["eval/code/accuracy"], metrics["eval/code/pass_at_1"]) == (1.0, 0.0)
    assert evaluation_metrics(greedy[:2], [], 0, ["f"])["eval/accuracy"] == 0.5


def test_a_wrong_format_does_not_look_like_a_bad_model():
    """Three of four completions have an answer where the reward looks, one of them a right one."""
    texts = ["<answer>1</answer>", "<answer>2</answer>", "<answer> </answer><answer>3</answer>", "\\boxed{1}"]
    greedy = [of_source("", float(i == 0), text) for i, text in enumerate(texts)]
    metrics = evaluation_metrics(greedy, [], 0, ["f"], "answer_tag")
    assert (metrics["eval/accuracy"], metrics["eval/has_answer_frac"]) == (0.25, 0.75)
    assert evaluation_metrics(greedy, [], 0, ["f"], "boxed")["eval/has_answer_frac"] == 0.25
    assert "eval/has_answer_frac" not in evaluation_metrics(greedy, [], 0, ["f"])
    assert rollout_metrics(greedy, 2, "answer_tag")["completion/has_answer_frac"] == 0.75
    assert "completion/has_answer_frac" not in rollout_metrics(greedy, 2)


def test_sources_have_their_reward_and_their_share():
    rollouts = [of_source("a", 1.0)] * 4 + [of_source("b", 0.5), of_source("b", 0.0)]
    metrics = rollout_metrics(rollouts, 2)
    assert (metrics["reward/source/a"], metrics["reward/source/b"]) == (1.0, 0.25)
    assert (metrics["prompt/source/a"], metrics["prompt/source/b"]) == pytest.approx((2 / 3, 1 / 3))
    assert not any("source" in name for name in rollout_metrics([of_source("", 1.0)] * 2, 2))
