"""Warnings of what a person would see in the curves, one line each: nothing is learned, the reward is gamed, ...

A rule is a pure function of the metrics so far: a list by name with one entry per step, without values that are not
finite. It returns the warning, or an empty text.
"""

import collections
import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from grpo.text import compact_number
from grpo.types import Scalars

History = dict[str, list[float]]

WINDOW = 10  # steps that a mean is over, because a single step is noisy
EQUAL_REWARD_STEPS = 3
SLOW_STEPS = 2
MIN_ENTROPY = 0.01  # nats
MAX_TRUNCATED = 0.3  # share of completions
# What a conversation can run out of -> what to do about it
LIMITS = {
    "tokens": "raise generator.max_completion_tokens (and environment.max_turn_tokens, if it is set)",
    "turns": "raise environment.max_turns, or teach the policy to end in fewer turns",
    "seconds": "raise environment.rollout_seconds, or make the environment faster",
}
ACCURACY_DROP = 0.03
REWARD_DROP = 0.5  # of the rewards' standard deviation among completions: far more than two steps differ by chance
MOVE_STEPS = 20
MIN_MOVE = 1e-6  # nats of KL to the start; or sum of the learning rates
FLAT_STEPS = 50
RISE_ERRORS = 2.0  # standard errors that the last window of rewards is above the first one, if the reward rises
DROP_ERRORS = 2.5  # standard errors that an accuracy is below the best of several, or a reward below the first one
TOO_LARGE = "the updates are too large; lower trainer.learning_rate"


def no_comparison(history: History) -> str:
    """Warn that no group has two different rewards, so nothing is learned, unless a teacher judges every token."""
    shares = history["groups/zero_variance_frac"][-EQUAL_REWARD_STEPS:]
    if shares != [1] * EQUAL_REWARD_STEPS or history["distill/reverse_kl"]:
        return ""
    return (
        f"in {EQUAL_REWARD_STEPS} steps the rewards of each group were all equal, which teaches nothing; read "
        "samples.txt: the prompts are too easy or too hard, the answers in another format, or the reward too coarse"
    )


def not_moved(history: History, min_steps: int = MOVE_STEPS) -> str:
    """Warn that the policy is where it began: in a step AdamW moves a weight by about the learning rate.

    Without a KL the rates alone decide. min_steps: no warning before; rules that advise a lower rate pass a lower one.
    """
    num_steps = len(history["reward/mean"])
    rates = history["learning_rate"]
    if min(num_steps, len(rates)) < min_steps:
        return ""
    sum_of_rates = sum(rates)
    last_kls = map(abs, history["kl"][-WINDOW:])
    kl = max(last_kls, default=math.inf)  # without a reference it is not known
    if min(sum_of_rates, kl) >= MIN_MOVE:
        return ""
    numbers = f"the learning rates add up to {sum_of_rates:.2g}"
    if math.isfinite(kl):
        numbers += f", kl is {kl:.2g}"
    return f"after {num_steps} steps the policy is where it began: {numbers}; raise trainer.learning_rate"


def collapse(history: History) -> str:
    """Warn that the reward is far below what it was, if the policy has moved."""
    rewards = history["reward/mean"]
    spread = max(history["reward/std"], default=0)
    now = _recent(rewards)
    if now is None or not spread or not_moved(history, WINDOW):
        return ""
    best = now
    for start in range(0, len(rewards) - WINDOW, WINDOW):
        window = rewards[start : start + WINDOW]
        best = max(best, statistics.fmean(window))
    # Large updates may spoil the policy within the first window. But the first step may be high by chance, if it has
    # few completions; the differences between neighbours say by how much, whatever the trend.
    neighbours = itertools.pairwise(rewards[-WINDOW:])
    squares = [(after - before) ** 2 for before, after in neighbours]
    variance = statistics.fmean(squares) / 2
    error = math.sqrt(variance)
    if rewards[0] - now > DROP_ERRORS * error:
        best = max(best, rewards[0])
    if best - now <= REWARD_DROP * spread:
        return ""
    return (
        f"the reward fell from {compact_number(best)} to {compact_number(now)}: {TOO_LARGE}, and go on from an earlier "
        "checkpoint"
    )


def no_rise(history: History) -> str:
    """Warn that the reward does not rise, although rewards differ within groups and no teacher judges every token."""
    rewards = history["reward/mean"]
    has_other_reason = (
        not_moved(history) or no_comparison(history) or collapse(history) or history["distill/reverse_kl"]
    )
    if len(rewards) < FLAT_STEPS or has_other_reason:
        return ""
    first = rewards[:WINDOW]
    last = rewards[-WINDOW:]
    rise = statistics.fmean(last) - statistics.fmean(first)
    spreads = map(statistics.stdev, (first, last))
    error = math.hypot(*spreads) / math.sqrt(WINDOW)
    if rise > RISE_ERRORS * error:
        return ""
    return (
        f"in {len(rewards)} steps the reward has not risen by more than chance ({compact_number(rise)} ± "
        f"{compact_number(error)}): it says little, or trainer.learning_rate is too small; compare the best "
        "completions and the worst (python -m grpo.look RUN_DIR --worst)"
    )


def no_entropy(history: History) -> str:
    """Warn that the policy samples the same again and again, which in a supervised run is no fault."""
    entropy = _recent(history["entropy"])
    if entropy is None or entropy >= MIN_ENTROPY:
        return ""
    is_supervised = not history["reward/mean"]
    if is_supervised or collapse(history) or not_moved(history, WINDOW):
        return ""
    return (
        f"the policy's entropy is {compact_number(entropy)} nats: it hardly explores any more; raise "
        "algorithm.clip_high or algorithm.entropy_coef, lower trainer.learning_rate, or stop here"
    )


