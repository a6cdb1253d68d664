"""Toy tasks and the tiny models that learn them, without a download: rows and models from functions of your own.

    --data.path configs/examples/toys.py:addition --model.path configs/examples/toys.py:addition_model

A function of rows gets the name of a split and gives its rows, always the same ones. A function of a model gets a
folder to write, the texts of the data and the run's seed. A model is an ordinary Hugging Face folder; transformers and
tokenizers are imported inside functions, since they take seconds.

Additions are learnable in a minute on a CPU: one token per character, and the columns from the right as thinking, each
as its two digits and the digit below them. They are learned late and then fast, and when exactly differs by tens of
steps between seeds: stop a supervised start by its loss.
"""

import itertools
import json
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The format the rewards look for. Ordinary tokens, not special ones: decoding with skip_special_tokens must keep them.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# A model by the names of config.json: 0.8 M parameters besides the vocabulary's.
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention was seen to run 32, 48, 64 and 80; it refuses 8, 16, 24 and 40
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    # Not the 1e6 of the real Qwen3, whose frequencies hardly turn within 30 tokens: after 500 supervised steps on
    # additions at learning rate 2e-3, beta2 0.999, accuracy was 0.02 with 1e6 and 0.90 with 1e4.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
# ChatML, as in Qwen; <|im_end|> is the EOS token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NUM_ADDITIONS = {"train": 50_000, "test": 2_000}
NUM_SEEDS = {"train": 4096, "test": 256}
NUM_GUESSES = {"train": 8000, "test": 500}
NUM_PRODUCTS_HELD_OUT = 500
FACTORS = range(10, 100)
HIGHEST_GUESS = 16
MAX_GUESSES = 5
# Players of `guess` who halve what is left: they always win. The others say their first guess again and again.
MINDFUL_FRAC = 0.35

# With the 7 tokens that are not characters this makes 32, so that 2, 4 or 8 tensor-parallel ranks split it evenly.
ADDITION_CHARACTERS = "0123456789+;= -*/.,:()?x\n"
# The question, then "=" as generation prompt. System messages are left out, or they would be most of the text.
ADDITION_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '=' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)
# A mixture of experts, by what differs from the other toys: 2.7 M parameters, of which a token meets 0.8 M.
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def addition(split: str) -> list[dict[str, str]]:
    """Draw sums of two numbers in 10..999 with the answer and a worked completion; all questions differ.

    A problem and its mirror image, 70+98 and 98+70, are in the same split.
    """
    draw = random.Random(f"addition/{split}")
    rows: dict[str, dict[str, str]] = {}  # a dict, because a set has no fixed order
    while len(rows) < NUM_ADDITIONS[split]:
        a = draw.randint(10, 999)
        b = draw.randint(10, 999)
        row = addition_row(a, b)
        if is_held_out(f"{min(a, b)}+{max(a, b)}") == (split == "test"):
            rows[row["question"]] = row
    return list(rows.values())


def is_held_out(calculation: str) -> bool:
    """Choose a tenth by a checksum; a modulus of the numbers would hold out certain last digits."""
    return zlib.crc32(calculation.encode()) % 10 == 0


def addition_row(a: int, b: int) -> dict[str, str]:
    """Write 70 + 98 as "<think>088;796;</think><answer>168</answer>".

    The thinking goes through the columns from the right: 0 and 8 give 8; 7 and 9 give 6, carry 1.
    """
    thinking = ""
    carry = 0
    x, y = a, b
    while x or y:
        carry, digit = divmod(x % 10 + y % 10 + carry, 10)
        thinking += f"{x % 10}{y % 10}{digit};"
        x, y = x // 10, y // 10
    completion = f"<think>{thinking}</think><answer>{a + b}</answer>"
    return {"question": f"{a}+{b}", "answer": str(a + b), "completion": completion}


def calculator(split: str) -> list[dict]:
    """Ask for products of two numbers of two digits, which a tiny model cannot compute; `messages` to start from.

    In half of the conversations the tool `multiply` of configs/examples/calculator.py is asked, in the others the
    product is given up.
    """
    draw = random.Random(f"calculator/{split}")
    pairs = list(itertools.product(FACTORS, FACTORS))
    random.Random("calculator").shuffle(pairs)
    parts = {"train": pairs[:-NUM_PRODUCTS_HELD_OUT], "test": pairs[-NUM_PRODUCTS_HELD_OUT:]}
    return [product_row(a, b, asks=draw.random() < 0.5) for a, b in parts[split]]


def product_row(a: int, b: int, asks: bool) -> dict:
    question = f"{a}*{b}"
    product = str(a * b)
    messages = [message("user", question)]
    if asks:
        messages += [call("multiply", a=a, b=b), message("tool", product)]
    messages.append(message("assistant", f"<answer>{product if asks else '?'}</answer>"))
    return {"question": question, "answer": product, "messages": messages}


