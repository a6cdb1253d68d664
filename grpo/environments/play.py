"""Episodes on the engine of one replica: a rollout whose turn has ended goes to its environment and comes back.

Its answer's tokens are appended to its ids, and it joins the engine as a new request, while the others decode on. Ids
only grow: nothing sampled is decoded and encoded again. When an answer joins is up to `environment.answer_steps`: 0, as
soon as it is there; N, so many steps of the engine after its turn has ended, so that how fast a tool was changes no bit
of what is sampled; with `environment.rounds`, when no other rollout runs any more.

The head of a replica talks to the environments; its other ranks are told what to add, since all must add the same
requests in the same order.
"""

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from grpo.config import EnvironmentConfig
from grpo.data.columns import as_messages
from grpo.environments.host import EnvironmentHost
from grpo.environments.suffix import Turns
from grpo.types import Piece, Prompt

# For `finish`, which may compute the reward.
FINISH_SECONDS = 60.0
# Waited for replies at once; the supervisor has the deadlines.
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Decisions:
    """What the head of a replica tells its other ranks; rollouts are numbered as they are played."""

    decided: list[int]
    """Rollouts of which it is known whether they go on."""
    turns: list[tuple[int, int, list[int]]]
    """Turns that begin, in order: rollout, most tokens, and the ids behind those that it has."""

    def flat(self) -> list[int]:
        """As integers alone, for the wire."""
        turns = [value for number, most, ids in self.turns for value in (number, most, len(ids), *ids)]
        return [len(self.decided), *self.decided, *turns]

    @classmethod
    def of(cls, flat: list[int]) -> "Decisions":
        """Undo `flat`."""
        first, turns = 1 + flat[0], []
        decided, at = flat[1:first], first
        while at < len(flat):
            number, most, length = flat[at : at + 3]
            turns.append((number, most, flat[at + 3 : at + 3 + length]))
            at += 3 + length
        return cls(decided, turns)


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
    ids: list[int] = field(default_factory=list)
    """The prompt's and what followed; only appended to."""
    pieces: list[Piece] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    """`text`, `tokens` and `answers` of each turn of the model; `earned`: what `get_reward` said after it, if asked."""
    counts: Counter = field(default_factory=Counter)
    opening: str | None = None
    """The user's message, if `reset` wrote the end of it."""
    num_prompt_tokens: int = 0
    ended_by: str = ""
    """Why no further turn begins: done, tokens, turns, seconds, hung, lost."""
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    is_over: bool = False
    began: float = field(default_factory=time.monotonic)
    asked_at: float = 0.0
    waited: float = 0.0
    """Seconds that its environment took."""
    next_turn: tuple[int, int, list[int]] | None = None
    """Ready to begin, see `Decisions.turns`."""

    def note(self) -> dict[str, Any]:
        """What the driver learns of it besides the tokens; JSON."""
        names = ("turns", "opening", "ended_by", "reward", "info", "failure", "waited")
        return {name: getattr(self, name) for name in names} | {"counts": dict(self.counts)}


