"""What rank 0 alone does: draw prompts, score completions, decide, log.

Every rank holds a `Driver` and calls the same methods in the order of the loop; rank 0 runs them, and the others wait
for its decisions (`comm.on_driver`, `comm.from_driver`). Within a step nothing is kept from one call to the next: what
was sampled is a value that the loop passes on. Left out: everything that several ranks do together.
"""

import pathlib
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from grpo.algorithm.trial import try_algorithm
from grpo.config import GRPOConfig, TrainerConfig
from grpo.config.layout import describe_layout
from grpo.data.batches import make_batch, sample_of
from grpo.data.draw_ahead import DrawAhead
from grpo.data.prepare import load_sources, reward_columns, texts_of, usable_prompts
from grpo.data.recorded import RecordedStep, save_step
from grpo.data.streams import PromptStream
from grpo.folder.checkpoint import saves
from grpo.folder.pending import pending_state, pending_tensors, read_pending
from grpo.folder.resume import begin, open_run_folder, resumed_stream
from grpo.folder.run_folder import unlock_run_folder
from grpo.models import hf_folder
from grpo.report.ledger import Ledger
from grpo.report.log import RunLog
from grpo.report.measured import measured_metrics, sequence_advantages
from grpo.report.rollout_metrics import pass_rates, reward_tensors, rollout_metrics
from grpo.report.sampling_work import nonfinite_frac, sampling_work, stale_frac
from grpo.rewards.pool import check_all_failed
from grpo.roles.ahead import PROBE_PROMPTS
from grpo.roles.comm import from_driver, on_driver, on_driver_for_learners
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles
from grpo.run.carried import CarryOver
from grpo.run.machine import fit_to_machine
from grpo.run.model_folder import open_model_folder
from grpo.run.past_lengths import PastLengths
from grpo.run.profiler import check_profile
from grpo.run.sampled import Sampled, informative_groups
from grpo.run.scorer import Scorer, check_functions, check_version, held_out_prompts
from grpo.run.skipped import SkippedSteps
from grpo.run.step_timer import StepTimer
from grpo.types import Completion, Pending, Plan, Prompt, Rollout, TrainBatch
from grpo.watch.failures import refuse_bad_input
from grpo.watch.stopping import forget_old_stop, obey_stop, stop_reason

SCRIPT = "train_grpo.py"  # as run.json names it


@dataclass(frozen=True)
class Start:
    """What every rank must know before the first step."""

    step: int
    trainer: TrainerConfig
    """The config's, fitted to the machine."""
    model_folder: str
    reference_folder: str
    stop_token_ids: list[int]
    eval_prompts: list[Prompt]
    checkpoint: pathlib.Path | None


