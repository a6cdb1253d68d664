"""Metrics of a step and of an evaluation: rewards, lengths, held-out accuracy, pass@k, staleness.

A completion passes if the first reward function, or the environment, gives it at least `reward.pass_value`. Sampling
is measured by counts, never by clocks.
"""

import collections
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from grpo.algorithm.groups import are_equal, pass_values
from grpo.algorithm.importance import with_effective_sample_size
from grpo.metrics import StepMetrics, peak_bytes
from grpo.report.samples import finite_or_none
from grpo.rewards.answers import extract_answer
from grpo.types import Rollout, Scalars, TrainBatch

# What is counted in an episode, and how it can end
EVENTS = (
    "calls",
    "bad_calls",
    "unread_calls",
    "tool_errors",
    "hung_calls",
    "cut_answers",
)
REWARD_STATISTICS = ("mean", "std", "none_count", "failed_count", "kl_penalty")  # `reward/NAME` of no function
ENDS = ("done", "tokens", "turns", "seconds", "hung", "lost")


def rollout_metrics(
    rollouts: list[Rollout],
    group_size: int,
    answer_format: str | None = None,
) -> Scalars:
    """Return the rewards and lengths (in tokens) of one step's completions, which lie group by group.

    Statistics of rewards are over the completions that have one, and NaN if none has; `reward/std` is the population's,
    `reward/NAME` the unweighted mean of a reward function. If prompts have sources, `reward/source/NAME` is the mean
    reward of a source and `prompt/source/NAME` its share. answer_format: the format in which reward functions look for
    answers, None if none does.
    """
    rewards = [r.reward for r in rollouts if r.reward is not None]
    num_failed = sum(bool(r.failures) for r in rollouts)
    lengths = [r.num_tokens for r in rollouts]
    prompt_lengths = [len(r.prompt_ids_T) for r in rollouts]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": math.nan,
        "reward/none_count": len(rollouts) - len(rewards),
        "reward/failed_count": num_failed,
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_frac": truncated_frac(rollouts),
        "prompt/length_mean": _mean(prompt_lengths),
        "groups/zero_variance_frac": are_equal(rollouts, group_size).double().mean().item(),
    }
    if rewards:
        metrics["reward/std"] = statistics.pstdev(rewards)

    functions = itertools.chain(*(r.rewards for r in rollouts))
    for function, name in function_names(functions).items():
        values = [r.rewards.get(function) for r in rollouts]
        metrics[f"reward/{name}"] = _mean(values)
    if answer_format:
        metrics["completion/has_answer_frac"] = has_answer_frac(rollouts, answer_format)
    if rollouts[0].episode is not None:
        metrics |= episode_metrics(rollouts)

    for source, from_source in by_source(rollouts).items():
        if source:
            metrics[f"reward/source/{source}"] = reward_mean(from_source)
            metrics[f"prompt/source/{source}"] = len(from_source) / len(rollouts)
    return metrics


def reward_mean(rollouts: list[Rollout]) -> float:
    """Average the rewards of the completions that have one; NaN if none has."""
    return _mean(r.reward for r in rollouts)


def truncated_frac(rollouts: list[Rollout]) -> float:
    """Return the share of completions that ran out of tokens, or as conversations of turns or seconds."""
    return _mean(r.truncated for r in rollouts)


def episode_metrics(rollouts: list[Rollout]) -> Scalars:
    """Return means per episode of the conversations of a step, and how many were lost and so have no reward."""
    episodes = [r.episode for r in rollouts]
    num_turns = [len(e["turns"]) for e in episodes]
    is_lost = [bool(e["failure"]) for e in episodes]
    seconds = [e["waited"] for e in episodes]
    metrics = {
        "environment/turns": _mean(num_turns),
        "environment/lost_count": sum(is_lost),
        "time/environment": _mean(seconds),
    }
    num_sequences = [len(r.sequences) for r in rollouts]
    if max(num_sequences) > 1:
        metrics["environment/sequences"] = _mean(num_sequences)
    for event in EVENTS:
        counts = [e["counts"].get(event, 0) for e in episodes]
        metrics[f"environment/{event}"] = _mean(counts)
    for end in ENDS:
        has_ended_so = [e["ended_by"] == end for e in episodes]
        metrics[f"environment/ended_by/{end}_frac"] = _mean(has_ended_so)
    return metrics


