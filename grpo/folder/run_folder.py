"""The run folder: whose it is, what of it may be deleted, and the `run.json` that says so.

A run writes into a folder, and with `overwrite` deletes from it, only if the folder is empty or has the `run.json` of
an earlier run. So a mistyped --run-dir costs nobody their files. Only files that a run writes are deleted, by their
names; everything else stays. Links and pipes that somebody put there under these names are not followed.

One run per folder: the driver's process holds `run.lock` by the kernel's lock (flock), which ends with the process,
however that ended. NFS and most cluster file systems hold it between nodes too.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.text import naming, replace_file, without_secrets

MARKER = "run.json"
LOCK = "run.lock"
CONFIG = "config.py"
SCRIPT = "script.py"
FILES = "files"
CHECKPOINTS = "checkpoints"
# What a run writes into its folder, and all that `overwrite` deletes
RUN_FILES = (
    CONFIG,
    SCRIPT,
    FILES,
    "metrics.jsonl",
    "completions.jsonl",
    "evaluation.jsonl",
    "look.html",
    "tensorboard",
    "wandb",
    "batches",
    CHECKPOINTS,
    "model",
    "model-adapter",
    "initial_model",
    LOCK,
    MARKER,
)
# These of them are there already when a start fails while models load; the corrected run may begin
WRITTEN_BEFORE_RUN = (CONFIG, SCRIPT, FILES, "tensorboard", "wandb", "initial_model", LOCK, MARKER)
PARTIAL = ".partial"  # ending of a checkpoint that is being written or deleted
UNFINISHED = (PARTIAL, ".tmp")  # endings of what is being written, or was when its run died
STEP_FOLDER = re.compile(r"step-([0-9]{8,})")
PACKAGES = ("torch", "torchtitan", "vllm", "transformers")
ROOT = Path(__file__).parents[2]


def check_run_folder(
    run_dir: str,
    script: str,
    inputs: Iterable[str] = (),
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Refuse a `run_dir` that this run must not write into. Changes nothing: a trial folder is made and removed.

    script: what starts the run, such as train_grpo.py. inputs: paths (or hub names) that the run reads.
    Raises ValueError if it cannot be a folder, if another run uses it, if it has files that are not a run's, if it
    holds an earlier run and neither `resume` nor `overwrite` is set, if `resume` cannot continue that run, or if the
    run would replace or delete one of its inputs.
    """
    if run_dir.startswith("~"):  # as --run-dir=~/x, or in a recipe
        raise ValueError(f"run_dir {run_dir} would be a folder named ~ in this one; write $HOME, or the whole path")
    folder = Path(run_dir)
    nearest = folder.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    try:  # permissions do not tell: root cannot write in /proc or on a disk that is mounted read-only
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        raise ValueError(
            f"run_dir {folder} cannot be written: {nearest} is not a writable folder ({error.strerror}); choose "
            "another --run-dir"
        ) from error
    if os.path.lexists(folder / LOCK):
        os.close(_take_lock(folder))

    names = []
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
    marker = read_marker(folder)
    strange = [name for name in names if name not in (LOCK, "initial_model")]  # a refused start may leave these two
    if marker is None and strange:
        raise ValueError(
            f"{run_dir} has files ({', '.join(strange[:5])}) but no {MARKER} of a run, which marks its folder; "
            "nothing is written there: choose another --run-dir, or empty the folder yourself"
        )

    run_files = {folder.resolve() / name for name in RUN_FILES}
    for path in filter(None, inputs):
        resolved = Path(path).resolve()
        lies_in = {resolved, *resolved.parents}
        if marker and resolved.exists() and run_files & lies_in:
            raise ValueError(
                f"{path} lies in the run folder {run_dir}, and this run would replace or delete it; choose another "
                "--run-dir"
            )

    written = [name for name in RUN_FILES if name in names and name not in WRITTEN_BEFORE_RUN]
    if written and not (resume or overwrite):
        raise ValueError(
            f"{run_dir} holds an earlier run ({', '.join(written)}); continue it with --resume, delete it with "
            "--overwrite, or choose another --run-dir"
        )
    if written and resume and marker["script"] != script:
        raise ValueError(f"{run_dir} holds a run of {marker['script']}, which {script} cannot resume")
    if resume and not overwrite and "model" in names and not step_folders(folder):
        raise ValueError(
            f"{run_dir} holds a finished run without checkpoints, and --resume would begin it again and replace it; go "
            f"on from --model.path {run_dir}/model in another --run-dir, or delete it with --overwrite"
        )


