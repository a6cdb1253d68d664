"""GRPO in one torchrun: the algorithm from top to bottom.

    torchrun --nproc_per_node=8 train_grpo.py [RECIPE.py] [--field value ...]

Sample a group of completions for each prompt, score them, compare each with its group, update the policy, give the
generators the new weights. A completion of reward r has the advantage A = (r - mean of its group) / std of its group.
With the ratio = policy / old policy of a token and beta the KL coefficient, GRPO (Shao et al. 2024, arXiv:2402.03300)
minimises, averaged over a completion's tokens and then over completions,

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + beta * KL(policy || reference)

Other losses, advantages and averages are a field of the config away; their formulas are in grpo/algorithm/.

Every rank runs this script. A rank is a trainer, a reference, a generator, or several of them where roles share GPUs;
it holds the objects of its roles (`trainer`, `reference`, `generator`) and None for the others. One of the trainers,
rank 0, is the driver too: it alone draws prompts, has completions scored, decides and logs. Functions that take `roles`
and all methods of `driver` except `state` are collective: every rank calls them, in this order. A method of the driver
runs on rank 0; the others get its decision or, where it is data that a next call sends, None. What is done only `if
trainer` is collective over the trainers. A batch is whole on every trainer, which takes its own part of the
micro-batches. What only learners (trainers and references) need, no generator waits for: with `overlap_steps=1` the
generators sample the next step from `generate_ahead` to `gather_ahead`, while the learners score and train on this one.

A suffix on a tensor's name spells its dimensions: B rows and T positions of a micro-batch, S sequences (a prompt with
its completion), N tokens of all sequences laid end to end. grpo/types.py has them all.
"""

import pathlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from grpo.config import AlgorithmConfig, GRPOConfig
from grpo.run.command_line import read_config

DEFAULT_RECIPE = pathlib.Path(__file__).parent / "configs" / "qwen3_1_7b_gsm8k.py"
CONFIG = read_config(GRPOConfig, DEFAULT_RECIPE) if __name__ == "__main__" else None  # a typo does not wait for torch

import torch

from grpo.algorithm.advantages import group_advantages, teacher_advantages
from grpo.algorithm.aggregation import aggregate, loss_denominator
from grpo.algorithm.importance import correct_importance, mismatch
from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.kl import kl, sequence_kl
from grpo.algorithm.losses import configured_loss
from grpo.data.batches import split_groups
from grpo.folder import checkpoint
from grpo.models.export import export_hf
from grpo.models.hf_folder import fetch_folder
from grpo.roles.ahead import check_probe, gather_ahead, generate_ahead
from grpo.roles.comm import add_ref_logprobs, broadcast_tensors, gather_completions, send_batch, wait_for_all
from grpo.roles.compile_ahead import compile_ahead, compiles_ahead
from grpo.roles.engine import import_vllm
from grpo.roles.generator import Generator
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import check_sync, sync_weights
from grpo.run.driver import Driver, Start
from grpo.run.profiler import profile_step
from grpo.run.replay import ReplayDriver
from grpo.run.sampled import Sampled
from grpo.run.scorer import evaluate
from grpo.run.step_timer import StepTimer
from grpo.types import MicroBatch, Pending, Plan, TrainBatch
from grpo.watch.failures import run_script, set_place
from grpo.watch.watchdog import watched


def main(config: GRPOConfig) -> None:
    roles = setup_roles(config)
    set_place(role=roles.name)
    with watched(roles, config.deadlines):
        train(config, roles)


# ---------------------------------------------------------------------------------------------------------------------
# The loop, on every rank
# ---------------------------------------------------------------------------------------------------------------------


