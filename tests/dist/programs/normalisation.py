"""The gradient of one step, over ways of splitting it: micro-batches, packing, order of completions, ranks.

Arguments: FOLDER BASELINE_FOLDER. Started on one rank, it first writes the gradients of the undivided step (one
micro-batch, each completion in a row of its own, in order) for each loss, and a later launch on two ranks reads them.
All other steps go through `Trainer.forward_backward`, with the objective of train_grpo.py; prints the largest
difference of each loss.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import train_grpo
from grpo.config import AlgorithmConfig, GeneratorConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models.export import hf_tensors
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.roles.trainer import Objective, Trainer
from grpo.types import Piece, Prompt, TrainBatch
from tests.rollouts import branched, conversation
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
IS_OF_SEQUENCES = re.compile("gspo|mask_sequences")  # what they do depends on where a sequence ends
EVERYTHING = {"kl_coef": 0.1, "entropy_coef": 0.05, "old_logprobs": "generator"}
PER_TOKEN = ("generator_logprobs_N", "ref_logprobs_N", "advantages_N")
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

    num_reduced = set()  # messages of a micro-batch

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

    def gradients(
        config: GRPOConfig,
        count: int,
        order: list[int],
        outside: float | None = None,
        branches: int = 1,
    ) -> dict[str, torch.Tensor]:
        """Gradients of a step in exactly `count` micro-batches on each rank. outside: what stands outside the mask.

        branches: sequences of a completion, with which there are more micro-batches.
        """
        tokens = MICRO_BATCH_TOKENS[num_ranks][count]
        trainer.model.trainer = dataclasses.replace(options, micro_batch_tokens=tokens)
        batch = make_step(order, branches)
        if outside is not None:  # as behind what an environment wrote
            values = {name: getattr(batch, name).where(batch.loss_mask_N, outside) for name in PER_TOKEN}
            batch = dataclasses.replace(batch, **values)
        found = len(trainer.model.lay_out(batch).rows[0])
        if branches > 1:
            count = found
        assert found == count, f"{num_ranks} ranks, {tokens} tokens: {found} micro-batches"
        trainer.zero_gradient()
        with fsdp_messages() as messages:
            trainer.forward_backward(batch, objective_of(config, batch), StepMetrics(batch.num_sequences))
        if num_ranks > 1:
            once = messages["reduced"] / count
            num_reduced.add(once)
            assert once > 0 and len(num_reduced) == 1, (messages, num_reduced)
            # of a block in each forward and, unless it is kept, in each backward
            assert once <= messages["gathered"] / count <= 2 * once, messages
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
        if not IS_OF_SEQUENCES.search(name):  # a rollout counts once, however many sequences it has
            for branches, order in ((3, IN_ORDER), (9, SHUFFLED)):
                error = difference(gradients(config, 2, order, branches=branches), baseline)
                assert error < TOLERANCE, f"{name}, {num_ranks} ranks, {branches} branches: {error}"

        if name == "grpo":
            spoiled = gradients(config, 2, IN_ORDER, outside=1e6)
            exact = gradients(config, 2, IN_ORDER)
            assert all(torch.equal(spoiled[key], exact[key]) for key in exact), "what is outside the loss mask counts"
        if roles.is_driver:
            print(f"{name}, {num_ranks} ranks: {largest:.1e}", flush=True)
    close_roles(roles)


@contextlib.contextmanager
def fsdp_messages() -> Iterator[Counter]:
    """How often FSDP has gathered weights and reduced gradients within the block."""
    counts: Counter = Counter()
    functions = {"gathered": dist.all_gather_single, "reduced": dist.reduce_scatter_single}

    def counted(what: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[what] += 1
            return function(*arguments, **options)

        return call

    for what, function in functions.items():
        setattr(dist, function.__name__, counted(what, function))
    try:
        yield counts
    finally:
        for function in functions.values():
            setattr(dist, function.__name__, function)


def objective_of(config: GRPOConfig, batch: TrainBatch) -> Objective:
    """The objective of a step's first update, as `train_grpo.update` makes it."""
    return train_grpo.grpo_objective(config, batch, config.algorithm.kl_coef, True)


def make_step(order: list[int], branches: int = 1) -> TrainBatch:
    """The same rollouts with their log-probs and advantages, laid out in another order.

    branches: sequences of a rollout, if it has as many tokens; each goes on where the one before it ended.
    """
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
        parts = (values_T.chunk(branches) for values_T in (ids_T[prompt:], mask_T, generator_logprobs))
        whole = conversation(map(Piece, *parts), Prompt(index, ids_T[:prompt].tolist()))
        rollout = branched(whole, range(2, len(whole.pieces) + 1))
        refs = []
        for first, *behind in rollout.sequences:
            num_behind = sum(piece.num_tokens for piece in behind)
            refs += [torch.zeros(first.num_tokens), ref_logprobs[:num_behind]]
        rows.append((rollout, torch.cat(refs), advantage))
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
