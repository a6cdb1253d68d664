"""Warnings in words, on made-up streams of metrics: at the right step, once, and again when they come back."""

import math

import pytest

from grpo.config import WarningsConfig
from grpo.run.report.warnings import RULES, Watch, gamed_reward

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
    ("evaluations", "warns"),
    [
        ([(0.5, 0.4)], False),
        ([(0.5, 0.4), (0.6, 0.5), (0.55, 0.6)], True),  # 0.05 below the best, the reward 0.1 higher than then
        ([(0.5, 0.4), (0.6, 0.5), (0.58, 0.6)], False),  # 0.02 is less than accuracy_drop
        ([(0.5, 0.4), (0.6, 0.5), (0.55, 0.5)], False),  # both fall
        ([(0.5, 0.4), (0.6, 0.5), (0.65, 0.6)], False),
    ],
)
def test_gamed_rewards(evaluations, warns):
    assert bool(gamed_reward(evaluations, WarningsConfig())) == warns
    assert gamed_reward(evaluations, WarningsConfig(accuracy_drop=0)) == ""


def test_each_held_out_set_is_watched_for_itself():
    watch = Watch(CONFIG)
    assert watch.look_at_evaluation({"eval/a/accuracy": 0.9, "eval/b/accuracy": 0.1}) == []  # before the first step
    found = []
    for reward, a, b in ((0.2, 0.5, 0.5), (0.4, 0.4, 0.6), (0.6, 0.3, 0.7), (0.7, 0.6, 0.7), (0.8, 0.2, 0.8)):
        for _ in range(4):
            assert watch.look({"reward/mean": reward}) == []
        found.append(watch.look_at_evaluation({"eval/a/accuracy": a, "eval/b/accuracy": b, "eval/a/reward_mean": 1.0}))
    assert [len(texts) for texts in found] == [0, 1, 0, 0, 1]  # it went away in between
    assert found[1][0].startswith("eval/a/accuracy is 0.4 and was 0.5, while the reward rose from 0.2 to 0.4")
