"""The LM head: hidden states and targets in, log-probs and entropy out. A reward model's, in its place: scores out.

Log-probs are computed chunk by chunk, so that `[tokens, vocabulary]` never exists for a whole batch, forward or
backward, also with a vocabulary that tensor parallelism shards.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear


class LogprobHead(Linear):
    """LM head that returns per-token log-probs and entropy (nats) instead of logits.

    Takes hidden_BTD, targets_BT (int64), each one's sampling temperature (float32, which must arrive unrounded:
    torchtitan's FSDP leaves a module's inputs alone), and the places b * T + t that are wanted (int64 [M]), since
    prompts need no log-probs. Returns (logprobs_BT, entropy_BT), float32, 0 elsewhere.
    With tensor parallelism the weight holds this rank's rows of the vocabulary and the hidden states are replicated.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 4096
        """Tokens whose logits are computed at one time."""
        keep_logits: bool = False
        """Keep all logits for the backward, in the hidden states' dtype, rather than compute them again."""
        compile: bool = False
        """Fuse what happens to a chunk's logits with torch.compile."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_tokens, self.keep_logits = config.chunk_tokens, config.keep_logits
        functions = chunk_statistics, chunk_gradients, chunk_with_unit_gradients
        compiled = map(torch.compile, functions) if config.compile else functions
        self.statistics, self.gradients, self.with_unit_gradients = compiled
        self.vocab_size = config.out_features

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        targets_BT: torch.Tensor,
        temperatures_BT: torch.Tensor,
        scored_M: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BTD = hidden_BTD.to_local() if isinstance(hidden_BTD, DTensor) else hidden_BTD
        weight_VD, group, first_row = self.weight, None, 0
        if isinstance(weight_VD, DTensor):  # sharded over the vocabulary by tensor parallelism
            group = weight_VD.device_mesh.get_group()
            weight_VD = weight_VD.to_local()
            # DTensor's chunks: ceil(V / ranks) rows each, the last ranks may hold fewer
            first_row = group.rank() * -(-self.vocab_size // group.size())
        hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, scored_M)
        tokens = hidden_MD, weight_VD, targets_BT.flatten()[scored_M], temperatures_BT.flatten()[scored_M]
        if torch.is_grad_enabled() and not weight_VD.requires_grad and group is None:
            found = FrozenHeadLogprobs.apply(*tokens, self)
        else:
            keep_logits = self.keep_logits and torch.is_grad_enabled()
            found = ChunkedLogprobs.apply(*tokens, self, group, first_row, keep_logits)
        rows_M, columns_M = scored_M // targets_BT.shape[1], scored_M % targets_BT.shape[1]
        zeros_BT = torch.zeros_like(temperatures_BT)
        logprobs_BT, entropy_BT = (zeros_BT.index_put((rows_M, columns_M), values_M) for values_M in found)
        return logprobs_BT, entropy_BT


class ScoreHead(Linear):
    """A reward model's head of one output, called as `LogprobHead` is.

    Returns (scores_BT, scores_BT), float32: what each of the wanted places says of its sequence up to there, 0
    elsewhere. Without tensor parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        targets_BT: torch.Tensor,
        temperatures_BT: torch.Tensor,
        scored_M: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, scored_M)
        scores_M = hidden_MD.float() @ self.weight[0].float()
        scores_BT = torch.zeros_like(temperatures_BT).flatten().index_put((scored_M,), scores_M).view_as(targets_BT)
        return scores_BT, scores_BT


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] and the entropy of that distribution, over chunks of tokens.

    The backward recomputes each chunk's logits: one more matrix product instead of `[tokens, vocabulary]` of memory;
    with `keep_logits` they are kept, and the values are the same.
    With `group`, weight_VD holds the vocabulary rows from `first_row` on, and sums over the vocabulary are reduced
    over the group; every rank returns the same values. `head` gives chunk size and the two functions of a chunk.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperatures_N, head, group, first_row, keep_logits):
        outputs, kept = [], []
        for hidden, targets, temperatures in _chunks(head.chunk_tokens, hidden_ND, targets_N, temperatures_N):
            product_NV = hidden @ weight_VD.T
            maximum, total, weighted, target = head.statistics(product_NV, targets, temperatures, first_row)
            if keep_logits:
                kept.append(product_NV)
            if group is not None:
                highest = maximum.clone()
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
                rescale = (maximum - highest).exp()
                sums = torch.stack([total * rescale, weighted * rescale, target])
                dist.all_reduce(sums, group=group)
                maximum, (total, weighted, target) = highest, sums.unbind()
            logsumexp = maximum + total.log()
            outputs.append(torch.stack([target - logsumexp, logsumexp - weighted / total, logsumexp]))
        logprobs_N, entropy_N, logsumexp_N = torch.cat(outputs, 1).unbind()
        ctx.save_for_backward(hidden_ND, targets_N, temperatures_N, entropy_N, logsumexp_N, weight_VD, *kept)
        ctx.rest = head, group, first_row
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        *per_token, weight_VD = ctx.saved_tensors[:6]
        kept = ctx.saved_tensors[6:]
        head, group, first_row = ctx.rest
        trains_weight = ctx.needs_input_grad[1]  # not with LoRA
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if trains_weight else None

        def backward_of_chunk(product_NV, hidden_ND, *rest):  # a function, at whose end its [N, V] are free
            grad_NV = head.gradients(product_NV, *rest, first_row)
            if trains_weight:
                _add_product(grad_weight_VD, grad_NV.T, hidden_ND)
            return grad_NV @ weight_VD

        chunks = _chunks(head.chunk_tokens, *per_token, grad_logprobs_N, grad_entropy_N)
        grad_hidden_ND = torch.cat(
            [
                backward_of_chunk(kept[i] if kept else hidden @ weight_VD.T, hidden, *rest)
                for i, (hidden, *rest) in enumerate(chunks)
            ]
        )
        if group is not None:  # each rank saw only its rows of the vocabulary
            dist.all_reduce(grad_hidden_ND, group=group)
        if trains_weight:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, *[None] * 6


