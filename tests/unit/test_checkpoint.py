"""A checkpoint is read as tensors and plain values: what would run code is refused, and nothing of it runs."""

import copy
import errno
import json
import os
import pathlib
import pickle
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo.config import CheckpointConfig
from grpo.export import find_checkpoint
from grpo.folder import checkpoint, checkpoint_files
from grpo.folder.checkpoint_files import PlainReader
from grpo.folder.run_folder import step_folders, step_of
from grpo.watch.failures import BadInput

pytestmark = pytest.mark.usefixtures("one_rank")


class Trained:
    """What a trainer saves, in small: a model, AdamW's state, a schedule."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda step: 1 / (1 + step)])
        self.model(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def state_dict(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def load_state_dict(self, state):
        for name, values in state.items():
            if name != "random":
                getattr(self, name).load_state_dict(values)


def save(run_dir: pathlib.Path, step: int, **config) -> pathlib.Path:
    """A checkpoint; returns its folder."""
    state, config = {"step": step, "data": {}}, CheckpointConfig(**{"keep": 1} | config)
    checkpoint.save_checkpoint(str(run_dir), step, Trained(step), state, config)
    return run_dir / "checkpoints" / f"step-{step:08d}"


@pytest.fixture
def saved(tmp_path) -> pathlib.Path:
    return save(tmp_path, 3)


def test_everything_comes_back(saved):
    torch.manual_seed(3)
    expected = Trained(3)
    next_random = torch.rand(3)  # the state that was saved: after Trained(3) had been made
    other = Trained(2)
    checkpoint.load_checkpoint(saved, other)
    assert torch.equal(torch.rand(3), next_random)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)
    assert other.optimizer.state_dict()["param_groups"] == expected.optimizer.state_dict()["param_groups"]
    assert other.optimizer.param_groups[0]["lr"] == 1.5 and other.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert other.schedule.state_dict() == expected.schedule.state_dict()
    assert torch.equal(
        other.optimizer.state_dict()["state"][0]["exp_avg"], expected.optimizer.state_dict()["state"][0]["exp_avg"]
    )


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.write_text, (self.path, "ran")


class EvilSystem(Evil):
    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("evil", [Evil, EvilSystem])
def test_metadata_that_runs_code_is_refused(saved, tmp_path, evil):
    (saved / ".metadata").write_bytes(pickle.dumps(evil(tmp_path / "ran")))
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint of this project has"):
        checkpoint.load_checkpoint(saved, Trained(2))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AttributeError):  # torch's own reader, for comparison, runs it
        dcp.FileSystemReader(saved).read_metadata()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["builtins eval", "os system", "torch.distributed.checkpoint.metadata os.system"])
def test_names_in_metadata_are_those_of_the_list(saved, name):
    module, function = name.split()
    (saved / ".metadata").write_bytes(b"c" + f"{module}\n{function}\n".encode() + b".")
    with pytest.raises(pickle.UnpicklingError, match=f"names {module}.{function}"):
        PlainReader(saved).read_metadata()


@pytest.mark.parametrize("kind", ["value", "tensor"])
def test_a_shard_that_runs_code_is_refused(saved, tmp_path, kind):
    """The place of a value (lr) or of a tensor in the shard's file, filled with an object of its own."""
    metadata = PlainReader(saved).read_metadata()
    wanted = "optimizer.param_groups.0.lr" if kind == "value" else "model.weight"
    (index,) = [index for index in metadata.storage_data if index.fqn == wanted]
    place = metadata.storage_data[index]
    shard = saved / place.relative_path
    torch.save(Evil(tmp_path / "ran"), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    metadata.storage_data[index] = type(place)(place.relative_path, shard.stat().st_size, len(evil))
    shard.write_bytes(shard.read_bytes() + evil)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match="cannot be loaded: .*Weights only load failed"):
        checkpoint.load_checkpoint(saved, Trained(2))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"step": 3}', '{"step": "3", "data": {}}', '{"step": true, "data": {}}', '{"data": {}, "step": 1'],
)
def test_a_broken_driver_state(saved, text):
    (saved / "driver.json").write_text(text)
    with pytest.raises(ValueError, match="driver.json"):
        checkpoint_files.read_driver_state(saved)


