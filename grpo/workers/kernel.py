"""What only the kernel's own interface offers: prctl, filters of system calls (seccomp), capabilities.

Standard library only; lockdown.py puts it together.
"""

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER = 1, 8, 36
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 38, 47
_SECCOMP_MODE_FILTER = 2


def libc(name: str, *arguments: Any) -> int:
    """Call a function of libc that returns a negative number on failure. Raises OSError with its errno."""
    result = getattr(_LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, *values: int) -> int:
    """prctl(2) with up to four numbers; missing ones are 0."""
    return libc("prctl", option, *map(ctypes.c_ulong, (*values, 0, 0, 0, 0)[:4]))


def forbid_new_privileges() -> None:
    """From now on no program that is started gains anything by its set-user-id bit or file capabilities."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with(parent: int) -> None:
    """Let the kernel end this process when the thread that forked it, one of process `parent`, is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(1)


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


_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH
# x86_64 has them all under these numbers, aarch64 under others or not at all (None).
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # The network: sockets of every family, so also vsock, netlink and those in folders. Pairs remain, see below.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "socketpair": (53, 199),
    # Memory that no limit counts, and what outlives a process or is removed by a number that anybody can guess.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgctl": (71, 187),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193),
    "semtimedop": (220, 192), "mq_open": (240, 180), "mq_unlink": (241, 181), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "io_setup": (206, 0), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # Another view of the machine, in which a process would have capabilities.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458),
    # More processes; threads remain.
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    # Other processes: their memory, descriptors, limits and priority.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "kcmp": (312, 272), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "get_robust_list": (274, 100), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "setpriority": (141, 140), "ioprio_set": (251, 30), "fcntl": (72, 25),
    "ioctl": (16, 29), "prctl": (157, 167),
    # Parts of the kernel that no ordinary program needs and that attacks begin with.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "syslog": (103, 116), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    # Owner, mode, times, attributes and locks of files, and their truncation, which Landlock leaves alone.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45),
    "flock": (73, 32),
    # Signals, to others than the process itself.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip

_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_CLONE_THREAD, _CLONE_NEW_NAMESPACES = 0x00010000, 0x7E020000

# A call without conditions is always denied, one with conditions if any of them says so.
_DENIED: dict[str, tuple[If | Unless, ...]] = dict.fromkeys(_NUMBERS, ()) | {
    # Stream pairs remain: a pair of datagram sockets could send to any address.
    "socketpair": (Unless(0, _AF_UNIX), Unless(1, _SOCK_STREAM, _SOCK_TYPE)),
    "clone": (Unless(0, _CLONE_THREAD, _CLONE_THREAD), Unless(0, 0, _CLONE_NEW_NAMESPACES)),
    "prlimit64": (Unless(0, 0),),
    "sched_setaffinity": (Unless(0, 0),),
    "setpriority": (Unless(0, 0), Unless(1, 0)),
    "ioprio_set": (Unless(0, 1), Unless(1, 0)),
    # F_SETOWN, F_SETOWN_EX: the kernel would signal on its behalf. F_SETLEASE: it would hold up who opens a file.
    "fcntl": (If(1, 8), If(1, 15), If(1, 1024)),
    "ioctl": (If(1, 0x8901), If(1, 0x8902), If(1, 0x5412), If(1, 0x541C)),  # FIOSETOWN, SIOCSPGRP; TIOCSTI, TIOCLINUX
    "prctl": (If(0, PR_SET_PDEATHSIG),),  # what ends a process with its parent could be taken back
}


_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # linux/bpf_common.h
_ALLOW, _DENY, _UNKNOWN, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_X32 = 0x40000000  # system calls of x86_64 with short pointers, numbered from here


def call_number(name: str) -> int | None:
    """Number of a system call on this machine; None if this architecture has no such call."""
    return _NUMBERS[name][_ARCHITECTURES[os.uname().machine][0]]


def can_deny_calls() -> bool:
    """Whether this kernel filters system calls, on an architecture whose numbers are known here."""
    try:
        prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)  # without a filter: EFAULT where filters are known
    except OSError as error:
        return error.errno == errno.EFAULT and os.uname().machine in _ARCHITECTURES
    return False


def deny_calls() -> None:
    """From now on these system calls of the calling process fail: PermissionError, clone3 as if it were unknown.

    clone3's flags lie in memory, where a filter cannot look; libc falls back on clone. A call by another architecture's
    numbers (32-bit x86) ends the process. Sets no_new_privs.
    """
    itself = (Unless(0, os.getpid()),)  # also where Landlock does not refuse signals to others (below its version 6)
    calls = _DENIED | dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), itself)
    architecture = _ARCHITECTURES[os.uname().machine][1]
    filters = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    filters += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _DENY)]
    for name, conditions in calls.items():
        number = call_number(name)
        if number is not None:
            then = _checks(conditions) if conditions else [(_RETURN, 0, 0, _UNKNOWN if name == "clone3" else _DENY)]
            filters += [(_EQUAL, 0, len(then), number), *then]
    filters.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in filters))
    header = struct.pack("@HP", len(filters), ctypes.addressof(program))
    forbid_new_privileges()
    libc("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, ctypes.c_ulong(0), ctypes.c_ulong(0))


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

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SETGID, CAP_SETUID = 0, 1, 2, 5, 6, 7
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_AMBIENT_RAISE = 2


def drop_capabilities(keep: Collection[int] = ()) -> None:
    """Give up all capabilities except `keep`: permitted, effective, inheritable and, with them, ambient.

    What is kept is kept by programs started from here too. The bounding set stays: no_new_privs, which this sets, makes
    it meaningless. Raises OSError if one of `keep` is not there to be kept.
    """
    forbid_new_privileges()
    kept = sum(1 << capability for capability in keep)
    halves = 3 * [kept & 0xFFFFFFFF] + 3 * [kept >> 32]
    libc("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *halves))
    for capability in keep:
        prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_RAISE, capability)


def permitted_capabilities() -> int:
    """Those of the calling process, as a bit mask."""
    data = ctypes.create_string_buffer(24)
    libc("capget", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), data)
    _, low, _, _, high, _ = struct.unpack("=6I", data.raw)
    return low | high << 32
