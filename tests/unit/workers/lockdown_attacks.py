"""What is tried against the lockdown: a table of attacks, and the machine they are tried on.

    python -m tests.unit.workers.lockdown_attacks MODE    prints what each attack did in one mode, as JSON

An attack is the body of a function that returns a true value if it worked, and otherwise raises or returns a false
one. `T` holds what there is to attack (targets): files, sockets and a process of the user who calls. Each is made by a
program, by a confined reward process, and without the lockdown, by a plain interpreter of the same user: if it did not
work there, it would show nothing.

Left out: attacks that take the machine down where they work (reboot, loading a kernel module), and those that need time
or memory, which unit/features/programs has.
"""

import _ctypes
import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from grpo import features
from grpo.rewards.loading import confine
from grpo.workers import kernel, processes
from tests import ROOT

HAS_PROGRAMS = "programs" in features.present()
USER = 54399

MODES = ("root", "container", "rootless", "user")
# What a container's root has by default.
CONTAINER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)


class Attack(NamedTuple):
    name: str
    code: str
    alone: str = "anyone"
    """Who succeeds without a sandbox, outside of containers: anyone, root, or nobody (it is not tried)."""


# name [alone]: code, or more lines of it
TABLE = r"""
# files: reading
read a data file: return open(T['data']).read()
read a token in the home folder: return open(T['token']).read()
read a run's checkpoint: return open(T['checkpoint']).read()
read a module of another environment: return open(T['module']).read()
read /etc/passwd: return open('/etc/passwd').read()
read a file that only its owner may read: return open(T['closed']).read()
list a folder: return os.listdir(T['folder'])
list the temporary folder: return os.listdir('/tmp')
read through a symbolic link: os.symlink(T['data'], 'link'); return open('link').read()
read through a hard link [nobody]: os.link(T['data'], 'hard'); return open('hard').read()
climb out of its folder: return open('../' * 40 + T['data']).read()
open below a descriptor of /: return os.open(T['data'], os.O_RDONLY, dir_fd=os.open('/', os.O_PATH))
reopen a path-only descriptor: return open(f"/proc/self/fd/{os.open(T['data'], os.O_PATH)}").read()
open by a file handle: handle = buffer(bytes([128]) + bytes(200))
    return call('name_to_handle_at', -100, T['data'].encode(), handle, buffer(bytes(8)), 0) == 0
load a library from elsewhere: return ctypes.CDLL(T['library'])
map a file of another user's: f = os.open(T['data'], 0); return mmap.mmap(f, 0, prot=mmap.PROT_READ)[:1]
watch a folder: return libc.inotify_add_watch(call('inotify_init1', 0), T['folder'].encode(), 256) > 0
watch the file system [root]: return call('fanotify_init', 0, 0) >= 0
read the caller's environment: return open(f"/proc/{T['caller']}/environ").read()
read the caller's arguments: return open(f"/proc/{T['caller']}/cmdline").read()
read the caller's memory [root]: return open(f"/proc/{T['caller']}/mem", 'rb')
enter the caller's folder [root]: return os.listdir(f"/proc/{T['caller']}/cwd/")
enter the caller's root [root]: return os.listdir(f"/proc/{T['caller']}/root/etc")
open the kernel's memory [nobody]: return os.open('/dev/mem', os.O_RDONLY)
make the disk's device [root]: os.mknod('disk', 0o060600, os.makedev(254, 0)); return os.path.exists('disk')
look into /sys [root]: return os.listdir('/sys/kernel')
# files: changing
write to a data file: return open(T['data'], 'a').write('x')
truncate a data file: os.truncate(T['scratch'], 0); return True
make a file elsewhere: return open(T['folder'] + '/new', 'w').write('x')
remove a file: os.remove(T['folder'] + '/removable'); return True
rename a file: os.rename(T['folder'] + '/renamable', T['folder'] + '/renamed'); return True
make a folder elsewhere: os.mkdir(T['folder'] + '/folder'); return True
write to the temporary folder: return open('/tmp/left-behind-' + T['id'], 'w').write('x')
write to the interpreter [nobody]: return open(os.path.join(os.path.dirname(os.__file__), 'left.py'), 'w')
change a file's mode: os.chmod(T['data'], 0o644); return True
change the interpreter's mode [root]: os.chmod(sys.executable, 0o755); return True
change a file's mode by a descriptor [root]: os.fchmod(os.open(os.__file__, 0), 0o644); return True
make a file of its own: return open('own', 'w')
make a file without a name: return os.open('.', os.O_TMPFILE | os.O_RDWR)
make a folder of its own: os.mkdir('folder'); return True
make a link of its own: os.symlink('x', 'symbolic'); return True
write to its program [nobody]: return os.open('program.py', os.O_WRONLY)
rename its program [nobody]: os.rename('program.py', 'renamed.py'); return True
lock a file of the interpreter: fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_EX); return True
lock a part of a file: fcntl.lockf(os.open(os.__file__, 0), fcntl.LOCK_SH); return True
lock a part of a file by its descriptor:
    return fcntl.fcntl(os.open(os.__file__, 0), 37, struct.pack('hhqqi', 0, 0, 0, 0, 0))
be signalled when a folder changes: fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 1); return True
change a file's flags [nobody]: return fcntl.ioctl(os.open('program.py', 0), 0x40086602, struct.pack('l', 64))
change a file's attributes [nobody]: return fcntl.ioctl(os.open('program.py', 0), 0x401C5820, bytes(28))
change a file's version [nobody]: return fcntl.ioctl(os.open('program.py', 0), 0x40087602, struct.pack('i', 5))
seal a file [nobody]: fcntl.ioctl(os.open('program.py', 0), 0x40806685, bytes(128)); return True
hold up who opens a file: fcntl.fcntl(os.open(T['data'], 0), 1024, fcntl.F_RDLCK); return True
change a file's times: os.utime(T['data']); return True
give a file away: os.chown(T['data'], -1, os.getgid()); return True
write to a kernel setting [root]: return os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)
write to the caller's oom score [root]: return open(f"/proc/{T['caller']}/oom_score_adj", 'w')
# network
connect by TCP: return socket.create_connection(('127.0.0.1', T['port']), 5)
send by UDP: return socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))
listen: s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); return True
connect to a socket in a folder: socket.socket(socket.AF_UNIX).connect(T['socket']); return True
connect to an abstract socket: socket.socket(socket.AF_UNIX).connect('\0' + T['abstract']); return True
send from a pair to a folder's socket: return socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', T['datagrams'])
make a socket in a folder: socket.socket(socket.AF_UNIX).bind('s'); return True
talk to the kernel by netlink: return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
open a vsock [nobody]: return socket.socket(40, socket.SOCK_STREAM)
open a raw socket [root]: return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
open a socket by x32's number [nobody]: return libc.syscall(0x40000000 + 41, 1, 1, 0) >= 0
open a socket by a ring: return call('io_uring_setup', 4, buffer(bytes(120))) >= 0
# memory that no limit counts
keep memory in a memfd: return os.ftruncate(os.memfd_create('x'), 1 << 20) is None
keep memory in a secret memfd [nobody]: return call('memfd_secret', 0) >= 0
make its stdin grow [nobody]: return os.ftruncate(0, 1 << 20) is None
write to its stdin [nobody]: return os.write(0, b'x')
make shared memory (System V): return call('shmget', 0, 1 << 20, 0o1600) >= 0
attach shared memory of the caller's: return call('shmget', T['shared'], 0, 0) >= 0
make a message queue (System V): return call('msgget', 0, 0o1600) >= 0
make semaphores (System V): return call('semget', 0, 1, 0o1600) >= 0
make a message queue (POSIX): return call('mq_open', ('q' + T['id']).encode(), 0o102, 0o600, None) >= 0
remove shared memory by its number: return call('shmctl', T['numbered']['shm'], 0, None) == 0
remove a message queue by its number: return call('msgctl', T['numbered']['msg'], 0, None) == 0
remove semaphores by their number: return call('semctl', T['numbered']['sem'], 0, 0, None) == 0
send to a message queue by its number:
    return call('msgsnd', T['numbered']['queue'], buffer(struct.pack('l', 1) + bytes(8)), 8, 0o4000) == 0
keep memory in Landlock's rules: return call('landlock_create_ruleset', buffer(bytes([1]) + bytes(7)), 8, 0) > 0
write to /dev/shm: return open('/dev/shm/' + T['id'], 'w')
mount a file system in memory [nobody]: return libc.mount(b't', b'/', b'tmpfs', 0, None) == 0
reserve asynchronous requests: return call('io_setup', 4, buffer(bytes(8))) == 0
# other processes
signal the caller: os.kill(T['caller'], 0); return True
signal a process of the same user: os.kill(T['victim'], 0); return True
kill its parent [nobody]: os.kill(os.getppid(), 9); return True
stop its parent [nobody]: os.kill(os.getppid(), signal.SIGSTOP); return True
signal its group: os.killpg(os.getpgid(os.getppid()), 0); return True
start a process: return os.fork() or os._exit(0)
start a program: return os.posix_spawn('/bin/true', ['true'], {}) > 0
queue a signal: return call('rt_sigqueueinfo', T['victim'], 0, buffer(struct.pack('iii', 0, 0, -1) + bytes(116))) == 0
have the kernel signal another: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, T['victim']); return True
trace a process: return call('ptrace', 0x4206, T['victim'], 0, 0) == 0
read another's memory: return read_memory(T['victim'], T['address'])
take a descriptor of another: return call('pidfd_getfd', os.pidfd_open(T['victim']), 0, 0) >= 0
change another's limits: return resource.prlimit(T['victim'], resource.RLIMIT_CORE, (0, 0))
change another's cores: os.sched_setaffinity(T['victim'], {0}); return True
change another's priority: os.setpriority(os.PRIO_PROCESS, T['victim'], 19); return True
change another's turn at the disk: return call('ioprio_set', 1, T['victim'], 3 << 13) == 0
compare with another: return call('kcmp', os.getpid(), T['victim'], 1, 0, 0) >= 0
outlive its parent: return libc.prctl(1, 0, 0, 0, 0) == 0
raise its limits [nobody]: resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20)); return True
lift its limit on processes [nobody]: resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1)); return True
# privilege and the kernel
be root [root]: os.setuid(0); return True
join a group [root]: os.setgroups([4]); return True
have a capability other than to read [root]: return permitted_capabilities() & ~0b110
gain by a set-user-ID program: return libc.prctl(39, 0, 0, 0, 0) == 0
make namespaces by clone: p = call('clone', 0x10000011, 0, 0, 0, 0); return p > 0 or os._exit(0)
make namespaces by clone3: arguments = buffer(struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0))
    p = call('clone3', arguments, 64); return p > 0 or os._exit(0)
enter the caller's namespaces [root]: return call('setns', os.open(f"/proc/{T['caller']}/ns/uts", 0), 0) == 0
mount [root]: os.mkdir('m'); return libc.mount(b'none', b'm', b'tmpfs', 0, None) == 0 and libc.umount2(b'm', 2) == 0
mount by descriptors [root]: return call('fsopen', b'tmpfs', 0) >= 0
copy a mount [root]: return call('open_tree', -100, b'/', 1) >= 0
make a mount writable [nobody]:
    return call('mount_setattr', -100, b'/', 0, buffer(struct.pack('4Q', 0, 0, 0, 0)), 32) == 0
change the root [nobody]: os.mkdir('r'); os.chroot('r'); return True
read a keyring: return call('keyctl', 6, -4, None, 0) >= 0
add a key: return call('add_key', b'user', T['id'].encode(), b'x', 1, -2) >= 0
request a key [nobody]: return call('request_key', b'user', T['id'].encode(), None, 0) >= 0
load a filter into the kernel [root]:
    return call('bpf', 0, buffer(struct.pack('5I', 2, 4, 4, 1, 0) + bytes(100)), 120) >= 0
measure the machine [nobody]:
    return call('perf_event_open', buffer(struct.pack('IIQ', 1, 112, 0) + bytes(96)), 0, -1, -1, 0) >= 0
handle page faults [root]: return call('userfaultfd', 1) >= 0
name the machine [root]: n = os.uname().nodename.encode(); return call('sethostname', n, len(n)) == 0
read the kernel's log [root]: return call('syslog', 10, None, 0) >= 0
set the clock [nobody]: return call('clock_settime', 0, None) == 0
reach the ports [nobody]: return call('iopl', 0) == 0
load a module [nobody]: return call('finit_module', -1, b'', 0) == 0
restart the machine [nobody]: return call('reboot', 0, 0, 0, None) == 0
swap to a file [nobody]: return call('swapoff', b'nothing') == 0
# last, since without a sandbox the process then is in another namespace
make a user namespace: return call('unshare', 0x10000000) == 0
"""


