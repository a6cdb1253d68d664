"""Checkpoints: everything comes back, what is damaged is refused, and reading one runs no code."""

import copy
import errno
import io
import json
import os
import pathlib
import pickle
import shutil
import threading
import zlib
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from grpo.config import CheckpointConfig, GRPOConfig
from grpo.config.recipes import written_fields
from grpo.folder import checkpoint
from grpo.folder.checkpoint import CheckpointSaver, SafeReader
from grpo.folder.run_folder import begin_run, step_folders, step_of
from grpo.run.saved import find_saved
from grpo.tools.export import find_checkpoint
from grpo.watch.failures import BadInput
from tests.unit.folder.room import largest_file

pytestmark = pytest.mark.usefixtures("one_rank")


class Trained:
    """What a trainer saves, in small: a model, AdamW's state, a schedule."""

    def __init__(self, seed: int, width: int = 2):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(300, width).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda step: 1 / (1 + step)])
        self.model(torch.ones(300, dtype=torch.bfloat16)).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def state_dict(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def load_state_dict(self, state):
        for name, values in state.items():
            if name != "random":
                getattr(self, name).load_state_dict(values)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


LOGPROBS = torch.rand(50)


def saver_of(run_dir: pathlib.Path, **config) -> CheckpointSaver:
    return CheckpointSaver(str(run_dir), CheckpointConfig(**config), deadline_minutes=20)


def save(run_dir: pathlib.Path, step: int, **config) -> pathlib.Path:
    """A checkpoint; returns its folder."""
    state = {"step": step, "data": {"num_drawn": 8 * step}, "tensors": [LOGPROBS, torch.empty(0)]}
    state["read"] = {"config": written_fields(GRPOConfig(run_dir=str(run_dir)))}
    saver = saver_of(run_dir, **{"keep": 2} | config)
    saver.save(step, Trained(step), state)
    saver.finish()
    return run_dir / "checkpoints" / f"step-{step:08d}"


def names(run_dir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def newest(run_dir: pathlib.Path) -> int:
    return step_of(checkpoint.newest_checkpoint(str(run_dir))[0])


# ---- What is saved, when, and what is kept


def test_everything_comes_back_as_it_was_when_the_save_began(tmp_path, monkeypatch):
    """Training goes on meanwhile: nothing is written before the weights and the driver's state have changed."""
    changed, write = threading.Event(), dcp.FileSystemWriter.write_data

    def write_later(*arguments):
        assert changed.wait(600), "the save waits until it is written"
        return write(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_later)
    saver, trained = saver_of(tmp_path), Trained(3)
    saver.make_room(trained)
    trained.optimizer.step()
    state = {"step": 3, "data": {"num_drawn": 24}, "tensors": [LOGPROBS, torch.empty(0)]}
    expected = copy.deepcopy(trained.state_dict())
    saver.save(3, trained, state)
    next_random = torch.rand(3)
    saver.raise_failure()
    trained.optimizer.step()
    state["data"]["num_drawn"] = 32
    assert step_folders(tmp_path) == []
    changed.set()
    saver.finish()
    other = Trained(2)
    found, state = checkpoint.newest_checkpoint(str(tmp_path))
    checkpoint.load_checkpoint(found, other)
    assert torch.equal(torch.rand(3), next_random)
    torch.testing.assert_close(other.state_dict(), expected, rtol=0, atol=0)
    assert other.optimizer.param_groups[0]["lr"] == 1.5
    assert not torch.equal(trained.model.weight, other.model.weight)
    assert (state["step"], state["data"]) == (3, {"num_drawn": 24})
    assert torch.equal(state["tensors"][0], LOGPROBS) and state["tensors"][1].shape == (0,)


def test_the_thread_that_writes_asks_nothing_of_a_gpu(tmp_path, monkeypatch):
    """Its current GPU would be the first one, and not the rank's."""
    device = SimpleNamespace(is_available=lambda: True)  # as torch.cuda's is on a GPU
    monkeypatch.setattr(torch, torch._C._get_privateuse1_backend_name(), device, raising=False)

    def wait_for_device(*_, **__):
        raise AssertionError("torch's loader takes the thread's current GPU")

    monkeypatch.setattr(filesystem._OverlappingCpuLoader, "__init__", wait_for_device)
    assert save(tmp_path, 3).is_dir()


def test_the_newest_are_kept_and_strangers_too(tmp_path):
    strangers = ["step-00000001.bak", "step-99999999x", "step-abcdefgh", "step-٠٠٠٠٠٠٠١", "step-1", "step-"]
    for name in strangers:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "driver.pt").write_bytes(b"")
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert newest(tmp_path) == 3
    assert names(tmp_path) == sorted(["step-00000002", "step-00000003", *strangers])


def test_an_old_checkpoint_that_another_process_reads_does_not_end_the_run(tmp_path, monkeypatch, capfd):
    """NFS leaves a file of its own in a folder that is deleted meanwhile."""

    def refuse(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        save(tmp_path, 2, keep=1)
    assert "step-00000001 could not be deleted (Directory not empty)" in capfd.readouterr().out
    assert newest(tmp_path) == 2 and len(step_folders(tmp_path)) == 1


def test_the_best_checkpoint_is_kept(tmp_path):
    """Accuracy 0.2, 0.9, 0.5, 0.9, 0.1 after steps 1 to 5: one newest is kept; of equal ones the newer."""
    evaluated = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.9, 5: 0.1}
    left = []
    for step, accuracy in evaluated.items():
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "eval/accuracy": accuracy}) + "\n")
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
        save(tmp_path, step, keep=1, keep_best="accuracy")
        left.append([step_of(folder) for folder in step_folders(tmp_path)])
    assert left == [[1], [2], [2, 3], [4], [4, 5]]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "eval/accu')  # the disk was full
    assert step_of(find_checkpoint(tmp_path, "best", "accuracy")) == 4
    assert step_of(find_checkpoint(tmp_path, "latest", "")) == 5
    assert step_of(find_checkpoint(tmp_path, "4", "")) == 4
    for step in ("best", "3"):
        with pytest.raises(ValueError, match=f"no checkpoint of step {step}; there are: 4, 5"):
            find_checkpoint(tmp_path, step, "")


