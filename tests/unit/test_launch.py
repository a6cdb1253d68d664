"""The scripts in launch/, run in a copy of the repository's files with stubs instead of Python, pip, uv and SLURM."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
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
    process = start(repo, script, *arguments, failing=failing, **environment)
    process.stdout, process.stderr = process.communicate(timeout=60)
    calls = (repo / "calls").read_text()
    return process, re.findall(r"^(?:uv|srun) .*|.*(?:-m venv|ensurepip|pip (?:un)?install).*", calls, re.M)


def start(repo: pathlib.Path, script: str, *arguments: str, failing: str = "", **environment: str) -> subprocess.Popen:
    """Start a script of launch/; its calls of stubs land in the file `calls`."""
    (repo / "calls").write_text("")
    environment = {
        "PATH": f"{repo}/bin:{os.environ['PATH']}",
        "PYTHON": f"{repo}/bin/python3.11",
        "CALLS": str(repo / "calls"),
        "FAILING": failing,
        **environment,
    }
    command = ["bash", f"launch/{script}", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=repo, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_pip_finds_the_cpu_build_and_uv_is_never_called(repo):
    process, calls = launch(repo, "setup.sh", GRPO_DEVICE="cpu")
    assert process.returncode == 0, process.stderr
    assert calls == ["python3.11 -m venv --clear .venv", TORCH_BY_PIP, THE_REST, REMOVAL]
    assert launch(repo, "setup.sh", GRPO_DEVICE="cpu")[1] == []  # ready


def test_uv_installs_the_cpu_build_that_pip_does_not_find(repo):
    process, calls = launch(repo, "setup.sh", failing=f"^{re.escape(TORCH_BY_PIP)}$", GRPO_DEVICE="cpu")
    assert process.returncode == 0, process.stderr
    venv, by_pip, install_uv, *others = calls
    assert by_pip == TORCH_BY_PIP and re.search(r" uv==[\d.]+$", install_uv)
    assert others == [TORCH_BY_UV, THE_REST, REMOVAL]
    assert launch(repo, "setup.sh", GRPO_DEVICE="cpu")[1] == []


@pytest.mark.parametrize("failing", ["no-deps torch==|^uv ", "no-deps torch==| uv=="], ids=["uv fails", "no uv"])
def test_without_a_cpu_build_the_message_tells_the_way_out_and_the_next_call_goes_on(repo, failing):
    process, calls = launch(repo, "setup.sh", failing=failing, GRPO_DEVICE="cpu")
    assert process.returncode == 1
    assert f"setup: neither pip nor uv could install {TORCH}" in process.stderr
    for part in ("stub fails: ", ".cache/setup.log", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "run this again"):
        assert part in process.stderr, part
    assert THE_REST not in calls
    # The environment is there, and what it lacks is installed.
    process, calls = launch(repo, "setup.sh", GRPO_DEVICE="cpu")
    assert process.returncode == 0 and calls == [TORCH_BY_PIP, THE_REST, REMOVAL]


def test_a_failure_of_another_package_is_not_taken_for_that_of_torch(repo):
    process, calls = launch(repo, "setup.sh", failing="-r requirements-cpu.txt", GRPO_DEVICE="cpu")
    assert process.returncode == 1 and calls[-1] == THE_REST
    assert "setup: pip failed, its whole output is in .cache/setup.log; run this again" in process.stderr


def test_gpu_needs_one_call_of_pip(repo):
    process, calls = launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    assert process.returncode == 0, process.stderr
    assert calls[1:] == [THE_REST.replace("-cpu", "-gpu")]
    process, calls = launch(repo, "setup.sh", GRPO_DEVICE="cpu")
    assert process.returncode == 1 and calls == []
    assert "was made for gpu, asked for is cpu; set GRPO_DEVICE=gpu or remove .venv" in process.stderr


def test_an_environment_without_pip_gets_it(repo):
    _, calls = launch(repo, "setup.sh", failing="pip --version", GRPO_DEVICE="cpu")
    assert calls[1:] == ["python -m ensurepip", TORCH_BY_PIP, THE_REST, REMOVAL]


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
    process = start(repo, "grpo.sbatch", OBEYS=obeys, **SLURM)
    for _ in range(600):
        if (repo / "started").exists():
            break
        time.sleep(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    requeued = "scontrol requeue 123456" in (repo / "calls").read_text().splitlines()
    assert requeued == bool(obeys)


@pytest.mark.parametrize("script", ["train_grpo.py", "train_sft.py"])
def test_sbatch_starts_one_torchrun_per_node_with_all_its_cores_and_gpus(repo, script):
    batch_file = script.removeprefix("train_").replace(".py", ".sbatch")
    launch(repo, "setup.sh", GRPO_DEVICE="gpu")
    process, calls = launch(repo, batch_file, "recipe.py", **SLURM | {"SLURM_GPUS_PER_NODE": "h100:4"})
    assert process.returncode == 0, process.stderr
    words = calls[-1].split()
    assert words[0] == "srun" and words[-3:] == [script, "recipe.py", "--resume"]
    # 20000 + 123456 % 10000
    expected = {"--cpus-per-task=64", "--nnodes=2", "--nproc_per_node=4", "--rdzv_endpoint=node7:23456"}
    assert expected <= set(words)
    process, calls = launch(repo, batch_file, "recipe.py", "--overwrite", **SLURM)
    assert process.returncode == 1 and calls == [] and "--overwrite would delete the run" in process.stderr


def test_batch_files_ask_slurm_for_the_same_except_name_and_nodes(repo):
    """Those lines are comments to bash, so each file needs its own."""
    asked = [
        set(re.findall(r"^#SBATCH (.*)$", (repo / "launch" / name).read_text(), re.MULTILINE))
        for name in ("grpo.sbatch", "sft.sbatch")
    ]
    assert asked[0] ^ asked[1] == {"--job-name=grpo", "--job-name=sft", "--nodes=2", "--nodes=1"}
