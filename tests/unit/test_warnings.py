"""Warnings in words, on made-up streams of metrics: at the right step, once, and again when they come back."""

import math

import pytest

from grpo.config import WarningsConfig
from grpo.report.warnings import RULES, Evaluation, Watch, lost_accuracy

CONFIG = WarningsConfig(window=4)


def said(streams: dict[str, list[float]], config: WarningsConfig = CONFIG) -> dict[int, list[str]]:
    """The warnings of each step, from 1 on, that has any."""
    watch, (length,) = Watch(config), {len(stream) for stream in streams.values()}
    found = {i + 1: watch.look({name: stream[i] for name, stream in streams.items()}) for i in range(length)}
    return {step: texts for step, texts in found.items() if texts}


# name: (streams, {step: how its warning begins}, what turns it off)
STREAMS = {
    # median of 1.0, 1.2, 1.1, 0.9 is 1.05, of the distances to it 0.1: a spike is beyond 1.05 +- 1.0
    "spike": ({"loss": [1.0, 1.2, 1.1, 0.9, 2.1, 1.0]}, {5: "the loss is 2.1, usually 1.05"}, {"loss_spike": 0}),
    "high, but no spike": ({"loss": [1.0, 1.2, 1.1, 0.9, 2.0, 1.0]}, {}, {}),
    "downwards": ({"loss": [1.0, 1.2, 1.1, 0.9, -0.1]}, {5: "the loss is -0.1"}, {"loss_spike": 0}),
    "too early to tell": ({"loss": [1.0, 1.2, 1.1, 9.0]}, {}, {}),
    "a loss of GRPO": ({"loss": [1e-9, -1e-9, 2e-9, 1e-9, 0.05]}, {}, {}),  # below 0.1 nats
    "twice": ({"loss": [1.0, 1.2, 1.1, 0.9, 9, 9, 1, 9]}, {5: "the loss is 9", 8: "the loss is 9"}, {"loss_spike": 0}),
    # median change 0.1, so the error is 1.4826 * 0.1 / sqrt(4) = 0.074 and five of them 0.37; means 0.95, 0.725, 0.5
    "reward falls": (
        {"reward/mean": [0.9, 1.0, 0.9, 1.0, 0.9, 1.0, 0.9, 1.0, 0.0, 0.1, 0.0, 0.1]},
        {10: "the mean reward fell from 0.95 to 0.5: unless the prompts"},
        {"reward_fall": 0},
    ),
    "reward falls as far as chance": ({"reward/mean": [0.9, 1.0, 0.9, 1.0, 0.6, 0.7, 0.6, 0.7, 0.6, 0.7]}, {}, {}),
    "reward falls, without noise": ({"reward/mean": [0.5] * 6 + [0.49, 0.48, 0.48]}, {9: "the mean reward"}, {}),
    "reward of a short run": ({"reward/mean": [0.9, 0.9, 0.9, 0.9, 0, 0, 0]}, {}, {}),
    "entropy": (
        {"reward/mean": [0.5] * 6, "entropy": [0.5, 0.04, 0.004, 0.004, 0.004, 0.004]},  # means of four: 0.013, 0.004
        {6: "the policy's entropy is 0.004 nats"},
        {"min_entropy": 0},
    ),
    "entropy of SFT": ({"entropy": [0.001] * 6}, {}, {}),
    "equal rewards": (
        {"groups/zero_variance_frac": [1, 1, 0.9, 1, 1, 1, 1, 0.5, 1, 1, 1]},
        {6: "in 3 steps the rewards", 11: "in 3 steps the rewards"},
        {"equal_reward_steps": 0},
    ),
    "equal rewards with a teacher": ({"groups/zero_variance_frac": [1] * 6, "distill/reverse_kl": [0.1] * 6}, {}, {}),
    "truncation": (
        {"completion/truncated_frac": [0.1, 0.2, 0.4, 0.4, 0.4, 0.0]},  # means of four: 0.275, 0.35, 0.3
        {5: "35% of the completions run out of tokens"},
        {"max_truncated": 1},
    ),
    "KL": (
        {"mismatch/kl": [0.001, 0.001, 0.001, 0.001, 0.011, 0.011]},  # means: 0.001, 0.0035, 0.006 > 5 x 0.001
        {6: "mismatch/kl rose from 0.001 to 0.006 nats"},
        {"kl_rise": 0},
    ),
    "KL of rounding": ({"mismatch/kl": [1e-12] * 4 + [1e-9] * 4}, {}, {}),
    "sample size": (
        {"mismatch/ess": [0.9, 0.8, 0.7, 0.6, 0.5]},  # means: 0.75, 0.65
        {5: "the effective sample size is 65% of the tokens"},
        {"min_sample_size": 0},
    ),
    "not finite": ({"mismatch/ess": [math.nan, None, math.inf, 0.6, 0.6, 0.6, 0.6]}, {7: "the effective"}, {}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name):
    streams, expected, off = STREAMS[name]
    found = said(streams)
    assert found.keys() == expected.keys()
    for step, (text,) in found.items():
        assert text.startswith(expected[step]) and "\n" not in text
    if off:
        assert said(streams, WarningsConfig(window=4, **off)) == {}


def test_every_rule_has_a_stream():
    everything = {text for streams, *_ in STREAMS.values() for texts in said(streams).values() for text in texts}
    assert len({text.split()[1] for text in everything}) >= len(RULES)


@pytest.mark.parametrize(
    ("evaluations", "why"),
    [
        ([(0.5, 0, 0.4)], ""),
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.55, 0, 0.6)], "being gamed"),  # 0.05 below the best, the reward 0.1 higher
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.58, 0, 0.6)], ""),  # 0.02 is less than accuracy_drop
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.55, 0, 0.5)], "did not rise either"),
        ([(0.5, 0, 0.4), (0.6, 0, 0.5), (0.65, 0, 0.6)], ""),
        ([(0.5, 0, 0.4), (0.6, 0.03, 0.5), (0.48, 0.04, 0.4)], ""),  # 2.5 x 0.05 is more than 0.12
        ([(0.5, 0, 0.4), (0.6, 0.03, 0.5), (0.47, 0.04, 0.4)], "did not rise either"),
    ],
)
def test_lost_accuracy(evaluations, why):
    evaluations = [Evaluation(*numbers) for numbers in evaluations]
    text = lost_accuracy(evaluations, WarningsConfig())
    assert why in text and bool(why) == bool(text)
    assert lost_accuracy(evaluations, WarningsConfig(accuracy_drop=0)) == ""


