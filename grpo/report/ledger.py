"""Every rank's seconds of work in each phase of a step, on the driver: which rank the others wait for.

The numbers of one step travel while the next one runs, so that no rank waits for them.
"""

import torch
import torch.distributed as dist

from grpo.roles.process_groups import Roles

# As the scripts name them. A phase that a step did not have is 0.
PHASES = ("startup", "generate", "reference", "reward", "train", "sync", "evaluate", "save", "other")


class Ledger:
    """`exchange` once per step, on every rank."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self._step: int | None = None  # whose numbers are on their way; so are the next two
        self._received: list[torch.Tensor] = []
        self._work: dist.Work | None = None

    def exchange(self, step: int, worked: dict[str, float]) -> tuple[int, torch.Tensor] | None:
        """Send the seconds that this rank worked in each phase of `step`; collect those of the step before.

        Collective over `roles.control`. Returns (step, float64 [ranks, PHASES]) on the driver; None for the first step
        and on other ranks.
        """
        before = self.collect()
        seconds = torch.tensor([worked.get(phase, 0.0) for phase in PHASES], dtype=torch.float64)
        size = self.roles.control.size()
        self._received = [torch.empty_like(seconds) for _ in range(size)] if self.roles.is_driver else []
        self._work = dist.gather(seconds, self._received or None, group=self.roles.control, group_dst=0, async_op=True)
        self._step = step
        return before

    def collect(self) -> tuple[int, torch.Tensor] | None:
        """What is still on its way, once it is here; after the last step. Not collective."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return (self._step, torch.stack(self._received)) if self.roles.is_driver else None


def slowest_ranks(seconds_RP: torch.Tensor) -> dict[str, float]:
    """`time/PHASE_max`, the most seconds that a rank worked in a phase, and `time/PHASE_max_rank`, which it was.

    seconds_RP: of each rank and phase. Phases in which no rank worked are left out, and so is everything of one rank
    alone.
    """
    if len(seconds_RP) == 1:
        return {}
    highest_P, rank_P = (values.tolist() for values in seconds_RP.max(0))
    metrics = {}
    for phase, seconds, rank in zip(PHASES, highest_P, rank_P, strict=True):
        if seconds > 0:
            metrics |= {f"time/{phase}_max": seconds, f"time/{phase}_max_rank": rank}
    return metrics
