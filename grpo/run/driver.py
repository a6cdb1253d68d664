"""What rank 0 alone does: draw prompts, score completions, decide, log.

Every rank holds a `Driver` and calls the same methods in the order of the loop; rank 0 runs them, and the others wait
for its decisions (`comm.on_driver`, `comm.from_driver`). What was sampled is in its buffer of groups (flight.py). Left
out: everything that several ranks do together.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from grpo.data.batches import make_batch, sample_of
from grpo.data.recorded import RecordedStep, save_step
from grpo.data.rows import choice_of
from grpo.metrics import StepMetrics
from grpo.report.rollout_metrics import (
    alone_frac,
    measured_metrics,
    nonfinite_frac,
    part_tensor,
    reward_tensors,
    rollout_metrics,
    sequence_advantages,
    stale_frac,
)
from grpo.rewards.pool import check_all_failed
from grpo.roles.comm import from_driver, on_driver, on_driver_for_learners
from grpo.roles.weight_sync import PROBE_PROMPTS
from grpo.run.flight import Flight
from grpo.run.scorer import check_lost, check_version
from grpo.run.session import Session, is_due
from grpo.types import Completion, Prompt, Requests, Rollout, StepPlan, TrainBatch
from grpo.watch.failures import refuse_bad_input


class Driver:
    """Prompts, rewards, decisions and the log."""

    def __init__(self, session: Session):
        """session: one that has started up; what it has read is on rank 0 alone."""
        self.session, self.config, self.roles, self.timer = session, session.config, session.roles, session.timer
        self.stream, self.scorer, self.reward_model = session.stream, session.scorer, session.reward_model
        self.flight = Flight(self.config.sampling, self.config.prompts_per_step, self.config.group_size)
        if "flight" in session.saved_state:
            self.flight.load(session.saved_state["flight"])

    # ---- one step -----------------------------------------------------------------------------------------------

    @partial(from_driver, scores=True)
    def plan(self, step: int, weights: Mapping[str, float], wanted: Callable[[Prompt], bool] | None = None) -> StepPlan:
        """Decide everything about a step before it starts.

        Prompts drawn from now on come from the sources of the data by `weights`, see Mixture.set_weights; those that
        `wanted` says no to are passed over, and others drawn in their place.
        """
        config, check_interval = self.config, self.config.sync_check_interval
        if self.session.is_stopped(step):
            return StepPlan(step=step, requests=None, save=False, evaluate=False, stop=True)
        is_first = step <= self.session.first_step + 1  # before the first sync, and after it
        is_last = step + 1 == config.num_steps
        self.step, self.times_ahead = step, {}
        self.stream.set_weights(weights)
        self.stream.wanted = wanted
        self.flight.begin_step()
        requests = self._fill()
        prompts = requests.prompts if requests else [group.prompt for group in self.flight.taken]
        return StepPlan(
            step=step,
            requests=requests,
            save=is_due(config.checkpoint.interval, step + 1, is_last),
            evaluate=is_due(config.evaluation.interval, step + 1, is_last),
            probe=prompts[:PROBE_PROMPTS] if check_interval and (is_first or step % check_interval == 0) else [],
        )

    @partial(from_driver, scores=True)
    def land(self, completions: list[Completion]) -> Requests | None:
        """Take in what was sampled; their scoring begins. Returns what the step needs besides; None once it is full."""
        self._add(completions)
        return self._fill()

    @from_driver
    def request_ahead(self) -> Requests | None:
        """What the generators sample for the next step, while this one trains; None without `overlap_steps`.

        In the last step too: it is in its checkpoint, should the run be made longer.
        """
        return (
            self.flight.ask(self.config.prompts_per_step, self.session.stream.draw)
            if self.config.overlap_steps
            else None
        )

    @on_driver
    def land_ahead(self, completions: list[Completion], seconds: float, overlap_seconds: float) -> None:
        """Take in what was sampled ahead, in so many seconds; so many of them the driver was scoring and training."""
        self._add(completions)
        self.times_ahead = {"time/ahead": seconds, "time/overlap": overlap_seconds}

    def _add(self, completions: list[Completion]) -> None:
        check_version(completions, self.step)
        self.flight.add(completions)

    def _fill(self) -> Requests | None:
        """What must be sampled before the step is full; None if it is."""
        flight, num_groups = self.flight, self.config.prompts_per_step
        requests = flight.fill(self.session.stream.draw, self._score)
        is_asked_for = self.config.sampling.max_rounds == 1 and flight.num_informative  # not to sample others
        if requests is None and flight.num_informative < num_groups and not is_asked_for:
            print(
                f"dynamic sampling: {flight.num_informative} of {num_groups} groups have different rewards after "
                f"{flight.num_rounds} rounds with {len(flight.taken)} prompts; the step goes on with "
                + ("these" if flight.num_informative else "groups of equal rewards"),
                flush=True,
            )
        return requests

    def _score(self, prompts: list[Prompt], completions: list[Completion]) -> list[Rollout]:
        """Begin to score. Only dynamic sampling waits for it, because it trains on groups whose rewards differ."""
        rollouts = self.scorer.submit(prompts, completions, self.step + 1)
        if self.config.sampling.dynamic:
            with self.timer.phase("reward"):
                rollouts = self.scorer.collect()
        return rollouts

    def rollouts(self) -> list[Rollout] | None:
        """What the step trains on; None on other ranks. Not collective."""
        return self.flight.rollouts() if self.roles.is_driver else None

    @on_driver_for_learners
    def make_batch(self, rollouts: list[Rollout], for_teacher: bool = False) -> TrainBatch:
        """The step's rollouts laid end to end; for a teacher that reads other prompts, behind those."""
        if not any(r.completion.loss_mask_T.any() for r in rollouts):
            check_lost(rollouts)
            raise RuntimeError("not one log-prob of the sampled tokens is finite: the generator is broken")
        turn_weight = self.config.environment.weight if self.config.turns_earn else None
        observes = self.config.algorithm.echo_coef > 0
        if for_teacher:
            rollouts = [replace(r, prompt=replace(r.prompt, ids=r.prompt.teacher_ids)) for r in rollouts]
        samples = []
        for rollout in rollouts:
            teacher = self._teacher_of(rollout.prompt)
            samples.append(sample_of(rollout.prompt, rollout.completion, turn_weight, observes, teacher))
        return make_batch(samples)

    def _teacher_of(self, prompt: Prompt) -> int | None:
        names, column = [*self.config.model.teachers], self.config.data.teacher_column
        return names.index(choice_of(prompt.columns, column, names, "model.teachers")) if names else None

    @partial(on_driver_for_learners, scores=True)
    def collect_rewards(self) -> list[Rollout]:
        """The step's rollouts with their rewards, which workers computed meanwhile; a reward model does it now."""
        config, flight = self.config, self.flight
        if not config.sampling.dynamic:
            flight.everything = self.scorer.collect()
        with refuse_bad_input():
            check_all_failed(flight.everything)
        return flight.rollouts()

    @on_driver_for_learners
    def reward_tensors(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(float32 [S], bool [S], float32 [F, S]): rewards, which there are, and the values of each reward function."""
        return *reward_tensors(rollouts), part_tensor(rollouts, self.config.reward_weights)

    @on_driver_for_learners
    def record(self, rollouts: list[Rollout], batch: TrainBatch, rewards: tuple[torch.Tensor, ...]) -> None:
        """Write what the trainers get in this step, for a replay; rewards as `reward_tensors` gives them."""
        metrics = self._sampling_metrics(rollouts, batch)
        save_step(self.config.run_dir, self.step + 1, RecordedStep(batch, *rewards, self.config.group_size, metrics))

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the driver. On rank 0."""
        return {"data": self.stream.state_dict(), "flight": self.flight.state()}

    # ---- the log ------------------------------------------------------------------------------------------------

    @on_driver
    def log(self, step: int, rollouts: list[Rollout], batch: TrainBatch, measured: StepMetrics) -> dict[str, float]:
        """Log the step, after `step` steps. Returns its metrics by name."""
        num_tokens = sum(rollout.num_tokens for rollout in self.flight.everything)
        times = self.timer.close_step() | self.times_ahead
        metrics = self._sampling_metrics(rollouts, batch) | measured_metrics(measured, times, num_tokens)
        interval = self.config.metrics.samples_interval
        if interval and (step - 1) % interval == 0:
            values = zip(rollouts, sequence_advantages(batch), measured.sequence_means(), strict=True)
            rollouts = [replace(r, advantage=a, mismatch=m) for r, a, m in values]
            self.session.run_log.completions(step, rollouts, self.scorer.prompt_texts(rollouts))
        self.session.log(step, metrics)
        return metrics

    def _sampling_metrics(self, rollouts: list[Rollout], batch: TrainBatch) -> dict[str, float]:
        config, completions = self.config, [r.completion for r in rollouts]
        metrics = rollout_metrics(self.flight.everything, config.group_size, self.scorer.answer_format)
        metrics["mismatch/nonfinite_frac"] = nonfinite_frac(completions)
        if config.turns_earn:
            metrics["environment/alone_frac"] = alone_frac(rollouts, config.group_size)
        if config.has_lag:
            lag_S = (self.step - batch.versions_S).double()
            metrics |= {"lag/mean": lag_S.mean().item(), "lag/max": lag_S.max().item()}
        if config.sampling.carry_over:
            metrics["lag/stale_frac"] = stale_frac(completions, self.step)
        return metrics | self.flight.metrics()
