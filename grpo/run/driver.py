"""What rank 0 alone does: draw prompts, score completions, decide, log.

Every rank holds a `Driver` and calls the same methods in the order of the loop; rank 0 runs them, and the others wait
for its decisions (`comm.on_driver`, `comm.from_driver`). What was sampled is in its buffer of groups (groups.py). Left
out: everything that several ranks do together.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from grpo.algorithm.groups import pass_rate, pass_values, reward_tensors
from grpo.data.batches import make_batch
from grpo.data.recorded import RecordedStep, save_step
from grpo.metrics import StepMetrics
from grpo.report.rollout_metrics import (
    alone_frac,
    measured_metrics,
    nonfinite_frac,
    rollout_metrics,
    sequence_advantages,
    stale_frac,
)
from grpo.rewards.pool import check_all_failed
from grpo.roles.comm import from_driver, on_driver, on_driver_for_learners
from grpo.roles.weight_sync import PROBE_PROMPTS
from grpo.run.groups import GroupBuffer, rollouts_of
from grpo.run.scorer import check_lost, check_version
from grpo.run.session import Session
from grpo.run.steps import Steps
from grpo.types import Prompt, Requests, Rollout, Scalars, StepPlan, TrainBatch
from grpo.watch.failures import refuse_bad_input


class Driver(Steps):
    """Prompts, rewards, decisions and the log."""

    def __init__(self, session: Session):
        """Take the prompts and the scorer of a session that has started up; they are on rank 0 alone."""
        super().__init__(session)
        config = session.config
        start = session.start
        self.stream = start.data.stream if start else None
        self.scorer = start.scorer if start else None
        self.reward_model = session.reward_model
        self.buffer = GroupBuffer(
            config.sampling,
            config.prompts_per_step,
            config.group_size,
            start.data.groups if start else (),
            self.scorer.judging_parts if self.scorer else (),
        )

    # ---- one step -----------------------------------------------------------------------------------------------

    @partial(from_driver, scores=True)
    def plan(
        self,
        step: int,
        weights: Mapping[str, float],
        keep_prompt: Callable[[Prompt], bool] | None = None,
    ) -> StepPlan:
        """Decide everything about a step before it starts.

        weights, keep_prompt: say which prompts are drawn from now on, see PromptStream.begin_step.
        """
        if self.is_stopped(step):
            return StepPlan(step, stop=True)
        config = self.config
        self.step = step
        self.times_ahead: Scalars = {}
        self.stream.begin_step(step + 1, weights, keep_prompt)
        self.buffer.begin_step()
        requests = self._fill()
        probe = []
        is_early = step <= self.session.shared.step + 1  # before the first sync, and after it
        if config.sync_check_interval and (is_early or step % config.sync_check_interval == 0):
            probe = [group.prompt for group in self.buffer.taken]
            if requests:
                probe = requests.prompts
        number = step + 1
        return StepPlan(
            step=step,
            requests=requests,
            save=self.is_due(config.checkpoint.interval, number),
            evaluate=self.is_due(config.evaluation.interval, number),
            probe=probe[:PROBE_PROMPTS],
        )

    @partial(from_driver, scores=True)
    def receive(self, rollouts: list[Rollout]) -> Requests | None:
        """Add rollouts to the buffer and begin to score them. Returns what the step still needs, None if nothing."""
        self._add(rollouts)
        return self._fill()

    @from_driver
    def request_ahead(self) -> Requests | None:
        """Return what the generators sample for the next step while this one trains; None without `overlap_steps`.

        Not empty in the last step either, because its checkpoint holds the groups in case the run is made longer.
        """
        if not self.config.overlap_steps:
            return None
        return self.buffer.ask(self.config.prompts_per_step, self.stream.draw)

    @on_driver
    def receive_ahead(
        self,
        rollouts: list[Rollout],
        seconds: float,
        overlap_seconds: float,
    ) -> None:
        """Add what was sampled ahead to the buffer.

        seconds: how long that took. overlap_seconds: how long the driver was scoring and training meanwhile.
        """
        self._add(rollouts)
        self.times_ahead = {"time/ahead": seconds, "time/overlap": overlap_seconds}

    def _add(self, rollouts: list[Rollout]) -> None:
        check_version(rollouts, self.step)
        self.buffer.add(rollouts)

    def _fill(self) -> Requests | None:
        """Take complete groups into the step. Returns what must be sampled before it is full, None if it is."""
        buffer = self.buffer
        requests = buffer.fill(self.stream.draw, self._score)
        num_informative = len(buffer.informative)
        is_full = num_informative >= self.config.prompts_per_step
        is_one_round = buffer.num_rounds == 1 and num_informative  # no further round was asked for
        if requests is None and not (is_full or is_one_round):
            remaining = "these" if num_informative else "groups of equal rewards"
            print(
                f"dynamic sampling: {num_informative} of {self.config.prompts_per_step} groups have different rewards "
                f"after {buffer.num_rounds} rounds with {len(buffer.taken)} prompts; the step goes on with {remaining}",
            )
        return requests

    def _score(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Begin to score. Only dynamic sampling waits for it, because it trains on groups whose rewards differ."""
        rollouts = self.scorer.submit(rollouts, self.config.group_size, self.step + 1)
        if self.config.sampling.dynamic:
            with self.timer.phase("reward"):
                rollouts = self.scorer.collect()
        return rollouts

    def rollouts(self) -> list[Rollout] | None:
        """Return what the step trains on, None on other ranks. Not collective."""
        if not self.roles.is_driver:
            return None
        return self.buffer.rollouts()

    @on_driver_for_learners
    def make_batch(self, rollouts: list[Rollout]) -> TrainBatch:
        """Lay the step's rollouts end to end."""
        turn_weight = None
        if self.config.turns_earn:
            turn_weight = self.config.environment.weight
        batch = make_batch(rollouts, turn_weight)
        if not batch.loss_mask_N.any():
            check_lost(rollouts)
            raise RuntimeError("not one log-prob of the sampled tokens is finite: the generator is broken")
        return batch

    @on_driver_for_learners
    def make_teacher_batch(self, rollouts: list[Rollout]) -> TrainBatch:
        """Lay the same completions end to end, each after the prompt that the teacher reads."""
        return make_batch(rollouts, teacher=True)

    @partial(on_driver_for_learners, scores=True)
    def collect_rewards(self) -> list[Rollout]:
        """Wait for the rewards that workers compute, ask the reward model, and return the step's rollouts with them."""
        buffer = self.buffer
        if not self.config.sampling.dynamic:
            buffer.set_rollouts(buffer.taken, self.scorer.collect())
        with refuse_bad_input():
            check_all_failed(rollouts_of(buffer.taken))
        for group in buffer.finished():
            values_R = pass_values(group.rollouts, self.scorer.pass_functions)
            rate = pass_rate(values_R, self.config.reward.pass_value)
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
        metrics = self._sampling_metrics(rollouts, batch)
        recorded_step = RecordedStep(batch, self.config.group_size, metrics)
        save_step(self.config.run_dir, self.step + 1, recorded_step)

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
        num_tokens = sum(piece.num_tokens for rollout in self._finished() for piece in rollout.pieces)
        times = self.timer.close_step() | self.times_ahead
        metrics = self._sampling_metrics(rollouts, batch)
        metrics |= measured_metrics(measured, times, num_tokens)
        interval = self.config.metrics.samples_interval
        if interval and (step - 1) % interval == 0:
            measured_rollouts = []
            advantages = sequence_advantages(batch)
            mismatches = measured.sequence_means()
            for rollout, advantage, mismatch in zip(rollouts, advantages, mismatches, strict=True):
                measured_rollouts.append(replace(rollout, advantage=advantage, mismatch=mismatch))
            prompts = self.scorer.prompt_texts(rollouts)
            self.session.run_log.completions(step, measured_rollouts, prompts)
        self.log_step(step, metrics)
        return metrics

    def _finished(self) -> list[Rollout]:
        """Return what the step took, except groups that go back, which the step that trains on them counts."""
        return rollouts_of(self.buffer.finished())

    def _sampling_metrics(self, rollouts: list[Rollout], batch: TrainBatch) -> Scalars:
        config = self.config
        metrics = rollout_metrics(
            self._finished(),
            config.group_size,
            self.scorer.answer_format,
        )
        metrics["mismatch/nonfinite_frac"] = nonfinite_frac(rollouts)
        if config.turns_earn:
            metrics["environment/alone_frac"] = alone_frac(rollouts, config.group_size)
        if config.has_lag:
            lag_S = (self.step - batch.versions_S).double()
            metrics["lag/mean"] = lag_S.mean().item()
            metrics["lag/max"] = lag_S.max().item()
        if config.sampling.carry_over:
            metrics["lag/stale_frac"] = stale_frac(rollouts, self.step)
        return metrics | self.buffer.metrics()
