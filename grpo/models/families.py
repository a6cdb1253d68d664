"""The families of models that can be trained, an entry of FAMILIES each, and the torchtitan model of a config.json.

An entry says how a family differs: which of its models cannot be trained, its block, its tensors' names, how it is
sharded, its norm, which of its linear layers take adapters. All share one decoder, torchtitan's Qwen3: grouped-query
attention, some of it within windows, SwiGLU or a mixture of such experts, RMSNorm, rotary positions. blocks.py and
delta_net.py have what torchtitan lacks. The LM head (`logprob_head.LogprobHead`) returns the log-probs of given targets
and the entropy instead of logits; a reward model has a head of one output instead.
Left out: mixtures with shared experts, or with some dense blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torchtitan.models.common import CosSinRoPE, Embedding, RMSNorm
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import Identity
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo.models.attention import (
    FlashAttention,
    attention_config,
    document_masks,
    for_compiler,
    shared_prompt_mask,
    window_mask,
)
from grpo.models.blocks import AllHeadsNorm, GeGLU, Multiplier, NormedBlock, OffsetNorm, ScaledEmbedding
from grpo.models.delta_net import GatedAttention, GatedDeltaNet, document_chunks
from grpo.models.experts import ExpertsReader, MoEBlock, moe_config, settled
from grpo.models.logprob_head import LogprobHead, ScoreHead
from grpo.types import MicroBatch

# Endings of the names in `architectures`: of language models, of those that see images too, and of models that score
WRITES = "ForCausalLM"
SEES = "ForConditionalGeneration"
SCORES = "ForSequenceClassification"
# Kinds of rotary positions whose frequencies do not change with the length
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What transformers calls the attention of a layer with a window
WINDOWED = "sliding_attention"
# and a layer with states in place of attention. It is taken to have a window of 0 tokens.
LINEAR = "linear_attention"
# Weights always come from a checkpoint. Drawing random ones first would also fail where a role's first rank is not on
# the first GPU: DTensor's random states take the GPU's index from the rank within the role.
_NO_INIT = dict.fromkeys(("weight", "bias", "A_log", "dt_bias"), skip_param_init)

# ---------------------------------------------------------------------------------------------------------------------
# Dense decoders


def dense_block(
    hf: transformers.PretrainedConfig,
    rope: Module.Config,
    inner_attention: Module.Config,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> Qwen3TransformerBlock.Config:
    """Return torchtitan's config of a block of grouped-query attention and SwiGLU.

    qk_norm: queries and keys are normalized per head. qkv_bias: the projections to queries, keys and values have a
    bias.
    """
    attention = make_gqa_config(
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim_of(hf),
        wqkv_param_init=_NO_INIT,
        wo_param_init=_NO_INIT,
        inner_attention=inner_attention,
        rope=rope,
        qk_norm=_norm(hf, head_dim_of(hf)) if qk_norm else None,
    )
    attention.qkv_linear.wq.bias = qkv_bias
    attention.qkv_linear.wkv.bias = qkv_bias
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(hf, hf.hidden_size),
        ffn_norm=_norm(hf, hf.hidden_size),
        attention=attention,
        feed_forward=make_ffn_config(
            dim=hf.hidden_size,
            hidden_dim=hf.intermediate_size,
            w1_param_init=_NO_INIT,
            w2w3_param_init=_NO_INIT,
        ),
    )


def unsupported_in_dense(
    raw: dict[str, Any],
    config: transformers.PretrainedConfig,
    *,
    other_layers: str = "",
    partial_rotary: bool = False,
    activation: str = "silu",
) -> Iterator[str]:
    """Yield each reason why a dense model cannot be trained. `raw` is its config.json as it stands.

    other_layers: the kind that this family's layers may have besides full attention. partial_rotary: they may have
    rotary positions over a part of the head. activation: the family's only one.
    """
    window = getattr(config, "sliding_window", None)
    if window and other_layers != WINDOWED:
        yield (
            f"sliding_window={window} is not supported for model_type {config.model_type}; if no prompt with its "
            f"completion is longer than {window} tokens, nothing differs: set it to null in config.json"
        )
    yield from _unsupported_layers(config, other_layers)
    for kind in sorted({*layer_kinds(config)}):
        rotary = rotary_parameters(config, kind)
        rope_type = rotary.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            yield f"rope_type {rope_type} is not supported, only {', '.join(ROPE_TYPES)}"
        is_partial = rotary.get("partial_rotary_factor", 1.0) != 1.0
        if is_partial and not partial_rotary or raw.get("use_mrope"):
            yield "only rotary positions over the whole head are supported, no partial_rotary_factor or use_mrope"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        yield f"attention_bias and mlp_bias are not supported for model_type {config.model_type}"
    wanted = getattr(config, "hidden_activation", None) or config.hidden_act
    if wanted != activation:
        yield f"hidden_act {wanted} is not supported, only {activation}"


def _unsupported_layers(config: transformers.PretrainedConfig, other_kind: str) -> Iterator[str]:
    """Yield each reason why a layer does not attend as its family's do here."""
    kinds = layer_kinds(config)
    if len(kinds) != config.num_hidden_layers:
        yield f"layer_types has {len(kinds)} entries for num_hidden_layers={config.num_hidden_layers}"
    for kind in sorted({*kinds} - {"full_attention", other_kind}):
        yield f"{kind} in layer_types is not supported for model_type {config.model_type}"


