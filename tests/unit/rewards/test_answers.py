"""What answers earn: each verdict of two tables; braces without end are read once.

docs/answers.md has the verdicts that users want to know, answers.md the rest. Each was judged by hand.
"""

import functools
import json
import pathlib
import re
from typing import NamedTuple

import pytest

from grpo.rewards.answers import extract_answer, parse_number
from grpo.rewards.builtin import math_reward
from tests import ROOT

GSM8K = ROOT / "../shared/data/gsm8k/train.jsonl"
FORMATS = ("answer_tag", "boxed", "hashes", "answer_line")
PAID = {"1": 1.0, "0": 0.0, "0 (1)": 0.0}


class Case(NamedTuple):
    answer_format: str
    completion: str
    reference: str
    verdict: str
    """1 is paid and 0 is not; `0 (1)` is right and not paid."""


def text_of(cell: str) -> str:
    """Return the text that a cell quotes: a line break for ⏎, and the character of ⟨200B⟩."""
    text = cell[1:-1].replace("⏎", "\n")
    return re.sub("⟨([0-9A-F]+)⟩", lambda match: chr(int(match[1], 16)), text)


def read_tables() -> dict[str, list[Case]]:
    """Return the verdicts by section: an answer in a tag and in a box, or a whole completion."""
    tables = {}
    for path in (ROOT / "docs/answers.md", pathlib.Path(__file__).with_name("answers.md")):
        for line in path.read_text().splitlines():
            if line.startswith("## "):
                cases = tables.setdefault(f"{path.name}: {line[3:]}", [])
            if not line.startswith("| `"):
                continue
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            text, reference = map(text_of, cells[:2])
            if cells[2] in FORMATS:
                cases.append(Case(cells[2], text, reference, cells[3]))
            else:
                cases.append(Case("answer_tag", f"<answer>{text}</answer>", reference, cells[2]))
                cases.append(Case("boxed", rf"so $\boxed{{{text}}}$.", reference, cells[3]))
    return {section: cases for section, cases in tables.items() if cases}


TABLES = read_tables()


@pytest.mark.parametrize("section", TABLES)
def test_each_answer_earns_what_the_table_says(section):
    others = []
    for case in TABLES[section]:
        (earned,) = math_reward([case.completion], [case.reference], answer_format=case.answer_format)
        if earned != PAID[case.verdict]:
            others.append((earned, case))
    assert not others


def test_the_readme_counts_the_verdicts():
    cases = [case for cases in TABLES.values() for case in cases]
    assert len(set(cases)) == len(cases)
    verdicts = [case.verdict for case in cases]
    told = r"(\d+) verdicts.*?(\d+) of them are wrong.*?except (\d+) "
    said = re.search(told, " ".join((ROOT / "tests/README.md").read_text().split()))
    assert said and list(map(int, said.groups())) == [len(cases), verdicts.count("0"), verdicts.count("0 (1)")]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not there")
def test_every_gsm8k_solution_is_worth_one():
    solutions = [json.loads(line)["answer"] for line in GSM8K.open()]
    assert math_reward(solutions, solutions, answer_format="hashes") == [1.0] * 7473
    assert None not in {parse_number(extract_answer(solution, "hashes")) for solution in solutions}


@pytest.mark.parametrize(
    ("given", "reference", "reward"),
    [
        ("$1,234", "48*2\n#### 1,234", 1.0),
        ("5", 5.0, 1.0),
        ("5", "  ", None),
        ("5", None, None),
        ("5", "no solution ####", None),
        ("5", r"so x is $\boxed{4}$ and $\boxed{5}$.", 0.0),
        ("4, 5", r"so x is $\boxed{4}$ and $\boxed{5}$.", 1.0),
        ("5", r"$\boxed{5}$. So it is $\boxed{5}$.", 1.0),
        ("5", r"first \boxed{4}, and from it \boxed{5}", 1.0),
    ],
)
def test_math_reward(given, reference, reward):
    assert math_reward([f"<answer>{given}</answer>"], [reference], question=["?"]) == [reward]


@pytest.mark.parametrize("reference", [["6"], [], {"value": 6}, float("nan")])
def test_a_reference_that_is_no_text_or_number_is_refused_with_the_way_out(reference):
    for text in ("", f"<answer>{reference}</answer>"):
        with pytest.raises(ValueError, match=rf"is {type(reference).__name__} .*--data.answer-column answer.0"):
            math_reward([text], [reference])


def test_partial_credit_is_for_a_wrong_answer_in_the_right_form():
    completions = ["<answer>5</answer>", "<answer>6</answer>", "6", "<answer></answer>"]
    assert math_reward(completions, ["5"] * 4, partial_credit=0.1) == [1.0, 0.1, 0.0, 0.0]


def test_tolerance_is_relative_and_for_fractions_only():
    """A hundredth of 20.5 is 0.205, of 0.1 it is 0.001. Integers are equal or not."""
    reward = functools.partial(math_reward, tolerance=0.01)
    completions = [f"<answer>{number}</answer>" for number in ("20.7", "20.71", "0.101", "0.1011", "202", "0")]
    references = ["20.5", "20.5", "0.1", "0.1", "200", "0.001"]
    assert reward(completions, references) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


# ---- Work


class Counted(str):
    """A text that counts the characters copied from it and its pieces, and ends the test beyond `limit`."""

    copied, limit = 0, 0

    def __getitem__(self, key):
        piece = super().__getitem__(key)
        Counted.copied += len(piece)
        assert Counted.copied <= Counted.limit
        return Counted(piece)


@pytest.mark.parametrize(
    ("text", "answer_format"),
    [
        ("\\boxed" + "{" * 500_000 + "42" + "}" * 500_000, "boxed"),
        ("\\boxed{" * 125_000 + "42" + "}" * 125_000, "boxed"),
        ("\\boxed{" * 125_000 + "42}", "boxed"),
        ("<answer>" * 100_000 + "41</answer>", "answer_tag"),
    ],
    ids=["braces", "boxes", "cut off", "tags"],
)
def test_a_megabyte_of_braces_is_copied_a_few_times_and_earns_nothing(text, answer_format):
    Counted.copied, Counted.limit = 0, 10 * len(text)
    assert math_reward([Counted(text)], ["42"], answer_format=answer_format) == [0.0]
    assert Counted.copied > 0
