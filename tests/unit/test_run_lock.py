"""One run per folder: the second is refused with the name of the first, a dead one's folder is free at once."""

import errno
import fcntl
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from grpo.folder import run_lock
from grpo.folder.run_folder import check_run_folder, mark_run_folder
from grpo.folder.run_lock import lock_run_folder, unlock_run_folder

ROOT = pathlib.Path(__file__).parents[2]
HOLDER = """
import sys, time
from grpo.folder.run_folder import mark_run_folder
mark_run_folder(sys.argv[1], "train_grpo.py")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path):
    yield tmp_path
    unlock_run_folder(tmp_path)


@pytest.fixture
def other_run(run_dir):
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    environment = os.environ | {"SLURM_JOB_ID": "4711"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_run_is_refused_and_the_folder_of_a_dead_one_is_free(run_dir, other_run):
    who = f"in use by another run .process {other_run.pid} on {socket.gethostname()}, job 4711, since .*"
    for take in (lambda: check_run_folder(str(run_dir), "train_grpo.py", ()), lambda: lock_run_folder(run_dir)):
        with pytest.raises(ValueError, match=who) as refused:
            take()
        assert "\n" not in str(refused.value)
    # a hung process holds it, a killed one does not; nothing is left to clear away
    other_run.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match=who):
        lock_run_folder(run_dir)
    other_run.kill()
    other_run.wait()
    check_run_folder(str(run_dir), "train_grpo.py", (), resume=True)
    mark_run_folder(str(run_dir), "train_grpo.py")
    assert json.loads((run_dir / "run.lock").read_text())["pid"] == os.getpid()


def test_a_process_may_take_its_folder_twice_and_gives_it_back_empty(run_dir):
    for _ in range(2):
        lock_run_folder(run_dir)
    unlock_run_folder(run_dir)
    assert (run_dir / "run.lock").read_text() == ""
    with open(run_dir / "run.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it were held


def test_children_do_not_hold_it_on(run_dir):
    lock_run_folder(run_dir)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(0.2)
    unlock_run_folder(run_dir)
    with open(run_dir / "run.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        ({"host": socket.gethostname(), "pid": os.getppid(), "since": "then"}, True),
        ({"host": "elsewhere", "pid": 1, "since": "then"}, True),
        ({"host": socket.gethostname(), "pid": 2**22 + 1, "since": "then"}, False),  # above the largest there is
        ("", False),
        ("garbage", False),
        ([1], False),
    ],
    ids=["alive", "another host", "gone", "empty", "garbage", "a list"],
)
def test_a_file_system_without_locks(holder, refused, run_dir, monkeypatch):
    def none(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", none)
    (run_dir / "run.lock").write_text(holder if isinstance(holder, str) else json.dumps(holder))
    if not refused:
        return lock_run_folder(run_dir)
    with pytest.raises(ValueError, match=f"if it has ended, remove {run_dir}/run.lock"):
        lock_run_folder(run_dir)