class Driver:
    """Prompts, rewards, decisions and the log."""

    def __init__(self, config: GRPOConfig, roles: Roles, timer: StepTimer):
        self.config, self.roles, self.timer = config, roles, timer
        self.ledger = Ledger(roles)
        self.first_pending: Pending | None = None
        """What the checkpoint has that was sampled ahead, for the first step; on the driver, and read by `start`."""

    @from_driver
    def start(self) -> Start:
        """Refuse bad input before any model is loaded, open the run folder, start the reward processes."""
        config = self.config
        with refuse_bad_input():
            data = config.data
            check_functions(config)
            try_algorithm(config.algorithm)
            sources = load_sources(data)
            if data.row:  # which columns it makes is known only now
                check_functions(config, reward_columns(sources))
            evaluates = config.evaluation.interval > 0
            read = [*data.all_sources, *(config.evaluation.held_out(data) if evaluates else [])]
            inputs = (config.model.path, config.model.reference_path, *(source.path for source in read))
            opened = open_run_folder(config, SCRIPT, inputs)
            folder, tokenizer = open_model_folder(config, config.largest_tensor_parallel, texts_of(sources))
            if config.needs_reference and config.model.reference_path:
                reference = hf_folder.resolve_folder(config.model.reference_path)
                hf_folder.check_folder(reference, config.max_sequence_tokens, config.reference_tensor_parallel)
                hf_folder.check_reference(reference, folder, tokenizer)
            rows = usable_prompts(sources, config, tokenizer)
            stream = resumed_stream(lambda: PromptStream(rows, config, tokenizer), opened, config.allow_changes)
            self.lengths = PastLengths(keeps_rows=not data.streaming)
            self.lengths.load_state_dict(opened.state.get("lengths", self.lengths.state_dict()))
            self.carried = CarryOver(config.prompts_per_step, config.sampling.carry_over, config.group_size)
            if "carried" in opened.state:
                self.carried.load(opened.checkpoint, opened.state["carried"], stream)
            if "pending" in opened.state:
                self.first_pending = read_pending(opened.checkpoint, opened.state["pending"], stream)
            self.stream = DrawAhead(stream)
            eval_prompts = held_out_prompts(config, tokenizer) if evaluates else []
            self.first_step = opened.step
            check_profile(config.profile, self.first_step)
            self.scorer = Scorer(config, folder, tokenizer)
        # only now that nothing is refused any more may an earlier run be deleted
        begin(config, SCRIPT, opened)
        trainer = fit_to_machine(config, folder)
        forget_old_stop(config.run_dir)
        self.saved_step, self.last_line = self.first_step, f"done; everything is in {config.run_dir}"
        self.run_log = RunLog(
            config.metrics, config.run_dir, config.num_steps, self.first_step, config.warnings, asdict(config)
        )
        self.skipped = SkippedSteps(config.run_dir)
        print(
            f"{describe_layout(config)} ranks; {config.run_dir}, starting at step {self.first_step}",
            flush=True,
        )
        return Start(
            step=self.first_step,
            trainer=trainer,
            model_folder=folder,
            reference_folder=config.model.reference_path or folder,
            stop_token_ids=self.scorer.stop_token_ids,
            eval_prompts=eval_prompts,
            checkpoint=opened.checkpoint,
        )

    # ---- one step -----------------------------------------------------------------------------------------------

    @from_driver
    def plan(self, step: int, pending: Pending | None) -> Plan:
        """Everything that is decided about a step before it starts. A filter on prompts belongs here.

        The last step samples ahead too: what it leaves is in its checkpoint, should the run be made longer. A run that
        was asked to stop goes on to the next sync, because a resumed one begins with fresh weights.
        """
        config, last = self.config, step + 1 == self.config.num_steps
        if step % config.sync_interval == 0 and (reason := stop_reason(config.run_dir)):
            self.last_line = obey_stop(reason, step, config.run_dir)
            return plan_to_stop(step, self.saved_step)

        def due(interval: int) -> bool:
            return interval > 0 and (step + 1) % interval == 0

        # the generators hold the weights of the last sync, or those the run started with
        version = max(self.first_step, step - step % config.sync_interval)
        first_syncs = step <= self.first_step + config.sync_interval
        check_due = first_syncs or step % max(config.sync_check_interval, 1) < config.sync_interval
        check = config.sync_check_interval > 0 and version == step and check_due
        if save := saves(config.checkpoint, step + 1, last):
            self.saved_step = step + 1
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
            save=save,
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
        self._log(step, sampled, batch, measured, times, self.ledger.exchange(step, self.timer.worked))

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
        self.run_log.log(step, metrics | self.run_log.ledger(ledger))
        interval = self.config.metrics.samples_interval
        if interval and (step - 1) % interval == 0:
            values = zip(sampled.rollouts, sequence_advantages(batch), measured.sequence_means(), strict=True)
            rollouts = [replace(r, advantage=a, mismatch=m) for r, a, m in values]
            self.run_log.completions(step, rollouts, self.scorer.prompt_texts(rollouts))
        self.skipped.look(step, metrics, batch)

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

    @on_driver
    def log_evaluation(
        self, prompts: list[Prompt], greedy: list[Completion], samples: list[Completion], step: int
    ) -> None:
        """Score held-out completions and log them."""
        self.scorer.log_evaluation(self.run_log, prompts, greedy, samples, step)

    @on_driver
    def finish(self) -> None:
        """Close the log and end the reward processes."""
        self.scorer.pool.close()
        self.run_log.ledger(self.ledger.collect())
        self.run_log.close()
        unlock_run_folder(self.config.run_dir)
        print(self.last_line, flush=True)


def plan_to_stop(step: int, saved_step: int) -> Plan:
    """Save the steps before `step`, unless they are, and begin no other."""
    nothing = {"prompts": [], "generator_version": step, "sync_check": False, "sync": False, "evaluate": False}
    return Plan(step=step, save=step > saved_step, stop=True, **nothing)