def train(config: GRPOConfig, roles: Roles) -> None:
    """Run the GRPO steps up to `config.num_steps`, from the checkpoint's or from 0."""
    timer = StepTimer(roles.is_driver)
    driver = (ReplayDriver if config.replay else Driver)(config, roles, timer)
    start, trainer, reference, generator = start_up(config, driver, timer, roles)
    saver = checkpoint.Saver(config.run_dir, config.checkpoint, roles.saving)
    pending = driver.first_pending  # with overlap_steps: what was sampled ahead for the next step

    for step in profile_step(range(start.step, config.num_steps), config.profile, config.run_dir, roles):
        plan = driver.plan(step, pending)  # prompts; whether to check, sync, evaluate, save: the same on all ranks
        if plan.stop:  # by a signal, or the file `stop` in the run folder
            if plan.save and trainer:
                saver.save(step, trainer, *driver.state(step, pending))
            break
        kl_coef = config.algorithm.kl_coef  # a schedule goes here, as a function of the step
        if plan.probe:  # the sync check of a step whose batch was sampled ahead, by older weights
            with timer.phase("sync"):
                check_probe(plan.probe, trainer, generator, config.largest_mismatch, roles)

        with timer.phase("generate"):
            sampled = sample(config, plan, pending, generator, driver, roles)  # generators -> driver; scoring begins
            ahead = generate_ahead(plan.next_prompts, config.group_size, generator)  # overlap_steps: learners go on
            batch = send_batch(driver.make_batch(sampled), roles)  # driver -> references and trainers

        with timer.phase("reference"):  # meanwhile worker processes of the driver score
            batch = add_ref_logprobs(batch, reference, roles)  # references -> trainers

        with timer.phase("reward"):
            sampled = driver.collect_rewards(sampled)
            rewards = broadcast_tensors(driver.reward_tensors(sampled), roles)  # driver -> references and trainers
            if config.record:
                driver.record(step + 1, sampled, batch, rewards)  # a file, for --replay

        with timer.phase("train"), timer.compilation_in_startup():
            metrics = StepMetrics(batch.num_sequences if trainer else 0)
            if trainer:
                batch = add_advantages(config, batch, *rewards, kl_coef, metrics)
                update(config, plan, trainer, batch, kl_coef, metrics)

        with timer.phase("generate"):
            pending = gather_ahead(ahead, plan, roles)  # generators -> driver; None without overlap_steps

        with timer.phase("sync"):  # trainers -> generators, which then hold the weights after `step + 1` steps
            if plan.sync:
                sync_weights(trainer, generator, step + 1, roles)

        if plan.evaluate:  # only in steps that sync
            with timer.phase("evaluate"):
                evaluate(driver, generator, start.eval_prompts, config.evaluation, step + 1, roles)
        driver.log(step + 1, sampled, batch, metrics, pending)
        if plan.save and trainer:  # last: dying before the save is complete repeats the step, its log line too
            with timer.phase("save"):
                saver.save(step + 1, trainer, *driver.state(step + 1, pending))
    else:  # not stopped
        if config.checkpoint.export and trainer:
            export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", trainer.dtype)
    saver.wait()  # on the trainers, for what their threads still write with checkpoint.in_background
    driver.finish()
    close_roles(roles, generator.close if generator else None)


def sample(
    config: GRPOConfig,
    plan: Plan,
    pending: Pending | None,
    generator: Generator | None,
    driver: Driver,
    roles: Roles,
) -> Sampled | None:
    """Complete the plan's prompts, `config.group_size` times each. Returns the rollouts on the driver, else None.

    If the generators sampled ahead, that is done, and only dynamic sampling may have prompts left to complete.
    """
    sampled = driver.take_pending(plan, pending)
    prompts = plan.prompts or driver.more_prompts(sampled)
    while prompts:  # once; dynamic sampling takes other prompts until enough groups have rewards that are not all equal
        completions = generator.generate(prompts, config.group_size, plan.carried) if generator else None
        completions = gather_completions(completions, roles)
        sampled = driver.take(sampled, plan, prompts, completions)
        prompts = driver.more_prompts(sampled)
    if generator:
        generator.sleep()  # only if generator.sleep is set: colocated, with a sync in every step, which wakes it
    return sampled


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm, on the trainers. What is measured goes into `metrics`: numbers by `record`, and values per token by the
# objective's dict, whose means are over all loss tokens of the step that have them, on all ranks.
# ---------------------------------------------------------------------------------------------------------------------


def add_advantages(
    config: GRPOConfig,
    batch: TrainBatch,
    rewards_S: torch.Tensor,
    has_reward_S: torch.Tensor,
    kl_coef: float,
    metrics: StepMetrics,
) -> TrainBatch:
    """Compare each reward with its group; all tokens of a completion get its advantage, and each its teacher's, if any.

    The loss mask, so far the sampled tokens with a finite log-prob, loses the sequences from which there is nothing to
    learn, those without reward and teacher, and, with `mask_truncated`, the truncated ones, whose rewards still count
    in their group.
    """
    algorithm = config.algorithm.resolved
    if algorithm.kl_in == "reward" and batch.ref_logprobs_N is not None:
        penalty_S = kl_coef * sequence_kl(batch, algorithm.kl_estimator)  # KL(generator || reference)
        metrics.record(**{"reward/kl_penalty": penalty_S[has_reward_S].mean().item()})
        rewards_S = rewards_S - penalty_S.where(penalty_S.isfinite(), 0)  # else the update is skipped, see Trainer
    # (reward - mean of the group) / (std of the group + 1e-4), or what algorithm.advantages names
    advantages_S = group_advantages(rewards_S, has_reward_S, config.group_size, algorithm.advantages)
    advantages_N, trained_S = advantages_S[batch.owner_N], has_reward_S
    if algorithm.distill_coef:  # on-policy distillation: the reference is a teacher, who judges every token
        teacher_N, trained_S = teacher_advantages(batch), torch.ones_like(has_reward_S)
        metrics.record(**{"distill/reverse_kl": -teacher_N[batch.loss_mask_N].mean().item()})
        advantages_N = advantages_N + algorithm.distill_coef * teacher_N
    if algorithm.mask_truncated:
        trained_S = trained_S & ~batch.truncated_S
    return replace(batch, advantages_N=advantages_N, loss_mask_N=batch.loss_mask_N & trained_S[batch.owner_N])


