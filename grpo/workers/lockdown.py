"""What a Linux process can give up for good, without any privilege: files, network, system calls, capabilities.

Three measures of the kernel, each a function that the calling thread calls on itself; what it starts inherits them, and
nothing takes them back. They work in containers and for any user:

- `restrict_files`: Landlock (Linux 5.13), a whitelist of folders and files;
- `deny_calls`: seccomp (Linux 3.5), a blacklist of system calls, by sets that are named for what they close;
- `drop_capabilities`: the parts of root's power.

Call them in a process with a single thread and in the order restrict_files, drop_capabilities, deny_calls: the last one
may deny what the others need. `offered()` says what this kernel has.

Left out: namespaces and limits, which the sandbox's launcher adds. Landlock governs opening, making, renaming and
removing files, but not stat: whether a file of a known name exists, and how large it is, stays visible. It also governs
no change of owner, mode, times or attributes, which is why METADATA is a set of calls.

Standard library only, and importable without site-packages: the launcher runs under `python -I -S`.
"""

import contextlib
import ctypes
import errno
import functools
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)


def libc(name: str, *arguments: Any) -> int:
    """Call a function of libc that returns a negative number on failure. Raises OSError with its errno."""
    result = getattr(_LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def system_call(number: int, name: str, *arguments: Any) -> int:
    """Make a system call for which libc has no function. Raises OSError with its errno; `name` is for the message."""
    result = _LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER = 1, 4, 8, 36
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 24, 38, 47
_SECCOMP_MODE_FILTER = 2


def prctl(option: int, *values: int) -> int:
    """prctl(2) with up to four numbers; missing ones are 0."""
    return libc("prctl", option, *map(ctypes.c_ulong, (*values, 0, 0, 0, 0)[:4]))


class Offered(NamedTuple):
    """What this kernel has."""

    landlock: int
    """Version (ABI) of Landlock, 0 without. 1: files. 2: moves between folders. 3: truncation. 4: TCP. 5: ioctl of
    devices. 6: signals to others, abstract sockets. Later ones add nothing that is used here."""
    seccomp: bool
    """Whether system calls can be filtered, on an architecture whose numbers are known here."""


@functools.cache
def offered() -> Offered:
    """What this kernel offers; asks it, changes nothing."""
    try:
        landlock = system_call(_LANDLOCK_CREATE_RULESET, "landlock_create_ruleset", None, ctypes.c_size_t(0), 1)
    except OSError:
        landlock = 0
    seccomp = os.uname().machine in _ARCHITECTURES
    try:
        prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)  # without a filter: EFAULT where filters are known
    except OSError as error:
        seccomp = seccomp and error.errno == errno.EFAULT
    return Offered(landlock, seccomp)


