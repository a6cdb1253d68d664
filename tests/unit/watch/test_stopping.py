"""How a run is asked to stop and what it answers; how the processes of one start find each other."""

import datetime
import pathlib
import signal
import threading

import pytest
import torch.distributed as dist

from grpo.roles.process_groups import meet
from grpo.watch import stopping
from tests.torchrun import finish, start_python


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch):
    monkeypatch.setattr(stopping, "_reasons", [])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv(stopping.STOP_VARIABLE, raising=False)


def test_a_file_stops_the_run_once(tmp_path, monkeypatch):
    run_dir, named = tmp_path / "run", tmp_path / "named"
    run_dir.mkdir()
    assert stopping.stop_reason(str(run_dir)) == ""
    (run_dir / "stop").touch()
    stopping.forget_old_stop(str(run_dir))  # of a run before this one
    assert stopping.stop_reason(str(run_dir)) == ""
    monkeypatch.setenv(stopping.STOP_VARIABLE, str(named))
    named.touch()
    stopping.forget_old_stop(str(run_dir))
    reason = stopping.stop_reason(str(run_dir))
    assert reason == f"the file {named}"
    stopping.obey_stop(reason, 7, str(run_dir))
    assert not named.exists()
    stopping.ask_to_stop("SIGTERM")
    assert stopping.stop_reason(str(run_dir)) == reason  # it stays asked for, and the first reason counts


def test_the_next_run_of_a_notebook_is_not_stopped_by_what_stopped_the_one_before(tmp_path):
    (tmp_path / "stop").touch()
    stopping.obey_stop(stopping.stop_reason(str(tmp_path)), 7, str(tmp_path))
    stopping.forget_old_stop(str(tmp_path / "next"))
    assert stopping.stop_reason(str(tmp_path / "next")) == ""


RUN_TWICE = """
import os, signal, time
from grpo.roles.process_groups import setup_trainers
from grpo.watch.failures import run_script, set_place
from grpo.watch.stopping import end_with_launcher
from grpo.watch.watchdog import watched


def main():
    roles = setup_trainers()
    with watched(roles, 10):
        set_place(phase="train")
    with watched(roles, 10):
        set_place(phase="startup")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


end_with_launcher()
run_script(main)
"""


def test_a_signal_before_the_first_step_of_a_notebooks_second_run_ends_it_at_once(tmp_path):
    (tmp_path / "run.py").write_text(RUN_TWICE)
    result = finish(start_python(tmp_path / "run.py"))
    assert result.stdout == "SIGTERM before the first step: nothing to save\n"
    assert result.returncode == 128 + signal.SIGTERM


def test_what_an_earlier_start_left_in_the_store_answers_nobody():
    """Ranks 0 to 2 meet, then 3 other processes in the same store, which has all words of the first three."""
    store, soon = dist.HashStore(), datetime.timedelta(seconds=600)
    store.set_timeout(soon)

    def names() -> dict[int, dist.PrefixStore]:
        found = {}

        def rank(number: int) -> None:
            found[number] = meet(store, number, 3, soon)

        threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 2, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[0].set("who", "met")
        assert [found[number].get("who") for number in range(3)] == [b"met"] * 3
        return found

    first, second = names(), names()
    first[0].set("a", "first")
    assert not second[1].check(["a"])


def test_a_rank_that_does_not_start_is_named():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"^of 2 ranks, these did not start within 0 s: 1$"):
        meet(store, 0, 2, datetime.timedelta(seconds=0.1))


RUN = """
import ctypes, multiprocessing, os, signal, subprocess, sys, time
from grpo.watch import stopping
from grpo.watch.failures import run_script, set_place


def hear_twice():
    for each in stopping.STOP_SIGNALS:  # as while the handler of a compiler's library runs
        ctypes.CDLL(None).signal(each, ctypes.c_void_p(0))
    helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with multiprocessing.get_context("fork").Pool(1) as pool:  # ends its processes by SIGTERM
        pool.apply(abs, (-1,))
    os.kill(os.getpid(), number)
    while sys.argv[2] == "heard" and not stopping.stop_reason("/nowhere"):
        time.sleep(0.01)
    os.killpg(0, number)
    while not stopping.stop_reason("/nowhere"):
        time.sleep(0.01)
    print("helper:", helper.communicate(b"alive")[0].decode())
    print("saved", flush=True)


def main():
    from grpo.roles.process_groups import setup_trainers
    from grpo.watch import watchdog as module

    if sys.argv[2] != "later":
        module.TICK_SECONDS = 600.0  # two signals within a tick are one request
    with module.watched(setup_trainers(), 10) as watchdog:
        set_place(phase="train")
        if sys.argv[2] != "later":
            hear_twice()
        while sys.argv[2] == "later":
            os.kill(os.getpid(), number)
            time.sleep(3)
    watchdog.exit_if_interrupted()


number = signal.Signals[sys.argv[1]]
stopping.end_with_launcher()
if sys.argv[2] == "early":
    os.kill(os.getpid(), number)
    time.sleep(600)
run_script(main)
"""


def send(tmp_path: pathlib.Path, name: str, how: str) -> tuple[int, str]:
    """Exit code and output of a run without models that sends itself a signal."""
    (tmp_path / "run.py").write_text(RUN)
    result = finish(start_python(tmp_path / "run.py", name, how))
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("name", "how"),
    [("SIGINT", "at once"), ("SIGINT", "heard"), *((name, "at once") for name in ("SIGTERM", "SIGHUP", "SIGUSR1"))],
)
def test_a_signal_to_the_run_and_then_to_its_group_is_one_request(name, how, tmp_path):
    """`timeout` and terminals send two. No library's handler and no helper's death ends the run before it has saved."""
    code, output = send(tmp_path, name, how)
    assert output.splitlines()[-3:] == [
        f"{name}: the run stops when this step is done and saved",
        "helper: alive",
        "saved",
    ]
    assert code == (130 if name == "SIGINT" else 0)


def test_a_later_ctrl_c_ends_the_run_at_once(tmp_path):
    code, output = send(tmp_path, "SIGINT", "later")
    assert output.splitlines()[-1] == "SIGINT again: ended at once, without saving" and code == 130


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_while_a_script_is_imported_ends_it_with_a_line(name, tmp_path):
    code, output = send(tmp_path, name, "early")
    assert output == f"{name}: ended, nothing to save\n" and code == 128 + signal.Signals[name]


FIRST_PROCESS = """
import os
from grpo.watch import stopping

os.environ["TORCHELASTIC_RUN_ID"] = "run"
os.getppid = lambda: 1
stopping.end_with_launcher()
print("goes on", flush=True)
os._exit(0)
"""


def test_torchrun_may_be_the_first_process_of_a_container(tmp_path):
    (tmp_path / "program.py").write_text(FIRST_PROCESS)
    result = finish(start_python(tmp_path / "program.py"))
    assert (result.returncode, result.stdout) == (0, "goes on\n")
