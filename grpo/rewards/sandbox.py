"""Run a Python program that no person has read: what a policy wrote, to see whether it works.

Each program gets a fresh interpreter (`-I`: no user site, no PYTHON* variables) with an empty environment, its own
empty folder, and limits on wall clock, CPU time, address space, file size, open files, processes and output. Everything
it started ends with it, and it ends with whoever called. As far as the kernel grants it (`isolation()` says how far; it
is tried out once, with a real program, and from then on insisted upon) it also has

- no network, and a process tree of its own: it cannot see or signal other processes, nothing outlives it. Linux
  namespaces, which root gets, others where the kernel lets users make them.
- nothing on disk to write to, and less to read: all files are read-only; /tmp, /dev/shm, the home folder and the
  folder of the run are empty for it except for the interpreter; what it writes there lies in memory, capped, and is
  gone with it.
- another user than root, if it is root who calls: one that owns nothing and has not run before, so that a fork bomb is
  bounded and meets no other program's.

What this does not stop: reading files elsewhere that are open to all, or to the caller if that is the user it runs as;
connecting to sockets that lie in the file system; using `processes` times the memory, as limits are per process; bugs
of the kernel, all of whose system calls are allowed (no seccomp); side channels. Where isolation() lacks `files`, it
can write what its user can, and where it lacks `process_tree`, signal what its user can, so the run itself if it is of
the same user. This is for programs that do harm by accident or because it pays. For hostile ones run the whole job in a
container or virtual machine that has nothing to lose.

Linux only, standard library only. The file is also the launcher that run_python starts, which is what sets the
limits: in a process of its own, so that nothing runs between fork and exec in a caller that may have threads.
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import selectors
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal

# Seconds beyond a program's own that its launcher has for starting, cleaning up and reporting.
GRACE_SECONDS = 20

# What of the caller's environment the interpreter needs to start at all.
LOADER_VARIABLES = ("LD_LIBRARY_PATH",)
# All that a program finds in its environment on top of that: one thread per BLAS, so that importing numpy does not take
# as many threads, and address space for their stacks, as the machine has cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Measures beyond limits, strongest first; the first that works here is used. user: another one than root.
ATTEMPTS = (
    ("namespaces", "files", "user"),
    ("namespaces", "user"),
    ("user",),
    ("namespaces", "files"),
    ("namespaces",),
    (),
)


class SandboxError(RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: Literal["ok", "failed", "timeout", "killed", "output"]
    """ok: exit code 0. failed: another one (so also an exception, MemoryError among them). timeout: wall clock or CPU
    time. killed: any other signal. output: it wrote more than allowed."""
    stdout: str
    """As UTF-8, what is not with replacement characters; what was read before it ended."""
    stderr: str


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
    file_bytes: of one file, and of all files where they are in memory. processes: with threads.

    Raises SandboxError if the program could not be run, or not with the measures that isolation() names.
    """
    limits = {
        "timeout_seconds": timeout_seconds,
        "memory_bytes": int(memory_gib * 2**30),
        "file_bytes": file_bytes,
        "processes": processes,
    }
    return _launch(code, stdin, _measures(), limits, output_bytes)


def isolation() -> dict[str, bool]:
    """Which measures programs run under here; tried out at the first call, which takes up to a second.

    network: none. process_tree: its own, that ends with it. files: read-only, private folders hidden. user: it does not
    run as root. process_limit: it holds.
    """
    measures = _measures()
    user = "user" in measures or os.geteuid() != 0
    return {
        "network": "namespaces" in measures,
        "process_tree": "namespaces" in measures,
        "files": "files" in measures,
        "user": user,
        "process_limit": user,  # the kernel exempts root
    }


@functools.cache
def _measures() -> tuple[str, ...]:
    limits = {"timeout_seconds": 10.0, "memory_bytes": 1 << 30, "file_bytes": 1 << 20, "processes": 8}
    errors = []
    for measures in ATTEMPTS:
        if "user" in measures and os.geteuid() != 0:
            continue
        try:
            outcome = _launch("import json; print(6 * 7)", "", measures, limits, output_bytes=1 << 16)
        except SandboxError as error:
            errors.append(f"{measures}: {error}")
            continue
        if outcome.stdout == "42\n":
            return measures
        errors.append(f"{measures}: {outcome}")
    raise SandboxError("no Python program can be run in a sandbox here; tried\n" + "\n".join(errors))


