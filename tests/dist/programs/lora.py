"""Training with LoRA against transformers with PEFT: losses, gradient norms, merged weights, exported folders.

Arguments: OUTPUT and one case or more, each FOLDER,TENSOR_PARALLEL,DATA_REPLICAS,ACTIVATION_CHECKPOINTING,TARGETS, the
last one joined by +; all run one after the other in the world that torchrun started. Prints the largest differences.
"""

import functools
import pathlib
import sys

import peft
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from grpo.config import AlgorithmConfig, GRPOConfig, ModelConfig, RolesConfig, TrainerConfig
from grpo.metrics import StepMetrics
from grpo.models.build import build_model
from grpo.models.export import adapters_folder, export_hf, hf_tensors
from grpo.roles.process_groups import Roles, close_roles, setup_trainers
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.types import TrainBatch
from tests.dist.programs.normalisation import difference
from tests.dist.programs.parity import original_values, random_batch
from tests.tiny_models import tensors_of
from train_sft import label_objective

NUM_STEPS, RANK, ALPHA, LEARNING_RATE = 2, 4, 6.0, 0.02
TOLERANCE = 1e-5  # in float32, of the largest value that is compared


def main() -> None:
    output, *cases = sys.argv[1:]
    roles = setup_trainers()
    for case in cases:
        check_case(case, pathlib.Path(output), roles)
    close_roles(roles)


def check_case(case: str, output: pathlib.Path, roles: Roles) -> None:
    """Train one sharded model for some steps and compare. Collective over all ranks."""
    folder, tensor_parallel, replicas, checkpointing, targets = case.split(",")
    options = TrainerConfig(
        tensor_parallel=int(tensor_parallel),
        data_replicas=int(replicas),
        activation_checkpointing=checkpointing,
        micro_batch_tokens=64,  # several micro-batches
        logprob_chunk_tokens=24,
        compile=False,
        learning_rate=LEARNING_RATE,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_targets=tuple(targets.split("+")),
    )
    model = ModelConfig(path=folder, dtype="float32")
    trainer = Trainer(model, options, folder, NUM_STEPS, roles)
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch, _ = random_batch(start.config.vocab_size)
    base = build_model(
        model, options, folder, device=roles.device, tensor_parallel=options.tensor_parallel, frozen=True
    )
    base_N = base.token_logprobs(batch)
    assert torch.equal(trainer.model.token_logprobs(batch), base_N), f"{case}: B = 0 is not the base"
    check_bfloat16(options, folder, batch, roles, case)

    target = output / pathlib.Path(folder).name
    export_hf(trainer.model, target, torch.float32)  # PEFT starts from the same A
    dist.barrier()
    theirs = peft.PeftModel.from_pretrained(start, adapters_folder(target), is_trainable=True)
    names = {name for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert len(names) == 2 * len(options.lora_targets) * start.config.num_hidden_layers, f"{case}: {sorted(names)}"
    wanted = train_theirs(theirs, batch)
    found = train_ours(trainer, batch)
    assert len({loss for loss, _ in wanted}) == NUM_STEPS  # it learns
    loss_error, norm_error = (max(abs(f[i] / w[i] - 1) for f, w in zip(found, wanted, strict=True)) for i in (0, 1))

    # what was trained, as plain weights, as exported folders, and left out again
    merged = dict(hf_tensors(trainer.model, torch.float32))
    export_hf(trainer.model, target, torch.float32)
    dist.barrier()
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reloaded = peft.PeftModel.from_pretrained(reloaded, adapters_folder(target)).merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = tensors_of(theirs.merge_and_unload())
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    moved = {name for name, value in tensors_of(first).items() if not torch.equal(value, merged[name])}
    assert {name.split(".")[-2] for name in moved} == {*options.lora_targets}, f"{case}: {sorted(moved)}"
    assert len(moved) == len(names) / 2
    errors = [difference(merged, expected)]
    errors += [difference(merged, tensors_of(other)) for other in (reloaded, exported)]
    with torch.no_grad():
        values_N = original_values(exported, batch)[0]
    logprobs_N = trainer.logprobs(batch)
    values_M = values_N[batch.loss_mask_N]
    errors.append(((logprobs_N[batch.loss_mask_N] - values_M).abs().max() / values_M.abs().max()).item())
    config = GRPOConfig(
        model=model,
        trainer=options,
        roles=RolesConfig(num_trainers=dist.get_world_size()),
        algorithm=AlgorithmConfig(kl_coef=0.1),
    )
    assert not config.reference_has_model
    reference = Reference(config.model, config.trainer, "", 1, roles, trainer.model)
    assert torch.equal(reference.logprobs(batch), base_N), f"{case}: reference"
    assert torch.equal(trainer.logprobs(batch), logprobs_N), f"{case}: the adapters did not come back"
    if roles.is_driver:
        words = f"loss {loss_error:.1e}, gradient norm {norm_error:.1e}"
        names = ("merged", "PEFT reloaded", "exported", "log-probs of the exported")
        words += "".join(f", {name} {error:.1e}" for name, error in zip(names, errors, strict=True))
        print(
            f"{pathlib.Path(folder).name} on {dist.get_world_size()} ranks, TP {tensor_parallel}: {words}", flush=True
        )
    assert max(loss_error, norm_error, *errors) < TOLERANCE, case


def train_ours(trainer: Trainer, batch: TrainBatch) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step. Collective over all ranks."""
    objective = functools.partial(label_objective, denominator=float(batch.loss_mask_N.sum()))
    found = []
    for _ in range(NUM_STEPS):
        metrics = StepMetrics(batch.num_sequences)
        trainer.forward_backward(batch, objective, metrics)
        found.append((metrics.means()["loss"], trainer.optimizer_step()["grad_norm"]))
        trainer.schedule.step()
    state = trainer.state_dict()
    assert all("lora" in name for name in state["model"]), sorted(state["model"])
    moments = [name for name in state["optimizer"] if "exp_avg" in name]
    assert len(moments) == 2 * len(state["model"]), sorted(moments)
    return found


def train_theirs(model: peft.PeftModel, batch: TrainBatch) -> list[tuple[float, float]]:
    """The same in plain PyTorch."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for _ in range(NUM_STEPS):
        loss = -original_values(model, batch)[0][batch.loss_mask_N].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def check_bfloat16(options: TrainerConfig, folder: str, batch: TrainBatch, roles: Roles, case: str) -> None:
    """The base is held in bfloat16 and the adapters in float32, with gradients of their own alone."""
    model = ModelConfig(path=folder, dtype="bfloat16")
    trainer = Trainer(model, options, folder, NUM_STEPS, roles)
    train_ours(trainer, batch)
    trainer.forward_backward(batch, lambda micro, logprobs_BT, _: (logprobs_BT.sum(), {}), StepMetrics(1))
    for name, parameter in trainer.model.module.named_parameters():
        learns = "lora_" in name
        held = torch.float32 if learns else torch.bfloat16
        assert (parameter.dtype, parameter.grad is not None) == (held, learns), f"{case}: {name}"
        assert not learns or parameter.grad.dtype == torch.float32, f"{case}: {name}"


if __name__ == "__main__":
    main()
