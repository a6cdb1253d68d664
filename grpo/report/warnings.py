"""What a person would see in the curves, said in one line each: nothing is learned, the reward is gamed, ...

A rule is a pure function of the metrics so far, as lists by name with one entry per step (what was not finite is left
out). It returns what to say, or nothing.
"""

import collections
import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from grpo.text import compact_number

History = dict[str, list[float]]

WINDOW = 10  # steps; single ones are noisy
EQUAL_REWARD_STEPS = 3
MIN_ENTROPY = 0.01  # nats
MAX_TRUNCATED = 0.3
ACCURACY_DROP = 0.03
REWARD_DROP = 0.5  # of the rewards' standard deviation among completions: far more than two steps differ by chance
MOVE_STEPS = 20
LEAST_MOVE = 1e-6  # nats of KL to where the policy began; or what the learning rates add up to
FLAT_STEPS = 50
LEAST_RISE_ERRORS = 2.0  # standard errors by which a reward that rises is above its first window
LEAST_ERRORS = 2.5  # standard errors by which an accuracy must be below the best of several, a reward below its first
TOO_LARGE = "the updates are too large; lower trainer.learning_rate"


def equal_rewards(history: History) -> str:
    """No group has two different rewards, so nothing is learned. A teacher judges every token all the same."""
    shares = history["groups/zero_variance_frac"][-EQUAL_REWARD_STEPS:]
    if len(shares) < EQUAL_REWARD_STEPS or min(shares) < 1 or history["distill/reverse_kl"]:
        return ""
    return (
        f"in {EQUAL_REWARD_STEPS} steps the rewards of each group were all equal, which teaches nothing; read "
        "samples.txt: the prompts are too easy or too hard, the answers in another format, or the reward too coarse"
    )


def not_moved(history: History, least_steps: int = MOVE_STEPS) -> str:
    """The policy is where it began: AdamW moves a weight by about the learning rate in a step, and there is no KL.

    least_steps: before, nothing is said about it. Rules that advise a lower learning rate ask earlier, and keep silent.
    """
    num_steps, rates = len(history["reward/mean"]), history["learning_rate"]
    far = max(map(abs, history["kl"][-WINDOW:]), default=math.inf)  # without a reference it is not known
    if min(num_steps, len(rates)) < least_steps or min(total := sum(rates), far) >= LEAST_MOVE:
        return ""
    told = f"the learning rates add up to {total:.2g}" + (f", kl is {far:.2g}" if math.isfinite(far) else "")
    return f"after {num_steps} steps the policy is where it began: {told}; raise trainer.learning_rate"


def collapse(history: History) -> str:
    """The reward is far below what it was, whatever else has changed with it, and the policy has moved."""
    rewards, spread = history["reward/mean"], max(history["reward/std"], default=0)
    now = _recent(rewards)
    if now is None or not spread or not_moved(history, WINDOW):
        return ""
    windows = (statistics.fmean(rewards[start : start + WINDOW]) for start in range(0, len(rewards) - WINDOW, WINDOW))
    best = max([now, *windows])
    # Large steps may spoil the policy within the first window, but a step of few completions may be high by chance.
    # What two neighbours differ by says how much, whatever the trend.
    changes = [after - before for before, after in itertools.pairwise(rewards[-WINDOW:])]
    error = math.sqrt(statistics.fmean(change**2 for change in changes) / 2)
    if rewards[0] - now > LEAST_ERRORS * error:
        best = max(best, rewards[0])
    if best - now <= REWARD_DROP * spread:
        return ""
    fell = f"the reward fell from {compact_number(best)} to {compact_number(now)}"
    return f"{fell}: {TOO_LARGE}, and go on from a checkpoint of before"


def no_rise(history: History) -> str:
    """Rewards differ within groups, and what is learned from that does not show."""
    rewards = history["reward/mean"]
    if len(rewards) < FLAT_STEPS or not_moved(history) or equal_rewards(history) or collapse(history):
        return ""
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    error = math.hypot(statistics.stdev(first), statistics.stdev(last)) / math.sqrt(WINDOW)
    if (rise := statistics.fmean(last) - statistics.fmean(first)) > LEAST_RISE_ERRORS * error:
        return ""
    chance = f"in {len(rewards)} steps the reward has not risen by more than chance"
    return (
        f"{chance} ({compact_number(rise)} ± {compact_number(error)}): it says little, or trainer.learning_rate is too "
        "small; compare the best completions and the worst (python -m grpo.look RUN_DIR --worst)"
    )


