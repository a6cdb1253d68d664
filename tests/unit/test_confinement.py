"""Reward processes: what built-in functions cannot do in theirs, and which environment variables any of them gets."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from grpo.config import RewardConfig
from grpo.rewards.workers import confinement
from grpo.rewards.workers.pool import RewardPool
from grpo.types import Completion, Prompt, Rollout
from grpo.workers import lockdown

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(120)

# A supervisor that forks one worker, as supervisor.py does it; instead of reward functions the worker runs attacks.
# Each returns if it succeeds and raises OSError if it is refused.
ATTACKS = r'''
import ctypes, json, os, pathlib, signal, socket, subprocess, sys, tempfile
from grpo.config import RewardConfig
from grpo.rewards.workers.confinement import confine
from grpo.rewards.workers.worker import limit

home, confined = pathlib.Path(sys.argv[1]), sys.argv[2] == "confined"
driver = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def in_a_child(attack):
    """The child's attack counts as the parent's."""
    pid = os.fork()
    if pid == 0:
        try:
            attack()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise PermissionError("the child was refused")

def run(*command):
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        raise PermissionError(command)

def rename():
    os.rename(home / "rename-me", home / "renamed")

def link():
    os.link(home / "secret", home / "linked")

def append():
    with open(home / "append-to-me", "a") as file:
        file.write("x")

def write_descriptor():
    os.write(writable, b"x")

class Pair(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

def read_memory():
    """An object of the supervisor, which has it at the same address."""
    buffer = ctypes.create_string_buffer(8)
    here, there = Pair(ctypes.addressof(buffer), 8), Pair(id(None), 8)
    call("process_vm_readv", os.getppid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)

ATTACKS = {
    "tcp": lambda: socket.socket(),
    "udp": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "tcp6": lambda: socket.socket(socket.AF_INET6),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "name server": lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("127.0.0.1", 53)),
    "pair of datagram sockets": lambda: socket.socketpair(type=socket.SOCK_DGRAM),
    "tcp in a child": lambda: in_a_child(socket.socket),
    "new file": lambda: (home / "new").write_text("x"),
    "new temporary file": lambda: tempfile.TemporaryFile(),
    "overwrite": lambda: (home / "overwrite-me").write_text("x"),
    "append": append,
    "write to an open file": write_descriptor,
    "truncate": lambda: os.truncate(home / "truncate-me", 0),
    "new folder": lambda: (home / "folder").mkdir(),
    "remove": lambda: (home / "remove-me").unlink(),
    "rename": rename,
    "symbolic link": lambda: (home / "pointer").symlink_to("/"),
    "link": link,
    "pipe in a folder": lambda: os.mkfifo(home / "pipe"),
    "mode": lambda: os.chmod(home / "secret", 0o777),
    "times": lambda: os.utime(home / "secret"),
    "shared memory": lambda: os.memfd_create("x"),
    "a shell that writes": lambda: run("/bin/sh", "-c", f"echo x > {home}/by-shell"),
    "home folder": lambda: (home / "secret").read_text(),
    "list the home folder": lambda: os.listdir(home),
    "file of the run folder": lambda: pathlib.Path("runs/secret").read_text(),
    "list the run's folder": lambda: os.listdir("."),
    "passwords": lambda: pathlib.Path("/etc/passwd").read_text(),
    "list the root": lambda: os.listdir("/"),
    "processes": lambda: os.listdir("/proc"),
    "environment of the supervisor": lambda: pathlib.Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "environment of the driver": lambda: pathlib.Path(f"/proc/{driver}/environ").read_bytes(),
    "memory of the supervisor": lambda: open(f"/proc/{os.getppid()}/mem", "rb").close(),
    "read memory by a system call": read_memory,
    "trace the supervisor": lambda: call("ptrace", 0x4206, os.getppid(), None, None),
    "signal to the supervisor": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "signal to the driver": lambda: os.kill(driver, signal.SIGCONT),
    "signal by a descriptor": lambda: signal.pidfd_send_signal(os.pidfd_open(driver), signal.SIGCONT),
    "keyring": lambda: call("syscall", {"x86_64": 250, "aarch64": 219}[os.uname().machine], 0, -2, 1),
}

for name in ("rename-me", "append-to-me", "overwrite-me", "truncate-me", "remove-me", "open"):
    (home / name).write_text("some text")
writable = os.open(home / "open", os.O_WRONLY)
reader, writer = os.pipe()
supervisor = os.getpid()
pid = os.fork()
if pid == 0:
    keep = os.dup(writer)
    limit(4.0, supervisor)
    lacking = confine(RewardConfig(environment=("JUDGE_KEY",))) if confined else ""
    outcomes = {"lacking": lacking, "variables": sorted(os.environ)}
    for name, attack in ATTACKS.items():
        try:
            attack()
            outcomes[name] = "done"
        except OSError as error:
            outcomes[name] = type(error).__name__
    os.write(keep, json.dumps(outcomes).encode())
    os._exit(0)
os.close(writer)
with open(reader, "rb") as results:
    print(results.read().decode())
os.waitpid(pid, 0)
'''
NAMES = [line.split('"')[1] for line in ATTACKS.partition("ATTACKS = {")[2].partition("\n}")[0].splitlines()[1:]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, str]]:
    """By attack: `done`, or the error that refused it."""
    found = {}
    for mode in ("confined", "not"):
        home = tmp_path_factory.mktemp("home")
        (home / "runs").mkdir()
        for secret in (home / "secret", home / "runs" / "secret"):
            secret.write_text("hunter2")
        environment = os.environ | {"HOME": str(home), "JUDGE_KEY": "hunter2", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", ATTACKS, str(home), mode]
        result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        found[mode] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("attack", NAMES)
def test_what_a_confined_process_cannot_do(attack, outcomes):
    if outcomes["confined"]["lacking"]:
        pytest.skip(outcomes["confined"]["lacking"])
    assert outcomes["not"][attack] == "done"  # without confinement it works, so the next line can fail
    assert outcomes["confined"][attack] in ("PermissionError", "OSError", "FileNotFoundError")


def test_enough_attacks_were_tried():
    assert len(NAMES) >= 35


def test_a_confined_process_loses_the_variables_that_are_for_the_users_functions(outcomes):
    assert "JUDGE_KEY" in outcomes["not"]["variables"]
    assert "JUDGE_KEY" not in outcomes["confined"]["variables"]


# ---------------------------------------------------------------------------------------------------------------------
# The pool

OWN = r"""
import os, pathlib
def sees_a_secret(completions, **columns):
    places = [os.environ, pathlib.Path("/proc/self/environ"), pathlib.Path(f"/proc/{os.getppid()}/environ")]
    texts = [str(dict(place)) if place is os.environ else place.read_bytes().decode() for place in places]
    return [float(sum("hunter2" in text for text in texts))]
