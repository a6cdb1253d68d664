"""What rank 0 alone does: draw prompts, score completions, decide, log.

Every rank holds a `Driver` and calls the same methods in the order of the loop; rank 0 runs them, and the others wait
for its decisions (`comm.on_driver`, `comm.from_driver`). What was sampled is in its buffer of groups
(grpo/run/groups.py). Left out: everything that several ranks do together.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from grpo.algorithm.groups import reward_tensors
from grpo.data.batches import make_batch
from grpo.data.recorded import RecordedStep, save_step
from grpo.metrics import StepMetrics
from grpo.report.rollout_metrics import (
    lag_metrics,
    measured_metrics,
    nonfinite_frac,
    rollout_metrics,
    stale_frac,
    with_measures,
)
from grpo.rewards.pool import check_all_failed, check_lost
from grpo.roles.comm import from_driver, on_driver, on_driver_for_learners
from grpo.roles.weight_sync import PROBE_PROMPTS, check_version
from grpo.run.groups import GroupBuffer, rollouts_of, set_rollouts
from grpo.run.session import Session
from grpo.run.steps import Steps
from grpo.types import Prompt, Requests, Rollout, Scalars, StepPlan, TrainBatch
from grpo.watch.failures import refuse_bad_input

EARLY_STEPS = 2  # first steps of a process that get a sync check: of the weights it starts with, and of its first sync


class Driver(Steps):
    """Prompts, rewards, decisions and the log."""

    def __init__(self, session: Session) -> None:
        """Begin with the prompts, the groups in flight and the scorer that rank 0 has read."""
        super().__init__(session)
        self.reward_model = session.reward_model  # see `on_driver`
        self.first_step = session.shared.step
        if self.roles.is_driver:
            self.scorer = session.start.scorer
            self.stream = session.start.stream
            self.buffer = GroupBuffer(
                self.config.sampling,
                self.config.prompts_per_step,
                self.config.group_size,
                session.start.groups,
                self.scorer.judging_parts,
            )

    # ---- one step -----------------------------------------------------------------------------------------------

    @partial(from_driver, scores=True)
    def plan(
        self,
        step: int,
        source_shares: Mapping[str, float],
        keep_prompt: Callable[[Prompt], bool] | None = None,
    ) -> StepPlan:
        """Decide everything about a step before it starts.

        source_shares, keep_prompt: say which prompts are drawn from now on, see PromptStream.begin_step.
        """
        if self.is_stopped(step):
            return StepPlan(step, stop=True)
        self.step = step
        self.times_ahead = {}
        number = step + 1
        self.stream.begin_step(number, source_shares, keep_prompt)
        self.buffer.begin_step()
        requests = self._fill()
        is_early = step < self.first_step + EARLY_STEPS
        every = self.config.sync_check_interval
        probe = []
        if every and (is_early or step % every == 0):
            probe = [group.prompt for group in self.buffer.taken]
            if requests:
                probe = requests.prompts
        return StepPlan(
            step=step,
            requests=requests,
            save=self.is_due(self.config.checkpoint.interval, number),
            evaluate=self.is_due(self.config.evaluation.interval, number),
            probe=probe[:PROBE_PROMPTS],
        )

    @partial(from_driver, scores=True)
    def receive(self, rollouts: list[Rollout]) -> Requests | None:
        """Add rollouts to the buffer and begin to score them. Returns what the step still needs, None if nothing."""
        self._add(rollouts)
        return self._fill()

    @from_driver
    def request_ahead(self) -> Requests | None:
        """Return what the generators sample for the next step while this one trains.

        None without `overlap_steps`, or if enough is there. Not empty in the last step either, because its checkpoint
        holds the groups in case the run is made longer.
        """
        if not self.config.overlap_steps:
            return None
        return self.buffer.ask(self.config.prompts_per_step, self.stream.draw)

    @on_driver
    def receive_ahead(self, rollouts: list[Rollout], seconds: list[float]) -> None:
        """Add what was sampled ahead to the buffer. seconds: how long that took on each rank."""
        self._add(rollouts)
        self.times_ahead = {"time/ahead": max(seconds)}

    def _add(self, rollouts: list[Rollout]) -> None:
        check_version(rollouts, self.step)
        self.buffer.add(rollouts)

    def _fill(self) -> Requests | None:
        """Take complete groups into the step. Returns what must be sampled before it is full, None if it is."""
        return self.buffer.fill(self.stream.draw, self._score)

    def _score(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Begin to score. Only dynamic sampling waits for it, because it trains on groups whose rewards differ."""
        rollouts = self.scorer.submit(rollouts, self.config.group_size, self.step + 1)
        if self.config.sampling.dynamic:
            with self.timer.phase("reward"):
                rollouts = self.scorer.collect()
        return rollouts

    def rollouts(self) -> list[Rollout] | None:
        """Return what the step trains on, None on other ranks. Not collective."""
        return self.buffer.rollouts() if self.roles.is_driver else None

    @on_driver_for_learners
    def make_batch(self, rollouts: list[Rollout]) -> TrainBatch:
        """Lay the step's rollouts end to end."""
        config = self.config
        batch = make_batch(rollouts, turn_weight=config.environment.weight if config.turns_earn else None)
        if not batch.loss_mask_N.any():
            check_lost(rollouts)
            raise RuntimeError("not one log-prob of the sampled tokens is finite: the generator is broken")
        return batch

    @partial(on_driver_for_learners, scores=True)
    def collect_rewards(self) -> list[Rollout]:
        """Wait for the rewards that workers compute, ask the reward model, and return the step's rollouts with them.

        A call of a reward function that fails leaves all its completions without a reward.
        """
        taken = self.buffer.taken
        if not self.config.sampling.dynamic:
            set_rollouts(taken, self.scorer.collect())
        with refuse_bad_input():
            check_all_failed(rollouts_of(taken))
        for group in taken:
            rate = self.scorer.pass_rate(group.rollouts)
            if rate is not None:
                self.stream.remember(group.prompt, rate, self.step + 1)
        return self.buffer.rollouts()

    @on_driver_for_learners
    def reward_tensors(self, rollouts: list[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards (float32 [R]), which there are (bool [R]), and values of its parts (float32 [F, R])."""
        return reward_tensors(rollouts, self.config.reward_weights)

    @on_driver_for_learners
    def record(self, rollouts: list[Rollout], batch: TrainBatch) -> None:
        """Write what the trainers get in this step, for a replay."""
        metrics = self.sampling_metrics(rollouts, batch)
        recorded_step = RecordedStep(batch, self.config.group_size, metrics)
        save_step(self.run_log.run_dir, self.step + 1, recorded_step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of the driver. On rank 0."""
        return {
            "data": self.stream.state_dict(),
            "flight": self.buffer.state(),
        }

    # ---- the log ------------------------------------------------------------------------------------------------

    @on_driver
    def log(
        self,
        step: int,
        rollouts: list[Rollout],
        batch: TrainBatch,
        measured: StepMetrics,
    ) -> Scalars:
        """Log step number `step`. Returns its metrics by name."""
        taken = rollouts_of(self.buffer.taken)
        num_tokens = sum(piece.num_tokens for rollout in taken for piece in rollout.pieces)
        times = self.timer.close_step() | self.times_ahead
        metrics = self.sampling_metrics(rollouts, batch)
        metrics |= measured_metrics(measured, times, num_tokens)
        every = self.config.metrics.samples_interval
        if every and (step - 1) % every == 0:
            shown = with_measures(rollouts, batch, measured)
            self.run_log.completions(step, shown, self.scorer.prompt_texts(rollouts))
        self.log_step(step, metrics)
        return metrics

    def sampling_metrics(self, rollouts: list[Rollout], batch: TrainBatch) -> Scalars:
        """Return the metrics of sampling: rewards and lengths over all groups taken, also those too equal to train on.

        The others are over `rollouts`, which the step trains on. Groups that go back to the buffer count in the step
        that trains on them.
        """
        group_size = self.config.group_size
        taken = rollouts_of(self.buffer.taken)
        metrics = rollout_metrics(taken, group_size, self.scorer.answer_format)
        metrics["mismatch/nonfinite_frac"] = nonfinite_frac(rollouts)
        if self.config.has_lag:
            metrics |= lag_metrics(batch, self.step)
        if self.config.sampling.carry_over:
            metrics["lag/stale_frac"] = stale_frac(rollouts, self.step)
        return metrics | self.buffer.metrics()
