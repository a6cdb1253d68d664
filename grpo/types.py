"""What moves between the parts, and the legend of shape suffixes.

A suffix on a tensor's name spells its dimensions: B rows of a micro-batch, T positions of a row or tokens of one
sequence, S sequences of a step, N tokens of all sequences laid end to end, P prompts, G completions of a group, R
rollouts of a step, F parts of a reward, V vocabulary, D hidden size, E experts that a token takes, K keys that
documents attend to, Q of them in several documents, U uses of these, C token ids that tokens were chosen from, L places
that predict a token, M places that get log-probs. A field of a batch is laid out by its last letter.
Unless a field says otherwise, token ids are int64, masks bool and advantages float32.
What is known of a token stays aligned with it from `Piece` over the wire (`TrainBatch`) to the loss (`MicroBatch`).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

NO_IDS = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class Prompt:
    """A drawn prompt, tokenized by the driver."""

    index: int
    """Position in the run's stream of prompts; never repeats, so request seeds follow from it."""
    ids: list[int]
    """Token ids, chat template applied."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The data set's columns, handed to the reward functions."""
    row: int = -1
    """Row of its source, counted from 0; -1 if it has none."""
    source: str = ""
    """Name of its source or held-out set; empty if there is only one."""
    content: str | list[dict[str, Any]] = ""
    """The prompt as the data has it: a text, or a list of messages."""


@dataclass(frozen=True)
class Request:
    """A completion to sample: a prompt, and the tokens that it has from earlier steps.

    >>> prompt = Prompt(index=5, ids=[3, 4])
    >>> Request(prompt, index=8 * 5 + 3, begun=[12, 7]).index  # the fourth of a group of 8 goes on behind two tokens
    43
    """

    prompt: Prompt
    index: int
    """`Prompt.index` x group size + place in the group."""
    begun: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Requests:
    """Completions that the generators are asked for, group after group."""

    requests: list[Request]
    group_size: int
    num_left: int = 0
    """Number of groups that may be incomplete when sampling ends (`sampling.carry_over`)."""

    @classmethod
    def of(cls, prompts: Iterable[Prompt], group_size: int) -> "Requests":
        """Ask for `group_size` completions of each prompt."""
        requests = []
        for prompt in prompts:
            first = prompt.index * group_size
            requests += [Request(prompt, index) for index in range(first, first + group_size)]
        return cls(requests, group_size)

    @property
    def prompts(self) -> list[Prompt]:
        """List of the prompts, each once."""
        return list({request.prompt.index: request.prompt for request in self.requests}.values())


