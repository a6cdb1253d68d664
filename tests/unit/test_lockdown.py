"""What a process gives up, tried out by a process that gave it up, each time beside one that did not."""

import os
import pathlib
import subprocess
import sys

import pytest

from grpo.workers import lockdown
from grpo.workers.lockdown import offered

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = [sys.base_prefix, sys.prefix, "/usr/lib", "/lib", "/lib64", str(ROOT / "grpo")]

landlock = pytest.mark.skipif(offered().landlock < 1, reason="this kernel has no Landlock")
seccomp = pytest.mark.skipif(not offered().seccomp, reason="this kernel has no seccomp filters")


def attempt(lock: str, code: str) -> str:
    """`code` after `lock`, in a fresh interpreter without site-packages: "done" or the name of its OSError."""
    program = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "import ctypes, os, signal, socket\n"
        "from grpo.workers import lockdown\n"
        f"{lock}\n"
        f"try:\n    {code}\n    print('done')\nexcept OSError as error: print(type(error).__name__)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return result.stdout.strip() or f"code {result.returncode}: {result.stderr[-300:]}"


@landlock
@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("open({own!r} + '/new', 'w').write('x')", True),
        ("os.mkdir({own!r} + '/d'); os.rename({own!r} + '/file', {own!r} + '/d/moved')", True),
        ("os.truncate({own!r} + '/file', 0)", True),
        ("open({read!r} + '/file').read()", True),
        ("os.listdir({read!r})", True),
        ("open({read!r} + '/file', 'a')", False),
        ("os.remove({read!r} + '/file')", False),
        ("os.rename({read!r} + '/file', {own!r} + '/taken')", False),
        ("os.link({other!r} + '/file', {own!r} + '/taken')", False),
        ("open({other!r} + '/file').read()", False),
        ("os.listdir({other!r})", False),
        ("os.symlink({other!r} + '/file', {own!r} + '/l'); open({own!r} + '/l').read()", False),
        ("os.execv('/bin/sh', ['sh', '-c', 'echo done'])", False),
        ("open('/proc/self/environ').read()", False),
    ],
)
def test_files_are_a_whitelist(tmp_path, code, allowed):
    folders = {name: str(tmp_path / name) for name in ("own", "read", "other")}
    for folder in folders.values():
        pathlib.Path(folder).mkdir()
        (pathlib.Path(folder) / "file").write_text("x")
    lock = f"lockdown.restrict_files({[*PYTHON, folders['read'], '/missing']!r}, [{folders['own']!r}])"
    code = code.format(**folders)
    # EXDEV is what Landlock says to a move between folders
    assert attempt(lock, code) in (["done"] if allowed else ["PermissionError", "OSError"])
    if not allowed:
        for path in (tmp_path / "own").iterdir():
            if path.name != "file":
                path.unlink()
        assert attempt("", code) == "done"


@landlock
def test_a_descriptor_names_a_place_as_well(tmp_path):
    (tmp_path / "file").write_text("x")
    lock = f"fd = os.open({str(tmp_path)!r}, os.O_PATH)\nlockdown.restrict_files([fd], ['/dev/null'])"
    assert attempt(lock, f"open({str(tmp_path / 'file')!r}).read(); open('/dev/null', 'w').write('x')") == "done"
    assert attempt(lock, f"open({str(tmp_path / 'file')!r}, 'w')") == "PermissionError"


@pytest.mark.skipif(offered().landlock < 6, reason="this kernel's Landlock is older than version 6")
def test_landlock_also_refuses_tcp_and_other_processes():
    lock = "parent = os.getppid()\nlockdown.restrict_files(['/'], ['/'])"
    tcp = "s = socket.socket(); s.bind(('127.0.0.1', 0))"
    assert (attempt("", tcp), attempt(lock, tcp)) == ("done", "PermissionError")
    signal = "os.kill(os.getppid(), 0)"
    assert (attempt("", signal), attempt(lock, signal)) == ("done", "PermissionError")
    assert attempt(lock, "os.kill(os.getpid(), 0)") == "done"


