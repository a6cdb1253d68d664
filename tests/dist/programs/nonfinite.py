"""One rank of two has a NaN, at each of the places where one may come from: both skip the update, and nothing moves.

Argument: FOLDER. A good update after the skipped one equals, to the last bit, that of a trainer that never saw it.
"""

import copy
import dataclasses
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from grpo.config import AlgorithmConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.metrics import StepMetrics
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import check_distance
from grpo.types import TrainBatch
from tests.dist.programs.normalisation import IN_ORDER, make_step, objective_of

CONFIG = GRPOConfig(algorithm=AlgorithmConfig(kl_coef=0.1).resolved)
FIELDS = {"reference": "ref_logprobs_N", "old": "old_logprobs_N", "advantages": "advantages_N"}
PLACES = (*FIELDS, "policy", "loss", "gradient")


def main() -> None:
    roles = setup_trainers()
    is_hit = dist.get_rank() == 1
    options = TrainerConfig(compile=False, activation_checkpointing="none", learning_rate=1e-2, micro_batch_tokens=128)
    trainer = Trainer(ModelConfig(dtype="float32"), options, sys.argv[1], 1000, roles)
    good = make_step(IN_ORDER)
    step(trainer, good)  # so that the moments are there
    start = copied(trainer)
    step(trainer, good)
    expected = copied(trainer)

    for place in PLACES:
        trainer.load_state_dict(copy.deepcopy(start))
        metrics, updated = step(trainer, good, place, is_hit)
        assert updated["skipped_frac"] == 1 and f"skipped/{place}" in updated, (place, updated)
        assert [name for name in updated if "/" in name] == [f"skipped/{place}"], updated
        check_distance(*(metrics.means()[f"mismatch/{name}"] for name in ("mean", "max")), 1e9)  # is not to blame
        differs = [name for name, value in copied(trainer).items() if not equal(value, start[name])]
        assert differs == [], (place, differs)
        metrics, updated = step(trainer, good)
        assert updated["skipped_frac"] == 0 and updated["grad_norm"] > 0
        differs = [name for name, value in copied(trainer).items() if not equal(value, expected[name])]
        assert differs == [], (place, differs)
        if roles.is_driver:
            print(f"{place}: skipped on both ranks, then as if it had not been", flush=True)

    close_roles(roles)


def step(trainer: Trainer, batch: TrainBatch, place: str = "", is_hit: bool = False) -> tuple[StepMetrics, dict]:
    """One update, with a NaN at the place on the rank that is hit. What the trainers share, they share it with."""
    objective, metrics, model_logprobs = objective_of(CONFIG, batch), StepMetrics(batch.num_sequences), None
    if place in FIELDS:  # a batch is the same on all ranks: one rank's part spoils it
        values_N = getattr(batch, FIELDS[place])
        values_N = torch.zeros(batch.num_tokens) if values_N is None else values_N.clone()
        if is_hit:
            values_N[int(batch.loss_mask_N.nonzero()[0])] = torch.nan
        dist.all_reduce(values_N)
        batch = dataclasses.replace(batch, **{FIELDS[place]: values_N})
    if place == "policy" and is_hit:
        model_logprobs = trainer.model.logprobs

        def broken(micro):
            logprobs_BT, entropy_BT = model_logprobs(micro)
            return logprobs_BT.where(~micro.loss_mask_BT, torch.nan), entropy_BT

        trainer.model.logprobs = broken
    if place == "loss" and is_hit:
        right = objective

        def objective(micro, logprobs_BT, entropy_BT):
            loss, measured = right(micro, logprobs_BT, entropy_BT)
            return loss + torch.nan, measured  # the gradient stays as it is

    trainer.forward_backward(batch, objective, metrics)
    if model_logprobs is not None:
        del trainer.model.logprobs
    if place == "gradient" and is_hit:
        gradient = next(p for p in trainer.model.module.parameters() if p.grad is not None).grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.fill_(torch.inf)
    return metrics, trainer.optimizer_step()


def copied(trainer: Trainer) -> dict:
    """Weights, moments, number of updates and schedule, as they are now."""
    return copy.deepcopy(trainer.state_dict())


def equal(left, right) -> bool:
    """Of nested dicts of tensors and numbers, to the last bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    if isinstance(left, torch.Tensor):
        left, right = (x.to_local() if hasattr(x, "to_local") else x for x in (left, right))
        return torch.equal(left, right)
    return left == right


if __name__ == "__main__":
    main()
