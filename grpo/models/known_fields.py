"""Which fields of a config.json are understood: a field that changes what a model computes is used or refused by name.

transformers' class of a family declares the fields that its models read. vLLM's models read some others, where they
find them. Here every one of them is in a list, which a test compares with both sources, so that another version of
either shows what is new. Left out: the values of fields that are used; `families.unsupported_fields` judges those.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

# What every family reads, with older names that transformers still takes
READ = {
    "architectures",
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_mrope",
    "vocab_size",
}
# Of rope_parameters, for the kinds of rotary positions in families.py
READ_OF_ROPE = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}
WINDOW = {"use_sliding_window"}
QWEN3_5 = {
    "attn_output_gate",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "image_token_id",
    "mamba_ssm_dtype",  # of vLLM's states
    "mrope_interleaved",  # a token of a text has the same position in all three sections
    "mrope_section",
    "mtp_num_hidden_layers",  # of the draft layer
    "mtp_use_dedicated_embeddings",
    "text_config",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
}
READ_BY = {
    "qwen3": WINDOW,
    "qwen2": WINDOW,
    "llama": set(),
    "smollm3": WINDOW | {"no_rope_layers", "no_rope_layer_interval"},
    "mistral": set(),
    "gemma3_text": {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "use_bidirectional_attention",
    },
    "olmo3": set(),
    "granite": {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"},
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": WINDOW
    | {
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    },
}
# What does not change log-probs: how weights were drawn and regularised, names, token ids, outputs besides logits. The
# trainer drops nothing at random and adds no loss of the router.
IRRELEVANT = {
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",  # only with use_sliding_window, which is refused
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# What vLLM's models read although transformers' do not -> the value that changes nothing, besides null, false and empty
READ_BY_VLLM: dict[str, Any] = {
    "ada_rms_norm_t_cond": False,
    "attention_sinks": False,
    "bias": False,
    "dual_chunk_attention_config": False,
    "is_causal": True,
    "layer_rope_theta": False,
    "layer_scale": False,
    "llama_4_scaling": False,
    "logit_scale": 1,
    "qk_norm": False,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "target_layer_count": 0,
}
ALL_READ = READ.union(READ_BY_VLLM, *READ_BY.values())
# In names of fields that may change what a model computes
TELLTALE = re.compile(r"attention|attn|window|rope|rotary|norm|bias|scal|multiplier|softcap|expert|moe|position")
HARMLESS = re.compile(r"^_|implementation|_dropout$|pdrop$")


def misread_fields(raw: dict[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield the reason for each field that some model of this stack reads, and this family's here does not.

    `raw` is config.json as it stands, `config` as transformers reads it.
    """
    family = config.model_type
    declared = {field.name: field for field in dataclasses.fields(type(config))}
    for name, value in raw.items():
        if name in READ or name in READ_BY[family] or name in IRRELEVANT:
            continue
        changes = bool(value) and value != READ_BY_VLLM.get(name)
        if name == "is_causal":
            changes = value is False
        if name in declared:
            changes = value != declared[name].default
        if changes and (name in declared or name in ALL_READ):
            yield (
                f"{name}={value} is not supported for model_type {family}; if the model was trained without it, take "
                "it out of config.json"
            )
    rotary = config.rope_parameters
    of_kinds = [parameters for parameters in rotary.values() if isinstance(parameters, dict)]
    for parameters in of_kinds or [rotary]:
        for name, value in parameters.items():
            if value and name not in READ_OF_ROPE | READ_BY[family] and name != "finetuned":
                way_out = "if the model was trained without it, take it out of config.json"
                if name == "attn_factor":  # of an older vLLM, in R1-0528-Qwen3-8B
                    way_out = "replace it by attention_factor, which is attn_factor x (1 + 0.1 ln(factor))"
                yield f"{name}={value} of rotary positions (rope_parameters, rope_scaling) is not supported; {way_out}"


def unread_fields(raw: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Return the names of fields that nothing reads, although they sound as if they changed what a model computes."""
    known = ALL_READ | IRRELEVANT | {field.name for field in dataclasses.fields(type(config))}
    return [
        name
        for name, value in raw.items()
        if value and name not in known and TELLTALE.search(name) and not HARMLESS.search(name)
    ]
