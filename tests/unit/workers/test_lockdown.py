"""What a process gives up, measure by measure, tried by one that gave it up, each time beside one that did not.

The whole lockdown under attack: test_lockdown_attacks.py.
"""

import subprocess
import sys

import pytest

from grpo.workers import kernel
from tests import ROOT

TEMPORARY = "import tempfile; f = tempfile.NamedTemporaryFile(); "

seccomp = pytest.mark.skipif(not kernel.can_deny_calls(), reason="this kernel has no seccomp filters")


def attempt(lock: str, code: str) -> str:
    """`code` after `lock`, in a fresh interpreter without site-packages: "done" or the name of its OSError."""
    program = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "import ctypes, os, signal, socket\n"
        "from grpo.workers import kernel, lockdown\n"
        f"{lock}\n"
        f"try:\n    {code}\n    print('done')\nexcept OSError as error: print(type(error).__name__)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return result.stdout.strip() or f"code {result.returncode}: {result.stderr[-300:]}"


HARMLESS = """
import fcntl, resource, threading
socket.socketpair(type=socket.SOCK_STREAM | 0o4000)
resource.getrlimit(7)
os.sched_setaffinity(0, {0})
os.nice(0)
fcntl.fcntl(0, fcntl.F_GETFL)
os.stat(".")
thread = threading.Thread(target=print)
thread.start()
thread.join()
signal.raise_signal(signal.SIGCHLD)
os.execv("/bin/echo", ["echo", "done"])
"""


@seccomp
def test_harmless_uses_of_denied_calls_remain():
    assert attempt("kernel.deny_calls()", HARMLESS.replace("\n", "\n    ")).endswith("done")


@seccomp
@pytest.mark.parametrize(
    ("code", "still"),
    [
        ("socket.socket()", "socket.socketpair()"),
        ("os.kill(os.getppid(), 0)", "os.kill(os.getpid(), 0)"),
        (f"{TEMPORARY}os.open(f.name, os.O_TRUNC)", f"{TEMPORARY}os.open(f.name, os.O_TRUNC | os.O_WRONLY)"),
        (f"{TEMPORARY}os.open(f.name, os.O_TRUNC | 3)", f"{TEMPORARY}open(f.name, 'w')"),
    ],
)
def test_what_newer_versions_of_landlock_refuse_is_denied_without_them(code, still):
    lock = "kernel.deny_calls()"
    assert attempt("", code) == "done"
    assert attempt(lock, code) == "PermissionError"
    assert attempt(lock, still).endswith("done")
