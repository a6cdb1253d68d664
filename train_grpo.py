"""GRPO in one torchrun: the algorithm from top to bottom.

    torchrun --nproc_per_node=8 train_grpo.py [RECIPE.py] [--field value ...]

Sample a group of completions for each prompt, score them, compare each with its group, update the policy, give the
generators the new weights. A completion of reward r has the advantage A = (r - mean) / (std + 1e-4), with the mean and
the sample standard deviation of its group. GRPO (Shao et al. 2024, arXiv:2402.03300) minimises, as a mean over each
rollout's tokens, then over rollouts,

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + beta * KL(policy || reference)

Here ratio is the token's probability under the policy divided by that under the policy at the start of the step; beta
is the KL coefficient. Each token's first term is also multiplied by its probability under the old policy divided by
that under the generator, at most 2 by default (`correct_importance`). `algorithm.loss`, `.advantages` and
`.aggregation` name other formulas.

A suffix on a tensor's name spells its dimensions: P prompts, G completions of a group, R = P * G rollouts, F reward
functions, S sequences (prompt with completion; an episode may have several), N tokens of all sequences end to end, B
rows and T positions of a micro-batch (grpo/types.py).
"""

from dataclasses import replace
from functools import partial

from grpo.config import AlgorithmConfig, GRPOConfig
from grpo.run.command_line import read_config

CONFIG = read_config(GRPOConfig) if __name__ == "__main__" else None  # before torch, so that a typo is answered at once

import torch
from torch import Tensor

from grpo.algorithm.advantages import AdvantageInputs, group_mean_std, named_advantages, teacher_advantages
from grpo.algorithm.aggregation import UpdateTotals, named_aggregation
from grpo.algorithm.importance import correct_importance, mismatch, rollout_kl, token_kl
from grpo.algorithm.inputs import LossInputs, clamped
from grpo.algorithm.losses import CLIPPED_LOSSES, clip_metrics, named_loss
from grpo.data.batches import split_groups
from grpo.metrics import StepMetrics
from grpo.roles import comm
from grpo.roles.engine.generator import Generator
from grpo.roles.process_groups import Roles
from grpo.roles.trainer import Objective, Trainer
from grpo.roles.weight_sync import check_sync, sync_weights
from grpo.run.driver import Driver
from grpo.run.session import Session, run
from grpo.run.start import read_grpo
from grpo.types import MicroBatch, Rollout, StepPlan, TrainBatch
from grpo.watch.failures import run_script


def main(config: GRPOConfig) -> None:
    run(config, "train_grpo.py", read_grpo, train)


# Every rank runs `train`, with None for roles that it does not have. Rank 0 is a trainer and the driver.
#
#     line                        works                              who waits for it
#     driver.plan                 rank 0: draws prompts, scores      all
#                                 what was sampled ahead
#     check_sync, if due          generators, then trainers          trainers, references
#     sample, request_ahead       generators, then rank 0            all
#     start_sampling_ahead        generators, with overlap_steps     nobody
#     send_batch                  rank 0                             references, trainers
#     add_ref_logprobs            references; workers score          trainers
#     driver.collect_rewards      rank 0: until workers have scored  references, trainers
#     update                      trainers                           references; generators without overlap_steps
#     finish_sampling_ahead       generators send it to rank 0       all
#     sync_weights                trainers, then generators          all
#     driver.log                  rank 0                             all
#
# All call the methods of `driver` and `session`, and the functions that take `roles`, in this order. A driver's method
# runs on rank 0. Other ranks get the plan and the requests that it returns; rollouts and batches stay on rank 0 until
# they are sent. Learners that hold a reward model compute with it in `collect_rewards`, with `sampling.dynamic` in
# `plan` and `receive`. Completions come from the weights at the start of the step, or one step before it with
# `overlap_steps=1`; with `sampling.carry_over` a token can be of any age. A sync check ends the run if log-probs differ
# on average by more than `weight_sync.largest_mismatch()` says, a function of grpo/roles/. If a rank fails, all end:
# torchrun sees one that died, a watchdog (grpo/watch/) one that hangs.