DENSE_LINEARS = {
    "q_proj": "attention.qkv_linear.wq",
    "k_proj": "attention.qkv_linear.wk",
    "v_proj": "attention.qkv_linear.wv",
    "o_proj": "attention.wo",
    "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3",
    "down_proj": "feed_forward.w2",
}


class DenseNames(Qwen3StateDictAdapter):
    """Torchtitan's names <-> Hugging Face's. The layout of every tensor is the same in both."""

    def __init__(self, model_config: "Policy.Config", hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        for name in ("q_proj", "k_proj", "v_proj"):
            self.from_hf_map[f"model.layers.{{}}.self_attn.{name}.bias"] = f"layers.{{}}.{DENSE_LINEARS[name]}.bias"
        if isinstance(model_config.lm_head, ScoreHead.Config):
            self.from_hf_map["score.weight"] = self.from_hf_map.pop("lm_head.weight")


# ---------------------------------------------------------------------------------------------------------------------
# Dense decoders with norms behind attention and feed-forward layer


def gemma3_block(
    hf: transformers.PretrainedConfig,
    rope: Module.Config,
    inner_attention: Module.Config,
) -> NormedBlock.Config:
    """Return torchtitan's config of a block of Gemma 3, whose layers have a norm before and a norm behind them."""
    dense = dense_block(hf, rope, inner_attention, qk_norm=True)
    linears = dense.feed_forward
    return NormedBlock.Config(
        attention_norm=dense.attention_norm,
        attention=dense.attention,
        attention_post_norm=_norm(hf, hf.hidden_size),
        ffn_norm=dense.ffn_norm,
        feed_forward=GeGLU.Config(w1=linears.w1, w2=linears.w2, w3=linears.w3),
        ffn_post_norm=_norm(hf, hf.hidden_size),
        scale=hf.query_pre_attn_scalar**-0.5,
    )


def unsupported_in_gemma3(raw: dict[str, Any], config: transformers.PretrainedConfig) -> Iterator[str]:
    """Yield each reason why a Gemma 3 cannot be trained. `raw` is its config.json as it stands."""
    yield from unsupported_in_dense(raw, config, other_layers=WINDOWED, activation="gelu_pytorch_tanh")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name):
            yield f"{name} is not supported"


