"""Training alone: tokens per second, MFU and peak memory of packed rows, one line for each setting.

    python tests/bench/train.py [--shapes qwen3-1.7b] [--row-tokens 4096] [--document-tokens 4096] [--rows 32]
        [--variants selective none none/32768 lora16 trl] [--ranks 1] [--steps 8] [--profile]

A variant is an activation checkpointing mode, `lora` and a rank (checkpointing none), or `trl` (SFTTrainer on the same
rows, not packed, so each must be one document; sdpa; `trl-nogc` without its gradient checkpointing, `trl-compile`, and
`/4` behind it for rows at once). Behind `/` stands trainer.micro_batch_tokens, else the default's, and behind `@`
model.attention. Each runs in a process of its own, in the order given, and twice if named twice, so that two can take
turns. The loss is that of train_sft.py, every token a label; a step is one update on `--rows` rows. The first three
steps compile.
"""

import argparse
import json
import random
import sys
import time

from speed import PEAK_TFLOPS, ROOT, checkpoint, matmul_tflops, report, run_child, spread, train_flops_per_token

WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-1.7b"])
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--document-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--variants", nargs="+", default=["selective", "none"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=int, default=200, help="seconds of one variant")
    parser.add_argument("--profile", action="store_true", help="kernels of the last step, by time")
    parser.add_argument("--name", default="train", help="of the JSON file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        shape, variant = options.child
        measure = trl_steps if variant.startswith("trl") else own_steps
        measure(shape, variant, options)
        return
    if any(name.startswith("trl") for name in options.variants) and options.document_tokens != options.row_tokens:
        parser.error("trl trains each document as a row: set --document-tokens and --row-tokens to the same")
    rows = []
    for shape in options.shapes:
        checkpoint(shape)
        for variant in options.variants:
            ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
            command = [sys.executable, *([] if variant.startswith("trl") else ranks), __file__, *sys.argv[1:]]
            name = f"{options.name}-{shape}-{variant}".replace("/", "-")
            log = ROOT / "runs" / "bench" / f"{name}.log"
            figures = run_child([*command, "--child", shape, variant], log, options.limit)
            rows.append({"shape": shape, "variant": variant, **figures})
            print(rows[-1], flush=True)
    report(options.name, rows, row_tokens=options.row_tokens, document_tokens=options.document_tokens)


def documents(num_tokens: int, length: int, seed: int = 0) -> list[list[int]]:
    """Draw random token ids: documents of one length."""
    draw = random.Random(seed)
    return [[draw.randrange(1000) for _ in range(length)] for _ in range(num_tokens // length)]


def own_steps(shape: str, variant: str, options: argparse.Namespace) -> None:
    """Print what train_sft.py's step takes, as JSON. Each rank calls it."""
    from functools import partial

    import torch

    from grpo.config import ModelConfig, TrainerConfig
    from grpo.data.batches import make_batch
    from grpo.metrics import StepMetrics
    from grpo.models.hf_folder import read_hf_config
    from grpo.roles.process_groups import close_roles, setup_trainers
    from grpo.roles.trainer import Trainer
    from grpo.types import Sample
    from train_sft import label_objective

    variant, _, attention = variant.partition("@")
    mode, _, micro_batch_tokens = variant.partition("/")
    lora_rank = int(mode.removeprefix("lora")) if mode.startswith("lora") else 0
    trainer_config = TrainerConfig(
        activation_checkpointing="none" if lora_rank else mode,
        micro_batch_tokens=int(micro_batch_tokens or TrainerConfig.micro_batch_tokens),
        lora_rank=lora_rank,
    )
    roles = setup_trainers()
    folder = str(checkpoint(shape))
    started = time.perf_counter()
    trainer = Trainer(
        ModelConfig(path=folder, attention=attention or "auto"), trainer_config, folder, options.steps, roles
    )
    samples = []
    for ids in documents(options.rows * options.row_tokens, options.document_tokens):
        mask = torch.ones(len(ids), dtype=torch.bool)
        mask[0] = False
        samples.append(Sample(torch.tensor(ids), mask))
    batch = make_batch(samples)
    denominator = float(batch.loss_mask_N.sum())
    on_gpu = roles.device.type == "cuda"
    seconds = []
    first = 0.0  # from the start to the end of the first step

    def step() -> None:
        metrics = StepMetrics(batch.num_sequences)
        trainer.forward_backward(batch, partial(label_objective, denominator=denominator), metrics)
        trainer.optimizer_step()  # waits for the device

    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        first = first or time.perf_counter() - started
    if options.profile and on_gpu:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
        if roles.is_driver:
            print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=50, max_name_column_width=90))
    close_roles(roles)  # whose warnings would come behind the result
    if roles.is_driver:
        hf = read_hf_config(folder)
        parameters = sum(p.numel() for p in trainer.model.module.parameters())
        tokens = [batch.num_tokens / s / options.ranks for s in seconds[WARM_STEPS:]]
        flops = train_flops_per_token(hf, parameters, options.document_tokens)
        print(json.dumps(summary(tokens, flops, first)), flush=True)


def trl_steps(shape: str, variant: str, options: argparse.Namespace) -> None:
    """Print what SFTTrainer's step takes on the same rows, bfloat16 weights, one GPU."""
    import os

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    started = time.perf_counter()
    mode, _, rows_at_once = variant.partition("/")
    folder = checkpoint(shape)
    num_rows = int(rows_at_once or 4)
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    rows = documents(options.rows * options.row_tokens, options.document_tokens) * options.steps
    seconds: list[float] = []
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            if on_gpu:
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - stamps[-1])

    config = SFTConfig(
        output_dir="/tmp/trl_sft",
        per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=options.rows // num_rows,
        max_length=options.row_tokens,
        learning_rate=1e-5,
        packing=False,
        bf16=True,
        use_cpu=not on_gpu,
        gradient_checkpointing="nogc" not in mode,
        torch_compile="compile" in mode,
        max_steps=options.steps,
        logging_steps=options.steps,
        report_to=[],
        save_strategy="no",
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    )
    trainer.train()
    tokens = [options.rows * options.row_tokens / s for s in seconds[WARM_STEPS:]]
    flops = train_flops_per_token(model.config, sum(p.numel() for p in model.parameters()), options.document_tokens)
    print(json.dumps(summary(tokens, flops, stamps[0] + seconds[0] - started)), flush=True)
    os._exit(0)  # its threads would keep the process for a while


def summary(tokens_per_second: list[float], flops_per_token: float, first_step: float) -> dict[str, object]:
    """Return the figures of one GPU. first_step: seconds from the start to the end of the first step."""
    import statistics

    import torch

    median = statistics.median(tokens_per_second)
    figures = {
        "tokens/s/GPU": spread(tokens_per_second),
        "MFU %": 100 * median * flops_per_token / PEAK_TFLOPS / 1e12,
        "until the first step s": first_step,
    }
    if torch.cuda.is_available():
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        figures["of measured matmul %"] = 100 * median * flops_per_token / matmul_tflops() / 1e12
    return figures


if __name__ == "__main__":
    main()
