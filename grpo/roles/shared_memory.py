"""The names under which the engines of a start share memory, so that it can be removed when they cannot do it.

vLLM's CPU backend keeps what the ranks of a replica share in /dev/shm until they close their engine together, which a
replica of which one rank was killed never does. So a replica removes the names as soon as all its ranks have opened
them; the memory is then gone with the processes, however these end.
"""

import glob
import os
import pathlib

FOLDER = pathlib.Path("/dev/shm")


def start_name() -> str:
    """The name of this start of this torchrun; after a restart it is another one."""
    run_id, port = os.environ.get("TORCHELASTIC_RUN_ID", "run"), os.environ.get("MASTER_PORT", "0")
    return f"{run_id}-{port}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def replica_name(first_rank: int) -> str:
    """The name of the memory that the ranks of one replica share. vLLM appends to it."""
    return f"{start_name()}-{first_rank}"


def remove_shared_memory(name: str = "") -> None:
    """Remove what a replica (by `replica_name`), by default all engines of this start, share on this machine.

    Who uses it goes on, but nobody else can join.
    """
    for path in FOLDER.glob(f"{glob.escape(name or start_name())}-*"):
        path.unlink(missing_ok=True)