def olmo3_block(
    hf: transformers.PretrainedConfig,
    rope: Module.Config,
    inner_attention: Module.Config,
) -> NormedBlock.Config:
    """Return torchtitan's config of a block of OLMo 3, whose layers have no norm before and one behind them."""
    dense = dense_block(hf, rope, inner_attention)
    head_dim = head_dim_of(hf)
    norm_of = partial(AllHeadsNorm.Config, eps=hf.rms_norm_eps, param_init=_NO_INIT)
    dense.attention.qk_norm = norm_of(normalized_shape=hf.num_attention_heads * head_dim)
    return NormedBlock.Config(
        attention_norm=Identity.Config(),
        attention=dense.attention,
        attention_post_norm=dense.attention_norm,
        ffn_norm=Identity.Config(),
        feed_forward=dense.feed_forward,
        ffn_post_norm=dense.ffn_norm,
        key_norm=norm_of(normalized_shape=hf.num_key_value_heads * head_dim),
        scale=head_dim**-0.5,
    )


def granite_block(
    hf: transformers.PretrainedConfig,
    rope: Module.Config,
    inner_attention: Module.Config,
) -> NormedBlock.Config:
    """Return torchtitan's config of a block of Granite, which multiplies what it adds by a number."""
    dense = dense_block(hf, rope, inner_attention)
    return NormedBlock.Config(
        attention_norm=dense.attention_norm,
        attention=dense.attention,
        attention_post_norm=Multiplier.Config(factor=hf.residual_multiplier),
        ffn_norm=dense.ffn_norm,
        feed_forward=dense.feed_forward,
        ffn_post_norm=Multiplier.Config(factor=hf.residual_multiplier),
        scale=hf.attention_multiplier,
    )


