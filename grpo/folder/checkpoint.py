"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

Sharded model, optimizer, schedule and random states go through torch.distributed.checkpoint, so a run may resume on
another number of trainer ranks; the driver's state (step, data position) is in the same folder as JSON, and completions
that were sampled ahead as safetensors. What makes a checkpoint one that can be trusted is in checkpoint_files.py.
"""

import copy
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.stateful import Stateful

from grpo.config import CheckpointConfig, TrainerConfig
from grpo.folder.checkpoint_files import (
    PlainPlanner,
    PlainReader,
    check_checkpoint,
    innermost_cause,
    is_no_room,
    sync_folder,
    write_driver_state,
)
from grpo.folder.run_folder import BROKEN, CHECKPOINTS, PARTIAL, STEP_FOLDER, step_folders, step_of
from grpo.models.lora import PLACES
from grpo.watch.failures import BadInput

PROBE_BYTES = 2**24  # more than a full disk has left


def newest_usable(run_dir: str) -> tuple[pathlib.Path | None, dict[str, Any], list[pathlib.Path]]:
    """The newest checkpoint that is as it was written, the driver's state in it, and the newer ones that are not.

    None and an empty state if the run has no checkpoint. Of those passed over a line on the console says why. Raises
    ValueError, with what is wrong with the newest, if there are checkpoints and none can be used.
    """
    broken, first_reason = [], ""
    for folder in reversed(step_folders(run_dir)):
        try:
            state = check_checkpoint(folder)
        except ValueError as reason:
            broken.append(folder)
            first_reason = first_reason or str(reason)
            print(f"warning: the checkpoint of step {step_of(folder)} cannot be used: {reason}", flush=True)
            continue
        if broken:
            print(
                f"warning: the run goes back to the checkpoint of step {step_of(folder)}; what came after it is "
                "trained again",
                flush=True,
            )
        return folder, state, broken
    if broken:
        number = f"the only checkpoint of {run_dir}" if len(broken) == 1 else f"none of its {len(broken)} checkpoints"
        verb = "cannot" if len(broken) == 1 else "can"
        raise ValueError(f"{number} {verb} be used: {first_reason}; start anew with --overwrite or another --run-dir")
    return None, {}, []


def set_aside(broken: list[pathlib.Path]) -> None:
    """Give checkpoints that cannot be used another name, under which they are neither resumed nor counted as kept."""
    for folder in broken:
        aside = folder.with_name(f"{folder.name}{BROKEN}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)


def remove_unfinished(run_dir: str) -> None:
    """Delete what is left of checkpoints that a run was writing, or deleting, when it was killed."""
    for folder in (pathlib.Path(run_dir) / CHECKPOINTS).glob(f"step-*{PARTIAL}"):
        if STEP_FOLDER.fullmatch(folder.name.removesuffix(PARTIAL)):
            shutil.rmtree(folder, ignore_errors=True)


def check_adapters(checkpoint: pathlib.Path, trainer: TrainerConfig) -> None:
    """Refuse to resume with other LoRA adapters than the checkpoint has. Raises ValueError that names both."""
    there = PlainReader(checkpoint).read_metadata().state_dict_metadata
    places, saved = {place: target for target, place in PLACES.items()}, {}
    for name in there:  # model.layers.0.attention.wo.lora_a
        if name.startswith("model.layers.") and name.endswith(".lora_a"):
            saved[places[name.split(".", 3)[3].removesuffix(".lora_a")]] = there[name].size[0]
    wanted = dict.fromkeys(trainer.lora_targets, trainer.lora_rank) if trainer.lora_rank else {}
    if saved != wanted:
        raise ValueError(
            f"{checkpoint} has {_in_words(saved)}, and this run trains {_in_words(wanted)}; resume with the "
            "trainer.lora_rank and trainer.lora_targets that the run began with"
        )


def saves(config: CheckpointConfig, step: int, is_last: bool) -> bool:
    """Whether a checkpoint follows the `step`-th step."""
    if is_last:
        return config.interval > 0 or config.at_end
    return config.interval > 0 and step % config.interval == 0


def best_checkpoint(run_dir: str | pathlib.Path, metric: str) -> pathlib.Path | None:
    """Of the checkpoints after whose step the run was evaluated, that with the highest `eval/<metric>`; None without.

    Of equal ones the newest.
    """
    values = {}
    with open(pathlib.Path(run_dir) / "metrics.jsonl", encoding="utf-8") as file:
        for record in map(json.loads, file):
            if (value := record.get(f"eval/{metric.removeprefix('eval/')}")) is not None:
                values[record["step"]] = value
    evaluated = {folder: values[step_of(folder)] for folder in step_folders(run_dir) if step_of(folder) in values}
    return max(reversed(evaluated), key=evaluated.get, default=None)


def save_checkpoint(
    run_dir: str,
    step: int,
    trained: Stateful,
    driver_state: dict[str, Any] | None,
    config: CheckpointConfig,
    driver_tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the checkpoint of `step` and delete all but the `config.keep` newest, and the best by `config.keep_best`.

    `trained` is anything with a state_dict; `driver_state` and `driver_tensors`, if there are any, are wanted on rank 0
    alone. Collective over the trainer ranks. If the files cannot be written, nothing of them is left and older
    checkpoints stay: every rank raises BadInput, or, where there is no room and `config.on_full_disk` is `continue`,
    returns after a warning.
    """
    partial, target = _places(run_dir, step)
    failed = (
        _on_rank_0(lambda: _make_empty(partial))
        or _save_shards(trained, partial)
        or _on_rank_0(lambda: _complete(partial, target, driver_state, driver_tensors, config))
    )
    if failed is not None:
        _end_failed(failed, step, partial, target, config)


