"""The sandbox against programs that loop, allocate, fork, print, write, hide and look around."""

import concurrent.futures
import dataclasses
import os
import pathlib
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid

import pytest

from grpo.config import RewardConfig
from grpo.workers.sandbox import programs
from grpo.workers.sandbox import run as sandbox
from grpo.workers.sandbox.programs import check_sandbox
from grpo.workers.sandbox.run import Isolation, Measures, Outcome, SandboxError, isolation, run_python

ROOT = pathlib.Path(__file__).parents[2]

GRANTED = isolation()
# As on a machine that grants no namespaces, like most containers.
NO_NAMESPACES = dataclasses.replace(GRANTED.measures, namespaces=False, own_root=False)


def needs(*measures: str):
    missing = [measure for measure in measures if not getattr(GRANTED, measure)]
    return pytest.mark.skipif(bool(missing), reason=f"this kernel does not grant programs: {', '.join(missing)}")


def run(code: str, stdin: str = "", **options) -> Outcome:
    return run_python(code, stdin, **{"timeout_seconds": 20, "memory_gib": 1.0, **options})


@pytest.fixture(params=["granted", "no namespaces"])
def any_measures(request, monkeypatch):
    """With all that is granted here, and without namespaces."""
    if request.param == "no namespaces":
        monkeypatch.setattr(sandbox, "_measures", lambda: NO_NAMESPACES)


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


def test_a_caller_whose_files_are_private_changes_nothing(any_measures):
    before = os.umask(0o077)
    try:
        assert run("print(42)").stdout == "42\n"
    finally:
        os.umask(before)


def test_output_up_to_the_limit_is_fine():
    assert run("print('x' * 99_999)", output_bytes=100_000) == Outcome("ok", "x" * 99_999 + "\n", "")
    assert run("print('x' * 100_000)", output_bytes=100_000).status == "output"


def test_a_1_gb_file_is_not_written(any_measures):
    code = "with open('big', 'wb') as file:\n    for _ in range(1000): file.write(bytes(1_000_000))"
    outcome = run(code, file_bytes=4 << 20)
    assert outcome.status == "failed"
    assert "File too large" in outcome.stderr or "No space left on device" in outcome.stderr


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    with open(str(n := n + 1), 'wb') as file: file.write(bytes(500_000))\n    time.sleep(0.01)",
        "while True:\n    open(str(n := n + 1), 'w').close()",
        "while True:\n    os.mkdir('d'); os.chdir('d')",
        "os.mkdir('d', 0o300); os.chdir('d')\nwhile True:\n    open(str(n := n + 1), 'wb').write(bytes(500_000))",
    ],
)
def test_all_files_share_the_limit(any_measures, code):
    """With a file system of its own there is no more space; elsewhere the program is killed."""
    outcome = run("import os, time\nn = 0\n" + code, file_bytes=8 << 20)
    if sandbox._measures().own_root:
        assert (outcome.status, "No space left on device" in outcome.stderr) == ("failed", True)
    else:
        assert outcome.status == "killed"


def test_the_environment_is_empty(any_measures, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)  # the loader's, which is passed on
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


@needs("process_tree")
def test_the_root_folder_is_empty_except_for_the_interpreter():
    code = (
        "import os, sys\n"
        "print(*sorted(os.listdir('/')))\n"
        f"for path in ('/usr/lib', {sys.base_prefix!r} + '/lib'): print(os.statvfs(path).f_flag & os.ST_RDONLY)\n"
        "print(os.listdir('/tmp') == [os.path.basename(os.getcwd())], os.listdir('/etc'))\n"
    )
    names, *read_only, rest = run(code).stdout.splitlines()
    first = {path.split("/")[1] for path in (sys.prefix, sys.base_prefix)}
    assert set(names.split()) - first <= {"dev", "etc", "lib", "lib64", "proc", "tmp", "usr"}
    assert read_only == ["1", "1"]
    assert rest.startswith("True") and "passwd" not in rest


