"""What each replica samples, in which order and with which seeds: by counts alone, so that every rank finds the same.

None of this changes what is sampled: a completion's seed belongs to it, wherever and whenever it is sampled. (Where a
batch's size changes the order of additions, as in bfloat16 on a GPU, its last digits may.)
"""

import itertools
import random
from dataclasses import dataclass, field

from grpo.types import Prompt, Requests

# Request seeds: one run's seeds lie in a block of its own, far above any number of samples a run can draw.
SEEDS_PER_RUN = 2**40
# Those of completions that go on are above all blocks.
CONTINUATIONS = 2**62


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt: Prompt
    index: int
    """Its place in the run, see `Completion.index`."""
    begun: list[int] = field(default_factory=list)
    """Tokens that it has already."""


def share_out(requests: Requests, group_size: int, num_replicas: int) -> list[list[Request]]:
    """Each replica's part of a step's completions, in the order in which it begins them, which is that of the prompts.

    Replicas get equal numbers, to the nearest, of neighbouring completions: a group shares the computation of its
    prompt. If groups may be left, they get whole groups in turns, first those that were begun before.
    """
    if not (requests.begun or requests.num_left):
        everything = [request for prompt in requests.prompts for request in _unfinished(prompt, group_size, {})]
        edges = [len(everything) * replica // num_replicas for replica in range(num_replicas + 1)]
        return [everything[start:end] for start, end in itertools.pairwise(edges)]
    prompts = sorted(requests.prompts, key=lambda prompt: prompt.index * group_size not in requests.begun)
    groups = [_unfinished(prompt, group_size, requests.begun) for prompt in prompts]
    return [[r for group in groups[replica::num_replicas] for r in group] for replica in range(num_replicas)]


def _unfinished(prompt: Prompt, group_size: int, begun: dict[int, list[int] | None]) -> list[Request]:
    """The completions of a group that have not ended, or not begun."""
    first = prompt.index * group_size
    so_far = {index: begun.get(index, []) for index in range(first, first + group_size)}
    return [Request(prompt, index, ids) for index, ids in so_far.items() if ids is not None]


def enough_groups(shares: list[list[Request]], num_left: int) -> list[int]:
    """How many of its groups each replica completes, so that `num_left` are left in all.

    These are spread over the replicas in proportion to their groups.
    """
    numbers = [len({request.prompt.index for request in requests}) for requests in shares]
    total, before, enough = sum(numbers), 0, []
    for number in numbers:
        left = [num_left * edge // max(total, 1) for edge in (before, before + number)]
        enough.append(number - (left[1] - left[0]))
        before += number
    return enough


def request_seed(run_seed: int, index: int, held_out: bool = False) -> int:
    """Seed of the completion with this place in the run: distinct for every one, the same on any replica.

    Held-out prompts have half of the run's seeds for themselves, so evaluation repeats no training sample.
    """
    return (run_seed % 2**20) * SEEDS_PER_RUN + (SEEDS_PER_RUN // 2 if held_out else 0) + index


def continuation_seed(seed: int, num_tokens: int) -> int:
    """Seed with which a completion goes on after its first `num_tokens` tokens; its own if it has none yet.

    An engine forgets the state of a request's random numbers, which are not to come once more.
    """
    if not num_tokens:
        return seed
    return CONTINUATIONS + random.Random(f"{seed} {num_tokens}").getrandbits(61)
