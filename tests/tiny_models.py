"""Tiny checkpoints for tests: random weights large enough that log-probs differ from token to token."""

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from configs.examples.toys import MODEL, addition_tokenizer, make_model

LLAMA3 = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
# Qwen2.5 and R1-Distill-Qwen. Wider, because vLLM takes its heads to be hidden_size / num_attention_heads wide; with
# smaller weights, so that activations are as large as in the others.
QWEN2 = {"model_type": "qwen2", "hidden_size": 128, "initializer_range": 0.14}
QWEN2_YARN = QWEN2 | {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
# 30B-A3B's kind: vLLM on a CPU wants a head, and experts, of multiples of 32
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MISTRAL = {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None}
SMOLLM3 = {
    "model_type": "smollm3",
    "no_rope_layers": [1, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
GEMMA3 = WINDOWS | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 24,  # not the head's width
    "initializer_range": 0.1,  # embeddings are scaled and tied: with larger ones it says the same token for ever
    "rope_parameters": {
        "sliding_attention": ROTARY,
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
# Only the layer without a window stretches its positions
OLMO3 = WINDOWS | {
    "model_type": "olmo3",
    "rope_parameters": {
        "sliding_attention": ROTARY,
        "full_attention": ROTARY
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2},
    },
}
# Three gated delta nets and an attention of rotary positions over half a head. Two value heads share a key head.
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": ROTARY | {"partial_rotary_factor": 0.5},
}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "initializer_range": 0.2}
KINDS = {
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3-copied": {"tie_word_embeddings": True},  # its folder has the tied head once more
    "qwen3-untied": {"tie_word_embeddings": False},
    "qwen2-tied": {"tie_word_embeddings": True} | QWEN2,
    "qwen2-untied": {"tie_word_embeddings": False} | QWEN2,
    "qwen2-yarn": {"tie_word_embeddings": False} | QWEN2_YARN,
    "llama3": {"tie_word_embeddings": False} | LLAMA3,
    "llama3-tied": {"tie_word_embeddings": True} | LLAMA3,
    "mistral": {"tie_word_embeddings": False} | MISTRAL,
    "mistral-window": {"tie_word_embeddings": False} | MISTRAL | {"sliding_window": 16},  # 7B v0.1's kind
    "mistral-tied": {"tie_word_embeddings": True} | MISTRAL,
    "smollm3": {"tie_word_embeddings": True} | SMOLLM3,
    "gemma3": {"tie_word_embeddings": True} | GEMMA3,
    "olmo3": {"tie_word_embeddings": False} | OLMO3,
    "qwen3_5": {"tie_word_embeddings": False} | QWEN3_5,
    "qwen3_5-tied": {"tie_word_embeddings": True} | QWEN3_5,
    "moe": {"tie_word_embeddings": False} | QWEN3_MOE,
    "moe-tied": {"tie_word_embeddings": True} | QWEN3_MOE | {"norm_topk_prob": False},
}
# vLLM samples from these on GPUs alone
WITH_STATES = ("qwen3_5", "qwen3_5-tied")


def make_tiny(folder: pathlib.Path, kind: str) -> str:
    """Write one of KINDS with 2 layers of width 64 into `folder/kind`. Returns that folder."""
    if kind in WITH_STATES:
        pytest.importorskip("grpo.features.qwen3_5")
    changes = SMALL | {"max_position_embeddings": 256} | KINDS[kind]
    made = make_model(folder / kind, addition_tokenizer(), 0, changes)
    draw_biases(made / "model.safetensors", changes["initializer_range"])
    if kind == "mistral":
        add_second_layout(made)
    if kind == "qwen3-copied":
        add_copy_of_head(made / "model.safetensors")
    return str(made)


def make_image_model(folder: pathlib.Path, text: dict[str, object]) -> None:
    """Write a Qwen3.5 as on the hub: text and vision in one config, and a draft layer that no config mentions.

    text: fields of the part that reads text. All is in bfloat16, except two tensors.
    """
    tokenizer = addition_tokenizer()
    text = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id} | text
    vision = {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": text["hidden_size"]}
    vision |= {"hidden_size": 64, "intermediate_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(3)
        Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
        draft = {"mtp.fc.weight": torch.randn(8, 16).bfloat16(), "mtp.norm.weight": torch.randn(8)}
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | draft
    first = "model.language_model.layers.0.linear_attn.A_log"
    tensors[first] = tensors[first].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))


def tensors_of(model: PreTrainedModel, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Return parameters, or their gradients, as a folder names them. transformers holds experts in two tensors."""
    tensors = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        before, experts, _ = name.rpartition(".experts.")
        kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for index, expert in enumerate(value if experts else ()):
            parts = zip(kinds, expert.chunk(len(kinds)), strict=True)
            tensors |= {f"{before}.experts.{index}.{kind}.weight": part for kind, part in parts}
        if not experts:
            tensors[name] = value
    return tensors


def draw_biases(file: pathlib.Path, std: float) -> None:
    """Draw random biases. transformers starts them at zero, which could not show a lost one."""
    tensors, generator = load_file(file), torch.Generator().manual_seed(1)
    for name in sorted(name for name in tensors if name.endswith(".bias")):
        tensors[name] = std * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


def add_copy_of_head(file: pathlib.Path) -> None:
    """As in the folders of Qwen3-0.6B and 1.7B: the head that is tied to the embedding, once more."""
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


def add_second_layout(folder: pathlib.Path) -> None:
    """Add what Mistral's folders on the hub have: an index, and config and weights in a second layout.

    The second layout's only tensor has a wrong shape, so nobody can load it by mistake.
    """
    shard = "model-00001-of-00001.safetensors"
    names = list(load_file((folder / "model.safetensors").rename(folder / shard)))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"norm.weight": torch.zeros(4)}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 2}))


def make_reward_model(folder: pathlib.Path, kind: str, tokenizer, **changes: object) -> str:
    """Write a classifier of one output in the family of KINDS[kind], with its own tokenizer. Returns the folder."""
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields = MODEL | SMALL | {"max_position_embeddings": 256, "vocab_size": len(tokenizer), "num_labels": 1} | ids
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(5)
        config = AutoConfig.for_model(**(fields | KINDS[kind] | changes))
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw_biases(folder / "model.safetensors", config.initializer_range)
    return str(folder)
