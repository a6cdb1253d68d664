"""Episodes of agents on the engine of one replica: each agent has a process, and asks the endpoint when it likes.

    agent's process  --HTTP-->  a thread of the endpoint  --inbox-->  the engine's loop

Requests join the batch between two steps of the engine. Two runs do not agree to the last bit, because nobody knows
when an agent asks next.
"""

import contextlib
import functools
import itertools
import json
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config.fields import MOST_NUM_SEQS
from grpo.data.chat import load_tokenizer
from grpo.features.agents.process import load_agent
from grpo.features.agents.server import MODEL, Endpoint
from grpo.features.agents.tree import ALLOWED, Session, Turn
from grpo.features.agents.writer import Writer
from grpo.roles.engine.loop import EngineLoop
from grpo.types import EpisodeFacts, Piece, Prompt, Rollout
from grpo.workers.processes import Call, Workers

# Longest wait for a request, before processes that have ended are looked for
IDLE_SECONDS = 0.02
# Between two looks for agents that are late
LOOK_SECONDS = 0.5
# The engine's seconds do not count, so deadlines are kept here
NO_DEADLINE = 1e9


@dataclass
class Episode:
    """An agent that plays."""

    prompt: Prompt
    index: int
    session: Session
    process: int = -1
    """Number of its process, which agents have one after another."""
    reward: float | None = None
    ended_by: str = ""
    failure: str = ""
    hung: str = ""
    """Why it gets `hung_reward`."""

    def rollout(self, version: int) -> Rollout:
        """Return what it sampled. One without turns has a prompt, and nothing behind it."""
        session = self.session
        turns = []
        num_calls = 0
        for turn in session.delivered:
            ids = session.writer.without_end(turn.piece.ids_T.tolist())
            text = session.writer.tokenizer.decode(ids, skip_special_tokens=False)
            turns.append({"text": text, "tokens": turn.piece.num_tokens, "answers": []})
            num_calls += len(turn.message.get("tool_calls", ()))
        if self.hung:
            turns[-1]["failed"] = self.hung
        episode = EpisodeFacts(
            turns=turns,
            opening=None,
            ended_by=self.ended_by,
            reward=self.reward,
            info={},
            failure=self.failure,
            waited=session.waited,
            counts={"calls": num_calls},
        )
        nothing = (
            Piece.written(self.prompt.ids),
            Piece.sampled([], [], version),
        )
        return Rollout(
            self.prompt,
            0,
            session.sequences() or (nothing,),
            ended_by=self.ended_by,
            episode=episode,
        )


