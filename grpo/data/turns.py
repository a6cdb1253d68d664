"""Chats -> token ids and which of them are labels (the loss mask), by the model's chat template.

The whole chat is written as one text and tokenized once, as the model would see it. Which characters the assistant
wrote is read from the template's generation markers (`{% generation %}`), else by writing the chat up to each of its
turns and comparing. Only what the model itself would sample is a label: a turn with the token that ends it, and nothing
after that token. What a row brings and the template does not write is refused where it is a label, else noted. Left
out: weights of messages between 0 and 1, images.
"""

import functools
import itertools
import json
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo.config import DataConfig, TrainOn
from grpo.data.chat import Refused, Span, check_one_question, prompt_messages, render, template_name
from grpo.data.rows import Example, Message, as_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (number of messages, whether the opening of an answer follows) -> what `render` makes of the chat up to there.
Writer = Callable[..., tuple[str, list[Span] | None]]

# Of the text around the place where two writings of a chat part.
SHOWN_CHARACTERS = 30
# Stands for what a tool answered: no template writes it.
MARK = "MARKanswer"
# Entries of a message that join it to others. A template may do without them.
JOINS = ("role", "name", "id", "type", "tool_call_id")
# Entries that hold what a model said. A template that leaves one out of a learned turn loses a label.
CALLS = ("tool_calls", "function_call")
SAID = ("content", *CALLS, "reasoning_content", "reasoning", "thinking")
# Entries that say with 0 or false that a message is not learned: OpenAI's name, and those of other trainers
SWITCHES = ("weight", "train", "trainable", "loss_mask")
THOUGHT_TAGS = re.compile(r"</?think>")
# Tokenized together, about: 300 bytes of memory for each.
TOKENIZED_CHARACTERS = 500_000


class Written(NamedTuple):
    """A prompt or an example as the tokenizer gets it."""

    text: str
    spans: list[Span]
    """The characters that are labels."""
    bos: bool
    """With what the tokenizer puts before a text."""
    eos: bool
    """EOS follows, a label if there are spans."""
    notes: tuple[str, ...] = ()
    """What the user should know about the row."""


# ---------------------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------------------


def write_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    prompt: str | list[Message],
    tools: list[Any] | None = None,
    more_tools: list[Any] | None = None,
) -> Written:
    """A prompt with the opening of the answer: a chat template writes special tokens itself, a text begins with BOS.

    tools: of the row. more_tools: shown where it has none. Raises Refused if the template does not take it.
    """
    messages = prompt_messages(data, prompt)
    text, _ = render(tokenizer, data, messages, opening=True, tools=tools or more_tools)
    bare, _ = render(tokenizer, data, messages, opening=True) if tools else (text, None)
    brought = as_messages(prompt)
    lost = sum(_unwritten(brought, text, bare), ["tools"] if tools and bare == text else [])
    notes = _notes(tokenizer, data, brought, lost)
    bos = data.is_text_template and not _has_bos(tokenizer, text)
    return Written(text, [], bos, eos=False, notes=notes)


