"""How fast the ranks of each process group reach each other: a timed all-reduce."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo.roles.process_groups import Roles

# Large enough that the time is that of the bytes: NCCL's, and gloo's, which is a hundred times slower.
GPU_BYTES, CPU_BYTES = 256 * 2**20, 16 * 2**20
NUM_TIMES = 3


@dataclass(frozen=True)
class Bandwidth:
    """Of one process group."""

    group: str
    num_ranks: int
    device: str
    """cuda or cpu."""
    num_bytes: int
    seconds: float
    """Of one all-reduce, the median of NUM_TIMES."""

    @property
    def gib_per_second(self) -> float:
        """What each rank sends and receives: 2 (n - 1) / n of the bytes, as a ring moves them."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.seconds / 2**30


def measure_groups(roles: Roles) -> list[Bandwidth]:
    """The groups of more than one rank in which this rank is. Collective over `roles.control`."""
    cpu = torch.device("cpu")
    groups = [("control", roles.control, cpu), (f"{roles.name} ranks", dist.group.WORLD, roles.device)]
    if roles.learners is not None and roles.learners is not roles.control:
        groups.append(("learners", roles.learners, cpu))
    if roles.weights is not None:
        groups.append(("weights", roles.weights, roles.device))
    return [_measure(name, group, device) for name, group, device in groups if dist.get_world_size(group) > 1]


def _measure(name: str, group: dist.ProcessGroup, device: torch.device) -> Bandwidth:
    num_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    values = torch.zeros(num_bytes // 4, device=device)
    seconds = [_timed(values, group) for _ in range(1 + NUM_TIMES)][1:]  # the first one connects
    return Bandwidth(name, dist.get_world_size(group), device.type, num_bytes, statistics.median(seconds))


def _timed(values: torch.Tensor, group: dist.ProcessGroup) -> float:
    start = time.perf_counter()
    dist.all_reduce(values, group=group)
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
