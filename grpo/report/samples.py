"""What a person reads: completions as records and as text, why reward functions failed, examples of SFT in colour."""

import collections
import itertools
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from grpo.environments.calls import TAGS
from grpo.rewards.answers import extract_answer
from grpo.text import compact_number, one_line, printable, shorten, without_surrogates
from grpo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo.data.encode import Encoded

SAMPLE_CHARACTERS = 600  # of prompts and their columns (an answer, test cases, ...) in samples
QUOTED_CHARACTERS = 200  # of what is quoted of a failed reward function, in one line
NUM_REASONS = 3
QUOTED_END = 40  # of a completion without an answer
ANSWER_FORMS = {"answer_tag": "<answer>..</answer>", "boxed": "\\boxed{}", "hashes": "a line behind ####"}


def completion_records(rollouts: list[Rollout], prompts: list[str]) -> list[dict[str, Any]]:
    """What the .jsonl files tell about each completion, except step and kind; None where there is no finite number.

    Texts are whole and as they are (JSON escapes what acts on a terminal), except that JSON takes no lone surrogates.
    `columns` are those that the reward functions got, so that a completion can be scored again. An episode is told
    without its seconds, which differ between two runs of the same; `earlier` are (version, tokens) of the pieces before
    the last one.
    """
    records = []
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        completion = rollout.completion
        record = {
            "row": rollout.prompt.row,
            "prompt": without_surrogates(prompt),
            "columns": _strict_json(rollout.prompt.columns),
            "completion": without_surrogates(rollout.text),
            "rewards": {name: finite_or_none(value) for name, value in rollout.rewards.items()},
            "reward": finite_or_none(rollout.reward),
            "advantage": finite_or_none(rollout.advantage),
            "mismatch": finite_or_none(rollout.mismatch),
            "finish_reason": "length" if completion.truncated else "stop",
            "num_tokens": completion.num_tokens,
            "version": completion.version,
            "failures": {name: without_surrogates(reason) for name, reason in rollout.failures.items()},
        }
        if rollout.prompt.source:
            record["source"] = rollout.prompt.source
        if completion.episode:
            episode = {name: value for name, value in completion.episode.items() if name != "waited"}
            record["episode"] = _strict_json(episode)
        elif completion.pieces[:-1]:
            record["earlier"] = [(piece.version, piece.num_tokens) for piece in completion.pieces[:-1]]
        records.append(record)
    return records


def spread_by_reward(rewards: list[float | None], count: int) -> list[int]:
    """At most `count` positions at even distances in the ranking by reward, best first, worst (or None) last."""
    ranked = sorted(range(len(rewards)), key=lambda i: -math.inf if rewards[i] is None else rewards[i], reverse=True)
    count = min(count, len(ranked))
    return [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]


def describe(record: dict[str, Any], turns: bool = False, short: bool = False) -> str:
    """A completion's record as readable, printable text: a line of numbers, failures, prompt, columns, completion.

    turns: of an episode, in place of the completion its turns one by one, with their tokens and what answered them.
    short: cut a long prompt to SAMPLE_CHARACTERS, as columns are in any case. A column that the prompt shows is left
    out, except `answer`.
    """
    prompt = record["prompt"]
    columns = {name: x for name, x in record["columns"].items() if name == "answer" or not _is_in(x, prompt)}
    numbers = [("reward", record["reward"]), *record["rewards"].items()]
    numbers += [(name, record[name]) for name in ("advantage", "mismatch")]
    facts = [f"{name} {'none' if value is None else compact_number(value)}" for name, value in numbers]
    facts += [f"{name} {record[name]}" for name in ("row", "source", "kind") if name in record]
    lines = [
        f"--- {' | '.join(facts)} | {record['num_tokens']} tokens, finish reason {record['finish_reason']}",
        *(f"{name} failed: {_one_line(reason)}" for name, reason in record["failures"].items()),
        f"prompt: {shorten(prompt, SAMPLE_CHARACTERS) if short else prompt}",
        *(f"{name}: {shorten(str(value), SAMPLE_CHARACTERS)}" for name, value in columns.items()),
    ]
    episode = record.get("episode")
    if turns and episode:
        for number, turn in enumerate(episode["turns"], start=1):
            earned = f", then get_reward {turn['earned']:g}" if "earned" in turn else ""
            lines += [
                f"turn {number} ({turn['tokens']} tokens{earned}): {turn['text']}",
                *(f"  <- {a}" for a in turn["answers"]),
            ]
        lines.append(f"ended by {episode['ended_by']}")
    else:
        lines.append(f"completion: {record['completion']}")
    return printable("\n".join(lines))


