"""The sections of a config about data: what is trained on (`data`), what is held out (`evaluation`, `validation`)."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from grpo.config.bounds import Above, AtLeast
from grpo.config.kinds import Interval, Scalar, Table, Temperature
from grpo.config.sources import Source, parse_source

# What every call of a reward function gets on top of the data's columns: completion tokens with EOS, whether it was cut
# off, the prompt as the data has it, and the step as the log counts it.
EXTRA_COLUMNS = ("num_tokens", "truncated", "prompts", "step")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from, what the rewards see of them, and how they become token ids."""

    path: str = "openai/gsm8k[main]"
    """Hub data set, a local .jsonl, .json, .csv or .parquet file, a folder of them, or a built-in task such as
    `toy:addition`; `PATH[NAME]@REVISION:SPLIT` says also what the next three fields say."""
    name: str = ""
    """Configuration name of a hub data set that has several."""
    revision: str = ""
    """Branch, tag or commit of a hub data set; empty takes its newest."""
    split: str = "train"
    """Split, or an expression of splits such as train[:90%] or train+validation."""
    sources: Table[str] = field(default_factory=dict)
    """Several data sets in place of `path`, as names of your own and PATH[NAME]@REVISION:SPLIT each."""
    weights: Table[Annotated[float, Above(0)]] = field(default_factory=dict)
    """How often prompts come from each of `sources`, relative to each other, by their names; 1 where not named."""
    row: str = ""
    """Your own `path/file.py:function`: a row in; out comes a dict with `prompt` and the columns that the rewards get,
    or None, which leaves the row out. The fields of columns below do not apply then."""
    prompt_column: str = "question"
    """Column that holds the user's message as text, or a list of messages. In the table of a column, `a.b` is entry b;
    in a list, `a.0` is the first entry, `a.-1` the last, and `a.:-1` all except the last."""
    answer_column: str = "answer"
    """Column that the reward functions get as `answer`; empty for none."""
    columns: Table[str] = field(default_factory=dict)
    """Further columns for the reward functions: the names they get them by, and where they are in the data."""
    tools_column: str = ""
    """Column with the functions that the chat template may offer to the model (list of JSON schemas, or its text)."""
    system_prompt: str = (
        "Think first inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
    )
    """System message before every prompt; empty for none."""
    prompt_template: str = ""
    """Replaces the model's chat template, which base models lack: a .jinja file, or text with {question} for the prompt
    column's text and, where wanted, {system_prompt}; empty takes the model's own."""
    chat_template_kwargs: Table[Scalar] = field(default_factory=dict)
    """Extra keyword arguments for the tokenizer's chat template, e.g. enable_thinking false."""
    max_prompt_tokens: Annotated[int, AtLeast(1)] = 512
    """Prompts longer than this many tokens are left out and counted at the start."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do about rows without a prompt or without a value in a column that is used, or with text that is none.
    refuse: an error before the start that lists them (with `streaming`, at the first one that comes); skip: leave them
    out and say how many."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new random order, which follows from `seed`; off takes the file's order."""
    streaming: bool = False
    """Read rows as they come and keep none: data sets of the hub, JSON lines and parquet larger than memory or disk.
    Held-out data is then the first rows of its split."""
    checked_rows: Annotated[int, AtLeast(1)] = 1000
    """With `streaming`, how many first rows of each source are looked at before the start; later ones as they come."""
    shuffle_buffer: Annotated[int, AtLeast(1)] = 10_000
    """With `streaming` and `shuffle`, how many rows are read together and drawn in random order before others are."""

    @property
    def all_sources(self) -> list[Source]:
        """`sources`, or `path` as the only one. Raises ValueError if one is not written as it should be."""
        if not self.sources:
            return [parse_source(self.path, "data.path", "", self.name, self.revision, self.split)]
        return [
            parse_source(spec, f"data.sources {label}", label, split=self.split, weight=self.weights.get(label, 1.0))
            for label, spec in self.sources.items()
        ]

    @property
    def reward_columns(self) -> dict[str, str]:
        """Name that the reward functions get -> column; the prompt's keeps its name. Unknown, so empty, with `row`."""
        if self.row:
            return {}
        has_name = self.prompt_column.isidentifier() and self.prompt_column not in EXTRA_COLUMNS
        prompt = {self.prompt_column: self.prompt_column} if has_name else {}
        answer = {"answer": self.answer_column} if self.answer_column else {}
        return prompt | answer | self.columns

    @property
    def is_text_template(self) -> bool:
        """Whether `prompt_template` is text with placeholders, and neither empty nor the path of a file."""
        return bool(self.prompt_template) and not self.prompt_template.endswith(".jinja")


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Data that is not trained on; what evaluation and validation have in common."""

    path: str = ""
    """Held-out data set, written like `data.path`; empty takes that (with its name and revision)."""
    name: str = ""
    """Configuration name of that data set on the hub."""
    split: str = "test"
    """Split of the held-out data, or an expression of splits."""
    sets: Table[str] = field(default_factory=dict)
    """Several held-out data sets in place of `path`, as names for their metrics and PATH[NAME]@REVISION:SPLIT each."""

    section = ""  # of the config, for messages; without an annotation it is no field

    def held_out(self, data: DataConfig) -> list[Source]:
        """`sets`, or `path` as the only one, or the training data's.

        Raises ValueError if none is named, or one is not written as it should be.
        """
        if self.sets:
            sets = self.sets.items()
            return [parse_source(spec, f"{self.section}.sets {label}", label, split=self.split) for label, spec in sets]
        if self.path:
            same = not data.sources and self.path == data.path
            name = self.name or (data.name if same else "")
            return [
                parse_source(self.path, f"{self.section}.path", "", name, data.revision if same else "", self.split)
            ]
        if data.sources:
            raise ValueError(
                f"data.sources has {len(data.sources)} data sets, so it must be said what is held out: set "
                f"{self.section}.path or {self.section}.sets"
            )
        return [replace(data.all_sources[0], split=self.split, **({"name": self.name} if self.name else {}))]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(HeldOutConfig):
    """Held-out prompts, greedy and sampled: before the first step, every `interval` steps and at the end."""

    section = "evaluation"
    interval: Interval = 0
    """Steps between evaluations; 0 never evaluates."""
    num_prompts: Annotated[int, AtLeast(1)] = 256
    """Held-out prompts per evaluation, of each set, always the same ones."""
    num_samples: Annotated[int, AtLeast(0)] = 0
    """Samples per prompt for pass@k, k = 1, 2, 4, ... up to it; 0 takes only the greedy completion."""
    temperature: Temperature = 1.0
    """Sampling temperature of these samples."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(HeldOutConfig):
    """Loss on held-out examples (SFT): before the first step, every `interval` steps and at the end."""

    section = "validation"
    interval: Interval = 0
    """Steps between validations; 0 never validates."""
    num_examples: Annotated[int, AtLeast(1)] = 256
    """Held-out examples of each set: the first that can be used, always the same ones."""
