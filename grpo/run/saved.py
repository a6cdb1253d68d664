"""What a run goes on from: its newest checkpoint, if it is resumed, and what it had read when that was saved."""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config.fields import Config
from grpo.config.recipes import is_resume_safe, written_fields
from grpo.config.values import settings
from grpo.data.streams import Stream
from grpo.folder.checkpoint import newest_checkpoint
from grpo.folder.run_folder import CONFIG as CONFIG_FILE
from grpo.folder.run_folder import MARKER, check_run_folder, step_of
from grpo.folder.was_read import CONFIG, READ, WasRead
from grpo.run.groups import Group, saved_groups
from grpo.text import without_secrets
from grpo.types import check_saved


@dataclass(frozen=True)
class Saved:
    """The checkpoint of a run that is resumed. A fresh run has none, an empty state and step 0."""

    checkpoint: pathlib.Path | None
    state: Mapping[str, Any]
    """The driver's, in that checkpoint."""
    read: WasRead
    """What was read so far, as the next checkpoint keeps it."""

    @property
    def step(self) -> int:
        """Number of steps that were done when it was saved."""
        return self.read.step


def find_saved(
    config: Config,
    script: str,
    paths: Sequence[str],
    names: Sequence[str] = (),
) -> Saved:
    """Check the run folder and find the checkpoint to continue from. Changes nothing.

    script: its name in run.json. paths: folders, files and hub names that the run reads besides its model and reward
    model. names: what the script saves of its driver. Raises ValueError if the folder is not for this run (see
    `check_run_folder`), if the checkpoint cannot be used, or for a change that makes it another run.
    """
    check_run_folder(
        config.run_dir,
        script,
        [config.model.path, config.reward.model, *paths],
        resume=config.resume,
        overwrite=config.overwrite,
    )
    checkpoint = None
    state = {}
    if config.resume:
        checkpoint, state = newest_checkpoint(config.run_dir)
    if checkpoint and step_of(checkpoint) > config.num_steps:
        raise ValueError(
            f"{checkpoint} is beyond num_steps={config.num_steps}; --num-steps {step_of(checkpoint)} exports what it "
            "has, and a larger number trains it further; remove its folder to go back to the one before"
        )
    if state:
        check_saved("the driver's state", state, ("step", READ, *names))
    return Saved(checkpoint, state, begin_to_read(config, state))


def begin_to_read(config: Config, state: Mapping[str, Any]) -> WasRead:
    """Note the config as the first thing that a run reads. state: the driver's, empty if the run is not resumed.

    Raises what `WasRead.note` raises.
    """
    read = WasRead(config.run_dir, config.allow_changes, state)
    fields = written_fields(config)
    may_change = {path for path in fields if is_resume_safe(path, config)}
    read.note(CONFIG, fields, may_change)
    return read


def warn_of_secrets(config: Config) -> None:
    """Print which fields of the config, which the run folder keeps, look like secrets."""
    secret = [path for path, value in settings(config).items() if without_secrets(value) != value]
    if secret:
        print(
            f"warning: {', '.join(secret)} holds what looks like a secret, and {CONFIG_FILE} and {MARKER} keep it; "
            "put it into the environment, and its variable's name into reward.environment"
        )


def resume_data(saved: Saved, stream: Stream) -> list[Group]:
    """Note the rows of a new stream. If the run is resumed, go to the saved place in them; return groups in flight.

    If the rows are others, which `allow_changes` allows, the data begin again. Then, and after any other change on
    which the result depends, groups in flight are left out, because they belong to the old run. Raises ValueError if
    another version of the project saved them, and what `WasRead.note` raises.
    """
    checksums = {}
    for label, order in stream.orders.items():
        name = f"the rows of {label}" if label else "the rows"
        checksums[name] = f"{order.num_rows} of {order.source}, checksum {order.rows.checksum}"
    has_same_rows = saved.read.note("rows", checksums)
    state = saved.state
    if not state:
        return []
    if has_same_rows:
        stream.load_state_dict(state["data"])
    else:
        print("the data begin again")
    groups = saved_groups(state["flight"]) if state.get("flight") else []
    if groups and not saved.read.is_same_run:
        print(f"{len(groups)} groups in flight are left out: they are of the old config or data")
        return []
    return groups
