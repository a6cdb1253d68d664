"""Sharded models against transformers: log-probs, entropy, their gradients, and weights in and out.

In bfloat16, in some cases, whether the sampling temperatures reach the LM head unrounded.

Arguments: cases, each FOLDER,TENSOR_PARALLEL,DATA_REPLICAS,ACTIVATION_CHECKPOINTING,SHARE_PROMPTS(0 or 1), and
CONTEXT_PARALLEL if it is not 1; all run one after the other in the world that torchrun started. Prints the largest
differences of each case.
"""

import pathlib
import sys
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.data.layout import take_out
from grpo.models.build import ShardedModel, build_model
from grpo.models.export import hf_tensors
from grpo.models.families import HFRoPE
from grpo.roles.process_groups import Roles, close_roles, setup_trainers
from grpo.types import TrainBatch
from tests.rollouts import sequence
from tests.tiny_models import tensors_of

PROMPT_LENGTHS, COMPLETION_LENGTHS = [3, 9, 1, 20, 20, 9, 9], [5, 12, 1, 30, 9, 2, 17]
PROMPTS = [0, 1, 2, 3, 3, 1, 1]  # whose prompt each sequence has
FIRST_ID = 3  # the pad token is left out: transformers gives its embedding no gradient
TEMPERATURES = [0.8, 1.0, 0.5, 1.3, 0.8, 0.6, 1.1]
TOLERANCE = 1e-5  # in float32, of the largest log-prob or entropy, and of each tensor's largest gradient
# Gradients of gated delta nets are sums that cancel: transformers' float32 is up to 1.4e-4 off its own float64
NOISY_GRADIENTS = {"qwen3_5_text": 1e-4}


def main() -> None:
    roles = setup_trainers()
    for case in sys.argv[1:]:
        check_case(case, roles)
    close_roles(roles)


def check_case(case: str, roles: Roles) -> None:
    """Build one sharded model and compare it. Collective over all ranks."""
    folder, tensor_parallel, replicas, checkpointing, shares, *more = case.split(",")
    context_parallel, expert_parallel = (more + ["1", "1"])[:2]
    case = f"{pathlib.Path(case).name} on {dist.get_world_size()} ranks"
    trainer = TrainerConfig(
        tensor_parallel=int(tensor_parallel),
        context_parallel=int(context_parallel),
        expert_parallel=int(expert_parallel),
        data_replicas=int(replicas),
        activation_checkpointing=checkpointing,
        share_prompts=shares == "1",
        micro_batch_tokens=64,  # several micro-batches
        logprob_chunk_tokens=24,  # several chunks, the last one smaller
        compile=False,
    )
    model = build(folder, "float32", trainer, roles)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = tensors_of(original)
    weights = dict(hf_tensors(model, torch.float32))
    assert weights.keys() == parameters.keys(), f"{case}: {weights.keys() ^ parameters.keys()}"
    assert all(torch.equal(weights[name], parameters[name]) for name in parameters), f"{case}: weights in and out"

    batch, weights_2N = random_batch(original.config.vocab_size)
    expected_2N = original_values(original, batch)
    (expected_2N * weights_2N).sum().backward()
    expected_2M = expected_2N.detach()[:, batch.loss_mask_N]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        got_2M = sharded_values(model, batch, weights_2N)[:, batch.loss_mask_N]
    logprobs_N = model.token_logprobs(batch).to(model.device)
    dist.all_reduce(logprobs_N)  # each token's, from one of the ranks that compute it
    torch.testing.assert_close(logprobs_N[batch.loss_mask_N], got_2M[0], rtol=0, atol=1e-5, msg=f"{case}: log-probs")
    if trainer.tensor_parallel == 1:  # replicas add their gradients up once an update; one more is got_2M's
        num_sharded = sum(isinstance(part, FSDPModule) for part in model.module.modules())
        most = num_sharded if trainer.data_replicas > 1 else 0
        assert sums.call_count <= most + 1, f"{case}: {sums.call_count} all-reduces of {num_sharded} sharded parts"
    differences_2, largest_2 = (x_2M.abs().amax(1) for x_2M in (got_2M - expected_2M, expected_2M))
    value_error = (differences_2 / largest_2).max().item()

    with torch.no_grad():  # so that gradients come out under HF names as weights do
        for parameter in model.module.parameters():
            parameter.copy_(parameter.grad)
    errors, gradients = {}, tensors_of(original, gradients=True)
    for name, gradient in hf_tensors(model, torch.float32):
        wanted = gradients[name]
        errors[name] = ((gradient - wanted).abs().max() / wanted.abs().max()).item()
    worst = max(errors, key=errors.get)
    if roles.is_driver:
        nats = f"log-probs {differences_2[0]:.1e} nats, entropy {differences_2[1]:.1e}"
        print(f"{case}: {nats}, gradients {errors[worst]:.1e} ({worst})", flush=True)
    assert value_error < TOLERANCE, f"{case}: values {value_error}"
    tolerance = NOISY_GRADIENTS.get(original.config.model_type, TOLERANCE)
    assert errors[worst] < tolerance, f"{case}: gradient of {worst} {errors[worst]}"
    # shared before they have memory, so that a table of many positions is never there once a layer
    ropes = [part.config for part in model.module.modules() if isinstance(part, HFRoPE)]
    assert len(ropes) == len({(rope.inv_freq, rope.attention_factor) for rope in ropes}), f"{case}: tables of positions"
    if checkpointing == "selective":
        check_temperatures(build(folder, "bfloat16", trainer, roles), batch, case)