def forbid_new_privileges() -> None:
    """From now on no program that is started gains anything by its set-user-id bit or file capabilities."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Files: Landlock. Numbers are the same on all architectures. linux/landlock.h

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_FIFO, _MAKE_SYM = (
    1 << 4,
    1 << 5,
    1 << 7,
    1 << 8,
    1 << 10,
    1 << 12,
)
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_ABI_1 = (1 << 13) - 1
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1 << 0, 1 << 1

_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Neither devices nor sockets can be made. What is written cannot be executed as a program.
_WRITE = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE
_WRITE |= _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # what the kernel takes for a single file


def restrict_files(readable: Iterable[str | int], writable: Iterable[str | int] = ()) -> None:
    """From now on only these files, and those below these folders, can be opened.

    readable: to read and execute. writable: to read, write, make and remove. Both are paths, of which those that do not
    exist are left out, or descriptors (O_PATH is enough). What is open stays open. As far as this kernel's Landlock
    goes (`offered`), TCP, ioctl of devices, and signals and abstract sockets to processes outside are refused as well.
    No file system can be mounted any more. Sets no_new_privs.

    Raises OSError (ENOSYS without Landlock; E2BIG after 16 calls).
    """
    version = offered().landlock
    if version < 1:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock (Linux 5.13; `lsm=` of its command line must list it)")
    handled = _ALL_OF_ABI_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if version >= since else 0
    tcp = _BIND_TCP | _CONNECT_TCP if version >= 4 else 0
    scoped = _SCOPE_ABSTRACT_SOCKET | _SCOPE_SIGNAL if version >= 6 else 0
    # An older kernel takes the longer structure if what it does not know is 0.
    attributes = struct.pack("=3Q", handled, tcp, scoped)
    size = ctypes.c_size_t(len(attributes))
    ruleset = system_call(_LANDLOCK_CREATE_RULESET, "landlock_create_ruleset", attributes, size, 0)
    try:
        for places, rights in ((readable, _READ), (writable, _WRITE)):
            for place in places:
                _allow(ruleset, place, rights & handled)
        forbid_new_privileges()
        system_call(_LANDLOCK_RESTRICT_SELF, "landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, place: str | int, rights: int) -> None:
    if isinstance(place, int):
        fd = place
    else:
        try:
            fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
    try:
        if not os.path.isdir(f"/proc/self/fd/{fd}" if isinstance(place, int) else place):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, fd)
        system_call(_LANDLOCK_ADD_RULE, f"landlock_add_rule {place}", ruleset, 1, rule, 0)
    finally:
        if not isinstance(place, int):
            os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------
# System calls: seccomp


class If(NamedTuple):
    """The call is denied if `argument` (0 to 5; its low 32 bits, of which `mask`) is `value`."""

    argument: int
    value: int
    mask: int = 0xFFFFFFFF


class Unless(NamedTuple):
    """The call is denied unless `argument` (0 to 5; its low 32 bits, of which `mask`) is `value`."""

    argument: int
    value: int
    mask: int = 0xFFFFFFFF


Calls = Mapping[str, tuple[If | Unless, ...]]
"""Names of system calls to deny; one with conditions is denied if any of them says so, one without always."""

_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_THREAD = 0x00010000  # CLONE_THREAD
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: cgroup, mount, IPC, host name, user, process ids, network


def _always(names: str) -> Calls:
    return dict.fromkeys(names.split(), ())


# Sockets of every family, so also vsock, netlink and those in folders. Socket pairs remain, of streams: a pair of
# datagram sockets could send to any address.
NETWORK: Calls = {
    **_always("socket connect bind listen accept accept4"),
    "socketpair": (Unless(0, _AF_UNIX), Unless(1, _SOCK_STREAM, _SOCK_TYPE)),
}
# Memory that belongs to no address space, so that no limit counts it, and what else outlives a process.
MEMORY: Calls = _always("shmget shmat msgget semget mq_open memfd_create memfd_secret io_setup")
# Another view of the machine, in which a process would have capabilities.
NAMESPACES: Calls = {
    **_always(
        "unshare setns mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount "
        "fspick mount_setattr statmount listmount"
    ),
    "clone": (Unless(0, 0, _NEW_NAMESPACES),),
    "clone3": (),  # its flags lie in memory, where a filter cannot look; libc falls back on clone
}
# Other processes: their memory, descriptors, limits and priority. A process may still signal, see OTHERS_SIGNALS.
PROCESSES: Calls = {
    **_always(
        "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_open pidfd_getfd "
        "pidfd_send_signal kcmp migrate_pages move_pages get_robust_list sched_setscheduler sched_setparam "
        "sched_setattr"
    ),
    "prlimit64": (Unless(0, 0),),
    "sched_setaffinity": (Unless(0, 0),),
    "setpriority": (Unless(0, 0), Unless(1, 0)),
    "ioprio_set": (Unless(0, 1), Unless(1, 0)),
    "fcntl": (If(1, 8), If(1, 15)),  # F_SETOWN, F_SETOWN_EX: the kernel would signal on its behalf
    "ioctl": (If(1, 0x8901), If(1, 0x8902), If(1, 0x5412), If(1, 0x541C)),  # FIOSETOWN, SIOCSPGRP; TIOCSTI, TIOCLINUX
}
# Parts of the kernel that no ordinary program needs and that attacks begin with.
KERNEL: Calls = _always(
    "add_key request_key keyctl bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register "
    "open_by_handle_at name_to_handle_at fanotify_init inotify_init inotify_init1 quotactl quotactl_fd acct swapon "
    "swapoff reboot sethostname setdomainname init_module finit_module delete_module kexec_load kexec_file_load "
    "settimeofday clock_settime adjtimex clock_adjtime syslog vhangup iopl ioperm modify_ldt lookup_dcookie uselib"
)
# Owner, mode, times and attributes of files, which Landlock leaves alone.
METADATA: Calls = _always(
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr "
    "fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr"
)
# More processes; threads remain.
NEW_PROCESSES: Calls = {**_always("fork vfork"), "clone": (Unless(0, _THREAD, _THREAD),), "clone3": ()}
# What ends a process with its parent could be taken back.
PARENT_DEATH: Calls = {"prctl": (If(0, PR_SET_PDEATHSIG),)}
# Landlock refuses it from its third version on.
TRUNCATION: Calls = _always("truncate")


def others_signals(process: int) -> Calls:
    """Signals to any process except `process`; for a kernel whose Landlock does not scope signals (below version 6)."""
    return dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), (Unless(0, process),))


_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # x86_64 has them all under these numbers, aarch64 under others or not at all (None)
    "accept": (43, 202), "accept4": (288, 242), "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171),
    "bind": (49, 200), "bpf": (321, 280), "chmod": (90, None), "chown": (92, None), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "connect": (42, 203), "delete_module": (176, 106), "fanotify_init": (300, 262), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25),
    "file_setattr": (469, 469), "finit_module": (313, 273), "fork": (57, None), "fremovexattr": (199, 16),
    "fsconfig": (431, 431), "fsetxattr": (190, 7), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "futimesat": (261, None), "get_robust_list": (274, 100), "init_module": (175, 105), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "io_setup": (206, 0), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None),
    "ioprio_set": (251, 30), "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "kill": (62, 129), "lchown": (94, None), "listen": (50, 201), "listmount": (458, 458),
    "lookup_dcookie": (212, 18), "lremovexattr": (198, 15), "lsetxattr": (189, 6), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "migrate_pages": (256, 238), "modify_ldt": (154, None), "mount": (165, 40),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239), "mq_open": (240, 180),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "open_tree_attr": (467, 467), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "prctl": (157, 167), "prlimit64": (302, 261),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "reboot": (169, 142), "removexattr": (197, 14), "removexattrat": (466, 466), "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "semget": (64, 190),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "setpriority": (141, 140),
    "settimeofday": (164, 170), "setxattr": (188, 5), "setxattrat": (463, 463), "shmat": (30, 196),
    "shmget": (29, 194), "socket": (41, 198), "socketpair": (53, 199), "statmount": (457, 457), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130), "truncate": (76, 45),
    "umount2": (166, 39), "unshare": (272, 97), "uselib": (134, None), "userfaultfd": (323, 282),
    "utime": (132, None), "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None), "vhangup": (153, 58),
}  # fmt: skip

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # linux/bpf_common.h
_ALLOW, _DENY, _UNKNOWN, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_X32 = 0x40000000  # system calls of x86_64 with short pointers, numbered from here


def call_number(name: str) -> int | None:
    """Number of a system call on this machine; None if this architecture has no such call."""
    return _NUMBERS[name][_ARCHITECTURES[os.uname().machine][0]]


def deny_calls(*sets: Calls) -> None:
    """From now on the system calls of these sets fail: PermissionError, clone3 as if the kernel did not know it.

    A call by another architecture's numbers (32-bit x86) ends the process. Sets no_new_privs.

    Raises OSError (EINVAL without seccomp filters, ENOSYS on an architecture whose numbers are not in the table).
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers of {machine}; known are {', '.join(_ARCHITECTURES)}")
    architecture = _ARCHITECTURES[machine][1]
    filters = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    filters += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _DENY)]
    for name, conditions in _joined(sets).items():
        number = call_number(name)
        if number is not None:
            then = _checks(conditions) if conditions else [(_RETURN, 0, 0, _UNKNOWN if name == "clone3" else _DENY)]
            filters += [(_EQUAL, 0, len(then), number), *then]
    filters.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in filters))
    header = struct.pack("@HP", len(filters), ctypes.addressof(program))
    forbid_new_privileges()
    libc("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, ctypes.c_ulong(0), ctypes.c_ulong(0))


def _joined(sets: Iterable[Calls]) -> Calls:
    joined: dict[str, tuple[If | Unless, ...]] = {}
    for calls in sets:
        for name, conditions in calls.items():
            always = not conditions or joined.get(name) == ()
            joined[name] = () if always else joined.get(name, ()) + conditions
    return joined


def _checks(conditions: tuple[If | Unless, ...]) -> list[tuple[int, int, int, int]]:
    lines = []
    for condition in conditions:
        # little-endian: the low half of argument n lies at 16 + 8 n
        lines += [(_LOAD, 0, 0, 16 + 8 * condition.argument), (_AND, 0, 0, condition.mask)]
        skip = (0, 1) if isinstance(condition, If) else (1, 0)
        lines += [(_EQUAL, *skip, condition.value), (_RETURN, 0, 0, _DENY)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


# ---------------------------------------------------------------------------------------------------------------------
# Capabilities

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_AMBIENT_RAISE, _CAP_AMBIENT_CLEAR_ALL = 2, 4


def drop_capabilities(keep: Collection[int] = ()) -> None:
    """Give up all capabilities except `keep`: permitted, effective, inheritable, ambient, and the bounding set.

    What is kept is kept by programs started from here too. The bounding set, out of which only a privileged program
    could fill the others again, stays where this process may not change it; no_new_privs, which this sets, makes it
    meaningless. Raises OSError if one of `keep` is not there to be kept.
    """
    forbid_new_privileges()
    permitted = permitted_capabilities()
    _set_capabilities(permitted, permitted, 0)  # a change of user has left them permitted at most
    with contextlib.suppress(OSError):  # EINVAL after the last capability, EPERM where it may not
        for capability in range(64):
            if capability not in keep:
                prctl(_PR_CAPBSET_DROP, capability)
    with contextlib.suppress(OSError):  # Linux 4.3
        prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    kept = sum(1 << capability for capability in keep)
    _set_capabilities(kept, kept, kept)
    for capability in keep:
        prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_RAISE, capability)


def _set_capabilities(*sets: int) -> None:
    """Effective, permitted and inheritable ones, as bit masks."""
    halves = [value & 0xFFFFFFFF for value in sets] + [value >> 32 for value in sets]
    libc("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *halves))


def permitted_capabilities() -> int:
    """Those of the calling process, as a bit mask."""
    data = ctypes.create_string_buffer(24)
    libc("capget", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), data)
    _, low, _, _, high, _ = struct.unpack("=6I", data.raw)
    return low | high << 32