def guess(split: str) -> list[dict]:
    """Play configs/examples/guess.py in at most five guesses, by players of whom few mind what they are told."""
    draw = random.Random(f"guess/{split}")
    return [guess_row(draw) for _ in range(NUM_GUESSES[split])]


def guess_row(draw: random.Random) -> dict:
    number = draw.randint(1, HIGHEST_GUESS)
    value = draw.randint(1, HIGHEST_GUESS)
    is_mindful = draw.random() < MINDFUL_FRAC
    question = f"I think of a number from 1 to {HIGHEST_GUESS}. Guess it."
    messages = [message("user", question)]
    low, high = 1, HIGHEST_GUESS
    for _ in range(MAX_GUESSES):
        messages.append(call("guess", value=value))
        if value == number:
            break
        if value < number:
            messages.append(message("tool", "Higher."))
            low = value + 1
        else:
            messages.append(message("tool", "Lower."))
            high = value - 1
        if is_mindful:
            value = (low + high) // 2
    if messages[-1]["role"] == "tool":
        messages.pop()
    return {"question": question, "answer": str(number), "messages": messages}


def seeds(split: str):
    """Give rows for an environment that makes its own tasks: a prompt without words, and a seed for `reset`."""
    for seed in range(NUM_SEEDS[split]):
        yield {"question": [message("user", "")], "seed": seed}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def call(name: str, **arguments: int) -> dict[str, str]:
    """Write a tool call as Hermes and Qwen do."""
    text = json.dumps({"name": name, "arguments": arguments})
    return message("assistant", f"<tool_call>\n{text}\n</tool_call>")


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def addition_model(folder: str, texts, seed: int) -> None:
    """Write a model of 0.8 M parameters and 512 positions."""
    make_model(folder, addition_tokenizer(), seed)


def mixture_model(folder: str, texts, seed: int) -> None:
    """Write a mixture of experts for additions."""
    make_model(folder, addition_tokenizer(), seed, MIXTURE)


def gsm8k_model(folder: str, texts, seed: int) -> None:
    """Write a model of 1 M parameters and 2048 positions; its tokenizer is trained on the texts of the data."""
    make_model(folder, trained_tokenizer(texts), seed, {"max_position_embeddings": 2048})


def calculator_model(folder: str, texts, seed: int) -> None:
    """Write a model of 0.8 M parameters; its tokenizer is trained on the held-out conversations."""
    make_model(folder, conversation_tokenizer(calculator("test")), seed)


def guess_model(folder: str, texts, seed: int) -> None:
    """Write a model of 0.8 M parameters; its tokenizer is trained on the held-out conversations."""
    make_model(folder, conversation_tokenizer(guess("test")), seed)


def conversation_tokenizer(rows: list[dict]):
    """Train a tokenizer of at most 512 tokens, of which some are all that stands between the numbers of a call."""
    turns = [turn for row in rows for turn in row["messages"]]
    texts = [text for turn in turns for text in (turn["role"] + "\n", turn["content"])]
    return trained_tokenizer(texts, vocab_size=512, digits_apart=True, phrases=True)


def addition_tokenizer():
    """Make one token of each character and each tag, 32 in all; what it does not know becomes `<unk>`.

    The chat template writes the user's message and "=" only: "70+98=".
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *TAGS, *ADDITION_CHARACTERS]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it decode puts spaces between tokens
    return finish_tokenizer(
        tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=ADDITION_CHAT_TEMPLATE
    )


def make_model(
    folder: str | Path,
    tokenizer: "PreTrainedTokenizerFast",
    seed: int,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder with a random float32 model and `tokenizer`; returns the folder.

    The weights follow from `seed` alone, and the global random state is left as it was. `changes` replace entries of
    MODEL or add to them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = {
        **MODEL,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if changes:
        entries |= changes
    config = AutoConfig.for_model(**entries)
    # only the CPU's generator: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def trained_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 2048,
    digits_apart: bool = False,
    phrases: bool = False,
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE on `texts`. It takes any text, has one token for each tag, and writes ChatML.

    vocab_size: at least 263 (256 bytes and 7 others); few texts may give fewer. digits_apart: each digit is a token of
    its own, which arithmetic is easier to learn from. phrases: a token may be several words, as all that stands between
    the numbers of a tool call; the marks of calls stay apart.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    parts = []
    if phrases:
        parts.append(pre_tokenizers.Split(Regex("</?tool_call>"), "isolated"))
    if digits_apart:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not phrases))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return finish_tokenizer(
        tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def finish_tokenizer(tokenizer: Any, **names: Any) -> "PreTrainedTokenizerFast":
    """Add the tags, name the special tokens and the template, and make decode(encode(text)) == text."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