def train(config: GRPOConfig, session: Session) -> None:
    """Run the steps up to `config.num_steps`, from the checkpoint's step or 0. On every rank."""
    config = replace(config, algorithm=config.algorithm.resolved)  # with the values that follow from the loss
    roles = session.roles
    timer = session.timer
    trainer, reference, generator = session.start_up()  # also evaluates before the first step
    driver = Driver(session)

    for step in session.steps():  # the number of steps done; the log and reward functions say step + 1
        source_shares = config.data.weights  # a function of the step goes here, for prompts drawn from now on
        keep_prompt = None  # a filter goes here, a function of a Prompt (types.py): False draws another
        plan = driver.plan(step, source_shares, keep_prompt)  # the same on all ranks
        if plan.stop:  # by a signal, or the file `stop` in the run folder
            session.save(step, trainer, driver.state)
            break
        kl_coef = config.algorithm.kl_coef  # a schedule goes here; the config's must be above 0 to load a reference
        timer.enter("sync")
        check_sync(plan.probe, trainer, generator, config.model.dtype, roles)  # first two steps, then if due

        timer.enter("generate")
        rollouts = sample(plan, generator, driver, roles)  # generators -> driver; scoring begins
        ahead = comm.start_sampling_ahead(driver.request_ahead(), generator)  # with overlap_steps
        batch = comm.send_batch(driver.make_batch(rollouts), roles)  # driver -> references and trainers

        timer.enter("reference")  # meanwhile worker processes of the driver score
        batch = comm.add_ref_logprobs(batch, reference, roles)  # references -> trainers

        timer.enter("reward")
        rollouts = driver.collect_rewards()
        batch = comm.add_rewards(batch, driver.reward_tensors(rollouts), roles)  # driver -> references and trainers
        if config.record:
            driver.record(rollouts, batch)  # a file, for grpo/tools/replay.py

        timer.enter("train")
        metrics = StepMetrics(batch.num_sequences if trainer else 0)  # rank 0 can record means of `rollouts` here
        if trainer:
            batch = add_advantages(config, batch, kl_coef, metrics)
            update(config, trainer, batch, kl_coef, metrics)

        timer.enter("generate")
        comm.finish_sampling_ahead(ahead, driver, roles)  # generators -> driver, for the next step

        timer.enter("sync")
        sync_weights(trainer, generator, step + 1, roles)  # trainers -> generators: the weights after `step + 1` steps

        if plan.evaluate:
            timer.enter("evaluate")
            session.evaluate(generator, step + 1)
        driver.log(step + 1, rollouts, batch, metrics)  # returns all metrics on rank 0, for a log of yours
        if plan.save:  # every checkpoint.interval steps, and behind the last one; 0 is never
            session.save(step + 1, trainer, driver.state)
    else:  # not stopped
        session.export(trainer)
    session.end()


def sample(plan: StepPlan, generator: Generator | None, driver: Driver, roles: Roles) -> list[Rollout] | None:
    """Complete groups of rollouts until the step is full. Returns the rollouts on the driver, else None."""
    requests = plan.requests  # for all generators, which share them out; None if enough was sampled ahead
    while requests:  # once; with sampling.dynamic until enough groups differ (algorithm/groups.py)
        rollouts = generator.generate(requests) if generator else None
        requests = driver.receive(comm.gather_rollouts(rollouts, requests, roles))
    if generator:
        generator.sleep()  # does nothing unless config.generator.sleep; the next sync wakes it
    return driver.rollouts()


# The algorithm, on the trainers. The default formulas are written out; the config can name others, of grpo/algorithm/
# or path/file.py:function, all of them functions of `x`, the inputs of a formula. `metrics.record` takes numbers, of
# which the log has the mean; of values per token, which an objective returns, the mean over the loss tokens, or the
# maximum if the name ends in max.


def add_advantages(config: GRPOConfig, batch: TrainBatch, kl_coef: float, metrics: StepMetrics) -> TrainBatch:
    """Compare each reward with its group's. Every token gets its rollout's advantage, plus its teacher's, if any.

    `rewards_R` of the batch are weighted sums of the values of F reward functions, which it has too. The loss mask is
    True for tokens that the policy sampled with a finite log-prob. It becomes False for rollouts with neither reward
    nor teacher and, with `mask_truncated`, for truncated ones, whose rewards still count in their group.
    """
    algorithm = config.algorithm
    if algorithm.kl_in == "reward" and batch.ref_logprobs_N is not None:
        penalty_R = kl_coef * rollout_kl(batch, algorithm.kl_estimator)  # by the generator's log-probs
        metrics.record(**{"reward/kl_penalty": penalty_R[batch.has_reward_R].mean().item()})
        penalty_R = penalty_R.where(penalty_R.isfinite(), 0)  # not finite: trainer.py will skip the update
        batch = replace(batch, rewards_R=batch.rewards_R - penalty_R)

    x = AdvantageInputs.of(batch, config.group_size, config.reward_weights)
    if algorithm.advantages == "group_std":
        mean_P1, std_P1 = group_mean_std(x.rewards_PG, x.has_PG)
        advantages = (x.rewards_PG - mean_P1) / (std_P1 + 1e-4)
    else:
        advantages = named_advantages(algorithm.advantages)(x)
    advantages_N = x.per_token(advantages)  # from [P, G], or from [N] already; 0 without a reward

    trained_N = batch.has_reward_R[batch.rollout_N]
    if algorithm.distill_coef:  # on-policy distillation: the reference is a teacher, who judges every token
        trained_N = torch.ones_like(trained_N)
        teacher_N = teacher_advantages(batch)
        metrics.record(**{"distill/reverse_kl": -teacher_N[batch.loss_mask_N].mean().item()})
        advantages_N = advantages_N + algorithm.distill_coef * teacher_N
    if algorithm.mask_truncated:
        trained_N = trained_N & ~batch.truncated_S[batch.owner_N]
    return replace(batch, advantages_N=advantages_N, loss_mask_N=batch.loss_mask_N & trained_N)


