"""What moves between the parts, and the legend of shape suffixes.

A suffix on a tensor's name spells its dimensions: B rows of a micro-batch, T positions of a row or tokens of one
sequence, S sequences of a step, N tokens of all sequences laid end to end, P prompts, G completions of a group,
V vocabulary, D hidden size, E experts that a token takes, K keys that documents attend to, R of them
in several documents, U uses of these. A field of a sample or a batch is laid out by its first letter.
What is known of a token stays aligned with it from `Sample` over the wire (`TrainBatch`) to the loss (`MicroBatch`).
"""

import functools
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

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
    source: str = ""
    """Row of its source, from 0, or -1; name of its source or held-out set, empty where there is only one."""
    content: str | list[dict[str, Any]] = ""
    """The prompt as the data has it: a text, or a list of messages."""
    teacher_ids: list[int] = field(default_factory=list)
    """Token ids of the prompt that the teacher reads in its place (`algorithm.teacher_template`); else empty."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of T tokens from one hand: one version of the weights sampled them, or an environment wrote them."""

    ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    """int64; bool: the token counts in the loss."""
    logprobs_T: torch.Tensor | None = None
    """float32: natural log-prob under the distribution sampled from; None: they were written, not sampled."""
    version: int = 0
    """Steps in the weights that sampled it."""

    @classmethod
    def sampled(cls, ids_T: torch.Tensor, logprobs_T: torch.Tensor, version: int) -> "Piece":
        """Sampled tokens are in the loss, except those whose log-prob is not finite: they would make it NaN."""
        return cls(ids_T, logprobs_T.isfinite(), logprobs_T, version)

    @classmethod
    def nothing(cls) -> "Piece":
        """No token."""
        return cls.sampled(torch.empty(0, dtype=torch.int64), torch.empty(0), 0)

    def then(self, further: "Piece") -> "Piece":
        """Both as one; they are sampled by the same version of the weights."""
        logprobs_T = torch.cat([self.logprobs_T, further.logprobs_T])
        return Piece.sampled(torch.cat([self.ids_T, further.ids_T]), logprobs_T, self.version)

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True, eq=False)
class Completion:
    """What follows a prompt, as T tokens in pieces. It has several if newer weights went on with it."""

    pieces: tuple[Piece, ...]
    """At least one. Two neighbours differ in their hand."""
    truncated: bool
    temperature: float = 1.0
    """It ran out of tokens (vLLM's finish reason is `length`); what it was sampled with, 0 is greedy."""
    index: int = 0
    """Its place in the run: `Prompt.index` x group size + its place in the group."""
    ended: bool = True
    """False if it is not complete, and to be carried over."""
    episode: dict[str, Any] | None = None
    """Of a conversation with an environment: its turns, reward, counts and end, as JSON has them."""

    @classmethod
    def of(cls, ids_T: torch.Tensor, logprobs_T: torch.Tensor, truncated: bool, version: int = 0, **others: Any):
        """A completion of one sampled piece."""
        return cls((Piece.sampled(ids_T, logprobs_T, version),), truncated, **others)

    @functools.cached_property
    def ids_T(self) -> torch.Tensor:
        """int64: token ids, with the EOS that ended it."""
        return torch.cat([piece.ids_T for piece in self.pieces])

    @functools.cached_property
    def loss_mask_T(self) -> torch.Tensor:
        """bool: the token counts in the loss."""
        return torch.cat([piece.loss_mask_T for piece in self.pieces])

    @functools.cached_property
    def logprobs_T(self) -> torch.Tensor:
        """float32: of the sampled tokens, 0 where nothing was sampled."""
        parts = [torch.zeros(p.num_tokens) if p.logprobs_T is None else p.logprobs_T for p in self.pieces]
        return torch.cat(parts)

    @property
    def num_tokens(self) -> int:
        """Those that were sampled."""
        return sum(piece.num_tokens for piece in self.sampled)

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """The pieces that were sampled."""
        return tuple(piece for piece in self.pieces if piece.logprobs_T is not None)

    @property
    def version(self) -> int:
        """Steps in the weights that sampled its last piece."""
        return self.sampled[-1].version if self.sampled else self.pieces[-1].version

    @property
    def oldest_version(self) -> int:
        """Steps in the weights that sampled its first piece."""
        return self.sampled[0].version if self.sampled else self.pieces[0].version

    def behind(self, prompt: Prompt) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        """The prompt's ids, int64, which are the first piece if the environment wrote it, and the pieces behind it."""
        if self.pieces[0].logprobs_T is None:
            return self.pieces[0].ids_T, self.pieces[1:]
        return torch.tensor(prompt.ids, dtype=torch.int64), self.pieces


