"""launch/grpo.sbatch under a real SLURM of two nodes on this machine, with made-up GPUs.

Needs root and Debian's slurmctld, slurmd and munge. A run that is signalled before its time limit saves, goes back
into the queue and trains on from there.
"""

import contextlib
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


@pytest.fixture
def slurm(tmp_path: pathlib.Path) -> Iterator[Callable[..., str]]:
    """Start the cluster; yields a function that runs one of its commands and returns what it prints."""
    host = socket.gethostname()
    nodes = ("127.0.0.1", "127.0.0.2")  # torchrun looks the first one up
    folder = tmp_path / "slurm"
    for name in ("state", *nodes):
        (folder / name).mkdir(parents=True)
    with contextlib.ExitStack() as sockets:
        free = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [one.getsockname()[1] for one in free]
    names = dict(zip(("port", "port_a", "port_b"), ports, strict=True))
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, **names))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero\n")
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
            processes.append(subprocess.Popen(command, env=environment))
            time.sleep(1)
        idle = {f"{node} idle" for node in nodes}
        wait_for(lambda: {*call("sinfo", "-h", "-N", "-o", "%N %T").splitlines()} == idle)
        yield call
    finally:
        subprocess.run(["scancel", "--full", "-u", "root"], env=environment, timeout=600)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(600)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; pytest ends what never comes."""
    while not condition():
        time.sleep(0.5)


def test_a_run_on_two_nodes_that_is_signalled_goes_on(slurm, model, tmp_path):
    """USR1 to the batch script, as before the time limit: saved, queued again, and each step is logged once."""
    log, run_dir = tmp_path / "job.log", tmp_path / "run"
    nodes = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=8", "--time=60", f"--output={log}"]
    arguments = ["launch/grpo.sbatch", TINY, "--model.path", str(model), "--run-dir", str(run_dir), "--num-steps", "40"]
    number = slurm("sbatch", "--parsable", *nodes, *arguments).strip()

    def field(name: str) -> str:
        words = slurm("scontrol", "show", "job", number).split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        assert fields["JobState"] not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), log.read_text()[-4000:]
        return fields[name]

    def steps() -> list[int]:
        return [line["step"] for line in read_metrics(run_dir)] if (run_dir / "metrics.jsonl").exists() else []

    wait_for(lambda: field("JobState") and len(steps()) >= 3)
    slurm("scancel", "--batch", "--signal=USR1", number)
    wait_for(lambda: field("Restarts") == "1")
    saved = steps()[-1]
    wait_for(lambda: field("JobState") == "COMPLETED")
    assert field("Restarts") == "1" and steps() == [*range(1, 41)]
    assert saved < 40 and f"starting at step {saved}\n" in log.read_text()
    assert "2 nodes x 2 GPUs: " in log.read_text()
