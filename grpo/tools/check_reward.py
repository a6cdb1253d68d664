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

import sys
import time
from contextlib import closing

from grpo import features
from grpo.config import change
from grpo.config.user_files import optional_arguments
from grpo.data.rows import Example, as_messages
from grpo.report.samples import ANSWER_FORMS
from grpo.rewards.answers import extract_answer, parse_number
from grpo.rewards.loading import argument_names, called_with, load_functions
from grpo.rewards.pool import EPISODE_COLUMNS, RewardPool
from grpo.text import one_line, shorten
from grpo.tools.command import first_rows, subject_of, tool_config
from grpo.types import Piece, Prompt, Rollout
from grpo.watch.failures import refuse_bad_input, run_rank

NUM_ROWS = 3
SHOWN_CHARACTERS = 50  # of a text, in a line


def main(arguments: list[str] | None = None) -> int:
    """Print what the function returns for a few rows, and return the exit code."""
    name, flags = subject_of(__doc__, arguments)
    with refuse_bad_input():
        config = tool_config(flags)
        changes = {
            "reward.functions": {name: 1.0},
            "reward.options": {name: config.reward.options.get(name, {})},
            "reward.num_workers": 1,
        }
        config = change(config, changes)
        max_tokens = config.generator.max_completion_tokens
        examples = first_rows(config, NUM_ROWS)
        function = load_functions(config.reward, examples[0].columns, max_tokens)[name]
        needed = {*argument_names(function)} - {*optional_arguments(function)}
        for column in needed & {*EPISODE_COLUMNS}:
            raise ValueError(
                f"{name} reads {column}, which only an episode of a run has; try it with train_grpo.py and "
                "--num-steps 1, whose completions.jsonl has its values"
            )
        for line in features.call(config, "before_rewards", config):
            print(line)
        with closing(RewardPool(config.reward, max_tokens)) as pool:
            codes = [show(pool, example) for example in examples]
    return max(codes)


def show(pool: RewardPool, example: Example) -> int:
    """Print what the pool's one function returns for completions of a row. Returns the exit code."""
    completions = some_completions(example, pool.config.answer_format) | {"empty": ""}
    prompt = Prompt(0, [], example.columns, content=example.prompt)
    rollouts = []
    for text in completions.values():
        zeros = [0] * max(1, len(text.split()))  # the token that ends it, if there is no word
        pieces = (Piece.written([]), Piece.sampled(zeros, zeros))
        rollouts.append(Rollout(prompt, 0, (pieces,), text=text))
    start = time.perf_counter()
    pool.submit(rollouts, len(rollouts), step=1)
    scored = pool.collect()
    seconds = time.perf_counter() - start
    kinds = [f"{column} ({type(value).__name__})" for column, value in example.columns.items()]
    print(f"row: {_short(as_messages(example.prompt)[-1]['content'])}, columns: {', '.join(kinds)}")
    code = 0
    for kind, rollout in zip(completions, scored, strict=True):
        shown = rollout.reward
        for failure in rollout.failures.values():
            shown = f"FAILS: {failure}"
            code = 1
        print(f"  {kind:<9}  {_short(rollout.text):<{SHOWN_CHARACTERS}}  {shown}")
    (function,) = pool.functions.values()
    print(f"  {seconds:.4f} s for {len(scored)} completions, a call for each {called_with(function)}")
    return code


def some_completions(example: Example, answer_format: str) -> dict[str, str]:
    """Return completions of a row by what they are: the reference and a wrong answer.

    The reference is the column `answer`, or the first answer of a list. Without it there are the texts and numbers of
    all columns except the prompt, by their names; what a model would write for a table nobody knows.
    """
    answer = example.columns.get("answer")
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if isinstance(answer, list | dict | None):
        others = {}
        for name, value in example.columns.items():
            if isinstance(value, str | int | float) and value != example.prompt:
                others[name] = str(value)
        return others
    answer = str(answer)
    answer = extract_answer(answer, "hashes") or answer  # GSM8K's solutions
    number = parse_number(answer)
    wrong = f"not {answer}" if number is None else str(number + 1)  # 0.5 becomes 3/2
    template = ANSWER_FORMS[answer_format]
    return {"reference": template.format(answer), "wrong": template.format(wrong)}


def _short(text: str) -> str:
    return one_line(shorten(text, SHOWN_CHARACTERS - 20))


if __name__ == "__main__":
    sys.exit(run_rank(main))
