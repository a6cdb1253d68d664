"""The turns of one episode, as a tree that only grows: a retry, a branch and a sub-agent are each a child.

An agent sends its whole history with each request. The history is found among those that ended with an answer, by a
chained digest of the tools and the messages. So the ids of the answer and of all before it are used as they were
sampled, and only what follows is encoded. A history that was edited begins a new sequence.

    "hi" -> turn 0 -> "and?" -> turn 1      two sequences: (hi, 0, and?, 1) and (hi, 0, or?, 2), in which 0 is repeated
                   -> "or?"  -> turn 2
"""

import hashlib
import json
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo.config import EnvironmentConfig
from grpo.data.rows import Message
from grpo.features.agents.writer import Writer
from grpo.types import Piece, Pieces

# Parameters of a request, and the values with which it samples from the distribution that is trained
ALLOWED = {
    "n": (1,),
    "tool_choice": ("auto",),
    "functions": (),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
}


class Refusal(Exception):
    """What the agent may not do. It reads the text, with this status and code."""

    def __init__(self, text: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(text)
        self.status = status
        self.code = code


@dataclass(eq=False)
class Turn:
    """An answer of the model, which the engine samples."""

    session: "Session"
    number: int
    path: "list[Turn]"
    """The turns that its history has; none if it begins a sequence."""
    written: list[int]
    """Ids behind the last of these."""
    history: bytes
    """Digest of the messages before it."""
    body: dict[str, Any]
    """The request."""
    max_tokens: int = 0
    piece: Piece | None = None
    message: Message = field(default_factory=dict)
    was_delivered: bool = False
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids that the engine reads before it samples."""
        ids = []
        for turn in self.path:
            ids += turn.written + turn.piece.ids_T.tolist()
        return ids + self.written


class Session:
    """One episode: its key, its turns and its limits. The engine's thread calls `settle` and `close`."""

    def __init__(
        self,
        number: int,
        writer: Writer,
        config: EnvironmentConfig,
        max_tokens: int,
        allowed: Mapping[str, tuple],
        inbox: "queue.SimpleQueue[Turn]",
    ):
        """max_tokens: of a prompt with its answer. allowed: as ALLOWED. inbox: gets turns that are to be sampled."""
        self.number = number
        self.writer = writer
        self.config = config
        self.max_tokens = max_tokens
        self.allowed = allowed
        self.inbox = inbox
        self.key = "sk-" + secrets.token_urlsafe(24)
        self.turns: list[Turn] = []
        self.after: dict[bytes, Turn] = {}  # history with an answer at its end -> the answer's turn
        self.asked: dict[bytes, Turn] = {}  # whole request -> its turn
        self.ended_by = ""
        self.is_closed = False
        self.num_running = 0
        self.waited = 0.0  # seconds outside of the engine
        self.idle_since = time.monotonic()
        self.lock = threading.RLock()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the agent had a request in the engine."""
        return 0.0 if self.num_running else time.monotonic() - self.idle_since

    def ask(self, body: dict[str, Any], is_retry: bool) -> Turn:
        """Return the turn that a request begins, or the one that it began before. Raises Refusal or ValueError."""
        with self.lock:
            if self.is_closed:
                raise Refusal("the episode has ended", 410, "session_closed")
            for name, values in self.allowed.items():
                if body.get(name) not in (None, *values):
                    raise Refusal(f"{name}={body[name]!r} is not what is trained, which is {values or 'without it'}")
            request = _digest(body)
            if is_retry and request in self.asked:
                return self.asked[request]
            turn = self._begin(body)
            self.turns.append(turn)
            self.asked[request] = turn
            self.waited += self.idle_seconds
            self.num_running += 1
            self.inbox.put(turn)
            return turn

    def _begin(self, body: dict[str, Any]) -> Turn:
        """Find the answer that a request goes on from, and write what follows it."""
        config = self.config
        if len(self.turns) >= config.max_turns:
            self._end(
                "turns",
                f"the episode has had its {config.max_turns} turns",
                403,
            )
        if 0 < config.rollout_seconds < self.waited + self.idle_seconds:
            self._end(
                "seconds",
                f"the episode has had its {config.rollout_seconds:g} seconds",
                403,
            )
        tools = body.get("tools") or None
        if tools:
            self.writer.read_calls  # noqa: B018, it raises if calls cannot be read
        messages = [_plain(message) for message in body["messages"]]
        history = _digest(tools)
        path: list[Turn] = []
        last = -1
        for place, message in enumerate(messages):
            history = _digest(message, history)
            if history in self.after:
                answer = self.after[history]
                path = [*answer.path, answer]
                last = place
        written = self.writer.ids(messages, tools, last)
        stops = self.writer.stop_ids
        if path and int(path[-1].piece.ids_T[-1]) in stops and written[0] in stops:
            written = written[1:]  # the model has sampled the end of its turn, by this token or another
        turn = Turn(self, len(self.turns), path, written, history, body)
        room = self.max_tokens - len(turn.prompt_ids)
        if room < 1:
            text = f"This model's maximum context length is {self.max_tokens} tokens"
            self._end("tokens", text, 400, "context_length_exceeded")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or room
        turn.max_tokens = min(room, wanted, config.max_turn_tokens or room)
        return turn

    def _end(self, ended_by: str, text: str, status: int, code: str = "limit") -> None:
        """Refuse a request at a limit, which explains what the agent does next."""
        self.ended_by = ended_by
        raise Refusal(text, status, code)

    def settle(self, turn: Turn, piece: Piece | None) -> None:
        """Take what the engine sampled, None if the episode has ended, and let the request go on."""
        with self.lock:
            self.num_running -= 1
            self.idle_since = time.monotonic()
            turn.piece = piece
        turn.is_done.set()

    def finish(self, turn: Turn) -> None:
        """Make the message of a turn that was sampled, once. Raises Refusal if it was not."""
        with self.lock:
            if turn.piece is None:
                raise Refusal("the episode has ended", 410, "session_closed")
            if turn.message:
                return
            text = self._cut_at_stop(turn)
            tools = [tool["function"]["name"] for tool in turn.body.get("tools") or []]
            turn.message = self.writer.message_of(turn.piece.ids_T.tolist(), tools, f"call-{turn.number}")
            if text is not None:
                turn.message["content"] = text
            self.after[_digest(_plain(turn.message), turn.history)] = turn

    def _cut_at_stop(self, turn: Turn) -> str | None:
        """Drop the tokens behind the first stop text, and return the text before it; None if there is none.

        The tokens up to it are distributed as if it had ended the turn.
        """
        stops = turn.body.get("stop") or []
        if isinstance(stops, str):
            stops = [stops]
        for count in range(turn.piece.num_tokens if stops else 0):
            text = self.writer.tokenizer.decode(turn.piece.ids_T[: count + 1])
            found = [text.find(stop) for stop in stops if stop in text]
            if found:
                turn.piece = turn.piece.first(count + 1)
                return text[: min(found)]
        return None

    def close(self) -> list[Turn]:
        """Refuse all further requests. Returns the turns that were not sampled yet."""
        with self.lock:
            self.is_closed = True
            return [turn for turn in self.turns if not turn.is_done.is_set()]

    @property
    def delivered(self) -> list[Turn]:
        """The turns whose answers the agent got, which are trained."""
        return [turn for turn in self.turns if turn.was_delivered]

    def sequences(self) -> tuple[Pieces, ...]:
        """Return the sequence of each leaf. A turn is trained in the first one that has it, and repeated in others."""
        parents = {turn for child in self.delivered for turn in child.path}
        seen = set()
        sequences = []
        for leaf in self.delivered:
            if leaf in parents:
                continue
            pieces = []
            for turn in [*leaf.path, leaf]:
                piece = turn.piece
                if turn in seen:
                    piece = replace(piece, loss_mask_T=torch.zeros_like(piece.loss_mask_T))
                seen.add(turn)
                pieces += [Piece.written(turn.written), piece]
            sequences.append(tuple(pieces))
        return tuple(sequences)


def _plain(message: dict[str, Any]) -> Message:
    """Return a message as templates read it, without what clients add: content as text, arguments as an object."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {"role": role, "content": content}
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message["tool_call_id"]
    calls = []
    for call in message.get("tool_calls") or []:
        function = {
            "name": call["function"]["name"],
            "arguments": json.loads(call["function"]["arguments"]),
        }
        calls.append({"id": call["id"], "type": "function", "function": function})
    return plain | {"tool_calls": calls} if calls else plain


def _digest(value: Any, history: bytes = b"") -> bytes:
    """Digest JSON behind a history. Blanks at the ends of a message do not count, since clients drop them."""
    if isinstance(value, dict) and "content" in value:
        value = value | {"content": value["content"].strip()}
    data = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(history + data, digest_size=16).digest()
