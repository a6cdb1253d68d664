"""Qwen3-30B-A3B at full size on a node of eight GPUs: five GRPO steps, a checkpoint, and a step after a resume.

    python tests/bench/thirty.py [--parts write fits steps checkpoint resume] [--deadline 1500] [--gpus 8]
        [--layers 48] [--checkpoint-layers N] [-- --field value ...]
    python tests/bench/thirty.py --gpus 2 --layers 10                                       (a try on two GPUs)
    OMP_NUM_THREADS=1 python tests/bench/thirty.py --tiny                                   (eight ranks on a CPU)

The layout is that of configs/qwen3_30b_a3b_8x80.py, or of 8x141 on GPUs of more than 100 GiB; what comes behind `--`
goes to each run. Weights are random, prompts have 128 tokens, the reward is a coin. Parts, each within a limit of its
own, and all within `--deadline` seconds:

- write: the weights, 61 GB, by up to eight processes, unless they are there.
- fits: what `--dry-run` says of this machine.
- steps: five steps of the whole model with a sync check in each. Nothing is saved. If the check fails, this and what
  follows goes without it, because random weights in bfloat16 may differ so much by rounding; then read `mismatch/mean`.
- checkpoint: steps of a model with the first of these blocks, as many as disk and host have room for, and no more than
  128 GiB: a checkpoint of all has 227 GiB with moments in bfloat16. It saves after step 2. When that is written and
  step 3 is logged, all ranks are killed.
- resume: step 3 again, whose numbers must be the same to the last digit.

Each phase and each part leaves a line of JSON when it ends, also in $OUT/thirty.jsonl (default runs/bench). Tables
come last. They are made of the folders of the runs, so one command can do some parts and another the rest. "By
arithmetic" is a floor by data sheets: reading the weights and the mean cache at the GPU's bandwidth, the operations of
training at its peak, the bytes that a rank receives over NVLink or sends over PCIe.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from same_numbers import values as numbers_of
from speed import PEAK_TFLOPS, ROOT, launch, report, spread, train_flops_per_token
from toy_runs import records

sys.path.insert(0, str(ROOT))

from grpo.config import GRPOConfig
from grpo.config.recipes import load
from grpo.models.hf_folder import read_hf_config
from grpo.run import machine

LIMITS = {"write": 300, "fits": 60, "steps": 600, "checkpoint": 480, "resume": 360}  # seconds
NUM_STEPS = 5
SAVED_STEP = 2
REPEATED_STEP = 3
GIB = 2**30
LARGE_GIB = 100  # of a GPU that takes the recipe for 141 GB
DISK_SHARE = 0.9  # of the free disk that a checkpoint may fill
HOST_SHARE = 0.6  # of the host's free memory that the copy of a checkpoint may fill
MOST_GIB = 128  # of a checkpoint, which must be written and read within minutes
# Bytes per second by data sheets: memory of a GPU, NVLink and PCIe 5 in one direction
GPU_MEMORY = {"H100": 3.35e12, "H200": 4.8e12}
NVLINK = 450e9
PCIE = 64e9
RUNS = ROOT / "runs" / "thirty"
RECIPE = "tests/bench/thirty_recipe.py"
GRPO = ("train_grpo.py", RECIPE)
TINY = ["--model.dtype", "float32", "--trainer.no-compile", "--trainer.micro-batch-tokens", "1024"]
TINY += ["--prompts-per-step", "4", "--generator.max-completion-tokens", "16"]
# What a phase of a step is in the dry run
AWAKE = "while the engine is awake"
MOMENTS = {"generate": AWAKE, "sync": AWAKE, "train": "while it trains"}
POLL_SECONDS = 0.5
# What a run says whose sync check fails, as rounding may make it with random weights in bfloat16
CHECK_FAILED = "the generator does not hold the policy's weights"
UNCHECKED = "unchecked"  # a file that says so


@dataclass
class Bench:
    """The options, and what all parts share."""

    options: argparse.Namespace
    base: str
    """The recipe whose layout is taken."""
    gpu_gib: float
    """Memory of a GPU. Without GPUs the dry run judges one of this size."""
    shape: str
    ends: float
    """The time at which everything must have ended, by the monotonic clock."""
    out: pathlib.Path
    failed: list[str] = field(default_factory=list)

    def write(self, **figures: Any) -> None:
        """Write a line of JSON to the console and to the file of results, where a kill cannot lose it."""
        text = json.dumps(figures)
        print(text, flush=True)
        with open(self.out, "a") as file:
            file.write(text + "\n")

    def limit(self, part: str) -> float:
        """Return the seconds that a part may take."""
        return min(LIMITS[part], self.ends - time.monotonic())

    def model(self, layers: int) -> pathlib.Path:
        """Return the folder of the model with so many blocks."""
        folder = pathlib.Path(os.environ.get("BENCH_MODELS", "/tmp/bench_models"))
        return folder / f"{self.shape}-{layers}-in-blocks"

    def recipe_facts(self, notes: str) -> str:
        """Return the JSON that the recipe reads from THIRTY."""
        return json.dumps({"base": self.base, "gpus": self.options.gpus, "notes": notes})

    def torchrun(self) -> list[Any]:
        """Return the command up to the recipe."""
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*words, f"--nproc_per_node={self.options.gpus}", *GRPO]

    def flags(self, layers: int, run_dir: pathlib.Path) -> list[Any]:
        """Return the flags of a run of that model."""
        model = self.model(layers)
        words = ["--model.path", model, "--data.path", model / "prompts.jsonl", "--run-dir", run_dir]
        if self.options.tiny:
            words += TINY
        if (RUNS / UNCHECKED).exists():
            words += ["--sync-check-interval", "0"]
        return words + self.options.flags

    def config(self, layers: int) -> GRPOConfig:
        """Return the config of a run of that model."""
        os.environ["THIRTY"] = self.recipe_facts("")
        words = [str(word) for word in self.flags(layers, RUNS / "steps")]
        with contextlib.redirect_stdout(io.StringIO()):
            return load(GRPOConfig, str(ROOT / RECIPE), words)


def main() -> None:
    """Do the parts one after the other and print the tables. The exit code is 1 if one is not done."""
    options = read_options()
    shape = "tiny-moe" if options.tiny else "qwen3-30b-a3b"
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 80
    base = "qwen3_30b_a3b_8x141.py" if gpu_gib > LARGE_GIB else "qwen3_30b_a3b_8x80.py"
    out = pathlib.Path(os.environ.get("OUT", ROOT / "runs" / "bench")) / "thirty.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.deadline
    bench = Bench(options, str(ROOT / "configs" / base), gpu_gib, shape, ends, out)
    parts = {"write": write_model, "fits": dry_run, "steps": take_steps, "checkpoint": save, "resume": resume}
    for part in options.parts:
        began = time.monotonic()
        if bench.limit(part) <= 0:
            outcome = "not begun: no time is left"
        else:
            outcome = parts[part](bench)
        if outcome != "done":
            bench.failed.append(part)
        bench.write(part=part, outcome=outcome, seconds=round(time.monotonic() - began, 1))
    show_tables(bench)
    sys.exit(bool(bench.failed))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(LIMITS), choices=LIMITS)
    parser.add_argument("--deadline", type=float, default=1500, help="seconds of everything")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, help="blocks of the model; by default all 48, 2 of the tiny one")
    parser.add_argument("--checkpoint-layers", type=int, help="of the model that is saved; by default those with room")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("flags", nargs="*", help="behind --")
    options = parser.parse_args()
    if options.tiny:
        options.layers = options.layers or 2
        options.checkpoint_layers = options.checkpoint_layers or 1
    options.layers = options.layers or 48
    return options


# ---- Parts. Each returns "done" or what went wrong.


def write_model(bench: Bench) -> str:
    """Write the weights, unless they are there."""
    folder = bench.model(bench.options.layers)
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, ROOT / "tests/bench/random_checkpoint.py", bench.shape, folder]
        command += ["--num-layers", bench.options.layers, "--writers", min(8, os.cpu_count())]
        log = RUNS / "write.log"
        code = follow(bench, "write", launch(command, log), log)
        if code:
            return code_text(code)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bench.write(part="write", bytes=size, files=len(list(folder.glob("*.safetensors"))))
    return "done"


def dry_run(bench: Bench) -> str:
    """Write down what the dry run says of this machine."""
    log = RUNS / "fits.log"
    flags = [*bench.flags(bench.options.layers, RUNS / "steps"), "--dry-run", "--gpus", bench.options.gpus]
    flags += ["--gpu-gib", round(bench.gpu_gib, 1)]
    process = launch([sys.executable, *GRPO, *flags], log, THIRTY=bench.recipe_facts(""))
    code = follow(bench, "fits", process, log)
    for line in log.read_text().splitlines():
        if line.startswith(("fits", "tight", "PROBLEM", "engines")):
            bench.write(part="fits", says=line)
    return code_text(code)


def take_steps(bench: Bench) -> str:
    """Take the five steps of the whole model; if the sync check fails, once more without it."""
    (RUNS / UNCHECKED).unlink(missing_ok=True)
    flags = ["--num-steps", NUM_STEPS, "--overwrite"]
    code = train(bench, "steps", bench.options.layers, RUNS / "steps", flags)
    complaints = [line for line in (RUNS / "steps.log").read_text().splitlines() if CHECK_FAILED in line]
    if code and complaints:
        bench.write(part="steps", says=complaints[-1], then="without the check from here on")
        (RUNS / UNCHECKED).touch()
        code = train(bench, "steps", bench.options.layers, RUNS / "steps", flags)
    return code_text(code)


def save(bench: Bench) -> str:
    """Take steps of a model that there is room for, and kill its ranks after a checkpoint and one more step."""
    layers = bench.options.checkpoint_layers or layers_with_room(bench)
    if layers < 1:
        return "there is no room for a checkpoint"
    take_first_blocks(bench, layers)
    run_dir = RUNS / "saved"
    shutil.rmtree(run_dir, ignore_errors=True)
    (RUNS / "before.json").unlink(missing_ok=True)
    checkpoint = run_dir / "checkpoints" / f"step-{SAVED_STEP:08d}"
    times: dict[str, float] = {}  # of what happened to the checkpoint

    def is_reached() -> bool:
        """Note when the files of the checkpoint appear and when it is whole; say whether the next step is logged."""
        if checkpoint.with_suffix(".partial").exists():
            times.setdefault("began", time.monotonic())
        if checkpoint.exists():
            times.setdefault("whole", time.monotonic())
        return "whole" in times and logged(run_dir, REPEATED_STEP) is not None

    flags = ["--num-steps", 2 * NUM_STEPS, "--checkpoint.interval", SAVED_STEP, "--checkpoint.keep", 1]
    code = train(bench, "checkpoint", layers, run_dir, flags, is_reached)
    if code != "reached":
        return code_text(code)
    line = logged(run_dir, REPEATED_STEP)
    (RUNS / "before.json").write_text(json.dumps(line))
    size = sum(file.stat().st_size for file in checkpoint.iterdir()) / GIB
    seconds = times["whole"] - times.get("began", times["whole"])
    facts = {
        "layers": layers,
        "gib": round(size, 3),
        "gib by arithmetic": round(arithmetic_gib(bench, layers), 3),
        "written in s": round(seconds, 2),
        "the loop waited s": round(line.get("time/save", 0.0), 2),
        "of it copying by arithmetic s": round(size * GIB / bench.options.gpus / PCIE, 2),
    }
    (RUNS / "checkpoint.json").write_text(json.dumps(facts))
    bench.write(part="checkpoint", **facts)
    return "done"


def resume(bench: Bench) -> str:
    """Resume the killed run for one step, and compare its numbers with those of the run that was not interrupted."""
    if not (RUNS / "before.json").exists():
        return "no run was saved"
    before = json.loads((RUNS / "before.json").read_text())
    layers = json.loads((RUNS / "checkpoint.json").read_text())["layers"]
    flags = ["--num-steps", REPEATED_STEP, "--checkpoint.interval", 0, "--resume"]
    code = train(bench, "resume", layers, RUNS / "saved", flags)
    if code:
        return code_text(code)
    after = logged(RUNS / "saved", REPEATED_STEP)
    if after["time"] == before["time"]:
        return f"step {REPEATED_STEP} was not taken again"
    old = numbers_of(json.dumps(before))
    new = numbers_of(json.dumps(after))
    differing = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    for name in ("loss", "grad_norm", "entropy", "mismatch/mean"):
        bench.write(part="resume", number=name, before=old[name], after=new[name])
    bench.write(part="resume", numbers=len(new), differing=sorted(differing))
    return f"{len(differing)} numbers differ" if differing else "done"


# ---- Runs


def train(
    bench: Bench,
    part: str,
    layers: int,
    run_dir: pathlib.Path,
    flags: list[Any],
    is_reached: Callable[[], bool] | None = None,
) -> int | str:
    """Run train_grpo.py. Returns what `follow` returns."""
    notes = RUNS / f"notes-{part}"
    shutil.rmtree(notes, ignore_errors=True)
    command = [*bench.torchrun(), *bench.flags(layers, run_dir), *flags]
    log = RUNS / f"{part}.log"
    process = launch(command, log, THIRTY=bench.recipe_facts(str(notes)), VLLM_LOGGING_LEVEL="INFO")
    return follow(bench, part, process, log, notes / "0.jsonl", is_reached)


def follow(
    bench: Bench,
    part: str,
    process: subprocess.Popen,
    log: pathlib.Path,
    notes: pathlib.Path | None = None,
    is_reached: Callable[[], bool] | None = None,
) -> int | str:
    """Write down the notes of a program as they come, until it ends, is too slow, or `is_reached`; then kill it.

    Returns its exit code, "reached", or why it has none.
    """
    ends = time.monotonic() + bench.limit(part)
    num_written = 0
    outcome: int | str | None = None
    try:
        while outcome is None:
            outcome = process.poll()  # before the notes are read, so that the last ones are not missed
            lines = notes.read_text().splitlines() if notes and notes.exists() else []
            for line in lines[num_written:]:
                bench.write(part=part, **json.loads(line))
            num_written = len(lines)
            if outcome is None and is_reached and is_reached():
                outcome = "reached"
            if outcome is None and time.monotonic() > ends:
                outcome = "no end within its limit"
            time.sleep(POLL_SECONDS)
    finally:
        kill(process)
    if outcome not in (0, "reached"):
        print(log.read_text()[-3000:], flush=True)
    return outcome


def kill(process: subprocess.Popen) -> None:
    """Kill torchrun and its ranks at once, as a machine that dies does. A program that has ended stays as it is."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    process.kill()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=30)


