"""GRPO in one torchrun: the algorithm from top to bottom.

    torchrun --nproc_per_node=8 train_grpo.py [RECIPE.py] [--field value ...]

Every rank runs this script. The ranks are split into trainers, references and generators (`roles`), and rank 0, the
driver, decides: it draws prompts, scores completions, logs. A rank asks `roles.trains`, `roles.references` and
`roles.generates` what it has to do, so the loop reads the same whether the roles share GPUs or not. Every function that
takes `roles` is a collective: all ranks call it, in this order.

Left out here: how it is done. What each module does stands at its top; begin with grpo/roles.py and grpo/comm.py.
"""

import math
import os
import pathlib
from dataclasses import dataclass, replace

import torch

from grpo import checkpoint, data, models, rewards, toy
from grpo.advantages import group_advantages
from grpo.comm import add_advantages, add_ref_logprobs, gather_completions, on_driver, send_batch, share
from grpo.config import GRPOConfig, as_recipe, check_world_size, describe_layout, load
from grpo.evaluate import evaluation_metrics
from grpo.generator import Generator
from grpo.losses import aggregate, clipped_policy_loss, kl_k3, step_denominator
from grpo.metrics import Ledger, RunLog, rollout_metrics
from grpo.packing import MicroBatch, make_batch, per_sequence, scatter_completions
from grpo.reference import Reference
from grpo.roles import Roles, close_roles, setup_roles
from grpo.trainer import LossFunction, Trainer
from grpo.types import Completion, Plan, Prompt, Rollout, TrainBatch
from grpo.watchdog import refuse_bad_input, run_rank, set_place
from grpo.weight_sync import sync_weights

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
        # Only the driver decides: which prompts, whether to check, to save, to evaluate.
        plan: Plan = share(on_driver(roles, Driver.next_plan, driver, step), roles)

        with ledger.phase("generate"):
            completions = None
            if roles.generates:
                completions = generator.generate(plan.prompts, config.group_size)
                generator.sleep()  # colocated and asked for: its memory is the trainer's until the sync
            completions = gather_completions(completions, roles)  # generators -> driver
            rollouts = on_driver(roles, Driver.rollouts, driver, plan.prompts, completions, step)
            batch = send_batch(batch_of(rollouts), roles)  # driver -> references and trainers

        with ledger.phase("reference"):
            ref_logprobs_C = reference.logprobs(batch) if roles.references else None
            # at the same time, where the reference has ranks of its own, the driver scores (phase "reward")
            rollouts = on_driver(roles, Driver.score, driver, rollouts, ledger)
            batch = add_advantages(batch, advantages_of(rollouts), roles)  # driver -> references and trainers
            batch = add_ref_logprobs(batch, ref_logprobs_C, roles)  # references -> trainers

        with ledger.phase("train"):
            stats = {}
            if roles.trains:
                tolerance = config.logprob_tolerance if plan.check_sync else None
                stats = trainer.step(batch, policy_loss(config, batch), config.generator.temperature, tolerance)

        with ledger.phase("sync"):  # trainers -> generators, which now hold the weights of `step + 1` updates
            sync_weights(trainer.model if trainer else None, generator, step + 1, dtype, roles)

        if plan.save and roles.trains:
            with ledger.phase("save"):
                state = {"step": step + 1, "data": plan.data_state}
                checkpoint.save_checkpoint(config.run_dir, trainer, state, config.checkpoint.keep)
        if plan.evaluate:
            with ledger.phase("evaluate"):
                evaluate(driver, generator, start.eval_prompts, step + 1, roles)
        on_driver(roles, Driver.log, driver, step + 1, rollouts, stats, ledger)

    if config.checkpoint.export and roles.trains:
        models.export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", dtype)
    on_driver(roles, Driver.finish, driver)
    close_roles(roles, generator.close if roles.generates else None)


def evaluate(
    driver: "Driver | None", generator: Generator | None, prompts: list[Prompt], step: int, roles: Roles
) -> None:
    """Greedy completions of the held-out prompts, scored and logged; draws no random number. Every rank calls it."""
    completions = generator.generate(prompts, 1, greedy=True) if roles.generates else None
    completions = gather_completions(completions, roles)
    on_driver(roles, Driver.log_evaluation, driver, prompts, completions, step)


def policy_loss(config: GRPOConfig, batch: TrainBatch) -> LossFunction:
    """GRPO's loss of one micro-batch, normalised over the whole step: Shao et al. 2024, arXiv:2402.03300, eq. 3."""
    grpo = config.grpo
    denominator = step_denominator(
        batch.completion_lengths_S,
        ~batch.advantages_S.isnan(),
        grpo.aggregation,
        config.generator.max_completion_tokens,
    )

    def loss(micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor):
        advantages_BT = per_sequence(batch.advantages_S, micro)
        # a completion without a reward (NaN) leaves the loss; it is not in the denominator either
        mask_BT = micro.completion_mask_BT & ~advantages_BT.isnan()
        old_logprobs_BT = logprobs_BT.detach()  # one update per batch: the policy at the start of the step is this one
        if grpo.old_logprobs == "generator":
            old_logprobs_BT = scatter_completions(batch.generator_logprobs_C, batch, micro)
        loss_BT, metrics = clipped_policy_loss(
            logprobs_BT,
            old_logprobs_BT,
            advantages_BT,
            mask_BT,
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
        )
        if batch.ref_logprobs_C is not None:
            kl_BT = kl_k3(logprobs_BT, scatter_completions(batch.ref_logprobs_C, batch, micro), mask_BT)
            loss_BT = loss_BT + grpo.kl_coef * kl_BT
            metrics["kl"] = kl_BT.detach().sum()
        return aggregate(loss_BT, mask_BT, micro.completion_lengths_BT, grpo.aggregation, denominator), mask_BT, metrics

    return loss


