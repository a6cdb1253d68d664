"""The endpoint: OpenAI's chat completions over HTTP, on threads of the engine's process, for this machine alone."""

import json
import select
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from grpo.features.agents.tree import Refusal, Session, Turn

MODEL = "policy"
# Longest request in bytes
MAX_BYTES = 2**23


class Endpoint(socketserver.ThreadingTCPServer):
    """The server."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self):
        self.sessions: dict[str, Session] = {}  # those that play, by their keys
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of an agent that has hung up."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = 60.0  # for the agent to send all of it

    def do_GET(self) -> None:
        """List the models, of which there is one."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}
        self._answer(lambda session: {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        """Complete a chat. A turn that the agent does not get is not trained."""
        self._answer(self._complete)

    def _answer(self, answer: Callable[[Session], Any]) -> None:
        """Send what `answer` returns, a text as a stream; or why the request is refused."""
        status = 200
        kind = "application/json"
        try:
            key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if key not in self.server.sessions:
                raise Refusal("no such key", 401, "invalid_api_key")
            value = answer(self.server.sessions[key])
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else Refusal(f"no request that can be read: {error!r}")
            status = refusal.status
            value = {"error": {"message": refusal.text, "type": "invalid_request_error", "code": refusal.code}}
        if isinstance(value, str):
            kind = "text/event-stream"
        else:
            value = json.dumps(value)
        data = value.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status != 200:
            self.send_header("x-should-retry", "false")  # the openai client reads it
        self.end_headers()
        self.wfile.write(data)

    def _complete(self, session: Session) -> dict[str, Any] | str:
        """Return a completion, or the text of its stream."""
        if not self.path.endswith("/chat/completions"):
            raise Refusal(f"{self.path} is not served, only /v1/chat/completions and /v1/models", 404)
        num_bytes = int(self.headers.get("Content-Length", 0))
        if num_bytes > MAX_BYTES:
            raise Refusal(f"{num_bytes} bytes are more than {MAX_BYTES}", 413)
        body = json.loads(self.rfile.read(num_bytes))
        is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"
        turn = session.ask(body, is_retry)
        turn.is_done.wait()
        session.finish(turn)
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable:  # it has nothing more to say
            raise Refusal("the agent has hung up")
        turn.was_delivered = True  # before it is sent, since the agent may end at once
        completion = completion_of(turn)
        return stream_of(completion) if body.get("stream") else completion

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def completion_of(turn: Turn) -> dict[str, Any]:
    """Return a turn as OpenAI's clients read it."""
    finish_reason = "length" if turn.piece.ended_by == "tokens" else "stop"
    if "tool_calls" in turn.message:
        finish_reason = "tool_calls"
    num_prompt = len(turn.prompt_ids)
    num_sampled = turn.piece.num_tokens
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    return {
        "id": f"chatcmpl-{turn.session.index}-{turn.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": turn.message, "finish_reason": finish_reason}],
        "usage": usage,
    }


def stream_of(completion: dict[str, Any]) -> str:
    """Return a completion as a stream of one part."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta.get("tool_calls", []))]
    choice = choice | {"message": None, "delta": delta}
    part = {"object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(completion | part)}\n\ndata: [DONE]\n\n"
