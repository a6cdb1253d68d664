"""Rows -> token ids, once: each row is read, rendered and tokenized, and the result is kept in a table.

The table is one of the library `datasets`: on disk, mapped into memory, made by several processes if there are many
rows. Its name is a fingerprint of everything that it follows from, so that the next start finds it. With `data.row` it
is made at each start, because nobody can see what a user's function depends on.
"""

import enum
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo.config import DataConfig, RowFormat, TrainOn
from grpo.config.values import Source
from grpo.data.rows import (
    BadRow,
    Example,
    Row,
    RowReader,
    Tools,
    environment_of,
)
from grpo.data.sources import Rows
from grpo.data.turns import Written, longest_token, tokenize, write_example, write_prompt
from grpo.text import printable
from grpo.types import Prompt

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

# Rows that are rendered and then tokenized together
BATCH_ROWS = 250
# One process for this number of rows, up to one per core and MAX_PROCESSES
ROWS_PER_PROCESS = 10_000
MAX_PROCESSES = 16
# Rows up to this length are counted even if the limit is lower, so that a message can name a better limit.
COUNTED_TOKENS = 4096
# Libraries whose version is a part of the fingerprint
LIBRARIES = ("datasets", "jinja2", "tokenizers", "transformers")
# Rows from which it is found out whether a resumed run has the same data, evenly spread over all
CHECKED_ROWS = 1000
# The variable that says whether tokenizers use all cores; the library turns it off for its processes.
PARALLEL = "TOKENIZERS_PARALLELISM"


class RowStatus(enum.IntEnum):
    """What became of a row."""

    USED = 0
    DROPPED = 1
    """`data.row` left it out on purpose."""
    BAD = 2
    """A value is missing or of a wrong kind, or the chat template does not take the row."""
    TOO_LONG = 3
    UNLABELLED = 4
    """No token is a label."""


@dataclass
class Encoded:
    """One row as tokens, or the reason why it has none."""

    status: int = RowStatus.USED
    reason: str = ""
    """Why it is BAD."""
    num_tokens: int = 0
    """Tokens of the whole row, even if it is cut off; a lower bound if it is very long."""
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """For each token whether it is a label; empty for prompts."""
    values: str = ""
    """JSON: [the prompt as the data has it, the columns that rewards get]; empty for chats."""

    @property
    def truncated(self) -> bool:
        """True if its end was cut off."""
        return self.num_tokens > len(self.ids)


def features() -> "datasets.Features":
    """Return the columns of a table of encoded rows: the fields of Encoded."""
    from datasets import Features, List, Value

    text = Value("large_string")
    return Features(
        status=Value("int8"),
        reason=text,
        num_tokens=Value("int64"),
        ids=List(Value("int32")),
        mask=List(Value("bool")),
        values=text,
    )


@dataclass(frozen=True)
class Encoder:
    """What makes tokens of rows: prompts with the columns that rewards get (GRPO), or examples with labels (SFT)."""

    tokenizer: "PreTrainedTokenizerBase"
    data: DataConfig
    max_tokens: int
    train_on: TrainOn | None = None
    """Which tokens are labels; None makes prompts."""
    truncates: bool = False
    """Cut longer rows off instead of leaving them out."""
    row_format: RowFormat = "auto"
    """What rows of examples have; with `completion_column` it says how they are read."""
    completion_column: str = ""
    tools: Mapping[str, Tools] | None = None
    """JSON schemas of each environment by its name, for prompts whose rows bring none."""
    vocab_size: int | None = None
    """Tokens that the model has; None: those of the tokenizer."""

    @property
    def limit(self) -> str:
        """Limit with its field, as messages name it."""
        name = "max_sequence_tokens" if self.train_on else "data.max_prompt_tokens"
        return f"{name}={self.max_tokens}"

    def encode(self, rows: Sequence[Row], read: RowReader) -> list[Encoded]:
        """Read each row with `read`, write it with the template and tokenize it."""
        results = []
        texts = []
        for row in rows:
            encoded = Encoded()
            try:
                example = read(row)
                if example is None:
                    encoded.status = RowStatus.DROPPED
                else:
                    texts.append((encoded, self._write(example, encoded)))
            except BadRow as error:
                encoded.status = RowStatus.BAD
                encoded.reason = str(error)
            results.append(encoded)

        tokens = tokenize(self.tokenizer, [text for _, text in texts])
        for (encoded, _), (ids, mask) in zip(texts, tokens, strict=True):
            self._keep(encoded, ids, mask)
        return results

    def _write(self, example: Example, encoded: Encoded) -> Written:
        """Write the text to be tokenized, and keep a prompt's columns in `encoded`.

        A very long text is cut where more tokens than are used or counted lie behind it. Raises BadRow.
        """
        if self.train_on:
            text = write_example(self.tokenizer, self.data, example, self.train_on)
        else:
            encoded.values = as_json([example.prompt, example.columns])
            tools = None
            if self.tools:
                tools = self.tools[environment_of(example.columns, self.tools)]
            text = write_prompt(self.tokenizer, self.data, example.prompt, example.tools, tools)
        max_tokens = max(self.max_tokens, COUNTED_TOKENS) + 2
        max_characters = max_tokens * longest_token(self.tokenizer)
        return text._replace(text=text.text[:max_characters])

    def _keep(self, encoded: Encoded, ids: list[int], mask: list[bool]) -> None:
        """Fill `encoded` with the tokens of a row, or with why they cannot be used."""
        encoded.num_tokens = len(ids)
        if self.truncates:
            ids = ids[: self.max_tokens]
            mask = mask[: self.max_tokens]
        elif encoded.num_tokens > self.max_tokens:  # before labels are looked for: a huge text's may be cut off
            encoded.status = RowStatus.TOO_LONG
            return
        largest = max(ids, default=0)
        if self.vocab_size and largest >= self.vocab_size:
            encoded.status = RowStatus.BAD
            encoded.reason = (
                f"token {self.tokenizer.convert_ids_to_tokens(largest)!r} ({largest}) is not among the model's "
                f"vocab_size={self.vocab_size}; bring the tokenizer of this model, or give its embedding a row for "
                "each token"
            )
        elif self.train_on and not any(mask):
            encoded.status = RowStatus.UNLABELLED
        else:
            encoded.ids = ids
            encoded.mask = mask if self.train_on else []


