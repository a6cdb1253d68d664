"""Programs that loop, allocate, print, write, hide and look around, and what is left when somebody is killed."""

import concurrent.futures
import os
import pathlib
import resource
import signal
import subprocess
import sys
import uuid

import pytest

from grpo.features.programs.run import REASON, Limits, Outcome, ProgramError, check_programs, run_python
from grpo.workers import kernel, lockdown
from grpo.workers.processes import children
from tests.unit.workers.lockdown_attacks import ROOT
from tests.unit.workers.processes import DEADLINE, find, wait_until

needs_filters = pytest.mark.skipif(not kernel.can_deny_calls(), reason="this kernel filters no system calls")
pytestmark = needs_filters


def run(code: str, stdin: str = "", timeout_seconds: float = DEADLINE, memory_gib: float = 1.0, **limits) -> Outcome:
    return run_python(code, stdin, Limits(timeout_seconds, memory_gib, **limits))


def sleeper(marker: str) -> str:
    return f"os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {marker!r}])"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(input()[::-1])", Outcome("ok", "ßba\n", "")),
        ("import sys; print(1, file=sys.stderr); sys.exit(3)", Outcome("failed", "", "1\n")),
        ("import os; os.kill(os.getpid(), 9)", Outcome("killed", "", "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", Outcome("timeout", "", "")),
        (r"import os; os.write(1, b'\xff\n')", Outcome("ok", "\ufffd\n", "")),
        ("print(__name__, __file__.endswith('program.py'))", Outcome("ok", "__main__ True\n", "")),
    ],
)
def test_outcome(code, outcome):
    assert run(code, "abß\n") == outcome


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "input()\nimport os\nos.read(os.pipe()[0], 1)",
        "import signal\nfor s in (2, 15, 17, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(100)",
        "print('x', flush=True)\nimport threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()",
    ],
)
def test_endless_programs_time_out(code):
    assert run(code, "\n", timeout_seconds=0.5).status == "timeout"


