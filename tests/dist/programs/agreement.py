"""Trainer, reference and vLLM on the same completions, before and after weight syncs; and the sync check.

Arguments: FOLDER NUM_TRAINERS TRAINER_TENSOR_PARALLEL NUM_GENERATORS GENERATOR_TENSOR_PARALLEL [FIELDS as JSON].
Ranks: trainers, one reference, generators. Prints the largest differences of each round.
"""

import dataclasses
import json
import sys

import torch
from transformers import AutoModelForCausalLM

from grpo.config import (
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    GRPOConfig,
    ModelConfig,
    RolesConfig,
    TrainerConfig,
    change,
)
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models.export import hf_tensors
from grpo.models.lora import adapted_layers
from grpo.roles.comm import add_ref_logprobs, gather_rollouts, send_batch
from grpo.roles.engine.generator import Generator
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import check_sync, sync_weights
from grpo.types import Prompt, Requests, TrainBatch
from tests.dist.programs.parity import original_values
from train_grpo import grpo_objective

TOLERANCE = 1e-4  # nats, in float32
# The last one fills a block of vLLM's prefix cache (128 tokens on CPU), which must not outlive the weights.
PROMPTS = [[5, 9, 12, 7], [13], [3 + i * i % 29 for i in range(140)]]
GROUP_SIZE, TEMPERATURES = 4, (0.7, 1.0, 1.3)
NUM_ROUNDS = 2
# Weights have a standard deviation of 0.2 and Adam moves each by about this much, so no update goes unnoticed. Scaling
# them all would: Qwen3 normalizes queries and keys, so stale q_proj and k_proj would agree to 1e-5.
LEARNING_RATE = 0.05


def main() -> None:
    config = make_config(sys.argv[1], *map(int, sys.argv[2:6]))
    if len(sys.argv) > 6:
        config = change(config, json.loads(sys.argv[6]))
    roles = setup_roles(config.roles, config.needs_reference, config.generator.tensor_parallel)
    folder = config.model.path
    generator = (
        Generator(config.generator, config.model, config.data, config.seed, folder, [1], roles)
        if roles.generates
        else None
    )
    trainer = Trainer(config.model, config.trainer, folder, NUM_ROUNDS, roles) if roles.trains else None
    reference = None
    if roles.references:
        reference = Reference(config.model, config.trainer, folder, config.reference_tensor_parallel, roles)
    start = None
    if roles.trains:  # not where vLLM runs, which changes transformers' classes in place
        start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    for version in range(NUM_ROUNDS):
        batch = sample(config, generator, version, roles)
        batch = add_ref_logprobs(batch, reference, roles)
        if roles.trains:
            # the reference stays what it was, however far the policy went
            generator_error = difference(batch, trainer, roles)
            with torch.no_grad():
                start_N = original_values(start, batch)[0]
            reference_error = largest(batch.ref_logprobs_N - start_N, batch)
            assert (batch.kept_C is None) == (not config.generator.sampling)
            if batch.kept_C is not None:  # log-probs of the whole distribution are others
                num_kept_N = batch.token_C[batch.kept_C >= 0].bincount(minlength=batch.num_tokens)
                assert (batch.loss_mask_N == (num_kept_N > 0)).all()
                whole_error = difference(dataclasses.replace(batch, kept_C=None), trainer, roles)
                assert whole_error > 100 * TOLERANCE, f"the whole distribution is off by {whole_error} only"
            assert generator_error < TOLERANCE, f"version {version}: trainer and generator differ by {generator_error}"
            assert reference_error < TOLERANCE, f"version {version}: the reference is off by {reference_error}"
            if version == 0:
                assert largest(batch.ref_logprobs_N - batch.generator_logprobs_N, batch) < TOLERANCE
            # a large update of every tensor
            before = snapshot(trainer)
            step(trainer, config, batch)
            unchanged = [
                name
                for name, tensor in snapshot(trainer).items()
                if (tensor - before[name]).abs().max() < 0.01 and is_trained(name, trainer)
            ]
            assert not unchanged, f"the update left {unchanged} as they were, so stale ones would not show"

        stale = sample(config, generator, version, roles)  # the generators hold the old weights still
        if roles.trains:
            stale_error = difference(stale, trainer, roles)
            assert stale_error > 1000 * TOLERANCE, f"stale weights differ by {stale_error} only: this test cannot fail"
        assert_check(version, False, trainer, generator, config, roles)
        if roles.is_driver:
            errors = f"generator {generator_error:.1e}, reference {reference_error:.1e}, unsynced {stale_error:.1e}"
            print(f"version {version}: {errors}", flush=True)
        sync_weights(trainer, generator, version + 1, roles)
        assert_check(version, True, trainer, generator, config, roles)
    close_roles(roles, generator.close if generator else None)


