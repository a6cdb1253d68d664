"""Trainer, reference and vLLM on the same completions, before and after weight syncs.

Arguments: FOLDER NUM_TRAINERS TRAINER_TENSOR_PARALLEL NUM_GENERATORS GENERATOR_TENSOR_PARALLEL.
Ranks: trainers, one reference, generators.
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from grpo.comm import add_ref_logprobs, gather_completions, send_batch, share
from grpo.config import (
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    GRPOConfig,
    ModelConfig,
    RolesConfig,
    TrainerConfig,
)
from grpo.forward import completion_logprobs
from grpo.generator import Generator
from grpo.packing import make_batch
from grpo.reference import Reference
from grpo.roles import close_roles, setup_roles
from grpo.trainer import Trainer
from grpo.types import Prompt
from grpo.weight_sync import sync_weights

TOLERANCE = 1e-4
PROMPTS = [[5, 9, 12, 7], [20, 21, 8, 8, 8, 30, 11], [13]]
GROUP_SIZE, TEMPERATURE = 4, 0.7


def main() -> None:
    folder = sys.argv[1]
    num_trainers, trainer_tp, num_generators, generator_tp = map(int, sys.argv[2:])
    config = GRPOConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        roles=RolesConfig(
            num_trainers=num_trainers, num_references=1, num_generators=num_generators, timeout_minutes=3
        ),
        data=DataConfig(max_prompt_tokens=16),
        generator=GeneratorConfig(
            tensor_parallel=generator_tp, max_completion_tokens=16, temperature=TEMPERATURE, max_num_seqs=16
        ),
        trainer=TrainerConfig(
            tensor_parallel=trainer_tp, micro_batch_tokens=128, compile=False, logprob_chunk_tokens=48
        ),
        grpo=AlgorithmConfig(kl_coef=0.1),
        prompts_per_step=len(PROMPTS),
        group_size=GROUP_SIZE,
    )
    roles = setup_roles(config)
    generator = Generator(config, folder, [1], roles) if roles.generates else None
    trainer = Trainer(config.model, config.trainer, folder, 3, roles) if roles.trains else None
    reference = Reference(config, folder, roles) if roles.references else None
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def sample(step: int):
        """A batch of fresh completions on every trainer and reference rank, and the prompts and completions on all."""
        prompts = [Prompt(index=step * len(PROMPTS) + i, ids=ids) for i, ids in enumerate(PROMPTS)]
        completions = generator.generate(prompts, GROUP_SIZE) if roles.generates else None
        completions = share(gather_completions(completions, roles), roles)
        assert {c.version for c in completions} == {step}
        batch = None
        if roles.is_driver:
            ids = [p for p in PROMPTS for _ in range(GROUP_SIZE)]
            batch = make_batch(ids, [c.ids for c in completions], [c.logprobs for c in completions])
        return send_batch(batch, roles), completions

    def difference(batch) -> float:
        """Largest difference between trainer and generator, on every trainer rank."""
        logprobs_C = completion_logprobs(batch, trainer.model, config.trainer, TEMPERATURE)
        dist.all_reduce(logprobs_C)
        return (logprobs_C - batch.generator_logprobs_C).abs().max().item()

    for step in range(3):
        batch, completions = sample(step)
        batch = add_ref_logprobs(batch, reference.logprobs(batch) if roles.references else None, roles)
        if roles.trains:
            assert difference(batch) < TOLERANCE, f"step {step}: {difference(batch)}"
            # the reference stays what it was, however far the policy went
            expected = []
            for i, completion in enumerate(completions):
                prompt = PROMPTS[i // GROUP_SIZE]
                with torch.no_grad():
                    logits = start(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
                log_p = torch.log_softmax(logits / TEMPERATURE, -1)
                expected.append(log_p.gather(1, torch.tensor(completion.ids)[:, None])[:, 0])
            torch.testing.assert_close(batch.ref_logprobs_C, torch.cat(expected), atol=TOLERANCE, rtol=0)
            # a large update, so that stale weights anywhere would show
            with torch.no_grad():
                for parameter in trainer.model.module.parameters():
                    parameter.mul_(1.2)
            assert difference(batch) > 100 * TOLERANCE, "the update must be visible, or this test cannot fail"
        sync_weights(trainer.model if trainer else None, generator, step + 1, torch.float32, roles)
    close_roles(roles, generator.close if generator else None)


if __name__ == "__main__":
    main()
