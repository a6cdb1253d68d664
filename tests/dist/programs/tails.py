"""What engines sample in any order, on any number of replicas and cut into pieces.

Arguments: FOLDER TENSOR_PARALLEL. Every rank is a trainer's, of which there is none here, and a generator's.
"""

import itertools
import sys

import torch

from grpo.config import DataConfig, GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig, SamplingConfig
from grpo.roles.comm import broadcast, gather_rollouts
from grpo.roles.engine.generator import Generator
from grpo.roles.process_groups import close_roles, setup_roles
from grpo.run.groups import GroupBuffer
from grpo.types import Prompt, Requests, Rollout
from tests.rollouts import logprobs_of

TRAINED, CARRIED, GROUP_SIZE, NUM_ROUNDS = 6, 3, 4, 4
LONGEST, TEMPERATURES = 60, (1.0, 0.7)
STOP_TOKENS = [1, 2, 3]  # of about 20, so that lengths differ
PROMPTS = [Prompt(index, [5, 6, 7, 8 + index % 5, 9]) for index in range(TRAINED * NUM_ROUNDS + CARRIED)]


def main(folder: str, tensor_parallel: int) -> None:
    config = GRPOConfig(
        roles=RolesConfig(colocated=True, num_trainers=2),
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(max_prompt_tokens=32),
        generator=GeneratorConfig(
            max_completion_tokens=LONGEST,
            engine={"max_num_seqs": 12},
            tensor_parallel=tensor_parallel,
            temperature=TEMPERATURES,
        ),
        sampling=SamplingConfig(carry_over=CARRIED),
    )
    roles = setup_roles(config.roles, config.needs_reference, config.generator.tensor_parallel)
    generator = Generator(config.generator, config.model, config.data, config.seed, folder, STOP_TOKENS, roles)

    def sample(requests: Requests) -> list[Rollout] | None:
        rollouts = generator.generate(requests)
        generator.forget_prefixes()
        return gather_rollouts(rollouts, requests, roles)

    whole = sample(Requests.of(PROMPTS, GROUP_SIZE))
    reordered = sample(Requests.of(sorted(PROMPTS, key=lambda prompt: prompt.index * 7 % 27), GROUP_SIZE))

    buffer, fresh, trained = GroupBuffer(config.sampling, TRAINED, GROUP_SIZE), iter(PROMPTS), []

    def draw(count: int) -> list[Prompt]:
        return list(itertools.islice(fresh, count))

    for version in range(NUM_ROUNDS):  # by name: the weights stay
        requests = broadcast(buffer.ask(TRAINED, draw) if roles.is_driver else None, roles.control)
        generator.version = version
        sampled = sample(requests)
        if roles.is_driver:
            buffer.add(sampled)
            buffer.take(TRAINED, lambda rollouts: trained.extend(rollouts) or [])
    if roles.is_driver:
        check(whole, reordered, trained)
    close_roles(roles, generator.close)


def check(whole: list[Rollout], reordered: list[Rollout], trained: list[Rollout]) -> None:
    assert [c.index for c in whole] == [c.index for c in reordered] == list(range(len(PROMPTS) * GROUP_SIZE))
    for one, other in zip(whole, reordered, strict=True):
        assert torch.equal(one.ids_T, other.ids_T) and torch.equal(logprobs_of(one), logprobs_of(other)), one.index

    indices = [c.index for c in trained]
    assert len(set(indices)) == len(indices) == TRAINED * NUM_ROUNDS * GROUP_SIZE
    cut = [c for c in trained if len(c.sampled) > 1]
    assert len(cut) > 5
    for c in trained:
        first = c.sampled[0].num_tokens  # tokens up to the first cut are those without any
        assert torch.equal(c.ids_T[:first], whole[c.index].ids_T[:first]), c.index
        assert c.ended_by and (c.ids_T[-1] in STOP_TOKENS or c.truncated)
        assert not set(c.ids_T[:-1].tolist()) & {*STOP_TOKENS}
        assert c.truncated == (c.num_tokens == LONGEST and c.ids_T[-1] not in STOP_TOKENS)
        assert c.temperature == TEMPERATURES[c.index % GROUP_SIZE % 2]
    print(f"{len(trained)} completions, {len(cut)} of them cut", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
