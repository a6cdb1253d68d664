"""Chats -> token ids and which of them are labels (the loss mask), by the model's chat template.

The whole chat is written as one text and tokenized once, as the model would see it. Which characters of that text the
assistant wrote is read from the template: from its generation markers (`{% generation %}`), else by writing the chat up
to each assistant turn and comparing. The tokenizer then says which characters each token stands for.

Only what the model itself would sample is a label: an assistant's turn with the token that ends it, and nothing after
that token. Left out: weights of single messages, images.
"""

import functools
import itertools
import os.path
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from grpo.config import DataConfig, TrainOn
from grpo.data.bounds import deadline
from grpo.data.chat import (
    TEMPLATE_CHARACTERS,
    TEMPLATE_SECONDS,
    Refused,
    TooLong,
    apply_template,
    by_characters,
    check_characters,
    fill_in,
    longest_token,
    template_name,
    with_system_prompt,
)
from grpo.data.columns import Message
from grpo.data.rows import Example
from grpo.text import has_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Start and end among the characters of a text.
Span = tuple[int, int]
# (number of messages, whether the opening of an answer follows) -> what `apply_template` makes of the chat up to there.
Writer = Callable[..., tuple[str, list[Span] | None]]

# Of the text around the place where two writings of a chat part.
SHOWN_CHARACTERS = 30


class Written(NamedTuple):
    """An example as the tokenizer gets it; spans: the characters that are labels."""

    text: str
    spans: list[Span]
    bos: bool
    """With what the tokenizer puts before a text."""
    eos: bool
    """EOS follows, a label if there are spans."""


