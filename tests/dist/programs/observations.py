"""What an environment wrote has no gradient: nothing that belongs to its tokens reaches a parameter, except as context.

Argument: FOLDER. Conversations of three turns with credit for each go through `add_advantages` and
`Trainer.forward_backward`, with everything in the loss that can be: a KL, an entropy, a correction.
"""

import dataclasses
import sys

import torch

from grpo.config import AlgorithmConfig, EnvironmentConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.data.batches import make_batch, sample_of
from grpo.metrics import StepMetrics
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.roles.trainer import Trainer
from grpo.types import Completion, MicroBatch, Piece, Prompt, Sample, TrainBatch
from tests.dist.programs.normalisation import full_gradients, objective_of
from train_grpo import add_advantages

CONFIG = GRPOConfig(
    group_size=2,
    algorithm=AlgorithmConfig(advantages="return_to_go", kl_coef=0.1, entropy_coef=0.01),
    environment=EnvironmentConfig(name="made.py:Up"),
)
PROMPT = 3
TURNS = (5, 1, 4)
ANSWERS = (3, 6)


def conversation(number: int) -> Sample:
    """A prompt, and turns with answers between; each turn earns `number` squared more than the one before."""
    draw, pieces = torch.Generator().manual_seed(number), []
    for turn, length in enumerate(TURNS):
        ids_T = torch.randint(4, 14, (length,), generator=draw)
        pieces.append(Piece.sampled(ids_T, -2 - torch.rand(length, generator=draw), 0))
        if turn < len(ANSWERS):
            ids_T = torch.randint(4, 14, (ANSWERS[turn],), generator=draw)
            pieces.append(Piece(ids_T, torch.zeros(len(ids_T), dtype=torch.bool)))
    note = {"turns": [{"earned": float(number**2 * turn)} for turn in (1, 2, 3)], "reward": 0.0}
    return sample_of(Prompt(0, [5] * PROMPT), Completion(tuple(pieces), truncated=False, episode=note), 1.0)


def step() -> TrainBatch:
    """Two groups of two, with advantages."""
    batch = make_batch([conversation(number) for number in range(4)])
    batch = dataclasses.replace(batch, ref_logprobs_N=batch.generator_logprobs_N - 0.1)
    rewards_S = torch.tensor([3.0 * number**2 for number in range(4)])
    rewards = rewards_S, torch.ones(4, dtype=torch.bool), rewards_S.expand(3, -1)
    return add_advantages(CONFIG, batch, *rewards, 0.1, StepMetrics(4))


def main() -> None:
    roles = setup_trainers()
    options = TrainerConfig(compile=False, activation_checkpointing="none", micro_batch_tokens=64)
    trainer = Trainer(ModelConfig(dtype="float32"), options, sys.argv[1], 1000, roles)
    seen: list[tuple[MicroBatch, torch.Tensor]] = []

    def gradients(batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Of all parameters; `seen` gets the micro-batches and their log-probs, with gradients."""
        objective = objective_of(CONFIG, batch)

        def watched(micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor):
            logprobs_BT.retain_grad()
            seen.append((micro, logprobs_BT))
            return objective(micro, logprobs_BT, entropy_BT)

        trainer.zero_gradient()
        trainer.forward_backward(batch, watched, StepMetrics(batch.num_sequences))
        return full_gradients(trainer)

    batch = step()
    expected = gradients(batch)
    assert len(seen) > 1 and all(gradient.abs().max() > 1e-5 for gradient in expected.values())
    for micro, logprobs_BT in seen:
        sampled_BT = micro.turn_BT > 0
        assert torch.equal(sampled_BT, micro.loss_mask_BT) and (~sampled_BT & (micro.token_BT >= 0)).any()
        assert (logprobs_BT.grad[~sampled_BT] == 0).all() and (logprobs_BT.grad[sampled_BT] != 0).all()

    written_N = batch.turn_N == 0
    for name in ("generator_logprobs_N", "ref_logprobs_N", "advantages_N", "earned_N"):
        values_N = getattr(batch, name)
        spoiled = dataclasses.replace(batch, **{name: values_N.where(~written_N, 1e6)})
        found = gradients(spoiled)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    # they are context, and in the loss they would show
    context = dataclasses.replace(batch, ids_N=batch.ids_N.where(~written_N, 9))
    is_answer_N = written_N & (torch.arange(batch.num_tokens) >= batch.starts_S[batch.owner_N] + PROMPT)
    in_loss = dataclasses.replace(batch, loss_mask_N=batch.loss_mask_N | is_answer_N)
    for changed in (context, in_loss):
        found = gradients(changed)
        assert not any(torch.equal(found[key], expected[key]) for key in expected)
    print("what an environment wrote has no gradient", flush=True)
    close_roles(roles)


if __name__ == "__main__":
    main()
