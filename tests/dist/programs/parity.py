"""A sharded model against transformers: log-probs, entropy, their gradients, and weights in and out.

Arguments: FOLDER TENSOR_PARALLEL DATA_REPLICAS ACTIVATION_CHECKPOINTING PACKING(0 or 1). World size from torchrun.
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from grpo.config import ModelConfig, SFTConfig, TrainerConfig
from grpo.forward import micro_batches
from grpo.models import build_model, hf_tensors
from grpo.packing import gather_completions, make_batch
from grpo.roles import close_roles, setup_trainers

PROMPT_LENGTHS, COMPLETION_LENGTHS = [3, 9, 1, 20, 5, 7, 11], [5, 12, 1, 30, 9, 2, 17]
TEMPERATURE = 0.8


def main() -> None:
    folder, tensor_parallel, replicas, checkpointing, packing = sys.argv[1:]
    roles = setup_trainers(SFTConfig())
    trainer = TrainerConfig(
        tensor_parallel=int(tensor_parallel),
        data_replicas=int(replicas),
        activation_checkpointing=checkpointing,
        packing=packing == "1",
        micro_batch_tokens=64,  # several micro-batches
        logprob_chunk_tokens=24,  # several chunks, the last one smaller
        compile=False,
    )
    model = build_model(
        ModelConfig(dtype="float32"),
        trainer,
        folder,
        world_size=dist.get_world_size(),
        device=roles.device,
        tensor_parallel=trainer.tensor_parallel,
        data_replicas=trainer.data_replicas,
    )
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:  # not the pad token: transformers gives its embedding no gradient
        return torch.randint(3, model.hf_config.vocab_size, (count,), generator=generator).tolist()

    prompts, completions = [ids(n) for n in PROMPT_LENGTHS], [ids(n) for n in COMPLETION_LENGTHS]
    batch = make_batch(prompts, completions)
    C = batch.num_completion_tokens
    weight_C, entropy_weight_C = torch.randn(C, generator=generator), torch.randn(C, generator=generator)

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = expected(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)
        logprobs.append(log_p.gather(1, torch.tensor(completion)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    expected_C, expected_entropy_C = torch.cat(logprobs), torch.cat(entropies)
    (expected_C @ weight_C + expected_entropy_C @ entropy_weight_C).backward()

    got_C, got_entropy_C = torch.zeros(C), torch.zeros(C)
    for micro in micro_batches(batch, model, trainer):
        logprobs_BT, entropy_BT = model.logprobs(micro.tokens_BT, micro.targets_BT, micro.positions_BT, TEMPERATURE)
        index_M, logprobs_M = gather_completions(logprobs_BT, batch, micro)
        _, entropy_M = gather_completions(entropy_BT, batch, micro)
        # the last term keeps a rank without sequences in the backward's collectives
        loss = logprobs_M @ weight_C[index_M] + entropy_M @ entropy_weight_C[index_M] + 0.0 * logprobs_BT.sum()
        loss.backward()
        if model.tensor_parallel_rank == 0:
            got_C[index_M], got_entropy_C[index_M] = logprobs_M.detach(), entropy_M.detach()
    dist.all_reduce(got_C)
    dist.all_reduce(got_entropy_C)
    torch.testing.assert_close(got_C, expected_C, atol=1e-4, rtol=0)
    torch.testing.assert_close(got_entropy_C, expected_entropy_C, atol=1e-4, rtol=0)

    parameters = dict(expected.named_parameters())
    weights = dict(hf_tensors(model, torch.float32))
    assert weights.keys() == parameters.keys(), weights.keys() ^ parameters.keys()
    assert all(torch.equal(weights[name], parameters[name]) for name in parameters)

    with torch.no_grad():  # so that gradients come out under HF names as weights do
        for parameter in model.module.parameters():
            parameter.copy_(parameter.grad)
    for name, gradient in hf_tensors(model, torch.float32):
        wanted = parameters[name].grad
        assert (gradient - wanted).abs().max() < 1e-5 * wanted.abs().max(), name
    close_roles(roles)


if __name__ == "__main__":
    main()
