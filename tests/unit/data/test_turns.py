"""Chats as token ids with their labels: masks worked out by hand, templates and tokenizers that make it hard."""

import functools
import itertools
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from configs.examples import toys
from grpo.config import DataConfig
from grpo.data.chat import Refused
from grpo.data.encode import Encoder, RowStatus
from grpo.data.rows import Example
from grpo.data.turns import SWITCHES, end_of_turn, tokenize, write_example, write_prompt
from tests import ROOT
from tests.unit.data.test_data import encode_prompt

DATA = DataConfig(system_prompt="")


def encode_chat(tokenizer, data, messages, train_on, tools=None) -> tuple[list[int], list[bool]]:
    ((ids, mask),) = tokenize(
        tokenizer, [write_example(tokenizer, data, Example(chat=messages, tools=tools), train_on)]
    )
    return ids, mask


def encode_text(tokenizer, text) -> tuple[list[int], list[bool]]:
    ((ids, mask),) = tokenize(tokenizer, [write_example(tokenizer, DATA, Example(text=text), "last")])
    return ids, mask


NO_THOUGHTS = {"enable_thinking": False}
TEXTS = [
    "be brief, 1+1? two. and 2+2? four. call: thanks a lot hello " * 20,
    "User\nAssistant\nTool\nSystem\nhello\n" * 20,
]

CHATML = toys.CHAT_TEMPLATE
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Of a template's kind: writes the assistant's turns before the last one without their thoughts.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two."},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "call:"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four."},
    {"role": "user", "content": "thanks"},
]
# Labels in brackets.
BY_HAND = {
    ("chatml", "assistant"): "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\n[two.<|im_end|>]\n<|im_start|>user\nand 2+2?<|im_end|>\n"
    "<|im_start|>assistant\n[call:<|im_end|>]\n<|im_start|>tool\n4<|im_end|>\n"
    "<|im_start|>assistant\n[four.<|im_end|>]\n",
    ("chatml", "all"): "<|im_start|>[system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\ntwo.<|im_end|>\n<|im_start|>user\nand 2+2?<|im_end|>\n"
    "<|im_start|>assistant\ncall:<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
    "<|im_start|>assistant\nfour.<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n]",
    ("llama3", "assistant"): "<|begin|><|start|>system<|end|>\n\nbe brief<|eot|><|start|>user<|end|>\n\n1+1?<|eot|>"
    "<|start|>assistant<|end|>\n\n[two.<|eot|>]<|start|>user<|end|>\n\nand 2+2?<|eot|>"
    "<|start|>assistant<|end|>\n\n[call:<|eot|>]<|start|>tool<|end|>\n\n4<|eot|>"
    "<|start|>assistant<|end|>\n\n[four.<|eot|>]",
    ("llama3", "all"): "<|begin|>[<|start|>system<|end|>\n\nbe brief<|eot|><|start|>user<|end|>\n\n1+1?<|eot|>"
    "<|start|>assistant<|end|>\n\ntwo.<|eot|><|start|>user<|end|>\n\nand 2+2?<|eot|>"
    "<|start|>assistant<|end|>\n\ncall:<|eot|><|start|>tool<|end|>\n\n4<|eot|>"
    "<|start|>assistant<|end|>\n\nfour.<|eot|><|start|>user<|end|>\n\nthanks<|eot|>]",
    # what ends a turn is the line break; EOS follows the last one
    ("plain", "assistant"): "System: be brief\nUser: 1+1?\nAssistant:[ two.\n]User: and 2+2?\nAssistant:[ call:\n]"
    "Tool: 4\nAssistant:[ four.\n<eos>]",
    ("plain", "all"): "System[: be brief\nUser: 1+1?\nAssistant: two.\nUser: and 2+2?\nAssistant: call:\n"
    "Tool: 4\nAssistant: four.\nUser: thanks\n]",
}
for family in ("chatml", "llama3", "plain"):  # the last labels of those by hand
    before, bracket, last = BY_HAND[family, "assistant"].rpartition("[")
    BY_HAND[family, "last"] = before.replace("[", "").replace("]", "") + bracket + last
