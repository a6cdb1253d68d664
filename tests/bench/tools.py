"""Turns with a tool: ours, ours with `environment.rounds`, and TRL's `GRPOTrainer(tools=[...])`, in turns.

    python tests/bench/tools.py [--shape toy] [--methods ours rounds trl/32] [--waits 0 100] [--rounds 3] [--steps 8]
        [--prompts 4] [--limit 300] [--trl-python PYTHON] [-- --environment.num-processes 32 ...]

The task: "12+34+56". Each turn asks the tool `calculate` for one addition, until a number is left, which is the answer:
2 to 5 turns by the question. A random model calls no tools, so all sides start from one model that was
supervised on such conversations until it writes them at temperature 1, of the toys' size or, with `--shape qwen3-0.6b`,
of a real one; it keeps doing so, because the learning rate is 1e-7. The questions, their order, the chat template, the
tool's function, the reward and the numbers of completions are the same; `turns/step` shows that the work is.

TRL runs as tests/bench/trl_grpo.py says, by `--trl-python` if it is installed elsewhere; behind `trl/` stand its
completions in one forward. It calls tools in its own process, one after the other; ours has a process for each rollout.
On a CPU its engine is vLLM without compilation, as ours. What is behind `--` goes to ours alone. Figures are over all
rounds, median (lowest to highest) of the steps after the first two; `ratio` is a method's median step over ours.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
from typing import Any

from random_checkpoint import SHAPES
from speed import ROOT, report, run_limited, spread
from toy_runs import records

from configs.examples.toys import make_model, trained_tokenizer

RUNS = ROOT / "runs" / "tools"
BENCH = pathlib.Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
WARM_STEPS = 2
TOOLS = {0: "calculate", 100: "after_100_ms"}
QUESTIONS = 2000
GROUP_SIZE = 8
# ChatML as in Qwen, with the calls of a message, which TRL's check of templates asks for.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="toy", help="toy, or one of tests/bench/random_checkpoint.py")
    parser.add_argument("--methods", nargs="+", default=["ours", "rounds", "trl/32"])
    parser.add_argument("--waits", nargs="+", type=int, default=[0, 100], choices=TOOLS, help="of the tool, ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help=f"of a step, with {GROUP_SIZE} completions each")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one run")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("flags", nargs="*", help="behind --: for ours")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # TRL without a launcher refuses to see several
    folder = player(options.shape, options.limit)
    steps: dict[tuple[int, str], list[dict]] = {(w, method): [] for w in options.waits for method in options.methods}
    failed: dict[tuple[int, str], str] = {}
    for number in range(options.rounds):
        for wait, method in steps:
            new_steps, problem = run(method, wait, folder, f"{options.shape}-{wait}-{method}-{number}", options)
            steps[wait, method] += new_steps
            if problem:
                failed[wait, method] = problem
            print(f"{wait} ms {method} round {number}: {[round(s['time/step'], 2) for s in new_steps]}", flush=True)
            rows = [row(*key, its_steps, steps.get((key[0], "ours"), []), failed) for key, its_steps in steps.items()]
            report(f"tools-{options.shape}", rows, show=False, flags=options.flags)
    report(f"tools-{options.shape}", rows, flags=options.flags)


# ---- The model that all start from


def player(shape: str, limit: float) -> pathlib.Path:
    """Return a folder with `model`, supervised on conversations, and `questions.jsonl`. Makes it if it is not there."""
    folder = pathlib.Path(os.environ.get("BENCH_MODELS", "/tmp/bench_models")) / f"tools-{shape}"
    if (folder / "questions.jsonl").exists():
        return folder
    rows = conversations(QUESTIONS)
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer = trained_tokenizer(texts, vocab_size=384, digits_apart=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    real = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
    make_model(folder / "start", tokenizer, 0, {} if shape == "toy" else real | SHAPES[shape])
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model.path", folder / "start", "--data.path", folder / "chats.jsonl", "--run-dir", folder / "sft"]
    flags += ["--num-trainers", "1", "--overwrite", "--stop-at-loss", "0.01", "--num-steps", "500"]
    flags += ["--max-sequence-tokens", "320"]
    if shape == "toy":
        flags += ["--sequences-per-step", "16"]
    else:
        flags += ["--model.dtype", "bfloat16", "--model.attention", "documents", "--trainer.learning-rate", "3e-4"]
    command = [sys.executable, *TORCHRUN, "train_sft.py", "configs/toy_tools_sft.py", *flags]
    code = run_limited(command, RUNS / f"{shape}-sft.log", 3 * limit)
    if code != 0:
        raise SystemExit(f"the supervised start failed: {code}, see {RUNS / f'{shape}-sft.log'}")
    shutil.copytree(folder / "sft" / "model", folder / "model", dirs_exist_ok=True)
    questions = ({name: row[name] for name in ("question", "answer")} for row in rows)
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return folder


def conversations(count: int) -> list[dict[str, Any]]:
    """Write conversations about sums of two to five numbers: rows of `question`, `answer`, `messages`."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        numbers = [draw.randint(10, 99) for _ in range(draw.randint(2, 5))]
        question = "+".join(map(str, numbers))
        messages = [{"role": "user", "content": question}]
        while len(numbers) > 1:
            call = json.dumps({"name": "calculate", "arguments": {"expression": "+".join(map(str, numbers))}})
            numbers = [numbers[0] + numbers[1], *numbers[2:]]
            messages.append({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})
            messages.append({"role": "tool", "content": "+".join(map(str, numbers))})
        messages.append({"role": "assistant", "content": f"<answer>{numbers[0]}</answer>"})
        rows.append({"question": question, "answer": str(numbers[0]), "messages": messages})
    return rows


