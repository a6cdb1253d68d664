"""Log-probs of a model on this machine: the trainer's against transformers', and against vLLM's after a weight sync.

    python tests/bench/windows.py trainer FOLDER
    python tests/bench/windows.py engine FOLDER bfloat16 [BYTES of KV cache]

Sequences are longer than the windows of the models that gpu_checks.py makes; they are packed in rows and share prompts.
`trainer` compares every kind of attention that runs here, `engine` one that is not compiled. A line has the number of
tokens, and mean and largest difference of the log-probs in nats. `trainer` compares gradients too, by norm: the worst
tensor's difference over its size. Two lines show what would be seen: transformers with a window that is one token
shorter, and an engine that misses an update.
The exit code is 1 if another mean is above what a sync check allows, a gradient is off by more than a fifth, or a
second backward gives other gradients, if only by a bit.
"""

import pathlib
import sys
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from grpo.config import DataConfig, GeneratorConfig, ModelConfig, RolesConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models.attention import choose_attention
from grpo.models.build import ShardedModel, build_model
from grpo.models.experts import local_part
from grpo.models.export import hf_tensors
from grpo.roles.engine.generator import Generator
from grpo.roles.process_groups import close_roles, setup_roles, setup_trainers
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import largest_mismatch, sync_weights
from grpo.types import Prompt, Requests, TrainBatch
from tests.dist.programs.parity import original_values, random_batch, sharded_values
from tests.tiny_models import tensors_of

TIMES = 12  # on the lengths of parity.py: 36 to 600 tokens
PROMPT_LENGTHS = (5, 30, 150, 230, 470)
MAX_PROMPT_TOKENS = 512
COMPLETION_TOKENS = 64
GROUP_SIZE = 4
LEARNING_RATE = 0.01  # of one AdamW update, which moves each weight by about this much
# Kind of attention, dtype, whether prompts are shared. Flex comes last, because it compiles for minutes.
VARIANTS = (
    ("flash", "bfloat16", True),
    ("flash", "bfloat16", False),
    ("documents", "float32", True),
    ("flex", "float32", True),
    ("flex", "float32", False),
)
LARGEST_GRADIENT_ERROR = 0.2
TRAINER = TrainerConfig(
    micro_batch_tokens=2048,
    logprob_chunk_tokens=512,
    activation_checkpointing="none",
    compile=False,
    learning_rate=LEARNING_RATE,
)


def main(what: str, *arguments: str) -> None:
    compare = {"engine": compare_with_engine, "trainer": compare_with_transformers}[what]
    sys.exit(not compare(*arguments))


def runs_here(kind: str, dtype: str, device: torch.device) -> bool:
    """Say whether a kind of attention runs with a backward, which flex lacks on a CPU; print why flash does not."""
    if device.type == "cpu":
        return kind == "documents"
    try:
        choose_attention(ModelConfig(attention=kind, dtype=dtype), device)
    except ValueError as error:
        print(f"{kind} does not run here: {error}", flush=True)
        return False
    return True


def compare_with_transformers(folder: str) -> bool:
    """Print differences of values and gradients to transformers in float32. Returns whether all are small."""
    roles = setup_trainers()
    original = load_original(folder, roles.device)
    batch, weights_2N = random_batch(original.config.vocab_size, TIMES)
    weights_2N = weights_2N.to(roles.device)
    expected_2N = original_values(original, batch)
    (expected_2N * weights_2N).sum().backward()
    expected_2N = expected_2N.detach()
    gradients = tensors_of(original, gradients=True)
    name = folder.rpartition("/")[2]
    window = getattr(AutoConfig.from_pretrained(folder), "sliding_window", None)
    if window:
        shorter = load_original(folder, roles.device, sliding_window=window - 1)
        with torch.no_grad():
            changed_2N = original_values(shorter, batch)
        print_difference(f"{name}, a window of {window - 1} instead of {window}", changed_2N - expected_2N, batch)
    is_close = True
    for kind, dtype, shares in VARIANTS:
        if not runs_here(kind, dtype, roles.device):
            continue
        trainer = replace(TRAINER, share_prompts=shares)
        model = build_model(
            ModelConfig(attention=kind, dtype=dtype), trainer, folder, device=roles.device, tensor_parallel=1
        )
        got_2N = sharded_values(model, batch, weights_2N)
        first = gradients_of(model)
        model.module.zero_grad()
        sharded_values(model, batch, weights_2N)
        repeats = all(map(torch.equal, first, gradients_of(model)))
        with torch.no_grad():  # so that gradients come out under HF names as weights do
            for parameter in model.module.parameters():
                parameter.copy_(parameter.grad)
        errors = {}
        for tensor, gradient in hf_tensors(model, torch.float32):
            exact = gradients[tensor]
            errors[tensor] = ((gradient - exact).norm() / exact.norm()).item()
        worst = max(errors, key=errors.get)
        prompts = "shared" if shares else "repeated"
        label = f"{name}, {kind} {dtype}, {prompts} prompts"
        more = f", gradients {errors[worst]:.1e} ({worst}), {'the same' if repeats else 'OTHERS'} again"
        mean = print_difference(label, got_2N - expected_2N, batch, more)
        is_close &= mean < largest_mismatch(dtype, roles.device) and errors[worst] < LARGEST_GRADIENT_ERROR and repeats
    close_roles(roles)
    return is_close


