"""GRPO in one torchrun: the algorithm from top to bottom.

    torchrun --nproc_per_node=8 train_grpo.py [RECIPE.py] [--field value ...]

Every rank runs this script. The ranks are split into trainers, references and generators (`roles`), and rank 0, the
driver, decides: it draws prompts, scores completions, logs. A rank asks `roles.trains`, `roles.references` and
`roles.generates` what it has to do, so the loop reads the same whether the roles share GPUs or not. Every function that
takes `roles` is a collective: all ranks call it, in this order.

Left out here: how it is done. What each module does stands at its top; begin with
grpo/roles/process_groups.py and grpo/roles/comm.py.
"""

import os
import pathlib
from dataclasses import replace

import torch

from grpo.algorithm.losses import (
    LossInputs,
    aggregate,
    check_loss_output,
    correction_weights,
    effective_sample_size,
    kl,
    load_loss,
    mismatch,
    step_denominator,
)
from grpo.config import GRPOConfig
from grpo.config.layout import check_world_size
from grpo.config.recipes import load
from grpo.data.packing import MicroBatch, per_sequence, scatter_completions, split_groups
from grpo.models import build as models
from grpo.roles.comm import add_advantages, add_ref_logprobs, gather_completions, on_driver, send_batch, share
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import LossFunction, Trainer, merge_updates
from grpo.roles.weight_sync import sync_weights
from grpo.run import checkpoint
from grpo.run.driver import Driver, Start
from grpo.run.failures import refuse_bad_input, run_rank, set_place
from grpo.run.log import Ledger
from grpo.types import Plan, Prompt, TrainBatch

DEFAULT_RECIPE = str(pathlib.Path(__file__).parent / "configs" / "qwen3_1_7b_gsm8k.py")


def main() -> None:
    with refuse_bad_input():
        config = load(GRPOConfig, DEFAULT_RECIPE)
        check_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    roles = setup_roles(config)
    set_place(role=roles.name)
    train(config, roles)


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def train(config: GRPOConfig, roles: Roles) -> None:
    """Run `config.num_steps` GRPO steps. Every rank calls it."""
    driver = on_driver(roles, Driver, config)
    start: Start = share(driver.start if roles.is_driver else None, roles)

    # The engine first, because it looks how much memory is free.
    folder = models.fetch_folder(start.folder, roles.control)
    generator = Generator(config, folder, start.stop_token_ids, roles) if roles.generates else None
    trainer = Trainer(config.model, config.trainer, folder, config.num_steps, roles) if roles.trains else None
    if config.needs_reference:
        folder = models.fetch_folder(start.reference_folder, roles.control)
    reference = Reference(config, folder, roles) if roles.references else None

    dtype = getattr(torch, config.model.dtype)
    if start.checkpoint is not None:
        if roles.trains:
            checkpoint.load_checkpoint(start.checkpoint, trainer)
        sync_weights(trainer.model if trainer else None, generator, start.step, dtype, roles)
    if start.eval_prompts and start.step == 0:
        evaluate(driver, generator, start.eval_prompts, 0, roles)

    ledger = Ledger()
    for step in range(start.step, config.num_steps):
        # Only the driver decides: which prompts, whether to check, to sync, to save, to evaluate.
        plan: Plan = share(on_driver(roles, Driver.next_plan, driver, step), roles)

        with ledger.phase("generate"):
            prompts = plan.prompts
            while prompts:  # one round, but for dynamic sampling, which goes on until it has enough useful groups
                completions = generator.generate(prompts, config.group_size) if roles.generates else None
                completions = gather_completions(completions, roles)  # generators -> driver
                prompts = share(on_driver(roles, Driver.take, driver, prompts, completions, ledger), roles)
            if roles.generates:
                generator.sleep()  # colocated and asked for: its memory is the trainer's until the sync
            batch = send_batch(on_driver(roles, Driver.batch, driver), roles)  # driver -> references and trainers

        with ledger.phase("reference"):
            # at the same time, the driver's worker processes score the completions
            ref_logprobs_C = reference.logprobs(batch) if roles.references else None
            batch = add_ref_logprobs(batch, ref_logprobs_C, roles)  # references -> trainers
            on_driver(roles, Driver.score, driver, ledger)
            advantages_S = on_driver(roles, Driver.advantages, driver, batch)
            batch = add_advantages(batch, advantages_S, roles)  # driver -> trainers

        with ledger.phase("train"):
            stats, logprob_diff_S = update(config, trainer, batch, plan) if roles.trains else (None, None)

        with ledger.phase("sync"):  # trainers -> generators, which then hold the weights of `step + 1` steps
            if plan.sync:
                sync_weights(trainer.model if trainer else None, generator, step + 1, dtype, roles)

        if plan.evaluate:
            with ledger.phase("evaluate"):
                evaluate(driver, generator, start.eval_prompts, step + 1, roles)
        on_driver(roles, Driver.log, driver, step + 1, stats, logprob_diff_S, ledger)
        # Saved last, so that a run which dies before or meanwhile repeats the step with its evaluation and log line.
        if plan.save and roles.trains:
            with ledger.phase("save"):
                state = driver.state(step + 1) if roles.is_driver else None
                checkpoint.save_checkpoint(config.run_dir, step + 1, trainer, state, config.checkpoint.keep)

    if config.checkpoint.export and roles.trains:
        models.export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", dtype)
    on_driver(roles, Driver.finish, driver)
    close_roles(roles, generator.close if roles.generates else None)