def begin_run(
    run_dir: str,
    script: str,
    fields: Mapping[str, str],
    texts: Mapping[str, str],
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Take the folder, delete what must go, save texts and `run.json`; prints the versions of packages.

    Files that an earlier run was writing when it was killed are deleted, and with `overwrite` all that it left.
    fields: those of the config, see `written_fields`. texts: the config, the script and the user's files, by their
    names in the folder. A resumed run replaces `run.json` and texts, so they describe what ran last.
    Returns the descriptor of the lock: the folder belongs to this process until it ends or closes the descriptor.
    Raises ValueError if another run holds the lock.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(folder, os.O_CREAT)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    if "SLURM_JOB_ID" in os.environ:
        holder += f", job {os.environ['SLURM_JOB_ID']}"
    os.ftruncate(lock, 0)
    with naming(folder / LOCK):
        os.pwrite(lock, f"{holder}, since {now}\n".encode(), 0)

    overwrites = overwrite and not resume
    for path in _files_of_runs(folder):
        is_unfinished = path.name.endswith(UNFINISHED)
        is_old = overwrites and path.name not in ("initial_model", LOCK, MARKER)
        if is_unfinished or is_old:
            _delete(path)

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = installed_version(package)
    commit = _commit()
    marker = {
        "script": script,
        "command": without_secrets(sys.argv[1:]),
        "created": now,
        "versions": versions,
        "commit": commit,
        "config": fields,
    }
    replace_file(folder / MARKER, json.dumps(marker, indent=2) + "\n")

    for name, text in texts.items():
        saved = folder / name
        saved.parent.mkdir(exist_ok=True)
        replace_file(saved, text)
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    short_commit = commit.replace(commit[10:40], "") if commit else "unknown"
    print(f"{packages}; commit {short_commit}")
    return lock


def read_marker(run_dir: str | Path) -> dict[str, Any] | None:
    """Return the folder's `run.json`, None if there is none or if no run wrote it."""
    path = Path(run_dir) / MARKER
    if path.is_symlink() or not path.is_file():
        return None
    with contextlib.suppress(ValueError, RecursionError):
        marker = json.loads(path.read_bytes())
        if isinstance(marker, dict) and isinstance(marker.get("config"), dict) and "script" in marker:
            return marker
    return None


def read_metrics(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's metrics, up to one that is being written, or was when its run died."""
    with open(Path(run_dir) / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def step_folders(run_dir: str | Path) -> list[Path]:
    """Return the run's checkpoint folders `step-NNNNNNNN`, oldest first. Folders of other names are ignored."""
    folders = []
    for path in Path(run_dir, CHECKPOINTS).glob("step-*"):
        if STEP_FOLDER.fullmatch(path.name) and path.is_dir():
            folders.append(path)
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Return the step of one of `step_folders`."""
    return int(folder.name.removeprefix("step-"))


def _take_lock(folder: Path, flags: int = 0) -> int:
    """Lock the folder's `run.lock`, without following links or waiting. Closing the descriptor releases it.

    Raises ValueError, with the name of the process that holds the lock, or if the file is not a regular one.
    """
    path = folder / LOCK
    try:  # open for writing, because NFS does not lock files that are open only for reading
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened ({error.strerror}); choose another --run-dir") from error
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode) or opened.st_nlink > 1:
        raise ValueError(f"{path} is not a file that a run wrote; remove it, or choose another --run-dir")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
        raise ValueError(
            f"{folder} is in use by another run ({holder}); wait for its end, or choose another --run-dir"
        ) from error
    except OSError as error:  # some mounts of Lustre
        print(f"warning: {folder} has no locks ({error.strerror}); nothing keeps a second run out of it")
    return descriptor


def _files_of_runs(folder: Path) -> list[Path]:
    """Return the paths of all that a run may have written. In checkpoints/ these are only folders that it named."""
    files = []
    for name in RUN_FILES:
        if name != CHECKPOINTS:
            files += [folder / f"{name}{ending}" for ending in ("", *UNFINISHED)]
    for path in (folder / CHECKPOINTS).glob("step-*"):
        if STEP_FOLDER.fullmatch(path.name.removesuffix(PARTIAL)):
            files.append(path)
    return files


def _delete(path: Path) -> None:
    """Delete a folder with its content, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def installed_version(package: str) -> str | None:
    """Return a package's version, or that of its build for CPUs, None if neither is installed."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _commit() -> str | None:
    """Return the project's git commit, with "-dirty" behind it if files have changed since.

    None without git, or if the project is not the root of a repository.
    """
    if not (ROOT / ".git").exists() or not shutil.which("git"):  # git would find a repository around the project
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or None
