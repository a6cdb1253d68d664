"""How both scripts begin in a run folder: whose it is, what to continue from, and whether this run is still that run.

The config of the run before is what its `run.json` says, which is data; its `config.py` is not run.
"""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import changes_since
from grpo.folder.checkpoint import newest_checkpoint
from grpo.folder.run_folder import check_run_folder, read_marker

Stream = TypeVar("Stream")


def open_run_folder(
    config: GRPOConfig | SFTConfig, script: str, inputs: Iterable[str]
) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """The newest checkpoint and the driver's state in it, if the run is to be resumed and has one. Changes nothing.

    inputs: paths and hub names that the run reads. Groups in flight are not for another config, so that they are left
    out. Raises ValueError if the folder is not for this run (see `check_run_folder`), if that checkpoint cannot be
    used, or if the run would go on as another one.
    """
    check_run_folder(config.run_dir, script, inputs, resume=config.resume, overwrite=config.overwrite)
    checkpoint, state = newest_checkpoint(config.run_dir) if config.resume else (None, {})
    if checkpoint is not None and not is_same_run(config) and (flight := state.pop("flight", {})):
        print(f"{len(flight['counts'])} groups in flight are left out: they are of the old config", flush=True)
    return checkpoint, state


def is_same_run(config: GRPOConfig | SFTConfig) -> bool:
    """Whether the run goes on as it began; prints each field that differs from the config of the run that is resumed.

    Raises ValueError, unless `allow_changes` is set, if the result depends on one of them.
    """
    changes = changes_since(read_marker(config.run_dir)["config"], config)
    told = {f"{change.path}: {change.old} -> {change.new}": change.breaks_exactness for change in changes}
    refused = [text for text, breaks_exactness in told.items() if breaks_exactness]
    if refused and not config.allow_changes:
        raise ValueError(
            f"{config.run_dir} would not go on as the run that it is: {'; '.join(refused)}. Resume with the old "
            "values, take --allow-changes if the change is meant, or start a new run in another --run-dir"
        )
    if told:
        print("\n  ".join(["resumed with another config than before", *told]), flush=True)
    return not refused


def resumed_stream(make: Callable[[], Stream], state: dict[str, Any], allow_changes: bool) -> Stream:
    """A stream of data at the place that a checkpoint's `state` has; a new one without any.

    With `allow_changes`, a place in other data is none, and theirs begin at their beginning. Raises ValueError else.
    """
    stream = make()
    if not state:
        return stream
    try:
        stream.load_state_dict(state["data"])
    except ValueError as error:
        if not allow_changes:
            raise
        print(f"the data begin anew: {str(error).partition(';')[0]}", flush=True)
        return make()  # some of its sources may have their place already
    return stream
