"""Chats -> token ids and which of them are labels (the loss mask), by the model's chat template.

The whole chat is written as one text and tokenized once, as the model would see it. The template's generation markers
(`{% generation %}`) say which characters the assistant wrote; without them the chat is written up to each turn and
compared. A label is a token that the model itself would sample: those of a turn with the token that ends it, and
nothing after that token. A row is refused if the template leaves out what is to be learned; that it leaves out other
things is not looked for, except tools. Left out: weights of messages between 0 and 1, images.
"""

import functools
import itertools
import os.path
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo.config import DataConfig, TrainOn
from grpo.data.chat import Refused, Rendered, Span, check_one_question, prompt_messages, render, template_name
from grpo.data.rows import Example, Message, Messages, Tools, as_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Writes the first messages of a chat, with the opening of a reply if asked to; see `render` for the result
Writer = Callable[..., Rendered]
# The ids of a text, and for each token whether it is a label
Tokens = tuple[list[int], list[bool]]

# Characters that a message shows around the place where two texts differ
SHOWN_CHARACTERS = 30
# Entries that the model itself wrote. A template that leaves one out of a learned turn loses a label.
SAID = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# Entries that say with 0 or false that a message is not learned: OpenAI's name, and those of other trainers
SWITCHES = ("weight", "train", "training", "trainable", "loss", "loss_mask")
# Entries within a call that a template may leave out
UNWRITTEN = ("id", "type", "tool_call_id")
THOUGHT_TAGS = re.compile(r"(</?think>)")
# Characters that are tokenized together, roughly: each costs 300 bytes of memory.
TOKENIZED_CHARACTERS = 500_000


class Written(NamedTuple):
    """A prompt or an example as a text, before it is tokenized."""

    text: str
    spans: list[Span]
    """The characters that are labels."""
    bos: bool
    """Whether the tokenizer puts BOS before the text."""
    eos: bool
    """Whether EOS follows. It is a label if there are spans."""


# ---------------------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------------------


def write_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    prompt: str | Messages,
    tools: Tools | None = None,
    more_tools: Tools | None = None,
) -> Written:
    """Write a prompt with the opening of the reply.

    A chat template writes special tokens itself; a text template begins with BOS. tools: of the row. more_tools: shown
    if the row has none. Raises Refused if the template does not take it.
    """
    messages = prompt_messages(data, prompt)
    text, _ = render(tokenizer, data, messages, opening=True, tools=tools or more_tools)
    _check_tools(tokenizer, data, messages, tools)
    return Written(text, [], bos=_needs_bos(tokenizer, data, text), eos=False)