def test_the_limits_are_set_and_cannot_be_raised():
    """30.5 seconds: SIGXCPU after 31 of CPU, SIGKILL after 32."""
    code = (
        "import resource as r\n"
        "for name in ('CPU', 'AS', 'FSIZE', 'CORE', 'NOFILE'): print(r.getrlimit(getattr(r, f'RLIMIT_{name}')))\n"
        "r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))"
    )
    outcome = run(code, timeout_seconds=30.5, memory_gib=0.5)
    assert outcome.stdout.splitlines() == [
        "(31, 32)",
        "(536870912, 536870912)",
        "(0, 0)",
        "(0, 0)",
        "(64, 64)",
    ]
    assert "not allowed to raise maximum limit" in outcome.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_costs_no_memory(stream):
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 1_000_000)"
    assert run(code.replace("while", "if").replace("1_000_000", "100_000"), output_bytes=100_000).status == "ok"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = run(code, output_bytes=100_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB
    assert (outcome.status, getattr(outcome, stream)) == ("output", "x" * 100_000)


def test_a_caller_that_ignores_signals_and_keeps_files_private_changes_nothing():
    before, mask = signal.signal(signal.SIGTERM, signal.SIG_IGN), os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        assert run("while True: print('x' * 1_000_000)").status == "output"
        assert run("import os\nos.kill(os.getpid(), 15)").status == "killed"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        signal.signal(signal.SIGTERM, before)
        os.umask(mask)


@pytest.mark.parametrize(
    "code",
    ["open('out.txt', 'w')", "import tempfile\ntempfile.mkdtemp()", "import subprocess\nsubprocess.run(['true'])"],
)
def test_a_program_that_asks_for_more_reads_why_it_cannot(code):
    outcome = run(code)
    assert outcome.status == "failed" and outcome.stderr.endswith(f"\n{REASON}")


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)  # the loader's, which is passed on
    names = set(run("import os\nprint(*os.environ)").stdout.split())
    assert names - {"LC_CTYPE"} == {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    assert run("import grpo").status == "failed"


def test_the_folder_has_the_program_alone_and_is_removed():
    outcome = run("import os\nprint(os.getcwd(), os.listdir())")
    folder, _, listed = outcome.stdout.partition(" ")
    assert (outcome.status, listed) == ("ok", "['program.py']\n")
    assert os.path.basename(folder).startswith("program-") and not os.path.exists(folder)


def test_what_a_program_needs_is_there():
    modules = "json, math, random, sqlite3, zoneinfo, ctypes, numpy"
    code = f"import {modules}\nprint(open('/dev/stdin').read(), numpy.ones(3).sum())"
    outcome = run(code, "abc", memory_gib=2)
    assert (outcome.status, outcome.stdout) == ("ok", "abc 3.0\n"), outcome.stderr
    code = (
        "import contextlib, io, sqlite3, sys, tempfile, threading\n"
        "with tempfile.SpooledTemporaryFile() as file: file.write(b'x')\n"
        "sqlite3.connect(':memory:').execute('create table t (x)')\n"
        "threading.Thread(target=lambda: open('/dev/null', 'w').write('x'), name='writer').start()\n"
        "with contextlib.redirect_stdout(io.StringIO()): print('hidden')\n"
        "print('done', sys.stdout.isatty())"
    )
    assert run(code).stdout == "done False\n"


def test_it_goes_first_when_memory_runs_out():
    sleeps = f"import os, sys\n{sleeper(marker := f'marker-{uuid.uuid4()}')}"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        future = pool.submit(run, sleeps, timeout_seconds=600)
        wait_until(lambda: find(marker), "the program")
        (program,) = find(marker)
        assert pathlib.Path(f"/proc/{program}/oom_score_adj").read_text() == "1000\n"
        os.kill(program, signal.SIGKILL)
        assert future.result().status == "killed"


THREAD_EXECS = """
import ctypes, os, sys, threading
sleeps = [sys.executable, "-c", "import time; time.sleep(600)", MARKER]
threading.Thread(target=os.execv, args=(sys.executable, sleeps)).start()
"""


@pytest.mark.parametrize("killed", ["supervisor", "driver", "worker"])
def test_no_program_is_left_when_the_reward_processes_are_killed(killed, tmp_path):
    """Also one whose thread has called execve, which clears the signal that it gets with its parent's death."""
    marker = f"marker-{uuid.uuid4()}"
    text = f"import os, sys\n{sleeper(marker)}" if killed == "supervisor" else f"MARKER = {marker!r}{THREAD_EXECS}"
    program = (
        "import dataclasses\n"
        "from grpo.config import RewardConfig\n"
        "from grpo.rewards.pool import RewardPool\n"
        "from grpo.types import Prompt, Rollout\n"
        "pool = RewardPool(RewardConfig(functions={'code_reward': 1.0}, num_workers=2, timeout_seconds=600,\n"
        "    options={'code_reward': {'timeout_seconds': 590}}), 10)\n"
        "print(pool.workers[False].supervisor.pid, flush=True)\n"
        f"code = '```python\\n' + {text!r} + '\\n```'\n"
        'prompt = Prompt(0, [1], {\'tests\': \'[{"input": "", "output": ""}]\'})\n'
        "pool.submit([dataclasses.replace(Rollout.begin(prompt, 0), text=code)] * 2, 1)\n"
        "input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=variables, **pipes)
    supervisor = int(driver.stdout.readline())
    wait_until(lambda: len(find(marker)) == 2, "the programs")
    pids = {"supervisor": supervisor, "driver": driver.pid, "worker": min(children(supervisor))}
    os.kill(pids[killed], signal.SIGKILL)
    wait_until(lambda: len(find(marker)) == (1 if killed == "worker" else 0), "programs to end")
    driver.kill()
    driver.communicate()
    wait_until(lambda: not find(marker), "all programs to end")
    if killed != "supervisor":
        wait_until(lambda: not [*tmp_path.iterdir()], "their folders to go")


def test_a_program_whose_end_is_unknown_has_not_succeeded():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(ChildProcessError):
            run("raise SystemExit(1)")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_program_that_could_not_be_run_is_not_a_program_that_failed(monkeypatch):
    monkeypatch.setattr(lockdown, "restrict_files", lambda *_: 1 / 0)
    monkeypatch.setattr(lockdown, "landlock_version", lambda: 1)
    with pytest.raises(ProgramError, match="ZeroDivisionError"):
        run("print(42)")


def test_the_start_of_a_run_says_what_programs_run_under_and_refuses_what_is_too_little(monkeypatch):
    if lockdown.landlock_version():
        line = check_programs(allow_without_landlock=False)
        assert (
            line.startswith("programs run with: no network, only the interpreter's files, to read") and "\n" not in line
        )
    monkeypatch.setattr(lockdown, "landlock_version", lambda: 0)
    with pytest.raises(ValueError, match=r"has or allows no Landlock .* set --reward.allow-without-landlock$"):
        check_programs(allow_without_landlock=False)
    assert "ALL FILES OF ITS USER" in check_programs(allow_without_landlock=True)
    code = (
        f"import os\nprint(len(open({__file__!r}).read()) > 0)\n"
        f"for attack in (lambda: os.kill({os.getpid()}, 0), os.fork):\n"
        "    try: attack()\n    except PermissionError: print('refused')\n"
    )
    assert run(code).stdout.splitlines()[-2:] == ["refused", "refused"]
    monkeypatch.setattr(kernel, "can_deny_calls", lambda: False)
    with pytest.raises(ValueError, match="filters no system calls"):
        check_programs(allow_without_landlock=True)
