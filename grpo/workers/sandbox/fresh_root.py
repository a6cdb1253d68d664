"""A root folder that holds what a program may see and nothing else, for a process with a mount namespace of its own.

Why bind mounts into an empty tree and not the old tree with parts covered: what nobody thought of is absent, not
visible. Why on top of Landlock: stat sees nothing outside either, folders that only root may enter do not matter, and
all that is written counts against one limit.

Standard library only; the sandbox's launcher uses it.
"""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from grpo.workers.lockdown import call_number, libc, system_call

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# Files and folders that a program may make.
MAX_FILES = 4096

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2
# Where the new tree is built: covered by it, in this mount namespace only.
_PLACE = "/tmp"


def enter_fresh_root(places: Iterable[str], file_bytes: int) -> None:
    """Make an empty file system the root, with `places` and four devices bound read-only under their own names.

    places: absolute paths of folders and files; those that do not exist are left out. A symbolic link into one of them
    is one again, since python finds its libraries by where its own link leads; others are followed. In addition there
    are an empty /tmp that anybody may write to, and a /proc of the process's own PID namespace if the kernel grants
    one. file_bytes: of all files that are written.

    The calling process must be alone in its mount namespace and have CAP_SYS_ADMIN over it. Raises OSError.
    """
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    fds, links, wanted = {}, {}, {*places, *DEVICES}
    for path in sorted(wanted):
        if _is_inside(path, fds.keys() | links.keys()):
            continue
        link = os.readlink(path) if os.path.islink(path) else ""
        target = os.path.normpath(os.path.join(os.path.dirname(path), link))
        if link and (target in wanted or _is_inside(target, wanted)):
            links[path] = link
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fds[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _mount("tmpfs", _PLACE, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_bytes},nr_inodes={MAX_FILES},mode=755")
    for path, fd in fds.items():
        target = _PLACE + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, 0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"/proc/self/fd/{fd}", target, "none", _MS_BIND | _MS_REC)
        _make_read_only(target)
        os.close(fd)
    for path, link in links.items():
        os.makedirs(os.path.dirname(_PLACE + path), 0o755, exist_ok=True)
        os.symlink(link, _PLACE + path)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        os.symlink(f"/proc/self/fd/{number}", f"{_PLACE}/dev/{name}")
    os.makedirs(f"{_PLACE}/tmp", exist_ok=True)  # the interpreter may be in it
    os.chmod(f"{_PLACE}/tmp", 0o1777)
    os.mkdir(f"{_PLACE}/proc", 0o755)
    with contextlib.suppress(OSError):  # containers hide parts of /proc, and the kernel then grants no whole one
        _mount("proc", f"{_PLACE}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(_PLACE)
    # Old and new root on one place: the old one lies on top, and is then taken away.
    system_call(call_number("pivot_root"), "pivot_root", b".", b".")
    libc("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    try:
        libc("mount", *(os.fsencode(text) for text in (source, target, kind)), ctypes.c_ulong(flags), options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({target})") from None


def _make_read_only(target: str) -> None:
    attributes = struct.pack("=4Q", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    number, place = call_number("mount_setattr"), os.fsencode(target)
    system_call(number, "mount_setattr", _AT_FDCWD, place, _AT_RECURSIVE, attributes, size)
