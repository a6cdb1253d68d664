"""The gradient of one step, over ways of splitting it: micro-batches, packing, order of completions, ranks.

Arguments: FOLDER BASELINE_FOLDER. Started on one rank, it first writes the gradients of the undivided step (one
micro-batch, each completion in a row of its own, in order) for each loss, and a later launch on two ranks reads them.
All other steps go through `Trainer.forward_backward`, with the objective of train_grpo.py; prints the largest
difference of each loss.
"""

import dataclasses
import itertools
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import train_grpo
from grpo.config import AlgorithmConfig, GeneratorConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models.export import hf_tensors
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.roles.trainer import Objective, Trainer
from grpo.types import Piece, Prompt, TrainBatch
from tests.rollouts import conversation
from tests.rows import rows_of, stacked

PROMPT_LENGTHS = [4, 9, 6, 11, 5, 8, 7, 10, 3, 12, 6, 9]
COMPLETION_LENGTHS = [12, 3, 25, 7, 18, 1, 30, 9, 22, 16, 20, 14]
NO_REWARD = 3  # this sequence has none
IN_ORDER = list(range(len(PROMPT_LENGTHS)))
SHUFFLED = [5, 2, 11, 7, 0, 9, 3, 6, 10, 1, 8, 4]
# each aggregation, what looks at whole sequences, and a user's loss; unit/algorithm/test_losses.py splits all losses
ALGORITHMS = {
    "grpo": AlgorithmConfig(),
    "dr_grpo": AlgorithmConfig(loss="dr_grpo"),
    "gspo, wide, token_mean": AlgorithmConfig(loss="gspo", aggregation="token_mean", clip_low=0.9, clip_high=9.0),
    "grpo, mask_sequences": AlgorithmConfig(importance_correction="mask_sequences", kl_estimator="k3_k2_gradient"),
    "a user's": AlgorithmConfig(loss="configs/examples/my_method.py:gentle", aggregation="token_mean"),
}
EVERYTHING = {"kl_coef": 0.1, "entropy_coef": 0.05, "old_logprobs": "generator"}
NOT_FINITE = 7  # of this sequence's sampling log-probs, the second
# ranks: {micro-batches on each rank: the micro_batch_tokens that give this many}
MICRO_BATCH_TOKENS = {1: {1: 512, 2: 192, 4: 80}, 2: {1: 256, 2: 128, 4: 42}}
# (micro-batches on each rank, order): all, and each number of micro-batches once, the orders in turns
SPLITS = list(itertools.product((1, 2, 4), (IN_ORDER, SHUFFLED)))
SPLITS_ONCE = [SPLITS[2 * n + n % 2] for n in range(len(SPLITS) // 2)]
TOLERANCE = 1e-5  # of each tensor's largest gradient


def main() -> None:
    folder, baselines = sys.argv[1], pathlib.Path(sys.argv[2])
    roles = setup_trainers()
    num_ranks = dist.get_world_size()
    # neither the update nor the clipping may touch what is compared
    options = TrainerConfig(compile=False, activation_checkpointing="none", learning_rate=0.0, max_grad_norm=1e9)
    trainer = Trainer(ModelConfig(dtype="float32"), options, folder, 1000, roles)

    def undivided(config: GRPOConfig) -> dict[str, torch.Tensor]:
        """Gradients of the step in one micro-batch, which has a row for each sequence."""
        batch = make_step(IN_ORDER)
        micros = rows_of(batch, batch.num_sequences)
        trainer.zero_gradient()
        trainer.model.accumulate(is_last=True)
        logprobs, entropies = zip(*map(trainer.model.logprobs, micros), strict=True)
        loss, _ = objective_of(config, batch)(stacked(micros), torch.cat(logprobs), torch.cat(entropies))
        loss.backward()
        trainer.model.drop_copy()
        return full_gradients(trainer)

    def gradients(config: GRPOConfig, count: int, order: list[int]) -> dict[str, torch.Tensor]:
        """Gradients of a step in exactly `count` micro-batches on each rank."""
        tokens = MICRO_BATCH_TOKENS[num_ranks][count]
        trainer.model.trainer = dataclasses.replace(options, micro_batch_tokens=tokens)
        batch = make_step(order)
        found = len(trainer.model.lay_out(batch)[0].rows[0])
        assert found == count, f"{num_ranks} ranks, {tokens} tokens: {found} micro-batches"
        trainer.zero_gradient()
        trainer.forward_backward(batch, objective_of(config, batch), StepMetrics(batch.num_sequences))
        return full_gradients(trainer)

    for name, algorithm in ALGORITHMS.items():
        algorithm = dataclasses.replace(algorithm, **EVERYTHING)
        config = GRPOConfig(generator=GeneratorConfig(max_completion_tokens=32), algorithm=algorithm.resolved)
        file = baselines / f"{name}.safetensors"
        if num_ranks == 1:
            save_file(undivided(config), file)
        baseline, largest = load_file(file), 0.0
        assert all(gradient.abs().max() > 1e-4 for gradient in baseline.values())  # so that relative means something
        splits = SPLITS if algorithm.loss == "grpo" else SPLITS_ONCE
        for count, order in splits if num_ranks > 1 else splits[-1:]:
            error = difference(gradients(config, count, order), baseline)
            case = f"{name}, {num_ranks} ranks, {count} micro-batches, order={order}"
            assert error < TOLERANCE, f"{case}: {error}"
            largest = max(largest, error)
        if roles.is_driver:
            print(f"{name}, {num_ranks} ranks: {largest:.1e}", flush=True)
    close_roles(roles)


def objective_of(config: GRPOConfig, batch: TrainBatch) -> Objective:
    """The objective of a step's first update, as `train_grpo.update` makes it."""
    return train_grpo.grpo_objective(config, batch, config.algorithm.kl_coef, True)


def make_step(order: list[int]) -> TrainBatch:
    """The same rollouts with their log-probs and advantages, laid out in another order."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index, (prompt, completion) in enumerate(zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)):
        ids_T = torch.randint(3, 32, (prompt + completion,), generator=generator)
        # of a random model's size, so that some ratios are clipped and some are not
        generator_logprobs, ref_logprobs = torch.randn(2, completion, generator=generator) - 3.0
        advantage = torch.randn((), generator=generator).item()
        if index == NOT_FINITE:
            generator_logprobs[1] = -torch.inf
        mask_T = generator_logprobs.isfinite() & (index != NO_REWARD)
        piece = Piece(ids_T[prompt:], mask_T, generator_logprobs)
        rollout = conversation([piece], Prompt(index, ids_T[:prompt].tolist()))
        rows.append((rollout, F.pad(ref_logprobs, (prompt, 0)), advantage))
    rollouts, refs, advantages = zip(*(rows[i] for i in order), strict=True)
    batch = make_batch(rollouts)
    return dataclasses.replace(
        batch, ref_logprobs_N=torch.cat(refs), advantages_N=torch.tensor(advantages)[batch.rollout_N]
    )


def full_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What the last step left in `.grad`, unsharded, under HF names. Collective over the trainer ranks."""
    parameters = list(trainer.model.module.parameters())
    with torch.no_grad():  # gradients take the weights' place for a moment, and come out as weights do
        kept = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.grad)
        found = {name: tensor.clone() for name, tensor in hf_tensors(trainer.model, torch.float32)}
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest gradient of that tensor."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted)


if __name__ == "__main__":
    main()
