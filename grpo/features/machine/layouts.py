"""Layouts for another number of GPUs than a config has ranks."""

from collections.abc import Iterator
from typing import Any

from grpo.config.fields import SHARED_GPU
from grpo.features.machine.verdicts import OUTCOMES, check_memory


def propose(needs: Any, device: Any) -> dict[str, Any]:
    """Return changes that give a config of more ranks a layout for the device's GPUs, if any does.

    It is the first of those whose memory has the best outcome.
    """
    if not device.num_gpus or needs.config.num_ranks <= device.num_gpus:
        return {}

    def worst_outcome(layout: dict[str, Any]) -> int:
        changed = needs.changed(layout)
        verdicts = check_memory(changed.decided(changed.config.roles, device), device)
        return max(OUTCOMES.index(verdict.outcome) for verdict in verdicts)

    return min(layouts_for(needs.config, device.num_gpus), key=worst_outcome, default={})


def layouts_for(config: Any, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield changes that give `world_size` ranks roles, with this config's parallel degrees."""
    if not hasattr(config, "algorithm"):  # SFT
        yield {"num_trainers": world_size}
        return
    shards = config.trainer.ranks_of_a_row * config.trainer.data_replicas

    def divides(trainers: int) -> bool:
        return trainers % shards == 0 and not config.completions_per_step % (trainers // config.trainer.ranks_of_a_row)

    for references in dict.fromkeys([config.roles.num_references, 0]):
        for generators in range(config.generator.tensor_parallel, world_size, config.generator.tensor_parallel):
            trainers = world_size - references - generators
            if 0 < trainers <= max(generators, shards) and divides(trainers):
                split = {
                    "roles.colocated": False,
                    "roles.num_trainers": trainers,
                    "roles.num_references": references,
                    "roles.num_generators": generators,
                }
                yield split | ({"generator.sleep": False} if config.generator.sleep else {})
    if world_size % config.generator.tensor_parallel == 0 and divides(world_size):
        colocated = {
            "roles.colocated": True,
            "roles.num_trainers": world_size,
            "roles.num_references": 0,
            "overlap_steps": 0,
            "generator.gpu_memory_utilization": min(config.generator.gpu_memory_utilization, SHARED_GPU),
        }
        yield colocated
        yield colocated | {"generator.sleep": True}
