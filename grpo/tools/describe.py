"""Records of completions as a person reads them."""

import math
from typing import Any

from grpo.report.samples import QUOTED_CHARACTERS, is_number, turn_lines
from grpo.text import compact_number, one_line, printable, shorten, without_surrogates
from grpo.types import Record

COLUMN_CHARACTERS = 600  # of a prompt's columns (an answer, test cases, ...)


def ranked_by_reward(records: list[Record], worst: bool = False) -> list[Record]:
    """Return the records from the highest reward to the lowest, or the other way round. No reward is the lowest."""

    def rank(record: Record) -> float:
        reward = record["reward"]
        return reward if is_number(reward) else -math.inf

    return sorted(records, key=rank, reverse=not worst)


def number_text(value: Any) -> str:
    """Return a record's number for a reader; `none` for None; a text stays as it is."""
    if value is None:
        return "none"
    return compact_number(value) if is_number(value) else str(value)


def describe(record: Record, turns: bool = False) -> str:
    """Return a completion's record as printable text: a line of numbers, failures, prompt, columns, completion.

    turns: show the turns of an episode instead of its completion, with their tokens and the environment's answers. An
    episode of several sequences is shown sequence by sequence, otherwise.
    Columns are cut to COLUMN_CHARACTERS. One that the prompt shows is left out, except `answer`.
    """
    prompt = record["prompt"]
    numbers = {
        "reward": record["reward"],
        **record["rewards"],
        "advantage": record["advantage"],
        "mismatch": record["mismatch"],
    }
    facts = []
    for name, value in numbers.items():
        facts.append(f"{name} {number_text(value)}")
    for name in ("row", "source", "kind"):
        if name in record:
            facts.append(f"{name} {record[name]}")
    episode = record.get("episode")
    end = f"ended by {episode['ended_by']}" if episode else f"finish reason {record['finish_reason']}"
    facts.append(f"{record['num_tokens']} tokens, {end}")

    lines = ["--- " + " | ".join(facts)]
    for name, reason in record["failures"].items():
        lines.append(f"{name} failed: {shorten(one_line(reason), QUOTED_CHARACTERS)}")
    lines.append(f"prompt: {prompt}")
    for name, value in record["columns"].items():
        text = str(value)
        stands_in_prompt = " " in text and without_surrogates(text.strip()) in prompt  # one word is there by chance
        if name == "answer" or not stands_in_prompt:
            lines.append(f"{name}: {shorten(text, COLUMN_CHARACTERS)}")

    if turns and episode:
        lines += turn_lines(episode["turns"])
    elif "sequences" in record:
        lines += [f"sequence {number}: {text}" for number, text in enumerate(record["sequences"], start=1)]
    else:
        lines.append(f"completion: {record['completion']}")
    return printable("\n".join(lines))
