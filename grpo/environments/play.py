"""Episodes on the engine of one replica: a rollout whose turn has ended goes to its environment and comes back.

Its answer's tokens are appended to its ids, and it joins the engine as a new request, while the others decode on. When
it joins is up to `environment.answer_steps`: 0, as soon as it is there; N, so many steps of the engine after its turn
has ended, so that how fast a tool was changes no bit of what is sampled; with `environment.rounds`, when no other
rollout runs any more.

The head of a replica talks to the environments; its other ranks are told what to add, since all must add the same
requests in the same order.
"""

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo.config import EnvironmentConfig
from grpo.data.rows import as_messages
from grpo.environments.host import EnvironmentHost
from grpo.environments.suffix import Turns
from grpo.types import Piece, Prompt

# For `finish`, which may compute the reward.
FINISH_SECONDS = 60.0
# Waited for replies at once; the supervisor has the deadlines.
POLL_SECONDS = 1.0

# What is decided about a rollout: its number, the most tokens of its next turn, and the ids behind those that it has;
# 0 tokens if it has ended.
Decision = tuple[int, int, list[int]]


def as_integers(decisions: list[Decision]) -> list[int]:
    """Decisions as they go over the wire: how many there are, then each, with how many ids it has."""
    flat = [len(decisions)]
    for number, most, ids in decisions:
        flat += [number, most, len(ids), *ids]
    return flat


def from_integers(flat: Iterable[int]) -> list[Decision]:
    """Undo `as_integers`."""
    values, decisions = iter(flat), []
    for _ in range(next(values)):
        number, most, length = islice(values, 3)
        decisions.append((number, most, list(islice(values, length))))
    return decisions


@dataclass(eq=False)
class Episode:
    """One rollout on its way, as the head sees it."""

    prompt: Prompt
    rollout: int
    """Its place in the group."""
    seed: int
    """For `reset`: the same for all rollouts of a group."""
    version: int
    environment: str = ""
    """Which of `environment.classes` it has; empty if there is one."""
    number: int = 0
    """Its place among those that are played together."""
    ids: list[int] = field(default_factory=list)
    """The prompt's and what followed; only appended to."""
    """Of each turn, see `Stretch`; none for a dense model."""
    pieces: list[Piece] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    """`text`, `tokens` and `answers` of each turn of the model. `earned`: what `get_reward` said after it, if asked.
    `unread`: the style of its calls, if that is not the one that is read."""
    counts: Counter = field(default_factory=Counter)
    opening: str | None = None
    """The user's message, if `reset` wrote the end of it."""
    num_prompt_tokens: int = 0
    ended_by: str = ""
    """Why no further turn begins: done, tokens, turns, seconds, hung, lost."""
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    began: float = field(default_factory=time.monotonic)
    asked_at: float | None = None
    """When its environment was asked for what has not come yet."""
    waited: float = 0.0
    """Seconds that its environment took."""
    decided: Decision | None = None
    """What is known of its next turn and was not told yet."""

    def write(self, ids: list[int]) -> None:
        """Append tokens that were not sampled."""
        self.ids += ids
        mask_T = torch.zeros(len(ids), dtype=torch.bool)
        self.pieces.append(Piece(torch.tensor(ids, dtype=torch.int64), mask_T, version=self.version))

    def end(self, ended_by: str) -> None:
        """No further turn begins."""
        self.ended_by, self.decided = ended_by, (self.number, 0, [])

    def note(self) -> dict[str, Any]:
        """What the driver learns of it besides the tokens; JSON."""
        names = ("turns", "opening", "ended_by", "reward", "info", "failure", "waited")
        return {name: getattr(self, name) for name in names} | {"counts": dict(self.counts)}


