"""The families of models that can be trained, an entry of FAMILIES each, and the torchtitan model of a config.json.

An entry says how a family differs: which of its models cannot be trained, its block, its tensors' names, its norm,
which of its linear layers take adapters. All share one decoder, torchtitan's Qwen3: grouped-query attention, some of it
within windows, SwiGLU or a mixture of such experts, RMSNorm, rotary positions. blocks.py has what
torchtitan lacks. The LM head (`logprob_head.LogprobHead`) returns the log-probs of given targets and the entropy
instead of logits; a reward model has a head of one output instead.
Left out: mixtures with shared experts, or with some dense blocks.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from grpo import features
from grpo.models.attention import (
    ATTENTIONS,
    FlashAttention,
    document_masks,
    for_compiler,
    shared_prompt_mask,
    window_mask,
)
from grpo.models.blocks import AllHeadsNorm, GeGLU, NormedBlock, OffsetNorm, ScaledEmbedding
from grpo.models.context import RowRanks, own_stretch, whole_rows
from grpo.models.experts import moe_config, settled
from grpo.models.logprob_head import LogprobHead, ScoreHead
from grpo.text import one_line
from grpo.types import MicroBatch

# Endings of the names in `architectures`: of language models, of those that see images too, and of models that score
WRITES = "ForCausalLM"
SEES = "ForConditionalGeneration"
SCORES = "ForSequenceClassification"
# Kinds of rotary positions whose frequencies do not change with the length
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Their parameters
READ_OF_ROPE = {*RopeParameters.__annotations__, "mscale", "mscale_all_dim", "truncate", "type", "finetuned"}
# In names of config.json's fields that may change what a model computes, unless one of the second kind is there too
TELLTALE = re.compile(
    r"attention|attn|causal|window|rope|rotary|position|norm|bias|scal|multiplier|softcap|expert|moe|target_layer"
)
HARMLESS = re.compile(r"^_|^output_|implementation|dropout|pdrop")
# Such fields that all families read
READ = {
    "attention_bias",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_attention_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_mrope",
}
# What transformers calls the attention of a layer with a window
WINDOWED = "sliding_attention"
# and a layer with states in place of attention. It is taken to have a window of 0 tokens.
LINEAR = "linear_attention"
# Weights always come from a checkpoint. Drawing random ones first would also fail where a role's first rank is not on
# the first GPU: DTensor's random states take the GPU's index from the rank within the role.
NO_INIT = dict.fromkeys(("weight", "bias", "A_log", "dt_bias"), skip_param_init)

# ---------------------------------------------------------------------------------------------------------------------
# Dense decoders


def dense_block(
    hf: PretrainedConfig,
    layer: int,
    kind: str,
) -> Qwen3TransformerBlock.Config:
    """Return torchtitan's config of a block of grouped-query attention and SwiGLU. kind: of `ATTENTIONS`."""
    family = family_of(hf)
    attention = make_gqa_config(
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim_of(hf),
        wqkv_param_init=NO_INIT,
        wo_param_init=NO_INIT,
        inner_attention=ATTENTIONS[kind].Config(),
        rope=_rope(hf, layer),
        qk_norm=_norm(hf, head_dim_of(hf)) if family.qk_norm else None,
    )
    attention.qkv_linear.wq.bias = family.qkv_bias
    attention.qkv_linear.wkv.bias = family.qkv_bias
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(hf, hf.hidden_size),
        ffn_norm=_norm(hf, hf.hidden_size),
        attention=attention,
        feed_forward=make_ffn_config(
            dim=hf.hidden_size,
            hidden_dim=hf.intermediate_size,
            w1_param_init=NO_INIT,
            w2w3_param_init=NO_INIT,
        ),
    )


