"""Mixture of experts: a block whose feed-forward layer is many small ones, of which a router chooses a few per token.

The layers are torchtitan's, except for what would make them another policy than the generators': experts that cast to
bfloat16, a gate in float32, and load balancing, whose bias a checkpoint of Qwen3 does not have and vLLM does not add.
Left out: expert parallelism, shared experts. Letters besides grpo/types.py's: X all experts of a layer (in torchtitan's
names E), R rows that experts compute, one for each token and expert of it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.qwen3.model import Qwen3TransformerBlock


def settled(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Hidden states, waited for.

    With tensor parallelism they may be on their way. Then torch takes code that it compiled for such a tensor also for
    one that is there, which fails; and experts, as `local_map` calls them, lose the gradient of their input.
    """
    if isinstance(hidden_BTD, DTensor) and isinstance(hidden_BTD._local_tensor, AsyncCollectiveTensor):
        hidden_BTD._local_tensor = hidden_BTD._local_tensor.wait()
    return hidden_BTD


class Experts(GroupedExperts):
    """SwiGLU experts that compute in the dtype of their weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_X: torch.Tensor) -> torch.Tensor:
        """Rows of x_RD lie expert after expert, as many as the counts say."""
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        ends_X = num_tokens_per_expert_X.cumsum(0, dtype=torch.int32)
        h_RF = F.silu(torch._grouped_mm(x_RD, gate.mT, offs=ends_X)) * torch._grouped_mm(x_RD, up.mT, offs=ends_X)
        return torch._grouped_mm(h_RF, down.mT, offs=ends_X)


class Router(TokenChoiceTopKRouter):
    """The gate, in the dtype of its weights as vLLM's is, then softmax in float32, and the largest scores' experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each token's experts' scores (float32 [B, T, E]), the experts [B, T, E], and tokens per expert [X]."""
        scores_BTX = F.softmax(self.gate(x_BTD), dim=-1, dtype=torch.float32)
        experts_BTE = scores_BTX.topk(self.top_k, dim=-1, sorted=False).indices.sort(dim=-1).values
        scores_BTE = scores_BTX.gather(-1, experts_BTE)
        if self.route_norm:
            scores_BTE = scores_BTE / scores_BTE.sum(dim=-1, keepdim=True)
        chosen_BTX = torch.zeros_like(scores_BTX, dtype=torch.bool).scatter(-1, experts_BTE, True)
        return scores_BTE, experts_BTE, chosen_BTX.sum(dim=(0, 1))


class Mixture(MoE):
    """The router, and for each token the sum of its experts' outputs times their scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        del self.tokens_per_expert_E  # for load balancing

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        pass

    # torchtitan declares a sharding for this argument name
    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        x_BTD = settled(x_BLD)
        return self.routed_experts(x_BTD, *self.router(x_BTD))


class MixtureBlock(Qwen3TransformerBlock):
    """A block with a mixture of experts in place of one feed-forward layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x, attention_masks, positions=None):
        x = x + self.attention(self.attention_norm(x), attention_masks, positions)
        return x + self.moe(self.ffn_norm(x))


def mixture_config(hidden_size: int, width: int, num_experts: int, chosen: int, renormalize: bool) -> Mixture.Config:
    """torchtitan's config of `num_experts` experts of `width`, `chosen` for each token, and their router.

    renormalize: the chosen experts' scores are divided by their sum.
    """
    no_init = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD", "weight"), skip_param_init)
    return Mixture.Config(
        num_experts=num_experts,
        load_balance_coeff=None,
        router=Router.Config(
            num_experts=num_experts,
            top_k=chosen,
            score_func="softmax",
            route_norm=renormalize,
            gate=Linear.Config(in_features=hidden_size, out_features=num_experts, bias=False, param_init=no_init),
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=hidden_size, hidden_dim=width, num_experts=num_experts, param_init=no_init
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=num_experts, top_k=chosen),
        ),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Names. A folder has a matrix for each expert, ...mlp.experts.7.up_proj.weight; here those of a layer are one tensor,
# stacked by expert, whose Hugging Face name has a * for the number.


def by_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under the name, or the names, that it has in a folder; a stacked one as a view for each expert."""
    if "*" not in name:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield name.replace("*", str(expert)), part


class ExpertsReader(HuggingFaceStorageReader):
    """Reads each expert's matrix of a folder as a chunk of the stacked tensor, of which a rank may hold any shard."""

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        for name in list(tensors):
            if not (match := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)):
                continue
            stacked, start = f"{match[1]}*{match[3]}", [int(match[2]), 0, 0]
            one = tensors.pop(name)
            whole = tensors.setdefault(stacked, TensorStorageMetadata(one.properties, torch.Size([0, *one.size]), []))
            whole.size = torch.Size([whole.size[0] + 1, *one.size])
            whole.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size([1, *one.size])))
            places[MetadataIndex(stacked, start)] = places.pop(MetadataIndex(name, [0, 0]))
        return metadata

    def _process_read_request(self, f, req: ReadItem, planner: LoadPlanner) -> None:
        name, start = req.storage_index.fqn, req.storage_index.offset
        if "*" not in name:
            return super()._process_read_request(f, req, planner)
        target = planner.resolve_tensor(req).detach()
        part = [slice(at, at + size) for at, size in zip(req.storage_offsets[1:], req.lengths[1:], strict=True)]
        target[0] = f.get_slice(name.replace("*", str(start[0])))[tuple(part)]
        planner.commit_tensor(req, target)
