"""Tiny models, tokenizers and tasks that need no download: what the tests and `toy:NAME` paths run on.

Additions are learnable in a minute on a CPU: one token per character, and the columns from the right as thinking, each
as its two digits and the digit below them. They are learned late and then fast, and when exactly differs by tens of
steps between seeds: stop a supervised start by its loss. Word problems are for a model of tens of millions of
parameters, trained from nothing. What is built is an ordinary Hugging Face folder.

transformers and tokenizers are imported inside functions, since they take seconds.
"""

import math
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.data import toy_conversations

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
    # Not the 1e6 of the real Qwen3, whose frequencies hardly turn within 30 tokens: after 500 supervised steps at
    # learning rate 2e-3, beta2 0.999, accuracy was 0.02 with 1e6 and 0.90 with 1e4.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
# A mixture of experts, by what differs: 2.7 M parameters, of which a token meets 0.8 M.
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
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

ROWS = {"addition": {"train": 50_000, "test": 2_000}, "word_problems": {"train": 40_000, "test": 1_000}}

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

LARGEST = 999
WOMEN = "Ada Anna Bea Clara Dana Ella Emma Eva Grace Ida Iris Jane Lea Lena Lily Mia Nina Nora Olga Rosa Sara"
MEN = "Adam Ben Carl Dan Emil Finn Fred Hugo Ivan Jack Jan Karl Leo Luis Max Nick Noah Omar Otto Paul Tom"
THINGS = (
    "apples pears plums lemons cookies muffins candies nuts eggs shells stones coins stamps cards stickers marbles "
    "pencils pens books notebooks ribbons buttons beads bricks tiles balls kites badges keys bottles flowers leaves"
)
HOLDERS = "boxes bags baskets packs jars trays crates bundles"
# Sentences; {n} is a number, {k} how many {holders} of {n}, or how many times
ADD = (
    "{She} buys {n} more {things}.",
    "{She} finds {n} {things}.",
    "{friend} gives {her} {n} {things}.",
    "{She} gets {n} {things} as a present.",
    "Then {n} more {things} arrive.",
)
TAKE_AWAY = (
    "{She} gives {n} {things} to {friend}.",
    "{She} loses {n} {things}.",
    "{She} sells {n} of the {things}.",
    "{friend} borrows {n} {things}.",
    "Then {n} {things} break.",
)
ADD_HOLDERS = ("{She} buys {k} {holders} with {n} {things} each.", "{friend} brings {k} {holders} of {n} {things}.")
TAKE_HOLDERS = (
    "{She} fills {k} {holders} with {n} {things} each and sells them.",
    "{She} gives away {k} {holders} of {n} {things}.",
)
MULTIPLY = (
    "Then the number of {things} grows to {k} times as many.",
    "After a year {she} has {k} times as many {things}.",
)
# What they do to the number of things, and from where to where each factor of the change is.
KINDS = (
    *((ADD, "+", [(2, 99)]), (TAKE_AWAY, "-", [(2, 99)])),
    *((ADD_HOLDERS, "+", [(2, 9), (2, 12)]), (TAKE_HOLDERS, "-", [(2, 9), (2, 12)])),
    (MULTIPLY, "*", [(2, 4)]),
)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks
# ---------------------------------------------------------------------------------------------------------------------


def task_rows(name: str, split: str) -> list[dict[str, str]]:
    """The rows of a built-in task: `question`, `answer`, and a worked `completion` to start from; always the same ones.

    `addition`: 70+98 with "<think>088;796;</think><answer>168</answer>", numbers uniform in 10..999, thinking =
    columns from the right (0 and 8 give 8; 7 and 9 give 6, carry 1); a problem and its mirror image (98+70) are in the
    same split. `word_problems`: "Mia has 37 pens. She buys 4 boxes with 12 pens each. She gives 18 pens to Tom. ..."
    with "<think>4*12=48. 37+48=85. 85-18=67.</think><answer>67</answer>"; 37+4*12-18 is in one split, whatever is
    counted. All questions of a split differ. `calculator`, `guess`: see toy_conversations.py. `seeds`: rows of an
    environment that makes its own tasks, as many as `split` says. Raises ValueError for another task or split.
    """
    if name == "seeds":
        count = int(split) if split.isdecimal() else 1024
        return [{"question": [{"role": "user", "content": ""}], "seed": seed} for seed in range(count)]
    if name in toy_conversations.TASKS:
        return toy_conversations.rows(name, split)
    if name not in ROWS:
        raise ValueError(f"toy task {name!r} is unknown; there are {', '.join([*ROWS, *toy_conversations.TASKS])}")
    if split not in ROWS[name]:
        raise ValueError(f"toy task {name!r} has no split {split!r}; there are {', '.join(ROWS[name])}")
    draw, make = random.Random(f"{name}/{split}"), {"addition": _addition, "word_problems": _word_problem}[name]
    found: dict[str, dict[str, str]] = {}  # a dict, because a set has no fixed order
    while len(found) < ROWS[name][split]:
        calculation, row = make(draw)
        # a checksum rather than a modulus of the numbers, which would hold out certain last digits
        if (zlib.crc32(calculation.encode()) % 10 == 0) == (split == "test"):
            found[row["question"]] = row
    return list(found.values())


def _addition(draw: random.Random) -> tuple[str, dict[str, str]]:
    """A calculation without the order of its numbers, and its row."""
    a, b = draw.randint(10, 999), draw.randint(10, 999)
    return f"{min(a, b)}+{max(a, b)}", addition_row(a, b)


