"""The turns of one episode, as a tree that only grows: a retry, a branch and a sub-agent are each a child.

An agent sends its whole history with each request. The history is found among those that ended with an answer, by a
chained digest of the tools and the messages. So the ids of the answer and of all before it are used as they were
sampled, and only what follows is encoded. A history that was edited begins a new sequence.

    "hi" -> turn 0 -> "and?" -> turn 1      two sequences: (hi, 0, and?, 1) and (hi, 0, or?, 2), in which 0 is repeated
                   -> "or?"  -> turn 2
"""

import functools
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
from grpo.types import Piece, Pieces, Prompt

# Parameters of a request, and the one value that samples from the distribution that is trained, if there is one
ALLOWED = {
    "n": 1,
    "tool_choice": "auto",
    "functions": None,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logprobs": False,
}


@dataclass(eq=False)
class Refusal(Exception):
    """What the agent may not do, which it reads with this status and code."""

    text: str
    status: int = 400
    code: str = "invalid_request_error"


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

    def __reduce__(self) -> tuple:
        """Return it as the other ranks of an engine know it: by its place."""
        return tuple, ([self.session.index, self.number],)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids that the engine reads before it samples."""
        ids = []
        for turn in self.path:
            ids += turn.written + turn.piece.ids_T.tolist()
        return ids + self.written


@dataclass(eq=False)
class Session:
    """One episode: its key, its turns, its limits and how it ended. The engine's thread calls `settle` and `close`."""

    prompt: Prompt
    index: int
    """Among the rollouts that are sampled together."""
    writer: Writer
    config: EnvironmentConfig
    max_tokens: int
    """Of a prompt with its answer."""
    allowed: Mapping[str, Any]
    """As ALLOWED."""
    inbox: "queue.SimpleQueue[Turn]"
    """Gets the turns that are to be sampled."""
    number: int = field(default_factory=functools.partial(secrets.randbits, 128))
    """Nobody can guess it, so it is the key."""
    turns: list[Turn] = field(default_factory=list)
    known: dict[bytes, Turn] = field(default_factory=dict)
    """Digest of a whole request, or of a history with an answer at its end -> the answer's turn."""
    is_closed: bool = False
    num_running: int = 0
    waited: float = 0.0
    """Seconds outside of the engine."""
    idle_since: float = 0.0
    lock: Any = field(default_factory=threading.RLock)
    process: int = -1
    """Number of its process, which agents have one after another."""
    reward: float | None = None
    ended_by: str = ""
    """The limit that it was told of, and in the end as in `Rollout`."""
    failed: str = ""
    """Why its agent failed."""

    @property
    def idle_seconds(self) -> float:
        """Seconds since the agent had a request in the engine."""
        return 0.0 if self.num_running else time.monotonic() - self.idle_since

    def ask(self, body: dict[str, Any], is_retry: bool) -> Turn:
        """Return the turn that a request begins, or the one that it began before. Raises Refusal or ValueError."""
        with self.lock:
            if self.is_closed:
                raise Refusal("the episode has ended", 410, "session_closed")
            for name, value in self.allowed.items():
                if body.get(name) not in (None, value):
                    raise Refusal(f"{name}={body[name]!r} is not what is trained, which is {value!r}")
            request = _digest(body)
            if is_retry and request in self.known:
                return self.known[request]
            turn = self._begin(body)
            self.turns.append(turn)
            self.known[request] = turn
            self.waited += self.idle_seconds
            self.num_running += 1
            self.inbox.put(turn)
            return turn

    def _begin(self, body: dict[str, Any]) -> Turn:
        """Find the answer that a request goes on from, and write what follows it."""
        config = self.config
        limits = {
            "turns": len(self.turns) >= config.max_turns,
            "seconds": 0 < config.rollout_seconds < self.waited + self.idle_seconds,
        }
        for name, is_reached in limits.items():
            if is_reached:
                self.ended_by = name  # which explains what the agent does next
                raise Refusal(f"the episode is at its limit of {name}", 403, "limit")
        tools = body.get("tools") or None
        if tools:
            self.writer.read_calls  # noqa: B018, it raises if calls cannot be read
        messages = [_plain(message) for message in body["messages"]]
        history = _digest(tools)
        path: list[Turn] = []
        last = -1
        for place, message in enumerate(messages):
            history = _digest(message, history)
            if answer := self.known.get(history):
                path = [*answer.path, answer]
                last = place
        written = self.writer.ids(messages, tools, last)
        stops = self.writer.stop_ids
        if path and int(path[-1].piece.ids_T[-1]) in stops and written[0] in stops:
            written = written[1:]  # the model has sampled the end of its turn, by this token or another
        turn = Turn(self, len(self.turns), path, written, history, body)
        room = self.max_tokens - len(turn.prompt_ids)
        if room < 1:
            self.ended_by = "tokens"
            text = f"This model's maximum context length is {self.max_tokens} tokens"
            raise Refusal(text, code="context_length_exceeded")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or room
        turn.max_tokens = min(room, wanted, config.max_turn_tokens or room)
        return turn

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
            text = self._text_of(turn)
            tools = [tool["function"]["name"] for tool in turn.body.get("tools") or []]
            turn.message = self.writer.message_of(text, tools, f"call-{turn.number}")
            self.known[_digest(_plain(turn.message), turn.history)] = turn

    def _text_of(self, turn: Turn) -> str:
        """Return what a turn says before the first stop text. The tokens behind that are dropped.

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
        return self.writer.text_of(turn.piece.ids_T.tolist())

    def close(self) -> list[Turn]:
        """Refuse all further requests. Returns the turns that were not sampled yet, which will not be."""
        with self.lock:
            self.is_closed = True
            left = [turn for turn in self.turns if not turn.is_done.is_set()]
            for turn in left:
                self.settle(turn, None)
            return left

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
        function = call["function"]
        function = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return plain | {"tool_calls": calls} if calls else plain


def _digest(value: Any, history: bytes = b"") -> bytes:
    """Digest JSON behind a history. Blanks at the ends of a message do not count, since clients drop them."""
    if isinstance(value, dict) and "content" in value:
        value = value | {"content": value["content"].strip()}
    data = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(history + data, digest_size=16).digest()
