"""What tests check on CPUs alone, on one GPU: windows, kept ids, Muon, a moving reference, LoRA.

    python tests/bench/gpu_checks.py [--only windows lora ...] [--jobs 6] [--cpu] [--out FOLDER]

It writes tiny random models and prompts into runs/gpu_checks, where logs and runs are too, and needs no network. Each
check is a process with a deadline; some run side by side, because starts take most of the time. When one ends, its
numbers are printed, and written to FOLDER/gpu_checks.txt (default $OUT or runs/bench): tokens, mean and largest
differences in nats. A check that fails shows the end of its log, and the others go on. When the time of all is over,
those that run are ended and show what they have. The exit code is 1 if one failed. Without a GPU, or with --cpu, the
same runs on a CPU, one after the other, without the kernels in question: a look whether the programs work.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

import torch
from speed import ROOT, records, run_limited

sys.path.insert(0, str(ROOT))

from configs.examples.toys import make_model, trained_tokenizer
from tests.tiny_models import GEMMA3, MISTRAL, OLMO3, SMOLLM3

# Two heads of keys of width 64, which the kernels take. A block of flash and flex attention is 128 tokens long, so one
# window is shorter and one longer, and neither is a multiple.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,  # log-probs differ from token to token
}
SHORT = 24
LONG = 200
THREE_OF_FOUR = {"layer_types": 3 * ["sliding_attention"] + ["full_attention"]}
MODELS = {
    "mistral": MISTRAL | {"sliding_window": SHORT},
    "mistral-long": MISTRAL | {"sliding_window": LONG},
    "gemma3": GEMMA3 | THREE_OF_FOUR | {"sliding_window": LONG, "query_pre_attn_scalar": 48, "initializer_range": 0.04},
    "olmo3": OLMO3 | THREE_OF_FOUR | {"sliding_window": SHORT},
    "smollm3": SMOLLM3 | {"no_rope_layers": [1, 1, 1, 0]},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
}
WORK = ROOT / "runs" / "gpu_checks"
WINDOWED = [name for name in MODELS if name != "qwen3"]
SAMPLING = ({"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 20, "min_p": 0.05})
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
# Small enough for several engines on one GPU, none of which may look at how much is free
CACHE_BYTES = 2**29
DATA = "--model.path {models}/MODEL --data.path {models}/MODEL/prompts.jsonl --run-dir {work}/NAME --overwrite"
STEPS = (
    f"{DATA} --data.system-prompt= --data.max-prompt-tokens 320 --checkpoint.no-export --metrics.no-tensorboard "
    "--trainer.micro-batch-tokens 4096"
)
GRPO = (
    f"train_grpo.py tests/bench/colocated.py {STEPS} --generator.max-completion-tokens 48 --prompts-per-step 8 "
    "--group-size 4 --sync-check-interval 1 --generator.gpu-memory-utilization 0.05 "
    f"--generator.engine enforce_eager true kv_cache_memory_bytes {CACHE_BYTES}"
)
FAST = "--trainer.learning-rate 1e-3"
MUON = f"{FAST} --trainer.optimizer muon"
SFT = (
    f"train_sft.py {STEPS} {MUON} --num-trainers 1 --sequences-per-step 16 --num-steps 5 --validation.interval 0 "
    "--max-sequence-tokens 512 --completion-column completion"
)
MOVES = f"{FAST} --algorithm.kl-coef 0.1 --algorithm.reference-interval"
LORA = "--trainer.lora-rank 8 --trainer.learning-rate 1e-2"
# What samples next keeps ids, unlike an evaluation
EVALUATES = "--evaluation.path {models}/MODEL/prompts.jsonl --evaluation.num-prompts 16 --evaluation.interval 1"
# Metrics that are printed of each step of a run
SHOWN = ("loss", "kl", "grad_norm", "mismatch/mean", "mismatch/max", "mismatch/ess", "skipped_frac")
TOTAL_SECONDS = 360


@dataclass(frozen=True)
class Check:
    """A program, and the seconds that it may take on a GPU."""

    name: str
    arguments: list[str]
    is_run: bool = False
    """It leaves metrics of steps, which are shown; of other programs their own lines are."""
    seconds: int = 160
    environment: dict[str, str] = field(default_factory=dict)


def run_of(name: str, model: str, command: str, seconds: int = 160, **environment: str) -> Check:
    """Return a check of a few steps. In GRPO each begins with a sync check, which can end the run."""
    words = command.replace("MODEL", model).replace("NAME", name).split()
    return Check(name, [*TORCHRUN, *words], True, seconds, environment)


def all_checks(on_cpu: bool) -> list[Check]:
    """List the checks in the order in which they start, the longest first."""
    plain = "--trainer.no-compile"
    compiled = ""
    if on_cpu:
        plain = compiled = f"{plain} --model.dtype float32"
    checks = [
        run_of("compiled_gemma3", "gemma3", f"{GRPO} --num-steps 3 {FAST} --algorithm.kl-coef 0.01 {compiled}", 240),
        run_of("compiled_mistral", "mistral", f"{GRPO} --num-steps 3 {FAST} {compiled}", 240),
    ]
    for name in WINDOWED:
        arguments = ["tests/bench/windows.py", "trainer", f"{{models}}/{name}"]
        checks.append(Check(f"trainer_{name}", arguments, seconds=200))
    for name in WINDOWED:
        for dtype in ("float32", "bfloat16"):
            arguments = ["tests/bench/windows.py", "engine", f"{{models}}/{name}", dtype, str(CACHE_BYTES)]
            checks.append(Check(f"engine_{name}_{dtype}", arguments))
    options = json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES})
    for dtype, sampling in itertools.product(("float32", "bfloat16"), SAMPLING):
        arguments = ["tests/bench/kept_ids.py", "{models}/qwen3", dtype, json.dumps(sampling), "16", options]
        name = f"kept_{'+'.join(sampling)}_{dtype}"
        checks.append(Check(name, arguments, seconds=240))  # in float32 flex attention is compiled
    exact = "--model.dtype float32 --trainer.no-compile"
    return checks + [
        run_of("muon_sft", "qwen3", f"{SFT} {exact}"),
        run_of("muon_sft_cpu", "qwen3", f"{SFT} {exact}", CUDA_VISIBLE_DEVICES=""),  # the same numbers
        run_of("muon_grpo", "qwen3", f"{GRPO} {MUON} --num-steps 5 {plain}"),
        # every second step begins with the policy as its own reference, so the KL of its only update is 0
        run_of("reference_follows", "qwen3", f"{GRPO} --num-steps 5 {MOVES} 2 {plain}"),
        # the KL grows for two steps, then half of the way is taken back
        run_of("reference_half", "qwen3", f"{GRPO} --num-steps 6 {MOVES} 2 --algorithm.reference-mixture 0.5 {plain}"),
        run_of("lora", "qwen3", f"{GRPO} {LORA} --num-steps 4 --algorithm.kl-coef 0.05 {plain}"),
        run_of("lora_windows", "olmo3", f"{GRPO} {LORA} --num-steps 3 {plain}"),
        run_of("kept_run", "qwen3", f"{GRPO} {FAST} {EVALUATES} --generator.sampling top_p 0.8 --num-steps 3 {plain}"),
    ]


def write_models(folder: pathlib.Path) -> None:
    """Write MODELS with a tokenizer and prompts, whose lengths are 10 to 300 tokens."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=50)) for _ in range(50)]
    tokenizer = trained_tokenizer(texts, vocab_size=1024)
    lines = []
    for number in range(64):
        question = " ".join(rng.choices(words, k=(5, 20, 40, 80)[number % 4]))
        lines.append(f'{{"question": "{question}", "completion": "{words[number]}", "answer": "1"}}\n')
    for name, changes in MODELS.items():
        make_model(folder / name, tokenizer, 0, SHAPE | changes)
        (folder / name / "prompts.jsonl").write_text("".join(lines))


