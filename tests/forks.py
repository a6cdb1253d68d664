"""Programs of the tests as forks of a process that has imported everything, which spares each rank seconds of a core.

A fork runs what `python words...` would: torchrun itself too, whose ranks then are forks with an environment, session,
output and exit code of their own. Ranks are forked before torchrun has threads: a fork inherits the locks that threads
hold, and one start in some hundred hung. What differs from a start of its own: modules are there already and hold
vLLM's kernels for CPUs, all ranks hash strings alike, and /proc shows another command line. With COLD_STARTS in the
environment, and on machines with GPUs, whose driver cannot be forked, each program is started by itself.
"""

import atexit
import gc
import importlib
import inspect
import multiprocessing
import os
import pathlib
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver
from typing import NoReturn
from unittest import mock

from grpo.libraries import quiet_libraries
from grpo.workers import kernel

MODULES = (
    *("train_grpo", "train_sft", "grpo.tools.evaluate", "grpo.tools.replay", "torch.distributed.run"),
    *("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "torch.utils.tensorboard", "datasets"),
    # what the first engine, the first model and the first command line of a process import, half a second of each rank
    *("vllm.entrypoints.launchers.cli_args", "vllm.plugins.lora_resolvers.filesystem_resolver"),
    *("vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.async_scheduler"),
    *("vllm.model_executor.layers.quantization.online.base", "vllm.distributed.elastic_ep.elastic_execute"),
    *("torchtitan.trainer", "torchtitan.models.qwen3.sharding", "tyro._backends._tyro_backend", "typeguard"),
)


STARTING = threading.Lock()


def can_fork() -> bool:
    return not os.environ.get("COLD_STARTS") and shutil.which("nvidia-smi") is None


class Fork:
    """A program that runs in a fork, with the part of Popen that torchrun.py uses."""

    def __init__(self, words: list[str], environment: dict[str, str], folder: pathlib.Path, network_of: int = 0):
        self.args = words
        self.output = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # by one thread at a time, or the variables of one would stay behind another
        with STARTING, mock.patch.dict(os.environ, environment | {"IMPORT_FOR_FORKS": "1"}):
            forkserver.ensure_running()
        self.process = context.Process(target=_begin, args=(words, environment, folder, self.output.name, network_of))
        self.process.start()
        self.pid = self.process.pid

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        self.returncode = self.process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.output.read(), None


class Rank(subprocess.Popen):
    """A fork that waits for work. torchrun, itself in a fork, uses it in place of a new process."""

    waiting: list[tuple[int, int]] = []
    """Process id of each, and the pipe that brings its program."""

    @classmethod
    def fork(cls) -> None:
        """Fork a process that waits, and ends with torchrun if nothing comes."""
        reads, writes = os.pipe()
        pid = os.fork()
        if pid:
            os.close(reads)
            cls.waiting.append((pid, writes))
            return
        for end in (writes, *(end for _, end in cls.waiting)):
            os.close(end)
        with open(reads, "rb") as pipe:
            task = pipe.read()
        if not task:
            os._exit(0)
        _run(*pickle.loads(task))

    def _execute_child(self, words, executable, preexec_fn, close_fds, pass_fds, cwd, environment, *_) -> None:
        self.pid, writes = self.waiting.pop()
        self._child_created = True
        with open(writes, "wb") as pipe:
            pickle.dump((words[1:], dict(environment)), pipe)


def replace_kernels_once() -> None:
    """Let vLLM replace its Triton kernels here, not in each engine: it looks at all names of six thousand modules."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in the rank, which needs it anyway, not in a process that imports it all."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _begin(
    words: list[str], environment: dict[str, str], folder: pathlib.Path, output: str, network_of: int
) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    for namespace in ("net", "uts") if network_of else ():
        with open(f"/proc/{network_of}/ns/{namespace}") as file:
            kernel.libc("setns", file.fileno(), 0)
    if "torch.distributed.run" in words:
        numbers = dict(re.findall(r"--(nproc_per_node|max_restarts)=(\d+)", " ".join(words)))
        for _ in range(int(numbers.get("nproc_per_node", 1)) * (1 + int(numbers.get("max_restarts", 0)))):
            Rank.fork()
        subprocess_handler.Popen = Rank
        # asked hundreds of times for a log's sake, it looks at each of six thousand modules
        inspect.getmodule = lambda *_: None
    _run(words, environment)


def _run(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Run in this process what `python words...` would."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    words = [word for number, word in enumerate(words) if (number, word) != (0, "-u")]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path = [os.getcwd(), *sys.path]
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path = [os.path.dirname(os.path.abspath(words[0])), *sys.path]
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if os.environ.pop("IMPORT_FOR_FORKS", ""):  # in the process that is forked
    quiet_libraries()
    for name in MODULES:
        importlib.import_module(name)
    replace_kernels_once()
    inspect_models_here()
    gc.collect()
    gc.freeze()  # the forks' garbage collections leave these objects, and so their memory, alone
