"""Checkpoints that were damaged, or for which there was no room: never loaded, never a reason to lose the good one."""

import contextlib
import errno
import json
import os
import pathlib
import pickle
import random
import resource
import shutil
import subprocess

import pytest
import torch

from grpo.config import CheckpointConfig
from grpo.folder import checkpoint
from grpo.folder.checkpoint_files import DRIVER_TENSORS_FILE as TENSORS
from grpo.folder.checkpoint_files import PlainReader, check_checkpoint
from grpo.watch.failures import BadInput

pytestmark = pytest.mark.usefixtures("one_rank")


class Weights:
    """A tensor of 4,000 bytes."""

    def __init__(self, value: float):
        self.tensor = torch.full((1000,), value)

    def state_dict(self):
        return {"model": {"weight": self.tensor}}

    def load_state_dict(self, state):
        self.tensor = state["model"]["weight"]


def save(run_dir: pathlib.Path, step: int, **config) -> None:
    state, tensors = {"step": step, "data": {"num_drawn": 8 * step}}, {"ids": torch.arange(50)}
    checkpoint.save_checkpoint(str(run_dir), step, Weights(step), state, CheckpointConfig(**config), tensors)


@pytest.fixture
def run_dir(tmp_path) -> pathlib.Path:
    """Two checkpoints, of steps 2 and 4."""
    save(tmp_path, 2)
    save(tmp_path, 4)
    return tmp_path


