"""Checks of Qwen3.5 that need a GPU: trainer and vLLM in bfloat16, the sync in place, whole runs, memory and speed.

    python tests/bench/qwen3_5.py [--out runs/bench/qwen3_5] [--parts agreement grpo images train] [--limit 570]

The models are random and written here; nothing is read from a network. Each part is a process of its own, prints its
lines as they come, and ends at its limit; what it says is in OUT/PART.log (of whole runs in OUT/PART-run.log), and all
numbers are in OUT/results.jsonl. vLLM's kernels for prompts are not tuned here, and its layers not compiled
(qwen3_5_recipe.py).

agreement: log-probs of the same completions by trainer and engine, before and after three updates, each of which is
synced into the live engine; beside them what two runs of the engine differ by, and both beside transformers in float32
on the same bfloat16 weights. grpo: four steps with a sync check in each and an engine that sleeps, then the export by
transformers. images: two steps from a folder as on the hub, with a vision encoder and a draft layer, which the export
must carry along bit by bit. train: forwards and backwards in the shape of Qwen3.5-0.8B, beside the arithmetic of
`--dry-run`. A part fails if a stale engine passes the sync check, an export lacks or changes what it should carry, a
way to train fails, or its first gradient's norm is not that of the others.
"""

import argparse
import dataclasses
import faulthandler
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import torch
from speed import ROOT, end, launch, run_limited
from toy_runs import records

sys.path.insert(0, str(ROOT))

from configs.examples.toys import addition_tokenizer  # noqa: E402
from grpo.data.toy import make_model  # noqa: E402
from tests.tiny_models import make_image_model  # noqa: E402

