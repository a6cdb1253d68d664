"""Log-probs, entropy and gradients of the sharded model against transformers. Arguments: FOLDER TENSOR_PARALLEL REPLICAS AC PACKING"""
import sys
import torch
import torch.distributed as dist
from grpo.config import ModelConfig, SFTConfig, TrainerConfig
from grpo.roles import setup_trainers, close_roles
from grpo.models import build_model, hf_tensors
from grpo.forward import micro_batches
from grpo.packing import gather_completions
from grpo.types import TrainBatch
from transformers import AutoModelForCausalLM

folder, tp, replicas, ac, packing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]=="1"
roles = setup_trainers(SFTConfig())
world = dist.get_world_size()
trainer = TrainerConfig(tensor_parallel=tp, data_replicas=replicas, activation_checkpointing=ac, packing=packing, micro_batch_tokens=64, logprob_chunk_tokens=24, compile=False)
model = build_model(ModelConfig(dtype="float32"), trainer, folder, world_size=world, device=roles.device, tensor_parallel=tp, data_replicas=replicas)
T = 0.8
g = torch.Generator().manual_seed(3)
prompts = [3, 9, 1, 20, 5, 7, 11]; completions = [5, 12, 1, 30, 9, 2, 17]
V = model.hf_config.vocab_size
ids = torch.randint(3, V, (sum(prompts)+sum(completions),), generator=g)
batch = TrainBatch(ids, torch.tensor(prompts), torch.tensor(completions), torch.zeros(sum(completions)))
w = torch.randn(sum(completions), generator=g); we = torch.randn(sum(completions), generator=g)
ref = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
# reference
at = 0; c = 0; rl=[]; re=[]
for p, n in zip(prompts, completions):
    seq = ids[at:at+p+n]; at += p+n
    logits = ref(seq[None]).logits[0, p-1:-1] / T
    lp = torch.log_softmax(logits, -1)
    rl.append(lp.gather(1, seq[p:, None])[:, 0]); re.append(-(lp.exp()*lp).sum(-1))
rl=torch.cat(rl); re=torch.cat(re)
(rl@w + re@we).backward()
out = torch.zeros(sum(completions)); oute = torch.zeros(sum(completions))
for micro in micro_batches(batch, model, trainer):
    lp, ent = model.logprobs(micro.tokens_BT, micro.targets_BT, micro.positions_BT, T)
    idx, vals = gather_completions(lp, batch, micro); _, evals = gather_completions(ent, batch, micro)
    loss = vals @ w[idx] + evals @ we[idx] + 0.0 * lp.sum()
    loss.backward()
    if model.tensor_parallel_rank == 0: out[idx] = vals.detach(); oute[idx] = evals.detach()
dist.all_reduce(out); dist.all_reduce(oute)
print("lp diff", (out-rl).abs().max().item(), "ent diff", (oute-re).abs().max().item())
assert (out-rl).abs().max() < 1e-4 and (oute-re).abs().max() < 1e-4
# weights and gradients
got = dict(hf_tensors(model, torch.float32))
want = dict(ref.named_parameters())
assert set(got) == set(want), set(got) ^ set(want)
assert all(torch.equal(got[k], want[k]) for k in want)
with torch.no_grad():
    for p_ in model.module.parameters(): p_.copy_(p_.grad)
worst = 0
for k, v in hf_tensors(model, torch.float32):
    scale = want[k].grad.abs().max()
    worst = max(worst, ((v - want[k].grad).abs().max() / scale).item())
print("worst relative gradient difference", worst)
assert worst < 1e-4
close_roles(roles)
