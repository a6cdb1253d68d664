"""From the launch to the end of the first step, with empty and with filled caches, and what the seconds went to.

    python tests/bench/startup.py [--shape qwen3-1.7b] [--layouts colocated split rows] [--warm 2] [-- --field value ..]
    python tests/bench/startup.py --shape tiny --warm 1 --limit 600 -- --model.dtype float32 \
        --generator.max-completion-tokens 8 --prompts-per-step 2 --group-size 2     (a CPU)

colocated: one rank with every role. split: `--trainers` and `--generators` ranks of their own. Each layout runs two
steps of train_grpo.py with tests/bench/colocated.py, first with a cache folder of its own that is empty, then `--warm`
times with what is in it; nothing is saved. The first step has ended when metrics.jsonl has its line. rows: the trainer
alone, whose rows change their length: seconds of the first row of each length, and tokens per second of the next three.

Lines `starting` are the seconds at which rank 0 began with a part of the start; those of vLLM are its log's, and parts
of `starting vLLM`. A step has in it what compiles meanwhile.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import threading
import time

from speed import ROOT, checkpoint, report, run_child, run_limited

sys.path.insert(0, str(ROOT))

from grpo.run.command_line import CACHES

LAYOUTS = ("colocated", "split", "rows")
STARTING = re.compile(r"^starting +(\d+) s  (.*)", re.MULTILINE)
# What vLLM 0.32 logs; the last of each counts
VLLM = {
    "vLLM: loading": r"Model loading took \S+ GiB memory and ([\d.]+) seconds",
    "vLLM: compiling": r"torch\.compile took ([\d.]+) s in total",
    "vLLM: warming up": r"Initial profiling/warmup run took ([\d.]+) s",
    "vLLM: graphs": r"Graph capturing finished in (\d+) secs",
    "vLLM: engine": r"init engine \(.*\) took ([\d.]+) s",
}
POLL_SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--layouts", nargs="+", default=["colocated", "rows"], choices=LAYOUTS)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--warm", type=int, default=2, help="runs with filled caches")
    parser.add_argument("--limit", type=int, default=300, help="seconds of one run")
    parser.add_argument("--name", default="startup", help="of the JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="behind --: for every run of train_grpo.py")
    options = parser.parse_args()
    if options.child:
        rows_of_many_lengths(options.shape)
        return
    checkpoint(options.shape)
    for variable in CACHES:  # the run sets them itself
        os.environ.pop(variable, None)
    rows = []
    for layout in options.layouts:
        cache = ROOT / "runs" / "bench" / f"{options.name}-{layout}-caches"
        shutil.rmtree(cache, ignore_errors=True)
        os.environ["GRPO_CACHE_DIR"] = str(cache)
        for number in range(1 + options.warm):
            name = f"{options.name}-{options.shape}-{layout}-{number}"
            caches = {"layout": layout, "caches": "filled" if number else "empty"}
            rows.append(caches | (alone if layout == "rows" else launch)(name, layout, options))
            print(rows[-1], flush=True)
        shutil.rmtree(cache, ignore_errors=True)
    facts = {"shape": options.shape, "trainers": options.trainers, "generators": options.generators}
    report(options.name, turned(rows), **facts)


def turned(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Turn a row for each run into a row for each thing measured."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("layout", "caches"))
    runs = {f"{row['layout']} {number}, {row['caches']}": row for number, row in enumerate(rows, 1)}
    return [{"": name} | {run: row.get(name, "-") for run, row in runs.items()} for name in names]


def launch(name: str, layout: str, options: argparse.Namespace) -> dict[str, object]:
    """Run until the first step is done. Returns its seconds, and those of its parts."""
    folder = ROOT / "runs" / "bench" / name
    model = checkpoint(options.shape)
    log = folder.with_suffix(".log")
    metrics = folder / "metrics.jsonl"
    shutil.rmtree(folder, ignore_errors=True)
    ranks = 1
    flags = []
    if layout == "split":
        ranks = options.trainers + options.generators
        flags = ["--roles.no-colocated", "--roles.num-trainers", options.trainers]
        flags += ["--roles.num-generators", options.generators, "--generator.gpu-memory-utilization", "0.85"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["train_grpo.py", "tests/bench/colocated.py", "--model.path", model]
    command += ["--data.path", model / "prompts.jsonl", "--roles.num-references", "0", "--run-dir", folder]
    command += ["--num-steps", "2", "--checkpoint.no-export", *flags, *options.flags]
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    first: list[float] = []
    ended = threading.Event()
    began = time.monotonic()

    def wait_for_step() -> None:
        while not ended.wait(POLL_SECONDS) and not first:
            if metrics.exists() and metrics.stat().st_size:
                first.append(time.monotonic() - began)

    watcher = threading.Thread(target=wait_for_step)
    watcher.start()
    try:
        code = run_limited(command, log, options.limit)
    finally:  # also if the bench itself is to end, which would wait for the thread
        ended.set()
        watcher.join()
    if code != 0 or not first:
        errors = [line for line in log.read_text().splitlines() if line.startswith("error:")]
        return {"failed": f"{code}: {errors[0] if errors else f'see {log}'}"}
    return {"until step 1 is done s": first[0], **steps_of(metrics), **parts_of(log.read_text())}


def steps_of(metrics: pathlib.Path) -> dict[str, float]:
    """Return the seconds of both steps, with what they compile."""
    first, second = [json.loads(line) for line in metrics.read_text().splitlines()][:2]
    return {"step 1 s": first["time/step"], "step 2 s": second["time/step"]}


def parts_of(log: str) -> dict[str, float]:
    """Read the seconds of the start's parts from the log, where the run and vLLM print theirs."""
    parts = {f"starting: {part.split(',')[0]}": float(seconds) for seconds, part in STARTING.findall(log)}
    of_vllm = {name: re.findall(pattern, log) for name, pattern in VLLM.items()}
    return parts | {name: float(values[-1]) for name, values in of_vllm.items() if values}


