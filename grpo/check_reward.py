"""What does this reward say? A call on a few rows of the data, before a run: `python -m grpo.check_reward REWARD`.

    python -m grpo.check_reward path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_reward math_reward [RECIPE.py] [--field value ...]               or a built-in one

Three completions of each row: the reference (the row's `answer`, in `reward.answer_format`), a wrong answer in the same
format, and an empty text. Of a list of answers the first is the reference. Without the column `answer` each text and
number of the row is tried as it is, such as a column `solution`. The function is called as a run calls it: in a process
with the same limits, environment variables and, for a built-in one, lockdown. Shown are the columns with their types,
the values, the seconds, and what the function prints, which a run throws away. Data and options are those of the recipe
(without one: of train_grpo.py). `num_tokens` counts words, because no tokenizer is loaded, and `completion_ids` are as
many zeros. No environment plays, so a function that reads an episode is refused. Exit code 1 if a call fails.
"""

import contextlib
import dataclasses
import inspect
import itertools
import sys
import time
from collections.abc import Collection
from typing import Any

import torch

from grpo.config import RewardConfig
from grpo.data.encode import as_json
from grpo.data.prepare import load_sources
from grpo.data.rows import Example, as_messages
from grpo.rewards import loading
from grpo.rewards.answers import extract_answer, parse_number
from grpo.rewards.builtin import RewardFunction
from grpo.rewards.pool import EPISODE_COLUMNS, call_columns
from grpo.run.command_line import subject_of, tool_config
from grpo.text import one_line, printable, shorten
from grpo.types import Completion, Prompt, Rollout
from grpo.watch.failures import refuse_bad_input, run_rank
from grpo.workers.processes import Call, Workers
from grpo.workers.programs import check_programs

NUM_ROWS = 3
STEP = 1  # what the function gets as the number of the step
SHOWN_CHARACTERS = 70  # of a text, in a line
TEXTS_NOT_MESSAGES = (
    "; completions are texts, as prompts are: read text, not text[0]['content'] (messages: see data.row)"
)
FORMATS = {
    "answer_tag": "<answer>{}</answer>",
    "boxed": "\\boxed{{{}}}",
    "hashes": "#### {}",
    "answer_line": "Answer: {}",
}


def main(arguments: list[str] | None = None) -> int:
    """Print what the function returns for a few rows, and return the exit code."""
    name, flags = subject_of(__doc__, arguments)
    with refuse_bad_input():
        config = tool_config(flags)
        options = {}
        if name in config.reward.options:
            options[name] = config.reward.options[name]
        reward = dataclasses.replace(
            config.reward,
            functions={name: 1.0},
            options=options,
            num_workers=1,
        )
        source = load_sources(config.data)[0]
        examples = list(itertools.islice(source.examples(), NUM_ROWS))
        if not examples:
            raise ValueError(f"no row of {source.source.path} can be used; a --dry-run of the recipe says why")
        column_names = list(examples[0].columns)
        max_tokens = config.generator.max_completion_tokens
        functions = loading.load_functions(reward, column_names, max_tokens)
        refuse_what_reads_episodes(functions[name], name, column_names)
        for example in examples:
            loading.try_built_ins(functions, example.columns)
            as_json([example.prompt, example.columns])
        if name == "code_reward":
            print(check_programs(reward.allow_without_landlock))
        is_confined = loading.is_confined(name)
        workers = loading.start_workers(loading.load_observed, reward, is_confined, max_tokens)

    with contextlib.closing(workers):
        return show(functions[name], examples, reward, workers)


def refuse_what_reads_episodes(
    function: RewardFunction,
    name: str,
    column_names: Collection[str],
) -> None:
    """Raise ValueError if the function needs what only a played episode has."""
    needed = []
    for argument, parameter in inspect.signature(function).parameters.items():
        is_given = argument in column_names or parameter.default is not parameter.empty
        if argument in EPISODE_COLUMNS and not is_given:
            needed.append(argument)
    if needed:
        raise ValueError(
            f"{name} reads {', '.join(needed)}, which only an episode of a run has; try it with train_grpo.py and "
            "--num-steps 1, whose completions.jsonl has its values"
        )


