"""Sampling ahead (`overlap_steps=1`): generators sample for the next step while the learners train on this one.

The weights of version k are those after k steps. In the iteration of step k the generators hold version k (synced at
the end of the one before) and sample for step k + 1 with it, so that a step trains on completions of weights that are
one step older than its own; the first step of a run, for which nothing was sampled ahead, on those of its own. Between
`launch` and `land` nothing passes over the bridge `control`: the generators are busy, and trainers and references talk
over `learners`.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo.roles.comm import gather_completions
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles
from grpo.types import Completion, Requests


@dataclass(frozen=True, eq=False)
class Ahead:
    """One rank's part of what is sampled ahead, and when; seconds of the wall clock, which hosts have in common."""

    completions: list[Completion] | None
    """On the head of a replica."""
    began: float
    ended: float
    """When it had sampled; `began` on the learners, which do not wait."""


def launch(requests: Requests | None, group_size: int, generator: Generator | None) -> Ahead | None:
    """Sample ahead on the generators; the learners go on at once. None if nothing is asked for."""
    if requests is None:
        return None
    began = time.time()
    completions = generator.generate(requests, group_size) if generator else None
    return Ahead(completions, began, time.time() if generator else began)


def land(ahead: Ahead | None, driver, roles: Roles) -> None:
    """Bring what was sampled ahead to the driver, once it and the generators are done.

    `driver` has a method `land_ahead(completions, seconds, overlap_seconds)` that runs on rank 0. Collective over
    `roles.control`, if anything was sampled ahead.
    """
    if ahead is None:
        return
    arrived = time.time()  # on the driver: when it had trained
    times = [torch.empty(2, dtype=torch.float64) for _ in range(roles.control.size())]
    dist.all_gather(times, torch.tensor([ahead.began, ahead.ended], dtype=torch.float64), group=roles.control)
    completions = gather_completions(ahead.completions, roles)
    began, ended = torch.stack([times[head] for head in roles.heads]).unbind(1)
    sampling = began.min().item(), ended.max().item()
    overlap = shared_seconds(sampling, (ahead.began, arrived))  # counts on the driver
    driver.land_ahead(completions, sampling[1] - sampling[0], overlap)


def shared_seconds(first: tuple[float, float], second: tuple[float, float]) -> float:
    """For how long two spans of time, (began, ended) in seconds, were both going on."""
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))
