"""New weights from the trainer ranks to every generator, tensor by tensor: versioned, under HF names.

Whatever the sharding on either side, the trainers gather a full tensor in the compute dtype, and rank 0 broadcasts it
over the `sync` bridge; each generator rank loads its part through vLLM's own loader. Colocated, every rank gathers
and loads, and nothing is sent.

A sync check compares log-probs of the same tokens under the same weights. Older weights may have sampled a step's
batch, so the check completes a few prompts of its own, before a step, when both hold the same version.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from grpo.data.batches import make_batch
from grpo.models.experts import by_expert
from grpo.models.export import hf_tensors, stacked_shapes, stacked_tensors
from grpo.roles.comm import broadcast, gather_rollouts, send_batch, wait_for_all
from grpo.roles.engine.generator import Generator
from grpo.roles.process_groups import Roles
from grpo.roles.trainer import Trainer
from grpo.types import Prompt, Requests, Rollout

# Prompts of a sync check and least tokens of each completion: enough to tell other weights from these, few enough to
# cost a step next to nothing
PROBE_PROMPTS = 8
PROBE_TOKENS = 16


def sync_weights(
    trainer: Trainer | None,
    generator: Generator | None,
    version: int,
    roles: Roles,
) -> None:
    """Bring the policy's weights into every generator and mark them as `version`.

    Collective over `roles.control`: every rank calls it, with its trainer and its generator or None.
    """
    tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
    if roles.sync:
        tensors = over_bridge(trainer, roles)
    elif trainer:
        tensors = hf_tensors(trainer.model, trainer.dtype)
    if generator:
        generator.load_weights(tensors, version)
    for _ in tensors:  # trainers that do not generate must gather every tensor too
        pass
    wait_for_all(roles)  # so that the time of a sync is its own


def over_bridge(trainer: Trainer | None, roles: Roles) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield rank 0's (HF name, full tensor) on every generator rank. Collective over `roles.sync`.

    Every rank must iterate to the end, because each tensor is a broadcast. A layer's experts travel as one tensor:
    thousands of small broadcasts would take longer than sending their bytes.
    """
    layout = (stacked_shapes(trainer.model), trainer.dtype) if trainer else None
    shapes, dtype = broadcast(layout, roles.sync)
    gathered = stacked_tensors(trainer.model, dtype) if trainer else None
    for name, shape in shapes.items():
        if gathered:
            _, tensor = next(gathered)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=roles.device)
        dist.broadcast(tensor, group_src=0, group=roles.sync)
        yield from by_expert(name, tensor)


def check_sync(
    prompts: list[Prompt], trainer: Trainer | None, generator: Generator | None, dtype: str, roles: Roles
) -> None:
    """Complete `prompts` once each and compare the log-probs of generator and trainer. Leaves nothing behind.

    Without prompts it does nothing. Collective over all ranks, while generator and trainer hold the same version.
    Raises RuntimeError on the trainers if the log-probs differ on average by more than weights of this `dtype` explain
    (`largest_mismatch`). Tokens to which the generator gave no finite log-prob are left out. So a difference that is
    not finite comes from the policy, and raises nothing: the trainers will skip the step's update.
    """
    if not prompts:
        return
    requests = Requests.of(prompts, group_size=1)
    rollouts = None
    if generator:
        rollouts = generator.generate(requests, max_tokens=PROBE_TOKENS)
        generator.forget_prefixes()
    rollouts = gather_rollouts(rollouts, requests, roles)
    batch = make_batch(rollouts) if roles.is_driver else None
    batch = send_batch(batch, roles)
    if trainer:  # forward only, so that torch compiles no backward for rows of this length
        difference_N = (trainer.logprobs(batch) - batch.generator_logprobs_N)[batch.loss_mask_N].abs()
        if len(difference_N):
            tolerance = largest_mismatch(dtype, roles.device)
            check_distance(difference_N.mean().item(), difference_N.max().item(), tolerance)


def check_version(rollouts: list[Rollout], version: int) -> None:
    """Raise RuntimeError if a rollout was just sampled with other weights than those after `version` steps."""
    other_versions = {rollout.version for rollout in rollouts} - {version}
    if other_versions:
        raise RuntimeError(
            f"completions for version {version} were sampled with weights of versions {sorted(other_versions)}: a "
            "weight sync was skipped or repeated"
        )


def largest_mismatch(dtype: str, device: torch.device) -> float:
    """Return the mean log-prob difference (nats) of trainer and generator above which a sync check stops the run.

    On a GPU vLLM's attention rounds float32 numbers to 11 bits before it multiplies them (TF32).
    """
    if dtype == "bfloat16":
        return 0.1
    return 1e-3 if device.type == "cpu" else 1e-2


def check_distance(mean: float, largest: float, tolerance: float) -> None:
    """Raise RuntimeError if the mean difference of log-probs (nats) is above `tolerance` and finite."""
    if tolerance < mean < math.inf:
        raise RuntimeError(
            "the generator does not hold the policy's weights: their log-probs of the same completions differ by "
            f"{mean:.2e} on average (tolerance {tolerance:.0e}, largest {largest:.2e}). Nothing was updated. If "
            "precision, generator.engine (a float8 cache) or generator.sampling explains it, turn the check off with "
            "--sync-check-interval 0"
        )