def attacks(table: str) -> list[Attack]:
    found = []
    for line in table.strip().splitlines():
        if line.startswith("    "):
            found[-1] = found[-1]._replace(code=f"{found[-1].code}\n {line.strip()}".strip())
        elif not line.startswith("#"):
            name, alone, code = re.fullmatch(r"(.+?)(?: \[(\w+)\])?:(?: (.*))?", line).groups()
            found.append(Attack(name, code or "", alone or "anyone"))
    return found


ATTACKS = attacks(TABLE)


class Program(NamedTuple):
    name: str
    code: str
    """May use T too; limited to 8 threads and 256 MiB."""
    bounded: str
    """What bounds it, as an expression of `status` and `stdout`."""
    seconds: float = 120.0
    """Its limit; of a program that another limit ends long enough for a loaded machine."""


# Makes files as long as it may, keeps the disk space of each, and prints how many it has: 0, or up to MOST, so that a
# test that fails fills no disk.
_HOLD = """
def hold(keep, size=1 << 20, most=32, flags=os.O_CREAT, unlinks=True):
    held = 0
    for folder in ('.', '/tmp', '/var/tmp', '/dev/shm'):
        try:
            while held < most:
                name = f'{folder}/{T["mark"]}-{held}' if flags == os.O_CREAT else folder
                f = os.open(name, flags | os.O_RDWR, 0o600)
                if unlinks and flags == os.O_CREAT: os.unlink(name)
                if size: libc.fallocate(f, keep_size, ctypes.c_long(0), ctypes.c_long(size))
                keep(f)
                held += 1
        except OSError: pass
    os.write(1, str(held).encode())
    os._exit(0)
keep_size, files = 0, []
def move(f): files.append(os.dup(f)); os.close(f)
def map_it(f): libc.mmap(None, ctypes.c_long(4096), 1, 2, f, ctypes.c_long(0)); os.close(f)
"""
HOLDS = [
    ("with names", "hold(os.close, unlinks=False)"),
    ("without names", "hold(move)"),
    ("beyond their ends", "keep_size = 1; hold(move)"),
    ("of folders", "hold(move, flags=os.O_TMPFILE)"),
    ("by mappings", "hold(map_it)"),
    (
        "of another table of descriptors",
        "def apart():\n    libc.syscall(436, 3, 2**32 - 1, 2)\n    hold(move)\n"
        "t = threading.Thread(target=apart); t.start(); t.join()",
    ),
    (
        "in flight",
        "import socket\na, b = socket.socketpair()\nhold(lambda f: (socket.send_fds(a, [b'x'], [f]), os.close(f)))",
    ),
    ("that nobody may list", "libc.prctl(4, 0); hold(move)"),
    ("of no bytes", "hold(map_it, size=0, most=8000)"),
]

