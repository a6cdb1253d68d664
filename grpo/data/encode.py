"""Rows -> token ids, once: each row is read, rendered and tokenized, and what became of it is kept in a table.

The table is the library's (`datasets`): on disk, mapped into memory, made by several processes where there are many
rows. It is kept beside the source's own cache, by a fingerprint of all that it follows from, so that the next start
finds it. Rows that a user's own function made are encoded anew at each start: nobody can see what it depends on.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo.config import DataConfig, RowFormat, SFTConfig
from grpo.config.sources import Source
from grpo.data.bounds import bounded_memory
from grpo.data.chat import Refused, TooLong, render_prompt, tokenize_prompts
from grpo.data.columns import BadRow, Row, kinds_of
from grpo.data.rows import Example, RowReader, chat_reader, row_reader
from grpo.data.sources import Rows
from grpo.data.turns import tokenize_written, write_example
from grpo.types import Prompt

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerBase

# Rows that are rendered and then tokenized together.
BATCH_ROWS = 250
# From so many rows on, one more process for each number of them, up to one per core and MOST_PROCESSES.
ROWS_PER_PROCESS, MOST_PROCESSES = 10_000, 16
# Rows up to this length are counted even where the limit is lower, so that a message can name a better limit.
COUNTED_TOKENS = 4096
# What decides about tokens besides this room's own code.
LIBRARIES = ("datasets", "jinja2", "tokenizers", "transformers")
# Whether tokenizers take all cores; the library turns it off for its processes.
PARALLEL = "TOKENIZERS_PARALLELISM"


class Fate(enum.IntEnum):
    """What became of a row."""

    USED = 0
    DROPPED = 1
    """`data.row` left it out, which was meant so."""
    BAD = 2
    """It does not hold what it must."""
    REFUSED = 3
    """The chat template does not take it."""
    TOO_LONG = 4
    UNLABELLED = 5
    """No token of it is a label."""


@dataclasses.dataclass
class Encoded:
    """One row as tokens, or why it is none."""

    fate: int = Fate.USED
    reason: str = ""
    """Why it is BAD or REFUSED."""
    num_tokens: int = 0
    """All tokens of the row, also of one that is too long or was cut off; perhaps a lower bound there."""
    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    """For each token whether it is a label; empty for prompts."""
    values: str = ""
    """JSON: [the prompt as the data has it, the columns that rewards get]; empty for chats."""
    kinds: str = ""
    """The columns that rewards get with the kinds of their values, see `kinds_of`; empty for chats."""


def features() -> "datasets.Features":
    """The columns of a table of encoded rows, which are the fields of Encoded."""
    from datasets import Features, List, Value

    texts = dict.fromkeys(("reason", "values", "kinds"), Value("large_string"))
    numbers = {"fate": Value("int8"), "num_tokens": Value("int64")}
    lists = {"ids": List(Value("int32")), "mask": List(Value("bool"))}
    types = texts | numbers | lists
    return Features({field.name: types[field.name] for field in dataclasses.fields(Encoded)})


class Encoder:
    """Makes tokens of rows; what GRPO and SFT have in common."""

    limit: str
    """The field that holds `max_tokens`."""
    truncates = False
    """Longer rows are cut off, and not left out."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig, read: RowReader, max_tokens: int, *others: str
    ):
        """others: what else of the config decides about tokens."""
        self.tokenizer, self.data, self.read, self.max_tokens = tokenizer, data, read, max_tokens
        self.counted = max(max_tokens + 1, COUNTED_TOKENS)
        sources = {"path": "", "sources": {}, "weights": {}, "streaming": False}
        what = dataclasses.replace(data, **sources, bad_rows="refuse", shuffle=True)
        self.settings = repr((type(self).__name__, max_tokens, others, what))

    def encode(self, rows: list[Row], bounded: bool = True) -> list[Encoded]:
        """What becomes of each row. Raises ValueError if the chat template does not end.

        bounded: limit the memory of a template, and with it that of all threads of this process.
        """
        found, examples, written = [Encoded() for _ in rows], {}, {}
        for number, (row, encoded) in enumerate(zip(rows, found, strict=True)):
            try:
                if (example := self.read(row)) is None:
                    encoded.fate = Fate.DROPPED
                    continue
                self.keep(encoded, example)
                examples[number] = example
            except BadRow as error:
                encoded.fate, encoded.reason = Fate.BAD, str(error)
        with bounded_memory() if bounded else contextlib.nullcontext():
            for number, example in examples.items():
                try:
                    written[number] = self.write(example)
                except TooLong as error:
                    found[number].fate, found[number].num_tokens = Fate.TOO_LONG, error.num_tokens
                except Refused as error:
                    found[number].fate, found[number].reason = Fate.REFUSED, str(error)
        for number, tokens in zip(written, self.tokenize(list(written.values())), strict=True):
            self.fill_in(found[number], *tokens)
        return found

    def keep(self, encoded: Encoded, example: Example) -> None:
        """Put what is kept of an example besides its tokens into `encoded`."""

    def write(self, example: Example) -> Any:
        """What is to be tokenized; raises TooLong and Refused."""
        raise NotImplementedError

    def tokenize(self, written: list) -> list[tuple]:
        """Tokens of what was written, as `fill_in` takes them."""
        raise NotImplementedError

    def fill_in(self, encoded: Encoded, ids: list[int], mask: list[bool]) -> None:
        """Put tokens into `encoded`, if they are not too many."""
        encoded.num_tokens = len(ids)
        if len(ids) > self.max_tokens:
            encoded.fate = Fate.TOO_LONG
        else:
            encoded.ids, encoded.mask = ids, mask


