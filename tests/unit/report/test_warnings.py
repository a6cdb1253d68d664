"""Warnings in words, on made-up streams of metrics: at the right step, once, and again when they come back."""

import math
import re

import pytest

from grpo.report.warnings import CurveReader

# name: (streams, {step: how its warning begins})
STREAMS = {
    "equal rewards": (
        {"groups/zero_variance_frac": [1, 1, 0.9, 1, 1, 1, 1, 0.5, 1, 1, 1]},
        {6: "in 3 steps the rewards .* too easy or too hard", 11: "in 3 steps the rewards"},
    ),
    "equal rewards with a teacher": ({"groups/zero_variance_frac": [1] * 6, "distill/reverse_kl": [0.1] * 6}, {}),
    "equal rewards because all is cut off": (
        {"groups/zero_variance_frac": [1] * 4, "completion/truncated_frac": [0, 1, 1, 1]},
        {3: "in 3 steps the rewards .*: 67% of the completions run out of tokens: raise generator.max_completion_tok"},
    ),
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
    "all truncated and masked": (  # NaN in a run, None in what a resumed run reads
        {
            "entropy": [math.nan, None, 2.0, math.nan],
            "reward/mean": [0.5] * 4,
            "completion/truncated_frac": [1.0, 1.0, 0.5, 1.0],
        },
        dict.fromkeys((1, 4), "all completions .*mask_truncated leaves none .*: raise generator.max_completion_tokens"),
    ),
    "no reward at all": (
        {"entropy": [math.nan], "reward/mean": [math.nan], "completion/truncated_frac": [1.0]},
        {1: "no completion has a reward"},
    ),
    "all truncated and masked, with a teacher": (
        {
            "entropy": [math.nan],
            "reward/mean": [math.nan],
            "distill/reverse_kl": [0.5],
            "completion/truncated_frac": [1.0],
        },
        {1: "all completions .*mask_truncated"},
    ),
    "a skipped update": ({"entropy": [math.nan], "reward/mean": [0.5], "skipped_frac": [1.0]}, {}),
    "no step": (  # 20 x 4e-8 is less than 1e-6, 25 x 4e-8 is not; SFT too
        {"learning_rate": [4e-8] * 26},
        {20: "after 20 steps .* 8e-07; raise trainer.learning_rate"},
    ),
    "a few steps": ({"learning_rate": [1e-6] * 30}, {}),
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
