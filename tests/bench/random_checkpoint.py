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
from tests.unit.models.test_hf_folder import CODER_0_5B, LLAMA3_1_8B, QWEN3_0_6B, QWEN3_1_7B, QWEN3_30B_A3B

SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-1.7b": QWEN3_1_7B,
    "qwen2.5-0.5b": CODER_0_5B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "llama3.1-8b": LLAMA3_1_8B,
}
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
    shape = SHAPES[arguments.shape]
    if arguments.num_layers:
        shape = shape | {"num_hidden_layers": arguments.num_layers}
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(400)]
    tokenizer = trained_tokenizer([" ".join(rng.choices(words, k=50)) for _ in range(50)], vocab_size=1024)
    tokenizer.save_pretrained(arguments.folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(**shape | ids)
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
