"""What rank 0 does in a replay (`--replay RUN`): it reads each step's batch from a file where a driver samples one.

The loop is the same. A step's plan has no prompts, so nothing is sampled or scored, and there are no generators,
references or reward processes. The trainers see no difference: from the same weights, on as many ranks, the recorded
run's losses come out again to the last digit. Left out: evaluations, which need a generator (`python -m grpo.evaluate`
takes the exported model), and rollouts as text, which the recorded run's folder has.
"""

from dataclasses import asdict
from typing import Any

import torch

from grpo.algorithm.trial import try_algorithm
from grpo.config import GRPOConfig
from grpo.data.recorded import batch_path, check_recorded, read_step
from grpo.folder.checkpoint import saves
from grpo.folder.resume import begin, open_run_folder
from grpo.folder.run_folder import unlock_run_folder
from grpo.models import hf_folder
from grpo.report.ledger import Ledger
from grpo.report.log import RunLog
from grpo.report.measured import measured_metrics
from grpo.roles.comm import from_driver, on_driver, on_driver_for_learners
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles
from grpo.run.driver import SCRIPT, Start, plan_to_stop
from grpo.run.machine import fit_to_machine
from grpo.run.model_folder import open_model_folder
from grpo.run.profiler import check_profile
from grpo.run.skipped import SkippedSteps
from grpo.run.step_timer import StepTimer
from grpo.types import Plan, Prompt, TrainBatch
from grpo.watch.failures import refuse_bad_input
from grpo.watch.stopping import forget_old_stop, obey_stop, stop_reason


class ReplayDriver:
    """The methods of `Driver` that the loop calls. `self.recorded` is the step at hand, read by `plan`."""

    first_pending: None = None  # without generators nothing is sampled ahead

    def __init__(self, config: GRPOConfig, roles: Roles, timer: StepTimer):
        self.config, self.roles, self.timer = config, roles, timer
        self.ledger = Ledger(roles)

    @from_driver
    def start(self) -> Start:
        """Refuse bad input before the model is loaded, open the run folder."""
        config, algorithm = self.config, self.config.algorithm
        with refuse_bad_input():
            try_algorithm(algorithm)
            recorded = str(batch_path(config.replay, 1).parent)
            opened = open_run_folder(config, SCRIPT, (config.model.path, recorded))
            check_profile(config.profile, opened.step)
            coefficients = {"algorithm.kl_coef": algorithm.kl_coef, "algorithm.distill_coef": algorithm.distill_coef}
            needs_reference = " and ".join(f"{name}={value}" for name, value in coefficients.items() if value)
            steps = range(opened.step + 1, config.num_steps + 1)
            check_recorded(config.replay, steps, config.group_size, needs_reference)
            folder, _ = open_model_folder(config, config.trainer.tensor_parallel)
            self.vocab_size = hf_folder.read_hf_config(folder).vocab_size
        begin(config, SCRIPT, opened)
        trainer = fit_to_machine(config, folder)
        forget_old_stop(config.run_dir)
        self.saved_step, self.last_line = opened.step, f"done; everything is in {config.run_dir}"
        self.run_log = RunLog(
            config.metrics, config.run_dir, config.num_steps, opened.step, config.warnings, asdict(config)
        )
        self.skipped = SkippedSteps(config.run_dir)
        print(
            f"replay of {recorded} on {config.roles.num_trainers} trainer ranks, which neither samples nor evaluates; "
            f"{config.run_dir}, starting at step {opened.step}",
            flush=True,
        )
        return Start(
            step=opened.step,
            trainer=trainer,
            model_folder=folder,
            reference_folder="",
            stop_token_ids=[],
            eval_prompts=[],
            checkpoint=opened.checkpoint,
        )

    @from_driver
    def plan(self, step: int, pending: None) -> Plan:
        """Read the step's batch. Raises ValueError if its tokens are not in the model's vocabulary."""
        config = self.config
        if reason := stop_reason(config.run_dir):
            self.last_line = obey_stop(reason, step, config.run_dir)
            return plan_to_stop(step, self.saved_step)
        self.recorded = read_step(config.replay, step + 1)
        largest = int(self.recorded.batch.ids_N.max())
        if largest >= self.vocab_size:
            raise ValueError(
                f"{batch_path(config.replay, step + 1)} has token {largest}, and the model has {self.vocab_size} "
                "tokens; use a model with the tokenizer of the recorded run"
            )
        if save := saves(config.checkpoint, step + 1, is_last=step + 1 == config.num_steps):
            self.saved_step = step + 1
        return Plan(
            step=step,
            prompts=[],
            generator_version=step,
            sync_check=False,
            sync=False,
            save=save,
            evaluate=False,
        )

    def take_pending(self, plan: Plan, pending: None) -> None:
        """Nothing was sampled."""

    def more_prompts(self, sampled: None) -> list[Prompt]:
        """Nothing is sampled."""
        return []

    @on_driver_for_learners
    def make_batch(self, sampled: None) -> TrainBatch:
        """The recorded batch, with the reference's log-probs if it has them."""
        return self.recorded.batch

    @on_driver_for_learners
    def collect_rewards(self, sampled: None) -> None:
        """There is nothing to wait for."""

    @on_driver_for_learners
    def reward_tensors(self, sampled: None) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 [S], bool [S]): rewards, and which there are."""
        return self.recorded.rewards_S, self.recorded.has_reward_S

    def state(self, step: int, pending: None) -> tuple[dict[str, Any] | None, None]:
        """What a checkpoint after `step` steps must hold of the driver; None on other ranks. Not collective."""
        return {"step": step, "data": {}} if self.roles.is_driver else None, None

    def log(self, step: int, sampled: None, batch: TrainBatch, measured: StepMetrics, pending: None) -> None:
        """The step's one log call, after `step` steps; metrics of the sampling are the recorded run's."""
        times = self.timer.close_step()
        self._log(step, batch, measured, times, self.ledger.exchange(step, self.timer.worked))

    @on_driver
    def _log(
        self,
        step: int,
        batch: TrainBatch,
        measured: StepMetrics,
        times: dict[str, float],
        ledger: tuple[int, torch.Tensor] | None,
    ) -> None:
        metrics = self.recorded.metrics | measured_metrics(measured, times, batch.num_tokens)
        self.run_log.log(step, metrics | self.run_log.ledger(ledger))
        self.skipped.look(step, metrics, batch)

    @on_driver
    def finish(self) -> None:
        """Close the log."""
        self.run_log.ledger(self.ledger.collect())
        self.run_log.close()
        unlock_run_folder(self.config.run_dir)
        print(self.last_line, flush=True)
