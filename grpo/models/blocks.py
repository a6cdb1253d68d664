"""Parts of blocks that torchtitan does not have, of Gemma 3 (arXiv:2503.19786) and OLMo 3 (arXiv:2512.13961).

A block with norms behind attention and feed-forward layer, norms of 1 + w or over all heads, GeGLU, scaled
embeddings.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common import Embedding, RMSNorm
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from grpo.models import own_config


@own_config
class OffsetNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + w, in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = 1 + self.weight.float()
        normed = F.rms_norm(
            input.float(),
            self.normalized_shape,
            weight,
            self.eps,
        )
        return normed.to(input.dtype)


@own_config
class AllHeadsNorm(RMSNorm):
    """RMSNorm of queries or keys over all heads together."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [B, T, heads, head_dim], of which each rank has all heads."""
        return super().forward(input.flatten(2)).view_as(input)


@own_config
class GeGLU(FeedForward):
    """A feed-forward layer gated by GELU in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        gate = F.gelu(self.w1(x), approximate="tanh")
        return self.w2(gate * self.w3(x))


class ScaledEmbedding(Embedding):
    """An embedding times a number. The LM head may be tied to its weight, which is not scaled."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        scale: float

    def __init__(self, config: Config):
        super().__init__(config)
        self.scale = config.scale

    def forward(self, input: Tensor) -> Tensor:
        """Look tokens up. The scale is rounded to the dtype of the weight, as the engine's is."""
        hidden = super().forward(input)
        return hidden * torch.tensor(self.scale, dtype=hidden.dtype)


class NormedBlock(Qwen3TransformerBlock):
    """A block that normalizes what attention and feed-forward layer give, before it is added."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        attention_post_norm: Module.Config
        ffn_post_norm: Module.Config
        key_norm: AllHeadsNorm.Config | None = None
        """Of keys over all heads, which are fewer than those of queries; None if both have the same norm."""
        scale: float
        """Factor on the product of query and key."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.attention_post_norm = config.attention_post_norm.build()
        self.ffn_post_norm = config.ffn_post_norm.build()
        self.attention.scaling = config.scale
        if config.key_norm is not None:
            self.attention.k_norm = config.key_norm.build()

    def forward(self, x, attention_masks, positions=None):
        attended = self.attention(self.attention_norm(x), attention_masks, positions)
        x = x + self.attention_post_norm(attended)
        fed = self.feed_forward(self.ffn_norm(x))
        return x + self.ffn_post_norm(fed)


def set_norm_shardings(block: NormedBlock.Config) -> None:
    """Write into a block's config how those norms are sharded that torchtitan does not know.

    A norm over all heads gathers them, and gives each tensor-parallel rank its own back.
    """
    block.attention_post_norm.sharding_config = block.attention_norm.sharding_config
    block.ffn_post_norm.sharding_config = block.ffn_norm.sharding_config
    if block.key_norm is None:
        return
    own_heads = dense_activation_placement(tp=spmd.S(2))
    all_heads = dense_activation_placement(tp=spmd.R)
    for norm in (block.attention.qk_norm, block.key_norm):
        norm.sharding_config = ShardingConfig(
            state_shardings={"weight": dense_param_placement(tp=spmd.R)},
            in_src_shardings={"input": own_heads},
            in_dst_shardings={"input": all_heads},
            out_src_shardings=all_heads,
            out_dst_shardings=own_heads,
        )