@dataclass(frozen=True)
class Requests:
    """What the generators are asked for: groups of completions that are not complete."""

    prompts: list[Prompt]
    begun: dict[int, list[int] | None] = field(default_factory=dict)
    """Completions of groups that were begun before, by `Completion.index`: their tokens so far; None: it has ended."""
    num_left: int = 0
    """Sampling ends once all but so many of the groups are complete (`sampling.carry_over`)."""


@dataclass(frozen=True)
class Rollout:
    """A prompt with one completion and what it earned."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion, decoded without special tokens removed except a final EOS; of an episode all of it."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's unweighted value; None: that function gives no reward here."""
    reward: float | None = None
    """Weighted sum; None if every function said None or one failed: excluded from the loss and all statistics."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a reward function gave nothing at all (it took too long, crashed, raised), by its name."""
    advantage: float | None = None
    mismatch: float | None = None
    """Means over its tokens, of the advantage and of |policy's - generator's log-prob|; None: excluded, or not yet."""

    @property
    def prompt_ids_T(self) -> torch.Tensor:
        """int64: the prompt's, which an environment may have written."""
        return self.completion.behind(self.prompt)[0]

    @property
    def num_tokens(self) -> int:
        """All of its tokens: prompt, sampled, written."""
        return len(self.prompt_ids_T) + sum(piece.num_tokens for piece in self.completion.behind(self.prompt)[1])

    @property
    def answer(self) -> str:
        """What reward functions judge: what the model wrote, in its last turn if there are several."""
        episode = self.completion.episode
        return self.text if episode is None else (episode["turns"][-1]["text"] if episode["turns"] else "")


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of T tokens to train on, with what is known about it before training."""

    ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    """int64; bool: the token counts in the loss and its denominator."""
    generator_logprobs_T: torch.Tensor | None = None
    """float32: at sampling time, anything where nothing was sampled; None if no token was (SFT)."""
    turn_T: torch.Tensor | None = None
    """int64: which turn of an episode sampled the token, from 1; 0: none. None where turns have no credit."""
    earned_T: torch.Tensor | None = None
    """float32: the environment's weighted reward when that turn began."""
    prompt_tokens: int = 0
    """How many of the first tokens are the prompt, of which none counts; 0 if there is none (SFT)."""
    temperature: float = 1.0
    version: int = 0
    truncated: bool = False


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The sequences of one step, or of one mini-batch of it, laid end to end. Every trainer rank holds all of it.

    Tensors are on the CPU. Per token [N], aligned with the token itself; a None is not known (yet).
    """

    ids_N: torch.Tensor
    loss_mask_N: torch.Tensor
    """int64; bool: the token counts, unlike prompts and what is excluded (no reward, a log-prob not finite, ...)."""
    lengths_S: torch.Tensor
    """int64: tokens of each sequence."""
    sequence_S: torch.Tensor
    """int64: index of each sequence in the step."""
    temperatures_S: torch.Tensor
    versions_S: torch.Tensor
    truncated_S: torch.Tensor
    """float32, what each was sampled with; int64, steps in the weights that sampled its first token; bool, it ran out
    of tokens."""
    prompt_lengths_S: torch.Tensor | None = None
    """int64: how many of a sequence's first tokens are its prompt."""
    generator_logprobs_N: torch.Tensor | None = None
    old_logprobs_N: torch.Tensor | None = None
    ref_logprobs_N: torch.Tensor | None = None
    """float32: by the generator at sampling time; by the policy at the start of the step, None where one update makes
    them its own; by the frozen reference."""
    turn_N: torch.Tensor | None = None
    earned_N: torch.Tensor | None = None
    """int64, float32: see `Sample`."""
    advantages_N: torch.Tensor | None = None
    """float32."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths_S)

    @property
    def num_tokens(self) -> int:
        """Prompts and completions."""
        return len(self.ids_N)

    @property
    def per_token(self) -> dict[str, torch.Tensor | None]:
        """The fields that have a value for each of the N tokens, by their names."""
        return {f.name: getattr(self, f.name) for f in fields(self) if "_N" in f.name}

    @functools.cached_property
    def starts_S(self) -> torch.Tensor:
        """int64: where each sequence begins among the N tokens."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @functools.cached_property
    def owner_N(self) -> torch.Tensor:
        """int64: which of the S sequences each token belongs to."""
        return torch.arange(self.num_sequences).repeat_interleave(self.lengths_S)

    @functools.cached_property
    def num_loss_tokens_S(self) -> torch.Tensor:
        """int64: tokens of each sequence that count in the loss; 0 for a sequence that is excluded."""
        return torch.zeros(self.num_sequences, dtype=torch.int64).index_add(0, self.owner_N, self.loss_mask_N.long())


