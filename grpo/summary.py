"""What a finished run achieved, on one screen: `python -m grpo.summary RUN_DIR`.

Reads `metrics.jsonl` and shows held-out accuracy (without evaluations, the mean reward) before and after, its curve,
the minutes taken, and where to look next.
"""

import json
import pathlib
import sys

from grpo.run.log import compact_number, terminal_curve


def main(arguments: list[str]) -> None:
    """Print the summary of the run folder named by the one argument. Raises SystemExit if there is no such run."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m grpo.summary RUN_DIR")
    run_dir = pathlib.Path(arguments[0])
    if not (run_dir / "metrics.jsonl").is_file():
        raise SystemExit(f"{run_dir}/metrics.jsonl does not exist; train first, or name another run folder")
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, not a traceback
    with open(run_dir / "metrics.jsonl", encoding="utf-8") as file:
        print(summarize([json.loads(line) for line in file], run_dir))


def summarize(records: list[dict], run_dir: pathlib.Path) -> str:
    """The summary as text. `records` are the lines of metrics.jsonl in their order."""
    steps = [record for record in records if "time/step" in record]
    evaluated = [record for record in records if record.get("eval/accuracy") is not None]
    rewarded = [record for record in records if record.get("reward/mean") is not None]
    curve, name, label = rewarded, "reward/mean", "mean reward of the sampled completions"
    if len(evaluated) > 1:
        curve, name, label = evaluated, "eval/accuracy", "accuracy on held-out prompts (greedy)"
    minutes = sum(record["time/step"] for record in steps) / 60
    lines = [f"{run_dir}: {len(steps)} steps in {minutes:.1f} minutes, start-up not counted"]
    if curve:
        first, last = (f"{compact_number(r[name])} after step {r['step']}" for r in (curve[0], curve[-1]))
        lines += [f"{label}: {first}, {last}", "", terminal_curve([record[name] for record in curve])]
    places = {"TensorBoard": "tensorboard", "completions to read": "samples.txt", "trained model": "model"}
    lines += ["", *(f"{what}: {run_dir / where}" for what, where in places.items() if (run_dir / where).exists())]
    lines += [
        "",
        f"Watch the curves:   .venv/bin/python -m tensorboard.main --logdir {run_dir.parent}",
        f"Pass@k:             .venv/bin/python -m grpo.evaluate {run_dir}/model {run_dir}/config.py "
        "--evaluation.num-samples 8",
        "Change something:   the recipe configs/toy_arithmetic.py, --algorithm.loss dapo, or train_grpo.py itself",
        "A real model:       torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_1_7b_gsm8k.py",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