class Player:
    """Plays episodes on the head of a replica: asks environments and makes token ids of what they answer."""

    def __init__(
        self,
        config: EnvironmentConfig,
        host: EnvironmentHost,
        turns: Mapping[str, Turns],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
    ):
        """turns: by the names of environments, see `Episode.environment`."""
        self.config, self.host, self.turns = config, host, turns
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens

    def begin(self, episodes: list[Episode], max_tokens: int, turns_earn: bool = False) -> None:
        """Reset the environments.

        max_tokens: everything behind the prompt, answers included. turns_earn: ask for the reward after each turn too.
        """
        self.episodes, self.max_tokens, self.turns_earn = episodes, max_tokens, turns_earn
        for number, episode in enumerate(episodes):
            if self.config.all_classes:
                arguments = [episode.prompt.columns, episode.seed, episode.rollout, episode.environment]
                self._ask(number, "reset", arguments, self.config.reset_seconds)
            else:
                self._open(number, None)

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
            self._ask(number, "turn", [text, self.turns_earn], self.config.call_seconds)
        else:
            self._end(number, "tokens")

    def collect(self, due: list[int], wait: Literal["all", "one", "none"]) -> Decisions:
        """What is decided about the rollouts that are `due`; waits until that is something about all or one of them."""
        self._take_in(0.0)
        while True:
            decided = [n for n in due if self.episodes[n].next_turn or self.episodes[n].ended_by]
            enough = len(decided) == len(due) if wait == "all" else decided or wait == "none"
            if enough:
                break
            self._take_in(POLL_SECONDS)
        turns = [self.episodes[n].next_turn for n in decided if self.episodes[n].next_turn]
        for number in decided:
            self.episodes[number].next_turn = None
        return Decisions(decided, turns)

    def finish(self) -> list[Episode]:
        """Wait until each environment has told its reward."""
        while not all(episode.is_over for episode in self.episodes):
            self._take_in(POLL_SECONDS)
        return self.episodes

    def _ask(self, number: int, do: str, arguments: list[Any], seconds: float) -> None:
        self.episodes[number].asked_at = time.monotonic()
        self.host.ask(number, do, arguments, seconds)

    def _take_in(self, seconds: float) -> None:
        for reply in self.host.poll(seconds):
            number = reply["episode"]
            episode = self.episodes[number]
            episode.waited += time.monotonic() - episode.asked_at
            if "failed" in reply:
                self._failed(number, reply["failed"], reply["kind"])
            elif "text" in reply:
                self._open(number, reply["text"])
            elif "answers" in reply:
                self._answer(number, reply)
            else:
                episode.reward, episode.info, episode.is_over = reply["reward"], reply["info"], True

    def _open(self, number: int, text: str | None) -> None:
        """Begin the first turn."""
        episode = self.episodes[number]
        episode.opening, episode.ids = text, list(episode.prompt.ids)
        if text is not None:
            *earlier, last = as_messages(episode.prompt.content)
            episode.opening = last["content"] + text
            episode.ids = self.turns[episode.environment].opening([*earlier, last | {"content": episode.opening}])
            episode.pieces.append(_written(episode.ids, episode.version))
        episode.num_prompt_tokens = len(episode.ids)
        if len(episode.ids) > self.max_prompt_tokens:
            self._failed(
                number,
                f"reset: the prompt has {len(episode.ids)} tokens, more than data.max_prompt_tokens="
                f"{self.max_prompt_tokens}",
                "lost",
            )
            return
        self._next_turn(number, [])

    def _answer(self, number: int, reply: dict[str, Any]) -> None:
        """Take in what the environment said to a turn; the next one begins, or the episode ends."""
        config, episode = self.config, self.episodes[number]
        episode.counts.update(reply["counts"])
        turn = episode.turns[-1]
        turn["answers"] = [self._cut(answer, episode.counts) for answer in reply["answers"]]
        if "earned" in reply:
            turn["earned"] = reply["earned"]
        if reply["ended"]:
            self._end(number, "done")
        elif len(episode.turns) == config.max_turns:
            self._end(number, "turns")
        elif config.rollout_seconds and time.monotonic() - episode.began > config.rollout_seconds:
            self._end(number, "seconds")
        else:
            suffix = self.turns[episode.environment].ids(turn["answers"], episode.ids[-1], reply["role"])
            if len(episode.ids) + len(suffix) - episode.num_prompt_tokens >= self.max_tokens:
                self._end(number, "tokens")
            else:
                episode.pieces.append(_written(suffix, episode.version))
                episode.ids += suffix
                self._next_turn(number, suffix)

    def _next_turn(self, number: int, suffix: list[int]) -> None:
        episode = self.episodes[number]
        room = self.max_tokens - (len(episode.ids) - episode.num_prompt_tokens)
        most = min(room, self.config.max_turn_tokens or room)
        episode.next_turn = number, most, list(suffix or episode.ids)

    def _cut(self, answer: str, counts: Counter) -> str:
        """An answer of at most `max_answer_tokens` tokens: what is cut out of its middle is said."""
        most = self.config.max_answer_tokens
        ids = self.tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if len(ids) <= most:
            return answer
        counts["cut_answers"] += 1
        first, last = self.tokenizer.decode(ids[: most // 2]), self.tokenizer.decode(ids[len(ids) - most // 2 :])
        return f"{first}\n[.. {len(ids) - 2 * (most // 2)} tokens left out ..]\n{last}"

    def _end(self, number: int, ended_by: str) -> None:
        episode = self.episodes[number]
        episode.ended_by = ended_by
        if self.config.all_classes:
            self._ask(number, "finish", [], FINISH_SECONDS)
        else:
            episode.is_over = True

    def _failed(self, number: int, reason: str, kind: str) -> None:
        """A hung environment is scored, because the policy has most likely caused it; a lost one has no reward."""
        episode, config = self.episodes[number], self.config
        hung = kind == "hung" and config.hung_reward is not None
        episode.reward = config.hung_reward if hung else None
        if not hung:
            where = f"{socket.gethostname()}, seed {episode.seed}, row {episode.prompt.row}"
            episode.failure = f"{reason} ({where})"
        if not episode.ended_by or not hung:
            episode.ended_by = kind
        episode.is_over, episode.next_turn = True, None
        self.host.drop(number)


def _written(ids: list[int], version: int) -> Piece:
    return Piece(torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.bool), version=version)


def play(
    config: EnvironmentConfig,
    loop: Any,
    num_rollouts: int,
    add: Callable[[int, list[int], int, int], None],
    player: Player | None,
    tell: Callable[[Decisions | None], Decisions],
) -> None:
    """Play rollouts 0 to `num_rollouts` - 1 until none of them samples any more. Every rank of the replica calls it.

    loop: the EngineLoop, whose requests are these numbers. add(number, ids, how many of them are behind the prompt,
    most tokens) gives it a turn that begins. player: on the head, after `begin`; None elsewhere. tell: hands what the
    head decided to all ranks. When it speaks follows from counts of steps alone, which are the same on all of them.
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
            wait = "all" if delay else "one" if idle else "none"
            decisions = tell(player.collect(now, wait) if player else None)
            for number in decisions.decided:
                del due[number]
            for number, max_tokens, further in decisions.turns:
                if not ids[number]:
                    num_prompt_tokens[number] = len(further)
                ids[number] += further
                add(number, list(ids[number]), len(ids[number]) - num_prompt_tokens[number], max_tokens)
        if loop.num_running:
            step = 1.0 if math.isinf(step) else step + 1  # with rounds, each begins anew
            for stretch in sorted(loop.step(), key=lambda stretch: stretch.request):
                ids[stretch.request] += stretch.ids
                due[stretch.request] = step + delay
                if player:
                    player.ended(stretch.request, stretch.ids, stretch.logprobs, stretch.reason)