def test_what_a_program_needs_is_there(any_measures):
    modules = "json, math, random, sqlite3, zoneinfo, ctypes, numpy"
    code = f"import {modules}\nprint(open('/dev/stdin').read(), numpy.ones(3).sum())"
    outcome = run(code, "abc", memory_gib=2)
    assert (outcome.status, outcome.stdout) == ("ok", "abc 3.0\n"), outcome.stderr
    code = "import tempfile, threading\nwith tempfile.TemporaryFile() as file: file.write(b'x')\nprint('done')"
    assert run(code).stdout == "done\n"


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


@needs("process_tree")
def test_a_grandchild_in_a_new_session_does_not_survive():
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


def test_without_namespaces_there_are_threads_but_no_processes(monkeypatch):
    monkeypatch.setattr(sandbox, "_measures", lambda: NO_NAMESPACES)
    thread = (
        "import threading\nthread = threading.Thread(target=print, args=('thread',))\nthread.start(); thread.join()\n"
    )
    for start in ("import os\nos.fork()", "import subprocess, sys\nsubprocess.run([sys.executable, '--version'])"):
        outcome = run(thread + start)
        assert (outcome.stdout, "PermissionError" in outcome.stderr) == ("thread\n", True)


def started_by(pid: int) -> list[int]:
    """Its children, theirs and so on, parents first."""
    children = [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [grandchild for child in children for grandchild in started_by(child)]


@pytest.mark.parametrize("killed", ["caller", "launcher", "init"])
def test_whoever_is_killed_no_program_is_left(any_measures, killed, tmp_path):
    """The program tries to outlive it: no death signal, a session of its own, children where it may have any."""
    marker = f"marker-{uuid.uuid4()}"
    measures = sandbox._measures()
    code = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL(None).prctl(1, 0)\n"
        "try:\n"
        "    if os.fork() == 0: os.setsid()\n"
        "except OSError: pass\n" + sleeper(marker)
    )
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from grpo.workers.sandbox import run as sandbox\n"
            f"sandbox._measures = lambda: sandbox.{measures!r}\n"
            f"print(sandbox.run_python({code!r}, timeout_seconds=120, memory_gib=1).status)",
        ],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    programs = f"\0{marker}\0"  # as an argument of its own; the caller has it inside another
    assert wait_until(lambda: len(find(programs)) == (2 if measures.namespaces else 1))
    launcher, *others = started_by(caller.pid)
    assert len(list(tmp_path.iterdir())) == (0 if measures.own_root else 1)
    init = others[0] if measures.namespaces else launcher
    os.kill({"caller": caller.pid, "launcher": launcher, "init": init}[killed], signal.SIGKILL)
    stdout, _ = caller.communicate(timeout=30)
    assert stdout == ("" if killed == "caller" else "killed\n")
    assert wait_until(lambda: find(programs) == [] and list(tmp_path.iterdir()) == [])


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


def test_a_slow_machine_is_no_reason_to_do_without_a_measure(monkeypatch):
    """The first trial takes too long; the measures are the same, and are not what a later choice would be."""
    real, seconds = sandbox._launch, []

    def slow(code, stdin, measures, limits, output_bytes):
        seconds.append(limits["timeout_seconds"])
        return Outcome("timeout", "", "") if len(seconds) == 1 else real(code, stdin, measures, limits, output_bytes)

    monkeypatch.setattr(sandbox, "_launch", slow)
    assert sandbox._measures.__wrapped__() == GRANTED.measures
    assert seconds[:2] == list(sandbox.TRIAL_SECONDS)
    monkeypatch.setattr(sandbox, "_launch", lambda *_, **__: Outcome("timeout", "", ""))
    with pytest.raises(SandboxError, match="does not run in a sandbox here .*status timeout"):
        sandbox._measures.__wrapped__()