def update(
    config: GRPOConfig, trainer: Trainer, batch: TrainBatch, plan: Plan
) -> tuple[dict[str, float], torch.Tensor]:
    """The step's optimizer updates: passes over its groups in mini-batches, by default a single one. Trainer ranks.

    Returns metrics, and the policy's distance to the generator for each sequence [S] (see trainer.Update).
    """
    if config.recomputes_old_logprobs:  # with one update they are the policy's own, and need no forward
        batch = replace(batch, old_logprobs_C=trainer.logprobs(batch))
    updates = []
    for epoch in range(config.algorithm.num_epochs):
        for part in split_groups(batch, config.group_size, config.algorithm.num_mini_batches):
            first = not updates
            tolerance = config.logprob_tolerance if plan.check_sync and first else None
            updates.append(trainer.step(part, policy_loss(config, part, first), tolerance))
        if epoch == 0:
            logprob_diff_S = torch.cat([update.logprob_diff_S for update in updates])
    trainer.end_step()
    stats = merge_updates(updates)
    stats["ess"] = effective_sample_size(stats.pop("weight"), stats.pop("weight_squared"))
    return stats, logprob_diff_S


def policy_loss(config: GRPOConfig, batch: TrainBatch, first_update: bool = True) -> LossFunction:
    """The loss of one micro-batch of `batch`, normalised over the whole batch before its first forward.

    `first_update`: the policy is still that of the step's start.
    """
    algorithm = config.algorithm
    loss_function = load_loss(algorithm.loss)
    counted_C, lengths_S = batch.counted_C, batch.counted_lengths_S
    denominator = step_denominator(lengths_S, algorithm.aggregation, config.generator.max_completion_tokens)

    def loss(micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor):
        generator_BT = scatter_completions(batch.generator_logprobs_C, batch, micro)
        start_BT = logprobs_BT.detach()  # the policy at the start of the step, or as close as is known
        if batch.old_logprobs_C is not None:
            start_BT = scatter_completions(batch.old_logprobs_C, batch, micro)
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=generator_BT if algorithm.old_logprobs == "generator" else start_BT,
            advantages_BT=per_sequence(batch.advantages_S, micro),
            # a completion without a reward and a token whose sampling log-prob is not finite count nowhere
            mask_BT=scatter_completions(counted_C, batch, micro) > 0,
            sequence_BT=micro.sequence_BT,
            lengths_BT=per_sequence(lengths_S, micro).clamp(min=1),
            num_sequences=batch.num_sequences,
        )
        output = loss_function(inputs, algorithm)
        check_loss_output(output, inputs, algorithm.loss)
        loss_BT, metrics = output

        # what the generator sampled is not quite what the policy would have
        weights_BT, corrected_BT = correction_weights(
            start_BT,
            generator_BT,
            inputs,
            algorithm.importance_correction,
            algorithm.importance_correction_low,
            algorithm.importance_correction_high,
        )
        loss_BT = weights_BT * loss_BT
        metrics = metrics | {"corrected_share": corrected_BT}
        if "active_share" in metrics:
            metrics["active_share"] = metrics["active_share"] * (weights_BT != 0)
        if first_update or batch.old_logprobs_C is not None:  # else it would measure how far training moved the policy
            metrics |= mismatch(start_BT, generator_BT, inputs.mask_BT)

        if batch.ref_logprobs_C is not None:
            ref_BT = scatter_completions(batch.ref_logprobs_C, batch, micro)
            kl_BT = kl(logprobs_BT, ref_BT, inputs.mask_BT, algorithm.kl_estimator)
            metrics["kl"] = kl_BT.detach()
            if algorithm.kl_in == "loss":
                loss_BT = loss_BT + algorithm.kl_coef * kl_BT
        if algorithm.entropy_coef:
            loss_BT = loss_BT - algorithm.entropy_coef * entropy_BT

        share = aggregate(loss_BT, inputs.mask_BT, inputs.lengths_BT, algorithm.aggregation, denominator)
        return share, inputs.mask_BT, metrics

    return loss


def evaluate(
    driver: Driver | None, generator: Generator | None, prompts: list[Prompt], step: int, roles: Roles
) -> None:
    """Complete the held-out prompts, score and log; training does not notice. Every rank calls it."""
    greedy, samples = generator.evaluate(prompts) if roles.generates else (None, None)
    greedy, samples = gather_completions(greedy, roles), gather_completions(samples, roles)
    on_driver(roles, Driver.log_evaluation, driver, prompts, greedy, samples, step)


if __name__ == "__main__":
    run_rank(main)
