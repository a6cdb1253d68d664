"""Episodes of agents on the engine of one replica: each agent has a process, and asks the endpoint when it likes.

    agent's process  --HTTP-->  a thread of the endpoint  --inbox-->  the engine's loop

Requests join the batch between two steps of the engine. Two runs do not agree to the last bit, because nobody knows
when an agent asks next. The engine's first rank has the endpoint, and tells the others before each step what joins.
"""

import contextlib
import functools
import itertools
import json
import math
import queue
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from grpo.config.fields import MOST_NUM_SEQS
from grpo.features.agents.process import load_agent
from grpo.features.agents.server import MODEL, Endpoint
from grpo.features.agents.tree import Session, Turn
from grpo.features.agents.writer import Writer
from grpo.roles.engine.loop import EngineLoop
from grpo.roles.engine.vllm_engine import broadcast_in_replica
from grpo.types import EpisodeFacts, Piece, Prompt, Rollout
from grpo.workers.processes import Call, Workers

# Longest wait for a request, before processes that have ended are looked for
IDLE_SECONDS = 0.02
# How the end of a process is told that the machine killed, because it had no more memory
OUT_OF_MEMORY = f"killed by signal {signal.SIGKILL:d}"


class Agents:
    """Plays the episodes of a replica. All ranks of its engine make the same calls."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        rank: int = 0,
        num_ranks: int = 1,
    ):
        """Start the processes on the first rank; call it before CUDA is used. rank, num_ranks: of the engine."""
        self.is_first = rank == 0
        self.tells = num_ranks > 1
        if not self.is_first:
            return
        self.config = config
        environment = config.environment
        self.writer = Writer(tokenizer, config.data, stop_token_ids, environment.calls)
        num_processes = environment.num_processes or min(config.generator.max_num_seqs, MOST_NUM_SEQS)
        self.free = [*range(num_processes)]  # numbers of processes
        self.workers = Workers(
            "agents",
            functools.partial(load_agent, environment.agent),
            num_processes,
            environment.memory_gib,
            config.reward.environment,
            loads_once=True,
        )
        self.workers.wait_until_loaded()
        self.endpoint = Endpoint()

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

        Their index and temperature are not set. max_tokens: as in the config. add: see `Generator.generate`.
        """
        if self.is_first:
            return self.play([prompt for prompt, _ in rollouts], version, functools.partial(decode, loop, add))
        while orders := broadcast_in_replica(None):
            decode(loop, add, *orders)
        return []

    def play(
        self,
        prompts: list[Prompt],
        version: int,
        decode: Callable[..., dict[Turn, Piece]],
    ) -> list[Rollout]:
        """Play an episode for each prompt. decode: the function of this module, with a loop and `add`."""
        inbox: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        waiting = iter(prompts)
        sessions: list[Session] = []
        playing = self.endpoint.sessions
        while True:
            for prompt in itertools.islice(waiting, len(self.free)):
                session = Session(
                    prompt,
                    len(sessions),
                    self.free.pop(),
                    self.writer,
                    self.config.environment,
                    self.config.generator,
                    self.config.max_sequence_tokens,
                    inbox,
                )
                sessions.append(session)
                self._begin(session)
            if not playing:
                break
            ended = []
            for outcome in [*self.workers.poll(), *self._late()]:
                ended += self._end(outcome)
            begun = []
            with contextlib.suppress(queue.Empty):
                while True:
                    is_decoding = any(session.num_running for session in playing.values())
                    turn = inbox.get(not (is_decoding or ended), IDLE_SECONDS)
                    if not turn.sampled.done():  # its episode has not ended
                        begun.append((turn.session.index, turn.prompt_ids, turn.number, turn.max_tokens, turn))
            if self.tells:
                broadcast_in_replica((ended, begun))  # in which a turn is its place, see `Turn.__reduce__`
            for turn, piece in decode(ended, begun).items():
                turn.session.settle(turn, piece)
        if self.tells:
            broadcast_in_replica(None)
        return [rollout_of(session, version) for session in sessions]

    def _begin(self, session: Session) -> None:
        """Open the endpoint for an agent, and start it."""
        key = str(session.number)
        self.endpoint.sessions[key] = session
        endpoint = {"base_url": self.endpoint.url, "api_key": key, "model": MODEL}
        data = json.dumps([session.prompt.columns, endpoint]).encode()
        # the engine's seconds do not count, so `_late` keeps the deadline
        call = Call(session.number, data, math.inf, conversation=session.process)
        self.workers.submit([call])

    def _late(self) -> Iterator[dict[str, Any]]:
        """Yield outcomes, as of processes, for agents that have waited too long."""
        environment = self.config.environment
        for session in self.endpoint.sessions.values():
            seconds = environment.call_seconds if session.turns else environment.reset_seconds
            if session.idle_seconds > seconds:
                reason = f"took longer than {seconds:g} s without a request"
                yield {"call": session.number, "failed": reason, "cause": "late"}

    def _end(self, outcome: dict[str, Any]) -> list[Turn]:
        """Close the episode of a process that has ended. Returns the turns that are not to be sampled any more."""
        session = self.endpoint.sessions.pop(str(outcome["call"]), None)
        if session is None:  # it has ended before, at its deadline
            return []
        _, has_left_something = outcome.get("value", (None, True))
        if has_left_something:
            self.workers.drop(session.process)
        self.free.append(session.process)
        return session.close(outcome)

    def close(self) -> None:
        """End the agents. The endpoint, which knows no key any more, ends with this process."""
        if self.is_first:
            self.workers.close()


def decode(
    loop: EngineLoop,
    add: Callable[..., None],
    ended: Collection,
    begun: Collection,
) -> dict[Any, Piece]:
    """End and begin requests, and decode a token of each. Returns what was sampled. All ranks of an engine call it."""
    if ended:
        loop.end(ended)
    for request in begun:
        add(*request)
    return loop.step() if loop.num_running else {}


def rollout_of(session: Session, version: int) -> Rollout:
    """Return what was sampled in an episode. One without turns has a prompt, and nothing behind it.

    A failure that the policy may have caused, because it has answered before, is scored. Others lose the episode.
    """
    turns = []
    num_calls = 0
    for turn in session.delivered:
        turns.append({"text": turn.message["content"], "tokens": turn.piece.num_tokens, "answers": []})
        num_calls += len(turn.message.get("tool_calls", ()))
    reward, _ = session.outcome.get("value", (None, False))
    ended_by = session.limit or "done"
    failed = session.outcome.get("failed", "")
    is_outage = session.outcome.get("cause") == "lost" or failed.endswith(OUT_OF_MEMORY)
    if failed and (is_outage or not turns):
        ended_by = "lost"
    elif failed:
        reward = session.environment.hung_reward
        ended_by = session.limit or "hung"
        turns[-1]["failed"] = failed
    failure = ""
    if failed and reward is None:
        failure = f"{failed} ({socket.gethostname()}, row {session.prompt.row})"
    episode = EpisodeFacts(
        turns=turns,
        opening=None,
        ended_by=ended_by,
        reward=reward,
        info={},
        failure=failure,
        waited=session.waited,
        counts={"calls": num_calls},
    )
    sequences = tuple(session.sequences())
    if not sequences:
        nothing = Piece.sampled([], [], version)
        sequences = ((Piece.written(session.prompt.ids), nothing),)
    return Rollout(session.prompt, 0, sequences, ended_by=ended_by, episode=episode)