FAMILIES = {"chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot|>"), "plain": (PLAIN, "<eos>")}
# The same with generation markers, the token that ends a turn inside or behind them.
ANSWER = "{% if m.role == 'assistant' %}{% generation %}ANSWER{% endgeneration %}BEHIND{% else %}OTHER{% endif %}"
MARKED = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\nANSWER\n{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\nANSWER{% endfor %}",
}


def marked_template(family: str, end_inside: bool) -> str:
    """A template of the family with markers. trim_blocks eats a line break behind a block, hence the expression."""
    end = FAMILIES[family][1]
    content = "{{ m.content }}"
    turn = ANSWER.replace("BEHIND", "" if end_inside else end)
    turn = turn.replace("ANSWER", content + end if end_inside else content).replace("OTHER", content + end)
    return MARKED[family].replace("ANSWER\n", turn + "{{ '\n' }}").replace("ANSWER", turn)


def tokenizer_for(template: str, eos: str, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE; `trim_offsets` as in Llama 3's."""
    special = ["<eos>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>"]
    backend = toys.trained_tokenizer(TEXTS, 1000).backend_tokenizer
    backend.add_special_tokens(special)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token=eos,
        additional_special_tokens=special,
        chat_template=template,
    )


def bracketed(tokenizer, ids: list[int], mask: list[bool]) -> str:
    """The tokens' text, labels in brackets."""
    runs = itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    parts = [(is_label, tokenizer.decode([token for token, _ in run])) for is_label, run in runs]
    return "".join(f"[{text}]" if is_label else text for is_label, text in parts)


def encoded(tokenizer, messages, train_on="assistant", **options) -> str:
    data = options.pop("data", DATA)
    return bracketed(tokenizer, *encode_chat(tokenizer, data, messages, train_on, **options))


# ---- Masks


@pytest.mark.parametrize("family, train_on", BY_HAND)
def test_masks_by_hand(family, train_on):
    tokenizer = tokenizer_for(*FAMILIES[family], trim_offsets=family == "llama3")
    assert encoded(tokenizer, TALK, train_on) == BY_HAND[family, train_on]


@pytest.mark.parametrize(
    "template, data, end",
    [
        (CHATML, DATA, "<|im_end|>"),  # though it is not the tokenizer's EOS, as in base models
        (LLAMA3, DATA, "<|eot|>"),
        (PLAIN, DATA, "<eos>"),  # the template writes none
        (CHATML, DataConfig(prompt_template="Q: {question} A:"), "<eos>"),
        ("{{ raise_exception('no') }}", DATA, None),
        (CHATML + "{% if tools %}{% generation %}{% endgeneration %}{% endif %}", DATA, None),  # marks nothing here
    ],
)
def test_the_token_that_ends_a_turn(template, data, end):
    tokenizer = tokenizer_for(template, "<eos>")
    found = end_of_turn(tokenizer, data)
    assert found == (end and tokenizer.convert_tokens_to_ids(end))


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("end_inside", [True, False])
@pytest.mark.parametrize("family", MARKED)
def test_generation_markers_give_the_same_as_prefixes(family, end_inside, train_on):
    tokenizer = tokenizer_for(marked_template(family, end_inside), FAMILIES[family][1])
    assert encoded(tokenizer, TALK, train_on) == BY_HAND[family, train_on]


QWEN3_CHAT = ROOT / "configs/examples/qwen3_chat.jinja"


def test_qwen3_learns_every_turn_of_a_chat_as_if_it_were_the_last():
    """By hand: thoughts that are there are labels, the empty ones that `enable_thinking` false opens with are not.

    Qwen3's own template would leave the first turn's thoughts out, and write <think> only behind the last question.
    """
    tokenizer = tokenizer_for(QWEN3_CHAT.read_text(), "<|im_end|>")
    chat = [
        *TALK[:2],
        {"role": "assistant", "content": "<think>\n1+1\n</think>\n\ntwo."},
        TALK[3],
        {"role": "assistant", "content": "four."},
        TALK[7],
        {"role": "assistant", "content": "hello", "reasoning_content": "be brief"},
    ]
    first = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\n1+1\n</think>\n\ntwo.<|im_end|>]\n"
    )
    second = "<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[four.<|im_end|>]\n"
    third = (
        "<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n[<think>\nbe brief\n</think>\n\nhello<|im_end|>]\n"
    )
    assert encoded(tokenizer, chat) == first + second + third
    unlabelled = (first + second).replace("[", "").replace("]", "")
    assert encoded(tokenizer, chat, "last") == unlabelled + third
    # what is not a label before an answer is what a generator gets
    for thinks, turn in ((False, chat[4]), (True, chat[2])):
        data = DataConfig(system_prompt="", chat_template_kwargs={} if thinks else NO_THOUGHTS)
        ids, mask = encode_chat(tokenizer, DATA, [TALK[1], turn], "assistant")
        assert ids[: mask.index(True)] == encode_prompt(tokenizer, data, "1+1?")


