"""Several teachers, each of which scores the sequences of its number, against transformers, which has them one by one.

Arguments: trainer ranks, reference ranks, then the teachers' folders. Prints the largest difference of each step.
"""

import sys

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from grpo.config import ModelConfig, RolesConfig, TrainerConfig
from grpo.data.batches import make_batch, sample_of
from grpo.roles.comm import add_ref_logprobs, send_batch
from grpo.roles.process_groups import close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.types import Completion, Piece, Prompt, TrainBatch

TOLERANCE = 1e-5
TRAINER = TrainerConfig(micro_batch_tokens=48, compile=False)  # several rows, of several sequences
SHARED, OTHER = [5, 9, 12, 7, 8, 6], [13, 4, 11]  # prompts, which sequences of different teachers share too
COMPLETIONS = [[3 + (7 * i + j * j) % 28 for j in range(2 + 3 * i)] for i in range(6)]
PROMPTS = [SHARED, SHARED, SHARED, SHARED, OTHER, OTHER]
HINTED = [[10, 14, *prompt] for prompt in PROMPTS]
# Of each step the number of each sequence's teacher: mixed, with one that has nothing; all to one; fewer than ranks
STEPS = [[0, 1, 1, 0, 0, 1], [1] * 6, [2, 0, 0, 0, 0, 0]]


def make(prompts: list[list[int]], numbers: list[int]) -> TrainBatch:
    """Completions of different temperatures, each with a token that an environment wrote, which is not in the loss."""
    samples = []
    for i, (prompt, ids) in enumerate(zip(prompts, COMPLETIONS, strict=True)):
        written = Piece(torch.tensor([6]), torch.tensor([False]))
        pieces = Piece.sampled(torch.tensor(ids), torch.zeros(len(ids)), 0), written
        completion = Completion(pieces, truncated=False, temperature=0.7 + 0.1 * i)
        samples.append(sample_of(Prompt(0, prompt), completion, teacher=numbers[i]))
    return make_batch(samples)


@torch.no_grad()
def by_transformers(teachers: list, prompts: list[list[int]], numbers: list[int]) -> torch.Tensor:
    """Log-probs of all sampled tokens, sequence after sequence."""
    found = []
    for i, (prompt, ids, number) in enumerate(zip(prompts, COMPLETIONS, numbers, strict=True)):
        logits_TV = teachers[number](torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found.append((logits_TV / (0.7 + 0.1 * i)).log_softmax(-1)[range(len(ids)), ids])
    return torch.cat(found)


def main() -> None:
    num_trainers, num_references = map(int, sys.argv[1:3])
    layout = RolesConfig(num_trainers=num_trainers, num_references=num_references, num_generators=0)
    roles, folders, reference = setup_roles(layout, needs_reference=True), sys.argv[3:], None
    if roles.references:
        reference = Reference(ModelConfig(dtype="float32"), TRAINER, folders, 1, roles)
    teachers = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    for numbers in STEPS:
        for prompts in (PROMPTS, HINTED):  # what the teachers read: the same as the policy, or another prompt
            batch = send_batch(make(PROMPTS, numbers) if roles.is_driver else None, roles)
            read = send_batch(make(prompts, numbers) if roles.is_driver else None, roles)
            batch = add_ref_logprobs(batch, reference, roles, read)
            if roles.is_driver:
                wanted = by_transformers(teachers, prompts, numbers)
                error = (batch.ref_logprobs_N[batch.loss_mask_N] - wanted).abs().max().item()
                print(f"{numbers}: {error:.1e}", flush=True)
                assert error < TOLERANCE, f"{numbers}: log-probs differ by {error}"
                others = by_transformers(teachers, prompts, [(number + 1) % len(folders) for number in numbers])
                assert (others - wanted).abs().max() > 1, "the teachers agree, so this cannot fail"
    for model in reference.models if reference else ():  # nothing of any is left gathered
        parts = [part for part in model.module.modules() if isinstance(part, FSDPModule)]
        assert bool(parts) == (num_references > 1)
        assert all(isinstance(parameter, DTensor) for part in parts for parameter in part.parameters())
    close_roles(roles)


if __name__ == "__main__":
    main()
