"""Rewards from the driver's side: calls go out to worker processes, values come back, weighted sums are taken.

What becomes of a verifier that loops, crashes or allocates without end, workers/supervisor.py decides; here, what that
means: a completion without reward, and the end of a run if a function fails for every completion of a step.
"""

import dataclasses
import json
from typing import Any

from grpo.config import RewardConfig
from grpo.data.rows import as_messages
from grpo.rewards import loading
from grpo.rewards.loading import argument_names, called_with, load_functions
from grpo.text import shorten
from grpo.types import Rollout
from grpo.workers.processes import Call, Workers
from grpo.workers.worker import SHOWN_CHARACTERS


class RewardError(ValueError):
    """No completion of a step got a value from a reward function."""


# What reward functions get of episodes, besides.
EPISODE_COLUMNS = ("turns", "messages", "environment", "environments")


class RewardPool:
    """`config.num_workers` processes that call the reward functions; as many again if only some of those run confined.

    Start it on the main thread: the processes end with the thread that started them.
    """

    def __init__(self, config: RewardConfig, max_completion_tokens: int, opening: str = "") -> None:
        """Start the processes; returns when every one has loaded the functions, or raises ValueError.

        opening: what a prompt has of each completion, which the functions then get in front of it: an opened <think>.
        """
        self.config, self.functions = config, load_functions(config, None, max_completion_tokens)
        self.opening = opening
        self._submitted: tuple[list[Rollout], list[tuple[str, int, int]]] | None = None  # from `submit` to `collect`
        self.workers: dict[bool, Workers] = {}  # confined ones, and others
        try:
            for confined in (True, False):
                if (part := loading.part(config, confined)).functions:
                    started = loading.start_workers(loading.load, part, confined, max_completion_tokens)
                    self.workers[confined] = started
        except BaseException:
            self.close()
            raise

    def submit(self, rollouts: list[Rollout], group_size: int, step: int = 0) -> None:
        """Begin to score `rollouts`, which lie group after group; returns at once.

        Each function is called with one completion, those of a group or all of them (see `called_with`), and with lists
        of that length: the data set's columns, `num_tokens`, `truncated`, `prompts` (as the data has them) and `step`;
        `completion_ids` where it names them; of episodes also EPISODE_COLUMNS.

        Raises ValueError if a column holds what JSON does not have, RuntimeError if the last ones were not collected.
        """
        if self._submitted is not None:
            raise RuntimeError(f"{len(self._submitted[0])} rollouts were submitted and not collected")
        parts: list[tuple[str, int, int]] = []  # of each call: function, first completion, number of them
        calls: dict[bool, list[Call]] = {confined: [] for confined in self.workers}
        sizes = {"step": len(rollouts), "group": group_size, "completion": 1}
        for what, size in sizes.items():  # long calls first, short ones fill the gaps
            names = [name for name, f in self.functions.items() if called_with(f) == what]
            seconds = self.config.timeout_seconds * (1 if what == "step" else size)
            for start in range(0, len(rollouts) if names else 0, size):
                together = rollouts[start : start + size]
                columns = {name: [r.prompt.columns[name] for r in together] for name in together[0].prompt.columns}
                columns["num_tokens"] = [r.completion.num_tokens for r in together]
                columns["truncated"] = [r.completion.truncated for r in together]
                columns["prompts"] = [r.prompt.content for r in together]
                columns["step"] = [step] * len(together)
                if any("completion_ids" in argument_names(self.functions[name]) for name in names):
                    columns["completion_ids"] = [r.completion.ids_T.tolist() for r in together]
                if together[0].completion.episode is not None:
                    columns |= episode_columns(together)
                arguments = as_json([self.opening + r.answer for r in together]), as_json(columns)
                for name in names:
                    line = b"[%s, %s, %s]" % (as_json(name), *arguments)
                    calls[loading.is_confined(name)].append(Call(len(parts), line, seconds, num_values=size))
                    parts.append((name, start, size))
        for confined, workers in self.workers.items():
            workers.submit(calls[confined])
        self._submitted = rollouts, parts

    def collect(self) -> list[Rollout]:
        """Wait for the rewards; new rollouts with `rewards`, `reward` and `failures`, in the order submitted.

        A function that said None is left out of that completion's weighted sum; all None gives None. A function that
        failed for a completion leaves it without a reward: the other functions' sum would not compare.

        Raises RuntimeError if the processes are gone.
        """
        (rollouts, parts), self._submitted = self._submitted, None
        rewards: list[dict[str, float | None]] = [dict.fromkeys(self.functions) for _ in rollouts]
        failures: list[dict[str, str]] = [{} for _ in rollouts]
        for outcome in (outcome for workers in self.workers.values() for outcome in workers.collect()):
            name, start, size = parts[outcome["call"]]
            for i in range(size):
                if "failed" in outcome:
                    failures[start + i][name] = outcome["failed"]
                else:
                    rewards[start + i][name] = outcome["value"][i]
        scored = []
        for rollout, values, failed in zip(rollouts, rewards, failures, strict=True):
            weighted = [self.config.functions[name] * value for name, value in values.items() if value is not None]
            reward = sum(weighted) if weighted and not failed else None
            scored.append(dataclasses.replace(rollout, rewards=values, reward=reward, failures=failed))
        return scored

    def close(self) -> None:
        """End all processes and wait until they are gone; a second call does nothing."""
        for workers in self.workers.values():
            workers.close()


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:
        raise ValueError(
            f"reward functions get columns as JSON has them: {error}; convert it in a function of --data.row, or leave "
            "the column out of data.columns"
        ) from error


def episode_columns(rollouts: list[Rollout]) -> dict[str, list]:
    """What reward functions learn of episodes: the model's turns, all messages, what is told of the environment."""
    columns: dict[str, list] = {name: [] for name in EPISODE_COLUMNS}
    for rollout in rollouts:
        episode, content = rollout.completion.episode, rollout.prompt.content
        messages = list(as_messages(content))
        if episode["opening"] is not None:
            messages[-1] = messages[-1] | {"content": episode["opening"]}
        for turn in episode["turns"]:
            messages.append({"role": "assistant", "content": turn["text"]})
            messages += [{"role": "tool", "content": answer} for answer in turn["answers"]]
        columns["turns"].append([turn["text"] for turn in episode["turns"]])
        columns["messages"].append(messages)
        columns["environment"].append(episode["info"])
        columns["environments"].append(episode["info"])  # with attributes, see loading.Snapshot
    return columns


def check_all_failed(rollouts: list[Rollout]) -> None:
    """Stop a step in which one function failed for every completion: then the function is wrong, not the completions.

    Raises RewardError, which names the function and shows the first completion.
    """
    for name in rollouts[0].failures if rollouts else ():
        if all(name in rollout.failures for rollout in rollouts):
            number = f"all {len(rollouts)} completions" if len(rollouts) > 1 else "the only completion"
            lines = [f"reward function {name} failed for {number}: {rollouts[0].failures[name]}"]
            shown = {"completion": rollouts[0].text, **rollouts[0].prompt.columns}
            lines += [f"  {column}: {shorten(str(value), SHOWN_CHARACTERS)!r}" for column, value in shown.items()]
            raise RewardError("\n".join(lines))