def has_answer_frac(rollouts: list[Rollout], answer_format: str) -> float:
    """Return the share of completions with an answer at all, right or wrong."""
    answers = [extract_answer(r.judged, answer_format) for r in rollouts]
    return _mean(answer is not None for answer in answers)


def by_source(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    """Return the rollouts of each source or held-out set, in the order in which they come."""
    groups = collections.defaultdict(list)
    for rollout in rollouts:
        groups[rollout.prompt.source].append(rollout)
    return groups


def function_names(functions: Iterable[str]) -> dict[str, str]:
    """Return each reward function's metric name: `path/file.py:function` gives `function`, unless that is ambiguous."""
    names = {function: function.rpartition(":")[2] for function in functions}
    in_use = [*REWARD_STATISTICS, *names.values()]
    for function, name in names.items():
        if in_use.count(name) > 1:
            names[function] = function
    return names


def reward_parts(metrics: Scalars) -> Scalars:
    """Return the means of the reward functions, of a step's metrics.

    >>> reward_parts({"reward/mean": 0.3, "reward/a.py:right": 0.25, "reward/source/gsm8k": 0.3})
    {'a.py:right': 0.25}
    """
    parts = {}
    for name, value in metrics.items():
        group, _, part = name.partition("/")
        if group == "reward" and part not in REWARD_STATISTICS and not part.startswith("source/"):
            parts[part] = value
    return parts


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples passes, from n samples of which c passed.

    It is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1), in integers, so exact for any n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2)
    (0.25, 0.5)
    """
    num_subsets = math.comb(num_samples, k)
    num_without_pass = math.comb(num_samples - num_passed, k)
    return (num_subsets - num_without_pass) / num_subsets


def evaluation_metrics(
    greedy: list[Rollout],
    samples: list[Rollout],
    num_samples: int,
    functions: Sequence[str],
    answer_format: str | None = None,
    pass_value: float = 1.0,
) -> Scalars:
    """Return accuracy, reward and length (in tokens) of the greedy completions, and pass@k if there are samples.

    greedy: one completion per prompt. samples: `num_samples` per prompt, group after group, or none at all.
    Completions that none of `functions` gave a value have not passed. `eval/pass_at_K` is the mean of the prompts'
    estimates, for K = 1, 2, 4, ... and `num_samples`. Means of rewards are over the completions that have one, and
    NaN if none has. If there are several held-out sets, each has its own metrics, such as `eval/SET/accuracy`.
    """
    greedy_by_set = by_source(greedy)
    samples_by_set = by_source(samples)
    metrics = {}
    for held_out_set, rollouts in greedy_by_set.items():
        has_passed_S = pass_values(rollouts, functions) >= pass_value
        accuracy = has_passed_S.sum().item() / len(rollouts)
        variance = accuracy * (1 - accuracy) / len(rollouts)
        lengths = [r.num_tokens for r in rollouts]
        of_set = {
            "eval/accuracy": accuracy,
            "eval/accuracy_stderr": math.sqrt(variance),
            "eval/reward_mean": reward_mean(rollouts),
            "eval/completion_length_mean": _mean(lengths),
            "eval/truncated_frac": truncated_frac(rollouts),
            "eval/none_count": sum(r.reward is None for r in rollouts),
        }
        if answer_format:
            of_set["eval/has_answer_frac"] = has_answer_frac(rollouts, answer_format)

        sampled = samples_by_set[held_out_set]
        if sampled:
            has_passed_S = pass_values(sampled, functions) >= pass_value
            num_passed_P = has_passed_S.view(-1, num_samples).sum(dim=1)
            for k in passes(num_samples):
                estimates_P = [pass_at_k(num_samples, count, k) for count in num_passed_P.tolist()]
                of_set[f"eval/pass_at_{k}"] = statistics.fmean(estimates_P)
            lengths = [r.num_tokens for r in sampled]
            of_set["eval/sample_reward_mean"] = reward_mean(sampled)
            of_set["eval/sample_length_mean"] = _mean(lengths)

        for name, value in of_set.items():
            if len(greedy_by_set) > 1:
                name = name.replace("eval/", f"eval/{held_out_set}/")
            metrics[name] = value
    return metrics


def passes(num_samples: int) -> list[int]:
    """Return every K of `eval/pass_at_K`: the powers of 2 up to `num_samples`, and `num_samples`."""
    powers = {2**i for i in range(num_samples.bit_length())}
    return sorted(powers | {num_samples})


def _mean(values: Iterable[float | None]) -> float:
    """Average the values that are not None; NaN if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return math.nan
    return statistics.fmean(known)


