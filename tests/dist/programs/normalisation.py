"""The gradient of one step, over ways of splitting it; and the canary.

Arguments: FOLDER BASELINE. One rank writes the baseline gradients of each aggregation to BASELINE and compares its other
cases with them; two ranks compare all of theirs.
"""

import dataclasses
import pathlib
import sys

import safetensors.torch
import torch
import torch.distributed as dist

import train_grpo
from grpo.config import AlgorithmConfig, GeneratorConfig, GRPOConfig, ModelConfig, SFTConfig, TrainerConfig
from grpo.forward import micro_batches
from grpo.losses import aggregate
from grpo.models import hf_tensors
from grpo.packing import make_batch
from grpo.roles import close_roles, setup_trainers
from grpo.trainer import Trainer

PROMPT_LENGTHS = [4, 9, 6, 11, 5, 8, 7, 10]
COMPLETION_LENGTHS = [12, 3, 25, 7, 18, 1, 30, 9]
NO_REWARD = 3  # this sequence has none
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_horizon")


def make_step(order: list[int]):
    """The same eight sequences in another order, with log-probs, advantages and reference log-probs."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index, (prompt, completion) in enumerate(zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)):
        ids = torch.randint(3, 32, (prompt + completion,), generator=generator).tolist()
        noise = torch.randn(2, completion, generator=generator) - 3.0
        advantage = float("nan") if index == NO_REWARD else torch.randn((), generator=generator).item()
        rows.append((ids[:prompt], ids[prompt:], noise[0].tolist(), noise[1], advantage))
    rows = [rows[index] for index in order]
    batch = make_batch([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
    return dataclasses.replace(
        batch, ref_logprobs_C=torch.cat([r[3] for r in rows]), advantages_S=torch.tensor([r[4] for r in rows])
    )


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full gradients under HF names."""
    parameters = list(trainer.model.module.parameters())
    with torch.no_grad():
        kept = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.grad)
        found = {name: tensor.clone() for name, tensor in hf_tensors(trainer.model, torch.float32)}
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest gradient of that tensor."""
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted)


def main() -> None:
    folder, baseline = sys.argv[1], pathlib.Path(sys.argv[2])
    roles = setup_trainers(SFTConfig())
    ranks = dist.get_world_size()
    options = TrainerConfig(compile=False, activation_checkpointing="none", learning_rate=0.0, max_grad_norm=1e9)
    trainer = Trainer(ModelConfig(dtype="float32"), options, folder, 1000, roles)
    total = sum(PROMPT_LENGTHS) + sum(COMPLETION_LENGTHS)
    given = list(range(8))
    seen = set()
    for kind in AGGREGATIONS:
        config = GRPOConfig(
            generator=GeneratorConfig(max_completion_tokens=32),
            grpo=AlgorithmConfig(kl_coef=0.1, aggregation=kind, old_logprobs="generator"),
        )
        file = baseline / f"{kind}.safetensors"
        for packing in (False, True):
            for max_tokens in (4096, 96, 64, 48):
                for order in (given, [5, 2, 7, 0, 3, 6, 1, 4]):
                    trainer.config = dataclasses.replace(options, packing=packing, micro_batch_tokens=max_tokens)
                    batch = make_step(order)
                    num_micro_batches = len(list(micro_batches(batch, trainer.model, trainer.config)))
                    seen.add((packing, num_micro_batches))
                    trainer.step(batch, train_grpo.policy_loss(config, batch))
                    found = gradients(trainer)
                    if not file.exists():  # one rank, one micro-batch, unpacked, in order
                        assert (ranks, num_micro_batches, packing, order) == (1, 1, False, given)
                        safetensors.torch.save_file(found, file)
                    difference = compare(found, safetensors.torch.load_file(file))
                    case = f"{kind}, {ranks} ranks, {num_micro_batches} micro-batches, packing={packing}, {order}"
                    assert difference < 1e-5, f"{case}: {difference}"
    counts = {number for _, number in seen}
    assert {1, 2, 4} <= counts, seen
    print(f"{ranks} ranks: (packing, micro-batches) seen: {sorted(seen)}")

    def wrong_loss(micro, logprobs_BT, entropy_BT):
        """Every micro-batch weighs the same, however many tokens it has: what must not happen."""
        mask_BT = micro.completion_mask_BT
        loss = aggregate(-logprobs_BT, mask_BT, micro.completion_lengths_BT, "token_mean", max(1, int(mask_BT.sum())))
        return loss, mask_BT, {}

    trainer.config = dataclasses.replace(options, packing=True, micro_batch_tokens=4096)
    batch = make_step(given)
    if ranks == 1:
        trainer.step(batch, wrong_loss)
        whole = gradients(trainer)
        trainer.config = dataclasses.replace(options, packing=True, micro_batch_tokens=total // 3)
        trainer.step(batch, wrong_loss)
        assert compare(gradients(trainer), whole) > 1e-2, "the comparison must be able to fail"

    before = dict(hf_tensors(trainer.model, torch.float32))
    before = {name: tensor.clone() for name, tensor in before.items()}
    try:  # the log-probs above are noise, so the canary must stop the step, whatever the learning rate
        trainer.optimizer.optimizers[0].param_groups[0]["lr"] = 1.0
        trainer.step(batch, train_grpo.policy_loss(config, batch), logprob_tolerance=1e-3)
    except RuntimeError as error:
        assert "does not hold the policy's weights" in str(error)
    else:
        raise AssertionError("the canary let a wrong generator pass")
    after = dict(hf_tensors(trainer.model, torch.float32))
    assert all(torch.equal(before[name], after[name]) for name in before)
    close_roles(roles)


if __name__ == "__main__":
    main()