def write_example(
    tokenizer: "PreTrainedTokenizerBase", data: DataConfig, example: Example, train_on: TrainOn
) -> Written:
    """A chat or a plain text, and the characters of it that are labels.

    train_on: `assistant` every assistant turn, `assistant_and_tools` also what tools answered before the last one,
    `last` the last one, `all` every token. A message that says so itself (SWITCHES) is no label. If the template writes
    no token that ends a turn, EOS follows the last one. Messages after the last learned turn are left out, except with
    `all`; a chat without one has no label. In a plain text every token is one, and EOS comes last. A template that
    writes prompts only (`data.prompt_template` as text, say) is followed by the answer and EOS; the chat then has one
    question.

    Raises Refused for a chat that the template does not take, for a learned turn of which it leaves something out, and
    for turns or answers that cannot be told apart because it writes other messages otherwise with them.
    """
    if not example.chat:
        text = example.text
        has_eos = text.rstrip().endswith(tokenizer.eos_token)
        return Written(text, [(0, len(text))], bos=not _has_bos(tokenizer, text), eos=not has_eos)
    name, ends = template_name(tokenizer, data), _special_texts(tokenizer)
    messages = [_without_eos(message, tokenizer.eos_token) for message in prompt_messages(data, example.chat)]
    num_before = len(messages) - len(example.chat)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    learned = [index for index, message in enumerate(messages) if _is_learned(message)]
    trained = [turn for turn in (turns[-1:] if train_on == "last" else turns) if turn in learned]
    if train_on == "all" and len(learned) < len(messages):
        raise Refused("a message says that it is not learned, and train_on all learns every token; use assistant")
    if turns and train_on != "all":
        messages = messages[: (trained or turns)[-1] + 1]

    @functools.cache
    def write(num_messages: int, opening: bool = False) -> tuple[str, list[Span] | None]:
        return render(tokenizer, data, messages[:num_messages], opening, example.tools)

    text, marked = write(len(messages))
    num_messages = len(messages)
    bare, _ = render(tokenizer, data, messages, opening=False) if example.tools else (text, None)
    lost_tools = ["tools"] if example.tools and bare == text else []
    ends_with_label = messages[-1]["role"] == "assistant" and (train_on == "all" or bool(trained))
    spans = []
    if not ends_with_label:
        pass
    elif marked is None and num_messages > 1 and (prompt := write(num_messages - 1, True)[0]).startswith(text):
        # the template makes no more of the answer than of the question, so it writes prompts only
        check_one_question(tokenizer, data, messages)
        text = prompt + messages[-1]["content"]
        spans = [(len(prompt), len(text))]
    elif marked is not None:
        found = _marked_spans(text, marked, ends)
        if trained == turns:
            spans = found
        else:
            places = [(len(write(turn)[1]) if turn else 0, len(write(turn + 1)[1])) for turn in trained]
            spans = [span for first, past in places for span in found[first:past]]
    elif train_on != "all":
        spans = _prefix_spans(write, text, trained, num_messages, name)
    spans = [(0, len(text))] if train_on == "all" else [_cut_after_end(text, span, ends) for span in spans]
    if train_on == "assistant_and_tools" and ends_with_label:
        spans += _tool_spans(tokenizer, data, messages, example.tools, text)

    brought = messages[num_before:]
    lost_by_message = _unwritten(brought, text, bare if example.tools else text)
    for number, lost in enumerate(lost_by_message, 1):
        labels = [entry for entry in lost if entry in SAID]
        if labels and (train_on == "all" or number + num_before - 1 in trained):
            raise Refused(
                f"{name} leaves out {labels[0]} of message {number}, which is to be learned; give a template that "
                "writes it as data.prompt_template FILE.jinja, or put it into the content"
            )
    notes = _notes(tokenizer, data, brought, sum(lost_by_message, lost_tools))
    eos = ends_with_label and not text.rstrip().endswith(ends)
    if eos and len(trained) > 1 and train_on != "all":
        notes += (f"have several turns of which only the last one learns where to end: {name} ends no turn itself",)
    bos = data.is_text_template and not _has_bos(tokenizer, text)
    return Written(text, spans, bos, eos, notes)