def test_qwen3_learns_every_turn_of_a_chat_with_tools():
    """By hand, in the words of Qwen3's own template: calls are labels, what tools answer is the user's."""
    tokenizer = tokenizer_for(QWEN3_CHAT.read_text(), "<|im_end|>")
    calls = [{"function": {"name": "add", "arguments": {"a": 2}}}, {"name": "stop", "arguments": {}}]
    chat = [
        *TALK[:2],
        TALK[4] | {"tool_calls": calls},
        TALK[5],
        TALK[5] | {"content": "5"},
        TALK[6],
    ]
    no_thoughts = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    turns = (
        "<|im_start|>user\n1+1?<|im_end|>\n" + no_thoughts + "[call:\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>]\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        + no_thoughts
        + "[four.<|im_end|>]\n"
    )
    written = encoded(tokenizer, chat, tools=[{"name": "add"}])
    assert written.startswith("<|im_start|>system\nbe brief\n\n# Tools\n\nYou may call one or more functions")
    assert '<tools>\n{"name": "add"}\n</tools>\n' in written and written.endswith("</tool_call><|im_end|>\n" + turns)
    assert encoded(tokenizer, chat[1:]) == turns


def test_markers_in_two_places_of_a_turn():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.thought }}{% endgeneration %} so:"
        "{% generation %}{{ m.content }}{% endgeneration %}<|eot|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_for(template, "<|eot|>")
    turn = {"role": "assistant", "thought": "1+1", "content": "two."}
    chat = [TALK[1], turn, TALK[3], turn]
    assert encoded(tokenizer, chat) == "1+1?[1+1] so:[two.<|eot|>]and 2+2?[1+1] so:[two.<|eot|>]"
    assert encoded(tokenizer, chat, "last") == "1+1?1+1 so:two.<|eot|>and 2+2?[1+1] so:[two.<|eot|>]"


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_the_end_of_the_prompt_within_markers_is_no_label(train_on):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '\n' + m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ '\n' + m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert encoded(tokenizer_for(template, "<|im_end|>"), TALK, train_on) == BY_HAND["chatml", train_on]


def test_markers_that_hold_the_end_of_a_turn_already():
    marked = "{% generation %}{{ messages[1].content }}<|eot|>{% endgeneration %}<eos>"
    assert encoded(tokenizer_for("1+1?" + marked, "<eos>"), TALK[1:3]) == "1+1?[two.<|eot|>]<eos>"
    nobody = "{% if messages[1].role == 'nobody' %}" + marked + "{% endif %}{{ messages[1].content }}"
    assert encoded(tokenizer_for("1+1?" + nobody, "<eos>"), TALK[1:3]) == "1+1?two.<eos>"  # no label, not even EOS


USER, TURN = TALK[1], TALK[2]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
THOUGHT = "two is what 1+1 is"


