"""A model's tokenizer and its chat template, or the user's prompt template: texts in, token ids out, within bounds.

A chat template comes with the model's folder. transformers renders it in Jinja's sandbox, which reaches no file and no
attribute of Python's; a loop has at most 100,000 rounds there, but loops may be nested, and texts and numbers grow
without a bound. So it is tried before the run in a process of its own, on a text that it cannot know, and has a
deadline and a longest result each time.
"""

import functools
import math
import multiprocessing
import pathlib
import re
import resource
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.config import DataConfig
from grpo.data.bounds import TEMPLATE_BYTES, bounded_memory, deadline
from grpo.data.columns import Message
from grpo.text import one_line, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

# A template takes a millisecond.
TEMPLATE_SECONDS = 10
# For the process that tries it, on a machine that is busy with others.
TRIAL_SECONDS = 120
# What a template may write around a short message: those of current models, with their advice on tools, stay below
# 10,000.
TEMPLATE_CHARACTERS = 1_000_000
QUOTED_CHARACTERS = 300
# Tokenized together: 300 bytes of memory for each.
TOKENIZED_CHARACTERS = 500_000
HAS_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TooLong(Exception):
    """A text has more tokens than it may: `num_tokens`, or, if not `exact`, at least as many."""

    def __init__(self, num_tokens: int, exact: bool):
        super().__init__(f"{'' if exact else 'at least '}{num_tokens} tokens")
        self.num_tokens = num_tokens


class Refused(ValueError):
    """A row cannot be encoded, mostly because the chat template does not take its messages; the message says why."""