def main() -> int:
    """Run the checks that the command line chooses. Returns the exit code."""
    out = pathlib.Path(os.environ.get("OUT", ROOT / "runs" / "bench"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--jobs", type=int, help="checks at the same time; default 6 on a GPU, 1 on a CPU")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="after which a GPU's checks are ended")
    parser.add_argument("--out", type=pathlib.Path, default=out)
    options = parser.parse_args()
    on_cpu = options.cpu or not torch.cuda.is_available()
    threads = 4
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        threads = 1
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if not on_cpu:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # the log says what a start takes
    checks = [check for check in all_checks(on_cpu) if check.name.startswith(tuple(options.only))]
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "gpu_checks.txt", "w") as file:
        if on_cpu:
            return run_all(checks, options.jobs or 1, math.inf, file)
        return run_all(checks, options.jobs or 6, options.seconds, file)


def run_all(checks: list[Check], num_jobs: int, seconds: float, file: TextIO) -> int:
    """Run the checks within `seconds` and show each as it ends. Returns the exit code."""
    end = time.monotonic() + seconds
    models = WORK / "models"
    write_models(models)
    write(f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, torch {torch.__version__}", file)

    def run_one(check: Check) -> bool:
        words = [word.replace("{models}", str(models)).replace("{work}", str(WORK)) for word in check.arguments]
        shutil.rmtree(WORK / check.name, ignore_errors=True)  # what an earlier bench left counts for nothing
        began = time.monotonic()
        limit = min(check.seconds * (1 if seconds < math.inf else 10), end - began)
        code: int | str = "not run"
        if limit > 0:
            code = run_limited([sys.executable, *words], WORK / f"{check.name}.log", limit, **check.environment)
            show(check, code, time.monotonic() - began, file)
        return code == 0

    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        are_ok = list(pool.map(run_one, checks))
    failed = [check.name for check, is_ok in zip(checks, are_ok, strict=True) if not is_ok]
    write(f"{len(checks)} checks, failed or not run: {', '.join(failed) or 'none'}", file)
    return int(bool(failed))


def show(check: Check, code: int | str, seconds: float, file: TextIO) -> None:
    """Write the numbers of a check, and the end of its log if it failed."""
    write(f"{'ok' if code == 0 else f'FAILED ({code})'}  {check.name}, {seconds:.0f} s", file)
    lines = (WORK / f"{check.name}.log").read_text().splitlines()
    if check.is_run:
        for line in records(WORK / check.name):
            shown = [f"{name} {line[name]:.6g}" for name in SHOWN if line.get(name) is not None]
            write(f"    step {line['step']}: {', '.join(shown)}", file)
    if not check.is_run:
        for line in lines:
            if " tokens, mean " in line or line.startswith(("kept: ", "sampler: ", "flash ")):
                write(f"    {line}", file)
    if code != 0:
        # torchrun's own stack, and what libraries print at the end of a process, explain nothing
        useful = [line for line in lines if "torch/distributed/" not in line]
        useful = [line for line in useful if not line.startswith((" - ", "nanobind"))]
        for line in useful[-40:]:
            write(f"    | {line[:300]}", file)


def write(text: str, file: TextIO) -> None:
    """Write a line to the console and to the file."""
    print(text, flush=True)
    file.write(text + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
