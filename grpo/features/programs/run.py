"""Run a Python program that no person has read: what a policy wrote, to see whether it works.

Each is a child of its caller and runs under the lockdown (lockdown.py): a fresh interpreter (`-I`: no user site, no
PYTHON* variables) with an empty environment and limits on wall clock, CPU time, address space, threads and output.

A program makes and writes no files, neither on a disk nor in memory: the kernel bounds the size of a file, but not how
many there are, and whoever looks at what a program holds can be deceived. `open(.., "w")` raises PermissionError, and
`tempfile` finds no folder. REASON then stands in stderr.

What this does not stop: using the memory limit in several programs at once; `stat` of a known name; bugs of the kernel
in the calls that remain; side channels. If somebody who studies the machine writes programs, run the whole job in a
container or virtual machine that has nothing to lose.

Call it from a small process, such as a worker, because it forks. Linux on x86_64 or aarch64, standard library only.
"""

import contextlib
import functools
import glob
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.workers import kernel, lockdown, processes
from grpo.workers.worker import Lost

# All that a program finds in its environment besides what the loader needs: BLAS with one thread, not one per core
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# What a program with one of these errors reads
REFUSALS = ("PermissionError", "No usable temporary directory")
REASON = "Programs here cannot make or change files, start processes or use the network.\n"
# For the program that shows at the start of a run that programs run; a loaded machine is slow
TRIAL_SECONDS = 60.0


class ProgramError(Lost):
    """The program could not be run, which says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: Literal["ok", "failed", "timeout", "killed", "output"]
    """ok: exit code 0. failed: another exit code, such as after an exception, MemoryError included. timeout: wall clock
    or CPU time. killed: another signal. output: it wrote more than allowed."""
    stdout: str
    """What was read before it ended. Bytes that are not UTF-8 become replacement characters."""
    stderr: str


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    timeout_seconds: float
    """Wall clock, including the start of its interpreter. Its CPU time may be a second more."""
    memory_gib: float
    """Address space."""
    output_bytes: int = 1 << 20
    """Each of stdout and stderr."""
    threads: int = 16


def check_programs(allow_without_landlock: bool) -> str:
    """Try out a program that prints 42, and return one line on what programs run under here.

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
    # in a process of its own, since the caller may be large and have threads
    command = [sys.executable, "-m", "grpo.features.programs.run"]
    trial = subprocess.run(command, cwd=processes.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if trial.stdout != "42\n":
        output = (trial.stdout + trial.stderr).strip()
        raise ValueError(f"a program that prints 42 does not run here: {output[-2000:]}")
    files = "ALL FILES OF ITS USER"
    if version:
        files = f"only the interpreter's files, to read (Landlock {version})"
    return f"programs run with: no network, {files}, threads but no processes, few system calls"


def run_python(code: str, stdin: str, limits: Limits) -> Outcome:
    """Run `code` as a program of its own, with `stdin` to read. Returns when it has ended and its folder is gone.

    It dies with the calling thread. Raises ProgramError if it could not be run.
    """
    deadline = time.monotonic() + limits.timeout_seconds
    lockdown.interpreter_paths()  # looked up once, and not after each fork
    environment = dict(ENVIRONMENT)
    if lockdown.LOADER_VARIABLE in os.environ:
        environment[lockdown.LOADER_VARIABLE] = os.environ[lockdown.LOADER_VARIABLE]
    stderr, their_stderr = map(os.fdopen, os.pipe(), ("rb", "wb"))  # a program that cannot be run says there why
    with stderr, their_stderr, tempfile.TemporaryDirectory(prefix="program-") as folder:
        for name, text in (("program.py", code), ("stdin", stdin)):
            Path(folder, name).write_bytes(text.encode(errors="surrogatepass"))
        try:
            with open(f"{folder}/stdin", "rb") as their_stdin:
                os.unlink(their_stdin.name)
                program = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-X", "utf8", "program.py"],
                    stdin=their_stdin,
                    stdout=subprocess.PIPE,
                    stderr=their_stderr,
                    cwd=folder,
                    env=environment,
                    umask=0o022,
                    start_new_session=True,
                    preexec_fn=functools.partial(_lock, folder, limits, os.getpid()),
                )
        except subprocess.SubprocessError:
            their_stderr.close()
            raise ProgramError(stderr.read().decode(errors="replace").strip()[-2000:]) from None
        their_stderr.close()
        with program:
            written = {program.stdout.fileno(): bytearray(), stderr.fileno(): bytearray()}
            try:
                status = _watch(program, written, limits, deadline)
            finally:
                program.kill()
    if status is None:
        by_code = {0: "ok", -signal.SIGXCPU: "timeout"}
        status = by_code.get(program.returncode, "failed" if program.returncode > 0 else "killed")
    texts = [text.decode(errors="replace")[: limits.output_bytes] for text in written.values()]
    if status == "failed" and any(refusal in texts[1] for refusal in REFUSALS):
        texts[1] += REASON
    return Outcome(status, *texts)


def _watch(
    program: subprocess.Popen,
    written: dict[int, bytearray],
    limits: Limits,
    deadline: float,
) -> Literal["timeout", "output"] | None:
    """Read from the pipes until the program has ended, which is None, or must be ended, with the status returned."""
    with selectors.DefaultSelector() as selector:
        for pipe in written:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                text = written[key.fd]
                chunk = os.read(key.fd, 1 << 16)
                text += chunk[: limits.output_bytes + 1 - len(text)]
                if not chunk:
                    selector.unregister(key.fd)
                elif len(text) > limits.output_bytes:
                    return "output"
    # It is ending, or has closed its streams and goes on. If the caller ignores its children, this raises an OSError,
    # and Popen.wait would return a success.
    while not os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() >= deadline:
            return "timeout"
        time.sleep(0.001)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Between fork and exec


def _lock(folder: str, limits: Limits, caller: int) -> None:
    """Take from the calling process, for good, what a program does not need. An exception is also printed."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)  # what the caller ignores would stay ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this goes, and not a rank
        threads = limits.threads + _num_other_tasks()
        lockdown.lock((*lockdown.interpreter_paths(), folder), DEVICES, caller)
        cpu_seconds = int(limits.timeout_seconds) + 1
        lower = processes.lower_limit
        lower(resource.RLIMIT_CORE, 0)
        lower(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)  # SIGXCPU, then SIGKILL
        lower(resource.RLIMIT_FSIZE, 0)  # also where a kernel lacks Landlock
        lower(resource.RLIMIT_NOFILE, 64)
        lower(resource.RLIMIT_NPROC, threads)
        # last, since the caller may be larger than its programs may be
        lower(resource.RLIMIT_AS, int(limits.memory_gib * 2**30))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise


def _num_other_tasks() -> int:
    """Count the tasks that share the limit on threads with a program: all of its user's."""
    if lockdown.new_user() is not None:
        return 0  # the user is new
    count = -1  # this process is the program
    for status in glob.glob("/proc/[0-9]*/status"):
        with contextlib.suppress(OSError), open(status) as file:  # it may have ended
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
            if fields["Uid"].split()[0] == str(os.geteuid()):
                count += int(fields["Threads"])
    return count


if __name__ == "__main__":
    trial_limits = Limits(timeout_seconds=TRIAL_SECONDS, memory_gib=1.0)
    outcome = run_python("print(6 * 7)", "", trial_limits)
    print(outcome.stdout if outcome.stdout == "42\n" else outcome, end="")