def show(
    function: RewardFunction,
    examples: list[Example],
    reward: RewardConfig,
    workers: Workers,
) -> int:
    """Print what the function, which `workers` have loaded, returns for completions of each row.

    Returns the exit code.
    """
    (name,) = reward.functions
    takes_one = loading.called_with(function) == "completion"
    calls = "one completion per call" if takes_one else "one call for each row"
    print(f"reward {name}: {len(examples)} rows, {calls}")
    needs_ids = "completion_ids" in loading.argument_names(function)
    types = []
    columns = call_columns(rollouts_of(examples[0], [""]), STEP, needs_ids)
    for column, values in columns.items():
        types.append(f"{column} ({type(values[0]).__name__})")
    print(f"columns: {', '.join(types)}")

    exit_code = 0
    for number, example in enumerate(examples, start=1):
        question = as_messages(example.prompt)[-1]["content"]
        print(f"row {number}: {_short(question)}")
        completions = some_completions(example, reward.answer_format)
        parts = [completions]
        if takes_one:
            parts = [{kind: text} for kind, text in completions.items()]
        values = {}
        printed = ""
        for part in parts:
            texts = list(part.values())
            columns = call_columns(rollouts_of(example, texts), STEP, needs_ids)
            outcome = call(workers, name, texts, columns, reward.timeout_seconds)
            seconds = outcome["seconds"] / len(texts)
            printed += outcome["printed"]
            if "failed" in outcome:
                exit_code = 1
                shown = [f"FAILS: {outcome['failed']}"] * len(texts)
            else:
                values |= zip(part, outcome["values"], strict=True)
                shown = ["None" if value is None else f"{value:g}" for value in outcome["values"]]
            for kind, text, value in zip(part, texts, shown, strict=True):
                print(f"  {kind:<9}  {_short(text):<{SHOWN_CHARACTERS}}  {seconds:8.4f} s  {value}")
        if printed:
            beginning = shorten(printed, loading.PRINTED_CHARACTERS)
            print(f"  prints: {printable(beginning).strip()}")
        if takes_one and len(values) == len(completions):
            texts = list(completions.values())
            columns = call_columns(rollouts_of(example, texts), STEP, needs_ids)
            together = call(workers, name, texts, columns, reward.timeout_seconds).get("values")
            if together is not None and together != list(values.values()):
                print("  note: it returns other values for all of these in one call, which @group_level asks for")
        if "wrong" in values and values["wrong"] == values.get("reference", ""):
            print("  note: the reference earns what a wrong answer earns")
    return exit_code


def some_completions(example: Example, answer_format: str) -> dict[str, str]:
    """Return completions of a row by what they are: the reference, a wrong answer and an empty text.

    The reference is the column `answer`, or the first answer of a list. Without it there are the texts and numbers of
    all columns except the prompt, by their names, and some text; what a model would write for a table nobody knows.
    """
    answer = example.columns.get("answer")
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if isinstance(answer, list | dict | None):
        others = {name: value for name, value in example.columns.items() if value != example.prompt}
        texts = {name: str(value) for name, value in others.items() if isinstance(value, str | int | float)}
        return texts | {"some text": "some text", "empty": ""}
    answer = str(answer)
    answer = extract_answer(answer, "hashes") or answer  # GSM8K's solutions
    number = parse_number(answer)
    wrong = f"not {answer}" if number is None else str(number + 1)  # 0.5 becomes 3/2
    template = FORMATS[answer_format]
    return {
        "reference": template.format(answer),
        "wrong": template.format(wrong),
        "empty": "",
    }


def rollouts_of(example: Example, texts: list[str]) -> list[Rollout]:
    """Return completions of a row as a run has them. Each word counts as a token, whose id is 0."""
    prompt = Prompt(0, [], example.columns, content=example.prompt)
    rollouts = []
    for text in texts:
        zeros_T = torch.zeros(len(text.split()))
        completion = Completion.of(zeros_T.long(), zeros_T, truncated=False)
        rollouts.append(Rollout(prompt, completion, text))
    return rollouts


def call(
    workers: Workers,
    name: str,
    completions: list[str],
    columns: dict[str, list],
    timeout_seconds: float,
) -> dict[str, Any]:
    """Call the function in its process. Return its outcome, see `loading.load_observed`."""
    arguments = as_json([name, completions, columns]).encode()
    seconds = timeout_seconds * len(completions)
    start = time.perf_counter()
    workers.submit([Call(0, arguments, seconds)])
    (answer,) = workers.collect()
    if "value" not in answer:  # the process was ended
        seconds = time.perf_counter() - start
        return {"failed": answer["failed"], "seconds": seconds, "printed": ""}
    outcome = answer["value"]
    if "string indices must be" in outcome.get("failed", ""):
        outcome["failed"] += TEXTS_NOT_MESSAGES
    return outcome


def _short(text: str) -> str:
    return one_line(shorten(text, SHOWN_CHARACTERS - 20))


if __name__ == "__main__":
    sys.exit(run_rank(main))