# What takes a program of its own; not tried without a sandbox.
PROGRAMS = [
    Program("kill all that can be killed", "os.kill(-1, 9)", "status in ('ok', 'failed', 'killed')"),
    Program(
        "start processes without end",
        "n = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n"
        "finally: os.write(1, str(n).encode())",
        "status == 'failed' and stdout == '0'",
    ),
    Program(
        "start threads without end",
        "threading.stack_size(1 << 16)\n"
        "n = 0\n"
        "try:\n"
        "    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "finally: os.write(1, str(n).encode()); os._exit(1)",
        "status == 'failed' and int(stdout) <= 7",
    ),
    Program(
        "leave a process behind",
        "libc.prctl(1, 0, 0, 0, 0)\n"
        "end, other_end = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', T['mark']])\n"
        "    os._exit(0)\n"
        "os.close(other_end); os.read(end, 1); print('left')",  # when the other program has begun
        "status in ('ok', 'failed')",
    ),
    Program("use all memory", "b = []\nwhile True: b.append(bytes(1 << 20))", "status == 'failed'"),
    Program("use all memory by mappings", "b = []\nwhile True: b.append(mmap.mmap(-1, 1 << 24))", "status == 'failed'"),
    *(
        Program(f"hold files {name}", _HOLD + code, "status in ('ok', 'failed') and stdout == '0'")
        for name, code in HOLDS
    ),
    Program("print without end", "while True: os.write(1, bytes(1 << 16))", "status == 'output'"),
    Program(
        "loop for ever, deaf to signals",
        "for s in (1, 2, 3, 10, 12, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "status == 'timeout'",
        seconds=1.0,
    ),
    Program(
        "call the kernel as a 32-bit program",  # socket(AF_UNIX, SOCK_STREAM, 0) by int 0x80, for x86
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('53b867010000bb01000000b90100000031d2cd805bc3'))\n"
        "function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "os.write(1, str(function()).encode())",
        "status == 'killed' and stdout == ''",
    ),
]

