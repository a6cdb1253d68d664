"""What rank 0 alone does: draw prompts, score completions, decide, log.

Every rank holds a `Driver` and calls the same methods in the order of the loop; rank 0 runs them, and the others wait
for its decisions (`comm.on_driver`, `comm.from_driver`). Within a step nothing is kept from one call to the next: what
was sampled is a value that the loop passes on. Left out: everything that several ranks do together.
"""

from dataclasses import replace
from typing import Any

import torch

from grpo.config.roles import describe_roles
from grpo.data.batches import make_batch, sample_of
from grpo.data.draw_ahead import DrawAhead
from grpo.data.recorded import RecordedStep, save_step
from grpo.folder.checkpoint import saves
from grpo.folder.pending import pending_state, pending_tensors, read_pending
from grpo.report.measured import measured_metrics, sequence_advantages
from grpo.report.rollout_metrics import pass_rates, reward_tensors, rollout_metrics
from grpo.report.sampling_work import nonfinite_frac, sampling_work, stale_frac
from grpo.rewards.pool import check_all_failed
from grpo.roles.ahead import PROBE_PROMPTS
from grpo.roles.comm import from_driver, on_driver, on_driver_for_learners
from grpo.roles.metrics import StepMetrics
from grpo.run.carried import CarryOver
from grpo.run.inputs import read_grpo
from grpo.run.past_lengths import PastLengths
from grpo.run.sampled import Sampled, informative_groups
from grpo.run.scorer import check_version
from grpo.run.session import Session, Start
from grpo.types import Completion, Pending, Plan, Prompt, Rollout, TrainBatch
from grpo.watch.failures import refuse_bad_input