def _has_bos(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    """Whether a text begins with BOS already."""
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def _without_eos(message: Message, eos: str) -> Message:
    """An answer that ends with EOS, without it: the template, or `tokenize`, writes the end of a turn."""
    content = message["content"].rstrip()
    if message["role"] != "assistant" or not content.endswith(eos):
        return message
    return message | {"content": content.removesuffix(eos)}


def _is_learned(message: Message) -> bool:
    """Whether no entry of a message says that it is only read. Raises Refused for one that is neither 0 nor 1."""
    switches = {name: message[name] for name in SWITCHES if name in message}
    for name, value in switches.items():
        if value not in (0, 1):
            raise Refused(f"{name} of a message is {value!r}; it must be 0 or 1, false or true")
    return all(switches.values())


def _unwritten(messages: list[Message], text: str, text_without_tools: str) -> list[list[str]]:
    """For each message the entries that are not in what the template wrote.

    A text may be trimmed, have other blanks, or be written as JSON. Of calls the names are looked for, as often as they
    are called, where no list of tools can hold them.
    """
    squeezed = _squeeze(text)

    def is_written(part: str) -> bool:
        if _squeeze(part) in squeezed:
            return True
        as_json = json.dumps(part, ensure_ascii=False)[1:-1]
        return _squeeze(as_json) in squeezed

    num_calls = Counter(name for message in messages for name in _called(message))
    num_written = {name: len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", text_without_tools)) for name in num_calls}
    lost_by_message = []
    for message in messages:
        texts = {entry: value for entry, value in message.items() if isinstance(value, str) and entry not in JOINS}
        lost = [entry for entry, value in texts.items() if not all(map(is_written, THOUGHT_TAGS.split(value)))]
        calls = [entry for entry in CALLS if entry in message]
        if any(num_written[name] < num_calls[name] for name in _called(message)):
            lost += calls
        lost_by_message.append(lost)
    return lost_by_message


def _called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    if isinstance(message.get("function_call"), dict):
        functions.append(message["function_call"])
    return [str(function.get("name")) for function in functions]


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _notes(
    tokenizer: "PreTrainedTokenizerBase", data: DataConfig, messages: list[Message], lost: list[str]
) -> tuple[str, ...]:
    """What the user should know about a row's messages. lost: entries that the template does not write."""
    notes = ()
    if lost:
        entries = ", ".join(sorted({*lost}))
        notes += (f"bring {entries}, which {template_name(tokenizer, data)} does not write everywhere",)
    pattern = _special_pattern(tokenizer)
    if special := {text for message in messages for text in pattern.findall(message["content"])}:
        notes += (f"have the text of special tokens, which is read as such tokens: {', '.join(sorted(special))}",)
    return notes


def _marked_spans(text: str, marked: list[Span], ends: tuple[str, ...]) -> list[Span]:
    """What is inside generation markers, and what ends a turn right behind them.

    What ends a turn is the special token at the end of the chat, whose last message is the assistant's.
    """
    behind = text[marked[-1][1] :] if marked else ""
    end = next((behind[: behind.index(end) + len(end)] for end in ends if behind.lstrip().startswith(end)), "")
    return [
        (first, past + len(end) if text.startswith(end, past) and not text[first:past].endswith(ends) else past)
        for first, past in marked
    ]


def _prefix_spans(write: Writer, text: str, turns: list[int], num_messages: int, name: str) -> list[Span]:
    """For each turn, what follows the opening of the answer, up to the end of the chat if it ended with that turn.

    Raises Refused with the first place where the template writes the beginning of the chat in another way.
    """

    def length_of(number: int, opening: bool) -> int:
        """Characters of the first messages, with which the text begins."""
        beginning, _ = write(number, opening)
        if text.startswith(beginning):
            return len(beginning)
        place = len(os.path.commonprefix([text, beginning]))
        around = slice(max(0, place - SHOWN_CHARACTERS), place + SHOWN_CHARACTERS)
        # the last turn alone needs no more than what comes before it
        other_way = "" if number == num_messages - 1 else "train_on last may do, else "
        raise Refused(
            f"{name} is not prefix-stable: from character {place + 1} on, the first {number} of {num_messages} "
            f"messages are {beginning[around]!r} alone and {text[around]!r} in the whole chat, so the turns cannot be "
            f"told apart; {other_way}give a template with {{% generation %}} markers as data.prompt_template FILE.jinja"
        )

    return [(length_of(turn, True), length_of(turn + 1, False)) for turn in turns]


def _tool_spans(
    tokenizer: "PreTrainedTokenizerBase", data: DataConfig, messages: list[Message], tools: list[Any] | None, text: str
) -> list[Span]:
    """What each tool answered, without what the template writes around it: the chat with a mark in its place tells.

    Raises Refused if the template does not write the mark, or something else in another way too.
    """
    spans = []
    for index in (
        index for index, message in enumerate(messages) if message["role"] == "tool" and _is_learned(message)
    ):
        marked = [*messages[:index], messages[index] | {"content": MARK}, *messages[index + 1 :]]
        before, mark, behind = render(tokenizer, data, marked, False, tools)[0].partition(MARK)
        if not (mark and text.startswith(before) and text.endswith(behind) and len(text) >= len(before + behind)):
            name = template_name(tokenizer, data)
            raise Refused(f"{name} does not write message {index + 1}, a tool's answer, as it is; train_on assistant")
        spans.append((len(before), len(text) - len(behind)))
    return spans


def _cut_after_end(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    """Without the blanks behind a special token that ends the span: the model stops at that token."""
    turn = text[slice(*span)].rstrip()
    return (span[0], span[0] + len(turn)) if turn.endswith(ends) else span


@functools.lru_cache(maxsize=4)
def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Texts of the tokens that end turns, begin them, and pad."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(text for text in added | set(tokenizer.all_special_tokens) if text))


@functools.lru_cache(maxsize=4)
def _special_pattern(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern:
    return re.compile("|".join(map(re.escape, _special_texts(tokenizer))) or r"(?!)")


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", written: Iterable[Written]
) -> Iterator[tuple[list[int], list[bool]]]:
    """The token ids of each text, and for each token whether it is a label; on all cores.

    A token that stands for characters on both sides of a turn's edge belongs to the side of its last character, so a
    label never reaches into the next turn. The first token never is a label: nothing predicts it.
    """
    written = list(written)
    ends = itertools.accumulate(len(one.text) for one in written)
    places = [(one.bos, end // TOKENIZED_CHARACTERS) for one, end in zip(written, ends, strict=True)]
    for (bos, _), run in itertools.groupby(zip(places, written, strict=True), key=lambda pair: pair[0]):
        batch = [one for _, one in run]
        encoded = tokenizer([one.text for one in batch], add_special_tokens=bos, return_offsets_mapping=True)
        for one, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield _labelled(tokenizer, one, ids, offsets)


def _labelled(
    tokenizer: "PreTrainedTokenizerBase", written: Written, ids: list[int], offsets: list[Span]
) -> tuple[list[int], list[bool]]:
    """The ids, with an EOS if one follows, and which of them are labels."""
    inside = bytearray(len(written.text))
    for start, end in written.spans:
        inside[start:end] = b"\1" * len(inside[start:end])
    # Only where a token ends is looked at: tokenizers that trim offsets (Llama 3's) let a blank begin where it ends.
    # What the tokenizer put before the text (BOS) ends at 0.
    mask = [end > 0 and inside[end - 1] == 1 for _, end in offsets]
    if written.bos and ids[-1:] == [tokenizer.eos_token_id] and offsets[-1] == (0, 0):
        ids, mask = ids[:-1], mask[:-1]  # some tokenizers close every text
    if written.eos:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, bool(written.spans)]
    return ids, [False, *mask[1:]] if mask else []


@functools.lru_cache(maxsize=4)  # 0.1 s for 150,000 entries
def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Characters of the longest entry of the vocabulary; no token stands for more of them.

    (Where a tokenizer drops characters, or has one sign for all words that it does not know, one may.)
    """
    return max(map(len, tokenizer.get_vocab()))


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> int | None:
    """The special token that ends an assistant's turn, as a label; EOS where the template writes none.

    None if another token does, or the template takes no chat of one question and one answer.
    """
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    try:
        ((ids, mask),) = tokenize(tokenizer, [write_example(tokenizer, data, Example(chat=messages), "last")])
    except Refused:
        return None
    last = [*itertools.compress(ids, mask)][-1]
    return last if tokenizer.convert_ids_to_tokens(last) in _special_texts(tokenizer) else None
