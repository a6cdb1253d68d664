"""Before a run: load the rows of every source, encode them once, keep those that can be used, say why others cannot.

What is left out is told with numbers; where next to nothing would be left, the run is refused. Held-out rows, on which
GRPO is evaluated and SFT validated, go the same way.
"""

import dataclasses
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo.config import DataConfig, EvaluationConfig, GRPOConfig, RowFormat, SFTConfig
from grpo.config.sources import Source
from grpo.data.columns import ABSENT, BadRow, Row, value_at
from grpo.data.encode import (
    ChatEncoder,
    EncodedRows,
    Encoder,
    Fate,
    Labelled,
    PromptEncoder,
    as_labelled,
    as_prompt,
    as_table,
    encode_rows,
)
from grpo.data.report import Limit, reasons, refuse_too_few, refuse_unusable, report, warn_of_few
from grpo.data.rows import ChatColumns, Example, RowReader, chat_reader, detect_format, no_format, row_reader
from grpo.data.sources import Rows, no_rows
from grpo.data.streaming import read_rows
from grpo.text import printable
from grpo.types import Prompt

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

# Rows that are looked at to list the columns there are, and to find out the format of a source.
LISTED_ROWS = 100


@dataclasses.dataclass(frozen=True)
class SourceRows:
    """The rows of a source as they are there; of one that is streamed, the first."""

    source: Source
    rows: Rows | list[Row]
    read: RowReader
    row_format: RowFormat = "auto"
    """Of chats."""

    def examples(self) -> Iterator[Example]:
        """What the rows give, as they come; those that cannot be used give nothing."""
        for row in self.rows:
            try:
                example = self.read(row)
            except BadRow:
                continue
            if example is not None:
                yield example


# ---------------------------------------------------------------------------------------------------------------------
# Load
# ---------------------------------------------------------------------------------------------------------------------


def load_sources(data: DataConfig) -> list[SourceRows]:
    """The rows of all sources of `data`; raises what `read_rows` raises, and ValueError if a table has no such column.

    Of sources that are streamed, they are the first rows.
    """
    return [_prompt_rows(source, data) for source in data.all_sources]


def load_chat_sources(config: SFTConfig) -> list[SourceRows]:
    """The rows of all sources for SFT, see `load_sources`; raises ValueError also if they have columns of no format."""
    return [_chat_rows(source, config) for source in config.data.all_sources]


def _prompt_rows(source: Source, data: DataConfig, held_out: int = 0) -> SourceRows:
    rows = read_rows(source, data, held_out)
    paths = [data.prompt_column, *data.reward_columns.values(), data.tools_column]
    return SourceRows(source, _narrowed(rows, [path for path in paths if path], [], data, source), row_reader(data))


def _chat_rows(source: Source, config: SFTConfig, held_out: int = 0) -> SourceRows:
    """The format of the rows, unless it is given, is that of the first rows for all of a source."""
    data, columns, row_format = config.data, ChatColumns.of(config), config.row_format
    rows = read_rows(source, data, held_out)
    if row_format == "auto" and not data.row:
        row_format = detect_format(itertools.islice(rows, LISTED_ROWS), columns)
        if row_format is None:
            raise ValueError(f"{source.path}: {no_format(_names(rows), columns)}")
        needed = " and ".join(columns.needed(row_format))
        print(printable(f"data: {source.path} has {needed}, so its row_format is {row_format}"), flush=True)
    if not data.row:
        rows = _narrowed(rows, columns.needed(row_format), ["input", columns.tools], data, source)
    return SourceRows(source, rows, chat_reader(config, row_format), row_format)


def _narrowed(
    rows: Rows | list[Row], paths: Sequence[str], optional: list[str], data: DataConfig, source: Source
) -> Rows | list[Row]:
    """A table with only the columns that are used; JSON, streams and what `data.row` gets stay as they are."""
    if not isinstance(rows, Rows) or rows.is_json or data.row:
        return rows
    there = rows.table.column_names
    columns = {path: path if path in there else path.partition(".")[0] for path in (*paths, *optional)}
    for path in dict.fromkeys(paths):
        if columns[path] not in there:
            raise _no_column(path, source, rows)
    return rows.narrowed(column for column in columns.values() if column in there)


def _no_column(path: str, source: Source, rows: Rows | list[Row]) -> ValueError:
    return ValueError(
        f"column {path!r} is missing in {source.path}; columns there: {', '.join(_names(rows)) or 'none'}"
    )


def _names(rows: Rows | list[Row]) -> list[str]:
    """The columns of the first rows, entries of tables as paths."""
    there: dict[str, None] = {}
    for row in itertools.islice(rows, LISTED_ROWS):
        for name, value in row.items():
            there |= dict.fromkeys([f"{name}.{key}" for key in value] if isinstance(value, dict) else [str(name)])
    return list(there)