_START = (
    "import ctypes, json, mmap, os, signal, sys, threading, time\nT = json.load(sys.stdin)\nlibc = ctypes.CDLL(None)\n"
)


def running() -> list[str]:
    """The command lines of all processes that can be seen."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_text().replace("\0", " ").strip())
    return found


def try_programs() -> dict[str, str]:
    """Program -> "bounded", or how it ended. Also looks whether the victim lives and no process is left."""
    from grpo.features.programs.run import Limits, run_python

    results = {}
    for program in PROGRAMS:
        with targets() as there:
            there["mark"] = f"left-{there['id']}"
            limits = Limits(program.seconds, memory_gib=0.25, threads=8)
            outcome = run_python(_START + program.code, json.dumps(there), limits)
            names = {"status": outcome.status, "stdout": outcome.stdout[:1000]}
            left = any(there["mark"] in arguments for arguments in running())
            alive = f"/bin/sleep 600.{os.getpid()}" in running()
            good = alive and not left and eval(program.bounded, names)
            results[program.name] = "bounded" if good else f"{outcome}, victim alive: {alive}, left: {left}"[:500]
    return results


# Runs every attack in turn and prints, for each, "worked" or what stopped it. Nothing of the project is imported, as it
# must run in the sandbox.
_PROGRAM = """
import ctypes, fcntl, json, mmap, os, resource, signal, socket, struct, sys, time
T = json.loads(sys.stdin.read())
signal.signal(signal.SIGIO, signal.SIG_IGN)  # comes when another process reads the folder that an attack watches
libc = ctypes.CDLL(None, use_errno=True)
def argument(value): return ctypes.c_long(value) if isinstance(value, int) else value
def call(name, *arguments):
    result = libc.syscall(ctypes.c_long(T["numbers"][name]), *map(argument, arguments))
    if result < 0: raise OSError(ctypes.get_errno(), name)
    return result