class PromptEncoder(Encoder):
    """Makes prompts of rows, with the columns that rewards get."""

    limit = "data.max_prompt_tokens"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig):
        super().__init__(tokenizer, data, row_reader(data), data.max_prompt_tokens)

    def keep(self, encoded: Encoded, example: Example) -> None:
        try:
            encoded.values = json.dumps([example.prompt, example.columns])
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(
                f"a column for rewards holds what JSON cannot ({error}); make text of it in data.row"
            ) from error
        encoded.kinds = kinds_of(example.columns)

    def write(self, example: Example) -> str:
        return render_prompt(self.tokenizer, self.data, example.prompt, self.counted, example.tools)

    def tokenize(self, written: list[str]) -> list[tuple[list[int], list[bool]]]:
        return [(ids, []) for ids in tokenize_prompts(self.tokenizer, self.data, written)]


class ChatEncoder(Encoder):
    """Makes examples of rows, whose labels are learned."""

    limit = "max_sequence_tokens"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: SFTConfig, row_format: RowFormat):
        others = (row_format, config.completion_column, config.train_on, config.too_long)
        super().__init__(tokenizer, config.data, chat_reader(config, row_format), config.max_sequence_tokens, *others)
        self.train_on, self.truncates = config.train_on, config.too_long == "truncate"

    def write(self, example: Example) -> Any:
        return write_example(self.tokenizer, self.data, example, self.train_on, self.counted, self.truncates)

    def tokenize(self, written: list) -> list[tuple[list[int], list[bool]]]:
        return tokenize_written(self.tokenizer, written)

    def fill_in(self, encoded: Encoded, ids: list[int], mask: list[bool]) -> None:
        encoded.num_tokens, most = len(ids), self.max_tokens
        if self.truncates:
            encoded.num_tokens, ids, mask = min(len(ids), self.counted), ids[:most], mask[:most]
        if not any(mask) and encoded.num_tokens <= self.counted:
            encoded.fate = Fate.UNLABELLED
        elif len(ids) > most:
            encoded.fate = Fate.TOO_LONG
        else:
            encoded.ids, encoded.mask = ids, mask


# ---------------------------------------------------------------------------------------------------------------------
# All rows of a source
# ---------------------------------------------------------------------------------------------------------------------


