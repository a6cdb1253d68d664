"""Rows drawn ahead in a thread: from outside, as if nothing were."""

import json
import random

import pytest

from grpo.config import SamplingConfig
from grpo.data.draw_ahead import DrawAhead
from tests.unit import test_streaming
from tests.unit.test_data import chats_of, config_of, filtered_stream, prompts_of, ten_rows, tokenizer, write_rows
from tests.unit.test_streaming import two_sources

__all__ = ["ten_rows", "tokenizer", "two_sources"]  # fixtures


def filtered(tokenizer, rows, sources):
    return filtered_stream(tokenizer, rows, filter_epochs=2, shuffle=True)


def streamed(tokenizer, rows, sources):
    return test_streaming.prompts_of(test_streaming.data_of(sources=sources, weights={"a": 2.0}), tokenizer)


def chats(tokenizer, rows, sources):
    return chats_of(config_of(rows), tokenizer)


STREAMS = {"filtered": filtered, "streamed": streamed, "chats": chats}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_calls_gives_what_a_stream_gives(kind, seed, tokenizer, ten_rows, two_sources):
    plain, ahead = (STREAMS[kind](tokenizer, ten_rows, two_sources) for _ in range(2))
    ahead, random_, num_begun = DrawAhead(ahead), random.Random(seed), 0
    for _ in range(60):
        count = random_.choice([3, 3, 4])
        if random_.random() < 0.7:
            ahead.begin(3)
            num_begun += 1
        if random_.random() < 0.3 and kind == "filtered":
            rates = {("", row): random_.choice([0.0, 0.5]) for row in random_.sample(range(10), 3)}
            plain.record(rates)
            ahead.record(rates)
        assert ahead.state_dict() == plain.state_dict() and ahead.metrics() == plain.metrics()
        if random_.random() < 0.2:  # as a checkpoint has it, in a new stream
            resumed = STREAMS[kind](tokenizer, ten_rows, two_sources)
            resumed.load_state_dict(json.loads(json.dumps(ahead.state_dict())))
            ahead = DrawAhead(resumed)
        assert ahead.draw(count) == plain.draw(count)
    assert num_begun > 30


def test_a_row_that_cannot_be_used_is_told_when_it_is_asked_for(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"question": f"add n{i}", "answer": "1"} for i in range(3)])
    with path.open("a") as file:
        file.write("no JSON\n")
    data = test_streaming.data_of(str(path), shuffle=False, checked_rows=2)
    ahead = DrawAhead(test_streaming.prompts_of(data, tokenizer))
    first = ahead.draw(2)
    ahead.begin(2)
    place = ahead.state_dict()
    with pytest.raises(ValueError, match="row 4 of .* cannot be used: not JSON"):
        ahead.draw(2)
    again = test_streaming.prompts_of(data, tokenizer)
    again.load_state_dict(place)
    assert [p.row for p in [*first, *again.draw(1)]] == [0, 1, 2]


def test_it_is_drawn_while_the_caller_does_something_else(tokenizer, ten_rows):
    stream = prompts_of(config_of(ten_rows), tokenizer, sampling=SamplingConfig())
    ahead = DrawAhead(stream)
    ahead.begin(4)
    ahead._ahead.drawn.exception(timeout=60)
    assert stream.num_drawn == 4
    stream.draw = None  # nothing is left to draw
    assert len(ahead.draw(4)) == 4


def test_rows_that_nobody_took_are_not_lost(tokenizer, ten_rows):
    ahead = DrawAhead(filtered_stream(tokenizer, ten_rows))
    ahead.begin(3)
    with pytest.raises(RuntimeError, match="3 rows that were read ahead have not been drawn"):
        ahead.begin(3)
    assert ahead.draw(3) == filtered_stream(tokenizer, ten_rows).draw(3)
