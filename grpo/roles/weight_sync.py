"""New weights from the trainer ranks to every generator: versioned, bucketed, under HF names.

Whatever the sharding on either side, the trainers gather packed shards in the compute dtype, a bucket at a time, and
rank 0 broadcasts it over the `weights` bridge as it lies; the generators copy from it into their engines. On GPUs the
next bucket is gathered, one is sent and the one before is loaded, all at once. What lies where in the buckets is sent
once, at the first sync. Colocated, every rank gathers and loads, and nothing is sent.

A sync check compares log-probs of the same tokens under the same weights. A step's batch need not be of these, so a few
prompts are completed for it, right after a sync.
"""

import math

import torch
import torch.distributed as dist

from grpo.data.batches import make_batch, sample_of
from grpo.models.buckets import BucketMap, WeightBuckets, in_pipeline
from grpo.roles.comm import broadcast, gather_completions, send_batch, wait_for_all
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles
from grpo.roles.trainer import Trainer
from grpo.types import Prompt, Requests

# Prompts and tokens of a sync check: enough to tell other weights from these, few enough to cost a step next to nothing
PROBE_PROMPTS = 8
PROBE_TOKENS = 16


def sync_weights(trainer: Trainer | None, generator: Generator | None, version: int, roles: Roles) -> None:
    """Bring the policy's weights into every generator and mark them as `version`.

    Collective over `roles.control`: every rank calls it, with its trainer and its generator or None.
    """
    bucket_map = agree_on_map(trainer, generator, roles)

    def transfer(index: int, bucket: torch.Tensor) -> None:
        """From rank 0 to every generator rank."""
        dist.broadcast(bucket, group_src=0, group=roles.weights)

    if generator:
        generator.load_weights(bucket_map, trainer.weights.fill if trainer else transfer, version)
    elif trainer:
        in_pipeline([trainer.weights.fill, *([transfer] if roles.weights else [])], bucket_map, roles.device)
    wait_for_all(roles)  # done everywhere, so that the time of a sync is its own


def agree_on_map(trainer: Trainer | None, generator: Generator | None, roles: Roles) -> BucketMap | None:
    """What lies where in the buckets, which follows from the trainers' sharding and stays; None on other ranks.

    The first call makes it on the trainers and is a collective over `roles.weights`.
    """
    if trainer:
        if trainer.weights is None:
            trainer.weights = WeightBuckets(trainer.model, trainer.dtype)
            if roles.weights:
                broadcast(trainer.weights.bucket_map, roles.weights)
        return trainer.weights.bucket_map
    if generator and generator.bucket_map is None:
        generator.bucket_map = broadcast(None, roles.weights)
    return generator.bucket_map if generator else None


def check_sync(
    prompts: list[Prompt], trainer: Trainer | None, generator: Generator | None, tolerance: float, roles: Roles
) -> None:
    """Complete `prompts` once each and compare the log-probs of generator and trainer; leaves nothing behind.

    Collective over all ranks, while both hold the same version. Raises RuntimeError on the trainers if they differ by
    more than `tolerance` (nats) on average. A difference that is not finite is the policy's own, since other tokens are
    excluded, and no fault of the sync: the step's update will be skipped.
    """
    completions = None
    if generator:
        completions = generator.generate(Requests(prompts), 1, max_tokens=PROBE_TOKENS)
        generator.forget_prefixes()
    completions = gather_completions(completions, roles)
    batch = None
    if roles.is_driver:
        batch = make_batch([sample_of(*pair) for pair in zip(prompts, completions, strict=True)])
    batch = send_batch(batch, roles)
    if trainer:  # without a gradient: rows of another length would make torch compile training for any length
        difference_N = (trainer.logprobs(batch) - batch.generator_logprobs_N)[batch.loss_mask_N].abs()
        if len(difference_N):
            check_distance(difference_N.mean().item(), difference_N.max().item(), tolerance)


def check_distance(mean: float, largest: float, tolerance: float) -> None:
    """Raise RuntimeError if log-probs differ by more than `tolerance` (nats) on average, and by a finite number."""
    if tolerance < mean < math.inf:
        raise RuntimeError(
            "the generator does not hold the policy's weights: their log-probs of the same completions differ by "
            f"{mean:.2e} on average (tolerance {tolerance:.0e}, largest {largest:.2e}). Nothing was updated. If "
            "precision explains it, turn the check off with --sync-check-interval 0"
        )
