"""Tiny models, tokenizers and tasks that need no download: what the tests, the quickstart and `toy:NAME` paths run on.

The addition task is learnable in a minute on a CPU: one token per character, and the columns from the right as
thinking, each as its two digits and the digit below them, so that a step needs only one column and its carry.
It is learned late and then fast, and when exactly differs by tens of steps between seeds: stop a supervised start by
its loss.

What is built is an ordinary Hugging Face folder; nothing that reads it can tell it from a real checkpoint.

It imports transformers and tokenizers inside functions, since they take seconds.
"""

import random
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The format the rewards look for. Ordinary tokens, not special ones: decoding with skip_special_tokens must keep them.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# Head sizes that vLLM's CPU attention was seen to run; it refuses 8, 16, 24 and 40.
HEAD_DIMS = (32, 48, 64, 80)

# Not the 1e6 of the real Qwen3: toy sequences are short, and frequencies that hardly turn within 30 tokens slow the
# task down (after 500 supervised steps at learning rate 2e-3 and beta2 0.999: 0.02 accuracy with 1e6, 0.90 with 1e4).
ROPE_THETA = 1e4

ADDITION_NUMBERS = (10, 999)
ADDITION_ROWS = {"train": 50_000, "test": 2_000}
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
# ChatML, as in Qwen; <|im_end|> is the EOS token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def task_rows(name: str, split: str) -> list[dict[str, str]]:
    """The rows of a built-in task: `question`, `answer`, and a worked `completion` to start from; always the same ones.

    `addition`: {"question": "70+98", "answer": "168", "completion": "<think>088;796;</think><answer>168</answer>"},
    numbers uniform in 10..999, thinking = columns from the right (0 and 8 give 8; 7 and 9 give 6, carry 1). 50000 train
    and 2000 test rows, all distinct; a problem and its mirror image (98+70) are in the same split.

    Raises:
        ValueError: unknown task or split.
    """
    if name not in TASKS:
        raise ValueError(f"toy task {name!r} is unknown; there is {', '.join(TASKS)}")
    return TASKS[name](split)


def addition_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per character and per tag, 32 in all; what it does not know becomes `<unk>`.

    The chat template writes the user's message and "=" only: "70+98=".
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *TAGS, *ADDITION_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it decode puts spaces between tokens
    return _finish_tokenizer(
        tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=ADDITION_CHAT_TEMPLATE
    )


def trained_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> "PreTrainedTokenizerFast":
    """Byte-level BPE trained on `texts`, for any text: every byte has a token, the tags have one each.

    `vocab_size` is what it aims at; few texts may give fewer tokens. The chat template is ChatML: turns between
    <|im_start|> and <|im_end|> (the EOS), for system, user and assistant.

    Raises:
        ValueError: `vocab_size` has no room for the 256 bytes and the 7 other tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    smallest = 256 + len(special) + len(TAGS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small; 256 bytes, tags and special tokens need {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finish_tokenizer(
        tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    folder: str | Path,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    seed: int,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = True,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    rope_scaling: dict[str, Any] | None = None,
    initializer_range: float = 0.02,
) -> Path:
    """Write a Hugging Face folder with a random float32 model and `tokenizer`; returns the folder.

    The weights follow from `seed` alone, and the global random state is left as it was. The vocabulary has as many
    entries as the tokenizer. The defaults make 0.8 M parameters, not counting the vocabulary's.

    Args:
        rope_scaling: llama only: what a Llama-3.1 config.json holds under that name, for example
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}.

    Raises:
        ValueError: a head size vLLM cannot run on CPU, heads that do not divide, or an unknown architecture.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim={head_dim} does not run in vLLM on a CPU; use one of {HEAD_DIMS}")
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"num_heads={num_heads} is no multiple of num_key_value_heads={num_key_value_heads}; "
            f"use {num_heads} key-value heads for plain attention"
        )
    if architecture not in ("qwen3", "llama"):
        raise ValueError(f"architecture={architecture!r} is unknown; use 'qwen3' or 'llama'")
    if rope_scaling and architecture != "llama":
        raise ValueError(f"rope_scaling needs architecture='llama', not {architecture!r}")
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA} | (rope_scaling or {})
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-6 if architecture == "qwen3" else 1e-5,  # as in the real checkpoints
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    # only the CPU's generator: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        if architecture == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**settings))
        else:
            model = LlamaForCausalLM(LlamaConfig(**settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def build(name: str, folder: str | Path, data_rows: Iterable[dict[str, Any]] | None = None, seed: int = 0) -> Path:
    """Build what `model.path = "toy:NAME"` means in `folder`; returns it.

    `addition`: `addition_tokenizer` and a model of 0.8 M parameters for 512 positions. `gsm8k`: a tokenizer trained on
    the `question` and `answer` columns of `data_rows` and a model of 1 M parameters for 2048 positions.

    Raises:
        ValueError: unknown name, or `gsm8k` without rows.
    """
    if name == "addition":
        return make_model(folder, addition_tokenizer(), seed=seed)
    if name == "gsm8k":
        texts = [str(row[column]) for row in data_rows or () for column in ("question", "answer")]
        if not texts:
            raise ValueError(
                "toy:gsm8k trains its tokenizer on the data; pass data_rows with question and answer columns"
            )
        return make_model(folder, trained_tokenizer(texts), seed=seed, max_position_embeddings=2048)
    raise ValueError(f"toy model {name!r} is unknown; there are addition, gsm8k")


def build_if_toy(path: str, run_dir: str | Path, rows: Iterable[dict[str, Any]], seed: int) -> str:
    """`toy:NAME` as a folder built inside the run folder; any other model path as it is."""
    if not path.startswith("toy:"):
        return path
    return str(build(path.removeprefix("toy:"), Path(run_dir) / "initial_model", rows, seed))


def _addition_rows(split: str) -> list[dict[str, str]]:
    if split not in ADDITION_ROWS:
        raise ValueError(f"toy task 'addition' has no split {split!r}; there are {', '.join(ADDITION_ROWS)}")
    generator = random.Random(f"addition/{split}")
    pairs: dict[tuple[int, int], None] = {}  # a dict, because a set has no fixed order
    while len(pairs) < ADDITION_ROWS[split]:
        a, b = generator.randint(*ADDITION_NUMBERS), generator.randint(*ADDITION_NUMBERS)
        # a checksum rather than a modulus of the numbers, which would hold out certain last digits
        held_out = zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0
        if held_out == (split == "test"):
            pairs[a, b] = None
    return [_addition_row(a, b) for a, b in pairs]


def _addition_row(a: int, b: int) -> dict[str, str]:
    answer = str(a + b)
    thinking, carry, x, y = "", 0, a, b
    while x or y:
        carry, digit = divmod(x % 10 + y % 10 + carry, 10)
        thinking += f"{x % 10}{y % 10}{digit};"
        x, y = x // 10, y // 10
    completion = f"<think>{thinking}</think><answer>{answer}</answer>"
    return {"question": f"{a}+{b}", "answer": answer, "completion": completion}


def _finish_tokenizer(tokenizer: Any, *, chat_template: str, **names: Any) -> "PreTrainedTokenizerFast":
    """Add the tags, name the special tokens, and make decode(encode(text)) == text."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, clean_up_tokenization_spaces=False, **names
    )


TASKS: dict[str, Callable[[str], list[dict[str, str]]]] = {"addition": _addition_rows}
