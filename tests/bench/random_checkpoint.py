"""Write a random checkpoint of a real model's shape, a tokenizer for it and prompts of equal length, without downloads.

    python tests/bench/random_checkpoint.py qwen3-0.6b FOLDER [--prompt-tokens 128]

FOLDER gets the Hugging Face files and prompts.jsonl. For measurements only: the model knows nothing.
"""

import bisect
import json
import pathlib
import random
import sys
from dataclasses import dataclass

import torch
import transformers
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from configs.examples.toys import trained_tokenizer
from grpo.config import DataConfig
from grpo.data.turns import tokenize, write_prompt

COMMON = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28, "tie_word_embeddings": True}
EXPERTS = {"model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts_per_tok": 2, "tie_word_embeddings": False}
SHAPES = {
    "qwen3-0.6b": COMMON | {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": COMMON | {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen2.5-0.5b": COMMON
    | {
        "model_type": "qwen2",
        "hidden_size": 896,
        "head_dim": 64,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 24,
    },
    "qwen2.5-1.5b": COMMON
    | {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen3-30b-a3b": COMMON
    | EXPERTS
    | {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
    },
    "llama3.1-8b": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
}
HEAD_DIM = 128  # where a shape names none
NUM_PROMPTS = 512


@dataclass
class Arguments:
    """What to write."""

    shape: tyro.conf.Positional[str]
    """One of SHAPES."""
    folder: tyro.conf.Positional[pathlib.Path]
    """Where to."""
    prompt_tokens: int = 128
    """Length of every prompt in tokens, chat template included."""
    num_layers: int = 0
    """Blocks; 0: as many as the shape has."""


def main(arguments: Arguments) -> None:
    """Write model, tokenizer and prompts."""
    shape = {"head_dim": HEAD_DIM, "vocab_size": 151_936, "max_position_embeddings": 40_960} | SHAPES[arguments.shape]
    shape["num_hidden_layers"] = arguments.num_layers or shape["num_hidden_layers"]
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(400)]
    tokenizer = trained_tokenizer([" ".join(rng.choices(words, k=50)) for _ in range(50)], vocab_size=1024)
    tokenizer.save_pretrained(arguments.folder)
    config = transformers.AutoConfig.for_model(
        **({"model_type": "qwen3"} | shape),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    write_at_once(config, arguments.folder)

    data = DataConfig(system_prompt="")

    def num_tokens(text: str) -> int:
        """Count the tokens of a prompt, with its chat template."""
        return len(next(tokenize(tokenizer, [write_prompt(tokenizer, data, text)]))[0])

    with open(arguments.folder / "prompts.jsonl", "w") as file:
        for _ in range(NUM_PROMPTS):
            text = " ".join(rng.choices(words, k=arguments.prompt_tokens))
            lengths = range(len(text) + 1)
            too_long = bisect.bisect_right(
                lengths, arguments.prompt_tokens, key=lambda length: num_tokens(text[:length])
            )
            text = text[: too_long + 8]  # a letter more can be a token less
            while num_tokens(text) > arguments.prompt_tokens:
                text = text[:-1]
            file.write(json.dumps({"question": text, "answer": "1"}) + "\n")


def write_at_once(config: transformers.PretrainedConfig, folder: pathlib.Path) -> None:
    """Draw the whole model, on a GPU if there is one, and save it."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # transformers makes them 0, and then nothing would be measured of them
                torch.nn.init.normal_(parameter)
    model.to("cpu").save_pretrained(folder)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