def encode_rows(rows: Rows, encoder: Encoder) -> "datasets.Dataset":
    """A table with an Encoded for each row: that of an earlier start, if it followed from the same in the same way.

    Raises ValueError for a line that is not a JSON object, and if the chat template does not end.
    """
    is_own, num_rows = bool(encoder.data.row), len(rows.table)
    num_processes = min(num_rows // ROWS_PER_PROCESS, len(os.sched_getaffinity(0)), MOST_PROCESSES)
    with _told(rows, num_processes := num_processes if num_processes > 1 and not is_own else None):
        return rows.table.map(
            functools.partial(_encode_batch, dataclasses.replace(rows, table=None), encoder),
            batched=True,
            batch_size=BATCH_ROWS,
            with_indices=True,
            remove_columns=rows.table.column_names,
            features=features(),
            num_proc=num_processes,
            load_from_cache_file=not is_own,
            new_fingerprint=_fingerprint(rows, encoder),
        )


def as_table(found: list[Encoded]) -> "datasets.Dataset":
    """The same table of rows that are in memory."""
    import datasets

    return datasets.Dataset.from_dict(_columns(found), features())


def _encode_batch(rows: Rows, encoder: Encoder, batch: dict[str, list], places: list[int]) -> dict[str, list]:
    return _columns(encoder.encode(rows.rows_of(batch, places[0])))


def _columns(found: list[Encoded]) -> dict[str, list]:
    return {name: [getattr(encoded, name) for encoded in found] for name in features()}


def _fingerprint(rows: Rows, encoder: Encoder) -> str:
    """A name for all that the encoded rows follow from; each time another one for a tokenizer that is no fast one."""
    tokenizer = encoder.tokenizer
    own_code = [path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))]
    text = [
        *(rows.table._fingerprint, rows.where, encoder.settings),
        *(type(tokenizer).__name__, tokenizer.name_or_path, str(tokenizer.chat_template)),
        *(repr(tokenizer.special_tokens_map), repr(tokenizer.init_kwargs)),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else os.urandom(16).hex(),
        *(f"{name} {version(name)}" for name in LIBRARIES),
    ]
    return hashlib.sha256(json.dumps(text).encode() + b"".join(own_code)).hexdigest()[:32]


@contextlib.contextmanager
def _told(rows: Rows, num_processes: int | None) -> Iterator[None]:
    """Show how far the encoding of many rows is, to a terminal; clear up after its processes."""
    import datasets

    is_off = datasets.are_progress_bars_disabled()
    if not (num_processes and sys.stderr.isatty()):
        datasets.disable_progress_bars()
    try:
        yield
    except RuntimeError as error:  # of a process that was killed
        if num_processes is None:
            raise
        raise ValueError(
            f"one of {num_processes} processes that encode the rows of {rows.where} died ({error}); is memory short?"
        ) from error
    finally:
        if not is_off:
            datasets.enable_progress_bars()
        if num_processes:  # the library leaves it off for code outside of Python, where tokenizers look
            value = os.environ.get(PARALLEL)
            os.unsetenv(PARALLEL) if value is None else os.putenv(PARALLEL, value)


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EncodedRows:
    """The rows of a source as tokens, and which of them are drawn."""

    source: Source
    table: "datasets.Dataset"
    """An Encoded for each row."""
    encoder: Encoder
    usable: Sequence[int]
    """The rows that are drawn, in the order of the source."""
    lengths: "np.ndarray"
    """int64: tokens of the rows that would be drawn if there were no limit."""
    left_out: str
    """Why rows are left out, with how many."""

    def get(self, row: int) -> Encoded:
        return Encoded(**self.table[row])


class Labelled(NamedTuple):
    """An example of SFT as tokens."""

    ids: list[int]
    mask: list[bool]
    """For each token whether it is a label."""
    truncated: bool = False
    """Its end was cut off."""


def as_labelled(encoded: Encoded) -> Labelled:
    """An example as SFT learns it."""
    return Labelled(encoded.ids, encoded.mask, truncated=encoded.num_tokens > len(encoded.ids))


def as_prompt(encoded: Encoded, index: int, row: int, label: str) -> Prompt:
    """A prompt as GRPO samples it. label: the name of its source or held-out set."""
    content, columns = json.loads(encoded.values)
    return Prompt(index, encoded.ids, columns, row, label, content)
