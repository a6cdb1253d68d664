"""The run folder: whose it is, what of it may be deleted, and the `run.json` that says so.

A run writes into a folder, and with `overwrite` deletes from it, only if the folder is empty or has the `run.json` of
an earlier run. So a mistyped --run-dir costs nobody their files. What is deleted are the files that a run writes, by
their names; whatever else lies there stays. Links and pipes that somebody put there under these names are not followed.

One run per folder: the driver's process holds `run.lock` by the kernel's lock (flock), which is gone with the process,
however it ended. NFS and most cluster file systems hold it between nodes too.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from grpo.config.fields import RunConfig
from grpo.config.recipes import as_recipe, written_fields

MARKER = "run.json"
LOCK = "run.lock"
CONFIG = "config.py"
CHECKPOINTS = "checkpoints"
# What a run writes into its folder, and all that `overwrite` deletes
RUN_FILES = (CONFIG, "metrics.jsonl", "completions.jsonl", "evaluation.jsonl", "samples.txt", "look.html", "profile")
RUN_FILES += ("tensorboard", "wandb", "batches", CHECKPOINTS, "model", "model-adapter", "initial_model", LOCK, MARKER)
# of which these are there already when a start fails while models load; the corrected run may begin
WRITTEN_BEFORE_RUN = (CONFIG, "tensorboard", "wandb", "initial_model", LOCK, MARKER)
PARTIAL = ".partial"  # what the name of a checkpoint ends in that is being written or deleted
UNFINISHED = (PARTIAL, ".tmp")  # what is being written, or was when its run died
STEP_FOLDER = re.compile(r"step-([0-9]{8,})")
OLD_CONFIG = re.compile(r"config-step-[0-9]{8,}\.py")  # the config up to that step, see `begin_run`
PACKAGES = ("torch", "torchtitan", "vllm", "transformers")
ROOT = pathlib.Path(__file__).parents[2]


def check_run_folder(
    run_dir: str, script: str, inputs: Iterable[str], *, resume: bool = False, overwrite: bool = False
) -> None:
    """Refuse a folder that is not for this run to write into. Changes nothing; an empty folder is made and removed.

    script: what starts the run, such as train_grpo.py; inputs: paths (or hub names) that the run reads from.
    Raises ValueError if it cannot be a folder, is in use by another run, has other files than a run's, holds an earlier
    run and neither `resume` nor `overwrite` was asked for, or one that `resume` cannot continue, or if the run would
    replace or delete one of its inputs.
    """
    folder = pathlib.Path(run_dir)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:  # root may write everywhere, but in /proc or on a disk that is mounted to be read
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise ValueError(
            f"run_dir {folder} cannot be written: {place} is no writable folder ({error.strerror}); choose another "
            "--run-dir"
        ) from error
    if os.path.lexists(folder / LOCK):
        os.close(_take_lock(folder))
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    marker = read_marker(folder)
    # a start that was refused may have left a model that a function of the user's built
    if marker is None and (others := [name for name in there if name not in (LOCK, "initial_model")]):
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise ValueError(
            f"{run_dir} has files ({shown}) but no {MARKER} of a run, which marks its folder; nothing is written "
            "there: choose another --run-dir, or empty the folder yourself"
        )
    own = {folder.resolve() / name for name in RUN_FILES} if marker else set()
    for path in filter(None, inputs):
        resolved = pathlib.Path(path).resolve()
        if resolved.exists() and own & {resolved, *resolved.parents}:
            raise ValueError(
                f"{path} lies in the run folder {run_dir}, and this run would replace or delete it; choose another "
                "--run-dir"
            )
    written = [name for name in RUN_FILES if name in there and name not in WRITTEN_BEFORE_RUN]
    if written and not (resume or overwrite):
        raise ValueError(
            f"{run_dir} holds an earlier run ({', '.join(written)}); continue it with --resume, delete it with "
            "--overwrite, or choose another --run-dir"
        )
    if written and resume and marker["script"] != script:
        raise ValueError(f"{run_dir} holds a run of {marker['script']}, which {script} cannot resume")
    if resume and not overwrite and "model" in there and not step_folders(folder):
        raise ValueError(
            f"{run_dir} holds a finished run without checkpoints, and --resume would begin it again and replace it; go "
            f"on from --model.path {run_dir}/model in another --run-dir, or delete it with --overwrite"
        )


def begin_run(config: RunConfig, script: str, step: int = 0) -> int:
    """Take the folder, delete what must go, and save the config and `run.json`; prints the versions of packages.

    What goes is what an earlier run left, if asked to, and in any case what one was writing when it was killed. The
    marker and the config of a run that is resumed change too: they say what last ran. The config that it had up to
    `step`, from which it is resumed, stays as config-step-N.py if it was another one. Returns the lock, a descriptor:
    the folder is this process's until it ends or closes that. Raises ValueError if another run holds it.
    """
    folder, recipe = pathlib.Path(config.run_dir), as_recipe(config)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(folder, os.O_CREAT)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    job = f", job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}{job}, since {now}\n".encode(), 0)
    deletes = config.overwrite and not config.resume
    for path in _files_of_runs(folder):
        if path.name.endswith(UNFINISHED) or (deletes and path.name not in ("initial_model", LOCK, MARKER)):
            _delete(path)
    versions = {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES}
    marker = {"script": script, "created": now, "versions": versions, "commit": _commit()}
    marker["config"] = written_fields(config)
    _write(folder / MARKER, json.dumps(marker, indent=2) + "\n")
    saved, earlier = folder / CONFIG, folder / f"config-step-{step:08d}.py"
    # one that is there already is that of the steps up to this one; what came after it led to no checkpoint
    if config.resume and step and not earlier.exists() and saved.is_file() and saved.read_text("utf-8") != recipe:
        saved.rename(earlier)
    _write(saved, recipe)
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{told}; commit {(marker['commit'] or 'unknown')[:10]}", flush=True)
    return lock


def read_marker(run_dir: str | pathlib.Path) -> dict[str, Any] | None:
    """The folder's `run.json`; None if there is none, or one that no run wrote."""
    path = pathlib.Path(run_dir) / MARKER
    if path.is_symlink() or not path.is_file():
        return None
    try:
        marker = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    kinds = [type(marker.get(name)) for name in ("script", "config")] if isinstance(marker, dict) else []
    return marker if kinds == [str, dict] else None


