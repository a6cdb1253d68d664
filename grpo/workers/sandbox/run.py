"""Run a Python program that no person has read: what a policy wrote, to see whether it works.

Each program gets a fresh interpreter (`-I`: no user site, no PYTHON* variables) with an empty environment, its own
empty folder, and limits on wall clock, CPU time, address space, file size, open files, processes and output. Everything
it started ends with it, and it ends with whoever called. Wherever it runs,

- it has no network: no sockets of any family, also not those in folders or of a virtual machine's host;
- it calls no part of the kernel that programs do without (lockdown.py has the lists): no memory outside its address
  space, no keyrings, no further namespaces, no mounts, no tracing, no other process's limits or priority;
- it has no capability, and is another user than root, if it is root who calls: one who owns nothing and has not run
  before, so that a fork bomb is bounded and meets no other program's. One exception: where other users cannot
  read the interpreter, it keeps the capability to read, confined to the whitelist.

As far as the kernel grants it (`isolation()` says how far; it is tried out once, with a real program, and from then on
insisted upon) it also has

- no files but a whitelist: the interpreter with its packages, the system's libraries and its own folder, which alone it
  can write to. By Landlock (Linux 5.13), which works for any user and in containers, and where there are namespaces by
  a root folder that holds nothing else. A run whose programs lack both is refused (`reward.allow_weak_sandbox`).
- a process tree of its own, which nothing outlives, and in which it sees no other process: Linux namespaces, which root
  gets, others where the kernel lets users make them. Without, it may start threads but no processes.

What this does not stop: using `processes` times the memory, as limits are per process; filling a disk for a fifth of a
second where there are no namespaces, which is how often the program's folder is looked at; bugs of the kernel in the
calls that remain; side channels. Without namespaces it can also see whether a file of a known name exists, and how
large it is. For programs of somebody who studies the machine run the whole job in a container or virtual machine that
has nothing to lose.

Linux on x86_64 or aarch64, standard library only.
"""

import contextlib
import functools
import glob
import json
import os
import pathlib
import selectors
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Literal

from grpo.workers import lockdown
from grpo.workers.sandbox import launcher

# Seconds beyond a program's own that its launcher has for starting, cleaning up and reporting.
GRACE_SECONDS = 20

# Seconds that a program which prints 42 may take when measures are tried out: a loaded machine is slow, and slowness is
# no reason to do without a measure.
TRIAL_SECONDS = (10.0, 60.0)

_ROOT = pathlib.Path(__file__).parents[3]
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from grpo.workers.sandbox.launcher import main; main()"