def build(folder: str, dtype: str, trainer: TrainerConfig, roles: Roles) -> ShardedModel:
    """The folder's model over all ranks, computing in `dtype`. Collective over all ranks."""
    return build_model(
        ModelConfig(dtype=dtype),
        trainer,
        folder,
        device=roles.device,
        tensor_parallel=trainer.tensor_parallel,
    )


def check_temperatures(model: ShardedModel, batch: TrainBatch, case: str) -> None:
    """Check that temperatures come through as float32, which FSDP may round to its compute dtype like all inputs."""
    rounded = replace(batch, temperatures_S=batch.temperatures_S.bfloat16().float())
    change = (model.token_logprobs(batch) - model.token_logprobs(rounded)).abs().sum().to(model.device)
    dist.all_reduce(change)
    assert change > 0, f"{case}: rounded temperatures give the same log-probs"


def random_batch(vocab_size: int, times: int = 1) -> tuple[TrainBatch, torch.Tensor]:
    """Sequences, and a random weight [2, N] for each token's log-prob and entropy, 0 in prompts.

    So the loss has every gradient in it. times: factor on all lengths.
    """
    generator = torch.Generator().manual_seed(3)

    # completions are drawn after all prompts
    lengths = [times * length for length in (*PROMPT_LENGTHS, *COMPLETION_LENGTHS)]
    ids = [torch.randint(FIRST_ID, vocab_size, (n,), generator=generator) for n in lengths]
    samples = []
    for index, completion, temperature in zip(PROMPTS, ids[len(PROMPTS) :], TEMPERATURES, strict=True):
        whole, prompt_tokens = torch.cat([ids[index], completion]), len(ids[index])
        facts = {"prompt_tokens": prompt_tokens, "temperature": temperature}
        samples.append(sequence(whole, torch.arange(len(whole)) >= prompt_tokens, **facts))
    batch = make_batch(samples)
    return batch, torch.randn(2, batch.num_tokens, generator=generator) * batch.loss_mask_N


def original_values(original: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    """Transformers' log-probs and entropy of all tokens, a sequence at a time: [2, N] with gradients, 0 for firsts.

    Log-probs are those over the kept ids, where the batch has some.
    """
    values = []
    sequences = batch.ids_N.to(original.device).split(batch.lengths_S.tolist())
    for start, ids, temperature in zip(batch.starts_S.tolist(), sequences, batch.temperatures_S.tolist(), strict=True):
        logits_TV = original(ids[None]).logits[0, :-1] / temperature
        if batch.kept_C is not None:
            for t, logits_V in enumerate(logits_TV, start + 1):
                kept = batch.kept_C[(batch.token_C == t) & (batch.kept_C >= 0)].long()
                if len(kept):
                    logits_V[:] = torch.full_like(logits_V, -torch.inf).index_copy(0, kept, logits_V[kept])
        log_p_TV = logits_TV.log_softmax(-1)
        logprobs_T = log_p_TV.gather(1, ids[1:, None])[:, 0]
        values.append(F.pad(torch.stack([logprobs_T, -(log_p_TV.exp() * log_p_TV).sum(-1)]), (1, 0)))
    return torch.cat(values, dim=1)


def sharded_values(model: ShardedModel, batch: TrainBatch, weights_2N: torch.Tensor) -> torch.Tensor:
    """The sharded model's, on every rank; leaves the gradients of their weighted sum. Collective over all ranks."""
    weights_2N = weights_2N.to(model.device)
    got_2N = torch.zeros_like(weights_2N)
    for micro, is_last in model.lay_out(batch)[1]:
        assert model.trainer.share_prompts == (micro.shared is not None)
        model.accumulate(is_last)
        values = model.logprobs(micro)
        index_M = micro.token_BT[micro.token_BT >= 0]
        values_2M = torch.stack([take_out(values_BT, micro)[1] for values_BT in values])
        # an empty selection still belongs to the graph, which keeps a rank without sequences in the collectives
        (values_2M * weights_2N[:, index_M]).sum().backward()
        if model.rank_among("tp") == model.rank_among("cp") == 0:
            got_2N[:, index_M] = values_2M.detach()
    model.drop_copy()
    dist.all_reduce(got_2N)
    return got_2N


if __name__ == "__main__":
    main()
