"""Rewards from the driver's side: it sends calls to worker processes, gets values back, and takes weighted sums.

workers/supervisor.py deals with a function that loops, crashes or allocates without end. This module says what follows:
every completion of that call has no reward, and the run ends if a function fails for every completion of a step.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from grpo.config import RewardConfig
from grpo.data.encode import as_json
from grpo.data.rows import as_messages
from grpo.rewards import loading
from grpo.rewards.loading import Columns, argument_names, called_with, load_functions
from grpo.text import shorten
from grpo.types import Rollout
from grpo.workers.processes import Call
from grpo.workers.worker import SHOWN_CHARACTERS


class RewardError(ValueError):
    """A reward function failed for all completions of a step."""


# Additional columns that reward functions get for episodes
EPISODE_COLUMNS = ("turns", "messages", "environment", "environments")


Said = tuple[float | None, str]
"""What a part of the reward says of a rollout: its value or None, and the reason if it failed."""


class CallScope(NamedTuple):
    """The function of a call, and the rollouts that the call scores."""

    function: str
    indices: list[int]


class RewardPool:
    """Processes that call the reward functions: `config.num_workers` for those that run confined, as many for others.

    Start it on the main thread, because the processes end with the thread that started them.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_completion_tokens: int,
        opening: str = "",
    ) -> None:
        """Start the processes and wait until all of them have loaded the functions. Raises ValueError if one cannot.

        opening: an opened <think> at the end of the prompt. The functions get it in front of each text of the model.
        """
        self.config = config
        self.functions = load_functions(config, None, max_completion_tokens)
        self.opening = opening
        self._rollouts: list[Rollout] = []  # those submitted
        self._scopes: list[CallScope] = []
        self.workers = loading.start_workers(config, max_completion_tokens)
        try:
            for workers in self.workers.values():
                workers.wait_until_loaded()
        except BaseException:
            self.close()
            raise

    def submit(self, rollouts: list[Rollout], group_size: int, step: int = 0) -> None:
        """Begin to score `rollouts`, which are ordered by group. Returns at once.

        Each call of a function has one completion, those of a group or all of them (see `called_with`), and lists of
        that length: the columns of the data set, `num_tokens`, `truncated`, `prompts` (as in the data) and `step`, also
        `completion_ids` if a function names them, and EPISODE_COLUMNS for episodes. Episodes that were lost are left
        out, because a function that fails for one would fail for its group or for all.

        step: counted from 1, as in the log. `timeout_seconds` holds for each completion of a group, once for a step.

        Raises ValueError if JSON cannot hold a column.
        """
        self._scopes = []
        calls = {confined: [] for confined in self.workers}
        sizes = {"step": len(rollouts), "group": group_size, "completion": 1}
        for scope, size in sizes.items():  # long calls first, because short ones fill the gaps
            names = [name for name, function in self.functions.items() if called_with(function) == scope]
            if not names:
                continue
            needs_ids = any("completion_ids" in argument_names(self.functions[name]) for name in names)
            seconds = self.config.timeout_seconds
            if scope != "step":
                seconds *= size
            for start in range(0, len(rollouts), size):
                indices = [index for index in range(start, start + size) if not is_lost(rollouts[index])]
                if not indices:
                    continue
                part = [rollouts[index] for index in indices]
                completions = as_json([self.opening + rollout.judged for rollout in part])
                columns = as_json(call_columns(part, step, needs_ids, self.opening))
                for name in names:
                    line = f"[{as_json(name)}, {completions}, {columns}]"
                    call = Call(len(self._scopes), line.encode(), seconds, num_values=len(indices))
                    calls[loading.is_confined(name)].append(call)
                    self._scopes.append(CallScope(name, indices))
        for confined, workers in self.workers.items():
            workers.submit(calls[confined])
        self._rollouts = rollouts

    def collect(
        self,
        others: Mapping[str, Sequence[Said]] = MappingProxyType({}),
        weights: Mapping[str, float] | None = None,
    ) -> list[Rollout]:
        """Wait for the functions. Returns new rollouts with `rewards`, `reward` and `failures`, in the same order.

        others: what parts of the reward that are no functions say of each rollout. weights: of all parts, by default of
        the functions. A process that dies costs its own call alone. Raises RuntimeError if none can go on.
        """
        said = dict(others)
        for name in self.functions:
            said[name] = [(None, "")] * len(self._rollouts)
        for workers in self.workers.values():
            for outcome in workers.collect():
                scope = self._scopes[outcome["call"]]
                for i, index in enumerate(scope.indices):
                    value = outcome["value"][i] if "value" in outcome else None
                    said[scope.function][index] = (value, outcome.get("failed", ""))
        scored = []
        for index, rollout in enumerate(self._rollouts):
            of_rollout = {name: values[index] for name, values in said.items()}
            scored.append(with_rewards(rollout, of_rollout, weights or self.config.functions))
        return scored

    def close(self) -> None:
        """End all processes and wait until they are gone. A second call does nothing."""
        for workers in self.workers.values():
            workers.close()


