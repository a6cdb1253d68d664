"""Load the rows of every source, encode them once, keep those that can be used, and say why others cannot.

What is left out is printed with numbers. If next to nothing would be left, the run is refused. Held-out rows, on which
GRPO is evaluated and SFT validated, go the same way.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grpo.config import DataConfig, EvaluationConfig, HeldOutConfig, RowFormat, ValidationConfig
from grpo.config.values import Source
from grpo.data.encode import (
    Encoded,
    EncodedRows,
    Encoder,
    RowStatus,
    encode_rows,
    key_of,
)
from grpo.data.rows import (
    ABSENT,
    ChatColumns,
    chat_reader,
    detect_format,
    no_format,
    row_reader,
    value_at,
)
from grpo.data.sources import Rows, load_rows
from grpo.text import printable
from grpo.types import Prompt

Sources = list[Rows]
# First rows of a source, from which its columns and its format are found out
LISTED_ROWS = 100
# Reasons that a message gives
SHOWN_REASONS = 5
# The line about a source is a warning if a larger share of rows is left out.
WARNED_FRAC = 0.05
# The run is refused if a smaller share of rows is left.
MIN_FRAC = 0.01
# The share of rows for which the line about a source says how many tokens they have at most
LISTED_QUANTILE = 0.95


# ---------------------------------------------------------------------------------------------------------------------
# Load
# ---------------------------------------------------------------------------------------------------------------------


def load_sources(data: DataConfig) -> Sources:
    """Load the rows of all sources of `data`. Raises what `load_rows` raises, and ValueError if no row has a column."""
    return [_prompt_rows(source, data) for source in data.all_sources]


def load_chat_sources(data: DataConfig, row_format: RowFormat, completion_column: str) -> Sources:
    """Load the rows of all sources for SFT, see `load_sources`. Raises ValueError if their columns are no format."""
    return [_chat_rows(source, data, row_format, completion_column) for source in data.all_sources]


def _prompt_rows(source: Source, data: DataConfig) -> Rows:
    """Load the rows of a source as prompts."""
    rows = load_rows(source)
    if not data.row:  # which gets all columns
        paths = [data.prompt_column, *data.reward_columns.values()]
        if data.tools_column:
            paths.append(data.tools_column)
        rows = _with_columns(rows, paths)
    return dataclasses.replace(rows, read=row_reader(data))


def _chat_rows(
    source: Source,
    data: DataConfig,
    row_format: RowFormat,
    completion_column: str,
) -> Rows:
    """Load the rows of a source as chats. The first rows decide about the format, if none is configured."""
    rows = load_rows(source)
    columns = ChatColumns.of(data, completion_column)
    if not data.row:
        if row_format == "auto":
            row_format = detect_format(itertools.islice(rows, LISTED_ROWS), columns)
            if row_format is None:
                raise ValueError(f"{source.path}: {no_format(_names(rows), columns)}")
            needed = " and ".join(columns.of_format[row_format])
            print(printable(f"data: {source.path} has {needed}, so its row_format is {row_format}"))
        paths = list(columns.of_format[row_format])
        if data.tools_column:
            paths.append(data.tools_column)
        others = [columns.tools]
        if row_format == "alpaca":
            others += ["input", "system", "history"]
        rows = _with_columns(rows, paths, others)
    return dataclasses.replace(rows, read=chat_reader(data.row, row_format, columns))


def _with_columns(rows: Rows, paths: Sequence[str], others: Sequence[str] = ()) -> Rows:
    """Return the rows with `paths` and `others` alone. Raises ValueError if no row has one of `paths`."""
    narrowed = rows.narrowed([*paths, *others])
    for path in paths:
        if all(value_at(row, path, ABSENT) is ABSENT for row in narrowed):
            raise ValueError(
                f"column {path!r} is missing in {rows.source.path}; columns there: {', '.join(_names(rows))}; name one "
                'of them with --data.prompt-column, --data.answer-column ("" for none), --data.columns or another '
                "field, in SFT also --completion-column or --row-format, or make other rows of them with --data.row"
            )
    return narrowed


def _names(rows: Rows) -> list[str]:
    """List the columns of the first rows."""
    first_rows = itertools.islice(rows, LISTED_ROWS)
    return list(dict.fromkeys(itertools.chain(*first_rows)))  # a dict, because a set has no fixed order


def first_columns(sources: Sources) -> list[dict[str, Any]]:
    """Return the columns that rewards get, of the first row of each source that can be used.

    Raises ValueError if sources differ in them, which `data.row` may cause.
    """
    columns_by_path = {}
    for rows in sources:
        for example in itertools.islice(rows.examples(), 1):
            columns_by_path[rows.source.path] = example.columns
    found = list(columns_by_path.values())
    if len({frozenset(columns) for columns in found}) > 1:
        names = {path: list(columns) for path, columns in columns_by_path.items()}
        raise ValueError(f"data.row gives the columns {names}; give the same for all sources")
    return found


def texts_of(sources: Sources) -> Iterator[str]:
    """Yield all texts of all rows that can be used."""
    for rows in sources:
        for example in rows.examples():
            yield from example.texts


# ---------------------------------------------------------------------------------------------------------------------
# Encode, keep
# ---------------------------------------------------------------------------------------------------------------------


def encode_sources(sources: Sources, encoder: Encoder) -> list[EncodedRows]:
    """Encode the sources, and print how many rows can be used.

    Raises ValueError if rows cannot be used and `data.bad_rows` is refuse, or if next to nothing is left.
    """
    return [_encode_usable(rows, encoder) for rows in sources]


def load_held_out(section: HeldOutConfig, encoder: Encoder, max_rows: int) -> Iterator[EncodedRows]:
    """Yield the first usable rows of each held-out set, and print how many there are. Raises as `encode_sources` does.

    A ValueError about rows that cannot be read names the section, since they may be the recipe's.
    """
    for source in section.held_out(encoder.data):
        try:
            if encoder.train_on:
                rows = _chat_rows(source, encoder.data, encoder.row_format, encoder.completion_column)
            else:
                rows = _prompt_rows(source, encoder.data)
        except (ValueError, OSError) as error:
            raise ValueError(f"{section.section}.path: {error}") from error
        yield _encode_usable(rows, encoder, max_rows=max_rows)


def load_eval_prompts(evaluation: EvaluationConfig, encoder: Encoder) -> list[Prompt]:
    """Return the first `num_prompts` usable prompts of each held-out set, see `load_held_out`.

    Prompt.index counts from 0 through all sets; Prompt.source is the set's name.
    """
    prompts = []
    for rows in load_held_out(evaluation, encoder, evaluation.num_prompts):
        for row in rows.usable:
            prompts.append(rows.prompt(row, len(prompts)))
    return prompts


def load_validation(validation: ValidationConfig, encoder: Encoder) -> dict[str, list[Encoded]]:
    """Return the first `num_examples` usable rows of each held-out set, see `load_held_out`.

    A set's name is empty if it is the only one.
    """
    sets = load_held_out(validation, encoder, validation.num_examples)
    return {rows.source.label: [rows.get(row) for row in rows.usable] for rows in sets}


def warn_of_repeated_rows(section: str, held_out: Sequence[Sequence[int]], training: Sequence[EncodedRows]) -> None:
    """Warn of held-out rows that are trained on under whatever name. held_out: the token ids of each."""
    keys = [key_of(ids) for ids in held_out]
    trained = np.concatenate([rows.keys for rows in training])
    num_repeated = int(np.isin(keys, trained).sum())
    if num_repeated:
        print(
            f"warning: {num_repeated:,} of {len(keys):,} held-out rows of {section} are trained on too; leave them out "
            "of the training data (data.row), or out of what is held out"
        )


def _encode_usable(rows: Rows, encoder: Encoder, max_rows: int | None = None) -> EncodedRows:
    """Encode a source, keep its first `max_rows` usable rows, and print a line about it.

    max_rows: None for rows that are trained on. Raises ValueError if there are rows that cannot be used and
    `data.bad_rows` is refuse, or if too few are left.
    """
    source = rows.source
    table = encode_rows(rows, encoder)
    statuses = table.data.column("status").to_numpy()
    reasons = table.data.column("reason")
    bad_rows = {row: reasons[row].as_py() for row in np.flatnonzero(statuses == RowStatus.BAD).tolist()}
    if bad_rows:
        _refuse_or_warn(bad_rows, len(table), source, encoder.data)

    counts = Counter(statuses.tolist())
    causes = {
        RowStatus.DROPPED: f"left out by {encoder.data.row}",
        RowStatus.BAD: "that cannot be used",
        RowStatus.UNLABELLED: "without a token to learn",
        RowStatus.TOO_LONG: f"longer than {encoder.limit}",
    }
    left_out = ", ".join(f"{counts[status]:,} {cause}" for status, cause in causes.items() if counts[status])

    usable = np.flatnonzero(statuses == RowStatus.USED).tolist()
    has_length = np.isin(statuses, (RowStatus.USED, RowStatus.TOO_LONG))
    lengths = table.data.column("num_tokens").to_numpy()[has_length]
    sizes = _describe_lengths(lengths)
    num_considered = len(table) - counts[RowStatus.DROPPED]  # `data.row` left the others out on purpose
    if len(usable) < max(1, MIN_FRAC * num_considered):
        raise ValueError(
            f"{len(usable)} of {len(table)} rows of {source.path} are left: {left_out}{sizes}; correct them, raise the "
            "limit or bring others"
        )

    name = "data" if max_rows is None else "held out"
    if len(usable) < (1 - WARNED_FRAC) * num_considered:
        name = f"warning: {name}"
    kept = EncodedRows(source, table, usable[:max_rows])
    rows = f"{source.label} ({source.text})" if source.label else source.text
    line = f"{name}: {len(kept.usable):,} of {len(table):,} rows of {rows}{sizes}"
    num_repeated = len(kept.usable) - len(np.unique(kept.keys))
    if num_repeated:
        line += f"; {num_repeated:,} of them have the tokens of an earlier one"
    if left_out:
        line += f"; left out: {left_out}"
    num_cut = int((lengths > encoder.max_tokens).sum())
    if encoder.truncates and num_cut:
        line += f"; cut off: {num_cut:,} longer than {encoder.limit}"
    print(printable(line))
    return kept


def _describe_lengths(lengths: np.ndarray) -> str:
    """Say how many tokens the rows have; nothing if there are none."""
    if not len(lengths):
        return ""
    quantile = np.quantile(lengths, LISTED_QUANTILE, method="inverted_cdf")  # as many tokens as a row has
    return (
        f"; tokens {min(lengths):,} to {max(lengths):,}, median {np.median(lengths):,.0f}, {LISTED_QUANTILE:.0%} have "
        f"at most {quantile:,}"
    )


def _refuse_or_warn(
    bad_rows: dict[int, str],
    num_rows: int,
    source: Source,
    data: DataConfig,
) -> None:
    """Raise ValueError about rows that cannot be used (index -> reason), or warn of them if `data.bad_rows` is skip."""
    first_rows = {}
    for row, reason in sorted(bad_rows.items()):
        first_rows.setdefault(reason, row)
    reasons = [f"row {row + 1}: {reason}" for reason, row in first_rows.items()]
    if len(reasons) > SHOWN_REASONS:
        reasons[SHOWN_REASONS:] = ["and others"]
    message = (
        f"{len(bad_rows)} of {num_rows} rows of {source.path} cannot be used: {'; '.join(reasons)} (the first of each "
        "kind, counted from 1 without blank lines)"
    )
    if data.bad_rows == "refuse":
        raise ValueError(f"{message}; correct them, name other columns, or leave them out with --data.bad-rows skip")
    print(printable(f"warning: {message}; they are left out"))