def recast(config: Module.Config, kind: type[Module], **others: Any) -> Module.Config:
    """Return the config of another kind of module, with the fields of `config` except where `others` has them."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    return kind.Config(**values | others)


def unsupported_fields(raw: dict[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield each reason why a model cannot be trained. `raw` is its config.json, or the part of it about text.

    A field that nobody here knows is one, if its name says that it may change what the model computes.
    """
    family = family_of(config)
    way_out = "if the model was trained without it, take it out of config.json"
    window = getattr(config, "sliding_window", None)
    if window and family.other_layers != WINDOWED:
        yield (
            f"sliding_window={window} is not supported for model_type {config.model_type}; if no prompt with its "
            f"completion is longer than {window} tokens, nothing differs: set it to null in config.json"
        )
    if window is not None and window < 1:
        yield f"sliding_window is {window}, not at least 1"
    kinds = layer_kinds(config)
    if len(kinds) != config.num_hidden_layers:
        yield f"layer_types has {len(kinds)} entries for num_hidden_layers={config.num_hidden_layers}"
    for kind in sorted({*kinds} - {"full_attention", family.other_layers}):
        yield f"{kind} in layer_types is not supported for model_type {config.model_type}"
    for kind in sorted({*kinds}):
        rotary = rotary_parameters(config, kind)
        rope_type = rotary.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            yield f"rope_type {rope_type} is not supported, only {', '.join(ROPE_TYPES)}"
        is_partial = rotary.get("partial_rotary_factor", 1.0) != 1.0
        if is_partial and not family.partial_rotary or raw.get("use_mrope"):
            yield "only rotary positions over the whole head are supported, no partial_rotary_factor or use_mrope"
        for name, value in rotary.items():
            if value and name not in READ_OF_ROPE | family.reads:
                if name == "attn_factor":  # of an older vLLM, in R1-0528-Qwen3-8B
                    way_out = "replace it by attention_factor, which is attn_factor x (1 + 0.1 ln(factor))"
                yield f"{name}={value} of rotary positions (rope_parameters, rope_scaling) is not supported; {way_out}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        yield f"attention_bias and mlp_bias are not supported for model_type {config.model_type}"
    if not config.rms_norm_eps >= 0:  # NaN too
        yield f"rms_norm_eps is {config.rms_norm_eps}, not 0 or more"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != family.activation:
        yield f"hidden_act {activation} is not supported, only {family.activation}"
    yield from family.unsupported(raw, config)
    for name, value in raw.items():
        changes = not value if name == "is_causal" else value
        if changes and TELLTALE.search(name) and not HARMLESS.search(name) and name not in READ | family.reads:
            yield f"{name}={value} is not supported for model_type {config.model_type}; {way_out}"


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
    """From torchtitan's names to Hugging Face's. The layout of every tensor is the same in both."""

    def __init__(self, config: "Policy.Config"):
        super().__init__(config, None)  # of a path, torchtitan would want a number in each file's name of the index
        for name in ("q_proj", "k_proj", "v_proj"):
            self.from_hf_map[f"model.layers.{{}}.self_attn.{name}.bias"] = f"layers.{{}}.{DENSE_LINEARS[name]}.bias"
        if isinstance(config.lm_head, ScoreHead.Config):
            self.from_hf_map["score.weight"] = self.from_hf_map.pop("lm_head.weight")


# ---------------------------------------------------------------------------------------------------------------------
# Dense decoders with norms behind attention and feed-forward layer


def gemma3_block(hf: PretrainedConfig, dense: Qwen3TransformerBlock.Config) -> NormedBlock.Config:
    """Return torchtitan's config of a block of Gemma 3, whose layers have a norm before and a norm behind them."""
    return recast(
        dense,
        NormedBlock,
        attention_post_norm=_norm(hf, hf.hidden_size),
        feed_forward=recast(dense.feed_forward, GeGLU),
        ffn_post_norm=_norm(hf, hf.hidden_size),
        scale=hf.query_pre_attn_scalar**-0.5,
    )