def with_rewards(rollout: Rollout, said: Mapping[str, Said], weights: Mapping[str, float]) -> Rollout:
    """Add what the parts of the reward say of a rollout, and the weighted sum of those that count and have a value.

    The sum is None if there are none, or if a part failed: the others' sum would not be comparable.
    """
    rewards = {name: value for name, (value, _) in said.items() if name in weights}
    failures = {name: reason for name, (_, reason) in said.items() if reason}
    weighted = [weights[name] * rewards[name] for name in counting_parts(weights) if rewards.get(name) is not None]
    reward = sum(weighted) if weighted and not failures else None
    return dataclasses.replace(rollout, rewards=rewards, reward=reward, failures=failures)


def counting_parts(weights: Mapping[str, float]) -> list[str]:
    """Return the parts of a reward that count: a part of weight 0 only measures, unless all weights are 0."""
    return [name for name, weight in weights.items() if weight] or list(weights)


def is_lost(rollout: Rollout) -> bool:
    """Return whether this is an episode that failed and gets no reward."""
    episode = rollout.episode
    return episode is not None and bool(episode["failure"])


def call_columns(
    rollouts: list[Rollout],
    step: int,
    needs_ids: bool,
    opening: str = "",
) -> Columns:
    """Return the columns of a call, with `completion_ids` if a function needs them. opening: as in RewardPool."""
    columns = {}
    for name in rollouts[0].prompt.columns:
        columns[name] = [rollout.prompt.columns[name] for rollout in rollouts]
    columns["num_tokens"] = [rollout.num_tokens for rollout in rollouts]
    columns["truncated"] = [rollout.truncated for rollout in rollouts]
    columns["prompts"] = [rollout.prompt.content for rollout in rollouts]
    columns["step"] = [step] * len(rollouts)
    if rollouts[0].episode is not None:
        columns |= episode_columns(rollouts, opening)
    if needs_ids:
        columns["completion_ids"] = [rollout.ids_T.tolist() for rollout in rollouts]
    return columns


def episode_columns(rollouts: list[Rollout], opening: str = "") -> Columns:
    """Return EPISODE_COLUMNS: the model's turns, all messages, and what the environment says of itself.

    That are dicts in `environment` and objects with the same attributes in `environments`.

    opening: an opened <think>, with which the template begins each turn. Each text of the model gets it in front.
    """
    columns = {name: [] for name in EPISODE_COLUMNS}
    for rollout in rollouts:
        episode = rollout.episode
        messages = list(as_messages(rollout.prompt.content))
        if episode["opening"] is not None:
            messages[-1] = messages[-1] | {"content": episode["opening"]}
        texts = [opening + turn["text"] for turn in episode["turns"]]
        for text, turn in zip(texts, episode["turns"], strict=True):
            calls = turn.get("calls", [])
            read = [{"type": "function", "function": call} for call in calls if call]
            message = {"role": "assistant", "content": text}
            messages.append(message | {"tool_calls": read} if read else message)
            for answer, call in itertools.zip_longest(turn["answers"], calls):
                answered = {"role": turn.get("role", "tool"), "content": answer}
                messages.append(answered | {"name": call["name"]} if call else answered)
        columns["turns"].append(texts)
        columns["messages"].append(messages)
        columns["environment"].append(episode["info"])
        columns["environments"].append(episode["info"])  # with attributes, see loading.Snapshot
    return columns


class EpisodePart:
    """The part of the reward that an environment or an agent gives."""

    def values(self, rollouts: list[Rollout], opening: str) -> list[Said]:
        """Return for each episode its value or None, and why it was lost, if it was."""
        episodes = [rollout.episode for rollout in rollouts]
        return [(episode["reward"], episode["failure"]) for episode in episodes]


def check_lost(rollouts: list[Rollout]) -> None:
    """Raise RewardError if more than half of the episodes were lost: something is wrong with their environment."""
    failures = [rollout.episode["failure"] for rollout in rollouts if is_lost(rollout)]
    if 2 * len(failures) > len(rollouts):
        raise RewardError(f"{len(failures)} of {len(rollouts)} episodes were lost; the first: {failures[0]}")


def check_all_failed(rollouts: list[Rollout]) -> None:
    """Raise RewardError if a function failed for every completion: then the function is wrong, not the completions.

    Called in every step of training, not in evaluations. The error names the function and shows the first completion.
    """
    rollouts = [rollout for rollout in rollouts if not is_lost(rollout)]
    if not rollouts:
        return
    for name, failure in rollouts[0].failures.items():
        if all(name in rollout.failures for rollout in rollouts):
            lines = [f"reward function {name} failed for all {len(rollouts)} completions: {failure}"]
            shown = {"completion": rollouts[0].text, **rollouts[0].prompt.columns}
            lines += [f"  {column}: {shorten(str(value), SHOWN_CHARACTERS)!r}" for column, value in shown.items()]
            raise RewardError("\n".join(lines))
