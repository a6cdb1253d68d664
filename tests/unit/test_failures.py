"""How a rank ends: one message, in which nothing acts on a terminal."""

import os

import pytest

from grpo.run.watch import failures
from grpo.run.watch.failures import BadInput, refuse_bad_input, run_rank


@pytest.mark.parametrize("error", [ValueError, BadInput])
def test_a_message_cannot_act_on_a_terminal(error, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)  # else this process would end
    monkeypatch.setitem(failures._place, "rank", "0")
    monkeypatch.setenv("RANK", "0")

    def main():
        raise error("column 'a\x1b[2J\u202e\ud800' is missing")

    run_rank(main)
    told = capsys.readouterr().err
    assert ended == [1]
    assert told.splitlines()[-1].startswith("error: ")
    assert told.splitlines()[-1].endswith(r"column 'a\x1b[2J\u202e\ud800' is missing")
    assert "\x1b" not in told and ("Traceback" in told) == (error is ValueError)


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, FileExistsError])
def test_bad_input_is_what_a_user_can_correct(error):
    with pytest.raises(BadInput, match="^why$"), refuse_bad_input():
        raise error("why")
    with pytest.raises(KeyError), refuse_bad_input():
        raise KeyError("a bug")