def no_entropy(history: History) -> str:
    """The policy samples the same again and again. In a supervised run this is no fault."""
    entropy = _recent(history["entropy"])
    if not history["reward/mean"] or entropy is None or entropy >= MIN_ENTROPY:
        return ""
    if collapse(history) or not_moved(history, WINDOW):
        return ""
    return (
        f"the policy's entropy is {compact_number(entropy)} nats: it hardly explores any more; raise "
        "algorithm.clip_high or algorithm.entropy_coef, lower trainer.learning_rate, or stop here"
    )


def truncation(history: History) -> str:
    """Many completions are cut off, and what is cut off earns nothing. A policy that fell apart has no end either."""
    share = _recent(history["completion/truncated_frac"])
    if share is None or share <= MAX_TRUNCATED or collapse(history):
        return ""
    out = f"{share:.0%} of the completions run out of tokens"
    return f"{out}: raise generator.max_completion_tokens, or teach the policy to be short (overlong_penalty)"


RULES: tuple[Callable[[History], str], ...] = (equal_rewards, not_moved, collapse, no_rise, no_entropy, truncation)


class Evaluation(NamedTuple):
    """An accuracy on held-out prompts, its standard error, and the mean reward of the window of steps before."""

    accuracy: float
    error: float
    reward: float


def lost_accuracy(evaluations: list[Evaluation]) -> str:
    """The last accuracy is below the best one, by more than chance; whether the reward rose meanwhile says why."""
    *before, now = evaluations
    best = max(before, default=now)
    if best.accuracy - now.accuracy < max(ACCURACY_DROP, LEAST_ERRORS * math.hypot(best.error, now.error)):
        return ""
    fell = f"is {compact_number(now.accuracy)} and was {compact_number(best.accuracy)}"
    if now.reward > best.reward:
        rose = f"the reward rose from {compact_number(best.reward)} to {compact_number(now.reward)}"
        way_out = "read samples.txt, mend the reward, or export the best checkpoint (checkpoint.keep_best)"
        return f"{fell}, while {rose}: the reward is being gamed or learned by heart; {way_out}"
    more = "or raise trainer.warmup_steps or prompts_per_step"
    return f"{fell}, and the reward did not rise either: {TOO_LARGE}, {more}"


class Watch:
    """The metrics so far, and what was said about them: each thing once, and again if it went away in between."""

    def __init__(self) -> None:
        self.history: History = collections.defaultdict(list)
        self.evaluations: dict[str, list[Evaluation]] = collections.defaultdict(list)
        self._said: set[str] = set()

    def look(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in metrics of a step or an evaluation (`eval/accuracy`, `eval/SET/accuracy`); returns what is new."""
        finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        for name, value in finite.items():
            self.history[name].append(value)
        found = {rule.__name__: rule(self.history) for rule in RULES}
        rewards = self.history["reward/mean"]
        for name in (name for name in finite if name.startswith("eval/") and name.endswith("accuracy")):
            seen = self.evaluations[name]
            if seen and rewards and math.isnan(seen[0].reward):  # that before the first step
                seen[0] = seen[0]._replace(reward=statistics.fmean(rewards[:WINDOW]))
            reward = statistics.fmean(rewards[-WINDOW:]) if rewards else math.nan
            seen.append(Evaluation(finite[name], finite.get(f"{name}_stderr", 0.0), reward))
            text = "" if not_moved(self.history, WINDOW) else lost_accuracy(seen)
            found[name] = text and f"{name} {text}"
        told = {name for name, text in found.items() if text}
        new = [found[name] for name in found if name in told - self._said]
        self._said = self._said - found.keys() | told
        return new


def _recent(values: list[float]) -> float | None:
    """The mean of the last window; None if there are not so many steps yet."""
    return statistics.fmean(values[-WINDOW:]) if len(values) >= WINDOW else None
