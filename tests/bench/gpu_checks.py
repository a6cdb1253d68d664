"""What tests check on CPUs alone, on one GPU: windows, kept ids, Muon, a moving reference, LoRA; and decode steps as
graphs, which only a GPU has.

    python tests/bench/gpu_checks.py [--only trainer lora ...] [--jobs 6]

It writes tiny random models and prompts into runs/gpu_checks, where logs and runs are too, and needs no network. Each
check is a process that may take four minutes; some run side by side, because starts take most of the time. When one
ends, its numbers are printed: tokens, mean and largest differences in nats, or metrics of each step. A check that fails
shows the end of its log, and the others go on. The exit code is 1 if one failed.
"""

import argparse
import concurrent.futures
import itertools
import random
import shutil
import sys

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
    "pad_token_id": None,  # Gemma 3's would have an embedding of 0, whose gradient is 10,000 times as large
}
SHORT = 24
LONG = 200
THREE_OF_FOUR = {"layer_types": 3 * ["sliding_attention"] + ["full_attention"]}
WINDOWED = {
    "mistral": MISTRAL | {"sliding_window": SHORT},
    "mistral-long": MISTRAL | {"sliding_window": LONG},
    "gemma3": GEMMA3 | THREE_OF_FOUR | {"sliding_window": LONG, "query_pre_attn_scalar": 48, "initializer_range": 0.04},
    "olmo3": OLMO3 | THREE_OF_FOUR | {"sliding_window": SHORT},
    "smollm3": SMOLLM3 | {"no_rope_layers": [1, 1, 1, 0]},
}
WORK = ROOT / "runs" / "gpu_checks"
MODELS = WORK / "models"
# Small enough for several engines on one GPU, none of which may look at how much is free
CACHE_BYTES = 2**29
# Metrics that are printed of each step of a run
SHOWN = ("loss", "kl", "grad_norm", "mismatch/mean", "mismatch/max", "mismatch/ess", "skipped_frac")
SECONDS = 240


def grpo(model: str, flags: str, rate: str = "1e-3") -> str:
    """Return the command of a few steps. Each begins with a sync check, which can end the run."""
    return (
        "-m torch.distributed.run --standalone --nproc_per_node=1 train_grpo.py tests/bench/colocated.py "
        f"--model.path {MODELS}/{model} --data.path {MODELS}/{model}/prompts.jsonl --data.system-prompt= "
        "--data.max-prompt-tokens 320 --checkpoint.no-export --metrics.no-tensorboard "
        "--trainer.micro-batch-tokens 4096 --generator.max-completion-tokens 48 "
        "--prompts-per-step 8 --group-size 4 --sync-check-interval 1 --generator.gpu-memory-utilization 0.05 "
        f"--generator.engine enforce_eager true kv_cache_memory_bytes {CACHE_BYTES} "
        f"--trainer.learning-rate {rate} {flags}"
    )


def all_checks() -> dict[str, str]:
    """Return the commands of the checks in the order in which they start, the longest first."""
    checks = {
        "compiled_gemma3": grpo("gemma3", "--num-steps 3 --algorithm.kl-coef 0.01"),
        "compiled_mistral": grpo("mistral", "--num-steps 3"),
    }
    for name in WINDOWED:
        checks[f"trainer_{name}"] = f"tests/bench/windows.py trainer {MODELS}/{name}"
    for name, dtype in itertools.product(WINDOWED, ("float32", "bfloat16")):
        checks[f"engine_{name}_{dtype}"] = f"tests/bench/windows.py engine {MODELS}/{name} {dtype} {CACHE_BYTES}"
    plain = "--trainer.no-compile"
    moves = f"{plain} --algorithm.kl-coef 0.1 --algorithm.reference-interval 2"
    lora = f"{plain} --trainer.lora-rank 8"
    # an evaluation keeps no ids, and what samples next does
    kept = "--generator.sampling top_p 0.8 --evaluation.num-prompts 16 --evaluation.interval 1"
    return checks | {
        "graphs": grpo("qwen3", f"{plain} --num-steps 3").replace("enforce_eager true ", ""),
        "muon": grpo("qwen3", f"{plain} --num-steps 5 --trainer.optimizer muon"),
        # every second step begins with the policy as its own reference, so the KL of its only update is 0
        "reference_follows": grpo("qwen3", f"{moves} --num-steps 5"),
        # the KL grows for two steps, then half of the way is taken back
        "reference_half": grpo("qwen3", f"{moves} --num-steps 6 --algorithm.reference-mixture 0.5"),
        "lora": grpo("qwen3", f"{lora} --num-steps 4 --algorithm.kl-coef 0.05", rate="1e-2"),
        "lora_windows": grpo("olmo3", f"{lora} --num-steps 3", rate="1e-2"),
        "kept_run": grpo("qwen3", f"{plain} --num-steps 3 {kept} --evaluation.path {MODELS}/qwen3/prompts.jsonl"),
    }


def write_models() -> None:
    """Write models with a tokenizer and prompts, whose lengths are 10 to 300 tokens."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=50)) for _ in range(50)]
    tokenizer = trained_tokenizer(texts, vocab_size=1024)
    lines = []
    for number in range(64):
        question = " ".join(rng.choices(words, k=(5, 20, 40, 80)[number % 4]))
        lines.append(f'{{"question": "{question}", "answer": "1"}}\n')
    for name, changes in {**WINDOWED, "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True}}.items():
        make_model(MODELS / name, tokenizer, 0, SHAPE | changes)
        (MODELS / name / "prompts.jsonl").write_text("".join(lines))


def run_check(name: str, command: str) -> bool:
    """Run a check and print its numbers, or the end of its log. Returns whether it passed."""
    run_dir = WORK / name
    log = WORK / f"{name}.log"
    shutil.rmtree(run_dir, ignore_errors=True)  # what an earlier bench left counts for nothing
    words = command.split()
    if "train_grpo.py" in words:
        words += ["--run-dir", run_dir]
    code = run_limited([sys.executable, *words], log, SECONDS, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="4")
    lines = log.read_text().splitlines()
    shown = [f"{'ok' if code == 0 else f'FAILED ({code})'}  {name}"]
    for line in records(run_dir):
        values = [f"{metric} {line[metric]:.6g}" for metric in SHOWN if line.get(metric) is not None]
        shown.append(f"    step {line['step']}: {', '.join(values)}")
    shown += [f"    {line}" for line in lines if " tokens, mean " in line]
    if code != 0:
        shown += [f"    | {line[:300]}" for line in lines[-60:]]
    print("\n".join(shown), flush=True)
    return code == 0


def main() -> int:
    """Run the checks that the command line chooses. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--jobs", type=int, default=6, help="checks at the same time")
    options = parser.parse_args()
    checks = {name: command for name, command in all_checks().items() if name.startswith(tuple(options.only))}
    write_models()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        have_passed = list(pool.map(run_check, checks, checks.values()))
    failed = [name for name, has_passed in zip(checks, have_passed, strict=True) if not has_passed]
    print(f"{len(checks)} checks, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