def folder_of(run_dir: pathlib.Path, step: int) -> pathlib.Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def flip(path: pathlib.Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def shard(folder: pathlib.Path) -> pathlib.Path:
    (path,) = folder.glob("*.distcp")
    return path


def place_of_weight(folder: pathlib.Path) -> int:
    """A byte in the middle of the tensor."""
    storage = PlainReader(folder).read_metadata().storage_data
    (place,) = [place for index, place in storage.items() if index.fqn == "model.weight"]
    return place.offset + place.length // 2


def set_driver_file(text: str):
    return lambda folder: (folder / "driver.json").write_text(text)


def change_step(folder: pathlib.Path) -> None:
    state = json.loads((folder / "driver.json").read_text())
    (folder / "driver.json").write_text(json.dumps(state | {"data": {"num_drawn": 33}}))


# name: (how to damage a checkpoint, what is said of it)
DAMAGE = {
    "shard missing": (lambda f: shard(f).unlink(), ".distcp is missing, which .metadata names"),
    "shard truncated": (lambda f: os.truncate(shard(f), 3000), ".distcp has 3000 bytes, and a piece of it ends at"),
    "shard empty": (lambda f: os.truncate(shard(f), 0), ".distcp has 0 bytes"),
    "one bit of a tensor": (lambda f: flip(shard(f), place_of_weight(f)), ".distcp is damaged between bytes"),
    "metadata missing": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "metadata truncated": (lambda f: os.truncate(f / ".metadata", 100), ".metadata is damaged: its checksum"),
    "metadata empty": (lambda f: os.truncate(f / ".metadata", 0), ".metadata is damaged: its checksum"),
    "one bit of the metadata": (lambda f: flip(f / ".metadata", 200), ".metadata is damaged: its checksum"),
    "driver.json missing": (lambda f: (f / "driver.json").unlink(), "driver.json is missing"),
    "driver.json empty": (set_driver_file(""), "driver.json: not JSON"),
    "driver.json garbage": (set_driver_file("\0\0\0"), "driver.json: not JSON"),
    "driver.json of something else": (set_driver_file("[1]"), "driver.json has no step"),
    "driver.json with another place": (change_step, "driver.json is damaged"),
    "the driver's tensors missing": (lambda f: (f / TENSORS).unlink(), f"{TENSORS} is missing, which driver.json"),
    "the driver's tensors cut": (lambda f: os.truncate(f / TENSORS, 200), f"{TENSORS} is damaged: its checksum"),
    "one bit of the driver's tensors": (lambda f: flip(f / TENSORS, 300), f"{TENSORS} is damaged: its checksum"),
    "a folder renamed": (lambda f: set_driver_file('{"step": 7, "data": {}}')(f), "driver.json is of step 7"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(name, run_dir, capsys):
    damage, said = DAMAGE[name]
    damage(folder_of(run_dir, 4))
    found, state, broken = checkpoint.newest_usable(str(run_dir))
    assert found == folder_of(run_dir, 2) and (state["step"], state["data"]) == (2, {"num_drawn": 16})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("warning: the checkpoint of step 4 cannot be used: ") and said in first
    assert "goes back to the checkpoint of step 2" in second
    checkpoint.set_aside(broken)
    save(run_dir, 3, keep=1)  # the good ones are kept, whatever the damaged one's number was
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-00000003", "step-00000004.broken"]

    damage(folder_of(run_dir, 3))
    with pytest.raises(ValueError, match="the only checkpoint of .* cannot be used: .*--overwrite") as refused:
        checkpoint.newest_usable(str(run_dir))
    assert "\n" not in str(refused.value)


def test_a_kill_while_the_old_one_is_deleted_leaves_no_half_checkpoint(run_dir, monkeypatch):
    """What was being deleted, or written, has another name by then; the next start deletes it."""
    remove = shutil.rmtree

    def killed(path, *arguments, **options):
        if "step-00000002" in str(path):
            (pathlib.Path(path) / "driver.json").unlink()
            raise KeyboardInterrupt
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run_dir, 6, keep=2)
    monkeypatch.undo()
    others = ("step-00000007.partial", "step-7.partial", "step-00000008.broken", "mine.partial")
    for name in others:
        (run_dir / "checkpoints" / name).mkdir()
    assert checkpoint.newest_usable(str(run_dir))[0] == folder_of(run_dir, 6)
    there = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert there == {"step-00000002.partial", "step-00000004", "step-00000006", *others}
    checkpoint.remove_unfinished(str(run_dir))
    left = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert left == {"step-00000004", "step-00000006", *others[1:]}  # only what a run names so


def test_several_damaged_checkpoints(run_dir):
    for step in (2, 4):
        shard(folder_of(run_dir, step)).unlink()
    with pytest.raises(ValueError, match="none of its 2 checkpoints can be used: .*step-00000004/.*is missing"):
        checkpoint.newest_usable(str(run_dir))


def test_a_run_without_checkpoints_begins(tmp_path):
    assert checkpoint.newest_usable(str(tmp_path)) == (None, {}, [])


def test_checkpoints_of_before_there_were_checksums_are_read(run_dir):
    path = folder_of(run_dir, 4) / "driver.json"
    path.write_text(json.dumps({"step": 4, "data": {}}))
    assert check_checkpoint(folder_of(run_dir, 4))["step"] == 4
    flip(shard(folder_of(run_dir, 4)), place_of_weight(folder_of(run_dir, 4)))  # torch wrote those of its pieces
    with pytest.raises(ValueError, match="is damaged"):
        check_checkpoint(folder_of(run_dir, 4))


@pytest.mark.parametrize("has_checksums", [True, False], ids=["checksums", "of before there were any"])
def test_any_bit_and_any_length(has_checksums, run_dir):
    """100 files with a bit flipped or cut short: refused in one line, or as good as new; never loaded as another."""
    folder, chance, refused = folder_of(run_dir, 4), random.Random(0), 0
    if not has_checksums:
        set_driver_file('{"step": 4, "data": {"num_drawn": 32}}')(folder)
        (folder / TENSORS).unlink()  # nor were there any
    intact = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for _ in range(100):
        path = chance.choice(list(intact))
        position = chance.randrange(len(intact[path]))
        if chance.random() < 0.3:
            os.truncate(path, position)
        else:
            flip(path, position)
        try:
            check_checkpoint(folder)
            loaded = Weights(0.0)
            with contextlib.suppress(BadInput):  # a bit of the archive's own
                checkpoint.load_checkpoint(folder, loaded)
                assert not has_checksums or torch.equal(loaded.tensor, Weights(4).tensor)
        except ValueError as error:
            refused += 1
            assert str(folder) in str(error) and "\n" not in str(error)
        path.write_bytes(intact[path])
    assert refused > 60


def test_metadata_that_names_another_folder_is_refused(run_dir):
    folder = folder_of(run_dir, 4)
    metadata = PlainReader(folder).read_metadata()
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = type(place)("../step-00000002/x.distcp", place.offset, place.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    set_driver_file('{"step": 4, "data": {}}')(folder)
    with pytest.raises(ValueError, match="is missing, which .metadata names"):
        check_checkpoint(folder)


def test_weights_of_another_shape_are_one_line(run_dir):
    other = Weights(0.0)
    other.tensor = torch.zeros(999)
    with pytest.raises(BadInput, match="step-00000004 cannot be loaded: .*Size mismatch") as refused:
        checkpoint.load_checkpoint(folder_of(run_dir, 4), other)
    assert "Traceback" not in str(refused.value)


@contextlib.contextmanager
def largest_file(num_bytes: int):
    """Python ignores the signal, so that a larger file is an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [2000, 5000, 0])
def test_no_room_for_a_checkpoint(room, run_dir, capsys):
    """In a shard's data, at its end, at once."""
    with pytest.raises(BadInput) as stopped, largest_file(room):
        save(run_dir, 6)
    message = str(stopped.value)
    assert "checkpoint of step 6 could not be saved" in message and "File too large" in message
    assert "the checkpoint of step 4 stays" in message and "\n" not in message
    with largest_file(room):
        save(run_dir, 6, on_full_disk="continue")
    assert "and the run goes on" in capsys.readouterr().out
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    save(run_dir, 6, on_full_disk="continue")  # there is room again
    assert checkpoint.newest_usable(str(run_dir))[1]["step"] == 6


def test_no_room_for_the_last_file(run_dir, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_driver_state", full)
    with pytest.raises(BadInput, match="No space left on device; the checkpoint of step 4 stays. Make room"):
        save(run_dir, 6)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_disk_that_is_full(tmp_path):
    """A real one of 64 KiB, where this process may mount it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", disk], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("this process may not mount a tmpfs")
    try:
        save(disk, 2)
        (disk / "ballast").write_bytes(bytes(65536 - sum(f.stat().st_blocks * 512 for f in disk.rglob("*")) - 8192))
        with pytest.raises(BadInput, match="No space left on device; the checkpoint of step 2 stays"):
            save(disk, 4)
        assert [p.name for p in (disk / "checkpoints").iterdir()] == ["step-00000002"]
    finally:
        subprocess.run(["umount", disk], check=True)