def test_the_newest_are_kept_and_strangers_too(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("step-abcdefgh", "step-00000001.bak", "step-99999999x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "driver.json").write_text(json.dumps({"step": 99, "data": {}}))
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert checkpoint.newest_usable(str(tmp_path))[0].name == "step-00000003"
    assert {path.name for path in folder.iterdir()} == {
        "step-00000002",
        "step-00000003",
        "step-abcdefgh",
        "step-00000001.bak",
        "step-99999999x",
    }


def test_the_best_checkpoint_is_kept(tmp_path):
    """Accuracy 0.2, 0.9, 0.5, 0.9, 0.1 after steps 1 to 5: one newest is kept; of equal ones the newer."""
    evaluated = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.9, 5: 0.1}
    left = []
    for step, accuracy in evaluated.items():
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "eval/accuracy": accuracy}) + "\n")
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
        save(tmp_path, step, keep_best="accuracy")
        left.append([step_of(folder) for folder in step_folders(tmp_path)])
    assert left == [[1], [2], [2, 3], [4], [4, 5]]
    assert step_of(find_checkpoint(tmp_path, "best", "accuracy")) == 4
    assert step_of(find_checkpoint(tmp_path, "latest", "")) == 5
    assert step_of(find_checkpoint(tmp_path, "4", "")) == 4
    for step, metric, message in (("best", "", "no best"), ("3", "", "no checkpoint of step 3; there are 4, 5")):
        with pytest.raises(ValueError, match=message):
            find_checkpoint(tmp_path, step, metric)


# ---------------------------------------------------------------------------------------------------------------------
# When, and in the background
# ---------------------------------------------------------------------------------------------------------------------


def test_steps_that_are_saved():
    def steps(**config) -> list[int]:
        return [step for step in range(1, 6) if checkpoint.saves(CheckpointConfig(**config), step, is_last=step == 5)]

    assert steps(interval=2) == [2, 4, 5]
    assert steps() == []
    assert steps(at_end=True) == [5]


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)


def test_a_checkpoint_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path):
    """Model, optimizer, schedule and the driver's state go on at once; what is read later is as it was."""
    trained, state = Trained(3), {"step": 3, "data": {"rates": [1]}}
    expected = copy.deepcopy((trained.model.state_dict(), trained.schedule.state_dict()))
    saver = checkpoint.Saver(str(tmp_path), CheckpointConfig(keep=1, in_background=True), None)
    saver.save(3, trained, state)
    state["data"]["rates"].append(2)
    with torch.no_grad():
        trained.model.weight.add_(1)
    trained.schedule.step()
    folder = tmp_path / "checkpoints" / "step-00000003"
    wait_for(folder)  # complete without any further call
    other = Trained(2)
    checkpoint.load_checkpoint(folder, other)
    assert torch.equal(other.model.weight, expected[0]["weight"]) and not torch.equal(
        other.model.weight, trained.model.weight
    )
    assert other.schedule.state_dict() == expected[1]
    assert checkpoint.newest_usable(str(tmp_path))[1] == {"step": 3, "data": {"rates": [1]}}
    saver.save(4, trained, {"step": 4, "data": {}})  # waits for the one before
    saver.wait()
    saver.wait()  # nothing is left to wait for
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("where", ["shard", "driver"])
def test_a_failure_in_the_background_is_told_with_its_cause(where, tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 2)
    stop, go_on = (
        checkpoint.Saver(str(tmp_path), CheckpointConfig(in_background=True, on_full_disk=what), None)
        for what in ("stop", "continue")
    )
    with monkeypatch.context() as patch:
        if where == "shard":
            patch.setattr(dcp.FileSystemWriter, "write_data", full)
            patch.setattr(checkpoint, "_write_something", full)  # as it would on that disk
        else:
            patch.setattr(checkpoint, "write_driver_state", full)
        stop.save(3, Trained(3), {"step": 3, "data": {}})
        with pytest.raises(
            BadInput, match="of step 3 could not be saved .*No space left on device; .* of step 2 stays"
        ):
            stop.wait()
        go_on.save(4, Trained(4), {"step": 4, "data": {}})
        go_on.wait()
    assert "of step 4 could not be saved" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    go_on.save(5, Trained(5), {"step": 5, "data": {}})
    go_on.wait()
    assert checkpoint.newest_usable(str(tmp_path))[1]["step"] == 5
