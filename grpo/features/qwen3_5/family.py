"""What sets Qwen3.5 apart from the other families: its blocks, its tensors' names, which of its models are refused."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from transformers import PretrainedConfig

from grpo.features.qwen3_5.delta_net import GatedAttention, GatedDeltaNet
from grpo.models.blocks import OffsetNorm
from grpo.models.families import LINEAR, NO_INIT, DenseNames, Family, Policy, gives_scores, layer_kinds, recast


def qwen3_5_block(hf: PretrainedConfig, dense: Qwen3TransformerBlock.Config) -> Qwen3TransformerBlock.Config:
    """Return torchtitan's config of a block of Qwen3.5: gated attention, or without positions a gated delta net."""
    if not dense.attention.rope.inv_freq:
        return replace(dense, attention=GatedDeltaNet.Config(hf=hf, param_init=NO_INIT))
    dense.attention.qkv_linear.wq.out_features *= 2
    return replace(dense, attention=recast(dense.attention, GatedAttention))


def unsupported_in_qwen3_5(raw: dict[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield each further reason why a Qwen3.5 cannot be trained."""
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

    def __init__(self, config: Policy.Config, prefix: str = "model."):
        super().__init__(config)
        layers = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d", "norm")
        for tensor in (*(f"{layer}.weight" for layer in layers), "A_log", "dt_bias"):
            self.from_hf_map[f"model.layers.{{}}.linear_attn.{tensor}"] = f"layers.{{}}.attention.{tensor}"
        self.prefix = prefix

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under Hugging Face's names, in their order."""
        named = super().to_hf(state_dict)
        return {name.replace("model.", self.prefix, 1): value for name, value in named.items()}


TEXT = Family(
    qk_norm=True,
    other_layers=LINEAR,
    reads={"attn_output_gate", "full_attention_interval", "mrope_interleaved", "mrope_section"},
    partial_rotary=True,
    block=qwen3_5_block,
    unsupported=unsupported_in_qwen3_5,
    names=Qwen3_5Names,
    norm=OffsetNorm,
    carried=("model.visual.", "mtp."),
)
# as on the hub, where it sees images too
WITH_IMAGES = replace(TEXT, names=partial(Qwen3_5Names, prefix="model.language_model."))
