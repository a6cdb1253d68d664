"""Episodes of agents on the engine of one replica: each agent has a process, and asks the endpoint when it likes.

    agent's process  --HTTP-->  a thread of the endpoint  --inbox-->  the engine's loop

Requests join the batch between two steps of the engine. Two runs do not agree to the last bit, because nobody knows
when an agent asks next. The engine's first rank has the endpoint, and tells the others before each step what joins.
"""

import contextlib
import functools
import itertools
import json
import queue
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from grpo.config.fields import MOST_NUM_SEQS
from grpo.data.chat import load_tokenizer
from grpo.features.agents.process import load_agent
from grpo.features.agents.server import MODEL, Endpoint
from grpo.features.agents.tree import ALLOWED, Session, Turn
from grpo.features.agents.writer import Writer
from grpo.roles.engine.loop import EngineLoop
from grpo.roles.engine.vllm_engine import broadcast_in_replica
from grpo.types import EpisodeFacts, Piece, Prompt, Rollout
from grpo.workers.processes import Call, Workers

# Longest wait for a request, before processes that have ended are looked for
IDLE_SECONDS = 0.02
# How the end of a process is told that the machine killed, because it had no more memory
OUT_OF_MEMORY = f"killed by signal {signal.SIGKILL:d}"
# The engine's seconds do not count, so deadlines are kept here
NO_DEADLINE = 1e9


class Agents:
    """Plays the episodes of a replica. All ranks of its engine make the same calls."""

    def __init__(self, config: Any, folder: str, stop_token_ids: Sequence[int], rank: int = 0, num_ranks: int = 1):
        """Start the processes on the first rank; call it before CUDA is used. rank, num_ranks: of the engine."""
        self.is_first = rank == 0
        self.tells = num_ranks > 1
        if not self.is_first:
            return
        self.config = config.environment
        self.max_prompt_tokens = config.data.max_prompt_tokens
        self.allowed = ALLOWED | {
            "temperature": config.generator.temperature[0],
            "top_p": config.generator.sampling.get("top_p", 1),
        }
        tokenizer = load_tokenizer(folder, config.data)
        self.writer = Writer(tokenizer, config.data, stop_token_ids, self.config.calls)
        num_processes = self.config.num_processes or min(config.generator.max_num_seqs, MOST_NUM_SEQS)
        self.free = [*range(num_processes)]  # numbers of processes
        self.workers = Workers(
            "agents",
            functools.partial(load_agent, self.config.agent),
            num_processes,
            self.config.memory_gib,
            config.reward.environment,
            loads_once=True,
        )
        self.endpoint: Endpoint | None = None

    def complete(
        self,
        loop: EngineLoop,
        rollouts: list[tuple[Prompt, int]],
        max_tokens: int,
        add: Callable[..., None],
        run_seed: int,
        version: int,
        held_out: bool,
    ) -> list[Rollout]:
        """Play a rollout for each (prompt, index in its group) to its end. Returns these on the first rank, else [].

        Their index and temperature are not set. max_tokens: of a sequence, behind room for a prompt. add: see
        `Generator.generate`.
        """
        if not self.is_first:
            while orders := broadcast_in_replica(None):
                decode(loop, add, *orders)
            return []
        self.endpoint = self.endpoint or Endpoint()  # its thread begins when the engine has started
        inbox: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        most = self.max_prompt_tokens + max_tokens
        sessions = [
            Session(prompt, index, self.writer, self.config, most, self.allowed, inbox)
            for index, (prompt, _) in enumerate(rollouts)
        ]
        waiting = iter(sessions)
        playing = self.endpoint.sessions
        while True:
            calls = [self._begin(session) for session in itertools.islice(waiting, len(self.free))]
            if calls:
                self.workers.submit(calls)
            if not playing:
                break
            ended = []
            for session, outcome in self._outcomes():
                ended += self._end(session, outcome)
            begun = []
            with contextlib.suppress(queue.Empty):
                while turn := inbox.get(not (loop.num_running or begun or ended), IDLE_SECONDS):
                    if not turn.is_done.is_set():  # its episode has not ended
                        begun.append((turn.session.index, turn.prompt_ids, turn.number, turn.max_tokens, turn))
            if self.tells:
                broadcast_in_replica((ended, begun))
            for turn, piece in decode(loop, add, ended, begun).items():
                turn.session.settle(turn, piece)
        if self.tells:
            broadcast_in_replica(None)
        return [rollout_of(session, version) for session in sessions]

    def _begin(self, session: Session) -> Call:
        """Open the endpoint for an agent. Returns the call that starts it."""
        session.idle_since = time.monotonic()
        session.process = self.free.pop()
        key = str(session.number)
        self.endpoint.sessions[key] = session
        endpoint = {"base_url": self.endpoint.url, "api_key": key, "model": MODEL}
        data = json.dumps([session.prompt.columns, endpoint]).encode()
        return Call(session.number, data, NO_DEADLINE, conversation=session.process)

    def _outcomes(self) -> Iterator[tuple[Session, dict[str, Any]]]:
        """Yield how episodes have ended, which are closed then: by themselves, or too late."""
        sessions = self.endpoint.sessions
        for outcome in self.workers.poll():
            session = sessions.pop(str(outcome["call"]), None)
            if session:  # it did not end after its deadline
                yield session, outcome
        for key, session in [*sessions.items()]:
            seconds = self.config.call_seconds if session.turns else self.config.reset_seconds
            if session.idle_seconds > seconds:
                reason = f"took longer than {seconds:g} s without a request"
                yield sessions.pop(key), {"failed": reason, "cause": "late"}

    def _end(self, session: Session, outcome: dict[str, Any]) -> list[Turn]:
        """Close an episode, with what its agent left. Returns the turns that are not to be sampled any more.

        What the policy may have caused, which has answered before it happened, is scored. The rest is lost.
        """
        session.reward, has_left_something = outcome.get("value", (None, True))
        if has_left_something:
            self.workers.drop(session.process)
        self.free.append(session.process)
        left = session.close()
        session.failed = outcome.get("failed", "")
        if not session.failed:
            session.ended_by = session.ended_by or "done"
        elif outcome["cause"] == "lost" or session.failed.endswith(OUT_OF_MEMORY) or not session.delivered:
            session.ended_by = "lost"
        else:
            session.reward = self.config.hung_reward
            session.ended_by = session.ended_by or "hung"
        return left

    def close(self) -> None:
        """End the agents and the endpoint."""
        if self.is_first:
            self.workers.close()
            if self.endpoint:
                self.endpoint.shutdown()
                self.endpoint.server_close()


