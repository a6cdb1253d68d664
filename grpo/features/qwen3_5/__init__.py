"""Qwen3.5 (dense, text): gated delta nets in most layers, and attention with a gate in the others."""

FAMILIES = {
    "qwen3_5_text": "grpo.features.qwen3_5.family:TEXT",
    "qwen3_5": "grpo.features.qwen3_5.family:WITH_IMAGES",
}
