"""The chat template of the exported model: earlier turns as the model wrote them, so that serving equals training.

Many templates drop the thoughts of earlier turns, or trim what was written. In training a turn stays as it was sampled.
So the model's own template is put into another one, which hands it marks in place of what the model wrote, and then
writes those texts where the marks stand, behind the opening that each turn of the training had.
"""

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

from grpo.config import DataConfig
from grpo.data.chat import Refused, prompt_messages, render
from grpo.environments.suffix import OPENED_THOUGHT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What templates drop, split or trim of a turn.
PROBE = " <think>MARKthought</think> MARKtext \n"
# With what marks begin and end: characters for private use, which no text has.
BEGIN, END = "\ue000", "\ue001"
# A server may hand on thoughts apart from the text, or the text in parts. Words in capitals are filled in.
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
    """The chat template that keeps earlier turns; empty if the run's template keeps them, None if it cannot be made to.

    It cannot if it needs what only a run gives it, or writes something between the opening and a turn.
    """
    if data.is_text_template or _keeps(tokenizer, data):
        return ""
    own = tokenizer.get_chat_template(data.chat_template_kwargs.get("chat_template"))
    # markers of what is to be learned count characters of the whole, and mean nothing in a part
    for word, other in (("generation", "if true"), ("endgeneration", "endif")):
        own = re.sub(rf"(\{{%[-+]?\s*){word}(\s*[-+]?%\}})", rf"\1{other}\2", own)
    thought = OPENED_THOUGHT.search(render(tokenizer, data, prompt_messages(data, "?"), opening=True)[0])[0]
    written = [before for text in _chats(tokenizer, data, BEGIN) for before in text.split(BEGIN)[:-1]]
    others = sorted({OPENED_THOUGHT.search(before)[0] for before in written} - {""}, key=len, reverse=True)
    fields = {"THOUGHT": repr(thought), "OTHERS": repr(others), "BEGIN": BEGIN, "END": END, "OWN": own}
    template = re.sub("|".join(fields), lambda found: fields[found.group()], TEMPLATE)
    kwargs = dict(data.chat_template_kwargs) | {"chat_template": template}
    needs_question = data.prompt_template and "question" in own
    if needs_question or not _keeps(tokenizer, dataclasses.replace(data, chat_template_kwargs=kwargs)):
        return None
    return template


def _keeps(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> bool:
    """Whether the template writes a turn, whoever answers it, as it was written, behind the opening of the prompt."""
    opened = render(tokenizer, data, prompt_messages(data, "?"), opening=True)[0]
    return all(text.startswith(opened + PROBE) and text.count(PROBE) == 2 for text in _chats(tokenizer, data, PROBE))


def _chats(tokenizer: "PreTrainedTokenizerBase", data: DataConfig, turn: str) -> list[str]:
    """What the template writes of two turns with an answer between them, by a user and by a tool, if it takes it."""
    found, said = [], {"role": "assistant", "content": turn}
    for role in ("user", "tool"):
        chat = [*prompt_messages(data, "?"), said, {"role": role, "content": "!"}, said]
        with contextlib.suppress(Refused):
            found.append(render(tokenizer, data, chat, opening=False)[0])
    return found
