"""The turns of one episode, as a tree that only grows: a retry, a branch and a sub-agent are each a child.

An agent sends its whole history with each request. The longest earlier chat is found, tools and answer included, that
it begins with. So the ids of that answer and of all before it are used as they were sampled, and only what follows is
encoded. A history that was edited begins a new sequence.

    "hi" -> turn 0 -> "and?" -> turn 1      two sequences: (hi, 0, and?, 1) and (hi, 0, or?, 2), in which 0 is repeated
                   -> "or?"  -> turn 2
"""

import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo.config import EnvironmentConfig, GeneratorConfig
from grpo.config.engine_options import RESHAPING
from grpo.data.rows import Message
from grpo.features.agents.writer import Writer
from grpo.types import Piece, Pieces, Prompt

# Parameters of a request -> values that sample from the distribution that is trained, if the run has none of its own
ALLOWED = RESHAPING | {
    "n": (1,),
    "tool_choice": ("auto",),
    "functions": (None,),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
}


@dataclass(eq=False)
class Refusal(Exception):
    """What the agent may not do, which it reads with this status and code."""

    message: str
    status: int = 400
    code: str = "invalid_request_error"


@dataclass(eq=False)
class Turn:
    """An answer of the model, which the engine samples."""

    session: "Session"
    number: int
    before: Pieces
    """What stands before it in its sequence: an earlier answer with all before that, and what follows the answer."""
    chat: list[Any]
    """Tools, messages and, once it was sampled, the answer, as further requests are compared with them."""
    body: dict[str, Any]
    """The request."""
    max_tokens: int
    sampled: "Future[Piece]" = field(default_factory=Future)
    piece: Piece | None = None
    """What was sampled, up to a stop text."""
    message: Message = field(default_factory=dict)
    was_delivered: bool = False

    def __reduce__(self) -> tuple:
        """Return it as the other ranks of an engine know it: by its place."""
        return tuple, ([self.session.index, self.number],)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids that the engine reads before it samples."""
        return torch.cat([piece.ids_T for piece in self.before]).tolist()


@dataclass(eq=False)
class Session:
    """One episode: its key, its turns, its limits and how it ended. The engine's thread calls `settle` and `close`."""

    prompt: Prompt
    index: int
    """Among the rollouts that are sampled together."""
    process: int
    """Number of its process, which agents have one after another."""
    writer: Writer
    environment: EnvironmentConfig
    generator: GeneratorConfig
    max_tokens: int
    """Of a sequence."""
    inbox: "queue.SimpleQueue[Turn]"
    """Gets the turns that are to be sampled."""
    number: int = field(default_factory=lambda: secrets.randbits(128))
    """Nobody can guess it, so it is the key."""
    turns: list[Turn] = field(default_factory=list)
    num_running: int = 0
    waited: float = 0.0
    """Seconds outside of the engine."""
    idle_since: float = field(default_factory=time.monotonic)
    lock: Any = field(default_factory=threading.Lock)
    limit: str = ""
    """The limit that its agent was told of: turns, seconds, tokens."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """How its process ended, see `Workers.poll`. Empty while it plays."""

    @property
    def idle_seconds(self) -> float:
        """Seconds since the agent had a request in the engine."""
        return 0.0 if self.num_running else time.monotonic() - self.idle_since

    def ask(self, body: dict[str, Any], is_retry: bool) -> Turn:
        """Return the turn that a request begins, or the one that it began before. Raises Refusal or ValueError."""
        own = {name: (value,) for name, value in self.generator.sampling.items()}
        own["temperature"] = self.generator.temperature[:1]
        own["chat_template_kwargs"] = (self.writer.data.chat_template_kwargs,)
        for name, values in (ALLOWED | own).items():
            if body.get(name) not in (None, *values):
                raise Refusal(f"{name}={body[name]!r} is not what is trained, which is {values[0]!r}")
        with self.lock:
            if self.outcome:
                raise Refusal("the episode has ended", 410)
            if is_retry:
                for turn in reversed(self.turns):
                    if turn.body == body:
                        return turn
            turn = self._begin(body)
            self.turns.append(turn)
            self.waited += self.idle_seconds
            self.num_running += 1
            self.inbox.put(turn)
            return turn

    def _begin(self, body: dict[str, Any]) -> Turn:
        """Find the answer that a request goes on from, and write what follows it."""
        environment = self.environment
        limits = {
            "turns": len(self.turns) >= environment.max_turns,
            "seconds": 0 < environment.rollout_seconds < self.waited + self.idle_seconds,
        }
        for name, is_reached in limits.items():
            if is_reached:
                self.limit = name  # which explains what the agent does next
                raise Refusal(f"the episode is at its limit of {name}", 403)
        tools = body.get("tools") or None
        messages = [_plain(message) for message in body["messages"]]
        chat = [tools, *map(_stripped, messages)]
        before: Pieces = ()
        last = -1
        for turn in reversed(self.turns):
            place = len(turn.chat) - 2  # of its answer, among the messages
            if turn.message and place > last and turn.chat == chat[: len(turn.chat)]:
                before = (*turn.before, turn.piece)
                last = place
        written = self.writer.ids(messages, tools, last)
        stops = self.writer.stop_ids
        has_ended = last >= 0 and int(before[-1].ids_T[-1]) in stops
        if has_ended and written[0] in stops:
            written = written[1:]  # the model has sampled the end of its turn, by this token or another
        before = (*before, Piece.written(written))
        room = self.max_tokens - sum(piece.num_tokens for piece in before)
        if room < 1:
            self.limit = "tokens"
            raise Refusal(
                f"This model's maximum context length is {self.max_tokens} tokens",
                code="context_length_exceeded",
            )
        wanted = body.get("max_completion_tokens")
        if wanted is None:  # not there, or null
            wanted = body.get("max_tokens")
        if wanted is None:
            wanted = room
        if type(wanted) is not int or wanted < 1:  # vLLM would end the run
            raise Refusal(f"max_tokens={wanted!r} is no number of tokens above 0")
        max_tokens = min(room, wanted, environment.max_turn_tokens or room)
        return Turn(self, len(self.turns), before, chat, body, max_tokens)

    def settle(self, turn: Turn, piece: Piece) -> None:
        """Take what the engine sampled, and let the request go on."""
        with self.lock:
            self.num_running -= 1
            self.idle_since = time.monotonic()
            turn.sampled.set_result(piece)

    def finish(self, turn: Turn) -> None:
        """Wait for what is sampled, and make a message of it, once. Raises Refusal if the episode ends before."""
        piece = turn.sampled.result()
        with self.lock:
            if turn.message:
                return
            stops = turn.body.get("stop") or []
            if isinstance(stops, str):
                stops = [stops]
            turn.piece, text = self.writer.read(piece, stops)
            tools = [tool["function"]["name"] for tool in turn.body.get("tools") or []]
            turn.message = self.writer.message_of(text, tools, f"call-{turn.number}")
            turn.chat.append(_stripped(_plain(turn.message)))

    def close(self, outcome: dict[str, Any]) -> list[Turn]:
        """Refuse all further requests. Returns the turns that were not sampled yet, which will not be."""
        with self.lock:
            self.outcome = outcome
            left = [turn for turn in self.turns if not turn.sampled.done()]
            for turn in left:
                turn.sampled.set_exception(Refusal("the episode has ended", 410))
            return left

    @property
    def delivered(self) -> list[Turn]:
        """The turns whose answers the agent got, which are trained."""
        return [turn for turn in self.turns if turn.was_delivered]

    def sequences(self) -> Iterator[Pieces]:
        """Yield the sequence of each leaf. A turn is trained in the first one that has it, and repeated in others."""
        inner = {piece for turn in self.delivered for piece in turn.before}
        seen = set()
        for turn in self.delivered:
            if turn.piece in inner:  # it is no leaf
                continue
            pieces = []
            for piece in (*turn.before, turn.piece):
                if piece in seen:
                    piece = replace(piece, loss_mask_T=torch.zeros_like(piece.loss_mask_T))
                seen.add(piece)
                pieces.append(piece)
            yield tuple(pieces)


def _plain(message: dict[str, Any]) -> Message:
    """Return a message as templates read it, without what clients add: content as text, arguments as an object."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)  # as in data/rows.py
    plain = {"role": message["role"].replace("developer", "system"), "content": content}
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message["tool_call_id"]
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        function = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return plain | {"tool_calls": calls} if calls else plain


def _stripped(message: Message) -> Message:
    """Return a message as it is compared: without blanks at the ends, which clients drop."""
    return message | {"content": message["content"].strip()}