def test_accuracy_before_the_first_step_counts():
    watch = Watch(CONFIG)
    assert watch.look_at_evaluation({"eval/accuracy": 0.55, "eval/accuracy_stderr": 0.02}) == []
    found = [watch.look({"reward/mean": reward}) for reward in (0.4, 0.42, 0.3, 0.2)]  # 0.33 on average
    found += [watch.look_at_evaluation({"eval/accuracy": 0.23, "eval/accuracy_stderr": 0.02})]
    text = "eval/accuracy is 0.23 and was 0.55, and the reward did not rise either: the updates are too large"
    assert found[:4] == [[]] * 4 and found[4][0].startswith(text)


# Learning rate: mean rewards of 40 steps of GRPO on word problems, all from one start (configs/RESULTS.md)
MEASURED = {
    "1.5e-4": """
        0.38 0.40 0.40 0.48 0.41 0.40 0.29 0.28 0.27 0.23 0.16 0.17 0.12 0.14 0.16 0.19 0.10 0.13 0.07 0.12
        0.14 0.14 0.10 0.07 0.08 0.12 0.05 0.07 0.08 0.02 0.05 0.04 0.04 0.09 0.02 0.05 0.05 0.02 0.04 0.05
    """,
    "5e-5": """
        0.38 0.38 0.35 0.51 0.53 0.53 0.49 0.46 0.46 0.56 0.53 0.49 0.45 0.56 0.47 0.58 0.57 0.57 0.50 0.47
        0.53 0.52 0.43 0.55 0.48 0.54 0.56 0.49 0.48 0.50 0.60 0.49 0.47 0.56 0.49 0.55 0.59 0.50 0.57 0.54
    """,
    "1e-5": """
        0.41 0.44 0.41 0.42 0.43 0.44 0.42 0.52 0.48 0.48 0.45 0.49 0.45 0.42 0.50 0.49 0.50 0.47 0.52 0.52
        0.48 0.60 0.55 0.55 0.57 0.55 0.56 0.57 0.56 0.52 0.58 0.60 0.63 0.54 0.55 0.53 0.53 0.51 0.55 0.60
    """,
}


@pytest.mark.parametrize(("rate", "step"), [("1.5e-4", 20), ("5e-5", None), ("1e-5", None)])
def test_measured_rewards(rate, step):
    found = said({"reward/mean": [float(reward) for reward in MEASURED[rate].split()]}, WarningsConfig())
    assert list(found) == ([step] if step else [])


def test_each_held_out_set_is_watched_for_itself():
    watch = Watch(CONFIG)
    assert watch.look_at_evaluation({"eval/a/accuracy": 0.5, "eval/b/accuracy": 0.1}) == []  # before the first step
    found = []
    for reward, a, b in ((0.2, 0.5, 0.5), (0.4, 0.4, 0.6), (0.6, 0.3, 0.7), (0.7, 0.6, 0.7), (0.8, 0.2, 0.8)):
        for _ in range(4):
            assert watch.look({"reward/mean": reward}) == []
        found.append(watch.look_at_evaluation({"eval/a/accuracy": a, "eval/b/accuracy": b, "eval/a/reward_mean": 1.0}))
    assert [len(texts) for texts in found] == [0, 1, 0, 0, 1]  # it went away in between
    assert found[1][0].startswith("eval/a/accuracy is 0.4 and was 0.5, while the reward rose from 0.2 to 0.4")