def gradients_of(model: ShardedModel) -> list[torch.Tensor]:
    """Copy this rank's part of all gradients."""
    return [local_part(parameter.grad).clone() for parameter in model.module.parameters()]


def load_original(folder: str, device: torch.device, **changes: object) -> PreTrainedModel:
    """Transformers' model in float32, with changes to its config."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes).to(device)


def compare_with_engine(folder: str, dtype: str, cache_bytes: str = "67108864") -> bool:
    """Print differences to vLLM with the first weights, with an update that only the trainer has, and with both.

    Returns whether the first and the last are small.
    """
    roles = setup_roles(RolesConfig(colocated=True, num_trainers=1))
    config = GeneratorConfig(
        max_completion_tokens=COMPLETION_TOKENS,
        gpu_memory_utilization=0.1,
        engine={"max_num_seqs": 32, "kv_cache_memory_bytes": int(cache_bytes), "enforce_eager": True},
    )
    model = ModelConfig(path=folder, dtype=dtype)
    generator = Generator(config, model, DataConfig(max_prompt_tokens=MAX_PROMPT_TOKENS), 0, folder, [1], roles)
    can_flash = dtype == "bfloat16" and runs_here("flash", dtype, roles.device)
    attention = "flash" if can_flash else "documents"  # flex, which compiles for minutes, is `trainer`'s
    trainer = Trainer(replace(model, attention=attention), TRAINER, folder, 1, roles)
    label = f"{folder.rpartition('/')[2]}, {attention} {dtype}"
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size

    def difference(when: str) -> float:
        difference_N = trainer.logprobs(batch) - batch.generator_logprobs_N
        return print_difference(f"{label}, {when}", difference_N, batch)

    batch = sample(generator, vocab_size)
    as_loaded = difference("as loaded")
    metrics = StepMetrics(batch.num_sequences)
    trainer.forward_backward(batch, lambda micro, logprobs_BT, entropy_BT: (logprobs_BT.mean(), {}), metrics)
    trainer.optimizer_step()
    difference("one update behind")
    sync_weights(trainer, generator, 1, roles)
    batch = sample(generator, vocab_size)
    synced = difference("after a sync")
    close_roles(roles, generator.close)
    return max(as_loaded, synced) < largest_mismatch(dtype, roles.device)


def sample(generator: Generator, vocab_size: int) -> TrainBatch:
    """Complete random prompts."""
    numbers = torch.Generator().manual_seed(generator.version)
    prompts = [
        Prompt(index, torch.randint(3, vocab_size, (length,), generator=numbers).tolist())
        for index, length in enumerate(PROMPT_LENGTHS)
    ]
    return make_batch(generator.generate(Requests.of(prompts, GROUP_SIZE)))


def print_difference(label: str, difference: torch.Tensor, batch: TrainBatch, more: str = "") -> float:
    """Print mean and largest difference of the log-probs, and return the mean.

    difference: [N], or [2, N] of log-probs and entropies.
    """
    difference_N = torch.atleast_2d(difference.cpu())[0][batch.loss_mask_N].abs()
    numbers = f"{len(difference_N)} tokens, mean {difference_N.mean():.1e}, largest {difference_N.max():.1e}"
    print(f"{label}: {numbers}{more}", flush=True)
    return difference_N.mean().item()


if __name__ == "__main__":
    main(*sys.argv[1:])
