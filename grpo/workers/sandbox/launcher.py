"""The process that run_python starts for each program: it sets the program's limits and sees it end.

    python -I -S -B -c "..." FOLDER PARENT REPORT_FD    (run.py starts it; the job, JSON, is its stdin)

    launcher  makes namespaces and waits; the kernel kills it when its parent dies
    init      process 1 of the PID namespace: makes its root, starts the program, keeps the time, ends what is left
    program   gives up everything (lockdown.py), another user, exec

Whoever of the three is killed, no program is left: the death of each is a signal to the next, and with process 1 the
kernel ends the whole namespace. Where there are no namespaces, launcher and init are one, and the program may start
threads but no processes: then it is all there is to end.

A process of its own, so that nothing runs between fork and exec in a caller that may have threads. It reports in lines
of JSON: `refused` (a measure, by the kernel: another choice of measures may work), `error` (anything else), `started`,
and at the end `exit` or `timeout`.

Standard library only, and few modules of it: starting is what most programs cost.
"""

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import stat
import sys
import time
import traceback
from typing import Any

from grpo.workers import lockdown
from grpo.workers.sandbox.fresh_root import DEVICES, MAX_FILES, enter_fresh_root

# What of the caller's environment the interpreter needs to start at all.
LOADER_VARIABLES = ("LD_LIBRARY_PATH",)
# All that a program finds in its environment on top of that: one thread per BLAS, so that importing numpy does not take
# as many threads, and address space for their stacks, as the machine has cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# A kernel that says this says no, and will say so again. Anything else (EAGAIN, ENOMEM, ...) may be for now.
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)
# No further namespace: for now, unless none is allowed at all.
_TOO_MANY = (errno.ENOSPC, errno.EUSERS)

# Where no file system of its own limits what a program writes, its folder is looked at this often, in seconds.
LOOK_SECONDS = 0.2

# User and group ids of programs when root calls: this plus the launcher's process id, so that no two programs share
# one. The second is `nobody`, for where only a container's 65536 ids exist.
_FIRST_ID = 1 << 30
_NOBODY = 65534

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET


class Refused(Exception):
    """The kernel does not grant a measure."""


def main() -> None:
    """The launcher: FOLDER (for imports), PARENT (its process id) and REPORT_FD are its arguments."""
    parent, report_fd = int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(report_fd, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # what the caller ignores would stay ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)  # what is made on the way to the interpreter must be open to the program's user
    with _reporting(report_fd):
        with open(0, "rb", closefd=False) as job_file:
            job = json.loads(job_file.read())
        job["id"] = _free_user()
        if job["namespaces"]:
            with _may_be_refused("namespaces"):
                _make_namespaces(job)
        # Set here, since a change of user clears it. Without namespaces this process must still end the program.
        lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL if job["namespaces"] else signal.SIGTERM)
        if os.getppid() != parent:
            return  # it died before it could be watched
        if job["namespaces"]:
            _fork_init(job, report_fd)
        else:
            _init(job, report_fd)


@contextlib.contextmanager
def _reporting(report_fd: int):
    """Whatever goes wrong inside ends this process, and the caller learns of it."""
    try:
        yield
    except Refused as refusal:
        _report(report_fd, refused=str(refusal))
        os._exit(1)
    except BaseException:
        _report(report_fd, error=traceback.format_exc())
        os._exit(1)


@contextlib.contextmanager
def _may_be_refused(what: str):
    try:
        yield
    except OSError as error:
        if error.errno in REFUSALS or (error.errno in _TOO_MANY and _no_namespaces_allowed()):
            raise Refused(f"{what}: {error.strerror}") from error
        raise


def _no_namespaces_allowed() -> bool:
    for kind in ("user", "mnt", "pid", "net", "ipc"):
        with contextlib.suppress(OSError), open(f"/proc/sys/user/max_{kind}_namespaces") as limit:
            if int(limit.read()) == 0:
                return True
    return False


