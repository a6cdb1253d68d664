"""An agent that calls an OpenAI-compatible endpoint, unchanged: write yours in place of `run`, or name a command.

    --environment.name configs/examples/openai_agent.py:Agent --environment.options agent "bash my_agent.sh"
    --data.row configs/examples/openai_agent.py:row --data.system-prompt "" --reward.functions

The endpoint is in the environment's process. What the agent asks is what the environment says, and the model's turn is
the answer. So ids only grow, and nothing is tokenized again. The agent has a process of its own for each episode, which
is killed with it, and a key of its own.

An agent fits if its history only grows and it asks one thing at a time. The first request becomes one message of the
user, with the system message as its beginning. The temperature and the limits of tokens are the run's. What a request
asks for and cannot have is refused by a status of 400, which names it.
"""

import asyncio
import contextlib
import functools
import http
import inspect
import json
import multiprocessing
import os
import secrets
import socketserver
import subprocess
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from multiprocessing.connection import Connection, wait
from typing import Any

import openai

from grpo.workers.processes import kill
from grpo.workers.worker import describe_error

FORK = multiprocessing.get_context("fork")
NOT_SERVED = ("tools", "functions", "response_format", "logit_bias", "stop", "stream", "logprobs")
# Seconds in which an agent whose requests are refused may come to its end, and give a reward
END_SECONDS = 5.0


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Ask for a number twice. Returns the reward: 1 if the second answer is another one."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row.get("question", "Say a number.")}]
    answers = []
    for _ in range(2):
        message = client.chat.completions.create(model=model, messages=messages).choices[0].message
        answers.append(message.content)
        messages += [message.model_dump(), {"role": "user", "content": "Another one?"}]
    return float(answers[0] != answers[1])