def buffer(content): return ctypes.create_string_buffer(content, len(content))
def permitted_capabilities():
    data = ctypes.create_string_buffer(24)
    libc.capget(struct.pack("Ii", 0x20080522, 0), data)
    return struct.unpack("6I", data.raw)[1] | struct.unpack("6I", data.raw)[4] << 32
def read_memory(pid, address):
    data = ctypes.create_string_buffer(8)
    here, there = struct.pack("PN", ctypes.addressof(data), 8), struct.pack("PN", address, 8)
    return call("process_vm_readv", pid, here, 1, there, 1, 0) == 8
results = {}
for name, code in T["attacks"]:
    space = dict(globals())
    try:
        exec("def attack():\\n " + code, space)
        results[name] = "worked" if space["attack"]() else "nothing"
    except BaseException as error:
        results[name] = type(error).__name__
os.write(1, json.dumps(results).encode())
os._exit(0)
"""


def remove_numbered(numbered: dict[str, int]) -> None:
    """Remove what no attack has removed."""
    for name, number in numbered.items():
        with contextlib.suppress(OSError):
            kernel.libc({"shm": "shmctl", "sem": "semctl"}.get(name, "msgctl"), number, 0, 0)


@contextlib.contextmanager
def targets() -> Iterator[dict[str, Any]]:
    """What there is to attack: files, sockets, shared memory and a process of the calling user, open to everybody."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="targets-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        files = ("data.jsonl", "home/token", "run/step-1", "venv/lib/module.py", "scratch", "removable", "renamable")
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("secret")
        (folder / "venv/closed").write_text("secret")
        (folder / "venv/closed").chmod(0o600)
        shutil.copy(_ctypes.__file__, folder / "library.so")
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        name = f"targets-{os.getpid()}"
        for address, kind in (
            (str(folder / "socket"), socket.SOCK_STREAM),
            (f"\0{name}", socket.SOCK_STREAM),
            (str(folder / "datagrams"), socket.SOCK_DGRAM),
        ):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            server.bind(address)
            if kind == socket.SOCK_STREAM:
                server.listen(8)
            if address[0] != "\0":
                os.chmod(address, 0o777)
        key = 0x5AFE0000 + os.getpid() % 0xFFFF
        shared = kernel.libc("shmget", key, 4096, 0o1666)
        stack.callback(kernel.libc, "shmctl", shared, 0, None)
        numbered = {"shm": kernel.libc("shmget", 0, 4096, 0o1666), "sem": kernel.libc("semget", 0, 1, 0o1666)}
        numbered |= {name: kernel.libc("msgget", 0, 0o1666) for name in ("msg", "queue")}
        stack.callback(remove_numbered, numbered)
        victim = stack.enter_context(subprocess.Popen(["/bin/sleep", f"600.{os.getpid()}"], stdin=subprocess.DEVNULL))
        stack.callback(victim.kill)
        maps = pathlib.Path(f"/proc/{victim.pid}/maps").read_text()
        places = {"data": "data.jsonl", "token": "home/token", "checkpoint": "run/step-1", "folder": ""}
        places |= {"module": "venv/lib/module.py", "closed": "venv/closed", "library": "library.so"}
        places |= {name: name for name in ("scratch", "socket", "datagrams")}
        yield {key: str(folder / place) for key, place in places.items()} | {
            "abstract": name,
            "id": name,
            "port": tcp.getsockname()[1],
            "shared": key,
            "numbered": numbered,
            "victim": victim.pid,
            "address": int(maps.split("-")[0], 16),
            "caller": os.getpid(),
            "numbers": {
                name: kernel.call_numbers().get(name)
                for name in re.findall(r"call\([\"'](\w+)", _PROGRAM + " ".join(a.code for a in ATTACKS))
            },
        }