def test_what_the_kernel_refuses_is_done_without():
    """In a process that may make no namespaces the next measures are taken, at once."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from grpo.workers import lockdown\nfrom grpo.workers.sandbox import run as sandbox\n"
        "lockdown.deny_calls(lockdown.NAMESPACES)\n"
        "print(sandbox.isolation().measures)\n"
        "print(sandbox.isolation())\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    measures, line = result.stdout.splitlines()
    assert measures == str(NO_NAMESPACES)
    assert "threads but no processes" in line and "\n" not in line


def test_the_report_says_what_is_missing():
    weak = Isolation(Measures(False, False, landlock=False, leave_root=False), user=True, capability=False)
    assert weak.weakness == "programs can open the files of this machine"
    assert "no network, ALL FILES THAT ITS USER CAN OPEN, threads but no processes" in str(weak)
    for measures in (Measures(True, True, False, False), Measures(False, False, True, False)):
        assert Isolation(measures, user=True, capability=False).weakness is None


def test_a_run_is_refused_whose_programs_could_open_the_files_of_the_machine(monkeypatch):
    with_code = RewardConfig(functions={"code_reward": 1.0})
    assert check_sandbox(RewardConfig()) is None
    assert check_sandbox(with_code) == str(GRANTED)
    weak = Isolation(Measures(False, False, landlock=False, leave_root=False), user=True, capability=False)
    monkeypatch.setattr(programs, "isolation", lambda: weak)
    with pytest.raises(ValueError, match=r"the files of this machine: Linux .* set --reward.allow-weak-sandbox$"):
        check_sandbox(with_code)
    assert check_sandbox(dataclasses.replace(with_code, allow_weak_sandbox=True)) == str(weak)


@pytest.mark.skipif(os.geteuid() != 0, reason="others run programs as the user that owns the interpreter")
def test_an_environment_that_only_root_may_read_does_not_mean_running_as_root(any_measures):
    """Made under umask 077, in a folder that only root may enter. Capability 1 or 2 is to read."""
    measures = sandbox._measures()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        make = f"umask 077; mkdir {folder}/e; {sys.executable} -m venv --without-pip {folder}/e/env"
        subprocess.run(["sh", "-c", make], check=True, timeout=120)
        package = pathlib.Path(sysconfig.get_path("purelib", vars={"base": f"{folder}/e/env"})) / "package.py"
        package.write_text("print('imported')")
        package.chmod(0o600)
        code = (
            "import ctypes, os, package, struct\n"
            "data = ctypes.create_string_buffer(24)\n"
            "ctypes.CDLL(None).capget(struct.pack('Ii', 0x20080522, 0), data)\n"
            "capabilities = struct.unpack('6I', data.raw)[1]\n"
            "print(0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()), capabilities & ~0b110)\n"
            f"open({str(package)!r}, 'a')"
        )
        program = (
            "from grpo.workers.sandbox import run as sandbox\n"
            f"sandbox._measures = lambda: sandbox.{measures!r}\n"
            f"print(sandbox.isolation())\nprint(sandbox.run_python({code!r}, timeout_seconds=20, memory_gib=1))"
        )
        result = subprocess.run(
            [f"{folder}/e/env/bin/python", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    line, outcome = result.stdout.splitlines()
    assert "one capability, to read the interpreter" in line
    assert r"stdout='imported\nFalse 0\n'" in outcome
    assert "PermissionError" in outcome or "Read-only file system" in outcome


@pytest.mark.parametrize("killed", ["supervisor", "driver"])
def test_no_program_is_left_when_the_reward_processes_are_killed(killed):
    marker = f"marker-{uuid.uuid4()}"
    program = (
        "import types\n"
        "from grpo.config import RewardConfig\n"
        "from grpo.rewards.workers.pool import RewardPool\n"
        "pool = RewardPool(RewardConfig(functions={'code_reward': 1.0}, num_workers=2, timeout_seconds=100,\n"
        "    options={'code_reward': {'timeout_seconds': 90}}), 10)\n"
        "print(pool.supervisor.pid, flush=True)\n"
        f"code = '```python\\nimport os, sys\\n' + {sleeper(marker)!r} + '\\n```'\n"
        "prompt = types.SimpleNamespace(columns={'tests': 'assert True'}, content='')\n"
        "completion = types.SimpleNamespace(num_tokens=1, truncated=False)\n"
        "pool.submit([types.SimpleNamespace(text=code, prompt=prompt, completion=completion)] * 2, 1)\n"
        "input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    driver = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    supervisor = int(driver.stdout.readline())
    programs = f"\0{marker}\0"
    assert wait_until(lambda: len(find(programs)) == 2, 60)
    os.kill(supervisor if killed == "supervisor" else driver.pid, signal.SIGKILL)
    assert wait_until(lambda: find(programs) == [])
    driver.kill()
    driver.communicate()


def test_a_kernel_without_landlock_and_namespaces_still_runs_programs_if_that_is_allowed():
    """Signals are then refused by the filter of system calls."""
    measures = Measures(False, False, landlock=False, leave_root=False)
    code = (
        f"import os\nos.kill(os.getpid(), 0)\nprint(len(open({__file__!r}).read()) > 0)\n"
        f"try: os.kill({os.getpid()}, 0)\nexcept PermissionError: print('refused')\n"
        "try: os.fork()\nexcept PermissionError: print('refused')"
    )
    limits = {"timeout_seconds": 20, "memory_bytes": 1 << 30, "file_bytes": 1 << 20, "processes": 8}
    assert sandbox._launch(code, "", measures, limits, 1 << 16) == Outcome("ok", "True\nrefused\nrefused\n", "")


def test_folders_without_rights_are_removed_too(any_measures):
    code = "import os\nos.makedirs('a/b'); os.mkdir('c', 0)\nopen('a/b/file', 'w').close()\nprint(os.getcwd())"
    folder = run(code).stdout.strip()
    assert folder.startswith("/tmp/sandbox-") and not os.path.exists(folder)


def test_the_whitelist_holds_libraries_and_not_the_places_around_them(monkeypatch, tmp_path):
    """An environment may lie in a project's folder, beside its data; and python may be a link to a link."""
    project = tmp_path / "project"
    (project / "bin").mkdir(parents=True)
    (project / "lib").mkdir()
    (project / "data").mkdir()
    (tmp_path / "current").symlink_to(sys.base_prefix)
    (project / "bin" / "python").symlink_to(tmp_path / "current" / "bin" / "python3")
    monkeypatch.setattr(sys, "prefix", str(project))
    places = sandbox.interpreter_places.__wrapped__(str(project / "bin" / "python"))
    links = {str(project / "bin/python"), str(tmp_path / "current/bin/python3")}
    assert {str(project / "bin"), str(project / "lib"), "/usr/lib", *links} <= set(places)
    private = (project, project / "data", ROOT, pathlib.Path.home(), pathlib.Path("/etc/passwd"), "/", "/usr", "/tmp")
    assert [str(place) for place in private if str(place) in places] == []
    assert [place for place in places if pathlib.Path(place) in ROOT.parents] == []


def test_an_interpreter_behind_links_is_found(tmp_path):
    """The interpreter is called by a link to a link, as version managers make them."""
    (tmp_path / "current").symlink_to(os.path.dirname(sys.executable))
    (tmp_path / "python").symlink_to(tmp_path / "current" / os.path.basename(sys.executable))
    program = "from grpo.workers.sandbox.run import run_python as run\n"
    program += "print(run('print(42)', timeout_seconds=20, memory_gib=1))"
    result = subprocess.run(
        [str(tmp_path / "python"), "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "stdout='42\\n'" in result.stdout, result.stderr
