"""What a step has sampled so far, over the rounds of dynamic sampling (DAPO, arXiv:2503.14476, section 3.2)."""

import math
from dataclasses import dataclass

from grpo.algorithm.advantages import by_group, equal_rewards
from grpo.report.rollout_metrics import reward_tensors
from grpo.report.sampling_work import Work
from grpo.types import Rollout

# A round draws as many prompts as the share of informative groups so far calls for, but expects no less.
LEAST_INFORMATIVE_FRAC = 1 / 8


@dataclass(frozen=True)
class Sampled:
    """On the driver. Rollouts lie group after group."""

    everything: list[Rollout]
    informative: list[Rollout]
    """With dynamic sampling only the groups whose rewards differ, else all."""
    num_wanted: int
    """Completions that the step trains on."""
    num_rounds: int = 0
    num_prompts: int = 0
    work: Work = Work()

    @property
    def rollouts(self) -> list[Rollout]:
        """Those that the step trains on; without any informative group, some of the others."""
        return (self.informative or self.everything)[: self.num_wanted]

    def with_round(
        self, rollouts: list[Rollout], informative: list[Rollout], num_prompts: int, work: Work
    ) -> "Sampled":
        """The same and one more round."""
        return Sampled(
            everything=self.everything + rollouts,
            informative=self.informative + informative,
            num_wanted=self.num_wanted,
            num_rounds=self.num_rounds + 1,
            num_prompts=self.num_prompts + num_prompts,
            work=self.work + work,
        )

    def num_informative(self, group_size: int) -> int:
        """Groups."""
        return len(self.informative) // group_size

    def prompts_to_draw(self, num_groups: int, group_size: int) -> int:
        """How many another round should have, for `num_groups` informative groups in all; at most so many."""
        num_informative = self.num_informative(group_size)
        informative_frac = max(num_informative / self.num_prompts, LEAST_INFORMATIVE_FRAC)
        return min(math.ceil((num_groups - num_informative) / informative_frac), num_groups)

    def dynamic_metrics(self, num_groups: int, group_size: int) -> dict[str, float]:
        """Rounds, the share of groups that were informative, and the share of `num_groups` that was reached."""
        num_informative = self.num_informative(group_size)
        return {
            "sampling/rounds": self.num_rounds,
            "sampling/informative_frac": num_informative / self.num_prompts,
            "sampling/full_frac": min(1.0, num_informative / num_groups),
        }


def informative_groups(rollouts: list[Rollout], group_size: int) -> list[Rollout]:
    """Those of the groups whose rewards differ: the others have no advantage."""
    same_P = equal_rewards(*by_group(*reward_tensors(rollouts), group_size))
    same_S = same_P.repeat_interleave(group_size).tolist()
    return [rollout for rollout, same in zip(rollouts, same_S, strict=True) if not same]