def code_text(code: int | str) -> str:
    """Say how a program ended."""
    if code == 0:
        return "done"
    return f"exit code {code}" if isinstance(code, int) else code


def logged(run_dir: pathlib.Path, step: int) -> dict[str, Any] | None:
    """Return the last line of that step in the run's metrics, None if there is none."""
    if not (run_dir / "metrics.jsonl").exists():
        return None
    lines = [line for line in records(run_dir) if line["step"] == step and "loss" in line]
    return lines[-1] if lines else None


# ---- A model with the first blocks of the whole one


def layers_with_room(bench: Bench) -> int:
    """Return the largest number of blocks for whose checkpoint there is room, at most all of them."""
    RUNS.mkdir(parents=True, exist_ok=True)
    disk = DISK_SHARE * shutil.disk_usage(RUNS).free / GIB
    host = HOST_SHARE * psutil.virtual_memory().available / GIB
    without_blocks = 2 * arithmetic_gib(bench, 1) - arithmetic_gib(bench, 2)
    a_block = arithmetic_gib(bench, 2) - arithmetic_gib(bench, 1)
    return min(bench.options.layers, int((min(disk, host, MOST_GIB) - without_blocks) / a_block))


def arithmetic_gib(bench: Bench, layers: int) -> float:
    """Return the size of a checkpoint of a model with so many blocks, GiB."""
    hf = read_hf_config(str(bench.model(bench.options.layers)))
    hf.num_hidden_layers = layers
    return machine.checkpoint_gib(machine.sizes_of(hf), bench.config(bench.options.layers))