class SharedPrompts(NamedTuple):
    """Which keys the documents of a micro-batch attend to, where sequences share a prompt."""

    keys_K: torch.Tensor
    """int64: places b * T + t, document after document: its prompt's, if that is laid out for several, and its own."""
    key_starts: torch.Tensor
    """int32 [documents + 1]: where those of each document begin among the K, and K."""
    longest: int
    """Keys of one document."""
    own_T: torch.Tensor
    """int64 [B * T]: where among the K each place is as a key of its own document."""
    reused_R: torch.Tensor
    """int64: the places that are keys of several documents."""
    uses_RU: torch.Tensor
    """int64: where among the K these are, all their uses, then -1."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward on one rank: B rows of T positions, each row whole sequences and then padding.

    Fields down to `advantages_BT` are [B, T]: what belongs to a token is at the position that *predicts* it, the one
    before it; the mask is False where nothing is predicted. Sequences that share a prompt may have it once, in front.
    """

    ids_BT: torch.Tensor
    """int64: the input, each token at its own position; 0 on padding."""
    positions_BT: torch.Tensor
    """int64: within the sequence, also behind a shared prompt; padding is documents of PAD_DOCUMENT positions."""
    targets_BT: torch.Tensor
    token_BT: torch.Tensor
    """int64: the predicted token, and its index among the N of the batch; 0 and -1 where there is none."""
    sequence_BT: torch.Tensor
    """int64: index in the step of this position's sequence, of a shared prompt the first one's; -1 on padding."""
    temperatures_BT: torch.Tensor
    """float32: what the sequence was sampled with; 1 on padding."""
    loss_mask_BT: torch.Tensor
    num_loss_tokens_BT: torch.Tensor
    """bool; int64: tokens of this position's sequence that count in the loss, at least 1."""
    generator_logprobs_BT: torch.Tensor | None
    """float32, as the next five, except `turn_BT`; None where the batch has None."""
    old_logprobs_BT: torch.Tensor | None
    ref_logprobs_BT: torch.Tensor | None
    turn_BT: torch.Tensor | None
    earned_BT: torch.Tensor | None
    advantages_BT: torch.Tensor | None
    scored_M: torch.Tensor
    """int64: places b * T + t, in order, with log-probs: those of loss tokens, and some for kernels."""
    document_starts: torch.Tensor
    """int32 [documents + 1]: places b * T + t at which documents (sequences, shared prompts, ...) begin, and B * T."""
    longest_document: int
    """Positions."""
    shared: SharedPrompts | None
    """None: every document attends to its own positions alone."""
    num_sequences: int
    """Every index in `sequence_BT` is below it."""


@dataclass(frozen=True)
class StepPlan:
    """What the driver decided for one step; every rank gets the same one and decides nothing itself."""

    step: int
    """Steps finished before this one."""
    requests: Requests | None
    """What is sampled first; None if enough is there already."""
    save: bool
    evaluate: bool
    """Write a checkpoint, and evaluate, after the step."""
    probe: list[Prompt] = field(default_factory=list)
    """Prompts to complete for a sync check before the step; none if no check is due."""
    stop: bool = False
    """Do not begin the step: a user asked the run to stop; `save` then is about the steps before."""
