"""Messages as token ids and back. Marks stand in place of texts while the chat template writes.

So no part of a text becomes a special token, and what follows an answer of the model is found whatever the template
makes of the answer's text. Thoughts stay in the content, as with a server that has no parser for them.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from grpo import features
from grpo.config import DataConfig
from grpo.data.chat import as_written, plain_ids, render
from grpo.data.rows import Message, Messages, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For private use, so that no template writes it
MARK = "\ue000{}\ue000"
ANY_MARK = re.compile("\ue000[0-9]+\ue000")
# Texts that are kept with what becomes of them
KEPT_TEXTS = 256


class Writer:
    """Writes prompts in the words of the run's chat template, on any thread."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        data: DataConfig,
        stop_ids: Collection[int],
        calls: str,
    ):
        """calls: how the model writes them, `environment.calls`."""
        self.tokenizer = tokenizer
        self.data = data
        self.stop_ids = set(stop_ids)
        self.calls = calls
        self.added = set(tokenizer.added_tokens_decoder)
        self.special = set(tokenizer.all_special_ids)  # and added tokens that the template has written
        self.lock = threading.Lock()  # a fast tokenizer is not to be configured by two threads
        # episodes share the template's words, the tools, the system message and, in a group, the question
        keep = functools.lru_cache(KEPT_TEXTS)
        self.render = keep(self._render)
        self.encode = keep(self._encode)
        self.plain_ids = keep(self._plain_ids)

    def ids(self, messages: Messages, tools: Tools | None, last: int) -> list[int]:
        """Return the ids of what follows the answer `messages[last]`, or of a whole prompt if that is -1.

        Raises ValueError if the template refuses the messages, or leaves one out.
        """
        marked = []
        for place, message in enumerate(messages):
            if place == last:
                message = {"role": "assistant", "content": MARK.format(place)}  # calls are a part of what it wrote
            elif "tool_calls" not in message:
                message = message | {"content": MARK.format(place)}
            marked.append(message)
        with self.lock:
            text = self.render(json.dumps([marked, tools]))
            self.encode(ANY_MARK.sub("", text))  # finds out what the template writes
            ids = []
            position = 0
            for place in range(max(last, 0), len(messages)):
                mark = MARK.format(place)
                if marked[place]["content"] != mark:
                    continue
                before, found, after = text.partition(mark)
                if not found:
                    raise ValueError(f"the chat template does not write message {place}")
                if place != last:
                    ids += self.encode(before[position:])
                    unmarked = [*marked[:place], messages[place], *marked[place + 1 :]]
                    written = self.render(json.dumps([unmarked, tools]))
                    content = as_written(written, before, after, messages[place]["content"])
                    ids += self.plain_ids(content, len(self.special))
                position = len(text) - len(after)
            return ids + self.encode(text[position:])

    def message_of(self, text: str, tools: Collection[str], name: str) -> Message:
        """Return the message for the agent, with its calls of `tools` as data. name: begins the ids of calls."""
        message = {"role": "assistant", "content": text}
        calls = []
        for call in self.read_calls(text, tools=tools) if tools else []:
            if not isinstance(call, str):  # one that cannot be read
                function = {"name": call.name, "arguments": json.dumps(call.arguments)}
                calls.append({"id": f"{name}-{len(calls)}", "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message

    @functools.cached_property
    def read_calls(self) -> Callable[..., list[Any]]:
        """The function that reads calls. Raises ValueError or KeyError if there is none."""
        offered = features.offers("CALLS")
        style = self.calls
        if style == "auto":
            style = offered["style_of"](self.tokenizer.chat_template)
        return functools.partial(offered["parse"], style=style)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of a turn, without the token that ended it."""
        if self.stop_ids.intersection(ids[-1:]):
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _render(self, messages_and_tools: str) -> str:
        """Return what the template makes of messages and tools, which come as JSON."""
        messages, tools = json.loads(messages_and_tools)
        text, _ = render(self.tokenizer, self.data, messages, True, tools)
        return text

    def _encode(self, text: str) -> list[int]:
        """Return the ids of what the template wrote."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.special |= self.added.intersection(ids)
        return ids

    def _plain_ids(self, text: str, num_special: int) -> list[int]:
        """Return the ids of a text without special tokens.

        num_special: how many are known, because with more of them the same text has other ids.
        """
        return plain_ids(self.tokenizer, text, self.special)
