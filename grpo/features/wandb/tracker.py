"""A run's page at Weights & Biases: its metrics, and in a step with samples the best and the worst of them.

Above step 0 a run is resumed, and so is its page. With WANDB_MODE=offline everything stays in `RUN_DIR/wandb`, for
`wandb sync` later.
"""

import secrets
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import wandb

from grpo.text import printable, reason_of, replace_file, without_secrets
from grpo.types import Record, Scalars

SHOWN = ("prompt", "completion", "reward")  # of a sample


class Tracker:
    """What `RunLog` tells of its steps."""

    def __init__(self, config: Any, start_step: int) -> None:
        """Open the run. Raises ValueError if the login fails."""
        if hasattr(config, "algorithm"):
            config = replace(config, algorithm=config.algorithm.resolved)
        project = config.metrics.wandb_project
        run_dir = Path(config.run_dir)
        id_file = run_dir / "wandb" / "run-id.txt"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        if start_step == 0 or not id_file.is_file():
            replace_file(id_file, secrets.token_hex(8))
        arguments = sys.argv
        sys.argv = without_secrets(arguments)  # many can read a project, which gets the command line too
        try:
            self.run = wandb.init(
                project=project,
                id=id_file.read_text(),
                name=run_dir.name,
                dir=str(run_dir),
                config=without_secrets(asdict(config)),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off"),  # the console line is the log's own
            )
        except wandb.Error as error:
            raise ValueError(
                f"metrics.wandb_project={project!r}: {reason_of(error)}; log in with `wandb login`, set "
                "WANDB_MODE=offline to log into the run folder, or name no project"
            ) from error
        finally:
            sys.argv = arguments
        # not wandb's built-in axis, on which it drops what a resumed run repeats
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Scalars) -> None:
        """Log the metrics of a step."""
        self.run.log({"step": step, **metrics})

    def samples(self, step: int, records: list[Record]) -> None:
        """Log the completions of a step with the highest and the lowest reward as a table."""
        ranked = sorted((record for record in records if record["reward"] is not None), key=lambda r: r["reward"])
        rows = []
        for record in ranked[-1:] + ranked[:-1][:1]:
            rows.append([printable(str(record[name])) for name in SHOWN])
        table = wandb.Table(columns=list(SHOWN), data=rows)
        self.run.log({"step": step, "samples": table})

    def close(self) -> None:
        """End the run there."""
        self.run.finish()