CALLS_ALONE = CHATML.replace("message['content']", "((message.tool_calls or message.content) | string)")
FIRST_CALL_ALONE = CHATML.replace("message['content']", "message.content + (message.tool_calls or [''])[0] | string")
WITH_TOOLS = "{{ tools | tojson if tools }}" + CHATML
TWO_CALLS = CALL | {"tool_calls": CALL["tool_calls"] * 2}
ADD = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize(
    "template, chat, train_on, entry",
    [
        (CHATML, [USER, TURN | {"reasoning_content": THOUGHT}], "assistant", "reasoning_content of message 2"),
        (CHATML, [USER, TURN | {"thinking": [{"text": THOUGHT}]}], "last", "thinking of message 2"),
        (CHATML, [TALK[0] | {"reasoning": THOUGHT}, USER, TURN], "all", "reasoning of message 1"),
        (CHATML, [USER, TURN | {"function_call": {"name": "f"}}], "assistant", "function_call"),
        # words that the answer has too
        (CHATML, [USER, TURN | {"reasoning_content": "two"}], "assistant", "reasoning_content of message 2"),
        (CALLS_ALONE, [USER, CALL | {"content": "1+1?"}], "assistant", "content of message 2"),
        (CHATML, [USER, CALL | {"content": "I add."}], "assistant", "tool_calls of message 2"),
        (WITH_TOOLS, [USER, CALL], "assistant", "tool_calls of message 2"),
        (FIRST_CALL_ALONE, [USER, TWO_CALLS], "assistant", "tool_calls of message 2"),
    ],
)
def test_a_label_that_the_template_does_not_write_is_refused(template, chat, train_on, entry):
    """A model would learn to say less than its data, nothing in place of a call."""
    with pytest.raises(Refused, match=f"leaves out {entry}.*prompt_template FILE.jinja"):
        encoded(tokenizer_for(template, "<|im_end|>"), chat, train_on, tools=ADD if template == WITH_TOOLS else None)


def test_tools_that_the_template_does_not_write_are_refused():
    """In a row of SFT, and in a prompt of GRPO."""
    for template, is_refused in ((WITH_TOOLS, False), (CHATML, True)):
        tokenizer = tokenizer_for(template, "<|im_end|>")
        for write in (
            lambda tokenizer: write_example(tokenizer, DATA, Example(chat=TALK[:3], tools=ADD), "assistant"),
            lambda tokenizer: write_prompt(tokenizer, DATA, TALK[:2], ADD),
        ):
            refusal = pytest.raises(Refused, match="leaves out its tools") if is_refused else nullcontext()
            with refusal:
                write(tokenizer)


def test_what_is_not_learned_may_be_left_out():
    """Thoughts of earlier turns, in entries of their own or in the content, and entries of one's own."""
    for template, turn in (
        (CHATML, TURN | {"reasoning_content": THOUGHT, "mood": "glad"}),
        (FORGETFUL, TURN | {"content": f"<think>{THOUGHT}</think>2"}),
    ):
        assert "[" in encoded(tokenizer_for(template, "<|im_end|>"), [USER, turn, USER, TURN], "last")


def test_turns_that_end_at_the_marker_of_the_next_role_learn_no_end():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = tokenizer_for(template, "<eos>")
    assert encoded(tokenizer, TALK[1:5]) == "<user>1+1?<assistant>[two.]<user>and 2+2?<assistant>[call:<eos>]"


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("template", [CHATML, marked_template("chatml", True)], ids=["chatml", "marked"])
def test_a_message_that_is_not_to_be_learned_is_context(template, name):
    """Of two turns one is learned; what comes behind the last learned one is left out."""
    tokenizer, off = tokenizer_for(template, "<|im_end|>"), {name: 0}
    user, first, more, second = TALK[1:5]
    assert encoded(tokenizer, [user, first | off, more, second | {name: True}]) == encoded(tokenizer, TALK[1:5], "last")
    assert encoded(tokenizer, [user, first, more, second | off]) == encoded(tokenizer, [user, first])
    for train_on, turn in (("all", off), ("assistant", {name: 0.5})):
        with pytest.raises(Refused, match="learned|must be 0 or 1"):
            encoded(tokenizer, [user, first | turn], train_on)


def test_an_answer_that_has_its_end_already_gets_no_second_one():
    tokenizer = tokenizer_for(*FAMILIES["chatml"])
    chat = [USER, TURN | {"content": "two.<|im_end|>\n"}]
    data = DataConfig(prompt_template="{question}", system_prompt="")
    assert encoded(tokenizer, chat) == encoded(tokenizer, TALK[1:3])
    assert encoded(tokenizer, chat, data=data) == "1+1?[two.<|im_end|>]"


def test_the_system_prompt_comes_first_unless_the_chat_has_one():
    tokenizer, data = tokenizer_for(*FAMILIES["plain"]), DataConfig(system_prompt="hello")
    assert encoded(tokenizer, TALK[1:3], data=data) == "System: hello\nUser: 1+1?\nAssistant:[ two.\n<eos>]"
    assert encoded(tokenizer, TALK[:3], data=data) == "System: be brief\nUser: 1+1?\nAssistant:[ two.\n<eos>]"


