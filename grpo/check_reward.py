"""What does this reward say? A call on a few rows of the data, before a run: `python -m grpo.check_reward REWARD`.

    python -m grpo.check_reward path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_reward math_reward [RECIPE.py] [--field value ...]               or a built-in one

Three completions of each row: the reference (the row's `answer`, in `reward.answer_format`), a wrong answer in the same
format, and an empty text. Of a list of answers the first is the reference. The function is called as a run calls it:
in a process with the same limits, environment variables and, for a built-in one, lockdown. Shown are the columns with
their types, the values, the seconds, and what the function prints, which a run throws away. Data and options are those
of the recipe (without one: of train_grpo.py). `num_tokens` counts words, because no tokenizer is loaded, and
`completion_ids` are as many zeros. Exit code 1 if a call fails.
"""

import contextlib
import dataclasses
import itertools
import sys
import time
from typing import Any

from grpo.config import GRPOConfig, RewardConfig
from grpo.config.recipes import for_one_process, load
from grpo.data.prepare import load_sources
from grpo.data.rows import Example
from grpo.rewards import loading
from grpo.rewards.answers import extract_answer, parse_number
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.loading import argument_names, called_with, load_functions, try_built_ins
from grpo.rewards.pool import as_json
from grpo.run.command_line import DEFAULT_RECIPES, subject_of
from grpo.text import one_line, printable, shorten
from grpo.workers.processes import Call, Workers
from grpo.workers.programs import check_programs

NUM_ROWS = 3
SHOWN_CHARACTERS = 70  # of a text, in a line
OF_MESSAGES = "; completions are texts, as prompts are: read text, not text[0]['content'] (messages: see data.row)"
FORMATS = {"answer_tag": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}", "hashes": "#### {}"}


def main(arguments: list[str]) -> int:
    """Print what the function says; returns the exit code."""
    name, rest = subject_of(__doc__, arguments)
    try:
        config = load(GRPOConfig, DEFAULT_RECIPES[GRPOConfig], rest, for_one_process)
        reward = reward_alone(name, config.reward)
        function, examples = load_both(name, reward, config)
        if name == "code_reward":
            print(check_programs(reward.allow_without_landlock))
        confined = loading.is_confined(name)
        workers = loading.start_workers(loading.load_observed, reward, confined, config.generator.max_completion_tokens)
        with contextlib.closing(workers):
            return show(name, function, examples, reward, workers)
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}")
        return 1


def show(name: str, function: RewardFunction, examples: list[Example], reward: RewardConfig, workers: Workers) -> int:
    """Print what the function, loaded by `workers`, says of some completions of each row; returns the exit code."""
    together = called_with(function) != "completion"
    how = "one call for each row" if together else "one completion per call"
    print(f"reward {name}: {len(examples)} rows, {how}")
    columns = columns_of(function, examples[0], [""])
    print("columns: " + ", ".join(f"{column} ({type(values[0]).__name__})" for column, values in columns.items()))
    code = 0
    for number, example in enumerate(examples, start=1):
        completions, values, printed = some_completions(example, reward.answer_format), {}, ""
        print(f"row {number}: {_short(example.prompt if isinstance(example.prompt, str) else repr(example.prompt))}")
        for kinds in [list(completions)] if together else [[kind] for kind in completions]:
            texts = [completions[kind] for kind in kinds]
            outcome = call(workers, name, texts, columns_of(function, example, texts), reward.timeout_seconds)
            failed = f"FAILS: {outcome.get('failed')}"
            for kind, value in zip(kinds, outcome.get("values", [failed] * len(kinds)), strict=True):
                values[kind], told = value, f"{value:g}" if isinstance(value, float) else value
                seconds = outcome["seconds"] / len(kinds)
                print(f"  {kind:<9}  {_short(completions[kind]):<{SHOWN_CHARACTERS}}  {seconds:8.4f} s  {told}")
            printed += outcome["printed"]
        if printed:
            print(f"  prints: {printable(shorten(printed, loading.PRINTED_CHARACTERS)).strip()}")
        if "reference" in values and values["reference"] == values["wrong"]:
            print("  note: the reference earns what a wrong answer earns")
        code |= any(isinstance(value, str) for value in values.values())
    return code


def reward_alone(name: str, reward: RewardConfig) -> RewardConfig:
    """The recipe's rewards with this function alone, the options that it has there, and one process."""
    options = {key: value for key, value in reward.options.items() if key == name}
    return dataclasses.replace(reward, functions={name: 1.0}, options=options, num_workers=1)


def load_both(name: str, reward: RewardConfig, config: GRPOConfig) -> tuple[RewardFunction, list[Example]]:
    """The function with its options, and the first rows of the first source.

    Raises ValueError if no row can be used, and what `load_functions` raises.
    """
    source = load_sources(config.data)[0]
    if not (examples := list(itertools.islice(source.examples(), NUM_ROWS))):
        raise ValueError(f"no row of {source.source.path} can be used; a --dry-run of the recipe says why")
    functions = load_functions(reward, [*examples[0].columns], config.generator.max_completion_tokens)
    for example in examples:
        try_built_ins(functions, example.columns)
    return functions[name], examples


def some_completions(example: Example, answer_format: str) -> dict[str, str]:
    """What it is -> a completion: the reference and a wrong answer, where there is a column `answer`, and no text.

    Of a list of answers the first is the reference; what a model writes for a table nobody knows.
    """
    answer = example.columns.get("answer")
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if isinstance(answer, list | dict | None):
        return {"some text": "some text", "empty": ""}
    answer = str(answer)
    answer = extract_answer(answer, "hashes") or answer  # GSM8K's solutions
    number = parse_number(answer)
    wrong = f"not {answer}" if number is None else str(number + 1)  # 0.5 becomes 3/2
    written = FORMATS[answer_format]
    return {"reference": written.format(answer), "wrong": written.format(wrong), "empty": ""}


def columns_of(function: RewardFunction, example: Example, completions: list[str]) -> dict[str, list]:
    """What a run gives to a call for these completions of one prompt."""
    same = {**example.columns, "num_tokens": 0, "truncated": False, "prompts": example.prompt, "step": 1}
    columns = {name: [value] * len(completions) for name, value in same.items()}
    columns["num_tokens"] = [len(text.split()) for text in completions]
    if "completion_ids" in argument_names(function):
        columns["completion_ids"] = [[0] * count for count in columns["num_tokens"]]
    return columns


def call(
    workers: Workers, name: str, completions: list[str], columns: dict[str, list], timeout_seconds: float
) -> dict[str, Any]:
    """What `loading.load_observed` says of a call of the function."""
    arguments = b"[%s, %s, %s]" % (as_json(name), as_json(completions), as_json(columns))
    start = time.perf_counter()
    workers.submit([Call(0, arguments, timeout_seconds * len(completions))])
    (outcome,) = workers.collect()
    ended = {"failed": outcome.get("failed"), "seconds": time.perf_counter() - start, "printed": ""}
    observed = outcome.get("value", ended)
    if "string indices must be" in observed.get("failed", ""):  # of a text, by a name
        observed["failed"] += OF_MESSAGES
    return observed


def _short(text: str) -> str:
    return printable(one_line(shorten(text, SHOWN_CHARACTERS - 20)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
