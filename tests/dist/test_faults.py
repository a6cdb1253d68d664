"""A rank that fails, dies, hangs or is stopped ends the job soon, with one line that names it, and nothing is left."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import subprocess

import pytest

from tests.forks import Fork
from tests.torchrun import finish, run_torchrun, start_python

PROGRAM = "tests/dist/programs/faults.py"
# Seconds that nothing may happen, where the fault is that nothing happens; in the phase generate three times as long
DEADLINE = 15.0
# Elsewhere
LONG_DEADLINE = 600.0

# What the line says of a rank to which this happened
HANGS = "hangs in phase {phase}: nothing has happened for"
KINDS = {
    "raise": "failed in phase {phase}: forced",
    "kill": "was ended from outside in phase {phase}",
    "hang": HANGS,
    "mute": HANGS,
    "spin": HANGS,
    "stop": "does not answer, last seen in phase {phase}: nothing has happened for",
}
# rank and its role, phase, what happens to it: each phase, each kind
CELLS = [
    ("0 (trainer)", "train", "kill"),
    ("0 (trainer)", "train", "mute"),
    ("0 (trainer)", "generate", "stop"),
    ("1 (trainer)", "sync", "hang"),
    ("2 (reference)", "reference", "kill"),
    ("3 (generator)", "generate", "raise"),
]
PLACES = (
    ("0 (trainer)", "train"),
    ("0 (trainer)", "sync"),
    ("1 (trainer)", "train"),
    ("1 (trainer)", "sync"),
    ("2 (reference)", "reference"),
    ("3 (generator)", "generate"),
    ("3 (generator)", "sync"),
)
MORE_CELLS = [(*place, kind) for place in PLACES for kind in KINDS if kind != "mute" and (*place, kind) not in CELLS]
AT_ONCE = 6  # most of a cell's seconds are waiting


@pytest.fixture(scope="module")
def outcomes(request):
    """Cell -> its run, for all that are asked for; they run side by side from the first test on."""
    items = [item for item in request.session.items if item.module is request.module]
    asked = [item.callspec.params["cell"] for item in items if "outcomes" in item.fixturenames]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {cell: pool.submit(run_cell, *cell) for cell in asked}
        pool.shutdown(cancel_futures=True)


def run_cell(rank: str, phase: str, kind: str) -> subprocess.CompletedProcess:
    deadline = LONG_DEADLINE if kind in ("raise", "kill") else DEADLINE
    return run_torchrun(PROGRAM, rank[0], phase, kind, deadline, nproc=4)


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_one_line_names_the_rank(outcomes, cell):
    check_cell(*cell, outcomes[cell].result())


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE_CELLS, ids=" ".join)
def test_one_line_names_any_rank(outcomes, cell):
    check_cell(*cell, outcomes[cell].result())


def check_cell(rank: str, phase: str, kind: str, result: subprocess.CompletedProcess) -> None:
    """A run's error line, torchrun's root cause."""
    line, output = KINDS[kind], result.stdout
    assert result.returncode == 1, output
    (error,) = [text for text in output.splitlines() if text.startswith("error: ")]
    assert error.startswith(f"error: rank {rank} {line.format(phase=phase)}"), output
    root_cause = output.partition("Root Cause")[2]
    assert (error in root_cause) != (kind == "kill"), output  # then torchrun itself says what it was
    assert kind != "kill" or "SIGKILL" in root_cause
    assert (f"rank {rank} is here, in phase {phase}:" in output) == (kind in ("hang", "mute", "spin"))
    assert output.count("Traceback") == (2 if kind == "raise" else 1), output  # torchrun's own is one


def test_a_stop_signal_at_any_rank_reaches_the_driver():
    """SIGTERM at the generator: all ranks end between two steps, without an error."""
    result = run_torchrun(PROGRAM, 3, "sync", "term", LONG_DEADLINE, nproc=4)
    assert result.returncode == 0, result.stdout
    assert "SIGTERM: the run stops when this step is done and saved" in result.stdout
    (step,) = re.findall(r"^ended after step (\d+)$", result.stdout, re.MULTILINE)
    assert 2 <= int(step) < 999  # the program's last, which comes without a signal
    assert "error" not in result.stdout and "Traceback" not in result.stdout


@pytest.fixture
def two_machines():
    """Two networks of their own, joined by a link that each calls `far`: a function that starts Python in one."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("it takes root and iproute2 to make networks")
    with contextlib.ExitStack() as stack:
        holders = []
        for machine in range(2):
            begin = f"echo machine-{machine} > /proc/sys/kernel/hostname && ip link set lo up && echo ready && exec cat"
            command = ["unshare", "--net", "--uts", "sh", "-c", begin]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            holder = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            stack.callback(holder.kill)
            said = holder.stdout.readline()
            if said != "ready\n":
                pytest.skip(f"no networks can be made here: {said}")
            holders.append(holder.pid)

        def start(machine: int, *arguments: object) -> subprocess.Popen | Fork:
            return start_python(*arguments, network_of=holders[machine], GLOO_SOCKET_IFNAME="far")

        link = ("ip", "link", "add", "far", "netns", holders[0], "type", "veth", "peer", "far", "netns", holders[1])
        subprocess.run([*map(str, link)], check=True)
        for machine in range(2):
            for setting in ("addr add 10.0.0.{}/24 dev far", "link set far up"):
                inside = ["nsenter", "--net", f"--target={holders[machine]}", "ip"]
                subprocess.run([*inside, *setting.format(machine + 1).split()], check=True)
        yield start


@pytest.mark.parametrize("link", ["lo", pytest.param("far", marks=pytest.mark.slow)])
def test_a_store_that_falls_silent_ends_every_machine(two_machines, link):
    """The network drops what is sent, and closes no connection: within one machine, and between two of two ranks."""
    num_machines = 1 if link == "lo" else 2
    launch = ("-m", "torch.distributed.run", f"--nnodes={num_machines}")
    launch += (f"--nproc_per_node={4 // num_machines}", "--master-addr=10.0.0.1", "--master-port=29500")
    fault = (PROGRAM, 3, "sync", f"cut-{link}", DEADLINE)
    started = [two_machines(n, *launch, f"--node-rank={n}", *fault) for n in range(num_machines)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = [*pool.map(finish, started)]
    errors = [re.findall("^error: .*", result.stdout, re.MULTILINE) for result in results]
    silent = "had no answer from the store of its launcher for 16 s, in phase sync"
    expected = [[f"error: rank 0 (trainer) {silent}"]]
    if num_machines == 2:
        gone = ", ".join(
            f"rank {rank} does not answer, last seen in phase sync" for rank in ("2 (reference)", "3 (generator)")
        )
        expected = [[f"error: {gone}: {errors[0][0].split(': ')[-1]}"], [f"error: rank 2 (reference) {silent}"]]
    assert errors == expected, [result.stdout for result in results]
    assert [result.returncode for result in results] == [1] * num_machines