def needs_a_key(completions, **columns):
    return [float(len(os.environ["JUDGE_KEY"]))]
def plain_key_error(completions, **columns):
    return [{}["JUDGE_KEY"]]
def writes(completions, **columns):
    pathlib.Path(__file__).with_name("written").write_text(completions[0])
    return [1.0]
"""


@pytest.fixture
def own(tmp_path: pathlib.Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def rewards(functions: list[str], *texts: str, fields: dict | None = None, **columns) -> list[Rollout]:
    config = RewardConfig(functions=dict.fromkeys(functions, 1.0), num_workers=1, **(fields or {}))
    pool = RewardPool(config, 100)
    try:
        completion = Completion.of(torch.tensor([1]), torch.tensor([0.0]), False)
        pool.submit([Rollout(Prompt(0, [1], columns), completion, text) for text in texts], 1)
        return pool.collect()
    finally:
        pool.close()


def test_no_secret_reaches_a_reward_process(own, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "ANYTHING", "OMP_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    assert rewards([f"{own}:sees_a_secret"], "a")[0].reward == 0.0
    assert rewards([f"{own}:sees_a_secret"], "a", fields={"environment": ("ANYTHING",)})[0].reward == 3.0


def test_which_variables_are_passed_on(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    passed = ["PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS"]
    for name in [
        *passed,
        "HF_HOME",
        "HF_TOKEN",
        "PATH_KEY",
        "MY_PATH",
        "MKL_SECRET",
        "PYTHON_TOKEN",
        "MASTER_ADDR",
        "WANTED",
    ]:
        monkeypatch.setenv(name, "x")
    assert sorted(confinement.environment(["WANTED"])) == sorted([*passed, "WANTED"])
    with pytest.raises(
        ValueError, match="reward.environment names ABSENT, which is not set; export it or leave it out"
    ):
        confinement.environment(["WANTED", "ABSENT"])


def test_a_variable_that_is_missing_says_how_to_have_it(own, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    (scored,) = rewards([f"{own}:needs_a_key"], "a")
    assert scored.failures[f"{own}:needs_a_key"] == (
        f"KeyError: 'JUDGE_KEY' ({own}:8); reward functions get few environment variables, others if "
        "reward.environment names them"
    )
    assert rewards([f"{own}:needs_a_key"], "a", fields={"environment": ("JUDGE_KEY",)})[0].reward == 7.0
    (scored,) = rewards([f"{own}:plain_key_error"], "a")
    assert scored.failures[f"{own}:plain_key_error"] == f"KeyError: 'JUDGE_KEY' ({own}:10)"


def test_built_in_functions_and_the_users_own_run_in_different_processes(own, tmp_path):
    """One worker each: that of the built-in has a filter of system calls (Seccomp 2), the other has none."""
    functions = ["math_reward", "thinking_reward", f"{own}:writes", "code_reward"]
    config = RewardConfig(functions=dict.fromkeys(functions, 1.0), options={"thinking_reward": {}}, num_workers=1)
    parts = confinement.split(config)
    assert list(parts[True].functions) == functions[:2] and list(parts[False].functions) == functions[2:]
    assert parts[True].options == {"thinking_reward": {}} and parts[False].options == {}

    pool = RewardPool(config, 100)
    children = pathlib.Path(f"/proc/{pool.supervisor.pid}/task/{pool.supervisor.pid}/children").read_text().split()
    modes = [pathlib.Path(f"/proc/{pid}/status").read_text().partition("Seccomp:")[2].split()[0] for pid in children]
    pool.close()
    outside = pathlib.Path("/proc/self/status").read_text().partition("Seccomp:")[2].split()[0]
    assert sorted(modes) == sorted([outside, "2" if lockdown.offered().seccomp else outside])

    code = "\n```python\nx = 1\n```"
    (scored,) = rewards(functions, f"<think>a</think><answer>5</answer>{code}", answer="5", tests="assert x == 1")
    assert scored.rewards == dict.fromkeys(functions, 1.0) and scored.failures == {}
    assert (tmp_path / "written").read_text().startswith("<think>")


def test_what_the_kernel_lacks_is_said_once(monkeypatch, capfd):
    """The supervisor is a process of its own: the driver's end is what says it."""
    real = RewardPool._receive
    monkeypatch.setattr(
        RewardPool, "_receive", lambda self, seconds: (real(self, seconds)[0], "files are open (ENOSYS)")
    )
    RewardPool(RewardConfig(functions={"format_reward": 1.0}, num_workers=2), 100).close()
    warning = "warning: this kernel does not confine the processes of built-in rewards: files are open (ENOSYS)\n"
    assert capfd.readouterr().out == warning


