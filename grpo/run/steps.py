"""What rank 0 decides and logs in the steps of every script. `Driver` and `SFTDriver` add what is theirs.

Every rank holds one and calls the same methods, in the order of the loop; rank 0 runs them, and the others wait for its
decisions (`comm.on_driver`, `comm.from_driver`).
"""

from grpo.run.session import Session
from grpo.types import Scalars
from grpo.watch.failures import BadInput
from grpo.watch.stopping import obey_stop, stop_reason

MOST_SKIPPED = 3  # steps in a row that skipped an update, which end the run


class Steps:
    """Requests to stop, what is due after a step, and the line of a step in the log."""

    num_skipped = 0  # in a row

    def __init__(self, session: Session) -> None:
        """Take what a session has after its start."""
        self.config = session.config
        self.roles = session.roles
        self.timer = session.timer
        self.run_log = session.run_log  # on rank 0 alone

    def is_due(self, every: int, step: int, is_last: bool = False) -> bool:
        """Return whether what happens `every` steps (0 is never), and at the end, follows step number `step`.

        is_last: the run ends before its `num_steps`.
        """
        is_last = is_last or step == self.config.num_steps
        return every > 0 and (is_last or step % every == 0)

    def is_stopped(self, step: int) -> bool:
        """Return whether a signal or a file asked the run to end after `step` steps. On rank 0 alone."""
        run_log = self.run_log
        reason = stop_reason(run_log.run_dir)
        if reason:
            run_log.last_line = obey_stop(reason, step, run_log.run_dir)
        return bool(reason)

    def log_step(self, step: int, metrics: Scalars) -> None:
        """Log step number `step`, and warn if an update of it was skipped. On rank 0 alone.

        Raises BadInput after MOST_SKIPPED such steps in a row.
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
