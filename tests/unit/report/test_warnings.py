"""Warnings in words, on made-up streams of metrics: at the right step, once, and again when they come back."""

import math
import re

import pytest

from grpo.report.warnings import CurveReader, Evaluation, lost_accuracy

# name: (streams, {step: how its warning begins})
STREAMS = {
    "entropy": (  # means of ten: 0.0100, 0.0091
        {"reward/mean": [0.5] * 12, "entropy": [0.01] * 9 + [0.0109, 0.001, 0.001]},
        {11: "the policy's entropy is 0.00919 nats"},
    ),
    "entropy of SFT": ({"entropy": [0.001] * 12}, {}),
    "equal rewards": (
        {"groups/zero_variance_frac": [1, 1, 0.9, 1, 1, 1, 1, 0.5, 1, 1, 1]},
        {6: "in 3 steps the rewards", 11: "in 3 steps the rewards"},
    ),
    "equal rewards with a teacher": ({"groups/zero_variance_frac": [1] * 6, "distill/reverse_kl": [0.1] * 6}, {}),
    "truncation": (  # means of ten: 0.3, 0.35, 0.3
        {"completion/truncated_frac": [0.3] * 10 + [0.8, -0.2]},
        {11: "35% of the completions run out of tokens"},
    ),
    "conversations out of turns": (  # half of them; of tokens only a twentieth
        {
            "completion/truncated_frac": [0.55] * 10,
            "environment/ended_by/tokens_frac": [0.05] * 10,
            "environment/ended_by/turns_frac": [0.5] * 10,
            "environment/ended_by/seconds_frac": [0.0] * 10,
        },
        {10: "50% of the conversations run out of turns: raise environment.max_turns(?!.*tokens)"},
    ),
    "conversations out of tokens and seconds": (
        {
            "completion/truncated_frac": [0.4] * 10,
            "environment/ended_by/tokens_frac": [0.2] * 10,
            "environment/ended_by/turns_frac": [0.0] * 10,
            "environment/ended_by/seconds_frac": [0.2] * 10,
        },
        {10: "20% .* tokens: raise generator.max_completion_tokens .*; 20% .* seconds: raise environment.rollout_sec"},
    ),
    "not finite": (
        {"completion/truncated_frac": [math.nan, None, math.inf, *[0.4] * 10]},
        {13: "40% of the completions"},
    ),
    "no step": (  # 20 x 4e-8 is less than 1e-6, 25 x 4e-8 is not
        {"reward/mean": [0.5, 0.7] * 13, "learning_rate": [4e-8] * 26},
        {20: "after 20 steps .* 8e-07; raise trainer.learning_rate"},
    ),
    "no KL": (
        {"reward/mean": [0.5, 0.7] * 12, "learning_rate": [1e-3] * 24, "kl": [1e-7] * 22 + [1e-4] * 2},
        {20: "after 20 steps .* 0.02, kl is 1e-07"},
    ),
    "a few steps": ({"reward/mean": [0.5, 0.7] * 15, "learning_rate": [1e-6] * 30, "kl": [1e-5] * 30}, {}),
    "no rise": (
        {"reward/mean": [0.5, 0.6] * 26},
        {50: r"in 50 steps .*\(0 ± 0.0236\)"},
    ),
    "no rise with a teacher": ({"reward/mean": [0.0] * 52, "distill/reverse_kl": [0.1] * 52}, {}),
    "a rise": ({"reward/mean": [0.5, 0.6] * 20 + [0.6, 0.7] * 6}, {}),  # 0.1, more than 2 x 0.0236
    "a collapse is no short limit": (  # means of ten: 0.09 at step 10; 0.4 - 0.09 is more than half of 0.5
        {
            "reward/mean": [0.4, 0.3, 0.2] + [0.0] * 9,
            "reward/std": [0.5] * 12,
            "completion/truncated_frac": [0.0, 0.5] + [1.0] * 10,
            "entropy": [0.0] * 12,
        },
        {10: "the reward fell from 0.4 to 0.09"},
    ),
    "noise": (  # the mean of the first ten is 0.52, of the last ten 0.49; a single step of few completions was 0.75
        {
            "reward/mean": [0.75, *[0.45, 0.55, 0.35, 0.65, 0.45] * 5],
            "reward/std": [0.3] * 26,
            "learning_rate": [1e-3] * 26,
        },
        {},
    ),
    "a slow fall": (  # means of ten: 0.6, and 0.44 when nine of ten are 0.42; 0.16 is more than half of 0.3
        {"reward/mean": [0.6] * 10 + [0.42] * 12, "reward/std": [0.3] * 22, "learning_rate": [1e-3] * 22},
        {19: "the reward fell from 0.6 to 0.438: the updates are too large"},
    ),
    "no fall of a policy that has not moved": (  # nor is it told to explore, by a lower rate, and by a higher one
        {
            "reward/mean": [0.6] * 10 + [0.42] * 12,
            "reward/std": [0.3] * 22,
            "entropy": [0.001] * 22,
            "learning_rate": [0.0] * 22,
        },
        {20: "after 20 steps the policy is where it began: the learning rates add up to 0; raise"},
    ),
    "too early to tell": ({"completion/truncated_frac": [0.9] * 9}, {}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name):
    streams, expected = STREAMS[name]
    watch, (length,) = CurveReader(), {len(stream) for stream in streams.values()}
    found = {i + 1: watch.look({name: stream[i] for name, stream in streams.items()}) for i in range(length)}
    found = {step: texts for step, texts in found.items() if texts}
    assert found.keys() == expected.keys()
    for step, (text,) in found.items():
        assert re.match(expected[step], text) and "\n" not in text


@pytest.mark.parametrize("kl_is_to_start", [True, False])
def test_a_small_kl_to_a_reference_that_moves_is_no_reason_to_learn_faster(kl_is_to_start):
    """It is no sign of standing still, which would also silence the warning of a reward that fell by half."""
    watch = CurveReader(kl_is_to_start)
    warnings = []
    for reward in [0.6] * 10 + [0.1] * 12:
        warnings += watch.look({"reward/mean": reward, "reward/std": 0.3, "learning_rate": 1e-3, "kl": 1e-8})
    (warning,) = warnings
    expected = "the policy is where it began" if kl_is_to_start else "the reward fell from 0.6"
    assert expected in warning


@pytest.mark.parametrize(
    ("evaluations", "why"),
    [
        ([(0.5, 0, 0.4)], ""),
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.55, 0, 0.6)], "being gamed"),  # 0.05 below the best, the reward 0.1 higher
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.58, 0, 0.6)], ""),  # 0.02 is less than 0.03
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.55, 0, 0.5)], "did not rise either"),
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.65, 0, 0.6)], ""),
        ([(0.5, 0, 0.4), (0.6, 0.03, 0.5), (0.48, 0.04, 0.4)], ""),  # 2.5 x 0.05 is more than 0.12
        ([(0.5, 0, 0.4), (0.6, 0.03, 0.5), (0.47, 0.04, 0.4)], "did not rise either"),
        ([(0.5, 0, math.nan), (0.6, 0, math.nan), (0.55, 0, math.nan)], "learned by heart"),  # SFT
    ],
)
def test_lost_accuracy(evaluations, why):
    text = lost_accuracy([Evaluation(*numbers) for numbers in evaluations])
    assert why in text and bool(why) == bool(text)


