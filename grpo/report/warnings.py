"""What a person would see in the curves, said in one line each: the loss jumps, the reward is gamed, ...

A rule is a pure function of the metrics so far, as lists by name with one entry per step (what was not finite is left
out), and of the thresholds in the config. It returns what to say, or nothing. Most rules look at means over
`warnings.window` steps, since single steps are noisy.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from grpo.config import WarningsConfig
from grpo.report.formats import compact_number

History = dict[str, list[float]]
WATCHED = (
    "loss",
    "entropy",
    "reward/mean",
    "groups/zero_variance_frac",
    "completion/truncated_frac",
    "mismatch/kl",
    "mismatch/ess",
    "distill/reverse_kl",
)
LEAST_SPIKE = 0.1  # nats: a GRPO loss is noise around 0, in which any jump is many times the usual
LEAST_KL = 1e-3  # nats: in float32 it is rounding, which may well be five times what it was
SPIKE_WINDOWS = 5  # the usual loss is that of so many windows
FALL_WINDOWS = 50  # the best reward is looked for in so many windows
NORMAL_MAD = 1.4826  # standard deviations of normal noise in its median absolute deviation
LEAST_FALL = 0.01  # rewards mostly go from 0 to 1; without noise each fall would count
LEAST_ERRORS = 2.5  # standard errors by which an accuracy must be below the best of several


def loss_spike(history: History, config: WarningsConfig) -> str:
    """The last loss is far from the median, measured in median absolute deviations."""
    *before, last = history.get("loss") or [0.0]
    before = before[-SPIKE_WINDOWS * config.window :]
    if len(before) < config.window or not config.loss_spike:
        return ""
    usual = statistics.median(before)
    spread = statistics.median(abs(loss - usual) for loss in before)
    if abs(last - usual) <= max(config.loss_spike * spread, LEAST_SPIKE):
        return ""
    return (
        f"the loss is {compact_number(last)}, usually {compact_number(usual)}: look at what was trained on in this "
        "step; if it does not come back, lower trainer.learning_rate"
    )


def falling_reward(history: History, config: WarningsConfig) -> str:
    """The last window's mean reward is below that of the best window before, beyond the noise of single steps.

    The noise is that of the differences between successive steps, by their median, which no trend and no jump changes.
    """
    rewards = history.get("reward/mean", [])[-FALL_WINDOWS * config.window :]
    if len(rewards) < 2 * config.window or not config.reward_fall:
        return ""
    sums = [0.0, *itertools.accumulate(rewards)]
    means = [(sums[i + config.window] - sums[i]) / config.window for i in range(len(rewards) - config.window + 1)]
    best, recent = max(means[: -config.window]), means[-1]
    change = statistics.median(abs(after - before) for before, after in itertools.pairwise(rewards))
    error = NORMAL_MAD * change / math.sqrt(config.window)  # such a difference has the variance of two steps
    if best - recent <= max(config.reward_fall * error, LEAST_FALL):
        return ""
    return (
        f"the mean reward fell from {compact_number(best)} to {compact_number(recent)}: unless the prompts have become "
        "harder, the updates are too large; lower trainer.learning_rate, or raise trainer.warmup_steps or "
        "prompts_per_step"
    )


def no_entropy(history: History, config: WarningsConfig) -> str:
    """The policy samples the same again and again. Of a supervised run this is no fault."""
    entropy = _recent("entropy", history, config)
    if "reward/mean" not in history or entropy is None or entropy >= config.min_entropy:
        return ""
    return (
        f"the policy's entropy is {compact_number(entropy)} nats: it hardly explores any more; raise "
        "algorithm.clip_high or algorithm.entropy_coef, lower trainer.learning_rate, or stop here"
    )


def equal_rewards(history: History, config: WarningsConfig) -> str:
    """No group has two different rewards, so nothing is learned. A teacher judges every token all the same."""
    count = config.equal_reward_steps
    shares = history.get("groups/zero_variance_frac", [])
    if not count or len(shares) < count or min(shares[-count:]) < 1 or "distill/reverse_kl" in history:
        return ""
    return (
        f"in {count} steps the rewards of each group were all equal, so comparing them teaches nothing; read "
        "samples.txt in the run folder: the prompts are too easy or too hard, the answers in another format, or the "
        "reward too coarse"
    )


def truncation(history: History, config: WarningsConfig) -> str:
    """Many completions are cut off, and what is cut off earns nothing."""
    share = _recent("completion/truncated_frac", history, config)
    if share is None or share <= config.max_truncated:
        return ""
    return (
        f"{share:.0%} of the completions run out of tokens: raise generator.max_completion_tokens, or teach the policy "
        "to be short (overlong_penalty)"
    )


def sampler_kl(history: History, config: WarningsConfig) -> str:
    """Generator and trainer move apart."""
    first, recent = history.get("mismatch/kl", [])[: config.window], _recent("mismatch/kl", history, config)
    if not config.kl_rise or recent is None or recent <= max(config.kl_rise * statistics.fmean(first), LEAST_KL):
        return ""
    return (
        f"mismatch/kl rose from {compact_number(statistics.fmean(first))} to {compact_number(recent)} nats: the "
        "generator samples from another policy than the one that is trained; lower trainer.learning_rate or "
        "sync_interval, or take model.dtype float32 to see whether it is precision"
    )


def sample_size(history: History, config: WarningsConfig) -> str:
    """Few samples carry all the weight."""
    share = _recent("mismatch/ess", history, config)
    if share is None or share >= config.min_sample_size:
        return ""
    return (
        f"the effective sample size is {share:.0%} of the tokens: the samples are off-policy; lower sync_interval or "
        "trainer.learning_rate"
    )


RULES: tuple[Callable[[History, WarningsConfig], str], ...] = (
    loss_spike,
    falling_reward,
    no_entropy,
    equal_rewards,
    truncation,
    sampler_kl,
    sample_size,
)


class Evaluation(NamedTuple):
    """An accuracy on held-out prompts, its standard error, and the mean reward of the window of steps before."""

    accuracy: float
    error: float
    reward: float


def lost_accuracy(evaluations: list[Evaluation], config: WarningsConfig) -> str:
    """The last accuracy is below the best one, by more than chance; whether the reward rose meanwhile says why."""
    if len(evaluations) < 2 or not config.accuracy_drop:
        return ""
    *before, now = evaluations
    best = max(before)
    if best.accuracy - now.accuracy < max(config.accuracy_drop, LEAST_ERRORS * math.hypot(best.error, now.error)):
        return ""
    fell = f"is {compact_number(now.accuracy)} and was {compact_number(best.accuracy)}"
    if now.reward > best.reward:
        return (
            f"{fell}, while the reward rose from {compact_number(best.reward)} to {compact_number(now.reward)}: the "
            "reward is being gamed or learned by heart; read samples.txt, mend the reward, or export the best "
            "checkpoint (checkpoint.keep_best)"
        )
    return (
        f"{fell}, and the reward did not rise either: the updates are too large; lower trainer.learning_rate, or raise "
        "trainer.warmup_steps or prompts_per_step"
    )


class Watch:
    """The metrics so far, and what was said about them."""

    def __init__(self, config: WarningsConfig) -> None:
        self.config = config
        self.history: History = {}
        self.evaluations: dict[str, list[Evaluation]] = {}
        self._said: set[str] = set()

    def look(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in a step; returns what has come up in it."""
        for name in WATCHED:
            if _is_finite(metrics.get(name)):
                self.history.setdefault(name, []).append(metrics[name])
        return self._new((rule.__name__, rule(self.history, self.config)) for rule in RULES)

    def look_at_evaluation(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in an evaluation (`eval/accuracy`, or `eval/SET/accuracy` of several sets) likewise."""
        rewards = self.history.get("reward/mean", [])
        reward = statistics.fmean(rewards[-self.config.window :]) if rewards else math.nan
        names = [name for name in metrics if name.startswith("eval/") and name.endswith("accuracy")]
        for name in names:
            seen = self.evaluations.setdefault(name, [])
            if seen and rewards and math.isnan(seen[0].reward):  # that before the first step
                seen[0] = seen[0]._replace(reward=statistics.fmean(rewards[: self.config.window]))
            if _is_finite(metrics[name]):
                seen.append(Evaluation(metrics[name], metrics.get(f"{name}_stderr") or 0.0, reward))
        found = {name: lost_accuracy(self.evaluations[name], self.config) for name in names}
        return self._new((name, f"{name} {text}" if text else "") for name, text in found.items())

    def _new(self, found: Iterable[tuple[str, str]]) -> list[str]:
        """Of what the rules say now, that which they did not say the last time."""
        found = dict(found)
        new = [text for name, text in found.items() if text and name not in self._said]
        self._said = self._said - found.keys() | {name for name, text in found.items() if text}
        return new


def _recent(name: str, history: History, config: WarningsConfig) -> float | None:
    """Mean of the last window, None if there are not so many steps yet."""
    values = history.get(name, [])[-config.window :]
    return statistics.fmean(values) if len(values) == config.window else None


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
