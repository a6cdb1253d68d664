"""Sampling ahead (`overlap_steps=1`): generators sample the next step while the learners train on this one.

The weights of version k are those after k steps. In the iteration of step k the generators hold version k (synced at
the end of the one before) and sample the prompts of step k + 1 with it, so that a step trains on completions of weights
that are one step older than its own; the first step of a run, for which nothing was sampled ahead, on those of its own.
Between `generate_ahead` and `gather_ahead` nothing passes over the bridge `control`: the generators are busy, and
trainers and references talk over `learners`.

A sync check compares log-probs of the same tokens under the same weights, which a step's batch then no longer has.
`check_probe` completes a few prompts for it, when it is due, before the generators begin with the next step.
"""

import time
from dataclasses import dataclass

import torch

import grpo.roles.timed_collectives as dist
from grpo.data.batches import make_batch, sample_of
from grpo.roles.comm import gather_completions, send_batch
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import check_distance
from grpo.types import Completion, Pending, Plan, Prompt

# Prompts and tokens of a probe: enough to tell other weights from these, few enough to cost a step next to nothing.
PROBE_PROMPTS = 8
PROBE_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Ahead:
    """One rank's part of what is sampled ahead, and when; seconds of the wall clock, which hosts have in common."""

    completions: list[Completion] | None
    """On the head of a replica."""
    began: float
    ended: float
    """When it had sampled; `began` on the learners, which do not wait."""


def generate_ahead(prompts: list[Prompt], group_size: int, generator: Generator | None) -> Ahead | None:
    """Sample the next step's first round on the generators; the learners go on at once. None without prompts."""
    if not prompts:
        return None
    began = time.time()
    completions = generator.generate(prompts, group_size) if generator else None
    return Ahead(completions, began, time.time() if generator else began)


def gather_ahead(ahead: Ahead | None, plan: Plan, roles: Roles) -> Pending | None:
    """Bring what was sampled ahead to the driver, once it and the generators are done; None elsewhere, or if nothing.

    Collective over `roles.control`, if anything was sampled ahead.
    """
    if ahead is None:
        return None
    arrived = time.time()  # on the driver: when it had trained
    times = [torch.empty(2, dtype=torch.float64) for _ in range(roles.control.size())]
    dist.all_gather(times, torch.tensor([ahead.began, ahead.ended], dtype=torch.float64), group=roles.control)
    completions = gather_completions(ahead.completions, roles)
    if not roles.is_driver:
        return None
    began, ended = torch.stack([times[head] for head in roles.heads]).unbind(1)
    sampling = began.min().item(), ended.max().item()
    seconds, overlap = sampling[1] - sampling[0], shared_seconds(sampling, (ahead.began, arrived))
    return Pending(plan.next_prompts, completions, plan.generator_version, plan.next_place, seconds, overlap)


def shared_seconds(first: tuple[float, float], second: tuple[float, float]) -> float:
    """For how long two spans of time, (began, ended) in seconds, were both going on."""
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))


def check_probe(
    prompts: list[Prompt], trainer: Trainer | None, generator: Generator | None, tolerance: float, roles: Roles
) -> None:
    """Complete `prompts` once each and compare the log-probs of generator and trainer; leaves nothing behind.

    Collective over all ranks, while both hold the same version. Raises RuntimeError, see `check_distance`.
    """
    completions = None
    if generator:
        completions = generator.generate(prompts, 1, max_tokens=PROBE_TOKENS)
        generator.forget_prefixes()
    completions = gather_completions(completions, roles)
    batch = None
    if roles.is_driver:
        batch = make_batch([sample_of(*pair) for pair in zip(prompts, completions, strict=True)])
    batch = send_batch(batch, roles)
    if trainer:
        difference_N = (trainer.logprobs(batch) - batch.generator_logprobs_N)[batch.loss_mask_N].abs()
        if len(difference_N):
            check_distance(difference_N.mean().item(), difference_N.max().item(), tolerance)
