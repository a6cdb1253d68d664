"""What benches share: a checkpoint of a real shape, processes that end, tables with their JSON."""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

ROOT = pathlib.Path(__file__).parents[2]


def checkpoint(shape: str, prompt_tokens: int = 128) -> pathlib.Path:
    """Return the folder of a random checkpoint. `random_checkpoint.py` makes it if it is not there."""
    name = shape if prompt_tokens == 128 else f"{shape}-{prompt_tokens}"
    folder = pathlib.Path(os.environ.get("BENCH_MODELS", "/tmp/bench_models")) / name
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, ROOT / "tests/bench/random_checkpoint.py", shape, folder]
        subprocess.run([*command, "--prompt-tokens", str(prompt_tokens)], check=True)
    return folder


def end_on_sigterm() -> None:
    """Let SIGTERM, as of `timeout`, raise SystemExit, so that what a bench has started is ended too.

    Only the main thread can do that.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def launch(command: Sequence[Any], log: pathlib.Path, **environment: str) -> subprocess.Popen:
    """Start a program in its own session, with its output in `log`. The caller must `end` it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    end_on_sigterm()
    paths = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    variables = {"OMP_NUM_THREADS": "8"} | os.environ | paths | environment
    words = [str(word) for word in command]
    with open(log, "w") as file:
        return subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, env=variables, start_new_session=True)


def end(process: subprocess.Popen) -> None:
    """Stop a program by SIGTERM, and after 40 s by SIGKILL.

    torchrun passes SIGTERM on to its ranks. They outlive a killed torchrun, and would hold the GPU against later runs.
    """
    process.terminate()
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def run_limited(command: Sequence[Any], log: pathlib.Path, limit: float | None, **environment: str) -> int | str:
    """Run a program, at most `limit` seconds, with its output in `log`. Returns its exit code, or why it has none."""
    process = launch(command, log, **environment)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"no end after {limit} s"
    finally:
        end(process)


def records(folder: pathlib.Path) -> list[dict]:
    """Read the lines of a run's metrics.jsonl, as far as they are written."""
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def spread(values: Sequence[float]) -> str:
    """Return median (lowest to highest)."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table. Its columns are the keys of all rows, in their order, except those of lists."""
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(cell(row.get(column, '-')) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def report(name: str, rows: Sequence[dict[str, Any]], show: bool = True, **facts: Any) -> None:
    """Print the table and write it with `facts` and the machine to $OUT/NAME.json (default runs/bench).

    `show` False only writes.
    """
    out = pathlib.Path(os.environ.get("OUT", ROOT / "runs" / "bench"))
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    content = {"bench": name, "device": device, "command": sys.argv, **facts, "rows": list(rows)}
    (out / f"{name}.json").write_text(json.dumps(content, indent=1))
    if show:
        print(f"{name} on {device} {facts or ''}\n{table(rows)}", flush=True)