class Agents:
    """Plays the episodes of a replica of one rank."""

    def __init__(self, config: Any, folder: str, stop_token_ids: Sequence[int]):
        """Start the processes; call it before CUDA is used."""
        self.config = config.environment
        self.max_prompt_tokens = config.data.max_prompt_tokens
        top_p = config.generator.sampling.get("top_p", 1)
        self.allowed = ALLOWED | {
            "temperature": tuple(config.generator.temperature),
            "top_p": (top_p,),
        }
        self.writer = Writer(
            load_tokenizer(folder, config.data),
            config.data,
            stop_token_ids,
            self.config.calls,
        )
        self.num_processes = self.config.num_processes or min(config.generator.max_num_seqs, MOST_NUM_SEQS)
        self.workers = Workers(
            "agents",
            functools.partial(load_agent, self.config.agent),
            self.num_processes,
            self.config.memory_gib,
            config.reward.environment,
            loads_once=True,
        )
        self.endpoint: Endpoint | None = None
        self.free = [*range(self.num_processes)]  # numbers of processes
        self.numbers = itertools.count()  # of sessions
        self.look_at = 0.0  # when late agents are looked for

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
        """Play a rollout for each (prompt, index in its group) to its end. Their index and temperature are not set.

        max_tokens: of a sequence, behind room for a prompt. add: see `Generator.generate`.
        """
        self.endpoint = self.endpoint or Endpoint()  # its thread begins when the engine has started
        inbox: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        episodes = []
        most = self.max_prompt_tokens + max_tokens
        for index, (prompt, _) in enumerate(rollouts):
            session = Session(
                next(self.numbers),
                self.writer,
                self.config,
                most,
                self.allowed,
                inbox,
            )
            episodes.append(Episode(prompt, index, session))
        index_of = {episode.session: episode.index for episode in episodes}
        waiting = iter(episodes)
        playing: dict[int, Episode] = {}
        while True:
            calls = []
            for episode in itertools.islice(waiting, len(self.free)):
                playing[episode.session.number] = episode
                calls.append(self._begin(episode))
            if calls:
                self.workers.submit(calls)
            if not playing:
                break
            for number, outcome in self._outcomes(playing):
                self._end(playing.pop(number), outcome, loop)
            for turn in _arrived(inbox, wait=not loop.num_running):
                if turn.session.is_closed:
                    turn.session.settle(turn, None)
                else:
                    add(
                        index_of[turn.session],
                        turn.prompt_ids,
                        turn.number,
                        turn.max_tokens,
                        turn,
                    )
            if loop.num_running:
                for turn, piece in loop.step().items():
                    turn.session.settle(turn, piece)
        self.endpoint.sessions.clear()
        return [episode.rollout(version) for episode in episodes]

    def _begin(self, episode: Episode) -> Call:
        """Open the endpoint for an agent. Returns the call that starts it."""
        session = episode.session
        session.idle_since = time.monotonic()
        episode.process = self.free.pop()
        self.endpoint.sessions[session.key] = session
        arguments = [
            episode.prompt.columns,
            self.endpoint.url,
            session.key,
            MODEL,
        ]
        data = json.dumps(arguments).encode()
        return Call(session.number, data, NO_DEADLINE, conversation=episode.process)

    def _outcomes(self, playing: dict[int, Episode]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield how agents have ended, with the numbers of their sessions: by themselves, or too late."""
        for outcome in self.workers.poll():
            if outcome["call"] in playing:  # not one that came after its deadline
                yield outcome["call"], outcome
        if time.monotonic() < self.look_at:
            return
        self.look_at = time.monotonic() + LOOK_SECONDS
        for number, episode in [*playing.items()]:
            seconds = self.config.call_seconds if episode.session.turns else self.config.reset_seconds
            if episode.session.idle_seconds > seconds:
                yield (
                    number,
                    {
                        "failed": f"took longer than {seconds:g} s without a request",
                        "cause": "late",
                    },
                )

    def _end(self, episode: Episode, outcome: dict[str, Any], loop: EngineLoop) -> None:
        """Close an episode, with what its agent left and what it has in the engine.

        What the policy may have caused, which has answered before it happened, is scored. The rest is lost.
        """
        session = episode.session
        reward, has_left_something = outcome.get("value", (None, True))
        if has_left_something:
            self.workers.drop(episode.process)
        self.free.append(episode.process)
        for turn in loop.end(session.close()):
            session.settle(turn, None)
        episode.ended_by = session.ended_by or "done"
        if "value" in outcome:
            episode.reward = reward
            return
        reason = outcome["failed"]
        was_killed = reason.endswith(f"killed by signal {signal.SIGKILL:d}")  # the machine had no more memory
        if outcome["cause"] == "lost" or was_killed or not session.delivered:
            episode.ended_by = "lost"
        else:
            episode.reward = self.config.hung_reward
            if not session.ended_by:
                episode.ended_by = "hung"
                episode.hung = reason
        if episode.reward is None:
            episode.failure = f"{reason} ({socket.gethostname()}, row {episode.prompt.row})"

    def close(self) -> None:
        """End the agents and the endpoint."""
        self.workers.close()
        if self.endpoint:
            self.endpoint.shutdown()
            self.endpoint.server_close()


def _arrived(inbox: "queue.SimpleQueue[Turn]", wait: bool) -> Iterator[Turn]:
    """Yield the turns that have been asked for. wait: wait a little for the first."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield inbox.get(wait, IDLE_SECONDS)
            wait = False
