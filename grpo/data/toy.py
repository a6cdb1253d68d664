"""Models and tokenizers from nothing, with random weights: a user's function, the tests and toy recipes use them.

What is built is an ordinary Hugging Face folder. configs/examples/toys.py has tasks for such models. transformers and
tokenizers are imported inside functions, since they take seconds.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.config.user_files import load_function
from grpo.config.values import names_function
from grpo.text import reason_of

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


def build_model(path: str, run_dir: str | Path, texts: Iterable[str], seed: int) -> str:
    """Have the user's function `path` (`path/file.py:function`) write `initial_model` in the run folder, and return it.

    The function gets that folder, `texts` (those of the data) and `seed`. Any other path is returned as it is. Raises
    ValueError with the reason if the function raises, and what `load_function` raises.
    """
    if not names_function(path):
        return path
    function = load_function(path, "model.path")
    folder = str(Path(run_dir) / "initial_model")
    try:
        function(folder, texts, seed)
    except Exception as error:  # whatever a user's function may raise
        raise ValueError(f"model.path {path} raised {reason_of(error)}; correct the function") from error
    return folder


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