def batch_of(rollouts: list[Rollout] | None) -> TrainBatch | None:
    """The driver's rollouts laid end to end."""
    if rollouts is None:
        return None
    completions = [r.completion for r in rollouts]
    return make_batch([r.prompt.ids for r in rollouts], [c.ids for c in completions], [c.logprobs for c in completions])


# ---------------------------------------------------------------------------------------------------------------------
# What rank 0 alone does
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """What every rank must know before the first step."""

    step: int
    folder: str
    reference_folder: str
    stop_token_ids: list[int]
    eval_prompts: list[Prompt]
    checkpoint: pathlib.Path | None


class Driver:
    """Prompts, rewards, decisions and the log. Its constructor refuses bad input before any model is loaded."""

    def __init__(self, config: GRPOConfig):
        self.config = config
        with refuse_bad_input():
            columns = [config.data.prompt_column, *config.data.columns]
            self.reward_functions = rewards.load_functions(config.reward, columns)
            rows = data.load_rows(config.data.path, config.data.name, config.data.split)
            data.check_columns(rows, columns, config.data.path)
            resume_from = checkpoint.open_run_dir(
                config.run_dir, as_recipe(config), resume=config.resume, overwrite=config.overwrite
            )
            folder = models.resolve_folder(toy.build_if_toy(config.model.path, config.run_dir, rows, config.seed))
            models.check_folder(folder, config.max_sequence_tokens, config.largest_tensor_parallel)
            self.tokenizer = data.load_tokenizer(folder)
            self.stream = data.PromptStream(config.data, self.tokenizer, config.seed)
            wants_eval = config.evaluation.interval > 0
            eval_prompts = data.load_eval_prompts(config.data, config.evaluation, self.tokenizer) if wants_eval else []
            step = 0
            if resume_from is not None:
                state = checkpoint.read_driver_state(resume_from)
                step = state["step"]
                self.stream.load_state_dict(state["data"])
        self.run_log = RunLog(config.metrics, config.run_dir, config.num_steps, start_step=step)
        self.stop_token_ids = models.stop_token_ids(folder, self.tokenizer)
        self.first_step = step
        reference_folder = config.model.reference_path or folder
        self.start = Start(step, folder, reference_folder, self.stop_token_ids, eval_prompts, resume_from)
        print(
            f"{as_recipe(config)}\n{describe_layout(config)} ranks; {config.run_dir}, starting at step {step}",
            flush=True,
        )

    def next_plan(self, step: int) -> Plan:
        """Everything that is decided about a step."""
        config, last = self.config, step + 1 == self.config.num_steps

        def due(interval: int) -> bool:
            return interval > 0 and (step + 1) % interval == 0

        prompts = self.stream.draw(config.prompts_per_step)
        after_first_sync = step - self.first_step <= 1
        return Plan(
            step=step,
            prompts=prompts,
            check_sync=config.sync_check_interval > 0 and (after_first_sync or step % config.sync_check_interval == 0),
            save=last or due(config.checkpoint.interval),
            evaluate=config.evaluation.interval > 0 and (last or due(config.evaluation.interval)),
            data_state=self.stream.state_dict(),
        )

    def rollouts(self, prompts: list[Prompt], completions: list[Completion], version: int) -> list[Rollout]:
        """Join prompts and completions, decode, and make sure they come from the weights they should come from."""
        versions = {c.version for c in completions}
        if versions != {version}:
            raise RuntimeError(
                f"completions of step {version} were sampled with weights of versions {sorted(versions)}"
            )
        group_size = len(completions) // len(prompts)
        return [Rollout(prompts[i // group_size], c, self._text(c.ids)) for i, c in enumerate(completions)]

    def score(self, rollouts: list[Rollout], ledger: Ledger) -> list[Rollout]:
        """Rewards and advantages."""
        with ledger.phase("reward"):
            rollouts = rewards.score(self.reward_functions, rollouts)
        rewards_S = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
        advantages_S = group_advantages(rewards_S, self.config.group_size, self.config.grpo.advantages)
        return [replace(r, advantage=a) for r, a in zip(rollouts, advantages_S.tolist(), strict=True)]

    def log(self, step: int, rollouts: list[Rollout], stats: dict[str, float], ledger: Ledger) -> None:
        """The step's one log call."""
        metrics = rollout_metrics(rollouts, self.config.group_size) | stats | ledger.close_step()
        num_tokens = sum(len(r.prompt.ids) + len(r.completion.ids) for r in rollouts)
        metrics["tokens_per_second"] = num_tokens / metrics["time/step"]
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.run_log.log(step, metrics)
        interval = self.config.metrics.samples_interval
        if interval and (step - 1) % interval == 0:
            self.run_log.samples(step, rollouts)

    def log_evaluation(self, prompts: list[Prompt], completions: list[Completion], step: int) -> None:
        """Score held-out completions and log them."""
        rollouts = rewards.score(self.reward_functions, self.rollouts(prompts, completions, version=step))
        self.run_log.log_evaluation(step, evaluation_metrics(self.config, rollouts))

    def finish(self) -> None:
        """Close the log."""
        self.run_log.close()
        print(f"done; everything is in {self.config.run_dir}", flush=True)

    def _text(self, ids: list[int]) -> str:
        ends = ids and ids[-1] in self.stop_token_ids
        return self.tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=False)


def advantages_of(rollouts: list[Rollout] | None) -> torch.Tensor | None:
    """float32 [S] on the driver, None elsewhere."""
    return None if rollouts is None else torch.tensor([r.advantage for r in rollouts])


if __name__ == "__main__":
    run_rank(main)
