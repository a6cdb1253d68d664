"""What a process gives up for good before it runs what nobody has read: one lockdown, for rewards and for programs.

`lock` is all of it, called by a process on itself; what it starts inherits it, and nothing takes it back. Its measures
take no privilege, so that they work for any user and in containers:

- Landlock (Linux 5.13), a whitelist of folders and files: the interpreter with its packages, and what the caller names;
- seccomp (Linux 3.5), a blacklist of system calls: no network, no other process, no corner of the kernel;
- capabilities and users: what root has called goes on as a user who owns nothing.

Left out: limits (processes.py, programs.py) and namespaces. Landlock does not govern stat: whether a file of a known
name exists, and its size, stay visible. Nor changes of owner, mode, times or attributes; so those calls are denied.
"""

import ctypes
import functools
import glob
import os
import pathlib
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable

from grpo.workers import kernel, processes

# What of the environment the interpreter needs to start at all.
LOADER_VARIABLES = ("LD_LIBRARY_PATH",)

# User and group ids of what root locks: this plus the process id, so that no two processes share one. The second is
# `nobody`, for where only a container's 65536 ids exist.
_FIRST_ID, NOBODY = 1 << 30, 65534


@functools.cache
def landlock_version() -> int:
    """Version (ABI) of this kernel's Landlock, 0 without.

    Since 1: files, 2: moves between folders, 3: truncation, 4: TCP, 5: ioctl of devices, 6: signals, abstract sockets.
    """
    try:
        return kernel.libc("syscall", _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def missing_measures() -> str:
    """What `lock` needs and this kernel does not have, as in "Landlock and no seccomp filters"; empty if nothing."""
    have = {"Landlock": landlock_version() > 0, "seccomp filters": kernel.can_deny_calls()}
    return " and no ".join(name for name, has in have.items() if not has)


def lock(readable: tuple[str, ...], writable: tuple[str, ...], parent: int) -> None:
    """Take from the calling process all that this kernel lets it give up; from then on it dies with its `parent`.

    readable: files and folders that it may read and execute; those in `writable` it may also write, make and remove.
    Root goes on as another user, who is given the folders in `writable`, with one capability, to read (`identity`). The
    process keeps its memory, threads, open files and signals to itself; it cannot start processes. Call it with a
    single thread. Raises OSError if the kernel refuses a measure that it offers.
    """
    user, keep = identity()
    if user is not None:
        for folder in filter(os.path.isdir, writable):
            os.chown(folder, user, user)
    if landlock_version():
        restrict_files(readable, writable)
    if user is not None:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)  # what is kept, and the bounding set to be dropped
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities(keep)
    kernel.die_with(parent)  # late, because a change of user clears it
    if kernel.can_deny_calls():
        kernel.deny_calls()


def identity() -> tuple[int | None, list[int]]:
    """The user id that root's process goes on with, and the capability that it keeps; None is the id that it has.

    The id is a number that no other process has, or that of `nobody` in a container without such numbers: the kernel
    limits the threads of any user except root. The capability is to read, since packages may lie where only root can;
    Landlock bounds what it opens. Who is not root, cannot change, or has no other id (in some user namespaces), stays
    what it is.
    """
    permitted = kernel.permitted_capabilities()
    needed = kernel.CAP_CHOWN, kernel.CAP_DAC_OVERRIDE, kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID
    # Landlock confines the second one to reading
    able = [kernel.CAP_DAC_READ_SEARCH, *([kernel.CAP_DAC_OVERRIDE] if landlock_version() else [])]
    keep = [c for c in able if permitted >> c & 1][:1]
    if os.geteuid() != 0 or not keep or not all(permitted >> c & 1 for c in needed):
        return None, []
    with open("/proc/self/uid_map") as lines:
        ranges = [tuple(map(int, line.split())) for line in lines]
    numbers = (_FIRST_ID + os.getpid(), NOBODY)
    user = next((n for n in numbers if any(first <= n < first + count for first, _, count in ranges)), None)
    return user, keep if user is not None else []


# ---------------------------------------------------------------------------------------------------------------------
# What may be read


@functools.cache
def interpreter_places(executable: str = sys.executable) -> tuple[str, ...]:
    """Parts of the interpreter and its environments, and what the system's loader and libraries need.

    Only the folders of programs and libraries of a prefix: an environment may have been made in a project's folder.
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
    for name in LOADER_VARIABLES:
        paths = os.environ.get(name, "").split(":")
        places |= {path for path in paths if path.startswith("/") and not is_private(path)}
    with open("/proc/self/maps") as maps:  # this process's libraries: some systems keep even libc elsewhere
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    places |= {path for path in mapped if ".so" in os.path.basename(path) and os.path.isfile(path)}
    return tuple(sorted(place for place in places if os.path.exists(place)))


@functools.cache
def package_places() -> tuple[str, ...]:
    """Where this process finds packages: entries of `sys.path`, what is linked into them, and editable installs.

    PYTHONPATH, the user's site and .pth files are in `sys.path`. The first call decides: make it before folders of a
    run's own files are there too. What holds more than packages is left out (`is_private`).
    """
    places = {path for path in sys.path if not is_private(path)}
    children = {child for path in places for child in glob.glob(f"{glob.escape(path)}/*")}
    for link in filter(os.path.islink, children):
        if link.endswith(".py") or any(os.path.exists(f"{link}/{name}") for name in ("__init__.py", "METADATA")):
            places.add(link)
    for finder in sys.meta_path:  # those of setuptools' editable installs map names to packages and modules
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", {})
        places |= {path + suffix for path in mapping.values() for suffix in ("", ".py")}
    return tuple(sorted(place for place in places if os.path.exists(place) and not is_private(place)))


def is_private(place: str) -> bool:
    """Whether a place is or holds the working folder, the home folder, the project, or that of temporary files."""
    folders = os.getcwd(), os.path.expanduser("~"), processes.ROOT, tempfile.gettempdir()
    return any(pathlib.Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(place)) for folder in folders)


# ---------------------------------------------------------------------------------------------------------------------
# Files: Landlock. Numbers are the same on all architectures. linux/landlock.h

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_FIFO, _MAKE_SYM = (1 << bit for bit in (4, 5, 7, 8, 10, 12))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_ABI_1 = (1 << 13) - 1
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals

_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Neither devices nor sockets can be made. What is written cannot be executed as a program.
_WRITE = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE
_WRITE |= _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # what the kernel takes for a single file


def restrict_files(readable: Iterable[str], writable: Iterable[str] = ()) -> None:
    """From now on only these files, and those below these folders, can be opened.

    Paths that do not exist are left out; what is open stays open. What else this kernel's Landlock knows
    (`landlock_version`) is refused as well. Sets no_new_privs.
    """
    version = landlock_version()
    handled = _ALL_OF_ABI_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if version >= since else 0
    # An older kernel takes the longer structure if what it does not know is 0.
    attributes = struct.pack("=3Q", handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = kernel.libc("syscall", _LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for places, rights in ((readable, _READ), (writable, _WRITE)):
            for place in places:
                _allow(ruleset, place, rights & handled)
        kernel.forbid_new_privileges()
        kernel.libc("syscall", _LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, place: str, rights: int) -> None:
    try:
        fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        kernel.libc("syscall", _LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)
