"""Rows -> token ids, once: each row is read, rendered and tokenized, and what became of it is kept in a table.

The table is the library's (`datasets`): on disk, mapped into memory, made by several processes where there are many
rows, and kept by a fingerprint of all that it follows from, so that the next start finds it. Rows that a user's own
function made are encoded anew at each start: nobody can see what it depends on.
"""

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from grpo.config import DataConfig, SFTConfig, TrainOn
from grpo.config.values import Source
from grpo.data.chat import template_bounds, template_name
from grpo.data.rows import BadRow, Example, Row, RowReader, environment_of, kinds_of, teacher_prompt
from grpo.data.sources import Rows
from grpo.data.turns import Written, longest_token, tokenize, write_example, write_prompt
from grpo.text import printable
from grpo.types import Prompt

if TYPE_CHECKING:
    import datasets
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
    """It does not hold what it must, or the chat template does not take it."""
    TOO_LONG = 3
    UNLABELLED = 4
    """No token of it is a label."""


@dataclasses.dataclass
class Encoded:
    """One row as tokens, or why it is none."""

    fate: int = Fate.USED
    reason: str = ""
    """Why it is BAD."""
    num_tokens: int = 0
    """All tokens of the row, also of one that is too long or was cut off; perhaps a lower bound there. Of a prompt that
    a teacher reads otherwise, those of the longer one."""
    ids: list[int] = dataclasses.field(default_factory=list)
    teacher_ids: list[int] = dataclasses.field(default_factory=list)
    """The prompt as its teacher reads it; empty if that is no other one."""
    mask: list[bool] = dataclasses.field(default_factory=list)
    """For each token whether it is a label; empty for prompts."""
    values: str = ""
    """JSON: [the prompt as the data has it, the columns that rewards get]; empty for chats."""
    kinds: str = ""
    """The columns that rewards get with the kinds of their values, see `kinds_of`; empty for chats."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What the user should know about the row, told with the number of rows that it holds for."""

    @property
    def truncated(self) -> bool:
        """Its end was cut off."""
        return self.num_tokens > len(self.ids)


def features() -> "datasets.Features":
    """The columns of a table of encoded rows, which are the fields of Encoded."""
    from datasets import Features, List, Value

    text = Value("large_string")
    return Features(
        fate=Value("int8"),
        reason=text,
        num_tokens=Value("int64"),
        ids=List(Value("int32")),
        teacher_ids=List(Value("int32")),
        mask=List(Value("bool")),
        values=text,
        kinds=text,
        notes=List(text),
    )


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Makes tokens of rows: prompts with the columns that rewards get (GRPO), or examples with labels (SFT)."""

    tokenizer: "PreTrainedTokenizerBase"
    data: DataConfig
    max_tokens: int
    train_on: TrainOn | None = None
    """What the labels are; None makes prompts."""
    truncates: bool = False
    """Longer rows are cut off, and not left out."""
    columns: tuple[str, ...] = ()
    """What else of the config decides about tokens: what is looked for in a row, where `data` does not say it."""
    tools: Mapping[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Of each environment by its name, JSON schemas, for prompts whose rows bring none."""
    teacher_template: str = ""
    """What a teacher reads in place of the user's message; empty: the same."""
    vocab_size: int | None = None
    """Tokens that the model has; None: those of the tokenizer."""

    @property
    def limit(self) -> str:
        """The limit with its field, as messages name it."""
        return f"{'max_sequence_tokens' if self.train_on else 'data.max_prompt_tokens'}={self.max_tokens}"

    def encode(self, rows: Sequence[Row], read: RowReader) -> list[Encoded]:
        """What becomes of each row that `read` takes. Raises ValueError if the chat template does not end."""
        found, written = [Encoded() for _ in rows], []
        for encoded, row in zip(found, rows, strict=True):
            try:
                if (example := read(row)) is None:
                    encoded.fate = Fate.DROPPED
                else:
                    written.append((encoded, self._write(example, encoded)))
            except BadRow as error:
                encoded.fate, encoded.reason = Fate.BAD, str(error)
        tokens = tokenize(self.tokenizer, [text for _, texts in written for text in texts])
        for encoded, texts in written:
            (ids, mask), *teacher = itertools.islice(tokens, len(texts))
            teacher_ids = teacher[0][0] if teacher else []
            encoded.num_tokens = max(len(ids), len(teacher_ids))
            if self.truncates:
                ids, mask = ids[: self.max_tokens], mask[: self.max_tokens]
            elif encoded.num_tokens > self.max_tokens:  # before labels are looked for: a huge text's may be cut off
                encoded.fate = Fate.TOO_LONG
                continue
            if beyond := [token for token in (*ids, *teacher_ids) if token >= (self.vocab_size or token + 1)]:
                text = self.tokenizer.convert_ids_to_tokens(beyond[0])
                encoded.fate = Fate.BAD
                encoded.reason = (
                    f"token {text!r} ({beyond[0]}) is not among the model's vocab_size={self.vocab_size}; bring the "
                    "tokenizer of this model, or give its embedding a row for each token"
                )
            elif self.train_on and not any(mask):
                encoded.fate = Fate.UNLABELLED
            else:
                encoded.ids, encoded.mask, encoded.teacher_ids = ids, mask if self.train_on else [], teacher_ids
        return found

    def _write(self, example: Example, encoded: Encoded) -> list[Written]:
        """What is to be tokenized, then the same for a teacher: of a very long text its beginning, which is more than
        is drawn or counted.

        What is kept of a prompt besides its tokens goes into `encoded`. Raises BadRow.
        """
        bounds = template_bounds(template_name(self.tokenizer, self.data))
        if self.train_on:
            with bounds:
                written = [write_example(self.tokenizer, self.data, example, self.train_on)]
        else:
            encoded.values, encoded.kinds = _as_json([example.prompt, example.columns]), kinds_of(example.columns)
            tools = self.tools[environment_of(example.columns, self.data, self.tools)] if self.tools else None
            prompts = [example.prompt]
            if self.teacher_template:
                prompts.append(teacher_prompt(example, self.teacher_template))
            with bounds:
                written = [write_prompt(self.tokenizer, self.data, prompt, example.tools, tools) for prompt in prompts]
        encoded.notes = [*written[0].notes]
        most_tokens = max(self.max_tokens, COUNTED_TOKENS) + 2
        most_characters = most_tokens * longest_token(self.tokenizer)
        return [one._replace(text=one.text[:most_characters]) for one in written]


