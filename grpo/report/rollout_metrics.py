"""Numbers of a step and of an evaluation: rewards, lengths, held-out accuracy, pass@k, what sampling and updates did.

A completion passed if the first reward function gave it at least `reward.pass_value`. Sampling is measured by counts,
never by clocks.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo.algorithm.advantages import by_group, equal_rewards
from grpo.algorithm.importance import with_effective_sample_size
from grpo.metrics import StepMetrics, peak_bytes
from grpo.rewards.answers import extract_answer
from grpo.types import Completion, Rollout, TrainBatch


def rollout_metrics(rollouts: list[Rollout], group_size: int, answer_format: str | None = None) -> dict[str, float]:
    """What the completions of one step, which lie group by group, earned and how long they were, in tokens.

    Statistics of rewards are over the completions that have one and NaN if none has; `reward/std` is the population's,
    `reward/NAME` the unweighted mean of a reward function. Where prompts have sources, `reward/source/NAME` is the mean
    reward of one, `prompt/source/NAME` its share. answer_format: where a reward function looks for answers, None if
    none does.
    """
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [r.completion.num_tokens for r in rollouts]
    rewards_S, has_reward_S = reward_tensors(rollouts)
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward/none_count": len(rollouts) - len(rewards),
        "reward/failed_count": sum(bool(r.failures) for r in rollouts),
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_frac": _mean(r.completion.truncated for r in rollouts),
        "prompt/length_mean": _mean(len(r.prompt_ids_T) for r in rollouts),
        "groups/zero_variance_frac": _mean(equal_rewards(*by_group(rewards_S, has_reward_S, group_size)).tolist()),
    }
    for function, name in function_names(dict.fromkeys(name for r in rollouts for name in r.rewards)).items():
        metrics[f"reward/{name}"] = _mean(r.rewards.get(function) for r in rollouts)
    if answer_format:
        metrics["completion/has_answer_frac"] = has_answer_frac(rollouts, answer_format)
    if rollouts[0].completion.episode is not None:
        metrics |= episode_metrics(rollouts)
    for source, of_source in by_source(rollouts).items():
        if source:
            metrics[f"reward/source/{source}"] = _mean(r.reward for r in of_source)
            metrics[f"prompt/source/{source}"] = len(of_source) / len(rollouts)
    return metrics


def episode_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """What happened in the conversations of a step, per episode; `environment/lost_count` had no reward for it."""
    episodes = [r.completion.episode for r in rollouts]
    metrics = {
        "environment/turns": _mean(len(e["turns"]) for e in episodes),
        "environment/calls": _mean(e["counts"].get("calls", 0) for e in episodes),
        "environment/lost_count": sum(bool(e["failure"]) for e in episodes),
        "time/environment": _mean(e["waited"] for e in episodes),
    }
    for fault in ("bad_calls", "unread_calls", "tool_errors", "hung_calls", "cut_answers"):
        metrics[f"environment/{fault}"] = _mean(e["counts"].get(fault, 0) for e in episodes)
    for end in ("done", "tokens", "turns", "seconds", "hung", "lost"):
        metrics[f"environment/ended_by/{end}_frac"] = _mean(e["ended_by"] == end for e in episodes)
    return metrics


def alone_frac(rollouts: list[Rollout], group_size: int) -> float:
    """Share of the turns that no other completion of their group reached, of completions that have a reward."""
    turns = [0 if r.reward is None else len(r.completion.episode["turns"]) for r in rollouts]
    groups = [sorted([0, *turns[first : first + group_size]]) for first in range(0, len(turns), group_size)]
    return sum(group[-1] - group[-2] for group in groups) / max(sum(turns), 1)


def has_answer_frac(rollouts: list[Rollout], answer_format: str) -> float:
    """Share of completions in which there is an answer at all, right or wrong."""
    return _mean(extract_answer(r.answer, answer_format) is not None for r in rollouts)


def by_source(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    """Source or held-out set -> its rollouts, in the order in which they come."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.source, []).append(rollout)
    return groups


