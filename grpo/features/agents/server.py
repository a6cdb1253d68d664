"""The endpoint: OpenAI's chat completions over HTTP, on threads of the engine's process, for this machine alone."""

import json
import select
import socketserver
import threading
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

    def do_POST(self) -> None:
        """Answer a request, or say why it is refused."""
        status = 200
        try:
            text = self._answer()
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else Refusal(f"no request that can be read: {error!r}")
            status = refusal.status
            text = json.dumps({"error": vars(refusal)})
        kind = "text/event-stream" if text.startswith("data: ") else "application/json"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def _answer(self) -> str:
        """List the models, of which there is one, or complete a chat. A turn that is not delivered is not trained."""
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key not in self.server.sessions:
            raise Refusal("no such key", 401, "invalid_api_key")
        session = self.server.sessions[key]
        if self.path.endswith("/models"):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}
            return json.dumps({"object": "list", "data": [model]})
        if not self.path.endswith("/chat/completions"):
            raise Refusal(f"{self.path} is not served, only /v1/chat/completions and /v1/models", 404)
        num_bytes = int(self.headers.get("Content-Length", -1))
        if not 0 <= num_bytes <= MAX_BYTES:
            raise Refusal(f"a request needs its Content-Length, of at most {MAX_BYTES} bytes")
        body = json.loads(self.rfile.read(num_bytes))
        is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"
        turn = session.ask(body, is_retry)
        session.finish(turn)
        reading = select.poll()
        reading.register(self.connection, select.POLLIN)
        if reading.poll(0):  # it has nothing more to say
            raise Refusal("the agent has hung up")
        turn.was_delivered = True  # before it is sent, since the agent may end at once
        return completion_of(turn, bool(body.get("stream")))

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def completion_of(turn: Turn, is_stream: bool) -> str:
    """Write a turn as OpenAI's clients read it; a stream has one part."""
    finish_reason = "length" if turn.piece.ended_by == "tokens" else "stop"
    if "tool_calls" in turn.message:
        finish_reason = "tool_calls"
    num_prompt = len(turn.prompt_ids)
    num_sampled = turn.piece.num_tokens
    message = "delta" if is_stream else "message"
    completion = {
        "id": f"chatcmpl-{turn.session.index}-{turn.number}",
        "object": "chat.completion.chunk" if is_stream else "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, message: turn.message, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }
    text = json.dumps(completion)
    return f"data: {text}\n\ndata: [DONE]\n\n" if is_stream else text
