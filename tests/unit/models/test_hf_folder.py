"""Which config.json is accepted, which refused and why; those of the hub, without fields that nothing reads."""

import importlib.util
import json
import pathlib
import re

import huggingface_hub
import pytest
import transformers

from configs.examples.toys import addition_tokenizer
from grpo.models.families import HARMLESS, READ, TELLTALE, families, rotary_parameters, windows_of
from grpo.models.hf_folder import read_hf_config, resolve_folder, stop_token_ids, tensors_of


def model(kind: str, sizes: tuple[int, ...], **more) -> dict:
    """What a config.json says of a model; sizes: width, inner width, layers, heads, key-value heads, vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fixed = {"architectures": [f"{kind.title()}ForCausalLM"], "model_type": kind, "hidden_act": "silu"}
    return fixed | dict(zip((*names, "vocab_size"), sizes, strict=True)) | {"tie_word_embeddings": False} | more


QWEN2_5_7B = model(
    "qwen2",
    (3584, 18944, 28, 28, 4, 152064),
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28},
)
R1_DISTILL_QWEN_7B = QWEN2_5_7B | {"max_position_embeddings": 131072, "rope_theta": 10000}
R1_DISTILL_QWEN_7B |= {"sliding_window": 4096, "use_mrope": False}
ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
LLAMA3_1_8B = model(
    "llama",
    (4096, 14336, 32, 32, 8, 128256),
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
    **{"attention_bias": False, "mlp_bias": False, "rope_scaling": ROPE | {"rope_type": "llama3"}},
)
SMOLLM3_3B = model(
    "smollm3",
    (2048, 11008, 36, 16, 4, 128256),
    **{"max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "rope_scaling": None},
    **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    **{"attention_bias": False, "mlp_bias": False, "sliding_window": None, "use_sliding_window": False},
    **{"layer_types": ["full_attention"] * 36},
)
MISTRAL_7B_V0_3 = model(
    "mistral",
    (4096, 14336, 32, 32, 8, 32768),
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None},
)
QWEN3_1_7B = model(
    "qwen3",
    (2048, 6144, 28, 16, 8, 151936),
    **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None},
    **{"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": True},
    **{"head_dim": 128, "attention_bias": False},
)
QWEN3_30B_A3B = model(
    "qwen3_moe",
    (2048, 6144, 48, 32, 4, 151936),
    **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_scaling": None},
    **{"sliding_window": None, "use_sliding_window": False, "max_window_layers": 48, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
GEMMA3_1B = model(
    "gemma3_text",
    (1152, 6912, 26, 4, 1, 262144),
    **{"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256},
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "query_pre_attn_scalar": 256, "sliding_window": 512},
    **{"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window_pattern": 6},
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True},
)
OLMO3_7B = model(
    "olmo3",
    (4096, 11008, 32, 32, 32, 100278),
    **{"max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096},
    **{"attention_bias": False, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8},
    **{"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}},
)
QWEN3_5_TEXT = model(
    "qwen3_5_text",
    (1024, 3584, 24, 8, 2, 248320),
    **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "head_dim": 256, "tie_word_embeddings": True},
    **{"architectures": ["Qwen3_5ForCausalLM"], "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "attention_bias": False},
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
)
QWEN3_5 = {  # as on the hub, with a vision encoder
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": QWEN3_5_TEXT,
    "vision_config": {"model_type": "qwen3_5", "depth": 12, "hidden_size": 768, "out_hidden_size": 1024},
    "tie_word_embeddings": True,
}
MISTRAL_7B_V0_1 = MISTRAL_7B_V0_3 | {"vocab_size": 32000, "rope_theta": 10000.0, "sliding_window": 4096}
QWEN3_0_6B = QWEN3_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}
QWEN3_8B = QWEN3_1_7B | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
QWEN3_8B |= {"num_hidden_layers": 36, "tie_word_embeddings": False}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
# with a head of its own, as the weights from a 5-bit file that were measured
CODER_0_5B = QWEN2_5_7B | {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
CODER_0_5B |= {"num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936}
YARN = {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
HARMLESS_FIELDS = {"rope_interleaved": False, "_attn_implementation": "sdpa", "unsloth_fixed": True, "is_causal": True}
HARMLESS_FIELDS |= {"attention_dropout": 0.1, "pretraining_tp": 2, "num_my_experts": 0}
ACCEPTED = {  # config.json, (rope type, rope theta) of layers without a window, windows of its first layers
    "Qwen2.5-7B": (QWEN2_5_7B, ("default", 1e6), [None]),
    "Qwen2.5-7B, YaRN": (QWEN2_5_7B | YARN, ("yarn", 1e6), [None]),
    "R1-Distill-Qwen-7B": (R1_DISTILL_QWEN_7B, ("default", 1e4), [None, None]),
    "Llama-3.1-8B": (LLAMA3_1_8B | HARMLESS_FIELDS, ("llama3", 5e5), [None]),
    "Gemma-3-1B": (GEMMA3_1B, ("default", 1e6), [512, 512, 512, 512, 512, None, 512]),
    "OLMo-3-7B": (OLMO3_7B, ("yarn", 5e5), [4096, 4096, 4096, None, 4096]),
    "SmolLM3-3B": (SMOLLM3_3B, ("default", 5e6), [None]),
    "Mistral-7B-v0.1": (MISTRAL_7B_V0_1, ("default", 1e4), [4096, 4096]),
    "Mistral-7B-v0.3": (MISTRAL_7B_V0_3, ("default", 1e6), [None, None]),
    "Qwen3-1.7B": (QWEN3_1_7B, ("default", 1e6), [None]),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, ("default", 1e6), [None]),
    "Qwen3.5, text alone": (QWEN3_5_TEXT, ("default", 1e7), [0, 0, 0, None, 0]),
}


def folder_of(tmp_path, config: dict) -> str:
    if config.get("model_type") in ("qwen3_5", "qwen3_5_text"):
        pytest.importorskip("grpo.features.qwen3_5")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name, tmp_path):
    raw, rope, windows = ACCEPTED[name]
    config = read_hf_config(folder_of(tmp_path, raw))
    parameters = rotary_parameters(config, "full_attention")
    assert (parameters["rope_type"], parameters["rope_theta"]) == rope
    assert (config.hidden_size, config.num_key_value_heads) == (raw["hidden_size"], raw["num_key_value_heads"])
    found = windows_of(config)
    assert len(found) == raw["num_hidden_layers"] and found[: len(windows)] == windows


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_sees_images_is_read_as_its_part_for_text(tied, tmp_path):
    """Whether its head is tied is said above that part, for transformers and vLLM too."""
    text = QWEN3_5_TEXT | {"tie_word_embeddings": not tied}
    config = read_hf_config(folder_of(tmp_path, QWEN3_5 | {"text_config": text, "tie_word_embeddings": tied}))
    assert (config.model_type, config.hidden_size) == ("qwen3_5", 1024)
    tensors = tensors_of(config)
    assert tensors["model.language_model.layers.0.linear_attn.conv1d.weight"] == (3 * 16 * 128, 1, 4)
    # each head's query and gate
    assert tensors["model.language_model.layers.3.self_attn.q_proj.weight"] == (2 * 8 * 256, 1024)
    assert ("lm_head.weight" in tensors) == (not tied)


REFUSED = {  # what is wrong: (config.json, the reason)
    "Qwen2, window": (
        QWEN2_5_7B | {"use_sliding_window": True, "max_window_layers": 14},
        "longer than 131072 tokens, nothing differs: set it to null",
    ),
    "Mixtral": (
        MISTRAL_7B_V0_3 | {"model_type": "mixtral", "num_local_experts": 8},
        "is a mixtral model; only qwen3, qwen2, llama, ",
    ),
    "soft cap": (GEMMA3_1B | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
    "GPTQ": (QWEN2_5_7B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized weights"),
    "dynamic rope": (LLAMA3_1_8B | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    "multimodal rope": (R1_DISTILL_QWEN_7B | {"use_mrope": True}, "use_mrope"),
    "biases elsewhere": (LLAMA3_1_8B | {"attention_bias": True}, "attention_bias and mlp_bias are not supported"),
    "another activation": (LLAMA3_1_8B | {"hidden_act": "gelu"}, "hidden_act gelu is not supported, only silu"),
    "another gate": (QWEN3_5_TEXT | {"output_gate_type": "sigmoid"}, "output_gate_type sigmoid is not supported"),
    "no gate on attention": (QWEN3_5_TEXT | {"attn_output_gate": False}, "attn_output_gate=false is not supported"),
    "states alone": (QWEN3_5_TEXT | {"layer_types": ["linear_attention"] * 24}, "layer_types has no full_attention"),
    "experts in every second block": (QWEN3_30B_A3B | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "more chosen than there are": (
        QWEN3_30B_A3B | {"num_experts": 4},
        "num_experts_per_tok=8 is more than num_experts=4",
    ),
    "windows that transformers does not read": (
        MISTRAL_7B_V0_3 | {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 4096},
        "transformers reads a mistral model with layer_types as ministral",
    ),
    "windows that only layer_types names": (
        QWEN3_1_7B | {"layer_types": ["sliding_attention"] * 28},
        "sliding_attention in layer_types is not supported for model_type qwen3",
    ),
    "a layer too few": (OLMO3_7B | {"layer_types": ["full_attention"] * 31}, "layer_types"),
    "no window": (MISTRAL_7B_V0_1 | {"sliding_window": -1}, "sliding_window is -1"),
    "R1-0528-Qwen3-8B": (
        QWEN3_1_7B | {"rope_scaling": YARN["rope_scaling"] | {"attn_factor": 0.8782488562869419}},
        "attn_factor=0.8782488562869419 of rotary positions (rope_parameters, rope_scaling) is not supported; replace",
    ),
    "a field that nobody knows": (LLAMA3_1_8B | {"use_my_norm": True}, "use_my_norm=True is not supported"),
    "an encoder": (LLAMA3_1_8B | {"is_causal": False}, "is_causal=False"),
    "a shared expert": (QWEN3_30B_A3B | {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate_size"),
    "reward model": (
        QWEN2_5_7B | {"architectures": ["Qwen2ForSequenceClassification"]},
        "Qwen2ForSequenceClassification in architectures",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    raw, reason = REFUSED[name]
    folder = folder_of(tmp_path, raw)
    with pytest.raises(ValueError) as refused:
        read_hf_config(folder)
    assert str(refused.value).startswith(folder) and reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("family", families())
def test_what_a_family_of_transformers_writes_is_read(family, tmp_path):
    """A field that a new version adds shows here."""
    config = transformers.AutoConfig.for_model(family)
    raw = getattr(config, "text_config", config).to_dict()
    unknown = {name for name in raw if TELLTALE.search(name) and not HARMLESS.search(name)}
    assert unknown <= READ | families()[family].reads


# Names that say nothing, and which `unsupported_fields` or the shapes of the weights judge
JUDGED = {"mlp_only_layers", "layer_types", "head_dim", "num_key_value_heads"}


@pytest.mark.parametrize("family", families())
def test_what_vllm_looks_for_is_read_or_has_a_telltale_name(family):
    """In the source of its models: fields that they read where a config has them."""
    files = {"gemma3_text": "gemma3", "smollm3": "llama", "olmo3": "llama", "qwen3_5_text": "qwen3_5"}
    file = files.get(family, family)
    models = pathlib.Path(importlib.util.find_spec("vllm").origin).parent / "model_executor/models"
    text = (models / f"{file}.py").read_text()
    looked_for = {*re.findall(r'(?:getattr|hasattr)\(\s*(?:self\.)?config,\s*"(\w+)"', text)}
    assert {name for name in looked_for if not TELLTALE.search(name)} <= JUDGED
    assert not any(HARMLESS.search(name) for name in looked_for)


def test_a_hub_model_is_refused_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    mixtral, _ = REFUSED["Mixtral"]
    asked = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision, allow_patterns))
        return folder_of(tmp_path, mixtral)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for path in ("someone/mixtral", "someone/mixtral@v2"):
        with pytest.raises(ValueError, match="mixtral"):
            resolve_folder(path)
    files = ["config.json", "adapter_config.json"]
    assert asked == [("someone/mixtral", None, files), ("someone/mixtral", "v2", files)]


def test_an_adapter_alone_is_no_model_and_the_way_out_is_to_merge_it(tmp_path, monkeypatch):
    """A folder of PEFT's, here or at the hub."""
    for name in ("adapter_config.json", "tokenizer_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    for path in (str(tmp_path), "someone/adapter"):
        with pytest.raises(FileNotFoundError, match="no config.json; it is an adapter of PEFT: merge it into its base"):
            resolve_folder(path)


def test_what_ends_a_completion(tmp_path):
    """The tokenizer's EOS, those of generation_config.json, and what the user adds."""
    tokenizer = addition_tokenizer()  # 32 tokens, EOS is 1
    assert stop_token_ids(str(tmp_path), tokenizer) == [1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert stop_token_ids(str(tmp_path), tokenizer, more=(2,)) == [1, 2, 5]
    with pytest.raises(ValueError, match=r"\[32, 40\] are not among the 32 tokens"):
        stop_token_ids(str(tmp_path), tokenizer, more=(31, 32, 40))