def _report(report_fd: int, **values: Any) -> None:
    os.write(report_fd, json.dumps(values).encode() + b"\n")


def _make_namespaces(job: dict[str, Any]) -> None:
    """With root's power if there is any; otherwise as another user, since that works for any user."""
    if os.geteuid() == 0:
        try:
            lockdown.libc("unshare", _NAMESPACES)
            return
        except OSError:
            _change_user(job["id"])
            _check_readable(job)
    user, group = os.geteuid(), os.getegid()
    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 1)  # after a change of user /proc/self would belong to root
    lockdown.libc("unshare", _CLONE_NEWUSER | _NAMESPACES)
    # Not 0 inside: a user with another number has no capabilities left after exec.
    for file, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{file}", "w") as written:
            written.write(text)


def _fork_init(job: dict[str, Any], report_fd: int) -> None:
    # init notices by the pipe if this process died before its death signal was set.
    alive_fd, keep_fd = os.pipe()
    init = os.fork()
    if init:
        os.close(alive_fd)
        os.close(report_fd)  # so that its end is init's end
        os.waitpid(init, 0)
        os.close(keep_fd)
        return
    with _reporting(report_fd):
        os.close(keep_fd)
        lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.set_blocking(alive_fd, False)
        with contextlib.suppress(BlockingIOError):
            os.read(alive_fd, 1)
            os._exit(1)  # end of file
        _init(job, report_fd)
    os._exit(0)


def _init(job: dict[str, Any], report_fd: int) -> None:
    """Start the program and see it, and all that it started, end in time."""
    if job["own_root"]:
        with _may_be_refused("a root folder of its own"):
            enter_fresh_root(job["readable"], job["file_bytes"])
    folder = job["folder"]
    os.mkdir(folder, 0o700)
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 0)  # a program of the same user must not look into this process
    deadline = time.monotonic() + job["timeout_seconds"]
    init = os.getpid()
    _report(report_fd, started=True)
    program = os.fork()
    if program == 0:
        with _reporting(report_fd):
            _become_program(job, folder, init)
    status = None
    while status is None:
        seconds_left = max(0.0, deadline - time.monotonic())
        seconds = seconds_left if job["own_root"] else min(seconds_left, LOOK_SECONDS)
        received = signal.sigtimedwait(watched, seconds)
        if received is None and seconds < seconds_left:
            if _has_too_many_files(folder, job["file_bytes"]):
                os.kill(program, signal.SIGKILL)
        elif received is None or received.si_signo == signal.SIGTERM:
            break
        else:
            status = _reap(program)
    if job["namespaces"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of the namespace but this one
    elif status is None:
        os.kill(program, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # sooner or later orphans are this process's children
    if not job["own_root"]:
        command = removal(folder)
        os.spawnv(os.P_WAIT, command[0], command)
    if status is None:
        _report(report_fd, timeout=True)
    else:
        _report(report_fd, exit=os.waitstatus_to_exitcode(status))


def removal(folder: str) -> list[str]:
    """Command that removes a program's folder, whatever it left there."""
    # Not shutil.rmtree, which a deep tree makes run out of its stack. Folders may have been made without rights.
    return ["/bin/sh", "-c", 'rm -rf "$0" 2>/dev/null || { chmod -R u+rwX "$0"; rm -rf "$0"; }', folder]


def _has_too_many_files(folder: str, file_bytes: int) -> bool:
    """More than `file_bytes` or MAX_FILES in all, or what cannot be counted: hidden, or deeper than a path can say."""
    size = count = 0
    places = [folder]
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


# ---------------------------------------------------------------------------------------------------------------------
# The program


def _become_program(job: dict[str, Any], folder: str, init: int) -> None:
    os.setsid()
    os.chdir(folder)
    with open("program.py", "wb") as file:
        file.write(job["code"].encode(errors="surrogatepass"))
    _replace_stdin(job["stdin"].encode(errors="surrogatepass"))
    environment = {name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ} | ENVIRONMENT
    others = _num_other_tasks(job)
    if job["landlock"]:
        # The fresh root is a whitelist itself.
        lockdown.restrict_files(["/"] if job["own_root"] else job["readable"], [folder, *DEVICES])
    kept = []
    if job["leave_root"] and os.geteuid() == 0:
        kept = _leave_root(job, folder)
    lockdown.drop_capabilities(kept)
    seconds = int(job["timeout_seconds"]) + 1
    for name, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_AS, job["memory_bytes"], job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"], job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_NPROC, job["processes"] + others, job["processes"] + others),
    ):
        _lower_limit(name, soft, hard)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # A change of user clears it, so it comes late.
    lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != init:
        os._exit(1)
    lockdown.deny_calls(*_denied(job))
    os.execve(job["python"], [job["python"], "-I", "-B", "-X", "utf8", "program.py"], environment)


def _denied(job: dict[str, Any]) -> list[lockdown.Calls]:
    denied = [lockdown.NETWORK, lockdown.MEMORY, lockdown.NAMESPACES, lockdown.PROCESSES, lockdown.KERNEL]
    denied += [lockdown.METADATA, lockdown.TRUNCATION, lockdown.PARENT_DEATH]
    if not job["namespaces"]:
        denied += [lockdown.NEW_PROCESSES]
        if not job["landlock"] or lockdown.offered().landlock < 6:
            denied += [lockdown.others_signals(os.getpid())]
    return denied


def _replace_stdin(content: bytes) -> None:
    # Sealed: the program can neither make it grow, which no limit on memory would count, nor change it.
    fd = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)


