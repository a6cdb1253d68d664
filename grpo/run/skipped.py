"""Steps whose update was skipped because something was not finite: told, kept to be looked at, and not without end."""

import pathlib

from grpo.data.recorded import BATCHES, save_batch
from grpo.types import TrainBatch
from grpo.watch.failures import BadInput

# By the last part of the trainer's metric `skipped/...`
CAUSES = {
    "reference": "log-probs of the reference",
    "old": "log-probs of the policy at the start of the step",
    "advantages": "advantages",
    "policy": "log-probs of the policy",
    "loss": "parts of the loss",
    "gradient": "parts of the gradient",
}
MOST_FILES = 5
MOST_IN_A_ROW = 3  # such steps end the run


class SkippedSteps:
    """Counts those in a row. On the driver."""

    def __init__(self, run_dir: str) -> None:
        self.folder, self.in_a_row = pathlib.Path(run_dir) / BATCHES, 0

    def look(self, step: int, metrics: dict[str, float], batch: TrainBatch) -> None:
        """Take in a finished step; of one with a skipped update say why, and keep its batch.

        Raises BadInput after MOST_IN_A_ROW such steps.
        """
        causes = [words for name, words in CAUSES.items() if f"skipped/{name}" in metrics]
        if not causes:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        path = self.folder / f"skipped-step-{step:08d}.safetensors"
        save_batch(batch, path, reason=", ".join(causes))
        for old in sorted(self.folder.glob("skipped-step-*.safetensors"))[:-MOST_FILES]:
            old.unlink()
        what = f"{' and '.join(causes)} are not finite"
        if self.in_a_row < MOST_IN_A_ROW:
            share = "" if metrics["skipped_frac"] == 1 else f" {metrics['skipped_frac']:.0%} of"
            print(f"warning: step {step} skipped{share} its update: {what}; its batch is in {path}", flush=True)
            return
        raise BadInput(
            f"{self.in_a_row} steps in a row skipped their update, the last one, {step}, because {what}; the weights "
            f"are those before them. The last batch is in {path}; lower trainer.learning_rate or look at the metrics "
            "of the steps before, then continue with --resume"
        )
