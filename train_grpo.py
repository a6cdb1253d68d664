"""GRPO in one torchrun: the algorithm from top to bottom.

    torchrun --nproc_per_node=8 train_grpo.py [RECIPE.py] [--field value ...]

Sample a group of completions for each prompt, score them, compare each with its group, update the policy, give the
generators the new weights. Per token, with r = policy / old policy, A = (reward - mean of its group) / std of its group
and beta the KL coefficient, GRPO (Shao et al. 2024, arXiv:2402.03300) minimises

    -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + beta * KL(policy || reference)

Every rank runs this script. The ranks are split into trainers, references and generators, and one of the trainers,
rank 0, is the driver too: it alone draws prompts, scores completions, decides and logs. A rank asks `roles.trains`,
`roles.references` and `roles.generates` what it has to do, so the loop reads the same whether roles share GPUs or not.
What takes `roles`, and every method of `driver`, is called by all ranks together and in this order; what belongs to
`trainer`, by the trainer ranks. A batch is whole on every trainer; each takes its own part of the micro-batches.

Tensors have shape suffixes: B rows and T positions of a micro-batch, S sequences, N tokens of all sequences laid end to
end (grpo/types.py has them all).
"""

import os
import pathlib
from dataclasses import replace
from functools import partial

import torch

from grpo.algorithm.advantages import group_advantages
from grpo.algorithm.aggregation import aggregate, loss_denominator
from grpo.algorithm.importance import correct_importance, mismatch
from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.kl import kl, sequence_kl
from grpo.algorithm.losses import configured_loss
from grpo.config import GRPOConfig
from grpo.config.layout import check_world_size
from grpo.config.recipes import load
from grpo.data.batches import split_groups
from grpo.models.export import export_hf
from grpo.models.hf_folder import fetch_folder
from grpo.roles.comm import add_ref_logprobs, gather_completions, send_batch, send_rewards, wait_for_all
from grpo.roles.generator import Generator
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import check_sync, sync_weights
from grpo.run import checkpoint
from grpo.run.driver import Driver, Sampled
from grpo.run.failures import refuse_bad_input, run_rank, set_place
from grpo.run.scorer import evaluate
from grpo.run.step_timer import StepTimer
from grpo.types import MicroBatch, Plan, TrainBatch

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
    timer = StepTimer(roles.is_driver)
    driver = Driver(config, roles, timer)
    with timer.startup("checking data, tokenizer and model, starting the reward processes"):
        start = driver.start()
        folder = fetch_folder(start.folder, roles.control)
    with timer.startup("starting vLLM, loading the policy" + " and the reference" * config.needs_reference):
        # vLLM first: it sizes its KV cache from the free memory
        generator = Generator(config, folder, start.stop_token_ids, roles) if roles.generates else None
        trainer = Trainer(config.model, config.trainer, folder, config.num_steps, roles) if roles.trains else None
        if config.needs_reference:
            reference_folder = fetch_folder(start.reference_folder, roles.control)
        reference = Reference(config, reference_folder, roles) if roles.references else None
    with timer.startup("waiting for the other ranks"):
        wait_for_all(roles)
    if start.checkpoint is not None:
        with timer.startup("loading the checkpoint"):
            if roles.trains:
                checkpoint.load_checkpoint(start.checkpoint, trainer)
            sync_weights(trainer, generator, start.step, roles)
    if start.eval_prompts and start.step == 0:
        evaluate(driver, generator, start.eval_prompts, 0, roles)

    for step in range(start.step, config.num_steps):
        plan = driver.plan(step)  # which prompts; whether to check, sync, save, evaluate: decided once, for all ranks

        with timer.phase("generate"):
            sampled = sample(config, plan, generator, driver, roles)  # generators -> driver
            batch = send_batch(driver.batch(sampled), roles)  # driver -> references and trainers

        with timer.phase("reference"):  # meanwhile the driver's worker processes score the completions
            ref_logprobs_N = reference.logprobs(batch) if roles.references else None
            batch = add_ref_logprobs(batch, ref_logprobs_N, roles)  # references -> trainers

        with timer.phase("reward"):
            sampled = driver.score(sampled)  # waits for what is not scored yet
            rewards_S, has_reward_S = send_rewards(driver.rewards(sampled), roles)  # driver -> trainers

        with timer.phase("train"), timer.compilation_in_startup():
            metrics = StepMetrics(len(rewards_S))
            if roles.trains:
                batch = add_advantages(config, batch, rewards_S, has_reward_S, metrics)
                update(config, plan, trainer, batch, metrics)

        with timer.phase("sync"):  # trainers -> generators, which then hold the weights of `step + 1` steps
            if plan.sync:
                sync_weights(trainer, generator, step + 1, roles)

        if plan.evaluate:
            with timer.phase("evaluate"):
                evaluate(driver, generator, start.eval_prompts, step + 1, roles)
        driver.log(step + 1, sampled, batch, metrics)
        # Saved last, so that a run which dies before or meanwhile repeats the step with its evaluation and log line.
        if plan.save and roles.trains:
            with timer.phase("save"):
                state = driver.state(step + 1) if roles.is_driver else None
                checkpoint.save_checkpoint(config.run_dir, step + 1, trainer, state, config.checkpoint.keep)

    if config.checkpoint.export and roles.trains:
        export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", trainer.dtype)
    driver.finish()
    close_roles(roles, generator.close if roles.generates else None)