# ---- Runs


def run(method: str, wait: int, folder: pathlib.Path, name: str, options: argparse.Namespace) -> tuple[list[dict], str]:
    """Run a method once. Returns the metrics of the steps after the first two, and what went wrong ("" if nothing)."""
    run_dir = RUNS / name.replace("/", "-")
    shutil.rmtree(run_dir, ignore_errors=True)
    recipe = ["tests/bench/colocated.py", "--model.path", folder / "model", "--data.path", folder / "questions.jsonl"]
    recipe += ["--environment.tools", f"tests/bench/calculate.py:{TOOLS[wait]}", "--environment.calls", "hermes"]
    recipe += ["--reward.functions", "math_reward", "1.0", "--generator.max-completion-tokens", "320"]
    recipe += ["--trainer.learning-rate", "1e-7", "--prompts-per-step", options.prompts, "--group-size", GROUP_SIZE]
    recipe += ["--num-steps", options.steps, "--run-dir", run_dir]
    on_cpu = options.shape == "toy"
    if on_cpu:
        recipe += ["--model.dtype", "float32", "--generator.gpu-memory-utilization", "0.05"]
    kind, _, rows = method.partition("/")
    if kind == "trl":
        command = [options.trl_python, BENCH / "trl_grpo.py", *recipe, "--rows", rows or "32"]
        if on_cpu:
            command += ["--no-gradient-checkpointing", "--weights", "float32"]
    else:
        command = [sys.executable, *TORCHRUN, "train_grpo.py", *recipe, "--sync-check-interval", "1000"]
        if kind == "rounds":
            command += ["--environment.rounds"]
        if on_cpu:
            command += ["--trainer.no-compile", "--trainer.activation-checkpointing", "none"]
        command += options.flags
    log = run_dir.with_suffix(".log")
    code = run_limited(command, log, options.limit)
    out = os.environ.get("OUT")
    if out and code != 0:
        (pathlib.Path(out) / f"{log.name}").write_text(log.read_text()[-100_000:])
    lines = records(run_dir)
    steps = [line | {"completions": options.prompts * GROUP_SIZE} for line in lines if "time/step" in line]
    return steps[WARM_STEPS:], "" if code == 0 else f"{code}, see {log}"


def row(wait: int, method: str, steps: list[dict], ours: list[dict], failed: dict) -> dict[str, Any]:
    """Return the row of a method and a tool in the table."""
    cells: dict[str, Any] = {"tool, ms": wait, "method": method}
    if steps:
        seconds = [step["time/step"] for step in steps]
        turns = [step["environment/turns"] * step["completions"] for step in steps]
        cells |= {"steps": len(steps), "s/step": spread(seconds), "turns/step": spread(turns)}
        cells["turns/s"] = spread([n / s for n, s in zip(turns, seconds, strict=True)])
        cells["generate, s"] = spread([step["time/generate"] for step in steps])
        cells["reward"] = statistics.mean(step["reward/mean"] for step in steps)
        if method != "ours" and ours:
            cells["ratio"] = statistics.median(seconds) / statistics.median(step["time/step"] for step in ours)
    if (wait, method) in failed:
        cells["failed"] = failed[wait, method]
    return cells


if __name__ == "__main__":
    main()
