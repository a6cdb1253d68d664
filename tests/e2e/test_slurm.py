"""launch/grpo.sbatch under a real SLURM of two nodes on this machine, with made-up GPUs.

Needs root and Debian's slurmctld, slurmd and munge. A run that is signalled before its time limit saves, goes back
into the queue and trains on from there.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.runs import TINY, read_metrics
from tests.torchrun import ROOT, SETTINGS

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0 or not (ROOT / ".venv/setup-stamp").exists(),
        reason="needs root, .venv by launch/setup.sh, and SLURM: apt-get install slurmctld slurmd munge",
    ),
]
CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
MinJobAge=3600
KillWait=30
ReturnToService=2
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} Port={port_a} CPUs=64 RealMemory=16000 Gres=gpu:2
NodeName=127.0.0.2 NodeHostname={host} Port={port_b} CPUs=64 RealMemory=16000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Start the cluster; yields a function that runs one of its commands and returns what it prints."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    nodes = ("127.0.0.1", "127.0.0.2")  # torchrun looks the first one up
    folder.chmod(0o755)
    ports = [free_port() for _ in range(3)]
    names = dict(zip(("port", "port_a", "port_b"), ports, strict=True))
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, **names))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero\n")
    for name in ("state", *nodes):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    environment = {**os.environ, **SETTINGS, "SLURM_CONF": str(folder / "slurm.conf"), "COLD_STARTS": "1"}
    environment.pop("VIRTUAL_ENV", None)
    files = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file")]
    commands = [["munged", "-F", "--force", f"--key-file={key}", f"--seed-file={folder}/seed", *files]]
    commands += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)]
    processes = []

    def call(*words: str) -> str:
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    try:
        for command in commands:
            with open(folder / f"{len(processes)}-{command[0]}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(1)
        wait_for(
            lambda: set(call("sinfo", "-h", "-N", "-o", "%N %T").splitlines()) == {f"{node} idle" for node in nodes},
            600,
            lambda: logs(folder),
        )
        yield call
    finally:
        subprocess.run(["scancel", "--full", "-u", "root"], env=environment, timeout=600)
        time.sleep(2)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(600)


def logs(folder: pathlib.Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.log"))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(condition: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
    """Wait until the condition holds; fails with what `told` says after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.5)


class Job:
    """A job that was submitted, and what became of it."""

    def __init__(self, slurm: Callable[..., str], run_dir: pathlib.Path, *words: object):
        self.slurm, self.run_dir, self.log = slurm, run_dir, run_dir.parent / f"{run_dir.name}.log"
        nodes = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=8", "--time=60", f"--output={self.log}"]
        self.number = slurm("sbatch", "--parsable", *nodes, *map(str, words)).strip()

    def field(self, name: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        words = self.slurm("scontrol", "show", "job", self.number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def steps(self) -> list[int]:
        """The steps that are logged."""
        file = self.run_dir / "metrics.jsonl"
        return [line["step"] for line in read_metrics(self.run_dir)] if file.exists() else []

    def wait_for(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait for a condition; fails with the job's log, and as soon as the job has failed."""

        def told() -> str:
            return f"{self.field('JobState')}: {self.log.read_text()[-4000:] if self.log.exists() else 'no log'}"

        def holds() -> bool:
            assert self.field("JobState") not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), told()
            return condition()

        wait_for(holds, seconds, told)

    def ends_after(self, num_steps: int, restarts: int) -> str:
        """Wait until it has completed; returns its log. Each step is logged once, and so often it was queued again."""
        self.wait_for(lambda: self.field("JobState") == "COMPLETED")
        assert self.field("Restarts") == str(restarts)
        assert self.steps() == [*range(1, num_steps + 1)]
        return self.log.read_text()


def test_a_run_on_two_nodes_that_is_signalled_goes_on(slurm, model, tmp_path):
    """USR1 to the batch script, as before the time limit."""
    arguments = [TINY, "--model.path", model, "--run-dir", tmp_path / "a", "--num-steps", 40]
    job = Job(slurm, tmp_path / "a", "launch/grpo.sbatch", *arguments)
    job.wait_for(lambda: len(job.steps()) >= 3)
    slurm("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda: job.field("Restarts") == "1")
    (saved,) = {job.steps()[-1]}
    log = job.ends_after(40, restarts=1)
    assert saved < 40 and f"starting at step {saved}\n" in log
    assert "2 nodes x 2 GPUs: " in log