class NormedNames(DenseNames):
    """Names for models with norms behind attention and feed-forward layer."""

    def __init__(self, model_config: "Policy.Config", hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        norms = {
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "ffn_post_norm",
        }
        for theirs, ours in norms.items():
            self.from_hf_map[f"model.layers.{{}}.{theirs}.weight"] = f"layers.{{}}.{ours}.weight"


# ---------------------------------------------------------------------------------------------------------------------
# Dense decoders with gated delta nets in most layers


def qwen3_5_block(
    hf: transformers.PretrainedConfig, rope: Module.Config | None, inner_attention: Module.Config
) -> Qwen3TransformerBlock.Config:
    """Return torchtitan's config of a block of Qwen3.5: with gated attention, or without `rope` a gated delta net."""
    block = dense_block(hf, rope or HFRoPE.Config(dim=0, max_seq_len=0), inner_attention, qk_norm=True)
    if rope is None:
        block.attention = GatedDeltaNet.Config(hf=hf, param_init=_NO_INIT)
        return block
    block.attention.qkv_linear.wq.out_features *= 2
    parts = {part.name: getattr(block.attention, part.name) for part in fields(block.attention)}
    block.attention = GatedAttention.Config(**parts)
    return block


def unsupported_in_qwen3_5(raw: dict[str, Any], config: transformers.PretrainedConfig) -> Iterator[str]:
    """Yield each reason why a Qwen3.5 cannot be trained. `raw` is its config.json, or the part of it about text."""
    yield from unsupported_in_dense(raw, config, other_layers=LINEAR, partial_rotary=True)
    if raw.get("output_gate_type", "silu") not in ("silu", "swish"):
        yield f"output_gate_type {raw['output_gate_type']} is not supported, only silu"
    if not raw.get("attn_output_gate", True):
        yield "attn_output_gate=false is not supported"
    if "full_attention" not in layer_kinds(config):
        yield "layer_types has no full_attention; models of gated delta nets alone are not supported"
    if gives_scores(config):
        yield "a Qwen3.5 cannot be a reward model here; take one of another family"


class Qwen3_5Names(DenseNames):
    """Names for models with gated delta nets. A folder may have them below a prefix, beside other parts."""

    def __init__(self, model_config: "Policy.Config", hf_assets_path: str | None, prefix: str = "model."):
        super().__init__(model_config, hf_assets_path)
        parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d", "norm")
        for part in (*(f"{part}.weight" for part in parts), "A_log", "dt_bias"):
            self.from_hf_map[f"model.layers.{{}}.linear_attn.{part}"] = f"layers.{{}}.attention.{part}"
        self.prefix = prefix

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under Hugging Face's names, in their order."""
        named = super().to_hf(state_dict)
        return {name.replace("model.", self.prefix, 1): value for name, value in named.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Undo `to_hf`."""
        return super().from_hf({name.replace(self.prefix, "model.", 1): value for name, value in hf_state_dict.items()})

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        """Accept layers without rotary positions, which torchtitan's own check does not."""


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts


def moe_block(
    hf: transformers.PretrainedConfig,
    rope: Module.Config,
    inner_attention: Module.Config,
) -> MoEBlock.Config:
    """Return torchtitan's config of a block of grouped-query attention and experts, as Qwen3 has them."""
    dense = dense_block(hf, rope, inner_attention, qk_norm=True)
    return MoEBlock.Config(
        attention_norm=dense.attention_norm,
        ffn_norm=dense.ffn_norm,
        attention=dense.attention,
        moe=moe_config(
            hf.hidden_size,
            hf.moe_intermediate_size,
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.norm_topk_prob,
        ),
    )


def unsupported_in_moe(raw: dict[str, Any], config: transformers.PretrainedConfig) -> Iterator[str]:
    """Yield each reason why a mixture of experts cannot be trained. `raw` is its config.json as it stands."""
    yield from unsupported_in_dense(raw, config)
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        yield (
            f"decoder_sparse_step={config.decoder_sparse_step} and mlp_only_layers={config.mlp_only_layers} make some "
            "blocks dense; only mixtures whose every block has experts are supported"
        )
    if config.num_experts_per_tok > config.num_experts:
        yield f"num_experts_per_tok={config.num_experts_per_tok} is more than num_experts={config.num_experts}"


class MoENames(DenseNames):
    """Names for models in which a layer's experts are stacked tensors. Their Hugging Face name has * for the number.

    Torchtitan's own names are those of the experts that a rank holds, which other ranks cannot follow.
    """

    stacked_names = {"w1_EFD": "gate_proj", "w2_EDF": "down_proj", "w3_EFD": "up_proj"}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under Hugging Face's names, in their order."""
        named = {}
        for name, value in state_dict.items():
            layer, separator, kind = name.rpartition(".moe.routed_experts.inner_experts.")
            if separator:
                named[f"model.{layer}.mlp.experts.*.{self.stacked_names[kind]}.weight"] = value
            else:
                named |= super().to_hf({name: value})
        return named

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Undo `to_hf`."""
        kinds = {name: kind for kind, name in self.stacked_names.items()}
        named = super().from_hf({name: value for name, value in hf_state_dict.items() if "*" not in name})
        for name, value in hf_state_dict.items():
            if "*" in name:
                _, layers, index, _, _, _, kind, _ = name.split(".")
                named[f"{layers}.{index}.moe.routed_experts.inner_experts.{kinds[kind]}"] = value
        return named

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> ExpertsReader:
        """Return a reader that stacks experts. `from_quantized` is torchtitan's argument."""
        return ExpertsReader(path)


# ---------------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True)
class Family:
    """What the code needs to know about a kind of model."""

    block: Callable[..., Module.Config] = dense_block
    """(Hugging Face's config, rotary positions, inner attention) -> torchtitan's config of a block."""
    unsupported: Callable[[dict[str, Any], transformers.PretrainedConfig], Iterator[str]] = unsupported_in_dense
    """(config.json as it stands, as transformers reads it) -> each reason why such a model cannot be trained."""
    names: Callable[..., Qwen3StateDictAdapter] = DenseNames
    """Torchtitan's names of tensors <-> Hugging Face's."""
    parallelize: Callable[..., nn.Module] = parallelize_qwen3
    """Torchtitan's function that applies tensor parallelism, activation checkpointing, compilation and FSDP."""
    norm: type[RMSNorm] = RMSNorm
    """The norm of hidden states, and of queries and keys per head."""
    embedding_scale: Callable[[transformers.PretrainedConfig], float] | None = None
    """Embeddings are multiplied by it."""
    linears: dict[str, str] = field(default_factory=lambda: DENSE_LINEARS)
    """The linear layers that take adapters, in the order in which a forward meets them: Hugging Face's name -> place in
    a block."""
    carried: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not trained, and that an export carries along."""


QWEN3_5 = Family(
    block=qwen3_5_block,
    unsupported=unsupported_in_qwen3_5,
    names=Qwen3_5Names,
    norm=OffsetNorm,
    carried=("model.visual.", "mtp."),
)
# By the model_type of config.json
FAMILIES = {
    "qwen3": Family(block=partial(dense_block, qk_norm=True)),
    "qwen2": Family(block=partial(dense_block, qkv_bias=True)),  # Qwen2, Qwen2.5, R1-Distill-Qwen
    "llama": Family(),  # Llama 3, R1-Distill-Llama
    "smollm3": Family(),
    "mistral": Family(unsupported=partial(unsupported_in_dense, other_layers=WINDOWED)),
    "gemma3_text": Family(
        block=gemma3_block,
        unsupported=unsupported_in_gemma3,
        names=NormedNames,
        norm=OffsetNorm,
        embedding_scale=lambda hf: hf.hidden_size**0.5,
    ),
    "olmo3": Family(
        block=olmo3_block, unsupported=partial(unsupported_in_dense, other_layers=WINDOWED), names=NormedNames
    ),
    "granite": Family(block=granite_block, embedding_scale=lambda hf: hf.embedding_multiplier),
    "qwen3_moe": Family(
        block=moe_block,
        unsupported=unsupported_in_moe,
        names=MoENames,
        linears={name: place for name, place in DENSE_LINEARS.items() if place.startswith("attention.")},
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5": replace(QWEN3_5, names=partial(Qwen3_5Names, prefix="model.language_model.")),  # sees images too
}


def family_of(hf: transformers.PretrainedConfig) -> Family:
    """Return the family of a model. `hf_folder.read_hf_config` read its config and refuses unknown families."""
    return FAMILIES[hf.model_type]


def gives_scores(hf: transformers.PretrainedConfig) -> bool:
    """Say whether a model is a sequence classifier, as reward models are, and not a language model."""
    return any(name.endswith(SCORES) for name in hf.architectures or ())


def has_experts(hf: transformers.PretrainedConfig) -> bool:
    """Say whether a model is a mixture of experts."""
    return family_of(hf).block is moe_block


def has_states(hf: transformers.PretrainedConfig) -> bool:
    """Say whether some layers of a model have states in place of attention."""
    return LINEAR in layer_kinds(hf)


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Policy(Qwen3Model):
    """A torchtitan decoder whose forward ends in `LogprobHead`, which returns (logprobs_BT, entropy_BT)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        windows: tuple[int | None, ...]
        """Of each layer, see `DocumentMasks.window`; 0 for a layer with states in place of attention."""
        logits_divisor: float = 1.0
        """Logits are divided by it, besides the temperature."""

        @property
        def first_attention(self) -> GQAttention.Config:
            """The attention of the first layer that has one."""
            return next(block.attention for block in self.layers if isinstance(block.attention, GQAttention.Config))

    def masks(self, micro: MicroBatch) -> dict[int | None, Any]:
        """Return a micro-batch's masks for each window of the layers, as this model's kind of attention takes them."""
        windows = dict.fromkeys(self.config.windows)
        masks = {}
        if 0 in windows:
            del windows[0]
            masks[0] = document_chunks(micro)
        attention = self.config.first_attention
        if not isinstance(attention.inner_attention, FlexAttention.Config):
            return masks | {window: document_masks(micro, window) for window in windows}
        documents = get_efficient_causal_mask_mod_for_packed_document(micro.positions_BT)
        if micro.shared is not None:
            documents = shared_prompt_mask(micro)
        for window in windows:
            parts = [get_causal_mask_mod(), documents]
            if window is not None:
                parts.append(window_mask(micro.positions_BT, window))
            masks[window] = self._create_flex_attention_mask(micro.positions_BT, attention, parts)
        return masks

    def forward(
        self,
        ids_BT,
        targets_BT,
        positions_BT,
        attention_masks,
        temperatures_BT,
        scored_M,
        kept=None,
    ):
        """Return (logprobs_BT, entropy_BT); see `LogprobHead`."""
        if isinstance(self.config.first_attention.inner_attention, FlashAttention.Config):
            # here, behind FSDP, which moves tensors to the GPU
            attention_masks = attention_masks | {
                window: for_compiler(masks) for window, masks in attention_masks.items() if window != 0
            }
        h_BTD = settled(self.tok_embeddings(ids_BT))
        for layer, window in zip(self.layers.values(), self.config.windows, strict=True):
            h_BTD = layer(h_BTD, attention_masks[window], positions_BT)
        if self.config.logits_divisor != 1:
            temperatures_BT = temperatures_BT * self.config.logits_divisor
        return self.lm_head(
            self.norm(h_BTD),
            targets_BT,
            temperatures_BT,
            scored_M,
            kept,
        )


class HFRoPE(CosSinRoPE):
    """Rotary embedding in Hugging Face's layout, with frequencies computed by transformers.

    Torchtitan's own Llama form rotates interleaved pairs and permutes wq and wk between the two layouts, which silently
    scrambles shards under FSDP x TP. Here weights are laid out as in the checkpoint.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        inv_freq: tuple[float, ...] = ()
        """Radians per position, one for each pair of dimensions; none in a layer without positions."""
        attention_factor: float = 1.0
        """Multiplies cos and sin (YaRN)."""

    is_filled = False

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        if not self.is_filled:  # by another layer, which shares it
            super()._init_self_buffers(buffer_device=buffer_device)
            self.is_filled = True

    def _precompute_cache(self) -> torch.Tensor:
        inv_freq = torch.tensor(self.config.inv_freq, dtype=torch.float32)
        positions_T = torch.arange(self.config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions_T, inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return table * self.config.attention_factor

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions, or the first dimensions that have frequencies."""
        width = 2 * len(self.config.inv_freq)
        if not width:
            return query, key
        if width == query.shape[-1]:
            return super().forward(query, key, positions)
        rotated = super().forward(query[..., :width], key[..., :width], positions)
        query, key = (
            torch.cat([first, whole[..., width:]], dim=-1) for first, whole in zip(rotated, (query, key), strict=True)
        )
        return query, key


def titan_config(
    hf: transformers.PretrainedConfig,
    attention: str,
    chunk_tokens: int,
    compiled: bool = False,
    keep_logits: bool = False,
) -> Policy.Config:
    """Return the torchtitan config of a Hugging Face config, for any size of a family.

    `attention` is a kind that `attention_config` knows, the rest is as in `LogprobHead.Config`.
    """
    block = family_of(hf).block
    head = LogprobHead.Config(
        in_features=hf.hidden_size,
        out_features=hf.vocab_size,
        param_init=_NO_INIT,
        chunk_tokens=chunk_tokens,
        keep_logits=keep_logits,
        compile=compiled,
    )
    if gives_scores(hf):
        head = ScoreHead.Config(in_features=hf.hidden_size, out_features=1, param_init=_NO_INIT)
    layers = []
    for layer in range(hf.num_hidden_layers):
        layers.append(block(hf, _rope(hf, layer), attention_config(attention)))
    return Policy.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        norm=_norm(hf, hf.hidden_size),
        windows=tuple(windows_of(hf)),
        logits_divisor=getattr(hf, "logits_scaling", 1.0),
        layers=layers,
        enable_weight_tying=bool(hf.tie_word_embeddings) and not gives_scores(hf),
        tok_embeddings=_embedding(hf),
        lm_head=head,
    )


def empty_policy(hf: transformers.PretrainedConfig) -> nn.Module:
    """Build the model without memory for its weights, on torch's meta device, to count its parts."""
    config = titan_config(hf, "documents", chunk_tokens=1)
    with torch.device("meta"):
        return config.build()


def layer_kinds(hf: transformers.PretrainedConfig) -> list[str]:
    """Return transformers' word for each layer's attention: sliding_attention with a window, else full_attention."""
    kind = WINDOWED if getattr(hf, "sliding_window", None) else "full_attention"
    return getattr(hf, "layer_types", None) or [kind] * hf.num_hidden_layers


def windows_of(hf: transformers.PretrainedConfig) -> list[int | None]:
    """Return the window of each layer: how many tokens a token attends to, itself included; None for all before it.

    It is 0 for a layer with states in place of attention.
    """
    windows = {LINEAR: 0, WINDOWED: getattr(hf, "sliding_window", None)}
    return [windows.get(kind) for kind in layer_kinds(hf)]


def state_values(hf: transformers.PretrainedConfig) -> int:
    """Return how many numbers the states of one sequence are, in all layers; 0 for a model without states."""
    num_layers = windows_of(hf).count(0)
    if not num_layers:
        return 0
    return num_layers * hf.linear_num_value_heads * hf.linear_key_head_dim * hf.linear_value_head_dim


def head_dim_of(config: transformers.PretrainedConfig) -> int:
    """Return the width of one attention head. Where a config leaves it out, it follows from the other numbers."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_parameters(hf: transformers.PretrainedConfig, kind: str) -> dict[str, Any]:
    """Return the rotary embedding's parameters in layers of a kind. Some models have the same ones in all."""
    return hf.rope_parameters.get(kind, hf.rope_parameters)


def _norm(hf: transformers.PretrainedConfig, size: int) -> RMSNorm.Config:
    return family_of(hf).norm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_NO_INIT)


