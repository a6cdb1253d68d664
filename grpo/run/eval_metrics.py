"""Held-out accuracy and pass@k, and the pass rates of training prompts, from scored completions.

A completion passed if the first reward function gave it at least 1.

Layer 0: pure functions. Left out: benchmark suites, judges, confidence intervals.
"""

import math
import statistics

from grpo.types import Rollout


def passed(rollout: Rollout, function: str) -> bool | None:
    """Whether reward function `function` gave at least 1; None if it gave no value."""
    value = rollout.rewards.get(function)
    return None if value is None else value >= 1


def pass_rates(rollouts: list[Rollout], group_size: int, function: str) -> dict[int, float]:
    """Row of the data set -> share of its completions that passed, for `PromptStream.record`.

    Completions for which `function` gave no value are left out; a row without any other, or that is in no data set, is
    absent. A row whose prompt was drawn twice counts once, with both groups' completions.

    Raises:
        ValueError: the rollouts are not whole groups.
    """
    _check_groups(rollouts, group_size)
    verdicts: dict[int, list[bool]] = {}
    for rollout in rollouts:
        verdict = passed(rollout, function)
        if verdict is not None and rollout.prompt.row >= 0:
            verdicts.setdefault(rollout.prompt.row, []).append(verdict)
    return {row: statistics.fmean(of_row) for row, of_row in verdicts.items()}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples passes, estimated without bias from n samples of which c passed.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv:2107.03374, eq. 1. Computed in integers, so exact for any n.

    Raises:
        ValueError: k is not between 1 and n, or c not between 0 and n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples; take k from 1 to {num_samples}")
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"{num_passed} of {num_samples} samples cannot have passed; count them among the samples")
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_passed, k)) / num_subsets


def evaluation_metrics(
    greedy: list[Rollout], samples: list[Rollout], num_samples: int, function: str
) -> dict[str, float]:
    """Accuracy, reward, lengths (in tokens) of the greedy completions and, if there are samples, pass@k and theirs.

    greedy: one completion per prompt. samples: `num_samples` per prompt, group after group, or none at all. One for
    which `function` gave no value, greedy or sample, has not passed. `eval/pass_at_K`, K = 1, 2, 4, ... up to
    `num_samples` and that itself, is the mean of the prompts' estimates. Means of rewards are over the completions that
    have one, NaN if none has; `eval/none_count` counts the greedy ones that have none.

    Raises:
        ValueError: there are no greedy completions, or the samples are not `num_samples` for each of them.
    """
    if not greedy:
        raise ValueError("0 greedy completions; pass one for each held-out prompt")
    metrics = {
        "eval/accuracy": sum(passed(r, function) is True for r in greedy) / len(greedy),
        "eval/reward_mean": _reward_mean(greedy),
        "eval/completion_length_mean": _length_mean(greedy),
        "eval/truncated_frac": sum(r.completion.truncated for r in greedy) / len(greedy),
        "eval/none_count": sum(r.reward is None for r in greedy),
    }
    if not samples:
        return metrics
    _check_groups(samples, num_samples)
    if len(samples) != len(greedy) * num_samples:
        raise ValueError(
            f"{len(samples)} samples of {len(greedy)} prompts, expected {num_samples} of each; pass all of them"
        )
    num_passed = [
        sum(passed(r, function) is True for r in samples[first : first + num_samples])
        for first in range(0, len(samples), num_samples)
    ]
    for k in sorted({*(2**i for i in range(num_samples.bit_length())), num_samples}):
        metrics[f"eval/pass_at_{k}"] = statistics.fmean(pass_at_k(num_samples, c, k) for c in num_passed)
    return metrics | {
        "eval/sample_reward_mean": _reward_mean(samples),
        "eval/sample_length_mean": _length_mean(samples),
    }


def _check_groups(rollouts: list[Rollout], group_size: int) -> None:
    if group_size < 1 or len(rollouts) % group_size:
        raise ValueError(
            f"{len(rollouts)} rollouts are not whole groups of {group_size}; pass all those of the prompts"
        )


def _reward_mean(rollouts: list[Rollout]) -> float:
    rewards = [r.reward for r in rollouts if r.reward is not None]
    return statistics.fmean(rewards) if rewards else math.nan


def _length_mean(rollouts: list[Rollout]) -> float:
    return statistics.fmean(r.completion.num_tokens for r in rollouts)
