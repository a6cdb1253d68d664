"""What moves between the parts, and the legend of shape suffixes.

Shape suffixes on tensors: B rows of a micro-batch, T positions in a row, S sequences of a step, N tokens of all
sequences laid end to end, C completion tokens of all sequences laid end to end, G completions of a group,
V vocabulary, D hidden size.

Layer 0: pure data, no torch.distributed.
"""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """One drawn prompt, tokenized by the driver."""

    index: int
    """Position in the run's stream of prompts; never repeats, so request seeds follow from it."""
    ids: list[int]
    """Token ids, chat template applied."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The data set's columns, handed to the reward functions."""
    row: int = -1
    """Row of the data set; -1 if it comes from none."""


@dataclass(frozen=True)
class Completion:
    """What a generator sampled for one prompt."""

    ids: list[int]
    """Sampled token ids, with the EOS that ended them."""
    logprobs: list[float]
    """Natural-log probability of each sampled token under the distribution sampled from; same length as `ids`."""
    truncated: bool
    """It ran out of tokens (vLLM's finish reason is `length`)."""
    version: int = 0
    """Steps in the weights it was sampled with."""


@dataclass(frozen=True)
class Rollout:
    """A prompt with one completion and what it earned."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion, decoded without special tokens removed except a final EOS."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's unweighted value; None: that function gives no reward here."""
    reward: float | None = None
    """Weighted sum; None if every function said None or one failed: the completion leaves loss and statistics."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a reward function gave nothing at all (it took too long, crashed, raised), by its name."""
    advantage: float = 0.0
    """NaN: it leaves the loss."""
    mismatch: float | None = None
    """Mean absolute difference of policy's and generator's log-probs over its tokens; None until it was trained on."""


@dataclass(frozen=True)
class TrainBatch:
    """All sequences of one optimizer step, ragged: flat values with lengths. Every trainer rank holds all of it.

    S sequences; sequence s is `prompt_lengths_S[s]` prompt ids followed by `completion_lengths_S[s]` completion ids.
    Tensors lie on the CPU.
    """

    ids_N: torch.Tensor
    """int64: prompts and completions, sequence after sequence."""
    prompt_lengths_S: torch.Tensor
    """int64."""
    completion_lengths_S: torch.Tensor
    """int64."""
    generator_logprobs_C: torch.Tensor | None = None
    """float32: at sampling time, by the generator; None for sequences that nobody sampled (SFT)."""
    advantages_S: torch.Tensor | None = None
    """float32; NaN: the sequence has no reward and leaves the loss and its denominator."""
    ref_logprobs_C: torch.Tensor | None = None
    """float32: by the frozen reference."""
    old_logprobs_C: torch.Tensor | None = None
    """float32: by the policy at the start of the step; None where one update makes them the policy's own."""
    temperatures_S: torch.Tensor | None = None
    """float32: what each sequence was sampled with; None is 1."""

    @property
    def counted_C(self) -> torch.Tensor:
        """bool: the completion tokens that count in loss and denominator: those of sequences with an advantage, but for
        tokens whose sampling log-prob is not finite."""
        counted_C = torch.ones(self.num_completion_tokens, dtype=torch.bool)
        if self.advantages_S is not None:
            counted_C &= ~self.advantages_S.isnan().repeat_interleave(self.completion_lengths_S)
        if self.generator_logprobs_C is not None:
            counted_C &= self.generator_logprobs_C.isfinite()
        return counted_C

    @property
    def counted_lengths_S(self) -> torch.Tensor:
        """int64: tokens of each completion that count; 0 for a sequence that does not."""
        sequence_C = torch.arange(self.num_sequences).repeat_interleave(self.completion_lengths_S)
        return torch.zeros(self.num_sequences, dtype=torch.int64).index_add(0, sequence_C, self.counted_C.long())

    @property
    def lengths_S(self) -> torch.Tensor:
        """Tokens of each sequence, prompt and completion."""
        return self.prompt_lengths_S + self.completion_lengths_S

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths_S)

    @property
    def num_tokens(self) -> int:
        """Prompts and completions."""
        return len(self.ids_N)

    @property
    def num_completion_tokens(self) -> int:
        return int(self.completion_lengths_S.sum())


@dataclass(frozen=True)
class Plan:
    """What the driver decided for one step; every rank gets the same one and decides nothing itself."""

    step: int
    """Steps finished before this one."""
    prompts: list[Prompt]
    """Of the first round of sampling."""
    check_sync: bool
    """Canary: compare the policy's log-probs with the generator's before the update."""
    sync: bool
    """Give the generators the new weights after the update."""
    save: bool
    """Write a checkpoint after the update."""
    evaluate: bool
    """Evaluate after the update."""
