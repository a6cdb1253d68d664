"""What happens in an agent's process: a function of the user, or a command line. It imports little."""

import asyncio
import functools
import inspect
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from grpo.config.user_files import load_function
from grpo.config.values import names_function
from grpo.workers import kernel, processes
from grpo.workers.worker import plain_values


def load_agent(agent: str) -> Callable[..., tuple[float | None, bool]]:
    """Return what plays an episode with a row and an endpoint: the arguments `base_url`, `api_key` and `model`.

    It returns the reward or None, and whether the agent has left a thread or a process.

    agent: `path/file.py:function`, or a command line.
    """
    function = functools.partial(run_command, agent)
    if names_function(agent):
        function = load_function(agent, "environment.agent")

    def play(row: Mapping[str, Any], endpoint: Mapping[str, str]) -> tuple[float | None, bool]:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent is a child of this process
        reward = function(row, **endpoint)
        if inspect.isawaitable(reward):
            reward = asyncio.run(reward)
        (value,) = plain_values([reward], 1)
        return value, threading.active_count() > 1 or bool(processes.children())

    return play


def run_command(command: str, row: Mapping[str, Any], base_url: str, api_key: str, model: str) -> float | None:
    """Run a command with the endpoint in its environment and the row on its input. Its last line is the reward.

    A last line that is empty, or none at all, is no reward.
    """
    endpoint = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}
    done = subprocess.run(
        command,
        shell=True,
        input=json.dumps(row),
        text=True,
        capture_output=True,
        env=os.environ | endpoint,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with code {done.returncode}: {done.stderr[-400:]}")
    _, _, last = done.stdout.rstrip("\n").rpartition("\n")
    return float(last) if last else None
