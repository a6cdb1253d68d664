"""Warnings of what a person would see in the log, one line each: nothing is learned, completions are cut off, ...

A rule is a pure function of the metrics so far: a list by name with one entry per step, without values that are not
finite. It returns the warning, or an empty text. Left out: advice that needs the whole curve, which `grpo.look` draws.
"""

import collections
import math
import statistics
from collections.abc import Callable

from grpo.report.samples import is_number

History = dict[str, list[float]]

EQUAL_REWARD_STEPS = 3
TRUNCATED_STEPS = 10
MAX_TRUNCATED = 0.3  # share of completions
# What a conversation can run out of -> what to do about it
LIMITS = {
    "tokens": "raise generator.max_completion_tokens (and environment.max_turn_tokens, if it is set)",
    "turns": "raise environment.max_turns, or teach the policy to end in fewer turns",
    "seconds": "raise environment.rollout_seconds, or make the environment faster",
}
MOVE_STEPS = 20
MIN_MOVE = 1e-6  # sum of the learning rates


def no_comparison(history: History) -> str:
    """Warn that no group has two different rewards, so nothing is learned, unless a teacher judges every token."""
    shares = history["groups/zero_variance_frac"][-EQUAL_REWARD_STEPS:]
    if shares != [1] * EQUAL_REWARD_STEPS or history["distill/reverse_kl"]:
        return ""
    reason = cut_off(history, EQUAL_REWARD_STEPS)
    if not reason:
        reason = "the prompts are too easy or too hard, the answers in another format, or the reward too coarse"
    return (
        f"in {EQUAL_REWARD_STEPS} steps the rewards of each group were all equal, which teaches nothing; read the "
        f"completions (python -m grpo.look RUN_DIR --worst): {reason}"
    )


def not_moved(history: History) -> str:
    """Warn that the policy is where it began: in a step AdamW moves a weight by about the learning rate."""
    rates = history["learning_rate"]
    if len(rates) < MOVE_STEPS or sum(rates) >= MIN_MOVE:
        return ""
    return (
        f"after {len(rates)} steps the policy is where it began: the learning rates add up to {sum(rates):.2g}; raise "
        "trainer.learning_rate"
    )


def cut_off(history: History, num_steps: int = TRUNCATED_STEPS) -> str:
    """Warn that many completions of the last `num_steps` steps are cut off, and so earn nothing."""
    share = _mean_of_last(history["completion/truncated_frac"], num_steps)
    if share <= MAX_TRUNCATED:
        return ""
    ends = []
    for limit, advice in LIMITS.items():
        share_of_limit = _mean_of_last(history[f"environment/ended_by/{limit}_frac"], num_steps)
        if share_of_limit >= MAX_TRUNCATED / len(LIMITS):  # one of them is
            ends.append(f"{share_of_limit:.0%} of the conversations run out of {limit}: {advice}")
    if ends:
        return "; ".join(ends)
    return (
        f"{share:.0%} of the completions run out of tokens: raise generator.max_completion_tokens, or teach the policy "
        "to be short (overlong_penalty)"
    )


def nothing_trained(history: History, metrics: dict[str, float | None]) -> str:
    """Warn that no token of the step at hand counts in the loss. Its metrics of tokens are then not finite."""
    if _is_known(metrics["entropy"]) or metrics.get("skipped_frac"):
        return ""
    if not _is_known(metrics.get("reward/mean")) and "distill/reverse_kl" not in metrics:
        return "no completion has a reward, which leaves none to train on"
    text = "all completions that could teach are truncated, and algorithm.mask_truncated leaves none to train on"
    advice = cut_off(history, num_steps=1)
    return f"{text}: {advice}" if advice else text


RULES: list[Callable[[History], str]] = [
    no_comparison,
    not_moved,
    cut_off,
]


class CurveReader:
    """The metrics so far, and the warnings about them: each once, and again only if it went away in between."""

    def __init__(self) -> None:
        """Begin without metrics."""
        self.history: History = collections.defaultdict(list)
        self._shown: set[str] = set()

    def look(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in the metrics of a step or an evaluation. Returns new warnings."""
        for name, value in metrics.items():
            if _is_known(value):
                self.history[name].append(value)
        warnings = {}
        for rule in RULES:
            warnings[rule.__name__] = rule(self.history)
        if "entropy" in metrics:  # a step, not an evaluation
            warnings["nothing_trained"] = nothing_trained(self.history, metrics)
        new = []
        for name, text in warnings.items():
            if not text:
                self._shown.discard(name)
            elif name not in self._shown:
                self._shown.add(name)
                new.append(text)
        return new


def _is_known(value: float | None) -> bool:
    return is_number(value) and math.isfinite(value)


def _mean_of_last(values: list[float], num_steps: int) -> float:
    """Return the mean of the last values, 0 if there are fewer."""
    if len(values) < num_steps:
        return 0.0
    return statistics.fmean(values[-num_steps:])
