"""What each replica samples, in which order and with which seeds: by counts alone, so that every rank finds the same.

None of this changes what is sampled: a completion's seed belongs to it, wherever and whenever it is sampled. (Where a
batch's size changes the order of additions, as in bfloat16 on a GPU, its last digits may.)
"""

import itertools
import random
from dataclasses import dataclass, field, replace

from grpo.types import Prompt, Requests

# Request seeds: one run's seeds lie in a block of its own, far above any number of samples a run can draw.
SEEDS_PER_RUN = 2**40
# Those of completions that go on are above all blocks.
CONTINUATIONS = 2**62


@dataclass(frozen=True)
class Request:
    """Completions of one prompt that are sampled together."""

    prompt: int
    """Position among the prompts."""
    first: int
    """Place of the first of them in the group."""
    count: int
    begun: list[int] = field(default_factory=list)
    """Tokens that the completion has already; only with a count of 1."""


def share_out(requests: Requests, group_size: int, num_replicas: int) -> list[list[Request]]:
    """Each replica's part of a step's completions, in the order in which it begins them, which is that of the prompts.

    Replicas get equal numbers, to the nearest, of neighbouring completions: a group shares the computation of its
    prompt. If groups may be left, they get whole groups in turns, first those that were begun before.
    """
    if requests.begun or requests.num_left:
        return _whole_groups(requests, group_size, num_replicas)
    total = len(requests.prompts) * group_size
    edges = [total * replica // num_replicas for replica in range(num_replicas + 1)]
    return [_between(start, end, group_size) for start, end in itertools.pairwise(edges)]


def _between(start: int, end: int, group_size: int) -> list[Request]:
    """The completions from one to another, group after group."""
    requests = []
    while start < end:
        prompt, first = divmod(start, group_size)
        requests.append(Request(prompt, first, min(group_size - first, end - start)))
        start += requests[-1].count
    return requests


def _whole_groups(requests: Requests, group_size: int, num_replicas: int) -> list[list[Request]]:
    prompts, begun = requests.prompts, requests.begun
    order = sorted(range(len(prompts)), key=lambda number: prompts[number].index * group_size not in begun)
    groups = [_requests_of(number, prompts[number], group_size, begun) for number in order]
    return [[r for group in groups[replica::num_replicas] for r in group] for replica in range(num_replicas)]


def _requests_of(number: int, prompt: Prompt, group_size: int, begun: dict[int, list[int] | None]) -> list[Request]:
    """A group's completions that have not ended, each by itself if the group was begun before."""
    first = prompt.index * group_size
    if first not in begun:
        return [Request(number, 0, group_size)]
    so_far = [begun[first + i] for i in range(group_size)]
    return [Request(number, i, 1, ids) for i, ids in enumerate(so_far) if ids is not None]


def one_by_one(requests: list[Request]) -> list[Request]:
    """The same completions, each by itself."""
    return [replace(r, first=r.first + i, count=1) for r in requests for i in range(r.count)]


def enough_groups(shares: list[list[Request]], num_left: int) -> list[int]:
    """How many of its groups each replica completes, so that `num_left` are left in all.

    These are spread over the replicas in proportion to their groups.
    """
    numbers = [len({request.prompt for request in requests}) for requests in shares]
    total, before, enough = sum(numbers), 0, []
    for number in numbers:
        left = [num_left * edge // max(total, 1) for edge in (before, before + number)]
        enough.append(number - (left[1] - left[0]))
        before += number
    return enough


def request_seed(run_seed: int, prompt: Prompt, completion: int, group_size: int, held_out: bool = False) -> int:
    """Seed of one completion: distinct for every (prompt of the run, completion), the same on any replica.

    Held-out prompts have half of the run's seeds for themselves, so evaluation repeats no training sample.
    """
    first = (run_seed % 2**20) * SEEDS_PER_RUN + (SEEDS_PER_RUN // 2 if held_out else 0)
    return first + prompt.index * group_size + completion


def continuation_seed(seed: int, num_tokens: int) -> int:
    """Seed with which a completion goes on after its first `num_tokens` tokens; its own if it has none yet.

    An engine forgets the state of a request's random numbers, which are not to come once more.
    """
    if not num_tokens:
        return seed
    return CONTINUATIONS + random.Random(f"{seed} {num_tokens}").getrandbits(61)
