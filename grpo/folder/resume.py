"""How both scripts begin in a run folder: whose it is, what to continue from, and whether this run is still that run.

The config of the run before is read from its `config.py` as data: the file is parsed and never run.
"""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import as_recipe
from grpo.config.saved import changes_since
from grpo.folder.checkpoint import newest_usable, remove_unfinished, set_aside
from grpo.folder.run_folder import CONFIG, begin_run, check_run_folder, mark_run_folder

Stream = TypeVar("Stream")
# Fields that decide which tensors a checkpoint has; --allow-changes does not help
OF_ADAPTERS = ("trainer.lora_rank: ", "trainer.lora_targets: ")


@dataclass(frozen=True)
class Opened:
    """A run folder that this process holds, and where the run starts."""

    checkpoint: pathlib.Path | None = None
    """None starts at step 0."""
    state: dict[str, Any] = field(default_factory=dict)
    """The driver's, in that checkpoint."""
    broken: tuple[pathlib.Path, ...] = ()
    """Newer checkpoints that cannot be used."""

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.state.get("step", 0)


def open_run_folder(config: GRPOConfig | SFTConfig, script: str, inputs: tuple[str, ...], take: bool = True) -> Opened:
    """Take the folder for this run and find the newest checkpoint that can be used, if the run is to be resumed.

    Without `take`, nothing in the folder changes.

    inputs: paths and hub names that the run reads. Raises ValueError if the folder is not for this run (see
    `check_run_folder`), if no checkpoint can be used, or if the run would go on as another one.
    """
    check_run_folder(config.run_dir, script, inputs, resume=config.resume, overwrite=config.overwrite)
    if take:
        mark_run_folder(config.run_dir, script)
    checkpoint, state, broken = newest_usable(config.run_dir) if config.resume else (None, {}, [])
    if checkpoint is not None and not is_same_run(config):
        state = without_groups(state)
    return Opened(checkpoint, state, tuple(broken))


def without_groups(state: dict[str, Any]) -> dict[str, Any]:
    """A driver's state with no groups in flight: they are not for another config. Prints how many they were."""
    flight = state.get("flight", {})
    if groups := flight.get("groups"):
        print(f"{len(groups)} groups in flight are left out: they are of the old config", flush=True)
        state = state | {"flight": flight | {"groups": [], "draws": [], "work": [0, 0]}}
    return state


def is_same_run(config: GRPOConfig | SFTConfig) -> bool:
    """Whether the run goes on as it began; prints each field that differs from the config of the run that is resumed.

    False also if that config cannot be read. Raises ValueError, unless `allow_changes` is set, if the result depends on
    one of them, and in any case if other LoRA adapters are asked for than the checkpoints have.
    """
    path = pathlib.Path(config.run_dir) / CONFIG
    try:
        changes = changes_since(path.read_text(encoding="utf-8") if path.is_file() else "", config)
    except (OSError, ValueError) as error:
        print(f"warning: {path} cannot be compared with this run's config: {error}", flush=True)
        return False
    told = [f"{change.path}: {change.old} -> {change.new}" for change in changes]
    refused = [text for text, change in zip(told, changes, strict=True) if change.breaks_exactness]
    if adapters := [text for text in told if text.startswith(OF_ADAPTERS)]:
        raise ValueError(
            f"the checkpoints of {config.run_dir} have no place for other adapters: {'; '.join(adapters)}. Resume with "
            "the old values, or start a new run in another --run-dir"
        )
    if refused and not config.allow_changes:
        raise ValueError(
            f"{config.run_dir} would not go on as the run that it is: {'; '.join(refused)}. Resume with the old "
            "values, take --allow-changes if the change is meant, or start a new run in another --run-dir"
        )
    if told:
        print("\n  ".join(["resumed with another config than before", *told]), flush=True)
    return not refused


def resumed_stream(make: Callable[[], Stream], opened: Opened, allow_changes: bool) -> Stream:
    """A stream of data at the place where the checkpoint was taken; a new one if the run starts at step 0.

    With `allow_changes`, a place in other data is none, and theirs begin at their beginning. Raises ValueError else.
    """
    stream = make()
    if opened.checkpoint is None:
        return stream
    try:
        stream.load_state_dict(opened.state["data"])
    except ValueError as error:
        if not allow_changes:
            raise
        print(f"the data begin anew: {str(error).partition(';')[0]}", flush=True)
        return make()  # some of its sources may have their place already
    return stream


def begin(config: GRPOConfig | SFTConfig, script: str, opened: Opened) -> None:
    """Now that nothing is refused any more: clear up after a run that was killed or is overwritten, write the config.

    Checkpoints that cannot be used are set aside, unfinished ones deleted.
    """
    set_aside(list(opened.broken))
    remove_unfinished(config.run_dir)
    flags = {"resume": config.resume, "overwrite": config.overwrite}
    begin_run(config.run_dir, script, as_recipe(config), step=opened.step, **flags)