def take_first_blocks(bench: Bench, layers: int) -> None:
    """Make the folder of a model with the first blocks of the whole one, by links to its files."""
    whole = bench.model(bench.options.layers)
    folder = bench.model(layers)
    if folder.exists():
        return
    folder.mkdir()
    for file in whole.iterdir():
        block = re.fullmatch(r"block-(\d+)\.safetensors", file.name)
        if file.suffix == ".safetensors" and (block is None or int(block[1]) < layers):
            (folder / file.name).symlink_to(file)
        elif file.suffix != ".safetensors":
            shutil.copy(file, folder)
    for name, changed in (("config.json", {"num_hidden_layers": layers}), ("model.safetensors.index.json", {})):
        content = json.loads((folder / name).read_text()) | changed
        if "weight_map" in content:
            files = content["weight_map"].items()
            content["weight_map"] = {tensor: file for tensor, file in files if (folder / file).exists()}
        (folder / name).write_text(json.dumps(content, indent=1))


# ---- Tables


def show_tables(bench: Bench) -> None:
    """Print memory and seconds of the five steps beside arithmetic, from what lies in the runs' folders."""
    notes = []
    for file in sorted((RUNS / "notes-steps").glob("*.jsonl")):
        rank = int(file.stem)
        notes += [{"rank": rank, **json.loads(line)} for line in file.read_text().splitlines()]
    lines = [logged(RUNS / "steps", step) for step in range(2, NUM_STEPS + 1)]
    lines = [line for line in lines if line]
    if not lines:
        return
    facts = {"shape": bench.shape, "layers": bench.options.layers, "gpus": bench.options.gpus}
    report("thirty_memory", memory_rows(notes), **facts)
    report("thirty_seconds", seconds_rows(bench, notes, lines), **facts)


