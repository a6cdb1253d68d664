"""What a person would see in the curves, said in one line each: the loss jumps, the reward is gamed, ...

A rule is a pure function of the metrics so far, as lists by name with one entry per step (what was not finite is left
out), and of the thresholds in the config. It returns what to say, or nothing. Most rules look at means over
`warnings.window` steps, since single steps are noisy.
"""

import math
import statistics
from collections.abc import Callable, Iterable

from grpo.config import WarningsConfig
from grpo.run.report.formats import compact_number

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
    no_entropy,
    equal_rewards,
    truncation,
    sampler_kl,
    sample_size,
)


def gamed_reward(evaluations: list[tuple[float, float]], config: WarningsConfig) -> str:
    """(Accuracy, mean reward of the steps before) of each evaluation: the one falls while the other rises."""
    if len(evaluations) < 2 or not config.accuracy_drop:
        return ""
    accuracy, reward = evaluations[-1]
    best, reward_then = max(evaluations[:-1])
    if best - accuracy < config.accuracy_drop or reward <= reward_then:
        return ""
    return (
        f"is {compact_number(accuracy)} and was {compact_number(best)}, while the reward rose from "
        f"{compact_number(reward_then)} to {compact_number(reward)}: the reward is being gamed or learned by heart; "
        "read samples.txt, mend the reward, or export the best checkpoint (checkpoint.keep_best)"
    )


class Watch:
    """The metrics so far, and what was said about them."""

    def __init__(self, config: WarningsConfig) -> None:
        self.config = config
        self.history: History = {}
        self.evaluations: dict[str, list[tuple[float, float]]] = {}
        self._said: set[str] = set()

    def look(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in a step; returns what has come up in it."""
        for name in WATCHED:
            if _is_finite(metrics.get(name)):
                self.history.setdefault(name, []).append(metrics[name])
        return self._new((rule.__name__, rule(self.history, self.config)) for rule in RULES)

    def look_at_evaluation(self, metrics: dict[str, float | None]) -> list[str]:
        """Take in an evaluation (`eval/accuracy`, or `eval/SET/accuracy` of several sets) likewise."""
        rewards = self.history.get("reward/mean", [])[-self.config.window :]
        names = [name for name in metrics if name.startswith("eval/") and name.endswith("accuracy")]
        for name in names if rewards else ():  # there are none before the first step
            if _is_finite(metrics[name]):
                self.evaluations.setdefault(name, []).append((metrics[name], statistics.fmean(rewards)))
        found = {name: gamed_reward(self.evaluations.get(name, []), self.config) for name in names}
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