def open_the_way() -> None:
    """Take this process into a mount namespace in which everybody reaches the interpreter and the project.

    They may lie in root's home. Needs root.
    """
    kernel.libc("unshare", 0x00020000)
    kernel.libc("mount", b"none", b"/", None, ctypes.c_ulong(1 << 18 | 1 << 14), None)  # private, with all below
    places = {str(ROOT): [], sys.base_prefix: [], sys.prefix: []}
    for place in places:
        places[place] = [str(p) for p in pathlib.Path(place).parents if not p.stat().st_mode & 0o001]
    descriptors = {place: os.open(place, os.O_PATH) for place, closed in places.items() if closed}
    for folder in {closed[-1] for closed in places.values() if closed}:
        kernel.libc("mount", b"none", folder.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=755")
    for place, descriptor in descriptors.items():
        os.makedirs(place, exist_ok=True)  # an environment in the project came with it
        source = f"/proc/self/fd/{descriptor}".encode()
        kernel.libc("mount", source, place.encode(), None, ctypes.c_ulong(1 << 12 | 1 << 14), None)  # bind, all below
    os.chdir(ROOT)


def enter(mode: str) -> None:
    """Make this process root, root with a container's capabilities, root of a user's own namespace, or a user."""
    if mode == "container":
        kernel.drop_capabilities(CONTAINER_CAPABILITIES)
    elif os.geteuid() == 0:
        if mode in ("rootless", "user"):
            open_the_way()
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            kernel.prctl(4, 1)  # a change of user took it: /proc/self is this user's
        if mode == "rootless":
            kernel.libc("unshare", 0x10000000)
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {USER} 1"), ("gid_map", f"0 {USER} 1")):
                pathlib.Path(f"/proc/self/{name}").write_text(text)


def in_a_worker(job: dict[str, Any]) -> str:
    """What the attacks print in a confined reward process."""
    parent, (read, write) = os.getpid(), os.pipe()
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.flush()
        given = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
        pid = os.fork()
        if pid == 0:
            processes.limit(4.0, parent)
            os.dup2(given, 0)
            os.dup2(write, 1)
            confine()
            exec(_PROGRAM, {"__name__": "__main__"})
        os.close(write)
        with open(read) as results:
            printed = results.read()
        os.waitpid(pid, 0)
    return printed


def without_lockdown(job: dict[str, Any]) -> str:
    """What the attacks print in a plain interpreter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [sys.executable, "-c", _PROGRAM]
        result = subprocess.run(command, input=json.dumps(job), cwd=folder, capture_output=True, text=True)
    for left in (f"/tmp/left-behind-{job['id']}", f"/dev/shm/{job['id']}"):
        pathlib.Path(left).unlink(missing_ok=True)
    return result.stdout


def in_a_program(job: dict[str, Any]) -> str:
    """What the attacks print as a program."""
    from grpo.features.programs.run import Limits, run_python

    return run_python(_PROGRAM, json.dumps(job), Limits(600.0, memory_gib=2.0)).stdout


def try_all(mode: str) -> dict[str, dict[str, str]]:
    """Where -> attack -> what it did, "worked", "nothing" or the name of an exception; `programs`: try_programs."""
    enter(mode)
    found = {}
    runs = {"worker": in_a_worker, "outside": without_lockdown}
    if HAS_PROGRAMS:
        found["programs"] = try_programs()
        runs = {"program": in_a_program} | runs
    for where, run in runs.items():
        with targets() as there:
            tried = [(a.name, a.code) for a in ATTACKS if where != "outside" or a.alone != "nobody"]
            found[where] = json.loads(run(there | {"attacks": tried}))
    return found


def run_mode(mode: str) -> dict[str, Any]:
    """What `try_all` returns, from a fresh process."""
    command = [sys.executable, "-m", "tests.unit.workers.lockdown_attacks", mode]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if result.returncode:
        raise RuntimeError(f"mode {mode}: {result.stderr[-2000:]}")
    return json.loads(result.stdout)


if __name__ == "__main__":
    print(json.dumps(try_all(sys.argv[1])))