class SandboxError(RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


class _Refused(SandboxError):
    """The kernel does not grant the measures that were asked for."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: Literal["ok", "failed", "timeout", "killed", "output"]
    """ok: exit code 0. failed: another one (so also an exception, MemoryError among them). timeout: wall clock or CPU
    time. killed: any other signal. output: it wrote more than allowed."""
    stdout: str
    """As UTF-8, what is not with replacement characters; what was read before it ended."""
    stderr: str


@dataclass(frozen=True)
class Measures:
    """What is added to limits and denied system calls."""

    namespaces: bool
    """Processes, network, IPC and mounts of its own."""
    own_root: bool
    """A root folder that holds nothing but the whitelist; only with namespaces."""
    landlock: bool
    leave_root: bool
    """Another user than root; for root only."""


@dataclass(frozen=True)
class Isolation:
    """What programs run under here."""

    measures: Measures
    user: bool
    """It does not run as root."""
    capability: bool
    """It keeps one capability, to read the interpreter, which is closed to other users than root."""

    @property
    def files(self) -> bool:
        """It can open nothing but the interpreter, system libraries and its own folder."""
        return self.measures.own_root or self.measures.landlock

    @property
    def process_tree(self) -> bool:
        """It sees no other process, and may start processes, which end with it."""
        return self.measures.namespaces

    @property
    def process_limit(self) -> bool:
        """The limit on processes and threads holds; the kernel exempts root."""
        return self.user

    @property
    def weakness(self) -> str | None:
        """Why it is below "no network, no files of the host"; None if it is not. The network is closed everywhere."""
        return None if self.files else "programs can open the files of this machine"

    def __str__(self) -> str:
        """One line for the start of a run."""
        by = [
            name for name, used in (("own root", self.measures.own_root), ("Landlock", self.measures.landlock)) if used
        ]
        files = (
            f"only its own and the interpreter's files ({', '.join(by)})" if by else "ALL FILES THAT ITS USER CAN OPEN"
        )
        tree = "its own processes only" if self.process_tree else "threads but no processes"
        user = "another user than root" if os.geteuid() == 0 and self.user else "this user" if self.user else "ROOT"
        capability = "one capability, to read the interpreter" if self.capability else "no capabilities"
        return f"sandbox of programs: no network, {files}, {tree}, {user}, {capability}, system calls filtered"


def run_python(
    code: str,
    stdin: str = "",
    *,
    timeout_seconds: float,
    memory_gib: float,
    output_bytes: int = 1 << 20,
    file_bytes: int = 64 << 20,
    processes: int = 16,
) -> Outcome:
    """Run `code` as a program of its own, with `stdin` to read.

    Returns after at most `timeout_seconds` of wall clock, plus starting (about 0.1 s) and, if something is very wrong,
    GRACE_SECONDS. memory_gib: address space of each of its processes. output_bytes: of stdout and of stderr, each.
    file_bytes: of one file, and of all files together. processes: with threads.

    Raises SandboxError if the program could not be run, or not with the measures that isolation() names.
    """
    limits = {
        "timeout_seconds": timeout_seconds,
        "memory_bytes": int(memory_gib * 2**30),
        "file_bytes": file_bytes,
        "processes": processes,
    }
    return _launch(code, stdin, _measures(), limits, output_bytes)


def isolation() -> Isolation:
    """What programs run under here; tried out at the first call, which takes up to a second.

    Raises SandboxError if no program can be run in a sandbox here.
    """
    measures = _measures()
    closed = _closed(sys.executable)
    needs_capability = closed["closed_files"] or (closed["closed_folders"] and not measures.own_root)
    leaves_root = os.geteuid() == 0 and measures.leave_root
    return Isolation(measures, os.geteuid() != 0 or leaves_root, bool(leaves_root and needs_capability))


def _attempts() -> list[Measures]:
    """Strongest first; the first that works here is used."""
    landlock, is_root = lockdown.offered().landlock >= 1, os.geteuid() == 0
    attempts = [Measures(True, True, landlock, is_root), Measures(True, False, landlock, is_root)]
    attempts += [Measures(False, False, landlock, is_root)]
    if is_root:  # in a container without any capability
        attempts += [Measures(True, True, landlock, False), Measures(False, False, landlock, False)]
    return attempts


@functools.cache
def _measures() -> Measures:
    if not lockdown.offered().seccomp:
        raise SandboxError(
            f"no Python program can be run in a sandbox here: no filter of system calls on {os.uname().machine}, Linux "
            f"{os.uname().release}; code_reward needs x86_64 or aarch64 and a kernel with seccomp"
        )
    refusals = []
    for measures in _attempts():
        try:
            _try_out(measures)
            return measures
        except _Refused as refusal:
            refusals.append(f"{measures}: {refusal}")
    raise SandboxError("no Python program can be run in a sandbox here; tried\n" + "\n".join(refusals))


def _try_out(measures: Measures) -> None:
    """Run a program under these measures. Only what the kernel refuses raises _Refused; slowness is given more time."""
    limits = {"memory_bytes": 1 << 30, "file_bytes": 1 << 20, "processes": 8}
    failure = ""
    for seconds in TRIAL_SECONDS:
        try:
            limits["timeout_seconds"] = seconds
            outcome = _launch("import json; print(6 * 7)", "", measures, limits, output_bytes=1 << 16)
        except _Refused:
            raise
        except SandboxError as error:
            failure = str(error)
            continue
        if outcome.stdout == "42\n":
            return
        failure = f"status {outcome.status}: {outcome.stderr.strip()[-500:]}"
    raise SandboxError(f"a program that prints 42 does not run in a sandbox here ({measures}): {failure}")


# ---------------------------------------------------------------------------------------------------------------------
# What a program may read


@functools.cache
def interpreter_places(executable: str) -> list[str]:
    """The whitelist: parts of the interpreter and its environments, and what the system's loader and libraries need.

    Confined reward processes may read it too (workers/confinement.py). Of a prefix only the folders of programs and
    libraries: an environment may have been made in a project's folder.
    """
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    hops = [executable]  # a virtual environment's python is a link, perhaps to another link
    while os.path.islink(hops[-1]) and len(hops) < 40:
        hops.append(os.path.normpath(os.path.join(os.path.dirname(hops[-1]), os.readlink(hops[-1]))))
    prefixes |= set(map(os.path.realpath, prefixes))
    parts = ("bin", "lib", "lib64", "pyvenv.cfg")
    places = {os.path.join(prefix, part) for prefix in prefixes for part in parts} | set(hops)
    places |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    places |= {"/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", *glob.glob("/etc/python3*")}
    for name in launcher.LOADER_VARIABLES:
        places |= {path for path in os.environ.get(name, "").split(":") if path.startswith("/")}
    places |= _mapped_libraries()
    return sorted(place for place in places if os.path.exists(place))


def _mapped_libraries() -> set[str]:
    """Those of this process, wherever they lie: on some systems not even libc is in the usual folders."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    return {path for path in paths if ".so" in os.path.basename(path) and os.path.isfile(path)}


@functools.cache
def _closed(executable: str) -> dict[str, str]:
    """A place of the interpreter that other users than root cannot read, and a folder on the way that they cannot
    enter; empty texts if there is none. Looks at the packages' folders, not at each of their files."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places = [*interpreter_places(executable), executable, *libraries]
    packages = [os.path.join(place, name) for place in libraries if os.path.isdir(place) for name in os.listdir(place)]
    files = [place for place in {*places, *packages} if os.path.exists(place) and not _open_to_all(place)]
    folders = {str(folder) for place in places for folder in pathlib.Path(os.path.realpath(place)).parents}
    closed = [folder for folder in folders if os.path.exists(folder) and not os.stat(folder).st_mode & stat.S_IXOTH]
    return {"closed_files": min(files, default=""), "closed_folders": min(closed, default="")}


def _open_to_all(path: str) -> bool:
    mode = os.stat(path).st_mode
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & wanted == wanted


# ---------------------------------------------------------------------------------------------------------------------
# Starting a program


def _launch(code: str, stdin: str, measures: Measures, limits: dict[str, Any], output_bytes: int) -> Outcome:
    folder = os.path.join("/tmp" if measures.own_root else tempfile.gettempdir(), f"sandbox-{os.urandom(8).hex()}")
    job = {
        "code": code,
        "stdin": stdin,
        "python": sys.executable,
        "readable": interpreter_places(sys.executable),
        "folder": folder,
        **vars(measures),
        **(_closed(sys.executable) if os.geteuid() == 0 else {"closed_files": "", "closed_folders": ""}),
        **limits,
    }
    job_fd = os.memfd_create("job")
    report_fd, launcher_report_fd = os.pipe()
    with os.fdopen(job_fd, "w+b") as job_file, os.fdopen(report_fd, "rb") as report:
        try:
            job_file.write(json.dumps(job).encode())
            job_file.seek(0)
            arguments = [str(_ROOT), str(os.getpid()), str(launcher_report_fd)]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP, *arguments],
                stdin=job_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={name: os.environ[name] for name in launcher.LOADER_VARIABLES if name in os.environ},
                pass_fds=(launcher_report_fd,),
                start_new_session=True,
            )
        finally:
            os.close(launcher_report_fd)
        start = time.monotonic()
        try:
            deadline = start + limits["timeout_seconds"] + GRACE_SECONDS
            written, reported, too_much = _read_all(process, report, output_bytes, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()
            if not measures.own_root and os.path.lexists(folder):  # the launcher was killed
                subprocess.run(launcher.removal(folder), stdin=subprocess.DEVNULL, check=False)
    stdout, stderr = (text.decode(errors="replace") for text in written)
    reports = [json.loads(line) for line in reported.splitlines()]
    for refusal in (report["refused"] for report in reports if "refused" in report):
        raise _Refused(refusal)
    errors = [error["error"] for error in reports if "error" in error]
    if errors or not reports:
        raise SandboxError(f"the launcher failed: {(errors or [stderr])[0].strip()[-2000:] or 'it said nothing'}")
    if too_much:
        return Outcome("output", stdout, stderr)
    return Outcome(_status(reports[-1], time.monotonic() - start < limits["timeout_seconds"]), stdout, stderr)


def _status(report: dict[str, Any], in_time: bool) -> str:
    if "exit" not in report:
        # Its own deadline, or it was still running when even the grace was over. Else its init was killed.
        return "killed" if in_time and "timeout" not in report else "timeout"
    code = report["exit"]
    if code == -signal.SIGXCPU:
        return "timeout"
    return "ok" if code == 0 else "failed" if code > 0 else "killed"


def _read_all(
    process: subprocess.Popen, report, output_bytes: int, deadline: float
) -> tuple[tuple[bytes, bytes], bytes, bool]:
    """(stdout, stderr), report, and whether one of the first was too long, whereupon the launcher is told to end it.

    Ends when the launcher has closed its report, which it does last.
    """
    written = {process.stdout: bytearray(), process.stderr: bytearray(), report: bytearray()}
    too_much = False
    with selectors.DefaultSelector() as selector:
        for pipe in written:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while report in selector.get_map() and (seconds_left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds_left):
                if not _read_some(key.fileobj, written[key.fileobj], output_bytes):
                    selector.unregister(key.fileobj)
                if not too_much and len(written[key.fileobj]) > output_bytes:
                    too_much = True
                    process.terminate()
        for pipe in (process.stdout, process.stderr):  # what is in the pipe now; a survivor could write forever
            _read_some(pipe, written[pipe], output_bytes)
    stdout, stderr, reported = (bytes(text) for text in written.values())
    too_much = too_much or max(len(stdout), len(stderr)) > output_bytes
    return (stdout[:output_bytes], stderr[:output_bytes]), reported, too_much


def _read_some(pipe, written: bytearray, output_bytes: int) -> bool:
    """Read what is there, at most what a pipe holds; past the limit it is thrown away. False at the end."""
    try:
        chunk = os.read(pipe.fileno(), 1 << 20)
    except BlockingIOError:
        return True
    written += chunk[: max(0, output_bytes + 1 - len(written))]
    return bool(chunk)