# ---- Damage


SHARD = "__0_0.distcp"
FILES = (SHARD, ".metadata", "driver.pt", "files.json")


def saved_bytes(value: object) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def write(folder: pathlib.Path, name: str, content: bytes) -> None:
    """Write a file of a checkpoint, and the checksum that it then should have."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / "files.json").read_text())
    files[name] = (len(content), zlib.crc32(content))
    (folder / "files.json").write_text(json.dumps(files))


def flip(path: pathlib.Path) -> None:
    """Change a bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_another_step(path: pathlib.Path) -> None:
    """The same file of a third checkpoint, from elsewhere."""
    other = save(path.parents[2] / f"other-than-{path.parent.name}", 8)
    shutil.copy(other / path.name, path)


SPOILED = {
    "missing": pathlib.Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a pipe": replace_by_pipe,
    "a flipped bit": flip,
    "of another step": of_another_step,
}
BAD_STATES = ({"step": 7}, {"step": "4"}, {}, [4], torch.zeros(2))
BAD_BYTES = (b"PK", pickle.dumps({"step": 4}), *map(saved_bytes, BAD_STATES))


@pytest.fixture
def run_dir(tmp_path) -> pathlib.Path:
    """Two checkpoints, of steps 2 and 4."""
    save(tmp_path, 2)
    save(tmp_path, 4)
    return tmp_path


def used(run_dir: pathlib.Path) -> None:
    """Read the newest checkpoint as a start does, then as the trainers do."""
    folder, _ = checkpoint.newest_checkpoint(str(run_dir))
    checkpoint.load_checkpoint(folder, Trained(2))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", SPOILED)