class Saver:
    """Saves the checkpoints of one run; with `config.in_background` beside training. Trainer ranks use it.

    Then `save` only copies the state to host memory. Threads write it while the next steps run, and rank 0's makes a
    checkpoint of it as soon as every rank has written its part. One that failed is told by the next `save` or `wait`.
    """

    def __init__(self, run_dir: str, config: CheckpointConfig, group: ProcessGroup | None) -> None:
        """group: the trainer ranks, on CPU tensors, with nothing else going on in it."""
        self.run_dir, self.config, self.group = run_dir, config, group
        self._step: int | None = None  # of the checkpoint that is being written; so are the next two
        self._written: Future | None = None
        self._completed: Future | None = None

    def save(
        self,
        step: int,
        trained: Stateful,
        driver_state: dict[str, Any] | None,
        driver_tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """As `save_checkpoint`. Collective over the trainer ranks; waits for the checkpoint before."""
        self.wait()
        if not self.config.in_background:
            save_checkpoint(self.run_dir, step, trained, driver_state, self.config, driver_tensors)
            return
        partial, target = _places(self.run_dir, step)
        if failed := _on_rank_0(lambda: _make_empty(partial)):
            _end_failed(failed, step, partial, target, self.config)
            return
        self._step = step
        self._written = dcp.async_save(_whole_state(trained), checkpoint_id=partial, process_group=self.group)
        if dist.get_rank() == 0:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            # a copy, because the driver goes on with what is in it
            state, tensors = copy.deepcopy((driver_state, driver_tensors))
            self._completed = thread.submit(self._complete, self._written, partial, target, state, tensors)
            thread.shutdown(wait=False)

    def wait(self) -> None:
        """Return when the checkpoint that is being written is complete; raises as `save_checkpoint` does.

        Collective over the trainer ranks; returns at once where none is being written.
        """
        if self._step is None:
            return
        step, written, completed = self._step, self._written, self._completed
        self._step = self._written = self._completed = None
        failed = _cause(written.result) or _on_rank_0(lambda: completed.result())
        if failed is not None:
            _end_failed(failed, step, *_places(self.run_dir, step), self.config)

    def _complete(
        self,
        written: Future,
        partial: pathlib.Path,
        target: pathlib.Path,
        driver_state: dict[str, Any],
        driver_tensors: dict[str, torch.Tensor] | None,
    ) -> None:
        written.result()  # torch's planner has heard from all ranks
        _complete(partial, target, driver_state, driver_tensors, self.config)


def _places(run_dir: str, step: int) -> tuple[pathlib.Path, pathlib.Path]:
    """Where a checkpoint is written, and where it is once it is complete."""
    target = pathlib.Path(run_dir) / CHECKPOINTS / f"step-{step:08d}"
    return target.with_suffix(PARTIAL), target


def _end_failed(
    failed: BaseException, step: int, partial: pathlib.Path, target: pathlib.Path, config: CheckpointConfig
) -> None:
    """Leave nothing of a checkpoint that could not be written, and raise or warn. Collective over the trainer ranks."""
    run_dir = target.parents[1]
    if not isinstance(failed, OSError):  # torch's writer hides why a write failed, so try once more
        failed = _on_rank_0(lambda: _write_something(partial)) or failed
    _on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
    if not isinstance(failed, OSError):
        raise failed
    older = [str(step_of(folder)) for folder in step_folders(run_dir) if folder != target]
    left = f"the checkpoint of step {older[-1]} stays" if older else "there is no older one"
    problem = f"the checkpoint of step {step} could not be saved in {target.parent}: {failed}; {left}"
    if not (is_no_room(failed) and config.on_full_disk == "continue"):
        raise BadInput(f"{problem}. Make room and continue with --resume" if is_no_room(failed) else problem)
    if dist.get_rank() == 0:
        print(f"warning: {problem}, and the run goes on (checkpoint.on_full_disk=continue); make room", flush=True)


def _make_empty(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _save_shards(trained: Stateful, folder: pathlib.Path) -> BaseException | None:
    """Write this rank's part, to the disk itself; returns on every rank what went wrong on any. Collective."""
    return _cause(lambda: dcp.save(_whole_state(trained), checkpoint_id=folder))


def _whole_state(trained: Stateful) -> dict[str, Any]:
    return trained.state_dict() | {"random": {str(dist.get_rank()): _random_state()}}


def _cause(write: Callable[[], Any]) -> BaseException | None:
    """What went wrong on any rank, None if nothing did."""
    try:
        write()
    except dcp.api.CheckpointException as error:
        return innermost_cause(error)
    return None


def _complete(
    partial: pathlib.Path,
    target: pathlib.Path,
    driver_state: dict[str, Any],
    driver_tensors: dict[str, torch.Tensor] | None,
    config: CheckpointConfig,
) -> None:
    """Make a checkpoint of what was written, and delete those that are not kept."""
    write_driver_state(partial, driver_state, driver_tensors)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)  # in one step: a crash before it leaves the older checkpoints as they are
    sync_folder(target.parent)
    run_dir = target.parents[1]
    best = best_checkpoint(run_dir, config.keep_best) if config.keep_best else None
    for old in step_folders(run_dir)[: -config.keep]:
        if old != best:
            shutil.rmtree(old.rename(old.with_suffix(PARTIAL)))  # killed meanwhile, it is not half a checkpoint


def _write_something(folder: pathlib.Path) -> None:
    """Raises the OSError that stands in the way of writing there, if one does."""
    with open(folder / "probe", "wb") as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _on_rank_0(work: Callable[[], None]) -> OSError | None:
    """Do it on the first trainer; every trainer gets the OSError that it raised, None if it did not. Collective."""
    raised: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            raised = [error]
    dist.broadcast_object_list(raised, src=0, device=torch.device("cpu"))
    return raised[0]


def load_checkpoint(checkpoint: pathlib.Path, trained: Stateful) -> None:
    """Bring model, optimizer, schedule and random states back. Collective over the trainer ranks.

    Only tensors and plain values are read; metadata that would run code is refused with pickle.UnpicklingError. Raises
    BadInput if the pieces cannot be read or do not fit what is trained.
    """
    state = trained.state_dict()
    reader = PlainReader(checkpoint)
    there, rank = reader.read_metadata().state_dict_metadata, str(dist.get_rank())
    # absent when more ranks resume than saved, or on another kind of device
    random = {kind: value for kind, value in _random_state().items() if f"random.{rank}.{kind}" in there}
    if random:
        state["random"] = {rank: random}
    _load(state, reader)
    trained.load_state_dict(state)
    if random:
        torch.set_rng_state(state["random"][rank]["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(state["random"][rank]["cuda"])


def load_model(checkpoint: pathlib.Path, model: Stateful) -> None:
    """Only the weights, into a sharded model. Collective over the ranks that hold it; any number of them."""
    state = {"model": model.state_dict()}
    _load(state, PlainReader(checkpoint))
    model.load_state_dict(state["model"])


def _load(state: dict[str, Any], reader: PlainReader) -> None:
    """Fill in the state's tensors and values. Raises BadInput with the one cause, if there was one on any rank."""
    try:
        dcp.load(state, storage_reader=reader, planner=PlainPlanner())
    except dcp.api.CheckpointException as error:
        cause = innermost_cause(error)
        raise BadInput(f"{reader.path} cannot be loaded: {type(cause).__name__}: {cause}") from cause


def _in_words(rank_of: dict[str, int]) -> str:
    """Of adapters, by their targets."""
    if not rank_of:
        return "no adapters"
    return f"adapters of rank {max(rank_of.values())} for {', '.join(name for name in PLACES if name in rank_of)}"


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state