@dataclass(frozen=True, eq=False)
class Piece:
    """T tokens in a row from one hand: written (prompt, label, a tool's answer), or sampled by one version of weights.

    >>> Piece.written([5, 6, 7]).is_sampled  # a prompt
    False
    >>> Piece.sampled([8, 9], [-0.1, -2.0], version=3, ended_by="stop").loss_mask_T
    tensor([True, True])
    """

    ids_T: Tensor
    loss_mask_T: Tensor
    """bool: the token counts in the loss."""
    logprobs_T: Tensor | None = None
    """float32: natural log-prob under the distribution sampled from; None if the tokens were written, not sampled."""
    version: int = 0
    """Number of steps that the weights which sampled it had been trained."""
    kept_C: Tensor = NO_IDS
    """int32: token after token, the ids that top_p, top_k or min_p kept for it, and -1. Empty: they kept all."""
    ended_by: str = ""
    """stop: by itself. tokens: at a limit, or vLLM cut it off (`repetition_detection`). Empty: it was interrupted, or
    written."""

    @classmethod
    def written(cls, ids: Sequence[int], labels: Sequence[bool] | None = None) -> "Piece":
        """Return tokens that nobody sampled. Those that are `labels` (SFT) count in the loss."""
        ids_T = torch.from_numpy(np.asarray(ids, np.int64))
        labels_T = torch.zeros(len(ids)) if labels is None else torch.as_tensor(labels)
        return cls(ids_T, labels_T.bool())

    @classmethod
    def sampled(
        cls,
        ids: Sequence[int] | Tensor,
        logprobs: Sequence[float] | Tensor,
        version: int = 0,
        kept: Sequence[np.ndarray] = (),
        ended_by: str = "",
    ) -> "Piece":
        """Return sampled tokens. They count in the loss, except those whose log-prob is not finite.

        kept: for each token the ids that were kept, int32, and -1.
        """
        ids_T = torch.from_numpy(np.asarray(ids, np.int64))  # torch reads a list three times as slowly
        logprobs_T = torch.from_numpy(np.asarray(logprobs, np.float32))
        kept_C = torch.from_numpy(np.concatenate([NO_IDS, *kept]))
        return cls(ids_T, logprobs_T.isfinite(), logprobs_T, version, kept_C, ended_by)

    def then(self, further: "Piece") -> "Piece":
        """Join two pieces that the same version of the weights sampled."""
        ids_T = torch.cat([self.ids_T, further.ids_T])
        logprobs_T = torch.cat([self.logprobs_T, further.logprobs_T])
        kept = (self.kept_C.numpy(), further.kept_C.numpy())
        return Piece.sampled(ids_T, logprobs_T, self.version, kept, further.ended_by)

    def first(self, count: int) -> "Piece":
        """Return its first `count` tokens, which are at least one, as a turn that ended there."""
        is_end_C = (self.kept_C < 0).long()
        token_C = is_end_C.cumsum(0) - is_end_C
        kept_C = self.kept_C[token_C < count]
        return Piece.sampled(
            self.ids_T[:count],
            self.logprobs_T[:count],
            self.version,
            [kept_C.numpy()],
            ended_by="stop",
        )

    @property
    def num_tokens(self) -> int:
        return self.ids_T.numel()  # len() of a tensor runs Python

    @property
    def num_kept(self) -> int:
        return self.kept_C.numel()

    @property
    def is_sampled(self) -> bool:
        return self.logprobs_T is not None

    @cached_property
    def is_repeated(self) -> bool:
        """True for a turn that an earlier sequence of the rollout trains: sampled, and no token of it counts."""
        return self.is_sampled and not self.loss_mask_T.any() and bool(self.logprobs_T.isfinite().any())


Pieces = tuple[Piece, ...]
NOTHING = Piece.sampled([], [])
LIMITS = ("tokens", "turns", "seconds")


class EpisodeFacts(TypedDict):
    """What the driver learns of an episode besides its tokens, as JSON values. See `Episode` in play.py."""

    turns: list[dict[str, Any]]
    opening: str | None
    ended_by: str
    reward: float | None
    info: dict[str, Any]
    failure: str
    waited: float
    counts: dict[str, int]