# ---- Templates that make it hard


def test_a_template_that_is_not_prefix_stable():
    tokenizer = tokenizer_for(FORGETFUL, "<|im_end|>")
    thinking = [message | {"content": message["content"].replace("t", "<think>hm</think>t", 1)} for message in TALK[:5]]
    with pytest.raises(Refused) as refused:
        encoded(tokenizer, thinking)
    message = str(refused.value)
    place = len("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n") + 1
    assert f"is not prefix-stable: from character {place} on, the first 3 of 5 messages are " in message
    assert "assistant\\n<think>hm</think>two." in message and "assistant\\ntwo.<|im_end|>\\n" in message
    assert "give a template with {% generation %}" in message and "\n" not in message
    last = encoded(tokenizer, thinking, "last")
    assert last.endswith("[call:<|im_end|>]\n") and "two." in last and "think" not in last


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('No system\x1b role') }}",
            r"^the chat template of .* refuses it: TemplateError: No system",
        ),
        ("{{ messages[0].content.nothing.at_all }}", "refuses it: UndefinedError: "),
        ("{{ 1 // (messages | length - 3) }}", "refuses it: ZeroDivisionError: "),
        # as in R1's distilled models, whose prompt opens a thought that their chats leave out: not even the last turn
        (
            PLAIN.replace("Assistant:{% endif", "Assistant: <think>\n{% endif"),
            "character .* on.*<think>.*give a templat",
        ),
    ],
)
def test_what_the_template_refuses_is_told_in_one_line(template, message):
    for train_on in ("assistant", "last"):
        with pytest.raises(Refused, match=message) as refused:
            encoded(tokenizer_for(template, "<eos>"), TALK[:3], train_on)
        assert str(refused.value).isprintable()


def test_templates_that_write_prompts_only(tmp_path):
    """Text with placeholders, or a question in Jinja: the answer and EOS follow."""
    tokenizer = tokenizer_for("", "<eos>")
    text = DataConfig(prompt_template="{system_prompt}, {question} {question} Assistant:", system_prompt="")
    shown = "be brief, 1+1? 1+1? Assistant:[two.<eos>]"
    assert encoded(tokenizer, TALK[:3], data=text) == shown
    jinja = DataConfig(prompt_template=str(tmp_path / "q.jinja"), system_prompt="")
    for opening in ("Assistant:", "{% if add_generation_prompt %}Assistant:{% endif %}"):
        tokenizer.chat_template = "{{ messages[0].content }}, {{ question }} {{ question }} " + opening
        assert encoded(tokenizer, TALK[:3], data=jinja) == shown
        assert encoded(tokenizer, TALK[:3], "all", data=jinja) == "be[" + shown[2:].replace("[", "")
    for data in (text, jinja):
        with pytest.raises(Refused, match="one question .* user, assistant, user, assi"):
            encode_chat(tokenizer, data, TALK[:5], "last")
    assert encoded(tokenizer, TALK[:2], data=text) == "be brief, 1+1? 1+1? Assistant:"