def no_answer_line(rollouts: list[Rollout], answer_format: str) -> str:
    """What to say if not one completion has an answer where rewards look for it: how three end, what they have."""
    texts = [rollout.answer for rollout in rollouts]
    found = {form: sum(extract_answer(text, form) is not None for text in texts) for form in ANSWER_FORMS}
    if found.pop(answer_format) or not texts:
        return ""
    ends = ", ".join(repr(one_line(text)[-QUOTED_END:]) for text in texts[:: -(-len(texts) // 3)])
    line = f"none of {len(texts)} completions has an answer in {ANSWER_FORMS[answer_format]}; they end like {ends}"
    for form, count in found.items():
        line += f"; {count} have one in {ANSWER_FORMS[form]} (--reward.answer-format {form})" if count else ""
    cut = sum(rollout.completion.truncated for rollout in rollouts)
    return line + (f"; {cut} run out of tokens" if cut else "")


def unread_calls_line(rollouts: list[Rollout]) -> str:
    """What to say if turns call tools in a style that is not read: how many, which style reads most, an example."""
    episodes = [r.completion.episode for r in rollouts if r.completion.episode]
    turns = [turn for episode in episodes for turn in episode["turns"]]
    styles = collections.Counter(turn["unread"] for turn in turns if "unread" in turn)
    if not styles:
        return ""
    ((style, count),) = styles.most_common(1)
    text = next(turn["text"] for turn in turns if turn.get("unread") == style)
    opening = TAGS[style][0] if style in TAGS else "{"
    example = _one_line(text[text.find(opening) :])
    num_read = sum(episode["counts"].get("calls", 0) for episode in episodes)
    return (
        f"{styles.total()} of {len(turns)} turns call a tool in a form that is not read, beside {num_read} calls that "
        f"are; --environment.calls {style} reads {count} of them, such as {example!r}"
    )


def failure_lines(rollouts: list[Rollout]) -> list[str]:
    """A line for each reward function that failed: how often, its most frequent reasons, where first."""
    lines = []
    for function in dict.fromkeys(name for r in rollouts for name in r.failures):
        failed = [r for r in rollouts if function in r.failures]
        reasons = collections.Counter(_one_line(r.failures[function]) for r in failed).most_common(NUM_REASONS)
        told = ", ".join(f"{reason} ({count})" for reason, count in reasons)
        first = repr(shorten(failed[0].text, QUOTED_CHARACTERS))
        where = f"{len(failed)} of {len(rollouts)} completions"
        lines.append(f"reward function {function} failed for {where}: {told}; first completion: {first}")
    return lines


def show_examples(examples: "Iterable[Encoded]", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Print examples of SFT as the model sees them, each with its length and its labels in colour."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for number, example in enumerate(examples, start=1):
        console.rule(f"example {number}: {len(example.ids)} tokens, {sum(example.mask)} of them labels", align="left")
        console.print(show_chat(example, tokenizer))


def show_chat(example: "Encoded", tokenizer: "PreTrainedTokenizerBase") -> Text:
    """Text of an example for rich's console, labels in bold green; a line break that is a label shows as ↵ too.

    Special tokens are shown; what would act on a terminal is escaped.
    """
    shown, start, before = Text(), 0, ""
    for is_label, run in itertools.groupby(example.mask):
        start += len(list(run))
        # From the beginning each time: some tokenizers drop a blank at the beginning of what they decode.
        decoded = tokenizer.decode(example.ids[:start], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = printable(decoded[len(before) :])
        shown.append(piece.replace("\n", "↵\n") if is_label else piece, "bold green" if is_label else "dim")
        before = decoded
    return shown


def finite_or_none(value: float | None) -> float | None:
    """The number, or None if it is not finite, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None


def _strict_json(value: Any) -> Any:
    """What came as JSON, which Python lets hold NaN and infinities, with None in their place."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def _is_in(value: Any, prompt: str) -> bool:
    """Whether the prompt shows this value of a column anyway: a text, or messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(x, dict) and _is_in(x.get("content"), prompt) for x in value)
    return isinstance(value, str) and without_surrogates(value.strip()) in prompt


def _one_line(text: str) -> str:
    return shorten(one_line(text), QUOTED_CHARACTERS)