@seccomp
@pytest.mark.parametrize(
    ("name", "code", "still"),
    [
        ("NETWORK", "socket.socket()", "socket.socketpair()"),
        ("NETWORK", "socket.socketpair(type=socket.SOCK_DGRAM)", "socket.socketpair(type=socket.SOCK_STREAM | 0o4000)"),
        ("MEMORY", "os.memfd_create('x')", "bytes(1 << 20)"),
        ("PROCESSES", "import resource as r; r.prlimit(os.getppid(), 7)", "import resource as r; r.getrlimit(7)"),
        ("PROCESSES", "os.sched_setaffinity(os.getppid(), {0})", "os.sched_setaffinity(0, {0})"),
        ("PROCESSES", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 0)", "os.nice(0)"),
        ("PROCESSES", "os.pidfd_open(os.getppid())", "os.wait() if os.fork() else os._exit(0)"),
        ("PROCESSES", "import fcntl; fcntl.fcntl(0, 8, 0)", "import fcntl; fcntl.fcntl(0, fcntl.F_GETFL)"),
        ("METADATA", "os.chmod('.', os.stat('.').st_mode)", "os.stat('.')"),
        ("KERNEL", "lockdown.system_call(250, '', 0, -3, 1)", "os.uname()"),
    ],
)  # fmt: skip
def test_system_calls_are_denied_and_their_harmless_uses_not(name, code, still):
    if "system_call(" in code and os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    lock = f"lockdown.deny_calls(lockdown.{name})"
    assert attempt("", code) == "done"
    assert attempt(lock, code) == "PermissionError"
    assert attempt(lock, still) == "done"


@seccomp
def test_new_namespaces_are_denied_and_threads_are_not():
    lock = "lockdown.deny_calls(lockdown.NAMESPACES)"
    assert attempt(lock, "lockdown.libc('unshare', 0x10000000)") == "PermissionError"
    assert attempt(lock, "lockdown.system_call(56, 'clone', 0x10000011, 0, 0, 0, 0)") == "PermissionError"
    assert attempt(lock, "import threading; t = threading.Thread(target=print); t.start(); t.join()") == "done"
    assert attempt(lock, "import subprocess; subprocess.run(['/bin/true'], check=True)") == "done"


@seccomp
def test_signals_may_be_kept_to_the_process_itself():
    lock = "lockdown.deny_calls(lockdown.others_signals(os.getpid()))"
    assert attempt(lock, "os.kill(os.getppid(), 0)") == "PermissionError"
    assert attempt(lock, "os.kill(os.getpid(), 0); signal.raise_signal(signal.SIGCHLD)") == "done"


def test_capabilities_are_gone_for_good():
    status = "print(*[l for l in open('/proc/self/status') if l.startswith(('Cap', 'NoNew'))], sep='')"
    assert "done" in attempt("", status)
    words = attempt("lockdown.drop_capabilities()", status).split()
    sets = dict(zip(words[::2], words[1::2], strict=False))
    zeros = dict.fromkeys(("CapInh:", "CapPrm:", "CapEff:", "CapAmb:"), "0" * 16)
    assert sets | zeros == sets and sets["NoNewPrivs:"] == "1"
    assert attempt("lockdown.drop_capabilities()", "os.setgroups([0])") == "PermissionError"


@pytest.mark.skipif(not lockdown.permitted_capabilities() >> 2 & 1, reason="there is no such capability to keep")
def test_one_capability_may_be_kept_by_another_user(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o600)
    leave = "lockdown.prctl(lockdown.PR_SET_KEEPCAPS, 1); os.setresuid(65534, 65534, 65534)\n"
    read, write = f"open({str(tmp_path / 'file')!r})", f"open({str(tmp_path / 'file')!r}, 'w')"
    assert attempt(leave + "lockdown.drop_capabilities()", read) == "PermissionError"
    keep = leave + "lockdown.drop_capabilities([lockdown.CAP_DAC_READ_SEARCH])"
    assert (attempt(keep, read), attempt(keep, write)) == ("done", "PermissionError")