def make_config(
    folder: str, num_trainers: int, trainer_tensor_parallel: int, num_generators: int, generator_tensor_parallel: int
) -> GRPOConfig:
    return GRPOConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        roles=RolesConfig(num_trainers=num_trainers, num_references=1, num_generators=num_generators),
        data=DataConfig(max_prompt_tokens=144),
        generator=GeneratorConfig(
            tensor_parallel=generator_tensor_parallel,
            max_completion_tokens=16,
            temperature=TEMPERATURES,
            engine={"max_num_seqs": 16},
        ),
        trainer=TrainerConfig(
            tensor_parallel=trainer_tensor_parallel,
            micro_batch_tokens=192,
            logprob_chunk_tokens=48,
            compile=False,
            learning_rate=LEARNING_RATE,
        ),
        algorithm=AlgorithmConfig(kl_coef=0.1).resolved,
        prompts_per_step=len(PROMPTS),
        group_size=GROUP_SIZE,
    )


def prompts_of(version: int) -> list[Prompt]:
    return [Prompt(index=version * len(PROMPTS) + i, ids=ids) for i, ids in enumerate(PROMPTS)]


def sample(config: GRPOConfig, generator: Generator | None, version: int, roles: Roles) -> TrainBatch | None:
    """Completions as a batch on trainer and reference ranks, with some advantages. Every rank calls it."""
    prompts = prompts_of(version)
    requests = Requests.of(prompts, config.group_size)
    rollouts = generator.generate(requests) if roles.generates else None
    rollouts = gather_rollouts(rollouts, requests, roles)
    batch = None
    if roles.is_driver:
        assert {c.version for c in rollouts} == {version}, f"expected version {version}"
        taken = [c.temperature for c in rollouts]
        assert taken == [TEMPERATURES[i % len(TEMPERATURES)] for _ in prompts for i in range(GROUP_SIZE)], taken
        batch = make_batch(rollouts)
        advantages_S = torch.linspace(-1, 1, batch.num_sequences)
        batch = dataclasses.replace(batch, advantages_N=advantages_S[batch.owner_N])
    return send_batch(batch, roles)


def assert_check(
    version: int,
    synced: bool,
    trainer: Trainer | None,
    generator: Generator | None,
    config: GRPOConfig,
    roles: Roles,
) -> None:
    """A sync check stops the trainers if the generators hold other weights, and else nobody; it changes no weight.

    Every rank calls it.
    """
    prompts = prompts_of(version)
    refused, before = False, snapshot(trainer) if trainer else {}
    try:
        check_sync(prompts, trainer, generator, config.model.dtype, roles)
    except RuntimeError as error:
        refused = "the generator does not hold the policy's weights" in str(error)
        if not refused:
            raise
    assert refused == (roles.trains and not synced), f"version {version}, synced {synced}: refused {refused}"
    if trainer:
        assert trainer.num_loss_tokens == 0 and all(p.grad is None for p in trainer.model.module.parameters())
        assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(trainer).items())


def difference(batch: TrainBatch, trainer: Trainer, roles: Roles) -> float:
    """Largest difference between trainer and generator. Collective over the trainer ranks."""
    return largest(trainer.logprobs(batch) - batch.generator_logprobs_N, batch)


def largest(difference_N: torch.Tensor, batch: TrainBatch) -> float:
    """Of the completions' tokens."""
    return difference_N[batch.loss_mask_N].abs().max().item()


def step(trainer: Trainer, config: GRPOConfig, batch: TrainBatch) -> None:
    """One update, as in the loop. Collective over the trainer ranks."""
    trainer.zero_gradient()
    metrics = StepMetrics(batch.num_sequences)
    trainer.forward_backward(batch, grpo_objective(config, batch, config.algorithm.kl_coef, True), metrics)
    trainer.optimizer_step()


def is_trained(name: str, trainer: Trainer) -> bool:
    """Whether the tensor of this HF name learns; with LoRA only those with an adapter do."""
    adapted = {f"{layer.name}.weight": layer for layer in adapted_layers(trainer.model.module)}
    return not adapted or name in trainer.model.names.to_hf(adapted)


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the full weights under HF names. Collective over the trainer ranks."""
    return {name: tensor.clone() for name, tensor in hf_tensors(trainer.model, torch.float32)}


if __name__ == "__main__":
    main()
