"""Episodes on the engine of one replica: when a turn ends, the environment answers it and the rollout goes on.

The tokens of the answer are appended to the ids of the rollout, which joins the engine again as a new request while the
others decode on. `environment.answer_steps` says when it joins. With 0 it joins as soon as the answer is there. With N
it joins N steps of the engine after its turn ended, so that the speed of a tool changes no bit of what is sampled. With
`environment.rounds` it joins when no other rollout is running.

The head of a replica talks to the environments. It sends its decisions to the other ranks of the replica, because all
of them must add the same requests in the same order.
"""

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config import EnvironmentConfig
from grpo.data.rows import as_messages
from grpo.features.environments.host import EnvironmentHost, Values
from grpo.features.environments.suffix import Turns
from grpo.types import EpisodeFacts, Piece, Prompt

# Deadline of `finish`, which may compute the reward
FINISH_SECONDS = 60.0
# Longest wait for replies before looking again; the supervisor keeps the deadlines.
POLL_SECONDS = 1.0


@dataclass
class Decision:
    """How a rollout goes on: with another turn, or not at all."""

    number: int
    """Which rollout."""
    max_tokens: int = 0
    """Limit for its next turn; 0 if the rollout has ended."""
    new_ids: Sequence[int] = ()
    """Ids to append before its next turn."""
    num_behind_prompt: int = 0
    """Tokens behind the prompt, with the new ones."""


@dataclass(eq=False)
class Episode:
    """One rollout in progress, as the head sees it."""

    prompt: Prompt
    rollout: int
    """Its index in the group."""
    seed: int
    """Seed for `reset`, the same for all rollouts of a group."""
    version: int
    environment: str = ""
    """Its class, one of `environment.name`. Empty if there is only one."""
    number: int = 0
    """Its index among the episodes that are played together."""
    ids: list[int] = field(default_factory=list)
    """The prompt and all that followed. Only appended to."""
    pieces: list[Piece] = field(default_factory=list)
    """The same tokens; none before the environment has said how it begins."""
    turns: list[Values] = field(default_factory=list)
    """`text`, `tokens` and `answers` of each turn of the model. Where there are some: its `calls` by `name` and
    `arguments`; None for one that could not be read. `role`: who answered, if it was not a tool. `earned`: the reward
    after it, if it was asked for. `unread`: the style of its calls, if it is not the one that is read. `failed`: why
    the environment ended the episode with `hung_reward`."""
    counts: Counter = field(default_factory=Counter)
    opening: str | None = None
    """The user's message, if `reset` wrote the end of it."""
    num_prompt_tokens: int = 0
    ended_by: str = ""
    """Why no further turn begins: done, tokens, turns, seconds, hung or lost."""
    reward: float | None = None
    info: Values = field(default_factory=dict)
    failure: str = ""
    began: float = field(default_factory=time.monotonic)
    asked_at: float | None = None
    """When its environment was asked. None if no reply is due."""
    waited: float = 0.0
    """Seconds that its environment has taken."""
    decision: Decision | None = None
    """How it goes on, until the ranks of the replica have received it."""

    @property
    def num_behind_prompt(self) -> int:
        """Number of tokens that follow the prompt."""
        return len(self.ids) - self.num_prompt_tokens

    def write(self, ids: list[int]) -> None:
        """Append tokens that were not sampled."""
        self.ids += ids
        self.pieces.append(Piece.written(ids))

    def end(self, ended_by: str) -> None:
        """Let no further turn begin."""
        self.ended_by = ended_by
        self.decision = Decision(self.number)

    def note(self) -> EpisodeFacts:
        """Return what the driver learns besides the tokens."""
        facts = {name: getattr(self, name) for name in EpisodeFacts.__annotations__}
        return EpisodeFacts(**facts | {"counts": dict(self.counts)})


