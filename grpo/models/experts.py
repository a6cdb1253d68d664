"""Mixture of experts (MoE): a router chooses a few of a block's many small feed-forward layers for each token.

The layers are torchtitan's, without what would make the policy differ from the generators': experts that cast to
bfloat16, a gate in float32, and load balancing, whose bias Qwen3's checkpoints do not have and vLLM does not add.
Left out: shared experts. Letters besides grpo/types.py's: X all experts of a layer (in torchtitan's
names E), R rows that experts compute, one for each token and each of its experts.
"""

import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from transformers import PretrainedConfig

from grpo.models import own_config


def settled(hidden_BTD: Tensor) -> Tensor:
    """Wait for hidden states that tensor parallelism is still sending, and return them.

    Otherwise torch uses code that it compiled for such a tensor for one that has arrived, which fails. And experts, as
    `local_map` calls them, lose the gradient of their input.
    """
    if isinstance(hidden_BTD, DTensor) and isinstance(hidden_BTD._local_tensor, AsyncCollectiveTensor):
        hidden_BTD._local_tensor = hidden_BTD._local_tensor.wait()
    return hidden_BTD


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which is all of it if it is not sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


@own_config
class Experts(GroupedExperts):
    """SwiGLU experts that compute in the dtype of their weights."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_X: Tensor) -> Tensor:
        """Compute rows that lie expert after expert, `num_tokens_per_expert_X` rows each."""
        ends_X = num_tokens_per_expert_X.cumsum(0, dtype=torch.int32)
        gate_XDF = local_part(self.w1_EFD).mT
        up_XDF = local_part(self.w3_EFD).mT
        down_XFD = local_part(self.w2_EDF).mT
        gate_RF = F.silu(torch._grouped_mm(x_RD, gate_XDF, offs=ends_X))
        up_RF = torch._grouped_mm(x_RD, up_XDF, offs=ends_X)
        return torch._grouped_mm(gate_RF * up_RF, down_XFD, offs=ends_X)


@own_config
class Router(TokenChoiceTopKRouter):
    """The gate, in the dtype of its weights as vLLM's is, then softmax in float32, and the largest scores' experts."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's experts' scores (float32 [B, T, E]), the experts [B, T, E], and tokens per expert [X]."""
        scores_BTX = F.softmax(self.gate(x_BTD), dim=-1, dtype=torch.float32)
        largest = scores_BTX.topk(self.top_k, dim=-1, sorted=False)
        experts_BTE = largest.indices.sort(dim=-1).values
        scores_BTE = scores_BTX.gather(-1, experts_BTE)
        if self.route_norm:
            scores_BTE = scores_BTE / scores_BTE.sum(dim=-1, keepdim=True)
        chosen_BTX = torch.zeros_like(scores_BTX, dtype=torch.bool)
        chosen_BTX = chosen_BTX.scatter(-1, experts_BTE, True)
        return scores_BTE, experts_BTE, chosen_BTX.sum(dim=(0, 1))


@own_config
class MoELayer(MoE):
    """The router, and for each token the sum of its experts' outputs times their scores."""

    def __init__(self, config: MoE.Config):
        super().__init__(config)
        del self.tokens_per_expert_E  # for load balancing

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        pass

    # torchtitan declares a sharding for this argument name
    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BTD = settled(x_BLD)
        return self.routed_experts(x_BTD, *self.router(x_BTD))


def moe_config(hf: PretrainedConfig) -> MoELayer.Config:
    """Return torchtitan's config of a layer's experts and their router."""
    no_init = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD", "weight"), skip_param_init)
    return MoELayer.Config(
        num_experts=hf.num_experts,
        load_balance_coeff=None,
        router=Router.Config(
            num_experts=hf.num_experts,
            top_k=hf.num_experts_per_tok,
            score_func="softmax",
            route_norm=hf.norm_topk_prob,
            gate=Linear.Config(
                in_features=hf.hidden_size,
                out_features=hf.num_experts,
                bias=False,
                param_init=no_init,
            ),
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=hf.hidden_size,
                hidden_dim=hf.moe_intermediate_size,
                num_experts=hf.num_experts,
                param_init=no_init,
            ),
            # sends tokens to their experts' ranks where those are spread, see `trainer.expert_parallel`
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=hf.num_experts, top_k=hf.num_experts_per_tok),
        ),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Names. A folder has a matrix for each expert, ...mlp.experts.7.up_proj.weight; here those of a layer are one tensor,
# stacked by expert, whose Hugging Face name has a * for the number.


def by_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor under its name in a folder; a stacked one as a view for each expert, under that expert's name."""
    if "*" not in name:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield name.replace("*", str(expert)), part


class ExpertsReader(HuggingFaceStorageReader):
    """Reads each expert's matrix as a chunk of the stacked tensor. A rank may hold any shard of that tensor."""

    def read_metadata(self) -> Metadata:
        """Return the folder's metadata with the experts of a layer as one tensor."""
        metadata = super().read_metadata()
        tensors = metadata.state_dict_metadata
        files = metadata.storage_data
        for name in list(tensors):
            match = re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)
            if match is None:
                continue
            stacked_name = f"{match[1]}*{match[3]}"
            start = [int(match[2]), 0, 0]
            matrix = tensors.pop(name)
            no_experts = torch.Size([0, *matrix.size])
            empty = TensorStorageMetadata(matrix.properties, no_experts, [])
            stacked = tensors.setdefault(stacked_name, empty)
            stacked.size = torch.Size([stacked.size[0] + 1, *matrix.size])
            chunk_size = torch.Size([1, *matrix.size])
            stacked.chunks.append(ChunkStorageMetadata(torch.Size(start), chunk_size))
            file = files.pop(MetadataIndex(name, [0, 0]))
            files[MetadataIndex(stacked_name, start)] = file
        return metadata

    def _process_read_request(
        self,
        f,
        req: ReadItem,
        planner: LoadPlanner,
    ) -> None:
        name = req.storage_index.fqn
        if "*" not in name:
            return super()._process_read_request(f, req, planner)
        name = name.replace("*", str(req.storage_index.offset[0]))
        target = planner.resolve_tensor(req).detach()
        bounds = zip(req.storage_offsets[1:], req.lengths[1:], strict=True)
        slices = tuple(slice(start, start + size) for start, size in bounds)
        target[0] = f.get_slice(name)[slices]
        planner.commit_tensor(req, target)
