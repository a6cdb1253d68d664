"""The chat template of the exported model: it keeps earlier turns as the model wrote them, so serving equals training.

Many templates drop the thoughts of earlier turns or trim what was written, but in training a turn stays as it was
sampled. So the model's own template is put into another one. That one gives it marks in place of what the model wrote,
and then puts the texts in place of the marks, behind the opening that each turn of the training had.
"""

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

from grpo.config import DataConfig
from grpo.data.chat import Refused, prompt_messages, render, short_prompt
from grpo.environments.suffix import OPENED_THOUGHT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Has all that templates drop, split or trim of a turn
PROBE = " <think>MARKthought</think> MARKtext \n"
# Around marks: characters for private use, which no text has
BEGIN = "\ue000"
END = "\ue001"
# A server may pass on thoughts apart from the text, or the text in parts. Words in capitals are filled in.
TEMPLATE = """\
{#- Earlier turns stay as the model wrote them; the model's own template is the part between set and endset. -#}
{%- set kept = namespace(messages=[], texts=[], all='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.content is defined and message.content is not none -%}
{%- set content = message.content if message.content is string else message.content | map(attribute='text') | join -%}
{%- set thought = message.reasoning_content or message.reasoning -%}
{%- set open = '' if THOUGHT.endswith('<think>\\n') else '<think>' -%}
{%- set text = open ~ thought ~ '</think>' ~ content if thought else content -%}
{%- set mark = 'BEGIN' ~ kept.texts|length ~ 'END' -%}
{%- set kept.texts = kept.texts + [text] -%}
{%- set message = dict(message, content=mark, reasoning_content=none, reasoning=none) -%}
{%- endif -%}
{%- set kept.messages = kept.messages + [message] -%}
{%- endfor -%}
{%- set messages = kept.messages -%}
{%- set written %}OWN{% endset -%}
{%- set kept.all = written -%}
{%- for text in kept.texts -%}
{%- set mark = 'BEGIN' ~ loop.index0 ~ 'END' -%}
{%- for other in OTHERS -%}
{%- set kept.all = kept.all.replace(other ~ mark, mark) -%}
{%- endfor -%}
{%- set kept.all = kept.all.replace(mark, THOUGHT ~ text) -%}
{%- endfor -%}
{{- kept.all -}}
"""


def serving_template(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> str | None:
    """Return a chat template that keeps earlier turns. Empty if the run's template already does.

    None if the run's template cannot be made to: it needs what only a run gives it, or writes something between the
    opening and a turn.
    """
    if data.is_text_template or _keeps_turns(tokenizer, data):
        return ""
    own = tokenizer.get_chat_template(data.chat_template_kwargs.get("chat_template"))
    # the tags around what is to be learned count characters of the whole text, and mean nothing inside of another
    for tag, plain_tag in {"generation": "if true", "endgeneration": "endif"}.items():
        own = re.sub(rf"(\{{%[-+]?\s*){tag}(\s*[-+]?%\}})", rf"\1{plain_tag}\2", own)
    thought = OPENED_THOUGHT.search(short_prompt(tokenizer, data))[0]

    others = set()  # thoughts that the template itself writes in front of earlier turns
    for chat in _chats(tokenizer, data, BEGIN):
        *texts_before, _ = chat.split(BEGIN)
        for before in texts_before:
            others.add(OPENED_THOUGHT.search(before)[0])
    longest_first = sorted(others - {""}, key=len, reverse=True)
    fields = {
        "THOUGHT": repr(thought),
        "OTHERS": repr(longest_first),
        "BEGIN": BEGIN,
        "END": END,
        "OWN": own,
    }
    template = re.sub("|".join(fields), lambda match: fields[match[0]], TEMPLATE)

    kwargs = {**data.chat_template_kwargs, "chat_template": template}
    served = dataclasses.replace(data, chat_template_kwargs=kwargs)
    needs_question = data.prompt_template and "question" in own
    if needs_question or not _keeps_turns(tokenizer, served):
        return None
    return template


def _keeps_turns(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> bool:
    """Check that the template writes earlier turns as they were written, behind the opening at the end of a prompt."""
    opening = short_prompt(tokenizer, data)
    for chat in _chats(tokenizer, data, PROBE):
        has_both = chat.count(PROBE) == 2
        if not has_both or not chat.startswith(opening + PROBE):
            return False
    return True


def _chats(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    turn: str,
) -> list[str]:
    """Write a chat of two turns, answered by the user and, if the template allows it, by a tool."""
    message = {"role": "assistant", "content": turn}
    chats = []
    for role in ("user", "tool"):
        answer = {"role": role, "content": "!"}
        messages = [*prompt_messages(data, "?"), message, answer, message]
        with contextlib.suppress(Refused):
            chat, _ = render(tokenizer, data, messages, opening=False)
            chats.append(chat)
    return chats
