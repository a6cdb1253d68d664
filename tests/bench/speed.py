"""What benches share: a checkpoint of a real shape, processes that end, tables with their JSON."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
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


def visible_gpus(least: int) -> list[int]:
    """Return the numbers of all GPUs, or of those in CUDA_VISIBLE_DEVICES. Fewer than `least` raise SystemExit."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [int(number) for number in listed.split(",")] if listed else list(range(torch.cuda.device_count()))
    if len(gpus) < least:
        raise SystemExit(f"{least} GPUs are asked for, {len(gpus)} are there")
    return gpus


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


def end_all(processes: Sequence[subprocess.Popen]) -> None:
    """End several programs at the same time. A second SIGTERM would disturb a torchrun that is ending its ranks."""
    if processes:
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(end, processes))


def run_limited(command: Sequence[Any], log: pathlib.Path, limit: float | None, **environment: str) -> int | str:
    """Run a program, at most `limit` seconds, with its output in `log`. Returns its exit code, or why it has none."""
    process = launch(command, log, **environment)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"no end after {limit} s"
    finally:
        end(process)


# Processes that start side by side and are then measured in turns. Each reads words and answers with lines of JSON.


@contextlib.contextmanager
def side_by_side(variants: Sequence[str], name: str, limit: float) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Start this program with `--child VARIANT` for each. Yields (process, first answer) of those that have started.

    They have `limit` seconds to start, and as many again for all that is asked of them. What they log, vLLM's lines
    too, goes to NAME-VARIANT.log in $OUT (default runs/bench).
    """
    end_on_sigterm()
    out = pathlib.Path(os.environ.get("OUT", ROOT / "runs" / "bench"))
    out.mkdir(parents=True, exist_ok=True)
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr"} | os.environ
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    children: dict[str, subprocess.Popen] = {}
    started = {}

    def start(variant: str) -> None:
        file = "".join(letter if letter.isalnum() else "-" for letter in f"{name}-{variant}")
        command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:], "--child", variant]
        with open(out / f"{file}.log", "w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            children[variant] = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def await_start(variant: str) -> None:
        first_answer = answer(children[variant])
        print(f"{variant}: {first_answer or f'ended, or not started in {limit:.0f} s: see its log'}", flush=True)
        if first_answer:
            started[variant] = children[variant], first_answer

    def kill(some: Iterable[str]) -> None:
        for variant in some:
            children[variant].kill()

    alarm = threading.Timer(limit, lambda: kill(children.keys() - started.keys()))
    try:
        for variant in variants:
            start(variant)
        alarm.start()
        threads = [threading.Thread(target=await_start, args=[variant], daemon=True) for variant in variants]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alarm.cancel()
        alarm = threading.Timer(limit, lambda: kill(children))
        alarm.start()
        yield {variant: started[variant] for variant in variants if variant in started}
    finally:
        alarm.cancel()
        kill(children)
        for child in children.values():
            child.wait()


def answer(child: subprocess.Popen, word: str = "") -> dict[str, Any]:
    """Send a child `word`, if there is one, and return its next JSON line; {} if it has ended."""
    if word:
        with contextlib.suppress(BrokenPipeError):
            print(word, file=child.stdin, flush=True)
    return next((json.loads(line) for line in child.stdout if line.startswith("{")), {})


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
