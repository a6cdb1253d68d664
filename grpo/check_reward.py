"""What does this reward say? A call on a few rows of the data, before a run: `python -m grpo.check_reward REWARD`.

    python -m grpo.check_reward path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_reward math_reward [RECIPE.py] [--field value ...]               or a built-in one

Three completions of each row: the reference (the row's `answer`, in `reward.answer_format`), a wrong answer in the same
format, and an empty text. Shown are the columns with their types, the values, the seconds, and what the function
prints, which a run throws away. Data and options of the function are those of the recipe (without one: of
train_grpo.py). `num_tokens` counts words, because no tokenizer is loaded. Exit code 1 if a call fails. What is left
out: deadlines, memory limits and processes of a run; a function that never returns has to be stopped by hand.
"""

import contextlib
import dataclasses
import io
import itertools
import sys
import time

from grpo.config import GRPOConfig
from grpo.config.recipes import load
from grpo.data.columns import BadRow
from grpo.data.rows import Example, row_reader
from grpo.data.sources import load_rows
from grpo.rewards.answers import extract_answer, parse_number
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.loading import call_arguments, is_group_level, load_functions
from grpo.rewards.worker import describe, plain_values
from grpo.run.command_line import DEFAULT_RECIPES, subject_of
from grpo.text import one_line, printable, shorten

NUM_ROWS = 3
# Rows that are looked at to find so many that can be used.
MOST_ROWS = 1000
SHOWN_CHARACTERS = 70  # of a text, in a line
PRINTED_CHARACTERS = 2000  # of what the function prints
FORMATS = {"answer_tag": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}", "hashes": "#### {}"}


def main(arguments: list[str]) -> int:
    """Print what the function says; returns the exit code."""
    name, rest = subject_of(__doc__, arguments)
    try:
        config = load(GRPOConfig, DEFAULT_RECIPES[GRPOConfig], rest)
        examples = some_examples(config)
        function = load_reward(name, config, list(examples[0].columns))
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}")
        return 1
    how = "one call for each row" if is_group_level(function) else "one completion per call"
    print(f"reward {name}: {len(examples)} rows, {how}")
    columns = columns_of(examples[0], [""])
    print("columns: " + ", ".join(f"{column} ({type(values[0]).__name__})" for column, values in columns.items()))
    printed, any_failed = "", False
    for number, example in enumerate(examples, start=1):
        completions = some_completions(example, config.reward.answer_format)
        outcomes = try_row(function, example, list(completions.values()))
        print(f"row {number}: {_short(example.prompt if isinstance(example.prompt, str) else repr(example.prompt))}")
        for (kind, text), outcome in zip(completions.items(), outcomes, strict=True):
            print(f"  {kind:<9}  {_short(text):<{SHOWN_CHARACTERS}}  {outcome.seconds:8.4f} s  {_told(outcome.value)}")
            printed += outcome.printed
            any_failed = any_failed or isinstance(outcome.value, str)
        values = dict(zip(completions, (outcome.value for outcome in outcomes), strict=True))
        same = "reference" in values and values["reference"] == values["wrong"]
        if same and not isinstance(values["reference"], str):
            print("  note: the reference earns what a wrong answer earns")
    print(f"prints: {printable(shorten(printed, PRINTED_CHARACTERS)).strip() or 'nothing'}")
    return 1 if any_failed else 0


def some_examples(config: GRPOConfig) -> list[Example]:
    """The first rows of the first source that can be used; raises ValueError if there is none among MOST_ROWS."""
    source, read, found, reasons = config.data.all_sources[0], row_reader(config.data), [], []
    for row in itertools.islice(load_rows(source), MOST_ROWS):
        try:
            example = read(row)
        except BadRow as error:
            reasons.append(str(error))
            continue
        if example is not None and len(found := [*found, example]) == NUM_ROWS:
            break
    if not found:
        why = reasons[0] if reasons else f"data.row={config.data.row} left them out"
        raise ValueError(f"none of the first {MOST_ROWS} rows of {source.path} can be used: {why}")
    return found


def load_reward(name: str, config: GRPOConfig, columns: list[str]) -> RewardFunction:
    """The function with the options that the recipe has for it; raises what `load_functions` raises."""
    options = {key: value for key, value in config.reward.options.items() if key == name}
    reward = dataclasses.replace(config.reward, functions={name: 1.0}, options=options)
    return load_functions(reward, columns, config.generator.max_completion_tokens)[name]


def some_completions(example: Example, answer_format: str) -> dict[str, str]:
    """What it is -> a completion: the reference and a wrong answer, where there is a column `answer`, and no text."""
    if "answer" not in example.columns:
        return {"some text": "some text", "empty": ""}
    answer = str(example.columns["answer"])
    answer = extract_answer(answer, "hashes") or answer  # GSM8K's solutions
    number = parse_number(answer)
    wrong = f"not {answer}" if number is None else str(number + 1)  # 0.5 becomes 3/2
    written = FORMATS[answer_format]
    return {"reference": written.format(answer), "wrong": written.format(wrong), "empty": ""}


def columns_of(example: Example, completions: list[str]) -> dict[str, list]:
    """What a run gives to a call for these completions of one prompt."""
    extra = {
        "num_tokens": [len(text.split()) for text in completions],
        "truncated": [False] * len(completions),
        "prompts": [example.prompt] * len(completions),
        "step": [1] * len(completions),
    }
    return {name: [value] * len(completions) for name, value in example.columns.items()} | extra


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one completion: its value or what went wrong, the wall seconds of its call, and what that printed."""

    value: float | str | None
    seconds: float
    printed: str


def try_row(function: RewardFunction, example: Example, completions: list[str]) -> list[Outcome]:
    """Call the function as a run does: once for all completions if it is group-level, else for each."""
    together = [completions] if is_group_level(function) else [[text] for text in completions]
    return [outcome for texts in together for outcome in _call(function, texts, columns_of(example, texts))]


def _call(function: RewardFunction, completions: list[str], columns: dict[str, list]) -> list[Outcome]:
    output, start = io.StringIO(), time.perf_counter()
    arguments, named = call_arguments(function, list(completions), columns)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            values = plain_values(function(*arguments, **named), len(completions))
    except Exception as error:  # a user's function may raise anything, and the other calls go on
        values = describe(error)
    seconds = (time.perf_counter() - start) / len(completions)
    values = [values] * len(completions) if isinstance(values, str) else values
    printed = [output.getvalue(), *[""] * (len(completions) - 1)]
    return [Outcome(value, seconds, text) for value, text in zip(values, printed, strict=True)]


def _told(value: float | str | None) -> str:
    return f"FAILS: {value}" if isinstance(value, str) else "None" if value is None else f"{value:g}"


def _short(text: str) -> str:
    return printable(one_line(shorten(text, SHOWN_CHARACTERS - 20)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