def _launch(code: str, stdin: str, measures: tuple[str, ...], limits: dict[str, Any], output_bytes: int) -> Outcome:
    needed = {sys.prefix, sys.base_prefix, os.path.dirname(sys.executable)}
    job = {
        "code": code,
        "stdin": stdin,
        "measures": measures,
        "limits": limits,
        "python": sys.executable,
        "needed": sorted(needed | set(map(os.path.realpath, needed))),
        "hidden": _private_folders(),
    }
    job_fd = os.memfd_create("job")
    report_fd, launcher_report_fd = os.pipe()
    with os.fdopen(job_fd, "w+b") as job_file, os.fdopen(report_fd, "rb") as report:
        try:
            job_file.write(json.dumps(job).encode())
            job_file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", __file__, str(os.getpid()), str(launcher_report_fd)],
                stdin=job_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ},
                pass_fds=(launcher_report_fd,),
                start_new_session=True,
            )
        finally:
            os.close(launcher_report_fd)
        try:
            deadline = time.monotonic() + limits["timeout_seconds"] + GRACE_SECONDS
            written, reported, too_much = _read_all(process, report, output_bytes, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()
    stdout, stderr = (text.decode(errors="replace") for text in written)
    reports = [json.loads(line) for line in reported.splitlines()]
    errors = [error["error"] for error in reports if "error" in error]
    if errors or not reports:
        raise SandboxError(f"the launcher failed: {(errors or [stderr])[0].strip()[-2000:] or 'it said nothing'}")
    return Outcome("output" if too_much else _status(reports[-1]), stdout, stderr)


def _status(report: dict[str, Any]) -> str:
    if "exit" not in report:
        return "timeout"  # its own, or it was still running when even the grace was over
    code = report["exit"]
    if code == -signal.SIGXCPU:
        return "timeout"
    return "ok" if code == 0 else "failed" if code > 0 else "killed"


def _private_folders() -> list[str]:
    folders = ["/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir()]
    # Outermost first; one inside another is gone with it.
    return sorted({os.path.realpath(folder) for folder in folders} - {"/"})


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


# ---------------------------------------------------------------------------------------------------------------------
# The launcher: what follows runs in the process that run_python starts
#
#   launcher  unshares, and waits; killed by its parent's death
#   init      process 1 of the namespace: hides files, starts the program, keeps the time, ends all that is left
#   program   limits, another user, exec
#
# Without namespaces launcher and init are one, and a subreaper: orphans of the program become its children.

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442  # same on all architectures
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18

# User and group ids of programs when root calls: this plus the launcher's process id, so that no two programs share
# one. The second is `nobody`, for where only a container's 65536 ids exist.
_FIRST_ID = 1 << 30
_NOBODY = 65534


def _libc(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> None:
    _libc("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (text.encode() for text in (source, target, kind))
    _libc("mount", *texts, ctypes.c_ulong(flags), options.encode())


def _launcher(parent: int, report_fd: int) -> None:
    os.set_inheritable(report_fd, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # what the caller ignores would stay ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        with open(0, "rb", closefd=False) as job_file:
            job = json.loads(job_file.read())
        job["id"] = _FIRST_ID + os.getpid()
        # One that may make namespaces as it is keeps root until the program starts; otherwise root is left first, as
        # what comes next works for any user.
        privileged = os.geteuid() == 0 and _try(_libc, "unshare", _NAMESPACES) if _wants(job, "namespaces") else False
        if _wants(job, "user") and not privileged:
            _leave_root(job)
        if _wants(job, "namespaces") and not privileged:
            _unshare_as_user()
        # Set here, since a change of user clears it. An init of no namespace must still clean up.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if _wants(job, "namespaces") else signal.SIGTERM)
        if os.getppid() != parent:
            return  # it died before it could be watched
        if _wants(job, "namespaces"):
            _as_init(job, report_fd)
        else:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            _init(job, report_fd, leave_root=False)
    except BaseException:
        _report(report_fd, error=traceback.format_exc())
        raise


def _wants(job: dict[str, Any], measure: str) -> bool:
    return measure in job["measures"]


def _try(function, *arguments) -> bool:
    try:
        function(*arguments)
    except OSError:
        return False
    return True


def _report(report_fd: int, **values: Any) -> None:
    os.write(report_fd, json.dumps(values).encode() + b"\n")


def _unshare_as_user() -> None:
    user, group = os.geteuid(), os.getegid()
    _prctl(_PR_SET_DUMPABLE, 1)  # after a change of user /proc/self would belong to root
    _libc("unshare", _CLONE_NEWUSER | _NAMESPACES)
    # Not 0 inside: a user with another number has no capabilities left after exec.
    for file, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{file}", "w") as written:
            written.write(text)


def _as_init(job: dict[str, Any], report_fd: int) -> None:
    # init notices by the pipe if this process died before its death signal was set.
    alive_fd, keep_fd = os.pipe()
    init = os.fork()
    if init:
        os.close(alive_fd)
        os.close(report_fd)  # so that its end is init's end
        os.waitpid(init, 0)
        os.close(keep_fd)
        return
    status = 1
    try:
        os.close(keep_fd)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.set_blocking(alive_fd, False)
        with contextlib.suppress(BlockingIOError):
            os.read(alive_fd, 1)
            os._exit(1)  # end of file
        _init(job, report_fd, leave_root=_wants(job, "user") and os.geteuid() == 0)
        status = 0
    except BaseException:
        _report(report_fd, error=traceback.format_exc())
    finally:
        os._exit(status)


def _init(job: dict[str, Any], report_fd: int, leave_root: bool) -> None:
    """Start the program and see it, and all that it started, end in time."""
    own_processes = _wants(job, "namespaces")
    if _wants(job, "files"):
        _hide_files(job)
    folder = tempfile.mkdtemp(prefix="sandbox-")
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _prctl(_PR_SET_DUMPABLE, 0)  # a program of the same user must not look into this process
    deadline = time.monotonic() + job["limits"]["timeout_seconds"]
    program = os.fork()
    if program == 0:
        try:
            _become_program(job, folder, leave_root)
        except BaseException:
            _report(report_fd, error=traceback.format_exc())
        finally:
            os._exit(1)
    _report(report_fd, started=True)
    status = None
    while status is None:
        received = signal.sigtimedwait(watched, max(0.0, deadline - time.monotonic()))
        if received is None or received.si_signo == signal.SIGTERM:
            break
        status = _reap(program)
    if own_processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of the namespace but this one
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()  # sooner or later orphans are this process's children
    else:
        _end_descendants()
    if not _wants(job, "files"):
        # Not shutil.rmtree, which a deep tree makes run out of its stack.
        os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', folder])
    if status is None:
        _report(report_fd, timeout=True)
    else:
        _report(report_fd, exit=os.waitstatus_to_exitcode(status))


def _reap(program: int) -> int | None:
    """Collect everything that ended; the program's wait status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                status = ended
            if pid == 0:
                break
    return status


def _end_descendants() -> None:
    # Killing a child makes its own children this process's, so this ends; what keeps forking is bounded by the limit on
    # processes, and by the deadline of whoever started this.
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for child in children.read().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


def _hide_files(job: dict[str, Any]) -> None:
    """Everything read-only, and empty file systems over folders that are none of the program's business, with the
    interpreter put back in."""
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    attributes = struct.pack("4Q", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    _libc("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    hidden = list(job["hidden"])
    if os.geteuid() == 0:
        # Folders on the way to the interpreter that only root may enter: replaced, everybody may.
        hidden += [folder for path in job["needed"] for folder in _closed_folders(path)]
    kept = {path: os.open(path, os.O_PATH) for path in job["needed"]}
    size = job["limits"]["file_bytes"]
    for folder in sorted(set(hidden)):
        if os.path.isdir(folder):
            mode = "1777" if folder in job["hidden"] else "755"
            _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=4096,mode={mode}")
    for path, fd in sorted(kept.items()):
        if not os.path.isdir(path) or not os.path.samestat(os.stat(path), os.stat(f"/proc/self/fd/{fd}")):
            os.makedirs(path, 0o755, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", path, "none", _MS_BIND | _MS_REC)
        os.close(fd)
    # Its own processes only; a container may forbid a new /proc, and the old one still names no more than numbers.
    _try(_mount, "proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _closed_folders(path: str) -> list[str]:
    folders = []
    while (path := os.path.dirname(path)) != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            folders.append(path)
    return folders


def _leave_root(job: dict[str, Any], *folders: str) -> None:
    """Become a user that owns `folders` and nothing else. PermissionError if that one cannot run the interpreter."""
    for number in (job["id"], _NOBODY):
        try:
            for folder in folders:
                os.chown(folder, number, number)
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            break
        except OSError:
            if number == _NOBODY:
                raise
    for path in (job["python"], os.__file__):
        if not os.access(path, os.R_OK):
            raise PermissionError(f"user {number} cannot read {path}")


def _become_program(job: dict[str, Any], folder: str, leave_root: bool) -> None:
    limits = job["limits"]
    os.setsid()
    os.chdir(folder)
    with open("program.py", "wb") as file:
        file.write(job["code"].encode(errors="surrogatepass"))
    stdin_fd = os.memfd_create("stdin")
    with os.fdopen(stdin_fd, "wb", closefd=False) as file:
        file.write(job["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin_fd, 0, os.SEEK_SET)
    os.dup2(stdin_fd, 0)
    own_user_namespace = os.geteuid() != 0 and _wants(job, "namespaces")
    if leave_root:
        _leave_root(job, folder)
    # The limit counts all processes of the user in its user namespace, so those that are not the program's come on top.
    if own_user_namespace:
        others = 2  # launcher and init
    elif os.geteuid() == job["id"]:
        others = 0 if leave_root else 1  # init, unless that has stayed root
    else:
        others = _num_tasks()
    seconds = int(limits["timeout_seconds"]) + 1
    for name, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_NPROC, limits["processes"] + others, limits["processes"] + others),
    ):
        _lower_limit(name, soft, hard)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # no sudo
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it, so it comes last
    environment = {name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ} | ENVIRONMENT
    os.execve(job["python"], [job["python"], "-I", "-B", "-X", "utf8", "program.py"], environment)


def _lower_limit(name: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(name)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(name, (soft, hard))


def _num_tasks() -> int:
    """Threads of all processes that can be seen."""
    count = 0
    for process in os.listdir("/proc"):
        if process.isdecimal():
            with contextlib.suppress(OSError):
                count += len(os.listdir(f"/proc/{process}/task"))
    return count


if __name__ == "__main__":
    _launcher(int(sys.argv[1]), int(sys.argv[2]))