def load_tokenizer(folder: str, data: DataConfig | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, with the chat template of `data.prompt_template` if that is a file.

    Raises ValueError if there is no template or no EOS token, or the folder brings code.
    """
    data = data or DataConfig()
    tokenizer = open_tokenizer(folder)
    if data.prompt_template and not data.is_text_template:
        tokenizer.chat_template = _read_template(data.prompt_template)
    if not tokenizer.chat_template and not data.prompt_template:
        raise ValueError(
            f"the tokenizer of {folder} has no chat template; use an instruction-tuned model, or say what a prompt "
            "looks like, such as --data.prompt-template 'Question: {question} Answer:' (or a .jinja file)"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} has no EOS token, so no completion could end; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer


def open_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """The tokenizer as tokenizer.json has it, if there is one; no code that a folder brings is run.

    Raises ValueError if its files cannot be used.
    """
    import transformers

    try:
        if (pathlib.Path(folder) / "tokenizer.json").is_file():
            # AutoTokenizer rebuilds it after the name of a class, which is the wrong one where a Llama has another
            # tokenizer (R1-Distill): silently other tokens.
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library that reads tokenizer.json raises nothing more precise
        reason = shorten(one_line(f"{type(error).__name__}: {error}"), QUOTED_CHARACTERS)
        raise ValueError(
            f"the tokenizer of {folder} cannot be read ({reason}); bring tokenizer.json and tokenizer_config.json again"
        ) from error


def _read_template(path: str) -> str:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"data.prompt_template file {pathlib.Path(path).absolute()} does not exist")
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.prompt_template file {path} is no text in UTF-8 ({error})") from error


def check_template(tokenizer: "PreTrainedTokenizerBase", config: DataConfig, seconds: float = TEMPLATE_SECONDS) -> None:
    """Try the chat template on a short random message, in a process with bounds.

    Raises ValueError if it needs more than `seconds` of the CPU's time, TEMPLATE_BYTES or TEMPLATE_CHARACTERS, or
    raises, or leaves the message out.
    """
    if config.is_text_template:  # nothing is run
        return
    probe = f"What is {secrets.token_hex(4)}?"  # which no template can know
    messages = _messages(config, probe)
    tried = _try_template(tokenizer, config, messages, seconds)
    wrong = template_name(tokenizer, config)
    way_out = "correct it, data.system_prompt or data.chat_template_kwargs, or use another model"
    if tried is None:
        raise ValueError(f"{wrong} was not done with one short message after {seconds:g} s; {way_out}")
    if isinstance(tried, Refused):
        raise ValueError(f"{tried} (one short message, within {TEMPLATE_BYTES >> 30} GiB); {way_out}")
    if len(tried) > TEMPLATE_CHARACTERS + sum(len(message["content"]) for message in messages):
        raise ValueError(f"{wrong} makes {len(tried)} characters of one short message; {way_out}")
    if probe not in tried:
        raise ValueError(
            f"{wrong} leaves the prompt out; write it as the content of `messages`"
            + (", or as {{ question }}" if config.prompt_template else "")
        )


def _try_template(
    tokenizer: "PreTrainedTokenizerBase", config: DataConfig, messages: list[Message], seconds: float
) -> str | Refused | None:
    """What `apply_template` makes of the messages or raises; None if its process had to be killed."""

    def render() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds),) * 2)
        with bounded_memory():
            try:
                tried = apply_template(tokenizer, config, messages, opening=True)[0]
            except Refused as error:
                tried = error
        theirs.send(tried)

    fork = multiprocessing.get_context("fork")  # starts at once
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=render, daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(TRIAL_SECONDS) else None
    except EOFError:  # killed at its limit
        return None
    finally:
        process.kill()
        process.join()


def apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    messages: list[Message],
    opening: bool,
    tools: list[Any] | None = None,
) -> tuple[str, list[tuple[int, int]] | None]:
    """What the chat template makes of messages, and the characters inside its generation markers (None without such).

    opening: with what begins an answer. Raises Refused if the template does not take the messages.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    question = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    arguments = tokenizer.special_tokens_map | ({"question": question} if config.prompt_template else {})
    arguments |= dict(config.chat_template_kwargs)
    template = tokenizer.get_chat_template(arguments.pop("chat_template", None), tools)
    has_markers = HAS_MARKERS.search(template) is not None
    try:
        texts, spans = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=opening,
            return_assistant_tokens_mask=has_markers,
            **arguments,
        )
    # what the operators of a template raise when a row is not what they expect
    except (
        *(jinja2.TemplateError, TypeError, AttributeError, LookupError),
        *(ArithmeticError, RecursionError, MemoryError),
    ) as error:
        reason = shorten(one_line(f"{type(error).__name__}: {error}"), QUOTED_CHARACTERS)
        raise Refused(f"{template_name(tokenizer, config)} refuses it: {reason}") from error
    return texts[0], spans[0] if has_markers else None


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    prompt: str | list[Message],
    max_tokens: int,
    tools: list[Any] | None = None,
) -> list[int]:
    """Token ids of one prompt, as `render_prompt` writes it and `tokenize_prompts` takes it apart.

    Raises TooLong for more than `max_tokens`, and what `render_prompt` raises.
    """
    (ids,) = tokenize_prompts(tokenizer, config, [render_prompt(tokenizer, config, prompt, max_tokens, tools)])
    if len(ids) > max_tokens:
        raise TooLong(len(ids), exact=True)
    return ids


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    prompt: str | list[Message],
    max_tokens: int,
    tools: list[Any] | None = None,
) -> str:
    """The text of one prompt.

    By the chat template: the system prompt unless empty, `prompt` as the user's message, the assistant's opening. A
    prompt that is a list of messages follows the system prompt, or begins with its own; `tools` are for the template.
    By a text template: that text with its placeholders filled in. Raises TooLong if it has more characters than
    `max_tokens` tokens stand for, Refused if the template does not take it, and ValueError if it takes longer than
    TEMPLATE_SECONDS.
    """
    messages = _messages(config, prompt)
    check_characters(tokenizer, "".join(message["content"] for message in messages), max_tokens)
    if config.is_text_template:
        chat = fill_in(config, messages, template_name(tokenizer, config))
    else:
        with deadline(TEMPLATE_SECONDS, template_name(tokenizer, config)):
            chat, _ = apply_template(tokenizer, config, messages, opening=True, tools=tools)
    check_characters(tokenizer, chat, max_tokens)
    return chat


