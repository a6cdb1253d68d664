"""TRL's GRPOTrainer on a recipe of ours: the same prompts in the same order, rewards, loss, rates and numbers of steps.

    python tests/bench/trl_grpo.py [RECIPE.py] [--field value ...] [--rows 16] [--weights bfloat16]
        [--no-gradient-checkpointing] [--out FILE.jsonl] [--limit SECONDS]

A real model beside a run of ours, with the same rows, reward, sizes and rate:

    python3 tests/bench/trl_grpo.py configs/qwen2_5_coder_0_5b_gsm8k.py --model.path /root/qwen05 \\
        --data.path /root/gsm8k/train.jsonl --evaluation.path /root/gsm8k/test.jsonl --weights float32 --rows 32 \\
        --no-gradient-checkpointing --seed 0 --out $OUT/trl_0.jsonl --limit 560

vLLM is colocated (`vllm_mode="colocate"`), on one GPU, with as much of it as the recipe gives our engine. TRL's own
defaults stay where a recipe says nothing, among them its importance correction, for which it computes the log-probs of
the batch once more, and gradient checkpointing. `--rows` completions are in one forward and backward. `--weights`
float32 trains float32 weights under bfloat16 autocast, as ours are, bfloat16 the weights themselves.

Writes metrics.jsonl into the run folder, or `--out`, under our names, each line as soon as it is known, with the
seconds since the launch. A step goes from the end of the one before to its own; evaluations, greedy by the trainer's
engine, are not in it. After `--limit` seconds no further step begins; with `--saved FOLDER` TRL then saves there, and
the next launch goes on from there in the same file.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from functools import partial

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL reaches into the engine's model, so it must be in this process

import psutil
import torch
from datasets import Dataset
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import TrainerCallback
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer
from trl.generation import vllm_generation

from grpo.config import GRPOConfig
from grpo.config.recipes import load
from grpo.data.encode import Encoder
from grpo.data.prepare import encode_sources, load_eval_prompts, load_sources
from grpo.data.streams import PromptStream
from grpo.rewards.loading import load_functions
from grpo.run.policy import read_policy

DEFAULT_RECIPE = pathlib.Path(__file__).parent / "colocated.py"


def main() -> None:
    started = time.perf_counter()
    os.environ["MASTER_PORT"] = str(get_free_port())  # two of these may run at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="completions in one forward and backward")
    parser.add_argument("--weights", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=pathlib.Path, help="default: metrics.jsonl in the run folder")
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--saved", type=pathlib.Path, help="save at the limit and go on from here")
    options, rest = parser.parse_known_args()
    config = load(GRPOConfig, str(DEFAULT_RECIPE), rest)
    policy = read_policy(config)
    folder = policy.folder
    tokenizer = policy.tokenizer
    encoder = Encoder(tokenizer, config.data, config.data.max_prompt_tokens)
    rows = encode_sources(load_sources(config.data), encoder)
    stream = PromptStream(rows, config.data, config.seed)
    prompts = stream.draw(config.num_steps * config.prompts_per_step)
    functions = load_functions(config.reward, config.data.reward_columns, config.generator.max_completion_tokens)
    rows = [as_row(prompt, tokenizer) for prompt in prompts]
    log = Log(config, tokenizer, functions, [row["prompt"] for row in rows], [len(p.ids) for p in prompts], started)
    log.open(options.out, options.limit, options.saved)
    # TRL leaves the type to vLLM, which makes bfloat16 of float32
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype=config.model.dtype)
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=log.reward,
        args=trl_config(config, options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[log],
    )
    log.trainer = trainer
    trainer._generate = log.timed(trainer._generate)
    saved = sorted(options.saved.glob("checkpoint-*"), key=os.path.getmtime) if options.saved else []
    trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would keep the process for a while


def trl_config(config: GRPOConfig, options: argparse.Namespace) -> TRLConfig:
    """Write the recipe in TRL's words."""
    trainer = config.trainer
    return TRLConfig(
        output_dir=str(options.saved or f"{config.run_dir}/trl"),
        model_init_kwargs={"dtype": options.weights},
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=config.completions_per_step // options.rows,
        num_generations=config.group_size,
        max_completion_length=config.generator.max_completion_tokens,
        temperature=config.generator.temperature[0],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=config.generator.gpu_memory_utilization,
        vllm_max_model_length=config.max_sequence_tokens,
        beta=0.0,
        loss_type="grpo",
        epsilon=config.algorithm.resolved.clip_low,
        epsilon_high=config.algorithm.resolved.clip_high,
        learning_rate=trainer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=trainer.warmup_steps,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=config.model.dtype == "bfloat16",
        shuffle_dataset=False,
        max_steps=config.num_steps,
        seed=config.seed,
        logging_steps=config.num_steps,
        report_to=[],
        save_strategy="no",
    )


def as_row(prompt, tokenizer) -> dict[str, object]:
    """Return a prompt as TRL reads it: a text, which it tokenizes itself. Raises RuntimeError if its tokens differ."""
    text = tokenizer.decode(prompt.ids)
    if tokenizer(text)["input_ids"] != prompt.ids:
        raise RuntimeError(f"TRL would read other tokens than ours in {text!r}")
    return {**prompt.columns, "prompt": text}