def write_example(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    example: Example,
    train_on: TrainOn,
) -> Written:
    """Write a chat or a plain text, and find the characters that are labels.

    train_on: `assistant` learns every assistant turn, `last` the last one, `all` every token. A message with one of
    SWITCHES off is no label. Messages after the last learned turn are left out, except with `all`; a chat without a
    learned turn has no label. If the template writes no token that ends a turn, EOS follows the last turn. A template
    that writes prompts only (a text as `data.prompt_template`) is followed by the reply and EOS; the chat must then be
    one question and its reply. In a plain text every token is a label, and EOS comes last.

    Raises Refused if the template does not take the chat, leaves out a part of a learned turn, or writes earlier
    messages in another way when more follow, so that turns cannot be told apart.
    """
    if not example.chat:
        text = example.text
        whole_text = (0, len(text))
        has_bos = _has_bos(tokenizer, text)
        has_eos = text.rstrip().endswith(tokenizer.eos_token)
        return Written(text, [whole_text], bos=not has_bos, eos=not has_eos)
    name = template_name(tokenizer, data)
    ends = _special_texts(tokenizer)
    messages = prompt_messages(data, example.chat)
    messages = [_without_eos(message, tokenizer.eos_token) for message in messages]
    num_added = len(messages) - len(example.chat)  # the system prompt
    is_learned = [_is_learned(message) for message in messages]
    learns_all = train_on == "all"
    if learns_all and not all(is_learned):
        raise Refused("a message says that it is not learned, and train_on all learns every token; use assistant")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    candidates = turns[-1:] if train_on == "last" else turns
    learned_turns = [turn for turn in candidates if is_learned[turn]]
    if turns and not learns_all:
        last_turn = (learned_turns or turns)[-1]
        messages = messages[: last_turn + 1]
    _check_tools(tokenizer, data, messages, example.tools)

    @functools.cache
    def write(num_messages: int, *, opening: bool) -> Rendered:
        """Write the first messages, see `render`."""
        return render(tokenizer, data, messages[:num_messages], opening, example.tools)

    whole, marked = write(len(messages), opening=False)
    text = whole
    writes_prompts_only = False
    ends_with_label = messages[-1]["role"] == "assistant" and (learns_all or bool(learned_turns))
    prompt = None
    if ends_with_label and marked is None and len(messages) > 1:
        prompt, _ = write(len(messages) - 1, opening=True)
    spans = []
    if prompt is not None and prompt.startswith(whole):
        writes_prompts_only = True
        # the template makes no more of the reply than of the question, so it writes prompts only
        check_one_question(tokenizer, data, messages)
        text = prompt + messages[-1]["content"]
        spans = [(len(prompt), len(text))]
    elif ends_with_label and marked is not None:
        spans = _marked_spans(text, marked, ends)
        if learned_turns != turns:
            spans = _spans_of_turns(write, spans, learned_turns)
        spans = _cut_openings(write, text, spans, learned_turns)
    elif ends_with_label and not learns_all:
        spans = _prefix_spans(write, text, learned_turns, len(messages), name)
    if learns_all:
        spans = [(0, len(text))]
    else:
        spans = [_cut_after_end(text, span, ends) for span in spans]

    def write_other(messages: Messages) -> str:
        """Write the text of other messages in the place of these."""
        other, _ = render(tokenizer, data, messages, opening=False, tools=example.tools)
        return other + messages[-1]["content"] if writes_prompts_only else other

    learned = range(num_added, len(messages)) if learns_all else learned_turns
    lost = _lost_label(messages, learned, write_other)
    if lost:
        index, entry = lost
        raise Refused(
            f"{name} leaves out {entry} of message {index - num_added + 1}, which is to be learned; give a template "
            "that writes it as data.prompt_template FILE.jinja, or put it into the content"
        )
    eos = ends_with_label and not text.rstrip().endswith(ends)
    return Written(text, spans, bos=_needs_bos(tokenizer, data, text), eos=eos)


def _check_tools(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    messages: Messages,
    tools: Tools | None,
) -> None:
    """Refuse the tools of a row if the template writes the same text without them."""
    if tools and render(tokenizer, data, messages, False, tools) == render(tokenizer, data, messages, False):
        raise Refused(
            f"{template_name(tokenizer, data)} leaves out its tools; give a template that writes them as "
            "data.prompt_template FILE.jinja, or rows without `tools`"
        )