def fill_in(config: DataConfig, messages: list[Message], name: str) -> str:
    """The text template with its placeholders filled in. Raises Refused for anything else than one question."""
    systems = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    if [message["role"] for message in others] != ["user"]:
        roles = ", ".join(message["role"] for message in others) or "none"
        raise Refused(f"{name} takes one question, and this prompt has the turns {roles}")
    # the question last, so that nothing within it is taken for a placeholder
    filled = config.prompt_template.replace("{system_prompt}", "\n".join(systems))
    return filled.replace("{question}", others[0]["content"])


def tokenize_prompts(tokenizer: "PreTrainedTokenizerBase", config: DataConfig, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered prompts: a chat template writes special tokens itself, a text begins with BOS if any."""
    if not config.is_text_template:
        return tokenize(tokenizer, texts)
    ids = tokenize(tokenizer, texts, add_special_tokens=True)
    # some tokenizers close every text
    return [sequence[:-1] if sequence[-1:] == [tokenizer.eos_token_id] else sequence for sequence in ids]


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], add_special_tokens: bool = False
) -> list[list[int]]:
    """Token ids of texts, so many at a time as memory allows."""
    batches = by_characters(texts, len)
    return [ids for batch in batches for ids in tokenizer(batch, add_special_tokens=add_special_tokens)["input_ids"]]


def by_characters(items: Iterable[Item], num_characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in lists of at most TOKENIZED_CHARACTERS each, or of one."""
    waiting, total = [], 0
    for item in items:
        if waiting and total + num_characters(item) > TOKENIZED_CHARACTERS:
            yield waiting
            waiting, total = [], 0
        waiting.append(item)
        total += num_characters(item)
    if waiting:
        yield waiting


def detokenize(tokenizer: "PreTrainedTokenizerBase", sequences: list[list[int]]) -> list[str]:
    """The texts of token ids, special tokens included; on all cores, if the tokenizer alone makes them."""
    from transformers import PreTrainedTokenizerFast

    own = [getattr(type(tokenizer), name, None) for name in ("decode", "_decode")]
    is_plain = own == [PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode]
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(sequences, skip_special_tokens=False)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in sequences]


def template_name(tokenizer: "PreTrainedTokenizerBase", config: DataConfig) -> str:
    """The template as a message names it."""
    own = config.prompt_template
    return f"data.prompt_template {own}" if own else f"the chat template of {tokenizer.name_or_path}"


def check_characters(tokenizer: "PreTrainedTokenizerBase", text: str, max_tokens: int) -> None:
    """Raise TooLong if `text` has more characters than `max_tokens` tokens stand for; nothing is tokenized.

    Tokenizers take 300 bytes of memory and more for each character. No token stands for more characters than the
    longest entry of the vocabulary has. (Where a tokenizer drops characters, or has one sign for all words that it does
    not know, a text might have fitted that is refused here.)
    """
    if len(text) <= max_tokens:
        return
    least = -(-len(text) // longest_token(tokenizer))
    if least > max_tokens:
        raise TooLong(least, exact=False)


@functools.lru_cache(maxsize=4)  # 0.1 s for 150,000 entries
def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Characters of the longest entry of the vocabulary."""
    return max(map(len, tokenizer.get_vocab()))


def with_system_prompt(config: DataConfig, messages: list[Message]) -> list[Message]:
    """`messages` behind `data.system_prompt`, unless that is empty or they begin with a system message."""
    if not config.system_prompt or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _messages(config: DataConfig, prompt: str | list[Message]) -> list[Message]:
    return with_system_prompt(config, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
