"""The section `warnings`: what of a run's metrics is said in words, see grpo/run/warnings.py."""

from dataclasses import dataclass
from typing import Annotated

from grpo.config.bounds import AtLeast, AtMost


@dataclass(frozen=True, kw_only=True)
class WarningsConfig:
    """When a run says in words that it goes wrong: once, and again only if it went away in between."""

    window: Annotated[int, AtLeast(2)] = 10
    """Steps whose mean counts; what rises is compared with the mean of the first so many."""
    equal_reward_steps: Annotated[int, AtLeast(0)] = 3
    """So many steps in a row in which the rewards of each group are all equal; 0 says nothing."""
    loss_spike: Annotated[float, AtLeast(0)] = 10.0
    """The loss is so many times its usual distance away from its median, and 0.1 nats at least; 0 says nothing."""
    min_entropy: Annotated[float, AtLeast(0)] = 0.01
    """The policy's entropy is below this (nats, GRPO only)."""
    max_truncated: Annotated[float, AtLeast(0), AtMost(1)] = 0.3
    """More than this share of completions is truncated."""
    kl_rise: Annotated[float, AtLeast(0)] = 5.0
    """`mismatch/kl` is so many times what it was, and 0.001 nats at least; 0 says nothing."""
    min_sample_size: Annotated[float, AtLeast(0), AtMost(1)] = 0.7
    """The effective sample size `mismatch/ess` is below this."""
    accuracy_drop: Annotated[float, AtLeast(0), AtMost(1)] = 0.03
    """Held-out accuracy is so far below its best while the reward is higher than then; 0 says nothing."""