def as_json(value: Any) -> str:
    """Write a value as JSON. Raises BadRow if JSON cannot hold it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"a column for rewards holds what JSON cannot ({error}); make text of it in data.row") from error


# ---------------------------------------------------------------------------------------------------------------------
# All rows of a source
# ---------------------------------------------------------------------------------------------------------------------


def encode_rows(rows: Rows, encoder: Encoder) -> "datasets.Dataset":
    """Make a table with an Encoded for each row, or find that of an earlier start with the same fingerprint.

    Raises ValueError for a line that is not a JSON object.
    """
    import datasets

    table = rows.table
    has_own_function = bool(encoder.data.row)
    fingerprint = _fingerprint(rows, encoder)
    cache_file = None
    if not table.cache_files:  # the library keeps nothing for the next start if rows lie in memory
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "encoded"
        folder.mkdir(parents=True, exist_ok=True)
        cache_file = str(folder / f"{fingerprint}.arrow")
    num_cores = len(os.sched_getaffinity(0))
    num_processes = min(len(table) // ROWS_PER_PROCESS, num_cores, MAX_PROCESSES)
    if num_processes <= 1 or has_own_function:
        num_processes = None
    else:
        line = f"data: {num_processes} processes encode {rows.source.text}, unless an earlier start did"
        print(printable(line))
    datasets.disable_progress_bars()
    try:
        return table.map(
            functools.partial(_encode_batch, replace(rows, table=None), encoder),
            batched=True,
            batch_size=BATCH_ROWS,
            with_indices=True,
            remove_columns=table.column_names,
            features=features(),
            num_proc=num_processes,
            load_from_cache_file=not has_own_function,
            cache_file_name=cache_file,
            new_fingerprint=fingerprint,
        )
    finally:  # the library leaves it off in the environment of the process, where tokenizers look
        value = os.environ.get(PARALLEL)
        if value is None:
            os.unsetenv(PARALLEL)
        else:
            os.putenv(PARALLEL, value)


def _encode_batch(
    rows: Rows,
    encoder: Encoder,
    batch: dict[str, list],
    places: list[int],
) -> dict[str, list]:
    """Encode a batch of the table; the result is a batch of the encoded table."""
    batch_rows = rows.rows_of(batch, places[0])
    results = encoder.encode(batch_rows, rows.read)
    return {name: [getattr(encoded, name) for encoded in results] for name in features()}


def _fingerprint(rows: Rows, encoder: Encoder) -> str:
    """Return a name for everything that the encoded rows follow from."""
    tokenizer = encoder.tokenizer
    data = replace(
        encoder.data,
        path="",
        weights={},
        bad_rows="refuse",
        shuffle=True,
    )
    facts = [
        rows.table._fingerprint,
        rows.source.text,
        replace(encoder, tokenizer=None, data=data),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.name_or_path,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.init_kwargs,
        [(name, version(name)) for name in LIBRARIES],
    ]
    name = hashlib.sha256(repr(facts).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        name.update(path.read_bytes())
    return name.hexdigest()[:32]


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn
# ---------------------------------------------------------------------------------------------------------------------


def key_of(ids: Sequence[int]) -> int:
    """Return the number that stands for these token ids, see `EncodedRows.keys`."""
    return hash(np.asarray(ids, np.int32).tobytes())


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a source as tokens, and which of them can be drawn."""

    source: Source
    table: "datasets.Dataset"
    """An Encoded for each row."""
    usable: Sequence[int]
    """The rows that are drawn, in the order of the source."""

    @functools.cached_property
    def checksum(self) -> str:
        """Checksum of some CHECKED_ROWS of the rows, so that other rows under the same name are noticed."""
        places = self.usable[:: math.ceil(len(self.usable) / CHECKED_ROWS)]
        columns = self.table.select_columns(["ids", "mask", "values"])
        content = repr(columns[list(places)])
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """Numbers for the token ids of the usable rows; equal ids have equal numbers, in this process."""
        keys = []
        for chunk in self.table.data.column("ids").chunks:
            ids = chunk.values.to_numpy()
            bounds = chunk.offsets.to_numpy()
            keys += [key_of(ids[first:past]) for first, past in itertools.pairwise(bounds)]
        return np.array(keys, np.int64)[list(self.usable)]

    def get(self, row: int) -> Encoded:
        """Return the encoded row with this index in the table."""
        return Encoded(**self.table[row])

    def prompt(self, row: int, index: int) -> Prompt:
        """Return the row with this index in the table as the prompt that GRPO samples. index: its place in the run."""
        encoded = self.get(row)
        content, columns = json.loads(encoded.values)
        return Prompt(index, encoded.ids, columns, row, self.source.label, content)