def _as_json(values: list) -> str:
    try:
        return json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"a column for rewards holds what JSON cannot ({error}); make text of it in data.row") from error


def prompt_encoder(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    tools: Mapping[str, list[dict[str, Any]]] | None = None,
    teacher_template: str = "",
    vocab_size: int | None = None,
) -> Encoder:
    """The encoder of GRPO's rows. tools: of each environment, by its name."""
    others = {"tools": tools or {}, "teacher_template": teacher_template, "vocab_size": vocab_size}
    return Encoder(tokenizer, data, data.max_prompt_tokens, **others)


def chat_encoder(tokenizer: "PreTrainedTokenizerBase", config: SFTConfig, vocab_size: int | None = None) -> Encoder:
    """The encoder of SFT's rows."""
    return Encoder(
        tokenizer,
        config.data,
        config.max_sequence_tokens,
        config.train_on,
        truncates=config.too_long == "truncate",
        columns=(config.row_format, config.completion_column),
        vocab_size=vocab_size,
    )


# ---------------------------------------------------------------------------------------------------------------------
# All rows of a source
# ---------------------------------------------------------------------------------------------------------------------


def encode_rows(rows: Rows, encoder: Encoder) -> "datasets.Dataset":
    """A table with an Encoded for each row: that of an earlier start, if it followed from the same in the same way.

    Raises ValueError for a line that is not a JSON object, and if the chat template does not end.
    """
    import datasets

    table, is_own, fingerprint = rows.table, bool(encoder.data.row), _fingerprint(rows, encoder)
    # of rows that lie in memory, such as a toy's, the library would keep nothing for the next start
    folder = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "encoded"
    folder.mkdir(parents=True, exist_ok=True)
    num_processes = 1 if is_own else min(len(table) // ROWS_PER_PROCESS, len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if num_processes > 1:
        told = f"{len(table):,} rows of {rows.source.text}, encoded by {num_processes} processes or before"
        print(printable(f"data: {told}"), flush=True)
    datasets.disable_progress_bars()
    try:
        return table.map(
            functools.partial(_encode_batch, dataclasses.replace(rows, table=None), encoder),
            batched=True,
            batch_size=BATCH_ROWS,
            with_indices=True,
            remove_columns=table.column_names,
            features=features(),
            num_proc=num_processes if num_processes > 1 else None,
            load_from_cache_file=not is_own,
            cache_file_name=None if table.cache_files else str(folder / f"{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
        )
    finally:  # the library leaves it off for code outside of Python, where tokenizers look
        value = os.environ.get(PARALLEL)
        os.unsetenv(PARALLEL) if value is None else os.putenv(PARALLEL, value)


def _encode_batch(rows: Rows, encoder: Encoder, batch: dict[str, list], places: list[int]) -> dict[str, list]:
    found = encoder.encode(rows.rows_of(batch, places[0]), rows.read)
    return {name: [getattr(encoded, name) for encoded in found] for name in features()}


def _fingerprint(rows: Rows, encoder: Encoder) -> str:
    """A name for all that the encoded rows follow from."""
    tokenizer = encoder.tokenizer
    unused = {"path": "", "sources": {}, "weights": {}, "bad_rows": "refuse", "shuffle": True}
    data = dataclasses.replace(encoder.data, **unused)
    own_code = [path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))]
    text = [
        *(rows.table._fingerprint, rows.source.text),
        repr((data, encoder.max_tokens, encoder.train_on, encoder.truncates, encoder.columns, encoder.tools)),
        *(encoder.teacher_template, repr(encoder.vocab_size)),
        *(tokenizer.backend_tokenizer.to_str(), tokenizer.name_or_path, str(tokenizer.chat_template)),
        *(repr(tokenizer.special_tokens_map), repr(tokenizer.init_kwargs)),
        *(f"{name} {version(name)}" for name in LIBRARIES),
    ]
    return hashlib.sha256(json.dumps(text).encode() + b"".join(own_code)).hexdigest()[:32]


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EncodedRows:
    """The rows of a source as tokens, and which of them are drawn."""

    source: Source
    table: "datasets.Dataset"
    """An Encoded for each row."""
    usable: Sequence[int]
    """The rows that are drawn, in the order of the source."""
    left_out: str
    """Why rows are left out, with how many."""

    def get(self, row: int) -> Encoded:
        return Encoded(**self.table[row])


def as_prompt(encoded: Encoded, index: int, row: int, label: str) -> Prompt:
    """A prompt as GRPO samples it. label: the name of its source or held-out set."""
    content, columns = json.loads(encoded.values)
    return Prompt(index, encoded.ids, columns, row, label, content, encoded.teacher_ids)
