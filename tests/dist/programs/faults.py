"""Steps of 2 trainers, 1 reference and 1 generator without models, in which one rank fails in one way.

Arguments: rank, phase, what happens to it there in the second step (a key of SIGNALS, raise, hang, spin, mute: a hang
with sys.stdout and sys.stderr elsewhere, cut-LINK: that link of its network goes down), and the seconds for which
nothing may happen.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from grpo.config import RolesConfig
from grpo.roles.comm import broadcast, gather_rollouts, wait_for_all
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.types import Prompt, Requests
from grpo.watch import watchdog
from grpo.watch.failures import here, run_script, set_place
from grpo.watch.step_timer import StepTimer
from grpo.watch.stopping import end_with_launcher, stop_reason
from tests.rollouts import completion

LAYOUT = RolesConfig(num_trainers=2, num_references=1, num_generators=1)


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def fail(kind: str, roles: Roles) -> None:
    store = PrefixStore("watch", roles.store.clone())
    # until the others know the phase, of all ranks if none can tell any more
    ranks = range(roles.control.size()) if kind.startswith("cut-") else [roles.rank]
    for rank in ranks:
        while watchdog.RankState(*json.loads(store.get(f"state/{rank}"))).phase != here.phase:
            time.sleep(0.1)
    if kind == "raise":
        raise RuntimeError("forced")
    if kind == "hang":
        time.sleep(600)
    if kind == "mute":
        nowhere = io.StringIO()  # without a file number
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            time.sleep(600)
    if kind.startswith("cut-"):
        subprocess.run(["ip", "link", "set", kind.removeprefix("cut-"), "down"], check=True)
        return
    if kind == "spin":
        while True:
            pass
    os.kill(os.getpid(), SIGNALS[kind])


def steps(rank: int, phase: str, kind: str, seconds: float) -> None:
    roles = setup_roles(LAYOUT, needs_reference=True)
    set_place(role=roles.name)

    def at(step: int, place: str) -> None:
        if (roles.rank, place, step) == (rank, phase, 1):
            fail(kind, roles)

    with watchdog.watched(roles, seconds / 60):
        timer = StepTimer()
        for step in range(1000):
            if broadcast(stop_reason("") if roles.is_driver else None, roles.control):
                break
            with timer.phase("generate"):
                at(step, "generate")
                requests = Requests.of([Prompt(0, [5])], 1)
                gather_rollouts([completion([0, 1, 2])] if roles.generates else None, requests, roles)
            with timer.phase("reference"):
                at(step, "reference")
                if roles.learns:
                    dist.all_reduce(torch.ones(1), group=roles.learners)
            with timer.phase("train"):
                if roles.trains:
                    for _ in range(3):
                        dist.all_reduce(torch.ones(1))
                    at(step, "train")
                    dist.all_reduce(torch.ones(1))
            with timer.phase("sync"):
                at(step, "sync")
                if roles.sync is not None:
                    dist.broadcast(torch.ones(1), group_src=0, group=roles.sync)
                wait_for_all(roles)
            time.sleep(0.1)
        if roles.is_driver:
            print(f"ended after step {step}", flush=True)
        close_roles(roles)


if __name__ == "__main__":
    end_with_launcher()
    run_script(partial(steps, int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])))