def _has_bos(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def _needs_bos(tokenizer: "PreTrainedTokenizerBase", data: DataConfig, text: str) -> bool:
    """Say whether the tokenizer must add BOS: a chat template writes it itself, a template that is a text does not."""
    return data.is_text_template and not _has_bos(tokenizer, text)


def _without_eos(message: Message, eos: str) -> Message:
    """Take EOS from the end of a reply: the template, or `tokenize`, writes the end of a turn."""
    content = message["content"].rstrip()
    if message["role"] != "assistant" or not content.endswith(eos):
        return message
    return message | {"content": content.removesuffix(eos)}


def _is_learned(message: Message) -> bool:
    """Say whether all SWITCHES of a message are on. Raises Refused for one that is neither 0 nor 1."""
    switches = {name: message[name] for name in SWITCHES if name in message}
    for name, value in switches.items():
        if value not in (0, 1):
            raise Refused(f"{name} of a message is {value!r}; it must be 0 or 1, false or true")
    return all(switches.values())


def _lost_label(
    messages: Messages,
    learned: Sequence[int],
    write: Callable[[Messages], str],
) -> tuple[int, str] | None:
    """Return the first of the learned messages, and its first entry, of which `write` leaves something out.

    Every text of an entry gets a random word, so that it is not taken for the same words elsewhere in the chat. None
    also if `write` raises Refused.
    """
    marked = list(messages)
    labels = []
    for index in learned:
        for entry in [entry for entry in SAID if entry in messages[index]]:
            words = []
            marked[index] = marked[index] | {entry: _mark(messages[index][entry], words)}
            labels += [(word, index, entry) for word in words]
    try:
        text = write(marked)
    except Refused:  # a template that takes these texts only
        return None
    for word, index, entry in labels:
        if word not in text:
            return index, entry
    return None


def _mark(value: Any, words: list[str]) -> Any:
    """Return a value with a random word in each of its texts, before, within and after a thought, and list the words.

    A word stands in the middle of a text, because templates look at the beginning and the end.
    """
    if isinstance(value, str):
        parts = THOUGHT_TAGS.split(value)
        for index in range(0, len(parts), 2):  # the others are tags
            middle = len(parts[index]) // 2
            if parts[index].strip():
                words.append(secrets.token_hex(8))
                parts[index] = parts[index][:middle] + words[-1] + parts[index][middle:]
        return "".join(parts)
    if isinstance(value, list):
        return [_mark(part, words) for part in value]
    if isinstance(value, dict):
        return {entry: part if entry in UNWRITTEN else _mark(part, words) for entry, part in value.items()}
    return value


def _marked_spans(text: str, marked: list[Span], ends: tuple[str, ...]) -> list[Span]:
    """Add to each span inside generation markers the end of the turn that follows it.

    The end of a turn is the special token at the end of the chat, whose last message is the assistant's.
    """
    rest = ""
    if marked:
        _, last_past = marked[-1]
        rest = text[last_past:]
    end = ""
    for special in ends:
        if rest.lstrip().startswith(special):
            end = rest[: rest.index(special) + len(special)]
            break
    spans = []
    for first, past in marked:
        has_end = text[first:past].endswith(ends)
        if text.startswith(end, past) and not has_end:
            past += len(end)
        spans.append((first, past))
    return spans


def _spans_of_turns(write: Writer, spans: list[Span], turns: list[int]) -> list[Span]:
    """Keep the spans of these turns. The chat written up to a turn says how many spans lie before it."""
    kept = []
    for turn in turns:
        num_before = 0
        if turn:
            _, spans_before = write(turn, opening=False)
            num_before = len(spans_before)
        _, spans_through = write(turn + 1, opening=False)
        kept += spans[num_before : len(spans_through)]
    return kept


def _cut_openings(
    write: Writer,
    text: str,
    spans: list[Span],
    turns: list[int],
) -> list[Span]:
    """Cut the end of the prompt off the spans of these turns: the model gets it and does not sample it."""
    for turn in filter(None, turns):
        try:
            prompt, _ = write(turn, opening=True)
        except Refused:  # a template of whole chats only
            continue
        if text.startswith(prompt):
            given = len(prompt)
            spans = [(given if first < given < past else first, past) for first, past in spans]
    return spans


def _prefix_spans(
    write: Writer,
    text: str,
    turns: list[int],
    num_messages: int,
    name: str,
) -> list[Span]:
    """Find each turn: from the opening of the reply to the end of the chat, if the chat ended with that turn.

    Raises Refused with the first place where the template writes the beginning of the chat in another way.
    """

    def length_of(number: int, opening: bool = False) -> int:
        """Return how many characters the first messages take up at the start of the text."""
        beginning, _ = write(number, opening=opening)
        if text.startswith(beginning):
            return len(beginning)
        num_equal = len(os.path.commonprefix([text, beginning]))
        around = slice(max(0, num_equal - SHOWN_CHARACTERS), num_equal + SHOWN_CHARACTERS)
        raise Refused(
            f"{name} is not prefix-stable: from character {num_equal + 1} on, the first {number} of {num_messages} "
            f"messages are {beginning[around]!r} alone and {text[around]!r} in the whole chat, so the turns cannot be "
            f"told apart; give a template with {{% generation %}} markers as data.prompt_template FILE.jinja"
        )

    return [(length_of(turn, opening=True), length_of(turn + 1)) for turn in turns]


def _cut_after_end(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    """Cut the blanks behind a special token that ends the span: the model stops at that token."""
    first, past = span
    turn = text[first:past].rstrip()
    if turn.endswith(ends):
        past = first + len(turn)
    return first, past


@functools.lru_cache(maxsize=4)
def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the texts of all special tokens, those that end a turn among them."""
    texts = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            texts.add(str(token))
    texts.discard("")
    return tuple(sorted(texts))


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


def tokenize(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Written]) -> Iterator[Tokens]:
    """Tokenize each text on all cores, and say of each token whether it is a label.

    Where a turn begins within a token, the text is cut and its parts are tokenized alone: a generator gets the prompt
    without the reply. Only a tokenizer that begins each text with a mark of its own keeps such a token. A token across
    another edge belongs to the side of its last character, so a label never reaches into the next turn. The first token
    is never a label: nothing predicts it.
    """
    num_characters = 0

    def batch_of(written: Written) -> tuple[bool, int]:
        """Return what is equal for texts that are tokenized together."""
        nonlocal num_characters
        num_characters += len(written.text)
        return written.bos, num_characters // TOKENIZED_CHARACTERS

    for (bos, _), group in itertools.groupby(texts, key=batch_of):
        batch = list(group)
        encoded = tokenizer(
            [written.text for written in batch],
            add_special_tokens=bos,
            return_offsets_mapping=True,
        )
        for written, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ids, offsets = _cut_where_turns_begin(tokenizer, written, ids, offsets)
            yield _labelled(tokenizer, written, ids, offsets)


def _cut_where_turns_begin(
    tokenizer: "PreTrainedTokenizerBase",
    written: Written,
    ids: list[int],
    offsets: list[Span],
) -> tuple[list[int], list[Span]]:
    """Tokenize the parts of a text before and behind each begin of a turn within a token, see `tokenize`."""
    text = written.text
    ends = {past for _, past in offsets}
    cuts = [first for first, _ in written.spans if 0 < first < len(text) and first not in ends]
    if not cuts:
        return ids, offsets
    cut_ids = []
    cut_offsets = []
    for first, past in itertools.pairwise([0, *cuts, len(text)]):
        part = tokenizer(
            text[first:past],
            add_special_tokens=written.bos and not first,
            return_offsets_mapping=True,
        )
        cut_ids += part["input_ids"]
        cut_offsets += [(first + start, first + end) for start, end in part["offset_mapping"]]
    if tokenizer.decode(cut_ids) != tokenizer.decode(ids):
        return ids, offsets
    return cut_ids, cut_offsets


def _labelled(
    tokenizer: "PreTrainedTokenizerBase",
    written: Written,
    ids: list[int],
    offsets: list[Span],
) -> Tokens:
    """Add EOS if it follows the text, and find out which tokens are labels."""
    is_label = bytearray(len(written.text))
    for start, end in written.spans:
        num_labels = len(is_label[start:end])
        is_label[start:end] = b"\1" * num_labels
    # The last character decides: tokenizers that trim offsets (Llama 3's) let a token's blank lie outside of it. What
    # the tokenizer put before the text (BOS) ends at 0.
    mask = [end > 0 and is_label[end - 1] == 1 for _, end in offsets]
    if written.bos and ids[-1:] == [tokenizer.eos_token_id] and offsets[-1] == (0, 0):
        ids = ids[:-1]  # some tokenizers end every text with EOS
        mask = mask[:-1]
    if written.eos:
        ids = [*ids, tokenizer.eos_token_id]
        mask.append(bool(written.spans))
    if mask:
        mask[0] = False
    return ids, mask


@functools.lru_cache(maxsize=4)  # 0.1 s for 150,000 entries
def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the characters of the longest entry of the vocabulary. A token stands for at most as many.

    (It can stand for more if the tokenizer drops characters, or has one token for all words that it does not know.)
    """
    return max(map(len, tokenizer.get_vocab()))


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> int | None:
    """Return the special token that ends an assistant's turn as a label; EOS if the template writes none.

    Return None if an ordinary token ends it, if the template marks no label in one question and its reply, or if it
    does not take these.
    """
    example = Example(chat=[*as_messages("1+1"), *as_messages("2", "assistant")])
    try:
        written = write_example(tokenizer, data, example, "last")
        ((ids, mask),) = tokenize(tokenizer, [written])
    except Refused:
        return None
    labels = list(itertools.compress(ids, mask))
    if labels and tokenizer.convert_ids_to_tokens(labels[-1]) in _special_texts(tokenizer):
        return labels[-1]
    return None
