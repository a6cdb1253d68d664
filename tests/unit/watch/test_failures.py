"""How a rank ends: one message, in which nothing acts on a terminal."""

import os
import pathlib
import subprocess
import sys

import pytest

from grpo.roles import shared_memory
from grpo.watch import failures
from grpo.watch.failures import BadInput, refuse_bad_input, run_rank
from tests import ROOT


@pytest.mark.parametrize("error", [ValueError, BadInput])
def test_a_message_cannot_act_on_a_terminal(error, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)  # else this process would end
    monkeypatch.setenv("RANK", "0")

    def main():
        raise error("column 'a\x1b[2J\u202e\ud800' is missing")

    run_rank(main)
    told = capsys.readouterr().err
    assert ended == [1]
    assert told.splitlines()[-1].startswith("error: ")
    assert told.splitlines()[-1].endswith(r"column 'a\x1b[2J\u202e\ud800' is missing")
    assert "\x1b" not in told and ("Traceback" in told) == (error is ValueError)


def test_a_full_disk_is_one_line_wherever_it_was_written(monkeypatch, capsys):
    """The kernel's device that is always full; libraries have the system's words in errors of their own."""
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setenv("RANK", "0")

    def write_through_a_library():
        try:
            pathlib.Path("/dev/full").write_text("a line of metrics")
        except OSError as error:
            raise RuntimeError(f"cannot write: {error}") from error

    for main in (lambda: pathlib.Path("/dev/full").write_text("a line of metrics"), write_through_a_library):
        run_rank(main)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: rank 0 ") and "No space left on device" in line and "--resume" in line


@pytest.mark.parametrize("tool", ["train_grpo.py", "-m grpo.look"])
def test_a_reader_who_left_sees_no_traceback(tool):
    """Before the help is written; `head` leaves in the middle of a long text."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *tool.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=600)
    os.close(write)
    assert done.stderr == b"" and done.returncode == failures.READER_LEFT


def test_a_failure_leaves_no_shared_memory_of_its_start(monkeypatch, tmp_path):
    """The replicas of this start go; what an earlier start, another run or a user has there stays."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    for name, value in (("RUN_ID", "a[1]"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    own = [f"{shared_memory.replica_name(rank)}-tp:0-[0-1]-cpushm_0" for rank in (3, 5, 50)]
    others = ["a[1]-29500-0-3-tp:0-[0-1]-cpushm_0", "b-29500-1-3-tp:0-[0-1]-cpushm_0", "model.safetensors"]
    for name in (*own, *others):
        (tmp_path / name).touch()
    failures.exit_now(0)
    shared_memory.remove_shared_memory(shared_memory.replica_name(0))
    assert len(list(tmp_path.iterdir())) == 6
    shared_memory.remove_shared_memory(shared_memory.replica_name(5))  # that replica has started, and not number 50
    assert len(list(tmp_path.iterdir())) == 5
    failures.exit_now(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, FileExistsError])
def test_bad_input_is_what_a_user_can_correct(error):
    with pytest.raises(BadInput, match="^why$"), refuse_bad_input():
        raise error("why")
    with pytest.raises(KeyError), refuse_bad_input():
        raise KeyError("a bug")
