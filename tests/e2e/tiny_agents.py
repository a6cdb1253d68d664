"""Agents for the tests of whole runs. None of them knows that it is trained."""

import asyncio
import inspect
import os
import pathlib
import subprocess
import time

import openai

from tests.unit.features.agents import agents


def of_the_row(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Play one of the agents that the row names, or a shell script with curl."""
    endpoint = {"base_url": base_url, "api_key": api_key, "model": model}
    if row["kind"] == "shell":
        body = '{"messages": [{"role": "user", "content": "hi"}]}'
        command = ["curl", "-sf", f"{base_url}/chat/completions", "-H", f"Authorization: Bearer {api_key}", "-d", body]
        return float(len(subprocess.run(command, check=True, capture_output=True).stdout) % 7)
    reward = getattr(agents, row["kind"])(row, **endpoint)
    if inspect.isawaitable(reward):
        reward = asyncio.run(reward)
    return reward or 0.0


def waits(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Write who plays, and ask again and again until there is a file `go`, at most a few hundred times."""
    folder = pathlib.Path(row["folder"])
    (folder / f"agent.{os.getpid()}").touch()
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    num_letters = len(client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}]).id)
    while not (folder / "go").exists():
        client.models.list()
        time.sleep(0.05)
    return float(num_letters + os.getpid())