def update(
    config: GRPOConfig, plan: Plan, trainer: Trainer, batch: TrainBatch, kl_coef: float, metrics: StepMetrics
) -> None:
    """The step's optimizer updates: `num_epochs` passes over the batch, each split by groups into `num_mini_batches`.

    One update for each mini-batch; by default one in all.
    """
    algorithm, loss_function = config.algorithm.resolved, configured_loss(config.algorithm)
    if config.recomputes_old_logprobs:  # else `old` is the forward's own
        batch = replace(batch, old_logprobs_N=trainer.logprobs(batch))
    first_update = True
    for _ in range(algorithm.num_epochs):
        for mini_batch in split_groups(batch, config.group_size, algorithm.num_mini_batches):
            # over the whole mini-batch, so the same for any micro-batches, packing and ranks
            denominator = loss_denominator(
                mini_batch.num_loss_tokens_S, algorithm.aggregation, config.generator.max_completion_tokens
            )
            objective = partial(grpo_objective, algorithm, loss_function, kl_coef, denominator, first_update)
            trainer.forward_backward(mini_batch, objective, metrics)
            if plan.sync_check and first_update:
                check_sync(metrics, config.largest_mismatch)  # over all trainers' tokens; stops them before the update
            metrics.record(**trainer.optimizer_step())
            first_update = False
    trainer.schedule.step()  # the learning rate follows steps, not updates


def grpo_objective(
    algorithm: AlgorithmConfig,
    loss_function: Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    kl_coef: float,
    denominator: float,
    first_update: bool,
    micro: MicroBatch,
    logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's part of an update's objective, and metrics per token. Parts and gradients are summed.

    Besides the frozen reference there are three versions of the policy: as it is now (`logprobs`), as it was when the
    step began (`old`), and the generator's, which drew the samples and differs from `old` in numerics, or because its
    weights are some steps older.
    """
    old_BT = logprobs_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
    base_BT = micro.generator_logprobs_BT if algorithm.old_logprobs == "generator" else old_BT
    inputs = LossInputs.of(micro, logprobs_BT, base_BT)

    # -min(ratio * A, clip(ratio) * A) with ratio = exp(logprobs - base), or what algorithm.loss names
    loss_BT, metrics = loss_function(inputs)
    loss_BT, metrics = correct_importance(loss_BT, metrics, old_BT, inputs, algorithm)  # weights old / generator
    if first_update or micro.old_logprobs_BT is not None:  # else it would measure training and not the generator
        metrics |= mismatch(old_BT, inputs)
    if micro.ref_logprobs_BT is not None:
        kl_BT = kl(logprobs_BT, micro.ref_logprobs_BT, micro.loss_mask_BT, algorithm.kl_estimator)
        metrics["kl"] = kl_BT.detach()
        if algorithm.kl_in == "loss":
            loss_BT = loss_BT + kl_coef * kl_BT
    if algorithm.entropy_coef:
        loss_BT = loss_BT - algorithm.entropy_coef * entropy_BT
    return aggregate(loss_BT, inputs, algorithm.aggregation, denominator), metrics


# ---------------------------------------------------------------------------------------------------------------------
# Before the first step
# ---------------------------------------------------------------------------------------------------------------------


def start_up(
    config: GRPOConfig, driver: Driver, timer: StepTimer, roles: Roles
) -> tuple[Start, Trainer | None, Reference | None, Generator | None]:
    """Check everything on rank 0, then load this rank's models. Every rank calls it."""
    trainer = reference = generator = None
    if roles.generates and not roles.is_driver:  # which is busy with the checks that follow
        with timer.startup("importing vLLM"):
            import_vllm(roles)
    with timer.startup("checking data, tokenizer and model, starting the reward processes"):
        start = driver.start()
        folder = fetch_folder(start.model_folder, roles.control)
        reference_folder = fetch_folder(start.reference_folder, roles.control) if config.needs_reference else None
    if roles.generates:  # first, because vLLM sizes its KV cache from the free memory
        with timer.startup("starting vLLM"):
            generator = Generator(
                config.generator, config.model, config.data, config.seed, folder, start.stop_token_ids, roles
            )
    with timer.startup("loading the models"):
        if roles.trains:
            trainer = Trainer(config.model, start.trainer, folder, config.num_steps, roles, config.seed)
        if roles.references:
            base = trainer.model if trainer and config.reference_is_base else None  # LoRA: without its adapters
            reference = Reference(config, reference_folder, roles, base)
    if compiles_ahead(config, roles):
        with timer.startup("compiling, while vLLM starts on other ranks"):
            compile_ahead(config, trainer, reference, roles)
    with timer.startup("waiting for the other ranks"):
        wait_for_all(roles)
    if start.checkpoint is not None:
        with timer.startup("loading the checkpoint"):
            if trainer:
                checkpoint.load_checkpoint(start.checkpoint, trainer)
            sync_weights(trainer, generator, start.step, roles)
    if start.eval_prompts and start.step == 0:
        with timer.startup("evaluating before the first step"):
            evaluate(driver, generator, start.eval_prompts, config.evaluation, 0, roles)
    timer.close_startup(roles)
    return start, trainer, reference, generator


if __name__ == "__main__":
    run_script(partial(main, CONFIG))
