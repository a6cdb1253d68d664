"""Rollouts, and the batches of a step, as tests make them by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo.roles.comm import flatten_rollouts, unflatten_rollouts
from grpo.types import Piece, Prompt, Request, Requests, Rollout, TrainBatch

NO_PROMPT = Prompt(index=-1, ids=[])


def sequence(
    ids_T: Tensor,
    counts_T: Tensor,
    logprobs_T: Tensor | None = None,
    prompt_tokens: int = 0,
    version: int = 0,
    **facts,
) -> Rollout:
    """Return tokens some of which count in the loss: sampled ones if they have log-probs, else labels."""
    pieces = []
    if prompt_tokens:
        pieces.append(Piece.written(ids_T[:prompt_tokens], counts_T[:prompt_tokens]))
        ids_T = ids_T[prompt_tokens:]
        counts_T = counts_T[prompt_tokens:]
        logprobs_T = None if logprobs_T is None else logprobs_T[prompt_tokens:]
    pieces.append(Piece(ids_T, counts_T, logprobs_T, version))
    return Rollout(NO_PROMPT, 0, sequences=(tuple(pieces),), **facts)


def completion(
    ids: Sequence[int] | Tensor,
    logprobs: Sequence[float] | Tensor | None = None,
    prompt: Prompt = NO_PROMPT,
    index: int = 0,
    version: int = 0,
    **facts,
) -> Rollout:
    """Return what one version of the weights sampled behind a prompt, by default with log-probs of 0."""
    sampled = Piece.sampled(ids, torch.zeros(len(ids)) if logprobs is None else logprobs, version)
    return conversation([sampled], prompt, index, **facts)


def conversation(pieces: Iterable[Piece], prompt: Prompt = NO_PROMPT, index: int = 0, **facts) -> Rollout:
    """Return pieces behind a prompt as a rollout."""
    return Rollout(prompt, index, sequences=((Piece.written(prompt.ids), *pieces),), **facts)


def branched(rollout: Rollout, ends: Sequence[int]) -> Rollout:
    """Return the same pieces as an agent's branches: a sequence up to each of `ends`, which repeats earlier turns."""
    (pieces,) = rollout.sequences
    sequences = []
    begin = 1
    for end in ends:
        earlier = [replace(p, loss_mask_T=p.loss_mask_T & False) if p.is_sampled else p for p in pieces[1:begin]]
        sequences.append((pieces[0], *earlier, *pieces[begin:end]))
        begin = end
    return replace(rollout, sequences=tuple(sequences))


def counting_up(request: Request, length: int, version: int = 0, ended_by: str = "stop") -> Rollout:
    """Sample tokens first, first + 1, ... for a request, so that order and loss of one show.

    The first one follows from how many were begun. Log-probs are their negative hundredths.
    """
    first = len(request.begun)
    ids_T = torch.arange(first, first + length)
    return completion(ids_T, -ids_T / 100, request.prompt, request.index, version, ended_by=ended_by)


def hands(rollout: Rollout) -> list[tuple[int, int]]:
    """Return (version, tokens) of the pieces that were sampled."""
    return [(piece.version, piece.num_tokens) for piece in rollout.sampled]


def logprobs_of(rollout: Rollout) -> Tensor:
    """Return the sampling log-probs of what follows the prompt; 0 for tokens that were written."""
    logprobs = []
    for piece in rollout.behind:
        logprobs.append(piece.logprobs_T if piece.is_sampled else torch.zeros(piece.num_tokens))
    return torch.cat(logprobs)


def over_the_wire(rollouts: list[Rollout]) -> list[Rollout]:
    """Return rollouts as the driver gets them."""
    requests = Requests([Request(rollout.prompt, rollout.index) for rollout in rollouts], group_size=1)
    return unflatten_rollouts(flatten_rollouts(rollouts), requests)


def rewarded(
    batch: TrainBatch,
    rewards_R: Tensor,
    parts_FR: Tensor | None = None,
    has_reward_R: Tensor | None = None,
) -> TrainBatch:
    """Return the batch of a step with its rewards, NaN for none; those of one function unless `parts_FR` are given."""
    if parts_FR is None:
        parts_FR = rewards_R[None].clone()
    if has_reward_R is None:
        has_reward_R = ~rewards_R.isnan()
    return replace(batch, rewards_R=rewards_R, has_reward_R=has_reward_R, parts_FR=parts_FR.contiguous())