class Log(TrainerCallback):
    """Metrics of TRL's run: it scores completions, times steps, evaluates in between, and writes metrics.jsonl."""

    def __init__(
        self, config: GRPOConfig, tokenizer, functions, prompts: list, num_prompt_tokens: list[int], started: float
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.functions = functions
        self.started = started
        self.prompts = prompts  # of the whole run
        self.num_prompt_tokens = num_prompt_tokens
        self.held_out = []
        if config.evaluation.interval:
            encoder = Encoder(tokenizer, config.data, config.data.max_prompt_tokens)
            self.held_out = load_eval_prompts(config.evaluation, encoder)
        self.last_evaluated = -1
        self.launched = psutil.Process().create_time()
        self.trainer: GRPOTrainer | None = None
        self.rewards: list[float] = []
        self.num_tokens: list[int] = []
        self.last_end = 0.0
        self.generating = 0.0

    def open(self, out: pathlib.Path | None, limit: float, saved: pathlib.Path | None) -> None:
        """Begin the file, or go on with it. The arguments are those of the docstring of the file."""
        self.limit = limit
        self.saved = saved
        self.file = out or pathlib.Path(self.config.run_dir) / "metrics.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not saved or not saved.exists():
            self.file.write_text("")

    def reward(self, prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        """Score as the recipe does; TRL's reward function. Raises RuntimeError for prompts that are not ours."""
        first = trainer_state.global_step * self.config.prompts_per_step
        ours = [i for i in range(first, first + self.config.prompts_per_step) for _ in range(self.config.group_size)]
        if prompts != [self.prompts[i] for i in ours]:
            raise RuntimeError(f"TRL's step {trainer_state.global_step} has other prompts than ours, or another order")
        rewards = self.score(completions, [len(ids) for ids in completion_ids], columns)
        self.rewards += rewards
        self.num_tokens += [self.num_prompt_tokens[i] + len(c) for i, c in zip(ours, completion_ids, strict=True)]
        return rewards

    def timed(self, generate):
        """Wrap `generate` so that its seconds are logged."""

        def run(*arguments):
            started = time.perf_counter()
            generated = generate(*arguments)
            self.generating += time.perf_counter() - started
            return generated

        return run

    def score(self, texts: list[str], lengths: list[int], columns: dict[str, list]) -> list[float]:
        """Return the recipe's weighted sum of rewards of each completion; lengths: tokens."""
        limit = self.config.generator.max_completion_tokens
        extra = {"num_tokens": lengths, "truncated": [length >= limit for length in lengths]}
        weights = self.config.reward.functions
        values = [[weights[name] * v for v in f(texts, **columns, **extra)] for name, f in self.functions.items()]
        return [sum(parts) for parts in zip(*values, strict=True)]

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.evaluate(0)
        self.write(step=state.global_step, **{"time/startup": time.perf_counter() - self.started})
        self.last_end = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self.last_end
        figures = {"time/step": seconds, "tokens_per_second": sum(self.num_tokens) / seconds}
        figures |= {"time/generate": self.generating, "reward/mean": statistics.mean(self.rewards)}
        self.write(step=state.global_step, **figures)
        self.rewards = []
        self.num_tokens = []
        self.generating = 0.0
        interval = self.config.evaluation.interval
        if interval and (state.global_step % interval == 0 or state.global_step == args.max_steps):
            self.evaluate(state.global_step)
        if self.seconds > self.limit:
            control.should_training_stop = True
            control.should_save = self.saved is not None
        self.last_end = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        if self.last_evaluated != state.global_step:
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Log what the weights after `step` steps do on held-out prompts, if there are any."""
        if self.held_out:
            self.write(step=step, **self.greedy_metrics(self.held_out))
            self.last_evaluated = step

    def greedy_metrics(self, prompts: list) -> dict[str, float]:
        """Return accuracy and length of the present weights' greedy completions."""
        ids = self.greedy([prompt.ids for prompt in prompts])
        lengths = [len(completion) for completion in ids]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        columns = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
        passed = [reward >= 1 for reward in self.score(texts, lengths, columns)]
        return {"eval/accuracy": statistics.mean(passed), "eval/completion_length_mean": statistics.mean(lengths)}

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """Complete prompts greedily by the present weights."""
        limit = self.config.generator.max_completion_tokens
        from vllm import SamplingParams

        self.trainer.vllm_generation.sync_weights()
        params = SamplingParams(temperature=0.0, max_tokens=limit)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.trainer.vllm_generation.llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def write(self, **figures: float | str) -> None:
        """Add a line to the file, with the seconds since the launch."""
        with open(self.file, "a") as file:
            file.write(json.dumps({**figures, "seconds": round(self.seconds, 1)}) + "\n")

    @property
    def seconds(self) -> float:
        """Seconds since the launch, imports included."""
        return time.time() - self.launched


if __name__ == "__main__":
    main()
