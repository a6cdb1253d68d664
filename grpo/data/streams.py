"""Prompts and chat examples: rows from a file, the hub or a toy task, tokenized as they are drawn, resumable.

Only the driver (rank 0) reads data; generators and trainers see token ids. Left out: streaming data sets, mixing
several data sets, and conversations of more than one turn.
"""

import json
import pathlib
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.config import DataConfig, EvaluationConfig, SamplingConfig
from grpo.types import Prompt

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    Rows = list[dict[str, Any]] | datasets.Dataset

Encoded = TypeVar("Encoded")

# Row numbers an error lists before it says "and N more".
SHOWN_ROWS = 5


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def load_rows(path: str, name: str, split: str) -> "Rows":
    """All rows of a data set: `toy:NAME`, a local JSON-lines file, or a hub data set (its configuration `name`).

    A path that ends in .jsonl or .json, or that is a file, is read as JSON lines; `name` and `split` do not apply then.

    Raises:
        FileNotFoundError: the file does not exist; the message has its absolute path.
        ValueError: a line is not a JSON object, there are no rows, or a toy task or hub data set cannot be loaded.
    """
    if path.startswith("toy:"):
        from grpo.data.toy import task_rows  # only toy runs need it

        rows = task_rows(path.removeprefix("toy:"), split)
    elif _is_json_lines(path):
        rows = _read_json_lines(pathlib.Path(path))
    else:
        rows = _load_hub_rows(path, name, split)
    if len(rows) == 0:
        raise ValueError(f"data set {path} (split {split!r}) has no rows; give one that has")
    return rows


def _is_json_lines(path: str) -> bool:
    return path.endswith((".jsonl", ".json")) or pathlib.Path(path).is_file()


def _read_json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"data file {path.absolute()} does not exist; correct the path or create it")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # JSONDecodeError, or UnicodeDecodeError
                raise ValueError(
                    f"{path}, line {number}: not JSON ({error}); write one JSON object per line"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number}: a {type(row).__name__}, not a JSON object; write one JSON object per line"
                )
            rows.append(row)
    return rows


def _load_hub_rows(path: str, name: str, split: str) -> "datasets.Dataset":
    import datasets  # takes a second to load, and files and toy tasks do without

    try:
        return datasets.load_dataset(path, name or None, split=split)
    # OSError covers a data set that is not there (FileNotFoundError) and a hub that cannot be reached
    # (ConnectionError); ValueError a wrong configuration or split.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data set {path} (name {name!r}, split {split!r}) could not be loaded: {type(error).__name__}: {error}\n"
            "Check the spelling; for a local file, give a path ending in .jsonl. Without network, load the data set "
            "where there is one and bring its cache (HF_HOME), or save it as .jsonl"
        ) from error


def check_columns(rows: "Rows", needed: Iterable[str], path: str) -> None:
    """Raise ValueError unless every row has every needed column; the message says what is missing and what is there."""
    # A datasets.Dataset has one set of columns; rows of a file may each have their own.
    rows_of_columns = [rows.column_names] if hasattr(rows, "column_names") else rows
    there = list(dict.fromkeys(column for columns in rows_of_columns for column in columns))
    for column in dict.fromkeys(needed):
        if column not in there:
            raise ValueError(f"column {column!r} is missing in {path}; columns there: {', '.join(there) or 'none'}")
        without = [number for number, columns in enumerate(rows_of_columns, start=1) if column not in columns]
        if without:
            shown = ", ".join(map(str, without[:SHOWN_ROWS]))
            more = f" and {len(without) - SHOWN_ROWS} more" if len(without) > SHOWN_ROWS else ""
            raise ValueError(
                f"column {column!r} is missing in {len(without)} of {len(rows_of_columns)} rows of {path}: "
                f"row {shown}{more} (counted from 1, blank lines left out); add it there or drop these rows"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """The checked tokenizer of a model folder."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    check_tokenizer(tokenizer, folder)
    return tokenizer


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", path: str) -> None:
    """Raise ValueError if the tokenizer at `path` cannot write chats: no chat template, or no EOS token."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {path} has no chat template; use an instruction-tuned model, or put a "
            "chat_template.jinja into the model's folder"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no EOS token, so no completion could end; "
            "set eos_token in tokenizer_config.json"
        )


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", config: DataConfig, text: str) -> list[int]:
    """Token ids of one chat: the system prompt unless empty, `text` as the user's message, the assistant's opening."""
    messages = [{"role": "user", "content": text}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    kwargs = {key: _template_value(value) for key, value in config.chat_template_kwargs.items()}
    # return_dict: since transformers 5 the default is a BatchEncoding, whose len() is its number of fields.
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
    )