def reward_columns(sources: list[SourceRows]) -> list[str] | None:
    """The columns that the rewards get, as the first row of each source has them; None if no row gives any.

    Raises ValueError if sources differ in them, which `data.row` may cause.
    """
    firsts = {rows.source.path: next(rows.examples(), None) for rows in sources}
    names = {path: list(first.columns) for path, first in firsts.items() if first}
    for path, columns in names.items():
        first = next(iter(names))
        if set(columns) != set(names[first]):
            raise ValueError(
                f"data.row gives the columns {', '.join(columns) or 'none'} for {path}, and "
                f"{', '.join(names[first]) or 'none'} for {first}; give the same for all sources"
            )
    return next(iter(names.values()), None)


def texts_of(sources: list[SourceRows]) -> Iterator[str]:
    """All texts of all rows that can be used, as they come."""
    for rows in sources:
        for example in rows.examples():
            yield from example.texts


# ---------------------------------------------------------------------------------------------------------------------
# Encode, keep
# ---------------------------------------------------------------------------------------------------------------------


def usable_prompts(
    sources: list[SourceRows], config: GRPOConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[EncodedRows]:
    """The sources as prompts, without those that are too long; prints what is left.

    Raises ValueError if rows cannot be used and `data.bad_rows` is refuse, or if next to nothing is left.
    """
    data = config.data
    limit = Limit("data.max_prompt_tokens", data.max_prompt_tokens, config.prompts_per_step, "prompts", False, data)
    return _usable([(rows, PromptEncoder(tokenizer, data)) for rows in sources], limit)


def usable_chats(
    sources: list[SourceRows], config: SFTConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[EncodedRows]:
    """The sources as examples of SFT, see `usable_prompts`; left out are also those of which no token is a label."""
    truncates, data = config.too_long == "truncate", config.data
    limit = Limit(
        "max_sequence_tokens", config.max_sequence_tokens, config.sequences_per_step, "sequences", truncates, data
    )
    return _usable([(rows, ChatEncoder(tokenizer, config, rows.row_format)) for rows in sources], limit)


def _usable(sources: list[tuple[SourceRows, Encoder]], limit: Limit) -> list[EncodedRows]:
    """Each source encoded, with a line about it; raises ValueError if too few rows are left, see `Limit`."""
    found, total_weight = [], sum(rows.source.weight for rows, _ in sources)
    for rows, encoder in sources:
        start = time.monotonic()
        encoded = _encoded(rows, encoder, limit)
        refuse_too_few(encoded, limit)
        share = rows.source.weight / total_weight
        print(printable(report(encoded, limit, share, time.monotonic() - start)), flush=True)
        found.append(encoded)
    if not limit.data.streaming:
        warn_of_few(found, limit)
    return found


def _encoded(rows: SourceRows, encoder: Encoder, limit: Limit) -> EncodedRows:
    """All rows of a source as tokens, and what becomes of them.

    Raises ValueError if no row has one of the columns, if there are rows that cannot be used and `data.bad_rows` is
    refuse, or if no row can be.
    """
    source, data = rows.source, encoder.data
    is_table = isinstance(rows.rows, Rows)
    table = encode_rows(rows.rows, encoder) if is_table else as_table(encoder.encode(rows.rows))
    if len(table) == 0:
        raise no_rows(source)
    fates = table.data.column("fate").to_numpy().copy()
    _check_columns(rows, table, fates, data)
    unusable = {}
    for row in np.flatnonzero((fates == Fate.BAD) | (fates == Fate.REFUSED)).tolist():
        unusable[row] = table.data.column("reason")[row].as_py()
    odd = _odd_kinds(table)
    fates[list(odd)] = Fate.BAD
    unusable = dict(sorted((unusable | odd).items()))
    is_left = np.isin(fates, (Fate.USED, Fate.TOO_LONG, Fate.UNLABELLED)).any()
    refuse_unusable(unusable, len(table), source.path, data.bad_rows, some_left=bool(is_left))
    counts = Counter(fates.tolist())
    if not is_left:
        raise ValueError(f"data.row={data.row} left out all {len(table)} rows of {source.path}; let it return a dict")
    left_out = {
        f"left out by {data.row}": counts[Fate.DROPPED],
        "that cannot be used": counts[Fate.BAD],
        "that the chat template refuses": counts[Fate.REFUSED],
        "without a token to learn": counts[Fate.UNLABELLED],
        f"longer than {limit.field}={limit.max_tokens}": counts[Fate.TOO_LONG],
    }
    return EncodedRows(
        source,
        table,
        encoder,
        usable=np.flatnonzero(fates == Fate.USED).tolist(),
        lengths=table.data.column("num_tokens").to_numpy()[np.isin(fates, (Fate.USED, Fate.TOO_LONG))],
        left_out={why: count for why, count in left_out.items() if count},
        num_wanted=len(table) - counts[Fate.DROPPED],
    )


def _check_columns(rows: SourceRows, table: "datasets.Dataset", fates: np.ndarray, data: DataConfig) -> None:
    """Raise ValueError if no row has one of the columns."""
    import pyarrow.compute as pc

    if (fates == Fate.BAD).all():
        paths = pc.unique(table.data.column("absent")).to_pylist()
        if paths != [""] and len(paths) == 1:
            raise _no_column(paths[0], rows.source, rows.rows)
    if data.tools_column and not data.row and not pc.any(table.data.column("has_tools")).as_py():
        some = itertools.islice(rows.rows, LISTED_ROWS)
        if (fates != Fate.BAD).any() and all(value_at(row, data.tools_column, ABSENT) is ABSENT for row in some):
            raise _no_column(data.tools_column, rows.source, rows.rows)


def _odd_kinds(table: "datasets.Dataset") -> dict[int, str]:
    """Rows whose columns are others than the first row's, or hold other kinds of values than most rows -> why.

    A reward would meet them in the middle of a run.
    """
    import pyarrow.compute as pc

    column = table.data.column("kinds")
    counts = {item["values"].as_py(): item["counts"].as_py() for item in pc.value_counts(column)}
    kinds_of = {text: json.loads(text) for text in counts if text}
    first = next(iter(kinds_of.values()), {})
    usual: dict[str, Counter] = defaultdict(Counter)
    for text, kinds in kinds_of.items():
        if kinds.keys() == first.keys():
            for name, kind in kinds.items():
                usual[name][kind] += counts[text]
    odd = {}
    for text, kinds in kinds_of.items():
        others = [name for name, kind in kinds.items() if name in usual and kind != usual[name].most_common(1)[0][0]]
        if kinds.keys() != first.keys():
            why = f"data.row gave the columns {', '.join(kinds) or 'none'}, and before {', '.join(first) or 'none'}"
        elif others:
            name = others[-1]
            why = f"column {name!r} holds {kinds[name]}, and in most rows {usual[name].most_common(1)[0][0]}"
        else:
            continue
        odd |= dict.fromkeys(np.flatnonzero(pc.equal(column, text).to_numpy()).tolist(), why)
    return odd


# ---------------------------------------------------------------------------------------------------------------------
# Held-out rows
# ---------------------------------------------------------------------------------------------------------------------


def load_eval_prompts(
    data: DataConfig, evaluation: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[Prompt]:
    """The first `evaluation.num_prompts` prompts of each held-out set that fit, in its order; prints how many.

    Fewer if the set has fewer. Prompt.index counts on from 0 through all sets, Prompt.source is the set's name.
    Raises ValueError if rows cannot be used and `data.bad_rows` is refuse, or if none of a set fits.
    """
    prompts = []
    for source in evaluation.held_out(data):
        _warn_of_training_data(source, data, evaluation.section)
        limit = Limit("data.max_prompt_tokens", data.max_prompt_tokens, 1, "held-out prompts", False, data)
        encoder = PromptEncoder(tokenizer, data)
        rows = _held_out(_prompt_rows(source, data, evaluation.num_prompts), encoder, limit, evaluation.num_prompts)
        prompts += [as_prompt(rows.get(row), n, row, source.label) for n, row in enumerate(rows.usable, len(prompts))]
    return prompts


def load_validation(config: SFTConfig, tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[Labelled]]:
    """Name of each held-out set (empty if there is one) -> the first `validation.num_examples` of its usable rows.

    Left out, as in training, are those without a label, and too long ones if `too_long` says so. Prints how many
    there are, and raises what `load_eval_prompts` raises.
    """
    sets, most = {}, config.validation.num_examples
    for source in config.validation.held_out(config.data):
        _warn_of_training_data(source, config.data, config.validation.section)
        limit = Limit("max_sequence_tokens", config.max_sequence_tokens, 1, "held-out examples", False, config.data)
        loaded = _chat_rows(source, config, most)
        rows = _held_out(loaded, ChatEncoder(tokenizer, config, loaded.row_format), limit, most)
        sets[source.label] = [as_labelled(rows.get(row)) for row in rows.usable]
    return sets


def _held_out(rows: SourceRows, encoder: Encoder, limit: Limit, most: int) -> EncodedRows:
    """The first `most` usable rows."""
    encoded = _encoded(rows, encoder, limit)
    refuse_too_few(encoded, limit, least_frac=0.0)
    used, source = encoded.usable[:most], rows.source
    print(f"held out: {len(used):,} of {len(encoded.table):,} rows of {source.name_and_text}", flush=True)
    if left_out := encoded.num_wanted - len(encoded.usable):
        print(f"warning: {left_out:,} {limit.unit} of {source.path} were left out: {reasons([encoded])}", flush=True)
    return dataclasses.replace(encoded, usable=used)


def _warn_of_training_data(source: Source, data: DataConfig, called: str) -> None:
    if any(_may_overlap(source, training) for training in data.all_sources):
        print(f"warning: {called} uses the training data {source.path}; set {called}.path", flush=True)


def _may_overlap(one: Source, other: Source) -> bool:
    """Whether both have rows of one split, except two different parts of it, which a user wrote to keep them apart."""
    (split, _, part), (other_split, _, other_part) = one.split.partition("["), other.split.partition("[")
    same_rows = (one.path, one.name) == (other.path, other.name) and (one.is_file or split == other_split)
    return same_rows and (not part or not other_part or part == other_part)