class Driver:
    """Prompts, rewards, decisions and the log."""

    def __init__(self, session: Session):
        self.session, self.config, self.roles, self.timer = session, session.config, session.roles, session.timer
        self.first_pending: Pending | None = None
        """What the checkpoint has that was sampled ahead, for the first step; on the driver, and read by `start`."""

    def start(self) -> Start:
        """Refuse bad input before any model is loaded, open the run folder, start the reward processes. On rank 0."""
        config, session = self.config, self.session
        with refuse_bad_input():
            inputs = read_grpo(session)
            self.scorer, state, stream = session.scorer, session.opened.state, inputs.stream
            self.lengths = PastLengths(keeps_rows=not config.data.streaming)
            self.lengths.load_state_dict(state.get("lengths", self.lengths.state_dict()))
            self.carried = CarryOver(config.prompts_per_step, config.sampling.carry_over, config.group_size)
            if "carried" in state:
                self.carried.load(session.opened.checkpoint, state["carried"], stream)
            if "pending" in state:
                self.first_pending = read_pending(session.opened.checkpoint, state["pending"], stream)
            self.stream = DrawAhead(stream)
        return session.start(f"{describe_roles(config)} ranks", inputs.eval_prompts, inputs.reference_folder)

    # ---- one step -----------------------------------------------------------------------------------------------

    @from_driver
    def plan(self, step: int, pending: Pending | None) -> Plan:
        """Everything that is decided about a step before it starts. A filter on prompts belongs here.

        The last step samples ahead too: what it leaves is in its checkpoint, should the run be made longer. A run that
        was asked to stop goes on to the next sync, because a resumed one begins with fresh weights.
        """
        config, last = self.config, step + 1 == self.config.num_steps
        session, first_step = self.session, self.session.first_step
        if step % config.sync_interval == 0 and session.is_stopped(step):
            return plan_to_stop(step)

        def due(interval: int) -> bool:
            return interval > 0 and (step + 1) % interval == 0

        # the generators hold the weights of the last sync, or those the run started with
        version = max(first_step, step - step % config.sync_interval)
        first_syncs = step <= first_step + config.sync_interval
        check_due = first_syncs or step % max(config.sync_check_interval, 1) < config.sync_interval
        check = config.sync_check_interval > 0 and version == step and check_due
        older_weights = pending is not None or self.carried.has_begun  # sampled a part of what is trained on
        prompts, carried = [], None
        if config.sampling.carry_over:
            place = self.stream.state_dict()
            self.carried.begin(self._draw(self.carried.num_missing), place)
            prompts, carried = self.carried.to_sample()
            prompts = self.lengths.expect(prompts)  # what is expected now, of those that were drawn before too
        elif not pending:
            prompts = self._draw(config.prompts_per_step)
        next_place, next_prompts = {}, []
        if config.overlap_steps:
            next_place, next_prompts = self.stream.state_dict(), self._draw(config.prompts_per_step)
        return Plan(
            step=step,
            prompts=prompts,
            generator_version=version,
            sync_check=check and not older_weights,
            sync=last or due(config.sync_interval),
            save=saves(config.checkpoint, step + 1, last),
            evaluate=config.evaluation.interval > 0 and (last or due(config.evaluation.interval)),
            next_prompts=next_prompts,
            next_place=next_place,
            probe=(pending.prompts if pending else prompts)[:PROBE_PROMPTS] if check and older_weights else [],
            carried=carried,
        )

    @on_driver_for_learners
    def take_pending(self, plan: Plan, pending: Pending | None) -> Sampled | None:
        """What was sampled ahead for this step, whose rewards are being computed from here on; None if nothing was."""
        if pending is None:
            return None
        return self._take(None, plan, pending.prompts, pending.completions, pending.version)

    @on_driver
    def take(
        self, sampled: Sampled | None, plan: Plan, prompts: list[Prompt], completions: list[Completion]
    ) -> Sampled:
        """`sampled` and one more round of sampling, whose rewards are being computed from here on.

        Only dynamic sampling waits for them, because it trains on groups whose rewards differ.
        """
        return self._take(sampled, plan, prompts, completions, plan.generator_version)

    def _take(
        self, sampled: Sampled | None, plan: Plan, prompts: list[Prompt], completions: list[Completion], version: int
    ) -> Sampled:
        config = self.config
        check_version(completions, version)
        work = sampling_work(prompts, completions, config, len(self.roles.replicas), plan.carried)
        if plan.carried:
            prompts, completions = self.carried.take(completions)
        self.lengths.record(prompts, completions)
        rollouts = informative = self.scorer.submit(prompts, completions, plan.step + 1)
        if config.sampling.dynamic:
            with self.timer.phase("reward"):
                rollouts = self._collect()
            informative = informative_groups(rollouts, config.group_size)
        before = sampled or Sampled([], [], config.completions_per_step)
        return before.with_round(rollouts, informative, len(prompts), work)

    def more_prompts(self, sampled: Sampled | None) -> list[Prompt]:
        """Prompts of another round: as many as dynamic sampling expects to need; none once the step is full.

        After `sampling.max_rounds` the step goes on with the groups it has. Without dynamic sampling no rank waits.
        """
        return self._more_prompts(sampled) if self.config.sampling.dynamic else []

    @from_driver
    def _more_prompts(self, sampled: Sampled) -> list[Prompt]:
        config = self.config
        num_informative = sampled.num_informative(config.group_size)
        if num_informative >= config.prompts_per_step:
            return []
        if sampled.num_rounds < config.sampling.max_rounds:
            return self._draw(sampled.prompts_to_draw(config.prompts_per_step, config.group_size))
        print(
            f"dynamic sampling: {num_informative} of {config.prompts_per_step} groups have different rewards after "
            f"{sampled.num_rounds} rounds with {sampled.num_prompts} prompts; the step goes on with "
            + ("these" if num_informative else "groups of equal rewards"),
            flush=True,
        )
        return []

    @on_driver_for_learners
    def make_batch(self, sampled: Sampled) -> TrainBatch:
        """The step's rollouts laid end to end."""
        if not any(r.completion.loss_mask_T.any() for r in sampled.rollouts):
            raise RuntimeError("not one log-prob of the sampled tokens is finite: the generator is broken")
        return make_batch([sample_of(r.prompt, r.completion) for r in sampled.rollouts])

    @on_driver_for_learners
    def collect_rewards(self, sampled: Sampled) -> Sampled:
        """Wait for the rewards of the step's rollouts, which workers computed meanwhile.

        Now that no more prompts are needed, those of the next plan are read while this step trains.
        """
        config = self.config
        if not config.sampling.dynamic:
            rollouts = self._collect()
            sampled = replace(sampled, everything=rollouts, informative=rollouts)
        check_all_failed(sampled.everything)
        self.stream.begin(self.carried.num_missing if config.sampling.carry_over else config.prompts_per_step)
        return sampled

    @on_driver_for_learners
    def reward_tensors(self, sampled: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 [S], bool [S]): rewards, and which there are."""
        return reward_tensors(sampled.rollouts)

    @on_driver_for_learners
    def record(
        self, step: int, sampled: Sampled, batch: TrainBatch, rewards: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Write what the trainers get in the `step`-th step, for a replay; rewards as `reward_tensors` gives them."""
        metrics = self._sampling_metrics(step, sampled, batch)
        recorded = RecordedStep(batch, *rewards, self.config.group_size, metrics)
        save_step(self.config.run_dir, step, recorded)

    def _draw(self, num_prompts: int) -> list[Prompt]:
        with refuse_bad_input():  # rows that are streamed are checked as they come
            return self.lengths.expect(self.stream.draw(num_prompts))

    def _collect(self) -> list[Rollout]:
        rollouts = self.scorer.collect()
        self.stream.record(pass_rates(rollouts, self.config.group_size, self.scorer.pass_function))
        return rollouts

    def state(self, step: int, pending: Pending | None) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor] | None]:
        """What a checkpoint after `step` steps must hold of the driver, plain values and tensors; None on other ranks.

        Not collective.
        """
        if not self.roles.is_driver:
            return None, None
        state = {"step": step, "data": self.stream.state_dict(), "lengths": self.lengths.state_dict()}
        if self.carried.has_begun:
            return state | {"carried": self.carried.state()}, self.carried.tensors()
        return (state | {"pending": pending_state(pending)}, pending_tensors(pending)) if pending else (state, None)

    # ---- the log ------------------------------------------------------------------------------------------------

    def log(
        self, step: int, sampled: Sampled, batch: TrainBatch, measured: StepMetrics, pending: Pending | None
    ) -> None:
        """The step's one log call, after `step` steps. A metric of completions belongs in `rollout_metrics`."""
        times = self.timer.close_step()
        if pending:
            times |= {"time/ahead": pending.seconds, "time/overlap": pending.overlap_seconds}
        self._log(step, sampled, batch, measured, times, self.session.ledger.exchange(step, self.timer.worked))

    @on_driver
    def _log(
        self,
        step: int,
        sampled: Sampled,
        batch: TrainBatch,
        measured: StepMetrics,
        times: dict[str, float],
        ledger: tuple[int, torch.Tensor] | None,
    ) -> None:
        num_tokens = sum(len(r.prompt.ids) + r.completion.num_tokens for r in sampled.everything)
        metrics = self._sampling_metrics(step, sampled, batch) | measured_metrics(measured, times, num_tokens)
        self.session.run_log.log(step, metrics | self.session.run_log.ledger(ledger))
        interval = self.config.metrics.samples_interval
        if interval and (step - 1) % interval == 0:
            values = zip(sampled.rollouts, sequence_advantages(batch), measured.sequence_means(), strict=True)
            rollouts = [replace(r, advantage=a, mismatch=m) for r, a, m in values]
            self.session.run_log.completions(step, rollouts, self.scorer.prompt_texts(rollouts))
        self.session.skipped.look(step, metrics, batch)

    def _sampling_metrics(self, step: int, sampled: Sampled, batch: TrainBatch) -> dict[str, float]:
        config = self.config
        metrics = rollout_metrics(sampled.everything, config.group_size, self.scorer.answer_format)
        metrics["mismatch/nonfinite_frac"] = nonfinite_frac([r.completion for r in sampled.rollouts])
        if config.sampling.dynamic:
            metrics |= sampled.dynamic_metrics(config.prompts_per_step, config.group_size)
        if config.has_lag:
            lag_S = (step - 1 - batch.versions_S).double()
            metrics |= {"lag/mean": lag_S.mean().item(), "lag/max": lag_S.max().item()}
        metrics["sampling/tail_frac"] = sampled.work.idle_frac
        if config.sampling.carry_over:
            metrics["sampling/carried"] = len(self.carried.groups)
            metrics["lag/stale_frac"] = stale_frac([r.completion for r in sampled.rollouts], step - 1)
        return metrics | self.stream.metrics()


def plan_to_stop(step: int) -> Plan:
    """The plan that ends the run before the step begins."""
    nothing = {"prompts": [], "generator_version": step, "sync_check": False, "sync": False, "evaluate": False}
    return Plan(step=step, save=False, stop=True, **nothing)