def encode_example(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    example: Example,
    train_on: TrainOn,
    max_tokens: int,
    truncate: bool = False,
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat or a plain text, and for each whether it is a label. The first never is: nothing predicts it.

    train_on: `assistant` every assistant turn, `last` the last one, `all` every token. The token that ends a trained
    turn is a label, the line break that templates write after it is not. If the template writes no such token, EOS
    follows the last turn. Messages after the last assistant turn are left out, except with `all`. A chat without an
    assistant turn has no label. In a plain text every token is one; the tokenizer's beginning of a text (BOS), if it
    has one, comes first and EOS last.

    `data.system_prompt` comes first unless the chat brings a system message of its own. A template that writes prompts
    only (`data.prompt_template` as text, say) is followed by the answer and EOS; the chat then has one question.

    A token that stands for characters on both sides of a turn's edge belongs to the side of its last character, so a
    label never reaches into the next turn.

    truncate: keep the first `max_tokens` tokens of a longer chat, instead of TooLong.
    Raises TooLong; Refused for a chat that the template does not take, or whose turns cannot be told apart because the
    template writes them otherwise when more messages follow; ValueError if it takes longer than TEMPLATE_SECONDS, or
    the tokenizer cannot say which characters a token stands for.
    """
    written = write_example(tokenizer, data, example, train_on, max_tokens, truncate)
    ((ids, mask),) = tokenize_written(tokenizer, [written])
    if len(ids) > max_tokens and not truncate:
        raise TooLong(len(ids), exact=True)
    return ids[:max_tokens], mask[:max_tokens]


def write_example(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    example: Example,
    train_on: TrainOn,
    max_tokens: int,
    truncate: bool = False,
) -> Written:
    """The first half of `encode_example`; `tokenize_written` is the second one, for many examples at once.

    Raises what that raises, TooLong only where the number of characters says so.
    """
    if not example.chat:
        text = _within(tokenizer, example.text, max_tokens, truncate)
        return Written(text, [(0, len(example.text))], bos=True, eos=True)
    messages, tools = with_system_prompt(data, example.chat), example.tools
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if turns and train_on != "all":
        messages = messages[: turns[-1] + 1]
    if not truncate:
        check_characters(tokenizer, "".join(message.get("content") or "" for message in messages), max_tokens)
    name, ends = template_name(tokenizer, data), _special_texts(tokenizer)

    @functools.cache
    def write(num_messages: int, opening: bool = False) -> tuple[str, list[Span] | None]:
        return apply_template(tokenizer, data, messages[:num_messages], opening, tools)

    if data.is_text_template:
        text, spans = _fill_in(data, messages, name)
    else:
        with deadline(TEMPLATE_SECONDS, name):
            text, spans = _write_chat(write, messages, train_on, ends, name)
    if train_on == "all":
        spans = [(0, len(text))]
    else:
        spans = [_cut_after_end(text, span, ends) for span in spans]
    ended = messages[-1]["role"] != "assistant" or text.rstrip().endswith(ends)
    text = _within(tokenizer, text, max_tokens, truncate)
    return Written(text, spans, bos=data.is_text_template, eos=not ended)


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> int | None:
    """The special token that ends an assistant's turn, as a label; EOS where the template writes none.

    None if another token does, or the template takes no chat of one question and one answer.
    """
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    try:
        ids, mask = encode_example(tokenizer, data, Example(chat=messages), "last", TEMPLATE_CHARACTERS)
    except Refused:
        return None
    last = [token for token, is_label in zip(ids, mask, strict=True) if is_label][-1]
    return last if tokenizer.convert_ids_to_tokens(last) in _special_texts(tokenizer) else None


# ---------------------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------------------


def _write_chat(
    write: Writer, messages: list[Message], train_on: TrainOn, ends: tuple[str, ...], name: str
) -> tuple[str, list[Span]]:
    """The chat as one text, and the characters of the turns that `train_on` names; none for `all`."""
    text, marked = write(len(messages))
    if messages[-1]["role"] != "assistant":
        return text, []
    if marked is not None:
        num_before = len(write(len(messages) - 1)[1]) if train_on == "last" and len(messages) > 1 else 0
        return text, _marked_spans(text, marked, num_before, ends)
    # A template that writes prompts only makes no more of the answer than of the question.
    if len(messages) > 1 and (prompt := write(len(messages) - 1, True)[0]).startswith(text):
        return _append_answer(prompt, messages, name)
    return text, [] if train_on == "all" else _prefix_spans(write, messages, train_on, text, name)


def _marked_spans(text: str, marked: list[Span], num_before: int, ends: tuple[str, ...]) -> list[Span]:
    """What is inside generation markers, without the first `num_before`, and what ends a turn right behind them.

    What ends a turn is the special token at the end of the chat, whose last message is the assistant's.
    """
    behind = text[marked[-1][1] :] if marked else ""
    end = next((behind[: behind.index(end) + len(end)] for end in ends if behind.lstrip().startswith(end)), "")
    return [
        (first, past + len(end) if text.startswith(end, past) and not text[first:past].endswith(ends) else past)
        for first, past in marked[num_before:]
    ]


def _prefix_spans(write: Writer, messages: list[Message], train_on: TrainOn, text: str, name: str) -> list[Span]:
    """For each turn, what follows the opening of the answer, up to the end of the chat if it ended with that turn.

    Raises Refused with the first place where the template writes the beginning of the chat in another way.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns if train_on == "assistant" else turns[-1:]:
        start = len(_before_turn(write, messages, turn, text, name))
        end = len(_same_as_in(text, write(turn + 1)[0], messages, turn + 1, name))
        spans.append((start, end))
    return spans


def _before_turn(write: Writer, messages: list[Message], turn: int, text: str, name: str) -> str:
    """The text up to where the model would begin to sample the turn."""
    if turn:
        return _same_as_in(text, write(turn, True)[0], messages, turn, name)
    # No template takes an empty chat: the opening is what it would add to this message.
    opening = write(1, True)[0].removeprefix(write(1)[0])
    before, found, _ = text.partition(opening) if opening else ("", "", text)
    if opening and not found:
        raise Refused(f"{name} does not open the chat's first turn, an assistant's, as it opens an answer")
    return before + found


def _same_as_in(text: str, beginning: str, messages: list[Message], num_messages: int, name: str) -> str:
    """`beginning`, what the template makes of the first messages, if `text` begins with it; else Refused."""
    if text.startswith(beginning):
        return beginning
    place = len(os.path.commonprefix([text, beginning]))
    alone, whole = (
        repr(shown[max(0, place - SHOWN_CHARACTERS) : place + SHOWN_CHARACTERS]) for shown in (beginning, text)
    )
    # the last turn alone needs no more than what comes before it
    other_way = "" if num_messages == len(messages) - 1 else "train_on last may do, else "
    raise Refused(
        f"{name} is not prefix-stable: from character {place + 1} on, the first {num_messages} of {len(messages)} "
        f"messages are {alone} alone and {whole} in the whole chat, so the turns cannot be told apart; {other_way}give "
        "a template with {% generation %} markers as data.prompt_template FILE.jinja"
    )


def _fill_in(data: DataConfig, messages: list[Message], name: str) -> tuple[str, list[Span]]:
    """The text template with its placeholders filled in, and the answer if there is one."""
    if messages[-1]["role"] != "assistant":
        return fill_in(data, messages, name), []
    _check_one_answer(messages, name)
    return _append_answer(fill_in(data, messages[:-1], name), messages, name)


def _append_answer(prompt: str, messages: list[Message], name: str) -> tuple[str, list[Span]]:
    """A prompt and the assistant's text behind it. Raises Refused for more than one question and one answer."""
    _check_one_answer(messages, name)
    text = prompt + messages[-1]["content"]
    return text, [(len(prompt), len(text))]


def _check_one_answer(messages: list[Message], name: str) -> None:
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    if roles != ["user", "assistant"]:
        raise Refused(
            f"{name} writes one question for one answer, and this chat has {', '.join(roles)}; give a template that "
            "writes all `messages` as data.prompt_template FILE.jinja"
        )


def _cut_after_end(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    """Without the blanks behind a special token that ends the span: the model stops at that token."""
    turn = text[slice(*span)].rstrip()
    return (span[0], span[0] + len(turn)) if turn.endswith(ends) else span


@functools.lru_cache(maxsize=4)
def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Texts of the tokens that end turns, begin them, and pad."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(text for text in added | set(tokenizer.all_special_tokens) if text))


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


def _within(tokenizer: "PreTrainedTokenizerBase", text: str, max_tokens: int, truncate: bool) -> str:
    """The text, without what lies behind the last token that is kept; Refused and TooLong as `encode_example` says."""
    if has_surrogates(text):
        raise Refused("the text has a lone surrogate (half of a character)")
    if truncate:
        return text[: (max_tokens + 2) * longest_token(tokenizer)]
    check_characters(tokenizer, text, max_tokens)
    return text


def tokenize_written(
    tokenizer: "PreTrainedTokenizerBase", written: list[Written]
) -> list[tuple[list[int], list[bool]]]:
    """Of each example the token ids and which are labels, whatever its length; on all cores.

    Raises ValueError if the tokenizer cannot say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} cannot say which characters a token stands for; save it as "
            "tokenizer.json (a fast tokenizer)"
        )
    found = []
    for bos, examples in itertools.groupby(written, key=lambda example: example.bos):
        for batch in by_characters(examples, lambda example: len(example.text)):
            texts = [example.text for example in batch]
            encoded = tokenizer(texts, add_special_tokens=bos, return_offsets_mapping=True)
            columns = encoded["input_ids"], encoded["offset_mapping"]
            found += [_labelled(tokenizer, *one) for one in zip(batch, *columns, strict=True)]
    return found


def _labelled(
    tokenizer: "PreTrainedTokenizerBase", written: Written, ids: list[int], offsets: list[Span]
) -> tuple[list[int], list[bool]]:
    mask = _labels(offsets, written.spans, len(written.text))
    if written.bos and ids[-1:] == [tokenizer.eos_token_id] and offsets[-1] == (0, 0):
        ids, mask = ids[:-1], mask[:-1]  # some tokenizers close every text
    if written.eos:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, bool(written.spans)]
    if mask:
        mask[0] = False
    return ids, mask


def _labels(offsets: list[Span], spans: list[Span], num_characters: int) -> list[bool]:
    """For each token whether the last character that it stands for is in one of the spans.

    Only where it ends is looked at: tokenizers that trim offsets (Llama 3's) let a blank begin where it ends. What the
    tokenizer put before the text (BOS) ends at 0.
    """
    inside = bytearray(num_characters)
    for start, end in spans:
        inside[start:end] = b"\1" * len(inside[start:end])
    return [end > 0 and inside[end - 1] == 1 for _, end in offsets]
