"""Tiny checkpoints for tests: random weights large enough that log-probs differ from token to token."""

import pathlib

from grpo.data.toy import addition_tokenizer, make_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3-untied": {"tie_word_embeddings": False},
    "llama3": {"tie_word_embeddings": False, "architecture": "llama", "rope_scaling": LLAMA3_ROPE},
    "llama3-tied": {"tie_word_embeddings": True, "architecture": "llama", "rope_scaling": LLAMA3_ROPE},
}


def make_tiny(folder: pathlib.Path, kind: str) -> str:
    """One of KINDS with 2 layers of width 64 in `folder/kind`; returns that folder."""
    path = make_model(
        folder / kind,
        addition_tokenizer(),
        seed=0,
        hidden_size=64,
        num_layers=2,
        intermediate_size=96,
        initializer_range=0.2,
        max_position_embeddings=256,
        **KINDS[kind],
    )
    return str(path)