def test_a_kernel_without_landlock_or_filters_is_reported_and_files_stay_empty(tmp_path):
    """In a process of its own, because the rest of confinement stays."""
    program = (
        "import os\n"
        "from grpo.config import RewardConfig\n"
        "from grpo.workers import lockdown\nfrom grpo.rewards.workers import confinement\n"
        "def lacks(*_): raise OSError('no such thing')\n"
        "lockdown.restrict_files = lockdown.deny_calls = lacks\n"
        "print(confinement.confine(RewardConfig()))\n"
        "try: os.write(os.open('written', os.O_WRONLY | os.O_CREAT), b'x')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    lacking = "files and signals are open to them (no such thing); the network is open to them (no such thing)"
    assert result.stdout == f"{lacking}\nFile too large\n"
    assert (tmp_path / "written").read_bytes() == b""


@pytest.mark.parametrize("place", ["grpo", "math_verify", "sympy"])
def test_what_built_in_functions_import_is_readable(place):
    spec = importlib.util.find_spec(place)
    folder = os.path.realpath(spec.submodule_search_locations[0])
    readable = [os.path.realpath(readable) for readable in confinement.readable_places()]
    assert any(folder == readable_place or folder.startswith(readable_place + "/") for readable_place in readable)
    private = [ROOT, *ROOT.parents, pathlib.Path.home(), pathlib.Path("/usr"), pathlib.Path("/tmp")]
    assert [str(path) for path in private if os.path.realpath(path) in readable] == []


def test_an_environment_in_a_projects_folder_does_not_open_the_project(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    readable = confinement.readable_places()
    assert str(tmp_path / "lib") in readable and str(tmp_path) not in readable
