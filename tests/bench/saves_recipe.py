"""The recipe of `tests/bench/saves.py`: SFT on additions, in which KILL ends one rank within a save.

KILL is JSON: rank, operation (counted from 1, from the rank's third save since its start on; 0 strikes nobody), delay
(seconds after the operation began, so that it falls into writing) and note: with the rank appended, the file that gets
a line for each operation, and first what lay in the folder of checkpoints when this start began to save. Operations are
what the rank does to files below it: open, fsync, mkdir, rename, remove.
"""

import json
import os
import pathlib
import signal
import sys
import threading
from typing import Any

from grpo.config import SFTConfig, change
from grpo.config.recipes import load_recipe
from grpo.folder.checkpoint import CheckpointSaver

SAVE = 3  # the first two leave an older checkpoint to be removed
# Events of the interpreter, and which of their arguments is the descriptor of the folder that a name is relative to
EVENTS = {"open": None, "shutil.rmtree": None, "os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1}

config = change(
    load_recipe("configs/toy_sft.py", SFTConfig),
    {
        "sequences_per_step": 6,
        "checkpoint.interval": 1,
        "checkpoint.keep": 1,
        "checkpoint.export": False,
        "metrics.tensorboard": False,
        "stop_at_loss": 0.0,
    },
)


def watch_files(operation: int, delay: float, note: str) -> None:
    """Note what this process does to files of checkpoints in its third save, and kill it at one of these operations."""
    save = CheckpointSaver.save
    fsync = os.fsync
    saves = []
    lines = []

    def write_note(line: str) -> None:
        with open(note, "a") as file:
            file.write(f"{line}\n")

    def counting_save(self: CheckpointSaver, step: int, *rest: Any) -> None:
        self.finish()  # its operations are those of the save before
        if not saves:
            folder = pathlib.Path(self.config.run_dir) / "checkpoints"
            write_note(" ".join(["there:", *sorted(path.name for path in folder.glob("*"))]))
        saves.append(step)
        save(self, step, *rest)

    def begin(what: str, path: str) -> None:
        """Note an operation before it is done."""
        if len(saves) < SAVE or "/checkpoints/" not in path:
            return
        lines.append(what)
        write_note(f"step {saves[-1]}, operation {len(lines)}: {what} {path.partition('/checkpoints/')[2]}")
        if len(lines) == operation:
            if delay:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(arguments[0], str | os.PathLike):
            at = EVENTS[event]
            inside = at is not None and arguments[at] is not None and arguments[at] >= 0
            folder = os.readlink(f"/proc/self/fd/{arguments[at]}") if inside else os.getcwd()
            begin(event.rpartition(".")[2], os.path.join(folder, arguments[0]))

    def counting_fsync(descriptor: int) -> None:
        begin("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    CheckpointSaver.save = counting_save
    os.fsync = counting_fsync
    sys.addaudithook(hear)


kill = json.loads(os.environ["KILL"])
place = os.environ["RANK"]
is_struck = place == str(kill["rank"])
watch_files(kill["operation"] if is_struck else 0, kill["delay"], f"{kill['note']}.{place}")
