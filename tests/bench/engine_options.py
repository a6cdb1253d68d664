"""What an engine option costs and brings: short GRPO runs with and without it, in turns, and the table of ratios.

    python tests/bench/engine_options.py [--model FOLDER] [--variants base fp8 ngram] [--rounds 2] [--steps 10]
                                         [-- --group-size 4 ...]

One GPU with every role on it, and the recipe tests/bench/colocated.py. Without `--model` it writes a random checkpoint
of `--shape`; a random model hardly repeats itself, so for `ngram` give a real one, with prompts in FOLDER/prompts.jsonl
or by `-- --data.path ...`. The sync check is off: what it would refuse is what is measured. What is behind `--` goes to
every run. Each run leaves `runs/engine/VARIANT-ROUND`.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from speed import run_limited

ROOT = pathlib.Path(__file__).parents[2]
NGRAM = '{"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
VARIANTS = {
    "base": [],
    "fp8": ["--generator.engine", "quantization", "fp8_per_tensor"],
    "fp8_channel": ["--generator.engine", "quantization", "fp8_per_channel"],
    "fp8_cache": ["--generator.engine", "kv_cache_dtype", "fp8"],
    "ngram": ["--generator.engine", "speculative_config", NGRAM],
}
FIRST_STEP = 3  # the first two compile
SHOWN = ("time/generate", "time/sync", "mismatch/mean", "mismatch/max", "mismatch/kl", "mismatch/ess")
SHOWN += ("completion/length_mean",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--shape", default="qwen3-1.7b", help="of random_checkpoint.py, without --model")
    parser.add_argument("--variants", nargs="+", default=["base", "fp8", "ngram"], choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=int, default=300, help="seconds that one run may take")
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    model = options.model or random_checkpoint(options.shape)
    for number in range(options.rounds):
        order = options.variants if number % 2 == 0 else options.variants[::-1]
        for variant in order:
            run(variant, number, model, options)
    print(table(options.variants, options.rounds))


def random_checkpoint(shape: str) -> pathlib.Path:
    folder = ROOT / "runs" / "engine" / shape
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, ROOT / "tests/bench/random_checkpoint.py", shape, folder], check=True)
    return folder


def folder_of(variant: str, number: int) -> pathlib.Path:
    return ROOT / "runs" / "engine" / f"{variant}-{number}"


def run(variant: str, number: int, model: pathlib.Path, options: argparse.Namespace) -> None:
    folder = folder_of(variant, number)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log_file = folder.with_suffix(".log")  # beside the folder, which is the run's own
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train_grpo.py"]
    command += ["tests/bench/colocated.py", "--model.path", str(model), "--data.path", str(model / "prompts.jsonl")]
    command += ["--run-dir", str(folder), "--num-steps", str(options.steps), "--sync-check-interval", "0"]
    command += ["--checkpoint.no-export"]
    command += [*VARIANTS[variant], *options.flags]
    code = run_limited(command, log_file, options.limit)
    errors = [line for line in log_file.read_text().splitlines() if line.startswith("error:")]
    outcome = "done" if code == 0 else f"FAILED ({code}): {errors[0] if errors else f'see {log_file}'}"
    print(f"{variant} round {number}: {outcome}", flush=True)


def steps_of(variant: str, rounds: int) -> list[dict[str, float]]:
    """Return the metrics of all rounds' steps, without the first two and the last, which saves."""
    steps = []
    for number in range(rounds):
        path = folder_of(variant, number) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        steps += [line for line in lines if "time/step" in line and line["step"] >= FIRST_STEP][:-1]
    return steps


def table(variants: list[str], rounds: int) -> str:
    """Return a Markdown table: medians (lowest to highest), and times of sampling a token over the first variant's."""
    steps = {variant: its_steps for variant in variants if (its_steps := steps_of(variant, rounds))}
    lines = [f"| | {' | '.join(steps)} |", f"|{' --- |' * (len(steps) + 1)}"]
    for name in SHOWN:
        cells = []
        for its_steps in steps.values():
            values = [step[name] for step in its_steps if step.get(name) is not None]
            cells.append(f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})" if values else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    # per token, since completions of another engine differ in length
    seconds = [
        statistics.median(s["time/generate"] / s["completion/length_mean"] for s in its_steps)
        for its_steps in steps.values()
    ]
    lines.append(
        f"| generation time of a token over the first's | {' | '.join(f'{s / seconds[0]:.3f}' for s in seconds)} |"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