def unsupported_in_gemma3(raw: dict[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield each further reason why a Gemma 3 cannot be trained."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name):
            yield f"{name} is not supported"


def olmo3_block(hf: PretrainedConfig, dense: Qwen3TransformerBlock.Config) -> NormedBlock.Config:
    """Return torchtitan's config of a block of OLMo 3, whose layers have no norm before and one behind them."""
    head_dim = head_dim_of(hf)
    norm_of = partial(AllHeadsNorm.Config, eps=hf.rms_norm_eps, param_init=NO_INIT)
    dense.attention.qk_norm = norm_of(normalized_shape=hf.num_attention_heads * head_dim)
    return recast(
        dense,
        NormedBlock,
        attention_norm=Identity.Config(),
        attention_post_norm=dense.attention_norm,
        ffn_norm=Identity.Config(),
        ffn_post_norm=dense.ffn_norm,
        key_norm=norm_of(normalized_shape=hf.num_key_value_heads * head_dim),
        scale=head_dim**-0.5,
    )


class NormedNames(DenseNames):
    """Names for models with norms behind attention and feed-forward layer."""

    def __init__(self, config: "Policy.Config"):
        super().__init__(config)
        norms = {
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "ffn_post_norm",
        }
        for theirs, ours in norms.items():
            self.from_hf_map[f"model.layers.{{}}.{theirs}.weight"] = f"layers.{{}}.{ours}.weight"


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts


def moe_block(hf: PretrainedConfig, dense: Qwen3TransformerBlock.Config) -> Qwen3TransformerBlock.Config:
    """Return torchtitan's config of a block of grouped-query attention and experts, as Qwen3 has them."""
    return replace(dense, feed_forward=None, moe=moe_config(hf))


def unsupported_in_moe(raw: dict[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield each further reason why a mixture of experts cannot be trained."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True)
class Family:
    """What the code needs to know about a kind of model."""

    qk_norm: bool = False
    """Queries and keys are normalized per head."""
    qkv_bias: bool = False
    """The projections to queries, keys and values have a bias."""
    other_layers: str = ""
    """The kind that layers may have besides full attention."""
    partial_rotary: bool = False
    """Rotary positions may be over a part of the head."""
    activation: str = "silu"
    """The feed-forward layers' only one."""
    reads: Set[str] = frozenset()
    """Fields of config.json whose names are like TELLTALE and that it reads, or refuses itself, besides READ."""
    block: Callable[[PretrainedConfig, Qwen3TransformerBlock.Config], Module.Config] = lambda hf, dense: dense
    """(Hugging Face's config, torchtitan's of a dense block) -> torchtitan's config of the family's block."""
    unsupported: Callable[[dict[str, Any], PretrainedConfig], Iterable[str]] = lambda raw, config: ()
    """As `unsupported_fields`, with reasons that other families do not have."""
    names: Callable[..., Qwen3StateDictAdapter] = DenseNames
    """From torchtitan's names of tensors to Hugging Face's."""
    norm: type[RMSNorm] = RMSNorm
    """The norm of hidden states, and of queries and keys per head."""
    embedding_scale: Callable[[PretrainedConfig], float] | None = None
    """Embeddings are multiplied by it."""
    linears: dict[str, str] = field(default_factory=lambda: DENSE_LINEARS)
    """The linear layers that take adapters, in the order in which a forward meets them: Hugging Face's name -> path in
    a block."""
    carried: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not trained, and that an export carries along."""


WINDOW = frozenset({"use_sliding_window"})
# By the model_type of config.json
FAMILIES = {
    "qwen3": Family(qk_norm=True, reads=WINDOW),
    "qwen2": Family(qkv_bias=True, reads=WINDOW),  # Qwen2, Qwen2.5, R1-Distill-Qwen
    "llama": Family(),  # Llama 3, R1-Distill-Llama
    "smollm3": Family(reads=WINDOW | {"no_rope_layers", "no_rope_layer_interval"}),
    "mistral": Family(other_layers=WINDOWED),
    "gemma3_text": Family(
        qk_norm=True,
        other_layers=WINDOWED,
        activation="gelu_pytorch_tanh",
        reads={
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window_pattern",
            "use_bidirectional_attention",
        },
        block=gemma3_block,
        unsupported=unsupported_in_gemma3,
        names=NormedNames,
        norm=OffsetNorm,
        embedding_scale=lambda hf: hf.hidden_size**0.5,
    ),
    "olmo3": Family(other_layers=WINDOWED, block=olmo3_block, names=NormedNames),
    "qwen3_moe": Family(
        qk_norm=True,
        reads=WINDOW
        | {"moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"},
        block=moe_block,
        unsupported=unsupported_in_moe,
        names=MoENames,
        linears={name: path for name, path in DENSE_LINEARS.items() if path.startswith("attention.")},
    ),
}


@functools.cache
def families() -> dict[str, Family]:
    """Return FAMILIES and those of features, which import this module."""
    return FAMILIES | features.offers("FAMILIES")


def family_of(hf: PretrainedConfig) -> Family:
    """Return the family of a model. `hf_folder.read_hf_config` read its config and refuses unknown families."""
    return families()[hf.model_type]


def gives_scores(hf: PretrainedConfig) -> bool:
    """Say whether a model is a sequence classifier, as reward models are, and not a language model."""
    return any(name.endswith(SCORES) for name in hf.architectures or ())


def has_experts(hf: PretrainedConfig) -> bool:
    """Say whether a model is a mixture of experts."""
    return family_of(hf).block is moe_block


def has_states(hf: PretrainedConfig) -> bool:
    """Say whether some layers of a model have states in place of attention."""
    return LINEAR in layer_kinds(hf)


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Policy(RowRanks, Qwen3Model):
    """A torchtitan decoder whose forward ends in `LogprobHead`, which returns (logprobs_BT, entropy_BT)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        windows: tuple[int | None, ...]
        """Of each layer, see `DocumentMasks.window`; 0 for a layer with states in place of attention."""

    def masks(self, micro: MicroBatch) -> dict[int | None, Any]:
        """Return a micro-batch's masks for each window of the layers, as this model's kind of attention takes them."""
        windows = dict.fromkeys(self.config.windows)
        masks = {}
        if 0 in windows:
            del windows[0]
            states = next(b.attention for b in self.config.layers if not isinstance(b.attention, GQAttention.Config))
            masks[0] = states.mask(micro)
        # of the first layer that has one
        attention = next(b.attention for b in self.config.layers if isinstance(b.attention, GQAttention.Config))
        if not isinstance(attention.inner_attention, FlexAttention.Config):
            for window in windows:
                masks[window] = document_masks(micro, window)
                if isinstance(attention.inner_attention, FlashAttention.Config):
                    masks[window] = for_compiler(masks[window])
            return masks
        documents = get_efficient_causal_mask_mod_for_packed_document(micro.positions_BT)
        if micro.shared is not None:
            documents = shared_prompt_mask(micro)
        for window in windows:
            rules = [get_causal_mask_mod(), documents]
            if window is not None:
                rules.append(window_mask(micro.positions_BT, window))
            masks[window] = self._create_flex_attention_mask(micro.positions_BT, attention, rules)
        return masks

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (logprobs_BT, entropy_BT); see `LogprobHead`. Ranks that share a row return all of it."""
        masks = self.masks(micro)  # here, behind FSDP, which moves tensors to the GPU
        own = partial(own_stretch, ranks=self.row_ranks)
        h_BTD = settled(self.tok_embeddings(own(micro.ids_BT)))
        positions_BT = own(micro.positions_BT)
        for layer, window in zip(self.layers.values(), self.config.windows, strict=True):
            h_BTD = layer(h_BTD, masks[window], positions_BT)
        logprobs, entropy = self.lm_head(
            self.norm(h_BTD),
            own(micro.targets_BT),
            own(micro.temperatures_BT),
            micro.scored_M,
            micro.kept,
        )
        return whole_rows(logprobs, self.row_ranks), whole_rows(entropy, self.row_ranks)


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
        if not self.is_filled:  # layers share one table, which the first of them fills
            super()._init_self_buffers(buffer_device=buffer_device)
            self.is_filled = True

    def _precompute_cache(self) -> Tensor:
        inv_freq = torch.tensor(self.config.inv_freq, dtype=torch.float32)
        positions_T = torch.arange(self.config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions_T, inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return table * self.config.attention_factor

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
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
    hf: PretrainedConfig,
    attention: str,
    chunk_tokens: int,
    compiled: bool = False,
    keep_logits: bool = False,
) -> Policy.Config:
    """Return the torchtitan config of a Hugging Face config, for any size of a family.

    `attention` is a kind in ATTENTIONS, the rest is as in `LogprobHead.Config`.
    """
    family = family_of(hf)
    embedding = Embedding.Config(num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size, param_init=NO_INIT)
    if family.embedding_scale is not None:
        embedding = recast(embedding, ScaledEmbedding, scale=family.embedding_scale(hf))
    head = LogprobHead.Config(
        in_features=hf.hidden_size,
        out_features=hf.vocab_size,
        param_init=NO_INIT,
        chunk_tokens=chunk_tokens,
        keep_logits=keep_logits,
        compile=compiled,
    )
    if gives_scores(hf):
        head = ScoreHead.Config(in_features=hf.hidden_size, out_features=1, param_init=NO_INIT)
    layers = [family.block(hf, dense_block(hf, layer, attention)) for layer in range(hf.num_hidden_layers)]
    return Policy.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        norm=_norm(hf, hf.hidden_size),
        windows=tuple(windows_of(hf)),
        layers=layers,
        enable_weight_tying=bool(hf.tie_word_embeddings) and not gives_scores(hf),
        tok_embeddings=embedding,
        lm_head=head,
    )


def empty_policy(hf: PretrainedConfig) -> nn.Module:
    """Build the model without memory for its weights, on torch's meta device, to count its parts.

    Raises ValueError if numbers of its config.json make that impossible.
    """
    try:
        config = titan_config(hf, "documents", chunk_tokens=1)
        with torch.device("meta"):
            return config.build()
    except (ArithmeticError, LookupError, TypeError) as error:
        raise ValueError(f"config.json of {hf.name_or_path} describes no model: {one_line(str(error))}") from error


def layer_kinds(hf: PretrainedConfig) -> list[str]:
    """Return transformers' word for each layer's attention: sliding_attention with a window, else full_attention."""
    kind = WINDOWED if getattr(hf, "sliding_window", None) else "full_attention"
    return getattr(hf, "layer_types", None) or [kind] * hf.num_hidden_layers


def windows_of(hf: PretrainedConfig) -> list[int | None]:
    """Return the window of each layer: how many tokens a token attends to, itself included; None for all before it.

    It is 0 for a layer with states in place of attention.
    """
    windows = {LINEAR: 0, WINDOWED: getattr(hf, "sliding_window", None)}
    return [windows.get(kind) for kind in layer_kinds(hf)]


def state_values(hf: PretrainedConfig) -> int:
    """Return how many numbers the states of one sequence are, in all layers; 0 for a model without states."""
    num_layers = windows_of(hf).count(0)
    if not num_layers:
        return 0
    return num_layers * hf.linear_num_value_heads * hf.linear_key_head_dim * hf.linear_value_head_dim


def head_dim_of(config: PretrainedConfig) -> int:
    """Return the width of one attention head. Where a config leaves it out, it follows from the other numbers."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_parameters(hf: PretrainedConfig, kind: str) -> dict[str, Any]:
    """Return the rotary embedding's parameters in layers of a kind. Some models have the same ones in all."""
    return hf.rope_parameters.get(kind, hf.rope_parameters)


def _norm(hf: PretrainedConfig, size: int) -> RMSNorm.Config:
    return family_of(hf).norm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=NO_INIT)


def _rope(hf: PretrainedConfig, layer: int) -> HFRoPE.Config:
    """Return a layer's rotary embedding, with frequencies and factor as transformers' models compute them."""
    head_dim = head_dim_of(hf)
    rotates = getattr(hf, "no_rope_layers", None)  # despite its name: 1 for layers that rotate, 0 for others
    kind = layer_kinds(hf)[layer]
    if kind == LINEAR or (rotates and not rotates[layer]):
        return HFRoPE.Config(dim=head_dim, max_seq_len=hf.max_position_embeddings)
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
    if not inv_freq.isfinite().all():
        raise ArithmeticError(f"rotary positions without finite frequencies, from rope_parameters {parameters}")
    return HFRoPE.Config(
        dim=head_dim,
        max_seq_len=hf.max_position_embeddings,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
    )