class FrozenHeadLogprobs(torch.autograd.Function):
    """ChunkedLogprobs for a weight that does not learn and is held whole, as with LoRA.

    A token's log-prob then has a gradient only for its own hidden state, and that is a factor of the backward's times
    a vector known in the forward: no chunk's logits are computed twice, unless the entropy has a gradient too.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperatures_N, head):
        ctx.set_materialize_grads(False)
        chunks = _chunks(head.chunk_tokens, hidden_ND, targets_N, temperatures_N)
        parts = []
        for hidden, *rest in chunks:
            *values, grad_NV = head.with_unit_gradients(hidden @ weight_VD.T, *rest)
            parts.append((*values, grad_NV @ weight_VD))
            del grad_NV  # before the next chunk's is there
        logprobs_N, entropy_N, logsumexp_N, unit_ND = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_ND, targets_N, temperatures_N, entropy_N, logsumexp_N, weight_VD, unit_ND)
        ctx.head = head
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        *per_token, weight_VD, unit_ND = ctx.saved_tensors
        if grad_entropy_N is None:
            return (grad_logprobs_N[:, None] * unit_ND).to(unit_ND.dtype), None, None, None, None
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(grad_entropy_N)
        chunks = _chunks(ctx.head.chunk_tokens, *per_token, grad_logprobs_N, grad_entropy_N)
        grads = [ctx.head.gradients(hidden @ weight_VD.T, *rest, 0) @ weight_VD for hidden, *rest in chunks]
        return torch.cat(grads), None, None, None, None


def chunk_statistics(product_NV, targets_N, temperatures_N, first_row: int):
    """(max, sum exp(l - max), sum l exp(l - max), target's l) of one chunk's logits l = h W^T / temperature.

    product_NV: h W^T over a rank's rows of the vocabulary, from `first_row` on.
    """
    logits_NV = product_NV.float() / temperatures_N[:, None]
    maximum_N = logits_NV.amax(-1)
    exp_NV = (logits_NV - maximum_N[:, None]).exp()
    local_N = targets_N - first_row
    mine_N = (local_N >= 0) & (local_N < product_NV.shape[1])
    target_N = logits_NV.gather(1, local_N.where(mine_N, 0)[:, None])[:, 0].where(mine_N, 0.0)
    return maximum_N, exp_NV.sum(-1), (exp_NV * logits_NV).sum(-1), target_N


def chunk_gradients(
    product_NV,
    targets_N,
    temperatures_N,
    entropy_N,
    logsumexp_N,
    grad_logprobs_N,
    grad_entropy_N,
    first_row: int,
):
    """Gradient of one chunk's log-probs and entropy with respect to `product_NV`, h W^T, in its dtype.

    d logprob / d logit_v = [v = target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    log_p_NV = product_NV.float() / temperatures_N[:, None] - logsumexp_N[:, None]
    grad_NV = -log_p_NV.exp() * (grad_logprobs_N[:, None] + grad_entropy_N[:, None] * (log_p_NV + entropy_N[:, None]))
    # a comparison, because scattering would write [N, V] in float32 where compiled code needs only registers
    is_target_NV = torch.arange(product_NV.shape[1], device=product_NV.device) == (targets_N - first_row)[:, None]
    grad_NV = grad_NV + grad_logprobs_N[:, None].where(is_target_NV, 0.0)
    return (grad_NV / temperatures_N[:, None]).to(product_NV.dtype)


def chunk_with_unit_gradients(product_NV, targets_N, temperatures_N):
    """(log-probs, entropy, logsumexp, d logprob / d `product_NV`) of one chunk, from one look at its logits."""
    maximum_N, total_N, weighted_N, target_N = chunk_statistics(product_NV, targets_N, temperatures_N, 0)
    logsumexp_N = maximum_N + total_N.log()
    ones_N, zeros_N = torch.ones_like(logsumexp_N), torch.zeros_like(logsumexp_N)
    entropy_N = logsumexp_N - weighted_N / total_N
    grad_NV = chunk_gradients(product_NV, targets_N, temperatures_N, entropy_N, logsumexp_N, ones_N, zeros_N, 0)
    return target_N - logsumexp_N, entropy_N, logsumexp_N, grad_NV


def _add_product(sum_VD: torch.Tensor, left_VN: torch.Tensor, right_ND: torch.Tensor) -> None:
    """sum += left @ right, in sum's float32; on a GPU within the product, without a second [V, D]."""
    if left_VN.is_cuda and left_VN.dtype != sum_VD.dtype:
        torch.addmm(sum_VD, left_VN, right_ND, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += left_VN @ right_ND


def _chunks(num_tokens: int, hidden_ND: torch.Tensor, *per_token: torch.Tensor):
    """Tensors of all tokens, cut alike; copies, because code compiled for a part of a tensor is not for a whole."""
    parts = ([part.clone() for part in values.split(num_tokens)] for values in per_token)
    return zip(hidden_ND.split(num_tokens), *parts, strict=True)