def update(config: GRPOConfig, trainer: Trainer, batch: TrainBatch, kl_coef: float, metrics: StepMetrics) -> None:
    """Make the step's optimizer updates, one for each mini-batch of each epoch; by default there is one."""
    algorithm = config.algorithm
    if kl_coef and batch.ref_logprobs_N is None:
        raise ValueError(f"kl_coef is {kl_coef}, and no reference is loaded: set algorithm.kl_coef above 0")
    if algorithm.kl_coef:
        metrics.record(kl_coef=kl_coef)
    if algorithm.old_logprobs == "generator":
        batch = replace(batch, old_logprobs_N=batch.generator_logprobs_N)
    elif config.updates_per_step > 1:  # with one update, LossInputs takes this forward's log-probs, detached
        batch = replace(batch, old_logprobs_N=trainer.logprobs(batch))
    first_update = True
    for _ in range(algorithm.num_epochs):
        for mini_batch in split_groups(batch, config.group_size, algorithm.num_mini_batches):
            trainer.forward_backward(mini_batch, grpo_objective(config, mini_batch, kl_coef, first_update), metrics)
            metrics.record(**trainer.optimizer_step())  # skipped on all ranks if a number is not finite
            first_update = False
    trainer.end_step()  # the learning rate, and a reference that moves, follow steps and not updates


def grpo_objective(config: GRPOConfig, mini_batch: TrainBatch, kl_coef: float, first_update: bool) -> Objective:
    """Return the loss of one update as a function of a micro-batch. Values and gradients add up, also over ranks.

    The loss gets log-probs at the sampling temperature by three versions of the policy: as it is (`logprobs`), at the
    start of the step (`old_logprobs`, unless `algorithm.old_logprobs` is generator) and when it sampled
    (`generator_logprobs`).
    """
    algorithm = config.algorithm
    totals = UpdateTotals.of(mini_batch, config.generator.max_completion_tokens)  # however it is split over ranks

    def objective(micro: MicroBatch, logprobs_BT: Tensor, entropy_BT: Tensor) -> tuple[Tensor, dict]:
        x = LossInputs.of(micro, logprobs_BT, entropy_BT)  # log-probs and advantages are 0 where the mask is False
        loss_BT, metrics = policy_loss(x, algorithm)
        loss_BT, metrics = correct_importance(loss_BT, metrics, x, algorithm)  # times old policy / generator
        if first_update or algorithm.old_logprobs == "policy":  # else they are not of the step's start
            metrics |= mismatch(x, algorithm)
        if x.ref_logprobs_BT is not None:
            gap_BT = clamped(x.ref_logprobs_BT - x.logprobs_BT)
            kl_BT = gap_BT.expm1() - gap_BT if algorithm.kl_estimator == "k3" else token_kl(x, algorithm)
            metrics["kl"] = kl_BT.detach()
            if algorithm.kl_in == "loss":
                loss_BT = loss_BT + kl_coef * kl_BT  # correct_importance does not weigh it
        if algorithm.entropy_coef:
            loss_BT = loss_BT - algorithm.entropy_coef * x.entropy_BT
        loss_BT = loss_BT.where(x.loss_mask_BT, 0)
        if algorithm.aggregation == "sequence_mean":  # mean of a rollout's loss tokens, then of rollouts
            loss = (loss_BT / x.num_rollout_tokens_BT).sum() / totals.num_rollouts
        else:
            loss = named_aggregation(algorithm.aggregation)(loss_BT, x, totals)
        return loss, metrics

    return objective


def policy_loss(x: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token [B, T], and metrics: the clipped surrogate, or what `algorithm.loss` names."""
    if algorithm.loss in CLIPPED_LOSSES:  # grpo, dr_grpo, dapo: one formula, other clips
        ratio_BT = clamped(x.logprobs_BT - x.old_logprobs_BT).exp()
        clipped_BT = ratio_BT.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        loss_BT = -torch.minimum(ratio_BT * x.advantages_BT, clipped_BT * x.advantages_BT)
        metrics = clip_metrics(ratio_BT, x, algorithm)
    else:
        loss_BT, metrics = named_loss(algorithm)(x)
    return loss_BT, {f"loss/{name}": value_BT for name, value_BT in metrics.items()}


if __name__ == "__main__":
    run_script(partial(main, CONFIG))