def run_command(command: str, row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Run a command with the endpoint in its environment and the row on its input. Its last word is the reward."""
    endpoint = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}
    done = subprocess.run(
        command,
        shell=True,
        check=True,
        input=json.dumps(row),
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | endpoint,
    )
    return float(done.stdout.split()[-1])


def row(row: dict[str, Any]) -> dict[str, Any]:
    """Leave the prompt to the agent, and give it the row's columns."""
    return {**row, "prompt": [{"role": "user", "content": ""}]}


class Agent:
    def __init__(self, agent: str = ""):
        """agent: a command line; empty for `run`."""
        self._run = functools.partial(run_command, agent) if agent else run

    def reset(self, seed: int, **row) -> str:
        """Start the agent. Returns what it asks first."""
        self.broke_off = False
        self._said: list[tuple[str, str]] = []  # all messages up to the last answer
        self._answer = ""
        self._end: dict[str, Any] = {}
        self._endpoint = Endpoint()
        self._ends, theirs = FORK.Pipe(duplex=False)
        arguments = (self._run, {"seed": seed, **row}, self._endpoint, theirs)
        self._process = FORK.Process(target=play, args=arguments)
        self._process.start()
        theirs.close()
        return self._next() or ""

    def reply(self, text: str) -> str | None:
        """Answer the agent. Returns what it asks next; None if it has ended."""
        self._said = [*self._endpoint.messages, ("assistant", text.strip())]
        self._answer = text
        self._endpoint.answer(text)
        return self._next()

    def get_reward(self) -> float | None:
        """Return the agent's reward. One that a limit ends is told so, and has earned 0 if it then gives none."""
        give_up_at = time.monotonic() + END_SECONDS
        while not self._end and time.monotonic() < give_up_at:
            self._endpoint.refuse("the episode has reached a limit", "context_length_exceeded")
            self._wait(give_up_at - time.monotonic())
        return self._end.get("reward", 0.0)

    def close(self) -> None:
        """End the agent with all that it started."""
        kill(self._process.pid)
        self._process.join()
        self._ends.close()
        self._endpoint.server_close()

    def _next(self) -> str | None:
        """Wait for what the agent says next. None if it has ended, or went on from another history."""
        num_said = len(self._said)
        while not self._end:
            self._wait(None)
            if self._endpoint.pending is None:
                continue
            messages = self._endpoint.messages
            if self._endpoint.is_retry and messages == self._said[:-1]:
                self._endpoint.answer(self._answer)
                continue
            further = messages[num_said:]
            if messages[:num_said] == self._said and further:
                return "\n\n".join(text for _, text in further)
            self.broke_off = True
            self._endpoint.refuse("the history changed, or did not grow: not served here", "history")
            return None
        if "failed" in self._end:
            raise RuntimeError(f"the agent: {self._end['failed']}")
        return None

    def _wait(self, seconds: float | None) -> None:
        """Wait until the agent asks or ends, and read that."""
        ready = wait([self._ends, self._endpoint], seconds)
        if self._ends in ready:
            try:
                self._end = self._ends.recv()
            except EOFError:
                self._end = {"failed": "its process ended"}
        elif ready:
            self._endpoint.handle_request()


def play(agent: Callable, row: dict[str, Any], endpoint: "Endpoint", ends: Connection) -> None:
    """Run an agent in its process, and send how it ended."""
    os.setpgid(0, 0)  # so that it is killed with all that it starts
    endpoint.socket.close()
    try:
        reward = agent(row, base_url=endpoint.url, api_key=endpoint.key, model="policy")
        if inspect.isawaitable(reward):
            reward = asyncio.run(reward)
        ends.send({"reward": None if reward is None else float(reward)})
    except Exception as error:
        ends.send({"failed": describe_error(error)})


class Endpoint(socketserver.TCPServer):
    """A server without threads: it reads a request when it is told to, and answers it later."""

    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.key = "sk-" + secrets.token_urlsafe(24)
        self.messages: list[tuple[str, str]] = []
        self.is_retry = False
        self.pending = None
        """Connection of the request that waits for an answer."""

    def shutdown_request(self, request) -> None:
        if request is not self.pending:
            super().shutdown_request(request)

    def answer(self, text: str) -> None:
        """Send the model's turn."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        self._send(200, completion)

    def refuse(self, message: str, code: str) -> None:
        """Answer the request that waits, if there is one, by an error."""
        self._send(400, {"error": {"message": message, "type": "invalid_request_error", "code": code}})

    def _send(self, status: int, value: dict[str, Any]) -> None:
        request = self.pending
        self.pending = None
        if request:
            with contextlib.suppress(OSError):  # the agent has hung up
                request.sendall(response(status, value))
            self.shutdown_request(request)


class Handler(BaseHTTPRequestHandler):
    timeout = 60.0

    def do_GET(self) -> None:
        models = [{"id": "policy", "object": "model", "created": 0, "owned_by": "run"}]
        self.request.sendall(response(200, {"object": "list", "data": models}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.pending = self.request
        if self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self.server.refuse("no such key", "invalid_api_key")
        try:
            body = json.loads(body)
            self.server.messages = [as_text(message) for message in body["messages"]]
        except (KeyError, TypeError, ValueError) as error:
            return self.server.refuse(f"no messages of text: {error!r}", "invalid_request_error")
        for name in NOT_SERVED:
            if body.get(name):
                return self.server.refuse(f"{name} is not served here", "unsupported_parameter")
        if (body.get("n") or 1) > 1:
            return self.server.refuse("n > 1 is not served here", "unsupported_parameter")
        self.server.is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"


def as_text(message: dict[str, Any]) -> tuple[str, str]:
    """Return the role and the text of a message, without blanks at its ends if the model wrote it."""
    role = message["role"]
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError(f"content is {content!r}")
    return role, content.strip() if role == "assistant" else content


def response(status: int, value: dict[str, Any]) -> bytes:
    """Write a response of HTTP."""
    data = json.dumps(value).encode()
    phrase = http.HTTPStatus(status).phrase
    head = f"HTTP/1.0 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data
