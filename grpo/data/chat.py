"""A model's tokenizer and its chat template, or the user's prompt template: messages in, text out.

A chat template comes with the model's folder. transformers renders it in Jinja's sandbox, which reaches no file and no
attribute of Python's. It is tried on a random text before the run. Left out: bounds on the time and memory of a
template; one without an end holds the start up until its deadline.
"""

import datetime
import re
import secrets
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.config import DataConfig
from grpo.data.rows import BadRow, Messages, Tools, as_messages
from grpo.text import printable, reason_of, without_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# First and past-the-end place among the characters of a text.
Span = tuple[int, int]
# A text of messages, and its spans inside the template's generation markers, None without any
Rendered = tuple[str, list[Span] | None]

# The day of all templates that write the date, so that a run repeats: the one that Llama 3's write without a clock
TEMPLATE_DAY = datetime.datetime(2024, 7, 26)
# What the operators of a template raise when a row is not what they expect
OPERATOR_ERRORS = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError)
# What a tokenizer is tried on: an expression in it that goes back without end over a word, gives up
TRIED_TEXT = "a" * 200
HAS_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SYSTEM_ROLES = ("system", "developer")


class Refused(BadRow):
    """The reason why a row cannot be encoded. Mostly the chat template does not take its messages."""


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def load_tokenizer(folder: str, data: DataConfig | None = None) -> "PreTrainedTokenizerBase":
    """Open the tokenizer of a model folder, with the chat template of `data.prompt_template` if that is a file.

    Raises ValueError if there is no template or no EOS token, or if a file cannot be read.
    """
    tokenizer = open_tokenizer(folder)
    own = data.prompt_template if data else ""
    if own and not data.is_text_template:
        try:
            tokenizer.chat_template = Path(own).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            path = Path(own).absolute()
            raise ValueError(f"data.prompt_template file {path} cannot be read as text in UTF-8 ({error})") from error
    if not tokenizer.chat_template and not own:
        raise ValueError(
            f"the tokenizer of {folder} has no chat template; use an instruction-tuned model, or say what a prompt "
            "looks like, such as --data.prompt-template 'Question: {question} Answer:' (or a .jinja file, such as the "
            "entry of a chat_template.json)"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} has no EOS token, so no completion could end; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer


def open_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """Open the tokenizer that tokenizer.json describes, without running any code from the folder.

    AutoTokenizer would rebuild it from the name of a class. That is the wrong class where a Llama has another tokenizer
    (R1-Distill), and the tokens would be wrong without a message. Raises ValueError if it cannot be read.
    """
    import transformers

    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer(TRIED_TEXT)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library that reads tokenizer.json is in Rust, whose panics are no Exception
        raise ValueError(
            f"the tokenizer of {folder} cannot be read ({reason_of(error)}); bring tokenizer.json and "
            "tokenizer_config.json again"
        ) from error


def detokenize(tokenizer: "PreTrainedTokenizerBase", sequences: list[list[int]]) -> list[str]:
    """Decode token ids, special tokens included. Uses all cores if the tokenizer leaves blanks as they are."""
    if not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(sequences, skip_special_tokens=False)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in sequences]


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> list[str]:
    """Return the text of each token. They join to the whole text.

    A character of several tokens is the text of the last one, and the others are empty.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in ids]


# ---------------------------------------------------------------------------------------------------------------------
# Template
# ---------------------------------------------------------------------------------------------------------------------


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the ids that no text may become: special tokens, and added ones that stand in the chat template.

    The unknown token may occur, and so may blanks, which are added tokens of Gemma.
    """
    template = str(tokenizer.chat_template)
    special = set(tokenizer.all_special_ids)
    for token, entry in tokenizer.added_tokens_decoder.items():
        stands_in_template = bool(entry.content.strip()) and entry.content in template
        if entry.special or stands_in_template:
            special.add(token)
    other_roles = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    if tokenizer.unk_token_id not in other_roles:
        special.discard(tokenizer.unk_token_id)
    return special


def plain_ids(tokenizer: "PreTrainedTokenizerBase", text: str, special: Set[int]) -> list[int]:
    """Return ids of a text without the `special` ones. Where the text would become one, it is split into pieces."""
    text = without_surrogates(text)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if len(text) < 2 or special.isdisjoint(ids):
        return [token for token in ids if token not in special]
    half = len(text) // 2
    return plain_ids(tokenizer, text[:half], special) + plain_ids(tokenizer, text[half:], special)


def as_written(written: str, before: str, after: str, text: str) -> str:
    """Return what a template made of `text`, which it may trim or quote: all that is between `before` and `after`.

    Returns `text` if these are not found.
    """
    start = len(before)
    end = len(written) - len(after)
    is_found = written.startswith(before) and written.endswith(after)
    return written[start:end] if is_found and start <= end else text


def prompt_messages(data: DataConfig, prompt: str | Messages) -> Messages:
    """Return a prompt as messages, with `data.system_prompt` in front unless they bring a system message."""
    messages = as_messages(prompt)
    if not data.system_prompt or messages[0]["role"] in SYSTEM_ROLES:
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]


