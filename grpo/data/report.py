"""What is told before a run about the rows that are left, and what is refused."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from grpo.config import DataConfig
from grpo.data.encode import EncodedRows
from grpo.text import printable

# Row numbers an error lists before it says "and N more".
SHOWN_ROWS = 5
# Left out: above the first share a warning, below the second share of rows that are left a refusal.
LOUD_FRAC, LEAST_FRAC = 0.05, 0.01
# The share of rows for which a message suggests a limit.
MOST_FRAC = 0.95


@dataclasses.dataclass(frozen=True)
class Limit:
    """The longest that a row may be, and how many rows a step needs."""

    field: str
    max_tokens: int
    per_step: int
    unit: str
    truncates: bool
    """Longer ones are cut off, and not left out."""
    data: DataConfig


def refuse_unusable(unusable: dict[int, str], num_rows: int, where: str, bad_rows: str, some_left: bool) -> None:
    """Warn of rows that cannot be used (index -> why), or raise ValueError if `bad_rows` is refuse or none is left."""
    if not unusable:
        return
    shown = "; ".join(f"row {row + 1}: {why}" for row, why in itertools.islice(unusable.items(), SHOWN_ROWS))
    more = f"; and {len(unusable) - SHOWN_ROWS} more" if len(unusable) > SHOWN_ROWS else ""
    told = f"{len(unusable)} of {num_rows} rows of {where} cannot be used: {shown}{more} (counted from 1, without blank"
    if not some_left:
        raise ValueError(f"{told} lines); no row is left; name other columns or correct the rows")
    if bad_rows == "refuse":
        raise ValueError(f"{told} lines); correct these rows, or leave them out with --data.bad-rows skip")
    print(printable(f"warning: {told} lines); they are left out"), flush=True)


def refuse_too_few(rows: EncodedRows, limit: Limit, least_frac: float = LEAST_FRAC) -> None:
    """Raise ValueError if no row or less than `least_frac` of them is left."""
    path, lengths, field = rows.source.path, rows.lengths, limit.field
    if not len(lengths):
        raise ValueError(
            f"none of {rows.num_wanted} rows of {path} has a token to learn within {field}={limit.max_tokens}; bring "
            f"chats with assistant turns, choose another train_on, or raise {field}"
        )
    if not rows.usable:
        raise ValueError(
            f"all {len(lengths)} rows of {path} are longer than {field}={limit.max_tokens} tokens, "
            f"the shortest has {min(lengths)}; raise {field} to at least {min(lengths)}"
        )
    if len(rows.usable) < least_frac * rows.num_wanted:
        raise ValueError(
            f"{len(rows.usable)} of {rows.num_wanted} rows of {path} are left, less than {least_frac:.0%}: "
            f"{reasons([rows])}; {_way_out(rows, limit)}"
        )


def warn_of_few(sources: Sequence[EncodedRows], limit: Limit) -> None:
    """Warn if a step needs more rows than there are; raise ValueError if it would not if all could be used."""
    num_rows, num_left = sum(rows.num_wanted for rows in sources), sum(len(rows.usable) for rows in sources)
    if num_left < limit.per_step <= num_rows:
        raise ValueError(
            f"{num_left} of {num_rows} rows are left, and a step needs {limit.per_step} {limit.unit}: "
            f"{reasons(sources)}; raise {limit.field}, or bring other rows"
        )
    if num_left < limit.per_step:
        print(
            f"warning: a step of {limit.per_step} {limit.unit} takes each of {num_left} rows several times", flush=True
        )


def report(rows: EncodedRows, limit: Limit, share: float, seconds: float) -> str:
    """One line about a source: rows, steps per epoch, lengths, what is left out; a second one if that is much.

    share: of a step's rows that come from this source.
    """
    num_rows, num_usable, source, lengths = len(rows.table), len(rows.usable), rows.source, rows.lengths
    num_cut = int((lengths > limit.max_tokens).sum()) if limit.truncates else 0
    from_here = f", {share:.0%} of them from here" if source.label else ""
    if limit.data.streaming:
        what = f"is streamed; of its first {num_rows:,} rows {num_usable:,} can be used{from_here}"
    else:
        steps = num_usable / (limit.per_step * share)
        what = f"has {num_rows:,} rows, {num_usable:,} are used; an epoch is {steps:,.1f} steps of {limit.per_step} "
        what += f"{limit.unit}{from_here}"
    parts = [
        f"data: {source.name_and_text} {what}",
        f"tokens {min(lengths):,} to {max(lengths):,}, median {np.median(lengths):,.0f}",
        *([f"left out: {reasons([rows])}"] if rows.left_out else []),
        *([f"cut off: {num_cut:,} longer than {limit.field}={limit.max_tokens}"] if num_cut else []),
    ]
    line = f"{'; '.join(parts)} (encoded in {seconds:.1f} s)"
    if num_usable < (1 - LOUD_FRAC) * rows.num_wanted:
        share_out = 1 - num_usable / rows.num_wanted
        line += f"\nwarning: {share_out:.0%} of the rows of {source.path} are left out; {_way_out(rows, limit)}"
    return line


def _way_out(rows: EncodedRows, limit: Limit) -> str:
    enough = sorted(rows.lengths)[int(MOST_FRAC * (len(rows.lengths) - 1))]
    way_out = f"with {limit.field}={enough}, {MOST_FRAC:.0%} of them fit"
    return way_out if enough > limit.max_tokens and not limit.truncates else "correct them"


def reasons(sources: Sequence[EncodedRows]) -> str:
    """Why rows were left out, and how many for each reason."""
    return ", ".join(f"{count:,} {why}" for rows in sources for why, count in rows.left_out.items()) or "none"