def test_a_damaged_checkpoint_is_refused_with_the_way_to_the_one_before(file, how, run_dir):
    for step, then in ((4, "continue after step 2"), (2, "start again")):
        folder = run_dir / f"checkpoints/step-{step:08d}"
        SPOILED[how](folder / file)
        with pytest.raises((ValueError, BadInput), match=f"^the checkpoint of step {step} cannot be used: ") as refused:
            used(run_dir)
        message = str(refused.value)
        assert file in message and message.endswith(f"; remove {folder} to {then}") and "\n" not in message
        shutil.rmtree(folder)
    assert checkpoint.newest_checkpoint(str(run_dir)) == (None, {})


def test_a_driver_state_of_another_kind_is_refused_and_not_run(run_dir, tmp_path):
    """As it was written, so that its checksum holds."""
    for content in (*BAD_BYTES, saved_bytes({"step": 4, "data": Evil(tmp_path / "ran")})):
        write(run_dir / "checkpoints/step-00000004", "driver.pt", content)
        with pytest.raises(
            ValueError, match="checkpoint of step 4 cannot be used: .*driver.pt (cannot be read|is not)"
        ):
            used(run_dir)
    assert not (tmp_path / "ran").exists()


def test_metadata_of_files_elsewhere_are_refused(run_dir):
    folder = run_dir / "checkpoints/step-00000004"
    content = SafeReader(folder).read_metadata()
    for index, place in content.storage_data.items():
        content.storage_data[index] = type(place)("../../x.distcp", place.offset, place.length)
    write(folder, ".metadata", pickle.dumps(content))
    with pytest.raises(BadInput, match="x.distcp is missing"):
        used(run_dir)


def test_a_kill_while_the_old_one_is_deleted_leaves_no_half_checkpoint(run_dir, monkeypatch):
    """What was being deleted, or written, has another name by then; the next start deletes it."""
    remove = shutil.rmtree

    def killed(path, *arguments, **options):
        if "step-00000002" in str(path):
            (pathlib.Path(path) / "driver.pt").unlink()
            raise KeyboardInterrupt
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run_dir, 6, keep=2)
    monkeypatch.undo()
    others = ["mine.partial", "step-00000007.partial", "step-7.partial"]
    for name in others:
        (run_dir / "checkpoints" / name).mkdir()
    assert newest(run_dir) == 6
    assert names(run_dir) == sorted(["step-00000002.partial", "step-00000004", "step-00000006", *others])
    os.close(begin_run(str(run_dir), "train_grpo.py", {}, {}))  # deletes only what a run names so
    others.remove("step-00000007.partial")
    assert names(run_dir) == sorted(["step-00000004", "step-00000006", *others])


def test_a_checkpoint_beyond_the_last_step_is_refused_with_the_numbers(run_dir):
    """Of steps 2 and 4. A run of as many steps only exports."""
    os.close(begin_run(str(run_dir), "train_grpo.py", {}, {}))
    for num_steps in (4, 5):
        config = GRPOConfig(run_dir=str(run_dir), resume=True, num_steps=num_steps)
        found = find_saved(config, "train_grpo.py", [], ["data", "tensors"])
        assert found.checkpoint.name == "step-00000004"
    config = GRPOConfig(run_dir=str(run_dir), resume=True, num_steps=3)
    with pytest.raises(ValueError, match="step-00000004 is beyond num_steps=3; --num-steps 4 exports what it has"):
        find_saved(config, "train_grpo.py", [], ["data", "tensors"])


def test_weights_of_another_shape_are_one_line(run_dir):
    other = Trained(2)
    other.model.weight.data = torch.zeros(2, 299, dtype=torch.bfloat16)
    with pytest.raises(BadInput, match="step-00000004 cannot be loaded: .*Size mismatch") as refused:
        checkpoint.load_checkpoint(run_dir / "checkpoints/step-00000004", other)
    assert "Traceback" not in str(refused.value)


# ---- No room