def function_names(functions: Iterable[str]) -> dict[str, str]:
    """Metric name of each reward function: `path/file.py:function` becomes `function`, unless that is ambiguous."""
    short = {function: function.rsplit(":", 1)[-1] for function in functions}
    taken = [*short.values(), "mean", "std", "none_count", "failed_count", "kl_penalty"]
    return {function: name if taken.count(name) == 1 else function for function, name in short.items()}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples passes, estimated without bias from n samples of which c passed.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv:2107.03374, eq. 1. Computed in integers, so exact for any n.
    """
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_passed, k)) / num_subsets


def evaluation_metrics(
    greedy: list[Rollout],
    samples: list[Rollout],
    num_samples: int,
    function: str,
    answer_format: str | None = None,
    pass_value: float = 1.0,
) -> dict[str, float]:
    """Accuracy, reward, lengths (in tokens) of the greedy completions and, if there are samples, pass@k and theirs.

    greedy: one completion per prompt. samples: `num_samples` per prompt, group after group, or none at all. One for
    which `function` gave no value has not passed. `eval/pass_at_K`, K = 1, 2, 4, ... up to `num_samples` and that
    itself, is the mean of the prompts' estimates. Means of rewards are over completions that have one, NaN if none has.
    """

    def num_passed(rollouts: list[Rollout]) -> int:
        values = (r.rewards.get(function) for r in rollouts)
        return sum(value is not None and value >= pass_value for value in values)

    accuracy = num_passed(greedy) / len(greedy)
    metrics = {
        "eval/accuracy": accuracy,
        "eval/accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / len(greedy)),
        "eval/reward_mean": _mean(r.reward for r in greedy),
        "eval/completion_length_mean": _mean(r.completion.num_tokens for r in greedy),
        "eval/truncated_frac": _mean(r.completion.truncated for r in greedy),
        "eval/none_count": sum(r.reward is None for r in greedy),
    }
    if answer_format:
        metrics["eval/has_answer_frac"] = has_answer_frac(greedy, answer_format)
    if not samples:
        return metrics
    groups = (samples[first : first + num_samples] for first in range(0, len(samples), num_samples))
    counts = [num_passed(group) for group in groups]
    for k in passes(num_samples):
        metrics[f"eval/pass_at_{k}"] = statistics.fmean(pass_at_k(num_samples, count, k) for count in counts)
    return metrics | {
        "eval/sample_reward_mean": _mean(r.reward for r in samples),
        "eval/sample_length_mean": _mean(r.completion.num_tokens for r in samples),
    }


def passes(num_samples: int) -> list[int]:
    """The K of `eval/pass_at_K`."""
    return sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})


def evaluation_names(sets: Sequence[str], num_samples: int, has_answers: bool) -> list[str]:
    """The metrics of `evaluation_metrics_of_sets` by name, without `eval/`; has_answers: there is an answer format."""
    names = ["accuracy", "accuracy_stderr", "reward_mean", "completion_length_mean", "truncated_frac", "none_count"]
    names += ["has_answer_frac"] * has_answers
    if num_samples:
        names += [*(f"pass_at_{k}" for k in passes(num_samples)), "sample_reward_mean", "sample_length_mean"]
    return names if len(sets) == 1 else [f"{one}/{name}" for one in sets for name in names]


def evaluation_metrics_of_sets(greedy: list[Rollout], samples: list[Rollout], *settings: Any) -> dict[str, float]:
    """`evaluation_metrics`, with its arguments, of each held-out set, `eval/SET/accuracy`; of only one unchanged."""
    greedy_of, samples_of = by_source(greedy), by_source(samples)
    metrics = {name: evaluation_metrics(x, samples_of.get(name, []), *settings) for name, x in greedy_of.items()}
    if len(metrics) == 1:
        return next(iter(metrics.values()))
    return {f"eval/{name}/{key.removeprefix('eval/')}": x for name, of in metrics.items() for key, x in of.items()}


def reward_tensors(rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [S]: the rewards, 0 where there is none; bool [S]: which there are)."""
    rewards_S = torch.tensor([0.0 if r.reward is None else r.reward for r in rollouts])
    return rewards_S, torch.tensor([r.reward is not None for r in rollouts])


def part_tensor(rollouts: list[Rollout], functions: Iterable[str]) -> torch.Tensor:
    """float32 [F, S]: each reward function's unweighted values, which are finite; NaN where it gave None."""
    values = ([math.nan if r.rewards[name] is None else r.rewards[name] for r in rollouts] for name in functions)
    return torch.tensor(list(values)).view(-1, len(rollouts))


def _mean(values: Iterable[float | None]) -> float:
    """Of the values that are not None; NaN if there are none."""
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else math.nan


def measured_metrics(measured: StepMetrics, times: dict[str, float], num_tokens: int) -> dict[str, float]:
    """What the updates measured, the step's times, tokens per second and memory."""
    metrics = with_effective_sample_size(measured.means()) | times
    metrics["tokens_per_second"] = num_tokens / metrics["time/step"]
    if torch.cuda.is_available():
        metrics["memory/peak_gib"] = peak_bytes() / 2**30
    return metrics


def sequence_advantages(batch: TrainBatch) -> list[float | None]:
    """The mean advantage of each sequence's loss tokens; None for a sequence that is excluded."""
    values_N = batch.advantages_N.double().where(batch.loss_mask_N, 0)
    sums_S = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.owner_N, values_N)
    means = (sums_S / batch.num_loss_tokens_S).tolist()
    return [None if math.isnan(mean) else mean for mean in means]


def stale_frac(completions: Sequence[Completion], version: int) -> float:
    """Share of the tokens that weights older than `version` sampled."""
    pieces = [piece for completion in completions for piece in completion.sampled]
    num_tokens = sum(piece.num_tokens for piece in pieces)
    return sum(piece.num_tokens for piece in pieces if piece.version < version) / num_tokens if num_tokens else 0.0


def nonfinite_frac(completions: Sequence[Completion]) -> float:
    """Share of the sampled tokens that are excluded from the loss because their log-prob is not finite."""
    masks = [piece.loss_mask_T for c in completions for piece in c.pieces if piece.logprobs_T is not None]
    return 1 - torch.cat(masks).float().mean().item()
