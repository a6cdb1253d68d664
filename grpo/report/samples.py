"""Texts that a person reads: completions, reasons of failed reward functions."""

import collections
import json
import math
from typing import Any

from grpo.rewards.answers import extract_answer
from grpo.text import one_line, shorten, without_surrogates
from grpo.types import Record, Rollout

QUOTED_CHARACTERS = 200  # of a quotation in one line
NUM_REASONS = 3  # most frequent ones of a failed reward function
END_CHARACTERS = 40  # quoted from the end of a completion without an answer
# How an answer is written, by `reward.answer_format`
ANSWER_FORMS = {
    "answer_tag": "<answer>{}</answer>",
    "boxed": "\\boxed{{{}}}",
    "hashes": "#### {}",
    "answer_line": "Answer: {}",
}


def completion_records(rollouts: list[Rollout], prompts: list[str]) -> list[Record]:
    """Return what the .jsonl files say about each completion, except step and kind; None for what is not finite.

    Texts are whole and unchanged (JSON escapes what acts on a terminal), except that JSON takes no lone surrogates.
    `columns` are those that the reward functions got, so that a completion can be scored again. An episode is without
    its seconds, which differ between two equal runs. `earlier` has (version, tokens) of the pieces before the last one.
    `sequences` has the whole text of each, if there are several.
    `finish_reason` is length if the completion ran out of tokens, or as an episode of turns or seconds, else stop.
    """
    records = []
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        failures = {name: without_surrogates(reason) for name, reason in rollout.failures.items()}
        record = {
            "row": rollout.prompt.row,
            "prompt": without_surrogates(prompt),
            "columns": rollout.prompt.columns,
            "completion": without_surrogates(rollout.text),
            "rewards": rollout.rewards,
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "mismatch": rollout.mismatch,
            "finish_reason": "length" if rollout.truncated else "stop",
            "num_tokens": rollout.num_tokens,
            "version": rollout.version,
            "failures": failures,
        }

        if rollout.prompt.source:
            record["source"] = rollout.prompt.source
        earlier = rollout.sampled[:-1]
        if rollout.episode:
            record["episode"] = {name: fact for name, fact in rollout.episode.items() if name != "waited"}
        elif earlier:
            record["earlier"] = [(piece.version, piece.num_tokens) for piece in earlier]
        if rollout.sequence_texts:
            record["sequences"] = [without_surrogates(text) for text in rollout.sequence_texts]
        records.append(_strict_json(record))
    return records


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a number. A file of another hand can hold a text in its place."""
    return isinstance(value, int | float)


def turn_lines(turns: list[dict[str, Any]]) -> list[str]:
    """Return the turns of an episode, each with its tokens and the environment's answers."""
    lines = []
    for number, turn in enumerate(turns, start=1):
        tokens = f"{turn['tokens']} tokens"
        if "earned" in turn:
            tokens += f", then get_reward {turn['earned']:g}"
        lines.append(f"turn {number} ({tokens}): {turn['text']}")
        lines += [f"  <- {answer}" for answer in turn["answers"]]
        if "failed" in turn:
            lines.append(f"environment failed: {turn['failed']}")
    return lines


def no_answer_line(rollouts: list[Rollout], answer_format: str) -> str:
    """Return a warning if no completion has an answer in the format: how three end, which formats they have instead."""
    texts = [rollout.judged for rollout in rollouts]
    if not texts or any(extract_answer(text, answer_format) is not None for text in texts):
        return ""
    counts = {}
    for form in ANSWER_FORMS:
        answers = [extract_answer(text, form) for text in texts]
        counts[form] = len(texts) - answers.count(None)
    distance = math.ceil(len(texts) / 3)
    ends = []
    for text in texts[::distance]:
        end = one_line(text)[-END_CHARACTERS:]
        ends.append(end)
    line = f"none of {len(texts)} completions has an answer in the form {ANSWER_FORMS[answer_format].format('..')}"
    line += f"; they end like {', '.join(map(repr, ends))}"
    for form, count in counts.items():
        if count:
            line += f"; {count} have one in {ANSWER_FORMS[form].format('..')} (--reward.answer-format {form})"
    limits = collections.Counter(r.ended_by for r in rollouts if r.truncated)
    for limit, count in limits.items():
        line += f"; {count} run out of {limit}"
    return line


def hung_line(rollouts: list[Rollout]) -> str:
    """Return a warning if environments failed as the policy may have caused it: how many, and the first reason."""
    reasons = []
    for rollout in rollouts:
        episode = rollout.episode
        if episode and episode["ended_by"] == "hung" and not episode["failure"]:
            reasons.append(episode["turns"][-1]["failed"])
    if not reasons:
        return ""
    return (
        f"{len(reasons)} of {len(rollouts)} episodes get environment.hung_reward, since what the policy wrote may have "
        f"caused the failure of their environment; the first: {shorten(one_line(reasons[0]), QUOTED_CHARACTERS)}"
    )


def failure_lines(rollouts: list[Rollout]) -> list[str]:
    """Return a line for each reward function that failed: how often, its most frequent reasons, a completion."""
    failed_by_function = collections.defaultdict(list)
    for rollout in rollouts:
        for function in rollout.failures:
            failed_by_function[function].append(rollout)
    lines = []
    for function, failed in failed_by_function.items():
        counts = collections.Counter()
        for rollout in failed:
            reason = _one_line(rollout.failures[function])
            counts[reason] += 1
        most_frequent = counts.most_common(NUM_REASONS)
        reasons = ", ".join(f"{reason} ({count})" for reason, count in most_frequent)
        lines.append(
            f"reward function {function} failed for {len(failed)} of {len(rollouts)} completions: {reasons}; "
            f"first completion, of row {failed[0].prompt.row}: {shorten(failed[0].text, QUOTED_CHARACTERS)!r}"
        )
    return lines


def finite_or_none(value: float | None) -> float | None:
    """Return the number, or None if it is not finite, which strict JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return value


def _strict_json(value: Any) -> Any:
    """Return a JSON value with None in place of NaN and infinities, which Python allows in it."""
    text = json.dumps(value)
    return json.loads(text, parse_constant=lambda _: None)


def _one_line(text: str) -> str:
    return shorten(one_line(text), QUOTED_CHARACTERS)
