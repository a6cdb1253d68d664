"""Tiny checkpoints for tests: random weights large enough that log-probs differ from token to token."""

import pathlib

from grpo.data.toy import addition_tokenizer, make_model

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
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "initializer_range": 0.2}
KINDS = {
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3-untied": {"tie_word_embeddings": False},
    "llama3": {"tie_word_embeddings": False} | LLAMA3,
    "llama3-tied": {"tie_word_embeddings": True} | LLAMA3,
}


def make_tiny(folder: pathlib.Path, kind: str) -> str:
    """One of KINDS with 2 layers of width 64 in `folder/kind`; returns that folder."""
    changes = SMALL | {"max_position_embeddings": 256} | KINDS[kind]
    return str(make_model(folder / kind, addition_tokenizer(), 0, changes))