def decode(loop: EngineLoop, add: Callable[..., None], ended: Collection, begun: Collection) -> dict[Any, Piece]:
    """End and begin requests, and decode a token of each. Returns what was sampled. All ranks of an engine call it."""
    if ended:
        loop.end(ended)
    for request in begun:
        add(*request)
    return loop.step() if loop.num_running else {}


def rollout_of(session: Session, version: int) -> Rollout:
    """Return what was sampled in an episode. One without turns has a prompt, and nothing behind it."""
    turns = []
    num_calls = 0
    for turn in session.delivered:
        turns.append({"text": turn.message["content"], "tokens": turn.piece.num_tokens, "answers": []})
        num_calls += len(turn.message.get("tool_calls", ()))
    failure = ""
    if session.ended_by == "hung":
        turns[-1]["failed"] = session.failed
    if session.failed and session.reward is None:
        failure = f"{session.failed} ({socket.gethostname()}, row {session.prompt.row})"
    episode = EpisodeFacts(
        turns=turns,
        opening=None,
        ended_by=session.ended_by,
        reward=session.reward,
        info={},
        failure=failure,
        waited=session.waited,
        counts={"calls": num_calls},
    )
    nothing = (Piece.written(session.prompt.ids), Piece.sampled([], [], version))
    sequences = session.sequences() or (nothing,)
    return Rollout(session.prompt, 0, sequences, ended_by=session.ended_by, episode=episode)
