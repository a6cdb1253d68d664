"""What rank 0 decides and logs in the steps of every script. `Driver` and `SFTDriver` add what is theirs.

Every rank holds one and calls the same methods, in the order of the loop; rank 0 runs them, and the others wait for its
decisions (`comm.on_driver`, `comm.from_driver`).
"""

from dataclasses import dataclass

from grpo.report.log import RunLog
from grpo.roles.process_groups import Roles
from grpo.run.step_timer import StepTimer
from grpo.types import Scalars
from grpo.watch.failures import BadInput
from grpo.watch.stopping import obey_stop, stop_reason

MOST_SKIPPED = 3  # steps in a row without an update, which end the run


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many steps a run takes, and what happens every so many of them. 0 is never."""

    num_steps: int
    checkpoint_every: int
    evaluate_every: int = 0
    validate_every: int = 0
    sync_check_every: int = 0
    samples_every: int = 0
    """Steps between those whose completions are written."""
    overlap_steps: int = 0
    """Steps that sampling is ahead of training."""

    def is_due(self, every: int, step: int, is_last: bool = False) -> bool:
        """Return whether what happens `every` steps, and at the end, follows step `step`.

        is_last: the run ends before its `num_steps`.
        """
        is_last = is_last or step == self.num_steps
        return every > 0 and (is_last or step % every == 0)


@dataclass(eq=False)
class Steps:
    """Requests to stop, and the line of a step in the log."""

    schedule: Schedule
    roles: Roles
    timer: StepTimer
    run_log: RunLog | None
    """On rank 0 alone."""

    num_skipped = 0  # in a row; without an annotation it is no argument

    def is_stopped(self, step: int) -> bool:
        """Return whether a signal or a file asked the run to end after `step` steps. On rank 0 alone."""
        run_log = self.run_log
        reason = stop_reason(run_log.run_dir)
        if reason:
            run_log.last_line = obey_stop(reason, step, run_log.run_dir)
        return bool(reason)

    def log_step(self, step: int, metrics: Scalars) -> None:
        """Log step number `step`, and warn if its update was skipped. On rank 0 alone.

        Raises BadInput after MOST_SKIPPED skipped updates in a row.
        """
        self.run_log.log(step, metrics)
        prefix = "skipped/"
        causes = [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]
        if not causes:
            self.num_skipped = 0
            return
        self.num_skipped += 1
        skipped_frac = metrics["skipped_frac"]
        message = f"step {step} skipped {skipped_frac:.0%} of its update, because not finite: {', '.join(causes)}"
        if self.num_skipped == MOST_SKIPPED:
            raise BadInput(
                f"{message}; so did the {MOST_SKIPPED - 1} before it, in part or whole. Lower trainer.learning_rate, "
                "or look at earlier metrics, and continue with --resume (--record keeps batches)"
            )
        print(f"warning: {message}")
