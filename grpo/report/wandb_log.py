"""Metrics and samples to Weights & Biases, if `metrics.wandb_project` asks for it. The package is imported only then.

Rank 0 alone. WANDB_MODE=offline keeps everything in `RUN_DIR/wandb`, for `wandb sync` later. A run that is resumed
goes on as the same run there.
"""

import importlib.util
import pathlib
import secrets
from typing import Any

FOLDER = "wandb"
ID_FILE = "run-id.txt"


def check_wandb(project: str) -> None:
    """Refuse a project without the package. Raises ValueError that says how to install it."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"metrics.wandb_project={project!r} needs a package that is not installed: pip install wandb, or leave the "
            "field empty"
        )


class WandbLog:
    """One run of a project."""

    def __init__(self, project: str, run_dir: str, start_step: int, config: dict[str, Any] | None = None) -> None:
        """config: what the run's page shows of it. Raises wandb's own error if it cannot log in."""
        import wandb

        folder = pathlib.Path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if start_step == 0 or not (folder / ID_FILE).is_file():
            (folder / ID_FILE).write_text(secrets.token_hex(8))
        self.table = wandb.Table
        self.run = wandb.init(
            project=project,
            id=(folder / ID_FILE).read_text(),
            name=pathlib.Path(run_dir).name,
            dir=run_dir,
            config=config,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),  # the console line is the log's own
        )
        # an axis of its own, because wandb drops what a resumed run repeats on its built-in one
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a step, or of an evaluation after it."""
        self.run.log({"step": step, **metrics})

    def samples(self, step: int, header: tuple[str, ...], rows: list[list[str]]) -> None:
        """A step's samples as a table."""
        self.run.log({"step": step, "samples": self.table(columns=list(header), data=rows)})

    def close(self) -> None:
        """Wait until everything is written or sent."""
        self.run.finish()
