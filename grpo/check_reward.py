"""What does this reward say? A call on a few rows of the data, before a run: `python -m grpo.check_reward REWARD`.

    python -m grpo.check_reward path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_reward math_reward [RECIPE.py] [--field value ...]               or a built-in one

Three completions of each row: the reference (the row's `answer`, in `reward.answer_format`), a wrong answer in the same
format, and an empty text. Of a list of answers the first is the reference. Without the column `answer` each text and
number of the row is tried as it is, such as a column `solution`. The function is called by the pool of a run: in a
process with the same limits, environment variables and, for a built-in one, lockdown. Shown are the columns with their
types, the values and the seconds. Data and options are those of the recipe (without one: of train_grpo.py).
`num_tokens` counts words, because no tokenizer is loaded, and `completion_ids` are as many zeros. No environment plays,
so a function that reads an episode is refused. Exit code 1 if a call fails.
"""

import contextlib
import dataclasses
import inspect
import itertools
import sys
import time

import torch

from grpo import features
from grpo.data.prepare import load_sources
from grpo.data.rows import Example, as_messages
from grpo.rewards import loading
from grpo.rewards.answers import extract_answer, parse_number
from grpo.rewards.builtin import RewardFunction, group_level
from grpo.rewards.pool import EPISODE_COLUMNS, RewardPool, call_columns
from grpo.run.command_line import subject_of, tool_config
from grpo.text import one_line, shorten
from grpo.types import Completion, Prompt, Rollout
from grpo.watch.failures import refuse_bad_input, run_rank

NUM_ROWS = 3
SHOWN_CHARACTERS = 70  # of a text, in a line
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
        max_tokens = config.generator.max_completion_tokens
        options = {key: value for key, value in config.reward.options.items() if key == name}
        reward = dataclasses.replace(config.reward, functions={name: 1.0}, options=options, num_workers=1)
        source = load_sources(config.data)[0]
        examples = list(itertools.islice(source.examples(), NUM_ROWS))
        if not examples:
            raise ValueError(f"no row of {source.source.path} can be used; a --dry-run of the recipe says why")
        functions = loading.load_functions(reward, list(examples[0].columns), max_tokens)
        refuse_what_reads_episodes(functions[name], name)
        for example in examples:
            loading.try_built_ins(functions, example.columns)
        for _, before_rewards in features.turned_on(dataclasses.replace(config, reward=reward), "before_rewards"):
            print(before_rewards(config))
        with contextlib.closing(RewardPool(reward, max_tokens)) as pool:
            return show(pool, examples)


def refuse_what_reads_episodes(function: RewardFunction, name: str) -> None:
    """Raise ValueError if the function needs what only a played episode has."""
    arguments = inspect.signature(function).parameters
    needed = [
        column for column in EPISODE_COLUMNS if column in arguments and arguments[column].default is inspect._empty
    ]
    if needed:
        raise ValueError(
            f"{name} reads {', '.join(needed)}, which only an episode of a run has; try it with train_grpo.py and "
            "--num-steps 1, whose completions.jsonl has its values"
        )


def show(pool: RewardPool, examples: list[Example]) -> int:
    """Print what the pool's one function returns for completions of each row. Returns the exit code."""
    ((name, function),) = pool.functions.items()
    takes_one = loading.called_with(function) == "completion"
    calls = "one completion per call" if takes_one else "one call for each row"
    print(f"reward {name}: {len(examples)} rows, {calls}")
    needs_ids = "completion_ids" in loading.argument_names(function)
    columns = call_columns(rollouts_of(examples[0], [""]), 1, needs_ids)
    print("columns:", ", ".join(f"{column} ({type(values[0]).__name__})" for column, values in columns.items()))

    exit_code = 0
    for number, example in enumerate(examples, start=1):
        completions = some_completions(example, pool.config.answer_format)
        rollouts = rollouts_of(example, list(completions.values()))
        start = time.perf_counter()
        pool.submit(rollouts, len(rollouts), step=1)
        scored = pool.collect()
        seconds = time.perf_counter() - start
        question = as_messages(example.prompt)[-1]["content"]
        print(f"row {number}: {_short(question)}")
        for kind, rollout in zip(completions, scored, strict=True):
            shown = "None" if rollout.reward is None else f"{rollout.reward:g}"
            if name in rollout.failures:
                exit_code = 1
                shown = f"FAILS: {rollout.failures[name]}"
            print(f"  {kind:<9}  {_short(rollout.text):<{SHOWN_CHARACTERS}}  {shown}")
        print(f"  {seconds:.4f} s for {len(scored)} completions")

        values = [rollout.reward for rollout in scored]
        if "reference" in completions and values[0] is not None and values[0] == values[1]:
            print("  note: the reference earns what a wrong answer earns")
        if takes_one and not exit_code:
            pool.functions[name] = group_level(lambda **columns: [])  # the driver's: the process calls the same one
            pool.submit(rollouts, len(rollouts), step=1)
            together = [rollout.reward for rollout in pool.collect()]
            pool.functions[name] = function
            if together != values and None not in together:
                print("  note: it returns other values for all of these in one call, which @group_level asks for")
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


def _short(text: str) -> str:
    return one_line(shorten(text, SHOWN_CHARACTERS - 20))


if __name__ == "__main__":
    sys.exit(run_rank(main))