def step_folders(run_dir: str | pathlib.Path) -> list[pathlib.Path]:
    """The run's checkpoint folders `step-NNNNNNNN`, oldest first; others, of whatever name, are not ours."""
    found = (pathlib.Path(run_dir) / CHECKPOINTS).glob("step-*")
    return sorted((path for path in found if STEP_FOLDER.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(folder: pathlib.Path) -> int:
    """The step of one of `step_folders`."""
    return int(folder.name.removeprefix("step-"))


def _take_lock(folder: pathlib.Path, flags: int = 0) -> int:
    """Lock the folder's `run.lock`, without following links or waiting; closing the descriptor gives it back.

    Raises ValueError that names the process which holds it, or if it is no regular file.
    """
    path = folder / LOCK
    try:  # for writing too, because NFS locks nothing that is open for reading only
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened ({error.strerror}); choose another --run-dir") from error
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode) or opened.st_nlink > 1:
        raise ValueError(f"{path} is no file that a run wrote; remove it, or choose another --run-dir")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
        raise ValueError(
            f"{folder} is in use by another run ({holder}); wait for its end, or choose another --run-dir"
        ) from error
    except OSError as error:  # some mounts of Lustre
        print(f"warning: {folder} has no locks ({error.strerror}); nothing keeps a second run out of it", flush=True)
    return descriptor


def _files_of_runs(folder: pathlib.Path) -> list[pathlib.Path]:
    """All that a run may have written there; of checkpoints/ only the folders that it named."""
    names = [f"{name}{ending}" for name in RUN_FILES if name != CHECKPOINTS for ending in ("", *UNFINISHED)]
    configs = [path for path in folder.glob("config-step-*.py") if OLD_CONFIG.fullmatch(path.name)]
    steps = (folder / CHECKPOINTS).glob("step-*")
    return [*(folder / name for name in names), *configs] + [
        path for path in steps if STEP_FOLDER.fullmatch(path.name.removesuffix(PARTIAL))
    ]


def _delete(path: pathlib.Path) -> None:
    """A folder with what is in it, a file, or a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: pathlib.Path, text: str) -> None:
    """In one step: a crash leaves the old file or the new one."""
    partial = path.with_name(f"{path.name}.tmp")
    with open(partial, "x", encoding="utf-8") as file:  # not through a link that somebody put there meanwhile
        file.write(text)
    partial.replace(path)


def installed_version(package: str) -> str | None:
    """A package's version, or that of its build for CPUs; None if neither is installed."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _commit() -> str | None:
    """The project's git commit; None without git or outside a repository."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):  # perhaps inside the repository of something else
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
