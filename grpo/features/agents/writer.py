"""Messages as token ids and back. Marks stand in place of texts while the chat template writes.

So no part of a text becomes a special token, and what follows an answer of the model is found whatever the template
makes of the answer's text. Thoughts stay in the content, as with a server that has no parser for them.
"""

import functools
import json
import threading
from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from grpo import features
from grpo.config import DataConfig
from grpo.data.chat import as_written, plain_ids, render, special_ids
from grpo.data.rows import Message, Messages, Tools
from grpo.types import Piece

# For private use, so that no template writes it
MARK = "\ue000{}\ue000"
# Texts that are kept with what becomes of them
KEPT_TEXTS = 256


class Writer:
    """Writes prompts in the words of the run's chat template, on any thread."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        stop_ids: Collection[int],
        calls: str,
    ):
        """calls: how the model writes them, `environment.calls`."""
        self.tokenizer = tokenizer
        self.data = data
        self.stop_ids = set(stop_ids)
        self.calls = calls
        self.readers = features.offers("CALLS")
        self.lock = threading.Lock()  # a fast tokenizer is not to be configured by two threads
        # episodes share the template's words, the tools, the system message and, in a group, the question
        keep = functools.lru_cache(KEPT_TEXTS)
        self.render = keep(self._render)
        self.encode = keep(functools.partial(tokenizer.encode, add_special_tokens=False))
        self.plain_ids = keep(functools.partial(plain_ids, tokenizer, special=special_ids(tokenizer)))

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
                    ids += self.plain_ids(as_written(written, before, after, messages[place]["content"]))
                position = len(text) - len(after)
            return ids + self.encode(text[position:])

    def message_of(self, text: str, tools: Collection[str], name: str) -> Message:
        """Return the message for the agent, with its calls of `tools` as data. name: begins the ids of calls.

        Raises ValueError if there are tools whose calls cannot be read.
        """
        message = {"role": "assistant", "content": text}
        if not tools:
            return message
        if not self.readers:
            raise ValueError("calls of tools are read by grpo/features/environments, which this checkout lacks")
        style = self.calls
        if style == "auto":
            style = self.readers["style_of"](self.tokenizer.chat_template)
        calls = []
        for call in self.readers["parse"](text, style, tools):
            if isinstance(call, str):  # it cannot be read
                continue
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            place = len(calls)  # which streams need
            calls.append({"index": place, "id": f"{name}-{place}", "type": "function", "function": function})
        return message | {"tool_calls": calls} if calls else message

    def read(self, piece: Piece, stops: Collection[str]) -> tuple[Piece, str]:
        """Return a turn with its text, both up to the first of `stops`, without the token that ended it.

        The tokens up to it are distributed as if it had ended the turn. Those behind it are dropped.
        """
        ids = piece.ids_T.tolist()
        if stops:
            for count in range(1, len(ids) + 1):
                text = self.tokenizer.decode(ids[:count])
                found = [text.find(stop) for stop in stops if stop in text]
                if found:
                    return piece.first(count), text[: min(found)]
        if ids[-1] in self.stop_ids:
            ids.pop()
        return piece, self.tokenizer.decode(ids)

    def _render(self, messages_and_tools: str) -> str:
        """Return what the template makes of messages and tools, which come as JSON."""
        messages, tools = json.loads(messages_and_tools)
        return render(self.tokenizer, self.data, messages, True, tools)[0]
