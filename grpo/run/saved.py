"""What a run goes on from: its newest checkpoint, if it is resumed, and what it had read when that was saved."""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config.fields import RunConfig
from grpo.data.streams import Stream
from grpo.folder.checkpoint import open_run_folder
from grpo.folder.was_read import READ, WasRead
from grpo.run.groups import Group, saved_groups
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
    config: RunConfig,
    script: str,
    paths: Sequence[str],
    parts: Sequence[str] = (),
) -> Saved:
    """Check the run folder and find the checkpoint to continue from. Changes nothing.

    script: its name in run.json. paths: folders, files and hub names that the run reads besides its model and reward
    model. parts: what the script saves of its driver. Raises what `open_run_folder`, `check_saved` and `WasRead` raise.
    """
    checkpoint, state = open_run_folder(config, script, [config.model.path, config.reward.model, *paths])
    if state:
        check_saved("the driver's state", state, ("step", READ, *parts))
    return Saved(checkpoint, state, WasRead(config, state))


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
