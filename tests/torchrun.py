"""Run a program of several ranks with a deadline: a hang is a failure with every rank's stack, not a stalled CI."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests.forks import Fork, can_fork

ROOT = pathlib.Path(__file__).parent.parent
# Seconds for a program to end. A busy machine takes a tenth of it, and a hang ends long before CI's limit.
DEADLINE = 600.0
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled on CPU, and this saves seconds of every start
    "PYTHONFAULTHANDLER": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # or each start compiles what it imports
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # one cache for all tests: inspecting a model class costs vLLM 9 s the first time
    "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(ROOT / ".cache" / "vllm")),
}


def torchrun(
    program: str,
    *arguments: object,
    nproc: int,
    deadline: float = DEADLINE,
    launcher: tuple[str, ...] = ("--standalone",),
) -> str:
    """Run `torchrun --nproc_per_node=NPROC program arguments...` and return its output. AssertionError if it fails."""
    result = run_torchrun(program, *arguments, nproc=nproc, deadline=deadline, launcher=launcher)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-20_000:]}"
    return result.stdout


def run_torchrun(
    program: str,
    *arguments: object,
    nproc: int,
    deadline: float = DEADLINE,
    launcher: tuple[str, ...] = ("--standalone",),
) -> subprocess.CompletedProcess:
    """Run torchrun and return its exit code and output. A missed deadline raises AssertionError with all stacks."""
    process = start_torchrun(program, *arguments, nproc=nproc, launcher=launcher)
    return finish(process, deadline)


def start_torchrun(
    program: str, *arguments: object, nproc: int, launcher: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen | Fork:
    """Start torchrun and return at once, for tests of two agents side by side. `program` is a file or a module."""
    launch = ("-m", "torch.distributed.run", *launcher, f"--nproc_per_node={nproc}")
    what = (ROOT / program,) if program.endswith(".py") else ("-m", program)
    return start_python(*launch, *what, *arguments)


def run_python(*arguments: object, deadline: float = DEADLINE) -> str:
    """Run `python arguments...`, one process. Returns its output; a failure raises AssertionError."""
    result = finish(start_python(*arguments), deadline)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-20_000:]}"
    return result.stdout


def start_python(*arguments: object) -> subprocess.Popen | Fork:
    """Start a Python process in its own session, with SETTINGS; a fork where that is the same."""
    if can_fork():
        return Fork([*map(str, arguments)], os.environ | SETTINGS, ROOT)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen | Fork, deadline: float = DEADLINE) -> subprocess.CompletedProcess:
    """Wait for a process. At the deadline make every rank print its stack (SIGABRT), kill them all and fail."""
    started = time.monotonic()
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        pids = [*children_of(process.pid), process.pid]  # a launcher prints its own last
        for send, number, wait in ((os.kill, signal.SIGABRT, 2), (os.killpg, signal.SIGKILL, 0)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    send(pid, number)
            time.sleep(wait)
        output, _ = process.communicate()
        waited = time.monotonic() - started
        raise AssertionError(
            f"no end after {waited:.0f} s (deadline {deadline} s); stacks:\n{output[-30_000:]}"
        ) from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def children_of(pid: int) -> list[int]:
    """Return the process ids of the direct children."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]