def sample(config: GRPOConfig, plan: Plan, generator: Generator | None, driver: Driver, roles: Roles) -> Sampled | None:
    """Complete the plan's prompts, `config.group_size` times each; the driver gets rollouts. Every rank calls it."""
    sampled, prompts = None, plan.prompts
    while prompts:  # once; dynamic sampling goes on with other prompts until it has enough groups that differ
        completions = generator.generate(prompts, config.group_size) if roles.generates else None
        completions = gather_completions(completions, roles)
        sampled = driver.take(sampled, plan, prompts, completions)
        prompts = driver.more_prompts(sampled)
    if roles.generates:
        generator.sleep()  # colocated and asked for: its memory is the trainer's until the sync
    return sampled


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm, on trainer ranks
# ---------------------------------------------------------------------------------------------------------------------


def add_advantages(
    config: GRPOConfig,
    batch: TrainBatch,
    rewards_S: torch.Tensor,
    has_reward_S: torch.Tensor,
    metrics: StepMetrics,
) -> TrainBatch:
    """Compare each reward with its group; a sequence's advantage is that of all its tokens.

    Excluded from the loss from here on: sequences without a reward and, if so configured, truncated ones.
    """
    algorithm = config.algorithm
    if algorithm.kl_in == "reward" and batch.ref_logprobs_N is not None:
        penalty_S = algorithm.kl_coef * sequence_kl(batch, algorithm.kl_estimator)
        metrics.record(**{"reward/kl_penalty": penalty_S[has_reward_S].mean().item()})
        rewards_S = rewards_S - penalty_S
    advantages_S = group_advantages(rewards_S, has_reward_S, config.group_size, algorithm.advantages)
    trained_S = has_reward_S & ~batch.truncated_S if algorithm.mask_truncated else has_reward_S
    return replace(
        batch,
        advantages_N=advantages_S[batch.row_N],
        loss_mask_N=batch.loss_mask_N & trained_S[batch.row_N],
    )


def update(config: GRPOConfig, plan: Plan, trainer: Trainer, batch: TrainBatch, metrics: StepMetrics) -> None:
    """The step's optimizer updates: `num_epochs` passes over its groups in `num_mini_batches`, by default just one."""
    algorithm, loss_function = config.algorithm, configured_loss(config.algorithm)
    kl_coef = algorithm.kl_coef  # a schedule would be a function of plan.step
    if config.recomputes_old_logprobs:  # with one update they are the policy's own, and need no forward
        batch = replace(batch, old_logprobs_N=trainer.logprobs(batch))
    first = True
    for _ in range(algorithm.num_epochs):
        for mini_batch in split_groups(batch, config.group_size, algorithm.num_mini_batches):
            # counted over all micro-batches and ranks, so how they split the mini-batch changes nothing
            denominator = loss_denominator(
                mini_batch.num_loss_tokens_S, algorithm.aggregation, config.generator.max_completion_tokens
            )
            objective = partial(
                grpo_objective,
                algorithm=algorithm,
                loss_function=loss_function,
                kl_coef=kl_coef,
                denominator=denominator,
                first=first,
            )
            trainer.forward_backward(mini_batch, objective, metrics)
            if plan.sync_check and first:
                check_sync(metrics, config.largest_mismatch)  # stops the run before anything is updated
            metrics.record(**trainer.optimizer_step())
            first = False
    trainer.scheduler_step()


def grpo_objective(
    micro: MicroBatch,
    logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    *,
    algorithm,
    loss_function,
    kl_coef: float,
    denominator: float,
    first: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's part of an update's objective, and its metrics per token. The parts sum to the whole.

    There are three policies: the one being trained, `old`, which it was when the step began, and the generator's, which
    sampled and differs from `old` by precision, or because it holds older weights. `first`: nothing is updated yet.
    """
    old_known = first or micro.old_logprobs_BT is not None
    old_BT = logprobs_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
    ratio_below_BT = micro.generator_logprobs_BT if algorithm.old_logprobs == "generator" else old_BT
    inputs = LossInputs.of(micro, logprobs_BT, ratio_below_BT)

    loss_BT, metrics = loss_function(inputs)  # -min(r * A, clip(r) * A), or what algorithm.loss names
    loss_BT, metrics = correct_importance(loss_BT, metrics, old_BT, inputs, algorithm)  # old / generator
    if old_known:  # else it would measure how far training moved the policy
        metrics |= mismatch(old_BT, inputs)
    if micro.ref_logprobs_BT is not None:
        kl_BT = kl(logprobs_BT, micro.ref_logprobs_BT, micro.loss_mask_BT, algorithm.kl_estimator)
        metrics["kl"] = kl_BT.detach()
        if algorithm.kl_in == "loss":
            loss_BT = loss_BT + kl_coef * kl_BT
    if algorithm.entropy_coef:
        loss_BT = loss_BT - algorithm.entropy_coef * entropy_BT
    return aggregate(loss_BT, inputs, algorithm.aggregation, denominator), metrics


if __name__ == "__main__":
    run_rank(main)
