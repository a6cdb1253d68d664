"""One run per folder: `RUN_DIR/run.lock` is locked for the life of the driver's process and says who holds it.

The lock is the kernel's (flock), so it is gone with its process, however that ended. NFS and most cluster file systems
hold it between nodes too. Where the file system has none (some mounts of Lustre), what the file says decides: a process
of this host that is gone gives way, one of another host is believed.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
from datetime import UTC, datetime
from typing import Any

LOCK = "run.lock"
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

# Descriptors of the folders that this process holds, which closes them when it ends
_held: dict[pathlib.Path, int] = {}


def lock_run_folder(run_dir: str | pathlib.Path) -> None:
    """Take the folder for this process until it ends or calls `unlock_run_folder`; twice is as good as once.

    Raises ValueError that names who holds it.
    """
    path = (pathlib.Path(run_dir) / LOCK).resolve()
    if path in _held:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by programs that are started
    try:
        _take(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(_this_process()) + "\n").encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    _held[path] = descriptor


def unlock_run_folder(run_dir: str | pathlib.Path) -> None:
    """Give it back; nothing happens if this process does not hold it."""
    descriptor = _held.pop((pathlib.Path(run_dir) / LOCK).resolve(), None)
    if descriptor is not None:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def refuse_held_folder(run_dir: str | pathlib.Path) -> None:
    """Raise ValueError that names the other run which holds the folder, if there is one. Changes nothing."""
    path = (pathlib.Path(run_dir) / LOCK).resolve()
    if path in _held or not path.is_file():
        return
    descriptor = os.open(path, os.O_RDWR)  # NFS locks nothing that is open for reading only
    try:
        _take(descriptor, path)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: pathlib.Path) -> None:
    """Lock the open file, or raise ValueError if another process has it."""
    holder = _read_holder(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(_refusal(path, holder, "wait for its end, or choose another --run-dir")) from error
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        if holder and not _is_gone(holder):
            way_out = f"if it has ended, remove {path}; else wait, or choose another --run-dir"
            raise ValueError(_refusal(path, holder, way_out)) from error


def _read_holder(descriptor: int) -> dict[str, Any]:
    """What the file says of its last holder; empty if nothing that can be read."""
    with contextlib.suppress(ValueError):
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return holder if isinstance(holder, dict) else {}
    return {}


def _this_process() -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": since}


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether it was a process of this host that is there no more."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or type(pid) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        pass
    return False


def _refusal(path: pathlib.Path, holder: dict[str, Any], way_out: str) -> str:
    job = f", job {holder['job']}" if holder.get("job") else ""
    who = (
        f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}{job}, since {holder.get('since')}"
    )
    return f"{path.parent} is in use by another run ({who}); {way_out}"
