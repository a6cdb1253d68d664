"""The rollouts of one step in the terminal, sorted by reward: `python -m grpo.look RUN_DIR --step 40`.

Reads completions.jsonl, which a run writes every `metrics.samples_interval` steps, or with `--evaluation` the held-out
completions of evaluation.jsonl. Texts are whole; what would act on a terminal is shown as an escape (`\\x1b`).
"""

import argparse
import json
import math
import pathlib
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from grpo.text import number_or_none, printable

FILES = {False: "completions.jsonl", True: "evaluation.jsonl"}


def main(arguments: list[str] | None = None) -> None:
    """Print the chosen rollouts. Raises SystemExit with the reason if there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo.look", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR")
    parser.add_argument("--step", default="latest", metavar="N", help="steps finished, or latest (the default)")
    parser.add_argument("--num", type=int, default=10, metavar="N", help="show so many (10); 0 shows all")
    parser.add_argument("--worst", action="store_true", help="the lowest rewards first")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="only prompts that have this text")
    parser.add_argument("--evaluation", action="store_true", help="held-out completions instead")
    given = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        step, records = read_step(given.run_dir / FILES[given.evaluation], given.step)
        chosen = choose(records, given.prompt, given.worst, given.num)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    title = f"{given.run_dir} after step {step}: {len(chosen)} of {len(records)} completions"
    console.print(Text(f"{title}, {'lowest' if given.worst else 'highest'} reward first", "bold"))
    for record in chosen:
        console.print(Rule(style="dim"))
        console.print(describe(record))


def read_step(path: pathlib.Path, step: str) -> tuple[int, list[dict[str, Any]]]:
    """(step, its records) of one of the .jsonl files; `step` is a number or `latest`.

    A last line that is still being written is left out. Raises ValueError if there is no such file or step.
    """
    if step != "latest" and not step.isdecimal():
        raise ValueError(f"--step {step}: give a number, or latest")
    if not path.is_file():
        way_out = "the run evaluated nothing" if path.name == FILES[True] else "see metrics.samples_interval"
        raise ValueError(f"{path} does not exist: name the folder of a run that writes it ({way_out})")
    found: dict[int, list[dict[str, Any]]] = {}
    with open(path, encoding="utf-8") as file:
        for record in (json.loads(line) for line in file if line.endswith("\n")):
            if record["step"] not in found and step == "latest":
                found.clear()  # a file of a long run is large; one step of it is kept
            keep = found.setdefault(record["step"], [])
            if step in ("latest", str(record["step"])):
                keep.append(record)
    wanted = max(found, default=None) if step == "latest" else int(step)
    if not found.get(wanted):
        there = ", ".join(map(str, sorted(found))) or "none"
        raise ValueError(f"{path} has no completions of step {step}; there are those of: {there}")
    return wanted, found[wanted]


def choose(records: list[dict[str, Any]], prompt: str = "", worst: bool = False, num: int = 0) -> list[dict[str, Any]]:
    """The first `num` (0: all) by reward, highest first unless `worst`; one without a reward counts as lowest.

    Completions of equal reward stay in the order in which they were written. Raises ValueError if no prompt has the
    text `prompt`.
    """
    found = [record for record in records if prompt in record["prompt"]]
    if not found:
        raise ValueError(f"no prompt of the step has the text {prompt!r}")
    sign = 1 if worst else -1
    ranked = sorted(found, key=lambda record: sign * (-math.inf if record["reward"] is None else record["reward"]))
    return ranked[:num] if num else ranked


def describe(record: dict[str, Any]) -> Text:
    """Numbers in one line, then failures, prompt and completion; printable."""
    parts = [f"{name} {number_or_none(value)}" for name, value in record["rewards"].items()]
    numbers = [
        *([record["kind"]] if "kind" in record else []),
        *([f"source {record['source']}"] if "source" in record else []),
        f"row {record['row']}",
        *(f"{name} {number_or_none(record[name])}" for name in ("advantage", "mismatch") if record[name] is not None),
        f"{record['num_tokens']} tokens, finish reason {record['finish_reason']}",
    ]
    lines = [
        (f"reward {number_or_none(record['reward'])}", "bold"),
        (printable("".join(f" | {part}" for part in [*parts, *numbers])) + "\n", ""),
        *((printable(f"{name} failed: {why}\n"), "red") for name, why in record["failures"].items()),
        (printable(record["prompt"]).rstrip("\n") + "\n", "dim"),
        (printable(record["completion"]), ""),
    ]
    return Text.assemble(*lines)


if __name__ == "__main__":
    main()