def test_texts_have_the_tokenizers_beginning_and_eos():
    tokenizer = tokenizer_for(*FAMILIES["plain"])
    assert bracketed(tokenizer, *encode_text(tokenizer, "hello a lot")) == "hello[ a lot<eos>]"
    special = [("<|begin|>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    for pattern in ("<|begin|> $A", "<|begin|> $A <eos>"):
        processor = processors.TemplateProcessing(single=pattern, special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = processor
        for text in ("hello", "<|begin|>hello<eos>"):  # what a text has already comes once
            assert bracketed(tokenizer, *encode_text(tokenizer, text)) == "<|begin|>[hello<eos>]"
        for begin in ("", "<|begin|>"):
            data = DataConfig(prompt_template=begin + "{question}", system_prompt="")
            assert encoded(tokenizer, TALK[1:3], data=data) == "<|begin|>1+1?[two.<eos>]"


# ---- Tokenizers that make it hard, bounds


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per character, except for these pairs, which lie across the edges of turns."""
    characters = sorted(set("\n useran:yo!") | {" y", "!\n"})
    vocab = {piece: token for token, piece in enumerate(["<eos>", *characters])}
    backend = Tokenizer(models.BPE(vocab, merges=[(" ", "y"), ("!", "\n")]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=template)


def test_tokens_across_the_edge_of_a_turn():
    """ " y" is cut where the turn begins, as a generator has its prompt. "!\n" is of the side of its last character."""
    template = (
        "{% for m in messages %}{{ '' if loop.first else '\n' }}{{ m.role[0] }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n' }}a: {% endif %}"
    )
    tokenizer = merging_tokenizer(template)
    messages = [
        {"role": "user", "content": "sn"},
        {"role": "assistant", "content": "yes!"},
        {"role": "user", "content": "n"},
        {"role": "assistant", "content": "no!"},
    ]
    ids, mask = encode_chat(tokenizer, DATA, messages, "assistant")
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert "".join(pieces) == "U: sn\na: yes!\nU: n\na: no!<eos>".replace("U", "u")
    labels = [piece for piece, is_label in zip(pieces, mask, strict=True) if is_label]
    assert labels == ["y", "e", "s", "n", "o", "!", "<eos>"]
    assert pieces[pieces.index("s", 8) + 1] == "!\n"
    assert ids[: mask.index(True)] == encode_prompt(tokenizer, DATA, "sn")


def test_a_text_that_cannot_be_cut_keeps_the_token_across_the_begin_of_a_turn():
    """Each text begins with a mark of its own, so the parts would have a blank more than the text."""
    backend = Tokenizer(models.BPE({"▁": 0, "<eos>": 1, "U": 2, "y": 3, "▁y": 4, "▁U": 5}, [("▁", "y"), ("▁", "U")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    template = "{% for m in messages %}{{ m.content }}{{ ' ' if m.role == 'user' }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=template)
    chat = [USER | {"content": "U"}, TURN | {"content": "y"}]
    ids, mask = encode_chat(tokenizer, DATA, chat, "assistant")
    assert (tokenizer.convert_ids_to_tokens(ids), mask) == (["▁U", "▁y", "<eos>"], [False, True, True])


def test_characters_of_several_tokens_and_tokens_without_characters():
    tokenizer = tokenizer_for(*FAMILIES["chatml"])
    messages = [{"role": "user", "content": "数👍🏽"}, {"role": "assistant", "content": "学é👍🏽\u0301"}]
    assert encoded(tokenizer, messages).endswith("数👍🏽<|im_end|>\n<|im_start|>assistant\n[学é👍🏽\u0301<|im_end|>]\n")


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.text(), min_size=2, max_size=6), st.booleans())
def test_labels_are_the_answers_whatever_is_in_them(texts, trim_offsets):
    """Special tokens stand at the edges of turns, which nothing merges with."""
    tokenizer = any_text_tokenizer(trim_offsets)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    whole = tokenizer.apply_chat_template(messages[: len(texts) // 2 * 2], tokenize=False)
    ids, mask = encode_chat(tokenizer, DATA, messages, "assistant")
    assert tokenizer.decode(list(itertools.compress(ids, mask))) == "".join(f"{text}<|im_end|>" for text in texts[1::2])
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids[: mask.index(True)] == encode_prompt(tokenizer, DATA, texts[0])  # as a generator gets it


@functools.cache
def any_text_tokenizer(trim_offsets: bool) -> PreTrainedTokenizerFast:
    return tokenizer_for(CHATML, "<|im_end|>", trim_offsets)


def test_a_row_is_used_left_out_or_cut_off_at_exactly_its_limit():
    tokenizer = tokenizer_for(*FAMILIES["chatml"])
    ids, mask = encode_chat(tokenizer, DATA, TALK, "assistant")

    def found(max_tokens: int, truncate: bool) -> tuple[int, list[int]]:
        encoder = Encoder(tokenizer, DATA, max_tokens, "assistant", truncates=truncate)
        (row,) = encoder.encode([{}], lambda _: Example(chat=TALK))
        return row.status, row.ids

    assert found(len(ids), False) == (RowStatus.USED, ids)
    assert found(len(ids) - 1, False) == (RowStatus.TOO_LONG, [])
    first_label = mask.index(True)
    assert found(first_label + 1, True) == (RowStatus.USED, ids[: first_label + 1])
    assert found(first_label, True) == (RowStatus.UNLABELLED, [])
