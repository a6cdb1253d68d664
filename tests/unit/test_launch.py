"""The scripts in launch/, run in a copy of the repository's files with stubs instead of Python, pip, uv and SLURM."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import yaml

from grpo.config import GRPOConfig
from grpo.config.recipes import load
from tests import ROOT
from tests.door import skipping_what_needs_a_deleted_feature
from tests.unit.workers.processes import wait_until

TORCH = re.search(r"^torch==.*$", (ROOT / "requirements-cpu.txt").read_text(), re.MULTILINE)[0]

# Writes its name and arguments down, fails if they match $FAILING, and makes what the real program would make.
STUB = """#!/usr/bin/env bash
call="${0##*/} $*"
printf '%s\\n' "$call" >>"$CALLS"
if [[ -n "$FAILING" && "$call" =~ $FAILING ]]; then echo "stub fails: $call"; exit 1; fi
case "$call" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"pip install"*uv==*) cp "$0" .venv/bin/uv ;;
    "scontrol show"*) printf 'node7\\nnode8\\n' ;;
esac
"""

TORCH_BY_PIP = f"python -m pip install --disable-pip-version-check --no-deps {TORCH}"
TORCH_BY_UV = f"uv pip install --python .venv/bin/python --no-deps --torch-backend=cpu {TORCH}"
THE_REST = "python -m pip install --disable-pip-version-check -r requirements-cpu.txt"
REMOVAL = "python -m pip uninstall --yes torchvision torchaudio torchcodec"


@pytest.fixture
def repo(tmp_path) -> pathlib.Path:
    """A folder with launch/, the requirements and stubs in bin/."""
    repo = tmp_path / "repo"
    shutil.copytree(ROOT / "launch", repo / "launch")
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, repo)
    (repo / "bin").mkdir()
    for name in ("python3.11", "srun", "scontrol", "git"):
        (repo / "bin" / name).write_text(STUB)
        (repo / "bin" / name).chmod(0o755)
    return repo


def launch(repo: pathlib.Path, script: str, *arguments: str, failing: str = "", **environment: str):
    """Run a script of launch/ and return its process and the calls of stubs that install or start something."""
    process = finished(start(repo, f"launch/{script}", *arguments, failing=failing, **environment))
    calls = (repo / "calls").read_text()
    return process, re.findall(r"^(?:uv|srun) .*|.*(?:-m venv|ensurepip|pip (?:un)?install).*", calls, re.M)


def finished(process: subprocess.Popen) -> subprocess.Popen:
    """Wait for a process; its outputs become texts."""
    process.stdout, process.stderr = process.communicate(timeout=600)
    return process


def start(repo: pathlib.Path, *arguments: str, failing: str = "", **environment: str) -> subprocess.Popen:
    """Start bash with these arguments; its calls of stubs land in the file `calls`."""
    (repo / "calls").write_text("")
    environment = {
        "PATH": f"{repo}/bin:{os.environ['PATH']}",
        "PYTHON": f"{repo}/bin/python3.11",
        "CALLS": str(repo / "calls"),
        "FAILING": failing,
        **environment,
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(["bash", *arguments], cwd=repo, env=environment, stdout=pipe, stderr=pipe, text=True)


VENV = "python3.11 -m venv --clear .venv"
PIP_FAILS = f"^{re.escape(TORCH_BY_PIP)}$"
# What fails -> the calls of setup.sh for a CPU, and what it says if it ends there
SETUPS = {
    "": ([VENV, TORCH_BY_PIP, THE_REST, REMOVAL], ""),
    PIP_FAILS: ([VENV, TORCH_BY_PIP, "uv==", TORCH_BY_UV, THE_REST, REMOVAL], ""),
    f"{PIP_FAILS}|^uv ": (
        [VENV, TORCH_BY_PIP, "uv==", TORCH_BY_UV],
        "neither pip nor uv could install torch",
    ),
    f"{PIP_FAILS}| uv==": ([VENV, TORCH_BY_PIP, "uv=="], "PIP_EXTRA_INDEX_URL.*run this again"),
    "-r requirements-cpu.txt": ([VENV, TORCH_BY_PIP, THE_REST], "pip failed, .* .cache/setup.log; run this again"),
    "-m pip --version|-m ensurepip": ([VENV, "-m ensurepip"], ".venv has no pip.*remove .venv"),
}


@pytest.mark.parametrize("failing", SETUPS)
def test_setup_installs_the_cpu_build_and_says_the_way_out(repo, failing):
    """By pip, else by uv. After a failure the next call goes on: the environment is there, and what it lacks comes."""
    process, calls = launch(repo, "setup.sh", failing=failing, GRPO_DEVICE="cpu")
    expected, message = SETUPS[failing]
    assert len(calls) == len(expected) and all(part in call for part, call in zip(expected, calls, strict=True)), calls
    assert process.returncode == bool(message) and re.search(message, process.stderr, re.S), process.stderr
    if not message:
        assert launch(repo, "setup.sh", GRPO_DEVICE="cpu")[1] == []
    elif "ensurepip" not in failing:
        process, calls = launch(repo, "setup.sh", GRPO_DEVICE="cpu")
        assert process.returncode == 0 and calls == [TORCH_BY_PIP, THE_REST, REMOVAL]


def test_gpu_needs_one_call_of_pip(repo):
    process, calls = launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    assert process.returncode == 0, process.stderr
    assert calls[1:] == [THE_REST.replace("-cpu", "-gpu")]
    process, calls = launch(repo, "setup.sh", GRPO_DEVICE="cpu")
    assert process.returncode == 1 and calls == []
    assert re.search("gpu, .* cpu; set GRPO_DEVICE=gpu or remove .venv", process.stderr)


def test_an_environment_that_is_ready_needs_no_place_to_write(repo):
    """As in a container that is read-only: .cache cannot be a folder here."""
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    shutil.rmtree(repo / ".cache")
    (repo / ".cache").touch()
    process, calls = launch(repo, "multinode.sh", "recipe.py", GPUS_PER_NODE="1")
    assert process.returncode == 0 and calls == [], process.stderr
    (repo / "requirements.txt").write_text("more==1")
    assert launch(repo, "setup.sh", GRPO_DEVICE="gpu")[0].returncode == 1


SLURM = {"JOB_ID": "123456", "JOB_NODELIST": "node[7-8]", "NNODES": "2", "CPUS_PER_TASK": "64", "GPUS_PER_NODE": "8"}
SLURM = {f"SLURM_{name}": value for name, value in SLURM.items()}
# Runs until the stop file is there, which a run that obeys removes.
WAITING_SRUN = """
touch started
while [[ ! -e "$GRPO_STOP_FILE" ]]; do sleep 0.05; done
[[ -n "$OBEYS" ]] && rm "$GRPO_STOP_FILE"
exit 0
"""


@pytest.mark.parametrize("obeys", ["yes", ""], ids=["stopped", "finished anyway"])
def test_sbatch_stops_the_run_before_its_time_is_up_and_requeues(repo, obeys):
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    (repo / "bin" / "srun").write_text(STUB + WAITING_SRUN)
    (repo / ".cache").mkdir(exist_ok=True)
    (repo / ".cache/stop-123456").touch()  # of the job before it was requeued
    process = start(repo, "launch/grpo.sbatch", OBEYS=obeys, **SLURM)
    wait_until((repo / "started").exists, "srun to start")
    process.send_signal(signal.SIGUSR1)
    assert finished(process).returncode == 0, process.stderr
    requeued = "scontrol requeue 123456" in (repo / "calls").read_text().splitlines()
    assert requeued == bool(obeys)


# Starts the command for each task, one after the other, without srun's own flags.
STARTING_SRUN = """
while [[ "$1" == --* ]]; do shift; done
for SLURM_PROCID in 0 1; do SLURM_PROCID=$SLURM_PROCID "$@"; done
"""


def test_sbatch_says_which_node_holds_the_meeting_place(repo):
    """Whatever its names: SLURM's may be another one than the machine's."""
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    (repo / "bin" / "srun").write_text(STUB + STARTING_SRUN)
    process, _ = launch(repo, "grpo.sbatch", "recipe.py", **SLURM)
    assert process.returncode == 0, process.stderr
    starts = re.findall(r"^python -m torch.distributed.run (.*)$", (repo / "calls").read_text(), re.M)
    assert [start.split()[0] for start in starts] == ["--rdzv_conf=is_host=1", "--rdzv_conf=is_host=0"]
    assert all(start.endswith("--rdzv_endpoint=node7:23456 train_grpo.py recipe.py --resume") for start in starts)


@pytest.mark.parametrize("script", ["train_grpo.py", "train_sft.py"])
def test_sbatch_starts_one_torchrun_per_node_with_all_its_cores_and_gpus(repo, script):
    """`--gres=gpu:4` in place of --gpus-per-node sets another variable, and cores may be left to the cluster."""
    batch_file = script.removeprefix("train_").replace(".py", ".sbatch")
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    process, calls = launch(repo, batch_file, "recipe.py", **SLURM | {"SLURM_GPUS_PER_NODE": "h100:4"})
    assert process.returncode == 0, process.stderr
    words = calls[-1].split()
    assert words[0] == "srun" and words[-3:] == [script, "recipe.py", "--resume"]
    # 20000 + 123456 % 10000
    expected = {"--export=ALL", "--cpus-per-task=64", "--nnodes=2", "--nproc_per_node=4", "--rdzv_endpoint=node7:23456"}
    assert expected <= set(words)
    few = {name: value for name, value in SLURM.items() if "PER_NODE" not in name and "CPUS" not in name}
    _, calls = launch(repo, batch_file, "recipe.py", **few, SLURM_GPUS_ON_NODE="4")
    assert "--nproc_per_node=4" in calls[-1] and "--cpus-per-task" not in calls[-1]
    for flags, slurm, message in (("--overwrite", SLURM, "would delete the run"), ("recipe.py", few, "--gres=gpu")):
        process, calls = launch(repo, batch_file, flags, **slurm)
        assert process.returncode == 1 and calls == [] and message in process.stderr


@pytest.mark.parametrize(
    ("flags", "base"),
    [
        ("", "runs/grpo"),
        ("--run-dir runs/mine", "runs/mine"),
        ("--run_dir=runs/mine", "runs/mine"),  # which the scripts take too
    ],
)
def test_a_job_array_trains_one_seed_per_task_in_a_folder_of_its_own(repo, flags, base):
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NAME": "grpo"}
    process, calls = launch(repo, "grpo.sbatch", "recipe.py", *flags.split(), **SLURM | task)
    assert process.returncode == 0, process.stderr
    expected = f"train_grpo.py recipe.py {flags} --run-dir {base}-seed2 --seed 2 --resume".split()
    assert calls[-1].split()[-len(expected) :] == expected


# Stands for a training script: each rank notes where it is and with which arguments.
PROGRAM = """
import os, pathlib, sys
rank, local_rank, world_size = (os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
pathlib.Path(f"rank{rank}").write_text(f"{local_rank} {world_size} {' '.join(sys.argv[1:])}")
"""


@pytest.mark.slow
def test_multinode_with_two_agents_on_one_machine(repo):
    """Real torchruns: two machines of two processes meet, and ranks count through."""
    launch(repo, "setup.sh", GRPO_DEVICE="cpu")
    python = repo / ".venv" / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    (repo / "program.py").write_text(PROGRAM)
    environment = {"NNODES": "2", "GPUS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"TRAIN_SCRIPT": "program.py", "OMP_NUM_THREADS": "1", "GRPO_DEVICE": "cpu"}
    with socket.socket() as held:  # bound all the time, or another process could get the port; the store may share it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        environment["MASTER_PORT"] = str(held.getsockname()[1])
        command = ("launch/multinode.sh", "recipe.py")
        agents = [start(repo, *command, NODE_RANK=rank, **environment) for rank in ("1", "0")]
        for agent in agents:
            assert finished(agent).returncode == 0, agent.stderr
    said = [(repo / f"rank{rank}").read_text().split() for rank in range(4)]
    assert [words[:2] for words in said] == [["0", "4"], ["1", "4"], ["0", "4"], ["1", "4"]]
    assert all(words[2:] == ["recipe.py", "--resume"] for words in said)


REFUSED = {
    "MASTER_ADDR, the name or address of the machine": ({"NNODES": "2", "GPUS_PER_NODE": "8"}, ()),
    "NODE_RANK=2 is none of 0 to 1": ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a", "GPUS_PER_NODE": "8"}, ()),
    "set GPUS_PER_NODE": ({"GPUS_PER_NODE": "0"}, ()),
    "nvidia-smi lists no GPU": ({}, ()),
    "--overwrite would delete the run": ({"GPUS_PER_NODE": "8"}, ("--overwrite",)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_multinode_refuses_what_cannot_work(repo, message):
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    (repo / "bin/nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (repo / "bin/nvidia-smi").chmod(0o755)
    environment, flags = REFUSED[message]
    process, _ = launch(repo, "multinode.sh", "recipe.py", *flags, **environment)
    assert process.returncode == 1 and message in process.stderr
    assert "torch.distributed.run" not in (repo / "calls").read_text()


def sky(repo: pathlib.Path, part: str, **environment: str) -> subprocess.Popen:
    """Run the commands of a part of skypilot.yaml as SkyPilot does, with its variables; stubs note their calls."""
    task = yaml.safe_load((repo / "launch" / "skypilot.yaml").read_text())
    fixed = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1"}
    fixed |= {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_TASK_ID": "sky-managed-1_grpo_5-0"}
    fixed |= {name: str(value) for name, value in (task["envs"] | task["secrets"]).items()}
    return finished(start(repo, "-c", task[part], **fixed | environment))


def test_skypilot_installs_and_starts_torchrun_on_each_machine(repo):
    task = yaml.safe_load((repo / "launch" / "skypilot.yaml").read_text())
    assert "HF_TOKEN" in task["secrets"] and list(task["file_mounts"]) == ["/runs"]
    assert sky(repo, "setup", WANDB_MODE="online").returncode == 0
    assert (repo / "calls").read_text().splitlines()[-1] == "python -m pip install --quiet wandb"
    done = sky(repo, "run", MODEL="Qwen/Qwen3-8B", MIN_GPUS="16", WANDB_MODE="online")
    assert done.returncode == 0, done.stderr
    words = (repo / "calls").read_text().splitlines()[-1].split()
    assert {"--nnodes=2", "--nproc_per_node=8", "--rdzv_endpoint=10.0.0.7:29500", "--rdzv_conf=is_host=0"} <= set(words)
    folder = "/runs/qwen3_1_7b_gsm8k-sky-managed-1_grpo_5-0"
    expected = f"train_grpo.py configs/qwen3_1_7b_gsm8k.py --run-dir {folder} --checkpoint.interval 20"
    expected = f"{expected} --model.path Qwen/Qwen3-8B --metrics.wandb-project grpo --resume".split()
    assert words[-len(expected) :] == expected
    with skipping_what_needs_a_deleted_feature():
        load(GRPOConfig, str(ROOT / expected[1]), expected[2:])  # those flags exist
    done = sky(repo, "run", MIN_GPUS="17")
    assert done.returncode == 1 and done.stderr == "skypilot: 16 GPUs, but MIN_GPUS=17\n"
    assert (repo / "calls").read_text() == ""


def test_the_container_file_copies_what_its_first_layer_needs(repo):
    """setup.sh and the requirements, before the rest: in a folder with these alone it makes the environment."""
    copied = re.findall(r"^COPY (.*) (\S+)$", (repo / "launch" / "Dockerfile").read_text().replace("\\\n", " "), re.M)
    image = repo.parent / "image"
    for sources, target in copied:
        for source in sources.split() if sources != "." else ():
            (image / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(repo / source, image / target)
    shutil.copytree(repo / "bin", image / "bin")
    process, calls = launch(image, "setup.sh", GRPO_DEVICE="gpu")
    assert process.returncode == 0 and calls[1:] == [THE_REST.replace("-cpu", "-gpu")]
    assert {".venv", "runs"} <= set((ROOT / ".dockerignore").read_text().split())
