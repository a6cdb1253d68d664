"""Before a run, one look at all rows: how many there are, how long they are, how many are left out and why.

What is left out is told with numbers; where next to nothing would be left, the run is refused.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from grpo.config import DataConfig, GRPOConfig, SFTConfig
from grpo.data.chat import Refused, TooLong, render_prompt, tokenize_prompts
from grpo.data.examples import Example
from grpo.data.rows import SourceRows, check_chat_rows, check_rows, progress, tell_unusable
from grpo.data.sources import READ_ROWS
from grpo.data.streaming import read_rows
from grpo.data.turns import tokenize_written, write_example
from grpo.text import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Left out: above the first share a warning, below the second share of rows that are left a refusal.
LOUD_FRAC, LEAST_FRAC = 0.05, 0.01
# Rows up to this length are counted even where the limit is lower, so that a message can name a better limit.
COUNTED_TOKENS = 4096
# The share of rows for which a message suggests a limit.
MOST_FRAC = 0.95

# Tokens of each example, 0 if none of them is a label, or why there are none; a number above the limit may be a lower
# bound.
CountTokens = Callable[[list[Example]], list[int | str]]


def load_sources(data: DataConfig) -> list[SourceRows]:
    """The rows of all sources of `data`, checked but not measured; raises what `read_rows` and `check_rows` raise.

    Of sources that are streamed, they are the first rows.
    """
    return [check_rows(source, read_rows(source, data), data) for source in data.all_sources]


def load_chat_sources(config: SFTConfig) -> list[SourceRows]:
    """The same for SFT."""
    return [check_chat_rows(source, read_rows(source, config.data), config) for source in config.data.all_sources]


def reward_columns(sources: list[SourceRows]) -> list[str]:
    """Names of the columns that the rows really give; those of `data.row` are known only from them.

    Raises ValueError if the sources give different ones.
    """
    names = {rows.source.path: list(rows.example(rows.usable[0]).columns) for rows in sources}
    first, *others = names.items()
    for path, columns in others:
        if set(columns) != set(first[1]):
            raise ValueError(
                f"data.row gives the columns {', '.join(columns) or 'none'} for {path}, and "
                f"{', '.join(first[1]) or 'none'} for {first[0]}; give the same for all sources"
            )
    return first[1]


def texts_of(sources: list[SourceRows]) -> Iterator[str]:
    """All texts of all usable rows, as they come."""
    for rows in sources:
        for row in rows.usable:
            yield from rows.example(row).texts


def usable_prompts(
    sources: list[SourceRows], config: GRPOConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[SourceRows]:
    """The sources without prompts that are too long; prints what is left. Raises ValueError if next to nothing is."""
    data = config.data

    def count(examples: list[Example]) -> list[int | str]:
        return count_prompt_tokens(tokenizer, data, examples, max(data.max_prompt_tokens, COUNTED_TOKENS))

    limit = Limit(
        "data.max_prompt_tokens", data.max_prompt_tokens, config.prompts_per_step, "prompts", streaming=data.streaming
    )
    return measure(sources, count, limit, data.bad_rows)


def usable_chats(
    sources: list[SourceRows], config: SFTConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[SourceRows]:
    """The same for SFT; left out are also examples of which no token is a label."""
    longest, truncates = config.max_sequence_tokens, config.too_long == "truncate"
    streaming = config.data.streaming
    limit = Limit("max_sequence_tokens", longest, config.sequences_per_step, "sequences", truncates, streaming)

    def count(examples: list[Example]) -> list[int | str]:
        return count_chat_tokens(tokenizer, config, examples)

    return measure(sources, count, limit, config.data.bad_rows)


def count_chat_tokens(
    tokenizer: "PreTrainedTokenizerBase", config: SFTConfig, examples: list[Example]
) -> list[int | str]:
    """Tokens of each example to learn, 0 if none of those that are kept is a label, or why it cannot be encoded."""
    longest, truncates = config.max_sequence_tokens, config.too_long == "truncate"
    counted = max(longest + 1, COUNTED_TOKENS)
    counts: list[int | str] = [0] * len(examples)
    written = {}
    for i, example in enumerate(examples):
        try:
            written[i] = write_example(tokenizer, config.data, example.chat, config.train_on, counted, truncates)
        except TooLong as error:
            counts[i] = error.num_tokens
        except Refused as error:
            counts[i] = str(error)
    for i, (ids, mask) in zip(written, tokenize_written(tokenizer, list(written.values())), strict=True):
        num_tokens = min(len(ids), counted) if truncates else len(ids)
        if any(mask[:longest] if truncates else mask) or num_tokens > counted:
            counts[i] = num_tokens
    return counts


def count_prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase", data: DataConfig, examples: list[Example], max_tokens: int
) -> list[int | str]:
    """Tokens of each prompt, more than `max_tokens` where it is not worth to count them, or why there is no prompt."""
    counts: list[int | str] = [0] * len(examples)
    chats = {}
    for i, example in enumerate(examples):
        try:
            chats[i] = render_prompt(tokenizer, data, example.prompt, max_tokens, example.tools)
        except TooLong as error:
            counts[i] = error.num_tokens
        except Refused as error:
            counts[i] = str(error)
    for i, ids in zip(chats, tokenize_prompts(tokenizer, data, list(chats.values())), strict=True):
        counts[i] = len(ids)
    return counts


@dataclasses.dataclass(frozen=True)
class Limit:
    """The longest that a row may be, and how many rows a step needs."""

    field: str
    max_tokens: int
    per_step: int
    unit: str
    truncates: bool = False
    """Longer ones are cut off, and not left out."""
    streaming: bool = False
    """The rows are the first of a source that has others."""


def measure(sources: list[SourceRows], count: CountTokens, limit: Limit, bad_rows: str) -> list[SourceRows]:
    """Leave out what is too long or has no tokens; print rows, steps per epoch and lengths of each source.

    Raises ValueError if less than LEAST_FRAC of a source's rows are left, or fewer rows in all than a step needs while
    there are as many (unless they are the first of a stream).
    """
    measured = []
    total_weight = sum(source.source.weight for source in sources)
    for rows in sources:
        start = time.monotonic()
        lengths, refused = _lengths(rows, count)
        tell_unusable(refused, len(rows.rows), rows.source.path, bad_rows, len(refused) < len(rows.usable))
        labelled = {row: length for row, length in lengths.items() if length}
        if not labelled:
            raise ValueError(
                f"none of {len(lengths)} examples of {rows.source.path} has a token to learn within {limit.field}="
                f"{limit.max_tokens}; bring chats with assistant turns, choose another train_on, or raise {limit.field}"
            )
        fit = [row for row, length in labelled.items() if limit.truncates or length <= limit.max_tokens]
        left_out = dict(rows.left_out)
        for why, number in (
            ("that the chat template refuses", len(refused)),
            ("without a token to learn", len(lengths) - len(labelled)),
            (f"longer than {limit.field}={limit.max_tokens}", len(labelled) - len(fit)),
        ):
            if number:
                left_out[why] = number
        new = dataclasses.replace(rows, usable=fit, left_out=left_out)
        share = rows.source.weight / total_weight
        _check_enough(new, list(labelled.values()), limit)
        print(printable(_report(new, list(labelled.values()), limit, share, time.monotonic() - start)), flush=True)
        measured.append(new)
    if limit.streaming:
        return measured
    num_rows, num_left = sum(rows.num_wanted for rows in measured), sum(len(rows.usable) for rows in measured)
    if num_left < limit.per_step <= num_rows:
        raise ValueError(
            f"{num_left} of {num_rows} rows are left, and a step needs {limit.per_step} {limit.unit}: "
            f"{_reasons(measured)}; raise {limit.field}, or bring other rows"
        )
    if num_left < limit.per_step:
        print(
            f"warning: a step of {limit.per_step} {limit.unit} takes each of {num_left} rows several times", flush=True
        )
    return measured


def _lengths(rows: SourceRows, count: CountTokens) -> tuple[dict[int, int], dict[int, str]]:
    """Row -> its tokens; row -> why it has none."""
    lengths, refused = {}, {}
    for batch in batches(_examples(rows), READ_ROWS):
        for (row, _), length in zip(batch, count([example for _, example in batch]), strict=True):
            if isinstance(length, str):
                refused[row] = length
            else:
                lengths[row] = length
    return lengths, refused


def _examples(rows: SourceRows) -> Iterator[tuple[int, Example]]:
    """The usable rows with their numbers, in the order of the file."""
    usable = iter(rows.usable)
    wanted = next(usable, None)
    for index, row in enumerate(progress(rows.rows, len(rows.rows), f"rows of {rows.source.path} measured")):
        if index == wanted:
            yield index, rows.read_again(index, row)
            wanted = next(usable, None)


def batches(items: Iterator, size: int) -> Iterator[list]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _check_enough(rows: SourceRows, lengths: Sequence[int], limit: Limit) -> None:
    if not rows.usable:
        raise ValueError(all_too_long(rows.source.path, limit.field, limit.max_tokens, lengths))
    if len(rows.usable) < LEAST_FRAC * rows.num_wanted:
        raise ValueError(
            f"{len(rows.usable)} of {rows.num_wanted} rows of {rows.source.path} are left, less than {LEAST_FRAC:.0%}: "
            f"{_reasons([rows])}; {_way_out(lengths, limit)}"
        )


def _way_out(lengths: Sequence[int], limit: Limit) -> str:
    enough = sorted(lengths)[int(MOST_FRAC * (len(lengths) - 1))]
    way_out = f"with {limit.field}={enough}, {MOST_FRAC:.0%} of them fit"
    return way_out if enough > limit.max_tokens and not limit.truncates else "correct them"


def _report(rows: SourceRows, lengths: Sequence[int], limit: Limit, share: float, seconds: float) -> str:
    num_rows, num_usable = len(rows.rows), len(rows.usable)
    label = f"{rows.source.label} ({rows.source.text})" if rows.source.label else rows.source.text
    steps = num_usable / (limit.per_step * share)
    num_cut = sum(length > limit.max_tokens for length in lengths) if limit.truncates else 0
    from_here = f", {share:.0%} of them from here" if rows.source.label else ""
    what = (
        [f"data: {label} is streamed; of its first {num_rows:,} rows {num_usable:,} can be used{from_here}"]
        if limit.streaming
        else [
            f"data: {label} has {num_rows:,} rows, {num_usable:,} are used",
            f"an epoch is {steps:,.1f} steps of {limit.per_step} {limit.unit}{from_here}",
        ]
    )
    parts = [
        *what,
        f"tokens {min(lengths):,} to {max(lengths):,}, median {statistics.median(lengths):,.0f}",
        *([f"left out: {_reasons([rows])}"] if rows.left_out else []),
        *([f"cut off: {num_cut:,} longer than {limit.field}={limit.max_tokens}"] if num_cut else []),
    ]
    line = f"{'; '.join(parts)} (counted in {seconds:.1f} s)"
    if num_usable < (1 - LOUD_FRAC) * rows.num_wanted:
        line += (
            f"\nwarning: {1 - num_usable / rows.num_wanted:.0%} of the rows of {rows.source.path} are left out; "
            f"{_way_out(lengths, limit)}"
        )
    return line


def _reasons(sources: list[SourceRows]) -> str:
    reasons = [f"{count:,} {why}" for rows in sources for why, count in rows.left_out.items()]
    return ", ".join(reasons) or "none"


def all_too_long(path: str, limit: str, max_tokens: int, lengths: Sequence[int]) -> str:
    """The error message for a data set none of whose rows fits."""
    return (
        f"all {len(lengths)} rows of {path} are longer than {limit}={max_tokens} tokens, "
        f"the shortest has {min(lengths)}; raise {limit} to at least {min(lengths)}"
    )
