"""The log at Weights & Biases too."""

import importlib.util
from collections.abc import Iterator
from typing import Any


def problems(config: Any) -> Iterator[str]:
    """Yield that the package is missing, except in a dry run for another machine."""
    if not config.gpus and importlib.util.find_spec("wandb") is None:
        project = config.metrics.wandb_project
        yield f"metrics.wandb_project={project!r} needs a package: pip install wandb, or leave it empty"


def open_tracker(config: Any, start_step: int) -> Any:
    """Open a run there, or the earlier one again if this run is resumed. Raises ValueError if the login fails."""
    from grpo.features.wandb.tracker import Tracker

    return Tracker(config, start_step)