def addition_row(a: int, b: int) -> dict[str, str]:
    """The row of a + b, as `task_rows` tells."""
    thinking, carry, x, y = "", 0, a, b
    while x or y:
        carry, digit = divmod(x % 10 + y % 10 + carry, 10)
        thinking += f"{x % 10}{y % 10}{digit};"
        x, y = x // 10, y // 10
    completion = f"<think>{thinking}</think><answer>{a + b}</answer>"
    return {"question": f"{a}+{b}", "answer": str(a + b), "completion": completion}


def _word_problem(draw: random.Random) -> tuple[str, dict[str, str]]:
    """A calculation such as "37+4*12-18", and its row."""
    is_woman = draw.random() < 0.5
    person = draw.choice((WOMEN if is_woman else MEN).split())
    words = {"She": "She", "she": "she", "her": "her"} if is_woman else {"She": "He", "she": "he", "her": "him"}
    words |= {"things": draw.choice(THINGS.split()), "holders": draw.choice(HOLDERS.split())}
    total = draw.randint(5, 99)
    calculation, thoughts = str(total), []
    sentences = [f"{person} has {total} {words['things']}."]
    for _ in range(draw.randint(2, 4)):
        templates, sign, factors, result = _change(draw, total)
        number = math.prod(factors)
        if len(factors) == 2:
            thoughts.append(f"{factors[0]}*{factors[1]}={number}.")
        thoughts.append(f"{total}{sign}{number}={result}.")
        calculation += sign + "*".join(map(str, factors))
        total = result
        friend = draw.choice((MEN if is_woman else WOMEN).split())  # so that nobody gives something to themselves
        numbers = {"k": factors[0], "n": factors[-1], "friend": friend}
        sentences.append(draw.choice(templates).format(**words, **numbers))
    sentences.append(f"How many {words['things']} does {person} have now?")
    completion = f"<think>{' '.join(thoughts)}</think><answer>{total}</answer>"
    return calculation, {"question": " ".join(sentences), "answer": str(total), "completion": completion}


def _change(draw: random.Random, total: int) -> tuple[tuple[str, ...], str, list[int], int]:
    """Sentences to choose from, a sign, the factors behind it, and the 1 to LARGEST things that are left."""
    while True:
        templates, sign, ranges = draw.choice(KINDS)
        factors = [draw.randint(*bounds) for bounds in ranges]
        number = math.prod(factors)
        result = {"+": total + number, "-": total - number, "*": total * number}[sign]
        if 1 <= result <= LARGEST:
            return templates, sign, factors, result


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------------------------------


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


def word_problems_tokenizer() -> "PreTrainedTokenizerFast":
    """640 tokens: each word of the task is one, and each digit."""
    texts = [f"{row['question']}\n{row['completion']}" for row in task_rows("word_problems", "test")]
    return trained_tokenizer(texts, vocab_size=640, digits_apart=True)


def trained_tokenizer(
    texts: Iterable[str], vocab_size: int = 2048, digits_apart: bool = False, phrases: bool = False
) -> "PreTrainedTokenizerFast":
    """Byte-level BPE trained on `texts`, for any text: every byte has a token, the tags have one each; writes ChatML.

    vocab_size: at least 263 (256 bytes and 7 others); few texts may give fewer. digits_apart: each digit is a token of
    its own, which arithmetic is easier to learn from. phrases: a token may be several words, as all that stands between
    the numbers of a tool call; the marks of calls stay apart.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(Regex("</?tool_call>"), "isolated")] if phrases else []
    parts += [pre_tokenizers.Digits(individual_digits=True)] if digits_apart else []
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not phrases))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
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


def _finish_tokenizer(tokenizer: Any, **names: Any) -> "PreTrainedTokenizerFast":
    """Add the tags, name the special tokens and the template, and make decode(encode(text)) == text."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def make_model(
    folder: str | Path, tokenizer: "PreTrainedTokenizerFast", seed: int, changes: dict[str, Any] | None = None
) -> Path:
    """Write a Hugging Face folder with a random float32 model and `tokenizer`; returns the folder.

    The weights follow from `seed` alone, and the global random state is left as it was. `changes` replace entries of
    MODEL or add to them.
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

    `toy:gsm8k` has a tokenizer trained on `texts`, those of the data, 1 M parameters and 2048 positions. The others
    have one made of their task and 512 positions; `toy:word_problems` has 64 M parameters, `toy:addition`,
    `toy:calculator` and `toy:guess` 0.8 M. `toy:mixture` is for additions and has experts. Raises ValueError for
    another name.
    """
    if not path.startswith("toy:"):
        return path
    name, folder = path.removeprefix("toy:"), Path(run_dir) / "initial_model"
    if name == "addition":
        make_model(folder, addition_tokenizer(), seed)
    elif name == "mixture":
        make_model(folder, addition_tokenizer(), seed, MIXTURE)
    elif name == "gsm8k":
        make_model(folder, trained_tokenizer(texts), seed, {"max_position_embeddings": 2048})
    elif name in toy_conversations.TASKS:
        messages = [message for row in task_rows(name, "test") for message in row["messages"]]
        texts = [text for message in messages for text in (message["role"] + "\n", message["content"])]
        make_model(folder, trained_tokenizer(texts, vocab_size=512, digits_apart=True, phrases=True), seed)
    elif name == "word_problems":
        make_model(folder, word_problems_tokenizer(), seed, WORD_PROBLEMS_MODEL)
    else:
        raise ValueError(
            f"toy model {name!r} is unknown; use addition, calculator, gsm8k, guess, mixture, word_problems"
        )
    return str(folder)
