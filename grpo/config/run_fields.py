"""The sections about the run itself: what it keeps, what it shows, how long it waits, when it warns."""

from dataclasses import dataclass
from typing import Annotated, Literal

from grpo.config.bounds import Above, AtLeast, AtMost
from grpo.config.kinds import Interval


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving, resuming and the exported model."""

    interval: Interval = 0
    """Steps between checkpoints, after the last step too; 0 saves none (see `at_end`)."""
    at_end: bool = False
    """Save after the last step even with `interval` 0, to continue with more steps later."""
    in_background: bool = False
    """Copy the state to host memory and write it while the next steps run; it takes as much memory as the files."""
    keep: Annotated[int, AtLeast(1)] = 2
    """How many of the newest checkpoints are kept."""
    keep_best: str = ""
    """Held-out metric, such as accuracy; where it is highest, that checkpoint stays beside the newest. Empty: none."""
    on_full_disk: Literal["stop", "continue"] = "stop"
    """What a checkpoint for which there is no room does to the run; older ones stay in any case.
    stop: end it with one message; continue: warn, and try again at the next one."""
    export: bool = True
    """Write a Hugging Face folder (`RUN_DIR/model`) at the end."""


@dataclass(frozen=True, kw_only=True)
class DeadlinesConfig:
    """How long nothing may happen before the run ends with the name and the stack of the rank that hangs.

    Something happens when any rank begins another phase or a collective operation, so a long step is no hang."""

    startup_minutes: Annotated[float, Above(0)] = 60.0
    """Loading data, models and checkpoints, starting vLLM, compiling."""
    generate_minutes: Annotated[float, Above(0)] = 60.0
    """What waits for vLLM or for reward functions: sampling, rewards, evaluation."""
    phase_minutes: Annotated[float, Above(0)] = 20.0
    """Every other phase: reference, train, sync, save, validate, what is between them, and until all ranks started."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What a run shows and writes. Everything lands in the run folder."""

    tensorboard: bool = True
    """Write TensorBoard event files to `RUN_DIR/tensorboard`."""
    samples_interval: Interval = 10
    """Steps between readable samples of completions with their rewards; 0 writes none."""
    num_samples: Annotated[int, AtLeast(0)] = 4
    """Completions written each time."""
    wandb_project: str = ""
    """Log to this project at Weights & Biases too (`pip install wandb`); empty does not."""


@dataclass(frozen=True, kw_only=True)
class WarningsConfig:
    """When a run says in words that it goes wrong: once, and again only if it went away in between."""

    window: Annotated[int, AtLeast(2)] = 10
    """Steps whose mean counts; what rises is compared with the mean of the first so many."""
    equal_reward_steps: Annotated[int, AtLeast(0)] = 3
    """So many steps in a row in which the rewards of each group are all equal; 0 says nothing."""
    loss_spike: Annotated[float, AtLeast(0)] = 10.0
    """The loss is so many times its usual distance away from its median, and 0.1 nats at least; 0 says nothing."""
    reward_fall: Annotated[float, AtLeast(0)] = 5.0
    """The mean reward of a window is so many standard errors below that of the best window; 0 says nothing."""
    min_entropy: Annotated[float, AtLeast(0)] = 0.01
    """The policy's entropy is below this (nats, GRPO only)."""
    max_truncated: Annotated[float, AtLeast(0), AtMost(1)] = 0.3
    """More than this share of completions is truncated."""
    kl_rise: Annotated[float, AtLeast(0)] = 5.0
    """`mismatch/kl` is so many times what it was, and 0.001 nats at least; 0 says nothing."""
    min_sample_size: Annotated[float, AtLeast(0), AtMost(1)] = 0.7
    """The effective sample size `mismatch/ess` is below this."""
    accuracy_drop: Annotated[float, AtLeast(0), AtMost(1)] = 0.03
    """Held-out accuracy is so far below its best, and 2.5 standard errors of the difference; 0 says nothing."""