def render(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    messages: Messages,
    opening: bool,
    tools: Tools | None = None,
) -> Rendered:
    """Write messages with the template.

    opening: add what begins a reply. A template that is a text writes the last question and nothing after it.
    Raises Refused if the template does not take the messages.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    questions = [message["content"] for message in messages if message["role"] == "user"]
    question = questions[-1] if questions else ""
    if data.is_text_template:
        check_one_question(tokenizer, data, messages)
        system = "\n".join(message["content"] for message in messages if message["role"] in SYSTEM_ROLES)
        text = data.prompt_template.replace("{system_prompt}", system)
        # the question last, so that nothing within it is taken for a placeholder
        return text.replace("{question}", question), None
    arguments = dict(tokenizer.special_tokens_map)
    arguments["strftime_now"] = TEMPLATE_DAY.strftime
    if data.prompt_template:
        arguments["question"] = question
    arguments |= data.chat_template_kwargs
    template = tokenizer.get_chat_template(arguments.pop("chat_template", None), tools)
    has_markers = HAS_MARKERS.search(template) is not None
    arguments |= {"add_generation_prompt": opening, "return_assistant_tokens_mask": has_markers}
    try:
        texts, spans = render_jinja_template([messages], tools, chat_template=template, **arguments)
    except (jinja2.TemplateError, *OPERATOR_ERRORS) as error:
        raise Refused(f"{template_name(tokenizer, data)} refuses it: {reason_of(error)}") from error
    return texts[0], spans[0] if has_markers else None


def short_prompt(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> str:
    """Write a prompt of one character, with the opening of the reply."""
    prompt = prompt_messages(data, "?")
    text, _ = render(tokenizer, data, prompt, opening=True)
    return text


def check_one_question(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    messages: Messages,
) -> None:
    """Raise Refused for anything else than one question, perhaps with its reply."""
    roles = [message["role"] for message in messages if message["role"] not in SYSTEM_ROLES]
    if roles not in (["user"], ["user", "assistant"]):
        raise Refused(
            f"{template_name(tokenizer, data)} writes one question for one reply, and this chat has "
            f"{', '.join(roles) or 'none'}; give a template that writes all `messages` as data.prompt_template "
            "FILE.jinja"
        )


def template_name(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> str:
    """Name the template, for messages."""
    if data.prompt_template:
        return f"data.prompt_template {data.prompt_template}"
    return f"the chat template of {tokenizer.name_or_path}"


def check_template(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    replied: bool = False,
) -> None:
    """Try the chat template on a short random message, and print what would surprise a user.

    replied: the message has a reply, which must be written too. Raises ValueError if the template raises an error or
    leaves the message out.
    """
    if data.is_text_template:  # nothing is run
        return
    name = template_name(tokenizer, data)
    way_out = "correct it, data.system_prompt or data.chat_template_kwargs, or use another model"
    question = f"What is {secrets.token_hex(4)}?"  # no template can know it
    messages = prompt_messages(data, question)
    if replied:
        messages.append({"role": "assistant", "content": f"It is {secrets.token_hex(4)}."})
    try:
        text, _ = render(tokenizer, data, messages, opening=not replied)
    except Refused as error:
        raise ValueError(f"{error} (one short message); {way_out}") from error
    if question not in text:
        as_variable = ", or as {{ question }}" if data.prompt_template else ""
        raise ValueError(f"{name} leaves the prompt out; write it as the content of `messages`{as_variable}")
    if messages[-1]["content"] not in text:
        raise ValueError(f"{name} leaves the assistant's reply out; {way_out}")
    adds_bos = tokenizer.bos_token and tokenizer("?")["input_ids"][0] == tokenizer.bos_token_id
    if data.prompt_template and adds_bos and not text.startswith(tokenizer.bos_token):
        line = (
            f"warning: {name} does not begin with {tokenizer.bos_token}, which the tokenizer puts before plain text; "
            "begin it with {{ bos_token }}, since many models fail without it"
        )
        print(printable(line), flush=True)


def look_at_prompt(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> tuple[str, list[str]]:
    """Return the `<think>` with which prompts end, or an empty text, and notes on prompts that would surprise a user.

    Completions of a prompt that ends with `<think>` begin inside their thoughts.
    """
    text = short_prompt(tokenizer, data)
    notes = []
    ending = re.search(r"<think>\s*\Z", text)
    opened = ending[0] if ending else ""
    mark = secrets.token_hex(8)  # the words of a system prompt may be the template's own too
    with_mark = short_prompt(tokenizer, replace(data, system_prompt=data.system_prompt + mark))
    if data.system_prompt and not data.is_text_template and mark not in with_mark:
        notes.append(
            f"warning: {template_name(tokenizer, data)} drops data.system_prompt, so the model is not told what it "
            "says; write it into the prompts, give a template that has it (data.prompt_template), or set it to ''"
        )
    if opened:
        notes.append("prompts open <think>; reward functions get it in front of each completion")
    return opened, notes
