"""The sandbox against programs that loop, allocate, fork, print, write, hide and look around."""

import concurrent.futures
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest

from grpo.rewards import sandbox
from grpo.rewards.sandbox import Outcome, SandboxError, isolation, run_python

ROOT = pathlib.Path(__file__).parents[2]

GRANTED = isolation()


def needs(*measures: str):
    missing = [measure for measure in measures if not GRANTED[measure]]
    return pytest.mark.skipif(bool(missing), reason=f"this kernel does not grant programs: {', '.join(missing)}")


def run(code: str, stdin: str = "", **options) -> Outcome:
    return run_python(code, stdin, **{"timeout_seconds": 20, "memory_gib": 1.0, **options})


@pytest.fixture(params=["granted", "limits only"])
def any_measures(request, monkeypatch):
    """With all that is granted here, and with nothing but limits, as on a kernel that grants nothing."""
    if request.param == "limits only":
        monkeypatch.setattr(sandbox, "_measures", lambda: ())


def find(marker: str) -> list[int]:
    """Processes with `marker` among their arguments, whatever namespace they are in."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass  # it ended meanwhile
    return found


def wait_until(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def sleeper(marker: str) -> str:
    return f"os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(120)', {marker!r}])"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(input()[::-1])", Outcome("ok", "ßba\n", "")),
        ("import sys; sys.exit(0)", Outcome("ok", "", "")),
        ("import sys; print(1, file=sys.stderr); sys.exit(3)", Outcome("failed", "", "1\n")),
        ("import os; os.kill(os.getpid(), 9)", Outcome("killed", "", "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", Outcome("timeout", "", "")),
        (r"import os; os.write(1, b'\xff\n')", Outcome("ok", "\ufffd\n", "")),
        ("print(__name__, __file__.endswith('program.py'))", Outcome("ok", "__main__ True\n", "")),
    ],
)
def test_outcome(any_measures, code, outcome):
    assert run(code, "abß\n") == outcome


@pytest.mark.parametrize("code", ["raise ValueError", "1 +", "a\0b", "'\ud800'", "def f(): f()\nf()"])
def test_broken_programs_fail(code):
    assert run(code).status == "failed"


def test_stdin_may_be_large_and_unread():
    assert run("print(len(open(0).read()))", "x" * 5_000_000).stdout == "5000000\n"
    assert run("print('done')", "x" * 5_000_000).stdout == "done\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "input()\nimport os\nos.read(os.pipe()[0], 1)",
        "import signal\nfor s in (2, 15, 17, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(100)",
        "print('x', flush=True)\nimport threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()",
    ],
)
def test_endless_programs_time_out(any_measures, code):
    start = time.monotonic()
    assert run(code, "\n", timeout_seconds=0.5).status == "timeout"
    assert 0.5 <= time.monotonic() - start < 5  # 0.6 s when nothing else runs


def test_the_limits_are_set():
    """3.5 seconds: SIGXCPU after 4 of CPU, SIGKILL after 5."""
    code = (
        "import resource as r\n"
        "for name in ('CPU', 'AS', 'FSIZE', 'CORE', 'NOFILE'): print(r.getrlimit(getattr(r, f'RLIMIT_{name}')))"
    )
    lines = run(code, timeout_seconds=3.5, memory_gib=0.5, file_bytes=1000).stdout.splitlines()
    assert lines == ["(4, 5)", "(536870912, 536870912)", "(1000, 1000)", "(0, 0)", "(64, 64)"]


@needs("user")
def test_a_program_cannot_raise_its_limits():
    code = "import resource as r\nr.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))"
    assert "not allowed to raise maximum limit" in run(code).stderr


def test_endless_allocation_fails(any_measures):
    outcome = run("blocks = []\nwhile True: blocks.append(bytes(10_000_000))", memory_gib=0.25)
    assert outcome.status == "failed"
    assert "MemoryError" in outcome.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_costs_neither_memory_nor_time(any_measures, stream):
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 1_000_000)"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    outcome = run(code, output_bytes=100_000)
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB
    assert outcome.status == "output"
    assert getattr(outcome, stream) == "x" * 100_000


def test_a_caller_that_ignores_signals_changes_nothing(any_measures):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        start = time.monotonic()
        assert run("while True: print('x' * 1_000_000)").status == "output"
        assert run("import os\nos.kill(os.getpid(), 15)").status == "killed"
        assert time.monotonic() - start < 5
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        signal.signal(signal.SIGTERM, before)


def test_output_up_to_the_limit_is_fine():
    assert run("print('x' * 99_999)", output_bytes=100_000) == Outcome("ok", "x" * 99_999 + "\n", "")
    assert run("print('x' * 100_000)", output_bytes=100_000).status == "output"


def test_a_1_gb_file_is_not_written(any_measures):
    code = "with open('big', 'wb') as file:\n    for _ in range(1000): file.write(bytes(1_000_000))"
    outcome = run(code, file_bytes=4 << 20)
    assert outcome.status == "failed"
    assert "File too large" in outcome.stderr or "No space left on device" in outcome.stderr


@needs("files")
def test_many_small_files_share_the_limit():
    code = "for i in range(100):\n    with open(str(i), 'wb') as file: file.write(bytes(1_000_000))"
    outcome = run(code, file_bytes=8 << 20)
    assert (outcome.status, "No space left on device" in outcome.stderr) == ("failed", True)


def test_the_environment_is_empty(any_measures, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "LD_LIBRARY_PATH" not in os.environ
    names = set(run("import os\nprint(*os.environ)").stdout.split())
    assert names - {"LC_CTYPE"} == {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    assert run("import grpo").status == "failed"


def test_the_folder_is_empty_and_removed(any_measures):
    code = "import os\nprint(os.getcwd(), os.listdir())\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')"
    outcome = run(code)
    folder, _, listed = outcome.stdout.partition(" ")
    assert (outcome.status, listed) == ("ok", "['program.py']\n")
    assert folder.startswith("/tmp/sandbox-")
    assert not os.path.exists(folder)


@needs("network")
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it can be reached, from here
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert "Network is unreachable" in run(code).stderr
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{uuid.uuid4()}")  # abstract: in no folder
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({server.getsockname().decode()!r})"
        assert "ConnectionRefusedError" in run(code).stderr


@needs("files")
def test_private_files_are_hidden_and_others_read_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(ROOT / "tests"))
    private = [tmp_path / "answers.jsonl", pathlib.Path(__file__), pathlib.Path("/dev/shm") / f"test-{uuid.uuid4()}"]
    private[0].write_text("42")
    private[2].write_text("42")
    try:
        code = f"import os\nfor path in {[str(path) for path in private]}: print(os.path.exists(path))"
        assert run(code).stdout == "False\n" * 3
    finally:
        private[2].unlink()
    code = f"import os\nfor path in ('/usr', {sys.prefix!r}): print(os.statvfs(path).f_flag & os.ST_RDONLY)"
    assert run(code).stdout == "1\n1\n"


@needs("user")
def test_it_is_not_root():
    code = (
        "import os\n"
        "print(0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()))\n"
        "print(open('/proc/self/status').read())"
    )
    lines = run(code).stdout.splitlines()
    assert lines[0] == "False"
    assert [line.split() for line in lines if line.startswith(("CapEff", "CapPrm", "NoNewPrivs"))] == [
        ["CapPrm:", "0" * 16],
        ["CapEff:", "0" * 16],
        ["NoNewPrivs:", "1"],
    ]


@needs("process_tree")
def test_it_sees_no_other_process():
    code = (
        f"import os\nprint([p for p in os.listdir('/proc') if p.isdecimal()], os.getppid())\nos.kill({os.getpid()}, 0)"
    )
    outcome = run(code)
    assert outcome.stdout == "['1', '2'] 1\n"
    assert "ProcessLookupError" in outcome.stderr
    assert run("import os\nos.kill(1, 9)\nos.kill(-1, 9)\nprint('alive')").status in ("failed", "killed")
    assert "PermissionError" in run("open('/proc/1/environ').read()").stderr


def test_a_grandchild_in_a_new_session_does_not_survive(any_measures):
    marker = f"marker-{uuid.uuid4()}"
    control = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", marker])
    assert wait_until(lambda: find(marker) == [control.pid])  # so it would be found
    control.kill()
    control.wait()
    code = (
        "import os, sys, time\n"
        "read, write = os.pipe()\n"  # closed by exec
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        {sleeper(marker)}\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "os.close(write)\n"
        "os.read(read, 1)\n"
        "print('started')\n"
    )
    assert run(code).stdout == "started\n"
    assert find(marker) == []


def test_it_dies_with_its_caller(any_measures):
    marker = f"marker-{uuid.uuid4()}"
    measures = sandbox._measures()
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from grpo.rewards import sandbox\n"
            f"sandbox._measures = lambda: {measures!r}\n"
            f"code = {'import os, sys; ' + sleeper(marker)!r}\n"
            "sandbox.run_python(code, timeout_seconds=120, memory_gib=1)",
        ],
        cwd=ROOT,
    )
    # the caller has it in its own arguments
    assert wait_until(lambda: len(find(marker)) == 2)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert wait_until(lambda: find(marker) == [])


# Never without both: the first bounds it, the second ends all of it.
@needs("process_limit", "process_tree")
def test_a_fork_bomb_is_bounded():
    code = (
        "import os, time\n"
        "count = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(100)\n"
        "        count += 1\n"
        "except BlockingIOError: print(count)\n"
    )
    assert run(code, processes=8) == Outcome("ok", "7\n", "")  # itself is the eighth
    start = time.monotonic()
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except BlockingIOError: pass"
    assert run(bomb, timeout_seconds=1, processes=8).status == "timeout"
    assert time.monotonic() - start < 10
    assert run(code, processes=8).stdout == "7\n"  # nothing of the bomb counts against the next


def test_threads_may_run_programs_at_once(any_measures):
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(lambda i: run(f"print({i} ** 2)"), range(12)))
    assert outcomes == [Outcome("ok", f"{i**2}\n", "") for i in range(12)]


def test_nothing_is_left_open(any_measures):
    run("print(1)")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        run("print(1)")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_sandbox_that_does_not_start_is_no_outcome_of_the_program(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="the launcher failed: it said nothing"):
        run("print(1)")
