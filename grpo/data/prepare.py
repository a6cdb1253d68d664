"""Before a run: load the rows of every source, encode them once, keep those that can be used, say why others cannot.

What is left out is told with numbers; where next to nothing would be left, the run is refused. Held-out rows, on which
GRPO is evaluated and SFT validated, go the same way.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo.config import DataConfig, EvaluationConfig, GRPOConfig, SFTConfig
from grpo.config.values import Source
from grpo.data.encode import Encoded, EncodedRows, Encoder, Fate, as_prompt, chat_encoder, encode_rows, prompt_encoder
from grpo.data.rows import ABSENT, ChatColumns, chat_reader, detect_format, no_format, row_reader, value_at
from grpo.data.sources import Rows, load_rows
from grpo.text import printable
from grpo.types import Prompt

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

# Rows that are looked at to list the columns there are, and to find out the format of a source.
LISTED_ROWS = 100
# Reasons that a message gives, and rows that it lists for each.
SHOWN_ROWS = 5
# Left out: above the first share a warning, below the second share of rows that are left a refusal.
LOUD_FRAC, LEAST_FRAC = 0.05, 0.01
# The share of rows that a limit should be enough for.
MOST_FRAC = 0.95


# ---------------------------------------------------------------------------------------------------------------------
# Load
# ---------------------------------------------------------------------------------------------------------------------


def load_sources(data: DataConfig) -> list[Rows]:
    """The rows of all sources of `data`; raises what `load_rows` raises, and ValueError if no row has a column."""
    return [_prompt_rows(source, data) for source in data.all_sources]


def load_chat_sources(config: SFTConfig) -> list[Rows]:
    """The rows of all sources for SFT, see `load_sources`; raises ValueError also if they have columns of no format."""
    return [_chat_rows(source, config) for source in config.data.all_sources]


def _prompt_rows(source: Source, data: DataConfig) -> Rows:
    rows = _narrowed(load_rows(source), data, [data.prompt_column, *data.reward_columns.values()])
    return dataclasses.replace(rows, read=row_reader(data))


def _chat_rows(source: Source, config: SFTConfig) -> Rows:
    """The format of the rows, unless it is given, is that of the first rows for all of a source."""
    rows, columns, row_format = load_rows(source), ChatColumns.of(config), config.row_format
    if not config.data.row:
        found = detect_format(itertools.islice(rows, LISTED_ROWS), columns)
        if row_format == "auto":
            row_format = found
            if row_format is None:
                raise ValueError(f"{source.path}: {no_format(_names(rows), columns)}")
            needed = " and ".join(columns.of_format[row_format])
            print(printable(f"data: {source.path} has {needed}, so its row_format is {row_format}"), flush=True)
        way_out = f"take --row-format {found}, which the columns fit, or " if found not in (None, row_format) else ""
        flags = {columns.completion: "--completion-column"}
        rows = _narrowed(
            rows,
            config.data,
            columns.of_format[row_format],
            ["input", "system", "history", columns.tools],
            flags,
            way_out,
        )
    return dataclasses.replace(rows, read=chat_reader(config, row_format))


def _narrowed(
    rows: Rows,
    data: DataConfig,
    paths: Sequence[str],
    optional: Sequence[str] = (),
    more_flags: Mapping[str, str] | None = None,
    way_out: str = "",
) -> Rows:
    """The rows with these columns only; `data.row` gets all.

    more_flags: of columns that `data` does not name. way_out: what may help besides. Raises ValueError if no row has
    one of `paths`.
    """
    if data.row:
        return rows
    paths = [path for path in (*paths, data.tools_column) if path]
    narrowed = rows.narrowed([*paths, *optional])
    flags = {path: f"--data.{name.replace('_', '-')}" for name, path in vars(data).items() if name.endswith("_column")}
    flags |= dict.fromkeys(data.columns.values(), "--data.columns") | dict(more_flags or {})
    for path in paths:
        if all(value_at(row, path, ABSENT) is ABSENT for row in narrowed):
            raise ValueError(
                f"column {path!r} is missing in {rows.source.path}; columns there: {', '.join(_names(rows))}; "
                + way_out
                + (f"name one of them with {flags[path]}, or " if path in flags else "")
                + "make other rows of them with --data.row"
            )
    return narrowed


def _names(rows: Rows) -> list[str]:
    """The columns of the first rows, entries of tables as paths."""
    there: dict[str, None] = {}
    for row in itertools.islice(rows, LISTED_ROWS):
        for name, value in row.items():
            there |= dict.fromkeys([f"{name}.{key}" for key in value] if isinstance(value, dict) else [str(name)])
    return list(there)


def reward_columns(sources: list[Rows]) -> list[str] | None:
    """The columns that the rewards get, as the first row of each source has them; None if no row gives any.

    Raises ValueError if sources differ in them, which `data.row` may cause.
    """
    firsts = {rows.source.path: next(rows.examples(), None) for rows in sources}
    names = {path: list(first.columns) for path, first in firsts.items() if first}
    if len(set(map(frozenset, names.values()))) > 1:
        told = "; ".join(f"{', '.join(columns) or 'none'} for {path}" for path, columns in names.items())
        raise ValueError(f"data.row gives the columns {told}; give the same for all sources")
    return next(iter(names.values()), None)


def texts_of(sources: list[Rows]) -> Iterator[str]:
    """All texts of all rows that can be used, as they come."""
    return (text for rows in sources for example in rows.examples() for text in example.texts)


# ---------------------------------------------------------------------------------------------------------------------
# Encode, keep
# ---------------------------------------------------------------------------------------------------------------------


def usable_prompts(
    sources: list[Rows],
    config: GRPOConfig,
    tokenizer: "PreTrainedTokenizerBase",
    tools: Mapping[str, list[dict[str, Any]]] | None = None,
    vocab_size: int | None = None,
) -> list[EncodedRows]:
    """The sources as prompts, without those that are too long; prints what is left.

    tools: of each environment, JSON schemas, which the chat template shows to the model. vocab_size: tokens that the
    model has; a row with another one cannot be used. Raises ValueError if rows cannot be used and `data.bad_rows` is
    refuse, or if next to nothing is left.
    """
    encoder = prompt_encoder(tokenizer, config.data, tools, config.algorithm.teacher_template, vocab_size)
    return _training_rows(sources, encoder, config.prompts_per_step)


def usable_chats(
    sources: list[Rows], config: SFTConfig, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None
) -> list[EncodedRows]:
    """The sources as examples of SFT, see `usable_prompts`; left out are also those of which no token is a label."""
    return _training_rows(sources, chat_encoder(tokenizer, config, vocab_size), config.sequences_per_step)


def load_eval_prompts(
    data: DataConfig,
    evaluation: EvaluationConfig,
    tokenizer: "PreTrainedTokenizerBase",
    tools: Mapping[str, list[dict[str, Any]]] | None = None,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """The first `evaluation.num_prompts` usable prompts of each held-out set, in its order; prints how many.

    Prompt.index counts on from 0 through all sets, Prompt.source is the set's name. Raises what `usable_prompts` does.
    """
    prompts, encoder = [], prompt_encoder(tokenizer, data, tools, vocab_size=vocab_size)
    for source in evaluation.held_out(data):
        _warn_of_training_data(source, data, evaluation.section)
        rows = _usable(_prompt_rows(source, data), encoder, "held out", evaluation.num_prompts)
        prompts += [as_prompt(rows.get(row), n, row, source.label) for n, row in enumerate(rows.usable, len(prompts))]
    return prompts


def load_validation(
    config: SFTConfig, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None
) -> dict[str, list[Encoded]]:
    """Name of each held-out set (empty if there is one) -> the first `validation.num_examples` of its usable rows.

    It prints how many there are, and raises what `usable_chats` raises.
    """
    sets, validation, encoder = {}, config.validation, chat_encoder(tokenizer, config, vocab_size)
    for source in validation.held_out(config.data):
        _warn_of_training_data(source, config.data, validation.section)
        rows = _usable(_chat_rows(source, config), encoder, "held out", validation.num_examples)
        sets[source.label] = [rows.get(row) for row in rows.usable]
    return sets


def _warn_of_training_data(source: Source, data: DataConfig, called: str) -> None:
    """Warn of held-out rows that are trained on; two parts of one split were written by a user to keep them apart."""
    split, _, part = source.split.partition("[")
    for training in data.all_sources:
        its_split, _, its_part = training.split.partition("[")
        same_data = (source.path, source.name) == (training.path, training.name)
        same_split = source.is_file or split == its_split
        if same_data and same_split and (not part or not its_part or part == its_part):
            print(f"warning: {called} uses the training data {source.path}; set {called}.path", flush=True)


def _training_rows(sources: list[Rows], encoder: Encoder, per_step: int) -> list[EncodedRows]:
    """Each source encoded. per_step: rows that a step draws from all of them."""
    share = per_step / sum(rows.source.weight for rows in sources)
    found = [_usable(rows, encoder, "data", per_step=share * rows.source.weight) for rows in sources]
    num_left = sum(len(rows.usable) for rows in found)
    if num_left < per_step:
        print(f"warning: a step of {per_step} rows takes each of {num_left} several times", flush=True)
    return found


def _usable(rows: Rows, encoder: Encoder, what: str, most: int | None = None, per_step: float = 0.0) -> EncodedRows:
    """A source encoded, with its first `most` usable rows; prints a line about it, which begins with `what`.

    per_step: rows of this source in a step, 0 for held-out rows. Raises ValueError if there are rows that cannot be
    used and `data.bad_rows` is refuse, or if too few are left.
    """
    source, data, table = rows.source, encoder.data, encode_rows(rows, encoder)
    fates, reasons = table.data.column("fate").to_numpy().copy(), table.data.column("reason")
    bad = np.flatnonzero(fates == Fate.BAD).tolist()
    odd = _odd_kinds(table)
    fates[list(odd)] = Fate.BAD
    if bad or odd:
        _refuse_or_warn(odd | {row: reasons[row].as_py() for row in bad}, len(table), source, data)
    counts = Counter(fates.tolist())
    causes = {
        Fate.DROPPED: f"left out by {data.row}",
        Fate.BAD: "that cannot be used",
        Fate.UNLABELLED: "without a token to learn",
        Fate.TOO_LONG: f"longer than {encoder.limit}",
    }
    left_out = ", ".join(f"{counts[fate]:,} {why}" for fate, why in causes.items() if counts[fate])
    usable = np.flatnonzero(fates == Fate.USED).tolist()
    lengths = table.data.column("num_tokens").to_numpy()[np.isin(fates, (Fate.USED, Fate.TOO_LONG))]
    sizes = ""
    if len(lengths):
        most_fit = np.quantile(lengths, MOST_FRAC, method="lower")
        sizes = f"tokens {min(lengths):,} to {max(lengths):,}, median {np.median(lengths):,.0f}, "
        sizes += f"{MOST_FRAC:.0%} have at most {most_fit:,}"
    num_wanted = len(table) - counts[Fate.DROPPED]  # those that `data.row` left out were meant so
    if len(usable) < max(1, LEAST_FRAC * num_wanted):
        told = f"{len(usable)} of {len(table)} rows of {source.path} are left: {left_out}"
        raise ValueError("; ".join(filter(None, (told, sizes, "correct them, raise the limit or bring others"))))
    num_cut = int((lengths > encoder.max_tokens).sum()) if encoder.truncates else 0
    loud = "warning: " if len(usable) < (1 - LOUD_FRAC) * num_wanted else ""
    parts = [
        f"{loud}{what}: {len(usable[:most]):,} of {len(table):,} rows of {source.name_and_text}",
        f"an epoch is {len(usable) / per_step:,.1f} steps" if per_step else "",
        sizes,
        f"left out: {left_out}" if left_out else "",
        f"cut off: {num_cut:,} longer than {encoder.limit}" if num_cut else "",
    ]
    print(printable("; ".join(filter(None, parts))), flush=True)
    notes = table.data.column("notes").take(usable).to_pylist()
    for note, count in Counter(itertools.chain(*notes)).items():
        print(printable(f"warning: {count:,} of {len(usable):,} rows of {source.name_and_text} {note}"), flush=True)
    return EncodedRows(source, table, usable[:most], left_out)


def _odd_kinds(table: "datasets.Dataset") -> dict[int, str]:
    """Rows whose columns, or kinds of values in them, are others than in most rows -> why.

    A reward would meet them in the middle of a run.
    """
    kinds = table.data.column("kinds").to_pylist()
    usual = Counter(filter(None, kinds)).most_common(1)
    return {
        row: f"its columns are {those}, and in most rows {usual[0][0]}"
        for row, those in enumerate(kinds)
        if those and those != usual[0][0]  # rows that cannot be used have none
    }


def _refuse_or_warn(unusable: dict[int, str], num_rows: int, source: Source, data: DataConfig) -> None:
    """Raise ValueError about rows that cannot be used (index -> why), or warn of them if `data.bad_rows` is skip."""
    rows_by_reason: dict[str, list[int]] = {}
    for row, why in sorted(unusable.items()):
        rows_by_reason.setdefault(why, []).append(row + 1)
    shown = [
        f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:SHOWN_ROWS]))}{', ..' * (len(rows) > SHOWN_ROWS)}: {why}"
        for why, rows in itertools.islice(rows_by_reason.items(), SHOWN_ROWS)
    ]
    more = ["and other reasons"] if len(rows_by_reason) > SHOWN_ROWS else []
    told = (
        f"{len(unusable)} of {num_rows} rows of {source.path} cannot be used: {'; '.join(shown + more)} (counted from "
        "1, without blank lines)"
    )
    if data.bad_rows == "refuse":
        raise ValueError(f"{told}; correct them, name other columns, or leave them out with --data.bad-rows skip")
    print(printable(f"warning: {told}; they are left out"), flush=True)
