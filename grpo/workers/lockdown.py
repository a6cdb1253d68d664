"""The one lockdown, in which a process of built-in rewards and a program of the policy run.

`lock` is all of it. A process calls it on itself; what it starts inherits it, and nothing takes it back. These measures
need no privilege, so they work for any user and in containers:

- Landlock (Linux 5.13) opens only listed folders and files, to read: the interpreter, its packages and what the caller
  names. No file can be made or written, so that nothing can fill a disk;
- seccomp (Linux 3.5) denies listed system calls: no network, no other processes, no rarely used parts of the kernel;
- all capabilities go, except one to read.

Root goes on as another user, because the kernel limits the threads of all users except root. Nothing else needs it.

Left out: limits (processes.py, features/programs) and namespaces. Landlock does not govern `stat`: whether a file of a
known name exists, and its size, stay visible. It does not govern changes of owner, mode, times or attributes either,
so seccomp denies those calls.
"""

import ctypes
import functools
import glob
import itertools
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from grpo.workers import kernel, processes

# The one variable of the environment that the interpreter may need to start at all.
LOADER_VARIABLE = "LD_LIBRARY_PATH"

# A locked process of root gets the user and group with this number plus its process id, which nobody else has.
_FIRST_USER = 1 << 30
# What /proc/self/uid_map holds outside of user namespaces: all numbers are what they seem to be.
_ALL_USERS = ["0", "0", str(2**32 - 1)]


@functools.cache
def landlock_version() -> int:
    """Return the version (ABI) of this kernel's Landlock, 0 if it has none.

    Since 1: files, 2: moves between folders, 3: truncation, 4: TCP, 5: ioctl of devices, 6: signals, abstract sockets.
    """
    try:
        return kernel.libc("syscall", _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def missing_measures() -> str:
    """Return what `lock` needs and this kernel lacks, such as "Landlock and no seccomp filters". Empty if nothing."""
    missing = []
    if not landlock_version():
        missing.append("Landlock")
    if not kernel.can_deny_calls():
        missing.append("seccomp filters")
    return " and no ".join(missing)


def lock(readable: tuple[str, ...], writable: tuple[str, ...], parent: int) -> None:
    """Take from the calling process all that this kernel lets it give up, and let it die with its `parent`.

    It may read and execute the files and folders in `readable`, and read and write the devices in `writable`. Its
    memory, threads, open files and signals to itself remain. It cannot start processes. Call it with a single thread.
    Raises OSError if the kernel refuses a measure that it offers.
    """
    user = new_user()
    keep = _reading_capability()
    if landlock_version():
        restrict_files(readable, writable)
    if user is not None:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)  # else the change of user drops all capabilities
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities(keep)
    kernel.die_with(parent)  # late, because a change of user clears it
    if kernel.can_deny_calls():
        kernel.deny_calls()


def new_user() -> int | None:
    """Return the user id with which a locked process of root goes on. None: it stays the user that it is.

    In a user namespace root stays root, as it is an ordinary user outside, whose threads are limited. Root also stays
    where it lacks the capabilities to change users, to kill the new one, or to let it read packages.
    """
    needed = (kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID)
    is_able = all(map(kernel.has_capability, needed)) and _reading_capability()
    numbers = Path("/proc/self/uid_map").read_text().split()
    if os.geteuid() == 0 and numbers == _ALL_USERS and is_able:
        return _FIRST_USER + os.getpid()
    return None


def _reading_capability() -> list[int]:
    """Return the capability to read any file, if this process has it: packages may lie in closed folders.

    Landlock bounds what it opens, and takes from CAP_DAC_OVERRIDE all except reading.
    """
    usable = [kernel.CAP_DAC_READ_SEARCH]
    if landlock_version():
        usable.append(kernel.CAP_DAC_OVERRIDE)
    return list(filter(kernel.has_capability, usable))[:1]


# ---------------------------------------------------------------------------------------------------------------------
# What may be read


@functools.cache
def interpreter_paths(executable: str = sys.executable) -> tuple[str, ...]:
    """Return the files and folders of the interpreter, its environments and the system's loader and libraries.

    Of a prefix only the folders of programs and libraries, since an environment may have been made in a project.
    """
    path = executable
    links = [path]  # a virtual environment's python is a link, perhaps to another link
    while os.path.islink(path):
        target = os.path.join(os.path.dirname(path), os.readlink(path))
        path = os.path.normpath(target)
        links.append(path)
    found = {
        *links,
        *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
        *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", *glob.glob("/etc/python3*")),
    }
    for prefix in (sys.prefix, sys.base_prefix):
        for folder in (prefix, os.path.realpath(prefix)):
            found |= {os.path.join(folder, part) for part in ("bin", "lib", "lib64", "pyvenv.cfg")}
    for path in os.environ.get(LOADER_VARIABLE, "").split(":"):
        if path.startswith("/") and not is_private(path):
            found.add(path)
    # the libraries of this process, since some systems keep even libc elsewhere
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = "/" + line.partition("/")[2]
        if ".so" in os.path.basename(path) and os.path.isfile(path):
            found.add(path)
    return tuple(sorted(filter(os.path.exists, found)))


@functools.cache
def package_paths() -> tuple[str, ...]:
    """Return where this process finds packages, the entries of `sys.path`.

    PYTHONPATH, the user's site and .pth files are in it. What holds more than packages is left out
    (`is_private`). The first call decides, so make it before the folders of a run's own files are in `sys.path`.
    """
    found = {path for path in sys.path if not is_private(path)}
    existing = filter(os.path.exists, found)
    return tuple(sorted(itertools.filterfalse(is_private, existing)))


def is_private(path: str) -> bool:
    """Return whether a path is or holds the working folder, the home folder, the project or temporary files."""
    path = os.path.realpath(path)
    folders = (os.getcwd(), os.path.expanduser("~"), processes.ROOT, tempfile.gettempdir())
    return any(Path(os.path.realpath(folder)).is_relative_to(path) for folder in folders)


# ---------------------------------------------------------------------------------------------------------------------
# Files: Landlock. The numbers of linux/landlock.h are the same on all architectures.

_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_ALL_OF_VERSION_1 = (1 << 13) - 1
_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}  # the version of Landlock that brought a right
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Have the kernel open only these files, and those below these folders, for this process. Sets no_new_privs.

    `writable` has devices or files, no folders. Paths that do not exist are left out. What is open stays open. All else
    that this kernel's Landlock knows is refused too, see `landlock_version`.
    """
    version = landlock_version()
    handled = _ALL_OF_VERSION_1
    for since, right in _SINCE.items():
        if version >= since:
            handled |= right
    network = _TCP if version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    # an older kernel takes a structure that is longer than its own if the rest is 0
    attributes = struct.pack("=3Q", handled, network, scopes)
    ruleset = kernel.libc("syscall", _LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in filter(os.path.exists, readable):
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in filter(os.path.exists, writable):
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        kernel.forbid_new_privileges()
        kernel.libc("syscall", _LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Add the rights on a file, or on all below a folder, to a set of rules."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= ~_READ_DIR  # the kernel takes no right of folders for a file
        rule = struct.pack("=Qi", rights, descriptor)
        kernel.libc("syscall", _LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