@dataclass(eq=False)
class Player:
    """Plays episodes on the head of a replica: asks environments and makes token ids of what they answer."""

    config: EnvironmentConfig
    host: EnvironmentHost
    turns: Mapping[str, Turns]
    """By the names of environments, see `Episode.environment`."""
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int

    def begin(self, episodes: list[Episode], max_tokens: int, turns_earn: bool = False) -> None:
        """Reset the environments.

        max_tokens: everything behind the prompt, answers included. turns_earn: ask for the reward after each turn too.
        """
        self.episodes, self.max_tokens, self.turns_earn = episodes, max_tokens, turns_earn
        for number, episode in enumerate(episodes):
            episode.number = number
            if self.config.all_classes:
                arguments = [episode.prompt.columns, episode.seed, episode.rollout, episode.environment]
                self._ask(episode, "reset", arguments, self.config.reset_seconds)
            else:
                self._open(episode, None)

    def ended(self, number: int, ids: list[int], logprobs: list[float], reason: str) -> None:
        """Take in a turn that the engine has ended. A turn that ran out of tokens ends the episode."""
        episode = self.episodes[number]
        piece = Piece.sampled(torch.tensor(ids), torch.tensor(logprobs, dtype=torch.float32), episode.version)
        episode.pieces.append(piece)
        episode.ids += ids
        is_whole = reason != "length"
        text = self.tokenizer.decode(ids[:-1] if is_whole else ids, skip_special_tokens=False)
        episode.turns.append({"text": text, "tokens": len(ids), "answers": []})
        if is_whole:
            thought = self.turns[episode.environment].opened_thought
            self._ask(episode, "turn", [text, self.turns_earn, thought], self.config.call_seconds)
        else:
            self._end(episode, "tokens")

    def collect(self, due: list[int], least: int) -> list[Decision]:
        """What is decided about the rollouts that are `due`; waits until that is something about so many of them."""
        self._take_in(0.0)
        while len(decided := [self.episodes[number] for number in due if self.episodes[number].decided]) < least:
            self._take_in(POLL_SECONDS)
        decisions = [episode.decided for episode in decided]
        for episode in decided:
            episode.decided = None
        return decisions

    def finish(self) -> list[Episode]:
        """Wait until each environment has told its reward."""
        while any(episode.asked_at is not None for episode in self.episodes):
            self._take_in(POLL_SECONDS)
        return self.episodes

    def _ask(self, episode: Episode, do: str, arguments: list[Any], seconds: float) -> None:
        episode.asked_at = time.monotonic()
        self.host.ask(episode.number, do, arguments, seconds)

    def _take_in(self, seconds: float) -> None:
        for reply in self.host.poll(seconds):
            episode = self.episodes[reply["episode"]]
            episode.waited += time.monotonic() - episode.asked_at
            episode.asked_at = None
            if "failed" in reply:
                self._failed(episode, reply["failed"], reply["kind"])
            elif "text" in reply:
                self._open(episode, reply["text"])
            elif "answers" in reply:
                self._answer(episode, reply)
            else:
                episode.reward, episode.info = reply["reward"], reply["info"]

    def _open(self, episode: Episode, text: str | None) -> None:
        """Begin the first turn. text: of `reset`, which stands at the end of the prompt."""
        if text is None:
            episode.ids = list(episode.prompt.ids)
        else:
            *earlier, last = as_messages(episode.prompt.content)
            episode.opening = last["content"] + text
            messages = [*earlier, last | {"content": episode.opening}]
            episode.write(self.turns[episode.environment].opening(messages))
        episode.num_prompt_tokens = number = len(episode.ids)
        if number > self.max_prompt_tokens:
            name = "data.max_prompt_tokens"
            why = f"the prompt with reset's text has {number} tokens; raise {name}={self.max_prompt_tokens}"
            self._failed(episode, why, "lost")
        else:
            self._next_turn(episode, episode.ids)

    def _answer(self, episode: Episode, reply: dict[str, Any]) -> None:
        """Take in what the environment said to a turn; the next one begins, or the episode ends."""
        config, turn = self.config, episode.turns[-1]
        episode.counts.update(reply["counts"])
        turn["answers"] = [self._cut(answer, episode.counts) for answer in reply["answers"]]
        for name in ("earned", "unread"):
            if name in reply:
                turn[name] = reply[name]
        if reply["ended"]:
            self._end(episode, "done")
        elif len(episode.turns) == config.max_turns:
            self._end(episode, "turns")
        elif config.rollout_seconds and time.monotonic() - episode.began > config.rollout_seconds:
            self._end(episode, "seconds")
        else:
            turns = self.turns[episode.environment]
            suffix = turns.ids(turn["answers"], episode.ids[-1], reply["role"])
            if len(episode.ids) + len(suffix) - episode.num_prompt_tokens >= self.max_tokens:
                self._end(episode, "tokens")
            else:
                episode.write(suffix)
                self._next_turn(episode, suffix)

    def _next_turn(self, episode: Episode, further: list[int]) -> None:
        room = self.max_tokens - (len(episode.ids) - episode.num_prompt_tokens)
        episode.decided = episode.number, min(room, self.config.max_turn_tokens or room), list(further)

    def _cut(self, answer: str, counts: Counter) -> str:
        """An answer of at most `max_answer_tokens` tokens: what is cut out of its middle is said."""
        most = self.config.max_answer_tokens
        ids = self.tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if len(ids) <= most:
            return answer
        counts["cut_answers"] += 1
        first, last = self.tokenizer.decode(ids[: most // 2]), self.tokenizer.decode(ids[len(ids) - most // 2 :])
        return f"{first}\n[.. {len(ids) - 2 * (most // 2)} tokens left out ..]\n{last}"

    def _end(self, episode: Episode, ended_by: str) -> None:
        episode.end(ended_by)
        if self.config.all_classes:
            self._ask(episode, "finish", [], FINISH_SECONDS)

    def _failed(self, episode: Episode, reason: str, kind: str) -> None:
        """A hung environment is scored, because the policy has most likely caused it; a lost one has no reward."""
        episode.reward = self.config.hung_reward if kind == "hung" else None
        if is_lost := episode.reward is None:
            episode.failure = f"{reason} ({socket.gethostname()}, seed {episode.seed}, row {episode.prompt.row})"
        episode.end(kind if is_lost else episode.ended_by or kind)
        self.host.drop(episode.number)


def play(
    config: EnvironmentConfig,
    loop: Any,
    num_rollouts: int,
    add: Callable[[int, list[int], int, int], None],
    player: Player | None,
    tell: Callable[[list[Decision] | None], list[Decision]],
) -> None:
    """Play rollouts 0 to `num_rollouts` - 1 until none of them samples any more. Every rank of the replica calls it.

    loop: the EngineLoop, whose requests are these numbers. add(number, ids, how many of them are behind the prompt,
    most tokens) gives it a turn that begins. player: on the head,
    after `begin`; None elsewhere. tell: hands what the head decided to all ranks. When it speaks follows from counts of
    steps alone, which are the same on all of them.
    """
    delay = math.inf if config.rounds else config.answer_steps
    due = dict.fromkeys(range(num_rollouts), 0.0)  # the step from which on a rollout's next turn may begin
    ids: list[list[int]] = [[] for _ in due]
    num_prompt_tokens = [0] * num_rollouts
    step = 0.0
    while due or loop.num_running:
        idle = not loop.num_running
        if idle:
            step = max(step, min(due.values()))
        if now := sorted(number for number, at in due.items() if at <= step):
            least = len(now) if delay else int(idle)
            for number, max_tokens, further in tell(player.collect(now, least) if player else None):
                del due[number]
                if not ids[number]:
                    num_prompt_tokens[number] = len(further)
                ids[number] += further
                if max_tokens:
                    num_behind = len(ids[number]) - num_prompt_tokens[number]
                    add(number, list(ids[number]), num_behind, max_tokens)
        if loop.num_running:
            step = 1.0 if math.isinf(step) else step + 1  # with rounds, each begins anew
            for stretch in sorted(loop.step(), key=lambda stretch: stretch.request):
                ids[stretch.request] += stretch.ids
                due[stretch.request] = step + delay
                if player:
                    player.ended(stretch.request, stretch.ids, stretch.logprobs, stretch.reason)
