"""Ratios of trainer to generator of the same completions, over the ids that were kept and over all ids.

    python tests/bench/kept_ids.py FOLDER float32 '{"top_p": 0.8}' [NUM_PROMPTS] [ENGINE as JSON]

Samples 4 completions of at most 64 tokens for each prompt (16 sums in the model's chat template) at temperature 1 with
our generator, and computes their log-probs with our trainer. Prints the mean ratio, the share of tokens whose ratio is
off by more than a tenth, the largest difference in nats, how many ids were kept for a token, and vLLM's sampler. The
trainer's attention is the plain one, and then the one that a run takes here, which may have to be compiled. The exit
code is 1 if a mean over the kept ids is above what a sync check allows.
"""

import dataclasses
import json
import sys

from transformers import AutoTokenizer

from grpo.config import DataConfig, GeneratorConfig, ModelConfig, RolesConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.models.attention import choose_attention
from grpo.roles.engine.generator import Generator
from grpo.roles.process_groups import close_roles, setup_roles
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import largest_mismatch
from grpo.types import Prompt, Requests

GROUP_SIZE = 4


def main(folder: str, dtype: str, sampling: str, num_prompts: str = "16", engine: str = "{}") -> None:
    """Sample, compute the log-probs once more, and print the ratios. The arguments are those of the command line."""
    roles = setup_roles(RolesConfig(colocated=True, num_trainers=1))
    config = GeneratorConfig(
        max_completion_tokens=64,
        sampling=json.loads(sampling),
        gpu_memory_utilization=0.05,  # vLLM asks whether so much is free
        engine={"max_num_seqs": 64} | json.loads(engine),
    )
    model = ModelConfig(path=folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = DataConfig(max_prompt_tokens=128)
    generator = Generator(config, model, data, 0, folder, [tokenizer.eos_token_id], roles)
    print(f"sampler: {type(generator.loop.sampled_tokens.sampler).__module__}", flush=True)
    prompts = []
    for index in range(int(num_prompts)):
        question = [{"role": "user", "content": f"What is {17 * index + 12} + {29 * index + 31}? Explain it."}]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(index, tokenizer(text)["input_ids"]))
    batch = make_batch(generator.generate(Requests.of(prompts, GROUP_SIZE)))
    counts_N = batch.loss_mask_N
    if batch.kept_C is not None:
        num_kept_N = batch.token_C[batch.kept_C >= 0].bincount(minlength=batch.num_tokens)[counts_N].double()
        size = 4 * len(batch.kept_C) / int(counts_N.sum())
        print(
            f"kept: mean {num_kept_N.mean():.1f}, largest {num_kept_N.max():.0f}, {size:.0f} bytes a token", flush=True
        )
    means = []
    for attention in dict.fromkeys(["documents", choose_attention(model, roles.device)]):
        trainer = Trainer(
            dataclasses.replace(model, attention=attention), TrainerConfig(compile=False), folder, 1, roles
        )
        for name, measured in {"kept ids": batch, "all ids": dataclasses.replace(batch, kept_C=None)}.items():
            difference_N = (trainer.logprobs(measured) - batch.generator_logprobs_N)[counts_N]
            ratio_N = difference_N.exp()
            label = f"{sampling} {dtype} {attention}, {name}"
            off = ((ratio_N - 1).abs() > 0.1).double().mean()
            print(
                f"{label}: {len(ratio_N)} tokens, mean ratio {ratio_N.mean():.4f}, off by a tenth {off:.4f}, "
                f"largest {difference_N.abs().max():.1e} nats, mean {difference_N.abs().mean():.1e}",
                flush=True,
            )
            if measured is batch:
                means.append(difference_N.abs().mean().item())
    close_roles(roles, generator.close)
    sys.exit(not max(means) < largest_mismatch(dtype, roles.device))  # NaN is no agreement


if __name__ == "__main__":
    main(*sys.argv[1:])
