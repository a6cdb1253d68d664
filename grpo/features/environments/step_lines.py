"""Warnings about the episodes of a step, each of which a run gives once."""

import collections
import itertools

from grpo.text import one_line
from grpo.types import Rollout

QUOTED_CHARACTERS = 200


def unread_calls_line(rollouts: list[Rollout]) -> str:
    """Return a warning if turns call tools in a style that is not read: how many, an example, what to do.

    Another style is proposed only if it reads more turns than calls are read now.
    """
    episodes = [rollout.episode for rollout in rollouts if rollout.episode]
    turns = list(itertools.chain(*(episode["turns"] for episode in episodes)))
    unread = [turn for turn in turns if "unread" in turn]
    if not unread:
        return ""
    num_read = sum(episode["counts"].get("calls", 0) for episode in episodes)
    ((style, num_of_style),) = collections.Counter(turn["unread"] for turn in unread).most_common(1)
    first = next(turn["text"] for turn in unread if turn["unread"] == style)
    example = one_line(first)[-QUOTED_CHARACTERS:]
    advice = "show the model the form that is read, in data.system_prompt"
    if num_of_style > num_read:
        advice = f"--environment.calls {style} reads {num_of_style} of them"
    return (
        f"{len(unread)} of {len(turns)} turns call a tool in a form that is not read, such as {example!r}, beside "
        f"{num_read} calls that are; {advice}"
    )
