"""Completions to read: records for the .jsonl files, readable text, a table, and why reward functions failed."""

import collections
import math
from typing import Any

from grpo.text import number_or_none, one_line, printable, shorten, without_surrogates
from grpo.types import Rollout

# In samples, prompts and their columns (an answer, test cases, ...) are cut to this many characters.
SAMPLE_CHARACTERS = 600
# What is told about a failed reward function is one line, so it quotes less.
QUOTED_CHARACTERS = 200
# Characters that mean something in a Markdown table or in HTML, as entities: `<think>`, `a|b` and `*` stay as they are.
ENTITIES = {ord(character): f"&#{ord(character)};" for character in "&<>|\\`*_~[]"}
TABLE_HEADER = ("prompt", "completion", "rewards", "advantage", "mismatch", "finish reason")


def completion_records(rollouts: list[Rollout], prompts: list[str]) -> list[dict[str, Any]]:
    """What the .jsonl files tell about each completion, except step and kind; None where there is no finite number.

    Texts are whole and as they are (JSON escapes what acts on a terminal), except that JSON takes no lone surrogates.
    """
    if len(prompts) != len(rollouts):
        raise ValueError(f"{len(prompts)} prompt texts for {len(rollouts)} rollouts; pass one for each rollout")
    return [
        {
            "row": rollout.prompt.row,
            **({"source": rollout.prompt.source} if rollout.prompt.source else {}),
            "prompt": without_surrogates(prompt),
            "completion": without_surrogates(rollout.text),
            "rewards": {name: finite_or_none(value) for name, value in rollout.rewards.items()},
            "reward": finite_or_none(rollout.reward),
            "advantage": finite_or_none(rollout.advantage),
            "mismatch": finite_or_none(rollout.mismatch),
            "finish_reason": _finish_reason(rollout),
            "num_tokens": rollout.completion.num_tokens,
            "version": rollout.completion.version,
            **({"earlier": earlier} if (earlier := _earlier_pieces(rollout)) else {}),
            "failures": {name: without_surrogates(reason) for name, reason in rollout.failures.items()},
        }
        for rollout, prompt in zip(rollouts, prompts, strict=True)
    ]


def spread_by_reward(rewards: list[float | None], count: int) -> list[int]:
    """At most `count` positions at even distances in the ranking by reward, best first, worst (or None) last."""
    ranked = sorted(range(len(rewards)), key=lambda i: -math.inf if rewards[i] is None else rewards[i], reverse=True)
    count = min(count, len(ranked))
    return [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]


def describe_rollout(rollout: Rollout, prompt: str) -> str:
    """A rollout as readable, printable text: a line of numbers, failures, prompt, its other columns, completion."""
    numbers = [
        *_reward_texts(rollout),
        f"advantage {number_or_none(rollout.advantage)}",
        f"mismatch {number_or_none(rollout.mismatch)}",
        f"{rollout.completion.num_tokens} tokens, finish reason {_finish_reason(rollout)}",
        *([f"source {rollout.prompt.source}"] if rollout.prompt.source else []),
    ]
    columns = [
        f"{name}: {shorten(str(value), SAMPLE_CHARACTERS)}"
        for name, value in rollout.prompt.columns.items()
        if value != rollout.prompt.content  # the text that the prompt was made from
    ]
    lines = [
        f"--- {' | '.join(numbers)}",
        *_failure_texts(rollout),
        f"prompt: {shorten(prompt, SAMPLE_CHARACTERS)}",
        *columns,
        f"completion: {rollout.text}",
    ]
    return printable("\n".join(lines))


def table_rows(rollouts: list[Rollout], prompts: list[str]) -> list[list[str]]:
    """A row of printable cells for each rollout, under TABLE_HEADER."""
    rows = []
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        cells = [
            shorten(prompt, SAMPLE_CHARACTERS),
            rollout.text,
            "\n".join([*_reward_texts(rollout), *_failure_texts(rollout)]),
            number_or_none(rollout.advantage),
            number_or_none(rollout.mismatch),
            _finish_reason(rollout),
        ]
        rows.append([printable(cell) for cell in cells])
    return rows


def markdown_table(rows: list[list[str]]) -> str:
    """The rows as a Markdown table, one line each; texts keep their tags, bars, stars and line breaks."""
    lines = [f"| {' | '.join(TABLE_HEADER)} |", f"|{' --- |' * len(TABLE_HEADER)}"]
    for row in rows:
        lines.append(f"| {' | '.join('<br>'.join(cell.translate(ENTITIES).splitlines()) for cell in row)} |")
    return "\n".join(lines)


def failure_lines(rollouts: list[Rollout], limit: int = 3) -> list[str]:
    """A line for each reward function that failed: how often, its `limit` most frequent reasons, where first."""
    lines = []
    for function in dict.fromkeys(name for r in rollouts for name in r.failures):
        failed = [r for r in rollouts if function in r.failures]
        reasons = collections.Counter(_one_line(r.failures[function]) for r in failed).most_common()
        shown = [f"{reason} ({count})" for reason, count in reasons[:limit]]
        if len(reasons) > limit:
            shown.append(f"other reasons ({sum(count for _, count in reasons[limit:])})")
        lines.append(
            f"reward function {function} failed for {len(failed)} of {len(rollouts)} completions: {', '.join(shown)}; "
            f"first completion: {shorten(failed[0].text, QUOTED_CHARACTERS)!r}"
        )
    return lines


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _earlier_pieces(rollout: Rollout) -> list[tuple[int, int]]:
    """(version, tokens) of each piece before the last one."""
    return [(piece.version, piece.num_tokens) for piece in rollout.completion.pieces[:-1]]


def _finish_reason(rollout: Rollout) -> str:
    return "length" if rollout.completion.truncated else "stop"


def _reward_texts(rollout: Rollout) -> list[str]:
    rewards = [f"{name} {number_or_none(value)}" for name, value in rollout.rewards.items()]
    return [f"reward {number_or_none(rollout.reward)}", *rewards]


def _failure_texts(rollout: Rollout) -> list[str]:
    return [f"{name} failed: {_one_line(reason)}" for name, reason in rollout.failures.items()]


def _one_line(text: str) -> str:
    return shorten(one_line(text), QUOTED_CHARACTERS)