def test_an_accuracy_that_differs_by_chance_asks_for_no_lower_rate():
    """The policy is the same; samples of it are not."""
    for rate, num_told in ((0.0, 0), (1e-3, 1)):
        watch = CurveReader()
        watch.look({"eval/accuracy": 0.5, "eval/accuracy_stderr": 0.01})
        for _ in range(10):
            watch.look({"reward/mean": 0.5, "learning_rate": rate})
        assert len(watch.look({"eval/accuracy": 0.4, "eval/accuracy_stderr": 0.01})) == num_told


def test_accuracy_before_the_first_step_counts():
    watch = CurveReader()
    assert watch.look({"eval/accuracy": 0.55, "eval/accuracy_stderr": 0.02}) == []
    found = [watch.look({"reward/mean": reward}) for reward in (0.4, 0.42, 0.3, 0.2)]  # 0.33 on average
    found += [watch.look({"eval/accuracy": 0.23, "eval/accuracy_stderr": 0.02})]
    assert found[:4] == [[]] * 4 and re.match("eval/accuracy .* 0.23 .* 0.55, .* did not rise either", found[4][0])


def test_each_held_out_set_is_watched_for_itself():
    watch = CurveReader()
    assert watch.look({"eval/a/accuracy": 0.5, "eval/b/accuracy": 0.1}) == []  # before the first step
    found = []
    for reward, a, b in ((0.2, 0.5, 0.5), (0.4, 0.4, 0.6), (0.6, 0.3, 0.7), (0.7, 0.6, 0.7), (0.8, 0.2, 0.8)):
        for _ in range(10):
            assert watch.look({"reward/mean": reward}) == []
        found.append(watch.look({"eval/a/accuracy": a, "eval/b/accuracy": b, "eval/a/reward_mean": 1.0}))
    assert [len(texts) for texts in found] == [0, 1, 0, 0, 1]  # it went away in between
    assert found[1][0].startswith("eval/a/accuracy is 0.4 and was 0.5, while the reward rose from 0.2 to 0.4")


def test_steps_that_outlast_the_launchers_patience_are_named():
    """A long first step, which compiles, is no reason. Nobody loses patience with a plain process."""
    for launcher_seconds, num_told in ((30, 1), (600, 0), (math.inf, 0)):
        watch = CurveReader(launcher_seconds=launcher_seconds)
        found = [watch.look({"time/step": seconds}) for seconds in (90.0, 14.0, 14.0, 16.0, 20.0, 17.0)]
        assert [len(texts) for texts in found] == [0] * 4 + [num_told, 0]