@dataclass(frozen=True, eq=False)
class Rollout:
    """What followed one prompt: sequences of pieces, how it ended, and what it earned.

    A completion is one sequence of two pieces: the prompt and what was sampled. One that newer weights went on with has
    three. A conversation has prompt, turn, answer, turn; then an environment may have written the prompt.
    An agent that edits or branches its history has several sequences. Each token is trained in the first one that has
    it: in a later one its turn is repeated, with its log-probs and a loss mask that is False.

    >>> prompt = Prompt(index=5, ids=[3, 4])
    >>> turn = Piece.sampled([8, 9], [-0.1, -2.0])
    >>> Rollout(prompt, index=43, sequences=((Piece.written(prompt.ids), turn),)).num_tokens
    2
    >>> first = (Piece.written(prompt.ids), turn, Piece.sampled([6], [-0.3]))
    >>> repeated = replace(turn, loss_mask_T=torch.zeros(2).bool())
    >>> second = (Piece.written(prompt.ids), repeated, Piece.written([7]), Piece.sampled([5], [-0.5]))
    >>> Rollout(prompt, index=43, sequences=(first, second)).ids_T
    tensor([8, 9, 6, 7, 5])
    """

    prompt: Prompt
    index: int
    """As in `Request`; the order of everything."""
    sequences: tuple[Pieces, ...]
    """Each of its prompt and what followed. A sequence of one piece has no prompt (SFT). A rollout that goes on in the
    next step has one sequence."""
    temperature: float = 1.0
    """What it was sampled with; 0 is greedy."""
    ended_by: str = "stop"
    """stop, done: by itself. tokens, turns, seconds: at a limit. hung, lost: by its environment. Empty: it goes on in
    the next step."""
    episode: EpisodeFacts | None = None
    """None without an environment."""
    text: str = ""
    """What followed the prompt, decoded with its special tokens except a final EOS."""
    sequence_texts: list[str] = field(default_factory=list)
    """The whole text of each sequence, if there are several."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's unweighted value; None if it gives no reward here."""
    reward: float | None = None
    """Weighted sum. None if no part with a weight gave a value, or if a part failed; then the rollout is in no loss and
    no statistic."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a reward function failed (it took too long, crashed, raised), by its name."""
    advantage: float | None = None
    """Mean over its tokens; None if it is excluded, or not known yet."""
    mismatch: float | None = None
    """Mean over its tokens of |policy's - generator's log-prob|; None as for the advantage."""

    @classmethod
    def alone(cls, piece: Piece, ended_by: str = "stop") -> "Rollout":
        """Return one piece without a prompt, as SFT has it."""
        return cls(Prompt(index=-1, ids=[]), -1, ((piece,),), ended_by=ended_by)

    @classmethod
    def begin(cls, prompt: Prompt, index: int) -> "Rollout":
        """Return the prompt alone, behind which nothing was sampled yet."""
        return cls(prompt, index, ((Piece.written(prompt.ids), NOTHING),), ended_by="")

    def go_on(self, further: "Rollout") -> "Rollout":
        """Append what was sampled in a later step. Pieces of one version become one."""
        if not (further.num_tokens or further.ended_by):
            return self
        if not self.num_tokens:
            return further
        ((*earlier, last),) = self.sequences
        ((_, piece),) = further.sequences
        joined: Pieces = (last, piece)
        if last.version == piece.version:  # no sync in between
            joined = (last.then(piece),)
        return replace(further, sequences=((*earlier, *joined),))

    @property
    def truncated(self) -> bool:
        """True if it ran out of tokens, or as a conversation of turns or seconds."""
        return self.ended_by in LIMITS

    @property
    def lengths(self) -> list[int]:
        """Number of pieces of each sequence."""
        return list(map(len, self.sequences))

    @property
    def pieces(self) -> Pieces:
        """Pieces of all sequences."""
        return tuple(itertools.chain(*self.sequences))

    @property
    def prompt_ids_T(self) -> Tensor:
        """Token ids of the prompt, int64; an environment may have written them."""
        return self.sequences[0][0].ids_T

    @cached_property
    def behind(self) -> Pieces:
        """Pieces that follow a prompt, or the last turn that an earlier sequence has."""
        pieces = []
        for _, *behind in self.sequences:
            new = []
            for piece in behind:
                new.append(piece)
                if piece.is_repeated:
                    new.clear()
            pieces += new
        return tuple(pieces)

    @cached_property
    def sampled(self) -> Pieces:
        """Pieces that were sampled, each once."""
        return tuple(piece for piece in self.behind if piece.is_sampled)

    @cached_property
    def ids_T(self) -> Tensor:
        """Token ids of `behind`, int64, with the EOS that ended it."""
        return torch.cat([piece.ids_T for piece in self.behind])

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens that were sampled, in all sequences."""
        return sum(piece.num_tokens for piece in self.sampled)

    @property
    def version(self) -> int:
        """Version of the weights that sampled its last token."""
        return self.sampled[-1].version

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that sampled it, in any of its sequences."""
        return min((piece.version for piece in self.sampled), default=0)

    @property
    def judged(self) -> str:
        """Text that reward functions judge: what the model wrote, or its last turn in an episode."""
        if self.episode is None:
            return self.text
        turns = self.episode["turns"]
        return turns[-1]["text"] if turns else ""


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The sequences of one step, or of one mini-batch of it, laid end to end. Every trainer rank holds all of it.

    Tensors are on the CPU. Fields per token [N] are aligned with the token itself; None is not known, or not yet.
    """

    ids_N: Tensor
    loss_mask_N: Tensor
    """bool: the token counts. Prompts do not, nor excluded tokens (no reward, a log-prob that is not finite, ...)."""
    lengths_S: Tensor
    """int64: tokens of each sequence."""
    sequence_S: Tensor
    """int64: index of each sequence in the step."""
    rollout_S: Tensor
    """int64: index in the step of the rollout that each sequence belongs to; sequences of a rollout are neighbours."""
    temperatures_S: Tensor
    """float32: what each sequence was sampled with."""
    versions_S: Tensor
    """int64: version of the oldest weights that sampled its rollout."""
    truncated_S: Tensor
    """bool: its rollout ran out of tokens, turns or seconds."""
    prompt_lengths_S: Tensor | None = None
    """int64: number of a sequence's first tokens that are its prompt."""
    generator_logprobs_N: Tensor | None = None
    """float32: by the generator, at sampling time."""
    old_logprobs_N: Tensor | None = None
    """float32: by the policy at the start of the step, or the generator's; None if the one update takes its own
    forward's."""
    ref_logprobs_N: Tensor | None = None
    """float32: by the reference or teacher."""
    turn_N: Tensor | None = None
    """int64: the turn of an episode that sampled the token, from 1; 0 if no turn did. None if turns have no credit."""
    earned_N: Tensor | None = None
    """float32: the environment's weighted reward when that turn began."""
    advantages_N: Tensor | None = None
    kept_C: Tensor | None = None
    """int32: as in `Piece`, with at least the -1 of each token; None if all ids were kept for every token."""
    rewards_R: Tensor | None = None
    """float32: weighted sum of each rollout's reward, 0 for None. The rewards are not known before scoring."""
    has_reward_R: Tensor | None = None
    """bool: the rollout has a reward."""
    parts_FR: Tensor | None = None
    """float32: unweighted value of each part of the reward, NaN for None."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths_S)

    @property
    def num_rollouts(self) -> int:
        return len(self.rollout_S.unique())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts and completions."""
        return len(self.ids_N)

    @property
    def per_token(self) -> dict[str, Tensor | None]:
        """Table of the fields that have a value for each of the N tokens, by their names."""
        names = [field.name for field in fields(self) if "_N" in field.name]
        return {name: getattr(self, name) for name in names}

    @cached_property
    def starts_S(self) -> Tensor:
        """First place of each sequence among the N tokens, int64."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @cached_property
    def owner_N(self) -> Tensor:
        """Index in this batch of the sequence that each token belongs to, int64."""
        return torch.arange(self.num_sequences).repeat_interleave(self.lengths_S)

    @cached_property
    def rollout_N(self) -> Tensor:
        """Index in the step of the rollout that each token belongs to, int64."""
        return self.rollout_S.repeat_interleave(self.lengths_S)

    @cached_property
    def token_C(self) -> Tensor:
        """Index of the token, among the N, that each of `kept_C` belongs to, int64."""
        is_end_C = (self.kept_C < 0).long()
        return is_end_C.cumsum(0) - is_end_C

    @cached_property
    def num_loss_tokens_S(self) -> Tensor:
        """Number of loss tokens of each sequence, int64; 0 for an excluded sequence."""
        zeros_S = torch.zeros_like(self.lengths_S)
        return zeros_S.index_add(0, self.owner_N, self.loss_mask_N.long())

    @cached_property
    def num_rollout_tokens_S(self) -> Tensor:
        """Number of loss tokens of all sequences of the rollout that each sequence belongs to, int64."""
        _, rollout_S = self.rollout_S.unique(return_inverse=True)  # from 0, also in a mini-batch
        zeros_S = torch.zeros_like(self.lengths_S)
        return zeros_S.index_add(0, rollout_S, self.num_loss_tokens_S)[rollout_S]


class KeptIds(NamedTuple):
    """What the tokens of a micro-batch were chosen from. Every token that counts has some."""

    ids_C: Tensor
    """int32: token ids."""
    place_C: Tensor
    """int64: which of the M scored places predicts the token that was chosen from each."""


class SharedPrompts(NamedTuple):
    """Keys that the documents of a micro-batch attend to, if sequences share a prompt."""

    keys_K: Tensor
    """int64: places b * T + t, document after document: those of a shared prompt first, then its own."""
    key_starts: Tensor
    """int32 [documents + 1]: first of the K keys of each document, and K."""
    longest: int
    """Largest number of keys of a document."""
    own_T: Tensor
    """int64 [B * T]: which of the K keys a place is for its own document."""
    reused_Q: Tensor
    """int64: places that are keys of several documents."""
    uses_QU: Tensor
    """int64: all of the K keys that each of these places is, then -1."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward on one rank: a row (B = 1) of T positions, whole sequences and then padding.

    In fields [B, T] the values of a token stand at the position that *predicts* it, the one before it; the mask is
    False where nothing is predicted. Sequences that share a prompt may have it once, in front.
    """

    ids_BT: Tensor
    """int64: the input, each token at its own position; 0 on padding."""
    positions_BT: Tensor
    """int64: position within the sequence, a shared prompt included; padding is documents of PAD_DOCUMENT positions."""
    targets_BT: Tensor
    """int64: the predicted token; 0 where there is none."""
    token_BT: Tensor
    """int64: index of the predicted token among the N of the batch; -1 where there is none."""
    sequence_BT: Tensor
    """int64: index of the position's sequence in the step, for a shared prompt the first one; -1 on padding."""
    temperatures_BT: Tensor
    """float32: what the sequence was sampled with; 1 on padding."""
    loss_mask_BT: Tensor
    num_loss_tokens_BT: Tensor
    """int64: number of loss tokens of the position's sequence, at least 1."""
    num_rollout_tokens_BT: Tensor
    """int64: number of loss tokens of the position's rollout, which may have several sequences, at least 1."""
    # The next six are those of the batch, and None where it has None
    generator_logprobs_BT: Tensor | None
    old_logprobs_BT: Tensor | None
    ref_logprobs_BT: Tensor | None
    turn_BT: Tensor | None
    earned_BT: Tensor | None
    advantages_BT: Tensor | None
    scored_M: Tensor
    """int64: places b * T + t that get log-probs, in order: those of loss tokens, and some that kernels need. If ranks
    take a row together, t counts from the beginning of this rank's stretch."""
    kept: KeptIds | None
    """None if tokens were chosen from all ids."""
    document_starts: Tensor
    """int32 [documents + 1]: places b * T + t at which documents (sequences, shared prompts, ...) begin, and B * T."""
    longest_document: int
    """Number of positions of the longest document."""
    shared: SharedPrompts | None
    """Keys of shared prompts; None if every document attends to its own positions alone."""
    num_sequences: int
    """Upper bound of the indices in `sequence_BT`, which are below it."""


