"""Run a Python program that no person has read: what a policy wrote, to see whether it works.

Each is a child of its caller, under the one lockdown (lockdown.py) from between fork and exec on: a fresh interpreter
(`-I`: no user site, no PYTHON* variables) with an empty environment, its own empty folder, and limits on wall clock,
CPU time, address space, file size, open files, threads and output.

What this does not stop: using the memory limit in several programs at once; filling a disk until its folder is looked
at again (LOOK_SECONDS); `stat` of a known name; bugs of the kernel in the calls that remain; side channels. If somebody
who studies the machine writes programs, run the whole job in a container or virtual machine that has nothing to lose.

Call it from a small process, such as a worker: it forks. Linux on x86_64 or aarch64, standard library only.
"""

import contextlib
import os
import resource
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Literal

from grpo.workers import kernel, lockdown, processes

# All that a program finds in its environment besides what the loader needs: BLAS with one thread, not one per core.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Files and folders that a program may make; they are looked at this often, in seconds.
MAX_FILES, LOOK_SECONDS = 4096, 0.2
# For the program that shows at the start of a run that programs run: a loaded machine is slow.
TRIAL_SECONDS = 60.0


class ProgramError(RuntimeError):
    """The program could not be run; this says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: Literal["ok", "failed", "timeout", "killed", "output"]
    """ok: exit code 0. failed: another one (so also an exception, MemoryError among them). timeout: wall clock or CPU
    time. killed: any other signal, or too many files. output: it wrote more than allowed."""
    stdout: str
    """As UTF-8, what is not with replacement characters; what was read before it ended."""
    stderr: str


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    timeout_seconds: float
    """Wall clock, the start of its interpreter included; CPU time a second more."""
    memory_gib: float
    """Address space."""
    output_bytes: int = 1 << 20
    """Of stdout and of stderr, each."""
    file_bytes: int = 64 << 20
    """Of one file, and of all files together."""
    threads: int = 16


def check_programs(allow_without_landlock: bool) -> str:
    """One line on what programs run under here, tried out with one that prints 42.

    Raises ValueError if none can be run, or only without Landlock and that is not allowed.
    """
    release = f"Linux {os.uname().release}"
    if not kernel.can_deny_calls():
        raise ValueError(
            f"no program can be run here: {release} on {os.uname().machine} filters no system calls; they need "
            "x86_64 or aarch64 and a kernel with seccomp"
        )
    version = lockdown.landlock_version()
    if not version and not allow_without_landlock:
        raise ValueError(
            f"programs (code_reward, the tool python) could open the files of this machine, because {release} has or "
            "allows no Landlock (version 0 and not at least 1, of Linux 5.13); use another kernel or container or, if "
            "nothing here must stay private, set --reward.allow-without-landlock"
        )
    # In a process of its own, since the caller may be large and have threads.
    command = [sys.executable, "-m", "grpo.workers.programs"]
    trial = subprocess.run(command, cwd=processes.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if trial.stdout != "42\n":
        raise ValueError(f"a program that prints 42 does not run here: {(trial.stdout + trial.stderr).strip()[-2000:]}")
    files = f"only its own and the interpreter's files (Landlock {version})" if version else "ALL FILES OF ITS USER"
    other, _ = lockdown.identity()
    another = "another user than root with the capability to read"
    user = "this user" if os.geteuid() else "ROOT WITHOUT CAPABILITIES" if other is None else another
    return f"programs run with: no network, {files}, threads but no processes, few system calls, {user}"


def run_python(code: str, stdin: str, limits: Limits) -> Outcome:
    """Run `code` as a program of its own, with `stdin` to read; returns when it has ended and its folder is gone.

    It dies with the calling thread. Raises ProgramError if it could not be run.
    """
    deadline = time.monotonic() + limits.timeout_seconds
    folder = tempfile.mkdtemp(prefix="program-")
    lockdown.interpreter_places()  # looked up once, and not after each fork
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, and why it could not be run
    caller, program = os.getpid(), os.fork()
    if program == 0:
        try:
            _become_program(code, stdin, limits, folder, caller, [end for _, end in pipes])
        except BaseException:
            os.write(pipes[2][1], traceback.format_exc().encode())
        finally:
            os._exit(1)
    for _, end in pipes:
        os.close(end)
    written = {pipe: bytearray() for pipe, _ in pipes}
    try:
        status = _watch(program, written, folder, limits, deadline)
    finally:
        os.kill(program, signal.SIGKILL)  # it may have ended, but was not waited for
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        for pipe in written:
            while _read_some(pipe, written[pipe], limits.output_bytes):
                pass  # what it wrote to the last
            os.close(pipe)
        processes.remove(folder)
    stdout, stderr, failure = (text.decode(errors="replace") for text in written.values())
    if failure:
        raise ProgramError(failure.strip()[-2000:])
    how = "failed" if code > 0 else {0: "ok", -signal.SIGXCPU: "timeout"}.get(code, "killed")
    return Outcome(status or how, stdout[: limits.output_bytes], stderr[: limits.output_bytes])


def _watch(program: int, written: dict[int, bytearray], folder: str, limits: Limits, deadline: float) -> str | None:
    """Read from the pipes until the program has ended (None) or is to be ended: how."""
    look_at = time.monotonic() + LOOK_SECONDS
    with selectors.DefaultSelector() as selector:
        for pipe in written:
            selector.register(pipe, selectors.EVENT_READ)
        while (now := time.monotonic()) < deadline:
            if now >= look_at:
                if _holds_too_much(program, folder, limits.file_bytes):
                    return "killed"
                look_at = time.monotonic() + LOOK_SECONDS  # a look may take longer than that
            elif selector.get_map():
                for key, _ in selector.select(min(deadline, look_at) - now):
                    if not _read_some(key.fd, written[key.fd], limits.output_bytes):
                        selector.unregister(key.fd)
                if max(map(len, written.values())) > limits.output_bytes:
                    return "output"
            elif os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return None
            else:
                time.sleep(0.001)  # it is ending, or has closed its streams and goes on
    return "timeout"


def _read_some(pipe: int, written: bytearray, output_bytes: int) -> bool:
    """Read what is there; a character beyond the limit the rest is thrown away. False at the end."""
    chunk = os.read(pipe, 1 << 16)
    written += chunk[: max(0, output_bytes + 1 - len(written))]
    return bool(chunk)


def _holds_too_much(program: int, folder: str, file_bytes: int) -> bool:
    """More than `file_bytes` or MAX_FILES in all, or what cannot be counted: hidden, or deeper than a path can say.

    Open files without a name count too, where the caller may see them.
    """
    size, count, places, disk = 0, 0, [folder], os.stat(folder).st_dev
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{program}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{program}/fd/{name}")
                size += found.st_blocks * 512 if found.st_dev == disk and not found.st_nlink else 0
    while places:
        place = places.pop()
        try:
            found = os.lstat(place)
            size += found.st_blocks * 512
            if stat.S_ISDIR(found.st_mode):
                places += [f"{place}/{name}" for name in os.listdir(place)]
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed or replaced meanwhile
        except OSError:
            return True
        count += 1
        if size > file_bytes or count + len(places) > MAX_FILES:
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Between fork and exec


def _become_program(code: str, stdin: str, limits: Limits, folder: str, caller: int, outputs: list[int]) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # what the caller ignores would stay ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this goes, and not a rank
    os.chdir(folder)
    for name, text in (("program.py", code), ("stdin", stdin)):
        with open(name, "wb") as file:
            file.write(text.encode(errors="surrogatepass"))
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.unlink("stdin")
    for output, end in enumerate(outputs[:2], start=1):
        os.dup2(end, output)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != outputs[2]:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    lower = processes.lower_limit
    seconds, threads = int(limits.timeout_seconds) + 1, limits.threads + _num_other_tasks()
    environment = {name: os.environ[name] for name in lockdown.LOADER_VARIABLES if name in os.environ} | ENVIRONMENT
    lockdown.lock(lockdown.interpreter_places(), (folder, *DEVICES), caller)
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_CPU, seconds, seconds + 1)  # SIGXCPU, then SIGKILL
    lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    lower(resource.RLIMIT_NOFILE, 64)
    lower(resource.RLIMIT_NPROC, threads)
    # Last, since the caller may be larger than its programs may be.
    lower(resource.RLIMIT_AS, int(limits.memory_gib * 2**30))
    os.execve(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", "program.py"], environment)


def _num_other_tasks() -> int:
    """Tasks that the limit on threads counts with the program's: all of its user."""
    user, _ = lockdown.identity()
    if user not in (None, lockdown.NOBODY):
        return 0  # it has not run before
    user, count = os.geteuid() if user is None else user, 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        if int(process) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{process}/status") as status:  # it may have ended
                fields = dict(line.split(":", 1) for line in status)
                count += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return count


if __name__ == "__main__":
    outcome = run_python("print(6 * 7)", "", Limits(timeout_seconds=TRIAL_SECONDS, memory_gib=1.0))
    print(outcome.stdout if outcome.stdout == "42\n" else outcome, end="")
