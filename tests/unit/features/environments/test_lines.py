"""Warnings about the episodes of a step."""

import pytest

from grpo.features.environments.step_lines import unread_calls_line
from grpo.types import Piece, Prompt, Rollout


def played(turns: list[dict], num_calls: int) -> Rollout:
    episode = {"turns": turns, "counts": {"calls": num_calls}}
    return Rollout(Prompt(0, [5]), 0, ((Piece.written([5]),),), text="text", episode=episode)


@pytest.mark.parametrize(
    ("num_read", "advice"),
    [
        (0, "--environment.calls fence reads 2 of them"),
        (1, "--environment.calls fence reads 2 of them"),
        (2, "show the model the form that is read, in data.system_prompt"),  # nothing would be gained
        (592, "show the model the form that is read, in data.system_prompt"),
    ],
)
def test_calls_that_are_not_read_are_told_with_a_style_that_reads_more(num_read, advice):
    fenced = {"text": 'So \x1b[2J:\n```json\n{"name": "add"}\n```', "unread": "fence"}
    tagged = {"text": "<tool>add 1</tool>", "unread": "tag"}
    rollouts = [played([tagged], 0), played([fenced, {"text": "4"}], num_read), played([fenced], 0)]
    line = unread_calls_line(rollouts)
    assert line.startswith("3 of 4 turns call a tool in a form that is not read, such as ") and line.isprintable()
    assert '```json {"name": "add"} ```\'' in line and f"beside {num_read} calls that are" in line
    assert line.endswith(advice)


def test_no_call_that_is_not_read_is_no_warning():
    assert unread_calls_line([played([], 0)]) == ""
