"""Kernel features that Python's library lacks: prctl, filters of system calls (seccomp) and capabilities.

Standard library only. lockdown.py puts them together.
"""

import ctypes
import errno
import functools
import os
import re
import signal
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_CHILD_SUBREAPER = 36
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47


def libc(name: str, *arguments: Any) -> int:
    """Call a function of libc that returns a negative number on failure. Raises OSError with its errno."""
    result = getattr(_LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, second: int = 0) -> int:
    """Call prctl(2) with one or two numbers. The others are 0."""
    numbers = map(ctypes.c_ulong, (value, second, 0, 0))
    return libc("prctl", option, *numbers)


def forbid_new_privileges() -> None:
    """Let this process gain no rights by starting a program, for good: set-user-id bits and capabilities do nothing."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it is gone. `parent` is that thread's process."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# System calls: seccomp

# Column of the table below, and what the kernel calls the architecture (linux/audit.h).
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Each call with its numbers on x86_64 and aarch64. A dash: that architecture has no such call.
_SYSTEM_CALLS = """
# The network: sockets of every family, also vsock, netlink and sockets in folders. Pairs remain, see _CONDITIONS.
socket:41/198 connect:42/203 bind:49/200 listen:50/201 accept:43/202 accept4:288/242 socketpair:53/199
# Memory that no limit counts, and objects that outlive a process or that anybody who guesses a number can remove.
shmget:29/194 shmat:30/196 shmctl:31/195 msgget:68/186 msgctl:71/187 msgsnd:69/189 msgrcv:70/188 semget:64/190
semctl:66/191 semop:65/193 semtimedop:220/192 mq_open:240/180 mq_unlink:241/181 memfd_create:319/279
memfd_secret:447/447 io_setup:206/0 landlock_create_ruleset:444/444 landlock_add_rule:445/445
landlock_restrict_self:446/446
# Another view of the machine, in which a process would have capabilities.
unshare:272/97 setns:308/268 mount:165/40 umount2:166/39 pivot_root:155/41 chroot:161/51 open_tree:428/428
open_tree_attr:467/467 move_mount:429/429 fsopen:430/430 fsconfig:431/431 fsmount:432/432 fspick:433/433
mount_setattr:442/442 statmount:457/457 listmount:458/458
# More processes. Threads remain, see _CONDITIONS.
fork:57/- vfork:58/- clone:56/220 clone3:435/435
# Other processes: their memory, descriptors, limits and priority.
ptrace:101/117 process_vm_readv:310/270 process_vm_writev:311/271 process_madvise:440/440 process_mrelease:448/448
pidfd_open:434/434 pidfd_getfd:438/438 pidfd_send_signal:424/424 kcmp:312/272 migrate_pages:256/238
move_pages:279/239 get_robust_list:274/100 sched_setscheduler:144/119 sched_setparam:142/118 sched_setattr:314/274
prlimit64:302/261 sched_setaffinity:203/122 setpriority:141/140 ioprio_set:251/30 fcntl:72/25 ioctl:16/29
prctl:157/167
# Parts of the kernel that no ordinary program needs and that attacks begin with.
add_key:248/217 request_key:249/218 keyctl:250/219 bpf:321/280 perf_event_open:298/241 userfaultfd:323/282
io_uring_setup:425/425 io_uring_enter:426/426 io_uring_register:427/427 open_by_handle_at:304/265
name_to_handle_at:303/264 fanotify_init:300/262 inotify_init:253/- inotify_init1:294/26 quotactl:179/60
quotactl_fd:443/443 acct:163/89 swapon:167/224 swapoff:168/225 reboot:169/142 sethostname:170/161
setdomainname:171/162 init_module:175/105 finit_module:313/273 delete_module:176/106 kexec_load:246/104
kexec_file_load:320/294 settimeofday:164/170 clock_settime:227/112 adjtimex:159/171 clock_adjtime:305/266
syslog:103/116 vhangup:153/58 iopl:172/- ioperm:173/- modify_ldt:154/- lookup_dcookie:212/18 uselib:134/-
# Owner, mode, times, attributes and locks of files, which Landlock does not govern, and truncation, which Landlock
# governs since its version 3. Other ways to open a file remain, see _CONDITIONS.
chmod:90/- fchmod:91/52 fchmodat:268/53 fchmodat2:452/452 chown:92/- fchown:93/55 lchown:94/- fchownat:260/54
utime:132/- utimes:235/- futimesat:261/- utimensat:280/88 setxattr:188/5 lsetxattr:189/6 fsetxattr:190/7
setxattrat:463/463 removexattr:197/14 lremovexattr:198/15 fremovexattr:199/16 removexattrat:466/466
file_setattr:469/469 truncate:76/45 fallocate:285/47 flock:73/32 open:2/- openat:257/56 openat2:437/437
# Signals to other processes. Those to the process itself remain.
kill:62/129 tkill:200/130 tgkill:234/131 rt_sigqueueinfo:129/138 rt_tgsigqueueinfo:297/240
"""


class Permitted(NamedTuple):
    """The values that one argument of a system call may have."""

    argument: int
    """Its index, 0 to 5. Only its low 32 bits are compared."""
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    """The bits that are compared."""


_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_TYPE = 0xF
_CLONE_THREAD = 0x00010000
_CLONE_NEW_NAMESPACES = 0x7E020000
# Of descriptors: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. All others are locks, leases, signals,
# watches, or memory of pipes.
_OF_DESCRIPTORS = (0, 1, 2, 3, 4, 1030)
# TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python and libc ask of any descriptor. Among
# the others are attributes of files, input for a terminal and signals.
_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: names of threads and of memory
_NAMES = (15, 16, 0x53564D41)
# Opening with O_TRUNC empties a file. Below its version 3, Landlock lets whoever may read a file do that. Of the access
# modes, which are the lowest two bits, 1 and 2 write, 0 reads, and 3 does neither.
_HARMLESS_FLAGS = (0, 1, 2, 3, os.O_TRUNC | 1, os.O_TRUNC | 2)
_TRUNCATES = os.O_TRUNC | 0b11

# These calls of the table are permitted with these arguments. All others are always denied.
_CONDITIONS: dict[str, list[Permitted]] = {
    # Pairs of streams remain. A datagram socket of a pair could send to any address.
    "socketpair": [Permitted(0, (_AF_UNIX,)), Permitted(1, (_SOCK_STREAM,), _SOCK_TYPE)],
    "clone": [Permitted(0, (_CLONE_THREAD,), _CLONE_THREAD | _CLONE_NEW_NAMESPACES)],
    # 0 is the calling process
    "prlimit64": [Permitted(0, (0,))],
    "sched_setaffinity": [Permitted(0, (0,))],
    "setpriority": [Permitted(0, (0,)), Permitted(1, (0,))],
    "ioprio_set": [Permitted(0, (1,)), Permitted(1, (0,))],
    "fcntl": [Permitted(1, _OF_DESCRIPTORS)],
    "ioctl": [Permitted(1, _REQUESTS)],
    "prctl": [Permitted(0, _NAMES)],
    "open": [Permitted(1, _HARMLESS_FLAGS, _TRUNCATES)],
    "openat": [Permitted(2, _HARMLESS_FLAGS, _TRUNCATES)],
}
# Landlock refuses signals to other processes only since its version 6.
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
# Calls whose flags lie in memory, where a filter cannot look. libc falls back on clone, and does not use openat2.
_UNKNOWN_CALLS = ("clone3", "openat2")

# Operations of a filter (linux/bpf_common.h) and its results (linux/seccomp.h).
_LOAD = 0x20
_AND = 0x54
_SKIP_IF_EQUAL = 0x15
_SKIP_IF_AT_LEAST = 0x35
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FAIL = 0x00050000  # with an errno in its low bits

_SECCOMP_MODE_FILTER = 2
_X32 = 0x40000000  # from here on, numbers are those of x86_64's calls with 32-bit pointers


@functools.cache
def call_numbers() -> dict[str, int]:
    """Return the numbers that the calls of the table have on this machine."""
    column, _ = _ARCHITECTURES[os.uname().machine]
    entries = re.findall(r"(\w+):(\d+|-)/(\d+|-)", _SYSTEM_CALLS)
    numbers = {}
    for name, *by_architecture in entries:
        if by_architecture[column] != "-":
            numbers[name] = int(by_architecture[column])
    return numbers


def can_deny_calls() -> bool:
    """Return whether this kernel filters system calls, on an architecture of the table."""
    try:
        prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)  # without a filter: EFAULT where filters are known
    except OSError as error:
        return error.errno == errno.EFAULT and os.uname().machine in _ARCHITECTURES
    return False


def deny_calls() -> None:
    """Let the calls of the table fail with PermissionError in this process, for good. Sets no_new_privs.

    Those of `_UNKNOWN_CALLS` fail as if the kernel did not know them. A call by the numbers of another architecture
    (32-bit x86) ends the process.
    """
    _, architecture = _ARCHITECTURES[os.uname().machine]
    only_itself = [Permitted(0, (os.getpid(),))]
    conditions = _CONDITIONS | dict.fromkeys(_SIGNALS, only_itself)
    # An instruction is an operation, how many lines it skips if true and if false, and a number. A filter can load the
    # call's number from offset 0, the architecture from 4, and the low half of argument n from 16 + 8 n.
    deny = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    permit = (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, 4),
        (_SKIP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_SKIP_IF_AT_LEAST, 0, 1, _X32),
        deny,
    ]
    for name, number in call_numbers().items():
        lines = []
        for argument, values, mask in conditions.get(name, []):
            lines += [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask)]
            for index, value in enumerate(values):
                lines.append((_SKIP_IF_EQUAL, len(values) - index, 0, value))  # all other values, and the next line
            lines.append(deny)
        if lines:  # all arguments are permitted
            lines.append(permit)
        elif name in _UNKNOWN_CALLS:
            lines.append((_RETURN, 0, 0, _FAIL | errno.ENOSYS))
        else:
            lines.append(deny)
        program += [(_SKIP_IF_EQUAL, 0, len(lines), number), *lines]
    program.append(permit)

    instructions = [struct.pack("=HBBI", *instruction) for instruction in program]
    buffer = ctypes.create_string_buffer(b"".join(instructions))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    forbid_new_privileges()
    zero = ctypes.c_ulong(0)
    libc("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, zero, zero)


# ---------------------------------------------------------------------------------------------------------------------
# Capabilities

CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_AMBIENT_RAISE = 2


def drop_capabilities(keep: Collection[int] = ()) -> None:
    """Give up all capabilities except `keep`, for this process and the programs that it starts. Sets no_new_privs.

    The bounding set stays, because no_new_privs makes it meaningless. Raises OSError if this process lacks one of
    `keep`.
    """
    forbid_new_privileges()
    mask = sum(1 << capability for capability in keep)
    low = mask & 0xFFFFFFFF
    high = mask >> 32
    # effective, permitted and inheritable
    sets = struct.pack("=6I", low, low, low, high, high, high)
    libc("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), sets)
    for capability in keep:
        prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_RAISE, capability)


def has_capability(capability: int) -> bool:
    """Return whether the calling process may use a capability."""
    with open("/proc/self/status") as status:
        effective = re.search(r"CapEff:\t(\w+)", status.read())[1]
    return bool(int(effective, 16) >> capability & 1)