ON_GPU = torch.cuda.is_available()
# Seconds that each part may take of the usual limit, and of another one in proportion
PARTS = {"agreement": 150, "grpo": 150, "images": 120, "train": 150}
USUAL_LIMIT = 570
# Of an engine's cache, which so does not depend on what other programs hold of the GPU
CACHE_BYTES = 2**30
TINY = {
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
# Shape of Qwen3.5-0.8B
SHAPE = TINY | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
# The last two fill chunks and leave a rest; tokens that the addition tokenizer has
PROMPTS = [[5, 9, 12, 7], [13], [3 + i * i % 29 for i in range(140)], [3 + i * 7 % 29 for i in range(300)]]
GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", "runs/bench/qwen3_5")))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--limit", type=float, default=USUAL_LIMIT, help="seconds of all parts together")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        {"agreement": agreement, "grpo": grpo, "images": images, "train": train}[options.child](options.out)
        return
    end = time.monotonic() + options.limit
    outcomes = []
    for part in options.parts:
        seconds = min(PARTS[part] * options.limit / USUAL_LIMIT, end - time.monotonic())
        started = time.monotonic()
        outcome = run_part(part, seconds, options) if seconds > 10 else "no time left"
        print(f"{part}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
        outcomes.append(outcome)
    sys.exit(any(outcome != "exit code 0" for outcome in outcomes))


def run_part(part: str, seconds: float, options: argparse.Namespace) -> str:
    """Run a part with its output in a file, and print the end of that if it failed. Returns how it ended."""
    log = options.out / f"{part}.log"
    command = [sys.executable, __file__, "--out", options.out, "--child", part]
    # lines of vLLM's log say what a start takes
    environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    child = launch(command, log, **environment)
    try:
        outcome = f"exit code {child.wait(seconds)}"
    except subprocess.TimeoutExpired:
        outcome = f"ended at its limit of {seconds:.0f} s"
    finally:
        end(child)
    if outcome != "exit code 0":
        for file in (log, options.out / f"{part}-run.log"):
            lines = file.read_text().splitlines() if file.exists() else []
            print("\n".join(line[:300] for line in lines[-25:]), flush=True)
    return outcome


def say(out: pathlib.Path, part: str, **numbers: Any) -> None:
    """Add a line to the results, and print it where the part's log is."""
    line = json.dumps({"part": part} | numbers)
    print(line, flush=True)
    with open(out / "results.jsonl", "a") as file:
        file.write(line + "\n")


def tiny(out: pathlib.Path, name: str, **changes: Any) -> str:
    """Write a tiny model, if it is not there yet, and return its folder.

    transformers begins the embedding of the padding token at 0, where the gradient of each norm is a thousandfold.
    """
    from safetensors.torch import load_file, save_file

    folder = out / name
    if not (folder / "config.json").is_file():
        make_model(folder, addition_tokenizer(), 0, TINY | changes)
        tensors = load_file(folder / "model.safetensors")
        embedding = tensors["model.embed_tokens.weight"]
        embedding[0] = embedding[-1].flip(0)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Trainer and engine in one process


def agreement(out: pathlib.Path) -> None:
    """Compare log-probs, update, see that the engine is stale, sync, and compare again."""
    import qwen3_5_recipe  # noqa: F401  (first, because it changes what vLLM imports)

    from grpo.metrics import StepMetrics
    from grpo.roles.engine.generator import Generator
    from grpo.roles.process_groups import close_roles, setup_roles
    from grpo.roles.trainer import Trainer
    from grpo.roles.weight_sync import check_sync, sync_weights
    from grpo.types import Prompt
    from train_grpo import grpo_objective

    faulthandler.dump_traceback_later(30, repeat=True)  # to the log, where a start that takes long is
    folder = tiny(out, "text")
    config = tiny_config(folder)
    roles = setup_roles(config.roles)
    started = time.monotonic()
    generator = Generator(config.generator, config.model, config.data, config.seed, folder, [1], roles)
    say(out, "agreement", engine_started_s=round(time.monotonic() - started, 1), engine=describe(generator))
    faulthandler.cancel_dump_traceback_later()
    trainer = Trainer(config.model, config.trainer, folder, 3, roles)
    prompts = [Prompt(index=index, ids=ids) for index, ids in enumerate(PROMPTS)]
    num_unnoticed = 0
    for version in range(4):
        batch, pairs = sample(generator, prompts)
        facts = {"version": version, "tokens": int(batch.loss_mask_N.sum())}
        facts["two runs of vLLM"] = summary(torch.cat(pairs))
        trainer_N = trainer.logprobs(batch)
        facts["trainer - vLLM"] = summary((trainer_N - batch.generator_logprobs_N)[batch.loss_mask_N])
        if version == 0:
            exact_N = exact_logprobs(folder, batch, roles.device)
            facts["trainer - float32"] = summary((trainer_N - exact_N)[batch.loss_mask_N])
            facts["vLLM - float32"] = summary((batch.generator_logprobs_N - exact_N)[batch.loss_mask_N])
        check_sync(prompts, trainer, generator, config.model.dtype, roles)
        facts["sync check"] = "passed"
        say(out, "agreement", **facts)
        if version == 3:
            break
        advantages_S = torch.linspace(-1, 1, batch.num_sequences)
        batch = dataclasses.replace(batch, advantages_N=advantages_S[batch.owner_N])
        metrics = StepMetrics(batch.num_sequences)
        trainer.forward_backward(batch, grpo_objective(config, batch, 0.0, True), metrics)
        updated = trainer.optimizer_step()
        stale = summary((trainer.logprobs(batch) - batch.generator_logprobs_N)[batch.loss_mask_N])
        refused = False
        try:
            check_sync(prompts, trainer, generator, config.model.dtype, roles)
        except RuntimeError:
            refused = True
        num_unnoticed += not refused
        started = time.monotonic()
        sync_weights(trainer, generator, version + 1, roles)
        seconds = round(time.monotonic() - started, 2)
        facts = {"stale": stale, "check refuses stale": refused, "sync_s": seconds, "grad_norm": updated["grad_norm"]}
        say(out, "agreement", update=version + 1, **facts, dtypes=dtypes(generator))
    close_roles(roles, generator.close)
    if num_unnoticed:
        raise SystemExit(f"agreement: {num_unnoticed} of 3 stale engines passed the sync check")


def tiny_config(folder: str):
    """Return the config of the first part."""
    from grpo.config import DataConfig, GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig, TrainerConfig

    return GRPOConfig(
        model=ModelConfig(path=folder, dtype="bfloat16"),
        roles=RolesConfig(colocated=True, num_trainers=1),
        data=DataConfig(max_prompt_tokens=304),
        generator=GeneratorConfig(
            max_completion_tokens=96,
            gpu_memory_utilization=0.1,
            # the second part has graphs
            engine={"max_num_seqs": 64, "enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES},
            sampling={"ignore_eos": True},
        ),
        trainer=TrainerConfig(
            micro_batch_tokens=4096, learning_rate=0.01, activation_checkpointing="selective", compile=False
        ),
        prompts_per_step=len(PROMPTS),
        group_size=GROUP_SIZE,
    )


def sample(generator, prompts):
    """Complete each prompt twice. Returns a batch, and for each completion the differences, as far as its ids agree."""
    from grpo.data.batches import make_batch, sample_of
    from grpo.types import Requests

    together = generator.generate(Requests(prompts), GROUP_SIZE)
    generator.forget_prefixes()
    apart = [completion for prompt in prompts for completion in generator.generate(Requests([prompt]), GROUP_SIZE)]
    repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    differences = []
    for first, second in zip(together, apart, strict=True):
        length = min(first.num_tokens, second.num_tokens)
        num_same = (first.ids_T[:length] == second.ids_T[:length]).long().cumprod(0).sum()
        differences.append((first.logprobs_T[:num_same] - second.logprobs_T[:num_same]).abs())
    samples = [sample_of(prompt, completion) for prompt, completion in zip(repeated, together, strict=True)]
    return make_batch(samples), differences


def exact_logprobs(folder: str, batch, device: torch.device) -> torch.Tensor:
    """Compute log-probs [N] by transformers in float32, with the weights rounded to bfloat16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().to(device)
    logprobs = []
    with torch.no_grad():
        for ids in batch.ids_N.split(batch.lengths_S.tolist()):
            ids = ids.to(device)
            log_p_TV = model(ids[None]).logits[0, :-1].log_softmax(-1)
            logprobs += [torch.zeros(1), log_p_TV.gather(1, ids[1:, None])[:, 0].cpu()]
    return torch.cat(logprobs)


def summary(difference_M: torch.Tensor) -> dict[str, float]:
    """Return mean, 99th percentile and largest of the absolute differences, nats."""
    values = difference_M.abs().float()
    parts = {"mean": values.mean(), "p99": values.quantile(0.99), "max": values.max()}
    return {name: float(f"{value:.3g}") for name, value in parts.items()}


def describe(generator) -> dict[str, Any]:
    """Return what the engine chose."""
    config = generator.llm.llm_engine.vllm_config
    cache = config.cache_config
    return {
        "architecture": config.model_config.architecture,
        "block_size": cache.block_size,
        "states": str(cache.mamba_ssm_cache_dtype),
        "graphs": str(config.compilation_config.cudagraph_mode),
    }


def dtypes(generator) -> dict[str, str]:
    """Return the dtypes in which the live engine holds the parts of its first delta net."""
    (model,) = generator.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    held = {name.rpartition("linear_attn.")[2]: str(part.dtype) for name, part in model.named_parameters()}
    return {name: held[name] for name in ("A_log", "dt_bias", "norm.weight", "conv1d.weight") if name in held}


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def run_grpo(out: pathlib.Path, part: str, folder: str, steps: int, *flags: str) -> pathlib.Path:
    """Run train_grpo.py on one rank and print the metrics of its steps. Returns its exported model.

    flags: more of the engine's options, then flags of other fields.
    """
    run_dir = out / f"{part}-run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train_grpo.py"]
    command += [
        "tests/bench/qwen3_5_recipe.py",
        "--roles.colocated",
        "--roles.num-trainers",
        "1",
        "--roles.num-references",
        "0",
    ]
    command += ["--model.path", folder, "--model.dtype", "bfloat16", "--run-dir", str(run_dir), "--overwrite"]
    command += ["--num-steps", str(steps), "--generator.gpu-memory-utilization", "0.1", "--algorithm.kl-coef", "0"]
    command += ["--deadline-minutes", "10", "--generator.engine", "kv_cache_memory_bytes", str(CACHE_BYTES)]
    try:
        code = run_limited([*command, *flags], run_dir.with_suffix(".log"), limit=None)
    finally:  # also if this part's time is over
        names = ("loss", "grad_norm", "mismatch/mean", "mismatch/max", "time/step", "time/sync")
        for metrics in records(run_dir):
            say(out, part, step=metrics["step"], **{name: metrics[name] for name in names if name in metrics})
    if code:
        raise SystemExit(f"{part}: the run's exit code is {code}")
    return run_dir / "model"


def grpo(out: pathlib.Path) -> None:
    """Take four steps, and compare the export with the start. transformers should load it without a complaint."""
    start = tiny(out, "text")
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 16]}
    exported = run_grpo(out, "grpo", start, 4, "compilation_config", json.dumps(graphs), "--generator.sleep")
    compare_export(out, "grpo", start, exported)


def images(out: pathlib.Path) -> None:
    """Take two steps from a folder of a model that sees images, without compiled graphs in the engine."""
    start = str(out / "images")
    make_image_model(out / "images", TINY)
    exported = run_grpo(out, "images", start, 2, "enforce_eager", "true")
    compare_export(out, "images", start, exported)


def compare_export(out: pathlib.Path, part: str, start: str, exported: pathlib.Path) -> None:
    """Print how many tensors an export has carried along, trained or lost, and what transformers says of it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    before = load_file(f"{start}/model.safetensors")
    after = load_file(exported / "model.safetensors")
    carried = [name for name in before if name.startswith(("model.visual.", "mtp."))]
    kept = [name for name in carried if name in after and before[name].dtype == after[name].dtype]
    same = sum(torch.equal(before[name], after[name]) for name in kept)
    trained = [name for name in before if name not in carried]
    moved = sum(not torch.equal(before[name].to(after[name].dtype), after[name]) for name in trained if name in after)
    _, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    facts = {"carried": f"{same} of {len(carried)}", "trained": f"{moved} of {len(trained)}"}
    facts["lost"] = len(before.keys() - after.keys())
    facts["loading"] = {name: len(tensors) for name, tensors in report.items()}
    say(out, part, **facts)
    if same < len(carried) or not moved or facts["lost"] or facts["loading"]["missing_keys"]:
        raise SystemExit(f"{part}: the export is not what it should be")


# ---------------------------------------------------------------------------------------------------------------------
# Training in a real shape


def train(out: pathlib.Path) -> None:
    """Time forwards and backwards of rows of 16,384 tokens, and compare their memory with the arithmetic."""
    from grpo.config import ModelConfig, SFTConfig, TrainerConfig
    from grpo.data.batches import make_batch
    from grpo.models.hf_folder import read_hf_config
    from grpo.roles.process_groups import setup_trainers
    from grpo.roles.trainer import Trainer
    from grpo.run import machine
    from grpo.types import Sample

    shape = SHAPE
    num_tokens = 16_384
    if not ON_GPU:
        shape = SHAPE | {"num_hidden_layers": 4, "vocab_size": 2048}
        num_tokens = 1024
    tokenizer = addition_tokenizer()
    folder = out / "shape"
    if not (folder / "config.json").is_file():
        with torch.device("cuda" if ON_GPU else "cpu"):
            make_model(folder, tokenizer, 0, shape | {"dtype": "bfloat16"})
    roles = setup_trainers()
    hf = read_hf_config(str(folder))
    draw = torch.Generator().manual_seed(0)
    lengths = [num_tokens // 8] * 4 + [num_tokens // 32] * 16  # one long row
    ids = [torch.randint(3, 32, (length,), generator=draw) for length in lengths]
    batch = make_batch([Sample(row, torch.arange(len(row)) > 0, prompt_tokens=1) for row in ids])
    norms = []  # of each case's first gradient
    cases = [("full", "auto"), ("selective", "auto"), ("none", "auto"), ("full", "flex"), ("full, compiled", "flex")]
    for case, attention in cases:
        checkpointing, _, compiled = case.partition(", ")
        if compiled:
            compile_parts()
        trainer = TrainerConfig(micro_batch_tokens=num_tokens, activation_checkpointing=checkpointing)
        kind = ModelConfig(path=str(folder), dtype="bfloat16", attention=attention if ON_GPU else "auto")
        config = SFTConfig(model=kind, trainer=trainer, num_trainers=1)
        model = Trainer(config.model, trainer, str(folder), 10, roles)
        attention = type(model.model.module.layers["3"].attention.inner_attention).__name__
        facts = {"checkpointing": case, "attention": attention}
        seconds = []
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(4):
                started = time.monotonic()
                model.forward_backward(batch, negative_logprobs, NoMetrics())
                updated = model.optimizer_step()
                seconds.append(time.monotonic() - started)
                facts.setdefault("first_grad_norm", updated["grad_norm"])
        except Exception as error:  # a kernel that does not take these heads, or too little memory
            say(out, "train", **facts, failed=f"{type(error).__name__}: {str(error)[:300]}")
        else:
            peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0
            expected = machine.trainer_gib(machine.sizes_of(hf), config)
            facts |= {"peak_gib": round(peak, 2), "expected_gib": round(sum(expected.values()), 2)}
            facts["parts"] = {name: round(gib, 2) for name, gib in expected.items()}
            facts["tokens_per_s"] = round(num_tokens / sorted(seconds[1:])[1])
            say(out, "train", **facts)
            norms.append(facts["first_grad_norm"])
        del model
        if ON_GPU:
            torch.cuda.empty_cache()
    if len(norms) < len(cases) or not max(norms) < 1.05 * min(norms):
        raise SystemExit(f"train: of {len(cases)} cases {len(norms)} ran; norms of their first gradients: {norms}")


def compile_parts() -> None:
    """Compile what a gated delta net computes around its loop over chunks."""
    from grpo.models import delta_net

    delta_net.within_chunks = torch.compile(delta_net.within_chunks, dynamic=True)
    delta_net.GatedDeltaNet.rule_inputs = torch.compile(delta_net.GatedDeltaNet.rule_inputs, dynamic=True)


class NoMetrics:
    """Metrics that nobody reads."""

    def add(self, *values: Any) -> None:
        pass

    def record(self, **values: Any) -> None:
        pass

    def reduce(self, group: Any) -> None:
        pass


def negative_logprobs(micro, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor):
    """Return the loss of supervised training, and no metrics."""
    loss_BT = -logprobs_BT / micro.num_loss_tokens_BT
    return loss_BT.where(micro.loss_mask_BT, 0).sum(), {}


if __name__ == "__main__":
    main()
