"""What rank 0 alone does in the steps of SFT: draw examples, decide, log. Every rank holds one, as in driver.py."""

import collections
from dataclasses import dataclass
from typing import Any, Literal

from grpo.data.batches import make_sft_batch
from grpo.metrics import StepMetrics
from grpo.report.rollout_metrics import measured_metrics
from grpo.roles.comm import from_driver, on_driver
from grpo.run.session import Session
from grpo.run.steps import Steps
from grpo.types import Scalars, TrainBatch

STOP_WINDOW = 10  # steps whose mean loss `stop_at_loss` looks at


@dataclass(frozen=True)
class Due:
    """What follows a step."""

    validate: bool
    evaluate: bool
    save: bool


class SFTDriver(Steps):
    """Examples, decisions and the log."""

    def __init__(self, session: Session) -> None:
        """Begin with the examples that rank 0 has read, and the losses of the checkpoint."""
        super().__init__(session)
        if self.roles.is_driver:
            self.stream = session.start.stream
            self.validation = session.start.validation
            recent_losses = session.start.saved.state.get("recent_losses", ())
            self.recent_losses = collections.deque(recent_losses, maxlen=STOP_WINDOW)

    @on_driver
    def held_out_batch(self, name: str) -> TrainBatch:
        """Lay a validation set end to end."""
        return make_sft_batch(self.validation[name])

    @from_driver
    def ending(self, step: int) -> Literal["", "learned", "stopped"]:
        """Return why the run ends after `step` steps: a low loss, or a request to stop. Empty if it goes on."""
        if self._is_learned():
            return "learned"
        if self.is_stopped(step):
            return "stopped"
        return ""

    @on_driver
    def next_batch(self, num_sequences: int) -> TrainBatch:
        """Draw examples and lay them end to end. The loss counts their labels."""
        return make_sft_batch(self.stream.draw(num_sequences))

    @from_driver
    def due(self, step: int, measured: StepMetrics) -> Due:
        """Decide what follows step number `step`. A low loss can make it the last one."""
        self.recent_losses.append(measured.means()["loss"])
        is_last = self._is_learned()
        return Due(
            validate=self.is_due(self.config.validation.interval, step, is_last),
            evaluate=self.is_due(self.config.evaluation.interval, step, is_last),
            save=self.is_due(self.config.checkpoint.interval, step, is_last),
        )

    def _is_learned(self) -> bool:
        """Return whether the mean loss of the last STOP_WINDOW steps is below `stop_at_loss`."""
        losses = self.recent_losses
        return len(losses) == STOP_WINDOW and sum(losses) / STOP_WINDOW < self.config.stop_at_loss

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of the driver. On rank 0."""
        return {
            "data": self.stream.state_dict(),
            "recent_losses": list(self.recent_losses),
        }

    @on_driver
    def log(
        self,
        step: int,
        batch: TrainBatch,
        measured: StepMetrics,
    ) -> None:
        """Log step number `step`. A metric of examples belongs here."""
        times = self.timer.close_step()
        metrics = measured_metrics(measured, times, batch.num_tokens)
        if self.config.too_long == "truncate":
            metrics["data/truncated_frac"] = batch.truncated_S.float().mean().item()
        self.log_step(step, metrics)

    @on_driver
    def log_validation(self, step: int, losses: Scalars) -> None:
        """Log the loss of each validation set and, if there are several, their plain mean."""
        metrics = {f"validation/{name}/loss": loss for name, loss in losses.items() if name}
        metrics["validation/loss"] = sum(losses.values()) / len(losses)
        self.run_log.log_held_out(step, metrics)
