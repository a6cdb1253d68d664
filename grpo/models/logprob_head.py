"""The LM head: hidden states and targets in, log-probs and entropy out. A reward model's head returns scores instead.

Log-probs are computed chunk by chunk, so that `[tokens, vocabulary]` never exists for a whole batch, neither in the
forward nor in the backward. Tensor parallelism may shard the vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from grpo.models import own_config
from grpo.types import KeptIds

# Logit of an id that was not kept: exp makes 0 of it, and 0 times it is 0, unlike 0 times -inf
NOT_KEPT = -1e20


class LogprobHead(Linear):
    """LM head that returns per-token log-probs and entropy (nats) instead of logits.

    With tensor parallelism the weight holds this rank's rows of the vocabulary, and every rank has all hidden states.
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
        self.chunk_tokens = config.chunk_tokens
        self.keep_logits = config.keep_logits
        compiled = torch.compile if config.compile else lambda function: function
        self.statistics = compiled(chunk_statistics)
        self.gradients = compiled(chunk_gradients)

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        temperatures_BT: Tensor,
        scored_M: Tensor,
        kept: KeptIds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs_BT, entropy_BT) at the places b * T + t in `scored_M`, float32, and 0 elsewhere.

        Prompts need no log-probs. kept: the ids that have a probability at each place, if not all have; a place without
        any gets some numbers. Temperatures are float32 and must arrive unrounded; torchtitan's FSDP does not cast a
        module's inputs.
        """
        if isinstance(hidden_BTD, DTensor):
            hidden_BTD = hidden_BTD.to_local()
        weight_VD = self.weight
        group = None
        first_row = 0
        if isinstance(weight_VD, DTensor):  # sharded over the vocabulary by tensor parallelism
            group = weight_VD.device_mesh.get_group()
            weight_VD = weight_VD.to_local()
            # DTensor's chunks: ceil(V / ranks) rows each, the last ranks may hold fewer
            first_row = group.rank() * -(-self.out_features // group.size())
        hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, scored_M)
        targets_M = targets_BT.flatten()[scored_M]
        temperatures_M = temperatures_BT.flatten()[scored_M]
        product = partial(
            chunk_product,
            weight_VD,
            first_row,
            self.chunk_tokens,
            kept,
        )
        logprobs_M, entropy_M = ChunkedLogprobs.apply(
            hidden_MD,
            weight_VD,
            targets_M,
            temperatures_M,
            self,
            product,
            group,
            first_row,
            self.keep_logits and torch.is_grad_enabled(),
        )
        row_length = targets_BT.shape[1]
        places = (scored_M // row_length, scored_M % row_length)
        zeros_BT = torch.zeros_like(temperatures_BT)
        logprobs_BT = zeros_BT.index_put(places, logprobs_M)
        entropy_BT = zeros_BT.index_put(places, entropy_M)
        return logprobs_BT, entropy_BT


@own_config
class ScoreHead(Linear):
    """A reward model's head of one output, called as `LogprobHead` is. Without tensor parallelism."""

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        temperatures_BT: Tensor,
        scored_M: Tensor,
        kept: KeptIds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores_BT, scores_BT), float32: each scored place's score of its sequence so far, and 0 elsewhere."""
        hidden_MD = hidden_BTD.flatten(0, 1).index_select(0, scored_M)
        scores_M = hidden_MD.float() @ self.weight[0].float()
        scores_BT = torch.zeros_like(temperatures_BT)
        scores_BT = scores_BT.flatten().index_put((scored_M,), scores_M).view_as(targets_BT)
        return scores_BT, scores_BT


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] and the entropy of that distribution, over chunks of tokens.

    The backward recomputes each chunk's logits: one more matrix product instead of `[tokens, vocabulary]` of memory.
    With `keep_logits` they are kept, and the values are the same.
    With `group`, weight_VD holds the vocabulary rows from `first_row` on, and sums over the vocabulary are reduced
    over the group. Every rank returns the same values. `head` has the chunk size and the functions of a chunk.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_ND,
        weight_VD,
        targets_N,
        temperatures_N,
        head,
        product,
        group,
        first_row,
        keep_logits,
    ):
        """Return (logprobs_N, entropy_N), float32."""
        outputs = []
        kept_products = []
        chunks = _chunks(
            head.chunk_tokens,
            hidden_ND,
            targets_N,
            temperatures_N,
        )
        for index, (hidden, targets, temperatures) in enumerate(chunks):
            product_NV = product(index, hidden)
            maximum, total, weighted, target = head.statistics(
                product_NV,
                targets,
                temperatures,
                first_row,
            )
            if keep_logits:
                kept_products.append(product_NV)
            if group is not None:
                highest = maximum.clone()
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
                rescale = (maximum - highest).exp()
                sums = torch.stack([total * rescale, weighted * rescale, target])
                dist.all_reduce(sums, group=group)
                maximum = highest
                total, weighted, target = sums.unbind()
            logsumexp = maximum + total.log()
            entropy = logsumexp - weighted / total
            outputs.append(torch.stack([target - logsumexp, entropy, logsumexp]))
        logprobs_N, entropy_N, logsumexp_N = torch.cat(outputs, 1).unbind()
        ctx.save_for_backward(
            hidden_ND,
            targets_N,
            temperatures_N,
            entropy_N,
            logsumexp_N,
            weight_VD,
            *kept_products,
        )
        ctx.head = head
        ctx.product = product
        ctx.group = group
        ctx.first_row = first_row
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        """Return the gradients of hidden_ND and, unless LoRA freezes it, weight_VD."""
        *per_token, weight_VD = ctx.saved_tensors[:6]
        kept_products = ctx.saved_tensors[6:]
        head = ctx.head
        grad_weight_VD = None
        if ctx.needs_input_grad[1]:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)

        def backward_of_chunk(index, hidden_ND, *per_token):  # when a function ends, its [N, V] are free
            product_NV = kept_products[index] if kept_products else ctx.product(index, hidden_ND)
            grad_NV = head.gradients(product_NV, *per_token, ctx.first_row)
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_NV.T, hidden_ND)
            return grad_NV @ weight_VD

        gradients = []
        chunks = _chunks(
            head.chunk_tokens,
            *per_token,
            grad_logprobs_N,
            grad_entropy_N,
        )
        for index, chunk in enumerate(chunks):
            gradients.append(backward_of_chunk(index, *chunk))
        grad_hidden_ND = torch.cat(gradients)
        if ctx.group is not None:  # each rank saw only its rows of the vocabulary
            dist.all_reduce(grad_hidden_ND, group=ctx.group)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, *[None] * 7


