"""What sampling did of what it could have done, and how much of it with older weights: by counts, never by clocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo.roles.requests import one_by_one, share_out, slot_steps
from grpo.types import Completion, Requests


@dataclass(frozen=True)
class Work:
    """Tokens sampled, and those for which there was room; of several rounds they add up."""

    num_tokens: int = 0
    num_slot_steps: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_tokens + other.num_tokens, self.num_slot_steps + other.num_slot_steps)

    @property
    def idle_frac(self) -> float:
        """Share of the room that was not used: slots of sequences that had ended, while the longest went on."""
        return 1 - self.num_tokens / self.num_slot_steps if self.num_slot_steps else 0.0


def sampling_work(
    requests: Requests, completions: Sequence[Completion], group_size: int, num_replicas: int, num_slots: int
) -> Work:
    """One round's work, from the lengths of what its engines sampled; see `slot_steps`.

    As if a step of an engine gave each running sequence one token, and the KV cache had room for all of them.
    """
    length_of = {completion.index: completion.num_tokens for completion in completions}
    lengths = [
        [length_of.get(requests.prompts[r.prompt].index * group_size + r.first, 0) for r in one_by_one(of_replica)]
        for of_replica in share_out(requests, group_size, num_replicas)
    ]
    return Work(sum(length_of.values()), slot_steps(lengths, num_slots))


def stale_frac(completions: Sequence[Completion], version: int) -> float:
    """Share of the tokens that weights older than `version` sampled."""
    pieces = [piece for completion in completions for piece in completion.pieces]
    num_tokens = sum(piece.num_tokens for piece in pieces)
    return sum(piece.num_tokens for piece in pieces if piece.version < version) / num_tokens if num_tokens else 0.0


def nonfinite_frac(completions: Sequence[Completion]) -> float:
    """Share of the sampled tokens that are excluded from the loss because their log-prob is not finite."""
    masks = [piece.loss_mask_T for c in completions for piece in c.pieces if piece.logprobs_T is not None]
    return 1 - torch.cat(masks).float().mean().item()