@pytest.mark.parametrize(
    ("room", "width", "file"),
    [
        (0, 2, SHARD),
        (2000, 2, SHARD),
        (50_000, 800, SHARD),  # in the data of a tensor, where torch's writer goes on
        (60_000, 2, "driver.pt"),
    ],
)
def test_no_room_ends_the_run_with_the_file_and_leaves_the_older_ones(room, width, file, run_dir):
    state = {"step": 6, "data": {}, "flight": torch.zeros(20_000)}
    trained = Trained(6, width)
    saver = saver_of(run_dir)
    with pytest.raises(BadInput) as stopped, largest_file(room):
        saver.save(6, trained, state)
        wait([saver.writing])
        saver.raise_failure()  # as before each step, without waiting
    message = str(stopped.value)
    assert f"the checkpoint of step 6 could not be saved in {run_dir / 'checkpoints'}: " in message
    assert f"File too large: '{run_dir}/checkpoints/step-00000006.partial/{file}'" in message
    assert "GiB are free" in message and "older checkpoints stay" in message and "\n" not in message
    assert names(run_dir) == ["step-00000002", "step-00000004"]
    save(run_dir, 6)  # there is room again
    assert newest(run_dir) == 6


# ---- Nothing in a checkpoint is run


def called(module: str, name: str):
    """A pickle that calls module.name with a shell command."""
    return lambda path: f"c{module}\n{name}\n(S'touch {path}'\ntR.".encode()


CLASSES = "torch.distributed.checkpoint.metadata"
PICKLES = {f"protocol {number}": lambda path, n=number: pickle.dumps(Evil(path), n) for number in (0, 2, 5)} | {
    "os.system": called("os", "system"),
    "builtins.eval": called("builtins", "eval"),
    "builtins.getattr": called("builtins", "getattr"),
    "a name behind a class's module": called(CLASSES, "os.system"),
    "a method of an allowed class": called("pathlib", "PosixPath.write_text"),
    "what the module itself imported": called(CLASSES, "os"),
    "INST": lambda path: f"(S'touch {path}'\nios\nsystem\n.".encode(),
    "OBJ": lambda path: f"(cos\nsystem\nS'touch {path}'\no.".encode(),
    "within an allowed class": lambda path: pickle.dumps(dcp.Metadata({"model.weight": Evil(path)})),
    "a name that is asked for later": lambda path: b"Pos.system\n.",
    "an extension": lambda path: b"\x82\x01.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_metadata_that_runs_code_is_refused(name, run_dir, tmp_path):
    folder = run_dir / "checkpoints/step-00000004"
    write(folder, ".metadata", PICKLES[name](tmp_path / "ran"))
    with pytest.raises(ValueError, match=r"/\.metadata cannot be read: "):
        SafeReader(folder).read_metadata()
    assert not (tmp_path / "ran").exists()
    if name == "protocol 2":  # torch's own reader, for comparison, runs it
        with pytest.raises(AttributeError):
            dcp.FileSystemReader(folder).read_metadata()
        assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("wanted", ["optimizer.param_groups.0.lr", "model.weight"])
@pytest.mark.parametrize("declared", ["as it was", "as a value"])
def test_a_shard_that_runs_code_is_refused(wanted, declared, run_dir, tmp_path):
    """The place of a value (lr) or of a tensor in the shard's file, filled with an object of its own."""
    folder = run_dir / "checkpoints/step-00000004"
    metadata = SafeReader(folder).read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == wanted]
    place = metadata.storage_data.pop(index)
    evil = saved_bytes(Evil(tmp_path / "ran"))
    if declared == "as a value":
        metadata.state_dict_metadata[wanted] = type(metadata.state_dict_metadata["schedule.last_epoch"])()
        index = type(index)(wanted)
    metadata.storage_data[index] = type(place)(place.relative_path, (folder / SHARD).stat().st_size, len(evil))
    write(folder, SHARD, (folder / SHARD).read_bytes() + evil)
    write(folder, ".metadata", pickle.dumps(metadata))
    with pytest.raises(BadInput, match="cannot be loaded: UnpicklingError"):
        checkpoint.load_checkpoint(folder, Trained(2))
    assert not (tmp_path / "ran").exists()
