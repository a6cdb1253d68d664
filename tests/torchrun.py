"""Run a program of several ranks with a deadline: a hang is a failure with every rank's stack, not a stalled CI."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

from grpo.workers.processes import children
from tests import ROOT
from tests.forks import STARTING, Fork, can_fork

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


def torchrun(program: str, *arguments: object, nproc: int) -> str:
    """Run `torchrun --nproc_per_node=NPROC program arguments...` and return its output. AssertionError if it fails."""
    return output_of(run_torchrun(program, *arguments, nproc=nproc))


def run_torchrun(program: str, *arguments: object, nproc: int) -> subprocess.CompletedProcess:
    """Run torchrun and return its exit code and output. A missed deadline raises AssertionError with all stacks."""
    return finish(start_torchrun(program, *arguments, nproc=nproc))


def start_torchrun(
    program: str, *arguments: object, nproc: int, launcher: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen | Fork:
    """Start torchrun and return at once, for tests of two agents side by side. `program` is a file or a module."""
    launch = ("-m", "torch.distributed.run", *launcher, f"--nproc_per_node={nproc}")
    what = (ROOT / program,) if program.endswith(".py") else ("-m", program)
    return start_python(*launch, *what, *arguments)


def two_nodes(folder: pathlib.Path) -> tuple[str, ...]:
    """Launcher flags for each of two agents, which meet by a file: a port found free now may be taken by then."""
    meeting = ("--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={folder / 'meeting'}")
    return (*meeting, "--rdzv_id=two_nodes", "--nnodes=2")


def run_python(*arguments: object) -> str:
    """Run `python arguments...`, one process. Returns its output; a failure raises AssertionError."""
    return output_of(finish(start_python(*arguments)))


def output_of(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-20_000:]}"
    return result.stdout


def start_python(*arguments: object, network_of: int = 0, **variables: str) -> subprocess.Popen | Fork:
    """Start a Python process in its own session, with SETTINGS; a fork where that is the same.

    network_of: the process whose network and hostname it gets.
    """
    words = words_of(arguments)
    with STARTING:  # which changes os.environ for a moment, in another thread
        environment = os.environ | SETTINGS | variables
    if can_fork():
        return Fork(words, environment, ROOT, network_of)
    enter = ["nsenter", "--net", "--uts", f"--target={network_of}"] if network_of else []
    return subprocess.Popen(
        [*enter, sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def words_of(arguments: Iterable[object]) -> list[str]:
    """Return a command's words. A text that begins with `--` is flags and their values; all else is one word."""
    words: list[str] = []
    for argument in arguments:
        is_flags = isinstance(argument, str) and argument.startswith("--")
        words += argument.split() if is_flags else [str(argument)]
    return words


def finish(process: subprocess.Popen | Fork) -> subprocess.CompletedProcess:
    """Wait for a process. At the deadline make every rank print its stack (SIGABRT), kill them all and fail."""
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        pids = [*children(process.pid), process.pid]  # a launcher prints its own last
        send_all(pids, os.kill, signal.SIGABRT)
        time.sleep(2)
        send_all(pids, os.killpg, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {DEADLINE:.0f} s; stacks:\n{output[-30_000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def send_all(pids: list[int], send: Callable[[int, int], None], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            send(pid, number)