def _num_other_tasks(job: dict[str, Any]) -> int:
    """Tasks that the limit on processes counts with the program's: all of its user, in its user namespace."""
    user = os.geteuid()
    if user == 0 and job["leave_root"]:
        if job["id"] != _NOBODY:
            return 0
        user = _NOBODY
    elif job["namespaces"]:
        return 2  # launcher and init
    count = 0
    for process in os.listdir("/proc"):
        if process.isdecimal() and process != str(os.getpid()):
            with contextlib.suppress(OSError), open(f"/proc/{process}/status") as status:  # it may have ended
                fields = dict(line.split(":", 1) for line in status)
                count += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return count


def _leave_root(job: dict[str, Any], folder: str) -> list[int]:
    """Become a user who owns `folder` and nothing else; returns the capabilities that the program has to keep.

    None, except where only root can read the interpreter: then the one to read, which Landlock and the fresh root
    confine to the files that the program may read anyway.
    """
    kept = []
    if job["closed_files"] or (job["closed_folders"] and not job["own_root"]):
        permitted = lockdown.permitted_capabilities()
        kept = [c for c in (lockdown.CAP_DAC_READ_SEARCH, lockdown.CAP_DAC_OVERRIDE) if permitted >> c & 1][:1]
        if not kept or not (job["landlock"] or job["own_root"]):
            _check_readable(job)
    lockdown.prctl(lockdown.PR_SET_KEEPCAPS, 1)  # what is kept, and the bounding set to be dropped
    _change_user(job["id"], folder)
    return kept


def _free_user() -> int:
    """A number that no other program has; `nobody` in a container that has no such numbers."""
    number = _FIRST_ID + os.getpid()
    with open("/proc/self/uid_map") as lines:
        ranges = [tuple(map(int, line.split())) for line in lines]
    return number if any(first <= number < first + count for first, _, count in ranges) else _NOBODY


def _change_user(number: int, *folders: str) -> None:
    with _may_be_refused("another user than root"):
        for folder in folders:
            os.chown(folder, number, number)
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)


def _check_readable(job: dict[str, Any]) -> None:
    if place := job["closed_files"] or job["closed_folders"]:
        raise Refused(f"another user than root: the interpreter is closed to it at {place}")


def _lower_limit(name: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(name)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(name, (soft, hard))