def _embedding(hf: transformers.PretrainedConfig) -> Embedding.Config:
    fields = {"num_embeddings": hf.vocab_size, "embedding_dim": hf.hidden_size, "param_init": _NO_INIT}
    scale = family_of(hf).embedding_scale
    if scale is None:
        return Embedding.Config(**fields)
    return ScaledEmbedding.Config(**fields, scale=scale(hf))


def _rope(hf: transformers.PretrainedConfig, layer: int) -> HFRoPE.Config | None:
    """Return a layer's rotary embedding, with frequencies and factor as transformers' models compute them.

    None for a layer without attention.
    """
    head_dim = head_dim_of(hf)
    rotates = getattr(hf, "no_rope_layers", None)  # despite its name: 1 for layers that rotate, 0 for others
    if rotates and not rotates[layer]:
        return HFRoPE.Config(dim=head_dim, max_seq_len=hf.max_position_embeddings)
    kind = layer_kinds(hf)[layer]
    if kind == LINEAR:
        return None
    parameters = rotary_parameters(hf, kind)
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        inv_freq = parameters["rope_theta"] ** -exponents
        attention_factor = 1.0
    else:
        of_kind = {"layer_type": kind} if kind in hf.rope_parameters else {}
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf, device="cpu", **of_kind)
    return HFRoPE.Config(
        dim=head_dim,
        max_seq_len=hf.max_position_embeddings,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
    )