def memory_rows(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of what ranks held in each phase of steps 2 to 5, beside the dry run; GiB, the most of all ranks."""
    dry_run_text = (RUNS / "fits.log").read_text() if (RUNS / "fits.log").exists() else ""
    estimates = dict(re.findall(r"memory of a trainer (while .*?): ([\d.]+) of", dry_run_text))
    rows = []
    for phase, moment in MOMENTS.items():
        of_phase = [note for note in notes if note["phase"] == phase and note["step"] > 1]
        row = {"": phase, "dry run": f"{estimates.get(moment, '-')} {moment}"}
        row["held"] = max(note["held"] for note in of_phase)
        row["torch's peak"] = max((note["peak"] for note in of_phase if "peak" in note), default="-")
        rows.append(row)
    weights = re.search(r"memory of a generator: ([\d.]+) weights", dry_run_text)
    loaded = re.findall(r"Model loading took ([\d.]+) GiB", (RUNS / "steps.log").read_text())
    rows.append({"": "weights of a generator", "dry run": weights[1] if weights else "-"})
    rows[-1]["torch's peak"] = loaded[-1] if loaded else "-"
    return rows


def seconds_rows(bench: Bench, notes: list[dict[str, Any]], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the driver's seconds in each phase of steps 2 to 5 and before step 1, beside arithmetic."""
    of_driver = [note for note in notes if note["rank"] == 0]
    floors = floor_seconds(bench, lines) if torch.cuda.is_available() else {}
    rows = [{"phase": note["phase"], "s": note["seconds"]} for note in of_driver if note["step"] == 0]
    rows.append({"phase": "step 1, which compiles", "s": logged(RUNS / "steps", 1)["time/step"]})
    rows.append({"phase": "a step", "s": spread([line["time/step"] for line in lines])})
    syncs = [
        [note["seconds"] for note in of_driver if (note["step"], note["phase"]) == (line["step"], "sync")]
        for line in lines
    ]
    measured = {phase: [line[f"time/{phase}"] for line in lines] for phase in ("generate", "train")}
    measured["sync check"] = [seconds[0] for seconds in syncs]
    measured["sync"] = [seconds[-1] for seconds in syncs]
    for phase, seconds in measured.items():
        rows.append({"phase": phase, "s": spread(seconds), "by arithmetic": floors.get(phase, "-")})
    rows.append({"phase": "tokens per second", "s": spread([line["tokens_per_second"] for line in lines])})
    rows.append({"phase": "log-prob difference", "s": spread([line["mismatch/mean"] for line in lines])})
    return rows


def floor_seconds(bench: Bench, lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return for phases of a step the fewest seconds that data sheets allow."""
    config = bench.config(bench.options.layers)
    hf = read_hf_config(str(bench.model(bench.options.layers)))
    sizes = machine.sizes_of(hf)
    name = torch.cuda.get_device_name()
    bandwidth = max((value for kind, value in GPU_MEMORY.items() if kind in name), default=float("nan"))
    prompt_tokens = statistics.median(line["prompt/length_mean"] for line in lines)
    completion_tokens = statistics.median(line["completion/length_mean"] for line in lines)
    longest = statistics.median(line["completion/length_max"] for line in lines)

    full_length = config.max_sequence_tokens
    cache_share = (prompt_tokens + completion_tokens / 2) / full_length
    read_gib = machine.engine_weights_gib(sizes, config)
    num_at_once = config.completions_at_once / config.num_engines
    read_gib += cache_share * num_at_once * machine.sequence_gib(sizes, config)
    num_tokens = config.completions_per_step * (prompt_tokens + completion_tokens)
    operations = num_tokens * train_flops_per_token(hf, sizes.parameters, int(prompt_tokens + completion_tokens))
    if config.trainer.activation_checkpointing == "full":
        operations *= 4 / 3
    gpus = bench.options.gpus
    weight_bytes = machine.DTYPE_BYTES[config.model.dtype] * sizes.parameters
    return {
        "generate": longest * read_gib * GIB / bandwidth,
        "train": operations / (gpus * PEAK_TFLOPS * 1e12),
        "sync": weight_bytes * (gpus - 1) / gpus / NVLINK,
    }


if __name__ == "__main__":
    main()
