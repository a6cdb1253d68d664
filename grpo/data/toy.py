"""Tiny models, tokenizers and tasks that need no download: what the tests, the quickstart and `toy:NAME` paths run on.

The addition task is learnable in a minute on a CPU: one token per character, and the columns from the right as
thinking, each as its two digits and the digit below them, so that a step needs only one column and its carry.
It is learned late and then fast, and when exactly differs by tens of steps between seeds: stop a supervised start by
its loss. The task of a GPU is in word_problems.py.

What is built is an ordinary Hugging Face folder; nothing that reads it can tell it from a real checkpoint.

It imports transformers and tokenizers inside functions, since they take seconds.
"""

import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.data import word_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The format the rewards look for. Ordinary tokens, not special ones: decoding with skip_special_tokens must keep them.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# The addition task's model, by the names of config.json: 0.8 M parameters besides the vocabulary's.
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
    # Not the 1e6 of the real Qwen3: toy sequences are short, and frequencies that hardly turn within 30 tokens slow the
    # task down (after 500 supervised steps at learning rate 2e-3, beta2 0.999: 0.02 accuracy with 1e6, 0.90 with 1e4).
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}

# The word problems' model, by what differs: 64 M parameters.
WORD_PROBLEMS_MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}

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
    `word_problems`: see word_problems.py, 40000 train and 1000 test rows.
    Raises ValueError for another task or split.
    """
    if name not in ("addition", "word_problems"):
        raise ValueError(f"toy task {name!r} is unknown; there are addition, word_problems")
    splits = ADDITION_ROWS if name == "addition" else word_problems.ROWS
    if split not in splits:
        raise ValueError(f"toy task {name!r} has no split {split!r}; there are {', '.join(splits)}")
    if name == "word_problems":
        return word_problems.rows(split)
    generator = random.Random(f"addition/{split}")
    pairs: dict[tuple[int, int], None] = {}  # a dict, because a set has no fixed order
    while len(pairs) < ADDITION_ROWS[split]:
        a, b = generator.randint(*ADDITION_NUMBERS), generator.randint(*ADDITION_NUMBERS)
        # a checksum rather than a modulus of the numbers, which would hold out certain last digits
        held_out = zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0
        if held_out == (split == "test"):
            pairs[a, b] = None
    return [_addition_row(a, b) for a, b in pairs]


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


def trained_tokenizer(
    texts: Iterable[str], vocab_size: int = 2048, digits_apart: bool = False
) -> "PreTrainedTokenizerFast":
    """Byte-level BPE trained on `texts`, for any text: every byte has a token, the tags have one each.

    `digits_apart` makes each digit a token of its own, which arithmetic is easier to learn from.

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
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if digits_apart else words
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
    folder: str | Path, tokenizer: "PreTrainedTokenizerFast", seed: int, changes: dict[str, Any] | None = None
) -> Path:
    """Write a Hugging Face folder with a random float32 model and `tokenizer`; returns the folder.

    The weights follow from `seed` alone, and the global random state is left as it was. The vocabulary has as many
    entries as the tokenizer. `changes` replace entries of MODEL or add to them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(**(MODEL | {"vocab_size": len(tokenizer)} | ids | (changes or {})))
    # only the CPU's generator: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def build_if_toy(path: str, run_dir: str | Path, texts: Iterable[str], seed: int) -> str:
    """`toy:NAME` as a folder built inside the run folder; any other model path as it is.

    `toy:addition`: `addition_tokenizer` and a model of 0.8 M parameters for 512 positions. `toy:gsm8k`: a tokenizer
    trained on `texts`, those of the data, and a model of 1 M parameters for 2048 positions. `toy:word_problems`: a
    tokenizer made of its task, and a model of 64 M parameters for 512 positions.
    Raises ValueError for another name, and for `toy:gsm8k` without texts.
    """
    if not path.startswith("toy:"):
        return path
    folder = Path(run_dir) / "initial_model"
    if path == "toy:addition":
        make_model(folder, addition_tokenizer(), seed)
    elif path == "toy:gsm8k":
        texts = list(texts)
        if not texts:
            raise ValueError("toy:gsm8k trains its tokenizer on the data's texts; pass some")
        make_model(folder, trained_tokenizer(texts), seed, {"max_position_embeddings": 2048})
    elif path == "toy:word_problems":
        make_model(folder, word_problems_tokenizer(), seed, WORD_PROBLEMS_MODEL)
    else:
        name = path.removeprefix("toy:")
        raise ValueError(f"toy model {name!r} is unknown; there are addition, gsm8k, word_problems")
    return str(folder)


def word_problems_tokenizer() -> "PreTrainedTokenizerFast":
    """640 tokens: each word of the task is one, and each digit."""
    texts = [f"{row['question']}\n{row['completion']}" for row in word_problems.rows("test")]
    return trained_tokenizer(texts, vocab_size=640, digits_apart=True)


def _addition_row(a: int, b: int) -> dict[str, str]:
    answer = str(a + b)
    thinking, carry, x, y = "", 0, a, b
    while x or y:
        carry, digit = divmod(x % 10 + y % 10 + carry, 10)
        thinking += f"{x % 10}{y % 10}{digit};"
        x, y = x // 10, y // 10
    completion = f"<think>{thinking}</think><answer>{answer}</answer>"
    return {"question": f"{a}+{b}", "answer": answer, "completion": completion}


def _finish_tokenizer(tokenizer: Any, **names: Any) -> "PreTrainedTokenizerFast":
    """Add the tags, name the special tokens and the template, and make decode(encode(text)) == text."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
