"""The torchtitan model of a Hugging Face config, for any dense size of the families in `hf_folder.FAMILIES`.

They share one decoder, torchtitan's Qwen3: grouped-query attention, SwiGLU, RMSNorm, rotary positions. A family says
whether queries and keys are normalized and whether their projections have a bias. The LM head
(`logprob_head.LogprobHead`) returns the log-probs of given targets and the entropy instead of logits. Left out: mixture
of experts, sliding windows.
"""

import grpo.models.titan_on_cpu  # noqa: F401

# isort: split

from dataclasses import dataclass

import torch
import transformers
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common import CosSinRoPE, Embedding, RMSNorm
from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo.models.attention import FlashAttention, config_of, document_masks, for_compiler, shared_prompt_mask
from grpo.models.hf_folder import FAMILIES, head_dim_of
from grpo.models.logprob_head import LogprobHead
from grpo.types import MicroBatch

# Weights always come from a checkpoint. Drawing random ones first would also fail where a role's first rank is not on
# the first GPU: DTensor's random states take the GPU's index from the rank within the role.
_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}


class Policy(Qwen3Model):
    """A torchtitan decoder whose forward ends in `LogprobHead`, which returns (logprobs_BT, entropy_BT)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def masks(self, micro: MicroBatch):
        """`attention_masks` of a micro-batch, for any kind of attention."""
        attention = self.config.first_attention
        if not isinstance(attention.inner_attention, FlexAttention.Config):
            return document_masks(micro)
        if micro.shared is None:
            return self.get_attention_masks(micro.positions_BT)
        mask_mods = [get_causal_mask_mod(), shared_prompt_mask(micro)]
        return self._create_flex_attention_mask(micro.positions_BT, attention, mask_mods)

    def forward(self, ids_BT, targets_BT, positions_BT, attention_masks, temperatures_BT, scored_M):
        if isinstance(self.config.first_attention.inner_attention, FlashAttention.Config):
            attention_masks = for_compiler(attention_masks)  # here, behind FSDP, which moves tensors to the GPU
        h_BTD = settled(self.tok_embeddings(ids_BT))
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, attention_masks, positions_BT)
        return self.lm_head(self.norm(h_BTD), targets_BT, temperatures_BT, scored_M)


def settled(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """The embeddings as compiled blocks can take them with tensor parallelism: of one kind for all blocks.

    What torchtitan redistributes over ranks is still on its way; torch does not tell apart the code for such a tensor
    and for one that is there, and the one fails with the other.
    """
    if isinstance(hidden_BTD, DTensor) and isinstance(hidden_BTD._local_tensor, AsyncCollectiveTensor):
        hidden_BTD._local_tensor = hidden_BTD._local_tensor.wait()
    return hidden_BTD


class Adapter(Qwen3StateDictAdapter):
    """Torchtitan's names <-> Hugging Face's; the layout of every tensor is the same in both."""

    def __init__(self, model_config: Policy.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        for hf, titan in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv")):
            self.from_hf_map[f"model.layers.{{}}.self_attn.{hf}.bias"] = (
                f"layers.{{}}.attention.qkv_linear.{titan}.bias"
            )


class HFRoPE(CosSinRoPE):
    """Rotary embedding in Hugging Face's layout, with frequencies computed by transformers.

    Torchtitan's own Llama form rotates interleaved pairs and permutes wq and wk between the two layouts, which silently
    scrambles shards under FSDP x TP. Here weights are laid out as in the checkpoint.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        inv_freq: tuple[float, ...] = ()
        """Radians per position, one for each pair of dimensions."""
        attention_factor: float = 1.0
        """Multiplies cos and sin (YaRN)."""

    def _precompute_cache(self) -> torch.Tensor:
        inv_freq = torch.tensor(self.config.inv_freq, dtype=torch.float32)
        angles = torch.outer(torch.arange(self.config.max_seq_len, dtype=torch.float32), inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.attention_factor


def titan_config(
    hf: transformers.PretrainedConfig,
    attention: str,
    chunk_tokens: int,
    compiled: bool = False,
    deterministic: bool = True,
    keep_logits: bool = False,
) -> Decoder.Config:
    """The torchtitan model config of a Hugging Face one, for any dense size.

    `attention` and `deterministic` as in `config_of`, the rest as in `LogprobHead.Config`.
    """
    family = FAMILIES[hf.model_type]
    head_dim = head_dim_of(hf)
    # inverse frequencies [head_dim / 2] and the factor on cos and sin, as transformers' own models compute them
    rope_type = hf.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        inv_freq, attention_factor = hf.rope_parameters["rope_theta"] ** -exponents, 1.0
    else:
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf, device="cpu")
    rope_config = HFRoPE.Config(
        dim=head_dim,
        max_seq_len=hf.max_position_embeddings,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
    )

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_NO_INIT)

    def block() -> Qwen3TransformerBlock.Config:
        attention_config = make_gqa_config(
            dim=hf.hidden_size,
            n_heads=hf.num_attention_heads,
            n_kv_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            wqkv_param_init=_NO_INIT,
            wo_param_init=_NO_INIT,
            inner_attention=config_of(attention, deterministic),
            rope=rope_config,
            qk_norm=norm(head_dim) if family.qk_norm else None,
        )
        attention_config.qkv_linear.wq.bias = attention_config.qkv_linear.wkv.bias = family.qkv_bias
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(hf.hidden_size),
            ffn_norm=norm(hf.hidden_size),
            attention=attention_config,
            feed_forward=make_ffn_config(
                dim=hf.hidden_size, hidden_dim=hf.intermediate_size, w1_param_init=_NO_INIT, w2w3_param_init=_NO_INIT
            ),
        )

    return Policy.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        norm=norm(hf.hidden_size),
        layers=[block() for _ in range(hf.num_hidden_layers)],
        enable_weight_tying=bool(hf.tie_word_embeddings),
        tok_embeddings=Embedding.Config(
            num_embeddings=hf.vocab_size,
            embedding_dim=hf.hidden_size,
            param_init=_NO_INIT,
        ),
        lm_head=LogprobHead.Config(
            in_features=hf.hidden_size,
            out_features=hf.vocab_size,
            param_init=_NO_INIT,
            chunk_tokens=chunk_tokens,
            keep_logits=keep_logits,
            compile=compiled,
        ),
    )