def chunk_product(
    weight_VD: Tensor,
    first_row: int,
    chunk_tokens: int,
    kept: KeptIds | None,
    index: int,
    hidden_ND: Tensor,
) -> Tensor:
    """Return h W^T [N, V] of a chunk over a rank's rows of the vocabulary, and NOT_KEPT for ids that are not in `kept`.

    index: the chunk's number. Does not wait for the device.
    """
    product_NV = hidden_ND @ weight_VD.T
    if kept is None:
        return product_NV
    num_ids = len(weight_VD)
    values = product_NV.view(-1)
    id_C = kept.ids_C - first_row
    wanted_C = (kept.place_C - index * chunk_tokens) * num_ids + id_C
    index_C = wanted_C % len(values)
    is_here_C = (index_C == wanted_C) & (id_C % num_ids == id_C)
    # the others write NOT_KEPT somewhere, which changes no maximum
    kept_C = values[index_C].where(is_here_C, NOT_KEPT)
    values.fill_(NOT_KEPT).scatter_reduce_(0, index_C, kept_C, "amax")
    return product_NV


def chunk_statistics(product_NV, targets_N, temperatures_N, first_row: int):
    """Return (max, sum exp(l - max), sum l exp(l - max), target's l) of one chunk's logits l = h W^T / temperature.

    product_NV: h W^T over a rank's rows of the vocabulary, from `first_row` on.
    """
    logits_NV = product_NV.float() / temperatures_N[:, None]
    maximum_N = logits_NV.amax(-1)
    exp_NV = (logits_NV - maximum_N[:, None]).exp()
    local_N = targets_N - first_row
    mine_N = (local_N >= 0) & (local_N < product_NV.shape[1])
    index_N1 = local_N.where(mine_N, 0)[:, None]
    target_N = logits_NV.gather(1, index_N1)[:, 0].where(mine_N, 0.0)
    total_N = exp_NV.sum(-1)
    weighted_N = (exp_NV * logits_NV).sum(-1)
    return maximum_N, total_N, weighted_N, target_N


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
    """Return the gradient of one chunk's log-probs and entropy with respect to `product_NV`, h W^T, in its dtype.

    d logprob / d logit_v = [v = target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    log_p_NV = product_NV.float() / temperatures_N[:, None] - logsumexp_N[:, None]
    grad_NV = -log_p_NV.exp() * (grad_logprobs_N[:, None] + grad_entropy_N[:, None] * (log_p_NV + entropy_N[:, None]))
    # a comparison, because scattering would write [N, V] in float32 where compiled code needs only registers
    row_V = torch.arange(product_NV.shape[1], device=product_NV.device)
    is_target_NV = row_V == (targets_N - first_row)[:, None]
    grad_NV = grad_NV + grad_logprobs_N[:, None].where(is_target_NV, 0.0)
    return (grad_NV / temperatures_N[:, None]).to(product_NV.dtype)


def _add_product(sum_VD: Tensor, left_VN: Tensor, right_ND: Tensor) -> None:
    """Add left @ right to sum_VD in float32. On a GPU the product itself adds, without a second [V, D]."""
    if left_VN.is_cuda and left_VN.dtype != sum_VD.dtype:
        torch.addmm(
            sum_VD,
            left_VN,
            right_ND,
            out_dtype=sum_VD.dtype,
            out=sum_VD,
        )
    else:
        sum_VD += left_VN @ right_ND


def _chunks(num_tokens: int, hidden_ND: Tensor, *per_token: Tensor):
    """Cut tensors of all tokens into chunks. The chunks are copies: compiled code differs for a part of a tensor."""
    parts = ([part.clone() for part in values.split(num_tokens)] for values in per_token)
    return zip(hidden_ND.split(num_tokens), *parts, strict=True)