def measured_metrics(
    measured: StepMetrics,
    times: Scalars,
    num_tokens: int,
) -> Scalars:
    """Return what the updates measured, the step's times, tokens per second without held-out data, and memory."""
    metrics = with_effective_sample_size(measured.means())
    metrics |= times
    held_out_seconds = times.get("time/evaluate", 0) + times.get("time/validate", 0)
    metrics["tokens_per_second"] = num_tokens / (times["time/step"] - held_out_seconds)
    if torch.cuda.is_available():
        metrics["memory/peak_gib"] = peak_bytes() / 2**30
    return metrics


def rollout_advantages(batch: TrainBatch) -> list[float | None]:
    """Return the mean advantage of each rollout's loss tokens in a step; None for a rollout that is excluded."""
    values_N = batch.advantages_N.double()
    values_N = values_N.where(batch.loss_mask_N, 0)
    zeros_R = torch.zeros(batch.num_rollouts, dtype=torch.float64)
    sums_R = zeros_R.index_add(0, batch.rollout_N, values_N)
    means_R = sums_R / zeros_R.index_add(0, batch.rollout_N, batch.loss_mask_N.double())
    return [finite_or_none(mean) for mean in means_R.tolist()]


def with_measures(rollouts: Sequence[Rollout], batch: TrainBatch, measured: StepMetrics) -> list[Rollout]:
    """Return the rollouts of a step with the means of advantages and mismatches over their loss tokens."""
    advantages = rollout_advantages(batch)
    mismatches = measured.rollout_means(batch.rollout_S)
    means = zip(rollouts, advantages, mismatches, strict=True)
    return [replace(rollout, advantage=advantage, mismatch=mismatch) for rollout, advantage, mismatch in means]


def lag_metrics(batch: TrainBatch, version: int) -> Scalars:
    """Return how many steps older than `version` the weights are that sampled the first token of each sequence."""
    lag_S = (version - batch.versions_S).double()
    return {"lag/mean": lag_S.mean().item(), "lag/max": lag_S.max().item()}


def stale_frac(rollouts: Sequence[Rollout], version: int) -> float:
    """Return the share of sampled tokens by weights older than `version`."""
    num_tokens = 0
    num_stale = 0
    for rollout in rollouts:
        for piece in rollout.sampled:
            num_tokens += piece.num_tokens
            if piece.version < version:
                num_stale += piece.num_tokens
    return num_stale / max(num_tokens, 1)


def nonfinite_frac(rollouts: Sequence[Rollout]) -> float:
    """Return the share of sampled tokens that are excluded from the loss because their log-prob is not finite."""
    masks = []
    for rollout in rollouts:
        masks += [piece.loss_mask_T for piece in rollout.sampled]
    is_finite_N = torch.cat(masks).float()
    return 1 - is_finite_N.mean().item()