@dataclass(eq=False)
class Player:
    """The head's side of the episodes: it asks the environments and turns their answers into token ids."""

    config: EnvironmentConfig
    host: EnvironmentHost
    turns: Mapping[str, Turns]
    """By the name of the environment, see `Episode.environment`."""
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int

    def begin(
        self,
        episodes: list[Episode],
        max_tokens: int,
        turns_earn: bool = False,
        num_first: int | None = None,
    ) -> None:
        """Reset the environments.

        max_tokens: limit for everything after the prompt, including answers. turns_earn: ask for the reward after each
        turn. num_first: how many are reset now, the others by `reset`; None for all.
        """
        self.episodes = episodes
        self.max_tokens = max_tokens
        self.turns_earn = turns_earn
        for number, episode in enumerate(episodes):
            episode.number = number
        for episode in episodes[:num_first]:
            self.reset(episode.number)

    def reset(self, number: int) -> None:
        """Begin an episode, with its environment if it has one."""
        episode = self.episodes[number]
        episode.began = time.monotonic()
        if not self.config.all_classes:
            self._open(episode, None)
            return
        arguments = [
            episode.prompt.columns,
            episode.seed,
            episode.rollout,
            episode.environment,
        ]
        self._ask(episode, "reset", arguments, self.config.reset_seconds)

    def add_turn(self, number: int, piece: Piece) -> None:
        """Add a turn that the engine has finished. One at a limit of tokens is the last; its calls are carried out."""
        episode = self.episodes[number]
        ids = piece.ids_T.tolist()
        episode.pieces.append(piece)
        episode.ids += ids
        is_cut = piece.ended_by == "tokens"
        text_ids = ids if is_cut else ids[:-1]
        text = self.tokenizer.decode(text_ids, skip_special_tokens=False)
        turn = {
            "text": text,
            "tokens": len(ids),
            "answers": [],
        }
        episode.turns.append(turn)
        if is_cut:
            episode.ended_by = "tokens"
        thought = self.turns[episode.environment].opened_thought
        arguments = [text, self.turns_earn, thought, is_cut]
        self._ask(episode, "turn", arguments, self.config.call_seconds)

    def collect(self, due: list[int], min_decisions: int) -> list[Decision]:
        """Return how the rollouts in `due` go on. Waits until at least `min_decisions` of them are decided."""
        self._receive(0.0)
        episodes = [self.episodes[number] for number in due]
        while sum(episode.decision is not None for episode in episodes) < min_decisions:
            self._receive(POLL_SECONDS)
        decisions = []
        for episode in episodes:
            if episode.decision:
                decisions.append(episode.decision)
                episode.decision = None
        return decisions

    def finish(self) -> list[Episode]:
        """Wait for the rewards of all episodes."""
        while any(episode.asked_at is not None for episode in self.episodes):
            self._receive(POLL_SECONDS)
        return self.episodes

    def _ask(
        self,
        episode: Episode,
        do: str,
        arguments: list[Any],
        seconds: float,
    ) -> None:
        episode.asked_at = time.monotonic()
        self.host.ask(episode.number, do, arguments, seconds)

    def _receive(self, seconds: float) -> None:
        """Handle the replies of the environments. Without any, wait up to `seconds`."""
        for reply in self.host.poll(seconds):
            episode = self.episodes[reply["episode"]]
            episode.waited += time.monotonic() - episode.asked_at
            episode.asked_at = None
            if "failed" in reply:
                self._fail(episode, reply["failed"], reply["kind"])
            elif "text" in reply:
                self._open(episode, reply["text"])
            elif "answers" in reply:
                self._answer(episode, reply)
            else:
                episode.reward = reply["reward"]
                episode.info = reply["info"]

    def _open(self, episode: Episode, text: str | None) -> None:
        """Begin the first turn. text: what `reset` adds to the end of the prompt."""
        ids = episode.prompt.ids
        if text is not None:
            *earlier, last = as_messages(episode.prompt.content)
            opening = last["content"] + text
            messages = [*earlier, last | {"content": opening}]
            ids = self.turns[episode.environment].opening(messages)
            if len(ids) > self.max_prompt_tokens:  # not written, since no micro-batch may have room for them
                reason = (
                    f"the prompt with reset's text has {len(ids)} tokens; raise "
                    f"data.max_prompt_tokens={self.max_prompt_tokens}"
                )
                return self._fail(episode, reason, "lost")
            episode.opening = opening
        episode.write(ids)
        episode.num_prompt_tokens = len(episode.ids)
        self._next_turn(episode, episode.ids)

    def _answer(self, episode: Episode, reply: Values) -> None:
        """Append the answer to a turn and begin the next turn, or end the episode."""
        config = self.config
        turn = episode.turns[-1]
        episode.counts.update(reply["counts"])
        answers = [self._cut(answer, episode.counts) for answer in reply["answers"]]
        turn["answers"] = answers
        if answers and reply["role"]:
            turn["role"] = reply["role"]
        for name in ("calls", "earned", "unread"):
            if name in reply:
                turn[name] = reply[name]
        if reply["ended"] or episode.ended_by:
            return self._end(episode, episode.ended_by or "done")
        if len(episode.turns) == config.max_turns:
            return self._end(episode, "turns")
        seconds = time.monotonic() - episode.began
        if config.rollout_seconds and seconds > config.rollout_seconds:
            return self._end(episode, "seconds")
        turns = self.turns[episode.environment]
        suffix = turns.ids(answers, reply["role"])
        if episode.num_behind_prompt + len(suffix) >= self.max_tokens:
            return self._end(episode, "tokens")
        episode.write(suffix)
        self._next_turn(episode, suffix)

    def _next_turn(self, episode: Episode, new_ids: list[int]) -> None:
        room = self.max_tokens - episode.num_behind_prompt
        max_tokens = min(room, self.config.max_turn_tokens or room)
        episode.decision = Decision(episode.number, max_tokens, list(new_ids), episode.num_behind_prompt)

    def _cut(self, answer: str, counts: Counter) -> str:
        """Cut the middle out of an answer of more than `max_answer_tokens` tokens, and say so in its place."""
        encoded = self.tokenizer(
            answer,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
        )
        spans = encoded["offset_mapping"]  # of each token in the text, so that no character is cut in two
        if len(spans) <= self.config.max_answer_tokens:
            return answer
        counts["cut_answers"] += 1
        half = max(1, self.config.max_answer_tokens // 2)
        _, end_of_first = spans[half - 1]
        start_of_last, _ = spans[-half]
        num_left_out = len(spans) - 2 * half
        return f"{answer[:end_of_first]}\n[.. {num_left_out} tokens left out ..]\n{answer[start_of_last:]}"

    def _end(self, episode: Episode, ended_by: str) -> None:
        """End an episode and ask its environment for the reward."""
        episode.end(ended_by)
        if self.config.all_classes:
            self._ask(episode, "finish", [], FINISH_SECONDS)

    def _fail(self, episode: Episode, reason: str, kind: str) -> None:
        """End an episode that failed. If it is hung it gets `hung_reward`, since the policy may have caused that."""
        episode.reward = None
        if kind == "hung":
            episode.reward = self.config.hung_reward
            episode.turns[-1]["failed"] = reason
        if episode.reward is None:
            episode.failure = f"{reason} ({socket.gethostname()}, seed {episode.seed}, row {episode.prompt.row})"
        episode.end(kind)
        self.host.drop(episode.number)


def num_at_once(config: EnvironmentConfig, num_rollouts: int, num_processes: int) -> int:
    """Return how many episodes begin together. Each of the others begins when one has ended.

    With `answer_steps` or `rounds` the engine waits for all environments that are due. If one of them had no process,
    it would wait for the end of an episode that waits for the engine.
    """
    if config.all_classes and (config.rounds or config.answer_steps):
        return min(num_rollouts, num_processes)
    return num_rollouts


def play(
    config: EnvironmentConfig,
    loop: Any,
    num_rollouts: int,
    add: Callable[[int, list[int], int, int], None],
    player: Player | None,
    send: Callable[[list[Decision] | None], list[Decision]],
    num_first: int | None = None,
) -> None:
    """Play rollouts 0 to `num_rollouts` - 1 until none of them samples any more. Every rank of the replica calls it.

    loop: the EngineLoop; rollouts are its requests. add: gives the loop a turn that begins; its arguments are number,
    ids, how many of the ids are behind the prompt, and the most tokens to sample. player: on the head, after `begin`;
    None on other ranks. send: sends the head's decisions to all ranks. They call it at the same steps, because these
    follow from counts alone. num_first: how many rollouts begin together, as in `Player.begin`.
    """
    delay = math.inf if config.rounds else config.answer_steps
    numbers = range(num_rollouts)
    first = numbers[:num_first]
    later = iter(numbers[len(first) :])
    # rollout that waits for its next turn -> first step at which it may begin
    begins_at = dict.fromkeys(first, 0.0)
    all_ids = [[] for _ in range(num_rollouts)]
    step = 0.0

    while begins_at or loop.num_running:
        is_idle = not loop.num_running
        if is_idle:
            earliest = min(begins_at.values())
            step = max(step, earliest)
        due = sorted(number for number in begins_at if begins_at[number] <= step)
        if due:
            min_decisions = len(due) if delay else int(is_idle)
            decisions = None
            if player:
                decisions = player.collect(due, min_decisions)
            for decision in send(decisions):
                number = decision.number
                del begins_at[number]
                ids = all_ids[number]
                ids += decision.new_ids
                if decision.max_tokens:
                    add(number, list(ids), decision.num_behind_prompt, decision.max_tokens)
                    continue
                successor = next(later, None)
                if successor is not None:
                    begins_at[successor] = step + delay
                    if player:
                        player.reset(successor)

        if loop.num_running:
            step += 1
            if math.isinf(step):
                step = 1.0  # with rounds, each round counts from 1
            for number, piece in sorted(loop.step().items()):
                all_ids[number] += piece.ids_T.tolist()
                begins_at[number] = step + delay
                if player:
                    player.add_turn(number, piece)