def alone(name: str, layout: str, options: argparse.Namespace) -> dict[str, object]:
    """Measure rows of many lengths with a trainer alone."""
    log = ROOT / "runs" / "bench" / f"{name}.log"
    command = [sys.executable, __file__, "--child", "--shape", options.shape]
    return run_child(command, log, options.limit)


def rows_of_many_lengths(shape: str) -> None:
    """Print seconds of the first forward and backward of each length, and tokens per second of the next three."""
    import torch

    from grpo.config import ModelConfig, TrainerConfig
    from grpo.data.batches import make_batch
    from grpo.metrics import StepMetrics
    from grpo.models.build import ROW_MULTIPLE
    from grpo.models.hf_folder import read_hf_config
    from grpo.roles.process_groups import setup_trainers
    from grpo.roles.trainer import Trainer
    from grpo.run.command_line import keep_caches
    from grpo.types import Sample

    keep_caches()
    roles = setup_trainers()
    folder = str(checkpoint(shape))
    on_gpu = roles.device.type == "cuda"
    model = ModelConfig(path=folder)
    longest = 16_384 if on_gpu else 128
    config = TrainerConfig(micro_batch_tokens=longest, activation_checkpointing="selective")
    trainer = Trainer(model, config, folder, 10, roles)
    document = min(1024, read_hf_config(folder).max_position_embeddings)
    multiple = ROW_MULTIPLE[roles.device.type]
    figures = {}

    def seconds(row_tokens: int) -> float:
        lengths = [document] * (row_tokens // document) + [row_tokens % document] * (row_tokens % document > 0)
        batch = make_batch([Sample(torch.zeros(length).long(), torch.arange(length) > 0) for length in lengths])
        began = time.perf_counter()
        trainer.forward_backward(batch, lambda _, logprobs_BT, entropy_BT: (logprobs_BT.sum(), {}), StepMetrics(64))
        trainer.zero_gradient()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for turn, row_tokens in enumerate((longest, longest - multiple, longest - 2 * multiple)):
        first, *later = [seconds(row_tokens) for _ in range(4)]
        figures[f"row {turn + 1} ({row_tokens}) first s"] = first
        figures[f"row {turn + 1} tokens/s"] = 3 * row_tokens / sum(later)
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
