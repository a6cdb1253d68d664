"""Names of the memory that the ranks of an engine share, so that it goes away however the processes end.

vLLM's CPU backend keeps that memory in /dev/shm until the ranks of a replica close their engine together, which never
happens if one of them is killed. So a replica removes the names as soon as all its ranks have opened them; the kernel
frees the memory with the last process.
"""

import glob
import os
import pathlib

FOLDER = pathlib.Path("/dev/shm")


def start_name() -> str:
    """Return a name for this start of this torchrun, which changes with a restart."""
    defaults = {"TORCHELASTIC_RUN_ID": "run", "MASTER_PORT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    values = [os.environ.get(name, default) for name, default in defaults.items()]
    return "-".join(values)


def replica_name(first_rank: int) -> str:
    """Return the name of the memory that the ranks of one replica share. vLLM appends to it."""
    return f"{start_name()}-{first_rank}"


def remove_shared_memory(name: str = "") -> None:
    """Remove the memory that a replica (by `replica_name`) shares on this machine, by default that of all engines.

    Processes that have opened it go on, but no further one can join.
    """
    for path in FOLDER.glob(f"{glob.escape(name or start_name())}-*"):
        path.unlink(missing_ok=True)