def _template_value(value: Any) -> Any:
    """What a template argument from the command line means: "false" -> False, "3" -> 3, "low" -> "low"."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def encode_completion(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a completion to imitate, with the EOS that ends it."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _text(row: dict[str, Any], column: str, number: int, path: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(
            f"row {number} of {path}: column {column!r} holds {type(row[column]).__name__}, not text; correct that row"
        )
    return row[column]


# ---------------------------------------------------------------------------------------------------------------------
# Streams


class RowOrder:
    """Goes through the rows epoch after epoch, leaves out those that are too long, and can be saved and resumed.

    Each epoch's order follows from (seed, epoch) alone, so its place is two numbers and no global RNG is touched.
    """

    def __init__(self, num_rows: int, path: str, seed: int, shuffle: bool, max_tokens: int, limit: str):
        """limit: the config field that `max_tokens` comes from, for messages."""
        self.num_rows, self.path, self.seed, self.shuffle = num_rows, path, seed, shuffle
        self.max_tokens, self.limit = max_tokens, limit
        self.epoch = 0
        self.position = 0  # rows of this epoch that were taken or left out
        self.num_drawn = 0
        self.num_too_long = 0  # counted in the first epoch only: each row once
        self._order: list[int] | None = None

    def next(
        self, encode: Callable[[int], tuple[Encoded, int]], rests: Callable[[int], bool] = lambda row: False
    ) -> tuple[int, Encoded] | None:
        """The next row that fits, and what `encode(row)` made of it; `encode` also returns its length in tokens.

        Rows of which `rests` is true are passed over; if a whole epoch has no other that fits, it returns None.

        Raises:
            ValueError: not one row fits into `max_tokens`.
        """
        too_long: dict[int, int] = {}
        num_left_out = 0  # by this call, of this epoch; an epoch with nothing to draw lies within one call
        while len(too_long) < self.num_rows:
            if num_left_out == self.num_rows:
                return None
            row = self._next_row()
            num_left_out = 1 if self.position == 1 else num_left_out + 1
            if rests(row):
                continue
            encoded, num_tokens = encode(row)
            if num_tokens <= self.max_tokens:
                self.num_drawn += 1
                return row, encoded
            too_long[row] = num_tokens
            if self.epoch == 0:
                self.num_too_long += 1
                if self.num_too_long == 1:
                    print(
                        f"warning: row {row + 1} of {self.path} has {num_tokens} tokens, more than {self.limit}="
                        f"{self.max_tokens}: rows like this are left out, without further notice",
                        flush=True,
                    )
        raise ValueError(all_too_long(self.path, self.limit, self.max_tokens, too_long.values()))

    def _next_row(self) -> int:
        if self.position == self.num_rows:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = list(range(self.num_rows))
            if self.shuffle:
                random.Random(f"{self.seed} {self.epoch}").shuffle(self._order)
        self.position += 1
        return self._order[self.position - 1]

    def fingerprint(self) -> dict[str, int | str]:
        """What a saved place belongs to."""
        return {"num_rows": self.num_rows, "path": self.path, "seed": self.seed, "shuffle": int(self.shuffle)}

    def state_dict(self) -> dict[str, int | str]:
        """The place in the stream and what it belongs to; plain numbers and one path, fit for JSON."""
        return self.fingerprint() | {
            "epoch": self.epoch,
            "position": self.position,
            "num_drawn": self.num_drawn,
            "num_too_long": self.num_too_long,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        for key, value in self.fingerprint().items():
            if state[key] != value:
                raise ValueError(
                    f"the saved place in the data has {key}={state[key]!r}, this run has {value!r}; "
                    "resume with the data set, seed and shuffle it was saved with, or start a new run"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self.num_drawn, self.num_too_long = state["num_drawn"], state["num_too_long"]
        self._order = None


def all_too_long(path: str, limit: str, max_tokens: int, lengths: Iterable[int]) -> str:
    """The error message for a data set none of whose rows fits."""
    lengths = list(lengths)
    return (
        f"all {len(lengths)} rows of {path} are longer than {limit}={max_tokens} tokens, "
        f"the shortest has {min(lengths)}; raise {limit} to at least {min(lengths)}"
    )


class PromptStream:
    """The run's prompts, one after the other without end; resumes exactly.

    With pass rates recorded, rows that were too hard or too easy when last sampled rest: they are left out of the next
    `sampling.filter_epochs` epochs after that one, then tried again, since the policy has changed.

    Raises ValueError when made if a column is missing, the data set is empty or the tokenizer has no chat template.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 (it is frozen)
    ):
        check_tokenizer(tokenizer, tokenizer.name_or_path)
        self.config, self.tokenizer, self.sampling = config, tokenizer, sampling
        self.rows = load_rows(config.path, config.name, config.split)
        check_columns(self.rows, [config.prompt_column, *config.columns], config.path)
        self.order = RowOrder(
            len(self.rows), config.path, seed, config.shuffle, config.max_prompt_tokens, "data.max_prompt_tokens"
        )
        # Both are row: epoch in which it was last drawn; the filter's memory, empty without a filter.
        self._unrecorded: dict[int, int] = {}
        self._too_hard_or_easy: dict[int, int] = {}
        self._told_all_rest = False

    @property
    def num_too_long(self) -> int:
        """Rows left out so far because their prompt is too long, each counted once."""
        return self.order.num_too_long

    @property
    def num_resting(self) -> int:
        """Rows left out of this epoch because of their pass rates."""
        return sum(map(self._rests, self._too_hard_or_easy))

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs where needed; Prompt.index counts on through the whole run.

        Raises:
            ValueError: no prompt fits into data.max_prompt_tokens, or one is not text.
        """
        prompts = []
        for _ in range(count):
            index = self.order.num_drawn
            row, ids = self.order.next(self._encode, self._rests) or self._draw_from_resting()
            if self.sampling.filters:
                self._unrecorded[row] = self.order.epoch
            prompts.append(Prompt(index, ids, _prompt_columns(self.rows[row], self.config), row=row))
        return prompts

    def record(self, pass_rates: dict[int, float]) -> None:
        """Let rows rest by what their completions achieved: row -> share that passed when it was last sampled.

        To resume exactly, take `state_dict` after it.
        """
        if not self.sampling.filters:
            return
        for row, pass_rate in pass_rates.items():
            # The stream may be in a later epoch by now. A row recorded twice counts as sampled in this one.
            epoch = self._unrecorded.pop(row, self.order.epoch)
            if self.sampling.min_pass_rate <= pass_rate <= self.sampling.max_pass_rate:
                self._too_hard_or_easy.pop(row, None)
            else:
                self._too_hard_or_easy[row] = epoch

    def _rests(self, row: int) -> bool:
        epoch = self._too_hard_or_easy.get(row)
        return epoch is not None and 0 < self.order.epoch - epoch <= self.sampling.filter_epochs

    def _draw_from_resting(self) -> tuple[int, list[int]]:
        """In an epoch in which all rows rest: end their rest, since a run without prompts helps nobody."""
        if not self._told_all_rest:
            self._told_all_rest = True
            print(
                f"warning: in epoch {self.order.epoch + 1} of {self.config.path} all {self.num_resting} rows that fit "
                f"would rest, having passed less often than sampling.min_pass_rate={self.sampling.min_pass_rate:g} or "
                f"more often than sampling.max_pass_rate={self.sampling.max_pass_rate:g}: they are drawn all the same, "
                "now and without further notice later on; widen these bounds or bring other prompts",
                flush=True,
            )
        self._too_hard_or_easy.clear()
        return self.order.next(self._encode, self._rests)

    def _encode(self, row: int) -> tuple[list[int], int]:
        text = _text(self.rows[row], self.config.prompt_column, row + 1, self.config.path)
        ids = encode_prompt(self.tokenizer, self.config, text)
        return ids, len(ids)

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, see RowOrder.state_dict, and with a filter its memory; fit for JSON."""
        state = self.order.state_dict()
        if self.sampling.filters:
            state |= {name: {str(row): epoch for row, epoch in memory.items()} for name, memory in self._memory.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        self.order.load_state_dict(state)
        for name, memory in self._memory.items():
            memory.clear()
            if self.sampling.filters:
                memory.update((int(row), epoch) for row, epoch in state.get(name, {}).items())

    @property
    def _memory(self) -> dict[str, dict[int, int]]:
        return {"unrecorded": self._unrecorded, "too_hard_or_easy": self._too_hard_or_easy}


def _prompt_columns(row: dict[str, Any], config: DataConfig) -> dict[str, Any]:
    return {column: row[column] for column in dict.fromkeys([config.prompt_column, *config.columns])}


class ChatStream:
    """Prompt and completion pairs for SFT, one after the other without end; resumes exactly.

    Raises ValueError when made if a column is missing, the data set is empty or the tokenizer has no chat template.
    `config.max_prompt_tokens` does not apply: the limit is on prompt plus completion.
    """

    def __init__(
        self,
        config: DataConfig,
        completion_column: str,
        tokenizer: "PreTrainedTokenizerBase",
        max_sequence_tokens: int,
        seed: int,
    ):
        check_tokenizer(tokenizer, tokenizer.name_or_path)
        self.config, self.completion_column, self.tokenizer = config, completion_column, tokenizer
        self.rows = load_rows(config.path, config.name, config.split)
        check_columns(self.rows, [config.prompt_column, completion_column], config.path)
        self.order = RowOrder(
            len(self.rows), config.path, seed, config.shuffle, max_sequence_tokens, "max_sequence_tokens"
        )

    @property
    def num_too_long(self) -> int:
        """Rows left out so far because prompt plus completion is too long, each counted once."""
        return self.order.num_too_long

    def draw(self, count: int) -> list[tuple[list[int], list[int]]]:
        """The next `count` pairs of prompt ids and completion ids (EOS included), across epochs where needed.

        Raises:
            ValueError: no pair fits into max_sequence_tokens, or one is not text.
        """
        return [self.order.next(self._encode)[1] for _ in range(count)]

    def _encode(self, row: int) -> tuple[tuple[list[int], list[int]], int]:
        columns = self.rows[row]
        prompt = _text(columns, self.config.prompt_column, row + 1, self.config.path)
        completion = _text(columns, self.completion_column, row + 1, self.config.path)
        prompt_ids = encode_prompt(self.tokenizer, self.config, prompt)
        completion_ids = encode_completion(self.tokenizer, completion)
        return (prompt_ids, completion_ids), len(prompt_ids) + len(completion_ids)

    def state_dict(self) -> dict[str, int | str]:
        """The place in the stream; see RowOrder.state_dict."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        self.order.load_state_dict(state)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def load_eval_prompts(
    data: DataConfig, evaluation: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[Prompt]:
    """The first `evaluation.num_prompts` held-out prompts that fit, in file order, with Prompt.index from 0.

    Fewer if the data set has fewer. `data.name` applies only if the path is the same as the training data's.

    Raises:
        ValueError: a column is missing, a prompt is not text, or no prompt fits into data.max_prompt_tokens.
    """
    check_tokenizer(tokenizer, tokenizer.name_or_path)
    path = evaluation.path or data.path
    if path == data.path and (_is_json_lines(path) or evaluation.split == data.split):
        print(f"warning: evaluation uses the training data {path}; set evaluation.path or evaluation.split", flush=True)
    rows = load_rows(path, evaluation.name or (data.name if path == data.path else ""), evaluation.split)
    check_columns(rows, [data.prompt_column, *data.columns], path)
    prompts, too_long = [], []
    for number, row in enumerate(rows, start=1):
        if len(prompts) == evaluation.num_prompts:
            break
        ids = encode_prompt(tokenizer, data, _text(row, data.prompt_column, number, path))
        if len(ids) > data.max_prompt_tokens:
            too_long.append(len(ids))
        else:
            prompts.append(Prompt(len(prompts), ids, _prompt_columns(row, data), row=number - 1))
    if too_long and not prompts:
        raise ValueError(all_too_long(path, "data.max_prompt_tokens", data.max_prompt_tokens, too_long))
    if too_long:
        print(
            f"warning: {len(too_long)} held-out prompts of {path} are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens} and were left out",
            flush=True,
        )
    return prompts