@dataclass(frozen=True)
class StepPlan:
    """What the driver decided for one step; every rank gets the same one and decides nothing itself."""

    step: int
    """Steps finished before this one."""
    requests: Requests | None = None
    """What is sampled first; None if enough is there already."""
    save: bool = False
    evaluate: bool = False
    """Write a checkpoint, and evaluate, after the step."""
    probe: list[Prompt] = field(default_factory=list)
    """Prompts to complete for a sync check before the step; none if no check is due."""
    stop: bool = False
    """Do not begin the step: a user asked the run to stop; `save` then is about the steps before."""


Scalars = dict[str, float]
"""Numbers that are logged, by name."""
Record = dict[str, Any]
"""A line of a .jsonl file."""


def check_saved(what: str, saved: Iterable[str], expected: Iterable[str]) -> None:
    """Raise ValueError if a part of a checkpoint, `what`, has other fields than this version saves. It names them."""
    saved = [*saved]
    expected = [*expected]
    lacking = [name for name in expected if name not in saved]
    unknown = [name for name in saved if name not in expected]
    if lacking or unknown:
        raise ValueError(
            f"{what} in the checkpoint: {', '.join(lacking) or 'nothing'} lacking, {', '.join(unknown) or 'nothing'} "
            "unknown; another version of PlainRL saved it: resume with that version, whose commit is in run.json"
        )