def truncation(history: History) -> str:
    """Warn that many completions are cut off and so earn nothing, unless the policy collapsed and finds no end."""
    share = _recent(history["completion/truncated_frac"])
    if share is None or share <= MAX_TRUNCATED or collapse(history):
        return ""
    ends = []
    for limit, advice in LIMITS.items():
        share_of_limit = _recent(history[f"environment/ended_by/{limit}_frac"])
        if share_of_limit and share_of_limit >= MAX_TRUNCATED / len(LIMITS):  # one of them is
            ends.append(f"{share_of_limit:.0%} of the conversations run out of {limit}: {advice}")
    if ends:
        return "; ".join(ends)
    return (
        f"{share:.0%} of the completions run out of tokens: raise generator.max_completion_tokens, or teach the policy "
        "to be short (overlong_penalty)"
    )


def not_saved(history: History, launcher_seconds: float) -> str:
    """Warn that a step takes so long that torchrun, after a signal, kills its ranks before they save."""
    seconds = history["time/step"][-SLOW_STEPS:]
    if len(seconds) < SLOW_STEPS or min(seconds) < launcher_seconds / 2:
        return ""
    return (
        f"steps take {compact_number(min(seconds))} s and more, and torchrun kills its ranks "
        f"{compact_number(launcher_seconds)} s after a signal, saved or not: start it with --shutdown-timeout 600, or "
        "stop the run by a file `stop` in its folder"
    )


RULES: list[Callable[[History], str]] = [
    no_comparison,
    not_moved,
    collapse,
    no_rise,
    no_entropy,
    truncation,
]


class Evaluation(NamedTuple):
    """Held-out accuracy, its standard error, and the mean reward in the window before (step 0: after) it."""

    accuracy: float
    error: float
    reward: float


def lost_accuracy(evaluations: list[Evaluation]) -> str:
    """Warn that the last accuracy is below the best one by more than chance; the reward since then says why."""
    best = max(evaluations)
    now = evaluations[-1]
    drop = best.accuracy - now.accuracy
    error = math.hypot(best.error, now.error)
    if drop < max(ACCURACY_DROP, DROP_ERRORS * error):
        return ""
    fell = f"is {compact_number(now.accuracy)} and was {compact_number(best.accuracy)}"
    if now.reward > best.reward:
        return (
            f"{fell}, while the reward rose from {compact_number(best.reward)} to {compact_number(now.reward)}: the "
            "reward is being gamed or learned by heart; read samples.txt, mend the reward, or export the best "
            "checkpoint (checkpoint.keep_best)"
        )
    if math.isnan(now.reward):  # supervised, or without rewards
        return (
            f"{fell}: the training rows are learned by heart, or {TOO_LARGE}, take fewer steps, or export the best "
            "checkpoint (checkpoint.keep_best)"
        )
    return f"{fell}, and the reward did not rise either: {TOO_LARGE}, or raise trainer.warmup_steps or prompts_per_step"


class CurveReader:
    """The metrics so far, and the warnings about them: each once, and again only if it went away in between."""

    def __init__(self, kl_is_to_start: bool = True, launcher_seconds: float = math.inf) -> None:
        """Begin without metrics.

        kl_is_to_start: a `kl` of 0 means that the policy has not moved. launcher_seconds: how long the launcher waits
        after a signal before it kills this process.
        """
        self.kl_is_to_start = kl_is_to_start
        self.launcher_seconds = launcher_seconds
        self.history: History = collections.defaultdict(list)
        self.evaluations: dict[str, list[Evaluation]] = collections.defaultdict(list)
        self._shown: set[str] = set()

    def look(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in metrics of a step or an evaluation (`eval/accuracy`, `eval/SET/accuracy`). Returns new warnings."""
        finite = {}
        for name, value in metrics.items():
            is_known = name != "kl" or self.kl_is_to_start
            if value is not None and math.isfinite(value) and is_known:
                finite[name] = value
                self.history[name].append(value)
        warnings = {}
        for rule in RULES:
            warnings[rule.__name__] = rule(self.history)
        warnings["not_saved"] = not_saved(self.history, self.launcher_seconds)
        for name in finite:
            if name.startswith("eval/") and name.endswith("accuracy"):
                warnings[name] = self._accuracy_warning(name, finite)
        new = []
        for name, text in warnings.items():
            if not text:
                self._shown.discard(name)
            elif name not in self._shown:
                self._shown.add(name)
                new.append(text)
        return new

    def _accuracy_warning(self, name: str, metrics: Scalars) -> str:
        """Take in the accuracy `name` of an evaluation. Returns a warning if it was lost."""
        rewards = self.history["reward/mean"]
        evaluations = self.evaluations[name]
        if evaluations and rewards:
            first = evaluations[0]
            if math.isnan(first.reward):  # made before the first step
                reward_after = statistics.fmean(rewards[:WINDOW])
                evaluations[0] = first._replace(reward=reward_after)
        reward_before = math.nan
        if rewards:
            reward_before = statistics.fmean(rewards[-WINDOW:])
        now = Evaluation(
            accuracy=metrics[name],
            error=metrics.get(f"{name}_stderr", 0.0),
            reward=reward_before,
        )
        evaluations.append(now)
        lost = lost_accuracy(evaluations)
        # a policy that has not moved has accuracies that differ by chance
        if not lost or not_moved(self.history, WINDOW):
            return ""
        return f"{name} {lost}"


def _recent(values: list[float]) -> float | None:
    """Return the mean of the last window; None if there are fewer steps."""
    if len(values) < WINDOW:
        return None
    return statistics.fmean(values[-WINDOW:])
